"""Moving a sandbox to another base: what it wrote stays, what was merged with the new base is put above that.

    1    what it wrote is frozen, as a snapshot that lies on the old base, as all earlier ones do (`snapshots.py`)
    2    upper.next is made, with what was merged in it
    3    sandbox.json: `rebasing` to the new base              ◄── from here on it is done, by whoever comes next
    4    upper.next takes the place of upper, which is empty
    5    sandbox.json: on the new base

Whoever calls holds the lock on the sandbox's directory, and nothing runs. What is to be merged is decided elsewhere.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elsewhere.paths import is_within
from elsewhere.sandbox import rungs, snapshots
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.snapshots import Place
from elsewhere.storage import encodings, sowing, trash
from elsewhere.storage.layers import Layers, Step
from elsewhere.storage.sowing import Seed
from elsewhere.storage.state import State

__all__ = ["finish", "finish_if_needed", "rebase"]

_NAME = "before-refresh"


def rebase(state: State, found: Record, place: Place, base: dict[str, Any], merged: Iterable[Seed]) -> str:
    """`merged` are files by their absolute paths. The name of the snapshot in which what it was before is."""
    name = snapshots.new_name(found, None, _NAME)
    snapshots.frozen(state, found, place, lambda tip: snapshots.add(found, name, tip))
    for one in found.snapshots:
        one.setdefault("base", found.base)
    aside = f"{place.upper}.next"
    if os.path.lexists(aside):
        trash.remove_tree(aside)
    chain = Layers(state).chain(found.tip)
    snapshots.lay(aside, [os.path.join(place.data, step.place) for step in chain])
    _sow(found, place, chain, base, list(merged), aside)
    found.rebasing = base
    record.save(found, state.sandbox(found.id))
    finish(state, found, place)
    return name


def finish(state: State, found: Record, place: Place) -> None:
    """Go on from the third step, if somebody came so far."""
    if found.rebasing is None:
        return
    aside = f"{place.upper}.next"
    if os.path.isdir(aside):
        if os.path.isdir(place.upper):
            trash.remove_tree(place.upper)
        os.rename(aside, place.upper)
    found.base, found.rebasing = found.rebasing, None
    record.save(found, state.sandbox(found.id))


def finish_if_needed(state: State, found: Record) -> None:
    """Before it starts again."""
    if found.rebasing is not None:
        with snapshots.place_of(state, found) as place:
            finish(state, found, place)


def _sow(found: Record, place: Place, chain: list[Step], base: dict[str, Any], merged: list[Seed], upper: str) -> None:
    rung = rungs.named(found.mechanism)
    for layer in found.layers:
        inside = [seed for seed in merged if _layer_of(found, seed.path) is layer]
        if not inside:
            continue
        number = str(layer["number"])
        stacked = [os.path.join(place.data, step.place, number) for step in chain if number in step.holds]
        captured = base.get("layers") if layer["at"] == found.project else None
        below = list(captured or ([layer["lower"]] if layer["lower"] else layer["frozen"]))
        sowing.sow(
            os.path.join(upper, number),
            [replace(seed, path=os.path.relpath(seed.path, layer["at"])) for seed in inside],
            stacked,
            encodings.NAMED[rung.encoding],
            below,
            shift=rung.shift if layer["lower"] and not captured else 0,
        )


def _layer_of(found: Record, path: str) -> dict[str, Any]:
    return max((layer for layer in found.layers if is_within(path, layer["at"])), key=lambda layer: len(layer["at"]))
