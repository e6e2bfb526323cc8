"""What runs in a sandbox and what it said: ps, kill, logs, requests, cancel."""

import os
import signal
import time
from collections.abc import Iterable, Iterator

from elsewhere.errors import Broken, NotFound, UsageError
from elsewhere.sandbox.keeping import line
from elsewhere.sandbox.keeping.line import Line, Process
from elsewhere.sandbox.records import record, truth
from elsewhere.sandbox.records.journal import Journal
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.records.request import UNFINISHED, Request, is_request_id
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Piece", "cancel", "kill", "logs", "processes", "requests", "signal_number"]

_CHUNK = 1 << 16
_LOOK_S = 0.1
_MARK = "r-"  # what the id of a request begins with


def processes(wanted: str) -> tuple[Record, list[Process]]:
    state, found = _find(wanted)
    reached = line.connect(state.sandbox(found.id))
    if reached is None:
        return found, []
    with reached:
        return found, reached.processes()


def kill(wanted: str, pid: int, number: int) -> Record:
    state, found = _find(wanted)
    with _reach(state, found) as keeper:
        keeper.kill(pid, number)
    return found


def signal_number(text: str) -> int:
    """`9`, `KILL` or `SIGKILL`."""
    name = text.upper().removeprefix("SIG")
    if text.isdigit() and int(text) in {int(one) for one in signal.Signals}:
        return int(text)
    try:
        return int(signal.Signals[f"SIG{name}"])
    except KeyError:
        raise UsageError("bad_signal", f"{text!r} is no signal", hint="write a name or a number: TERM, KILL, 15") from None


def _find(wanted: str) -> tuple[State, Record]:
    state = State.open()
    return state, record.load(state, record.find(state, wanted))


def _reach(state: State, found: Record) -> Line:
    reached = line.connect(state.sandbox(found.id))
    if reached is None:
        raise NotFound("sandbox_not_running", f"nothing runs in the sandbox {found.id!r}", hint=f"elsewhere start {found.id}")
    return reached


# -- requests -------------------------------------------------------------------------------------------------------------------


def requests(wanted: str | None = None, *, states: list[str] | None = None, limit: int | None = None) -> list[Request]:
    """Newest first; also of sandboxes that are gone."""
    state = State.open()
    sandbox = None
    if wanted is not None:
        try:
            sandbox = record.find(state, wanted)
        except NotFound:
            sandbox = wanted
    found = truth.requests(state, sandbox=sandbox, states=states, limit=limit)
    if wanted is not None and not found and sandbox == wanted and not os.path.isdir(state.sandbox(wanted)):
        raise NotFound("sandbox_not_found", f"there is no sandbox {wanted!r}", hint="elsewhere requests shows all of them")
    return found


def cancel(wanted: str) -> list[Request]:
    """A request by its id or the beginning of it, or everything that is unfinished in a sandbox; they read as cancelled
    afterwards."""
    state = State.open()
    known = truth.requests(state)
    try:
        sandbox_id = None if is_request_id(wanted) else record.find(state, wanted)
    except NotFound:
        if not wanted.startswith(_MARK):
            raise
        sandbox_id = None
    if sandbox_id is None:
        chosen = [_meant(known, wanted, f"there is no request {wanted!r}", "elsewhere requests shows them")]
    else:
        chosen = [request for request in known if request.sandbox == sandbox_id and request.state in UNFINISHED]
    for request in chosen:
        if not request.is_over:
            _cancel(state, request)
    ended = {request.id for request in chosen}
    return [request for request in truth.requests(state) if request.id in ended]


def _meant(known: Iterable[Request], wanted: str, missing: str, hint: str) -> Request:
    """By its id, or the beginning of it."""
    found = {one.id: one for one in known if len(wanted) > len(_MARK) and one.id.startswith(wanted)}
    if len(found) > 1 and wanted not in found:
        raise UsageError(
            "ambiguous_request",
            f"{wanted!r} is the beginning of {len(found)} requests: {', '.join([*found][:4])}{', …' if len(found) > 4 else ''}",
            hint="write more of the id",
        )
    if not found:
        raise NotFound("request_not_found", missing, hint=hint)
    return found.get(wanted) or next(iter(found.values()))


def _cancel(state: State, request: Request) -> None:
    directory = state.sandbox(request.sandbox)
    journal = Journal(directory)
    journal.cancel(request.id)
    reached = line.connect(directory)
    if reached is None:
        return
    with reached:
        try:
            reached.cancel(request.id)
        except NotFound:
            return  # over already
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline and not any(one.id == request.id and one.is_over for one in journal.read().changed):
        time.sleep(0.01)


# -- logs -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that a command said."""

    stream: str
    data: bytes


def logs(
    wanted: str, *, request: str | None = None, streams: tuple[str, ...] = ("stdout", "stderr"), follow: bool
) -> Iterator[Piece]:
    """What a detached command wrote, from the beginning; the newest one's, unless a request is named. With `follow`, until it
    ends."""
    state, found = _find(wanted)
    directory = state.sandbox(found.id)
    chosen = _with_logs(Journal(directory), found.id, request)
    files = {
        name: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW) for name, path in _outputs(directory, chosen, streams)
    }
    try:
        while True:
            over = not follow or _is_over(directory, chosen.id)
            said = False
            for name, fd in files.items():
                while data := os.read(fd, _CHUNK):
                    said = True
                    yield Piece(name, data)
            if over:
                return
            if not said:
                time.sleep(_LOOK_S)
    finally:
        for fd in files.values():
            os.close(fd)


def denied(wanted: str, request: str | None = None) -> tuple[Record, list[Request]]:
    """The command whose logs `logs` shows, with what it was refused."""
    state, found = _find(wanted)
    return found, [_with_logs(Journal(state.sandbox(found.id)), found.id, request)]


def _outputs(directory: str, request: Request, streams: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in streams:
        path = request.outputs.get(name)
        # The journal is not to be believed: only files of this sandbox's own logs are opened.
        if path and os.path.dirname(path) == os.path.join(directory, "logs") and os.path.isfile(path):
            yield name, path


def _with_logs(journal: Journal, sandbox_id: str, request: str | None) -> Request:
    every = journal.read().changed
    known = [one for one in every if one.outputs.get("stdout")]
    if request is not None:
        is_there = any(one.id.startswith(request) for one in every)
        missing = f"the sandbox {sandbox_id!r} has no {'logs of the request' if is_there else 'request'} {request!r}"
        return _meant(known, request, missing, f"elsewhere requests {sandbox_id}")
    if known:
        return known[-1]
    raise NotFound(
        "no_logs", f"no command of {sandbox_id!r} was started with -d", hint="the output of others went to whoever started them"
    )


def _is_over(directory: str, request: str) -> bool:
    if any(one.id == request and one.is_over for one in Journal(directory).read().changed):
        return True
    reached = line.connect(directory)
    if reached is None:
        return True
    with reached:
        try:
            return not any(one.request == request for one in reached.processes())
        except Broken:
            return True
