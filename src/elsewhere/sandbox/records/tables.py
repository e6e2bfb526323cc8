"""The registry's tables, and how sandboxes and requests stand in them. Not here: who may change them when (see `registry.py`).

    sandboxes   one row for each sandbox; `stamp` and `journal_offset` say how far its directory has been read
    names       name -> sandbox: also of one that is only about to be made, then with the process that claimed it
    requests    one row for each request, of removed sandboxes too; `ended_at` is set exactly when it is over
    notes       `filled`: the directories have been read into this database since it was made

What is read is checked, value by value: a row that says anything absurd is as good as none. Text that is not UTF-8 (the path of
a project) is kept as bytes; lists and mappings are JSON.
"""

import json
import os
import sqlite3
from dataclasses import field
from typing import Any

from elsewhere.errors import StateError
from elsewhere.sandbox.records.request import KINDS, REASONS, TERMINAL, UNFINISHED, Caller, Request, is_request_id
from elsewhere.storage.database import Schema
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = [
    "SCHEMA",
    "Row",
    "decode_caller",
    "delete_sandbox",
    "encode_caller",
    "insert_row",
    "load_requests",
    "load_rows",
    "record",
]

SCHEMA = Schema(
    version=1,
    statements=(
        """CREATE TABLE sandboxes(id TEXT PRIMARY KEY, request TEXT NOT NULL, project TEXT NOT NULL, state TEXT NOT NULL,
            base TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL, ended_at REAL, expires_at REAL,
            keep INTEGER NOT NULL, labels TEXT NOT NULL, stamp TEXT NOT NULL, journal_offset INTEGER NOT NULL) WITHOUT ROWID""",
        "CREATE TABLE names(name TEXT PRIMARY KEY, sandbox TEXT NOT NULL, claimed_by TEXT NOT NULL) WITHOUT ROWID",
        "CREATE UNIQUE INDEX names_by_sandbox ON names(sandbox)",
        """CREATE TABLE requests(id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, kind TEXT NOT NULL, argv TEXT NOT NULL,
            cwd TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, exit_code INTEGER, signal INTEGER,
            created_at REAL NOT NULL, started_at REAL, ended_at REAL, usage TEXT NOT NULL, outputs TEXT NOT NULL,
            detached INTEGER NOT NULL, timeout REAL, pid INTEGER, caller TEXT NOT NULL) WITHOUT ROWID""",
        "CREATE INDEX requests_by_sandbox ON requests(sandbox, created_at)",
        "CREATE INDEX requests_by_time ON requests(created_at)",
        "CREATE INDEX requests_unfinished ON requests(sandbox) WHERE ended_at IS NULL",
        "CREATE TABLE notes(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    ),
)

# `broken`: a directory whose sandbox.json cannot be read.
_STATES = ("creating", "running", "stopped", "removing", "removed", "broken")
_INSERT_ROW = "INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
# What is over stays as it is; what has begun does not go back to waiting; and no sandbox speaks for another.
_RECORD = """INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET
    state = excluded.state, reason = CASE excluded.reason WHEN '' THEN reason ELSE excluded.reason END,
    exit_code = excluded.exit_code, signal = excluded.signal, started_at = coalesce(excluded.started_at, started_at),
    ended_at = excluded.ended_at, usage = excluded.usage, pid = coalesce(excluded.pid, pid), outputs = excluded.outputs
    WHERE ended_at IS NULL AND sandbox = excluded.sandbox
    AND (excluded.ended_at IS NOT NULL OR pid IS NULL OR excluded.pid IS NOT NULL)"""


@dataclass(frozen=True, slots=True)
class Row:
    """A sandbox as it is listed. `project` is for display; nothing here is ever a path to delete."""

    id: str
    state: str
    project: str
    base: str
    created_at: float
    name: str | None = None
    request: str = ""
    updated_at: float = 0.0
    ended_at: float | None = None
    expires_at: float | None = None
    keep: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    stamp: str = ""
    journal_offset: int = 0


def insert_row(connection: sqlite3.Connection, row: Row) -> None:
    assert row.state in _STATES, row.state
    labels = json.dumps(row.labels, separators=(",", ":"))
    connection.execute(
        _INSERT_ROW,
        (
            row.id,
            _text(row.request),
            _text(row.project),
            row.state,
            _text(row.base),
            row.created_at,
            row.updated_at,
            row.ended_at,
            row.expires_at,
            row.keep,
            labels,
            row.stamp,
            row.journal_offset,
        ),
    )


def delete_sandbox(connection: sqlite3.Connection, sandbox: object) -> None:
    """The row and the name; `sandbox` may be anything that was found in the place of an id."""
    connection.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox,))
    connection.execute("DELETE FROM names WHERE sandbox = ?", (sandbox,))


