"""Races as people write them: on a command line, in `[[races]]` tables of a project's file, or in a file of their own.

    [[races]]                                    in a file of its own, these stand at the top
    name = "upgrade"
    setup = "pip install -e ."
    verify = ["pytest -q", { name = "types", command = "mypy src", junit = "junit.xml" }]
    scored = ["make lint"]
    score = "./score.sh"                         lower = true: less is better
    verify_files = ["checks/**"]                 verify_from_approach, allow_failing, first = true
    timeout = "10m"                              verify_timeout, repeat, env, limits, network, base, base_ref
    [[races.approaches]]
    name = "patch"
    command = "git apply fix.patch"              its own env, limits, network, timeout, repeat

What each command may do is decided by its sandbox. Not here: whether a project's file may ask for that
(`operations/racing/written.py`).
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elsewhere import units
from elsewhere.errors import UsageError
from elsewhere.experiments.model import Approach, Check, Race, is_everything
from elsewhere.settings import from_given, unknown

__all__ = ["approach_of", "checks_of", "complete", "from_file", "from_table", "repeated"]

_LONGEST_NAME = 40
_LONGEST_LINE = 64 << 10
_MOST_APPROACHES, _MOST_REPEATS, _MOST_CHECKS = 200, 100, 50
_LARGEST_FILE = 1 << 20
_FOR_ONE = ("env", "limits", "network", "timeout", "repeat")
_OF_APPROACH = ("name", "command", *_FOR_ONE)
_OF_CHECK = ("name", "command", "junit")
_OF_RACE = (
    "name",
    "setup",
    "verify",
    "scored",
    "score",
    "lower",
    "first",
    "allow_failing",
    "verify_files",
    "verify_from_approach",
    "verify_timeout",
    "base",
    "base_ref",
    "approaches",
    *_FOR_ONE,
)
_JUNIT = re.compile(r"--(?:junit-?xml|junit-path)[= ](\S+)")
_BASES = ("live", "pinned", "auto")
_SWITCHES = ("lower", "first", "allow_failing", "verify_from_approach")


def approach_of(text: str) -> Approach:
    """NAME=COMMAND, as on a command line."""
    name, equals, command = text.partition("=")
    if not equals or not command.strip():
        raise UsageError(
            "bad_approach", f"{units.brief(text)} is no approach", hint="write NAME=COMMAND: -a 'patch=git apply fix.patch'"
        )
    return Approach(_name(name, "the approach"), _line(command, f"the approach {name!r}"))


def checks_of(lines: Sequence[str], *, required: bool) -> tuple[Check, ...]:
    """Commands as checks; each is called by its own line, and may say itself where it writes its results."""
    return tuple(Check(_line(line, "a check")[:80], line, required, _junit_of(line)) for line in lines)


def _junit_of(line: str) -> str | None:
    found = _JUNIT.search(line)
    return None if found is None else found[1].strip("'\"")


def complete(race: Race) -> Race:
    """The same, if it makes sense as a whole."""
    if not race.approaches:
        raise UsageError("no_approach", "there is no approach", hint="elsewhere race -a NAME=COMMAND … --verify COMMAND")
    if len(race.approaches) > _MOST_APPROACHES or len(race.checks) > _MOST_CHECKS:
        raise UsageError(
            "race_too_large",
            f"{len(race.approaches)} approaches and {len(race.checks)} checks are too many",
            hint=f"at most {_MOST_APPROACHES} approaches and {_MOST_CHECKS} checks",
        )
    _unique([one.name for one in race.approaches], "approaches")
    _unique([one.name for one in race.checks], "checks")
    if race.lower and race.score is None and not race.scored_by_python:
        raise UsageError("no_score", "less is better of what? There is no score", hint="--score COMMAND, or leave --lower out")
    if race.base_ref is not None and race.base != "auto":
        raise UsageError(
            "bad_race",
            f"base = {race.base!r} means nothing beside base_ref = {race.base_ref!r}: a race starts from one of them",
            hint="leave one of them out",
        )
    for pattern in race.verify_files or ():
        if is_everything(pattern.removeprefix("!").strip()):
            raise UsageError(
                "bad_pattern",
                f"verify files: {pattern!r} names nothing, or the whole project",
                hint="name files or directories: 'checks/**', '!app.py'; with --verify-from-approach all is the approach's",
            )
    return race


def _unique(names: Sequence[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError("same_name", f"two {what} are called {name!r}", hint="give each a name of its own")


def repeated(race: Race, count: int) -> Race:
    """So many attempts of each approach."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_REPEATS:
        raise UsageError("bad_count", f"{units.brief(count)} attempts cannot be made", hint=f"between 1 and {_MOST_REPEATS}")
    return replace(race, approaches=tuple(replace(one, repeat=count) for one in race.approaches))


