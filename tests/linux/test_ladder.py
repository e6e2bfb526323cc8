"""Every rung of the ladder runs a command, forced by really taking the stronger ones away; `doctor` is right about each."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, eventually, plain, tree
from elsewhere.linux import landlock

HOSTS = Path(__file__).with_name("hosts.py")
WORK = "echo hi > new.txt; rm README.md; mkdir -p deep/er && echo y > deep/er/y; echo more >> src/app.py"
CHANGES = {"added": ["deep/er/y", "new.txt"], "modified": ["src/app.py"], "deleted": ["README.md"]}


class Elsewhere:
    """One person on another host."""

    def __init__(self, person: Person, *taken: str) -> None:
        self.person = person
        self.taken = taken

    def __call__(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        done = self._run(*arguments)
        return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr

    def words(self, *arguments: str) -> str:
        done = self._run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def script(self, text: str) -> "subprocess.CompletedProcess[str]":
        """Several commands on the same host; `e` is elsewhere."""
        line = shlex.join(self.person.command())
        return self._execute(["sh", "-ec", f'e() {{ {line} "$@"; }}; {text}'])

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self._execute(self.person.command(*arguments))

    def _execute(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        shutil.copy(HOSTS, self.person.place / "hosts.py")
        (self.person.place / "hosts.py").chmod(0o755)
        argv = [self.person.python, str(self.person.place / "hosts.py"), *self.taken, "--uid", str(self.person.uid), "--"]
        maker = Person(self.person.name, 0 if os.geteuid() == 0 else self.person.uid, self.person.place, sys.executable)
        return maker.shell(*argv, *command, check=False, cwd=self.person.project, env=self.person.environment())


def check(person: Person, mechanism: str, *taken: str) -> None:
    """The command runs by exactly this rung, its changes are told, reality stays, and doctor agrees."""
    before = tree(person.project)
    host = Elsewhere(person, *taken)
    if mechanism == "copy-landlock":
        code, document, _ = host("run", "--json", "--", "touch", "ran")
        assert (code, document["error"]["code"]) == (125, "no_mechanism"), "without namespaces the network cannot be held back"
        assert "--network host" in document["error"]["hint"]
        give_the_hosts_network(person)
    code, document, errors = host("run", "--json", "--", "sh", "-c", f"{WORK}; exit 7")
    assert code == 7, errors
    assert document["sandbox"]["enforced"]["mechanism"] == mechanism, document["sandbox"]["enforced"]["stronger_rungs"]
    assert document["changes"] == CHANGES
    assert tree(person.project) == before
    code, found, _ = host("doctor", "--json")
    rungs = [item["name"] for item in found["checks"] if item["name"].startswith("rung ") and item["status"] == "ok"]
    assert rungs[:1] == [f"rung {mechanism}"], found["checks"]
    assert code == 0
    if mechanism not in ("overlay-idmap", "overlay-userns"):
        assert mechanism in errors, "a weaker rung is said in one line"


def give_the_hosts_network(person: Person) -> None:
    """The last rung has no other."""
    person.extra["ELSEWHERE_NETWORK"] = "host"


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("another host can only be made by root")


def needs_landlock() -> None:
    try:
        version = landlock.abi()
    except OSError:
        version = 0
    if version < landlock.FIRST_WITH_TRUNCATE:
        pytest.skip(f"this kernel's Landlock has version {version}, too old for the last rung")


def needs_fuse() -> None:
    if shutil.which("fuse-overlayfs") is None:
        pytest.skip("needs Debian's fuse-overlayfs")


def test_root_has_the_whole_machine(root: Person) -> None:
    check(root, "overlay-idmap")


def test_a_user_has_home_and_project(user: Person) -> None:
    check(user, "overlay-userns")


def test_root_in_a_container_has_home_and_project(root: Person) -> None:
    """`/` is overlay, which cannot be id-mapped; the state directory is a volume."""
    taken = ("--overlay-root", "1", "--tmpfs", str(root.state))
    check(root, "overlay-userns", *taken)
    code, document, _ = Elsewhere(root, *taken)("run", "--json", "--discard", "-c", "cat /proc/self/uid_map; exit 3")
    assert code == 3
    assert document["command"]["stdout"].split()[:2] == ["0", "0"]
    assert "the host's root" in document["sandbox"]["enforced"]["user"]


def test_a_state_directory_on_overlay_puts_the_layers_in_memory(person: Person) -> None:
    needs_root()
    check(person, "overlay-userns-memory", "--overlay-root", "1")


def test_the_whole_machine_with_layers_in_memory(root: Person) -> None:
    """`/` can be mapped, but the state directory lies on an overlay."""
    check(root, "overlay-idmap-memory", "--overlay-state", str(root.state))


def test_two_containers_deep_only_fuse_is_left(person: Person) -> None:
    needs_root()
    needs_fuse()
    check(person, "fuse-overlayfs", "--overlay-root", "2")


def test_two_containers_deep_without_fuse_the_project_is_copied(person: Person) -> None:
    needs_root()
    needs_landlock()
    check(person, "copy-landlock", "--overlay-root", "2", "--no-fuse")


@pytest.mark.parametrize("denied", ["unshare", "mount,fsopen,open_tree"])
def test_under_a_containers_filter_the_project_is_copied(person: Person, denied: str) -> None:
    needs_landlock()
    check(person, "copy-landlock", "--deny", denied)


def test_where_proc_is_masked_the_project_is_copied(user: Person) -> None:
    needs_root()
    needs_landlock()
    check(user, "copy-landlock", "--mask-proc")


LIFE = """
e create --name box >/dev/null
e exec box -- sh -c 'echo kept > kept.txt; rm README.md; ln -s kept.txt pointer; mkdir -p src2/deep; rm -r src; mkdir src; echo n > src/n'
e stop box
e exec box -- sh -c 'cat kept.txt pointer; ls src; test ! -e README.md && echo gone; test -d src2/deep && echo deep'
e exec box -- sh -c 'echo again >> kept.txt'
e inspect box --json | tr ',' '\n' | grep -m1 '"mechanism"'
e stop box
e start box
e exec box -- cat kept.txt
e rm --force box
"""


@pytest.mark.parametrize(
    ("mechanism", "taken"),
    [
        ("overlay-userns", ("--overlay-root", "1", "--tmpfs", "STATE")),
        ("overlay-userns-memory", ("--overlay-root", "1")),
        ("overlay-idmap-memory", ("--overlay-state", "STATE")),
        ("fuse-overlayfs", ("--overlay-root", "2")),
        ("copy-landlock", ("--overlay-root", "2", "--no-fuse")),
    ],
)
def test_a_sandbox_lives_on_every_rung(person: Person, mechanism: str, taken: tuple[str, ...]) -> None:
    """Stopped and started again twice: what was written, deleted and replaced is as it was left."""
    needs_root()
    if mechanism == "overlay-idmap-memory" and not person.is_root:
        pytest.skip("only root has the whole machine")
    if mechanism == "fuse-overlayfs":
        needs_fuse()
    if mechanism == "copy-landlock":
        needs_landlock()
        give_the_hosts_network(person)
    before = tree(person.project)
    done = Elsewhere(person, *(str(person.state) if word == "STATE" else word for word in taken)).script(LIFE)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert f'"mechanism": "{mechanism}"' in done.stdout, done.stdout
    lines = [line for line in done.stdout.splitlines() if "mechanism" not in line and "box" not in line and "ew-" not in line]
    assert lines == ["kept", "kept", "n", "gone", "deep", "kept", "again"], (done.stdout, done.stderr)
    assert tree(person.project) == before


def test_nothing_left_is_a_refusal_that_says_what_to_do(person: Person) -> None:
    """Fail closed: the command never runs on the host."""
    host = Elsewhere(person, "--deny", "unshare,mount,landlock_create_ruleset")
    sentinel = person.place / "ran"
    code, document, errors = host("run", "--json", "--", "touch", str(sentinel))
    assert code == 125
    assert document["error"]["code"] == "no_mechanism"
    assert "doctor" in document["error"]["hint"]
    assert "overlay-userns" in errors
    assert not sentinel.exists()
    code, found, _ = host("doctor", "--json")
    assert code == 1
    assert found["healthy"] is False
    assert all(item["hint"] for item in found["checks"] if item["status"] == "missing" and not item["name"].startswith("rung "))


def test_layers_in_memory_are_brought_to_disk_when_kept(person: Person) -> None:
    """Deletions and replaced directories included, on a disk that cannot hold overlay's own marks."""
    needs_root()
    shutil.copy(HOSTS, person.place / "hosts.py")
    line = f"{WORK}; rm -r src; mkdir src; echo s > src/only; touch .wh.name"
    first = shlex.join(person.command("run", "--discard", "-c", "true")) + "; " + shlex.join(person.command("run", "-c", line))
    second = shlex.join(person.command("diff", "--json", "@last"))
    argv = ["--overlay-state", str(person.state), "--uid", str(person.uid), "--", "sh", "-c", f"{first} >&2; {second}"]
    maker = Person(person.name, 0, person.place, sys.executable)
    done = maker.shell(person.python, person.place / "hosts.py", *argv, cwd=person.project, env=person.environment())
    assert plain(json.loads(done.stdout)["changes"]) == {
        "added": [".wh.name", "deep/er/y", "new.txt", "src/only"],
        "modified": [],
        "deleted": ["README.md", "src/app.py", "src/test_app.py"],
    }


def test_a_full_disk_is_an_error_and_no_reason_for_a_weaker_rung(person: Person) -> None:
    needs_root()
    host = Elsewhere(person, "--tmpfs", f"{person.state}", "--tmpfs-size", "200k")
    code, document, _ = host("run", "--json", "-c", "head -c 1000000 /dev/zero > big; echo $?; ls -la big")
    if code == 125:
        assert document["error"]["code"] in ("no_room", "state_unusable"), document
        assert "space" in document["error"]["message"].lower()
    else:
        assert document["sandbox"]["enforced"]["stronger_rungs"] == []
        assert "No space left" in document["command"]["stderr"]


def test_without_namespaces_nothing_outlives_its_sandbox(person: Person) -> None:
    """Background processes, and a command that kills its keeper: the guardian ends what is left."""
    needs_landlock()
    for line in ("sleep 81 & setsid sleep 82 & echo there", "sleep 83 & kill -9 $PPID; sleep 84"):
        Elsewhere(person, "--deny", "unshare")("run", "--json", "--discard", "-c", line)
        assert eventually(lambda: not [words for _, words in person.processes() if "sleep 8" in words], 5)
