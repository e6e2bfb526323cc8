"""`drift`: how far reality has moved on since a sandbox's base, and whether that touches what the sandbox did.

    base             what is compared                                        what is worth comparing
    pinned           the captured contents with reality                      the base's scan and a fresh one
    commit           the commit's files with reality                         what git lists, and what is younger than it
    live, manifest   times and sizes; contents of what git called dirty      the manifest and a fresh scan
    live             the change time with the moment at which it was made    a fresh scan; what git misses

A `glance` does without a scan: it looks at the head, and at the paths that the sandbox itself touched. It is what `inspect` and
`exec` show. Git is run on reality only to be asked, and only for the commits between.
"""

import contextlib
import errno
import functools
import os
from collections.abc import Iterable, Iterator

from elsewhere.changes import drift as drifts
from elsewhere.changes import installed
from elsewhere.changes.drift import Compared, Dated, Drift, Listed, Witness
from elsewhere.changes.model import Changes, Side
from elsewhere.changes.sides import Sides, sides_of
from elsewhere.clock import Clock, wall
from elsewhere.errors import ElsewhereError
from elsewhere.linux import mountinfo
from elsewhere.operations import sandboxes
from elsewhere.operations.projects import find_project
from elsewhere.paths import is_within
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import checkouts, scanning
from elsewhere.storage.layers import LAYERS, Layers
from elsewhere.storage.scanning import Scan
from elsewhere.storage.state import State
from elsewhere.storage.trees import open_beneath
from elsewhere.values import dataclass

__all__ = ["copies_of", "drift", "drift_of", "glance", "live_in", "noticed", "remembered", "witness_of"]

_YOUNG_S = 300.0  # nobody has to be told that reality moved on within minutes
_MOST_TOUCHED = 2000
_DELETED = ".wh."  # how fuse-overlayfs may name what is deleted


def remembered(state: State, found: Record) -> str:
    """Where it is written down what reality was like when the sandbox's base was made."""
    return os.path.join(state.sandbox(found.id), str(found.base.get("remembered", "")))


def drift(wanted: str, clock: Clock = wall) -> tuple[Record, Drift]:
    found, changes = sandboxes.changes(wanted)
    return found, drift_of(State.open(), found, changes, clock)


def drift_of(state: State, found: Record, changes: Changes, clock: Clock = wall) -> Drift:
    """`changes` are the sandbox's own."""
    base = _Based(state, found)
    head = find_project(found.project, "/").head
    fresh = base.scan()
    missing = base.missing(head) if base.known is None else frozenset()
    witness = base.witness(missing)
    both = drifts.overlap(_inside(_paths(changes), found.project), witness)
    changed = {path for path in base.candidates(fresh, head, missing) if witness.changed(path)}
    changed.update(path.rstrip("/") for path in both)
    overlapping = _otherwise(both, _ours(changes, found.project), found.project)
    return Drift(
        age_s=max(0.0, clock() - found.base["at"]),
        kind=found.base["kind"],
        base_head=base.head,
        head=head,
        behind_commits=base.behind(head),
        changed=_absolute(changed, found.project),
        overlapping=_absolute(overlapping, found.project),
        packages=tuple(installed.changed_since(found.base["at"], home=found.home or None)),
    )


def glance(state: State, found: Record, clock: Clock = wall) -> Drift | None:
    """What can be told at once; None: the project is not there to be looked at."""
    try:
        base = _Based(state, found)
        head = find_project(found.project, "/").head
        touched = _inside(_touched(state, found), found.project)
        both = drifts.overlap(touched, base.witness(frozenset())) if touched else []
        overlapping = _otherwise(both, _written(state, found), found.project) if both else []
    except (ElsewhereError, OSError):
        return None
    return Drift(
        age_s=max(0.0, clock() - found.base["at"]),
        kind=found.base["kind"],
        base_head=base.head,
        head=head,
        behind_commits=base.behind(head),
        overlapping=_absolute(overlapping, found.project),
    )


def noticed(state: State, found: Record, clock: Clock = wall) -> Drift | None:
    """What whoever used the sandbox just now should know: that reality changed what it changed, or that its head moved."""
    if clock() - found.base["at"] < _YOUNG_S:
        return None
    seen = glance(state, found, clock)
    return seen if seen is not None and seen.matters else None


def copies_of(state: State, found: Record) -> Sides:
    """What stood in a live base, as far as copies of it were kept."""
    return _Based(state, found).copies()


