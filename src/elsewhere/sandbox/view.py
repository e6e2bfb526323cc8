"""The view: which mounts make up a sandbox, drawn up as a plan. Every mount of the host is overlaid, read-only or not shown.

    machine plan   root: `/` itself is an overlay; each further mount that matters has one of its own
    user plan      an ordinary user cannot overlay `/`: a read-only clone of everything, overlays on home and project

    what the host has                      machine plan               user plan
    /                                      overlay                    read-only, recursive
    local file systems, writable           overlay                    read-only; overlay where home or project lie
    local file systems, read-only          read-only                  read-only
    network and FUSE                       read-only                  read-only
    a single file (container's resolv.conf) read-only                 read-only
    kernel's own (cgroup, debugfs, …)      not shown                  read-only
    autofs                                 not shown, not triggered   covered, not triggered
    /proc /dev /run (/sys)                 fresh                      fresh (/sys: read-only)
    /tmp (/var/tmp)                        the sandbox's own          the sandbox's own

Where a kind of mount of the host is to be treated differently: `_Drawing._classify` for the machine plan, `_Drawing.user` for the
user plan. A mount that somebody asks for goes into both, before `_finished`. A new operation belongs in `linux/mounts.py`.
"""

import contextlib
import os
import stat
from dataclasses import dataclass

from elsewhere.linux import mountinfo
from elsewhere.linux import syscalls as sys_
from elsewhere.linux.mountinfo import Mount
from elsewhere.linux.mounts import (
    Absent,
    Clone,
    Cover,
    Devices,
    Directory,
    Fresh,
    Handed,
    Operation,
    Own,
    Plan,
    ReadOnly,
)
from elsewhere.linux.overlay import Overlay
from elsewhere.paths import is_within, outermost
from elsewhere.sandbox import hidden, seeds
from elsewhere.sandbox.confinement import Confinement
from elsewhere.sandbox.ids import FIRST_ID
from elsewhere.sandbox.project import Project

__all__ = [
    "USER_ROOT",
    "Base",
    "Host",
    "Layer",
    "Subject",
    "View",
    "draw",
    "empty_plan",
    "fingerprint",
    "standing",
    "standing_stamp",
]

_REPLACED = ("/proc", "/sys", "/dev", "/run", "/tmp")
_KERNELS_OWN = frozenset(
    """proc sysfs devtmpfs devpts cgroup cgroup2 debugfs tracefs securityfs configfs pstore efivarfs bpf binfmt_misc mqueue
    hugetlbfs fusectl rpc_pipefs nsfs selinuxfs ramfs""".split()
)
_PROC_MASKED = (
    "kcore",
    "keys",
    "key-users",
    "kallsyms",
    "timer_list",
    "sysrq-trigger",
    "kmsg",
    "sched_debug",
    "latency_stats",
)
_PROC_MASKED_DIRECTORIES = ("acpi", "scsi")
_PROC_READ_ONLY = ("bus", "fs", "irq", "sys")  # the host's root could write there without any capability
_SYS_MASKED_DIRECTORIES = ("firmware", "kernel/security", "kernel/debug")
_SHM_SIZE = "50%"

USER_ROOT = Clone("/", "/", sys_.MOUNT_ATTR_RDONLY | sys_.MOUNT_ATTR_NOSUID, recursive=True)


@dataclass(frozen=True, slots=True)
class Host:
    """What a plan depends on besides the project."""

    mounts: tuple[Mount, ...]
    home: str
    state: str

    @classmethod
    def look(cls, home: str, state: str) -> "Host":
        return cls(tuple(mountinfo.read()), os.path.realpath(home), state)


