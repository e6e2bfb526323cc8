"""sandbox.json: a sandbox's own truth, written aside and renamed, read back by whoever asks.

The state that it names is what was last written; whether a keeper still lives is asked of the lock beside it, which a keeper
holds for as long as it does.

    running ◄─► stopped ─► (removed: no directory, no record; or in the archive)
                   └─ keeper gone, nobody wrote: read as stopped, `lost`

What a sandbox wrote since its last snapshot is in its directory; `tip` is the frozen layer that this lies on
(`storage/layers.py`), `at` the snapshot that it goes on from. `snapshots` are `{"name", "parent", "layer", "created_at",
"copied"}`, oldest first, with `base` in those that lie on another base than the sandbox does now; `origin` is what a fork was
made of, `rebasing` a base that it is about to be moved to (`sandbox/rebasing.py`).

Whoever changes a record, starts, stops or removes a sandbox holds the lock on its directory meanwhile (`exclusive`).
"""

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any

from elsewhere.clock import monotonic, wall
from elsewhere.errors import Broken, InUse, NotFound, UsageError
from elsewhere.sandbox import rungs
from elsewhere.sandbox.records.request import Caller
from elsewhere.storage.state import State, write_aside, write_new
from elsewhere.values import dataclass

__all__ = [
    "Record",
    "bases_of",
    "exclusive",
    "find",
    "hold_lock",
    "is_alive",
    "is_held",
    "is_locked",
    "is_over",
    "layers_of",
    "layers_running",
    "load",
    "load_all",
    "locked",
    "save",
    "save_new",
    "snapshots_of",
    "wait_for_end",
]

_FILE = "sandbox.json"
_ASKING_S = 0.25  # whoever only asks whether it is held has it for a moment


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
    home: str = ""
    git: str | None = None
    name: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    expires_at: float | None = None
    limits: dict[str, float] = field(default_factory=dict)
    binding: list[str] = field(default_factory=list)
    confinement: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    group: list[Any] | None = None
    disk: str = ""
    kept: bool = False
    tip: str | None = None
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    at: str | None = None
    rebasing: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    keeper: list[Any] | None = None
    environment_left_out: list[str] = field(default_factory=list)
    command: dict[str, Any] | None = None
    ended_at: float | None = None
    lost: bool = False
    version: str = ""

    @property
    def layers_apart(self) -> bool:
        """Whether its layers lie in memory or in an image, and not as directories beside the record."""
        return bool(self.disk) or bool(rungs.named(self.mechanism).memory)

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS = tuple(item.name for item in fields(Record))


def save(record: Record, directory: str) -> None:
    write_aside(os.path.join(directory, _FILE), _content(record))


def save_new(record: Record, directory: str) -> None:
    """Into a directory that nobody else knows yet."""
    write_new(os.path.join(directory, _FILE), _content(record))


def _content(record: Record) -> bytes:
    return json.dumps(record.fields(), separators=(",", ":"), check_circular=False).encode()


def load(state: State, sandbox_id: str) -> Record:
    path = os.path.join(state.sandbox(sandbox_id), _FILE)
    try:
        with open(path, "rb") as stream:
            document = json.load(stream)
        record = Record(**{key: value for key, value in document.items() if key in _FIELDS})
        _check(record, sandbox_id)
    except FileNotFoundError:
        raise _not_found(sandbox_id) from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise Broken(
            "sandbox_record_broken", f"the record {path!r} cannot be read: {error}", hint=f"elsewhere rm --force {sandbox_id}"
        ) from error
    if record.state == "removed":
        record.state = "stopped"  # whoever removed it was stopped half-way
    if record.state == "running" and not _runs(state, record):
        record.state, record.lost = "stopped", True
        due = _due(state, record)
        if due is not None and due <= wall():
            record.lost, record.ended_at, record.keeper = False, due, None  # it ended as it was told to
    return record


def layers_of(directory: str) -> list[str]:
    """The frozen layers that the sandbox in a directory, wherever it lies, is made of."""
    document = _needs(directory)
    named = [document["tip"], *(one.get("layer") for one in document["snapshots"])]
    return [str(layer) for layer in named if layer is not None]


def layers_running(directory: str) -> str | None:
    """The frozen layer that it runs on, if it runs."""
    document = _needs(directory)
    return str(document["tip"]) if document["running"] and document["tip"] is not None else None


def snapshots_of(directory: str) -> list[tuple[str, str]]:
    """Their names and layers."""
    return [(str(one.get("name")), str(one["layer"])) for one in _needs(directory)["snapshots"] if one.get("layer")]


def bases_of(directory: str) -> list[str]:
    """The layers of bases that a sandbox is made of, and that its snapshots are."""
    document = _needs(directory)
    known = [document["base"], document["rebasing"], *(one["base"] for one in document["snapshots"] if "base" in one)]
    return [str(layer) for base in known for layer in base.get("layers", ())]


def _needs(directory: str) -> dict[str, Any]:
    """What a sandbox, wherever its directory lies, does not have in there."""
    path = os.path.join(directory, _FILE)
    try:
        with open(path, "rb") as stream:
            document = json.load(stream)
        found = {
            "tip": document.get("tip"),
            "snapshots": document.get("snapshots", []),
            "base": document.get("base", {}),
            "rebasing": document.get("rebasing") or {},
            "running": document.get("state") == "running",
        }
        if not all(isinstance(one, dict) for one in (found["base"], found["rebasing"], *found["snapshots"])):
            raise ValueError("it says nonsense about snapshots or its base")
    except FileNotFoundError:
        return {"tip": None, "snapshots": [], "base": {}, "running": False, "rebasing": {}}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Broken("sandbox_record_broken", f"the record {path!r} cannot be read: {error}") from error
    return found


