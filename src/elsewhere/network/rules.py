"""Rules: which hosts and ports a sandbox may reach, and the decision about one of them, with what to type if it is no.

    none     nothing but its own loopback
    allow    what a preset, the machine's own package settings or `--allow` names, unless `--deny` names it, too
    host     the host's network, about which nothing is decided here

    example.org          exactly that name, on the ports of the web (80 and 443)
    example.org:22       exactly that name, on that port
    *.example.org        its subdomains, however deep, and not itself
    10.0.0.5:5432        that address, on that port; [::1]:5432

A denial wins, and is wide: `example.org` closes its subdomains, too, and without a port every port. Private addresses, whatever
name leads to them, need a rule that was written for them: see `addresses.py`. Not here: ports that are forwarded or published.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from functools import cache
from typing import Any

from elsewhere.errors import UsageError
from elsewhere.network import addresses, names
from elsewhere.network.presets import PRESETS
from elsewhere.settings import unknown
from elsewhere.units import brief
from elsewhere.values import dataclass

__all__ = ["DEFAULT_PRESETS", "MODES", "WEB", "Rule", "Rules", "Verdict", "decide", "decide_name", "parse", "preset"]

MODES = ("none", "allow", "host")
WEB = (80, 443)
DEFAULT_PRESETS = ("packages",)

_EXAMPLE = "example.org, *.example.org, example.org:8443 or 10.0.0.5:5432"
_TOP = frozenset("com org net edu gov mil int arpa info biz io dev app ai co me xyz cloud online site".split())
# In many countries names are sold one label further down: `*.co.uk` is half of a country.
_SOLD = frozenset("ac co com edu gob gov go gouv mil ne net nom or org".split())


@dataclass(frozen=True, slots=True)
class Rule:
    """`host` in its one spelling, `*.` in front for subdomains; `port` None: those of the web. `why`: who or what named it."""

    host: str
    port: int | None = None
    why: str = field(default="", compare=False)

    def __str__(self) -> str:
        return names.authority(self.host, self.port)

    def matches(self, host: str) -> bool:
        return host.endswith(self.host[1:]) and len(host) >= len(self.host) if self.host.startswith("*.") else host == self.host

    def closes(self, host: str) -> bool:
        """As a denial: with all that is below it."""
        return self.matches(host) or (names.address(self.host) is None and host.endswith(f".{self.host}"))

    @property
    def named(self) -> str:
        """What it was written for, so that more than public addresses were meant: one `address`, one name of a `private` network,
        one host of the `machine`'s own settings, each with its port. Empty if for none of these."""
        if self.port is None or self.host.startswith("*.") or self.why.startswith("preset "):
            return ""
        if names.address(self.host) is not None:
            return "address"
        if names.is_private(self.host):
            return "private"
        return "machine" if self.why not in ("", "--allow", "--deny") else ""


