"""`promote`: a sandbox's changes, moved to reality. The way back is in `undoing.py`, stages are in `staging.py`.

    1   commits made inside are packed, inside (`fetching.py`)
    2   what runs in the sandbox is stopped for a moment, so that what is read belongs together
    3   its changes become pieces (`gathering.py`), and these a plan, three-way (`promotion/planning.py`)
    4   one conflict, and nothing is done at all; `resolve` makes a fork to settle them in (`resolving.py`)
    5   what would run by itself in reality is shown, and has to be agreed to
    6   commits become a branch; then the files are moved, all or none (`promotion/applying.py`)

Whoever promotes again goes on from what was promoted before.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from typing import Any

from elsewhere import units
from elsewhere.changes import threeway
from elsewhere.changes.globs import matcher
from elsewhere.changes.renames import with_renames
from elsewhere.errors import Conflict, ElsewhereError, Refused, StateError, UsageError
from elsewhere.operations import earlier, fetching, forgetting, gathering, passage, recovering, repeating, snapshots, staging
from elsewhere.operations.earlier import named
from elsewhere.operations.fetching import Bundle, bundled
from elsewhere.operations.projects import refuse_inside
from elsewhere.operations.settings import resolve
from elsewhere.operations.settings import stages as stages_of
from elsewhere.paths import relative
from elsewhere.promotion import applying, freezing, heads, planning, records, replaying, selecting
from elsewhere.promotion.choosing import Choices
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.planning import Plan
from elsewhere.promotion.records import Promotion
from elsewhere.promotion.selecting import Selection
from elsewhere.promotion.settling import next_steps
from elsewhere.promotion.stages import Stage, ahead
from elsewhere.sandbox import contents
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Agree", "Asked", "Prepared", "Promoted", "approve", "conflict_document", "prepared", "promote"]

_LARGEST_BASIS = 64 << 20
Mark = tuple[str, str]
Agree = Callable[[Sequence[Mark]], bool]


@dataclass(frozen=True, slots=True)
class Asked:
    """`paths` takes a part, by globs; `ours` and `theirs` settle conflicts; `ignored` takes what git ignores as well, `outside`
    what lies outside of the project, as far as it fits; `leave` are absolute paths that stay behind. `branch` is where commits
    go, with `checkout` HEAD as well. `replay` runs the sandbox's commands again instead of moving files. `to` is the stage to go
    to, if the project has stages. `agree` is asked about what would run by itself, and about commands; if that is a person, it
    `thinks`, and nothing waits meanwhile."""

    paths: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    ignored: bool = False
    outside: tuple[str, ...] = ()
    commits: bool = True
    branch: str | None = None
    checkout: bool = False
    replay: bool = False
    to: str | None = None
    dry_run: bool = False
    agree: Agree | None = None
    thinks: bool = False
    leave: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a promotion would do; paths that run by themselves are `marked`, with the reason. `touched` is all that the sandbox
    changed, chosen or not, but for git's own files, by root and path."""

    record: Record
    selection: Selection
    pieces: list[Piece]
    plan: Plan
    marked: list[Mark]
    touched: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Promoted:
    """`promotion` is None for a dry run; then `stages` says what would be done at each. `commits` says which would come, or
    came."""

    ready: Prepared
    promotion: Promotion | None = None
    commits: dict[str, Any] | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_refused(self) -> bool:
        """Whether a dry run says that nothing would be done."""
        if self.promotion is not None:
            return False
        conflicts = self.ready.plan.conflicts
        if any(one.reason == "markers_left" for one in conflicts):
            return True
        return any(one["conflicts"] for one in self.stages) if self.stages else bool(conflicts)


