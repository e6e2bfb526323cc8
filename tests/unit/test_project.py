"""Which directory is the project, and what of its repository lies outside it."""

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elsewhere.errors import NotFound, Refused, UsageError
from elsewhere.sandbox import project
from elsewhere.sandbox.project import Project

HOME = "/nonexistent/home"


def find(path: Path, home: Path | str = HOME, *, chosen: bool = False) -> Project:
    return project.find(str(path), str(home), chosen=chosen)


def git(directory: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *words],
        cwd=directory,
        env={"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": HOME},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def repository(directory: Path, *, commits: int = 1) -> Path:
    directory.mkdir(parents=True)
    git(directory, "init", "-q", "-b", "main")
    for number in range(commits):
        git(directory, "commit", "-q", "--allow-empty", "-m", str(number))
    return directory


def make(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """So that reading without end fails here, and not on the whole machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# -- which directory ------------------------------------------------------------------------------------------------------------


def test_a_plain_directory_is_itself_the_project(place: Path) -> None:
    assert find(make(place / "a/b")) == Project(str(place / "a/b"), None, None)


def test_the_git_top_level_is_the_project(place: Path) -> None:
    (make(place / "top") / ".git").mkdir()
    assert find(make(place / "top/src/deep")).path == str(place / "top")


def test_the_nearest_of_two_git_top_levels_is_the_project(place: Path) -> None:
    make(place / "outer/.git")
    make(place / "outer/inner/.git")
    assert find(make(place / "outer/inner/src")).path == str(place / "outer/inner")


@pytest.mark.parametrize("where", ["outer", "outer/repository", "outer/repository/part"])
def test_settings_anywhere_upwards_win_over_git(place: Path, where: str) -> None:
    start = make(place / "outer/repository/part/src")
    make(place / "outer/repository/.git")
    (place / where / "elsewhere.toml").touch()
    assert find(start).path == str(place / where)


def test_the_nearest_settings_win(place: Path) -> None:
    start = make(place / "a/b/c")
    (place / "a/elsewhere.toml").touch()
    (place / "a/b/elsewhere.toml").touch()
    assert find(start).path == str(place / "a/b")


def test_a_directory_that_was_named_is_the_project_whatever_lies_above(place: Path) -> None:
    start = make(place / "a/b")
    make(place / "a/.git")
    (place / "a/elsewhere.toml").touch()
    assert find(start, chosen=True).path == str(start)


def test_git_or_settings_in_the_home_directory_do_not_make_it_the_project(place: Path) -> None:
    start = make(place / "home/notes")
    make(place / "home/.git")
    (place / "home/elsewhere.toml").touch()
    assert find(start, place / "home").path == str(start)


@pytest.mark.parametrize("chosen", [False, True])
def test_the_whole_machine_is_refused(chosen: bool) -> None:
    with pytest.raises(Refused) as caught:
        find(Path("/"), chosen=chosen)
    assert caught.value.code == "project_is_root"
    assert "--project" in caught.value.hint


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("through", ["home", "link", "home/../home/."])
def test_the_home_directory_itself_is_refused_however_it_is_written(place: Path, through: str, chosen: bool) -> None:
    make(place / "home")
    (place / "link").symlink_to("home")
    with pytest.raises(Refused) as caught:
        find(place / through, place / "home", chosen=chosen)
    assert caught.value.code == "project_is_home"


def test_a_home_that_is_a_link_is_refused_by_its_real_name_too(place: Path) -> None:
    make(place / "real")
    (place / "home").symlink_to("real")
    with pytest.raises(Refused):
        find(place / "real", place / "home")


def test_a_directory_below_home_is_accepted(place: Path) -> None:
    assert find(make(place / "home/work"), place / "home").path == str(place / "home/work")


def test_a_project_reached_through_a_link_has_its_real_path(place: Path) -> None:
    make(place / "real/src")
    make(place / "real/.git")
    (place / "link").symlink_to("real")
    assert find(place / "link/src").path == str(place / "real")


def test_a_name_that_is_no_utf_8_is_a_name_like_any_other(place: Path) -> None:
    start = make(place / os.fsdecode(b"caf\xe9\n"))
    assert find(start).path == str(start)


@pytest.mark.parametrize("name", ["missing", "missing/deeper", "dangling"])
def test_a_project_that_is_not_there_is_not_found(place: Path, name: str) -> None:
    (place / "dangling").symlink_to("missing")
    with pytest.raises(NotFound) as caught:
        find(place / name)
    assert caught.value.code == "project_not_found"
    assert name in caught.value.message


def test_a_file_is_no_project(place: Path) -> None:
    (place / "file").touch()
    with pytest.raises(UsageError) as caught:
        find(place / "file")
    assert caught.value.code == "project_not_directory"


def test_a_loop_of_links_is_told_and_not_walked(place: Path) -> None:
    (place / "one").symlink_to("two")
    (place / "two").symlink_to("one")
    with pytest.raises(NotFound) as caught:
        find(place / "one")
    assert caught.value.code == "project_unreachable"


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_name_that_cannot_exist_is_told_as_such(place: Path, name: str) -> None:
    with pytest.raises(NotFound) as caught:
        find(place / name)
    assert caught.value.code == "project_unreachable"


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100])
def test_a_project_that_cannot_be_read_is_refused(place: Path, mode: int) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    (make(place / "closed")).chmod(mode)
    with pytest.raises(Refused) as caught:
        find(place / "closed")
    assert caught.value.code == "project_unreadable"


def test_a_project_below_a_closed_directory_cannot_be_reached(place: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    make(place / "closed/project")
    (place / "closed").chmod(0)
    with pytest.raises(NotFound) as caught:
        find(place / "closed/project")
    assert caught.value.code == "project_unreachable"


# -- its repository -------------------------------------------------------------------------------------------------------------


def test_a_repository_inside_the_project_is_not_outside_and_its_head_is_known(place: Path) -> None:
    top = repository(place / "top")
    assert find(make(top / "src")) == Project(str(top), None, git(top, "rev-parse", "HEAD"))


def test_the_head_of_packed_references_is_known(place: Path) -> None:
    top = repository(place / "top", commits=2)
    git(top, "tag", "-a", "-m", "an annotated tag has a line without a name", "v1", "HEAD~1")
    git(top, "branch", "another", "HEAD~1")
    git(top, "pack-refs", "--all")
    assert not (top / ".git/refs/heads/main").exists()
    assert find(top).head == git(top, "rev-parse", "HEAD")


def test_a_loose_reference_wins_over_a_packed_one(place: Path) -> None:
    top = repository(place / "top")
    git(top, "pack-refs", "--all")
    git(top, "commit", "-q", "--allow-empty", "-m", "newer")
    assert find(top).head == git(top, "rev-parse", "HEAD")


def test_a_detached_head_is_known(place: Path) -> None:
    top = repository(place / "top", commits=2)
    git(top, "checkout", "-q", "--detach", "HEAD~1")
    assert find(top).head == git(top, "rev-parse", "HEAD")


def test_a_branch_with_slashes_in_its_name_has_a_head(place: Path) -> None:
    top = repository(place / "top")
    git(top, "checkout", "-q", "-b", "feature/some/thing")
    assert find(top).head == git(top, "rev-parse", "HEAD")


def test_a_head_of_sha_256_is_known(place: Path) -> None:
    make(place / "top")
    git(place / "top", "init", "-q", "--object-format=sha256")
    git(place / "top", "commit", "-q", "--allow-empty", "-m", "first")
    head = find(place / "top").head
    assert head == git(place / "top", "rev-parse", "HEAD")
    assert len(head) == 64


def test_a_repository_without_a_commit_has_no_head(place: Path) -> None:
    assert find(repository(place / "top", commits=0)) == Project(str(place / "top"), None, None)


@pytest.mark.parametrize("packed", [False, True])
def test_a_linked_worktree_has_its_common_directory_outside_and_its_own_head(place: Path, packed: bool) -> None:
    main = repository(place / "main", commits=2)
    git(main, "worktree", "add", "-q", "-b", "side", str(place / "side"), "HEAD~1")
    if packed:
        git(main, "pack-refs", "--all")
    found = find(make(place / "side/src"))
    assert found == Project(str(place / "side"), str(main / ".git"), git(place / "side", "rev-parse", "HEAD"))
    assert found.head != git(main, "rev-parse", "HEAD")


def test_a_detached_linked_worktree_has_its_own_head(place: Path) -> None:
    main = repository(place / "main", commits=2)
    git(main, "worktree", "add", "-q", "--detach", str(place / "side"), "HEAD~1")
    assert find(place / "side").head == git(main, "rev-parse", "HEAD~1")


def test_a_worktree_inside_its_own_repository_has_its_common_directory_outside(place: Path) -> None:
    main = repository(place / "main")
    git(main, "worktree", "add", "-q", str(main / "trees/side"))
    assert find(main / "trees/side").git == str(main / ".git")


def test_a_submodule_has_its_repository_outside(place: Path) -> None:
    repository(place / "library")
    top = repository(place / "top")
    git(top, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(place / "library"), "library")
    found = find(top / "library")
    assert found.git == str(top / ".git/modules/library")
    assert found.head == git(place / "library", "rev-parse", "HEAD")


def test_a_repository_kept_apart_lies_outside_if_it_says_whose_it_is(place: Path) -> None:
    make(place / "work")
    git(place / "work", "init", "-q", f"--separate-git-dir={place}/kept")
    assert find(place / "work") == Project(str(place / "work"), None, None, find(place / "work").remark)
    assert f"{place}/kept" in find(place / "work").remark
    git(place / "work", "config", "core.worktree", str(place / "work"))
    assert find(place / "work").git == str(place / "kept")
    assert not find(place / "work").remark


def test_a_submodule_of_a_linked_worktree_has_its_repository_outside(place: Path) -> None:
    repository(place / "library")
    top = repository(place / "top")
    git(top, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(place / "library"), "deep/library")
    git(top, "commit", "-qm", "library")
    git(top, "worktree", "add", "-q", str(place / "side"))
    git(place / "side", "-c", "protocol.file.allow=always", "submodule", "--quiet", "update", "--init")
    assert find(place / "side/deep/library").git == str(top / ".git/worktrees/side/modules/deep/library")


@pytest.mark.parametrize("name", ["a # b", 'quo"te', "back\\slash", " spaces ", "semi;colon", "[brackets]", "equal=sign"])
def test_a_submodule_of_any_name_says_whose_it_is(place: Path, name: str) -> None:
    make(place / name)
    git(place / name, "init", "-q", f"--separate-git-dir={place}/kept")
    git(place / name, "config", "core.worktree", str(place / name))
    assert find(place / name).git == str(place / "kept")


def test_a_work_tree_with_a_configuration_of_its_own_says_whose_it_is(place: Path) -> None:
    make(place / "work")
    git(place / "work", "init", "-q", f"--separate-git-dir={place}/kept")
    git(place / "work", "config", "extensions.worktreeConfig", "true")
    git(place / "work", "config", "--worktree", "core.worktree", "../work")
    assert "worktree" not in (place / "kept/config").read_text().replace("worktreeConfig", "")
    assert find(place / "work").git == str(place / "kept")


def test_a_linked_worktree_with_relative_paths_has_its_common_directory_outside(place: Path) -> None:
    main = repository(place / "main")
    git(main, "worktree", "add", "-q", str(place / "side"))
    (place / "side/.git").write_text("gitdir: ../main/.git/worktrees/side\n")
    (main / ".git/worktrees/side/gitdir").write_text("../../../../side/.git\n")
    assert find(place / "side").git == str(main / ".git")


# -- what a stranger may have written -------------------------------------------------------------------------------------------


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    "content",
    [
        b"gitdir: /etc\n",
        b"gitdir: /\n",
        b"gitdir: ..\n",
        b"gitdir: ../../../../../../../../etc\n",
        b"gitdir: fifo\n",
        b"gitdir: /etc/passwd\n",
        b"gitdir: /nonexistent\n",
        b"gitdir: link-to-etc\n",
        b"gitdir: pretender\n",
        b"gitdir:\n",
        b"gitdir: a\0b\n",
        b"gitdir: " + b"x" * 5000,
        b"gitdir: \xff\xfe\n",
        b"",
        b"\0",
        b"nonsense\n",
        b"/etc\n",
    ],
    ids=lambda content: ascii(content[:30]),
)
def test_a_hostile_pointer_never_becomes_the_repository(place: Path, content: bytes) -> None:
    top = make(place / "top")
    os.mkfifo(top / "fifo")
    (top / "link-to-etc").symlink_to("/etc")
    (make(top / "pretender") / "commondir").write_text("/etc\n")
    (top / ".git").write_bytes(content)
    assert find(make(top / "src")) == Project(str(top), None, None)


@pytest.mark.timeout(5)
@pytest.mark.parametrize("target", ["/etc", "/", "/nonexistent", ".git", "/etc/passwd", "/dev/zero", "/proc/self/fd"])
def test_a_hostile_link_never_becomes_the_repository(place: Path, target: str) -> None:
    (make(place / "top") / ".git").symlink_to(target)
    assert find(place / "top") == Project(str(place / "top"), None, None)


@pytest.mark.timeout(5)
@pytest.mark.parametrize("common", [b"/etc\n", b"../..\n", b"a\0b\n", b"/nonexistent\n"], ids=ascii)
def test_a_hostile_common_directory_never_becomes_the_repository(place: Path, common: bytes) -> None:
    top = repository(place / "top")
    (top / ".git/commondir").write_bytes(common)
    assert find(top).git is None


@pytest.mark.timeout(5)
@pytest.mark.parametrize("way", ["pointer", "link", "commondir", "worktree", "pretended worktree", "pretended submodule"])
def test_a_repository_that_does_not_point_back_is_not_the_projects(place: Path, way: str) -> None:
    """Of somebody who wrote everything in the project, and nothing else."""
    private, top = repository(place / "private"), make(place / "top")
    git(private, "worktree", "add", "-q", str(place / "side"))
    real = str(private / ".git")
    if way == "pointer":
        (top / ".git").write_text(f"gitdir: {real}\n")
    elif way == "link":
        (top / ".git").symlink_to(real)
    elif way == "commondir":
        git(top, "init", "-q")
        (top / ".git/commondir").write_text(f"{real}\n")
    elif way == "worktree":
        (top / ".git").write_text(f"gitdir: {real}/worktrees/side\n")
    else:
        fake = make(top / "fake/worktrees/mine")
        (top / ".git").write_text(f"gitdir: {fake}\n")
        (fake / "HEAD").write_text("ref: refs/heads/main\n")
        (fake / "commondir").write_text(f"{real}\n")
        (fake / "gitdir").write_text(f"{top}/.git\n")
        if way == "pretended submodule":
            (fake / "config").write_text(f"[core]\n\tworktree = {top}\n")
    found = find(top)
    assert (found.git, found.head) == (None, None)
    assert real in found.remark


# -- whose markers count --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["elsewhere.toml", ".git"])
def test_what_somebody_else_put_above_does_not_make_a_project(place: Path, name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs files of two other people")
    start = make(place / "open/mine")
    os.chmod(place / "open", 0o1777)
    marker = place / "open" / name
    marker.mkdir() if name == ".git" else marker.touch()
    assert find(start).path == str(place / "open"), "the control: it is ours"
    os.chown(marker, 4243, 4243)
    assert find(start).path == str(start)
    os.chown(start, 4243, 4243)
    assert find(start).path == str(start), "they could write there because everybody can"
    os.chown(place / "open", 4243, 4243)
    assert find(start).path == str(place / "open"), "all of it is theirs: root works in somebody's project"
    os.chown(start, 4244, 4244)
    assert find(start).path == str(start)


@pytest.mark.timeout(5)
def test_a_fifo_as_pointer_is_not_waited_for(place: Path) -> None:
    os.mkfifo(make(place / "top") / ".git")
    assert find(place / "top") == Project(str(place / "top"), None, None)


@pytest.mark.timeout(5)
@pytest.mark.parametrize("name", ["HEAD", "commondir", "packed-refs", "refs/heads/main"])
@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_no_file_of_a_repository_can_keep_anybody_waiting(place: Path, name: str, kind: str) -> None:
    top = repository(place / "top")
    if name == "packed-refs":
        (top / ".git/refs/heads/main").unlink()
    (top / ".git" / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(top / ".git" / name)
    else:
        (top / ".git" / name).symlink_to("/dev/zero")
    with little_memory():
        found = find(top)
    assert (found.path, found.git) == (str(top), None)
    assert name == "commondir" or found.head is None


@pytest.mark.parametrize(
    "head",
    [
        b"ref: ../../../etc/hostname\n",
        b"ref: /etc/hostname\n",
        b"ref: refs/heads/a\0b\n",
        b"ref: HEAD\n",
        b"ref:\n",
        b"ref: .\n",
        b"z" * 40 + b"\n",
        b"a line\nbreak" + b"0" * 28,
        b"0" * 39,
        b"0" * 41,
        b"\xff" * 40,
    ],
    ids=lambda head: ascii(head[:30]),
)
def test_a_head_that_names_no_commit_is_no_head(place: Path, head: bytes) -> None:
    top = repository(place / "top")
    (top / ".git/HEAD").write_bytes(head)
    assert find(top).head is None


def test_a_reference_that_is_a_link_to_a_secret_does_not_show_it(place: Path) -> None:
    top = repository(place / "top")
    (place / "secret").write_text("s" * 40)
    (top / ".git/refs/heads/main").unlink()
    (top / ".git/refs/heads/main").symlink_to(place / "secret")
    assert find(top).head is None
