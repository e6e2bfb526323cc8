"""Random work in a sandbox and, at the same time, in reality, promoted and undone again and again, against a plain model: a dictionary
of what stands at each path. Either there is a conflict, and reality is exactly as it was, or reality is exactly what the model makes
of base, sandbox and reality, path by path.

A failure prints the seed; with ELSEWHERE_TEST_SEED set to it, the same comes again (see `chance.py`).
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from chance import seed_of
from conftest import Person

# `do DIR SEED COUNT` works at random; `describe DIR` prints everything that a promotion may change. Run by whoever owns the trees,
# inside and outside. Texts have lines that change one by one, so that some can be merged, and some cannot.
WORK = r"""
import contextlib, json, os, random, stat, sys
NAMES = ['a', 'b', 'c', 'd', 'two words', 'gr\u00fcn']
def text(chance):
    return ''.join(f'line {number}\n' for number in range(9))
def write(path, content):
    with open(path, 'w') as stream: stream.write(content)
def tree():
    folders, files = [], []
    for directory, inner, names in os.walk('.'):
        for name in inner + names:
            path = os.path.normpath(os.path.join(directory, name))
            (folders if stat.S_ISDIR(os.lstat(path).st_mode) else files).append(path)
    return sorted(folders), sorted(files)
def remove(path):
    if os.path.islink(path) or not os.path.isdir(path): return os.unlink(path)
    for name in os.listdir(path): remove(os.path.join(path, name))
    os.rmdir(path)
def step(chance):
    folders, files = tree()
    new = os.path.normpath(os.path.join(chance.choice(['.', *folders]), chance.choice(NAMES)))
    if len(files) < 4 or chance.random() < 0.2:
        return None if os.path.lexists(new) else chance.choice([os.mkdir, lambda path: write(path, text(chance))])(new)
    file, either = chance.choice(files), chance.choice(files + folders)
    call = chance.choice('line line line line append whole binary chmod chmod delete link become rename dirmode'.split())
    is_file = not os.path.islink(file)
    if call == 'line' and is_file:
        with open(file, 'rb') as stream: lines = stream.read().split(b'\n')
        lines[chance.randrange(len(lines))] = b'%d' % chance.randrange(3)
        with open(file, 'wb') as stream: stream.write(b'\n'.join(lines))
    elif call == 'append' and is_file:
        with open(file, 'a') as stream: stream.write('end\n')
    elif call == 'whole' and is_file: write(file, f'{chance.randrange(3)}\n')
    elif call == 'binary' and is_file:
        with open(file, 'wb') as stream: stream.write(b'\0%d' % chance.randrange(3))
    elif call == 'chmod' and is_file: os.chmod(file, chance.choice([0o644, 0o600, 0o755]))
    elif call == 'delete': remove(either)
    elif call == 'link' and not os.path.lexists(new): os.symlink(chance.choice(NAMES), new)
    elif call == 'become':
        is_folder = either in folders
        remove(either)
        if is_folder: write(either, 'was a directory\n')
        else:
            os.mkdir(either)
            write(os.path.join(either, chance.choice(NAMES)), 'was a file\n')
    elif call == 'rename' and not os.path.lexists(new) and not new.startswith(either + '/'):
        with contextlib.suppress(OSError): os.rename(either, new)  # an ordinary user's overlay renames no directory from below
    elif call == 'dirmode' and folders: os.chmod(chance.choice(folders), chance.choice([0o755, 0o700, 0o750]))
def describe():
    found = {}
    for path in sum(tree(), []):
        about = os.lstat(path)
        if stat.S_ISLNK(about.st_mode): found[path] = ['link', os.readlink(path)]
        elif stat.S_ISDIR(about.st_mode): found[path] = ['directory', stat.S_IMODE(about.st_mode)]
        else:
            with open(path, 'rb') as stream: found[path] = ['file', stat.S_IMODE(about.st_mode), stream.read().decode('latin-1')]
    return found
os.umask(0o022)
os.chdir(sys.argv[2])
if sys.argv[1] == 'do':
    chance = random.Random(sys.argv[3])
    for _ in range(int(sys.argv[4])): step(chance)
