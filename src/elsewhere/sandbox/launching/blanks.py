"""A blank: a builder and a keeper that wait, as the launcher sees them (see `builder.py`)."""

import errno
import os
import pickle
import socket
from dataclasses import field
from typing import Any

from elsewhere.linux import cgroups
from elsewhere.linux.mounts import Plan
from elsewhere.sandbox.keeping import wire
from elsewhere.values import dataclass

__all__ = ["PATIENCE_S", "Blank", "BuildFailed", "Groups", "Kind", "ask", "unborn"]

PATIENCE_S = 20.0
_MOVED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ESTALE)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a blank is sealed for, and cannot be changed to later. `network`: as in `confinement.py`."""

    whole_machine: bool
    network: str = "host"
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Groups:
    """Where a group can be made, and what the next one is called."""

    host: cgroups.Host
    name: str


class BuildFailed(Exception):
    """What could not be done here: the step, and the kernel's answer. An accident says nothing about what this host allows. Where
    the kernel gave no answer, somebody was killed: that may be an accident, and is worth a second attempt. What passes is a path
    that somebody changed between the drawing of a view and the making of its mounts."""

    def __init__(self, step: str, number: int, text: str) -> None:
        super().__init__(f"{step}: {text}")
        self.step = step
        self.errno = number
        self.accident = step == "builder" or number in (errno.EAGAIN, errno.ENOMEM)
        self.again = self.accident or number in (0, errno.ESRCH)
        self.passing = step in ("directories", "mounts") and number in _MOVED


@dataclass(slots=True)
class Blank:
    """A builder and a keeper that wait, or are about to. `mount_namespace` keeps their mounts for as long as it is open, `ports`
    their network."""

    control: socket.socket
    orders: socket.socket
    builder_pid: int = 0
    keeper_pid: int = 0
    mount_namespace: int = -1
    ports: dict[str, int] = field(default_factory=dict)
    sealed: dict[str, Any] = field(default_factory=dict)

    def ready(self) -> None:
        """Wait until both are."""
        if not self.keeper_pid:
            message, fds = ask(self.orders)
            if message[0] != "ready":
                raise BuildFailed(*message[1:])
            self.keeper_pid, self.mount_namespace, self.sealed = message[1], fds[0], message[2]
            self.ports = dict(zip(message[3], fds[1:], strict=True))

    def is_ready(self) -> bool:
        """Whether `ready` would return at once."""
        return bool(self.keeper_pid or wire.readable(self.orders))

    def is_built(self) -> bool:
        """Whether `built` would return at once."""
        return wire.readable(self.orders)

    def order(self, plan: Plan, directory: str, *, memory: int = 0, image: int = -1) -> None:
        """Make a sandbox of it, with its layers in memory or in an image if one of these is given. Returns at once; `built`
        waits."""
        self.ready()
        wire.send(self.orders, (pickle.dumps(plan), directory, memory), [image] if image >= 0 else [])

    def built(self) -> tuple[dict[str, str], int, int]:
        """What had to be weaker than planned, a descriptor by which the sandbox's directory can be looked at, and one of the
        layers where they do not lie in it."""
        message, fds = ask(self.orders)
        self.orders.close()
        if message[0] != "built":
            raise BuildFailed(*message[1:])
        return message[1], fds[0], fds[1] if len(fds) > 1 else -1

    def discard(self) -> None:
        self.control.close()
        self.orders.close()
        for fd in (self.mount_namespace, *self.ports.values()):
            if fd >= 0:
                os.close(fd)
        self.mount_namespace, self.ports = -1, {}


def unborn() -> tuple[Blank, list[socket.socket]]:
    """A blank whose processes somebody else is about to fork, and their ends: the keeper's and the builder's."""
    control, keeper_end = wire.pair()
    orders, builder_end = wire.pair()
    orders.settimeout(PATIENCE_S)
    return Blank(control, orders), [keeper_end, builder_end]


def ask(orders: socket.socket) -> tuple[Any, list[int]]:
    try:
        return wire.receive(orders)
    except (EOFError, OSError) as error:
        raise BuildFailed("builder", getattr(error, "errno", 0) or 0, f"the builder ended without an answer ({error})") from error
