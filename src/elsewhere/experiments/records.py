"""Experiments as they are written down: what was asked, how far each attempt got, what came of it.

    experiments/<experiment-id>/
        experiment.json                what this module says about it
        lock                           held by whoever works on it
        setup.out                      what the set-up said
        base-check-<n>.out             what a check said in the base
        <name>-<attempt>/              of one attempt:
            command.out                what its command said, up to a cap
            check-<n>.out, score.out   what a check, and the score command, said
            changes.patch              what a promotion would move
        report.html                    the report, once somebody asked for it

    experiment    running ─► finished       there is a winner, or none verified
                          └► cancelled      somebody ended it
                          └► interrupted    whoever ran it is gone; nobody wrote that, it is read (`load`)
    attempt       waiting ─► running ─► verifying ─► done

Each step is written before it begins, aside and renamed. `document` is what leaves the product. Not here: what is done.
"""

import contextlib
import json
import os
import threading
from contextlib import AbstractContextManager
from dataclasses import asdict, field, fields
from typing import Any

from elsewhere.clock import stamp, wall
from elsewhere.errors import Broken, InUse, NotFound, UsageError
from elsewhere.experiments.model import Race
from elsewhere.sandbox.records.request import Caller
from elsewhere.storage.state import State, locked, meant, write_aside
from elsewhere.values import dataclass

__all__ = [
    "EXPERIMENTS",
    "Attempt",
    "Experiment",
    "counts",
    "document",
    "find",
    "held",
    "listed",
    "load",
    "new",
    "tail",
]

EXPERIMENTS = "experiments"
_FILE, _LOCK = "experiment.json", "lock"
_TAIL = 16 << 10
_MOST_SAMPLES = 240
_MOST_PATHS = 1000
_FEW = 5


@dataclass(slots=True)
class Attempt:
    """One try of one approach. `changes` is {"files", "added", "removed", "others", "paths"}, what a promotion would move;
    `others` are files without changed lines. `put_back` are paths that were as in the base when it was verified, whatever the
    approach had made of them, and that stay behind; `stays` how many other changes a promotion does not move, by the reason;
    `commits` whether some of those are commits; `scored` how many of the scored checks passed; `died_of` why its command did not
    end well, in words."""

    name: str
    attempt: int
    command: str | None
    state: str = "waiting"
    sandbox: str | None = None
    verified: bool = False
    rank: int | None = None
    score: float | None = None
    scored: int = 0
    exit_code: int | None = None
    reason: str | None = None
    seconds: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    peak_memory: int | None = None
    cpu_s: float | None = None
    changes: dict[str, Any] | None = None
    denials: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""
    died_of: str = ""
    checks: list[dict[str, Any]] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)
    stays: dict[str, int] = field(default_factory=dict)
    commits: bool = False
    samples: list[list[float]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """As the directory of its files is called."""
        return f"{self.name}-{self.attempt}"

    @property
    def left_behind(self) -> list[str]:
        """Of what was put back, what is worth a word."""
        return [path for path in self.put_back if "__pycache__" not in path]

    @property
    def lines(self) -> int:
        """How many lines it changed; a file without any, a binary one or a link, counts as one."""
        changes = self.changes or {}
        return sum(int(changes.get(key, 0)) for key in ("added", "removed", "others"))

    def sample(self, seconds: float, memory: int | None, cpu_s: float | None) -> None:
        """Remember what it used; of a long one, only every second moment, and again."""
        self.samples.append([round(seconds, 2), memory or 0, round((cpu_s or 0.0) * 1000)])
        if len(self.samples) > _MOST_SAMPLES:
            self.samples = self.samples[::2]
        self.peak_memory = max(self.peak_memory or 0, memory or 0) or None

    def start_again(self) -> None:
        """Forget what an earlier, interrupted try left."""
        fresh = Attempt(self.name, self.attempt, self.command)
        for one in fields(Attempt):
            setattr(self, one.name, getattr(fresh, one.name))


@dataclass(slots=True)
class Experiment:
    """`race` is what was asked, packed; `template` the sandbox that all attempts are forks of; `caller` the process that runs
    it; `promotion` the last of the `promotions` by which something of it was moved to reality, `refused` why that was not done
    last; `baseline` what each check counted and rewrote in the base, by its number."""

    directory: str
    id: str
    project: str
    race: dict[str, Any]
    created_at: float
    caller: list[Any]
    state: str = "running"
    base: dict[str, Any] = field(default_factory=dict)
    template: str | None = None
    ended_at: float | None = None
    winner: str | None = None
    winner_attempt: int | None = None
    reason: str = ""
    promotion: str | None = None
    promotions: list[str] = field(default_factory=list)
    refused: str | None = None
    baseline: dict[str, dict[str, Any]] = field(default_factory=dict)
    setup: dict[str, Any] | None = None
    attempts: list[Attempt] = field(default_factory=list)
    _saving: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def save(self) -> None:
        """Whole or not at all; several threads may be at it."""
        with self._saving:
            write_aside(os.path.join(self.directory, _FILE), json.dumps(self._packed()).encode())

    def _packed(self) -> dict[str, Any]:
        kept = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("directory", "_saving", "attempts")}
        return {**kept, "attempts": [asdict(one) for one in self.attempts]}

    def end(self, state: str) -> None:
        self.state, self.ended_at = state, wall()
        self.save()

    def file(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def file_of(self, one: Attempt, name: str) -> str:
        """A file of one attempt, in a directory that is there."""
        place = self.file(one.key)
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, 0o700)
        return os.path.join(place, name)

    def attempt(self, name: str | None = None, number: int | None = None) -> Attempt:
        """The one that is named, its best attempt if no number is given; the winner if nothing is."""
        if name is None and self.winner is None:
            raise NotFound(
                "nobody_won",
                f"the experiment {self.id!r} has no winner",
                hint=f"name one of: {', '.join(dict.fromkeys(one.name for one in self.attempts))}",
            )
        if name is None:
            name, number = self.winner, self.winner_attempt
        found = [one for one in self.attempts if one.name == name and number in (None, one.attempt)]
        if not found:
            raise NotFound(
                "approach_not_found",
                f"the experiment {self.id!r} has no approach {name!r}" + (f" with an attempt {number}" if number else ""),
                hint=f"one of: {', '.join(dict.fromkeys(one.name for one in self.attempts))}",
            )
        return min(found, key=lambda one: (one.rank is None, one.rank or 0, one.attempt))


