"""The builder: the process that puts a sandbox's tree together, in the mount namespace that the keeper lives in.

A *blank* is a builder and a keeper that wait. Namespaces are made, the standing mounts are made, the keeper has entered its user
namespace, dropped its powers and installed the filter: all ahead of time. To make a sandbox of it the launcher sends a plan;
the builder executes it and ends; `pivot_root` moves the keeper, which shares the namespace, to the new root. So the keeper
never holds a power that the sandbox could want, and creating costs little more than the mounts themselves.

    launcher ──fork── builder ──fork── keeper (pid 1)
                 unshare            a group of its own
                                    root: a user namespace made under an id of its own, mapped by the builder
                 standing mounts    no capabilities but the kept ones, no new privileges, filter
       ◄── ready ───┤
       ─── plan ───►│ build, pivot
       ◄── built ───┘ exit

Descriptors: `control` leads to the keeper and goes to whoever owns the sandbox; end of file on it ends the keeper. `orders` leads
to the builder; end of file on it ends the builder.
"""

import errno
import os
import pickle
import signal
import socket
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

from elsewhere.limits import DEFAULTS
from elsewhere.linux import capabilities, cgroups, landlock, mounts, network, seccomp, userns
from elsewhere.linux import syscalls as sys_
from elsewhere.linux.gauges import Gauges
from elsewhere.linux.mounts import Bench, Operation, Plan
from elsewhere.sandbox.ids import FIRST_ID, ID_COUNT
from elsewhere.sandbox.keeping import processes, wire
from elsewhere.sandbox.keeping.keeper import Keeper, seal_imports
from elsewhere.sandbox.launching import fuse as fuse_programs
from elsewhere.sandbox.launching.forking import leave_the_launcher
from elsewhere.sandbox.launching.fuse import Fuse
from elsewhere.sandbox.view import USER_ROOT
from elsewhere.storage import copying, saving, trash

__all__ = ["Blank", "BuildFailed", "Groups", "Kind", "blank", "filters", "landlocked", "run", "unborn"]

_PATIENCE_S = 20.0
_MOVED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ESTALE)
_INOTIFY_SHARE = 2  # of its user's watches, a sandbox without an id of its own may have one part in so many


@dataclass(frozen=True, slots=True)
class Kind:
    """What a blank is sealed for, and cannot be changed to later. `offline`: a network of its own that leads nowhere."""

    whole_machine: bool
    offline: bool = False
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Groups:
    """Where a group can be made, and what the next one is called."""

    host: cgroups.Host
    name: str


Filters = tuple[bytes, bytes]


def filters(*, nested: bool = False, unix_sockets: bool = True) -> Filters:
    """The filter that only refuses, and the one that also tells what it refused, for kernels that can."""
    plain = seccomp.program(unix_sockets=unix_sockets, nested=nested)
    return plain, seccomp.program(unix_sockets=unix_sockets, nested=nested, notify=True)


class BuildFailed(Exception):
    """What could not be done here: the step, and the kernel's answer. An accident says nothing about what this host allows. Where
    the kernel gave no answer, somebody was killed: that may be an accident, and is worth a second attempt. What passes is a path
    that somebody changed between the drawing of a view and the making of its mounts."""

    def __init__(self, step: str, number: int, text: str) -> None:
        super().__init__(f"{step}: {text}")
        self.step = step
        self.errno = number
        self.accident = step == "builder" or number in (errno.EAGAIN, errno.ENOMEM)
        self.again = self.accident or number in (0, errno.ESRCH)
        self.passing = step in ("directories", "mounts") and number in _MOVED


