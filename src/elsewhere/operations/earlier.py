"""What a path goes on from, if that is not the sandbox's base: what the sandbox had there when it was last moved to reality, or
what reality had when conflicts were settled. One answer for all who plan.

    <promotion>/basis/    what the sandbox had at each path that the promotion moved, or that reality had already
    <sandbox>/basis/      of a fork that was made to settle conflicts: what reality had there, and where nothing in the fork marks
                          the conflict (not `known`), what the fork had before anybody settled it (see `resolving.py`)

A fork has what its ancestors had moved before it went its own way. Only promotions from the very base that a sandbox has now
count: a refresh brings another one, in which all of that is. Stages know by themselves what came through them (`staging.py`).
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping

from elsewhere.changes.model import Side
from elsewhere.promotion import applying, freezing, records
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.planning import Conflicting
from elsewhere.promotion.records import Promotion
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State

__all__ = ["BASIS", "Where", "last_moved_at", "left_marked", "moved", "named", "own_basis", "taken_back", "unsettled"]

BASIS = "basis"
Where = tuple[str, str]
_MARKS = re.compile(rb"^(<{7} sandbox|>{7} reality)\r?$", re.MULTILINE)
_LARGEST = 16 << 20


def named(root: str, path: str, project: str) -> str:
    """Relative to the project, absolute outside of it."""
    return path if root == project else os.path.join(root, path)


def moved(state: State, found: Record) -> Mapping[Where, Side | None]:
    """By root and path; the newest counts."""
    basis: dict[Where, Side | None] = {}
    promotions = [one for one in _from_the_same_base(state, found) if one.status == "applied"]
    for sandbox, until in reversed(list(_lineage(found))):
        if sandbox == found.id:
            basis.update(own_basis(state, found))
        for one in promotions:
            place = os.path.join(one.directory, BASIS)
            if one.sandbox == sandbox and one.created_at < until and os.path.isdir(place):
                basis.update(_after(freezing.thawed(place)))
    return basis


def own_basis(state: State, found: Record) -> dict[Where, Side | None]:
    """Of one that was made to settle conflicts, as long as it has the base that it was made with."""
    return _after(_own(state, found))


def unsettled(state: State, found: Record) -> Mapping[Where, Side | None]:
    """What such a one had where no mark reminds anybody of a conflict: as long as it has that, there is one still."""
    return {(piece.root, piece.path): piece.before for piece in _own(state, found) if not piece.known}


def _own(state: State, found: Record) -> list[Piece]:
    place = os.path.join(state.sandbox(found.id), BASIS)
    if not os.path.isdir(place) or os.stat(place).st_mtime <= found.base["at"]:
        return []
    return freezing.thawed(place)


def taken_back(state: State, found: Record) -> Mapping[Where, Side | None]:
    """What promotions that were undone found in reality, and took for what was in the base: nobody else may know it any more.
    With `--ours` it need not have been that."""
    earlier: dict[Where, Side | None] = {}
    for one in _from_the_same_base(state, found):
        if one.status != "undone" or one.choices[0] or not any(one.sandbox == sandbox for sandbox, _ in _lineage(found)):
            continue
        for place in one.places():
            for piece in applying.pieces(place) if applying.state(place) == "applied" else ():
                if named(piece.root, piece.path, found.project) not in one.merged:
                    earlier.setdefault((piece.root, piece.path), piece.after)
    return earlier


def _from_the_same_base(state: State, found: Record) -> list[Promotion]:
    every = (one for one in records.listed(state) if one.kind == "promote" and not one.stages)
    return [one for one in every if one.base_at == found.base["at"]]


def last_moved_at(state: State, found: Record) -> float:
    """When it was last moved to reality, itself or as one of its ancestors."""
    mine = {sandbox for sandbox, _ in _lineage(found)}
    ends = [one.ended_at or 0.0 for one in records.listed(state) if one.sandbox in mine and one.status in ("applied", "undone")]
    return max(ends, default=0.0)


def _lineage(found: Record) -> Iterator[tuple[str, float]]:
    """The sandbox, and those that it comes from, each with the moment until which it was one of them."""
    yield found.id, math.inf
    origin, until = found.origin, found.created_at
    while origin is not None:
        until = min(until, origin.get("at", until))
        yield origin["sandbox"], until
        origin = origin.get("before")


def _after(pieces: Iterable[Piece]) -> dict[Where, Side | None]:
    return {(piece.root, piece.path): piece.after for piece in pieces}


def left_marked(state: State, found: Record, pieces: Iterable[Piece]) -> list[Conflicting]:
    """Where somebody who was to settle conflicts left both versions marked."""
    if not os.path.isdir(os.path.join(state.sandbox(found.id), BASIS)):
        return []
    marked = [one for one in pieces if one.after is not None and _is_marked(one.after)]
    sentence = "both versions are still marked in it, between <<<<<<< sandbox and >>>>>>> reality"
    return [Conflicting(one.root, one.path, "markers_left", sentence) for one in marked]


def _is_marked(side: Side) -> bool:
    if side.type != "file" or side.size > _LARGEST:
        return False
    with side.open() as stream:
        return _MARKS.search(stream.read(_LARGEST)) is not None
