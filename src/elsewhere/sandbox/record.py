"""sandbox.json: a sandbox's own truth, written aside and renamed, read back by whoever asks.

The state that it names is what was last written; whether a keeper still lives is asked of the lock beside it, which a keeper
holds for as long as it does.

    running ─► stopped ─► (removed: no directory, no record)
                   └─ keeper gone, nobody wrote: read as stopped, `lost`
"""

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass, field, fields
from typing import Any

from elsewhere.clock import monotonic
from elsewhere.errors import Broken, InUse, NotFound, UsageError
from elsewhere.storage.state import State, write_aside

__all__ = ["Record", "find", "hold_lock", "is_alive", "is_held", "load", "load_all", "save", "wait_for_end"]

_FILE = "sandbox.json"


@dataclass(slots=True)
class Record:
    id: str
    state: str
    project: str
    base: dict[str, Any]
    created_at: float
    mechanism: str
    identity: dict[str, str]
    enforced: dict[str, Any]
    layers: list[dict[str, Any]]
    plan: list[list[str]]
    environment_left_out: list[str] = field(default_factory=list)
    command: dict[str, Any] | None = None
    ended_at: float | None = None
    lost: bool = False
    version: str = ""

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS = tuple(item.name for item in fields(Record))


def save(record: Record, directory: str) -> None:
    content = json.dumps(record.fields(), separators=(",", ":"))
    write_aside(os.path.join(directory, _FILE), content.encode())


def load(state: State, sandbox_id: str) -> Record:
    path = os.path.join(state.sandbox(sandbox_id), _FILE)
    try:
        with open(path, "rb") as stream:
            document = json.load(stream)
        record = Record(**{key: value for key, value in document.items() if key in _FIELDS})
    except FileNotFoundError:
        raise NotFound("sandbox_not_found", f"there is no sandbox {sandbox_id!r}", hint="elsewhere list shows them") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise Broken(
            "sandbox_record_broken", f"the record {path!r} cannot be read: {error}", hint=f"elsewhere rm {sandbox_id}"
        ) from error
    if record.state == "running" and not is_alive(state, sandbox_id):
        record.state, record.lost = "stopped", True
    return record


def load_all(state: State) -> tuple[list[Record], list[str]]:
    """Every sandbox, newest first, and the ids of those whose record cannot be read."""
    records, broken = [], []
    for sandbox_id in state.sandbox_ids():
        try:
            records.append(load(state, sandbox_id))
        except NotFound:
            if os.path.isdir(state.sandbox(sandbox_id)):
                broken.append(sandbox_id)
        except Broken:
            broken.append(sandbox_id)
    records.sort(key=lambda record: (record.created_at, record.id), reverse=True)
    return records, broken


def find(state: State, wanted: str) -> str:
    """An id, the beginning or the last part of one, or `@last`."""
    ids = state.sandbox_ids()
    if wanted in ids:
        return wanted
    if wanted == "@last":
        records, _ = load_all(state)
        if not records:
            raise NotFound("sandbox_not_found", "there is no sandbox yet", hint="elsewhere run -- COMMAND makes one")
        return records[0].id
    matches = [known for known in ids if wanted and (known.startswith(wanted) or known.endswith(f"-{wanted}"))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(matches[:4]) + (", …" if len(matches) > 4 else "")
        raise UsageError("sandbox_ambiguous", f"{wanted!r} fits {len(matches)} sandboxes: {shown}", hint="write more of the id")
    raise NotFound("sandbox_not_found", f"there is no sandbox {wanted!r}", hint="elsewhere list shows them")


def hold_lock(directory: str) -> int:
    """The lock that says a keeper lives here; the kernel itself would let one upper be mounted twice."""
    fd = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise InUse(
            "sandbox_in_use",
            f"the sandbox {os.path.basename(directory)!r} is running already",
            hint="end it first: elsewhere list shows it",
        ) from None
    return fd


def is_alive(state: State, sandbox_id: str) -> bool:
    return is_held(state.sandbox(sandbox_id))


def wait_for_end(state: State, sandbox_id: str, seconds: float = 5.0) -> None:
    """Until no keeper lives there; for when nobody is left who would say so."""
    deadline = monotonic() + seconds
    while is_alive(state, sandbox_id) and monotonic() < deadline:
        time.sleep(0.005)


def is_held(directory: str) -> bool:
    """Whether a keeper lives in this directory."""
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(directory, "lock"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False
