"""Snapshots, rollback and forks from the front door: what each verb does, what it says, and what it refuses."""

import json
import shlex
import subprocess
import zlib
from pathlib import Path

import pytest

from conftest import Person, eventually, tree
from e2e.test_faults import error_of
from e2e.test_kill_points import keeper_of, record_of
from linux.test_ladder import Elsewhere, give_the_hosts_network, needs_fuse, needs_landlock, needs_root

pytestmark = pytest.mark.one_launcher

LAST = "before-rollback-1"


def work(person: Person, box: str, line: str) -> None:
    person.elsewhere("exec", box, "-c", line, check=True)


def shown(person: Person, box: str, line: str = "cat f") -> str:
    done = person.elsewhere("exec", box, "-c", line)
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


def made(person: Person, *options: str, name: str = "box") -> str:
    return str(person.json("create", "--name", name, *options)["sandbox"]["id"])


def names(person: Person, box: str = "box") -> list[str]:
    return [one["name"] for one in person.json("snapshots", box)["snapshots"]]


def fork(person: Person, *arguments: str) -> str:
    """The id of the only child."""
    (child,) = person.json("fork", *arguments)["sandboxes"]
    assert "error" not in child, child
    return str(child["id"])


def layers_left(person: Person) -> list[str]:
    return [entry.name for entry in (person.state / "layers").iterdir() if entry.is_dir()]


def is_running(person: Person, box: str) -> bool:
    return bool(person.json("inspect", box)["sandbox"]["state"] == "running")


# -- back and forth ---


def test_rolling_back_and_forwards(person: Person) -> None:
    """To any snapshot, older or newer; what is left behind is saved, once."""
    before = tree(person.project)
    box = made(person)
    work(person, "box", "echo 1 > f; mkdir d; echo d > d/e")
    assert person.elsewhere("snapshot", "box", "one").stdout == "one\n"
    work(person, "box", "echo 2 > f; rm README.md; rm -r d; echo now a file > d; rm -r src; mkdir src; echo n > src/n")
    document = person.json("snapshot", "box", "two")
    assert document["sandbox"] == {"id": box}
    assert document["processes_left_running"] == 0
    snapshot = document["snapshot"]
    assert (snapshot["name"], snapshot["parent"], snapshot["copied"], snapshot["current"]) == ("two", "one", False, True)
    work(person, "box", "echo 3 > f")

    document = person.json("rollback", "box", "one")
    assert (document["snapshot"]["name"], document["saved_as"], document["sandbox"]) == ("one", LAST, {"id": box})
    assert shown(person, "box", "cat f d/e README.md; ls src") == "1\nd\n# a project\napp.py\ntest_app.py\n"
    assert person.json("rollback", "box", "two")["saved_as"] is None, "it was in a snapshot already"
    assert shown(person, "box", "cat f d; ls; ls src") == "2\nnow a file\nd\nf\nlink\nsrc\nn\n"
    person.elsewhere("rollback", "box", LAST, check=True)
    assert shown(person, "box") == "3\n"
    person.elsewhere("rollback", "box", "base", check=True)
    assert shown(person, "box", "ls; cat README.md; git status --porcelain") == "README.md\nlink\nsrc\n# a project\n"
    listed = person.json("snapshots", "box")
    assert [(one["name"], one["parent"]) for one in listed["snapshots"]] == [("one", None), ("two", "one"), (LAST, "two")]
    assert listed["current"] is None
    assert not any(one["current"] for one in listed["snapshots"])
    assert all(one["bytes"] is not None for one in listed["snapshots"])
    assert tree(person.project) == before


def test_what_is_left_behind_is_said(person: Person) -> None:
    made(person)
    work(person, "box", "echo 1 > f")
    person.elsewhere("snapshot", "box", "one", check=True)
    done = person.elsewhere("rollback", "box", "one")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\n", "")
    work(person, "box", "echo 2 > f")
    done = person.elsewhere("rollback", "box", "one")
    assert done.stdout == "one\n"
    assert LAST in done.stderr
    work(person, "box", "echo 3 > f")
    assert person.json("rollback", "box", "one")["saved_as"] == "before-rollback-2"
    for name, content in ((LAST, "2\n"), ("one", "1\n"), ("before-rollback-2", "3\n")):
        person.elsewhere("rollback", "box", name, check=True)
        assert shown(person, "box") == content


def test_a_snapshot_of_one_that_is_stopped_and_of_one_that_runs(person: Person) -> None:
    """Each stays what it is; nothing changed since the last one is a snapshot as well."""
    made(person)
    work(person, "box", "echo 1 > f; echo t > /tmp/t")
    person.elsewhere("stop", "box", check=True)
    person.elsewhere("snapshot", "box", "stopped", check=True)
    assert not is_running(person, "box")
    work(person, "box", "echo 2 > f; rm /tmp/t")
    person.elsewhere("snapshot", "box", "running", check=True)
    assert is_running(person, "box")
    person.elsewhere("snapshot", "box", "again", check=True)
    person.elsewhere("stop", "box", check=True)
    person.elsewhere("rollback", "box", "stopped", check=True)
    assert not is_running(person, "box")
    assert shown(person, "box", "cat f /tmp/t") == "1\nt\n"
    for name in ("running", "again"):
        person.elsewhere("rollback", "box", name, check=True)
        assert shown(person, "box", "cat f; ls /tmp") == "2\n"


