"""Commands: what ran, runs, was asked for, was refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from elsewhere.clock import stamp
from elsewhere.operations.documents.changes import changes_document, glance_document
from elsewhere.operations.documents.common import moment, name
from elsewhere.operations.documents.sandboxes import sandbox_document
from elsewhere.sandbox import denials

if TYPE_CHECKING:  # whoever has a result has loaded what made it
    from elsewhere.operations.executing import ExecResult
    from elsewhere.operations.running import RunResult
    from elsewhere.sandbox.keeping.commands import Outcome
    from elsewhere.sandbox.keeping.line import Process
    from elsewhere.sandbox.records.record import Record
    from elsewhere.sandbox.records.request import Request

__all__ = ["denials_document", "exec_document", "processes_document", "requests_document", "run_document"]


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
        "drift": glance_document(result.record, result.drift),
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


def denials_document(record: Record, requests: Iterable[Request]) -> list[dict[str, Any]]:
    """What the commands of a sandbox were refused, as far as the kernel told."""
    return [{"request": one.id, **denial} for one in requests for denial in denials.of_command(record, one.denied)]


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
                "started_at": moment(one.started_at),
                "ended_at": moment(one.ended_at),
                "detached": one.detached,
                "pid": one.pid,
                "usage": _usage(one.usage),
                "outputs": one.outputs,
            }
            for one in found
        ]
    }
