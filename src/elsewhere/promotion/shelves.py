"""A shelf: a directory `.elsewhere-<random>` beside what is changed, on which new things wait and old things are put.

It lies in the topmost directory below the root that is on the same mount and file system and that we may write to, so that
whatever is new comes to its place by one rename, complete, and whatever it replaces comes back by one. Only its owner can look
into it.

Three moves, of which none overwrites anything: `put` (to a free name), `take` (from its name to the shelf), `swap` (both at
once). A file system that cannot exchange two names swaps by `take` and `put`: for a moment there is nothing at the path. One
that cannot refuse to replace either puts by a hard link (a directory: by a rename, which replaces nothing but an empty
directory).

What is new gets content, owner, extended attributes and mode here. Extended attributes are taken as they are: `user.*` without
overlay's own, access lists, and as root file capabilities.

Not here: what is moved when (`applying.py`). No link is followed anywhere.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from elsewhere.changes.model import Place, Side
from elsewhere.linux import syscalls
from elsewhere.promotion.journal import About, Note, about_of
from elsewhere.storage.copying import clone, copy_data

__all__ = [
    "LARGEST_TEXT",
    "Made",
    "Roots",
    "choose",
    "look",
    "make",
    "make_shelf",
    "open_shelf",
    "put",
    "save",
    "spare",
    "swap",
    "take",
]

LARGEST_TEXT = 1 << 20

_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_LINKLESS = syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_PATH = os.O_PATH | os.O_DIRECTORY
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LONGEST = 1000  # characters, of at most four bytes: the kernel takes paths of less than 4,096
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_CANNOT = (errno.EINVAL, errno.ENOSYS)
_ZEROS = bytes(LARGEST_TEXT)
_ACCESS_LISTS = ("system.posix_acl_access", "system.posix_acl_default")


class Roots:
    """The roots that are changed, and directories below them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._fds: dict[str, int] = {}
        stack.callback(self._close)

    def _close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def open(self, root: str, path: str) -> int:
        if root not in self._fds:
            self._fds[root] = syscalls.openat2(syscalls.AT_FDCWD, root, _PATH, _LINKLESS)
        return _open_beneath(self._fds[root], path or ".")

    @contextlib.contextmanager
    def parent(self, root: str, path: str) -> Iterator[tuple[int, str]]:
        """The directory that it is in, and its name there."""
        directory, _, name = path.rpartition("/")
        fd = self.open(root, directory)
        try:
            yield fd, name
        finally:
            os.close(fd)


def _open_beneath(top: int, path: str) -> int:
    if len(path) < _LONGEST:
        return syscalls.openat2(top, path, _PATH, _BENEATH)
    half = path.rindex("/", 0, _LONGEST)
    fd = syscalls.openat2(top, path[:half], _PATH, _BENEATH)
    try:
        return _open_beneath(fd, path[half + 1 :])
    finally:
        os.close(fd)


def look(fd: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=fd)
    except FileNotFoundError:
        return None


