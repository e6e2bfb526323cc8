"""Pinned bases: a project at one moment, immutable, captured again and again at the price of what changed.

    bases/<slug>-<8 hex>/     one for each project; the hex is of its absolute path
        lock                  flock: exclusive while capturing or pruning, shared while somebody is about to use a layer
        base.json             {"format", "project", "shift", "layers": [newest first], "scan", ...}: what counts
        scan.<n>              what the layers look like (see `scanning.py`); base.json names the one that belongs to them
        layers/<n>/           immutable once base.json named it; the last in base.json is a full copy, those before it are
                              deltas in overlay's form: what is new or changed as it is, what is deleted as a whiteout
        building/             half-made things; moved to the trash at the next capture
        commits/<sha>/        a commit's tree (see `checkouts.py`)

A capture makes its layer in building/, renames it into layers/, writes the scan under a new name, and then base.json, aside and
renamed: that is the moment from which it counts. Whatever a crash leaves before it has a name that nobody knows. A base.json
whose scan or layers are missing or damaged is no base: the next capture is a full copy.

Not here: how reality is looked at and copied (`scanning.py`, `capturing.py`), which sandbox uses which layer, and mounting.
"""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator

from elsewhere import clock as clocks
from elsewhere.clock import Clock
from elsewhere.errors import UsageError
from elsewhere.storage import scanning
from elsewhere.storage.capturing import Capture, Tell
from elsewhere.storage.copying import Attributes, clone
from elsewhere.storage.merging import merge_deltas
from elsewhere.storage.rooms import Room, room_for, room_needed
from elsewhere.storage.scanning import Scan
from elsewhere.storage.state import State, write_aside
from elsewhere.values import dataclass

__all__ = ["Base", "Estimate", "capture", "capturing", "estimate", "prune", "unused_layers"]

_FORMAT = 1
_MOST_DELTAS = 8
_MOST_LAYERS = 40  # if deltas cannot be merged; far below what overlay can take
_SMALL_COPY = 1 << 30
_FRESH_NS = 2_000_000_000  # how old a scan may be that a caller hands in
_REWRITE = 1000  # so many changed files, if they are most of the project, are worth a new full copy