def test_the_tree(person: Person) -> None:
    made(person)
    work(person, "box", "echo 1 > f")
    assert person.elsewhere("snapshots", "box", "--tree").stdout == "base  ◄ goes on from here\n"
    for name, back in (("one", None), ("two", None), ("three", "one"), ("four", None), ("five", "base")):
        if back:
            person.elsewhere("rollback", "box", back, check=True)
        work(person, "box", f"echo {name} > {name}")
        person.elsewhere("snapshot", "box", name, check=True)
    wanted = "base\n├─ one\n│  ├─ two\n│  └─ three\n│     └─ four\n└─ five  ◄ goes on from here\n"
    assert person.elsewhere("snapshots", "box", "--tree").stdout == wanted
    table = person.elsewhere("snapshots", "box").stdout.splitlines()
    assert [line.split()[0] for line in table] == ["NAME", "one", "two", "three", "four", "five"]
    assert [line.split()[1] for line in table[1:]] == ["base", "one", "one", "three", "base"]
    assert "goes on from here" in table[-1]
    person.elsewhere("rm-snapshot", "box", "three", check=True)
    wanted = "base\n├─ one\n│  ├─ two\n│  └─ four\n└─ five  ◄ goes on from here\n"
    assert person.elsewhere("snapshots", "box", "--tree").stdout == wanted
    person.elsewhere("rollback", "box", "four", check=True)
    assert shown(person, "box", "ls one three four; cat f") == "four\none\nthree\n1\n", "what came after needs it still"


# -- names ---


def test_names_are_made_up_and_unique(person: Person) -> None:
    box = made(person)
    work(person, "box", "echo 1 > f")
    assert [person.elsewhere("snapshot", "box").stdout for _ in range(3)] == [f"snapshot-{number}\n" for number in (1, 2, 3)]
    person.elsewhere("rm-snapshot", "box", "snapshot-2", check=True)
    assert person.elsewhere("snapshot", "box").stdout == "snapshot-2\n"
    error = error_of(person, "snapshot", "box", "snapshot-1", code=2)
    assert error["code"] == "snapshot_exists"
    assert "snapshot-1" in error["message"]
    assert names(person) == ["snapshot-1", "snapshot-3", "snapshot-2"]
    other = made(person, name="other")
    assert person.elsewhere("snapshot", "other", "snapshot-1").stdout == "snapshot-1\n", "names belong to a sandbox"
    assert box != other


@pytest.mark.own_launcher
@pytest.mark.parametrize("name", ["", "-x", ".x", "a/b", "..", "two words", "ümlaut", "x" * 64, "base", "now", "new\nline"])
def test_a_name_that_cannot_be_one_changes_nothing(person: Person, name: str) -> None:
    box = made(person)
    work(person, "box", "echo 1 > f")
    keeper = keeper_of(person, box)
    done = person.elsewhere("snapshot", "--json", "box", "--", name)
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "bad_snapshot_name"
    assert keeper_of(person, box) == keeper, "nothing is disturbed for a name that cannot be"
    assert names(person) == []
    assert layers_left(person) == []


def test_odd_names_that_can_be(person: Person) -> None:
    made(person)
    for name in ("x" * 63, "1", "a.b-c_d", "BASE"):
        person.elsewhere("snapshot", "box", name, check=True)
        person.elsewhere("rollback", "box", name, check=True)


def test_an_unknown_name_changes_nothing(person: Person) -> None:
    box = made(person)
    work(person, "box", "echo 1 > f")
    person.elsewhere("snapshot", "box", "one", check=True)
    work(person, "box", "echo 2 > f")
    keeper, record, layers = keeper_of(person, box), record_of(person, box), sorted(layers_left(person))
    for arguments in (
        ("rollback", "box", "missing"),
        ("rollback", "--force", "box", "missing"),
        ("rollback", "box", "now"),
        ("fork", "box", "--from", "missing"),
        ("fork", "box", "-n", "3", "--from", "missing"),
        ("rm-snapshot", "box", "missing"),
    ):
        error = error_of(person, *arguments, code=1)
        assert error["code"] == "snapshot_not_found"
        assert arguments[-1] in error["message"]
        assert "snapshots" in error["hint"]
    error = error_of(person, "rm-snapshot", "box", "base", code=2)
    assert error["code"] == "bad_snapshot_name"
    for verb in ("snapshot", "snapshots", "rollback", "fork", "rm-snapshot"):
        more = ("one",) if verb in ("rollback", "rm-snapshot") else ()
        assert error_of(person, verb, "missing", *more, code=1)["code"] == "sandbox_not_found"
    assert keeper_of(person, box) == keeper
    assert record_of(person, box) == record
    assert sorted(layers_left(person)) == layers
    assert shown(person, "box") == "2\n"
    assert person.json("list")["total"] == 1


# -- forks ---


def test_forks_are_independent_in_both_directions(person: Person) -> None:
    parent = made(person, "--label", "team=a")
    work(person, "box", "echo 1 > f; echo shared > shared; rm README.md")
    document = person.json("fork", "box", "-n", "2", "--name", "child")
    assert [child["name"] for child in document["sandboxes"]] == ["child-1", "child-2"]
    assert document["processes_left_running"] == 0
    for child in document["sandboxes"]:
        assert child["origin"] == {"sandbox": parent, "snapshot": None}
        assert child["state"] == "stopped"
        assert child["labels"] == {"team": "a"}
        assert child["id"] != parent
        assert child["identity"] != record_of(person, parent)["identity"]
    assert is_running(person, "box")
    for box, number in (("box", 2), ("child-1", 3), ("child-2", 4)):
        assert shown(person, box, "cat f shared; ls README.md || true") == "1\nshared\n"
        work(person, box, f"echo {number} > f; echo {box} > of-{box}; rm shared")
    for box, number in (("box", 2), ("child-1", 3), ("child-2", 4)):
        assert shown(person, box, "cat f; ls") == f"{number}\nf\nlink\nof-{box}\nsrc\n"
    assert names(person, "child-1") == []
    person.elsewhere("rollback", "child-1", "base", check=True)
    assert shown(person, "child-1", "cat README.md; ls f 2>/dev/null || echo none") == "# a project\nnone\n"


