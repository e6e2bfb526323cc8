"""Groups of processes (cgroups, version 1 and 2): made, limited, read and removed, from the host's side.

A group has two places. Commands are in `work`, which carries the limits of memory and of processor time. Whoever keeps the group
is outside of `work`: the kernel's memory killer never has to choose between it and a command, and a command that spins
cannot keep it from running. Processes are counted for both together, since the keeper steps into `work` to start a command
(see `gauges.py`), so the limit of processes is one higher than what was asked for.

    version 1, in the tree of each controller                   version 2
    <base>/elsewhere/<name>        the keeper; pids.max         <base>/elsewhere/<name>          nobody; pids.max
    <base>/elsewhere/<name>/work   commands (not for pids)      <base>/elsewhere/<name>/keeper   the keeper
                                                                <base>/elsewhere/<name>/work     commands

`<base>` is found below what limits ourselves, so that it limits them, too. Version 1: our own group in each tree. Version 2,
where processes are in leaves only: for root, the nearest group at or above our own that can hand its controllers on; for an
ordinary user, the nearest one that was delegated to them. In such a group our own processes may have to make room first: they
move to a leaf, `<base>/elsewhere-launcher`. Processes of others are never moved.

Where controllers are on version 1, the tree of version 2 that hybrid hosts have as well is not used. Not here: what to do where
nothing can be limited.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import field

from elsewhere.linux.gauges import MOVERS, WORK, keeper_place, work_place
from elsewhere.values import dataclass

__all__ = ["CONTROLLERS", "Group", "Host", "enter", "left_over", "limit", "look", "make", "remove", "scope", "sweep"]

CONTROLLERS = ("memory", "pids", "cpu")

_PARENT = "elsewhere"
_OURS = "elsewhere-"
_LEAF = f"{_OURS}launcher"
_KEEPER = "keeper"
_READ_ONLY_HERE = "cpuacct"  # a tree of its own on version 1, which limits nothing
_HANDED_ON = ("memory", "cpu")  # to `work`, on version 2; processes are counted in the group itself
_UNITS = (".scope", ".service", ".slice")
_PERIOD_US = 100_000
_LEAST_QUOTA_US = 1_000
_TRIES = 50
_PAUSE_S = 0.001
_FRESH_S = 10.0


@dataclass(frozen=True, slots=True)
class Host:
    """What this process may use: a group was really made with it, and removed. Version 0: nothing."""

    version: int
    bases: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def controllers(self) -> tuple[str, ...]:
        return tuple(name for name in CONTROLLERS if name in self.bases)


@dataclass(frozen=True, slots=True)
class Group:
    """Plain data: the group's directory for each controller. On version 2 it is the same for all."""

    version: int
    directories: dict[str, str]

    @property
    def name(self) -> str:
        return os.path.basename(next(iter(self.directories.values())))


# -- what there is ---


def look() -> Host:
    """Try it. As an ordinary user in a group that was delegated to them, our processes make room in it."""
    trees, unified = _mounted()
    own = _own_groups()
    if any(name in trees for name in CONTROLLERS):
        return _look_at_1({name: _inside(mount, own.get(name)) for name, mount in trees.items()})
    if unified is None:
        return Host(0, missing=dict.fromkeys(CONTROLLERS, "no cgroup file system is mounted"))
    return _look_at_2(unified[1], _inside(unified, own.get("")))


def _look_at_1(own: dict[str, str | None]) -> Host:
    bases: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in (*CONTROLLERS, _READ_ONLY_HERE):
        base = own.get(name)
        if base is None:
            seen = "our own group cannot be seen in its tree" if name in own else "no tree with this controller is mounted"
            missing[name] = f"{seen} (cgroup version 1)"
            continue
        try:
            _try(Host(1, {name: base}))
        except OSError as error:
            missing[name] = f"no group can be made in {base} (cgroup version 1): {error.strerror}{_only_root(error)}"
        else:
            bases[name] = base
    missing.pop(_READ_ONLY_HERE, None)
    return Host(1 if any(name in bases for name in CONTROLLERS) else 0, bases, missing)


