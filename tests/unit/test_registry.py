"""The registry: it agrees with the directories whatever was done to it, by whomever, at whatever moment they died."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elsewhere.errors import InUse, StateError
from elsewhere.sandbox.records import registry as module
from elsewhere.sandbox.records.journal import Caller, Journal, Request, new_request_id
from elsewhere.sandbox.records.registry import Fact, Registry, Row, stamp_of
from elsewhere.sandbox.records.tables import SCHEMA
from elsewhere.storage.database import Schema
from elsewhere.storage.state import State, write_aside

NOBODY = Caller(4_000_000, 1, "another boot")


def now() -> float:
    return 5000.0


@pytest.fixture
def state(place: Path) -> State:
    return State.open(str(place / "state"))


@pytest.fixture
def registry(state: State) -> Iterator[Registry]:
    with Registry.open(state, clock=now) as opened:
        opened.reconcile([], now=now())
        yield opened


def make(state: State, sandbox_id: str, status: str = "stopped", **more: object) -> Row:
    """A sandbox's directory, as whoever creates one leaves it, and the row that belongs to it."""
    os.makedirs(state.sandbox(sandbox_id), exist_ok=True)
    document = {"state": status, "created_at": 10.0, "name": None, **more}
    write_aside(os.path.join(state.sandbox(sandbox_id), "sandbox.json"), json.dumps(document).encode())
    return look(state, sandbox_id).row


def look(state: State, sandbox_id: str, offset: int = 0, known: tuple[Request, ...] = ()) -> Fact:
    stamp = stamp_of(state, sandbox_id)
    document = json.loads(Path(state.sandbox(sandbox_id), "sandbox.json").read_bytes())
    reading = Journal(state.sandbox(sandbox_id)).read(offset, known)
    row = Row(
        id=sandbox_id,
        project="/p",
        base="live",
        stamp=stamp,
        journal_offset=reading.offset,
        **document,
    )
    return Fact(row, reading.changed, offset)


def look_at_all(state: State, registry: Registry | None = None) -> list[Fact]:
    facts = []
    rows = {row.id: row for row in registry.rows()} if registry else {}
    for sandbox_id in state.sandbox_ids():
        offset, known = 0, []
        if registry and sandbox_id in rows:
            offset = rows[sandbox_id].journal_offset
            known = registry.requests(sandbox=sandbox_id, states=("pending", "creating", "running", "completing"))
        with contextlib.suppress(OSError):  # removed while we look
            facts.append(look(state, sandbox_id, offset, tuple(known)))
    return facts


def unmake(state: State, sandbox_id: str) -> None:
    os.rename(state.sandbox(sandbox_id), os.path.join(state.room("trash"), f"{sandbox_id}-{os.urandom(4).hex()}"))


def asked(sandbox: str, **more: object) -> Request:
    made = Request(id=new_request_id(), sandbox=sandbox, kind="exec", argv=("x",), state="running", created_at=20.0, pid=7)
    return replace(made, **more)


def file(state: State) -> Path:
    return Path(state.path) / "registry.db"


def broken(state: State) -> list[str]:
    return sorted(entry.name for entry in Path(state.path).glob("registry.db.broken-*"))


def together(count: int, work: Callable[[int], None]) -> None:
    """The same moment in many processes."""
    reading, writing = os.pipe()
    children = []
    for number in range(count):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(writing)
                os.read(reading, 1)
                work(number)
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    os.close(reading)
    os.close(writing)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * count


# -- sandboxes and names ------------------------------------------------------------------------------------------------------------


def test_what_was_put_is_listed_newest_first(state: State, registry: Registry) -> None:
    old = make(state, "ew-old", created_at=1.0)
    new = replace(
        make(state, "ew-new", created_at=2.0), labels={"a": "b"}, keep=True, expires_at=9.0, request="r", project="/\udcff"
    )
    for row in (new, old):
        registry.put(row)
    assert registry.rows() == [replace(new, updated_at=5000.0), replace(old, updated_at=5000.0)]
    assert registry.row("ew-old") == replace(old, updated_at=5000.0)
    assert registry.row("ew-none") is None


def test_it_is_there_for_the_next_process_and_closed_to_everybody_else(state: State) -> None:
    before = os.umask(0)
    try:
        with Registry.open(state) as first:
            first.put(make(state, "ew-a"))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path(state.path).glob("registry.db*")} == {0o600}
    with Registry.open(state) as second:
        assert [row.id for row in second.rows()] == ["ew-a"]
        assert second.moved_aside == []


