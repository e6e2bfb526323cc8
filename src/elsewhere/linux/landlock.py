"""Landlock: file access rules that need no privilege and no namespace; the last rung of the ladder stands on it.

Not covered by Landlock, whatever its version: chmod, chown, times and attributes of files that the user owns, and connecting
to path sockets. `docs/limits.md` says what that means for the rung that uses it.
"""

import os
import struct

from elsewhere.linux import syscalls

__all__ = ["FIRST_WITH_TRUNCATE", "READ", "WRITE", "abi", "restrict"]

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEV, _REFER = 1 << 14, 1 << 15, 1 << 13
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

FIRST_WITH_TRUNCATE = 3  # before, a file that may not be written could still be emptied
READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE = (1 << 16) - 1


def abi() -> int:
    """The version that this kernel speaks; OSError when it speaks none."""
    return syscalls.landlock_create_ruleset(None, _VERSION_FLAG)


def _handled(version: int) -> int:
    rights = (1 << 13) - 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if version >= since:
            rights |= right
    return rights


def restrict(rules: list[tuple[str, int]]) -> None:
    """Allow `rights` beneath each path and nothing else, for this process and its children, for good. A path that is gone
    is left out: what does not exist need not be allowed."""
    version = abi()
    handled = _handled(version)
    attributes = struct.pack("Q", handled)
    if version >= 4:
        attributes += struct.pack("Q", 0)
    if version >= 6:
        attributes += struct.pack("Q", _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
    ruleset = syscalls.landlock_create_ruleset(attributes)
    try:
        for path, rights in rules:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
            except (FileNotFoundError, PermissionError):
                continue
            try:
                mask = handled if os.path.isdir(f"/proc/self/fd/{fd}") else handled & _FILE_RIGHTS
                if rights & mask:
                    syscalls.landlock_add_rule(ruleset, _PATH_BENEATH, struct.pack("=Qi", rights & mask, fd))
            finally:
                os.close(fd)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.landlock_restrict_self(ruleset)
    finally:
        os.close(ruleset)
