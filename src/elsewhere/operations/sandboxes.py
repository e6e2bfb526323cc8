"""Sandboxes that are there: list, inspect, what they changed, stop, start, extend, keep, remove."""

import contextlib
import os
import time
from dataclasses import field
from typing import Any

from elsewhere import __version__, units
from elsewhere.changes.compare import Changes
from elsewhere.clock import wall
from elsewhere.errors import Broken, ElsewhereError, InUse, NotFound, Refused
from elsewhere.operations import admission, interrupted
from elsewhere.operations.admission import Claim, Pause, Tell
from elsewhere.operations.entering import enter
from elsewhere.operations.losing import nowhere_else
from elsewhere.operations.projects import refuse_inside
from elsewhere.operations.usage import usage_of
from elsewhere.sandbox import contents, ending
from elsewhere.sandbox.keeping import line
from elsewhere.sandbox.keeping.callers import undisturbed
from elsewhere.sandbox.keeping.line import Usage
from elsewhere.sandbox.records import record, truth
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = [
    "Filter",
    "Keeping",
    "Listing",
    "Removal",
    "changes",
    "discard",
    "extend",
    "inspect",
    "keep",
    "keeping",
    "list_sandboxes",
    "refuse_owned",
    "remove",
    "remove_all",
    "start",
    "stop",
    "stop_if_idle",
]

_SHOWN = 20
_LOOKS, _LOOK_S = 5, 0.02


@dataclass(frozen=True, slots=True)
class Filter:
    states: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    project: str | None = None
    limit: int | None = None

    def fits(self, found: Record) -> bool:
        return (
            (not self.states or found.state in self.states)
            and all(found.labels.get(key) == value for key, value in self.labels.items())
            and (self.project is None or found.project == self.project)
        )


@dataclass(frozen=True, slots=True)
class Listing:
    """`total` counts what fits the filter, shown or not. `usage` is of those that run and are shown."""

    records: list[Record]
    total: int
    broken: list[str]
    healed: list[dict[str, str | None]]
    usage: dict[str, Usage] = field(default_factory=dict)
    waiting: list[Claim] = field(default_factory=list)


def list_sandboxes(wanted: Filter | None = None) -> Listing:
    wanted = wanted or Filter()
    state = State.open()
    interrupted.look(state)
    seen = _survey(state)
    fitting = [found for found in seen.records if wanted.fits(found)]
    shown = fitting[: wanted.limit]
    usage = {found.id: used for found in shown if (used := usage_of(state, found, measure=False)) is not None}
    return Listing(shown, len(fitting), seen.broken, seen.healed, usage, admission.waiting(state))


def _survey(state: State) -> truth.Survey:
    """What is there. A sandbox whose time is over goes now, if it did not before: what it changed is in the archive then."""
    seen = truth.survey(state)
    for found in [found for found in seen.records if found.state != "running" and not found.kept]:
        if not record.is_over(state, found):
            continue
        with contextlib.suppress(ElsewhereError, OSError), record.exclusive(state, found.id, seconds=0.0) as again:
            if again.state == "running" or not record.is_over(state, again):
                continue  # somebody extended it, or started it just in time
            worth = not _is_of_experiment(state, again) and bool(again.snapshots or _unmoved(state, again))
            archived = ending.archive_or_discard(state, again.id, again, archive=worth)
            seen.records.remove(found)
            seen.healed.append({"id": again.id, "what": "expired", "was": "stopped", "is": "archived" if archived else "removed"})
            if again.tip is not None and not archived:
                ending.sweep(state, layers=True)
    return seen


def _is_of_experiment(state: State, found: Record) -> bool:
    """What an attempt of a race changed is kept with the race, for longer than its sandbox; unless somebody went on in it."""
    experiment, key = found.labels.get("experiment", ""), found.labels.get("approach", "")
    if not experiment or found.origin is None or "/" in experiment + key:
        return False
    try:
        written = os.stat(
            os.path.join(state.room("experiments"), experiment, f"{key}/changes.patch"), follow_symlinks=False
        ).st_mtime
    except FileNotFoundError:
        return False
    return found.ended_at is not None and found.ended_at <= written


@dataclass(frozen=True, slots=True)
class Keeping:
    """Who keeps a running sandbox. `skew`: it was started by another version of elsewhere."""

    pid: int
    version: str
    skew: bool


