"""Mounts as data: an operation knows how to make its mount, where it belongs, and how to say so in words.

    Plan
    ├── standing   proc, sys, dev, run: the same for every sandbox, made ahead of time in a staging place
    ├── root       what becomes `/`
    └── places     everything that depends on the project, in order, on top

`build` executes a plan in the caller's own mount namespace and makes the result its root. A new kind of mount is a new
class here with `make` and `words`, and a line where plans are drawn up (`sandbox/view.py`). Copy on write has a module of its
own (`overlay.py`). Not here: which plan is right.

Every target is looked up below the new root by the kernel and never through a symbolic link, so that nothing which a sandbox
left in its layers can move a mount to another place.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import field, replace

from elsewhere.linux import syscalls as sys_
from elsewhere.linux.syscalls import AT_EMPTY_PATH, AT_FDCWD, AT_NO_AUTOMOUNT, AT_RECURSIVE, OPEN_TREE_CLONE
from elsewhere.values import dataclass

__all__ = [
    "Absent",
    "Bench",
    "Clone",
    "Copied",
    "Cover",
    "Device",
    "Devices",
    "Directory",
    "File",
    "Fresh",
    "Handed",
    "Link",
    "Operation",
    "Own",
    "Plan",
    "ReadOnly",
    "Shared",
    "attach",
    "build",
    "configure",
    "prepare",
    "set_attributes",
    "tmpfs",
]

_TARGET_LOOKUP = sys_.RESOLVE_IN_ROOT | sys_.RESOLVE_NO_SYMLINKS | sys_.RESOLVE_NO_MAGICLINKS
_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LARGEST_COPY = 64 << 20
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}


@dataclass(slots=True)
class Bench:
    """What operations work with: the tree under construction, the sandbox's user namespace, a private scratch directory, the
    directory to which relative paths belong, mounts that others made, and what had to be made weaker than planned."""

    root: int
    userns: int
    scratch: str
    own: str = "/"
    handed: dict[str, int] = field(default_factory=dict)
    weaker: dict[str, str] = field(default_factory=dict)
    closed: int = -1
    counter: int = 0

    def scratch_directory(self) -> str:
        self.counter += 1
        path = f"{self.scratch}/{self.counter}"
        os.mkdir(path)
        return path


@dataclass(frozen=True, slots=True)
class Operation:
    """One mount. `make` gives a detached mount; `attach` puts it at `target` below the tree under construction."""

    target: str

    def make(self, bench: Bench) -> int:
        del bench
        raise TypeError(f"{type(self).__name__} makes no mount")

    def execute(self, bench: Bench) -> None:
        fd = self.make(bench)
        try:
            attach(fd, bench.root, self.target)
        finally:
            os.close(fd)

    def words(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True, slots=True)
class Clone(Operation):
    """Part of the machine as it is (a bind mount), with its own attributes; recursive where the mounts below belong to it."""

    source: str
    attributes: int = sys_.MOUNT_ATTR_RDONLY
    recursive: bool = False
    idmapped: bool = False

    def make(self, bench: Bench) -> int:
        deep = AT_RECURSIVE if self.recursive else 0
        fd = sys_.open_tree(AT_FDCWD, self.source, OPEN_TREE_CLONE | AT_NO_AUTOMOUNT | deep)
        if self.attributes:
            set_attributes(fd, self.attributes, deep, bench)
        if self.idmapped:
            # Some file systems know no id mapping: then it is read-only, with owners that mean nothing inside.
            with contextlib.suppress(OSError):
                set_attributes(fd, sys_.MOUNT_ATTR_IDMAP, deep, bench)
        return fd

    def words(self) -> str:
        how = "read-only" if self.attributes & sys_.MOUNT_ATTR_RDONLY else "as it is"
        return f"{how}: {self.source}"


@dataclass(frozen=True, slots=True)
class Shared(Operation):
    """A place of reality at its own path, because somebody asked for it. What somebody who may write near it turned into a link
    since is not followed. In a writable one owners must mean the same on both sides: where the file system knows no id mapping
    it is read-only instead. What a sandbox itself put in the way, before it was started again, is no error."""

    writable: bool
    recursive: bool = False
    idmapped: bool = False

    def make(self, bench: Bench) -> int:
        deep = AT_RECURSIVE if self.recursive else 0
        place = sys_.openat2(AT_FDCWD, self.target, os.O_PATH, sys_.RESOLVE_NO_SYMLINKS | sys_.RESOLVE_NO_MAGICLINKS)
        try:
            fd = sys_.open_tree(place, "", OPEN_TREE_CLONE | AT_EMPTY_PATH | AT_NO_AUTOMOUNT | deep)
        finally:
            os.close(place)
        attributes = sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV | (0 if self.writable else sys_.MOUNT_ATTR_RDONLY)
        set_attributes(fd, attributes, deep, bench)
        if self.idmapped:
            try:
                set_attributes(fd, sys_.MOUNT_ATTR_IDMAP, deep, bench)
            except OSError as error:
                if self.writable:
                    bench.weaker[self.target] = f"its file system knows no id mapping ({error.strerror})"
                    set_attributes(fd, sys_.MOUNT_ATTR_RDONLY, deep, bench)
        return fd

    def execute(self, bench: Bench) -> None:
        fd = self.make(bench)
        try:
            attach(fd, bench.root, self.target)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL):
                raise
            bench.weaker[self.target] = f"not shared: something else is in its place inside ({error.strerror})"
        finally:
            os.close(fd)

    def words(self) -> str:
        return "shared, writable: what is written here is written in reality" if self.writable else "shared, read-only"


@dataclass(frozen=True, slots=True)
class Own(Operation):
    """A directory of the sandbox itself, writable: private /tmp and the like. `name` is relative to the sandbox's directory."""

    name: str

    def make(self, bench: Bench) -> int:
        fd = sys_.open_tree(AT_FDCWD, f"{bench.own}/{self.name}", OPEN_TREE_CLONE)
        set_attributes(fd, sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV, 0, bench)
        return fd

    def words(self) -> str:
        return "private, empty at first"


