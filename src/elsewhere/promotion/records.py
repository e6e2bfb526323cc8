"""Promotions as they are written down: what was moved where, how far it got, and how it ended.

    journal/unfinished/<promotion-id>   those that have not ended, or not been cleared up: one look tells whether there are any
    journal/<promotion-id>/
        promotion.json      what this module says about it
        lock                held by whoever works on it: one that nobody holds and that has not ended was interrupted
        1/ 2/ …             what was done to a target, and how it is undone (see `applying.py`)
        change/             the change itself, if it has further to go than one target (see `freezing.py`)
        checkout/           HEAD and index, if they were moved (see `heads.py`)
        touched/ before/ replayed-<n>/    what commands that were run again could change, found and left (see `replaying.py`)
        basis/              what the sandbox had at each path (see `operations/earlier.py`)
        change.patch        the change as a patch, once a stage failed
        <stage>-change-<n>/                           the change as it is laid out for a deploy command (see `deploying.py`)
        <stage>-deploy-<n>.out .err, -rollback-       what such a command said
        <stage>-before-<n>-<check>.out .err, -after-  what each check of a stage said

    applying    at work, or interrupted         refused     conflicts: nothing was done      waiting   for a person
    applied     done                            failed      a check or a deploy failed       undone    done, and taken back
                                                reversed    interrupted, and put back

The directory is the truth; it is written aside and renamed. Not here: what is done (`applying.py`) and who asks for it.
"""

import contextlib
import json
import os
import pwd
from contextlib import AbstractContextManager
from dataclasses import asdict, field, fields
from typing import Any

from elsewhere.clock import wall
from elsewhere.errors import Broken, InUse, NotFound, UsageError
from elsewhere.promotion.journal import word_in
from elsewhere.storage import trash
from elsewhere.storage.state import State, locked, meant, write_aside
from elsewhere.values import dataclass

__all__ = ["ENDS", "JOURNAL", "UNFINISHED", "Promotion", "find", "held", "listed", "load", "new", "unfinished", "who"]

JOURNAL = "journal"
ENDS = ("applied", "refused", "failed", "reversed", "undone", "waiting")
UNFINISHED = "unfinished"
_FILE, _LOCK = "promotion.json", "lock"


