"""The other verbs, the JSON contract and the life of the launcher."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from conftest import Person, eventually, plain


def test_a_run_that_changes_nothing_leaves_nothing(person: Person) -> None:
    document = person.json("run", "--", "true")
    assert document["sandbox"]["state"] == "removed"
    assert person.json("list") == {"sandboxes": [], "total": 0, "waiting": [], "healed": [], "broken": []}


def test_keep_and_discard(person: Person) -> None:
    assert person.json("run", "--keep", "--", "true")["sandbox"]["state"] == "stopped"
    assert person.json("run", "--discard", "-c", "echo x > x")["sandbox"]["state"] == "removed"
    assert person.json("list")["total"] == 1
    assert person.elsewhere("run", "--keep", "--discard", "--", "true").returncode == 2


def test_list_is_newest_first_and_inspect_finds_by_part_of_an_id(person: Person) -> None:
    ids = [person.json("run", "-c", f"echo {number} > x")["sandbox"]["id"] for number in range(3)]
    listing = person.json("list")
    assert [box["id"] for box in listing["sandboxes"]] == ids[::-1]
    assert listing["total"] == 3
    for wanted in (ids[0], ids[0][:-1], ids[0].rpartition("-")[2]):
        assert person.json("inspect", wanted)["sandbox"]["id"] == ids[0]
    assert person.json("inspect", "@last")["sandbox"]["id"] == ids[2]
    done = person.elsewhere("inspect", "ew-")
    assert done.returncode == 2
    assert "fits 3" in done.stderr
    done = person.elsewhere("inspect", "nothing-like-it")
    assert done.returncode == 1
    assert "elsewhere list" in done.stderr
    assert ids[1] in person.elsewhere("list").stdout


def test_inspect_says_everything(person: Person) -> None:
    box = person.json("inspect", person.json("run", "-c", "echo x > x")["sandbox"]["id"])["sandbox"]
    wanted = {
        "id",
        "name",
        "state",
        "base",
        "view",
        "project",
        "path",
        "created_at",
        "expires_at",
        "limits",
        "network",
        "identity",
        "labels",
    }
    assert wanted <= set(box)
    assert (box["network"], box["enforced"]["network"].split(",")[0]) == ("allow", "own network namespace")
    assert box["enforced"]["mechanism"] == ("overlay-idmap" if person.is_root else "overlay-userns")
    assert box["enforced"]["differs"]
    assert box["command"]["argv"] == ["/bin/sh", "-c", "echo x > x"]
    assert Path(box["path"]).is_dir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", box["created_at"])
    words = person.elsewhere("inspect", "@last").stdout
    assert "copy on write" in words
    assert "enforced" in words


def test_diff(person: Person) -> None:
    etc = "echo e > /etc/elsewhere-test; " if person.is_root else ""
    person.json("run", "-c", f"rm README.md; mkdir -p a/b; echo x > a/b/c; {etc}echo more >> src/app.py")
    document = person.json("diff", "@last")
    assert plain(document["changes"]) == {"added": ["a/b/c"], "modified": ["src/app.py"], "deleted": ["README.md"]}
    assert document["outside"]["added"] == (["/etc/elsewhere-test"] if person.is_root else [])
    assert document["base"]["kind"] == "live"
    assert "+ a/b/c" in person.elsewhere("diff", "@last").stdout
    stat = person.elsewhere("diff", "@last", "--stat").stdout
    assert re.search(r"^ +a/b/c +\| 1 \+$", stat, re.MULTILINE)
    assert "1 modified, 1 deleted" in stat


def test_rm(person: Person) -> None:
    first, second, third = (person.json("run", "--keep", "--", "true")["sandbox"]["id"] for _ in range(3))
    removed = {"matched": [first], "removed": [first], "skipped": [], "archived": [], "healed": [], "dry_run": False}
    assert person.json("rm", first) == removed
    assert person.elsewhere("rm", first).returncode == 1
    done = person.elsewhere("rm", "--json", second, "missing")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert (document["removed"], [entry["id"] for entry in document["skipped"]]) == ([second], ["missing"])
    assert person.elsewhere("rm").returncode == 2
    assert person.json("rm", "--all")["removed"] == [third]
    assert person.json("rm", "--all")["removed"] == []
    assert eventually(lambda: not list((person.state / "trash").iterdir()))


def test_rm_refuses_what_is_running_unless_forced(person: Person) -> None:
    code = """
import subprocess, sys
from elsewhere import Sandbox
with Sandbox.create(on_exit='keep') as box, box.start('sleep 100'):
    print(box.id)
    print(subprocess.run([sys.executable, '-m', 'elsewhere', 'rm', box.id], capture_output=True).returncode)
    print(subprocess.run([sys.executable, '-m', 'elsewhere', 'list'], capture_output=True, text=True).stdout.count('running'))
