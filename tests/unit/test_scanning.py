"""A scan sees every change that a base has to follow, and nothing that did not happen."""

import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elsewhere.storage import scanning
from elsewhere.storage.scanning import Difference, Scan, differences, scan

SECOND = 10**9


@pytest.fixture
def tree(place: Path) -> Path:
    (place / "tree/sub/deep").mkdir(parents=True)
    (place / "tree/one").write_text("1")
    (place / "tree/sub/two").write_text("22")
    (place / "tree/sub/deep/three").write_text("333")
    (place / "tree/link").symlink_to("one")
    return place / "tree"


def next_tick() -> None:
    """Kernels before 6.13 stamp files by the tick only: what the lying clock calls old must really differ from what comes next."""
    for _ in range(2):
        now = time.clock_gettime_ns(5)  # CLOCK_REALTIME_COARSE
        while time.clock_gettime_ns(5) == now:
            pass


def compared(old: Scan, new: Scan) -> dict[str, tuple[set[str], set[str]]]:
    return {one.path: (set(one.changed), set(one.deleted)) for one in differences(old, new)}


def test_a_tree_in_which_nothing_happened_has_no_differences(tree: Path) -> None:
    assert differences(scan(str(tree)), scan(str(tree))) == []


def test_reading_changes_nothing(tree: Path) -> None:
    before = scan(str(tree))
    (tree / "one").read_text()
    list(tree.rglob("*"))
    assert differences(before, scan(str(tree))) == []


def test_files_and_bytes_are_those_of_regular_files_alone(tree: Path) -> None:
    found = scan(str(tree))
    assert (found.files, found.bytes) == (3, 6)


def test_without_an_older_scan_everything_is_different(tree: Path) -> None:
    found = {one.path: set(one.changed) for one in differences(None, scan(str(tree)))}
    assert found == {"": {"one", "sub", "link"}, "sub": {"two", "deep"}, "sub/deep": {"three"}}


def same_size_same_time(tree: Path) -> None:
    about = (tree / "one").stat()
    (tree / "one").write_text("x")
    os.utime(tree / "one", ns=(about.st_atime_ns, about.st_mtime_ns))


def retarget(tree: Path) -> None:
    (tree / "link").unlink()
    (tree / "link").symlink_to("two")


def replace(tree: Path) -> None:
    (tree / "new").write_text("1")
    os.rename(tree / "new", tree / "one")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda tree: (tree / "one").write_text("longer"), "one"),
        (same_size_same_time, "one"),
        (lambda tree: (tree / "one").chmod(0o600), "one"),
        (lambda tree: os.utime(tree / "one", (1, 1)), "one"),
        (lambda tree: os.setxattr(tree / "one", "user.note", b"x"), "one"),
        (lambda tree: os.link(tree / "one", tree / "other"), "one"),
        (replace, "one"),
        (retarget, "link"),
        (lambda tree: (tree / "sub").chmod(0o700), "sub"),
        (lambda tree: (tree / "sub/new").touch(), "sub"),
    ],
)
def test_every_kind_of_change_is_seen(tree: Path, change: Callable[[Path], object], name: str) -> None:
    before = scan(str(tree))
    next_tick()
    change(tree)
    after = scan(str(tree))
    assert name in compared(before, after)[""][0]
    quick = scan(str(tree), known=before)
    assert differences(after, quick) == differences(quick, after) == []
    assert (quick.files, quick.bytes) == (after.files, after.bytes)


def test_deletions_additions_and_renames_are_named_where_they_happened(tree: Path) -> None:
    before = scan(str(tree))
    (tree / "sub/deep/three").rename(tree / "sub/deep/four")
    (tree / "sub/two").unlink()
    found = compared(before, scan(str(tree)))
    assert found["sub/deep"] == ({"four"}, {"three"})
    assert found["sub"] == ({"deep"}, {"two"})
    assert found[""] == ({"sub"}, set())


def test_a_directory_that_is_gone_is_one_deletion_of_its_parent(tree: Path) -> None:
    before = scan(str(tree))
    (tree / "sub/deep/three").unlink()
    (tree / "sub/deep").rmdir()
    found = compared(before, scan(str(tree)))
    assert found["sub"] == (set(), {"deep"})
    assert "sub/deep" not in found


