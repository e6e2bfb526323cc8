"""Commits of a sandbox become a branch of reality's repository, whatever is in them, and nothing of anybody's runs on the way."""

import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elsewhere.errors import Conflict, ElsewhereError, NotFound, Refused, UsageError
from elsewhere.promotion import heads
from elsewhere.promotion.commits import Answer, Commits, Fetched, default_branch, fetch, inside_script, known, look, read_answer
from elsewhere.promotion.heads import checkout, checkout_state, recover_checkout, undo_checkout
from elsewhere.promotion.quarantine import Room
from elsewhere.promotion.repository import is_name

if not shutil.which("git"):
    pytest.skip("git is not installed", allow_module_level=True)

PEOPLE = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}
NAME = default_branch("box")
STRANGER = 4242


def git(where: Path, *words: str, source: bytes | None = None, **more: str) -> str:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main", *words],
        cwd=where,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **PEOPLE, **more},
        input=source,
        check=True,
        capture_output=True,
    )
    return done.stdout.decode("utf-8", "surrogateescape").strip()


def commit(where: Path, message: str = "x", **files: str) -> str:
    for name, text in files.items():
        (where / name).write_text(text)
    git(where, "add", "-A")
    git(where, "commit", "--allow-empty", "-qm", message)
    return git(where, "rev-parse", "HEAD")


class Pair:
    """Reality and a sandbox that began as a copy of it."""

    def __init__(self, place: Path, project: Path) -> None:
        self.place = place
        self.project = project
        self.base = self.head(project)
        self.inside = place / "inside"
        self.bundle = place / "bundle"
        self.untouched = True  # whether what belongs to the user is to be as it was, in the end
        shutil.copytree(project, self.inside, symlinks=True)

    @staticmethod
    def head(where: Path) -> str | None:
        try:
            return git(where, "rev-parse", "--verify", "-q", "HEAD")
        except subprocess.CalledProcessError:
            return None

    def ask(self, refs: dict[str, str] | None = None, bundle: Path | None = None) -> Answer:
        return read_answer(self.said(refs, bundle))

    def said(self, refs: dict[str, str] | None = None, bundle: Path | None = None) -> bytes:
        line = inside_script(self.base, str(bundle or self.bundle), refs)
        done = subprocess.run(
            line, cwd=self.inside, env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"}, capture_output=True, check=True
        )
        return done.stdout

    def look(self, **more: Any) -> Commits:
        return look(str(self.project), str(self.bundle), self.ask(), self.base, **more)

    def fetch(self, branch: str = NAME, **more: Any) -> Fetched:
        return fetch(str(self.project), str(self.bundle), self.ask(), branch, **more)

    def refs(self) -> dict[str, str]:
        lines = git(self.project, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
        return dict(line.split(" ") for line in lines)

    def standing(self) -> tuple[object, ...]:
        """What belongs to the user, and is not to be touched."""
        own = Path(git(self.project, "rev-parse", "--absolute-git-dir"))
        names = ("HEAD", "index", "FETCH_HEAD", "ORIG_HEAD", "config")
        contents = tuple((own / name).read_bytes() if (own / name).exists() else None for name in names)
        return (*contents, git(self.project, "stash", "list"), sorted(os.listdir(own)))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path.resolve() / "project"
    place.mkdir()
    git(place, "init", "-q")
    return place


@pytest.fixture
def pair(tmp_path: Path, project: Path) -> Iterator[Pair]:
    commit(project, "first", file="one\n")
    commit(project, "second", file="two\n")
    (project / "file").write_text("stashed\n")
    git(project, "stash")
    made = Pair(tmp_path.resolve(), project)
    before = made.standing()
    yield made
    assert not made.untouched or made.standing() == before


def code_of(action: Callable[[], object], kind: type[ElsewhereError]) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert caught.value.hint
    return caught.value.code


# -- the plain way --------------------------------------------------------------------------------------------------------------


def test_commits_made_inside_become_a_branch_and_nothing_else_moves(pair: Pair) -> None:
    commit(pair.inside, "third", file="three\n")
    new = commit(pair.inside, "fourth \x1b[31m\tred", file="four\n")
    before = pair.refs()
    found = pair.look()
    assert (found.ref, found.head, found.branch, found.count) == ("HEAD", new, "main", 2)
    assert found.subjects == ["fourth ?[31m?red", "third"]
    assert (found.others, found.submodules, found.lfs) == ({}, [], [])
    assert pair.refs() == before
    assert pair.fetch() == Fetched(NAME, None, new, 2)
    assert pair.refs() == {**before, f"refs/heads/{NAME}": new}
    assert git(pair.project, "show", f"{NAME}:file") == "four"
    git(pair.project, "fsck", "--strict", "--connectivity-only")


def test_without_commits_there_is_no_bundle(pair: Pair) -> None:
    git(pair.inside, "switch", "-qc", "other")
    answer = pair.ask()
    assert (answer.head, answer.branch, answer.made) == (pair.base, "other", False)
    assert not pair.bundle.exists()
    assert code_of(lambda: fetch(str(pair.project), str(pair.bundle), answer, NAME), UsageError) == "no_commits"


def test_the_bundle_has_exactly_what_was_made(pair: Pair) -> None:
    new = commit(pair.inside, file="three")
    assert pair.ask().refs == {"HEAD": new, "refs/heads/main": new}
    said = git(pair.project, "bundle", "verify", str(pair.bundle))
    assert f"{pair.base} " in said
    assert git(pair.project, "bundle", "list-heads", str(pair.bundle)).splitlines() == [f"{new} HEAD", f"{new} refs/heads/main"]


def test_a_branch_of_reality_that_is_only_checked_out_is_no_news(pair: Pair) -> None:
    git(pair.inside, "switch", "-q", "--orphan", "feature")
    feature = commit(pair.inside, "feature", other="1")
    git(pair.project, "fetch", "-q", str(pair.inside), "feature:feature")
    (pair.project / ".git/FETCH_HEAD").unlink()
    assert known(str(pair.project)) == {"refs/heads/feature": feature, "refs/heads/main": pair.base}
    assert not pair.ask(known(str(pair.project))).made
    new = commit(pair.inside, "on it", other="2")
    answer = pair.ask(known(str(pair.project)))
    assert fetch(str(pair.project), str(pair.bundle), answer, NAME) == Fetched(NAME, None, new, 1)


def test_more_commits_move_the_branch_forward_and_the_same_ones_do_nothing(pair: Pair) -> None:
    first = commit(pair.inside, file="three")
    assert pair.fetch().new == first
    packs = set(os.listdir(pair.project / ".git/objects/pack"))
    assert pair.fetch() == Fetched(NAME, first, first, 0)
    assert pair.fetch("again") == Fetched("again", None, first, 0)
    assert set(os.listdir(pair.project / ".git/objects/pack")) == packs
    second = commit(pair.inside, file="four")
    assert pair.fetch() == Fetched(NAME, first, second, 1)


def test_a_branch_with_other_commits_is_a_conflict(pair: Pair) -> None:
    commit(pair.inside, file="three")
    pair.fetch()
    git(pair.inside, "commit", "-q", "--amend", "-m", "another")
    before = pair.refs()
    assert code_of(pair.fetch, Conflict) == "branch_exists"
    assert pair.refs() == before
    assert code_of(lambda: pair.fetch(f"{NAME}/below"), Conflict) == "branch_exists"
    assert code_of(lambda: pair.fetch("elsewhere"), Conflict) == "branch_exists"
    git(pair.project, "symbolic-ref", "refs/heads/alias", "refs/heads/main")
    assert code_of(lambda: pair.fetch("alias"), Conflict) == "branch_exists"
    assert pair.refs() == {**before, "refs/heads/alias": pair.base}


def test_a_branch_that_is_checked_out_anywhere_is_a_conflict(pair: Pair) -> None:
    commit(pair.inside, file="three")
    assert code_of(lambda: pair.fetch("main"), Conflict) == "branch_checked_out"
    git(pair.project, "branch", "side")
    git(pair.project, "worktree", "add", "-q", str(pair.place / "tree"), "side")
    assert code_of(lambda: pair.fetch("side"), Conflict) == "branch_checked_out"
    git(pair.project, "worktree", "remove", str(pair.place / "tree"))
    assert pair.fetch("side").count == 1


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-x",
        "a..b",
        "a b",
        "x.lock",
        "/x",
        "x/",
        "a//b",
        ".x",
        "x.",
        "HEAD",
        "@",
        "a@{b",
        "a\x9bb",
        "refs/heads/main",
        "refs/x",
    ],
)
def test_a_name_that_is_no_branch_is_refused_as_git_does(pair: Pair, name: str) -> None:
    commit(pair.inside, file="three")
    assert code_of(lambda: pair.fetch(name), UsageError) == "bad_branch"


