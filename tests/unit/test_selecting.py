"""Which changes are promoted: a part by globs, nothing that git ignores or owns, nothing outside; and what runs by itself is marked."""

import os
import random
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from elsewhere.changes.compare import compare_trees
from elsewhere.changes.model import Change, Changes, Side
from elsewhere.changes.renames import with_renames
from elsewhere.changes.sides import sides_of
from elsewhere.errors import Unavailable
from elsewhere.promotion import ignoring
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.planning import plan
from elsewhere.promotion.selecting import Selection, marks, select
from unit.test_planning import Trees, perform, shapes, tangle


def git(place: Path, *words: str) -> None:
    surroundings = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    line = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(place), *words]
    subprocess.run(line, check=True, capture_output=True, env=surroundings)


class Project:
    """A repository in reality, and the same tree as a sandbox has it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.real, self.here = place / "real", place / "here"
        self.real.mkdir()
        git(self.real, "init", "-q")
        self.write("real", "src/app.py", "one\n")
        self.write("real", ".gitignore", "*.log\nbuild/\n/secret\n!kept.log\n")

    def write(self, tree: str, path: str, text: str = "text\n") -> None:
        place = self.place / tree / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def fork(self) -> None:
        shutil.copytree(self.real, self.here, symlinks=True)

    def changes(self) -> Changes:
        found = compare_trees(str(self.here), str(self.real), str(self.real))
        found.project = str(self.real)
        return with_renames(found)

    def select(self, **more: object) -> Selection:
        return select(self.changes(), str(self.real), **more)  # type: ignore[arg-type]

    def names(self, selection: Selection) -> list[str]:
        return [os.path.relpath(one.path, self.real) + "/" * one.path.endswith("/") for one in selection.inside]

    def left(self, selection: Selection, sort: str) -> list[str]:
        return [os.path.relpath(path, self.real) + "/" * path.endswith("/") for path in selection.left_out[sort]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path


@pytest.fixture
def project(place: Path) -> Project:
    return Project(place)


# -- ignored --------------------------------------------------------------------------------------------------------------------


def test_what_git_ignores_is_left_out_unless_it_is_asked_for(project: Project) -> None:
    project.fork()
    for path in ("a.log", "src/deep/b.log", "kept.log", "build/x.o", "src/build/y.o", "secret", "src/secret", "src/app.py"):
        project.write("here", path, f"{path} of the sandbox")
    (project.here / "build" / "empty").mkdir()
    (project.here / "empty").mkdir()
    found = project.select()
    assert project.names(found) == ["empty/", "kept.log", "src/app.py", "src/secret"]
    ignored = ["a.log", "build/empty/", "build/x.o", "secret", "src/build/y.o", "src/deep/b.log"]
    assert project.left(found, "ignored") == ignored
    everything = project.select(ignored=True)
    assert sorted(project.names(everything)) == sorted([*ignored, *project.names(found), "build/", "src/build/", "src/deep/"])
    assert everything.left_out["ignored"] == []


def test_git_s_own_answer_is_the_same(project: Project) -> None:
    """In a tree that nobody hostile wrote, git may be asked directly."""
    project.write("real", "src/.gitignore", "*.tmp\n!*.log\n/only/\n")
    project.fork()
    paths = [
        "x.log",
        "src/x.log",
        "src/a.tmp",
        "a.tmp",
        "src/only/a",
        "src/deep/only/a",
        "src/deep/a.tmp",
        "build",
        "src/b/build/c",
    ]
    for path in paths:
        project.write("here", path, path)
    asked = subprocess.run(["git", "check-ignore", "--no-index", *paths], cwd=project.here, capture_output=True, text=True)
    found = project.select()
    assert project.left(found, "ignored") == sorted(asked.stdout.split())
    taken = [path for path in project.names(found) if not path.endswith("/")]
    assert sorted([*taken, *project.left(found, "ignored")]) == sorted(paths)
    assert found.left_out["ignored"]
    assert found.inside


def test_an_empty_directory_that_is_ignored_is_left_out(project: Project) -> None:
    project.fork()
    (project.here / "build").mkdir()
    assert project.left(project.select(), "ignored") == ["build/"]


def test_the_lists_count_as_they_will_be(project: Project) -> None:
    project.write("real", "src/.gitignore", "*.tmp\n")
    project.fork()
    project.write("here", ".gitignore", "*.new\n")
    (project.here / "src" / ".gitignore").unlink()
    for path in ("a.log", "a.new", "src/a.tmp", "src/b.new"):
        project.write("here", path, path)
    found = project.select()
    assert project.left(found, "ignored") == ["a.new", "src/b.new"]
    assert project.names(found) == [".gitignore", "a.log", "src/.gitignore", "src/a.tmp"]


def test_a_list_that_is_not_taken_does_not_count(project: Project) -> None:
    project.fork()
    project.write("here", ".gitignore", "")
    project.write("here", "src/a.log")
    assert project.names(project.select()) == [".gitignore", "src/a.log"]
    part = project.select(paths=["src"])
    assert (project.names(part), project.left(part, "ignored")) == ([], ["src/a.log"])


def test_what_reality_tracks_is_never_ignored(project: Project) -> None:
    for path in ("tracked.log", "gone.log", "untracked.log"):
        project.write("real", path)
    git(project.real, "add", "-f", "tracked.log", "gone.log", ".gitignore", "src")
    project.fork()
    for path in ("tracked.log", "untracked.log"):
        project.write("here", path, "changed\n")
    (project.here / "gone.log").unlink()
    found = project.select()
    assert project.names(found) == ["gone.log", "tracked.log"]
    assert project.left(found, "ignored") == ["untracked.log"]


def test_the_repository_s_and_the_user_s_own_lists_count(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.real / ".git" / "info" / "exclude").write_text("*.private\n")
    project.fork()
    for path in ("a.private", "a.swp", "a.bak", "a.py"):
        project.write("here", path, path)
    home = project.place / "home"
    assert project.left(project.select(), "ignored") == ["a.private"]
    project.write("home", ".config/git/ignore", "*.swp\n")
    assert project.left(project.select(), "ignored") == ["a.private", "a.swp"]
    project.write("home", "mine", "*.bak\n")
    project.write("home", ".config/git/config", "[core]\n\texcludesFile = ~/mine\n")
    assert project.left(project.select(), "ignored") == ["a.bak", "a.private"]
    project.write("home", "other", "*.py\n")
    project.write("home", ".gitconfig", f"[core]\n\texcludesFile = {home}/other\n")
    assert project.left(project.select(), "ignored") == ["a.private", "a.py"]
    project.write("home", "chosen", "[core]\n\texcludesFile = ~/mine\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / "chosen"))
    assert project.left(project.select(), "ignored") == ["a.bak", "a.private"]
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "")
    assert project.left(project.select(), "ignored") == ["a.private", "a.swp"]
    git(project.real, "config", "core.excludesFile", str(home / "mine"))
    assert project.left(project.select(), "ignored") == ["a.bak", "a.private"]


def test_nothing_that_a_sandbox_wrote_is_run_or_followed(project: Project) -> None:
    project.fork()
    touched = project.place / "touched"
    program = project.here / "evil.sh"
    program.write_text(f"#!/bin/sh\ntouch {touched}\n")
    program.chmod(0o755)
    with (project.here / ".git" / "config").open("a") as stream:
        stream.write(f'[core]\n\tfsmonitor = {program}\n\thooksPath = {project.here}\n[alias]\n\tcheck-ignore = "!{program}"\n')
    (project.here / ".git" / "info" / "exclude").write_text("*.py\n")
    (project.here / "src" / ".gitignore").symlink_to(project.place / "patterns")
    (project.place / "patterns").write_text("*\n")
    project.write("here", "src/app.py", "changed\n")
    found = project.select()
    assert "src/app.py" in project.names(found)
    assert not touched.exists()


@pytest.mark.parametrize(
    "name", [":(icase)a.log", "*.log", "-n.log", "line\nbreak.log", '"quoted".log', " .log", "\udcff.log", ":!x.log"]
)
def test_names_are_nothing_but_names(project: Project, name: str) -> None:
    project.fork()
    project.write("here", name)
    project.write("here", f"{name}x")
    found = project.select()
    assert (project.left(found, "ignored"), project.names(found)) == ([name], [f"{name}x"])


def test_lists_that_cannot_be_read_are_nothing(project: Project) -> None:
    project.fork()
    (project.here / "odd").mkdir()
    (project.here / "odd" / ".gitignore").mkdir()
    project.write("here", "odd/a.log")
    project.write("here", "odd/a")
    found = project.select()
    assert project.left(found, "ignored") == ["odd/a.log"]
    assert "odd/a" in project.names(found)


def test_without_a_repository_the_lists_of_the_project_count(project: Project) -> None:
    shutil.rmtree(project.real / ".git")
    project.fork()
    project.write("here", "a.log")
    project.write("here", "a")
    assert project.left(project.select(), "ignored") == ["a.log"]


def test_without_git_nobody_can_tell_what_is_ignored(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    project.fork()
    project.write("here", "a.log")
    changes = project.changes()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="git is not installed"):
        select(changes, str(project.real))
    assert len(select(changes, str(project.real), ignored=True).inside) == 1


def test_nothing_is_left_behind(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.place / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(project.place / "temporary"))
    project.fork()
    project.write("here", "a.log")
    assert project.left(project.select(), "ignored") == ["a.log"]
    assert os.listdir(project.place / "temporary") == []
    assert ignoring.ignored_of([], str(project.real), {}) == set()


class Part(Project):
    """A repository in reality, of which the project is a directory."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.top = self.real
        self.write("real", "packages/.gitignore", "*.tmp\n!wanted.log\n")
        self.write("real", "packages/web/.gitignore", "/dist\n")
        self.real = self.top / "packages" / "web"