@dataclass(frozen=True, slots=True)
class Absent(Operation):
    """A mount of the host that is not shown; said, because every mount of the host is accounted for."""

    why: str

    def execute(self, bench: Bench) -> None:
        del bench  # the root was cloned without its mounts, so there is nothing to take away

    def words(self) -> str:
        return f"not shown: {self.why}"


@dataclass(frozen=True, slots=True)
class Fresh(Operation):
    """A new, empty file system of its own, with a few directories, files and links in it from the start."""

    filesystem: str
    options: tuple[tuple[str, str], ...] = ()
    attributes: int = 0
    directories: tuple[tuple[str, int], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, bytes], ...] = ()

    def make(self, bench: Bench) -> int:
        filled = bool(self.directories or self.links or self.files)
        fd = _fresh(self.filesystem, self.options, 0 if filled else self.attributes)
        try:
            self._fill(fd)
            if filled and self.attributes:
                set_attributes(fd, self.attributes, 0, bench)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _fill(self, fd: int) -> None:
        for name, mode in self.directories:
            os.makedirs(f"/proc/self/fd/{fd}/{name}", exist_ok=True)
            os.chmod(name, mode, dir_fd=fd)
        for name, target in self.links:
            os.symlink(target, name, dir_fd=fd)
        for name, content in self.files:
            inner = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=fd)
            with open(inner, "wb") as stream:
                stream.write(content)

    def words(self) -> str:
        return f"fresh {self.filesystem}"


