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

What the launcher sees of it is in `blanks.py`, how the keeper gives its powers up in `sealing.py`.

Descriptors: `control` leads to the keeper and goes to whoever owns the sandbox; end of file on it ends the keeper. `orders` leads
to the builder; end of file on it ends the builder.
"""

import os
import pickle
import socket
from contextlib import nullcontext
from typing import Any, NoReturn

from elsewhere.linux import cgroups, mounts, network, userns
from elsewhere.linux import syscalls as sys_
from elsewhere.linux.mounts import Bench, Operation
from elsewhere.sandbox.ids import FIRST_ID, ID_COUNT
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching import fuse as fuse_programs
from elsewhere.sandbox.launching.blanks import Blank, Groups, Kind, unborn
from elsewhere.sandbox.launching.forking import leave_the_launcher
from elsewhere.sandbox.launching.fuse import Fuse
from elsewhere.sandbox.launching.sealing import Filters, become_keeper, filters, receive, share_counters
from elsewhere.sandbox.view import USER_ROOT
from elsewhere.storage import copying, saving, trash

__all__ = ["blank", "run"]


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
        self._ports: dict[str, socket.socket] = {}
        self._unredirected = ""
        self._sealed: tuple[Any, ...] = ("unborn",)
        self._bench = Bench(-1, -1, "")

    def enter_namespaces(self) -> None:
        kinds = sys_.CLONE_NEWNS | sys_.CLONE_NEWIPC | sys_.CLONE_NEWUTS
        if self.kind.network != "host":
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
        if self.kind.network != "host":
            self.step = "network"
            network.raise_loopback()
        if self.kind.network == "allow":
            self._ports, self._unredirected = network.open_ports()

    def make_room(self, state: str, fuse: Fuse | None) -> None:
        """What has to be there before there is anything of ours to be seen, and a place to work at."""
        if not self.kind.whole_machine:
            share_counters()
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
            become_keeper(keeper_end, theirs, self.kind.whole_machine, programs, groups, self._ports)
        theirs.close()
        keeper_end.close()
        if self.kind.whole_machine:
            self.step = "user namespace"
            receive(ours)
            userns.write_map(f"/proc/{self.keeper}/uid_map", f"0 {FIRST_ID} {ID_COUNT}")
            userns.write_map(f"/proc/{self.keeper}/gid_map", f"0 {FIRST_ID} {ID_COUNT}")
            self._bench.userns = os.open(f"/proc/{self.keeper}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            wire.send(ours, "mapped")
        self.step = "keeper"
        self._sealed, fds = receive(ours)
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
        ports = self._ports
        wire.send(
            orders,
            ("ready", self.keeper, {**self._sealed[1], "unredirected": self._unredirected}, list(ports)),
            [namespace, *(one.fileno() for one in ports.values())],
        )
        for fd in (namespace, *(one.detach() for one in ports.values())):
            os.close(fd)

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
