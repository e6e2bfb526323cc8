"""The system-call filter: what containers deny, denied here too, assembled once and installed as bytes.

Order inside the program: architecture, the x32 range, then one comparison for each rule. `clone3` answers ENOSYS because its
flags lie behind a pointer that a filter cannot follow: C libraries then fall back to `clone`, whose flags are tested.

A refusal is either plain (the kernel answers) or told: the kernel asks whoever holds the listener, who can then say which call
it was (`notifications.py` is that side). Told are calls that are rare and mean something. Those that ordinary programs try on the
chance and do without (strace reads memory, ps asks for a memory policy, node for rings) stay plain: their failure is no news.

Not denied although some containers do: `ptrace` and `personality` as debuggers use it, `chroot`, `seccomp` and `landlock`.
"""

import errno
import functools
import struct

from elsewhere.linux import syscalls

__all__ = ["calls", "denied", "install", "install_best", "program"]

_LD, _JEQ, _JGE, _JSET, _RET, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _ERRNO, _NOTIFY, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x7FC00000, 0x80000000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SET_MODE_FILTER = 1
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_NOTIFICATION_SIZES = (80, 24, 64)

_NAMESPACES = 0x7E020080  # every CLONE_NEW*, time included
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_KIND_OF_FILE, _CHARACTER_DEVICE, _BLOCK_DEVICE = 0xF000, 0x2000, 0x6000
_AF_UNIX, _AF_ALG, _AF_VSOCK, _SOCK_DGRAM = 1, 38, 40, 2
_PERSONALITIES = (0, 8, 0x20000, 0x40000, 0x60000, 0xFFFFFFFF)  # gdb switches randomisation off

# family: name: (x86_64, aarch64); None where the architecture does not have the call
_Family = dict[str, tuple[int | None, int | None]]
_DENIED: dict[str, _Family] = {
    "mounts": {
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
        "open_tree_attr": (467, 467),
    },
    "namespaces": {
        "setns": (308, 268),
    },
    "kernel": {
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "create_module": (174, None),
        "get_kernel_syms": (177, None),
        "query_module": (178, None),
        "reboot": (169, 142),
        "swapon": (167, 224),
        "swapoff": (168, 225),
        "acct": (163, 89),
        "quotactl": (179, 60),
        "quotactl_fd": (443, 443),
        "nfsservctl": (180, 42),
        "_sysctl": (156, None),
    },
    "clock": {
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "clock_adjtime": (305, 266),
        "adjtimex": (159, 171),
    },
    "hostname": {
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
    },
    "tracing": {
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "syslog": (103, 116),
        "lookup_dcookie": (212, 18),
        "fanotify_init": (300, 262),
    },
    "keyrings": {
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
    },
    "handles": {
        "open_by_handle_at": (304, 265),
    },
    "ports": {
        "iopl": (172, None),
        "ioperm": (173, None),
    },
    "processes": {
        "process_vm_writev": (311, 271),
        "kcmp": (312, 272),
        "pidfd_getfd": (438, 438),
    },
    "faults": {
        "userfaultfd": (323, 282),
    },
    "obsolete": {
        "modify_ldt": (154, None),
        "uselib": (134, None),
        "sysfs": (139, None),
        "ustat": (136, None),
        "vhangup": (153, 58),
    },
    "memory of others": {
        "process_vm_readv": (310, 270),
    },
    "rings": {
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
    },
    "memory policy": {
        "mbind": (237, 235),
        "set_mempolicy": (238, 237),
        "migrate_pages": (256, 238),
        "move_pages": (279, 239),
        "set_mempolicy_home_node": (450, 450),
    },
}
# Denied or not by what their arguments say.
_BY_ARGUMENT: dict[str, _Family] = {
    "namespaces": {"clone": (56, 220), "unshare": (272, 97)},
    "devices": {"mknod": (133, None), "mknodat": (259, 33)},
    "sockets": {"socket": (41, 198), "socketpair": (53, 199)},
    "terminals": {"ioctl": (16, 29)},
    "personalities": {"personality": (135, 92)},
}
_CLONE3 = 435
_QUIET = ("memory of others", "rings", "memory policy")
_NESTING = ("mounts", "namespaces")


def denied(*, nested: bool = False) -> list[str]:
    """The calls that the filter refuses whatever their arguments are."""
    return sorted(name for family, members in _DENIED.items() if not (nested and family in _NESTING) for name in members)


def calls() -> dict[int, tuple[str, str]]:
    """Name and family of every call that the filter may refuse, by its number on this machine."""
    return _calls(_column())


@functools.cache
def _calls(column: int) -> dict[int, tuple[str, str]]:
    return {
        number: (name, family)
        for families in (_DENIED, _BY_ARGUMENT)
        for family, members in families.items()
        for name, numbers in members.items()
        if (number := numbers[column]) is not None
    }


