"""Words about paths: what lies within what. They are free of links; nothing here looks at a file system."""

from collections.abc import Iterable

__all__ = ["above", "is_within", "outermost", "relative"]


def above(path: str) -> list[str]:
    """The directories that a path is in, the nearest first; not the one that it is relative to, nor the root."""
    found = []
    while path := path.rpartition("/")[0]:
        found.append(path)
    return found


def is_within(path: str, place: str) -> bool:
    """Whether `path` is `place` or lies below it."""
    return path == place or path.startswith(place.rstrip("/") + "/")


def outermost(paths: Iterable[str]) -> list[str]:
    """Without those that lie inside another one, in the order in which they came."""
    known = list(dict.fromkeys(paths))
    return [path for path in known if not any(path != other and is_within(path, other) for other in known)]


def relative(path: str, project: str) -> str:
    """Relative to the project, absolute outside it."""
    return path[len(project) + 1 :] if path.startswith(project + "/") else path
