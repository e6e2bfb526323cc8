"""What is to be done to reality: the three-way decision about each piece, what stands in its way, and the order of doing it.

    applied     taken as it is in the sandbox
    merged      both sides' changes
    same        reality has it already, or the sandbox did not really change it
    kept        reality's was chosen, and stays
    conflicts   each with its reason (`changes/threeway.py`); a single one, and the caller does nothing at all

Paths are told relative to their root; outside of every project (root /) they are absolute. With conflicts, `operations` has what
could be done if there were none.

Pieces tell everything that the sandbox did: each directory that it made or deleted is one of its own. A directory that is not
there in reality and is no piece was deleted in reality. What is below a conflict and waits for it is not told by itself.

What a choice cannot settle: `ours` never deletes what the sandbox did not know of, never replaces the directory that something is
in, brings no device, and follows no permission that is not there; a link that leads outside has to be named by its very path.

Operations are in this order: permissions that open a directory; deletions, the deepest first; directories, from the top; files
and links; permissions that close a directory, the deepest first.

Not here: where pieces come from, what somebody chose (`choosing.py`), and how something is done to reality (`applying.py`).
"""

import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from typing import Literal, NamedTuple

from elsewhere.changes import threeway
from elsewhere.changes.model import Side
from elsewhere.changes.parents import Parents
from elsewhere.changes.threeway import Decision
from elsewhere.paths import above, is_within
from elsewhere.promotion.applying import Operation
from elsewhere.promotion.choosing import Choices, Chosen, fitting, listed, named, refuse_idle
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.settling import NOT_BY_OURS
from elsewhere.promotion.targets import Target
from elsewhere.values import dataclass

__all__ = ["Conflicting", "Plan", "leads_outside", "plan"]

_LOOKS = 3  # at a file that goes or comes while it is read
_NEW_DIRECTORY = stat.S_IFDIR | 0o755  # of one that reality deleted, and that has to be there again


class Conflicting(NamedTuple):
    """`content` has both versions of a text, marked."""

    root: str
    path: str
    reason: str
    sentence: str
    content: bytes | None = None


_NO_CHOICES = Choices()


@dataclass(slots=True)
class Plan:
    """`disputed` are the conflicts that there were before anything was chosen, if something was, and `fitting` what was chosen
    about one of them."""

    operations: list[Operation] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    conflicts: list[Conflicting] = field(default_factory=list)
    disputed: list[str] = field(default_factory=list, compare=False)
    fitting: Choices = field(default=_NO_CHOICES, compare=False)


def plan(
    pieces: Sequence[Piece], choices: Choices = _NO_CHOICES, *, restoring: bool = False, one_of_several: bool = False
) -> Plan:
    """`restoring`: what is brought is what reality had before, so that its links may lead wherever they led. `one_of_several`: a
    choice may be about a conflict with another target, and is no mistake here."""
    by_root: dict[str, dict[str, Piece]] = {}
    for piece in pieces:
        of_root = by_root.setdefault(piece.root, {})
        of_root[piece.path] = _joined(of_root[piece.path], piece) if piece.path in of_root else piece
    found = [_looked(Target(root), of_root.values()) for root, of_root in sorted(by_root.items())]
    result = Plan()
    if choices != _NO_CHOICES:
        undecided = [_Settling(one, Chosen(one.target.root, _NO_CHOICES), restoring).run() for one in found]
        disputed = [(one.looked.target.root, path) for one in undecided for path in one.open()]
        result.disputed, result.fitting = [named(*one) for one in disputed], fitting(choices, disputed)
        if not one_of_several:
            refuse_idle(choices, [result])
    for one in found:
        _write(_Settling(one, Chosen(one.target.root, choices), restoring).run(), result)
    return result


def _joined(one: Piece, other: Piece) -> Piece:
    """What became a directory, or was one, may be told as two pieces: something deleted, and something else added."""
    return one._replace(
        before=one.before or other.before,
        after=one.after or other.after,
        known=one.known and other.known,
        moved=one.moved or other.moved,
        owner=one.owner or other.owner,
    )


# -- each piece by itself -------------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    piece: Piece
    reality: Side | None
    decision: Decision


class _Looked(NamedTuple):
    """`pieces` has parents before what is in them; `colliding` has, for names that would be one name, all of them."""

    target: Target
    pieces: dict[str, _Seen]
    colliding: dict[str, list[str]]


def _looked(target: Target, pieces: Iterable[Piece]) -> _Looked:
    seen = {piece.path: _seen(target, piece) for piece in sorted(pieces, key=lambda one: one.path.split("/"))}
    alike: dict[tuple[str, str], list[str]] = {}
    for path, one in seen.items():
        if one.reality is None and one.piece.after is not None:
            parent, name = os.path.split(path)
            alike.setdefault((parent, name.casefold()), []).append(path)
    several = (paths for paths in alike.values() if len(paths) > 1 and target.ignores_case(os.path.dirname(paths[0])))
    return _Looked(target, seen, {path: paths for paths in several for path in paths})