def promote(wanted: str, asked: Asked, box: Live | None = None, tell: Callable[[str], None] = lambda _: None) -> Promoted:
    """Conflicts raise, and nothing was done; so does what somebody does not agree to. A dry run only tells."""
    refuse_inside()
    _refuse_together(asked)
    state = State.open()
    found = record.load(state, record.find(state, wanted))
    recovering.recover(state, found.project)
    stages = _stages(state, found, asked)
    to = asked.to or (stages[0].name if stages else "")
    with contextlib.ExitStack() as stack:
        bundle = stack.enter_context(bundled(state, found, box)) if asked.commits and not asked.replay else None
        if bundle is None and (asked.branch or asked.checkout):
            raise fetching.none_to_fetch(found, "--branch" if asked.branch else "--checkout")
        if asked.checkout:
            _refuse_a_part(found.id, asked, bundle)
        # With stages, a choice may be about a conflict with any of them, and each is planned by itself.
        wanted_by_all = replace(asked, ours=(), theirs=()) if stages else asked
        if asked.thinks and not asked.dry_run:
            asked = _thought_about(state, found.id, asked, wanted_by_all, box, staged=bool(stages))
        with prepared(state, found.id, wanted_by_all, box) as ready:
            if asked.paths and ready.selection.is_empty:
                raise UsageError(
                    "nothing_fits",
                    f"--path {' '.join(asked.paths)!r} fits nothing that the sandbox {found.id!r} changed",
                    hint=f"elsewhere diff {found.id} --name-only lists what there is",
                )
            if asked.dry_run:
                if asked.checkout and bundle is not None:
                    heads.check(found.project, bundle.base_head)
                foreseen = staging.foreseen(state, found, ready.pieces, stages, to, Choices(asked.ours, asked.theirs))
                come = None if bundle is None else fetching.coming(bundle, found.id, asked.branch)
                told = Promoted(ready, None, come, foreseen)
                if bundle is not None and come is not None and not told.is_refused:
                    fetching.foresee(bundle, come)
                return told
            _refuse_conflicts(ready, [one for one in ready.plan.conflicts if not stages or one.reason == "markers_left"])
            _agreed(ready.marked, asked.agree)
            if not stages:
                promotion = _moved(state, ready, asked, bundle, tell)
            else:
                left = {stage.name for stage in ahead(stages, (), to)}
                promotion = _frozen(state, ready, asked, bundle, left, stack)
        if stages:
            _walked(state, promotion, stages, to, tell)
    forgetting.forget(state)
    return Promoted(ready, promotion, promotion.commits)


def _refuse_together(asked: Asked) -> None:
    """Options that would have no effect beside another one; and commands cannot be run for a part of what they do."""
    given = {
        "--branch": asked.branch is not None,
        "--checkout": asked.checkout,
        "--no-commits": not asked.commits,
        "--path": bool(asked.paths),
        "--replay": asked.replay,
    }
    useless = {"--replay": ("--branch", "--checkout", "--no-commits", "--path"), "--no-commits": ("--branch", "--checkout")}
    for one, others in useless.items():
        for other in others:
            if given[one] and given[other]:
                raise UsageError("options_together", f"{other} means nothing beside {one}", hint="leave one of them out")


def _refuse_a_part(sandbox_id: str, asked: Asked, bundle: Bundle | None) -> None:
    """HEAD can only go where files go: otherwise what stays behind would look as if somebody had reverted it."""
    if asked.paths:
        raise UsageError(
            "options_together", "--checkout is about the whole change, and --path takes a part", hint="leave one of them out"
        )
    if bundle is not None and bundle.answer.ref != "HEAD":
        raise UsageError(
            "no_commits",
            f"none of the commits made in {sandbox_id!r} is on the branch that HEAD is on, and --checkout is about that",
            hint="leave it out: the branches are fetched all the same",
        )


def _thought_about(state: State, sandbox_id: str, asked: Asked, wanted: Asked, box: Live | None, *, staged: bool) -> Asked:
    """A person is asked while the sandbox goes on. What is there afterwards, and was not agreed to, is refused."""
    with prepared(state, sandbox_id, wanted, box) as ready:
        marks = [*ready.marked, *(repeating.marks(repeating.succeeded(ready.record)) if asked.replay else ())]
        if ready.plan.conflicts and not staged:
            return asked  # nothing will be done
    if marks and (asked.agree is None or not asked.agree(marks)):
        _agreed(marks, None)
    return replace(asked, agree=lambda found: set(found) <= set(marks))


