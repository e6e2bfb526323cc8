"""Files of a sandbox from the host's side: whatever the sandbox plants or swaps, nothing outside is read, written or waited for."""

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elsewhere.errors import ElsewhereError, InUse, NotFound, Refused, StateError, UsageError
from elsewhere.linux import syscalls
from elsewhere.sandbox.access import descriptors
from elsewhere.sandbox.access.files import Entry, Files
from elsewhere.sandbox.ids import FIRST_ID

ROOT = os.geteuid() == 0
PRECIOUS = b"of the host"
DEPTH = 5000
USER = 4242


def descriptors_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def outside(place: Path) -> Path:
    """What lies beside the root and must never be reached."""
    (place / "outside").mkdir()
    (place / "outside/precious").write_bytes(PRECIOUS)
    return place / "outside"


@pytest.fixture
def root(place: Path, outside: Path) -> Path:
    (place / "root/project").mkdir(parents=True)
    return place / "root"


def confined(fd: int, project: str = "/project", shift: int = 0) -> Files:
    """If the root did not hold, all that follows would be done to this machine, perhaps by root: then nothing is."""
    made = Files(fd, project, shift)
    with made.held("/") as handle:
        assert os.path.samestat(os.fstat(handle), os.fstat(fd))
    return made


@pytest.fixture
def files(root: Path) -> Iterator[Files]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    before = descriptors_open()
    yield confined(fd)
    assert descriptors_open() == before
    os.close(fd)