@pytest.mark.parametrize("sandbox_id", ["", "..", "../../etc", "/etc", ".x", "a\0b"], ids=ascii)
def test_an_id_that_could_name_anything_else_is_refused(registry: Registry, sandbox_id: str) -> None:
    with pytest.raises(StateError):
        registry.put(Row(id=sandbox_id, state="stopped", project="", base="", created_at=1.0))
    with pytest.raises(StateError):
        registry.reserve_name("name", sandbox_id)


def test_a_name_has_one_owner(state: State, registry: Registry) -> None:
    registry.reserve_name("web", "ew-a")
    registry.reserve_name("web", "ew-a")
    assert registry.names().get("web") is None  # there is no such sandbox yet
    with pytest.raises(InUse) as caught:
        registry.reserve_name("web", "ew-b")
    assert caught.value.code == "name_in_use"
    assert "ew-a" in caught.value.message
    assert "web" in caught.value.hint
    registry.put(make(state, "ew-a", name="web"))
    assert registry.names() == {"web": "ew-a"}
    with pytest.raises(InUse):
        registry.put(make(state, "ew-b", name="web"))
    assert registry.row("ew-b") is None


def test_a_name_is_free_again_when_it_is_released_changed_or_its_sandbox_removed(state: State, registry: Registry) -> None:
    registry.reserve_name("a", "ew-1")
    registry.release_name("a", "ew-2")
    with pytest.raises(InUse):
        registry.reserve_name("a", "ew-2")
    registry.release_name("a", "ew-1")
    registry.put(make(state, "ew-2", name="a"))
    registry.put(make(state, "ew-2", name="b"))
    registry.reserve_name("a", "ew-3")
    unmake(state, "ew-2")
    registry.remove("ew-2")
    registry.reserve_name("b", "ew-4")


def test_a_name_claimed_by_a_process_that_died_is_free(state: State, registry: Registry) -> None:
    together(1, lambda _: registry.reserve_name("web", "ew-dead"))
    registry.reserve_name("web", "ew-b")
    together(1, lambda _: registry.reserve_name("other", "ew-dead"))
    registry.reconcile([], now=now())
    with sqlite3.connect(file(state)) as raw:
        assert raw.execute("SELECT name FROM names").fetchall() == [("web",)]
    raw.close()


def test_how_far_a_journal_was_read_survives_a_put_but_not_another_sandbox_of_that_id(state: State, registry: Registry) -> None:
    row = make(state, "ew-a")
    Journal(state.sandbox("ew-a")).start("exec", ["x"])
    registry.put(row)
    registry.reconcile([look(state, "ew-a")], now=now())
    offset = registry.rows()[0].journal_offset
    assert offset > 0
    registry.put(replace(row, keep=True))
    assert registry.rows()[0].journal_offset == offset
    registry.put(replace(row, created_at=11.0))
    assert registry.rows()[0].journal_offset == 0


# -- requests -----------------------------------------------------------------------------------------------------------------------


def test_a_request_comes_back_as_it_was_recorded(registry: Registry) -> None:
    whole = asked(
        "ew-a",
        argv=("echo", "\udcff\0"),
        cwd="/\udcfe",
        state="failed",
        reason="timeout",
        exit_code=124,
        signal=15,
        started_at=21.0,
        ended_at=22.0,
        usage={"user_s": 0.5, "system_s": 0.25, "max_rss_kib": 10},
        outputs={"stdout": "/x", "stderr": None},
        detached=True,
        timeout=1.5,
        caller=Caller.this(),
    )
    refused = asked("", state="failed", reason="refused", ended_at=20.0, pid=None)
    registry.record_requests([whole, refused])
    assert registry.request(whole.id) == whole
    assert registry.request(refused.id) == refused
    assert registry.request("r-none") is None


def test_a_request_that_is_over_never_changes_again(registry: Registry) -> None:
    request = asked("ew-a", state="pending", pid=None)
    ends = [request.ended("exited", 30.0, exit_code=0), request.ended("lost", 31.0), replace(request, state="running", pid=9)]
    registry.record_requests([request, replace(request, state="running", pid=9)])
    registry.record_requests([request])  # older news than what is known
    assert registry.requests()[0].state == "running"
    for end in ends:
        registry.record_requests([end])
        assert (registry.requests()[0].state, registry.requests()[0].ended_at) == ("completed", 30.0)


def test_no_sandbox_speaks_for_another(registry: Registry) -> None:
    request = asked("ew-a")
    registry.record_requests([request])
    registry.record_requests([replace(request, sandbox="ew-b").ended("lost", 9.0)])
    assert registry.requests() == [request]


