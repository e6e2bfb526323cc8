#!/usr/bin/python3
"""Runs in the machine, as root: the suite as several people at once, each in a login session of their own.

Emulation is slow and has two processors, so nobody waits for anybody. Every line of output says whose it is, and after how
many seconds it came (`--durations` is silent about a run that is stopped):

    root 61| tests/e2e/test_run.py::test_… PASSED
    dev 309| exit code 0

Arguments: how many seconds each may take, then the people. Nothing of the project is imported here.
"""

import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# What another kernel can change, what matters most first: the rest would only be slower here, and time is limited.
TESTS = (
    "tests/escape/test_files.py",
    "tests/escape/test_kernel.py",
    "tests/escape/test_mounts.py",
    "tests/escape/test_ids.py",
    "tests/escape/test_talking.py",
    "tests/linux/test_cgroups.py",
    "tests/escape/test_resources.py",
    "tests/escape/test_host_side.py",
    "tests/escape/test_bombs.py",
    "tests/e2e/test_limits.py",
    "tests/e2e/test_run.py",
    "tests/linux/test_stack.py",
    "tests/e2e/test_sdk.py",
    "tests/linux/test_boundary.py",
    "tests/linux/test_ladder.py",
    "tests/e2e/test_fidelity.py",
)
LEFT_OUT = "many_sandboxes"  # a minute under emulation, and nothing in it depends on the kernel's version
TEST_LIMIT_S = 600  # the suite's own limit of a test is for real machines; emulation takes more than ten times as long


def suite(limit: int, who: str) -> str:
    """The line that a person types. At the time limit pytest is interrupted, not killed: it then still says how far it came."""
    pytest = [
        "python3",
        "-m",
        "pytest",
        *TESTS,
        "-m",
        "not slow",
        "-k",
        f"not {LEFT_OUT}",
        "-p",
        "no:cacheprovider",
        "--timeout",
        str(TEST_LIMIT_S),
    ]
    # Each test by name as it ends: what is stopped half-way has been of use too.
    shown = ["-vv", "-rfEs", "--durations=15", "--durations-min=1"]
    # Root's tests are root's alone here: the ordinary user runs their own, as themselves.
    path = f"ELSEWHERE_TEST_PEOPLE={'root' if who == 'root' else 'user'} PYTHONPATH={FOLDER}/checkout/src:{FOLDER}/tools"
    return f"cd {FOLDER}/checkout && {path} timeout --signal INT --kill-after 60 {limit} {shlex.join([*pytest, *shown])}"


def main() -> None:
    limit, people = int(sys.argv[1]), sys.argv[2:]
    speaking = threading.Lock()
    started = time.monotonic()

    def say(who: str, line: str) -> None:
        with speaking:
            print(f"{who} {time.monotonic() - started:.0f}| {line}", flush=True)

    def follow(who: str) -> None:
        command = ["su", "-", who, "-c", suite(limit, who)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
            assert process.stdout is not None
            for line in process.stdout:
                say(who, line.rstrip("\n"))
        say(who, f"exit code {process.returncode}")

    threads = [threading.Thread(target=follow, args=(who,), daemon=True) for who in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit + 120)  # a process that was left behind may hold the other end of the pipe


if __name__ == "__main__":
    main()