def new(state: State, project: str, race: Race) -> Experiment:
    """Written down before anything is done."""
    now = wall()
    os.makedirs(state.room(EXPERIMENTS), 0o700, exist_ok=True)
    experiment_id, directory = state.entry(EXPERIMENTS, "e", now)
    made = Experiment(directory, experiment_id, project, race.packed(), now, list(Caller.this()))
    made.attempts = [
        Attempt(one.name, number, one.command)
        for number in range(1, _most(race) + 1)
        for one in race.approaches
        if number <= one.repeat
    ]
    made.save()
    return made


def _most(race: Race) -> int:
    return max(one.repeat for one in race.approaches)


def held(experiment: Experiment) -> AbstractContextManager[None]:
    """Nobody else works on it meanwhile."""
    busy = InUse(
        "experiment_in_use",
        f"somebody works on the experiment {experiment.id!r} just now",
        hint=f"elsewhere experiments show {experiment.id} tells how far it is",
    )
    return locked(experiment.file(_LOCK), busy)


def load(state: State, experiment_id: str) -> Experiment:
    directory = os.path.join(state.room(EXPERIMENTS), experiment_id)
    try:
        with open(os.path.join(directory, _FILE), "rb") as stream:
            said = json.load(stream)
        known = {one.name for one in fields(Experiment)} - {"directory", "_saving"}
        found = Experiment(directory, **{name: value for name, value in said.items() if name in known})
        names = {one.name for one in fields(Attempt)}
        attempts: list[Any] = list(found.attempts)
        found.attempts = [Attempt(**{name: value for name, value in one.items() if name in names}) for one in attempts]
        alive = Caller(*found.caller).is_alive()
    except (FileNotFoundError, NotADirectoryError):
        raise _not_found(experiment_id) from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise Broken(
            "experiment_broken",
            f"what is written about the experiment {experiment_id!r} cannot be read: {error}",
            hint=f"look into {directory}",
        ) from error
    if found.state == "running" and not alive:
        found.state = "interrupted"
        for one in found.attempts:
            if one.state != "done":
                was, one.state = one.state, "waiting"
                one.why = "waits" if was == "waiting" else f"was {was} when the race was interrupted"
    return found


