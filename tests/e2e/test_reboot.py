"""After a reboot nothing runs, whatever the files say; files are all there, and nobody else's process is taken for a keeper."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, eventually
from e2e.test_kill_points import Witness, keeper_of, nothing_is_left, start

REGISTRY = ("registry.db", "registry.db-wal", "registry.db-shm")


def power_off(person: Person) -> None:
    """All at once: nobody can react to the end of anybody else. What this leaves to the kernel a reboot leaves, too: no mounts."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid, _ in person.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
    assert eventually(lambda: not person.processes()), person.processes()


def process_of(person: Person, *argv: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(argv, cwd="/", env={"PATH": os.environ["PATH"]}, **person.identity())


@pytest.fixture
def innocent(person: Person) -> Iterator["subprocess.Popen[bytes]"]:
    """Somebody who could be killed by this person, and has nothing to do with sandboxes."""
    process = process_of(person, "sleep", "1000")
    yield process
    assert process.poll() is None, "a process that had nothing to do with it was killed"
    process.kill()
    process.wait()


def at_work(person: Person) -> dict[str, Any]:
    """One sandbox at work in three ways, one that only runs, one that is stopped; each with a file."""
    ids = {name: person.json("create", "--name", name)["sandbox"]["id"] for name in ("busy", "idle", "rest")}
    for name in ids:
        person.elsewhere("exec", name, "-c", f"echo {name} > kept", check=True)
    person.elsewhere("stop", "rest", check=True)
    person.elsewhere("exec", "-d", "busy", "--", "sleep", "1000", check=True)
    client = start(person, "exec", "busy", "--", "sh", "-c", "echo there; exec sleep 1001")
    assert client.stdout is not None
    assert client.stdout.readline() == "there\n"
    return {**ids, "client": client}


def states(person: Person) -> dict[str, str]:
    return {box["name"]: box["state"] for box in person.json("list")["sandboxes"]}


def everything_is_back(person: Person, ids: dict[str, str]) -> None:
    """Lazily: an exec starts what is stopped, and its files are there."""
    for name in ("busy", "idle", "rest"):
        done = person.elsewhere("exec", name, "--", "cat", "kept")
        assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr
    listed = person.json("list")["sandboxes"]
    assert {box["name"]: box["id"] for box in listed} == {name: ids[name] for name in ("busy", "idle", "rest")}
    assert {box["state"] for box in listed} == {"running"}


def all_can_go(person: Person) -> None:
    removal = person.json("rm", "--force", "--all")
    assert removal["skipped"] == []
    nothing_is_left(person)


def test_nothing_runs_after_a_reboot(person: Person) -> None:
    ids = at_work(person)
    power_off(person)
    ids.pop("client").communicate(timeout=30)
    document = person.json("list")
    assert {box["name"]: box["state"] for box in document["sandboxes"]} == dict.fromkeys(("busy", "idle", "rest"), "stopped")
    healed = {entry["id"]: (entry["was"], entry["is"]) for entry in document["healed"]}
    assert healed == {ids["busy"]: ("running", "stopped"), ids["idle"]: ("running", "stopped")}
    assert person.json("list")["healed"] == [], "what was found once is not found again"
    requests = person.json("requests")["requests"]
    lost = [request for request in requests if "sleep" in " ".join(request["argv"])]
    assert [(request["state"], request["reason"]) for request in lost] == [("failed", "lost")] * 2
    assert {(request["state"], request["reason"]) for request in requests if request not in lost} == {("completed", "exited")}
    witness = Witness(person)
    witness.agrees()
    everything_is_back(person, ids)
    witness.agrees()
    all_can_go(person)
    witness.agrees()


def test_what_was_at_work_does_not_go_on_in_the_next_life(person: Person) -> None:
    """Nobody looked between the end of the old keeper and the start of the new one."""
    ids = at_work(person)
    power_off(person)
    ids.pop("client").communicate(timeout=30)
    assert person.elsewhere("exec", "busy", "--", "true").returncode == 0
    requests = person.json("requests", "busy")["requests"]
    assert sorted((request["argv"][0], request["reason"]) for request in requests if request["reason"] != "exited") == [
        ("sh", "lost"),
        ("sleep", "lost"),
    ]
    Witness(person).agrees()


@pytest.mark.parametrize("lie", ["another boot", "another start"])
def test_a_number_that_belongs_to_somebody_else_now(person: Person, innocent: "subprocess.Popen[bytes]", lie: str) -> None:
    ids = at_work(person)
    power_off(person)
    ids.pop("client").communicate(timeout=30)
    started = int(Path(f"/proc/{innocent.pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    claim = [innocent.pid, started, "00000000-0000-0000-0000-000000000000"]
    if lie == "another start":
        claim = [innocent.pid, started - 1, boot]
    for name in ("busy", "idle", "rest"):
        place = person.state / "sandboxes" / ids[name] / "sandbox.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), "state": "running", "keeper": claim}))
    assert set(states(person).values()) == {"stopped"}
    person.elsewhere("stop", "idle", check=True)
    assert innocent.poll() is None
    everything_is_back(person, ids)
    assert keeper_of(person, ids["busy"]) != innocent.pid
    for name in ("busy", "idle", "rest"):
        place = person.state / "sandboxes" / ids[name] / "sandbox.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), "keeper": claim}))
    all_can_go(person)


def poison(person: Person, ids: dict[str, str]) -> None:
    """Rows that somebody else wrote, or a bug: ids that are paths, sandboxes that are not there, states that are not so."""
    code = f"""
import sqlite3, time
db = sqlite3.connect({str(person.state / "registry.db")!r}, isolation_level=None)
row = list(db.execute('SELECT * FROM sandboxes LIMIT 1').fetchone())
for identifier, project in (('../../x', '/etc'), ('..', '/'), ('', ''), ('/etc', '/etc'), ('gone', '/root'), ('a/../../../x', '/home')):
    db.execute('INSERT INTO sandboxes VALUES (' + ','.join('?' * len(row)) + ')', [identifier, row[1], project, *row[3:]])
db.execute("UPDATE sandboxes SET state = 'running', project = '/etc', journal_offset = 1 << 40, created_at = 1e300 WHERE id = ?", ({ids["rest"]!r},))
for name, identifier in (('way-out', '../../x'), ('taken', 'gone'), ('claimed', 'never-made')):
    db.execute('INSERT INTO names VALUES (?, ?, ?)', (name, identifier, '1 1 nonsense'))
request = list(db.execute('SELECT * FROM requests LIMIT 1').fetchone())
request[3] = '["poison"]'
for number, sandbox in enumerate(('../../x', 'gone', {ids["rest"]!r})):
    new = [f'r-{{number:016x}}', sandbox, *request[2:5], 'running', '', None, None, time.time(), time.time(), None, *request[12:]]
    db.execute('INSERT INTO requests VALUES (' + ','.join('?' * len(new)) + ')', new)
db.close()
"""
    person.shell(person.python, "-c", code)


def harm(person: Person, ids: dict[str, str], how: str) -> None:
    place = person.state / "registry.db"
    if how == "deleted":
        for name in REGISTRY:
            (person.state / name).unlink(missing_ok=True)
    elif how == "half deleted":
        place.unlink()
    elif how == "emptied":
        place.write_bytes(b"")
    elif how == "truncated":
        os.truncate(place, place.stat().st_size // 2 + 100)
    elif how == "overwritten":
        content = bytearray(place.read_bytes())
        content[4096:] = b"\xa5" * (len(content) - 4096)
        place.write_bytes(content)
    elif how == "garbage":
        place.write_bytes(os.urandom(9000))
        (person.state / "registry.db-wal").write_bytes(os.urandom(9000))
    elif how == "a directory":
        place.unlink()
        place.mkdir()
        person.own(person.state)
    else:
        poison(person, ids)


SLOWLY = ("deleted", "overwritten", "half deleted", "emptied", "truncated", "a directory")


@pytest.mark.parametrize(
    "how",
    ["garbage", "poisoned", *(pytest.param(how, marks=pytest.mark.slow) for how in SLOWLY)],
)
@pytest.mark.slow
def test_a_registry_that_was_harmed_meanwhile(person: Person, how: str) -> None:
    outside = person.place / "x"
    outside.mkdir()
    (outside / "precious").write_text("of somebody else")
    person.own(outside)
    ids = {name: person.json("create", "--name", name)["sandbox"]["id"] for name in ("busy", "idle", "rest")}
    for name in ids:
        person.elsewhere("exec", name, "-c", f"echo {name} > kept", check=True)
    person.elsewhere("stop", "rest", check=True)
    person.elsewhere("exec", "-d", "busy", "--", "sleep", "1000", check=True)
    person.json("list")
    power_off(person)
    harm(person, ids, how)
    if how != "poisoned":  # a name is not free because the registry does not know it
        refused = person.elsewhere("create", "--name", "rest")
        assert refused.returncode != 0
        assert "rest" in refused.stderr
    document = person.json("list")
    assert {box["name"]: box["state"] for box in document["sandboxes"]} == dict.fromkeys(("busy", "idle", "rest"), "stopped")
    assert {box["project"] for box in document["sandboxes"]} == {str(person.project)}
    if how == "poisoned":
        removed = {entry["id"] for entry in document["healed"] if entry["what"] == "removed"}
        assert {"../../x", "..", "/etc", "gone"} <= removed
    requests = person.json("requests")["requests"]
    assert {request["state"] for request in requests} <= {"completed", "failed"}
    assert [request["reason"] for request in requests if request["argv"] == ["sleep", "1000"]] == ["lost"]
    Witness(person).agrees()
    everything_is_back(person, ids)
    for name in ("way-out", "taken", "claimed"):  # names that belong to nobody can be had
        person.elsewhere("create", "--name", name, check=True)
    all_can_go(person)
    assert (outside / "precious").read_text() == "of somebody else"
