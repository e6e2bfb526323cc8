"""The keeper: pid 1 of a sandbox. It starts commands, reaps, and ends with its owner.

By the time it serves it has no powers left: it was sealed before it knew which sandbox it would keep (see `builder.py`). It is
asked with marshalled packets from outside, which it trusts; it answers with plain ASCII words, because whoever reads the
answer must not trust it.

    control socket   ("spawn", spec) with [channel, stdin, stdout, stderr] | ("hold",) with the lock | ("rehearse",) | ("finish",)
                     end of file: the owner is gone, and so is the sandbox
    channel          <- "started PID" | "terminal" with the master | "refused ERRNO CODE"
                     <- "end CODE SIGNAL REASON UTIME STIME MAXRSS"
                     -> "signal N"; end of file: the caller is gone, so is its command

    command:  started ─┬─ exits ───────────────────────────────► end exited | signaled
                       ├─ deadline ─ TERM ─ grace ─ KILL ──────► end timeout
                       └─ channel closed ─ KILL ───────────────► (nobody is told)

Nothing is imported once the sandbox's root is ours: an import would run the sandbox's code with what we hold. `seal_imports`
takes the means away.
"""

import array
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import termios
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from elsewhere.sandbox import wire
from elsewhere.sandbox.spec import Spec

__all__ = ["Keeper", "descendants", "kill_quietly", "reap_all", "seal_imports"]

# `socket.send_fds` and `os.wait4` import these when they are first called, which would be too late.
_LOADED_AHEAD = (array, resource)

_SEALED: list[object] = []
_GRACE_S = 2.0
_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430
_RESET = [number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP)]
MARK = "ELSEWHERE_COMMAND"


def seal_imports() -> None:
    """From here on an import of anything that is not loaded fails without touching a file. The old lists are kept, unused: giving
    them back would make this process write to memory that it shares with all other keepers."""
    _SEALED.extend((sys.path, sys.meta_path, sys.path_hooks, sys.path_importer_cache))
    sys.path, sys.meta_path, sys.path_hooks, sys.path_importer_cache = [], [], [], {}


@dataclass(slots=True)
class _Command:
    pid: int
    mark: str
    channel: socket.socket
    deadline: float | None
    ends_sandbox: bool
    reason: str = ""
    killed: bool = False


