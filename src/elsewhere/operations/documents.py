"""Documents: the one JSON that each verb prints with --json. Names that are not UTF-8 come as an object with their bytes."""

import base64
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elsewhere import __version__
from elsewhere.changes.drift import Drift
from elsewhere.changes.model import Change, Changes, Side
from elsewhere.clock import stamp
from elsewhere.errors import ElsewhereError
from elsewhere.operations import drifting
from elsewhere.operations.admission import Claim
from elsewhere.operations.diffing import Difference
from elsewhere.operations.executing import ExecResult
from elsewhere.operations.refreshing import RefreshPlan
from elsewhere.operations.running import RunResult
from elsewhere.operations.sandboxes import Keeping, Listing, Removal
from elsewhere.operations.settings import Ignored, Setup, Trust
from elsewhere.operations.snapshots import Forked, Returned, Taken
from elsewhere.operations.usage import Top, usage_of
from elsewhere.sandbox import contents, denials
from elsewhere.sandbox import snapshots as kept
from elsewhere.sandbox.access.transfer import Transferred
from elsewhere.sandbox.keeping.commands import Outcome
from elsewhere.sandbox.keeping.line import Process, Usage
from elsewhere.sandbox.records.journal import Journal
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.records.request import Request
from elsewhere.storage.state import SCHEMA, State

__all__ = [
    "changed_names",
    "config_document",
    "cp_document",
    "denials_document",
    "diff_document",
    "drift_document",
    "exec_document",
    "fork_document",
    "inspect_document",
    "list_document",
    "name",
    "open_document",
    "processes_document",
    "refresh_document",
    "relative",
    "removal_document",
    "requests_document",
    "rollback_document",
    "run_document",
    "sandbox_document",
    "snapshot_document",
    "snapshots_document",
    "top_document",
    "trust_document",
    "version_document",
]

CAPABILITIES = [
    "run",
    "live-base",
    "pinned-base",
    "commit-base",
    "living-sandboxes",
    "files",
    "requests",
    "diff-stat",
    "drift",
    "snapshots",
    "fork",
    "doctor",
    "views",
    "limits",
    "denials",
    "settings",
    "trust",
    "admission",
]
_BASE = ("kind", "head", "ref", "files", "bytes", "copied_files", "unsettled", "left_out", "manifest")


