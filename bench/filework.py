"""Files inside against files outside: write, stat, delete, on the same file system (D).

The script times itself, so that neither the interpreter's start nor the sandbox's is part of it. The budget is one of medians;
beside each stands the ratio of the p10: a disk's hiccups only ever add, and some are larger than what is measured. An ext4
without a journal, for one, looks at every inode that anybody freed in the last minutes before it takes a new one, which can make
writing ten times slower for whoever comes next, inside or outside. Where the two ratios differ, believe neither before the run
was repeated on a quiet machine.
"""

import json
import os
import subprocess
import sys

from effort import Effort
from elsewhere import Sandbox
from elsewhere.storage import trash
from measure import Row, Samples, Section
from rounds import interleaved
from shell import environment
from workspace import Workspace

__all__ = ["TOTAL", "file_work"]

INSIDE = "inside"
_ALL = "all three"
TOTAL = f"{_ALL}, {INSIDE}"
_PHASES = ("write", "stat", "delete")
_SCRIPT = """
import json, os, sys, time
names = [f"small-{number:05}" for number in range(int(sys.argv[1]))]
content = b"x" * 200
marks = [time.perf_counter()]
for name in names:
    with open(name, "wb") as file:
        file.write(content)
marks.append(time.perf_counter())
for name in names:
    os.stat(name)
marks.append(time.perf_counter())
for name in names:
    os.unlink(name)
marks.append(time.perf_counter())
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""
_OVERLAY = """
mkdir "$2/upper" "$2/work" "$2/merged" &&
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work,volatile$3" "$2/merged" &&
cd "$2/merged" && shift 3 && exec "$@"
"""

Phases = list[float]


def file_work(place: Workspace, effort: Effort) -> Section:
    section = Section(
        "D",
        f"File work: write, stat and delete {effort.work_files:,} small files",
        "Inside (a fresh sandbox each time, in the project's top directory), outside (a fresh directory of the same file system) "
        "and, for the part that is the kernel's, on a plain overlay of the project without any sandbox; in changing order. A "
        "small Python script, which times itself; directories are spread over the disk as in C. Beside the ratio of the medians "
        "stands that of the p10: a disk's hiccups only ever add, so where the two differ, the disk was disturbed.",
        "ms",
        baseline="outside",
    )
    argv = [sys.executable, "-I", "-S", "-c", _SCRIPT, str(effort.work_files)]
    steps = {
        INSIDE: lambda: _inside(place, argv),
        "outside": lambda: _outside(place, argv),
        "plain overlay": lambda: _overlaid(place, argv),
    }
    absent = _missing_overlay(place)
    if absent:
        del steps["plain overlay"]
    taken = interleaved(list(steps.values()), effort.work_rounds, effort.pause)
    by_place = dict(zip(steps, taken, strict=True))
    for index, phase in enumerate(_PHASES):
        section.rows += _rows(phase, {name: [one[index] for one in times] for name, times in by_place.items()})
    section.rows += _rows(_ALL, {name: [sum(one) for one in times] for name, times in by_place.items()})
    if absent:
        section.rows.append(Row("plain overlay", absent=absent))
    return section


def _rows(phase: str, times: dict[str, list[float]]) -> list[Row]:
    samples = {name: Samples.of(values, 1000) for name, values in times.items()}
    outside = samples["outside"]
    return [
        Row(
            f"{phase}, {name}",
            samples=one,
            ratio=one.median / outside.median,
            undisturbed=one.quantile(0.1) / outside.quantile(0.1),
        )
        for name, one in samples.items()
    ]


def _inside(place: Workspace, argv: list[str]) -> Phases:
    with Sandbox.create(project=place.project, base="live") as box:
        return _phases(box.run(argv).check().stdout)


def _outside(place: Workspace, argv: list[str]) -> Phases:
    directory = place.fresh("files")
    os.mkdir(directory)
    try:
        return _phases(_output(argv, directory))
    finally:
        trash.remove_tree(directory)


def _overlaid(place: Workspace, argv: list[str]) -> Phases:
    """In a mount namespace that ends with the script; an ordinary user needs a user namespace for that, and other attributes."""
    user = os.geteuid() != 0
    namespaces = ["--user", "--map-root-user", "--mount"] if user else ["--mount"]
    directory = place.fresh("overlay")
    os.mkdir(directory)
    words = [place.project, directory, ",userxattr" if user else "", *argv]
    try:
        return _phases(_output(["unshare", *namespaces, "sh", "-c", _OVERLAY, "sh", *words], directory))
    finally:
        trash.remove_tree(directory)


def _missing_overlay(place: Workspace) -> str:
    try:
        _overlaid(place, [sys.executable, "-I", "-S", "-c", _SCRIPT, "1"])
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"does not work here: {said.strip().splitlines()[-1]}".replace(place.root, "…")
    return ""


def _output(argv: list[str], directory: str) -> str:
    return subprocess.run(argv, cwd=directory, env=environment(), capture_output=True, text=True, check=True).stdout


def _phases(said: str) -> Phases:
    phases: Phases = json.loads(said)
    return phases