def test_requests_are_filtered_newest_first(registry: Registry) -> None:
    several = [asked(f"ew-{number % 2}", created_at=float(number)) for number in range(10)]
    several[3:6] = [request.ended("exited", 100.0 + request.created_at, exit_code=1) for request in several[3:6]]
    registry.record_requests(several)
    assert registry.requests() == several[::-1]
    assert registry.requests(sandbox="ew-1", limit=2) == [several[9], several[7]]
    assert registry.requests(states=["failed"]) == [several[5], several[4], several[3]]
    assert registry.requests(sandbox="ew-0", states=["running"]) == [several[8], several[6], several[2], several[0]]


def test_removal_ends_what_still_ran(state: State, registry: Registry) -> None:
    registry.put(make(state, "ew-a"))
    running, asked_to_end, other = asked("ew-a"), asked("ew-a", reason="cancelled"), asked("ew-b")
    registry.record_requests([running, asked_to_end, other])
    unmake(state, "ew-a")
    registry.remove("ew-a")
    registry.remove("ew-a")
    ends = {request.id: (request.state, request.reason) for request in registry.requests()}
    assert ends == {running.id: ("failed", "killed"), asked_to_end.id: ("cancelled", "cancelled"), other.id: ("running", "")}


# -- reconciling --------------------------------------------------------------------------------------------------------------------


def test_what_agrees_is_not_healed(state: State, registry: Registry) -> None:
    for number in range(3):
        registry.put(make(state, f"ew-{number}", name=f"n{number}"))
    healed = registry.reconcile(look_at_all(state), now=now())
    assert (healed.healed, healed.lost, healed.rebuilt) == ([], [], False)


def test_a_directory_that_nobody_put_is_added(state: State, registry: Registry) -> None:
    make(state, "ew-a", "running", name="web")
    make(state, "ew-half", "creating")
    healed = registry.reconcile(look_at_all(state), now=now())
    assert healed.healed == [{"id": "ew-a", "what": "added", "was": None, "is": "running"}]
    assert {row.id for row in registry.rows()} == {"ew-a", "ew-half"}
    assert registry.names().get("web") == "ew-a"
    assert registry.reconcile(look_at_all(state), now=now()).healed == []


def test_a_row_without_a_directory_is_removed_and_its_name_is_free(state: State, registry: Registry) -> None:
    registry.put(make(state, "ew-a", "running", name="web"))
    request = asked("ew-a")
    registry.record_requests([request])
    shutil.rmtree(state.sandbox("ew-a"))
    healed = registry.reconcile([], now=6000.0)
    assert healed.healed == [{"id": "ew-a", "what": "removed", "was": "running", "is": None}]
    assert healed.lost == registry.requests() == [request.ended("lost", 6000.0)]
    assert registry.rows() == []
    registry.reserve_name("web", "ew-b")
    again = registry.reconcile([], now=7000.0)
    assert (again.healed, again.lost) == ([], [])
    assert registry.requests()[0].ended_at == 6000.0


def test_running_is_not_claimed_for_a_dead_one(state: State, registry: Registry) -> None:
    registry.put(make(state, "ew-a", "running"))
    begun, cancelled = asked("ew-a"), asked("ew-a", reason="cancelled", created_at=21.0)
    registry.record_requests([begun, cancelled])
    fact = look(state, "ew-a")
    assert registry.reconcile([fact], now=now()).lost == []
    dead = replace(fact, row=replace(fact.row, state="stopped", ended_at=4000.0))
    healed = registry.reconcile([dead], now=now())
    assert healed.healed == [{"id": "ew-a", "what": "state", "was": "running", "is": "stopped"}]
    assert {(request.state, request.reason, request.ended_at) for request in registry.requests()} == {("failed", "lost", 4000.0)}
    assert len(healed.lost) == 2
    assert registry.reconcile([dead], now=now()) == type(healed)()


def test_news_in_a_journal_is_recorded_and_nothing_was_wrong(state: State, registry: Registry) -> None:
    registry.put(make(state, "ew-a", "running"))
    journal = Journal(state.sandbox("ew-a"), clock=now)
    first, second = journal.start("exec", ["1"]), journal.start("exec", ["2"])
    assert registry.reconcile(look_at_all(state, registry), now=now()) == type(registry.reconcile([], now=now()))()
    assert {request.id for request in registry.requests(states=["pending"])} == {first.id, second.id}
    journal.end(first.id, "exited", exit_code=0)
    assert registry.reconcile(look_at_all(state, registry), now=now()).healed == []
    assert {request.id: request.state for request in registry.requests()} == {first.id: "completed", second.id: "pending"}
    assert registry.rows()[0].journal_offset == os.path.getsize(journal.path)


