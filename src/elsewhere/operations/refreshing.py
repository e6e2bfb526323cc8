"""`refresh`: move a sandbox to a new base of the same kind. Here is decided what becomes of each path.

For every path that the sandbox changed: what it was in the old base, what it is here, what it is in the new one (`threeway.py`).
For every path that only the bases differ in: whether it will show, or something of the sandbox is in its way. One conflict, and
nothing is done at all.

    kept        the sandbox's layers say what they said
    written     the layers are to say something new: both sides' changes, merged
    dropped     the layers are to say nothing any more: the new base has it already, or the sandbox had only touched it
    conflicts   each with its reason

A live base has no contents to merge with, only the moment from which it counts: what both changed is a conflict there, except for
files of which a copy was kept.

The repository's own files are not merged, but the index has to go with HEAD: where HEAD is the base's and nothing is staged here,
the new base's index takes the place of the one that `git status` left in the layers. Else a commit in the sandbox would undo what
reality committed.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from elsewhere import units
from elsewhere.changes import drift as drifts
from elsewhere.changes import staged, threeway
from elsewhere.changes.compare import View
from elsewhere.changes.drift import Witness
from elsewhere.changes.model import Changes, Side
from elsewhere.changes.parents import Parents
from elsewhere.changes.sides import Sides, sides_of
from elsewhere.changes.threeway import Decision
from elsewhere.clock import wall
from elsewhere.errors import Conflict, InUse, Unavailable
from elsewhere.operations import bases, creating, drifting, sandboxes, snapshots
from elsewhere.operations.bases import Chosen, Teller
from elsewhere.operations.projects import find_project, refuse_inside
from elsewhere.paths import is_within
from elsewhere.sandbox import contents, live, rebasing, rungs
from elsewhere.sandbox import snapshots as kept
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import checkouts, scanning, trash
from elsewhere.storage.sowing import Seed
from elsewhere.storage.stacks import Folder, Stack
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Conflicting", "Layered", "RefreshPlan", "Written", "layered", "plan_refresh", "refresh"]

Way = Literal["shows", "named", "hidden"]
Layered = Callable[[str], Way]
_REMEMBERED = "base-"
_INDEX = ".git/index"
_STAGED = (
    "the sandbox has something staged, or an index that cannot be read, and reality's HEAD moved: "
    "commit or unstage it in the sandbox first"
)


@dataclass(frozen=True, slots=True)
class Written:
    """`content` is None for a directory, of which only the mode is merged."""

    path: str
    content: bytes | None
    mode: int


@dataclass(frozen=True, slots=True)
class Conflicting:
    path: str
    reason: str
    sentence: str


@dataclass(slots=True)
class RefreshPlan:
    """Paths are relative to the project, sorted."""

    kept: list[str] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    conflicts: list[Conflicting] = field(default_factory=list)


def refresh(wanted: str, teller: Teller | None = None, *, dry_run: bool = False) -> tuple[Record, RefreshPlan]:
    """The sandbox goes on from reality as it is now. Conflicts raise, and nothing was done; a dry run only tells."""
    refuse_inside()
    state = State.open()
    sandbox_id = record.find(state, wanted)
    looks = dry_run and record.load(state, sandbox_id).disk != "image"
    holding = _looked_at(state, sandbox_id) if looks else _at_rest(state, sandbox_id)
    with holding as (found, apart), contextlib.ExitStack() as stack:
        changes = sandboxes.changes(sandbox_id)[1] if apart < 0 else contents.changes_of(state, found, apart)
        project = find_project(found.project, "/")
        kind, ref = found.base["kind"], found.base.get("ref")
        shift = 0 if kind == "live" else live.shift_for(state, project.path)
        chosen_kind = "auto" if ref is not None or found.base.get("manifest") else kind
        chosen = stack.enter_context(bases.choose(state, project, chosen_kind, ref, shift, teller))
        plan = _plan(state, found, changes, chosen, apart)
        if dry_run:
            return found, plan
        if plan.conflicts:
            count = units.count(len(plan.conflicts), "conflict")
            raise Conflict(
                "refresh_conflict",
                f"{count} between the sandbox {found.id!r} and reality; nothing was done",
                hint=f"make one of them as it was: elsewhere drift {found.id}; elsewhere diff {found.id}",
                detail={"conflicts": [_document(one) for one in plan.conflicts]},
            )
        _switch(state, found, chosen, plan, _ours(changes, found.project), apart)
        return found, plan


@contextlib.contextmanager
def _looked_at(state: State, sandbox_id: str) -> Iterator[tuple[Record, int]]:
    with record.exclusive(state, sandbox_id) as found:
        yield found, -1


@contextlib.contextmanager
def _at_rest(state: State, sandbox_id: str) -> Iterator[tuple[Record, int]]:
    """Nothing may run in it: it would find other files under its hands. With what leads to layers in an image, which can be
    mounted only once."""
    with snapshots.quiet(state, sandbox_id, None) as held:
        if not rungs.named(held.found.mechanism).stacks:
            raise Unavailable(
                "refresh_unavailable",
                f"the sandbox {sandbox_id!r} stands on {held.found.mechanism}, which has no base that could be replaced",
                hint="make a new sandbox",
            )
        if held.frozen:
            raise InUse(
                "sandbox_in_use",
                snapshots.busy(held),
                hint=f"elsewhere ps {sandbox_id}; elsewhere stop {sandbox_id}",
            )
        yield held.found, held.layers if held.found.disk == "image" else -1


def _switch(state: State, found: Record, chosen: Chosen, plan: RefreshPlan, ours: Mapping[str, Side | None], apart: int) -> None:
    """Put the new base in place of the old one, and above what the sandbox wrote what the plan says."""
    before, now = sides_of(found.base.get("layers") or [found.project]), sides_of(chosen.base.get("layers") or [found.project])
    merged = [Seed(one.path, "directory" if one.content is None else "file", one.mode, one.content) for one in plan.written]
    for path in plan.dropped:
        theirs = now(path)
        if path not in ours or not threeway.equal(ours[path], theirs):
            merged.append(_as_in_base(path, theirs, before(path)))
    seeds = [replace(one, path=os.path.join(found.project, one.path)) for one in merged]
    _forget_bases(state, found)
    aside = f"{_REMEMBERED}{secrets.token_hex(4)}"
    os.mkdir(os.path.join(state.sandbox(found.id), aside), 0o700)
    creating.remember(os.path.join(state.sandbox(found.id), aside), found.project, chosen)
    base = {**chosen.base, "at": chosen.base.get("at", wall()), "remembered": aside}
    with kept.place_of(state, found, apart) as place:
        rebasing.rebase(state, found, place, base, seeds)


def _forget_bases(state: State, found: Record) -> None:
    """What was remembered of bases that neither the sandbox nor a snapshot has: of a refresh that was stopped, or of a snapshot
    that is gone."""
    needed = {base.get("remembered") for base in (found.base, *(one["base"] for one in found.snapshots if "base" in one))}
    for name in os.listdir(state.sandbox(found.id)):
        if name.startswith(_REMEMBERED) and name not in needed:
            trash.discard(os.path.join(state.sandbox(found.id), name), state.room("trash"))


def _as_in_base(path: str, theirs: Side | None, before: Side | None) -> Seed:
    if theirs is None:
        return Seed(path, "gone")
    if theirs.type == "link":
        return Seed(path, "link", target=theirs.target or "")
    if theirs.type == "file":
        return Seed(path, "file", theirs.mode, opened=theirs.open)
    if theirs.type == "directory" and before is not None and before.type == "directory":
        return Seed(path, "directory", theirs.mode)
    raise Conflict(
        "refresh_conflict",
        f"{path!r} became a {theirs.type} in reality, and the sandbox has something else there; nothing was done",
        hint="make a new sandbox",
    )


def _document(one: Conflicting) -> dict[str, str]:
    return {"path": one.path, "reason": one.reason, "sentence": one.sentence}


def _plan(state: State, found: Record, changes: Changes, chosen: Chosen, apart: int) -> RefreshPlan:
    """With what was found on disk."""
    layers = chosen.base.get("layers")
    now = sides_of(layers or [found.project])
    with contextlib.ExitStack() as stack:
        way = layered(_view(state, found, apart, stack), found.project, stack)
        if not found.base.get("layers"):
            witness = drifting.witness_of(state, found)
            return plan_refresh(changes, found.project, drifting.copies_of(state, found), now, (), way, witness)
        before = sides_of(found.base["layers"])
        plan = plan_refresh(changes, found.project, before, now, _between(state, found, chosen), way)
        _check_what_shows_through(plan, _ours(changes, found.project), found.base["layers"], now)
        return plan


def _check_what_shows_through(plan: RefreshPlan, ours: Mapping[str, Side | None], layers: Sequence[str], now: Sides) -> None:
    """What lies in a directory that the sandbox renamed is still the base's, and shows where that was: so it has to be there in
    the new base as well."""
    for path in list(plan.kept):
        side = ours[path]
        if side is None or side.place is None or side.place.root not in layers:
            continue
        if not threeway.equal(side, now(side.place.path)):
            plan.kept.remove(path)
            _place(plan, path, threeway.conflict("hidden_here"))


def _between(state: State, found: Record, chosen: Chosen) -> list[str]:
    """Where the two bases may differ."""
    if chosen.base["kind"] == "commit":
        return checkouts.between(found.project, found.base["head"], chosen.base["head"]) or []
    assert chosen.scan is not None, "it was captured"
    scans = []
    for path in (os.path.join(drifting.remembered(state, found), "manifest"), chosen.scan):
        with open(path, "rb") as stream:
            scans.append(scanning.load(stream.read()))
    old, new = scans
    if old is None or new is None:
        raise Unavailable(
            "refresh_unknown", f"what the base of {found.id!r} looked like is not known any more", hint="make a new sandbox"
        )
    return drifts.differing(old, new)


def _view(state: State, found: Record, apart: int, stack: contextlib.ExitStack) -> tuple[str, View]:
    """The layers in which the project is, and where they are mounted."""
    own = stack.enter_context(contents.reached(state, found, apart))
    views = contents.state_of(state, found, contents.NOW, own)
    at = max((place for place in views if is_within(found.project, place)), key=len)
    return at, views[at]


# -- the decision ---------------------------------------------------------------------------------------------------------------


def plan_refresh(
    changes: Changes,
    project: str,
    before: Sides,
    now: Sides,
    moved: Iterable[str],
    layered: Layered,
    witness: Witness | None = None,
) -> RefreshPlan:
    """`changes` are the sandbox's, `before` and `now` what stands in the old and in the new base, `moved` where these may differ,
    and `layered` how the sandbox's layers lie over a path of the base. With a `witness` the old base is live: `before` has only
    copies of some files, and whether reality changed a path is asked of the witness."""
    plan = RefreshPlan()
    ours = _ours(changes, project)
    parents = Parents(now, lambda directory: witness is None and _is_directory(before(directory)))
    for path, mine in sorted(ours.items()):
        _place(plan, path, _decision(path, mine, before, now, parents, witness))
    for path in sorted(set(moved) - ours.keys()):
        theirs = now(path)
        if threeway.equal(before(path), theirs):
            continue
        way = layered(path)
        if way == "named":
            plan.dropped.append(path)
        elif way == "hidden" and theirs is not None:
            _place(plan, path, threeway.conflict("hidden_here"))
    if witness is None:
        _place_index(plan, _all_of(changes, project), project, before, now, layered)
    plan.dropped.sort()
    plan.conflicts.sort(key=lambda one: one.path)
    return plan


def _place_index(
    plan: RefreshPlan, ours: Mapping[str, Side | None], project: str, before: Sides, now: Sides, layered: Layered
) -> None:
    """Nothing is to be done where the base has no repository, the layers no index, or where they hide the base's repository."""
    if before(".git/HEAD") is None or layered(_INDEX) == "shows" or layered(".git/objects/any") == "hidden":
        return

    def here(path: str) -> Side | None:
        return ours[path] if path in ours else before(path)

    def here_later(path: str) -> Side | None:
        return now(path) if path not in ours and layered(path) == "shows" else here(path)

    head, moved_to = staged.head_of(before, ".git"), staged.head_of(now, ".git")
    was, becomes = staged.head_of(here, ".git"), staged.head_of(here_later, ".git")
    mine = staged.staged_in(here(_INDEX), head)
    if becomes == moved_to and mine is not None and mine == staged.staged_in(now(_INDEX), head):
        return
    nothing_staged = mine is not None and (
        mine == staged.staged_in(before(_INDEX), head) or (was != becomes and mine == staged.staged_of_commit(project, head))
    )
    if nothing_staged and (was, becomes) == (head, moved_to):
        plan.dropped.append(_INDEX)
    elif was != becomes:
        plan.conflicts.append(Conflicting(_INDEX, "staged_here", _STAGED))


