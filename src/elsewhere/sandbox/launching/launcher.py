"""The launcher: one lean process for each user, started on demand, gone after some idle minutes.

It keeps blanks waiting, makes sandboxes of them, and reaps. It also serves the command line: a tiny client hands over its
arguments and descriptors, and a fork of the launcher, which has everything loaded, does the work as if it were the client.

    run/<8 hex>       socket; the name says namespaces, root directory and version, so that only like meets like
    run/<8 hex>.lock  held while a launcher lives; the loser of a race to start goes away
    run/<8 hex>.log   what it had to say

    connection        first packet
    command line      ("cli", argv, directory, environment, umask) with stdin, stdout, stderr
    engine            ("create", …) | ("start", id, reserve, wish[, group]) | ("shift", project) | ("settle", id) |
                      ("remove", id) | ("register", id) | ("sweep",) | ("tidy", layer) | ("stop",), any number; see `engine.py`

A sandbox that does not live on its own belongs to the connection that made it until it is settled or removed; when the connection
ends before, its owner has died, and what it left is cleared up here. One that lives on its own is nobody's: its keeper has all it
needs, and whoever finds it in its directory talks to it there. Single-threaded on purpose: it forks.
"""

import contextlib
import fcntl
import gc
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import field
from typing import Any, NoReturn

from elsewhere.errors import ElsewhereError, InUse, UsageError
from elsewhere.linux import cgroups, syscalls
from elsewhere.linux.cgroups import Group
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching import creation, forking, sweeper
from elsewhere.sandbox.launching.fronts import Front, Stand
from elsewhere.sandbox.launching.mechanisms import groups_host, groups_left_over
from elsewhere.sandbox.launching.nursery import Nursery
from elsewhere.sandbox.launching.stock import Stock
from elsewhere.sandbox.networking.switchboard import Switchboard
from elsewhere.sandbox.records import record, truth
from elsewhere.sandbox.records.registry import Registry
from elsewhere.storage import trash
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Launcher", "serve"]


