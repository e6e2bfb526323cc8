"""Applying to reality: all or nothing, whoever else writes there, and wherever it is killed."""

import contextlib
import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elsewhere.changes.model import Side
from elsewhere.changes.sides import sides_of
from elsewhere.errors import Broken, Conflict, ElsewhereError, InUse, NotFound, Refused, StateError
from elsewhere.linux import syscalls
from elsewhere.promotion import applying, freezing, records
from elsewhere.promotion.applying import Operation
from elsewhere.promotion.pieces import Piece
from elsewhere.storage.state import State

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else or mount")
PEOPLE = (0, 4242) if os.geteuid() == 0 else (os.geteuid(),)
Tree = dict[str, tuple[Any, ...]]


@pytest.fixture(params=PEOPLE, ids=lambda uid: "root" if uid == 0 else "user")
def uid(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(autouse=True)
def unsynced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a power cut could tell the difference, and nearly all of the time."""
    if request.node.originalname != "test_everything_is_applied_and_nothing_is_left_behind":
        monkeypatch.setattr(os, "fsync", lambda fd: None)
        monkeypatch.setattr(syscalls, "syncfs", lambda fd: None)


@pytest.fixture
def ground(place: Path, uid: int) -> "Ground":
    if uid != os.geteuid():
        os.chown(place, uid, uid)
    made = Ground(place, uid)
    made.call(made.build)
    return made


class Ground:
    """A root to be changed, a tree that it is to become, and a journal."""

    def __init__(self, place: Path, uid: int) -> None:
        self.place, self.uid = place, uid
        self.root, self.wanted = str(place / "root"), str(place / "wanted")
        self.journal = str(place / "journal" / "promotion" / "1")

    def build(self) -> None:
        os.mkdir(self.place / "journal")
        for name in ("root", "wanted"):
            os.mkdir(self.place / name, 0o755)
        build_before(self.root)
        build_after(self.wanted)

    def call(self, function: Callable[[], None]) -> int:
        """In a process of that person: how it ended. A failure inside is one here."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(reader)
                if self.uid != os.geteuid():
                    os.setgroups([])
                    os.setresgid(self.uid, self.uid, self.uid)
                    os.setresuid(self.uid, self.uid, self.uid)
                os.umask(0o022)
                function()
                status = 0
            except BaseException:
                os.write(writer, traceback.format_exc().encode()[-60000:])
            finally:
                os._exit(status)
        os.close(writer)
        with open(reader, "rb") as stream:
            said = stream.read().decode()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert not said, said
        return status

    def operations(self) -> list[Operation]:
        return between(self.root, self.wanted)

    def apply(self, step: Callable[[str], None] = lambda _: None) -> None:
        applying.apply(self.journal, self.operations(), step)

    def again(self) -> None:
        """As it was in the beginning."""
        remove_what_was_built(self.place)
        self.call(self.build)


def remove_what_was_built(place: Path) -> None:
    """What this test made below its own place, and nothing else."""
    for name in ("root", "wanted", "journal"):
        for directory, _, _ in os.walk(place / name):
            os.chmod(directory, 0o755)
        shutil.rmtree(place / name)


def write(place: str, content: str | bytes, mode: int = 0o644) -> None:
    data = content.encode() if isinstance(content, str) else content
    with open(place, "wb") as stream:
        stream.write(data)
    os.chmod(place, mode)


def common(top: str) -> None:
    write(f"{top}/same", "same\n")
    os.makedirs(f"{top}/kept", exist_ok=True)
    write(f"{top}/kept/inside", "inside\n")


def build_before(top: str) -> None:
    common(top)
    write(f"{top}/edit", "before\n")
    os.setxattr(f"{top}/edit", "user.old", b"1")
    write(f"{top}/script", "#!/bin/sh\n")
    write(f"{top}/gone", "gone\n", 0o600)
    os.symlink("edit", f"{top}/link")
    write(f"{top}/to-link", "a file\n")
    os.symlink("same", f"{top}/from-link")
    write(f"{top}/to-directory", "a file\n")
    os.mkdir(f"{top}/from-directory")
    write(f"{top}/from-directory/child", "child\n")
    os.makedirs(f"{top}/old/deep")
    write(f"{top}/old/deep/leaf", "leaf\n")
    os.chmod(f"{top}/old", 0o750)
    os.mkdir(f"{top}/mode")
    write(os.fsdecode(os.fsencode(top) + b"/\xff\xfe"), "odd\n")
    write(f"{top}/kept/big", b"\0\1" * (1 << 20))
    os.symlink("/nonexistent", f"{top}/old/dangling")


def build_after(top: str) -> None:
    common(top)
    write(f"{top}/edit", "after\n", 0o640)
    os.setxattr(f"{top}/edit", "user.new", b"2")
    write(f"{top}/script", "#!/bin/sh\n", 0o755)
    os.symlink("kept", f"{top}/link")
    os.symlink("same", f"{top}/to-link")
    write(f"{top}/from-link", "now a file\n")
    os.mkdir(f"{top}/to-directory")
    write(f"{top}/to-directory/inner", "inner\n")
    write(f"{top}/from-directory", "now a file\n")
    os.mkdir(f"{top}/mode")
    write(f"{top}/mode/new", "new\n")
    os.chmod(f"{top}/mode", 0o500)
    write(os.fsdecode(os.fsencode(top) + b"/\xff\xfe"), "odder\n")
    write(f"{top}/kept/big", b"\2\0" * (1 << 20))
    os.makedirs(f"{top}/new/sub")
    write(f"{top}/new/sub/file", "")
    write(f"{top}/new/powers", "x", 0o4755)
    os.symlink("../same", f"{top}/new/link")
    os.chmod(f"{top}/new", 0o555)


def tree(top: str) -> Tree:
    """Everything that counts, by plain means."""
    found: Tree = {}
    for place, directories, files in os.walk(top):
        for name in (*directories, *files):
            path = os.path.join(place, name)
            about = os.lstat(path)
            kind = stat.S_IFMT(about.st_mode)
            content: object = None
            if kind == stat.S_IFLNK:
                content = os.readlink(path)
            elif kind == stat.S_IFREG:
                content = Path(path).read_bytes()
            mode = 0 if kind == stat.S_IFLNK else stat.S_IMODE(about.st_mode)
            extended = {one: os.getxattr(path, one, follow_symlinks=False) for one in os.listxattr(path, follow_symlinks=False)}
            found[os.path.relpath(path, top)] = (kind, mode, about.st_uid, about.st_gid, content, extended)
    return found


def between(root: str, wanted: str) -> list[Operation]:
    here, there = tree(root), tree(wanted)
    now, then = sides_of([root]), sides_of([wanted])
    paths = [path for path in sorted({*here, *there}) if here.get(path) != there.get(path)]
    return [Operation(root, path, now(path), then(path)) for path in paths]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def text(content: bytes, mode: int = 0o644) -> Side:
    return Side(os.stat_result((stat.S_IFREG | mode, 0, 0, 1, 0, 0, len(content), 0, 0, 0)), content=content)


def shown(piece: Piece) -> tuple[object, object]:
    def side(one: Side | None) -> object:
        if one is None or one.type != "file":
            return one and (one.type, one.mode, one.target)
        with one.open() as stream:
            return one.type, one.mode, stream.read()

    return side(piece.before), side(piece.after)


class Counter:
    """Dies at the step of that number."""

    def __init__(self, fatal: int = -1) -> None:
        self.names: list[str] = []
        self.fatal = fatal

    def __call__(self, name: str) -> None:
        if len(self.names) == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)


