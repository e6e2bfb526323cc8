"""What a sandbox starts from, from the front door: reality, the project at one moment, a commit; and reality's .git stays as it is."""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, eventually, plain, tree

pytestmark = pytest.mark.one_launcher


@pytest.fixture
def person(person: Person) -> Iterator[Person]:
    """Whoever makes sandboxes that stay removes them in the end."""
    yield person
    person.elsewhere("rm", "--all", "--force")


def create(person: Person, *arguments: str, **more: Any) -> dict[str, Any]:
    document = person.json("create", *arguments, **more)
    assert "sandbox" in document, document
    return document["sandbox"]


def inside(person: Person, box: str, line: str, **more: Any) -> str:
    done = person.elsewhere("exec", box, "-c", line, **more)
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


def error_of(person: Person, *arguments: str, code: int = 1, **more: Any) -> dict[str, Any]:
    done = person.elsewhere(arguments[0], "--json", *arguments[1:], **more)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    error = json.loads(done.stdout)["error"]
    assert error["hint"], error
    return error


def git(person: Person, *words: str, cwd: Path | None = None) -> str:
    line = ["git", "-c", "protocol.file.allow=always", "-c", "user.name=T", "-c", "user.email=t@example.org", *words]
    return person.shell(*line, cwd=cwd or person.project).stdout.strip()


def fingerprint(*places: Path) -> dict[str, tuple[object, ...]]:
    """Everything of a repository that a program could notice: names, types, modes, owners, times, contents. Directories, too: a
    lock file that came and went would show there."""
    found: dict[str, tuple[object, ...]] = {}
    for place in places:
        for directory, names, files in os.walk(place):
            for name in ("", *names, *files):
                path = os.path.join(directory, name)
                about = os.lstat(path)
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest() if stat.S_ISREG(about.st_mode) else ""
                found[path] = (
                    about.st_mode,
                    about.st_uid,
                    about.st_gid,
                    about.st_size,
                    about.st_mtime_ns,
                    about.st_ctime_ns,
                    content,
                )
    return found


def exercise(person: Person, box: str, work: str = "") -> None:
    """Everything that somebody does with a sandbox, git in it included."""
    inside(person, box, f"git status --porcelain; git log --oneline -n 1 || true; git branch made || true; {work} echo x > made; "
           "git add -A; git -c user.name=T -c user.email=t@e.org commit -qm made; git gc -q || true")  # fmt: skip
    person.json("diff", box)
    person.json("inspect", box)
    person.json("cp", "README.md", f"{box}:copied", cwd=person.project)
    person.json("stop", box)
    person.json("start", box)
    person.json("list")
    person.json("requests")
    person.json("rm", "--force", box)


# -- pinned ---


@pytest.mark.own_launcher
def test_what_reality_does_later_does_not_show_in_a_pinned_sandbox(person: Person) -> None:
    project = person.project
    pinned = create(person, "--base", "pinned")
    live = create(person, "--base", "live")["id"]
    assert (pinned["base"]["kind"], pinned["base"]["files"] > 0) == ("pinned", True)
    box = pinned["id"]
    script = (
        "echo changed > README.md; rm src/app.py; echo new > new; mv .env .env2; chmod 600 .gitignore; rm link; mkdir link;"
        " git add -A; git commit -qm later"
    )
    person.shell("sh", "-c", script, cwd=project)
    look = "cat README.md src/app.py .env; test ! -e new; readlink link; stat -c %a .gitignore; git log --oneline | wc -l"
    expected = "# a project\ndef add(a, b):\n    return a + b\nKEY=value\nREADME.md\n644\n1\n"
    assert inside(person, box, look) == expected
    assert plain(person.json("diff", box)["changes"]) == {"added": [], "modified": [], "deleted": []}
    assert inside(person, live, "cat README.md new") == "changed\nnew\n"
    person.json("stop", box)
    assert inside(person, box, look) == expected
    # The next one has only what changed since.
    again = create(person, "--base", "pinned")
    assert (
        inside(person, again["id"], "cat README.md new; test ! -e src/app.py && stat -c %a .gitignore") == "changed\nnew\n600\n"
    )
    assert again["base"]["copied_files"] < again["base"]["files"]
    assert inside(person, box, look) == expected
    assert plain(person.json("diff", again["id"])["changes"]) == {"added": [], "modified": [], "deleted": []}
    # And what a sandbox does is its own.
    inside(person, again["id"], "echo mine > README.md; rm new")
    assert (project / "README.md").read_text() == "changed\n"
    assert inside(person, box, look) == expected
    third = create(person, "--base", "pinned")["id"]
    assert inside(person, third, "cat README.md new") == "changed\nnew\n"


