"""Drift, from the front door: how far reality has moved on, which of it touches what the sandbox did, and when one is told."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, tree

pytestmark = pytest.mark.one_launcher


@pytest.fixture
def person(person: Person) -> Iterator[Person]:
    """Whoever makes sandboxes that stay removes them in the end."""
    yield person
    person.elsewhere("rm", "--all", "--force")


def inside(person: Person, line: str, box: str = "fix") -> None:
    done = person.elsewhere("exec", box, "-c", line)
    assert done.returncode == 0, (line, done.stdout, done.stderr)


def drift(person: Person, box: str = "fix") -> dict[str, Any]:
    document = person.json("drift", box)
    assert "drift" in document, document
    return document["drift"]


def write(person: Person, name: str, text: str) -> None:
    """The owner of what is there stays as it is: whoever gives it again changes the file's change time."""
    path = person.project / name
    new = not path.exists()
    path.write_text(text)
    if new and os.geteuid() == 0:
        os.chown(path, person.uid, person.uid)


def commit(person: Person, message: str) -> None:
    person.shell("git", "add", "-A", cwd=person.project)
    person.shell("git", "commit", "-qm", message, cwd=person.project)


def grow_old(person: Person, seconds: float, box: str = "fix") -> None:
    """The base of a sandbox is of so long ago."""
    path = Path(person.json("inspect", box)["sandbox"]["path"], "sandbox.json")
    said = json.loads(path.read_text())
    said["base"]["at"] -= seconds
    path.write_text(json.dumps(said))


@pytest.mark.parametrize("base", ["pinned", "live"])
def test_drift_tells_commits_files_and_what_both_changed(person: Person, base: str) -> None:
    person.elsewhere("create", "--name", "fix", "--base", base, check=True)
    inside(person, "echo here >> README.md; echo here > mine; rm src/test_app.py")
    time.sleep(0.05)
    before = drift(person)
    assert (before["changed"], before["overlapping"], before["behind_commits"]) == ([], [], 0)
    assert before["summary"].endswith("nothing changed in reality since")
    write(person, "README.md", "# another project\n")
    write(person, "src/app.py", "def add(a, b):\n    return b + a\n")
    commit(person, "second")
    write(person, ".env", "KEY=other\n")
    reality = tree(person.project)
    found = drift(person)
    assert tree(person.project) == reality, "whoever looks changes nothing, not even the index"
    assert found["changed"] == [".env", "README.md", "src/app.py"]
    assert found["overlapping"] == ["README.md"]
    assert found["behind_commits"] == 1
    assert found["base"]["kind"] == base
    assert found["base"]["head"] != found["head"]
    assert found["summary"].endswith("behind, 1 commit, 3 files changed, 1 of them changed here, too")
    shown = person.elsewhere("drift", "fix", check=True).stdout.splitlines()
    assert shown[:3] == ["   ! README.md", "   ~ .env", "   ~ src/app.py"]
    assert shown[-1].endswith("1 of them changed here, too")


@pytest.mark.parametrize("base", ["pinned", "live"])
def test_what_reality_deleted_is_drift(person: Person, base: str) -> None:
    person.elsewhere("create", "--name", "fix", "--base", base, check=True)
    inside(person, "echo here >> src/app.py")
    time.sleep(0.05)
    for name in ("app.py", "test_app.py"):
        (person.project / "src" / name).unlink()
    (person.project / "src").rmdir()
    found = drift(person)
    assert found["changed"] == ["src/app.py", "src/test_app.py"]
    assert found["overlapping"] == ["src/app.py"]


def test_a_pinned_base_knows_what_was_only_touched(person: Person) -> None:
    person.elsewhere("create", "--name", "fix", "--base", "pinned", check=True)
    write(person, "README.md", (person.project / "README.md").read_text())
    os.utime(person.project / "src" / "app.py")
    assert drift(person)["changed"] == []
    person.elsewhere("create", "--name", "later", "--base", "pinned", check=True)
    write(person, "src/app.py", "changed\n")
    person.elsewhere("create", "--name", "last", "--base", "pinned", check=True)
    # Each is compared with its own base, though newer ones were captured since.
    assert [drift(person, box)["changed"] for box in ("fix", "later", "last")] == [["src/app.py"], ["src/app.py"], []]