def steps_of(ground: Ground, function: Callable[[Callable[[str], None]], object]) -> list[str]:
    """The names of the steps of something that is done in a process of that person."""
    counter = Counter()
    told = ground.place / "told"

    def run() -> None:
        function(counter)
        told.write_text("\n".join(counter.names))

    assert ground.call(run) == 0
    names = told.read_text().splitlines()
    told.unlink()
    return names


# -- what is done


def test_everything_is_applied_and_nothing_is_left_behind(ground: Ground) -> None:
    after = tree(ground.wanted)

    def run() -> None:
        before = descriptors()
        ground.apply()
        assert descriptors() == before

    assert ground.call(run) == 0
    assert tree(ground.root) == after
    assert applying.state(ground.journal) == "applied"


def test_what_was_applied_can_be_undone_by_its_pieces(ground: Ground) -> None:
    before = tree(ground.root)

    def run() -> None:
        ground.apply()
        now = sides_of([ground.root])
        os.chmod(f"{ground.root}/new", 0o755)  # its owner may not write to it otherwise
        os.chmod(f"{ground.root}/mode", 0o755)
        pieces = applying.pieces(ground.journal)
        assert [piece.path for piece in pieces if not piece.known] == ["kept/big"]
        assert not any(piece.moved for piece in pieces)
        undone = [Operation(piece.root, piece.path, now(piece.path), piece.after, piece.owner) for piece in pieces]
        applying.apply(str(ground.place / "journal" / "undo" / "1"), undone)

    assert ground.call(run) == 0
    assert tree(ground.root) == before


def test_pieces_tell_what_was_put_and_what_was_found(ground: Ground) -> None:
    def run() -> None:
        ground.apply()
        write(f"{ground.root}/kept/big", b"\3\0" * (1 << 20))
        write(f"{ground.root}/script", "edited since\n", 0o755)

    assert ground.call(run) == 0
    pieces = {piece.path: piece for piece in applying.pieces(ground.journal)}
    assert shown(pieces["edit"]) == (("file", 0o640, b"after\n"), ("file", 0o644, b"before\n"))
    assert pieces["edit"].owner == (ground.uid, ground.uid)
    assert pieces["kept/big"].moved
    assert shown(pieces["to-directory"]) == (("directory", 0o755, None), ("file", 0o644, b"a file\n"))
    assert shown(pieces["new"]) == (("directory", 0o555, None), None)
    assert shown(pieces["gone"]) == (None, ("file", 0o600, b"gone\n"))
    assert shown(pieces["old"]) == (None, ("directory", 0o750, None))
    assert shown(pieces["link"]) == (("link", 0o777, "kept"), ("link", 0o777, "edit"))
    # Only its mode was changed: whatever is in it now is nobody's but the user's.
    assert shown(pieces["script"]) == (("file", 0o755, b"edited since\n"), ("file", 0o644, b"edited since\n"))


