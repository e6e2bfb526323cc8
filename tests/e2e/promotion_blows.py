"""A program of its own, run by whoever owns the projects: changes are promoted and undone, with and without commits and stages, by
processes that are killed at random moments and at every step that has a name; so are those who recover. What must be there then.

    promotion_blows.py SEED {"plain": 20, ...} NAMED       so many blows have to land in each world; run in an empty directory
                                                           NAMED: how many of the named steps of each world are struck besides

Each world has a sandbox with one change. It is moved to reality (`forward`) and taken back (`back`), in turns; a blow falls on
whatever comes next, and whoever comes after must find reality exactly as it was before or as it was to be, and be told which.
`blows.py`, which must lie beside this file, strikes.
"""

import contextlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from blows import Operation, Usual, apart, measured, struck

from elsewhere import Sandbox
from elsewhere.clock import wall
from elsewhere.operations import forgetting, promoting, sandboxes, settings, staging, undoing
from elsewhere.operations.promoting import Asked
from elsewhere.promotion import applying, records, restoring
from elsewhere.promotion.records import Promotion
from elsewhere.storage.state import State

About = tuple[object, ...]
Reality = dict[str, dict[str, About]]  # what stands in each target
Step = Callable[[str], None]
UNITS = ("seconds", "calls", "changes", "steps", "steps")
# Which of their arguments come before the one that is told of steps.
_STEPPING = (
    (applying, "apply", 2),
    (applying, "recover", 1),
    (staging, "walk", 7),
    (restoring, "recover", 1),
    (restoring, "put_back", 2),
)

CHANGE = """set -e
echo sandbox > f; sed -i '2s/.*/sandbox/' both; chmod 755 mode; rm gone; rm -r gone-dir; chmod 700 dir-mode
mkdir -p new/deep; echo 1 > new/deep/1; echo 2 > new/2; chmod 2755 new/deep; ln -s ../f new/link
ln -sfn other link; rm was-file; mkdir was-file; echo in > was-file/in; rm -r was-dir; echo now > was-dir
rm was-link; echo now > was-link; mv moved new/moved; head -c 70000 /dev/zero > zeros; printf '\\0\\377' > binary; chmod 555 binary"""


# -- looking --------------------------------------------------------------------------------------------------------------------