def _look_at_2(top: str, own: str | None) -> Host:
    if own is None:
        return Host(0, missing=dict.fromkeys(CONTROLLERS, f"our own group cannot be seen in {top} (cgroup version 2)"))
    best: dict[str, str] = {}
    failed: OSError | None = None
    for place in _candidates(own, top):
        _hand_on(place, top)
        if place == own and os.getuid() != 0 and not set(CONTROLLERS) <= set(_words(place, "cgroup.subtree_control")):
            _make_room(place)
            _hand_on(place, top)
        bases = {name: place for name in CONTROLLERS if name in _words(place, "cgroup.subtree_control")}
        if len(bases) > len(best):
            try:
                _try(Host(2, bases))
            except OSError as error:
                failed = failed or error
            else:
                best = bases
        if len(best) == len(CONTROLLERS):
            break
    return Host(
        2 if best else 0, best, {name: _why_not_2(name, own, top, best, failed) for name in CONTROLLERS if name not in best}
    )


def _candidates(own: str, top: str) -> Iterator[str]:
    """At or above our own group, nearest first: where we may make groups, and move ourselves into them."""
    place = os.path.dirname(own) if os.path.basename(own) == _LEAF and own != top else own
    while True:
        files = (place, os.path.join(place, "cgroup.procs"), os.path.join(place, "cgroup.subtree_control"))
        if all(os.access(path, os.W_OK) for path in files) and (os.getuid() == 0 or _is_delegated(place)):
            yield place
        if place == top or len(place) <= len(top):
            return
        place = os.path.dirname(place)


def _is_delegated(place: str) -> bool:
    """A user owns all groups of their service manager, but it wants to be alone with its units unless it was told otherwise.
    Not all versions of it mark those for which it was, so ours are known by their name."""
    if not place.endswith(_UNITS) or os.path.basename(place).startswith(_OURS):
        return True
    try:
        return os.getxattr(place, "user.delegate") == b"1"
    except OSError:
        return False


def _hand_on(place: str, top: str) -> None:
    """Let groups below `place` have the controllers, from the top down. One by one: a single refusal would refuse them all."""
    chain = [place]
    while chain[-1] != top and len(chain[-1]) > len(top):
        chain.append(os.path.dirname(chain[-1]))
    for directory in reversed(chain):
        if not _is_inner(directory):
            continue
        there, on = _words(directory, "cgroup.controllers"), _words(directory, "cgroup.subtree_control")
        for name in CONTROLLERS:
            if name in there and name not in on:
                with contextlib.suppress(OSError):
                    _write(os.path.join(directory, "cgroup.subtree_control"), f"+{name}")


def _is_inner(directory: str) -> bool:
    """Whether it has no processes of its own, or is the root of all. In others the kernel would hand on what it can hand on to
    threads, and from then on no process could be moved to a group below."""
    kind = _words(directory, "cgroup.type")
    return not kind or (kind == ["domain"] and not _words(directory, "cgroup.procs"))


def _make_room(place: str) -> None:
    """A group with processes hands nothing on: ours go to a leaf. They may fork meanwhile, so look again."""
    leaf = os.path.join(place, _LEAF)
    with contextlib.suppress(OSError):
        os.mkdir(leaf)
    for _ in range(_TRIES):
        mine = [pid for pid in _words(place, "cgroup.procs") if _is_mine(pid)]
        if not mine:
            return
        for pid in mine:
            with contextlib.suppress(OSError):
                _write(os.path.join(leaf, "cgroup.procs"), pid)


def _is_mine(pid: str) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False  # gone, or of another process namespace


def _try(host: Host) -> None:
    remove(make(host, f"trial-{os.getpid()}-{os.urandom(4).hex()}"))


def _only_root(error: OSError) -> str:
    if error.errno == errno.EROFS:
        return "; the host of a container mounts it writable, or sets the limits of the whole container itself"
    return "; only root can" if os.getuid() != 0 else ""