def _stages(state: State, found: Record, asked: Asked) -> list[Stage]:
    """Those of the project. Without `to`, a change goes to the first."""
    stages = stages_of(state, found.project)
    if asked.to is not None:
        ahead(stages, (), asked.to)  # or there is none of that name
    if stages and asked.checkout:
        raise UsageError(
            "not_with_stages",
            f"--checkout is for projects without stages, and {found.project!r} has some",
            hint="leave it out: commits are in the branch that is fetched",
        )
    return stages


@contextlib.contextmanager
def prepared(state: State, sandbox_id: str, asked: Asked, box: Live | None) -> Iterator[Prepared]:
    """The plan, for as long as nothing in the sandbox goes on."""
    with snapshots.quiet(state, sandbox_id, box) as held:
        found = held.found
        if not os.path.isdir(found.project):
            raise Conflict(
                "project_gone", f"the project {found.project!r} is not there any more", hint=f"elsewhere diff {found.id} --patch"
            )
        layers = held.layers
        changes = with_renames(contents.changes_of(state, found, layers))
        selection = selecting.select(
            changes, found.project, paths=asked.paths, ignored=asked.ignored, outside=asked.outside, leave=asked.leave
        )
        if unfit := selecting.unfit(selection, asked.outside, found.project):
            raise UsageError(
                "nothing_fits",
                f"--outside {unfit[0]!r} fits nothing that the sandbox {found.id!r} changed outside of its project",
                hint=f"elsewhere diff {found.id} --name-only lists what there is",
            )
        fits, everything = matcher(asked.paths, found.project), (*changes.entries, *changes.directories)
        changed = {end.rstrip("/") for one in everything for end in (one.path, one.source) if end is not None}  # left out or not
        pieces = gathering.gathered(
            state,
            found,
            selection.inside,
            selection.outside,
            lambda path: fits(path) and path not in changed,
            gathering.emptied(state, found, layers),
        )
        plan = planning.plan(pieces, Choices(asked.ours, asked.theirs))
        plan.conflicts += earlier.left_marked(state, found, pieces)
        touched = repeating.touched(changed, found.project, state.path)
        yield Prepared(found, selection, pieces, plan, _marks(state, found, selection, plan), touched)


def _marks(state: State, found: Record, selection: Selection, plan: Plan) -> list[Mark]:
    """What would run by itself, of that which reality does not have already."""
    runs = resolve(state, found.project)["promotion.runs"]
    new = {os.path.join(one.root, one.path) for one in plan.operations}
    new |= {os.path.join(one.root, one.path) for one in plan.conflicts}
    marks = selecting.marks([*selection.inside, *selection.outside], found.project, runs)
    return [(relative(path, found.project), why) for path, why in marks if path.rstrip("/") in new]


def _refuse_conflicts(ready: Prepared, conflicts: Sequence[planning.Conflicting]) -> None:
    if not conflicts:
        return
    found = ready.record
    raise Conflict(
        "promotion_conflict",
        f"{units.count(len(conflicts), 'conflict')} between the sandbox {found.id!r} and reality; nothing was done",
        hint=f"elsewhere promote {found.id} "
        + next_steps(
            (one.reason for one in conflicts),
            "--ours PATH takes the sandbox's",
            "--theirs PATH leaves reality's",
            "--path GLOB takes a part",
            fork="--resolve makes a sandbox to settle them in",
        ),
        detail={"conflicts": [conflict_document(one, found.project) for one in conflicts]},
    )


def conflict_document(one: planning.Conflicting, project: str) -> dict[str, str]:
    return {"path": named(one.root, one.path, project), "reason": one.reason, "sentence": one.sentence}


