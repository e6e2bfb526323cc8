"""Layers made by hand: read as one, and merged into one that says the same. Real overlays are in `tests/linux/test_stacks.py`.

In a layer, and in what lies below: bytes are a file, None is a directory, GONE a whiteout, OPAQUE a directory through which
nothing shows, and a text a directory that was renamed from there.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elsewhere.storage import merging
from elsewhere.storage.encodings import FUSE, TRUSTED, USER, Encoding, saved
from elsewhere.storage.merging import merge
from elsewhere.storage.redirects import moves
from elsewhere.storage.stacks import Folder, Stack
from elsewhere.storage.trees import Tree

GONE, OPAQUE = object(), object()
Layer = Mapping[str, object]


def grow(top: Path, tree: Layer, prefix: str = "user.overlay") -> str:
    top.mkdir(parents=True)
    for name, entry in tree.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, bytes):
            path.write_bytes(entry)
        elif entry is GONE:
            whiteout(path)
        else:
            path.mkdir(exist_ok=True)
            if entry is OPAQUE:
                os.setxattr(path, f"{prefix}.opaque", b"y")
            elif entry is not None:
                os.setxattr(path, f"{prefix}.redirect", os.fsencode(str(entry)))
    return str(top)


def whiteout(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
    except PermissionError:
        pytest.skip("whiteouts cannot be made here")


def stacked(place: Path, layers: tuple[Layer, ...], prefix: str = "user.overlay") -> list[str]:
    """Newest first, as they are written."""
    return [grow(place / f"layer-{number}", layer, prefix) for number, layer in enumerate(layers)]


def folders(layers: list[str], encoding: Encoding = USER) -> Iterator[Folder]:
    with contextlib.ExitStack() as stack:
        waiting = [Stack(layers, encoding, stack).root()]
        while waiting:
            with waiting.pop() as folder:
                yield folder
                waiting += map(folder.folder, folder.directories())


def said(layers: list[str], encoding: Encoding = USER) -> dict[str, object]:
    """What a stack says: content, gone, or for a directory where it shows what lies below."""
    found: dict[str, object] = {}
    for folder in folders(layers, encoding):
        found[f"{folder.path}/"] = folder.below
        found.update({os.path.join(folder.path, name): GONE for name in folder.gone()})
        for name, entry in folder.entries().items():
            if stat.S_ISREG(entry.about.st_mode):
                with open(os.open(name, os.O_RDONLY, dir_fd=entry.fd), "rb") as stream:
                    found[os.path.join(folder.path, name)] = stream.read()
    return found


def over(layers: list[str], lower: str, encoding: Encoding = USER) -> dict[str, bytes | None]:
    """What is seen with the stack over a plain directory."""
    found: dict[str, bytes | None] = {}
    with contextlib.ExitStack() as stack:
        below = Tree([lower], stack)
        for path, entry in said(layers, encoding).items():
            if isinstance(entry, bytes):
                found[path] = entry
        for folder in folders(layers, encoding):
            found[f"{folder.path}/"] = None
            there = None if folder.below is None else below.open(folder.below, stack)
            for name in there.entries() if there else ():
                if name not in folder.entries() and name not in folder.gone():
                    found.update(plain(Path(lower, folder.below or "", name), os.path.join(folder.path, name)))
    return found


def plain(place: Path, path: str) -> dict[str, bytes | None]:
    if not place.is_dir():
        return {path: place.read_bytes()}
    found: dict[str, bytes | None] = {f"{path}/": None}
    for inner in place.iterdir():
        found.update(plain(inner, f"{path}/{inner.name}"))
    return found


LOWER: Layer = {"a/x": b"ax", "a/in/y": b"ay", "b/x": b"bx", "b/in/z": b"bz", "c": b"c"}

# Layers, newest first, and where in what lies below each directory shows it. Each is merged as a whole and in every run, too.
CASES: dict[str, tuple[tuple[Layer, ...], dict[str, object]]] = {
    "one layer": (({"a/x": b"new", "c": GONE},), {"/": "", "a/": "a", "a/x": b"new", "c": GONE}),
    "the newest file counts": (({"c": b"3"}, {"c": b"2"}, {"c": b"1"}), {"/": "", "c": b"3"}),
    "deleted and made again": (({"c": b"3"}, {"c": GONE}, {"c": b"1"}), {"/": "", "c": b"3"}),
    "made and deleted": (({"n": GONE}, {"n": b"1"}), {"/": "", "n": GONE}),
    "a directory of all layers": (({"a/n": b"3"}, {"a/n": b"2", "a/x": GONE}, {"a/m": b"1"}), {"/": "", "a/": "a", "a/n": b"3", "a/x": GONE, "a/m": b"1"}),
    "opaque in the middle": (({"a/n": b"3"}, {"a": OPAQUE, "a/o": b"2"}, {"a/m": b"1"}), {"/": "", "a/": None, "a/n": b"3", "a/o": b"2"}),
    "a whiteout in the middle": (({"a/n": b"3"}, {"a": GONE}, {"a/m": b"1"}), {"/": "", "a/": None, "a/n": b"3"}),
    "a file in the middle": (({"a/n": b"3"}, {"a": b"file"}, {"a/m": b"1"}), {"/": "", "a/": None, "a/n": b"3"}),
    "a directory replaced by a file": (({"a": b"file"}, {"a/m": b"1"}), {"/": "", "a": b"file"}),
    "below what is opaque": (({"a/in/n": b"3"}, {"a": OPAQUE, "a/in/o": b"2"}), {"/": "", "a/": None, "a/in/": None, "a/in/n": b"3", "a/in/o": b"2"}),
    "only in an older layer": (({"c": GONE}, {"a/in/n": b"2"}), {"/": "", "c": GONE, "a/": "a", "a/in/": "a/in", "a/in/n": b"2"}),
    "renamed": (({"a": GONE, "n": "a", "n/x": GONE},), {"/": "", "a": GONE, "n/": "a", "n/x": GONE}),
    "renamed to another place": (({"a/in": GONE, "b/n": "/a/in"},), {"/": "", "a/": "a", "a/in": GONE, "b/": "b", "b/n/": "a/in"}),
    "renamed twice": (({"m": "n", "n": GONE}, {"n": "a", "a": GONE}), {"/": "", "a": GONE, "n": GONE, "m/": "a"}),
    "renamed twice and filled": (
        ({"m": "n", "n": GONE, "m/x": GONE}, {"n/k": b"2"}, {"n": "a", "a": GONE, "n/l": b"1"}),
        {"/": "", "a": GONE, "n": GONE, "m/": "a", "m/k": b"2", "m/l": b"1", "m/x": GONE},
    ),
    "renamed, then its parent, then something in it deleted": (
        ({"q/n/y": GONE}, {"q": "a", "a": GONE}, {"a/n": "in", "a/in": GONE}),
        {"/": "", "a": GONE, "q/": "a", "q/in": GONE, "q/n/": "a/in", "q/n/y": GONE},
    ),
    "renamed out of what was renamed": (
        ({"m": "/n/in", "n/in": GONE}, {"n": "a", "a": GONE}),
        {"/": "", "a": GONE, "n/": "a", "n/in": GONE, "m/": "a/in"},
    ),
    "renamed out of what had been renamed in another": (
        ({"m": "/n/k"}, {"n": "a"}, {"a/k": "/b/in"}),
        {"/": "", "n/": "a", "n/k/": "b/in", "a/": "a", "a/k/": "b/in", "m/": "b/in"},
    ),
    "renamed into what is opaque": (
        ({"o/n": "/b/in"}, {"o": OPAQUE, "o/f": b"f"}),
        {"/": "", "o/": None, "o/f": b"f", "o/n/": "b/in"},
    ),
    "renamed from where a layer hides it": (({"m": "/a/in"}, {"a": OPAQUE, "a/f": b"f"}), {"/": "", "a/": None, "a/f": b"f", "m/": None}),
    "renamed from what a layer replaced": (
        ({"m": "/a/in"}, {"a": OPAQUE, "a/in/f": b"f"}),
        {"/": "", "a/": None, "a/in/": None, "a/in/f": b"f", "m/": None, "m/f": b"f"},
    ),
    "renamed from below what is opaque, whence it had been renamed": (
        ({"m": "/a/k"}, {"a": OPAQUE, "a/k": "/b/in"}),
        {"/": "", "a/": None, "a/k/": "b/in", "m/": "b/in"},
    ),
    "renamed from beside it, below what is opaque": (
        ({"m": "/a/k"}, {"a": OPAQUE, "a/k": "in"}),
        {"/": "", "a/": None, "a/k/": None, "m/": None},
    ),
    "renamed from where a layer deleted it": (({"m": "/a/in"}, {"a/in": GONE}), {"/": "", "a/": "a", "a/in": GONE, "m/": None}),
    "renamed from where a layer has a file": (({"m": "/a/in"}, {"a": b"f"}), {"/": "", "a": b"f", "m/": None}),
    "two changed places": (({"a": "b", "b": "a"}, {"a/n": b"n"}), {"/": "", "a/": "b", "b/": "a", "b/n": b"n"}),
    "two changed places twice": (({"a": "b", "b": "a"}, {"a": "b", "b": "a"}), {"/": "", "a/": "a", "b/": "b"}),
    "opaque and renamed": (({"m": "a"}, {"a": OPAQUE}), {"/": "", "a/": None, "m/": None}),
    "no layers that have it": (({}, {}), {"/": ""}),
}  # fmt: skip

cases = pytest.mark.parametrize(("layers", "expected"), CASES.values(), ids=CASES)


@cases
def test_layers_are_read_as_one(place: Path, layers: tuple[Layer, ...], expected: dict[str, object]) -> None:
    assert said(stacked(place, layers)) == expected


@cases
def test_a_merger_of_all_says_the_same_over_anything(place: Path, layers: tuple[Layer, ...], expected: dict[str, object]) -> None:
    paths = stacked(place, layers)
    merge(paths, USER, str(place / "merged"))
    # Where nothing shows through, nothing has to be hidden.
    needed = {
        path: entry for path, entry in expected.items() if entry is not GONE or expected[f"{os.path.dirname(path)}/"] is not None
    }
    assert said([str(place / "merged")]) == needed
    assert over([str(place / "merged")], grow(place / "lower", LOWER)) == over(paths, str(place / "lower"))


@cases
def test_a_merger_of_a_run_says_the_same_in_its_place(
    place: Path, layers: tuple[Layer, ...], expected: dict[str, object]
) -> None:
    paths, lower = stacked(place, layers), grow(place / "lower", LOWER)
    for first in range(len(paths)):
        for last in range(first + 1, len(paths) + 1):
            merged = str(place / f"merged-{first}-{last}")
            merge(paths[first:last], USER, merged)
            assert over([*paths[:first], merged, *paths[last:]], lower) == over(paths, lower)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@cases
def test_the_same_in_roots_encoding(place: Path, layers: tuple[Layer, ...], expected: dict[str, object]) -> None:
    paths, lower = stacked(place, layers, "trusted.overlay"), grow(place / "lower", LOWER)
    assert said(paths, TRUSTED) == expected
    merge(paths, TRUSTED, str(place / "merged"))
    assert over([str(place / "merged")], lower, TRUSTED) == over(paths, lower, TRUSTED)


@pytest.mark.parametrize("leads", ["", "/", "..", ".", "/..", "/a/../b", "a/b", "/a//b", "/a/", "/./a"])
@pytest.mark.parametrize("where", ["m", "a/k"])
def test_a_redirect_that_the_kernel_would_refuse_leads_nowhere(place: Path, leads: str, where: str) -> None:
    newest: Layer = {"m": leads} if where == "m" else {"m": "/a/k"}
    paths = stacked(place, (newest, {where: leads} if where != "m" else {"x": b""}))
    assert said(paths)["m/"] is None


def test_a_link_in_a_layer_is_an_entry_and_never_followed(place: Path) -> None:
    paths = stacked(place, ({"m": "/link/in"}, {"x": b""}))
    (place / "outside/in").mkdir(parents=True)
    (place / "outside/in/secret").touch()
    Path(paths[1], "link").symlink_to("../outside")
    assert said(paths) == {"/": "", "x": b"", "m/": None}


def test_a_directory_that_is_gone_since_it_was_listed_is_empty(place: Path) -> None:
    paths = stacked(place, ({"a": None}, {"a/x": b"x"}))
    with contextlib.ExitStack() as stack:
        inner = Stack(paths, USER, stack).root().folder("a")
        Path(paths[0], "a").rmdir()
        assert list(inner.entries()) == ["x"]


def test_directories_that_nobody_looks_at_any_more_hold_no_descriptors(place: Path) -> None:
    paths = stacked(place, ({f"{number}/x": b"" for number in range(50)}, {f"{number}/y": b"" for number in range(50)}))
    before = len(os.listdir("/proc/self/fd"))
    most = max(len(os.listdir("/proc/self/fd")) for _ in folders(paths))
    assert most - before <= 6
    with contextlib.ExitStack() as stack:
        folder = Stack(paths, USER, stack).root()
        assert [len(folder.folder(name).entries()) for name in folder.directories()] == [2] * 50
    assert len(os.listdir("/proc/self/fd")) == before


def deepen(top: str, depth: int, last: str) -> None:
    """A path that is longer than the kernel takes in one piece."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        with contextlib.suppress(FileExistsError):
            os.mkdir("d" * 200, dir_fd=fd)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open(last, os.O_CREAT, 0o600, dir_fd=fd))
    os.close(fd)


