"""The journal of a sandbox: every request is there once, ends once, and nothing that is written there can mislead or stop a reader."""

import json
import os
import random
import resource
import signal
from pathlib import Path

import pytest

from elsewhere.errors import NotFound, StateError, UsageError
from elsewhere.operations.processes import _meant
from elsewhere.sandbox.records.journal import Caller, Journal, Request, new_request_id
from elsewhere.sandbox.records.request import REASONS, TERMINAL


def now() -> float:
    return 1000.0


@pytest.fixture
def journal(place: Path) -> Journal:
    (place / "ew-x").mkdir()
    return Journal(str(place / "ew-x"), clock=now)


def keeper_says(journal: Journal, text: str | bytes) -> None:
    fd = journal.open()
    os.write(fd, text.encode() if isinstance(text, str) else text)
    os.close(fd)


def only(journal: Journal) -> Request:
    (request,) = journal.read().changed
    return request


def test_a_request_from_its_start_to_its_end(journal: Journal) -> None:
    started = journal.start(
        "exec", ["echo", "a b"], cwd="/work", detached=True, timeout=3.5, outputs={"stdout": "/logs/1", "stderr": None}
    )
    assert only(journal) == started
    assert (started.state, started.created_at, started.sandbox, started.caller) == ("pending", 1000.0, "ew-x", Caller.this())
    keeper_says(journal, f"began {started.id} 17\n")
    begun = only(journal)
    assert (begun.state, begun.pid, begun.started_at) == ("running", 17, 1000.0)
    keeper_says(journal, f"end {started.id} 3 0 exited 0.250000 0.125000 2048 1002.500000\n")
    ended = only(journal)
    assert (ended.state, ended.reason, ended.exit_code, ended.signal, ended.ended_at) == ("failed", "exited", 3, None, 1002.5)
    assert ended.usage == {"user_s": 0.25, "system_s": 0.125, "max_rss_kib": 2048}
    assert (ended.argv, ended.cwd, ended.detached, ended.timeout) == (("echo", "a b"), "/work", True, 3.5)
    assert ended.outputs == {"stdout": "/logs/1", "stderr": None}
    assert journal.read().ignored == 0


def test_a_sandbox_without_a_journal_had_no_requests(journal: Journal) -> None:
    assert (journal.read().changed, journal.read().offset) == ([], 0)


def test_a_keeper_may_say_when_it_began(journal: Journal) -> None:
    started = journal.start("run", ["true"], state="creating")
    assert only(journal).state == "creating"
    keeper_says(journal, f"began {started.id} 17 1001.25\n")
    assert only(journal).started_at == 1001.25


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_decides_the_state(journal: Journal, reason: str) -> None:
    for code in (0, 1):
        request = journal.start("exec", ["x"])
        keeper_says(journal, f"end {request.id} {code} 0 {reason} 0 0 0 1001\n")
        by_host = journal.start("exec", ["x"])
        journal.end(by_host.id, reason, exit_code=code)
    expected = {"exited": ["completed", "completed", "failed", "failed"], "cancelled": ["cancelled"] * 4}
    found = journal.read().changed
    assert [request.state for request in found] == expected.get(reason, ["failed"] * 4)
    assert {request.reason for request in found} == {reason}
    assert all(request.is_over for request in found)


def test_the_first_end_counts(journal: Journal) -> None:
    request = journal.start("exec", ["x"])
    keeper_says(journal, f"end {request.id} 0 0 exited 0 0 0 1001\n")
    journal.end(request.id, "lost")
    keeper_says(journal, f"end {request.id} 137 9 killed 0 0 0 1003\nbegan {request.id} 5\n")
    ended = only(journal)
    assert (ended.state, ended.reason, ended.ended_at, ended.pid) == ("completed", "exited", 1001.0, None)


def test_an_end_without_a_start_is_nothing(journal: Journal) -> None:
    stranger = new_request_id()
    keeper_says(journal, f"end {stranger} 0 0 exited 0 0 0 1001\nbegan {stranger} 5\n")
    journal.end(stranger, "lost")
    journal.cancel(stranger)
    found = journal.read()
    assert (found.changed, found.ignored) == ([], 4)


