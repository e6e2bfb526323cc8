"""A commit becomes a tree as `git clone` would make it, and reality's .git is byte for byte what it was."""

import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elsewhere.errors import ElsewhereError, NotFound, StateError, Unavailable, UsageError
from elsewhere.storage import checkouts
from elsewhere.storage.bases import capture
from elsewhere.storage.checkouts import checkout, git_places, prune_commits, resolve
from elsewhere.storage.rooms import room_for
from elsewhere.storage.state import State

if not shutil.which("git"):
    pytest.skip("git is not installed", allow_module_level=True)

SHIFT = 1 << 30
PEOPLE = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_DATE": "1600000000 +0000",
    "GIT_COMMITTER_DATE": "1600000000 +0000",
}


def git(where: Path, *words: str, **more: str) -> str:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-c", "protocol.file.allow=always", *words],
        cwd=where,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **PEOPLE, **more},
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return done.stdout.strip()


def commit(where: Path, **files: str) -> str:
    for name, text in files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text)
    git(where, "add", "-A")
    git(where, "commit", "--allow-empty", "-qm", "x")
    return git(where, "rev-parse", "HEAD")


def fingerprint(*places: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for place in places:
        for path in [place, *place.rglob("*")]:
            about = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
            found[str(path)] = (about.st_mode, about.st_uid, about.st_ino, about.st_mtime_ns, about.st_ctime_ns, content)
    return found


@pytest.fixture
def state(place: Path) -> State:
    return State.open(str(place / "state"))


@pytest.fixture
def project(place: Path) -> Path:
    made = place / "project"
    made.mkdir()
    git(made, "init", "-qb", "main")
    return made


@pytest.fixture
def untouched(project: Path, place: Path) -> Iterator[list[Path]]:
    """Put repositories in here when they are as they shall stay."""
    watched: list[Path] = []
    before: dict[str, tuple[object, ...]] = {}

    class Watch(list[Path]):
        def append(self, path: Path) -> None:
            super().append(path)
            before.update(fingerprint(path))

    watched = Watch()
    yield watched
    assert watched, "nothing was watched"
    assert fingerprint(*watched) == before


def as_inside(project: Path, made: checkouts.Checkout, place: Path) -> str:
    """What `git status` says in the tree with its index, with a copy of reality's repository at that commit."""
    copy = place / "inside.git"
    shutil.copytree(git_places(str(project))[1], copy, symlinks=True)  # type: ignore[index]
    shutil.copyfile(made.index, copy / "index")
    shutil.copyfile(made.head, copy / "HEAD")
    where = {"GIT_DIR": str(copy), "GIT_WORK_TREE": made.tree}
    return git(Path(made.tree), "status", "--porcelain", "--ignored", **where)


def test_every_way_to_name_a_commit_is_understood(project: Path, untouched: list[Path]) -> None:
    shas = [commit(project, file=str(number)) for number in range(5)]
    git(project, "branch", "topic/x", shas[1])
    git(project, "tag", "light", shas[2])
    git(project, "tag", "-am", "note", "heavy", shas[3])
    git(project, "update-ref", "refs/remotes/origin/main", shas[0])
    untouched.append(project)
    for ref, expected in {
        shas[0]: 0,
        shas[0].upper(): 0,
        shas[1][:8]: 1,
        "main": 4,
        "topic/x": 1,
        "refs/heads/topic/x": 1,
        "light": 2,
        "heavy": 3,
        "HEAD": 4,
        "HEAD~3": 1,
        "main^": 3,
        "@": 4,
        "origin/main": 0,
        "HEAD@{1}": 3,
    }.items():
        assert resolve(str(project), ref) == shas[expected], ref


@pytest.mark.parametrize(
    "ref",
    [
        "missing",
        "",
        "-h",
        "--all",
        "0" * 40,
        "deadbeef",
        "HEAD~99",
        "main:file",
        "a..b",
        "main\nmain",
        "\0",
        "x y",
        "\udcff",
        "@{u}",
    ],
    ids=ascii,
)
def test_what_names_no_commit_is_unknown(project: Path, untouched: list[Path], ref: str) -> None:
    commit(project, file="x")
    untouched.append(project)
    with pytest.raises(NotFound) as caught:
        resolve(str(project), ref)
    assert caught.value.code == "base_ref_unknown"
    assert caught.value.hint


def test_a_repository_without_commits_knows_none(project: Path, untouched: list[Path]) -> None:
    untouched.append(project)
    for ref in ("HEAD", "main"):
        with pytest.raises(NotFound) as caught:
            resolve(str(project), ref)
        assert caught.value.code == "base_ref_unknown"


def test_a_branch_and_a_tag_of_one_name_are_ambiguous_unless_they_agree(project: Path, untouched: list[Path]) -> None:
    first, second = commit(project, file="1"), commit(project, file="2")
    git(project, "branch", "both", first)
    git(project, "tag", "both", second)
    git(project, "branch", "same", first)
    git(project, "tag", "same", first)
    untouched.append(project)
    with pytest.raises(UsageError) as caught:
        resolve(str(project), "both")
    assert caught.value.code == "base_ref_ambiguous"
    assert caught.value.detail["candidates"] == ["refs/tags/both", "refs/heads/both"]
    assert first[:12] in caught.value.message
    with pytest.raises(UsageError):
        resolve(str(project), "both~0")
    assert resolve(str(project), "refs/heads/both") == first
    assert resolve(str(project), "same") == first


def test_a_short_name_of_two_commits_is_ambiguous_and_says_which(project: Path, untouched: list[Path]) -> None:
    seen: dict[str, str] = {}
    commit(project, file="x")
    stream = "".join(f"commit refs/heads/n{number}\ncommitter a <a@b> {number} +0000\ndata 1\nx\n\n" for number in range(1, 1200))
    subprocess.run(["git", "fast-import", "--quiet"], cwd=project, input=stream, encoding="ascii", check=True)
    pair = None
    for sha in git(project, "for-each-ref", "--format=%(objectname)", "refs/heads/n*").split():
        if sha[:4] in seen:
            pair = (sha, seen[sha[:4]])
            break
        seen[sha[:4]] = sha
    assert pair
    untouched.append(project)
    with pytest.raises(UsageError) as caught:
        resolve(str(project), pair[0][:4])
    assert caught.value.code == "base_ref_ambiguous"
    assert set(pair) <= set(caught.value.detail["candidates"])  # type: ignore[call-overload]


def test_a_directory_that_is_no_repository_is_refused(state: State, place: Path) -> None:
    (place / "plain").mkdir()
    for wrong in ("", "gitdir: /nowhere", "nonsense"):
        (place / "plain/.git").write_text(wrong)
        assert git_places(str(place / "plain")) is None
        with pytest.raises(UsageError) as caught:
            resolve(str(place / "plain"), "HEAD")
        assert caught.value.code == "base_ref_without_git"
        with pytest.raises(UsageError):
            checkout(state, str(place / "plain"), "0" * 40)


def test_a_checkout_is_the_whole_commit_and_status_is_clean(
    state: State, project: Path, place: Path, untouched: list[Path]
) -> None:
    (project / "run").write_text("#!/bin/sh\n")
    (project / "run").chmod(0o755)
    (project / "link").symlink_to("nowhere")
    (project / "odd\nname").write_text("x")
    (project / os.fsdecode(b"\xff")).write_text("y")
    sha = commit(project, **{"a/b/c": "deep", ".gitignore": "*.o\n"})
    commit(project, **{"a/b/c": "changed", "later": "x"})
    (project / "dirty").write_text("not committed")
    untouched.append(project)
    made = checkout(state, str(project), sha)
    tree = Path(made.tree)
    assert sorted(os.listdir(tree)) == sorted([".git", "run", "link", "odd\nname", os.fsdecode(b"\xff"), "a", ".gitignore"])
    assert (tree / "a/b/c").read_text() == "deep"
    assert os.readlink(tree / "link") == "nowhere"
    assert stat.S_IMODE((tree / "run").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "a/b/c").stat().st_mode) == 0o644
    assert stat.S_IMODE(tree.stat().st_mode) == stat.S_IMODE(project.stat().st_mode)
    assert {path.lstat().st_mtime for path in tree.rglob("*")} == {1600000000.0}
    assert sorted(os.listdir(tree.parent)) == ["HEAD", "index", "tree"]
    assert as_inside(project, made, place) == ""


