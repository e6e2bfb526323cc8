"""A plain relay: what one connection says is passed on to another, both ways, until both have said all.

    near ──read──▶ at most one chunk ──write──▶ far          each way for itself: the end of one way is passed on as the end of
    near ◀──write── at most one chunk ◀──read── far          that way alone (half-closed), and a reset as a reset

As long as the other side does not take what was read, nothing more is read: that is all of the back-pressure, and all of the
memory. A way on which nothing moves has no buffer at all. For TCP and Unix sockets alike. Not here: who may be connected to whom.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable

from elsewhere.values import dataclass

__all__ = ["CHUNK", "Idle", "Moved", "relay", "reset_on_close"]

CHUNK = 64 << 10
_of_thread = threading.local()


class Idle(Exception):
    """Nothing moved for as long as was agreed."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes, each way."""

    to_far: int
    to_near: int


async def relay(
    near: socket.socket, far: socket.socket, *, to_far: bytes = b"", to_near: bytes = b"", idle: float | None = None
) -> Moved:
    """Both must be non-blocking, and stay the caller's to close. `to_far` and `to_near` were read already and go first.

    An error of either ends both ways; what is not yet passed on is lost then, as it is without a relay."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end_of_way(error: OSError | None) -> None:
        if error is not None and not ended.done():
            ended.set_exception(error)
        elif not ended.done() and all(way.finished for way in ways):
            ended.set_result(None)

    ways = (_Way(loop, near, far, end_of_way), _Way(loop, far, near, end_of_way))
    try:
        for way, first in zip(ways, (to_far, to_near), strict=True):
            way.start(first)
        while not ended.done():
            moved = ways[0].moved + ways[1].moved
            await asyncio.wait([ended], timeout=idle)
            if not ended.done() and moved == ways[0].moved + ways[1].moved:
                raise Idle
        ended.result()
    finally:
        ended.cancel()
        for way in ways:
            way.stop()
    return Moved(ways[0].moved, ways[1].moved)


def reset_on_close(sock: socket.socket) -> None:
    """So that the other end does not take a connection that broke off for one that ended."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _buffer() -> memoryview:
    """What all of a loop's relays read into: it is never filled by one while another still needs it."""
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = memoryview(bytearray(CHUNK))
    found: memoryview = _of_thread.buffer
    return found


class _Way:
    """From one socket to another. It waits either to read or to write, never for both."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: socket.socket,
        sink: socket.socket,
        ended: Callable[[OSError | None], None],
    ) -> None:
        self._loop = loop
        self._source = source
        self._sink = sink
        self._ended = ended
        self._buffer = _buffer()
        self._rest: memoryview | None = None
        self.moved = 0
        self.finished = False

    def start(self, first: bytes) -> None:
        self._loop.add_reader(self._source, self._read)
        if first:
            self._pass_on(memoryview(first))

    def stop(self) -> None:
        if self._source.fileno() >= 0:
            self._loop.remove_reader(self._source)
        if self._sink.fileno() >= 0:
            self._loop.remove_writer(self._sink)
        self._rest = None

    def _read(self) -> None:
        try:
            size = self._source.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            reset_on_close(self._sink)
            self._fail(error)
            return
        if size:
            self._pass_on(self._buffer[:size])
        else:
            self._finish()

    def _pass_on(self, data: memoryview) -> None:
        try:
            sent = self._sink.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            reset_on_close(self._source)
            self._fail(error)
            return
        self.moved += sent
        if sent < len(data):
            if self._rest is None:
                # The buffer is for the next one who reads; what is left over needs a place of its own.
                data, sent = memoryview(bytes(data[sent:])), 0
                self._loop.remove_reader(self._source)
                self._loop.add_writer(self._sink, self._write)
            self._rest = data[sent:]
        elif self._rest is not None:
            self._rest = None
            self._loop.remove_writer(self._sink)
            self._loop.add_reader(self._source, self._read)

    def _write(self) -> None:
        if self._rest is not None:
            self._pass_on(self._rest)

    def _finish(self) -> None:
        self._loop.remove_reader(self._source)
        self.finished = True
        try:
            self._sink.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._fail(error)
        else:
            self._ended(None)

    def _fail(self, error: OSError) -> None:
        self.stop()
        self._ended(error)
