"""The network service: one process for each state directory, for all of its sandboxes. Started on demand (`calling.py`, which has
the messages that it understands), gone some seconds after the last of them.

    starting ──► adopts what runs already ──► serves ──no sandbox for some seconds──► nobody knocks ──► says bye, gone
                                                 ◄────────────────somebody knocks────────┘

It has no memory: what a sandbox may do is in its record, its sockets are with its keeper. So one that was killed is simply
followed by another. Until then whoever is inside waits, and nothing is let through.

A fault in one sandbox ends that sandbox's network at most. Started as `python -m elsewhere.sandbox.networking.service STATE
LISTENER LOCK`, with two descriptors.
"""

import asyncio
import contextlib
import fcntl
import gc
import os
import resource
import signal
import socket
import sys
import traceback
from typing import Any

from elsewhere import units
from elsewhere.errors import ElsewhereError, NotFound, UsageError
from elsewhere.linux import syscalls
from elsewhere.network.dialling import Resolver
from elsewhere.network.proxy import MOST
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.keeping.line import Line
from elsewhere.sandbox.networking.asking import Keepers, close_all, not_running
from elsewhere.sandbox.networking.calling import SOCKET
from elsewhere.sandbox.networking.serving import Serving, Shared, log
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Service", "serve"]

_LINGER_S = 10.0  # while somebody is there who may have the next sandbox
_LINGER_ALONE_S = 0.05
_LOOKING_S = 30.0
_CROWDED_S = 0.1
_OPENING_S = 3.0
_ADOPTED_AT_ONCE = 8
_GREEDY = 8  # so many sandboxes may have as many connections as one may have


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    adds: int = 0


