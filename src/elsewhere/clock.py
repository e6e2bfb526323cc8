"""The one place that reads the clock, so that whatever decides by time can be given another one."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

__all__ = ["Clock", "monotonic", "stamp", "wall"]

Clock = Callable[[], float]

monotonic: Clock = time.monotonic
wall: Clock = time.time


def stamp(seconds: float) -> str:
    """A time as it stands in documents: UTC, milliseconds, `Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
