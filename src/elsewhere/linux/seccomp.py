"""The system-call filter: what containers deny, denied here too, assembled once and installed as bytes.

Order inside the program: architecture, the x32 range, then one comparison for each rule. `clone3` answers ENOSYS because its
flags lie behind a pointer that a filter cannot follow: C libraries then fall back to `clone`, whose flags are tested.
"""

import errno
import struct

from elsewhere.linux import syscalls

__all__ = ["DENIED", "install", "program"]

_LD, _JEQ, _JGE, _JSET, _RET, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SET_MODE_FILTER = 1
_TSYNC_NO = 0

_NAMESPACES = 0x7E020080  # every CLONE_NEW*, time included
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# name: (x86_64, aarch64); None where the architecture does not have the call
_TABLE: dict[str, tuple[int | None, int | None]] = {
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
    "setns": (308, 268),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "open_by_handle_at": (304, 265),
    "acct": (163, 89),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "create_module": (174, None),
    "get_kernel_syms": (177, None),
    "query_module": (178, None),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy_home_node": (450, 450),
    "fanotify_init": (300, 262),
}
_CLONE, _UNSHARE, _CLONE3, _IOCTL, _PERSONALITY, _SOCKET = (56, 220), (272, 97), 435, (16, 29), (135, 92), (41, 198)
_PERSONALITIES = (0, 8, 0x20000, 0x40000, 0x60000, 0xFFFFFFFF)  # gdb switches randomisation off
_SOCKETPAIR = (53, 199)
_AF_UNIX, _SOCK_DGRAM = 1, 2

DENIED = tuple(sorted(_TABLE))


def program(*, unix_sockets: bool = True) -> bytes:
    """The filter as packed instructions. Without namespaces, path sockets of the host can only be cut here: `unix_sockets`."""
    column = 0 if syscalls.machine == "x86_64" else 1
    architecture = _AUDIT_ARCH.get(syscalls.machine)
    if architecture is None:
        raise OSError(errno.ENOSYS, f"no system-call filter is known for {syscalls.machine}: x86_64 and aarch64 are")
    refuse = _ERRNO | errno.EPERM
    code: list[bytes] = [
        _op(_LD, _ARCH),
        _op(_JEQ, architecture, 1, 0),
        _op(_RET, _KILL_PROCESS),
        _op(_LD, _NUMBER),
    ]
    if column == 0:
        code += [_op(_JGE, 0x40000000, 0, 1), _op(_RET, _ERRNO | errno.ENOSYS)]
    code += [_op(_JEQ, _CLONE3, 0, 1), _op(_RET, _ERRNO | errno.ENOSYS)]
    for number in (pair[column] for pair in _TABLE.values()):
        if number is not None:
            code += [_op(_JEQ, number, 0, 1), _op(_RET, refuse)]
    code += _when(_CLONE[column], 0, [_op(_JSET, _NAMESPACES & ~0x80, 0, 1), _op(_RET, refuse)])
    code += _when(_UNSHARE[column], 0, [_op(_JSET, _NAMESPACES, 0, 1), _op(_RET, refuse)])
    code += _when(
        _IOCTL[column],
        1,
        [_op(_JEQ, _TIOCSTI, 0, 1), _op(_RET, refuse), _op(_JEQ, _TIOCLINUX, 0, 1), _op(_RET, refuse)],
    )
    allowed = [_op(_JEQ, value, len(_PERSONALITIES) - place, 0) for place, value in enumerate(_PERSONALITIES)]
    code += _when(_PERSONALITY[column], 0, [*allowed, _op(_RET, refuse)])
    if not unix_sockets:
        code += _when(_SOCKET[column], 0, [_op(_JEQ, _AF_UNIX, 0, 1), _op(_RET, refuse)])
        # A pair of datagram sockets can be turned to any path; pairs of the other kinds stay with each other.
        code += _when(_SOCKETPAIR[column], 1, [_op(_AND, 0xF), _op(_JEQ, _SOCK_DGRAM, 0, 1), _op(_RET, refuse)])
    return b"".join([*code, _op(_RET, _ALLOW)])


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _when(number: int, argument: int, body: list[bytes]) -> list[bytes]:
    """Run `body` with the low word of one argument loaded, when the call is `number`; then load the number again."""
    loaded = [_op(_LD, _ARGUMENTS + 8 * argument), *body, _op(_LD, _NUMBER)]
    return [_op(_JEQ, number, 0, len(loaded)), *loaded]


def install(filter_program: bytes) -> None:
    """For good, for this process and whatever it starts."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.seccomp(_SET_MODE_FILTER, _TSYNC_NO, filter_program)
