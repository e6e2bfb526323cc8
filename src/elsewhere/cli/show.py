"""For people: words, tables and colour. Progress and remarks go to stderr, results to stdout; colour only on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from elsewhere import units
from elsewhere.clock import stamp
from elsewhere.errors import ElsewhereError
from elsewhere.paths import relative
from elsewhere.sandbox import rungs
from elsewhere.sandbox.denials import of_command

if TYPE_CHECKING:  # whoever has a result has loaded what made it
    from elsewhere.changes.compare import Changes
    from elsewhere.operations.executing import ExecResult
    from elsewhere.operations.running import RunResult
    from elsewhere.operations.sandboxes import Listing, Removal
    from elsewhere.operations.usage import Top
    from elsewhere.sandbox.access.transfer import Transferred
    from elsewhere.sandbox.keeping.commands import Outcome
    from elsewhere.sandbox.keeping.line import Process
    from elsewhere.sandbox.records.record import Record
    from elsewhere.sandbox.records.request import Request

__all__ = [
    "MARKS",
    "denial",
    "denials",
    "doctor",
    "error",
    "executed",
    "inspect",
    "listing",
    "paint",
    "plan",
    "processes",
    "remark",
    "removal",
    "requests",
    "run",
    "safe",
    "state",
    "table",
    "top",
    "transferred",
    "weaker",
]

MARKS = {"added": ("+", "32"), "modified": ("~", "33"), "deleted": ("-", "31"), "renamed": (">", "36")}
_PLAIN = ("exited", "signaled")
_STATUS = {"ok": "32", "degraded": "33", "missing": "31"}


def paint(text: str, code: str, stream: TextIO) -> str:
    wanted = stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if wanted else text


def safe(text: str) -> str:
    """A name that somebody else chose, fit for a terminal: no control character, no half letter."""
    shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in shown)


def table(rows: list[list[str]], stream: TextIO, heads: list[str] | None = None) -> None:
    everything = [heads, *rows] if heads else rows
    if not everything:
        return
    widths = [max(len(row[column]) for row in everything) for column in range(len(everything[0]))]
    for number, row in enumerate(everything):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(paint(line, "1", stream) if heads and number == 0 else line, file=stream)


def error(problem: ElsewhereError) -> None:
    sys.stdout.flush()
    print(f"elsewhere: {safe(problem.message)}", file=sys.stderr)
    lost = problem.detail.get("changes")
    for path in lost if isinstance(lost, list) else ():
        print(f"   {safe(str(path))}", file=sys.stderr)
    conflicts = problem.detail.get("conflicts")
    for one in conflicts if isinstance(conflicts, list) else ():
        print(f"   ! {safe(str(one['path']))}: {safe(one['sentence'])} ({one['reason']})", file=sys.stderr)
    if problem.hint:
        print(f"  {paint('next:', '2', sys.stderr)} {safe(problem.hint)}", file=sys.stderr)


def plan(record: Record) -> None:
    print(f"{record.id}: {record.mechanism}", file=sys.stderr)
    table([[safe(target), safe(words)] for target, words in record.plan], sys.stderr)


def weaker(record: Record) -> None:
    """One line when the sandbox is not what somebody would expect it to be."""
    if not rungs.named(record.mechanism).expected:
        print(f"elsewhere: {record.enforced['files']} ({record.mechanism}; elsewhere doctor says why)", file=sys.stderr)


def remark(text: str) -> None:
    print(f"elsewhere: {safe(text)}", file=sys.stderr)


def executed(result: ExecResult) -> None:
    """A command that ended said so itself, by its exit code; only what nobody could guess is said."""
    if result.outcome is None:
        print(
            f"elsewhere: started as process {result.pid}; elsewhere logs {result.record.id} {result.request.id}", file=sys.stderr
        )
        print(result.request.id)
        return
    if result.outcome.reason not in _PLAIN:
        print(f"elsewhere: {_ending(result.outcome)}", file=sys.stderr)
    denials(of_command(result.record, result.outcome.denied, result.request.argv))
    if result.drift is not None:
        remark(f"{result.drift.summary()}; elsewhere drift {result.record.id}")


def denials(found: Iterable[dict[str, Any]]) -> None:
    """A line for each thing that was refused, and what would allow it."""
    for one in found:
        print(paint(f"elsewhere: {denial(one)}", "33", sys.stderr), file=sys.stderr)


def denial(one: dict[str, Any]) -> str:
    count = f", {one['count']} times" if one["count"] > 1 else ""
    allow = f" → {one['how_to_allow']}" if one["how_to_allow"] else ""
    return f"denied {safe(one['what'])}{count}: {safe(one['rule'])}{safe(allow)}"


def top(found: Top, *, again: bool) -> None:
    """`again`: the screen is written over."""
    rows = [
        [
            record.id,
            record.name or "",
            _part(used.memory_bytes, record.limits.get("memory")),
            "" if used.memory_peak_bytes is None else units.format_size(used.memory_peak_bytes),
            "" if used.cpu_s is None else units.format_duration(used.cpu_s),
            "" if used.processes is None else f"{used.processes} of {record.limits.get('pids', '-'):g}",
            _part(used.disk_bytes, record.limits.get("disk")),
            str(used.denials or ""),
            safe(record.project),
        ]
        for record, used in found.running
    ]
    if again:
        print("\x1b[H\x1b[J", end="")
    table(rows, sys.stdout, ["id", "name", "memory", "peak", "cpu", "processes", "disk", "denied", "project"])
    print(
        f"{units.count(len(rows), 'sandbox', 'sandboxes')} running" + (f", {len(found.waiting)} waiting" if found.waiting else "")
    )
    sys.stdout.flush()


def _part(used: int | None, limit: float | None) -> str:
    if used is None:
        return ""
    return units.format_size(used) + ("" if limit is None else f" of {units.format_size(int(limit))}")


def state(record: Record) -> None:
    until = "" if record.expires_at is None else f", until {stamp(record.expires_at)}"
    print(f"{record.id}: {record.state}{until}{', kept' if record.kept else ''}")


def processes(found: list[Process]) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    rows = [
        [
            str(one.pid),
            one.state,
            units.format_duration(one.cpu_ticks / ticks),
            units.format_size(one.rss_kib * 1024),
            one.request or "",
            safe(one.command)[:100],
        ]
        for one in found
    ]
    table(rows, sys.stdout, ["pid", "state", "cpu", "memory", "request", "command"]) if rows else print("nothing runs")


def requests(found: list[Request]) -> None:
    rows = []
    for one in found:
        ended = one.ended_at if one.ended_at is not None else time.time()
        code = "" if one.exit_code is None else str(one.exit_code)
        what = safe(" ".join(one.argv))[:60]
        took = units.format_duration(max(0.0, ended - one.created_at))
        rows.append([one.id, one.kind, one.state, one.reason, code, took, one.sandbox, what])
    table(rows, sys.stdout, ["id", "kind", "state", "reason", "exit", "time", "sandbox", "command"]) if rows else None
    print(f"{len(rows)} request{'' if len(rows) == 1 else 's'}")


def transferred(done: Transferred) -> None:
    print(f"{units.count(done.files, 'file')}, {units.format_size(done.bytes)}")
    for one in done.left_out:
        print(f"left out {safe(one.path)}: {one.why}", file=sys.stderr)


def run(result: RunResult) -> None:
    """After a command on a terminal: how it ended, what changed, what to type next."""
    if not sys.stderr.isatty():
        if result.outcome.reason not in _PLAIN:
            print(f"elsewhere: {_ending(result.outcome)}", file=sys.stderr)
        denials(of_command(result.record, result.outcome.denied, result.argv))
        if result.kept:
            print(f"elsewhere: {result.changes.summary()}; kept as {result.record.id}", file=sys.stderr)
        return
    colour = "31" if result.outcome.exit_code else "32"
    print(paint(f"── {_ending(result.outcome)} · {result.changes.summary()}", colour, sys.stderr), file=sys.stderr)
    denials(of_command(result.record, result.outcome.denied, result.argv))
    _names(result.record.project, result.changes, sys.stderr, limit=8)
    if result.kept:
        short = result.record.id.rpartition("-")[2]
        print(
            paint(f"   elsewhere diff {short} · elsewhere shell {short} · elsewhere rm --force {short}", "2", sys.stderr),
            file=sys.stderr,
        )


def _ending(outcome: Outcome) -> str:
    took = units.format_duration(outcome.duration)
    words = {
        "exited": f"exit {outcome.exit_code}",
        "signaled": f"ended by signal {outcome.signal}",
        "timeout": "timed out",
        "lost": "the sandbox ended unexpectedly",
        "memory": f"exit {outcome.exit_code}: killed for memory",
        "disk": f"exit {outcome.exit_code}: out of disk",
        "pids": f"exit {outcome.exit_code}: no more processes",
        "killed": "ended with the sandbox",
        "expired": "the sandbox's time was over",
    }
    return f"{words.get(outcome.reason, outcome.reason)} after {took}"


def _names(project: str, found: Changes, stream: TextIO, limit: int | None) -> None:
    everything = list(found)
    for kind, path in everything[:limit]:
        mark, colour = MARKS[kind]
        print(paint(f"   {mark} {safe(relative(path, project))}", colour, stream), file=stream)
    if limit is not None and len(everything) > limit:
        print(f"   … and {len(everything) - limit} more", file=stream)


def listing(found: Listing, *, whole: bool) -> None:
    """`whole`: attempts of races that have ended are told one by one, too."""
    rows = []
    attempts: Counter[str] = Counter()
    for record in found.records:
        if not whole and record.state == "stopped" and not record.kept and {"experiment", "approach"} <= record.labels.keys():
            attempts[record.labels["experiment"]] += 1
            continue
        done = record.command["changes"] if record.command else {}
        what = ", ".join(f"{count} {kind}" for kind, count in done.items() if count)
        age = units.format_duration(max(0.0, time.time() - record.created_at))
        rows.append(
            [
                record.id,
                record.name or "",
                record.state + (" (lost)" if record.lost else "") + (" (kept)" if record.kept else ""),
                age,
                record.base["kind"],
                _memory(found, record.id),
                what,
                safe(record.project),
            ]
        )
    table(rows, sys.stdout, ["id", "name", "state", "age", "base", "memory", "changes", "project"]) if rows else None
    for experiment, count in attempts.items():
        words = f"elsewhere experiments show {experiment}, elsewhere list --label experiment={experiment}"
        print(f"{units.count(count, 'attempt')} of {experiment}: {safe(words)}")
    counts = Counter(record.state for record in found.records)
    told = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    if found.waiting:
        told += f", {len(found.waiting)} waiting for room"
    shown = f" ({told})" if told else ""
    print(f"{found.total} sandbox{'' if found.total == 1 else 'es'}{shown}")
    for sandbox_id in found.broken:
        print(f"elsewhere: the record of {sandbox_id} cannot be read; elsewhere rm --force {sandbox_id}", file=sys.stderr)
    healed(found.healed)


def _memory(found: Listing, sandbox_id: str) -> str:
    used = found.usage.get(sandbox_id)
    return "" if used is None or used.memory_bytes is None else units.format_size(used.memory_bytes)


def healed(entries: list[dict[str, str | None]]) -> None:
    for entry in entries:
        before = "" if entry["was"] is None else f", was {entry['was']}"
        after = "" if entry["is"] is None else f", is {entry['is']}"
        print(f"elsewhere: healed {entry['id']}: {entry['what']}{before}{after}", file=sys.stderr)


def inspect(document: dict[str, Any]) -> None:
    for key in (
        "id", "name", "state", "project", "path", "created_at", "ended_at", "expires_at", "base", "view", "network",
        "confinement", "limits", "usage", "command", "denials", "identity", "labels", "keeper",
    ):  # fmt: skip
        print(f"{key:12} {safe(_words(document[key]))}")
    print(f"{'drift':12} {document['drift']['summary'] if document['drift'] else '-'}")
    print(paint("enforced", "1", sys.stdout))
    table([["  " + key, safe(_words(value))] for key, value in document["enforced"].items()], sys.stdout)
    print(paint("plan", "1", sys.stdout))
    table([["  " + safe(str(step["target"])), safe(step["what"])] for step in document["plan"]], sys.stdout)
    print(paint("environment left out", "1", sys.stdout))
    print("  " + (" ".join(document["environment"]["left_out"]) or "nothing"))


def _words(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(_words(item) for item in value) or "nothing"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "nothing"
    return "-" if value is None else str(value)


def removal(result: Removal) -> None:
    for sandbox_id in result.removed:
        print(f"removed {sandbox_id}" + (" (its changes are in the archive)" if sandbox_id in result.archived else ""))
    for entry in result.skipped:
        print(f"skipped {safe(entry['id'])}: {safe(entry['reason'])}", file=sys.stderr)
    healed(result.healed)


def doctor(checks: list[Any]) -> None:
    for check in checks:
        print(f"{paint(check.status.ljust(9), _STATUS[check.status], sys.stdout)} {check.name.ljust(26)} {safe(check.detail)}")
        if check.hint:
            print(f"{'':36} → {check.hint}")
