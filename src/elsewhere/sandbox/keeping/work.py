"""The commands of a sandbox, as its keeper sees them: started, told of, ended. The sandbox's own life is in `keeper.py`.

    channel          <- "started PID" | "terminal" with the master | "refused ERRNO CODE"
                     <- "denied KIND:WHAT:COUNT …", if anything was
                     <- "outlived", if somebody whom it started was there after it
                     <- "end CODE SIGNAL REASON UTIME STIME MAXRSS CPU_S MEMORY_PEAK PROCESSES_PEAK WRITTEN"
                     -> "signal N"; end of file: the caller is gone, so is its command, unless it is detached

    command:  started ─┬─ exits ───────────────────────────────► end exited | signaled | memory | pids | disk
                       ├─ deadline ─ TERM ─ grace ─ KILL ──────► end timeout
                       ├─ watchdog ─ KILL ─────────────────────► end memory | disk
                       ├─ cancel, channel closed ─ KILL ───────► end cancelled
                       └─ sandbox ends ─ TERM ─ grace ─ KILL ──► end killed | expired

What was refused to a command is counted with it. Each beginning and each end is a line of the journal (`records/journal.py`).
"""

import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from elsewhere.linux.gauges import Gauges
from elsewhere.sandbox.keeping import processes, spawning, wire
from elsewhere.sandbox.keeping.processes import MARK, WINDOW, Process, kill_quietly
from elsewhere.sandbox.keeping.spec import Spec
from elsewhere.sandbox.keeping.watch import Meter, Watch
from elsewhere.values import dataclass

__all__ = ["GRACE_S", "SPARE", "Command", "Work"]

GRACE_S = 2.0
SPARE = 48  # descriptors that we may need for ourselves, to look around or to answer
_GOING_S = 0.5
_OVERTIME = ("timeout", "expired")  # these end with 124, as in a shell
_MOST_DENIALS = 40
_LINGER_S = 0.01
_CLOSE_TO_FULL = 256 << 20  # of memory: what can be used up while we are in the commands' group


@dataclass(slots=True)
class Command:
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

    def note(self, denied: str) -> None:
        if denied in self.denials or len(self.denials) < _MOST_DENIALS:
            self.denials[denied] = self.denials.get(denied, 0) + 1


