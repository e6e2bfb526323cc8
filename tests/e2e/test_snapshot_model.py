"""Random work in sandboxes that are snapshotted, rolled back, forked, merged and restarted in any order, against plain directories
in which the same was done: the trees are equal, whatever came between.

A failure prints the seed; with ELSEWHERE_TEST_SEED set to it, the same comes again (see `chance.py`).
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chance import seed_of
from conftest import Person
from e2e.test_snapshots import fork, made, names
from linux.test_ladder import Elsewhere, give_the_hosts_network, needs_fuse, needs_landlock, needs_root

# `do DIR SEED COUNT` works at random and prints what it tried; `replay DIR` does the same again, and must get the same answers;
# `describe DIR` prints everything about a tree. Run by whoever owns the trees, inside and outside.
WORK = r"""
import errno, json, os, random, stat, struct, sys, zlib
ROOT = os.geteuid() == 0
NAMES = ['a', 'b', 'c', 'd', 'two words', os.fsdecode(b'\xff'), *([] if 'FUSE' in os.environ else ['.wh.a'])]
CONTENTS = ['', 'one', 'two' * 50, 'three' * 5000]
# Only overlay refuses: directories of lower layers are not renamed for an ordinary user, and some attributes are not known.
# fuse-overlayfs may take for there what a directory of the same name had before it was removed and made again.
REFUSED = (errno.EXDEV, errno.EOPNOTSUPP, errno.EPERM, *([errno.EEXIST] if 'FUSE' in os.environ else []))

def write(path, content, how):
    with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | how, 0o644), 'w') as stream:
        stream.write(content)

def put(path, content): write(path, content, os.O_CREAT | os.O_TRUNC)
def append(path, content): write(path, content, os.O_APPEND)
def truncate(path, size): os.truncate(path, size)
def mkdir(path, _=None): os.mkdir(path)
def mkfifo(path): os.mkfifo(path)
def unlink(path): os.unlink(path)
def rmdir(path): os.rmdir(path)
def chmod(path, mode): os.chmod(path, mode)
def chown(path, uid, gid): os.chown(path, uid, gid, follow_symlinks=False)
def symlink(path, target): os.symlink(target, path)
def link(path, other):
    # Of a file that came from below, an overlay that could not write down where it came from may show two names as two files.
    if not os.path.islink(path) and not os.path.lexists(other) and not os.path.lexists(path + '~'):
        with open(path, 'rb') as source, open(path + '~', 'wb') as target:
            target.truncate(os.fstat(source.fileno()).st_size)
            for number, block in enumerate(iter(lambda: source.read(4096), b'')):
                if block.strip(b'\0'): os.pwrite(target.fileno(), block, number * 4096)
        os.chmod(path + '~', stat.S_IMODE(os.lstat(path).st_mode))
        os.rename(path + '~', path)
    os.link(path, other, follow_symlinks=False)
def rename(path, other): os.rename(path, other)
def attribute(path, name, value): os.setxattr(path, name, value.encode(), follow_symlinks=False)
def no_attribute(path, name): os.removexattr(path, name)

def sparse(path, size):
    put(path, 'begin')
    os.truncate(path, size)
    append(path, 'end')

def access(path, name, permission):
    who = 1000 if ROOT else os.geteuid()
    entries = [(1, 7, -1), (2, permission, who), (4, 5, -1), (16, 7, -1), (32, 1, -1)]
    os.setxattr(path, name, struct.pack('<I', 2) + b''.join(struct.pack('<HHi', *one) for one in entries))

def capability(path):
    os.setxattr(path, 'security.capability', struct.pack('<IIIII', 0x02000001, 1 << 10, 0, 0, 0))

def remove_tree(path):
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
    for directory, folders, files in os.walk(path, topdown=False):
        for name in files: os.unlink(os.path.join(directory, name))
        for name in folders:
            inner = os.path.join(directory, name)
            os.unlink(inner) if os.path.islink(inner) else os.rmdir(inner)
    os.rmdir(path)

def make_again(path, name):
    remove_tree(path)
    os.mkdir(path)
    put(os.path.join(path, name), 'made again')

def become_file(path):
    remove_tree(path)
    put(path, 'was a directory')

def become_directory(path, name):
    os.unlink(path)
    os.mkdir(path)
    put(os.path.join(path, name), 'was a file')

def perform(call, arguments):
    try:
        globals()[call](*arguments)
        return 0
    except OSError as error:
        return error.errno

def look():
    folders, files, linked, inodes = [], [], set(), {}
    for directory, inner, names in os.walk('.'):
        for name in inner + names:
            path = os.path.normpath(os.path.join(directory, name))
            about = os.lstat(path)
            (folders if stat.S_ISDIR(about.st_mode) else files).append(path)
            if not stat.S_ISDIR(about.st_mode):
                inodes.setdefault((about.st_dev, about.st_ino), []).append(path)
    for group in inodes.values():
        if len(group) > 1: linked.update(group)
    return sorted(folders), sorted(files), linked

