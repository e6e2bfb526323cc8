"""`race`: several approaches at once, from one base, each in a sandbox of its own; verified, ranked, and the best one promoted.

    1   what was asked is written down
    2   one sandbox is made, and the set-up runs in it once: the template that all attempts are forks of
    3   each attempt runs and is verified, so many at once as there is room for (`attempts.py`)
    4   they are ranked, with the reason (`experiments/ranking.py`)
    5   the winner is promoted, if that was asked for

Each step is written down before it begins, so whoever comes after an interruption knows what is missing (`resume`).
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elsewhere import units
from elsewhere.errors import ElsewhereError, NotFound, UsageError
from elsewhere.experiments import ranking, records
from elsewhere.experiments.model import Race
from elsewhere.experiments.records import Attempt, Experiment
from elsewhere.experiments.report.words import last_line
from elsewhere.network.ports import Publish
from elsewhere.operations import creating, sandboxes
from elsewhere.operations.admission import Pause
from elsewhere.operations.bases import Teller
from elsewhere.operations.creating import Wish
from elsewhere.operations.documents.sandboxes import sandbox_document
from elsewhere.operations.entering import enter
from elsewhere.operations.projects import find_project, refuse_inside
from elsewhere.operations.promoting import Agree, Asked, Promoted
from elsewhere.operations.racing.attempts import attempted
from elsewhere.operations.racing.commands import run_line
from elsewhere.operations.racing.course import Course, Scorer, Work, is_there, thrown_away
from elsewhere.operations.racing.taking import promoted, standing
from elsewhere.operations.settings import resolve, stages
from elsewhere.paths import is_within, relative
from elsewhere.sandbox import ending
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.request import Caller
from elsewhere.storage import repositories
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Raced", "Telling", "clear", "race", "resume", "summary"]

_LOOK_S = 0.02
_TELL_S = 0.2
_ENDING_S = 30.0
_REFRESHING_S = 60.0
_FOR_EACH_PROCESSOR = 4
_LONGEST_LINE = 200


@dataclass(frozen=True, slots=True)
class Telling:
    """Who is told what goes on: `watch` gets the document as it changes, `remark` words, `teller` how far a copy is."""

    watch: Callable[[dict[str, Any]], None] | None = None
    remark: Callable[[str], None] | None = None
    teller: Teller | None = None
    pause: Pause = time.sleep


@dataclass(frozen=True, slots=True)
class Raced:
    """`promoted` is what became of the winner's changes, `refused` why nothing did."""

    experiment: Experiment
    promoted: Promoted | None = None
    refused: ElsewhereError | None = None

    @property
    def exit_code(self) -> int:
        if self.refused is not None:
            return self.refused.exit_code
        return 0 if self.experiment.winner is not None else 5


def race(
    asked: Race,
    project: str | None = None,
    *,
    here: str | None = None,
    works: Mapping[str, Work] | None = None,
    scorer: Scorer | None = None,
    agree: Agree | None = None,
    thinks: bool = False,
    telling: Telling | None = None,
) -> Raced:
    """`here` is where the commands start, if that is in the project: else at its top. `works` are the approaches that are Python
    functions, `scorer` a score that is one."""
    refuse_inside()
    _refuse_ports(asked)
    found, state = find_project(project, os.getcwd()), State.open()
    if asked.promote:
        stages(state, found.path)  # what is wrong with them is told before anything runs
    place = found.path if here is None else os.path.realpath(here)
    if place != found.path and is_within(place, found.path):
        asked = replace(asked, directory=relative(place, found.path))
    experiment = records.new(state, found.path, asked)
    with records.held(experiment):
        return _raced(state, experiment, asked, works or {}, scorer, Asked(agree=agree, thinks=thinks), telling or Telling())


def _refuse_ports(asked: Race) -> None:
    """A port of the host leads to one sandbox, and those of a race are several, which end with it."""
    for text in asked.settings.get("network.publish", ()):
        inside = Publish.parse(text).inside
        raise UsageError(
            "bad_publish",
            f"--publish {text} is not for a race: it has several sandboxes, and nothing runs in them afterwards",
            hint=f"leave it out; then, for the sandbox of one approach: elsewhere network ID --publish 0:{inside}",
        )


def resume(wanted: str, *, agree: Agree | None = None, thinks: bool = False, telling: Telling | None = None) -> Raced:
    """Go on with what is missing."""
    refuse_inside()
    state = State.open()
    found = records.find(state, wanted)
    with records.held(found):
        found = records.load(state, found.id)
        asked, promotion = Race.unpacked(found.race), Asked(agree=agree, thinks=thinks)
        if found.state == "finished":
            return _taken(state, found, asked, promotion, telling or Telling())
        left = [one for one in found.attempts if one.state != "done"]
        if asked.scored_by_python or any(one.command is None for one in left):
            raise UsageError(
                "python_approach",
                f"the experiment {found.id!r} has approaches or a score that are Python functions, which cannot be written down",
                hint="race again from the program that began it",
            )
        found.caller, found.state, found.ended_at, found.reason = list(Caller.this()), "running", None, ""
        found.save()
        clear(state, found)
        for one in left:
            _as_far_as_it_got(state, one)
        found.save()
        return _raced(state, found, asked, {}, None, promotion, telling or Telling())