def put(shelf: int, name: str, parent: int, target: str) -> None:
    """FileExistsError: somebody else was faster."""
    try:
        syscalls.renameat2(shelf, name, parent, target, syscalls.RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        if stat.S_ISDIR(os.lstat(name, dir_fd=shelf).st_mode):
            if look(parent, target) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
            os.rename(name, target, src_dir_fd=shelf, dst_dir_fd=parent)
        else:
            os.link(name, target, src_dir_fd=shelf, dst_dir_fd=parent, follow_symlinks=False)
            os.unlink(name, dir_fd=shelf)


def take(parent: int, target: str, shelf: int, name: str) -> None:
    try:
        syscalls.renameat2(parent, target, shelf, name, syscalls.RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        if look(shelf, name) is not None:  # nobody but us puts anything there
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from None
        os.rename(target, name, src_dir_fd=parent, dst_dir_fd=shelf)


def swap(shelf: int, name: str, parent: int, target: str, aside: str, halfway: Callable[[], None]) -> str:
    """The name on the shelf that what came out has now: the same, or `aside` where names cannot be exchanged."""
    try:
        syscalls.renameat2(shelf, name, parent, target, syscalls.RENAME_EXCHANGE)
        return name
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    take(parent, target, shelf, aside)
    halfway()
    put(shelf, name, parent, target)
    return aside


class _Key(NamedTuple):
    mount: int
    device: int


def _key(fd: int) -> _Key:
    """Names can be moved between directories that agree in this: neither the device alone (bind mounts) nor the mount alone
    (subvolumes) tells."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as stream:
        mount = next(int(line.split()[1]) for line in stream if line.startswith("mnt_id:"))
    return _Key(mount, os.fstat(fd).st_dev)


class Chosen(NamedTuple):
    notes: list[Note]
    numbers: dict[tuple[str, str], int]  # of a root and a directory below it


def choose(roots: Roots, directories: list[tuple[str, str]], journal: int) -> Chosen:
    """Which shelf serves which directory. Directories that are not there yet will be where the nearest one above them is."""
    chosen = Chosen([], {})
    known: dict[tuple[str, _Key], int] = {}
    for root, directory in directories:
        if (root, directory) in chosen.numbers:
            continue
        fd, standing = _nearest(roots, root, directory)
        try:
            key = _key(fd)
        finally:
            os.close(fd)
        if (root, key) not in known:
            place = _topmost(roots, root, standing, key)
            known[root, key] = len(chosen.notes)
            chosen.notes.append(Note(root, place, f".elsewhere-{secrets.token_hex(8)}", key == _key(journal)))
        chosen.numbers[root, directory] = known[root, key]
    return chosen


def _nearest(roots: Roots, root: str, directory: str) -> tuple[int, str]:
    while True:
        try:
            return roots.open(root, directory), directory
        except OSError as error:
            if not directory or error.errno not in _NOT_THERE:
                raise
            directory = directory.rpartition("/")[0]


def _topmost(roots: Roots, root: str, directory: str, key: _Key) -> str:
    parts = directory.split("/") if directory else []
    for count in range(len(parts) + 1):
        candidate = "/".join(parts[:count])
        fd = roots.open(root, candidate)
        try:
            if _key(fd) == key and os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
                return candidate
        finally:
            os.close(fd)
    raise PermissionError(errno.EACCES, "no directory on the way to it can be written", directory or ".")


def make_shelf(roots: Roots, note: Note) -> int:
    parent = roots.open(note.root, note.path)
    try:
        os.mkdir(note.name, 0o700, dir_fd=parent)
        fd = os.open(note.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        for name in _ACCESS_LISTS:  # inherited: it would let others in, and stick to what is made here
            with contextlib.suppress(OSError):
                os.removexattr(fd, name)
        os.fchmod(fd, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_shelf(roots: Roots, note: Note) -> int | None:
    """None: there is none. One that is somebody else's counts as none."""
    try:
        parent = roots.open(note.root, note.path)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise
    try:
        fd = os.open(note.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise
    finally:
        os.close(parent)
    if os.fstat(fd).st_uid == os.geteuid():
        return fd
    os.close(fd)
    return None


class Made(NamedTuple):
    """`text` is the content of a file that is short and has no zero byte."""

    about: About
    digest: str = ""
    text: bytes | None = None


def make(shelf: int, name: str, wanted: Side, owner: tuple[int, int], like: tuple[int, str] | None, *, durable: bool) -> Made:
    """Something new. What has no place of its own to take extended attributes from takes those of what it replaces (`like`)."""
    if wanted.type == "link":
        os.symlink(wanted.target or "", name, dir_fd=shelf)
        if owner != (os.geteuid(), os.getegid()):
            os.chown(name, *owner, dir_fd=shelf, follow_symlinks=False)
        return Made(about_of(os.lstat(name, dir_fd=shelf), wanted.target))
    if wanted.type == "directory":
        return Made(_make_directory(shelf, name, wanted.mode | 0o700, owner, _attributes(wanted, like)))
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=shelf)
    try:
        with wanted.open() as reader:
            digest, text = _fill(fd, wanted, reader)
            attributes = _extended(reader.fileno()) if wanted.content is None else _attributes(wanted, like)
        _finish(fd, wanted.mode, owner, attributes)
        if durable:
            os.fsync(fd)
        return Made(about_of(os.fstat(fd)), digest, text)
    finally:
        os.close(fd)


def spare(shelf: int, name: str, found: About, place: tuple[int, str]) -> int:
    """A directory like the one that is there, to take its place again; its inode number."""
    fd = os.open(place[1], _READ | os.O_DIRECTORY, dir_fd=place[0])
    try:
        attributes = _extended(fd)
    finally:
        os.close(fd)
    return _make_directory(shelf, name, stat.S_IMODE(found.mode) | 0o700, (found.uid, found.gid), attributes).inode


def save(place: tuple[int, str], found: About, target: str) -> None:
    """A copy of something that stands in reality, where the journal is on another file system."""
    if stat.S_ISLNK(found.mode):
        return os.symlink(os.readlink(place[1], dir_fd=place[0]), target)
    if stat.S_ISDIR(found.mode):
        return os.mkdir(target, 0o700)
    if not stat.S_ISREG(found.mode):
        raise PermissionError(errno.EPERM, "no copy can be made of it", place[1])
    reader = os.open(place[1], _READ, dir_fd=place[0])
    try:
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not clone(reader, writer):
                copy_data(reader, writer, found.size)
            for name, value in _extended(reader):
                _set(writer, name, value)
            os.fsync(writer)
        finally:
            os.close(writer)
    finally:
        os.close(reader)
    return None


def _make_directory(shelf: int, name: str, mode: int, owner: tuple[int, int], attributes: list[tuple[str, bytes]]) -> About:
    os.mkdir(name, 0o700, dir_fd=shelf)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=shelf)
    try:
        _finish(fd, mode, owner, attributes)
        return about_of(os.fstat(fd))
    finally:
        os.close(fd)


def _finish(fd: int, mode: int, owner: tuple[int, int], attributes: list[tuple[str, bytes]]) -> None:
    """In the only order in which nothing takes away what came before: a new owner clears set-id bits and capabilities, an
    access list sets the mode, and whoever may not write to a file any more may not give it attributes either."""
    if owner != (os.geteuid(), os.getegid()):
        os.fchown(fd, *owner)
    for name, value in attributes:
        _set(fd, name, value)
    os.fchmod(fd, mode)
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
        raise PermissionError(errno.EPERM, f"the mode {mode:o} cannot be given")


def _fill(fd: int, wanted: Side, reader: BinaryIO) -> tuple[str, bytes | None]:
    """The content: its sha256, and all of it if it is a short text. Holes of whole pieces stay holes."""
    shared = wanted.content is None and wanted.size > LARGEST_TEXT and clone(reader.fileno(), fd)
    digest = hashlib.sha256()
    text: bytes | None = b""
    position = 0
    while piece := reader.read(LARGEST_TEXT):
        digest.update(piece)
        text = piece if position == 0 else None
        if not shared and piece != _ZEROS:
            _write(fd, piece, position)
        position += len(piece)
    if position > LARGEST_TEXT:
        os.ftruncate(fd, position)
    return digest.hexdigest(), None if text is None or b"\0" in text else text


def _write(fd: int, piece: bytes, position: int) -> None:
    view = memoryview(piece)
    while view:
        done = os.pwrite(fd, view, position)
        view, position = view[done:], position + done


def _attributes(wanted: Side, like: tuple[int, str] | None) -> list[tuple[str, bytes]]:
    """Of what it comes from, or else of what it replaces."""
    kind = os.O_DIRECTORY if wanted.type == "directory" else 0
    if wanted.place is not None:
        return _attributes_at(wanted.place, kind)
    if like is None:
        return []
    fd = os.open(like[1], _READ | kind, dir_fd=like[0])
    try:
        return _extended(fd)
    finally:
        os.close(fd)


def _attributes_at(place: Place, kind: int) -> list[tuple[str, bytes]]:
    for root in (place.root, *place.older):
        top = os.open(root, _PATH | os.O_CLOEXEC)
        try:
            fd = syscalls.openat2(top, place.path, _READ | kind, _BENEATH)
        except OSError as error:
            if error.errno in _NOT_THERE:
                continue
            raise
        finally:
            os.close(top)
        try:
            return _extended(fd)
        finally:
            os.close(fd)
    return []


def _extended(fd: int) -> list[tuple[str, bytes]]:
    try:
        names = os.listxattr(fd)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return []
        raise
    return [(name, os.getxattr(fd, name)) for name in names if _travels(name)]


def _travels(name: str) -> bool:
    if name == "security.capability":
        return os.geteuid() == 0
    return name in _ACCESS_LISTS or (name.startswith("user.") and not name.startswith("user.overlay."))


def _set(fd: int, name: str, value: bytes) -> None:
    try:
        os.setxattr(fd, name, value)
    except OSError as error:
        if error.errno != errno.ENOTSUP:  # a file system that has none cannot be given any
            raise
