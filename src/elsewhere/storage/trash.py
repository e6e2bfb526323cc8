"""Deleting: a directory is renamed into the trash at once and emptied later.

It walks by descriptors and never follows a link, so that a tree which a sandbox filled
cannot lead it anywhere else.
"""

import contextlib
import os
import stat
from collections.abc import Callable

__all__ = ["discard", "empty", "remove_tree"]

_DEEPEST = 64  # levels that are walked down at once: each one holds a descriptor and two frames


def discard(path: str, trash: str) -> None:
    """Constant time, whatever the size. Nothing there: nothing to do."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, os.path.join(trash, _fresh(os.path.basename(path))))


def empty(trash: str, first: Callable[[str], None] | None = None) -> int:
    """Delete what lies in the trash; the number of entries that could not be deleted yet. `first` is called with each name."""
    left = 0
    with os.scandir(trash) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if first is not None:
            first(name)
        try:
            remove_tree(os.path.join(trash, name))
        except OSError:
            left += 1
    return left


def _fresh(name: str) -> str:
    """By chance and not by process id: those come again after a restart, and the trash may still be full then."""
    return f"{os.urandom(6).hex()}-{name}"


def remove_tree(path: str) -> None:
    parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        waiting = [os.path.basename(path)]
        while waiting:
            _remove(parent, waiting.pop(), parent, waiting, 0)
    finally:
        os.close(parent)


def _remove(parent: int, name: str, top: int, waiting: list[str], depth: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except IsADirectoryError:
        pass
    fd = _open(parent, name)
    try:
        if depth == _DEEPEST:
            # Too deep to go on: it is moved up beside the tree, and its turn comes later.
            waiting.append(_fresh("deep"))
            os.rename(name, waiting[-1], src_dir_fd=parent, dst_dir_fd=top)
            return
        for child in os.listdir(fd):
            _remove(fd, child, top, waiting, depth + 1)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def _open(parent: int, name: str) -> int:
    """One that its owner closed is ours to open, since it lies in our trash; by way of O_PATH, so that no link is followed."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if os.geteuid() != 0:
        handle = os.open(name, os.O_PATH | flags, dir_fd=parent)
        try:
            if os.fstat(handle).st_mode & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(f"/proc/self/fd/{handle}", 0o700)
        finally:
            os.close(handle)
    return os.open(name, os.O_RDONLY | flags, dir_fd=parent)
