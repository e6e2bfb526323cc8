"""elsewhere itself and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elsewhere import __version__
from elsewhere.clock import stamp
from elsewhere.operations.documents.common import name
from elsewhere.storage.state import SCHEMA

if TYPE_CHECKING:  # whoever has a result has loaded what made it
    from elsewhere.operations.settings import Ignored, Setup, Trust

__all__ = ["CAPABILITIES", "config_document", "trust_document", "version_document"]

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
    "promotion",
    "undo",
    "stages",
    "network",
    "forward",
    "publish",
    "profiles",
    "race",
]


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