def _as_far_as_it_got(state: State, one: Attempt) -> None:
    """One whose command has ended goes on with its verification; any other starts again, in another sandbox."""
    there = one.sandbox is not None and is_there(state, one.sandbox)
    if one.exit_code is not None and one.changes is not None and there:
        one.why = one.died_of  # not that it was interrupted
        return
    if there and one.sandbox is not None:
        sandboxes.discard(one.sandbox)
    one.start_again()


def _raced(
    state: State,
    experiment: Experiment,
    asked: Race,
    works: Mapping[str, Work],
    scorer: Scorer | None,
    promotion: Asked,
    telling: Telling,
) -> Raced:
    settings = resolve(state, experiment.project)
    timeout = settings["experiments.timeout"]
    course = Course(state, experiment, asked, timeout, works, scorer)
    most = settings["experiments.at_once"] or _FOR_EACH_PROCESSOR * (_processors() or 1)
    try:
        if telling.watch is not None:
            telling.watch(_live_document(course))
        left = [one for one in experiment.attempts if one.state != "done"]
        already = next((one for one in experiment.attempts if one.state == "done" and one.verified), None)
        if asked.first and already is not None:
            course.winner = ranking.described(already, experiment.attempts)
            course.won.set()
        if left and _prepare(course, telling):
            _run_all(course, left, most, telling)
        _decide(course)
        if telling.watch is not None:
            telling.watch(_live_document(course))  # before anybody is asked about its promotion
        outcome = _taken(state, experiment, asked, promotion, telling)
    except BaseException as error:
        experiment.reason = error.message if isinstance(error, ElsewhereError) else "the race was ended before it was over"
        experiment.end("cancelled")
        raise
    finally:
        _let_go(course, settings["experiments.sandboxes"])
    experiment.end("finished")
    if telling.watch is not None:
        telling.watch(_live_document(course))
    return outcome


def _processors() -> int:
    return len(os.sched_getaffinity(0))


# -- the template ---------------------------------------------------------------------------------------------------------------


def _prepare(course: Course, telling: Telling) -> bool:
    """The sandbox that all start from; whether there is one to start from."""
    experiment, asked = course.experiment, course.race
    if experiment.template is not None:
        if not is_there(course.state, experiment.template):
            raise NotFound(
                "base_gone",
                f"what the attempts of {experiment.id!r} start from, the sandbox {experiment.template!r}, is gone",
                hint="race again; elsewhere experiments show tells what was asked",
            )
        if asked.setup is None or (experiment.setup is not None and experiment.setup["exit_code"] == 0):
            return True
        sandboxes.discard(experiment.template)
        experiment.template = None
    wish = Wish(
        project=experiment.project,
        base=asked.base,
        base_ref=asked.base_ref,
        labels={"experiment": experiment.id},
        story="race",
        settings=asked.settings,
        publishes=False,
    )
    made, _ = creating.create(wish, telling.teller, telling.remark, telling.pause)
    experiment.template, experiment.base = made.id, sandbox_document(made)["base"]
    experiment.save()
    sandboxes.extend(made.id, None)  # an interrupted race may go on much later; whoever forgets it takes it along
    try:
        _refresh_index(course)
        return asked.setup is None or _set_up(course, asked.setup, telling)
    finally:
        ending.stop(course.state, made.id, 1.0)


def _refresh_index(course: Course) -> None:
    """Git's index knows the times of the files that were copied: `git apply --index` would take all of them for changed."""
    experiment = course.experiment
    if experiment.base["kind"] == "live" or repositories.look(experiment.project) is None:
        return
    box = enter(course.state, course.template)
    try:
        run_line(box, "git update-index -q --refresh >/dev/null 2>&1 || true", (), _REFRESHING_S, os.devnull)
    finally:
        box.close()


def _set_up(course: Course, line: str, telling: Telling) -> bool:
    experiment = course.experiment
    experiment.setup = {"command": line, "exit_code": None, "duration_ms": None}
    experiment.save()
    box = enter(course.state, course.template)
    try:
        pairs = list(course.race.env.items())
        telling.pause(0.0)
        output, directory = experiment.file("setup.out"), course.race.directory
        ended = run_line(box, line, pairs, course.timeout, output, _patient(telling), directory)
    finally:
        box.close()
    code = ended.exit_code if ended.good else ended.exit_code or 1
    experiment.setup = {"command": line, "exit_code": code, "duration_ms": round(ended.seconds * 1000, 3)}
    if not ended.good:
        for one in experiment.attempts:
            one.state, one.reason, one.why = "done", "refused", f"the set-up failed: {_ended_with(ended.reason, code)}"
    experiment.save()
    return ended.good


