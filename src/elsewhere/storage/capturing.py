"""One layer of a base: what differs between two scans, copied out of reality while reality goes on changing.

Nothing is read through a link: every directory is opened and must be the very one that the scan saw, and what is in it is
reached by its descriptor. What is remembered of an entry is what was true while it was read. So whatever changes in the
meantime shows as changed at the next capture, and what does not hold still is named.

Not here: which layers a base has, and when they count (see `bases.py`).
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import field

from elsewhere.clock import Clock, wall
from elsewhere.storage.copying import Attributes, clone, copy_data
from elsewhere.storage.scanning import (
    DIRECTORY,
    NOTHING,
    Difference,
    Row,
    Scan,
    join,
    names_of,
    reason,
    row_of,
    rows_of,
    settled,
    unsure,
)
from elsewhere.values import dataclass

__all__ = ["Capture", "Progress", "Tell", "whiteout"]

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_ATTEMPTS = 4
_SMALL = 1 << 20
_LARGE = 64 << 20
_TELL_FILES = 256
_TELL_BYTES = 16 << 20

# What says nothing about the entry that was at hand, but about us or the disk.
_FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a copy has come."""

    files: int
    bytes: int
    total_files: int
    total_bytes: int


Tell = Callable[[Progress], None]


class _Moved(Exception):
    """The entry is not any more what it was a moment ago."""


def whiteout(path: str) -> None:
    """Overlay's mark for what is deleted; everybody may make one."""
    os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


