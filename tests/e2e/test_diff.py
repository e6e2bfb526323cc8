"""`elsewhere diff`: what changed, in every shape, and that git makes the same of it."""

import base64
import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import Person

pytestmark = pytest.mark.one_launcher


def on_a_terminal(person: Person, *argv: str) -> str:
    master, slave = os.openpty()
    standard = {"stdin": slave, "stdout": slave, "stderr": slave, "cwd": person.project, "env": person.environment()}
    process = subprocess.Popen(argv, start_new_session=True, **standard, **person.identity())
    os.close(slave)
    seen = b""
    with open(master, "rb", buffering=0) as stream, contextlib.suppress(OSError):  # nobody has the other side open any more
        while piece := stream.read(65536):
            seen += piece
    assert process.wait(60) == 0
    return seen.decode(errors="replace").replace("\r\n", "\n")


EMPTY = {"added": [], "modified": [], "deleted": [], "renamed": [], "modes": [], "links": [], "types": []}
WORK = (
    "rm README.md; mkdir -p a/b; echo x > a/b/c; echo '# more' >> src/app.py; mv src/test_app.py src/checks.py; "
    "chmod 755 .gitignore; ln -sfn src link; printf '\\0\\1' > blob; cp blob blob2; rm blob2"
)


def describe(top: Path) -> dict[str, object]:
    """Files and links of a tree, less git's own."""
    found: dict[str, object] = {}
    for directory, names, files in os.walk(top):
        if ".git" in names:
            names.remove(".git")
        for name in names + files:
            path = Path(directory, name)
            if path.is_symlink():
                found[str(path.relative_to(top))] = os.readlink(path)
            elif path.is_file():
                found[str(path.relative_to(top))] = (bool(path.stat().st_mode & 0o100), path.read_bytes())
    return found


