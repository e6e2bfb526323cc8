"""The view: which mounts make up a sandbox, drawn up as a plan. Every mount of the host is overlaid, read-only or not shown.

    machine plan   root: `/` itself is an overlay; each further mount that matters has one of its own
    user plan      an ordinary user cannot overlay `/`: a read-only clone of everything, overlays on home and project

    what the host has                      machine plan               user plan
    /                                      overlay                    read-only, recursive
    local file systems, writable           overlay                    read-only; overlay where home or project lie
    local file systems, read-only          read-only                  read-only
    network and FUSE                       read-only                  read-only
    a single file (container's resolv.conf) read-only                 read-only
    kernel's own (cgroup, another proc, …) not shown                  covered; below /proc and /sys: not shown, read-only
    autofs                                 not shown, not triggered   covered, not triggered
    /proc /dev /run (/sys)                 fresh                      fresh (/sys: read-only)
    /tmp (/var/tmp)                        the sandbox's own          the sandbox's own

The project view shows less, by the same two plans: of the host's root only what is the system's (`outline.py`), home is the
sandbox's own, project and toolchains have mounts of their own, and a further mount shows if it lies in one of these.

    what somebody asks for                 both plans
    a share                                as it is, at its own path, above everything but the project and hidden places in it
    a private copy                         a directory: an overlay of its own over reality's; a file: copy on write where
                                           home is, else copied when the sandbox is made
    a place to hide                        covered; where one of these lies in it, empty but for the way there
    a device                               a node in the sandbox's /dev

Where a kind of mount of the host is to be treated differently: `_Drawing._classify` for the machine plan, `_Drawing.user` for the
user plan. A mount that somebody asks for goes into both, before `_finished`. A new operation belongs in `linux/mounts.py`.
"""

import contextlib
import os
import stat
from collections.abc import Iterable

from elsewhere.linux import mountinfo
from elsewhere.linux import syscalls as sys_
from elsewhere.linux.mountinfo import Mount
from elsewhere.linux.mounts import (
    Absent,
    Clone,
    Copied,
    Cover,
    Device,
    Directory,
    File,
    Handed,
    Link,
    Operation,
    Own,
    Plan,
    Shared,
)
from elsewhere.linux.overlay import Overlay
from elsewhere.paths import is_within, outermost
from elsewhere.sandbox import additions, hidden, outline, seeds, standing, toolchains
from elsewhere.sandbox.confinement import Confinement, Share
from elsewhere.sandbox.ids import FIRST_ID
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.sockets import REPLACED, host_sockets
from elsewhere.values import dataclass

__all__ = [
    "USER_ROOT",
    "Base",
    "Host",
    "Layer",
    "Subject",
    "View",
    "draw",
    "empty_plan",
]

_PLAIN = Confinement()

USER_ROOT = Clone("/", "/", sys_.MOUNT_ATTR_RDONLY | sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV, recursive=True)


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
    """What a view is drawn of. `numbers` are the layers that a sandbox has already, by their places; `disk` is how much they may
    hold, where the rung can keep them to it (0: whatever there is room for). `frozen` is what it wrote earlier: directories that
    are shaped like its `upper`, newest first, each with the names in it."""

    host: Host
    project: Project
    base: Base = Base()
    confinement: Confinement = _PLAIN
    numbers: tuple[tuple[str, int], ...] = ()
    disk: int = 0
    frozen: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """One overlay of the view: where it is mounted, what of reality lies below, the layers of the base above that, those that the
    sandbox wrote earlier (`stacked`; all newest first), and the number of its upper and work directories: a name, if it is a
    private place, which shows nothing of reality."""

    at: str
    lower: str | None
    number: int | str
    frozen: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()

    @property
    def private(self) -> bool:
        return isinstance(self.number, str)


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