def test_a_fork_outlives_its_parent(person: Person) -> None:
    """And the snapshots that it came from; when nobody needs them, the layers go."""
    parent = made(person)
    work(person, "box", "echo 1 > f")
    person.elsewhere("snapshot", "box", "one", check=True)
    work(person, "box", "echo 2 > f")
    now, then = fork(person, "box"), fork(person, "box", "--from", "one", "--name", "then")
    assert record_of(person, then)["origin"].items() >= {"sandbox": parent, "snapshot": "one"}.items()
    person.sdk(f"from elsewhere import Sandbox\nSandbox.get({parent!r}, on_exit='discard').remove()")
    assert eventually(lambda: not list((person.state / "trash").iterdir()))
    grandchild = fork(person, now, "--name", "grand")
    assert [shown(person, box) for box in (now, then, grandchild)] == ["2\n", "1\n", "2\n"]
    person.elsewhere("rm", "--force", now, then, grandchild, check=True)
    archived = [entry.name for entry in (person.state / "archive").iterdir()]
    assert sorted(archived) == sorted([now, then, grandchild]), "they had changes"
    assert layers_left(person), "what is in the archive can be gone back to"


@pytest.mark.own_launcher
def test_layers_that_nobody_needs_go(person: Person) -> None:
    made(person)
    work(person, "box", "echo 1 > f")
    person.elsewhere("snapshot", "box", "one", check=True)
    person.elsewhere("rollback", "box", "base", check=True)
    assert len(layers_left(person)) == 1
    assert person.json("rm-snapshot", "box", "one")["removed"] == ["one"]
    assert layers_left(person) == []
    assert person.elsewhere("rm-snapshot", "box", "one").returncode == 1
    work(person, "box", "echo 2 > f")
    person.elsewhere("snapshot", "box", "two", check=True)
    person.elsewhere("rm-snapshot", "box", "two", check=True)
    assert shown(person, "box") == "2\n", "the sandbox goes on from it"
    person.elsewhere("rollback", "box", "base", check=True)
    (left,) = names(person)
    person.elsewhere("rm-snapshot", "box", left, check=True)
    person.elsewhere("rm", "box", check=True)
    assert layers_left(person) == []


def test_each_of_several_children_fails_on_its_own(person: Person) -> None:
    made(person)
    made(person, name="child-2")
    work(person, "box", "echo 1 > f")
    done = person.elsewhere("fork", "box", "-n", "3", "--name", "child")
    assert done.returncode == 1
    assert len(done.stdout.split()) == 2
    assert "child-2" in done.stderr
    assert [shown(person, box) for box in ("child-1", "child-3")] == ["1\n", "1\n"]
    done = person.elsewhere("fork", "--json", "box", "-n", "2", "--name", "child")
    assert done.returncode == 1
    assert [child["error"]["code"] for child in json.loads(done.stdout)["sandboxes"]] == ["name_in_use"] * 2
    assert person.json("list")["total"] == 4
    assert not [entry for entry in (person.state / "spare").iterdir() if "fork" in entry.name]
    done = person.elsewhere("fork", "--json", "box", "--name", "box")
    assert done.returncode == 1
    assert json.loads(done.stdout)["sandboxes"][0]["error"]["code"] == "name_in_use"


@pytest.mark.parametrize(("arguments", "code"), [(["-n", "0"], 2), (["-n", "1001"], 2), (["-n", "x"], 2), (["--name", "a/b"], 2)])
def test_forks_that_cannot_be_made(person: Person, arguments: list[str], code: int) -> None:
    made(person)
    done = person.elsewhere("fork", "--json", "box", *arguments)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert json.loads(done.stdout)["error"]["hint"]
    assert person.json("list")["total"] == 1


def test_a_fork_has_its_parents_confinement_limits_and_time(person: Person) -> None:
    parent = made(person, "--ttl", "2h")
    child = fork(person, "box")
    first, second = (person.json("inspect", box)["sandbox"] for box in (parent, child))
    assert second["limits"] == first["limits"]
    assert second["expires_at"] is not None
    assert second["expires_at"] >= first["expires_at"], "its time begins with it"
    assert second["created_at"] > first["created_at"]
    made(person, name="timeless")
    first = person.json("inspect", "timeless")["sandbox"]
    assert first["limits"]["ttl"] == person.json("inspect", fork(person, "timeless"))["sandbox"]["limits"]["ttl"]


# -- what runs ---

SERVER = r"""
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind('/tmp/server')
server.listen()
held = open('held', 'w')
count = 0
while True:
    asked, _ = server.accept()
    count += 1
    held.write(f'{count}\n'); held.flush()
    asked.sendall(f'{os.getpid()} {count}'.encode())
    asked.close()
"""
ASK = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/tmp/server'); print(s.recv(99).decode())"


def serve(person: Person, box: str = "box") -> str:
    """Its process id inside."""
    person.elsewhere("exec", "-d", box, "--", person.python, "-c", SERVER, check=True)
    assert eventually(lambda: person.elsewhere("exec", box, "--", person.python, "-c", ASK).returncode == 0, 60)
    return ask(person, box)[0]


def ask(person: Person, box: str = "box") -> list[str]:
    return shown(person, box, shlex.join([person.python, "-c", ASK])).split()


def test_what_runs_goes_on_and_that_is_said(person: Person) -> None:
    box = made(person)
    work(person, "box", "echo 1 > f")
    person.elsewhere("snapshot", "box", "idle", check=True)
    pid = serve(person)
    keeper = keeper_of(person, box)
    done = person.elsewhere("snapshot", "box", "busy")
    assert done.stdout == "busy\n"
    assert "1 process went on running" in done.stderr
    document = person.json("snapshot", "box", "again")
    assert document["processes_left_running"] == 1
    assert document["snapshot"]["copied"] is True
    count = int(shown(person, "box", "tail -n 1 held"))
    assert ask(person) == [pid, str(count + 1)], "the same server goes on counting"
    done = person.elsewhere("fork", "box", "--name", "child")
    assert "1 process went on running" in done.stderr
    assert keeper_of(person, box) == keeper
    assert shown(person, "child", "cat f; tail -n 1 held") == f"1\n{count + 1}\n"
    assert person.json("ps", "child")["processes"] == []
    assert ask(person) == [pid, str(count + 2)]
    assert shown(person, fork(person, "box", "--from", "busy"), "tail -n 1 held") == f"{count}\n"
    (request,) = [one for one in person.json("requests", "box")["requests"] if one["state"] == "running"]
    assert SERVER in request["argv"]


