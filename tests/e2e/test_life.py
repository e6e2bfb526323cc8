"""Sandboxes that stay: made, entered, listed, stopped, started, protected and removed from the command line."""

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, eventually, plain, session_of, tree
from e2e.test_terminal import Terminal
from elsewhere.storage.trash import remove_tree

pytestmark = pytest.mark.one_launcher


@pytest.fixture
def person(person: Person) -> Iterator[Person]:
    """Whoever makes sandboxes that stay removes them in the end."""
    yield person
    person.elsewhere("rm", "--all", "--force")


@pytest.fixture
def root(root: Person) -> Iterator[Person]:
    yield root
    root.elsewhere("rm", "--all", "--force")


def create(person: Person, *arguments: str, **more: Any) -> dict[str, Any]:
    document = person.json("create", *arguments, **more)
    assert "sandbox" in document, document
    return document["sandbox"]


def error_of(person: Person, *arguments: str, code: int = 1, **more: Any) -> dict[str, Any]:
    """The one document of a verb that fails; the same words are on stderr, with the next step."""
    done = person.elsewhere(arguments[0], "--json", *arguments[1:], **more)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    assert done.stdout.count("\n") == 1, done.stdout
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"code", "message", "detail", "hint"}
    assert error["hint"], error
    assert done.stderr.startswith("elsewhere: ")
    assert "next: " in done.stderr
    return error


def processes(person: Person, box: str) -> list[dict[str, Any]]:
    return person.json("ps", box)["processes"]


def commands(person: Person, box: str) -> list[str]:
    return sorted(one["command"] for one in processes(person, box))


def state_of(person: Person, box: str) -> str:
    return person.json("inspect", box)["sandbox"]["state"]


def inside(person: Person, box: str, line: str, **more: Any) -> str:
    """What a shell line says in a sandbox, and it must succeed."""
    done = person.elsewhere("exec", box, "-c", line, **more)
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


