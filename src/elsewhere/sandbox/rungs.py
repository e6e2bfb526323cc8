"""The ladder as data: the rungs by which a view can be made true, strongest first, and what is different about each.

    rung                  files                                         needs
    overlay-idmap         the whole machine, copy on write              root, a file system that knows id mapping
    overlay-userns        home and project copy on write, rest read-only  user namespaces, overlay in them
    …-memory              the same, with the layers in memory (a cap)    where the state directory cannot hold an upper
    fuse-overlayfs        as overlay-userns, by a program                user namespaces, /dev/fuse, fuse-overlayfs
    copy-landlock         a copy of the project, the rest read-only       Landlock; no namespaces at all

How each is made to stand is in `mechanisms.py`; which one stood last time is remembered in `creation.py`.
"""

import os

from elsewhere.sandbox.ids import FIRST_ID
from elsewhere.values import dataclass

__all__ = ["LADDER", "Mechanism", "ladder", "named"]

_MEMORY_CAP = 1 << 30


@dataclass(frozen=True, slots=True)
class Mechanism:
    name: str
    whole_machine: bool = False
    memory: int = 0
    fuse: bool = False
    copy: bool = False

    @property
    def pooled(self) -> bool:
        """Whether blanks can wait for it: fuse-overlayfs has to start first, and Landlock's rules name the sandbox."""
        return not self.fuse and not self.copy

    @property
    def expected(self) -> bool:
        """What somebody who knows nothing of rungs would expect: on disk, by the kernel."""
        return self.pooled and not self.memory

    @property
    def stacks(self) -> bool:
        """Whether what was written can be frozen and gone on from; on the other rungs it has to be copied."""
        return not self.copy and not self.memory

    @property
    def encoding(self) -> str:
        """How its layers say what is deleted (see `storage/encodings.py`)."""
        return "fuse" if self.fuse else "trusted" if self.whole_machine else "user"

    @property
    def shift(self) -> int:
        """What is added to an id of reality to get the one on disk in a layer."""
        return FIRST_ID if self.whole_machine else 0


LADDER = (
    Mechanism("overlay-idmap", whole_machine=True),
    Mechanism("overlay-idmap-memory", whole_machine=True, memory=_MEMORY_CAP),
    Mechanism("overlay-userns"),
    Mechanism("overlay-userns-memory", memory=_MEMORY_CAP),
    Mechanism("fuse-overlayfs", fuse=True),
    Mechanism("copy-landlock", copy=True),
)
_BY_NAME = {mechanism.name: mechanism for mechanism in LADDER}


def ladder() -> tuple[Mechanism, ...]:
    """The rungs that make sense for whoever runs this."""
    return tuple(rung for rung in LADDER if os.geteuid() == 0 or not rung.whole_machine)


def named(name: str) -> Mechanism:
    return _BY_NAME[name]
