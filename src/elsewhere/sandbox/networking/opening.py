"""The forwards and published ports of one sandbox: those that its record asks for are there, and no others.

    sandboxes/<sandbox-id>/network.ports      {"80": 43121}: which ports of the host were picked

A service that dies and comes back has the same ports again, if it can: that is what the file is for.
"""

import asyncio
import contextlib
import errno
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from elsewhere.errors import ElsewhereError, InUse, Refused
from elsewhere.network.dialling import Resolver
from elsewhere.network.ports import Forward, Publish
from elsewhere.sandbox.keeping.line import Line
from elsewhere.sandbox.networking.asking import not_running, taken
from elsewhere.sandbox.networking.passages import LOOPBACK, Passage, Room, bound, reach_host, reach_inside
from elsewhere.storage.state import write_aside

__all__ = ["Opened"]

_PICKED = "network.ports"
_PLACES = "an ordinary user's sandbox has sockets of its own in the project, the home, /run and /tmp only"
_MOST_FORWARDED = _MOST_PUBLISHED = 256

Ask = Callable[[Callable[[Line], int]], Awaitable[int]]


class Opened:
    """`directory` is the sandbox's, `ask` asks its keeper for a descriptor, `tell` hears of trouble, `refused` says why a path of
    the host may not be reached, if so."""

    def __init__(
        self, directory: str, ask: Ask, resolver: Resolver, tell: Callable[[str], None], refused: Callable[[str], str]
    ) -> None:
        self._directory = directory
        self._ask = ask
        self._resolver = resolver
        self._tell = tell
        self._refused = refused
        self._failed: dict[Forward | Publish, ElsewhereError] = {}
        self._forwards: dict[Forward, Passage] = {}
        self._published: dict[Publish, Passage] = {}
        self._forwarded_room, self._published_room = Room(_MOST_FORWARDED), Room(_MOST_PUBLISHED)
        self._changing = asyncio.Lock()
        self._closed = False

    @property
    def connections(self) -> int:
        return sum(passage.connections for passage in (*self._forwards.values(), *self._published.values()))

    def published(self) -> list[dict[str, Any]]:
        return [
            {"inside": publish.inside, "host": LOOPBACK, "port": passage.port, **_trouble(passage)}
            for publish, passage in self._published.items()
        ]

    def forwards(self) -> list[dict[str, Any]]:
        return [{"forward": str(forward), **_trouble(passage)} for forward, passage in self._forwards.items()]

    def trouble(self) -> list[dict[str, str]]:
        """Of those that cannot be had, and of those at which the last connection failed."""
        known = {_option(one): error.message for one, error in self._failed.items()}
        for passages in (self._published, self._forwards):
            known |= {_option(one): passage.trouble for one, passage in passages.items() if passage.trouble}
        return [{"what": what, "why": why} for what, why in known.items()]

    def check(self, wanted: Iterable[str] | None = None) -> None:
        """Raises why one of these, as they are asked for, is not there; of all, if nobody says which."""
        for one, error in self._failed.items():
            if wanted is None or _option(one) in wanted:
                raise error

    async def change(self, forwards: list[Forward], published: list[Publish]) -> int:
        """To these; how many connections ended. What cannot be opened is in nobody's way: see `check`."""
        async with self._changing:
            ended = _close_others(self._forwards, forwards) + _close_others(self._published, published)
            self._failed = {}
            for publish in published:
                if publish not in self._published:
                    with self._collected(publish):
                        self._publish(publish)
            for forward in forwards:
                if forward not in self._forwards:
                    with self._collected(forward):
                        await self._forward(forward)
            return ended

    @contextlib.contextmanager
    def _collected(self, one: Forward | Publish) -> Iterator[None]:
        try:
            yield
        except ElsewhereError as error:
            self._failed[one] = error

    def close(self) -> None:
        self._closed = True
        _close_others(self._forwards, [])
        _close_others(self._published, [])

    def _publish(self, publish: Publish) -> None:
        self._check()
        listener = bound(publish, 0 if publish.port else self._picked().get(str(publish.inside), 0))
        passage = Passage(listener, reach_inside(publish, self._socket), self._published_room, self._tell)
        self._published[publish] = passage
        if not publish.port:
            self._remember(publish.inside, passage.port)

    async def _forward(self, forward: Forward) -> None:
        def listen(keeper: Line) -> int:
            return keeper.listen_at(forward.path) if forward.path else keeper.listen(LOOPBACK, forward.inside)

        why = self._refused(forward.path) if forward.path else ""
        if why:
            raise Refused(
                "forward_refused",
                f"--forward {forward}: {why}",
                hint=f"elsewhere network {os.path.basename(self._directory)} --forget {forward}",
            )
        try:
            fd = await self._ask(listen)
        except ElsewhereError as error:
            raise self._not_forwarded(forward, error) from error
        listener = taken(fd, socket.SOCK_STREAM, listening=True)
        try:
            self._check()
        except ElsewhereError:
            listener.close()
            raise
        self._forwards[forward] = Passage(
            listener, reach_host(forward, self._resolver, self._refused), self._forwarded_room, self._tell
        )

    async def _socket(self, family: int) -> socket.socket:
        fd = await self._ask(lambda keeper: keeper.socket(int(family)))  # a plain number: it is marshalled
        return taken(fd, socket.SOCK_STREAM, listening=False)

    def _check(self) -> None:
        """It may have ended while its keeper was asked."""
        if self._closed:
            raise not_running(os.path.basename(self._directory))

    def _not_forwarded(self, forward: Forward, error: ElsewhereError) -> ElsewhereError:
        if error.code != "keeper_refused":
            return error
        if os.strerror(errno.EADDRINUSE) not in error.message:
            reason = error.message.rpartition(": ")[2]
            text = f"--forward {forward} cannot be had in {os.path.basename(self._directory)!r}: {reason}"
            return Refused("forward_refused", text, hint=_PLACES if forward.path else "choose another port inside")
        where = forward.path or f"port {forward.inside}"
        other = "another path" if forward.path else f"another one: --forward {forward.inside + 1}={forward.host}:{forward.port}"
        text = f"{where} is in use in {os.path.basename(self._directory)!r} already"
        return InUse("port_in_use_inside", text, hint=f"end what listens there, or choose {other}")

    # -- ports that were picked -------------------------------------------------------------------------------------------------

    def _picked(self) -> dict[str, int]:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            with open(os.path.join(self._directory, _PICKED), "rb") as stream:
                document = json.loads(stream.read(1 << 16))
            return {str(inside): int(port) for inside, port in document.items() if 0 < int(port) < 1 << 16}
        return {}

    def _remember(self, inside: int, port: int) -> None:
        with contextlib.suppress(OSError):  # then it is another port next time
            write_aside(os.path.join(self._directory, _PICKED), json.dumps({**self._picked(), str(inside): port}).encode())


def _close_others(there: dict[Any, Passage], wanted: list[Any]) -> int:
    return sum(there.pop(one).close() for one in [one for one in there if one not in wanted])


def _option(one: object) -> str:
    return f"--{'forward' if isinstance(one, Forward) else 'publish'} {one}"


def _trouble(passage: Passage) -> dict[str, str]:
    return {"trouble": passage.trouble} if passage.trouble else {}
