"""What a tree became: from a whole copy, and from the layer that an overlay leaves."""

import functools
import os
import random
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elsewhere.changes import renames
from elsewhere.changes.compare import Changes, View, compare_overlay, compare_states, compare_trees
from elsewhere.changes.renames import with_renames
from elsewhere.storage import stacks
from elsewhere.storage.encodings import FUSE, TRUSTED, USER, Encoding, saved
from elsewhere.storage.trees import entries_of

Entry = bytes | str | int | None | tuple[bytes, int]
Tree = Mapping[str, Entry]


def grow(top: Path, tree: Tree) -> Path:
    """bytes: a file; (bytes, mode): a file with a mode; str: a link that leads there; None or a mode: a directory."""
    top.mkdir(parents=True, exist_ok=True)
    for name, entry in tree.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, bytes):
            path.write_bytes(entry)
        elif isinstance(entry, tuple):
            path.write_bytes(entry[0])
            path.chmod(entry[1])
        elif isinstance(entry, str):
            path.symlink_to(entry)
        else:
            path.mkdir(exist_ok=True)
            if entry is not None:
                path.chmod(entry)
    return top


def trees(place: Path, real: Tree, now: Tree) -> Changes:
    return compare_trees(str(grow(place / "now", now)), str(grow(place / "real", real)), "/at")


def overlay(
    place: Path, real: Tree, upper: Tree, pristine: Mapping[str, bytes] | None = None, encoding: Encoding = FUSE
) -> Changes:
    return compare_overlay(str(grow(place / "upper", upper)), str(grow(place / "real", real)), "/at", encoding, pristine)


def changes(*, added: str = "", modified: str = "", deleted: str = "") -> Changes:
    """Names relative to /at, with spaces between them."""
    return Changes(*([f"/at/{name}" for name in names.split()] for names in (added, modified, deleted)))


def mark(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"the attribute {name} cannot be set here: {error.strerror}")


def hide_by_name(directory: Path, name: str) -> None:
    (directory / f".wh.{name}").touch()


def hide_by_device(directory: Path, name: str) -> None:
    try:
        os.mknod(directory / name, stat.S_IFCHR, os.makedev(0, 0))
    except PermissionError:
        pytest.skip("whiteouts cannot be made here")


def opaque_by_name(directory: Path) -> None:
    (directory / ".wh..wh..opq").touch()


def opaque_by_user_attribute(directory: Path) -> None:
    mark(directory, "user.overlay.opaque", b"y")


def opaque_by_trusted_attribute(directory: Path) -> None:
    mark(directory, "trusted.overlay.opaque", b"y")


hidings = pytest.mark.parametrize("hide", [hide_by_name, hide_by_device])
opaques = pytest.mark.parametrize("close", [opaque_by_name, opaque_by_user_attribute, opaque_by_trusted_attribute])


# -- a pair of entries, the same answers from a whole copy and from a layer -----------------------------------------------------

BOTH = pytest.mark.parametrize("compare", [trees, overlay])
Compare = Callable[[Path, Tree, Tree], Changes]


@BOTH
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (b"a", b"a", changes()),
        (b"", b"", changes()),
        (b"a", b"b", changes(modified="x")),
        (b"a", b"ab", changes(modified="x")),
        (b"a", b"", changes(modified="x")),
        (b"a" * 600_000 + b"b", b"a" * 600_000 + b"c", changes(modified="x")),
        (b"a" * 600_000, b"a" * 600_000, changes()),
        ((b"a", 0o644), (b"a", 0o755), changes(modified="x")),
        ((b"a", 0o644), (b"a", 0o4644), changes(modified="x")),
        ("one", "one", changes()),
        ("one", "two", changes(modified="x")),
        (b"one", "one", changes(modified="x")),
        ("one", b"one", changes(modified="x")),
        (None, b"a", changes(added="x", deleted="x/")),
        (b"a", None, changes(added="x/", deleted="x")),
        (None, "one", changes(added="x", deleted="x/")),
        ("one", None, changes(added="x/", deleted="x")),
        (None, None, changes()),
        (0o755, 0o700, changes(modified="x/")),
        (0o755, 0o1755, changes(modified="x/")),
    ],
)
def test_one_entry_that_is_there_before_and_after(
    place: Path, compare: Compare, before: Entry, after: Entry, expected: Changes
) -> None:
    assert compare(place, {"x": before, "other": b"1"}, {"x": after, "other": b"1"}) == expected


@BOTH
@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"x": b"a"}, "x"),
        ({"x": b""}, "x"),
        ({"x": "anywhere"}, "x"),
        ({"x": None}, "x/"),
        ({"x/y": None}, "x/y/"),
        ({"x/y": b"", "x/z/w": b"", "x/e": None}, "x/e/ x/y x/z/w"),
    ],
)
def test_what_is_new_is_added_file_by_file_and_directories_only_if_empty(
    place: Path, compare: Compare, tree: Tree, expected: str
) -> None:
    assert compare(place, {}, tree) == changes(added=expected)