class _Drawing:
    def __init__(self, subject: Subject, *, idmapped: bool, redirects: bool, overlay: bool) -> None:
        host, project = subject.host, subject.project
        self._base = subject.base
        self._numbers = dict(subject.numbers)
        self._frozen = subject.frozen
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
        self._confinement = subject.confinement
        self._shares = additions.shares(subject.confinement)
        copies, self._files = additions.copies(subject.confinement)
        self._copies = outermost(copies)
        self._narrow = subject.confinement.view == "project"
        self._home = home[0] if self._narrow and home and not _contains_the_system(home[0]) else None
        self._toolchains = toolchains.places(subject.confinement, host.home, host.state, project) if self._narrow else []
        self._packages = [place for place in outline.PACKAGES if self._narrow and os.path.isdir(place)]

    # -- root ---------------------------------------------------------------------------------------------------------------

    def machine(self) -> View:
        root = self._over("/", "/", attributes=_attributes(mountinfo.containing("/", self._mounts)))
        operations: list[Operation] = [self._own("/tmp", "tmp")]
        if self._narrow:
            islands = list(self._needed)
            operations += self._narrowed()
        else:
            islands = [place for place in self._places if _replaced(place)]
            for place in islands:
                operations += self._stepping_stones(place, _top(place))
                if not self._is_pinned(place):
                    operations.append(self._over(place, place))
        operations += [*self._copied(), *self._shared(islands)]
        made = {one.target for one in operations if not isinstance(one, Directory | File)}
        for mount in self._mounts:
            if mount.target != "/" and mount.target not in made and not self._is_pinned(mount.target):
                operation = self._classify(mount, islands)
                if operation is not None:
                    operations.append(operation)
        # What is shown as it is shows its sockets, too, and a read-only mount does not keep anybody from connecting.
        cloned = [one.target for one in operations if isinstance(one, Clone | Shared)]
        sockets = [path for path in host_sockets(REPLACED) if any(is_within(path, place) for place in cloned)]
        operations += [Cover(path, directory=False) for path in sockets]
        return self._finished(root, [*operations, *self._pinned()], standing.mounts(whole_machine=True))

    def _classify(self, mount: Mount, islands: list[str]) -> Operation | None:
        """What becomes of one mount of the host in the machine plan."""
        if _replaced(mount.target) and not any(is_within(mount.target, island) for island in islands):
            return (
                None
                if mount.target in REPLACED or mount.target.startswith("/dev/")
                else Absent(mount.target, "its directory is fresh")
            )
        if mount.kind == "autofs":
            return Absent(mount.target, "autofs, not to be triggered")
        if mount.kernels_own:
            return Absent(mount.target, mount.kind)
        if self._narrow and not self._is_shown(mount.target):
            return Absent(mount.target, "it is not part of the project view")
        if share := self._share_around(mount.target):
            return Shared(mount.target, share.writable, idmapped=True)
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
        is_tool = any(is_within(mount.target, place) for place in self._toolchains)
        if is_tool or "ro" in mount.options or not stat.S_ISDIR(found.st_mode):
            return Clone(mount.target, mount.target, attributes | sys_.MOUNT_ATTR_RDONLY, idmapped=True)
        needed = any(is_within(place, mount.target) for place in (*self._needed, *seeds.ACCOUNTS))
        return self._over(mount.target, mount.target, attributes=attributes, required=needed)

    def _stepping_stones(self, place: str, above: str) -> list[Operation]:
        """What leads to a place, below a directory that does not show reality: the fresh /tmp or /run, or one of the sandbox's
        own."""
        stones: list[Operation] = []
        parts = place.split("/")
        for depth in range(above.count("/") + 2, len(parts) + 1):
            path = "/".join(parts[:depth])
            found = os.stat(path)
            mode = stat.S_IMODE(found.st_mode) if depth == len(parts) else 0o755
            owners = (FIRST_ID + found.st_uid, FIRST_ID + found.st_gid) if self._idmapped else (None, None)
            stones.append(Directory(path, mode, *owners) if stat.S_ISDIR(found.st_mode) else File(path, *owners))
        return stones

    # -- an ordinary user -----------------------------------------------------------------------------------------------------

    def user(self) -> View:
        operations: list[Operation] = [self._own("/tmp", "tmp")]
        if os.path.isdir("/var/tmp"):
            operations.append(self._own("/var/tmp", "vartmp"))
        if self._narrow:
            operations += self._narrowed()
        else:
            for place in self._places:
                if _replaced(place) or is_within(place, "/var/tmp"):
                    operations += self._stepping_stones(place, "/var/tmp" if is_within(place, "/var/tmp") else _top(place))
                if not self._is_pinned(place):
                    operations += [self._over(path, path) for path in self._free_of_mounts(place)]
        operations += [*self._copied(), *self._shared(self._needed if self._narrow else self._places)]
        if self._base.layers:
            operations += [
                Clone(mount.target, mount.target, recursive=True)
                for mount in self._mounts
                if mount.target.startswith(self._project.path + "/") and mount.kind != "autofs"
            ]
        operations += self._pinned()
        operations += [
            Cover(mount.target, directory=True)
            for mount in self._mounts
            if (mount.kind == "autofs" or (mount.kernels_own and not _replaced(mount.target)))
            and self._is_shown(mount.target)
            and not any(is_within(place, mount.target) for place in self._places)
        ]
        cloned = [one.target for one in operations if isinstance(one, Clone | Shared)]
        sockets = [
            path
            for path in host_sockets((*REPLACED, "/var/tmp"))
            if not any(is_within(path, layer.at) for layer in self._layers) or any(is_within(path, place) for place in cloned)
        ]
        sockets += [mount.target for mount in self._mounts if mount.target not in sockets and _is_socket(mount.target)]
        operations += [Cover(path, directory=False) for path in sockets if self._is_shown(path)]
        return self._finished(USER_ROOT, operations, standing.mounts(whole_machine=False))

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

    # -- what somebody asked for ------------------------------------------------------------------------------------------------

    def _narrowed(self) -> list[Operation]:
        """What the project view shows besides the system's directories, and what stands where the rest would be."""
        operations: list[Operation] = [self._own(self._home, "home")] if self._home else []
        operations += self._var()
        attributes = sys_.MOUNT_ATTR_RDONLY | sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV
        cloned = [*self._toolchains, *(() if self._idmapped else self._packages)]
        operations += [Clone(place, place, attributes, recursive=not self._idmapped, idmapped=self._idmapped) for place in cloned]
        for place in self._needed:
            operations += [] if self._is_pinned(place) else self._copy_on_write(place)
        shown = [one.target for one in operations if not isinstance(one, Directory | Link)]
        asked = (*self._copies, *(share.path for share in self._shares))
        shown += [*self._needed, *asked, *(() if self._idmapped else ("/var/tmp",))]
        ways = [step for place in dict.fromkeys(shown) for step in self._way_to(place)]
        return [*outline.rest(shown), *ways, *operations]

    def _var(self) -> list[Operation]:
        """Packages can be installed, and leave there what they like; without root nobody can, and only what is known shows."""
        if not self._idmapped or not os.path.isdir("/var"):
            return []
        kept = [self._over(place, place, required=False) for place in self._packages]
        return [self._own("/var", "var"), *outline.skeleton(FIRST_ID), self._own("/var/tmp", "vartmp"), *kept]

    def _copy_on_write(self, place: str, *, required: bool = True) -> list[Operation]:
        if self._idmapped:
            attributes = _attributes(mountinfo.containing(place, self._mounts))
            return [self._over(place, place, attributes=attributes, required=required)]
        free = self._free_of_mounts(place)
        around = [] if free == [place] else [Clone(place, place, USER_ROOT.attributes, recursive=True)]
        return [*around, *(self._over(path, path, required=required) for path in free)]

    def _copied(self) -> list[Operation]:
        """Private copies. A file that is copy on write as a part of what lies around it needs nothing."""
        operations: list[Operation] = []
        for place in self._copies:
            operations += [*self._way_to(place), *self._copy_on_write(place, required=False)]
        shift = FIRST_ID if self._idmapped else None
        for path in self._files:
            if self._nearest(path) in self._private():
                operations += [*self._way_to(os.path.dirname(path)), Copied(path, shift)]
        for path, to in self._confinement.links:
            if self._nearest(path) in self._private():
                operations += [*self._way_to(os.path.dirname(path)), Link(path, to)]
        return operations

    def _shared(self, overlaid: Iterable[str]) -> list[Operation]:
        """The shares, and the project where it lies in one: that is never shown as it is. `overlaid` has its own mounts."""
        operations: list[Operation] = []
        for share in self._shares:
            operations += self._way_to(share.path)
            operations.append(Shared(share.path, share.writable, recursive=not self._idmapped, idmapped=self._idmapped))
            operations += [Cover(path, directory=False) for path in additions.ways_out(share.path)]
        known = {share.path for share in self._shares}
        operations += [
            Absent(share.path, "shared, but it is not there") for share in self._confinement.shares if share.path not in known
        ]
        for place in self._needed:
            if place not in overlaid and not self._is_pinned(place) and any(is_within(place, path) for path in known):
                operations += self._copy_on_write(place)
        return operations

    def _share_around(self, path: str) -> Share | None:
        """The share as part of which a path shows."""
        around = [share for share in self._shares if is_within(path, share.path)]
        share = max(around, key=lambda share: len(share.path), default=None)
        if share and any(is_within(path, place) and is_within(place, share.path) for place in self._needed):
            return None
        return share

    def _devices(self) -> list[Operation]:
        owner = FIRST_ID if self._idmapped else None
        return [Device(path, path, owner) for path in additions.nodes(self._confinement)]

    def _private(self) -> list[str]:
        """Directories that show nothing of reality, and in which a way to something else can be made."""
        own = [self._home] if self._home else []
        if self._idmapped and self._narrow:
            return ["/tmp", "/run", "/var", "/var/tmp", *own]
        return ["/tmp", "/run", *(() if self._idmapped else ("/var/tmp",)), *own]

    def _mounted(self) -> list[str]:
        """What shows reality at its own place, besides the root."""
        places = self._needed if self._narrow else self._places
        return [*places, *self._toolchains, *self._packages, *self._copies, *(share.path for share in self._shares)]

    def _nearest(self, path: str) -> str | None:
        """What a path shows as a part of, besides the root."""
        around = [place for place in (*self._private(), *self._mounted()) if is_within(path, place)]
        return max(around, key=len, default=None)

    def _way_to(self, place: str) -> list[Operation]:
        """What a place is mounted on, where that is not there by itself."""
        private = self._private()
        around = [path for path in (*private, *self._mounted()) if path != place and is_within(place, path)]
        nearest = max(around, key=len, default="/")
        if nearest in private or (self._is_pinned(nearest) and place not in self._needed):
            return self._stepping_stones(place, nearest)
        return []

    def _is_shown(self, path: str) -> bool:
        """Whether reality shows there, if it is not hidden."""
        if not self._narrow:
            return True
        nearest = self._nearest(path)
        return outline.is_system(path) if nearest is None else nearest not in self._private()

    def _hidden(self, also: tuple[str, ...]) -> list[str]:
        shares = (*(share.path for share in self._shares), *self._confinement.copies)
        hide = self._confinement.hide
        found = hidden.hidden_places(
            self._host.home, (self._project.path,), self._host.state, also, hide=hide, shares=shares, mounts=self._mounts
        )
        if self._base.layers:  # the base may have what reality no longer has
            known = set(found)
            found += [path for path in hide if path.startswith(self._project.path + "/") and path not in known]
        return [path for path in found if self._is_shown(path)]

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
            taken = [layer.number for layer in self._layers if isinstance(layer.number, int)]
            number = max((*self._numbers.values(), *taken), default=-1) + 1
        return self._copied_on_write(Layer(at, lower, number, frozen, self._stacked(str(number))), attributes, required=required)

    def _own(self, at: str, name: str) -> Operation:
        """A private place: the sandbox's own directory, or, with what it had there earlier, copy on write over that."""
        stacked = self._stacked(name)
        if not stacked:
            return Own(at, f"upper/{name}")
        return self._copied_on_write(Layer(at, None, name, (), stacked), sys_.MOUNT_ATTR_NOSUID)

    def _stacked(self, name: str) -> tuple[str, ...]:
        return tuple(f"{place}/{name}" for place, holds in self._frozen if name in holds)

    def _copied_on_write(self, layer: Layer, attributes: int, *, required: bool = True) -> Operation:
        self._layers.append(layer)
        if not self._overlay:
            return Handed(layer.at, layer.at, f"copy on write over {layer.lower or 'the base'}, by fuse-overlayfs")
        return Overlay(
            layer.at,
            layer.lower,
            f"upper/{layer.number}",
            f"work/{layer.number}",
            layers=(*layer.stacked, *layer.frozen),
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
        places = self._hidden(also)
        shares = [*(share.path for share in self._shares), *self._copies]
        passed = [path for path in places if any(share.startswith(path + "/") for share in shares)]
        operations += [outline.nothing_but(path, shares) for path in passed]
        again = bool(self._numbers)
        covers = [Cover(path, directory=os.path.isdir(path), again=again) for path in places if path not in passed]
        if self._home and outline.is_system(self._home):
            places.append(self._home)  # where a directory around it is renamed, reality's would show
        operations += self._devices()
        # What lies below something else comes after it; covers lie on top of everything.
        ordered = sorted(operations, key=lambda operation: operation.target.split("/"))
        plan = Plan(always, root, (*ordered, *covers))
        return View(plan, tuple(self._layers), tuple(places), plan.describe(), accounts_at)


def _contains_the_system(place: str) -> bool:
    return place == "/var" or (outline.is_system(place) and place.count("/") == 1)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _is_socket(path: str) -> bool:
    found = _stat(path)
    return found is not None and (stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode))


def _top(path: str) -> str:
    return "/" + path.split("/", 2)[1]


def _replaced(path: str) -> bool:
    return any(is_within(path, place) for place in REPLACED)


def _attributes(mount: Mount) -> int:
    """An overlay does not inherit these from what lies below it. A device that lies anywhere but in /dev leads out."""
    known = {"nosuid": sys_.MOUNT_ATTR_NOSUID, "noexec": sys_.MOUNT_ATTR_NOEXEC}
    return sys_.MOUNT_ATTR_NODEV | sum(bit for option, bit in known.items() if option in mount.options)


def empty_plan() -> Plan:
    """For the rung that mounts nothing."""
    return Plan((), Absent("/", "no mounts on this rung"), ())
