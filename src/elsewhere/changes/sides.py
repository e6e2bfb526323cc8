"""What stands at a path of a tree: reality as it is, or a stack of frozen layers seen as one.

No link on the way counts: below a directory that became a link there is nothing. Frozen layers are in overlay's form, without
opaque directories and redirects; what is deleted is a character device 0:0.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence

from elsewhere.changes.model import Place, Side
from elsewhere.linux import syscalls
from elsewhere.storage.trees import is_whiteout

__all__ = ["Sides", "sides_of"]

Sides = Callable[[str], Side | None]

_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_HIDDEN = (errno.ENOTDIR, errno.ELOOP)  # a layer that has something else on the way hides what is older


def sides_of(roots: Sequence[str]) -> Sides:
    """Of one directory, or of layers, newest first. Paths are relative to it; None is the answer for what is not there."""

    def side(path: str) -> Side | None:
        for root in roots:
            try:
                return _side(root, path)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno in _HIDDEN:
                    return None
                raise
        return None

    return side


def _side(root: str, path: str) -> Side | None:
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = syscalls.openat2(directory, path, _FLAGS, _BENEATH)
    finally:
        os.close(directory)
    try:
        about = os.fstat(fd)
        if is_whiteout(about):
            return None
        target = os.readlink("", dir_fd=fd) if stat.S_ISLNK(about.st_mode) else None
        return Side(about, Place(root, path), target)
    finally:
        os.close(fd)
