"""What comes back from a command."""

from elsewhere.errors import ElsewhereError
from elsewhere.sandbox import denials
from elsewhere.sandbox.keeping.commands import Outcome
from elsewhere.sandbox.records.record import Record
from elsewhere.values import dataclass

__all__ = ["CommandFailed", "CommandResult", "CommandUsage", "Denial"]


class CommandFailed(ElsewhereError, RuntimeError):
    """Raised by `CommandResult.check`."""


@dataclass(frozen=True, slots=True)
class Denial:
    """Something that the sandbox refused. `kind` is path, syscall, limit, policy or device; `told_by` is kernel, or output where
    only the command's own words showed it."""

    kind: str
    what: str
    rule: str
    how_to_allow: str
    count: int
    told_by: str


@dataclass(frozen=True, slots=True)
class CommandUsage:
    """What a command used up; None is what nobody can tell on this host."""

    user_s: float
    system_s: float
    cpu_s: float | None
    max_rss_bytes: int
    memory_peak_bytes: int | None
    processes_peak: int | None
    written_bytes: int | None


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. `reason` says why: exited, signaled, timeout, memory, disk, pids, killed, cancelled, expired or lost;
    `exit_code` is the command's own, 124 after a time-out, 137 when it was killed for memory. Output beyond the cap is dropped,
    and said so."""

    argv: tuple[str, ...]
    exit_code: int
    reason: str
    duration: float
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    usage: CommandUsage
    denials: tuple[Denial, ...]

    @classmethod
    def of(
        cls, record: Record, argv: tuple[str, ...], outcome: Outcome, stdout: bytes | None = None, stderr: bytes | None = None
    ) -> "CommandResult":
        said = outcome.stderr if stderr is None else stderr
        denied = denials.of_command(record, outcome.denied, argv, said)
        return cls(
            argv,
            outcome.exit_code,
            outcome.reason,
            outcome.duration,
            (outcome.stdout if stdout is None else stdout).decode("utf-8", "replace"),
            said.decode("utf-8", "replace"),
            outcome.stdout_truncated,
            outcome.stderr_truncated,
            CommandUsage(
                outcome.user_s,
                outcome.system_s,
                outcome.cpu_s,
                outcome.max_rss_kib << 10,
                outcome.memory_peak,
                outcome.processes_peak,
                outcome.written,
            ),
            tuple(Denial(**one) for one in denied),
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
