"""How a layer says that something is deleted, replaced or moved: one encoding for each way in which layers are written.

    encoding   deleted                      replaced (nothing from below shows through)   moved
    TRUSTED    character device 0:0         trusted.overlay.opaque                        trusted.overlay.redirect
    USER       character device 0:0         user.overlay.opaque                           user.overlay.redirect
    FUSE       0:0, or a file .wh.NAME      an attribute, or a file .wh..wh..opq          -
    saved      listed beside the layer      listed beside the layer                       -

Only the marks of its own encoding count: to every other one they are names and attributes that a program inside may choose, and
could otherwise choose so as to have its work told falsely.
"""

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import field

from elsewhere.storage.trees import Entry, is_whiteout
from elsewhere.values import dataclass

__all__ = ["FUSE", "NAMED", "TRUSTED", "USER", "Encoding", "saved"]

_PREFIX, _OPAQUE_NAME = ".wh.", ".wh..wh..opq"


@dataclass(frozen=True, slots=True)
class Encoding:
    attributes: tuple[str, ...]
    devices: bool = True
    names: bool = False
    deleted: dict[str, frozenset[str]] = field(default_factory=dict)
    opaque: frozenset[str] = frozenset()

    def split(self, path: str, named: dict[str, Entry]) -> tuple[dict[str, Entry], set[str]]:
        """What the layer has in a directory, and the names that it says are deleted there."""
        gone = set(self.deleted.get(path, ()))
        plain = {}
        for name, found in named.items():
            if self.devices and is_whiteout(found.about):
                gone.add(name)
            elif self.names and name.startswith(_PREFIX):
                if name != _OPAQUE_NAME:
                    gone.add(name[len(_PREFIX) :])
            else:
                plain[name] = found
        return plain, gone

    def has_directory(self, parent: int, path: str, name: str) -> bool | None:
        """Whether the layer has a directory of that name in the directory `path`; None: it says nothing of that name."""
        try:
            return stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
        except FileNotFoundError:
            return False if self._deletes(parent, path, name) else None

    def _deletes(self, parent: int, path: str, name: str) -> bool:
        """By a mark that is not an entry of that name."""
        if self.names:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(f"{_PREFIX}{name}", dir_fd=parent)
                return True
        return name in self.deleted.get(path, ())

    def marks(self, parent: int, name: str, path: str) -> tuple[bool, str | None]:
        """Whether a directory is opaque, and where it was moved from."""
        opaque, redirect = path in self.opaque, None
        if not self.attributes and not self.names:
            return opaque, redirect
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError:
            return opaque, redirect
        try:
            names = os.listxattr(fd)
            for attribute in self.attributes:
                if f"{attribute}.opaque" in names:
                    opaque = opaque or os.getxattr(fd, f"{attribute}.opaque") == b"y"
                if f"{attribute}.redirect" in names:
                    redirect = os.fsdecode(os.getxattr(fd, f"{attribute}.redirect"))
            if self.names and not opaque:
                with contextlib.suppress(FileNotFoundError):
                    os.lstat(_OPAQUE_NAME, dir_fd=fd)
                    opaque = True
        finally:
            os.close(fd)
        return opaque, redirect


TRUSTED = Encoding(("trusted.overlay",))
USER = Encoding(("user.overlay",))
FUSE = Encoding(("user.fuseoverlayfs", "user.overlay", "trusted.overlay"), names=True)
NAMED = {"trusted": TRUSTED, "user": USER, "fuse": FUSE}


def saved(deleted: Iterable[str], opaque: Iterable[str]) -> Encoding:
    """A layer on a disk that can hold none of these; its marks are paths, relative to the layer."""
    by_directory: dict[str, set[str]] = {}
    for path in deleted:
        by_directory.setdefault(os.path.dirname(path), set()).add(os.path.basename(path))
    grouped = {directory: frozenset(names) for directory, names in by_directory.items()}
    return Encoding((), devices=False, deleted=grouped, opaque=frozenset(opaque))
