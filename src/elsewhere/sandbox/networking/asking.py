"""Asking keepers, from the network service: in threads, since a keeper may be frozen, or slow, and nobody else is to wait for it.

What a keeper gives are descriptors. It lives in the sandbox, so they are looked at before they are used.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from elsewhere.errors import Broken, NotFound
from elsewhere.sandbox.keeping.line import Line, connect
from elsewhere.storage.state import State

__all__ = ["Keepers", "close_all", "not_running", "taken"]

_THREADS = 32

Found = TypeVar("Found")


class Connect(Protocol):
    def __call__(self, directory: str, /) -> Line | None: ...


class Keepers:
    """Of all sandboxes of a state directory. Whoever asks one of them asks the next question after the answer."""

    def __init__(self, state: State, connect: Connect = connect) -> None:
        self._state = state
        self._connect = connect
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepers")

    async def ask(self, sandbox_id: str, question: Callable[[Line], Found]) -> Found:
        """On a connection of its own, which is gone again at once: it would be in a snapshot's way. Descriptors that nobody waits
        for any more are closed."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, self._asked, sandbox_id, question)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_unwanted)
            raise

    def _asked(self, sandbox_id: str, question: Callable[[Line], Found]) -> Found:
        found = self._connect(self._state.sandbox(sandbox_id))
        if found is None:
            raise not_running(sandbox_id)
        with found:
            return question(found)


def not_running(sandbox_id: str) -> NotFound:
    return NotFound("sandbox_not_running", f"the sandbox {sandbox_id!r} is not running", hint=f"elsewhere start {sandbox_id}")


def taken(fd: int, kind: int, *, listening: bool) -> socket.socket:
    """What was handed out, as the socket that it has to be."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise Broken("keeper_nonsense", "a keeper handed out something that is no socket") from None
    if sock.type != kind or bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) != listening:
        sock.close()
        raise Broken("keeper_nonsense", "a keeper handed out another socket than it was asked for")
    sock.setblocking(False)
    return sock


def close_all(found: Any) -> None:
    """A descriptor, or several, by name or in a row."""
    if isinstance(found, int):
        os.close(found)
    for one in found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else ():
        close_all(one)


def _unwanted(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled() and future.exception() is None:
        close_all(future.result())