@dataclass(frozen=True, slots=True)
class Base:
    """What the project starts from. With `layers` (newest first) they are all that shows of it; without, reality shows through.
    `live` are directories of it that show reality all the same. `seeds` are files that the sandbox has its own version of from
    the start: where, and which file they are copied from."""

    layers: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    seeds: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """What a view is drawn of. `numbers` are the layers that a sandbox has already, by their places."""

    host: Host
    project: Project
    base: Base = Base()
    confinement: Confinement = Confinement()
    numbers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """One overlay of the view: where it is mounted, what of reality lies below, the frozen layers between (newest first), and the
    number of its upper and work directories."""

    at: str
    lower: str | None
    number: int
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """`description` is the plan in words, made when it is drawn, so that nobody waits for it later.
    `accounts_at` is the layer that gets its own version of the accounts (`seeds.py`); None: they are hidden instead."""

    plan: Plan
    layers: tuple[Layer, ...]
    hidden: tuple[str, ...]
    description: tuple[tuple[str, str], ...]
    accounts_at: str | None


def draw(subject: Subject, *, whole_machine: bool, redirects: bool = True, overlay: bool = True) -> View:
    """`overlay=False` leaves the places of copy on write to somebody else (fuse-overlayfs), handed in by name."""
    drawing = _Drawing(subject, idmapped=whole_machine, redirects=redirects, overlay=overlay)
    return drawing.machine() if whole_machine else drawing.user()


def standing(*, whole_machine: bool) -> tuple[Operation, ...]:
    """The same for every sandbox of a host, so made ahead of time."""
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


