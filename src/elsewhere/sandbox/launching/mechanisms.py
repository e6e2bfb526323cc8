"""How each rung of the ladder (`rungs.py`) is made to stand: directories, a builder's plan, or a copy with Landlock's rules.

A rung that this host refuses says why; a disk that is full or a limit that is reached is not a refusal of the rung but an error.
"""

import contextlib
import errno
import functools
import os
import secrets
import shutil
import socket
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from typing import Any

from elsewhere.errors import ElsewhereError, StateError, Unavailable
from elsewhere.linux import cgroups, landlock
from elsewhere.linux.cgroups import Group
from elsewhere.linux.mounts import Cover, Own
from elsewhere.sandbox import additions, hidden, moved, outline, seeds, toolchains, view
from elsewhere.sandbox.contents import IMAGE
from elsewhere.sandbox.keeping import line, processes, wire
from elsewhere.sandbox.launching import builder, sealing
from elsewhere.sandbox.launching.blanks import Blank, BuildFailed, Groups, Kind
from elsewhere.sandbox.launching.fuse import Fuse
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.journal import Journal
from elsewhere.sandbox.rungs import Mechanism
from elsewhere.sandbox.view import Base, Layer, Subject, View
from elsewhere.storage import copying, images, trash
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = [
    "Raised",
    "Raising",
    "begin",
    "draw",
    "group_name",
    "groups",
    "groups_host",
    "groups_left_over",
    "keeps_disk",
    "make_directories",
    "raise_sandbox",
    "take_after",
    "unavailable",
]

_PRIVATE = {"tmp": 0o1777, "vartmp": 0o1777, "home": 0o700, "var": 0o755}
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(slots=True)
class Raised:
    """A sandbox that stands: its keeper waits for commands and holds the lock of its directory. When `final_pid` is
    reaped, nothing of it runs any more. `seen_fd` shows its directory, `layers_fd` its layers where they do not lie there;
    `ports` are the ways out of its network (`linux/network.py`), `sealed` is what became of its keeper, `disk` what keeps its
    layers from growing."""

    mechanism: Mechanism
    directory: str
    control: socket.socket
    keeper_pid: int
    final_pid: int
    view: View
    project_path: str
    weaker: dict[str, str]
    mount_namespace: int = -1
    seen_fd: int = -1
    layers_fd: int = -1
    ports: dict[str, int] = field(default_factory=dict)
    sealed: dict[str, Any] = field(default_factory=dict)
    disk: str = ""
    copied: str = ""
    not_copied: list[str] = field(default_factory=list)

    @property
    def group(self) -> Group | None:
        """Where its commands run, if there is such a place."""
        found = self.sealed.get("group")
        return Group(*found) if found else None

    def discard(self) -> None:
        """Nobody wants it: the keeper ends with its control socket."""
        self.control.close()
        self.close_ports()
        for fd in (self.mount_namespace, self.seen_fd, self.layers_fd):
            if fd >= 0:
                os.close(fd)

    def close_ports(self) -> None:
        """They keep the network alive in which they were made."""
        for fd in self.ports.values():
            os.close(fd)
        self.ports = {}


@dataclass(slots=True)
class Raising:
    """A sandbox under construction, by a builder that works on its own; `finish` waits for it."""

    mechanism: Mechanism
    directory: str
    blank: Blank
    view: View
    project_path: str
    disk: str

    def discard(self) -> None:
        self.blank.discard()

    def finish(self) -> Raised:
        try:
            weaker, seen_fd, layers_fd = self.blank.built()
        except BuildFailed as failure:
            self.blank.discard()
            _raise_if_full(failure.errno, str(failure), failure.step)
            raise
        final_pid = self.blank.builder_pid if self.mechanism.fuse else self.blank.keeper_pid
        return Raised(
            self.mechanism,
            self.directory,
            self.blank.control,
            self.blank.keeper_pid,
            final_pid,
            self.view,
            self.project_path,
            weaker,
            self.blank.mount_namespace,
            seen_fd,
            layers_fd,
            self.blank.ports,
            self.blank.sealed,
            self.disk,
        )


BlankSource = Callable[[Kind], Blank]


def keeps_disk(mechanism: Mechanism, directory: str) -> tuple[str, str]:
    """What keeps layers from growing beyond a size, on this rung of this host; or, if nothing does, why."""
    if mechanism.memory:
        return "tmpfs", ""
    if not mechanism.whole_machine:
        return "", "an ordinary user's files have no quota"
    why = images.available(directory)
    return ("", why) if why else ("image", "")