def _ended_with(reason: str, code: int) -> str:
    return f"it ended with {code}" if reason == "exited" else f"{reason}, it ended with {code}"


def _patient(telling: Telling) -> Callable[..., bool]:
    """Somebody who has had enough raises, which ends the set-up."""

    def watch(*_: object) -> bool:
        telling.pause(0.0)
        return True

    return watch


# -- all of them ----------------------------------------------------------------------------------------------------------------


def _run_all(course: Course, left: Sequence[Attempt], most: int, telling: Telling) -> None:
    waiting: queue.SimpleQueue[Attempt] = queue.SimpleQueue()
    for one in left:
        waiting.put(one)

    def work() -> None:
        while course.wanted():
            try:
                one = waiting.get_nowait()
            except queue.Empty:
                return
            attempted(course, one)

    threads = [
        threading.Thread(target=work, name=f"elsewhere-race-{number}", daemon=True) for number in range(min(most, len(left)))
    ]
    for thread in threads:
        thread.start()
    try:
        told = 0.0
        while any(thread.is_alive() for thread in threads):
            telling.pause(_LOOK_S)
            if telling.watch is not None and time.monotonic() - told >= _TELL_S:
                told = time.monotonic()
                telling.watch(_live_document(course))
    except BaseException:
        course.over.set()
        deadline = time.monotonic() + _ENDING_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    for one in left:
        if one.state != "done":
            one.state, one.reason, one.why = "done", "cancelled", f"was not begun, since {course.winner} verified first"


def _live_document(course: Course) -> dict[str, Any]:
    """With what each of those that run uses now, and its last line."""
    said = records.document(course.experiment)
    for one in said["experiment"]["approaches"]:
        one.update(course.news.get(f"{one['name']}-{one['attempt']}", {}))
    return said


def _decide(course: Course) -> None:
    experiment, lower = course.experiment, course.race.lower
    ranked = ranking.rank(experiment.attempts, lower=lower)
    best = ranked[0] if ranked and ranked[0].verified else None
    experiment.winner = None if best is None else best.name
    experiment.winner_attempt = None if best is None else best.attempt
    if experiment.setup is not None and experiment.setup["exit_code"]:
        said = last_line(records.tail(experiment.file("setup.out")))
        experiment.reason = f"the set-up failed with {experiment.setup['exit_code']}, so nothing was tried"
        experiment.reason += f"; the last that it said: {said[:_LONGEST_LINE]}" if said else ""
    else:
        experiment.reason = ranking.reason(ranked, lower=lower)
    experiment.save()


# -- taking the result ----------------------------------------------------------------------------------------------------------


def _taken(state: State, experiment: Experiment, asked: Race, promotion: Asked, telling: Telling) -> Raced:
    """What cannot be promoted is no failure of the race: the winner stays the winner, and `resume` tries again."""
    if not asked.promote or experiment.winner is None or standing(state, experiment) is not None:
        return Raced(experiment)
    try:
        return Raced(experiment, promoted(state, experiment, experiment.attempt(), promotion, telling.remark))
    except ElsewhereError as error:
        return Raced(experiment, refused=error)


# -- what is left ---------------------------------------------------------------------------------------------------------------


def _let_go(course: Course, lifetime: float) -> None:
    """Sandboxes of attempts stay for a while. The template stays as long as something may go on from it."""
    experiment = course.experiment
    for one in experiment.attempts:
        if one.sandbox is not None and one.state == "done":
            with contextlib.suppress(ElsewhereError, OSError):
                sandboxes.extend(one.sandbox, lifetime)
    over = all(one.state == "done" for one in experiment.attempts)
    if over and experiment.template is not None:
        with contextlib.suppress(ElsewhereError, OSError):
            thrown_away(course.state, experiment.template)
    ending.sweep(course.state, layers=True)


def clear(state: State, experiment: Experiment) -> list[str]:
    """Of an experiment that nobody runs: nothing of it goes on, and what it only needed for a moment goes."""
    known = {one.sandbox for one in experiment.attempts} | {experiment.template}
    gone = []
    for found in record.load_all(state)[0]:
        if found.labels.get("experiment") != experiment.id:
            continue
        ours = found.id in known or (found.origin or {}).get("sandbox") in known
        with contextlib.suppress(ElsewhereError, OSError):
            if ours and found.id not in known:
                sandboxes.discard(found.id)
                gone.append(found.id)
            elif ours and found.state == "running":
                ending.stop(state, found.id, 0.0)
    return gone


def summary(experiment: Experiment) -> str:
    """`3 attempts, 2 verified`."""
    verified = sum(one.verified for one in experiment.attempts)
    return f"{units.count(len(experiment.attempts), 'attempt')}, {verified} verified"
