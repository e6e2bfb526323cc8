"""Snapshots, on disk: what a sandbox wrote so far becomes a frozen layer, and it goes on with an empty one above it.

    before     sandboxes/<id>/upper                                    tip: L1
    1          layers/L2/ is made, and says that it is `moving`
    2          sandbox.json: tip L2, and a snapshot that is called so   ◄── from here on it counts
    3          upper is renamed to layers/L2/upper, an empty one takes its place; L2 is no longer `moving`

Stopped after any of these steps, nothing is lost: after the first the layer is nobody's, after the second the third is done by
whoever comes next (`mend`), before anything can be written. That takes the same time whatever the sandbox wrote.

What still runs may write: then it is stopped for a moment and the upper is copied. Where layers lie in memory, or there are none,
everything is copied each way. Whoever calls holds the lock on the sandbox's directory, and has seen to it that nothing runs, or
that what runs is frozen.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import Any

from elsewhere.clock import wall
from elsewhere.errors import NotFound, StateError, UsageError
from elsewhere.sandbox import rungs
from elsewhere.sandbox.contents import IMAGE
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import copying, encodings, images, merging, saving, trash
from elsewhere.storage.copying import Attributes
from elsewhere.storage.layers import LAYERS, Layer, Layers, size_of
from elsewhere.storage.state import State
from elsewhere.units import format_size
from elsewhere.values import dataclass

__all__ = [
    "BASE",
    "Place",
    "add",
    "copied",
    "find",
    "frozen",
    "image_at",
    "lay",
    "mend",
    "mend_if_needed",
    "new_name",
    "place_of",
    "remove",
    "reset",
    "return_to",
    "told",
]

BASE = "base"  # the name of what there was before anything was written
_RESERVED = (BASE, "now")
_LONGEST_NAME = 63
_QUICK_S = 0.001
_COPIED = ("copy", "tmp", "home")  # of the rung that has no layers
_LEFT_BEHIND = "before-rollback"
_ASIDE = ".new"
_SPARE_BLOCKS = 4  # of an image, for each directory that is laid: itself, what overlay works in, and their attributes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sandbox's upper lies, and where the layers of its own snapshots do."""

    own: str
    data: str

    @property
    def upper(self) -> str:
        return os.path.join(self.own, "upper")


@contextlib.contextmanager
def place_of(state: State, found: Record, held: int = -1) -> Iterator[Place]:
    """`held` leads to the layers of one that runs, where they lie in an image."""
    if found.disk != "image":
        yield Place(state.sandbox(found.id), state.room(LAYERS))
        return
    with image_at(os.path.join(state.sandbox(found.id), IMAGE), held) as place:
        yield place


@contextlib.contextmanager
def image_at(path: str, held: int = -1) -> Iterator[Place]:
    fd = os.dup(held) if held >= 0 else images.mounted(path)
    try:
        own = f"/proc/self/fd/{fd}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{own}/{LAYERS}", 0o700)
        yield Place(own, f"{own}/{LAYERS}")
    finally:
        os.close(fd)


# -- names ----------------------------------------------------------------------------------------------------------------------


def find(found: Record, name: str) -> dict[str, Any]:
    for one in found.snapshots:
        if one["name"] == name:
            return one
    if name == BASE:
        return {"name": BASE, "layer": None, "parent": None}
    raise NotFound(
        "snapshot_not_found",
        f"the sandbox {found.id!r} has no snapshot {name!r}",
        hint=f"elsewhere snapshots {found.id} lists them; {BASE!r} is what it started from",
    )


def new_name(found: Record, wanted: str | None, kind: str = "snapshot") -> str:
    taken = {one["name"] for one in found.snapshots}
    if wanted is None:
        return next(name for number in range(1, len(taken) + 2) if (name := f"{kind}-{number}") not in taken)
    plain = wanted.replace("-", "a").replace("_", "a").replace(".", "a")
    if not plain.isalnum() or not wanted.isascii() or not wanted[0].isalnum() or len(wanted) > _LONGEST_NAME:
        raise UsageError(
            "bad_snapshot_name",
            f"{wanted!r} cannot be the name of a snapshot",
            hint=f"up to {_LONGEST_NAME} letters, digits, '-', '_' and '.', beginning with a letter or digit",
        )
    if wanted in _RESERVED:
        raise UsageError("bad_snapshot_name", f"{wanted!r} has a meaning of its own", hint="choose another name")
    if wanted in taken:
        raise UsageError(
            "snapshot_exists",
            f"the sandbox {found.id!r} has a snapshot {wanted!r} already",
            hint=f"choose another name, or elsewhere rm-snapshot {found.id} {wanted}",
        )
    return wanted


