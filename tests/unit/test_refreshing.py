"""What becomes of each path when a sandbox moves to a new base: kept, merged, dropped, or a conflict that stops everything."""

import contextlib
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elsewhere.changes import drift, staged
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


# -- the index ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def repositories(trees: Trees) -> Trees:
    """The three trees as repositories: reality made a commit, the sandbox only asked for the status."""
    shutil.rmtree(trees.here)
    shutil.rmtree(trees.there)
    git(trees.base, "init", "-q", "-b", "main")
    commit(trees.base)
    for copy in (trees.here, trees.there):
        shutil.copytree(trees.base, copy, symlinks=True)
    edit(trees.there / "src" / "one", 1, "there")
    commit(trees.there)
    edit(trees.here / "app.py", 1, "here")
    git(trees.here, "status", "--short")
    assert (trees.here / ".git" / "index").read_bytes() != (trees.base / ".git" / "index").read_bytes()
    trees.way = lambda path: "named" if path == ".git/index" else "shows"
    return trees


def git(place: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@a")
    surroundings = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", *who, *words], cwd=place, env=surroundings, check=True, capture_output=True)


def commit(place: Path) -> None:
    git(place, "add", "-A")
    git(place, "commit", "-qm", "commit", "--allow-empty")


@pytest.mark.parametrize("version", [2, 3, 4])
def test_an_index_in_which_nothing_is_staged_gives_way_to_that_of_the_new_base(repositories: Trees, version: int) -> None:
    git(repositories.here, "update-index", "--force-write-index", "--index-version", str(version))
    assert repositories.plan() == RefreshPlan(kept=["app.py"], dropped=[".git/index"])


@pytest.mark.parametrize(
    "line",
    ["add app.py", "rm -q --cached app.py", "add --intent-to-add new", "update-index --chmod=+x app.py", "read-tree --empty"],
)
def test_an_index_with_something_staged_is_a_conflict_when_head_moved(repositories: Trees, line: str) -> None:
    (repositories.here / "new").write_text("new")
    git(repositories.here, *line.split())
    assert reasons(repositories.plan()) == {".git/index": "staged_here"}
    shutil.rmtree(repositories.there)
    shutil.copytree(repositories.base, repositories.there)
    assert repositories.plan().conflicts == [], "HEAD did not move"
    assert ".git/index" not in repositories.plan().dropped


def test_an_index_that_agrees_with_the_sandboxs_own_head_stays(repositories: Trees) -> None:
    commit(repositories.here)
    repositories.way = lambda path: "named" if path in (".git/index", ".git/refs/heads/main") else "shows"
    assert repositories.plan() == RefreshPlan(kept=["app.py"])
    git(repositories.here, "pack-refs", "--all")
    repositories.way = {".git/refs/heads/main": "hidden", ".git/packed-refs": "named", ".git/index": "named"}.get  # type: ignore[assignment]
    assert repositories.plan() == RefreshPlan(kept=["app.py"])


def test_head_that_was_written_as_it_was_is_not_the_sandboxs_own(repositories: Trees) -> None:
    """`git checkout main` on main writes it."""
    repositories.way = lambda path: "named" if path in (".git/index", ".git/HEAD") else "shows"
    assert repositories.plan().dropped == [".git/index"]


def test_another_branch_that_reality_moved_is_a_conflict(repositories: Trees) -> None:
    """The new base's index is that of its own branch."""
    for place in (repositories.base, repositories.here, repositories.there):
        git(place, "branch", "other", "main~1" if place == repositories.there else "main")
    git(repositories.here, "symbolic-ref", "HEAD", "refs/heads/other")
    repositories.way = lambda path: "named" if path in (".git/index", ".git/HEAD") else "shows"
    assert repositories.plan().conflicts == []
    git(repositories.there, "branch", "-f", "other", "main")
    git(repositories.there, "checkout", "-q", "--detach", "main~1")
    assert reasons(repositories.plan()) == {".git/index": "staged_here"}


def test_a_repository_of_the_sandboxs_own_is_left_alone(repositories: Trees) -> None:
    repositories.way = lambda path: "hidden" if path.startswith(".git/") else "shows"
    assert repositories.plan() == RefreshPlan(kept=["app.py"])


def test_what_was_staged_in_reality_and_unstaged_in_the_sandbox_is_nothing_staged(repositories: Trees) -> None:
    """Which only the commit itself tells."""
    (repositories.base / "new").write_text("new")
    shutil.copy(repositories.base / "new", repositories.here)
    shutil.copy(repositories.base / "new", repositories.there)
    git(repositories.base, "add", "new")
    project = str(repositories.there)
    changes = compare_trees(str(repositories.here), str(repositories.base), project)
    sides = sides_of([str(repositories.base)]), sides_of([str(repositories.there)])
    assert plan_refresh(changes, project, *sides, (), repositories.way).dropped == [".git/index"]
    unmoved = sides_of([str(repositories.base)])
    assert plan_refresh(changes, project, unmoved, unmoved, (), repositories.way).dropped == [], "it was unstaged on purpose"


def test_an_index_that_is_none_is_a_conflict_and_nothing_worse(repositories: Trees) -> None:
    index = repositories.here / ".git" / "index"
    good = index.read_bytes()
    header = struct.pack(">4sII", b"DIRC", 4, 0xFFFFFFFF)
    bad = [
        b"",
        b"DIRC",
        good[:-1],
        good[:60],
        good.replace(b"DIRC", b"CRID"),
        good[:4] + struct.pack(">II", 9, 1) + good[12:],
        good[:8] + b"\xff" * 4 + good[12:],
        good[:-20] + b"link" + struct.pack(">I", 0) + good[-20:],
        good[:-20] + b"LONG" + b"\xff" * 4 + good[-20:],
        header + b"\0" * 62 + b"\xff" * 100,
        header + b"\0" * 62 + b"\x05name\0" + b"\0" * 20,
    ]
    for content in bad:
        index.write_bytes(content)
        assert reasons(repositories.plan()) == {".git/index": "staged_here"}, content
    index.unlink()
    assert reasons(repositories.plan()) == {".git/index": "staged_here"}
    index.symlink_to("/dev/zero")
    assert reasons(repositories.plan()) == {".git/index": "staged_here"}


def test_an_index_with_more_names_than_anybody_has_is_a_conflict(repositories: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "_LARGEST_NAMES", 10)
    assert reasons(repositories.plan()) == {".git/index": "staged_here"}
    monkeypatch.undo()
    monkeypatch.setattr(staged, "_LARGEST", 100)
    assert reasons(repositories.plan()) == {".git/index": "staged_here"}


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
