"""A saved state of a sandbox."""

from datetime import UTC, datetime
from typing import Any

from elsewhere.values import dataclass

__all__ = ["Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`parent`: the one that it came from, None: what the sandbox started from. `bytes`: what it takes on the disk beyond that
    one, None where that was not measured yet. `copied`: its files had to be copied, because something ran, or because the rung
    cannot do without."""

    name: str
    parent: str | None
    created_at: datetime
    bytes: int | None
    copied: bool

    @classmethod
    def of(cls, said: dict[str, Any], size: int | None) -> "Snapshot":
        at = datetime.fromtimestamp(said["created_at"], UTC)
        return cls(said["name"], said["parent"], at, size, said["copied"])