def add(found: Record, name: str, layer: str | None, *, copied: bool = False) -> dict[str, Any]:
    """One more, which the sandbox goes on from."""
    made = {"name": name, "parent": found.at, "layer": layer, "created_at": wall(), "copied": copied}
    found.snapshots.append(made)
    found.at = name
    return made


# -- freezing -------------------------------------------------------------------------------------------------------------------


def frozen(
    state: State,
    found: Record,
    place: Place,
    then: Callable[[str | None], object],
    *,
    leaving: bool = False,
    measured: bool = False,
) -> Layer | None:
    """What was written since the last time becomes a layer, and the sandbox goes on above it; None: nothing was. `then` is told
    the layer that everything is in now, and changes the record, which is saved with that. `leaving`: it is to go on from
    somewhere else, so nothing is laid above it. `measured`: somebody wants to know what it takes, as far as that can be told at
    once; otherwise it is found out later."""
    mend(state, found, place)
    layers = Layers(state)
    if not _is_written(layers, found, place):
        then(found.tip)
        record.save(found, state.sandbox(found.id))
        return None
    with layers.referring(), told():
        apart = place.data != state.room(LAYERS)
        encoding, size = rungs.named(found.mechanism).encoding, size_of(place.upper, _QUICK_S) if measured else None
        made = layers.new(found.tip, os.listdir(place.upper), encoding, apart=apart, size=size)
        try:
            # While there may be no room for it nothing has changed; afterwards there is nothing left to do but to rename.
            if not leaving:
                _lay(place, [place.upper])
            os.makedirs(os.path.join(place.data, made.id), 0o700, exist_ok=True)
            found.tip = made.id
            then(made.id)
            record.save(found, state.sandbox(found.id))
        except BaseException:
            found.tip = made.parent
            trash.discard(layers.place(made.id), state.room("trash"))
            if apart:
                shutil.rmtree(os.path.join(place.data, made.id), ignore_errors=True)
            raise
    if leaving:
        _move_in(layers, made.id, place)
    else:
        mend(state, found, place, laid=True)
    if apart:
        with contextlib.suppress(OSError):  # without room for it, another time
            _tidy_image(layers, found, place)
    return made


def _tidy_image(layers: Layers, found: Record, place: Place) -> None:
    """What lies in an image, only who has it mounted can merge, and take away when nothing needs it."""
    assert found.tip is not None
    if layers.is_due(found.tip):
        layers.merge(found.tip, place.data)
    needed = layers.needed([found.tip, *(one["layer"] for one in found.snapshots if one["layer"])])
    for name in os.listdir(place.data):
        if name not in needed:
            trash.remove_tree(os.path.join(place.data, name))


def mend(state: State, found: Record, place: Place, *, laid: bool = False) -> None:
    """Finish what somebody did not finish who was freezing it, or going back. `laid`: an empty upper lies ready."""
    layers = Layers(state)
    if found.tip is None:
        return
    if layers.is_moving(found.tip):
        _move_in(layers, found.tip, place)
    if not os.path.isdir(place.upper):
        if not laid:
            _lay(place, [os.path.join(place.data, step.place) for step in layers.chain(found.tip)])
        os.rename(place.upper + _ASIDE, place.upper)


def _move_in(layers: Layers, layer_id: str, place: Place) -> None:
    target = os.path.join(place.data, layer_id)
    with contextlib.suppress(FileExistsError):
        os.mkdir(target, 0o700)
    if not os.path.isdir(f"{target}/upper"):
        os.rename(place.upper, f"{target}/upper")
    layers.moved(layer_id)


