"""A change on a branch, with a real git: three-way, as one commit, in one step, and back."""

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from elsewhere.changes.model import Side
from elsewhere.errors import Conflict, NotFound, UsageError
from elsewhere.promotion import branches
from elsewhere.promotion.choosing import Choices
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.planning import Plan

LINES = "".join(f"line {number}\n" for number in range(20))


def about(mode: int) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, 0, 0, 0, 0, 0, 0))


def file(content: str | bytes, mode: int = 0o644) -> Side:
    return Side(about(stat.S_IFREG | mode), content=content.encode() if isinstance(content, str) else content)


def link(target: str) -> Side:
    return Side(about(stat.S_IFLNK | 0o777), target=target)


DIRECTORY = Side(about(stat.S_IFDIR | 0o755))


class Repository:
    """`main` is checked out; `staging` is what is changed."""

    def __init__(self, place: Path) -> None:
        self.path = place / "project"
        (self.path / "src").mkdir(parents=True)
        (self.path / "text").write_text(LINES)
        (self.path / "src" / "tool").write_bytes(b"\0binary\n")
        (self.path / "src" / "tool").chmod(0o755)
        (self.path / "link").symlink_to("text")
        for words in ("init -q -b main", "config user.name Somebody", "config user.email s@example.org", "add -A"):
            self.git(*words.split())
        self.git("commit", "-qm", "first")
        self.git("branch", "staging")

    def git(self, *words: str, **more: str) -> str:
        surroundings = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **more}
        done = subprocess.run(["git", *words], cwd=self.path, capture_output=True, text=True, env=surroundings)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def change(self, **contents: str | None) -> None:
        """Another commit on staging, by somebody else."""
        self.git("checkout", "-q", "staging")
        for name, content in contents.items():
            if content is None:
                (self.path / name).unlink()
            else:
                (self.path / name).write_text(content)
        self.git("add", "-A")
        self.git("commit", "-qm", "theirs")
        self.git("checkout", "-q", "main")

    def piece(self, path: str, before: Side | None, after: Side | None, *, known: bool = True) -> Piece:
        return Piece(str(self.path), path, before, after, known, not known)

    def tip(self) -> branches.Tip:
        return branches.find(str(self.path), "staging")

    def plan(self, *pieces: Piece, choices: Choices = Choices()) -> Plan:  # noqa: B008
        return branches.plan(self.tip(), pieces, choices)

    def apply(self, *pieces: Piece) -> dict[str, str]:
        tip = self.tip()
        planned = branches.plan(tip, pieces, Choices())
        assert not planned.conflicts
        new = branches.commit(tip, planned, "the message\n")
        branches.move(tip, new, "elsewhere: test")
        return {"repository": str(self.path), "branch": "staging", "old": tip.sha, "new": new}

    def show(self, path: str) -> str:
        return self.git("show", f"staging:{path}")

    def listing(self) -> dict[str, str]:
        lines = self.git("ls-tree", "-r", "staging").splitlines()
        return {line.partition("\t")[2]: line.split(" ")[0] for line in lines}


