"""System calls that Python does not have, each under its own name: a few lines, no policy.

A failure is an OSError whose text names the call, because "Operation not permitted" alone helps nobody. Not here: what to
call when, and what to do when a call is missing (see `mounts.py`, `probe.py`).
"""

import ctypes
import errno
import os
import platform
import struct

__all__ = [
    "AT_EMPTY_PATH",
    "AT_FDCWD",
    "AT_NO_AUTOMOUNT",
    "AT_RECURSIVE",
    "capget",
    "capset",
    "close_range",
    "fsconfig_create",
    "fsconfig_fd",
    "fsconfig_flag",
    "fsconfig_string",
    "fsmount",
    "fsopen",
    "fstatfs",
    "landlock_add_rule",
    "landlock_create_ruleset",
    "landlock_restrict_self",
    "machine",
    "mount",
    "mount_setattr",
    "move_mount",
    "open_tree",
    "openat2",
    "pivot_root",
    "prctl",
    "renameat2",
    "seccomp",
    "seccomp_notification_sizes",
    "setfsgid",
    "setfsuid",
    "syncfs",
    "umount2",
    "unshare",
]

machine = platform.machine()

# From open_tree (428) upwards the numbers are the same on every architecture; the older ones are not.
_OLDER = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317, "capget": 125, "renameat2": 316},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277, "capget": 90, "renameat2": 276},
}
_NUMBERS = {
    **_OLDER.get(machine, {}),
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "close_range": 436,
    "openat2": 437,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

AT_FDCWD = -100
AT_NO_AUTOMOUNT = 0x800
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_IDMAP = 0x100000

OPEN_TREE_CLONE = 0x1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_EMPTY_PATH = 0x40
FSOPEN_CLOEXEC = 0x1
FSMOUNT_CLOEXEC = 0x1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_SET_FD, _FSCONFIG_CMD_CREATE = 0, 1, 5, 6

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

RENAME_NOREPLACE = 0x1
RENAME_EXCHANGE = 0x2

_SECCOMP_GET_NOTIF_SIZES = 3

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4


def _check(result: int, name: str, *arguments: object) -> int:
    if result < 0:
        number = ctypes.get_errno()
        shown = ", ".join(str(argument) for argument in arguments)
        raise OSError(number, f"{name}({shown}): {os.strerror(number)}")
    return result


def _syscall(name: str, *arguments: object) -> int:
    number = _NUMBERS.get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name}: no number known for {machine}")
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


def _path(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)


def _int(value: int) -> ctypes.c_long:
    return ctypes.c_long(value)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare", hex(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    result = _libc.mount(_path(source), _path(target), _path(kind), ctypes.c_ulong(flags), _path(data))
    _check(result, "mount", source, target, kind, hex(flags), data)


def umount2(target: str, flags: int) -> None:
    _check(_libc.umount2(_path(target), flags), "umount2", target, hex(flags))


def pivot_root(new: str, old: str) -> None:
    _check(_syscall("pivot_root", _path(new), _path(old)), "pivot_root", new, old)


def open_tree(fd: int, path: str, flags: int) -> int:
    """A descriptor of a mount: a detached copy with OPEN_TREE_CLONE, otherwise the place itself."""
    return _check(_syscall("open_tree", _int(fd), _path(path), _int(flags | OPEN_TREE_CLOEXEC)), "open_tree", path, hex(flags))


def move_mount(from_fd: int, from_path: str, to_fd: int, to_path: str) -> None:
    flags = (0 if from_path else MOVE_MOUNT_F_EMPTY_PATH) | (0 if to_path else MOVE_MOUNT_T_EMPTY_PATH)
    result = _syscall("move_mount", _int(from_fd), _path(from_path), _int(to_fd), _path(to_path), _int(flags))
    _check(result, "move_mount", from_path, to_path)


def fsopen(kind: str) -> int:
    return _check(_syscall("fsopen", _path(kind), _int(FSOPEN_CLOEXEC)), "fsopen", kind)


def _fsconfig(fd: int, command: int, key: str | None, value: str | None, auxiliary: int) -> None:
    result = _syscall("fsconfig", _int(fd), _int(command), _path(key), _path(value), _int(auxiliary))
    if result < 0:
        number = ctypes.get_errno()
        said = _kernel_message(fd)
        shown = "create" if key is None else key if value is None else f"{key}={value}"
        raise OSError(number, f"fsconfig({shown}): {said or os.strerror(number)}")


def _kernel_message(fd: int) -> str:
    """What the kernel wrote about a failed configuration; the descriptor holds one line for each read."""
    lines = []
    while True:
        try:
            line = os.read(fd, 1024)
        except OSError:
            break
        lines.append(line.decode(errors="replace").strip().removeprefix("e ").removeprefix("w "))
    return "; ".join(lines)


def fsconfig_flag(fd: int, key: str) -> None:
    _fsconfig(fd, _FSCONFIG_SET_FLAG, key, None, 0)


