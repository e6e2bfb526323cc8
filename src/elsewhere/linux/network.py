"""A network namespace of its own, from inside it: loopback up, low ports and ping for everybody, and sockets that can be handed
out: whoever accepts on them is outside, whoever connects to them is inside.

    proxy      127.0.0.1:61080   listens for requests to a proxy
    redirect   127.0.0.1:61081   listens for connections that were meant for elsewhere (see `redirect.py`), where that is possible
    names      127.0.0.1:61053   questions about names, likewise

Not here: who accepts, and what they let through.
"""

import contextlib
import fcntl
import socket
import struct

from elsewhere.linux import redirect

__all__ = ["OWN_PORTS", "PROXY_PORT", "open_ports", "prepare", "raise_loopback"]

PROXY_PORT = 61080  # above the ports that the kernel gives away by itself
_REDIRECT_PORT = 61081
_NAMES_PORT = 61053
OWN_PORTS = (_NAMES_PORT, PROXY_PORT, _REDIRECT_PORT)
_BACKLOG = 128  # so many wait if nobody accepts
_SIOCSIFFLAGS = 0x8914
_UP_AND_RUNNING = 0x41
_SETTINGS = {
    "ip_unprivileged_port_start": "0",
    "ping_group_range": "0 2147483647",
}


def prepare() -> None:
    """What is the same in every network, once, for all that are forked."""
    redirect.prepare(_REDIRECT_PORT, _NAMES_PORT)


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP_AND_RUNNING))
    for name, value in _SETTINGS.items():
        # Comforts: a kernel that does not know one of them has a sandbox all the same.
        with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv4/{name}", "w", encoding="ascii") as setting:
            setting.write(value)


def open_ports() -> tuple[dict[str, socket.socket], str]:
    """By their names; and why those of programs that know no proxy are missing, if they are."""
    found = {"proxy": _bound(socket.SOCK_STREAM, PROXY_PORT)}
    try:
        redirect.install(_REDIRECT_PORT, _NAMES_PORT)
    except OSError as error:
        return found, f"no redirection: {error.strerror or error}"
    found["redirect"] = _bound(socket.SOCK_STREAM, _REDIRECT_PORT)
    found["names"] = _bound(socket.SOCK_DGRAM, _NAMES_PORT)
    return found, ""


def _bound(kind: int, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, kind | socket.SOCK_CLOEXEC)
    sock.bind(("127.0.0.1", port))
    if kind == socket.SOCK_STREAM:
        sock.listen(_BACKLOG)
    return sock