@dataclass(slots=True)
class Blank:
    """A builder and a keeper that wait, or are about to. `mount_namespace` keeps their mounts for as long as it is open."""

    control: socket.socket
    orders: socket.socket
    builder_pid: int = 0
    keeper_pid: int = 0
    mount_namespace: int = -1
    sealed: dict[str, Any] = field(default_factory=dict)

    def ready(self) -> None:
        """Wait until both are."""
        if not self.keeper_pid:
            message, fds = _ask(self.orders)
            if message[0] != "ready":
                raise BuildFailed(*message[1:])
            self.keeper_pid, self.mount_namespace, self.sealed = message[1], fds[0], message[2]

    def is_ready(self) -> bool:
        """Whether `ready` would return at once."""
        return bool(self.keeper_pid or wire.readable(self.orders))

    def is_built(self) -> bool:
        """Whether `built` would return at once."""
        return wire.readable(self.orders)

    def order(self, plan: Plan, directory: str, *, memory: int = 0, image: int = -1) -> None:
        """Make a sandbox of it, with its layers in memory or in an image if one of these is given. Returns at once; `built`
        waits."""
        self.ready()
        wire.send(self.orders, (pickle.dumps(plan), directory, memory), [image] if image >= 0 else [])

    def built(self) -> tuple[dict[str, str], int, int]:
        """What had to be weaker than planned, a descriptor by which the sandbox's directory can be looked at, and one of the
        layers where they do not lie in it."""
        message, fds = _ask(self.orders)
        self.orders.close()
        if message[0] != "built":
            raise BuildFailed(*message[1:])
        return message[1], fds[0], fds[1] if len(fds) > 1 else -1

    def discard(self) -> None:
        self.control.close()
        self.orders.close()
        if self.mount_namespace >= 0:
            os.close(self.mount_namespace)
            self.mount_namespace = -1


def unborn() -> tuple[Blank, list[socket.socket]]:
    """A blank whose processes somebody else is about to fork, and their ends: the keeper's and the builder's."""
    control, keeper_end = wire.pair()
    orders, builder_end = wire.pair()
    orders.settimeout(_PATIENCE_S)
    return Blank(control, orders), [keeper_end, builder_end]


def blank(standing: tuple[Operation, ...], state: str, kind: Kind, *, groups: Groups, fuse: Fuse | None = None) -> Blank:
    """Fork a builder, which forks a keeper. Returns at once; `Blank.ready` waits."""
    born, ends = unborn()
    born.builder_pid = os.fork()
    if born.builder_pid == 0:
        try:
            leave_the_launcher([end.fileno() for end in ends])
            run(ends[0], ends[1], standing, state, kind, filters(nested=kind.nested), groups, fuse)
        finally:
            os._exit(1)
    for end in ends:
        end.close()
    return born


def _ask(orders: socket.socket) -> tuple[Any, list[int]]:
    try:
        return wire.receive(orders)
    except (EOFError, OSError) as error:
        raise BuildFailed("builder", getattr(error, "errno", 0) or 0, f"the builder ended without an answer ({error})") from error


def run(
    keeper_end: socket.socket,
    orders: socket.socket,
    standing: tuple[Operation, ...],
    state: str,
    kind: Kind,
    programs: Filters,
    groups: Groups,
    fuse: Fuse | None,
) -> NoReturn:
    """What a builder does, in a process of its own."""
    at_work = _Building(kind)
    try:
        at_work.enter_namespaces()
        at_work.make_room(state, fuse)
        at_work.start_keeper(keeper_end, orders, programs, groups)
        at_work.stand(standing, orders)
        at_work.build(orders)
        if at_work.daemons:
            fuse_programs.outlive(at_work.keeper, at_work.daemons)
    except BaseException as error:
        number = getattr(error, "errno", None) or 0
        text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        try:
            wire.send(orders, ("failed", at_work.step, number, text))
        finally:
            at_work.bury_keeper()
            os._exit(1)
    os._exit(0)