def test_git_inside_need_not_read_a_file_to_know_that_it_is_unchanged(
    state: State, project: Path, place: Path, untouched: list[Path]
) -> None:
    sha = commit(project, file="same size")
    untouched.append(project)
    made = checkout(state, str(project), sha)
    git(project, "ls-files", "--debug", GIT_INDEX_FILE=made.index)
    about = (Path(made.tree) / "file").stat()
    text = git(project, "ls-files", "--debug", GIT_INDEX_FILE=made.index)
    assert f"ino: {about.st_ino & 0xFFFFFFFF}" in text
    assert f"size: {about.st_size}" in text
    assert f"ctime: {about.st_ctime_ns // 10**9}:{about.st_ctime_ns % 10**9}" in text


def test_the_second_checkout_makes_nothing(
    state: State, project: Path, untouched: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = commit(project, file="x")
    untouched.append(project)
    first = checkout(state, str(project), sha)
    monkeypatch.setattr(checkouts, "_run", None)
    second = checkout(state, str(project), sha)
    assert (first.made, second.made) == (True, False)
    assert (second.tree, second.index) == (first.tree, first.index)


def test_owners_are_those_of_the_project_and_shifted(state: State, project: Path, untouched: list[Path]) -> None:
    if os.geteuid() != 0:
        untouched.append(project)
        pytest.skip("only root can give files away")
    sha = commit(project, **{"a/file": "x"})
    for path in [project, *project.rglob("*")]:
        os.chown(path, 1234, 5678, follow_symlinks=False)
    untouched.append(project)
    for shift in (0, SHIFT):
        made = checkout(state, str(project), sha, shift=shift)
        for path in (made.tree, f"{made.tree}/a", f"{made.tree}/a/file", made.index, made.head):
            assert (os.lstat(path).st_uid, os.lstat(path).st_gid) == (1234 + shift, 5678 + shift)
        text = git(project, "ls-files", "--debug", GIT_INDEX_FILE=made.index)
        assert "uid: 1234\tgid: 5678" in text  # as a sandbox sees them


def test_nothing_that_a_repository_configures_is_run(state: State, project: Path, place: Path, untouched: list[Path]) -> None:
    trap = place / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {place}/sprung\ncat\n")
    trap.chmod(0o755)
    sha = commit(
        project, **{".gitattributes": "* filter=evil diff=evil\n*.bin filter=lfs\n", "file": "x", "a.bin": "version lfs\n"}
    )
    for name, value in {
        "filter.evil.smudge": str(trap),
        "filter.evil.clean": str(trap),
        "filter.evil.process": str(trap),
        "filter.evil.required": "true",
        "filter.lfs.smudge": str(trap),
        "filter.lfs.required": "true",
        "core.fsmonitor": str(trap),
        "core.pager": str(trap),
        "core.editor": str(trap),
        "core.sshCommand": str(trap),
        "diff.evil.textconv": str(trap),
        "diff.external": str(trap),
        "core.askPass": str(trap),
        "credential.helper": str(trap),
        "gpg.program": str(trap),
        "log.showSignature": "true",
        "core.hooksPath": str(place / "hooks"),
        "core.worktree": str(place),
        "alias.rev-parse": f"!{trap}",
        "core.autocrlf": "false",
    }.items():
        git(project, "config", name, value)
    (place / "hooks").mkdir()
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        shutil.copy(trap, place / "hooks" / hook)
        shutil.copy(trap, project / ".git/hooks" / hook)
    untouched.append(project)
    assert resolve(str(project), "HEAD") == sha
    made = checkout(state, str(project), sha)
    assert (Path(made.tree) / "file").read_text() == "x"
    assert (Path(made.tree) / "a.bin").read_text() == "version lfs\n"
    assert not (place / "sprung").exists()


def test_the_callers_environment_does_not_lead_git_elsewhere(
    state: State, project: Path, place: Path, untouched: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = commit(project, file="x")
    untouched.append(project)
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE", "GIT_TRACE"):
        monkeypatch.setenv(name, str(place / "wrong"))
    assert resolve(str(project), "HEAD") == sha
    assert sorted(os.listdir(checkout(state, str(project), sha).tree)) == [".git", "file"]
    assert not (place / "wrong").exists()


def test_an_old_commit_of_a_packed_repository_works(state: State, project: Path, place: Path, untouched: list[Path]) -> None:
    stream = "".join(
        f"commit refs/heads/main\ncommitter a <a@b> {1600000000 + number} +0000\ndata 1\nx\n"
        f"M 644 inline file\ndata {len(str(number))}\n{number}\n\n"
        for number in range(205)
    )
    subprocess.run(["git", "fast-import", "--quiet"], cwd=project, input=stream, encoding="ascii", check=True)
    git(project, "gc", "-q")
    untouched.append(project)
    made = checkout(state, str(project), resolve(str(project), "main~200"))
    assert (Path(made.tree) / "file").read_text() == "4"
    assert as_inside(project, made, place) == ""


def test_a_linked_worktree_works(state: State, project: Path, place: Path, untouched: list[Path]) -> None:
    first = commit(project, file="1")
    git(project, "worktree", "add", "-qb", "side", str(place / "side"))
    second = commit(place / "side", file="2")
    for path in (project, place / "side"):
        untouched.append(path)
    side = str(place / "side")
    assert git_places(side) == (str(project / ".git/worktrees/side"), str(project / ".git"))
    assert git_places(str(project)) == (str(project / ".git"), str(project / ".git"))
    assert (resolve(side, "HEAD"), resolve(str(project), "HEAD")) == (second, first)
    made = checkout(state, side, second)
    assert (Path(made.tree) / "file").read_text() == "2"
    assert as_inside(place / "side", made, place) == ""


def test_borrowed_objects_are_found(state: State, project: Path, place: Path, untouched: list[Path]) -> None:
    sha = commit(project, file="x")
    odd = place / 'odd ": \n名'
    git(place, "clone", "-q", "--shared", str(project), str(odd))
    for path in (project, odd):
        untouched.append(path)
    made = checkout(state, str(odd), resolve(str(odd), "HEAD"))
    assert made.sha == sha
    assert sorted(os.listdir(made.tree)) == [".git", "file"]


def test_submodules_are_empty_directories(state: State, project: Path, place: Path, untouched: list[Path]) -> None:
    (place / "module").mkdir()
    git(place / "module", "init", "-qb", "main")
    commit(place / "module", inside="x")
    git(project, "submodule", "--quiet", "add", str(place / "module"), "module")
    sha = commit(project, file="x")
    untouched.append(project)
    made = checkout(state, str(project), sha)
    assert list((Path(made.tree) / "module").iterdir()) == []
    assert as_inside(project, made, place) == ""


def test_a_sparse_checkout_gives_the_whole_tree(state: State, project: Path, place: Path, untouched: list[Path]) -> None:
    sha = commit(project, **{"a/x": "1", "b/y": "2"})
    git(project, "sparse-checkout", "set", "a")
    assert not (project / "b").exists()
    untouched.append(project)
    made = checkout(state, str(project), sha)
    assert sorted(os.listdir(made.tree)) == [".git", "a", "b"]


def test_line_ends_are_those_that_the_repository_asks_for(
    state: State, project: Path, place: Path, untouched: list[Path]
) -> None:
    sha = commit(project, **{".gitattributes": "*.bat text eol=crlf\n", "x.bat": "one\ntwo\n", "x.sh": "one\n"})
    (project / ".git/info/attributes").write_text("*.sh text eol=crlf\n")
    untouched.append(project)
    made = checkout(state, str(project), sha)
    assert (Path(made.tree) / "x.bat").read_bytes() == b"one\r\ntwo\r\n"
    assert (Path(made.tree) / "x.sh").read_bytes() == b"one\r\n"
    assert as_inside(project, made, place) == ""


def test_a_repository_with_longer_names_works(state: State, place: Path, untouched: list[Path]) -> None:
    (place / "long").mkdir()
    git(place / "long", "init", "-qb", "main", "--object-format=sha256")
    sha = commit(place / "long", file="x")
    untouched.append(place / "long")
    assert len(resolve(str(place / "long"), "HEAD")) == 64
    made = checkout(state, str(place / "long"), sha)
    assert as_inside(place / "long", made, place) == ""


def test_an_empty_commit_gives_an_empty_tree(state: State, project: Path, untouched: list[Path]) -> None:
    sha = commit(project)
    untouched.append(project)
    assert os.listdir(checkout(state, str(project), sha).tree) == [".git"]


def test_missing_objects_are_said_clearly_and_nothing_is_fetched(
    state: State, project: Path, place: Path, untouched: list[Path]
) -> None:
    sha = commit(project, file="x")
    git(project, "config", "uploadpack.allowFilter", "true")
    git(place, "clone", "-q", "--no-checkout", "--filter=blob:none", f"file://{project}", "partial")
    for path in (project, place / "partial"):
        untouched.append(path)
    with pytest.raises(StateError) as caught:
        checkout(state, str(place / "partial"), sha)
    assert caught.value.code == "base_ref_incomplete"
    assert "fetch" in caught.value.hint
    for ref in ("1" * 40, "main:file"):
        with pytest.raises(NotFound):
            resolve(str(place / "partial"), ref)
    with pytest.raises(ElsewhereError):
        checkout(state, str(project), "1" * 40)
    with pytest.raises(NotFound):
        checkout(state, str(project), "../../etc")


def test_without_git_it_is_said(project: Path, untouched: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    commit(project, file="x")
    untouched.append(project)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Unavailable) as caught:
        resolve(str(project), "HEAD")
    assert caught.value.code == "git_missing"


def test_checkouts_and_captures_at_once_do_not_disturb_each_other(state: State, project: Path, untouched: list[Path]) -> None:
    shas = [commit(project, file=str(number)) for number in range(3)]
    untouched.append(project)
    failures: list[BaseException] = []

    def work(sha: str) -> None:
        try:
            assert (Path(checkout(state, str(project), sha).tree) / "file").exists()
            capture(state, str(project))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(sha,)) for sha in shas * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [(Path(checkout(state, str(project), sha).tree) / "file").read_text() for sha in shas] == ["0", "1", "2"]


def test_a_checkout_that_fails_leaves_nothing_half_made(
    state: State, project: Path, untouched: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = commit(project, file="x")
    untouched.append(project)

    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkouts, "_known_to_git", full)
        with pytest.raises(StateError) as caught:
            checkout(state, str(project), sha)
    assert caught.value.code == "no_room"
    made = checkout(state, str(project), sha)
    room = Path(made.tree).parents[2]
    assert made.made
    assert os.listdir(room / "building") == []


def test_commits_that_nobody_needs_are_pruned(state: State, project: Path, untouched: list[Path]) -> None:
    first, second = (checkout(state, str(project), commit(project, file=str(number))) for number in range(2))
    untouched.append(project)
    assert prune_commits(room_for(state, str(project)), lambda: {first.tree}) == [os.path.dirname(second.tree)]
    assert os.path.isdir(first.tree)
    assert not os.path.exists(second.tree)
    assert checkout(state, str(project), second.sha).made
