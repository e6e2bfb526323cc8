"""Random work on a real overlay whose upper is frozen again and again, and the same work on a plain directory.

    python stacking.py PLACE SEED ROUNDS

After every round the layers, read as one (`Stack`) over what lies below them, must look like the plain directory; and so must the
overlay that is mounted with random runs of layers replaced by their mergers (`merge`), down to times. Some mergers stay in place
of their runs, so that later rounds work on them and merge them again. What was seen is printed as a line of JSON.

Run by a test, as root or as an ordinary user. Work is done, and overlays are mounted, by children with namespaces of their own, in
which nothing outside of PLACE can be written. Links that are planted lead nowhere outside of it either.

    PLACE/lower  plain  upper  work  mounted      layer-N, merged-N
"""

import contextlib
import errno
import json
import os
import pickle
import random
import stat
import sys
import traceback
import zlib

from elsewhere.linux import syscalls, userns
from elsewhere.storage.encodings import TRUSTED, USER
from elsewhere.storage.merging import merge
from elsewhere.storage.stacks import Stack
from elsewhere.storage.trees import Tree

ROOT = os.geteuid() == 0
REFUSAL = 77
NAMES = ["a", "b", "c", "d", "e", ".wh.a", "two words", os.fsdecode(b"\xff")]
CONTENTS = [b"", b"one", b"two" * 50, b"three" * 5000]
ENCODING = TRUSTED if ROOT else USER
PREFIX = ENCODING.attributes[0]
OPTIONS = "redirect_dir=on,metacopy=off,index=off,xino=off" if ROOT else "userxattr,metacopy=off,index=off,xino=off"
# Refused inside an overlay alone: renaming a directory from below without redirects, attributes that are overlay's own. Now and
# then it takes something that was exchanged for stale.
REFUSED = (errno.EXDEV, errno.EOPNOTSUPP, errno.EPERM, errno.ESTALE)


