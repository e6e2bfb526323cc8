"""How many tests passed and failed, out of what a test runner said or wrote; and the number that a score command ended with.

Known are the summaries of pytest, unittest, jest, vitest, mocha, go test, cargo test and TAP; and JUnit files, which most runners
can write. Whatever a command says is its own, and code that runs in the test runner's process can make it say anything: the
numbers are for the eye, and decide only against somebody (`doubt`).
"""

import math
import re
from collections.abc import Callable, Mapping
from xml.etree import ElementTree

from elsewhere import units
from elsewhere.experiments.lines import programs

__all__ = ["Counted", "Tests", "doubt", "last_number", "numbers", "of_junit", "of_output", "says_nothing"]

Tests = dict[str, int]
Counted = Mapping[str, Tests | None]  # by where it was told: output, junit

_LARGEST = 16 << 20
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PYTEST = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.:]+ ?(?:s|seconds)\b.*$", re.MULTILINE)
_PYTEST_DOTS = re.compile(r"^[.FEsxX]+ *\[ *\d+%\]$", re.MULTILINE)
_PYTEST_PARTS = {
    "passed": ("passed", "xpassed"),
    "failed": ("failed", "error", "errors"),
    "skipped": ("skipped", "deselected", "xfailed"),
}
_UNITTEST = re.compile(r"^Ran (\d+) tests? in [\d.]+s$", re.MULTILINE)
_UNITTEST_END = re.compile(r"^(?:OK|FAILED)(?: \(([^)]*)\))?$", re.MULTILINE)
_JEST = re.compile(r"^ *Tests:? +((?:\d+ \w+[,|] *| *\| *)*\d+ \w+.*)$", re.MULTILINE)
_MOCHA = re.compile(r"^ *(\d+) (passing|failing|pending)\b", re.MULTILINE)
_CARGO = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE)
_GO = re.compile(r"^ *--- (PASS|FAIL|SKIP): ", re.MULTILINE)
_GO_VERBOSE = re.compile(r"^(?:=== RUN | *--- (?:PASS|SKIP): )", re.MULTILINE)
_GO_FAILED = re.compile(r"^(?:FAIL\t\S+\t[\d.]+s|FAIL\t\S+ \[|--- FAIL: \S+ \([\d.]+s\))", re.MULTILINE)
_TAP_PLAN = re.compile(r"^1\.\.\d+", re.MULTILINE)
_TAP = re.compile(r"^(not )?ok\b(?:[^#\n]*(#\s*(?:skip|todo)))?", re.MULTILINE | re.IGNORECASE)
_NEGATED = re.compile(r"(?:^|[;&|({]|\b(?:if|while|until|then|do|else))\s*!\s")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?%?")


def of_output(text: str) -> Tests | None:
    """None: nothing in there is the summary of a test runner that is known. The one with the most tests counts, if there are
    several of a kind, and the last of equal ones; where each package or file has its own, they add up."""
    text = _ESCAPES.sub("", text)
    for read in (_pytest, _cargo, _unittest, _jest, _mocha, _go, _tap):
        found = read(text)
        if found is not None:
            return found
    return None


def _tests(passed: int, failed: int, skipped: int) -> Tests:
    return {"passed": passed, "failed": failed, "skipped": skipped}


def _most(found: list[Tests]) -> Tests | None:
    return max(reversed(found), key=lambda tests: sum(tests.values()), default=None)


