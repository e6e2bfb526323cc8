"""A copy of a tree is a true one, and what cannot be copied is named."""

import os
import socket
import stat
from pathlib import Path

import pytest

from elsewhere.storage import copying
from elsewhere.storage.copying import Copied, copy_tree

MIB = 1 << 20


def copy(place: Path, **options: object) -> Copied:
    return copy_tree(str(place / "source"), str(place / "target"), **options)  # type: ignore[arg-type]


@pytest.fixture
def source(place: Path) -> Path:
    (place / "source").mkdir()
    return place / "source"


@pytest.fixture
def target(place: Path) -> Path:
    return place / "target"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, MIB, 3 * MIB + 17])
def test_content_of_any_size_is_copied_and_counted(place: Path, source: Path, target: Path, size: int) -> None:
    content = os.urandom(size)
    (source / "file").write_bytes(content)
    copied = copy(place)
    assert (target / "file").read_bytes() == content
    assert (copied.files, copied.bytes, copied.left_out) == (1, size, [])


def test_a_whole_tree_is_copied_with_empty_directories_and_nothing_else(place: Path, source: Path, target: Path) -> None:
    (source / "a/b/empty").mkdir(parents=True)
    (source / "a/one").write_text("1")
    (source / "a/b/two").write_text("2")
    copied = copy(place)
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*"))
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == names
    assert (target / "a/b/two").read_text() == "2"
    assert copied.files == 2


def test_the_copy_is_independent_of_what_it_was_made_from(place: Path, source: Path, target: Path) -> None:
    (source / "file").write_text("before")
    copy(place)
    (target / "file").write_text("after")
    assert (source / "file").read_text() == "before"


def test_a_target_that_exists_is_never_written_into(place: Path, source: Path, target: Path) -> None:
    (source / "file").touch()
    target.mkdir()
    with pytest.raises(FileExistsError):
        copy(place)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("mode", [0o400, 0o444, 0o600, 0o644, 0o755, 0o4755, 0o2755])
def test_the_mode_of_a_file_is_kept(place: Path, source: Path, target: Path, mode: int) -> None:
    (source / "file").touch()
    (source / "file").chmod(mode)
    before = os.umask(0o077)
    try:
        copy(place)
    finally:
        os.umask(before)
    assert stat.S_IMODE((target / "file").stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o500, 0o555, 0o700, 0o755, 0o1777, 0o2755])
def test_the_mode_of_a_directory_is_kept_also_if_nothing_could_be_written_in_it(
    place: Path, source: Path, target: Path, mode: int
) -> None:
    (source / "sub").mkdir()
    (source / "sub/file").touch()
    (source / "sub").chmod(mode)
    source.chmod(mode)
    copy(place)
    assert stat.S_IMODE((target / "sub").stat().st_mode) == mode
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert (target / "sub/file").exists()


def test_times_are_kept_to_the_nanosecond_for_files_directories_and_links(place: Path, source: Path, target: Path) -> None:
    (source / "sub").mkdir()
    (source / "sub/file").touch()
    (source / "link").symlink_to("sub")
    moments = {"sub/file": 1_000_000_000_123_456_789, "link": 1_100_000_000_000_000_001, "sub": 999_999_999, "": 7}
    for name, moment in moments.items():
        os.utime(source / name, ns=(moment + 1, moment), follow_symlinks=False)
    copy(place)
    assert {name: (target / name).lstat().st_mtime_ns for name in moments} == moments


def test_owners_are_kept_by_root(place: Path, source: Path, target: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    (source / "file").touch()
    (source / "link").symlink_to("file")
    os.chown(source / "file", 1234, 5678)
    os.chown(source / "link", 1, 2, follow_symlinks=False)
    os.chown(source, 12, 34)
    (source / "file").chmod(0o6755)
    copy(place)
    found = (target / "file").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 5678, 0o6755)
    assert ((target / "link").lstat().st_uid, (target / "link").lstat().st_gid) == (1, 2)
    assert (target.stat().st_uid, target.stat().st_gid) == (12, 34)


