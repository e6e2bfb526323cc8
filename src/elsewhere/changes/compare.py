"""What a tree became: two views of one place, and what differs between them.

A view is what somebody sees: layers, newest first, over what lies below them, which is reality, or a base that was captured. Two
views are walked together, directory by directory. Where the same directory of the same base shows through in both, only what the
layers name has to be looked at, so that the cost grows with what changed. Where something else shows through (below a renamed,
replaced or copied directory, or if the bases are not the same), everything on both sides is. Directories that are made of the
very same layers are not looked into.

    before                after                 is
    base                  base + layers         what a sandbox did
    base + layers         base + other layers   what is different between two sandboxes, or two moments of one
    reality               a copy                what was done in the copy

Files are told one by one; a directory only if it is empty, or if its own mode changed, with a slash at its end. A file that was
rewritten with the content, mode and type that it had is not a change. Directories are opened one by one by the kernel without
following links: the tree may belong to somebody who is hostile and still at work.

How layers are read as one is in `storage/stacks.py`, how they say what is deleted, replaced or moved in `storage/encodings.py`.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from elsewhere.changes.model import Change, Changes, Place, Side
from elsewhere.storage.encodings import TRUSTED, Encoding
from elsewhere.storage.stacks import Folder, Stack
from elsewhere.storage.trees import Directory, Entry, Tree
from elsewhere.values import dataclass

__all__ = ["Changes", "View", "compare_overlay", "compare_states", "compare_trees", "compare_views"]

_CHUNK = 1 << 18
_NO_DIRECTORY = (errno.ELOOP, errno.EXDEV, errno.EINVAL)  # it leads elsewhere: to a layer, nothing


@dataclass(frozen=True, slots=True)
class View:
    """`layers` have one encoding each, or all the same one. `seeds` gives, for files that every sandbox gets its own version of,
    the content that counts in place of what lies below."""

    layers: Sequence[str]
    below: Sequence[str]
    encoding: Encoding | Sequence[Encoding] = TRUSTED
    seeds: Mapping[str, bytes] = field(default_factory=dict)


def compare_overlay(
    layers: str | Sequence[str],
    below: str | Sequence[str],
    at: str,
    encoding: Encoding | Sequence[Encoding],
    pristine: Mapping[str, bytes] | None = None,
) -> Changes:
    """What layers, mounted at the path `at` over `below` (reality, or frozen layers), say; newest first, both of them. `pristine`
    gives, for files that were put into a layer from the start, the content with which they do not count as changed."""
    said = [layers] if isinstance(layers, str) else list(layers)
    roots = [below] if isinstance(below, str) else list(below)
    return compare_views(View((), roots, seeds=pristine or {}), View(said, roots, encoding, pristine or {}), at)


def compare_trees(now: str, real: str, at: str) -> Changes:
    """What differs between a whole copy and reality; the cost grows with the size of both."""
    return compare_views(View((), [real]), View((), [now]), at)


def compare_views(before: View, after: View, at: str) -> Changes:
    """What is different in `after`; both are seen at the path `at`."""
    return _Comparison(before, after, at).run()


def compare_states(before: Mapping[str, View], after: Mapping[str, View]) -> Changes:
    """What is different in `after`; a state is the views of all places that somebody may write, by their paths. Where one of the
    two has no view, it shows what lies below the other's."""
    found = Changes()
    for at in sorted({*before, *after}):
        old, new = before.get(at), after.get(at)
        below = (new or old or View((), ())).below
        found.extend(compare_views(old or View((), below), new or View((), below), at))
    found.sort()
    return found


class _Found(NamedTuple):
    entry: Entry
    in_layers: bool

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.entry.about.st_mode)


class _Spot(NamedTuple):
    """A directory on one side: the layers' part of it, and where what is below shows through. Neither: it is not there."""

    folder: Folder | None
    below: str | None

    def __bool__(self) -> bool:
        return self.folder is not None or self.below is not None


_NOWHERE = _Spot(None, None)


class _Side:
    """A view that is open for reading."""

    def __init__(self, view: View, base: Tree, stack: contextlib.ExitStack) -> None:
        self.view = view
        self.base = base
        self.layers = Stack(view.layers, view.encoding, stack) if view.layers else None
        self.known = [(about.st_dev, about.st_ino) for about in map(os.fstat, self.layers.roots)] if self.layers else []

    def top(self) -> _Spot:
        return _Spot(self.layers.root() if self.layers else None, "")

    def made_of(self, folder: Folder) -> list[tuple[tuple[int, int], str]]:
        return [(self.known[layer], path) for layer, path in folder.made_of]