def _decision(path: str, mine: Side | None, before: Sides, now: Sides, parents: Parents, witness: Witness | None) -> Decision:
    problem = parents.problem(path) if mine is not None else None
    if problem is not None:
        return threeway.conflict(problem)
    if witness is None:
        return threeway.decide(before(path), mine, now(path))
    known = before(path)
    if known is not None:
        return threeway.decide(known, mine, now(path))
    return threeway.decide_without_base(mine, now(path), theirs_changed=witness.changed(path))


def _place(plan: RefreshPlan, path: str, decision: Decision) -> None:
    if decision.result == "conflict":
        plan.conflicts.append(Conflicting(path, decision.reason, decision.sentence))
    elif decision.result == "ours":
        plan.kept.append(path)
    elif decision.result == "merged":
        assert decision.mode is not None, "what is merged has a mode"
        plan.written.append(Written(path, decision.content, decision.mode))
    else:
        plan.dropped.append(path)


def _ours(changes: Changes, project: str) -> dict[str, Side | None]:
    """The repository's own files are not merged: they are live, or belong to the base as a whole."""
    return {path: side for path, side in _all_of(changes, project).items() if not drifts.is_repository_path(path)}


def _all_of(changes: Changes, project: str) -> dict[str, Side | None]:
    """What the sandbox has at each path of the project that it changed; nothing where it deleted something, or moved it away."""
    found: dict[str, Side | None] = {}
    for one in changes.entries:
        if one.source is not None:
            found.setdefault(one.source.rstrip("/"), None)
        found[one.path.rstrip("/")] = one.after
    return {path[len(project) + 1 :]: side for path, side in found.items() if path.startswith(f"{project}/")}


