"""The proxy of one sandbox: accepts on a socket that was made inside it, decides, connects outside, and passes on.

    GET http://example.org/ HTTP/1.1      read, passed on, answered         (`exchange.py`)
    CONNECT example.org:443 HTTP/1.1      a tunnel for whatever is spoken   (`relay.py`)

Who asks is known by the socket alone. Whether he may is `decide`'s to say, at every request.

Not here: how connections are accepted, counted and ended (`serving.py`), how a host is judged and reached (`outward.py`), rules,
records of denials, the process that this runs in.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import h11

from elsewhere.network import answers, heads
from elsewhere.network.answers import Answer, Denied
from elsewhere.network.dialling import Resolver
from elsewhere.network.exchange import BadAnswer, Exchange, Stale, Withheld, is_idle
from elsewhere.network.heads import BadRequest, Head
from elsewhere.network.outward import Decide, Far, Outward
from elsewhere.network.relay import CHUNK, Idle, relay, reset_on_close
from elsewhere.network.serving import MOST, Client, Patience, Serving
from elsewhere.network.upstream import Upstream

__all__ = ["MOST", "Patience", "Proxy"]

_TURNED_AWAY_AT_ONCE = 32
_REPEATABLE = ("GET", "HEAD", "OPTIONS")


class Proxy(Serving):
    """`decide` and `observe` are called on the loop: briefly."""

    def __init__(
        self,
        listener: socket.socket,
        decide: Decide,
        *,
        resolver: Resolver,
        upstream: Upstream | None = None,
        observe: Callable[[Denied], None],
        most: int = MOST,
        patience: Patience = Patience(),  # noqa: B008 (frozen)
        sandbox: str = "ID",
    ) -> None:
        outward = Outward(decide, resolver, upstream, observe, seconds=patience.connect, sandbox=sandbox)
        super().__init__(listener, outward, most, patience)

    # -- connections ------------------------------------------------------------------------------------------------------------

    async def _turn_away(self, sock: socket.socket) -> None:
        while len(self._turned_away) >= _TURNED_AWAY_AT_ONCE:
            await asyncio.wait(self._turned_away, return_when=asyncio.FIRST_COMPLETED)
        sentence = f"this sandbox has {self._most} connections already, which is the most that one may have"
        task = asyncio.create_task(self._say(sock, answers.plain(503, sentence)))
        self._turned_away.add(task)
        task.add_done_callback(self._turned_away.discard)
        task.add_done_callback(lambda _: sock.close())

    async def _converse(self, client: Client) -> None:
        method = ""
        try:
            wait = self._patience.head
            while (raw := await self._head(client, wait)) is not None:
                near = h11.Connection(h11.SERVER, max_incomplete_event_size=heads.LARGEST)
                head = heads.parse(raw, near)
                method = head.method
                if not await (self._tunnel(client, head) if head.tunnel else self._pass(client, head, near)):
                    return
                wait = self._patience.again
        except Answer as answer:
            await self._say(client.sock, answer, body=method != "HEAD")
        except BadRequest as wrong:
            await self._say(client.sock, answers.plain(wrong.status, str(wrong)), body=method != "HEAD")
        except (OSError, Idle):
            reset_on_close(client.sock)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler({"message": "a request could not be judged", "exception": error})
            await self._say(client.sock, answers.plain(500, "something broke, so nothing is let through"), body=method != "HEAD")
        except asyncio.CancelledError:
            reset_on_close(client.sock)
            raise

    async def _head(self, client: Client, wait: float) -> bytes | None:
        """Up to the empty line; None if the client has no (further) request. `wait` is for its first byte."""
        loop = asyncio.get_running_loop()
        data = bytearray(client.rest.lstrip(b"\r\n"))
        looked_at, first_line = 0, False
        async with self._until_head(data, wait) as limit:
            while True:
                if data and not first_line:
                    wrong = heads.could_begin(data)
                    if wrong:
                        raise BadRequest(wrong)
                    first_line = b"\n" in data
                end = data.find(b"\r\n\r\n", max(0, looked_at - 3))
                if 0 <= end <= heads.LARGEST:
                    client.rest = bytes(data[end + 4 :])
                    return bytes(data[: end + 4])
                if len(data) > heads.LARGEST:
                    raise BadRequest(f"the head of the request has more than {heads.LARGEST} bytes", 431)
                looked_at = len(data)
                more = await loop.sock_recv(client.sock, CHUNK)
                if not more:
                    return None
                if not data:
                    limit.reschedule(loop.time() + self._patience.head)
                    more = more.lstrip(b"\r\n")
                data += more

    @contextlib.asynccontextmanager
    async def _until_head(self, data: bytearray, wait: float) -> AsyncIterator[asyncio.Timeout]:
        try:
            async with asyncio.timeout(self._patience.head if data else wait) as limit:
                yield limit
        except TimeoutError:
            if not data:
                raise
            raise BadRequest(f"the head of the request was not there after {self._patience.head:.0f} s", 408) from None

    # -- requests ---------------------------------------------------------------------------------------------------------------

    async def _tunnel(self, client: Client, head: Head) -> bool:
        far = await self._reach(client, head.host, head.port, tunnel=head.tunnel)
        await asyncio.get_running_loop().sock_sendall(client.sock, answers.ESTABLISHED)
        rest, client.rest = client.rest, b""
        await relay(client.sock, far.sock, to_far=rest, to_near=far.first, idle=self._patience.idle)
        return False

    async def _pass(self, client: Client, head: Head, near: h11.Connection) -> bool:
        """Whether the client's connection can go on afterwards."""
        if client.rest:
            near.receive_data(client.rest)
        far = self._kept(client, head)
        if far is not None:
            with contextlib.suppress(Stale):
                return await self._exchanged(client, far, head, near)
        far = await self._reach(client, head.host, head.port, tunnel=head.tunnel)
        try:
            return await self._exchanged(client, far, head, near)
        except Stale:
            raise answers.plain(502, f"{far.speaker} closed the connection without an answer") from None

    def _kept(self, client: Client, head: Head) -> Far | None:
        """The connection of the last request, if it is right for this one, too: also by the rules of now. What cannot be
        repeated, should that connection be gone already, has a new one."""
        far = client.far
        if far is None or (far.host, far.port) != (head.host, head.port) or head.method not in _REPEATABLE or head.has_body:
            return None
        client.wanted = head.host, head.port
        self._outward.check(head.host, head.port, far.address)
        return far if is_idle(far.sock) else None

    async def _exchanged(self, client: Client, far: Far, head: Head, near: h11.Connection) -> bool:
        loop, idle = asyncio.get_running_loop(), self._patience.idle
        target = head.path if far.via is None else f"http://{head.authority}{head.path}"
        try:
            async with asyncio.timeout(idle) as limit:
                exchange = Exchange(head, client.sock, near, far.sock, lambda: limit.reschedule(loop.time() + idle))
                await exchange.run(target, far.via)
        except Exception as error:
            if exchange.answered:
                raise ConnectionResetError from error  # nothing else tells a client that this is not all
            if isinstance(error, Withheld):
                raise answers.plain(error.status, f"{far.speaker} {error}", error.headers) from None
            if isinstance(error, BadAnswer):
                raise answers.plain(502, f"{far.speaker} {error}") from None
            if isinstance(error, TimeoutError):
                raise answers.plain(504, f"{far.speaker} did not answer in time") from None
            raise
        client.wanted = None
        client.rest = near.trailing_data[0]
        if not exchange.server_reusable:
            client.drop_far()
        if not exchange.client_reusable:
            await self._let_go(client.sock)
        return exchange.client_reusable