class _Here:
    """One directory of one side, while it is looked at."""

    def __init__(self, side: _Side, spot: _Spot, stack: contextlib.ExitStack) -> None:
        self._side = side
        self._spot = spot
        self._stack = stack
        self._below: Directory | None = None
        self._opened = False
        if spot.folder is not None:
            stack.enter_context(spot.folder)
        self.seeds = side.view.seeds
        self.named = spot.folder.entries() if spot.folder is not None else {}
        self.gone = spot.folder.gone() if spot.folder is not None else set()

    def below(self) -> Directory | None:
        if not self._opened and self._spot.below is not None:
            try:
                self._below = self._side.base.open(self._spot.below, self._stack)
            except OSError as error:
                if error.errno not in _NO_DIRECTORY:
                    raise
        self._opened = True
        return self._below

    def share(self, other: "_Here") -> None:
        """The same directory shows through in the other one."""
        self._below, self._opened = other.below(), True

    def find(self, name: str) -> _Found | None:
        entry = self.named.get(name)
        if entry is not None:
            return _Found(entry, True)
        below = None if name in self.gone else self.below()
        entry = None if below is None else below.find(name)
        return None if entry is None else _Found(entry, False)

    def everything(self) -> dict[str, _Found]:
        below = self.below()
        found = {} if below is None else {name: _Found(one, False) for name, one in below.entries().items()}
        for name in self.gone:
            found.pop(name, None)
        return found | {name: _Found(one, True) for name, one in self.named.items()}

    def into(self, name: str, found: _Found) -> _Spot:
        """The directory of that name."""
        if not found.in_layers:
            return _Spot(None, _join(self._spot.below, name))
        assert self._spot.folder is not None
        folder = self._spot.folder.folder(name)
        return _Spot(folder, folder.below)

    def place(self, name: str, found: _Found) -> Place:
        view = self._side.view
        if not found.in_layers:
            return Place(view.below[0], _join(self._spot.below, name), tuple(view.below[1:]))
        assert self._spot.folder is not None
        layer, path = self._spot.folder.where(found.entry.fd)
        return Place(view.layers[layer], _join(path, name))