def test_a_commit_is_compared_with_reality_as_it_is(person: Person) -> None:
    write(person, "src/app.py", "second\n")
    commit(person, "second")
    write(person, "README.md", "not committed\n")
    write(person, "untracked", "untracked\n")
    person.elsewhere("create", "--name", "fix", "--base-ref", "HEAD~1", check=True)
    inside(person, "echo here > .env; echo here > src/app.py; echo here > src/new.py")
    found = drift(person)
    assert found["behind_commits"] == 1
    assert found["changed"] == [".env", "README.md", "src/app.py", "untracked"]
    assert found["overlapping"] == [".env", "src/app.py"]


def test_a_history_that_was_rewritten_has_no_number(person: Person) -> None:
    person.elsewhere("create", "--name", "fix", check=True)
    person.shell("git", "commit", "-q", "--amend", "-m", "rewritten", cwd=person.project)
    found = drift(person)
    assert found["behind_commits"] is None
    assert found["summary"].endswith("behind, another history")


def test_a_project_without_git_has_drift_as_well(person: Person) -> None:
    plain = person.place / "plain"
    plain.mkdir()
    (plain / "file").write_text("file\n")
    person.own(plain)
    person.elsewhere("create", "--name", "fix", cwd=plain, check=True)
    (plain / "file").write_text("changed\n")
    found = drift(person)
    assert (found["changed"], found["behind_commits"], found["head"]) == (["file"], None, None)


def test_a_live_base_with_a_manifest_knows_what_was_dirty(person: Person) -> None:
    """A project that is too large to be copied: times and sizes are written down, and what git has no copy of is copied."""
    write(person, "README.md", "dirty\n")
    write(person, "data.log", "")
    os.truncate(person.project / "data.log", 2 << 30)
    person.elsewhere("create", "--name", "fix", check=True)
    assert person.json("inspect", "fix")["sandbox"]["base"]["manifest"] is True
    inside(person, "echo here >> README.md; echo here >> src/app.py; rm .gitignore")
    write(person, "README.md", "dirty\n")
    assert (drift(person)["changed"], drift(person)["overlapping"]) == ([], [])
    write(person, "README.md", "dirtier\n")
    (person.project / "src" / "app.py").unlink()
    found = drift(person)
    assert found["changed"] == found["overlapping"] == ["README.md", "src/app.py"]


def test_names_that_are_not_utf8_are_told_with_their_bytes(person: Person) -> None:
    person.elsewhere("create", "--name", "fix", check=True)
    path = os.path.join(os.fsencode(person.project), b"odd\xff\n")
    Path(os.fsdecode(path)).write_text("odd")
    assert drift(person)["changed"] == [{"path": "odd�\n", "path_b64": "b2Rk/wo="}]
    assert "   ~ odd\\xff\\x0a\n" in person.elsewhere("drift", "fix", check=True).stdout


def test_exec_says_so_when_it_matters_and_only_then(person: Person) -> None:
    person.elsewhere("create", "--name", "fix", "--base", "pinned", check=True)
    inside(person, "echo here >> README.md")
    write(person, "README.md", "# another project\n")
    assert "changed there and here" not in person.elsewhere("exec", "fix", "--", "true").stderr, "it is still young"
    grow_old(person, 900)
    done = person.elsewhere("exec", "fix", "--", "sh", "-c", "echo said; exit 3")
    assert (done.returncode, done.stdout) == (3, "said\n")
    assert "15 minutes behind, 1 file changed there and here; elsewhere drift " in done.stderr
    document = person.json("exec", "fix", "--", "true")
    assert document["drift"]["overlapping"] == ["README.md"]
    assert document["drift"]["summary"] == "15 minutes behind, 1 file changed there and here"
    write(person, "README.md", "# a project\n")
    write(person, "src/app.py", "changed, but not in the sandbox\n")
    assert person.elsewhere("exec", "fix", "--", "true").stderr == ""
    assert person.json("exec", "fix", "--", "true")["drift"] is None
    commit(person, "second")
    assert "15 minutes behind, 1 commit; elsewhere drift " in person.elsewhere("exec", "fix", "--", "true").stderr


