"""`promote`, `promotions`, `undo` from the front door: what a sandbox changed comes to reality, nothing of reality's is ever lost, and
all of it can be taken back. Stages have tests of their own."""

import base64
import functools
import json
import os
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, eventually, tree
from e2e.test_terminal import Terminal

pytestmark = pytest.mark.one_launcher

Found = dict[str, tuple[object, ...]]


class World:
    """A person's project, and sandboxes of it."""

    def __init__(self, person: Person, reality: str = "") -> None:
        self.person = person
        self.project = person.project
        self.real(reality)

    def real(self, line: str, where: Path | None = None) -> str:
        """What the person does in reality, without a word to anybody."""
        return self.person.shell("sh", "-ec", line, cwd=where or self.project).stdout.strip()

    def made(self, line: str, *options: str) -> str:
        """A sandbox in which this was done."""
        found = self.person.json("create", *options)["sandbox"]["id"]
        self.inside(found, line)
        return str(found)

    def inside(self, box: str, line: str) -> str:
        return self.person.elsewhere("exec", box, "-c", line, check=True).stdout.strip()

    def says(self, verb: str, *arguments: str, code: int = 0, **more: Any) -> dict[str, Any]:
        """The promotion, or the error, that comes as the only document."""
        done = self.person.elsewhere(verb, "--json", *arguments, **more)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}\n{done.stderr}"
        assert done.stdout.count("\n") == 1, done.stdout
        (kind, said), *others = json.loads(done.stdout).items()
        assert (kind, others) == ("promotion" if "id" in said else "error", [])
        return dict(said)

    def promote(self, box: str, *options: str, code: int = 0) -> dict[str, Any]:
        return self.says("promote", box, *options, code=code)

    def undo(self, *options: str, code: int = 0) -> dict[str, Any]:
        return self.says("undo", *options, code=code)

    def refused(self, verb: str, *arguments: str) -> dict[str, str]:
        """Conflicts: the reasons by path; and nothing at all was changed."""
        before, known = tree(self.project), self.promotions()
        said = self.says(verb, *arguments, code=3)
        assert tree(self.project) == before
        assert [one for one in self.promotions() if one["status"] != "refused"] == known
        assert "nothing was done" in said["message"]
        assert said["hint"]
        assert all(one["sentence"] for one in said["detail"]["conflicts"])
        return {one["path"]: one["reason"] for one in said["detail"]["conflicts"]}

    def promotions(self) -> list[dict[str, Any]]:
        return [one for one in self.person.json("promotions")["promotions"] if one["project"] == str(self.project)]

    def text(self, path: str) -> str:
        return (self.project / path).read_text()

    def git(self, *words: str, where: Path | None = None) -> str:
        return self.person.shell("git", *words, cwd=where or self.project).stdout.strip()

    def outcome(self, line: str) -> Found:
        """What a shell makes of the project with it, in a copy beside."""
        twin = self.person.place / "twin"
        self.person.shell("cp", "-a", self.project, twin)
        self.real(line, twin)
        return plain(twin)


def plain(top: Path) -> Found:
    """What stands where: type, permissions, owner, content or target; less git's own."""
    found = {path.removeprefix(str(top)): about for path, about in tree(top).items()}
    found = {path: about for path, about in found.items() if path != "/.git" and not path.startswith("/.git/")}
    return {path: (*about[:3], None if stat.S_ISDIR(about[0]) else about[5]) for path, about in found.items()}  # type: ignore[call-overload]


