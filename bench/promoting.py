"""Moving a change to reality and taking it back, by how much was changed, against what people use instead (M)."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import progress
from changing import Change, copied, many_files, worktree
from contenders import Parts
from effort import Effort
from elsewhere import Promotion, Sandbox
from measure import Row, Samples, Section
from project import git
from rounds import interleaved
from workspace import Workspace

__all__ = ["promoting"]


@dataclass(slots=True)
class _Contender:
    """`once` makes the change, timed, and takes it back; what that takes is a row of its own where somebody would do it."""

    row: Row
    once: Callable[[], Parts]
    parts: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Trees:
    """Four of the same project: reality, one for git, and two for rsync, which are empty names without it."""

    project: str
    worktree: str
    source: str
    target: str


def promoting(place: Workspace, effort: Effort) -> Section:
    files = max(effort.compared_files)
    section = Section(
        "M",
        f"Moving a change to reality, in a project of {files:,} files",
        "The same changes as in K, made in a sandbox with a pinned base, and nothing changed in reality meanwhile. Promoting "
        "compares base, sandbox and reality for each of them, keeps what it replaces for an undo, and has all on the disk when "
        "it returns; `undo` takes it back, and is compared in the same way. `git apply` gets a patch that is there already, and "
        "`rsync -a --delete` a tree that has the change: it looks at every file of both trees, which is its way of finding it, "
        "and is timed. Neither keeps what it replaces, waits for the disk, or knows of a base. In changing order, each from the "
        "same start, which is restored without being timed, with everything written to the disk before.",
        "ms",
        baseline="git apply",
    )
    progress.say(f"M: a project of {files:,} files")
    with _trees(place, files, files // max(effort.compared_changes)) as trees:
        for count in effort.compared_changes:
            progress.say(f"M: {count:,} changes in {files:,} files")
            section.rows += _moved(place, effort, trees, Change.spread(files, count), f"{count:,} in {files:,} files")
    return section


@contextlib.contextmanager
def _trees(place: Workspace, files: int, filled_every: int) -> Iterator[_Trees]:
    with contextlib.ExitStack() as stack:
        project = stack.enter_context(many_files(place, files, filled_every))
        tree = stack.enter_context(worktree(place, project))
        copies = [stack.enter_context(copied(place, project)) for _ in range(2)] if shutil.which("rsync") else ["", ""]
        yield _Trees(project, tree, *copies)


def _moved(place: Workspace, effort: Effort, trees: _Trees, change: Change, name: str) -> list[Row]:
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(_ours(trees.project, change, name))
        apply = stack.enter_context(_apply(place, trees.worktree, change, name))
        lineup = (ours, apply, stack.enter_context(_rsync(trees, change, name)))
        present = [one for one in lineup if not one.row.absent]
        results = interleaved([one.once for one in present], effort.moved_rounds, effort.pause)
    for one, taken in zip(present, results, strict=True):
        one.row.samples = Samples.of([parts["total"] for parts in taken], 1000)
        for part in one.parts:
            part.samples = Samples.of([parts[part.name] for parts in taken], 1000)
    rows = []
    for one in lineup:
        if one.row.samples is not None and apply.row.samples is not None:
            one.row.ratio = one.row.samples.median / apply.row.samples.median
        rows += [one.row, *one.parts]
    return rows


def _timed(action: Callable[[], object]) -> float:
    os.sync()  # or whoever waits for the disk would wait for what the others left
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


# -- elsewhere ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ours(project: str, change: Change, name: str) -> Iterator[_Contender]:
    with Sandbox.create(project=project, base="pinned") as box:
        change.make_inside(box)

        def once() -> Parts:
            done: list[Promotion] = []
            total = _timed(lambda: done.append(box.promote()))
            change.check(project)
            return {"total": total, "undo": _timed(done[0].undo)}

        yield _Contender(Row(f"elsewhere: promote, {name}", "three-way, journaled"), once, [Row("undo", part=True)])


# -- neighbours -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _apply(place: Workspace, tree: str, change: Change, name: str) -> Iterator[_Contender]:
    row = Row(f"git apply, {name}", "of a patch that is there", absent="" if tree else "git is not installed")
    if not tree:
        yield _Contender(row, dict)
        return
    patch = place.fresh("patch")
    change.make_outside(tree)
    git(tree, "add", "--all")
    git(tree, "diff", "--cached", "--binary", "--no-renames", f"--output={patch}")
    git(tree, "reset", "--quiet", "--hard")

    def once() -> Parts:
        total = _timed(lambda: git(tree, "apply", patch))
        change.check(tree)
        git(tree, "apply", "--reverse", patch)
        return {"total": total}

    try:
        yield _Contender(row, once)
    finally:
        os.unlink(patch)


@contextlib.contextmanager
def _rsync(trees: _Trees, change: Change, name: str) -> Iterator[_Contender]:
    row = Row(f"rsync -a --delete, {name}", "looks at both trees", absent="" if trees.source else "rsync is not installed")
    if not trees.source:
        yield _Contender(row, dict)
        return
    change.make_outside(trees.source)
    command = ["rsync", "-a", "--delete", f"{trees.source}/", f"{trees.target}/"]

    def once() -> Parts:
        total = _timed(lambda: subprocess.run(command, check=True))
        change.check(trees.target)
        change.take_back(trees.target, trees.project)
        return {"total": total}

    try:
        yield _Contender(row, once)
    finally:
        change.take_back(trees.source, trees.project)
