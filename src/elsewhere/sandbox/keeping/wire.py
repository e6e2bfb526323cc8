"""Messages between our own processes: one packet each on a SEQPACKET socket, with descriptors beside it.

A packet is one letter and a marshalled value: `i` inline, `f` in an anonymous file that comes as the last descriptor (the kernel
takes packets up to about 200 KB only, and an environment can be larger). Only ever used between processes that trust each
other: what comes from inside a sandbox is plain ASCII words (see `keeper.py`) and never goes through here.
"""

import array
import errno
import marshal
import os
import resource
import select
import socket
from typing import Any

from elsewhere.errors import Broken

__all__ = ["Crowded", "call", "is_crowded", "pair", "readable", "receive", "receive_raw", "send"]

_INLINE = 64 * 1024
_DESCRIPTORS = 16


class Crowded(OSError):
    """A message came without all of its descriptors: whoever receives it has no room for more."""


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def is_crowded(fd: int, spare: int) -> bool:
    """Whether so many more descriptors would be too many. The kernel gives away the lowest number that is free: `fd` was that."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 0 <= soft <= fd + spare


def readable(source: socket.socket | int, seconds: float | None = 0.0) -> bool:
    """Whether something can be read in that time. Not by `select`, which knows no descriptor from 1,024 on."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(None if seconds is None else min(seconds * 1000, 1 << 30)))


def send(sock: socket.socket, message: Any, fds: list[int] | tuple[int, ...] = ()) -> None:
    data = marshal.dumps(message)
    if len(data) <= _INLINE:
        socket.send_fds(sock, [b"i", data], fds) if fds else sock.sendmsg([b"i", data])
        return
    holder = os.memfd_create("elsewhere-message")
    try:
        with open(holder, "wb", closefd=False) as stream:
            stream.write(data)
        socket.send_fds(sock, [b"f"], [*fds, holder])
    finally:
        os.close(holder)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """The message and its descriptors, which are closed on exec. EOFError when the other side is gone."""
    data, fds = receive_raw(sock, _INLINE + 64, _DESCRIPTORS)
    if not data:
        for fd in fds:
            os.close(fd)
        raise EOFError("the other side of a socket is gone")
    if data[:1] == b"f":
        holder = fds.pop()
        os.lseek(holder, 0, os.SEEK_SET)
        with open(holder, "rb") as stream:
            return marshal.loads(stream.read()), fds  # noqa: S302  (see above: never from inside a sandbox)
    return marshal.loads(data[1:]), fds  # noqa: S302


def receive_raw(sock: socket.socket, size: int, count: int) -> tuple[bytes, list[int]]:
    """One packet as it is. `socket.recv_fds` ignores its flags, and descriptors that stay open on exec would reach commands."""
    numbers = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(size, socket.CMSG_SPACE(count * numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in numbers:
            os.close(fd)
        raise Crowded(errno.EMFILE, f"only {len(numbers)} descriptors arrived")
    return data, numbers.tolist()


def call(sock: socket.socket, message: Any, fds: list[int] | tuple[int, ...] = ()) -> tuple[Any, list[int]]:
    try:
        send(sock, message, fds)
        return receive(sock)
    except (EOFError, ConnectionError, BrokenPipeError) as error:
        raise Broken(
            "launcher_gone",
            "the launcher ended while it was asked for something",
            hint="try again: it is started on demand",
        ) from error
