"""A change on its way through stages: checked, approved, applied, checked again; or put back.

For each stage in turn, with what its entry says meanwhile (`promotion/stages.py` draws it):

    checking     the change is planned against the target; its checks run in a sandbox of the target that has the change
    waiting      for a person
    applying     a directory: by a journal; a branch: in one step; deploy: a command on the host
    verifying    the checks again, in a new sandbox that sees the target as it has become
    passed

A conflict: nothing is done at that stage. A check or a deploy that fails: the stage is put back to what it was, later stages are
not touched, and what was said, the change as a patch and the sandbox of the failed check are kept.

A person's approval is about one change, with what was chosen about its conflicts, and is used up by an attempt that fails.

The entry is saved before each step, so that `recover` knows what somebody who was killed was about to do. What was applied and
not yet verified is put back (`promotion/restoring.py`); only a stage that has passed stays. `step` is told of each step before it
is taken: checking, checked, waiting, applying, moving, deploying, verifying, passed, reversing, and those of the journal.

Whoever calls holds the promotion. Its pieces are frozen ones: what a stage changes must not change the change. Not here: one
stage by itself (`passage.py`).
"""

import os
from collections.abc import Sequence

from elsewhere.clock import wall
from elsewhere.errors import Conflict, ElsewhereError, NotFound, Refused
from elsewhere.operations.passage import Entry, Passage, Step, Tell, coming, names, planned, subject
from elsewhere.operations.projects import find_project
from elsewhere.promotion import branches, records, restoring
from elsewhere.promotion.choosing import Choices, refuse_idle
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.records import Promotion
from elsewhere.promotion.restoring import silent
from elsewhere.promotion.stages import (
    AT_WORK,
    Branch,
    Directory,
    Stage,
    ahead,
    entry_of,
    refuse_untrusted,
    standing,
)
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State

__all__ = ["approve", "foreseen", "walk"]

_NONE = Choices()


def walk(
    state: State,
    promotion: Promotion,
    pieces: Sequence[Piece],
    stages: Sequence[Stage],
    to: str,
    choices: Choices = _NONE,
    tell: Tell = silent,
    step: Step = silent,
) -> None:
    """Through every stage up to `to` that the change has not passed yet. Afterwards the promotion is `applied`, or `waiting` for
    a person. A conflict and a failure raise, and the promotion says so, too."""
    left = ahead(stages, promotion.stages, to)
    refuse_untrusted(left, promotion.project)
    for stage in left:
        _refuse_missing(stage)
    _refuse_idle(state, promotion, pieces, left, choices)
    for stage in stages:
        entry_of(promotion.stages, stage)
    promotion.stage, promotion.status, promotion.ended_at = to, "applying", None
    promotion.save()
    for stage in left:
        entry = entry_of(promotion.stages, stage)
        try:
            passed = Passage(state, promotion, pieces, stage, entry, choices, tell, step).run()
        except BaseException as error:
            _broken_off(promotion, entry, error, step)
            raise
        if not passed:
            promotion.end("waiting", f"{stage.name}: waiting for a person; elsewhere approve {promotion.id}")
            return
    promotion.end("applied")


def foreseen(
    state: State, found: Record, pieces: Sequence[Piece], stages: Sequence[Stage], to: str, choices: Choices
) -> list[Entry]:
    """What would be done at each stage up to `to`, as far as targets are now."""
    if not stages:
        return []
    told, plans = [], []
    for stage in ahead(stages, (), to):
        new = coming(state, found.id, found.base["at"], "", stage, found.project, pieces)
        plans.append(planned(stage, new, choices)[0])
        told.append({"name": stage.name, "target": stage.target.words(), "status": "planned", **names(plans[-1])})
    refuse_idle(choices, plans)
    return told


def _refuse_idle(state: State, promotion: Promotion, pieces: Sequence[Piece], stages: Sequence[Stage], choices: Choices) -> None:
    """A choice has to be about a conflict of one of the stages, or have been about one of those that were passed."""
    used = {value for entry in promotion.stages if entry["status"] in ("passed", "waiting") for value in entry.get("chosen", ())}
    new = Choices(*(tuple(one for one in chosen if one not in used) for chosen in choices))
    if new != _NONE:
        project, base_at = promotion.project, promotion.base_at
        those = [coming(state, promotion.sandbox, base_at, promotion.id, stage, project, pieces) for stage in stages]
        refuse_idle(new, [planned(stage, one, new)[0] for stage, one in zip(stages, those, strict=True)])


def _broken_off(promotion: Promotion, entry: Entry, error: BaseException, step: Step) -> None:
    """Whatever the reason: what was done at the stage, and has not passed, is put back."""
    done = entry["status"] in AT_WORK
    if isinstance(error, ElsewhereError):
        entry["said"] = error.message
        promotion.save()
    if done:
        restoring.put_back(promotion, entry, step)
    if not isinstance(error, ElsewhereError):
        entry.update({"status": "reversed" if done else "pending", "approved": None})
        promotion.end("reversed", f"interrupted: {standing(promotion.stages)}")
        return
    left = entry["not_reversed"]
    words = (
        "nothing was done there" if not done else "the stage is as it was" if not left else f"not all could be put back: {left}"
    )
    error.message += f"; {words}"
    error.args = (error.message,)
    error.detail.update({"promotion": promotion.id, "stage": entry["name"]} | ({"not_reversed": left} if left else {}))
    entry["status"] = "refused" if isinstance(error, Conflict) else "failed"
    entry["approved"] = None
    entry["said"] = error.message
    promotion.end(entry["status"], f"{entry['name']}: {error.message}")


def _refuse_missing(stage: Stage) -> None:
    """Before anything is done at all: a mistyped target of the last stage is better known before the first."""
    target = stage.target
    if isinstance(target, Branch):
        branches.find(target.repository, target.name)
    elif isinstance(target, Directory):
        if not os.path.isdir(target.path):
            raise NotFound(
                "stage_target_missing",
                f"the target {target.path!r} of the stage {stage.name!r} is no directory",
                hint="make it, or mend the project's elsewhere.toml",
                detail={"stage": stage.name, "target": target.path},
            )
        find_project(target.path, "/")


def approve(promotion: Promotion) -> Entry:
    """The stage that waits for a person has one; the walk is for the caller to go on with, to `promotion.stage`."""
    for entry in promotion.stages:
        if entry["status"] == "waiting":
            entry["approved"] = {"by": records.who(), "uid": os.getuid(), "at": wall(), "change": subject(promotion)}
            promotion.save()
            return entry
    raise Refused(
        "not_waiting",
        f"the promotion {promotion.id!r} waits for nobody: {standing(promotion.stages)}",
        hint="elsewhere promotions lists them",
    )