def _seen(target: Target, piece: Piece) -> _Seen:
    for look in range(_LOOKS):
        try:
            reality = target.side(piece.path)
            if reality is not None and target.spelled_otherwise(piece.path):
                return _Seen(piece, reality, threeway.conflict("case_collision"))
            if piece.known:
                return _Seen(piece, reality, threeway.decide(piece.before, piece.after, reality))
            return _Seen(piece, reality, threeway.decide_without_base(piece.after, reality, theirs_changed=piece.moved))
        except PermissionError:
            return _Seen(piece, None, threeway.conflict("not_permitted"))
        except FileNotFoundError:
            if look == _LOOKS - 1:
                raise
            target.forget(piece.path)
    raise AssertionError("unreachable")


# -- all of them together -------------------------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    """`waits`: it cannot be told before something above or below it is settled."""

    kind: Literal["write", "same", "kept", "conflict", "waits"]
    wanted: Side | None = None
    merged: bool = False
    decision: Decision | None = None


_SAME, _KEPT, _WAITS = _Outcome("same"), _Outcome("kept"), _Outcome("waits")


class _Settling:
    """One way through the pieces of a target, with somebody's choices."""

    def __init__(self, looked: _Looked, choose: Chosen, restoring: bool) -> None:
        self.looked = looked
        self.outcomes: dict[str, _Outcome] = {}
        self.made: dict[str, Piece] = {}  # directories that have to be there again, with what they are needed for
        self._choose = choose
        self.restoring = restoring
        self._parents = Parents(self._will_be, lambda _: True)

    def run(self) -> "_Settling":
        for path, seen in self.looked.pieces.items():
            self.outcomes[path] = self._settled(path, seen)
        for path, seen in reversed(self.looked.pieces.items()):
            outcome = self.outcomes[path]
            if outcome.kind == "write" and _is_directory(seen.reality) and not _is_directory(outcome.wanted):
                self.outcomes[path] = self._emptied(path, outcome)
        return self

    def open(self) -> list[str]:
        """What somebody could choose about."""
        return [path for path, outcome in self.outcomes.items() if outcome.kind in ("conflict", "waits")]

    def _will_be(self, path: str) -> Side | None:
        outcome = self.outcomes.get(path)
        return outcome.wanted if outcome is not None and outcome.kind == "write" else self.looked.target.side(path)

    def _settled(self, path: str, seen: _Seen) -> _Outcome:
        problems = list(self._problems(path, seen))
        if not problems:
            return _taken(seen)
        choice = self._choose(path)
        if choice == "theirs":
            return _KEPT
        if choice == "ours":
            problems = [one for one in problems if not self._ours_settles(one.reason, path)]
            if not problems:
                self._make_parents(path, seen.piece)
                return _Outcome("write", seen.piece.after) if seen.decision.result == "conflict" else _taken(seen)
        if problems[0].reason.startswith("parent_") and any(self._is_open(one) for one in above(path)):
            return _WAITS
        return _Outcome("conflict", decision=problems[0])

    def _problems(self, path: str, seen: _Seen) -> Iterator[Decision]:
        """The first one is what people are told."""
        piece, reality, decision = seen
        if decision.reason == "not_permitted":
            yield decision
            return
        parent = self._parents.problem(path)
        if parent is not None and (piece.after is not None or (parent == "parent_replaced" and not self._given_up(path))):
            yield threeway.conflict(parent)
        if decision.result == "conflict":
            yield decision
        elif decision.result not in ("ours", "merged"):
            return
        if any(side is not None and side.type == "other" for side in (piece.after, reality)):
            yield threeway.conflict("not_a_file")
        if not self.restoring and leads_outside(piece.path, piece.after, piece.root):
            yield threeway.conflict("link_outside")
        if any(other != path and self._choose(other) != "theirs" for other in self.looked.colliding.get(path, ())):
            yield threeway.conflict("case_collision")
        if parent is None or piece.after is None:
            permitted = self._permitted(path, seen)
        else:  # a directory that is gone would be made again
            permitted = parent != "parent_gone" or self._may_write_above(path)
        if not permitted:
            yield threeway.conflict("not_permitted")

    def _is_open(self, path: str) -> bool:
        outcome = self.outcomes.get(path)
        return outcome is not None and outcome.kind in ("conflict", "waits")

    def _given_up(self, path: str) -> bool:
        """Whether the sandbox has no directory any more where the path was: then there is nothing that it could be missing."""
        known = (self.looked.pieces.get(one) for one in above(path))
        return any(seen is not None and not _is_directory(seen.piece.after) for seen in known)

    def _ours_settles(self, reason: str, path: str) -> bool:
        if reason == "link_outside":
            return self._choose.exactly(path)
        if reason == "parent_gone":
            missing = [one for one in above(path) if self._will_be(one) is None]
            return not any(one in self.looked.pieces for one in missing)
        return reason not in NOT_BY_OURS

    def _make_parents(self, path: str, piece: Piece) -> None:
        for one in above(path):
            if self._will_be(one) is None:
                self.made.setdefault(one, piece)

    def _may_write_above(self, path: str) -> bool:
        """In the nearest directory that is there, or will be."""
        target = self.looked.target
        for one in (*above(path), ""):
            outcome = self.outcomes.get(one)
            wanted = outcome.wanted if outcome is not None and outcome.kind == "write" else None
            if _is_directory(target.side(one)):
                opened = wanted is not None and _is_directory(wanted) and _is_open(wanted)
                return target.may_write(one) or (opened and target.may_own(one))
            if _is_directory(wanted):
                return True
        return False

    def _permitted(self, path: str, seen: _Seen) -> bool:
        target, reality, after = self.looked.target, seen.reality, seen.piece.after
        if _is_directory(reality) and _is_directory(after):
            return target.may_own(path)
        if not self._may_write_above(path):
            return False
        return target.may_own(path) if after is not None else target.may_remove(path)

    def _emptied(self, path: str, outcome: _Outcome) -> _Outcome:
        """Of a directory that is to go: whether all that is in it goes as well."""
        try:
            names = sorted(self.looked.target.names(path))
        except PermissionError:
            return _KEPT if self._choose(path) == "theirs" else _Outcome("conflict", decision=threeway.conflict("not_permitted"))
        left = {name: self.outcomes.get(f"{path}/{name}") for name in names}
        left = {name: one for name, one in left.items() if one is None or one.kind != "write" or one.wanted is not None}
        unknown = [name for name, one in left.items() if one is None or one.kind in ("same", "write")]
        if not left:
            return outcome
        if not unknown and any(one is not None and one.kind != "kept" for one in left.values()):
            return _WAITS
        if (not unknown and outcome.wanted is None) or self._choose(path) == "theirs":
            return _KEPT
        decision = threeway.conflict("not_empty")
        sentence = f"{decision.sentence}: {listed(unknown or list(left))}"
        return _Outcome("conflict", decision=Decision("conflict", reason=decision.reason, sentence=sentence))


