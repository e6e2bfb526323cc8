"""One sandbox, as the network service has it: its ways out, its forwards, its published ports, what was refused to it.

    waiting ──somebody connects──► serving          nothing is read or made before somebody inside connects
    opened: forwards and published ports are there, as its record asks for them

Which sandbox it is is known by the sockets, which were made in its network. Not here: which sandboxes there are
(`service.py`), what is allowed (`network/rules.py`).
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Protocol

from elsewhere.clock import monotonic
from elsewhere.errors import Broken, ElsewhereError, UsageError
from elsewhere.network import machine, names, rules, upstream
from elsewhere.network.answers import Denied
from elsewhere.network.dialling import Resolver
from elsewhere.network.ports import Forward, Publish
from elsewhere.network.proxy import MOST, Proxy
from elsewhere.network.rules import Rule, Rules, Verdict
from elsewhere.network.upstream import Upstream
from elsewhere.sandbox.confinement import Confinement
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.keeping.line import Line
from elsewhere.sandbox.networking import hostsockets, proxies
from elsewhere.sandbox.networking.asking import Keepers, taken
from elsewhere.sandbox.networking.opening import Opened
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

if TYPE_CHECKING:
    from elsewhere.network.resolving import Book

__all__ = ["PORTS", "Serving", "Shared", "log"]

PORTS = {"proxy": socket.SOCK_STREAM, "redirect": socket.SOCK_STREAM, "names": socket.SOCK_DGRAM}

_RULES = ("allow", "deny", "presets")
_KNOWN_S = 60.0
_AGAIN_S, _MOST_SAID = 60.0, 64
_UNREADABLE = Verdict(False, "the sandbox's record cannot be read", "elsewhere inspect shows what is wrong with it")


class Outlet(Protocol):
    """What lets connections out: the proxy, or what accepts those that were redirected."""

    @property
    def connections(self) -> int: ...

    async def serve(self) -> None: ...

    def recheck(self) -> int: ...


@dataclass(slots=True)
class Shared:
    """What all sandboxes of one service have in common. `most`: connections that one of them may have."""

    state: State
    keepers: Keepers
    resolver: Resolver
    most: int = MOST
    machine: dict[str, tuple[float, tuple[Rule, ...]]] = field(default_factory=dict)

    def named_by_machine(self, home: str) -> tuple[Rule, ...]:
        """What the machine's own settings name, as they were a moment ago."""
        since, found = self.machine.get(home, (-_KNOWN_S, ()))
        if monotonic() - since >= _KNOWN_S:
            found = machine.named_by_machine(home, os.environ)
            self.machine[home] = (monotonic(), found)
        return found


