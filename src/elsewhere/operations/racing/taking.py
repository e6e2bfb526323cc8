"""Moving the result of an attempt to reality: an ordinary promotion of its sandbox, or of what is kept of it."""

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace

from elsewhere.errors import Conflict, ElsewhereError, NotFound, Refused
from elsewhere.experiments import ranking
from elsewhere.experiments.model import Race
from elsewhere.experiments.records import Attempt, Experiment
from elsewhere.operations import creating, promoting, sandboxes
from elsewhere.operations.creating import Wish
from elsewhere.operations.diffing import difference
from elsewhere.operations.entering import enter
from elsewhere.operations.files import files_of
from elsewhere.operations.promoting import Asked, Promoted
from elsewhere.operations.racing.commands import run_line
from elsewhere.operations.racing.course import END, HEADS, is_there, thrown_away
from elsewhere.paths import relative
from elsewhere.promotion import records as promotions
from elsewhere.promotion.settling import next_steps
from elsewhere.storage.state import State

__all__ = ["promoted", "standing"]

# Said to git in a sandbox that is thrown away: content stays as it is, whatever the project's attributes say.
_AS_IT_IS = (
    'if own=$(git rev-parse --git-path info/attributes 2>/dev/null); then mkdir -p "$(dirname "$own")" &&'
    " echo '* -text -ident -filter -working-tree-encoding' > \"$own\"; fi && "
)


def promoted(
    state: State, experiment: Experiment, one: Attempt, asked: Asked, tell: Callable[[str], None] | None = None
) -> Promoted:
    """What an attempt changed and was verified with, moved to reality; the experiment knows by which promotion, or why not. What
    it was verified without stays behind, and so do commits: files were verified, and commits may hold others."""
    leave = frozenset(os.path.join(experiment.project, path) for path in one.put_back)
    whole = Race.unpacked(experiment.race).verify_from_approach
    asked = replace(asked, leave=leave, commits=asked.commits and whole)
    try:
        done = _promoted(state, experiment, one, asked, tell or (lambda _: None))
    except ElsewhereError as error:
        if isinstance(error, Conflict) and error.code == "promotion_conflict":
            conflicts = error.detail.get("conflicts")
            error.hint = f"elsewhere experiments promote {experiment.id} {one.name}:{one.attempt} with " + next_steps(
                (found["reason"] for found in (conflicts if isinstance(conflicts, list) else ())),
                "--ours PATH takes the attempt's",
                "--theirs PATH leaves reality's",
                "--path GLOB takes a part",
            )
        experiment.refused = f"{ranking.described(one, experiment.attempts)}: {error.message}"
        experiment.save()
        raise
    experiment.refused = None
    if done.promotion is not None:
        experiment.promotion = done.promotion.id
        experiment.promotions.append(done.promotion.id)
    experiment.save()
    if (left := one.left_behind) and tell is not None:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        why = ", since it was verified without" if one.verified else ""
        tell(f"left behind{why}: {', '.join(left[:5])}{more}")
    if one.commits and not whole and tell is not None:
        tell(f"commits that were made inside stay there; elsewhere promote {one.sandbox} --dry-run tells about them")
    return done


def _promoted(state: State, experiment: Experiment, one: Attempt, asked: Asked, tell: Callable[[str], None]) -> Promoted:
    if one.state != "done" or one.changes is None:
        raise Refused(
            "attempt_unfinished",
            f"{ranking.described(one, experiment.attempts)} did not come to its end: {one.why or one.state}",
            hint="race again" if one.state == "done" else f"elsewhere experiments resume {experiment.id}",
        )
    if one.sandbox is None or not is_there(state, one.sandbox):
        with _made_again(state, experiment, one) as sandbox_id:
            return _moved(sandbox_id, one, asked, tell)
    _refuse_changed(experiment, one, one.sandbox)
    try:
        return _moved(one.sandbox, one, asked, tell, again=one.sandbox in _in_reality(state, experiment))
    finally:  # whoever fetched commits from it had to start it
        with contextlib.suppress(ElsewhereError):
            sandboxes.stop_if_idle(one.sandbox)


