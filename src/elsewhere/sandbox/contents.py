"""What a sandbox did: its layers, or its copy, compared with reality. What is hidden from a sandbox is never reported of it."""

import os

from elsewhere.changes import layers
from elsewhere.changes.compare import Changes, compare_overlay, compare_trees
from elsewhere.changes.layers import Encoding
from elsewhere.sandbox import rungs, seeds
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import images, saving
from elsewhere.storage.state import State

__all__ = ["IMAGE", "changes_of", "project_path", "rehearse"]

IMAGE = "layers.img"  # in a sandbox's directory, if its layers may only grow to a size


def changes_of(state: State, record: Record, layers_fd: int = -1) -> Changes:
    """`layers_fd` leads to layers that do not lie in the sandbox's directory, for as long as somebody holds them."""
    if record.disk == "image" and layers_fd < 0:
        fd = images.mounted(os.path.join(state.sandbox(record.id), IMAGE))
        try:
            return _changes(state, record, f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
    return _changes(state, record, f"/proc/self/fd/{layers_fd}" if layers_fd >= 0 else state.sandbox(record.id))


def _changes(state: State, record: Record, directory: str) -> Changes:
    found = Changes()
    pristine = seeds.pristine(tuple((path, source) for path, source in record.base.get("seeds", ())))
    if rungs.named(record.mechanism).copy:
        found = compare_trees(os.path.join(directory, "copy"), record.project, record.project)
    for layer in record.layers:
        upper = f"{directory}/upper/{layer['number']}"
        if os.path.isdir(upper):
            below = [*layer.get("frozen", ()), *([layer["lower"]] if layer["lower"] else [])]
            found.extend(compare_overlay(upper, below, layer["at"], _encoding(record, upper), pristine))
    found.sort()
    return found.without([*record.enforced.get("hidden", []), *record.enforced.get("not_copied", []), state.path])


def project_path(state: State, record: Record) -> str:
    """Where the project is inside: at the same path, unless it had to be copied."""
    return os.path.join(state.sandbox(record.id), "copy") if rungs.named(record.mechanism).copy else record.project


def rehearse(state: State) -> None:
    """Everything but an answer."""
    seeds.pristine()
    compare_overlay(state.room("mnt"), state.room("mnt"), "/", layers.TRUSTED)


def _encoding(record: Record, upper: str) -> Encoding:
    marks = saving.read_marks(upper)
    if marks is not None:
        return layers.saved(*marks)
    rung = rungs.named(record.mechanism)
    if rung.fuse:
        return layers.FUSE
    return layers.TRUSTED if rung.whole_machine else layers.USER
