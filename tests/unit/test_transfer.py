"""Trees into a sandbox and out of it: they arrive whole or not at all, and links in them are never followed."""

import errno
import os
import random
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elsewhere.errors import ElsewhereError, NotFound, Refused, StateError, UsageError
from elsewhere.linux import syscalls
from elsewhere.sandbox.access import transfer
from elsewhere.sandbox.access.files import Files
from elsewhere.sandbox.access.transfer import LeftOut, Sides, download, parse_place, parse_sides, upload
from elsewhere.sandbox.ids import FIRST_ID

ROOT = os.geteuid() == 0
PRECIOUS = b"of the host"


@pytest.fixture
def host(place: Path) -> Path:
    (place / "host").mkdir()
    (place / "host/precious").write_bytes(PRECIOUS)
    return place / "host"


@pytest.fixture
def project(place: Path) -> Path:
    (place / "root/project").mkdir(parents=True)
    return place / "root/project"


@pytest.fixture
def files(project: Path) -> Iterator[Files]:
    fd = os.open(project.parent, os.O_PATH | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    made = Files(fd, "/project")
    with made.held("/") as handle:  # if the root did not hold, all that follows would be done to this machine
        assert os.path.samestat(os.fstat(handle), os.fstat(fd))
    yield made
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


@contextmanager
def refusing(kind: type[ElsewhereError], code: str, *mentions: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.code == code
    assert caught.value.hint
    for text in mentions:
        assert text in caught.value.message


def grow(top: Path) -> None:
    """A tree of everything that can be transferred."""
    (top / "a/b").mkdir(parents=True)
    (top / "empty").mkdir()
    (top / "a/text").write_text("text")
    (top / "a/tool").write_text("#!/bin/sh\n")
    (top / "a/tool").chmod(0o751)
    (top / "a/b/hole").write_bytes(b"begin")
    with (top / "a/b/hole").open("r+b") as stream:
        stream.truncate(1 << 24)
        stream.seek(1 << 23)
        stream.write(b"middle")
    (top / "a/new\nline").touch()
    (Path(os.fsdecode(os.fsencode(top) + b"/\xff\xfe"))).write_bytes(b"bytes")
    (top / "inner").symlink_to("a/text")
    (top / "outer").symlink_to("/etc/passwd")
    (top / "up").symlink_to("../..")
    (top / "dangling").symlink_to("nowhere")
    os.link(top / "a/text", top / "a/b/hard")
    (top / "closed").mkdir()
    (top / "closed/file").touch()
    (top / "closed").chmod(0o500)
    for number, path in enumerate(sorted(top.rglob("*"), reverse=True)):
        os.utime(path, ns=(10**18, 10**18 + number), follow_symlinks=False)


def tree(top: Path) -> dict[str, tuple[object, ...]]:
    found = {}
    for path in sorted(top.rglob("*")):
        about = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(top))] = (stat.S_IFMT(about.st_mode), about.st_mode & 0o777, about.st_mtime_ns, content)
    return found


def hidden(top: Path) -> list[str]:
    """What a transfer that failed would have left."""
    return [path.name for path in top.rglob("*") if path.name.startswith(".elsewhere-")]


def test_a_tree_comes_back_as_it_went_in(files: Files, host: Path, project: Path) -> None:
    grow(host / "tree")
    went = upload(files, host / "tree", "tree")
    assert tree(project / "tree") == tree(host / "tree")
    came = download(files, "tree", host / "back")
    assert tree(host / "back") == tree(host / "tree")
    assert went == came
    assert (went.files, went.left_out) == (11, [])
    assert went.bytes == sum(
        path.stat().st_size for path in (host / "tree").rglob("*") if path.is_file() and not path.is_symlink()
    )
    for copy in (project / "tree", host / "back"):
        assert (copy / "a/b/hole").stat().st_blocks <= (host / "tree/a/b/hole").stat().st_blocks
        assert not (copy / "a/text").samefile(copy / "a/b/hard")
    assert hidden(host) == hidden(project) == []


def test_a_single_file_goes_both_ways(files: Files, host: Path, project: Path) -> None:
    (host / "tool").write_bytes(b"tool")
    (host / "tool").chmod(0o755)
    assert upload(files, host / "tool", "new/deep/tool") == transfer.Transferred(1, 4, [])
    assert (project / "new/deep/tool").stat().st_mode & 0o777 == 0o755
    assert download(files, "new/deep/tool", host / "back") == transfer.Transferred(1, 4, [])
    assert (host / "back").read_bytes() == b"tool"
    assert (host / "back").stat().st_mtime_ns == (host / "tool").stat().st_mtime_ns


