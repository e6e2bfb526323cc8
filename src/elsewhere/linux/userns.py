"""User namespaces: who is who inside. A map is written once, by whoever the kernel lets write it."""

import contextlib
import errno
import os
from collections.abc import Iterator

__all__ = ["is_mapped", "map_myself", "mapper_of_all_ids", "write_map"]


def map_myself(uid: int, gid: int) -> None:
    """Onto itself: the command is then an ordinary user inside and loses every capability by itself when it is executed."""
    write_map("/proc/self/setgroups", "deny")
    write_map("/proc/self/uid_map", f"{uid} {uid} 1")
    write_map("/proc/self/gid_map", f"{gid} {gid} 1")


@contextlib.contextmanager
def mapper_of_all_ids() -> Iterator[None]:
    """Root of a container works on files of others, so all its ids are mapped onto themselves once the body has entered a new
    user namespace. More than one's own id can only be mapped by a process that stayed in the old one."""
    target = os.getpid()
    go, told = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    mapper = os.fork()
    if mapper == 0:
        code = 1
        os.close(go[1])
        try:
            if os.read(go[0], 1):
                for name in ("uid_map", "gid_map"):
                    with open(f"/proc/self/{name}", encoding="ascii") as own:
                        ranges = [line.split() for line in own]
                    write_map(f"/proc/{target}/{name}", "\n".join(f"{first} {first} {count}" for first, _, count in ranges))
                os.write(told[1], b"+")
            code = 0
        finally:
            os._exit(code)
    os.close(told[1])
    try:
        yield
        os.write(go[1], b"+")
        if not os.read(told[0], 1):
            raise OSError(errno.EPERM, "the ids of a user namespace could not be mapped")
    finally:
        for fd in (*go, told[0]):
            os.close(fd)
        os.waitpid(mapper, 0)


def is_mapped(number: int) -> bool:
    """Whether this uid means anybody in the user namespace that we are in."""
    with open("/proc/self/uid_map", "rb") as table:
        ranges = [tuple(map(int, line.split())) for line in table]
    return any(first <= number < first + count for first, _, count in ranges)


def write_map(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
