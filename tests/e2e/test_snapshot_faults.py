"""kill -9 of anybody in the middle of snapshot, rollback, fork, rm-snapshot and merging; a full disk; a reboot. What is there
afterwards is what was there before or after, every snapshot shows what it showed, and nothing is left that would not go.

The moments are random, as in `test_kill_points.py`; a failure prints the seed.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from chance import seed_of
from conftest import Person, eventually
from e2e.test_kill_points import PATIENCE_S, Witness, front_of, helpers, is_alive, keeper_of, nothing_is_left, start
from e2e.test_reboot import power_off
from e2e.test_snapshots import fork, layers_left, made, names, shown, work
from linux.test_ladder import Elsewhere, needs_root

OPERATIONS = ("snapshot", "snapshot", "snapshot", "rollback", "rollback", "fork", "rm-snapshot")
VICTIMS = ("client", "front", "front", "front", "launcher", "keeper", "sweeper")
SHOW = "for n in f file-*; do test -f $n && echo $n $(cat $n); done; true"
Files = dict[str, str]


def line_of(number: int) -> str:
    """Work of which every step can be told apart: something is written, made and deleted."""
    return f"echo {number} > f; rm -rf file-{number % 5}; echo {number} > file-{(number + 2) % 5}; echo {number} > file-{number}"


def after(files: Files, number: int) -> Files:
    found = {**files, "f": str(number), f"file-{(number + 2) % 5}": str(number), f"file-{number}": str(number)}
    if number >= 5:
        found.pop(f"file-{number % 5}", None)
    return found


def seen(person: Person, box: str) -> Files:
    return dict(line.split(" ", 1) for line in shown(person, box, SHOW).splitlines())


def prune(person: Person) -> list[str]:
    code = "from elsewhere.sandbox import ending\nfrom elsewhere.storage.state import State\nprint(*ending.prune(State.open()))"
    return person.shell(person.python, "-c", code).stdout.split()


@dataclass
class Blows:
    """One sandbox, what it must show, and what each of its snapshots must."""

    person: Person
    seed: int
    now: Files = field(default_factory=dict)
    saved: dict[str, Files] = field(default_factory=dict)
    usual: dict[str, float] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    number: int = 10  # beyond the names that come again
    hits: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.witness = Witness(self.person)

    def points(self, count: int, *, look_every: int) -> None:
        try:
            self._get_ready()
            tries = 0
            while self.hits < count and tries < 3 * count:
                tries += 1
                self._point()
                self._agrees(1)
                if tries % look_every == 0:
                    self._agrees(len(self.saved))
                    self.witness.agrees()
            self._agrees(len(self.saved))
            self._end()
        except BaseException:
            print(f"\nELSEWHERE_TEST_SEED={self.seed} as {self.person.name}; the last points:", *self.said[-12:], sep="\n  ")
            raise
        print(f"{self.person.name}: {self.hits} of {tries} blows landed")

    def _get_ready(self) -> None:
        """As many layers as make a merge due soon, and how long each operation takes here and now."""
        self.box = made(self.person)
        for number in range(8):
            self._work()
            self._timed("snapshot", "snapshot", self.box, f"first-{number}")
            self.saved[f"first-{number}"] = self.now
        self._timed("rollback", "rollback", self.box, "first-3")
        self._timed("rollback", "rollback", self.box, "first-7")
        self._timed("fork", "fork", self.box, "--name", "child")
        self._timed("rm-snapshot", "rm-snapshot", self.box, "first-1")
        del self.saved["first-1"]
        self.person.elsewhere("rm", "--force", "child", check=True)

    def _timed(self, operation: str, *arguments: str) -> None:
        began = time.monotonic()
        self.person.elsewhere(*arguments, check=True)
        self.usual[operation] = time.monotonic() - began

    def _work(self) -> None:
        self.number += 1
        work(self.person, self.box, line_of(self.number))
        self.now = after(self.now, self.number)

    # -- one blow ---

    def _point(self) -> None:
        operation, victim = self.chance.choice(OPERATIONS), self.chance.choice(VICTIMS)
        busy = operation in ("snapshot", "fork") and self.chance.random() < 0.25
        if self.chance.random() < 0.8:
            self._work()
        if busy:
            self.person.elsewhere("exec", "-d", self.box, "--", "sleep", "1000", check=True)
        name = f"s{self.number}-{self.hits}-{len(self.said)}"
        target = self.chance.choice(sorted(self.saved)) if self.saved else "base"
        arguments = {
            "snapshot": ("snapshot", self.box, name),
            "rollback": ("rollback", self.box, target),
            "fork": ("fork", self.box, "--name", name),
            "rm-snapshot": ("rm-snapshot", self.box, target),
        }[operation]
        if operation == "rm-snapshot" and not self.saved:
            return
        delay = self.chance.uniform(0, self.usual[operation] * 1.1)
        self.said.append(f"kill the {victim} {delay * 1000:.1f} ms after: {' '.join(arguments)}{' (busy)' if busy else ''}")
        before = set(self.saved)
        client = start(self.person, *arguments)
        if victim == "front":
            while front_of(self.person, client) is None and client.poll() is None:
                pass
            delay /= 2
        time.sleep(delay)
        hit = self._kill(victim, client)
        self.hits += hit
        out, err = client.communicate(timeout=100)
        self.said[-1] += f" -> {client.returncode}, {'hit' if hit else 'missed'}: {out.strip()!r} {err.strip()[-300:]!r}"
        if not hit:
            assert client.returncode == 0, self.said[-1]
        if busy:
            self._settle_down()
        self._what_became(operation, name, target, before, done=client.returncode == 0)

    def _settle_down(self) -> None:
        with contextlib.suppress(AssertionError):  # the keeper may be dead, and with it what ran
            self.person.elsewhere("cancel", self.box)
        assert eventually(lambda: not self.person.json("ps", self.box)["processes"], PATIENCE_S)

    def _kill(self, victim: str, client: "object") -> bool:
        if victim == "client":
            if client.poll() is not None:  # type: ignore[attr-defined]
                return False
            client.kill()  # type: ignore[attr-defined]
            return True
        if victim == "front":
            pid = front_of(self.person, client)  # type: ignore[arg-type]
        elif victim == "keeper":
            pid = keeper_of(self.person, self.box)
        else:
            launcher, others = helpers(self.person)
            pid = launcher if victim == "launcher" else self.chance.choice(sorted(others)) if others else None
        if pid is None or not is_alive(pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda: not is_alive(pid)), pid
            return True
        return False

    # -- before or after, and nothing between ---

    def _what_became(self, operation: str, name: str, target: str, before: set[str], *, done: bool) -> None:
        """Whoever was not killed may still be at it: a client's death is not the end of its operation."""
        listed: list[str] = []

        def settled() -> bool:
            again = names(self.person, self.box)
            same, listed[:] = again == listed, again
            return same

        assert eventually(settled, PATIENCE_S)
        shows = seen(self.person, self.box)
        listed = names(self.person, self.box)
        new, gone = set(listed) - before, before - set(listed)
        if operation == "snapshot":
            assert new <= {name}, (new, self.said[-1])
            assert not done or new == {name}, self.said[-1]
            assert shows == self.now, self.said[-1]
            self.saved.update(dict.fromkeys(new, self.now))
        elif operation == "rollback":
            assert len([one for one in new if one.startswith("before-rollback-")]) == len(new) <= 1, (new, self.said[-1])
            wanted = self.saved.get(target, {})
            assert shows in ((wanted,) if done else (self.now, wanted)), (shows, self.now, wanted, self.said[-1])
            if shows != self.now:
                assert new or self.now in self.saved.values(), f"what it had is nowhere: {self.said[-1]}"
            self.saved.update(dict.fromkeys(new, self.now))
            self.now = shows
        elif operation == "fork":
            assert not new, self.said[-1]
            assert shows == self.now, self.said[-1]
            self._after_fork(name, done=done)
        else:
            assert not new, self.said[-1]
            assert gone <= {target}, self.said[-1]
            assert not done or gone == {target}, self.said[-1]
            assert shows == self.now, self.said[-1]
            for one in gone:
                del self.saved[one]
            return
        assert not gone, (gone, self.said[-1])

    def _after_fork(self, name: str, *, done: bool) -> None:
        there = [box for box in self.person.json("list")["sandboxes"] if box["name"] == name]
        assert len(there) == 1 if done else len(there) <= 1, self.said[-1]
        for _ in there:
            assert seen(self.person, name) == self.now, self.said[-1]
            self.person.elsewhere("rm", "--force", name, check=True)
        self.person.elsewhere("create", "--name", name, check=True)  # its name can be had
        self.person.elsewhere("rm", "--force", name, check=True)

    def _agrees(self, count: int) -> None:
        """The next snapshot works, and so many others show what they showed."""
        for name in self.chance.sample(sorted(self.saved), min(count, len(self.saved))):
            child = fork(self.person, self.box, "--from", name)
            assert seen(self.person, child) == self.saved[name], (name, self.said[-1] if self.said else "")
            self.person.elsewhere("rm", "--force", child, check=True)
        if len(self.saved) > 25:
            for name in sorted(self.saved)[:10]:
                self.person.elsewhere("rm-snapshot", self.box, name, check=True)
                del self.saved[name]

    def _end(self) -> None:
        """Nothing of it is left anywhere."""
        self.person.elsewhere("snapshot", self.box, "last", check=True)
        assert seen(self.person, self.box) == self.now
        for name in names(self.person, self.box):
            self.person.elsewhere("rm-snapshot", self.box, name, check=True)
        for entry in (self.person.state / "archive").iterdir():
            self.person.shell("mv", entry, self.person.state / "trash")
        code = f"from elsewhere import Sandbox\nSandbox.get({self.box!r}, on_exit='discard').remove()"
        self.person.sdk(code)
        assert eventually(lambda: not layers_left(self.person) or not prune(self.person), PATIENCE_S)
        assert layers_left(self.person) == []
        self.witness.agrees()
        nothing_is_left(self.person)