def test_auto_is_pinned_where_that_is_cheap_and_says_when_it_is_not(person: Person) -> None:
    assert create(person)["base"]["kind"] == "pinned"
    assert create(person, "--base", "auto")["base"]["kind"] == "pinned"
    other = person.place / "big"
    other.mkdir()
    (other / "small").write_text("small")
    person.own(other)
    with open(other / "data", "wb") as stream:
        stream.writelines(os.urandom(1 << 20) for _ in range(9))
        stream.truncate(2 << 30)  # of no weight on the disk
    os.chown(other / "data", person.uid, person.uid)
    done = person.elsewhere("create", "--json", cwd=other)
    document = json.loads(done.stdout)["sandbox"]
    if document["base"]["kind"] == "live":
        assert "live base" in done.stderr
        assert document["base"]["manifest"] is True
    person.json("rm", document["id"])
    # What settings keep out of the copy counts for nothing, and shows as it is.
    (other / "elsewhere.toml").write_text('[base]\nlive = ["heavy/"]\n')
    (other / "heavy").mkdir()
    (other / "data").rename(other / "heavy" / "data")
    person.own(other)
    box = create(person, cwd=other)
    assert (box["base"]["kind"], box["base"]["bytes"] < 1 << 20) == ("pinned", True)
    (other / "heavy" / "later").write_text("later")
    (other / "small").write_text("changed")
    assert inside(person, box["id"], "cat heavy/later small; stat -c %s heavy/data; echo mine > heavy/mine", cwd=other) == (
        f"latersmall{2 << 30}\n"
    )
    assert not (other / "heavy" / "mine").exists()
    assert plain(person.json("diff", box["id"], cwd=other)["changes"]) == {"added": ["heavy/mine"], "modified": [], "deleted": []}
    person.json("stop", box["id"])
    assert inside(person, box["id"], "cat heavy/mine heavy/later small", cwd=other) == "mine\nlatersmall"
    for bad in ('["../up"]', '["/etc"]', '"heavy"', "[1]"):
        (other / "elsewhere.toml").write_text(f"[base]\nlive = {bad}\n")
        error = error_of(person, "create", "--base", "pinned", code=2, cwd=other)
        assert "elsewhere.toml" in error["message"] or bad.strip('[]"') in error["message"], error


def test_run_has_the_same_bases(person: Person) -> None:
    sha = git(person, "rev-parse", "HEAD")
    (person.project / "README.md").write_text("dirty")
    for arguments, kind, said in (
        ([], "live", "dirty"),
        (["--base", "pinned"], "pinned", "dirty"),
        (["--base-ref", sha], "commit", "# a project\n"),
    ):
        document = person.json("run", *arguments, "-c", "cat README.md; echo new > new")
        assert (document["sandbox"]["base"]["kind"], document["command"]["stdout"]) == (kind, said)
        assert document["changes"] == {"added": ["new"], "modified": [], "deleted": []}
        assert document["sandbox"]["base"]["head"] == sha


def test_the_same_from_a_program(person: Person) -> None:
    code = """
from elsewhere import ElsewhereError, Sandbox
for more, kind in (({'base': 'live'}, 'live'), ({'base': 'pinned'}, 'pinned'), ({}, 'pinned'), ({'base_ref': 'HEAD'}, 'commit')):
    with Sandbox.create(**more) as box:
        assert box.base['kind'] == kind, box.base
        assert box.run('cat README.md').check().stdout == '# a project\\n'
        assert not box.changes()
        box.run('git status --porcelain > ../status || git status --porcelain').check()
for more in ({'base': 'frozen'}, {'base_ref': 'no-such'}, {'base_ref': ''}, {'base_ref': '--help'}):
    try:
        Sandbox.create(**more)
    except ElsewhereError as error:
        print(error.code)
"""
    assert person.sdk(code).stdout.split() == ["bad_base", "base_ref_unknown", "base_ref_unknown", "base_ref_unknown"]


# -- commits ---