def test_an_existing_directory_as_the_target_means_below_it(files: Files, host: Path, project: Path) -> None:
    (host / "file").write_bytes(b"1")
    grow(host / "tree")
    (project / "there").mkdir()
    (project / "link").symlink_to("there")
    upload(files, host / "file", "there")
    upload(files, host / "tree", "link")
    upload(files, host / "file", "made/for/it/")
    upload(files, host / "file", ".")
    assert (project / "there/file").read_bytes() == b"1"
    assert tree(project / "there/tree") == tree(host / "tree")
    assert (project / "made/for/it/file").exists()
    assert (project / "file").exists()
    (host / "there").mkdir()
    (host / "link").symlink_to("there")
    download(files, "there/file", host / "there")
    download(files, "there/tree/", host / "link/")
    download(files, ".", host / "there")
    assert (host / "there/file").read_bytes() == b"1"
    assert tree(host / "there/tree") == tree(host / "tree")
    assert (host / "there/project/there/file").exists()


def test_relative_host_paths_begin_at_the_working_directory(
    files: Files, host: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(host)
    upload(files, "precious", ".")
    download(files, "precious", "copy")
    download(files, "precious", "./a:b")
    upload(files, ".", "all")
    assert sorted(os.listdir(project / "all")) == ["a:b", "copy", "precious"]


def test_what_exists_on_the_host_is_not_overwritten_unasked(files: Files, host: Path, project: Path) -> None:
    (project / "precious").write_bytes(b"of the sandbox")
    (project / "tree").mkdir()
    (host / "tree").mkdir()
    (host / "link").symlink_to("precious")
    for target in (host / "precious", host, host / "link"):
        with refusing(UsageError, "file_exists", str(host), "on the host"):
            download(files, "precious", target)
    with refusing(UsageError, "file_exists", str(host / "tree")):
        download(files, "tree", host)
    assert (host / "precious").read_bytes() == PRECIOUS
    download(files, "precious", host / "link", overwrite=True)
    assert (host / "precious").read_bytes() == PRECIOUS
    assert not (host / "link").is_symlink()
    download(files, "precious", host, overwrite=True)
    assert (host / "precious").read_bytes() == b"of the sandbox"
    assert hidden(host) == []


def test_a_name_taken_meanwhile_is_not_overwritten_either(
    files: Files, host: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "file").write_bytes(b"x")
    (project / "tree").mkdir()
    monkeypatch.setattr(transfer, "_lstat", lambda *_: None)
    with refusing(UsageError, "file_exists", "precious"):
        download(files, "file", host / "precious")
    with refusing(UsageError, "file_exists", "precious"):
        download(files, "tree", host / "precious")
    assert (host / "precious").read_bytes() == PRECIOUS
    assert hidden(host) == []


def test_overwriting_merges_trees_and_keeps_what_only_the_target_has(files: Files, host: Path, project: Path) -> None:
    grow(project / "tree")
    (host / "tree/a").mkdir(parents=True)
    (host / "tree/a").chmod(0o711)
    (host / "tree/a/text").write_text("old")
    (host / "tree/a/own").write_text("own")
    (host / "tree/inner").symlink_to("../precious")
    download(files, "tree", host, overwrite=True)
    expected = tree(project / "tree")
    merged = tree(host / "tree")
    assert merged.pop("a/own")[3] == b"own"
    assert merged.pop("a")[1] == 0o711
    expected.pop("a")
    assert merged == expected
    assert (host / "precious").read_bytes() == PRECIOUS
    assert hidden(host) == []


def test_kinds_that_do_not_fit_are_refused(files: Files, host: Path, project: Path) -> None:
    (project / "file").touch()
    (project / "tree/x").mkdir(parents=True)
    (host / "file").mkdir()
    (host / "tree").touch()
    (host / "below/tree").mkdir(parents=True)
    (host / "below/tree/x").symlink_to("..")
    with refusing(UsageError, "is_a_directory", str(host / "file")):
        download(files, "file", host, overwrite=True)
    with refusing(UsageError, "not_a_directory", str(host / "tree")):
        download(files, "tree", host / "tree", overwrite=True)
    with refusing(UsageError, "not_a_directory", str(host / "below/tree/x")):
        download(files, "tree", host / "below", overwrite=True)
    with refusing(UsageError, "not_a_directory", "file"):
        upload(files, host / "file", "file")
    with refusing(UsageError, "file_exists", "file"):
        upload(files, host / "tree", "file", overwrite=False)


def test_what_is_named_is_followed_and_stays_inside(files: Files, host: Path, project: Path) -> None:
    (project / "result").write_bytes(b"result")
    (project / "latest").symlink_to("/project/result")
    (project / "evil").symlink_to(host / "precious")
    download(files, "latest", host / "latest")
    assert (host / "latest").read_bytes() == b"result"
    assert not (host / "latest").is_symlink()
    with refusing(NotFound, "file_not_found", "evil"):
        download(files, "evil", host / "evil")
    (project / "target").symlink_to(host / "precious")
    (host / "link").symlink_to("latest")
    upload(files, host / "link", "target")
    assert (host / "precious").read_bytes() == PRECIOUS
    assert (project.parent / str(host)[1:] / "precious").read_bytes() == b"result"


def test_what_is_no_file_is_left_out_and_said(files: Files, host: Path, project: Path) -> None:
    (project / "tree/sub").mkdir(parents=True)
    (project / "tree/file").touch()
    os.mkfifo(project / "tree/sub/fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(project / "tree/socket"))
    expected = [LeftOut("socket", "a socket"), LeftOut("sub/fifo", "a fifo")]
    if ROOT:
        os.mknod(project / "tree/device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        expected.insert(0, LeftOut("device", "a device"))
    done = download(files, "tree", host / "tree")
    assert sorted(done.left_out, key=lambda entry: entry.path) == expected
    assert sorted(tree(host / "tree")) == ["file", "sub"]
    again = upload(files, project / "tree", "again")
    assert sorted(again.left_out, key=lambda entry: entry.path) == expected
    with refusing(UsageError, "not_a_regular_file", "tree/sub/fifo"):
        download(files, "tree/sub/fifo", host / "fifo")
    with refusing(UsageError, "not_a_regular_file", "tree/sub/fifo"):
        upload(files, project / "tree/sub/fifo", "fifo")


def test_powers_do_not_travel(files: Files, host: Path, project: Path) -> None:
    (project / "tree").mkdir()
    (project / "tree/tool").touch()
    (project / "tree/tool").chmod(0o6755)
    (project / "tree").chmod(0o3777)
    if ROOT:
        os.setxattr(project / "tree/tool", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    download(files, "tree", host / "tree")
    assert (host / "tree/tool").stat().st_mode & 0o7777 == 0o755
    assert (host / "tree").stat().st_mode & 0o7777 == 0o777
    assert os.listxattr(host / "tree/tool") == []
    assert (host / "tree/tool").stat().st_uid == os.geteuid()


def test_closed_places_are_left_out_and_said(files: Files, host: Path, project: Path) -> None:
    for name in ("tree", "tree/closed", "tree/open"):
        (project / name).mkdir()
    for name in ("tree/closed/file", "tree/file", "tree/open/file"):
        (project / name).touch()
    (project / "tree/file").chmod(0)
    (project / "tree/closed").chmod(0)
    project.parent.parent.chmod(0o755)
    host.chmod(0o777)
    if ROOT:
        for path in project.rglob("*"):
            os.chown(path, 4242, 4242)
        os.seteuid(4242)
    try:
        done = download(files, "tree", host / "tree")
        with refusing(Refused, "file_denied", "tree/file"):
            download(files, "tree/file", host / "file")
        with refusing(Refused, "file_denied", "tree/closed"):
            download(files, "tree/closed", host / "closed")
    finally:
        if ROOT:
            os.seteuid(0)
    assert sorted(entry.path for entry in done.left_out) == ["closed", "file"]
    assert sorted(tree(host / "tree")) == ["open", "open/file"]


def test_host_paths_that_cannot_be_used_are_named(files: Files, host: Path, project: Path) -> None:
    (project / "file").touch()
    with refusing(NotFound, "file_not_found", "missing", "on the host"):
        upload(files, host / "missing", "x")
    with refusing(NotFound, "file_not_found", "missing", "on the host"):
        download(files, "file", host / "missing/file")
    with refusing(NotFound, "file_not_found", "missing", "on the host"):
        download(files, "file", f"{host}/missing/")
    with refusing(UsageError, "not_a_directory", "precious", "on the host"):
        download(files, "file", host / "precious/file")
    with refusing(UsageError, "nul_byte"):
        download(files, "file", "a\0b")
    with refusing(UsageError, "nul_byte"):
        upload(files, "a\0b", "file")
    with refusing(NotFound, "file_not_found", "missing"):
        download(files, "missing", host / "x")


def test_a_transfer_without_room_leaves_nothing(files: Files, host: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(project / "tree")
    grow(host / "tree")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "sendfile", full)
    before = tree(host), tree(project)
    for source in ("tree", "tree/a/text"):
        with refusing(StateError, "no_room", "new"):
            download(files, source, host / "new")
        with refusing(StateError, "no_room", "new"):
            upload(files, host / source, "new")
    assert (tree(host), tree(project)) == before


def test_a_file_over_the_limit_leaves_nothing(files: Files, host: Path, project: Path) -> None:
    (project / "tree").mkdir()
    with (project / "tree/huge").open("wb") as stream:
        stream.truncate(1 << 40)
    (project / "tree/small").write_bytes(b"12345")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, hard))
    try:
        with refusing(UsageError, "file_too_large", "huge"):
            download(files, "tree", host / "tree")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with refusing(UsageError, "file_too_large", "huge", str(1 << 40)):
        download(files, "tree", host / "tree", limit=1 << 20)
    assert os.listdir(host) == ["precious"]
    assert download(files, "tree/small", host / "small", limit=5).bytes == 5


def test_a_sparse_file_of_a_terabyte_costs_nothing(files: Files, host: Path, project: Path) -> None:
    with (project / "huge").open("wb") as stream:
        stream.truncate(1 << 40)
        stream.seek(1 << 39)
        stream.write(b"middle")
    download(files, "huge", host / "huge")
    assert (host / "huge").stat().st_size == 1 << 40
    assert (host / "huge").stat().st_blocks < 1000


def test_files_of_the_hosts_kernel_can_be_uploaded_but_none_comes_out(files: Files, host: Path, project: Path) -> None:
    upload(files, "/proc/version", "version")
    assert (project / "version").read_bytes() == Path("/proc/version").read_bytes()
    fd = os.open("/", os.O_PATH)
    try:
        whole = Files(fd, str(project))
        with refusing(Refused, "outside_root", "/proc"):
            download(whole, "/proc/version", host / "version")
        with refusing(Refused, "outside_root", "/proc"):
            download(whole, "/proc", host / "proc")
        with refusing(Refused, "outside_root", "/proc"):
            upload(whole, host / "precious", "/proc")
        with refusing(Refused, "outside_root", "/proc"):
            upload(whole, host / "precious", "/proc/new")
    finally:
        os.close(fd)
    assert os.listdir(host) == ["precious"]


def test_a_tree_deeper_than_a_path_is_cut_there_and_said(files: Files, host: Path, project: Path) -> None:
    here = os.open(project, os.O_RDONLY)
    for _ in range(2100):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        done = download(files, "d", host / "deep")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (left,) = done.left_out
    assert len(left.path) == 4097
    assert "longer" in left.why


@pytest.mark.usefixtures("files")
def test_a_tree_copied_into_itself_ends(host: Path) -> None:
    """As it can be where the host shares a directory with the sandbox."""
    grow(host / "tree")
    fd = os.open(host, os.O_PATH)
    try:
        upload(Files(fd, "/tree"), host / "tree", "copy")
        assert sorted(path.name for path in (host / "tree/copy").iterdir()) == sorted(
            path.name for path in (host / "tree").iterdir() if path.name != "copy"
        )
    finally:
        os.close(fd)


@pytest.mark.skipif(not ROOT, reason="giving files to other ids needs root")
def test_files_of_roots_sandboxes_belong_to_their_root(files: Files, host: Path, project: Path) -> None:
    inside = Files(files._root, "/project", FIRST_ID)
    os.chown(project, FIRST_ID + 1000, FIRST_ID + 1000)
    project.chmod(0o700)
    grow(host / "tree")
    upload(inside, host / "tree", "new/tree")
    assert {path.lstat().st_uid for path in project.rglob("*")} == {FIRST_ID}
    os.chown(project / "new/tree/a/text", FIRST_ID + 1000, FIRST_ID + 1000)
    upload(inside, host / "tree", "new")
    assert (project / "new/tree/a/text").stat().st_uid == FIRST_ID + 1000
    download(inside, "new/tree", host / "back")
    assert {path.lstat().st_uid for path in host.rglob("*")} == {0}
    assert tree(host / "back").keys() == tree(host / "tree").keys()


SWAPPER = """
import contextlib, os, sys
place, outside = sys.argv[1:]
sys.stdout.write('x')
sys.stdout.flush()
while True:
    for name in ('swapped', 'tree/sub', 'tree/sub/precious'):
        path, spare = place + '/' + name, place + '/spare'
        with contextlib.suppress(OSError):
            os.rename(path, spare)
        with contextlib.suppress(OSError):
            os.symlink(outside, path)
        with contextlib.suppress(OSError):
            os.unlink(path)
        with contextlib.suppress(OSError):
            os.rename(spare, path)
    for name in os.listdir(place):
        if name.startswith('.elsewhere-'):
            with contextlib.suppress(OSError):
                os.rename(place + '/' + name + '/sub', place + '/' + name + '/was')
                os.symlink(outside, place + '/' + name + '/sub')
"""


def test_directories_swapped_for_links_lead_nowhere_else(files: Files, host: Path, project: Path) -> None:
    """The attacker also reaches into trees that are being uploaded."""
    (host / "outside").mkdir()
    (host / "outside/precious").write_bytes(PRECIOUS)
    (host / "source/sub").mkdir(parents=True)
    for number in range(5):
        (host / f"source/sub/{number}").write_text("of the user")
    (project / "tree/sub/precious").mkdir(parents=True)
    (project / "tree/sub/precious/precious").write_text("of the sandbox")
    (project / "swapped").mkdir()
    process = subprocess.Popen([sys.executable, "-S", "-c", SWAPPER, str(project), str(host / "outside")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    done = 0
    try:
        assert process.stdout.read(1) == b"x"
        for number in range(300):
            with suppress(ElsewhereError):
                download(files, "tree", host / f"out{number}")
                done += 1
            with suppress(ElsewhereError):
                upload(files, host / "source", f"swapped/{number}")
            with suppress(ElsewhereError):
                upload(files, host / "source", f"up{number}")
                done += 1
        assert process.poll() is None, "the attacker gave up"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert done
    assert os.listdir(host / "outside") == ["precious"]
    assert (host / "outside/precious").read_bytes() == PRECIOUS
    for number in range(300):
        for path in (host / f"out{number}").rglob("*"):
            assert path.is_symlink() or not path.is_file() or path.read_text() == "of the sandbox"


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_come_back_as_they_went_in(files: Files, host: Path, project: Path, seed: int) -> None:
    chance = random.Random(seed)
    top = host / "tree"
    top.mkdir()
    directories = [top]
    for number in range(120):
        path = chance.choice(directories) / f"{number}{chance.choice(['', ' ', chr(10), 'é', chr(0xDCFF)])}"
        match chance.randint(0, 3):
            case 0:
                path.mkdir()
                directories.append(path)
            case 1:
                path.symlink_to(chance.choice(["/etc", "..", "x/y", str(chance.choice(directories))]))
            case _:
                with path.open("wb") as stream:
                    for _ in range(chance.randint(0, 3)):
                        stream.seek(chance.randint(0, 1 << 20))
                        stream.write(chance.randbytes(chance.randint(0, 5000)))
                path.chmod(chance.choice([0o600, 0o644, 0o777, 0o400]))
    for directory in reversed(directories):
        directory.chmod(chance.choice([0o700, 0o755, 0o511]))
    upload(files, top, "tree")
    download(files, "tree", host / "back")
    assert tree(project / "tree") == tree(top)
    assert tree(host / "back") == tree(top)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ew-a-1:src/x", ("ew-a-1", "src/x")),
        ("@last:/etc/hosts", ("@last", "/etc/hosts")),
        ("box:", ("box", ".")),
        ("box:a:b", ("box", "a:b")),
        ("./a:b", (None, "./a:b")),
        ("/srv/a:b", (None, "/srv/a:b")),
        ("plain", (None, "plain")),
        ("..", (None, "..")),
    ],
)
def test_places(text: str, expected: tuple[str | None, str]) -> None:
    assert parse_place(text) == expected


@pytest.mark.parametrize("text", ["", "-", ":", ":path"])
def test_places_that_are_none(text: str) -> None:
    with refusing(UsageError, "cp_place", repr(text)):
        parse_place(text)


def test_exactly_one_side_is_a_sandbox() -> None:
    assert parse_sides("box:a", "b") == Sides("box", "a", "b", uploads=False)
    assert parse_sides("a", "box:b") == Sides("box", "b", "a", uploads=True)
    with refusing(UsageError, "cp_sides", "on the host"):
        parse_sides("a", "./b:c")
    with refusing(UsageError, "cp_sides", "in sandboxes"):
        parse_sides("one:a", "other:b")


def test_the_hosts_kernel_gives_the_magic_numbers_that_are_refused() -> None:
    for path, number in (("/proc", 0x9FA0), ("/sys", 0x62656572)):
        if os.path.ismount(path):
            fd = os.open(path, os.O_PATH)
            assert syscalls.fstatfs(fd) == number
            os.close(fd)
