"""Running a command in a sandbox, seen from outside: start it, pass on what it needs, wait for its end.

The end is the exit of the main process, which the keeper reports; never the end of a stream, so that a child which was left
behind and holds an output cannot keep anybody waiting. Output goes straight to the caller's descriptors, or through a terminal
of the sandbox's own, or is captured up to a cap. A terminal of the caller's never goes in.
"""

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from elsewhere.errors import Broken, InUse, NotFound, Refused, UsageError
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.keeping.spec import Spec
from elsewhere.sandbox.records.request import REASONS, Denied, parse_denied

__all__ = [
    "CAPTURE_CAP",
    "CallerGone",
    "Outcome",
    "Running",
    "Signals",
    "attached",
    "captured",
    "detached",
    "on_terminal",
    "pause_of",
    "started",
]

CAPTURE_CAP = 16 << 20
_CHUNK = 1 << 16
_PACKET = 4096
_PIPE_ATOMIC = 4096  # is written as a whole, or not at all
_PIPE_CHUNKS = 32
_BEHIND_MS = 200
_CONTROLLING = os.makedev(5, 0)  # /dev/tty, which is whatever terminal its opener has
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class CallerGone(Exception):
    """Whoever we work for ended before the command did."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended and what it used; what nobody can tell on this host is None."""

    exit_code: int
    reason: str
    signal: int
    duration: float
    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_kib: int = 0
    cpu_s: float | None = None
    memory_peak: int | None = None
    processes_peak: int | None = None
    written: int | None = None
    denied: tuple[Denied, ...] = ()
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False