class _Comparison:
    def __init__(self, before: View, after: View, at: str) -> None:
        self._at = at.rstrip("/")
        self._views = (before, after)
        self._same_base = list(before.below) == list(after.below)
        self._changes = Changes()
        self._made_or_deleted: dict[str, Change] = {}
        self._todo: list[tuple[str, _Spot, _Spot]] = []
        self._before: _Side
        self._after: _Side

    def run(self) -> Changes:
        before, after = self._views
        with contextlib.ExitStack() as stack:
            try:
                base = Tree(before.below, stack)
                self._before = _Side(before, base, stack)
                self._after = _Side(after, base if self._same_base else Tree(after.below, stack), stack)
            except PermissionError:  # closed as a whole: that much is certain
                return Changes(modified=[self._at + "/"])
            self._todo = [("", self._before.top(), self._after.top())]
            while self._todo:
                path, old, new = self._todo.pop()
                try:
                    self._look(path, old, new)
                except OSError:
                    # Closed, here or there, or a path too long to reach: it is there, and that is all we can say.
                    kind = "modified" if old and new else "added" if new else "deleted"
                    self._changes.add(Change(self._name(path).rstrip("/") + "/", kind, None, None))
                    self._made_or_deleted.pop(path, None)
        self._changes.directories += self._made_or_deleted.values()
        self._changes.sort()
        return self._changes

    def _name(self, path: str) -> str:
        return f"{self._at}/{path}"

    def _look(self, path: str, old: _Spot, new: _Spot) -> None:
        with contextlib.ExitStack() as stack:
            before, after = _Here(self._before, old, stack), _Here(self._after, new, stack)
            if self._same_base and old.below is not None and old.below == new.below:
                before.share(after)
                for name in {*before.named, *before.gone, *after.named, *after.gone}:
                    self._pair(path, name, before, before.find(name), after, after.find(name))
                return
            was, now = before.everything(), after.everything()
            for name in {*was, *now}:
                self._pair(path, name, before, was.get(name), after, now.get(name))
            if not was and not now and bool(old) != bool(new):
                self._changes.add(Change(f"{self._name(path)}/", "added" if new else "deleted", None, None))

    def _pair(self, parent: str, name: str, before: _Here, was: _Found | None, after: _Here, now: _Found | None) -> None:
        path = _join(parent, name)
        old_directory, new_directory = was is not None and was.is_directory, now is not None and now.is_directory
        old, new = None if old_directory else was, None if new_directory else now
        if old is not None and new is not None:
            if not _same_file(old, new):
                self._both(path, name, before, old, after, new)
        elif old is not None:
            self._changes.add(Change(self._name(path), "deleted", self._side(path, name, before, old), None))
        elif new is not None:
            self._changes.add(Change(self._name(path), "added", None, self._side(path, name, after, new)))
        if old_directory or new_directory:
            self._directory(path, name, before, was, after, now)

    def _directory(self, path: str, name: str, before: _Here, was: _Found | None, after: _Here, now: _Found | None) -> None:
        old = before.into(name, was) if was is not None and was.is_directory else _NOWHERE
        new = after.into(name, now) if now is not None and now.is_directory else _NOWHERE
        if old and new:
            assert was is not None
            assert now is not None
            if stat.S_IMODE(was.entry.about.st_mode) != stat.S_IMODE(now.entry.about.st_mode):
                self._changes.add(Change(f"{self._name(path)}/", "modified", Side(was.entry.about), Side(now.entry.about)))
            if self._is_same(old, new):
                return
        else:
            before_it, after_it = (Side(one.entry.about) if one and spot else None for one, spot in ((was, old), (now, new)))
            change = Change(f"{self._name(path)}/", "added" if new else "deleted", before_it, after_it)
            self._made_or_deleted[path] = change
        self._todo.append((path, old, new))

    def _is_same(self, old: _Spot, new: _Spot) -> bool:
        """Made of the very same directories, so that nothing in them can differ."""
        if not self._same_base or old.below != new.below:
            return False
        if old.folder is None or new.folder is None:
            return old.folder is new.folder
        return self._before.made_of(old.folder) == self._after.made_of(new.folder)

    def _side(self, path: str, name: str, here: _Here, found: _Found) -> Side:
        about = found.entry.about
        target = os.readlink(name, dir_fd=found.entry.fd) if stat.S_ISLNK(about.st_mode) else None
        seed = None if found.in_layers or not here.seeds else here.seeds.get(self._name(path))
        return Side(about, here.place(name, found), target, seed)

    def _both(self, path: str, name: str, before: _Here, was: _Found, after: _Here, now: _Found) -> None:
        """Something that is no directory was there, and is."""
        old, new = self._side(path, name, before, was), self._side(path, name, after, now)
        mine, theirs = was.entry.about, now.entry.about
        kind, content = stat.S_IFMT(mine.st_mode), False
        same = kind == stat.S_IFMT(theirs.st_mode)
        if same and kind == stat.S_IFLNK:
            same = old.target == new.target
        elif same and kind != stat.S_IFREG:
            same = mine.st_mode == theirs.st_mode and mine.st_rdev == theirs.st_rdev
        elif same:
            content = old.size == new.size and _same_content(name, was.entry, old, now.entry, new)
            same = content and mine.st_mode == theirs.st_mode
        if not same:
            self._changes.add(Change(self._name(path), "modified", old, new, same_content=content))


def _join(parent: str | None, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _same_file(was: _Found, now: _Found) -> bool:
    """One file that is seen from both sides."""
    old, new = was.entry.about, now.entry.about
    return was.in_layers == now.in_layers and old.st_ino == new.st_ino and old.st_dev == new.st_dev


def _reader(directory: int, name: str) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=directory)


def _same_content(name: str, was: Entry, old: Side, now: Entry, new: Side) -> bool:
    if old.content is not None and new.content is not None:
        return old.content == new.content
    try:
        if old.content is not None:
            return _content(now.fd, name) == old.content
        if new.content is not None:
            return _content(was.fd, name) == new.content
        with open(_reader(was.fd, name), "rb", buffering=0) as one, open(_reader(now.fd, name), "rb", buffering=0) as other:
            while True:
                first, second = one.read(_CHUNK), other.read(_CHUNK)
                if first != second:
                    return False
                if not first:
                    return True
    except OSError:
        return False


def _content(directory: int, name: str) -> bytes:
    with open(_reader(directory, name), "rb") as stream:
        return stream.read()
