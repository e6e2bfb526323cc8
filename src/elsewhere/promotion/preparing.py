"""What is to be done to reality as steps in their order, with all that is new made complete on a shelf (`shelves.py`).

Order: directories that become writable; deletions, children first; what is new or replaced, parents first; the modes of new
directories; other modes. Between file and link names are exchanged; what was or becomes a directory is removed and made anew.

Nothing in reality has changed when this is done, but that there are shelves.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from elsewhere.changes import threeway
from elsewhere.changes.model import Side
from elsewhere.errors import Refused, UsageError
from elsewhere.promotion import journal, shelves
from elsewhere.promotion.journal import About, Entry, about_of
from elsewhere.promotion.working import NOT_THERE, SINGLY, Changed, Meanwhile, Work, found_of, put_of, same

__all__ = ["Operation", "check", "prepare"]

_ANOTHER = (*NOT_THERE, errno.EINVAL, errno.EISDIR)  # what is said of something that is not, or is of another type than it was


class Operation(NamedTuple):
    """`path` is relative to `root`. `expected` is what stands there now, as `sides_of` saw it; `wanted` what is to stand there;
    None is nothing. `owner` is whom something new belongs to (None: whoever we are, and the group that the directory gives);
    what replaces something keeps that one's."""

    root: str
    path: str
    expected: Side | None
    wanted: Side | None
    owner: tuple[int, int] | None = None


def check(operations: Sequence[Operation]) -> None:
    seen = set()
    for one in operations:
        journal.check_path(one.root, one.path)
        if (one.root, one.path) in seen:
            raise UsageError("path_twice", f"{one.path!r} is named twice", hint="name each path once")
        seen.add((one.root, one.path))
        if one.wanted is not None and one.wanted.type == "other":
            raise Refused("not_a_file", f"{one.path!r} is neither file, directory nor link", hint="leave it out with --path")


def prepare(work: Work, operations: Sequence[Operation]) -> None:
    work.step("prepare")
    work.journal.begin()
    found = _found(work, operations)
    modes = {(one.root, one.path) for one in operations if _only_mode(one)}
    directories = [(one.root, one.path.rpartition("/")[0]) for one in operations if (one.root, one.path) not in modes]
    chosen = shelves.choose(work.roots, directories, work.journal.fd)
    work.notes = chosen.notes
    work.journal.write("shelves.json", work.notes)
    for number, note in enumerate(work.notes):
        work.step("shelf")
        work.hold(shelves.make_shelf(work.roots, note))
        if not note.same:
            os.mkdir(work.journal.inside(f"old-{number}"), 0o700)
    os.mkdir(work.journal.inside("new"), 0o700)
    singly = len(operations) <= SINGLY
    work.entries = _Staging(work, found, chosen.numbers, durable=singly).entries(operations, modes)
    work.step("sync")
    work.sync([fd for fd in (*work.fds, work.journal.fd) if fd is not None], singly=singly)
    _note(work)


def _found(work: Work, operations: Sequence[Operation]) -> dict[tuple[str, str], About]:
    """What stands there, which must be what the planner saw."""
    found = {}
    changed = []
    for one in operations:
        work.at = one.path
        here = work.look_at(one.root, one.path)
        if not _as_seen(here, one.expected):
            changed.append(Meanwhile(one.root, one.path, "changed_meanwhile", _sentence(here, one.expected)))
        elif here is not None:
            found[one.root, one.path] = here
    if changed:
        raise Changed(*changed)
    return found


def _note(work: Work) -> None:
    work.step("note")
    now = time.time_ns()
    for fd in work.fds:
        assert fd is not None, "it was made just now"
        os.utime(fd, ns=(now, now))
        work.stamps.append(os.fstat(fd).st_mtime_ns)  # as this file system can say it
    work.journal.write("entries.json", {"stamps": work.stamps, "entries": work.entries})