@pytest.mark.parametrize(
    "name", ["a", "a/b", "ä", "a.b", "a-", "{", "a@b", "refs/heads/x", "a\\b", "a~", "a^", "a:", "a?", "a*", "a["]
)
def test_names_are_taken_as_git_takes_them(name: str) -> None:
    done = subprocess.run(["git", "check-ref-format", "--branch", name], capture_output=True, check=False, cwd="/")
    assert is_name(name) == (done.returncode == 0)


# -- histories ------------------------------------------------------------------------------------------------------------------


def test_history_that_reality_lost_is_a_conflict(pair: Pair) -> None:
    pair.untouched = False
    commit(pair.inside, file="three")
    git(pair.project, "reset", "-q", "--soft", "HEAD~1")
    git(pair.project, "stash", "clear")
    git(pair.project, "reflog", "expire", "--expire=now", "--all")
    git(pair.project, "update-ref", "-d", "ORIG_HEAD")
    git(pair.project, "gc", "-q", "--prune=now")
    before = pair.refs()
    with pytest.raises(Conflict) as caught:
        pair.fetch()
    assert (caught.value.code, caught.value.detail["missing"]) == ("history_gone", [pair.base])
    assert pair.refs() == before


def test_history_of_which_reality_has_only_the_tip_is_a_conflict(pair: Pair) -> None:
    pair.untouched = False
    commit(pair.inside, other="three")
    tree = git(pair.project, "rev-parse", "HEAD^{tree}")
    git(pair.project, "stash", "clear")
    git(pair.project, "reset", "-q", "--soft", "HEAD~1")
    (pair.project / ".git/objects" / tree[:2] / tree[2:]).unlink()
    before = pair.refs()
    assert code_of(pair.fetch, Conflict) == "history_gone"
    assert pair.refs() == before


