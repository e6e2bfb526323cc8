"""The mounts that are the same for every sandbox of a host, and so are made ahead of time: /proc, /sys, /dev, /run."""

import contextlib
import os

from elsewhere.linux import syscalls as sys_
from elsewhere.linux.mounts import Clone, Cover, Devices, Fresh, Handed, Operation, ReadOnly
from elsewhere.sandbox.ids import FIRST_ID

__all__ = ["mounts", "stamp", "stamp_of"]

_PROC_MASKED = (
    "kcore",
    "keys",
    "key-users",
    "kallsyms",
    "timer_list",
    "timer_stats",
    "sysrq-trigger",
    "kmsg",
    "sched_debug",
    "latency_stats",
)
_PROC_MASKED_DIRECTORIES = ("acpi", "asound", "scsi")
_PROC_READ_ONLY = ("bus", "fs", "irq", "sys")  # the host's root could write there without any capability
_SYS_MASKED_DIRECTORIES = ("firmware", "kernel/security", "kernel/debug", "devices/virtual/powercap")
_HOST_SYS_MASKED_DIRECTORIES = (
    "fs/bpf",
    "fs/cgroup",
    "fs/pstore",
    "kernel/config",
    "kernel/tracing",
)  # mounts, in a fresh one empty
_SHM_SIZE = "50%"


def mounts(*, whole_machine: bool) -> tuple[Operation, ...]:
    owner = FIRST_ID if whole_machine else None
    ids = (("uid", str(FIRST_ID)), ("gid", str(FIRST_ID))) if whole_machine else ()
    quiet = sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV
    tty_group = (("gid", str(FIRST_ID + 5)),) if whole_machine else ()
    operations: list[Operation] = [Handed("/proc", "proc", "fresh proc")]
    operations += [Cover(f"/proc/{name}", directory=False) for name in _PROC_MASKED]
    operations += [Cover(f"/proc/{name}", directory=True) for name in _PROC_MASKED_DIRECTORIES]
    operations += [ReadOnly(f"/proc/{name}") for name in _PROC_READ_ONLY]
    if whole_machine:
        operations.append(Fresh("/sys", "sysfs", attributes=quiet | sys_.MOUNT_ATTR_NOEXEC | sys_.MOUNT_ATTR_RDONLY))
        operations += [Cover(f"/sys/{name}", directory=True) for name in _SYS_MASKED_DIRECTORIES]
    else:
        operations.append(Clone("/sys", "/sys", quiet | sys_.MOUNT_ATTR_NOEXEC | sys_.MOUNT_ATTR_RDONLY, recursive=True))
        masked = (*_SYS_MASKED_DIRECTORIES, *_HOST_SYS_MASKED_DIRECTORIES)
        operations += [Cover(f"/sys/{name}", directory=True) for name in masked]
    operations += [
        Devices("/dev", owner),
        Fresh(
            "/dev/pts",
            "devpts",
            (("ptmxmode", "0666"), ("mode", "0620"), *tty_group),
            sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NOEXEC,
        ),
        Fresh("/dev/shm", "tmpfs", (("mode", "1777"), ("size", _SHM_SIZE), *ids), quiet),
        Fresh("/dev/mqueue", "mqueue", (), quiet | sys_.MOUNT_ATTR_NOEXEC),
        _run(ids, quiet),
    ]
    return tuple(operations)


def _run(ids: tuple[tuple[str, str], ...], attributes: int) -> Fresh:
    """A fresh /run with what programs look for there: lock, the links at its top, and what resolv.conf leads to."""
    links, files, directories = [], [], [("lock", 0o1777)]
    with contextlib.suppress(OSError), os.scandir("/run") as entries:
        links = [(entry.name, os.readlink(entry.path)) for entry in entries if entry.is_symlink()]
    resolver = os.path.realpath("/etc/resolv.conf")
    if resolver.startswith("/run/"):
        with contextlib.suppress(OSError), open(resolver, "rb") as stream:
            files.append((resolver[len("/run/") :], stream.read(1 << 16)))
            directories.append((os.path.dirname(files[0][0]), 0o755))
    return Fresh(
        "/run",
        "tmpfs",
        (("mode", "755"), ("size", "25%"), *ids),
        attributes,
        tuple(directories),
        tuple(links),
        tuple(files),
    )


def stamp() -> tuple[object, ...]:
    """Changes whenever the standing mounts would be made differently: what the resolver is goes into /run."""
    return tuple(stamp_of(path) for path in ("/etc/resolv.conf", os.path.realpath("/etc/resolv.conf")))


def stamp_of(path: str) -> tuple[int, int, int] | None:
    """Changes whenever something comes or goes there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
