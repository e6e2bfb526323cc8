"""`Sandbox`: a copy of the environment you work in, as a context manager. Typed, synchronous, safe in a threaded program."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from elsewhere import units
from elsewhere.changes.compare import Changes
from elsewhere.errors import ElsewhereError, UsageError
from elsewhere.operations.sandboxes import find_project, open_sandbox, settings_of
from elsewhere.sandbox import commands
from elsewhere.sandbox.live import Live
from elsewhere.settings import Settings

__all__ = ["CommandFailed", "CommandResult", "Sandbox"]


class CommandFailed(ElsewhereError, RuntimeError):
    """Raised by `CommandResult.check`."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. `reason` says why: exited, signaled, timeout or lost; `exit_code` is the command's own, 124 after a
    time-out. Output beyond the cap is dropped, and said so."""

    argv: tuple[str, ...]
    exit_code: int
    reason: str
    duration: float
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool

    def check(self) -> "CommandResult":
        """Itself, if the command succeeded; CommandFailed otherwise."""
        if self.exit_code:
            raise CommandFailed(
                "command_failed",
                f"{' '.join(self.argv)!r} ended with {self.exit_code} ({self.reason})",
                detail={"exit_code": self.exit_code, "reason": self.reason, "stderr": self.stderr[-2000:]},
            )
        return self


class Sandbox:
    """Made by `Sandbox.create`. Leaving the `with` block discards it, unless `on_exit="keep"` was asked for."""

    def __init__(self, live: Live, on_exit: str, sources: list[tuple[Settings, bool]]) -> None:
        self._live = live
        self._on_exit = on_exit
        self._sources = sources
        self._ended = False

    @classmethod
    def create(
        cls,
        project: str | os.PathLike[str] = ".",
        *,
        base: Literal["live"] = "live",
        on_exit: Literal["discard", "keep"] = "discard",
    ) -> "Sandbox":
        """A sandbox of `project` and the machine around it, ready for commands."""
        if on_exit not in ("discard", "keep"):
            raise UsageError("bad_on_exit", f"on_exit={on_exit!r} is not known", hint="use 'discard' or 'keep'")
        found = find_project(os.fspath(project), os.getcwd())
        sources = settings_of(found)
        return cls(open_sandbox(found, base=base, story="sdk", abandoned=on_exit), on_exit, sources)

    @property
    def id(self) -> str:
        return self._live.id

    @property
    def project(self) -> str:
        """Where the project is inside; the same path as outside on every rung but the last."""
        return self._live.project_path

    @property
    def mechanism(self) -> str:
        return self._live.record.mechanism

    @property
    def enforced(self) -> dict[str, object]:
        """Which mechanism enforces what, and what is not enforced."""
        return self._live.record.enforced

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: str | float | None = None,
        input: str | bytes | None = None,  # noqa: A002  (as in subprocess)
    ) -> CommandResult:
        """Run a command and wait for its end. A string goes to `/bin/sh -c`; a sequence is executed as it is. What the command
        leaves in the background lives until the sandbox ends."""
        self._check_open()
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [os.fspath(word) for word in command]
        if not argv or not argv[0]:
            raise UsageError("no_command", "the command is empty", hint="give at least the name of a program")
        directory = self._live.record.project if cwd is None else os.path.join(self._live.record.project, os.fspath(cwd))
        limit = None if timeout is None else units.duration(timeout)
        spec = self._live.spec(argv, directory, (env or {}).items(), self._sources, timeout=limit)
        stdin = _source(input)
        try:
            outcome = commands.captured(self._live.control, spec, stdin)
        finally:
            os.close(stdin)
        return CommandResult(
            tuple(argv),
            outcome.exit_code,
            outcome.reason,
            outcome.duration,
            outcome.stdout.decode("utf-8", "replace"),
            outcome.stderr.decode("utf-8", "replace"),
            outcome.stdout_truncated,
            outcome.stderr_truncated,
        )

    def changes(self) -> Changes:
        """What the sandbox did so far, compared with reality as it is now."""
        self._check_open()
        return self._live.changes()

    def remove(self) -> None:
        """End everything in it and throw it away. A second time does nothing."""
        if not self._ended:
            self._ended = True
            self._live.remove()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._on_exit == "keep":
            self._live.settle()
        else:
            self._live.remove()

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} of {self._live.record.project}>"

    def _check_open(self) -> None:
        if self._ended:
            raise UsageError("sandbox_ended", f"the sandbox {self.id} has ended", hint="make a new one with Sandbox.create")


def _source(content: str | bytes | None) -> int:
    """A descriptor to read standard input from; an anonymous file, so that nobody has to feed a pipe."""
    if content is None:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("elsewhere-input")
    with open(fd, "wb", closefd=False) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