def test_a_repository_without_commits_gets_everything(tmp_path: Path, project: Path) -> None:
    pair = Pair(tmp_path.resolve(), project)
    assert pair.base is None
    assert pair.ask() == Answer(None, "main", {})
    new = commit(pair.inside, "first", file="1")
    assert pair.look().count == 1
    assert pair.fetch() == Fetched(NAME, None, new, 1)
    assert git(project, "ls-tree", "--name-only", NAME) == "file"


def test_a_detached_head_and_several_branches(pair: Pair) -> None:
    git(pair.inside, "switch", "-qc", "ünder/way")
    side = commit(pair.inside, "side", side="1")
    git(pair.inside, "switch", "-q", "main")
    commit(pair.inside, "below", file="2")
    git(pair.inside, "switch", "-q", "--detach")
    loose = commit(pair.inside, "loose", file="3")
    found = pair.look()
    assert (found.ref, found.branch, found.head, found.others) == ("HEAD", None, loose, {"refs/heads/ünder/way": side})
    assert pair.fetch() == Fetched(NAME, None, loose, 2)
    assert pair.fetch("side", ref="refs/heads/ünder/way") == Fetched("side", None, side, 1)
    assert code_of(lambda: pair.fetch("main2", ref="refs/heads/none"), UsageError) == "no_commits"


def test_commits_on_a_branch_that_head_left_still_travel(pair: Pair) -> None:
    git(pair.inside, "switch", "-qc", "work")
    new = commit(pair.inside, file="3")
    git(pair.inside, "switch", "-q", "main")
    found = pair.look()
    assert (found.ref, found.branch, found.head, found.others) == ("refs/heads/work", "work", new, {})
    assert pair.fetch().new == new


def test_a_linked_worktree_and_its_repository(pair: Pair) -> None:
    pair.untouched = False
    tree = pair.place / "tree"
    git(pair.project, "worktree", "add", "-q", "-b", "tree", str(tree))
    commit(pair.inside, file="3")
    answer = pair.ask()
    new = answer.refs["HEAD"]
    assert fetch(str(tree), str(pair.bundle), answer, NAME) == Fetched(NAME, None, new, 1)
    assert pair.refs()[f"refs/heads/{NAME}"] == new
    data = checkout(str(tree), Fetched(NAME, None, new, 1), pair.base, str(pair.place / "journal"))
    assert (data.old_ref, git(tree, "symbolic-ref", "HEAD")) == ("refs/heads/tree", f"refs/heads/{NAME}")
    assert git(pair.project, "symbolic-ref", "HEAD") == "refs/heads/main"
    undo_checkout(str(pair.place / "journal"))
    assert (git(tree, "symbolic-ref", "HEAD"), git(tree, "status", "--porcelain")) == ("refs/heads/tree", "")


def test_a_shallow_clone_takes_commits(pair: Pair) -> None:
    shallow = pair.place / "shallow"
    git(pair.place, "clone", "-q", "--depth=1", f"file://{pair.project}", str(shallow))
    git(shallow, "switch", "-q", "--orphan", "own")
    commit(shallow, own="1")
    git(shallow, "branch", "-qD", "main")
    git(shallow, "remote", "remove", "origin")
    commit(pair.inside, file="3")
    assert fetch(str(shallow), str(pair.bundle), pair.ask(), NAME).count == 2
    assert git(shallow, "rev-list", "--count", NAME) == "2"


def test_a_repository_that_borrows_its_objects_takes_commits(pair: Pair) -> None:
    borrowing = pair.place / 'bor"rowing\n'
    git(pair.place, "clone", "-q", "--shared", str(pair.project), str(borrowing))
    commit(pair.inside, file="3")
    assert fetch(str(borrowing), str(pair.bundle), pair.ask(), NAME).count == 1
    git(borrowing, "fsck", "--strict")


def test_a_branch_that_somebody_makes_meanwhile_is_not_overwritten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(pair.inside, file="3")
    hand_over = Room.hand_over

    def slowly(room: Room) -> None:
        hand_over(room)
        git(pair.project, "branch", NAME)

    monkeypatch.setattr(Room, "hand_over", slowly)
    assert code_of(pair.fetch, Conflict) == "branch_exists"
    assert pair.refs()[f"refs/heads/{NAME}"] == pair.base


def test_objects_named_by_sha256(tmp_path: Path) -> None:
    project = tmp_path.resolve() / "project"
    git(tmp_path, "init", "-q", "--object-format=sha256", "project")
    commit(project, file="1")
    pair = Pair(tmp_path.resolve(), project)
    new = commit(pair.inside, file="2")
    assert len(new) == 64
    assert pair.look().count == 1
    assert pair.fetch() == Fetched(NAME, None, new, 1)
    other = tmp_path.resolve() / "other"
    git(tmp_path, "init", "-q", "other")
    assert code_of(lambda: fetch(str(other), str(pair.bundle), pair.ask(), NAME), Refused) == "bad_bundle"


