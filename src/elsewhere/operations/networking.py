"""`network`: what a sandbox may reach, shown and changed while it runs; and its forwards and published ports, once they stand."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

from elsewhere.errors import Broken, ElsewhereError, NotFound, UsageError
from elsewhere.operations import reach
from elsewhere.operations.admission import Pause
from elsewhere.operations.projects import refuse_inside
from elsewhere.sandbox.confinement import Confinement
from elsewhere.sandbox.networking import calling
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Network", "change", "open_ports", "reopen_ports", "show"]

_KINDS = ("allow", "deny", "presets", "forward", "publish")
_LOOK_S = 10.0  # for what is only shown
_MOMENT_S = 1.0  # for one that has not answered before


@dataclass(frozen=True, slots=True)
class Network:
    """`published` says which port of the host leads to which inside; `machine` is what this machine's own settings add to the
    preset `packages`, with the place that names it; `trouble` is why a forward or a published port does not work, and `proxy`
    where the host's own proxy is, if that is used. `ended`: connections that a change has ended."""

    record: Record
    published: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    machine: list[dict[str, str]] = field(default_factory=list)
    ended: int = 0
    trouble: list[dict[str, str]] = field(default_factory=list)
    proxy: list[str] = field(default_factory=list)

    @property
    def mode(self) -> str:
        return str(self.record.confinement.get("network", "host"))


def show(wanted: str, pause: Pause = time.sleep) -> Network:
    state = State.open()
    return _shown(state, record.load(state, record.find(state, wanted)), pause)


def change(
    wanted: str,
    *,
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    preset: Iterable[str] = (),
    forward: Iterable[str] = (),
    publish: Iterable[str] = (),
    forget: Iterable[str] = (),
    pause: Pause = time.sleep,
) -> Network:
    """Holds at once, for connections that are there already, too. If a port that is new in it cannot be had, nothing is changed;
    those that could not be had before are in no rule's way."""
    refuse_inside()
    state = State.open()
    with record.exclusive(state, record.find(state, wanted)) as found:
        mode = found.confinement.get("network", "host")
        before = {kind: list(found.network.get(kind, ())) for kind in _KINDS}
        after = _without(before, list(forget), found.id)
        allow, deny = list(allow), list(deny)
        for kind, more in (("allow", allow), ("deny", deny), ("forward", forward), ("publish", publish)):
            after[kind] += more
        after["presets"] = reach.presets([*after["presets"], *preset])
        if mode == "host":
            raise UsageError(
                "bad_network",
                f"the sandbox {found.id!r} has the host's network, which no rule holds back",
                hint="make one with --network allow",
            )
        reach.check_added(allow, deny, mode, found.id)
        checked = reach.checked(after, mode, Confinement.unpacked(found.confinement).writable)
        added = tuple(f"--{kind} {text}" for kind in ("forward", "publish") for text in checked[kind] if text not in before[kind])
        forwarded = [*dict.fromkeys((*found.network.get("forwarded", ()), *before["forward"]))]
        earlier, found.network = found.network, {**found.network, **checked, "forwarded": forwarded}
        record.save(found, state.sandbox(found.id))
        if found.state != "running":
            return _shown(state, found, pause)
        try:
            _, _, _, ended = calling.ask(state, ("changed", found.id, added), pause=pause)
        except BaseException:
            if added:
                found.network = earlier
                record.save(found, state.sandbox(found.id))
                with contextlib.suppress(ElsewhereError, OSError):  # what happened first is what is told
                    calling.ask(state, ("changed", found.id), _MOMENT_S)
            raise
    return _shown(state, found, pause, ended)


def _without(before: dict[str, list[str]], forget: list[str], sandbox_id: str) -> dict[str, list[str]]:
    after = {kind: list(texts) for kind, texts in before.items()}
    for text in forget:
        found = _meant(before, text)
        if not found:
            known = {known for kind in _KINDS for known in before[kind]}
            raise NotFound(
                "no_such_rule",
                f"the sandbox {sandbox_id!r} has no rule, forward or published port {text!r}",
                hint=f"one of: {', '.join(sorted(known)) or 'there is none'}",
            )
        if len(found) > 1:
            names = [kind.removesuffix("s") for kind in found]
            raise UsageError(
                "rule_ambiguous",
                f"{text!r} is {' and '.join(names)} of the sandbox {sandbox_id!r}",
                hint=" or ".join(f"--forget {name}:{text}" for name in names),
            )
        for kind, known_text in found.items():
            after[kind] = [one for one in after[kind] if one != known_text]
    return after


def _meant(before: dict[str, list[str]], text: str) -> dict[str, str]:
    """What is to be forgotten, by its kind. KIND:TEXT names that, unless all of it is something by itself: a host may have the
    name of a kind."""
    found = {kind: known for kind in _KINDS if (known := reach.spelled(kind, text)) in before[kind]}
    word, colon, rest = text.partition(":")
    for kind in _KINDS:
        if colon and not found and word in (kind, kind.removesuffix("s")):
            known = reach.spelled(kind, rest)
            return {kind: known} if known in before[kind] else {}
    return found


def _shown(state: State, found: Record, pause: Pause, ended: int = 0) -> Network:
    """Of one that runs, what is true of it; of others, what would be if they were started from here."""
    counts = found.confinement.get("network") == "allow" and "packages" in found.network.get("presets", ())
    if found.state == "running" and found.confinement.get("network", "host") != "host":
        try:
            _, about = calling.ask(state, ("about", found.id), _LOOK_S, pause=pause)
        except Broken as error:  # what was asked for is known all the same
            why = f"{error.message}; {error.hint}" if error.hint else error.message
            return Network(found, ended=ended, trouble=[{"what": "the network service", "why": why}])
        return Network(
            found,
            [{key: value for key, value in one.items() if key != "trouble"} for one in about["published"]],
            about["connections"],
            about["machine"] if counts else [],
            ended,
            about["trouble"],
            about["proxy"] if found.confinement.get("network") == "allow" else [],
        )
    machine: list[dict[str, str]] = []
    if counts:
        from elsewhere.network.machine import named_by_machine

        machine = [{"rule": str(rule), "why": rule.why} for rule in named_by_machine(found.home, os.environ)]
    return Network(found, machine=machine, ended=ended)


def _needs_ports(found: Record) -> bool:
    return bool(found.network.get("forward") or found.network.get("publish"))


def open_ports(state: State, found: Record, tell: Callable[[str], None] | None = None, pause: Pause = time.sleep) -> None:
    """Its forwards and published ports, if it has any, stand when this returns."""
    if not _needs_ports(found):
        return
    _, published, _ = calling.ask(state, ("open", found.id), pause=pause)
    if tell is not None:
        for one in published:
            tell(f"published 127.0.0.1:{one['port']} → {one['inside']}")


def reopen_ports(
    state: State,
    found: Record,
    tell: Callable[[str], None] | None = None,
    pause: Pause = time.sleep,
    *,
    needed: bool,
) -> None:
    """Of one that was made before. What cannot be had is told, and in nobody's way; unless it is `needed`."""
    try:
        open_ports(state, found, pause=pause)
    except ElsewhereError as error:
        if "publish" in error.detail:
            inside = error.detail["inside"]
            error.hint = f"elsewhere network {found.id} --forget {error.detail['publish']} --publish 0:{inside}"
        if needed:
            raise
        if tell is not None:
            tell(f"{error.message}; {error.hint}" if error.hint else error.message)
