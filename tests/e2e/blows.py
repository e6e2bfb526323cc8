"""A program of its own, run by whoever owns the sandboxes: one sandbox that is saved, rolled back, forked, merged and moved to a new
base, by processes that are killed at random moments, and what must be there afterwards.

    blows.py SEED {"refresh": 5, ...}       so many blows have to land on each operation; run in the project

Nothing here uses elsewhere in its own process: each use is a child's, so the one that is killed leaves nothing behind in another.
A blow comes after a random time, or before a random one of the calls by which the victim asks something of the system, or of those
by which it changes a file system: what a time seldom hits.
"""

import contextlib
import json
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from elsewhere import Sandbox
from elsewhere.operations import housekeeping, refreshing, sandboxes, snapshots
from elsewhere.sandbox.records import record
from elsewhere.storage.layers import Layers
from elsewhere.storage.state import State

Files = dict[str, str]
Operation = Callable[[], Callable[[], object]]  # gets ready, and returns what is to be killed
Contents = dict[str, tuple[str | None, str | None]]  # before and after
_ASKED = ("open", "os.", "fcntl.", "socket.", "sqlite3.")
_CHANGED = "chmod chown link mkdir remove rename rmdir setxattr symlink utime".split()
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_LINES = 12
_KEPT = 8  # snapshots, besides those that are never removed
_SHOW = "grep -rH --exclude-dir=.git '' .; sed 's/^/outside:/' $HOME/outside 2>/dev/null; true"


# -- children ---


def apart(work: Callable[[], Any]) -> Any:
    """What a child found out."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer: tuple[bool, Any] = (False, "")
        try:
            answer = (True, work())
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            with open(writer, "wb") as stream:
                stream.write(pickle.dumps(answer))
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        well, found = pickle.loads(stream.read() or pickle.dumps((False, "it said nothing")))
    os.waitpid(child, 0)
    assert well, found
    return found


@dataclass
class Usual:
    """How long an operation takes, how much it asks, and how often it changes anything."""

    seconds: float
    calls: int
    changes: int


def asked(tell: Callable[[bool], None]) -> None:
    """Before each call, `tell` is told whether it changes anything."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            tell(bool(arguments[2] & _WRITES))
        elif event.startswith(_ASKED):
            tell(event[3:] in _CHANGED)

    sys.addaudithook(hook)


def measured(operation: Operation) -> Usual:
    def work() -> Usual:
        calls = changes = 0

        def tell(is_change: bool) -> None:
            nonlocal calls, changes
            calls, changes = calls + 1, changes + is_change

        perform = operation()
        asked(tell)
        began = time.monotonic()
        perform()
        return Usual(time.monotonic() - began, calls, changes)

    found: Usual = apart(work)
    return found