@functools.cache
def groups_host() -> cgroups.Host:
    return cgroups.look()


def group_name(state: State, rest: object) -> str:
    """Whose it is can be told by its name: of which state directory, of which launcher."""
    return f"{zlib.crc32(os.fsencode(state.path)):08x}-{os.getpid()}-{rest}"


def groups_left_over(state: State, *, own: bool) -> list[str]:
    """What is still there of the groups of launchers that are gone, once the empty ones are removed; and, for a launcher that is
    about to go and makes no more, of its own."""
    whose = group_name(state, "").split("-")[0]

    def ours(name: str) -> bool:
        owner, _, rest = name.partition("-")
        maker = rest.partition("-")[0]
        return owner == whose and (own if maker == str(os.getpid()) else not processes.is_running(maker))

    return cgroups.left_over(groups_host(), ours)


def groups(state: State) -> Groups:
    """Where the next group is made, and how it is called."""
    return Groups(groups_host(), group_name(state, secrets.token_hex(4)))


def raise_sandbox(mechanism: Mechanism, subject: Subject, state: State, directory: str, take: BlankSource) -> Raised:
    """Fill the directory, as far as it is not filled already, and bring the sandbox up in it by one mechanism. BuildFailed: this
    rung does not stand here."""
    if mechanism.copy:
        try:
            return _copied(mechanism, subject, state, directory)
        except OSError as error:
            raise _as_build_failure(error) from error
    try:
        drawn = draw(mechanism, subject)
    except OSError as error:
        raise _as_build_failure(error) from error
    return begin(mechanism, drawn, subject, state, directory, take).finish()


def draw(mechanism: Mechanism, subject: Subject) -> View:
    """The view of a project as this rung can show it."""
    return view.draw(
        subject,
        whole_machine=mechanism.whole_machine,
        redirects=not mechanism.memory,
        overlay=not mechanism.fuse,
    )


def begin(mechanism: Mechanism, drawn: View, subject: Subject, state: State, directory: str, take: BlankSource) -> Raising:
    """Everything but waiting for the builder."""
    try:
        make_directories(drawn, subject.base, directory, mechanism)
        confined = subject.confinement
        kind = Kind(mechanism.whole_machine, network=confined.network, nested=confined.nested)
        blank = _fuse_blank(drawn, state, directory, kind) if mechanism.fuse else take(kind)
    except OSError as error:
        raise _as_build_failure(error) from error
    disk = keeps_disk(mechanism, directory)[0] if subject.disk else ""
    memory = min(mechanism.memory, subject.disk or mechanism.memory)
    try:
        blank.ready()
        _settle_in(directory, blank.control)
        with _image(directory, subject.disk if disk == "image" else 0) as image:
            drawn = _covering_what_moved(drawn, f"/proc/self/fd/{image}" if image >= 0 else directory, mechanism)
            blank.order(drawn.plan, directory, memory=memory, image=image)
    except BuildFailed as failure:
        blank.discard()
        _raise_if_full(failure.errno, str(failure), failure.step)
        raise
    except OSError as error:
        blank.discard()
        raise BuildFailed("builder", error.errno or 0, f"the builder is gone ({error.strerror})") from error
    except BaseException:
        blank.discard()
        raise
    return Raising(mechanism, directory, blank, drawn, subject.project.path, disk)