def raw(person: Person, *arguments: str) -> bytes:
    """What the command writes, byte for byte."""
    done = subprocess.run(
        person.command(*arguments),
        cwd=person.project,
        env=person.environment(),
        capture_output=True,
        timeout=110,
        **person.identity(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def applied(person: Person, patch: bytes) -> Path:
    """What git makes of the project with it, beside the project."""
    target = person.place / "applied"
    person.shell("cp", "-a", str(person.project), str(target))
    file = person.place / "made.patch"
    file.write_bytes(patch)
    person.shell("git", "apply", "--binary", "--whitespace=nowarn", str(file), cwd=target)
    return target


def inside(person: Person, box: str) -> dict[str, object]:
    """The project's tree as the sandbox has it."""
    target = person.place / "inside"
    target.mkdir()
    person.own(target)
    person.elsewhere("cp", f"{box}:.", str(target / "copy"), check=True)
    return describe(target / "copy")


def test_every_kind_of_change_is_told(person: Person) -> None:
    person.json("run", "-c", WORK)
    document = person.json("diff", "@last")
    assert document["changes"] == {
        "added": ["a/b/c", "blob"],
        "modified": [".gitignore", "link", "src/app.py"],
        "deleted": ["README.md"],
        "renamed": [{"from": "src/test_app.py", "to": "src/checks.py"}],
        "modes": [{"path": ".gitignore", "from": "0644", "to": "0755"}],
        "links": [{"path": "link", "from": "README.md", "to": "src"}],
        "types": [],
    }
    assert (document["from"], document["to"], document["git"]) == ("base", "now", {"files": 0})
    words = person.elsewhere("diff", "@last").stdout
    assert "   + a/b/c\n" in words
    assert "   ~ .gitignore (mode 644 → 755)\n" in words
    assert "   ~ link (link README.md → src)\n" in words
    assert "   > src/checks.py (was src/test_app.py)\n" in words
    assert "2 added, 3 modified, 1 deleted, 1 renamed\n" in words


def test_what_was_done_and_undone_is_nothing(person: Person) -> None:
    person.json(
        "run", "--keep", "-c", "cp README.md x; cat x > README.md; rm x; chmod 600 .env; chmod 644 .env; touch src/app.py"
    )
    document = person.json("diff", "@last")
    assert document["changes"] == EMPTY
    assert person.elsewhere("diff", "@last").stdout == "nothing changed\n"
    assert raw(person, "diff", "@last", "--patch") == b""


def test_a_patch_gives_git_the_same_tree(person: Person) -> None:
    box = person.json("create", "--base", "live")["sandbox"]["id"]
    odd = "new\nline", "tab\t", 'quo"te', "-dash", "two words", os.fsdecode(b"\xff")
    make = f"for name in {odd!r}:\n    open(name, 'w').write(name.replace(chr(0xdcff), 'f'))\n"
    person.elsewhere("exec", box, "--", person.python, "-I", "-c", make, check=True)
    work = f"{WORK}; git add -A; git commit -qm inside; echo later > later; rm .env; printf 'no end' > src/app.py; mkdir d; mv a/b d; rmdir a"
    person.elsewhere("exec", box, "-c", work, check=True)
    document = person.json("diff", box)
    assert document["git"]["files"] > 5, "commits made inside"
    assert not [path for kind in ("added", "modified", "deleted") for path in document["changes"][kind] if ".git/" in str(path)]
    patch = raw(person, "diff", box, "--patch")
    told = person.json("diff", "--patch", box)
    assert told["left_out"] == []
    assert base64.b64decode(told["patch_b64"]) == patch if told["patch_b64"] else told["patch"].encode() == patch
    assert describe(applied(person, patch)) == inside(person, box)
    assert list((person.state / "sandboxes" / box).glob("patch-*")) == []


def test_a_repository_that_lies_elsewhere_is_gits_as_well(person: Person) -> None:
    """Of a linked worktree."""
    tree = person.place / "tree"
    person.shell("git", "worktree", "add", "-q", str(tree), cwd=person.project)
    box = person.json("create", "--base", "live", "--project", str(tree))["sandbox"]["id"]
    person.elsewhere("exec", box, "-c", "echo 1 > new; git add new; git commit -qm inside", check=True)
    document = person.json("diff", box)
    assert document["changes"]["added"] == ["new"]
    assert document["git"]["files"] > 3
    assert document["outside"]["added"] == []


def test_a_patch_of_a_pinned_sandbox_is_one_for_its_base(person: Person) -> None:
    box = person.json("create", "--base", "pinned")["sandbox"]["id"]
    person.elsewhere("exec", box, "-c", WORK, check=True)
    before = person.place / "before"
    person.shell("cp", "-a", str(person.project), str(before))
    (person.project / "README.md").write_text("reality went on\n")
    (person.project / "new").write_text("reality went on\n")
    patch = raw(person, "diff", box, "--patch")
    assert b"reality went on" not in patch
    expected = inside(person, box)
    (person.place / "project").rename(person.place / "went-on")
    before.rename(person.place / "project")
    assert describe(applied(person, patch)) == expected


def test_nothing_of_the_sandbox_is_executed_for_a_patch(person: Person) -> None:
    mark = person.place / "executed"
    config = f'git config diff.external "touch {mark}"; git config diff.evil.textconv "touch {mark};cat"; git config core.fsmonitor "touch {mark}"'
    config += f'; git config filter.evil.clean "touch {mark};cat"; git config core.pager "touch {mark}"'
    person.json(
        "run",
        "--keep",
        "-c",
        f"{config}; echo '* diff=evil filter=evil text eol=crlf' > .gitattributes; printf 'a\\r\\n' > new; echo 2 >> README.md",
    )
    patch = raw(person, "diff", "@last", "--patch")
    assert b"+a\r\n" in patch
    assert person.json("diff", "--stat", "@last")["stat"]
    assert not mark.exists()


def test_the_shapes_of_the_document(person: Person) -> None:
    person.json("run", "-c", WORK)
    plain = person.json("diff", "@last")
    stat = person.json("diff", "--stat", "@last")
    names = person.json("diff", "--name-only", "@last")
    patch = person.json("diff", "--patch", "@last")
    assert names.pop("names") == [".gitignore", "README.md", "a/b/c", "blob", "link", "src/app.py", "src/checks.py"]
    told = {one["path"]: one for one in stat.pop("stat")}
    assert told["src/app.py"] == {
        "path": "src/app.py", "change": "modified", "binary": False,
        "lines_added": 1, "lines_deleted": 0, "bytes_before": 32, "bytes_after": 39,
    }  # fmt: skip
    assert (told["blob"]["binary"], told["blob"]["lines_added"], told["blob"]["bytes_after"]) == (True, None, 2)
    assert told["src/checks.py"]["change"] == "renamed"
    assert "diff --git a/README.md b/README.md" in patch.pop("patch")
    assert (patch.pop("patch_b64"), patch.pop("left_out")) == (None, [])
    assert plain == stat == names == patch


def test_the_shapes_for_people(person: Person) -> None:
    person.json("run", "-c", WORK)
    stat = person.elsewhere("diff", "@last", "--stat").stdout.splitlines()
    assert "   a/b/c         | 1 +" in stat
    assert "   README.md     | 1 -" in stat
    assert "   blob          | binary, nothing → 2 B" in stat
    assert "   src/checks.py | 0 (renamed)" in stat
    assert any(line.startswith("7 files, ") for line in stat)
    assert person.elsewhere("diff", "@last", "--name-only").stdout.splitlines()[:2] == [".gitignore", "README.md"]
    for pair in (("--stat", "--patch"), ("--patch", "--name-only")):
        assert person.elsewhere("diff", "@last", *pair).returncode == 2


def test_a_patch_on_a_terminal_is_coloured_and_harmless(person: Person) -> None:
    person.json(
        "run", "-c", "printf 'bad \\033[2J\\n' > new; printf '%s\\n' '--- looks like a head' > other; echo 1 >> README.md"
    )
    person.extra["TERM"] = "xterm"
    seen = on_a_terminal(person, *person.command("diff", "@last", "--patch"))
    assert "\x1b[32m+1\x1b[0m" in seen
    assert "\x1b[1m+++ b/new\x1b[0m" in seen
    assert "\x1b[32m+bad \\x1b[2J\x1b[0m" in seen
    assert "\x1b[32m+--- looks like a head\x1b[0m" in seen
    person.extra["NO_COLOR"] = "1"
    assert "\x1b" not in on_a_terminal(person, *person.command("diff", "@last", "--patch"))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*.py"], ["src/a.py", "src/sub/b.py", "top.py"]),
        (["src"], ["src/a.py", "src/c.txt", "src/sub/b.py"]),
        (["src/*.py"], ["src/a.py"]),
        (["src/**/*.py"], ["src/a.py", "src/sub/b.py"]),
        (["**/b.py", "top.*"], ["src/sub/b.py", "top.py"]),
        (["./src/sub/"], ["src/sub/b.py"]),
        (["sr?/[ab].py"], ["src/a.py"]),
        (["nothing"], []),
    ],
)
def test_patterns_choose_paths(user: Person, patterns: list[str], expected: list[str]) -> None:
    user.json("run", "-c", "mkdir -p src/sub; for f in src/a.py src/c.txt src/sub/b.py top.py; do echo 1 > $f; done")
    assert user.json("diff", "--name-only", "@last", *patterns)["names"] == expected
    assert user.json("diff", "@last", *patterns)["changes"]["added"] == expected
    assert raw(user, "diff", "@last", "--patch", *patterns).count(b"diff --git") == len(expected)