@pytest.mark.parametrize("reason", ["killed", "signaled", "cancelled"])
def test_what_is_killed_after_a_cancel_was_cancelled(journal: Journal, reason: str) -> None:
    request = journal.start("exec", ["x"])
    journal.cancel(request.id)
    assert (only(journal).state, only(journal).reason) == ("pending", "cancelled")
    keeper_says(journal, f"end {request.id} 137 9 {reason} 0 0 0 1001\n")
    ended = only(journal)
    assert (ended.state, ended.reason, ended.exit_code, ended.signal) == ("cancelled", "cancelled", 137, 9)


def test_what_ended_by_itself_was_not_cancelled(journal: Journal) -> None:
    first, second = journal.start("exec", ["x"]), journal.start("exec", ["x"])
    journal.cancel(first.id)
    keeper_says(journal, f"end {first.id} 0 0 exited 0 0 0 1001\nend {second.id} 137 9 killed 0 0 0 1001\n")
    journal.cancel(second.id)
    assert [request.state for request in journal.read().changed] == ["completed", "failed"]


# -- incremental ----------------------------------------------------------------------------------------------------------------


def test_reading_goes_on_where_it_ended(journal: Journal) -> None:
    first = journal.start("exec", ["1"])
    before = journal.read()
    assert journal.read(before.offset, before.changed).changed == []
    second = journal.start("exec", ["2"])
    keeper_says(journal, f"end {first.id} 0 0 exited 0 0 0 1001\n")
    after = journal.read(before.offset, before.changed)
    assert {request.id: request.state for request in after.changed} == {first.id: "completed", second.id: "pending"}
    assert after.offset == os.path.getsize(journal.path)


def test_a_line_that_is_not_whole_yet_is_read_when_it_is(journal: Journal) -> None:
    request = journal.start("exec", ["x"])
    before = journal.read()
    keeper_says(journal, f"end {request.id} 0 0 exi")
    assert journal.read(before.offset, before.changed) == type(before)([], before.offset, 0)
    keeper_says(journal, "ted 0 0 0 1001\n")
    assert journal.read(before.offset, before.changed).changed[0].state == "completed"


def test_a_journal_is_read_where_its_directory_has_another_name(place: Path, journal: Journal) -> None:
    request = journal.start("exec", ["x"])
    os.rename(place / "ew-x", place / "0123-ew-x")
    assert Journal(str(place / "0123-ew-x")).read().ignored == 1
    assert Journal(str(place / "0123-ew-x"), sandbox="ew-x").read().changed == [request]


def test_a_journal_that_was_replaced_is_read_from_its_beginning(journal: Journal) -> None:
    for _ in range(5):
        journal.start("exec", ["x" * 100])
    before = journal.read()
    os.unlink(journal.path)
    request = journal.start("exec", ["new"])
    assert journal.read(before.offset).changed == [request]


