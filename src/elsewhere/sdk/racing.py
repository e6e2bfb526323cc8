"""`race`: several approaches at once, commands or Python functions, verified, ranked, and the best one promoted."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from typing import Any, Literal

from elsewhere import units
from elsewhere.errors import ElsewhereError, UsageError
from elsewhere.experiments import model, parsing, records
from elsewhere.experiments.model import Check, Race
from elsewhere.experiments.records import Attempt
from elsewhere.limits import Limits
from elsewhere.operations import experiments
from elsewhere.operations.promoting import Asked
from elsewhere.operations.racing import race as races
from elsewhere.operations.racing.race import Raced, Telling
from elsewhere.sdk.promotion import Promotion, promotions
from elsewhere.sdk.sandbox import Sandbox
from elsewhere.settings import from_given
from elsewhere.values import dataclass

__all__ = ["Approach", "Experiment", "NoWinner", "Result", "race"]


class NoWinner(ElsewhereError, RuntimeError):
    """Raised by `Experiment.check`: none verified."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class Approach:
    """`work` is a shell line, or a function that is given a `Sandbox` and runs in a thread; it fails by raising, or by returning
    the result of a command that failed. What is not said here is as the race says."""

    name: str
    work: str | Callable[[Sandbox], object]
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits | None = None
    network: Literal["none", "allow", "host"] | None = None
    timeout: str | float | None = None
    repeat: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one attempt. `why` says it in words; `reason` is why its command ended; `checks` what each check came to."""

    name: str
    attempt: int
    verified: bool
    rank: int | None
    score: float | None
    exit_code: int | None
    reason: str | None
    why: str
    duration: float | None
    sandbox: str | None
    files_changed: int
    lines_added: int
    lines_removed: int
    peak_memory: int | None
    checks: tuple[dict[str, Any], ...]
    output: str
    patch: str

    @classmethod
    def of(cls, experiment: records.Experiment, one: Attempt) -> "Result":
        changes = one.changes or {"files": 0, "added": 0, "removed": 0}
        return cls(
            one.name,
            one.attempt,
            one.verified,
            one.rank,
            one.score,
            one.exit_code,
            one.reason,
            one.why,
            one.seconds,
            one.sandbox,
            changes["files"],
            changes["added"],
            changes["removed"],
            one.peak_memory,
            tuple(one.checks),
            records.tail(experiment.file(f"{one.key}/command.out")),
            records.tail(experiment.file(f"{one.key}/changes.patch"), 16 << 20),
        )


class Experiment:
    """A race that is over: who won and why. `results` are all attempts, best first."""

    def __init__(self, found: records.Experiment, promotion: Promotion | None = None) -> None:
        self._found = found
        self.promotion = promotion

    @classmethod
    def get(cls, wanted: str) -> "Experiment":
        """One that is there, by its id, the beginning of it, or `@last`."""
        return cls(experiments.show(wanted))

    @staticmethod
    def list() -> "Sequence[Experiment]":
        """All of them, oldest first."""
        return [Experiment(one) for one in experiments.experiments()]

    def resume(self) -> "Experiment":
        """Go on with what is missing of one that was interrupted or cancelled."""
        return _finished(races.resume(self.id))

    @property
    def id(self) -> str:
        return self._found.id

    @property
    def state(self) -> str:
        return self._found.state

    @property
    def reason(self) -> str:
        """Why the winner won, or why none did, in a sentence."""
        return self._found.reason

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self._found.created_at, UTC)

    @property
    def results(self) -> Sequence[Result]:
        ranked = sorted(self._found.attempts, key=lambda one: (one.rank is None, one.rank or 0))
        return [Result.of(self._found, one) for one in ranked]

    @property
    def winner(self) -> Result | None:
        return None if self._found.winner is None else Result.of(self._found, self._found.attempt())

    def check(self) -> "Experiment":
        """Itself, if there is a winner; NoWinner otherwise."""
        if self._found.winner is None:
            raise NoWinner("no_winner", self.reason, hint=f"elsewhere experiments show {self.id}", detail={"experiment": self.id})
        return self

    def promote(self, name: str | None = None, *, agree: bool = False) -> Promotion | None:
        """Move what the winner changed to reality, or what the one that is named did. `agree`: also what runs by itself there. If
        all of it is there already, by this experiment, that promotion is the answer; None: it changed nothing."""
        asked = Asked(agree=(lambda _: True) if agree else None)
        self._found, one, done = experiments.promote(self.id, name, asked)
        if done.promotion is not None:
            self.promotion = Promotion.of(done.promotion)
        else:
            mine = [
                found
                for found in promotions()
                if (found.sandbox, found.kind, found.status) == (one.sandbox, "promote", "applied")
            ]
            self.promotion = mine[-1] if mine else None
        return self.promotion

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """One HTML file that needs nothing else; where it is."""
        return experiments.report(self.id, None if path is None else os.fspath(path))

    def document(self) -> dict[str, Any]:
        """As `elsewhere race --json` prints it."""
        return records.document(self._found)

    def __repr__(self) -> str:
        return f"<Experiment {self.id} {self.state} winner={self._found.winner!r}>"


def race(
    approaches: Sequence[Approach | tuple[str, str | Callable[[Sandbox], object]] | str],
    *,
    verify: str | Sequence[str] = (),
    scored: str | Sequence[str] = (),
    score: str | Callable[[Sandbox], float] | None = None,
    lower: bool = False,
    setup: str | None = None,
    project: str | os.PathLike[str] = ".",
    base: Literal["live", "pinned", "auto"] = "auto",
    base_ref: str | None = None,
    env: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    network: Literal["none", "allow", "host"] | None = None,
    untrusted: bool | None = None,
    timeout: str | float | None = None,
    repeat: int = 1,
    first: bool = False,
    promote: bool = False,
    agree: bool = False,
    allow_failing: bool = False,
    verify_files: str | Sequence[str] | None = None,
    verify_from_approach: bool = False,
    verify_timeout: str | float | None = None,
    on_change: Callable[[dict[str, Any]], None] | None = None,
) -> Experiment:
    """Try all approaches at once, each in a sandbox of its own from one base, and say which is the best. An approach is an
    `Approach`, a pair of name and work, or `"NAME=COMMAND"`. `verify` are commands that must end with 0, `scored` those that only
    count for the rank, `score` a command or a function whose number ranks those that verified. With `promote`, what the winner
    changed is moved to reality; what stands against that (`Conflict`, `CheckFailed`) is raised, and the race stays as it is."""
    if verify_files and verify_from_approach:
        raise UsageError(
            "options_together", "verify_files means nothing beside verify_from_approach", hint="leave one of them out"
        )
    if score is not None and not callable(score):
        score = _line("score", score, ", or a function that is given a Sandbox")
    if isinstance(approaches, str) or not isinstance(approaches, Iterable):
        raise UsageError("bad_approach", f"{units.brief(approaches)} is no list of approaches", hint="race([(name, work), …])")
    if base_ref is not None and not isinstance(base_ref, str):
        raise UsageError("bad_race", f"base_ref={units.brief(base_ref)} is not the name of a commit", hint="base_ref='HEAD'")
    given = [_given(one) for one in approaches]
    everywhere = _time("timeout", timeout)
    asked = Race(
        approaches=tuple(_approach(one, everywhere, repeat) for one in given),
        checks=(*_checks("verify", verify, required=True), *_checks("scored", scored, required=False)),
        setup=None if setup is None else _line("setup", setup),
        score=score if isinstance(score, str) else None,
        scored_by_python=callable(score),
        lower=lower,
        first=first,
        promote=promote,
        allow_failing=allow_failing,
        verify_files=None if verify_files is None else _globs(verify_files),
        verify_from_approach=verify_from_approach,
        verify_timeout=_time("verify_timeout", verify_timeout),
        base=base,
        base_ref=base_ref,
        env=_env(env or {}),
        settings=_settings(limits, network, untrusted),
    )
    done = races.race(
        parsing.complete(asked),
        os.fspath(project),
        works={one.name: _in_sandbox(one.work) for one in given if callable(one.work)},
        scorer=_in_sandbox(score) if callable(score) else None,
        agree=(lambda _: True) if agree else None,
        telling=Telling(watch=on_change),
    )
    return _finished(done)


def _finished(done: Raced) -> Experiment:
    if done.refused is not None:
        done.refused.detail["experiment"] = done.experiment.id
        raise done.refused
    taken = done.promoted.promotion if done.promoted is not None else None
    return Experiment(done.experiment, None if taken is None else Promotion.of(taken))


def _given(one: Approach | tuple[str, str | Callable[[Sandbox], object]] | str) -> Approach:
    if isinstance(one, str):
        parsed = parsing.approach_of(one)
        return Approach(parsed.name, parsed.command or "")
    made = Approach(*one) if isinstance(one, tuple) and len(one) == 2 else one
    if (
        not isinstance(made, Approach)
        or not isinstance(made.name, str)
        or not (isinstance(made.work, str) or callable(made.work))
    ):
        raise UsageError(
            "bad_approach",
            f"{units.brief(one)} is no approach",
            hint="Approach(name, work), or (name, work); work is a shell line or a function",
        )
    return made


def _approach(one: Approach, timeout: float | None, repeat: int) -> model.Approach:
    count = repeat if one.repeat is None else one.repeat
    command = parsing.approach_of(f"{one.name}={one.work}").command if isinstance(one.work, str) else None
    made = model.Approach(
        one.name if command is not None else parsing.approach_of(f"{one.name}=-").name,
        command,
        _env(one.env),
        _settings(one.limits, one.network, None),
        timeout if one.timeout is None else _time("timeout", one.timeout),
    )
    return parsing.repeated(Race((made,)), count).approaches[0]


def _settings(limits: Limits | None, network: str | None, untrusted: bool | None) -> dict[str, Any]:
    if limits is not None and not isinstance(limits, Limits):
        raise UsageError("bad_race", f"limits={units.brief(limits)} are no Limits", hint="limits=Limits(memory='2G')")
    given: dict[str, object] = {f"limits.{key}": value for key, value in (limits or Limits()).given().items()}
    return from_given({**given, "sandbox.network": network, "sandbox.untrusted": untrusted})


def _env(given: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for one in given.items() for text in one):
        raise UsageError("bad_env", f"env={units.brief(given)} is no mapping of texts to texts", hint="env={'DEBUG': '1'}")
    return dict(given)


def _time(name: str, given: object) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise UsageError("bad_duration", f"{name}={units.brief(given)} is not a duration", hint=f"{name}='90s'")
    return units.duration(given)


def _checks(name: str, lines: str | Sequence[str], *, required: bool) -> tuple[Check, ...]:
    return parsing.checks_of([_line(name, one, ", or a list of them") for one in _several(lines)], required=required)


def _line(name: str, given: object, otherwise: str = "") -> str:
    if not isinstance(given, str) or not given.strip():
        raise UsageError("bad_command", f"{name}={units.brief(given)} is not a command", hint=f"a shell line{otherwise}")
    return given


def _globs(given: str | Sequence[str]) -> tuple[str, ...]:
    found = _several(given)
    if not all(isinstance(one, str) and one for one in found):
        raise UsageError("bad_race", f"verify_files={units.brief(given)} is not a glob", hint="'checks/**', or a list of such")
    return tuple(map(str, found))


def _several(given: object) -> list[object]:
    """A text is one of them, not its letters."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _in_sandbox(work: Callable[[Sandbox], Any]) -> Callable[[str], Any]:
    """The function, given a sandbox that outlives it."""

    def done(sandbox_id: str) -> Any:
        with Sandbox.get(sandbox_id, on_exit="keep") as box:
            return work(box)

    return done