def test_merged_content_keeps_the_attributes_of_what_it_replaces(ground: Ground) -> None:
    def run() -> None:
        applying.apply(
            ground.journal, [Operation(ground.root, "edit", sides_of([ground.root])("edit"), text(b"merged\n", 0o600))]
        )

    assert ground.call(run) == 0
    assert tree(ground.root)["edit"][1:] == (0o600, ground.uid, ground.uid, b"merged\n", {"user.old": b"1"})


def test_what_is_new_is_as_new_as_the_moment(ground: Ground) -> None:
    os.utime(f"{ground.wanted}/edit", (1, 1))
    start = time.time()
    assert ground.call(ground.apply) == 0
    assert start - 1 < os.stat(f"{ground.root}/edit").st_mtime <= time.time()


def test_a_change_of_mode_alone_leaves_the_file_itself(ground: Ground) -> None:
    os.link(f"{ground.root}/script", f"{ground.root}/same-script")
    os.link(f"{ground.wanted}/script", f"{ground.wanted}/same-script")
    inode = os.stat(f"{ground.root}/script").st_ino

    def run() -> None:
        applying.apply(ground.journal, [one for one in ground.operations() if one.path == "script"])

    assert ground.call(run) == 0
    assert os.stat(f"{ground.root}/same-script").st_ino == os.stat(f"{ground.root}/script").st_ino == inode
    assert os.stat(f"{ground.root}/script").st_mode & 0o777 == 0o755


@needs_root
def test_owners_are_kept_or_given(place: Path) -> None:
    ground = Ground(place, 0)
    ground.build()
    os.chown(f"{ground.root}/edit", 1234, 1235)
    os.chown(f"{ground.root}/old", 1236, 1237)
    before = tree(ground.root)
    operations = [one._replace(owner=(1240, 1241)) for one in ground.operations()]
    applying.apply(ground.journal, operations)
    after = tree(ground.root)
    assert after["edit"][2:4] == (1234, 1235)
    assert after["new/sub"][2:4] == after["new/link"][2:4] == (1240, 1241)
    assert after["new/powers"][1:4] == (0o4755, 1240, 1241)
    pieces = applying.pieces(ground.journal)
    now = sides_of([ground.root])
    undone = [Operation(piece.root, piece.path, now(piece.path), piece.after, piece.owner) for piece in pieces]
    applying.apply(str(place / "journal" / "undo" / "1"), undone)
    assert tree(ground.root) == before


@needs_root
def test_a_file_of_somebody_else_is_not_replaced_by_one_of_ours(place: Path) -> None:
    os.chown(place, 4242, 4242)
    ground = Ground(place, 4242)
    ground.call(ground.build)
    os.chown(f"{ground.root}/edit", 1234, 1235)
    before = tree(ground.root)

    def run() -> None:
        with pytest.raises(Conflict, match="edit") as caught:
            ground.apply()
        assert caught.value.code == "not_permitted"

    ground.call(run)
    assert tree(ground.root) == before
    assert applying.state(ground.journal) == "reversed"


def test_a_new_file_has_the_group_that_its_directory_gives(ground: Ground) -> None:
    if ground.uid != 0:
        pytest.skip("needs a second group")
    os.chown(f"{ground.root}/mode", 0, 77)
    os.chmod(f"{ground.root}/mode", 0o2755)
    operation = Operation(ground.root, "mode/fresh", None, text(b"x"))
    applying.apply(ground.journal, [operation])
    assert tree(ground.root)["mode/fresh"][3] == 77


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "", "a//b", "./a", "a\0b"])
def test_a_path_that_leads_out_is_refused(place: Path, path: str) -> None:
    with pytest.raises(Refused):
        applying.apply(str(place / "j" / "p" / "1"), [Operation(str(place), path, None, text(b"x"))])


def test_links_planted_in_parents_are_not_followed(ground: Ground) -> None:
    outside = ground.place / "outside"
    outside.mkdir()
    (outside / "inside").write_text("outside\n")
    os.chmod(outside, 0o777)
    operations = [Operation(ground.root, "kept/inside", sides_of([ground.root])("kept/inside"), text(b"ours"))]
    operations.append(Operation(ground.root, "kept/fresh", None, text(b"ours")))
    os.rename(f"{ground.root}/kept", f"{ground.root}/moved")
    os.symlink(outside, f"{ground.root}/kept")
    before = tree(str(ground.place))

    def run() -> None:
        for some in (operations, operations[1:]):
            with pytest.raises(Conflict):
                applying.apply(ground.journal + str(len(some)), some)

    assert ground.call(run) == 0
    shutil.rmtree(ground.place / "journal")
    os.mkdir(ground.place / "journal")
    after = tree(str(ground.place))
    assert after == {**before, "journal": after["journal"]}


