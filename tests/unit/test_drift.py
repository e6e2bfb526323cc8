"""What happened in reality since a base: found by contents, by a list of times and sizes, or by the moment alone."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from elsewhere.changes import drift, installed
from elsewhere.changes.drift import Compared, Dated, Drift, Listed
from elsewhere.changes.installed import Package
from elsewhere.changes.sides import sides_of
from elsewhere.storage import checkouts, scanning


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    (place / "src" / "deep").mkdir(parents=True)
    (place / ".git").mkdir()
    for name in ("README.md", "src/app.py", "src/deep/one", "src/deep/two", ".git/HEAD"):
        (place / name).write_text(f"{name}\n")
    return place


def settle() -> int:
    """A moment that is surely later than what was done before it, and earlier than what is done after it."""
    time.sleep(0.03)
    now = time.time_ns()
    time.sleep(0.03)
    return now


def test_a_scan_tells_what_changed_came_and_went(project: Path) -> None:
    before = scanning.scan(str(project))
    settle()
    (project / "README.md").write_text("changed\n")
    (project / "new").write_text("new\n")
    (project / "newer").mkdir()
    (project / "newer" / "file").write_text("new\n")
    for name in ("one", "two"):
        (project / "src" / "deep" / name).unlink()
    (project / "src" / "deep").rmdir()
    (project / "src").chmod(0o700)
    (project / ".git" / "HEAD").write_text("elsewhere\n")
    after = scanning.scan(str(project), leave_out={".git"}, known=before)
    expected = ["README.md", "new", "newer/file", "src", "src/deep/one", "src/deep/two"]
    assert sorted(drift.differing(before, after)) == expected


def test_what_was_not_looked_at_then_says_nothing_now(project: Path) -> None:
    (project / "data").mkdir()
    before = scanning.scan(str(project), live={"data"})
    before.left_out["README.md"] = "unreadable"
    (project / "data" / "more").write_text("more")
    (project / "README.md").write_text("more")
    assert drift.differing(before, scanning.scan(str(project))) == []


def test_a_scan_and_a_moment_tell_what_is_younger(project: Path) -> None:
    since = settle()
    assert drift.changed_since(scanning.scan(str(project)), since) == []
    (project / "src" / "app.py").chmod(0o755)
    (project / ".git" / "HEAD").write_text("elsewhere\n")
    os.utime(project / "README.md", (1, 1))
    found = drift.changed_since(scanning.scan(str(project)), since)
    assert sorted(found) == ["README.md", "src/app.py"]


def test_what_was_rewritten_as_it_was_did_not_change(project: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    subprocess.run(["cp", "-a", project, base], check=True)
    since = settle()
    (project / "README.md").write_text("README.md\n")
    (project / "src" / "app.py").write_text("src/App.py\n")
    (project / "src" / "deep" / "one").unlink()
    (project / "new").write_text("new")
    witness = Compared(sides_of([str(base)]), sides_of([str(project)]), str(project), since)
    changed = [
        path for path in ("README.md", "src/app.py", "src/deep/one", "src/deep/two", "new", "nowhere") if witness.changed(path)
    ]
    assert changed == ["src/app.py", "src/deep/one", "new"]


def test_what_is_older_than_the_base_is_not_read(project: Path, tmp_path: Path) -> None:
    """A pinned base is of one moment: what reality did not touch since is as it was. A commit is of no moment."""
    (tmp_path / "base").mkdir()
    since = settle()
    sides = sides_of([str(tmp_path / "base")]), sides_of([str(project)])
    assert not Compared(*sides, str(project), since).changed("README.md")
    assert Compared(*sides, str(project), None).changed("README.md")


def test_when_too_much_would_have_to_be_read_a_touched_file_counts_as_changed(project: Path) -> None:
    sides = sides_of([str(project)])
    assert not Compared(sides, sides, str(project), None, budget=100).changed("README.md")
    assert Compared(sides, sides, str(project), None, budget=3).changed("README.md")


def test_a_list_of_times_and_sizes_tells_what_changed(project: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    (copies / "src").mkdir(parents=True)
    (copies / "src" / "app.py").write_text("src/app.py\n")
    scan = scanning.scan(str(project))
    settle()
    witness = Listed(scan, str(project), sides_of([str(copies)]), sides_of([str(project)]))
    (project / "README.md").write_text("README.md\n")
    (project / "src" / "app.py").write_text("src/app.py\n")
    (project / "src" / "deep" / "one").unlink()
    (project / "new").write_text("new")
    asked = ("README.md", "src/app.py", "src/deep/one", "src/deep/two", "src/deep", "new", "nowhere")
    # Of README.md there is no copy, and nobody can tell any more whether it is as it was.
    assert [path for path in asked if witness.changed(path)] == ["README.md", "src/deep/one", "new"]
    (project / "src" / "app.py").write_text("another\n")
    assert witness.changed("src/app.py")


def test_the_moment_alone_tells_what_changed(project: Path) -> None:
    since = settle()
    witness = Dated(str(project), since, frozenset({"src/deep/one"}))
    (project / "README.md").write_text("README.md\n")
    os.utime(project / "README.md", (1, 1))
    (project / "src" / "deep" / "one").unlink()
    asked = ("README.md", "src/app.py", "src/deep/one", "src/deep", "nowhere")
    assert [path for path in asked if witness.changed(path)] == ["README.md", "src/deep/one"]


def test_overlapping_is_what_both_changed(project: Path) -> None:
    since = settle()
    (project / "README.md").write_text("there\n")
    (project / ".git" / "HEAD").write_text("there\n")
    witness = Dated(str(project), since)
    assert drift.overlap(["README.md", "src/app.py", ".git/HEAD", "new"], witness) == ["README.md"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Drift(900.0, "live"), "15 minutes old, nothing changed in reality since"),
        (Drift(0.4, "live"), "0 seconds old, nothing changed in reality since"),
        (
            Drift(900.0, "pinned", "a", "b", 2, ("/p/a", "/p/b", "/p/c"), ("/p/a",)),
            "15 minutes behind, 2 commits, 3 files changed, 1 of them changed here, too",
        ),
        (Drift(90.0, "pinned", "a", "b", 1), "1 minute behind, 1 commit"),
        (Drift(8000.0, "pinned", "a", "b", None), "2 hours behind, another history"),
        (Drift(200_000.0, "pinned", "a", "a", 0, ("/p/a",)), "2 days behind, 1 file changed"),
        (Drift(59.0, "live", overlapping=("/p/a",)), "59 seconds behind, 1 file changed there and here"),
        (
            Drift(60.0, "live", packages=(Package("dpkg", "curl", "upgraded", "8"),)),
            "1 minute behind, 1 package of the system changed",
        ),
    ],
)
def test_a_summary_is_words_for_whoever_has_to_decide(found: Drift, words: str) -> None:
    assert found.summary() == words


def test_it_matters_if_both_changed_a_file_or_the_head_moved() -> None:
    assert not Drift(900.0, "pinned", "a", "a", 0, ("/p/a",)).matters
    assert Drift(900.0, "pinned", "a", "a", 0, ("/p/a",), ("/p/a",)).matters
    assert Drift(900.0, "pinned", "a", "b", None).matters
    assert not Drift(900.0, "pinned", None, None, None).matters


# -- packages -------------------------------------------------------------------------------------------------------------------


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


@pytest.fixture
def system(tmp_path: Path) -> Path:
    for place in ("var/lib/dpkg/info", "var/log", "usr/lib/python3/dist-packages", "home/.local/lib/python3.11/site-packages"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text("")
    return tmp_path


def test_dpkg_writes_down_what_it_does(system: Path) -> None:
    now = time.time()
    lines = [
        f"{stamp(now - 500)} install old:amd64 <none> 1.0",
        f"{stamp(now - 50)} startup archives unpack",
        f"{stamp(now - 50)} upgrade curl:amd64 7.88 7.89",
        f"{stamp(now - 49)} status installed curl:amd64 7.89",
        f"{stamp(now - 40)} install jq:all <none> 1.6",
        f"{stamp(now - 30)} remove nano:amd64 7.2 <none>",
        "nonsense",
    ]
    (system / "var/log/dpkg.log").write_text("\n".join(lines) + "\n")
    assert installed.changed_since(now - 100, str(system)) == [
        Package("dpkg", "curl", "upgraded", "7.89"),
        Package("dpkg", "jq", "installed", "1.6"),
        Package("dpkg", "nano", "removed", None),
    ]
    assert installed.changed_since(now + 10, str(system)) == []


def test_without_a_log_the_lists_of_files_tell(system: Path) -> None:
    (system / "var/lib/dpkg/info/old.list").write_text("")
    since = settle() / 1e9
    (system / "var/lib/dpkg/info/curl:amd64.list").write_text("")
    (system / "var/lib/dpkg/status").write_text("")
    assert installed.changed_since(since, str(system)) == [Package("dpkg", "curl", "changed")]


def test_pip_leaves_a_directory_for_each_distribution(system: Path) -> None:
    (system / "usr/lib/python3/dist-packages/old-1.0.dist-info").mkdir()
    since = settle() / 1e9
    (system / "usr/lib/python3/dist-packages/requests-2.31.0.dist-info").mkdir()
    (system / "usr/lib/python3/dist-packages/requests").mkdir()
    (system / "home/.local/lib/python3.11/site-packages/black-24.1.dist-info").mkdir()
    assert installed.changed_since(since, str(system), str(system / "home")) == [
        Package("pip", "black", "installed", "24.1"),
        Package("pip", "requests", "installed", "2.31.0"),
    ]


# -- git ------------------------------------------------------------------------------------------------------------------------


def git(place: Path, *words: str) -> str:
    line = ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *words]
    return subprocess.run(line, cwd=place, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    place.mkdir()
    git(place, "init", "-q", "-b", "main")
    for name in ("kept", "changed", "removed"):
        (place / name).write_text(name)
    git(place, "add", "-A")
    git(place, "commit", "-qm", "first")
    return place


def test_commits_are_counted_only_on_top_of_the_base(repository: Path) -> None:
    place = str(repository)
    first = git(repository, "rev-parse", "HEAD")
    (repository / "changed").write_text("again")
    (repository / "removed").unlink()
    git(repository, "commit", "-qam", "second")
    second = git(repository, "rev-parse", "HEAD")
    assert checkouts.commits_since(place, first, second) == 1
    assert checkouts.commits_since(place, first, first) == 0
    assert checkouts.commits_since(place, second, first) is None
    assert checkouts.commits_since(place, "0" * 40, second) is None
    assert sorted(checkouts.between(place, first, second) or []) == ["changed", "removed"]
    assert checkouts.between(place, "0" * 40, second) is None
    git(repository, "commit", "-q", "--amend", "-m", "rewritten")
    assert checkouts.commits_since(place, second, git(repository, "rev-parse", "HEAD")) is None


def test_what_git_misses_is_listed_and_no_index_is_written(repository: Path) -> None:
    (repository / "removed").unlink()
    git(repository, "rm", "-q", "--cached", "kept")
    (repository / "kept").unlink()
    before = (repository / ".git" / "index").read_bytes()
    assert sorted(checkouts.deleted(str(repository))) == ["kept", "removed"]
    assert (repository / ".git" / "index").read_bytes() == before


@pytest.mark.parametrize("key", ["clean", "process"])
@pytest.mark.parametrize("driver", ["evil", "e=v.i l"])
def test_no_filter_of_the_repository_is_run_to_see_what_changed(repository: Path, tmp_path: Path, key: str, driver: str) -> None:
    """A file that may have changed, by its time, and has the size that it had: git has to read it to know."""
    ran = tmp_path / "ran"
    git(repository, "config", f"filter.{driver}.{key}", f"sh -c 'touch {ran}; cat'")
    git(repository, "config", f"filter.{driver}.required", "true")
    (repository / ".git" / "info" / "attributes").write_text("* filter=evil\n" if driver == "evil" else "")
    (repository / "changed").write_text("CHANGED")
    os.utime(repository / "kept")
    assert checkouts.dirty(str(repository)) == ["changed"]
    assert checkouts.deleted(str(repository)) == []
    assert not ran.exists()
    subprocess.run(["git", "ls-files", "--modified"], cwd=repository, capture_output=True)
    assert ran.exists() == (driver == "evil"), "git itself would have run it"


def test_without_a_repository_there_is_nothing_to_ask(tmp_path: Path) -> None:
    place = str(tmp_path)
    assert (checkouts.deleted(place), checkouts.between(place, "a", "b"), checkouts.commits_since(place, "a", "b")) == (
        [],
        None,
        None,
    )