def test_a_pattern_that_makes_no_sense_is_an_error(user: Person) -> None:
    user.json("run", "--keep", "--", "true")
    assert user.json("diff", "@last", "[z-a]")["error"]["code"] == "bad_pattern"


# -- between states -------------------------------------------------------------------------------------------------------------


def test_two_sandboxes_are_compared_with_each_other(person: Person) -> None:
    for name, work in (
        ("one", "echo 1 > both; echo a > same; echo 1 > mine; rm README.md"),
        ("two", "echo 2 > both; echo a > same; chmod 755 .env"),
    ):
        person.json("create", "--name", name, "--base", "live")
        person.elsewhere("exec", name, "-c", work, check=True)
    document = person.json("diff", "two", "--from", "one")
    assert {key: value for key, value in document["changes"].items() if value} == {
        "added": ["README.md"],
        "modified": [".env", "both"],
        "deleted": ["mine"],
        "modes": [{"path": ".env", "from": "0644", "to": "0755"}],
    }
    assert document["from"] == "one"
    back = person.json("diff", "one", "--from", "two:now", "--to", "now")["changes"]
    assert (back["added"], back["deleted"]) == (["mine"], ["README.md"])
    assert person.json("diff", "one", "--from", "two:base", "--to", "base")["changes"] == EMPTY
    reverse = person.json("diff", "one", "--from", "now", "--to", "base")["changes"]
    assert (reverse["added"], reverse["deleted"]) == (["README.md"], ["both", "mine", "same"])


def test_sandboxes_with_different_bases_are_compared_whole(person: Person) -> None:
    person.json("create", "--name", "one", "--base", "pinned")
    (person.project / "later").write_text("later\n")
    person.own(person.project)
    person.json("create", "--name", "two", "--base", "pinned")
    person.elsewhere("exec", "two", "-c", "echo 1 > mine", check=True)
    document = person.json("diff", "two", "--from", "one")
    assert document["changes"]["added"] == ["later", "mine"]
    assert document["changes"]["deleted"] == []
    assert person.json("diff", "two")["changes"]["added"] == ["mine"]


def test_a_state_that_is_not_there_is_an_error_that_names_it(user: Person) -> None:
    user.json("run", "--keep", "--", "true")
    assert user.json("diff", "@last", "--from", "no-such")["error"]["code"] == "state_not_found"
    assert user.json("diff", "@last", "--from", "@last:no-such")["error"]["code"] == "snapshot_not_found"
    other = user.place / "other"
    other.mkdir()
    user.own(other)
    made = user.json("create", "--base", "live", "--project", str(other))["sandbox"]["id"]
    assert user.json("diff", made, "--from", user.json("list")["sandboxes"][-1]["id"])["error"]["code"] == "other_project"


