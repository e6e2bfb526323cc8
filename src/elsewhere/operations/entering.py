"""Entering a sandbox that is there: started if it is only directories, when there is room for it."""

import time
from collections.abc import Callable

from elsewhere.operations import admission
from elsewhere.operations.admission import Pause
from elsewhere.sandbox import live
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.records import record
from elsewhere.storage.state import State

__all__ = ["enter"]


def enter(state: State, wanted: str, tell: Callable[[str], None] | None = None, pause: Pause = time.sleep) -> Live:
    return live.enter(state, record.find(state, wanted), lambda found: admission.readmitted(state, found, tell, pause))
