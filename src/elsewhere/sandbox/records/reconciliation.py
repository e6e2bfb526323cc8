"""Reconciliation: the registry's tables are made to agree with what somebody found in the sandboxes' directories.

    found                                       in the registry                becomes
    directory                                   no row                         row                            healed: added
    directory, another state or name            row                            as found                       healed: state, name
    no directory                                row                            no row, its name is free       healed: removed
    directory of two, one name                  -                              the older one keeps it         healed: name
    no process that could end it                request without an end         failed, lost; once
    news in a journal                           -                              recorded; nothing was wrong

Others go on while somebody looks, so what was found may be old. Nothing is believed that contradicts a row until the directory
has been asked again, here, where nobody else can write: it must be there, with the same sandbox.json. Not here: looking.
"""

import os
import sqlite3
from collections.abc import Sequence
from dataclasses import field, replace
from operator import attrgetter

from elsewhere.errors import StateError
from elsewhere.sandbox.records.journal import Journal
from elsewhere.sandbox.records.request import Request
from elsewhere.sandbox.records.tables import (
    Row,
    decode_caller,
    delete_sandbox,
    insert_row,
    lives,
    load_requests,
    load_rows,
    record,
)
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Fact", "Healed", "Reconciliation", "is_filled", "stamp_of", "verify"]

# Between a caller's note that it starts something and the keeper's that it began lies one message.
_GRACE_S = 60.0
_compared = attrgetter(
    "id", "state", "project", "base", "created_at", "name", "request", "ended_at", "expires_at", "keep", "labels", "stamp"
)


@dataclass(frozen=True, slots=True)
class Fact:
    """What is really true of one existing sandbox: `row`, with the stamp of the sandbox.json that was read and the place where
    its journal ended; and the requests that are new or changed in its journal since `read_from`."""

    row: Row
    requests: Sequence[Request] = ()
    read_from: int = 0


@dataclass(frozen=True, slots=True)
class Healed:
    """`healed`: {"id", "what": "added|removed|state|name", "was", "is"}. `lost`: requests that were ended because nobody is left
    who could; their journals do not say so yet. `rebuilt`: the directories had never been read into this registry before."""

    healed: list[dict[str, str | None]] = field(default_factory=list)
    lost: list[Request] = field(default_factory=list)
    rebuilt: bool = False


def stamp_of(state: State, sandbox_id: str) -> str:
    """Tells one sandbox.json from any that was or will be there; empty if there is none."""
    try:
        about = os.lstat(os.path.join(state.sandbox(sandbox_id), "sandbox.json"))
    except OSError:
        return ""
    return f"{about.st_mtime_ns}-{about.st_ino}-{about.st_size}"


