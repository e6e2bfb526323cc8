"""Going back: what an application did is reversed by inode numbers, from wherever a crash may have left it.

On the shelf of a step lie: nothing, what is new, or what it replaced; at its path in reality one of them, nothing, or something
of somebody else. From that alone follows what is to be done, so a reversal can itself be killed anywhere and repeated. What
somebody changed after we had put it there stays as it is, what it had replaced is kept in the journal, and both are told.

    <n>          what is new; after an exchange, what it replaced; what was deleted; a directory to replace a removed one
    <n>.old      what was replaced, where names cannot be exchanged
    <n>.out      what is new, on its way back, where names cannot be exchanged
    <n>.again    what was replaced, as it makes room once more for what somebody changed at the very moment
"""

import contextlib
import os
import stat
from collections.abc import Callable

from elsewhere.errors import StateError
from elsewhere.promotion import shelves
from elsewhere.promotion.journal import Entry
from elsewhere.promotion.shelves import look
from elsewhere.promotion.working import NOT_THERE, Work, change_mode, found_of, put_of

__all__ = ["reverse"]


def reverse(work: Work) -> None:
    """Everything, as far as it was done."""
    failed: tuple[str, OSError] | None = None
    for entry in reversed(work.entries):
        work.step("reverse")
        try:
            _Reversal(work, entry).run()
        except OSError as error:  # the others can still go back
            failed = failed or (entry.path, error)
    if failed is not None:
        path, reason = failed
        raise StateError(
            "not_reversed",
            f"{path!r} could not be put back: {reason.strerror or reason}",
            hint="see to it, then run elsewhere again: it goes on with putting back",
        ) from reason
    work.settle()
    if work.told:
        with contextlib.suppress(OSError):  # it is words; what they are about is safe without them
            work.journal.write("meanwhile.json", work.told)


class _Reversal:
    """One step back, from wherever a crash may have left it. It can be repeated."""

    def __init__(self, work: Work, entry: Entry) -> None:
        self.work = work
        self.entry = entry

    def run(self) -> None:
        entry = self.entry
        if entry.kind == "mode":
            return self._mode()
        self.shelf = self.work.shelf(entry.shelf)
        names = (entry.name, f"{entry.name}.old", f"{entry.name}.out", f"{entry.name}.again")
        self.held = {name: here for name in names if (here := look(self.shelf, name)) is not None}
        self.mine = next((name for name, here in self.held.items() if entry.put and here.st_ino == entry.put.inode), None)
        self.old = next((name for name in self.held if name != self.mine), None)
        if self._untouched():
            return None
        try:
            with self.work.roots.parent(entry.root, entry.path) as (self.parent, self.target):
                return _REVERSING[entry.kind](self)
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
        return self._tell("the directory that it is in was moved or deleted meanwhile")

    def _tell(self, sentence: str) -> None:
        self.work.tell(self.entry, sentence, self.old if self.entry.kind != "rmdir" else None)

    def _untouched(self) -> bool:
        """Something new that is still on the shelf, under this one name only, and as it was made: it was never put there."""
        if self.entry.kind == "take":
            return self.old is None
        if self.entry.kind == "rmdir" or self.mine is None or self.old is not None:
            return False
        here = self.held[self.mine]
        return (stat.S_ISDIR(here.st_mode) or here.st_nlink == 1) and self._exact(self.mine)

    def _exact(self, name: str) -> bool:
        here = os.lstat(name, dir_fd=self.shelf)
        if not self.work.ours(self.entry, here):
            return False
        return not stat.S_ISDIR(here.st_mode) or _is_empty(self.shelf, name)

    def add(self) -> None:
        here = look(self.parent, self.target)
        if here is None:
            if self.mine is not None and not self._exact(self.mine):  # somebody wrote to it as it was taken out
                self._put_back(self.mine)
                self._tell("somebody changed it meanwhile")
        elif not self.work.ours(self.entry, here):
            self._tell("somebody changed it meanwhile")
        else:
            name = f"{self.entry.name}.out" if self.mine else self.entry.name
            shelves.take(self.parent, self.target, self.shelf, name)
            if not self._exact(name):
                self._put_back(name)
                self._tell("somebody changed it meanwhile")

    def swap(self) -> None:
        here = look(self.parent, self.target)
        if self.old is None:
            if self.mine is not None and not self._exact(self.mine):
                self._again(self.mine)
        elif here is None and self.mine is None:
            self._tell("somebody deleted it meanwhile")
        elif here is None:
            self._put_back(self.old)
        elif here.st_ino == self.held[self.old].st_ino:
            os.unlink(self.old, dir_fd=self.shelf)  # it has both names: it was being put back by a link
        elif not self.work.ours(self.entry, here):
            self._tell("somebody changed it meanwhile")
        else:
            out = self._exchange(self.old, f"{self.entry.name}.out")
            if not self._exact(out):
                self._again(out)

    def _again(self, name: str) -> None:
        """What came out is not what we had put there: it belongs where it was."""
        self.old = self._exchange(name, f"{self.entry.name}.again")
        self._tell("somebody changed it meanwhile")

    def _exchange(self, name: str, aside: str) -> str:
        return shelves.swap(self.shelf, name, self.parent, self.target, aside, lambda: self.work.step("halfway"))

    def take(self) -> None:
        here = look(self.parent, self.target)
        assert self.old is not None, "otherwise it is untouched"
        if here is not None and here.st_ino == self.held[self.old].st_ino:
            os.unlink(self.old, dir_fd=self.shelf)
        else:
            self._put_back(self.old)

    def _put_back(self, name: str) -> None:
        try:
            shelves.put(self.shelf, name, self.parent, self.target)
        except FileExistsError:
            self.old = name
            self._tell("somebody made something else there meanwhile")

    def rmdir(self) -> None:
        entry, found = self.entry, found_of(self.entry)
        if look(self.parent, self.target) is None and self.old is not None:
            self._put_back(self.old)
        change_mode(self.parent, self.target, entry.spare, found.mode | 0o700, found.mode)

    def _mode(self) -> None:
        entry, found, put = self.entry, found_of(self.entry), put_of(self.entry)
        try:
            with self.work.roots.parent(entry.root, entry.path) as (parent, target):
                change_mode(parent, target, put.inode, put.mode, found.mode)
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise


def _is_empty(fd: int, name: str) -> bool:
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        return not os.listdir(inside)
    finally:
        os.close(inside)


_REVERSING: dict[str, Callable[[_Reversal], None]] = {
    "add": _Reversal.add,
    "swap": _Reversal.swap,
    "take": _Reversal.take,
    "rmdir": _Reversal.rmdir,
}