def test_a_busy_sandbox_is_rolled_back_only_by_force(person: Person) -> None:
    box = made(person)
    work(person, "box", "echo 1 > f")
    person.elsewhere("snapshot", "box", "one", check=True)
    pid = serve(person)
    work(person, "box", "echo 2 > f")
    before = record_of(person, box)
    error = error_of(person, "rollback", "box", "one", code=1)
    assert error["code"] == "sandbox_in_use"
    assert "--force" in error["hint"]
    assert ask(person)[0] == pid
    assert record_of(person, box) == before
    person.elsewhere("rollback", "--force", "box", "one", check=True)
    assert shown(person, "box", "cat f; ls held 2>/dev/null || echo none") == "1\nnone\n"
    assert person.json("ps", "box")["processes"] == []
    person.elsewhere("rollback", "box", LAST, check=True)
    assert shown(person, "box", "cat f; test -s held && echo held") == "2\nheld\n"


def test_a_command_that_is_asked_for_while_frozen_waits(person: Person) -> None:
    """And its time limit does not run meanwhile; here many snapshots are taken beside commands that begin and end."""
    made(person)
    person.elsewhere("exec", "-d", "box", "--", "sleep", "1000", check=True)
    taking = subprocess.Popen(
        ["sh", "-c", "for n in 1 2 3 4 5 6 7 8; do " + shlex.join(person.command("snapshot", "box")) + " || exit 1; done"],
        cwd=person.project,
        env=person.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **person.identity(),
    )
    for number in range(12):
        work(person, "box", f"echo {number} >> f")
    out, err = taking.communicate(timeout=100)
    assert taking.returncode == 0, err
    assert len(out.split()) == 8
    whole = "".join(f"{number}\n" for number in range(12))
    assert shown(person, "box") == whole
    for name in out.split()[::3]:
        content = shown(person, fork(person, "box", "--from", name), "cat f 2>/dev/null || true")
        assert whole.startswith(content)
        assert not content or content.endswith("\n")


def test_commands_beside_snapshots_of_an_idle_sandbox(person: Person) -> None:
    """One may come in the very moment in which nothing runs, and a snapshot begins: it waits, and runs."""
    made(person)
    loop = (
        "n=0; while test $n -lt 12; do "
        + shlex.join(person.command("exec", "box", "-c", "echo x >> f"))
        + " || exit 1; n=$((n+1)); done"
    )
    working = [
        subprocess.Popen(
            ["sh", "-c", loop],
            cwd=person.project,
            env=person.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **person.identity(),
        )
        for _ in range(2)
    ]
    for _ in range(10):
        done = person.elsewhere("snapshot", "box")
        assert done.returncode == 0, done.stderr
    for one in working:
        _, err = one.communicate(timeout=100)
        assert one.returncode == 0, err
    assert shown(person, "box", "wc -l < f").strip() == "24"
    assert {request["reason"] for request in person.json("requests", "box", "--limit", "100")["requests"]} == {"exited"}


@pytest.mark.slow
def test_what_starts_programs_all_the_time_can_be_stopped(person: Person) -> None:
    """A shell lends its memory to the child that it starts, and cannot be stopped before that one has begun."""
    made(person)
    line = "n=0; while :; do /bin/true; n=$((n+1)); echo $n > count; done"
    for _ in range(3):
        person.elsewhere("exec", "-d", "box", "--", "sh", "-c", line, check=True)
    for _ in range(25):
        document = person.json("snapshot", "box")
        assert document["snapshot"]["copied"] is True
        assert 3 <= document["processes_left_running"] <= 6
    assert len(person.json("ps", "box")["processes"]) >= 3
    before = int(shown(person, "box", "cat count") or 0)
    assert eventually(lambda: int(shown(person, "box", "cat count") or before) != before, 30), "they went on"


def test_one_that_belongs_to_a_program(person: Person) -> None:
    code = """
import json, subprocess, sys
from elsewhere import Sandbox
with Sandbox.create() as box:
    for verb in (['snapshot', box.id], ['rollback', box.id, 'base'], ['fork', box.id]):
        done = subprocess.run([sys.executable, '-m', 'elsewhere', verb[0], '--json', *verb[1:]], capture_output=True)
        print(done.returncode, json.loads(done.stdout)['error']['code'])
"""
    assert person.sdk(code).stdout.splitlines() == ["1 sandbox_in_use"] * 3


# -- the whole environment ---


SYSTEM = (
    "echo e > /etc/elsewhere-test; mkdir /opt/tool; echo t > /opt/tool/t; useradd -M somebody; rm -f /etc/hostname",
    "cat /etc/elsewhere-test /opt/tool/t; id -un somebody; ls /etc/hostname 2>/dev/null || echo none",
    "rm -r /opt/tool /etc/elsewhere-test; userdel somebody; echo x > /etc/hostname",
)


