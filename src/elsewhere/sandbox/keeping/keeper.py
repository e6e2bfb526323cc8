"""The keeper: pid 1 of a sandbox. It takes orders, and ends the sandbox when its time has come; what becomes of the commands is
in `work.py`, how it hears of what was refused to them in `refusals.py`.

By the time it serves it has no powers left: it was sealed before it knew which sandbox it would keep (see `sealing.py`). It is
asked with marshalled packets from outside, which it trusts; it answers with plain ASCII words, because whoever reads the
answer must not trust it.

    control      the socket of whoever made the sandbox. End of file: the owner is gone, and so is the sandbox, unless the keeper
                 was told to stay
    listener     a socket in the sandbox's directory: whoever reaches it may give orders, for as long as the sandbox runs
    journal      a file in the sandbox's directory, to which each beginning and end is appended (see `journal.py`)

    order                        descriptors                      answer
    hold                         lock, listener, journal          -
    open RULES                   (layers to watch, host's disk)   -
    rehearse                     -                                -
    stay SECONDS|None            (layers that lie apart)          -
    hello                        -                                "keeper VERSION PROTOCOL"
    spawn SPEC                   channel, stdin, stdout, stderr   on the channel (see `work.py`)
    processes                    -                                lines, then a packet "."
    usage MEASURE                -                                "usage", what `watch.Watch.told` says, denials so far
    kill PID SIGNAL              -                                "done" | "refused ERRNO"
    cancel REQUEST               -                                "done" | "refused ERRNO"
    expire SECONDS|None          -                                "done"
    root, layers                 -                                the same word with a descriptor | "refused ERRNO"
    finish SECONDS               -                                "done", when the grace begins
    rest COUNT|None              -                                "done", and the end; "refused EBUSY" if anything runs; "refused
                                                                  EAGAIN" if more than COUNT have a connection to us, since
                                                                  one of them may be about to start something
    freeze                       -                                "frozen COUNT": until thawed, or the asker is gone, nothing
                                                                  that runs goes on, and nothing is started
    thaw                         -                                "done"
    ports, listen, listen-at, socket                              see `ports.py`
    hear                         socket                           "done": from then on packets on it, WHAT, name what somebody
                                                                  outside refused to the commands that run

Nothing is imported once the sandbox's root is ours: an import would run the sandbox's code with what we hold. `seal_imports`
takes the means away.
"""

import array
import errno
import functools
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from elsewhere import __version__
from elsewhere.linux import landlock
from elsewhere.linux.gauges import Gauges
from elsewhere.sandbox.keeping import processes, wire
from elsewhere.sandbox.keeping.ports import ORDERS as PORT_ORDERS
from elsewhere.sandbox.keeping.ports import Ports
from elsewhere.sandbox.keeping.processes import Process, kill_quietly
from elsewhere.sandbox.keeping.refusals import Refusals
from elsewhere.sandbox.keeping.spec import PROTOCOL, Spec
from elsewhere.sandbox.keeping.work import GRACE_S, SPARE, Work
from elsewhere.values import dataclass

__all__ = ["Keeper", "seal_imports"]

_LOADED_AHEAD = (array,)  # `socket.send_fds` imports it when it is first called, which would be too late

_SEALED: list[object] = []
_ANSWER_S = 5.0
_PACKET = 32 * 1024
_TICKS = os.sysconf("SC_CLK_TCK")
_RLIMITS = {"processes": resource.RLIMIT_NPROC, "file_size": resource.RLIMIT_FSIZE}


def seal_imports() -> None:
    """From here on an import of anything that is not loaded fails without touching a file. The old lists are kept, unused: giving
    them back would make this process write to memory that it shares with all other keepers."""
    _SEALED.extend((sys.path, sys.meta_path, sys.path_hooks, sys.path_importer_cache))
    sys.path, sys.meta_path, sys.path_hooks, sys.path_importer_cache = [], [], [], {}


@dataclass(frozen=True, slots=True)
class _Frozen:
    """Who asked for it, since when, and which processes were stopped for it, parents before their children."""

    asker: socket.socket
    since: float
    stopped: list[int]