class _Drawing:
    def __init__(self, subject: Subject, *, idmapped: bool, redirects: bool, overlay: bool) -> None:
        host, project = subject.host, subject.project
        self._base = subject.base
        self._numbers = dict(subject.numbers)
        self._host = host
        self._mounts = list(host.mounts)
        self._project = project
        self._idmapped = idmapped
        self._redirects = redirects
        self._overlay = overlay
        self._layers: list[Layer] = []
        home = (host.home,) if host.home != "/" and os.path.isdir(host.home) else ()
        git = (project.git,) if project.git else ()
        self._places = outermost((project.path, *git, *home))
        self._needed = (project.path, *git)

    # -- root ---------------------------------------------------------------------------------------------------------------

    def machine(self) -> View:
        root = self._over("/", "/", attributes=_attributes(mountinfo.containing("/", self._mounts)))
        operations: list[Operation] = [Own("/tmp", "tmp")]
        islands = [place for place in self._places if _replaced(place)]
        for place in islands:
            operations += self._stepping_stones(place)
            if not self._is_pinned(place):
                operations.append(self._over(place, place))
        for mount in self._mounts:
            if mount.target != "/" and mount.target not in islands and not self._is_pinned(mount.target):
                operation = self._classify(mount, islands)
                if operation is not None:
                    operations.append(operation)
        # What is shown as it is shows its sockets, too, and a read-only mount does not keep anybody from connecting.
        cloned = [one.target for one in operations if isinstance(one, Clone)]
        sockets = [path for path in _sockets(_REPLACED) if any(is_within(path, place) for place in cloned)]
        operations += [Cover(path, directory=False) for path in sockets]
        return self._finished(root, [*operations, *self._pinned()], standing(whole_machine=True))

    def _classify(self, mount: Mount, islands: list[str]) -> Operation | None:
        """What becomes of one mount of the host in the machine plan."""
        if _replaced(mount.target) and not any(is_within(mount.target, island) for island in islands):
            return (
                None
                if mount.target in _REPLACED or mount.target.startswith("/dev/")
                else Absent(mount.target, "its directory is fresh")
            )
        if mount.kind == "autofs":
            return Absent(mount.target, "autofs, not to be triggered")
        if mount.kind in _KERNELS_OWN:
            return Absent(mount.target, mount.kind)
        attributes = _attributes(mount)
        if mount.remote:
            # Not even looked at: a server that is gone would keep us waiting.
            return Clone(mount.target, mount.target, attributes | sys_.MOUNT_ATTR_RDONLY)
        try:
            found = os.stat(mount.target)
        except OSError as error:
            return Absent(mount.target, error.strerror or "cannot be reached")
        if stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode):
            return Absent(mount.target, "it leads to the host")
        if "ro" in mount.options or not stat.S_ISDIR(found.st_mode):
            return Clone(mount.target, mount.target, attributes | sys_.MOUNT_ATTR_RDONLY, idmapped=True)
        needed = any(is_within(place, mount.target) for place in (*self._needed, *seeds.ACCOUNTS))
        return self._over(mount.target, mount.target, attributes=attributes, required=needed)

    def _stepping_stones(self, place: str) -> list[Operation]:
        """Directories of the fresh /tmp or /run that lead to a place which is shown there all the same."""
        stones: list[Operation] = []
        parts = place.split("/")
        for depth in range(3, len(parts) + 1):
            path = "/".join(parts[:depth])
            found = os.stat(path)
            mode = stat.S_IMODE(found.st_mode) if depth == len(parts) else 0o755
            if self._idmapped:
                stones.append(Directory(path, mode, FIRST_ID + found.st_uid, FIRST_ID + found.st_gid))
            else:
                stones.append(Directory(path, mode, None, None))
        return stones

    # -- an ordinary user -----------------------------------------------------------------------------------------------------

    def user(self) -> View:
        operations: list[Operation] = [Own("/tmp", "tmp")]
        if os.path.isdir("/var/tmp"):
            operations.append(Own("/var/tmp", "vartmp"))
        for place in self._places:
            if _replaced(place) or is_within(place, "/var/tmp"):
                operations += self._stepping_stones(place) if not is_within(place, "/var/tmp") else self._var_tmp_stones(place)
            if not self._is_pinned(place):
                operations += [self._over(path, path) for path in self._free_of_mounts(place)]
        if self._base.layers:
            operations += [
                Clone(mount.target, mount.target, recursive=True)
                for mount in self._mounts
                if mount.target.startswith(self._project.path + "/") and mount.kind != "autofs"
            ]
        operations += self._pinned()
        operations += [Cover(mount.target, directory=True) for mount in self._mounts if mount.kind == "autofs"]
        cloned = [one.target for one in operations if isinstance(one, Clone)]
        sockets = [
            path
            for path in _sockets((*_REPLACED, "/var/tmp"))
            if not any(is_within(path, layer.at) for layer in self._layers) or any(is_within(path, place) for place in cloned)
        ]
        sockets += [mount.target for mount in self._mounts if mount.target not in sockets and _is_socket(mount.target)]
        operations += [Cover(path, directory=False) for path in sockets]
        return self._finished(USER_ROOT, operations, standing(whole_machine=False))

    def _var_tmp_stones(self, place: str) -> list[Operation]:
        return [stone for stone in self._stepping_stones(place) if stone.target != "/var/tmp"]

    def _free_of_mounts(self, place: str) -> list[str]:
        """The kernel refuses a lower with mounts below it to an ordinary user: go down to the directories that have none."""
        below = [mount.target for mount in self._mounts if mount.target.startswith(place + "/")]
        if not below:
            return [place]
        found: list[str] = []
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if entry.path not in below and entry.is_dir(follow_symlinks=False):
                    found += self._free_of_mounts(entry.path)
        return sorted(found)

    # -- both ---------------------------------------------------------------------------------------------------------------

    def _is_pinned(self, place: str) -> bool:
        return bool(self._base.layers) and place == self._project.path

    def _pinned(self) -> list[Operation]:
        """The project as it was, and what of it is as it is."""
        if not self._base.layers:
            return []
        operations = [self._over(self._project.path, None, frozen=self._base.layers)]
        return operations + [self._over(place, place) for place in self._base.live if os.path.isdir(place)]

    def _over(
        self, at: str, lower: str | None, *, frozen: tuple[str, ...] = (), attributes: int = 0, required: bool = True
    ) -> Operation:
        number = self._numbers.get(at)
        if number is None:
            number = max((*self._numbers.values(), *(layer.number for layer in self._layers)), default=-1) + 1
        self._layers.append(Layer(at, lower, number, frozen))
        if not self._overlay:
            return Handed(at, at, f"copy on write over {lower or 'the base'}, by fuse-overlayfs")
        return Overlay(
            at,
            lower,
            f"upper/{number}",
            f"work/{number}",
            layers=frozen,
            attributes=attributes,
            idmapped=self._idmapped,
            userxattr=not self._idmapped,
            redirects=self._redirects,
            required=required,
        )

    def _finished(self, root: Operation, operations: list[Operation], always: tuple[Operation, ...]) -> View:
        accounts_at = mountinfo.containing("/etc", self._mounts).target if self._idmapped else None
        if accounts_at not in [layer.at for layer in self._layers]:
            accounts_at = None  # on a mount of its own that is read-only
        also = () if accounts_at else seeds.ACCOUNTS
        places = hidden.hidden_places(self._host.home, (self._project.path,), self._host.state, also)
        covers = [Cover(path, directory=os.path.isdir(path), again=bool(self._numbers)) for path in places]
        # What lies below something else comes after it; covers lie on top of everything.
        ordered = sorted(operations, key=lambda operation: operation.target.split("/"))
        plan = Plan(always, root, (*ordered, *covers))
        return View(plan, tuple(self._layers), tuple(places), plan.describe(), accounts_at)