def test_a_path_may_be_longer_than_the_kernel_takes(place: Path) -> None:
    paths = stacked(place, ({}, {}))
    deepen(paths[0], 60, "one")
    deepen(paths[1], 60, "two")
    merge(paths, USER, str(place / "merged"))
    deepest = max(folders([str(place / "merged")]), key=lambda folder: len(folder.path))
    assert len(deepest.path) > 12_000
    names = [sorted(name for name in folder.entries() if len(name) == 3) for folder in folders([str(place / "merged")])]
    assert names[-1] == ["one", "two"]


# -- encodings ------------------------------------------------------------------------------------------------------------------


def test_names_as_whiteouts(place: Path) -> None:
    layers: tuple[Layer, ...] = (
        {".wh.c": b"", "a/n": b"3", "b/.wh.x": b"", "n": b"n"},
        {"a/.wh..wh..opq": b"", "a/o": b"2", "b/x": b"2", ".wh.n": b""},
        {"a/m": b"1"},
    )
    expected = {"/": "", "c": GONE, "n": b"n", "a/": None, "a/n": b"3", "a/o": b"2", "b/": "b", "b/x": GONE}
    paths = stacked(place, layers)
    assert said(paths, FUSE) == expected
    merge(paths, FUSE, str(place / "merged"))
    assert said([str(place / "merged")], FUSE) == expected