class Keeper:
    def __init__(
        self,
        control: socket.socket,
        *,
        alone: bool,
        gauges: Gauges | None = None,
        ports: dict[str, socket.socket] | None = None,
        others: Callable[[], dict[int, Process]] | None = None,
    ) -> None:
        """`alone`: we are pid 1, and everything else in sight belongs to the sandbox. Without a process namespace of our own,
        descendants are looked up one by one. `gauges`: the group that commands run in, where there is one. `ports`: what there
        is of ways out of its network. `others`: who else is in the sandbox, for who knows better than by looking."""
        self._control = control
        self._alone = alone
        self._others = others or functools.partial(processes.others, alone=alone)
        self._poll = select.poll()
        self._work = Work(self._poll, gauges, self._others, alone=alone)
        self._refusals = Refusals(self._poll, self._work)
        self._ports = Ports(ports or {})
        self._stays = False
        self._listener: socket.socket | None = None
        self._peers: dict[int, socket.socket] = {}
        self._layers = -1
        self._held: list[int] = []
        self._expires: float | None = None
        self._closing: float | None = None
        self._idle: float | None = None
        self._frozen: _Frozen | None = None
        self._postponed: list[tuple[Spec, list[int]]] = []
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._woken, self._waker = woken, waker
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(woken, select.POLLIN)

    def hear_of_refusals(self, listener: int) -> None:
        self._refusals.of_the_filter(listener)

    def rehearse(self) -> None:
        """Run one command that does nothing. Everything is slow when it is done for the first time, by a fork or through a fresh
        mount, and a sandbox that was raised ahead of time has nothing else to do."""
        ours, theirs = wire.pair()
        channel, far = wire.pair()
        with ours, theirs, channel, far:
            spec = Spec(["true"], {"PATH": os.defpath}, "/", timeout=1.0)
            wire.send(ours, ("spawn", spec.packed()), [far.fileno(), self._null, self._null, self._null])
            message, fds = wire.receive(theirs)
            self._spawn(Spec.unpacked(message[1]), fds)
            while len(self._work):
                self._round()

    def close(self) -> None:
        """For one that only rehearsed."""
        signal.set_wakeup_fd(-1)
        for fd in (self._null, self._woken, self._waker):
            os.close(fd)

    def serve(self) -> NoReturn:
        """Never returns and never raises: a traceback would read files of the sandbox."""
        try:
            while True:
                self._round()
        except BaseException:  # whatever it was, the sandbox ends here
            self._finish(1)
        self._finish(1)

    def _round(self) -> None:
        for fd, _ in self._poll.poll(self._patience()):
            if fd == self._woken:
                os.read(self._woken, 4096)
            elif fd == self._control.fileno():
                self._owner_speaks()
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept()
            elif fd in self._peers:
                self._peer_speaks(self._peers[fd])
            elif not self._work.hears(fd):
                self._refusals.hears(fd)
        self._reap()
        self._enforce()

    def _patience(self) -> int | None:
        deadlines = [*self._work.due(), self._expires, self._closing, self._idle_until()]
        known = [deadline for deadline in deadlines if deadline is not None]
        if not known:
            return None
        return min(max(0, int((min(known) - time.monotonic()) * 1000) + 1), 1 << 30)  # poll takes no more than an int

    # -- orders ---------------------------------------------------------------------------------------------------------------

    def _owner_speaks(self) -> None:
        try:
            message, fds = wire.receive(self._control)
        except wire.Crowded:
            return  # whoever asked sees that it was not heard
        except (EOFError, OSError):
            if not self._stays:
                self._end("cancelled")
            self._poll.unregister(self._control.fileno())
            return
        if message[0] == "hold":
            self._hold(fds)
        elif message[0] == "open":
            self._open(message[1], fds)
        elif message[0] == "stay":
            self._stays = True
            self._expires = None if message[1] is None else time.monotonic() + message[1]
            self._layers = fds[0] if fds else -1
        elif message[0] == "rehearse":
            self.rehearse()
        else:
            try:
                self._order(self._control, message, fds)
            except (OSError, TypeError, ValueError, LookupError):
                pass  # it does not listen any more, or we do not understand it

    def _hold(self, fds: list[int]) -> None:
        """The lock of the sandbox's directory for as long as we live, and how others find us, later."""
        lock, listener, self._work.journal = fds
        self._held.append(lock)
        self._listener = socket.socket(fileno=listener)

    def _open(self, rules: dict[str, Any], fds: list[int]) -> None:
        """Only now that the sandbox stands and its record says so: until then our root is reality's, and a command would run
        there. Whoever listens is who the other side sees as its peer: so it has to be us."""
        assert self._listener is not None
        for name, wanted in rules.get("rlimits", {}).items():
            if name == "files":
                self._work.open_files = _at_most(resource.RLIMIT_NOFILE, wanted)  # of commands: we need more, one or two for each
            else:
                most = _at_most(_RLIMITS[name], wanted)
                resource.setrlimit(_RLIMITS[name], (most, most))
        self._work.watch.arm(rules, *(fds or (-1, -1)))
        if rules.get("writable"):
            landlock.keep_from_writing_elsewhere(rules["writable"])
        elif rules.get("scope"):
            landlock.scope()
        self._idle, self._work.touched = rules.get("idle"), time.monotonic()
        self._listener.listen(64)
        self._poll.register(self._listener.fileno(), select.POLLIN)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # gone again
        if wire.is_crowded(peer.fileno(), SPARE // 2):
            peer.close()
            return
        peer.settimeout(_ANSWER_S)  # one who does not take an answer must not keep the others waiting
        self._peers[peer.fileno()] = peer
        self._poll.register(peer.fileno(), select.POLLIN)

    def _peer_speaks(self, peer: socket.socket) -> None:
        try:
            message, fds = wire.receive(peer)
            self._order(peer, message, fds)
        except wire.Crowded:
            return  # whoever asked sees that it was not heard
        except (EOFError, OSError, TypeError, ValueError, LookupError):  # gone, or of a version that we do not understand
            if self._frozen is not None and self._frozen.asker is peer:
                self._thaw()
            self._poll.unregister(peer.fileno())
            del self._peers[peer.fileno()]
            peer.close()

    def _order(self, peer: socket.socket, message: tuple[Any, ...], fds: list[int]) -> None:
        word = message[0]
        if word == "spawn" and self._frozen is not None:
            self._postponed.append((Spec.unpacked(message[1]), fds))
        elif word == "spawn":
            self._spawn(Spec.unpacked(message[1]), fds)
        elif word == "hello":
            peer.send(f"keeper {__version__} {PROTOCOL}".encode())
        elif word == "processes":
            self._tell_processes(peer)
        elif word == "usage":
            used = self._work.watch.told(self._others(), _TICKS, measure=message[1])
            peer.send(f"usage {used} {self._work.denied}".encode())
        elif word == "kill":
            peer.send(self._work.kill_one(*message[1:]))
        elif word == "cancel":
            peer.send(self._work.cancel(message[1]))
        elif word == "expire":
            self._expires = None if message[1] is None else time.monotonic() + message[1]
            self._work.touched = time.monotonic()
            peer.send(b"done")
        elif word == "root":
            self._hand_out(peer, word, os.open("/", os.O_PATH | os.O_CLOEXEC))
        elif word == "layers":
            self._hand_out(peer, word, os.dup(self._layers) if self._layers >= 0 else -1)
        elif word == "hear":
            self._refusals.of_somebody_outside(socket.socket(fileno=fds[0]))
            peer.send(b"done")
        elif word in PORT_ORDERS:
            self._ports.answer(peer, message)
        elif word == "finish":
            peer.send(b"done")
            self._close("killed", message[1])
        elif word == "rest" and self._is_at_rest():
            if self._connected() > message[1]:
                peer.send(b"refused %d" % errno.EAGAIN)
                return
            peer.send(b"done")
            self._finish(0)
        elif word == "freeze" and self._frozen is None:
            peer.send(self._freeze(peer))
        elif word in ("rest", "freeze"):
            peer.send(b"refused %d" % errno.EBUSY)
        elif word == "thaw":
            self._thaw()
            peer.send(b"done")
        else:
            peer.send(b"refused %d" % errno.ENOSYS)

    def _is_at_rest(self) -> bool:
        self._reap()  # what has ended but was not seen yet: its end is to be told before ours
        return not len(self._work) and not self._work.anybody() and self._closing is None

    def _connected(self) -> int:
        """How many can give us orders, without those who are gone and with those who were not let in yet."""
        while self._listener is not None and wire.readable(self._listener):
            self._accept()
        gone = 0
        for peer in filter(wire.readable, self._peers.values()):
            try:
                gone += not peer.recv(1, socket.MSG_PEEK)
            except OSError:
                gone += 1
        return len(self._peers) - gone

    def _freeze(self, asker: socket.socket) -> bytes:
        since = time.monotonic()
        stopped, everybody = processes.stop_all(self._others)
        self._frozen = _Frozen(asker, since, stopped)
        if everybody:
            return b"frozen %d" % len(stopped)
        self._thaw()  # one waits for a disk or a server: what would be copied now could change
        return b"refused %d" % errno.ETIMEDOUT

    def _thaw(self) -> None:
        """Everybody goes on where they were; the time did not count."""
        if self._frozen is None:
            return
        frozen, self._frozen = self._frozen, None
        self._work.give_time(time.monotonic() - frozen.since)
        # Children first: a parent that goes on must not find its child stopped, and take that for the user's wish.
        for pid in reversed(frozen.stopped):
            kill_quietly(pid, signal.SIGCONT)
        postponed, self._postponed = self._postponed, []
        for spec, fds in postponed:
            self._spawn(spec, fds)

    def _hand_out(self, peer: socket.socket, word: str, fd: int) -> None:
        if fd < 0:
            peer.send(b"refused %d" % errno.ENOENT)
            return
        try:
            socket.send_fds(peer, [word.encode()], [fd])
        finally:
            os.close(fd)

    def _spawn(self, spec: Spec, fds: list[int]) -> None:
        self._work.spawn(spec, fds, ending=self._closing is not None)

    def _tell_processes(self, peer: socket.socket) -> None:
        packet = ""
        for line in processes.told(self._others()):
            if len(packet) + len(line) > _PACKET:
                peer.send(packet.encode())
                packet = ""
            packet += line + "\n"
        if packet:
            peer.send(packet.encode())
        peer.send(b".")

    # -- the end --------------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        self._work.reap(self._refusals.catch_up)
        if self._work.over:
            self._end("killed")

    def _enforce(self) -> None:
        """Deadlines, of commands and of the sandbox."""
        now = time.monotonic()
        until = self._idle_until()
        if (self._expires is not None and now >= self._expires) or (until is not None and now >= until):
            self._expires = self._idle = None
            self._close("expired", GRACE_S)
        self._work.enforce(now, frozen=self._frozen is not None)
        if self._closing is not None and (now >= self._closing or not self._work.anybody()):
            self._end("killed")

    def _idle_until(self) -> float | None:
        """When nobody has used the sandbox for so long that it ends. A process that only holds a window open is no use."""
        return self._work.touched + self._idle if self._idle is not None and self._work.only_waits() else None

    def _close(self, reason: str, grace: float) -> None:
        """The sandbox is to end: everybody is asked to, and has `grace` seconds for it."""
        self._work.ask_to_end(reason, gently=grace > 0)
        self._closing = time.monotonic() + grace

    def _end(self, reason: str) -> NoReturn:
        self._refusals.catch_up()
        self._work.end_all(reason)
        self._finish(0)

    def _finish(self, code: int) -> NoReturn:
        """The kernel ends everything in a process namespace with its pid 1; elsewhere we have to look."""
        if not self._alone:
            for _ in range(50):
                mine = processes.descendants(os.getpid())
                if not mine:
                    break
                for pid in mine:
                    kill_quietly(pid, signal.SIGKILL)
                processes.reap_all()
                time.sleep(0.002)
        os._exit(code)


def _at_most(kind: int, wanted: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return wanted if hard < 0 else min(wanted, hard)