def test_submodules_and_pointers_are_told(pair: Pair) -> None:
    git(pair.inside, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    git(pair.inside, "commit", "-qm", "one")
    middle = pair.head(pair.inside)
    git(pair.inside, "update-index", "--add", "--cacheinfo", f"160000,{'2' * 40},sub")
    git(pair.inside, "commit", "-qm", "two")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (pair.inside / "large").write_text(pointer)
    (pair.inside / "small").write_text("no pointer\n")
    git(pair.inside, "add", "large", "small")
    git(pair.inside, "commit", "-qm", "three")
    found = pair.look()
    assert [(one.path, one.old, one.new) for one in found.submodules] == [("sub", None, "2" * 40)]
    assert found.lfs == ["large"]
    later = look(str(pair.project), str(pair.bundle), pair.ask(), None)
    assert (later.lfs, len(later.submodules)) == (["large"], 1)
    assert pair.fetch().count == 3
    (one,) = look(str(pair.project), str(pair.bundle), pair.ask(), middle).submodules
    assert (one.old, one.new) == ("1" * 40, "2" * 40)


def test_a_project_that_is_no_repository_takes_no_commits(pair: Pair) -> None:
    commit(pair.inside, file="3")
    plain = pair.place / "plain"
    plain.mkdir()
    answer = pair.ask()
    assert code_of(lambda: fetch(str(plain), str(pair.bundle), answer, NAME), NotFound) == "no_repository"
    (plain / ".git").write_text(f"gitdir: {pair.project}/.git\n")
    assert code_of(lambda: fetch(str(plain), str(pair.bundle), answer, NAME), NotFound) == "no_repository"


def test_inside_something_that_is_no_repository(pair: Pair) -> None:
    shutil.rmtree(pair.inside / ".git")
    assert pair.ask() == Answer(None, None, {}, "no-repository")


def test_what_root_makes_in_a_strangers_repository_is_the_strangers() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make something that belongs to somebody else")
    with tempfile.TemporaryDirectory(prefix="elsewhere-test-", dir="/tmp") as name:
        os.chmod(name, 0o755)
        place = Path(name).resolve()
        project = place / "project"
        project.mkdir()
        git(project, "init", "-q")
        commit(project, file="1")
        pair = Pair(place, project)
        new = commit(pair.inside, file="2")
        for path in [project, *project.rglob("*")]:
            os.lchown(path, STRANGER, STRANGER)
        pair.fetch()
        checkout(str(project), Fetched(NAME, None, new, 1), pair.base, str(place / "journal"))
        undo_checkout(str(place / "journal"))
        assert {path.lstat().st_uid for path in project.rglob("*")} == {STRANGER}
        commit(pair.inside, file="3")
        for guarded in ("objects/pack", "refs/heads"):
            os.chown(project / ".git" / guarded, 0, 0)
            assert code_of(lambda: pair.fetch("other"), Conflict) == "not_permitted"
            os.chown(project / ".git" / guarded, STRANGER, STRANGER)
        assert "refs/heads/other" not in pair.refs()
        assert not list(place.glob("commits-*"))


# -- strangers ------------------------------------------------------------------------------------------------------------------


def armed(repository: Path, marker: Path) -> None:
    """Everything in a repository's configuration that runs something, once it is given the chance."""
    evil = repository / "evil"
    evil.write_text(f"#!/bin/sh\necho $0 $* >> {marker}\ncat\n")
    evil.chmod(0o755)
    hooks = repository / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in (
        "reference-transaction",
        "post-index-change",
        "post-checkout",
        "post-merge",
        "pre-auto-gc",
        "post-rewrite",
        "update",
    ):
        shutil.copy(evil, hooks / name)
    with (repository / "config").open("a") as stream:
        stream.write(
            f"""
[core]
    fsmonitor = {evil}
    hooksPath = {hooks}
    sshCommand = {evil}
    pager = {evil}
    editor = {evil}
    alternateRefsCommand = {evil}
    gitProxy = {evil}
[alias]
    rev-list = !{evil}
    fetch = !{evil}
    index-pack = !{evil}
[filter "evil"]
    clean = {evil}
    smudge = {evil}
    process = {evil}
    required = true
[diff]
    external = {evil}
[diff "evil"]
    textconv = {evil}
    command = {evil}
[merge "evil"]
    driver = {evil}
[credential]
    helper = {evil}
[protocol]
    allow = always
[protocol "ext"]
    allow = always
[url "ext::{evil} %S "]
    insteadOf = /
[gc]
    auto = 1
[fetch]
    recurseSubmodules = true
    fsckObjects = false
[transfer]
    fsckObjects = false
[uploadpack]
    packObjectsHook = {evil}
[gpg]
    program = {evil}
[log]
    showSignature = true
[extensions]
    partialClone = evil
[remote "evil"]
    url = ext::{evil}
    promisor = true
"""
        )
    (repository / "info").mkdir(exist_ok=True)
    (repository / "info" / "attributes").write_text("* filter=evil diff=evil merge=evil\n")


def test_nothing_of_realitys_configuration_runs(pair: Pair) -> None:
    pair.untouched = False
    marker = pair.place / "marker"
    new = commit(pair.inside, file="3")
    armed(pair.project / ".git", marker)
    answer = pair.ask()
    look(str(pair.project), str(pair.bundle), answer, "1" * 40)
    fetched = fetch(str(pair.project), str(pair.bundle), answer, NAME)
    assert fetched.new == new
    journal = str(pair.place / "journal")
    checkout(str(pair.project), fetched, pair.base, journal)
    undo_checkout(journal)
    git(pair.inside, "commit", "-q", "--amend", "-m", "x2")
    assert code_of(pair.fetch, Conflict) == "branch_exists"
    assert not marker.exists(), marker.read_text()
    git(pair.project, "update-ref", "refs/heads/proof", new)
    assert "reference-transaction" in marker.read_text()


def test_nothing_of_a_sandboxs_repository_runs_outside(pair: Pair) -> None:
    """What its configuration does inside is the sandbox's own problem: the marker counts from when the answer is there."""
    pair.untouched = False
    marker = pair.place / "marker"
    commit(pair.inside, **{".gitattributes": "* filter=evil diff=evil merge=evil\n"})
    armed(pair.inside / ".git", marker)
    (pair.inside / ".git/objects/info/alternates").write_text("/nonexistent\n")
    answer = pair.ask()
    marker.unlink(missing_ok=True)
    look(str(pair.project), str(pair.bundle), answer, pair.base)
    fetched = fetch(str(pair.project), str(pair.bundle), answer, NAME)
    checkout(str(pair.project), fetched, pair.base, str(pair.place / "journal"))
    assert not marker.exists(), marker.read_text()


def crafted(pair: Pair, tree: str) -> None:
    new = git(pair.inside, "commit-tree", "-p", "HEAD", "-m", "crafted", tree)
    git(pair.inside, "update-ref", "HEAD", new)


def raw_tree(where: Path, *entries: tuple[str, str, str]) -> str:
    """Written as it is: git itself would refuse some."""
    content = b"".join(f"{mode} {name}\0".encode() + bytes.fromhex(sha) for mode, name, sha in entries)
    return git(where, "hash-object", "-t", "tree", "-w", "--literally", "--stdin", source=content)


def refused(pair: Pair, action: Callable[[], object] | None = None) -> str:
    before, packs = pair.refs(), list(os.listdir(pair.project / ".git/objects/pack"))
    with pytest.raises(Refused) as caught:
        (action or pair.fetch)()
    assert (caught.value.code, pair.refs()) == ("bad_bundle", before)
    assert list(os.listdir(pair.project / ".git/objects/pack")) == packs
    return caught.value.message


@pytest.mark.parametrize("name", [".git", ".GIT", "git~1", "..", ".", ".gi\u200ct"])
def test_a_tree_with_names_that_are_gits_own_is_refused(pair: Pair, name: str) -> None:
    blob = git(pair.inside, "hash-object", "-w", "--stdin", source=b"[core]\nfsmonitor = evil\n")
    below = raw_tree(pair.inside, ("100644", "config", blob))
    crafted(pair, raw_tree(pair.inside, ("40000", name, below)))
    refused(pair)


@pytest.mark.parametrize(
    "text",
    [
        '[submodule "x"]\n\tpath = x\n\turl = --upload-pack=evil\n',
        '[submodule "x"]\n\tpath = -x\n\turl = u\n',
        '[submodule "../../x"]\n\tpath = x\n\turl = u\n',
        '[submodule "x"]\n\tpath = x\n\turl = u\n\tupdate = !evil\n',
    ],
)
def test_modules_with_options_for_addresses_are_refused(pair: Pair, text: str) -> None:
    commit(pair.inside, **{".gitmodules": text})
    refused(pair)


def test_modules_behind_a_link_are_refused(pair: Pair) -> None:
    blob = git(pair.inside, "hash-object", "-w", "--stdin", source=b"/etc/passwd")
    crafted(pair, raw_tree(pair.inside, ("120000", ".gitmodules", blob)))
    refused(pair)


def test_commits_that_are_none_are_refused(pair: Pair) -> None:
    tree = git(pair.inside, "rev-parse", "HEAD^{tree}")
    bad = f"tree {tree}\nparent {pair.base}\nauthor nobody\ncommitter x <x> 1 +0000\n\nx\n".encode()
    new = git(pair.inside, "hash-object", "-t", "commit", "-w", "--literally", "--stdin", source=bad)
    git(pair.inside, "update-ref", "HEAD", new)
    refused(pair)


def test_a_bundle_without_all_of_its_objects_is_refused(pair: Pair) -> None:
    new = commit(pair.inside, file="three", other="content")
    answer = pair.ask()
    pack = subprocess.run(
        ["git", "pack-objects", "--stdout", "-q"], input=f"{new}\n".encode(), cwd=pair.inside, capture_output=True, check=True
    ).stdout
    header = f"# v2 git bundle\n-{pair.base} x\n{new} HEAD\n{new} refs/heads/main\n\n"
    pair.bundle.write_bytes(header.encode() + pack)
    refused(pair, lambda: fetch(str(pair.project), str(pair.bundle), answer, NAME))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"no bundle at all",
        lambda content: content[:-30],
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"PACK", b"KCAP"),
        lambda content: content[:-21] + bytes([content[-21] ^ 1]) + content[-20:],
        lambda content: content.replace(b"# v2 git bundle\n", b"# v3 git bundle\n@filter=blob:none\n"),
        lambda content: content.replace(b"# v2 git bundle\n", b"# v9 git bundle\n"),
        lambda content: content.replace(b"\n\n", b"\n" + b"1" * 40 + b" refs/heads/extra\n\n", 1),
        lambda content: content.replace(b" refs/heads/main\n", b" refs/tags/main\n"),
        lambda content: content.replace(b" HEAD\n", b" HEAD\n\x1b[2J\n"),
        lambda content: b"# v2 git bundle\n" + b"x" * (2 << 20),
    ],
)
def test_a_damaged_bundle_is_refused(pair: Pair, damage: Callable[[bytes], bytes]) -> None:
    commit(pair.inside, file="three")
    answer = pair.ask()
    pair.bundle.write_bytes(damage(pair.bundle.read_bytes()))
    assert "\x1b" not in refused(pair, lambda: fetch(str(pair.project), str(pair.bundle), answer, NAME))
    refused(pair, lambda: look(str(pair.project), str(pair.bundle), answer, pair.base))