def test_inspect_has_a_line_of_it(person: Person) -> None:
    person.elsewhere("create", "--name", "fix", "--base", "pinned", check=True)
    inside(person, "echo here >> README.md")
    said = person.json("inspect", "fix")["sandbox"]["drift"]
    assert (said["behind_commits"], said["overlapping"]) == (0, [])
    write(person, "README.md", "# another project\n")
    assert person.json("inspect", "fix")["sandbox"]["drift"]["overlapping"] == ["README.md"]
    lines = person.elsewhere("inspect", "fix", check=True).stdout.splitlines()
    assert any(line.startswith("drift ") and line.endswith("1 file changed there and here") for line in lines)


def test_what_is_the_same_on_both_sides_is_no_overlap(person: Person) -> None:
    """What the sandbox promoted changed in reality since the base, and is what the sandbox has."""
    person.elsewhere("create", "--name", "fix", "--base", "pinned", check=True)
    inside(person, "echo here >> README.md; rm src/test_app.py; mkdir made; echo made > made/new; mv src/app.py src/moved.py")
    person.elsewhere("promote", "fix", check=True)
    person.elsewhere("snapshot", "fix", check=True)
    found = drift(person)
    assert (found["changed"][0], found["overlapping"]) == ("README.md", [])
    assert person.json("inspect", "fix")["sandbox"]["drift"]["overlapping"] == []
    inside(person, "echo more >> made/new; echo again > src/test_app.py")
    for said in (drift(person), person.json("inspect", "fix")["sandbox"]["drift"]):
        assert said["overlapping"] == ["made/new", "src/test_app.py"]


def test_what_was_changed_before_a_snapshot_and_before_a_fork_counts(person: Person) -> None:
    person.elsewhere("create", "--name", "fix", "--base", "pinned", check=True)
    inside(person, "echo here >> README.md")
    person.elsewhere("snapshot", "fix", check=True)
    fork = person.json("fork", "fix")["sandboxes"][0]["id"]
    write(person, "README.md", "# another project\n")
    for box in ("fix", fork):
        assert person.json("inspect", box)["sandbox"]["drift"]["overlapping"] == ["README.md"], box
        found = drift(person, box)
        assert found["changed"] == found["overlapping"] == ["README.md"], box


def test_a_project_that_is_gone_is_an_error_for_drift_and_nothing_for_the_others(person: Person) -> None:
    other = person.place / "other"
    other.mkdir()
    (other / "file").write_text("file\n")
    person.own(other)
    person.elsewhere("create", "--name", "fix", cwd=other, check=True)
    person.elsewhere("stop", "fix", check=True)
    other.rename(person.place / "renamed")
    assert person.json("drift", "fix")["error"]["code"] == "project_not_found"
    assert person.json("inspect", "fix")["sandbox"]["drift"] is None


def test_drift_of_a_large_project_looks_at_what_changed(person: Person) -> None:
    large = person.place / "large"
    for number in range(40):
        (large / f"directory{number}").mkdir(parents=True)
        for name in range(50):
            (large / f"directory{number}" / f"file{name}").write_text(f"{number} {name}\n")
    person.own(large)
    person.elsewhere("create", "--name", "fix", "--base", "pinned", cwd=large, check=True)
    (large / "directory7" / "file7").write_text("7 8\n")
    (large / "directory8" / "file8").unlink()
    assert drift(person)["changed"] == ["directory7/file7", "directory8/file8"]


def test_the_sdk_has_it(person: Person) -> None:
    person.sdk(
        "from elsewhere import Drift, Sandbox\n"
        "import pathlib, time\n"
        "with Sandbox.create(base='pinned') as box:\n"
        "    box.run('echo here >> README.md').check()\n"
        "    assert not box.drift(), box.drift()\n"
        "    pathlib.Path('README.md').write_text('# another project\\n')\n"
        "    found = box.drift()\n"
        "    assert isinstance(found, Drift)\n"
        "    assert found.overlapping == (str(pathlib.Path('README.md').absolute()),), found\n"
        "    assert found.matters and found.age_s >= 0 and found.behind_commits == 0\n"
        "    assert found.summary().endswith('1 file changed, 1 of them changed here, too'), found.summary()\n"
    )


# -- refresh --------------------------------------------------------------------------------------------------------------------