@pytest.fixture
def part(place: Path) -> Part:
    return Part(place)


def test_the_lists_above_a_project_that_is_a_part_of_a_repository_count(part: Part) -> None:
    (part.top / ".git" / "info" / "exclude").write_text("/packages/web/private\n/private.top\n")
    part.fork()
    for path in ("a.log", "src/wanted.log", "a.tmp", "dist/x", "src/dist/x", "build/x", "private", "private.top", "secret", "a"):
        part.write("here", path, f"{path} of the sandbox")
    found = part.select()
    assert part.left(found, "ignored") == ["a.log", "a.tmp", "build/x", "dist/x", "private"]
    taken = [path for path in part.names(found) if not path.endswith("/")]
    assert taken == ["a", "private.top", "secret", "src/dist/x", "src/wanted.log"]
    part.write("here", ".gitignore", "!a.tmp\n")
    assert part.left(part.select(), "ignored") == ["a.log", "build/x", "private"]


def test_what_the_repository_above_tracks_is_not_ignored(part: Part) -> None:
    for path in ("tracked.log", "gone.log", "untracked.log", "[x]/a.log"):
        part.write("real/packages/web", path)
    part.write("real", "untracked.log")
    git(part.top, "add", "-f", "packages/web/tracked.log", "packages/web/gone.log", "untracked.log", "packages/web/[x]/a.log")
    part.fork()
    for path in ("tracked.log", "untracked.log", "[x]/a.log"):
        part.write("here", path, "changed\n")
    (part.here / "gone.log").unlink()
    found = part.select()
    assert part.names(found) == ["[x]/a.log", "gone.log", "tracked.log"]
    assert part.left(found, "ignored") == ["untracked.log"]