_FRONTS = 2
_TICK_MS = 5000
_LEAVING_S = 2.0
_REAPING_S = 0.2


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    owned: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Keeper:
    sandbox_id: str
    pid: int
    mount_namespace: int
    group: Group | None
    waiting: list[socket.socket] = field(default_factory=list)

    def release(self) -> int:
        """The namespace's descriptor, which is the caller's from now on."""
        fd, self.mount_namespace = self.mount_namespace, -1
        return fd

    def kill(self) -> None:
        """It is our child, or a child of one, and not reaped yet: its number cannot belong to anybody else."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Launcher:
    def __init__(self, state: State, place: str, listener: socket.socket, front: Front, idle: float, ahead: int) -> None:
        self._state = state
        self._place = place
        self._listener = listener
        self._idle = idle
        self._quiet_since = time.monotonic()
        self._connections: dict[int, _Connection] = {}
        self._keepers: dict[int, _Keeper] = {}
        self._by_sandbox: dict[str, _Keeper] = {}
        self._registry = Registry(state)
        self._nursery = Nursery(state.path)
        self._stand = Stand(front, self._before_forking)
        self._stock = Stock(state, self._nursery, ahead)
        self._fronts: list[socket.socket] = []
        self._sweeper = sweeper.start(state)
        self._switchboard = Switchboard(state)
        self._mountinfo = open("/proc/self/mountinfo", "rb")  # noqa: SIM115  (held for as long as we live)
        self._climber = creation.Climber()
        self._unregistered: list[record.Record] = []
        self._living: set[str] = set()
        self._poll = select.poll()
        woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._woken = woken
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._poll.register(listener.fileno(), select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        self._poll.register(self._switchboard.fileno(), select.POLLIN)
        self._poll.register(self._mountinfo.fileno(), select.POLLPRI | select.POLLERR)

    # -- the loop -------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._switchboard.revive_if_died()
        while True:
            busy = self._connections or self._keepers
            happened = self._poll.poll(self._patience())
            if not happened and not busy:
                creation.recover(self._state)  # what another launcher left may have been held by a keeper that was still going
                cgroups.sweep(groups_host())
            if not happened:
                self._switchboard.heard()
            for fd, _ in happened:
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._woken:
                    os.read(self._woken, 4096)
                elif fd == self._mountinfo.fileno():
                    self._mounts_changed()
                elif fd == self._switchboard.fileno():
                    self._switchboard.heard()
                elif fd in self._connections:
                    self._serve(self._connections[fd])
            self._reap()
            if self._stock.waiting_time() is not None:
                self._stock.work()
            elif len(self._fronts) < _FRONTS:
                self._add_front()
            self._register()
            now = time.monotonic()
            if busy:
                self._quiet_since = now
            elif (now - self._quiet_since > self._idle or not os.path.exists(self._state.room("run"))) and self._nobody_knocks():
                return

    def _nobody_knocks(self) -> bool:
        """Take the socket's name away; whoever found it just before is served all the same, and we stay."""
        aside = self._place + ".closing"
        try:
            os.rename(self._place, aside)
        except FileNotFoundError:
            return True
        if wire.readable(self._listener):
            os.rename(aside, self._place)
            return False
        os.unlink(aside)
        return True

    def _patience(self) -> int:
        """Milliseconds until there is something to do that nobody asks for."""
        wait = self._stock.waiting_time()
        if wait is None:
            return _TICK_MS if len(self._fronts) >= _FRONTS else 0
        return math.ceil(wait * 1000)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone again, or no descriptor left: it is asked again in the next round
            sock, _ = self._listener.accept()
            sock.setblocking(True)
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(credentials[4:8], sys.byteorder) not in (os.geteuid(), 0):
                sock.close()
                return
            self._connections[sock.fileno()] = _Connection(sock)
            self._poll.register(sock.fileno(), select.POLLIN)

    def _serve(self, connection: _Connection) -> None:
        try:
            message, fds = wire.receive(connection.sock)
        except Exception:  # gone, or nonsense: neither must end everybody else's launcher
            self._gone(connection)
            return
        if message[0] == "cli":
            self._hand_to_front(connection, message, fds)
            return
        try:
            answer, out = self._answer(connection, message, fds)
        except ElsewhereError as error:
            answer, out = (
                ("error", type(error).__name__, error.code, error.message, error.hint, _plain(error.detail)),
                [],
            )
        except Exception as error:  # a fault of ours must reach the caller, and must not end everybody else's launcher
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            answer, out = (
                ("error", "Broken", "launcher_fault", f"the launcher failed: {type(error).__name__}: {error}", "", {}),
                [],
            )
        if answer is not None:
            self._reply(connection.sock, answer, out)
        for fd in (*out, *fds):  # what came along may be a lock, which the caller alone could not hold if it died
            os.close(fd)

    def _reply(self, sock: socket.socket, answer: object, fds: list[int]) -> None:
        with contextlib.suppress(OSError):  # the caller is gone; its connection says so in the next round
            wire.send(sock, answer, fds)

    def _answer(self, connection: _Connection, message: tuple[Any, ...], fds: list[int]) -> tuple[object | None, list[int]]:
        kind = message[0]
        if kind == "create":
            return self._create(connection, message[1])
        if kind == "start":
            self._finish_rest(message[1], *message[4:], watch=fds[1] if len(fds) > 1 else -1)
            return self._start(connection, *message[1:4])
        if kind == "shift":
            return ("shift", self._climber.shift(message[1])), []
        if kind == "sweep":
            self._sweep()
            return ("done",), []
        if kind == "register":
            self._enter(record.load(self._state, message[1]))
            return ("done",), []
        if kind == "tidy":
            self._tell_sweeper(("tidy", message[1]), [])
            return ("done",), []
        if kind in ("settle", "remove"):
            return self._end(connection, message[1], remove=kind == "remove"), []
        if kind == "stop":
            self._reply(connection.sock, ("stopping",), [])
            self._leave()
        raise UsageError("bad_order", f"the launcher does not know {kind!r}")

    # -- sandboxes --------------------------------------------------------------------------------------------------------------

    def _create(self, connection: _Connection, request: dict[str, Any]) -> tuple[object, list[int]]:
        self._check_mounts()
        order = creation.Order(**request)
        made = creation.create(self._state, order, self._climber, self._stock)
        self._enter(made.record)
        self._connect(made)
        return (self._let_go(made), []) if order.lives else self._give(connection, made, order.abandoned)

    def _connect(self, made: creation.Made) -> None:
        """Its ways out go to the network service, which nobody waits for."""
        opens = bool(made.record.network.get("forward") or made.record.network.get("publish"))
        if made.raised.ports or opens:
            self._switchboard.add(made.record.id, made.raised.keeper_pid, made.raised.ports, opens=opens)
        made.raised.close_ports()

    def _give(self, connection: _Connection, made: creation.Made, wish: str) -> tuple[object, list[int]]:
        """It belongs to whoever asked; `wish` says what becomes of it without them."""
        keeper = _Keeper(made.record.id, made.raised.keeper_pid, made.raised.mount_namespace, made.raised.group)
        self._keepers[made.raised.final_pid] = self._by_sandbox[made.record.id] = keeper
        connection.owned[made.record.id] = wish
        fds = [made.raised.control.detach()]
        if made.raised.layers_fd >= 0:
            fds.append(made.raised.layers_fd)
        return ("created", made.record.fields()), fds

    def _enter(self, made: record.Record) -> None:
        """Into the registry, in a moment: nobody has to wait for that, since whoever lists looks at the directories first."""
        self._unregistered.append(made)

    def _register(self) -> None:
        for made in self._unregistered:
            try:
                self._registry.put(truth.row_of(self._state, made))
            except ElsewhereError as error:
                print(f"{made.id} is not in the registry: {error.message}", file=sys.stderr, flush=True)
        self._unregistered.clear()

    def _finish_rest(self, sandbox_id: str, group: tuple[int, dict[str, str]] | None = None, *, watch: int) -> None:
        """What a sandbox that was told to rest still has of that life: its keeper ends by itself, in a moment, which `watch`
        tells; its mounts, if they are held here, and its group go with it. Of a child of ours, that goes when it is reaped."""
        rested = self._by_sandbox.pop(sandbox_id, None)
        if rested is not None:
            _close(rested.release())
            group = None
        if watch >= 0 and not wire.readable(watch, _LEAVING_S):
            raise InUse("sandbox_will_not_end", f"the keeper of {sandbox_id!r} does not end", hint="try again later")
        if group is not None:
            cgroups.remove(Group(*group), _REAPING_S)

    def _start(self, connection: _Connection, sandbox_id: str, reserve: int, wish: str) -> tuple[object, list[int]]:
        """Without a `wish` it lives on its own."""
        self._check_mounts()
        made = creation.start(self._state, sandbox_id, reserve, self._climber, self._stock, lives=not wish)
        self._connect(made)
        return self._give(connection, made, wish) if wish else (self._let_go(made), [])

    def _let_go(self, made: creation.Made) -> object:
        """It lives on its own: nothing of it stays with us, not even its mounts, which are to end with it."""
        made.raised.discard()
        if made.raised.group is not None:
            self._living.add(made.raised.group.name)
        return ("created", made.record.fields())

    def _end(self, connection: _Connection, sandbox_id: str, *, remove: bool) -> object | None:
        """Answered when nothing of the sandbox runs any more, which may be later."""
        connection.owned.pop(sandbox_id, None)
        keeper = self._by_sandbox.get(sandbox_id)
        if remove and keeper is None and record.is_alive(self._state, sandbox_id):
            raise InUse(
                "sandbox_of_another_launcher",
                f"the sandbox {sandbox_id!r} is kept by a launcher that is not this one",
                hint="end the program that runs it first",
            )
        if remove:
            trash.discard(self._state.sandbox(sandbox_id), self._state.room("trash"))
        if keeper is None:
            self._sweep()
            return ("done",)
        if not remove:
            _close(keeper.release())  # the layers stay: then they must be free when we say so
        keeper.kill()
        keeper.waiting.append(connection.sock)
        return None

    def _gone(self, connection: _Connection) -> None:
        self._poll.unregister(connection.sock.fileno())
        del self._connections[connection.sock.fileno()]
        connection.sock.close()
        for sandbox_id, wish in connection.owned.items():
            keeper = self._by_sandbox.get(sandbox_id)
            if keeper is not None:
                keeper.kill()
                _close(keeper.release())
            with contextlib.suppress(OSError):
                creation.abandon(self._state, sandbox_id, wish)
        self._sweep()

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            keeper = self._keepers.pop(pid, None)
            if keeper is None:
                self._stock.died(pid)
            else:
                if self._by_sandbox.get(keeper.sandbox_id) is keeper:  # it may run again already
                    del self._by_sandbox[keeper.sandbox_id]
                self._stock.nobody_waits()
                for sock in keeper.waiting:
                    self._reply(sock, ("done",), [])
                if keeper.group is not None:
                    cgroups.remove(keeper.group, 0.0)
                # Taking mounts down takes longer than ending processes, and nobody has to wait for it.
                self._sweep(keeper.release())

    def _sweep(self, mount_namespace: int = -1) -> None:
        """Have the trash emptied; with it goes, later, what a namespace still holds."""
        try:
            self._tell_sweeper(("sweep",), [mount_namespace] if mount_namespace >= 0 else [])
        finally:
            _close(mount_namespace)

    def _tell_sweeper(self, order: tuple[str, ...], fds: list[int]) -> None:
        try:
            wire.send(self._sweeper, order, fds)
        except BlockingIOError:
            pass  # it has enough to do, and will see the rest of the trash as well
        except OSError:  # it was killed; another one looks around as soon as it starts
            self._sweeper.close()
            self._before_forking()
            self._sweeper = sweeper.start(self._state)

    def _before_forking(self) -> None:
        """A child that is to use the database must not inherit an open one: SQLite would take our locks for its own."""
        self._registry.close()

    # -- mounts -----------------------------------------------------------------------------------------------------------------

    def _mounts_changed(self) -> None:
        self._stock.forget()
        self._climber.forget()

    def _check_mounts(self) -> None:
        watcher = select.poll()
        watcher.register(self._mountinfo.fileno(), select.POLLPRI | select.POLLERR)
        if watcher.poll(0):
            self._mounts_changed()

    # -- the command line -------------------------------------------------------------------------------------------------------

    def _hand_to_front(self, connection: _Connection, message: tuple[Any, ...], fds: list[int]) -> None:
        """A front answers the client; we forget the connection."""
        for _ in range(len(self._fronts) + 1):
            if not self._fronts:
                self._add_front()
            with self._fronts.pop(0) as front:
                try:
                    wire.send(front, message, [connection.sock.fileno(), *fds])
                    break
                except OSError:
                    print("a front was gone before it was needed", file=sys.stderr, flush=True)
        self._poll.unregister(connection.sock.fileno())
        del self._connections[connection.sock.fileno()]
        connection.sock.close()
        for fd in fds:
            os.close(fd)

    def _add_front(self) -> None:
        """One that waits: a fork is slow at everything that it does for the first time, so it rehearses while nobody waits."""
        self._fronts.append(self._stand.front())

    def close(self) -> None:
        """Nothing that was made ahead of time stays."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # told twice to go, we would leave half of it behind
        self._stock.empty()
        self._nursery.close()
        for front in self._fronts:
            front.close()
        self._stand.close()
        self._switchboard.close()
        self._sweeper.close()  # it empties the trash once more, and ends

    def remove_groups(self) -> None:
        """Those that our blanks were in, as soon as these have noticed that nobody wants them."""
        deadline = time.monotonic() + _LEAVING_S
        while set(groups_left_over(self._state, own=True)) - self._living and time.monotonic() < deadline:
            time.sleep(0.005)

    def _leave(self) -> NoReturn:
        raise SystemExit(0)


def _plain(detail: dict[str, object]) -> dict[str, object]:
    """Only what can travel."""
    return {
        key: value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
        for key, value in detail.items()
    }


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _tell(ready: int, word: bytes) -> None:
    if ready >= 0:
        os.write(ready, word)
        os.close(ready)


def serve(state: State, socket_name: str, front: Front, *, idle: float, ahead: int, ready: int = -1) -> int:
    """Be the launcher until idle, with so many sandboxes made ahead of time. Another one that was faster is not an error."""
    place = os.path.join(state.room("run"), socket_name)
    if ready >= 0:
        os.set_inheritable(ready, False)  # whoever started us waits until nobody has it any more
    lock = os.open(place + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _tell(ready, b"taken")
        return 0
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    creation.recover(state)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    directory = os.open(state.room("run"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place)
    # By way of the descriptor: the path itself may be longer than a socket's name can be.
    listener.bind(f"/proc/self/fd/{directory}/{socket_name}")
    os.chmod(place, 0o600)
    listener.listen(256)
    forking.raise_descriptor_limit()
    gc.collect()
    gc.freeze()  # what is there now stays, and is not touched in every child
    launcher = Launcher(state, place, listener, front, idle, ahead)
    _tell(ready, b"listening")
    try:
        launcher.run()
    finally:
        launcher.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
        os.close(lock)  # the next one may come; what is left takes a moment
        launcher.remove_groups()
    return 0
