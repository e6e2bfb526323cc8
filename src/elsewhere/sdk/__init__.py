"""The public Python face: `Sandbox`, what a command in it gives back, and the errors."""

from elsewhere.errors import ElsewhereError
from elsewhere.sdk.sandbox import CommandResult, Sandbox

__all__ = ["CommandResult", "ElsewhereError", "Sandbox"]
