"""A pinned base: what the first capture of a project costs, and every later one when nothing changed (G)."""

import os
import shutil
import time

from cloning import WORKTREE, worktree
from contenders import version_of
from effort import Effort
from elsewhere import Sandbox
from elsewhere.storage import trash
from measure import Row, Samples, Section, against
from project import generate
from workspace import Workspace

__all__ = ["WARM", "pinned"]

WARM = "elsewhere: pinned create, {:,} files, warm"
_FIRST = "elsewhere: pinned create, {:,} files, first"
_REST_S = 2.0


def pinned(place: Workspace, effort: Effort) -> Section:
    section = Section(
        "G",
        "Pinned create: the project as it is now, immutable",
        "First: with the copy of the whole project. Warm: nothing changed since the last capture, so the project is looked at "
        "and nothing is copied; with a pause before each, as in A, and removed again each time, which is not timed. "
        f"`git worktree add` is for {effort.project_files:,} files, and for tracked ones only.",
        "ms",
    )
    for files in effort.pinned_files:
        directory = place.project if files == effort.project_files else _project(place, files)
        first = _create(directory, effort.pause)
        time.sleep(_REST_S)  # the disk has the copy to write
        warm = [_create(directory, effort.pause) for _ in range(effort.pinned_rounds)]
        section.rows.append(Row(_FIRST.format(files), "with a full copy", samples=Samples.of([first], 1000)))
        section.rows.append(Row(WARM.format(files), samples=Samples.of(warm, 1000)))
        if directory != place.project:
            shutil.rmtree(directory)
    row = Row(WORKTREE, "tracked files only, no isolation", absent="" if version_of("git") else "git is not installed")
    if not row.absent:
        row.samples = Samples.of([worktree(place) for _ in range(effort.clones)], 1000)
    section.rows.append(row)
    against(section, WORKTREE)
    return section


def _project(place: Workspace, files: int) -> str:
    directory = os.path.join(place.root, f"project-{files}")
    os.mkdir(directory)
    generate(directory, files)
    trash.remove_tree(os.path.join(directory, ".git"))
    return directory


def _create(directory: str, pause: float) -> float:
    time.sleep(pause)
    began = time.perf_counter()
    box = Sandbox.create(project=directory, base="pinned")
    took = time.perf_counter() - began
    box.remove()
    return took