def inodes(top: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in tree(top):
        about = os.lstat(path)
        found[path.removeprefix(f"{top}/")] = about.st_ino, about.st_mtime_ns, about.st_ctime_ns
    return found


# -- every kind of change -------------------------------------------------------------------------------------------------------

SETUP = """
mkdir -p gone/deep/er empty keep turns; echo 1 > gone/a; echo 2 > gone/deep/b; printf '\\0\\1' > blob; seq 50 > moved; echo tool > tool
echo plain > becomes; echo in > turns/in; ln -s README.md way; echo same > untouched; mkdir still; echo here > still/here
"""
WORK = """
rm -r gone empty; mkdir -p new/deep/er bare/bare; echo x > new/deep/er/x; printf '\\0\\2\\377' > blob; mv moved away; chmod 755 tool
chmod 700 keep; ln -sfn src way; ln -s tool shortcut; ln -s nowhere dangling; rm becomes; mkdir becomes; echo now > becomes/now
rm -r turns; echo file > turns; rm link; echo no link > link; echo '# more' >> src/app.py; rm src/test_app.py
yes 0123456789abcdef | head -c 20000000 > large; : > nothing; echo x > shut; chmod 400 shut
"""
ODD = ("new\nline", "tab\t", 'quo"te', "-dash", "two words", "*", "\u00e4\u20ac", "e\u0301", "\x1b[31m", os.fsdecode(b"\xff\xfe"))


@pytest.mark.parametrize("base", ["pinned", "live"])
def test_every_kind_of_change_comes_and_goes(person: Person, base: str) -> None:
    world = World(person, SETUP)
    before, about, wanted = plain(world.project), inodes(world.project), world.outcome(WORK)
    box = world.made(WORK, "--base", base)
    planned = world.promote(box, "--dry-run")
    assert (inodes(world.project), planned["status"], planned["id"]) == (about, "planned", None)
    done = world.promote(box)
    assert plain(world.project) == wanted
    assert {key: done[key] for key in ("applied", "deleted", "merged", "left_out")} == {
        key: planned[key] for key in ("applied", "deleted", "merged", "left_out")
    }
    changed = {path.strip("/") for path in wanted.keys() | before.keys() if wanted.get(path) != before.get(path)}
    assert {*done["applied"], *done["deleted"]} == changed
    assert (done["status"], done["merged"], done["conflicts"]) == ("applied", [], [])
    # all that the sandbox did not touch has not been touched
    after = inodes(world.project)
    assert {path: after[path] for path in ("untouched", "still", "still/here", "README.md", ".git", ".git/index")} == {
        path: about[path] for path in ("untouched", "still", "still/here", "README.md", ".git", ".git/index")
    }
    undone = world.undo()
    assert (undone["kind"], undone["undoes"], undone["status"]) == ("undo", done["id"], "applied")
    assert plain(world.project) == before
    assert not list(world.project.glob(".elsewhere-*"))
    # and an undo is a promotion itself
    assert world.undo(undone["id"])["undoes"] == undone["id"]
    assert plain(world.project) == wanted


def test_odd_names_and_how_they_are_told(person: Person) -> None:
    world = World(person)
    box = world.made("true")
    make = f"for name in {ODD!r}:\n    open(name, 'w').write(ascii(name))\n"
    person.elsewhere("exec", box, "--", person.python, "-I", "-c", make, check=True)
    raw = {"path": "\ufffd\ufffd", "path_b64": base64.b64encode(b"\xff\xfe").decode()}
    wanted = sorted((name if name in ODD[:-1] else raw for name in ODD), key=str)
    assert sorted(world.promote(box, "--dry-run")["applied"], key=str) == wanted
    some = [word for name in ("-dash", "[*]", "new\nline") for word in ("--path", f"./{name}")]
    assert world.promote(box, "--dry-run", *some)["applied"] == ["*", "-dash", "new\nline"]
    (world.project / ODD[-1]).write_text("reality's")
    said = world.promote(box, code=3)["detail"]["conflicts"]
    assert [(one["path"], one["reason"]) for one in said] == [(raw, "both_added")]
    (world.project / ODD[-1]).unlink()
    done = person.elsewhere("promote", box)
    assert (done.returncode, "\x1b" in done.stdout) == (0, False), "nothing of a name reaches the terminal as it is"
    assert all((world.project / name).read_text() == ascii(name) for name in ODD)
    assert raw in person.json("promotions", "show", "@last")["promotion"]["applied"]
    person.elsewhere("undo", check=True)
    assert not any((world.project / name).exists() for name in ODD)


def test_nothing_happens_to_a_closed_directory_that_is_not_told_before(user: Person) -> None:
    world = World(user)
    box = world.made("mkdir shut; echo x > shut/x; chmod 500 shut")
    world.promote(box)
    assert stat.S_IMODE((world.project / "shut").stat().st_mode) == 0o500
    assert [one["reason"] for one in world.undo("--dry-run", code=3)["conflicts"]] == ["not_permitted"]
    assert world.refused("undo") == {"shut/x": "not_permitted"}
    world.real("chmod u+w shut")
    assert world.refused("undo") == {"shut": "deleted_here"}, "its permissions were changed since"
    assert world.undo("--ours", "shut")["deleted"] == ["shut/x", "shut"]


def test_what_runs_goes_on_and_what_is_read_belongs_together(person: Person) -> None:
    """Two files that a command in the background always writes in turn."""
    world = World(person)
    box = world.made("echo 0 > one; echo 0 > two")
    loop = "n=0; while :; do n=$((n+1)); echo $n > one; echo $n > two; done"
    person.elsewhere("exec", box, "--detach", "-c", loop, check=True)
    for _ in range(2):
        world.promote(box)
        one, two = (int(world.text(name) or -1) for name in ("one", "two"))
        assert -1 in (one, two) or one - two in (0, 1)
        assert eventually(lambda seen=one: int(world.inside(box, "cat two") or 0) > seen + 1), "it did not go on"


# -- three ways -----------------------------------------------------------------------------------------------------------------


def test_both_sides_keep_what_they_did(person: Person) -> None:
    world = World(person, "seq 20 > text; echo 1 > same; cp text mode; echo 1 > theirs; cp text copied")
    box = world.made("sed -i s/^2$/two/ text; echo 2 > same; chmod 755 mode; echo new > new; rm copied")
    world.real(
        "sed -i s/^19$/nineteen/ text; echo 2 > same; sed -i s/^3$/three/ mode; echo 2 > theirs; echo x > other; rm copied"
    )
    about = inodes(world.project)
    planned = world.promote(box, "--dry-run")
    assert inodes(world.project) == about
    done = world.promote(box)
    for said in (planned, done):
        assert (said["applied"], said["merged"], said["same"]) == (["mode", "new", "text"], ["mode", "text"], ["copied", "same"])
    assert world.text("text").split() == ["1", "two", *map(str, range(3, 19)), "nineteen", "20"]
    assert world.text("mode").split()[:4] == ["1", "2", "three", "4"]
    assert os.access(world.project / "mode", os.X_OK)
    after = inodes(world.project)
    assert all(after[path] == about[path] for path in ("same", "theirs", "other"))
    # what was merged is taken back by itself, and what reality did stays
    world.real("sed -i s/^10$/ten/ text")
    undone = world.undo()
    assert undone["merged"] == ["text"]
    assert world.text("text").split() == [*map(str, range(1, 10)), "ten", *map(str, range(11, 19)), "nineteen", "20"]
    assert world.text("mode").split()[:3] == ["1", "2", "three"]
    assert not os.access(world.project / "mode", os.X_OK)
    assert (world.text("other"), world.text("theirs"), (world.project / "new").exists()) == ("x\n", "2\n", False)


# The reason, where it is, what is done in the sandbox, what reality does meanwhile, and whether the sandbox's can be taken.
CONFLICTS = [
    ("text_conflict", "text", "echo here > text", "echo there > text", True),
    ("deleted_here", "README.md", "rm README.md", "echo there > README.md", True),
    ("deleted_there", "lost", "echo here > lost", "rm lost", True),
    ("both_added", "newly", "echo here > newly", "echo there > newly", True),
    ("type_changed", "kind", "echo here > kind", "rm kind; mkdir kind", True),
    ("links_differ", "link", "ln -sfn src link", "ln -sfn blob link", True),
    ("modes_differ", "mode", "chmod 700 mode", "chmod 755 mode", True),
    ("binary", "blob", "printf '\\0\\2' > blob", "printf '\\0\\3' > blob", True),
    ("too_large", "large", "echo here >> large", "sed -i 1s/.*/there/ large", True),
    ("parent_gone", "gone/new", "echo here > gone/new", "rm -r gone", True),
    ("parent_replaced", "turned/new", "echo here > turned/new", "rm -r turned; ln -s src turned", False),
    ("not_empty", "full", "rm -r full", "echo there > full/there", False),
    ("link_outside", "secrets", "ln -s /etc/passwd secrets", "true", True),
    ("link_outside", "src/up", "ln -s ../../up src/up", "true", True),
]


def test_every_conflict_leaves_everything_as_it_is(person: Person) -> None:
    world = World(
        person,
        "printf '\\0\\1' > blob; mkdir gone turned full; for n in text lost kind mode gone/1 turned/1 full/1; do echo 0 > $n; done; "
        "yes 0123456789abcdef | head -c 16900000 > large",
    )
    box = world.made("echo fine > fine; " + "; ".join(one[2] for one in CONFLICTS))
    world.real("; ".join(one[3] for one in CONFLICTS))
    reasons = {one[1]: one[0] for one in CONFLICTS}
    before = tree(world.project)
    planned = world.promote(box, "--dry-run", code=3)
    assert planned["status"] == "refused"
    assert {one["path"]: one["reason"] for one in planned["conflicts"]} == reasons
    assert tree(world.project) == before
    assert world.refused("promote", box) == reasons
    done = person.elsewhere("promote", box)
    assert (done.returncode, done.stdout) == (3, "")
    assert all(f"   ! {path}: " in done.stderr and f"({reason})\n" in done.stderr for path, reason in reasons.items())
    assert "--ours PATH takes the sandbox's, --theirs PATH" in done.stderr
    assert "; not_empty: move or delete" in done.stderr
    # some can be settled in favour of the sandbox, all in favour of reality
    ours = [word for one in CONFLICTS for word in ("--ours", one[1])]
    assert world.refused("promote", box, *ours) == {one[1]: one[0] for one in CONFLICTS if not one[4]}
    hint = world.promote(box, *ours, code=3)["hint"]
    assert [f"; {one[0]}: " in hint for one in CONFLICTS if not one[4]] == [True, True]
    assert "--ours" not in hint, "only what helps is named"
    theirs = [word for one in CONFLICTS for word in ("--theirs", one[1])]
    assert world.promote(box, *theirs, "--dry-run")["applied"] == ["fine"]
    assert world.promote(box, "--path", "fine")["applied"] == ["fine"]
    mixed = [word for one in CONFLICTS for word in ("--ours" if one[4] else "--theirs", one[1])]
    world.promote(box, *mixed)
    assert (world.text("text"), world.text("kind"), world.text("gone/new")) == ("here\n", "here\n", "here\n")
    assert (os.readlink(world.project / "secrets"), (world.project / "README.md").exists()) == ("/etc/passwd", False)
    assert (os.readlink(world.project / "turned"), world.text("full/there")) == ("src", "there\n")
    world.undo()
    after = plain(world.project)
    was = {path.removeprefix(str(world.project)): about for path, about in before.items()}
    assert {path: about[3] for path, about in after.items() if about[3] is not None} == {
        **{path: about[5] for path, about in was.items() if about[5] is not None and not path.startswith("/.git/")},
        "/fine": b"fine\n",
    }


def test_reality_may_not_be_written(user: Person) -> None:
    world = World(user, "mkdir shut; echo 1 > shut/1")
    box = world.made("echo 2 > shut/1; echo new > shut/new; echo fine > fine")
    world.real("chmod 555 shut")
    assert world.refused("promote", box) == {"shut/1": "not_permitted", "shut/new": "not_permitted"}
    hint = world.promote(box, code=3)["hint"]
    assert ("--theirs PATH" in hint, "--ours" in hint, "change the permissions in reality" in hint) == (True, False, True)
    world.real("chmod 755 shut; chmod 000 shut/1")
    assert world.refused("promote", box)["shut/1"] in ("not_permitted", "modes_differ")
    world.real("chmod 644 shut/1")
    assert len(world.promote(box)["applied"]) == 3


def test_choices(person: Person) -> None:
    world = World(person, "mkdir dir; for n in 1 2 3 4; do echo 0 > dir/$n; done")
    box = world.made("for n in 1 2 3 4; do echo here > dir/$n; done; echo new > new")
    world.real("for n in 1 2 3; do echo there > dir/$n; done")
    assert set(world.refused("promote", box, "--ours", "dir/1")) == {"dir/2", "dir/3"}
    for option, value, code in (
        ("--ours", "dir/4", "no_such_conflict"),
        ("--theirs", "nowhere", "no_such_conflict"),
        ("--ours", "/dir/1", "no_such_conflict"),
    ):
        said = world.promote(box, option, value, code=2)
        assert (said["code"], f"{option} {value!r}" in said["message"]) == (code, True), said
    said = world.promote(box, "--ours", "dir/1", "--theirs", "dir/*", code=2)
    assert (said["code"], "'dir/1'" in said["message"]) == ("ours_and_theirs", True)
    assert world.promote(box, "--path", "[b-a]", code=2)["code"] == "bad_pattern"
    assert world.promote(box, "--path", "ne*", "--dry-run")["applied"] == ["new"]
    done = world.promote(box, "--ours", "dir/1", "--ours", "dir/2", "--theirs", "dir/3")
    assert (done["applied"], done["kept"]) == (["new", "dir/1", "dir/2", "dir/4"], ["dir/3"])
    assert [world.text(f"dir/{n}") for n in range(1, 5)] == ["here\n", "here\n", "there\n", "here\n"]
    world.undo()
    assert [world.text(f"dir/{n}") for n in range(1, 5)] == ["there\n", "there\n", "there\n", "0\n"]
    for words in (["--path"], ["--no-commits", "--branch", "x"], ["--no-commits", "--checkout"], ["--nonsense"]):
        assert person.elsewhere("promote", box, *words).returncode == 2
    assert world.says("promote", "nobody", code=1)["code"] == "sandbox_not_found"


def test_resolving(person: Person) -> None:
    world = World(person, "seq 9 > text; seq 9 > both; echo 1 > gone")
    box = world.made(
        "sed -i s/5/here/ text; sed -i s/1/one/ both; echo 2 > gone; echo fine > fine; printf 'here\\nend\\n' > added"
    )
    assert world.promote(box, "--resolve", code=2)["code"] == "no_conflicts"
    world.real("sed -i s/5/there/ text; sed -i s/9/nine/ both; rm gone; printf 'there\\nend\\n' > added")
    before = tree(world.project)
    # one that was interrupted before both versions were marked
    for how in ("raise OSError(28, 'no room')", "os.kill(os.getpid(), 9)"):
        others = {one["id"] for one in person.json("list")["sandboxes"]}
        broken = f"def broken(box):\n    {how}\nresolving.files_of = broken\nresolving.resolve({box!r}, promoting.Asked())"
        assert person.sdk(f"import os\nfrom elsewhere.operations import promoting, resolving\n{broken}", check=False).returncode
        made = {one["id"] for one in person.json("list")["sandboxes"]} - others
        for one in made:
            assert world.refused("promote", one) == {"gone": "deleted_there", "text": "text_conflict", "added": "both_added"}
            person.elsewhere("rm", "--force", one, check=True)
        assert len(made) == how.count("kill")
    fork = person.json("promote", box, "--resolve")["sandbox"]["id"]
    assert tree(world.project) == before
    assert world.inside(box, "cat text") == "1\n2\n3\n4\nhere\n6\n7\n8\n9", "the sandbox itself is as it was"
    assert world.inside(fork, "sed -n '/<<<</,/>>>>/p' text") == "<<<<<<< sandbox\nhere\n=======\nthere\n>>>>>>> reality"
    assert world.inside(fork, "cat added") == "<<<<<<< sandbox\nhere\n=======\nthere\n>>>>>>> reality\nend"
    assert world.inside(fork, "cat both gone") == "one\n2\n3\n4\n5\n6\n7\n8\nnine\n2"
    assert world.refused("promote", fork) == {"gone": "deleted_there", "text": "markers_left", "added": "markers_left"}
    said = world.promote(fork, "--path", "text", code=3)
    assert (set(said["detail"]["conflicts"][0].values()) > {"text"}, "--ours" in said["hint"]) == (True, False)
    assert "; markers_left: edit it in the sandbox" in said["hint"]
    world.inside(fork, "seq 9 | sed s/5/both/ > text; echo settled > added")
    assert set(world.refused("promote", fork)) == {"gone"}, "nothing marks it, and nobody has settled it"
    world.promote(fork, "--ours", "gone")
    assert (world.text("text"), world.text("both")) == ("1\n2\n3\n4\nboth\n6\n7\n8\n9\n", "one\n2\n3\n4\n5\n6\n7\n8\nnine\n")
    assert (world.text("gone"), world.text("fine"), world.text("added")) == ("2\n", "fine\n", "settled\n")
    # what reality does after the fork was made counts as well
    other = world.made("echo here > fine")
    world.real("echo there > fine")
    fork = person.json("promote", other, "--resolve")["sandbox"]["id"]
    world.inside(fork, "echo settled > fine")
    world.real("echo again > fine")
    assert world.refused("promote", fork) == {"fine": "text_conflict"}
    again = person.json("promote", fork, "--resolve")["sandbox"]["id"]
    assert "<<<<<<< sandbox\nsettled\n=======\nagain\n" in world.inside(again, "cat fine")
    world.inside(again, "echo for good > fine")
    assert world.promote(again)["applied"] == ["fine"]
    assert world.text("fine") == "for good\n"


# -- nothing of reality's is ever lost ------------------------------------------------------------------------------------------

MEANWHILE = {
    "edited": "echo reality >> edited",
    "replaced": "echo reality > replaced.new; mv replaced.new replaced",
    "deleted": "rm deleted",
    "truncated": ": > truncated",
    "linked": "rm linked; ln -s README.md linked",
    "directory": "rm directory; mkdir directory",
    "filled": "rm filled; mkdir filled; echo reality > filled/in",
    "emptied": "rm emptied; mv old emptied",
    "touched-back": "echo reality > touched-back; touch -r README.md touched-back",
}


@pytest.mark.parametrize("base", ["--base=pinned", "--base=live", pytest.param("--base-ref=HEAD", marks=pytest.mark.slow)])
def test_no_update_is_lost(person: Person, base: str) -> None:
    """The sandbox has written to each of these, and so has reality, while a command was still at work inside."""
    names = " ".join(MEANWHILE)
    more = "mkdir old; echo old > old/old; echo unknown to git > loose"
    world = World(person, f"for n in {names} free; do echo base > $n; done; git add -A; git commit -qm more; {more}; sleep 0.02")
    box = world.made(f"for n in {names} free; do echo sandbox > $n; done; rm emptied", base)
    person.elsewhere("exec", box, "--detach", "--", "sleep", "60", check=True)
    world.real("; ".join(MEANWHILE.values()))
    assert {path.partition("/")[0] for path in world.refused("promote", box)} == set(MEANWHILE)
    assert world.promote(box, "--path", "free")["applied"] == ["free"]
    if base != "--base-ref=HEAD":  # which does not have it
        world.inside(box, "echo >> loose")
        assert world.promote(box, "--path", "loose", "--dry-run")["applied"] == ["loose"]
        world.real("rm loose")
        assert set(world.refused("promote", box, "--path", "loose")) == {"loose"}
        world.inside(box, "rm loose")
    for name in MEANWHILE:
        assert name in world.refused("promote", box, "--path", name)
    if base == "--base=live":
        reasons = world.refused("promote", box)
        assert reasons["edited"] == reasons["replaced"] == reasons["deleted"] == "no_base"
    world.inside(box, f"rm -f {names}")
    assert {path.partition("/")[0] for path in world.refused("promote", box)} == set(MEANWHILE) - {"deleted"}, (
        "that the sandbox deleted in the end"
    )


def has_begun(person: Person, promotion: "subprocess.Popen[bytes]", known: set[str]) -> bool:
    return bool(set(os.listdir(person.state / "journal")) - known) or promotion.poll() is not None


def test_whoever_writes_last_is_there_in_the_end(person: Person) -> None:
    """A writer in the middle of a promotion, at whatever moment: either it is in the way, or it comes after; its own is there."""
    world = World(person)
    # Many files, so that there is a middle to be met.
    box = world.made("echo sandbox > README.md; for n in $(seq 150); do echo $n > made-$n; done")
    for turn in range(6):
        promotion = subprocess.Popen(
            person.command("promote", box, "--json"),
            cwd=world.project,
            env=person.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            **person.identity(),
        )
        if turn:  # as soon as it has begun to write, and then later and later
            eventually(functools.partial(has_begun, person, promotion, set(os.listdir(person.state / "journal"))))
            time.sleep(0.02 * turn)
        world.real(f"echo reality {turn} > other; mv other README.md")
        said = json.loads(promotion.communicate(timeout=100)[0])
        assert world.text("README.md") == f"reality {turn}\n"
        assert not list(world.project.glob(".elsewhere-*"))
        made = len(list(world.project.glob("made-*")))
        if promotion.returncode == 0:
            assert made == 150
            world.real("echo sandbox > README.md")
            world.undo()
        else:
            assert (promotion.returncode, made) == (3, 0), said
            assert [one["path"] for one in said["error"]["detail"]["conflicts"]] == ["README.md"]
            world.real("echo '# a project' > README.md")


# -- what is left out, and what is asked ----------------------------------------------------------------------------------------


def test_what_git_ignores_stays_inside(person: Person) -> None:
    world = World(
        person,
        "mkdir build; echo build/ >> .gitignore; git commit -qam more; echo 0 > build/old; echo '*.tmp' >> .git/info/exclude",
    )
    line = "echo 1 > a.log; echo KEY=2 > .env; echo 1 > build/new; rm build/old; echo 1 > x.tmp; echo 1 > b.out; echo fine > fine; mkfifo f"
    box = world.made(line)
    done = world.promote(box)
    assert (done["applied"], done["deleted"]) == (["b.out", "fine"], [])
    assert done["left_out"]["ignored"] == [".env", "a.log", "build/new", "build/old", "x.tmp"]
    assert done["left_out"]["other"] == ["f"]
    shown = person.elsewhere("promote", box, check=True)
    assert "left out, ignored: 5 paths, for example .env; --ignored takes that\n" in shown.stderr
    assert shown.stdout.startswith("nothing to move: ")
    assert "takes it back" not in shown.stdout, "there is nothing to be taken back"
    # by the rules as they will be
    world.inside(box, "echo '*.out' > .gitignore; echo 2 > b.out; echo 2 > a.log")
    done = world.promote(box, "--yes", "--dry-run")
    assert done["left_out"]["ignored"] == ["b.out", "x.tmp"]
    done = world.promote(box, "--ignored", "--yes")
    assert {*done["applied"]} == {".env", ".gitignore", "a.log", "b.out", "build/new", "x.tmp"}
    assert (done["deleted"], done["left_out"]["ignored"]) == (["build/old"], [])
    assert world.text(".env") == "KEY=2\n"
    # what is left out again stays as it was moved
    world.inside(box, "echo more > fine; echo 3 > b.out")
    done = world.promote(box)
    assert (done["applied"], done["deleted"]) == (["fine"], [])


def test_what_lies_outside_comes_only_if_it_is_named(person: Person) -> None:
    world = World(person, "mkdir -p ~/beside ~/.config; echo 0 > ~/beside/old; echo 0 > ~/beside/both")
    box = world.made("echo 1 > ~/beside/new; echo 1 > ~/beside/both; rm ~/beside/old; echo 1 > ~/.config/made; echo 1 > in")
    beside, config = person.home / "beside", person.home / ".config"
    done = world.promote(box)
    assert done["applied"] == ["in"]
    assert {f"{beside}/both", f"{beside}/new", f"{beside}/old", f"{config}/made"} <= set(done["left_out"]["outside"])
    for fitting in ([], ["--outside", f"{beside}/**"]):
        refused = world.promote(box, *fitting, "--outside", "/nowhere/**", code=2)
        assert (refused["code"], "'/nowhere/**'" in refused["message"]) == ("nothing_fits", True)
    assert world.promote(box, "--outside", f"{person.project}/**", code=2)["code"] == "nothing_fits", "that is not outside"
    assert world.promote(box, "--outside", "../../beside/**", code=2)["code"] == "bad_pattern"
    (beside / "both").write_text("2\n")
    assert world.refused("promote", box, "--outside", f"{beside}/**") == {f"{beside}/both": "no_base"}
    done = world.promote(box, "--outside", f"{beside}/**", "--theirs", f"{beside}/both")
    assert (done["applied"], done["deleted"], done["kept"]) == ([f"{beside}/new"], [f"{beside}/old"], [f"{beside}/both"])
    about = (beside / "new").stat()
    assert (about.st_uid, about.st_gid) == (person.uid, person.uid)
    assert not (config / "made").exists()
    assert world.promote(box, "--outside", f"{config}/made")["applied"] == [f"{config}/made"]
    world.undo()
    assert not (config / "made").exists()
    world.undo()
    assert sorted(os.listdir(beside)) == ["both", "old"]
    assert (beside / "both").read_text() == "2\n"


def test_owners_are_those_that_they_had_inside(root: Person) -> None:
    world = World(root, "mkdir ../beside; echo 0 > ../beside/old; chown 77:88 ../beside/old; echo 0 > mine; chown 99:99 mine")
    box = world.made(
        "chown -R 1234:2345 ../beside; echo 1 > ../beside/new; chown 3:4 ../beside/new; echo 1 > made; chown 5:6 made; echo 1 > mine"
    )
    done = world.promote(box, "--outside", f"{root.place}/beside/**")
    owners = {
        name: (about.st_uid, about.st_gid)
        for name in ("../beside/new", "made", "mine")
        for about in [(world.project / name).stat()]
    }
    assert owners == {"../beside/new": (3, 4), "made": (5, 6), "mine": (99, 99)}
    assert f"{root.place}/beside/new" in done["applied"]


def test_what_runs_by_itself_has_to_be_agreed_to(person: Person) -> None:
    world = World(person, "printf '[promotion]\\nruns = [\"Makefile\"]\\n' > elsewhere.toml")
    marked = [".envrc", ".gitattributes", ".github/workflows/ci.yml", ".vscode/tasks.json", "Makefile", "elsewhere.toml", "runs"]
    line = "mkdir -p .github/workflows .vscode; for n in {} fine; do echo 1 > $n; done; chmod u+s runs".format(" ".join(marked))
    box = world.made(line)
    before = tree(world.project)
    assert [one["path"] for one in world.promote(box, "--dry-run")["marked"]] == marked
    said = world.promote(box, code=1)
    assert (said["code"], [one["path"] for one in said["detail"]["marked"]]) == ("not_agreed", marked)
    assert "--yes" in said["hint"]
    assert world.promote(box, "--path", "Makefile", code=1)["code"] == "not_agreed", "the project's settings name it"
    assert person.elsewhere("promote", box).returncode == 1, "without a terminal"
    terminal = Terminal(person, "promote", box)
    terminal.expect("   ! .envrc: direnv runs it")
    terminal.expect("[y/N] ")
    terminal.type("\r")
    code, rest = terminal.end()
    assert (code, "--yes agrees" in rest) == (1, True)
    assert tree(world.project) == before
    assert world.promote(box, "--path", "fine")["applied"] == ["fine"], "nothing else is asked about"
    terminal = Terminal(person, "promote", box)
    terminal.expect("[y/N] ")
    terminal.type("y\r")
    assert terminal.end()[0] == 0
    assert all((world.project / name).read_text() == "1\n" for name in marked)
    world.undo()
    assert {*world.promote(box, "--yes")["applied"]} >= {*marked}


# -- one after the other --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["pinned", "live"])
def test_work_goes_on_between_promotions(person: Person, base: str) -> None:
    world = World(person, "seq 9 > text; sleep 0.02")
    box = world.made("sed -i s/1/one/ text; echo 1 > new", "--base", base)
    first = world.promote(box)
    assert world.promote(box)["applied"] == [], "there is nothing more"
    world.inside(box, "sed -i s/5/five/ text; echo 2 > new; echo 1 > more")
    world.real("sed -i s/9/nine/ text" if base == "pinned" else "true")
    second = world.promote(box)
    assert second["applied"] == ["more", "new", "text"]
    assert second["merged"] == (["text"] if base == "pinned" else [])
    ends = "nine" if base == "pinned" else "9"
    assert world.text("text").split() == ["one", "2", "3", "4", "five", "6", "7", "8", ends]
    # what the sandbox takes back itself goes in reality as well
    world.inside(box, "rm new; sed -i s/one/1/ text")
    third = world.promote(box)
    assert ((world.project / "new").exists(), world.text("text").split()[0]) == (False, "1")
    # undone in any order, as far as it fits
    assert world.undo()["undoes"] == third["id"]
    assert (world.text("new"), world.text("text").split()[0]) == ("2\n", "one")
    assert world.undo()["undoes"] == second["id"]
    assert world.undo()["undoes"] == first["id"]
    assert world.text("text").split() == [*map(str, range(1, 9)), ends]
    assert not any((world.project / name).exists() for name in ("new", "more"))
    assert world.undo(code=1)["code"] == "promotion_not_found"
    # and again
    assert world.promote(box)["applied"] == ["more", "text"]
    world.undo()
    world.real("sed -i s/5/reality/ text")
    assert world.refused("promote", box) == {"text": "text_conflict"}


def test_going_back_inside_and_forks(person: Person) -> None:
    world = World(person)
    box = world.made("echo 1 > new")
    person.elsewhere("snapshot", box, "early", check=True)
    world.inside(box, "echo 2 > new; rm README.md")
    world.promote(box)
    fork = person.json("fork", box)["sandboxes"][0]["id"]
    assert world.promote(fork)["applied"] == [], "a fork has what its parent moved"
    world.inside(fork, "echo 3 > new")
    person.elsewhere("rollback", box, "early", check=True)
    done = world.promote(box)
    assert (done["applied"], world.text("new"), world.text("README.md")) == (["README.md", "new"], "1\n", "# a project\n")
    assert world.refused("promote", fork) == {"new": "text_conflict"}
    assert world.promote(fork, "--ours", "new")["applied"] == ["new"]
    assert world.text("new") == "3\n"


def test_undo(person: Person) -> None:
    world = World(person, "seq 9 > text; echo 0 > other; mkdir -m 750 dir; ln -s text way; chmod 640 other")
    before = plain(world.project)
    box = world.made("sed -i s/1/one/ text; echo 1 > other; chmod 600 other; rmdir dir; ln -sfn other way; echo new > new")
    done = world.promote(box)
    world.real("sed -i s/9/nine/ text; echo edited > new; echo 2 > other")
    assert world.refused("undo") == {"new": "deleted_here", "other": "text_conflict"}
    said = world.undo("--dry-run", code=3)
    assert {one["path"]: one["sentence"] for one in said["conflicts"]} == {
        "new": "made by the promotion, changed since",
        "other": "lines that the promotion changed were changed again since",
    }
    for option in ("--ours", "--theirs"):
        assert world.undo(option, "text", code=2)["code"] == "no_such_conflict"
    undone = world.undo("--theirs", "new", "--ours", "other")
    assert (undone["undoes"], undone["merged"]) == (done["id"], ["text"])
    after = plain(world.project)
    assert (world.text("text"), world.text("new")) == ("1\n2\n3\n4\n5\n6\n7\n8\nnine\n", "edited\n")
    assert {path: after[path] for path in ("/other", "/dir", "/way")} == {
        path: before[path] for path in ("/other", "/dir", "/way")
    }
    shown = person.json("promotions", "show", done["id"])["promotion"]
    assert (shown["status"], shown["undone_by"]) == ("undone", undone["id"])
    said = world.undo(done["id"], code=1)
    assert (said["code"], done["id"] in said["message"]) == ("not_applied", True)
    # an undo is undone by its id
    world.undo(undone["id"])
    assert (world.text("other"), os.readlink(world.project / "way")) == ("2\n", "other")
    assert [one["kind"] for one in world.promotions()] == ["promote", "undo", "undo"]
    assert [one["status"] for one in world.promotions()] == ["applied", "undone", "applied"]


def test_which_one(person: Person) -> None:
    world = World(person)
    other = person.place / "other"
    other.mkdir()
    person.own(other)
    here = world.promote(world.made("echo 1 > one"))["id"]
    there = world.promote(person.json("run", "--keep", "--project", str(other), "-c", "echo 1 > two")["sandbox"]["id"])["id"]
    listed = person.elsewhere("promotions").stdout.splitlines()
    assert listed[0].split() == ["PROMOTION", "WHEN", "STATUS", "STAGE", "SANDBOX", "WHAT"]
    assert [line.split()[0] for line in listed[-2:]] == [here, there]
    shown = person.elsewhere("promotions", "show").stdout
    assert all(words in shown for words in (there, str(other), "   ✓ two\n1 written: applied"))
    for verb in (["undo"], ["promotions", "show"]):
        said = world.says(verb[0], *verb[1:], "p00nothing", code=1)
        assert (said["code"], "'p00nothing'" in said["message"]) == ("promotion_not_found", True)
        assert world.says(verb[0], *verb[1:], "p", code=2)["code"] == "ambiguous_promotion"
    assert person.elsewhere("promotions", "hide").returncode == 2
    # by itself it is the project that one stands in
    nothing = person.json("run", "--keep", "-c", "true")["sandbox"]["id"]
    assert world.promote(nothing)["applied"] == []
    done = person.elsewhere("undo", cwd=world.project / "src")
    assert (done.returncode, (world.project / "one").exists(), (other / "two").exists()) == (0, False, True), done.stderr
    assert person.elsewhere("undo", there[:-1], "--json").returncode == 0
    assert not (other / "two").exists()
    assert world.undo("@last", "--dry-run")["applied"] == ["two"]


# -- commits --------------------------------------------------------------------------------------------------------------------

COMMIT = "git add -A; git commit -qm"


def repository(project: Path) -> dict[str, object]:
    """What is the user's own of a repository."""
    git = project / ".git"
    names = ("HEAD", "index", "config", "refs/stash", "refs/heads/main", "logs/HEAD", "ORIG_HEAD", "FETCH_HEAD", "packed-refs")
    return {name: (git / name).read_bytes() if (git / name).exists() else None for name in names}


def test_commits_become_a_branch_and_nothing_else_of_the_repository_moves(person: Person) -> None:
    world = World(person, "echo 1 > staged; git stash -q -u; echo 2 > staged; git add staged; echo later > README.md")
    before = repository(world.project)
    box = world.made(
        f"git reset -q; echo one > one; git add one; git commit -qm first-inside; echo two > one; {COMMIT} second; echo 3 > one"
    )
    planned = world.promote(box, "--dry-run")["commits"]
    assert (planned["count"], planned["subjects"]) == (2, ["second", "first-inside"])
    assert repository(world.project) == before
    assert world.git("branch", "--list") == "* main"
    done = world.promote(box)
    branch = f"elsewhere/{box}"
    assert (done["commits"]["branch"], done["commits"]["count"], done["applied"]) == (branch, 2, ["one"])
    assert world.git("log", "--format=%s", branch) == "second\nfirst-inside\nfirst"
    assert world.git("show", f"{branch}:one") == "two"
    assert (repository(world.project), world.text("one")) == (before, "3\n")
    assert world.git("stash", "list", "--format=%gd") == "stash@{0}"
    world.git("fsck", "--strict")
    world.undo()
    assert world.git("log", "--format=%s", branch).startswith("second"), "a branch stays"
    # more of them move it forward
    world.inside(box, f"{COMMIT} third")
    assert world.promote(box)["commits"]["count"] == 1
    assert world.git("log", "-1", "--format=%s", branch) == "third"
    # another name; none at all; a name that cannot be
    world.inside(box, f"echo 4 > one; {COMMIT} fourth")
    world.promote(box, "--no-commits")
    assert world.git("log", "-1", "--format=%s", branch) == "third"
    assert world.promote(box, "--branch", "mine")["commits"]["branch"] == "mine"
    assert world.git("log", "-1", "--format=%s", "mine") == "fourth"
    world.real("git branch taken $(git commit-tree -m x HEAD^{tree})")
    known = world.git("for-each-ref")
    for name, code, status in (
        ("no..name", "bad_branch", 2),
        ("main", "branch_checked_out", 3),
        ("taken", "branch_exists", 3),
        ("taken/below", "branch_exists", 3),
    ):
        said = world.promote(box, "--branch", name, code=status)
        assert (said["code"], repr(name) in said["message"]) == (code, True)
        assert world.promote(box, "--branch", name, "--dry-run", code=status) == said, "a dry run knows it before"
    assert world.git("for-each-ref") == known


def test_checkout_and_back(person: Person) -> None:
    world = World(person, "echo local > local; git add local; git commit -qm second")
    before, files = repository(world.project), plain(world.project)
    box = world.made(f"echo one > one; rm local; {COMMIT} inside; echo uncommitted > two")
    world.real("echo staged > staged; git add staged")
    said = world.promote(box, "--checkout", code=3)
    assert said["code"] == "index_not_clean"
    assert not (world.project / "one").exists()
    world.real("git rm -qf --cached staged; rm staged")
    world.promote(box, "--checkout")
    assert world.git("symbolic-ref", "--short", "HEAD") == f"elsewhere/{box}"
    assert world.git("status", "--short") == "?? two"
    world.undo()
    assert (world.git("symbolic-ref", "--short", "HEAD"), world.git("status", "--short")) == ("main", "")
    assert plain(world.project) == files
    assert repository(world.project)["refs/heads/main"] == before["refs/heads/main"]
    world.real("git commit -q --allow-empty -m reality")
    said = world.promote(box, "--checkout", code=3)
    assert (said["code"], (world.project / "one").exists()) == ("head_moved", False)


def test_nothing_of_the_sandbox_is_run_by_the_host(person: Person) -> None:
    """Everything that git would run by itself, planted where git would find it; and reality's own hooks have no part either."""
    marker = person.place / "marker"
    touch = f"touch {marker}"
    hooks = (
        "post-checkout post-commit post-merge post-index-change reference-transaction pre-auto-gc update post-update pre-receive"
    )
    plant = f"""
mkdir -p evil; for n in {hooks} fsmonitor; do printf '#!/bin/sh\\n{touch}\\ncat >/dev/null\\n' > evil/$n; cp evil/$n .git/hooks/$n; done
chmod +x evil/* .git/hooks/*; echo '* filter=x diff=x merge=x' > .gitattributes
mkdir -p ../other/objects; echo "$PWD/../other/objects" > .git/objects/info/alternates
git add -A; git commit -qm inside
for n in core.fsmonitor core.pager core.editor core.sshCommand diff.x.textconv diff.x.command diff.external filter.x.clean filter.x.smudge \
    filter.x.process merge.x.driver alias.log alias.status gpg.program uploadpack.packObjectsHook core.alternateRefsCommand credential.helper
do git config $n "{touch}"; done
git config alias.rev-parse '!{touch}'; git config core.hooksPath evil; git config commit.gpgSign true; git config include.path ../evil/config
git config core.worktree /; git config extensions.worktreeConfig true; git config remote.origin.url ext::evil
"""
    world = World(person, "printf '#!/bin/sh\\ntouch ../marker; exit 0\\n' > .git/hooks/reference-transaction; cp .git/hooks/reference-transaction "
                  ".git/hooks/post-checkout; cp .git/hooks/post-checkout .git/hooks/post-index-change; chmod +x .git/hooks/*")  # fmt: skip
    before = repository(world.project), sorted(os.listdir(world.project / ".git" / "hooks"))
    box = person.json("create")["sandbox"]["id"]
    person.elsewhere("exec", box, "-c", plant, check=True)
    marker.unlink(missing_ok=True)  # the commands above are inside, and reality is not theirs; but be sure
    assert world.promote(box, "--dry-run")["commits"]["count"] == 1
    done = person.elsewhere("promote", "--json", box, "--yes", "--checkout")
    person.elsewhere("undo")
    person.elsewhere("diff", box, "--patch")
    modules = f'[submodule "s"]\\n\\tpath = s\\n\\turl = ext::{touch}\\n\\tupdate = !{touch}\\n'
    other = world.made(f"printf '{modules}' > .gitmodules; {COMMIT} modules")
    said = world.promote(other, "--yes", code=1)
    assert (said["code"], (world.project / ".gitmodules").exists()) == ("bad_bundle", False), (
        "git takes no such thing from a stranger"
    )
    assert world.promote(other, "--yes", "--no-commits")["applied"] == [".gitmodules"]
    person.elsewhere("rm", box)
    assert not marker.exists(), done.stderr
    assert (done.returncode, world.git("log", "-1", "--format=%s", f"elsewhere/{box}")) == (0, "inside"), done.stderr
    after = repository(world.project), sorted(os.listdir(world.project / ".git" / "hooks"))
    assert (after[0]["config"], after[1]) == (before[0]["config"], before[1])
    assert not (world.project / ".git" / "objects" / "info" / "alternates").exists()


def test_other_repositories(person: Person) -> None:
    """A linked worktree, a HEAD without a branch, a directory of a repository, and none at all."""
    world = World(person)
    linked = person.place / "linked"
    world.git("worktree", "add", "-q", str(linked))
    box = world.made(f"echo 1 > new; {COMMIT} in-a-worktree", "--project", str(linked))
    assert world.promote(box)["commits"]["branch"] == f"elsewhere/{box}"
    assert world.git("log", "-1", "--format=%s", f"elsewhere/{box}") == "in-a-worktree"
    assert (world.git("branch", "--show-current", where=linked), (linked / "new").read_text()) == ("linked", "1\n")
    world.git("checkout", "-q", "--detach")
    box = world.made(f"echo 1 > new; {COMMIT} detached; git checkout -q -b side; echo 2 > side; {COMMIT} on-the-side")
    world.promote(box)
    assert world.git("log", "--format=%s", f"elsewhere/{box}") == "on-the-side\ndetached\nfirst"
    assert (world.project / ".git" / "HEAD").read_text().strip() == world.git("rev-parse", "main")
    # below the top of a repository: git finds it inside; its files are moved, and the repository above is not its own
    box = world.made("echo 3 > deep", "--project", str(world.project / "src"))
    asking = "git status --short -- .; git log --format=%s main"
    assert world.inside(box, asking) == "?? deep\nfirst"
    unset = person.elsewhere("exec", box, "--env", "GIT_DISCOVERY_ACROSS_FILESYSTEM=0", "-c", asking)
    assert "not a git repository" in unset.stderr, "whoever sets it has the last word"
    done = world.promote(box)
    assert (done["applied"], done["commits"], world.text("src/deep")) == (["deep"], None, "3\n")
    bare = person.place / "bare"
    bare.mkdir()
    person.own(bare)
    box = world.made(
        f"git init -q; git config user.name T; git config user.email t@e; echo 1 > new; {COMMIT} own", "--project", str(bare)
    )
    done = world.promote(box)
    assert (done["applied"], done["commits"], os.listdir(bare)) == (["new"], None, ["new"]), "a repository is never copied"


# -- commands again -------------------------------------------------------------------------------------------------------------


def test_replay(person: Person) -> None:
    world = World(person, "echo 0 > list; chmod 640 list")
    before = plain(world.project)
    beside = person.home / "beside"
    beside.write_text("0\n")
    person.own(person.home)
    box = world.made(f"echo one >> list; mkdir made; pwd > made/where; echo 1 > .env; echo 1 > {beside}")
    person.elsewhere("exec", box, "--", "sh", "-c", "echo never >> list; false")
    world.inside(box, "test ! -e stop; echo two >> list")
    world.real("echo reality >> list")
    assert world.promote(box, "--replay", code=3)["code"] == "promotion_conflict"
    world.real("sed -i /reality/d list")
    said = world.promote(box, "--replay", code=1)
    assert (said["code"], plain(world.project)) == ("not_agreed", before)
    assert [one["path"] for one in said["detail"]["marked"]] == [
        f"/bin/sh -c 'echo one >> list; mkdir made; pwd > made/where; echo 1 > .env; echo 1 > {beside}'",
        "/bin/sh -c 'test ! -e stop; echo two >> list'",
    ]
    done = world.promote(box, "--replay", "--yes")
    assert (done["kind"], done["status"]) == ("replay", "applied")
    assert (world.text("list"), world.text("made/where")) == ("0\none\ntwo\n", f"{world.project}\n")
    assert [check["exit_code"] for check in done["checks"]] == [0, 0]
    assert (world.text(".env"), beside.read_text()) == ("1\n", "1\n"), "the commands do it, whatever would be moved"
    world.undo()
    assert (plain(world.project), beside.read_text()) == (before, "0\n")
    # one that fails in reality
    other = world.made(f"echo one > list; echo new > new; echo 2 > .env; rm {beside}; mkdir heap; : > heap/$(ls stop || echo no)")
    world.inside(other, "test ! -e stop; rm list")
    world.real(": > stop")
    kept = plain(world.project)
    world.inside(other, "sh -c 'test ! -e stop'")
    said = world.promote(other, "--replay", "--yes", code=4)
    assert (said["code"], "test ! -e stop" in said["message"]) == ("replay_failed", True), said
    assert said["detail"]["not_reversed"] in said["message"]
    assert "stay: heap (" in said["detail"]["not_reversed"], "the sandbox had no heap/stop"
    world.real("rm heap/stop; rmdir heap")
    assert (plain(world.project), beside.read_text()) == (kept, "0\n")
    assert world.promotions()[-1]["status"] == "failed"
    empty = person.json("create")["sandbox"]["id"]
    assert world.promote(empty, "--replay", "--yes", code=1)["code"] == "nothing_to_replay"
    # one that only changes what lies outside is one to be undone
    world.inside(empty, f"echo 3 > {beside}")
    done = world.promote(empty, "--replay", "--yes")
    assert (beside.read_text(), world.undo()["undoes"], beside.read_text()) == ("3\n", done["id"], "0\n")
    # one that is interrupted
    world.inside(empty, "echo 3 > list")
    world.inside(empty, "! test -e stop || kill -9 $PPID")
    assert person.elsewhere("promote", empty, "--replay", "--yes").returncode not in (0, 4)
    assert (world.text("list"), world.promotions()[-1]["note"]) == ("3\n", "interrupted, and put back")
    assert (plain(world.project), beside.read_text()) == (kept, "0\n")


# -- what is kept of it, and for how long ---------------------------------------------------------------------------------------


def test_what_was_promoted_may_go_and_what_was_not_may_not(person: Person) -> None:
    world = World(person)
    box = world.made(f"echo 1 > one; rm README.md; mkdir -p bare; {COMMIT} inside; echo 1 > two; echo x > some.log")
    assert world.says("rm", box, code=1)["code"] == "unpromoted_changes"
    world.promote(box, "--path", "two")
    said = world.says("rm", box, code=1)
    assert said["code"] == "unpromoted_changes"
    world.promote(box, "--ignored")
    world.inside(box, "echo 2 > two")
    assert world.says("rm", box, code=1)["detail"]["changes"] == [str(world.project / "two")]
    world.promote(box)
    world.undo()
    assert world.says("rm", box, code=1)["code"] == "unpromoted_changes"
    world.promote(box)
    person.elsewhere("rm", box, check=True)
    world.undo()
    assert world.text("two") == "1\n", "that does not need the sandbox"


@pytest.mark.own_launcher
def test_what_is_kept_is_shown_and_forgotten(person: Person) -> None:
    world = World(person, "head -c 300000 /dev/urandom > large; mkdir -p ~/.config/elsewhere")
    settings = person.home / ".config" / "elsewhere" / "elsewhere.toml"
    old = world.promote(world.made("head -c 300000 /dev/urandom > large"))["id"]
    new = world.promote(world.made("echo 1 > small"))["id"]
    shown = {one["id"]: one for one in person.json("df")["items"] if one["kind"] == "promotion"}
    assert shown[old]["bytes"] > 300000 > shown[new]["bytes"] > 0
    assert person.json("janitor", "--dry-run")["matched"] == []
    settings.write_text("[promotion]\ncap = '100K'\n")
    assert f"journal/{old}" in person.json("janitor", "--dry-run")["matched"]
    assert old in [one["id"] for one in world.promotions()]
    person.elsewhere("janitor", check=True)
    assert [one["id"] for one in world.promotions()] == [new], "the oldest first, as far as it has to be"
    assert world.undo(old, code=1)["code"] == "promotion_not_found"
    settings.write_text("[promotion]\nkeep = '1ms'\n")
    last = world.promote(world.made("echo 1 > smaller"))["id"]
    assert [one["id"] for one in world.promotions()] == [last], "only the one that was just told stays"
    world.undo(last)
    settings.write_text("[promotion]\ncap = 'much'\n")
    said = world.says("promote", "@last", code=2)
    assert "promotion.cap" in said["message"]
    settings.unlink()
    (world.project / "elsewhere.toml").write_text("[promotion]\nkeep = '1s'\n")
    assert world.says("promote", "@last", code=2)["code"]


# -- from Python ----------------------------------------------------------------------------------------------------------------


def test_from_python(person: Person) -> None:
    world = World(person)
    code = f"""
import os
from pathlib import Path
from elsewhere import Conflict, ElsewhereError, Sandbox, promotions, undo
with Sandbox.create(on_exit='promote') as box:
    box.run('echo 1 > new; rm README.md; echo KEY=2 > .env').check()
    assert not os.path.exists('new')
done = promotions()[-1]
assert (done.sandbox, done.kind, done.status, done.applied, done.deleted) == (box.id, 'promote', 'applied', ('new',), ('README.md',)), done
assert Path('new').read_text() == '1\\n' and Path('.env').read_text() == 'KEY=value\\n'
back = done.undo()
assert (back.kind, back.applied, back.deleted) == ('undo', ('README.md',), ('new',))
try:
    with Sandbox.create(on_exit='promote') as kept:
        kept.run('echo 2 > new').check()
        raise KeyError('mine')
except KeyError:
    pass
assert not os.path.exists('new')
with Sandbox.get(kept.id) as again:
    assert again.run('cat new').stdout == '2\\n'
    Path('new').write_text('3')
    for call in (lambda: again.promote(), lambda: again.promote(theirs=['no'])):
        try:
            call()
        except (Conflict, ValueError) as error:
            print(type(error).__name__, error.code, [one['path'] for one in error.detail.get('conflicts', ())])
    try:
        again.promote(paths=['nothing*'])
    except ValueError as error:
        print(error.code)
    for options in (dict(commits=False, branch='mine'), dict(replay=True, checkout=True), dict(replay=True, paths=['new'])):
        try:
            again.promote(**options)
        except ValueError as error:
            print(error.code, error.message)
    assert again.promote(theirs=['new']).applied == ()
    done = again.promote(ours=['new'])
    assert (Path('new').read_text(), done.applied) == ('2\\n', ('new',))
    again.run('echo 1 > .envrc; echo 1 > a.log; git add -f a.log; git commit -qm x; echo 2 > {person.home}/beside').check()
    try:
        again.promote()
    except PermissionError as error:
        print(error.code)
    done = again.promote(yes=True, ignored=True, outside=['{person.home}/beside'], branch='mine', checkout=True)
    assert done.branch == 'mine' and '{person.home}/beside' in done.applied and '.envrc' in done.applied, done
    assert undo().status == 'applied'
try:
    with Sandbox.create(on_exit='promote') as box:
        box.run('echo 9 > new').check()
        Path('new').write_text('8')
except Conflict as error:
    print(error.code, Sandbox.get(box.id).id == box.id)
try:
    undo('p00')
except LookupError as error:
    print(error.code)
"""
    assert person.sdk(code).stdout.splitlines() == [
        "Conflict promotion_conflict ['new']",
        "UsageError no_such_conflict []",
        "nothing_fits",
        "options_together --branch means nothing beside --no-commits",
        "options_together --checkout means nothing beside --replay",
        "options_together --path means nothing beside --replay",
        "not_agreed",
        "promotion_conflict True",
        "promotion_not_found",
    ]
    assert world.git("branch", "--show-current") == "main"


# -- stages, in short -----------------------------------------------------------------------------------------------------------


def test_stages_have_their_exit_codes(person: Person) -> None:
    world = World(person)
    box = world.made("echo good > new")
    assert world.promote(box, "--to", "dev", code=1)["code"]
    stages = (
        '[[stages]]\nname = "dev"\ntarget = "."\nchecks = ["! grep -q bad new"]\n[[stages]]\nname = "next"\napprove = "person"\n'
    )
    (world.project / "elsewhere.toml").write_text(stages + 'target = { branch = "next" }\n')
    world.real("git branch next")
    said = world.promote(box, "--to", "nowhere", code=1)
    assert "nowhere" in said["message"]
    for option in ("--replay", "--checkout"):
        assert person.elsewhere("promote", box, option).returncode != 0
    assert world.promote(box)["stage"] == "dev"
    assert world.text("new") == "good\n"
    done = world.promote(box, "--to", "next")
    assert done["status"] == "waiting"
    assert world.says("approve", done["id"])["status"] == "applied"
    assert world.git("show", "next:new") == "good"
    assert world.says("approve", done["id"], code=1)["code"]
    assert world.says("approve", "nobody", code=1)["code"] == "promotion_not_found"
    world.inside(box, "echo bad > new")
    assert world.promote(box, code=4)["code"]
    assert world.text("new") == "good\n"
    world.inside(box, "echo fine > new")
    world.real("echo other > new")
    assert [one["path"] for one in world.promote(box, code=3)["detail"]["conflicts"]] == ["new"]
    assert world.text("new") == "other\n"


def test_what_nobody_settled_is_not_taken(person: Person) -> None:
    """Where no mark reminds anybody of a conflict, promoting the fork as it is would overwrite what somebody did in reality."""
    world = World(person, "printf 'a\\0' > bin; echo d > del; echo n > edit; ln -s x l; echo t > text")
    box = world.made("printf 'b\\0' > bin; rm del; echo s > edit; ln -sf y l; echo mine > both; echo here > text")
    world.real("printf 'mine\\0' > bin; echo hours > del; rm edit; ln -sfn z l; echo his > both; echo there > text")
    before = tree(world.project)
    said = person.json("promote", box, "--resolve")
    fork = said["sandbox"]["id"]
    names = {"bin", "both", "del", "edit", "l", "text"}
    assert {one["path"] for one in said["conflicts"]} == names
    assert set(world.refused("promote", fork)) == names
    assert tree(world.project) == before
    world.inside(fork, "printf 'both\\0' > bin; echo settled > both; echo hours too > del; rm edit; ln -sfn w l; echo t2 > text")
    done = world.promote(fork)
    assert set(done["applied"]) == names - {"edit"}
    assert (world.text("del"), world.text("both"), world.text("text")) == ("hours too\n", "settled\n", "t2\n")
    assert (world.project / "l").readlink() == Path("w")
    assert not (world.project / "edit").exists()


def test_an_empty_pattern_names_nothing(person: Person) -> None:
    """It is an unset variable, most likely."""
    world = World(person, "echo 0 > a; echo 0 > b")
    box = world.made("echo here | tee a b")
    world.real("echo there | tee a b")
    for option in ("--ours", "--theirs", "--path", "--outside"):
        assert world.promote(box, option, "", code=2)["code"] == "bad_pattern"
    assert person.elsewhere("diff", box, "").returncode == 2
    assert (world.text("a"), world.text("b")) == ("there\n", "there\n")


def test_a_lone_text_is_one_pattern(person: Person) -> None:
    world = World(person, "echo 0 > a.txt; echo 0 > b")
    code = """
from elsewhere import Sandbox, undo
with Sandbox.create(on_exit='discard') as box:
    box.run('echo s | tee a.txt b c').check()
    assert box.promote(paths='a.txt').applied == ('a.txt',)
    undo(theirs=())
"""
    person.sdk(code)
    assert (world.text("a.txt"), world.text("b")) == ("0\n", "0\n")


COMMITTED = "git add -A; git -c user.name=s -c user.email=s@s commit -qm inside"


def test_a_checkout_is_of_everything(person: Person) -> None:
    world = World(person, "echo 0 > f; echo 0 > g; git add -A; git commit -qm i")
    box = world.made(f"echo 1 > f; echo 1 > g; {COMMITTED}")
    assert world.promote(box, "--checkout", "--path", "f", code=2)["code"] == "options_together"
    assert world.promote(box, "--path", "nonsense", code=2)["code"] == "nothing_fits"
    other = world.made(f"git checkout -qb later; echo 1 > f; {COMMITTED}; git checkout -q main")
    assert world.promote(other, "--checkout", code=2)["code"] == "no_commits"
    world.real("echo staged > h; git add h")
    for options in (["--dry-run"], []):
        assert world.promote(box, "--checkout", *options, code=3)["code"] == "index_not_clean"
    assert world.real("git branch --list 'elsewhere/*'") == "", "what was refused left no branch"
    assert (world.text("f"), world.text("g")) == ("0\n", "0\n")


def test_a_checkout_does_not_leave_commits_of_reality_behind(person: Person) -> None:
    """After a refresh the sandbox's base is new, and what was committed in it before is not."""
    world = World(person, "echo 0 > f; echo 0 > g; git add -A; git commit -qm i")
    box = world.made(f"echo 1 > f; {COMMITTED}", "--base", "pinned")
    world.real("echo R > g; git commit -qam real")
    person.elsewhere("refresh", box, check=True)
    assert world.promote(box, "--checkout", code=3)["code"] == "head_moved"
    assert "real" in world.real("git log --oneline -1")


def test_two_branches_whose_names_would_be_one_come_apart(person: Person) -> None:
    world = World(person, "echo 0 > f; git add -A; git commit -qm i")
    box = world.made(
        f"git checkout -qb x/y; echo 1 > f; {COMMITTED}; git checkout -q main; git checkout -qb x-y; echo 2 > f; {COMMITTED}; "
        f"git checkout -q main; echo 3 > f; {COMMITTED}"
    )
    others = world.promote(box, "--dry-run")["commits"]["others"]
    last = list(others.values())[-1]
    world.real(f"git branch {last} $(git commit-tree -m x HEAD^{{tree}})")
    world.promote(box, code=3)
    assert world.real("git branch --list 'elsewhere/*' --format '%(refname:short)'") == last, "all of them come, or none"
    world.real(f"git branch -qD {last}")
    world.promote(box)
    names = [line.strip() for line in world.real("git branch --list 'elsewhere/*' --format '%(refname:short)'").splitlines()]
    assert len(names) == 3, names


def test_permissions_of_a_directory_that_reality_changed_are_not_overwritten(person: Person) -> None:
    """A live base has a directory as it was when something was written in it, and cannot tell who changed it since."""
    world = World(person, "mkdir d; echo 0 > d/f")
    box = world.made("echo 1 > d/f", "--base", "live")
    world.real("chmod 700 d")
    assert world.refused("promote", box)["d"] == "no_base"
    assert stat.S_IMODE((world.project / "d").stat().st_mode) == 0o700
