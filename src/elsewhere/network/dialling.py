"""From a name to a connection, on the host's side. Between its two steps, resolving and connecting, addresses are judged.

What was judged is what is connected to. A resolver that answers differently the second time (rebinding) is never asked a second
time. Resolution runs in a few threads, with an end: the system's resolver can be neither cancelled nor hurried.
"""

import asyncio
import contextlib
import copy
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from elsewhere.network.names import Address

__all__ = ["Lookup", "Resolver", "Unreachable", "connect", "prepare", "system_lookup"]

Lookup = Callable[[str, int], Sequence[str]]  # a name and a port: addresses as text
Connected = tuple[socket.socket, Address]
Attempt = asyncio.Task[Connected]

_MOST_ADDRESSES = 16
_THREADS, _MOST_WAITING = 8, 128
_OF_ONE = 4  # threads that one share may keep busy
_TURNS = 6  # so many times the time of a lookup may be waited for one of them
_HEAD_START = 0.25  # that an address has before the next one is tried beside it


class Unreachable(Exception):
    """Why there is no connection, in words that follow the host's name; `slow`: because something took too long."""

    def __init__(self, reason: str, *, slow: bool = False, busy: bool = False) -> None:
        super().__init__(reason)
        self.slow = slow
        self.busy = busy


def system_lookup(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(entry[4][0]) for entry in found]


class _Threads:
    """What all shares of a resolver have in common."""

    def __init__(self, lookup: Lookup, threads: int) -> None:
        self.lookup = lookup
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="resolver")
        self.waiting = 0


class Resolver:
    """Of one process. Everybody who could keep it busy has a `share`: the threads of one are never all of them."""

    def __init__(self, lookup: Lookup = system_lookup, *, seconds: float = 10.0, threads: int = _THREADS) -> None:
        self._seconds = seconds
        self._threads = _Threads(lookup, threads)
        self._free: asyncio.Semaphore | None = None

    def share(self) -> "Resolver":
        """For one sandbox. It ends with the whole."""
        found = copy.copy(self)
        found._free = asyncio.Semaphore(_OF_ONE)
        return found

    async def addresses(self, host: str, port: int) -> list[Address]:
        try:
            future = await self._asked(host, port)
            # Cancelled is only the waiting: a resolver that is at work does not hear of it.
            texts = await asyncio.wait_for(asyncio.shield(future), self._seconds)
        except TimeoutError:
            raise Unreachable("could not be resolved in time", slow=True) from None
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "no answer"
            raise Unreachable(f"cannot be resolved: {reason}") from None
        found = list(dict.fromkeys(ipaddress.ip_address(text) for text in texts[:_MOST_ADDRESSES]))
        if not found:
            raise Unreachable("has no address")
        return found

    async def _asked(self, host: str, port: int) -> "asyncio.Future[Sequence[str]]":
        """Counted until the thread is done with it, not until somebody stops waiting."""
        if self._free is not None:
            async with asyncio.timeout(self._seconds * _TURNS):
                await self._free.acquire()
        try:
            if self._threads.waiting >= _MOST_WAITING:
                raise Unreachable("cannot be resolved now: too many names are being resolved", busy=True)
            future = asyncio.get_running_loop().run_in_executor(self._threads.pool, self._threads.lookup, host, port)
        except BaseException:
            self._release()
            raise
        self._threads.waiting += 1
        future.add_done_callback(self._done)
        return future

    def _done(self, future: "asyncio.Future[Sequence[str]]") -> None:
        self._threads.waiting -= 1
        self._release()
        if not future.cancelled():
            future.exception()  # looked at, so that nobody complains about one that nobody waited for any more

    def _release(self) -> None:
        if self._free is not None:
            self._free.release()

    def close(self) -> None:
        self._threads.pool.shutdown(wait=False, cancel_futures=True)


async def connect(addresses: Sequence[Address], port: int, seconds: float) -> Connected:
    """The first of them that answers; the next one is tried when one failed, or is slow."""
    attempts: set[asyncio.Task[Connected]] = set()
    try:
        async with asyncio.timeout(seconds):
            first = await _first(addresses, port, attempts)
    except TimeoutError:
        raise Unreachable("did not answer in time", slow=True) from None
    else:
        attempts.discard(first)
        return first.result()
    finally:
        for task in attempts:
            task.add_done_callback(_forget)
            task.cancel()


async def _first(addresses: Sequence[Address], port: int, attempts: set[Attempt]) -> Attempt:
    waiting = list(addresses)
    failed = "it has no address"
    while waiting or attempts:
        if waiting:
            attempts.add(asyncio.create_task(_attempt(waiting.pop(0), port)))
        pause = _HEAD_START if waiting else None
        done, _ = await asyncio.wait(attempts, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task
            failed = str(task.exception())
            attempts.discard(task)
    raise Unreachable(f"cannot be connected to: {failed}")


def _forget(task: Attempt) -> None:
    """Of one that came too late, or that somebody else was faster than."""
    if not task.cancelled() and task.exception() is None:
        task.result()[0].close()


async def _attempt(address: Address, port: int) -> Connected:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise Unreachable(error.strerror or "no socket") from None
    try:
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except OSError as error:
        sock.close()
        # The loop has words of its own for it.
        raise Unreachable(os.strerror(error.errno) if error.errno else str(error)) from None
    except BaseException:
        sock.close()
        raise
    prepare(sock)
    return sock, address


def prepare(sock: socket.socket) -> None:
    """A connection that does not wait for more to send, and notices a peer that is gone."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # it may be gone already, which whoever uses it will see
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
