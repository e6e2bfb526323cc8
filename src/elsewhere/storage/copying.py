"""A true copy of a tree: content (shared blocks where the file system can), modes, times, attributes, links, holes.

Used where no overlay can be had, and to bring a layer out of memory. Reading never follows a link and never waits on a fifo.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable

from elsewhere.values import dataclass

__all__ = ["Attributes", "Copied", "clone", "copy_attributes", "copy_data", "copy_file", "copy_tree"]

_FICLONE = 0x40049409
_CHUNK = 1 << 20
_LARGEST_ID = (1 << 32) - 2
_NOBODY = 65534


class Copied:
    """What a copy amounted to; also its progress, since it is updated while the copy runs."""

    def __init__(self, tell: Callable[["Copied"], None] | None = None) -> None:
        self.files = 0
        self.bytes = 0
        self.shared = 0
        self.left_out: list[str] = []
        self._tell = tell

    def add(self, size: int, *, shared: bool) -> None:
        self.files += 1
        self.bytes += size
        self.shared += shared
        if self._tell and self.files % 256 == 0:
            self._tell(self)

    @property
    def strategy(self) -> str:
        return "reflink" if self.files and self.shared == self.files else "copy"


def copy_tree(
    source: str, target: str, *, leave_out: frozenset[str] = frozenset(), tell: Callable[[Copied], None] | None = None
) -> Copied:
    """Copy `source` to the new directory `target`. `leave_out` holds absolute paths below `source` that are not copied; what
    cannot be read is left out and named in the result."""
    copied = Copied(tell)
    links: dict[tuple[int, int], str] = {}
    levels = [_Level(source, target)]  # not by recursion: a tree may be deeper than Python has frames
    while levels:
        level = levels[-1]
        entry = level.children.pop() if level.children else None
        if entry is not None and entry.path in leave_out:
            continue
        path = level.source if entry is None else entry.path
        try:
            if entry is None:
                levels.pop()
                copy_attributes(level.source, level.target, os.lstat(level.source))
            elif entry.is_dir(follow_symlinks=False):
                levels.append(_Level(entry.path, os.path.join(level.target, entry.name)))
            else:
                _copy_entry(entry, os.path.join(level.target, entry.name), copied, links)
        except FileNotFoundError:
            continue  # gone since it was listed
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            copied.left_out.append(path)
    return copied


class _Level:
    """One directory on the way down. It is listed first: of one that cannot be read, no empty copy is left."""

    def __init__(self, source: str, target: str) -> None:
        with os.scandir(source) as entries:
            self.children = list(entries)
        self.source, self.target = source, target
        os.mkdir(target, 0o700)


def _copy_entry(entry: "os.DirEntry[str]", target: str, copied: Copied, links: dict[tuple[int, int], str]) -> None:
    found = entry.stat(follow_symlinks=False)
    kind = stat.S_IFMT(found.st_mode)
    identity = (found.st_dev, found.st_ino)
    if found.st_nlink > 1 and identity in links:
        os.link(links[identity], target, follow_symlinks=False)
        return
    if kind == stat.S_IFLNK:
        os.symlink(os.readlink(entry.path), target)
    elif kind == stat.S_IFREG:
        size, shared = copy_file(entry.path, target)
        copied.add(size, shared=shared)
    elif kind == stat.S_IFIFO:
        os.mkfifo(target)
    else:
        copied.left_out.append(entry.path)  # sockets and devices mean nothing in a copy
        return
    links[identity] = target
    copy_attributes(entry.path, target, found)


def copy_file(source: str, target: str) -> tuple[int, bool]:
    """The content alone, into a new file: its size, and whether the blocks are shared."""
    reader = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = os.fstat(reader).st_size
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if clone(reader, writer):
                return size, True
            copy_data(reader, writer, size)
            return size, False
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def clone(reader: int, writer: int) -> bool:
    """Let both files share their blocks, if the file system can."""
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
    except OSError:
        return False
    return True


def copy_data(reader: int, writer: int, size: int, advance: Callable[[int], None] | None = None) -> None:
    """Only what is data: holes stay holes. `advance` is told of every piece of a large file."""
    position = 0
    while True:
        try:
            position = os.lseek(reader, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        end = os.lseek(reader, position, os.SEEK_HOLE)
        os.lseek(writer, position, os.SEEK_SET)
        os.lseek(reader, position, os.SEEK_SET)
        while position < end:
            done = os.sendfile(writer, reader, None, min(_CHUNK, end - position))
            if done == 0:
                break
            position += done
            if advance:
                advance(done)
        position = max(position, end)
    os.ftruncate(writer, max(size, os.lseek(reader, 0, os.SEEK_END)))


def copy_attributes(source: str, target: str, found: os.stat_result) -> None:
    link = stat.S_ISLNK(found.st_mode)
    if os.geteuid() == 0:
        os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)
    with contextlib.suppress(OSError):  # a file system without attributes has none to give
        for name in os.listxattr(source, follow_symlinks=False):
            with contextlib.suppress(OSError):  # one that we may not set is one that the command could not have set either
                os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    if not link:
        os.chmod(target, stat.S_IMODE(found.st_mode))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)


@dataclass(frozen=True, slots=True)
class Attributes:
    """Everything about an entry but its content, read once and given to a copy; with `shift`, to a copy for a user namespace in
    which id 0 is `shift`: owners, the owners within access lists, and the owner of file capabilities."""

    mode: int
    uid: int
    gid: int
    times: tuple[int, int]
    extended: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def read(cls, place: str | int, found: os.stat_result, *, shift: int = 0) -> "Attributes":
        """`place` is a descriptor, or a path of which the last part is not followed."""
        follow = isinstance(place, int)
        extended = []
        names: list[str] = []
        with contextlib.suppress(OSError):  # a file system without attributes has none to give
            names = os.listxattr(place, follow_symlinks=follow)
        for name in names:
            # Overlay would obey them in a layer; those of reality mean another overlay.
            if name.startswith("trusted.overlay.") or (name.startswith("user.overlay.") and os.geteuid() != 0):
                continue
            with contextlib.suppress(OSError):
                extended.append((name, _shifted(name, os.getxattr(place, name, follow_symlinks=follow), shift)))
        owners = _shifted_id(found.st_uid, shift), _shifted_id(found.st_gid, shift)
        return cls(found.st_mode, *owners, (found.st_atime_ns, found.st_mtime_ns), tuple(extended))

    def give(self, place: str | int) -> None:
        follow = isinstance(place, int)
        mode = stat.S_IMODE(self.mode)
        if os.geteuid() == 0:
            os.chown(place, self.uid, self.gid, follow_symlinks=follow)
        else:
            mode = self._without_powers(place, mode, follow=follow)
        for name, value in self.extended:
            try:
                os.setxattr(place, name, value, follow_symlinks=follow)
            except OSError as error:
                # One that we may not set is one that a command could not have set either.
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
        if not stat.S_ISLNK(self.mode):
            os.chmod(place, mode)
        os.utime(place, ns=self.times, follow_symlinks=follow)

    def _without_powers(self, place: str | int, mode: int, *, follow: bool) -> int:
        """An ordinary user's copy belongs to that user: of somebody else's file it must not keep the set-id bits."""
        if self.uid != os.geteuid():
            mode &= ~stat.S_ISUID
        if self.gid != os.getegid():
            try:
                os.chown(place, -1, self.gid, follow_symlinks=follow)
            except OSError:
                if not stat.S_ISDIR(self.mode):
                    mode &= ~stat.S_ISGID
        return mode


def _shifted_id(number: int, shift: int) -> int:
    return number + shift if number + shift <= _LARGEST_ID else _NOBODY + shift


def _shifted(name: str, value: bytes, shift: int) -> bytes:
    if shift and name == "security.capability":
        return _shifted_capabilities(value, shift)
    if shift and name.startswith("system.posix_acl_"):
        return _shifted_list(value, shift)
    return value


def _shifted_capabilities(value: bytes, shift: int) -> bytes:
    """Version 2 counts for the first user namespace only; version 3 names the id of root in the one that it counts for."""
    magic = int.from_bytes(value[:4], "little")
    version, flags = magic >> 24, magic & 0xFFFFFF
    if (version, len(value)) == (2, 20):
        owner = shift
    elif (version, len(value)) == (3, 24):
        owner = _shifted_id(int.from_bytes(value[20:], "little"), shift)
    else:
        return value
    return struct.pack("<I", 3 << 24 | flags) + value[4:20] + struct.pack("<I", owner)


def _shifted_list(value: bytes, shift: int) -> bytes:
    entries = [value[:4]]
    for tag, permissions, owner in struct.iter_unpack("<HHI", value[4:]):
        named = tag in (0x02, 0x08)  # a user, a group; the others have no id
        entries.append(struct.pack("<HHI", tag, permissions, _shifted_id(owner, shift) if named else owner))
    return b"".join(entries)
