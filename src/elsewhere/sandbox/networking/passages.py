"""A passage: whoever connects to a listener is passed on to somewhere else, whatever they speak.

    forward      the listener was made inside, the other end is a service of the host
    publish      the listener is the host's, on its loopback; the other end is a socket that was made inside

It ends with the service, the sandbox, or when nobody wants it any more; with it end its connections. How many there are at once
is bounded for each sandbox: the next one waits, in the kernel's own queue. Not here: who asked for it (`serving.py`).
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from elsewhere.errors import ElsewhereError, InUse, Refused
from elsewhere.network import names
from elsewhere.network.dialling import Resolver, Unreachable, connect, prepare
from elsewhere.network.ports import Forward, Publish
from elsewhere.network.relay import Idle, relay, reset_on_close
from elsewhere.sandbox.networking import hostsockets

__all__ = ["LOOPBACK", "Passage", "Room", "bound", "reach_host", "reach_inside"]

LOOPBACK = "127.0.0.1"

_BACKLOG = 128
_CONNECT_S = 20.0
_CROWDED_S = 0.1
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Reach = Callable[[], Awaitable[socket.socket]]


class Room:
    """So many connections, for all who share it. Who finds no room is called when there may be some."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: list[Callable[[], None]] = []

    def enter(self, again: Callable[[], None]) -> bool:
        if not self._free:
            self._waiting.append(again)
            return False
        self._free -= 1
        return True

    def leave(self) -> None:
        self._free += 1
        waiting, self._waiting = self._waiting, []  # all: one of them may be closed by now
        for again in waiting:
            again()


class Passage:
    """`listener` is ours. `reach` gives a new connection to the other end, or raises `Unreachable`. `trouble` is why the last one
    failed, if it did."""

    def __init__(self, listener: socket.socket, reach: Reach, room: Room, tell: Callable[[str], None]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._reach = reach
        self._room = room
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._closed = False
        self.trouble = ""
        self.port = listener.getsockname()[1] if listener.family == socket.AF_INET else 0
        self._go_on()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def close(self) -> int:
        """Ends it and its connections, and counts these. Its place is free at once."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._connections:
            task.cancel()
        return len(self._connections)

    def _go_on(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        if not self._room.enter(self._go_on):
            self._loop.remove_reader(self._listener)
            return
        try:
            near, _ = self._listener.accept()
        except OSError as error:
            self._room.leave()
            if error.errno in _FULL:  # no descriptor is left: others may end meanwhile
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_CROWDED_S, self._go_on)
            return
        task = asyncio.create_task(self._pass(near))
        self._connections.add(task)
        task.add_done_callback(partial(self._gone, near))

    def _gone(self, near: socket.socket, task: "asyncio.Task[None]") -> None:
        self._connections.discard(task)
        near.close()
        self._room.leave()

    async def _pass(self, near: socket.socket) -> None:
        near.setblocking(False)
        prepare(near)
        try:
            far = await self._reach()
        except Unreachable as error:
            self._failed(str(error))
            return
        except asyncio.CancelledError:
            reset_on_close(near)
            raise
        except Exception as error:  # of ours: it ends this connection and no other
            self._failed(f"something broke: {type(error).__name__}: {error}")
            return
        self.trouble = ""
        try:
            with contextlib.suppress(OSError, Idle):  # either end is gone
                await relay(near, far)
        except asyncio.CancelledError:
            reset_on_close(near)
            reset_on_close(far)
            raise
        finally:
            far.close()

    def _failed(self, why: str) -> None:
        self.trouble = why
        self._tell(why)


# -- to the host ----------------------------------------------------------------------------------------------------------------


def reach_host(forward: Forward, resolver: Resolver, refused: Callable[[str], str]) -> Reach:
    """`refused`: why nothing at a path may be connected to, if so; it is asked each time."""

    async def reach() -> socket.socket:
        if forward.path:
            return _at_path(forward.path, refused(forward.path))
        where = names.authority(forward.host, forward.port)
        try:
            literal = names.address(forward.host)
            found = [literal] if literal is not None else await resolver.addresses(forward.host, forward.port)
            sock, _ = await connect(found, forward.port, _CONNECT_S)
        except Unreachable as error:
            raise Unreachable(f"{where} {error}") from None
        return sock

    return reach


def _at_path(path: str, refused: str) -> socket.socket:
    if refused:
        raise Unreachable(f"{path} is not connected to: {refused}")
    try:
        return hostsockets.connect(path)
    except OSError as error:
        why = "a link lies on the way" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
        raise Unreachable(f"{path} cannot be connected to: {why}") from None


# -- to the inside --------------------------------------------------------------------------------------------------------------


def reach_inside(publish: Publish, make: Callable[[int], Awaitable[socket.socket]]) -> Reach:
    """`make` gives a new socket of the sandbox's network, of a family. A server that listens at one loopback address only is
    found at either."""

    async def reach() -> socket.socket:
        failed = ""
        for family, address in ((socket.AF_INET, LOOPBACK), (socket.AF_INET6, "::1")):
            try:
                sock = await make(family)
            except (ElsewhereError, OSError) as error:
                failed = failed or str(error)
                continue
            try:
                async with asyncio.timeout(_CONNECT_S):
                    await asyncio.get_running_loop().sock_connect(sock, (address, publish.inside))
            except OSError as error:
                sock.close()
                failed = failed or (os.strerror(error.errno) if error.errno else "did not answer in time")
                continue
            except BaseException:
                sock.close()
                raise
            prepare(sock)
            return sock
        raise Unreachable(f"port {publish.inside} inside cannot be connected to: {failed}")

    return reach


def bound(publish: Publish, preferred: int = 0) -> socket.socket:
    """A listener for it on the host's loopback. `preferred`: where it was before, if any port will do."""
    for port in dict.fromkeys((publish.port or preferred, publish.port)):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # What an earlier one leaves behind for a minute must not keep the next one from it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((LOOPBACK, port))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            failed = error
            continue
        return sock
    if failed.errno == errno.EADDRINUSE:
        raise InUse(
            "port_in_use",
            f"port {publish.port} of the host is in use, so port {publish.inside} of the sandbox cannot be published there",
            hint=f"--publish 0:{publish.inside} picks a free one",
            detail={"publish": str(publish), "inside": publish.inside},
        )
    raise Refused(
        "port_refused",
        f"port {publish.inside} of the sandbox cannot be published at port {publish.port} of the host: {failed.strerror}",
        hint=f"--publish 0:{publish.inside} picks a free one",
        detail={"publish": str(publish), "inside": publish.inside},
    )