def _agreed(marks: Sequence[Mark], agree: Agree | None, what: str = "path") -> None:
    if not marks or (agree is not None and agree(marks)):
        return
    raise Refused(
        "not_agreed",
        f"{units.count(len(marks), what)} to be agreed to, the first {marks[0][0]!r}: {marks[0][1]}",
        hint="look at what is to be moved with elsewhere diff --patch; --yes agrees",
        detail={"marked": [{"path": path, "why": why} for path, why in marks]},
    )


# -- through stages -------------------------------------------------------------------------------------------------------------


def _frozen(
    state: State, ready: Prepared, asked: Asked, bundle: Bundle | None, stages: set[str], stack: contextlib.ExitStack
) -> Promotion:
    """The change as it is now, to be moved on even when its sandbox is gone; or one of the same content that came part of the
    way through these stages before. It is held from now on."""
    digest, kind, commands = passage.digest_of(ready.pieces), "replay" if asked.replay else "promote", _commands(ready, asked)
    for one in reversed(records.listed(state)):
        passed = {entry["name"] for entry in one.stages if entry["status"] == "passed"}
        same = (one.sandbox, one.change, one.kind, one.commands) == (ready.record.id, digest, kind, commands)
        if same and one.status != "undone" and one.stages and stages - passed:
            stack.enter_context(records.held(one))
            again = records.load(state, one.id)
            again.choices = [list(asked.ours), list(asked.theirs)]
            if bundle is not None:
                fetching.fetch(again, bundle, asked.branch, checkout=asked.checkout)
            return again
    promotion = records.new(
        state,
        kind,
        ready.record.id,
        ready.record.project,
        base_at=ready.record.base["at"],
        change=digest,
        commands=commands,
        choices=[list(asked.ours), list(asked.theirs)],
        marked=[{"path": path, "why": why} for path, why in ready.marked],
    )
    stack.enter_context(records.held(promotion, wait=True))
    try:
        freezing.freeze(ready.pieces, promotion.frozen)
        if asked.replay:
            replaying.touch(promotion, ready.touched)
        if bundle is not None:
            fetching.fetch(promotion, bundle, asked.branch, checkout=asked.checkout)
    except (ElsewhereError, OSError) as error:
        raise _refused(promotion, error) from error
    return promotion


def _walked(state: State, promotion: Promotion, stages: list[Stage], to: str, tell: Callable[[str], None]) -> None:
    """Whoever calls holds it."""
    pieces = freezing.thawed(promotion.frozen)
    choices = Choices(*(tuple(chosen) for chosen in promotion.choices))
    try:
        staging.walk(state, promotion, pieces, stages, to, choices, tell)
    except ElsewhereError as error:
        if not promotion.stages:
            promotion.end("refused", error.message)  # before it came to the first
        raise
    finally:
        _sum_up(promotion)


def _sum_up(promotion: Promotion) -> None:
    """What was moved anywhere, and what is in the way of the last stage that it came to."""
    reached = [one for one in promotion.stages if one["status"] != "pending"]
    passed = [one for one in reached if one["status"] == "passed"]
    promotion.applied = sorted({path for one in passed for path in (*one["applied"], *one["merged"])})
    promotion.merged = sorted({path for one in passed for path in one["merged"]})
    promotion.deleted = sorted({path for one in passed for path in one["deleted"]})
    promotion.conflicts = list(reached[-1]["conflicts"]) if reached else []
    promotion.save()


def approve(wanted: str, tell: Callable[[str], None] = lambda _: None) -> Promotion:
    """A person agrees, and the change goes on."""
    refuse_inside()
    state = State.open()
    recovering.recover(state, records.find(state, wanted).project)
    promotion = records.find(state, wanted)
    stages = stages_of(state, promotion.project)
    with records.held(promotion):
        promotion = records.load(state, promotion.id)
        staging.approve(promotion)
        _walked(state, promotion, stages, promotion.stage or stages[-1].name, tell)
    return promotion


# -- doing it -------------------------------------------------------------------------------------------------------------------


