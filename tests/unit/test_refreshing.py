"""What becomes of each path when a sandbox moves to a new base: kept, merged, dropped, or a conflict that stops everything."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elsewhere.changes import drift
from elsewhere.changes.compare import View, compare_trees
from elsewhere.changes.drift import Dated
from elsewhere.changes.renames import with_renames
from elsewhere.changes.sides import sides_of
from elsewhere.operations.refreshing import Layered, RefreshPlan, Written, layered, plan_refresh
from elsewhere.storage import scanning
from elsewhere.storage.encodings import TRUSTED

LINES = [f"line {number}\n" for number in range(12)]


@dataclass
class Trees:
    """Three trees that begin alike: what both began with, what the sandbox made of it, what reality did."""

    base: Path
    here: Path
    there: Path
    way: Layered = field(default=lambda _path: "shows")

    def plan(self, **more: object) -> RefreshPlan:
        changes = compare_trees(str(self.here), str(self.base), "/project")
        changes.project = "/project"
        changes = with_renames(changes)
        moved = drift.differing(scanning.scan(str(self.base)), scanning.scan(str(self.there)))
        sides = sides_of([str(self.base)]), sides_of([str(self.there)])
        return plan_refresh(changes, "/project", *sides, moved, self.way, **more)  # type: ignore[arg-type]


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    base = tmp_path / "base"
    (base / "src").mkdir(parents=True)
    for name in ("app.py", "README.md", "src/one", "src/two"):
        (base / name).write_text("".join(LINES))
    found = Trees(base, tmp_path / "here", tmp_path / "there")
    for copy in (found.here, found.there):
        shutil.copytree(base, copy, symlinks=True)
    return found


def edit(path: Path, number: int, text: str) -> str:
    lines = path.read_text().splitlines(keepends=True)
    lines[number] = f"{text}\n"
    path.write_text("".join(lines))
    return path.read_text()


def reasons(plan: RefreshPlan) -> dict[str, str]:
    return {one.path: one.reason for one in plan.conflicts}


def test_what_only_the_sandbox_changed_is_kept(trees: Trees) -> None:
    edit(trees.here / "app.py", 1, "here")
    (trees.here / "README.md").unlink()
    (trees.here / "new").mkdir()
    (trees.here / "new" / "file").write_text("new")
    edit(trees.there / "src" / "one", 1, "there")
    assert trees.plan() == RefreshPlan(kept=["README.md", "app.py", "new/file"])


def test_text_that_both_changed_is_merged(trees: Trees) -> None:
    edit(trees.here / "app.py", 1, "here")
    (trees.here / "app.py").chmod(0o755)
    edit(trees.there / "app.py", 10, "there")
    edit(trees.base / "app.py", 1, "here")
    expected = edit(trees.base / "app.py", 10, "there").encode()
    (trees.base / "app.py").write_text("".join(LINES))
    assert trees.plan() == RefreshPlan(written=[Written("app.py", expected, 0o755)])


def test_what_both_did_alike_is_dropped(trees: Trees) -> None:
    for tree in (trees.here, trees.there):
        edit(tree / "app.py", 1, "both")
        (tree / "README.md").unlink()
        (tree / "new").write_text("new")
    assert trees.plan() == RefreshPlan(dropped=["README.md", "app.py", "new"])


def test_everything_else_is_a_conflict_with_its_reason(trees: Trees) -> None:
    edit(trees.here / "app.py", 1, "here")
    edit(trees.there / "app.py", 1, "there")
    (trees.here / "README.md").unlink()
    edit(trees.there / "README.md", 1, "there")
    edit(trees.here / "src" / "one", 1, "here")
    (trees.there / "src" / "one").unlink()
    (trees.here / "new").write_text("here")
    (trees.there / "new").write_text("there")
    assert reasons(trees.plan()) == {
        "app.py": "text_conflict",
        "README.md": "deleted_here",
        "src/one": "deleted_there",
        "new": "both_added",
    }


def test_a_directory_that_reality_deleted_or_replaced_is_a_conflict_for_what_is_new_in_it(trees: Trees) -> None:
    (trees.here / "src" / "new").write_text("new")
    shutil.rmtree(trees.there / "src")
    assert reasons(trees.plan()) == {"src/new": "parent_gone"}
    (trees.there / "src").write_text("a file")
    assert reasons(trees.plan()) == {"src/new": "parent_replaced"}
    (trees.there / "src").unlink()
    (trees.there / "src").symlink_to(".")
    assert reasons(trees.plan()) == {"src/new": "parent_replaced"}


def test_a_renamed_file_that_reality_changed_is_a_conflict(trees: Trees) -> None:
    (trees.here / "app.py").write_text("unlike any other\n")
    (trees.base / "app.py").write_text("unlike any other\n")
    (trees.here / "app.py").rename(trees.here / "moved.py")
    edit(trees.there / "app.py", 1, "there")
    found = trees.plan()
    assert (reasons(found), found.kept) == ({"app.py": "deleted_here"}, ["moved.py"])


def test_what_reality_changed_below_something_of_the_sandbox_is_seen(trees: Trees) -> None:
    edit(trees.there / "app.py", 1, "there")
    (trees.there / "src" / "new").write_text("new")
    (trees.there / "src" / "two").unlink()
    trees.way = {"app.py": "named", "src/new": "hidden", "src/two": "hidden"}.__getitem__  # type: ignore[assignment]
    found = trees.plan()
    assert found.dropped == ["app.py"], "only touched here: its copy would hide what is new"
    assert reasons(found) == {"src/new": "hidden_here"}


def test_the_repository_is_not_merged(trees: Trees) -> None:
    for tree, text in ((trees.here, "here"), (trees.there, "there")):
        (tree / ".git").mkdir()
        (tree / ".git" / "index").write_text(text)
    assert trees.plan() == RefreshPlan()


def test_without_contents_what_both_changed_is_a_conflict_unless_a_copy_was_kept(trees: Trees, tmp_path: Path) -> None:
    """A live base: what is below the sandbox is reality itself, and it is compared with that."""
    edit(trees.here / "app.py", 1, "here")
    edit(trees.here / "README.md", 1, "here")
    edit(trees.here / "src" / "one", 1, "here")
    since = max(path.lstat().st_ctime_ns for path in trees.there.rglob("*")) + 20_000_000
    while _now(tmp_path) < since:
        pass
    edit(trees.there / "app.py", 10, "there")
    edit(trees.there / "README.md", 10, "there")
    copies = tmp_path / "dirty"
    copies.mkdir()
    shutil.copy(trees.base / "README.md", copies)
    changes = compare_trees(str(trees.here), str(trees.there), "/project")
    witness = Dated(str(trees.there), since)
    found = plan_refresh(changes, "/project", sides_of([str(copies)]), sides_of([str(trees.there)]), (), trees.way, witness)
    assert reasons(found) == {"app.py": "no_base"}
    assert found.kept == ["src/one"]
    assert [one.path for one in found.written] == ["README.md"]


def _now(place: Path) -> int:
    """As the kernel stamps."""
    (place / "clock").write_text("tick")
    return (place / "clock").stat().st_ctime_ns


# -- how layers lie over a base -------------------------------------------------------------------------------------------------


@pytest.fixture
def ways(tmp_path: Path) -> Iterator[Callable[[], Layered]]:
    if os.geteuid() != 0:
        pytest.skip("needs root: whiteouts and overlay's own marks")
    with contextlib.ExitStack() as stack:
        yield lambda: layered(("/", View([str(tmp_path / "upper")], [], TRUSTED)), "/home/project", stack)


def test_layers_show_name_or_hide_what_is_below_them(tmp_path: Path, ways: Callable[[], Layered]) -> None:
    top = tmp_path / "upper" / "home" / "project"
    (top / "src").mkdir(parents=True)
    (top / "src" / "touched").write_text("")
    os.mknod(top / "src" / "deleted", 0o20000, 0)
    os.mknod(top / "gone", 0o20000, 0)
    (top / "file").write_text("was a directory")
    (top / "again").mkdir()
    os.setxattr(top / "again", "trusted.overlay.opaque", b"y")
    (top / "moved").mkdir()
    os.setxattr(top / "moved", "trusted.overlay.redirect", b"before")
    way = ways()
    assert {path: way(path) for path in ("README.md", "src/other", "lib/x/y")} == {
        "README.md": "shows",
        "src/other": "shows",
        "lib/x/y": "shows",
    }
    assert way("src/touched") == way("src") == way("file") == "named"
    hidden = ("src/deleted", "gone", "gone/below", "file/below", "again/below", "moved/below", "moved/below/deeper")
    assert [path for path in hidden if way(path) != "hidden"] == []
