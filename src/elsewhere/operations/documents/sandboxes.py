"""Sandboxes: what each is, all of them, what they use and reach, their states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from elsewhere.clock import stamp
from elsewhere.errors import ElsewhereError
from elsewhere.operations.documents.common import moment, name
from elsewhere.sandbox.snapshots import BASE

if TYPE_CHECKING:  # whoever has a result has loaded what made it
    from elsewhere.operations.admission import Claim
    from elsewhere.operations.networking import Network
    from elsewhere.operations.sandboxes import Listing, Removal
    from elsewhere.operations.snapshots import Forked, Returned, Taken
    from elsewhere.operations.usage import Top
    from elsewhere.sandbox.access.transfer import Transferred
    from elsewhere.sandbox.keeping.line import Usage
    from elsewhere.sandbox.records.record import Record

__all__ = [
    "base_document",
    "cp_document",
    "fork_document",
    "list_document",
    "network_document",
    "open_document",
    "removal_document",
    "rollback_document",
    "sandbox_document",
    "snapshot_document",
    "snapshots_document",
    "top_document",
    "usage_document",
]

_REACH = ("allow", "deny", "presets", "forward", "publish")
_BASE = ("kind", "head", "ref", "files", "bytes", "copied_files", "unsettled", "left_out", "manifest")


def sandbox_document(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "state": record.state,
        "base": base_document(record.base),
        "view": record.confinement.get("view", "machine"),
        "project": name(record.project),
        "created_at": stamp(record.created_at),
        "ended_at": moment(record.ended_at),
        "expires_at": moment(record.expires_at),
        "limits": record.limits,
        "network": record.confinement.get("network", "host"),
        "reach": {kind: record.network.get(kind, []) for kind in _REACH},
        "confinement": _confinement(record.confinement),
        "settings_ignored": record.ignored,
        "identity": record.identity,
        "labels": record.labels,
        "kept": record.kept,
        "lost": record.lost,
        "enforced": record.enforced,
    }


def base_document(base: dict[str, Any]) -> dict[str, Any]:
    shown = {key: base[key] for key in _BASE if key in base}
    for key in ("unsettled", "left_out"):
        if key in shown:
            shown[key] = [name(path) for path in shown[key]]
    return {**shown, "at": moment(base["at"])}


def _confinement(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "nested": found.get("nested", False),
        "hide": [name(path) for path in found.get("hide", [])],
        "shares": [{"path": name(path), "writable": writable} for path, writable in found.get("shares", [])],
        "copies": [name(path) for path in found.get("copies", [])],
        "variables": found.get("variables", []),
        "profiles": found.get("profiles", []),
        "devices": found.get("devices", []),
    }


def network_document(found: Network) -> dict[str, Any]:
    return {
        "sandbox": found.record.id,
        "network": found.mode,
        "reach": {kind: found.record.network.get(kind, []) for kind in _REACH},
        "machine": found.machine,
        "proxy": found.proxy,
        "trouble": found.trouble,
        "published": found.published,
        "connections": found.connections,
        "ended": found.ended,
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
        "denials": found.denials,
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


def removal_document(removal: Removal) -> dict[str, Any]:
    return {
        "matched": removal.matched,
        "removed": removal.removed,
        "skipped": removal.skipped,
        "archived": removal.archived,
        "healed": removal.healed,
        "dry_run": False,
    }


def cp_document(record: Record, done: Transferred) -> dict[str, Any]:
    left_out = [{"path": name(one.path), "why": one.why} for one in done.left_out]
    return {"sandbox": {"id": record.id}, "files": done.files, "bytes": done.bytes, "left_out": left_out}


def open_document(record: Record, path: str) -> dict[str, Any]:
    return {"sandbox": {"id": record.id}, "path": name(path)}


def snapshot_document(taken: Taken) -> dict[str, Any]:
    return {
        "snapshot": _snapshot(taken.record, taken.snapshot, taken.bytes),
        "sandbox": {"id": taken.record.id},
        "processes_left_running": taken.stopped or 0,
    }


def snapshots_document(found: Record, sizes: Mapping[str, int | None]) -> dict[str, Any]:
    listed = [_snapshot(found, one, sizes.get(one["name"])) for one in found.snapshots]
    return {"snapshots": listed, "sandbox": {"id": found.id}, "current": found.at}


def _snapshot(found: Record, one: dict[str, Any], size: int | None) -> dict[str, Any]:
    return {
        "name": one["name"],
        "parent": one.get("parent"),
        "created_at": moment(one.get("created_at")),
        "bytes": size,
        "copied": one.get("copied", False),
        "current": one["name"] == (found.at or BASE),
    }


def rollback_document(returned: Returned) -> dict[str, Any]:
    return {
        "snapshot": _snapshot(returned.record, returned.snapshot, None),
        "sandbox": {"id": returned.record.id},
        "saved_as": returned.left,
    }


def fork_document(forked: Forked) -> dict[str, Any]:
    made = [
        child.document() if isinstance(child, ElsewhereError) else {**sandbox_document(child), "origin": _origin(child)}
        for child in forked.children
    ]
    return {"sandboxes": made, "processes_left_running": forked.stopped or 0}


def _origin(child: Record) -> dict[str, Any]:
    origin = child.origin or {}
    return {"sandbox": origin.get("sandbox"), "snapshot": origin.get("snapshot")}
