"""Whether an attempt is verified, and with which score.

    fork of the template ─► what a promotion would move of it, without what could fake a check ─► check
    fork of the template ─► the same ─► the next check, or the score

Each check and the score have a fork of their own, in which nothing else has run: what the approach did outside of the project, or
to what git ignores, is not there, and neither is what the code under test does while it is tested. What is promoted is what was
verified. `verify_from_approach` verifies in forks of what its command left instead, with everything as it is there.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from elsewhere import units
from elsewhere.errors import ElsewhereError
from elsewhere.experiments import counting
from elsewhere.experiments.model import Check
from elsewhere.experiments.records import Attempt
from elsewhere.operations.diffing import difference
from elsewhere.operations.files import files_of
from elsewhere.operations.racing.commands import Ended, run_line
from elsewhere.operations.racing.course import END, Course, Scorer, Unwanted, call, fitted, forked, inside, thrown_away, watcher
from elsewhere.operations.racing.guard import brought, guarded, opposite, refuse_unclean, rewritten
from elsewhere.promotion import selecting
from elsewhere.sandbox.live import Live

__all__ = ["STAYS", "verify"]

STAYS = {"outside": "outside of the project", "ignored": "ignored by git", "git": "of git itself"}

_LINGERING_S = 1.0  # as long as what a check has started may take to go after it
_BASE_S, _BASE_TIMES = 60.0, 10  # as long as a check may take in the base: a mistake that is to be mended may make it hang


def verify(course: Course, one: Attempt) -> None:
    one.state, one.checks, one.score, one.scored = "verifying", [], None, 0
    course.experiment.save()
    race = course.race
    if not race.checks and race.score is None and course.scorer is None:
        one.verified, one.why = True, one.why or "its command ended with 0, and there was nothing else to verify"
        return
    failure = _failure(course, one)
    if failure is None:
        one.verified = True
        one.why = "verified" + (f", though {one.why}" if one.why else "")
    elif any(one.stays.values()) and not race.verify_from_approach and _passes_whole(course, one):
        parts = ", ".join(f"{one.stays[sort]} {words}" for sort, words in STAYS.items() if one.stays[sort])
        changes = units.count(sum(one.stays.values()), "change")
        moved = f"that a promotion does not move ({parts}; --verify-from-approach counts them)"
        one.why = f"verifies only with {changes} {moved}; without: {failure}"
    else:
        one.why = f"{failure}{_and(one.why)}"
    if told := one.left_behind:
        named = told[0] if len(told) == 1 else "PATH"
        own = "" if one.verified else f"; --verify-files '!{named}' leaves it to the approach"
        one.why += f" ({_told(told)} as in the base for that{own})"


def _failure(course: Course, one: Attempt) -> str | None:
    """Why it is not verified."""
    race, kind = course.race, "whole" if course.race.verify_from_approach else "clean"
    for number, check in enumerate(race.checks, 1):
        one.checks.append(_Bench(course, one, kind).check(number, check))
    one.scored = sum(check["passed"] for check in one.checks if not check["required"])
    failed = [check for check in one.checks if check["required"] and not check["passed"]]
    if failed:
        return _failed(failed[0])
    if race.score is not None or course.scorer is not None:
        one.score, why = _Bench(course, one, kind).score()
        return why
    if any(not check["required"] for check in one.checks):
        one.score = float(one.scored)
    return None


def _passes_whole(course: Course, one: Attempt) -> bool:
    """Whether it would have been verified with everything that it did, but for what could fake it."""
    with contextlib.suppress(ElsewhereError):
        for number, check in enumerate(course.race.checks, 1):
            if check.required and not _Bench(course, one, "whole").check(number, check, "whole-")["passed"]:
                return False
        if course.race.score is None and course.scorer is None:
            return True
        return _Bench(course, one, "whole").score("whole-")[0] is not None
    return False


def _and(words: str) -> str:
    return f"; {words}" if words else ""


def _told(paths: list[str]) -> str:
    shown = ", ".join(paths[:3])
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _failed(check: dict[str, Any]) -> str:
    tests = check["tests"]
    told = tests and tests["failed"] and not check.get("note")
    counted = f", {tests['failed']} of {sum(tests.values())} tests failed" if told else ""
    ended = f"ended with {check['exit_code']}" if check["reason"] == "exited" else check["reason"]
    return f"the check {check['name']!r} failed: {check.get('note') or ended}{counted}"


class _Bench:
    """Where one command of a verification runs, and nothing before it.

    base      as all attempts started
    clean     the same, with what a promotion would move of the attempt
    whole     as the attempt left everything; what could fake a check is as in the base, unless `verify_from_approach`
    """

    def __init__(self, course: Course, one: Attempt | None, kind: str, longest: float = math.inf) -> None:
        self._course = course
        self._one = one
        self._kind = kind
        self._timeout = min(longest, course.timeout if course.race.verify_timeout is None else course.race.verify_timeout)

    @contextlib.contextmanager
    def _ready(self) -> Iterator[Live]:
        course, one = self._course, self._one
        if one is not None and self._kind == "whole":
            assert one.sandbox is not None, "it has run"
            bench = forked(course, one.sandbox, END)
        else:
            bench = forked(course, course.template)
        try:
            fitted(course, bench, None, {"experiment": course.experiment.id, "verifies": "base" if one is None else one.key})
            with inside(course, bench) as box:
                if one is not None:
                    self._fill(box, one)
                yield box
        finally:
            thrown_away(course.state, bench)

    def _fill(self, box: Live, one: Attempt) -> None:
        course, sandbox_id, project = self._course, str(one.sandbox), self._course.experiment.project
        template, guard = f"{course.template}:now", course.guard()
        with course.reading():
            # What git ignores is decided by all that the attempt has, also by what the set-up changed.
            with difference(sandbox_id, after=END) as found:
                never = {path for paths in selecting.select(found.changes, project).left_out.values() for path in paths}
            with difference(sandbox_id, template, END) as found:
                kept = [] if guard is None else guarded(found, guard)
                if self._kind == "whole":
                    brought(box, opposite(kept))
                    return
                never |= {change.path for change in kept}
                moved = selecting.select(found.changes, project, leave=never).inside
                brought(box, moved)
            refuse_unclean(box, template, moved)

    def _ran(self, box: Live, line: str, output: str) -> tuple[Ended, str, list[str]]:
        """How it ended, what is wrong with that even if it is good, and what it rewrote of that which verifies."""
        course, one = self._course, self._one
        watch = (lambda *_: course.wanted()) if one is None else watcher(course, one)
        ended = run_line(box, line, list(course.race.env.items()), self._timeout, output, watch, course.race.directory)
        if not ended.good and not course.wanted():
            raise Unwanted
        left = _left_behind(box) if ended.good else 0
        wrote: list[str] = []
        guard = course.guard() if ended.good or one is None else None
        if guard is not None:
            with course.reading():
                wrote = rewritten(box, f"{course.template}:now", guard, outside=self._kind != "whole")
        return ended, f"it left {units.count(left, 'process', 'processes')} behind" if left else "", wrote

    def _counted(self, check: Check, output: str) -> tuple[Ended, str, list[str], dict[str, counting.Tests | None]]:
        with self._ready() as box:
            results = None if check.junit is None else os.path.join(box.project_path, self._course.race.directory, check.junit)
            if results is not None:
                with files_of(box) as files, contextlib.suppress(ElsewhereError):
                    files.remove(results)  # older ones say nothing about this run
            ended, wrong, wrote = self._ran(box, check.command, output)
            tests = None
            if results is not None:
                with files_of(box) as files, contextlib.suppress(ElsewhereError):
                    tests = counting.of_junit(files.read(results))
        if check.junit is not None:
            own = os.path.normpath(os.path.join(self._course.race.directory, check.junit))
            wrote = [path for path in wrote if path != own]
        return ended, wrong, wrote, {"output": counting.of_output(ended.said), "junit": tests}

    def count(self, number: str, check: Check) -> dict[str, Any]:
        """In the base; with `rewrote`, what of that which verifies is not as before there either."""
        _, _, wrote, counted = self._counted(check, self._course.experiment.file(f"base-check-{number}.out"))
        return {**counted, "rewrote": wrote}

    def check(self, number: int, check: Check, prefix: str = "") -> dict[str, Any]:
        assert self._one is not None, "it is an attempt that is checked"
        file = f"{prefix}check-{number}.out"
        ended, wrong, wrote, counted = self._counted(check, self._course.experiment.file_of(self._one, file))
        if ended.good and not wrong:
            base = None if self._course.race.verify_from_approach else self._baseline(str(number), check, ended.seconds)
            wrong = _rewrote(wrote, base) or counting.doubt(check.command, ended.said, counted, base) or ""
        return {
            "name": check.name,
            "command": check.command,
            "required": check.required,
            "passed": ended.good and not wrong,
            "exit_code": ended.exit_code,
            "reason": ended.reason,
            "seconds": ended.seconds,
            "tests": counted["junit"] or counted["output"],
            "file": file,
            "note": wrong,
        }

    def score(self, prefix: str = "") -> tuple[float | None, str | None]:
        """The number, or why there is none."""
        assert self._one is not None, "it is an attempt that is scored"
        if self._course.scorer is not None:
            return self._asked(self._course.scorer, self._one)
        with self._ready() as box:
            output = self._course.experiment.file_of(self._one, f"{prefix}score.out")
            ended, wrong, wrote = self._ran(box, self._course.race.score or "", output)
        if ended.outlived and len(set(counting.numbers(ended.stdout))) > 1:
            wrong = wrong or "a process that it left behind may have written the last of its numbers"
        if wrote and not wrong:
            same = Check("score", self._course.race.score or "")
            wrong = _rewrote(wrote, self._baseline("score", same, ended.seconds))
        if not ended.good:
            wrong = f"it ended with {ended.exit_code}" if ended.reason == "exited" else ended.reason
        number = None if wrong else counting.last_number(ended.stdout)
        return number, None if number is not None else f"the score command failed: {wrong or 'it ended without a number'}"

    def _asked(self, scorer: Scorer, one: Attempt) -> tuple[float | None, str | None]:
        with self._ready() as box:
            called = call(self._course, one, box.id, scorer, self._timeout)
        if called.reason == "cancelled":
            raise Unwanted
        if called.failure is not None or called.reason != "exited":
            return None, f"the score function failed: {called.failure or called.reason}"
        score = called.result
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            return None, f"the score function gave {units.brief(score)}, which is no number"
        return float(score), None

    def _baseline(self, number: str, check: Check, seconds: float) -> dict[str, Any]:
        """What a check counts in the base, run once, by whoever needs it first; who took so many seconds for it waits for it."""
        course, one = self._course, self._one
        assert one is not None, "the base is not compared with itself"
        with course.preparing:
            lock = course.counters.setdefault(number, threading.Lock())
        with lock:
            found = course.experiment.baseline.get(number)
            if found is None:
                course.news[one.key] = {**course.news.get(one.key, {}), "last_line": "the same check in the base, to compare"}
                found = _Bench(course, None, "base", max(_BASE_S, _BASE_TIMES * seconds)).count(number, check)
                course.experiment.baseline = {**course.experiment.baseline, number: found}  # whoever saves reads the other one
                course.experiment.save()
            return found


def _rewrote(paths: list[str], base: dict[str, Any] | None) -> str:
    """What a check writes by itself, it writes in the base as well."""
    own = [path for path in paths if path not in (base or {}).get("rewrote", ())]
    if not own:
        return ""
    hint = f" (if it may be: --verify-files '!{own[0]}')" if not own[0].startswith("/") else ""
    return f"what verifies it was rewritten while it ran: {_told(own)}{hint}"


def _left_behind(box: Live) -> int:
    """How many processes still run after a command has ended: whoever leaves some may go on writing what counts."""
    deadline = time.monotonic() + _LINGERING_S
    with box.line() as keeper:
        while left := sum(one.state != "Z" for one in keeper.processes()):
            if time.monotonic() >= deadline:
                return left
            time.sleep(0.02)
    return 0
