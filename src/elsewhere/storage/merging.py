"""Several deltas as one: the same entries by hard links, so that no data is copied, and the old layers stay as they are.

What a delta hides by replacing a directory and bringing it back later has to be hidden in the merged one as well. Overlay has a
mark for that (opaque); a whiteout for each name below serves as well, is made the same way by everybody, and needs the full copy
at the bottom to be looked at. A whiteout that hides nothing there is dropped.

Not here: when to merge, and what becomes of the old layers (see `bases.py`).
"""

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from elsewhere.storage.capturing import whiteout
from elsewhere.storage.copying import Attributes, copy_attributes, copy_file
from elsewhere.storage.scanning import join

__all__ = ["merge"]


@dataclass(frozen=True, slots=True)
class _Place:
    """A directory of the merged layer: which deltas make it up (newest first), whether the bottom has a directory there, and
    whether a delta hides that one."""

    path: str
    layers: tuple[str, ...]
    over: bool
    hidden: bool


def merge(deltas: Sequence[str], bottom: str, target: str) -> Attributes:
    """Make the new directory `target`, which on `bottom` looks as `deltas` (newest first) do. What is returned are the attributes
    of its own directory, to be given to it when it has its place."""
    waiting = [_Place("", tuple(deltas), True, False)]
    finished: list[tuple[str, Attributes]] = []
    while waiting:
        place = waiting.pop()
        here = f"{target}/{place.path}" if place.path else target
        os.mkdir(here, 0o700)
        newest = f"{place.layers[0]}/{place.path}"
        finished.append((here, Attributes.read(newest, os.lstat(newest))))
        waiting += _fill(place, bottom, here)
    for here, attributes in reversed(finished[1:]):
        attributes.give(here)
    return finished[0][1]


def _fill(place: _Place, bottom: str, here: str) -> list[_Place]:
    """One directory of the merged layer; those below it are returned, to be made next."""
    below = _listed(f"{bottom}/{place.path}") if place.over else {}
    found: dict[str, list[tuple[str, os.stat_result]]] = {}
    for layer in place.layers:
        for name, about in _listed(f"{layer}/{place.path}").items():
            found.setdefault(name, []).append((layer, about))
    directories = []
    for name, stack in found.items():
        layer, newest = stack[0]
        if stat.S_ISDIR(newest.st_mode):
            layers = _unhidden(stack)
            over = name in below and stat.S_ISDIR(below[name].st_mode)
            directories.append(_Place(join(place.path, name), layers, over, place.hidden or len(layers) < len(stack)))
        elif not stat.S_ISCHR(newest.st_mode):
            _link(f"{layer}/{join(place.path, name)}", f"{here}/{name}", newest)
        elif name in below:
            whiteout(f"{here}/{name}")
    if place.hidden:
        for name in below:
            if name not in found:
                whiteout(f"{here}/{name}")
    return directories


def _unhidden(stack: list[tuple[str, os.stat_result]]) -> tuple[str, ...]:
    """The layers whose directory shows: overlay stops at the first that has something else there."""
    layers = []
    for layer, about in stack:
        if not stat.S_ISDIR(about.st_mode):
            break
        layers.append(layer)
    return tuple(layers)


def _listed(path: str) -> dict[str, os.stat_result]:
    with os.scandir(path) as entries:
        return {entry.name: entry.stat(follow_symlinks=False) for entry in entries}


def _link(source: str, target: str, about: os.stat_result) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        # A file may have only so many names (65,000 on ext4).
        if error.errno != errno.EMLINK or not stat.S_ISREG(about.st_mode):
            raise
        copy_file(source, target)
        copy_attributes(source, target, about)