def test_everything_that_can_be_written_is_saved(person: Person) -> None:
    """The project, the home directory, /tmp, /var/tmp; as root the system's own directories and accounts."""
    place = person.home / "notes"
    made(person)
    system, look, change = SYSTEM if person.is_root else (":", ":", ":")
    work(person, "box", f"echo h > {place}; echo t > /tmp/t; echo v > /var/tmp/v; {system}")
    first = shown(person, "box", f"cat {place} /tmp/t /var/tmp/v; {look}")
    person.elsewhere("snapshot", "box", "one", check=True)
    work(person, "box", f"rm {place} /tmp/t; echo w >> /var/tmp/v; {change}")
    person.elsewhere("snapshot", "box", "two", check=True)
    person.elsewhere("rollback", "box", "one", check=True)
    assert shown(person, "box", f"cat {place} /tmp/t /var/tmp/v; {look}") == first
    assert shown(person, fork(person, "box"), f"cat {place} /tmp/t /var/tmp/v; {look}") == first
    person.elsewhere("rollback", "box", "two", check=True)
    assert shown(person, "box", f"ls {place.parent}; ls /tmp; cat /var/tmp/v") == "v\nw\n"
    person.elsewhere("rollback", "box", "base", check=True)
    # Where reality has something mounted, it shows: others may be at work there.
    assert shown(person, "box", f"ls {place.parent}; ls /tmp; ls /var/tmp | grep -v ^elsewhere-demo- || true") == ""
    assert not place.exists()
    assert not Path("/etc/elsewhere-test").exists()


@pytest.mark.parametrize("options", [("--view", "project"), ("--untrusted",)])
def test_a_narrow_view(person: Person, options: tuple[str, ...]) -> None:
    """Its private home and its project."""
    made(person, *options)
    work(person, "box", "echo 1 > f; echo h > ~/notes; mkdir -p ~/.config/x; echo t > /tmp/t")
    person.elsewhere("snapshot", "box", "one", check=True)
    work(person, "box", "echo 2 > f; rm -r ~/notes ~/.config; echo n > ~/.config; rm /tmp/t")
    child = fork(person, "box", "--name", "child")
    person.elsewhere("rollback", "box", "one", check=True)
    assert shown(person, "box", "cat f ~/notes /tmp/t; ls -A ~/.config") == "1\nh\nt\nx\n"
    assert shown(person, child, "cat f ~/.config; ls /tmp; ls ~") == "2\nn\n"
    for box in ("box", child):
        confinement = record_of(person, person.json("inspect", box)["sandbox"]["id"])["confinement"]
        assert confinement["view"] == "project"
    person.elsewhere("rollback", "box", "base", check=True)
    assert shown(person, "box", "ls -A ~; ls /tmp; ls f 2>/dev/null || echo none") == "none\n"


def test_hidden_places_stay_hidden(root: Person) -> None:
    """A directory around one that was renamed before a snapshot shows it nowhere afterwards, nor does a fork."""
    secret = root.home / ".ssh"
    secret.mkdir()
    (secret / "key").write_text("what-nobody-inside-may-know")
    made(root)
    moved = f"{root.home}-moved"
    work(root, "box", f"cp -r {root.home} /tmp/copy; mv {root.home} {moved}; mkdir {root.home}")
    root.elsewhere("snapshot", "box", "one", check=True)
    work(root, "box", f"mv {moved} {moved}-again")
    look = f"grep -rs what-nobody /tmp/copy {root.home} {moved} {moved}-again; test -d {moved}-again && echo there"
    root.elsewhere("stop", "box", check=True)
    assert shown(root, "box", look) == "there\n"
    root.elsewhere("snapshot", "box", "two", check=True)
    assert shown(root, fork(root, "box", "--from", "two"), look) == "there\n"
    root.elsewhere("rollback", "box", "one", check=True)
    assert shown(root, "box", f"grep -rs what-nobody {moved} /tmp/copy; test -d {moved} && echo there") == "there\n"


# -- bases, and where the state lies ---


def test_a_pinned_base(person: Person) -> None:
    """Reality goes on; the snapshots of a pinned sandbox, and its forks, do not."""
    made(person, "--base", "pinned")
    work(person, "box", "echo 1 > f; echo mine >> src/app.py; rm -r .git")
    person.elsewhere("snapshot", "box", "one", check=True)
    (person.project / "README.md").write_text("reality went on\n")
    (person.project / "new").write_text("new\n")
    work(person, "box", "rm README.md; mkdir .git")
    child = fork(person, "box", "--from", "one")
    look = "cat f README.md; tail -n 1 src/app.py; ls -A"
    seen = "1\n# a project\nmine\n.env\n.gitignore\nREADME.md\nf\nlink\nsrc\n"
    assert shown(person, child, look) == seen
    person.elsewhere("rollback", "box", "one", check=True)
    assert shown(person, "box", look) == seen
    person.elsewhere("rm", "--force", "box", check=True)
    assert shown(person, child, look) == seen
    person.elsewhere("rollback", child, "base", check=True)
    assert shown(person, child, "cat README.md; git status --porcelain") == "# a project\n"


def test_a_commit_as_base(person: Person) -> None:
    (person.project / "src" / "app.py").write_text("second\n")
    person.shell("git", "commit", "-qam", "second", cwd=person.project)
    made(person, "--base-ref", "HEAD~1")
    head = shown(person, "box", "git rev-parse HEAD")
    work(person, "box", "git config user.email a@b; git config user.name n; echo 1 > f; git add f; git commit -qm inside")
    inside = shown(person, "box", "git rev-parse HEAD")
    person.elsewhere("snapshot", "box", "one", check=True)
    work(person, "box", "git reset -q --hard HEAD~1; echo x > x")
    child = fork(person, "box")
    assert shown(person, child, "git rev-parse HEAD; git status --porcelain") == f"{head}?? x\n"
    person.elsewhere("rollback", "box", "one", check=True)
    assert shown(person, "box", "git rev-parse HEAD; git status --porcelain; head -n 1 src/app.py") == f"{inside}def add(a, b):\n"
    person.elsewhere("rollback", "box", "base", check=True)
    assert shown(person, "box", "git rev-parse HEAD; git status --porcelain") == head
    assert shown(person, fork(person, "box", "--from", "one"), "git rev-parse HEAD") == inside