def test_a_bundle_that_is_too_large_or_no_file_is_refused(pair: Pair) -> None:
    commit(pair.inside, file="three")
    assert "bytes" in refused(pair, lambda: pair.fetch(largest=100))
    answer = pair.ask()
    pair.bundle.rename(pair.place / "target")
    pair.bundle.symlink_to(pair.place / "target")
    refused(pair, lambda: fetch(str(pair.project), str(pair.bundle), answer, NAME))
    pair.bundle.unlink()
    os.mkfifo(pair.bundle)
    refused(pair, lambda: fetch(str(pair.project), str(pair.bundle), answer, NAME))


def test_an_answer_that_names_other_commits_is_refused(pair: Pair) -> None:
    commit(pair.inside, file="three")
    answer = pair.ask()
    for refs in ({"HEAD": "1" * 40}, {**answer.refs, "refs/heads/x": str(pair.base)}, {"HEAD": str(pair.base)}):
        lying = Answer(answer.head, answer.branch, refs)
        refused(pair, lambda lying=lying: fetch(str(pair.project), str(pair.bundle), lying, NAME))  # type: ignore[misc]
    old = pair.bundle.read_bytes().replace(f"{answer.head} ".encode(), f"{'1' * 40} ".encode())
    pair.bundle.write_bytes(old)
    lying = Answer("1" * 40, "main", dict.fromkeys(answer.refs, "1" * 40))
    refused(pair, lambda: fetch(str(pair.project), str(pair.bundle), lying, NAME))
    blob = git(pair.project, "hash-object", "-w", "--stdin", source=b"no commit")
    pair.bundle.write_bytes(old.replace(b"1" * 40, blob.encode()))
    lying = Answer(blob, "main", dict.fromkeys(answer.refs, blob))
    refused(pair, lambda: fetch(str(pair.project), str(pair.bundle), lying, NAME))


