"""`run`: clone, run one command, say what changed; keep the sandbox if it changed anything."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from elsewhere.changes.compare import Changes
from elsewhere.errors import ElsewhereError, UsageError
from elsewhere.operations import interrupted
from elsewhere.operations.admission import Pause
from elsewhere.operations.bases import Teller
from elsewhere.operations.confining import Confined, confine
from elsewhere.operations.creating import Wish, raise_sandbox
from elsewhere.operations.executing import journaled, refusals_recorded, run_command
from elsewhere.operations.projects import find_project, refuse_inside
from elsewhere.sandbox import contents, environment
from elsewhere.sandbox.keeping.callers import CallerGone, Signals, pause_of
from elsewhere.sandbox.keeping.commands import Outcome
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["RunRequest", "RunResult", "rehearse", "run"]


@dataclass(frozen=True, slots=True)
class RunRequest:
    argv: list[str]
    project: str | None = None
    directory: str | None = None
    base: str = "live"
    base_ref: str | None = None
    keep: bool = False
    discard: bool = False
    timeout: float | None = None
    environment: list[tuple[str, str | None]] = field(default_factory=list)
    settings: Mapping[str, object] = field(default_factory=dict)
    capture: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    record: Record
    outcome: Outcome
    changes: Changes
    kept: bool
    create_s: float
    argv: list[str]


OnReady = Callable[[Live], None]
Remark = Callable[[str], None]


def run(
    request: RunRequest,
    signals: Signals | None = None,
    on_ready: OnReady | None = None,
    teller: Teller | None = None,
    remark: Remark | None = None,
) -> RunResult:
    """`on_ready` is called when the sandbox stands and before the command starts; `remark` with what somebody should know."""
    with refusals_recorded("run", request.argv):
        return _run(request, signals, on_ready, teller, remark)


def _run(
    request: RunRequest, signals: Signals | None, on_ready: OnReady | None, teller: Teller | None, remark: Remark | None
) -> RunResult:
    if not request.argv or not request.argv[0]:
        raise UsageError(
            "no_command",
            "there is no command to run",
            hint="elsewhere run -- COMMAND [ARGUMENT …], or elsewhere run -c 'SHELL LINE'",
        )
    refuse_inside()
    here = os.getcwd()
    project = find_project(request.project, here)
    directory = _directory(request.directory, here, project.path)
    state = State.open()
    interrupted.look(state)
    confined = confine(state, project.path, request.settings, lives=False)
    if confined.settings.ignored and remark is not None:
        remark(confined.settings.remark())
    began = time.monotonic()
    live = _create(state, project, request, confined, teller, remark, pause_of(signals))
    ended = False
    try:
        with journaled(live, "run", request.argv, directory, request.timeout) as asked:
            spec = live.spec(
                request.argv,
                directory,
                request.environment,
                confined.settings["env.pass"],
                timeout=live.timeout(None) if request.timeout is None else request.timeout,
                ends_sandbox=True,
                request=asked.id,
            )
            create_s = time.monotonic() - began
            if on_ready is not None:
                on_ready(live)
            outcome = run_command(live, spec, signals, capture=request.capture)
        ended = True
        changes = live.changes()
        kept = not request.discard and (request.keep or bool(changes))
        if kept:
            live.record.command = _told(request.argv, outcome, changes)
            live.settle()
        else:
            live.remove()
    except CallerGone:
        _keep_what_is_there(live, request)
        raise
    except BaseException:
        # Whatever went wrong, nothing runs on. Work that was done is not thrown away because it could not be read.
        with contextlib.suppress(Exception):
            if ended and not request.discard:
                live.record.lost = True
                live.settle()
            else:
                live.remove()
        raise
    return RunResult(live.record, outcome, changes, kept, create_s, request.argv)


def _told(argv: list[str], outcome: Outcome, changes: Changes) -> dict[str, Any]:
    """What the record of a sandbox that is kept says of the command that it was made for."""
    counts = {"added": len(changes.added), "modified": len(changes.modified), "deleted": len(changes.deleted)}
    return {
        "argv": argv,
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "duration_ms": round(outcome.duration * 1000, 3),
        "changes": counts,
    }


def _create(
    state: State,
    project: Project,
    request: RunRequest,
    confined: Confined,
    teller: Teller | None,
    remark: Remark | None,
    pause: Pause,
) -> Live:
    wish = Wish(base=request.base, base_ref=request.base_ref, story="run")
    abandoned = "discard" if request.discard else "keep"
    return raise_sandbox(
        state, project, wish, confined, teller=teller, remark=remark, pause=pause, lives=False, abandoned=abandoned
    )


def rehearse() -> None:
    """What a run does before and after its command, without effect: whoever waits for one to come finds everything at hand."""
    state = State.open()
    with contextlib.suppress(ElsewhereError, OSError):
        confine(state, find_project(state.room("mnt"), "/").path, {}, lives=False)
    environment.compose(os.environ, identity={})
    contents.rehearse(state)


def _keep_what_is_there(live: Live, request: RunRequest) -> None:
    """Nobody is there to be told, so what the command wrote stays, marked as lost."""
    if not request.discard and live.changes():
        live.record.lost = True
        live.settle()
    else:
        live.remove()


def _directory(chosen: str | None, here: str, project: str) -> str:
    """Where the command starts: asked for (and then inside the project), else the caller's own place, else the project's top."""
    inside = os.path.realpath(here)
    if chosen is None:
        return inside if inside == project or inside.startswith(project + "/") else project
    wanted = os.path.realpath(os.path.join(here, chosen))
    if wanted != project and not wanted.startswith(project + "/"):
        raise UsageError("cwd_outside", f"--cwd {chosen!r} is outside the project {project!r}", hint="name a directory inside it")
    if not os.path.isdir(wanted):
        raise UsageError("cwd_missing", f"--cwd {chosen!r} is not a directory", hint="name a directory inside the project")
    return wanted