def test_layers_beside_reality(person: Person) -> None:
    """The state directory lies in what a sandbox shows: below the home directory, which for an ordinary user is one overlay."""
    person.extra["HOME"] = str(person.place)
    made(person, "--base", "live")
    for number in range(12):
        work(person, "box", f"echo {number} > f; echo {number} > ~/g; mkdir -p ~/deep/{number}; find ~ >/dev/null 2>&1 || true")
        person.elsewhere("snapshot", "box", f"s{number}", check=True)
    assert shown(person, "box", "cat f ~/g; ls ~/deep | wc -l; ls -A ~/state 2>/dev/null | wc -l") == "11\n11\n12\n0\n"
    person.elsewhere("rollback", "box", "s3", check=True)
    assert shown(person, "box", "cat f ~/g; ls ~/deep | wc -l") == "3\n3\n4\n"
    assert shown(person, fork(person, "box", "--from", "s9"), "cat f ~/g") == "9\n9\n"


# -- a file system of its own ---


@pytest.mark.slow
def test_layers_in_an_image(root: Person) -> None:
    box = made(root, "--disk", "64M")
    assert record_of(root, box)["disk"] == "image"
    work(root, "box", "echo 1 > f; echo e > /etc/elsewhere-test; head -c 1000000 /dev/urandom > big; echo t > /tmp/t")
    root.elsewhere("snapshot", "box", "one", check=True)
    work(root, "box", "echo 2 > f; rm big /tmp/t")
    child, then = fork(root, "box"), fork(root, "box", "--from", "one")
    pid = serve(root)
    document = root.json("snapshot", "box", "busy")
    assert (document["processes_left_running"], document["snapshot"]["copied"]) == (1, True)
    late = fork(root, "box", "--from", "busy")
    later = fork(root, "box")
    assert ask(root)[0] == pid
    root.elsewhere("rollback", "--force", "box", "one", check=True)
    look = "cat f /etc/elsewhere-test; ls big /tmp/t 2>/dev/null || true"
    assert shown(root, "box", look) == "1\ne\n/tmp/t\nbig\n"
    assert shown(root, then, look) == "1\ne\n/tmp/t\nbig\n"
    assert [shown(root, one, look) for one in (child, late, later)] == ["2\ne\n"] * 3
    work(root, then, "echo 9 > f")
    root.elsewhere("snapshot", then, "nine", check=True)
    assert shown(root, "box") == "1\n"
    root.elsewhere("rm", "--force", "box", check=True)
    assert shown(root, then) == "9\n"
    for one in (child, then, late, later):
        assert record_of(root, one)["disk"] == "image"
        done = root.elsewhere("exec", one, "-c", "head -c 100000000 /dev/zero > huge")
        assert done.returncode != 0, "the limit holds for forks"
    # Full to the last block: it is refused and goes on as it was, or it works.
    done = root.elsewhere("rollback", "--json", child, "base")
    if done.returncode:
        assert json.loads(done.stdout)["error"]["code"] == "no_room"
        assert shown(root, child, look) == "2\ne\n"
        work(root, child, "rm huge")
        root.elsewhere("rollback", child, "base", check=True)
    assert shown(root, child, "ls f 2>/dev/null || echo none") == "none\n"


def test_a_full_image_is_said_and_nothing_is_lost(root: Person) -> None:
    made(root, "--disk", "24M")
    work(root, "box", "echo 1 > f")
    root.elsewhere("snapshot", "box", "one", check=True)
    root.elsewhere("exec", "-d", "box", "--", "sleep", "1000", check=True)
    root.elsewhere("exec", "box", "-c", "head -c 12000000 /dev/urandom > big")
    error = error_of(root, "snapshot", "box", "two", code=1)
    assert error["code"] == "no_room"
    assert names(root) == ["one"]
    work(root, "box", "cat f; rm big; echo 2 > f")
    root.elsewhere("snapshot", "box", "two", check=True)
    root.elsewhere("rollback", "--force", "box", "one", check=True)
    assert shown(root, "box") == "1\n"


@pytest.mark.slow
def test_many_snapshots_in_an_image(root: Person) -> None:
    made(root, "--disk", "64M")
    for number in range(1, 13):
        work(root, "box", f"echo {number} > f; touch n-{number}; rm -f n-{number - 2}")
        root.elsewhere("snapshot", "box", f"s{number}", check=True)
    for number in (1, 9, 12):
        root.elsewhere("rollback", "box", f"s{number}", check=True)
        assert int(shown(root, "box")) == number
        assert len(shown(root, "box", "ls -d n-*").split()) == min(number, 2)


# -- as a library ---


