"""The public Python face: `Sandbox`, what a command in it gives back, its files, and the errors.

Races and searches are loaded when they are first used: most programs have neither.
"""

import importlib

from elsewhere.changes.drift import Drift
from elsewhere.changes.installed import Package
from elsewhere.changes.model import Change, Changes, Side
from elsewhere.changes.patch import FileStat
from elsewhere.errors import CheckFailed, Conflict, ElsewhereError
from elsewhere.limits import Limits
from elsewhere.sandbox.keeping.line import Usage
from elsewhere.sdk.background import Background
from elsewhere.sdk.files import Entry, SandboxFiles, Transferred
from elsewhere.sdk.promotion import Promotion, promotions, undo
from elsewhere.sdk.results import CommandFailed, CommandResult, CommandUsage, Denial
from elsewhere.sdk.sandbox import Sandbox, SandboxInfo
from elsewhere.sdk.snapshots import Snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elsewhere.sdk.exploring import Budget, Node, Tree, explore
    from elsewhere.sdk.racing import Approach, Experiment, NoWinner, Result, race

__all__ = [
    "Approach",
    "Background",
    "Budget",
    "Change",
    "Changes",
    "CheckFailed",
    "CommandFailed",
    "CommandResult",
    "CommandUsage",
    "Conflict",
    "Denial",
    "Drift",
    "ElsewhereError",
    "Entry",
    "Experiment",
    "FileStat",
    "Limits",
    "NoWinner",
    "Node",
    "Package",
    "Promotion",
    "Result",
    "Sandbox",
    "SandboxFiles",
    "SandboxInfo",
    "Side",
    "Snapshot",
    "Transferred",
    "Tree",
    "Usage",
    "explore",
    "promotions",
    "race",
    "undo",
]

_LATER = {
    **dict.fromkeys(("Budget", "Node", "Tree", "explore"), "elsewhere.sdk.exploring"),
    **dict.fromkeys(("Approach", "Experiment", "NoWinner", "Result", "race"), "elsewhere.sdk.racing"),
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'elsewhere.sdk' has no attribute {name!r}")