def mend_if_needed(state: State, found: Record) -> None:
    """Before it starts again."""
    if found.tip is not None and rungs.named(found.mechanism).stacks:
        with place_of(state, found) as place:
            mend(state, found, place)


def reset(state: State, found: Record, place: Place) -> None:
    """Nothing was written since the layer that it lies on."""
    _clear(place)
    mend(state, found, place)


def _is_written(layers: Layers, found: Record, place: Place) -> bool:
    """Whether the upper says anything that what lies below it does not."""
    if found.tip is None:
        return os.path.isdir(place.upper)  # without, what it starts with is put there when it starts
    step = layers.top(found.tip)
    for name in os.listdir(place.upper):
        mine = os.path.join(place.upper, name)
        if name not in step.holds or os.listdir(mine):
            return True
        if _about(mine) != _about(os.path.join(place.data, step.place, name)):
            return True
    return False


def _about(path: str) -> tuple[object, ...]:
    found = Attributes.read(path, os.lstat(path))
    return found.mode, found.uid, found.gid, sorted(found.extended)


def _lay(place: Place, below: list[str]) -> None:
    lay(place.upper + _ASIDE, below)


def lay(aside: str, below: list[str]) -> None:
    """An empty upper, aside. The root of each directory in it gives its mount owner, mode and times, and takes them from what
    lies below, newest first."""
    if os.path.lexists(aside):
        trash.remove_tree(aside)
    os.mkdir(aside, 0o755)
    for layer in below:
        for name in os.listdir(layer):
            source, target = os.path.join(layer, name), os.path.join(aside, name)
            if not os.path.lexists(target):
                os.mkdir(target, 0o700)
                Attributes.read(source, os.lstat(source)).give(target)


def _clear(place: Place) -> None:
    """No upper, all at once: what is missing from half of one would be put there anew, over what lies below."""
    away = place.upper + ".old"
    for left in (away, place.upper + _ASIDE):
        if os.path.lexists(left):
            trash.remove_tree(left)
    with contextlib.suppress(FileNotFoundError):
        os.rename(place.upper, away)
    trash.remove_tree(away)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """While something is saved: what the system refuses is said in our own words."""
    try:
        yield
    except OSError as error:
        _raise_if_full(error)
        raise StateError(
            "not_saved", f"the state of the sandbox cannot be saved: {error.strerror}", hint="elsewhere doctor looks around"
        ) from error


def _raise_if_full(error: OSError) -> None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise StateError("no_room", f"there is no room to save the sandbox: {error.strerror}", hint="free some space") from error


# -- copying --------------------------------------------------------------------------------------------------------------------


def copied(state: State, found: Record, place: Place, memory: int = -1) -> Layer:
    """A copy of what was written since the last time, as a layer on the same parent; where nothing can lie on anything, a copy of
    all of it. `memory` leads to layers that lie there. The record does not refer to it yet: whoever calls does, while
    `Layers.referring`."""
    rung = rungs.named(found.mechanism)
    layers = Layers(state)
    if rung.copy:
        holds = [name for name in _COPIED if os.path.isdir(os.path.join(place.own, name))]
        made = layers.new(None, holds, "copy")
    elif rung.memory:
        made = layers.new(None, (), "saved")
    else:
        mend(state, found, place)
        made = layers.new(found.tip, os.listdir(place.upper), rung.encoding, apart=place.data != state.room(LAYERS))
    target = os.path.join(place.data, made.id, "upper")
    try:
        os.makedirs(target, 0o700)
        if rung.memory:
            _save(memory, place.upper, target)
        for name in made.holds:
            _copy(os.path.join(place.own if rung.copy else place.upper, name), os.path.join(target, name), made.encoding)
    except BaseException as error:
        if place.data != state.room(LAYERS):
            shutil.rmtree(os.path.dirname(target), ignore_errors=True)
        trash.discard(layers.place(made.id), state.room("trash"))
        if isinstance(error, OSError):
            _raise_if_full(error)
            raise StateError(
                "not_copied",
                f"what the sandbox wrote cannot be copied: {error.strerror}",
                hint="elsewhere stop ends what runs in it; then nothing has to be copied",
            ) from error
        raise
    layers.moved(made.id)
    return layers.measured(made, place.data, _QUICK_S)


