"""What changed: in a sandbox, between two states, in reality since."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from elsewhere.operations.documents.common import moment, name
from elsewhere.operations.documents.sandboxes import base_document, sandbox_document
from elsewhere.paths import relative

if TYPE_CHECKING:  # whoever has a result has loaded what made it
    from elsewhere.changes.drift import Drift
    from elsewhere.changes.model import Change, Changes, Side
    from elsewhere.operations.diffing import Difference
    from elsewhere.operations.refreshing import RefreshPlan
    from elsewhere.sandbox.records.record import Record

__all__ = ["changed_names", "changes_document", "diff_document", "drift_document", "glance_document", "refresh_document"]


def changes_document(changes: Changes, project: str) -> dict[str, Any]:
    return {kind: [name(relative(path, project)) for path in getattr(changes, kind)] for kind in ("added", "modified", "deleted")}


def diff_document(found: Difference, *, names: bool = False, stat: bool = False, patch: bool = False) -> dict[str, Any]:
    """Besides what is always told: the names alone, how much changed in each file, the patch."""
    project = found.record.project
    document: dict[str, Any] = {
        "from": found.before,
        "to": found.after,
        "changes": {
            **_lists(found.inside, project),
            "modes": _pairs(found.told("mode"), project, lambda side: f"{side.mode:04o}"),
            "links": _pairs(found.told("link"), project, lambda side: name(side.target or "")),
            "types": _pairs(found.told("type"), project, lambda side: side.type),
        },
        "outside": {
            **_lists(found.outside, project),
            "packages": [
                {"manager": one.manager, "name": one.name, "before": one.before, "after": one.after, "files": one.files}
                for one in found.summary.packages
            ],
            "configuration": [name(path) for path in found.configuration()],
        },
        "git": {"files": found.git},
        "base": base_document(found.record.base),
    }
    if names:
        document["names"] = [name(path) for path in changed_names(found)]
    if stat:
        document["stat"] = [
            {
                "path": name(relative(one.path, project)),
                "change": one.kind,
                "binary": one.binary,
                "lines_added": one.lines_added,
                "lines_deleted": one.lines_deleted,
                "bytes_before": one.bytes_before,
                "bytes_after": one.bytes_after,
            }
            for one in found.stat()
        ]
    if patch:
        made = found.patch()
        text = made.text.decode("utf-8", "replace")
        document["patch"] = text
        document["patch_b64"] = None if text.encode() == made.text else base64.b64encode(made.text).decode()
        document["left_out"] = [{"path": name(relative(one.path, project)), "why": one.why} for one in made.left_out]
    return document


def changed_names(found: Difference) -> list[str]:
    """Of everything that is different now; of a renamed file, the name that it has now."""
    project = found.record.project
    return [*sorted(relative(path, project) for _, path in found.inside), *sorted(path for _, path in found.outside)]


def _lists(changes: Changes, project: str) -> dict[str, Any]:
    renamed = [{"from": name(relative(old, project)), "to": name(relative(new, project))} for old, new in changes.renamed]
    return {**changes_document(changes, project), "renamed": renamed}


def _pairs(found: Iterable[Change], project: str, told: Callable[[Side], Any]) -> list[dict[str, Any]]:
    return [
        {"path": name(relative(one.path, project)), "from": told(one.before), "to": told(one.after)}
        for one in found
        if one.before is not None and one.after is not None
    ]


def drift_document(record: Record, found: Drift) -> dict[str, Any]:
    return {
        "sandbox": {"id": record.id},
        "drift": {
            "age_s": round(found.age_s, 3),
            "base": {"kind": found.kind, "at": moment(record.base["at"]), "head": found.base_head},
            "head": found.head,
            "behind_commits": found.behind_commits,
            "changed": [name(relative(path, record.project)) for path in found.changed],
            "overlapping": [name(relative(path, record.project)) for path in found.overlapping],
            "packages": [
                {"manager": one.manager, "name": one.name, "what": one.what, "version": one.version} for one in found.packages
            ],
            "summary": found.summary(),
        },
    }


def glance_document(record: Record, found: Drift | None) -> dict[str, Any] | None:
    """Drift as far as it can be told without looking at the whole project."""
    if found is None:
        return None
    whole = drift_document(record, found)["drift"]
    return {key: whole[key] for key in ("age_s", "behind_commits", "overlapping", "summary")}


def refresh_document(record: Record, plan: RefreshPlan, *, dry_run: bool) -> dict[str, Any]:
    return {
        "sandbox": sandbox_document(record),
        "refresh": {
            "kept": [name(path) for path in plan.kept],
            "merged": [name(one.path) for one in plan.written],
            "dropped": [name(path) for path in plan.dropped],
            "conflicts": [{"path": name(one.path), "reason": one.reason, "sentence": one.sentence} for one in plan.conflicts],
            "dry_run": dry_run,
        },
    }
