"""Many at once: nothing is lost, nothing is made twice, a name belongs to one, and all of it goes again."""

import collections
import contextlib
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, eventually, tree
from e2e.test_kill_points import Witness, is_pid_1, nothing_is_left, start

# Everybody waits at the gate, a lock that the test holds, until all are there.
GATE = """
import fcntl, json, os, sys
number = int(sys.argv[1])
from elsewhere.errors import ElsewhereError
from elsewhere.operations import creating, executing, sandboxes
from elsewhere.operations.creating import Wish
from elsewhere.operations.executing import ExecRequest
print('there', flush=True)
fcntl.flock(os.open(sys.argv[2], os.O_RDONLY), fcntl.LOCK_SH)
"""
MANY = (
    GATE
    + """
said = {'number': number}
def attempt(key, call):
    try:
        said[key] = call()
    except ElsewhereError as error:
        said[key] = error.code if error.code == 'name_in_use' else f'{error.code}: {error.message}'
# One of twenty names, which five want; a request that five share; one that nobody else has, and that goes again.
attempt('named', lambda: creating.create(Wish(name=f'name-{number % 20}'))[0].id)
attempt('same', lambda: creating.create(Wish(name=f'same-{number % 10}', request=f'request-{number % 10}'))[0].id)
attempt('own', lambda: creating.create(Wish())[0].id)
def run():
    done = executing.execute(ExecRequest(said['own'], ['sh', '-c', f'echo {number} > mine; cat mine'], capture=True))
    said['request'] = done.request.id
    return done.outcome.stdout.decode()
attempt('said', run)
attempt('removed', lambda: sandboxes.remove([said['own']], force=True).removed)
print(json.dumps(said), flush=True)
"""
)


