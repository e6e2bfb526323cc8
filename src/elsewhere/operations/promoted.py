"""A promotion in words and numbers, the same for people and for programs: what it did, or would do."""

import contextlib
import os
from typing import Any

from elsewhere.clock import stamp
from elsewhere.operations import promoting
from elsewhere.operations.documents.common import name
from elsewhere.operations.earlier import named
from elsewhere.operations.promoting import Promoted
from elsewhere.operations.undoing import Undone
from elsewhere.paths import relative
from elsewhere.promotion import stranded
from elsewhere.promotion.planning import Plan
from elsewhere.promotion.records import Promotion

__all__ = ["document", "documents", "in_full", "of_promote", "of_promotion", "of_undo"]

_MOST_SAID = 64 << 10
_PATHS = ("applied", "merged", "deleted", "same", "kept")


def document(said: dict[str, Any]) -> dict[str, Any]:
    return {"promotion": _for_programs(said)}


def documents(found: list[Promotion]) -> dict[str, Any]:
    return {"promotions": [_for_programs(of_promotion(one)) for one in found]}


def _timed(one: dict[str, Any]) -> dict[str, Any]:
    """Times, durations and names as everywhere."""
    made: dict[str, Any] = {**one, **{key: [name(path) for path in one[key]] for key in _PATHS if key in one}}
    if isinstance(made.get("conflicts"), list):
        made["conflicts"] = [{**conflict, "path": name(conflict["path"])} for conflict in made["conflicts"]]
    if isinstance(made.get("at"), float):
        made["at"] = stamp(made["at"])
    if "seconds" in made:
        made["duration_ms"] = round(made.pop("seconds") * 1000, 3)
    for key in ("verified", "approved"):
        if isinstance(made.get(key), dict):
            made[key] = _timed(made[key])
    if isinstance(made.get("checks"), list):
        made["checks"] = [_timed(check) if isinstance(check, dict) else check for check in made["checks"]]
    return made


def _for_programs(said: dict[str, Any]) -> dict[str, Any]:
    """Names that are not UTF-8 come apart."""
    made = {**said, **{key: [name(path) for path in said[key]] for key in _PATHS if key in said}}
    for key in ("conflicts", "marked"):
        made[key] = [{**one, "path": name(one["path"])} for one in said[key]]
    for key in ("checks", "stages"):
        made[key] = [_timed(one) for one in said.get(key, [])]
    if isinstance(said.get("commits"), dict) and "at" in said["commits"]:
        made["commits"] = {**said["commits"], "at": stamp(said["commits"]["at"])}
    if "left_out" in said:
        made["left_out"] = {why: [name(path) for path in paths] for why, paths in said["left_out"].items()}
    return made


def of_promote(done: Promoted) -> dict[str, Any]:
    ready, project = done.ready, done.ready.record.project
    left_out = {why: [relative(path, project) for path in paths] for why, paths in ready.selection.left_out.items()}
    left_out["commits"] = [relative(top, project) for top in stranded.tops(ready.selection.left_out["git"], project)]
    left = {"same": list(ready.plan.same), "kept": list(ready.plan.kept), "left_out": left_out}
    if done.promotion is not None:
        return {**of_promotion(done.promotion), **left}
    said = _only_planned(ready.plan, "promote", ready.record.id, project)
    marked = [{"path": path, "why": why} for path, why in ready.marked]
    return {**said, **left, "marked": marked, "commits": done.commits, "stages": done.stages, "status": _foreseen(done)}


def _foreseen(done: Promoted) -> str:
    return "refused" if done.is_refused else "planned"


def of_undo(undone: Undone) -> dict[str, Any]:
    if undone.promotion is not None:
        return of_promotion(undone.promotion)
    original = undone.original
    return {**_only_planned(undone.plan, "undo", original.sandbox, original.project), "undoes": original.id}


def _only_planned(plan: Plan, kind: str, sandbox: str, project: str) -> dict[str, Any]:
    """Of a dry run: there is no promotion, only what it would be."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for one in plan.operations:
        names[one.wanted is None].append(named(one.root, one.path, project))
    return {
        "id": None,
        "kind": kind,
        "sandbox": sandbox,
        "project": project,
        "stage": None,
        "status": "refused" if plan.conflicts else "planned",
        "applied": names[False],
        "merged": list(plan.merged),
        "deleted": names[True],
        "conflicts": [promoting.conflict_document(one, project) for one in plan.conflicts],
        "marked": [],
        "checks": [],
    }


def in_full(promotion: Promotion) -> dict[str, Any]:
    """With what every check said, the end of it if it is long."""
    said = of_promotion(promotion)
    return {**said, "checks": [{**one, "said": _said(one)} for one in said["checks"]]}


def _said(check: dict[str, Any]) -> str:
    parts = []
    for key in ("stdout", "stderr"):
        with contextlib.suppress(OSError, KeyError), open(check[key], "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _MOST_SAID))
            parts.append(stream.read(_MOST_SAID).decode("utf-8", "replace"))
    return "".join(parts)


def of_promotion(promotion: Promotion) -> dict[str, Any]:
    return {
        "id": promotion.id,
        "kind": promotion.kind,
        "sandbox": promotion.sandbox,
        "project": promotion.project,
        "stage": promotion.stage,
        "status": promotion.status,
        "by": promotion.by,
        "applied": promotion.applied,
        "merged": promotion.merged,
        "deleted": promotion.deleted,
        "conflicts": promotion.conflicts,
        "marked": promotion.marked,
        "checks": promotion.checks,
        "stages": promotion.stages,
        "commits": promotion.commits,
        "undoes": promotion.undoes,
        "undone_by": promotion.undone_by,
        "created_at": stamp(promotion.created_at),
        "ended_at": None if promotion.ended_at is None else stamp(promotion.ended_at),
        "note": promotion.note,
    }
