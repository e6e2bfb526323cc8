"""What comes back from a command."""

from dataclasses import dataclass

from elsewhere.errors import ElsewhereError
from elsewhere.sandbox.keeping.commands import Outcome

__all__ = ["CommandFailed", "CommandResult"]


class CommandFailed(ElsewhereError, RuntimeError):
    """Raised by `CommandResult.check`."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. `reason` says why: exited, signaled, timeout, killed, expired or lost; `exit_code` is the command's
    own, 124 after a time-out. Output beyond the cap is dropped, and said so."""

    argv: tuple[str, ...]
    exit_code: int
    reason: str
    duration: float
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool

    @classmethod
    def of(
        cls, argv: tuple[str, ...], outcome: Outcome, stdout: bytes | None = None, stderr: bytes | None = None
    ) -> "CommandResult":
        return cls(
            argv,
            outcome.exit_code,
            outcome.reason,
            outcome.duration,
            (outcome.stdout if stdout is None else stdout).decode("utf-8", "replace"),
            (outcome.stderr if stderr is None else stderr).decode("utf-8", "replace"),
            outcome.stdout_truncated,
            outcome.stderr_truncated,
        )

    def check(self) -> "CommandResult":
        """Itself, if the command succeeded; CommandFailed otherwise."""
        if self.exit_code:
            raise CommandFailed(
                "command_failed",
                f"{' '.join(self.argv)!r} ended with {self.exit_code} ({self.reason})",
                detail={"exit_code": self.exit_code, "reason": self.reason, "stderr": self.stderr[-2000:]},
            )
        return self