def _moved(sandbox_id: str, one: Attempt, asked: Asked, tell: Callable[[str], None], *, again: bool = False) -> Promoted:
    """What there is to move. If that is nothing, no promotion is made of it; `again`: something of it was moved before."""
    if again or not (one.changes or {}).get("files"):
        foreseen = promoting.promote(sandbox_id, replace(asked, dry_run=True))
        plan = foreseen.ready.plan
        if again and not (plan.operations or plan.conflicts or foreseen.stages):
            return foreseen  # all of it is there
        if not (foreseen.ready.pieces or foreseen.commits):
            return foreseen
    return promoting.promote(sandbox_id, asked, tell=tell)


def standing(state: State, experiment: Experiment) -> str | None:
    """The last promotion by which something of it is in reality, or is on its way. What nobody remembers was not undone."""
    for one in reversed(experiment.promotions):
        try:
            status = promotions.load(state, one).status
        except NotFound:
            return one
        if status in ("applied", "waiting"):
            return one
    return None


def _in_reality(state: State, experiment: Experiment) -> set[str]:
    """Of which sandboxes something is in reality."""
    found = set()
    for one in experiment.promotions:
        with contextlib.suppress(ElsewhereError):
            promotion = promotions.load(state, one)
            if promotion.status == "applied":
                found.add(promotion.sandbox)
    return found


def _refuse_changed(experiment: Experiment, one: Attempt, sandbox_id: str) -> None:
    """What somebody did in it since was not verified."""
    with difference(sandbox_id, END, "now") as found:
        inside = [change.path for change in found.inside.entries]
        heads = [change.path for change in found.changes.entries if HEADS.search(change.path)]
    if inside or heads:
        raise Refused(
            "attempt_changed",
            f"the sandbox {sandbox_id!r} of {ranking.described(one, experiment.attempts)} was changed since its command ended,"
            f" the first {relative((inside + heads)[0], experiment.project)!r}",
            hint=f"elsewhere rollback {sandbox_id} {END} goes back to what was verified; elsewhere promote {sandbox_id} moves"
            " what is there now",
        )


@contextlib.contextmanager
def _made_again(state: State, experiment: Experiment, one: Attempt) -> Iterator[str]:
    """A sandbox of the project as it is now, with what an attempt changed whose own sandbox is gone."""
    name = ranking.described(one, experiment.attempts)
    try:
        with open(experiment.file(f"{one.key}/changes.patch"), "rb") as stream:
            content = stream.read()
    except FileNotFoundError:
        raise NotFound(
            "attempt_gone",
            f"the sandbox of {name} is gone, and what it changed was not kept",
            hint="race again; [experiments] sandboxes says how long they stay",
        ) from None
    wish = Wish(project=experiment.project, labels={"experiment": experiment.id}, story="race", publishes=False)
    made, _ = creating.create(wish)
    try:
        if content:
            _apply(state, experiment, made.id, content, name)
        yield made.id
    finally:
        thrown_away(state, made.id)


def _apply(state: State, experiment: Experiment, sandbox_id: str, content: bytes, name: str) -> None:
    box = enter(state, sandbox_id)
    try:
        path = os.path.join(box.private_place, "race.patch")
        with files_of(box) as files:
            files.write(path, content)
        line = f"{_AS_IT_IS}git apply --binary --whitespace=nowarn {shlex.quote(path)} && rm {shlex.quote(path)}"
        ended = run_line(box, line, (), None, experiment.file("apply.out"))
    finally:
        box.close()
    if not ended.good:
        raise Conflict(
            "patch_conflict",
            f"the sandbox of {name} is gone, and what it changed does not fit to the project as it is now; nothing was done",
            hint=f"look at it: {experiment.file('')}",
            detail={"said": ended.said[-2000:]},
        )