def fsconfig_string(fd: int, key: str, value: str) -> None:
    _fsconfig(fd, _FSCONFIG_SET_STRING, key, value, 0)


def fsconfig_fd(fd: int, key: str, value: int) -> None:
    _fsconfig(fd, _FSCONFIG_SET_FD, key, None, value)


def fsconfig_create(fd: int) -> None:
    _fsconfig(fd, _FSCONFIG_CMD_CREATE, None, None, 0)


def fsmount(fd: int, attributes: int = 0) -> int:
    return _check(_syscall("fsmount", _int(fd), _int(FSMOUNT_CLOEXEC), _int(attributes)), "fsmount", hex(attributes))


def mount_setattr(fd: int, path: str, flags: int, *, attr_set: int = 0, userns_fd: int = 0) -> None:
    block = struct.pack("QQQQ", attr_set, 0, 0, userns_fd)
    result = _syscall("mount_setattr", _int(fd), _path(path), _int(flags), block, _int(len(block)))
    _check(result, "mount_setattr", path, hex(attr_set))


def openat2(fd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    return _check(_syscall("openat2", _int(fd), _path(path), how, _int(len(how))), "openat2", path)


def close_range(first: int, last: int, flags: int) -> None:
    result = _syscall("close_range", ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(flags))
    _check(result, "close_range", first, last)


def syncfs(fd: int) -> None:
    _check(_libc.syncfs(fd), "syncfs", fd)


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    result = _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(third), ctypes.c_ulong(0), ctypes.c_ulong(0))
    return _check(result, "prctl", option, value)


def capset(effective: int, permitted: int, inheritable: int) -> None:
    header = struct.pack("Ii", 0x20080522, 0)
    low = 0xFFFFFFFF
    data = struct.pack(
        "6I", effective & low, permitted & low, inheritable & low, effective >> 32, permitted >> 32, inheritable >> 32
    )
    _check(_syscall("capset", header, data), "capset", hex(permitted))


def seccomp(operation: int, flags: int, program: bytes | None) -> int:
    """`program` is a packed array of 8-byte filter instructions."""
    if program is None:
        return _check(_syscall("seccomp", _int(operation), _int(flags), None), "seccomp", operation)
    block = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(block))
    return _check(_syscall("seccomp", _int(operation), _int(flags), fprog), "seccomp", operation)


def seccomp_notification_sizes() -> tuple[int, int, int]:
    """Of a notification, of its answer, and of the call's own data in the first."""
    block = ctypes.create_string_buffer(6)
    _check(_syscall("seccomp", _int(_SECCOMP_GET_NOTIF_SIZES), _int(0), block), "seccomp", _SECCOMP_GET_NOTIF_SIZES)
    notification, answer, data = struct.unpack("HHH", block.raw)
    return notification, answer, data


def landlock_create_ruleset(attributes: bytes | None, flags: int = 0) -> int:
    size = 0 if attributes is None else len(attributes)
    return _check(_syscall("landlock_create_ruleset", attributes, _int(size), _int(flags)), "landlock_create_ruleset")


def landlock_add_rule(ruleset: int, kind: int, attributes: bytes) -> None:
    _check(_syscall("landlock_add_rule", _int(ruleset), _int(kind), attributes, _int(0)), "landlock_add_rule")


def landlock_restrict_self(ruleset: int) -> None:
    _check(_syscall("landlock_restrict_self", _int(ruleset), _int(0)), "landlock_restrict_self")


def capget() -> tuple[int, int, int]:
    """Effective, permitted and inheritable, of this thread."""
    header = struct.pack("Ii", 0x20080522, 0)
    data = ctypes.create_string_buffer(24)
    _check(_syscall("capget", header, data), "capget")
    low = struct.unpack("6I", data.raw)
    return low[0] | low[3] << 32, low[1] | low[4] << 32, low[2] | low[5] << 32


def setfsuid(uid: int) -> int:
    """Of this thread only; the one before. It cannot fail by itself: whoever may not change it keeps the one before."""
    return int(_libc.setfsuid(ctypes.c_uint(uid))) & 0xFFFFFFFF


def setfsgid(gid: int) -> int:
    return int(_libc.setfsgid(ctypes.c_uint(gid))) & 0xFFFFFFFF


def fstatfs(fd: int) -> int:
    """The file system's magic number, which Python's `fstatvfs` does not tell."""
    block = ctypes.create_string_buffer(256)
    _check(_libc.fstatfs(fd, block), "fstatfs", fd)
    return int(struct.unpack_from("q", block)[0]) & 0xFFFFFFFF


def renameat2(from_fd: int, from_path: str, to_fd: int, to_path: str, flags: int) -> None:
    result = _syscall("renameat2", _int(from_fd), _path(from_path), _int(to_fd), _path(to_path), _int(flags))
    _check(result, "renameat2", from_path, to_path)