def described(place: str) -> dict[str, About]:
    """What stands where, but git's own."""
    found: dict[str, About] = {}
    for directory, names, files in os.walk(place):
        if directory == place:
            names[:] = [name for name in names if name != ".git"]
        for name in ("", *names, *files):
            path = os.path.normpath(os.path.join(directory, name))
            about = os.lstat(path)
            content: object = None
            if stat.S_ISLNK(about.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(about.st_mode):
                with open(path, "rb") as stream:
                    content = stream.read()
            mode = stat.filemode(about.st_mode)
            found[os.path.relpath(path, place)] = (mode, about.st_uid, about.st_gid, content)
    return found


def git(project: str, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=project, check=True, capture_output=True, text=True).stdout


def repository(project: str) -> dict[str, About]:
    """HEAD, index and branches; those that were fetched stay, and nothing that locks it is left."""
    left = [name for name in os.listdir(f"{project}/.git") if name.endswith((".lock", ".elsewhere"))]
    assert not left, left
    refs = git(project, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    return {
        "HEAD": (git(project, "rev-parse", "HEAD", "--abbrev-ref", "HEAD"),),
        "index": (git(project, "ls-files", "--stage"),),
        "refs": tuple(ref for ref in refs if not ref.startswith("refs/heads/elsewhere/")),
    }


def different(found: Reality, wanted: Reality) -> dict[str, object]:
    """Of each path that is not as it should be, what there is and what should be there."""
    return {
        f"{target}: {path}": (str(found[target].get(path))[:80], str(wanted[target].get(path))[:80])
        for target in wanted
        for path in sorted({*found[target], *wanted[target]})
        if found[target].get(path) != wanted[target].get(path)
    }


# -- steps ----------------------------------------------------------------------------------------------------------------------


def told(tell: Step) -> None:
    """From now on, whoever applies, recovers or walks in this process tells of each step."""

    def telling(original: Callable[..., Any], count: int) -> Callable[..., Any]:
        return lambda *arguments, **_: original(*arguments[:count], tell)

    for module, name, count in _STEPPING:
        setattr(module, name, telling(getattr(module, name), count))


def walked(operation: Operation) -> list[str]:
    """The steps of an operation that nobody disturbs."""

    def work() -> list[str]:
        steps: list[str] = []
        told(steps.append)
        operation()()
        return steps

    found: list[str] = apart(work)
    return found


def until(operation: Operation, name: str | None, count: int) -> Operation:
    """The same, struck by itself before step number `count` of those with this name, or of all."""

    def ready() -> Callable[[], object]:
        perform, left = operation(), count

        def tell(step: str) -> None:
            nonlocal left
            left -= name is None or step == name
            if left < 0:
                signal.raise_signal(signal.SIGKILL)

        def work() -> object:
            told(tell)
            return perform()

        return work

    return ready


def hit(operation: Operation, unit: str, count: float, name: str | None = None) -> bool:
    if unit == "steps":
        return struck(until(operation, name, int(count)), "calls", sys.maxsize)
    return struck(operation, unit, count if unit == "seconds" else int(count))


def recovery() -> Callable[[], object]:
    return undoing.promotions


# -- worlds ---------------------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A project, a sandbox with a change, and how that is moved. `targets` are what it changes, besides the project."""

    name: str
    more: dict[str, Any] = field(default_factory=dict)
    stages: str = ""
    line: str = CHANGE
    usual: dict[str, Usual] = field(default_factory=dict)
    steps: dict[str, list[str]] = field(default_factory=dict)
    reach: dict[tuple[str, str], float] = field(default_factory=dict)
    ends: dict[str, Reality] = field(default_factory=dict)  # what there is before, and after

    def make(self) -> None:
        self.place = os.path.join(os.getcwd(), self.name)
        self.project = os.path.join(self.place, "project")
        self.targets = [self.project]
        os.makedirs(self.project)
        os.chdir(self.project)
        git(self.project, "init", "-q", "-b", "main", ".")
        for name in ("f", "mode", "gone", "was-file", "moved", "stays"):
            write(name, f"{name}\n")
        write("both", "".join(f"line {number}\n" for number in range(12)))
        for name in ("gone-dir", "was-dir", "dir-mode"):
            os.mkdir(name)
            write(f"{name}/1", "1\n")
            write(f"{name}/2", "2\n")
        os.symlink("f", "link")
        os.symlink("nowhere", "was-link")
        if self.stages:
            self._with_stages()
        for words in ("config user.name T", "config user.email t@example.org", "add -A", "commit -qm first"):
            git(self.project, *words.split())
        if self.stages:
            git(self.project, "branch", "staging")
            apart(lambda: settings.trust(self.project))
        self.box = str(apart(self._filled))
        # Reality moves on, so that one file has to be merged.
        with open("both") as stream:
            lines = stream.read().replace("line 10", "reality")
        write("both", lines)
        self.ends["before"] = self.reality()
        for way in ("forward", "back") * 2:
            self.steps[way] = walked(getattr(self, way)())
            self._compare("after" if way == "forward" else "before")
        for way in ("forward", "back"):
            self.usual[way] = measured(getattr(self, way)())
            self._compare("after" if way == "forward" else "before")

    def _with_stages(self) -> None:
        self.targets.append(os.path.join(self.place, "production"))
        os.mkdir(self.targets[-1])
        write("../production/current", "old\n")
        write("deploy.sh", DEPLOY)
        write("rollback.sh", ROLLBACK)
        write("elsewhere.toml", self.stages)

    def _filled(self) -> str:
        with Sandbox.create(self.project, base="pinned", on_exit="keep") as box:
            box.run(self.line).check()
        sandboxes.stop(box.id)
        return box.id

    def _compare(self, end: str) -> None:
        found = self.reality()
        wanted = self.ends.setdefault(end, found)
        assert found == wanted, (self.name, end, different(found, wanted))

    def reality(self) -> Reality:
        found = {place: described(place) for place in self.targets}
        for paths in found.values():
            left = [path for path in paths if "/.elsewhere-" in f"/{path}"]
            assert not left, left
        found["git"] = repository(self.project)
        if self.stages:
            found["staging"] = {"tree": (git(self.project, "ls-tree", "-r", "staging"),)}
            del found["git"]["refs"]  # of a branch that was moved, taken back and moved again, the commit is another
        return found

    def forward(self) -> Operation:
        asked = Asked(agree=lambda _: True, **self.more)
        return lambda: lambda: promoting.promote(self.box, asked)

    def back(self) -> Operation:
        wanted = self.last()

        def ready() -> Callable[[], object]:
            os.chdir(self.project)
            return lambda: undoing.undo(wanted)

        return ready

    def mine(self) -> list[Promotion]:
        return [one for one in records.listed(State.open()) if one.project == self.project]

    def last(self) -> str:
        """Of what was promoted."""
        return [one for one in self.mine() if one.kind == "promote"][-1].id


def write(path: str, text: str) -> None:
    with open(path, "w") as stream:
        stream.write(text)
    if path.endswith(".sh"):
        os.chmod(path, 0o755)


DEPLOY = """#!/bin/sh
set -e
cp ../production/current ../production/.previous
mv ../production/.previous ../production/previous
cat "$ELSEWHERE_CHANGE/tree/f" > ../production/current
"""
ROLLBACK = """#!/bin/sh
rm -f ../production/.previous
test ! -e ../production/previous || mv ../production/previous ../production/current
"""
STAGE = '[[stages]]\nname = "{}"\n{}\n'
DIRECTORY = STAGE.format("dev", 'target = "."')
BRANCH = STAGE.format("staging", 'target = {branch = "staging"}')
DEPLOYED = STAGE.format("production", 'deploy = "./deploy.sh"\nrollback = "./rollback.sh"')
CHECKED = STAGE.format("dev", 'target = "."\nchecks = ["test -d was-file"]')
COMMITTED = CHANGE + "\ngit add -A; git commit -qm inside; echo more > f"
WORLDS = {
    "plain": lambda: World("plain", {"commits": False}),
    "commits": lambda: World("commits", {"checkout": True}, line=COMMITTED),
    "stages": lambda: World("stages", {"commits": False, "to": "production"}, stages=DIRECTORY + BRANCH + DEPLOYED),
    "checks": lambda: World("checks", {"commits": False}, stages=CHECKED),
}


# -- the blows ------------------------------------------------------------------------------------------------------------------


@dataclass
class Blows:
    seed: int
    wanted: dict[str, int]
    named: int
    hits: dict[str, int] = field(default_factory=dict)
    came: dict[str, int] = field(default_factory=dict)
    steps: set[str] = field(default_factory=set)  # at which somebody was struck
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def run(self) -> None:
        top = os.getcwd()
        try:
            for name, count in self.wanted.items():
                os.chdir(top)
                world = WORLDS[name]()
                world.make()
                self._strike(world, count)
        except BaseException:
            print(f"\nELSEWHERE_TEST_SEED={self.seed}; the last points:", *self.said[-8:], sep="\n  ", file=sys.stderr)
            raise
        print(json.dumps({"hits": self.hits, "of those done": self.came, "steps": sorted(self.steps)}))

    def _strike(self, world: World, count: int) -> None:
        for way, name in self._names(world):
            number = self.chance.randrange(world.steps[way].count(name))
            self._point(world, way, ("steps", number, name), None)
        for name in self._reversals(world):
            # Nothing of it is undone until somebody recovers, who is struck in turn.
            self._point(world, "forward", ("steps", 0, "commit"), ("steps", 0, name))
            self._ended(world, "back")
        way, tries = "forward", 0
        while self.hits.get(world.name, 0) < count:
            tries += 1
            assert tries <= 4 * count, f"the blows do not land: {self.hits}"
            self._point(world, way, self._somewhere(world, way), self._twice())
            way = "back" if way == "forward" else "forward"
            if way == "forward" and tries % 20 == 0:
                apart(lambda: forgetting.forget(State.open(), clock=lambda: wall() + 1e9))  # what is undone, and would be read
        if way == "back":
            self._ended(world, way)

    def _names(self, world: World) -> Iterator[tuple[str, str]]:
        """Steps forward and back in turns, each name once."""
        ways = {way: list(dict.fromkeys(world.steps[way])) for way in ("forward", "back")}
        for one in ways.values():
            self.chance.shuffle(one)
        most = min(self.named, max(map(len, ways.values())))
        for number in range(most):
            for way, names in ways.items():
                yield way, names[number % len(names)]

    def _reversals(self, world: World) -> list[str]:
        names = ["reverse", "return", "clear", "end"] if world.name == "plain" else ["reversing"] if world.stages else []
        return self.chance.sample(names, min(self.named, len(names)))

    def _somewhere(self, world: World, way: str) -> tuple[str, float, str | None]:
        unit = self.chance.choice(UNITS)
        most = len(world.steps[way]) if unit == "steps" else getattr(world.usual[way], unit)
        return unit, self.chance.uniform(0, most * world.reach.get((way, unit), 1.0)), None

    def _twice(self) -> tuple[str, float, str | None] | None:
        """Whether, and where, who recovers is struck as well; if there is little to do, that comes too late."""
        if self.chance.random() < 0.6:
            return None
        unit = self.chance.choice(("calls", "changes", "steps"))
        return unit, self.chance.uniform(0, {"calls": 200, "changes": 40, "steps": 30}[unit]), None

    def _point(
        self, world: World, way: str, where: tuple[str, float, str | None], again: tuple[str, float, str | None] | None
    ) -> None:
        unit, count, name = where
        self.said.append(f"{world.name} {way}, killed after {count:.4f} {name or ''} {unit}:")
        known = {one.id for one in world.mine()}
        landed = hit(getattr(world, way)(), unit, count, name)
        self.said[-1] += " hit" if landed else " missed"
        if name is not None:
            assert landed, self.said[-1]
            self.steps.add(name)
        self.hits[world.name] = self.hits.get(world.name, 0) + (landed and name is None)
        if again is not None:
            second = hit(recovery, *again)
            self.said[-1] += (
                f", and who recovered after {again[1]:.0f} {again[2] or ''} {again[0]}: {'hit' if second else 'missed'}"
            )
            if again[2] is not None:
                assert second, self.said[-1]
                self.steps.add(again[2])
        done = self._became(world, way, known, wholly=not landed)
        self.said[-1] += ", done" if done else ", not done"
        self.came[world.name] = self.came.get(world.name, 0) + (done and landed)
        if name is None:
            # What it takes changes with what there is: the blows are to fall over all of it, and not too many of them too late.
            change = 0.85 if not landed else 1.0 if done else 1.1
            world.reach[way, unit] = min(2.0, world.reach.get((way, unit), 1.0) * change)
        if not done:
            self._ended(world, way)

    def _ended(self, world: World, way: str) -> None:
        """Nobody disturbs it."""
        apart(getattr(world, way)()())
        found, wanted = world.reality(), world.ends["after" if way == "forward" else "before"]
        assert found == wanted, (different(found, wanted), self.said[-1])

    # -- before or after, and nothing between ---

    def _became(self, world: World, way: str, known: set[str], *, wholly: bool) -> bool:
        """Whether it is done; nothing of it is if not."""
        if self.chance.random() < 0.05:
            words = [sys.executable, "-m", "elsewhere", "promotions", "--json"]
            json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
        else:
            apart(recovery())
        # A child that was just being started when its parent was killed has the lock until it is another program.
        unfinished = os.path.join(State.open().room("journal"), "unfinished")
        deadline = time.monotonic() + 10
        while (left := os.listdir(unfinished)) and time.monotonic() < deadline:
            time.sleep(0.05)
            apart(recovery())
        assert not left, (left, self.said[-1])
        found, before, after = world.reality(), world.ends["before"], world.ends["after"]
        if way == "back":
            before, after = after, before
        done = found == after
        every = world.mine()
        new = [one for one in every if one.id not in known]
        assert len(new) <= 1, self.said[-1]
        assert all(one.status in records.ENDS for one in every), self.said[-1]
        if world.stages and way == "forward" and not done:
            done = self._passed(world, every[-1] if new else None, found)
        assert done or found == before or world.stages, (different(found, before), different(found, after), self.said[-1])
        assert done or not wholly, self.said[-1]
        if way == "forward":
            self._says(new[-1] if new else None, "applied" if done else "reversed", needed=done)
        else:
            original = next(one for one in every if one.id == world.last())
            assert (original.status == "undone") == done, (original.status, done, self.said[-1])
            self._says(new[-1] if new else None, "applied" if done else "reversed", needed=done)
        return done

    def _says(self, promotion: Promotion | None, status: str, *, needed: bool) -> None:
        assert promotion is not None or not needed, self.said[-1]
        assert promotion is None or promotion.status == status, (promotion.status, promotion.note, status, self.said[-1])

    def _passed(self, world: World, promotion: Promotion | None, found: Reality) -> bool:
        """Of several stages those that have passed are as they were to be, the others as they were."""
        entries = promotion.stages if promotion is not None else []
        targets = {"dev": world.project, "staging": "staging", "production": world.targets[1]}
        for stage, target in targets.items():
            passed = any(one["name"] == stage and one["status"] == "passed" for one in entries)
            wanted = world.ends["after" if passed else "before"]
            assert found[target] == wanted[target], (
                stage,
                entries,
                different({target: found[target]}, {target: wanted[target]}),
                self.said[-1],
            )
        return False


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        Blows(int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])).run()
