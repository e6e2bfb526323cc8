"""Deleting: whatever a sandbox left in a tree, the tree goes and nothing outside it does."""

import os
import subprocess
from pathlib import Path

import pytest

from elsewhere.storage import trash

DEPTH = 1200  # more levels than Python has frames, than a process may have files, and than a path may have bytes


def deep(top: Path) -> None:
    """Made level by level: the whole path would be too long."""
    top.mkdir()
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for level in range(DEPTH):
        os.mkdir("deep", dir_fd=here)
        if level % 10 == 0:
            os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here))
        below = os.open("deep", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_tree_of_everything_is_removed(place: Path) -> None:
    tree = place / "tree"
    (tree / "a/b/c").mkdir(parents=True)
    (tree / "a/file").write_text("x")
    (tree / "a/read-only").touch(mode=0o400)
    (tree / "a/link").symlink_to("file")
    (tree / "a/dangling").symlink_to("/nonexistent")
    os.link(tree / "a/file", tree / "a/b/hard")
    os.mkfifo(tree / "a/fifo")
    trash.remove_tree(str(tree))
    assert list(place.iterdir()) == []


def test_a_single_file_and_a_missing_path_are_removed_too(place: Path) -> None:
    (place / "file").touch()
    trash.remove_tree(str(place / "file"))
    trash.remove_tree(str(place / "missing"))
    assert list(place.iterdir()) == []


def test_links_that_lead_outside_are_removed_and_not_followed(place: Path) -> None:
    outside = place / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "sub/precious").write_text("still here")
    outside.chmod(0o750)
    tree = place / "tree"
    (tree / "sub").mkdir(parents=True)
    for directory in (tree, tree / "sub"):
        (directory / "absolute").symlink_to(outside)
        (directory / "file").symlink_to(outside / "sub/precious")
        (directory / "root").symlink_to("/")
        (directory / "up").symlink_to("..")
    (tree / "relative").symlink_to("../outside/sub")
    trash.remove_tree(str(tree))
    assert not tree.exists()
    assert (outside / "sub/precious").read_text() == "still here"
    assert outside.stat().st_mode & 0o777 == 0o750


def test_a_link_in_place_of_the_tree_is_removed_and_not_followed(place: Path) -> None:
    (place / "outside").mkdir()
    (place / "outside/precious").touch()
    (place / "tree").symlink_to("outside")
    trash.remove_tree(str(place / "tree"))
    assert sorted(path.name for path in place.rglob("*")) == ["outside", "precious"]


def test_a_hard_link_of_a_file_outside_leaves_that_file_as_it_is(place: Path) -> None:
    (place / "outside").write_text("still here")
    (place / "outside").chmod(0o640)
    (place / "tree").mkdir()
    os.link(place / "outside", place / "tree/hard")
    trash.remove_tree(str(place / "tree"))
    assert (place / "outside").read_text() == "still here"
    assert (place / "outside").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o200, 0o300, 0o400, 0o500, 0o600])
def test_directories_that_their_owner_closed_are_removed(place: Path, mode: int) -> None:
    for name in ("empty", "full", "full/inner"):
        (place / "tree" / name).mkdir(parents=True)
    (place / "tree/full/inner/file").touch()
    for name in ("full/inner", "full", "empty", ""):
        (place / "tree" / name).chmod(mode)
    trash.remove_tree(str(place / "tree"))
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("closed", [False, True])
def test_a_tree_deeper_than_any_limit_is_removed(place: Path, closed: bool) -> None:
    deep(place / "tree")
    if closed:
        (place / "tree/deep/deep").chmod(0)
    before = descriptors()
    trash.remove_tree(str(place / "tree"))
    assert list(place.iterdir()) == []
    assert descriptors() == before


def test_a_wide_tree_is_removed(place: Path) -> None:
    for number in range(40):
        (place / f"tree/{number}").mkdir(parents=True)
        for name in range(25):
            (place / f"tree/{number}/{name}").touch()
    trash.remove_tree(str(place / "tree"))
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("name", [b"new\nline", b"\xff\xfe", b"-rf", b" ", b"*", b"x" * 255, "日本".encode()], ids=ascii)
def test_names_of_any_kind_are_removed(place: Path, name: bytes) -> None:
    inner = os.path.join(os.fsencode(place), b"tree", name)
    os.makedirs(inner)
    os.mkfifo(os.path.join(inner, name))
    trash.remove_tree(str(place / "tree"))
    assert list(place.iterdir()) == []