def test_what_waits_is_lost_with_its_caller_and_not_before(state: State, registry: Registry) -> None:
    registry.put(make(state, "ew-run", "running"))
    registry.put(make(state, "ew-stop", "stopped"))
    kinds = [(sandbox, caller) for sandbox in ("ew-run", "ew-stop", "ew-to-be") for caller in (Caller.this(), NOBODY, None)]
    several = {
        request.id: kind
        for kind in kinds
        for request in [asked(kind[0], state="pending", pid=None, caller=kind[1], created_at=4990.0)]
        if registry.record_requests([request]) is None
    }
    lost = registry.reconcile(look_at_all(state), now=5000.0).lost
    assert {several[request.id] for request in lost} == {
        kind for kind in kinds if kind[0] != "ew-run" and kind[1] != Caller.this()
    }
    lost = registry.reconcile(look_at_all(state), now=5060.0).lost
    assert {several[request.id] for request in lost} == {("ew-run", NOBODY), ("ew-run", None)}


def test_an_end_that_was_written_after_the_journal_was_read_counts(state: State, registry: Registry) -> None:
    row = make(state, "ew-a", "running")
    registry.put(row)
    journal = Journal(state.sandbox("ew-a"), clock=now)
    request = journal.start("exec", ["x"])
    fact = look(state, "ew-a")
    fd = journal.open()
    os.write(fd, f"began {request.id} 7\nend {request.id} 0 0 exited 0 0 0 4500\n".encode())
    os.close(fd)
    registry.record_requests([replace(request, state="running", pid=7)])
    healed = registry.reconcile([replace(fact, row=replace(fact.row, state="stopped"))], now=now())
    assert healed.lost == []
    assert [(found.state, found.ended_at) for found in registry.requests()] == [("completed", 4500.0)]


def test_what_moved_on_while_somebody_looked_is_left_alone(state: State, registry: Registry) -> None:
    registry.put(make(state, "ew-started", "stopped"))
    registry.put(make(state, "ew-removed", name="web"))
    make(state, "ew-never-put")
    facts = look_at_all(state)
    registry.put(make(state, "ew-started", "running"))
    request = asked("ew-started", created_at=4990.0)
    registry.record_requests([request])
    unmake(state, "ew-removed")
    registry.remove("ew-removed")
    unmake(state, "ew-never-put")
    registry.put(make(state, "ew-new", name="web"))
    healed = registry.reconcile(facts, now=now())
    assert (healed.healed, healed.lost) == ([], [])
    assert {row.id: row.state for row in registry.rows()} == {"ew-started": "running", "ew-new": "stopped"}
    assert registry.names().get("web") == "ew-new"
    assert registry.requests() == [request]


def test_of_two_that_say_the_same_name_the_older_keeps_it(state: State, registry: Registry) -> None:
    make(state, "ew-young", created_at=2.0, name="web")
    make(state, "ew-old", created_at=1.0, name="web")
    registry.reconcile(look_at_all(state), now=now())
    assert registry.names() == {"web": "ew-old"}
    assert registry.reconcile(look_at_all(state), now=now()).healed == []
    unmake(state, "ew-old")
    registry.reconcile(look_at_all(state), now=now())
    registry.reconcile(look_at_all(state), now=now())
    assert registry.names() == {"web": "ew-young"}


# -- what is not a registry ---------------------------------------------------------------------------------------------------------


def change(state: State, *statements: str) -> None:
    raw = sqlite3.connect(file(state), isolation_level=None)
    for statement in statements:
        raw.execute(statement)
    raw.close()