def own_processes(place: Path) -> list[int]:
    """Every process with this mount namespace, or with a mount that names this place."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if str(place) in Path(f"/proc/{entry}/mountinfo").read_text(errors="replace"):
                    found.append(int(entry))
            except OSError:
                continue
    return found


def in_namespace(name: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.readlink(f"/proc/{entry}/ns/mnt") == name:
                    found.append(entry)
            except OSError:
                continue
    return found


def launchers(person: Person) -> list[int]:
    return [pid for pid, words in person.processes() if "elsewhere.cli.launch" in words and session_of(pid) == pid]


# -- create, list, inspect ---


def test_create_tells_the_id_and_list_finds_it_again(person: Person) -> None:
    before = tree(person.project)
    done = person.elsewhere("create", "--name", "fix", "--label", "ticket=42", "--label", "who=me")
    first = done.stdout.strip()
    assert (done.returncode, done.stdout) == (0, first + "\n"), done.stderr
    second = create(person, "--label", "ticket=42")["id"]
    other = person.place / "other"
    other.mkdir()
    person.own(other)
    third = create(person, "--project", str(other))["id"]

    listing = person.json("list")
    assert [box["id"] for box in listing["sandboxes"]] == [third, second, first]
    assert (listing["total"], listing["broken"], listing["healed"]) == (3, [], [])
    assert {box["state"] for box in listing["sandboxes"]} == {"running"}
    wanted = listing["sandboxes"][2]
    assert (wanted["name"], wanted["labels"], wanted["kept"]) == ("fix", {"ticket": "42", "who": "me"}, False)

    def ids(*arguments: str) -> tuple[list[str], int]:
        found = person.json("list", *arguments)
        return [box["id"] for box in found["sandboxes"]], found["total"]

    assert ids("--label", "ticket=42") == ([second, first], 2)
    assert ids("--label", "ticket=42", "--label", "who=me") == ([first], 1)
    assert ids("--label", "ticket=43") == ([], 0)
    assert ids("--project", ".") == ([second, first], 2)
    assert ids("--project", str(other)) == ([third], 1)
    assert ids("--limit", "1") == ([third], 3)
    person.json("stop", first)
    assert ids("--state", "stopped") == ([first], 1)
    assert ids("--state", "running") == ([third, second], 2)
    assert ids("--state", "running", "--state", "stopped") == ([third, second, first], 3)
    assert "3 sandboxes (2 running, 1 stopped)" in person.elsewhere("list").stdout
    for wanted_by in ("fix", first, first[:-2], first.rpartition("-")[2]):
        assert person.json("inspect", wanted_by)["sandbox"]["id"] == first
    assert person.json("inspect", "@last")["sandbox"]["id"] == third
    assert tree(person.project) == before


def test_inspect_says_what_a_living_sandbox_is(person: Person) -> None:
    made = create(person, "--name", "look", "--ttl", "1h", "--workflow", "W", "--story", "S", "--request", "R")
    box = person.json("inspect", "look")["sandbox"]
    assert {"id", "name", "state", "base", "view", "project", "path", "created_at", "expires_at", "limits"} <= set(box)
    assert {"network", "identity", "labels", "enforced"} <= set(box)
    assert (box["id"], box["state"], box["lost"], box["ended_at"]) == (made["id"], "running", False, None)
    assert (box["identity"]["workflow"], box["identity"]["story"], box["identity"]["request"]) == ("W", "S", "R")
    assert box["expires_at"] > box["created_at"]
    assert box["keeper"] == {"pid": box["keeper"]["pid"], "version": person.json("version")["version"], "skew": False}
    assert box["base"]["kind"] == "pinned"
    words = person.elsewhere("inspect", "look").stdout
    assert "look" in words
    assert "skew: False" in words
    person.json("stop", "look")
    assert person.json("inspect", "look")["sandbox"]["keeper"] is None


def test_a_name_is_one_of_a_kind(person: Person) -> None:
    first = create(person, "--name", "one")["id"]
    error = error_of(person, "create", "--name", "one")
    assert error["code"] == "name_in_use"
    assert "'one'" in error["message"]
    assert error_of(person, "create", "--name", first)["code"] == "name_in_use"
    assert person.json("list")["total"] == 1
    person.json("rm", "one")
    again = create(person, "--name", "one")["id"]
    assert again != first
    for bad in ("", "-x", ".x", "a/b", "a b", "x" * 64, "ä", "../up", "@last"):
        error = error_of(person, "create", f"--name={bad}", code=2)
        assert (error["code"], repr(bad) in error["message"]) == ("bad_name", True)
    assert create(person, "--name", "x" * 63)["name"] == "x" * 63
    assert person.json("list")["total"] == 2


# -- exec ---


def test_exec_is_the_command_itself(person: Person) -> None:
    create(person, "--name", "box")
    before = tree(person.project)
    done = person.elsewhere("exec", "box", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert person.elsewhere("exec", "box", "--", "cat", input="from outside\n").stdout == "from outside\n"
    assert inside(person, "box", "pwd") == f"{person.project}\n"
    assert inside(person, "box", "pwd", cwd=person.project / "src") == f"{person.project}/src\n"
    assert inside(person, "box", "pwd", cwd=person.place) == f"{person.project}\n"
    assert person.elsewhere("exec", "--cwd", "src", "box", "--", "pwd").stdout == f"{person.project}/src\n"
    assert person.elsewhere("exec", "box", "--cwd", "src", "--", "pwd").stdout == f"{person.project}/src\n"
    assert person.elsewhere("exec", "--env", "X=y", "box", "-c", "echo $X").stdout == "y\n"
    odd = ["two words", "", "$HOME", "-c", "--json", "--", "new\nline"]
    done = person.elsewhere("exec", "box", "--", person.python, "-c", "import sys; print(sys.argv[1:])", *odd)
    assert done.stdout == f"{odd}\n"
    assert person.elsewhere("exec", "box", "echo", "-n", "x").stdout == "x"

    document = person.json("exec", "box", "--", "sh", "-c", "echo new > new; rm README.md; echo said; exit 3")
    command = document["command"]
    assert (command["exit_code"], command["reason"], command["stdout"], command["stderr"]) == (3, "exited", "said\n", "")
    assert document["changes"] == {"added": ["new"], "modified": [], "deleted": ["README.md"]}
    assert document["sandbox"]["id"] == person.json("inspect", "box")["sandbox"]["id"]
    assert {"denials", "usage", "duration_ms", "request"} <= set(command)
    # What one command did the next one finds.
    assert inside(person, "box", "cat new; test ! -e README.md && echo gone") == "new\ngone\n"
    assert plain(person.json("diff", "box")["changes"]) == document["changes"]
    for line, code in (("kill -9 $$", 137), ("kill $$", 143)):
        assert person.elsewhere("exec", "box", "-c", line).returncode == code
    assert error_of(person, "exec", "box", "--", "no-such-command", code=127)["code"] == "command_not_found"
    assert error_of(person, "exec", "box", "--", "./src/app.py", code=126)["code"] == "command_not_executable"
    error = error_of(person, "exec", "--cwd", "missing", "box", "--", "true", code=125)
    assert (error["code"], "missing" in error["message"]) == ("bad_directory", True)
    assert tree(person.project) == before


def test_exec_leaves_its_children_and_run_takes_them(person: Person) -> None:
    create(person, "--name", "box")
    document = person.json("exec", "box", "-c", "sleep 8101 & setsid sleep 8102 & echo started")
    assert document["command"]["stdout"] == "started\n"
    assert commands(person, "box") == ["sleep 8101", "sleep 8102"]
    for one in processes(person, "box"):
        assert one["request"] == document["command"]["request"]
        assert one["pid"] > 1
    assert "sleep 8101" in person.elsewhere("ps", "box").stdout
    # Its request is over all the same: the end is the exit of the main process.
    (request,) = person.json("requests", "box")["requests"]
    assert (request["state"], request["reason"], request["exit_code"]) == ("completed", "exited", 0)

    # A time-out takes the tree of its own command, those who do not listen and those with a session of their own included.
    line = "trap '' TERM; (trap '' TERM; setsid sleep 8103) & sleep 8104 & sleep 8105"
    done = person.elsewhere("exec", "--json", "--timeout", "300ms", "box", "-c", line)
    command = json.loads(done.stdout)["command"]
    assert (done.returncode, command["exit_code"], command["reason"]) == (124, 124, "timeout")
    assert commands(person, "box") == ["sleep 8101", "sleep 8102"]
    assert person.json("requests", "box")["requests"][0]["reason"] == "timeout"

    pid = next(one["pid"] for one in processes(person, "box") if one["command"] == "sleep 8101")
    assert person.json("kill", "box", str(pid))["signal"] == signal.SIGTERM
    assert eventually(lambda: commands(person, "box") == ["sleep 8102"])
    pid = processes(person, "box")[0]["pid"]
    assert person.elsewhere("kill", "box", str(pid), "-s", "sigkill").returncode == 0
    assert eventually(lambda: commands(person, "box") == [])
    assert error_of(person, "kill", "box", str(pid))["code"] == "process_not_found"
    assert error_of(person, "kill", "box", "1")["code"] == "process_not_found"
    assert error_of(person, "kill", "box", "-1")["code"] == "process_not_found"
    assert state_of(person, "box") == "running"

    person.elsewhere("run", "-c", "sleep 8106 & setsid sleep 8107 & echo")
    assert not [words for _, words in person.processes() if "sleep 810" in words]


def test_a_detached_command_goes_on_and_can_be_followed(person: Person) -> None:
    create(person, "--name", "box")
    line = "echo one; echo problem >&2; read -r word < fifo; echo got $word; exit 4"
    inside(person, "box", "mkfifo fifo")
    assert error_of(person, "logs", "box")["code"] == "no_logs"
    done = person.elsewhere("exec", "-d", "box", "-c", line)
    request = done.stdout.strip()
    assert (done.returncode, done.stdout) == (0, request + "\n")
    assert eventually(lambda: person.elsewhere("logs", "box").stdout == "one\n")
    assert person.elsewhere("logs", "box").stderr == "problem\n"
    assert person.json("logs", "box") == {"stdout": "one\n", "stderr": "problem\n", "denials": []}
    assert person.json("logs", "box", "--stream", "stderr") == {"stderr": "problem\n", "denials": []}
    (known,) = person.json("requests", "box", "--state", "running")["requests"]
    assert (known["id"], known["detached"], known["ended_at"], known["reason"]) == (request, True, None, None)
    assert [one["request"] for one in processes(person, "box")] == [request]

    follower = subprocess.Popen(
        person.command("logs", "-f", "--json-lines", "box", request),
        cwd=person.project,
        env=person.environment(),
        stdout=subprocess.PIPE,
        text=True,
        **person.identity(),
    )
    assert follower.stdout is not None
    first = [json.loads(follower.stdout.readline()) for _ in range(2)]
    assert {"stream": "stdout", "data": "one\n"} in first
    inside(person, "box", "echo word > fifo")
    assert [json.loads(text) for text in follower.stdout] == [{"stream": "stdout", "data": "got word\n"}]
    assert follower.wait(20) == 0
    follower.stdout.close()
    (known,) = [one for one in person.json("requests", "box")["requests"] if one["id"] == request]
    assert (known["state"], known["reason"], known["exit_code"]) == ("failed", "exited", 4)
    assert known["started_at"] <= known["ended_at"]
    assert person.elsewhere("logs", "box", request).stdout == "one\ngot word\n"
    error = error_of(person, "logs", "box", "r-0000000000000000")
    assert (error["code"], "has no request 'r-0000000000000000'" in error["message"]) == ("request_not_found", True)
    assert person.elsewhere("logs", "box", request[:12]).stdout == "one\ngot word\n"
    other = next(one["id"] for one in person.json("requests", "box")["requests"] if one["id"] != request)
    assert "has no logs of the request" in error_of(person, "logs", "box", other)["message"]
    assert error_of(person, "logs", "-f", "box", code=2)["code"] == "no_json"
    # Another one: the newest is meant.
    person.elsewhere("exec", "-d", "box", "--", "echo", "newer", check=True)
    assert eventually(lambda: person.elsewhere("logs", "box").stdout == "newer\n")
    assert person.elsewhere("logs", "-f", "box").stdout == "newer\n"


@pytest.mark.own_launcher
def test_cancel_ends_a_request_and_leaves_the_others(person: Person) -> None:
    create(person, "--name", "box")
    first, second, third = (person.json("exec", "-d", "box", "--", "sleep", f"820{n}")["command"]["request"] for n in range(3))
    assert commands(person, "box") == ["sleep 8200", "sleep 8201", "sleep 8202"]
    (ended,) = person.json("cancel", second[:12])["requests"]
    assert (ended["id"], ended["state"], ended["reason"]) == (second, "cancelled", "cancelled")
    assert commands(person, "box") == ["sleep 8200", "sleep 8202"]
    found = person.json("cancel", "box")["requests"]
    assert {one["id"]: one["state"] for one in found} == {first: "cancelled", third: "cancelled"}
    assert commands(person, "box") == []
    # One that is over stays as it ended.
    (again,) = person.json("cancel", second)["requests"]
    assert again == ended
    assert person.json("cancel", "box")["requests"] == []
    assert [one["id"] for one in person.json("requests", "box")["requests"]] == [third, second, first]
    assert [one["id"] for one in person.json("requests", "box", "--limit", "1")["requests"]] == [third]
    for none in ("r-0000000000000000", "r-", "r-x"):
        assert error_of(person, "cancel", none)["code"] == "request_not_found"
    # The history outlives the sandbox.
    box = person.json("rm", "box")["removed"][0]
    assert eventually(lambda: len(person.json("requests", box)["requests"]) == 3)
    assert {one["state"] for one in person.json("requests")["requests"]} == {"cancelled"}
    assert error_of(person, "requests", "no-such")["code"] == "sandbox_not_found"


def test_a_request_that_waits_for_its_command_is_cancelled_from_elsewhere(person: Person) -> None:
    create(person, "--name", "box")
    waiting = subprocess.Popen(
        person.command("exec", "--json", "box", "-c", "echo there; sleep 8301"),
        cwd=person.project,
        env=person.environment(),
        stdout=subprocess.PIPE,
        text=True,
        **person.identity(),
    )
    assert eventually(lambda: "sleep 8301" in commands(person, "box"))
    person.json("cancel", "box")
    out, _ = waiting.communicate(timeout=20)
    assert json.loads(out)["command"]["reason"] == "cancelled"
    assert commands(person, "box") == []


def test_the_caller_of_exec_killed_takes_its_command_and_nothing_else(person: Person) -> None:
    create(person, "--name", "box")
    inside(person, "box", "sleep 8401 > /dev/null 2>&1 & echo")
    caller = subprocess.Popen(
        person.command("exec", "box", "-c", "echo there; sleep 8402"),
        cwd=person.project,
        env=person.environment(),
        stdout=subprocess.PIPE,
        text=True,
        **person.identity(),
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "there\n"
    caller.kill()
    caller.communicate(timeout=20)
    assert eventually(lambda: commands(person, "box") == ["sleep 8401"])
    assert person.json("requests", "box")["requests"][0]["state"] == "cancelled"
    assert state_of(person, "box") == "running"


# -- stop and start ---


def test_a_stopped_sandbox_is_only_directories_and_comes_back_as_it_was(person: Person) -> None:
    made = create(person, "--name", "box")
    place = Path(made["path"])
    rename = "mv src moved; " if person.is_root else ""
    inside(
        person,
        "box",
        f"echo kept > kept; chmod 751 kept; rm README.md; rm -r link; mkdir -p d/e; chmod 700 d; ln -s nowhere d/l; {rename}"
        "echo t > /tmp/t; mkfifo d/fifo; ln kept hard; echo home > ~/home-file; sleep 8501 > /dev/null 2>&1 & echo",
    )
    look = "stat -c '%n %a %F %h' kept hard d d/e d/l d/fifo /tmp/t; cat kept /tmp/t ~/home-file; ls -A; readlink d/l" + (
        "; ls moved" if person.is_root else ""
    )
    before = inside(person, "box", look)
    changed = person.json("diff", "box")
    keeper = person.json("inspect", "box")["sandbox"]["keeper"]["pid"]
    namespace = os.readlink(f"/proc/{keeper}/ns/mnt") if os.geteuid() == 0 else ""
    held = os.open(f"/proc/{keeper}/ns/mnt", os.O_RDONLY) if namespace else -1  # or another one gets its number
    document = person.json("stop", "box")["sandbox"]
    assert (document["state"], document["lost"], document["keeper"]) == ("stopped", False, None)
    assert document["ended_at"] is not None
    assert not Path(f"/proc/{keeper}").exists()
    assert not [words for _, words in person.processes() if "sleep 8501" in words]
    if namespace:
        assert in_namespace(namespace) == []
        os.close(held)
    assert own_processes(place) == []
    assert stat.S_ISDIR(place.lstat().st_mode)
    listing = person.json("list")
    assert (listing["sandboxes"][0]["state"], listing["healed"]) == ("stopped", [])
    assert (processes(person, "box"), state_of(person, "box")) == ([], "stopped")
    assert person.json("diff", "box") == changed
    assert person.json("stop", "box")["sandbox"]["ended_at"] == document["ended_at"]  # twice is once
    assert error_of(person, "kill", "box", "2")["code"] == "sandbox_not_running"
    # A listing did not start it; a command does.
    assert person.json("list")["sandboxes"][0]["state"] == "stopped"
    assert inside(person, "box", look) == before
    box = person.json("inspect", "box")["sandbox"]
    assert (box["state"], box["ended_at"], box["lost"]) == ("running", None, False)
    assert person.json("diff", "box") == changed
    assert person.json("stop", "box")["sandbox"]["state"] == "stopped"
    assert person.json("start", "box")["sandbox"]["state"] == "running"
    assert person.json("start", "box")["sandbox"]["state"] == "running"  # twice is once
    assert inside(person, "box", look) == before
    assert person.json("list")["healed"] == []


def test_stopping_is_kind_first_and_the_ends_are_told(person: Person) -> None:
    create(person, "--name", "box")
    line = "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    kind = person.json("exec", "-d", "box", "-c", line)["command"]["request"]
    assert eventually(lambda: person.elsewhere("logs", "box", kind).stdout == "ready\n")
    deaf = person.json("exec", "-d", "box", "-c", "trap '' TERM; echo ready; while :; do sleep 8600; done")["command"]["request"]
    assert eventually(lambda: person.elsewhere("logs", "box", deaf).stdout == "ready\n")
    person.json("stop", "--grace", "500ms", "box")
    ends = {one["id"]: one for one in person.json("requests", "box")["requests"]}
    assert (ends[kind]["state"], ends[kind]["reason"], ends[kind]["exit_code"]) == ("failed", "killed", 3)
    assert (ends[deaf]["state"], ends[deaf]["reason"]) == ("failed", "killed")
    assert all(one["ended_at"] for one in ends.values())
    assert person.elsewhere("logs", "box", kind).stdout == "ready\nbye\n"
    assert person.elsewhere("logs", "-f", "box", deaf).stdout == "ready\n"


def test_hidden_places_stay_hidden_after_a_rename_and_a_restart(root: Person) -> None:
    """What the sandbox renamed shows what lay in it at its new place; the credentials there must not come with it."""
    secret = root.home / ".config" / "gh" / "hosts.yml"
    secret.parent.mkdir(parents=True)
    secret.write_text("TOKEN")
    (root.home / ".config" / "plain").write_text("plain")
    create(root, "--name", "box")
    look = "cat ~/.config*/plain ~/.moved*/.config*/plain 2>/dev/null; grep -rs TOKEN ~ && echo seen; true"
    assert inside(root, "box", look) == "plain"
    inside(root, "box", "mv ~/.config ~/.config2")
    assert inside(root, "box", look) == "plain"
    for _ in range(2):
        root.json("stop", "box")
        assert inside(root, "box", look) == "plain"
        inside(root, "box", "mkdir -p ~/.moved; mv ~/.config* ~/.moved/ 2>/dev/null || true")
    assert secret.read_text() == "TOKEN"
    assert root.json("inspect", "box")["sandbox"]["state"] == "running"


# -- time ---


def test_a_sandbox_whose_time_is_over_has_ended_by_itself(person: Person) -> None:
    made = create(person, "--name", "box")
    keeper = person.json("inspect", "box")["sandbox"]["keeper"]["pid"]
    request = person.json("exec", "-d", "box", "--", "sleep", "8701")["command"]["request"]
    inside(person, "box", "echo kept > kept")
    assert person.json("extend", "box", "1h")["sandbox"]["expires_at"] is not None
    assert person.json("extend", "box", "--never")["sandbox"]["expires_at"] is None
    soon = person.json("extend", "box", "100ms")["sandbox"]
    assert soon["expires_at"] is not None
    assert eventually(lambda: not Path(f"/proc/{keeper}").exists())
    box = person.json("inspect", "box")["sandbox"]
    assert (box["id"], box["state"], box["keeper"]) == (made["id"], "stopped", None)
    assert box["lost"] is False, "it ended as it was told to"
    (ended,) = [one for one in person.json("requests", "box")["requests"] if one["id"] == request]
    assert (ended["state"], ended["reason"]) == ("failed", "expired")
    assert not [words for _, words in person.processes() if "sleep 8701" in words]
    for verb in (["exec", "box", "--", "true"], ["start", "box"]):
        error = error_of(person, *verb, code=125 if verb[0] == "exec" else 1)
        assert error["code"] == "sandbox_expired"
        assert "elsewhere extend" in error["hint"]
    person.json("extend", "box", "1h")
    assert inside(person, "box", "cat kept") == "kept\n"
    error = error_of(person, "extend", "box", code=2)
    assert error["code"] == "no_time"
    assert error_of(person, "extend", "box", "1h", "--never", code=2)["code"] == "no_time"


def test_whoever_looks_next_clears_up_what_expired(person: Person) -> None:
    """What was changed is in the archive, what was not is gone, what is kept stays."""
    ids = {name: create(person, "--name", name)["id"] for name in ("changed", "plain", "kept")}
    inside(person, "changed", "echo x > x")
    person.json("keep", "kept")
    keepers = [person.json("inspect", name)["sandbox"]["keeper"]["pid"] for name in ids]
    for name in ids:
        person.json("extend", name, "50ms")
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in keepers))
    listing = person.json("list")
    assert [(one["name"], one["state"]) for one in listing["sandboxes"]] == [("kept", "stopped")]
    healed = {entry["id"]: entry["is"] for entry in listing["healed"] if entry["what"] == "expired"}
    assert healed == {ids["changed"]: "archived", ids["plain"]: "removed"}
    assert [path.name for path in (person.state / "archive").iterdir()] == [ids["changed"]]


def test_a_command_that_is_waited_for_when_the_time_is_over(person: Person) -> None:
    create(person, "--name", "box", "--ttl", "1h")
    waiting = subprocess.Popen(
        person.command("exec", "--json", "box", "--", "sleep", "8702"),
        cwd=person.project,
        env=person.environment(),
        stdout=subprocess.PIPE,
        text=True,
        **person.identity(),
    )
    assert eventually(lambda: "sleep 8702" in commands(person, "box"))
    person.json("extend", "box", "50ms")
    out, _ = waiting.communicate(timeout=20)
    document = json.loads(out)
    assert (waiting.returncode, document["command"]["reason"], document["command"]["exit_code"]) == (124, "expired", 124)


# -- removal ---


def test_rm_refuses_what_would_be_lost_and_says_what(person: Person) -> None:
    for name in ("changed", "kept", "busy", "clean"):
        create(person, "--name", name)
    inside(person, "changed", "echo new > new; rm README.md")
    inside(person, "busy", "sleep 8801 > /dev/null 2>&1 & echo")
    assert person.json("keep", "kept")["sandbox"]["kept"] is True

    error = error_of(person, "rm", "changed")
    assert error["code"] == "unpromoted_changes"
    assert sorted(path.rpartition("/")[2] for path in error["detail"]["changes"]) == ["README.md", "new"]
    assert error["detail"]["count"] == 2
    said = person.elsewhere("rm", "changed")
    assert said.returncode == 1
    assert f"{person.project}/new" in said.stderr
    assert "--force" in said.stderr
    error = error_of(person, "rm", "kept")
    assert (error["code"], "keep --off" in error["hint"]) == ("sandbox_kept", True)
    error = error_of(person, "rm", "busy")
    assert (error["code"], "elsewhere ps" in error["hint"]) == ("sandbox_in_use", True)
    assert person.json("list")["total"] == 4

    done = person.elsewhere("rm", "--json", "--all")
    document = json.loads(done.stdout)
    assert (done.returncode, len(document["removed"]), len(document["skipped"])) == (0, 1, 3)
    assert person.elsewhere("rm", "--json", "changed", "kept").returncode == 1
    assert state_of(person, "changed") == "running"  # a refusal leaves it as it was
    assert person.json("keep", "--off", "kept")["sandbox"]["kept"] is False
    removed = person.json("rm", "kept")
    assert (len(removed["removed"]), removed["archived"]) == (1, [])

    # Stopped, its changes are no less worth.
    person.json("stop", "changed")
    assert error_of(person, "rm", "changed")["code"] == "unpromoted_changes"
    box = person.json("inspect", "changed")["sandbox"]["id"]
    removed = person.json("rm", "--force", "changed", "busy")
    assert len(removed["removed"]) == 2
    assert removed["archived"] == [box]
    assert person.json("list")["total"] == 0
    archived = person.state / "archive" / box
    assert [path for path in archived.rglob("new") if path.read_text() == "new\n"]
    assert json.loads((archived / "sandbox.json").read_text())["state"] == "removed"
    assert not [words for _, words in person.processes() if "sleep 8801" in words]
    assert eventually(lambda: not list((person.state / "trash").iterdir()))
    assert list((person.state / "sandboxes").iterdir()) == []
    # The same name can be used again at once.
    assert create(person, "--name", "changed")["name"] == "changed"
    person.json("snapshot", "changed")
    error = error_of(person, "rm", "changed")
    assert (error["code"], error["message"].endswith(" has 1 snapshot that is nowhere else")) == ("unpromoted_changes", True)


@pytest.mark.own_launcher
def test_removal_never_follows_a_link(person: Person) -> None:
    treasure = person.place / "treasure"
    (treasure / "deep").mkdir(parents=True)
    (treasure / "deep" / "file").write_text("precious")
    person.own(treasure)
    box = create(person)["id"]
    person.json("stop", box)
    real = person.state / "sandboxes" / box
    shutil.copytree(real, treasure / "copy", symlinks=True, ignore=shutil.ignore_patterns("keeper", "work"))
    real.rename(person.state / "aside")
    person.own(treasure)
    before = tree(treasure)
    for target in (treasure, treasure / "copy"):
        real.symlink_to(target)
        for arguments in (["rm", box], ["rm", "--force", box], ["stop", box], ["exec", box, "--", "true"], ["start", box]):
            error = error_of(person, *arguments, code=125 if arguments[0] == "exec" else 1)
            assert error["code"] == "sandbox_not_found", (arguments, error)
        assert person.elsewhere("rm", "--force", "--all").returncode == 0
        assert person.json("list")["total"] == 0
        assert real.is_symlink()
        assert tree(treasure) == before
        real.unlink()
    (person.state / "aside").rename(real)
    assert person.json("rm", box)["removed"] == [box]
    for bad in ("..", ".", "../sandboxes", f"../sandboxes/{box}", "/etc", "a/b", ""):
        assert error_of(person, "rm", "--force", bad)["code"] in ("sandbox_not_found", "bad_sandbox_id")
    assert tree(treasure) == before


def test_what_a_command_left_behind_has_its_grace_too(person: Person) -> None:
    box = create(person)["id"]
    left = "(trap 'echo bye > bye; exit' TERM; : > ready; while :; do sleep 0.05; done) >/dev/null 2>&1 &"
    inside(person, box, f"{left} while [ ! -e ready ]; do sleep 0.05; done")
    person.json("stop", box, "--grace", "60s")
    assert inside(person, box, "cat bye") == "bye\n"
    person.json("rm", "--force", box)


def test_links_inside_a_sandbox_lead_removal_nowhere(person: Person) -> None:
    treasure = person.place / "treasure"
    treasure.mkdir()
    (treasure / "file").write_text("precious")
    person.own(treasure)
    box = create(person)
    inside(person, box["id"], f"ln -s {treasure} t; ln -s {treasure} /tmp/t; mkdir -m 000 closed")
    person.json("stop", box["id"])
    for name in ("logs", "artifacts"):  # even where the host itself writes
        place = Path(box["path"]) / name
        if not place.exists():
            place.symlink_to(treasure)
    person.json("rm", "--force", box["id"])
    remove_tree(str(person.state / "archive" / box["id"]))
    assert (treasure / "file").read_text() == "precious"


# -- files ---


def test_cp_and_open(person: Person) -> None:
    create(person, "--name", "box")
    before = tree(person.project)
    host = person.place / "host"
    (host / "many" / "sub").mkdir(parents=True)
    (host / "up").write_bytes(b"\x00up\xff")
    (host / "up").chmod(0o640)
    (host / "many" / "sub" / "one").write_text("1")
    (host / "many" / "link").symlink_to("sub/one")
    (host / "there").write_text("mine")
    person.own(host)
    document = person.json("cp", str(host / "up"), "box:src/")
    assert (document["files"], document["bytes"], document["left_out"]) == (1, 4, [])
    assert inside(person, "box", "stat -c %a src/up; od -An -c src/up").split() == ["640", "\\0", "u", "p", "377"]
    assert person.json("cp", str(host / "many"), "box:")["files"] == 2
    assert inside(person, "box", "cat many/link; readlink many/link") == "1sub/one\n"
    assert person.json("cp", "box:many", str(host / "down"))["files"] == 2
    assert (host / "down" / "sub" / "one").read_text() == "1"
    assert os.readlink(host / "down" / "link") == "sub/one"
    error = error_of(person, "cp", "box:README.md", str(host / "there"), code=2)
    assert (error["code"], str(host / "there") in error["message"]) == ("file_exists", True)
    assert (host / "there").read_text() == "mine"
    person.json("cp", "--force", "box:README.md", str(host / "there"))
    assert (host / "there").read_text() == "# a project\n"
    assert "missing" in error_of(person, "cp", "box:missing", str(host / "x"))["message"]
    assert "nowhere" in error_of(person, "cp", "nowhere", "box:x")["message"]
    for sides in (("a", "b"), ("box:a", "box:b")):
        assert error_of(person, "cp", *sides, code=2)["hint"]
    # Nothing that the sandbox planted leads to a file of the host, or keeps anybody waiting.
    secret = person.home / "secret"
    secret.write_text("of the host")
    inside(person, "box", f"mkfifo fifo; ln -s {secret} planted; rm -f {secret}; ln -s / out")
    for path in ("planted", f"out{secret}", "fifo"):
        assert "error" in person.json("cp", f"box:{path}", str(host / "got")), path
        assert not (host / "got").exists()
    assert tree(person.project) == before

    document = person.json("open", "box")
    path = Path(document["path"])
    inside(person, "box", "echo seen > seen")
    assert person.shell("cat", path / "seen").stdout == "seen\n"
    person.shell("sh", "-c", f"echo edited > '{path}/seen'")
    assert inside(person, "box", "cat seen") == "edited\n"
    assert person.elsewhere("open", "box").stdout == f"{path}\n"
    assert person.elsewhere("open", "box", "--with", "ls -d").stdout == f"{path}\n"
    assert tree(person.project) == before


# -- deaths and versions ---


def test_a_keeper_outlives_its_creator_and_the_launcher(person: Person) -> None:
    code = """
