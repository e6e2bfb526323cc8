"""Unix sockets of the host that are forwarded: which of them never are, and how one is connected to.

A path is resolved once, when somebody asks for it (`operations/reach.py`), and from then on no link is followed on the way: who
could put a link there could choose any socket of the host. Both sides ask `why_refused`: whoever accepts a forward, and the
network service before each connection.
"""

import errno
import os
import socket
import stat
from collections.abc import Iterable

from elsewhere.linux import syscalls
from elsewhere.paths import is_within

__all__ = ["ENGINE_SOCKETS", "connect", "why_refused"]

ENGINE_SOCKETS = ("docker.sock", "podman.sock", "containerd.sock", "crio.sock")

_KERNELS = ("/proc", "/sys", "/dev")
_AT_FDCWD = -100
_LOOKUP = syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS


def why_refused(path: str, state: str, writable: Iterable[str] = ()) -> tuple[str, str]:
    """Why this socket must not be reached from inside, and what to do instead; empty if it may. `state` is elsewhere's own
    directory, `writable` are the places of reality in which the sandbox may write."""
    if os.path.basename(path) in ENGINE_SOCKETS:
        return (
            "the socket of a container engine leads out of the sandbox",
            "whoever can talk to the engine is root on the host: run its commands outside",
        )
    if is_within(path, state):
        return "elsewhere's own state lies there", "name another socket"
    for place in _KERNELS:
        if is_within(path, place):
            return f"{place} is the kernel's, and the sandbox has its own", "name a socket of a service"
    for place in writable:
        if is_within(path, place):
            return (
                f"it lies in {place!r}, where the sandbox may write in reality, and could choose where it leads",
                "share that place without :rw, or have the service listen in another directory",
            )
    return "", ""


def connect(path: str) -> socket.socket:
    """A connection to exactly what lies there; OSError if there is none to be had."""
    place = syscalls.openat2(_AT_FDCWD, path, os.O_PATH, _LOOKUP)
    try:
        if not stat.S_ISSOCK(os.fstat(place).st_mode):
            raise OSError(errno.ENOTSOCK, "it is no socket")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(f"/proc/self/fd/{place}")
        except BaseException:
            sock.close()
            raise
        return sock
    finally:
        os.close(place)