def spoil(state: State, how: str) -> None:
    path = file(state)
    rows = "INSERT INTO sandboxes SELECT {}, request, project, state, base, 1, 1, 1, 1, keep, labels, stamp, 0 FROM sandboxes LIMIT 1"
    statements = {
        "no table": ["DROP TABLE requests"],
        "no column": ["ALTER TABLE sandboxes DROP COLUMN stamp"],
        "extra column": ["ALTER TABLE sandboxes ADD COLUMN more TEXT"],
        "trigger": ["CREATE TRIGGER t AFTER INSERT ON sandboxes BEGIN DELETE FROM sandboxes; END"],
        "view": ["CREATE VIEW v AS SELECT 1"],
        "no index": ["DROP INDEX requests_unfinished"],
        "no version": ["PRAGMA user_version=0"],
        "negative version": ["PRAGMA user_version=-5"],
        "not wal": ["PRAGMA journal_mode=DELETE"],
        "absurd ids": [
            rows.format(value) for value in ("'../../etc'", "'/etc'", "''", "x'ff00'", "'.x'", "'a' || char(0)", "'ew-ghost'")
        ],
        "wrong types": [
            "UPDATE sandboxes SET created_at='soon', labels='[', keep='maybe'",
            "UPDATE requests SET argv='{', caller=x'00'",
        ],
        "infinite": ["UPDATE sandboxes SET created_at=9e999, updated_at=-9e999"],
        "wrong state": ["UPDATE sandboxes SET state='running', name=NULL WHERE 0", "UPDATE sandboxes SET state='dancing'"],
        "stolen name": ["UPDATE names SET sandbox='../../etc' WHERE name='n1'"],
        "lies": ["UPDATE sandboxes SET state='running', project='/etc', journal_offset=1000000000, created_at=77"],
    }
    if how in statements:
        with contextlib.suppress(sqlite3.OperationalError):
            change(state, *statements[how])
        return
    content = path.read_bytes()
    if how not in ("wal fifo", "wal directory", "journal", "journal fifo", "garbage wal", "wal alone"):
        for beside in ("-wal", "-shm"):
            Path(f"{path}{beside}").unlink(missing_ok=True)
        path.unlink()
    match how:
        case "text":
            path.write_text("id,name\n" * 1000)
        case "empty":
            path.touch()
        case "directory":
            (path / "inside").mkdir(parents=True)
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to("schema")
        case "dangling link":
            path.symlink_to("/nonexistent/elsewhere")
        case "socket node":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case "header only":
            path.write_bytes(content[:100])
        case "foreign database":
            change(state, "PRAGMA journal_mode=WAL", "CREATE TABLE theirs(x)", f"PRAGMA user_version={SCHEMA.version}")
        case "wal fifo" | "journal fifo":
            Path(f"{path}-{how.split()[0]}").unlink(missing_ok=True)
            os.mkfifo(f"{path}-{how.split()[0]}")
        case "wal directory":
            Path(f"{path}-wal").unlink(missing_ok=True)
            os.mkdir(f"{path}-wal")
        case "wal alone":
            path.unlink()
        case "journal":
            Path(f"{path}-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"\1" * 5000)
        case "garbage wal":
            Path(f"{path}-wal").write_bytes(os.urandom(50_000))
        case "missing":
            pass
        case _:
            raise AssertionError(how)


HEALED_IN_PLACE = ["absurd ids", "wrong types", "infinite", "wrong state", "stolen name", "lies", "garbage wal"]
MOVED_ASIDE = """no table,no column,extra column,trigger,view,no index,no version,negative version,not wal,text,empty,directory,fifo,link,
dangling link,socket node,header only,foreign database,wal fifo,wal directory,journal fifo,journal,wal alone""".replace(
    "\n", ""
).split(",")


def fill(state: State) -> list[Row]:
    """A registry with some history, closed, all of it also in directories and journals."""
    with Registry.open(state, clock=now) as registry:
        for number in range(12):
            registry.put(
                make(state, f"ew-{number}", "running" if number % 3 else "stopped", name=f"n{number}", created_at=float(number))
            )
            journal = Journal(state.sandbox(f"ew-{number}"), clock=now)
            for _ in range(4):
                journal.end(journal.start("exec", ["echo", "x" * 50]).id, "exited", exit_code=0)
        registry.reconcile(look_at_all(state), now=now())
        return registry.rows()


def agrees(state: State, expected: list[Row]) -> Registry:
    registry = Registry.open(state, clock=now)
    registry.reconcile(look_at_all(state, registry), now=now())
    assert registry.rows() == expected
    assert registry.names() == {row.name: row.id for row in expected}
    assert registry.reconcile(look_at_all(state, registry), now=now()).healed == []
    return registry


@pytest.mark.parametrize("how", ["missing", *MOVED_ASIDE, *HEALED_IN_PLACE])
def test_whatever_lies_in_its_place_the_listing_is_right(state: State, how: str) -> None:
    expected = fill(state)
    spoil(state, how)
    kept = Path(state.path, "schema").read_bytes()
    with Registry.open(state, clock=now) as registry:
        assert registry.rebuilt == (how not in HEALED_IN_PLACE or how == "garbage wal")  # all of it was in there
    with agrees(state, expected) as registry:
        assert not registry.rebuilt
        assert len([name for name in broken(state) if not name.endswith(("-wal", "-shm", "-journal"))]) == (
            how in MOVED_ASIDE
        ) or (how == "wal alone" and broken(state))
        if how not in HEALED_IN_PLACE:
            assert len(registry.requests(states=["completed"])) == 48
        registry.reserve_name("free", "ew-a")
    assert Path(state.path, "schema").read_bytes() == kept
    assert not os.path.exists("/nonexistent/elsewhere")


def test_absurd_rows_are_neither_listed_nor_kept(state: State) -> None:
    fill(state)
    spoil(state, "absurd ids")
    with Registry.open(state, clock=now) as registry:
        assert {row.id for row in registry.rows()} == {"ew-ghost", *state.sandbox_ids()}
        healed = registry.reconcile(look_at_all(state), now=now()).healed
        assert {"../../etc", "/etc", "", ".x", "a\0", "ew-ghost"} <= {item["id"] for item in healed}
        assert {item["what"] for item in healed} == {"removed"}
    raw = sqlite3.connect(file(state))
    assert {identifier for (identifier,) in raw.execute("SELECT id FROM sandboxes")} == set(state.sandbox_ids())
    raw.close()


def test_what_was_moved_aside_is_told_and_still_there(state: State) -> None:
    file(state).write_text("precious")
    with Registry.open(state, clock=now) as registry:
        (aside,) = registry.moved_aside
    assert Path(aside).read_text() == "precious"
    assert aside == f"{file(state)}.broken-19700101T012320Z"
    file(state).write_text("precious too")
    with Registry.open(state, clock=now) as registry:
        assert registry.moved_aside == [f"{aside}-2"]


@pytest.mark.parametrize("which", ["registry.db", "registry.db-wal"])
def test_whatever_is_flipped_or_cut_off_the_listing_is_right(state: State, which: str) -> None:
    expected = fill(state)
    originals = {name: Path(state.path, name).read_bytes() for name in ("registry.db", "registry.db-wal")}
    if which == "registry.db":  # all of it in the one file
        change(state, "PRAGMA wal_checkpoint(TRUNCATE)")
        originals = {"registry.db": file(state).read_bytes(), "registry.db-wal": b""}
    chance = random.Random(which)
    for _ in range(40):
        for path in Path(state.path).glob("registry.db*"):
            path.unlink()
        for name, content in originals.items():
            spoilt = bytearray(content)
            if name == which:
                at, length = chance.randrange(len(spoilt)), chance.choice([1, 1, 8, 100, 4096])
                match chance.choice(["flip", "flip", "zero", "cut"]):
                    case "flip":
                        spoilt[at : at + length] = chance.randbytes(len(spoilt[at : at + length]))
                    case "zero":
                        spoilt[at : at + length] = bytes(len(spoilt[at : at + length]))
                    case _:
                        del spoilt[at:]
            Path(state.path, name).write_bytes(spoilt)
        agrees(state, expected).close()


# -- under an open connection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["deleted", "replaced", "all deleted", "wal deleted", "emptied", "made a directory", "scribbled over"]
)
def test_what_happens_to_the_file_while_it_is_open_is_noticed(state: State, how: str) -> None:
    expected = fill(state)
    with Registry.open(state, clock=now) as registry:
        assert registry.rows() == expected
        path = file(state)
        if how == "replaced":
            with Registry.open(State.open(state.path + "-2")) as other:
                other.put(make(State(state.path + "-2"), "ew-other"))
            change(State(state.path + "-2"), "PRAGMA wal_checkpoint(TRUNCATE)")
            os.rename(file(State(state.path + "-2")), path)
        elif how == "all deleted":
            for found in Path(state.path).glob("registry.db*"):
                found.unlink()
        elif how == "wal deleted":
            os.unlink(f"{path}-wal")
        elif how == "emptied":
            os.truncate(path, 0)
        elif how == "scribbled over":
            with open(path, "r+b") as stream:
                stream.write(b"x" * os.path.getsize(path))
            with open(f"{path}-wal", "r+b") as stream:
                stream.write(b"x" * os.path.getsize(f"{path}-wal"))
        else:
            os.unlink(path)
            if how == "made a directory":
                os.mkdir(path)
        registry.reconcile(look_at_all(state, registry), now=now())
        with Registry.open(state) as other:
            other.put(replace(expected[0], keep=True))
        assert [row.id for row in registry.rows()] == [row.id for row in expected]
    agrees(state, expected).close()