def step(chance):
    folders, files, linked = look()
    new = os.path.normpath(os.path.join(chance.choice(['.', *folders]), chance.choice(NAMES)))
    # A second name breaks off when one of them is copied up, and a fifo waits.
    plain = [path for path in files if path not in linked and stat.S_ISREG(os.lstat(path).st_mode)]
    if len(folders) < 3 or len(plain) < 2:
        return chance.choice([('mkdir' if os.path.lexists(new) else 'put', (new, 'first')), ('mkdir', (new,))])
    folder, file, content, name = (chance.choice(one) for one in (folders, plain, CONTENTS, NAMES))
    either = chance.choice(folders + plain)
    modes = [0o700, 0o755, 0o1777] + ([] if ROOT else [0o2770])
    calls = [
        *[('put', (new, content))] * 3, ('put', (file, content)), ('append', (file, content)), ('truncate', (file, 3)),
        *[('mkdir', (new,))] * 3, *[('unlink', (chance.choice(files),))] * 2, ('rmdir', (folder,)), ('remove_tree', (folder,)),
        ('make_again', (folder, name)), ('become_file', (folder,)), ('become_directory', (file, name)),
        ('rename', (file, new)), *[('rename', (folder, new))] * 5, ('mkfifo', (new,)),
        ('symlink', (new, chance.choice(['a', 'b/c', 'missing', '/etc/passwd']))), *[('link', (file, new))] * 2,
        ('chmod', (folder, chance.choice(modes))), ('chmod', (file, chance.choice([0o400, 0o600, 0o644, 0o755]))),
        ('attribute', (either, 'user.one', chance.choice(['y', 'value']))), ('no_attribute', (either, 'user.one')),
        ('access', (file, 'system.posix_acl_access', chance.choice([4, 7]))),
        ('access', (folder, 'system.posix_acl_default', chance.choice([5, 7]))),
        ('sparse', (new, chance.choice([1, 3_000_000]))),
    ]
    if ROOT:
        calls += [('chown', (either, chance.choice([0, 1000]), chance.choice([0, 1000]))), ('capability', (file,))]
    if 'FUSE' in os.environ:
        # What fuse-overlayfs does right.
        plainly = ('put', 'append', 'mkdir', 'unlink', 'remove_tree', 'symlink', 'become_directory', 'make_again', 'sparse')
        calls = [one for one in calls if one[0] in plainly]
    call, arguments = chance.choice(calls)
    if call in ('rename', 'put', 'sparse') and arguments[-1 if call == 'rename' else 0] in linked:
        return 'mkdir', (new,)
    if call in ('put', 'sparse') and os.path.lexists(arguments[0]) and stat.S_ISFIFO(os.lstat(arguments[0]).st_mode):
        return 'mkdir', (new,)
    return call, arguments

