"""Repositories in which commits were made that do not travel, since the project is not their top: one that the project is a
directory of, or one that lies in the project. It is told by what was changed, and nothing is read of what a sandbox wrote.

Not here: commits of the project's own repository (`commits.py`), which do; what a sandbox cloned, which is somebody else's.
"""

from collections.abc import Iterable

from elsewhere.paths import is_within
from elsewhere.storage import repositories

__all__ = ["tops"]

_OBJECTS = "objects/"
_HEADS = ("HEAD", "refs/heads/", "packed-refs", "reftable/")


def tops(paths: Iterable[str], project: str) -> list[str]:
    """The top of each, by absolute paths that a sandbox changed: a commit is a new object, and something else leads to it now."""
    own = repositories.look(project)
    known = () if own is None else (own.git, own.common)
    names: dict[str, list[str]] = {}
    for path in paths:
        top, mark, name = path.partition("/.git/")
        if mark and not any(is_within(path, place) for place in known):
            names.setdefault(top, []).append(name)
    made = [top for top, below in names.items() if _has(below, _OBJECTS) and _has(below, *_HEADS)]
    near = [top for top in made if is_within(project, top) or is_within(top, project)]
    return sorted(top for top in near if repositories.look(top) is not None)


def _has(names: Iterable[str], *beginnings: str) -> bool:
    return any(name.startswith(beginnings) for name in names)