@contextlib.contextmanager
def _image(directory: str, size: int) -> Iterator[int]:
    """The file system that a sandbox's layers lie in, if it is to have one of its own; made when it is first needed."""
    if not size:
        yield -1
        return
    path = os.path.join(directory, IMAGE)
    if not os.path.exists(path):
        images.create(path, size, owner=0)
    fd = images.mounted(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _settle_in(directory: str, control: socket.socket) -> None:
    """The keeper gets what makes the directory its own, for as long as it lives: the lock, a socket, the journal."""
    fds = [record.hold_lock(directory)]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            line.bind(listener, directory)
            fds.append(Journal(directory).open())
            wire.send(control, ("hold",), [fds[0], listener.fileno(), fds[1]])
    finally:
        for fd in fds:
            os.close(fd)


def _as_build_failure(error: OSError) -> BuildFailed:
    _raise_if_full(error.errno, str(error), "directories")
    return BuildFailed("directories", error.errno or 0, str(error))


def _raise_if_full(number: int | None, text: str, step: str) -> None:
    # Too many user namespaces is ENOSPC as well; there it means that the rung is closed.
    if number in _FULL and step not in ("namespaces", "user namespace", "process namespace"):
        raise StateError(
            "no_room", f"the sandbox could not be made: {text}", hint="free some space or raise the limit that is named"
        )


def _fuse_blank(drawn: View, state: State, directory: str, kind: Kind) -> Blank:
    program = shutil.which("fuse-overlayfs")
    if program is None:
        raise BuildFailed("fuse-overlayfs", errno.ENOENT, "the program fuse-overlayfs is not installed")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise BuildFailed("fuse-overlayfs", errno.EACCES, "/dev/fuse cannot be opened")
    fuse = Fuse(program, directory, drawn.layers)
    return builder.blank(drawn.plan.standing, state.path, kind, groups=groups(state), fuse=fuse)


def make_directories(drawn: View, base: Base, directory: str, mechanism: Mechanism) -> None:
    """Upper, work and private places, where they are missing. An upper's root gives the mount its owner and mode, so both come
    from what lies below."""
    upper = os.path.join(directory, "upper")
    if not os.path.isdir(upper) and os.path.isdir(upper + ".new"):
        os.rename(upper + ".new", upper)  # whoever saved the layers was stopped between two renames
    for room in ("upper", "work"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.join(directory, room), 0o755)
    shift = mechanism.shift
    fresh: dict[str, str] = {}
    for layer in drawn.layers:
        upper = f"{directory}/upper/{layer.number}"
        if _made(upper):
            fresh[layer.at] = upper
            if layer.private:
                _furnish(upper, shift)
            else:
                take_after(layer, upper, mechanism)
            if mechanism.whole_machine and layer.at == drawn.accounts_at:
                seeds.sow_accounts(upper, layer.at, shift)
        work = f"{directory}/work/{layer.number}"
        if not _made(work):
            # Overlay left a warning there that nothing was synced, and would refuse to be mounted again.
            trash.remove_tree(f"{work}/work")
        elif shift:
            os.chown(work, shift, shift)
    if base.seeds and fresh:
        seeds.sow_files(base.seeds, fresh, shift)
    own = {os.path.basename(operation.name) for operation in drawn.plan.places if isinstance(operation, Own)}
    for private in {"tmp", "vartmp", *own}:
        place = os.path.join(directory, "upper", private)
        if _made(place):
            _furnish(place, shift)


def _furnish(place: str, shift: int) -> None:
    """A private place, empty at first."""
    os.chmod(place, _PRIVATE[os.path.basename(place)])
    if shift:
        os.chown(place, shift, shift)


def _covering_what_moved(drawn: View, own: str, mechanism: Mechanism) -> View:
    """A directory that the sandbox renamed earlier shows what lay in it at its new place, hidden places included: these are
    covered there, too. `own` is where its layers lie."""
    if not mechanism.whole_machine or mechanism.memory:
        return drawn  # nothing else can rename a directory of reality
    places = list(drawn.hidden)
    for layer in drawn.layers:
        layers = [os.path.join(own, place) for place in (f"upper/{layer.number}", *layer.stacked)]
        places += moved.also_at(drawn.hidden, layer.at, layers)
    if len(places) == len(drawn.hidden):
        return drawn
    covers = [Cover(place, directory=True, again=True) for place in places[len(drawn.hidden) :]]
    plan = replace(drawn.plan, places=(*drawn.plan.places, *covers))
    return replace(drawn, plan=plan, hidden=tuple(places))


def _made(path: str) -> bool:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    return True


def take_after(layer: Layer, upper: str, mechanism: Mechanism) -> None:
    """An upper's root gives its mount owner, mode and times. Frozen layers carry the mapped ids already."""
    found = os.stat(layer.lower or layer.frozen[0])
    shift = mechanism.shift if layer.lower else 0
    if os.geteuid() == 0 and (shift or found.st_uid or found.st_gid):
        os.chown(upper, shift + found.st_uid, shift + found.st_gid)
    os.chmod(upper, stat.S_IMODE(found.st_mode))
    os.utime(upper, ns=(found.st_atime_ns, found.st_mtime_ns))


def _copied(mechanism: Mechanism, subject: Subject, state: State, directory: str) -> Raised:
    """No namespaces: the command works in a copy, at the copy's own path, and Landlock keeps it from writing anywhere else."""
    _check_copying(subject)
    host, project, confinement = subject.host, subject.project, subject.confinement
    copies = [path for found in additions.copies(confinement) for path in found]
    places_hidden = hidden.hidden_places(
        host.home,
        (project.path,),
        host.state,
        seeds.ACCOUNTS,
        hide=confinement.hide,
        shares=(*(share.path for share in additions.shares(confinement)), *copies),
        mounts=host.mounts,
    )
    target = os.path.join(directory, "copy")
    if os.path.isdir(target):
        copied = copying.Copied()
    else:
        # Whole or not at all: what is found under its name when the sandbox is started again must be the whole of it.
        if os.path.lexists(target + ".new"):
            trash.remove_tree(target + ".new")
        copied = copying.copy_tree(project.path, target + ".new", leave_out=frozenset({host.state, *places_hidden}))
        os.rename(target + ".new", target)
    places = [target, os.path.join(directory, "tmp")]
    if confinement.view == "project":
        places.append(os.path.join(directory, "home"))
    for place in places[1:]:
        _made(place)
    rules = _rules(subject, places_hidden, places)
    keeper, guardian, control, sealed = sealing.landlocked(rules, groups(state), nested=confinement.nested)
    _settle_in(directory, control)
    nothing = View(view.empty_plan(), (), tuple(places_hidden), (), None)
    return Raised(
        mechanism,
        directory,
        control,
        keeper,
        guardian,
        nothing,
        target,
        dict.fromkeys(copies, "a private copy needs mounts"),
        seen_fd=os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
        sealed=sealed,
        copied=copied.strategy,
        not_copied=copied.left_out,
    )


def _check_copying(subject: Subject) -> None:
    if subject.base.layers:
        raise BuildFailed("base", 0, "a base needs overlay; here the project is copied as it is")
    if subject.confinement.network != "host":
        raise BuildFailed("network", 0, "without namespaces the network cannot be taken away; --network host leaves it")
    try:
        version = landlock.abi()
    except OSError as error:
        raise BuildFailed("landlock", error.errno or 0, error.strerror or "not there") from error
    if version < landlock.FIRST_WITH_TRUNCATE:
        raise BuildFailed("landlock", 0, f"version {version} lets files be emptied; Linux 6.2 and later do not")


def _rules(subject: Subject, closed: list[str], own: list[str]) -> list[tuple[str, int]]:
    """The view as Landlock's rules: what is shown may be read, the sandbox's own places may be written."""
    host, project, confinement = subject.host, subject.project, subject.confinement
    shown = ["/"]
    if confinement.view == "project":
        shown = outline.readable(project, toolchains.places(confinement, host.home, host.state, project))
    rules = [(path, landlock.READ) for path in _readable_but(closed, shown)]
    for path in (path for found in additions.copies(confinement) for path in found):
        rules += [(shown, landlock.READ) for shown in _readable_but(closed, [path])]
    for share in additions.shares(confinement):
        right = landlock.WRITE if share.writable else landlock.READ
        rules += [(path, right) for path in _readable_but(closed, [share.path])]
    rules += [(path, landlock.WRITE) for path in (*own, *additions.nodes(confinement))]
    return rules + [(f"/dev/{name}", landlock.WRITE) for name in _DEVICES]


def _readable_but(closed: list[str], shown: list[str]) -> list[str]:
    """Landlock can only allow: what is shown beside the hidden places, one directory at a time on the way down to them."""
    allowed: list[str] = []
    waiting = list(shown)
    while waiting:
        place = waiting.pop()
        if place in closed:
            continue
        if any(path.startswith(place.rstrip("/") + "/") for path in closed):
            with contextlib.suppress(OSError):
                waiting += [os.path.join(place, name) for name in os.listdir(place)]
        else:
            allowed.append(place)
    return allowed


def unavailable(reasons: list[tuple[str, str]]) -> ElsewhereError:
    said = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    only_network = bool(reasons) and reasons[-1][1].startswith("network: ")
    return Unavailable(
        "no_mechanism",
        f"nothing on this host can isolate a command ({said})",
        hint="--network host, if it may use the host's network; elsewhere doctor shows what is missing"
        if only_network
        else "elsewhere doctor shows what is missing and how to get it",
        detail={"reasons": [{"mechanism": name, "reason": reason} for name, reason in reasons]},
    )