def _is_directory(side: Side | None) -> bool:
    return side is not None and side.type == "directory"


def _is_open(directory: Side) -> bool:
    """Whether its owner can change what is in it."""
    return directory.mode & stat.S_IRWXU == stat.S_IRWXU


def leads_outside(path: str, side: Side | None, root: str | None) -> bool:
    """Whether it is a link that leads out of the root that its path is in, by its words alone: what lies on the way is not looked
    at, and may be a link as well. So the way up has to come first: behind a name, it goes up from wherever that leads. Without a
    root, the top could be anywhere."""
    if side is None or side.type != "link" or root == "/":
        return False
    target = side.target or ""
    if ".." in itertools.dropwhile(lambda part: part in ("", ".", ".."), target.split("/")):
        return True
    place = os.path.normpath(os.path.join(root or "", os.path.dirname(path), target))
    return place.split("/")[0] in ("", "..") if root is None else not is_within(place, root)


def _taken(seen: _Seen) -> _Outcome:
    decision = seen.decision
    if decision.result == "ours":
        return _Outcome("write", seen.piece.after)
    if decision.result != "merged":
        return _SAME
    assert seen.reality is not None, "what is merged is there"
    assert decision.mode is not None, "what is merged has a mode"
    about = seen.reality.about
    size = about.st_size if decision.content is None else len(decision.content)
    mode = stat.S_IFMT(about.st_mode) | decision.mode
    return _Outcome("write", Side(os.stat_result((mode, *about[1:6], size, *about[7:10])), content=decision.content), merged=True)


# -- the plan -------------------------------------------------------------------------------------------------------------------


def _write(settled: _Settling, result: Plan) -> None:
    target, pieces = settled.looked.target, settled.looked.pieces
    operations = [
        Operation(target.root, path, None, Side(os.stat_result((_NEW_DIRECTORY, *[0] * 9))), piece.owner)
        for path, piece in settled.made.items()
    ]
    for path, outcome in settled.outcomes.items():
        name = named(target.root, path)
        if outcome.kind == "write":
            operations.append(Operation(target.root, path, pieces[path].reality, outcome.wanted, pieces[path].piece.owner))
            (result.merged if outcome.merged else result.applied).append(name)
        elif outcome.kind == "conflict":
            assert outcome.decision is not None, "a conflict has a reason"
            decision = outcome.decision
            sentence = threeway.sentence_of_undo(decision) if settled.restoring else decision.sentence
            result.conflicts.append(Conflicting(target.root, path, decision.reason, sentence, decision.content))
        elif outcome.kind != "waits":
            (result.same if outcome.kind == "same" else result.kept).append(name)
    result.operations += sorted(operations, key=_turn)


def _turn(operation: Operation) -> tuple[int, int, str]:
    depth, path, wanted = operation.path.count("/"), operation.path, operation.wanted
    if wanted is None:
        return 1, -depth, path
    if not _is_directory(wanted):
        return 3, depth, path
    if not _is_directory(operation.expected):
        return 2, depth, path
    return (0, depth, path) if _is_open(wanted) else (4, -depth, path)