@dataclass(frozen=True, slots=True)
class Handed(Operation):
    """A mount that somebody else made, found under its key: proc shows the process namespace of whoever mounts it, so the keeper
    has to; fuse-overlayfs has to start before there is a process namespace."""

    key: str
    what: str

    def make(self, bench: Bench) -> int:
        return os.dup(bench.handed[self.key])

    def words(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Devices(Operation):
    """The smallest useful /dev. Nodes are made where that is allowed (root, before the user namespace is entered); an ordinary
    user has them bound from the host one by one."""

    owner: int | None

    def make(self, bench: Bench) -> int:
        del bench
        owner = () if self.owner is None else (("uid", str(self.owner)), ("gid", str(self.owner)))
        fd = _fresh("tmpfs", (("mode", "755"), ("size", "64k"), *owner), sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NOEXEC)
        for name in ("pts", "shm", "mqueue"):
            os.mkdir(name, 0o755, dir_fd=fd)
        for name, target in _LINKS.items():
            os.symlink(target, name, dir_fd=fd)
        for name, (major, minor) in _NODES.items():
            if self.owner is None:
                os.close(os.open(name, os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=fd))
            else:
                os.mknod(name, 0o666 | stat.S_IFCHR, os.makedev(major, minor), dir_fd=fd)
                os.chmod(name, 0o666, dir_fd=fd)
        if self.owner is not None:
            for name in (*_NODES, *_LINKS, "pts", "shm", "mqueue"):
                os.chown(name, self.owner, self.owner, dir_fd=fd, follow_symlinks=False)
        return fd

    def execute(self, bench: Bench) -> None:
        Operation.execute(self, bench)
        if self.owner is None:
            for name in _NODES:
                Clone(f"{self.target}/{name}", f"/dev/{name}", attributes=0).execute(bench)

    def words(self) -> str:
        return f"{len(_NODES)} devices, links, own pts"


@dataclass(frozen=True, slots=True)
class Device(Operation):
    """A node of the host's /dev in the sandbox's. With an `owner` (root) it is made, and belongs to root inside; an ordinary user
    has it bound, with whatever rights they have on it."""

    source: str
    owner: int | None

    def execute(self, bench: Bench) -> None:
        found = os.stat(self.source)
        parts = self.target.split("/")
        for depth in range(3, len(parts)):
            Directory("/".join(parts[:depth]), 0o755, self.owner, self.owner).execute(bench)
        if self.owner is None:
            File(self.target, None, None).execute(bench)
            Clone(self.target, self.source, sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NOEXEC).execute(bench)
            return
        name = parts[-1]
        fd = _around(self.target, bench)
        try:
            os.mknod(name, found.st_mode, found.st_rdev, dir_fd=fd)
            os.chmod(name, stat.S_IMODE(found.st_mode), dir_fd=fd)
            os.chown(name, self.owner, self.owner + found.st_gid, dir_fd=fd, follow_symlinks=False)
        except FileExistsError:
            pass  # one of those that every sandbox has
        finally:
            os.close(fd)

    def words(self) -> str:
        return "device of the host"


@dataclass(frozen=True, slots=True)
class Cover(Operation):
    """Nothing can be read or written here: an empty, closed file or directory on top. What is not there needs no cover. With
    `again`, what the sandbox itself put in the way (a link above the place) is no error: nothing of reality lies behind it."""

    directory: bool
    again: bool = False

    def make(self, bench: Bench) -> int:
        if bench.closed < 0:
            bench.closed = tmpfs((("mode", "000"), ("size", "4k")))
            os.close(os.open("file", os.O_CREAT | os.O_CLOEXEC, 0o000, dir_fd=bench.closed))
            os.mkdir("directory", 0o000, dir_fd=bench.closed)
            quiet = sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV | sys_.MOUNT_ATTR_NOEXEC
            set_attributes(bench.closed, sys_.MOUNT_ATTR_RDONLY | quiet, 0, bench)
            # Kernels before 6.15 clone nothing of a mount that is attached nowhere (EINVAL).
            sys_.move_mount(bench.closed, "", AT_FDCWD, bench.scratch_directory())
        return sys_.open_tree(bench.closed, "directory" if self.directory else "file", OPEN_TREE_CLONE)

    def execute(self, bench: Bench) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                Operation.execute(self, bench)
            except OSError as error:
                if error.errno == errno.ELOOP and self.again:
                    return
                if error.errno != errno.EINVAL:
                    raise
                # A sandbox that is started again may have put something of the other kind there.
                Operation.execute(replace(self, directory=not self.directory), bench)

    def words(self) -> str:
        return "hidden"


@dataclass(frozen=True, slots=True)
class ReadOnly(Operation):
    """Part of what was mounted before, from here down without the right to write. What is not there needs none."""

    def make(self, bench: Bench) -> int:
        place = sys_.openat2(bench.root, self.target, os.O_PATH, _TARGET_LOOKUP)
        try:
            fd = sys_.open_tree(place, "", OPEN_TREE_CLONE | AT_EMPTY_PATH)
        finally:
            os.close(place)
        set_attributes(fd, sys_.MOUNT_ATTR_RDONLY, 0, bench)
        return fd

    def execute(self, bench: Bench) -> None:
        with contextlib.suppress(FileNotFoundError):
            Operation.execute(self, bench)

    def words(self) -> str:
        return "read-only"


@dataclass(frozen=True, slots=True)
class Directory(Operation):
    """A place to mount on, where a fresh file system hides the one that reality has."""

    mode: int
    owner: int | None
    group: int | None

    def execute(self, bench: Bench) -> None:
        name = os.path.basename(self.target)
        fd = _around(self.target, bench)
        try:
            os.mkdir(name, self.mode, dir_fd=fd)
            os.chmod(name, self.mode, dir_fd=fd)
            if self.owner is not None and self.group is not None:
                os.chown(name, self.owner, self.group, dir_fd=fd, follow_symlinks=False)
        except FileExistsError:
            pass  # the sandbox was here before, or the same place is asked for twice
        finally:
            os.close(fd)

    def words(self) -> str:
        return "directory to mount on"


@dataclass(frozen=True, slots=True)
class File(Operation):
    """The same for something that is not a directory."""

    owner: int | None
    group: int | None

    def execute(self, bench: Bench) -> None:
        name = os.path.basename(self.target)
        around = _around(self.target, bench)
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=around)
            if self.owner is not None and self.group is not None:
                os.chown(fd, self.owner, self.group)
            os.close(fd)
        except FileExistsError:
            pass
        finally:
            os.close(around)

    def words(self) -> str:
        return "file to mount on"


