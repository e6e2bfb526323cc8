"""What is really there: directories, processes and journals looked at, and the registry healed by them.

Before anything is listed or removed, `survey` looks. A sandbox counts as running only if its keeper lives; a request without an
end whose sandbox does not run is ended here, once. What is about to be deleted is written down first (`drain`): the history of
requests outlives the sandboxes.

The registry is loaded when it is first needed: `elsewhere --help` must not pay for a database.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import field, replace
from typing import TYPE_CHECKING

from elsewhere.clock import wall
from elsewhere.errors import Broken, ElsewhereError, InUse, NotFound
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.journal import Journal
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.records.request import UNFINISHED, Caller, Request, new_request_id
from elsewhere.storage import trash
from elsewhere.storage.state import State
from elsewhere.values import dataclass

if TYPE_CHECKING:
    from elsewhere.sandbox.records.registry import Fact, Registry, Row

__all__ = [
    "Survey",
    "drain",
    "empty_trash",
    "end_earlier_life",
    "forget",
    "name_reserved",
    "record_refusal",
    "requests",
    "row_of",
    "survey",
]


@dataclass(slots=True)
class Survey:
    """`records` newest first; `broken` are directories without a record that can be read; `healed` is what was found to be other
    than what had been written down."""

    records: list[Record] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    healed: list[dict[str, str | None]] = field(default_factory=list)


def _registry(state: State) -> "Registry":
    from elsewhere.sandbox.records.registry import Registry

    return Registry.open(state)


def row_of(state: State, found: Record) -> "Row":
    from elsewhere.sandbox.records.registry import Row, stamp_of

    return Row(
        id=found.id,
        state=found.state,
        project=found.project,
        base=str(found.base.get("kind", "")),
        created_at=found.created_at,
        name=found.name,
        request=found.identity.get("request", ""),
        ended_at=found.ended_at,
        expires_at=found.expires_at,
        keep=found.kept,
        labels=found.labels,
        stamp=stamp_of(state, found.id),
    )


def survey(state: State) -> Survey:
    drain(state)
    result = Survey()
    with _registry(state) as registry:
        known = {row.id: row for row in registry.rows()}
        facts = []
        for sandbox_id in state.sandbox_ids():
            fact = _look(state, sandbox_id, known.get(sandbox_id), registry, result)
            if fact is not None:
                facts.append(fact)
        healed = registry.reconcile(facts, now=wall())
    stamps = {fact.row.id: fact.row.stamp for fact in facts}
    for entry in healed.healed:
        row = known.get(str(entry["id"]))
        # A record that was written since is news, not a falsehood.
        if entry["what"] != "state" or (row is not None and row.stamp == stamps.get(row.id)):
            result.healed.append(entry)
    for request in healed.lost:
        with contextlib.suppress(ElsewhereError):
            Journal(state.sandbox(request.sandbox)).end(request.id, "lost")
    result.records.sort(key=lambda found: (found.created_at, found.id), reverse=True)
    return result


def _look(state: State, sandbox_id: str, known: "Row | None", registry: "Registry", result: Survey) -> "Fact | None":
    """In this order: is the keeper alive, the record, the journal. A journal without a keeper does not grow any more."""
    from elsewhere.sandbox.records.registry import Fact, Row, stamp_of

    directory = state.sandbox(sandbox_id)
    stamp = stamp_of(state, sandbox_id)  # before the record is read: a change in between must not pass unseen
    try:
        found = record.load(state, sandbox_id)
    except NotFound:
        if not os.path.isdir(directory):
            return None
        result.broken.append(sandbox_id)
        return Fact(Row(sandbox_id, "broken", "", "", 0.0))
    except Broken:
        result.broken.append(sandbox_id)
        return Fact(Row(sandbox_id, "broken", "", "", 0.0, stamp=stamp))
    if found.lost and found.ended_at is None:
        result.healed.append({"id": sandbox_id, "what": "state", "was": "running", "is": "stopped"})
        _write_down_the_loss(state, sandbox_id)
    result.records.append(found)
    row = replace(row_of(state, found), stamp=stamp)
    same = known is not None and known.created_at == found.created_at
    offset = known.journal_offset if known is not None and same else 0
    unfinished = registry.requests(sandbox=sandbox_id, states=UNFINISHED) if offset else []
    read = Journal(directory).read(offset, unfinished)
    return Fact(replace(row, journal_offset=read.offset), read.changed, offset)


def _write_down_the_loss(state: State, sandbox_id: str) -> None:
    """So that it is found once, and not every time. Whoever is at work on the sandbox right now will do it themselves."""
    with contextlib.suppress(ElsewhereError, OSError), record.exclusive(state, sandbox_id, seconds=0.0) as found:
        if found.lost and found.ended_at is None:
            found.ended_at, found.keeper = wall(), None
            record.save(found, state.sandbox(sandbox_id))


def end_earlier_life(state: State, sandbox_id: str) -> None:
    """Before a sandbox runs again: what its last keeper left without an end does not go on with the next one."""
    journal = Journal(state.sandbox(sandbox_id))
    for request in journal.read().changed:
        waits = request.pid is None and request.caller is not None and request.caller.is_alive()
        if not request.is_over and not waits:
            journal.end(request.id, "lost")


def requests(
    state: State, *, sandbox: str | None = None, states: list[str] | None = None, limit: int | None = None
) -> list[Request]:
    """Newest first, after a survey: what it says is so."""
    survey(state)
    with _registry(state) as registry:
        return registry.requests(sandbox=sandbox, states=states, limit=limit)


def drain(state: State) -> None:
    """Bring what the journals in the trash say into the registry: whoever threw them there did not wait for that."""
    for name in os.listdir(state.room("trash")):
        _drain(state, name)


def empty_trash(state: State) -> int:
    """How many entries could not be deleted yet."""
    return trash.empty(state.room("trash"), lambda name: _drain(state, name))


def _drain(state: State, name: str) -> None:
    """One entry, named by chance and then by its sandbox. A registry that cannot be written (a full disk) must not keep the trash
    from being emptied."""
    directory = os.path.join(state.room("trash"), name)
    if not any(os.path.lexists(os.path.join(directory, file)) for file in ("journal", "sandbox.json")):
        return
    with contextlib.suppress(ElsewhereError):
        forget(state, name.partition("-")[2], directory)


def forget(state: State, sandbox_id: str, directory: str) -> None:
    """A sandbox that goes leaves its requests; `directory` is where its own is now."""
    with _registry(state) as registry:
        found = Journal(directory, sandbox=sandbox_id).read().changed
        registry.record_requests(one if one.is_over else one.ended("killed", wall()) for one in found)
        if not os.path.isdir(state.sandbox(sandbox_id)):
            registry.remove(sandbox_id)


@contextlib.contextmanager
def name_reserved(state: State, name: str | None, sandbox_id: str) -> Iterator[None]:
    """While a sandbox of that name is made, nobody else can make one."""
    if name is None:
        yield
        return
    if name in state.sandbox_ids():
        raise InUse("name_in_use", f"{name!r} is the id of a sandbox", hint="choose another name")
    with _registry(state) as registry:
        if registry.rebuilt:
            survey(state)
        registry.reserve_name(name, sandbox_id)
        try:
            yield
            registry.put(row_of(state, record.load(state, sandbox_id)))
        except BaseException:
            # One that is there has its name: it was made all the same, or by somebody who was faster with the same request.
            if not os.path.isdir(state.sandbox(sandbox_id)):
                registry.release_name(name, sandbox_id)
            raise


def record_refusal(state: State, kind: str, argv: list[str]) -> None:
    """A request that never got a sandbox leaves its record all the same."""
    now = wall()
    refused = Request(new_request_id(), "", kind, tuple(argv), "pending", now, caller=Caller.this()).ended("refused", now)
    with contextlib.suppress(ElsewhereError), _registry(state) as registry:
        registry.record_requests([refused])
