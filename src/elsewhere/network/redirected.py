"""Connections of programs that know no proxy: redirected by the kernel, accepted here, and passed on as a tunnel would be.

    socket of the client ──▶ 198.18.7.9:5432 ──redirected──▶ our listener ──▶ its name, by the book ──▶ judged, reached, relayed

Where it was meant to go is the kernel's word (`linux/redirect.py`). A made-up address stands for its name; any other one for
itself. Whoever is refused is told so in the language that it speaks, if that is one of a few, and sees a reset if not.

Not here: how connections are accepted, counted and ended (`serving.py`), how a host is judged and reached (`outward.py`).
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable

from elsewhere.linux.redirect import original_destination
from elsewhere.network import addresses, answers
from elsewhere.network.answers import Answer, Denied
from elsewhere.network.dialling import Resolver
from elsewhere.network.outward import Decide, Outward
from elsewhere.network.refusing import LONGEST_GREETING, declined, may_grow, refusal
from elsewhere.network.relay import Idle, relay, reset_on_close
from elsewhere.network.resolving import Book
from elsewhere.network.rules import Verdict
from elsewhere.network.serving import MOST, Client, Patience, Serving
from elsewhere.network.upstream import Upstream

__all__ = ["Redirected"]

_FIRST_WORDS = 0.5  # seconds: a client that waits for the server to speak learns of its refusal then
_MOST_WISHES = 3


class Redirected(Serving):
    """`decide` and `observe` are called on the loop: briefly."""

    def __init__(
        self,
        listener: socket.socket,
        decide: Decide,
        book: Book,
        *,
        resolver: Resolver,
        upstream: Upstream | None = None,
        observe: Callable[[Denied], None],
        sandbox: str = "ID",
        most: int = MOST,
        patience: Patience = Patience(),  # noqa: B008 (frozen)
    ) -> None:
        outward = Outward(decide, resolver, upstream, observe, seconds=patience.connect, sandbox=sandbox)
        super().__init__(listener, outward, most, patience)
        self._book = book
        self._observe = observe
        self._sandbox = sandbox

    async def _turn_away(self, sock: socket.socket) -> None:
        reset_on_close(sock)
        sock.close()
        await asyncio.sleep(0)  # or nobody else would have their turn, while more of them come

    async def _converse(self, client: Client) -> None:
        try:
            host, port = self._wanted(client.sock)
            far = await self._reach(client, host, port, tunnel=True)
            await relay(client.sock, far.sock, to_near=far.first, idle=self._patience.idle)
        except Answer as answer:
            await self._refuse(client.sock, answer)
        except (OSError, Idle):
            reset_on_close(client.sock)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler({"message": "a connection could not be judged", "exception": error})
            reset_on_close(client.sock)
        except asyncio.CancelledError:
            reset_on_close(client.sock)
            raise

    def _wanted(self, sock: socket.socket) -> tuple[str, int]:
        """Raises OSError of a connection that came straight to us: nothing says where it is to go."""
        text, port = original_destination(sock)
        address = ipaddress.IPv4Address(text)
        if address.is_loopback:
            # Never redirected. It would be the sandbox's own in there, and the host's out here.
            raise ConnectionRefusedError
        if address not in addresses.MADE_UP:
            return text, port
        name = self._book.name_of(text)
        if name is not None:
            return name, port
        words = addresses.instead(text, port, self._sandbox)
        assert words is not None
        answer, denied = answers.denial(text, port, Verdict(False, *words))
        self._observe(denied)
        raise answer

    async def _refuse(self, sock: socket.socket, answer: Answer) -> None:
        try:
            said = refusal(await self._first_words(sock), answer)
        except OSError:
            said = b""
        if said:
            await self._send_last(sock, said)
        else:
            reset_on_close(sock)

    async def _first_words(self, sock: socket.socket) -> bytes:
        found = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_WORDS):
                for _ in range(_MOST_WISHES):
                    found = await self._words(sock)
                    no = declined(found)
                    if not no:
                        break
                    await asyncio.get_running_loop().sock_sendall(sock, no)
        return found

    async def _words(self, sock: socket.socket) -> bytes:
        found = b""
        while may_grow(found) and (more := await asyncio.get_running_loop().sock_recv(sock, LONGEST_GREETING)):
            found += more
        return found
