"""What a sandbox holds at some moment, and what is different between two: its layers, or its copy, over its base. What is hidden
from a sandbox is never reported of it, and neither is what it has a private copy of, nor the sockets of its forwards.

A moment is `base` (what it started from), `now`, or the name of one of its snapshots.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

from elsewhere.changes.compare import Changes, View, compare_overlay, compare_states
from elsewhere.changes.model import Side
from elsewhere.errors import NotFound
from elsewhere.paths import is_within
from elsewhere.sandbox import moved, rungs, seeds
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import encodings, images, saving
from elsewhere.storage.encodings import Encoding
from elsewhere.storage.layers import LAYERS, Layers
from elsewhere.storage.state import State

__all__ = ["BASE", "IMAGE", "NOW", "changes_of", "differences", "project_path", "reached", "rehearse", "state_of"]

IMAGE = "layers.img"  # in a sandbox's directory, if its layers may only grow to a size
BASE, NOW = "base", "now"


def changes_of(state: State, record: Record, layers_fd: int = -1) -> Changes:
    """What it did so far. `layers_fd` leads to layers that do not lie in the sandbox's directory, for as long as somebody holds
    them."""
    with reached(state, record, layers_fd) as own:
        now = state_of(state, record, NOW, own)
        if rungs.named(record.mechanism).copy:
            base = state_of(state, record, BASE, own)
        else:
            base = {at: View((), view.below, seeds=view.seeds) for at, view in now.items()}
        return differences(state, (record, base), (record, now))


@contextlib.contextmanager
def reached(state: State, record: Record, layers_fd: int = -1) -> Iterator[str]:
    """Where its own layers lie, while they can be read."""
    if layers_fd >= 0:
        yield f"/proc/self/fd/{layers_fd}"
    elif record.disk == "image":
        fd = images.mounted(os.path.join(state.sandbox(record.id), IMAGE))
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        yield state.sandbox(record.id)


def differences(state: State, before: tuple[Record, dict[str, View]], after: tuple[Record, dict[str, View]]) -> Changes:
    """What is different in the second of two states, each with the sandbox that it is one of."""
    found = compare_states(before[1], after[1])
    hidden = [state.path]
    for record, views in (before, after):
        copies = [place for place in record.confinement.get("copies", ()) if not is_within(record.project, place)]
        known = [*record.enforced.get("hidden", []), *record.enforced.get("not_copied", []), *copies]
        hidden += known
        if rungs.named(record.mechanism).whole_machine:
            for at, view in views.items():
                hidden += moved.also_at(known, at, view.layers)  # since it started, which is when it is covered there
    found = _without_sockets(found.without(hidden), {*_forwarded(before[0]), *_forwarded(after[0])})
    found.project = after[0].project
    found.scratch = state.sandbox(after[0].id)
    return found


def _forwarded(record: Record) -> list[str]:
    """Where it was given sockets that lead to services of the host: nobody inside made them."""
    texts = (*record.network.get("forward", ()), *record.network.get("forwarded", ()))
    return [text.removeprefix("unix:") for text in texts if text.startswith("unix:")]


def _without_sockets(found: Changes, forwarded: set[str]) -> Changes:
    """A socket that is there, or that nothing took the place of, is the forward's. All else at such a path, or below it, is
    somebody's work."""
    made = {one.path for one in (*found.entries, *found.directories) if one.kind == "added"}
    sockets = {
        one.path
        for one in found.entries
        if one.path in forwarded and _is_socket(one.after or one.before) and (one.after or f"{one.path}/" not in made)
    }
    return found.where(lambda path: path not in sockets)


def _is_socket(side: Side | None) -> bool:
    return side is not None and stat.S_ISSOCK(side.about.st_mode)