@dataclass(frozen=True, slots=True)
class Copied(Operation):
    """A copy of a file of reality, in a place that is the sandbox's own, unless it has something there already. `shift` is added
    to the owners."""

    shift: int | None

    def execute(self, bench: Bench) -> None:
        lookup = sys_.RESOLVE_NO_SYMLINKS | sys_.RESOLVE_NO_MAGICLINKS
        try:
            source = sys_.openat2(AT_FDCWD, self.target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, lookup)
        except OSError as error:
            bench.weaker[self.target] = f"not copied ({error.strerror})"
            return
        with open(source, "rb") as stream:
            found = os.fstat(source)
            content = stream.read(_LARGEST_COPY + 1) if stat.S_ISREG(found.st_mode) else b""
        if not stat.S_ISREG(found.st_mode) or len(content) > _LARGEST_COPY:
            bench.weaker[self.target] = "not copied: not a file of a sensible size"
            return
        around = _around(self.target, bench)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with contextlib.suppress(FileExistsError):
                fd = os.open(os.path.basename(self.target), flags, 0o600, dir_fd=around)
                with open(fd, "wb") as copy:
                    copy.write(content)
                    copy.flush()
                    if self.shift is not None:
                        os.chown(fd, self.shift + found.st_uid, self.shift + found.st_gid)
                    os.chmod(fd, stat.S_IMODE(found.st_mode) & 0o777)
        finally:
            os.close(around)

    def words(self) -> str:
        return "private copy of a file of reality"


