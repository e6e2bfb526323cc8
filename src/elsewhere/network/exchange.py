"""One request that is not a tunnel: passed on to the server, and its answer passed back, both as they come.

The body of the request and the answer run beside each other, since a server may answer before it has read all. Each piece is
sent before the next is read. Both messages are parsed and written anew by h11: what one side could have hidden between two
messages is not passed on.
"""

import asyncio
import socket
from collections.abc import Callable

import h11

from elsewhere.network import heads
from elsewhere.network.heads import Head
from elsewhere.network.relay import CHUNK
from elsewhere.network.upstream import Server

__all__ = ["BadAnswer", "Exchange", "Stale", "Withheld", "is_idle"]

_WANTS_CREDENTIALS = 407
_KEPT_OF_ERRORS = (b"www-authenticate", b"retry-after")
_PIECES_PER_TURN = 16  # then everybody else has a turn


class BadAnswer(Exception):
    """The server's side failed, in words that follow its name."""


class Withheld(BadAnswer):
    """An error by way of a proxy that was told credentials: such pages may show the request, so only the status goes on, and
    headers that a client cannot do without."""

    def __init__(self, event: h11.Response) -> None:
        super().__init__(f"answered with status {event.status_code}; what else it says may show credentials, and stays outside")
        self.status = event.status_code
        self.headers = tuple(
            (raw.decode("ascii", "replace"), value.decode("ascii", "replace"))
            for raw, value in event.headers.raw_items()
            if raw.lower() in _KEPT_OF_ERRORS
        )


class Stale(Exception):
    """A connection that was used before is no longer there, and nothing of an answer was: the request can be repeated."""


