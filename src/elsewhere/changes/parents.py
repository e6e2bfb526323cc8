"""Whether the directories that a path is in are still there, on the side to which it is to be moved.

No link counts as a directory. A directory that is missing is a problem only if it was there before: one that is new comes with
what is in it.
"""

import os
from collections.abc import Callable

from elsewhere.changes.sides import Sides

__all__ = ["Parents"]


class Parents:
    """`now` tells what stands, or will stand, at a path of the other side; `was_directory` whether a missing directory was there
    before. Each is asked for once."""

    def __init__(self, now: Sides, was_directory: Callable[[str], bool]) -> None:
        self._now = now
        self._was_directory = was_directory
        self._known: dict[str, str | None] = {"": None}

    def problem(self, path: str) -> str | None:
        """parent_gone or parent_replaced; None: it can be put there."""
        parent = os.path.dirname(path)
        if parent not in self._known:
            self._known[parent] = self.problem(parent) or self._look(parent)
        return self._known[parent]

    def _look(self, directory: str) -> str | None:
        there = self._now(directory)
        if there is not None:
            return None if there.type == "directory" else "parent_replaced"
        return "parent_gone" if self._was_directory(directory) else None
