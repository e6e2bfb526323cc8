"""Denials: what a sandbox refused, as a record that an agent can act on.

    {"kind": "path|syscall|limit|policy|device|network", "what", "rule", "how_to_allow", "count", "told_by"}

`told_by` says how we know. The kernel tells of system calls that the filter refuses, of devices that cannot be made and of limits
that it holds; our own watchdog of those that only it looks after; our proxy of hosts that no rule allows. The command's own
output names places that are hidden or read-only: about those the kernel tells nobody. And of some programs (sudo) it is known
what they cannot do. What nobody tells is listed in `docs/security.md`.

Which place is what is decided by the sandbox's record alone. A command can print any path: whoever looked it up on the host would
answer whether it is there, and could set an automount going.
"""

import os
from collections.abc import Iterable
from typing import Any

from elsewhere.linux import notifications
from elsewhere.paths import is_within
from elsewhere.sandbox import rungs
from elsewhere.sandbox.enforcement import WATCHED, amount
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.records.request import Denied

__all__ = ["from_output", "of_command"]

_LOOKED_AT = 64 << 10  # of what a command said last
_MOST = 20
_READ_ONLY = "Read-only file system"
_REFUSALS = ("Permission denied", "Operation not permitted", _READ_ONLY, "No such file or directory")
_NOT_REALITY = ("hidden", "private", "fresh", "not shown")  # how the steps of a plan begin that show something else
_FRESH_ANYWAY = ("/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp")
_GAINS = ("sudo", "doas", "pkexec")
_GAINED_NOTHING = ("no new privileges", "setuid root", "effective uid is not 0", "must be setuid")
_NO_GAIN = (
    "no program gains privileges inside a sandbox (no_new_privs)",
    "run the command without it: root's sandboxes are root inside; an ordinary user's cannot be",
)
_ENDS = "'\"`:;,()[]<>"


def of_command(record: Record, denied: Iterable[Denied], argv: Iterable[str] = (), stderr: bytes = b"") -> list[dict[str, Any]]:
    """All that is known of what one command was refused."""
    found = [_explained(one, record) for one in denied]
    return found + from_output(record, list(argv), stderr[-_LOOKED_AT:].decode("utf-8", "replace"))


def _explained(one: Denied, record: Record) -> dict[str, Any]:
    if one.kind == "limit":
        watched = str(record.enforced.get("limits", {}).get(one.what, "")).startswith(WATCHED)
        told_by = "watchdog" if watched else "kernel"
        return _denial("limit", one.what, *_limit(one.what, record), count=one.count, told_by=told_by)
    if one.kind == "network":
        return _network(one, record)
    number = notifications.number(one.what)
    kind, rule, allow = notifications.explain(-1 if number is None else number)
    return _denial(kind, one.what, rule, allow, count=one.count)


def _limit(name: str, record: Record) -> tuple[str, str]:
    value = record.limits.get(name)
    shown = "" if value is None else amount(name, value)
    more = {"memory": "2G", "disk": "4G", "pids": "1024"}.get(name, "MORE")
    return f"{name} is limited to {shown}" if shown else f"{name} is limited", f"--{name} {more}, or less work at once"


def _network(one: Denied, record: Record) -> dict[str, Any]:
    """By the rules as they are now: whoever reads it wants to know what to do."""
    from elsewhere.network import addresses, names, upstream
    from elsewhere.network.rules import Rules, decide, decide_name

    host, port, address, which = (*one.what.split("/", 3), "", "", "")[:4]
    number = int(port) if port.isdecimal() else 0
    rules = Rules.from_document({"mode": record.confinement.get("network", "allow"), **_rules(record)})
    where = names.authority(host, number or None)
    literal = names.address(address)
    called = record.id if record.keeper is not None else ""  # one that ends with its command is gone by then
    if address == upstream.UNUSABLE:
        rule, how = upstream.why_unusable(which)
    elif literal is not None:
        rule, how = addresses.refusal(host, number, literal, called)
    else:
        verdict = decide(rules, host, number, called) if number else decide_name(rules, host, called)
        rule, how = (verdict.rule, verdict.how) if not verdict.allowed else ("it was not allowed then, and is now", "try again")
    return _denial("network", where, rule, how, count=one.count, told_by="proxy")


def _rules(record: Record) -> dict[str, Any]:
    return {name: record.network[name] for name in ("allow", "deny", "presets") if name in record.network}


def from_output(record: Record, argv: list[str], said: str) -> list[dict[str, Any]]:
    """Refusals that only the command's own words show. What it says is its own: it can lie about them, to itself."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    words = [os.path.basename(word) for word in (argv[-1].split() if argv[:2] == ["/bin/sh", "-c"] else argv[:1])]
    ordinary = not rungs.named(record.mechanism).whole_machine
    for name in _GAINS:
        told = f"{name}:" in said and any(phrase in said for phrase in _GAINED_NOTHING)
        if ordinary and (name in words or told):
            found["policy", name] = _denial("policy", name, *_NO_GAIN, told_by="output" if told else "command")
    for line in said.splitlines():
        if len(found) >= _MOST:
            break
        if any(refusal in line for refusal in _REFUSALS):
            for word in line.split():
                path = word.strip(_ENDS)
                rule = _path_rule(record, path, read_only=_READ_ONLY in line) if path.startswith("/") else None
                if rule is not None and ("path", path) not in found:
                    found["path", path] = _denial("path", path, *rule, told_by="output")
    return list(found.values())


def _path_rule(record: Record, path: str, *, read_only: bool) -> tuple[str, str] | None:
    """`read_only`: that is what the kernel said about it."""
    place = os.path.normpath(path)
    if rungs.named(record.mechanism).copy and f"/{record.id}/" in place:
        return None  # it works in its own directory, which lies in what is hidden
    for hidden in record.enforced.get("hidden", []):
        if is_within(place, hidden):
            return f"{hidden} is hidden", f"--share {path}"
    at, words = _step_at(record, place)
    if read_only and words.startswith("shared"):
        return f"{at} is shared read-only", f"--share {at}:rw, if reality is meant"
    if any(is_within(place, fresh) for fresh in _FRESH_ANYWAY):
        return None
    if record.confinement.get("view") == "project" and words.startswith(_NOT_REALITY):
        return (
            "the project view shows the system, toolchains and the project only",
            f"if it is there in reality: --share {path}, or --view machine",
        )
    if read_only and words.startswith("read-only"):
        return "this place is read-only in an ordinary user's sandbox", f"--share {path}:rw, if reality is meant"
    return None


def _step_at(record: Record, place: str) -> tuple[str, str]:
    """The step of the plan that says what this place is, and where; empty on a rung without a plan."""
    found = ("", "")
    for at, words in record.plan:
        if not words.endswith("to mount on") and is_within(place, at) and len(at) >= len(found[0]):
            found = (at, words)
    return found


def _denial(kind: str, what: str, rule: str, allow: str, *, count: int = 1, told_by: str = "kernel") -> dict[str, Any]:
    return {"kind": kind, "what": what, "rule": rule, "how_to_allow": allow, "count": count, "told_by": told_by}
