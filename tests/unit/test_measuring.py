"""How much a tree takes: right where it can be compared with du, and unharmed by trees that were made to harm it."""

import os
import socket
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from elsewhere.linux import measuring, probe
from elsewhere.linux import syscalls as sys_
from elsewhere.linux.measuring import Used, used

SOURCE = Path(measuring.__file__).parents[2]


def measure(path: Path, **more: float) -> Used:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        before = len(os.listdir("/proc/self/fd"))
        found = used(fd, **more)  # type: ignore[arg-type]
        assert len(os.listdir("/proc/self/fd")) == before, "descriptors were left open"
        return found
    finally:
        os.close(fd)


def du(path: Path) -> Used:
    """The same, said by others; du counts the directory itself, too."""
    said = subprocess.run(["du", "-sx", "-B1", path], check=True, capture_output=True).stdout
    names = subprocess.run(["find", path, "-xdev", "-mindepth", "1", "-print0"], check=True, capture_output=True).stdout
    return Used(int(said.split()[0]) - path.stat().st_blocks * 512, names.count(b"\0"), complete=True)


def deep(place: Path, levels: int, every: int = 1) -> None:
    """One directory in another; each so many have two more and a file, to which the walk has to come back."""
    here = os.open(place, os.O_RDONLY)
    for level in range(levels):
        os.mkdir("m", dir_fd=here)
        if level % every == 0:
            os.mkdir("a", dir_fd=here)
            os.mkdir("z", dir_fd=here)
            os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        below = os.open("m", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_it_agrees_with_du(place: Path) -> None:
    (place / "file").write_bytes(b"x" * 100_000)
    (place / "empty").touch()
    with open(place / "sparse", "wb") as stream:
        stream.truncate(1 << 30)
        stream.write(b"x")
    os.link(place / "file", place / "another name")
    (place / "link").symlink_to("/usr")
    (place / "long link").symlink_to("/" + "x" * 2000)
    os.mkfifo(place / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(place / "socket"))
    for number in range(50):
        (place / f"d{number}" / "e" / "f").mkdir(parents=True)
        (place / f"d{number}" / "e" / "g").write_bytes(b"x" * number * 1000)
    found = measure(place)
    assert found == du(place)
    assert found.bytes < 1 << 24


def test_names_may_be_anything(place: Path) -> None:
    for name in (b"new\nline", b"\xff\xfe", b"-rf", b" ", b"...", b"n" * 255, "é".encode(), b"\x1b[2J", b"*"):
        directory = os.path.join(os.fsencode(place), name)
        os.mkdir(directory)
        with open(os.path.join(directory, name), "wb") as stream:
            stream.write(b"x" * 5000)
    found = measure(place)
    assert found == du(place)
    assert found.files == 18


def test_a_file_with_many_names_counts_once(place: Path) -> None:
    for number in range(5):
        (place / f"file{number}").write_bytes(b"x" * 40960)
        for other in range(3):
            (place / f"d{other}").mkdir(exist_ok=True)
            os.link(place / f"file{number}", place / f"d{other}" / f"name{number}")
    found = measure(place)
    assert found == du(place)
    assert found.files == 23


def test_more_shared_files_than_can_be_remembered_are_shared_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_REMEMBERED", 2)
    for number in range(5):
        (place / f"file{number}").write_bytes(b"x" * 40960)
        os.link(place / f"file{number}", place / f"name{number}")
    assert measure(place) == du(place)


def test_deletion_marks_are_counted_and_not_remembered(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("only root makes overlay's marks")
    os.mknod(place / "mark", 0o600 | 0o020000, 0)
    for number in range(100):
        os.link(place / "mark", place / f"mark{number}")
    monkeypatch.setattr(measuring._Walk, "_share", lambda *_: pytest.fail("remembered"))
    assert measure(place) == Used(0, 101, complete=True)


def test_deeper_than_a_path_is_long_with_few_descriptors_and_frames(place: Path) -> None:
    deep(place, 10_000, every=50)
    code = (
        "import os, resource, sys\n"
        "from elsewhere.linux.measuring import used\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (28, 28))\n"
        "sys.setrecursionlimit(30)\n"
        "print(used(fd))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, place], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)
    assert done.stderr == ""
    assert "files=10600, complete=True" in done.stdout


def test_wide_and_deep_directories_go_on_where_they_were_left(place: Path) -> None:
    """More names than fit into one reading, in a directory that has lost its descriptor when it is come back to."""
    for number in range(3000):
        (place / f"{number:0200}").touch()
    (place / "m").mkdir()
    deep(place / "m", 40)
    found = measure(place)
    assert found == du(place)
    assert found.files == 3001 + 160


def test_memory_does_not_grow_with_the_number_of_names(place: Path) -> None:
    (place / "file").touch()
    for number in range(20_000):
        os.link(place / "file", place / f"{number:0200}")
    measure(place)
    tracemalloc.start()
    try:
        assert measure(place).files == 20_001
        assert tracemalloc.get_traced_memory()[1] < 500_000  # the names alone are four million bytes
    finally:
        tracemalloc.stop()


def test_it_stops_when_it_is_too_much(place: Path) -> None:
    for number in range(100):
        (place / f"file{number}").write_bytes(b"x" * 10_000)
    whole = measure(place)
    assert whole.complete
    part = measure(place, most=100_000)
    assert not part.complete
    assert 100_000 < part.bytes < 130_000
    assert measure(place, most=whole.bytes) == whole


def test_it_stops_at_the_deadline(place: Path) -> None:
    for number in range(1000):
        (place / f"file{number}").touch()
    late = measure(place, deadline=time.monotonic() - 1)
    assert not late.complete
    assert late.files < 1000
    assert measure(place, deadline=time.monotonic() + 100) == Used(0, 1000, complete=True)


def test_the_deadline_is_looked_at_on_the_way(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1000):
        (place / f"file{number}").touch()
    times = iter((0.0, 0.0, 2.0))
    monkeypatch.setattr(measuring.time, "monotonic", lambda: next(times))
    fd = os.open(place, os.O_RDONLY)
    found = used(fd, deadline=1.0)
    os.close(fd)
    assert not found.complete
    assert 256 < found.files < 1000


def test_other_file_systems_are_left_out(place: Path) -> None:
    (place / "here").mkdir()
    (place / "mount").mkdir()
    (place / "here" / "file").write_bytes(b"x" * 10_000)
    expected = measure(place / "here")

    def look() -> str:
        if os.geteuid():
            probe._enter_user_namespace(sys_.CLONE_NEWNS)
        else:
            sys_.unshare(sys_.CLONE_NEWNS)
        sys_.mount(None, "/", None, sys_.MS_REC | sys_.MS_PRIVATE)
        sys_.mount("tmpfs", str(place / "mount"), "tmpfs", 0)
        (place / "mount" / "far").write_bytes(b"x" * 1_000_000)
        found = measure(place)
        return f"{found.bytes - os.stat(place / 'here').st_blocks * 512} {found.files} {found.complete}"

    tried = probe.attempt(look)
    if "not permitted" in tried.text and os.geteuid():
        pytest.skip("this host allows no mount")
    assert tried.text == f"{expected.bytes} 2 True"


def test_what_cannot_be_read_makes_it_incomplete(place: Path) -> None:
    tree = place / "tree"
    (tree / "closed").mkdir(parents=True)
    (tree / "open").mkdir()
    (tree / "closed" / "file").write_bytes(b"x" * 10_000)
    (tree / "closed").chmod(0o000)
    fd = os.open(tree, os.O_RDONLY)

    def look() -> str:
        if os.geteuid() == 0:
            os.setresuid(4242, 4242, 4242)
        return str(used(fd))

    tried = probe.attempt(look)
    os.close(fd)
    assert tried.ok, tried.text
    assert "files=2, complete=False" in tried.text


def test_a_directory_that_vanishes_is_no_trouble(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (place / name).mkdir()
    (place / "file").write_bytes(b"x" * 10_000)
    original = measuring._Walk._down

    def down(walk: measuring._Walk, level: measuring._Level, name: bytes) -> None:
        os.rmdir(name, dir_fd=level.fd)
        original(walk, level, name)

    monkeypatch.setattr(measuring._Walk, "_down", down)
    found = measure(place)
    assert found.complete
    assert found.files == 4
    assert os.listdir(place) == ["file"]


def test_a_directory_that_vanishes_on_the_way_back_is_no_trouble(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep(place, 40)
    top = place / "m" / "m" / "m"
    original = measuring._Walk._up

    def up(walk: measuring._Walk) -> None:
        if len(walk._inodes) == 20 and len(walk._levels) == 1:
            subprocess.run(["rm", "-rf", top], check=True)
        original(walk)

    monkeypatch.setattr(measuring._Walk, "_up", up)
    found = measure(place)
    assert not top.exists(), "it did not vanish while the walk was below it"
    assert found.complete
    assert 12 < found.files <= 160


def test_a_link_in_the_place_of_a_directory_is_not_followed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, tree = place / "outside", place / "tree"
    (outside / "much").mkdir(parents=True)
    (tree / "a").mkdir(parents=True)
    original = measuring._Walk._down

    def down(walk: measuring._Walk, level: measuring._Level, name: bytes) -> None:
        os.rmdir(name, dir_fd=level.fd)
        os.symlink(outside, os.fsdecode(name), dir_fd=level.fd)
        original(walk, level, name)

    monkeypatch.setattr(measuring._Walk, "_down", down)
    assert measure(tree).files == 1


def test_a_directory_that_is_moved_away_deep_down_ends_the_count(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `..` is not where the walk came from: going on there would count what is not below."""
    tree, elsewhere = place / "tree", place / "elsewhere"
    tree.mkdir()
    elsewhere.mkdir()
    deep(tree, 40)
    original = measuring._Walk._up
    top = tree / "m" / "m" / "m" / "m"

    def up(walk: measuring._Walk) -> None:
        if len(walk._inodes) == 4 and top.exists() and len(walk._levels) == 1:
            os.rename(top, elsewhere / "moved")
        original(walk)

    monkeypatch.setattr(measuring._Walk, "_up", up)
    found = measure(tree)
    assert not top.exists(), "it was not moved while the walk was below it"
    assert not found.complete
    assert found.files <= 160


def test_a_tree_in_motion_is_measured_without_an_error(place: Path) -> None:
    (place / "still").mkdir()
    (place / "still" / "file").write_bytes(b"x" * 10_000)
    (place / "moving").mkdir()
    code = (
        "import os, random, shutil, sys\n"
        "os.chdir(sys.argv[1])\n"
        "print(flush=True)\n"
        "while True:\n"
        "    a, b = f'{random.randrange(9)}', f'{random.randrange(9)}'\n"
        "    try:\n"
        "        os.makedirs('/'.join([a] * 30), exist_ok=True)\n"
        "        os.rename(f'{a}/{a}/{a}', f'{b}/x')\n"
        "    except OSError: pass\n"
        "    shutil.rmtree(b, ignore_errors=True)\n"
    )
    mover = subprocess.Popen([sys.executable, "-c", code, place / "moving"], stdout=subprocess.PIPE)
    try:
        assert mover.stdout is not None
        mover.stdout.readline()
        for _ in range(100):
            found = measure(place, deadline=time.monotonic() + 10)
            assert found.files >= 2
            assert found.bytes >= 10_000 or not found.complete
    finally:
        mover.kill()
        mover.communicate()


def test_nothing_is_imported_once_it_runs(place: Path) -> None:
    (place / "directory").mkdir()
    code = (
        "import os, sys\n"
        "from elsewhere.linux.measuring import used\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "sys.path.clear(); sys.meta_path.clear(); sys.path_hooks.clear()\n"
        "found = used(fd, most=1 << 40, deadline=1e12)\n"
        "os.write(1, b'%d %d' % (found.files, found.complete))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, place], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1 1", "")


def test_no_directory_is_an_error_of_the_caller(place: Path) -> None:
    (place / "file").touch()
    fd = os.open(place / "file", os.O_RDONLY)
    with pytest.raises(NotADirectoryError):
        used(fd)
    os.close(fd)