@dataclass(frozen=True, slots=True)
class Link(Operation):
    """A symbolic link, in a place that is the sandbox's own."""

    to: str

    def execute(self, bench: Bench) -> None:
        around = _around(self.target, bench)
        try:
            with contextlib.suppress(FileExistsError):
                os.symlink(self.to, os.path.basename(self.target), dir_fd=around)
        finally:
            os.close(around)

    def words(self) -> str:
        return f"link to {self.to}"


@dataclass(frozen=True, slots=True)
class Plan:
    standing: tuple[Operation, ...]
    root: Operation
    places: tuple[Operation, ...]

    def operations(self) -> Iterable[Operation]:
        yield self.root
        yield from self.standing
        yield from self.places

    def describe(self) -> tuple[tuple[str, str], ...]:
        """Each place and what became of it, in words."""
        return tuple((operation.target, operation.words()) for operation in self.operations())

    def standing_tops(self) -> list[str]:
        """The standing mounts that others stand on: moving them moves the rest."""
        tops: list[str] = []
        for operation in self.standing:
            if not any(operation.target.startswith(top + "/") for top in tops):
                tops.append(operation.target)
        return tops


def prepare(standing: tuple[Operation, ...], bench: Bench) -> None:
    """Make the standing mounts now, below the bench's staging root, whose directories are made as needed."""
    for operation in standing:
        if operation.target.count("/") == 1:
            os.mkdir(operation.target[1:], 0o755, dir_fd=bench.root)
        operation.execute(bench)


def build(plan: Plan, staged: int, bench: Bench) -> None:
    """Put the tree together and make it the root of every process in this mount namespace. A root that was made ahead of time is
    handed in under its own target."""
    root = bench.handed.pop("/") if "/" in bench.handed else plan.root.make(bench)
    place = bench.scratch_directory()
    sys_.move_mount(root, "", AT_FDCWD, place)
    os.close(root)
    bench.root = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for target in plan.standing_tops():
        fd = sys_.open_tree(staged, target[1:], 0)
        try:
            attach(fd, bench.root, target)
        finally:
            os.close(fd)
    for operation in plan.places:
        operation.execute(bench)
    os.close(staged)
    os.fchdir(bench.root)
    os.close(bench.root)
    sys_.pivot_root(".", ".")
    sys_.umount2(".", sys_.MNT_DETACH)
    os.chdir("/")


def attach(fd: int, root: int, target: str) -> None:
    place = sys_.openat2(root, target, os.O_PATH, _TARGET_LOOKUP)
    try:
        sys_.move_mount(fd, "", place, "")
    finally:
        os.close(place)


def _around(target: str, bench: Bench) -> int:
    """The directory of the tree under construction in which `target` lies."""
    return sys_.openat2(bench.root, os.path.dirname(target), os.O_PATH | os.O_DIRECTORY, _TARGET_LOOKUP)


def set_attributes(fd: int, attributes: int, flags: int, bench: Bench) -> None:
    userns = bench.userns if attributes & sys_.MOUNT_ATTR_IDMAP else 0
    sys_.mount_setattr(fd, "", AT_EMPTY_PATH | flags, attr_set=attributes, userns_fd=userns)


def _fresh(filesystem: str, options: tuple[tuple[str, str], ...], attributes: int) -> int:
    context = sys_.fsopen(filesystem)
    try:
        configure(context, options)
        sys_.fsconfig_create(context)
        return sys_.fsmount(context, attributes)
    finally:
        os.close(context)


def tmpfs(options: tuple[tuple[str, str], ...]) -> int:
    return _fresh("tmpfs", options, 0)


def configure(context: int, options: tuple[tuple[str, str], ...]) -> None:
    for key, value in options:
        if value:
            sys_.fsconfig_string(context, key, value)
        else:
            sys_.fsconfig_flag(context, key)