def test_a_journal_that_leads_out_is_not_obeyed(ground: Ground) -> None:
    fatal = steps_of(ground, ground.apply).index("check")
    ground.again()
    assert ground.call(lambda: ground.apply(Counter(fatal))) == -signal.SIGKILL
    entries = Path(ground.journal, "entries.json")
    entries.write_text(entries.read_text().replace('"edit"', '"../outside"'))
    now = tree(ground.root)
    with pytest.raises((Refused, StateError)):
        applying.recover(ground.journal)
    assert tree(ground.root) == now
    assert applying.state(ground.journal) == "applying"


def test_a_journal_serves_once(ground: Ground) -> None:
    assert ground.call(ground.apply) == 0

    def run() -> None:
        with pytest.raises(InUse):
            applying.apply(ground.journal, [])

    assert ground.call(run) == 0


def test_nothing_to_do_is_done(ground: Ground) -> None:
    assert ground.call(lambda: None if applying.apply(ground.journal, []) == [] else os._exit(3)) == 0
    assert applying.state(ground.journal) == "applied"
    assert applying.pieces(ground.journal) == []


def test_what_was_never_begun_is_nothing_to_recover(place: Path) -> None:
    assert applying.recover(str(place / "nothing")) is None
    assert applying.state(str(place / "nothing")) == "preparing"


# -- killed


def check(ground: Ground, before: Tree, after: Tree) -> str:
    """After a recovery all is as it was before or as it should be after, and it says which."""
    told = ground.place / "said"

    def run() -> None:
        first = applying.recover(ground.journal)
        assert applying.recover(ground.journal) == first
        told.write_text(str(first))

    assert ground.call(run) == 0
    word = told.read_text()
    told.unlink()
    if word == "None":  # it had not even begun
        assert not os.path.exists(ground.journal)
        assert tree(ground.root) == before
        return "reversed"
    assert applying.state(ground.journal) == word
    now = tree(ground.root)
    assert now == (after if word == "applied" else before), (
        word,
        {k: (now.get(k), before.get(k)) for k in {*now, *before} if now.get(k) != before.get(k)},
    )
    left = {name.partition("-")[0] for name in os.listdir(ground.journal)}
    assert left <= {"shelves.json", "entries.json", "new", "old", word}
    return word


@pytest.mark.slow
def test_killed_at_any_step_it_is_as_before_or_as_after(ground: Ground) -> None:
    before, after = tree(ground.root), tree(ground.wanted)
    steps = steps_of(ground, ground.apply)
    assert {"prepare", "shelf", "stage", "sync", "note", "begin", "take", "rmdir", "add", "swap", "mode"} <= set(steps)
    assert steps[-5:] == ["check", "settle", "commit", "clear", "end"]
    words = []
    for number in range(len(steps)):
        ground.again()
        assert ground.call(lambda number=number: ground.apply(Counter(number))) == -signal.SIGKILL  # type: ignore[misc]
        words.append(check(ground, before, after))
    assert words == ["reversed"] * (len(steps) - 2) + ["applied"] * 2