def test_names_as_whiteouts_hide_what_was_renamed(place: Path) -> None:
    paths = stacked(place, ({"m": "/a/in"}, {"a/.wh.in": b""}))
    assert said(paths, FUSE)["m/"] is None
    assert said(paths, USER)["m/"] == "a/in"


def test_each_layer_may_have_its_own_encoding(place: Path) -> None:
    paths = stacked(place, ({"a/n": b"2", "c": GONE}, {"a/o": b"1", ".wh.b": b""}))
    expected = {"/": "", "c": GONE, "d": GONE, "a/": None, "a/n": b"2", "a/o": b"1", ".wh.b": b""}
    assert said(paths, [USER, saved(["d"], ["a"])]) == expected  # type: ignore[arg-type]


def test_names_and_attributes_of_another_encoding_are_just_that(place: Path) -> None:
    paths = stacked(place, ({".wh.c": b"", "a/n": b""},))
    os.setxattr(f"{paths[0]}/a", "user.overlay.overlay.opaque", b"y")
    os.setxattr(f"{paths[0]}/a", "user.fuseoverlayfs.opaque", b"y")
    merge(paths, USER, str(place / "merged"))
    for path in (paths[0], str(place / "merged")):
        assert said([path]) == {"/": "", ".wh.c": b"", "a/": "a", "a/n": b""}
        assert set(os.listxattr(f"{path}/a")) == {"user.overlay.overlay.opaque", "user.fuseoverlayfs.opaque"}


