"""Finding the project and opening a sandbox of it; listing, inspecting and removing sandboxes."""

import os
from dataclasses import dataclass

from elsewhere.changes.compare import Changes
from elsewhere.errors import ElsewhereError, InUse, UsageError
from elsewhere.sandbox import contents, project, record
from elsewhere.sandbox.engine import Engine
from elsewhere.sandbox.live import Live, create
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.record import Record
from elsewhere.storage.state import State, home_directory

__all__ = ["Listing", "Removal", "changes", "find_project", "inspect", "list_sandboxes", "open_sandbox", "remove"]


def find_project(chosen: str | None, directory: str) -> Project:
    home = home_directory(os.getuid())
    if chosen is not None:
        return project.find(os.path.join(directory, chosen), home, chosen=True)
    return project.find(directory, home)


def open_sandbox(chosen: str, *, base: str = "live", story: str, abandoned: str) -> Live:
    if base != "live":
        raise UsageError("bad_base", f"the base {base!r} is not known", hint="use 'live'")
    found = find_project(chosen, os.getcwd())
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


def remove(wanted: list[str], *, force: bool = False) -> Removal:
    """A running sandbox is skipped unless forced; each of several is removed or skipped on its own."""
    state = State.open()
    result = Removal([], [], [])
    engine = Engine.shared(state)
    first: ElsewhereError | None = None
    for word in wanted:
        try:
            sandbox_id = record.find(state, word)
        except ElsewhereError as error:
            first = first or error
            result.skipped.append({"id": word, "reason": error.message})
            continue
        result.matched.append(sandbox_id)
        if record.is_alive(state, sandbox_id) and not force:
            first = first or InUse(
                "sandbox_in_use", f"the sandbox {sandbox_id!r} is running", hint=f"elsewhere rm --force {sandbox_id}"
            )
            result.skipped.append({"id": sandbox_id, "reason": "running"})
            continue
        engine.ask("remove", sandbox_id)
        result.removed.append(sandbox_id)
    if first is not None and len(wanted) == 1:
        raise first
    return result
