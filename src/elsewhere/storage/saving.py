"""Bringing layers out of memory onto a disk that cannot hold overlay's own marks (a state directory on overlay, say), and back.

upper/<n>/             files, links and directories as they are
upper/<n>.marks.json   {"deleted": [path, …], "opaque": [path, …]}, relative to the layer
"""

import contextlib
import json
import os
import stat
from typing import Any

from elsewhere.errors import StateError
from elsewhere.storage.copying import copy_attributes, copy_file, copy_tree
from elsewhere.storage.state import write_aside
from elsewhere.storage.trash import remove_tree

__all__ = ["check_room", "copy_saved", "read_marks", "restore_layers", "save_layers"]

_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
_OWN_MARKS = ("trusted.overlay.", "user.overlay.")

Marks = dict[str, list[str]]


def save_layers(source: str, target: str) -> None:
    """Replace the layers in `target` by those in `source`: whole, or not at all."""
    aside = target + ".new"
    _clear(aside)
    os.mkdir(aside, 0o711)
    for name in os.listdir(source):
        if not stat.S_ISDIR(os.lstat(os.path.join(source, name)).st_mode):
            continue  # a link would lead out of the layers
        marks: Marks = {"deleted": [], "opaque": []}
        _copy(os.path.join(source, name), os.path.join(aside, name), marks)
        write_aside(os.path.join(aside, f"{name}.marks.json"), json.dumps(marks).encode())
    _exchange(aside, target)


def copy_saved(source: str, target: str) -> None:
    """Replace the layers in `target` by those in `source`, which were saved earlier: whole, or not at all."""
    aside = target + ".new"
    _clear(aside)
    copy_tree(source, aside)
    _exchange(aside, target)


def _exchange(aside: str, target: str) -> None:
    _clear(target + ".old")
    os.rename(target, target + ".old")
    os.rename(aside, target)
    _clear(target + ".old")


def check_room(memory: int, directory: str) -> None:
    """Whether what lies in memory fits on the disk."""
    held, disk = os.statvfs(memory), os.statvfs(directory)
    if (held.f_blocks - held.f_bfree) * held.f_frsize > disk.f_bavail * disk.f_frsize:
        raise StateError(
            "no_room",
            "what the sandbox wrote lives in memory, and does not fit on the disk",
            hint="free some space, then end it again",
        )


def restore_layers(source: str, target: str, attribute: str) -> None:
    """The other way: to where overlay finds its marks (`attribute` is their prefix) in the layers themselves. A layer that is
    there already stays as it is."""
    os.makedirs(target, 0o711, exist_ok=True)
    for name in os.listdir(source):
        if not name.endswith(".marks.json") and not os.path.isdir(os.path.join(target, name)):
            _copy(os.path.join(source, name), os.path.join(target, name), {"deleted": [], "opaque": []})
            deleted, opaque = read_marks(os.path.join(source, name)) or ([], [])
            for path in deleted:
                os.mknod(os.path.join(target, name, path), stat.S_IFCHR, 0)
            for path in opaque:
                os.setxattr(os.path.join(target, name, path), f"{attribute}.opaque", b"y")


def read_marks(layer: str) -> tuple[list[str], list[str]] | None:
    """What `save_layers` wrote beside a layer; None: the layer has its marks in itself."""
    try:
        with open(f"{layer}.marks.json", "rb") as stream:
            marks: dict[str, Any] = json.load(stream)
    except FileNotFoundError:
        return None
    return marks["deleted"], marks["opaque"]


def _clear(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        remove_tree(path)


def _copy(source: str, target: str, marks: Marks) -> None:
    """One layer. Directories get what is theirs last: a closed one could not be filled."""
    directories = [("", os.lstat(source))]
    links: dict[tuple[int, int], str] = {}
    for path, _ in directories:  # grows
        directories += _copy_directory(source, target, path, marks, links)
    for path, about in reversed(directories):
        here, there = os.path.join(source, path), os.path.join(target, path)
        if any(_is_set(here, name) for name in _OPAQUE):
            marks["opaque"].append(path)
        copy_attributes(here, there, about)
        for name in os.listxattr(there):
            if name.startswith(_OWN_MARKS):
                with contextlib.suppress(OSError):
                    os.removexattr(there, name)


def _copy_directory(
    source: str, target: str, path: str, marks: Marks, links: dict[tuple[int, int], str]
) -> list[tuple[str, os.stat_result]]:
    """One directory; what lies below it is returned, to be done next. What its owner closed is ours to open: it is a copy."""
    os.mkdir(os.path.join(target, path), 0o700)
    _open_up(os.path.join(source, path), os.lstat(os.path.join(source, path)), stat.S_IRWXU)
    below = []
    with os.scandir(os.path.join(source, path)) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            child = os.path.join(path, entry.name)
            place = os.path.join(target, child)
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                marks["deleted"].append(child)
                continue
            if stat.S_ISDIR(found.st_mode):
                below.append((child, found))
                continue
            if found.st_nlink > 1:
                first = links.setdefault((found.st_dev, found.st_ino), place)
                if first != place and os.path.lexists(first):
                    os.link(first, place, follow_symlinks=False)
                    continue
            if stat.S_ISLNK(found.st_mode):
                os.symlink(os.readlink(entry.path), place)
            elif stat.S_ISREG(found.st_mode):
                _open_up(entry.path, found, stat.S_IRUSR)
                copy_file(entry.path, place)
            elif stat.S_ISFIFO(found.st_mode):
                os.mkfifo(place)
            else:
                continue  # a socket means nothing without its owner
            copy_attributes(entry.path, place, found)
    return below


def _open_up(path: str, about: os.stat_result, needed: int) -> None:
    if about.st_mode & needed != needed and os.geteuid() != 0:
        os.chmod(path, stat.S_IMODE(about.st_mode) | needed)


def _is_set(path: str, name: str) -> bool:
    try:
        return os.getxattr(path, name, follow_symlinks=False) == b"y"
    except OSError:
        return False
