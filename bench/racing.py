"""Several approaches at once, against the same commands one after the other in plain copies of the project (P)."""

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import progress
from changing import many_files
from effort import Effort
from elsewhere import Sandbox, race
from elsewhere.storage import trash
from measure import Row, Samples, Section
from rounds import interleaved
from shell import environment
from workspace import Workspace

__all__ = ["racing"]

_PATIENCE_S = 40.0
_WAITS_S = 0.2
# As an agent's step does: waits for somebody else, computes, and writes some files.
_APPROACH = (
    f"sleep {_WAITS_S} && python3 -S -c 'print(sum(n * n for n in range(1_000_000)))' > answer.txt && "
    "seq 50 | while read n; do echo $n > result-$n.txt; done"
)
_VERIFY = "test -s answer.txt && test -s result-50.txt"


@dataclass(frozen=True, slots=True)
class _Taken:
    seconds: float
    bytes: int


def racing(place: Workspace, effort: Effort) -> Section:
    section = Section(
        "P",
        f"A race, in a project of {effort.raced_files:,} files",
        f"Approaches that do the same: {_WAITS_S:.1f} s of waiting, some computing, 51 small files; then a check of what came "
        "out. A race forks a sandbox for each, verifies in a fork of that, reads what changed, keeps a patch and the output, and "
        "ranks; as many run at once as the machine has room for. Against it, what a script does: for one after the other `cp "
        "-a`, the command, the check. The note has what was then on the disk that was not there before, of a project whose base "
        "was there; both are cleared away without being timed.",
        "ms",
        baseline="cp -a, one after the other",
    )
    with many_files(place, effort.raced_files, 1) as project:
        progress.say("P: the base")
        _raced(place, project, 1)
        pairs = []
        for count in effort.raced:
            name = f"{count} approach{'es' if count > 1 else ''}"
            pairs.append((Row(f"elsewhere race, {name}"), Row(f"cp -a, one after the other, {name}")))
        steps: list[Callable[[], _Taken]] = []
        for count in effort.raced:
            steps += [lambda count=count: _raced(place, project, count), lambda count=count: _copied(place, project, count)]
        progress.say(f"P: {', '.join(map(str, effort.raced))} approaches")
        results = interleaved(steps, effort.raced_rounds, effort.pause, warm_ups=0, patience=_PATIENCE_S)
    for row, taken in zip([row for pair in pairs for row in pair], results, strict=True):
        row.samples = Samples.of([one.seconds for one in taken], 1000)
        row.note = f"{statistics.median(one.bytes for one in taken) / (1 << 20):.1f} MiB on the disk"
    for ours, theirs in pairs:
        if ours.samples is not None and theirs.samples is not None:
            ours.ratio, theirs.ratio = ours.samples.median / theirs.samples.median, 1.0
        section.rows += [ours, theirs]
    return section


def _raced(place: Workspace, project: str, count: int) -> _Taken:
    before = _used(place.state)
    began = time.perf_counter()
    done = race([(f"approach-{number}", _APPROACH) for number in range(count)], verify=_VERIFY, project=project)
    seconds = time.perf_counter() - began
    assert sum(one.verified for one in done.results) == count, done.reason
    taken = _Taken(seconds, max(0, _used(place.state) - before))
    for one in done.results:
        if one.sandbox is not None:
            Sandbox.get(one.sandbox).remove()
    return taken


def _copied(place: Workspace, project: str, count: int) -> _Taken:
    copies = [place.fresh("copy") for _ in range(count)]
    began = time.perf_counter()
    for copy in copies:
        subprocess.run(["cp", "-a", project, copy], check=True)
        for line in (_APPROACH, _VERIFY):
            subprocess.run(["/bin/sh", "-c", line], cwd=copy, env=environment(), check=True)
    seconds = time.perf_counter() - began
    taken = _Taken(seconds, sum(map(_used, copies)))
    for copy in copies:
        trash.remove_tree(copy)
    return taken


def _used(directory: str) -> int:
    """What the files below take, those that others hide from us left out."""
    total = 0
    for parent, names, files in os.walk(directory):
        for name in (*names, *files):
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:  # it is being cleared away
                continue
    return total
