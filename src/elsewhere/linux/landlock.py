"""Landlock: access rules that need no privilege and no namespace. The last rung of the ladder stands on `restrict`; `scope` and
`keep_from_writing_elsewhere` close what namespaces and mounts leave open.

Not covered by Landlock, whatever its version: chmod, chown, times and attributes of files that the user owns, and connecting
to path sockets. `docs/limits.md` says what that means for the rung that uses it.
"""

import os
import stat
import struct

from elsewhere.linux import syscalls

__all__ = ["FIRST_WITH_TRUNCATE", "READ", "WRITE", "abi", "can_scope", "keep_from_writing_elsewhere", "restrict", "scope"]

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEV, _REFER = 1 << 14, 1 << 15, 1 << 13
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_FIRST_WITH_REFER, _FIRST_WITH_NETWORK, _FIRST_WITH_SCOPES = 2, 4, 6

FIRST_WITH_TRUNCATE = 3  # before, a file that may not be written could still be emptied
READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE = (1 << 16) - 1


def abi() -> int:
    """The version that this kernel speaks; OSError when it speaks none."""
    return syscalls.landlock_create_ruleset(None, _VERSION_FLAG)


def restrict(rules: list[tuple[str, int]]) -> None:
    """Allow `rights` beneath each path and nothing else, for this process and its children, for good; and reach nobody outside
    by signals or abstract sockets. A path that is gone is left out: what does not exist need not be allowed."""
    version = abi()
    _enforce(version, _handled(version), rules, scoped=version >= _FIRST_WITH_SCOPES)


def can_scope() -> bool:
    return _version_or_none() >= _FIRST_WITH_SCOPES


def scope() -> bool:
    """Reach nobody outside by signals or abstract sockets, for good; files are as before, unless something else of Landlock is
    about files: together with that, nothing can be moved between directories any more. False before Linux 6.12."""
    if not can_scope():
        return False
    _enforce(_version_or_none(), 0, [], scoped=True)
    return True


def keep_from_writing_elsewhere(writable: list[str]) -> None:
    """Open for writing what lies beneath these and nothing else, and reach nobody outside as with `scope`, for good. Before
    Linux 5.19 this does nothing.

    A read-only mount keeps nobody from writing into a fifo or a device on it; this does. The paths are looked up now, so the
    sandbox's root must be in place. It costs two things: nobody inside can mount anything afterwards, and a file that was handed
    in from elsewhere can be written but not be opened again for writing (by way of /dev/stdout, for one)."""
    version = _version_or_none()
    if version < _FIRST_WITH_REFER:
        return
    # Once any file right is handled, moving between directories is denied unless it is handled and allowed, too.
    rules = [("/", _REFER), *((path, _WRITE_FILE) for path in writable)]
    _enforce(version, _WRITE_FILE | _REFER, rules, scoped=version >= _FIRST_WITH_SCOPES)


def _version_or_none() -> int:
    try:
        return abi()
    except OSError:
        return 0


def _handled(version: int) -> int:
    rights = (1 << 13) - 1
    for since, right in ((_FIRST_WITH_REFER, _REFER), (FIRST_WITH_TRUNCATE, _TRUNCATE), (5, _IOCTL_DEV)):
        if version >= since:
            rights |= right
    return rights


def _enforce(version: int, handled: int, rules: list[tuple[str, int]], *, scoped: bool) -> None:
    attributes = struct.pack("Q", handled)
    if version >= _FIRST_WITH_NETWORK:
        attributes += struct.pack("Q", 0)
    if scoped:
        attributes += struct.pack("Q", _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
    ruleset = syscalls.landlock_create_ruleset(attributes)
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & handled)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.landlock_restrict_self(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FILE_RIGHTS
        if rights:
            syscalls.landlock_add_rule(ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd))
    finally:
        os.close(fd)