class _Building:
    """How far a builder is. `step` is what it is at, for whoever asks what could not be done here."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.step = "namespaces"
        self.keeper = 0
        self.daemons: list[Any] = []
        self._sealed: tuple[Any, ...] = ("unborn",)
        self._bench = Bench(-1, -1, "")

    def enter_namespaces(self) -> None:
        kinds = sys_.CLONE_NEWNS | sys_.CLONE_NEWIPC | sys_.CLONE_NEWUTS
        if self.kind.offline:
            kinds |= sys_.CLONE_NEWNET
        uid, gid = os.getuid(), os.getgid()
        if self.kind.whole_machine:
            sys_.unshare(kinds)
        elif uid == 0:
            with userns.mapper_of_all_ids():
                sys_.unshare(kinds | sys_.CLONE_NEWUSER)
        else:
            sys_.unshare(kinds | sys_.CLONE_NEWUSER)
            userns.map_myself(uid, gid)
        sys_.mount(None, "/", None, sys_.MS_REC | sys_.MS_PRIVATE)
        if self.kind.offline:
            self.step = "network"
            network.raise_loopback()

    def make_room(self, state: str, fuse: Fuse | None) -> None:
        """What has to be there before there is anything of ours to be seen, and a place to work at."""
        if not self.kind.whole_machine:
            _share_counters()
            self.step = "root"
            self._bench.handed["/"] = USER_ROOT.make(self._bench)
        self.step = "scratch"
        scratch = os.path.join(state, "mnt")
        sys_.mount("elsewhere", scratch, "tmpfs", sys_.MS_NOSUID | sys_.MS_NODEV, "size=1m,mode=700")
        self._bench.scratch = scratch
        if fuse is not None:
            self.step = "fuse-overlayfs"
            self.daemons = fuse_programs.start(fuse, self._bench)
            # They look files up by path, so they stay behind in a mount namespace whose root does not move.
            sys_.unshare(sys_.CLONE_NEWNS)

    def start_keeper(self, keeper_end: socket.socket, orders: socket.socket, programs: Filters, groups: Groups) -> None:
        """Until it has given everything up."""
        self.step = "process namespace"
        sys_.unshare(sys_.CLONE_NEWPID)
        ours, theirs = wire.pair()
        self.keeper = os.fork()
        if self.keeper == 0:
            ours.close()
            orders.close()
            _keeper(keeper_end, theirs, self.kind.whole_machine, programs, groups)
        theirs.close()
        keeper_end.close()
        if self.kind.whole_machine:
            self.step = "user namespace"
            _receive(ours)
            userns.write_map(f"/proc/{self.keeper}/uid_map", f"0 {FIRST_ID} {ID_COUNT}")
            userns.write_map(f"/proc/{self.keeper}/gid_map", f"0 {FIRST_ID} {ID_COUNT}")
            self._bench.userns = os.open(f"/proc/{self.keeper}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            wire.send(ours, "mapped")
        self.step = "keeper"
        self._sealed, fds = _receive(ours)
        if self._sealed[0] != "sealed":
            raise OSError(self._sealed[2], f"{self._sealed[1]}: {self._sealed[3]}")
        self._bench.handed["proc"] = fds[0]

    def stand(self, standing: tuple[Operation, ...], orders: socket.socket) -> None:
        """All that can be mounted before anybody knows for what."""
        self.step = "standing mounts"
        staging = self._bench.scratch_directory()
        self._bench.root = os.open(staging, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        mounts.prepare(standing, self._bench)
        namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        wire.send(orders, ("ready", self.keeper, self._sealed[1]), [namespace])
        os.close(namespace)

    def build(self, orders: socket.socket) -> None:
        """Wait for a plan, and make it true."""
        bench, whole_machine, staged = self._bench, self.kind.whole_machine, self._bench.root
        self.step = "waiting"
        try:
            (pickled, directory, memory), image = wire.receive(orders)
        except EOFError:
            self.bury_keeper()  # the launcher has no use for this blank
            os._exit(0)
        self.step = "mounts"
        seen = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if whole_machine else _seen(directory, bench)
        bench.own, apart = directory, []
        if memory or image:
            apart = [_layers_apart(image[0] if image else _memory(memory), directory, bench, whole_machine)]
            bench.own = f"/proc/self/fd/{apart[0]}"
        mounts.build(pickle.loads(pickled), staged, bench)  # noqa: S301  (from our own launcher, over a socket that only it has)
        wire.send(orders, ("built", bench.weaker), [seen, *apart])

    def bury_keeper(self) -> None:
        """A keeper that nobody wants ends by itself; what it was in goes after it."""
        if self._sealed[0] == "sealed" and self._sealed[1]["group"]:
            os.waitpid(self.keeper, 0)
            cgroups.remove(cgroups.Group(*self._sealed[1]["group"]))


def join_group(groups: Groups) -> tuple[dict[str, Any], Gauges | None]:
    """Make a group, with the built-in limits, and go there: what we start is born in it. Without one, why there is none."""
    host = groups.host
    if not host.version:
        return {"group": None, "ungrouped": host.missing}, None
    group = None
    try:
        group = cgroups.make(host, groups.name)
        known = {name: _number(getattr(DEFAULTS, name)) for name in ("memory", "pids") if name in host.bases}
        cgroups.limit(group, **known)
        cgroups.enter(group)
        gauges = Gauges(group)
    except OSError as error:
        if group is not None:
            cgroups.remove(group, 0)
        return {"group": None, "ungrouped": dict.fromkeys(cgroups.CONTROLLERS, f"no group could be made: {error}")}, None
    return {"group": [group.version, group.directories], "ungrouped": host.missing}, gauges


def _number(value: str | int | None) -> int:
    assert isinstance(value, int)
    return value


def _share_counters() -> None:
    """Watches are counted for a user, in all of their namespaces together: one sandbox must not take them all."""
    for name in ("max_inotify_instances", "max_inotify_watches"):
        try:
            with open(f"/proc/sys/user/{name}", "r+", encoding="ascii") as setting:
                most = int(setting.read())
                with open(f"/proc/sys/fs/inotify/{name.replace('inotify_', 'user_')}", encoding="ascii") as users:
                    most = min(most, int(users.read()))
                setting.seek(0)
                setting.write(str(max(1, most // _INOTIFY_SHARE)))
        except (OSError, ValueError):
            continue  # a kernel without that counter has nothing to share


def _keeper(
    control: socket.socket, builder_end: socket.socket, whole_machine: bool, programs: Filters, groups: Groups
) -> NoReturn:
    """Take what is still needed, then give everything up; from the filter on, only serve."""
    step = "group"
    try:
        group, gauges = join_group(groups)
        sys_.unshare(sys_.CLONE_NEWCGROUP)  # now: its root is the group that we are in
        step = "proc"
        proc = sys_.fsopen("proc")
        sys_.fsconfig_create(proc)
        proc_mount = sys_.fsmount(proc, sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV | sys_.MOUNT_ATTR_NOEXEC)
        os.close(proc)
        if whole_machine:
            step = "user namespace"
            # Counters (inotify, for one) are kept for whoever creates a user namespace: under an id of its own, each sandbox has
            # its own budget. The id lies outside of what sandboxes map.
            os.seteuid(FIRST_ID + ID_COUNT + int.from_bytes(os.urandom(4), "big") % (1 << 20))
            capabilities.regain()
            sys_.unshare(sys_.CLONE_NEWUSER)
            wire.send(builder_end, "unshared")
            _receive(builder_end)
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        step = "capabilities"
        keeper = Keeper(control, alone=True, gauges=gauges)
        capabilities.give_up_all_but(capabilities.KEPT if os.getuid() == 0 else ())
        sys_.prctl(sys_.PR_SET_DUMPABLE, 0)
        # An ordinary user's keeper does it once its root stands, together with what is about files: one after the other, the two
        # would forbid to move anything.
        scoped = landlock.scope() if whole_machine else landlock.can_scope()
        facts = _seal(keeper, programs, scoped=scoped)
        wire.send(builder_end, ("sealed", {**facts, **group}), [proc_mount])
        os.close(proc_mount)
        builder_end.close()
    except BaseException as error:
        number = getattr(error, "errno", None) or 0
        wire.send(builder_end, ("failed", step, number, getattr(error, "strerror", None) or str(error)))
        os._exit(1)
    keeper.serve()


def _seal(keeper: Keeper, programs: Filters, *, scoped: bool) -> dict[str, Any]:
    """For good: the filter. What became of it is told."""
    _quiet_signals()
    sys_.prctl(sys_.PR_SET_NO_NEW_PRIVS, 1)
    listener = seccomp.install_best(*programs)
    if listener >= 0:
        keeper.hear_of_refusals(listener)
    seal_imports()
    return {"scoped": scoped, "told": listener >= 0}


def landlocked(rules: list[tuple[str, int]], groups: Groups, *, nested: bool) -> tuple[int, int, socket.socket, dict[str, Any]]:
    """A keeper without namespaces, held by Landlock and the filter alone: its pid, that of its guardian, its control socket, and
    how it was sealed.

    The guardian stays outside of Landlock, where a command cannot reach it, and ends what is left when the keeper is gone: no
    kernel does that without a process namespace."""
    control, keeper_end = wire.pair()
    ours, theirs = wire.pair()
    ours.settimeout(_PATIENCE_S)
    guardian = os.fork()
    if guardian == 0:
        try:
            leave_the_launcher([keeper_end.fileno(), theirs.fileno()])
            os.setsid()
            sys_.prctl(sys_.PR_SET_CHILD_SUBREAPER, 1)
            keeper = os.fork()
            if keeper == 0:
                _landlocked_keeper(keeper_end, theirs, rules, filters(nested=nested, unix_sockets=False), groups)
            keeper_end.close()
            theirs.close()
            os.waitpid(keeper, 0)
            while mine := processes.descendants(os.getpid()):
                for pid in mine:
                    processes.kill_quietly(pid, signal.SIGKILL)
                processes.reap_all()
        finally:
            os._exit(0)
    keeper_end.close()
    theirs.close()
    with ours:
        message, _ = _ask(ours)
    if message[0] != "sealed":
        control.close()
        raise BuildFailed(*message[1:])
    return message[1], guardian, control, message[2]


def _landlocked_keeper(
    control: socket.socket,
    starter: socket.socket,
    rules: list[tuple[str, int]],
    programs: Filters,
    groups: Groups,
) -> NoReturn:
    step = "landlock"
    try:
        group, gauges = join_group(groups)
        sys_.prctl(sys_.PR_SET_CHILD_SUBREAPER, 1)
        pid = os.getpid()
        keeper = Keeper(control, alone=False, gauges=gauges)
        landlock.restrict(rules)
        if os.getuid() == 0:
            capabilities.give_up_all_but(())
        sys_.prctl(sys_.PR_SET_DUMPABLE, 0)
        step = "filter"
        facts = _seal(keeper, programs, scoped=landlock.can_scope())
        wire.send(starter, ("sealed", pid, {**facts, **group}))
        starter.close()
    except BaseException as error:
        wire.send(starter, ("failed", step, getattr(error, "errno", None) or 0, getattr(error, "strerror", None) or str(error)))
        os._exit(1)
    keeper.serve()


def _quiet_signals() -> None:
    """Pid 1 is immune to signals from inside only where it leaves them at their default; Python handles INT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _seen(directory: str, bench: Bench) -> int:
    """The sandbox's directory, for a keeper that is nobody else outside than whoever runs it: a mount of its own, read-only, from
    which nobody can go up. Root's keeper is nobody outside, and finds everything else closed anyway."""
    fd = sys_.open_tree(sys_.AT_FDCWD, directory, sys_.OPEN_TREE_CLONE)
    mounts.set_attributes(fd, sys_.MOUNT_ATTR_RDONLY, 0, bench)
    return fd


