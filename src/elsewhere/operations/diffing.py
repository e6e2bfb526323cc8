"""What is different between two states of sandboxes: what a sandbox did, or what two of them did differently.

A state is written as a word: `base` (what the sandbox started from), `now`, the name of one of its snapshots; `ID` or `ID:STATE`
for another sandbox of the same project. What lies outside the project is apart, and so are git's own files: whoever commits
inside wants to see the files, and not git's bookkeeping.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator

from elsewhere.changes import packages
from elsewhere.changes.globs import matcher
from elsewhere.changes.model import Change, Changes
from elsewhere.changes.packages import Summary
from elsewhere.changes.patch import FileStat, Patch, is_git, patch
from elsewhere.changes.renames import with_renames
from elsewhere.errors import InUse, NotFound, UsageError
from elsewhere.paths import is_within
from elsewhere.sandbox import contents
from elsewhere.sandbox.keeping import line
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.layers import Layers
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Difference", "difference"]

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """`changes` are all of them, renames not looked for; `inside` is what changed in the project, `outside` the rest, `summary`
    the same by package; `git` is how many of git's own files changed. `before` and `after` are the states as they were asked
    for."""

    record: Record
    before: str
    after: str
    changes: Changes
    inside: Changes
    git: int
    outside: Changes
    summary: Summary

    def stat(self) -> list[FileStat]:
        return self.inside.stat()

    def patch(self) -> Patch:
        return patch(self.inside)

    def configuration(self) -> list[str]:
        return packages.configuration(self.outside)

    def told(self, what: str) -> list[Change]:
        """The changes of which this is different: type, mode or link."""
        return [one for one in self.inside.entries if what in one.what]


@contextlib.contextmanager
def difference(
    wanted: str, before: str = contents.BASE, after: str = contents.NOW, patterns: Iterable[str] = ()
) -> Iterator[Difference]:
    """What is different in the state `after`, as far as paths fit the patterns. Contents can be read until the block ends."""
    state = State.open()
    sandbox_id = record.find(state, wanted)
    # Who only reads holds no lock of the sandbox: if it moved on to another layer meanwhile, we look again.
    for _ in range(_TRIES):
        with contextlib.ExitStack() as stack:
            stack.enter_context(Layers(state).referring())
            found = record.load(state, sandbox_id)
            sides = [_named(state, found, word) for word in (before, after)]
            changes = _compared(state, sides, stack)
            if any(record.load(state, one.id).tip != one.tip for one, _ in sides):
                continue
            yield _split(found, before, after, changes.where(matcher(patterns, found.project)))
            return
    raise InUse("sandbox_in_use", f"the sandbox {sandbox_id!r} goes from snapshot to snapshot", hint="wait a moment")


def _named(state: State, found: Record, word: str) -> tuple[Record, str]:
    """Which sandbox's which moment a word means."""
    if word in (contents.BASE, contents.NOW) or any(one["name"] == word for one in found.snapshots):
        return found, word
    wanted, _, moment = word.partition(":")
    try:
        other = record.load(state, record.find(state, wanted))
    except NotFound as error:
        raise NotFound(
            "state_not_found",
            f"{word!r} is neither base nor now, nor a snapshot of {found.id!r}, nor a sandbox",
            hint=f"elsewhere snapshots {found.id}; elsewhere list",
        ) from error
    if other.project != found.project:
        raise UsageError(
            "other_project",
            f"{other.id!r} is a sandbox of {other.project!r}, and {found.id!r} one of {found.project!r}",
            hint="compare sandboxes of one project",
        )
    return other, moment or contents.NOW


def _compared(state: State, sides: list[tuple[Record, str]], stack: contextlib.ExitStack) -> Changes:
    own: dict[str, str] = {}
    for one, _ in sides:
        if one.id not in own:
            own[one.id] = stack.enter_context(contents.reached(state, one, _held(state, one, stack)))
    before, after = ((one, contents.state_of(state, one, moment, own[one.id])) for one, moment in sides)
    return contents.differences(state, before, after)


def _held(state: State, found: Record, stack: contextlib.ExitStack) -> int:
    """Layers that lie apart are read by way of the keeper that holds them."""
    reached = line.connect(state.sandbox(found.id)) if found.state == "running" and found.layers_apart else None
    if reached is None:
        return -1
    with reached:
        layers = reached.layers()
    if layers is None:
        return -1
    stack.callback(os.close, layers)
    return layers


def _split(found: Record, before: str, after: str, changes: Changes) -> Difference:
    top = f"{found.project.rstrip('/')}/"

    def is_gits(path: str) -> bool:
        """The repository of a linked worktree lies elsewhere."""
        return is_git(path, found.project) or (found.git is not None and is_within(path, found.git))

    inside = with_renames(changes.where(lambda path: path.startswith(top) and not is_gits(path)))
    outside = with_renames(changes.where(lambda path: not path.startswith(top) and not is_gits(path)))
    git = sum(is_gits(one.path) for one in changes.entries)
    return Difference(found, before, after, changes, inside, git, outside, packages.summarise(outside))
