"""One command of a race, in a sandbox that is there: what it says goes to a file up to a cap, what it uses is asked for now and
then, and whoever has had enough ends it. Not here: which commands, and what their end means."""

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable
from typing import Any

from elsewhere.errors import ElsewhereError
from elsewhere.operations.executing import journaled
from elsewhere.operations.settings import resolve
from elsewhere.sandbox import denials
from elsewhere.sandbox.keeping import commands
from elsewhere.sandbox.keeping.line import Line, Usage
from elsewhere.sandbox.live import Live
from elsewhere.values import dataclass

__all__ = ["Ended", "run_line"]

_CAP = 4 << 20  # of what one command says, on the disk
_KEPT = 256 << 10  # of its end, in memory
_EVERY_S = 0.5
_CHUNK = 1 << 16
_PATIENCE_S = 10.0

Watch = Callable[[float, Usage | None, str], bool]


@dataclass(frozen=True, slots=True)
class Ended:
    """`said` and `stdout` are the ends of what it said, both streams together and standard output alone; if it was `outlived`, by
    somebody whom it started, these may be that one's last words."""

    exit_code: int
    reason: str
    seconds: float
    said: str
    stdout: str
    denials: list[dict[str, Any]]
    peak_memory: int | None = None
    cpu_s: float | None = None
    outlived: bool = False

    @property
    def good(self) -> bool:
        return self.exit_code == 0 and self.reason == "exited"


def run_line(
    box: Live,
    line: str,
    environment: Iterable[tuple[str, str | None]],
    timeout: float | None,
    output: str,
    watch: Watch | None = None,
    directory: str = "",
) -> Ended:
    """A shell line, to its end. `watch` is told what it has used and its last line, now and then; if it says False, the command
    is ended. `directory` is relative to the project."""
    argv, directory = ["/bin/sh", "-c", line], os.path.normpath(os.path.join(box.record.project, directory))
    with contextlib.ExitStack() as stack:
        request = stack.enter_context(journaled(box, "exec", argv, directory, timeout))
        passed = resolve(box.state, box.record.project)["env.pass"]
        spec = box.spec(argv, directory, environment, passed, timeout=box.timeout(timeout), request=request.id)
        heard = _Heard(output, stack)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, nothing)
        try:
            running = stack.enter_context(commands.started(box.control, spec, [nothing, *heard.writers]))
        finally:
            heard.close_writers()
        _wait(box, running, heard, watch)
        outcome = running.outcome()
    return Ended(
        outcome.exit_code,
        outcome.reason,
        outcome.duration,
        heard.end(),
        heard.end(0),
        denials.of_command(box.record, outcome.denied, argv, heard.raw(1)),
        outcome.memory_peak,
        outcome.cpu_s if outcome.cpu_s is not None else outcome.user_s + outcome.system_s,
        outcome.outlived,
    )


def _wait(box: Live, running: commands.Running, heard: "_Heard", watch: Watch | None) -> None:
    poll = select.poll()
    for fd in (running.fileno(), *heard.readers):
        poll.register(fd, select.POLLIN)
    began, told, asking, deadline = time.monotonic(), 0.0, _Asking(box), None
    with asking:
        while not running.ended:
            for fd, _ in poll.poll(_EVERY_S * 1000):
                if fd == running.fileno():
                    running.wait_for(0.0)
                elif not heard.take(fd):
                    poll.unregister(fd)
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                running.lose()  # it was told to end, and nobody tells that it did
            if watch is not None and now - told >= _EVERY_S and not running.ended:
                told = now
                if not watch(now - began, asking.usage(), heard.last_line()) and deadline is None:
                    running.hang_up()
                    deadline = now + _PATIENCE_S
    heard.drain()


class _Asking:
    """A line to the keeper, for as long as it answers."""

    def __init__(self, box: Live) -> None:
        self._box = box
        self._line: Line | None = None

    def usage(self) -> Usage | None:
        try:
            if self._line is None:
                self._line = self._box.line()
            return self._line.usage(measure=False)
        except ElsewhereError:
            self.close()
            return None

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def __enter__(self) -> "_Asking":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Heard:
    """Two pipes, into one file: its beginning up to a cap, and then its end."""

    def __init__(self, path: str, stack: contextlib.ExitStack) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        stack.callback(self._finish)
        self._written = self._dropped = 0
        self._both = bytearray()
        self._each = (bytearray(), bytearray())
        self.readers: list[int] = []
        self.writers: list[int] = []
        for _ in range(2):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, reader)
            os.set_blocking(reader, False)
            self.readers.append(reader)
            self.writers.append(writer)

    def close_writers(self) -> None:
        for fd in self.writers:
            os.close(fd)

    def take(self, fd: int) -> bool:
        """Whether there may be more."""
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        for kept in (self._both, self._each[self.readers.index(fd)]):
            kept.extend(chunk)
            if len(kept) > 2 * _KEPT:
                del kept[:-_KEPT]
        written = chunk[: max(0, _CAP - self._written)]
        self._dropped += len(chunk) - len(written)
        self._written += len(written)
        with contextlib.suppress(OSError):  # a full disk must not end the race
            os.write(self._file, written)
        return bool(chunk)

    def drain(self) -> None:
        """What the pipes still hold; never wait for more: a child that was left behind may hold them open or go on writing."""
        for fd in self.readers:
            for _ in range(32):
                if not select.select([fd], [], [], 0)[0] or not self.take(fd):
                    break

    def _finish(self) -> None:
        with contextlib.suppress(OSError):
            if self._dropped:
                end = bytes(self._both[-min(_KEPT, self._dropped) :])
                left_out = self._dropped - len(end)
                os.write(self._file, b"\n[... %d bytes left out ...]\n" % left_out + end)
        os.close(self._file)

    def raw(self, stream: int) -> bytes:
        return bytes(self._each[stream][-_KEPT:])

    def end(self, stream: int | None = None) -> str:
        kept = self._both if stream is None else self._each[stream]
        return bytes(kept[-_KEPT:]).decode("utf-8", "replace")

    def last_line(self) -> str:
        lines = bytes(self._both[-2000:]).decode("utf-8", "replace").split("\n")
        return next((line.rpartition("\r")[2].strip() or line.strip() for line in reversed(lines) if line.strip()), "")