def test_a_dry_run_of_refresh_tells_what_would_become_of_each_path(person: Person) -> None:
    write(person, "long", "".join(f"line {number}\n" for number in range(20)))
    commit(person, "long")
    person.elsewhere("create", "--name", "fix", "--base", "pinned", check=True)
    inside(person, "sed -i 's/line 1$/here/' long; echo here > mine; touch src/test_app.py; echo same > both")
    write(person, "long", (person.project / "long").read_text().replace("line 18\n", "there\n"))
    write(person, "both", "same\n")
    document = person.json("refresh", "--dry-run", "fix")
    assert document["refresh"] == {
        "kept": ["mine"],
        "merged": ["long"],
        "dropped": ["both"],
        "conflicts": [],
        "dry_run": True,
    }
    write(person, "mine", "there\n")
    write(person, "src/test_app.py", "there\n")
    done = person.elsewhere("refresh", "--dry-run", "fix")
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[0].startswith("   ! mine: ")
    document = person.json("refresh", "--dry-run", "fix")
    assert [one["reason"] for one in document["refresh"]["conflicts"]] == ["both_added"]
    assert document["refresh"]["dropped"] == ["both", "src/test_app.py"], "only touched: its copy would hide what is new"


def test_a_conflict_is_exit_code_three_and_nothing_was_done(person: Person) -> None:
    person.elsewhere("create", "--name", "fix", "--base", "pinned", check=True)
    inside(person, "echo here > README.md")
    write(person, "README.md", "there\n")
    before = person.json("inspect", "fix")["sandbox"]["base"]
    done = person.elsewhere("refresh", "fix")
    assert done.returncode == 3
    assert "   ! README.md: the sandbox and reality changed the same lines (text_conflict)\n" in done.stderr
    error = person.json("refresh", "fix")["error"]
    assert (error["code"], error["detail"]["conflicts"][0]["path"]) == ("refresh_conflict", "README.md")
    assert person.json("inspect", "fix")["sandbox"]["base"] == before
    assert person.elsewhere("exec", "fix", "--", "cat", "README.md").stdout == "here\n"
    assert (person.project / "README.md").read_text() == "there\n"


def test_a_commit_after_a_refresh_does_not_undo_what_reality_committed(person: Person) -> None:
    person.elsewhere("create", "--name", "fix", "--base", "pinned", check=True)
    inside(person, "echo here > mine; git status --short")
    for text in ("first", "second"):
        write(person, "README.md", f"{text}\n")
        commit(person, text)
        assert person.json("refresh", "fix")["refresh"]["dropped"] == [".git/index"]
    assert person.elsewhere("exec", "fix", "-c", "git status --short").stdout == "?? mine\n"
    inside(person, "git add mine")
    write(person, "README.md", "third\n")
    commit(person, "third")
    error = person.json("refresh", "fix")["error"]
    assert [(one["path"], one["reason"]) for one in error["detail"]["conflicts"]] == [(".git/index", "staged_here")]
    inside(person, "git -c user.name=s -c user.email=s@s commit -qm inside")
    assert person.elsewhere("exec", "fix", "-c", "git show --format= --name-only").stdout == "mine\n"
    assert person.json("refresh", "fix")["refresh"]["dropped"] == [], "it has a HEAD of its own now, and the index goes with that"
    assert person.elsewhere("exec", "fix", "-c", "git diff --cached --name-only").stdout == ""


def test_a_sandbox_with_a_disk_of_its_own_is_moved_too(root: Person) -> None:
    """Its layers lie in an image, which can be mounted only once."""
    root.json("create", "--name", "fix", "--base", "pinned", "--disk", "64M")
    inside(root, "echo here > new")
    (root.project / "README.md").write_text("reality\n")
    assert root.json("refresh", "fix", "--dry-run")["refresh"]["kept"] == ["new"]
    assert root.json("refresh", "fix")["refresh"]["kept"] == ["new"]
    assert root.elsewhere("exec", "fix", "--", "cat", "README.md", "new").stdout == "reality\nhere\n"
    root.elsewhere("stop", "fix", check=True)
    (root.project / "README.md").write_text("reality again\n")
    root.elsewhere("refresh", "fix", check=True)
    assert root.elsewhere("exec", "fix", "--", "cat", "README.md", "new").stdout == "reality again\nhere\n"
