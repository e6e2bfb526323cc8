"""A race for the eye: a table that is written over while it goes on, and the table that stays at the end.

The cursor rests on the first letter of the live table. Whatever a terminal does to lines when it is resized, the cursor stays
with the letter that it is on, so the table is redrawn by erasing from there to the end of the screen: no lines have to be counted
that may have been wrapped or cut since. Nothing is hidden and no mode is left set, so that a kill leaves a usable terminal.

Names and outputs come from sandboxes: terminal codes are taken out of them, and what is left has no control character.
"""

import os
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TextIO

from elsewhere import units
from elsewhere.cli.show import paint, safe
from elsewhere.clock import Clock, wall
from elsewhere.experiments.report import facts
from elsewhere.experiments.report.words import last_line
from elsewhere.values import dataclass

__all__ = ["RaceTable", "clipped", "width"]

_ERASE = "\r\x1b[J"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_SMALLEST = 20  # columns below which only a line that sums up is shown
_LONGEST_NAME = 28
_COLOURS = {"waiting": "2", "running": "36", "verifying": "35", "verified": "32", "not verified": "31"}
_FIRST = ("running", "verifying", "waiting", "done")  # what is shown where there is not room for all
_UNDECIDED = " "  # where others have a mark
_LEAST_WHY = 30  # columns; with less, the reason has lines of its own
_LONGEST_WORDS = 200
_UNWATCHED = 10_000  # columns where nobody looks: a line for each attempt

Attempt = dict[str, Any]


class RaceTable:
    """`update` as often as there is something new, `finish` once. As a context manager it leaves nothing of the live table
    behind, however the block ends. Where the stream is no terminal, only the end is told."""

    def __init__(self, stream: TextIO, clock: Clock = wall) -> None:
        self._stream = stream
        self._clock = clock
        self._watched = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = False

    def __enter__(self) -> "RaceTable":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def update(self, document: dict[str, Any]) -> None:
        """Draw how far everybody is, over what was drawn before."""
        if not self._watched:
            return
        columns, rows = self._size()
        # One column and one row less than there are: a full line would leave the cursor hanging at its end.
        lines = _live(document["experiment"], max(0, columns - 1), max(1, rows - 1), self._clock())
        text = "\n".join(_painted(line, self._stream) for line in lines)
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        self._stream.write(f"{_ERASE if self._drawn else ''}{_NO_WRAP}{text}{_WRAP}{up}\r")
        self._drawn = True
        self._stream.flush()

    def clear(self) -> None:
        """Take away what was drawn; whoever has something to say on the same terminal does this first."""
        if self._drawn:
            self._drawn = False
            self._stream.write(_ERASE)
            self._stream.flush()

    def finish(self, document: dict[str, Any]) -> None:
        """What came of it, to stay."""
        self.clear()
        columns = self._size()[0] if self._watched else _UNWATCHED
        for line in _final(document["experiment"], columns - 1):
            self._stream.write(f"{_painted(line, self._stream)}\n")
        self._stream.flush()

    def _size(self) -> tuple[int, int]:
        try:
            found = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return 80, 24
        return found.columns or 80, found.lines or 24


@dataclass(frozen=True, slots=True)
class _Cell:
    text: str
    colour: str = ""
    right: bool = False


_Line = Sequence[_Cell]


def _painted(line: _Line, stream: TextIO) -> str:
    return "".join(
        paint(cell.text, cell.colour, stream) if cell.colour and cell.text.strip() else cell.text for cell in line
    ).rstrip(" ")


# -- how wide text is -----------------------------------------------------------------------------------------------------------


def width(text: str) -> int:
    """In columns of a terminal: some letters take two, and marks that stand on others take none."""
    if text.isascii():
        return len(text)
    return sum(_columns(letter) for letter in text)


def clipped(text: str, columns: int) -> str:
    """As much as there is room for; what is missing is shown by a dot."""
    if width(text) <= columns:
        return text
    shown, used = [], 0
    for letter in text:
        used += _columns(letter)
        if used > columns - 1:
            break
        shown.append(letter)
    return "".join(shown) + "…" if columns > 0 else ""


def _columns(letter: str) -> int:
    if unicodedata.category(letter) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1


def _fitted(cell: _Cell, columns: int) -> _Cell:
    text = clipped(cell.text, columns)
    space = " " * (columns - width(text))
    return _Cell(space + text if cell.right else text + space, cell.colour, cell.right)