class Service:
    """`linger`: seconds without a sandbox, while somebody is connected; without anybody, a second at most."""

    def __init__(self, shared: Shared, listener: socket.socket, lock: int, linger: float = _LINGER_S) -> None:
        self._shared = shared
        self._listener = listener
        self._lock = lock
        self._linger = linger
        self._place = os.path.join(shared.state.room("run"), SOCKET)
        self._loop = asyncio.get_running_loop()
        self._sandboxes: dict[str, Serving] = {}
        self._connections: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._quiet_since = self._loop.time()
        self._leaving: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Until nobody needs it."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        self._do(self._adopt_all())
        self._do(self._look())
        await self._left.wait()
        for serving in list(self._sandboxes.values()):
            self._forget(serving)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def leave(self) -> None:
        """Whatever there is to do."""
        self._left.set()

    def _do(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            traceback.print_exception(task.exception())
        self._consider_leaving()

    # -- who calls --------------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # gone again
        except OSError:  # no descriptor is left: others may end meanwhile
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_CROWDED_S, self._loop.add_reader, self._listener, self._accept)
            return
        with contextlib.suppress(OSError):
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(credentials[4:8], sys.byteorder) not in (os.geteuid(), 0):
                sock.close()
                return
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # who is gone again may have said something
                wire.send(sock, ("here",))
            connection = self._connections[sock.fileno()] = _Connection(sock)
            self._loop.add_reader(sock, self._hear, connection)

    def _hear(self, connection: _Connection) -> None:
        try:
            message, fds = wire.receive(connection.sock)
        except BlockingIOError:
            return
        except wire.Crowded:
            connection.adds += 1
            log("network", "a sandbox came without its sockets: there is no room for more descriptors")
            self._do(self._adopt_all(after=_LOOKING_S))
            return
        except Exception:  # gone, or nonsense: neither must end everybody else's network
            self._hang_up(connection)
            return
        self._quiet_since = self._loop.time()
        if message[0] == "add":
            connection.adds += 1
            self._add(message[1], fds[0], dict(zip(message[2], fds[1:], strict=True)), opens=any(message[3:]))
            return
        close_all(tuple(fds))
        if message[0] == "adopt":
            self._do(self._adopt_all())
        elif message[0] == "stop":
            self._stop()
        else:
            self._do(self._answer(connection, message))

    def _hang_up(self, connection: _Connection) -> None:
        if self._connections.pop(connection.sock.fileno(), None) is not None:
            self._loop.remove_reader(connection.sock)
            connection.sock.close()
            self._consider_leaving()

    async def _answer(self, connection: _Connection, message: tuple[Any, ...]) -> None:
        answer: tuple[Any, ...]
        try:
            answer = await self._answered(*message)
        except ElsewhereError as error:
            detail = {key: value for key, value in error.detail.items() if isinstance(value, (str, int, float, bool))}
            answer = ("error", type(error).__name__, error.code, error.message, error.hint, detail)
        except Exception as error:  # a fault of ours must reach the caller, and must not end everybody else's network
            traceback.print_exc()
            text = f"the network service failed: {type(error).__name__}: {error}"
            answer = ("error", "Broken", "network_service_fault", text, "", {})
        if connection.sock.fileno() >= 0:
            try:
                wire.send(connection.sock, answer)
            except OSError:  # gone, or does not read
                self._hang_up(connection)

    async def _answered(self, word: str, sandbox_id: str, added: tuple[str, ...] = (), *_: object) -> tuple[Any, ...]:
        if word not in ("open", "changed", "about"):
            raise UsageError("bad_order", f"the network service does not know {word!r}")
        serving = await self._found(sandbox_id)
        if word == "open":
            await serving.open()
            serving.opened.check()
            return ("opened", serving.opened.published(), serving.opened.forwards())
        if word == "changed":
            ended = await serving.changed()
            serving.opened.check(added)
            return ("opened", serving.opened.published(), serving.opened.forwards(), ended)
        if not serving.is_opened:  # one that was just adopted; its keeper may be frozen
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OPENING_S):
                    await self._open(serving)
        return ("about", serving.about())

    # -- sandboxes --------------------------------------------------------------------------------------------------------------

    def _add(self, sandbox_id: str, watch: int, ports: dict[str, int], *, opens: bool = False) -> Serving:
        """Everything that came along is ours. The same keeper again brings nothing new: an answer may have been faster."""
        there = self._sandboxes.get(sandbox_id)
        if there is not None and _same(there.watch, watch):
            os.close(watch)
            there.give(ports)
            return there
        if there is not None:
            self._forget(there)
        serving = self._sandboxes[sandbox_id] = Serving(self._shared, sandbox_id, watch, ports)
        self._loop.add_reader(watch, self._forget, serving)
        if opens:
            self._do(self._open(serving))
        return serving

    def _forget(self, serving: Serving) -> None:
        """Its keeper has ended, and everything inside with it."""
        if self._sandboxes.get(serving.id) is serving:
            del self._sandboxes[serving.id]
        serving.close()
        self._quiet_since = self._loop.time()
        self._consider_leaving()

    async def _open(self, serving: Serving) -> None:
        try:
            await serving.open()
            serving.opened.check()
        except ElsewhereError as error:
            log(serving.id, error.message)

    async def _found(self, sandbox_id: str) -> Serving:
        serving = self._sandboxes.get(sandbox_id)
        if serving is not None and serving.is_alive():
            return serving
        found = record.load(self._shared.state, sandbox_id)
        if found.state != "running":
            raise not_running(sandbox_id)
        return await self._adopt(found)

    async def _adopt(self, found: Record) -> Serving:
        watch, ports = await self._shared.keepers.ask(found.id, _introduce)
        return self._add(found.id, watch, ports)

    async def _adopt_all(self, after: float = 0.0) -> None:
        """Those that run and need us, and that we were not told of."""
        if after:
            await asyncio.sleep(after)
        room = asyncio.Semaphore(_ADOPTED_AT_ONCE)
        await asyncio.gather(*(self._adopt_one(sandbox_id, room) for sandbox_id in self._shared.state.sandbox_ids()))

    async def _adopt_one(self, sandbox_id: str, room: asyncio.Semaphore) -> None:
        async with room:
            try:
                found = record.load(self._shared.state, sandbox_id)
                asked = bool(found.network.get("forward") or found.network.get("publish"))
                mode = found.confinement.get("network")
                if found.state != "running" or mode == "host" or not (asked or mode == "allow"):
                    return
                serving = self._sandboxes.get(sandbox_id) or await self._adopt(found)
                if asked:
                    await self._open(serving)
            except NotFound:
                pass  # it has just ended, or is not quite there
            except (ElsewhereError, OSError) as error:
                log(sandbox_id, f"was not adopted: {error}")

    # -- the end ----------------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Whether the state directory is still there: without it nobody can reach us."""
        while os.path.exists(self._shared.state.room("run")):
            await asyncio.sleep(_LOOKING_S)
        self.leave()

    def _consider_leaving(self) -> None:
        """When nobody has needed us for a while: then, or as soon as that can be."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if self._sandboxes or len(self._tasks) > 1 or self._left.is_set():  # one of them looks around
            return
        due = self._quiet_since + (self._linger if self._connections else min(self._linger, _LINGER_ALONE_S))
        if due > self._loop.time():
            self._leaving = self._loop.call_at(due, self._consider_leaving)
        elif self._nobody_knocks():
            self._say_bye()
            self.leave()
        else:
            self._quiet_since = self._loop.time()
            self._consider_leaving()

    def _nobody_knocks(self) -> bool:
        """Take the socket's name away; whoever found it just before, or has just said something, is served all the same. While it
        is away we have the lock, so nobody puts another one there."""
        aside = f"{self._place}.closing"
        try:
            os.rename(self._place, aside)
        except FileNotFoundError:
            return True
        if wire.readable(self._listener) or any(wire.readable(one.sock) for one in self._connections.values()):
            os.rename(aside, self._place)
            return False
        os.unlink(aside)
        return True

    def _stop(self) -> None:
        """Somebody wants it: whatever is served ends, and nobody starts another one for it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._place)
        self._say_bye()
        self.leave()

    def _say_bye(self) -> None:
        """From here on another one may come. What somebody sends now they know not to have been heard."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                wire.send(connection.sock, ("bye", connection.adds))


def _introduce(keeper: Line) -> tuple[int, dict[str, int]]:
    ports = keeper.ports()
    try:
        return os.pidfd_open(keeper.pid()), ports
    except BaseException:
        close_all(ports)
        raise


def _same(one: int, other: int) -> bool:
    """Whether two pidfds are of one process; of one that ended they say -1."""
    pid = _pid(one)
    return pid > 0 and pid == _pid(other)


def _pid(watch: int) -> int:
    with open(f"/proc/self/fdinfo/{watch}", encoding="ascii") as about:
        return next((int(line.split()[1]) for line in about if line.startswith("Pid:")), -1)


def serve(state: State, listener: socket.socket, lock: int, linger: float = _LINGER_S) -> None:
    """Be the network service until nobody needs it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    known = hard if hard != resource.RLIM_INFINITY else 1 << 20
    shared = Shared(state, Keepers(state), Resolver(), most=max(32, min(MOST, known // (2 * _GREEDY))))

    async def run() -> None:
        service = Service(shared, listener, lock, linger)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, service.leave)
        await service.run()

    gc.freeze()
    asyncio.run(run())


def _linger(text: str) -> float:
    """Nonsense is no reason not to serve."""
    try:
        return units.duration(text) if text else _LINGER_S
    except ElsewhereError as error:
        log("network", f"ELSEWHERE_NETWORK_IDLE_S: {error.message}")
        return _LINGER_S


def _main(words: list[str]) -> None:
    path, listener, lock = words[1], int(words[2]), int(words[3])
    # Whoever started us has no other descriptor for us, whatever they had.
    for first, last in (
        (3, min(listener, lock) - 1),
        (min(listener, lock) + 1, max(listener, lock) - 1),
        (max(listener, lock) + 1, (1 << 32) - 1),
    ):
        if first <= last:
            syscalls.close_range(first, last, 0)
    os.set_inheritable(listener, False)
    os.set_inheritable(lock, False)
    os.chdir("/")
    os.umask(0o077)
    serve(State(path), socket.socket(fileno=listener), lock, _linger(os.environ.get("ELSEWHERE_NETWORK_IDLE_S", "")))
    sys.stderr.flush()
    os._exit(0)  # a thread may wait for a resolver, or for a keeper, that does not answer


if __name__ == "__main__":
    _main(sys.argv)