def test_states_of_one_sandbox_are_compared(person: Person) -> None:
    box = person.json("create", "--base", "live")["sandbox"]["id"]
    person.elsewhere("exec", box, "-c", "echo 1 > first; mkdir d; echo 1 > d/x; rm README.md; mv src lib", check=False)
    person.elsewhere("snapshot", box, "saved", check=True)
    person.elsewhere("exec", box, "-c", "echo 2 > second; rm first; mv d e", check=True)
    expected: Any = person.json("diff", box, "--from", "saved")["changes"]
    assert expected["added"] == ["second"]
    assert expected["deleted"] == ["first"]
    assert expected["renamed"] == [{"from": "d/x", "to": "e/x"}]
    at = person.json("diff", box, "--to", "saved")["changes"]
    assert {"first", "d/x"} <= set(at["added"])
    assert "README.md" in at["deleted"]
    whole = person.json("diff", box)["changes"]
    assert "second" in whole["added"]
    assert "first" not in json.dumps(whole)
    patch = raw(person, "diff", box, "--patch")
    assert describe(applied(person, patch)) == inside(person, box)


# -- outside the project --------------------------------------------------------------------------------------------------------


def test_what_lies_outside_is_apart_and_named(root: Person) -> None:
    root.json("run", "-c", "mkdir -p /etc; echo e > /etc/elsewhere-test.conf; echo u > /usr/local/elsewhere-test; echo x > x")
    document = root.json("diff", "@last")
    assert document["changes"]["added"] == ["x"]
    assert document["outside"]["added"] == ["/etc/elsewhere-test.conf", "/usr/local/elsewhere-test"]
    assert document["outside"]["configuration"] == ["/etc/elsewhere-test.conf"]
    words = root.elsewhere("diff", "@last").stdout
    assert words.index("+ x") < words.index("outside the project") < words.index("+ /etc/elsewhere-test.conf")
    assert "1 added; outside the project: 2 added" in words
    assert root.json("diff", "@last", "/etc/*")["outside"]["added"] == ["/etc/elsewhere-test.conf"]
    assert b"elsewhere-test" not in raw(root, "diff", "@last", "--patch")


def test_packages_are_told_by_their_names(root: Person) -> None:
    place = "/usr/local/lib/python3.99/site-packages"
    pip = f"mkdir -p {place}/foo-1.2.dist-info {place}/foo; echo 1 > {place}/foo/a.py; "
    pip += f"printf 'foo/a.py,,\\nfoo-1.2.dist-info/RECORD,,\\n../../../bin/foo-tool,,\\n' > {place}/foo-1.2.dist-info/RECORD; echo 1 > /usr/local/bin/foo-tool; "
    npm = 'mkdir -p /usr/local/lib/node_modules/left/lib; echo \'{"version": "3.0.0"}\' > /usr/local/lib/node_modules/left/package.json; echo 1 > /usr/local/lib/node_modules/left/lib/x.js'
    root.json("run", "-c", pip + npm)
    document = root.json("diff", "@last")
    assert document["outside"]["packages"] == [
        {"manager": "npm", "name": "left", "before": None, "after": "3.0.0", "files": 2},
        {"manager": "pip", "name": "foo", "before": None, "after": "1.2", "files": 3},
    ]
    words = root.elsewhere("diff", "@last").stdout
    assert "   pip: foo 1.2 installed, 3 files\n" in words
    assert "a.py" not in words


# -- Python ---------------------------------------------------------------------------------------------------------------------


def test_changes_of_python(person: Person) -> None:
    assert person.project
    person.sdk(
        """if True:
        import subprocess
        from elsewhere import Sandbox

        with Sandbox.create(".") as box:
            box.run("mv src/app.py src/new.py; echo 1 >> README.md; chmod 755 .env; printf '\\\\0' > blob").check()
            found = box.changes()
            assert [path.rpartition("/")[2] for path in found.added] == ["blob"]
            assert [tuple(path.rpartition("/")[2] for path in pair) for pair in found.renamed] == [("app.py", "new.py")]
            assert found.summary() == "1 added, 2 modified, 1 renamed"
            kinds = {one.path.rpartition("/")[2]: (one.kind, one.what) for one in found.entries}
            assert kinds[".env"] == ("modified", ("mode",))
            assert kinds["README.md"] == ("modified", ("content",))
            patch = found.patch()
            assert b"+1" in patch
            subprocess.run(["git", "apply", "--check", "--binary"], input=patch, check=True)
            lines = {one.path.rpartition("/")[2]: one.lines_added for one in found.stat()}
            assert lines == {".env": 0, "README.md": 1, "blob": None, "new.py": 0}
            assert not box.changes(since="now")
        """
    )