def live_in(found: Record) -> list[str]:
    """What stayed live in a base that was captured, relative to the project: what was left out of it, and what is mounted below
    the project and shows reality there, each with a layer of its own. Not what the base has no directory for: inside it is not
    mounted, and what is there is the sandbox's."""
    project, captured = found.project, sides_of(list(found.base.get("layers", ())))
    known = {mount.target for mount in mountinfo.read()}
    places = _inside((layer["at"] for layer in found.layers if layer["at"] in known), project)
    sides = [(place, captured(place)) for place in places]
    mounted = [place for place, side in sides if side is not None and side.type == "directory"]
    return [*_inside(found.base.get("live", ()), project), *mounted]


def witness_of(state: State, found: Record) -> Witness:
    """Who can tell whether reality changed a path of the project since the sandbox's base."""
    base = _Based(state, found)
    head = find_project(found.project, "/").head
    return base.witness(base.missing(head) if base.known is None else frozenset())


class _Based:
    """A sandbox's base, as far as reality is compared with it."""

    def __init__(self, state: State, found: Record) -> None:
        self.state = state
        self.record = found

    @property
    def project(self) -> str:
        return self.record.project

    @property
    def head(self) -> str | None:
        return self.record.base.get("head")

    @property
    def at_ns(self) -> int:
        return int(self.record.base["at"] * 1e9)

    @property
    def layers(self) -> list[str]:
        return list(self.record.base.get("layers", ()))

    @functools.cached_property
    def known(self) -> Scan | None:
        """What the project looked like, if that was written down."""
        with contextlib.suppress(OSError), open(os.path.join(remembered(self.state, self.record), "manifest"), "rb") as stream:
            return scanning.load(stream.read())
        return None

    def scan(self) -> Scan:
        """What the project looks like now, without its repository, which has commits to be counted."""
        ours = [os.path.relpath(self.state.path, self.project)] if is_within(self.state.path, self.project) else []
        live = set(_inside(self.record.base.get("live", ()), self.project))
        return scanning.scan(self.project, live=live, leave_out={".git", *ours}, known=self.known)

    def witness(self, missing: frozenset[str]) -> Witness:
        dated, reality = Dated(self.project, self.at_ns, missing), sides_of([self.project])
        if self.layers:
            since = self.at_ns if self.record.base["kind"] == "pinned" else None
            contents = Compared(sides_of(self.layers), reality, self.project, since)
            return _Partly(contents, dated, tuple(live_in(self.record)))
        known = self.known
        return dated if known is None else Listed(known, self.project, self.copies(), reality)

    def copies(self) -> Sides:
        """The contents that were kept of a live base; their modes stand in the manifest."""
        place = os.path.join(remembered(self.state, self.record), "dirty")
        kept = sides_of([place] if os.path.isdir(place) else [])

        def side(path: str) -> Side | None:
            found, row = kept(path), None if self.known is None else scanning.find(self.known, path)
            if found is None or row is None or found.type != "file":
                return None
            return Side(os.stat_result((row[0], *found.about[1:10])), found.place)

        return side

    def candidates(self, fresh: Scan, head: str | None, missing: frozenset[str]) -> set[str]:
        known = self.known
        if known is not None:
            return set(drifts.differing(known, fresh))
        found = {*drifts.changed_since(fresh, self.at_ns), *missing}
        if self.record.base["kind"] == "commit":
            found |= {*(self._between(head)), *checkouts.dirty(self.project)}
            # Git looks into what is mounted below the project, and that is no part of the base.
            apart = (*fresh.mounts, *_inside((mount.target for mount in mountinfo.read()), self.project))
            found = {path for path in found if not any(is_within(path, place) for place in apart)}
        return {path for path in found if not drifts.is_repository_path(path)}

    def missing(self, head: str | None) -> frozenset[str]:
        """What git had and is not there any more, in directories from which something went since."""
        named = {*checkouts.deleted(self.project), *self._between(head)}
        return frozenset(path for path in named if self._vanished(path))

    def _between(self, head: str | None) -> list[str]:
        moved = self.head is not None and head is not None and head != self.head
        return (checkouts.between(self.project, str(self.head), str(head)) if moved else None) or []

    def _vanished(self, path: str) -> bool:
        place = os.path.join(self.project, path)
        if os.path.lexists(place):
            return False
        if self.record.base["kind"] == "commit":
            return True
        while not os.path.isdir(place):
            place = os.path.dirname(place)
        return os.stat(place).st_ctime_ns >= self.at_ns

    def behind(self, head: str | None) -> int | None:
        if self.head is None or head is None:
            return None
        return 0 if head == self.head else checkouts.commits_since(self.project, self.head, head)


