"""The public Python face: `Sandbox`, what a command in it gives back, its files, and the errors."""

from elsewhere.changes.drift import Drift
from elsewhere.changes.installed import Package
from elsewhere.changes.model import Change, Changes, Side
from elsewhere.changes.patch import FileStat
from elsewhere.errors import ElsewhereError
from elsewhere.limits import Limits
from elsewhere.sandbox.keeping.line import Usage
from elsewhere.sdk.background import Background
from elsewhere.sdk.files import Entry, SandboxFiles, Transferred
from elsewhere.sdk.results import CommandFailed, CommandResult, CommandUsage, Denial
from elsewhere.sdk.sandbox import Sandbox, SandboxInfo
from elsewhere.sdk.snapshots import Snapshot

__all__ = [
    "Background",
    "Change",
    "Changes",
    "CommandFailed",
    "CommandResult",
    "CommandUsage",
    "Denial",
    "Drift",
    "ElsewhereError",
    "Entry",
    "FileStat",
    "Limits",
    "Package",
    "Sandbox",
    "SandboxFiles",
    "SandboxInfo",
    "Side",
    "Snapshot",
    "Transferred",
    "Usage",
]