class Work:
    """`over`: a command has ended that was all that the sandbox was for."""

    def __init__(
        self, poll: select.poll, gauges: Gauges | None, others: Callable[[], dict[int, Process]], *, alone: bool
    ) -> None:
        """`others` tells everything in the sandbox but us; `alone`: that is everything in sight."""
        self.watch = Watch(gauges)
        self.denied = 0
        self.over = False
        self.journal = -1
        self.open_files: int | None = None
        self.touched = 0.0
        self._poll = poll
        self._others = others
        self._alone = alone
        self._commands: dict[int, Command] = {}
        self._by_channel: dict[int, Command] = {}
        self._count = 0
        self._leave_at: float | None = None
        self._left_behind = False
        if gauges is not None:
            gauges.enter_work()

    def __len__(self) -> int:
        return len(self._commands)

    def only_waits(self) -> bool:
        """Nothing runs but what holds a window open."""
        return all(command.mark == WINDOW for command in self._commands.values())

    def busy(self) -> bool:
        return bool(self._commands) or self._left_behind

    def anybody(self) -> bool:
        """Whether anything but us still runs, whoever started it. Orphans become our children: each end wakes us."""
        return any(map(processes.goes_on, self._others().values()))

    def due(self) -> list[float | None]:
        """When there is something to do that nobody asks for."""
        deadlines = [command.deadline for command in self._commands.values()]
        return [*deadlines, self._leave_at, self.watch.due(busy=self.busy())]

    # -- beginnings -----------------------------------------------------------------------------------------------------------

    def spawn(self, spec: Spec, fds: list[int], *, ending: bool) -> None:
        """`ending`: the sandbox is, and nothing begins any more."""
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
                if ending:
                    raise OSError(errno.ESHUTDOWN, "the sandbox is ending")
                if wire.is_crowded(max(channel.fileno(), *fds, -1), SPARE):
                    raise OSError(errno.EMFILE, "there is no room for another one")
                if spec.terminal is not None:
                    master, name = spawning.terminal(*spec.terminal)
                meter = self.watch.begin(alone=not self._commands)
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
            command = Command(
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
        gauges, enter = self.watch.gauges, None
        if gauges is not None and self._is_close_to_full():
            gauges.leave_work()
            enter = gauges.enter_work_alone
        elif gauges is not None:
            gauges.enter_work()
        self._leave_at = time.monotonic() + _LINGER_S
        own = None if self.open_files is None and enter is None else spawning.Own(self.open_files, enter)
        return spawning.start(argv, environment, fds, terminal, own)

    def _is_close_to_full(self) -> bool:
        left = self.watch.gauges.memory_left() if self.watch.gauges is not None else None
        return left is not None and left < _CLOSE_TO_FULL

    def _left_by_others(self) -> frozenset[tuple[int, int]] | None:
        """Who is there before a command starts; None: other commands, so that who comes is not its own for certain."""
        if self._commands:
            return None
        return frozenset((pid, one.started) for pid, one in self._others().items()) if self._left_behind else frozenset()

    # -- meanwhile ------------------------------------------------------------------------------------------------------------

    def hears(self, fd: int) -> bool:
        """Whether this is the channel of one of ours; if so, it is listened to."""
        command = self._by_channel.get(fd)
        if command is not None:
            self._word(command)
        return command is not None

    def _word(self, command: Command) -> None:
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

    def whose(self, pid: int) -> Command | None:
        if len(self._commands) == 1:
            return next(iter(self._commands.values()))
        if pid in self._commands:
            return self._commands[pid]
        mark = processes.mark_of(pid)
        return next((command for command in self._commands.values() if command.mark == mark), None)

    def note(self, command: Command | None, what: str) -> None:
        self.denied += 1
        if command is not None:
            command.note(what)

    def note_for_all(self, what: str) -> None:
        """Which of several commands it was is known to nobody: so it was each of them."""
        self.denied += 1
        for command in self._commands.values():
            command.note(what)

    def kill_one(self, pid: int, number: int) -> bytes:
        try:
            if pid not in self._others():
                raise ProcessLookupError(errno.ESRCH, "not a process of this sandbox")
            os.kill(pid, number)
        except OSError as error:
            return b"refused %d" % (error.errno or 0)
        return b"done"

    def cancel(self, request: str) -> bytes:
        for command in self._commands.values():
            if command.request == request:
                command.reason = command.reason or "cancelled"
                self._terminate(command)
                return b"done"
        return b"refused %d" % errno.ESRCH

    def give_time(self, seconds: float) -> None:
        for command in self._commands.values():
            if command.deadline is not None:
                command.deadline += seconds

    def enforce(self, now: float, *, frozen: bool) -> None:
        """Deadlines and limits. Time does not count for whoever is frozen."""
        self._step_aside(now)
        look = self.watch.due(busy=self.busy())
        if look is None:
            self.watch.rest()
        elif now >= look:
            self._look()
        for command in list(self._commands.values()):
            if command.deadline is not None and now >= command.deadline and not frozen:
                command.reason = command.reason or "timeout"
                self._terminate(command)

    def _step_aside(self, now: float) -> None:
        """Out of the commands' group, where the memory killer could choose us; and back when nothing runs any more."""
        gauges = self.watch.gauges
        if self._leave_at is not None and now >= self._leave_at:
            self._leave_at = None
            for command in self._commands.values():
                command.meter.follow(command.pid)
            if gauges is not None:
                gauges.leave_work()
        elif gauges is not None and not self.busy():
            self._leave_at = None
            (gauges.leave_work if self._is_close_to_full() else gauges.enter_work)()

    def _look(self) -> None:
        """Where the kernel holds no limit, we do: too late, but not never."""
        self._left_behind = not self._commands and self.anybody()
        broken = self.watch.look(self._others())
        if broken:
            for command in self._commands.values():
                command.reason = command.reason or broken
                self.note(command, f"limit:{broken}")
            self.signal_everybody(signal.SIGKILL)

    # -- ends -----------------------------------------------------------------------------------------------------------------

    def reap(self, before: Callable[[], None]) -> None:
        """`before` is called while one that has ended is still among those that are there."""
        while not self.over:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    return
                before()
                command = self._commands.pop(found.si_pid, None)
                written = None if command is None else command.meter.written()  # while it is not reaped
                _, status, usage = os.wait4(found.si_pid, 0)
            except ChildProcessError:
                return
            if command is not None:
                if self._is_outlived(command):
                    _say(command.channel, "outlived")
                self._ended(command, status, usage, written)

    def _is_outlived(self, command: Command) -> bool:
        """Whether somebody whom it started is still there, or only waits to be reaped: its orphans are our children, younger than
        itself, and so are reaped after it."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        before = command.before
        return before is None or any((pid, one.started) not in before for pid, one in self._others().items())

    def _ended(self, command: Command, status: int, usage: Any, written: int | None) -> None:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        broken = self.watch.broken_since(command.meter, self._others, failed=bool(code))
        for limit in broken:
            self.note(command, f"limit:{limit}")
        reason = command.reason or _reason(broken, code, number)
        if reason in _OVERTIME:
            code = 124
        if command.reason:
            # It was told to go: whatever of its tree did not listen goes now, and is gone when the end is told.
            processes.wait_for(self._kill(command, signal.SIGKILL), _GOING_S)
        used = self.watch.used_since(command.meter, written)
        said = f"{code} {number} {reason} {usage.ru_utime:.6f} {usage.ru_stime:.6f} {usage.ru_maxrss} {used}"
        self._tell_end(command, said)
        self.touched = time.monotonic()
        if self._by_channel.pop(command.channel.fileno(), None) is not None:
            self._poll.unregister(command.channel.fileno())
        command.channel.close()
        self.over = command.ends_sandbox
        self._left_behind = not self.over and not self._commands and self.anybody()

    def _tell_end(self, command: Command, said: str) -> None:
        if command.denials:
            denied = " ".join(f"{what}:{count}" for what, count in command.denials.items())
            self._write_down(f"denied {command.mark} {denied}", command.request)
            _say(command.channel, f"denied {denied}")
        self._write_down(f"end {command.mark} {said} {time.time():.6f}", command.request)
        _say(command.channel, f"end {said}")

    def _write_down(self, line: str, request: str) -> None:
        """What nobody asked for by name (a rehearsal) is nobody's request. A full disk loses the line, not the sandbox."""
        if request and self.journal >= 0:
            try:
                os.write(self.journal, line.encode() + b"\n")
            except OSError:
                pass

    def ask_to_end(self, reason: str, *, gently: bool) -> None:
        for command in self._commands.values():
            command.reason = command.reason or reason
        if gently:
            self.signal_everybody(signal.SIGTERM)

    def end_all(self, reason: str) -> None:
        """What still runs ends with us, and that is how its end reads."""
        for command in self._commands.values():
            why = command.reason or reason
            used = self.watch.used_since(command.meter, None)
            self._tell_end(command, f"{124 if why in _OVERTIME else 137} 9 {why} 0 0 0 {used}")

    def signal_everybody(self, number: int) -> None:
        if self._alone:
            kill_quietly(-1, number)
            return
        for pid in self._others():
            kill_quietly(pid, number)

    def _terminate(self, command: Command) -> None:
        """TERM at first, KILL when asked again, which happens by itself after the grace."""
        self._kill(command, signal.SIGKILL if command.killed else signal.SIGTERM)
        command.killed = True
        command.deadline = time.monotonic() + GRACE_S

    def _kill(self, command: Command, number: int) -> set[int]:
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

    def _hidden(self, command: Command, found: dict[int, Process]) -> set[int]:
        """What of its tree has left it and says nothing about where it came from. Whose it is can only be known if nothing else
        was started, or ran, from its beginning on."""
        others = any(other is not command for other in self._commands.values())
        if command.before is None or others or self._count != command.number:
            return set()
        return processes.since(command.before, found, os.getpid())


def _reason(broken: list[str], code: int, number: int) -> str:
    """A killed process is a memory kill, however its parents took it; a refusal that the command coped with is none."""
    if "memory" in broken:
        return "memory"
    if code and broken:
        return broken[0]
    return "signaled" if number else "exited"


def _say(channel: socket.socket, words: str) -> None:
    try:
        channel.send(words.encode())
    except OSError:
        pass  # nobody listens any more
