#!/usr/bin/python3
"""Runs in the machine, as root: the suite as several people at once, each in a login session of their own.

Emulation is slow and has two processors, so nobody waits for anybody. Each person runs two parts: the escape suite, to its end, and
then whatever else another kernel can change, as far as the time goes. Every line of output says whose it is, of which part, and
after how many seconds it came (`--durations` is silent about a run that is stopped):

    root escape 61| tests/escape/test_files.py::test_… PASSED
    dev rest 309| exit code 0

Arguments: after how many seconds the escape suite is given up, after how many the rest is stopped, then the people. Nothing of the
project is imported here.
"""

import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# What holds a sandbox, and what holds its limits, with version 2 of control groups and by delegation. Not here: what the host does with
# a sandbox's files (`test_host_side.py`), which is Python, and those of the network, which start a hundred sandboxes.
ESCAPE = (
    "tests/linux/test_cgroups.py",
    "tests/escape/test_files.py",
    "tests/escape/test_ids.py",
    "tests/escape/test_kernel.py",
    "tests/escape/test_mounts.py",
    "tests/escape/test_resources.py",
    "tests/escape/test_talking.py",
    "tests/escape/test_bombs.py",
)
# What another kernel can change, what matters most first: the others would only be slower here, and time is limited.
REST = (
    "tests/e2e/test_limits.py",
    "tests/e2e/test_run.py",
    "tests/linux/test_stack.py",
    "tests/e2e/test_sdk.py",
    "tests/linux/test_boundary.py",
    "tests/linux/test_ladder.py",
    "tests/e2e/test_fidelity.py",
)
# Minutes under emulation, and nothing in them depends on the kernel's version.
LEFT_OUT = """
many_sandboxes deeper_than_any_path flood_of_output thousands_of_orphans bomb_of_descriptors
bomb_of_small_files bomb_of_large_files inotify descriptor_that_the_caller comes_later
""".split()
TEST_LIMIT_S = 600  # the suite's own limit of a test is for real machines; emulation takes more than ten times as long
LEAST_S = 20  # with less time than that no test of the rest would come to its end


def suite(tests: tuple[str, ...], limit: float, who: str) -> str:
    """The line that a person types. At the time limit pytest is interrupted, not killed: it then still says how far it came."""
    chosen = [
        *tests,
        "-m",
        "not slow",
        "-k",
        f"not ({' or '.join(LEFT_OUT)})",
        "-p",
        "no:cacheprovider",
        "--timeout",
        str(TEST_LIMIT_S),
    ]
    # Each test by name as it ends: what is stopped half-way has been of use too. After some failures the others tell nothing new.
    shown = ["-vv", "-rfEs", "--durations=25", "--durations-min=1", "--maxfail=8", "--tb=short"]
    checkout = FOLDER / "checkout"
    environment = {
        # Root's tests are root's alone here: the ordinary user runs their own, as themselves.
        "ELSEWHERE_TEST_PEOPLE": "root" if who == "root" else "user",
        # It came compiled, and everybody can read it here.
        "ELSEWHERE_TEST_LIBRARY": f"{checkout}/src",
        "ELSEWHERE_TEST_PATIENCE": "4",
        "PYTHONPATH": f"{checkout}/src:{FOLDER}/tools",
    }
    words = ["env", *(f"{name}={value}" for name, value in environment.items())]
    words += ["timeout", "--signal", "INT", "--kill-after", "60", f"{limit:.0f}", "python3", "-m", "pytest", *chosen, *shown]
    return f"cd {checkout} && {shlex.join(words)}"


def main() -> None:
    escape_limit, rest_limit, people = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    speaking = threading.Lock()
    started = time.monotonic()

    def say(who: str, part: str, line: str) -> None:
        with speaking:
            print(f"{who} {part} {time.monotonic() - started:.0f}| {line}", flush=True)

    def follow(who: str, part: str, tests: tuple[str, ...], limit: float) -> None:
        command = ["su", "-", who, "-c", suite(tests, limit, who)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
            assert process.stdout is not None
            for line in process.stdout:
                say(who, part, line.rstrip("\n"))
        say(who, part, f"exit code {process.returncode}")

    def work(who: str) -> None:
        follow(who, "escape", ESCAPE, escape_limit)
        left = rest_limit - (time.monotonic() - started)
        if left > LEAST_S:
            follow(who, "rest", REST, left)

    threads = [threading.Thread(target=work, args=(who,), daemon=True) for who in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        # A process that was left behind may hold the other end of the pipe.
        thread.join(max(escape_limit, rest_limit) + 120)


if __name__ == "__main__":
    main()