@pytest.fixture
def repository(place: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("HOME", str(place))
    for name in [name for name in os.environ if name.startswith("GIT_") or name == "XDG_CONFIG_HOME"]:
        monkeypatch.delenv(name)
    return Repository(place)


# -- a commit -------------------------------------------------------------------------------------------------------------------


def test_a_change_becomes_one_commit_and_nothing_else_moves(repository: Repository) -> None:
    before = {path: path.read_bytes() for path in repository.path.rglob("*") if path.is_file() and ".git" not in path.parts}
    index, head = (repository.path / ".git" / "index").read_bytes(), repository.git("rev-parse", "main")
    data = repository.apply(
        repository.piece("text", file(LINES), file(LINES.replace("line 3", "ours"))),
        repository.piece("src/tool", file(b"\0binary\n", 0o755), None),
        repository.piece("new", None, DIRECTORY),
        repository.piece("new/deep dir", None, DIRECTORY),
        repository.piece("new/deep dir/a\nb", None, file(b"\xff\0", 0o700)),
        repository.piece("new/way", None, link("../text")),
        repository.piece("link", link("text"), file("a file now\n", 0o600)),
    )
    assert repository.listing() == {
        "text": "100644", '"new/deep dir/a\\nb"': "100755", "new/way": "120000", "link": "100644",
    }  # fmt: skip
    assert "ours" in repository.show("text")
    assert repository.show("new/way") == "../text"
    assert repository.git("log", "-1", "--format=%an %ae %cn %s", "staging") == "Somebody s@example.org Somebody the message"
    assert repository.git("rev-parse", "staging^") == data["old"] == head
    assert repository.git("rev-parse", "main") == head
    assert (repository.path / ".git" / "index").read_bytes() == index
    assert before == {path: path.read_bytes() for path in before}
    assert repository.git("status", "--porcelain") == ""
    assert branches.state(data) == "applied"


def test_an_author_that_nobody_named_is_elsewhere(repository: Repository) -> None:
    repository.git("config", "--unset", "user.name")
    repository.apply(repository.piece("a", None, file("a")))
    assert repository.git("log", "-1", "--format=%an", "staging") == "elsewhere"


@pytest.mark.parametrize("where", [".gitconfig", "xdg/git/config", "chosen"])
def test_the_users_own_configuration_names_the_author(
    repository: Repository, place: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for key in ("user.name", "user.email"):
        repository.git("config", "--unset", key)
    (place / ".gitconfig").write_text("[core]\npager = less\n")
    (place / "xdg" / "git").mkdir(parents=True)
    (place / where).write_text("[user]\nname = Ada L\nemail = ada@example.org\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "xdg"))
    if where == "chosen":
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(place / where))
    repository.apply(repository.piece("a", None, file("a")))
    assert repository.git("log", "-1", "--format=%an <%ae>", "staging") == "Ada L <ada@example.org>"


def test_nothing_of_the_repositorys_configuration_runs(repository: Repository, place: Path) -> None:
    trap = place / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {place}/sprung\nexit 1\n")
    trap.chmod(0o755)
    hooks = repository.path / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("reference-transaction", "post-index-change", "pre-commit", "update"):
        (hooks / name).write_bytes(trap.read_bytes())
        (hooks / name).chmod(0o755)
    for key in ("core.fsmonitor", "filter.x.clean", "filter.x.process", "core.sshCommand", "gpg.program", "core.editor"):
        repository.git("config", key, str(trap))
    repository.git("config", "filter.x.required", "true")
    repository.git("config", "commit.gpgSign", "true")
    (repository.path / ".git" / "info").mkdir(exist_ok=True)
    (repository.path / ".git" / "info" / "attributes").write_text("* filter=x\n")
    repository.apply(repository.piece("a", None, file("as it is\r\n")), repository.piece("text", file(LINES), file("x")))
    assert not (place / "sprung").exists()
    assert repository.git("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "cat-file", "-s", "staging:a") == "10"


# -- three-way ------------------------------------------------------------------------------------------------------------------


def test_both_sides_are_merged(repository: Repository) -> None:
    repository.change(text=LINES.replace("line 18", "theirs"))
    planned = repository.plan(repository.piece("text", file(LINES), file(LINES.replace("line 3\n", "ours\n"))))
    assert (planned.merged, planned.conflicts) == (["text"], [])
    repository.apply(repository.piece("text", file(LINES), file(LINES.replace("line 3\n", "ours\n"))))
    assert "ours" in repository.show("text")
    assert "theirs" in repository.show("text")


@pytest.mark.parametrize(
    ("theirs", "before", "after", "reason"),
    [
        (LINES.replace("line 3\n", "theirs\n"), file(LINES), file(LINES.replace("line 3\n", "ours\n")), "text_conflict"),
        (None, file(LINES), file("ours"), "deleted_there"),
        ("theirs", file(LINES), None, "deleted_here"),
        ("theirs", None, file("ours"), "both_added"),
        ("theirs", file(LINES), link("x"), "type_changed"),
    ],
)
def test_what_both_changed_is_a_conflict(
    repository: Repository, theirs: str | None, before: Side | None, after: Side | None, reason: str
) -> None:
    repository.change(text=theirs)
    piece = repository.piece("text", before, after)
    planned = repository.plan(piece)
    assert [(one.path, one.reason) for one in planned.conflicts] == [("text", reason)]
    kept = repository.plan(piece, choices=Choices(theirs=("text",)))
    assert (kept.kept, kept.operations, kept.conflicts) == (["text"], [], [])
    taken = repository.plan(piece, choices=Choices(ours=("te*",)))
    assert (taken.applied, taken.conflicts) == (["text"], [])


def test_what_nobody_knows_the_beginning_of_conflicts_unless_it_is_the_same(repository: Repository) -> None:
    unknown = repository.plan(repository.piece("text", None, file("ours"), known=False))
    assert [one.reason for one in unknown.conflicts] == ["no_base"]
    same = repository.plan(repository.piece("text", None, file(LINES, 0o600), known=False))
    assert (same.same, same.operations) == (["text"], [])


def test_modes_count_only_as_git_knows_them(repository: Repository) -> None:
    planned = repository.plan(
        repository.piece("text", file(LINES, 0o664), file(LINES, 0o600)),
        repository.piece("src", DIRECTORY, Side(about(stat.S_IFDIR | 0o700))),
        repository.piece("src/tool", file(b"\0binary\n", 0o700), file(b"\0binary\n", 0o644)),
    )
    assert [one.path for one in planned.operations] == ["src/tool"]


def test_nothing_can_be_below_a_file_nor_a_file_where_a_directory_is(repository: Repository) -> None:
    below = repository.plan(repository.piece("text/x", None, file("x")))
    assert [one.reason for one in below.conflicts] == ["parent_replaced"]
    above = repository.plan(repository.piece("src", None, file("x")))
    assert [one.reason for one in above.conflicts] == ["type_changed"]
    pieces = [repository.piece(path, None, file("x")) for path in ("text/x", "text/y", "new")]
    some = repository.plan(*pieces, choices=Choices(theirs=("text/x",)))
    assert ([one.path for one in some.conflicts], some.kept) == (["text/y"], ["text/x"])
    theirs = repository.plan(*pieces, choices=Choices(theirs=("text/*",)))
    assert (theirs.conflicts, theirs.kept, theirs.applied) == ([], ["text/x", "text/y"], ["new"])
    assert [one.path for one in theirs.operations] == ["new"]
    assert (theirs.disputed, theirs.fitting) == (["text/x", "text/y"], Choices(theirs=("text/*",)))
    ours = repository.plan(*pieces, choices=Choices(ours=("text/*",)))
    assert [one.path for one in ours.conflicts] == ["text/x", "text/y"], "nothing of the branch is taken away"
    both = [repository.piece("src/tool", file(b"\0binary\n", 0o755), None), repository.piece("src", DIRECTORY, file("x"))]
    repository.apply(*both)
    assert repository.show("src") == "x"


@pytest.mark.parametrize(
    ("target", "bad"),
    [("/etc/passwd", True), ("../../x", True), ("../text", False), ("tool", False), ("a/../tool", True), ("./.././text", False)],
)
def test_a_link_that_leads_out_is_a_conflict(repository: Repository, target: str, bad: bool) -> None:
    planned = repository.plan(repository.piece("src/way", None, link(target)))
    assert [one.reason for one in planned.conflicts] == (["link_outside"] if bad else [])


def test_a_link_that_leads_out_is_taken_only_by_its_very_path(repository: Repository) -> None:
    new = repository.piece("src/way", None, link("/etc/passwd"))
    both = repository.piece("link", link("text"), link("src/../../x"))
    repository.git("checkout", "-q", "staging")
    (repository.path / "link").unlink()
    repository.change(link="theirs")
    for glob in ("*", "src", "src/*", "**"):
        planned = repository.plan(new, both, choices=Choices(ours=(glob,)))
        assert {one.path for one in planned.conflicts} == {"src/way", "link"}
    planned = repository.plan(new, both, choices=Choices(ours=("src/way", "link")))
    assert (planned.applied, planned.conflicts) == (["src/way", "link"], [])
    planned = repository.plan(new, both, choices=Choices(theirs=("**",)))
    assert (planned.kept, planned.conflicts) == (["src/way", "link"], [])


def test_which_choices_were_about_a_conflict_is_told(repository: Repository) -> None:
    repository.change(text="theirs\n")
    pieces = [repository.piece("text", file(LINES), file("ours\n")), repository.piece("new", None, file("x"))]
    planned = repository.plan(*pieces, choices=Choices(ours=("text", "new"), theirs=("src",)))
    assert (planned.disputed, planned.fitting) == (["text"], Choices(ours=("text",)))
    with pytest.raises(UsageError) as twice:
        repository.plan(*pieces, choices=Choices(ours=("text",), theirs=("*",)))
    assert twice.value.code == "ours_and_theirs"
    fifo = repository.piece("fifo", None, Side(about(stat.S_IFIFO | 0o600)))
    assert repository.plan(fifo, choices=Choices(ours=("fifo",))).conflicts
    assert repository.plan(fifo, choices=Choices(theirs=("fifo",))).kept == ["fifo"]


def test_what_is_gits_own_outside_or_no_file_is_never_taken(repository: Repository) -> None:
    planned = repository.plan(
        repository.piece(".git/config", None, file("x")),
        repository.piece("sub/.git/hooks/x", None, file("x")),
        Piece("/", "etc/x", None, file("x")),
        repository.piece("fifo", None, Side(about(stat.S_IFIFO | 0o600))),
    )
    assert (planned.operations, [one.reason for one in planned.conflicts]) == ([], ["not_a_file"])


# -- the branch -----------------------------------------------------------------------------------------------------------------


def test_a_branch_that_is_not_there_or_checked_out_is_refused(repository: Repository, place: Path) -> None:
    with pytest.raises(NotFound) as missing:
        branches.find(str(repository.path), "stagin")
    assert missing.value.code == "branch_unknown"
    with pytest.raises(NotFound) as nothing:
        branches.find(str(place), "staging")
    assert nothing.value.code == "no_repository"
    with pytest.raises(Conflict) as caught:
        branches.find(str(repository.path), "main")
    assert caught.value.code == "branch_checked_out"
    repository.git("worktree", "add", "-q", str(place / "other"), "staging")
    with pytest.raises(Conflict) as caught:
        repository.tip()
    assert (caught.value.code, caught.value.detail["worktree"]) == ("branch_checked_out", str(place / "other"))


@pytest.mark.parametrize("meddle", ["commit", "checkout", "delete"])
def test_a_branch_that_somebody_moves_meanwhile_is_theirs(repository: Repository, meddle: str) -> None:
    tip = repository.tip()
    new = branches.commit(tip, branches.plan(tip, [repository.piece("a", None, file("a"))], Choices()), "m")
    if meddle == "commit":
        repository.change(text="theirs")
    else:
        repository.git(*{"checkout": ("checkout", "-q", "staging"), "delete": ("branch", "-D", "staging")}[meddle])
    there = repository.git("for-each-ref", "refs/heads")
    with pytest.raises(Conflict) as caught:
        branches.move(tip, new, "m")
    assert caught.value.code == ("branch_checked_out" if meddle == "checkout" else "branch_moved")
    assert repository.git("for-each-ref", "refs/heads") == there
    data = {"repository": str(repository.path), "branch": "staging", "old": tip.sha, "new": new}
    branches.take_back(data, "back")  # it was never there
    assert repository.git("for-each-ref", "refs/heads") == there


def test_it_goes_back_to_exactly_where_it_was(repository: Repository) -> None:
    before = repository.git("for-each-ref")
    data = repository.apply(repository.piece("a", None, file("a")))
    assert repository.git("for-each-ref") != before
    for _ in range(2):
        branches.take_back(data, "elsewhere: back")
        assert repository.git("for-each-ref") == before
        assert branches.state(data) == "reversed"
    assert "elsewhere: back" in repository.git("reflog", "staging")


def test_what_somebody_built_on_it_is_not_taken_away(repository: Repository) -> None:
    data = repository.apply(repository.piece("a", None, file("a")))
    repository.change(text="on top")
    assert branches.state(data) == "moved"
    there = repository.git("rev-parse", "staging")
    with pytest.raises(Conflict) as caught:
        branches.take_back(data, "back")
    assert caught.value.code == "branch_moved"
    assert repository.git("rev-parse", "staging") == there


def test_whoever_owns_the_repository_owns_what_is_added(repository: Repository, request: pytest.FixtureRequest) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    repository.path.parent.chmod(0o755)
    own(repository.path, lambda path: os.chown(path, 4242, 4242, follow_symlinks=False))
    repository.git("config", "--global", "--add", "safe.directory", "*", HOME=str(repository.path.parent))
    tip = repository.tip()
    branches.move(
        tip, branches.commit(tip, branches.plan(tip, [repository.piece("a", None, file("a", 0o600))], Choices()), "m"), "m"
    )
    wrong = [path for path in (repository.path / ".git").rglob("*") if path.lstat().st_uid != 4242]
    assert wrong == []


def own(path: Path, give: Callable[[Path], None]) -> None:
    for one in (path, *path.rglob("*")):
        give(one)