def _aligned(rows: Sequence[_Line], gap: str = "  ") -> list[list[_Cell]]:
    """Each column as wide as its widest cell; one that is empty everywhere is left out."""
    widths = [max(width(row[at].text) for row in rows) for at in range(len(rows[0]))]
    return [
        [part for cell, columns in zip(row, widths, strict=True) if columns for part in (_fitted(cell, columns), _Cell(gap))][:-1]
        for row in rows
    ]


def _length(line: _Line) -> int:
    return sum(width(cell.text) for cell in line)


# -- while it goes on -----------------------------------------------------------------------------------------------------------


def _live(experiment: dict[str, Any], columns: int, rows: int, now: float) -> list[list[_Cell]]:
    """Never more lines and columns than there are."""
    attempts = experiment.get("approaches") or []
    told = _summed(experiment, attempts)
    if rows < 3 or columns < _SMALLEST or not attempts:
        return [[_Cell(clipped(told, columns), "1")]]
    named = list(zip(attempts, facts.names(attempts), strict=True))
    room = rows - 1
    if len(named) > room:
        room -= 1
        order = sorted(range(len(named)), key=lambda at: (_FIRST.index(_state(named[at][0])), at))[:room]
        chosen = [named[at] for at in sorted(order)]
    else:
        chosen = named
    lines = _aligned([_at_work(one, name, now) for one, name in chosen])
    hidden = len(named) - len(chosen)
    rest = [[_Cell(clipped(f"… and {hidden} more", columns), "2")]] if hidden else []
    return [[_Cell(clipped(told, columns), "1")], *(_with_output(line, columns) for line in lines), *rest]


def _with_output(line: list[_Cell], columns: int) -> list[_Cell]:
    """What comes last has the room that is left, if any."""
    shown, left = [], columns
    for cell in (*line[:-1], _Cell(line[-1].text.rstrip(" "), line[-1].colour)):
        text = clipped(cell.text, left)
        shown.append(_Cell(text, cell.colour))
        left -= width(text)
        if left <= 0:
            break
    return shown


def _at_work(one: Attempt, name: str, now: float) -> list[_Cell]:
    verdict = facts.verdict(one)
    memory, took, said = _ended(one) if _state(one) == "done" else _runs_now(one, now)
    return [
        _Cell(clipped(safe(name), _LONGEST_NAME)),
        _Cell(verdict, _COLOURS.get(verdict, "")),
        _Cell(facts.took(took), right=True),
        _Cell("" if not memory else units.format_size(int(memory)), right=True),
        _Cell(safe(said), "2"),
    ]


def _ended(one: Attempt) -> tuple[float | None, float | None, str]:
    return facts.peak(one), one.get("duration_ms"), str(one.get("why") or "")


def _runs_now(one: Attempt, now: float) -> tuple[float | None, float | None, str]:
    """Memory, milliseconds and the last line: of the check that verifies it, or else of its command."""
    samples, began = one.get("samples") or [], facts.moment(one.get("started_at"))
    took = one.get("elapsed_ms", one.get("duration_ms"))
    if took is None and began is not None:
        took = max(0.0, now - began) * 1000
    memory = one.get("memory_bytes", samples[-1][1] if samples else None)
    return memory, took, last_line(str(one.get("last_line", one.get("output")) or ""))


def _state(one: Attempt) -> str:
    state = str(one.get("state", "done"))
    return state if state in _FIRST else "done"


def _summed(experiment: dict[str, Any], attempts: Sequence[Attempt]) -> str:
    """`race e6f…: 1 verified, 1 not verified, 2 running, 1 waiting`."""
    counts = Counter(facts.verdict(one) for one in attempts)
    words = ", ".join(f"{counts[word]} {word}" for word in _COLOURS if counts[word])
    return f"race {safe(str(experiment.get('id') or ''))}".rstrip() + (f": {words}" if words else "")


# -- at the end -----------------------------------------------------------------------------------------------------------------


def _final(experiment: dict[str, Any], columns: int) -> list[list[_Cell]]:
    attempts = experiment.get("approaches") or []
    won = facts.winner(experiment)
    reason = _wrapped(safe(str(experiment.get("reason") or "")), columns)
    colour = "32" if won else "31" if experiment.get("state") == "finished" else "33"
    outcome = [[_Cell(part, colour)] for part in reason if part]
    return [*(_compared(attempts, won, columns) if attempts else ()), *outcome]


