"""The public Python face: `Sandbox`, what a command in it gives back, and the errors."""

from elsewhere.changes.compare import Changes
from elsewhere.errors import ElsewhereError
from elsewhere.sdk.sandbox import CommandFailed, CommandResult, Sandbox

__all__ = ["Changes", "CommandFailed", "CommandResult", "ElsewhereError", "Sandbox"]