def test_the_same_from_a_program(person: Person) -> None:
    code = """
from elsewhere import Sandbox, Snapshot
from elsewhere.errors import ElsewhereError, InUse, NotFound, UsageError
def refused(kind, code, call):
    try:
        call()
    except kind as error:
        assert error.code == code, error.code
    else:
        raise AssertionError(code)
with Sandbox.create() as box:
    box.run('echo 1 > f').check()
    one = box.snapshot('one')
    assert isinstance(one, Snapshot) and (one.name, one.parent, one.copied) == ('one', None, False), one
    box.run('echo 2 > f; rm README.md').check()
    two = box.snapshot()
    assert (two.name, two.parent) == ('snapshot-1', 'one')
    box.files.write('f', '3')
    assert box.rollback(one) == 'before-rollback-1'
    assert box.files.read('f') == b'1\\n'
    assert box.rollback('snapshot-1') is None
    assert box.run('cat f; ls README.md').stdout == '2\\n'
    assert [one.name for one in box.snapshots()] == ['one', 'snapshot-1', 'before-rollback-1']
    refused(NotFound, 'snapshot_not_found', lambda: box.rollback('missing'))
    refused(UsageError, 'snapshot_exists', lambda: box.snapshot('one'))
    refused(UsageError, 'bad_count', lambda: box.fork(0))
    left, right = box.fork(2, source=one)
    (now,) = box.fork(on_exit='keep')
    left.run('echo left > f').check()
    assert right.run('cat f README.md').stdout == '1\\n# a project\\n'
    assert left.changes().added and left.id != right.id
    with box.start('sleep 1000'):
        busy = box.snapshot('busy')
        assert busy.copied
        refused(InUse, 'sandbox_in_use', lambda: box.rollback('one'))
        assert box.rollback('one', force=True) is None
    assert box.run('cat f').stdout == '1\\n'
    box.remove_snapshot('busy')
    box.remove_snapshot(two)
    taken = box.fork(name='taken')[0]
    try:
        box.fork(2, name='taken'), box.fork(1, name='taken')
    except ElsewhereError as error:
        assert error.code == 'name_in_use' and error.detail['made'] == []
    for child in (left, right, taken):
        child.remove()
    assert box.run('cat f').stdout == '1\\n'
with now:
    assert now.run('cat f').stdout == '2\\n'
print(now.id)
"""
    kept = person.sdk(code).stdout.strip()
    listed = [box["id"] for box in person.json("list")["sandboxes"] if not (box["name"] or "").startswith("taken")]
    assert listed == [kept]


# -- never torn ---

WRITER = r"""
import os, zlib
log = os.open('log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
number = 0
while not os.path.exists('/tmp/enough'):
    number += 1
    body = f'{number:08d} '.encode() + os.urandom(number % 40 * 97).hex().encode()
    os.write(log, body + b' %08x\n' % zlib.crc32(body))
    aside = os.open('aside', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for piece in (b'%d\n' % number, b'x' * 5000, b'\nend\n'):
        os.write(aside, piece)
    os.close(aside)
    os.rename('aside', 'number')
open('/tmp/finished', 'w').close()
"""


def is_whole(log: bytes, number: bytes) -> int:
    """Every record of the log as it was written, and the other file of the same moment; the number of the last one."""
    assert log.endswith(b"\n"), log[-200:]
    count = 0
    for line in log.splitlines():
        count += 1
        body, _, check = line.rpartition(b" ")
        assert int(body.split(b" ")[0]) == count
        assert int(check, 16) == zlib.crc32(body), f"record {count} is torn"
    first, content, last = number.splitlines()
    assert (content, last) == (b"x" * 5000, b"end")
    assert int(first) in (count, count - 1), f"of two moments: {first!r}, {count}"
    return count


TAKE = """
import sys
from elsewhere import Sandbox
with Sandbox.get('box') as box:
    for number in range(int(sys.argv[1])):
        taken = box.snapshot(f's{number}')
        assert taken.copied
"""