def _is_directory(side: Side | None) -> bool:
    return side is not None and side.type == "directory"


def layered(view: tuple[str, View], project: str, stack: contextlib.ExitStack) -> Layered:
    """How the layers of a sandbox lie over paths of its project: what is below `shows`, the layers have something of that name
    (`named`), or it is `hidden`, because a directory on the way was deleted, replaced or moved."""
    at, seen = view
    if not seen.layers:
        return lambda _path: "shows"
    root = Stack(seen.layers, seen.encoding, stack).root()
    prefix = os.path.relpath(project, at)
    folders: dict[str, Folder | Way] = {"": root}

    def folder(path: str) -> Folder | Way:
        found = folders.get(path)
        if found is None:
            found = folders[path] = _step(folder(os.path.dirname(path)), path)
        return found

    def way(path: str) -> Way:
        place = os.path.normpath(os.path.join(prefix, path))
        parent = folder(os.path.dirname(place))
        if not isinstance(parent, Folder):
            return parent
        with parent:
            if os.path.basename(place) in parent.entries():
                return "named"
            return "hidden" if os.path.basename(place) in parent.gone() else "shows"

    return way


def _step(parent: Folder | Way, path: str) -> Folder | Way:
    """A directory of the layers; or what holds for everything below it."""
    if not isinstance(parent, Folder):
        return parent
    name = os.path.basename(path)
    with parent:
        if name in parent.gone():
            return "hidden"
        if name not in parent.entries():
            return "shows"
        if name not in parent.directories():
            return "hidden"
        found = parent.folder(name)
    return found if found.below == path else "hidden"
