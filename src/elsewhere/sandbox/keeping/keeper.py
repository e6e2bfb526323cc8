"""The keeper: pid 1 of a sandbox. It starts commands, reaps, and writes down how each of them ended.

By the time it serves it has no powers left: it was sealed before it knew which sandbox it would keep (see `builder.py`). It is
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
    spawn SPEC                   channel, stdin, stdout, stderr   on the channel
    processes                    -                                lines, then a packet "."
    usage MEASURE                -                                "usage" and what `watch.Watch.told` says
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

    channel          <- "started PID" | "terminal" with the master | "refused ERRNO CODE"
                     <- "denied KIND:WHAT:COUNT …", if anything was
                     <- "end CODE SIGNAL REASON UTIME STIME MAXRSS CPU_S MEMORY_PEAK PROCESSES_PEAK WRITTEN"
                     -> "signal N"; end of file: the caller is gone, so is its command, unless it is detached

    command:  started ─┬─ exits ───────────────────────────────► end exited | signaled | memory | pids | disk
                       ├─ deadline ─ TERM ─ grace ─ KILL ──────► end timeout
                       ├─ watchdog ─ KILL ─────────────────────► end memory | disk
                       ├─ cancel, channel closed ─ KILL ───────► end cancelled
                       └─ sandbox ends ─ TERM ─ grace ─ KILL ──► end killed | expired

Nothing is imported once the sandbox's root is ours: an import would run the sandbox's code with what we hold. `seal_imports`
takes the means away.
"""

import array
import errno
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from elsewhere import __version__
from elsewhere.linux import landlock, notifications
from elsewhere.linux.gauges import Gauges
from elsewhere.sandbox.keeping import processes, spawning, wire
from elsewhere.sandbox.keeping.processes import MARK, WINDOW, kill_quietly
from elsewhere.sandbox.keeping.spec import PROTOCOL, Spec
from elsewhere.sandbox.keeping.watch import Meter, Watch

__all__ = ["Keeper", "seal_imports"]

_LOADED_AHEAD = (array,)  # `socket.send_fds` imports it when it is first called, which would be too late

_SEALED: list[object] = []
_GRACE_S = 2.0
_ANSWER_S = 5.0
_GOING_S = 0.5
_PACKET = 32 * 1024
_OVERTIME = ("timeout", "expired")  # these end with 124, as in a shell
_MOST_DENIALS = 40
_LINGER_S = 0.01
_TICKS = os.sysconf("SC_CLK_TCK")
_RLIMITS = {"processes": resource.RLIMIT_NPROC, "file_size": resource.RLIMIT_FSIZE}
_SPARE = 48  # descriptors that we may need for ourselves, to look around or to answer
_CLOSE_TO_FULL = 256 << 20  # of memory: what can be used up while we are in the commands' group


def seal_imports() -> None:
    """From here on an import of anything that is not loaded fails without touching a file. The old lists are kept, unused: giving
    them back would make this process write to memory that it shares with all other keepers."""
    _SEALED.extend((sys.path, sys.meta_path, sys.path_hooks, sys.path_importer_cache))
    sys.path, sys.meta_path, sys.path_hooks, sys.path_importer_cache = [], [], [], {}


@dataclass(slots=True)
class _Command:
    pid: int
    mark: str
    request: str
    channel: socket.socket
    deadline: float | None
    ends_sandbox: bool
    detached: bool
    meter: Meter
    denials: dict[str, int]
    number: int
    before: frozenset[tuple[int, int]] | None
    reason: str = ""
    killed: bool = False


@dataclass(frozen=True, slots=True)
class _Frozen:
    """Who asked for it, since when, and which processes were stopped for it, parents before their children."""

    asker: socket.socket
    since: float
    stopped: list[int]


