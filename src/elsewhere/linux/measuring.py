"""How much disk a tree takes, counted by somebody who cannot trust what is in it and may not take long.

It runs inside the keeper, too: nothing is imported once it runs, depth costs no frames, and memory and open descriptors are
bounded whatever the tree looks like.

    level   0 … n-16    two numbers each: the directory's inode, and where in it the walk goes on
          n-16 … n      a descriptor and the names that were read but not looked at yet

So a tree may be deeper than any path can be long, and a directory may have more names than fit into memory. The way back up, from
a level that has no descriptor any more, is `..`; if that is not the directory which was left, somebody moved it, and the count
ends there, incomplete.

`fd` should be the root of a mount of its own (a read-only clone): then `..` leads nowhere else.
"""

import ctypes
import errno
import os
import stat
import struct
import time
from array import array

from elsewhere.values import dataclass

__all__ = ["Used", "used"]

_OPEN_LEVELS = 16
_REMEMBERED = 65536  # inodes with several names; a few megabytes at the most
_BUFFER = 32768
_LOOK_AT_CLOCK = 256  # steps

_HEAD = struct.Struct("QqHB")  # inode, where the next one is, length, type; the name follows and ends with a zero byte
_CHARACTER_DEVICE = 2
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.getdents64.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class Used:
    """`bytes` as allocated, `files` counts names of every kind. What is not complete is a lower bound."""

    bytes: int
    files: int
    complete: bool


def used(fd: int, *, most: int | None = None, names: int | None = None, deadline: float | None = None) -> Used:
    """What lies below a directory, itself not counted. Stops as soon as it is more than `most` bytes or so many `names`, or at
    `deadline` (`time.monotonic`). Other file systems are left out, links are not followed, a file with several names counts
    once."""
    walk = _Walk(fd, most, names, deadline)
    try:
        walk.run()
    finally:
        walk.close()
    return Used(walk.bytes, walk.files, walk.complete)


class _Level:
    """A directory that is being read."""

    __slots__ = ("buffer", "fd", "inode", "is_gone", "next", "position")

    def __init__(self, fd: int, inode: int, begin: int = 0) -> None:
        self.fd = fd
        self.inode = inode
        self.next = begin
        self.buffer = b""
        self.position = 0
        self.is_gone = False
        if begin:
            try:
                os.lseek(fd, begin, os.SEEK_SET)
            except OSError:
                self.is_gone = True  # deleted since: it has no place to go on at, and nothing in it

    def read(self) -> tuple[bytes, int] | None:
        """The next name and its type; None at the end."""
        while True:
            if self.position >= len(self.buffer):
                self.buffer, self.position = b"" if self.is_gone else _getdents64(self.fd), 0
                if not self.buffer:
                    return None
            _, self.next, length, kind = _HEAD.unpack_from(self.buffer, self.position)
            begin = self.position + _HEAD.size
            name = self.buffer[begin : self.buffer.index(0, begin)]
            self.position += length
            if name not in (b".", b".."):
                return name, kind


class _Walk:
    def __init__(self, fd: int, most: int | None, names: int | None, deadline: float | None) -> None:
        self.bytes = 0
        self.files = 0
        self.complete = True
        self._most = most
        self._names = names
        self._deadline = deadline
        self._steps = 0
        self._shared: set[int] = set()
        self._inodes = array("Q")
        self._places = array("q")
        about = os.fstat(fd)
        self._device = about.st_dev
        self._levels = [_Level(os.open(".", _DIRECTORY, dir_fd=fd), about.st_ino)]

    def close(self) -> None:
        while self._levels:
            os.close(self._levels.pop().fd)

    def run(self) -> None:
        while self._levels:
            if self._is_enough():
                self.complete = False
                return
            try:
                entry = self._levels[-1].read()
            except OSError as error:
                entry = None
                self._missed(error)
            if entry is None:
                self._up()
            else:
                self._count(*entry)

    def _is_enough(self) -> bool:
        if (self._most is not None and self.bytes > self._most) or (self._names is not None and self.files > self._names):
            return True
        self._steps += 1
        return self._deadline is not None and self._steps % _LOOK_AT_CLOCK == 1 and time.monotonic() >= self._deadline

    def _count(self, name: bytes, kind: int) -> None:
        if kind == _CHARACTER_DEVICE:
            self.files += 1  # overlay's mark of a deletion: one inode with as many names as there are deletions, and no blocks
            return
        level = self._levels[-1]
        try:
            about = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
        except OSError as error:
            self._missed(error)
            return
        if about.st_dev != self._device:
            return
        self.files += 1
        if stat.S_ISDIR(about.st_mode):
            self.bytes += about.st_blocks * 512
            self._down(level, name)
        elif about.st_nlink == 1:
            self.bytes += about.st_blocks * 512
        else:
            self.bytes += self._share(about)

    def _share(self, about: os.stat_result) -> int:
        """All of it for the first name, nothing for the others. Beyond what can be remembered each name carries its part."""
        if about.st_ino in self._shared:
            return 0
        if len(self._shared) < _REMEMBERED:
            self._shared.add(about.st_ino)
            return about.st_blocks * 512
        return about.st_blocks * 512 // max(1, about.st_nlink)

    def _down(self, level: _Level, name: bytes) -> None:
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=level.fd)
        except OSError as error:
            self._missed(error)
            return
        about = os.fstat(fd)
        if about.st_dev != self._device:
            os.close(fd)
            return
        self._levels.append(_Level(fd, about.st_ino))
        if len(self._levels) > _OPEN_LEVELS:
            left = self._levels.pop(0)
            self._inodes.append(left.inode)
            self._places.append(left.next)
            os.close(left.fd)

    def _up(self) -> None:
        level = self._levels.pop()
        try:
            if not self._levels and self._inodes:
                self._levels.append(self._parent(level))
        except OSError:
            self.complete = False
        finally:
            os.close(level.fd)

    def _parent(self, level: _Level) -> _Level:
        inode, place = self._inodes.pop(), self._places.pop()
        fd = os.open("..", _DIRECTORY, dir_fd=level.fd)
        about = os.fstat(fd)
        if (about.st_ino, about.st_dev) != (inode, self._device):
            os.close(fd)
            raise OSError(errno.ESTALE, "moved while it was counted")
        return _Level(fd, inode, place)

    def _missed(self, error: OSError) -> None:
        """What is gone takes no room any more; what cannot be read may."""
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            self.complete = False


def _getdents64(fd: int) -> bytes:
    block = ctypes.create_string_buffer(_BUFFER)
    length = int(_libc.getdents64(fd, block, ctypes.c_size_t(_BUFFER)))
    if length < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"getdents64: {os.strerror(number)}")
    return block.raw[:length]
