"""A directory that is to be changed, as it is now: what stands at its paths, who may write there, which names mean the same.

Everything is looked at once and remembered, and only what is asked for: the cost grows with the change, not with the directory.
No link on the way is followed. What is found is a forecast; whoever writes has to look again.
"""

import contextlib
import os
import stat
from collections.abc import Iterator

from elsewhere.changes.model import Side
from elsewhere.changes.sides import sides_of
from elsewhere.errors import NotFound
from elsewhere.linux import syscalls

__all__ = ["Target"]

_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS


class Target:
    """`root` is absolute and free of links; paths are relative to it, and the root itself is the empty one."""

    def __init__(self, root: str) -> None:
        if not os.path.isdir(root):
            raise NotFound("target_missing", f"{root!r} is no directory (any more)", hint="make it again, or name another target")
        self.root = root
        self._look = sides_of([root])
        self._sides: dict[str, Side | None] = {}
        self._writable: dict[str, bool] = {}
        self._folding: dict[str, bool] = {}
        self._names: dict[str, frozenset[str]] = {}

    def side(self, path: str) -> Side | None:
        if path not in self._sides:
            self._sides[path] = self._look(path or ".")
        return self._sides[path]

    def forget(self, path: str) -> None:
        self._sides.pop(path, None)

    def names(self, directory: str) -> frozenset[str]:
        """All that is in a directory."""
        if directory not in self._names:
            with self._opened(directory, os.O_RDONLY) as fd:
                self._names[directory] = frozenset(os.listdir(fd))
        return self._names[directory]

    def may_write(self, directory: str) -> bool:
        """Whether names can be made and deleted in it."""
        if directory not in self._writable:
            with self._opened(directory, os.O_PATH) as fd:
                self._writable[directory] = os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True)
        return self._writable[directory]

    def may_remove(self, path: str) -> bool:
        """Whether that name can be deleted, if names can be deleted there at all: not in a directory such as /tmp, where that is
        the right of its owner."""
        parent, found = self.side(os.path.dirname(path)), self.side(path)
        if parent is None or found is None or not parent.about.st_mode & stat.S_ISVTX:
            return True
        return os.geteuid() in (0, parent.about.st_uid, found.about.st_uid)

    def may_own(self, path: str) -> bool:
        """Whether we could make something that belongs to the same user and group, and set its mode."""
        found, user = self.side(path), os.geteuid()
        if user == 0 or found is None:
            return True
        return found.about.st_uid == user and found.about.st_gid in {os.getegid(), *os.getgroups()}

    def spelled_otherwise(self, path: str) -> bool:
        """Whether what is found there has another name in truth."""
        parent, name = os.path.split(path)
        return self.side(path) is not None and self.ignores_case(parent, name) and name not in self.names(parent)

    def ignores_case(self, directory: str, known: str = "") -> bool:
        """Whether upper and lower case are the same there: tried with a name that is known to lead somewhere, or the first that
        has letters; with the directory's own if there is none. For a directory that is not there, its parent answers."""
        if directory not in self._folding:
            name = known if known.swapcase() != known else self._name_with_letters(directory)
            if name:
                self._folding[directory] = self._found_twice(directory, name)
            else:
                parent, own = os.path.split(directory)
                self._folding[directory] = bool(directory) and self.ignores_case(parent, own if self.side(directory) else "")
        return self._folding[directory]

    def _name_with_letters(self, directory: str) -> str:
        found = self.side(directory)
        if found is not None and found.type == "directory":
            with contextlib.suppress(PermissionError), self._opened(directory, os.O_RDONLY) as fd, os.scandir(fd) as entries:
                return next((entry.name for entry in entries if entry.name.swapcase() != entry.name), "")
        return ""

    def _found_twice(self, directory: str, name: str) -> bool:
        """Whether the other spelling leads to it, too, without being a name of its own (a second link to one file)."""
        one, other = (self.side(os.path.join(directory, spelling)) for spelling in (name, name.swapcase()))
        if one is None or other is None or not os.path.samestat(one.about, other.about):
            return False
        return not {name, name.swapcase()} <= self.names(directory)

    @contextlib.contextmanager
    def _opened(self, directory: str, flags: int) -> Iterator[int]:
        top = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = syscalls.openat2(top, directory or ".", flags | os.O_DIRECTORY, _BENEATH)
        finally:
            os.close(top)
        try:
            yield fd
        finally:
            os.close(fd)
