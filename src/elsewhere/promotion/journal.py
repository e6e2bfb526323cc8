"""The journal of one application: what is to be done to reality, noted before it is done.

    <directory>/
        preparing | applying | committed | applied | returned | reversed    an empty file: its name is where the work stands
        shelves.json     the shelves (see `shelves.py`), noted before they are made
        entries.json     every step, with the inode numbers of what is new and of what it replaces; from `applying` on
        new/<n>          a copy of a new text of up to 1 MiB
        old-<k>/         what was taken out of reality: shelf k itself, moved here when all is done
        meanwhile.json   what somebody else changed while it was going on

    preparing ──> applying ──> committed ──> applied       From `committed` on reality is as wanted, from `returned` on as it was.
        └────────────┴───────> returned ───> reversed      What is between them and the last word is clearing up.

A step from word to word is one rename, which needs no room on a full disk. Whoever works on an application holds a lock on its
directory, and one for each root that it changes, in the room in which the journals of all promotions lie. Whatever is read back
is checked as if somebody else had written it.

Not here: what the steps do.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from elsewhere.clock import monotonic
from elsewhere.errors import InUse, Refused, StateError

__all__ = ["About", "Entry", "Journal", "Kind", "Note", "Word", "about_of", "check_path", "opened", "roots_locked", "word_in"]

Word = Literal["preparing", "applying", "committed", "applied", "returned", "reversed"]
Kind = Literal["add", "swap", "take", "rmdir", "mode"]

_WORDS: tuple[Word, ...] = ("preparing", "applying", "committed", "applied", "returned", "reversed")
_KINDS = ("add", "swap", "take", "rmdir", "mode")
_SHELF = re.compile(r"\.elsewhere-[0-9a-f]{16}\Z")
_PATIENCE_S = 30.0
_LOOK_S = 0.02


class About(NamedTuple):
    """What stood or will stand at a path, as far as it can be told apart from anything else by looking."""

    mode: int
    inode: int
    uid: int
    gid: int
    size: int
    mtime: int
    ctime: int
    target: str | None = None

    def stat_result(self) -> os.stat_result:
        seconds, changed = self.mtime / 1e9, self.ctime / 1e9
        whole = (self.mode, self.inode, 0, 1, self.uid, self.gid, self.size, int(seconds), int(seconds), int(changed))
        return os.stat_result((*whole, seconds, seconds, changed, self.mtime, self.mtime, self.ctime))


class Entry(NamedTuple):
    """One step. `name` is that of the new or the taken thing on the shelf of that number. `spare` is the inode number of the
    directory that takes the place of a removed one if all is reversed. `digest` and `copy` tell the content of a new file."""

    kind: Kind
    root: str
    path: str
    shelf: int
    name: str
    found: About | None
    put: About | None
    spare: int = 0
    digest: str = ""
    copy: str = ""


class Note(NamedTuple):
    """Where a shelf is: in the directory `path` below `root`. Without `same` it cannot be moved into the journal."""

    root: str
    path: str
    name: str
    same: bool


def about_of(found: os.stat_result, target: str | None = None) -> About:
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return About(found.st_mode, found.st_ino, found.st_uid, found.st_gid, size, found.st_mtime_ns, found.st_ctime_ns, target)


def check_path(root: str, path: str, *, empty: bool = False) -> None:
    parts = path.split("/")
    fine = (empty and not path) or not any(part in ("", ".", "..") for part in parts)
    if not root.startswith("/") or os.path.normpath(root) != root or not fine or "\0" in root + path:
        raise Refused("outside_root", f"{path!r} does not name anything below {root!r}", hint="name a path without . and ..")


class Journal:
    """Of one application, while its lock is held."""

    def __init__(self, directory: str, fd: int) -> None:
        self.directory = directory
        self.fd = fd

    def inside(self, *names: str) -> str:
        return os.path.join(self.directory, *names)

    @property
    def word(self) -> Word | None:
        return word_in(self.directory)

    def begin(self) -> None:
        os.close(os.open("preparing", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=self.fd))

    def move(self, before: Word, after: Word) -> None:
        """The one moment at which the next word counts, also after a power cut."""
        os.rename(before, after, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)

    def write(self, name: str, document: object) -> None:
        """Whole or not at all, and to stay."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(f"{name}.new", flags, 0o600, dir_fd=self.fd), "wb") as stream:
            stream.write(json.dumps(document, separators=(",", ":")).encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(f"{name}.new", name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)

    def tidy(self) -> None:
        """What somebody began to write and did not finish."""
        for name in os.listdir(self.fd):
            if name.endswith(".new"):
                os.unlink(name, dir_fd=self.fd)

    def notes(self) -> list[Note]:
        try:
            return [_note(one) for one in self._read("shelves.json", [])]
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken("shelves.json") from error

    def entries(self) -> tuple[list[Entry], list[int]]:
        """The steps in their order; and for each shelf the time that what is new was given."""
        document = self._read("entries.json", {"entries": [], "stamps": []})
        try:
            return [_entry(one) for one in document["entries"]], [int(one) for one in document["stamps"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken("entries.json") from error

    def _read(self, name: str, missing: Any) -> Any:
        try:
            with open(self.inside(name), "rb") as stream:
                return json.load(stream)
        except FileNotFoundError:
            return missing
        except ValueError as error:
            raise self._broken(name) from error

    def _broken(self, name: str) -> StateError:
        return StateError(
            "journal_broken",
            f"{self.inside(name)!r} cannot be understood",
            hint="reality was left as it is; look at the files beside it before you remove them",
        )


def word_in(directory: str) -> Word | None:
    return next((word for word in _WORDS if os.path.lexists(os.path.join(directory, word))), None)


def _note(one: Sequence[Any]) -> Note:
    note = Note(*one)
    check_path(note.root, note.path, empty=True)
    if not _SHELF.match(note.name):
        raise ValueError(f"{note.name!r} is no shelf")
    return note


def _entry(one: Sequence[Any]) -> Entry:
    kind, root, path, shelf, name, found, put, spare, digest, copy = one
    check_path(root, path)
    if kind not in _KINDS or not (name == "" or name.isdigit()) or not isinstance(shelf, int):
        raise ValueError(f"{kind!r} of {name!r} is no step")
    if copy and not re.match(r"(new/[0-9]+|\.\./.*)\Z", copy, re.DOTALL):
        raise ValueError(f"{copy!r} is no copy")
    return Entry(kind, root, path, shelf, name, found and About(*found), put and About(*put), spare, digest, copy)


@contextlib.contextmanager
def opened(directory: str) -> Iterator[Journal | None]:
    """None: somebody else is at it, or there is none."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield Journal(directory, fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def roots_locked(directory: str, roots: Sequence[str]) -> Iterator[None]:
    """One writer for each root at a time. A dead process's lock is free by itself."""
    room = os.path.dirname(os.path.dirname(directory))
    with contextlib.ExitStack() as stack:
        for root in sorted(set(roots)):
            word = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
            fd = os.open(os.path.join(room, f".lock-{word}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, fd)
            _lock(fd, root)
        yield


def _lock(fd: int, root: str) -> None:
    until = monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > until:
                raise InUse(
                    "root_in_use", f"somebody else is changing {root!r}", hint="try again when that promotion or undo has ended"
                ) from None
        time.sleep(_LOOK_S)