def test_a_commit_at_the_projects_own_path(person: Person) -> None:
    project = person.project
    first = git(person, "rev-parse", "HEAD")
    (project / "README.md").write_text("second\n")
    (project / "added").write_text("added\n")
    git(person, "add", "-A")
    git(person, "commit", "-qm", "second")
    git(person, "tag", "v2")
    git(person, "branch", "side", first)
    (project / "README.md").write_text("dirty\n")
    (project / "untracked").write_text("untracked\n")
    before, whole = fingerprint(project / ".git"), tree(project)
    for ref in (first, first[:10], first[:4], "HEAD~1", "side", "refs/heads/side"):
        box = create(person, "--base-ref", ref)
        assert (box["base"]["kind"], box["base"]["head"], box["base"]["ref"]) == ("commit", first, ref)
        assert box["identity"]["base_sha"] == first
        said = inside(
            person,
            box["id"],
            "cat README.md; ls; git rev-parse HEAD; git status --porcelain; git symbolic-ref -q HEAD || echo detached; git log --oneline --all | wc -l",
        )
        assert said == f"# a project\nREADME.md\nlink\nsrc\n{first}\ndetached\n2\n"
        assert plain(person.json("diff", box["id"])["changes"]) == {"added": [], "modified": [], "deleted": []}
        person.json("rm", box["id"])
    box = create(person, "--base-ref", "v2")["id"]
    assert inside(person, box, "cat README.md added; git status --porcelain") == "second\nadded\n"
    inside(person, box, "git checkout -q -b work; echo w > w; git add w; git -c user.name=T -c user.email=t@e.org commit -qm w")
    assert "w" in person.json("diff", box)["changes"]["added"]
    person.json("stop", box)
    assert inside(person, box, "git log --format=%s -n 1; git status --porcelain; cat w") == "w\nw\n"
    assert fingerprint(project / ".git") == before
    assert tree(project) == whole


def test_a_ref_that_means_nothing_or_too_much(person: Person) -> None:
    first = git(person, "rev-parse", "HEAD")
    (person.project / "README.md").write_text("second\n")
    git(person, "commit", "-qam", "second")
    git(person, "tag", "twice", first)
    git(person, "branch", "twice", "HEAD")
    before = fingerprint(person.project / ".git")
    for ref in ("no-such", "0" * 40, "f" * 12, "HEAD~99", "-x", "--all", "HEAD:README.md", "a b", "..", first + "0"):
        error = error_of(person, "create", f"--base-ref={ref}")
        assert (error["code"], repr(ref) in error["message"]) == ("base_ref_unknown", True), (ref, error)
    error = error_of(person, "create", "--base-ref", "twice", code=2)
    assert error["code"] == "base_ref_ambiguous"
    assert "refs/tags/twice" in error["message"]
    assert "refs/heads/twice" in error["message"]
    assert inside(person, create(person, "--base-ref", "refs/tags/twice")["id"], "cat README.md") == "# a project\n"
    assert person.json("list")["total"] == 1
    assert fingerprint(person.project / ".git") == before
    bare = person.place / "no-git"
    bare.mkdir()
    person.own(bare)
    assert error_of(person, "create", "--base-ref", "HEAD", code=2, cwd=bare)["code"] == "base_ref_without_git"


# -- repositories of every shape ---


