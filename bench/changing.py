"""A project of many files, a second tree of it, and a change that is made to either: for whoever measures what a change costs
(K, M). Nothing is timed here."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from contenders import version_of
from elsewhere import Sandbox
from elsewhere.storage import trash
from project import generate, git, path_of
from shell import environment
from workspace import Workspace

__all__ = ["Change", "copied", "many_files", "worktree"]

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
_COMMAND = (sys.executable, "-I", "-S", "-c", _SCRIPT)


@dataclass(frozen=True, slots=True)
class Change:
    """Paths by what happens to them: a fifth are new files, a fifth deleted ones, the others modified."""

    added: tuple[str, ...]
    modified: tuple[str, ...]
    deleted: tuple[str, ...]

    @classmethod
    def spread(cls, files: int, count: int) -> "Change":
        """So many, all over a project of so many files."""
        paths: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        for number in range(count):
            kind, path = _KINDS[number % len(_KINDS)], path_of(number * (files // count))
            paths[kind].append(f"{path}.new" if kind == "added" else path)
        return cls(tuple(paths["added"]), tuple(paths["modified"]), tuple(paths["deleted"]))

    def make_inside(self, box: Sandbox) -> None:
        box.run(list(_COMMAND), input=json.dumps(asdict(self))).check()

    def make_outside(self, directory: str) -> None:
        content = json.dumps(asdict(self)).encode()
        subprocess.run(_COMMAND, cwd=directory, input=content, env=environment(), check=True)

    def take_back(self, directory: str, original: str) -> None:
        """By copying from a tree that does not have it."""
        for path in self.added:
            os.unlink(os.path.join(directory, path))
        for path in self.modified + self.deleted:
            shutil.copy2(os.path.join(original, path), os.path.join(directory, path))

    def check(self, directory: str) -> None:
        """Whoever did not do all of it was not timed at the same work."""
        for path in self.added + self.modified:
            with open(os.path.join(directory, path), encoding="utf-8") as file:
                if not file.read().endswith(f"changed: {path}\n"):
                    raise RuntimeError(f"the change of {path} did not arrive")
        for path in self.deleted:
            if os.path.lexists(os.path.join(directory, path)):
                raise RuntimeError(f"{path} is still there")


@contextlib.contextmanager
def many_files(place: Workspace, files: int, filled_every: int) -> Iterator[str]:
    directory = os.path.join(place.root, f"compared-{files}")
    os.mkdir(directory)
    try:
        generate(directory, files, filled_every=filled_every)
        yield directory
    finally:
        trash.remove_tree(directory)


@contextlib.contextmanager
def worktree(place: Workspace, directory: str) -> Iterator[str]:
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


@contextlib.contextmanager
def copied(place: Workspace, directory: str) -> Iterator[str]:
    """A plain copy, times and all, without git's own files."""
    copy = place.fresh("copy")
    try:
        shutil.copytree(directory, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        yield copy
    finally:
        trash.remove_tree(copy)
