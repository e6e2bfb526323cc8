"""Putting files into an empty upper from outside, as overlay itself would have them there if a program inside had written them.

A directory around such a file is made in the upper, too, and then it is what gives the one below its owner, mode and times: these
are taken from whatever shows there. What lies below goes on showing through in it.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import BinaryIO, Literal

from elsewhere.storage.copying import Attributes
from elsewhere.storage.encodings import Encoding
from elsewhere.storage.stacks import Folder, Stack
from elsewhere.storage.trees import Entry, Tree
from elsewhere.values import dataclass

__all__ = ["Seed", "sow"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Seed:
    """What is to show at a path (relative to the overlay). `kind`: a file, of which `content` is given, or opened; a directory
    that is there, of which only the mode changes; a link, which leads to `target`; or nothing, `gone`."""

    path: str
    kind: Literal["file", "directory", "link", "gone"] = "file"
    mode: int = 0o644
    content: bytes | None = None
    opened: Callable[[], BinaryIO] | None = None
    target: str = ""


def sow(
    upper: str, seeds: Iterable[Seed], layers: Sequence[str], encoding: Encoding, below: Sequence[str], *, shift: int = 0
) -> None:
    """`layers` (newest first) lie below the upper, and below them lies `below`: reality, whose owners are shifted in a layer, or
    the layers of a base."""
    with contextlib.ExitStack() as stack:
        _Sower(Stack(layers, encoding, stack).root(), Tree(below, stack), shift, stack).sow(upper, seeds)


class _Sower:
    def __init__(self, top: Folder, below: Tree, shift: int, stack: contextlib.ExitStack) -> None:
        self._top = top
        self._below = below
        self._shift = shift
        self._stack = stack
        self._times: list[tuple[str, Attributes]] = []

    def sow(self, upper: str, seeds: Iterable[Seed]) -> None:
        for seed in seeds:
            parents = seed.path.split("/")
            name = parents.pop() if seed.kind != "directory" else ""
            folder: Folder | None = self._top
            below: str | None = self._top.below
            here = upper
            for part in parents:
                attributes, folder, below = self._directory(folder, below, part)
                here = f"{here}/{part}"
                self._make(here, attributes)
            if seed.kind == "directory":
                self._times = [(path, replace(one, mode=seed.mode) if path == here else one) for path, one in self._times]
            elif seed.kind == "gone":
                os.mknod(f"{here}/{name}", stat.S_IFCHR, os.makedev(0, 0))
            else:
                self._write(f"{here}/{name}", seed, self._file(folder, below, name))
        for path, attributes in reversed(self._times):
            attributes.give(path)

    def _make(self, path: str, attributes: Attributes) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            self._times.append((path, attributes))

    def _directory(self, folder: Folder | None, below: str | None, name: str) -> tuple[Attributes, Folder | None, str | None]:
        """What a directory is like that shows, and where what it holds comes from."""
        entry = folder.entries().get(name) if folder is not None else None
        if folder is not None and entry is not None:
            inner = folder.folder(name)
            return self._read(entry, name, 0), inner, inner.below
        under = None if below is None else (f"{below}/{name}" if below else name)
        found = self._find(below, name)
        if found is None or not stat.S_ISDIR(found.about.st_mode):
            raise FileNotFoundError(f"there is no directory {name!r} any more")
        return self._read(found, name, self._shift), None, under

    def _file(self, folder: Folder | None, below: str | None, name: str) -> Attributes | None:
        """What is known of a file that shows there; None: none does."""
        entry = folder.entries().get(name) if folder is not None else None
        if entry is not None:
            return self._read(entry, name, 0)
        if folder is not None and name in folder.gone():
            return None
        found = self._find(below, name)
        return None if found is None else self._read(found, name, self._shift)

    def _find(self, below: str | None, name: str) -> Entry | None:
        directory = None if below is None else self._below.open(below, self._stack)
        return None if directory is None else directory.find(name)

    def _read(self, entry: Entry, name: str, shift: int) -> Attributes:
        return Attributes.read(f"/proc/self/fd/{entry.fd}/{name}", entry.about, shift=shift)

    def _write(self, path: str, seed: Seed, known: Attributes | None) -> None:
        if seed.kind == "link":
            os.symlink(seed.target, path)
        else:
            with open(path, "xb") as stream:
                if seed.opened is None:
                    stream.write(seed.content or b"")
                else:
                    with seed.opened() as source:
                        shutil.copyfileobj(source, stream)
        now = os.lstat(path)
        if known is None or stat.S_IFMT(known.mode) != stat.S_IFMT(now.st_mode):
            about = os.lstat(os.path.dirname(path))
            known = Attributes(now.st_mode, about.st_uid, about.st_gid, (0, 0))
        mode = stat.S_IFMT(now.st_mode) | stat.S_IMODE(seed.mode)
        replace(known, mode=mode, times=(now.st_atime_ns, now.st_mtime_ns)).give(path)