def _due(state: State, record: Record) -> float | None:
    """When it ends by itself. What was last done in it is what was last written in its journal."""
    known = [record.expires_at] if record.expires_at is not None else []
    idle = record.limits.get("idle")
    if idle is not None:
        last = record.created_at
        with contextlib.suppress(OSError):
            last = max(last, os.stat(os.path.join(state.sandbox(record.id), "journal")).st_mtime)
        known.append(last + idle)
    return min(known, default=None)


def is_over(state: State, record: Record) -> bool:
    """Whether the time of a sandbox that does not run is over."""
    due = _due(state, record)
    return due is not None and due <= wall()


def _check(record: Record, sandbox_id: str) -> None:
    """What others rely on; a file that says otherwise was written by nobody of ours."""
    if record.id != sandbox_id:
        raise ValueError(f"it is of {record.id!r}")
    rungs.named(record.mechanism)
    expected: tuple[tuple[object, type | tuple[type, ...]], ...] = (
        (record.created_at, (int, float)),
        (record.project, str),
        (record.layers, list),
        (record.snapshots, list),
        *((value, dict) for value in (record.base, record.enforced, record.identity, record.labels)),
        *((value, dict) for value in (record.limits, record.confinement, record.network)),
    )
    for value, kind in expected:
        if not isinstance(value, kind):
            raise ValueError(f"it says {value!r} where {kind} belongs")
    if record.keeper is not None and (not isinstance(record.keeper, list) or len(record.keeper) != 3):
        raise ValueError(f"keeper is {record.keeper!r}")


def _runs(state: State, record: Record) -> bool:
    """A keeper that ends gives up its lock before the last of its processes is gone; so the process is looked for, too."""
    return is_alive(state, record.id) or (record.keeper is not None and Caller(*record.keeper).is_alive())


@contextlib.contextmanager
def exclusive(state: State, sandbox_id: str, seconds: float = 30.0) -> Iterator[Record]:
    """The sandbox's record, while nobody else changes the sandbox."""
    with locked(state, sandbox_id, seconds):
        yield load(state, sandbox_id)


@contextlib.contextmanager
def locked(state: State, sandbox_id: str, seconds: float = 30.0) -> Iterator[int]:
    """The descriptor that holds the lock; whoever else has it holds the lock as well. The lock is on the directory itself: one
    that was removed meanwhile is another directory, or none."""
    directory = state.sandbox(sandbox_id)
    deadline = monotonic() + seconds
    while True:
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _not_found(sandbox_id) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, directory):
                break
        except BlockingIOError:
            if monotonic() >= deadline:
                os.close(fd)
                raise InUse(
                    "sandbox_busy",
                    f"the sandbox {sandbox_id!r} has been busy with something else for {seconds:.0f} s",
                    hint="try again in a moment",
                ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(0.002)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_at(fd: int, directory: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(directory))
    except FileNotFoundError:
        return False


def _not_found(sandbox_id: str) -> NotFound:
    return NotFound("sandbox_not_found", f"there is no sandbox {sandbox_id!r}", hint="elsewhere list shows them")


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
    """An id, a name, the beginning or the last part of an id, or `@last`."""
    with contextlib.suppress(OSError):
        if wanted.startswith("ew-") and "/" not in wanted and stat.S_ISDIR(os.lstat(state.sandbox(wanted)).st_mode):
            return wanted  # as most programs ask: nothing else has to be looked at
    ids = state.sandbox_ids()
    if wanted in ids:
        return wanted
    records, _ = load_all(state)
    if wanted == "@last":
        if not records:
            raise NotFound("sandbox_not_found", "there is no sandbox yet", hint="elsewhere run -- COMMAND makes one")
        return records[0].id
    for record in records:
        if record.name == wanted and wanted:
            return record.id
    matches = [known for known in ids if wanted and (known.startswith(wanted) or known.endswith(f"-{wanted}"))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(matches[:4]) + (", …" if len(matches) > 4 else "")
        raise UsageError("sandbox_ambiguous", f"{wanted!r} fits {len(matches)} sandboxes: {shown}", hint="write more of the id")
    raise _not_found(wanted)


def hold_lock(directory: str) -> int:
    """The lock that says a keeper lives here; the kernel itself would let one upper be mounted twice."""
    fd = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = monotonic() + _ASKING_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if monotonic() >= deadline:
                break
        time.sleep(0.001)
    os.close(fd)
    raise InUse(
        "sandbox_in_use",
        f"the sandbox {os.path.basename(directory)!r} is running already",
        hint="end it first: elsewhere list shows it",
    )


def is_alive(state: State, sandbox_id: str) -> bool:
    return is_held(state.sandbox(sandbox_id))


def is_locked(state: State, sandbox_id: str) -> bool:
    """Whether somebody changes, starts, stops or removes it right now."""
    return _is_taken(state.sandbox(sandbox_id), os.O_DIRECTORY)


def wait_for_end(state: State, sandbox_id: str, seconds: float = 5.0) -> None:
    """Until no keeper lives there; for when nobody is left who would say so."""
    deadline = monotonic() + seconds
    while is_alive(state, sandbox_id) and monotonic() < deadline:
        time.sleep(0.005)


def is_held(directory: str) -> bool:
    """Whether a keeper lives in this directory."""
    return _is_taken(os.path.join(directory, "lock"))


def _is_taken(path: str, flags: int = 0) -> bool:
    """Whether somebody has the lock on a file or directory."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False