"""
    lines = person.sdk(code).stdout.split()
    assert lines[1:] == ["1", "2"]  # in its row and among the totals
    assert person.json("list")["sandboxes"][0]["state"] == "stopped"


def test_version_and_help(person: Person) -> None:
    document = person.json("version")
    assert set(document) == {"version", "schema", "capabilities"}
    assert document["version"] in person.elsewhere("--version").stdout
    for arguments in (["--help"], ["run", "--help"], ["diff", "--help"], []):
        done = person.elsewhere(*arguments)
        assert done.returncode == 0
        assert "examples:" in done.stdout


@pytest.mark.one_launcher
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lisst"], "'list'"),
        (["run", "--tiemout", "3", "--", "true"], "--tiemout"),
        (["run", "--timeout", "soon", "--", "true"], "soon"),
        (["run", "--timeout", "0", "--", "true"], "duration"),
        (["run", "--base", "frozen", "--", "true"], "pinned"),
        (["run"], "no command"),
        (["run", "-c", "x", "--", "y"], "-c"),
        (["run", "--env", "1BAD=x", "--", "true"], "1BAD"),
        (["run", "--env-file", "missing", "--", "true"], "missing"),
        (["run", "--env", "NOT_SET_ANYWHERE", "--", "true"], "NOT_SET_ANYWHERE"),
        (["diff"], "ID"),
    ],
)
def test_bad_input_is_named_with_what_to_do(user: Person, arguments: list[str], said: str) -> None:
    done = user.elsewhere(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "next:" in done.stderr
    done = user.elsewhere(arguments[0], "--json", *arguments[1:])
    assert done.returncode == 2
    assert set(json.loads(done.stdout)["error"]) == {"code", "message", "detail", "hint"}


def test_an_unreadable_record_does_not_hide_the_others(person: Person) -> None:
    good = person.json("run", "--keep", "--", "true")["sandbox"]["id"]
    bad = person.json("run", "--keep", "--", "true")["sandbox"]["id"]
    (person.state / "sandboxes" / bad / "sandbox.json").write_text('{"half')
    listing = person.json("list")
    assert [box["id"] for box in listing["sandboxes"]] == [good]
    assert listing["broken"] == [bad]
    assert person.json("rm", bad)["error"]["code"] == "unreadable_sandbox"
    assert person.json("rm", "--force", bad)["removed"] == [bad]


def test_the_launcher_goes_when_idle_and_when_its_state_goes(person: Person) -> None:
    person.extra["ELSEWHERE_LAUNCHER_IDLE_S"] = "0.2"
    assert person.elsewhere("run", "--", "true").returncode == 0
    assert eventually(lambda: not person.processes(), 15)
    assert not list((person.state / "spare").iterdir())
    assert person.elsewhere("run", "--", "true").returncode == 0


@pytest.mark.parametrize("ready", ["0", "1", "5", None])
def test_as_many_sandboxes_stand_ready_as_were_asked_for(person: Person, ready: str | None) -> None:
    if ready is not None:
        person.extra["ELSEWHERE_LAUNCHER_READY"] = ready
    for _ in range(2):
        assert person.elsewhere("run", "--", "true").returncode == 0
    assert eventually(lambda: len(list((person.state / "spare").iterdir())) == int(ready or 3))
    time.sleep(0.3)
    assert len(list((person.state / "spare").iterdir())) == int(ready or 3)


def test_nonsense_for_that_is_named(person: Person) -> None:
    person.extra["ELSEWHERE_LAUNCHER_READY"] = "many"
    done = person.elsewhere("run", "--", "true")
    assert done.returncode == 125
    assert "ELSEWHERE_LAUNCHER_READY = 'many' is not a whole number between 0 and 99" in done.stderr


def test_a_launcher_of_other_code_is_not_used(person: Person) -> None:
    """After an upgrade of a checkout the old launcher is left to its idle end."""
    library = person.place / "lib"
    real = library.resolve()
    library.unlink()
    __import__("shutil").copytree(real, library)
    person.own(library)
    names = []
    for _ in range(2):
        assert person.elsewhere("run", "--", "true").returncode == 0
        names.append({path.name for path in (person.state / "run").glob("????????")})
        os.utime(library / "elsewhere" / "cli" / "show.py", (time.time() + 5, time.time() + 5))
    assert len(names[0]) == 1
    assert len(names[1]) == 2


def test_mounts_made_later_are_seen_in_the_next_sandbox(root: Person) -> None:
    """What was raised ahead of time carries the mounts of its time, and is not used when they changed."""
    place = root.place / "later"
    place.mkdir()
    code = f"""
import ctypes
from elsewhere import Sandbox
libc = ctypes.CDLL(None, use_errno=True)
place = {str(place)!r}
def look():
    with Sandbox.create() as box:
        return box.run(f'ls {{place}}').stdout
import time
look(); time.sleep(0.5)
assert libc.mount(b'tmpfs', place.encode(), b'tmpfs', 0, b'') == 0
try:
    open(place + '/file', 'w').close()
    print(look(), end='')
finally:
    libc.umount2(place.encode(), 2)
print(repr(look()))
"""
    assert root.sdk(code).stdout == "file\n''\n"