def locks(state: State) -> list[str]:
    """The locks of this process on the database, as SQLite takes them."""
    inode = file(state).stat().st_ino
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return [
        " ".join(words)
        for words in lines
        if words[1] == "POSIX" and words[4] == str(os.getpid()) and words[5].endswith(f":{inode}")
    ]


def test_it_can_be_used_by_threads_and_after_a_fork(state: State, registry: Registry) -> None:
    rows = {number: make(state, f"ew-{number}", name=f"n{number}") for number in range(80)}

    def some(first: int) -> None:
        for number in range(first, 80, 8):
            registry.put(rows[number])
            registry.record_requests([asked(f"ew-{number}")])

    threads = [threading.Thread(target=some, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.rows()) == len(registry.names()) == len(registry.requests()) == 80
    together(4, lambda number: registry.put(make(state, f"ew-forked-{number}")))
    registry.put(make(state, "ew-after"))
    assert len(registry.rows()) == 85


def test_several_in_one_process_do_not_give_up_each_others_locks(state: State) -> None:
    with Registry.open(state) as first:
        for _ in range(3):
            with Registry.open(state) as second:
                second.put(make(state, "ew-a"))
        assert locks(state)
        together(1, lambda _: Registry.open(state).put(make(state, "ew-b")))
        first.put(make(state, "ew-c"))
        assert {row.id for row in first.rows()} == {"ew-a", "ew-b", "ew-c"}
    assert broken(state) == []


def test_the_last_to_close_leaves_the_wal_and_it_does_not_grow_for_ever(state: State) -> None:
    row = make(state, "ew-a")
    sizes = []
    for _ in range(300):
        with Registry.open(state) as registry:
            registry.put(row)
        sizes.append(os.path.getsize(f"{file(state)}-wal"))
    assert sizes[0] > 0
    assert max(sizes) < 600_000
    assert min(sizes[1:]) < max(sizes) / 2
    assert locks(state) == []


def test_descriptors_are_given_back(state: State) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with Registry.open(state) as registry:
            registry.put(make(state, "ew-a"))
        spoil(state, "text")
        with Registry.open(state):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


# -- versions -----------------------------------------------------------------------------------------------------------------------


def test_a_newer_schema_is_refused_and_left_alone(state: State) -> None:
    fill(state)
    change(state, "PRAGMA user_version=99", "ALTER TABLE sandboxes ADD COLUMN more TEXT")
    with pytest.raises(StateError) as caught:
        Registry.open(state)
    assert (caught.value.code, "upgrade" in caught.value.hint) == ("state_too_new", True)
    assert broken(state) == []


def test_a_schema_that_became_newer_while_it_was_open_is_refused_and_left_alone(state: State) -> None:
    expected = fill(state)
    with Registry.open(state) as registry:
        assert registry.rows() == expected
        change(
            state,
            "ALTER TABLE sandboxes RENAME COLUMN stamp TO seal",
            "ALTER TABLE names RENAME TO named",
            "PRAGMA user_version=2",
        )
        change(state, "PRAGMA wal_checkpoint(TRUNCATE)")
        with pytest.raises(StateError) as caught:
            registry.rows()
    assert caught.value.code == "state_too_new"
    assert broken(state) == []


def test_an_older_schema_is_migrated_with_a_backup(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fill(state)
    more = "CREATE TABLE more(x TEXT)"

    def migrate(connection: sqlite3.Connection) -> None:
        connection.execute(more)

    monkeypatch.setattr(module, "SCHEMA", Schema(2, (*SCHEMA.statements, more), {1: migrate}))
    together(8, lambda _: Registry.open(state).close())
    with Registry.open(state, clock=now) as registry:
        assert registry.rows() == expected
        assert not registry.rebuilt
    assert broken(state) == []
    backup = sqlite3.connect(f"{file(state)}.v1.backup")
    assert backup.execute("PRAGMA user_version").fetchone() == (1,)
    assert backup.execute("SELECT count(*) FROM sandboxes").fetchone() == (len(expected),)
    backup.close()


def test_a_migration_that_fails_leaves_the_backup_and_a_registry_that_works(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fill(state)

    def migrate(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE sandboxes")
        connection.execute("nonsense")

    monkeypatch.setattr(module, "SCHEMA", Schema(2, SCHEMA.statements, {1: migrate}))
    agrees(state, expected).close()
    assert os.path.exists(f"{file(state)}.v1.backup")
    assert len([name for name in broken(state) if name.endswith("Z")]) == 1


# -- no room, no right --------------------------------------------------------------------------------------------------------------


def put_all(rows: list[Row], registry: Registry) -> None:
    for row in rows:
        registry.put(row)


def test_a_full_disk_is_an_error_and_costs_nothing_that_was_there(state: State) -> None:
    expected = fill(state)

    def no_room(_: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with Registry.open(state) as registry:
            size = os.path.getsize(f"{file(state)}-wal")
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, resource.RLIM_INFINITY))
            with pytest.raises(StateError) as caught:
                put_all([replace(expected[0], project=str(number) * 3000) for number in range(100)], registry)
            assert caught.value.code == "no_room"
            assert len(registry.rows()) == len(expected)

    together(1, no_room)
    assert broken(state) == []
    agrees(state, expected).close()


def test_a_disk_that_was_always_full_is_an_error(state: State) -> None:
    def no_room(_: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        with pytest.raises(StateError) as caught:
            Registry.open(state)
        assert caught.value.code == "no_room"

    together(1, no_room)
    Registry.open(state).close()


def test_what_may_not_be_written_is_an_error_and_left_alone(place: Path, state: State) -> None:
    fill(state)
    place.chmod(0o755)
    for directory, _, names in os.walk(state.path):
        os.chmod(directory, 0o555)
        for name in names:
            os.chmod(os.path.join(directory, name), 0o444)

    def not_ours(_: int) -> None:
        if os.geteuid() == 0:
            os.setuid(4242)
        with pytest.raises(StateError) as caught:
            Registry.open(state).reserve_name("web", "ew-a")
        assert caught.value.code == "state_unusable"

    together(1, not_ours)
    assert broken(state) == []


def test_a_state_directory_that_is_gone_is_an_error(place: Path, registry: Registry, state: State) -> None:
    shutil.rmtree(state.path)
    for attempt in (registry.rows, lambda: Registry.open(state)):
        with pytest.raises(StateError) as caught:
            attempt()
        assert caught.value.code == "state_unusable"


# -- many at once, and dying --------------------------------------------------------------------------------------------------------


def test_a_hundred_processes_lose_and_duplicate_nothing(state: State) -> None:
    def work(number: int) -> None:
        with Registry.open(state) as registry:
            with contextlib.suppress(InUse):
                registry.reserve_name("wanted", f"ew-wanted-{number}")
                registry.put(make(state, f"ew-wanted-{number}", name="wanted"))
                Path(state.path, "run", f"won-{number}").touch()
            for turn in range(3):
                sandbox_id, name = f"ew-{number}-{turn}", f"n-{number}-{turn}"
                registry.reserve_name(name, sandbox_id)
                registry.put(make(state, sandbox_id, "running", name=name))
                request = Journal(state.sandbox(sandbox_id)).start("exec", ["x"])
                registry.record_requests([request])
                ended = request.ended("exited", request.created_at + 1, exit_code=0)
                Journal(state.sandbox(sandbox_id)).end(request.id, "exited", exit_code=0)
                registry.record_requests([ended])
                if number % 10 == 0:
                    assert registry.reconcile(look_at_all(state, registry), now=now()).lost == []
                if turn == 1:
                    unmake(state, sandbox_id)
                    registry.remove(sandbox_id)

    together(100, work)
    expected = {f"ew-{number}-{turn}" for number in range(100) for turn in (0, 2)}
    winners = [name for name in os.listdir(state.room("run")) if name.startswith("won-")]
    assert len(winners) == 1
    with Registry.open(state) as registry:
        wanted = winners[0].replace("won-", "ew-wanted-")
        losers = {f"ew-wanted-{number}" for number in range(100)} - {wanted}
        assert not losers & {row.id for row in registry.rows()}
        assert {row.id for row in registry.rows()} == {*expected, wanted}
        assert registry.names().get("wanted") == wanted
        assert len(registry.names()) == 201
        requests = registry.requests()
        assert (len(requests), {request.state for request in requests}) == (300, {"completed"})
        assert registry.reconcile(look_at_all(state, registry), now=now()).healed == []
    assert broken(state) == []


def test_a_hundred_processes_that_meet_a_broken_one_make_one_new_one(state: State) -> None:
    expected = fill(state)
    spoil(state, "text")

    def work(number: int) -> None:
        with Registry.open(state) as registry:
            registry.reserve_name(f"mine-{number}", f"ew-mine-{number}")
            registry.put(make(state, f"ew-mine-{number}", name=f"mine-{number}"))

    together(100, work)
    assert len(broken(state)) == 1
    with Registry.open(state, clock=now) as registry:
        assert registry.rebuilt
        assert len(registry.rows()) == 100
        registry.reconcile(look_at_all(state, registry), now=now())
        assert len(registry.rows()) == 100 + len(expected)


def test_a_writer_that_is_killed_leaves_a_registry_that_works(state: State) -> None:
    chance = random.Random(9)
    expected = fill(state)
    for _ in range(30):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            try:
                while True:
                    with Registry.open(state) as registry:
                        for number in range(20):
                            sandbox_id = f"ew-{os.getpid()}-{number}"
                            os.write(writing, b"x")
                            registry.reserve_name(sandbox_id, sandbox_id)
                            registry.put(make(state, sandbox_id, "running", name=sandbox_id))
                            registry.record_requests([asked(sandbox_id)])
                            os.write(writing, b"x")
                            unmake(state, sandbox_id)
                            registry.remove(sandbox_id)
            finally:
                os._exit(1)
        os.close(writing)
        for _ in range(chance.randrange(1, 60)):
            os.read(reading, 1)
        for _ in range(chance.randrange(20_000)):
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        for left in state.sandbox_ids():
            if left not in {row.id for row in expected}:
                unmake(state, left)
        agrees(state, expected).close()
        with Registry.open(state) as registry:
            assert registry.requests(states=["running"]) == []
    assert broken(state) == []