@pytest.mark.parametrize("leads", ["file", "/etc/passwd", "missing", "..", ".", "/", "\udcff"], ids=ascii)
def test_links_are_copied_as_links_wherever_they_lead(place: Path, source: Path, target: Path, leads: str) -> None:
    (source / "link").symlink_to(leads)
    copied = copy(place)
    assert os.readlink(target / "link") == leads
    assert (copied.files, copied.left_out) == (0, [])


def test_hard_links_stay_linked_to_each_other_and_not_to_their_source(place: Path, source: Path, target: Path) -> None:
    (source / "sub").mkdir()
    (source / "one").write_text("x")
    os.link(source / "one", source / "two")
    os.link(source / "one", source / "sub/three")
    (source / "link").symlink_to("one")
    os.link(source / "link", source / "link-too", follow_symlinks=False)
    (source / "other").write_text("x")
    copied = copy(place)
    numbers = [(target / name).stat().st_ino for name in ("one", "two", "sub/three")]
    assert len(set(numbers)) == 1
    assert (target / "one").stat().st_nlink == 3
    assert (target / "link").lstat().st_ino == (target / "link-too").lstat().st_ino
    assert (target / "other").stat().st_ino not in numbers
    assert numbers[0] != (source / "one").stat().st_ino
    assert copied.files == 2


def test_a_file_whose_other_link_lies_outside_is_copied_as_a_file(place: Path, source: Path, target: Path) -> None:
    (place / "outside").write_text("x")
    os.link(place / "outside", source / "file")
    copy(place)
    assert (target / "file").read_text() == "x"
    assert (place / "outside").stat().st_nlink == 2


@pytest.mark.parametrize(
    ("size", "written"),
    [(64 * MIB, []), (64 * MIB, [0]), (64 * MIB, [32 * MIB]), (64 * MIB, [0, 16 * MIB, 64 * MIB - 4])],
    ids=["all hole", "hole at the end", "in the middle", "several"],
)
def test_holes_stay_holes(place: Path, source: Path, target: Path, size: int, written: list[int]) -> None:
    with open(source / "file", "wb") as stream:
        stream.truncate(size)
        for position in written:
            stream.seek(position)
            stream.write(b"data")
    if (source / "file").stat().st_blocks * 512 > MIB:
        pytest.skip("this file system has no holes")
    copied = copy(place)
    found = (target / "file").stat()
    assert found.st_size == size == copied.bytes
    assert found.st_blocks * 512 <= MIB
    with open(target / "file", "rb") as stream:
        for position in written:
            stream.seek(position)
            assert stream.read(4) == b"data"
        stream.seek(8 * MIB)
        assert stream.read(64) == bytes(64)


def test_user_attributes_are_kept_on_files_and_directories(place: Path, source: Path, target: Path) -> None:
    (source / "sub").mkdir()
    (source / "file").touch()
    try:
        for path in (source, source / "sub", source / "file"):
            os.setxattr(path, "user.note", b"for\0me")
    except OSError as error:
        pytest.skip(f"this file system has no user attributes: {error}")
    (source / "file").chmod(0o444)
    copy(place)
    for path in (target, target / "sub", target / "file"):
        assert os.getxattr(path, "user.note") == b"for\0me"