def test_the_attributes_of_the_tree_itself_count(tree: Path) -> None:
    before = scan(str(tree))
    tree.chmod(0o711)
    assert differences(before, scan(str(tree))) == [Difference("")]


def test_a_new_empty_directory_is_a_difference_of_its_own(tree: Path) -> None:
    before = scan(str(tree))
    (tree / "sub/empty").mkdir()
    assert compared(before, scan(str(tree)))["sub/empty"] == (set(), set())


def test_a_live_directory_counts_without_what_is_in_it(tree: Path) -> None:
    before = scan(str(tree), live={"sub"})
    (tree / "sub/new").touch()
    after = scan(str(tree), live={"sub"})
    assert differences(before, after) == []
    assert (after.files, after.shut, after.mounts) == (1, {"sub"}, set())
    (tree / "sub").chmod(0o700)
    assert compared(after, scan(str(tree), live={"sub"}))[""] == ({"sub"}, set())


def test_a_file_cannot_be_live(tree: Path) -> None:
    found = scan(str(tree), live={"one"})
    assert (found.files, found.shut) == (3, set())


def test_what_is_to_be_left_out_is_not_there(tree: Path) -> None:
    found = scan(str(tree), leave_out={"sub/deep"})
    assert scanning.names_of(found.directories["sub"]) == ["two"]
    assert (found.files, found.left_out) == (2, {})


def test_sockets_are_left_out_and_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        found = scan(str(tree))
    assert found.left_out == scan(str(tree), known=found).left_out == {"socket": "socket"}
    assert "socket" not in scanning.names_of(found.directories[""])