@dataclass(frozen=True, slots=True)
class _Partly:
    """A base that holds everything but some directories, which stayed live."""

    held: Witness
    live: Witness
    places: tuple[str, ...]

    def changed(self, path: str) -> bool:
        return (self.live if any(is_within(path, place) for place in self.places) else self.held).changed(path)


def _paths(changes: Changes) -> Iterator[str]:
    """Both paths of what was renamed."""
    yield from (path for _, path in changes)
    yield from (source for source, _ in changes.renamed)


def _otherwise(paths: Iterable[str], ours: Sides, project: str) -> list[str]:
    """Without those at which both sides have the same by now: what the sandbox promoted, most likely."""
    witness = Compared(ours, sides_of([project]), project, None)
    return [path for path in paths if witness.changed(path.rstrip("/"))]


def _ours(changes: Changes, project: str) -> Sides:
    """What the sandbox has at the paths that it changed."""
    every = [one for one in (*changes.entries, *changes.directories) if one.kind == "deleted" or one.after is not None]
    known: dict[str, Side | None] = dict.fromkeys(_inside((source for source, _ in changes.renamed), project))
    for one in sorted(every, key=lambda one: one.after is not None):  # what became a directory is deleted, and added
        known |= dict.fromkeys(_inside([one.path.rstrip("/")], project), one.after)

    def side(path: str) -> Side | None:
        if path not in known:
            raise FileNotFoundError(errno.ENOENT, "nobody can tell what is there", path)
        return known[path]

    return side


def _inside(paths: Iterable[str], project: str) -> list[str]:
    """Relative to the project, without what is outside of it."""
    return [path[len(project) + 1 :] for path in paths if path.startswith(f"{project}/")]


def _absolute(paths: Iterable[str], project: str) -> tuple[str, ...]:
    return tuple(sorted(os.path.join(project, path) for path in paths))


def _touched(state: State, found: Record) -> list[str]:
    """What the sandbox's layers name, the first so many, whether or not it is other than before. Layers that lie apart are not
    looked at."""
    if found.layers_apart:
        return []
    names: dict[str, None] = {}
    for place in _places(state, found):
        for layer in found.layers:
            upper = os.path.join(place, str(layer["number"]))
            if is_within(found.project, layer["at"]):
                below = os.path.relpath(found.project, layer["at"])
                names |= dict.fromkeys(_names(os.path.normpath(os.path.join(upper, below)), found.project, _MOST_TOUCHED))
            elif is_within(layer["at"], found.project):
                names |= dict.fromkeys(_names(upper, layer["at"], _MOST_TOUCHED))
            if len(names) >= _MOST_TOUCHED:
                return list(names)[:_MOST_TOUCHED]
    return list(names)


def _places(state: State, found: Record) -> list[str]:
    """Where its layers lie, the newest first."""
    frozen = Layers(state).chain(found.tip)
    return [os.path.join(state.sandbox(found.id), "upper"), *(os.path.join(state.room(LAYERS), step.place) for step in frozen)]


def _written(state: State, found: Record) -> Sides:
    """What the sandbox has at a path that its layers name, as far as that can be told at once."""
    places = _places(state, found)

    def side(path: str) -> Side | None:
        whole = os.path.join(found.project, path)
        layer = max((one for one in found.layers if is_within(whole, one["at"])), key=lambda one: len(one["at"]))
        return sides_of([os.path.join(place, str(layer["number"])) for place in places])(os.path.relpath(whole, layer["at"]))

    return side


def _names(directory: str, at: str, most: int) -> list[str]:
    """The files below it, those at the top first, as paths below `at`. It may belong to somebody hostile: no link is followed."""
    names: list[str] = []
    try:
        top = os.open(directory, scanning.DIRECTORY)
    except OSError:
        return names
    waiting = ["."]
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, top)
        while waiting and len(names) < most:
            here = waiting.pop(0)
            with contextlib.suppress(OSError):
                _list(top, here, at, names, waiting)
    return names[:most]


def _list(top: int, here: str, at: str, names: list[str], waiting: list[str]) -> None:
    fd = open_beneath(top, here)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    names.append(os.path.normpath(os.path.join(at, here, entry.name.removeprefix(_DELETED))))
                elif entry.name != ".git":
                    waiting.append(os.path.join(here, entry.name))
    finally:
        os.close(fd)
