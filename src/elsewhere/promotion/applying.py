"""Operations on reality, all of them or none: applied by a journal, reversed by it, and finished or reversed after a crash.

Everything new is made complete on a shelf beside its target (`preparing.py`, `shelves.py`), everything is noted (`journal.py`),
then names are moved one by one. Nothing is ever overwritten, and whatever is taken out of reality is looked at: if it is not
what was expected, all is reversed (`reversing.py`). Before the end all of it is looked at once more, since somebody may write
to it through a descriptor that was opened before. What was replaced or deleted is kept for an undo, as the very file it was
where the file system allows: what such a descriptor writes later is found there as well.

    steps     prepare, shelf, stage, sync, note, begin             nothing in reality has changed, but that there are shelves
              take, rmdir, add, swap, halfway, mode                one for each operation; `halfway` only without an exchange
              check, settle, commit                                all is done; from `commit` on it counts
              clear, end                                           the shelves go
    reversal  reverse, return, clear, end                          `reverse` for each operation, in the opposite order

Each step is named to `step` before it is done. A removed directory goes by `rmdir`, which nobody can race; if all is reversed,
one like it takes its place.

What replaces a file keeps its owner, breaks its hard links, and has a modification time of now, because builds go by that. Up
to 8 things are synced one by one (0.2 ms each); beyond that one `syncfs` for each file system costs less (for 1,000 files a
fifteenth), though it also waits for what others have written there.

On kernels before 6.13 two changes within one tick of the clock (4 ms) look like one; what such a change wrote is kept like all
that is replaced. Across file systems a copy is kept, which a descriptor that was opened before does not reach.

Not here: what is to be done (`planning.py`), and whose promotion it is (`records.py`).
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Sequence
from typing import Literal

from elsewhere.errors import Conflict, ElsewhereError, InUse, StateError
from elsewhere.promotion import journal, reversing, shelves
from elsewhere.promotion.clearing import finish
from elsewhere.promotion.journal import About, Entry, about_of
from elsewhere.promotion.preparing import Operation, check, prepare
from elsewhere.promotion.remembering import pieces
from elsewhere.promotion.shelves import look
from elsewhere.promotion.working import NOT_THERE, Changed, Meanwhile, Step, Work, change_mode, found_of, put_of, same

__all__ = ["Meanwhile", "Operation", "apply", "meanwhile", "pieces", "recover", "state"]

State = Literal["preparing", "applying", "applied", "reversed"]

_STATES: dict[journal.Word | None, State] = {
    None: "preparing",
    "preparing": "preparing",
    "applying": "applying",
    "committed": "applied",
    "applied": "applied",
    "returned": "reversed",
    "reversed": "reversed",
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)


def _nothing(_: str) -> None:
    return None


def apply(directory: str, operations: Sequence[Operation], step: Step = _nothing) -> list[Meanwhile]:
    """All or nothing. `directory` is new; the room of all journals is two above it. The answer names what somebody else wrote to
    while it was being replaced, after all had been looked at: that is kept with what was replaced."""
    check(operations)
    os.makedirs(directory, 0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(journal.opened(directory))
        if held is None or held.word is not None:
            raise InUse("journal_in_use", f"{directory!r} is the journal of another application", hint="choose another directory")
        stack.enter_context(journal.roots_locked(directory, [one.root for one in operations]))
        work = Work(held, stack, step)
        try:
            prepare(work, operations)
            _perform(work)
        except BaseException as error:
            work.reopen()
            if work.journal.word != "committed":
                _give_up(work)
                translated = _translated(error, work)
                if translated is error:
                    raise
                raise translated from error
            # It counts since that word was moved, even if it could not be synced; an interrupt goes on to whoever sent it.
            if not isinstance(error, OSError):
                _clear_up(work, "committed")
                raise
        _clear_up(work, "committed")
        return work.told


def recover(directory: str, step: Step = _nothing) -> Literal["applied", "reversed"] | None:
    """Finish or reverse what somebody did not finish. None: there is nothing, or somebody is at it."""
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(journal.opened(directory))
        if held is None:
            return None
        word = held.word
        if word not in ("applied", "reversed"):
            work = Work(held, stack, step)
            work.notes = held.notes()
            work.entries, work.stamps = held.entries()
            roots = [*(one.root for one in work.notes), *(one.root for one in work.entries)]
            stack.enter_context(journal.roots_locked(directory, roots))
            work.reopen()
            if word == "committed":
                _clear_up(work, "committed")
            else:
                _give_up(work)
        return "applied" if word in ("committed", "applied") else "reversed"


def state(directory: str) -> State:
    """What was never begun counts as being prepared."""
    return _STATES[journal.word_in(directory)]


def meanwhile(directory: str) -> list[Meanwhile]:
    """What somebody else changed while all was reversed, by whomever."""
    try:
        with open(os.path.join(directory, "meanwhile.json"), "rb") as stream:
            return [Meanwhile(*one) for one in json.load(stream)]
    except (FileNotFoundError, ValueError):
        return []


def _give_up(work: Work) -> None:
    word = work.journal.word
    if word is None:
        with contextlib.suppress(OSError):  # there was no room for the first word, and nothing was done
            work.journal.begin()
        word = work.journal.word
    if word is None:
        return
    if word == "applying":
        reversing.reverse(work)
    if word != "returned":
        work.step("return")
        work.journal.move(word, "returned")
    _clear_up(work, "returned")


def _clear_up(work: Work, word: Literal["committed", "returned"]) -> None:
    """It counts, or all is back; what cannot be cleared up now is left to whoever recovers."""
    with contextlib.suppress(OSError):
        finish(work, word)


def _translated(error: BaseException, work: Work) -> BaseException:
    """An error of the system in our words; by now all is as it was."""
    if isinstance(error, Changed):
        told = (*error.told, *work.told)
        return Conflict(
            "changed_meanwhile",
            f"{told[0].path!r}: {told[0].sentence}; nothing was applied",
            hint="try again: what was changed will be merged or reported",
            detail={"conflicts": [{"path": one.path, "reason": one.reason, "sentence": one.sentence} for one in told]},
        )
    if not isinstance(error, OSError) or isinstance(error, ElsewhereError):
        return error
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        return StateError(
            "no_room", f"there is no room to apply {work.at!r}: {reason}; nothing was applied", hint="free some and try again"
        )
    if error.errno in _NOT_PERMITTED:
        conflict = {"path": work.at, "reason": "not_permitted", "sentence": f"it cannot be changed: {reason}"}
        return Conflict(
            "not_permitted",
            f"{work.at!r} cannot be changed: {reason}; nothing was applied",
            hint="give yourself permission, or leave it out",
            detail={"conflicts": [conflict]},
        )
    return StateError("apply_failed", f"{work.at!r} could not be applied: {reason}; nothing was applied", hint="elsewhere doctor")


def _perform(work: Work) -> None:
    work.step("begin")
    work.journal.move("preparing", "applying")
    moves = _Moves(work)
    for entry in work.entries:
        moves.do(entry)
    work.step("check")
    moves.look_again()
    work.step("settle")
    work.settle()
    work.step("commit")
    work.journal.move("applying", "committed")


class _Moves:
    """One after the other, each looked at."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.taken: list[tuple[Entry, str, About]] = []

    def do(self, entry: Entry) -> None:
        self.work.at = entry.path
        self.work.step(entry.kind)
        try:
            with self.work.roots.parent(entry.root, entry.path) as (parent, target):
                _MOVES[entry.kind](self, entry, parent, target)
        except FileExistsError:
            raise _changed(entry, "somebody made it meanwhile") from None
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise _changed(entry, "there is something in it that nobody knew of", "not_empty") from None
            if error.errno in NOT_THERE:
                raise _changed(entry, "the directory that it is in is gone or was replaced", "parent_gone") from None
            raise

    def add(self, entry: Entry, parent: int, target: str) -> None:
        shelf = self._dated(entry)
        shelves.put(shelf, entry.name, parent, target)

    def swap(self, entry: Entry, parent: int, target: str) -> None:
        _expect(entry, look(parent, target))
        shelf = self._dated(entry)
        aside = f"{entry.name}.old"
        name = shelves.swap(shelf, entry.name, parent, target, aside, lambda: self.work.step("halfway"))
        self._look_at_taken(entry, shelf, name)

    def take(self, entry: Entry, parent: int, target: str) -> None:
        _expect(entry, look(parent, target))
        shelf = self.work.shelf(entry.shelf)
        shelves.take(parent, target, shelf, entry.name)
        self._look_at_taken(entry, shelf, entry.name)

    def rmdir(self, entry: Entry, parent: int, target: str) -> None:
        _expect(entry, look(parent, target))
        os.rmdir(target, dir_fd=parent)

    def mode(self, entry: Entry, parent: int, target: str) -> None:
        found = found_of(entry)
        if not change_mode(parent, target, found.inode, found.mode, put_of(entry).mode):
            raise _changed(entry, "somebody changed it meanwhile")

    def _dated(self, entry: Entry) -> int:
        """Its shelf, on which it is now as new as the moment at which all began."""
        shelf = self.work.shelf(entry.shelf)
        if not stat.S_ISDIR(put_of(entry).mode):
            os.utime(entry.name, ns=(self.work.stamps[entry.shelf],) * 2, dir_fd=shelf, follow_symlinks=False)
        return shelf

    def _look_at_taken(self, entry: Entry, shelf: int, name: str) -> None:
        """A rename changes the change time, so that tells nothing until the next look."""
        here = about_of(os.lstat(name, dir_fd=shelf))
        if not same(here, found_of(entry)._replace(ctime=here.ctime)):
            raise _changed(entry, "somebody changed it at the very moment of its replacement")
        self.taken.append((entry, name, here))

    def look_again(self) -> None:
        for entry, name, seen in self.taken:
            here = look(self.work.shelf(entry.shelf), name)
            if here is None or not same(about_of(here), seen):
                raise _changed(entry, "it was written to while it was being replaced")


def _changed(entry: Entry, sentence: str, reason: str = "changed_meanwhile") -> Changed:
    return Changed(Meanwhile(entry.root, entry.path, reason, sentence))


def _expect(entry: Entry, here: os.stat_result | None) -> None:
    if here is None or not same(about_of(here), found_of(entry)):
        raise _changed(entry, "somebody changed it meanwhile" if here else "somebody deleted it meanwhile")


_MOVES: dict[str, Callable[[_Moves, Entry, int, str], None]] = {
    "add": _Moves.add,
    "swap": _Moves.swap,
    "take": _Moves.take,
    "rmdir": _Moves.rmdir,
    "mode": _Moves.mode,
}