def struck(operation: Operation, unit: str, count: float) -> bool:
    """Whether the blow landed: so many seconds after it began, or after so many calls or changes; otherwise it was over before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        left = count
        try:

            def tell(is_change: bool) -> None:
                nonlocal left
                left -= is_change or unit == "calls"
                if left < 0:
                    signal.raise_signal(signal.SIGKILL)

            perform = operation()
            if unit != "seconds":
                asked(tell)
            os.write(writer, b"x")
            perform()
            left = sys.maxsize
            os._exit(0)
        except BaseException:
            left = sys.maxsize
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    os.read(reader, 1)
    if unit == "seconds":
        time.sleep(count)
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"it ended by itself, with {code}"
    return code != 0


# -- what is done ---


def snapshot(box: str, name: str, *, sdk: bool) -> Operation:
    def ready() -> Callable[[], object]:
        entered = Sandbox.get(box) if sdk else None
        return lambda: entered.snapshot(name) if entered else snapshots.snapshot(box, name)

    return ready


def rollback(box: str, name: str, *, sdk: bool) -> Operation:
    def ready() -> Callable[[], object]:
        entered = Sandbox.get(box) if sdk else None
        return lambda: entered.rollback(name) if entered else snapshots.rollback(box, name)

    return ready


def fork(box: str, name: str, *, sdk: bool) -> Operation:
    def ready() -> Callable[[], object]:
        entered = Sandbox.get(box) if sdk else None
        return lambda: entered.fork(name=name, on_exit="keep") if entered else snapshots.fork(box, name=name)

    return ready


def refresh(box: str) -> Operation:
    return lambda: lambda: refreshing.refresh(box)


def merge(layer: str) -> Operation:
    return lambda: lambda: Layers(State.open()).merge(layer)


# -- what is there ---


def parsed(text: str) -> Files:
    found: Files = {}
    for line in text.splitlines():
        path, _, content = line.partition(":")
        found[path.removeprefix("./")] = found.get(path.removeprefix("./"), "") + content + "\n"
    return found


def reality() -> Files:
    """The project as it is."""
    found = {}
    for directory, names, files in os.walk("."):
        names[:] = [name for name in names if name != ".git"]
        for name in files:
            path = os.path.normpath(os.path.join(directory, name))
            if not os.path.islink(path):
                with open(path) as stream:
                    found[path] = stream.read()
    return found


@dataclass(frozen=True)
class Moment:
    """What a sandbox shows: what it did (None: deleted; `line`: in a file that reality changes as well), over which base."""

    ours: tuple[tuple[str, str | None], ...]
    base: int

    def shows(self, bases: list[Files]) -> Files:
        found = dict(bases[self.base])
        for path, content in self.ours:
            if path == "line":
                found["both"] = with_line(found["both"], 2, content or "")
            elif content is None:
                found.pop(path, None)
            else:
                found[path] = content
        return found

    def changes(self, bases: list[Files]) -> Contents:
        shown, base = self.shows(bases), bases[self.base]
        found = {path: (base.get(path), shown.get(path)) for path in {*shown, *base} - {"outside"}}
        return {path: (before, after) for path, (before, after) in found.items() if before != after}

    def worked(self, number: int) -> "Moment":
        """After `line_of`."""
        new = dict(self.ours)
        new |= {"f": f"{number}\n", "line": f"ours {number}", "outside": f"{number}\n"}
        new |= {f"w/{number % 4}": f"{number}\n", f"c/{number % 3}": None if number % 2 else f"{number}\n"}
        new.pop(f"w/{(number + 1) % 4}", None)
        if number % 3 == 0:
            for path in [path for path in new if path.startswith("d/")]:
                del new[path]
            new[f"d/{number % 5}"] = f"{number}\n"
        return Moment(tuple(sorted(new.items())), self.base)


def line_of(number: int) -> str:
    """Work that writes, makes, deletes, and puts a directory in the place of another."""
    constant = f"rm -f c/{number % 3}" if number % 2 else f"echo {number} > c/{number % 3}"
    again = f"rm -rf d; mkdir d; echo {number} > d/{number % 5};" if number % 3 == 0 else ""
    return (
        f"set -e; echo {number} > f; sed -i '2s/.*/ours {number}/' both; echo {number} > $HOME/outside; mkdir -p w;"
        f"echo {number} > w/{number % 4}; rm -f w/{(number + 1) % 4}; {again} {constant}"
    )


def with_line(text: str, number: int, line: str) -> str:
    lines = text.splitlines()
    lines[number - 1] = line
    return "".join(f"{one}\n" for one in lines)


@dataclass
class Seen:
    """`others`: sandboxes besides this one; `forked`: what forks of some of its snapshots show."""

    shows: Files
    changed: Contents
    snapshots: list[str]
    base: list[str]
    others: list[str | None]
    forked: dict[str, Files]


def look(box: str, names: list[str], first: bool) -> Seen:
    """`first`: what it changed is looked at before anything is done that could mend it."""
    changed = changes(box) if first else {}
    with Sandbox.get(box) as entered:
        shows = parsed(entered.run(_SHOW).check().stdout)
        forked = {}
        for name in names:
            with entered.fork(source=name)[0] as child:
                forked[name] = parsed(child.run(_SHOW).check().stdout)
    found = record.load(State.open(), box)
    listing = sandboxes.list_sandboxes()
    assert not listing.broken, listing.broken
    assert housekeeping.df().total > 0
    assert not housekeeping.janitor(dry_run=True).skipped
    return Seen(
        shows,
        changed if first else changes(box),
        [one["name"] for one in found.snapshots],
        list(found.base["layers"]),
        [one.name for one in listing.records if one.id != box],
        forked,
    )


def changes(box: str) -> Contents:
    """Of the files of the project."""
    project = os.getcwd() + "/"
    found: Contents = {}
    for one in sandboxes.changes(box)[1].entries:
        if one.path.startswith(project) and not one.path.endswith("/"):
            before, after = (side.open().read().decode() if side else None for side in (one.before, one.after))
            found[one.path.removeprefix(project)] = before, after
    return found


# -- the blows ---


@dataclass
class Blows:
    seed: int
    wanted: dict[str, int]
    now: Moment = Moment((), 0)
    bases: list[Files] = field(default_factory=list)
    layers: dict[int, list[str]] = field(default_factory=dict)  # of each base that the sandbox had
    saved: dict[str, Moment] = field(default_factory=dict)
    usual: dict[str, Usual] = field(default_factory=dict)
    reach: dict[tuple[str, str], float] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    came: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def run(self) -> None:
        try:
            self._get_ready()
            tries = 0
            while left := [name for name in self.wanted if self.hits.get(name, 0) < self.wanted[name]]:
                tries += 1
                assert tries <= 4 * sum(self.wanted.values()), f"the blows do not land: {self.hits}"
                self._point(self.chance.choice(left))
                self._forget_some()
            self._agrees(list(self.saved))
            self._end()
        except BaseException:
            print(f"\nELSEWHERE_TEST_SEED={self.seed}; the last points:", *self.said[-12:], sep="\n  ", file=sys.stderr)
            raise
        print(json.dumps({"box": self.box, "hits": self.hits, "of those too late": self.came, "tries": tries}))

    # -- before ---

    def _get_ready(self) -> None:
        """A run of layers that is to be merged, and what each operation usually takes."""
        os.mkdir("c")
        os.mkdir("real")
        for number in range(3):
            self._write(f"c/{number}", "constant\n")
        self._write("both", "".join(f"line {number}\n" for number in range(_LINES)))
        self._move_on()
        self.box = str(apart(lambda: Sandbox.create(".", base="pinned", name="box", on_exit="keep").id))
        self._agrees([])
        for number in range(10):
            self._work()
            self.usual["snapshot"] = measured(snapshot(self.box, f"first-{number}", sdk=False))
            self.saved[f"first-{number}"] = self.now
        for name in ("first-3", "first-9"):
            self.usual["rollback"] = measured(rollback(self.box, name, sdk=False))
        self.usual["fork"] = measured(fork(self.box, "child", sdk=False))
        apart(lambda: sandboxes.discard("child"))
        self._move_on()
        self.usual["refresh"] = measured(refresh(self.box))
        self.saved["before-refresh-1"], self.now = self.now, Moment(self.now.ours, len(self.bases) - 1)
        self.usual["merge"] = measured(merge(self._unmerged()))
        self._agrees(list(self.saved))

    def _write(self, path: str, text: str) -> None:
        with open(path, "w") as stream:
            stream.write(text)

    def _move_on(self) -> None:
        """Reality does: what a refresh finds."""
        number = len(self.bases)
        with open("both") as stream:
            text = stream.read()
        self._write("both", with_line(text, _LINES - 1, f"theirs {number}"))
        self._write(f"real/{number % 4}", f"{number}\n")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"real/{(number + 1) % 4}")
        self.bases.append(reality())

    def _work(self) -> None:
        self.number += 1
        line = line_of(self.number)

        def work() -> None:
            with Sandbox.get(self.box) as box:
                box.run(line).check()

        apart(work)
        self.now = self.now.worked(self.number)

    def _unmerged(self) -> str:
        """A layer that ends a run which is to be merged: one was, and this is taken back."""

        luck = self.chance.random()

        def choose() -> str:
            sandboxes.stop(self.box)
            state = State.open()
            found, layers = record.load(state, self.box), Layers(state)
            tips = {found.tip, *(one["layer"] for one in found.snapshots)}
            ends = {
                layer.id
                for tip in tips
                for layer in layers.ancestors(tip)
                if layer.depth % 10 == 0 and self._is_whole(layers, layer.id)
            }
            chosen = sorted(ends)[int(luck * len(ends))]
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(layers.place(chosen), "merged.json"))
            return chosen

        return str(apart(choose))

    def _is_whole(self, layers: Layers, layer_id: str) -> bool:
        run = layers.ancestors(layer_id)[:10]
        return len(run) == 10 and all(os.path.isdir(os.path.join(layers.place(one.id), "upper")) for one in run)

    # -- one blow ---

    def _point(self, verb: str) -> None:
        chance, name = self.chance, f"s{len(self.said)}"
        if chance.random() < 0.7:
            self._work()
        sdk, busy = chance.random() < 0.5, verb in ("snapshot", "fork") and chance.random() < 0.2
        target = chance.choice(["base", *self.saved]) if verb == "rollback" else name
        if verb == "refresh":
            self._move_on()
        operation = {
            "snapshot": lambda: snapshot(self.box, name, sdk=sdk),
            "rollback": lambda: rollback(self.box, target, sdk=sdk),
            "fork": lambda: fork(self.box, name, sdk=sdk),
            "refresh": lambda: refresh(self.box),
            "merge": lambda: merge(self._unmerged()),
        }[verb]()
        usual = self.usual[verb]
        unit = chance.choice(("seconds", "calls", "changes"))
        count = chance.uniform(0, getattr(usual, unit) * self.reach.get((verb, unit), 1.0))
        self.said.append(f"{verb} {target}{' by the SDK' * sdk}{' (busy)' * busy}, killed after {count:.4f} {unit}:")
        with self._busy() if busy else contextlib.nullcontext():
            hit = struck(operation, unit, count if unit == "seconds" else int(count))
            self.said[-1] += " hit" if hit else " missed"
            self.hits[verb] = self.hits.get(verb, 0) + hit
            came = self._became(verb, name, target, done=not hit)
        # What it takes changes with what there is: the blows are to fall over all of it, and not too many of them too late.
        change = 0.8 if not hit else 1.0 if came else 1.15
        self.reach[verb, unit] = self.reach.get((verb, unit), 1.0) * change

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        def begin() -> None:
            with Sandbox.get(self.box) as box:
                box.start("exec sleep 1000", detached=True)

        apart(begin)
        yield
        apart(lambda: sandboxes.stop(self.box))

    # -- before or after, and nothing between ---

    def _became(self, verb: str, name: str, target: str, *, done: bool) -> bool:
        """Whether anything came of it."""
        sample = self.chance.sample(sorted(self.saved), min(len(self.saved), 1 if len(self.said) % 10 else 1000))
        found = self._seen(sample)
        new = set(found.snapshots) - set(self.saved)
        assert set(self.saved) <= set(found.snapshots), (found.snapshots, self.said[-1])
        after = {
            "rollback": Moment((), self.now.base) if target == "base" else self.saved.get(target, self.now),
            "refresh": Moment(self.now.ours, len(self.bases) - 1),
        }.get(verb, self.now)
        before = self.now
        if not done and found.shows == before.shows(self.bases):
            after = before
        self._is_now(found, after, before)
        prefix = {"rollback": "before-rollback-", "refresh": "before-refresh-"}.get(verb, name)
        assert len(new) <= (verb not in ("fork", "merge")), (new, self.said[-1])
        assert all(one.startswith(prefix) for one in new), (new, self.said[-1])
        if done and verb == "snapshot":
            assert new == {name}, (new, self.said[-1])
        self.saved.update(dict.fromkeys(new, before))
        if after != before:
            assert before in self.saved.values(), f"what it had is nowhere: {self.said[-1]}"
        self.now = after
        if new:
            self._agrees(sorted(new))
        if verb == "fork":
            self._forked(name, found.others, done=done)
        else:
            assert not found.others, (found.others, self.said[-1])
        came = done or bool(new) or after != before or name in found.others
        self.said[-1] += ", done" if came else ", not done"
        self.came[verb] = self.came.get(verb, 0) + (came and not done)
        return came

    def _seen(self, names: list[str]) -> Seen:
        first = self.chance.random() < 0.5
        found: Seen = apart(lambda: look(self.box, names, first))
        for name in names:
            wanted = self.saved[name].shows(self.bases)
            assert found.forked[name] == wanted, (name, different(found.forked[name], wanted), self.said[-1:])
        return found

    def _is_now(self, found: Seen, wanted: Moment, before: Moment) -> None:
        """Whoever only looked at what it changed, before it was mended, may have seen what was before."""
        said = self.said[-1:]
        assert found.shows == wanted.shows(self.bases), (different(found.shows, wanted.shows(self.bases)), said)
        assert self.layers.setdefault(wanted.base, found.base) == found.base, (self.layers, found.base, said)
        wholly = [one.changes(self.bases) for one in (wanted, before)]
        assert found.changed in wholly, (found.changed, wholly, said)

    def _agrees(self, names: list[str]) -> None:
        found = self._seen(names)
        self._is_now(found, self.now, self.now)
        assert set(found.snapshots) == set(self.saved), (found.snapshots, self.said[-1:])

    def _forked(self, name: str, others: list[str | None], *, done: bool) -> None:
        """It is there or not, and whole; its name can be had."""
        assert others == [name] or (not done and not others), (others, self.said[-1])
        wanted = self.now.shows(self.bases)

        def check() -> Files:
            with Sandbox.get(name) if others else Sandbox.get(self.box).fork(name=name)[0] as child:
                return parsed(child.run(_SHOW).check().stdout)

        found = apart(check)
        assert found == wanted, (different(found, wanted), self.said[-1])
        if others:
            apart(lambda: sandboxes.discard(name))

    def _forget_some(self) -> None:
        names = [name for name in self.saved if not name.startswith("first-")]
        if len(names) > _KEPT:
            gone = self.chance.sample(names, 3)

            def remove() -> None:
                for name in gone:
                    snapshots.remove(self.box, name)

            apart(remove)
            for name in gone:
                del self.saved[name]

    def _end(self) -> None:
        """After a rollback and a refresh that nobody disturbs, nothing of those that were is left in the sandbox's directory."""
        measured(rollback(self.box, "first-0", sdk=False))
        self._move_on()
        measured(refresh(self.box))
        found: record.Record = apart(lambda: record.load(State.open(), self.box))
        needed = {base.get("remembered") for base in (found.base, *(one.get("base", found.base) for one in found.snapshots))}
        left = {name for name in os.listdir(State.open().sandbox(self.box)) if name.startswith(("base-", "upper."))}
        assert left <= needed, left - needed


def different(found: Files, wanted: Files) -> dict[str, tuple[str | None, str | None]]:
    """Of each path that is not as it should be, what there is and what should be there."""
    paths = sorted({*found, *wanted})
    return {path: (found.get(path), wanted.get(path)) for path in paths if found.get(path) != wanted.get(path)}


if __name__ == "__main__":
    Blows(int(sys.argv[1]), json.loads(sys.argv[2])).run()
