"""Races that are written down: in a project's file, by their name, or in a file of their own.

What is run is run in sandboxes only, so it needs no trust. But a project's file may come from a stranger: limits and a network
that are wider than what holds without it count after `elsewhere trust`, like everywhere.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elsewhere import settings as core
from elsewhere.errors import NotFound, UsageError
from elsewhere.experiments.model import Race
from elsewhere.experiments.parsing import from_file, from_table
from elsewhere.operations import settings
from elsewhere.operations.projects import find_project
from elsewhere.settings import FILE
from elsewhere.storage.state import State

__all__ = ["below", "in_file", "named"]

_LARGEST = 1 << 20


def named(name: str, project: str | None = None, remark: Callable[[str], None] | None = None) -> Race:
    """The one of that name in the project's own file."""
    found, state = find_project(project, os.getcwd()).path, State.open()
    path, tables = settings.races(found)
    races = [from_table(table, f"{path}: race {number}") for number, table in enumerate(tables, 1)]
    fitting = [one for one in races if one.name == name]
    if not fitting:
        known = ", ".join(str(one.name) for one in races if one.name)
        raise NotFound(
            "race_not_found",
            f"the {FILE} of {found!r} has no race {name!r}",
            hint=f"it has: {known}" if known else "write one: [[races]], name, verify, [[races.approaches]]",
        )
    if len(fitting) > 1:
        raise UsageError("same_name", f"{path}: two races are called {name!r}", hint="give each a name of its own")
    return _narrowed(state, found, fitting[0], remark)


def _narrowed(state: State, project: str, race: Race, remark: Callable[[str], None] | None) -> Race:
    ignored: set[str] = set()

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        wider = settings.wider(state, project, values)
        ignored.update(wider)
        return {key: value for key, value in values.items() if key not in wider}

    approaches = tuple(replace(one, settings=kept(one.settings)) for one in race.approaches)
    made = replace(race, approaches=approaches, settings=kept(race.settings))
    if ignored and remark is not None:
        remark(f"ignored, since the project's {FILE} is not trusted: {', '.join(sorted(ignored))} (elsewhere config says why)")
    return made


def in_file(path: str) -> Race:
    """Somebody named it, so it is theirs."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as stream:
            content = stream.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError("bad_race", f"{path}: {error.strerror}", hint="name a TOML file that describes a race") from error
    return from_file(content, path)


def below(own: Mapping[str, Any], given: Mapping[str, object]) -> dict[str, Any]:
    """Of what a file says of one approach, what is left when somebody says `given` of all of them: neither another value of that,
    nor more than it allows."""
    holds = core.merge([("command line", core.from_given(given))])
    # What nobody said anything about is no bound: a trusted file may ask for more than is usual.
    wider = [key for key in core.held_back(own, holds) if holds[key].source != "default"]
    return {key: value for key, value in own.items() if key not in given and key not in wider}