def _save(memory: int, upper: str, target: str) -> None:
    """Of one that does not run, they lie on the disk already."""
    if memory >= 0:
        saving.save_layers(f"/proc/self/fd/{memory}/upper", target)
    else:
        saving.copy_saved(upper, target)


def _copy(source: str, target: str, encoding: str) -> None:
    if encoding != "copy":
        merging.duplicate(source, encodings.NAMED[encoding], target)
        return
    left_out = copying.copy_tree(source, target).left_out
    closed = [path for path in left_out if not stat.S_ISSOCK(os.lstat(path).st_mode)]
    if closed:
        raise StateError("not_copied", f"{closed[0]!r} cannot be copied", hint="make it readable, and try again")


# -- going back -----------------------------------------------------------------------------------------------------------------


def return_to(state: State, found: Record, place: Place, snapshot: dict[str, Any]) -> str | None:
    """The sandbox goes on from a snapshot. What it had is saved first, if it is not what a snapshot has: the name of that."""
    left = new_name(found, None, _LEFT_BEHIND)
    rung = rungs.named(found.mechanism)
    if rung.stacks:
        # Not the last layer alone: a fork freezes without a name. And not the layer alone: the base may have changed below it.
        known = {one["layer"] for one in found.snapshots if one.get("base", found.base) == found.base}
        if place.data != state.room(LAYERS):
            _need_spare_room(place)
        frozen(state, found, place, lambda tip: tip is not None and tip not in known and add(found, left, tip), leaving=True)
        saved = any(one["name"] == left for one in found.snapshots)
        _clear(place)  # stopped from here on, it is laid anew
        found.tip, found.at = snapshot["layer"], None if snapshot["name"] == BASE else snapshot["name"]
        if "base" in snapshot:
            for one in found.snapshots:
                one.setdefault("base", found.base)
            found.base = snapshot["base"]
        record.save(found, state.sandbox(found.id))
        mend(state, found, place)  # without a layer, what it starts with is put there when it starts
        return left if saved else None
    if snapshot["layer"] is None:
        raise StateError(
            "cannot_return_to_base",
            f"the sandbox {found.id!r} stands on {rung.name}, where only what was copied can be gone back to",
            hint="make a new sandbox",
        )
    with Layers(state).referring(), told():
        made = copied(state, found, place)
        add(found, left, made.id, copied=True)
        record.save(found, state.sandbox(found.id))
    source = os.path.join(place.data, snapshot["layer"], "upper")
    if rung.memory:
        saving.copy_saved(source, place.upper)
    for name in os.listdir(source) if rung.copy else ():
        aside, target = os.path.join(place.own, f"{name}.new"), os.path.join(place.own, name)
        if os.path.lexists(aside):
            trash.remove_tree(aside)
        copying.copy_tree(os.path.join(source, name), aside)
        trash.discard(target, state.room("trash"))
        os.rename(aside, target)
    found.at = snapshot["name"]
    record.save(found, state.sandbox(found.id))
    return left


def _need_spare_room(place: Place) -> None:
    """In an image that is full to the last block what it had could be saved, but nothing be laid above what it goes on from."""
    names = len(os.listdir(place.upper)) if os.path.isdir(place.upper) else 0
    needed, about = _SPARE_BLOCKS * (names + 1), os.statvfs(place.own)
    if min(about.f_bavail, about.f_favail) < needed:
        raise StateError(
            "no_room",
            f"the sandbox's disk has {format_size(about.f_bavail * about.f_frsize)} left, and going back needs"
            f" {format_size(needed * about.f_frsize)}",
            hint="delete something in the sandbox first: what it has now is saved on the same disk",
        )


def remove(found: Record, name: str) -> dict[str, Any]:
    """Its name is free again; those that came after it come after what it came after."""
    gone = find(found, name)
    if gone["name"] == BASE:
        raise UsageError("bad_snapshot_name", f"{BASE!r} is what the sandbox started from", hint="it goes with the sandbox")
    found.snapshots.remove(gone)
    for one in found.snapshots:
        if one["parent"] == name:
            one["parent"] = gone["parent"]
    if found.at == name:
        found.at = gone["parent"]
    return gone
