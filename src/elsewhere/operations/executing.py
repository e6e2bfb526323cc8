"""`exec` and `shell`: a command in a sandbox that is there; `start_background` for what is to go on by itself."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import field

from elsewhere.changes.compare import Changes
from elsewhere.changes.drift import Drift
from elsewhere.errors import Broken, ElsewhereError, UsageError
from elsewhere.operations import drifting
from elsewhere.operations.entering import enter
from elsewhere.operations.projects import refuse_inside
from elsewhere.operations.settings import resolve
from elsewhere.paths import is_within
from elsewhere.sandbox import rungs
from elsewhere.sandbox.keeping import commands, line
from elsewhere.sandbox.keeping.callers import CallerGone, Signals, pause_of
from elsewhere.sandbox.keeping.commands import Outcome
from elsewhere.sandbox.keeping.spec import Spec
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.records import truth
from elsewhere.sandbox.records.journal import Journal
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.records.request import Request
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = [
    "Background",
    "ExecRequest",
    "ExecResult",
    "Outputs",
    "check_protocol",
    "execute",
    "journaled",
    "log_files",
    "refusals_recorded",
    "run_command",
    "start_background",
]


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """`terminal`: it must have one; otherwise it has one if the caller has."""

    sandbox: str
    argv: list[str]
    directory: str | None = None
    environment: list[tuple[str, str | None]] = field(default_factory=list)
    timeout: float | None = None
    kind: str = "exec"
    terminal: bool = False
    detached: bool = False
    capture: bool = False


@dataclass(frozen=True, slots=True)
class ExecResult:
    """`outcome` is None for a detached command, which goes on; `pid` is its number inside. `drift`: reality has moved on in a way
    that concerns this sandbox."""

    record: Record
    request: Request
    outcome: Outcome | None
    changes: Changes | None
    pid: int | None = None
    drift: Drift | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a detached command writes: files of the sandbox's directory, outside of what it can see."""

    stdout: str
    stderr: str


def execute(wanted: ExecRequest, signals: Signals | None = None, remark: Callable[[str], None] | None = None) -> ExecResult:
    with refusals_recorded(wanted.kind, wanted.argv):
        return _execute(wanted, signals, remark)


def _execute(wanted: ExecRequest, signals: Signals | None, remark: Callable[[str], None] | None) -> ExecResult:
    refuse_inside()
    if not wanted.argv or not wanted.argv[0]:
        raise UsageError("no_command", "there is no command to run", hint="elsewhere exec ID -- COMMAND [ARGUMENT …]")
    if wanted.terminal and not (os.isatty(0) and os.isatty(1)):
        raise UsageError("no_terminal", "-t needs a terminal, and this is none", hint="leave -t out")
    if wanted.terminal and wanted.capture:
        raise UsageError("no_json", "what is captured for a document has no terminal", hint="leave -t or --json out")
    state = State.open()
    box = enter(state, wanted.sandbox, remark, pause_of(signals))
    try:
        check_protocol(box)
        directory = working_directory(wanted.directory, box.record.project)
        resolved = resolve(state, box.record.project)
        if resolved.ignored and remark is not None:
            remark(resolved.remark())
        outputs = log_files(box) if wanted.detached else None
        with journaled(box, wanted.kind, wanted.argv, directory, wanted.timeout, outputs, detached=wanted.detached) as request:
            spec = box.spec(
                wanted.argv,
                directory,
                wanted.environment,
                resolved["env.pass"],
                timeout=box.timeout(wanted.timeout),
                detached=wanted.detached,
                request=request.id,
            )
            if outputs is not None:
                return ExecResult(box.record, request, None, None, _detached(box, spec, outputs))
            outcome = run_command(box, spec, signals, capture=wanted.capture)
        changes = box.changes() if wanted.capture else None
        return ExecResult(box.record, request, outcome, changes, drift=drifting.noticed(state, box.record))
    finally:
        box.close()


def run_command(box: Live, spec: Spec, signals: Signals | None, *, capture: bool) -> Outcome:
    if capture:
        return commands.captured(box.control, spec, 0, signals)
    if os.isatty(0) and os.isatty(1):
        return commands.on_terminal(box.control, spec, 0, 1, None if os.isatty(2) else 2, signals)
    rung = rungs.named(box.record.mechanism)
    return commands.attached(box.control, spec, (0, 1, 2), signals, relayed=not rung.whole_machine and not rung.copy)