@BOTH
def test_rewriting_a_file_with_what_it_had_is_no_change(place: Path, compare: Compare) -> None:
    tree = {"a": b"same", "d/b": (b"same", 0o600), "d/l": "there"}
    grow(place / "real", tree)
    for path in (place / "real/a", place / "real/d", place / "real"):
        os.utime(path, (1, 1))
    assert not compare(place, {}, tree)


@BOTH
def test_a_file_that_became_a_directory_is_deleted_and_its_content_added(place: Path, compare: Compare) -> None:
    assert compare(place, {"x": b"1"}, {"x/y": b"2", "x/z": None}) == changes(added="x/y x/z/", deleted="x")


@BOTH
def test_a_directory_that_became_a_file_has_all_its_files_deleted(place: Path, compare: Compare) -> None:
    real = {"x/y": b"1", "x/d/z": b"2", "x/e": None}
    assert compare(place, real, {"x": b"3"}) == changes(added="x", deleted="x/d/z x/e/ x/y")


@BOTH
@pytest.mark.parametrize("leads", ["/etc", "../outside", ".", "y"])
def test_a_link_in_place_of_a_directory_is_a_link_and_never_followed(place: Path, compare: Compare, leads: str) -> None:
    grow(place / "outside", {"secret": b"1", "y": b"changed"})
    found = compare(place, {"d/y": b"1"}, {"d": leads})
    assert found == changes(added="d", deleted="d/y")


@BOTH
def test_a_new_link_to_a_directory_is_one_entry(place: Path, compare: Compare) -> None:
    assert compare(place, {}, {"link": "/"}) == changes(added="link")


@BOTH
def test_a_link_in_reality_is_not_followed_either(place: Path, compare: Compare) -> None:
    grow(place / "outside", {"same": b"1"})
    assert compare(place, {"d": "../outside"}, {"d/same": b"1"}) == changes(added="d/same", deleted="d")


@BOTH
def test_a_fifo_is_compared_without_waiting_for_it(place: Path, compare: Compare) -> None:
    grow(place / "real", {})
    for side in ("real", "now", "upper"):
        (place / side).mkdir(exist_ok=True)
        os.mkfifo(place / side / "same")
    os.mkfifo(place / "real/file")
    assert compare(place, {}, {"file": b"", "new": b""}) == changes(added="new", modified="file")


@BOTH
@pytest.mark.parametrize("name", [b"\xff\xfe", b"new\nline", b" ", b"x" * 255, "日本".encode()], ids=ascii)
def test_names_of_any_kind_are_compared(place: Path, compare: Compare, name: bytes) -> None:
    text = os.fsdecode(name)
    real = {text: b"1", f"d/{text}": b"1", f"same/{text}": b"1"}
    now = {text: b"2", f"d/{text}": (b"1", 0o600), f"same/{text}": b"1", f"new/{text}/{text}": b"3"}
    assert compare(place, real, now) == Changes(
        added=[f"/at/new/{text}/{text}"], modified=sorted([f"/at/{text}", f"/at/d/{text}"])
    )


@BOTH
def test_nothing_is_left_open(place: Path, compare: Compare) -> None:
    before = len(os.listdir("/proc/self/fd"))
    compare(place, {"a/b/c": b"1", "d/e": b"2", "f/g": b""}, {"a/b/c": b"3", "d": b"4", "f/g/h": b"5"})
    assert len(os.listdir("/proc/self/fd")) == before


@BOTH
def test_the_lists_are_sorted(place: Path, compare: Compare) -> None:
    names = [f"{letter}{number}" for letter in "zaMb" for number in range(5)]
    assert compare(place, {}, dict.fromkeys(names, b"")).added == sorted(f"/at/{name}" for name in names)


@pytest.mark.parametrize(("at", "expected"), [("/", "/etc/x"), ("/srv/p", "/srv/p/etc/x"), ("/srv/p/", "/srv/p/etc/x")])
def test_paths_are_those_of_the_place_where_the_tree_is_mounted(place: Path, at: str, expected: str) -> None:
    grow(place / "upper", {"etc/x": b""})
    grow(place / "real", {})
    assert compare_overlay(str(place / "upper"), str(place / "real"), at, TRUSTED).added == [expected]
    assert compare_trees(str(place / "upper"), str(place / "real"), at).added == [expected]


