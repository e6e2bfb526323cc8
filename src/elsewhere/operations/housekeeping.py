"""What everything costs on the disk, and taking away what nothing refers to: df, janitor.

What sandboxes share (frozen layers, bases) belongs to nobody alone. A sandbox's own cost is what would be free without it.
"""

import contextlib
import functools
import os
from collections.abc import Iterable
from dataclasses import field
from typing import Any

from elsewhere.errors import Broken
from elsewhere.experiments import records as races
from elsewhere.linux import measuring
from elsewhere.operations import experiments, forgetting, recovering, sandboxes
from elsewhere.promotion import records
from elsewhere.sandbox import ending
from elsewhere.sandbox.launching import creation
from elsewhere.sandbox.launching.engine import Engine
from elsewhere.sandbox.records import record
from elsewhere.storage import bases, checkouts
from elsewhere.storage.layers import Layers
from elsewhere.storage.rooms import Room
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Disk", "Item", "Tidied", "df", "janitor"]

_YOUNG_S = 600.0


@dataclass(frozen=True, slots=True)
class Item:
    """`bytes` is what would be free without it; `shared` is what it needs and others do, too."""

    kind: str
    id: str
    bytes: int
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Disk:
    """`total` is everything, whoever needs it, each byte once."""

    total: int
    items: list[Item]


def df() -> Disk:
    state = State.open()
    layers = Layers(state)
    owners = {kind: _directories(state.room(room)) for kind, room in (("sandbox", "sandboxes"), ("archive", "archive"))}
    needs = {place: _needed(layers, place) for places in owners.values() for place in places}
    count: dict[str, int] = {}
    for needed in needs.values():
        for layer in needed:
            count[layer] = count.get(layer, 0) + 1
    # A merged one shares its files with those that it was made of.
    sizes = {layer: _used(os.path.join(layers.place(layer), "upper")) for layer in layers.all()}
    items = []
    for kind, places in owners.items():
        for place in places:
            alone = sum(sizes.get(layer, 0) for layer in needs[place] if count[layer] == 1)
            shared = sum(sizes.get(layer, 0) for layer in needs[place] if count[layer] > 1)
            items.append(Item(kind, os.path.basename(place), _used(place) + alone, shared))
            items += [
                Item("snapshot", f"{os.path.basename(place)}:{name}", sizes.get(layer, 0))
                for name, layer in record.snapshots_of(place)
            ]
    unneeded = sum(size for layer, size in sizes.items() if layer not in count)
    items.append(Item("layers", "unreferenced", unneeded))
    items += [Item("base", os.path.basename(place), _used(place)) for place in _directories(state.room("bases"))]
    items += [Item("promotion", one.id, forgetting.cost(one)) for one in records.listed(state)]
    items += [Item("experiment", one.id, experiments.cost(one)) for one in races.listed(state)]
    items.append(Item("trash", "trash", _used(state.room("trash"))))
    return Disk(_used(state.path), items)


def _needed(layers: Layers, place: str) -> set[str]:
    """What a sandbox is made of, as far as it is there: this is for looking, not for deleting."""
    found: set[str] = set()
    for tip in record.layers_of(place):
        with contextlib.suppress(Broken):
            found |= layers.needed([tip])
    return found


def _directories(room: str) -> list[str]:
    with os.scandir(room) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))


def _used(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        return measuring.used(fd).bytes
    finally:
        os.close(fd)


@dataclass(slots=True)
class Tidied:
    matched: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    healed: list[dict[str, str | None]] = field(default_factory=list)
    dry_run: bool = False


def janitor(*, dry_run: bool = False) -> Tidied:
    """Frozen layers, captured bases and commits that no sandbox needs, here or in the archive; promotions that cannot be undone
    any longer; old experiments. A sandbox whose time is over goes as well, by way of the archive if it changed anything."""
    state = State.open()
    done = Tidied(dry_run=dry_run)
    if not dry_run:
        done.healed = sandboxes.list_sandboxes().healed
        done.healed += [
            {"id": one.id, "what": "interrupted", "was": "applying", "is": one.status} for one in recovering.recover(state)
        ]
    done.matched += [f"spare/{name}" for name in creation.clear_spare(state, dry_run=dry_run)]
    try:
        done.matched += [f"layers/{layer}" for layer in ending.prune(state, dry_run=dry_run)]
        for place in _directories(state.room("bases")):
            done.matched += _prune_bases(state, place, dry_run=dry_run)
    except Broken as error:
        done.skipped.append({"id": "bases", "reason": error.message})
    done.matched += [f"journal/{one}" for one in forgetting.forget(state, dry_run=dry_run)]
    done.matched += [f"experiments/{one}" for one in experiments.forget(state, dry_run=dry_run)]
    if not dry_run:
        done.removed = list(done.matched)
        ending.sweep(state)
        _merge(state)
    return done


def _prune_bases(state: State, place: str, *, dry_run: bool) -> list[str]:
    room, used = Room(place, state.room("trash")), functools.partial(_bases_in_use, state)
    if dry_run:
        gone = bases.unused_layers(room, used()) + checkouts.unused_commits(room, used(), younger=_YOUNG_S)
    else:
        gone = bases.prune(room, used) + checkouts.prune_commits(room, used, younger=_YOUNG_S)
    return [os.path.relpath(path, state.path) for path in gone]


def _bases_in_use(state: State) -> set[str]:
    """What cannot be read may need anything: then nobody knows."""
    places = [*_directories(state.room("sandboxes")), *_directories(state.room("archive"))]
    return {layer for place in places for layer in record.bases_of(place)}


def _merge(state: State) -> None:
    """What is to be merged and was not: the launcher may have been gone just then."""
    layers = Layers(state)
    for tip in _tips(state):
        if layers.merge_due(tip):
            Engine.shared(state).nudge("tidy", tip)


def _tips(state: State) -> Iterable[str]:
    return {tip for place in _directories(state.room("sandboxes")) for tip in record.layers_of(place)}