import os, signal
from elsewhere import Sandbox
box = Sandbox.create(name='survivor', on_exit='keep')
box.run('echo x > x; sleep 8901 & echo').check()
print(box.id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = person.sdk(code, check=False)
    box = done.stdout.strip()
    assert (done.returncode, bool(box)) == (-9, True), done.stderr
    assert person.json("list")["sandboxes"][0]["state"] == "running"
    for pid in launchers(person):
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not launchers(person))
    listing = person.json("list")
    assert [(one["id"], one["state"], one["lost"]) for one in listing["sandboxes"]] == [(box, "running", False)]
    assert commands(person, "survivor") == ["sleep 8901"]
    assert inside(person, "survivor", "cat x") == "x\n"
    for pid in launchers(person):
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not launchers(person))
    document = person.json("stop", box)["sandbox"]
    assert (document["state"], document["lost"]) == ("stopped", False)
    assert not [words for _, words in person.processes() if "sleep 8901" in words]
    for pid in launchers(person):
        os.kill(pid, signal.SIGKILL)
    assert person.json("rm", "--force", box)["archived"] == [box]
    assert eventually(lambda: not list((person.state / "trash").iterdir()))


def test_a_keeper_killed_is_told_once_and_starts_again(person: Person) -> None:
    if os.geteuid() != 0:
        pytest.skip("a keeper hides from its own user: only root may end it")
    create(person, "--name", "box")
    inside(person, "box", "echo x > x; sync")
    request = person.json("exec", "-d", "box", "--", "sleep", "8902")["command"]["request"]
    keeper = person.json("inspect", "box")["sandbox"]["keeper"]["pid"]
    os.kill(keeper, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{keeper}").exists())
    first, second = person.json("list"), person.json("list")
    assert [(one["state"], one["lost"]) for one in first["sandboxes"]] == [("stopped", True)]
    assert [entry["what"] for entry in first["healed"]] == ["state"]
    assert second["healed"] == []
    (ended,) = [one for one in person.json("requests", "box")["requests"] if one["id"] == request]
    assert (ended["state"], ended["reason"]) == ("failed", "lost")
    assert inside(person, "box", "cat x") == "x\n"
    assert person.json("inspect", "box")["sandbox"]["lost"] is False


def test_a_keeper_of_another_version_is_said_and_can_be_stopped(person: Person) -> None:
    library = person.place / "lib"
    real = library.resolve()
    old = person.place / "old"
    shutil.copytree(real, old)
    for file, word, other in (
        ("__init__.py", '__version__ = "', '__version__ = "0.0.9-'),
        ("sandbox/keeping/spec.py", "PROTOCOL = 2", "PROTOCOL = 1"),
    ):
        path = old / "elsewhere" / file
        assert word in path.read_text()
        path.write_text(path.read_text().replace(word, other))
    person.own(old)

    def use(place: Path) -> None:
        library.unlink()
        library.symlink_to(place)

    use(old)
    person.extra["PYTHONPATH"] = str(old)
    create(person, "--name", "box")
    inside(person, "box", "echo x > x; sleep 8903 > /dev/null 2>&1 & echo")
    was = person.json("version")["version"]
    person.stop_launcher()
    del person.extra["PYTHONPATH"]
    use(real)
    now = person.json("version")["version"]
    assert was != now
    box = person.json("inspect", "box")["sandbox"]
    assert (box["state"], box["keeper"]["version"], box["keeper"]["skew"]) == ("running", was, True)
    assert person.json("list")["sandboxes"][0]["state"] == "running"
    error = error_of(person, "exec", "box", "--", "true", code=125)
    assert error["code"] == "keeper_skew"
    assert was in error["message"]
    assert now in error["message"]
    assert "elsewhere stop" in error["hint"]
    code = "from elsewhere import Sandbox\nwith Sandbox.get('box') as box: box.run('true')"
    done = person.sdk(code, check=False)
    assert done.returncode != 0
    assert "0.0.9" in done.stderr
    assert person.json("stop", "box")["sandbox"]["state"] == "stopped"
    assert not [words for _, words in person.processes() if "sleep 8903" in words]
    assert inside(person, "box", "cat x") == "x\n"
    box = person.json("inspect", "box")["sandbox"]
    assert (box["keeper"]["version"], box["keeper"]["skew"], box["version"]) == (now, False, now)


# -- many ---


@pytest.mark.slow
def test_a_thousand_commands_in_one_sandbox_leave_nothing(person: Person) -> None:
    """No descriptor of the keeper, no process and no file more than after the first few."""
    box = create(person, "--name", "many")
    keeper = person.json("inspect", "many")["sandbox"]["keeper"]["pid"]
    code = """
import sys
from elsewhere import Sandbox
with Sandbox.get('many') as box:
    for n in range(int(sys.argv[1])):
        assert box.run(['echo', str(n)]).stdout == f'{n}\\n'
"""

    def look() -> tuple[int, int, int]:
        descriptors = len(os.listdir(f"/proc/{keeper}/fd")) if os.geteuid() == 0 else 0
        files = sum(len(names) + len(files) for _, names, files in os.walk(box["path"]))
        return descriptors, len(processes(person, "many")), files

    script = person.place / "many.py"
    script.write_text(code)
    person.own(script)
    person.shell(person.python, script, "20", cwd=person.project)
    first = look()
    person.shell(person.python, script, "1000", cwd=person.project)
    assert eventually(lambda: look() == first), (look(), first)  # whoever has just gone is noticed in a moment
    requests = person.json("requests", "many", "--limit", "2000")["requests"]
    assert len(requests) == 1020
    assert {one["state"] for one in requests} == {"completed"}
    assert plain(person.json("diff", "many")["changes"]) == {"added": [], "modified": [], "deleted": []}
    assert person.json("rm", "many")["archived"] == []


# -- terminals ---


def test_exec_on_a_terminal_follows_its_size(person: Person) -> None:
    create(person, "--name", "box")
    terminal = Terminal(
        person,
        "exec",
        "-t",
        "box",
        "-c",
        "tty; stty size; trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done",
    )
    terminal.expect("/dev/pts/")
    terminal.expect("40 100")
    terminal.expect("ready")
    terminal.resize(33, 77)
    os.kill(terminal.pid, signal.SIGWINCH)
    terminal.expect("33 77")
    assert terminal.end()[0] == 5
    assert error_of(person, "exec", "-t", "box", "--", "true", code=2)["code"] == "no_terminal"


def test_a_shell_is_one(person: Person) -> None:
    create(person, "--name", "box")
    person.extra["SHELL"] = "/bin/sh"
    terminal = Terminal(person, "shell", "box")
    terminal.type("echo $((40+2)); cd src; echo typed > typed\r")
    terminal.expect("42")
    terminal.type("sleep 8951 & echo back$((1+1))\r")
    terminal.expect("back2")
    terminal.type("exit 6\r")
    assert terminal.end()[0] == 6
    assert inside(person, "box", "cat src/typed") == "typed\n"
    assert person.json("requests", "box")["requests"][1]["kind"] == "shell"
    assert state_of(person, "box") == "running"
    assert error_of(person, "shell", "box", code=2)["code"] == "no_json"


def test_a_shell_in_tmux(person: Person) -> None:
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("tmux is not installed")
    create(person, "--name", "box")
    person.extra["SHELL"] = "/bin/sh"
    place = person.place / "tmux"
    place.mkdir(mode=0o700)
    person.own(place)
    person.extra["TMUX_TMPDIR"] = str(place)
    command = [tmux, "-f", "/dev/null", "-L", "ew"]

    def screen() -> str:
        return person.shell(*command, "capture-pane", "-p", "-t", "w", check=False).stdout

    line = shlex.join(person.command("shell", "box"))
    person.shell(*command, "new-session", "-d", "-s", "w", "-x", "100", "-y", "30", line, cwd=person.project)
    try:
        person.shell(*command, "send-keys", "-t", "w", "stty size; echo in-$((3+4)) $ELSEWHERE_SANDBOX_ID", "Enter")
        assert eventually(lambda: "in-7 ew-" in screen(), 20), screen()
        assert "30 100" in screen() or "29 100" in screen()
        person.shell(*command, "resize-window", "-t", "w", "-x", "80", "-y", "20")
        person.shell(*command, "send-keys", "-t", "w", "C-l", "")
        person.shell(*command, "send-keys", "-t", "w", "clear; stty size", "Enter")
        assert eventually(lambda: " 80\n" in screen(), 20), screen()
        person.shell(*command, "send-keys", "-t", "w", "exit", "Enter")
        assert eventually(lambda: person.shell(*command, "has-session", "-t", "w", check=False).returncode != 0)
    finally:
        person.shell(*command, "kill-server", check=False)
    assert person.json("requests", "box")["requests"][0]["state"] == "completed"


# -- the contract ---


def test_bad_input_is_an_error_with_a_code_the_value_and_a_hint(person: Person) -> None:
    create(person, "--name", "box")
    missing = [
        ["inspect", "no-such"],
        ["exec", "no-such", "--", "true"],
        ["ps", "no-such"],
        ["kill", "no-such", "3"],
        ["logs", "no-such"],
        ["stop", "no-such"],
        ["start", "no-such"],
        ["extend", "no-such", "1h"],
        ["keep", "no-such"],
        ["cancel", "no-such"],
        ["requests", "no-such"],
        ["rm", "no-such"],
        ["diff", "no-such"],
        ["open", "no-such"],
        ["cp", "no-such:x", "y"],
    ]
    for arguments in missing:
        error = error_of(person, *arguments, code=125 if arguments[0] == "exec" else 1)
        assert (error["code"], "'no-such'" in error["message"]) == ("sandbox_not_found", True), (arguments, error)
    bad: list[tuple[list[str], str]] = [
        (["create", "--base", "frozen"], "frozen"),
        (["create", "--label", "novalue"], "novalue"),
        (["create", "--label", "=x"], "=x"),
        (["create", "--ttl", "soon"], "soon"),
        (["create", "--ttl=-5s"], "-5s"),
        (["create", "--nmae", "x"], "--nmae"),
        (["create", "extra"], "extra"),
        (["list", "--state", "asleep"], "asleep"),
        (["list", "--label", "novalue"], "novalue"),
        (["list", "--limit", "many"], "many"),
        (["list", "--limit", "-1"], "-1"),
        (["requests", "--state", "asleep"], "asleep"),
        (["requests", "--limit", "-3"], "-3"),
        (["stop", "--grace", "later", "box"], "later"),
        (["extend", "box", "soon"], "soon"),
        (["exec", "box"], "no command"),
        (["exec", "box", "-c", "x", "--", "y"], "-c"),
        (["exec", "--timeout", "0", "box", "--", "true"], "0"),
        (["exec", "--env", "1X=y", "box", "--", "true"], "1X"),
        (["exec", "--env", "ELSEWHERE_SANDBOX_ID=y", "box", "--", "true"], "ELSEWHERE_SANDBOX_ID"),
        (["exec", "--env-file", "missing", "box", "--", "true"], "missing"),
        (["exec", "-t", "-d", "box", "--", "true"], "-d"),
        (["exec", "box", "--bogus", "--", "true"], "--bogus"),
        (["kill", "box", "three"], "three"),
        (["kill", "box", "3", "-s", "NOSUCH"], "NOSUCH"),
        (["kill", "box", "3", "-s", "99"], "99"),
        (["logs", "box", "--stream", "stdin"], "stdin"),
        (["rm"], "rm"),
        (["rm", "--all", "box"], "--all"),
        (["cp", "only-one"], "DST"),
        (["inspect"], "ID"),
        (["stop"], "ID"),
    ]
    for arguments, said in bad:
        error = error_of(person, *arguments, code=2)
        assert said in error["message"], (arguments, error)
    assert person.json("list")["total"] == 1


def test_every_verb_prints_exactly_one_document(person: Person) -> None:
    create(person, "--name", "box")
    person.json("exec", "-d", "box", "--", "echo", "hi")
    verbs = [
        (["list"], "sandboxes"),
        (["inspect", "box"], "sandbox"),
        (["exec", "box", "--", "echo", "x"], "command"),
        (["ps", "box"], "processes"),
        (["logs", "box"], "stdout"),
        (["requests"], "requests"),
        (["requests", "box"], "requests"),
        (["extend", "box", "1h"], "sandbox"),
        (["keep", "box"], "sandbox"),
        (["keep", "--off", "box"], "sandbox"),
        (["diff", "box"], "changes"),
        (["open", "box"], "path"),
        (["cp", "README.md", "box:copied"], "files"),
        (["cancel", "box"], "requests"),
        (["stop", "box"], "sandbox"),
        (["start", "box"], "sandbox"),
        (["rm", "--force", "box"], "removed"),
        (["version"], "version"),
    ]
    for arguments, key in verbs:
        assert key in person.json(*arguments), arguments