@contextmanager
def refusing(kind: type[ElsewhereError], code: str, *mentions: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.code == code
    assert caught.value.hint
    for text in mentions:
        assert text in caught.value.message


@contextmanager
def as_user(*paths: Path) -> Iterator[None]:
    """As somebody without powers; what is named becomes theirs."""
    if not ROOT:
        yield
        return
    for path in paths:
        os.chown(path, USER, USER, follow_symlinks=False)
    os.setegid(USER)
    os.seteuid(USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextmanager
def attacker(code: str, *arguments: str | Path) -> Iterator[None]:
    """A process that does the same thing again and again until it is killed; it says when it has begun."""
    program = f"import os, sys, contextlib\nsys.stdout.write('x')\nsys.stdout.flush()\n{code}"
    process = subprocess.Popen([sys.executable, "-S", "-c", program, *map(str, arguments)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.read(1) == b"x"
        yield
        assert process.poll() is None, "the attacker gave up"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


SWAPPER = """
place, outside = sys.argv[1:]
directory, spare, link = place + '/swapped', place + '/spare', place + '/link'
while True:
    with contextlib.suppress(OSError):
        os.symlink(outside, link)
    with contextlib.suppress(OSError):
        os.rename(directory, spare)
    with contextlib.suppress(OSError):
        os.rename(link, directory)
    with contextlib.suppress(OSError):
        os.unlink(directory)
    with contextlib.suppress(OSError):
        os.rename(spare, directory)
    with contextlib.suppress(OSError):
        os.makedirs(directory + '/precious/a/precious')
"""


def test_what_is_written_is_read_and_lies_where_it_was_said(files: Files, root: Path) -> None:
    files.write("a/b/text", "grüße\r\n")
    assert files.read_text("a/b/text") == "grüße\r\n"
    assert (root / "project/a/b/text").read_bytes() == "grüße\r\n".encode()
    files.write("/etc/binary", b"\0\xff")
    assert files.read("/etc/binary") == b"\0\xff"
    assert (root / "etc/binary").stat().st_mode & 0o7777 == 0o644
    assert sorted(os.listdir(root / "project/a/b")) == ["text"]
    assert files.read(Path("a") / "b" / "text") == files.read("./a//b/../b/text")


def test_a_write_without_parents_makes_none(files: Files, root: Path) -> None:
    with refusing(NotFound, "file_not_found", "a/b"):
        files.write("a/b", b"", parents=False)
    assert os.listdir(root / "project") == []


def test_a_write_keeps_the_mode_but_no_powers(files: Files, root: Path) -> None:
    tool = root / "project/tool"
    tool.touch()
    tool.chmod(0o4751)
    files.write("tool", b"new")
    assert tool.stat().st_mode & 0o7777 == 0o751
    files.write("tool", b"new", mode=0o600)
    assert tool.stat().st_mode & 0o7777 == 0o600


def test_the_callers_umask_does_not_matter(files: Files, root: Path) -> None:
    before = os.umask(0o077)
    try:
        files.write("new/file", b"")
    finally:
        os.umask(before)
    assert (root / "project/new").stat().st_mode & 0o777 == 0o755
    assert (root / "project/new/file").stat().st_mode & 0o777 == 0o644


def test_links_lead_where_they_lead_inside(files: Files, root: Path, outside: Path) -> None:
    (root / "etc").mkdir()
    (root / "etc/name").write_text("inside")
    (root / "project/absolute").symlink_to("/etc/name")
    (root / "project/relative").symlink_to("../../../../../../etc/name")
    (root / "project/up").symlink_to("../../..")
    for path in ("absolute", "relative", "up/etc/name", "../../../etc/name"):
        assert files.read(path) == b"inside"
    for number, leads_to in enumerate((outside / "precious", "../../outside/precious", outside)):
        (root / f"project/bad{number}").symlink_to(leads_to)
        with refusing(NotFound, "file_not_found"):
            files.read(f"bad{number}/precious" if leads_to == outside else f"bad{number}")
    files.write("absolute", b"through")
    assert (root / "project/absolute").is_symlink()
    assert (root / "etc/name").read_bytes() == b"through"


def test_a_write_through_a_link_to_the_outside_stays_inside(files: Files, root: Path, outside: Path) -> None:
    (root / "project/link").symlink_to(outside / "precious")
    (root / "project/directory").symlink_to(outside)
    files.write("link", b"new")
    assert (root / str(outside)[1:] / "precious").read_bytes() == b"new"
    with refusing(UsageError, "directory_not_empty"):
        files.remove(str(outside))
    files.write("directory/more", b"more")
    assert sorted(os.listdir(outside)) == ["precious"]
    assert (outside / "precious").read_bytes() == PRECIOUS


def test_loops_of_links_are_refused(files: Files, root: Path) -> None:
    (root / "project/a").symlink_to("b")
    (root / "project/b").symlink_to("a")
    (root / "project/self").symlink_to("self/self")
    actions: list[Callable[[str], object]] = [files.read, files.list, lambda path: files.write(path, b""), files.mkdir]
    for path in ("a", "self", "a/x"):
        for action in actions:
            with refusing(Refused, "outside_root", path):
                action(path)
    assert files.exists("a")
    assert not files.exists("a/x")
    assert files.stat("a") == Entry("a", "link", 1, 0o777, os.getuid(), os.getgid(), files.stat("a").mtime, "b")
    files.remove("a")
    assert not files.exists("a")


def test_nothing_but_regular_files_is_opened(files: Files, root: Path) -> None:
    """Each of these would block, act or fail in its own way if it were opened."""
    os.mkfifo(root / "project/fifo")
    (root / "project/link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "project/socket"))
    kinds = {"fifo": "fifo", "socket": "socket", "link": "link"}
    if ROOT:
        os.mknod(root / "project/device", stat.S_IFCHR | 0o666, os.makedev(5, 0))
        kinds["device"] = "device"
    for path, kind in kinds.items():
        assert files.stat(path).kind == kind
        with refusing(UsageError, "not_a_regular_file", path):
            files.read(path)
        with refusing(UsageError, "not_a_regular_file", path):
            files.write(path, b"")
        with refusing(UsageError, "not_a_directory", path):
            files.list(path)
    assert [(entry.name, entry.kind) for entry in files.list()] == sorted(kinds.items())
    for path in kinds:
        files.remove(path)
    assert files.list() == []


def test_magic_links_are_not_followed(place: Path, outside: Path) -> None:
    """A root with the host's own /proc in it: the worst that could be."""
    held = os.open(outside, os.O_RDONLY)
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        whole = Files(fd, str(place))
        me = f"/proc/{os.getpid()}"
        assert whole.stat(f"{me}/fd/{held}").kind == "link"
        for path in (f"{me}/fd/{held}/precious", f"{me}/root/etc/passwd", f"{me}/cwd/x", f"{me}/exe", f"{me}/fd/{held}"):
            with refusing(Refused, "outside_root", path):
                whole.read(path)
        for path in (f"{me}/fd/{held}", f"{me}/root"):
            with refusing(Refused, "outside_root", path):
                whole.write(f"{path}/new", b"")
            with refusing(Refused, "outside_root", path):
                whole.list(path)
            with refusing(Refused, "outside_root", path):
                whole.remove(f"{path}/precious")
    finally:
        os.close(fd)
        os.close(held)
    assert os.listdir(outside) == ["precious"]


def test_what_belongs_to_the_kernel_is_neither_read_nor_changed(place: Path) -> None:
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    (place / "link").symlink_to("/proc/version")
    try:
        whole = Files(fd, str(place))
        for path in ("link", "/proc/sys/kernel/core_pattern", "/sys/kernel/notes"):
            if whole.exists(path):
                with refusing(Refused, "outside_root", path):
                    whole.read(path)
        for path in ("link", "/proc/sys/kernel/core_pattern"):
            with refusing(Refused, "outside_root", path):
                whole.write(path, b"x")
        for above in ("/proc", "/sys", "/sys/fs/cgroup/unified"):
            if os.path.ismount(above):
                with refusing(Refused, "outside_root", above):
                    whole.mkdir(f"{above}/new")
        with refusing(Refused, "outside_root", "/proc/version"):
            whole.rename("/proc/version", "version")
        assert whole.stat("/proc/version").kind == "file"
    finally:
        os.close(fd)


def test_sizes_beyond_the_limit_are_refused_by_name(files: Files, root: Path) -> None:
    with (root / "project/huge").open("wb") as stream:
        stream.truncate(1 << 40)
    with refusing(UsageError, "file_too_large", "huge", str(1 << 40)):
        files.read("huge")
    files.write("small", b"12345")
    assert files.read("small", limit=5) == b"12345"
    assert files.read("small", limit=None) == b"12345"
    with refusing(UsageError, "file_too_large", "small", "5 bytes"):
        files.read_text("small", limit=4)
    with refusing(UsageError, "directory_too_large"):
        files.list("/project", limit=1)


def test_a_file_that_grows_is_read_as_far_as_it_reached(files: Files, root: Path) -> None:
    (root / "project/log").write_bytes(b"x" * 4096)
    code = """
stream = open(sys.argv[1], 'ab', buffering=0)
while True:
    stream.write(b'x' * 4096)
    if stream.tell() > 1 << 24:
        stream.truncate(4096)
"""
    with attacker(code, root / "project/log"):
        for _ in range(10):
            assert set(files.read("log", limit=None)) == {ord("x")}


def test_bytes_that_are_no_text_are_said_to_be_none(files: Files) -> None:
    files.write("latin", b"\xe9")
    with refusing(UsageError, "not_utf8", "latin"):
        files.read_text("latin")
    assert files.read_text("latin", errors="surrogateescape") == "\udce9"
    files.write("latin", "\udce9")
    assert files.read("latin") == b"\xe9"


def test_a_lease_held_inside_does_not_make_us_wait(files: Files, root: Path) -> None:
    files.write("leased", b"x")
    held = os.open(root / "project/leased", os.O_RDWR)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with refusing(InUse, "file_busy", "leased"):
            files.read("leased")
    finally:
        os.close(held)
        signal.signal(signal.SIGIO, before)
    assert files.read("leased") == b"x"


@pytest.mark.parametrize("name", [b"new\nline", b"\xff\xfe", b"-rf", b" ", b"*", b"x" * 255, "日本".encode()], ids=ascii)
def test_names_of_any_kind(files: Files, root: Path, name: bytes) -> None:
    text = os.fsdecode(name)
    files.write(text, name)
    assert files.read(text) == name
    assert [entry.name for entry in files.list()] == [text]
    assert os.listdir(os.fsencode(root / "project")) == [name]
    files.rename(text, "plain")
    files.rename("plain", text)
    files.remove(text)
    assert not files.exists(text)


def test_paths_that_no_file_can_have(files: Files) -> None:
    actions: list[Callable[[str], object]] = [files.read, files.list, files.stat, files.exists, files.remove, files.mkdir]
    for action in actions:
        with refusing(UsageError, "nul_byte"):
            action("a\0b")
        with refusing(UsageError, "bad_path"):
            action("\ud800")
    with refusing(UsageError, "bad_path"):
        files.write("x" * 256, b"")
    with refusing(UsageError, "bad_path"):
        files.read("x/" * 3000)


def test_what_is_missing_or_of_the_wrong_kind_is_named(files: Files) -> None:
    files.write("file", b"")
    files.mkdir("directory")
    with refusing(NotFound, "file_not_found", "missing"):
        files.read("missing")
    with refusing(NotFound, "file_not_found", "missing"):
        files.list("missing")
    with refusing(NotFound, "file_not_found", "missing"):
        files.stat("missing")
    with refusing(NotFound, "file_not_found", "missing"):
        files.remove("missing", recursive=True)
    with refusing(NotFound, "file_not_found", "missing"):
        files.rename("missing", "new")
    with refusing(UsageError, "is_a_directory", "directory"):
        files.read("directory")
    for path in ("directory", "directory/", "new/", "/", "..", "."):
        with refusing(UsageError, "is_a_directory"):
            files.write(path, b"")
    with refusing(UsageError, "not_a_directory", "file"):
        files.list("file")
    for path in ("file/below", "file/"):
        with refusing(UsageError, "not_a_directory", path):
            files.stat(path)
        assert not files.exists(path)
    with refusing(UsageError, "not_a_directory", "file/below/deeper"):
        files.write("file/below/deeper", b"")


def test_directories_are_made_with_all_above_them(files: Files, root: Path) -> None:
    files.mkdir("a/b/c", mode=0o700)
    assert (root / "project/a/b").stat().st_mode & 0o777 == 0o755
    assert (root / "project/a/b/c").stat().st_mode & 0o777 == 0o700
    files.mkdir("a/b/c", mode=0o777)
    assert files.stat("a/b/c").mode == 0o700
    files.mkdir("/")
    files.mkdir("a/b/../b/./d/")
    with refusing(UsageError, "file_exists", "a/b"):
        files.mkdir("a/b", exist_ok=False)
    with refusing(NotFound, "file_not_found", "x/y"):
        files.mkdir("x/y", parents=False)
    with refusing(NotFound, "file_not_found", "x/../y"):
        files.mkdir("x/../y")
    (root / "project/dangling").symlink_to("nowhere")
    with refusing(UsageError, "not_a_directory", "dangling/x"):
        files.mkdir("dangling/x")
    (root / "project/link").symlink_to("/project/a")
    files.mkdir("link/new")
    assert (root / "project/a/new").is_dir()
    assert not (root / "project/nowhere").exists()


def test_removing_never_follows_a_link(files: Files, root: Path, outside: Path) -> None:
    (root / "project/tree/sub").mkdir(parents=True)
    for directory in (root / "project", root / "project/tree", root / "project/tree/sub"):
        (directory / "absolute").symlink_to(outside)
        (directory / "relative").symlink_to("../../outside")
        (directory / "up").symlink_to("..")
    files.remove("absolute", recursive=True)
    files.remove("relative/")
    files.remove("up")
    with refusing(UsageError, "directory_not_empty", "tree"):
        files.remove("tree")
    files.remove("tree", recursive=True)
    assert files.list() == []
    assert (outside / "precious").read_bytes() == PRECIOUS


def test_the_root_the_project_and_what_it_lies_in_stay(place: Path, root: Path) -> None:
    (root / "home/me/project/keep").mkdir(parents=True)
    (root / "home/link").symlink_to("me/project")
    fd = os.open(root, os.O_PATH)
    files = confined(fd, "/home/me/project")
    try:
        for path in ("/", "..", ".", "", "/home", "/home/", "/home/me/.", "../project", "/home/link/../../me", "keep/.."):
            with refusing(Refused, "protected_path", path):
                files.remove(path, recursive=True)
            with refusing(Refused, "protected_path", path):
                files.rename(path, "/elsewhere")
        (root / "empty").mkdir()
        (root / "home/me/project/keep").rmdir()
        with refusing(Refused, "protected_path"):
            files.rename("/empty", "/home/me/project")
        files.remove("/home/link", recursive=True)
        assert files.exists("/home/me/project")
    finally:
        os.close(fd)


def deep(top: Path, depth: int = DEPTH) -> None:
    top.mkdir()
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for level in range(depth):
        os.mkdir("deep", dir_fd=here)
        if level % 100 == 0:
            os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here))
        below = os.open("deep", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_a_tree_deeper_than_any_limit_is_removed(files: Files, root: Path) -> None:
    deep(root / "project/tree")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        files.remove("tree", recursive=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert files.list() == []


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o200, 0o300, 0o400, 0o500, 0o600])
def test_closed_directories_are_said_to_be_closed_and_can_be_removed(files: Files, root: Path, mode: int) -> None:
    inner = root / "project/tree/inner"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    root.parent.chmod(0o755)
    with as_user(root / "project", root / "project/tree", inner, inner / "file"):
        (root / "project/tree/inner").chmod(mode)
        if not mode & 0o400:
            with refusing(Refused, "file_denied", "tree/inner"):
                files.list("tree/inner")
        if not mode & 0o100:
            with refusing(Refused, "file_denied", "tree/inner/file"):
                files.read("tree/inner/file")
        if mode & 0o300 != 0o300:
            with refusing(Refused, "file_denied", "tree/inner/new"):
                files.write("tree/inner/new", b"")
        (root / "project/tree").chmod(mode)
        files.remove("tree", recursive=True)
        assert files.list() == []


def test_another_mount_below_a_tree_is_not_emptied(files: Files, root: Path) -> None:
    """Tried with the file system's number, since a mount needs a namespace of its own."""
    (root / "project/tree/mount").mkdir(parents=True)
    (root / "project/tree/mount/file").touch()
    top = os.open(root / "project/tree", os.O_RDONLY)
    with pytest.raises(OSError, match="another mount") as caught:
        descriptors._empty(top, os.fstat(top).st_dev + 1)
    assert caught.value.errno == errno.EBUSY
    assert (root / "project/tree/mount/file").exists()


def test_renaming(files: Files, root: Path) -> None:
    files.write("a", b"a")
    files.write("b", b"b")
    with refusing(UsageError, "file_exists", "b"):
        files.rename("a", "b", overwrite=False)
    assert files.read("b") == b"b"
    files.rename("a", "b")
    assert files.read("b") == b"a"
    files.rename("b", "c", overwrite=False)
    files.mkdir("directory/below")
    with refusing(UsageError, "is_a_directory", "directory"):
        files.rename("c", "directory")
    with refusing(UsageError, "not_a_directory", "c"):
        files.rename("directory", "c")
    with refusing(UsageError, "into_itself", "directory"):
        files.rename("directory", "directory/below/x")
    files.write("other/x", b"")
    with refusing(UsageError, "directory_not_empty", "directory"):
        files.rename("other", "directory")
    if os.stat("/dev/shm").st_dev != os.stat(root).st_dev:
        fd = os.open("/", os.O_PATH)
        with refusing(UsageError, "cannot_rename", "/dev/shm/x"):
            Files(fd, str(root / "project")).rename("c", "/dev/shm/x")
        os.close(fd)
    (root / "project/link").symlink_to("nowhere")
    files.rename("link", "moved")
    assert files.stat("moved").target == "nowhere"


def test_the_fallback_for_file_systems_without_a_careful_rename(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(syscalls, "renameat2", missing)
    files.write("a", b"a")
    files.rename("a", "b", overwrite=False)
    files.write("a", b"new")
    with refusing(UsageError, "file_exists", "b"):
        files.rename("a", "b", overwrite=False)
    assert files.read("b") == b"a"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_finds_no_room_leaves_everything_as_it_was(
    files: Files, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    files.write("file", b"old")
    real = os.write
    calls = []

    def full(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(number, os.strerror(number))
        return real(fd, data[:3])

    monkeypatch.setattr(os, "write", full)
    for path in ("file", "new"):
        calls.clear()
        with refusing(StateError, "no_room", path):
            files.write(path, b"0123456789")
    monkeypatch.undo()
    assert os.listdir(root / "project") == ["file"]
    assert files.read("file") == b"old"


def test_a_write_over_the_limit_for_files_leaves_everything_as_it_was(files: Files, root: Path) -> None:
    files.write("file", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with refusing(UsageError, "file_too_large", "file"):
            files.write("file", b"x" * (1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(root / "project") == ["file"]
    assert files.read("file") == b"old"


def test_short_writes_are_continued(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    files.write("file", bytes(range(256)))
    assert files.read("file") == bytes(range(256))


def test_other_hard_links_keep_the_old_content(files: Files, root: Path, outside: Path) -> None:
    os.link(outside / "precious", root / "project/hard")
    files.write("hard", b"new")
    assert (outside / "precious").read_bytes() == PRECIOUS


def test_a_race_in_the_kernel_is_tried_again_and_then_said(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    real = syscalls.openat2
    left = [100]

    def racing(*arguments: object) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EAGAIN, "again")
        return real(*arguments)  # type: ignore[arg-type]

    files.write("file", b"x")
    monkeypatch.setattr(syscalls, "openat2", racing)
    assert files.read("file") == b"x"
    left[0] = 1 << 30
    with refusing(InUse, "file_busy", "file"):
        files.read("file")


@pytest.mark.skipif(not ROOT, reason="giving files to other ids needs root")
def test_files_of_roots_sandboxes_belong_to_somebody_inside(root: Path) -> None:
    os.chown(root / "project", FIRST_ID + 1000, FIRST_ID + 1000)
    (root / "project/theirs").touch()
    os.chown(root / "project/theirs", FIRST_ID + 1000, FIRST_ID + 1001)
    (root / "project/nobodys").touch()
    (root / "project/setgid").mkdir()
    os.chown(root / "project/setgid", FIRST_ID, FIRST_ID + 50)
    (root / "project/setgid").chmod(0o2700)
    fd = os.open(root, os.O_PATH)
    powers = syscalls.capget()
    try:
        files = confined(fd, "/project", FIRST_ID)
        for path in ("theirs", "new/file", "nobodys", "setgid/below/file"):
            files.write(path, b"x")
        files.mkdir("made")
        assert {entry.name: (entry.uid, entry.gid) for entry in files.list()} == {
            "theirs": (1000, 1001),
            "new": (0, 0),
            "nobodys": (0, 0),
            "made": (0, 0),
            "setgid": (0, 50),
        }
        assert (files.stat("new/file").uid, files.stat("setgid/below/file").gid) == (0, 50)
        assert files.stat("setgid/below").mode == 0o2755
        assert (files.stat(".").uid, files.stat("/").uid) == (1000, 65534)
        assert (root / "project/theirs").stat().st_uid == FIRST_ID + 1000
        files.rename("new", "moved")
        files.remove("moved", recursive=True)
        with pytest.raises(ElsewhereError):
            files.write("made", b"")
    finally:
        os.close(fd)
    # The thread is its own again, with all its powers.
    assert syscalls.capget() == powers
    (root / "mine").touch()
    assert (root / "mine").stat().st_uid == 0


REALM = """
import os, sys
sys.path.insert(0, sys.argv[2])
from elsewhere.linux import syscalls
syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
print('unshared', flush=True)
sys.stdin.readline()
os.setgid(0)
os.setuid(0)
syscalls.mount(None, '/', None, syscalls.MS_REC | syscalls.MS_PRIVATE)
syscalls.mount('tmpfs', sys.argv[1], 'tmpfs', 0)
os.mkdir(sys.argv[1] + '/project', 0o700)
os.mkdir(sys.argv[1] + '/project/theirs', 0o700)
os.chown(sys.argv[1] + '/project/theirs', 1000, 1000)
print('mounted', flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not ROOT, reason="a user namespace with many ids needs root")
def test_a_file_system_of_the_sandboxs_own_takes_what_root_writes(root: Path) -> None:
    """It does not know the host's root at all: made as that, every file would be refused (EOVERFLOW)."""
    source = Path(syscalls.__file__).parent.parent.parent
    root.parent.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", REALM, str(root), str(source)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "unshared\n":
            pytest.skip("this host allows no user namespaces")
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{kind}").write_text(f"0 {FIRST_ID} 65536\n")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "mounted\n"
        fd = os.open(f"/proc/{process.pid}/root{root}", os.O_PATH)
        try:
            files = confined(fd, "/project", FIRST_ID)
            files.write("theirs/below/file", "text")
            files.write("theirs/below/file", "again")
            files.rename("theirs/below", "moved")
            assert files.read("moved/file") == b"again"
            assert (files.stat("moved/file").uid, files.stat("theirs").uid) == (0, 1000)
            files.remove("moved", recursive=True)
            assert [entry.name for entry in files.list()] == ["theirs"]
        finally:
            os.close(fd)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert os.listdir(root / "project") == []


def test_directories_swapped_for_links_lead_nowhere_else(files: Files, root: Path, outside: Path) -> None:
    """What the attacker reaches for is `outside/precious`, as a file and as a directory to be emptied."""
    (outside / "precious").unlink()
    (outside / "precious").mkdir()
    (outside / "precious/a").write_bytes(PRECIOUS)
    (root / "project/swapped/precious").mkdir(parents=True)
    done = 0
    with attacker(SWAPPER, root / "project", outside):
        for number in range(2000):
            with suppress(ElsewhereError):
                match number % 8:
                    case 0:
                        files.write("swapped/precious/a", b"of the sandbox", parents=False)
                    case 1:
                        assert files.read("swapped/precious/a") != PRECIOUS
                    case 2:
                        files.remove("swapped/precious", recursive=True)
                    case 3:
                        files.mkdir("swapped/precious/b/c")
                    case 4:
                        files.remove("swapped", recursive=True)
                    case 5:
                        files.rename("swapped/precious/a", "swapped/precious/b")
                    case 6:
                        files.list("swapped/precious")
                    case 7:
                        files.remove("swapped/precious/a")
                done += 1
    assert done, "the attacker never let anything through: nothing was tried"
    assert {path.relative_to(outside).as_posix() for path in outside.rglob("*")} == {"precious", "precious/a"}
    assert (outside / "precious/a").read_bytes() == PRECIOUS


def test_removing_a_tree_that_is_filled_again_ends(files: Files, root: Path) -> None:
    code = """
n = 0
while True:
    n += 1
    with contextlib.suppress(OSError):
        os.makedirs(sys.argv[1] + f'/{n % 7}/x/y/z')
"""
    (root / "project/tree").mkdir()
    with attacker(code, root / "project/tree"):
        for _ in range(20):
            with suppress(ElsewhereError):
                files.remove("tree", recursive=True)
    files.mkdir("tree")
    files.remove("tree", recursive=True)
    assert files.list() == []


@pytest.mark.parametrize("seed", range(5))
def test_random_work_is_what_the_operating_system_would_have_done(files: Files, root: Path, place: Path, seed: int) -> None:
    """Against plain calls of `os` in a second tree, which has no links out of itself."""
    chance = random.Random(seed)
    (place / "model").mkdir()
    model = place / "model"
    names = ["a", "b", "c", "d\n", "e"]

    def path() -> str:
        return "/".join(chance.choice(names) for _ in range(chance.randint(1, 3)))

    def both(ours: Callable[[], object], plain: Callable[[], object], *, same_error: bool = True) -> None:
        outcomes = []
        for action in (ours, plain):
            try:
                outcomes.append(action())
            except OSError as error:
                outcomes.append(type(error) if not isinstance(error, ElsewhereError) else error.code)
            except ElsewhereError as error:
                outcomes.append(error.code)
        codes = {
            FileNotFoundError: "file_not_found", NotADirectoryError: "not_a_directory", IsADirectoryError: "is_a_directory",
            FileExistsError: "file_exists",
        }  # fmt: skip
        mine, theirs = outcomes
        if isinstance(theirs, type):
            assert issubclass(theirs, OSError)
            assert isinstance(mine, str)
            if same_error:
                assert mine == codes.get(theirs, mine)
        else:
            assert mine == theirs

    def step(one: str, other: str, content: bytes, verb: int) -> None:
        here, there = model / one, model / other

        def put() -> None:
            here.write_bytes(content)

        match verb:
            case 0 | 1:
                both(lambda: files.write(one, content, parents=False), put)
            case 2:
                both(lambda: files.mkdir(one), lambda: os.makedirs(here, exist_ok=True), same_error=False)
            case 3:
                both(lambda: files.read(one), here.read_bytes)
            case 4:
                both(lambda: files.rename(one, other), lambda: os.rename(here, there), same_error=False)
            case 5:
                both(lambda: [entry.name for entry in files.list(one)], lambda: sorted(os.listdir(here)))
            case 6 if here.is_dir() and not here.is_symlink():
                both(lambda: files.remove(one, recursive=True), lambda: shutil.rmtree(here))
            case 6:
                both(lambda: files.remove(one), here.unlink)
            case 7 if not os.path.lexists(here) and here.parent.is_dir():
                target = chance.choice(["a", "b/c", "../a", "d\n"])
                (root / "project" / one).symlink_to(target)
                here.symlink_to(target)

    for _ in range(400):
        step(path(), path(), chance.randbytes(chance.randint(0, 20)), chance.randint(0, 7))
        assert tree(root / "project") == tree(model)


def tree(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        name = path.relative_to(top).as_posix()
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found