@dataclass(slots=True)
class Capture:
    """Copies `found` into the new directory `target`, on top of layers that look like `known`. Afterwards `found` says what was
    really copied. `attributes` are those of the tree's own directory, to be given to the layer when it has its place: who may not
    write a directory may not move it either."""

    tree: str
    target: str
    found: Scan
    known: Scan | None
    shift: int = 0
    tell: Tell | None = None
    clock: Clock = wall

    files: int = 0
    bytes: int = 0
    shared: int = 0
    unsettled: list[str] = field(default_factory=list)
    _total: tuple[int, int] = (0, 0)
    _told: tuple[int, int] = (0, 0)
    _piece: int = 0
    _clones: bool = True
    _gone: set[str] = field(default_factory=set)
    _links: dict[tuple[int, int], tuple[str, Row, Row]] = field(default_factory=dict)
    _attributes: list[tuple[str, Attributes]] = field(default_factory=list)

    def run(self, differences: list[Difference]) -> None:
        self._total = sum(one.files for one in differences), sum(one.bytes for one in differences)
        wanted: dict[str, Difference | None] = {one.path: one for one in differences}
        for path in list(wanted):
            self._want_with_parents(path, wanted)
        for one in differences:
            rows = rows_of(self.found.directories[one.path]) if one.changed else {}
            for name in one.changed:
                if stat.S_ISDIR(rows[name][0]):
                    wanted.setdefault(join(one.path, name))
        for path in sorted(wanted):
            self._directory(path, wanted[path])
        self.found.own = settled(self.found.own, self.found.began_ns)
        for place, attributes in reversed(self._attributes[1:]):
            attributes.give(place)
        if self.tell:
            self.tell(Progress(self.files, self.bytes, *self._total))

    @property
    def attributes(self) -> Attributes:
        return self._attributes[0][1]

    @property
    def strategy(self) -> str:
        return "reflink" if self.files and self.shared == self.files else "copy"

    def _want_with_parents(self, path: str, wanted: dict[str, Difference | None]) -> None:
        while path:
            path = path.rpartition("/")[0]
            if path in wanted:
                return
            wanted[path] = None

    def _now(self) -> int:
        return int(self.clock() * 1e9)

    def _directory(self, path: str, difference: Difference | None) -> None:
        if path and path.rpartition("/")[0] in self._gone:
            self._gone.add(path)
            return
        with self._opened(path) as opened:
            if opened is None:
                return
            fd, attributes = opened
            place = f"{self.target}/{path}" if path else self.target
            try:
                os.mkdir(place, 0o700)
            except OSError as error:
                if not path or error.errno != errno.ENAMETOOLONG:
                    raise
                self.found.left_out[path] = reason(error)
                self._lose(path)
                return
            self._attributes.append((place, attributes))
            if difference:
                self._entries(fd, path, place, difference)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, Attributes] | None]:
        """The directory that the scan saw, or None, and then it counts as absent. One that is shut is not even opened: that could
        mount something, or wait for a server."""
        shut = path in self.found.shut
        place = path.rpartition("/")[0] if shut else path
        fd = -1
        try:
            try:
                fd = os.open(f"{self.tree}/{place}", DIRECTORY)
                about = os.fstat(fd)
                if (about.st_dev, about.st_ino) != (self.found.device, self.found.inodes.get(place)):
                    raise _Moved
                if shut:
                    about = os.stat(path.rpartition("/")[2], dir_fd=fd, follow_symlinks=False)
                    if not stat.S_ISDIR(about.st_mode):
                        raise _Moved
                    attributes = Attributes.read(-1, about, shift=self.shift)
                else:
                    attributes = Attributes.read(fd, about, shift=self.shift)
            except (OSError, _Moved) as error:
                if not path or (isinstance(error, OSError) and error.errno in _FATAL):
                    raise
                if isinstance(error, PermissionError):
                    self.found.left_out[path] = reason(error)
                elif not isinstance(error, FileNotFoundError):
                    self.unsettled.append(path)
                self._lose(path)
                yield None
            else:
                yield fd, attributes
        finally:
            if fd >= 0:
                os.close(fd)

    def _lose(self, path: str) -> None:
        self._gone.add(path)
        self.found.forget(path)
        parent, _, name = path.rpartition("/")
        self._delete_known(parent, name)

    def _delete_known(self, path: str, name: str) -> None:
        if self.known and name in names_of(self.known.directories.get(path, NOTHING)):
            with contextlib.suppress(FileExistsError):
                whiteout(f"{self.target}/{join(path, name)}")

    def _entries(self, fd: int, path: str, place: str, difference: Difference) -> None:
        rows = rows_of(self.found.directories[path])
        for name in difference.changed:
            row = rows[name]
            if stat.S_ISDIR(row[0]):
                if row[4]:  # one that is shut has no times
                    # By the time of the scan: as long as it has these times, it is taken to have the names that were listed then.
                    rows[name] = settled(row, self.found.began_ns)
                continue
            new = self._entry(fd, path, name, f"{place}/{name}")
            self.found.count(row, -1)
            if new is None:
                del rows[name]
                self.found.partial.add(path)
            else:
                rows[name] = new
                self.found.count(new, 1)
            if new is None or join(path, name) in self.found.left_out:
                self._delete_known(path, name)
        for name in difference.deleted:
            whiteout(f"{place}/{name}")
        self.found.replace(path, rows)

    def _entry(self, fd: int, path: str, name: str, target: str) -> Row | None:
        """Copy one entry that is not a directory: what to remember of it, or None if it is not there."""
        for _ in range(_ATTEMPTS):
            found = None
            try:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                return self._copy(fd, path, name, target, found)
            except FileNotFoundError:
                return None
            except _Moved:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(target)
            except OSError as error:
                if error.errno in _FATAL:
                    raise
                with contextlib.suppress(OSError):
                    os.unlink(target)
                if error.errno == errno.ELOOP:
                    continue  # a link since it was looked at
                self.found.left_out[join(path, name)] = reason(error)
                return settled(row_of(found), self._now()) if found else None
        self.unsettled.append(join(path, name))
        return None

    def _copy(self, fd: int, path: str, name: str, target: str, found: os.stat_result) -> Row | None:
        now = self._now()
        kind = stat.S_IFMT(found.st_mode)
        identity = (found.st_dev, found.st_ino)
        torn = False
        if found.st_nlink > 1 and identity in self._links:
            first, true, remembered = self._links[identity]
            if true == row_of(found):
                try:
                    os.link(first, target, follow_symlinks=False)
                except OSError as error:
                    if error.errno != errno.EMLINK:  # a file may have only so many names; reality's file system allowed more
                        raise
                else:
                    return remembered
            else:
                torn = True  # it changed since its other name was copied: next time both are, and are one file again
        if kind == stat.S_IFREG:
            true, sure = self._copy_file(fd, name, target, found)
            if not sure:
                self.unsettled.append(join(path, name))
        elif kind in (stat.S_IFLNK, stat.S_IFIFO):
            true, sure = self._copy_special(fd, name, target, found), True
        elif kind == stat.S_IFDIR:
            self.unsettled.append(join(path, name))  # not when it was scanned
            return None
        else:
            self.found.left_out[join(path, name)] = "socket" if kind == stat.S_IFSOCK else "device"
            return None
        remembered = settled(true, now) if sure and not torn else unsure(true)
        if found.st_nlink > 1:
            self._links[identity] = target, true, remembered
        return remembered

    def _copy_special(self, fd: int, name: str, target: str, found: os.stat_result) -> Row:
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(name, dir_fd=fd), target)
        else:
            os.mkfifo(target)
        attributes = Attributes.read(f"/proc/self/fd/{fd}/{name}", found, shift=self.shift)
        after = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if row_of(after) != row_of(found):
            raise _Moved
        attributes.give(target)
        return row_of(found)

    def _copy_file(self, fd: int, name: str, target: str, found: os.stat_result) -> tuple[Row, bool]:
        """Content and attributes of one moment, and whether it was one: a file that is being written is read some times over."""
        reader = os.open(name, _FILE, dir_fd=fd)
        try:
            before = os.fstat(reader)
            if (before.st_dev, before.st_ino) != (found.st_dev, found.st_ino):
                raise _Moved
            writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for attempt in range(_ATTEMPTS if before.st_size <= _LARGE else 2):
                    if attempt:
                        os.ftruncate(writer, 0)
                        os.lseek(writer, 0, os.SEEK_SET)
                        os.lseek(reader, 0, os.SEEK_SET)
                        before = os.fstat(reader)
                    shared = self._copy_content(reader, writer, before)
                    attributes = Attributes.read(reader, before, shift=self.shift)
                    sure = row_of(os.fstat(reader)) == row_of(before)
                    if sure:
                        break
                attributes.give(writer)
            finally:
                os.close(writer)
        finally:
            os.close(reader)
        self._advance(before.st_size - self._piece, shared=shared)
        return row_of(before), sure

    def _copy_content(self, reader: int, writer: int, about: os.stat_result) -> bool:
        size = about.st_size
        self.bytes -= self._piece
        self._piece = 0
        if self._clones:
            if clone(reader, writer):
                return True
            self._clones = False  # layers lie on one file system, and so does nearly every project
        if size <= _SMALL and about.st_blocks * 512 >= size:
            content = os.read(reader, size) if size else b""
            while content:
                content = content[os.write(writer, content) :]
        else:
            copy_data(reader, writer, size, self._advance_piece)
        return False

    def _advance_piece(self, size: int) -> None:
        self._piece += size
        self.bytes += size
        self._say()

    def _advance(self, size: int, *, shared: bool) -> None:
        self.files += 1
        self.bytes += size
        self.shared += shared
        self._piece = 0
        self._say()

    def _say(self) -> None:
        if self.tell and (self.files - self._told[0] >= _TELL_FILES or self.bytes - self._told[1] >= _TELL_BYTES):
            self._told = self.files, self.bytes
            self.tell(Progress(self.files, self.bytes, *self._total))
