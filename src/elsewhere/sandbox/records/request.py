"""A request: one asked-for piece of work, and the states that it goes through.

    pending | creating ─► running ─► completed    exited with 0
             └───────────────┴─────► cancelled    cancelled, or killed after a cancel
                             └─────► failed       every other reason

Not here: where requests are written down (see `journal.py`) and listed (see `registry.py`).
"""

import functools
import os
import secrets
from collections.abc import Iterable
from dataclasses import field, replace
from typing import Any, NamedTuple, TypeGuard

from elsewhere.values import dataclass

__all__ = [
    "DENIAL_KINDS",
    "KINDS",
    "REASONS",
    "TERMINAL",
    "UNFINISHED",
    "Caller",
    "Denied",
    "Request",
    "is_request_id",
    "new_request_id",
    "parse_denied",
    "state_of",
]

KINDS = ("run", "exec", "shell")
UNFINISHED = ("pending", "creating", "running", "completing")
TERMINAL = ("completed", "failed", "cancelled")
REASONS = ("exited", "signaled", "timeout", "memory", "disk", "pids", "killed", "cancelled", "expired", "refused", "lost")

DENIAL_KINDS = ("path", "syscall", "limit", "policy", "device", "network")

_HEX = frozenset("0123456789abcdef")
_LONGEST_DENIAL = 400
_OF_NAMES = {ord("_"): "a"}
_OF_HOSTS = dict.fromkeys(map(ord, "_-./:*[]"), "a")


@dataclass(frozen=True, slots=True)
class Denied:
    """Something that a command was refused, so many times: `kind` is syscall, device, policy, limit or network; `what`
    is its name, or HOST/PORT/ADDRESS, with the address if that was why; or HOST/PORT/UNUSABLE/WHICH, if the host's proxy was
    (`network/upstream.py`)."""

    kind: str
    what: str
    count: int


def parse_denied(words: Iterable[str]) -> tuple[Denied, ...]:
    """KIND:WHAT:COUNT each, as a keeper says it: nonsense is passed over."""
    found = []
    for word in words:
        kind, _, rest = word.partition(":")
        what, _, count = rest.rpartition(":")
        letters = what.translate(_OF_HOSTS if kind == "network" else _OF_NAMES)
        if kind in DENIAL_KINDS and what.isascii() and letters.isalnum() and count.isdecimal() and len(word) < _LONGEST_DENIAL:
            found.append(Denied(kind, what, int(count)))
    return tuple(found)


class Caller(NamedTuple):
    """A process, told from any other that had or will have its number."""

    pid: int
    started: int
    boot: str

    @staticmethod
    def this() -> "Caller":
        return _this(os.getpid())

    @staticmethod
    def of(pid: int) -> "Caller":
        return Caller(pid, _start_ticks(pid), _boot())

    def is_alive(self) -> bool:
        return self.boot == _boot() and self.started >= 0 and self.started == _start_ticks(self.pid)


@dataclass(frozen=True, slots=True)
class Request:
    """One asked-for piece of work. `reason` of an unfinished one is `cancelled` once its end was asked for, else empty."""

    id: str
    sandbox: str
    kind: str
    argv: tuple[str, ...]
    state: str
    created_at: float
    cwd: str = ""
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    usage: dict[str, float] = field(default_factory=dict)
    denied: tuple[Denied, ...] = ()
    outputs: dict[str, str | None] = field(default_factory=dict)
    detached: bool = False
    timeout: float | None = None
    pid: int | None = None
    caller: Caller | None = None

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL

    def ended(self, reason: str, at: float, **more: Any) -> "Request":
        """The same request after its end; one that is over already stays as it is."""
        if self.is_over:
            return self
        if self.reason == "cancelled" and reason in ("killed", "signaled"):
            reason = "cancelled"
        return replace(self, state=state_of(reason, more.get("exit_code")), reason=reason, ended_at=at, **more)


def new_request_id() -> str:
    return f"r-{secrets.token_hex(8)}"


def state_of(reason: str, exit_code: int | None) -> str:
    if reason == "cancelled":
        return "cancelled"
    return "completed" if reason == "exited" and exit_code == 0 else "failed"


def is_request_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) == 18 and value.startswith("r-") and _HEX.issuperset(value[2:])


@functools.cache
def _this(pid: int) -> Caller:
    return Caller(pid, _start_ticks(pid), _boot())


def _start_ticks(pid: int) -> int:
    """When a process began, in ticks since boot; -1 if there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            words = stream.read().rpartition(b")")[2].split()
        return -1 if words[0] in (b"Z", b"X") else int(words[19])
    except (OSError, IndexError, ValueError):
        return -1


@functools.cache
def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""
