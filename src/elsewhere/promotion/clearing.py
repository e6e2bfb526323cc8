"""Clearing up when all is done or all is back: the shelves go, and what was taken out of reality is kept in the journal.

A shelf on the journal's own file system becomes a part of the journal by one rename, with all that is on it; from another one
what is to be kept was copied before anything was done, so that a full disk is found out in time. After a reversal only that is
kept which belongs to somebody else: nothing is ever deleted from a shelf but what we made and nobody changed since.
"""

import contextlib
import errno
import fcntl
import os
import stat
from typing import Literal

from elsewhere.promotion import shelves
from elsewhere.promotion.journal import Entry, about_of
from elsewhere.promotion.working import Work, found_of, same

__all__ = ["finish"]

Result = Literal["committed", "returned"]


def finish(work: Work, word: Result) -> None:
    work.step("clear")
    for number, shelf in enumerate(work.fds):
        if shelf is not None:
            _clear(work, number, shelf, word)
    if word == "returned":
        _empty(work.journal.inside("new"))
    work.journal.tidy()
    work.step("end")
    work.journal.move(word, "applied" if word == "committed" else "reversed")


def _clear(work: Work, number: int, shelf: int, word: Result) -> None:
    note = work.notes[number]
    known = {one.name: one for one in work.entries if one.shelf == number and one.kind != "mode"}
    if word == "returned":
        _discard_ours(work, shelf, known)
    if not note.same:
        _copy_rest(work, number, shelf, known, word)
    parent = work.roots.open(note.root, note.path)
    try:
        if os.listdir(shelf):
            os.rename(note.name, f"old-{number}", src_dir_fd=parent, dst_dir_fd=work.journal.fd)
        else:
            os.rmdir(note.name, dir_fd=parent)
    finally:
        os.close(parent)


def _discard_ours(work: Work, shelf: int, known: dict[str, Entry]) -> None:
    """Before the steps were noted nothing had come from anywhere else."""
    for name in os.listdir(shelf):
        here = os.lstat(name, dir_fd=shelf)
        entry = known.get(name.partition(".")[0])
        if work.entries and (entry is None or not _made(work, entry, here)):
            continue
        if entry is None or not stat.S_ISREG(here.st_mode):
            with contextlib.suppress(OSError):  # a directory in which there is something
                _remove(shelf, name, here.st_mode)
        else:
            _unlink_unless_written(work, shelf, name, entry)


def _unlink_unless_written(work: Work, shelf: int, name: str, entry: Entry) -> None:
    """Somebody may have opened it while it stood in reality and write to it only now. A lease is not given for a file that is
    open for writing, and nobody can open it here: so with a lease it is as it was made, or it is kept."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=shelf)
    except PermissionError:  # not even its owner may read it
        return os.unlink(name, dir_fd=shelf)
    try:
        with contextlib.suppress(PermissionError):  # somebody else's, whom we gave it to
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        if _made(work, entry, os.fstat(fd)):
            os.unlink(name, dir_fd=shelf)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.unlink(name, dir_fd=shelf)  # a file system without leases
    finally:
        os.close(fd)
    return None


def _made(work: Work, entry: Entry, here: os.stat_result) -> bool:
    if entry.kind == "rmdir":
        return here.st_ino == entry.spare
    return entry.put is not None and work.ours(entry, here)


def _copy_rest(work: Work, number: int, shelf: int, known: dict[str, Entry], word: Result) -> None:
    """Of a shelf that cannot be moved. What is on it is in the journal already, unless somebody wrote to it since."""
    place = work.journal.inside(f"old-{number}")
    if word == "returned":
        _empty(place, keep=".kept")
    for name in os.listdir(shelf):
        here = about_of(os.lstat(name, dir_fd=shelf))
        entry = known.get(name.partition(".")[0])
        if word == "returned" or entry is None:
            os.makedirs(place, 0o700, exist_ok=True)
            shelves.save((shelf, name), here, os.path.join(place, f"{name}.kept"))
        elif entry.kind != "rmdir" and not same(here, found_of(entry)._replace(ctime=here.ctime)):
            shelves.save((shelf, name), here, os.path.join(place, entry.name))
            work.tell(entry, "it was written to while it was being replaced", None)
        _remove(shelf, name, here.mode)


def _remove(directory: int, name: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        os.rmdir(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


def _empty(place: str, keep: str = "/") -> None:
    """Of copies that are of no use any more; and the directory itself, if nothing is left in it."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for name in os.listdir(fd):
            if not name.endswith(keep):
                _remove(fd, name, os.lstat(name, dir_fd=fd).st_mode)
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.rmdir(place)
