"""What goes between a caller's descriptors and a command's: captured, relayed, fed, or typed. None of them is ever waited for
alone: `commands.py` polls them together with the command's end."""

import contextlib
import fcntl
import os
import select
import stat
import struct
import termios
from collections.abc import Iterator

from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.keeping.callers import Signals, is_in_front

__all__ = ["PIPE_CHUNKS", "Feed", "Keys", "Relay", "Sink", "Typed", "fed", "is_file", "pass_on"]

_CHUNK = 1 << 16
_PIPE_ATOMIC = 4096  # is written as a whole, or not at all
PIPE_CHUNKS = 32
_BEHIND_MS = 200


class Sink:
    def __init__(self, reader: int, writer: int, cap: int) -> None:
        self.reader = reader
        self.writer = writer
        self.data = bytearray()
        self.truncated = False
        self._cap = cap
        os.set_blocking(reader, False)

    def take(self) -> bool:
        try:
            chunk = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return True
        room = self._cap - len(self.data)
        if len(chunk) > room:
            self.truncated = True
        self.data += chunk[:room]
        return bool(chunk)

    def drain(self) -> None:
        """What the pipe still holds; never wait for more: a child that was left behind may hold it open or go on writing."""
        for _ in range(PIPE_CHUNKS):
            if not wire.readable(self.reader) or not self.take():
                return


class Relay:
    """A pipe whose content goes to a file or a terminal of the caller's. If that cannot be written (a full disk, say), the pipe
    breaks, and whoever goes on writing notices."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)

    def take(self) -> bool:
        """Whether there may be more."""
        try:
            view = memoryview(os.read(self.reader, _CHUNK))
        except BlockingIOError:
            return True
        if not view:
            return False
        try:
            _write_all(self.target, view)
        except OSError:
            self.close()
            return False
        return True

    def drain(self) -> None:
        """What the pipe still holds, and no more than that."""
        for _ in range(PIPE_CHUNKS):
            if self.reader < 0 or not wire.readable(self.reader) or not self.take():
                return

    def close(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


def is_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


@contextlib.contextmanager
def fed(source: int, signals: Signals | None) -> "Iterator[Feed | Typed | None]":
    """Standard input for a command, where the caller's is a terminal, or a file with a name: whoever has such a file can change
    it by way of /proc/self/fd, though it was opened for reading only."""
    feed: Feed | Typed
    if os.isatty(source):
        feed = Typed(source, signals)
    elif is_file(source) and os.fstat(source).st_nlink:
        feed = Feed(source)
    else:
        yield None
        return
    try:
        yield feed
    finally:
        feed.close()


class Feed:
    """A pipe that a file of the caller's is poured into, as fast as it is read and no faster. What nobody read is the caller's
    again: their place in the file is where the command stopped reading."""

    def __init__(self, source: int) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        self._source = source
        os.set_blocking(self.writer, False)

    def register(self, poll: select.poll) -> int | None:
        if self.writer >= 0:
            poll.register(self.writer, select.POLLOUT)
        return None

    def serves(self, fd: int) -> bool:
        return fd == self.writer

    def move(self, poll: select.poll, fd: int, events: int) -> None:
        del events
        chunk = os.read(self._source, _PIPE_ATOMIC)
        try:
            if chunk:
                os.write(self.writer, chunk)
                return
        except OSError as error:  # no room yet, or nobody reads any more
            os.lseek(self._source, -len(chunk), os.SEEK_CUR)
            if isinstance(error, BlockingIOError):
                return
        poll.unregister(fd)
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        left = struct.unpack("i", fcntl.ioctl(self.reader, termios.FIONREAD, b"\0" * 4))[0]
        if left:
            with contextlib.suppress(OSError):
                os.lseek(self._source, -left, os.SEEK_CUR)
        for fd in (self.reader, self.writer):
            if fd >= 0:
                os.close(fd)


class Typed:
    """A pipe into which goes what is typed on the caller's terminal. What was taken cannot be given back, so more is taken only
    when all of it was read: with a command that does not read, a line is lost at the most. Nothing is taken while the caller is
    in the background: what is typed then is for whoever is in front."""

    def __init__(self, source: int, signals: Signals | None) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_ATOMIC)  # one page: it has room when it is empty, and only then
        os.set_blocking(self.writer, False)
        self._caller = os.getpid() if signals is None else signals.caller()
        self._terminal = os.fstat(source).st_rdev
        self._own = -1
        with contextlib.suppress(OSError):  # of its own, so that not to wait for it concerns nobody else
            self._own = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        self._source = source if self._own < 0 else self._own
        self._empty = False

    def register(self, poll: select.poll) -> int | None:
        """For how many milliseconds to wait at the most: that we are in front again is told by nobody."""
        if self.reader >= 0:
            os.close(self.reader)  # the command has it by now, and when it lets go of it we are to notice
            self.reader = -1
        with contextlib.suppress(KeyError):
            poll.unregister(self._source)
        if self.writer < 0:
            return None
        poll.register(self.writer, 0 if self._empty else select.POLLOUT)  # that nobody reads any more is told in any case
        if not self._empty:
            return None
        if not is_in_front(self._caller, self._terminal):
            return _BEHIND_MS
        poll.register(self._source, select.POLLIN)
        return None

    def serves(self, fd: int) -> bool:
        return fd in (self.writer, self._source)

    def move(self, poll: select.poll, fd: int, events: int) -> None:
        if self.writer < 0:
            return  # both had news at once, and the first one was the end
        if fd == self.writer and not events & (select.POLLERR | select.POLLHUP):
            self._empty = True
            return
        typed = b""
        if fd != self.writer:
            try:
                typed = os.read(self._source, _PIPE_ATOMIC)
            except BlockingIOError:
                return  # somebody else was faster
            except OSError:
                pass  # a terminal that is gone reads as an error
        try:
            if typed:
                os.write(self.writer, typed)
                self._empty = False
                return
        except OSError:
            pass  # nobody reads any more
        poll.unregister(self.writer)
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        for fd in (self.reader, self.writer, self._own):
            if fd >= 0:
                os.close(fd)


class Keys:
    """What is typed, on its way to the command: never waited for, since a command that does not read must not keep us from
    showing what it says."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self._waiting = b""
        self._open = True

    def register(self, poll: select.poll, *, served: bool) -> None:
        """More is read only when what was read before is gone, and nothing once either end is: an end that is closed would be
        reported for ever."""
        if served:
            poll.register(self.target, select.POLLIN | (select.POLLOUT if self._waiting else 0))
        if served and self._open and not self._waiting:
            poll.register(self.source, select.POLLIN)
        else:
            with contextlib.suppress(KeyError):
                poll.unregister(self.source)

    def move(self) -> None:
        if not self._waiting:
            try:
                self._waiting = os.read(self.source, _CHUNK)
            except OSError:
                self._waiting = b""  # a terminal that is gone reads as an error
            self._open = bool(self._waiting)
        try:
            self._waiting = self._waiting[os.write(self.target, self._waiting) :]
        except BlockingIOError:
            return
        except OSError:
            self._waiting = b""


def pass_on(source: int, target: int) -> bool:
    """One chunk; False at the end of the source."""
    try:
        data = os.read(source, _CHUNK)
    except BlockingIOError:
        return False
    except OSError:
        return False  # a terminal whose other side is closed reads as an error
    try:
        _write_all(target, memoryview(data))
    except OSError:
        return False
    return bool(data)


def _write_all(target: int, view: memoryview) -> None:
    """Also to what somebody else does not want to wait for."""
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(target, select.POLLOUT)
            poll.poll()
