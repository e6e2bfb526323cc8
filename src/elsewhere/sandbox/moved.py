"""Hidden places that a sandbox moved: a directory that it renamed shows at its new place what lay in it in reality.

Only a directory around a hidden place leads it along. Whether one of those was touched at all is looked up first, at a cost that
does not depend on what else the layers hold: gone through are they only then.
"""

import os
import stat
from collections.abc import Iterable, Sequence

from elsewhere.paths import is_within
from elsewhere.storage import redirects

__all__ = ["also_at"]

_MARKS = {"trusted.overlay.redirect", "trusted.overlay.opaque"}


def also_at(places: Iterable[str], at: str, layers: Sequence[str]) -> list[str]:
    """Where else these places show in the overlay at `at`, as its layers (newest first) have it."""
    inside = [place for place in places if is_within(place, at) and place != at]
    paths = [os.path.relpath(place, at) for place in inside]
    if not any(_is_replaced(layer, os.path.dirname(path)) for layer in layers for path in paths):
        return []
    moves = redirects.moves(*layers)
    found = []
    for place, path in zip(inside, paths, strict=True):
        for now, before in moves:
            moved = os.path.join(at, now) + path[len(before) :]
            if is_within(f"/{path}", f"/{before}") and moved != place and moved not in found:
                found.append(moved)
    return found


def _is_replaced(layer: str, directory: str) -> bool:
    """Whether the layer hides what is below at a directory, or at one around it."""
    place = layer
    for name in directory.split("/") if directory else ():
        place = os.path.join(place, name)
        try:
            if not stat.S_ISDIR(os.lstat(place).st_mode) or _MARKS & set(os.listxattr(place, follow_symlinks=False)):
                return True
        except FileNotFoundError:
            return False
    return False