@pytest.mark.parametrize(
    "at", ["swap", *(pytest.param(one, marks=pytest.mark.slow) for one in ("stage", "begin", "check", "clear", "end"))]
)
@pytest.mark.slow
def test_a_recovery_that_is_killed_at_any_step_goes_on_where_it_was(ground: Ground, at: str) -> None:
    before, after = tree(ground.root), tree(ground.wanted)
    steps = steps_of(ground, ground.apply)
    fatal = len(steps) - 1 - steps[::-1].index(at)
    recovery: list[str] | None = None
    number = 0
    while recovery is None or number < len(recovery):
        ground.again()
        assert ground.call(lambda: ground.apply(Counter(fatal))) == -signal.SIGKILL
        if recovery is None:
            recovery = steps_of(ground, lambda step: applying.recover(ground.journal, step))
            assert recovery
            continue
        for again in (number, number // 2, 0):  # killed once, and again, and again
            ended = ground.call(lambda again=again: applying.recover(ground.journal, Counter(again)) and None)  # type: ignore[misc]
            assert ended in (0, -signal.SIGKILL)
        assert check(ground, before, after) == ("applied" if at in ("clear", "end") else "reversed")
        number += 1


class SystemCalls:
    """Dies before the system call of that number, as far as Python makes it."""

    def __init__(self, fatal: int = -1) -> None:
        self.count = 0
        self.fatal = fatal

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        call = event == "c_call" and getattr(argument, "__module__", "") == "posix"
        if call or (event == "call" and frame.f_code.co_name == "_syscall"):
            if self.count == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1


def watched(calls: SystemCalls, function: Callable[[], object]) -> None:
    sys.setprofile(calls)
    try:
        function()
    finally:
        sys.setprofile(None)


def applied_until(ground: Ground, calls: SystemCalls) -> None:
    operations = ground.operations()
    watched(calls, lambda: applying.apply(ground.journal, operations))


def calls_of(ground: Ground) -> int:
    calls = SystemCalls()
    told = ground.place / "told"

    def run() -> None:
        applied_until(ground, calls)
        told.write_text(str(calls.count))

    assert ground.call(run) == 0
    number = int(told.read_text())
    told.unlink()
    return number


def killed_between_calls(ground: Ground, numbers: Callable[[int], list[int]]) -> set[str]:
    before, after = tree(ground.root), tree(ground.wanted)
    total = calls_of(ground)
    words = set()
    for number in numbers(total):
        ground.again()
        assert ground.call(lambda number=number: applied_until(ground, SystemCalls(number))) == -signal.SIGKILL  # type: ignore[misc]
        words.add(check(ground, before, after))
    return words


def some(first: int, total: int, count: int) -> list[int]:
    """So many, and the last ones, which clear up."""
    return [*range(first, total - 8, (total - first) // count), *range(total - 8, total)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_between_many_system_calls(ground: Ground) -> None:
    assert killed_between_calls(ground, lambda total: some(1, total, 80)) == {"applied", "reversed"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_recoveries_killed_between_system_calls(ground: Ground) -> None:
    before, after = tree(ground.root), tree(ground.wanted)
    total = calls_of(ground)
    chance = random.Random(6)
    for _ in range(70):
        ground.again()
        first = chance.randrange(total)
        ground.call(lambda first=first: applied_until(ground, SystemCalls(first)))  # type: ignore[misc]
        for _ in range(chance.randrange(1, 5)):
            later = chance.randrange(200)
            ground.call(lambda later=later: watched(SystemCalls(later), lambda: applying.recover(ground.journal)))  # type: ignore[misc]
        check(ground, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{syscalls.RENAME_EXCHANGE}, {syscalls.RENAME_EXCHANGE, syscalls.RENAME_NOREPLACE}])
def test_without_an_exchange_it_is_the_same(ground: Ground, flags: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    real = syscalls.renameat2

    def poorer(one: int, name: str, other: int, target: str, how: int) -> None:
        if how in flags:
            raise OSError(errno.EINVAL, "renameat2: not here")
        real(one, name, other, target, how)

    monkeypatch.setattr(syscalls, "renameat2", poorer)
    before, after = tree(ground.root), tree(ground.wanted)
    steps = steps_of(ground, ground.apply)
    assert "halfway" in steps
    assert tree(ground.root) == after
    for number in range(steps.index("begin"), len(steps), 4):
        ground.again()
        assert ground.call(lambda number=number: ground.apply(Counter(number))) == -signal.SIGKILL  # type: ignore[misc]
        check(ground, before, after)
    ground.again()
    words = killed_between_calls(ground, lambda total: some(total // 2, total, 20))
    assert words == {"applied", "reversed"}


# -- others who write at the same time


def in_place(path: str, token: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.write(token)


def rename_over(path: str, token: bytes) -> None:
    write(f"{path}.mine", token)
    os.rename(f"{path}.mine", path)


def delete(path: str, token: bytes) -> None:
    os.unlink(path)


def truncate(path: str, token: bytes) -> None:
    os.truncate(path, 1)


def make_link(path: str, token: bytes) -> None:
    os.symlink(token, f"{path}.mine")
    os.rename(f"{path}.mine", path)


def make_directory(path: str, token: bytes) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(path)
    os.mkdir(path)
    write(f"{path}/mine", token)


def change_mode(path: str, token: bytes) -> None:
    os.chmod(path, 0o604)


ACTIONS = [in_place, rename_over, delete, truncate, make_link, make_directory, change_mode]
TOKEN = b"what the user wrote"


def holds(top: str, token: bytes) -> bool:
    return any(token in (value if isinstance(value, bytes) else os.fsencode(str(value))) for *_, value, _ in tree(top).values())


class Writer:
    """Somebody else, at the step of that number."""

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.number, self.action, self.count = number, action, 0

    def __call__(self, name: str) -> None:
        if self.count == self.number:
            with contextlib.suppress(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError):
                self.action()
        self.count += 1


def raced(ground: Ground, path: str, number: int, action: Callable[[], object]) -> bool:
    """Whether it was applied; without that everything else is as it was."""
    before, after = tree(ground.root), tree(ground.wanted)
    named: list[str] | None = None
    try:
        applying.apply(ground.journal, ground.operations(), Writer(number, action))
    except Conflict as error:
        named = [one["path"] for one in error.detail["conflicts"]]  # type: ignore[attr-defined]
    assert named is None or path in named
    assert (named is None) == (applying.state(ground.journal) == "applied")
    wanted = after if applying.state(ground.journal) == "applied" else before
    now = tree(ground.root)
    assert rest(now, path) == rest(wanted, path)
    return applying.state(ground.journal) == "applied"


def telling(steps: list[str]) -> list[int]:
    """The first and the last of its kind in a row, and all that move a name of somebody's."""
    rows = [number for number in range(len(steps)) if not steps[number] == steps[number - 1] == (*steps, "")[number + 1]]
    return sorted({*rows, *(number for number, name in enumerate(steps) if name in ("take", "swap"))})


def rest(found: Tree, path: str) -> Tree:
    return {name: value for name, value in found.items() if name != path and not name.startswith(f"{path}/")}


@pytest.mark.parametrize("path", ["edit", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gone", "kept/big"))])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_somebody_else_at_any_step_never_loses_anything(place: Path, path: str, action: Callable[[str, bytes], None]) -> None:
    ground = Ground(place, os.geteuid())
    ground.build()
    steps = steps_of(ground, ground.apply)
    results = []
    for number in telling(steps):
        ground.again()
        target = f"{ground.root}/{path}"
        done: list[bool] = []

        def act(target: str = target, done: list[bool] = done) -> None:
            before = os.path.lexists(target)
            action(target, TOKEN)
            done.append(before)

        results.append(raced(ground, path, number, act))
        if action in (in_place, rename_over, make_link, make_directory) and done:
            assert holds(ground.root, TOKEN) or holds(ground.journal, TOKEN), steps[number]
            if not results[-1]:
                assert holds(ground.root, TOKEN), steps[number]  # what was reported is where its writer left it
    assert False in results
    assert results[-1]


@pytest.mark.parametrize("late", ["clear", "end"])
def test_what_is_written_to_a_new_file_that_is_taken_back_is_not_lost(place: Path, late: str) -> None:
    ground = Ground(place, os.geteuid())
    ground.build()
    held: list[Any] = []

    class Gone(Exception):
        pass

    def step(name: str) -> None:
        if name == "check":
            held.append(open(f"{ground.root}/edit", "r+b", buffering=0))  # noqa: SIM115  (closed below)
            raise Gone
        if name == late:
            held[0].write(TOKEN)

    with pytest.raises(Gone):
        ground.apply(step)
    held[0].close()
    assert Path(ground.root, "edit").read_bytes() == b"before\n"
    assert holds(ground.journal, TOKEN)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["edit", "gone"])
def test_what_is_written_through_an_open_descriptor_is_never_lost(place: Path, path: str) -> None:
    ground = Ground(place, os.geteuid())
    ground.build()
    steps = steps_of(ground, ground.apply)
    results = []
    for number in range(len(steps)):
        ground.again()
        with open(f"{ground.root}/{path}", "r+b", buffering=0) as held:
            applied = raced(ground, path, number, lambda held=held: held.write(TOKEN))  # type: ignore[misc]
            assert holds(ground.journal if applied else ground.root, TOKEN), steps[number]
        results.append(applied)
    assert results == [number >= steps.index("settle") for number in range(len(steps))]


def test_after_a_crash_what_somebody_changed_stays_as_it_is(place: Path) -> None:
    ground = Ground(place, os.geteuid())
    ground.build()
    before = tree(ground.root)
    fatal = steps_of(ground, ground.apply).index("check")
    for action in ACTIONS:
        for path in ("edit", "new/powers", "new/sub/file"):
            ground.again()
            assert ground.call(lambda: ground.apply(Counter(fatal))) == -signal.SIGKILL
            os.chmod(f"{ground.root}/new", 0o755)
            action(f"{ground.root}/{path}", TOKEN)
            os.chmod(f"{ground.root}/new", 0o555)
            changed = {name: value for name, value in tree(ground.root).items() if name == path or name.startswith(f"{path}/")}
            assert applying.recover(ground.journal) == "reversed"
            now = tree(ground.root)
            assert {name: value for name, value in now.items() if name in changed} == changed, (action, path)
            if path == "edit":
                assert rest(now, path) == rest(before, path)
                assert holds(ground.journal, b"before\n"), action
                assert [one.path for one in applying.meanwhile(ground.journal)] == [path]
                kept = applying.meanwhile(ground.journal)[0].kept
                assert kept is not None
                assert Path(kept).read_bytes() == b"before\n"


def hammer(path: str, log: str, chance: random.Random) -> None:
    """Writes one thing after the other there, and notes each before and after."""
    number = 0
    while True:
        number += 1
        token = f"token-{number}-".encode()
        action = chance.choice([in_place, rename_over, make_link, delete, truncate])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(log)  # it may take away itself what it wrote before
        with contextlib.suppress(OSError):
            action(path, token)
            if action in (in_place, rename_over, make_link):
                Path(f"{log}.new").write_bytes(token)
                os.rename(f"{log}.new", log)
        time.sleep(chance.random() * 0.002)


def raced_by_a_process(place: Path, seed: int) -> None:
    """What was written last, whole and at once, is at the path, or it was replaced and is in a journal."""
    ground = Ground(place, os.geteuid())
    ground.build()
    path, log = f"{ground.root}/edit", str(place / "log")
    child = os.fork()
    if child == 0:
        try:
            hammer(path, log, random.Random(seed))
        finally:
            os._exit(1)
    outcomes = set()
    try:
        for number in range(40):
            now = sides_of([ground.root])
            operation = Operation(ground.root, "edit", now("edit"), text(f"ours-{number}".encode()))
            try:
                applying.apply(str(place / "journal" / f"{number}" / "1"), [operation])
                outcomes.add("applied")
            except Conflict:
                outcomes.add("conflict")
    finally:
        os.kill(child, signal.SIGSTOP)
        token = Path(log).read_bytes() if os.path.exists(log) else b""
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert holds(ground.root, token) or holds(str(place / "journal"), token)
    assert not [name for name in os.listdir(ground.root) if name.startswith(".elsewhere")]
    assert outcomes


def test_a_process_that_writes_all_the_time_loses_nothing(place: Path) -> None:
    raced_by_a_process(place, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 10))
def test_many_processes_that_write_all_the_time_lose_nothing(place: Path, seed: int) -> None:
    raced_by_a_process(place, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_random_moments(ground: Ground) -> None:
    """By somebody who does not know where it is."""
    before, after = tree(ground.root), tree(ground.wanted)
    chance = random.Random(7)
    words = set()
    for _ in range(80):
        ground.again()
        child = os.fork()
        if child == 0:
            try:
                ground.call(ground.apply)
            finally:
                os._exit(0)
        os.kill(child, 0)
        os.waitpid(child, 0) if chance.random() < 0.01 else time.sleep(chance.random() * 0.03)
        for one in children_of(child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        if os.path.exists(ground.journal):
            words.add(check(ground, before, after))
    assert words == {"applied", "reversed"}


def children_of(process: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []


# -- hosts that do not give what is needed


def apart(function: Callable[[], None]) -> None:
    """In a mount namespace of its own."""

    def run() -> None:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        function()

    assert Ground(Path("/nonexistent"), os.geteuid()).call(run) == 0


def memory(place: str, size: str, uid: int = 0) -> None:
    os.makedirs(place, exist_ok=True)
    syscalls.mount("tmpfs", place, "tmpfs", 0, f"size={size},mode=755,uid={uid},gid={uid}")


@needs_root
@pytest.mark.parametrize("where", ["root", "journal", pytest.param("root/kept", marks=pytest.mark.slow)])
def test_across_file_systems_it_is_the_same(place: Path, where: str, uid: int) -> None:
    os.chown(place, uid, uid)
    ground = Ground(place, uid)

    def build() -> None:
        for name in ("root", "wanted", "journal"):
            os.makedirs(place / name, exist_ok=True)
            os.chown(place / name, uid, uid)
        memory(str(place / where), "32m", uid)

        def fill() -> None:
            build_before(ground.root)
            build_after(ground.wanted)

        ground.call(fill)

    def run() -> None:
        build()
        before, after = tree(ground.root), tree(ground.wanted)
        steps = steps_of(ground, ground.apply)
        assert tree(ground.root) == after
        pieces = {piece.path: piece for piece in applying.pieces(ground.journal)}
        assert shown(pieces["edit"])[1] == ("file", 0o644, b"before\n")
        for number in range(steps.index("begin") % 4, len(steps), 4):
            for name in ("root/kept", "root", "journal"):
                with contextlib.suppress(OSError):
                    syscalls.umount2(str(place / name), 0)
            remove_what_was_built(place)
            build()
            assert ground.call(lambda number=number: ground.apply(Counter(number))) == -signal.SIGKILL  # type: ignore[misc]
            check(ground, before, after)

    apart(run)


@pytest.mark.slow
@needs_root
def test_a_full_disk_at_any_moment_changes_nothing(place: Path, uid: int) -> None:
    """All on one small file system, with ever less of it free."""
    codes = []

    def run() -> None:
        free = 6 << 20
        while True:
            top = str(place / f"disk-{free}")
            memory(top, "16m", uid)
            ground = Ground(Path(top), uid)
            ground.call(ground.build)
            before, after = tree(ground.root), tree(ground.wanted)
            about = os.statvfs(top)
            with open(f"{top}/ballast", "wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, max(1, about.f_bavail * about.f_frsize - free))
            told = place / "told"

            def attempt(ground: Ground = ground, told: Path = told) -> None:
                try:
                    ground.apply()
                    told.write_text("applied")
                except StateError as error:
                    told.write_text(error.code)

            ground.call(attempt)
            code = told.read_text()
            codes.append(code)
            assert code in ("applied", "no_room")
            assert tree(ground.root) == (after if code == "applied" else before)
            syscalls.umount2(top, 0)
            os.rmdir(top)
            if free == 0:
                break
            free = max(0, free - (1 << 19 if free > 1 << 20 else 1 << 14))
        assert {*codes} == {"applied", "no_room"}

    os.chown(place, uid, uid)
    apart(run)


def test_a_limit_on_the_size_of_files_changes_nothing(ground: Ground) -> None:
    before = tree(ground.root)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))
        with pytest.raises(StateError) as caught:
            ground.apply()
        assert caught.value.code == "no_room"

    assert ground.call(run) == 0
    assert tree(ground.root) == before
    assert applying.state(ground.journal) == "reversed"


@needs_root
def test_a_part_that_is_read_only_changes_nothing(place: Path, uid: int) -> None:
    os.chown(place, uid, uid)
    ground = Ground(place, uid)
    ground.call(ground.build)

    def run() -> None:
        kept = f"{ground.root}/kept"
        syscalls.mount(kept, kept, None, syscalls.MS_BIND)
        syscalls.mount(None, kept, None, syscalls.MS_BIND | syscalls.MS_RDONLY | 0x20)  # MS_REMOUNT
        before = tree(ground.root)

        def attempt() -> None:
            with pytest.raises(Conflict) as caught:
                ground.apply()
            assert caught.value.code == "not_permitted"

        assert ground.call(attempt) == 0
        assert tree(ground.root) == before

    apart(run)


def test_a_permission_that_is_lost_on_the_way_is_waited_for(place: Path) -> None:
    uid = PEOPLE[-1]
    if uid == 0:
        pytest.skip("root may do everything")
    os.chown(place, uid, uid)
    ground = Ground(place, uid)
    ground.call(ground.build)
    before, after = tree(ground.root), tree(ground.wanted)

    def lose(name: str) -> None:
        if name == "swap":
            os.chmod(ground.root, 0o555)

    def run() -> None:
        with pytest.raises(ElsewhereError) as caught:
            ground.apply(lose)
        assert caught.value.code == "not_reversed"
        with pytest.raises(StateError):
            applying.recover(ground.journal)
        assert applying.state(ground.journal) == "applying"
        os.chmod(ground.root, 0o755)

    assert ground.call(run) == 0
    assert check(ground, before, after) == "reversed"


@pytest.mark.slow
def test_an_error_on_the_way_reverses_everything(ground: Ground) -> None:
    before = tree(ground.root)
    steps = steps_of(ground, ground.apply)

    class Gone(Exception):
        pass

    for number in range(len(steps) - 2):
        ground.again()

        def fail(number: int = number) -> None:
            def step(name: str, seen: list[str] = []) -> None:  # noqa: B006  (it is to remember)
                seen.append(name)
                if len(seen) == number + 1:
                    raise Gone

            count = descriptors()
            with pytest.raises(Gone):
                ground.apply(step)
            assert descriptors() == count

        assert ground.call(fail) == 0
        assert tree(ground.root) == before
        assert applying.state(ground.journal) == "reversed"


@pytest.mark.parametrize("hit", [KeyboardInterrupt(), OSError(errno.EIO, "no")], ids=["interrupt", "error"])
def test_what_counts_already_is_not_reversed(place: Path, monkeypatch: pytest.MonkeyPatch, hit: BaseException) -> None:
    ground = Ground(place, os.geteuid())
    ground.build()
    after, hits = tree(ground.wanted), [hit]

    def fsync(_: int) -> None:
        if hits and os.path.exists(f"{ground.journal}/committed"):
            raise hits.pop()

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt) if isinstance(hit, KeyboardInterrupt) else contextlib.nullcontext():
        ground.apply()
    assert (hits, tree(ground.root), applying.state(ground.journal)) == ([], after, "applied")
    assert "edit" in [piece.path for piece in applying.pieces(ground.journal)]


def test_two_do_not_change_a_root_at_the_same_time(place: Path) -> None:
    ground = Ground(place, os.geteuid())
    ground.build()
    seen = []

    def step(name: str) -> None:
        if name == "check":
            assert applying.recover(ground.journal) is None  # somebody is at it
            for lock in (place / "journal").glob(".lock-*"):
                with open(lock, "rb") as stream, pytest.raises(BlockingIOError):
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                seen.append(lock)

    ground.apply(step)
    assert len(seen) == 1


# -- what is written down beside it


@pytest.mark.parametrize("count", [1, 9])
def test_contents_are_on_the_disk_before_anything_leads_to_them(place: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    synced: list[str] = []
    for module, name in ((os, "fsync"), (syscalls, "syncfs")):
        monkeypatch.setattr(module, name, lambda fd: synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    pieces = [Piece("/", f"{number}", None, text(b"0123456789abcdef" * 2000)) for number in range(count)]
    freezing.freeze(pieces, str(place / "change"))
    assert synced == ["0.after" if count == 1 else "change", "pieces.json"]
    (place / "change" / "0.after").write_bytes(b"")
    with pytest.raises(Broken, match="has 0 bytes, and 32000 were written"):
        freezing.thawed(str(place / "change"))


def test_two_who_look_at_once_do_not_stumble(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State.open(str(place / "state"))
    mark = Path(state.room("journal"), "unfinished", "p1")
    mark.parent.mkdir()
    mark.touch()

    def load(_: State, promotion: str) -> None:
        mark.unlink()
        raise NotFound("promotion_not_found", promotion)

    monkeypatch.setattr(records, "load", load)
    assert records.unfinished(state) == []