@pytest.mark.slow(40)
@pytest.mark.timeout(1200)
def test_killed_at_any_moment(person: Person) -> None:
    Blows(person, seed_of()).points(12, look_every=6)  # as root and as an ordinary user


# -- at every step ---

# What is renamed, saved and removed, one after the other: the process ends right before each of these calls in turn.
STEPS = """
import os, sys
from elsewhere.storage import trash
from elsewhere.operations import snapshots
count, verb, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
left = count
def counted(call):
    def step(*positional, **named):
        global left
        if left == 0:
            os._exit(99)
        left -= 1
        return call(*positional, **named)
    return step
getattr(snapshots, verb)  # everything is loaded before
for name in ('rename', 'replace', 'mkdir', 'unlink', 'rmdir'):
    setattr(os, name, counted(getattr(os, name)))
if verb == 'fork':
    snapshots.fork(arguments[0], 1, name=arguments[1])
else:
    getattr(snapshots, verb)(*arguments)
sys.exit(0)
"""


SLOW = (pytest.mark.slow, pytest.mark.timeout(1200))
ALL = pytest.mark.parametrize("stride", [17, pytest.param(3, marks=SLOW)])


def stopped_at_steps(person: Person, stride: int, verb: str, arguments: list[str], check: Callable[[bool], None]) -> int:
    """How many steps there were. `check` is called after each, with whether it came to its end, and undoes what was done."""
    for count in range(seed_of() % stride, 500, stride):
        done = person.shell(person.python, "-c", STEPS, str(count), verb, *arguments, cwd=person.project, check=False)
        assert done.returncode in (0, 99), done.stderr
        check(done.returncode == 0)
        if done.returncode == 0:
            return count
    raise AssertionError(f"{verb} does not come to an end")


