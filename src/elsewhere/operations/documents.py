"""Documents: the one JSON that each verb prints with --json. Names that are not UTF-8 come as an object with their bytes."""

import base64
import os
from typing import Any

from elsewhere import __version__
from elsewhere.changes.compare import Changes
from elsewhere.clock import stamp
from elsewhere.operations.running import RunResult
from elsewhere.operations.sandboxes import Listing, Removal
from elsewhere.sandbox.record import Record
from elsewhere.storage.state import SCHEMA, State

__all__ = [
    "diff_document",
    "inspect_document",
    "list_document",
    "relative",
    "removal_document",
    "run_document",
    "sandbox_document",
    "version_document",
]

CAPABILITIES = ["run", "live-base", "diff-stat", "doctor"]


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


def sandbox_document(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": None,
        "state": record.state,
        "base": {"kind": record.base["kind"], "head": record.base["head"], "at": stamp(record.base["at"])},
        "view": "machine",
        "project": name(record.project),
        "created_at": stamp(record.created_at),
        "ended_at": None if record.ended_at is None else stamp(record.ended_at),
        "expires_at": None,
        "limits": {},
        "network": "host",
        "identity": record.identity,
        "labels": {},
        "lost": record.lost,
        "enforced": record.enforced,
    }


def inspect_document(state: State, record: Record) -> dict[str, Any]:
    return {
        "sandbox": {
            **sandbox_document(record),
            "path": name(state.sandbox(record.id)),
            "plan": [{"target": name(target), "what": words} for target, words in record.plan],
            "environment": {"left_out": record.environment_left_out},
            "command": record.command,
            "version": record.version,
        }
    }


def run_document(result: RunResult) -> dict[str, Any]:
    outcome = result.outcome
    return {
        "sandbox": sandbox_document(result.record),
        "command": {
            "exit_code": outcome.exit_code,
            "reason": outcome.reason,
            "signal": outcome.signal or None,
            "duration_ms": round(outcome.duration * 1000, 3),
            "stdout": outcome.stdout.decode("utf-8", "replace"),
            "stderr": outcome.stderr.decode("utf-8", "replace"),
            "stdout_truncated": outcome.stdout_truncated,
            "stderr_truncated": outcome.stderr_truncated,
            "denials": [],
            "usage": {
                "user_ms": round(outcome.user_s * 1000, 3),
                "system_ms": round(outcome.system_s * 1000, 3),
                "max_rss_kib": outcome.max_rss_kib,
            },
        },
        "changes": changes_document(result.changes, result.record.project),
        "timings": {"create_ms": round(result.create_s * 1000, 3)},
    }


def list_document(listing: Listing) -> dict[str, Any]:
    return {
        "sandboxes": [sandbox_document(record) for record in listing.records],
        "total": len(listing.records),
        "healed": [],
        "broken": listing.broken,
    }


def diff_document(record: Record, changes: Changes) -> dict[str, Any]:
    inside, outside = Changes(), Changes()
    for kind, path in changes:
        getattr(inside if path.startswith(record.project + "/") else outside, kind).append(path)
    return {
        "changes": changes_document(inside, record.project),
        "outside": changes_document(outside, record.project),
        "base": {"kind": record.base["kind"], "head": record.base["head"]},
    }


def removal_document(removal: Removal) -> dict[str, Any]:
    return {
        "matched": removal.matched,
        "removed": removal.removed,
        "skipped": removal.skipped,
        "healed": [],
        "dry_run": False,
    }


def version_document() -> dict[str, Any]:
    return {"version": __version__, "schema": SCHEMA, "capabilities": CAPABILITIES}