def inside(work, *arguments):
    """What `work` returns, done by a child with a mount namespace of its own, in which modes stop nobody."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            enter()
            with open(writing, "wb") as stream:
                pickle.dump(work(*arguments), stream)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as stream:
        said = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == REFUSAL:
        sys.exit(REFUSAL)
    assert code == 0, "a child failed"
    return pickle.loads(said)


def enter():
    """Random work as root must not be able to do harm: here everything is read-only but the place itself."""
    identity, place = (os.geteuid(), os.getegid()), os.getcwd()
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS | (0 if ROOT else syscalls.CLONE_NEWUSER))
        if not ROOT:
            userns.map_myself(*identity)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        own = syscalls.open_tree(syscalls.AT_FDCWD, place, syscalls.OPEN_TREE_CLONE)
        syscalls.mount_setattr(syscalls.AT_FDCWD, "/", syscalls.AT_RECURSIVE, attr_set=syscalls.MOUNT_ATTR_RDONLY)
        syscalls.move_mount(own, "", syscalls.AT_FDCWD, place)
        os.close(own)
        os.chdir(place)
        mounted([], writable=True)
        syscalls.umount2("mounted", syscalls.MNT_DETACH)
    except OSError as error:
        print(f"no overlay can be mounted here: {error}", flush=True)
        os._exit(REFUSAL)
    assert all(os.statvfs(other).f_flag & os.ST_RDONLY for other in ("/", "/etc", "/tmp", os.path.dirname(place)))


# -- what a tree looks like -----------------------------------------------------------------------------------------------------


def about(path, *, times, unescape=False):
    found = os.lstat(path)
    content = None
    if stat.S_ISLNK(found.st_mode):
        content = os.readlink(path)
    elif stat.S_ISREG(found.st_mode):
        with open(path, "rb") as stream:
            content = stream.read()
            content = content if len(content) < 200 else (len(content), zlib.crc32(content))
    attributes = {}
    for name in os.listxattr(path, follow_symlinks=False):
        value = os.getxattr(path, name, follow_symlinks=False)
        if unescape and name.startswith(f"{PREFIX}.overlay."):
            attributes[PREFIX + name.removeprefix(f"{PREFIX}.overlay")] = value
        elif not name.startswith("security.") and not (unescape and name.startswith(f"{PREFIX}.")):
            attributes[name] = value
    when = (found.st_mtime_ns,) if times else ()
    return (found.st_mode, found.st_uid, found.st_gid, found.st_rdev, content, attributes, *when)


def describe(top, *, times=False):
    found = {}
    for directory, names, files in os.walk(top):
        for name in names + files:
            path = os.path.join(directory, name)
            found[os.path.relpath(path, top)] = about(path, times=times)
    found["."] = about(top, times=times)
    return found


def describe_stack(layers, lower):
    """By way of `Stack`: what it has, and what shows through."""
    found = {}
    with contextlib.ExitStack() as stack:
        below = Tree([lower], stack)
        waiting = [Stack(layers, ENCODING, stack).root()]
        while waiting:
            with waiting.pop() as folder, contextlib.ExitStack() as inner:
                found[folder.path or "."] = about(f"/proc/self/fd/{folder.fd}/.", times=False, unescape=True)
                entries, gone = folder.entries(), folder.gone()
                assert not entries.keys() & gone
                for name, entry in entries.items():
                    assert os.path.samestat(os.lstat(name, dir_fd=entry.fd), entry.about)
                    if stat.S_ISDIR(entry.about.st_mode):
                        waiting.append(folder.folder(name))
                    else:
                        place = f"/proc/self/fd/{entry.fd}/{name}"
                        found[os.path.join(folder.path, name)] = about(place, times=False, unescape=True)
                there = None if folder.below is None else below.open(folder.below, inner)
                for name in there.entries() if there else ():
                    if name not in entries and name not in gone:
                        place, path = f"{lower}/{folder.below}/{name}", os.path.join(folder.path, name)
                        found[path] = about(place, times=False)
                        if stat.S_ISDIR(found[path][0]):
                            for rest, one in describe(place).items():
                                found[os.path.normpath(os.path.join(path, rest))] = one
    return found


def differences(one, other):
    return {path: (one.get(path), other.get(path)) for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


# -- random work ----------------------------------------------------------------------------------------------------------------


def write(path, content, flags=os.O_CREAT | os.O_TRUNC):
    with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o644), "wb") as stream:
        stream.write(content)


def sparse(path, size):
    write(path, b"begin")
    os.truncate(path, size)
    write(path, b"end", os.O_APPEND)


def replace_by_file(path):
    os.rmdir(path)
    write(path, b"was a directory")


def replace_by_directory(path, name):
    os.unlink(path)
    os.mkdir(path)
    write(os.path.join(path, name), b"was a file")


def remove_tree(path):
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))  # os.walk would follow a link at the top
    for directory, names, files in os.walk(path, topdown=False):
        for name in files:
            os.unlink(os.path.join(directory, name))
        for name in names:
            inner = os.path.join(directory, name)
            os.unlink(inner) if os.path.islink(inner) else os.rmdir(inner)
    os.rmdir(path)


def make_again(path, name):
    remove_tree(path)
    os.mkdir(path)
    write(os.path.join(path, name), b"made again")


def exchange(one, other):
    syscalls.renameat2(syscalls.AT_FDCWD, one, syscalls.AT_FDCWD, other, 2)


def link(one, other):
    os.link(one, other, follow_symlinks=False)


def attribute(path, name, value):
    os.setxattr(path, name, value, follow_symlinks=False)


class Work:
    """One thing after the other, first in the overlay, then in the plain directory."""

    def __init__(self, chance, tops, frozen_links):
        self.chance, self.tops, self.frozen_links, self.done = chance, tops, frozen_links, {}

    def step(self):
        chance, plain = self.chance, self.tops[-1]
        directories, others = [""], []
        for directory, names, files in os.walk(plain):
            short = os.path.relpath(directory, plain)
            for name in names + files:
                path = os.path.normpath(os.path.join(short, name))
                (directories if stat.S_ISDIR(os.lstat(f"{plain}/{path}").st_mode) else others).append(path)
        directories.sort()
        others.sort()
        new = os.path.join(chance.choice(directories), chance.choice(NAMES))
        if len(directories) < 3 or not others:
            self.perform(*chance.choice([(write, (new, b"first")), (os.mkdir, (new,))]))
            return
        folder, another = chance.choice(directories[1:]), chance.choice(directories[1:])
        other, either = chance.choice(others), chance.choice(directories[1:] + others)
        name, content = chance.choice(NAMES), chance.choice(CONTENTS)
        # In the lower itself, overlay's own attributes would be obeyed.
        owned = (
            ["user.one"]
            if "lower" in self.tops
            else ["user.one", "user.overlay.opaque", "user.overlay.redirect", f"{PREFIX}.opaque"]
        )
        calls = [
            *[(write, (new, content))] * 3,
            (write, (other, content)),
            (write, (other, content, os.O_APPEND)),
            *[(os.mkdir, (new,))] * 3,
            (os.unlink, (other,)),
            (os.rmdir, (folder,)),
            (remove_tree, (folder,)),
            (make_again, (folder, name)),
            (os.rename, (other, new)),
            *[(os.rename, (folder, new))] * 6,
            *[(exchange, (folder, another))] * 2,
            (exchange, (folder, other)),
            (os.chmod, (either, chance.choice([0o600, 0o640, 0o755, 0o4755]))),
            (os.chmod, (folder, chance.choice([0, 0o500, 0o755, 0o1777, 0o2770]))),
            (os.symlink, (chance.choice(["a", "b/c", "missing"]), new)),
            (link, (other, new)),
            (replace_by_file, (folder,)),
            (replace_by_directory, (other, name)),
            (attribute, (either, chance.choice(owned), chance.choice([b"y", b"/a", b"value"]))),
            (os.removexattr, (either, "user.one")),
            (sparse, (new, chance.choice([1, 300_000]))),
            (os.mkfifo, (new,)),
            (os.utime, (either, (1, chance.randrange(10**9)))),
        ]
        if ROOT:
            calls.append((os.chown, (either, chance.choice([0, 1000]), chance.choice([0, 1000]))))
        self.perform(*chance.choice(calls))

    def perform(self, call, arguments):
        plain = self.tops[-1]
        paths = {os.rename: 2, exchange: 2, link: 2}.get(call, 1)
        first = 1 if call is os.symlink else 0
        if paths == 1 and call is not os.unlink and os.path.lexists(f"{plain}/{arguments[first]}"):
            found = os.lstat(f"{plain}/{arguments[first]}")
            # A link that overlay broke when it copied one of its names up is one for the plain directory still; and what
            # opens a fifo would wait.
            if found.st_ino in self.frozen_links or (stat.S_ISFIFO(found.st_mode) and call in (write, sparse)):
                return
            if stat.S_ISLNK(found.st_mode) and call in (os.chmod, os.chown, os.utime, os.removexattr, attribute):
                return
        if call is os.rename and links_of_one(*(f"{plain}/{path}" for path in arguments)):
            return  # nothing happens in the plain directory
        outcomes = []
        for top in self.tops:
            whole = list(arguments)
            for number in range(first, first + paths):
                whole[number] = f"{top}/{arguments[number]}"
            try:
                call(*whole)
                outcomes.append(0)
            except OSError as error:
                outcomes.append(error.errno)
                if top != plain and error.errno in REFUSED:
                    return
        assert len(set(outcomes)) == 1, (call, arguments, [os.strerror(number) for number in outcomes])
        if not outcomes[0]:
            self.done[call.__name__] = self.done.get(call.__name__, 0) + 1


def links_of_one(one, other):
    return os.path.lexists(one) and os.path.lexists(other) and os.path.samestat(os.lstat(one), os.lstat(other))


def links(top):
    found = [os.lstat(os.path.join(directory, name)) for directory, _, files in os.walk(top) for name in files]
    return {one.st_ino for one in found if one.st_nlink > 1}


def mounted(layers, *, writable):
    lowers = ":".join([*layers, "lower"])
    upper = ",upperdir=upper,workdir=work" if writable else ""
    syscalls.mount(
        "overlay",
        "mounted",
        "overlay",
        0,
        f"lowerdir={lowers}{upper},{OPTIONS if writable else OPTIONS.replace('=on', '=follow')}",
    )
    return "mounted"


def work(seed, layers, count, frozen_links):
    """One session: what was done, what the overlay looks like, and what the plain directory does."""
    tops = (mounted(layers, writable=True), "plain") if layers is not None else ("lower", "plain")
    doing = Work(random.Random(seed), tops, frozen_links)
    for _ in range(count):
        doing.step()
    return doing.done, describe(tops[0]), describe("plain"), links("plain")


def seen(layers):
    return describe(mounted(layers, writable=False), times=True)


def marks(layers):
    """How many directories are opaque, how many are renamed, and how many whiteouts there are."""
    counts = [0, 0, 0]
    for layer in layers:
        for directory, names, files in os.walk(layer):
            for name in names:
                path = os.path.join(directory, name)
                if not os.path.islink(path):
                    has = os.listxattr(path)
                    counts[0] += f"{PREFIX}.opaque" in has
                    counts[1] += f"{PREFIX}.redirect" in has
            counts[2] += sum(stat.S_ISCHR(os.lstat(os.path.join(directory, name)).st_mode) for name in files)
    return counts


def look(layers):
    return {layer: describe(layer, times=True) for layer in layers}


# -- rounds ---------------------------------------------------------------------------------------------------------------------


class Rounds:
    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.layers, self.links, self.numbers = [], set(), 0
        self.said = {"done": {}, "merged": 0, "marks": [0, 0, 0], "deepest": 0}

    def number(self):
        self.numbers += 1
        return self.numbers

    def session(self):
        done, overlay, plain, self.links = inside(
            work, self.chance.random(), self.layers, self.chance.choice([2, 10, 30]), self.links
        )
        assert not differences(overlay, plain), ("the kernel disagrees", differences(overlay, plain))
        for name, count in done.items():
            self.said["done"][name] = self.said["done"].get(name, 0) + count
        layer = f"layer-{self.number()}"
        os.rename("upper", layer)
        self.layers.insert(0, layer)
        fresh()
        return plain

    def check(self, plain):
        by_stack = inside(describe_stack, self.layers, "lower")
        assert not differences(by_stack, plain), ("the stack disagrees", self.layers, differences(by_stack, plain))
        self.said["marks"] = [one + other for one, other in zip(self.said["marks"], inside(marks, self.layers), strict=True)]
        self.said["deepest"] = max(self.said["deepest"], len(self.layers))
        before, now = inside(look, self.layers), inside(seen, self.layers)
        for _ in range(2):
            replaced = self.replaced()
            merged = inside(seen, replaced)
            assert not differences(merged, now), ("the mergers disagree", self.layers, replaced, differences(merged, now))
            by_stack = inside(describe_stack, replaced, "lower")
            assert not differences(by_stack, plain), ("the stack of mergers disagrees", replaced, differences(by_stack, plain))
        assert inside(look, self.layers) == before, "a layer was changed"
        if self.chance.random() < 0.4:
            self.layers = replaced

    def replaced(self):
        """The layers, with some runs of them merged."""
        layers, position = [], 0
        while position < len(self.layers):
            run = self.layers[position : position + self.chance.choice([1, 1, 2, 3, 5])]
            position += len(run)
            if len(run) > 1 or self.chance.random() < 0.1:
                target = f"merged-{self.number()}"
                merge(run, ENCODING, os.path.abspath(target))
                self.said["merged"] += 1
                run = [target]
            layers += run
        return layers


def fresh():
    os.mkdir("upper")
    os.chmod("upper", stat.S_IMODE(os.stat("plain").st_mode))


def main(place, seed, rounds):
    os.chdir(place)
    assert os.getcwd() == place, "a link leads there"
    assert not os.listdir("."), "not a new directory"
    os.umask(0o022)
    for name in ("lower", "plain", "work", "mounted"):
        os.mkdir(name)
    fresh()
    if ROOT:
        enter()
    rest = Rounds(seed)
    rest.links = inside(work, seed, None, 40, set())[3]
    for number in range(int(rounds)):
        plain = rest.session()
        if number % 3 == 2 or number + 1 == int(rounds):
            rest.check(plain)
    print(json.dumps(rest.said))


if __name__ == "__main__":
    main(*sys.argv[1:])
