"""Drift: what happened in reality since the base that a sandbox started from.

Whether reality changed a path is asked of a `Witness`: one that has the base's contents compares them (`Compared`), one that has
only a list of times and sizes compares those (`Listed`), and one that knows nothing but the moment goes by the change time, which
nobody can set (`Dated`). Which paths are worth asking about comes from two scans of the project, from one and the moment, or from
git; what was touched but is as it was does not count. Paths are relative to the project here; `.git` is not looked into, since
commits are counted by themselves.

Not here: which base a sandbox has, and what it changed itself.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Protocol

from elsewhere import units
from elsewhere.changes.installed import Package
from elsewhere.changes.sides import Sides
from elsewhere.changes.threeway import equal
from elsewhere.storage import scanning
from elsewhere.storage.scanning import Row, Scan
from elsewhere.values import dataclass

__all__ = [
    "TICK_NS",
    "Compared",
    "Dated",
    "Drift",
    "Listed",
    "Witness",
    "changed_since",
    "differing",
    "is_repository_path",
    "overlap",
]

# The kernel stamps by the tick: what happened right after a moment may carry a time that is up to this much earlier.
TICK_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class Drift:
    """How far reality has moved on. Paths are absolute and sorted. `behind_commits` is None if nobody can tell: no repository, or
    a history that was rewritten. `changed` are the files of the project that are other than in the base, `overlapping` those that
    the sandbox changed, too, and otherwise; `packages` are those of the system."""

    age_s: float
    kind: str
    base_head: str | None = None
    head: str | None = None
    behind_commits: int | None = None
    changed: tuple[str, ...] = ()
    overlapping: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()

    @property
    def head_moved(self) -> bool:
        return self.head != self.base_head

    @property
    def matters(self) -> bool:
        """Whether a result of this sandbox may not apply any more."""
        return bool(self.overlapping) or self.head_moved

    def __bool__(self) -> bool:
        return bool(self.changed or self.overlapping or self.packages or self.head_moved)

    def summary(self) -> str:
        age = _roughly(self.age_s)
        if not self:
            return f"{age} old, nothing changed in reality since"
        return ", ".join([f"{age} behind", *self._words()])

    def _words(self) -> Iterator[str]:
        if self.head_moved:
            yield units.count(self.behind_commits, "commit") if self.behind_commits else "another history"
        if self.changed:
            yield f"{units.count(len(self.changed), 'file')} changed"
        if self.overlapping:
            both = len(self.overlapping)
            yield f"{both:,} of them changed here, too" if self.changed else f"{units.count(both, 'file')} changed there and here"
        if self.packages:
            yield f"{units.count(len(self.packages), 'package')} of the system changed"


def _roughly(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size or (unit == "minute" and seconds >= size):
            return units.count(int(seconds // size), unit)
    return units.count(max(0, int(seconds)), "second")


# -- whether reality changed a path ---------------------------------------------------------------------------------------------


class Witness(Protocol):
    def changed(self, path: str) -> bool: ...


@dataclass(slots=True)
class Compared:
    """By the base's own contents. `since_ns`: what reality did not touch after that moment is as it was, and need not be read;
    None: the base is not of one moment. When `budget` bytes have been read, what could be the same is not read any more."""

    base: Sides
    reality: Sides
    project: str
    since_ns: int | None
    budget: int = 512 << 20
    _known: dict[str, bool] = field(default_factory=dict)

    def changed(self, path: str) -> bool:
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = self._differs(path)
        return known

    def _differs(self, path: str) -> bool:
        if self.since_ns is not None and _untouched(self.project, path, self.since_ns):
            return False
        try:
            before, now = self.base(path), self.reality(path)
            if before is not None and now is not None and before.type == now.type == "file" and before.size == now.size:
                if self.budget < now.size:
                    return True
                self.budget -= now.size
            return not equal(before, now)
        except OSError:
            return True  # closed to us, or gone while it was read: it is not as it was


@dataclass(slots=True)
class Listed:
    """By a scan that was made when the sandbox was; `copies` has the contents of a few."""

    scan: Scan
    project: str
    copies: Sides
    reality: Sides
    _rows: dict[str, dict[str, Row]] = field(default_factory=dict)

    def changed(self, path: str) -> bool:
        parent, _, name = path.rpartition("/")
        if parent not in self._rows:
            self._rows[parent] = scanning.rows_of(self.scan.directories.get(parent, scanning.NOTHING))
        before = self._rows[parent].get(name)
        try:
            now = scanning.row_of(os.lstat(os.path.join(self.project, path)))
        except OSError:
            return before is not None
        if before is not None and (now == before or (stat.S_ISDIR(now[0]) and now[0] == before[0])):
            return False
        copy = None if before is None else self.copies(path)
        try:
            return copy is None or not equal(copy, self.reality(path))
        except OSError:
            return True


@dataclass(frozen=True, slots=True)
class Dated:
    """By the moment alone. What is not there any more is only known from `deleted`."""

    project: str
    since_ns: int
    deleted: frozenset[str] = frozenset()

    def changed(self, path: str) -> bool:
        try:
            found = os.lstat(os.path.join(self.project, path))
        except OSError:
            return path in self.deleted
        return not stat.S_ISDIR(found.st_mode) and found.st_ctime_ns >= self.since_ns - TICK_NS


def _untouched(project: str, path: str, since_ns: int) -> bool:
    try:
        found = os.lstat(os.path.join(project, path))
    except OSError:
        return False
    return found.st_ctime_ns < since_ns - TICK_NS


# -- which paths to ask about ---------------------------------------------------------------------------------------------------


def differing(old: Scan, new: Scan) -> list[str]:
    """Every file that may be other than it was; directories only if their permissions changed."""
    found = []
    for one in scanning.differences(old, new):
        before, now = old.directories.get(one.path, scanning.NOTHING), new.directories[one.path]
        past, rows = scanning.rows_of(before), scanning.rows_of(now)
        for name in (*one.changed, *one.deleted):
            if _counts(past.get(name), rows.get(name)):
                found.append(scanning.join(one.path, name))
    gone = [path for path in old.directories if path not in new.directories]
    for path in gone:
        rows = scanning.rows_of(old.directories[path])
        found += [scanning.join(path, name) for name, row in rows.items() if not stat.S_ISDIR(row[0])]
    apart = (*old.left_out, *old.shut)  # what was not looked at then says nothing now
    below = tuple(f"{path}/" for path in apart)
    return [path for path in found if not (is_repository_path(path) or path in apart or path.startswith(below))]


def _counts(before: Row | None, now: Row | None) -> bool:
    """A directory's times change with the names in it, and those are listed by themselves."""
    if now is None or before is None:
        row = now or before
        return row is not None and not stat.S_ISDIR(row[0])
    return not stat.S_ISDIR(now[0]) or before[0] != now[0]


def changed_since(new: Scan, since_ns: int) -> list[str]:
    """Every file that was made, written, renamed or given other attributes at this moment or later."""
    found = []
    earliest = since_ns - TICK_NS
    for path, listing in new.directories.items():
        if is_repository_path(path) or not scanning.newest(listing) >= earliest:
            continue
        for name, row in scanning.rows_of(listing).items():
            if row[4] >= earliest and not stat.S_ISDIR(row[0]) and not is_repository_path(name):
                found.append(scanning.join(path, name))
    return found


def is_repository_path(path: str) -> bool:
    return ".git" in path.split("/")


def overlap(ours: Iterable[str], witness: Witness) -> list[str]:
    """Which of the sandbox's own paths reality changed as well. A directory that it names (with a slash at its end) counts if
    reality has something else there."""
    return sorted({path for path in ours if not is_repository_path(path) and witness.changed(path.rstrip("/"))})