@dataclass(frozen=True, slots=True)
class Base:
    """A captured base. `layers` are absolute paths, newest first, ready to be the lowers of an overlay. Paths in the other lists
    are relative to the project: `unsettled` would not hold still (what is in the layer may be torn, and is captured anew next
    time), `left_out` are not in it, with the reason, `shut` are directories that are in it without what they hold: nested mounts
    and those that stay live. `scan` is the file that says what the layers look like; the next capture replaces it."""

    project: str
    layers: tuple[str, ...]
    scan: str
    captured_at: float
    files: int
    bytes: int
    copied_files: int
    copied_bytes: int
    seconds: float
    strategy: str
    unsettled: tuple[str, ...]
    left_out: dict[str, str]
    shut: tuple[str, ...]
    mounts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a first copy would take, and the scan that says so: hand it to `capture`, with the same
    `live`, and the project is not looked at twice."""

    files: int
    bytes: int
    exists: bool
    shares_blocks: bool
    scan: Scan
    serial: int
    at_ns: int

    @property
    def cheap(self) -> bool:
        return self.exists or self.shares_blocks or self.bytes <= _SMALL_COPY


@dataclass(frozen=True, slots=True)
class _Record:
    """base.json."""

    layers: tuple[str, ...] = ()
    serial: int = 0
    shift: int = 0
    strategy: str = "copy"


def estimate(state: State, project: str, *, shift: int = 0, live: Collection[str] = (), clock: Clock = clocks.wall) -> Estimate:
    """How much a first copy would be, whether there is a base already, and whether blocks can be shared: by one scan."""
    room = room_for(state, project)
    record, known = _load(room, shift)
    found = _scan(state, project, live, known, clock)
    shares = known is None and _shares_blocks(state, project, found)
    return Estimate(found.files, found.bytes, known is not None, shares, found, record.serial, int(clock() * 1e9))


def capture(
    state: State,
    project: str,
    *,
    shift: int = 0,
    live: Collection[str] = (),
    estimated: Estimate | None = None,
    tell: Tell | None = None,
    clock: Clock = clocks.wall,
) -> Base:
    """Bring the base of `project` (an absolute path without links) up to now. `shift` is added to every owner. For the layers to
    be still there when they are mounted, use `capturing`."""
    room = room_for(state, project)
    with room.locked(fcntl.LOCK_EX):
        return _capture(state, room, project, shift, live, estimated, tell, clock)


@contextlib.contextmanager
def capturing(
    state: State,
    project: str,
    *,
    shift: int = 0,
    live: Collection[str] = (),
    estimated: Estimate | None = None,
    tell: Tell | None = None,
    clock: Clock = clocks.wall,
) -> Iterator[Base]:
    """`capture`, and then a hold on what was captured until the caller has noted what it uses. The kernel lets go of an exclusive
    lock before it takes the shared one, so another capture or a prune may come between. Only both together can take a layer
    of ours (it must first be merged away, then pruned); so we look, and capture once more if that happened."""
    room = room_for(state, project)
    with room.locked(fcntl.LOCK_EX) as lock:
        while True:
            base = _capture(state, room, project, shift, live, estimated, tell, clock)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if all(os.path.isdir(layer) for layer in base.layers):
                break
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield base


def unused_layers(room: Room, used: Collection[str]) -> list[str]:
    """Layers that neither the base nor anybody in `used` (absolute paths) needs."""
    named = {room.layer(number) for number in _read(room).layers}
    with contextlib.suppress(FileNotFoundError):
        there = (room.layer(number) for number in os.listdir(room.inside("layers")))
        return sorted(layer for layer in there if layer not in named and layer not in used)
    return []


def prune(room: Room, used: Callable[[], Collection[str]]) -> list[str]:
    """Move unused layers to the trash. What is used is asked while nobody can begin to use anything."""
    if not os.path.isdir(room.path):
        return []
    with room.locked(fcntl.LOCK_EX):
        gone = unused_layers(room, used())
        for layer in gone:
            room.discard(layer)
        return gone


def _scan(state: State, project: str, live: Collection[str], known: Scan | None, clock: Clock) -> Scan:
    ours = {state.path[len(project) + 1 :]} if state.path.startswith(f"{project}/") else set()
    open_ = {os.path.normpath(path) for path in live if path}
    for path in open_:
        if path.startswith(("/", "../")) or path in (".", ".."):
            raise UsageError(
                "bad_live_path",
                f"{path!r} cannot be kept live",
                hint="name directories inside the project, relative to it, such as data/",
            )
    return scanning.scan(project, live=open_, leave_out=ours, known=known, clock=clock)


def _capture(
    state: State,
    room: Room,
    project: str,
    shift: int,
    live: Collection[str],
    estimated: Estimate | None,
    tell: Tell | None,
    clock: Clock,
) -> Base:
    began = clocks.monotonic()
    record, known = _load(room, shift)
    _sweep(room, record)
    if estimated and estimated.serial == record.serial and 0 <= int(clock() * 1e9) - estimated.at_ns < _FRESH_NS:
        found = estimated.scan
    else:
        found = _scan(state, project, live, known, clock)
    differences = scanning.differences(known, found)
    if known and (sum(one.files for one in differences) > max(_REWRITE, found.files // 2) or len(record.layers) >= _MOST_LAYERS):
        known, differences = None, scanning.differences(None, found)
    if known:
        scanning.inherit(known, found)
    made = None
    if differences:
        with room_needed(room):
            made = Capture(project, room.inside("building", "layer"), found, known, shift, tell, clock)
            kept = None
            try:
                made.run(differences)
                kept = _keep(room, record, made)
                _commit(room, kept, project, found)
            except BaseException:
                with contextlib.suppress(OSError):  # else it goes at the next capture
                    room.clear()
                    if kept and kept.layers[0] not in _read(room).layers:
                        room.discard(room.layer(kept.layers[0]))
                raise
            record = kept
            _sweep(room, record)
    return Base(
        project=project,
        layers=tuple(room.layer(number) for number in record.layers),
        scan=room.inside(f"scan.{record.serial}"),
        captured_at=found.began_ns / 1e9,
        files=found.files,
        bytes=found.bytes,
        copied_files=made.files if made else 0,
        copied_bytes=made.bytes if made else 0,
        seconds=clocks.monotonic() - began,
        strategy=record.strategy,
        unsettled=tuple(made.unsettled) if made else (),
        left_out=dict(found.left_out),
        shut=tuple(sorted(found.shut)),
        mounts=tuple(sorted(found.mounts)),
    )


def _keep(room: Room, record: _Record, made: Capture) -> _Record:
    """Give the new layer, or the merger of all deltas, its place. A merger that fails is put off: it is only for speed."""
    number = 1 + max((int(name) for name in os.listdir(room.inside("layers")) if name.isdigit()), default=-1)
    older = record.layers if made.known else ()
    strategy = record.strategy if made.known else made.strategy
    if len(older) > _MOST_DELTAS:
        merged = room.inside("building", "merged")
        with contextlib.suppress(OSError):
            merge_deltas([made.target, *map(room.layer, older[:-1])], room.layer(older[-1]), merged)
            _place(room, merged, number, made.attributes)
            return _Record((str(number), older[-1]), record.serial + 1, made.shift, strategy)
        room.discard(merged)
    _place(room, made.target, number, made.attributes)
    return _Record((str(number), *older), record.serial + 1, made.shift, strategy)


def _place(room: Room, built: str, number: int, attributes: Attributes) -> None:
    """Who may not write a directory may not move it either: its own attributes come last."""
    place = room.layer(str(number))
    os.rename(built, place)
    try:
        attributes.give(place)
    except OSError:
        room.discard(place)
        raise


def _commit(room: Room, record: _Record, project: str, found: Scan) -> None:
    content = {
        "format": _FORMAT,
        "project": project,
        "shift": record.shift,
        "layers": record.layers,
        "serial": record.serial,
        "scan": f"scan.{record.serial}",
        "strategy": record.strategy,
        "captured_at": clocks.stamp(found.began_ns / 1e9),
        "files": found.files,
        "bytes": found.bytes,
    }
    write_aside(room.inside(f"scan.{record.serial}"), scanning.save(found))
    room.sync()
    write_aside(room.inside("base.json"), json.dumps(content, indent=1).encode())


def _sweep(room: Room, record: _Record) -> None:
    """Away with what a crash or a merger left."""
    with contextlib.suppress(OSError):
        room.clear()
        for name in os.listdir(room.path):
            if (name.startswith("scan.") and name != f"scan.{record.serial}") or name.endswith(".new"):
                os.unlink(room.inside(name))


def _read(room: Room) -> _Record:
    """base.json, or nothing; the serial number counts on in any case, so that a scan's name is never used twice."""
    try:
        with open(room.inside("base.json"), "rb") as stream:
            content = json.load(stream)
        if content["format"] != _FORMAT:
            return _Record(serial=int(content["serial"]))
        return _Record(tuple(content["layers"]), int(content["serial"]), int(content["shift"]), str(content["strategy"]))
    except (OSError, ValueError, KeyError, TypeError):
        return _Record()


def _load(room: Room, shift: int) -> tuple[_Record, Scan | None]:
    """The base that counts and what it looks like; without a scan there is none, or none for this shift."""
    record = _read(room)
    if not record.layers or record.shift != shift or not all(os.path.isdir(room.layer(number)) for number in record.layers):
        return record, None
    try:
        with open(room.inside(f"scan.{record.serial}"), "rb") as stream:
            return record, scanning.load(stream.read())
    except FileNotFoundError:
        return record, None


def _shares_blocks(state: State, project: str, found: Scan) -> bool:
    """Really tried, with the first file of some size: what a file system is called says little."""
    for path, listing in found.directories.items():
        for name, row in scanning.rows_of(listing).items():
            if not stat.S_ISREG(row[0]) or not row[2]:
                continue
            with contextlib.suppress(OSError):
                reader = os.open(os.path.join(project, path, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    writer = os.open(state.path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                    try:
                        return clone(reader, writer)
                    finally:
                        os.close(writer)
                finally:
                    os.close(reader)
    return False