def from_file(content: bytes, path: str) -> Race:
    """A file that holds one race, and nothing else."""
    if len(content) > _LARGEST_FILE:
        raise UsageError(
            "bad_race", f"{path}: larger than {units.format_size(_LARGEST_FILE)}", hint="put scripts into files of their own"
        )
    try:
        table = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "bad_race", f"{path}: {error}", hint="it is a TOML file: approaches are [[approaches]] tables"
        ) from error
    return from_table(table, path)


def from_table(table: Mapping[str, Any], where: str) -> Race:
    return _Table(table, where, _OF_RACE).race()


class _Table:
    """Something as it is written; errors name where it stands, and what would be right."""

    def __init__(self, table: Any, where: str, known: Sequence[str]) -> None:
        if not isinstance(table, Mapping):
            raise UsageError(
                "bad_race", f"{where}: {units.brief(table)} is not a table", hint=f"with some of: {', '.join(known)}"
            )
        self._table, self._where = table, where
        for key in table:
            if key not in known:
                raise unknown(key, known, f"{where}: ")

    def race(self) -> Race:
        name = self._text("name")
        tables = self._table.get("approaches", [])
        if not isinstance(tables, list):
            raise self._wrong("approaches", "is not a list of tables", "[[approaches]] before each of them")
        base = self._text("base") or "auto"
        if base not in _BASES:
            raise self._wrong("base", f"is none of {', '.join(_BASES)}", 'base = "pinned"')
        whole = self._approach_parts()
        made = Race(
            approaches=tuple(
                _Table(one, f"{self._where}: approach {number}", _OF_APPROACH).approach(whole["timeout"], whole["repeat"])
                for number, one in enumerate(tables, 1)
            ),
            checks=(*self._checks("verify", required=True), *self._checks("scored", required=False)),
            setup=self._command("setup"),
            score=self._command("score"),
            verify_files=self._texts("verify_files"),
            verify_timeout=self._time("verify_timeout"),
            base=base,
            base_ref=self._text("base_ref"),
            env=whole["env"],
            settings=whole["settings"],
            name=None if name is None else _name(name, f"{self._where}: the race"),
            **dict[str, Any]((key, self._switch(key)) for key in _SWITCHES),
        )
        if made.verify_files and made.verify_from_approach:
            raise UsageError(
                "bad_race", f"{self._where}: verify_files means nothing beside verify_from_approach", hint="leave one of them out"
            )
        return complete(made)

    def approach(self, timeout: float | None, repeat: int | None) -> Approach:
        name, command = self._text("name"), self._command("command")
        if name is None or command is None:
            raise UsageError(
                "bad_race", f"{self._where} has no {'name' if name is None else 'command'}", hint='name = "…", command = "…"'
            )
        own = self._approach_parts()
        return Approach(
            _name(name, self._where),
            command,
            own["env"],
            own["settings"],
            own["timeout"] or timeout,
            own["repeat"] or repeat or 1,
        )

    def _approach_parts(self) -> dict[str, Any]:
        repeat = self._table.get("repeat")
        if repeat is not None and (isinstance(repeat, bool) or not isinstance(repeat, int) or not 1 <= repeat <= _MOST_REPEATS):
            raise self._wrong("repeat", "is no count of attempts", f"repeat = 3, at most {_MOST_REPEATS}")
        return {"env": self._env(), "settings": self._settings(), "timeout": self._time("timeout"), "repeat": repeat}

    def _checks(self, key: str, *, required: bool) -> tuple[Check, ...]:
        values = self._table.get(key, [])
        if not isinstance(values, str | dict | list):
            raise self._wrong(key, "is neither a command nor a list of them", f'{key} = ["pytest -q"]')
        found: list[Check] = []
        for number, one in enumerate(values if isinstance(values, list) else [values], 1):
            if isinstance(one, str):
                found += checks_of([one], required=required)
                continue
            table = _Table(one, f"{self._where}: {key} {number}", _OF_CHECK)
            command = table._command("command")
            if command is None:
                raise self._wrong(key, "has a check without a command", f'{key} = ["pytest -q"]')
            found.append(
                Check(table._text("name") or command[:80], command, required, table._text("junit") or _junit_of(command))
            )
        return tuple(found)

    def _settings(self) -> dict[str, Any]:
        limits = self._table.get("limits", {})
        if not isinstance(limits, Mapping):
            raise self._wrong("limits", "is not a table", 'limits = { memory = "512M", cpus = 1 }')
        given: dict[str, object] = {f"limits.{name}": value for name, value in limits.items()}
        if "network" in self._table:
            given["sandbox.network"] = self._table["network"]
        found: dict[str, Any] = self._told(lambda: from_given(given))
        return found

    def _env(self) -> dict[str, str]:
        """Only values: a file that could pass on the caller's own would take what is secret."""
        env = self._table.get("env", {})
        if not isinstance(env, Mapping) or not all(isinstance(value, str) and "\0" not in value for value in env.values()):
            raise self._wrong("env", "is not a table of texts", 'env = { DEBUG = "1" }')
        for name in env:
            if not name.isascii() or not name.replace("_", "a").isalnum() or name[0].isdigit():
                raise self._wrong("env", f"has {name!r}, which is not the name of a variable", 'env = { DEBUG = "1" }')
        return dict(env)

    def _text(self, key: str) -> str | None:
        value = self._table.get(key)
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise self._wrong(key, "is not a text", f'{key} = "…"')
        return value

    def _texts(self, key: str) -> tuple[str, ...] | None:
        value = self._table.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise self._wrong(key, "is not a list of texts", f'{key} = ["tests/**"]')
        return tuple(value)

    def _command(self, key: str) -> str | None:
        text = self._text(key)
        return None if text is None else _line(text, f"{self._where}: {key}")

    def _time(self, key: str) -> float | None:
        value = self._table.get(key)
        return None if value is None else float(self._told(lambda: units.duration(value)))

    def _switch(self, key: str) -> bool:
        value = self._table.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "is neither true nor false", f"{key} = true")
        return value

    def _told(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except UsageError as error:
            raise UsageError("bad_race", f"{self._where}: {error.message}", hint=error.hint) from None

    def _wrong(self, key: str, what: str, example: str) -> UsageError:
        value = units.brief(self._table.get(key))
        return UsageError("bad_race", f"{self._where}: {key} = {value} {what}", hint=f"for example: {example}")


def _name(name: str, what: str) -> str:
    plain = name.replace("-", "a").replace("_", "a").replace(".", "a")
    if not name or len(name) > _LONGEST_NAME or not plain.isalnum() or not name.isascii() or not name[0].isalnum():
        raise UsageError(
            "bad_name",
            f"{what}: {units.brief(name)} cannot be a name",
            hint=f"up to {_LONGEST_NAME} letters, digits, '-', '_' and '.', beginning with a letter or digit",
        )
    return name


def _line(line: str, what: str) -> str:
    if not line.strip() or "\0" in line or len(line) > _LONGEST_LINE:
        raise UsageError("bad_command", f"{what}: {units.brief(line)} cannot be a command", hint="write a shell line")
    return line