# -- what a merger is made of ---------------------------------------------------------------------------------------------------


def test_a_merger_shares_files_and_takes_directories_after_the_newest(place: Path) -> None:
    newest, oldest = stacked(place, ({"a": None}, {"a/x": b"x"}))
    os.link(f"{oldest}/a/x", f"{oldest}/a/other")
    os.mkfifo(f"{oldest}/a/fifo")
    os.symlink("x", f"{oldest}/a/link")
    for path, mode, when in ((newest, 0o750, 5), (f"{newest}/a", 0o1711, 6), (f"{oldest}/a", 0o700, 7)):
        os.chmod(path, mode)
        os.setxattr(path, "user.when", str(when).encode())
        os.setxattr(path, "user.overlay.origin", b"")
        os.setxattr(path, "user.overlay.impure", b"y")
        os.utime(path, (when, when))
    merge([newest, oldest], USER, str(place / "merged"))
    made = place / "merged/a"
    assert (made.stat().st_mode & 0o7777, made.stat().st_mtime, os.getxattr(made, "user.when")) == (0o1711, 6, b"6")
    assert (made.parent.stat().st_mode & 0o7777, made.parent.stat().st_mtime) == (0o750, 5)
    assert os.listxattr(made) == ["user.when"]
    for name in ("x", "other", "fifo", "link"):
        assert (made / name).lstat().st_ino == os.lstat(f"{oldest}/a/{name}").st_ino