def inspect(wanted: str) -> tuple[State, Record, Keeping | None]:
    state = State.open()
    found = record.load(state, record.find(state, wanted))
    return state, found, keeping(state, found)


def keeping(state: State, found: Record) -> Keeping | None:
    reached = line.connect(state.sandbox(found.id)) if found.state == "running" else None
    if reached is None:
        return None
    with reached:
        try:
            version, _ = reached.version()
        except Broken:
            version = "unknown"
        return Keeping(reached.pid(), version, version != __version__)


def changes(wanted: str) -> tuple[Record, Changes]:
    state = State.open()
    found = record.load(state, record.find(state, wanted))
    return found, _changes(state, found)


def _changes(state: State, found: Record) -> Changes:
    """Layers that lie apart are read by way of the keeper that holds them."""
    reached = line.connect(state.sandbox(found.id)) if found.state == "running" and found.layers_apart else None
    if reached is None:
        return contents.changes_of(state, found)
    with reached:
        layers = reached.layers()
    try:
        return contents.changes_of(state, found, -1 if layers is None else layers)
    finally:
        if layers is not None:
            os.close(layers)


def _unmoved(state: State, found: Record) -> Changes:
    """What would be lost with it."""
    return nowhere_else(state, found, _changes(state, found))


# -- life -----------------------------------------------------------------------------------------------------------------------


def stop(wanted: str, *, grace: float = 5.0) -> tuple[State, Record]:
    state = State.open()
    return state, ending.stop(state, record.find(state, wanted), grace)


def stop_if_idle(wanted: str) -> None:
    """Nobody needs a keeper that has nothing to keep."""
    state = State.open()
    sandbox_id = record.find(state, wanted)
    reached = line.connect(state.sandbox(sandbox_id))
    if reached is not None:
        with reached:
            for _ in range(_LOOKS):  # what was just killed takes a moment to go
                idle = all(one.request == line.WINDOW for one in reached.processes())
                if idle:
                    break
                time.sleep(_LOOK_S)
        if idle:
            ending.stop(state, sandbox_id, 0.0)


def start(wanted: str, tell: Tell | None = None, pause: Pause = time.sleep) -> tuple[State, Record]:
    refuse_inside()
    state = State.open()
    box = enter(state, wanted, tell, pause, needs_ports=True)
    box.close()
    return state, box.record


def extend(wanted: str, lifetime: float | None) -> tuple[State, Record]:
    """From now on; None: for ever."""
    state = State.open()
    with record.exclusive(state, record.find(state, wanted)) as found:
        refuse_owned(found)
        # Before the keeper is told: one that ends by itself must not end earlier than what is written here.
        found.expires_at = None if lifetime is None else wall() + lifetime
        with contextlib.suppress(FileNotFoundError):  # somebody wants it: it is not idle
            os.utime(os.path.join(state.sandbox(found.id), "journal"))
        reached = line.connect(state.sandbox(found.id)) if found.state == "running" else None
        if reached is not None:
            with reached:
                reached.expire(lifetime)
        record.save(found, state.sandbox(found.id))
        return state, found


def refuse_owned(found: Record) -> None:
    """One that does not live on its own (it has no keeper of its own in its record) is its maker's, who decides about its end."""
    if found.state == "running" and found.keeper is None:
        raise InUse(
            "sandbox_in_use",
            f"the sandbox {found.id!r} belongs to a program that is still running",
            hint="wait for the end of that program",
        )


def keep(wanted: str, *, kept: bool = True) -> tuple[State, Record]:
    state = State.open()
    with record.exclusive(state, record.find(state, wanted)) as found:
        refuse_owned(found)
        found.kept = kept
        record.save(found, state.sandbox(found.id))
        return state, found


# -- removal --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Removal:
    matched: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    archived: list[str] = field(default_factory=list)
    healed: list[dict[str, str | None]] = field(default_factory=list)


def remove(wanted: list[str], *, force: bool = False) -> Removal:
    """Each of several is removed or skipped on its own. One that was named alone and cannot be removed is an error."""
    state = State.open()
    result = Removal(healed=_survey(state).healed)
    problems: list[ElsewhereError] = []
    for word in wanted:
        try:
            sandbox_id = record.find(state, word)
            result.matched.append(sandbox_id)
            _remove(state, sandbox_id, result, force=force)
        except ElsewhereError as error:
            problems.append(error)
            result.skipped.append({"id": word, "reason": error.message, **error.detail})
    ending.sweep(state, layers=True)
    if problems and len(wanted) == 1:
        raise problems[0]
    return result


