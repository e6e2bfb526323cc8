"""The host's sockets that could be reached from inside: a read-only mount does not keep anybody from connecting."""

import contextlib
import os
import stat

from elsewhere.paths import is_within

__all__ = ["REPLACED", "host_sockets"]

REPLACED = ("/proc", "/sys", "/dev", "/run", "/tmp")  # what lies there is not the host's in any view


def host_sockets(unreachable: tuple[str, ...]) -> list[str]:
    """Sockets of the host that a read-only mount would still let a command connect to."""
    paths = set()
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as table:
        for line in table:
            words = line.rstrip(b"\n").split(None, 7)  # columns are padded
            if len(words) == 8 and words[7].startswith(b"/"):
                paths.add(os.path.realpath(os.fsdecode(words[7])))
    visible = []
    for path in paths:
        if not any(is_within(path, place) for place in unreachable):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    visible.append(path)
    return sorted(visible)
