"""Limits: what a sandbox may use up, as it is asked for. Not here: what enforces them (`sandbox/enforcement.py`).

memory       bytes of all its processes and its files in memory    512M, 2G, 50% (of the machine's)
cpus         processors' worth of time                             1, 0.5
pids         processes and threads at once                         256
disk         bytes of everything that it writes, all layers        1G
open_files   descriptors of one process                            1024
timeout      of one command                                        5m
ttl          of the sandbox, from its creation                     30m
idle         of the sandbox, from the end of its last command      10m
"""

import os
from collections.abc import Callable
from dataclasses import fields, replace

from elsewhere import units
from elsewhere.errors import UsageError
from elsewhere.values import dataclass

__all__ = ["DEFAULTS", "LIVING", "NAMES", "UNTRUSTED", "Limits", "parse"]

_LEAST_MEMORY = 16 << 20
_LEAST_DISK = 8 << 20
_LEAST_FILES = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Human values are understood (`"2G"`, `"30m"`, `"50%"`) and kept as numbers: bytes, seconds, counts. None: no limit."""

    memory: str | int | None = None
    cpus: str | float | None = None
    pids: str | int | None = None
    disk: str | int | None = None
    open_files: str | int | None = None
    timeout: str | float | None = None
    ttl: str | float | None = None
    idle: str | float | None = None

    def __post_init__(self) -> None:
        for name in NAMES:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse(name, value))

    def given(self) -> dict[str, int | float]:
        """Those that are limited, as numbers."""
        return {name: getattr(self, name) for name in NAMES if getattr(self, name) is not None}


def parse(name: str, value: object) -> int | float:
    """One limit as a number; an error names the value and what was expected."""
    if units.is_huge(value):
        raise _bad(name, value, "it is too large")
    return _PARSERS[name](name, value)


def _memory(name: str, value: object) -> int:
    text = value.strip() if isinstance(value, str) else ""
    if text.endswith("%"):
        share = _number(name, text[:-1], "write a size such as 512M, or a share of the machine's memory such as 50%")
        if not 0 < share <= 100:
            raise _bad(name, value, "a share lies between 1% and 100%")
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * share / 100)
    return _at_least(name, value, _LEAST_MEMORY)


def _disk(name: str, value: object) -> int:
    return _at_least(name, value, _LEAST_DISK)


def _at_least(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _bad(name, value, "write a size such as 512M or 2G")
    try:
        found = units.size(value)
    except UsageError as error:
        raise _bad(name, value, error.hint) from None
    if not least <= found < 1 << 60:
        raise _bad(name, value, f"at least {units.format_size(least)}, and less than 1 EiB")
    return found


def _cpus(name: str, value: object) -> float:
    found = _number(name, value, "write a number of processors such as 1, 0.5 or 4")
    if not 0.01 <= found <= 10_000:
        raise _bad(name, value, "between 0.01 and 10000")
    return found


def _pids(name: str, value: object) -> int:
    return _count(name, value, 1)


def _open_files(name: str, value: object) -> int:
    return _count(name, value, _LEAST_FILES)


def _count(name: str, value: object, least: int) -> int:
    found = _number(name, value, "write a whole number")
    if found != int(found) or not least <= found <= 1 << 22:
        raise _bad(name, value, f"a whole number between {least} and {1 << 22}")
    return int(found)


def _duration(name: str, value: object) -> float:
    if not isinstance(value, str | int | float):
        raise _bad(name, value, "write a duration such as 90s, 15m or 1h30m")
    try:
        return units.duration(value)
    except UsageError as error:
        raise _bad(name, value, error.hint) from None


def _number(name: str, value: object, hint: str) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        found = float(value)
    except ValueError:
        raise _bad(name, value, hint) from None
    if found != found or found in (float("inf"), float("-inf")):
        raise _bad(name, value, hint)
    return found


def _bad(name: str, value: object, hint: str) -> UsageError:
    return UsageError("bad_limit", f"{units.brief(value)} is no limit for {name}", hint=hint)


_PARSERS: dict[str, Callable[[str, object], int | float]] = {
    "memory": _memory,
    "cpus": _cpus,
    "pids": _pids,
    "disk": _disk,
    "open_files": _open_files,
    "timeout": _duration,
    "ttl": _duration,
    "idle": _duration,
}
NAMES = tuple(item.name for item in fields(Limits))
DEFAULTS = Limits(memory="80%", pids=4096, disk="20G")
LIVING = replace(DEFAULTS, ttl="24h")  # of what is created to stay
UNTRUSTED = Limits(memory="2G", cpus=1, pids=256, disk="2G", open_files=1024, timeout="10m", ttl="1h")
