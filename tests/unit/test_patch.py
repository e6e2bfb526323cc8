"""The patch: whatever changed, git makes the same tree of it; and nothing in a tree can change how it is made."""

import os
import random
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from elsewhere.changes import patch
from elsewhere.changes.compare import compare_trees
from elsewhere.changes.model import Changes
from elsewhere.changes.renames import with_renames
from elsewhere.errors import ElsewhereError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

CLEAN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
ODD = [
    "new\nline",
    "tab\there",
    'quo"te',
    "back\\slash",
    os.fsdecode(b"\xff\xfe"),
    "-dash",
    " ",
    "two words",
    "日本",
    "a\x1b[2J",
    "trailing ",
]


def grow(top: Path, tree: dict[str, bytes | str | tuple[bytes, int] | None]) -> Path:
    """bytes: a file; (bytes, mode): a file with a mode; str: a link that leads there; None: a directory."""
    top.mkdir(parents=True, exist_ok=True)
    for name, entry in tree.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry is None:
            path.mkdir()
        elif isinstance(entry, str):
            path.symlink_to(entry)
        else:
            content, mode = entry if isinstance(entry, tuple) else (entry, 0o644)
            path.write_bytes(content)
            path.chmod(mode)
    return top


def describe(top: Path) -> dict[str, object]:
    """What git knows of a tree, less its own files."""
    found: dict[str, object] = {}
    for directory, names, files in os.walk(top):
        if ".git" in names:
            names.remove(".git")
        for name in names + files:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                found[str(path.relative_to(top))] = os.readlink(path)
            elif stat.S_ISREG(mode):
                found[str(path.relative_to(top))] = (bool(mode & 0o100), path.read_bytes())
    return found


def compared(before: Path, after: Path) -> Changes:
    found = compare_trees(str(after), str(before), "/project")
    found.project = "/project"
    return found


