"""Tests counted out of what runners say, the score's number, and what a shell line names."""

import pytest

from elsewhere.experiments.counting import doubt, last_number, of_junit, of_output, says_nothing
from elsewhere.experiments.lines import parsed, programs

OUTPUTS = {
    "pytest": ("..F\n=== short test summary info ===\n1 failed, 2 passed, 3 skipped in 0.12s\n", (2, 1, 3)),
    "pytest with a frame": (
        "=================== 12 passed, 1 xfailed, 2 warnings in 61.20s (0:01:01) ====================",
        (12, 0, 1),
    ),
    "pytest, errors": ("1 passed, 2 errors in 3.00s", (1, 2, 0)),
    "pytest in colour": ("\x1b[32m\x1b[1m3 passed\x1b[0m\x1b[32m in 0.01s\x1b[0m", (3, 0, 0)),
    "pytest, run twice": ("1 failed in 0.1s\n5 passed in 0.1s", (5, 0, 0)),
    "pytest, and words like its own": ("1 failed, 8 passed in 0.1s\n1 passed in 1s", (8, 1, 0)),
    "unittest, run twice": ("Ran 5 tests in 0.1s\n\nFAILED (failures=1)\nRan 1 test in 0.1s\n\nOK\n", (4, 1, 0)),
    "unittest": ("Ran 5 tests in 0.001s\n\nOK\n", (5, 0, 0)),
    "unittest, bad": ("Ran 7 tests in 1.1s\n\nFAILED (failures=1, errors=2, skipped=1)\n", (3, 3, 1)),
    "jest": ("Test Suites: 1 failed, 1 total\nTests:       1 failed, 2 skipped, 4 passed, 7 total\nTime: 1 s", (4, 1, 2)),
    "vitest": (" Test Files  1 passed (1)\n      Tests  2 failed | 5 passed (7)\n", (5, 2, 0)),
    "mocha": ("  3 passing (8ms)\n  1 pending\n  2 failing\n", (3, 2, 1)),
    "go, verbose": ("--- PASS: TestA (0.00s)\n    --- FAIL: TestB/x (0.00s)\n--- SKIP: TestC (0.00s)\n", (1, 1, 1)),
    "cargo": (
        "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured\ntest result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured",
        (4, 2, 1),
    ),
    "TAP": ("TAP version 13\n1..4\nok 1 - a\nnot ok 2 - b\nok 3 - c # SKIP why\nok 4\n", (2, 1, 1)),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_summary_of_each_runner_is_understood(kind: str) -> None:
    said, (passed, failed, skipped) = OUTPUTS[kind]
    assert of_output(f"noise before\n{said}\nnoise after") == {"passed": passed, "failed": failed, "skipped": skipped}


GO = "--- FAIL: TestA (0.00s)\nFAIL\texample.org/b\t0.004s\nok  \texample.org/a\t0.003s\n"  # of packages, not of tests


@pytest.mark.parametrize(
    "said", ["", "all good", "ok then", "passed", "it took 3 passed turns in the game", "1..2 is a range", GO]
)
def test_other_words_are_no_summary(said: str) -> None:
    found = of_output(said)
    assert found is None or found == {"passed": 0, "failed": 0, "skipped": 0}


def test_a_junit_file_is_counted() -> None:
    cases = "<testcase/><testcase><failure/></testcase><testcase><error/></testcase><testcase><skipped/></testcase>"
    for content in (f"<testsuites><testsuite>{cases}</testsuite></testsuites>", f"<testsuite>{cases}</testsuite>"):
        assert of_junit(content.encode()) == {"passed": 1, "failed": 2, "skipped": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html/>",
        b"<testsuite>",
        b'<!DOCTYPE x [<!ENTITY a "b">]><testsuite/>',
        '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE x><testsuite/>'.encode("utf-16"),
    ],
)
def test_what_is_no_junit_file_counts_nothing(content: bytes) -> None:
    assert of_junit(content) is None


@pytest.mark.parametrize(
    ("said", "number"),
    [("7\n", 7), ("a\n1.5\nb\n", 1.5), ("1\n2\n", 2), ("-3e2", -300), ("88%\n", 88), ("score: 4\n", None), ("", None), ("1e999\n", None),
     ("\x1b[1m5\x1b[0m\n", 5), ("  .5  \n\n", 0.5), ("nan\n", None)],
)  # fmt: skip
def test_the_score_is_the_last_line_that_is_a_number(said: str, number: float | None) -> None:
    assert last_number(said) == number


@pytest.mark.parametrize(
    ("command", "said", "runner"),
    [
        ("pytest -q", "1 passed in 0.1s", None),
        ("pytest -q", "", "pytest"),
        ("python -m pytest -qq", ".. [100%]", None),
        ("cd src && python3 -m unittest", "Ran 1 test in 0.1s\n\nOK", None),
        ("cd src && python3 -m unittest", "hello", "unittest"),
        ("./check.sh", "", None),
        ("make test", "", None),
        ('[ "$(pytest -q | grep -c passed)" = 1 ]', "", None),
    ],
)
def test_a_runner_that_did_not_come_to_its_end_is_noticed(command: str, said: str, runner: str | None) -> None:
    assert says_nothing(command, said) == runner