class Exchange:
    """Between a client's connection and a server's. `near` has read the head already, and reads the body."""

    def __init__(
        self, head: Head, client: socket.socket, near: h11.Connection, server: socket.socket, moved: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._head = head
        self._client = client
        self._near = near
        self._server = server
        self._far = h11.Connection(h11.CLIENT, max_incomplete_event_size=heads.LARGEST)
        self._moved = moved
        self._via: Server | None = None
        self._pieces = 0
        self._uploading = False
        self._broke_off = False
        self.answered = False  # whether the client has got anything of an answer

    @property
    def server_reusable(self) -> bool:
        return self._far.our_state is h11.DONE and self._far.their_state is h11.DONE and not self._far.trailing_data[0]

    @property
    def client_reusable(self) -> bool:
        return self._near.our_state is h11.DONE and self._near.their_state is h11.DONE

    async def run(self, target: str, via: Server | None) -> None:
        """`target` as the server wants it, or as the proxy does that is on the way."""
        self._via = via
        headers = [(b"Host", self._head.authority.encode("ascii"))]
        headers += [(name, value) for name, value in heads.passed_on(self._head.request) if name.lower() != b"host"]
        if via is not None and via.authorization:
            headers.append((b"Proxy-Authorization", via.authorization.encode("ascii")))
        request = h11.Request(method=self._head.request.method, target=target, headers=headers)
        await self._to_server(self._far.send(request))
        if not self._head.has_body:
            self._near.next_event()  # its end
            await self._to_server(self._far.send(h11.EndOfMessage()))
            await self._download()
            return
        self._uploading = True
        upload = asyncio.create_task(self._upload())
        download = asyncio.create_task(self._download())
        try:
            while not download.done():
                await asyncio.wait([task for task in (upload, download) if not task.done()], return_when=asyncio.FIRST_COMPLETED)
                if upload.done():
                    upload.result()
            download.result()
        finally:
            for task in (upload, download):
                task.cancel()
            await asyncio.gather(upload, download, return_exceptions=True)

    # -- the request ------------------------------------------------------------------------------------------------------------

    async def _upload(self) -> None:
        while True:
            try:
                event = self._near.next_event()
            except h11.RemoteProtocolError as error:
                raise heads.BadRequest(f"the body of the request cannot be understood: {error}") from None
            if event is h11.NEED_DATA:
                self._near.receive_data(await self._loop.sock_recv(self._client, CHUNK))
                self._moved()
            elif isinstance(event, h11.Data):
                if not await self._uploaded(self._far.send(event)):
                    return
            elif isinstance(event, h11.EndOfMessage):
                await self._uploaded(self._far.send(h11.EndOfMessage()))
                self._uploading = False
                return
            else:
                raise ConnectionResetError("the client is gone")

    async def _uploaded(self, data: bytes | None) -> bool:
        """False if the server takes no more: it may have answered all the same."""
        try:
            await self._to_server(data)
        except Stale:
            return False
        return True

    async def _to_server(self, data: bytes | None) -> None:
        if data:
            try:
                await self._loop.sock_sendall(self._server, data)
            except OSError:
                raise Stale from None
            await self._turn()

    # -- the answer -------------------------------------------------------------------------------------------------------------

    async def _download(self) -> None:
        first = True
        while True:
            try:
                event = self._far.next_event()
            except h11.RemoteProtocolError as error:
                raise BadAnswer(
                    "broke off" if self._broke_off else f"gave an answer that cannot be understood: {error}"
                ) from None
            if event is h11.NEED_DATA:
                await self._more(first=first)
                first = False
            elif isinstance(event, h11.InformationalResponse):
                await self._informed(event)
            elif isinstance(event, h11.Response):
                if self._via is not None:
                    _check_words(event, self._via)
                await self._to_client(self._near.send(self._answer(event)))
            elif isinstance(event, h11.Data):
                await self._to_client(self._near.send(event))
            elif isinstance(event, h11.EndOfMessage):
                await self._to_client(self._near.send(h11.EndOfMessage()))
                return
            else:
                raise BadAnswer("closed the connection without an answer")

    async def _more(self, *, first: bool) -> None:
        try:
            data = await self._loop.sock_recv(self._server, CHUNK)
        except OSError as error:
            if first:
                raise Stale from None
            raise BadAnswer(f"broke off: {error.strerror}") from None
        if not data:
            if first:
                raise Stale
            self._broke_off = True
        self._far.receive_data(data)
        self._moved()

    async def _informed(self, event: h11.InformationalResponse) -> None:
        """Only the one that the client waits for: others are of use to browsers at most."""
        if event.status_code == 101:
            raise BadAnswer("changed to another protocol, which nobody asked for")
        if event.status_code == 100 and self._near.they_are_waiting_for_100_continue:
            await self._to_client(self._near.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))
            self.answered = False  # the answer is still to come

    def _answer(self, event: h11.Response) -> h11.Response:
        headers = heads.passed_on(event)
        if self._uploading:
            headers.append((b"Connection", b"close"))  # what is still to come of the request is not waited for
        return h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)

    async def _to_client(self, data: bytes | None) -> None:
        if data:
            self.answered = True
            await self._loop.sock_sendall(self._client, data)
            await self._turn()

    async def _turn(self) -> None:
        self._moved()
        self._pieces += 1
        if self._pieces % _PIECES_PER_TURN == 0:
            await asyncio.sleep(0)


def _check_words(event: h11.Response, via: Server) -> None:
    """That what a proxy on the way may have said itself shows nobody its credentials, or what it wants of us."""
    if event.status_code == _WANTS_CREDENTIALS:
        raise BadAnswer(f"answered with status {event.status_code}")
    said = [bytes(event.reason), *(part for header in event.headers.raw_items() for part in header)]
    if any(secret in part for secret in via.secrets for part in said):
        raise BadAnswer("gave an answer that shows its credentials")
    if via.authorization and event.status_code >= 400:
        raise Withheld(event)


def is_idle(server: socket.socket) -> bool:
    """Whether a connection that was kept can be used again: neither has it ended nor was anything said that nobody asked for."""
    try:
        server.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