def remove_all(*, force: bool = False) -> Removal:
    """Every sandbox; one that is at work, kept or changed is skipped unless forced, which is not an error here."""
    state = State.open()
    seen = _survey(state)
    result = Removal(state.sandbox_ids(), healed=seen.healed)
    for sandbox_id in result.matched:
        try:
            _remove(state, sandbox_id, result, force=force)
        except NotFound:
            continue  # somebody else was faster
        except ElsewhereError as error:
            result.skipped.append({"id": sandbox_id, "reason": error.message, **error.detail})
    ending.sweep(state, layers=True)
    return result


def discard(wanted: str) -> None:
    """Whoever made it says that nothing of it is worth keeping."""
    state = State.open()
    with record.exclusive(state, record.find(state, wanted)) as found:
        if found.state == "running":
            ending.end_keeper(state, found, 0.0)
        ending.archive_or_discard(state, found.id, found, archive=False)
    ending.sweep(state, layers=found.tip is not None or bool(found.snapshots))


def _remove(state: State, sandbox_id: str, result: Removal, *, force: bool) -> None:
    with record.locked(state, sandbox_id):
        found = _readable(state, sandbox_id, force=force)
        if found is None:
            ending.end_unknown(state, sandbox_id)
            archived = ending.archive_or_discard(state, sandbox_id, None, archive=True)
        else:
            what = _check_removable(state, found, force=force)
            with undisturbed():
                if found.state == "running":
                    ending.end_keeper(state, found, 0.0 if force else 2.0)
                    what = _unmoved(state, found)  # again: it could write until now
                archived = ending.archive_or_discard(state, sandbox_id, found, archive=bool(what or found.snapshots))
    result.removed.append(sandbox_id)
    if archived:
        result.archived.append(sandbox_id)


def _readable(state: State, sandbox_id: str, *, force: bool) -> Record | None:
    """Its record; None: it has none that can be read, and is to go all the same."""
    try:
        return record.load(state, sandbox_id)
    except (Broken, NotFound) as error:
        if not force:
            raise Refused(
                "unreadable_sandbox",
                f"the record of {sandbox_id!r} cannot be read, so nobody can tell what would be lost with it",
                hint=f"elsewhere rm --force {sandbox_id} moves it to the archive as it is",
            ) from error
        return None


def _check_removable(state: State, found: Record, *, force: bool) -> Changes:
    """What would be lost with it. Without force, only a sandbox in which nothing runs and nothing changed goes."""
    if found.kept and not force:
        raise Refused("sandbox_kept", f"the sandbox {found.id!r} is to be kept", hint=f"elsewhere keep --off {found.id}")
    if not force:
        refuse_owned(found)
    if found.state == "running" and not force:
        reached = line.connect(state.sandbox(found.id))
        busy = []
        if reached is not None:
            with reached:
                busy = [one for one in reached.processes() if one.request != line.WINDOW]
        if busy:
            raise InUse(
                "sandbox_in_use",
                f"{units.count(len(busy), 'process', 'processes')} at work in the sandbox {found.id!r}",
                hint=f"elsewhere ps {found.id}; elsewhere rm --force {found.id}",
            )
    what = _unmoved(state, found)
    if (what or found.snapshots) and not force:
        listed = [path for _, path in what]
        saved = units.count(len(found.snapshots), "snapshot")
        if what:
            lost = f"changes that are nowhere else: {what.summary()}" + (f" ({saved})" if found.snapshots else "")
            look = f"elsewhere diff {found.id}; elsewhere promote {found.id}"
        else:
            lost = f"{saved} that {'is' if len(found.snapshots) == 1 else 'are'} nowhere else"
            look = f"elsewhere snapshots {found.id}"
        raise Refused(
            "unpromoted_changes",
            f"the sandbox {found.id!r} has {lost}",
            hint=f"{look}; elsewhere rm --force {found.id} archives that",
            detail={"changes": listed[:_SHOWN], "count": len(listed)},
        )
    return what