@pytest.fixture
def shapes(person: Person) -> dict[str, Path]:
    """The repositories that people have: with submodules, linked worktrees, sparse, with borrowed objects, without a commit."""
    place = person.place / "shapes"
    place.mkdir()
    person.own(place)
    source = person.project
    (source / "big").mkdir()
    (source / "big" / "file").write_text("big\n")
    (source / "pointer.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (source / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    person.own(source)
    git(person, "add", "-A")
    git(person, "commit", "-qm", "second")
    made = {name: place / name for name in ("submodule", "worktree", "sparse", "alternates", "empty", "main")}
    git(person, "clone", "-q", str(source), str(made["submodule"]), cwd=place)
    git(person, "submodule", "add", "-q", str(source), "module", cwd=made["submodule"])
    git(person, "commit", "-qm", "module", cwd=made["submodule"])
    git(person, "clone", "-q", str(source), str(made["main"]), cwd=place)
    git(person, "worktree", "add", "-q", "-b", "linked", str(made["worktree"]), cwd=made["main"])
    git(person, "clone", "-q", "--no-checkout", str(source), str(made["sparse"]), cwd=place)
    git(person, "sparse-checkout", "set", "src", cwd=made["sparse"])
    git(person, "checkout", "-q", "main", cwd=made["sparse"])
    git(person, "clone", "-q", "--shared", str(source), str(made["alternates"]), cwd=place)
    made["empty"].mkdir()
    person.own(made["empty"])
    git(person, "init", "-q", ".", cwd=made["empty"])
    (made["empty"] / "file").write_text("file\n")
    person.own(made["empty"])
    for path in made.values():
        if (path / "README.md").exists():
            (path / "untracked").write_text("untracked\n")
            person.own(path / "untracked")
    return made


@pytest.mark.slow
def test_every_shape_of_repository_stays_as_it_is(person: Person, shapes: dict[str, Path]) -> None:
    before = fingerprint(person.project, *shapes.values())
    for name in ("submodule", "worktree", "sparse", "alternates"):
        project = shapes[name]
        for arguments in (["--base", "live"], ["--base", "pinned"], ["--base-ref", "HEAD"]):
            box = create(person, *arguments, cwd=project)
            status = inside(person, box["id"], "git status --porcelain; git rev-parse HEAD", cwd=project).splitlines()
            head = git(person, "--no-optional-locks", "rev-parse", "HEAD", cwd=project)
            assert status[-1] == head, (name, arguments, status)
            if arguments[0] == "--base-ref":
                assert status == [head], (name, status)
            else:
                assert "?? untracked" in status, (name, arguments, status)
                assert len(status) == 2, (name, arguments, status)
            inside(
                person,
                box["id"],
                "git checkout -q -b made; echo x > made; git add -A; git -c user.name=T -c user.email=t@e.org commit -qm made; git log --oneline -n 1",
                cwd=project,
            )
            assert "made" in person.json("diff", box["id"])["changes"]["added"]
            person.json("stop", box["id"])
            assert inside(person, box["id"], "git log --format=%s -n 1; cat made", cwd=project) == "made\nx\n"
            person.json("rm", "--force", box["id"])
    project = shapes["empty"]
    for arguments in (["--base", "live"], ["--base", "pinned"], []):
        box = create(person, *arguments, cwd=project)
        assert inside(person, box["id"], "cat file; git status --porcelain", cwd=project) == "file\n?? file\n"
        assert box["base"]["head"] is None
        inside(person, box["id"], "git add -A; git -c user.name=T -c user.email=t@e.org commit -qm made", cwd=project)
        person.json("rm", "--force", box["id"])
    assert error_of(person, "create", "--base-ref", "HEAD", cwd=project)["code"] == "base_ref_unknown"
    assert eventually(lambda: not list((person.state / "trash").iterdir()))
    assert fingerprint(person.project, *shapes.values()) == before


def test_reality_git_is_the_same_after_every_verb(person: Person) -> None:
    """With an index that git itself would like to refresh: files that were touched, and a hook that must never run."""
    project = person.project
    hook = project / ".git" / "hooks" / "post-index-change"
    hook.write_text(f"#!/bin/sh\ntouch {person.place}/hooked\n")
    hook.chmod(0o755)
    monitor = person.place / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {person.place}/monitored\n")
    monitor.chmod(0o755)
    git(person, "config", "core.fsmonitor", str(monitor))
    os.utime(project / "README.md")
    (project / "src" / "app.py").write_text("changed\n")
    person.own(project)
    for name in ("hooked", "monitored"):
        (person.place / name).unlink(missing_ok=True)
    before, whole = fingerprint(project / ".git"), tree(project)
    for arguments in (["--base", "live"], ["--base", "pinned"], [], ["--base-ref", "HEAD"]):
        box = create(person, *arguments)["id"]
        assert fingerprint(project / ".git") == before, arguments
        exercise(person, box, "git config core.fsmonitor false;")
        assert fingerprint(project / ".git") == before, arguments
    person.json("run", "-c", "git commit -qam x")
    person.sdk("from elsewhere import Sandbox\nwith Sandbox.create(base_ref='HEAD') as box: box.run('git status'); box.changes()")
    assert fingerprint(project / ".git") == before
    assert tree(project) == whole
    assert not (person.place / "hooked").exists()
    assert not (person.place / "monitored").exists()
