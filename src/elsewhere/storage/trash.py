"""Deleting: a directory is renamed into the trash at once and emptied later.

The only code that removes trees. It walks by descriptors and never follows a link, so that a tree which a sandbox filled
cannot lead it anywhere else.
"""

import contextlib
import itertools
import os
import stat

__all__ = ["discard", "empty", "remove_tree"]

_counter = itertools.count()


def discard(path: str, trash: str) -> None:
    """Constant time, whatever the size. Nothing there: nothing to do."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, os.path.join(trash, f"{os.getpid()}-{next(_counter)}-{os.path.basename(path)}"))


def empty(trash: str) -> int:
    """Delete what lies in the trash; the number of entries that could not be deleted yet."""
    left = 0
    with os.scandir(trash) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        try:
            remove_tree(os.path.join(trash, name))
        except OSError:
            left += 1
    return left


def remove_tree(path: str) -> None:
    parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove(parent, os.path.basename(path))
    finally:
        os.close(parent)


def _remove(parent: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        _remove_directory(parent, name)
    except FileNotFoundError:
        pass


def _remove_directory(parent: int, name: str) -> None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except PermissionError:
        # Closed by its owner, but ours to open, since it lies in our trash. By way of O_PATH: no link is followed.
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        finally:
            os.close(handle)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        names = os.listdir(fd)
        if names and os.geteuid() != 0 and os.fstat(fd).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.fchmod(fd, 0o700)
        for child in names:
            _remove(fd, child)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
