"""What a sandbox changed, by the size of the project and by how much it changed, against `git status` (K)."""

import contextlib
import time
from collections.abc import Callable

import progress
from changing import Change, many_files, worktree
from effort import Effort
from elsewhere import Sandbox
from measure import Row, Samples, Section
from project import git
from rounds import interleaved
from workspace import Workspace

__all__ = ["BASES", "ROW", "differing"]

BASES = ("pinned", "live")
ROW = "elsewhere: changes, {:,} in {:,} files, {}"
_STATUS = "git status, {:,} in {:,} files"


def differing(place: Workspace, effort: Effort) -> Section:
    section = Section(
        "K",
        "What a sandbox changed: by changes, and by files of the project",
        "A fifth of the changes are new files, a fifth deleted ones, the others modified, spread over the project; files "
        "that no change touches are empty, since nobody reads them. `git status` is of a worktree of the same project with the "
        "same changes, its index warm. In changing order for each project and number of changes.",
        "ms",
        baseline="git status",
    )
    for files in effort.compared_files:
        progress.say(f"K: a project of {files:,} files")
        filled_every = files // max(effort.compared_changes)
        with many_files(place, files, filled_every) as directory, worktree(place, directory) as tree:
            for count in effort.compared_changes:
                progress.say(f"K: {count:,} changes in {files:,} files")
                section.rows += _compared(effort, directory, tree, files, count)
    return section


def _compared(effort: Effort, directory: str, tree: str, files: int, count: int) -> list[Row]:
    change = Change.spread(files, count)
    with contextlib.ExitStack() as stack:
        lineup: list[tuple[Row, Callable[[], float]]] = []
        for base in BASES:
            box = stack.enter_context(Sandbox.create(project=directory, base=base))
            change.make_inside(box)
            lineup.append((Row(ROW.format(count, files, base)), lambda box=box: _changes(box, count)))
        if tree:
            change.make_outside(tree)
            lineup.append((Row(_STATUS.format(count, files), "tracked and untracked files"), lambda: _status(tree)))
        results = interleaved([once for _, once in lineup], effort.compared_rounds, effort.pause)
        for (row, _), taken in zip(lineup, results, strict=True):
            row.samples = Samples.of(taken, 1000)
        if tree:
            git(tree, "reset", "--quiet", "--hard")
            git(tree, "clean", "--quiet", "-d", "--force")
    rows = [row for row, _ in lineup]
    if not tree:
        return [*rows, Row(_STATUS.format(count, files), absent="git is not installed")]
    neighbour = rows[-1].samples
    for row in rows:
        if row.samples is not None and neighbour is not None:
            row.ratio = row.samples.median / neighbour.median
    return rows


def _changes(box: Sandbox, expected: int) -> float:
    began = time.perf_counter()
    found = box.changes()
    took = time.perf_counter() - began
    seen = len(found.added) + len(found.modified) + len(found.deleted) + len(found.renamed)
    if seen != expected:
        raise RuntimeError(f"{seen} changes were found where {expected} were made")
    return took


def _status(tree: str) -> float:
    began = time.perf_counter()
    git(tree, "status", "--porcelain")
    return time.perf_counter() - began