print(json.dumps(describe()))
"""

Stands = tuple[Any, ...]
Tree = dict[str, Stands]
CONFLICT: Stands = ("conflict",)


def merged(base: Stands | None, ours: Stands | None, theirs: Stands | None) -> Stands | None:
    """Of one path. Texts whose lines both sides changed are for those who merge texts: None of our business, see `is_right`."""
    if ours in (theirs, base):
        return theirs
    if theirs == base:
        return ours
    if base is None or ours is None or theirs is None or len({base[0], ours[0], theirs[0]}) > 1 or ours[0] == "link":
        return CONFLICT
    mode = ours[1] if theirs[1] in (ours[1], base[1]) else theirs[1] if ours[1] == base[1] else None
    if mode is None:
        return CONFLICT
    if ours[0] == "directory":
        return ("directory", mode)
    if ours[2] in (theirs[2], base[2]):
        return ("file", mode, theirs[2])
    if theirs[2] == base[2]:
        return ("file", mode, ours[2])
    if "\0" in base[2] + ours[2] + theirs[2]:
        return CONFLICT
    return ("text", mode)


def is_right(stands: Stands | None, wanted: Stands | None, three: tuple[Stands | None, ...]) -> bool:
    """A merged text has each line that one of both sides made, and none that neither has."""
    if wanted is None or wanted[0] != "text":
        return stands == wanted
    base, ours, theirs = (one[2].splitlines() if one else [] for one in three)
    if stands is None or stands[:2] != ("file", wanted[1]):
        return False
    lines = stands[2].splitlines()
    made = {*ours, *theirs} - set(base)
    return made <= set(lines) <= {*ours, *theirs}


@dataclass
class Model:
    person: Person
    seed: int
    base: str
    said: list[str] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.tree = self.person.project / "tree"
        self.person.shell("mkdir", self.tree)
        self._outside("do", 40)
        self.from_base = self._now()  # what each path of the sandbox goes on from
        self.box = self.person.json("create", "--base", self.base)["sandbox"]["id"]
        self.ours = dict(self.from_base)

    def rounds(self, count: int) -> None:
        try:
            for _ in range(count):
                self._round()
        except BaseException:
            print(f"\nELSEWHERE_TEST_SEED={self.seed} as {self.person.name}, {self.base}:", *self.said, sep="\n  ")
            raise
        print(self.person.name, self.base, self.done)

    # -- the trees ---

    def _outside(self, what: str, count: int = 0) -> Tree:
        words = (self.person.python, "-c", WORK, what, self.tree, str(self.chance.random()), str(count))
        return _tree(self.person.shell(*words).stdout)

    def _inside(self, what: str, count: int = 0) -> Tree:
        words = (self.person.python, "-c", WORK, what, "tree", str(self.chance.random()), str(count))
        done = self.person.elsewhere("exec", self.box, "--", *words)
        assert done.returncode == 0, done.stderr
        return _tree(done.stdout)

    def _now(self) -> Tree:
        found = self._outside("describe")
        assert not any(".elsewhere-" in path for path in found), sorted(found)
        return found

    # -- one round ---

    def _round(self) -> None:
        self.ours = self._inside("do", self.chance.choice([1, 3, 6]))
        theirs = self._outside("do", self.chance.choice([0, 1, 2, 4]))
        self.said.append("promote:")
        applied = self._promoted(theirs)
        put = self._now()
        if applied is not None and (self.base == "pinned" or not self.person.is_root) and self.chance.random() < 0.2:
            self._again(put)
        if applied is not None and self.chance.random() < 0.6:
            after = self._outside("do", self.chance.choice([0, 0, 1, 3]))
            self.said.append("undo:")
            if self._undone(applied, theirs, put, after):
                applied = None
        if applied is not None:
            self.from_base = dict(self.ours)
        # A live one sees what reality changes, so it goes on from that.
        if self.base == "live" or self.chance.random() < 0.4:
            self._start_again()

    def _count(self, what: str) -> None:
        self.said[-1] += f" {what}"
        self.done[what] = self.done.get(what, 0) + 1

    def _start_again(self) -> None:
        """Reality is what it is; the sandbox begins from that, so that not all is a conflict from now on."""
        self.person.elsewhere("rm", "--force", self.box, check=True)
        self.from_base = self._now()
        self.box = self.person.json("create", "--base", self.base)["sandbox"]["id"]

    def _promoted(self, theirs: Tree) -> str | None:
        done = self.person.elsewhere("promote", "--json", self.box, "--yes")
        document = json.loads(done.stdout)
        now = self._now()
        if done.returncode == 3:
            self._refused(document["error"], now, theirs, dict(_three(self.from_base, self.ours, theirs)))
            self._count("refused")
            return None
        assert done.returncode == 0, (done.stdout, done.stderr)
        self._equal(now, dict(_three(self.from_base, self.ours, theirs)))
        self._count("promoted")
        return str(document["promotion"]["id"])

    def _again(self, put: Tree) -> None:
        """Nothing is left to do."""
        document = self.person.json("promote", self.box, "--yes")["promotion"]
        assert not [*document["applied"], *document["deleted"]], document
        now = self._now()
        assert now == put, _different(now, put)

    def _undone(self, promotion: str, before: Tree, put: Tree, theirs: Tree) -> bool:
        """Backwards: what reality has now, as if it came from what was put there, against what there was."""
        done = self.person.elsewhere("undo", "--json", promotion)
        document, now = json.loads(done.stdout), self._now()
        three = dict(_three(put, before, theirs))
        if done.returncode == 3:
            self._refused(document["error"], now, theirs, three)
            self._count("not undone")
            return False
        assert done.returncode == 0, (done.stdout, done.stderr)
        self._equal(now, three)
        self._count("undone")
        shown = {one["id"]: one["status"] for one in self.person.json("promotions")["promotions"]}
        assert shown[promotion] == "undone", shown
        return True

    def _refused(self, error: dict[str, Any], now: Tree, theirs: Tree, three: dict[str, tuple[Stands | None, ...]]) -> None:
        """Reality is as it was, and nothing is called a conflict that only one side changed."""
        assert now == theirs, _different(now, theirs)
        told = error["detail"]["conflicts"]
        assert told, error
        for one in told:
            path = one["path"]["text"] if isinstance(one["path"], dict) else one["path"]
            path = path.removeprefix("tree/")
            touched = [other for other, (base, _, there) in three.items() if there != base and _is_near(other, path)]
            alone = not touched and one["reason"] != "no_base"
            assert not alone, (one, three.get(path))

    def _is_new_to_a_live_one(self, now: Stands | None, base: Stands | None, ours: Stands | None, theirs: Stands | None) -> bool:
        """It cannot tell what reality deleted from what was never there, if it made something of another type in its place."""
        replaced = base is not None and ours is not None and base[0] != ours[0]
        return self.base == "live" and replaced and theirs is None and now == ours

    def _equal(self, now: Tree, three: dict[str, tuple[Stands | None, ...]]) -> None:
        wrong = {}
        for path, sides in three.items():
            wanted = merged(*sides)
            # A live one cannot tell a directory that it touched, and that is gone from reality, from one that it made.
            touched = self.base == "live" and wanted is None and now[path] == sides[1] if path in now else False
            if self._is_new_to_a_live_one(now.get(path), *sides):
                continue
            if not is_right(now.get(path), wanted, sides) and not (touched and now[path][0] == "directory"):
                wrong[path] = (now.get(path), wanted, sides)
        assert not wrong, wrong


def _is_near(one: str, other: str) -> bool:
    """One of them is the other, or in it: what is in a directory is in the way of whoever deletes it."""
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")


def _three(base: Tree, ours: Tree, theirs: Tree) -> Iterator[tuple[str, tuple[Stands | None, ...]]]:
    for path in sorted({*base, *ours, *theirs}):
        yield path, (base.get(path), ours.get(path), theirs.get(path))


def _tree(text: str) -> Tree:
    return {path: tuple(stands) for path, stands in json.loads(text).items()}


def _different(one: Tree, other: Tree) -> dict[str, tuple[Stands | None, Stands | None]]:
    return {path: (one.get(path), other.get(path)) for path in {*one, *other} if one.get(path) != other.get(path)}


@pytest.mark.parametrize("base", ["live", "pinned"])
def test_reality_is_what_the_model_says_or_what_it_was(person: Person, base: str) -> None:
    Model(person, seed_of(), base).rounds(5)


@pytest.mark.slow(30)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("base", ["live", "pinned"])
def test_reality_is_what_the_model_says_or_what_it_was_for_long(person: Person, base: str) -> None:
    model = Model(person, seed_of(), base)
    model.rounds(15)
    assert model.done.get("promoted"), model.done


def test_a_directory_that_a_live_sandbox_renamed_is_still_there_after_the_next_promotion(root: Person) -> None:
    (root.project / "d").mkdir()
    (root.project / "d" / "f").write_text("f")
    box = root.json("create", "--base", "live")["sandbox"]["id"]
    root.elsewhere("exec", box, "-c", "mv d e", check=True)
    root.elsewhere("promote", box, check=True)
    assert (root.project / "e" / "f").read_text() == "f"
    root.elsewhere("promote", box)
    assert (root.project / "e" / "f").exists()