class Signals:
    """Signals that somebody else receives on our behalf, as bytes on a socket: each byte is a number."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def read(self) -> bytes:
        try:
            return self.sock.recv(64)
        except OSError:
            return b""

    def caller(self) -> int:
        """The process that receives them: it connected."""
        pid, _, _ = struct.unpack("iII", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    def pause(self, seconds: float) -> None:
        """Sleep, for somebody who may be gone or may have had enough meanwhile."""
        if not wire.readable(self.sock, seconds):
            return
        data = self.read()
        if not data:
            raise CallerGone
        for number in data:
            if number in _ENDING:
                raise SystemExit(128 + number)


def pause_of(signals: Signals | None) -> Callable[[float], None]:
    """How to wait on behalf of whoever is behind these; without them, whoever waits is interrupted like any program."""
    return time.sleep if signals is None else signals.pause


def attached(
    control: socket.socket, spec: Spec, fds: tuple[int, int, int], signals: Signals | None = None, *, relayed: bool = False
) -> Outcome:
    """On the caller's own descriptors, but for terminals: whoever has one reads what is typed there, also later, and sets how it
    behaves. `relayed`: a file of the host that output goes to cannot be opened again inside (by way of /dev/stderr, say), so the
    command gets a pipe, which can."""
    outputs = [fd for fd in fds[1:] if os.isatty(fd) or (relayed and _is_file(fd))]
    with contextlib.ExitStack() as stack:
        feed = stack.enter_context(_fed(fds[0], signals))
        source = fds[0] if feed is None else feed.reader
        if not outputs:
            run = stack.enter_context(started(control, spec, [source, *fds[1:]]))
            run.wait(signals, feed=feed)
            return run.outcome()
        relays: list[_Relay] = []
        for fd in outputs:
            # Two names of one file are one file: what is said on both stays in order.
            if not any(os.path.sameopenfile(fd, relay.target) for relay in relays):
                relays.append(_Relay(fd))
                stack.callback(relays[-1].close)
        writers = [
            next((relay.writer for relay in relays if fd in outputs and os.path.sameopenfile(fd, relay.target)), fd)
            for fd in fds[1:]
        ]
        try:
            run = stack.enter_context(started(control, spec, [source, *writers]))
        finally:
            for relay in relays:
                os.close(relay.writer)
        run.wait(signals, {relay.reader: relay.take for relay in relays}, feed=feed)
        for relay in relays:
            relay.drain()
        return run.outcome()


def captured(control: socket.socket, spec: Spec, stdin: int, signals: Signals | None = None, cap: int = CAPTURE_CAP) -> Outcome:
    """Into memory, up to `cap` for each stream; what is more is read and dropped, so that the command does not stall."""
    with contextlib.ExitStack() as stack:
        sinks = []
        for _ in range(2):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, reader)
            sinks.append(_Sink(reader, writer, cap))
        feed = stack.enter_context(_fed(stdin, signals))
        source = stdin if feed is None else feed.reader
        try:
            run = stack.enter_context(started(control, spec, [source, sinks[0].writer, sinks[1].writer]))
        finally:
            for sink in sinks:
                os.close(sink.writer)
        run.wait(signals, {sink.reader: sink.take for sink in sinks}, feed=feed)
        for sink in sinks:
            sink.drain()
        out, err = sinks
        return run.outcome(bytes(out.data), bytes(err.data), out.truncated, err.truncated)


def on_terminal(
    control: socket.socket, spec: Spec, source: int, target: int, stderr: int | None, signals: Signals | None = None
) -> Outcome:
    """With a terminal of the sandbox's own between the command and the caller's. The caller's is raw meanwhile, so that every
    key, Ctrl-C included, reaches the command."""
    fds = [stderr] if stderr is not None else []
    with started(control, replace(spec, terminal=_size(target)), fds) as run, _raw(source):
        master = run.terminal
        os.set_blocking(master, False)
        run.wait(signals, {master: lambda: _pass_on(master, target)}, _Keys(source, master), lambda: _resize(master, target))
        for _ in range(_PIPE_CHUNKS):  # what others in there still say must not keep us
            if not _pass_on(master, target):
                break
        return run.outcome()


class _Sink:
    def __init__(self, reader: int, writer: int, cap: int) -> None:
        self.reader = reader
        self.writer = writer
        self.data = bytearray()
        self.truncated = False
        self._cap = cap
        os.set_blocking(reader, False)

    def take(self) -> bool:
        try:
            chunk = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return True
        room = self._cap - len(self.data)
        if len(chunk) > room:
            self.truncated = True
        self.data += chunk[:room]
        return bool(chunk)

    def drain(self) -> None:
        """What the pipe still holds; never wait for more: a child that was left behind may hold it open or go on writing."""
        for _ in range(_PIPE_CHUNKS):
            if not wire.readable(self.reader) or not self.take():
                return


class _Relay:
    """A pipe whose content goes to a file or a terminal of the caller's. If that cannot be written (a full disk, say), the pipe
    breaks, and whoever goes on writing notices."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)

    def take(self) -> bool:
        """Whether there may be more."""
        try:
            view = memoryview(os.read(self.reader, _CHUNK))
        except BlockingIOError:
            return True
        if not view:
            return False
        try:
            _write_all(self.target, view)
        except OSError:
            self.close()
            return False
        return True

    def drain(self) -> None:
        """What the pipe still holds, and no more than that."""
        for _ in range(_PIPE_CHUNKS):
            if self.reader < 0 or not wire.readable(self.reader) or not self.take():
                return

    def close(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


def _is_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


@contextlib.contextmanager
def _fed(source: int, signals: Signals | None) -> "Iterator[_Feed | _Typed | None]":
    """Standard input for a command, where the caller's is a terminal, or a file with a name: whoever has such a file can change
    it by way of /proc/self/fd, though it was opened for reading only."""
    feed: _Feed | _Typed
    if os.isatty(source):
        feed = _Typed(source, signals)
    elif _is_file(source) and os.fstat(source).st_nlink:
        feed = _Feed(source)
    else:
        yield None
        return
    try:
        yield feed
    finally:
        feed.close()


class _Feed:
    """A pipe that a file of the caller's is poured into, as fast as it is read and no faster. What nobody read is the caller's
    again: their place in the file is where the command stopped reading."""

    def __init__(self, source: int) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        self._source = source
        os.set_blocking(self.writer, False)

    def register(self, poll: select.poll) -> int | None:
        if self.writer >= 0:
            poll.register(self.writer, select.POLLOUT)
        return None

    def serves(self, fd: int) -> bool:
        return fd == self.writer

    def move(self, poll: select.poll, fd: int, events: int) -> None:
        del events
        chunk = os.read(self._source, _PIPE_ATOMIC)
        try:
            if chunk:
                os.write(self.writer, chunk)
                return
        except OSError as error:  # no room yet, or nobody reads any more
            os.lseek(self._source, -len(chunk), os.SEEK_CUR)
            if isinstance(error, BlockingIOError):
                return
        poll.unregister(fd)
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        left = struct.unpack("i", fcntl.ioctl(self.reader, termios.FIONREAD, b"\0" * 4))[0]
        if left:
            with contextlib.suppress(OSError):
                os.lseek(self._source, -left, os.SEEK_CUR)
        for fd in (self.reader, self.writer):
            if fd >= 0:
                os.close(fd)


class _Typed:
    """A pipe into which goes what is typed on the caller's terminal. What was taken cannot be given back, so more is taken only
    when all of it was read: with a command that does not read, a line is lost at the most. Nothing is taken while the caller is
    in the background: what is typed then is for whoever is in front."""

    def __init__(self, source: int, signals: Signals | None) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_ATOMIC)  # one page: it has room when it is empty, and only then
        os.set_blocking(self.writer, False)
        self._caller = os.getpid() if signals is None else signals.caller()
        self._terminal = os.fstat(source).st_rdev
        self._own = -1
        with contextlib.suppress(OSError):  # of its own, so that not to wait for it concerns nobody else
            self._own = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        self._source = source if self._own < 0 else self._own
        self._empty = False

    def register(self, poll: select.poll) -> int | None:
        """For how many milliseconds to wait at the most: that we are in front again is told by nobody."""
        if self.reader >= 0:
            os.close(self.reader)  # the command has it by now, and when it lets go of it we are to notice
            self.reader = -1
        with contextlib.suppress(KeyError):
            poll.unregister(self._source)
        if self.writer < 0:
            return None
        poll.register(self.writer, 0 if self._empty else select.POLLOUT)  # that nobody reads any more is told in any case
        if not self._empty:
            return None
        if not _is_in_front(self._caller, self._terminal):
            return _BEHIND_MS
        poll.register(self._source, select.POLLIN)
        return None

    def serves(self, fd: int) -> bool:
        return fd in (self.writer, self._source)

    def move(self, poll: select.poll, fd: int, events: int) -> None:
        if self.writer < 0:
            return  # both had news at once, and the first one was the end
        if fd == self.writer and not events & (select.POLLERR | select.POLLHUP):
            self._empty = True
            return
        typed = b""
        if fd != self.writer:
            try:
                typed = os.read(self._source, _PIPE_ATOMIC)
            except BlockingIOError:
                return  # somebody else was faster
            except OSError:
                pass  # a terminal that is gone reads as an error
        try:
            if typed:
                os.write(self.writer, typed)
                self._empty = False
                return
        except OSError:
            pass  # nobody reads any more
        poll.unregister(self.writer)
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        for fd in (self.reader, self.writer, self._own):
            if fd >= 0:
                os.close(fd)