@dataclass(frozen=True, slots=True)
class Rules:
    """`machine`: what the machine's own settings name (`machine.named_by_machine`); it counts with the preset `packages`."""

    mode: str = "allow"
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    presets: tuple[str, ...] = DEFAULT_PRESETS
    machine: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError("bad_network", f"{brief(self.mode)} is no kind of network", hint=f"one of {', '.join(MODES)}")
        for name in self.presets:
            preset(name)

    def document(self) -> dict[str, Any]:
        """As it is kept and shown."""
        return {
            "mode": self.mode,
            "allow": [str(rule) for rule in self.allow],
            "deny": [str(rule) for rule in self.deny],
            "presets": list(self.presets),
            "machine": [{"rule": str(rule), "why": rule.why} for rule in self.machine],
        }

    @classmethod
    def from_document(cls, values: Mapping[str, Any]) -> "Rules":
        unexpected = values.keys() - {item.name for item in fields(cls)}
        if unexpected:
            raise unknown(min(unexpected), [item.name for item in fields(cls)])
        return cls(
            mode=values.get("mode", "allow"),
            allow=tuple(parse(rule) for rule in values.get("allow", ())),
            deny=tuple(parse(rule, deny=True) for rule in values.get("deny", ())),
            presets=tuple(values.get("presets", DEFAULT_PRESETS)),
            machine=tuple(parse(one["rule"], why=one["why"]) for one in values.get("machine", ())),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rule` says what decided, `how` what to type to be allowed. `named`: as of the rule. `denied`: a rule forbids it, also as
    an address that a name leads to."""

    allowed: bool
    rule: str
    how: str = ""
    named: str = ""
    denied: bool = False


# -- what a rule may say --------------------------------------------------------------------------------------------------------


def parse(value: object, *, deny: bool = False, why: str = "") -> Rule:
    """A rule of `DOMAIN[:PORT]`. What would open more than anybody means to open is refused, with the reason."""
    if not isinstance(value, str):
        raise _bad(value, "is no text", deny)
    text = value.strip()
    try:
        _check_form(text, deny=deny)
        host, port = names.split(text)
        wild = host.startswith("*.")
        host = names.canonical(host[2:] if wild else host)
    except names.Nonsense as wrong:
        raise _bad(value, str(wrong), deny) from None
    is_address = names.address(host) is not None
    if wild and is_address:
        raise _bad(value, "has a wildcard in front of an address", deny)
    rule = Rule(f"*.{host}" if wild else host, port, why or ("--deny" if deny else "--allow"))
    if not deny:
        _check_width(value, rule, host, wild=wild, is_address=is_address)
    return rule


def _check_form(text: str, *, deny: bool) -> None:
    if "://" in text or "/" in text or "@" in text:
        raise names.Nonsense("is not a host alone: a rule has no scheme, user or path")
    if text == "*" or text.startswith("*:"):
        if deny:
            raise names.Nonsense("would close every host; for that there is --network none")
        raise names.Nonsense("would open every host; for all of the network there is --network host")
    if "*" in text.removeprefix("*."):
        raise names.Nonsense("has a wildcard that is not a whole label in front: only *.DOMAIN is understood")


def _check_width(value: object, rule: Rule, host: str, *, wild: bool, is_address: bool) -> None:
    labels = host.split(".")
    if is_address:
        if rule.port is None:
            raise _bad(value, "is an address without a port", False, f"name the port: --allow {names.authority(host, 443)}")
        address = names.address(host)
        refused = "" if address is None else addresses.why_refused(address, named="address")
        if refused:
            raise _bad(value, f"is {refused}, to which nothing can be connected", False, "name an address that somebody has")
    elif wild and len(labels) == 1:
        raise _bad(value, "would open a whole top-level domain", False)
    elif wild and len(labels) == 2 and len(labels[1]) == 2 and labels[0] in _SOLD:
        raise _bad(value, f"would open all of {host}, under which names are sold", False)
    elif len(labels) == 1 and (rule.port is None or host in _TOP):
        raise _bad(
            value,
            "is a bare top-level domain",
            False,
            f"name a host: --allow example.{host}; one of your own network: with its port",
        )


def _bad(value: object, reason: str, deny: bool, hint: str = "") -> UsageError:
    option = "--deny" if deny else "--allow"
    return UsageError("bad_rule", f"{option} {brief(value)} {reason}", hint=hint or f"for example: {option} {_EXAMPLE}")


@cache
def preset(name: str) -> tuple[Rule, ...]:
    """The rules of a preset."""
    if name not in PRESETS:
        raise UsageError("bad_preset", f"{brief(name)} is no preset", hint=f"one of {', '.join(PRESETS)}")
    found = []
    for host, further, reason in PRESETS[name]:
        found += [Rule(host, port, f"preset {name}: {reason}") for port in (None, *further)]
    return tuple(found)


# -- the decision ---------------------------------------------------------------------------------------------------------------


def decide(rules: Rules, host: str, port: int, sandbox: str = "ID", *, known: bool = True) -> Verdict:
    """Whether this host may be reached on this port. A denial wins. `sandbox` stands in what to type; empty for one
    that is gone when somebody types. `known`: whoever asks has said that it is this port."""
    try:
        name = names.canonical(host)
    except names.Nonsense as wrong:
        return Verdict(False, f"{brief(host)} {wrong}", "write the host as a name, or its address in full")
    if rules.mode == "host":
        return Verdict(True, "the host's network")
    for rule in rules.deny:
        if rule.closes(name) and rule.port in (None, port):
            wins = f"a denial wins: elsewhere network {sandbox or 'ID'} shows the rules that hold"
            return Verdict(False, f"--deny {rule}", wins, denied=True)
    found = [rule for rule in _candidates(rules) if rule.matches(name) and _has_port(rule, port)]
    if found and rules.mode == "allow":
        return _allowed(found)
    instead = addresses.instead(name, port, sandbox)
    if instead is not None:
        return Verdict(False, *instead)
    how = _to_type(name, port, sandbox, known=known)
    if rules.mode == "none":
        return Verdict(False, "--network none", f"make the sandbox with --network allow, then: {how}")
    if addresses.gives_credentials(name):
        return Verdict(False, "nothing allows it", f"{addresses.CAREFULLY}{how}")
    return Verdict(False, "nothing allows it", how)


def decide_name(rules: Rules, host: str, sandbox: str = "ID") -> Verdict:
    """Whether this host may be reached on any port: whoever asks for its address has not said yet on which."""
    try:
        name = names.canonical(host)
    except names.Nonsense:
        name = host
    ports = {port for rule in _candidates(rules) if rule.matches(name) for port in ((rule.port,) if rule.port else WEB)}
    verdicts = [decide(rules, host, port, sandbox, known=False) for port in sorted(ports) or WEB[1:]]
    return next((verdict for verdict in verdicts if verdict.allowed), verdicts[0])


def _to_type(name: str, port: int, sandbox: str, *, known: bool) -> str:
    web = _is_web(name, port)
    if known:
        return names.to_allow(names.authority(name, None if web else port), sandbox)
    other = f"{names.authority(name, None)}:PORT"
    return f"{names.to_allow(name, sandbox)} (for the web; else --allow {other})" if web else names.to_allow(other, sandbox)


def _allowed(found: list[Rule]) -> Verdict:
    """The rule that opens the most has its say: one that was written for exactly this, before one that is only wide enough."""
    best = next((rule for rule in found if rule.named), found[0])
    shown = f"--allow {best}" if best.why in ("", "--allow") else f"{best} ({best.why})"
    return Verdict(True, shown, named=best.named)


def _candidates(rules: Rules) -> Iterable[Rule]:
    yield from rules.allow
    for name in rules.presets:
        if name == "packages":
            yield from rules.machine
        yield from preset(name)


def _has_port(rule: Rule, port: int) -> bool:
    return port in WEB if rule.port is None else rule.port == port


def _is_web(name: str, port: int) -> bool:
    return port in WEB and names.address(name) is None and "." in name