SHA = b"a" * 40


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"HEAD refs/heads/main " + SHA,
        b"HEAD refs/heads/main short\nnone",
        b"HEAD refs/heads/main " + SHA.upper() + b"\nnone",
        b"HEAD ../../etc " + SHA + b"\nnone",
        b"HEAD refs/heads/-x..y " + SHA + b"\nnone",
        b"HEAD detached " + SHA + b"\nref refs/tags/x " + SHA + b"\nbundle",
        b"HEAD detached " + SHA + b"\nref refs/heads/a:b " + SHA + b"\nbundle",
        b"HEAD detached " + SHA + b"\nref refs/heads/\x1b[31m " + SHA + b"\nbundle",
        b"HEAD detached " + SHA + b"\nref refs/heads/\xff " + SHA + b"\nbundle",
        b"HEAD detached " + SHA + b"\nref HEAD " + b"b" * 40 + b"\nbundle",
        b"HEAD detached " + SHA + b"\nref HEAD " + SHA + b"\nref HEAD " + SHA + b"\nbundle",
        b"HEAD detached " + SHA + b"\nref HEAD " + SHA + b"\nnone",
        b"HEAD detached " + SHA + b"\nbundle",
        b"HEAD detached " + SHA + b"\nfailed",
        b"HEAD detached " + SHA + b"\nref refs/heads/" + b"x" * 2000 + b" " + SHA + b"\nbundle",
        b"none of that",
        b"x" * (2 << 20),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(body: bytes) -> None:
    assert code_of(lambda: read_answer(b"elsewhere-commits 1\n" + body + b"\nend\n"), Refused) == "bad_answer"


def test_an_answer_that_was_cut_off_is_refused(pair: Pair) -> None:
    commit(pair.inside, file="3")
    said = pair.said()
    assert read_answer(said).made
    for length in range(len(said)):
        with pytest.raises(Refused):
            read_answer(said[:length])


def test_only_full_names_of_commits_go_inside() -> None:
    assert code_of(lambda: inside_script("HEAD; evil", "/b"), UsageError) == "bad_commit"
    many = {f"refs/heads/{number}": hashlib.sha1(str(number).encode()).hexdigest() for number in range(5000)}
    assert sum(map(len, inside_script("a" * 40, "/b", many))) < 100_000


# -- HEAD and index -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def arrived(pair: Pair) -> tuple[Pair, Fetched, str]:
    pair.untouched = False
    commit(pair.project, "own", **{name: name for name in ("kept", "gone", "changed")})
    shutil.rmtree(pair.inside)
    again = Pair(pair.place, pair.project)
    (again.inside / "gone").unlink()
    commit(again.inside, changed="inside", added="inside")
    fetched = again.fetch()
    return again, fetched, str(pair.place / "journal")