class Reconciliation:
    """One transaction's work."""

    def __init__(self, state: State, connection: sqlite3.Connection, facts: dict[str, Fact], now: float) -> None:
        self._state = state
        self._connection = connection
        self._facts = facts
        self._now = now
        self._stale: set[str] = set()
        self._result = Healed(rebuilt=not is_filled(connection))

    def run(self) -> Healed:
        rows, junk = load_rows(self._connection, self._state)
        for identifier in junk:
            delete_sandbox(self._connection, identifier)
            if identifier not in self._facts:
                self._heal(ascii(identifier) if not isinstance(identifier, str) else identifier, "removed", None, None)
        for sandbox_id in sorted(self._facts, key=lambda known: (self._facts[known].row.created_at, known)):
            self._settle(rows.get(sandbox_id), self._facts[sandbox_id])
        for sandbox_id, row in rows.items():
            if sandbox_id not in self._facts and not self._is_there(sandbox_id):
                delete_sandbox(self._connection, sandbox_id)
                self._heal(sandbox_id, "removed", row.state, None)
        self._settle_names()
        for request in load_requests(self._connection, "WHERE ended_at IS NULL"):
            self._settle_request(request)
        if self._result.rebuilt:
            self._connection.execute("INSERT OR REPLACE INTO notes VALUES ('filled', 'yes')")
        return self._result

    def _settle(self, old: Row | None, fact: Fact) -> None:
        new, requests = fact.row, fact.requests
        if old is None or not _agree(old, new):
            if not self._is_there(new.id) or stamp_of(self._state, new.id) != new.stamp:
                self._stale.add(new.id)  # it has moved on since: whoever moved it says so, or the next look does
                return
            if fact.read_from and (old is None or old.created_at != new.created_at):
                reading = Journal(self._state.sandbox(new.id)).read()
                requests, new = reading.changed, replace(new, journal_offset=reading.offset)
        elif old.journal_offset != fact.read_from and fact.read_from:
            new = replace(new, journal_offset=old.journal_offset)  # somebody else has read on
        for request in requests:
            record(self._connection, request)
        if old is None and new.state != "creating":
            self._heal(new.id, "added", None, new.state)
        elif old is not None and old.state != new.state:
            self._heal(new.id, "state", old.state, new.state)
        if old is None or old.name != new.name:
            new = self._settle_name(old, new)
        if old is None or old.journal_offset != new.journal_offset or not _agree(old, new):
            insert_row(self._connection, replace(new, updated_at=self._now))

    def _settle_name(self, old: Row | None, new: Row) -> Row:
        """The name that the directory says, unless an older sandbox has it."""
        holder = None
        if new.name is not None:
            holder = self._connection.execute("SELECT sandbox FROM names WHERE name = ?", (new.name,)).fetchone()
        if holder is not None and holder[0] != new.id and holder[0] in self._facts:
            new = replace(new, name=None)
        self._connection.execute("DELETE FROM names WHERE sandbox = ?", (new.id,))
        if new.name is not None:
            self._connection.execute("INSERT OR REPLACE INTO names VALUES (?, ?, '')", (new.name, new.id))
        if old is not None and old.name != new.name:
            self._heal(new.id, "name", old.name, new.name)
        return new

    def _settle_names(self) -> None:
        """Claims of processes that died before they made their sandbox."""
        query = "SELECT name, sandbox, claimed_by FROM names LEFT JOIN sandboxes ON id = sandbox WHERE id IS NULL"
        for name, sandbox, claimed_by in self._connection.execute(query).fetchall():
            if not lives(decode_caller(claimed_by)) and not (isinstance(sandbox, str) and self._is_there(sandbox)):
                self._connection.execute("DELETE FROM names WHERE name = ?", (name,))

    def _settle_request(self, request: Request) -> None:
        fact = None if request.sandbox in self._stale else self._facts.get(request.sandbox)
        if fact is None and self._is_there(request.sandbox):
            return
        waits = request.pid is None and lives(request.caller)
        if fact is not None and fact.row.state == "running":
            waits = waits or request.pid is not None or self._now - request.created_at < _GRACE_S
        if waits:
            return
        at = self._now
        if fact is not None and fact.row.ended_at is not None and fact.row.ended_at >= request.created_at:
            at = fact.row.ended_at
        written = {}
        if fact is not None:  # its end may have been written after the journal was read
            written = {found.id: found for found in Journal(self._state.sandbox(request.sandbox)).read().changed}
        ended = written.get(request.id, request)
        if not ended.is_over:
            if fact is not None and stamp_of(self._state, request.sandbox) != fact.row.stamp:
                return  # the sandbox runs again since somebody looked, and this may be what it runs
            ended = request.ended("lost", at)
            self._result.lost.append(ended)
        record(self._connection, ended)

    def _is_there(self, sandbox_id: str) -> bool:
        try:
            return os.path.isdir(self._state.sandbox(sandbox_id))
        except StateError:
            return False

    def _heal(self, sandbox_id: str, what: str, was: str | None, now: str | None) -> None:
        self._result.healed.append({"id": sandbox_id, "what": what, "was": was, "is": now})


def _agree(one: Row, other: Row) -> bool:
    return _compared(one) == _compared(other)


def is_filled(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT value FROM notes WHERE key = 'filled'").fetchone() is not None


def verify(connection: sqlite3.Connection) -> None:
    """What SQLite itself would notice only when it happens upon it. The history is checked less closely: it may be long."""
    for check in ("quick_check", "integrity_check(sandboxes)", "integrity_check(names)"):
        found = connection.execute(f"PRAGMA {check}").fetchone()
        if found != ("ok",):
            raise sqlite3.DatabaseError(f"{check}: {found}")