@pytest.mark.parametrize(
    ("line", "called", "run"),
    [
        ("pytest", {"pytest"}, set()),
        ("cd src && ./score.sh data", {"cd", "score.sh"}, {"./score.sh"}),
        ("sh -e check.sh expected", {"sh"}, {"check.sh"}),
        ("DEBUG=1 timeout 10s python -X dev bench/run.py out", {"timeout", "python"}, {"bench/run.py"}),
        ("pytest -x checks/a.py::test_b", {"pytest"}, {"checks/a.py"}),
        ("python -m checks.all", {"python", "checks"}, {"checks/all.py", "checks/all/__main__.py"}),
        ("python -c 'print(1)'", {"python"}, set()),
        ("grep -q fixed README.md", {"grep"}, set()),
        ("(cd a; make test) | tail -1", {"cd", "make", "tail"}, set()),
        ("'unclosed", {"'unclosed"}, set()),
        ("python3 -O check.py", {"python3"}, {"check.py"}),
        ("python3 -I check.py", {"python3"}, {"check.py"}),
        ("perl -ne 'print' log", {"perl"}, set()),
        ("sh 2> log < check.sh", {"sh"}, {"check.sh"}),
        ("uv run --with x python check.py", {"uv", "run", "python"}, {"check.py"}),
    ],
)
def test_programs_and_scripts_of_a_line(line: str, called: set[str], run: set[str]) -> None:
    assert programs(line) == called
    assert parsed(line).scripts == run


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("diff out expected", {"out", "expected"}),
        ("sh -c 'cmp a b && ./c.sh d'", {"cmp a b && ./c.sh d", "a", "b", "./c.sh", "d"}),
        ("python check.py --config=strict.toml calc.py", {"check.py", "strict.toml", "calc.py"}),
        ("grep -q fixed README.md; wc -l < calc.py; gcc main.c", set()),
        ("./measure < input", {"./measure"}),
    ],
)
def test_files_of_a_line(line: str, taken: set[str]) -> None:
    assert parsed(line).files == taken


def counted(passed: int, failed: int = 0, skipped: int = 0) -> dict[str, int]:
    return {"passed": passed, "failed": failed, "skipped": skipped}


@pytest.mark.parametrize(
    ("mine", "base", "wrong"),
    [
        ({"output": counted(2)}, {"output": counted(1, 1)}, None),
        ({"output": counted(9, skipped=2)}, {"output": counted(0, 1, skipped=2)}, None),
        ({"output": counted(9, skipped=2)}, {"output": counted(0, 1)}, None),  # whose tests could not even be loaded
        ({"output": counted(4, skipped=4)}, {"output": counted(1, 1)}, "it skipped 4 tests, and 0 in the base"),
        ({"output": None}, {"output": None}, None),
        ({"output": None}, None, None),
        ({"output": counted(1)}, {"output": counted(1, 1)}, "it ran 1 test, and 2 in the base"),
        ({"output": None}, {"output": counted(1, 1)}, "it ran 0 tests, and 2 in the base"),
        ({"output": counted(0, skipped=2)}, {"output": None}, "it ended with 0 and ran no test"),
        ({"output": counted(0, skipped=2)}, None, "it ended with 0 and ran no test"),
        ({"output": counted(1, skipped=1)}, {"output": counted(0, 1)}, "it skipped 1 test, and 0 in the base"),
        (
            {"output": None, "junit": counted(2)},
            {"output": counted(1, 1), "junit": counted(1, 1)},
            "it ran 0 tests, and 2 in the base",
        ),
        (
            {"output": counted(2), "junit": None},
            {"output": counted(1, 1), "junit": counted(1, 1)},
            "it ran 0 tests, and 2 in the base",
        ),
    ],
)
def test_who_runs_fewer_tests_than_the_base_has_not_passed(
    mine: dict[str, dict[str, int] | None], base: dict[str, dict[str, int] | None] | None, wrong: str | None
) -> None:
    assert doubt("make test", "", mine, base) == wrong


@pytest.mark.parametrize(
    ("command", "said", "passed"),
    [
        ("python3 -m unittest -q 2>&1 | tail -5", "Ran 2 tests in 0.1s\n\nFAILED (failures=1)\n", False),
        ("! python3 -m unittest -q", "Ran 2 tests in 0.1s\n\nFAILED (failures=1)\n", True),
        ("go test ./... | tee log", GO, False),
        ("go test ./...", "ok  \texample.org/a\t0.003s\n", True),
    ],
)
def test_who_ends_with_0_and_says_that_tests_failed_has_not_passed(command: str, said: str, passed: bool) -> None:
    wrong = doubt(command, said, {"output": of_output(said), "junit": None}, None)
    assert (wrong is None) == passed
    assert passed or "pipefail" in str(wrong)


def test_a_file_of_results_does_not_stand_for_a_runner_that_says_nothing() -> None:
    assert doubt("pytest -q", "", {"output": None, "junit": counted(2)}, None) is not None
