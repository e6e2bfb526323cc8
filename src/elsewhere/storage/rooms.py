"""The directory in which a project's bases lie, its lock, and what happens when it is full.

What lies in it is drawn in `bases.py`. Not here: which project a directory belongs to other than by its name.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator

from elsewhere.errors import StateError
from elsewhere.linux import syscalls
from elsewhere.storage import trash
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Room", "room_for", "room_needed"]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Room:
    """The directory of one project's bases."""

    path: str
    trash: str

    def inside(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def layer(self, number: str) -> str:
        return os.path.join(self.path, "layers", number)

    def make(self) -> None:
        for place in (os.path.dirname(self.path), self.path, *(self.inside(name) for name in ("layers", "building", "commits"))):
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)

    @contextlib.contextmanager
    def locked(self, how: int) -> Iterator[int]:
        """Held by a descriptor of its own, so that it keeps out the threads of one process as well."""
        with room_needed(self):
            self.make()
            fd = os.open(self.inside("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, how)
            yield fd
        finally:
            os.close(fd)

    def sync(self) -> None:
        """A layer that is about to count must still be whole after a power cut."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            syscalls.syncfs(fd)
        finally:
            os.close(fd)

    def discard(self, path: str) -> None:
        """A directory that its owner may not write cannot be moved by that owner either."""
        if os.geteuid() != 0:
            with contextlib.suppress(OSError):
                os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode) | stat.S_IRWXU)
        trash.discard(path, self.trash)

    def clear(self) -> None:
        """Throw away what was being built. Whoever holds the exclusive lock is the only one who builds."""
        for name in os.listdir(self.inside("building")):
            self.discard(self.inside("building", name))


@contextlib.contextmanager
def room_needed(room: Room) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise StateError(
            "no_room",
            f"a copy of the project does not fit into {room.path!r}: {error.strerror}",
            hint="free some space there, keep large directories live, or set ELSEWHERE_HOME to another file system",
            detail={"path": room.path},
        ) from error


def room_for(state: State, project: str) -> Room:
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in os.path.basename(project).lower())
    short = hashlib.sha1(os.fsencode(project), usedforsecurity=False).hexdigest()[:8]
    return Room(os.path.join(state.path, "bases", f"{name.strip('-')[:32] or 'project'}-{short}"), state.room("trash"))