def state_of(state: State, record: Record, moment: str, own: str) -> dict[str, View]:
    """What the sandbox shows at that moment, for each place that it may write. `own` is where its layers lie (`reached`)."""
    snapshot = None if moment in (BASE, NOW) else _snapshot(record, moment)
    if rungs.named(record.mechanism).copy:
        return {record.project: View((), _copy(state, record, moment, snapshot, own))}
    base = _base_now(record, own) if snapshot is None else snapshot.get("base", record.base)
    pristine = seeds.pristine(tuple((path, source) for path, source in base.get("seeds", ())))
    views = {}
    for layer in record.layers:
        written = [] if moment == BASE else _written(state, record, snapshot, own, str(layer["number"]))
        views[layer["at"]] = View(written, _below(record, layer, base), [_encoding(record, one) for one in written], pristine)
    return views


def _base_now(record: Record, own: str) -> dict[str, Any]:
    """Of one that is being moved to another (`rebasing.py`), that other, as soon as what was merged with it is in place."""
    return record.base if record.rebasing is None or os.path.isdir(f"{own}/upper.next") else record.rebasing


def _copy(state: State, record: Record, moment: str, snapshot: dict[str, Any] | None, own: str) -> list[str]:
    if moment == BASE:
        return _there(record.project)
    place = own if snapshot is None else os.path.join(state.room(LAYERS), snapshot["layer"], "upper")
    return [os.path.join(place, "copy")]


def _below(record: Record, layer: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """What lies below one overlay: of the project, the base that it had at that moment."""
    captured = base.get("layers")
    if layer["at"] == record.project and (captured or layer.get("frozen")):
        return list(captured or _there(record.project))
    return [*layer.get("frozen", ()), *_there(layer["lower"])]


def _there(place: str | None) -> list[str]:
    """A place of reality, unless it has been removed meanwhile: then nothing is there."""
    return [place] if place and os.path.isdir(place) else []


def _written(state: State, record: Record, snapshot: dict[str, Any] | None, own: str, number: str) -> list[str]:
    """The layers of one overlay up to a snapshot, or to now, newest first."""
    upper = f"{own}/upper/{number}"
    tip = record.tip if snapshot is None else snapshot["layer"]
    found = [upper] if snapshot is None and os.path.isdir(upper) else []
    if tip is None:
        return found
    frozen = os.path.join(own, LAYERS) if record.disk == "image" else state.room(LAYERS)
    if rungs.named(record.mechanism).memory:
        copied = os.path.join(frozen, tip, "upper", number)
        return found if snapshot is None else [copied] if os.path.isdir(copied) else []
    layers = Layers(state)
    steps = layers.chain(tip)
    if layers.is_moving(tip) and not os.path.isdir(os.path.join(frozen, steps[0].place)):
        # Whoever froze it did not come further: what the newest layer is to hold is still where it was written.
        steps, found = steps[1:], [upper] if os.path.isdir(upper) else []
    return found + [os.path.join(frozen, step.place, number) for step in steps if number in step.holds]


def _snapshot(record: Record, name: str) -> dict[str, Any]:
    for found in record.snapshots:
        if found["name"] == name:
            return found
    raise NotFound(
        "snapshot_not_found",
        f"the sandbox {record.id!r} has no snapshot {name!r}",
        hint=f"elsewhere snapshots {record.id} lists them; {BASE} and {NOW} are there always",
    )


def project_path(state: State, record: Record) -> str:
    """Where the project is inside: at the same path, unless it had to be copied."""
    return os.path.join(state.sandbox(record.id), "copy") if rungs.named(record.mechanism).copy else record.project


def rehearse(state: State) -> None:
    """Everything but an answer."""
    seeds.pristine()
    compare_overlay(state.room("mnt"), state.room("mnt"), "/", encodings.TRUSTED)


def _encoding(record: Record, layer: str) -> Encoding:
    marks = saving.read_marks(layer)
    if marks is not None:
        return encodings.saved(*marks)
    return encodings.NAMED[rungs.named(record.mechanism).encoding]
