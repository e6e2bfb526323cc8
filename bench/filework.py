"""Files inside against files outside: write, stat, delete, on the same file system (D).

The script times itself, so that neither the interpreter's start nor the sandbox's is part of it.
"""

import json
import os
import subprocess
import sys

from effort import Effort
from elsewhere import Sandbox
from measure import Row, Samples, Section
from rounds import interleaved
from shell import environment
from workspace import Workspace

__all__ = ["TOTAL", "file_work"]

TOTAL = "all three, inside"
_PHASES = ("write", "stat", "delete")
_SCRIPT = """
import json, os, sys, time
names = [f"small-{number:05}" for number in range(int(sys.argv[1]))]
content = b"x" * 200
marks = [time.perf_counter()]
for name in names:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(fd, content)
    os.close(fd)
marks.append(time.perf_counter())
for name in names:
    os.stat(name)
marks.append(time.perf_counter())
for name in names:
    os.unlink(name)
marks.append(time.perf_counter())
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""

Phases = list[float]


def file_work(place: Workspace, effort: Effort) -> Section:
    section = Section(
        "D",
        f"File work: write, stat and delete {effort.work_files:,} small files",
        "Inside (a fresh sandbox each time, in the project's top directory) and outside (a scratch directory of the same file "
        "system), in changing order. Plain system calls, timed by the script itself.",
        "ms",
        baseline="the same outside",
    )
    argv = [sys.executable, "-I", "-S", "-c", _SCRIPT, str(effort.work_files)]
    inside, outside = interleaved(
        [lambda: _inside(place, argv), lambda: _outside(place, argv)], effort.work_rounds, effort.pause, warm_ups=1
    )
    for index, phase in enumerate(_PHASES):
        section.rows += _rows(phase, [one[index] for one in inside], [one[index] for one in outside])
    section.rows += _rows("all three", [sum(one) for one in inside], [sum(one) for one in outside])
    return section


def _rows(name: str, inside: list[float], outside: list[float]) -> list[Row]:
    within, without = Samples.of(inside, 1000), Samples.of(outside, 1000)
    return [
        Row(f"{name}, inside", samples=within, ratio=within.median / without.median),
        Row(f"{name}, outside", samples=without),
    ]


def _inside(place: Workspace, argv: list[str]) -> Phases:
    with Sandbox.create(project=place.project) as box:
        return _phases(box.run(argv).check().stdout)


def _outside(place: Workspace, argv: list[str]) -> Phases:
    directory = os.path.join(place.scratch, "files")
    os.mkdir(directory)
    try:
        done = subprocess.run(argv, cwd=directory, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    finally:
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    return _phases(done.stdout)


def _phases(said: str) -> Phases:
    phases: Phases = json.loads(said)
    return phases