class Keeper:
    def __init__(self, control: socket.socket, *, alone: bool) -> None:
        """`alone`: we are pid 1, and everything else in sight belongs to the sandbox. Without a process namespace of our own,
        descendants are looked up one by one."""
        self._control = control
        self._alone = alone
        self._commands: dict[int, _Command] = {}
        self._by_channel: dict[int, _Command] = {}
        self._held: list[int] = []
        self._count = 0
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._woken = woken
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(woken, select.POLLIN)

    def rehearse(self) -> None:
        """Run one command that does nothing. Everything is slow when it is done for the first time, by a fork or through a fresh
        mount, and a sandbox that was raised ahead of time has nothing else to do."""
        ours, theirs = wire.pair()
        channel, far = wire.pair()
        with ours, theirs, channel, far:
            spec = Spec(["true"], {"PATH": os.defpath}, "/", timeout=1.0)
            wire.send(ours, ("spawn", spec.packed()), [far.fileno(), self._null, self._null, self._null])
            message, fds = wire.receive(theirs)
            self._spawn(Spec(**message[1]), fds)
            while self._commands:
                self._round()

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
                self._order()
            else:
                self._word(self._by_channel[fd])
        self._reap()
        self._enforce_deadlines()

    def _patience(self) -> int | None:
        deadlines = [command.deadline for command in self._commands.values() if command.deadline is not None]
        if not deadlines:
            return None
        return min(max(0, int((min(deadlines) - time.monotonic()) * 1000) + 1), 1 << 30)  # poll takes no more than an int

    # -- orders ---------------------------------------------------------------------------------------------------------------

    def _order(self) -> None:
        try:
            message, fds = wire.receive(self._control)
        except (EOFError, OSError):
            self._finish(0)
        if message[0] == "spawn":
            self._spawn(Spec(**message[1]), fds)
        elif message[0] == "hold":
            self._held += fds  # the lock of the sandbox's directory, for as long as we live
        elif message[0] == "rehearse":
            self.rehearse()
        elif message[0] == "finish":
            self._finish(0)

    def _spawn(self, spec: Spec, fds: list[int]) -> None:
        channel = socket.socket(fileno=fds.pop(0))
        self._count += 1
        mark = str(self._count)
        environment = {**spec.environment, MARK: mark}
        terminal = -1
        try:
            try:
                os.chdir(spec.directory)
            except OSError as error:
                _say(channel, f"refused {error.errno} 125")
                return
            os.umask(spec.umask)
            try:
                if spec.terminal is not None:
                    terminal, name = _terminal(*spec.terminal)
                    actions: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0), (os.POSIX_SPAWN_DUP2, 0, 1)]
                    actions.append((os.POSIX_SPAWN_DUP2, fds[0] if fds else 0, 2))
                else:
                    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
                pid = _start(spec.argv, environment, actions)
            except OSError as error:  # of the program, or of its terminal
                missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
                _say(channel, f"refused {error.errno} {127 if missing else 126}")
                return
            except ValueError:  # what no program can be given
                _say(channel, f"refused {errno.EINVAL} 126")
                return
            if terminal >= 0:
                socket.send_fds(channel, [b"terminal"], [terminal])
            _say(channel, f"started {pid}")
            deadline = None if spec.timeout is None else time.monotonic() + spec.timeout
            command = _Command(pid, mark, channel, deadline, spec.ends_sandbox)
            self._commands[pid] = command
            self._by_channel[channel.fileno()] = command
            self._poll.register(channel.fileno(), select.POLLIN)
            channel = None  # type: ignore[assignment]  # it is the command's now
        finally:
            os.chdir("/")
            for fd in (*fds, terminal):
                if fd >= 0:
                    os.close(fd)
            if channel is not None:
                channel.close()

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
            command.reason = command.reason or "cancelled"
            self._kill(command, signal.SIGKILL)

    # -- ends -----------------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self._commands.pop(pid, None)
            if command is not None:
                self._ended(command, status, usage)

    def _ended(self, command: _Command, status: int, usage: Any) -> None:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        reason = command.reason or ("signaled" if number else "exited")
        if command.reason:
            # It was told to go: whatever of its tree did not listen goes now.
            self._kill(command, signal.SIGKILL)
        _say(command.channel, f"end {code} {number} {reason} {usage.ru_utime:.6f} {usage.ru_stime:.6f} {usage.ru_maxrss}")
        if self._by_channel.pop(command.channel.fileno(), None) is not None:
            self._poll.unregister(command.channel.fileno())
        command.channel.close()
        if command.ends_sandbox:
            self._finish(0)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for command in list(self._commands.values()):
            if command.deadline is not None and now >= command.deadline:
                command.reason = command.reason or "timeout"
                self._kill(command, signal.SIGKILL if command.killed else signal.SIGTERM)
                command.killed = True
                command.deadline = now + _GRACE_S

    def _kill(self, command: _Command, number: int) -> None:
        if command.ends_sandbox and self._alone:
            kill_quietly(-1, number)
            return
        for pid in self._tree(command):
            kill_quietly(pid, number)

    def _tree(self, command: _Command) -> list[int]:
        """The command's process and whatever it left behind: its descendants, its session, and who carries its mark."""
        processes = _processes()
        wanted = {command.pid}
        grown = True
        while grown:
            grown = False
            for pid, (parent, session) in processes.items():
                if pid not in wanted and (parent in wanted or session == command.pid):
                    wanted.add(pid)
                    grown = True
        needle = f"\0{MARK}={command.mark}\0".encode()
        wanted |= {pid for pid in processes if pid not in wanted and self._alone and needle in b"\0" + _environment(pid)}
        return [pid for pid in wanted if pid != os.getpid()]

    def _finish(self, code: int) -> NoReturn:
        """The kernel ends everything in a process namespace with its pid 1; elsewhere we have to look."""
        if not self._alone:
            for _ in range(50):
                mine = descendants(os.getpid())
                if not mine:
                    break
                for pid in mine:
                    kill_quietly(pid, signal.SIGKILL)
                reap_all()
                time.sleep(0.002)
        os._exit(code)


def _say(channel: socket.socket, words: str) -> None:
    try:
        channel.send(words.encode())
    except OSError:
        pass  # nobody listens any more


def _terminal(rows: int, columns: int) -> tuple[int, str]:
    """A new terminal of the sandbox's own: the master's descriptor and the name of its other side."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
    number = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, struct.pack("i", 0)))[0]
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return master, f"/dev/pts/{number}"


def _start(argv: list[str], environment: dict[str, str], actions: list[Any]) -> int:
    """Like execvp, with the search path of the command's own environment; a script without `#!` goes to the shell."""
    name = argv[0]
    places = [name] if "/" in name else [f"{place or '.'}/{name}" for place in environment.get("PATH", "").split(":")]
    refusal = OSError(errno.ENOENT, "not found")
    for path in filter(os.path.lexists, places):  # looking costs a fraction of a failed start
        try:
            return _spawn(path, argv, environment, actions)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                return _spawn("/bin/sh", ["/bin/sh", path, *argv[1:]], environment, actions)
            if error.errno == errno.ENOENT:
                error = OSError(errno.EACCES, "the program that should run it is missing")
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refusal = error
    raise refusal


def _spawn(path: str, argv: list[str], environment: dict[str, str], actions: list[Any]) -> int:
    # A session of its own: no terminal of the host can be its controlling terminal, and one of ours becomes it when opened.
    return os.posix_spawn(path, argv, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET)


def kill_quietly(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass  # gone already, which is what was wanted


def _processes() -> dict[int, tuple[int, int]]:
    """Parent and session of every process in sight."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    words = stream.read().rpartition(b")")[2].split()
            except OSError:
                continue
            found[int(name)] = (int(words[1]), int(words[3]))
    return found


def descendants(ancestor: int) -> list[int]:
    processes = _processes()
    found = {ancestor}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in processes.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found - {ancestor})


def reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read()
    except OSError:
        return b""
