"""Capabilities: what a sandbox's root keeps, and how everything else is given up for good.

The kept set is the smallest with which package managers, compilers, databases and debuggers worked; each of these is
relative to the sandbox's own user namespace.
"""

import contextlib

from elsewhere.linux import syscalls

__all__ = ["KEPT", "NAMES", "give_up_all_but", "hand_on", "regain"]

NAMES = (
    "chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap",
    "linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner",
    "sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice",
    "sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap",
    "mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf",
    "checkpoint_restore",
)  # fmt: skip

KEPT = tuple(
    """chown dac_override dac_read_search fowner fsetid kill setgid setuid setpcap net_bind_service sys_chroot mknod
    audit_write setfcap""".split()
)


def _mask(names: tuple[str, ...]) -> int:
    return sum(1 << NAMES.index(name) for name in names)


def give_up_all_but(names: tuple[str, ...]) -> None:
    """Drop from the bounding set first: dropping from it needs a capability that `capset` then takes away."""
    mask = _mask(names)
    # A kernel newer than the list may have more; it answers EINVAL to the first number that it does not know.
    with contextlib.suppress(OSError):
        for number in range(64):
            if not mask >> number & 1:
                syscalls.prctl(syscalls.PR_CAPBSET_DROP, number)
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(mask, mask, 0)


def regain() -> None:
    """Make every permitted capability effective again, after a change of the effective uid has cleared that set."""
    permitted = _permitted()
    syscalls.capset(permitted, permitted, 0)


def hand_on() -> None:
    """Let the next program keep what we have: executed by an ordinary user it loses all that is not ambient."""
    permitted = _permitted()
    syscalls.capset(permitted, permitted, permitted)
    for number in range(len(NAMES)):
        if permitted >> number & 1:
            syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_RAISE, number)


def _permitted() -> int:
    return syscalls.capget()[1]
