"""One application while it is at work: its journal, the roots it changes, its shelves, and what others did meanwhile.

Not here: what is done with them: making what is new (`preparing.py`), moving it (`applying.py`), moving it back (`reversing.py`).
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from elsewhere.errors import StateError
from elsewhere.linux import syscalls
from elsewhere.promotion import shelves
from elsewhere.promotion.journal import About, Entry, Journal, Note, about_of
from elsewhere.promotion.shelves import Roots, look

__all__ = ["NOT_THERE", "SINGLY", "Changed", "Meanwhile", "Step", "Work", "change_mode", "found_of", "put_of", "same"]

Step = Callable[[str], None]

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
SINGLY = 8  # so many are synced one by one
_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Meanwhile(NamedTuple):
    """Something that somebody else changed while it was being applied or reversed. It is as that one left it; what had been
    taken out of its place is at `kept`, if anything was."""

    root: str
    path: str
    reason: str
    sentence: str
    kept: str | None = None


class Changed(Exception):
    """Something is not what was expected any more."""

    def __init__(self, *told: Meanwhile) -> None:
        super().__init__(told[0].sentence)
        self.told = told


class Work:
    """`at` is what it is busy with, for the words of an error."""

    def __init__(self, held: Journal, stack: contextlib.ExitStack, step: Step) -> None:
        self.journal = held
        self.step = step
        self.stack = stack
        self.roots = Roots(stack)
        self.at = ""
        self.notes: list[Note] = []
        self.fds: list[int | None] = []
        self.entries: list[Entry] = []
        self.stamps: list[int] = []
        self.told: list[Meanwhile] = []

    def look_at(self, root: str, path: str) -> About | None:
        try:
            with self.roots.parent(root, path) as (parent, name):
                here = look(parent, name)
                if here is None:
                    return None
                return _link(parent, name) if stat.S_ISLNK(here.st_mode) else about_of(here)
        except OSError as error:
            if error.errno in NOT_THERE:
                return None
            raise

    def hold(self, fd: int | None) -> None:
        self.fds.append(fd)
        if fd is not None:
            self.stack.callback(os.close, fd)

    def shelf(self, number: int) -> int:
        fd = self.fds[number]
        if fd is None:
            note = self.notes[number]
            place = os.path.join(note.root, note.path, note.name)
            raise StateError("shelf_gone", f"{place!r} is gone, and with it what it held", hint="bring it back if you moved it")
        return fd

    def reopen(self) -> None:
        for note in self.notes[len(self.fds) :]:
            self.hold(shelves.open_shelf(self.roots, note))

    def tell(self, entry: Entry, sentence: str, name: str | None) -> None:
        kept = None
        if name is not None:
            kept = self.journal.inside(f"old-{entry.shelf}", name if self.notes[entry.shelf].same else f"{name}.kept")
        self.told.append(Meanwhile(entry.root, entry.path, "changed_meanwhile", sentence, kept))

    def ours(self, entry: Entry, here: os.stat_result) -> bool:
        """Whether it is exactly what we made: a number alone may have been given to something else since."""
        put = put_of(entry)
        seen = about_of(here)
        if seen[:5] != put[:5]:
            return False
        return stat.S_ISDIR(put.mode) or seen.mtime in (put.mtime, *self.stamps[entry.shelf : entry.shelf + 1])

    def settle(self) -> None:
        """After a power cut the names must be where the journal says."""
        directories = sorted({(one.root, one.path.rpartition("/")[0]) for one in self.entries})
        held = (fd for fd in self.fds if fd is not None)
        self.sync(itertools.chain(self._readable(directories), held), singly=len(directories) <= SINGLY)

    def sync(self, fds: Iterable[int], *, singly: bool) -> None:
        """One by one, or one file system after the other."""
        devices = set()
        for fd in fds:
            device = os.fstat(fd).st_dev
            if singly:
                os.fsync(fd)
            elif device not in devices:
                syscalls.syncfs(fd)
            devices.add(device)

    def _readable(self, directories: Iterable[tuple[str, str]]) -> Iterator[int]:
        """One that cannot be read is synced with its file system, if at all."""
        for root, path in directories:
            try:
                directory = self.roots.open(root, path)
            except OSError as error:
                if error.errno not in NOT_THERE:
                    raise
                continue
            try:
                fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
            except PermissionError:
                continue
            finally:
                os.close(directory)
            try:
                yield fd
            finally:
                os.close(fd)


def same(here: About, seen: About) -> bool:
    """The times of a directory tell of what is in it, which is not what is asked."""
    return here[:4] == seen[:4] if stat.S_ISDIR(here.mode) else here[:7] == seen[:7]


def put_of(entry: Entry) -> About:
    assert entry.put is not None, "something new was made"
    return entry.put


def found_of(entry: Entry) -> About:
    assert entry.found is not None, "something was there"
    return entry.found


def _link(parent: int, name: str) -> About:
    """What is there now, and where it leads if it is still a link: of one and the same thing."""
    fd = os.open(name, _FLAGS, dir_fd=parent)
    try:
        here = os.fstat(fd)
        return about_of(here, os.readlink("", dir_fd=fd) if stat.S_ISLNK(here.st_mode) else None)
    finally:
        os.close(fd)


def change_mode(parent: int, target: str, inode: int, before: int, after: int) -> bool:
    """In place, of the very thing that was looked at. False: it is another one, or has another mode."""
    try:
        fd = os.open(target, _FLAGS, dir_fd=parent)
    except FileNotFoundError:
        return False
    try:
        here = os.fstat(fd)
        if (here.st_ino, here.st_mode) != (inode, before):
            return False
        os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(after))
        if os.fstat(fd).st_mode != after:
            raise PermissionError(errno.EPERM, f"the mode {stat.S_IMODE(after):o} cannot be given")
        return True
    finally:
        os.close(fd)