# -- what is not trusted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00\x01",
        b"{",
        b"{}",
        b"[]",
        b'{"start": 5}',
        b'{"start": {}}',
        b'{"end": {"id": ["x"]}}',
        b'{"end": {"id": "ID", "reason": "bored", "at": 1}}',
        b'{"end": {"id": "ID", "reason": "exited", "at": NaN}}',
        b'{"end": {"id": "ID", "reason": "exited", "at": "now"}}',
        b'{"end": {"id": "ID", "reason": ["exited"], "at": 1}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"end",
        b"end ID",
        b"end ID 0 0 exited 0 0 0",
        b"end ID 0 0 exited 0 0 0 1 1",
        b"end ID x 0 exited 0 0 0 1",
        b"end ID -1 0 exited 0 0 0 1",
        b"end ID 0 0 exited nan 0 0 1",
        b"end ID 0 0 exited 0 inf 0 1",
        b"end ID 0 0 exited 0 0 0 1e3",
        b"end ID 0 0 exited 0 0 0 1_000",
        b"end ID 256 0 exited 0 0 0 1",
        b"end ID 0 900 exited 0 0 0 1",
        b"end ID 0 0 bored 0 0 0 1",
        "end ID ² 0 exited 0 0 0 1".encode(),
        b"end ID 0 0 exited 0 0 0 " + b"9" * 5000,
        b"began ID",
        b"began ID 0",
        b"began ID -5",
        b"began ID x",
        b"began ID 5 x",
        b"something else",
    ],
    ids=lambda line: ascii(line[:50]),
)
def test_nonsense_is_passed_over_and_counted(journal: Journal, line: bytes) -> None:
    request = journal.start("exec", ["x"])
    keeper_says(journal, line.replace(b"ID", request.id.encode()) + b"\n")
    keeper_says(journal, b"\n\n  \n")
    assert journal.read().changed == [request]
    assert journal.read().ignored == 1
    keeper_says(journal, f"end {request.id} 0 0 exited 0 0 0 1001\n")
    assert only(journal).state == "completed"


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "r-1"},
        {"id": "../../etc"},
        {"id": "r-XXXXXXXXXXXXXXXX"},
        {"sandbox": "ew-other"},
        {"kind": "party"},
        {"argv": "x"},
        {"argv": [1]},
        {"at": None},
        {"at": True},
        {"at": -1},
        {"at": 10**400},
    ],
    ids=ascii,
)
def test_a_start_that_makes_no_sense_is_none(journal: Journal, wrong: dict[str, object]) -> None:
    good = {"id": new_request_id(), "sandbox": "ew-x", "kind": "exec", "argv": ["x"], "at": 1.0}
    keeper_says(journal, json.dumps({"start": {**good, **wrong}}) + "\n")
    assert (journal.read().changed, journal.read().ignored) == ([], 1)
    keeper_says(journal, json.dumps({"start": {**good, "unknown": 1, "caller": "me", "outputs": 7, "state": "completed"}}) + "\n")
    assert (only(journal).state, only(journal).caller, only(journal).outputs) == ("pending", None, {})


def test_a_start_cannot_be_taken_back(journal: Journal) -> None:
    request = journal.start("exec", ["x"])
    keeper_says(journal, f"end {request.id} 1 0 exited 0 0 0 1001\n")
    again = {"id": request.id, "sandbox": "ew-x", "kind": "run", "argv": ["y"], "at": 5.0}
    keeper_says(journal, json.dumps({"start": again}) + "\n")
    assert (only(journal).state, only(journal).argv) == ("failed", ("x",))


def test_a_torn_line_does_not_take_the_next_with_it(journal: Journal) -> None:
    keeper_says(journal, '{"start": {"id": "r-')
    request = journal.start("exec", ["x"])
    assert (journal.read().changed, journal.read().ignored) == ([request], 1)


def test_a_line_of_a_megabyte_is_read_and_a_longer_one_is_passed_over(journal: Journal) -> None:
    long = journal.start("exec", ["x" * 1_000_000])
    keeper_says(journal, b'{"a": "' + b"y" * 5_000_000 + b'"}\n')
    last = journal.start("exec", ["z"])
    found = journal.read()
    assert (found.changed, found.ignored) == ([long, last], 1)
    assert found.offset == os.path.getsize(journal.path)


def test_a_command_that_is_too_long_for_a_line_is_cut(journal: Journal) -> None:
    request = journal.start("exec", ["echo", "x" * 1_200_000, *map(str, range(1000))])
    found = only(journal)
    assert found.id == request.id
    assert found.argv[:2] == ("echo", "x" * 500 + "…")
    assert os.path.getsize(journal.path) < 100_000


def test_a_journal_without_an_end_is_not_read_without_an_end(journal: Journal) -> None:
    with open(journal.path, "wb") as stream:
        stream.truncate(200 << 20)
    assert journal.read().offset <= 66 << 20


def test_words_that_are_no_unicode_come_back(journal: Journal) -> None:
    request = journal.start("exec", ["\udcff\n\0", "é"], cwd="/\udcfe")
    assert only(journal) == request