@pytest.mark.timeout(5)
def test_a_fifo_is_copied_as_a_fifo_and_not_waited_for(place: Path, source: Path, target: Path) -> None:
    os.mkfifo(source / "fifo")
    (source / "fifo").chmod(0o640)
    copied = copy(place)
    found = (target / "fifo").lstat()
    assert stat.S_ISFIFO(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o640
    assert copied.left_out == []


def test_a_socket_is_left_out_and_named(place: Path, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        (source / "file").touch()
        copied = copy(place)
    assert copied.left_out == [str(source / "socket")]
    assert [path.name for path in target.iterdir()] == ["file"]


def test_a_device_is_left_out_and_named(place: Path, source: Path, target: Path) -> None:
    try:
        os.mknod(source / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("devices cannot be made here")
    assert copy(place).left_out == [str(source / "device")]
    assert list(target.iterdir()) == []


def test_what_cannot_be_read_is_left_out_and_named_and_the_rest_is_copied(place: Path, source: Path, target: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    (source / "closed").mkdir()
    (source / "closed/inside").touch()
    (source / "secret").write_text("secret")
    (source / "file").write_text("x")
    (source / "secret").chmod(0)
    (source / "closed").chmod(0)
    copied = copy(place)
    assert sorted(copied.left_out) == [str(source / "closed"), str(source / "secret")]
    assert [path.name for path in target.iterdir()] == ["file"]


def test_what_is_to_be_left_out_is_not_copied_and_not_named(place: Path, source: Path, target: Path) -> None:
    for name in ("state/inside", "sub/state", "stateful"):
        (source / name).mkdir(parents=True)
    (source / "file").touch()
    (source / "other").touch()
    copied = copy(place, leave_out=frozenset({str(source / "state"), str(source / "other")}))
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert found == ["file", "stateful", "sub", "sub/state"]
    assert copied.left_out == []


def test_a_target_inside_the_source_ends_if_it_is_left_out(place: Path, source: Path) -> None:
    (source / "state").mkdir()
    (source / "file").touch()
    copy_tree(str(source), str(source / "state/copy"), leave_out=frozenset({str(source / "state")}))
    assert [path.name for path in (source / "state/copy").iterdir()] == ["file"]


@pytest.mark.parametrize("name", [b"\xff\xfe", b"new\nline", b" ", b"x" * 255, "日本".encode()], ids=ascii)
def test_names_of_any_kind_are_copied(place: Path, source: Path, target: Path, name: bytes) -> None:
    os.mkdir(os.path.join(os.fsencode(source), name))
    Path(os.fsdecode(os.path.join(os.fsencode(source), name, name))).write_text("x")
    assert copy(place).left_out == []
    assert os.listdir(os.fsencode(target)) == [name]
    assert os.listdir(os.path.join(os.fsencode(target), name)) == [name]


def test_a_tree_deeper_than_python_has_frames_is_copied(place: Path, source: Path, target: Path) -> None:
    deepest = "/".join(["d"] * 600)
    for length in range(1, len(deepest) + 1, 2):
        os.mkdir(f"{source}/{deepest[:length]}")  # pathlib and makedirs go down by recursion themselves
    (source / deepest / "file").write_text("x")
    assert copy(place).left_out == []
    assert (target / deepest / "file").read_text() == "x"


def test_a_directory_in_place_of_a_link_is_never_read_through_it(place: Path, source: Path, target: Path) -> None:
    (place / "outside").mkdir()
    (place / "outside/secret").touch()
    (source / "sub").symlink_to(place / "outside")
    copy(place)
    assert (target / "sub").is_symlink()


def test_progress_is_told_while_the_copy_runs(place: Path, source: Path) -> None:
    for number in range(600):
        (source / str(number)).touch()
    told: list[int] = []
    copied = copy(place, tell=lambda so_far: told.append(so_far.files))
    assert told == [256, 512]
    assert copied.files == 600


def test_the_strategy_is_reflink_only_if_every_file_shares_its_blocks() -> None:
    copied = Copied()
    assert copied.strategy == "copy"
    copied.add(10, shared=True)
    assert copied.strategy == "reflink"
    copied.add(10, shared=False)
    assert copied.strategy == "copy"
    assert (copied.files, copied.bytes, copied.shared) == (2, 20, 1)


def test_a_single_file_is_copied_without_following_a_link(place: Path) -> None:
    (place / "file").write_text("content")
    (place / "link").symlink_to("file")
    assert copying.copy_file(str(place / "file"), str(place / "new"))[0] == 7
    assert (place / "new").read_text() == "content"
    with pytest.raises(OSError, match="symbolic links"):
        copying.copy_file(str(place / "link"), str(place / "newer"))
    with pytest.raises(FileExistsError):
        copying.copy_file(str(place / "file"), str(place / "new"))
