"""A network namespace of its own, from inside it: loopback up, low ports and ping for everybody. Not here: any way out of it."""

import contextlib
import fcntl
import socket
import struct

__all__ = ["raise_loopback"]

_SIOCSIFFLAGS = 0x8914
_UP_AND_RUNNING = 0x41
_SETTINGS = {
    "ip_unprivileged_port_start": "0",
    "ping_group_range": "0 2147483647",
}


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP_AND_RUNNING))
    for name, value in _SETTINGS.items():
        # Comforts: a kernel that does not know one of them has a sandbox all the same.
        with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv4/{name}", "w", encoding="ascii") as setting:
            setting.write(value)
