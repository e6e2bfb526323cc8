"""A command as it is asked for: what the keeper is sent to start it, and nothing about how it ended."""

from dataclasses import fields
from typing import Any

from elsewhere.values import dataclass

__all__ = ["PROTOCOL", "Spec"]

PROTOCOL = 2  # of the orders that a keeper understands; `hello` and `finish` stay the same in all of them


@dataclass(frozen=True, slots=True)
class Spec:
    """`request` is the id under which its end is written down. `ends_sandbox`: the sandbox ends with this command, and everything
    in it. `detached`: it goes on when whoever started it is gone. `terminal` is its size, if it is to have one."""

    argv: list[str]
    environment: dict[str, str]
    directory: str
    request: str = ""
    umask: int = 0o022
    timeout: float | None = None
    ends_sandbox: bool = False
    detached: bool = False
    terminal: tuple[int, int] | None = None

    def packed(self) -> dict[str, Any]:
        """Plain values, fit for the wire."""
        return {name: getattr(self, name) for name in _FIELDS}

    @staticmethod
    def unpacked(values: dict[str, Any]) -> "Spec":
        return Spec(**{name: values[name] for name in _FIELDS if name in values})


_FIELDS = tuple(item.name for item in fields(Spec))