def _why_not_2(name: str, own: str, top: str, found: dict[str, str], failed: OSError | None) -> str:
    if name not in _words(top, "cgroup.controllers"):
        return f"the kernel offers no {name} controller in {top}"
    if found:
        return f"the {name} controller was not handed on to {next(iter(found.values()))}"
    if os.statvfs(top).f_flag & os.ST_RDONLY:
        return f"{top} is mounted read-only, as containers have it; their host mounts it writable or sets the limits itself"
    if failed is not None:
        return f"no group can be made: {failed.strerror} ({failed.filename or own})"
    if os.getuid() != 0:
        return (
            f"no cgroup of this user's own ({own} belongs to somebody else): start it with {' '.join(scope('elsewhere'))} COMMAND"
        )
    return f"no group at or above {own} can hand its controllers on: all have processes in them"


def scope(name: str) -> list[str]:
    """What to put before a command so that it is in a delegated group of this user. The name must not be in use. It needs a
    service manager of the user: there is one where $XDG_RUNTIME_DIR/systemd/private is."""
    unit = f"--unit={_OURS}{name.removeprefix(_OURS)}"
    return ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--property=Delegate=yes", unit, "--"]


def _mounted() -> tuple[dict[str, tuple[str, str]], tuple[str, str] | None]:
    """Where each controller's tree is, and the tree of version 2: the group at the root of the mount, and the mount point."""
    trees: dict[str, tuple[str, str]] = {}
    unified = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            left, _, right = line.rstrip("\n").partition(" - ")
            root, target = left.split(" ")[3:5]
            kind, _, options = right.split(" ")[:3]
            if kind == "cgroup":
                trees.update({name: (root, target) for name in options.split(",") if name in (*CONTROLLERS, _READ_ONLY_HERE)})
            elif kind == "cgroup2":
                unified = root, target
    return trees, unified


def _own_groups() -> dict[str, str]:
    """Our group in the tree of each controller; the tree of version 2 has no name."""
    own: dict[str, str] = {}
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            number, names, group = line.rstrip("\n").split(":", 2)
            own.update({name: group for name in names.split(",") if name or number == "0"})
    return own


def _inside(mount: tuple[str, str], group: str | None) -> str | None:
    """The directory of a group; none if it lies outside of what is mounted."""
    root, target = mount[0].rstrip("/"), mount[1]
    if group is None or not (group + "/").startswith(root + "/") or "/../" in group + "/":
        return None
    directory = os.path.join(target, group[len(root) :].strip("/")).rstrip("/")
    return directory if os.path.isdir(directory) else None


# -- a group's life ---


def make(host: Host, name: str) -> Group:
    """Everything of it. Whoever removes a group removes the parent when it is empty: then the parent is made again."""
    group = Group(host.version, {controller: os.path.join(base, _PARENT, name) for controller, base in host.bases.items()})
    for left in reversed(range(_TRIES)):
        try:
            _make_all(host, group)
            return group
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV) or not left:
                remove(group, 0)
                raise
            if host.version == 2:  # or the service manager took a controller back while nobody used it
                base = next(iter(host.bases.values()))
                _hand_on(base, _top_of(base))
    raise AssertionError("unreachable")


def _make_all(host: Host, group: Group) -> None:
    for directory in sorted(set(group.directories.values())):
        parent = os.path.dirname(directory)
        _mkdir(parent)
        if group.version == 2:
            _write_words(parent, [f"+{name}" for name in host.controllers()])
        _mkdir(directory)
        if group.version == 2:
            _write_words(directory, [f"+{name}" for name in _HANDED_ON if name in host.bases])
            _mkdir(os.path.join(directory, _KEEPER))
    for place in work_place(group):
        _mkdir(place)


def _write_words(directory: str, words: list[str]) -> None:
    if words:
        _write(os.path.join(directory, "cgroup.subtree_control"), " ".join(words))


def _top_of(place: str) -> str:
    while os.path.exists(os.path.join(os.path.dirname(place), "cgroup.controllers")):
        place = os.path.dirname(place)
    return place


def enter(group: Group) -> None:
    """The calling process, which has one thread, moves itself to the keeper's place; what it starts is there, too."""
    for place in keeper_place(group):
        _write(os.path.join(place, MOVERS[group.version]), "0")


