"""What everybody shares who accepts connections from inside a sandbox: how many there are, what they want, and their end.

Every connection is a task of its own, which holds a chunk or two; there are at most so many. Rules that change hold at once:
`recheck` ends what they no longer allow. Everything that is waited for has an end. Not here: what is spoken on a connection
(`proxy.py`, `redirected.py`), and how a host is judged and reached (`outward.py`).
"""

import asyncio
import contextlib
import errno
import socket

from elsewhere.network.answers import Answer
from elsewhere.network.dialling import prepare
from elsewhere.network.outward import Far, Outward
from elsewhere.network.relay import CHUNK
from elsewhere.values import dataclass

__all__ = ["MOST", "Client", "Patience", "Serving"]

MOST = 512
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that something may take: the `head` of a request, the pause before the next one (`again`), connecting, quiet."""

    head: float = 30.0
    again: float = 120.0
    connect: float = 20.0
    idle: float = 3600.0
    linger: float = 2.0


@dataclass(slots=True)
class Client:
    """One connection from inside. `rest` was read and belongs to what comes next."""

    sock: socket.socket
    rest: bytes = b""
    far: Far | None = None
    wanted: tuple[str, int] | None = None
    cut: bool = False

    def drop_far(self) -> None:
        if self.far is not None:
            self.far.sock.close()
            self.far = None


class Serving:
    """`listener` is non-blocking from here on and stays the caller's. Whoever inherits says what a conversation is."""

    def __init__(self, listener: socket.socket, outward: Outward, most: int, patience: Patience) -> None:
        self._listener = listener
        self._outward = outward
        self._most = most
        self._patience = patience
        self._clients: dict[asyncio.Task[None], Client] = {}
        self._turned_away: set[asyncio.Task[None]] = set()

    async def _converse(self, client: Client) -> None:
        """All of one connection. Whatever goes wrong ends this connection and no other."""
        raise NotImplementedError

    async def _turn_away(self, sock: socket.socket) -> None:
        """One connection too many; `sock` is closed here, or by a task that is in `_turned_away`."""
        raise NotImplementedError

    @property
    def connections(self) -> int:
        return len(self._clients)

    async def serve(self) -> None:
        """Until it is cancelled, or the listener is closed; then every connection is, too."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    if error.errno in (errno.EBADF, errno.EINVAL):
                        return
                    # No descriptor is left, or the client was gone before we came: others may end meanwhile.
                    await asyncio.sleep(0.1 if error.errno in _FULL else 0)
                    continue
                await self._take(sock)
        finally:
            await _ended({*self._clients, *self._turned_away})

    def recheck(self) -> int:
        """Ends every connection that would not be allowed any more, and counts them. To be called when the rules have changed."""
        found = [(task, client) for task, client in self._clients.items() if not client.cut and not self._still_allowed(client)]
        for task, client in found:
            client.cut = True
            task.cancel()
        return len(found)

    def _still_allowed(self, client: Client) -> bool:
        """One that is being made just now is judged once more when it is there (`Outward.reach`)."""
        if client.wanted is None:
            return True
        try:
            return self._outward.is_allowed(*client.wanted, client.far.address if client.far is not None else None)
        except Exception:
            return False  # the decision itself failed

    async def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        prepare(sock)
        if len(self._clients) >= self._most:
            await self._turn_away(sock)
            return
        client = Client(sock)
        task = asyncio.create_task(self._converse(client))
        self._clients[task] = client
        task.add_done_callback(self._gone)

    def _gone(self, task: "asyncio.Task[None]") -> None:
        client = self._clients.pop(task)
        client.drop_far()
        client.sock.close()

    async def _reach(self, client: Client, host: str, port: int, *, tunnel: bool) -> Far:
        client.drop_far()
        client.wanted = host, port
        client.far = await self._outward.reach(host, port, tunnel=tunnel)
        return client.far

    async def _say(self, sock: socket.socket, answer: Answer, *, body: bool = True) -> None:
        """An answer of our own, the last one."""
        await self._send_last(sock, answer.message(body=body))

    async def _send_last(self, sock: socket.socket, message: bytes) -> None:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(self._patience.linger):
                await asyncio.get_running_loop().sock_sendall(sock, message)
        await self._let_go(sock)

    async def _let_go(self, sock: socket.socket) -> None:
        """After the last answer. What the client still sends is read for a moment: else it would see a reset instead."""
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(self._patience.linger):
                while await asyncio.get_running_loop().sock_recv(sock, CHUNK):
                    await asyncio.sleep(0)


async def _ended(tasks: set["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
