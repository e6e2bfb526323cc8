"""Bringing layers out of memory onto a disk that cannot hold overlay's own marks (a state directory on overlay, for one).

upper/<n>/             files, links and directories as they are
upper/<n>.marks.json   {"deleted": [path, …], "opaque": [path, …]}, relative to the layer
"""

import json
import os
import stat

from elsewhere.storage.copying import copy_attributes, copy_file
from elsewhere.storage.state import write_aside
from elsewhere.storage.trash import remove_tree

__all__ = ["read_marks", "save_layers"]

_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


def save_layers(source: str, target: str) -> None:
    """Replace the layers in `target` by those in `source`."""
    remove_tree(target)
    os.mkdir(target, 0o711)
    for name in os.listdir(source):
        marks: dict[str, list[str]] = {"deleted": [], "opaque": []}
        waiting = [""]
        while waiting:
            waiting += _save_directory(os.path.join(source, name), os.path.join(target, name), waiting.pop(), marks)
        write_aside(os.path.join(target, f"{name}.marks.json"), json.dumps(marks).encode())


def read_marks(layer: str) -> tuple[list[str], list[str]] | None:
    """What `save_layers` wrote beside a layer; None: the layer has its marks in itself."""
    try:
        with open(f"{layer}.marks.json", "rb") as stream:
            marks = json.load(stream)
    except FileNotFoundError:
        return None
    return marks["deleted"], marks["opaque"]


def _save_directory(source: str, target: str, path: str, marks: dict[str, list[str]]) -> list[str]:
    """One directory; what lies below it is returned, to be done next. Parents are left open for that, and so closed last."""
    here, there = os.path.join(source, path), os.path.join(target, path)
    os.mkdir(there, 0o700)
    below = []
    with os.scandir(here) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            child = os.path.join(path, entry.name)
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                marks["deleted"].append(child)
            elif stat.S_ISDIR(found.st_mode):
                below.append(child)
            elif stat.S_ISLNK(found.st_mode):
                os.symlink(os.readlink(entry.path), os.path.join(target, child))
            elif stat.S_ISREG(found.st_mode):
                copy_file(entry.path, os.path.join(target, child))
                copy_attributes(entry.path, os.path.join(target, child), found)
    if any(_is_set(here, name) for name in _OPAQUE):
        marks["opaque"].append(path)
    found = os.stat(here)
    os.chmod(there, stat.S_IMODE(found.st_mode) | stat.S_IRWXU)
    return below


def _is_set(path: str, name: str) -> bool:
    try:
        return os.getxattr(path, name, follow_symlinks=False) == b"y"
    except OSError:
        return False