def _sockets(unreachable: tuple[str, ...]) -> list[str]:
    """Sockets of the host that a read-only mount would still let a command connect to."""
    paths = set()
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as table:
        for line in table:
            words = line.rstrip(b"\n").split(None, 7)  # columns are padded
            if len(words) == 8 and words[7].startswith(b"/"):
                paths.add(os.path.realpath(os.fsdecode(words[7])))
    visible = []
    for path in paths:
        if not any(is_within(path, place) for place in unreachable):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    visible.append(path)
    return sorted(visible)


def standing_stamp() -> tuple[object, ...]:
    """Changes whenever the standing mounts would be made differently: what the resolver is goes into /run."""
    return tuple(_stamp(path) for path in ("/etc/resolv.conf", os.path.realpath("/etc/resolv.conf")))


def fingerprint(subject: Subject, *, whole_machine: bool) -> tuple[object, ...]:
    """Changes whenever a view drawn earlier would not be drawn like that any more; mounts are watched separately."""
    host, project = subject.host, subject.project
    seen: list[object] = [_stamp(path) for path in hidden.watched(host.home, project.path)]
    seen += [*(_stamp(path) for path in seeds.ACCOUNTS), *standing_stamp()]
    for path in (project.path, project.git, host.home, "/"):
        found = None if path is None else _stat(path)
        seen.append(found and (found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid))
    if not whole_machine:
        places = (project.path, host.home)
        below = any(mount.target.startswith(f"{place}/") for mount in host.mounts for place in places)
        seen += _sockets((*_REPLACED, "/var/tmp", *(() if below else places)))
    return tuple(seen)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _is_socket(path: str) -> bool:
    found = _stat(path)
    return found is not None and (stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode))


def _stamp(path: str) -> tuple[int, int, int] | None:
    found = _stat(path)
    return found and (found.st_dev, found.st_ino, found.st_mtime_ns)


def _replaced(path: str) -> bool:
    return any(is_within(path, place) for place in _REPLACED)


def _attributes(mount: Mount) -> int:
    """An overlay does not inherit these from what lies below it."""
    known = {"nosuid": sys_.MOUNT_ATTR_NOSUID, "nodev": sys_.MOUNT_ATTR_NODEV, "noexec": sys_.MOUNT_ATTR_NOEXEC}
    return sum(bit for option, bit in known.items() if option in mount.options)


def empty_plan() -> Plan:
    """For the rung that mounts nothing."""
    return Plan((), Absent("/", "no mounts on this rung"), ())