class Keeper:
    def __init__(self, control: socket.socket, *, alone: bool, gauges: Gauges | None = None) -> None:
        """`alone`: we are pid 1, and everything else in sight belongs to the sandbox. Without a process namespace of our own,
        descendants are looked up one by one. `gauges`: the group that commands run in, where there is one."""
        self._control = control
        self._alone = alone
        self._watch = Watch(gauges)
        self._leave_at: float | None = None
        if gauges is not None:
            gauges.enter_work()
        self._refused_calls = -1
        self._stays = False
        self._listener: socket.socket | None = None
        self._peers: dict[int, socket.socket] = {}
        self._journal = -1
        self._layers = -1
        self._commands: dict[int, _Command] = {}
        self._by_channel: dict[int, _Command] = {}
        self._held: list[int] = []
        self._count = 0
        self._expires: float | None = None
        self._closing: float | None = None
        self._idle: float | None = None
        self._idle_since = 0.0
        self._left_behind = False
        self._open_files: int | None = None
        self._frozen: _Frozen | None = None
        self._postponed: list[tuple[Spec, list[int]]] = []
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._woken, self._waker = woken, waker
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(woken, select.POLLIN)

    def hear_of_refusals(self, listener: int) -> None:
        """System calls that the filter refuses are asked of us, and we refuse them: so we know which they were."""
        self._refused_calls = listener
        self._poll.register(listener, select.POLLIN)

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
            while self._commands:
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
            elif fd in self._by_channel:
                self._word(self._by_channel[fd])
            elif fd == self._refused_calls:
                self._refuse_call()
        self._reap()
        self._enforce_deadlines()

    def _patience(self) -> int | None:
        deadlines = [command.deadline for command in self._commands.values()]
        deadlines += [self._leave_at, self._expires, self._closing, self._idle_until(), self._watch.due(busy=self._busy())]
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
                self._end_all("cancelled")
                self._finish(0)
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
        lock, listener, self._journal = fds
        self._held.append(lock)
        self._listener = socket.socket(fileno=listener)

    def _open(self, rules: dict[str, Any], fds: list[int]) -> None:
        """Only now that the sandbox stands and its record says so: until then our root is reality's, and a command would run
        there. Whoever listens is who the other side sees as its peer: so it has to be us."""
        assert self._listener is not None
        for name, wanted in rules.get("rlimits", {}).items():
            if name == "files":
                self._open_files = _at_most(resource.RLIMIT_NOFILE, wanted)  # of commands: we need more, one or two for each
            else:
                most = _at_most(_RLIMITS[name], wanted)
                resource.setrlimit(_RLIMITS[name], (most, most))
        self._watch.arm(rules, *(fds or (-1, -1)))
        if rules.get("writable"):
            landlock.keep_from_writing_elsewhere(rules["writable"])
        elif rules.get("scope"):
            landlock.scope()
        self._idle, self._idle_since = rules.get("idle"), time.monotonic()
        self._listener.listen(64)
        self._poll.register(self._listener.fileno(), select.POLLIN)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # gone again
        if _is_crowded(peer.fileno(), _SPARE // 2):
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
            peer.send(b"usage " + self._watch.told(self._others(), _TICKS, measure=message[1]).encode())
        elif word in ("kill", "cancel"):
            peer.send(self._kill_one(*message[1:]) if word == "kill" else self._cancel(message[1]))
        elif word == "expire":
            self._expires = None if message[1] is None else time.monotonic() + message[1]
            self._idle_since = time.monotonic()
            peer.send(b"done")
        elif word == "root":
            self._hand_out(peer, word, os.open("/", os.O_PATH | os.O_CLOEXEC))
        elif word == "layers":
            self._hand_out(peer, word, os.dup(self._layers) if self._layers >= 0 else -1)
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
        return not self._commands and not self._anybody() and self._closing is None

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
        passed = time.monotonic() - frozen.since
        for command in self._commands.values():
            if command.deadline is not None:
                command.deadline += passed
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
        channel = socket.socket(fileno=fds.pop(0))
        self._count += 1
        mark = spec.request or str(self._count)
        environment = {**spec.environment, MARK: mark}
        master, name = -1, None
        try:
            try:
                os.chdir(spec.directory)
            except OSError as error:
                _say(channel, f"refused {error.errno} 125")
                return
            os.umask(spec.umask)
            try:
                if self._closing is not None:
                    raise OSError(errno.ESHUTDOWN, "the sandbox is ending")
                if _is_crowded(max(channel.fileno(), *fds, -1), _SPARE):
                    raise OSError(errno.EMFILE, "there is no room for another one")
                if spec.terminal is not None:
                    master, name = spawning.terminal(*spec.terminal)
                meter = self._watch.begin(alone=not self._commands)
                before = self._left_by_others()
                pid = self._start(spec.argv, environment, fds, name)
                meter.follow(pid)
            except OSError as error:  # of the program, or of its terminal
                missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
                _say(channel, f"refused {error.errno} {127 if missing else 126}")
                return
            except ValueError:  # what no program can be given
                _say(channel, f"refused {errno.EINVAL} 126")
                return
            self._write_down(f"began {mark} {pid} {time.time():.6f}", spec.request)
            if master >= 0:
                try:
                    socket.send_fds(channel, [b"terminal"], [master])
                except OSError:
                    pass  # the caller is gone, and the end of the channel says so
            _say(channel, f"started {pid}")
            deadline = None if spec.timeout is None else time.monotonic() + spec.timeout
            command = _Command(
                *(pid, mark, spec.request, channel, deadline, spec.ends_sandbox, spec.detached, meter, {}), self._count, before
            )
            self._commands[pid] = command
            self._by_channel[channel.fileno()] = command
            self._poll.register(channel.fileno(), select.POLLIN)
            channel = None  # type: ignore[assignment]  # it is the command's now
        finally:
            os.chdir("/")
            for fd in (*fds, master):
                if fd >= 0:
                    os.close(fd)
            if channel is not None:
                channel.close()

    def _start(self, argv: list[str], environment: dict[str, str], fds: list[int], terminal: str | None) -> int:
        """A process is born in its parent's group: so we go there ourselves. The kernel takes its time to move anybody, so we are
        there while nothing runs, and leave only when a command takes longer than most. But where the group could be full before
        we leave, the command's process goes there and we do not: the memory killer takes the largest."""
        gauges, enter = self._watch.gauges, None
        if gauges is not None and self._is_close_to_full():
            gauges.leave_work()
            enter = gauges.enter_work_alone
        elif gauges is not None:
            gauges.enter_work()
        self._leave_at = time.monotonic() + _LINGER_S
        own = None if self._open_files is None and enter is None else spawning.Own(self._open_files, enter)
        return spawning.start(argv, environment, fds, terminal, own)

    def _is_close_to_full(self) -> bool:
        left = self._watch.gauges.memory_left() if self._watch.gauges is not None else None
        return left is not None and left < _CLOSE_TO_FULL

    def _step_aside(self, now: float) -> None:
        """Out of the commands' group, where the memory killer could choose us; and back when nothing runs any more."""
        gauges = self._watch.gauges
        if self._leave_at is not None and now >= self._leave_at:
            self._leave_at = None
            for command in self._commands.values():
                command.meter.follow(command.pid)
            if gauges is not None:
                gauges.leave_work()
        elif gauges is not None and not self._busy():
            self._leave_at = None
            (gauges.leave_work if self._is_close_to_full() else gauges.enter_work)()

    def _refuse_call(self) -> None:
        asked = notifications.read(self._refused_calls)
        if asked is None:
            return
        command = self._whose(asked.pid)  # once it has its answer it may be gone
        notifications.refuse(self._refused_calls, asked, errno.EPERM)
        self._note_denial(command, f"{notifications.explain(asked.number).kind}:{notifications.name(asked.number)}")

    def _whose(self, pid: int) -> _Command | None:
        if len(self._commands) == 1:
            return next(iter(self._commands.values()))
        if pid in self._commands:
            return self._commands[pid]
        mark = processes.mark_of(pid)
        return next((command for command in self._commands.values() if command.mark == mark), None)

    def _note_denial(self, command: _Command | None, what: str) -> None:
        if command is not None and (what in command.denials or len(command.denials) < _MOST_DENIALS):
            command.denials[what] = command.denials.get(what, 0) + 1

    def _word(self, command: _Command) -> None:
        try:
            data = command.channel.recv(64)
        except OSError:
            data = b""
        if data.startswith(b"signal "):
            number = int(data[7:])
            for send in (os.killpg, os.kill):
                try:
                    send(command.pid, number)
                    break
                except OSError:
                    continue
        elif not data:
            self._poll.unregister(command.channel.fileno())
            del self._by_channel[command.channel.fileno()]
            if not command.detached:
                command.reason = command.reason or "cancelled"
                self._kill(command, signal.SIGKILL)

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

    def _kill_one(self, pid: int, number: int) -> bytes:
        try:
            if pid not in self._others():
                raise ProcessLookupError(errno.ESRCH, "not a process of this sandbox")
            os.kill(pid, number)
        except OSError as error:
            return b"refused %d" % (error.errno or 0)
        return b"done"

    def _cancel(self, request: str) -> bytes:
        for command in self._commands.values():
            if command.request == request:
                command.reason = command.reason or "cancelled"
                self._terminate(command)
                return b"done"
        return b"refused %d" % errno.ESRCH

    # -- ends -----------------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    return
                command = self._commands.pop(found.si_pid, None)
                written = None if command is None else command.meter.written()  # while it is not reaped
                _, status, usage = os.wait4(found.si_pid, 0)
            except ChildProcessError:
                return
            if command is not None:
                self._ended(command, status, usage, written)

    def _ended(self, command: _Command, status: int, usage: Any, written: int | None) -> None:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        broken = self._watch.broken_since(command.meter, self._others, failed=bool(code))
        for limit in broken:
            self._note_denial(command, f"limit:{limit}")
        reason = command.reason or _reason(broken, code, number)
        if reason in _OVERTIME:
            code = 124
        if command.reason:
            # It was told to go: whatever of its tree did not listen goes now, and is gone when the end is told.
            processes.wait_for(self._kill(command, signal.SIGKILL), _GOING_S)
        used = self._watch.used_since(command.meter, written)
        said = f"{code} {number} {reason} {usage.ru_utime:.6f} {usage.ru_stime:.6f} {usage.ru_maxrss} {used}"
        self._tell_end(command, said)
        self._idle_since = time.monotonic()
        if self._by_channel.pop(command.channel.fileno(), None) is not None:
            self._poll.unregister(command.channel.fileno())
        command.channel.close()
        if command.ends_sandbox:
            self._end_all("killed")
            self._finish(0)
        self._left_behind = not self._commands and self._anybody()

    def _tell_end(self, command: _Command, said: str) -> None:
        if command.denials:
            denied = " ".join(f"{what}:{count}" for what, count in command.denials.items())
            self._write_down(f"denied {command.mark} {denied}", command.request)
            _say(command.channel, f"denied {denied}")
        self._write_down(f"end {command.mark} {said} {time.time():.6f}", command.request)
        _say(command.channel, f"end {said}")

    def _write_down(self, line: str, request: str) -> None:
        """What nobody asked for by name (a rehearsal) is nobody's request. A full disk loses the line, not the sandbox."""
        if request and self._journal >= 0:
            try:
                os.write(self._journal, line.encode() + b"\n")
            except OSError:
                pass

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        self._step_aside(now)
        until = self._idle_until()
        if (self._expires is not None and now >= self._expires) or (until is not None and now >= until):
            self._expires = self._idle = None
            self._close("expired", _GRACE_S)
        look = self._watch.due(busy=self._busy())
        if look is None:
            self._watch.rest()
        elif now >= look:
            self._look()
        for command in list(self._commands.values()):
            if command.deadline is not None and now >= command.deadline and self._frozen is None:
                command.reason = command.reason or "timeout"
                self._terminate(command)
        if self._closing is not None and (now >= self._closing or not self._anybody()):
            self._end_all("killed")
            self._finish(0)

    def _idle_until(self) -> float | None:
        """When nobody has used the sandbox for so long that it ends. A process that only holds a window open is no use."""
        if self._idle is None or any(command.mark != WINDOW for command in self._commands.values()):
            return None
        return self._idle_since + self._idle

    def _busy(self) -> bool:
        return bool(self._commands) or self._left_behind

    def _look(self) -> None:
        """Where the kernel holds no limit, we do: too late, but not never."""
        self._left_behind = not self._commands and self._anybody()
        broken = self._watch.look(self._others())
        if broken:
            for command in self._commands.values():
                command.reason = command.reason or broken
                self._note_denial(command, f"limit:{broken}")
            self._signal_everybody(signal.SIGKILL)

    def _close(self, reason: str, grace: float) -> None:
        """The sandbox is to end: everybody is asked to, and has `grace` seconds for it."""
        for command in self._commands.values():
            command.reason = command.reason or reason
        if grace > 0:
            self._signal_everybody(signal.SIGTERM)
        self._closing = time.monotonic() + grace

    def _anybody(self) -> bool:
        """Whether anything but us still runs, whoever started it. Orphans become our children: each end wakes us."""
        return any(map(processes.goes_on, self._others().values()))

    def _others(self) -> dict[int, processes.Process]:
        """Everything in the sandbox but us."""
        found = processes.everything()
        mine = found if self._alone else processes.descendants(os.getpid())
        return {pid: found[pid] for pid in mine if pid != os.getpid() and pid in found}

    def _end_all(self, reason: str) -> None:
        """What still runs ends with us, and that is how its end reads."""
        for command in self._commands.values():
            why = command.reason or reason
            used = self._watch.used_since(command.meter, None)
            self._tell_end(command, f"{124 if why in _OVERTIME else 137} 9 {why} 0 0 0 {used}")

    def _terminate(self, command: _Command) -> None:
        """TERM at first, KILL when asked again, which happens by itself after the grace."""
        self._kill(command, signal.SIGKILL if command.killed else signal.SIGTERM)
        command.killed = True
        command.deadline = time.monotonic() + _GRACE_S

    def _kill(self, command: _Command, number: int) -> set[int]:
        """Its whole tree: these."""
        if command.ends_sandbox and self._alone:
            kill_quietly(-1, number)
            return set()
        found = self._others()
        wanted = processes.tree_of(command.pid, found)
        wanted |= {pid for pid in found if pid not in wanted and processes.mark_of(pid) == command.mark}
        wanted |= self._hidden(command, found)
        wanted &= found.keys() | self._commands.keys()  # once it is reaped, its number may be somebody else's
        for pid in wanted:
            kill_quietly(pid, number)
        return wanted

    def _hidden(self, command: _Command, found: dict[int, processes.Process]) -> set[int]:
        """What of its tree has left it and says nothing about where it came from. Whose it is can only be known if nothing else
        was started, or ran, from its beginning on."""
        others = any(other is not command for other in self._commands.values())
        if command.before is None or others or self._count != command.number:
            return set()
        return processes.since(command.before, found, os.getpid())

    def _left_by_others(self) -> frozenset[tuple[int, int]] | None:
        """Who is there before a command starts; None: other commands, so that who comes is not its own for certain."""
        if self._commands:
            return None
        return frozenset((pid, one.started) for pid, one in self._others().items()) if self._left_behind else frozenset()

    def _signal_everybody(self, number: int) -> None:
        if self._alone:
            kill_quietly(-1, number)
            return
        for pid in self._others():
            kill_quietly(pid, number)

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


def _reason(broken: list[str], code: int, number: int) -> str:
    """A killed process is a memory kill, however its parents took it; a refusal that the command coped with is none."""
    if "memory" in broken:
        return "memory"
    if code and broken:
        return broken[0]
    return "signaled" if number else "exited"


def _at_most(kind: int, wanted: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return wanted if hard < 0 else min(wanted, hard)


def _is_crowded(fd: int, spare: int) -> bool:
    """Whether so many more would be too many. The kernel gives away the lowest number that is free."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 0 <= soft <= fd + spare


def _say(channel: socket.socket, words: str) -> None:
    try:
        channel.send(words.encode())
    except OSError:
        pass  # nobody listens any more
