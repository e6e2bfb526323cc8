"""Files that a sandbox of root gets its own version of from the start: accounts without their secrets.

`/etc/shadow` cannot simply be hidden: `su` and package scripts need an entry for each account, and tools replace the file by
renaming, which a mount on top would forbid. So the layer starts with a copy in which every password is locked.
"""

import contextlib
import os
import stat

from elsewhere.sandbox.ids import FIRST_ID

__all__ = ["ACCOUNTS", "pristine", "sow"]

ACCOUNTS = ("/etc/shadow", "/etc/gshadow", "/etc/shadow-", "/etc/gshadow-")


def pristine() -> dict[str, bytes]:
    """What the seeded files contain, by their paths."""
    found = {}
    for path in ACCOUNTS:
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            found[path] = b"".join(_locked(line) for line in stream)
    return found


def _locked(line: bytes) -> bytes:
    words = line.split(b":")
    if len(words) > 2 and words[1] not in (b"", b"*", b"!", b"!!", b"!*"):
        words[1] = b"!*"
    return b":".join(words)


def sow(upper: str, at: str) -> None:
    """Put them into the fresh layer that is mounted at `at`, with the owners that they have."""
    for path, content in pristine().items():
        real = os.stat(path)
        target = os.path.join(upper, os.path.relpath(path, at))
        parent = os.path.dirname(target)
        if not os.path.isdir(parent):
            above = os.stat(os.path.dirname(path))
            os.mkdir(parent)
            os.chown(parent, FIRST_ID + above.st_uid, FIRST_ID + above.st_gid)
            os.chmod(parent, stat.S_IMODE(above.st_mode))
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as stream:
            stream.write(content)
            os.fchown(fd, FIRST_ID + real.st_uid, FIRST_ID + real.st_gid)
            os.fchmod(fd, stat.S_IMODE(real.st_mode))
