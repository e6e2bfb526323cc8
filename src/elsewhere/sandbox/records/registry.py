"""The registry: a quick index of all sandboxes, their names, and the history of requests. It is healed, never believed.

    $ELSEWHERE_HOME/registry.db     SQLite (see `storage/database.py` for the file, `tables.py` for what is in it)

Each sandbox's directory is the truth. `reconcile` is given what somebody found there and makes the registry agree, in one
transaction (see `reconciliation.py`). The order that makes this safe for everybody else:

    create    reserve_name ─► directory and sandbox.json ─► put
    change    sandbox.json ─► put
    remove    directory renamed away ─► remove
    look      is the keeper alive? ─► sandbox.json ─► journal ─► reconcile       (a journal without a keeper does not grow)

Not here: looking into directories, and deleting them. A path that stands in the registry is for display.
"""

import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from elsewhere.clock import Clock, wall
from elsewhere.errors import InUse, StateError
from elsewhere.sandbox.records.reconciliation import Fact, Healed, Reconciliation, is_filled, stamp_of, verify
from elsewhere.sandbox.records.request import UNFINISHED, Caller, Request
from elsewhere.sandbox.records.tables import (
    SCHEMA,
    Row,
    decode_caller,
    delete_sandbox,
    encode_caller,
    insert_row,
    lives,
    load_requests,
    load_rows,
    record,
)
from elsewhere.storage.database import Database
from elsewhere.storage.state import State

__all__ = ["Fact", "Healed", "Registry", "Row", "stamp_of"]


class Registry:
    """Open it once for each process; threads may share it."""

    def __init__(self, state: State, *, clock: Clock = wall) -> None:
        self._state = state
        self._clock = clock
        self._database = Database(os.path.join(state.path, "registry.db"), SCHEMA, clock=clock)

    @classmethod
    def open(cls, state: State, *, clock: Clock = wall) -> "Registry":
        made = cls(state, clock=clock)
        made._database.read(lambda _: None)
        return made

    def __enter__(self) -> "Registry":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    @property
    def rebuilt(self) -> bool:
        """Nobody has read the directories into this database yet: reconcile before you believe that a name is free."""
        return self._database.read(lambda connection: not is_filled(connection))

    @property
    def moved_aside(self) -> list[str]:
        """The broken databases that this process found, where they lie now."""
        return list(self._database.moved_aside)

    # -- sandboxes ------------------------------------------------------------------------------------------------------------

    def put(self, row: Row) -> None:
        """Add or replace one. How far its journal was read is known better here, unless it is another sandbox of that id."""
        self._state.sandbox(row.id)

        def work(connection: sqlite3.Connection) -> None:
            known = load_rows(connection, self._state, row.id)[0].get(row.id)
            offset = known.journal_offset if known is not None and known.created_at == row.created_at else 0
            if row.name is None:
                connection.execute("DELETE FROM names WHERE sandbox = ?", (row.id,))
            elif known is None or known.name != row.name:
                self._claim(connection, row.name, row.id)
            insert_row(connection, replace(row, updated_at=self._clock(), journal_offset=offset))

        self._database.write(work)

    def remove(self, sandbox_id: str) -> None:
        """Forget one whose directory is gone. What still ran in it was killed by its removal; its requests stay as history."""

        def work(connection: sqlite3.Connection) -> None:
            delete_sandbox(connection, sandbox_id)
            for request in load_requests(connection, "WHERE sandbox = ? AND ended_at IS NULL", (sandbox_id,)):
                record(connection, request.ended("killed", self._clock()))

        self._database.write(work)

    def rows(self) -> list[Row]:
        """As last put or reconciled, newest first."""
        found = self._database.read(lambda connection: load_rows(connection, self._state)[0])
        return sorted(found.values(), key=lambda row: (row.created_at, row.id), reverse=True)

    def row(self, sandbox_id: str) -> Row | None:
        return self._database.read(lambda connection: load_rows(connection, self._state, sandbox_id)[0]).get(sandbox_id)

    # -- names ----------------------------------------------------------------------------------------------------------------

    def reserve_name(self, name: str, sandbox_id: str) -> None:
        """Claim a name for a sandbox that is about to be made; it is kept for as long as this process or that sandbox exists."""
        self._state.sandbox(sandbox_id)
        self._database.write(lambda connection: self._claim(connection, name, sandbox_id))

    def release_name(self, name: str, sandbox_id: str) -> None:
        values = (name, sandbox_id)
        self._database.write(lambda connection: connection.execute("DELETE FROM names WHERE name = ? AND sandbox = ?", values))

    def names(self) -> dict[str, str]:
        """Names of sandboxes that exist, with their ids."""
        return {row.name: row.id for row in self.rows() if row.name is not None}

    def _claim(self, connection: sqlite3.Connection, name: str, sandbox_id: str) -> None:
        found = connection.execute(
            "SELECT sandbox, claimed_by, id FROM names LEFT JOIN sandboxes ON id = sandbox WHERE name = ?", (name,)
        ).fetchone()
        if found is not None and found[0] != sandbox_id:
            if self._exists(found[0]) or (found[2] is None and lives(decode_caller(found[1]))):
                raise InUse(
                    "name_in_use",
                    f"the name {name!r} belongs to the sandbox {found[0]!r}",
                    hint=f"choose another name, or remove that one: elsewhere rm {name}",
                )
            connection.execute("DELETE FROM names WHERE name = ?", (name,))
        values = (name, sandbox_id, encode_caller(Caller.this()))
        connection.execute("DELETE FROM names WHERE sandbox = ?", (sandbox_id,))
        connection.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?)", values)

    # -- requests -------------------------------------------------------------------------------------------------------------

    def record_requests(self, requests: Iterable[Request]) -> None:
        """Add or update; one that is over is never changed again."""
        several = list(requests)

        def work(connection: sqlite3.Connection) -> None:
            for request in several:
                record(connection, request)

        self._database.write(work)

    def requests(
        self, *, sandbox: str | None = None, states: Sequence[str] | None = None, limit: int | None = None
    ) -> list[Request]:
        """Newest first."""
        clauses: list[str] = []
        values: list[Any] = []
        if sandbox is not None:
            clauses.append("sandbox = ?")
            values.append(sandbox)
        if states is not None:
            clauses.append(f"state IN ({', '.join('?' * len(states))})")
            values += states
            if set(states) <= set(UNFINISHED):
                clauses.append("ended_at IS NULL")
        where = f"WHERE {' AND '.join(clauses)} " if clauses else ""
        order = "ORDER BY created_at DESC, id DESC LIMIT ?"
        values.append(-1 if limit is None else limit)
        return self._database.read(lambda connection: load_requests(connection, where + order, tuple(values)))

    def request(self, request_id: str) -> Request | None:
        found = self._database.read(lambda connection: load_requests(connection, "WHERE id = ?", (request_id,)))
        return found[0] if found else None

    # -- truth ----------------------------------------------------------------------------------------------------------------

    def reconcile(self, facts: Iterable[Fact], *, now: float) -> Healed:
        """Make the registry agree with `facts`: one for every sandbox directory there is."""
        known = {fact.row.id: fact for fact in facts if self._is_id(fact.row.id)}
        self._database.read(verify)
        return self._database.write(lambda connection: Reconciliation(self._state, connection, known, now).run())

    def _exists(self, sandbox_id: object) -> bool:
        return self._is_id(sandbox_id) and os.path.isdir(self._state.sandbox(str(sandbox_id)))

    def _is_id(self, value: object) -> bool:
        try:
            return isinstance(value, str) and bool(self._state.sandbox(value))
        except StateError:
            return False
