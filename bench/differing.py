"""What a sandbox changed, by the size of the project and by how much it changed, against `git status` (K)."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import progress
from contenders import version_of
from effort import Effort
from elsewhere import Sandbox
from elsewhere.storage import trash
from measure import Row, Samples, Section
from project import generate, git, path_of
from rounds import interleaved
from shell import environment
from workspace import Workspace

__all__ = ["BASES", "ROW", "differing"]

BASES = ("pinned", "live")
ROW = "elsewhere: changes, {:,} in {:,} files, {}"
_STATUS = "git status, {:,} in {:,} files"
_KINDS = ("added", "deleted", "modified", "modified", "modified")
_SCRIPT = """
import json, os, sys
wanted = json.load(sys.stdin)
for path in wanted["added"] + wanted["modified"]:
    with open(path, "a") as file:
        file.write(f"changed: {path}\\n")
for path in wanted["deleted"]:
    os.unlink(path)
"""


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
        with _project(place, files, filled_every) as directory, _worktree(place, directory) as tree:
            for count in effort.compared_changes:
                progress.say(f"K: {count:,} changes in {files:,} files")
                section.rows += _compared(effort, directory, tree, files, count)
    return section


def _compared(effort: Effort, directory: str, tree: str, files: int, count: int) -> list[Row]:
    wanted = _wanted(files, count)
    with contextlib.ExitStack() as stack:
        lineup: list[tuple[Row, Callable[[], float]]] = []
        for base in BASES:
            box = stack.enter_context(Sandbox.create(project=directory, base=base))
            box.run(_command(), input=wanted).check()
            lineup.append((Row(ROW.format(count, files, base)), lambda box=box: _changes(box, count)))
        if tree:
            subprocess.run(_command(), cwd=tree, input=wanted.encode(), env=environment(), check=True)
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


def _command() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _SCRIPT]


def _wanted(files: int, count: int) -> str:
    wanted: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for number in range(count):
        kind, path = _KINDS[number % len(_KINDS)], path_of(number * (files // count))
        wanted[kind].append(f"{path}.new" if kind == "added" else path)
    return json.dumps(wanted)


@contextlib.contextmanager
def _project(place: Workspace, files: int, filled_every: int) -> Iterator[str]:
    directory = os.path.join(place.root, f"compared-{files}")
    os.mkdir(directory)
    try:
        generate(directory, files, filled_every=filled_every)
        yield directory
    finally:
        trash.remove_tree(directory)


@contextlib.contextmanager
def _worktree(place: Workspace, directory: str) -> Iterator[str]:
    """An empty name where there is no git."""
    if not version_of("git"):
        yield ""
        return
    tree = place.fresh("worktree")
    try:
        git(directory, "worktree", "add", "--quiet", "--detach", tree)
        yield tree
    finally:
        trash.remove_tree(tree)