@dataclass(slots=True)
class Promotion:
    """`kind` is promote, undo or replay; paths are relative to the project, absolute outside of it. `applications` are the
    directories that say what was done, in order; `base_at` is the moment of the base that the change began with. `stages` has an
    entry for each stage of the walk; `change` is the digest of what goes through them, `commands` are to be run again instead of
    moving files, and `choices` settle conflicts (ours, theirs)."""

    directory: str
    id: str
    kind: str
    sandbox: str
    project: str
    created_at: float
    status: str = "applying"
    ended_at: float | None = None
    stage: str | None = None
    by: str = ""
    applied: list[str] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    marked: list[dict[str, str]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    applications: list[str] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    base_at: float = 0.0
    change: str = ""
    commands: list[dict[str, Any]] = field(default_factory=list)
    choices: list[list[str]] = field(default_factory=lambda: [[], []])
    commits: dict[str, Any] | None = None
    undoes: str | None = None
    undone_by: str | None = None
    note: str = ""
    bytes: int | None = None

    def save(self, *, durable: bool = False) -> None:
        """`durable`: something is about to be done to reality, and after a power cut nobody but this record leads to it."""
        said = {name: value for name, value in asdict(self).items() if name != "directory"}
        mark = os.path.join(os.path.dirname(self.directory), UNFINISHED, self.id)
        if self.status not in ENDS:
            os.makedirs(os.path.dirname(mark), 0o700, exist_ok=True)
            os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        write_aside(os.path.join(self.directory, _FILE), json.dumps(said).encode())
        if durable:
            for path in (
                os.path.join(self.directory, _FILE),
                self.directory,
                os.path.dirname(mark),
                os.path.dirname(self.directory),
            ):
                _sync(path)
        if self.status in ENDS and not self.uncleared():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(mark)

    def end(self, status: str, note: str = "") -> None:
        self.status, self.ended_at, self.note = status, wall(), note
        self.save()

    def drop_contents(self) -> None:
        """Of one that did nothing, only what is said about it stays. Not by way of the trash: there may be no room."""
        for name in ("basis", "change"):
            trash.remove_tree(os.path.join(self.directory, name))

    def application(self) -> str:
        """The directory of one more, which is made by whoever fills it. The record knows it before anything is done."""
        name = str(len(self.applications) + 1)
        self.applications.append(name)
        self.save(durable=True)
        return os.path.join(self.directory, name)

    def uncleared(self) -> list[str]:
        """Journals of applications, also of stages, that have not come to their last word: something of theirs is still about."""
        places = [os.path.join(self.directory, name) for name in os.listdir(self.directory) if name.isdigit()]
        return [place for place in places if word_in(place) not in (None, "applied", "reversed")]

    @property
    def frozen(self) -> str:
        return os.path.join(self.directory, "change")

    @property
    def checkout(self) -> str:
        return os.path.join(self.directory, "checkout")

    def places(self) -> list[str]:
        """Of what was done, in order."""
        return [os.path.join(self.directory, name) for name in self.applications]


def new(state: State, kind: str, sandbox: str, project: str, **more: Any) -> Promotion:
    """Written down before anything is done."""
    now = wall()
    promotion_id, directory = state.entry(JOURNAL, "p", now)
    made = Promotion(directory, promotion_id, kind, sandbox, project, now, by=who(), **more)
    made.save()
    return made


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def who() -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def held(promotion: Promotion, *, wait: bool = False) -> AbstractContextManager[None]:
    """Nobody else works on it meanwhile."""
    busy = InUse("promotion_in_use", f"somebody works on the promotion {promotion.id!r} just now", hint="try again later")
    return locked(os.path.join(promotion.directory, _LOCK), busy, wait=wait)


def load(state: State, promotion_id: str) -> Promotion:
    directory = os.path.join(state.room(JOURNAL), promotion_id)
    try:
        with open(os.path.join(directory, _FILE), "rb") as stream:
            said = json.load(stream)
        known = {one.name for one in fields(Promotion)} - {"directory"}
        return Promotion(directory, **{name: value for name, value in said.items() if name in known})
    except FileNotFoundError:
        raise _not_found(promotion_id) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise Broken(
            "promotion_broken",
            f"what is written about the promotion {promotion_id!r} cannot be read: {error}",
            hint=f"look into {directory}",
        ) from error


def listed(state: State) -> list[Promotion]:
    """Oldest first; what cannot be read can only be asked for by its name."""
    with os.scandir(state.room(JOURNAL)) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    found = []
    for name in names:
        with contextlib.suppress(NotFound, Broken):
            found.append(load(state, name))
    return sorted(found, key=lambda one: (one.created_at, one.id))


def unfinished(state: State) -> list[Promotion]:
    """Those that have not ended: somebody is at work, or was interrupted."""
    place, found = os.path.join(state.room(JOURNAL), UNFINISHED), []
    for name in sorted(os.listdir(place)) if os.path.isdir(place) else ():
        try:
            found.append(load(state, name))
        except NotFound:
            with contextlib.suppress(FileNotFoundError):  # somebody else looks just now, too
                os.unlink(os.path.join(place, name))  # whoever began it came no further
        except Broken:
            continue  # it can only be asked for by its name
    return found


def find(state: State, wanted: str) -> Promotion:
    """By its id, the beginning of one, or `@last`."""
    found = meant(listed(state), wanted)
    if not found:
        raise _not_found(wanted)
    if len(found) > 1:
        raise UsageError(
            "ambiguous_promotion",
            f"{wanted!r} is the beginning of {len(found)} promotions",
            hint=", ".join(one.id for one in found),
        )
    return found[0]


def _not_found(wanted: str) -> NotFound:
    return NotFound("promotion_not_found", f"there is no promotion {wanted!r}", hint="elsewhere promotions lists them")