def _is_in_front(caller: int, terminal: int) -> bool:
    """Whether a process may read from a terminal: the kernel would stop it only if that is the one of its own session, and it is
    in the background there. Of one that cannot be asked nothing is known, and nothing is taken."""
    try:
        with open(f"/proc/{caller}/stat", "rb") as stream:
            words = stream.read().rpartition(b")")[2].split()
    except OSError:
        return False
    state, group, number, front = words[0], int(words[2]), int(words[4]), int(words[5])
    own = os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00)
    return state != b"T" and (terminal not in (own, _CONTROLLING) or group == front)


class _Keys:
    """What is typed, on its way to the command: never waited for, since a command that does not read must not keep us from
    showing what it says."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self._waiting = b""
        self._open = True

    def register(self, poll: select.poll, *, served: bool) -> None:
        """More is read only when what was read before is gone, and nothing once either end is: an end that is closed would be
        reported for ever."""
        if served:
            poll.register(self.target, select.POLLIN | (select.POLLOUT if self._waiting else 0))
        if served and self._open and not self._waiting:
            poll.register(self.source, select.POLLIN)
        else:
            with contextlib.suppress(KeyError):
                poll.unregister(self.source)

    def move(self) -> None:
        if not self._waiting:
            try:
                self._waiting = os.read(self.source, _CHUNK)
            except OSError:
                self._waiting = b""  # a terminal that is gone reads as an error
            self._open = bool(self._waiting)
        try:
            self._waiting = self._waiting[os.write(self.target, self._waiting) :]
        except BlockingIOError:
            return
        except OSError:
            self._waiting = b""


class Running:
    """A command that was started: wait for it, signal it. Closing it, while it runs, ends it, unless it is detached."""

    def __init__(self, channel: socket.socket, started: float) -> None:
        self._channel = channel
        self._started = started
        self._words: list[str] = []
        self._denied: tuple[Denied, ...] = ()
        self._ended = 0.0
        self.terminal = -1
        self.pid = 0

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()
        if self.terminal >= 0:
            os.close(self.terminal)
            self.terminal = -1

    @property
    def ended(self) -> bool:
        return bool(self._words)

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it is over: how it ended is on its way
            self._channel.send(b"signal %d" % number)

    def hang_up(self) -> None:
        """Nobody wants it any more: unless it is detached, it ends, and how can still be heard."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def fileno(self) -> int:
        """Can be read when there is news, or when it is over."""
        return self._channel.fileno()

    def wait_for(self, seconds: float | None) -> bool:
        """Whether it has ended in that time."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._words:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not wire.readable(self._channel, left):
                return False
            self._hear()
        return True

    def wait(
        self,
        signals: Signals | None,
        streams: dict[int, Callable[[], bool]] | None = None,
        keys: "_Keys | None" = None,
        resized: Callable[[], None] | None = None,
        feed: "_Feed | _Typed | None" = None,
    ) -> None:
        streams = dict(streams or {})
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        for fd in streams:
            poll.register(fd, select.POLLIN)
        if signals is not None:
            poll.register(signals.sock.fileno(), select.POLLIN)
        while not self._words:
            if keys is not None:
                keys.register(poll, served=keys.target in streams)
            patience = None if feed is None else feed.register(poll)
            for fd, events in poll.poll(patience):
                if fd == self._channel.fileno():
                    self._hear()
                elif signals is not None and fd == signals.sock.fileno():
                    self._signal(signals, resized)
                elif feed is not None and feed.serves(fd):
                    feed.move(poll, fd, events)
                elif keys is not None and (fd == keys.source or events & select.POLLOUT):
                    keys.move()
                elif fd in streams and not streams[fd]():
                    poll.unregister(fd)
                    del streams[fd]

    def _hear(self) -> None:
        message = _recv(self._channel)
        if message.startswith("end "):
            self._words = message.split()[1:]
        elif message.startswith("denied "):
            self._denied = parse_denied(message.split()[1:])
        elif not message:
            self.lose()
        self._ended = time.monotonic()

    def lose(self) -> None:
        self._words = ["125", "0", "lost", "0", "0", "0", "-", "-", "-", "-"]
        self._ended = time.monotonic()

    def _signal(self, signals: Signals, resized: Callable[[], None] | None) -> None:
        data = signals.read()
        if not data:
            raise CallerGone  # closing the channel, on the way out, tells the keeper to end the command
        for number in data:
            if number != signal.SIGWINCH:
                self.signal(number)
            elif resized is not None:
                resized()

    def outcome(
        self, stdout: bytes = b"", stderr: bytes = b"", stdout_truncated: bool = False, stderr_truncated: bool = False
    ) -> Outcome:
        try:
            code, number, reason, user_s, system_s, max_rss, *used = self._words
            values = (int(code), int(number), float(user_s), float(system_s), int(max_rss))
            cpu_s, *counts = (None if word == "-" else float(word) for word in used)
            memory_peak, processes_peak, written = (None if one is None else int(one) for one in counts)
        except ValueError as error:
            raise Broken("keeper_nonsense", f"the keeper answered {' '.join(self._words)!r}") from error
        if reason not in REASONS:
            raise Broken("keeper_nonsense", f"the keeper gave the reason {reason!r}")
        exit_code = values[0] & 0xFF
        return Outcome(
            exit_code,
            reason,
            values[1],
            self._ended - self._started,
            values[2],
            values[3],
            values[4],
            cpu_s,
            memory_peak,
            processes_peak,
            written,
            self._denied,
            stdout,
            stderr,
            stdout_truncated,
            stderr_truncated,
        )


def started(control: socket.socket, spec: Spec, fds: Sequence[int]) -> Running:
    """On these descriptors; with a terminal, none or only the last of them is needed."""
    channel, theirs = wire.pair()
    run = Running(channel, time.monotonic())
    try:
        try:
            with theirs:
                wire.send(control, ("spawn", spec.packed()), [theirs.fileno(), *fds])
        except OSError as error:
            raise Broken("sandbox_gone", "the sandbox is not running any more", hint="make a new one") from error
        if spec.terminal is not None:
            run.terminal = _receive_terminal(channel, spec)
        message = _recv(channel)
        if message:
            run.pid = _check_started(message, spec)
        else:
            run.lose()  # it may well have started: nobody lived to tell
    except BaseException:
        run.close()
        raise
    return run


def detached(control: socket.socket, spec: Spec, fds: Sequence[int]) -> int:
    """Started and left alone; its number inside."""
    with started(control, spec, fds) as run:
        if run.ended:
            raise Broken("sandbox_gone", "the sandbox ended while the command was started", hint="make a new one")
        return run.pid


def _recv(channel: socket.socket) -> str:
    try:
        return channel.recv(_PACKET).decode("ascii", "replace")
    except ConnectionError:
        return ""


def _receive_terminal(channel: socket.socket, spec: Spec) -> int:
    try:
        data, fds = wire.receive_raw(channel, 256, 1)
    except OSError:
        data, fds = b"", []
    if data != b"terminal" or len(fds) != 1:
        _check_started(data.decode("ascii", "replace"), spec)
        raise Broken("keeper_nonsense", f"the keeper sent {data!r} instead of a terminal")
    return fds[0]


def _check_started(message: str, spec: Spec) -> int:
    """Its number inside."""
    words = message.split()
    if words[:1] == ["started"] and len(words) == 2 and words[1].isdigit():
        return int(words[1])
    if words[:1] != ["refused"] or len(words) != 3 or not words[1].isdigit():
        raise Broken("sandbox_gone", "the sandbox ended before the command could start", hint="make a new one")
    number, code = int(words[1]), words[2]
    if number == errno.ESHUTDOWN:
        raise InUse("sandbox_busy", "the sandbox is just being stopped", hint="try again in a moment")
    error: NotFound | Refused | UsageError
    if number == errno.EAGAIN:
        error = Refused(
            "pids_reached",
            f"{spec.argv[0]!r} cannot be started: the sandbox has as many processes as it may have",
            hint="elsewhere ps shows them; --pids gives a sandbox more",
        )
    elif number in (errno.EMFILE, errno.ENFILE):
        error = Refused(
            "commands_reached",
            f"{spec.argv[0]!r} cannot be started: as many commands run in the sandbox as its keeper can hold",
            hint="elsewhere ps shows them; elsewhere kill ends one",
        )
    elif code == "127":
        error = NotFound(
            "command_not_found",
            f"{spec.argv[0]!r} was not found in the sandbox",
            hint="check its spelling and PATH; a shell line goes with -c",
        )
    elif code == "126":
        error = Refused(
            "command_not_executable",
            f"{spec.argv[0]!r} cannot be executed: {os.strerror(number)}",
            hint="chmod +x it, or name its interpreter",
        )
    else:
        error = UsageError(
            "bad_directory",
            f"the directory {spec.directory!r} cannot be entered in the sandbox: {os.strerror(number)}",
            hint="name a directory that is there inside, relative to the project",
        )
    error.exit_code = int(code)
    raise error


def _size(fd: int) -> tuple[int, int]:
    try:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8))
    except OSError:
        return 24, 80
    return rows or 24, columns or 80


def _resize(master: int, target: int) -> None:
    rows, columns = _size(target)
    with contextlib.suppress(OSError):
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSADRAIN)  # not flushed: what was typed ahead is for the command
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pass_on(source: int, target: int) -> bool:
    """One chunk; False at the end of the source."""
    try:
        data = os.read(source, _CHUNK)
    except BlockingIOError:
        return False
    except OSError:
        return False  # a terminal whose other side is closed reads as an error
    try:
        _write_all(target, memoryview(data))
    except OSError:
        return False
    return bool(data)


def _write_all(target: int, view: memoryview) -> None:
    """Also to what somebody else does not want to wait for."""
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(target, select.POLLOUT)
            poll.poll()
