"""kill -9 of anybody, at any moment: what `list` and `requests` say afterwards is so, the next operation works, and nothing is
left when all is removed.

The moments are random, between the start of an operation and a little after its usual end. A failure prints the seed; with
ELSEWHERE_TEST_SEED set to it, the same operations, victims and delays come again.
"""

import contextlib
import json
import os
import random
import signal
import stat
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chance import seed_of
from conftest import Person, eventually, groups_of, host_mounts

UNFINISHED = ("pending", "creating", "running", "completing")
TERMINAL = ("completed", "failed", "cancelled")
OPERATIONS = ("create", "exec", "exec", "detached", "stop", "start", "rm")
VICTIMS = ("client", "front", "front", "launcher", "keeper", "keeper", "helper")
PATIENCE_S = 20.0


# -- looking ---


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_pid_1(pid: int) -> bool:
    """Of a process namespace of its own, and alive."""
    try:
        words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return False
    numbers = words["NSpid"].split()
    return len(numbers) > 1 and numbers[-1] == "1" and words["State"].strip()[0] not in "ZX"


def record_of(person: Person, sandbox: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((person.state / "sandboxes" / sandbox / "sandbox.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def keeper_of(person: Person, sandbox: str) -> int | None:
    words = record_of(person, sandbox).get("keeper") or [None]
    return words[0]


def helpers(person: Person) -> tuple[int | None, list[int]]:
    """The launcher, and the processes that it started itself: nursery and sweeper."""
    found = [pid for pid, words in person.processes() if "elsewhere.cli.launch" in words]
    launcher = None
    parents = {}
    for pid in found:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(words[1])
            if words[3] == str(pid):
                launcher = pid
    return launcher, [pid for pid, parent in parents.items() if parent == launcher and not is_pid_1(pid)]


@dataclass
class Witness:
    """Compares what is said with what is there, and remembers: nothing that was asked for vanishes, nothing ends twice."""

    person: Person
    ends: dict[str, tuple[object, ...]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)

    def agrees(self) -> None:
        """Others may still be at work, so a lie counts when it stays."""
        lies: list[str] = []

        def true() -> bool:
            lies[:] = [*self._lies_of_list(), *self._lies_of_requests()]
            return not lies

        assert eventually(true, PATIENCE_S), "\n".join(lies)

    def _lies_of_list(self) -> list[str]:
        document = self.person.json("list")
        lies = [f"a record that nobody can read: {broken}" for broken in document["broken"]]
        boxes = {box["id"]: box for box in document["sandboxes"]}
        names = [box["name"] for box in boxes.values() if box["name"]]
        there = set(os.listdir(self.person.state / "sandboxes"))
        if len(boxes) != len(document["sandboxes"]) or document["total"] != len(boxes):
            lies.append(f"listed twice: {document}")
        if len(names) != len(set(names)):
            lies.append(f"one name, two sandboxes: {sorted(names)}")
        if there != set(boxes):
            lies.append(f"listed {sorted(boxes)}, and there is {sorted(there)}")
        for box in boxes.values():
            keeper = keeper_of(self.person, box["id"])
            alive = keeper is not None and is_pid_1(keeper)
            if box["state"] not in ("running", "stopped") or (box["state"] == "running") != alive:
                lies.append(
                    f"{box['id']} is said to be {box['state']}, and its keeper {keeper} {'lives' if alive else 'is dead'}"
                )
        return lies

    def _lies_of_requests(self) -> list[str]:
        found = self.person.json("requests", "--limit", "1000000")["requests"]
        lies = []
        ids = {request["id"] for request in found}
        if len(ids) != len(found):
            lies.append("a request is listed twice")
        if self.known - ids:
            lies.append(f"requests that vanished: {self.known - ids}")
        self.known |= ids
        for request in found:
            end = (request["state"], request["reason"], request["exit_code"], request["ended_at"])
            over = request["ended_at"] is not None
            if over != (request["state"] in TERMINAL) or (over and not request["reason"]):
                lies.append(f"neither over nor under way: {request}")
            if self.ends.setdefault(request["id"], end) != end and over and self.ends[request["id"]][3] is not None:
                lies.append(f"it ended as {self.ends[request['id']]}, and now as {end}")
            if over:
                self.ends[request["id"]] = end
            else:
                del self.ends[request["id"]]
                lies += self._lies_about_work(request)
        return lies

    def _lies_about_work(self, request: dict[str, Any]) -> list[str]:
        """What is said to be under way has a process in a sandbox that runs, or is on its way there for a short while."""
        if keeper_of(self.person, request["sandbox"]) is None:
            return [f"under way in a sandbox without a keeper: {request}"]
        if request["state"] in ("pending", "creating"):
            return []  # between the caller's note and the keeper's; ended by the next survey after a minute
        shown = self.person.json("ps", request["sandbox"])["processes"]
        if not any(process["request"] == request["id"] for process in shown):
            return [f"said to run, and no process of it: {request}, {shown}"]
        return []


def nothing_is_left(person: Person) -> None:
    """After everything was removed: no process, mount, socket, cgroup, and nothing in the rooms that are for the living."""

    def litter() -> list[str]:
        rooms = [person.state / room for room in ("sandboxes", "spare", "trash")]
        return [str(entry) for room in rooms for entry in room.iterdir()]

    assert person.json("list")["total"] == 0
    assert eventually(lambda: not list((person.state / "trash").iterdir()), PATIENCE_S), litter()
    person.stop_launcher()
    assert eventually(lambda: not person.processes(), PATIENCE_S), person.processes()
    assert eventually(lambda: not litter(), 1), litter()
    assert not [line for line in host_mounts() if str(person.state) in line]
    sockets = [place for place in (person.state / "run").iterdir() if stat.S_ISSOCK(place.lstat().st_mode)]
    assert not sockets, sockets
    assert eventually(lambda: not groups_of(person), PATIENCE_S), groups_of(person)


# -- killing ---


def start(person: Person, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        person.command(*arguments),
        cwd=person.project,
        env=person.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **person.identity(),
    )


def front_of(person: Person, client: "subprocess.Popen[str]") -> int | None:
    """Who works for this client has its standard output."""
    assert client.stdout is not None
    output = os.readlink(f"/proc/self/fd/{client.stdout.fileno()}")
    for pid, words in person.processes():
        with contextlib.suppress(OSError):
            if "elsewhere.cli.launch" in words and os.readlink(f"/proc/{pid}/fd/1") == output and not is_pid_1(pid):
                return pid
    return None


@dataclass
class Killer:
    person: Person
    seed: int
    usual: dict[str, float] = field(default_factory=dict)
    wrote: set[str] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    hits: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.witness = Witness(self.person)
        self.number = 0

    def points(self, count: int, *, look_every: int) -> None:
        """Until so many blows have landed; one that comes too late hits nobody, and how many do is the machine's affair."""
        try:
            self._get_ready()
            while self.hits < count and self.number < 3 * count:
                self._one_point()
                if self.number % look_every == 0:
                    self.witness.agrees()
            self.witness.agrees()
            assert self.person.json("rm", "--force", "--all")["skipped"] == []
            self.witness.agrees()
            nothing_is_left(self.person)
        except BaseException:
            print(f"\nELSEWHERE_TEST_SEED={self.seed} as {self.person.name}; the last points:", *self.said[-12:], sep="\n  ")
            raise
        print(f"{self.person.name}: {self.hits} of {self.number} blows landed")

    def _get_ready(self) -> None:
        """How long each operation takes here and now."""
        self._timed("create", "create", "--name", "box")
        self._timed("create", "create", "--name", "other")
        self._timed("exec", "exec", "box", "--", "sh", "-c", "sleep 0.02")
        self._timed("detached", "exec", "-d", "box", "--", "sleep", "1000")
        self._timed("stop", "stop", "box")
        self._timed("start", "start", "box")
        self._timed("rm", "rm", "--force", "other")

    def _timed(self, operation: str, *arguments: str) -> None:
        began = time.monotonic()
        self.person.elsewhere(*arguments, check=True)
        self.usual[operation] = time.monotonic() - began

    def _one_point(self) -> None:
        operation, victim = self.chance.choice(OPERATIONS), self.chance.choice(VICTIMS)
        self.number += 1
        file = f"file-{self.number}"
        arguments = {
            "create": ("create", "--name", f"new-{self.number}"),
            "exec": ("exec", "box", "--", "sh", "-c", f"echo x > {file}; sleep 0.02"),
            "detached": ("exec", "-d", "box", "--", "sh", "-c", "exec sleep 1000"),
            "stop": ("stop", "box"),
            "start": ("start", "box"),
            "rm": ("rm", "--force", "box"),
        }[operation]
        if operation == "start":
            self.person.elsewhere("stop", "box", check=True)
        delay = self.chance.uniform(0, self.usual[operation] * 1.1)
        self.said.append(f"{self.number}: kill the {victim} {delay * 1000:.1f} ms after: elsewhere {' '.join(arguments)}")
        client = start(self.person, *arguments)
        if victim == "front":  # which is there only when the client has found its launcher
            while front_of(self.person, client) is None and client.poll() is None:
                pass
            delay /= 2
        time.sleep(delay)
        hit = self._kill(victim, client)
        self.hits += hit
        out, err = client.communicate(timeout=60)
        self.said[-1] += f" -> {client.returncode}, {'hit' if hit else 'missed'}: {err.strip()[-300:]!r}"
        if operation == "exec" and client.returncode == 0:
            self.wrote.add(file)
        if not hit and victim != "helper":
            assert client.returncode == 0, (self.said[-1], out)
        if operation == "create":
            self._after_create(f"new-{self.number}")
        self._next(removed=operation == "rm")

    def _kill(self, victim: str, client: "subprocess.Popen[str]") -> bool:
        pid: int | None
        if victim == "client":
            if client.poll() is not None:
                return False
            client.kill()
            return True
        if victim == "front":
            pid = front_of(self.person, client)
        elif victim == "keeper":
            pid = self._some_keeper()
        else:
            launcher, others = helpers(self.person)
            pid = launcher if victim == "launcher" else self.chance.choice(sorted(others)) if others else None
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        # It is dead when the kernel comes round to it; until then it can still be given work.
        assert eventually(lambda: not is_alive(pid)), pid
        return True

    def _some_keeper(self) -> int | None:
        """Mostly the box's own; else one that waits in stock, or is just being made."""
        own = [pid for name in os.listdir(self.person.state / "sandboxes") if (pid := keeper_of(self.person, name))]
        own = [pid for pid in own if is_pid_1(pid)]
        stock = [pid for pid, _ in self.person.processes() if is_pid_1(pid) and pid not in own]
        choices = own if own and (not stock or self.chance.random() < 0.7) else stock
        return self.chance.choice(sorted(choices)) if choices else None

    def _after_create(self, name: str) -> None:
        """It is there or not, whole; its name can be had again."""
        names = [box["name"] for box in self.person.json("list")["sandboxes"]]
        assert names.count(name) <= 1, names
        if name in names:
            assert self.person.elsewhere("exec", name, "--", "cat", "README.md").stdout == "# a project\n", self.said[-1]
            self.person.elsewhere("rm", "--force", name, check=True)

    def _next(self, *, removed: bool) -> None:
        """The next operation works, and finds everything that was said to be done."""
        if removed:
            there = [box for box in self.person.json("list")["sandboxes"] if box["name"] == "box"]
            if not there:
                self.person.elsewhere("create", "--name", "box", check=True)
                self.wrote.clear()
        done = self.person.elsewhere("exec", "box", "--", "ls")
        assert done.returncode == 0, (self.said[-1], done.stderr)
        found = {name for name in done.stdout.split() if name.startswith("file-")}
        assert self.wrote <= found, f"lost: {self.wrote - found}"


def test_killed_at_some_moments(person: Person) -> None:
    Killer(person, seed_of()).points(6, look_every=3)


@pytest.mark.slow(100)
@pytest.mark.timeout(400)
def test_killed_at_two_hundred_moments(person: Person) -> None:
    Killer(person, seed_of()).points(100, look_every=2)  # as root and as an ordinary user
