"""`promote --resolve`: a fork in which conflicts are settled, by whoever works in it.

It has what the sandbox had; what could be merged is merged in it, and where the same lines were changed, or both made a text,
both versions are marked. It knows what reality had just then at those paths (its *basis*), so that what it has there in the end
is taken when it is promoted. Marks that are left in a file are a conflict (`earlier.left_marked`), so that they never reach
reality. What cannot be marked (a file that one side deleted, a binary one) stays a conflict until the fork has something else
there, or somebody chooses.
"""

import contextlib
import os
from collections.abc import Iterator

from elsewhere.changes.sides import sides_of
from elsewhere.errors import ElsewhereError, UsageError
from elsewhere.operations import earlier, promoting, recovering, sandboxes, snapshots
from elsewhere.operations.earlier import named
from elsewhere.operations.entering import enter
from elsewhere.operations.files import files_of
from elsewhere.operations.projects import refuse_inside
from elsewhere.operations.promoting import Asked, Prepared
from elsewhere.promotion import freezing
from elsewhere.promotion.pieces import Piece
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import trash
from elsewhere.storage.scratch import scratch
from elsewhere.storage.state import State

__all__ = ["resolve"]

_Written = tuple[str, bytes, int]


def resolve(wanted: str, asked: Asked, name: str | None = None) -> tuple[Record, Prepared]:
    """The fork, stopped, and what there was to settle."""
    refuse_inside()
    state = State.open()
    sandbox_id = record.find(state, wanted)
    recovering.recover(state, record.load(state, sandbox_id).project)
    with scratch(state, "basis") as place:
        aside = os.path.join(place, earlier.BASIS)
        with promoting.prepared(state, sandbox_id, asked, None) as ready:
            if not ready.plan.conflicts:
                raise UsageError(
                    "no_conflicts",
                    f"nothing of what the sandbox {sandbox_id!r} changed is in conflict with reality",
                    hint=f"elsewhere promote {sandbox_id}",
                )
            freezing.freeze(_basis(state, ready), aside)
            written = list(_written(ready))
        return _forked(state, sandbox_id, aside, written, name), ready


def _basis(state: State, ready: Prepared) -> Iterator[Piece]:
    """What it goes on from; where nothing is to be settled this time, that of the sandbox, if it was made to settle some."""
    now = {(one.root, one.path): one for one in _reality(ready)}
    own = os.path.join(state.sandbox(ready.record.id), earlier.BASIS)
    for one in freezing.thawed(own) if os.path.isdir(own) else ():
        now.setdefault((one.root, one.path), one)
    yield from now.values()


def _reality(ready: Prepared) -> Iterator[Piece]:
    """What it has just now where both sides changed something; and what the sandbox has, where nothing will be marked."""
    merged, here = set(ready.plan.merged), {(one.root, one.path): one.after for one in ready.pieces}
    conflicts = {(one.root, one.path): one for one in ready.plan.conflicts}
    places = {where for where in here if named(*where, ready.record.project) in merged}
    for where in sorted(places | conflicts.keys()):
        root, path = where
        marked = where not in conflicts or conflicts[where].content is not None
        settled = marked or where not in here
        yield Piece(root, path, None if settled else here[where], sides_of([root])(path), known=settled)


def _written(ready: Prepared) -> Iterator[_Written]:
    """What is other in the fork than in the sandbox."""
    merged, modes = set(ready.plan.merged), {(one.root, one.path): one.after for one in ready.pieces}
    for one in ready.plan.operations:
        if (
            one.wanted is not None
            and one.wanted.content is not None
            and named(one.root, one.path, ready.record.project) in merged
        ):
            yield os.path.join(one.root, one.path), one.wanted.content, one.wanted.mode
    for conflict in ready.plan.conflicts:
        side = modes.get((conflict.root, conflict.path))
        if conflict.content is not None and side is not None:
            yield os.path.join(conflict.root, conflict.path), conflict.content, side.mode


def _forked(state: State, sandbox_id: str, aside: str, written: list[_Written], name: str | None) -> Record:
    child = snapshots.fork(sandbox_id, name=name).children[0]
    if isinstance(child, ElsewhereError):
        raise child
    try:
        _write(state, child.id, written)
        basis = os.path.join(state.sandbox(child.id), earlier.BASIS)
        if os.path.isdir(basis):
            trash.discard(basis, state.room("trash"))
        os.rename(aside, basis)
        sandboxes.stop_if_idle(child.id)
    except BaseException:
        with contextlib.suppress(ElsewhereError, OSError):
            sandboxes.discard(child.id)
        raise
    return child


def _write(state: State, child: str, written: list[_Written]) -> None:
    """Before it knows what reality had: from then on what it has is taken, so that without these it would overwrite reality."""
    box = enter(state, child)
    try:
        with files_of(box) as files:
            for path, content, mode in written:
                files.write(path, content, mode=mode)
    finally:
        box.close()
