"""Refused system calls, told by the kernel: reading what was asked, answering it, and the words for it.

A caller waits in the kernel until it is answered, so whoever holds the listener polls it for as long as the sandbox runs; when
the listener is closed, such calls fail with ENOSYS. Everything here only ever refuses: what a pointer points to can change after
it was looked at, so no call is allowed on the strength of its arguments.

Not here: which calls are refused (`seccomp.py`) and what is made of it (the keeper counts, the host explains).
"""

import errno
import fcntl
import struct
from typing import NamedTuple

from elsewhere.linux import seccomp

__all__ = ["Explanation", "Notification", "explain", "name", "number", "read", "refuse"]

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # id, pid, flags, then the call: number, architecture, instruction, arguments
_ANSWER = struct.Struct("=QqiI")  # id, value, error, flags


class Notification(NamedTuple):
    id: int
    pid: int  # as the reader's process namespace numbers it; 0 when the caller is not in it
    number: int
    arguments: tuple[int, ...]


class Explanation(NamedTuple):
    kind: str
    rule: str
    how_to_allow: str


_OUTSIDE = "nothing: do it outside of the sandbox"
_MACHINE = "a virtual machine"
_EXPLANATIONS = {
    "mounts": Explanation("syscall", "file systems cannot be mounted inside", "--nested"),
    "namespaces": Explanation("syscall", "namespaces cannot be made or entered inside", "--nested"),
    "kernel": Explanation("syscall", "the kernel is the host's: it cannot be administered from inside", _MACHINE),
    "clock": Explanation("syscall", "the clock is the host's: it cannot be set from inside", _MACHINE),
    "hostname": Explanation("syscall", "the host name is fixed", _MACHINE),
    "tracing": Explanation("syscall", "what would show the whole machine cannot be watched from inside", _OUTSIDE),
    "keyrings": Explanation("syscall", "the kernel's keyrings are shared with the host", _OUTSIDE),
    "handles": Explanation("syscall", "files are opened by path only: a handle leads past every mount", _OUTSIDE),
    "ports": Explanation("syscall", "hardware ports belong to the host", _MACHINE),
    "processes": Explanation("syscall", "other processes are reached by ptrace only", _OUTSIDE),
    "faults": Explanation("syscall", "page faults are handled by the kernel alone", _OUTSIDE),
    "obsolete": Explanation("syscall", "a call of old times, which current programs do without", _MACHINE),
    "memory of others": Explanation("syscall", "other processes are reached by ptrace only", _OUTSIDE),
    "rings": Explanation("syscall", "io_uring works past the filter", _OUTSIDE),
    "memory policy": Explanation("syscall", "where memory lies is the host's affair", _OUTSIDE),
    "devices": Explanation("device", "device nodes cannot be made inside", "--device PATH"),
    "sockets": Explanation("policy", "sockets that lead past the sandbox's network cannot be made", _OUTSIDE),
    "terminals": Explanation("policy", "nothing can be typed into a terminal from inside", _OUTSIDE),
    "personalities": Explanation("syscall", "personalities that weaken a process cannot be taken on", _OUTSIDE),
}
_UNKNOWN = Explanation("syscall", "the system-call filter refuses it", _OUTSIDE)


def read(listener: int) -> Notification | None:
    """What the next caller asks; None when it is gone already. Does not wait after poll has said that there is something."""
    block = bytearray(_NOTIFICATION.size)  # the kernel takes no block that is not empty
    try:
        fcntl.ioctl(listener, _RECEIVE, block)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):
            return None
        raise
    ticket, pid, _, number, _, _, *arguments = _NOTIFICATION.unpack(block)
    return Notification(ticket, pid, number, tuple(arguments))


def refuse(listener: int, notification: Notification, error: int = errno.EPERM) -> None:
    """Let the call fail with this error. A caller that is gone needs no answer."""
    try:
        fcntl.ioctl(listener, _SEND, bytearray(_ANSWER.pack(notification.id, 0, -error, 0)))
    except OSError as failure:
        if failure.errno != errno.ENOENT:
            raise


def name(number: int) -> str:
    """One word, also for a call that the filter does not know."""
    return seccomp.calls().get(number, (f"syscall-{number}", ""))[0]


def number(name: str) -> int | None:
    """The way back; None for a name that the filter does not know."""
    return next((number for number, (called, _) in seccomp.calls().items() if called == name), None)


def explain(number: int) -> Explanation:
    """Why it is refused and what would allow it."""
    _, family = seccomp.calls().get(number, ("", ""))
    return _EXPLANATIONS.get(family, _UNKNOWN)