def limit(group: Group, *, memory: int | None = None, cpus: float | None = None, pids: int | None = None) -> None:
    """None leaves a limit as it is. What the kernel does not accept raises OSError."""
    if memory is not None:
        _limit_memory(group.version, os.path.join(_directory(group, "memory"), WORK), memory)
    if cpus is not None:
        _limit_cpus(group.version, os.path.join(_directory(group, "cpu"), WORK), cpus)
    if pids is not None:
        _write(os.path.join(_directory(group, "pids"), "pids.max"), str(pids + 1))


def _directory(group: Group, controller: str) -> str:
    try:
        return group.directories[controller]
    except KeyError:
        raise OSError(errno.ENODEV, f"this group has no {controller} controller") from None


def _limit_memory(version: int, work: str, limit: int) -> None:
    if version == 2:
        _write(os.path.join(work, "memory.max"), str(limit))
        _write_where_there(os.path.join(work, "memory.swap.max"), "0")
        return
    path, both = os.path.join(work, "memory.limit_in_bytes"), os.path.join(work, "memory.memsw.limit_in_bytes")
    try:
        _write(path, str(limit))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Memory alone must never be more than memory and swap together, so on the way up these go first.
        _write_where_there(both, str(limit))
        _write(path, str(limit))
    _write_where_there(both, str(limit))


def _limit_cpus(version: int, work: str, cpus: float) -> None:
    quota = max(_LEAST_QUOTA_US, round(cpus * _PERIOD_US))
    if version == 2:
        _write(os.path.join(work, "cpu.max"), f"{quota} {_PERIOD_US}")
        return
    _write(os.path.join(work, "cpu.cfs_period_us"), str(_PERIOD_US))
    try:
        _write(os.path.join(work, "cpu.cfs_quota_us"), str(quota))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Version 1 refuses more than what a group above has. That one holds, and is the narrower.
        _write(os.path.join(work, "cpu.cfs_quota_us"), "-1")


def remove(group: Group, seconds: float = 2.0) -> bool:
    """Whether it is gone. The kernel keeps a group until its last process is reaped: so wait, `seconds` at most."""
    until = time.monotonic() + seconds
    groups = sorted(set(group.directories.values()))
    left = [*work_place(group), *(keeper_place(group) if group.version == 2 else ()), *groups]
    while left := [path for path in left if not _rmdir(path)]:
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE_S)
    for directory in groups:
        _rmdir(os.path.dirname(directory))
    return True


def sweep(host: Host, *, older_than: float = _FRESH_S) -> list[str]:
    """Remove what a crash left: groups of ours without a process. Fresh ones stay: somebody may be about to enter them."""
    return sorted(name for name, group in _groups(host).items() if _is_left_over(group, older_than) and remove(group, 0))


def _groups(host: Host) -> dict[str, Group]:
    names: set[str] = set()
    for parent in {os.path.join(base, _PARENT) for base in host.bases.values()}:
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            names.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return {name: Group(host.version, {c: os.path.join(base, _PARENT, name) for c, base in host.bases.items()}) for name in names}


def left_over(host: Host, is_left_over: Callable[[str], bool]) -> list[str]:
    """What is still there of the groups with such names, once those without a process are removed. Whoever made them makes no
    more."""
    groups = {name: group for name, group in _groups(host).items() if is_left_over(name)}
    return sorted(name for name, group in groups.items() if not (_is_left_over(group, 0.0) and remove(group, 0)))


def _is_left_over(group: Group, older_than: float) -> bool:
    for directory in {*group.directories.values(), *keeper_place(group), *work_place(group)}:
        try:
            if time.time() - os.stat(directory).st_mtime < older_than or _words(directory, "cgroup.procs"):
                return False
        except FileNotFoundError:
            continue
    return True


# -- files ---


def _words(directory: str, file: str) -> list[str]:
    """Empty where it cannot be read."""
    try:
        with open(os.path.join(directory, file), encoding="ascii") as stream:
            return stream.read().split()
    except OSError:
        return []


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def _write_where_there(path: str, text: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _write(path, text)


def _mkdir(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def _rmdir(path: str) -> bool:
    """Whether it is gone."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
