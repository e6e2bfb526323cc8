"""Whoever a command is run for: the signals that they receive, and that they may be gone.

Some verbs read the signals themselves, because they pass them on. All others are interrupted by them where they stand
(`Signals.interrupting`), as a program is that receives them itself, except where that would leave something half done
(`undisturbed`, `finish`).
"""

import contextlib
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

from elsewhere.sandbox.keeping import wire

__all__ = ["CallerGone", "Interrupted", "Signals", "finish", "is_in_front", "pause_of", "undisturbed"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_CONTROLLING = os.makedev(5, 0)  # /dev/tty, which is whatever terminal its opener has
_LOOK_S = 0.1


class CallerGone(Exception):
    """Whoever we work for ended before the command did."""


class Interrupted(KeyboardInterrupt):
    """By a signal of whoever we work for; that they are gone counts as one, too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Signals that somebody else receives on our behalf, as bytes on a socket: each byte is a number."""

    interrupted: ClassVar["Signals | None"] = None  # whose signals interrupt this process: it has one main thread only

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._awaited: tuple[int, ...] = ()
        self._came: int | None = None

    def read(self) -> bytes:
        try:
            return self.sock.recv(64)
        except OSError:
            return b""

    def caller(self) -> int:
        """The process that receives them: it connected."""
        pid, _, _ = struct.unpack("iII", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    @contextlib.contextmanager
    def interrupting(self, *more: int) -> Iterator[None]:
        """Interrupt the main thread when one of the signals comes that end a program, or one of these. That happens once: whoever
        puts things back then is left in peace."""
        outer, first = self._awaited, Signals.interrupted is None
        try:
            if first:
                # By a signal of the kernel's when something arrives: what is over soon pays for no thread.
                signal.signal(signal.SIGIO, lambda *_: self._look())
                fcntl.fcntl(self.sock, fcntl.F_SETOWN, os.getpid())
                fcntl.fcntl(self.sock, fcntl.F_SETFL, fcntl.fcntl(self.sock, fcntl.F_GETFL) | os.O_ASYNC)
                Signals.interrupted = self
            self.listen(*_ENDING, *more)
            yield
            if first:
                self.listen(*_ENDING)  # of one that was to be finished
                if self._came is not None:
                    raise Interrupted(self._came)  # somebody kept it to themselves
        finally:
            self._awaited = outer if self._came is None else ()
            if first:
                signal.signal(signal.SIGIO, signal.SIG_IGN)
                Signals.interrupted = None

    def listen(self, *numbers: int) -> tuple[int, ...]:
        """Which of them interrupt from now on, and what those were before."""
        before = self._awaited
        if self._came is None:
            self._awaited = numbers
            self._look()
        return before

    def _look(self) -> None:
        """What is not awaited stays where it is: somebody may look for it later."""
        while self._awaited:
            try:
                data = self.sock.recv(64, socket.MSG_DONTWAIT) or bytes([signal.SIGHUP])
            except OSError:
                return
            for number in data:
                if number in self._awaited:
                    self._came, self._awaited = number, ()
                    raise Interrupted(number)

    def wait_for(self, source: int) -> None:
        """Until something was typed on their terminal. Who leaves types for somebody else from then on: a signal that came before
        that, also one that only stops them, interrupts, and nothing is taken."""
        with self.interrupting(signal.SIGTSTP):
            terminal = os.fstat(source).st_rdev
            while not (wire.readable(source, _LOOK_S) and is_in_front(self.caller(), terminal)):
                time.sleep(_LOOK_S)  # that they are in front again is told by nobody
            self._look()

    def pause(self, seconds: float) -> None:
        """Sleep, for somebody who may be gone or may have had enough meanwhile."""
        if not wire.readable(self.sock, seconds):
            return
        if self._awaited:
            self._look()
            return
        data = self.read()
        if not data:
            raise CallerGone
        for number in data:
            if number in _ENDING:
                raise SystemExit(128 + number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """For what must not be left half done: a signal that comes meanwhile interrupts afterwards."""
    signals = Signals.interrupted
    awaited = () if signals is None else signals.listen()
    try:
        yield
    finally:
        if signals is not None:
            signals.listen(*awaited)


def finish() -> None:
    """What is being done is done to its end from now on; whoever asked for it learns then that they were heard."""
    if Signals.interrupted is not None:
        Signals.interrupted.listen()


def is_in_front(caller: int, terminal: int) -> bool:
    """Whether a process may read from a terminal: the kernel would stop it only if that is the one of its own session, and it is
    in the background there. Of one that cannot be asked nothing is known, and nothing is taken."""
    try:
        with open(f"/proc/{caller}/stat", "rb") as stream:
            words = stream.read().rpartition(b")")[2].split()
    except OSError:
        return False
    state, group, number, front = words[0], int(words[2]), int(words[4]), int(words[5])
    own = os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00)
    return state != b"T" and (terminal not in (own, _CONTROLLING) or group == front)


def pause_of(signals: Signals | None) -> Callable[[float], None]:
    """How to wait on behalf of whoever is behind these; without them, whoever waits is interrupted like any program."""
    return time.sleep if signals is None else signals.pause
