"""Several layers of one overlay, read as the one layer that says the same over whatever lies below them.

A name counts as the newest layer has it. A directory is made up of the directories of that name in all layers, down to the first
layer that has something else there, has deleted it, or says that nothing below shows through. One that was renamed is, in the
layers below the one that says so, where it was before; these may say that it, or a directory around it, had been renamed earlier:

    layer   has                          so that in the layers below it
    3       new/    from "/a/dir"        it is a/dir
    2       a/      from "b"             it is b/dir
    1       -                            it is b/dir, and this is where what lies below the stack shows through: `Folder.below`

This is how the kernel looks names up, rule for rule; where it would give an error (a mark that leads nowhere), nothing shows.

Directories are opened without following links, one by one: the newest layer may belong to somebody who is hostile and still at
work. Not here: what lies below (see `trees.py`), and how layers are marked (see `encodings.py`).
"""

import contextlib
import os
import stat
from collections.abc import Sequence

from elsewhere.storage.encodings import Encoding
from elsewhere.storage.trees import Entry, entries_of, open_beneath

__all__ = ["Folder", "Stack"]

_Listing = tuple[dict[str, Entry], set[str]]
_Part = tuple[int, str]  # a directory: the number of its layer, and its path there


class Stack:
    """Layers of one overlay, newest first, each with its encoding, or all with the same one."""

    def __init__(self, layers: Sequence[str], encoding: Encoding | Sequence[Encoding], stack: contextlib.ExitStack) -> None:
        self.encodings = [encoding] * len(layers) if isinstance(encoding, Encoding) else list(encoding)
        self.roots: list[int] = []
        self.opened: set[int] = set()
        stack.callback(self._close)
        for layer in layers:
            self.roots.append(os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def root(self) -> "Folder":
        return Folder(self, "", "", [(number, "") for number in range(len(self.roots))])

    def _close(self) -> None:
        for fd in (*self.roots, *self.opened):
            os.close(fd)

    def follow(self, first: int, path: str, parts: list[_Part]) -> str | None:
        """Add to `parts` what the layers from number `first` on have at a path from the top, and tell where that is in what lies
        below them; None: one of them hides it."""
        for layer in range(first, len(self.roots)):
            place, path, hidden = self._walk(layer, path)
            if place is not None:
                parts.append((layer, place))
            if hidden:
                return None
        return path

    def _walk(self, layer: int, path: str) -> tuple[str | None, str, bool]:
        """Where a layer has that directory, if it does; where it is for the layers below; and whether it is hidden from there."""
        encoding, fd = self.encodings[layer], self.roots[layer]
        place, below, hidden = "", "", False
        names = path.split("/")
        with contextlib.ExitStack() as stack:
            for number, name in enumerate(names):
                there = encoding.has_directory(fd, place, name)
                if there is None:
                    return None, _join(below, "/".join(names[number:])), hidden
                if not there:
                    return None, path, True
                opaque, redirect = encoding.marks(fd, name, _join(place, name))
                place, below = _join(place, name), _join(below, name)
                if opaque:
                    hidden = True
                elif redirect is not None:
                    below, absolute = _led(redirect, os.path.dirname(below))
                    hidden = not below or (hidden and not absolute)
                if number + 1 < len(names):
                    try:
                        fd = open_beneath(fd, name)
                    except OSError:  # closed to us, or replaced since
                        return None, path, True
                    stack.callback(os.close, fd)
        return place, below, hidden


class Folder:
    """A directory that some layer of a stack has. Its descriptors are opened when they are first needed, and closed at the end of
    a `with`, or else with the stack; entries can be opened until then."""

    __slots__ = ("_fds", "_listings", "_parts", "_stack", "below", "path")

    def __init__(self, stack: Stack, path: str, below: str | None, parts: list[_Part]) -> None:
        self.path = path
        self.below = below
        self._stack = stack
        self._parts = parts
        self._fds: list[int] = []
        self._listings: list[_Listing] = []

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            self._stack.opened.discard(fd)
            os.close(fd)
        self._fds, self._listings = [], []

    @property
    def fd(self) -> int:
        """The newest of the directories that make it up: the owner, mode, times and attributes that count are those of this."""
        self._list()
        return self._fds[0]

    @property
    def made_of(self) -> list[_Part]:
        """The directories that make it up, newest first: the number of each one's layer, and its path there."""
        return self._parts

    def where(self, fd: int) -> _Part:
        """Which of these directories the descriptor of an entry is."""
        return self._parts[self._fds.index(fd)]

    def entries(self) -> dict[str, Entry]:
        """The names that the stack itself has here."""
        listings = self._list()
        if len(listings) == 1:
            return listings[0][0]
        found: dict[str, Entry] = {}
        hidden: set[str] = set()
        for plain, gone in listings:
            for name, entry in plain.items():
                if name not in hidden:
                    found.setdefault(name, entry)
            hidden |= gone
        return found

    def gone(self) -> set[str]:
        """The names that are deleted here; they matter only where `below` has them."""
        named: set[str] = set()
        found: set[str] = set()
        for plain, gone in self._list():
            named |= plain.keys()
            found |= gone - named
        return found

    def directories(self) -> list[str]:
        """Those of the entries that `folder` opens."""
        return [name for name, entry in self.entries().items() if stat.S_ISDIR(entry.about.st_mode)]

    def beneath(self, name: str) -> str | None:
        """Where a name that no layer says anything of is, in what lies below the stack."""
        return None if self.below is None else _join(self.below, name)

    def folder(self, name: str) -> "Folder":
        """The directory of that name, which is one of the entries."""
        parts: list[_Part] = []
        below = self._trace(name, parts)
        return Folder(self._stack, _join(self.path, name), below, parts)

    def _trace(self, name: str, parts: list[_Part]) -> str | None:
        for (layer, path), (plain, gone) in zip(self._parts, self._list(), strict=True):
            entry = plain.get(name)
            if entry is None:
                if name in gone:
                    return None
                continue
            if not stat.S_ISDIR(entry.about.st_mode):
                return None
            place = _join(path, name)
            parts.append((layer, place))
            opaque, redirect = self._stack.encodings[layer].marks(entry.fd, name, place)
            if opaque:
                return None
            if redirect is not None:
                name, absolute = _led(redirect, "")
                if not name:
                    return None
                if absolute:
                    return self._stack.follow(layer + 1, name, parts)
        return self.beneath(name)

    def _list(self) -> list[_Listing]:
        if not self._listings:
            self._listings = [self._listing(layer, path) for layer, path in self._parts]
        return self._listings

    def _listing(self, layer: int, path: str) -> _Listing:
        try:
            fd = open_beneath(self._stack.roots[layer], path or ".")
        except (FileNotFoundError, NotADirectoryError):
            return {}, set()  # gone since its parent was listed
        self._stack.opened.add(fd)
        self._fds.append(fd)
        return self._stack.encodings[layer].split(path, entries_of(fd))


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _led(redirect: str, parent: str) -> tuple[str, bool]:
    """Where a redirect in a directory of `parent` leads, and whether that was said from the top. Nowhere: an empty path."""
    absolute = redirect.startswith("/")
    names = redirect[1:].split("/") if absolute else [redirect]
    if any(name in ("", ".", "..") or "/" in name for name in names):
        return "", absolute
    return (redirect[1:] if absolute else _join(parent, redirect)), absolute
