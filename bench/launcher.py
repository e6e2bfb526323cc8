"""The launcher of this run's own state directory: its process, the keepers under it, and its end.

Keepers cannot be asked who they are, and an ordinary user cannot read their environment (they are not dumpable), so they are
found by descent from the launcher, which the kernel names as the other side of its socket. There may be more than one launcher:
the name of the socket changes with the code, and somebody may be editing it while we measure.
"""

import contextlib
import os
import signal
import socket
import struct
import time

from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching.engine import connect

__all__ = ["family", "keepers", "launchers", "stop"]

_PATIENCE_S = 10.0


def launchers(state: str) -> list[int]:
    """The processes that listen in `state`."""
    found = []
    for sock in _connections(state):
        with sock:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        found.append(int(struct.unpack("3i", credentials)[0]))
    return found


def keepers(state: str) -> list[int]:
    """Pid 1 of each sandbox that stands. Blanks still have their builder between them and the launcher."""
    parents = launchers(state)
    return [pid for pid, (parent, is_init) in _processes().items() if parent in parents and is_init]


def family(state: str) -> list[int]:
    """Every process that serves `state`: whoever carries it in its environment, and all descendants."""
    table = _processes()
    wanted = {pid for pid in table if pid != os.getpid() and _serves(pid, state)}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in table.items() if parent in wanted} - wanted
        wanted |= more
        grown = bool(more)
    return sorted(wanted)


def stop(state: str) -> list[int]:
    """End the launcher and wait until nothing of it is left; what had to be killed, which is a fault of the product."""
    deadline = time.monotonic() + _PATIENCE_S
    known: set[int] = set()
    while time.monotonic() < deadline:
        known |= set(family(state))
        left = [pid for pid in known if _alive(pid)]
        if not left:
            return []
        # Again and again: one that is only just starting does not listen yet.
        for sock in _connections(state):
            with sock, contextlib.suppress(OSError):
                wire.send(sock, ("stop",))
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return left


def _connections(state: str) -> list[socket.socket]:
    try:
        names = [name for name in os.listdir(os.path.join(state, "run")) if "." not in name]
    except FileNotFoundError:
        return []
    return [sock for sock in (connect(state, name) for name in names) if sock is not None]


def _processes() -> dict[int, tuple[int, bool]]:
    """Parent of every process in sight, and whether it is the first of a process namespace of its own."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = {}
        with contextlib.suppress(OSError), open(f"/proc/{name}/status", encoding="ascii", errors="replace") as status:
            fields = dict(line.rstrip("\n").split(":", 1) for line in status if ":" in line)
        numbers = fields.get("NSpid", "").split()
        if "PPid" in fields:
            found[int(name)] = (int(fields["PPid"]), len(numbers) > 1 and numbers[-1] == "1")
    return found


def _serves(pid: int, state: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return os.fsencode(f"ELSEWHERE_HOME={state}") in environ.read().split(b"\0")
    except OSError:
        return False


def _alive(pid: int) -> bool:
    """A zombie has ended, whoever has still to collect it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