@contextlib.contextmanager
def crowd(person: Person, code: str, count: int) -> Iterator[list[dict[str, Any]]]:
    gate = person.place / "gate"
    gate.touch()
    gate.chmod(0o644)
    said: list[dict[str, Any]] = []
    with subprocess.Popen(["flock", "--exclusive", str(gate), "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"held\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"held\n"
        people = [
            subprocess.Popen(
                [person.python, "-c", code, str(number), str(gate)],
                cwd=person.project,
                env=person.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **person.identity(),
            )
            for number in range(count)
        ]
        for one in people:
            assert one.stdout is not None
            assert one.stdout.readline() == "there\n", one.communicate()
        holder.stdin.close()
        for one in people:
            out, err = one.communicate(timeout=200)
            assert one.returncode == 0, err
            said.append(json.loads(out))
    yield said


@pytest.mark.slow(40)
def test_a_hundred_processes_create_and_remove_at_once(person: Person) -> None:
    with crowd(person, MANY, 100) as said:
        pass
    assert [one["said"] for one in said] == [f"{one['number']}\n" for one in said]
    assert [one["removed"] for one in said] == [[one["own"]] for one in said]
    winners = collections.defaultdict(list)
    for one in said:
        if one["named"] != "name_in_use":
            winners[f"name-{one['number'] % 20}"].append(one["named"])
    assert {name: len(ids) for name, ids in winners.items()} == {f"name-{number}": 1 for number in range(20)}
    same = collections.defaultdict(set)
    for one in said:
        same[f"same-{one['number'] % 10}"].add(one["same"])
    assert len(same) == 10
    assert all(len(ids) == 1 for ids in same.values()), same
    for name in (*winners, *same):  # whoever lost left the winner's name alone, before anybody looks and mends that
        assert person.elsewhere("create", "--name", name).returncode == 1, name
    listed = {box["name"]: box["id"] for box in person.json("list")["sandboxes"]}
    assert listed == {name: next(iter(ids)) for name, ids in (winners | same).items()}
    requests = person.json("requests", "--limit", "100000")["requests"]
    assert collections.Counter(request["id"] for request in requests) == {one["request"]: 1 for one in said}
    assert {(request["state"], request["reason"]) for request in requests} == {("completed", "exited")}
    Witness(person).agrees()
    assert len(person.json("rm", "--all", "--force")["removed"]) == 30
    nothing_is_left(person)


def test_fifty_created_run_and_removed_at_once(person: Person) -> None:
    """By threads of one program."""
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
from elsewhere import Sandbox
together = threading.Barrier(50)
def one(number):
    together.wait()
    with Sandbox.create(labels={'number': str(number)}) as box:
        return box.id, box.run(f'echo {number} > file; cat file').stdout
with ThreadPoolExecutor(50) as pool:
    done = list(pool.map(one, range(50)))
assert [text for _, text in done] == [f'{number}\\n' for number in range(50)], done
assert len({name for name, _ in done}) == 50
assert not Sandbox.list()
"""
    person.sdk(code)
    Witness(person).agrees()
    nothing_is_left(person)


def proportional_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_running_at_once(root: Person) -> None:
    """Each answers, and all are gone afterwards. How much memory each takes is printed."""
    many = int(os.environ.get("ELSEWHERE_TEST_MANY") or 300)
    code = f"""
import os
from elsewhere.operations import creating, executing, sandboxes
from elsewhere.operations.creating import Wish
from elsewhere.operations.executing import ExecRequest
ids = [creating.create(Wish(labels={{'n': str(n)}}))[0].id for n in range({many})]
for n, name in enumerate(ids):
    done = executing.execute(ExecRequest(name, ['sh', '-c', f'echo {{n}}'], capture=True))
    assert done.outcome.stdout == b'%d\\n' % n, done
print(len(set(ids)))
"""
    assert root.sdk(code, timeout=200).stdout.split() == [str(many)]
    assert root.json("list")["total"] == many
    keepers = [json.loads(place.read_text())["keeper"][0] for place in (root.state / "sandboxes").glob("*/sandbox.json")]
    memory = sum(map(proportional_kib, keepers))
    print(f"\n{many} running at once: {memory / many / 1024:.2f} MiB of proportional memory each")
    Witness(root).agrees()
    removal = root.json("rm", "--all", "--force", timeout=250)
    assert (len(removal["removed"]), removal["skipped"]) == (many, [])
    nothing_is_left(root)


def test_whoever_comes_too_late_leaves_the_name_alone(person: Person) -> None:
    """Two ask for the same request and name; the slower one is refused by the launcher, after it claimed the name as well."""
    code = """
from elsewhere.errors import InUse
from elsewhere.operations import creating
from elsewhere.operations.creating import Wish
from elsewhere.sandbox.records import truth
from elsewhere.storage.state import State
made, _ = creating.create(Wish(name='wanted', request='same'))
try:
    with truth.name_reserved(State.open(), 'wanted', made.id):
        raise InUse('identity_in_use', 'somebody was faster')
except InUse:
    pass
try:
    creating.create(Wish(name='wanted'))
except InUse as error:
    print(error.code)
"""
    assert person.sdk(code).stdout == "name_in_use\n"
    assert person.json("list")["total"] == 1


def builders(person: Person) -> list[int]:
    """Those who wait to build: each has made a keeper, and is none itself."""
    found = []
    for pid, _ in person.processes():
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if children and all(is_pid_1(int(child)) for child in children) and not is_pid_1(pid):
                found.append(pid)
    return found


def is_held(lock: Path) -> bool:
    with open(lock, "rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def enter(person: Person, box: str) -> "subprocess.Popen[str]":
    """By the SDK: the launcher, which is busy with building, is not needed to enter a sandbox."""
    code = f"from elsewhere import Sandbox; Sandbox.get({box!r}).run('echo x > leaked').check()"
    return subprocess.Popen(
        [person.python, "-c", code],
        cwd=person.project,
        env=person.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **person.identity(),
    )


def test_nobody_gets_in_before_the_sandbox_stands(person: Person) -> None:
    """While a keeper waits for its mounts, its root is reality's. Whoever comes then waits, too."""
    before = tree(person.project)
    box = person.json("create")["sandbox"]["id"]
    for _ in range(20):  # until it is the builder of this one that sleeps, and not one that builds ahead of time
        person.elsewhere("stop", box, check=True)
        assert eventually(lambda: len(list((person.state / "spare").iterdir())) == 3 and len(builders(person)) == 2)
        asleep = builders(person)
        for pid in asleep:
            os.kill(pid, signal.SIGSTOP)
        try:
            starting = start(person, "start", box)
            # A blank that was not ready yet when it was put to sleep is given up after a while.
            assert eventually(lambda: is_held(person.state / "sandboxes" / box / "lock"), 40)
            entering = enter(person, box)
            with contextlib.suppress(subprocess.TimeoutExpired):
                entering.wait(2)
            caught = starting.poll() is None
        finally:
            for pid in asleep:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        for client in (starting, entering):
            assert client.communicate(timeout=60)[1] == ""
            assert client.returncode == 0
        if caught:
            break
    else:
        pytest.fail("no builder could be caught in time")
    assert set(tree(person.project)) - set(before) == set()
    assert tree(person.project) == before
    assert person.json("diff", box)["changes"]["added"] == ["leaked"]