def program(*, unix_sockets: bool = True, nested: bool = False, notify: bool = False) -> bytes:
    """The filter as packed instructions. Without namespaces, path sockets of the host can only be cut here: `unix_sockets`.
    `nested` lets namespaces and mounts be made inside. One with `notify` needs a listener: without, what it would tell fails
    with ENOSYS."""
    column = _column()
    plainly = _op(_RET, _ERRNO | errno.EPERM)
    told = _op(_RET, _NOTIFY) if notify else plainly
    unknown = _op(_RET, _ERRNO | errno.ENOSYS)
    code: list[bytes] = [
        _op(_LD, _ARCH),
        _op(_JEQ, _AUDIT_ARCH[syscalls.machine], 1, 0),
        _op(_RET, _KILL_PROCESS),
        _op(_LD, _NUMBER),
    ]
    if column == 0:
        code += [_op(_JGE, 0x40000000, 0, 1), unknown]
    code += [_op(_JEQ, _CLONE3, 0, 1), unknown]
    for family, members in _DENIED.items():
        if nested and family in _NESTING:
            continue
        for numbers in members.values():
            code += _equal(numbers[column], plainly if family in _QUIET else told)

    def when(family: str, name: str, argument: int, body: list[bytes]) -> list[bytes]:
        return _when(_BY_ARGUMENT[family][name][column], argument, body)

    if not nested:
        code += when("namespaces", "clone", 0, [_op(_JSET, _NAMESPACES & ~0x80, 0, 1), told])
        code += when("namespaces", "unshare", 0, [_op(_JSET, _NAMESPACES, 0, 1), told])
    for name, argument in (("mknod", 1), ("mknodat", 2)):
        device = [*_equal(_CHARACTER_DEVICE, told), *_equal(_BLOCK_DEVICE, told)]
        code += when("devices", name, argument, [_op(_AND, _KIND_OF_FILE), *device])
    code += when("terminals", "ioctl", 1, [*_equal(_TIOCSTI, plainly), *_equal(_TIOCLINUX, plainly)])
    allowed = [_op(_JEQ, value, len(_PERSONALITIES) - place, 0) for place, value in enumerate(_PERSONALITIES)]
    code += when("personalities", "personality", 0, [*allowed, plainly])
    # A virtual machine's way to its host belongs to no network namespace. The kernel's ciphers seem not to be there: libraries
    # have their own.
    sockets = [*_equal(_AF_VSOCK, told), *_equal(_AF_ALG, _op(_RET, _ERRNO | errno.EAFNOSUPPORT))]
    if not unix_sockets:
        sockets += _equal(_AF_UNIX, plainly)
        # A pair of datagram sockets can be turned to any path; pairs of the other kinds stay with each other.
        code += when("sockets", "socketpair", 1, [_op(_AND, 0xF), *_equal(_SOCK_DGRAM, plainly)])
    code += when("sockets", "socket", 0, sockets)
    return b"".join([*code, _op(_RET, _ALLOW)])


def _column() -> int:
    if syscalls.machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system-call filter is known for {syscalls.machine}: x86_64 and aarch64 are")
    return list(_AUDIT_ARCH).index(syscalls.machine)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _equal(value: int | None, answer: bytes) -> list[bytes]:
    return [] if value is None else [_op(_JEQ, value, 0, 1), answer]


def _when(number: int | None, argument: int, body: list[bytes]) -> list[bytes]:
    """Run `body` with the low word of one argument loaded, when the call is `number`; then load the number again."""
    if number is None:
        return []
    loaded = [_op(_LD, _ARGUMENTS + 8 * argument), *body, _op(_LD, _NUMBER)]
    return [_op(_JEQ, number, 0, len(loaded)), *loaded]


def install(filter_program: bytes, *, listener: bool = False) -> int:
    """For good, for this process and whatever it starts. With `listener`, a descriptor on which refused calls are told; else -1.

    OSError when the kernel gives no listener: it is too old, or a filter further out has one already. Nothing is installed then.
    """
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if not listener:
        syscalls.seccomp(_SET_MODE_FILTER, 0, filter_program)
        return -1
    sizes = syscalls.seccomp_notification_sizes()
    if sizes != _NOTIFICATION_SIZES:
        raise OSError(errno.ENOTSUP, f"notifications of {sizes} bytes: {_NOTIFICATION_SIZES} are known")
    try:
        # A caller that waits for its answer can be killed, but no other signal makes it ask again.
        return syscalls.seccomp(_SET_MODE_FILTER, _NEW_LISTENER | _WAIT_KILLABLE, filter_program)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return syscalls.seccomp(_SET_MODE_FILTER, _NEW_LISTENER, filter_program)  # before Linux 5.19


def install_best(plain: bytes, notifying: bytes) -> int:
    """The filter that tells what it refuses, and its listener; where the kernel gives none, the plain one, and -1."""
    try:
        return install(notifying, listener=True)
    except OSError:
        return install(plain)
