"""The table of a race on a terminal: a real one as far as its size goes, and a strict one as far as what is written to it."""

import copy
import fcntl
import io
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elsewhere.cli.race_table import RaceTable, clipped, width
from reports import START, attempt, race

HOSTILE = "\x1b[2J\x1b[H\x1b]0;owned\x07\x1bPq\x1b\\\rrewritten\x08\x08\x9b31m\u202eend"
CODES = re.compile(r"\x1b\[(\?7[lh]|\d*A|J|[\d;]*m)")


class Screen:
    """A terminal that knows the few codes that the table may use, and refuses every other one."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[list[str]] = [[]]
        self.x = self.y = 0
        self.wraps = True
        self.scrolled = 0
        self.codes: list[str] = []

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = CODES.match(text, at)
                assert found, f"the table wrote {text[at : at + 20]!r}"
                self.codes.append(found[1])
                self._obey(found[1])
                at = found.end()
            else:
                self._put(text[at])
                at += 1

    def _obey(self, code: str) -> None:
        if code == "J":
            del self.lines[self.y + 1 :]
            self.lines[self.y] = self.lines[self.y][: self.x]
        elif code.endswith("A"):
            assert int(code[:-1] or 1) <= self.y, "above the screen"
            self.y -= int(code[:-1] or 1)
        elif code.startswith("?7"):
            self.wraps = code == "?7h"

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self.x = 0
        elif letter == "\n":
            self.y += 1
            if self.y == len(self.lines):
                self.lines.append([])
            if len(self.lines) > self.rows:
                del self.lines[0]
                self.y -= 1
                self.scrolled += 1
        else:
            assert letter.isprintable(), f"the table wrote {letter!r}"
            line = self.lines[self.y]
            line.extend(" " * (self.x - len(line)))
            line[self.x : self.x + 1] = [letter]
            self.x += 1
            assert width("".join(line)) < self.columns, f"a line fills the terminal: {''.join(line)!r}"

    def shown(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.lines]


class Terminal:
    """A pseudo terminal whose other end is a `Screen`."""

    def __init__(self, columns: int, rows: int) -> None:
        self.master, slave = os.openpty()
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115  (closed by the fixture)
        self.screen = Screen(columns, rows)
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.columns, self.screen.rows = columns, rows

    def read(self) -> list[str]:
        self.stream.flush()
        os.set_blocking(self.master, False)
        said = b""
        while True:
            try:
                said += os.read(self.master, 1 << 16)
            except BlockingIOError:
                break
        self.screen.feed(said.decode())
        return self.screen.shown()

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Terminal]]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    made: list[Terminal] = []

    def make(columns: int = 100, rows: int = 24) -> Terminal:
        made.append(Terminal(columns, rows))
        return made[-1]

    yield make
    for one in made:
        one.close()


def running(name: str, **more: Any) -> dict[str, Any]:
    about = {
        "state": "running",
        "verified": False,
        "rank": None,
        "score": None,
        "duration_ms": None,
        "started_at": START,
        "ended_at": None,
    }
    return attempt(name, **{**about, "checks": [], "why": "", "samples": [[1, 3 << 20, 5], [2, 7 << 20, 9]], **more})


def going_on(count: int = 3) -> dict[str, Any]:
    waiting = [running(f"later{number}", state="waiting", started_at=None, samples=[], output="") for number in range(count - 2)]
    return race(attempt("first"), running("second", output="one\n\x1b[32mtwo\x1b[0m\n\n"), *waiting, state="running", reason="")


# -- live -----------------------------------------------------------------------------------------------------------------------


def test_the_live_table_says_state_time_memory_and_the_last_line(terminal: Callable[..., Terminal]) -> None:
    there = terminal()
    RaceTable(there.stream, lambda: START + 12).update(going_on())
    head, first, second, third = there.read()
    assert head == "race exp-7c1d20: 1 waiting, 1 running, 1 verified"
    assert re.fullmatch(r"first +verified +[\d.]+ s +[\d.]+ MiB +all checks passed", first)
    assert re.fullmatch(r"second +running +12.0 s +7.0 MiB +two", second)
    assert third == "later0  waiting"


def test_while_it_is_verified_the_live_table_is_about_the_check(terminal: Callable[..., Terminal]) -> None:
    there = terminal()
    command = {"duration_ms": 90_000, "output": "said by the command"}
    check = {"elapsed_ms": 4_000, "memory_bytes": 9 << 20, "last_line": "\x1b[1mtest 3 of 8\x1b[0m"}
    told = running("told", state="verifying", **command, **check)
    silent = running("silent", state="verifying", **command, elapsed_ms=2_000, memory_bytes=None, last_line="")
    RaceTable(there.stream, lambda: START + 500).update(race(told, silent, state="running", reason=""))
    _, first, second = there.read()
    assert re.fullmatch(r"told +verifying +4.0 s +9.0 MiB +test 3 of 8", first)
    assert re.fullmatch(r"silent +verifying +2.0 s", second)


def test_it_is_written_over_and_leaves_nothing_behind(terminal: Callable[..., Terminal]) -> None:
    there = terminal()
    there.screen.feed("$ elsewhere race\r\n")
    with RaceTable(there.stream, lambda: START) as table:
        for count in (5, 9, 3):
            table.update(going_on(count))
            assert len(there.read()) == 2 + count
        assert there.screen.scrolled == 0
    assert there.read() == ["$ elsewhere race", ""]
    assert (there.screen.x, there.screen.y, there.screen.wraps) == (0, 1, True)


def test_at_the_bottom_of_the_screen_it_scrolls_once(terminal: Callable[..., Terminal]) -> None:
    there = terminal(80, 10)
    there.screen.feed("above\r\n" * 9)
    table = RaceTable(there.stream, lambda: START)
    for _ in range(4):
        table.update(going_on(5))
        there.read()
    assert there.screen.scrolled == 5
    assert there.screen.shown()[:5] == ["above"] * 4 + ["race exp-7c1d20: 3 waiting, 1 running, 1 verified"]


def test_where_there_is_not_room_for_all_those_at_work_are_shown(terminal: Callable[..., Terminal]) -> None:
    there = terminal(80, 6)
    document = going_on(20)
    document["experiment"]["approaches"].append(running("last"))
    RaceTable(there.stream, lambda: START).update(document)
    lines = there.read()
    assert len(lines) == 5
    assert [line.split()[0] for line in lines] == ["race", "second", "later0", "last", "…"]
    assert lines[-1] == "… and 18 more"


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (2, 2), (5, 3), (19, 24), (20, 2), (20, 3), (21, 4), (40, 5), (300, 100)])
def test_it_fits_every_terminal(columns: int, rows: int, terminal: Callable[..., Terminal]) -> None:
    there = terminal(columns, rows)
    table = RaceTable(there.stream, lambda: START)
    for count in (3, 30):
        document = going_on(count)
        document["experiment"]["approaches"][1].update(name="名前" * 30, output="出力" * 500)
        table.update(document)
        assert len(there.read()) <= max(1, rows - 1)
    assert there.screen.scrolled == 0


def test_a_terminal_that_is_resized_is_drawn_anew_in_its_new_size(terminal: Callable[..., Terminal]) -> None:
    there = terminal(120, 30)
    there.screen.feed("above\r\n")
    table = RaceTable(there.stream, lambda: START)
    for columns, rows in ((120, 30), (50, 8), (200, 40), (30, 30)):
        there.resize(columns, rows)
        there.screen.lines[1:] = [[]]  # whatever the terminal made of it: the cursor is where the table began
        table.update(going_on(6))
        lines = there.read()
        assert lines[0] == "above"
        assert len(lines) == 1 + min(7, rows - 1)
        assert there.screen.y == 1
    table.clear()
    assert there.read() == ["above", ""]


def test_what_a_sandbox_says_cannot_write_on_the_terminal(terminal: Callable[..., Terminal]) -> None:
    there = terminal(200)
    document = race(
        running(HOSTILE, output=f"said {HOSTILE}"),
        attempt(f"{HOSTILE}2", why=HOSTILE, score=HOSTILE),
        id=HOSTILE,
        reason=HOSTILE,
        winner=f"{HOSTILE}2",
    )
    table = RaceTable(there.stream, lambda: START)
    table.update(document)  # the screen refuses what it does not know
    there.read()
    table.finish(document)
    lines = there.read()
    assert any("rewritten" in line for line in lines)
    assert set(there.screen.codes) <= {"J", "?7l", "?7h", "2A", "0m", "1m", "2m", "31m", "32m", "33m", "35m", "36m"}


def test_colour_is_there_unless_nobody_wants_it(terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    coloured, plain = terminal(), terminal()
    RaceTable(coloured.stream, lambda: START).update(going_on())
    monkeypatch.setenv("NO_COLOR", "1")
    RaceTable(plain.stream, lambda: START).update(going_on())
    assert coloured.read() == plain.read()
    assert "36m" in coloured.screen.codes
    assert not [code for code in plain.screen.codes if code.endswith("m")]


def test_where_nobody_watches_only_the_end_is_told(monkeypatch: pytest.MonkeyPatch, terminal: Callable[..., Terminal]) -> None:
    piped = io.StringIO()
    table = RaceTable(piped)
    table.update(going_on())
    assert piped.getvalue() == ""
    table.finish(race(attempt("a", why="word " * 100)))
    assert "\x1b" not in piped.getvalue()
    assert len(piped.getvalue().splitlines()) == 3  # heads, one line for one attempt, the reason
    monkeypatch.setenv("TERM", "dumb")
    there = terminal()
    RaceTable(there.stream).update(going_on())
    assert there.read() == [""]


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """A whole process, interrupted while it draws."""
    code = (
        "import sys, time\n"
        "from reports import race, attempt\n"
        "from elsewhere.cli.race_table import RaceTable\n"
        "try:\n"
        "    with RaceTable(sys.stdout) as table:\n"
        "        while True:\n"
        "            table.update(race(attempt('a'), attempt('b')))\n"
        "            time.sleep(0.01)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    master, slave = os.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    places = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")])
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm", "PYTHONPATH": places, "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=tmp_path
    )
    os.close(slave)
    said = b""
    try:
        while said.count(b"race exp") < 5:
            said += os.read(master, 1 << 16)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                piece = os.read(master, 1 << 16)
            except OSError:  # the other end is closed
                break
            said += piece
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    screen = Screen(80, 24)
    screen.feed(said.decode())
    assert screen.shown() == ["interrupted", ""]
    assert screen.wraps


# -- at the end -----------------------------------------------------------------------------------------------------------------


FINISHED = race(
    attempt("fsum", score=96.2, duration_ms=5_900, peak_memory_bytes=150 << 20, denials=[{"what": "x", "count": 3}]),
    attempt("round", verified=False, rank=2, duration_ms=61_000, peak_memory_bytes=20 << 20),
    winner="fsum",
)


def test_the_final_table_says_everything(terminal: Callable[..., Terminal]) -> None:
    there = terminal(180)
    RaceTable(there.stream).finish(FINISHED)
    heads, first, second, reason, rest = there.read()
    assert re.split(r" {2,}", heads.strip()) == ["approach", "score", "tests", "time", "peak memory", "changed", "denials", "why"]
    minus = "\N{MINUS SIGN}3"
    expected = ["✓ verified", "fsum", "96.2", "14 passed", "5.9 s", "150.0 MiB", f"1 file, +4 {minus}", "3", "all checks passed"]
    assert re.split(r" {2,}", first) == expected
    expected = ["✗ not verified", "round", "12 passed, 2 failed", "1 min 1 s", "20.0 MiB", f"1 file, +4 {minus}"]
    assert re.split(r" {2,}", second)[:-1] == expected
    assert second.endswith("the check 'tests' ended with 1: 2 of 14 tests failed")
    assert reason == FINISHED["experiment"]["reason"]
    assert rest == ""


def test_what_failed_has_the_last_word(terminal: Callable[..., Terminal]) -> None:
    """Its command, or a check that told nothing about its tests; not what was good."""
    there = terminal(400)
    command = attempt("a", verified=False, exit_code=3, why="its command ended with 3", output="one\nno such file\n\n", checks=[])
    check = attempt("b", verified=False, why="the check failed: ended with 1")
    check["checks"][0] |= {"tests": None, "output": "compiling\n\x1b[31msyntax error\x1b[0m\n"}
    RaceTable(there.stream).finish(race(command, check, attempt("c")))
    said = there.read()
    assert said[1].endswith("its command ended with 3; the last that it said: no such file")
    assert said[2].endswith("ended with 1; the last that it said: syntax error")
    assert said[3].endswith("all checks passed")


@pytest.mark.parametrize("columns", [10, 24, 40, 60, 80, 100, 110, 120, 140, 180])
def test_the_final_table_loses_nothing_where_it_is_narrow(columns: int, terminal: Callable[..., Terminal]) -> None:
    there = terminal(columns, 200)
    RaceTable(there.stream).finish(FINISHED)
    said = "".join("".join(there.read()).split())
    for text in (
        "fsum",
        "round",
        "96.2",
        "2failed",
        "1min1s",
        "150.0MiB",
        "allcheckspassed",
        "endedwith1:2of14testsfailed",
        "ishigherthan88.1",
    ):
        assert text in said or columns < 24, text


def test_the_final_table_replaces_the_live_one(terminal: Callable[..., Terminal]) -> None:
    there = terminal(180)
    table = RaceTable(there.stream, lambda: START)
    table.update(going_on(9))
    there.read()
    table.finish(FINISHED)
    assert len(there.read()) == 5
    assert "waiting" not in "".join(there.screen.shown())


def test_a_race_that_is_not_over_can_be_shown(terminal: Callable[..., Terminal]) -> None:
    there = terminal(120)
    document = copy.deepcopy(going_on(4))
    RaceTable(there.stream).finish(document)
    assert "running" in "".join(there.read())
    RaceTable(there.stream).finish(race(state="interrupted", reason="it was interrupted"))
    assert there.read()[-2] == "it was interrupted"


@pytest.mark.parametrize("columns", [24, 120])
def test_what_is_not_decided_has_its_state_and_no_mark(columns: int, terminal: Callable[..., Terminal]) -> None:
    there = terminal(columns, 100)
    RaceTable(there.stream).finish(race(running("second"), running("later", state="waiting"), state="running", reason=""))
    lines = there.read()
    assert not any(mark in line for line in lines for mark in "✓✗")
    assert [line.split()[0] for line in lines if "running" in line or "waiting" in line] == ["running", "waiting"]


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("日本語", 6, "日本語"),
        ("日本語", 5, "日本…"),
        ("日本語", 4, "日…"),
        ("a\u0301bc", 3, "a\u0301bc"),
        ("abc", 0, ""),
        ("abc", 1, "…"),
    ],
)
def test_text_is_cut_by_how_wide_it_is(text: str, columns: int, shown: str) -> None:
    assert clipped(text, columns) == shown
    assert width(shown) <= columns
