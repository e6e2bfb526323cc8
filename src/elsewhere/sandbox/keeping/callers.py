"""Whoever a command is run for: the signals that they receive, and that they may be gone."""

import signal
import socket
import struct
import time
from collections.abc import Callable

from elsewhere.sandbox.keeping import wire

__all__ = ["CallerGone", "Signals", "pause_of"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class CallerGone(Exception):
    """Whoever we work for ended before the command did."""


class Signals:
    """Signals that somebody else receives on our behalf, as bytes on a socket: each byte is a number."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def read(self) -> bytes:
        try:
            return self.sock.recv(64)
        except OSError:
            return b""

    def caller(self) -> int:
        """The process that receives them: it connected."""
        pid, _, _ = struct.unpack("iII", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    def pause(self, seconds: float) -> None:
        """Sleep, for somebody who may be gone or may have had enough meanwhile."""
        if not wire.readable(self.sock, seconds):
            return
        data = self.read()
        if not data:
            raise CallerGone
        for number in data:
            if number in _ENDING:
                raise SystemExit(128 + number)


def pause_of(signals: Signals | None) -> Callable[[float], None]:
    """How to wait on behalf of whoever is behind these; without them, whoever waits is interrupted like any program."""
    return time.sleep if signals is None else signals.pause
