"""Where a run works: one temporary directory that holds everything and is gone afterwards.

    elsewhere-bench-XXXXXXXX/
      project/    the generated project
      other/      two small projects, for who changes between projects
      state/      ELSEWHERE_HOME of this run, so that the user's own state is never touched
      scratch/    for the same work outside of a sandbox, and for copies of the project
      branches/   where sandlock keeps what it writes

All on one file system, outside of /tmp and /var/tmp: sandboxes have those fresh, so a project there would be a special case.
"""

import array
import contextlib
import fcntl
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from elsewhere.storage import trash

__all__ = ["Workspace", "default_parent", "opened", "spread", "undisturbed"]

_GET_FLAGS, _SET_FLAGS, _TOP_OF_HIERARCHY = 0x80086601, 0x40086602, 0x00020000


@dataclass(frozen=True, slots=True)
class Workspace:
    root: str

    @property
    def project(self) -> str:
        return os.path.join(self.root, "project")

    @property
    def others(self) -> tuple[str, str]:
        return os.path.join(self.root, "other", "one"), os.path.join(self.root, "other", "two")

    @property
    def state(self) -> str:
        return os.path.join(self.root, "state")

    @property
    def scratch(self) -> str:
        return os.path.join(self.root, "scratch")

    def fresh(self, kind: str) -> str:
        """A path in scratch/ that was never there before, not even in another run: a name decides where `spread` leads to."""
        return os.path.join(self.scratch, f"{kind}-{secrets.token_hex(4)}")

    @property
    def branches(self) -> str:
        return os.path.join(self.root, "branches")


def default_parent() -> str:
    if os.geteuid() == 0 and os.path.isdir("/srv"):
        return "/srv"
    return os.path.join(os.path.expanduser("~"), ".cache")


@contextlib.contextmanager
def opened(parent: str) -> Iterator[Workspace]:
    made = not os.path.isdir(parent)
    os.makedirs(parent, exist_ok=True)
    place = Workspace(tempfile.mkdtemp(prefix="elsewhere-bench-", dir=os.path.realpath(parent)))
    try:
        for directory in (place.project, place.state, place.scratch, place.branches):
            os.mkdir(directory, 0o700)
        for directory in place.others:
            os.makedirs(directory)
        yield place
    finally:
        undisturbed()
        trash.remove_tree(place.root)
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(parent)


def undisturbed() -> None:
    """From here on everything is cleared away: an impatient second Ctrl-C would leave thousands of files behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def spread(directory: str) -> None:
    """Ask for new directories in here to lie far from each other on the disk (`chattr +T`), where the file system knows that.

    An ext4 without a journal never reuses an inode that was freed in the last minutes, and looks at each of them before it takes
    another: a round would pay, up to ten times over, for what the round before has deleted in the same place.
    """
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = array.array("i", [0, 0])  # the kernel writes an int; room for the long that the number promises
            fcntl.ioctl(fd, _GET_FLAGS, flags)
            flags[0] |= _TOP_OF_HIERARCHY
            fcntl.ioctl(fd, _SET_FLAGS, flags)
        finally:
            os.close(fd)
