"""The public Python face: `Sandbox`, what a command in it gives back, its files, and the errors."""

from elsewhere.changes.compare import Changes
from elsewhere.errors import ElsewhereError
from elsewhere.sdk.background import Background
from elsewhere.sdk.files import Entry, SandboxFiles, Transferred
from elsewhere.sdk.results import CommandFailed, CommandResult
from elsewhere.sdk.sandbox import Sandbox, SandboxInfo

__all__ = [
    "Background",
    "Changes",
    "CommandFailed",
    "CommandResult",
    "ElsewhereError",
    "Entry",
    "Sandbox",
    "SandboxFiles",
    "SandboxInfo",
    "Transferred",
]