@ALL
@pytest.mark.parametrize("disk", ["", "image"])
def test_a_snapshot_stopped_before_each_of_its_steps(person: Person, disk: str, stride: int) -> None:
    if disk and not person.is_root:
        pytest.skip("an image needs root")
    box = made(person, *(("--disk", "64M") if disk else ()))
    work(person, box, line_of(20))
    person.elsewhere("snapshot", box, "first", check=True)
    state = {"now": after({}, 20), "number": 20}

    def check(done: bool) -> None:
        assert seen(person, box) == state["now"], state
        listed = names(person, box)
        assert set(listed) <= {"first", "next"}
        assert not done or "next" in listed
        if "next" in listed:
            child = fork(person, box, "--from", "next")
            assert seen(person, child) == state["now"]
            person.elsewhere("rm", "--force", child, check=True)
            person.elsewhere("rm-snapshot", box, "next", check=True)
        state["number"] += 1  # type: ignore[operator]
        work(person, box, line_of(state["number"]))  # type: ignore[arg-type]
        state["now"] = after(state["now"], state["number"])  # type: ignore[arg-type]

    assert stopped_at_steps(person, stride, "snapshot", [box, "next"], check) >= 4
    person.elsewhere("rollback", box, "first", check=True)
    assert seen(person, box) == after({}, 20)


