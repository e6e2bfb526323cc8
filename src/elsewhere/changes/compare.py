"""What a tree became, compared with what reality has: added, modified, deleted.

Three directories meet at every place: `upper` (what a sandbox wrote, in overlay's encoding), `origin` (what lies under it),
and `real` (what reality has there). Usually origin and real are the same directory and only what the upper names has to be
looked at, so that the cost grows with what changed. They differ below a renamed, replaced or copied directory. A pinned base
takes the place of both (`trees.py`).

How an upper says that something is deleted, replaced or moved is in `layers.py`.

Files are listed one by one; a directory only if it is empty, or if its own mode changed, with a slash at its end. A file that
was rewritten with the content, mode and type that it had is not a change. Directories are opened one by one by the kernel
without following links: the tree may belong to somebody who is hostile and still at work.
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elsewhere.changes.layers import TRUSTED, Encoding
from elsewhere.changes.trees import Entry, Tree

__all__ = ["Changes", "compare_overlay", "compare_trees"]

_CHUNK = 1 << 18


@dataclass(slots=True)
class Changes:
    """Absolute paths, sorted."""

    added: list[str] = field(default_factory=list)
    modified: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.modified or self.deleted)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for kind in ("added", "modified", "deleted"):
            for path in getattr(self, kind):
                yield kind, path

    def extend(self, other: "Changes") -> None:
        for kind in ("added", "modified", "deleted"):
            getattr(self, kind).extend(getattr(other, kind))

    def sort(self) -> None:
        for kind in ("added", "modified", "deleted"):
            getattr(self, kind).sort()

    def without(self, hidden: list[str]) -> "Changes":
        """The same, less what lies at or below the given paths."""
        kept = Changes()
        for kind, path in self:
            if not any(path == place or path.startswith(place + "/") for place in hidden):
                getattr(kept, kind).append(path)
        return kept

    def summary(self) -> str:
        counts = ((len(self.added), "added"), (len(self.modified), "modified"), (len(self.deleted), "deleted"))
        return ", ".join(f"{count} {word}" for count, word in counts if count) or "nothing changed"


def compare_overlay(
    upper: str, below: str | Sequence[str], at: str, encoding: Encoding, pristine: Mapping[str, bytes] | None = None
) -> Changes:
    """What the layer `upper`, mounted at the path `at` over `below` (reality, or frozen layers, newest first), says. `pristine`
    gives, for files that were put into the layer from the start, the content with which they do not count as changed."""
    roots = [below] if isinstance(below, str) else list(below)
    return _Comparison(at, upper, roots, roots, encoding, pristine or {}).run()


def compare_trees(now: str, real: str, at: str) -> Changes:
    """What differs between a whole copy and reality; the cost grows with the size of both."""
    return _Comparison(at, None, [now], [real], TRUSTED, {}).run()


@dataclass(frozen=True, slots=True)
class _Place:
    """One directory to look at. `origin` and `real` are paths below their roots; None: there is nothing there."""

    path: str
    in_upper: bool
    origin: str | None
    real: str | None


class _Comparison:
    def __init__(
        self,
        at: str,
        upper: str | None,
        origin: list[str],
        real: list[str],
        encoding: Encoding,
        pristine: Mapping[str, bytes],
    ) -> None:
        self._at = at.rstrip("/")
        self._roots = (upper, origin, real)
        self._same_base = origin == real
        self._encoding = encoding
        self._pristine = pristine
        self._changes = Changes()
        self._todo: list[_Place] = []
        self._upper: Tree | None = None
        self._origin: Tree
        self._real: Tree

    def run(self) -> Changes:
        upper, origin, real = self._roots
        with contextlib.ExitStack() as stack:
            try:
                self._upper = None if upper is None else Tree([upper], stack)
                self._origin, self._real = Tree(origin, stack), Tree(real, stack)
            except PermissionError:  # closed as a whole: that much is certain
                return Changes(modified=[self._at + "/"])
            self._todo = [_Place("", self._upper is not None, "", "")]
            while self._todo:
                place = self._todo.pop()
                try:
                    self._look(place)
                except OSError:
                    # Closed, here or in reality, or a path too long to reach: it is there, and that is all we can say.
                    self._changes.modified.append(self._name(place.path).rstrip("/") + "/")
        self._changes.sort()
        return self._changes

    def _name(self, path: str) -> str:
        return f"{self._at}/{path}"

    def _look(self, place: _Place) -> None:
        with contextlib.ExitStack() as stack:
            named = _entries(self._upper, place.path if place.in_upper else None, stack)
            plain, gone = self._encoding.split(place.path, named)
            if self._same_base and place.origin is not None and place.origin == place.real:
                self._against_real(place, plain, gone, stack)
            else:
                origin = _entries(self._origin, place.origin, stack)
                now = {name: found for name, found in origin.items() if name not in gone} | plain
                self._whole(place, plain, now, stack)

    def _against_real(self, place: _Place, plain: dict[str, Entry], gone: set[str], stack: contextlib.ExitStack) -> None:
        """What is below shows through: only what the upper names can differ."""
        real = None if place.real is None else self._real.open(place.real, stack)
        for name in sorted(gone):
            found = real.find(name) if real else None
            if found is not None and name not in plain:
                self._deleted(_join(place.path, name), _join(place.real, name), found)
        for name, found in plain.items():
            self._one(place, name, found, real.find(name) if real else None, in_upper=True)

    def _whole(self, place: _Place, plain: dict[str, Entry], now: dict[str, Entry], stack: contextlib.ExitStack) -> None:
        """Nothing shows through, or something else does: everything on both sides has to be looked at."""
        real = _entries(self._real, place.real, stack)
        for name, found in real.items():
            if name not in now:
                self._deleted(_join(place.path, name), _join(place.real, name), found)
        for name, found in now.items():
            self._one(place, name, found, real.get(name), in_upper=name in plain)
        if not now and place.real is None:
            self._changes.added.append(self._name(place.path) + "/")

    def _one(self, place: _Place, name: str, now: Entry, real: Entry | None, *, in_upper: bool) -> None:
        path = _join(place.path, name)
        if stat.S_ISDIR(now.about.st_mode):
            self._directory(place, name, now, real, in_upper=in_upper)
        elif real is None:
            self._changes.added.append(self._name(path))
        elif stat.S_ISDIR(real.about.st_mode):
            self._changes.added.append(self._name(path))
            self._deleted(path, _join(place.real, name), real)
        elif self._differs(path, name, now, real):
            self._changes.modified.append(self._name(path))

    def _directory(self, place: _Place, name: str, now: Entry, real: Entry | None, *, in_upper: bool) -> None:
        path = _join(place.path, name)
        real_path: str | None = None
        if real is not None and stat.S_ISDIR(real.about.st_mode):
            real_path = _join(place.real, name)
            if stat.S_IMODE(real.about.st_mode) != stat.S_IMODE(now.about.st_mode):
                self._changes.modified.append(self._name(path) + "/")
        elif real is not None:
            self._changes.deleted.append(self._name(path))
        origin = None if place.origin is None else _join(place.origin, name)
        if in_upper:
            opaque, redirect = self._encoding.marks(now.fd, name, path)
            if redirect is not None:
                origin = redirect[1:] if redirect.startswith("/") else _join(place.origin or "", redirect)
            elif opaque:
                origin = None
        if origin is not None and origin != real_path and not _is_directory(self._origin, origin):
            origin = None
        self._todo.append(_Place(path, in_upper, origin, real_path))

    def _deleted(self, path: str, real_path: str, found: Entry) -> None:
        if not stat.S_ISDIR(found.about.st_mode):
            self._changes.deleted.append(self._name(path))
            return
        waiting = [(path, real_path)]
        while waiting:
            where, below = waiting.pop()
            with contextlib.ExitStack() as stack:
                try:
                    names = _entries(self._real, below, stack)
                except OSError:
                    names = {}
                if not names:
                    self._changes.deleted.append(self._name(where) + "/")
                for name, inner in names.items():
                    if stat.S_ISDIR(inner.about.st_mode):
                        waiting.append((_join(where, name), _join(below, name)))
                    else:
                        self._changes.deleted.append(self._name(_join(where, name)))

    def _differs(self, path: str, name: str, now: Entry, real: Entry) -> bool:
        mine, theirs = now.about, real.about
        if stat.S_IFMT(mine.st_mode) != stat.S_IFMT(theirs.st_mode):
            return True
        if stat.S_ISLNK(mine.st_mode):
            return os.readlink(name, dir_fd=now.fd) != os.readlink(name, dir_fd=real.fd)
        if stat.S_IMODE(mine.st_mode) != stat.S_IMODE(theirs.st_mode):
            return True
        if not stat.S_ISREG(mine.st_mode):
            return mine.st_rdev != theirs.st_rdev
        pristine = self._pristine.get(self._name(path))
        if pristine is not None:
            return mine.st_size != len(pristine) or _content(now.fd, name) != pristine
        if mine.st_size != theirs.st_size:
            return True
        return not _same_content(now.fd, real.fd, name)


def _join(parent: str | None, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _entries(tree: Tree | None, path: str | None, stack: contextlib.ExitStack) -> dict[str, Entry]:
    directory = None if tree is None or path is None else tree.open(path, stack)
    return {} if directory is None else directory.entries()


def _is_directory(tree: Tree, path: str) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            return tree.open(path, stack) is not None
        except OSError:
            return False


def _reader(directory: int, name: str) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=directory)


def _content(directory: int, name: str) -> bytes:
    with open(_reader(directory, name), "rb") as stream:
        return stream.read()


def _same_content(now: int, real: int, name: str) -> bool:
    try:
        with open(_reader(now, name), "rb", buffering=0) as one, open(_reader(real, name), "rb", buffering=0) as other:
            while True:
                first, second = one.read(_CHUNK), other.read(_CHUNK)
                if first != second:
                    return False
                if not first:
                    return True
    except OSError:
        return False