def test_discarding_moves_a_tree_into_the_trash_whole(place: Path) -> None:
    (place / "trash").mkdir()
    (place / "box/sub").mkdir(parents=True)
    (place / "box/sub/file").write_text("content")
    number = (place / "box").stat().st_ino
    trash.discard(str(place / "box"), str(place / "trash"))
    assert not (place / "box").exists()
    (moved,) = (place / "trash").iterdir()
    assert moved.stat().st_ino == number
    assert (moved / "sub/file").read_text() == "content"


def test_discarding_what_is_not_there_does_nothing(place: Path) -> None:
    (place / "trash").mkdir()
    trash.discard(str(place / "missing"), str(place / "trash"))
    assert list((place / "trash").iterdir()) == []


def test_discarding_the_same_name_again_and_again_keeps_them_apart(place: Path) -> None:
    (place / "trash").mkdir()
    for number in range(10):
        (place / "upper").mkdir()
        (place / f"upper/{number}").touch()
        trash.discard(str(place / "upper"), str(place / "trash"))
    assert sorted(path.name for path in place.glob("trash/*/*")) == [str(number) for number in range(10)]


def test_leftovers_of_an_earlier_process_with_the_same_number_are_not_in_the_way(place: Path) -> None:
    """After a restart of the machine, process ids and counters begin anew while the trash is still full."""
    (place / "trash").mkdir()
    (place / "upper").mkdir()
    trash.discard(str(place / "upper"), str(place / "trash"))
    (first,) = (place / "trash").iterdir()
    words = first.name.split("-")
    for ahead in range(1, 5):
        if len(words) > 1 and words[1].isdigit():
            (place / "trash" / f"{words[0]}-{int(words[1]) + ahead}-upper" / "old").mkdir(parents=True)
    (place / "upper").mkdir()
    (place / "upper/new").touch()
    trash.discard(str(place / "upper"), str(place / "trash"))
    assert not (place / "upper").exists()
    assert len(list((place / "trash").glob("*/new"))) == 1


def test_emptying_removes_everything_that_lies_in_the_trash(place: Path) -> None:
    (place / "trash/a/b").mkdir(parents=True)
    (place / "trash/file").touch()
    (place / "outside").mkdir()
    (place / "trash/link").symlink_to("../outside")
    assert trash.empty(str(place / "trash")) == 0
    assert sorted(path.name for path in place.iterdir()) == ["outside", "trash"]
    assert list((place / "trash").iterdir()) == []


def test_emptying_an_empty_trash_does_nothing(place: Path) -> None:
    assert trash.empty(str(place)) == 0


def test_emptying_counts_what_cannot_be_deleted_and_goes_on_with_the_rest(place: Path) -> None:
    for name in ("a", "stuck", "z"):
        (place / "trash" / name).mkdir(parents=True)
        (place / "trash" / name / "file").touch()
    if os.geteuid() == 0:
        held = place / "trash/stuck/file"
        if subprocess.run(["chattr", "+i", held], check=False, capture_output=True).returncode:
            pytest.skip("this file system has no immutable files")
        release = ["chattr", "-i", str(held)]
        expected, left = 1, ["stuck"]
    else:
        (place / "trash").chmod(0o500)
        release = ["chmod", "700", str(place / "trash")]
        expected, left = 3, ["a", "stuck", "z"]
    try:
        assert trash.empty(str(place / "trash")) == expected
        assert sorted(path.name for path in (place / "trash").iterdir()) == left
    finally:
        subprocess.run(release, check=True)
    assert trash.empty(str(place / "trash")) == 0
    assert list((place / "trash").iterdir()) == []


def test_emptying_survives_a_tree_deeper_than_any_limit(place: Path) -> None:
    (place / "trash").mkdir()
    deep(place / "trash/deep")
    (place / "trash/other").mkdir()
    assert trash.empty(str(place / "trash")) == 0
    assert list((place / "trash").iterdir()) == []