def check_protocol(box: Live) -> None:
    """A keeper that was started by another version may not understand what we would ask of it."""
    if box.record.version == _this_version():
        return
    with box.line() as keeper:
        version, protocol = keeper.version()
    if protocol != str(line.PROTOCOL):
        raise Broken(
            "keeper_skew",
            f"the keeper of {box.id!r} is of version {version}, and this is {_this_version()}",
            hint=f"elsewhere stop {box.id}; elsewhere start {box.id}",
        )


def _this_version() -> str:
    from elsewhere import __version__

    return __version__


def working_directory(chosen: str | None, project: str) -> str:
    """Where the command starts, as a path of reality: asked for (relative to the project), else the caller's own place if it lies
    in the project, else the project's top. Whether it exists inside is for the sandbox to say."""
    if chosen is not None:
        return os.path.normpath(os.path.join(project, chosen))
    here = os.path.realpath(os.getcwd())
    return here if is_within(here, project) else project


@contextlib.contextmanager
def refusals_recorded(kind: str, argv: list[str]) -> Iterator[None]:
    """A request that is refused before it has a sandbox leaves its record, too; what was only mistyped was no request."""
    try:
        yield
    except UsageError:
        raise
    except ElsewhereError as error:
        if not getattr(error, "journaled", False):
            with contextlib.suppress(ElsewhereError, OSError):
                truth.record_refusal(State.open(), kind, argv)
        raise


class journaled(contextlib.AbstractContextManager[Request]):  # noqa: N801  (used like a function)
    """Writes down that a request starts; if it cannot even start, how it ended. How a command that started ended is written down
    by the keeper."""

    def __init__(
        self,
        box: Live,
        kind: str,
        argv: list[str],
        directory: str,
        timeout: float | None = None,
        outputs: Outputs | None = None,
        *,
        detached: bool = False,
    ) -> None:
        self._journal = Journal(box.directory)
        said: dict[str, str | None] | None = None if outputs is None else {"stdout": outputs.stdout, "stderr": outputs.stderr}
        self._start: Callable[[], Request] = lambda: self._journal.start(
            kind, argv, cwd=directory, detached=detached, timeout=timeout, outputs=said
        )
        self._request: Request | None = None

    def __enter__(self) -> Request:
        self._request = self._start()
        return self._request

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or self._request is None:
            return
        if isinstance(error, ElsewhereError):
            error.journaled = True
        with contextlib.suppress(ElsewhereError):
            # Whatever went wrong after it began, the keeper's word comes first and counts.
            reason = "refused" if isinstance(error, ElsewhereError) and not isinstance(error, Broken) else "lost"
            if isinstance(error, CallerGone | KeyboardInterrupt):
                reason = "cancelled"  # the keeper will say the same
            self._journal.end(self._request.id, reason, exit_code=getattr(error, "exit_code", None))


def log_files(box: Live) -> Outputs:
    place = os.path.join(box.directory, "logs")
    with contextlib.suppress(FileExistsError):
        os.mkdir(place, 0o700)
        os.chmod(place, 0o755)  # the keeper, who has no powers, counts what is said; nobody else gets as far as here
    stem = os.path.join(place, os.urandom(6).hex())
    return Outputs(f"{stem}.out", f"{stem}.err")


def _detached(box: Live, spec: Spec, outputs: Outputs) -> int:
    with contextlib.ExitStack() as stack:
        fds = open_outputs(outputs, stack)
        return commands.detached(box.control, spec, fds)


def open_outputs(outputs: Outputs, stack: contextlib.ExitStack, stdin: int | None = None) -> tuple[int, int, int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    opened = []
    for path in (outputs.stdout, outputs.stderr):
        opened.append(os.open(path, flags, 0o600))
        stack.callback(os.close, opened[-1])
    if stdin is None:
        stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, stdin)
    return stdin, opened[0], opened[1]


@dataclass(slots=True)
class Background:
    """A command that was started and not waited for."""

    request: Request
    running: commands.Running
    outputs: Outputs
    stdin: int


def start_background(box: Live, spec: Spec, request: Request, outputs: Outputs) -> Background:
    """On a channel that the caller holds: it ends with the caller, unless it is detached."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, reader)
            running = commands.started(box.control, spec, open_outputs(outputs, stack, reader))
    except BaseException:
        os.close(writer)
        raise
    return Background(request, running, outputs, writer)