@ALL
@pytest.mark.parametrize("target", ["first", "base"])
def test_a_rollback_stopped_before_each_of_its_steps(person: Person, target: str, stride: int) -> None:
    box = made(person)
    work(person, box, line_of(20))
    person.elsewhere("snapshot", box, "first", check=True)
    work(person, box, line_of(21))
    was, wanted = after(after({}, 20), 21), after({}, 20) if target == "first" else {}

    def check(done: bool) -> None:
        shows = seen(person, box)
        assert shows in ((wanted,) if done else (was, wanted))
        left = [name for name in names(person, box) if name.startswith("before")]
        assert left or shows == was, "what it had is nowhere"
        for name in left:
            person.elsewhere("rollback", box, name, check=True)
            assert seen(person, box) == was
        # As if it had never been, and not in a snapshot.
        person.elsewhere("rollback", box, "first", check=True)
        for name in names(person, box):
            if name != "first":
                person.elsewhere("rm-snapshot", box, name, check=True)
        work(person, box, line_of(21))

    assert stopped_at_steps(person, stride, "rollback", [box, target], check) >= 5


@ALL
def test_a_fork_stopped_before_each_of_its_steps(person: Person, stride: int) -> None:
    box = made(person)
    work(person, box, line_of(20))
    now = after({}, 20)

    def check(done: bool) -> None:
        nonlocal now
        assert seen(person, box) == now
        there = [one for one in person.json("list")["sandboxes"] if one["name"] == "child"]
        assert len(there) == 1 if done else len(there) <= 1
        for _ in there:
            assert seen(person, "child") == now
            person.elsewhere("rm", "--force", "child", check=True)
        number = 21 + len(now)
        work(person, box, line_of(number))
        now = after(now, number)

    assert stopped_at_steps(person, stride, "fork", [box, "child"], check) >= 4


def test_merging_stopped_at_any_time_is_done_again(person: Person) -> None:
    """Nothing of it counts before it is whole."""
    box = made(person)
    code = """
import sys
from elsewhere import Sandbox
with Sandbox.get(sys.argv[1]) as box:
    for number in range(1, 10):
        box.run(f'echo {number} > f; mkdir -p d-{number}/e; echo {number} > d-{number}/e/x; rm -rf d-{number - 2}').check()
        box.snapshot(f's{number}')
"""
    person.shell(person.python, "-c", code, box)
    merge = """
import os, sys
from elsewhere.sandbox.records import record
from elsewhere.storage.layers import Layers
from elsewhere.storage.state import State
state = State.open()
layers, left = Layers(state), int(sys.argv[2])
tip = record.load(state, sys.argv[1]).tip
def counted(call):
    def step(*positional, **named):
        global left
        if left == 0: os._exit(99)
        left -= 1
        return call(*positional, **named)
    return step
for name in ('mkdir', 'link', 'rename', 'replace', 'mknod', 'rmdir', 'unlink'):
    setattr(os, name, counted(getattr(os, name)))
assert layers.merge(tip)
"""
    shows = shown(person, box, "cat f; find d-* | sort; cat d-*/e/x")
    for count in [*range(seed_of() % 5, 200, 31), 10000]:
        done = person.shell(person.python, "-c", merge, box, str(count), check=False)
        assert done.returncode in (0, 99), done.stderr
        person.elsewhere("stop", box, check=True)
        assert shown(person, box, "cat f; find d-* | sort; cat d-*/e/x") == shows
        if done.returncode == 0:
            break
    assert done.returncode == 0
    assert list((person.state / "layers").glob("*/merged.json"))
    assert not list((person.state / "layers").glob("*/merged.new"))
    person.elsewhere("rollback", box, "s5", check=True)
    assert shown(person, box, "cat f; ls -d d-*") == "5\nd-4\nd-5\n"


# -- a full disk ---

