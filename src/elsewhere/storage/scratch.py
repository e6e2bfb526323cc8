"""Directories for a moment, in the state directory: what a killed process leaves of them goes with the next tidying up, by the
number of the process that is no more. The system's own place for such things knows nobody who would do that."""

import os
import tempfile

from elsewhere.storage.state import State

__all__ = ["scratch"]


def scratch(state: State, purpose: str) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(dir=state.room("spare"), prefix=f"{os.getpid()}-{purpose}-")
