"""Experiments that are there: list, show, compare, report, promote; and forgetting them after their time.

An experiment's directory is its truth (`experiments/records.py`). What ran when its process was killed has ended, or is ended by
whoever looks next.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

from elsewhere.clock import Clock, wall
from elsewhere.errors import ElsewhereError, InUse, NotFound, UsageError
from elsewhere.experiments import ranking, records
from elsewhere.experiments.records import Attempt, Experiment
from elsewhere.linux import measuring
from elsewhere.operations import sandboxes
from elsewhere.operations.projects import refuse_inside
from elsewhere.operations.promoting import Asked, Promoted
from elsewhere.operations.racing import race as races
from elsewhere.operations.racing import taking
from elsewhere.operations.settings import resolve
from elsewhere.storage import trash
from elsewhere.storage.state import State, write_aside

__all__ = ["compare", "cost", "experiments", "forget", "listed_document", "promote", "report", "show"]

_REPORT = "report.html"
_MOST_OUTPUT = 256 << 10
_MOST_PATCH = 4 << 20


def experiments() -> list[Experiment]:
    """All of them, oldest first."""
    state = State.open()
    _settle(state)
    return records.listed(state)


def show(wanted: str) -> Experiment:
    state = State.open()
    _settle(state)
    return records.find(state, wanted)


def listed_document(found: list[Experiment]) -> dict[str, Any]:
    said = []
    for one in found:
        whole = records.document(one)["experiment"]
        kept = ("id", "name", "project", "state", "created_at", "ended_at", "winner", "reason", "promotion", "counts")
        said.append({key: whole[key] for key in kept})
    return {"experiments": said}


def _settle(state: State) -> None:
    """Nothing of an interrupted experiment goes on by itself."""
    for one in records.listed(state):
        if one.state == "interrupted":
            with contextlib.suppress(InUse), records.held(one):
                races.clear(state, one)


# -- compare --------------------------------------------------------------------------------------------------------------------


def compare(first: str, second: str) -> dict[str, Any]:
    """Two attempts, side by side. Each is `ID` (the winner), `ID:NAME` or `ID:NAME:ATTEMPT`; a bare `NAME` is of the last
    experiment."""
    state = State.open()
    sides = [_named(state, word) for word in (first, second)]
    said = [_side(experiment, one) for experiment, one in sides]
    paths = [{path["path"] for path in (side["changes"] or {"paths": []})["paths"]} for side in said]
    better = ranking.rank([_copy(one) for _, one in sides], lower=bool(sides[0][0].race.get("lower")))
    return {
        "compare": {
            "a": said[0],
            "b": said[1],
            "both": sorted(paths[0] & paths[1]),
            "only_a": sorted(paths[0] - paths[1]),
            "only_b": sorted(paths[1] - paths[0]),
            "better": "a" if _is_same(better[0], sides[0][1]) else "b",
            "reason": ranking.reason(better, lower=bool(sides[0][0].race.get("lower"))),
        }
    }


def _copy(one: Attempt) -> Attempt:
    """Ranking these two says nothing about the rank that each has in its own experiment."""
    made = Attempt(one.name, one.attempt, one.command)
    for name in ("verified", "score", "scored", "changes", "seconds", "why", "started_at"):
        setattr(made, name, getattr(one, name))
    return made


def _is_same(one: Attempt, other: Attempt) -> bool:
    return (one.name, one.attempt, one.started_at) == (other.name, other.attempt, other.started_at)


def _named(state: State, word: str) -> tuple[Experiment, Attempt]:
    wanted, _, rest = word.partition(":")
    name, number = _attempt(rest, "ID:NAME:2")
    try:
        found = records.find(state, wanted)
    except NotFound:
        if rest:
            raise
        found, name = records.find(state, "@last"), wanted
    return found, found.attempt(name or None, number)


def _attempt(text: str, example: str) -> tuple[str, int | None]:
    """NAME or NAME:ATTEMPT."""
    name, _, number = text.partition(":")
    if number and not (number.isascii() and number.isdigit()):
        raise UsageError("bad_attempt", f"{number!r} is no number of an attempt", hint=example)
    return name, int(number) if number else None


def _side(experiment: Experiment, one: Attempt) -> dict[str, Any]:
    every = records.document(experiment)["experiment"]["approaches"]
    found = next(side for side in every if (side["name"], side["attempt"]) == (one.name, one.attempt))
    kept = {key: value for key, value in found.items() if key not in ("samples", "output")}
    return {"experiment": experiment.id, **kept}


# -- report ---------------------------------------------------------------------------------------------------------------------


def report(wanted: str, output: str | None = None) -> str:
    """One HTML file that needs nothing else; its path."""
    from elsewhere.experiments.report import render

    found = show(wanted)
    patches = {one.key: _read(found.file(f"{one.key}/changes.patch"), _MOST_PATCH) for one in found.attempts}
    outputs = {one.key: _read(found.file(f"{one.key}/command.out"), _MOST_OUTPUT) for one in found.attempts}
    document = records.document(found)
    document["experiment"]["promotion"] = taking.standing(State.open(), found)  # what was undone since is in reality no more
    page = render(document, patches, outputs).encode("utf-8", "replace")
    if output is None:
        write_aside(found.file(_REPORT), page)
        return found.file(_REPORT)
    try:
        write_aside(os.path.abspath(output), page, 0o644)
    except OSError as error:
        raise UsageError(
            "bad_output", f"{output!r} cannot be written: {error.strerror}", hint="name a file in a directory of yours"
        ) from error
    return os.path.abspath(output)


def _read(path: str, most: int) -> str:
    try:
        with open(path, "rb") as stream:
            return stream.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


# -- promote --------------------------------------------------------------------------------------------------------------------


def promote(
    wanted: str, name: str | None, asked: Asked, tell: Callable[[str], None] | None = None
) -> tuple[Experiment, Attempt, Promoted]:
    """The winner, or whichever is named (NAME or NAME:ATTEMPT), also one that lost."""
    refuse_inside()
    state = State.open()
    found = records.find(state, wanted)
    chosen, number = _attempt(name or "", "NAME:2")
    with records.held(found):
        found = records.load(state, found.id)
        one = found.attempt(chosen or None, number)
        return found, one, taking.promoted(state, found, one, asked, tell)


# -- forgetting -----------------------------------------------------------------------------------------------------------------


def forget(state: State, *, dry_run: bool = False, clock: Clock = wall) -> list[str]:
    """The ids of those that went, or would go, oldest first. What they still had in sandboxes goes with them, unless it lives on
    its own by somebody's wish."""
    keep, gone = resolve(state, None)["experiments.keep"], []
    if not dry_run:
        _settle(state)
    for one in records.listed(state):
        if one.state == "running" or clock() - (one.ended_at or one.created_at) < keep:
            continue
        if dry_run or _discard(state, one):
            gone.append(one.id)
    return gone


def _discard(state: State, experiment: Experiment) -> bool:
    try:
        with records.held(experiment):
            if experiment.template is not None:
                with contextlib.suppress(ElsewhereError):
                    sandboxes.discard(experiment.template)
            trash.discard(experiment.directory, state.room("trash"))
    except InUse:
        return False
    return True


def cost(experiment: Experiment) -> int:
    """What it takes on the disk."""
    fd = os.open(experiment.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return measuring.used(fd).bytes
    finally:
        os.close(fd)
