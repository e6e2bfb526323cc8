"""The outline of the project view: which parts of a machine belong to its system, and what stands where the rest would be.

    /usr /bin /sbin /lib* /etc /opt    the system's: shown
    /var                               what package managers keep there is shown; the rest is empty
    any other name in `/`              closed; or, where something below it is shown, empty but for the way there

Names that come into `/` later are not known here: a view is drawn anew when `/` changes, but one that runs shows them.
"""

import os
import stat
from collections.abc import Iterable

from elsewhere.linux import syscalls as sys_
from elsewhere.linux.mounts import Cover, Directory, Fresh, Link, Operation
from elsewhere.paths import is_within, outermost
from elsewhere.sandbox.project import Project

__all__ = ["PACKAGES", "is_anyway", "is_system", "nothing_but", "readable", "rest", "skeleton", "var_links"]

_SYSTEM = frozenset("bin sbin usr lib lib32 lib64 libx32 libo32 etc opt nix gnu".split())
_FRESH = frozenset("proc sys dev run tmp".split())
PACKAGES = (
    "/var/cache/apt", "/var/lib/apt", "/var/lib/apk", "/var/lib/dictionaries-common", "/var/lib/dnf", "/var/lib/dpkg",
    "/var/lib/pacman", "/var/lib/pam", "/var/lib/python", "/var/lib/rpm", "/var/lib/sgml-base", "/var/lib/ucf",
    "/var/lib/xml-core",
)  # fmt: skip
_EMPTY = (
    "/var/backups", "/var/cache", "/var/cache/debconf", "/var/cache/ldconfig", "/var/cache/man", "/var/lib", "/var/lib/misc",
    "/var/local", "/var/log", "/var/log/apt", "/var/mail", "/var/opt", "/var/spool", "/var/tmp",
)  # fmt: skip
_CLOSED = sys_.MOUNT_ATTR_RDONLY | sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV | sys_.MOUNT_ATTR_NOEXEC


def is_system(path: str) -> bool:
    return path.split("/", 2)[1] in _SYSTEM


def is_anyway(path: str) -> bool:
    """Whether every project view shows it, or has something else in its place."""
    top = path.split("/", 2)[1]
    return top in _SYSTEM or top in ("proc", "sys", "dev") or any(is_within(path, place) for place in PACKAGES)


def readable(project: Project, toolchains: list[str]) -> list[str]:
    """The project view as a list of what may be read, for where nothing can be mounted."""
    system = [f"/{name}" for name in _SYSTEM if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]
    known = ["/proc", "/sys/devices/system", os.path.realpath("/etc/resolv.conf"), *PACKAGES, *toolchains]
    return sorted({*system, *known, project.path, *([project.git] if project.git else [])})


def rest(places: Iterable[str]) -> list[Operation]:
    """What stands at each name in `/` that is not the system's, given the places that are shown."""
    places = list(places)
    operations: list[Operation] = []
    with os.scandir("/") as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            # A link cannot be mounted on, and leads to what is closed or shown by itself.
            if entry.name in _SYSTEM or entry.name in _FRESH or entry.is_symlink() or entry.path in places:
                continue
            if any(is_within(place, entry.path) for place in places):
                operations.append(nothing_but(entry.path, places, var_links() if entry.path == "/var" else ()))
            else:
                operations.append(Cover(entry.path, directory=entry.is_dir(follow_symlinks=False)))
    return operations


def nothing_but(place: str, shown: Iterable[str], links: tuple[tuple[str, str], ...] = ()) -> Fresh:
    """An empty directory that cannot be written, with the way to what is shown below it."""
    directories: dict[str, int] = {}
    files: list[tuple[str, bytes]] = []
    for path in outermost(path for path in shown if is_within(path, place) and path != place):
        parts = path[len(place) + 1 :].split("/")
        below = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        if not os.path.isdir(path):
            files.append((below.pop(), b""))
        directories.update(dict.fromkeys(below, 0o755))
    return Fresh(place, "tmpfs", (("mode", "755"), ("size", "1m")), _CLOSED, tuple(directories.items()), links, tuple(files))


def skeleton(shift: int) -> list[Operation]:
    """The usual directories of /var, empty: packages are installed there."""
    operations: list[Operation] = []
    for path in _EMPTY:
        found = os.lstat(path) if os.path.lexists(path) else None
        if found and stat.S_ISDIR(found.st_mode):
            operations.append(Directory(path, stat.S_IMODE(found.st_mode), shift + found.st_uid, shift + found.st_gid))
    return operations + [Link(f"/var/{name}", to) for name, to in var_links()]


def var_links() -> tuple[tuple[str, str], ...]:
    with os.scandir("/var") as entries:
        return tuple((entry.name, os.readlink(entry.path)) for entry in entries if entry.is_symlink())
