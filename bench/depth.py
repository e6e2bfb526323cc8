"""What a long line of snapshots costs whoever reads files afterwards (L)."""

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator

import progress
from effort import Effort
from elsewhere import Sandbox
from elsewhere.sandbox.records import record
from elsewhere.storage.layers import Layers
from elsewhere.storage.state import State
from measure import Row, Samples, Section
from rounds import interleaved
from workspace import Workspace

__all__ = ["depth_curve"]

_NONE = "no snapshots"
_MISSING = 1_000
_PHASES = (f"stat of {_MISSING:,} missing files", "first walk")
_DIRECTORIES = 20
_DIRECTORY = "directory-{:02}"
_PATIENCE_S = 30.0
_MERGING_S = 60.0
_SNAPSHOT = "depth-{}"
_WRITE = """
import os, sys
for directory in sys.argv[2:]:
    with open(os.path.join(directory, "written"), "w") as file:
        file.write(sys.argv[1])
"""
_LOOK = """
import json, os, sys, time
directory, token, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.stat(directory)
marks = [time.perf_counter()]
for number in range(count):
    try:
        os.stat(f"{directory}/{token}-{number}")
    except FileNotFoundError:
        pass
marks.append(time.perf_counter())
waiting = ["."]
while waiting:
    with os.scandir(waiting.pop()) as entries:
        for entry in entries:
            entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
marks.append(time.perf_counter())
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""

Looks = list[float]


def depth_curve(place: Workspace, effort: Effort) -> Section:
    section = Section(
        "L",
        f"Reading by the number of snapshots: {_MISSING:,} missing files, and a first walk of {effort.project_files:,}",
        f"One sandbox of a project of empty files in {_DIRECTORIES} directories; before each snapshot a file in each of them is "
        "written, the worst case for layers on top of each other. Then, once the product has merged them as it always does, a "
        "fork of some of its snapshots, timed by a script inside, before which nobody has looked at anything in it; in changing "
        "order. The same without snapshots: a sandbox that wrote the same once, started anew. Numbers that end in 99 have the "
        f"most layers: with the next snapshot they become one. {_MISSING:,} in so many ms is one in so many µs.",
        "ms",
        baseline=_NONE,
    )
    project = _project(place, effort.project_files)
    with Sandbox.create(project=project, base="live") as box, _stopped(project) as plain:
        if not _deepen(box, effort):
            section.rows = [Row(_PHASES[0], absent="on this rung a snapshot is a copy: there are no layers")]
            return section
        notes = ["", *_layers(box, effort.depths)]
        progress.say("L: looking")
        steps: list[Callable[[], Looks]] = [lambda: _restarted(plain)]
        steps += [lambda depth=depth: _forked(box, depth) for depth in effort.depths]
        taken = interleaved(steps, effort.depth_rounds, effort.pause, patience=_PATIENCE_S)
    names = [_NONE, *(f"{depth} snapshot{'s' * (depth > 1)}" for depth in effort.depths)]
    for index, phase in enumerate(_PHASES):
        samples = [Samples.of([looks[index] for looks in one], 1000) for one in taken]
        for name, note, one in zip(names, notes, samples, strict=True):
            section.rows.append(Row(f"{phase}, {name}", note, samples=one, ratio=one.median / samples[0].median))
    return section


def _project(place: Workspace, files: int) -> str:
    directory = os.path.join(place.root, "deep")
    for number in range(files):
        parent = os.path.join(directory, _DIRECTORY.format(number % _DIRECTORIES))
        if number < _DIRECTORIES:
            os.makedirs(parent)
        with open(os.path.join(parent, f"file-{number:05}"), "wb"):
            pass
    return directory


@contextlib.contextmanager
def _stopped(project: str) -> Iterator[str]:
    """A sandbox that wrote the same, once, and rests: whoever starts it finds nothing in the kernel's memory of it."""
    box = Sandbox.create(project=project, base="live", on_exit="keep")
    try:
        _write(box, 0)
        box.stop()
        yield box.id
    finally:
        Sandbox.get(box.id).remove()


def _deepen(box: Sandbox, effort: Effort) -> bool:
    """So many snapshots, and all that is to be merged is merged. False: there are no layers that could be."""
    for number in range(1, max(effort.depths) + 1):
        if number % 50 == 1:
            progress.say(f"L: snapshot {number} of {max(effort.depths)}")
        _write(box, number)
        if box.snapshot(_SNAPSHOT.format(number)).copied:
            return False
    progress.say("L: waiting until layers are merged")
    state = State.open()
    tip, deadline = record.load(state, box.id).tip, time.monotonic() + _MERGING_S
    while Layers(state).merge_due(tip):
        if time.monotonic() > deadline:
            raise RuntimeError(f"layers were not merged within {_MERGING_S:.0f} s")
        time.sleep(0.1)
    return True


def _layers(box: Sandbox, depths: tuple[int, ...]) -> list[str]:
    """How many are mounted at each depth."""
    state = State.open()
    tips = {one["name"]: one["layer"] for one in record.load(state, box.id).snapshots}
    counts = [len(Layers(state).chain(tips[_SNAPSHOT.format(depth)])) for depth in depths]
    return [f"{count} layer{'s' * (count > 1)} mounted" for count in counts]


def _write(box: Sandbox, number: int) -> None:
    """The same files each time, with another content: whatever the depth, the tree has as many."""
    names = map(_DIRECTORY.format, range(_DIRECTORIES))
    box.run([sys.executable, "-I", "-S", "-c", _WRITE, str(number), *names]).check()


def _forked(box: Sandbox, depth: int) -> Looks:
    (child,) = box.fork(source=_SNAPSHOT.format(depth))
    with child:
        return _look(child)


def _restarted(sandbox_id: str) -> Looks:
    box = Sandbox.get(sandbox_id)
    try:
        return _look(box)
    finally:
        box.stop()


def _look(box: Sandbox) -> Looks:
    """Names that nobody ever asked for: the file systems below remember those, too."""
    words = [_DIRECTORY.format(0), secrets.token_hex(8), str(_MISSING)]
    looks: Looks = json.loads(box.run([sys.executable, "-I", "-S", "-c", _LOOK, *words]).check().stdout)
    return looks
