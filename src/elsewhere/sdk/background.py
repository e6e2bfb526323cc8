"""`Background`: a command that was started and not waited for."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

from elsewhere import units
from elsewhere.errors import ElsewhereError, UsageError
from elsewhere.operations.executing import Background as Started
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.keeping.commands import Outcome
from elsewhere.sandbox.records.record import Record
from elsewhere.sdk.results import CommandResult

__all__ = ["Background"]

_LOOK_S = 0.05
_PATIENCE_S = 10.0
_CHUNK = 1 << 16


class Background:
    """Made by `Sandbox.start`. It ends with this program, unless it was started with `detached=True`. Its output goes to files of
    the sandbox, so it never waits for a reader; `stdout()` and `stderr()` follow it. Usable from several threads."""

    def __init__(self, started: Started, record: Record, argv: tuple[str, ...], *, detached: bool) -> None:
        self._started = started
        self._record = record
        self._detached = detached
        self._argv = argv
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None
        self._stdin = started.stdin

    @property
    def id(self) -> str:
        """Of the request, as `elsewhere requests` shows it."""
        return self._started.request.id

    @property
    def pid(self) -> int:
        """Its number inside."""
        return self._started.running.pid

    @property
    def running(self) -> bool:
        return self._ended(0.0) is None

    def wait(self, timeout: str | float | None = None) -> CommandResult:
        """How it ended; TimeoutError if that takes longer than `timeout`, and it goes on."""
        outcome = self._ended(None if timeout is None else units.duration(timeout))
        if outcome is None:
            raise TimeoutError(f"{' '.join(self._argv)!r} did not end in {timeout}")
        said = [b"".join(_read(path)) for path in (self._started.outputs.stdout, self._started.outputs.stderr)]
        return CommandResult.of(self._record, self._argv, outcome, *said)

    def kill(self, number: int = signal.SIGTERM) -> None:
        """Send it, and what it started in its process group, a signal. Once it has ended, nothing happens."""
        self._started.running.signal(number)

    def send_stdin(self, data: bytes | str) -> None:
        """Waits until it is taken, as a pipe does."""
        if self._stdin < 0:
            raise UsageError("stdin_closed", "its standard input was closed", hint="start another one")
        view = memoryview(data.encode() if isinstance(data, str) else data)
        while view:
            view = view[os.write(self._stdin, view) :]

    def close_stdin(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def stdout(self) -> Iterator[bytes]:
        """What it says, as it says it, from the beginning until its end."""
        return self._follow(self._started.outputs.stdout)

    def stderr(self) -> Iterator[bytes]:
        return self._follow(self._started.outputs.stderr)

    def _follow(self, path: str) -> Iterator[bytes]:
        with open(path, "rb", buffering=0) as stream:
            while True:
                over = self._ended(0.0) is not None
                while data := stream.read(_CHUNK):
                    yield data
                if over:
                    return
                time.sleep(_LOOK_S)

    def _ended(self, seconds: float | None) -> Outcome | None:
        deadline = None if seconds is None else time.monotonic() + seconds
        running = self._started.running
        while True:
            with self._lock:  # only ever for a moment: another thread may want to know whether it runs
                if self._outcome is None and running.wait_for(0.0):
                    self._outcome = running.outcome()
                if self._outcome is not None:
                    return self._outcome
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            wire.readable(running.fileno(), left)

    def close(self) -> None:
        """Let go of it: one that is not detached ends, and has ended afterwards."""
        with contextlib.suppress(OSError):
            self.close_stdin()
        if not self._detached and self._outcome is None:
            self._started.running.hang_up()
            with contextlib.suppress(ElsewhereError, OSError, ValueError):
                self._ended(_PATIENCE_S)
        self._started.running.close()

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Background {self.id} {' '.join(self._argv)!r}>"


def _read(path: str) -> Iterator[bytes]:
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        yield stream.read()