def test_whiteouts_are_made_anew_and_marked_as_overlay_wants_them(place: Path) -> None:
    """One that overlay made is one of many links; and without the mark it would list them, where nothing lies below."""
    (path,) = stacked(place, ({"x": GONE, "a/n": b""},))
    os.link(f"{path}/x", f"{path}/y")
    merge([path], USER, str(place / "merged"))
    assert {(place / "merged" / name).lstat().st_nlink for name in "xy"} == {1}
    assert os.getxattr(place / "merged", "user.overlay.origin") == b""
    assert os.listxattr(place / "merged/a") == []


@pytest.mark.parametrize("number", [errno.EMLINK, errno.EXDEV, errno.EPERM])
def test_what_cannot_be_linked_is_copied(place: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    (path,) = stacked(place, ({"a/x": b"content"},))
    os.link(f"{path}/a/x", f"{path}/other")
    os.mkfifo(f"{path}/fifo", 0o640)
    os.symlink("a/x", f"{path}/link")
    os.chmod(f"{path}/a/x", 0o751)
    os.setxattr(f"{path}/a/x", "user.one", b"1")
    os.utime(f"{path}/a/x", (1, 2))
    real = os.link

    def full(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool) -> None:
        if os.readlink(f"/proc/self/fd/{src_dir_fd}").startswith(path):
            raise OSError(number, os.strerror(number))
        real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(merging.os, "link", full)
    merge([path], USER, str(place / "merged"))
    made = place / "merged"
    found = (made / "a/x").stat()
    assert ((made / "a/x").read_bytes(), found.st_mode & 0o7777, found.st_mtime) == (b"content", 0o751, 2)
    assert os.getxattr(made / "a/x", "user.one") == b"1"
    assert found.st_ino == (made / "other").stat().st_ino != os.stat(f"{path}/other").st_ino
    assert stat.S_ISFIFO((made / "fifo").lstat().st_mode)
    assert os.readlink(made / "link") == "a/x"


def test_a_merger_that_cannot_be_made_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    paths = stacked(place, ({"x": b"x"},))
    monkeypatch.setattr(merging.os, "link", full)
    with pytest.raises(OSError, match="No space left") as raised:
        merge(paths, USER, str(place / "merged"))
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(FileExistsError):
        merge(paths, USER, str(place))


# -- directories that moved -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_moves_are_told_from_what_lies_below_all_layers(place: Path) -> None:
    layers: tuple[Layer, ...] = (
        {"q/n/y": GONE, "new": OPAQUE},
        {"q": "a", "a": GONE},
        {"a/n": "in", "a/in": GONE, "b/k": "/c/in"},
    )
    paths = stacked(place, layers, "trusted.overlay")
    assert sorted(moves(*paths)) == [("b/k", "c/in"), ("q", "a"), ("q/n", "a/in")]
    assert moves(paths[0]) == []
    assert moves(paths[1]) == [("q", "a")]
    assert sorted(moves(paths[2])) == [("a/n", "a/in"), ("b/k", "c/in")]


def test_what_moved_with_its_parent_did_not_move_by_itself(place: Path) -> None:
    assert moves(*stacked(place, ({"a/in/x": b""},))) == []
