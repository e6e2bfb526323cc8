"""What the numbers were taken on. No host name and no paths: the page is published."""

import os
import platform
import sys

import contenders
import elsewhere

__all__ = ["describe"]

_NEIGHBOURS = ("bwrap", "unshare", "sandlock", "docker", "git", "rsync")


def describe(project: str, mechanism: str) -> dict[str, str]:
    load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = load > processors / 2
    facts = {
        "elsewhere": f"{elsewhere.__version__}, mechanism {mechanism}",
        "user": "root" if os.geteuid() == 0 else "ordinary user",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": f"{processors} x {_processor()}",
        "memory": f"{_memory_gib():.0f} GiB",
        "file system of the project": _file_system(project),
        "Python": platform.python_version(),
        "load average at the start": f"{load:.2f}" + (" (BUSY: whoever needs several processes waits longest)" if busy else ""),
    }
    for name in _NEIGHBOURS:
        facts[name] = contenders.version_of(name) or "not there"
    return facts


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def _file_system(path: str) -> str:
    """The kind of the innermost mount above `path`."""
    best, kind = -1, "unknown"
    with open("/proc/self/mountinfo", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            point = before.split()[4]
            if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= best:
                best, kind = len(point), after.split()[0]
    return kind
