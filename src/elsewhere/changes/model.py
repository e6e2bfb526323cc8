"""What changed, as data: each change with what was there before and after it, and all of them together.

A file that changed is `modified`; `what` tells what about it: its content, its mode, where it leads as a link, or its type. What
became a directory, or was one, is something deleted and something else added. There may be very many of them, so they are tuples,
which cost the least.

Not here: how changes are found (`compare.py`), which of them are renames (`renames.py`), what they look like as a patch or in
numbers (`patch.py`).
"""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from elsewhere.storage.trees import Tree
from elsewhere.values import dataclass

if TYPE_CHECKING:
    from elsewhere.changes.patch import FileStat

__all__ = ["KINDS", "Change", "Changes", "Place", "Side"]

KINDS = ("added", "modified", "deleted")

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


class Place(NamedTuple):
    """Where a file can be read again: in a layer or in reality, or in the newest of several layers that has it. It may belong to
    somebody hostile: no link on the way is followed."""

    root: str
    path: str
    older: tuple[str, ...] = ()

    def open(self) -> BinaryIO:
        parent, _, name = self.path.rpartition("/")
        with contextlib.ExitStack() as stack:
            directory = Tree((self.root, *self.older), stack).open(parent, stack)
            found = None if directory is None else directory.find(name)
            if found is not None and stat.S_ISREG(found.about.st_mode):
                stream = open(os.open(name, _FLAGS, dir_fd=found.fd), "rb")  # noqa: SIM115  (the caller's)
                if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                    return stream
                stream.close()
            raise FileNotFoundError(errno.ENOENT, "it is no file any more", self.path)


class Side(NamedTuple):
    """What is there before or after a change. `target` is where a link leads; `content` is what a file counts as if that is not
    what lies in its place."""

    about: os.stat_result
    place: Place | None = None
    target: str | None = None
    content: bytes | None = None

    @property
    def type(self) -> str:
        """file, directory, link or other."""
        return _TYPES.get(stat.S_IFMT(self.about.st_mode), "other")

    @property
    def mode(self) -> int:
        return stat.S_IMODE(self.about.st_mode)

    @property
    def size(self) -> int:
        """Bytes of a file or of a link's target; 0 for anything else."""
        if self.content is not None:
            return len(self.content)
        return self.about.st_size if self.type in ("file", "link") else 0

    def open(self) -> BinaryIO:
        """The content of a file, for as long as the layers that hold it can be reached."""
        if self.content is not None:
            return io.BytesIO(self.content)
        if self.type != "file" or self.place is None:
            raise FileNotFoundError(errno.ENOENT, "it has no content")
        return self.place.open()


class Change(NamedTuple):
    """`path` is absolute, with a slash at its end for a directory. `source` is where a renamed file was before."""

    path: str
    kind: str
    before: Side | None
    after: Side | None
    source: str | None = None
    same_content: bool = False

    @property
    def what(self) -> tuple[str, ...]:
        """What is different about something that was there before and is there now: type, content, link, mode."""
        before, after = self.before, self.after
        if before is None or after is None:
            return ()
        if before.type != after.type:
            return ("type",)
        if before.type == "link":
            return ("link",)
        found = () if self.same_content or before.type == "directory" else ("content",)
        return found if before.mode == after.mode else (*found, "mode")


@dataclass(slots=True)
class Changes:
    """Lists of absolute paths, sorted; `renamed` has pairs of where a file was and where it is. `entries` has everything about
    each of them, `directories` everything about those that were made or deleted, which are told only if they are empty."""

    added: list[str] = field(default_factory=list)
    modified: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    entries: list[Change] = field(default_factory=list, compare=False, repr=False)
    directories: list[Change] = field(default_factory=list, compare=False, repr=False)
    project: str = field(default="/", compare=False, repr=False)
    scratch: str | None = field(default=None, compare=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.added or self.modified or self.deleted or self.renamed)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Pairs of kind and path; of a renamed file, the path that it has now."""
        for kind in KINDS:
            for path in getattr(self, kind):
                yield kind, path
        for _, path in self.renamed:
            yield "renamed", path

    def add(self, change: Change) -> None:
        if change.source is not None:
            self.renamed.append((change.source, change.path))
        else:
            getattr(self, change.kind).append(change.path)
        self.entries.append(change)

    def extend(self, other: "Changes") -> None:
        for kind in (*KINDS, "renamed", "entries", "directories"):
            getattr(self, kind).extend(getattr(other, kind))

    def sort(self) -> None:
        for kind in (*KINDS, "renamed"):
            getattr(self, kind).sort()
        self.entries.sort(key=_by_path)
        self.directories.sort(key=_by_path)

    def where(self, wanted: Callable[[str], bool]) -> "Changes":
        """The same, but only of paths that are wanted; of a renamed file, either of its paths will do."""
        kept = Changes(project=self.project, scratch=self.scratch)
        for kind in KINDS:
            setattr(kept, kind, [path for path in getattr(self, kind) if wanted(path)])
        kept.renamed = [pair for pair in self.renamed if wanted(pair[0]) or wanted(pair[1])]
        kept.entries = [one for one in self.entries if wanted(one.path) or (one.source is not None and wanted(one.source))]
        kept.directories = [one for one in self.directories if wanted(one.path)]
        return kept

    def without(self, hidden: list[str]) -> "Changes":
        """The same, less what lies at or below the given paths."""
        below = tuple(f"{place}/" for place in hidden)
        return self.where(lambda path: path not in hidden and not path.startswith(below))

    def summary(self) -> str:
        counts = ((len(getattr(self, kind)), kind) for kind in (*KINDS, "renamed"))
        return ", ".join(f"{count} {word}" for count, word in counts if count) or "nothing changed"

    def patch(self) -> bytes:
        """What changed in the project as one patch that `git apply --binary` understands, relative to the project."""
        from elsewhere.changes import patch

        return patch.patch(self).text

    def stat(self) -> "list[FileStat]":
        """How much changed in each file of the project: lines of text, bytes of anything."""
        from elsewhere.changes import patch

        return patch.stat(self)


def _by_path(change: Change) -> str:
    return change.path