# The disk is filled to the last block, and given back a little between the tries: each comes further than the one before.
FULL = """
e create --name box >/dev/null
fill="$ELSEWHERE_HOME/fill"; mkdir "$fill"; n=0
e exec box -c 'echo 1 > f; echo keep > keep'
e snapshot box one >/dev/null
e exec box -c 'echo 2 > f; head -c 30000 /dev/zero > big'
if test WHAT = busy; then e exec -d box -- sleep 1000 >/dev/null; fi
while head -c 4096 /dev/zero > "$fill/$n" 2>/dev/null; do n=$((n+1)); done
failed=0
while ! e VERB --json MORE >"$OUT/document" 2>"$OUT/errors"; do
  cat "$OUT/document" >> "$OUT/documents"
  failed=$((failed+1)); test $failed -lt 60
  for one in 1 2 3 4 5 6; do rm -f "$fill/$n"; n=$((n-1)); done
done
rm -r "$fill"
e exec box -c 'cat f keep' > "$OUT/after"
if test WHAT = busy; then e stop box >/dev/null; fi
e snapshots box --json > "$OUT/names"
e rollback --force box one >/dev/null
e exec box -c 'cat f keep; echo 3 > f'
e snapshot box three >/dev/null
e rollback box three >/dev/null
e exec box -c 'cat f'
e rm --force --all >/dev/null
echo "failed $failed"
"""


@pytest.mark.parametrize(
    ("verb", "more", "what", "shows"),
    [
        ("snapshot", "box two", "idle", "2"),
        pytest.param("snapshot", "box two", "busy", "2", marks=pytest.mark.slow),
        pytest.param("rollback", "box one", "idle", "1", marks=pytest.mark.slow),
        ("fork", "box --name child", "idle", "2"),
    ],
)
def test_a_full_disk_is_said_and_nothing_is_lost(person: Person, verb: str, more: str, what: str, shows: str) -> None:
    needs_root()
    out = person.place / "out"
    person.shell("mkdir", out)
    person.extra["OUT"] = str(out)
    text = FULL.replace("VERB", verb).replace("MORE", more).replace("WHAT", what)
    done = Elsewhere(person, "--tmpfs", str(person.state), "--tmpfs-size", "4m").script(text)
    del person.extra["OUT"]
    assert done.returncode == 0, (done.stdout, done.stderr, (out / "documents").read_text()[-2000:])
    assert done.stdout.splitlines()[:3] == ["1", "keep", "3"], done.stdout
    assert (out / "after").read_text() == f"{shows}\nkeep\n"
    documents = [json.loads(line) for line in (out / "documents").read_text().splitlines()]
    assert documents, "it was never full"
    for document in documents:
        error = document["sandboxes"][0]["error"] if "sandboxes" in document else document["error"]
        assert "space" in error["message"] + error["hint"], error
        assert error["code"] in ("no_room", "state_unusable", "not_forked"), error
    listed = [one["name"] for one in json.loads((out / "names").read_text())["snapshots"]]
    assert listed[0] == "one"
    assert len(listed) == len(set(listed)) == (1 if verb == "fork" else 2), listed


# -- a reboot ---


def test_after_a_reboot_everything_is_there(person: Person) -> None:
    box = made(person)
    now: Files = {}
    for number in (20, 21, 22):
        work(person, box, line_of(number))
        now = after(now, number)
        person.elsewhere("snapshot", box, f"s{number}", check=True)
    work(person, box, line_of(23))
    child = fork(person, box, "--from", "s21")
    person.elsewhere("exec", "-d", box, "--", "sleep", "1000", check=True)
    person.elsewhere("snapshot", box, "busy", check=True)
    taking = start(person, "snapshot", box, "last")
    power_off(person)
    taking.communicate(timeout=60)
    listed = names(person, box)
    assert set(listed) - {"last"} == {"s20", "s21", "s22", "busy"}
    assert seen(person, box) == after(now, 23)
    assert seen(person, child) == after(after({}, 20), 21)
    for name in listed:
        person.elsewhere("rollback", box, name, check=True)
        wanted = now if name == "s22" else after(now, 23) if name in ("busy", "last") else after({}, 20)
        assert seen(person, box) == (after(wanted, 21) if name == "s21" else wanted)
    Witness(person).agrees()
