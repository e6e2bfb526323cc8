"""journal: what was asked of one sandbox and how each request ended, in the sandbox's own directory.

    sandboxes/<sandbox-id>/journal      append-only; one event for each line; each line is one write

    line                                                                written by
    {"start": {"id", "sandbox", "kind", "state", "argv", "cwd", "at",
               "detached", "timeout", "outputs", "caller"}}             the caller, before anything happens
    began ID PID [AT]                                                   the keeper, when the process exists
    {"cancel": {"id", "at"}}                                            whoever asks for its end; being killed then is `cancelled`
    denied ID KIND:WHAT:COUNT …                                         the keeper, before the end
    end ID CODE SIGNAL REASON USER_S SYSTEM_S MAX_RSS_KIB
        CPU_S MEMORY_PEAK PROCESSES_PEAK WRITTEN AT                     the keeper; `-` is what it does not know
    {"end": {"id", "state", "reason", "exit_code", "signal", "at"}}     the host: refused before it began, or found to be lost

The first end of a request counts, and no end without a start. The keeper lives with the sandbox and is not trusted: a line that
is torn, too long, of another sandbox or not understood is passed over and counted. Not here: whether a request without an end is
still alive (see `registry.py`), and what the command wrote.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from elsewhere.clock import Clock, wall
from elsewhere.errors import NotFound, StateError
from elsewhere.sandbox.records.request import (
    KINDS,
    REASONS,
    UNFINISHED,
    Caller,
    Request,
    is_request_id,
    new_request_id,
    parse_denied,
    state_of,
)
from elsewhere.values import dataclass

__all__ = ["Caller", "Journal", "Request", "Requests", "new_request_id"]

_USED = ("cpu_s", "memory_peak_bytes", "processes_peak", "written_bytes")
_LONGEST = 1 << 20
_AT_ONCE = 64 << 20  # of one journal in one reading: what fills it may be hostile
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Requests:
    """What a reading found: each request that is new or has changed, where to go on, and how many lines made no sense."""

    changed: list[Request]
    offset: int
    ignored: int = 0


class Journal:
    def __init__(self, directory: str, *, sandbox: str | None = None, clock: Clock = wall) -> None:
        """`sandbox` is the id, where the directory is not named by it."""
        self.path = os.path.join(directory, "journal")
        self._sandbox = sandbox or os.path.basename(directory)
        self._clock = clock

    def open(self) -> int:
        """A descriptor that can only append, made for a keeper."""
        return self._open(os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def start(
        self,
        kind: str,
        argv: Sequence[str],
        *,
        cwd: str = "",
        request_id: str | None = None,
        state: str = "pending",
        detached: bool = False,
        timeout: float | None = None,
        outputs: dict[str, str | None] | None = None,
    ) -> Request:
        request = Request(
            id=request_id or new_request_id(),
            sandbox=self._sandbox,
            kind=kind,
            argv=tuple(argv),
            state=state,
            created_at=self._clock(),
            cwd=cwd,
            outputs=outputs or {},
            detached=detached,
            timeout=timeout,
            caller=Caller.this(),
        )
        assert is_request_id(request.id), request.id
        assert kind in KINDS, kind
        assert state in UNFINISHED, state
        content = _encode(_start_line(request))
        if len(content) > _LONGEST:
            shown = [word if len(word) <= 500 else word[:500] + "…" for word in argv[:100]]
            content = _encode(_start_line(replace(request, argv=tuple(shown), outputs={})))
        self._append(content)
        return request

    def cancel(self, request_id: str) -> None:
        """Said before anybody is killed for it, so that the end that follows is read as what it is."""
        self._append(_encode({"cancel": {"id": request_id, "at": self._clock()}}))

    def end(self, request_id: str, reason: str, *, exit_code: int | None = None, signal: int | None = None) -> None:
        assert reason in REASONS, reason
        state = state_of(reason, exit_code)
        said = {"id": request_id, "state": state, "reason": reason, "exit_code": exit_code, "signal": signal, "at": self._clock()}
        self._append(_encode({"end": said}))

    def read(self, offset: int = 0, known: Iterable[Request] = ()) -> Requests:
        """The requests that are new or have changed since `offset`; `known` are the unfinished ones that were read before it."""
        requests = {request.id: request for request in known}
        changed: set[str] = set()
        ignored = 0
        try:
            fd = self._open(os.O_RDONLY)
        except NotFound:
            return Requests([], 0)
        try:
            if os.fstat(fd).st_size < offset:
                offset = 0  # not the journal that was read before
            for position, line in _lines(fd, offset):
                offset = position
                if line.isspace() or not line:
                    continue
                request = _apply(line, requests, self._sandbox) if len(line) <= _LONGEST else None
                if request is None:
                    ignored += 1
                elif requests.get(request.id) is not request:
                    requests[request.id] = request
                    changed.add(request.id)
        finally:
            os.close(fd)
        return Requests([request for request in requests.values() if request.id in changed], offset, ignored)

    def _append(self, content: bytes) -> None:
        fd = self._open(os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                content = b"\n" + content  # a torn line must not take this one with it
            if os.write(fd, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(error) from error
        finally:
            os.close(fd)

    def _open(self, flags: int) -> int:
        try:
            fd = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "not a regular file")
        except OSError as error:
            raise self._failed(error) from error
        return fd

    def _failed(self, error: OSError) -> NotFound | StateError:
        if error.errno == errno.ENOENT:
            return NotFound("sandbox_not_found", f"there is no sandbox {self._sandbox!r}", hint="elsewhere list shows them")
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StateError(
                "no_room",
                f"there is no room for the journal {self.path!r}: {error.strerror}",
                hint="free some space; elsewhere rm throws sandboxes away",
            )
        return StateError(
            "state_unusable", f"the journal {self.path!r} cannot be used: {error.strerror}", hint="look at its owner and mode"
        )


def _lines(fd: int, offset: int) -> Iterator[tuple[int, bytes]]:
    """Each whole line with the place where the next begins. One that is too long comes in pieces, and never as a short one."""
    last = offset + _AT_ONCE
    rest = b""
    skipping = False
    while offset + len(rest) < last:
        chunk = os.pread(fd, _CHUNK, offset + len(rest))
        if not chunk:
            return
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            offset += len(line) + 1
            if not skipping:
                yield offset, line
            skipping = False
        if len(rest) > _LONGEST or (skipping and rest):
            offset += len(rest)
            if not skipping:
                yield offset, rest
            rest, skipping = b"", True


def _apply(line: bytes, requests: dict[str, Request], sandbox: str) -> Request | None:
    """What a request becomes by this line: the same object if nothing new was said, None if the line is nonsense."""
    if not line.startswith(b"{"):
        return _apply_words(line, requests)
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    said = document.get("start")
    if isinstance(said, dict):
        request = _start_of(said, sandbox)
        return request and requests.get(request.id, request)
    for event in ("end", "cancel"):
        said = document.get(event)
        known = _known(said.get("id"), requests) if isinstance(said, dict) else None
        if not isinstance(said, dict) or known is None:
            continue
        at, reason = _number(said.get("at")), said.get("reason")
        if event == "cancel":
            return known if known.is_over or known.reason else replace(known, reason="cancelled")
        if at is None or reason not in REASONS:
            return None
        return known.ended(reason, at, exit_code=_whole(said.get("exit_code"), 255), signal=_whole(said.get("signal"), 64))
    return None


def _known(identifier: object, requests: dict[str, Request]) -> Request | None:
    return requests.get(identifier) if isinstance(identifier, str) else None


def _apply_words(line: bytes, requests: dict[str, Request]) -> Request | None:
    words = line.decode("ascii", "replace").split(" ")
    known = requests.get(words[1]) if len(words) > 1 else None
    if known is None:
        return None
    if words[0] == "began" and len(words) in (3, 4):
        pid, at = _whole(_parsed(words[2]), 1 << 31), _number(_parsed(words[3])) if len(words) == 4 else known.created_at
        if not pid or at is None:
            return None
        return known if known.is_over or known.pid else replace(known, state="running", pid=pid, started_at=at)
    if words[0] == "denied":
        return known if known.is_over or known.denied else replace(known, denied=parse_denied(words[2:]))
    if words[0] == "end" and len(words) in (9, 13) and words[4] in REASONS:  # keepers of earlier versions counted less
        code, number = _whole(_parsed(words[2]), 255), _whole(_parsed(words[3]), 64)
        user, system, rss, *more, at = (_number(_parsed(word)) for word in words[5:])
        if code is None or number is None or user is None or system is None or rss is None or at is None:
            return None
        usage = {"user_s": user, "system_s": system, "max_rss_kib": rss}
        usage |= {name: value for name, value in zip(_USED, more, strict=False) if value is not None}
        return known.ended(words[4], at, exit_code=code, signal=number or None, usage=usage)
    return None


def _start_line(request: Request) -> dict[str, dict[str, object]]:
    return {
        "start": {
            "id": request.id,
            "sandbox": request.sandbox,
            "kind": request.kind,
            "state": request.state,
            "argv": list(request.argv),
            "cwd": request.cwd,
            "at": request.created_at,
            "detached": request.detached,
            "timeout": request.timeout,
            "outputs": request.outputs,
            "caller": request.caller and request.caller._asdict(),
        }
    }


def _start_of(said: dict[str, Any], sandbox: str) -> Request | None:
    identifier, argv, at, outputs = said.get("id"), said.get("argv"), _number(said.get("at")), said.get("outputs")
    if not is_request_id(identifier) or said.get("sandbox") != sandbox or said.get("kind") not in KINDS or at is None:
        return None
    if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
        return None
    state, cwd = said.get("state", "pending"), said.get("cwd")
    named = outputs.items() if isinstance(outputs, dict) else ()
    return Request(
        id=identifier,
        sandbox=sandbox,
        kind=said["kind"],
        argv=tuple(argv),
        state=state if state in ("pending", "creating") else "pending",
        created_at=at,
        cwd=cwd if isinstance(cwd, str) else "",
        outputs={name: place for name, place in named if place is None or isinstance(place, str)},
        detached=said.get("detached") is True,
        timeout=_number(said.get("timeout")),
        caller=_caller_of(said.get("caller")),
    )


def _caller_of(said: object) -> Caller | None:
    if not isinstance(said, dict):
        return None
    pid, started, boot = _whole(said.get("pid"), 1 << 31), _whole(said.get("started"), 1 << 62), said.get("boot")
    return Caller(pid, started, boot) if pid and started is not None and isinstance(boot, str) else None


def _encode(document: dict[str, dict[str, Any]]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _parsed(word: str) -> float | int | None:
    """A plain decimal number: Python's own idea of one is much wider."""
    if not word.isascii() or len(word) > 40 or not word.replace(".", "", 1).isdigit():
        return None
    return float(word) if "." in word else int(word)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15 or not math.isfinite(value):
        return None
    return float(value)


def _whole(value: object, most: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None