@BOTH
def test_a_tree_deeper_than_a_path_may_be_long_is_told_and_not_stumbled_over(place: Path, compare: Compare) -> None:
    for side in ("now", "upper"):
        grow(place / side, {})
        here = os.open(place / side, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(20):
            os.mkdir("d" * 250, dir_fd=here)
            below = os.open("d" * 250, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
    found = compare(place, {"other": b"1"}, {"other": b"2"})
    assert "/at/other" in found.modified
    assert any(path.startswith("/at/" + "d" * 250) for _, path in found)


@BOTH
def test_a_closed_directory_in_the_tree_is_told_and_the_rest_is_compared(place: Path, compare: Compare) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    for side in ("now", "upper"):
        grow(place / side, {"d/inside": b""})
        (place / side / "d").chmod(0)
    found = compare(place, {}, {"new": b""})
    assert "/at/new" in found.added
    assert any(path.startswith("/at/d") for _, path in found)


@BOTH
def test_a_closed_directory_in_reality_does_not_keep_the_rest_from_being_compared(place: Path, compare: Compare) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    grow(place / "real", {"closed/inside": b"", "both/inside": b""})
    for side in ("now", "upper"):
        grow(place / side, {"closed/inside": b"", "both/inside": b""})
        (place / side / "both").chmod(0)
    (place / "real/closed").chmod(0)
    (place / "real/both").chmod(0)
    assert compare(place, {}, {"new": b""}).added == ["/at/new"]


@BOTH
def test_a_file_that_cannot_be_read_counts_as_modified(place: Path, compare: Compare) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    assert compare(place, {"x": (b"1", 0)}, {"x": (b"1", 0)}) == changes(modified="x")


@pytest.mark.parametrize("compare", [compare_trees, functools.partial(compare_overlay, encoding=TRUSTED)])
@pytest.mark.parametrize("sides", [("here", "missing"), ("missing", "here")])
def test_a_missing_side_is_an_error_that_leaves_nothing_open(
    place: Path, compare: Callable[[str, str, str], Changes], sides: tuple[str, str]
) -> None:
    grow(place / "here", {})
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        compare(str(place / sides[0]), str(place / sides[1]), "/at")
    assert len(os.listdir("/proc/self/fd")) == before


# -- a whole copy ---------------------------------------------------------------------------------------------------------------


def test_what_is_missing_in_a_copy_is_deleted_file_by_file(place: Path) -> None:
    real = {"a": b"", "d/b": b"", "d/e/c": b"", "d/f": None, "l": "x", "kept": b""}
    assert trees(place, real, {"kept": b""}) == changes(deleted="a d/b d/e/c d/f/ l")


def test_a_directory_that_became_empty_shows_only_what_is_gone(place: Path) -> None:
    assert trees(place, {"d/a": b"", "d/b": b""}, {"d": None}) == changes(deleted="d/a d/b")


def test_in_a_copy_names_that_look_like_whiteouts_are_names_like_any_other(place: Path) -> None:
    found = trees(place, {"x": b"1", "d/y": b""}, {"x": b"1", ".wh.x": b"", "d/.wh..wh..opq": b"", "d/y": b""})
    assert found == changes(added=".wh.x d/.wh..wh..opq")


def test_in_a_copy_attributes_that_look_like_an_overlays_are_data(place: Path) -> None:
    grow(place / "now", {"d": None})
    mark(place / "now/d", "user.overlay.opaque", b"y")
    mark(place / "now/d", "user.overlay.redirect", b"/other")
    assert not trees(place, {"d/x": b"1", "other/y": b"2"}, {"d/x": b"1", "other/y": b"2"})


# -- a layer --------------------------------------------------------------------------------------------------------------------


def test_what_a_layer_does_not_name_is_unchanged(place: Path) -> None:
    assert not overlay(place, {"a": b"", "d/b": b"", "e": None}, {})


def test_a_directory_in_a_layer_is_no_change_by_itself(place: Path) -> None:
    assert not overlay(place, {"d/e/f": b"1"}, {"d/e": None})


@hidings
def test_a_whiteout_deletes_a_file(place: Path, hide: Callable[[Path, str], None]) -> None:
    hide(grow(place / "upper", {}), "a")
    assert overlay(place, {"a": b"", "b": b""}, {}) == changes(deleted="a")


@hidings
def test_a_whiteout_deletes_a_link_and_not_what_it_leads_to(place: Path, hide: Callable[[Path, str], None]) -> None:
    hide(grow(place / "upper", {}), "l")
    assert overlay(place, {"l": "d", "d/b": b""}, {}) == changes(deleted="l")


@hidings
def test_a_whiteout_deletes_a_directory_file_by_file(place: Path, hide: Callable[[Path, str], None]) -> None:
    hide(grow(place / "upper", {}), "d")
    assert overlay(place, {"d/a": b"", "d/e/b": b"", "d/f": None, "x": b""}, {}) == changes(deleted="d/a d/e/b d/f/")


@hidings
def test_a_whiteout_deletes_an_empty_directory(place: Path, hide: Callable[[Path, str], None]) -> None:
    hide(grow(place / "upper", {}), "d")
    assert overlay(place, {"d": None}, {}) == changes(deleted="d/")


@hidings
def test_a_whiteout_of_what_reality_does_not_have_is_no_change(place: Path, hide: Callable[[Path, str], None]) -> None:
    hide(grow(place / "upper", {}), "a")
    hide(grow(place / "upper/new", {}), "b")
    assert overlay(place, {}, {"new/c": b""}) == changes(added="new/c")


@hidings
@pytest.mark.parametrize("depth", [1, 3])
def test_a_whiteout_further_down_deletes_there(place: Path, hide: Callable[[Path, str], None], depth: int) -> None:
    inner = "/".join("abc"[:depth])
    hide(grow(place / f"upper/{inner}", {}), "x")
    assert overlay(place, {f"{inner}/x": b"", f"{inner}/y": b"", "x": b""}, {}) == changes(deleted=f"{inner}/x")


@hidings
def test_a_whiteout_with_a_name_that_is_no_utf_8_deletes_it(place: Path, hide: Callable[[Path, str], None]) -> None:
    name = os.fsdecode(b"\xff\n")
    hide(grow(place / "upper", {}), name)
    assert overlay(place, {name: b""}, {}) == Changes(deleted=[f"/at/{name}"])


def test_a_whiteout_by_name_beside_a_new_entry_of_that_name_is_a_replacement(place: Path) -> None:
    assert overlay(place, {"a": b"1"}, {".wh.a": b"", "a": b"2"}) == changes(modified="a")


@opaques
def test_an_opaque_directory_deletes_all_that_it_does_not_name(place: Path, close: Callable[[Path], None]) -> None:
    close(grow(place / "upper/d", {"same": b"1", "new": b"", "other": b"2"}))
    real = {"d/same": b"1", "d/other": b"1", "d/gone": b"", "d/e/deep": b"", "d/f": None, "outside": b""}
    assert overlay(place, real, {}) == changes(added="d/new", modified="d/other", deleted="d/e/deep d/f/ d/gone")


@opaques
def test_an_opaque_directory_where_reality_has_none_is_new(place: Path, close: Callable[[Path], None]) -> None:
    """The kernel marks every new directory so."""
    close(grow(place / "upper/d", {"a": b""}))
    close(grow(place / "upper/empty", {}))
    assert overlay(place, {}, {}) == changes(added="d/a empty/")


@opaques
def test_an_opaque_directory_in_place_of_a_file_is_new(place: Path, close: Callable[[Path], None]) -> None:
    close(grow(place / "upper/d", {"a": b""}))
    assert overlay(place, {"d": b"1"}, {}) == changes(added="d/a", deleted="d")


@opaques
def test_below_an_opaque_directory_nothing_shows_through_either(place: Path, close: Callable[[Path], None]) -> None:
    close(grow(place / "upper/d", {"e/new": b""}))
    assert overlay(place, {"d/e/old": b"", "d/x": b""}, {}) == changes(added="d/e/new", deleted="d/e/old d/x")


@opaques
def test_an_opaque_directory_with_everything_that_was_there_is_no_change(place: Path, close: Callable[[Path], None]) -> None:
    tree = {"a": b"1", "e/b": b"2", "l": "a", "f": None}
    close(grow(place / "upper/d", tree))
    assert not overlay(place, {f"d/{name}": entry for name, entry in tree.items()}, {})


def test_an_attribute_that_says_no_is_not_opaque(place: Path) -> None:
    grow(place / "upper/d", {})
    mark(place / "upper/d", "user.overlay.opaque", b"n")
    assert not overlay(place, {"d/a": b""}, {})


redirects = pytest.mark.parametrize("attribute", ["trusted.overlay.redirect", "user.overlay.redirect"])


@redirects
def test_a_renamed_directory_is_added_there_and_deleted_here(place: Path, attribute: str) -> None:
    hide_by_name(grow(place / "upper", {}), "old")
    mark(grow(place / "upper/new", {}), attribute, b"old")
    real = {"old/a": b"1", "old/d/b": b"2", "old/e": None}
    assert overlay(place, real, {}) == changes(added="new/a new/d/b new/e/", deleted="old/a old/d/b old/e/")


@redirects
def test_a_directory_renamed_to_another_place_is_followed_from_the_top(place: Path, attribute: str) -> None:
    hide_by_name(grow(place / "upper/x", {}), "old")
    mark(grow(place / "upper/y/new", {}), attribute, b"/x/old")
    assert overlay(place, {"x/old/a": b"", "y/z": b""}, {}) == changes(added="y/new/a", deleted="x/old/a")


@redirects
def test_what_was_done_in_a_renamed_directory_counts(place: Path, attribute: str) -> None:
    hide_by_name(grow(place / "upper", {}), "old")
    mark(grow(place / "upper/new", {"a": b"changed", "c": b"", "d/x": b""}), attribute, b"old")
    hide_by_name(place / "upper/new", "b")
    real = {"old/a": b"1", "old/b": b"", "old/d/y": b""}
    assert overlay(place, real, {}) == changes(added="new/a new/c new/d/x new/d/y", deleted="old/a old/b old/d/y")


@redirects
def test_a_directory_renamed_over_another_shows_the_difference(place: Path, attribute: str) -> None:
    hide_by_name(grow(place / "upper", {}), "old")
    mark(grow(place / "upper/new", {}), attribute, b"old")
    real = {"old/same": b"1", "old/other": b"1", "old/a": b"", "new/same": b"1", "new/other": b"2", "new/b": b""}
    assert overlay(place, real, {}) == changes(added="new/a", modified="new/other", deleted="new/b old/a old/other old/same")


@redirects
def test_two_directories_that_changed_places_show_the_difference(place: Path, attribute: str) -> None:
    mark(grow(place / "upper/one", {}), attribute, b"two")
    mark(grow(place / "upper/two", {}), attribute, b"one")
    assert overlay(place, {"one/a": b"1", "one/s": b"", "two/b": b"2", "two/s": b""}, {}) == changes(
        added="one/b two/a", deleted="one/a two/b"
    )


@redirects
@pytest.mark.parametrize("leads", [b"/../outside", b"../outside", b"/link", b"/missing", b"/", b"", b"/file", b"\xff"], ids=ascii)
def test_a_redirect_that_leads_outside_or_nowhere_is_never_followed(place: Path, attribute: str, leads: bytes) -> None:
    grow(place / "outside", {"secret": b""})
    mark(grow(place / "upper/d", {"a": b""}), attribute, leads)
    found = overlay(place, {"link": "../outside", "file": b""}, {})
    assert "/at/d/a" in found.added
    assert not any("secret" in path for _, path in found)


def test_a_file_that_was_there_from_the_start_counts_from_that_content(place: Path) -> None:
    real = {"same": b"secret", "edited": b"secret", "back": b"secret", "longer": b"secret"}
    upper = {"same": b"locked", "edited": b"edited", "back": b"secret", "longer": b"locked and more"}
    pristine = {f"/at/{name}": b"locked" for name in real}
    assert overlay(place, real, upper, pristine) == changes(modified="back edited longer")


# -- proofs by chance -----------------------------------------------------------------------------------------------------------


def describe(top: Path) -> tuple[dict[str, object], dict[str, int], set[str]]:
    """Files with all that counts, directories with their modes, and which of them are empty; written as plainly as can be."""
    files: dict[str, object] = {}
    directories: dict[str, int] = {}
    empty: set[str] = set()
    for directory, names, leaves in os.walk(top):
        for name in names + leaves:
            path = os.path.join(directory, name)
            short = f"/at/{os.path.relpath(path, top)}"
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                files[short] = os.readlink(path)
            elif stat.S_ISDIR(mode):
                directories[short] = stat.S_IMODE(mode)
                if not os.listdir(path):
                    empty.add(short)
            else:
                files[short] = (stat.S_IMODE(mode), Path(path).read_bytes())
    return files, directories, empty


def plainly(now: Path, real: Path) -> Changes:
    new_files, new_directories, new_empty = describe(now)
    old_files, old_directories, old_empty = describe(real)
    modified = [path for path in new_files.keys() & old_files.keys() if new_files[path] != old_files[path]]
    both = new_directories.keys() & old_directories.keys()
    modified += [f"{path}/" for path in both if new_directories[path] != old_directories[path]]
    return Changes(
        added=sorted([*(new_files.keys() - old_files.keys()), *(f"{path}/" for path in new_empty - old_directories.keys())]),
        modified=sorted(modified),
        deleted=sorted([*(old_files.keys() - new_files.keys()), *(f"{path}/" for path in old_empty - new_directories.keys())]),
    )


NAMES = ["a", "b", "c", "d.txt", "e", os.fsdecode(b"\xff"), "two words"]


def operate(top: Path, chance: random.Random, count: int) -> None:
    """Anything that a command might do."""
    for _ in range(count):
        directories = [top, *(path for path in top.rglob("*") if path.is_dir() and not path.is_symlink())]
        path = chance.choice(directories) / chance.choice(NAMES)
        there = os.path.lexists(path)
        folder = path.is_dir() and not path.is_symlink()
        match chance.randrange(8):
            case 0 | 1 if not there:
                path.write_bytes(chance.choice([b"", b"one", b"two"]))
            case 2 if not there:
                path.mkdir()
            case 3 if not there:
                path.symlink_to(chance.choice(["a", "../b", "/etc", "missing"]))
            case 4 if there and not folder and not path.is_symlink():
                path.write_bytes(chance.choice([b"", b"one", b"two"]))
            case 5 if there and not path.is_symlink():
                path.chmod(chance.choice([0o700, 0o755] if folder else [0o600, 0o644, 0o755]))
            case 6 if there:
                shutil.rmtree(path) if folder else path.unlink()
            case 7 if there:
                other = chance.choice(directories) / chance.choice(NAMES)
                if not os.path.lexists(other) and not other.is_relative_to(path):
                    path.rename(other)


def layer(upper: Path, now: Path, real: Path, hide: Callable[[Path, str], None], chance: random.Random) -> None:
    """What an overlay would have in its upper for `now` over `real`, with now and then more in it than there has to be."""
    for name in os.listdir(real):
        if not os.path.lexists(now / name):
            hide(upper, name)
    for name in os.listdir(now):
        new, old, made = now / name, real / name, upper / name
        if new.is_dir() and not new.is_symlink():
            lies_over = old.is_dir() and not old.is_symlink()
            if lies_over and chance.random() < 0.7:
                made.mkdir()
                layer(made, new, old, hide, chance)
            else:
                shutil.copytree(new, made, symlinks=True)
                for directory, _, _ in os.walk(made):
                    if directory == str(made) or chance.random() < 0.5:
                        opaque_by_name(Path(directory))
            made.chmod(stat.S_IMODE(new.stat().st_mode))
        elif not _alike(new, old) or chance.random() < 0.3:
            shutil.copy2(new, made, follow_symlinks=False)


def _alike(one: Path, other: Path) -> bool:
    if not os.path.lexists(other) or one.lstat().st_mode != other.lstat().st_mode:
        return False
    return os.readlink(one) == os.readlink(other) if one.is_symlink() else one.read_bytes() == other.read_bytes()


def by_chance(place: Path, seed: int) -> tuple[Path, Path, random.Random]:
    chance = random.Random(seed)
    real = grow(place / "real", {})
    operate(real, chance, 60)
    now = place / "now"
    shutil.copytree(real, now, symlinks=True)
    operate(now, chance, chance.choice([1, 5, 40]))
    return now, real, chance


@pytest.mark.parametrize("seed", range(40))
def test_a_copy_after_random_operations_differs_exactly_as_computed_plainly(place: Path, seed: int) -> None:
    now, real, _ = by_chance(place, seed)
    assert compare_trees(str(now), str(real), "/at") == plainly(now, real)


@pytest.mark.parametrize("seed", range(40))
@hidings
def test_a_layer_after_random_operations_differs_exactly_as_computed_plainly(
    place: Path, hide: Callable[[Path, str], None], seed: int
) -> None:
    now, real, chance = by_chance(place, seed)
    upper = grow(place / "upper", {})
    layer(upper, now, real, hide, chance)
    assert compare_overlay(str(upper), str(real), "/at", FUSE) == plainly(now, real)


def test_the_random_operations_do_change_something(place: Path) -> None:
    """Else the two proofs above would prove nothing."""
    kinds = {kind for seed in range(10) for kind, _ in plainly(*by_chance(place / str(seed), seed)[:2])}
    assert kinds == {"added", "modified", "deleted"}


# -- the list itself ------------------------------------------------------------------------------------------------------------


def test_changes_are_false_when_there_are_none_and_say_so() -> None:
    assert not Changes()
    assert Changes().summary() == "nothing changed"


def test_changes_are_counted_and_walked_by_kind() -> None:
    found = Changes(added=["/a", "/b"], deleted=["/c"])
    assert found
    assert found.summary() == "2 added, 1 deleted"
    assert list(found) == [("added", "/a"), ("added", "/b"), ("deleted", "/c")]


def test_changes_of_two_trees_are_joined_and_sorted() -> None:
    found = Changes(added=["/b"], modified=["/z"])
    found.extend(Changes(added=["/a"], deleted=["/c"]))
    found.sort()
    assert found == Changes(added=["/a", "/b"], modified=["/z"], deleted=["/c"])


def test_what_is_hidden_is_left_out_of_the_changes_with_all_below_it() -> None:
    found = Changes(added=["/s", "/s/x", "/s/d/", "/sx"], modified=["/t/"], deleted=["/t/y"])
    assert found.without(["/s", "/t"]) == Changes(added=["/sx"])
    assert found.without([]) == found


@pytest.mark.parametrize("encoding", [TRUSTED, USER])
def test_a_program_inside_cannot_forge_marks_of_another_encoding(tmp_path: Path, encoding: Encoding) -> None:
    """Names and attributes that only another encoding gives a meaning to are just names and attributes."""
    real = grow(tmp_path / "real", {"kept": b"k", "d/f": b"f"})
    upper = grow(tmp_path / "upper", {".wh.kept": b"", "d/.wh..wh..opq": b""})
    mark(upper / "d", "user.overlay.opaque" if encoding is TRUSTED else "user.fuseoverlayfs.opaque", b"y")
    found = compare_overlay(str(upper), str(real), "/at", encoding)
    assert found == changes(added=".wh.kept d/.wh..wh..opq")


def test_marks_beside_a_saved_layer(tmp_path: Path) -> None:
    real = grow(tmp_path / "real", {"gone": b"", "d/old": b"", "d/sub/x": b"", "same": b"s"})
    upper = grow(tmp_path / "upper", {"d/new": b"n", ".wh.name": b""})
    found = compare_overlay(str(upper), str(real), "/at", saved(["gone", "missing"], ["d"]))
    assert found == changes(added=".wh.name d/new", deleted="d/old d/sub/x gone")


# -- what is told of each change ------------------------------------------------------------------------------------------------


def about(found: Changes) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {one.path.removeprefix("/at/"): (one.kind, one.what) for one in found.entries}


@BOTH
def test_what_is_different_about_something_is_told(place: Path, compare: Compare) -> None:
    real: Tree = {
        "content": b"1",
        "mode": (b"1", 0o644),
        "both": (b"1", 0o644),
        "link": "a",
        "type": b"1",
        "d": 0o755,
        "gone": b"1",
    }
    now: Tree = {"content": b"2", "mode": (b"1", 0o755), "both": (b"2", 0o755), "link": "b", "type": "x", "d": 0o700, "new": b"1"}
    if compare is overlay:
        hide_by_name(grow(place / "upper", {}), "gone")
    assert about(compare(place, real, now)) == {
        "content": ("modified", ("content",)),
        "mode": ("modified", ("mode",)),
        "both": ("modified", ("content", "mode")),
        "link": ("modified", ("link",)),
        "type": ("modified", ("type",)),
        "d/": ("modified", ("mode",)),
        "gone": ("deleted", ()),
        "new": ("added", ()),
    }


@BOTH
def test_both_sides_of_a_change_can_be_read_afterwards(place: Path, compare: Compare) -> None:
    found = compare(place, {"d/x": (b"before", 0o600), "l": "one"}, {"d/x": (b"afterwards", 0o644), "l": "two"})
    file, link = found.entries
    assert file.before is not None
    assert file.after is not None
    with file.before.open() as before, file.after.open() as after:
        assert (before.read(), after.read()) == (b"before", b"afterwards")
    assert (file.before.mode, file.before.size, file.before.type) == (0o600, 6, "file")
    assert (file.after.mode, file.after.size) == (0o644, 10)
    assert link.before is not None
    assert link.after is not None
    assert (link.before.target, link.after.target, link.after.type, link.after.size) == ("one", "two", "link", 3)


@pytest.mark.parametrize("instead", ["link", "fifo", "directory", "nothing"])
def test_what_became_something_else_since_is_not_read(place: Path, instead: str) -> None:
    grow(place / "outside", {"secret": b"secret"})
    (change,) = overlay(place, {}, {"d/x": b"1"}).entries
    victim = place / "upper/d/x"
    victim.unlink()
    {
        "link": lambda: victim.symlink_to(place / "outside/secret"),
        "fifo": lambda: os.mkfifo(victim),
        "directory": victim.mkdir,
        "nothing": lambda: None,
    }[instead]()
    assert change.after is not None
    with pytest.raises(OSError, match=r"no file any more|symbolic links"):
        change.after.open()
    shutil.rmtree(place / "upper/d")
    (place / "upper/d").symlink_to(place / "outside")
    (place / "outside/x").write_bytes(b"secret")
    with pytest.raises(OSError, match=r"no file any more|symbolic links"):
        change.after.open()


def test_a_seeded_file_is_read_as_what_it_counts_as(place: Path) -> None:
    (change,) = overlay(place, {"x": b"secret"}, {"x": b"edited"}, {"/at/x": b"locked"}).entries
    assert change.before is not None
    with change.before.open() as stream:
        assert stream.read() == b"locked"


# -- several layers, several states ---------------------------------------------------------------------------------------------


def states(place: Path, real: Tree, before: list[Tree], after: list[Tree]) -> Changes:
    """Layers newest first; a name that begins with ! is deleted."""
    below = [str(grow(place / "real", real))]
    views = []
    for side, trees_ in (("before", before), ("after", after)):
        layers = []
        for number, tree in enumerate(trees_):
            top = grow(place / f"{side}{number}", {name: entry for name, entry in tree.items() if "!" not in name})
            for name in tree:
                if "!" in name:
                    path = top / name.replace("!", "")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    hide_by_name(path.parent, path.name)
            layers.append(str(top))
        views.append(View(layers, below, FUSE))
    return compare_states({"/at": views[0]}, {"/at": views[1]})


def test_layers_are_read_as_one(place: Path) -> None:
    real = {"a": b"1", "b": b"1", "c": b"1", "d/x": b"1"}
    newest: Tree = {"a": b"1", "new": b"2", "!b": b"", "back": b"1"}
    oldest: Tree = {"a": b"other", "b": b"other", "old": b"1", "!c": b"", "!d/x": b"", "!back": b""}
    assert states(place, real, [], [newest, oldest]) == changes(added="back new old", deleted="b c d/x")


def test_two_states_of_one_base_are_compared_with_each_other(place: Path) -> None:
    real = {"same": b"1", "one": b"1", "two": b"1", "d/x": b"1", "e/y": b"1"}
    before: Tree = {"one": b"2", "mine": b"1", "both": b"1", "!d/x": b"", "equal": b"5"}
    after: Tree = {"two": b"2", "theirs": b"1", "both": b"2", "!e/y": b"", "equal": b"5"}
    found = states(place, real, [before], [after])
    assert found == changes(added="d/x theirs", modified="both one two", deleted="e/y mine")


def test_what_two_states_share_is_not_looked_into(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = [str(grow(place / "real", {}))]
    shared = grow(place / "shared", {f"d{number}/e/x": b"1" for number in range(50)})
    upper = grow(place / "upper", {"d3/y": b"2"})
    listed = []
    monkeypatch.setattr(stacks, "entries_of", lambda fd: listed.append(fd) or entries_of(fd))
    found = compare_states({"/at": View([str(shared)], base)}, {"/at": View([str(upper), str(shared)], base)})
    assert found == changes(added="d3/y")
    assert len(listed) == 3 + 3, "the top and d3, in one layer and in two"


def test_two_states_of_different_bases_are_compared_whole(place: Path) -> None:
    one, two = grow(place / "one", {"a": b"1", "b": b"1", "c": b"1"}), grow(place / "two", {"a": b"1", "b": b"2", "n": b"1"})
    upper = grow(place / "upper", {"c": b"1"})
    found = compare_states({"/at": View([], [str(one)])}, {"/at": View([str(upper)], [str(two)])})
    assert found == changes(added="n", modified="b")


def test_frozen_layers_of_a_base_are_read_newest_first(place: Path) -> None:
    old, new = grow(place / "old", {"a": b"1", "b": b"1", "d/x": b"1"}), grow(place / "new", {"a": b"2"})
    hide_by_device(new, "b")
    upper = grow(place / "upper", {"a": b"2", "b": b"1", "d/x": b"3"})
    (added, modified) = compare_overlay(str(upper), [str(new), str(old)], "/at", TRUSTED).entries
    assert (added.path, modified.path) == ("/at/b", "/at/d/x")
    assert modified.before is not None
    with modified.before.open() as stream:
        assert stream.read() == b"1"


@pytest.mark.parametrize("seed", range(40))
def test_two_random_states_differ_exactly_as_computed_plainly(place: Path, seed: int) -> None:
    """Each made of two layers, one of which they share."""
    chance = random.Random(seed)
    real = grow(place / "real", {})
    operate(real, chance, 40)
    trees_, layers = {}, {}
    before = real
    for name, below in (("shared", "real"), ("one", "shared"), ("two", "shared")):
        before, now = place / below, place / name
        shutil.copytree(before, now, symlinks=True)
        operate(now, chance, chance.choice([1, 5, 30]))
        layers[name] = grow(place / f"layer-{name}", {})
        layer(layers[name], now, before, hide_by_name, chance)
        trees_[name] = now
    views = {name: View([str(layers[name]), str(layers["shared"])], [str(real)], FUSE) for name in ("one", "two")}
    assert compare_states({"/at": views["one"]}, {"/at": views["two"]}) == plainly(trees_["two"], trees_["one"])
    assert compare_states({"/at": View([], [str(real)])}, {"/at": views["two"]}) == plainly(trees_["two"], real)
    assert compare_states({"/at": views["one"]}, {"/at": View([], [str(real)])}) == plainly(real, trees_["one"])


# -- renames --------------------------------------------------------------------------------------------------------------------


def test_a_file_that_moved_is_renamed_and_in_no_other_list(place: Path) -> None:
    real = {"a": b"content", "d/b": b"other", "stays": b"content", "gone": b"gone!!!"}
    now = {"c": b"content", "e/b": b"other", "stays": b"content", "new": b"new!!!!"}
    found = with_renames(trees(place, real, now))
    assert found.renamed == [("/at/a", "/at/c"), ("/at/d/b", "/at/e/b")]
    assert (found.added, found.deleted) == (["/at/new"], ["/at/gone"])
    assert found.summary() == "1 added, 1 deleted, 2 renamed"
    assert ("renamed", "/at/c") in list(found)
    (one,) = (one for one in found.entries if one.path == "/at/c")
    assert (one.kind, one.source, one.what) == ("renamed", "/at/a", ())


def test_of_several_that_could_have_moved_the_one_of_that_name_did(place: Path) -> None:
    found = with_renames(trees(place, {"x/a": b"1", "x/b": b"1"}, {"y/b": b"1", "y/c": b"1", "y/d": b"1"}))
    assert ("/at/x/b", "/at/y/b") in found.renamed
    assert len(found.renamed) == 2
    assert len(found.added) == 1


def test_a_mode_that_changed_on_the_way_is_told(place: Path) -> None:
    (one,) = with_renames(trees(place, {"a": (b"1", 0o644)}, {"b": (b"1", 0o755)})).entries
    assert (one.kind, one.what) == ("renamed", ("mode",))


@pytest.mark.parametrize(
    ("real", "now"),
    [({"a": b""}, {"b": b""}), ({"a": "x"}, {"b": "x"}), ({"a": b"1"}, {"b": b"2"}), ({"a": b"1"}, {"a": b"1", "b": b"1"})],
)
def test_what_did_not_move_is_not_renamed(place: Path, real: Tree, now: Tree) -> None:
    assert with_renames(trees(place, real, now)).renamed == []


def test_too_much_is_not_read_to_find_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renames, "_MOST_BYTES", 10)
    found = with_renames(trees(place, {"a": b"1", "b": b"x" * 10}, {"c": b"1", "d": b"x" * 10}))
    assert found.renamed == [("/at/a", "/at/c")]
    assert (found.added, found.deleted) == (["/at/d"], ["/at/b"])