class Serving:
    """`watch` is the keeper's pidfd; it and the ports are ours to close."""

    def __init__(self, shared: Shared, sandbox_id: str, watch: int, ports: dict[str, int]) -> None:
        self.id = sandbox_id
        self.watch = watch
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._ports: dict[str, socket.socket] = {}
        self._outlets: dict[str, Outlet] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking = asyncio.Lock()
        self._directory = shared.state.sandbox(sandbox_id)
        self._resolver = shared.resolver.share()  # for its ways out and its forwards together
        self.opened = Opened(self._directory, self._ask, self._resolver, self._say, self._refused_path)
        self._writable: tuple[str, ...] = ()
        self._through: tuple[Upstream | None, Verdict | None] | None = None
        self._unusable = ""
        self._rules: Rules | None = None
        self._called = ""
        self._book: Book | None = None
        self._said: dict[str, float] = {}
        self._told: socket.socket | None = None
        self._telling = asyncio.Lock()
        self._closed = False
        self.is_opened = False
        self.give(ports)

    def give(self, ports: dict[str, int]) -> None:
        """Sockets of its network, by name; those that it has already are closed."""
        for name, fd in ports.items():
            if name not in PORTS or name in self._ports:
                os.close(fd)
                continue
            try:
                sock = taken(fd, PORTS[name], listening=PORTS[name] == socket.SOCK_STREAM)
            except Broken as error:
                self._say(f"its {name}: {error.message}")
                continue
            self._ports[name] = sock
            self._loop.add_reader(sock, self._come, name)

    def is_alive(self) -> bool:
        """Whether its keeper is."""
        return not wire.readable(self.watch)

    def close(self) -> None:
        """Everything of it ends."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self.watch)
        os.close(self.watch)
        self.opened.close()
        for name, sock in self._ports.items():
            if name not in self._outlets:
                self._loop.remove_reader(sock)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            # Only then: a number that is still waited at could be another's at once.
            asyncio.gather(*tasks, return_exceptions=True).add_done_callback(lambda _: self._close_sockets())
        else:
            self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in (*self._ports.values(), *([self._told] if self._told else ())):
            sock.close()

    # -- ways out ---------------------------------------------------------------------------------------------------------------

    def _come(self, name: str) -> None:
        """Somebody inside wants something, for the first time."""
        self._loop.remove_reader(self._ports[name])
        task = asyncio.create_task(self._serve(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, name: str) -> None:
        try:
            await self._tell_keeper()
            self._known()  # which also says what it is called
            if name == "names":
                await self._names().serve()
                return
            outlet = self._outlets[name] = self._proxy() if name == "proxy" else self._redirected()
            await outlet.serve()
        except Exception as error:  # closed is what it stays; nobody else's network is concerned
            self._say(f"its {name} ended: {type(error).__name__}: {error}")

    def _proxy(self) -> Outlet:
        return Proxy(
            self._ports["proxy"],
            self._decide,
            resolver=self._resolver,
            upstream=self._upstream()[0],
            observe=self._observe,
            most=self._shared.most,
            sandbox=self._called,
        )

    def _redirected(self) -> Outlet:
        from elsewhere.network.redirected import Redirected

        outlet: Outlet = Redirected(
            self._ports["redirect"],
            self._decide,
            self._addresses(),
            resolver=self._resolver,
            upstream=self._upstream()[0],
            observe=self._observe,
            most=self._shared.most,
            sandbox=self._called,
        )
        return outlet

    def _names(self) -> Any:
        from elsewhere.network.resolving import Names

        return Names(self._ports["names"], self._addresses(), self._judge, self._observe)

    def _addresses(self) -> "Book":
        from elsewhere.network.resolving import Book

        if self._book is None:
            self._book = Book()
        return self._book

    def _upstream(self) -> tuple[Upstream | None, Verdict | None]:
        """The proxy of whoever made or started it; and why nothing is let out, if it cannot be used: past it nothing may go."""
        if self._through is None:
            try:
                self._through = upstream.from_environment(proxies.kept(self._directory)), None
            except (UsageError, OSError, ValueError) as error:
                which = str(error.detail["which"]) if isinstance(error, UsageError) else ""
                rule, how = upstream.why_unusable(which)
                self._say(rule)
                self._unusable, self._through = f"{upstream.UNUSABLE}/{which}", (None, Verdict(False, rule, how))
        return self._through

    def _decide(self, host: str, port: int) -> Verdict:
        known = self._known()
        return known if isinstance(known, Verdict) else rules.decide(known, host, port, self._called)

    def _judge(self, name: str) -> Verdict:
        known = self._known()
        return known if isinstance(known, Verdict) else rules.decide_name(known, name, self._called)

    def _known(self) -> Rules | Verdict:
        """The rules that hold; or the one answer to everything."""
        if self._rules is None:
            try:
                self._read()
            except ElsewhereError as error:
                self._say(error.message)
        return self._upstream()[1] or self._rules or _UNREADABLE

    def _read(self) -> Record:
        """What the record says now. The keeper's life is ours to watch, and not to be read there."""
        found = record.load(self._shared.state, self.id)
        asked: dict[str, Any] = {name: found.network[name] for name in _RULES if name in found.network}
        self._called = self.id if found.keeper is not None else ""
        known = Rules.from_document({"mode": found.confinement.get("network", "none"), **asked})
        self._writable = Confinement.unpacked(found.confinement).writable
        self._rules = replace(known, machine=self._shared.named_by_machine(found.home))
        return found

    # -- what was refused -------------------------------------------------------------------------------------------------------

    def _observe(self, denied: Denied) -> None:
        """Before whoever asked has the answer: so its command is still there when the keeper hears of it."""
        if self._told is not None:
            why = self._unusable or denied.address
            what = f"network:{denied.host}/{denied.port}" + (f"/{why}" if why else "")
            with contextlib.suppress(OSError):  # it has more of them than it can take, or is gone
                self._told.send(what.encode("ascii", "replace"))

    async def _tell_keeper(self) -> None:
        """From now on it hears of what is refused, and knows which commands run."""
        async with self._telling:
            if self._told is not None:
                return
            try:
                fd = await self._ask(_hearing)
            except (ElsewhereError, OSError) as error:
                self._say(f"its keeper does not hear of denials: {error}")
                return
            self._told = socket.socket(fileno=fd)
            self._told.setblocking(False)

    def _say(self, text: str) -> None:
        """To the log, once in a while: how often something happens is for those inside to say."""
        now = monotonic()
        if now - self._said.get(text, -_AGAIN_S) >= _AGAIN_S:
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            self._said[text] = now
            log(self.id, text)

    async def _ask(self, question: Callable[[Line], int]) -> int:
        """One question at a time: the threads are for everybody."""
        async with self._asking:
            return await self._shared.keepers.ask(self.id, question)

    # -- forwards and published ports -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """As its record asks for them."""
        await self._open_as(self._read())

    async def changed(self) -> int:
        """Its record is another one: it holds at once. How many connections ended by that."""
        self._rules = None  # if it cannot be read, nothing is allowed
        try:
            found = self._read()
        finally:
            ended = sum(outlet.recheck() for outlet in self._outlets.values())
        return ended + await self._open_as(found)

    def about(self) -> dict[str, Any]:
        outlets = sum(outlet.connections for outlet in self._outlets.values())
        known, (through, _) = self._known(), self._upstream()
        return {
            "connections": outlets + self.opened.connections,
            "published": self.opened.published(),
            "forwards": self.opened.forwards(),
            "trouble": self.opened.trouble(),
            "machine": [{"rule": str(one), "why": one.why} for one in known.machine] if isinstance(known, Rules) else [],
            "proxy": _places(through),
        }

    def _refused_path(self, path: str) -> str:
        return hostsockets.why_refused(path, os.path.realpath(self._shared.state.path), self._writable)[0]

    async def _open_as(self, found: Record) -> int:
        own = found.confinement.get("network") != "host"  # else its ports are the host's
        forwards, published = (found.network.get(name, ()) if own else () for name in ("forward", "publish"))
        ended = await self.opened.change([Forward.parse(text) for text in forwards], [Publish.parse(text) for text in published])
        self.is_opened = True
        return ended


def _places(through: Upstream | None) -> list[str]:
    """Where a proxy is, and nothing about who may use it."""
    servers = (through.plain, through.tunnel) if through is not None else ()
    return list(dict.fromkeys(names.authority(one.host, one.port) for one in servers if one is not None))


def _hearing(keeper: Line) -> int:
    """Our end of what it hears by."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            keeper.hear(theirs.fileno())
        except BaseException:
            ours.close()
            raise
    return ours.detach()


def log(sandbox_id: str, text: str) -> None:
    print(f"{sandbox_id}: {text}", file=sys.stderr, flush=True)
