"""A tree to compare with, opened directory by directory: reality as it is, or a stack of frozen layers seen as one.

Directories are opened by the kernel without following links: a tree may belong to somebody who is hostile and still at work.
Frozen layers are in overlay's form, without opaque directories and redirects: a deleted name is a character device 0:0.
"""

import contextlib
import os
import stat
from collections.abc import Sequence

from elsewhere.linux import syscalls
from elsewhere.values import dataclass

__all__ = ["Directory", "Entry", "Tree", "entries_of", "is_whiteout", "open_beneath"]

_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LONGEST = 1000  # characters, of at most four bytes: the kernel takes paths of less than 4,096


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name stands for, and the directory in which it can be opened."""

    fd: int
    about: os.stat_result


def is_whiteout(about: os.stat_result) -> bool:
    return stat.S_ISCHR(about.st_mode) and about.st_rdev == 0


def open_beneath(top: int, path: str) -> int:
    """A directory, however long its path is, without following any link."""
    if len(path) < _LONGEST:
        return syscalls.openat2(top, path, os.O_RDONLY | os.O_DIRECTORY, _BENEATH)
    half = path.rindex("/", 0, _LONGEST)
    fd = syscalls.openat2(top, path[:half], os.O_RDONLY | os.O_DIRECTORY, _BENEATH)
    try:
        return open_beneath(fd, path[half + 1 :])
    finally:
        os.close(fd)


def entries_of(fd: int) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    with os.scandir(fd) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found[entry.name] = Entry(fd, entry.stat(follow_symlinks=False))
    return found


class Directory:
    """One directory of a tree: in each layer that has it, newest first."""

    __slots__ = ("_fds", "_layered")

    def __init__(self, fds: list[int], *, layered: bool) -> None:
        self._fds = fds
        self._layered = layered

    def find(self, name: str) -> Entry | None:
        for fd in self._fds:
            try:
                about = os.lstat(name, dir_fd=fd)
            except OSError:
                continue
            return None if self._layered and is_whiteout(about) else Entry(fd, about)
        return None

    def entries(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for fd in reversed(self._fds):
            with os.scandir(fd) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        if self._layered and is_whiteout(about):
                            found.pop(entry.name, None)
                        else:
                            found[entry.name] = Entry(fd, about)
        return found


class Tree:
    def __init__(self, roots: Sequence[str], stack: contextlib.ExitStack) -> None:
        """Of one directory, or of the layers of a stack, newest first; of none, an empty tree."""
        self._roots = []
        for root in roots:
            self._roots.append(os.open(root, _FLAGS))
            stack.callback(os.close, self._roots[-1])

    def open(self, path: str, stack: contextlib.ExitStack) -> Directory | None:
        """None: there is no directory of that name."""
        if len(self._roots) == 1:
            try:
                fd = syscalls.openat2(self._roots[0], path or ".", os.O_RDONLY | os.O_DIRECTORY, _BENEATH)
            except (FileNotFoundError, NotADirectoryError):
                return None
            stack.callback(os.close, fd)
            return Directory([fd], layered=False)
        return self._open_layers(path, stack)

    def _open_layers(self, path: str, stack: contextlib.ExitStack) -> Directory | None:
        here = []
        for root in self._roots:
            here.append(os.open(".", _FLAGS, dir_fd=root))
            stack.callback(os.close, here[-1])
        if not here:
            return None
        for part in path.split("/") if path else ():
            below = []
            for fd in here:
                try:
                    about = os.lstat(part, dir_fd=fd)
                except FileNotFoundError:
                    continue
                if not stat.S_ISDIR(about.st_mode):
                    break  # deleted or replaced here: nothing of what is older shows
                below.append(os.open(part, _FLAGS | os.O_NOFOLLOW, dir_fd=fd))
                stack.callback(os.close, below[-1])
            if not below:
                return None
            here = below
        return Directory(here, layered=True)
