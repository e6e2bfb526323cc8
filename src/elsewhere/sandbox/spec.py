"""A command as it is asked for: what the keeper is sent to start it, and nothing about how it ended."""

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Spec"]


@dataclass(frozen=True, slots=True)
class Spec:
    """`ends_sandbox`: the sandbox ends with this command, and everything in it. `terminal` is its size, if it is to have one."""

    argv: list[str]
    environment: dict[str, str]
    directory: str
    umask: int = 0o022
    timeout: float | None = None
    ends_sandbox: bool = False
    terminal: tuple[int, int] | None = None

    def packed(self) -> dict[str, Any]:
        """Plain values, fit for the wire; `Spec(**packed)` is the same again."""
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS = tuple(item.name for item in fields(Spec))