def never_torn(person: Person, count: int, sample: int) -> None:
    made(person)
    person.elsewhere("exec", "-d", "box", "--", person.python, "-c", WRITER, check=True)
    assert eventually(lambda: person.elsewhere("exec", "box", "-c", "test -s number").returncode == 0, 60)
    person.shell(person.python, "-c", TAKE, str(count), cwd=person.project, timeout=600)
    work(person, "box", "touch /tmp/enough; until test -e /tmp/finished; do sleep 0.05; done")
    assert len(names(person)) == count
    person.elsewhere("stop", "box", check=True)
    seen = []
    for number in sorted({0, count - 1, *range(0, count, max(1, count // sample))}):
        child = fork(person, "box", "--from", f"s{number}")
        person.elsewhere("cp", f"{child}:log", "log-read", check=True)
        person.elsewhere("cp", f"{child}:number", "number-read", check=True)
        seen.append(is_whole((person.project / "log-read").read_bytes(), (person.project / "number-read").read_bytes()))
        for name in ("log-read", "number-read"):
            (person.project / name).unlink()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0], "the writer did not get on"


def test_a_snapshot_is_never_torn(person: Person) -> None:
    never_torn(person, 8, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_snapshots_are_never_torn(person: Person) -> None:
    never_torn(person, 100, 25)


# -- many ---

MANY = """
import sys
from elsewhere import Sandbox
with Sandbox.get('box') as box:
    for number in range(1, int(sys.argv[1]) + 1):
        line = (f'echo {number} > f; mkdir d-{number}; echo {number} > d-{number}/x; rm -r d-{number - 3} 2>/dev/null;'
                f'if test -d turn; then rm -r turn; echo {number} > turn; else rm -f turn; mkdir turn; echo {number} > turn/in; fi;'
                f'mv moving-{number - 1} moving-{number} 2>/dev/null || mkdir moving-{number}; echo {number} > moving-{number}/{number % 7}')
        box.run(line)
        box.snapshot(f's{number}')
"""
CHAIN = """
import sys
from elsewhere.sandbox.records import record
from elsewhere.storage.layers import Layers
from elsewhere.storage.state import State
state = State.open()
layers = Layers(state)
found = record.load(state, record.find(state, 'box'))
print(len(layers.chain(found.tip)), len(layers.merge_due(found.tip)))
"""


def expected(number: int) -> str:
    """What the loop above left after so many rounds."""
    lines = [str(number), *(f"d-{one}/x:{one}" for one in range(max(1, number - 2), number + 1))]
    lines.append(f"turn/in:{number}" if number % 2 else f"turn:{number}")
    inside: dict[int, int] = {one % 7: one for one in range(1, number + 1)}
    lines += [f"moving-{number}/{name}:{inside[name]}" for name in sorted(inside)]
    return "\n".join(lines)


LOOK = """
cat f
for n in d-*/x; do echo $n; done | sort -V | while read n; do echo $n:$(cat $n); done
for n in turn turn/in moving-*/*; do if test -f $n; then echo $n:$(cat $n); fi; done
"""


def many(person: Person, count: int, looked_at: list[int]) -> None:
    made(person)
    person.shell(person.python, "-c", MANY, str(count), cwd=person.project, timeout=1000)

    def chain() -> tuple[int, int]:
        depth, due = person.shell(person.python, "-c", CHAIN, cwd=person.project).stdout.split()
        return int(depth), int(due)

    assert eventually(lambda: chain()[1] == 0, 120), "what is due was not merged"
    assert chain()[0] <= 50
    assert shown(person, "box", LOOK).strip() == expected(count)
    person.elsewhere("stop", "box", check=True)
    assert shown(person, "box", LOOK).strip() == expected(count)
    mounts = shown(person, "box", "cat /proc/self/mountinfo")
    assert max(line.count("lowerdir") + line.count(":") for line in mounts.splitlines()) <= 60
    for number in looked_at:
        person.elsewhere("rollback", "box", f"s{number}", check=True)
        assert shown(person, "box", LOOK).strip() == expected(number)
    assert len(names(person)) == count
    # Without the snapshots between, their layers go, and what is left shows what it showed.
    keep = {f"s{number}" for number in looked_at}
    code = f"from elsewhere import Sandbox\nwith Sandbox.get('box') as box:\n  for one in box.snapshots():\n    if one.name not in {keep!r}: box.remove_snapshot(one)"
    before = len(layers_left(person))
    person.shell(person.python, "-c", code, cwd=person.project, timeout=600)
    assert len(layers_left(person)) < before
    for number in looked_at[::-1]:
        assert shown(person, fork(person, "box", "--from", f"s{number}"), LOOK).strip() == expected(number)


@pytest.mark.slow
def test_many_snapshots(person: Person) -> None:
    many(person, 12, [1, 9, 11])


@pytest.mark.slow(120)
@pytest.mark.timeout(1200)
def test_five_hundred_snapshots(person: Person) -> None:
    many(person, 500, [1, 250, 499])


def test_what_runs_keeps_the_layers_that_it_stands_on(person: Person) -> None:
    """They were merged since, and nobody else needs them one by one."""
    made(person)
    code = """
from elsewhere import Sandbox
with Sandbox.get('box') as box:
    for number in range(1, 11):
        box.run(f'echo {number} > n-{number}').check()
        box.snapshot(f's{number}')
"""
    person.shell(person.python, "-c", code, cwd=person.project)
    assert eventually(lambda: list((person.state / "layers").glob("*/merged.json")), 60)
    for number in range(1, 11):
        person.elsewhere("rm-snapshot", "box", f"s{number}", check=True)
    assert eventually(lambda: not list((person.state / "trash").iterdir()), 60)
    look = "cat $(ls n-* | sort -V) | tr '\\n' ' '"
    assert shown(person, "box", look) == "1 2 3 4 5 6 7 8 9 10 "
    person.elsewhere("stop", "box", check=True)
    assert shown(person, "box", look) == "1 2 3 4 5 6 7 8 9 10 "


# -- other rungs ---

RUNG = """
e create --name box >/dev/null
e exec box -c 'echo 1 > f; rm README.md; ln -s f pointer; rm -r src; mkdir src; echo n > src/n'
e snapshot box one >/dev/null
e exec box -c 'echo 2 > f; echo back > README.md; rm -r src; echo s > src'
e fork box --name child >/dev/null
e fork box --from one --name then >/dev/null
e exec -d box -- sleep 1000 >/dev/null
e snapshot box busy >/dev/null
e exec box -c 'echo 3 > f'
e rollback --force box one >/dev/null
e exec box -c 'cat f pointer; ls src; ls README.md 2>/dev/null || echo gone'
e exec child -c 'cat f README.md src'
e exec then -c 'cat f src/n; ls README.md 2>/dev/null || echo gone'
e rollback box busy >/dev/null
e exec box -c 'cat f README.md src'
e stop box >/dev/null
e rollback box before-rollback-1 >/dev/null
e exec box -- cat f
e snapshots box --json | tr ',' '\\n' | grep -c '"copied": true'
e rm-snapshot box one >/dev/null
e inspect box --json | tr ',' '\\n' | grep -m1 '"mechanism"'
e rm --force --all >/dev/null
"""
SEEN = ["1", "1", "n", "gone", "2", "back", "s", "1", "n", "gone", "2", "back", "s", "3"]


@pytest.mark.own_launcher
@pytest.mark.parametrize(
    ("mechanism", "taken", "copies"),
    [
        ("overlay-userns", ("--overlay-root", "1", "--tmpfs", "STATE"), False),
        ("overlay-userns-memory", ("--overlay-root", "1"), True),
        ("overlay-idmap-memory", ("--overlay-state", "STATE"), True),
        ("fuse-overlayfs", ("--overlay-root", "2"), False),
        ("copy-landlock", ("--overlay-root", "2", "--no-fuse"), True),
    ],
)
def test_every_rung_can(person: Person, mechanism: str, taken: tuple[str, ...], copies: bool) -> None:
    needs_root()
    if mechanism == "overlay-idmap-memory" and not person.is_root:
        pytest.skip("only root has the whole machine")
    if mechanism == "fuse-overlayfs":
        needs_fuse()
    if mechanism == "copy-landlock":
        needs_landlock()
        give_the_hosts_network(person)
    before = tree(person.project)
    done = Elsewhere(person, *(str(person.state) if word == "STATE" else word for word in taken)).script(RUNG)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert f'"mechanism": "{mechanism}"' in done.stdout, done.stdout
    lines = [line for line in done.stdout.splitlines() if "mechanism" not in line and not line.startswith(("ew-", "box"))]
    assert lines == [*SEEN, "5" if copies else "1"], (lines, done.stderr)
    said = [line for line in done.stderr.splitlines() if "copied: on" in line]
    assert bool(said) == copies, done.stderr
    assert tree(person.project) == before