def load_rows(connection: sqlite3.Connection, state: State, sandbox: str | None = None) -> tuple[dict[str, Row], list[Any]]:
    """All rows, or one, and what stands in the place of an id where no row could be made of it."""
    where, wanted = ("", ()) if sandbox is None else (" WHERE id = ?", (sandbox,))
    query = f"SELECT sandboxes.*, name FROM sandboxes LEFT JOIN names ON sandbox = id{where}"  # noqa: S608
    rows, junk = {}, []
    for values in connection.execute(query, wanted):
        try:
            row = _row(values, state)
            rows[row.id] = row
        except (ValueError, TypeError, StateError):
            junk.append(values[0])
    return rows, junk


def _row(values: tuple[Any, ...], state: State) -> Row:
    (
        identifier,
        request,
        project,
        status,
        base,
        created_at,
        updated_at,
        ended_at,
        expires_at,
        keep,
        labels,
        stamp,
        offset,
        name,
    ) = values
    _require(isinstance(identifier, str) and status in _STATES and isinstance(stamp, str))
    _require(name is None or isinstance(name, str))
    _require(isinstance(offset, int) and offset >= 0 and keep in (0, 1))
    state.sandbox(identifier)
    named = json.loads(labels)
    _require(isinstance(named, dict) and all(isinstance(value, str) for value in named.values()))
    return Row(
        id=identifier,
        state=status,
        project=_untext(project),
        base=_untext(base),
        created_at=_time(created_at),
        name=name,
        request=_untext(request),
        updated_at=_time(updated_at),
        ended_at=None if ended_at is None else _time(ended_at),
        expires_at=None if expires_at is None else _time(expires_at),
        keep=bool(keep),
        labels=named,
        stamp=stamp,
        journal_offset=offset,
    )


def record(connection: sqlite3.Connection, request: Request) -> None:
    ended_at = request.ended_at if request.ended_at is not None else request.created_at
    connection.execute(
        _RECORD,
        (
            request.id,
            request.sandbox,
            request.kind,
            json.dumps(request.argv, separators=(",", ":")),
            _text(request.cwd),
            request.state,
            request.reason,
            request.exit_code,
            request.signal,
            request.created_at,
            request.started_at,
            ended_at if request.is_over else None,
            json.dumps(request.usage, separators=(",", ":")),
            json.dumps(request.outputs, separators=(",", ":")),
            request.detached,
            request.timeout,
            request.pid,
            encode_caller(request.caller),
        ),
    )


def load_requests(connection: sqlite3.Connection, where: str = "", values: tuple[Any, ...] = ()) -> list[Request]:
    found = []
    for row in connection.execute(f"SELECT * FROM requests {where}", values):  # noqa: S608
        try:
            found.append(_request(row))
        except (ValueError, TypeError):
            continue
    return found


def _request(values: tuple[Any, ...]) -> Request:
    identifier, sandbox, kind, argv, cwd, state, reason, code, number, created, started, ended, usage, outputs = values[:14]
    detached, timeout, pid, caller = values[14:]
    words, used, places = json.loads(argv), json.loads(usage), json.loads(outputs)
    _require(is_request_id(identifier) and isinstance(sandbox, str) and kind in KINDS)
    _require(state in (UNFINISHED if ended is None else TERMINAL) and reason in ("", *REASONS))
    _require(isinstance(words, list) and isinstance(used, dict) and isinstance(places, dict))
    _require(all(value is None or isinstance(value, int) for value in (code, number, pid)) and detached in (0, 1))
    return Request(
        id=identifier,
        sandbox=sandbox,
        kind=kind,
        argv=tuple(map(str, words)),
        state=state,
        created_at=_time(created),
        cwd=_untext(cwd),
        reason=reason,
        exit_code=code,
        signal=number,
        started_at=None if started is None else _time(started),
        ended_at=None if ended is None else _time(ended),
        usage=used,
        outputs=places,
        detached=bool(detached),
        timeout=None if timeout is None else _time(timeout),
        pid=pid,
        caller=decode_caller(caller),
    )


def encode_caller(caller: Caller | None) -> str:
    return f"{caller.pid} {caller.started} {caller.boot}" if caller else ""


def decode_caller(text: object) -> Caller | None:
    words = text.split(" ") if isinstance(text, str) else []
    return (
        Caller(int(words[0]), int(words[1]), words[2]) if len(words) == 3 and words[0].isdigit() and words[1].isdigit() else None
    )


def lives(caller: Caller | None) -> bool:
    return caller is not None and caller.is_alive()


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("a row that makes no sense")


def _time(value: object) -> float:
    _require(isinstance(value, int | float) and abs(float(value)) < 1e15)
    return float(value)  # type: ignore[arg-type]


def _text(text: str) -> str | bytes:
    try:
        text.encode()
    except UnicodeEncodeError:
        return os.fsencode(text)
    return text


def _untext(value: object) -> str:
    if isinstance(value, bytes):
        return os.fsdecode(value)
    _require(isinstance(value, str))
    return str(value)