def _compared(attempts: Sequence[Attempt], won: Attempt | None, columns: int) -> list[list[_Cell]]:
    heads = ["", "approach", "score", "tests", "time", "peak memory", "changed", "denials"]
    rows = [_row(one, name, won is one) for one, name in zip(attempts, facts.names(attempts), strict=True)]
    used = [at for at in range(len(heads)) if any(row[at].text for row in rows)]
    head = [_Cell(heads[at], "1", rows[0][at].right) for at in used]
    lines = _aligned([head, *([row[at] for at in used] for row in rows)])
    room = columns - max(map(_length, lines)) - 2
    reasons = [safe(_why(one)) for one in attempts]
    if room >= _LEAST_WHY:
        shown = [[*lines[0], _Cell("  why", "1")]]
        for line, reason in zip(lines[1:], reasons, strict=True):
            first, *more = _wrapped(reason, room)
            shown.append([*line, _Cell(f"  {first}", "2")])
            shown.extend([_Cell(" " * (columns - room)), _Cell(part, "2")] for part in more)
        return shown
    if room >= -2:
        shown = [lines[0]]
        for line, reason in zip(lines[1:], reasons, strict=True):
            shown.append(line)
            shown.extend(_below(reason, columns))
        return shown
    return _stacked(rows, heads, reasons, columns)


def _why(one: Attempt) -> str:
    """With the last words of the command, or of the check, that failed; one that told about its tests has said enough."""
    why, failed = str(one.get("why") or ""), one
    if not one.get("exit_code"):
        checks = one.get("checks") or ()
        failed = next((check for check in checks if check.get("required", True) and not check.get("passed")), {})
    if one.get("verified") or not failed.get("exit_code") or failed.get("reason") != "exited" or failed.get("tests"):
        return why
    said = last_line(str(failed.get("output") or ""))
    return f"{why}; the last that it said: {said[:_LONGEST_WORDS]}" if why and said and said not in why else why


def _row(one: Attempt, name: str, won: bool) -> list[_Cell]:
    peak, denied, counted = facts.peak(one), facts.denied(one), facts.tests(one)
    verdict = facts.verdict(one)
    tests = "" if counted is None else f"{counted[0]} passed" + (f", {counted[1]} failed" if counted[1] else "")
    mark = _UNDECIDED if _state(one) != "done" else "✓" if one.get("verified") else "✗"
    return [
        _Cell(f"{mark} {verdict}", _COLOURS.get(verdict, "33")),
        _Cell(clipped(safe(name), _LONGEST_NAME), "1" if won else ""),
        _Cell(safe(facts.score(one)), right=True),
        _Cell(tests, "31" if counted and counted[1] else ""),
        _Cell(facts.took(one.get("duration_ms")), right=True),
        _Cell("" if peak is None else units.format_size(peak), right=True),
        _Cell(facts.changed(one)),
        _Cell(str(denied) if denied else "", "33", right=True),
    ]


def _stacked(rows: Sequence[_Line], heads: Sequence[str], reasons: Sequence[str], columns: int) -> list[list[_Cell]]:
    """Where a table does not fit: the name, and below it what there is to tell."""
    shown = []
    for row, reason in zip(rows, reasons, strict=True):
        mark, name = _Cell(row[0].text[:1], row[0].colour), _Cell(f" {row[1].text}", row[1].colour or "1")
        shown.append([mark, _Cell(clipped(name.text, columns - 1), name.colour)])
        facts_of_it = [f"{head} {cell.text}" for head, cell in zip(heads[2:], row[2:], strict=True) if cell.text]
        if row[0].text.startswith(_UNDECIDED):
            facts_of_it.insert(0, row[0].text.strip())
        for text in (" · ".join(facts_of_it), reason):
            shown.extend(_below(text, columns))
    return shown


def _below(text: str, columns: int) -> list[list[_Cell]]:
    return [[_Cell(clipped(f"  {part}", columns), "2")] for part in _wrapped(text, columns - 2) if part]


def _wrapped(text: str, columns: int) -> list[str]:
    """Broken between words; where letters are wide, a line is cut rather than too long."""
    return [clipped(part, columns) for part in textwrap.wrap(text, max(8, columns))] or [""]
