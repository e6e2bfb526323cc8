"""A copy of the project that can be worked in: a sandbox against the ways that people use instead (C)."""

import shutil
import subprocess
import time
from collections.abc import Callable

from contenders import version_of
from effort import Effort
from elsewhere import Sandbox
from elsewhere.storage import trash
from measure import Row, Samples, Section, against
from project import git
from rounds import interleaved
from workspace import Workspace

__all__ = ["ELSEWHERE", "WORKTREE", "cloning", "worktree"]

ELSEWHERE = "elsewhere: create"
WORKTREE = "git worktree add"


def cloning(place: Workspace, effort: Effort) -> Section:
    section = Section(
        "C",
        f"Cloning a project of {effort.project_files:,} files",
        "In changing order; removed again each time, which is not timed. elsewhere has a sandbox ready, as in A. New directories "
        "are spread over the disk (`chattr +T`), so that no round pays for inodes that the one before has freed.",
        "ms",
    )
    no_git = "" if version_of("git") else "git is not installed"
    no_copy = "" if shutil.which("cp") else "cp is not installed"
    lineup: list[tuple[Row, Callable[[], float]]] = [
        (Row(ELSEWHERE, "everything: untracked and ignored files, the machine around it"), lambda: _sandbox(place)),
        (Row(WORKTREE, "tracked files only, no isolation", absent=no_git), lambda: worktree(place)),
        (Row("cp -a", "the project's files, no isolation", absent=no_copy), lambda: _copy(place)),
    ]
    present = [(row, once) for row, once in lineup if not row.absent]
    results = interleaved([once for _, once in present], effort.clones, effort.pause, warm_ups=1)
    for (row, _), taken in zip(present, results, strict=True):
        row.samples = Samples.of(taken, 1000)
    section.rows += [row for row, _ in lineup]
    against(section, WORKTREE)
    return section


def _sandbox(place: Workspace) -> float:
    began = time.perf_counter()
    box = Sandbox.create(project=place.project, base="live")
    took = time.perf_counter() - began
    box.remove()
    return took


def worktree(place: Workspace) -> float:
    target = place.fresh("worktree")
    began = time.perf_counter()
    git(place.project, "worktree", "add", "--quiet", "--detach", target)
    took = time.perf_counter() - began
    git(place.project, "worktree", "remove", "--force", target)
    return took


def _copy(place: Workspace) -> float:
    target = place.fresh("copy")
    began = time.perf_counter()
    subprocess.run(["cp", "-a", place.project, target], check=True)
    took = time.perf_counter() - began
    trash.remove_tree(target)
    return took
