"""What every small program has at hand, and how its end is told. This file is put in front of the programs, as text, and run with
them inside and outside; so it needs nothing but Python 3.11.

A program is a function of `place`, what was planted for it. It returns a few words if it got what it wanted (ESCAPED), and raises
`OSError` or `Refused` if it was kept from it (REFUSED). Anything else is a program that does not work (BROKEN) and proves nothing.
Each runs in a process of its own, since many of them change the process for good.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "AT_FDCWD",
    "LIBC",
    "Path",
    "Refused",
    "call",
    "checked",
    "contextlib",
    "ctypes",
    "errno",
    "fcntl",
    "found",
    "greeting",
    "hold",
    "json",
    "mmap",
    "nest",
    "netlink_error",
    "os",
    "platform",
    "resource",
    "select",
    "signal",
    "socket",
    "stat",
    "struct",
    "subprocess",
    "sys",
    "text_of",
    "threading",
    "through_proxy",
    "time",
    "tunnelled",
]  # fmt: skip

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
LIBC.mmap.restype = LIBC.shmat.restype = ctypes.c_void_p
PATIENCE = 60
AT_FDCWD = -100
# Those whose number differs: (x86_64, aarch64).
NUMBERS = {
    "clone": (56, 220), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "setns": (308, 268),
    "unshare": (272, 97), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "keyctl": (250, 219), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "init_module": (175, 105), "capset": (126, 91), "syslog": (103, 116), "ptrace": (101, 117),
    "personality": (135, 92), "fanotify_init": (300, 262), "quotactl": (179, 60), "kcmp": (312, 272),
}  # fmt: skip
NUMBERS |= {
    name: (number, number)
    for name, number in {
        "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "mount_setattr": 442,
        "io_uring_setup": 425, "pidfd_getfd": 438, "clone3": 435,
    }.items()
}  # fmt: skip


class Refused(Exception):
    """Kept from it, in a way that is no error number: what was found instead."""


def call(name: str, *arguments: int | bytes | ctypes.Array[Any] | ctypes.Structure | None) -> int:
    """A system call by name; an error is an `OSError`."""
    number = NUMBERS[name][platform.machine() != "x86_64"]
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    done = int(LIBC.syscall(ctypes.c_long(number), *words))
    if done == -1:
        raise_last(name)
    return done


def checked(name: str, done: int) -> int:
    """The answer of a function of the C library; -1 is an `OSError`."""
    if done == -1:
        raise_last(name)
    return done


def raise_last(name: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{name}: {os.strerror(number)}")


def hold(what: object) -> None:
    """Tell what is there now, and keep it until nobody listens any more."""
    print(json.dumps(what), flush=True)
    sys.stdin.read()


def outcome(program: Callable[[dict[str, Any]], object], place: dict[str, Any], own_mounts: bool) -> str:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        if own_mounts:
            cover(place.get("covers", ()))
        os.write(write, said(program, place).encode(errors="replace")[:4000])
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + PATIENCE
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    _, status = os.waitpid(pid, 0)
    os.set_blocking(read, False)
    try:
        words = os.read(read, 4096).decode(errors="replace")
    except BlockingIOError:
        words = ""
    os.close(read)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS:
        return "REFUSED SIGSYS"  # the filter ends a process that calls the kernel by another door
    return words or f"BROKEN: ended with status {status:#x} and said nothing"


def said(program: Callable[[dict[str, Any]], object], place: dict[str, Any]) -> str:
    try:
        return f"ESCAPED {program(place)}"
    except Refused as error:
        return f"REFUSED {error}"
    except OSError as error:
        return f"REFUSED {errno.errorcode.get(error.errno or 0, error)} {error.strerror or ''} {error.filename or ''}"
    except BaseException:
        return f"BROKEN: {traceback.format_exc()}"


def run_all(words: list[str], place: dict[str, Any]) -> None:
    own_mounts = "--own-mounts" in words
    for name in words:
        if not name.startswith("--"):
            print(json.dumps([name, outcome(globals()[name], place, own_mounts)]), flush=True)


def cover(places: list[str]) -> None:
    """For the controls that have namespaces of their own: mounts for each program, and a tmpfs on each place that a sandbox hides."""
    call("unshare", 0x20000)
    for path in places:
        call("mount", b"none", path.encode(), b"tmpfs", 0, None)


def nest() -> None:
    """A user namespace of one's own, with all powers in it; a control has one already."""
    if "--own-mounts" in sys.argv:
        return
    uid, gid = os.getuid(), os.getgid()
    call("unshare", 0x10000000 | 0x20000)
    for name, words in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as stream:
            stream.write(words)


def text_of(path: str | Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read(4096)


def found(text: str, wanted: str) -> str:
    if wanted not in text:
        raise Refused(f"found {text[:80]!r} instead")
    return wanted


def greeting(path: str, kind: int = socket.SOCK_STREAM) -> str:
    """What a listening socket says to whoever reaches it."""
    with socket.socket(socket.AF_UNIX, kind) as caller:
        caller.settimeout(5)
        caller.connect(path)
        return found(caller.recv(100).decode(), "hello")


def through_proxy(place: dict[str, Any], request: str) -> "tuple[str, socket.socket]":
    """The head of the answer to a request, and the connection: inside from the sandbox's proxy, outside from one that refuses
    nobody."""
    inside = "ELSEWHERE_SANDBOX_REPO_ROOT" in os.environ
    sock = socket.create_connection(("127.0.0.1", 61080 if inside else place["open_proxy"]), 10)
    sock.sendall(request.encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = sock.recv(1)
        if not data:
            raise Refused(f"no answer: {head!r}")
        head += data
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise Refused(head.split(b"\r\n")[0].decode())
    return head.decode(), sock


def tunnelled(place: dict[str, Any], authority: str) -> str:
    """What somebody says who is reached by CONNECT."""
    _, sock = through_proxy(place, f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")
    with sock:
        return found(sock.recv(100).decode(), "hello")


def netlink_error(family: int, message: bytes) -> int:
    """What the kernel says to an order: an error number, or 0."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family) as link:
        link.settimeout(5)
        link.send(message)
        number = -struct.unpack_from("=i", link.recv(4096), 16)[0]
    if number in (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number))
    return number
