"""What a tree became, compared with what reality has: added, modified, deleted.

Three directories meet at every place: `upper` (what a sandbox wrote, in overlay's encoding), `origin` (what lies under it),
and `real` (what reality has there). Usually origin and real are the same directory and only what the upper names has to be
looked at, so that the cost grows with what changed. They differ below a renamed, replaced or copied directory.

How an upper says that something is deleted, replaced or moved is in `layers.py`.

Files are listed one by one; a directory only if it is empty, or if its own mode changed, with a slash at its end. A file that
was rewritten with the content, mode and type that it had is not a change. Directories are opened one by one by the kernel
without following links: the tree may belong to somebody who is hostile and still at work.
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from elsewhere.changes.layers import TRUSTED, Encoding
from elsewhere.linux import syscalls

__all__ = ["Changes", "compare_overlay", "compare_trees"]

_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
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


def compare_overlay(upper: str, real: str, at: str, encoding: Encoding, pristine: Mapping[str, bytes] | None = None) -> Changes:
    """What the layer `upper`, mounted over `real` at the path `at`, says. `pristine` gives, for files that were put into the
    layer from the start, the content with which they do not count as changed."""
    return _Comparison(at, upper, real, real, encoding, pristine or {}).run()


def compare_trees(now: str, real: str, at: str) -> Changes:
    """What differs between a whole copy and reality; the cost grows with the size of both."""
    return _Comparison(at, None, now, real, TRUSTED, {}).run()


@dataclass(frozen=True, slots=True)
class _Place:
    """One directory to look at. `origin` and `real` are paths below their roots; None: there is nothing there."""

    path: str
    in_upper: bool
    origin: str | None
    real: str | None


class _Comparison:
    def __init__(
        self, at: str, upper: str | None, origin: str, real: str, encoding: Encoding, pristine: Mapping[str, bytes]
    ) -> None:
        self._at = at.rstrip("/")
        self._roots = (upper, origin, real)
        self._same_base = origin == real
        self._encoding = encoding
        self._pristine = pristine
        self._changes = Changes()
        self._todo: list[_Place] = []
        self._upper = self._origin = self._real = -1

    def run(self) -> Changes:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with contextlib.ExitStack() as stack:
            opened = []
            for root in self._roots:
                try:
                    opened.append(-1 if root is None else os.open(root, flags))
                except PermissionError:  # closed as a whole: that much is certain
                    return Changes(modified=[self._at + "/"])
                if root is not None:
                    stack.callback(os.close, opened[-1])
            self._upper, self._origin, self._real = opened
            self._todo = [_Place("", self._upper >= 0, "", "")]
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
            upper = _listing(stack, self._upper, place.path if place.in_upper else None)
            origin_fd, origin = (-1, dict[str, os.stat_result]())
            through = place.origin
            if through is not None and not (self._same_base and place.origin == place.real):
                origin_fd, origin = _listing(stack, self._origin, through)
            upper_fd, named = upper
            plain, gone = self._encoding.split(place.path, named)
            if through is not None and through == place.real and self._same_base:
                self._against_real(place, upper_fd, plain, gone)
            else:
                now = {name: found for name, found in origin.items() if name not in gone} | plain
                self._whole(stack, place, upper_fd, plain, origin_fd, now)

    def _against_real(self, place: _Place, upper_fd: int, plain: dict[str, os.stat_result], gone: set[str]) -> None:
        """Reality shows through: only what the upper names can differ."""
        with contextlib.ExitStack() as stack:
            real_fd = _open(stack, self._real, place.real)
            for name in sorted(gone):
                found = _stat(real_fd, name)
                if found is not None and name not in plain:
                    self._deleted(_join(place.path, name), _join(place.real, name), found)
            for name, found in plain.items():
                self._one(place, name, found, _stat(real_fd, name), upper_fd, real_fd, upper_fd)

    def _whole(
        self,
        stack: contextlib.ExitStack,
        place: _Place,
        upper_fd: int,
        plain: dict[str, os.stat_result],
        origin_fd: int,
        now: dict[str, os.stat_result],
    ) -> None:
        """Nothing shows through, or something else does: everything on both sides has to be looked at."""
        real_fd, real = _listing(stack, self._real, place.real)
        for name, found in real.items():
            if name not in now:
                self._deleted(_join(place.path, name), _join(place.real, name), found)
        for name, found in now.items():
            content_fd = upper_fd if name in plain else origin_fd
            self._one(place, name, found, real.get(name), content_fd, real_fd, upper_fd if name in plain else -1)
        if not now and place.real is None:
            self._changes.added.append(self._name(place.path) + "/")

    def _one(
        self,
        place: _Place,
        name: str,
        now: os.stat_result,
        real: os.stat_result | None,
        now_fd: int,
        real_fd: int,
        upper_fd: int,
    ) -> None:
        path = _join(place.path, name)
        if stat.S_ISDIR(now.st_mode):
            self._directory(place, name, now, real, upper_fd)
        elif real is None:
            self._changes.added.append(self._name(path))
        elif stat.S_ISDIR(real.st_mode):
            self._changes.added.append(self._name(path))
            self._deleted(path, _join(place.real, name), real)
        elif self._differs(path, name, now, real, now_fd, real_fd):
            self._changes.modified.append(self._name(path))

    def _directory(self, place: _Place, name: str, now: os.stat_result, real: os.stat_result | None, upper_fd: int) -> None:
        path = _join(place.path, name)
        real_path: str | None = None
        if real is not None and stat.S_ISDIR(real.st_mode):
            real_path = _join(place.real, name)
            if stat.S_IMODE(real.st_mode) != stat.S_IMODE(now.st_mode):
                self._changes.modified.append(self._name(path) + "/")
        elif real is not None:
            self._changes.deleted.append(self._name(path))
        origin = None if place.origin is None else _join(place.origin, name)
        if upper_fd >= 0:
            opaque, redirect = self._encoding.marks(upper_fd, name, path)
            if redirect is not None:
                origin = redirect[1:] if redirect.startswith("/") else _join(place.origin or "", redirect)
            elif opaque:
                origin = None
        if origin is not None and origin != real_path and not _is_directory(self._origin, origin):
            origin = None
        self._todo.append(_Place(path, upper_fd >= 0, origin, real_path))

    def _deleted(self, path: str, real_path: str, found: os.stat_result) -> None:
        if not stat.S_ISDIR(found.st_mode):
            self._changes.deleted.append(self._name(path))
            return
        waiting = [(path, real_path)]
        while waiting:
            where, below = waiting.pop()
            with contextlib.ExitStack() as stack:
                try:
                    _, names = _listing(stack, self._real, below)
                except OSError:
                    names = {}
                if not names:
                    self._changes.deleted.append(self._name(where) + "/")
                for name, inner in names.items():
                    if stat.S_ISDIR(inner.st_mode):
                        waiting.append((_join(where, name), _join(below, name)))
                    else:
                        self._changes.deleted.append(self._name(_join(where, name)))

    def _differs(self, path: str, name: str, now: os.stat_result, real: os.stat_result, now_fd: int, real_fd: int) -> bool:
        if stat.S_IFMT(now.st_mode) != stat.S_IFMT(real.st_mode):
            return True
        if stat.S_ISLNK(now.st_mode):
            return os.readlink(name, dir_fd=now_fd) != os.readlink(name, dir_fd=real_fd)
        if stat.S_IMODE(now.st_mode) != stat.S_IMODE(real.st_mode):
            return True
        if not stat.S_ISREG(now.st_mode):
            return now.st_rdev != real.st_rdev
        pristine = self._pristine.get(self._name(path))
        if pristine is not None:
            return now.st_size != len(pristine) or _content(now_fd, name) != pristine
        if now.st_size != real.st_size:
            return True
        return not _same_content(now_fd, real_fd, name)


def _join(parent: str | None, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _open(stack: contextlib.ExitStack, root: int, path: str | None) -> int:
    if path is None or root < 0:
        return -1
    try:
        fd = syscalls.openat2(root, path or ".", os.O_RDONLY | os.O_DIRECTORY, _BENEATH)
    except (FileNotFoundError, NotADirectoryError):
        return -1
    stack.callback(os.close, fd)
    return fd


def _listing(stack: contextlib.ExitStack, root: int, path: str | None) -> tuple[int, dict[str, os.stat_result]]:
    fd = _open(stack, root, path)
    if fd < 0:
        return fd, {}
    found = {}
    with os.scandir(fd) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found[entry.name] = entry.stat(follow_symlinks=False)
    return fd, found


def _stat(fd: int, name: str) -> os.stat_result | None:
    if fd < 0:
        return None
    try:
        return os.lstat(name, dir_fd=fd)
    except OSError:
        return None


def _is_directory(root: int, path: str) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            return _open(stack, root, path) >= 0
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