def state_of(pair: Pair) -> tuple[str, str, str]:
    head = (pair.project / ".git/HEAD").read_text()
    return head, git(pair.project, "ls-files", "-s"), git(pair.project, "rev-parse", "--verify", "-q", "HEAD")


def test_a_checkout_moves_head_and_index_only_and_returns(arrived: tuple[Pair, Fetched, str]) -> None:
    pair, fetched, journal = arrived
    os.utime(pair.project / ".git/index", ns=(10**18 + 1, 10**18 + 1))
    index, before = (pair.project / ".git/index").read_bytes(), state_of(pair)
    (pair.project / "changed").write_text("mine, not staged")
    data = checkout(str(pair.project), fetched, pair.base, journal)
    assert (data.state, data.old_ref, data.old) == ("moved", "refs/heads/main", pair.base)
    assert git(pair.project, "symbolic-ref", "HEAD") == f"refs/heads/{NAME}"
    assert git(pair.project, "write-tree") == git(pair.project, "rev-parse", f"{NAME}^{{tree}}")
    assert sorted(os.listdir(pair.project)) == [".git", "changed", "file", "gone", "kept"]
    assert git(pair.project, "status", "--porcelain").splitlines() == ["D added", " M changed", "?? gone"]
    assert not list((pair.project / ".git").glob("*.lock")) + list((pair.project / ".git").glob("*.elsewhere"))
    assert undo_checkout(journal).state == "returned"
    assert ((pair.project / ".git/index").read_bytes(), state_of(pair)) == (index, before)
    assert (pair.project / ".git/index").stat().st_mtime_ns == 10**18 + 1
    assert undo_checkout(journal).state == "returned"
    assert pair.refs()[f"refs/heads/{NAME}"] == fetched.new


def test_what_git_knew_of_unchanged_files_is_kept(arrived: tuple[Pair, Fetched, str]) -> None:
    pair, fetched, journal = arrived
    git(pair.project, "status")
    checkout(str(pair.project), fetched, pair.base, journal)
    said = git(pair.project, "ls-files", "--debug", "kept")
    assert f"ino: {(pair.project / 'kept').stat().st_ino}" in said


def test_an_edit_that_only_the_time_of_the_index_gives_away_stays_visible(arrived: tuple[Pair, Fetched, str]) -> None:
    pair, fetched, journal = arrived
    moment, kept, index = (10**18, 10**18), pair.project / "kept", pair.project / ".git/index"
    git(pair.project, "config", "core.trustctime", "false")
    git(pair.project, "config", "core.checkStat", "minimal")
    os.utime(kept, ns=moment)
    git(pair.project, "update-index", "-q", "--refresh")
    kept.write_text("tpek")
    os.utime(kept, ns=moment)
    os.utime(index, ns=moment)
    checkout(str(pair.project), fetched, pair.base, journal)
    assert "kept" in git(pair.project, "diff-files", "--name-only").splitlines()
    undo_checkout(journal)
    assert "kept" in git(pair.project, "diff-files", "--name-only").splitlines()


def test_a_checkout_from_a_detached_head_and_from_nothing(tmp_path: Path, project: Path) -> None:
    pair = Pair(tmp_path.resolve(), project)
    commit(pair.inside, file="1")
    fetched = pair.fetch()
    first = tmp_path / "first"
    assert not (project / ".git/index").exists()
    checkout(str(project), fetched, None, str(first))
    assert git(project, "ls-files") == "file"
    undo_checkout(str(first))
    assert not (project / ".git/index").exists()
    assert (project / ".git/HEAD").read_text() == "ref: refs/heads/main\n"
    git(project, "checkout", "-q", "--detach", fetched.new)
    pair.base = fetched.new
    commit(pair.inside, file="2")
    second = pair.fetch("other")
    checkout(str(project), second, fetched.new, str(tmp_path / "second"))
    assert git(project, "symbolic-ref", "--short", "HEAD") == "other"
    undo_checkout(str(tmp_path / "second"))
    assert (project / ".git/HEAD").read_text() == f"{fetched.new}\n"
    assert git(project, "status", "--porcelain") == ""


def test_a_checkout_is_refused_where_it_would_lose_something(arrived: tuple[Pair, Fetched, str]) -> None:
    pair, fetched, journal = arrived
    before = state_of(pair)

    def refusal() -> str:
        code = code_of(lambda: checkout(str(pair.project), fetched, pair.base, journal), Conflict)
        assert not os.path.exists(journal)
        return code

    for name in ("MERGE_HEAD", "rebase-merge", "index.lock"):
        (pair.project / ".git" / name).touch()
        assert refusal() == "repository_busy"
        (pair.project / ".git" / name).unlink()
    (pair.project / "kept").write_text("staged")
    git(pair.project, "add", "kept")
    assert refusal() == "index_not_clean"
    git(pair.project, "reset", "-q", "--hard")
    git(pair.project, "worktree", "add", "-q", str(pair.place / "tree"), NAME)
    assert refusal() == "branch_checked_out"
    git(pair.project, "worktree", "remove", str(pair.place / "tree"))
    assert state_of(pair) == before
    commit(pair.project, "own", own="1")
    assert refusal() == "head_moved"