def _moved(state: State, ready: Prepared, asked: Asked, bundle: Bundle | None, tell: Callable[[str], None]) -> Promotion:
    promotion = records.new(
        state,
        "replay" if asked.replay else "promote",
        ready.record.id,
        ready.record.project,
        base_at=ready.record.base["at"],
        commands=_commands(ready, asked),
        choices=[list(asked.ours), list(asked.theirs)],
    )
    with records.held(promotion, wait=True):
        _fill(promotion, ready)
        try:
            if bundle is not None:
                fetching.fetch(promotion, bundle, asked.branch, checkout=asked.checkout)
            if asked.replay:
                replaying.touch(promotion, ready.touched)
                replaying.replay(promotion, ready.pieces, tell)
            else:
                _keep_basis(promotion, ready)
                applying.apply(promotion.application(), ready.plan.operations)
        except (ElsewhereError, OSError) as error:
            raise _refused(promotion, error) from error
        with contextlib.suppress(OSError):  # it counts; if there is no room to say so, whoever comes next does
            promotion.end("applied")
    return promotion


def _commands(ready: Prepared, asked: Asked) -> list[dict[str, Any]]:
    """What is to be run again, with somebody's agreement."""
    if not asked.replay:
        return []
    found = repeating.commands(ready.record)
    _agreed(repeating.marks(found), asked.agree, "command")
    return found


def _fill(promotion: Promotion, ready: Prepared) -> None:
    """What it is about to do, by name."""
    for one in ready.plan.operations:
        (promotion.deleted if one.wanted is None else promotion.applied).append(named(one.root, one.path, promotion.project))
    promotion.merged = list(ready.plan.merged)
    promotion.marked = [{"path": path, "why": why} for path, why in ready.marked]
    promotion.save()


def _keep_basis(promotion: Promotion, ready: Prepared) -> None:
    """What the sandbox has at each path that is in reality now: its next promotion goes on from that. Very large files do
    without: of those, what both sides change is a conflict in any case. What an earlier promotion brought is that one's, and goes
    with it."""
    there, same = {*ready.plan.applied, *ready.plan.merged}, set(ready.plan.same)
    kept = []
    for piece in ready.pieces:
        name = named(piece.root, piece.path, promotion.project)
        if name in there or (name in same and not threeway.equal(piece.before, piece.after)):
            kept.append(piece)
    small = [piece._replace(before=None) for piece in kept if piece.after is None or piece.after.size <= _LARGEST_BASIS]
    if small:
        freezing.freeze(small, os.path.join(promotion.directory, earlier.BASIS))


def _refused(promotion: Promotion, reason: ElsewhereError | OSError) -> ElsewhereError:
    """Nothing was done, or all of it is taken back; what is to be raised."""
    error = reason if isinstance(reason, ElsewhereError) else _failed(reason)
    left = replaying.put_back(promotion, promotion.application()) if promotion.kind == "replay" else []
    if left:
        words = f"these could not be put back, and stay: {', '.join(left)}"
        error.message += f"; {words}"
        error.args = (error.message,)
        error.detail["not_reversed"] = words
    if error.code == "not_reversed":
        promotion.note = error.message
        promotion.save()  # it has not ended: whoever comes next goes on with putting back
        return error
    if heads.checkout_state(promotion.checkout) == "moved":
        heads.undo_checkout(promotion.checkout)
    promotion.drop_contents()
    if promotion.status not in records.ENDS:
        found = error.detail.get("conflicts")
        promotion.conflicts = list(found) if isinstance(found, list) else []
        promotion.end("refused" if isinstance(error, Conflict) else "failed", error.message)
    return error


def _failed(reason: OSError) -> StateError:
    where = reason.filename or "the journal"
    if reason.errno in (errno.ENOSPC, errno.EDQUOT):
        return StateError("no_room", f"{where}: {reason.strerror}; nothing was done", hint="free some space, and try again")
    return StateError("apply_failed", f"{where}: {reason.strerror}; nothing was done", hint="elsewhere doctor looks around")