def listed(state: State) -> list[Experiment]:
    """Oldest first; what cannot be read can only be asked for by its name."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(state.room(EXPERIMENTS)) as entries:
        for name in [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]:
            with contextlib.suppress(NotFound, Broken):
                found.append(load(state, name))
    return sorted(found, key=lambda one: (one.created_at, one.id))


def find(state: State, wanted: str) -> Experiment:
    """By its id, the beginning of one, or `@last`."""
    found = meant(listed(state), wanted)
    if not found:
        raise _not_found(wanted)
    if len(found) > 1:
        raise UsageError(
            "ambiguous_experiment",
            f"{wanted!r} is the beginning of {len(found)} experiments",
            hint=", ".join(one.id for one in found[-_FEW:]) + (" and others" if len(found) > _FEW else ""),
        )
    return found[0]


def _not_found(wanted: str) -> NotFound:
    return NotFound("experiment_not_found", f"there is no experiment {wanted!r}", hint="elsewhere experiments list shows them")


# -- for programs ---------------------------------------------------------------------------------------------------------------


def document(experiment: Experiment) -> dict[str, Any]:
    """`{"experiment": {…}}`, as `race --json` prints it; attempts in their order of rank, those without one last."""
    race = experiment.race
    ranked = sorted(experiment.attempts, key=lambda one: (one.rank is None, one.rank or 0))
    return {
        "experiment": {
            "id": experiment.id,
            "name": race.get("name"),
            "project": _shown(experiment.project),
            "base": experiment.base,
            "state": experiment.state,
            "created_at": stamp(experiment.created_at),
            "ended_at": _time(experiment.ended_at),
            "winner": experiment.winner,
            "winner_attempt": experiment.winner_attempt,
            "reason": experiment.reason,
            "promotion": experiment.promotion,
            "promotions": experiment.promotions,
            "refused": experiment.refused,
            "counts": counts(experiment),
            "setup": None if experiment.setup is None else {**experiment.setup, "output": tail(experiment.file("setup.out"))},
            "verify": [{"name": one["name"], "command": one["command"], "required": one["required"]} for one in race["checks"]],
            "score": "a Python function" if race.get("scored_by_python") else race.get("score"),
            "lower": race.get("lower", False),
            "approaches": [_attempt(experiment, one) for one in ranked],
        }
    }


def counts(experiment: Experiment) -> dict[str, int]:
    """How many attempts there are, and what became of those whose command was started; `promoted` is how often something of it
    was moved to reality."""
    started = [one for one in experiment.attempts if one.started_at is not None]
    over = [one for one in started if one.state == "done" and not one.verified]
    cancelled = sum(one.reason == "cancelled" for one in over)
    return {
        "attempts": len(experiment.attempts),
        "started": len(started),
        "verified": sum(one.verified for one in started),
        "failed": len(over) - cancelled,
        "cancelled": cancelled,
        "promoted": len(experiment.promotions),
    }


def _attempt(experiment: Experiment, one: Attempt) -> dict[str, Any]:
    changes = one.changes
    return {
        "name": one.name,
        "attempt": one.attempt,
        "command": one.command,
        "sandbox": one.sandbox,
        "state": one.state,
        "verified": one.verified,
        "rank": one.rank,
        "score": one.score,
        "exit_code": one.exit_code,
        "reason": one.reason,
        "duration_ms": _ms(one.seconds),
        "started_at": _time(one.started_at),
        "ended_at": _time(one.ended_at),
        "peak_memory_bytes": one.peak_memory,
        "cpu_ms": _ms(one.cpu_s),
        "changes": None
        if changes is None
        else {
            "files": changes["files"],
            "added": changes["added"],
            "removed": changes["removed"],
            "paths": [{"path": _shown(path), "kind": kind} for path, kind in changes["paths"][:_MOST_PATHS]],
        },
        "denials": one.denials,
        "why": one.why,
        "put_back": [_shown(path) for path in one.put_back],
        "checks": [_check(experiment, one, check) for check in one.checks],
        "output": tail(experiment.file(f"{one.key}/command.out")),
        "samples": one.samples,
    }


def _check(experiment: Experiment, one: Attempt, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": said["name"],
        "command": said["command"],
        "required": said["required"],
        "passed": said["passed"],
        "exit_code": said["exit_code"],
        "reason": said["reason"],
        "note": said.get("note") or None,
        "duration_ms": _ms(said["seconds"]),
        "tests": said["tests"],
        "output": tail(experiment.file(f"{one.key}/{said['file']}")),
    }


def tail(path: str, most: int = _TAIL) -> str:
    """The end of what a command said."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - most))
            return stream.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def _shown(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else stamp(seconds)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
