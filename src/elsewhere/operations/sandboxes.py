"""Finding the project and opening a sandbox of it; listing, inspecting and removing sandboxes."""

import os
from dataclasses import dataclass

from elsewhere import settings
from elsewhere.changes.compare import Changes
from elsewhere.errors import ElsewhereError, InUse, Refused, UsageError
from elsewhere.meeting import default_state, home_directory
from elsewhere.sandbox import contents, project, record
from elsewhere.sandbox.engine import Engine
from elsewhere.sandbox.live import Live, create
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.record import Record
from elsewhere.settings import Settings
from elsewhere.storage.state import State

__all__ = [
    "Listing",
    "Removal",
    "changes",
    "find_project",
    "inspect",
    "list_sandboxes",
    "open_sandbox",
    "remove",
    "remove_all",
    "settings_of",
]


def find_project(chosen: str | None, directory: str) -> Project:
    home = home_directory()
    if chosen is not None:
        found = project.find(os.path.join(directory, chosen), home, chosen=True)
    else:
        found = project.find(directory, home)
    state = os.path.realpath(default_state())
    if (found.path + "/").startswith(state + "/"):
        raise Refused(
            "project_in_state", f"the project {found.path!r} lies in elsewhere's own state directory", hint="work outside of it"
        )
    return found


def open_sandbox(found: Project, *, base: str = "live", story: str, abandoned: str) -> Live:
    if base != "live":
        raise UsageError("bad_base", f"the base {base!r} is not known", hint="use 'live'")
    return create(State.open(), found, base=base, story=story, abandoned=abandoned)


@dataclass(frozen=True, slots=True)
class Listing:
    records: list[Record]
    broken: list[str]


def list_sandboxes() -> Listing:
    return Listing(*record.load_all(State.open()))


def inspect(wanted: str) -> tuple[State, Record]:
    state = State.open()
    return state, record.load(state, record.find(state, wanted))


def changes(wanted: str) -> tuple[Record, Changes]:
    state, found = inspect(wanted)
    return found, contents.changes_of(state, found)


@dataclass(slots=True)
class Removal:
    matched: list[str]
    removed: list[str]
    skipped: list[dict[str, str]]


def settings_of(found: Project) -> list[tuple[Settings, bool]]:
    """The project's own settings and the user's, each with whether it may ask for everything."""
    home = home_directory()
    project_file = os.path.join(found.path, project.SETTINGS)
    return [(settings.load(project_file), False), (settings.load(settings.user_file(home)), True)]


def remove(wanted: list[str], *, force: bool = False) -> Removal:
    """A running sandbox is skipped unless forced; each of several is removed or skipped on its own. One that was named alone and
    cannot be removed is an error."""
    state = State.open()
    result = Removal([], [], [])
    problems: list[ElsewhereError] = []
    for word in wanted:
        try:
            sandbox_id = record.find(state, word)
            result.matched.append(sandbox_id)
            _remove(state, sandbox_id, force=force)
            result.removed.append(sandbox_id)
        except ElsewhereError as error:
            problems.append(error)
            result.skipped.append({"id": word, "reason": error.message})
    if problems and len(wanted) == 1:
        raise problems[0]
    return result


def remove_all(*, force: bool = False) -> Removal:
    """Every sandbox; running ones are skipped unless forced, which is not an error here."""
    state = State.open()
    result = Removal(state.sandbox_ids(), [], [])
    for sandbox_id in result.matched:
        try:
            _remove(state, sandbox_id, force=force)
            result.removed.append(sandbox_id)
        except InUse:
            result.skipped.append({"id": sandbox_id, "reason": "running"})
    return result


def _remove(state: State, sandbox_id: str, *, force: bool) -> None:
    if record.is_alive(state, sandbox_id) and not force:
        raise InUse("sandbox_in_use", f"the sandbox {sandbox_id!r} is running", hint=f"elsewhere rm --force {sandbox_id}")
    Engine.shared(state).ask("remove", sandbox_id)