def describe():
    found, names = {}, {}
    for directory, inner, files in os.walk('.'):
        for name in inner + files + (['.'] if directory == '.' else []):
            path = os.path.normpath(os.path.join(directory, name))
            about = os.lstat(path)
            said = [stat.filemode(about.st_mode), about.st_uid, about.st_gid]
            if stat.S_ISLNK(about.st_mode): said.append(os.readlink(path))
            if stat.S_ISREG(about.st_mode):
                with open(path, 'rb') as stream: said += [about.st_size, zlib.crc32(stream.read())]
                if about.st_size > 1_000_000: said.append('sparse' if about.st_blocks * 512 < about.st_size // 2 else 'full')
            if not stat.S_ISDIR(about.st_mode):
                said.append('as ' + names.setdefault((about.st_dev, about.st_ino), path))
            for one in sorted(os.listxattr(path, follow_symlinks=False)):
                if one.startswith(('user.one', 'system.posix_acl', 'security.capability')):
                    said.append([one, os.getxattr(path, one, follow_symlinks=False).hex()])
            found[path] = said
    # The first name of a file with several is the first in the alphabet.
    groups = {}
    for path, said in found.items():
        for one in said:
            if isinstance(one, str) and one.startswith('as '): groups.setdefault(one, []).append(path)
    for key, group in groups.items():
        for path in group: found[path][found[path].index(key)] = sorted(group) if len(group) > 1 else []
    return found

os.umask(0o022)
os.chdir(sys.argv[2])
if sys.argv[1] == 'do':
    chance, tried = random.Random(sys.argv[3]), []
    for _ in range(int(sys.argv[4])):
        call, arguments = step(chance)
        tried.append((call, arguments, perform(call, arguments)))
    print(json.dumps(tried))
elif sys.argv[1] == 'replay':
    for call, arguments, answer in json.load(sys.stdin):
        if answer not in REFUSED:
            got = perform(call, arguments)
            assert got == answer, (call, arguments, os.strerror(answer), os.strerror(got))
else:
    print(json.dumps(describe()))
"""

MERGE = """
import sys
from elsewhere.sandbox.records import record
from elsewhere.storage.layers import Layers
from elsewhere.storage.state import State
state = State.open()
layers = Layers(state)
tip = record.load(state, sys.argv[1]).tip
chain = layers.ancestors(tip)
if chain:
    layers.merge(chain[int(sys.argv[2]) % len(chain)].id)
print(len(layers.chain(tip)), len(chain))
"""


@dataclass
class Box:
    id: str
    mirror: Path
    saved: dict[str, Path] = field(default_factory=dict)


@dataclass
class Model:
    person: Person
    seed: int
    base: str = "live"
    boxes: list[Box] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.place = self.person.place / "mirrors"
        self.person.shell("mkdir", self.place, self.person.project / "tree")
        self._outside("do", self.person.project / "tree", str(self.seed), "40")
        self.start = self._copy(self.person.project / "tree")
        first = made(self.person, "--base", self.base)
        self.boxes.append(Box(first, self._copy(self.start)))

    def rounds(self, count: int) -> None:
        try:
            for _ in range(count):
                self._one()
            self._all()
        except BaseException:
            print(f"\nELSEWHERE_TEST_SEED={self.seed} as {self.person.name}, {self.base}:", *self.said, sep="\n  ")
            raise

    def _outside(self, *arguments: str | Path, **more: Any) -> str:
        return self.person.shell(self.person.python, "-c", WORK, *map(str, arguments), **more).stdout

    def _inside(self, box: Box, *arguments: str) -> str:
        done = self.person.elsewhere("exec", box.id, "--", self.person.python, "-c", WORK, arguments[0], "tree", *arguments[1:])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _copy(self, source: Path) -> Path:
        self.number += 1
        target = self.place / f"{self.number}"
        self.person.shell("cp", "-a", "--sparse=always", source, target)
        return target

    def _one(self) -> None:
        box = self.chance.choice(self.boxes)
        steps = ["work"] * 6 + ["snapshot"] * 5 + ["rollback"] * 3 + ["merge"] * 3 + ["fork", "stop", "busy"]
        step = self.chance.choice(steps)
        self.said.append(f"{step} {box.id}")
        self.done[step] = self.done.get(step, 0) + 1
        getattr(self, f"_{step}")(box)
        self._compare(box)

    def _work(self, box: Box) -> None:
        seed, count = str(self.chance.random()), self.chance.choice([1, 5, 20])
        tried = self._inside(box, "do", seed, str(count))
        self._outside("replay", box.mirror, input=tried)
        self.said[-1] += f" {seed} {count}"

    def _snapshot(self, box: Box) -> None:
        self.number += 1
        name = f"s{self.number}"
        document = self.person.json("snapshot", box.id, name)
        assert document["snapshot"]["name"] == name, document
        self.said[-1] += f" {name}"
        box.saved[name] = self._copy(box.mirror)

    def _busy(self, box: Box) -> None:
        self.person.elsewhere("exec", "-d", box.id, "--", "sleep", "1000", check=True)
        self._snapshot(box)
        self.person.elsewhere("cancel", box.id, check=True)

    def _rollback(self, box: Box) -> None:
        name = self.chance.choice(["base", *box.saved])
        saved = self.person.json("rollback", box.id, name)["saved_as"]
        self.said[-1] += f" {name}, saved as {saved}"
        if saved is not None:
            box.saved[saved] = self._copy(box.mirror)
        now = self._outside("describe", box.mirror)
        assert any(self._outside("describe", one) == now for one in box.saved.values()), "what it had was not saved"
        target = self.start if name == "base" else box.saved[name]
        box.mirror = self._copy(target)

    def _fork(self, box: Box) -> None:
        if len(self.boxes) == 4:
            self._snapshot(box)
            return
        source = self.chance.choice([None, *box.saved])
        child = fork(self.person, box.id, *(("--from", source) if source else ()))
        self.said[-1] += f" from {source}: {child}"
        self.boxes.append(Box(child, self._copy(box.saved[source] if source else box.mirror)))
        self._compare(self.boxes[-1])

    def _stop(self, box: Box) -> None:
        self.person.elsewhere("stop", box.id, check=True)

    def _merge(self, box: Box) -> None:
        """Any run of layers, not only one that is due; seen when it starts again."""
        self.said[-1] += self.person.shell(self.person.python, "-c", MERGE, box.id, str(self.chance.randrange(100))).stdout
        self.person.elsewhere("stop", box.id, check=True)

    def _compare(self, box: Box) -> None:
        self._equal(self._inside(box, "describe"), box.mirror)

    def _equal(self, seen: str, mirror: Path) -> None:
        inside, outside = json.loads(seen), json.loads(self._outside("describe", mirror))
        differing = {
            path: (inside.get(path), outside.get(path))
            for path in inside.keys() | outside.keys()
            if inside.get(path) != outside.get(path)
        }
        assert not differing, differing

    def _all(self) -> None:
        """Whatever any snapshot of any of them shows."""
        for box in self.boxes:
            assert set(names(self.person, box.id)) == set(box.saved)
            for name in self.chance.sample(sorted(box.saved), min(4, len(box.saved))):
                child = Box(fork(self.person, box.id, "--from", name), box.saved[name])
                self.said.append(f"look at {name} of {box.id}")
                self._compare(child)
                self.person.elsewhere("rm", "--force", child.id, check=True)
        parent = self.boxes.pop(0)
        self.person.sdk(f"from elsewhere import Sandbox\nSandbox.get({parent.id!r}, on_exit='discard').remove()")
        for box in self.boxes:
            self.said.append(f"{box.id} without its parent")
            self._stop(box)
            self._compare(box)


@pytest.mark.parametrize("base", ["live", "pinned"])
def test_trees_are_equal_whatever_came_between(person: Person, base: str) -> None:
    Model(person, seed_of(), base).rounds(6)


@pytest.mark.slow(20)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("base", ["live", "pinned"])
def test_trees_are_equal_whatever_came_between_for_long(person: Person, base: str) -> None:
    Model(person, seed_of(), base).rounds(20)


# -- on other hosts ---

# The same on one host after the other: everything that a script can do there, since that host ends with it.
SCRIPT = r"""
w() { e exec ${FUSE:+--env FUSE=1} box -- PYTHON -c "$WORK" do tree "$1" 12 > "$OUT/tried" && PYTHON -c "$WORK" replay "$OUT/now" < "$OUT/tried"; }
d() { e exec "$1" -- PYTHON -c "$WORK" describe tree > "$OUT/inside"; PYTHON -c "$WORK" describe "$2" > "$OUT/outside"
      cmp "$OUT/inside" "$OUT/outside" || PYTHON -c "$DIFFER" "$OUT/inside" "$OUT/outside"; }
keep() { cp -a --sparse=always "$OUT/now" "$OUT/$1"; }
back() { rm -rf "$OUT/now"; cp -a --sparse=always "$OUT/$1" "$OUT/now"; }
mkdir "$OUT/now"
e create --name box >/dev/null
for round in 1 2 3; do
  w SEED-$round-1; d box "$OUT/now"; e snapshot box s$round >/dev/null; keep s$round
  w SEED-$round-2; d box "$OUT/now"
  e fork box --name f$round >/dev/null; d f$round "$OUT/now"; e rm --force f$round >/dev/null
  e rollback box s1 >/dev/null; back s1; d box "$OUT/now"
  e stop box >/dev/null; e rollback box s$round >/dev/null; back s$round; d box "$OUT/now"
done
e fork box --from s2 --name other >/dev/null
d other "$OUT/s2"
e inspect box --json | tr ',' '\n' | grep -m1 '"mechanism"'
e rm --force --all >/dev/null
"""
DIFFER = """
import json, sys
one, other = (json.load(open(path)) for path in sys.argv[1:])
found = {path: (one.get(path), other.get(path)) for path in one.keys() | other.keys() if one.get(path) != other.get(path)}
print(found, file=sys.stderr)
sys.exit(1 if found else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "taken"),
    [
        ("overlay-userns-memory", ("--overlay-root", "1")),
        ("fuse-overlayfs", ("--overlay-root", "2")),
        ("copy-landlock", ("--overlay-root", "2", "--no-fuse")),
    ],
)
def test_trees_are_equal_on_weaker_rungs(person: Person, mechanism: str, taken: tuple[str, ...]) -> None:
    needs_root()
    if mechanism == "fuse-overlayfs":
        needs_fuse()
    if mechanism == "copy-landlock":
        needs_landlock()
        give_the_hosts_network(person)
    seed, out = seed_of(), person.place / "out"
    person.shell("mkdir", out, person.project / "tree")
    # The plain directories lie on a plain file system: that host's own is an overlay, which has its own ideas.
    taken = (*taken, "--tmpfs", str(out))
    more = {"WORK": WORK, "DIFFER": DIFFER, "OUT": str(out), **({"FUSE": "1"} if mechanism == "fuse-overlayfs" else {})}
    person.extra.update(more)
    done = Elsewhere(person, *taken).script(SCRIPT.replace("PYTHON", person.python).replace("SEED", str(seed)))
    for name in more:
        del person.extra[name]
    assert done.returncode == 0, (f"ELSEWHERE_TEST_SEED={seed}", done.stdout, done.stderr)
    assert f'"mechanism": "{mechanism}"' in done.stdout, done.stdout
