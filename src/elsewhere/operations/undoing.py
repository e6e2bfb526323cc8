"""`undo`: take back what a promotion did, three-way: what reality changed since is kept, or in the way; then nothing is done."""

import os
from collections.abc import Sequence

from elsewhere import units
from elsewhere.errors import Conflict, ElsewhereError, NotFound, Refused
from elsewhere.operations import earlier, promoting, recovering
from elsewhere.operations.projects import find_project, refuse_inside
from elsewhere.promotion import applying, heads, planning, records, replaying, restoring
from elsewhere.promotion.choosing import Choices
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.planning import Plan
from elsewhere.promotion.records import Promotion
from elsewhere.promotion.settling import next_steps
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Undone", "promotion", "promotions", "undo"]


@dataclass(frozen=True, slots=True)
class Undone:
    """`promotion` is the undo itself, which can be undone in turn; None: it was a dry run."""

    original: Promotion
    plan: Plan
    promotion: Promotion | None


def promotions() -> list[Promotion]:
    """All of them, oldest first, after those that were interrupted have been seen to."""
    state = State.open()
    recovering.recover(state)
    return records.listed(state)


def promotion(wanted: str) -> Promotion:
    state = State.open()
    recovering.recover(state)
    return records.find(state, wanted)


def undo(wanted: str | None = None, *, ours: Sequence[str] = (), theirs: Sequence[str] = (), dry_run: bool = False) -> Undone:
    """The one that is named, or the last of the project that we stand in. `ours` takes a path back even so, `theirs` leaves
    it."""
    refuse_inside()
    state = State.open()
    project = find_project(None, os.getcwd()).path if wanted is None else records.find(state, wanted).project
    recovering.recover(state, project)
    found = _last(state, project) if wanted is None else records.find(state, wanted)
    with records.held(found):
        original = records.load(state, found.id)  # somebody may have been at it until now
        _refuse_nothing(state, original)
        pieces = _pieces(original)
        plan = planning.plan(pieces, Choices(tuple(ours), tuple(theirs)), restoring=True)
        if dry_run:
            return Undone(original, plan, None)
        if plan.conflicts:
            raise _conflicting(original, plan)
        restoring.refuse_moved(original)
        if heads.checkout_state(original.checkout) == "moved":
            heads.refuse_moved(original.checkout)
        made = records.new(state, "undo", original.sandbox, original.project, undoes=original.id)
        with records.held(made, wait=True):
            _take_back(state, original, made, plan)
        return Undone(original, plan, made)


def _refuse_nothing(state: State, original: Promotion) -> None:
    if not _is_there(original):
        raise Refused(
            "not_applied",
            f"the promotion {original.id!r} is {original.status}: there is nothing to undo",
            hint="elsewhere promotions lists them",
        )
    if original.undoes is not None and records.load(state, original.undoes).stages:
        raise Refused(
            "undo_of_stages",
            f"{original.id!r} took back a change that had gone through stages, and an undo does not send it there again",
            hint=f"elsewhere promote {original.sandbox} --to STAGE",
        )


def _is_there(promotion: Promotion) -> bool:
    """Whether something of it is in reality. A change that did not pass a stage may have passed those before, or be there still
    because it could not be put back."""
    passed = any(one["status"] == "passed" for one in promotion.stages)
    some = promotion.status != "undone" and (passed or bool(restoring.left(promotion)))
    return promotion.status == "applied" or some


def _did(promotion: Promotion) -> bool:
    """Whether it moved anything that could be taken back: there may have been nothing to do, or only a branch to fetch."""
    passed = any(one["status"] == "passed" and restoring.did(one) for one in promotion.stages)
    moved = promotion.applied or promotion.deleted or passed or restoring.left(promotion) or promotion.kind == "replay"
    return bool(moved) or heads.checkout_state(promotion.checkout) == "moved"


def _last(state: State, project: str) -> Promotion:
    there = [one for one in records.listed(state) if one.project == project and _is_there(one) and one.kind != "undo"]
    mine = [one for one in there if _did(one)]
    if not mine:
        raise NotFound(
            "promotion_not_found",
            f"nothing was promoted to {project!r} that could be undone",
            hint="elsewhere promotions lists all",
        )
    return mine[-1]


def _pieces(original: Promotion) -> list[Piece]:
    """What it put there, and what was there before; where it did several things to a path, the last of what it put there."""
    found = {(piece.root, piece.path): piece for piece in replaying.replayed(original)}
    for place in original.places() if not found or original.stages else ():
        for piece in applying.pieces(place) if applying.state(place) == "applied" else ():
            first = found.get((piece.root, piece.path))
            found[piece.root, piece.path] = piece if first is None else first._replace(before=piece.before)
    for entry in restoring.left(original):
        if isinstance(entry["application"], str):
            for piece in applying.pieces(os.path.join(original.directory, entry["application"])):
                found.setdefault((piece.root, piece.path), piece)
    return list(found.values())


def _conflicting(original: Promotion, plan: Plan) -> Conflict:
    count = units.count(len(plan.conflicts), "conflict")
    return Conflict(
        "undo_conflict",
        f"{count} with what reality changed since the promotion {original.id!r}; nothing was done",
        hint=f"elsewhere undo {original.id} "
        + next_steps(
            (one.reason for one in plan.conflicts), "--ours PATH takes it back even so", "--theirs PATH leaves it as it is"
        ),
        detail={"conflicts": [promoting.conflict_document(one, original.project) for one in plan.conflicts]},
    )


def _take_back(state: State, original: Promotion, made: Promotion, plan: Plan) -> None:
    for one in plan.operations:
        name = earlier.named(one.root, one.path, original.project)
        (made.deleted if one.wanted is None else made.applied).append(name)
    made.merged = list(plan.merged)
    try:
        applying.apply(made.application(), plan.operations)
    except ElsewhereError as error:
        if error.code != "not_reversed":  # otherwise whoever comes next goes on with putting back
            made.end("refused", error.message)
        raise
    recovering.undone(state, original, made)