def test_whatever_is_flipped_a_reader_survives_it(journal: Journal) -> None:
    requests = [journal.start("exec", ["echo", str(number)]) for number in range(20)]
    for request in requests:
        keeper_says(journal, f"began {request.id} 5\nend {request.id} 0 0 exited 0.1 0.1 100 1001.0\n")
    whole = Path(journal.path).read_bytes()
    chance = random.Random(3)
    for _ in range(300):
        content = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(1, 20)):
            if content:
                content[chance.randrange(len(content))] = chance.randrange(256)
        Path(journal.path).write_bytes(content)
        for request in journal.read().changed:
            assert (request.ended_at is not None) == (request.state in TERMINAL)


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_what_is_no_file_is_neither_read_nor_waited_for(place: Path, journal: Journal, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(journal.path)
    elif kind == "directory":
        os.mkdir(journal.path)
    else:
        (place / "victim").write_text("")
        os.symlink(place / "victim", journal.path)
    for attempt in (journal.read, journal.open, lambda: journal.start("exec", ["x"])):
        with pytest.raises(StateError) as caught:
            attempt()
        assert caught.value.code == "state_unusable"
    if kind == "link":
        assert (place / "victim").read_text() == ""


def test_a_sandbox_that_is_gone_has_no_journal(place: Path) -> None:
    with pytest.raises(NotFound):
        Journal(str(place / "ew-gone")).start("exec", ["x"])
    assert Journal(str(place / "ew-gone")).read().changed == []


def test_the_journal_is_closed_to_everybody_else(journal: Journal) -> None:
    journal.start("exec", ["x"])
    assert os.stat(journal.path).st_mode & 0o777 == 0o600


# -- many writers, no room ----------------------------------------------------------------------------------------------------------


def test_lines_of_many_writers_stay_whole(journal: Journal) -> None:
    children = []
    for writer in range(12):
        pid = os.fork()
        if not pid:
            for number in range(100):
                request = journal.start("exec", ["x" * (writer * 700), str(number)])
                keeper_says(journal, f"began {request.id} 5\nend {request.id} 0 0 exited 0 0 0 1001\n")
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 12
    found = journal.read()
    assert (len(found.changed), found.ignored) == (1200, 0)
    assert {request.state for request in found.changed} == {"completed"}


def test_a_full_disk_is_an_error_and_what_follows_it_is_read(journal: Journal) -> None:
    first = journal.start("exec", ["x"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(journal.path) + 100, limits[1]))
    try:
        with pytest.raises(StateError) as caught:
            journal.start("exec", ["y"])
        with pytest.raises(StateError):
            journal.start("exec", ["y"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.code == "no_room"
    last = journal.start("exec", ["z"])
    assert journal.read().changed == [first, last]


# -- callers -----------------------------------------------------------------------------------------------------------------------


def test_a_caller_is_told_from_another_of_the_same_number() -> None:
    me = Caller.this()
    assert me.is_alive()
    assert not me._replace(started=me.started + 1).is_alive()
    assert not me._replace(boot="another").is_alive()


def test_a_dead_caller_is_dead_also_before_it_is_reaped() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(reading, 1)
        os._exit(0)
    with open(f"/proc/{pid}/stat", "rb") as stream:
        child = Caller.this()._replace(pid=pid, started=int(stream.read().rpartition(b")")[2].split()[19]))
    assert child.is_alive()
    os.write(writing, b"x")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not child.is_alive()
    os.waitpid(pid, 0)
    assert not child.is_alive()
    os.close(reading)
    os.close(writing)


def test_request_ids_do_not_collide() -> None:
    assert len({new_request_id() for _ in range(1000)}) == 1000


def test_the_beginning_of_an_id_names_one_request_or_none() -> None:
    known = [Request(f"r-{name}", "ew-a", "exec", ("true",), "running", 0.0) for name in ("0011", "0022", "00")]
    assert _meant(known, "r-001", "", "").id == "r-0011"
    assert _meant(known, "r-00", "", "").id == "r-00", "it is that one's whole id"
    with pytest.raises(UsageError, match="'r-0' is the beginning of 3 requests: r-0011, r-0022, r-00"):
        _meant(known, "r-0", "", "")
    with pytest.raises(NotFound, match="none"):
        _meant(known, "r-", "none", "")