def test_the_nearest_repository_counts(part: Part) -> None:
    git(part.real, "init", "-q")
    part.fork()
    for path in ("a.log", "dist/x"):
        part.write("here", path)
    assert part.left(part.select(), "ignored") == ["dist/x"]


def test_a_part_of_a_linked_worktree_goes_by_its_lists(part: Part) -> None:
    git(part.top, "add", "-A")
    git(part.top, "commit", "-qm", "first")
    git(part.top, "worktree", "add", "-q", str(part.place / "linked"))
    (part.top / ".git" / "info" / "exclude").write_text("/packages/web/private\n")
    part.real = part.place / "linked" / "packages" / "web"
    part.write("linked", "packages/web/tracked.log")
    git(part.place / "linked", "add", "-f", "packages/web/tracked.log")
    part.fork()
    for path in ("a.log", "private", "tracked.log"):
        part.write("here", path, "changed\n")
    found = part.select()
    assert (part.left(found, "ignored"), part.names(found)) == (["a.log", "private"], ["tracked.log"])


def test_a_home_directory_that_is_kept_in_git_does_not_count(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    part.fork()
    part.write("here", "a.log")
    assert part.left(part.select(), "ignored") == ["a.log"]
    monkeypatch.setenv("HOME", str(part.top))
    assert part.left(part.select(), "ignored") == []


def test_a_repository_that_ignores_the_project_as_a_whole_says_nothing_about_what_is_in_it(part: Part) -> None:
    (part.top / ".gitignore").write_text("*\n")
    (part.real / ".gitignore").write_text("*.own\n")
    part.fork()
    part.write("here", "a.log")
    part.write("here", "a.own")
    assert part.left(part.select(), "ignored") == ["a.own"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_repository_that_a_stranger_put_above_does_not_count(part: Part) -> None:
    part.fork()
    part.write("here", "a.log")
    os.chown(part.top / ".git", 4243, 4243)
    assert part.left(part.select(), "ignored") == []
    os.chown(part.real, 4243, 4243)
    assert part.left(part.select(), "ignored") == ["a.log"]


def test_what_is_no_repository_is_passed_over_on_the_way_up(part: Part) -> None:
    (part.real / ".git").mkdir()
    (part.top / "packages" / ".git").write_text("gitdir: /nowhere\n")
    part.fork()
    part.write("here", "a.log")
    assert part.left(part.select(), "ignored") == ["a.log"]


def test_nothing_that_the_repository_above_names_is_run(part: Part) -> None:
    touched = part.place / "touched"
    program = part.place / "evil.sh"
    program.write_text(f"#!/bin/sh\ntouch {touched}\n")
    program.chmod(0o755)
    with (part.top / ".git" / "config").open("a") as stream:
        stream.write(f'[core]\n\tfsmonitor = {program}\n\thooksPath = {part.place}\n[filter "x"]\n\tclean = {program}\n')
    part.write("real", ".gitattributes", "* filter=x\n")
    part.fork()
    part.write("here", "a.log")
    assert part.left(part.select(), "ignored") == ["a.log"]
    assert not touched.exists()


# -- the rest -------------------------------------------------------------------------------------------------------------------


def test_a_part_is_taken_by_globs(project: Project) -> None:
    project.fork()
    for path in ("src/app.py", "src/deep/b.py", "c.py", "d.md"):
        project.write("here", path, f"{path} changed")
    assert project.names(project.select(paths=["*.py"])) == ["c.py", "src/app.py", "src/deep/b.py", "src/deep/"]
    assert project.names(project.select(paths=["src/*.py", "d.md"])) == ["d.md", "src/app.py"]
    assert project.names(project.select(paths=[f"{project.real}/src"])) == ["src/app.py", "src/deep/b.py", "src/deep/"]
    assert project.select(paths=["nothing"]) == Selection()


@pytest.mark.parametrize(
    ("globs", "kinds"),
    [
        (["src"], {"src/app.py": "deleted", "src/": "deleted"}),
        (["lib"], {"lib/main.py": "added", "lib/": "added"}),
        (["app.py"], {"src/app.py": "deleted", "src/": "deleted"}),
        (["main.py"], {"lib/main.py": "added", "lib/": "added"}),
        (["src", "lib"], {"lib/main.py": "renamed", "lib/": "added", "src/": "deleted"}),
        (["other"], {}),
    ],
    ids=str,
)
def test_of_a_rename_only_the_end_is_taken_that_a_glob_names(project: Project, globs: list[str], kinds: dict[str, str]) -> None:
    """That something was renamed is a guess by its content: it must not delete what nobody named."""
    project.fork()
    (project.here / "lib").mkdir()
    (project.here / "src" / "app.py").rename(project.here / "lib" / "main.py")
    (project.here / "src").rmdir()
    found = project.select(paths=globs).inside
    assert {os.path.relpath(one.path, project.real) + "/" * one.path.endswith("/"): one.kind for one in found} == kinds


def test_a_rename_to_what_is_ignored_is_a_deletion(project: Project) -> None:
    project.fork()
    (project.here / "build").mkdir()
    (project.here / "src" / "app.py").rename(project.here / "build" / "app.py")
    found = project.select()
    (one,) = found.inside
    assert (one.kind, one.path, one.source, one.after) == ("deleted", f"{project.real}/src/app.py", None, None)
    assert one.before is not None
    assert project.left(found, "ignored") == ["build/app.py"]


def test_git_s_own_files_are_never_taken(project: Project) -> None:
    project.write("real", "vendor/nested/.git/config", "[core]\n")
    project.write("real", "worktree/.git", "gitdir: /elsewhere\n")
    project.fork()
    for path in (".git/config", ".git/hooks/pre-commit", "vendor/nested/.git/config", "worktree/.git", "src/.gitattributes"):
        project.write("here", path, "changed")
    for more in ({}, {"ignored": True}, {"paths": ["**"], "ignored": True}, {"paths": [".git"]}):
        found = project.select(**more)
        assert project.names(found) in (["src/.gitattributes"], [])
        assert ".git/hooks/pre-commit" in project.left(found, "git")
    assert project.left(project.select(), "git") == [
        ".git/config",
        ".git/hooks/pre-commit",
        "vendor/nested/.git/config",
        "worktree/.git",
    ]


def test_outside_only_what_is_named_is_taken(project: Project) -> None:
    about = os.stat_result((stat.S_IFREG | 0o644, *[0] * 9))
    changes = Changes(project=str(project.real))
    for path in ("/etc/hosts", "/etc/apt/list", "/etc/apt/.git/config", "/opt/tool", f"{project.real}/src/app.py"):
        changes.add(Change(path, "modified", Side(about), Side(about)))
    changes.add(Change(f"{project.real}-2/file", "added", None, Side(about)))
    changes.add(Change("/opt/moved.py", "renamed", Side(about), Side(about), f"{project.real}/moved.py"))
    found = select(changes, str(project.real))
    assert [one.path for one in found.inside] == [f"{project.real}/src/app.py", f"{project.real}/moved.py"]
    assert found.inside[1].kind == "deleted"
    assert found.outside == []
    assert found.left_out["outside"] == sorted(
        ["/etc/apt/list", "/etc/hosts", "/opt/moved.py", "/opt/tool", f"{project.real}-2/file"]
    )
    assert found.left_out["git"] == ["/etc/apt/.git/config"]
    some = select(changes, str(project.real), outside=["/etc/**", "/opt/moved.py"], paths=["no-such"])
    assert [one.path for one in some.outside] == ["/etc/hosts", "/etc/apt/list", "/opt/moved.py"]
    assert (some.inside, some.outside[2].kind) == ([], "added")


def test_what_can_be_neither_read_nor_moved_is_left_out(project: Project) -> None:
    project.write("real", "was-a-fifo", "x")
    project.fork()
    (project.here / "was-a-fifo").unlink()
    os.mkfifo(project.here / "was-a-fifo")
    os.mkfifo(project.here / "fifo")
    short = os.open(project.here, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{short}/socket")
    os.close(short)
    changes = project.changes()
    changes.add(Change(f"{project.real}/closed/", "modified", None, None))
    found = select(changes, str(project.real))
    assert found.inside == []
    assert project.left(found, "other") == ["closed/", "fifo", "socket", "was-a-fifo"]


def test_directories_come_with_what_is_taken_in_them(project: Project) -> None:
    for path in ("old/a", "old/deep/b", "mixed/a", "mixed/b.log", "emptied/a"):
        project.write("real", path)
    project.fork()
    for name in ("old", "mixed"):
        shutil.rmtree(project.here / name)
    (project.here / "emptied" / "a").unlink()
    project.write("here", "new/deep/file", "new")
    project.write("here", "noise/a.log", "new")
    (project.here / "new" / "empty").mkdir(mode=0o700)
    found = {one.path[len(str(project.real)) + 1 :]: one for one in project.select().inside}
    assert sorted(found) == sorted(
        ["emptied/a", "mixed/a", "old/a", "old/deep/b", "old/deep/", "old/", "new/", "new/deep/", "new/deep/file", "new/empty/"]
    )
    made, gone = found["new/empty/"], found["old/deep/"]
    assert made.before is None
    assert made.after is not None
    assert (made.after.type, made.after.mode) == ("directory", 0o700)
    assert gone.after is None
    assert gone.before is not None
    assert gone.before.type == "directory"
    part = [one.path for one in project.select(paths=["old/deep"]).inside]
    assert part == [f"{project.real}/old/deep/b", f"{project.real}/old/deep/"]


@pytest.mark.parametrize("seed", range(40))
def test_all_that_a_sandbox_did_arrives(place: Path, seed: int) -> None:
    """From the comparison to the plan, with nothing that somebody added by hand."""
    dice = random.Random(seed)
    trees = Trees(place)
    tangle(trees.here, dice, 10)
    root = str(trees.there)
    changes = with_renames(compare_trees(str(trees.here), str(trees.base), root))
    before = sides_of([str(trees.base)])
    ends: dict[str, Side | None] = {}
    for one in select(changes, root, ignored=True).inside:
        if one.source is not None:
            ends.setdefault(os.path.relpath(one.source, root), None)
        path = os.path.relpath(one.path, root)
        ends[path] = one.after or ends.get(path)
    found = plan([Piece(root, path, before(path), side) for path, side in ends.items()])
    assert found.conflicts == []
    perform(found.operations)
    assert shapes(trees.there) == shapes(trees.here)


# -- marks ----------------------------------------------------------------------------------------------------------------------

ABOUT = os.stat_result((stat.S_IFREG | 0o644, *[0] * 9))


def added(path: str, mode: int = 0o644, kind: int = stat.S_IFREG) -> Change:
    return Change(path, "added", None, Side(os.stat_result((kind | mode, *[0] * 9))))


@pytest.mark.parametrize(
    "path",
    [
        "elsewhere.toml",
        ".envrc",
        "packages/web/.envrc",
        ".vscode/tasks.json",
        ".idea/runConfigurations/x.xml",
        ".gitattributes",
        ".gitmodules",
        "src/.gitignore",
        ".husky/pre-commit",
        ".githooks/post-merge",
        ".pre-commit-config.yaml",
        ".github/workflows/ci.yml",
        ".gitlab-ci.yml",
        ".circleci/config.yml",
        "Jenkinsfile",
        "azure-pipelines.yml",
        ".travis.yml",
        ".claude/settings.json",
    ],
)
def test_what_runs_by_itself_is_marked(path: str) -> None:
    ((marked, why),) = marks([added(f"/project/{path}")], "/project")
    assert marked == f"/project/{path}"
    assert why


@pytest.mark.parametrize("path", ["src/app.py", "Makefile", "docs/envrc", "my.git/x", "workflows/ci.yml", "elsewhere.toml.bak"])
def test_what_does_not_run_by_itself_is_not_marked(path: str) -> None:
    assert marks([added(f"/project/{path}")], "/project") == []


def test_reasons_fit_what_they_are_given_for() -> None:
    found = dict(marks([added(f"/p/{name}") for name in (".github/workflows/x", ".github/CODEOWNERS", ".gitignore")], "/p"))
    assert found["/p/.github/workflows/x"] == "a CI service runs it"
    assert found["/p/.gitignore"] == found["/p/.github/CODEOWNERS"] == "git goes by what it says about other files"


def test_where_the_project_lies_marks_nothing() -> None:
    assert marks([added("/home/me/.claude/work/src/app.py")], "/home/me/.claude/work") == []
    assert marks([added("/home/me/.bashrc"), added("/etc/cron.d/job"), added("/etc/crontab2")], "/home/me/project") == [
        ("/etc/cron.d/job", "cron runs it"),
        ("/home/me/.bashrc", "a shell runs it when it starts"),
    ]


def test_entry_points_that_settings_name_are_marked() -> None:
    changes = [added("/project/Makefile"), added("/project/scripts/run.sh"), added("/project/src/run.sh")]
    assert marks(changes, "/project", ["Makefile", "scripts/*.sh"]) == [
        ("/project/Makefile", "an entry point of the project"),
        ("/project/scripts/run.sh", "an entry point of the project"),
    ]


def test_programs_that_run_with_other_rights_are_marked() -> None:
    changes = [added("/p/a", 0o4755), added("/p/b", 0o2755), added("/p/c", 0o755), added("/p/d/", 0o2755, stat.S_IFDIR)]
    assert [path for path, _ in marks(changes, "/p")] == ["/p/a", "/p/b"]


def test_deletions_and_both_ends_of_a_rename_are_marked() -> None:
    gone = Change("/p/.travis.yml", "deleted", Side(ABOUT), None)
    moved = Change("/p/old-ci.txt", "renamed", Side(ABOUT), Side(ABOUT), "/p/.gitlab-ci.yml")
    assert [path for path, _ in marks([gone, moved], "/p")] == ["/p/.gitlab-ci.yml", "/p/.travis.yml"]


@pytest.mark.parametrize("path", [".GIT/hooks/x", ".Git/config", "sub/.gitATTRIBUTES", ".VSCode/tasks.json", "jenkinsfile"])
def test_another_spelling_is_marked_as_well(path: str) -> None:
    assert [marked for marked, _ in marks([added(f"/project/{path}")], "/project")] == [f"/project/{path}"]


def test_what_lies_where_reality_has_its_hooks_is_marked(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tools/hooks/pre-commit", "own/commit-msg", "tools/hook", "chosen/pre-push")
    new = [added(f"{project.real}/{name}") for name in names]
    monkeypatch.setenv("HOME", str(project.place))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert marks(new, str(project.real)) == []
    git(project.real, "config", "core.hooksPath", "tools/hooks")
    hook = "git runs it as a hook"
    assert marks(new, str(project.real)) == [(f"{project.real}/tools/hooks/pre-commit", hook)]
    (project.place / ".gitconfig").write_text(f"[core]\n\thooksPath = ~/{project.real.name}/own\n")
    assert dict(marks(new, str(project.real)))[f"{project.real}/own/commit-msg"] == hook
    (project.place / "chosen").write_text("[core]\n\thooksPath = chosen\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(project.place / "chosen"))
    assert [path for path, _ in marks(new, str(project.real))] == [
        f"{project.real}/{name}" for name in sorted(set(names) - {"tools/hook"})
    ]


def test_hooks_of_a_repository_above_may_lie_in_the_project(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(part.top))  # a home directory that is kept in git has hooks as well
    new = [added(f"{part.real}/{name}") for name in ("hooks/pre-commit", "hook")]
    assert marks(new, str(part.real)) == []
    git(part.top, "config", "core.hooksPath", os.path.relpath(part.real / "hooks", part.top))
    wanted = [(f"{part.real}/hooks/pre-commit", "git runs it as a hook")]
    assert marks(new, str(part.real)) == wanted
    git(part.real, "init", "-q")
    assert marks(new, str(part.real)) == wanted, "they run for whoever commits above, too"


def test_what_counts_in_a_repository_in_the_open_is_marked(project: Project) -> None:
    """Git in such a directory runs what its configuration names."""
    git(project.place, "init", "-q", "--bare", str(project.place / "bare"))
    project.fork()
    shutil.copytree(project.place / "bare", project.here / "fixtures" / "bare")
    project.write("here", "fixtures/bare/hooks/post-checkout")
    project.write("here", "fixtures/HEAD", "a file of that name\n")
    changes = project.changes()
    found = {os.path.relpath(path, project.real / "fixtures" / "bare") for path, _ in marks(changes.entries, str(project.real))}
    assert found >= {"HEAD", "config", "hooks/post-checkout"}
    assert all(path in ("HEAD", "config") or path.startswith("hooks/") for path in found)


def test_what_makes_a_repository_of_a_directory_is_marked(project: Project) -> None:
    bare = project.real / "bare"
    git(project.place, "init", "-q", "--bare", str(bare))
    config, ref = added(f"{bare}/config"), added(f"{bare}/refs/heads/x")
    assert [path for path, _ in marks([config], str(project.real))] == [f"{bare}/config"]
    assert marks([ref], str(project.real)) == [], "it was one before"
    shutil.rmtree(bare / "refs")
    assert [path for path, _ in marks([ref], str(project.real))] == [f"{bare}/refs/heads/x"]
