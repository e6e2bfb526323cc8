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
import struct
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from elsewhere.errors import Broken, InUse, NotFound, Refused, UsageError
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.keeping.callers import CallerGone, Signals
from elsewhere.sandbox.keeping.spec import Spec
from elsewhere.sandbox.keeping.streams import PIPE_CHUNKS, Feed, Keys, Relay, Sink, Typed, fed, is_file, pass_on
from elsewhere.sandbox.records.request import REASONS, Denied, parse_denied
from elsewhere.values import dataclass

__all__ = [
    "CAPTURE_CAP",
    "Outcome",
    "Running",
    "attached",
    "captured",
    "detached",
    "on_terminal",
    "started",
]

CAPTURE_CAP = 16 << 20
_PACKET = 32 << 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended and what it used; what nobody can tell on this host is None. `outlived`: somebody whom it started was
    there after it, be it for a moment."""

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
    outlived: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False


def attached(
    control: socket.socket, spec: Spec, fds: tuple[int, int, int], signals: Signals | None = None, *, relayed: bool = False
) -> Outcome:
    """On the caller's own descriptors, but for terminals: whoever has one reads what is typed there, also later, and sets how it
    behaves. `relayed`: a file of the host that output goes to cannot be opened again inside (by way of /dev/stderr, say), so the
    command gets a pipe, which can."""
    outputs = [fd for fd in fds[1:] if os.isatty(fd) or (relayed and is_file(fd))]
    with contextlib.ExitStack() as stack:
        feed = stack.enter_context(fed(fds[0], signals))
        source = fds[0] if feed is None else feed.reader
        if not outputs:
            run = stack.enter_context(started(control, spec, [source, *fds[1:]]))
            run.wait(signals, feed=feed)
            return run.outcome()
        relays: list[Relay] = []
        for fd in outputs:
            # Two names of one file are one file: what is said on both stays in order.
            if not any(os.path.sameopenfile(fd, relay.target) for relay in relays):
                relays.append(Relay(fd))
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
            sinks.append(Sink(reader, writer, cap))
        feed = stack.enter_context(fed(stdin, signals))
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
        run.wait(signals, {master: lambda: pass_on(master, target)}, Keys(source, master), lambda: _resize(master, target))
        for _ in range(PIPE_CHUNKS):  # what others in there still say must not keep us
            if not pass_on(master, target):
                break
        return run.outcome()


class Running:
    """A command that was started: wait for it, signal it. Closing it, while it runs, ends it, unless it is detached."""

    def __init__(self, channel: socket.socket, started: float) -> None:
        self._channel = channel
        self._started = started
        self._words: list[str] = []
        self._denied: tuple[Denied, ...] = ()
        self._outlived = False
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
        keys: Keys | None = None,
        resized: Callable[[], None] | None = None,
        feed: Feed | Typed | None = None,
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
        elif message == "outlived":
            self._outlived = True
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
            self._outlived,
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
