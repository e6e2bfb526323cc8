"""What a sandbox may reach, as it is asked for: checked, and in the form in which its record has it.

    {"allow": ["example.org:8443"], "deny": [], "presets": ["packages"], "forward": ["5432"], "publish": ["8080:80"]}

Not here: what the rules mean (`network/rules.py`), and who holds a sandbox to them (`sandbox/networking/`).
"""

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from elsewhere.errors import Refused, UsageError
from elsewhere.meeting import default_state
from elsewhere.operations.settings import Resolved
from elsewhere.sandbox.networking.hostsockets import ENGINE_SOCKETS, why_refused
from elsewhere.units import brief

if TYPE_CHECKING:
    from elsewhere.network.ports import Forward

__all__ = ["ENGINE_SOCKETS", "check_added", "checked", "of_settings", "presets", "remark", "spelled"]

_DEFAULT = ("packages",)  # nobody has to ask for it
_NONE = "none"  # forgets the presets before it
_LOOPBACK = ("127.0.0.1:", "[::1]:")  # for which no program asks the proxy


def of_settings(resolved: Resolved, needed: Iterable[str] = (), writable: Iterable[str] = ()) -> dict[str, list[str]]:
    """`needed` are rules that nobody wrote down as such: where no rules count, they do not either; `writable` as in
    `checked`."""
    asked = {name: list(resolved[f"network.{name}"]) for name in ("allow", "deny", "forward", "publish")}
    if resolved["sandbox.network"] == "allow":
        asked["allow"] += needed
    from_here = "command line" in resolved.values["network.deny"].source  # what a file denies as well is in nobody's way
    check_added(asked["allow"], asked["deny"][-1:] if from_here else (), resolved["sandbox.network"])
    return checked({**asked, "presets": presets(resolved["network.preset"])}, resolved["sandbox.network"], writable)


def check_added(allow: Iterable[str], deny: Iterable[str], mode: str, sandbox: str = "") -> None:
    """Raises what must not be asked for any more, and may be in a record of before. `sandbox` stands in what to type."""
    for text in deny:
        if mode == "none":
            raise _useless("deny", text, mode)
    for text in allow if mode == "allow" else ():
        _check_loopback(text, sandbox)


def _check_loopback(text: str, sandbox: str) -> None:
    """By its name it leads to the sandbox itself, for every program, whatever is allowed. Its address may be what an allowed name
    leads to."""
    from elsewhere.network import names

    host, _, port = text.strip().partition(":")
    name = host.lower().removesuffix(".")
    if names.address(name) is None and names.is_local(name):
        service = f"--forward {port if port.isdecimal() else 'PORT'}"
        raise UsageError(
            "bad_rule",
            f"--allow {brief(text)} opens nothing: inside, {name} is the sandbox itself",
            hint=f"to have the host's service there: {f'elsewhere network {sandbox} {service}' if sandbox else service}",
        )


def remark(rules: Mapping[str, Iterable[str]], sandbox: str = "") -> str:
    """That a rule is hardly what somebody meant; empty if there is nothing to be said."""
    allow = [text for text in rules.get("allow", ()) if text.startswith(_LOOPBACK)]
    if not allow:
        return ""
    from elsewhere.network import names, ports

    inside = {ports.Forward.parse(text).inside for text in rules.get("forward", ())}
    for host, port in map(names.split, allow):
        if port is not None and port not in inside:
            where = names.authority(host, port)
            return (
                f"--allow {where} counts for names that lead there; inside, {host} is the sandbox itself, and"
                f" {names.to_forward(host, port, sandbox)} brings the host's service in"
            )
    return ""


def presets(words: Iterable[str]) -> list[str]:
    found: list[str] = []
    for word in words:
        found = [] if word == _NONE else [*found, word]
    return found


def checked(asked: dict[str, list[str]], mode: str, writable: Iterable[str] = ()) -> dict[str, list[str]]:
    """In their one spelling. Raises what is wrong with them, or with the mode that they are to go with. `writable` are the places
    of reality in which the sandbox may write."""
    plain = {"allow": [], "deny": [], "presets": [*_DEFAULT], "forward": [], "publish": []}
    if asked == plain:
        return asked  # nothing has to be loaded for that
    from elsewhere.network import ports, rules

    found = {
        "allow": _once(rules.parse(text) for text in asked["allow"]),
        "deny": _once(rules.parse(text, deny=True) for text in asked["deny"]),
        "presets": list(rules.Rules(presets=tuple(dict.fromkeys(asked["presets"]))).presets),
        "forward": _once(_forward(text, tuple(writable)) for text in asked["forward"]),
        "publish": _once(ports.Publish.parse(text) for text in asked["publish"]),
    }
    _check_mode(found, mode)
    return found


def spelled(kind: str, text: str) -> str | None:
    """A rule, preset, forward or published port as a record has it; None if it can be none."""
    from elsewhere.network import ports, rules

    try:
        if kind in ("allow", "deny"):
            return str(rules.parse(text, deny=kind == "deny"))
        if kind == "forward":
            return str(_resolved(ports.Forward.parse(text)))
        return str(ports.Publish.parse(text)) if kind == "publish" else text
    except UsageError:
        return None


def _forward(text: str, writable: tuple[str, ...]) -> "Forward":
    """A path is resolved now and never again: nobody who can put a link there chooses where it leads."""
    from elsewhere.network import ports

    found = ports.Forward.parse(text)
    if not found.path:
        return found
    resolved = _resolved(found)
    for path in (found.path, resolved.path):
        why, hint = why_refused(path, os.path.realpath(default_state()), writable)
        if why:
            raise Refused("forward_refused", f"--forward {found}: {why}", hint=hint)
    return resolved


def _resolved(found: "Forward") -> "Forward":
    place = os.path.realpath(found.path) if found.path else ""
    return found if place == found.path else type(found).parse(f"unix:{place}")


def _once(found: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(map(str, found)))


def _check_mode(found: dict[str, list[str]], mode: str) -> None:
    asked = {**found, "preset": [name for name in found["presets"] if name not in _DEFAULT]}
    useless: tuple[str, ...] = ()
    if mode == "host":
        useless = ("allow", "deny", "preset", "forward", "publish")
    elif mode == "none":
        useless = ("allow", "preset")
    for name in useless:
        if asked[name]:
            raise _useless(name, asked[name][0], mode)


def _useless(name: str, text: str, mode: str) -> UsageError:
    what = "the host's network" if mode == "host" else "no network"
    return UsageError(
        "bad_network",
        f"--{name} {text} does nothing with {what}: --network {mode}",
        hint=f"leave --{name} out, or choose --network allow",
    )