def apply(text: bytes, base: Path, target: Path) -> Path:
    """What git makes of the base."""
    shutil.copytree(base, target, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    subprocess.run(["git", "init", "-q", "."], cwd=target, env=CLEAN, check=True)
    if text:
        done = subprocess.run(
            ["git", "apply", "--binary", "--whitespace=nowarn"], cwd=target, env=CLEAN, input=text, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace") + text.decode(errors="replace")
    return target


TEXT = b"".join(b"line %d\n" % number for number in range(40))
CASES = {
    "nothing": ({"a": b"1"}, {"a": b"1"}),
    "untracked": ({}, {"new": b"x\n", "d/e/f": b"y\n"}),
    "deleted": ({"a": b"1\n", "d/b": b"2\n"}, {}),
    "edited": ({"a": TEXT}, {"a": TEXT.replace(b"line 20\n", b"another\n")}),
    "binary": ({"a": bytes(range(256)) * 4}, {"a": bytes(reversed(range(256))) * 5, "b": b"\0\1\2", "c": b"\0" * 70000}),
    "text to binary": ({"a": b"text\n"}, {"a": b"\0\0"}),
    "executable": (
        {"a": (b"1\n", 0o644), "b": (b"2\n", 0o755)},
        {"a": (b"1\n", 0o755), "b": (b"3\n", 0o644), "c": (b"n\n", 0o755)},
    ),
    "links": ({"a": "one", "b": "gone"}, {"a": "two", "c": "/nonexistent/there", "d": "../../up"}),
    "file to link": ({"a": b"1\n"}, {"a": "there"}),
    "link to file": ({"a": "there"}, {"a": b"1\n"}),
    "file to directory": ({"a": b"1\n"}, {"a/b": b"2\n", "a/c": b"1\n"}),
    "directory to file": ({"a/b": b"2\n", "a/c/d": b"1\n"}, {"a": b"1\n"}),
    "link to directory": ({"a": "there", "there/x": b"1"}, {"a/x": b"2", "there/x": b"1"}),
    "no final newline": ({"a": b"1\n2", "b": b"1\n", "c": b"1"}, {"a": b"1\n3", "b": b"1", "c": b"1\n"}),
    "empty": ({"a": b"", "b": b"x"}, {"b": b"", "c": b""}),
    "carriage returns": ({"a": b"1\r\n2\r\n", "b": b"1\n"}, {"a": b"1\r\n3\r\n", "b": b"1\r\n"}),
    "odd names": ({f"old/{name}": b"1\n" for name in ODD}, {f"new/{name}": b"2\n" for name in ODD} | {ODD[0]: b"x"}),
    "odd names edited": (dict.fromkeys(ODD, TEXT), dict.fromkeys(ODD, TEXT + b"more\n")),
    "like a patch": ({"a": b"x\n"}, {"a": b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\nGIT binary patch\n"}),
    "identifiers": ({"a": b"$Id$\n"}, {"a": b"$Id: 0123 $\n", ".gitattributes": b"* ident\n"}),
}


@pytest.mark.parametrize("case", CASES)
def test_git_makes_the_same_tree_of_a_patch(place: Path, case: str) -> None:
    before, after = (grow(place / name, tree) for name, tree in zip(("before", "after"), CASES[case], strict=True))
    found = compared(before, after)
    made = patch.patch(found)
    assert made.left_out == []
    assert describe(apply(made.text, before, place / "applied")) == describe(after)
    again = patch.patch(with_renames(found))
    assert describe(apply(again.text, before, place / "again")) == describe(after), "with renames told as such"


def test_there_is_no_patch_of_nothing(place: Path) -> None:
    assert patch.patch(Changes()) == patch.Patch(b"", [])


NAMES = ["a", "b", "c.txt", "d", *ODD[:6]]
CONTENTS = [b"", b"one\n", b"two", TEXT, b"\0\xff" * 100, b"a\r\nb\r\n", TEXT + b"end"]


def operate(top: Path, chance: random.Random, count: int) -> None:
    for _ in range(count):
        directories = [top, *(path for path in top.rglob("*") if path.is_dir() and not path.is_symlink())]
        path = chance.choice(directories) / chance.choice(NAMES)
        there = os.path.lexists(path)
        folder = path.is_dir() and not path.is_symlink()
        match chance.randrange(8):
            case 0 | 1 if not folder and not path.is_symlink():
                path.write_bytes(chance.choice(CONTENTS))
            case 2 if not there:
                path.mkdir()
            case 3 if not there:
                path.symlink_to(chance.choice(["a", "../b", "/nonexistent/there", "missing"]))
            case 4 if there and not folder and not path.is_symlink():
                path.chmod(chance.choice([0o644, 0o755]))
            case 5 | 6 if there:
                shutil.rmtree(path) if folder else path.unlink()
            case 7 if there:
                other = chance.choice(directories) / chance.choice(NAMES)
                if not os.path.lexists(other) and not other.is_relative_to(path):
                    path.rename(other)


@pytest.mark.parametrize("seed", range(60))
def test_git_makes_the_same_tree_after_random_operations(place: Path, seed: int) -> None:
    chance = random.Random(seed)
    before = grow(place / "before", {})
    operate(before, chance, 60)
    after = place / "after"
    shutil.copytree(before, after, symlinks=True)
    operate(after, chance, chance.choice([1, 5, 60]))
    _without_empty_directories(before)
    _without_empty_directories(after)
    found = compared(before, after)
    assert describe(apply(found.patch(), before, place / "applied")) == describe(after)


def _without_empty_directories(top: Path) -> None:
    """Which git cannot make, and which are in its way."""
    for directory, _, _ in os.walk(top, topdown=False):
        if not os.listdir(directory) and Path(directory) != top:
            os.rmdir(directory)


# -- nothing of anybody else takes part -----------------------------------------------------------------------------------------

HOSTILE_ATTRIBUTES = (
    b"* text=auto eol=crlf ident diff=evil filter=evil merge=evil working-tree-encoding=UTF-16\n*.txt -diff binary\n"
)


def test_attributes_and_configuration_of_a_tree_take_no_part(place: Path) -> None:
    mark = place / "executed"
    config = f'[diff]\n\texternal = touch {mark}\n[diff "evil"]\n\ttextconv = touch {mark};cat\n\tcommand = touch {mark}\n'
    config += f'[filter "evil"]\n\tclean = touch {mark}; cat\n\tsmudge = touch {mark}; cat\n[core]\n\tfsmonitor = touch {mark}\n'
    own = {".git/config": config.encode(), ".git/HEAD": b"ref: refs/heads/main\n", ".git/objects/x": b"", ".git/refs/x": b""}
    own |= {".git/info/attributes": HOSTILE_ATTRIBUTES}
    before = grow(place / "before", {"a.txt": b"1\r\n$Id$\n", "b": b"1\n", ".gitattributes": HOSTILE_ATTRIBUTES, **own})
    now = {"a.txt": b"2\r\n$Id: x $\n", "b": b"2\n", "c/.gitattributes": HOSTILE_ATTRIBUTES, "c/d.txt": b"3\r\n"}
    after = grow(place / "after", {".gitattributes": HOSTILE_ATTRIBUTES + b"#\n", **now, **own, ".git/new": b"n"})
    done = subprocess.run(["git", "diff", "--no-index", "before/a.txt", "after/a.txt"], cwd=before.parent, capture_output=True)
    assert done.returncode == 1
    found = compared(before, after)
    made = patch.patch(found)
    assert b"-1\r\n" in made.text, "no content is converted, and text stays text"
    assert b".git/" not in made.text
    assert patch.stat(found)
    assert not mark.exists()
    assert describe(_plainly_applied(made.text, before, place / "applied")) == describe(after)


def _plainly_applied(text: bytes, base: Path, target: Path) -> Path:
    """Where attributes of the tree do not count either: outside a repository, git apply is plain."""
    shutil.copytree(base, target, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    environment = CLEAN | {"GIT_CEILING_DIRECTORIES": str(target.parent), "GIT_DIR": "/nonexistent"}
    (target / ".gitattributes").rename(target / "aside")
    text = text.replace(b" a/.gitattributes b/.gitattributes", b" a/aside b/aside")
    text = text.replace(b"--- a/.gitattributes", b"--- a/aside").replace(b"+++ b/.gitattributes", b"+++ b/aside")
    done = subprocess.run(["git", "apply", "--binary"], cwd=target, env=environment, input=text, capture_output=True)
    assert done.returncode == 0, done.stderr
    (target / "aside").rename(target / ".gitattributes")
    return target


@pytest.mark.parametrize(
    "variable", ["GIT_EXTERNAL_DIFF", "GIT_CONFIG_COUNT", "GIT_DIFF_OPTS", "GIT_DIR", "GIT_OBJECT_DIRECTORY"]
)
def test_the_environment_takes_no_part(place: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    mark = place / "executed"
    monkeypatch.setenv(variable, "1" if variable == "GIT_CONFIG_COUNT" else f"touch {mark}")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.external")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"touch {mark}")
    before, after = grow(place / "before", {"a": TEXT}), grow(place / "after", {"a": TEXT + b"x\n"})
    assert b"+x\n" in compared(before, after).patch()
    assert not mark.exists()


def test_nothing_is_left_behind(place: Path) -> None:
    scratch = grow(place / "scratch", {})
    found = compared(grow(place / "before", {"a": b"1"}), grow(place / "after", {"a": b"2"}))
    found.scratch = str(scratch)
    open_before = len(os.listdir("/proc/self/fd"))
    assert found.patch()
    assert found.stat()
    assert os.listdir(scratch) == []
    assert len(os.listdir("/proc/self/fd")) == open_before


# -- what cannot be in it -------------------------------------------------------------------------------------------------------


def test_what_git_cannot_carry_is_told(place: Path) -> None:
    before = grow(place / "before", {"closed": (b"1\n", 0o644), "d/x": b"1"})
    after = grow(
        place / "after", {"closed": (b"1\n", 0o600), "d/x": b"1", "empty": None, ".GIT/x": b"1", "git~1": b"2", "ok": b"\n"}
    )
    (after / "d").chmod(0o700)
    os.mkfifo(after / "fifo")
    made = patch.patch(compared(before, after))
    assert [Path(one.path).name for one in made.left_out] == ["x", "closed", "d", "empty", "fifo", "git~1"]
    assert all(one.why for one in made.left_out)
    assert sorted(describe(apply(made.text, before, place / "applied"))) == ["closed", "d/x", "ok"]


def test_only_what_lies_in_the_project_is_in_it(place: Path) -> None:
    found = compare_trees(
        str(grow(place / "after", {"p/a": b"1\n", "px": b"2\n", "q": b"3\n"})), str(grow(place / "before", {})), "/"
    )
    found.project = "/p"
    assert found.patch().count(b"diff --git") == 1
    assert [one.path for one in found.stat()] == ["/p/a"]


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(place: Path) -> None:
    after = grow(place / "after", {"gone": b"1\n"})
    found = compared(grow(place / "before", {}), after)
    (after / "gone").unlink()
    (after / "gone").symlink_to("/dev/null")
    with pytest.raises(ElsewhereError) as error:
        found.patch()
    assert error.value.code == "unreadable_change"
    assert error.value.detail == {"path": "/project/gone"}


def test_a_file_that_is_too_large_is_an_error_that_names_it(place: Path) -> None:
    after = grow(place / "after", {"large": b""})
    os.truncate(after / "large", patch._LARGEST + 1)
    found = compared(grow(place / "before", {}), after)
    with pytest.raises(ElsewhereError) as error:
        found.patch()
    assert error.value.code == "too_large_for_patch"
    assert found.stat() == [patch.FileStat("/project/large", "added", None, None, None, patch._LARGEST + 1)]


def test_without_git_a_patch_is_refused_and_bytes_are_counted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(grow(place / "before", {"a": b"1"}), grow(place / "after", {"a": b"22"}))
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(ElsewhereError) as error:
        found.patch()
    assert error.value.code == "git_missing"
    assert found.stat() == [patch.FileStat("/project/a", "modified", None, None, 1, 2)]


# -- numbers --------------------------------------------------------------------------------------------------------------------


def test_lines_are_counted_in_text_and_bytes_in_everything(place: Path) -> None:
    before = grow(
        place / "before", {"text": TEXT, "binary": b"\0", "gone": b"1\n2\n", "moved": TEXT, "run": (b"1\n", 0o644), "l": "a"}
    )
    now = {
        "text": TEXT + b"x\n",
        "binary": b"\0\1",
        "empty": b"",
        "there/moved": TEXT,
        "run": (b"1\n", 0o755),
        "l": "bc",
        ODD[0]: b"1\n",
    }
    after = grow(place / "after", now)
    found = with_renames(compared(before, after))
    told = {one.path.removeprefix("/project/"): one for one in found.stat()}
    assert told["text"] == patch.FileStat("/project/text", "modified", 1, 0, len(TEXT), len(TEXT) + 2)
    assert told["binary"] == patch.FileStat("/project/binary", "modified", None, None, 1, 2)
    assert told["binary"].binary
    assert told["gone"] == patch.FileStat("/project/gone", "deleted", 0, 2, 4, None)
    assert told["there/moved"] == patch.FileStat("/project/there/moved", "renamed", 0, 0, len(TEXT), len(TEXT))
    assert told["run"] == patch.FileStat("/project/run", "modified", 0, 0, 2, 2)
    assert told["empty"] == patch.FileStat("/project/empty", "added", 0, 0, None, 0)
    assert told["l"] == patch.FileStat("/project/l", "modified", 1, 1, 1, 2)
    assert told[ODD[0]] == patch.FileStat(f"/project/{ODD[0]}", "added", 1, 0, None, 2)
    assert set(told) == {"text", "binary", "gone", "there/moved", "run", "empty", "l", ODD[0]}


def test_files_of_git_are_not_counted(place: Path) -> None:
    found = compared(
        grow(place / "before", {}), grow(place / "after", {".git/x": b"1\n", "sub/.git": b"gitdir: x\n", "a.git": b"1\n"})
    )
    assert [one.path for one in found.stat()] == ["/project/a.git"]
    assert found.patch().count(b"diff --git") == 1