def test_a_return_is_refused_once_the_user_went_on(arrived: tuple[Pair, Fetched, str]) -> None:
    pair, fetched, journal = arrived
    checkout(str(pair.project), fetched, pair.base, journal)
    git(pair.project, "status")
    (pair.project / "kept").write_text("staged")
    git(pair.project, "add", "kept")
    assert code_of(lambda: undo_checkout(journal), Conflict) == "index_not_clean"
    git(pair.project, "commit", "-qm", "own")
    before = state_of(pair)
    assert code_of(lambda: undo_checkout(journal), Conflict) == "head_moved"
    assert (state_of(pair), checkout_state(journal)) == (before, "moved")


@pytest.mark.parametrize("undoing", [False, True])
def test_a_branch_that_the_user_switches_to_at_the_last_moment_stays(
    arrived: tuple[Pair, Fetched, str], monkeypatch: pytest.MonkeyPatch, undoing: bool
) -> None:
    """To one at the same commit, for which git need not write the index."""
    pair, fetched, journal = arrived
    if undoing:
        checkout(str(pair.project), fetched, pair.base, journal)
    index, take = (pair.project / ".git/index").read_bytes(), heads._take_lock

    def switched(*values: Any) -> None:
        git(pair.project, "branch", "other")
        git(pair.project, "symbolic-ref", "HEAD", "refs/heads/other")
        take(*values)

    with monkeypatch.context() as patched:
        patched.setattr(heads, "_take_lock", switched)
        begin = (
            functools.partial(undo_checkout, journal)
            if undoing
            else functools.partial(checkout, str(pair.project), fetched, pair.base, journal)
        )
        assert code_of(begin, Conflict) == "head_moved"
    assert git(pair.project, "symbolic-ref", "HEAD") == "refs/heads/other"
    assert recover_checkout(journal, finish=False) == "left"
    assert (git(pair.project, "symbolic-ref", "HEAD"), (pair.project / ".git/index").read_bytes()) == ("refs/heads/other", index)
    assert not (pair.project / ".git/index.lock").exists()


STEPS = ("link", "rename", "unlink", "fsync")


def killed_at(number: int, action: Callable[[], object]) -> bool:
    """Run it in a process that dies at its n-th step; whether it got that far."""
    child = os.fork()
    if child == 0:
        passed = 0

        def stepping(real: Callable[..., object]) -> Callable[..., object]:
            def step(*values: object, **more: object) -> object:
                nonlocal passed
                passed += 1
                if passed == number:
                    os._exit(9)
                return real(*values, **more)

            return step

        for name in STEPS:
            setattr(os, name, stepping(getattr(os, name)))
        heads._set_head = stepping(heads._set_head)  # type: ignore[assignment]
        heads._note = stepping(heads._note)  # type: ignore[assignment]
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("finish", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("undoing", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_killed_at_any_step_it_is_finished_or_reversed(arrived: tuple[Pair, Fetched, str], finish: bool, undoing: bool) -> None:
    pair, fetched, journal = arrived
    project = str(pair.project)
    begun = state_of(pair)
    checkout(project, fetched, pair.base, journal)
    moved = state_of(pair)
    undo_checkout(journal)
    outcomes = set()
    for number in itertools.count(1):
        place = f"{journal}{number}"
        begin = functools.partial(checkout, project, fetched, pair.base, place)
        recover = functools.partial(recover_checkout, place, finish=finish)
        if undoing:
            begin()
        died = killed_at(number, functools.partial(undo_checkout, place) if undoing else begin)
        for repeat in itertools.count(1):
            if not killed_at(repeat, recover):
                break
        state = recover()
        outcomes.add(state)
        assert state_of(pair) == (moved if state == "moved" else begun)
        assert not [name for name in os.listdir(pair.project / ".git") if "lock" in name or "elsewhere" in name]
        if state == "moved":
            undo_checkout(place)
        assert state_of(pair) == begun
        if not died:
            break
    assert number > 10
    assert ("moved" if finish else "returned") in outcomes


def test_what_git_notes_in_passing_does_not_keep_it_from_being_reversed(arrived: tuple[Pair, Fetched, str]) -> None:
    pair, fetched, journal = arrived
    before = state_of(pair)
    checkout(str(pair.project), fetched, pair.base, journal)
    note, index = Path(journal) / "checkout.json", pair.project / ".git/index"
    note.write_text(note.read_text().replace('"moved"', '"moving"'))
    made = index.read_bytes()
    os.utime(pair.project / "kept", (1, 1))
    git(pair.project, "status")
    assert index.read_bytes() != made
    assert recover_checkout(journal, finish=False) == "returned"
    assert state_of(pair) == before


def test_a_foreign_lock_is_not_taken_for_ours(arrived: tuple[Pair, Fetched, str]) -> None:
    pair, fetched, journal = arrived
    before = state_of(pair)
    lock = pair.project / ".git/index.lock"
    assert killed_at(12, lambda: checkout(str(pair.project), fetched, pair.base, journal))
    recover_checkout(journal, finish=False)
    (Path(journal) / "checkout.json").write_text((Path(journal) / "checkout.json").read_text().replace("returned", "moving"))
    lock.touch()
    assert code_of(lambda: recover_checkout(journal, finish=True), Conflict) == "repository_busy"
    assert lock.exists()
    lock.unlink()
    commit(pair.project, "own", own="1")
    mine = state_of(pair)
    assert recover_checkout(journal, finish=True) == "left"
    assert state_of(pair) == mine != before