def _pytest(text: str) -> Tests | None:
    found = [match for match in _PYTEST.finditer(text) if re.search(r"passed|failed|error|skipped|xfailed|deselected", match[1])]
    counts = [{word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", match[1])} for match in found]
    return _most([{part: sum(one.get(word, 0) for word in words) for part, words in _PYTEST_PARTS.items()} for one in counts])


def _unittest(text: str) -> Tests | None:
    found = []
    for ran in _UNITTEST.finditer(text):
        end = _UNITTEST_END.search(text, ran.end())
        counts = dict(part.split("=", 1) for part in (end[1] or "").split(", ") if "=" in part) if end else {}
        bad = sum(_whole(counts.get(word, "0")) for word in ("failures", "errors", "unexpected successes"))
        skipped = _whole(counts.get("skipped", "0"))
        found.append(_tests(max(0, int(ran[1]) - bad - skipped), bad, skipped))
    return _most(found)


def _jest(text: str) -> Tests | None:
    found = []
    for match in _JEST.finditer(text):
        counts = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", match[1])}
        if {"passed", "failed", "skipped", "todo"} & counts.keys():
            skipped = counts.get("skipped", 0) + counts.get("todo", 0)
            found.append(_tests(counts.get("passed", 0), counts.get("failed", 0), skipped))
    return _most(found)


def _mocha(text: str) -> Tests | None:
    counts: dict[str, int] = {word: int(count) for count, word in _MOCHA.findall(text)}
    return _tests(counts.get("passing", 0), counts.get("failing", 0), counts.get("pending", 0)) if counts else None


def _cargo(text: str) -> Tests | None:
    found = [[int(part) for part in parts] for parts in _CARGO.findall(text)]
    return _tests(*(sum(column) for column in zip(*found, strict=True))) if found else None


def _go(text: str) -> Tests | None:
    """Without -v, it tells of packages and of tests that failed: nobody knows how many ran."""
    if not _GO_VERBOSE.search(text):
        return None
    words = _GO.findall(text)
    return _tests(words.count("PASS"), words.count("FAIL"), words.count("SKIP"))


def _tap(text: str) -> Tests | None:
    if not _TAP_PLAN.search(text):
        return None
    passed = failed = skipped = 0
    for bad, directive in _TAP.findall(text):
        if directive:
            skipped += 1
        elif bad:
            failed += 1
        else:
            passed += 1
    return _tests(passed, failed, skipped)


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def of_junit(content: bytes) -> Tests | None:
    """None: it is no such file. A file with a document type of its own is not read: it may be made to fill the memory."""
    if len(content) > _LARGEST or any(word in content for word in (b"<!DOCTYPE", b"<!ENTITY", b"\0")):
        return None
    try:
        top = ElementTree.fromstring(content)  # noqa: S314  (nothing in it can be defined)
    except (ElementTree.ParseError, ValueError, LookupError, RecursionError):
        return None
    if top.tag not in ("testsuite", "testsuites"):
        return None
    total = failed = skipped = 0
    for case in top.iter("testcase"):
        total += 1
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            skipped += 1
    return _tests(total - failed - skipped, failed, skipped)


# -- whether a runner ran at all ------------------------------------------------------------------------------------------------


_RUNNERS: Mapping[str, Callable[[str], bool]] = {
    "pytest": lambda text: _pytest(text) is not None or _PYTEST_DOTS.search(text) is not None,
    "py.test": lambda text: _pytest(text) is not None or _PYTEST_DOTS.search(text) is not None,
    "unittest": lambda text: _unittest(text) is not None,
}


def says_nothing(command: str, text: str) -> str | None:
    """The test runner that a command names, if nothing in its output says that it came to its end: a test that ends the whole
    program with 0 has not passed."""
    text = _ESCAPES.sub("", text)
    for name in sorted(programs(command, captured=False) & _RUNNERS.keys()):
        if not _RUNNERS[name](text):
            return name
    return None


def doubt(command: str, text: str, counted: Counted, base: Counted | None) -> str | None:
    """Why a command that ended with 0 has not passed all the same. `base` is what the same command counted in the base: there all
    tests are, though not all of them pass."""
    silent = says_nothing(command, text)
    if silent is not None:
        return f"{silent} ended with 0 and did not say that it had come to its end"
    if any(tests is not None and _ran(tests) == 0 for tests in counted.values()):
        return "it ended with 0 and ran no test"
    failed = next((tests for tests in counted.values() if tests is not None and tests["failed"]), None)
    if (failed is not None or _GO_FAILED.search(_ESCAPES.sub("", text))) and not _NEGATED.search(command):
        of = "tests" if failed is None else f"{failed['failed']} of {units.count(_ran(failed), 'test')}"
        slip = "of a pipe, the last command's end counts: leave it out, or bash -o pipefail -c '…'"
        return f"it ended with 0 though {of} failed ({slip})"
    for where, found in counted.items():
        tests, before = found or _tests(0, 0, 0), (base or {}).get(where)
        if before is None:
            continue
        if _ran(tests) < _ran(before):
            return f"it ran {units.count(_ran(tests), 'test')}, and {_ran(before)} in the base"
        # A base in which nothing passes may not have got as far as to count what it skips.
        comparable = before["passed"] or _ran(tests) == _ran(before)
        if comparable and tests["skipped"] > before["skipped"]:
            return f"it skipped {units.count(tests['skipped'], 'test')}, and {before['skipped']} in the base"
    return None


def _ran(tests: Tests) -> int:
    return tests["passed"] + tests["failed"]


def last_number(text: str) -> float | None:
    """Of the last line that is a number and nothing else."""
    value = next(reversed(numbers(text)), None)
    return value if value is not None and math.isfinite(value) else None


def numbers(text: str) -> list[float]:
    """Of all lines that are one and nothing else."""
    words = (line.strip() for line in _ESCAPES.sub("", text).splitlines())
    return [float(word.rstrip("%")) for word in words if _NUMBER.fullmatch(word)]