def test_a_directory_that_cannot_be_read_is_left_out_and_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = os.open

    def closed(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith("sub/deep"):
            raise PermissionError(13, "Permission denied")
        return true(path, flags, mode, dir_fd=dir_fd)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", closed)
    found = scan(str(tree))
    assert found.left_out == {"sub/deep": "unreadable"}
    assert scanning.names_of(found.directories["sub"]) == ["two"]
    assert "sub/deep" not in found.directories


@pytest.mark.parametrize("becomes", ["nothing", "link", "other directory"])
def test_a_directory_that_is_replaced_while_it_is_scanned_is_not_looked_into(
    tree: Path, place: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    (place / "outside").mkdir()
    (place / "outside/secret").touch()
    true = os.open

    def racing(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith("tree/sub") and (tree / "sub/two").exists():
            (tree / "sub").rename(place / "away")
            if becomes == "link":
                (tree / "sub").symlink_to(place / "outside")
            elif becomes == "other directory":
                (tree / "sub").mkdir()
                (tree / "sub/secret").touch()
        return true(path, flags, mode, dir_fd=dir_fd)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", racing)
    found = scan(str(tree))
    assert sorted(scanning.names_of(found.directories[""])) == ["link", "one"]
    assert list(found.directories) == [""]


@pytest.mark.parametrize("name", [b"\xff\xfe", b"new\nline", b" ", b"x" * 255, "日本".encode()], ids=ascii)
def test_names_of_any_kind_survive_saving(tree: Path, name: bytes) -> None:
    with open(os.path.join(os.fsencode(tree), name), "wb"):
        pass
    found = scan(str(tree))
    loaded = scanning.load(scanning.save(found))
    assert loaded is not None
    assert os.fsdecode(name) in scanning.names_of(loaded.directories[""])
    assert differences(loaded, scan(str(tree))) == []


def test_a_loaded_scan_says_what_the_saved_one_said(tree: Path) -> None:
    found = scan(str(tree), live={"sub/deep"})
    found.left_out["sub/x"] = "unreadable"
    loaded = scanning.load(scanning.save(found))
    assert loaded is not None
    for name in ("own", "directories", "files", "bytes", "left_out", "shut", "mounts", "partial"):
        assert getattr(loaded, name) == getattr(found, name)


def test_a_damaged_scan_is_none(tree: Path) -> None:
    content = scanning.save(scan(str(tree)))
    for damaged in (b"", content[:3], content[:-1], content[:-1] + b"?", bytes(len(content)), content[4:]):
        assert scanning.load(damaged) is None


def test_a_scan_of_another_format_is_none(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = scanning.save(scan(str(tree)))
    monkeypatch.setattr(scanning, "_FORMAT", 2)
    assert scanning.load(content) is None


@pytest.mark.parametrize(
    ("mtime", "ctime", "sure"),
    [
        (0, 50, True),
        (0, 99.5, True),
        (0, 99.95, False),
        (0, 100, False),
        (0, 200, False),
        (99.95, 50, False),
        (100.05, 50, False),
        (10_000, 50, True),
    ],
)
def test_what_changed_just_before_it_was_read_is_not_trusted(mtime: float, ctime: float, sure: bool) -> None:
    row = (0, 1, 2, int(mtime * SECOND) + 1, int(ctime * SECOND) + 1)
    assert (scanning.settled(row, 100 * SECOND) == row) is sure


def test_times_of_a_coarse_file_system_get_a_wider_margin() -> None:
    row = (0, 1, 2, 0, 98 * SECOND)
    assert scanning.settled(row, 100 * SECOND) != row
    assert scanning.settled(row, 101 * SECOND) == row


def test_rows_are_what_stat_says(tree: Path) -> None:
    rows = scanning.rows_of(scan(str(tree)).directories[""])
    for name in ("one", "sub", "link"):
        assert rows[name] == scanning.row_of((tree / name).lstat())
        assert stat.S_IFMT(rows[name][0]) == stat.S_IFMT((tree / name).lstat().st_mode)


def test_a_tree_deeper_than_a_path_may_be_is_named_and_the_rest_is_scanned(tree: Path) -> None:
    here = os.open(tree, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    found = scan(str(tree))
    assert list(found.left_out.values()) == ["path too long"]
    assert found.files == 3
    assert differences(found, scan(str(tree))) == []


def test_a_tree_deeper_than_python_has_frames_is_scanned(tree: Path) -> None:
    path = str(tree)
    for _ in range(1500):
        path += "/d"
        os.mkdir(path)
    found = scan(str(tree))
    assert found.left_out == {}
    assert len(found.directories) == 1503


def test_what_could_not_be_copied_and_is_as_it_was_stays_named(tree: Path) -> None:
    before = scan(str(tree))
    before.left_out = {"sub/two": "unreadable", "one": "unreadable", "gone": "socket"}
    (tree / "one").chmod(0o640)
    after = scan(str(tree))
    scanning.inherit(before, after)
    assert after.left_out == {"sub/two": "unreadable"}


def test_with_an_older_scan_only_directories_with_new_times_are_listed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = scan(str(tree))
    next_tick()
    (tree / "sub/new").touch()
    (tree / "one").write_text("changed")
    listed = []
    true = scanning._listed

    def counting(fd: int) -> tuple[list[str], list[os.stat_result]]:
        listed.append(os.readlink(f"/proc/self/fd/{fd}"))
        return true(fd)

    monkeypatch.setattr(scanning, "_listed", counting)
    found = compared(before, scan(str(tree), known=before))
    assert listed == [str(tree / "sub")]
    assert found == {"": ({"one", "sub"}, set()), "sub": ({"new"}, set())}


def test_on_a_file_system_that_is_not_known_to_keep_times_everything_is_listed(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = scan(str(tree))
    monkeypatch.setattr(scanning, "_KEEPING_TIMES", frozenset())
    about = tree.stat()
    listed = []
    true = scanning._listed
    monkeypatch.setattr(scanning, "_listed", lambda fd: (listed.append(fd), true(fd))[1])
    assert about.st_ino == scan(str(tree), known=before).inodes[""]
    assert len(listed) == 3


def test_a_name_that_is_known_and_gone_at_that_moment_is_not_there(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = scan(str(tree))
    next_tick()
    true = os.open

    def racing(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith("tree/sub"):
            (tree / "sub/two").unlink(missing_ok=True)
        return true(path, flags, mode, dir_fd=dir_fd)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", racing)
    assert scanning.names_of(scan(str(tree), known=before).directories["sub"]) == ["deep"]
    assert scanning.names_of(scan(str(tree), known=before).directories["sub"]) == ["deep"]
