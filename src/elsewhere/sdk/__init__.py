"""The public Python face: `Sandbox`, what a command in it gives back, its files, and the errors."""

from elsewhere.changes.compare import Changes
from elsewhere.errors import ElsewhereError
from elsewhere.limits import Limits
from elsewhere.sandbox.keeping.line import Usage
from elsewhere.sdk.background import Background
from elsewhere.sdk.files import Entry, SandboxFiles, Transferred
from elsewhere.sdk.results import CommandFailed, CommandResult, CommandUsage, Denial
from elsewhere.sdk.sandbox import Sandbox, SandboxInfo

__all__ = [
    "Background",
    "Changes",
    "CommandFailed",
    "CommandResult",
    "CommandUsage",
    "Denial",
    "ElsewhereError",
    "Entry",
    "Limits",
    "Sandbox",
    "SandboxFiles",
    "SandboxInfo",
    "Transferred",
    "Usage",
]
