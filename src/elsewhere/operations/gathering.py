"""What a sandbox did, as pieces that can be moved: for each path what it was in the base, and what it is in the sandbox.

    base      what a path was
    pinned    what was captured; directories that stayed live, and what is mounted below the project, like a live base
    commit    the commit's file; what is mounted below the project, like a live base
    live      what reality has, if it has not changed it since; else the copy that was kept of it; else nobody knows
    outside   like a live base

What a sandbox moved to reality before is no difference to it any more: a path goes on from what it had then (`earlier.py`).
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field

from elsewhere.changes.drift import TICK_NS, Dated, Witness
from elsewhere.changes.model import Change, Side
from elsewhere.changes.sides import Sides, sides_of
from elsewhere.changes.threeway import equal
from elsewhere.operations import drifting, earlier
from elsewhere.paths import is_within
from elsewhere.promotion.pieces import Piece
from elsewhere.sandbox import contents, rungs
from elsewhere.sandbox.ids import ID_COUNT
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import redirects
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["emptied", "gathered"]

_ORIGINS = ("trusted.overlay.origin", "user.overlay.origin")
_Known = tuple[Side | None, bool, bool]
_Knowing = Callable[[str, Side | None, bool], _Known]


def gathered(
    state: State,
    found: Record,
    inside: Sequence[Change],
    outside: Sequence[Change],
    fits: Callable[[str], bool] = lambda _: True,
    emptied: Sequence[str] = (),
) -> list[Piece]:
    """`inside` and `outside` are changes of the sandbox's project, and of the machine around it. What it moved to reality before,
    as far as that `fits`, and has as in its base again is to be in reality as in its base again, too. What is not there in the
    `emptied` directories was not deleted by the sandbox (see `emptied`)."""
    owner = _owner_of(found)
    before, basis, undone = _Base(state, found), earlier.moved(state, found), earlier.taken_back(state, found)
    unsettled = earlier.unsettled(state, found)
    since_ns = int(found.base["at"] * 1e9)
    around = _Live(sides_of(["/"]), Dated("/", since_ns), lambda _: None, since_ns, since_ns, manifest=False, tracked=True)
    pieces = []
    knowing: list[tuple[Sequence[Change], str, _Knowing]]
    knowing = [(inside, found.project, before.known), (outside, "/", around.known)]
    for changes, root, known in knowing:
        renamed = {os.path.relpath(one.path, root) for one in changes if one.source is not None}
        for path, side in _ends(changes, root).items():
            still_open = (root, path) in unsettled and equal(side, unsettled[root, path])
            settled_before = (basis[root, path], True, False) if (root, path) in basis and not still_open else None
            was, is_known, moved = settled_before or known(path, side, path in renamed)
            if side is None and any(is_within(os.path.join(root, path), place) for place in emptied):
                is_known, moved = False, True
            if not is_known and (root, path) in undone:
                was, is_known = undone[root, path], True
            pieces.append(Piece(root, path, was, side, is_known, moved, None if side is None else owner(side)))
    named_already = {(piece.root, piece.path) for piece in pieces}
    for (root, path), was in basis.items():
        if (root, path) not in named_already and root == found.project and fits(os.path.join(root, path)):
            captured = before.captured(path)
            pieces += [Piece(root, path, was, captured[0])] if captured is not None else []
    return pieces


def emptied(state: State, found: Record, memory: int = -1) -> list[str]:
    """Directories that a sandbox renamed while it saw through at reality, where the old name is no longer: what was in them is
    seen no more, though nobody deleted it. So it is after such a rename was promoted."""
    if not rungs.named(found.mechanism).whole_machine:
        return []
    lost = []
    with contents.reached(state, found, memory) as own:
        for at, view in contents.state_of(state, found, contents.NOW, own).items():
            if at == found.project and found.base.get("layers"):
                continue
            for now, before in redirects.moves(*view.layers):
                if not os.path.lexists(os.path.join(at, before)):
                    lost.append(os.path.join(at, now))
    return lost


def _ends(changes: Iterable[Change], root: str) -> dict[str, Side | None]:
    """What there is at each path now; nothing where something was deleted, or moved away."""
    found: dict[str, Side | None] = {}
    for one in changes:
        if one.source is not None:
            found.setdefault(os.path.relpath(one.source, root), None)
        path = os.path.relpath(one.path, root)
        found[path] = one.after or found.get(path)  # what became something else is deleted and added
    return found


def _owner_of(found: Record) -> Callable[[Side], tuple[int, int] | None]:
    """Whom something belongs to in reality. Only root can give it to anybody."""
    shift = rungs.named(found.mechanism).shift

    def owner(side: Side) -> tuple[int, int] | None:
        ids = (side.about.st_uid - shift, side.about.st_gid - shift)
        return ids if os.geteuid() == 0 and all(0 <= one < ID_COUNT for one in ids) else None

    return owner


class _Base:
    def __init__(self, state: State, found: Record) -> None:
        layers = list(found.base.get("layers", ()))
        self._captured = sides_of(layers) if layers else None
        self._open = [] if self._captured is None else drifting.live_in(found)
        self._state = state
        self._record = found
        self._looked: _Live | None = None

    def captured(self, path: str) -> tuple[Side | None] | None:
        """What was captured of it; None: it was not."""
        if self._captured is None or any(is_within(path, place) for place in self._open):
            return None
        return (self._captured(path),)

    def known(self, path: str, after: Side | None, renamed: bool) -> _Known:
        """What it was; whether anybody knows; whether reality changed it since. `after` is what the sandbox has there, which may
        have had another name before."""
        captured = self.captured(path)
        if captured is not None:
            return captured[0], True, False
        if self._looked is None:
            self._looked = self._look()
        return self._looked.known(path, after, renamed)

    def _look(self) -> "_Live":
        state, found = self._state, self._record
        manifest = self._captured is None and os.path.exists(os.path.join(drifting.remembered(state, found), "manifest"))
        since_ns, seen_ns = int(found.base["at"] * 1e9), int(max(found.base["at"], earlier.last_moved_at(state, found)) * 1e9)
        return _Live(
            sides_of([found.project]),
            drifting.witness_of(state, found),
            drifting.copies_of(state, found),
            since_ns,
            seen_ns,
            manifest=manifest,
            tracked=found.base.get("head") is not None,
        )


@dataclass(slots=True)
class _Live:
    """Reality, as far as it tells what was there when the sandbox began. Without a `manifest`, nobody wrote that down:

    - a directory that was renamed since, by itself, may have brought files that are older than the sandbox
    - one that was touched since may be another than that which the sandbox deleted or replaced, or have other permissions
    - what reality does not have may have been deleted since: the kernel knows it of a file that was copied into a layer; of
      another one, only its directory can tell that something happened there since reality was last `seen`. With `tracked` that
      does not count: git says what was deleted, and directories change always
    """

    reality: Sides
    witness: Witness
    copies: Sides
    since_ns: int
    seen_ns: int
    manifest: bool
    tracked: bool
    _renamed: dict[str, bool] = field(default_factory=dict)

    def known(self, path: str, after: Side | None, renamed: bool) -> _Known:
        """Of one that was renamed in the sandbox, what the kernel wrote is about the name that it had before."""
        now = self.reality(path)
        gone = now is None and after is not None and not renamed and _was_below(after)
        if not (gone or self.witness.changed(path) or (not self.manifest and self._may_be_another(path, now, after))):
            return now, True, False
        copy = self.copies(path)
        return copy, copy is not None, True

    def _may_be_another(self, path: str, now: Side | None, after: Side | None) -> bool:
        if self._came(os.path.dirname(path)):
            return True
        if now is None:
            return after is not None and after.type != "directory" and not self.tracked and self._touched(os.path.dirname(path))
        if now.type == "directory" and (after is None or after.type != "directory" or after.mode != now.mode):
            return now.about.st_ctime_ns >= self.since_ns - TICK_NS
        return False

    def _touched(self, directory: str) -> bool:
        found = self.reality(directory or ".")
        return found is not None and found.about.st_mtime_ns >= self.seen_ns - TICK_NS

    def _came(self, directory: str) -> bool:
        """Whether it, or one that it is in, was renamed since: then it changed, and nothing in it did."""
        if not directory:
            return False
        if directory not in self._renamed:
            found = self.reality(directory)
            own = found is not None and found.about.st_mtime_ns < self.since_ns - TICK_NS <= found.about.st_ctime_ns
            self._renamed[directory] = own or self._came(os.path.dirname(directory))
        return self._renamed[directory]


def _was_below(side: Side) -> bool:
    """Whether a file in a layer was copied from below, by what the kernel wrote on it."""
    if side.type == "file" and side.place is not None:
        with contextlib.suppress(OSError), side.open() as stream:
            return any(name in _ORIGINS for name in os.listxattr(stream.fileno()))
    return False
