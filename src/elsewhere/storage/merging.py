"""Several layers as one that says the same: its entries by hard links, so that no data is copied, and the old layers stay as they
are. Only directories are new.

Over anything (`merge`), what hides or moves a directory is said by overlay's own marks. In a pinned base (`merge_deltas`) there
are no such marks, so that everybody can read and make its layers in the same way: there a whiteout for each name of the full copy
at the bottom says it, and one that would hide nothing there is left out.

Not here: when to merge, and what becomes of the old layers (see `layers.py`, `bases.py`).
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

from elsewhere.linux import syscalls, userns
from elsewhere.storage.copying import Attributes, copy_attributes, copy_file
from elsewhere.storage.encodings import Encoding
from elsewhere.storage.stacks import Folder, Stack
from elsewhere.storage.trash import remove_tree
from elsewhere.storage.trees import Entry, Tree, open_beneath
from elsewhere.values import dataclass

__all__ = ["duplicate", "merge", "merge_deltas"]

# What overlay notes for itself on a directory: said anew, or about an overlay that is no more.
_NOTES = ("opaque", "redirect", "origin", "impure", "nlink", "upper", "uuid")
_UNMARKED = Encoding(())

# A file may have only so many names (65,000 on ext4); and some file systems know no second one.
_UNLINKABLE = (errno.EMLINK, errno.EXDEV, errno.EPERM)


def merge(layers: Sequence[str], encoding: Encoding, target: str) -> None:
    """Make the new directory `target`, which over anything looks as `layers` (newest first) do. If that fails, something of it
    may be left."""
    _with_power_over_own(lambda: _Merger(target, encoding).run(layers), target)


def duplicate(layer: str, encoding: Encoding, target: str) -> None:
    """Make the new directory `target`, which says what a layer says and shares nothing with it but blocks, where the file system
    can share these: the layer may go on changing."""
    _with_power_over_own(lambda: _Merger(target, encoding, apart=True).run([layer]), target)


def merge_deltas(deltas: Sequence[str], bottom: str, target: str) -> None:
    """Make the new directory `target`, which on `bottom` looks as `deltas` (newest first) do. Its own mode and owner are still to
    be given to it, when it has its place."""
    _with_power_over_own(lambda: _Merger(target, _UNMARKED, bottom).run(deltas), target)


def _with_power_over_own(work: Callable[[], None], target: str) -> None:
    """What somebody closed to themselves keeps an ordinary user out, but not one who has a user namespace. Not there in the first
    place: only there can a directory be given to any group that its owner is in."""
    try:
        work()
        return
    except PermissionError:
        if os.geteuid() == 0:
            raise
    remove_tree(target)
    child = os.fork()
    if child == 0:
        code = errno.EIO
        try:
            identity = os.geteuid(), os.getegid()
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            userns.map_myself(*identity)
            work()
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code if code > 0 else errno.EIO, f"layers were not merged: {os.strerror(abs(code))}", target)


@dataclass(slots=True)
class _Merger:
    target: str
    encoding: Encoding
    bottom: str | None = None
    apart: bool = False
    _top: int = -1
    _below: Tree | None = None
    _copies: dict[tuple[int, int], str] = field(default_factory=dict)
    _directories: list[tuple[str, Attributes]] = field(default_factory=list)

    def run(self, layers: Sequence[str]) -> None:
        with contextlib.ExitStack() as stack:
            os.mkdir(self.target, 0o700)
            self._top = os.open(self.target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, self._top)
            self._below = None if self.bottom is None else Tree([self.bottom], stack)
            waiting = [Stack(layers, self.encoding, stack).root()]
            while waiting:
                with waiting.pop() as folder, self._opened(folder.path) as fd:
                    self._directories.append((folder.path, self._attributes(folder.fd)))
                    waiting += self._fill(folder, fd)
            # Last of all, and from the inside out: a closed one could not be filled, and filling changes times.
            for path, attributes in reversed(self._directories[0 if self.bottom is None else 1 :]):
                with self._opened(path) as fd:
                    attributes.give(fd)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        fd = open_beneath(self._top, path or ".")
        try:
            yield fd
        finally:
            os.close(fd)

    def _attributes(self, fd: int) -> Attributes:
        about = os.fstat(fd)
        notes = {f"{prefix}.{note}" for prefix in self.encoding.attributes for note in _NOTES}
        names: list[str] = []
        with contextlib.suppress(OSError):  # a file system without attributes has none to give
            names = [name for name in os.listxattr(fd) if name not in notes]
        extended = tuple((name, os.getxattr(fd, name)) for name in names)
        return Attributes(about.st_mode, about.st_uid, about.st_gid, (about.st_atime_ns, about.st_mtime_ns), extended)

    def _fill(self, folder: Folder, fd: int) -> list[Folder]:
        """One directory of the new layer; those in it are returned, to be filled next."""
        directories = []
        for name, entry in folder.entries().items():
            if stat.S_ISDIR(entry.about.st_mode):
                inner = folder.folder(name)
                os.mkdir(name, 0o700, dir_fd=fd)
                if self.bottom is None:
                    self._mark(folder, inner, name)
                directories.append(inner)
            else:
                self._link(folder.path, name, entry, fd)
        hidden = self._hidden(folder)
        for name in hidden:
            os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=fd)
        if hidden and self.bottom is None and not self.encoding.names:
            # Where nothing lies below, overlay lists whiteouts as if they were there, except in a directory that it copied up.
            os.setxattr(fd, f"{self.encoding.attributes[0]}.origin", b"")
        return directories

    def _hidden(self, folder: Folder) -> set[str]:
        """The names for which there has to be a whiteout."""
        if self._below is None:
            return folder.gone() if folder.below is not None else set()
        with contextlib.ExitStack() as stack:
            there = self._below.open(folder.path, stack)
            names = set(there.entries()) if there else set()
        return names & folder.gone() if folder.below is not None else names - folder.entries().keys()

    def _mark(self, folder: Folder, inner: Folder, name: str) -> None:
        """Say what shows through in a directory that lies in `folder`, if it is not what shows through there anyway."""
        prefix = self.encoding.attributes[0]
        if inner.below is None:
            mark = None if folder.below is None else ("opaque", b"y")
        elif folder.below is None:
            mark = ("redirect", os.fsencode(f"/{inner.below}"))
        else:
            parent, _, was = inner.below.rpartition("/")
            if parent != folder.below:
                mark = ("redirect", os.fsencode(f"/{inner.below}"))
            else:
                mark = None if was == name else ("redirect", os.fsencode(was))
        if mark:
            with self._opened(inner.path) as fd:
                os.setxattr(fd, f"{prefix}.{mark[0]}", mark[1])

    def _link(self, path: str, name: str, entry: Entry, fd: int) -> None:
        if self.apart:
            self._copy(f"{path}/{name}" if path else name, name, entry, fd)
            return
        try:
            os.link(name, name, src_dir_fd=entry.fd, dst_dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _UNLINKABLE:
                raise
            self._copy(f"{path}/{name}" if path else name, name, entry, fd)

    def _copy(self, path: str, name: str, entry: Entry, fd: int) -> None:
        identity = (entry.about.st_dev, entry.about.st_ino)
        if identity in self._copies:
            with contextlib.suppress(OSError):
                os.link(self._copies[identity], name, src_dir_fd=self._top, dst_dir_fd=fd, follow_symlinks=False)
                return
        source, target = f"/proc/self/fd/{entry.fd}/{name}", f"/proc/self/fd/{fd}/{name}"
        if stat.S_ISREG(entry.about.st_mode):
            copy_file(source, target)
        elif stat.S_ISLNK(entry.about.st_mode):
            os.symlink(os.readlink(source), target)
        else:
            os.mknod(target, entry.about.st_mode, entry.about.st_rdev)
        copy_attributes(source, target, entry.about)
        if entry.about.st_nlink > 1:
            self._copies[identity] = path