def name(path: str) -> str | dict[str, str]:
    raw = os.fsencode(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return {"path": raw.decode("utf-8", "replace"), "path_b64": base64.b64encode(raw).decode()}


def relative(path: str, project: str) -> str:
    """Relative to the project, absolute outside it."""
    return path[len(project) + 1 :] if path.startswith(project + "/") else path


def changes_document(changes: Changes, project: str) -> dict[str, Any]:
    return {kind: [name(relative(path, project)) for path in getattr(changes, kind)] for kind in ("added", "modified", "deleted")}


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else stamp(seconds)


def _base(base: dict[str, Any]) -> dict[str, Any]:
    shown = {key: base[key] for key in _BASE if key in base}
    for key in ("unsettled", "left_out"):
        if key in shown:
            shown[key] = [name(path) for path in shown[key]]
    return {**shown, "at": _time(base["at"])}


def sandbox_document(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "state": record.state,
        "base": _base(record.base),
        "view": record.confinement.get("view", "machine"),
        "project": name(record.project),
        "created_at": stamp(record.created_at),
        "ended_at": _time(record.ended_at),
        "expires_at": _time(record.expires_at),
        "limits": record.limits,
        "network": record.confinement.get("network", "host"),
        "confinement": _confinement(record.confinement),
        "settings_ignored": record.ignored,
        "identity": record.identity,
        "labels": record.labels,
        "kept": record.kept,
        "lost": record.lost,
        "enforced": record.enforced,
    }


def usage_document(found: Usage | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "memory_bytes": found.memory_bytes,
        "memory_peak_bytes": found.memory_peak_bytes,
        "cpu_ms": None if found.cpu_s is None else round(found.cpu_s * 1000, 3),
        "processes": found.processes,
        "processes_peak": found.processes_peak,
        "disk_bytes": found.disk_bytes,
        "written_bytes": found.written_bytes,
    }


def top_document(found: Top) -> dict[str, Any]:
    return {
        "sandboxes": [
            {
                "id": record.id,
                "name": record.name,
                "project": name(record.project),
                "limits": record.limits,
                "usage": usage_document(usage),
            }
            for record, usage in found.running
        ],
        "waiting": _waiting(found.waiting),
    }


def _waiting(found: Iterable[Claim]) -> list[dict[str, Any]]:
    return [{"since": stamp(claim.since), "memory": claim.memory, "cpus": claim.cpus} for claim in found]


def denials_document(record: Record, requests: Iterable[Request]) -> list[dict[str, Any]]:
    """What the commands of a sandbox were refused, as far as the kernel told."""
    return [{"request": one.id, **denial} for one in requests for denial in denials.of_command(record, one.denied)]


def inspect_document(state: State, record: Record, keeping: Keeping | None = None) -> dict[str, Any]:
    return {
        "sandbox": {
            **sandbox_document(record),
            "path": name(state.sandbox(record.id)),
            "project_inside": name(contents.project_path(state, record)),
            "plan": [{"target": name(target), "what": words} for target, words in record.plan],
            "environment": {"left_out": record.environment_left_out},
            "command": record.command,
            "version": record.version,
            "usage": usage_document(usage_of(state, record)),
            "denials": denials_document(record, Journal(state.sandbox(record.id)).read().changed),
            "drift": _glance(record, drifting.glance(state, record)),
            "keeper": keeping and {"pid": keeping.pid, "version": keeping.version, "skew": keeping.skew},
        }
    }


def _confinement(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "nested": found.get("nested", False),
        "hide": [name(path) for path in found.get("hide", [])],
        "shares": [{"path": name(path), "writable": writable} for path, writable in found.get("shares", [])],
        "devices": found.get("devices", []),
    }


def _outcome(outcome: Outcome, record: Record, argv: Iterable[str]) -> dict[str, Any]:
    return {
        "sandboxed": True,
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "signal": outcome.signal or None,
        "duration_ms": round(outcome.duration * 1000, 3),
        "stdout": outcome.stdout.decode("utf-8", "replace"),
        "stderr": outcome.stderr.decode("utf-8", "replace"),
        "stdout_truncated": outcome.stdout_truncated,
        "stderr_truncated": outcome.stderr_truncated,
        "denials": denials.of_command(record, outcome.denied, argv, outcome.stderr),
        "usage": {
            "user_ms": round(outcome.user_s * 1000, 3),
            "system_ms": round(outcome.system_s * 1000, 3),
            "max_rss_kib": outcome.max_rss_kib,
            "cpu_ms": None if outcome.cpu_s is None else round(outcome.cpu_s * 1000, 3),
            "memory_peak_bytes": outcome.memory_peak,
            "processes_peak": outcome.processes_peak,
            "written_bytes": outcome.written,
        },
    }


def run_document(result: RunResult) -> dict[str, Any]:
    return {
        "sandbox": sandbox_document(result.record),
        "command": _outcome(result.outcome, result.record, result.argv),
        "changes": changes_document(result.changes, result.record.project),
        "timings": {"create_ms": round(result.create_s * 1000, 3)},
    }


def exec_document(result: ExecResult) -> dict[str, Any]:
    """A detached command has no outcome yet: it has a number, and files to which it writes."""
    about = {"request": result.request.id, "pid": result.pid, "outputs": result.request.outputs}
    return {
        "sandbox": sandbox_document(result.record),
        "command": {
            **about,
            **(_outcome(result.outcome, result.record, result.request.argv) if result.outcome is not None else {}),
        },
        "changes": None if result.changes is None else changes_document(result.changes, result.record.project),
        "drift": _glance(result.record, result.drift),
    }


def drift_document(record: Record, found: Drift) -> dict[str, Any]:
    return {
        "sandbox": {"id": record.id},
        "drift": {
            "age_s": round(found.age_s, 3),
            "base": {"kind": found.kind, "at": _time(record.base["at"]), "head": found.base_head},
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


def _glance(record: Record, found: Drift | None) -> dict[str, Any] | None:
    """Drift as far as it can be told without looking at the whole project."""
    if found is None:
        return None
    whole = drift_document(record, found)["drift"]
    return {key: whole[key] for key in ("age_s", "behind_commits", "overlapping", "summary")}


def list_document(listing: Listing) -> dict[str, Any]:
    return {
        "sandboxes": [
            {**sandbox_document(record), "usage": usage_document(listing.usage.get(record.id))} for record in listing.records
        ],
        "total": listing.total,
        "waiting": _waiting(listing.waiting),
        "healed": listing.healed,
        "broken": listing.broken,
    }


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
        "base": _base(found.record.base),
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


def removal_document(removal: Removal) -> dict[str, Any]:
    return {
        "matched": removal.matched,
        "removed": removal.removed,
        "skipped": removal.skipped,
        "archived": removal.archived,
        "healed": removal.healed,
        "dry_run": False,
    }


def processes_document(record: Record, found: list[Process]) -> dict[str, Any]:
    return {
        "sandbox": {"id": record.id, "state": record.state},
        "processes": [
            {
                "pid": one.pid,
                "parent": one.parent,
                "state": one.state,
                "cpu_ms": one.cpu_ticks * 1000 // os.sysconf("SC_CLK_TCK"),
                "rss_kib": one.rss_kib,
                "request": one.request,
                "command": name(one.command),
            }
            for one in found
        ],
    }


def _usage(found: dict[str, float]) -> dict[str, float | None]:
    if not found:
        return {}
    return {
        "user_ms": round(found["user_s"] * 1000, 3),
        "system_ms": round(found["system_s"] * 1000, 3),
        "max_rss_kib": int(found["max_rss_kib"]),
        "cpu_ms": round(found["cpu_s"] * 1000, 3) if "cpu_s" in found else None,
        **{key: int(found[key]) if key in found else None for key in ("memory_peak_bytes", "processes_peak", "written_bytes")},
    }


def requests_document(found: list[Request]) -> dict[str, Any]:
    return {
        "requests": [
            {
                "id": one.id,
                "sandbox": one.sandbox or None,
                "kind": one.kind,
                "argv": [name(word) for word in one.argv],
                "state": one.state,
                "reason": one.reason or None,
                "exit_code": one.exit_code,
                "signal": one.signal,
                "created_at": stamp(one.created_at),
                "started_at": _time(one.started_at),
                "ended_at": _time(one.ended_at),
                "detached": one.detached,
                "pid": one.pid,
                "usage": _usage(one.usage),
                "outputs": one.outputs,
            }
            for one in found
        ]
    }


def cp_document(record: Record, done: Transferred) -> dict[str, Any]:
    left_out = [{"path": name(one.path), "why": one.why} for one in done.left_out]
    return {"sandbox": {"id": record.id}, "files": done.files, "bytes": done.bytes, "left_out": left_out}


def open_document(record: Record, path: str) -> dict[str, Any]:
    return {"sandbox": {"id": record.id}, "path": name(path)}


def version_document() -> dict[str, Any]:
    return {"version": __version__, "schema": SCHEMA, "capabilities": CAPABILITIES}


def config_document(found: Setup) -> dict[str, Any]:
    return {
        "settings": [
            {"key": key, "value": _named(found.value(key)), "source": found.resolved.values[key].source} for key in found.shown
        ],
        "ignored": [_ignored_document(one) for one in found.ignored()],
        "files": {"project": _named(found.project_file), "user": _named(found.user_file)},
        "trusted": found.trusted,
    }


def trust_document(found: list[Trust]) -> dict[str, Any]:
    return {
        "projects": [
            {
                "project": name(one.project),
                "sha256": one.sha256,
                "at": stamp(one.at),
                "trusted": one.holds,
                "widens": [_ignored_document(wide) for wide in one.widens],
            }
            for one in found
        ]
    }


def _ignored_document(one: Ignored) -> dict[str, Any]:
    return {"key": one.key, "value": _named(one.value), "why": one.why}


def _named(value: Any) -> Any:
    """Text may be a path."""
    if isinstance(value, tuple):
        return [name(item) for item in value]
    return name(value) if isinstance(value, str) else value


def _snapshot(found: Record, one: dict[str, Any], size: int | None) -> dict[str, Any]:
    return {
        "name": one["name"],
        "parent": one.get("parent"),
        "created_at": _time(one.get("created_at")),
        "bytes": size,
        "copied": one.get("copied", False),
        "current": one["name"] == (found.at or kept.BASE),
    }


def snapshot_document(taken: Taken) -> dict[str, Any]:
    return {
        "snapshot": _snapshot(taken.record, taken.snapshot, taken.bytes),
        "sandbox": {"id": taken.record.id},
        "processes_left_running": taken.stopped or 0,
    }


def snapshots_document(found: Record, sizes: Mapping[str, int | None]) -> dict[str, Any]:
    listed = [_snapshot(found, one, sizes.get(one["name"])) for one in found.snapshots]
    return {"snapshots": listed, "sandbox": {"id": found.id}, "current": found.at}


def rollback_document(returned: Returned) -> dict[str, Any]:
    return {
        "snapshot": _snapshot(returned.record, returned.snapshot, None),
        "sandbox": {"id": returned.record.id},
        "saved_as": returned.left,
    }


def fork_document(forked: Forked) -> dict[str, Any]:
    made = [
        child.document() if isinstance(child, ElsewhereError) else {**sandbox_document(child), "origin": child.origin}
        for child in forked.children
    ]
    return {"sandboxes": made, "processes_left_running": forked.stopped or 0}
