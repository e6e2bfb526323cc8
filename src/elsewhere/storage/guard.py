"""A guard keeps SQLite from tidying up whenever a short command is the last to close a database.

It is a shared lock of our own on the bytes of the database that SQLite locks alone when its last connection closes. Without that
lock SQLite neither writes the -wal back nor deletes it, which would cost two fsyncs (4 ms where all the rest costs 0.5).

The lock belongs to an open file (OFD), while SQLite's own belong to the process: so the two conflict, as they must. And to close
any descriptor of a file gives up all the locks that the process holds on it: so a guard is taken before the connection is made,
given back after it is closed, and shared by all connections of the process. Not here: SQLite.
"""

import contextlib
import fcntl
import os
import struct
import threading

__all__ = ["Guard", "Identity"]

Identity = tuple[int, int]  # device and inode


class Guard:
    """One for each file in a process, however many connections there are."""

    _held: dict[Identity, "Guard"] = {}  # noqa: RUF012
    _mutex = threading.Lock()

    def __init__(self, identity: Identity, fd: int) -> None:
        self._identity = identity
        self._fd = fd
        self._users = 1

    @classmethod
    def hold(cls, path: str, identity: Identity) -> "Guard":
        with cls._mutex:
            found = cls._held.get(identity)
            if found is not None:
                found._users += 1
                return found
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            first, count = 0x4000_0002, 510  # SHARED_FIRST and SHARED_SIZE of SQLite's file format
            with contextlib.suppress(OSError):  # where there are no such locks it is merely slower
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, first, count, 0))
            made = cls._held[identity] = cls(identity, fd)
            return made

    def header(self) -> bytes:
        return os.pread(self._fd, 100, 0)

    def release(self) -> None:
        with self._mutex:
            self._users -= 1
            if not self._users:
                del self._held[self._identity]
                os.close(self._fd)