def _memory(size: int) -> int:
    context = sys_.fsopen("tmpfs")
    sys_.fsconfig_string(context, "size", str(size))
    sys_.fsconfig_string(context, "mode", "700")
    sys_.fsconfig_create(context)
    fd = sys_.fsmount(context, sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV)
    os.close(context)
    return fd


def _layers_apart(fd: int, directory: str, bench: Bench, whole_machine: bool) -> int:
    """Upper and work on a file system of their own (in memory, or in an image), shaped like the directory on disk, as far as they
    are not there already."""
    place = bench.scratch_directory()
    sys_.move_mount(fd, "", sys_.AT_FDCWD, place)
    os.close(fd)
    attribute = "trusted.overlay" if whole_machine else "user.overlay"
    saving.restore_layers(os.path.join(directory, "upper"), os.path.join(place, "upper"), attribute)
    with os.scandir(os.path.join(place, "work")) if os.path.isdir(os.path.join(place, "work")) else nullcontext(()) as earlier:
        for entry in earlier:
            trash.remove_tree(os.path.join(entry.path, "work"))  # overlay's warning that nothing was synced
    _mirror(os.path.join(directory, "work"), os.path.join(place, "work"))
    return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _mirror(source: str, target: str) -> None:
    """The same directories, with owners and modes, where they are missing."""
    new = not os.path.isdir(target)
    if new:
        os.mkdir(target)
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _mirror(entry.path, os.path.join(target, entry.name))
    if new:
        copying.copy_attributes(source, target, os.stat(source))


def _receive(sock: socket.socket) -> tuple[Any, list[int]]:
    try:
        return wire.receive(sock)
    except EOFError:
        raise OSError(0, "the other process ended without a word") from None
