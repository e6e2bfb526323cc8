"""Everything about one sandbox: what was asked for, what it is, what it uses, what it was refused, how far reality has moved."""

from typing import Any

from elsewhere.operations import drifting
from elsewhere.operations.documents.changes import glance_document
from elsewhere.operations.documents.commands import denials_document
from elsewhere.operations.documents.common import name
from elsewhere.operations.documents.sandboxes import sandbox_document, usage_document
from elsewhere.operations.sandboxes import Keeping
from elsewhere.operations.usage import usage_of
from elsewhere.sandbox import contents
from elsewhere.sandbox.records.journal import Journal
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State

__all__ = ["inspect_document"]


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
            "drift": glance_document(record, drifting.glance(state, record)),
            "keeper": keeping and {"pid": keeping.pid, "version": keeping.version, "skew": keeping.skew},
        }
    }