class _Staging:
    """The steps of all operations, in their order, and what is new, made on its shelf."""

    def __init__(
        self, work: Work, found: dict[tuple[str, str], About], numbers: dict[tuple[str, str], int], *, durable: bool
    ) -> None:
        self.work = work
        self.found = found
        self.numbers = numbers
        self.durable = durable
        self.count = 0
        self.groups: dict[tuple[str, str], int | None] = {}

    def entries(self, operations: Sequence[Operation], modes: set[tuple[str, str]]) -> list[Entry]:
        """`modes` are the places at which a mode changes and nothing else."""
        ordered = sorted(operations, key=_by_path)
        kept = [one for one in ordered if (one.root, one.path) in modes]
        moved = [one for one in ordered if (one.root, one.path) not in modes]
        steps = [self._mode(one) for one in kept if _opens(one)]
        steps += [self._made(self._removal, one) for one in reversed(moved) if self._removes(one)]
        closing = []
        for one in moved:
            if one.wanted is not None:
                steps.append(self._made(self._arrival, one))
                closing += _closed(steps[-1], one.wanted)
        steps += reversed(closing)
        steps += [self._mode(one) for one in reversed(kept) if not _opens(one)]
        return [step for step in steps if step.kind != "mode" or put_of(step).mode != found_of(step).mode]

    def _made(self, how: Callable[[Operation], Entry], one: Operation) -> Entry:
        try:
            return how(one)
        except OSError as error:
            if error.errno in _ANOTHER:
                here = self.work.look_at(one.root, one.path)
                if here != self.found.get((one.root, one.path)):
                    sentence = _sentence(here, one.expected)
                    raise Changed(Meanwhile(one.root, one.path, "changed_meanwhile", sentence)) from None
            raise

    def _removes(self, one: Operation) -> bool:
        found = self.found.get((one.root, one.path))
        if found is None:
            return False
        return one.wanted is None or stat.S_ISDIR(found.mode) or one.wanted.type == "directory"

    def _mode(self, one: Operation) -> Entry:
        found = self.found[one.root, one.path]
        assert one.wanted is not None, "it has a mode"
        put = found._replace(mode=stat.S_IFMT(found.mode) | one.wanted.mode)
        return Entry("mode", one.root, one.path, -1, "", found, put)

    def _removal(self, one: Operation) -> Entry:
        found = self.found[one.root, one.path]
        number, name, shelf = self._begin(one)
        with self.work.roots.parent(one.root, one.path) as place:
            self._save(number, name, place, found)
            if not stat.S_ISDIR(found.mode):
                return Entry("take", one.root, one.path, number, name, found, None)
            return Entry("rmdir", one.root, one.path, number, name, found, None, shelves.spare(shelf, name, found, place))

    def _arrival(self, one: Operation) -> Entry:
        assert one.wanted is not None, "something arrives"
        found = None if self._removes(one) else self.found.get((one.root, one.path))
        number, name, shelf = self._begin(one)
        if found is None:
            made = shelves.make(shelf, name, one.wanted, self._owner(one), None, durable=self.durable)
        else:
            with self.work.roots.parent(one.root, one.path) as place:
                like = place if stat.S_ISREG(found.mode) else None
                made = shelves.make(shelf, name, one.wanted, (found.uid, found.gid), like, durable=self.durable)
                self._save(number, name, place, found)
        kept = self._keep(one.wanted, name, made)
        return Entry("swap" if found else "add", one.root, one.path, number, name, found, made.about, 0, made.digest, kept)

    def _begin(self, one: Operation) -> tuple[int, str, int]:
        self.work.at = one.path
        self.work.step("stage")
        number = self.numbers[one.root, one.path.rpartition("/")[0]]
        self.count += 1
        return number, str(self.count), self.work.shelf(number)

    def _save(self, number: int, name: str, place: tuple[int, str], found: About) -> None:
        if not self.work.notes[number].same:
            shelves.save(place, found, self.work.journal.inside(f"old-{number}", name))

    def _owner(self, one: Operation) -> tuple[int, int]:
        """Of something in a place where nothing was, or where something of another type is removed."""
        before = self.found.get((one.root, one.path))
        if before is not None:
            return before.uid, before.gid
        if one.owner is not None:
            return one.owner
        where = (one.root, one.path.rpartition("/")[0])
        if where not in self.groups:
            above = self.work.look_at(*where) if where[1] else about_of(os.stat(one.root))
            self.groups[where] = above.gid if above is not None and above.mode & stat.S_ISGID else None
        group = self.groups[where]
        return os.geteuid(), os.getegid() if group is None else group

    def _keep(self, wanted: Side, name: str, made: shelves.Made) -> str:
        """Where the content can be read again: with the promotion itself if it lies there, or in a copy of a short text."""
        above = os.path.dirname(self.work.journal.directory) + "/"
        place = wanted.place
        if (
            place is not None
            and wanted.content is None
            and wanted.type == "file"
            and not place.older
            and place.root.startswith(above)
        ):
            return f"../{place.root[len(above) :]}/{place.path}"
        if made.text is None:
            return ""
        fd = os.open(self.work.journal.inside("new", name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0) as stream:
            stream.write(made.text)
        return f"new/{name}"


def _only_mode(one: Operation) -> bool:
    expected, wanted = one.expected, one.wanted
    if expected is None or wanted is None or expected.type != wanted.type:
        return False
    if expected.type == "directory":
        return True
    if expected.type != "file" or expected.mode == wanted.mode or expected.size != wanted.size:
        return False
    if wanted.content is None and wanted.place == expected.place:
        return True
    return threeway.equal(expected, wanted._replace(about=expected.about))


def _opens(one: Operation) -> bool:
    """A directory that becomes writable does so before anything is done in it; one that ceases to be, at the end."""
    return one.wanted is not None and one.wanted.type == "directory" and one.wanted.mode & 0o300 == 0o300


def _closed(step: Entry, wanted: Side) -> list[Entry]:
    """A new directory can be moved and filled by its owner until it gets its own mode."""
    if wanted.type != "directory":
        return []
    put = put_of(step)
    return [Entry("mode", step.root, step.path, -1, "", put, put._replace(mode=stat.S_IFMT(put.mode) | wanted.mode))]


def _by_path(one: Operation) -> tuple[str, list[str]]:
    return one.root, one.path.split("/")


def _as_seen(here: About | None, expected: Side | None) -> bool:
    if here is None or expected is None:
        return here is None and expected is None
    return same(here, about_of(expected.about)) and here.target == expected.target


def _sentence(here: About | None, expected: Side | None) -> str:
    if here is None:
        return "somebody deleted it meanwhile"
    return "somebody made it meanwhile" if expected is None else "somebody changed it meanwhile"
