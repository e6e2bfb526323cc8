"""Room on the machine: more sandboxes than fit wait their turn, visibly, or are refused; a disk that is nearly full takes no more."""

import json
import os
import shlex
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from test_ladder import Elsewhere, needs_root

from conftest import Person, eventually, plain
from limited import leaves_nothing, limit, start

pytestmark = pytest.mark.one_launcher

MOST_OF_IT = {"memory": "60%"}


@pytest.fixture(autouse=True)
def all_is_cleared_away(person: Person) -> Iterator[None]:
    yield
    person.extra.clear()
    leaves_nothing(person)


def waiting(person: Person) -> list[dict[str, Any]]:
    return person.json("list")["waiting"]


def queue(person: Person, line: str, *options: str) -> Any:
    """One more that waits, and is seen to."""
    before = len(waiting(person))
    process = start(person, "run", "--discard", *options, "-c", line)
    assert eventually(lambda: len(waiting(person)) == before + 1), process.communicate(timeout=10)
    return process


def refusal(person: Person, *arguments: str) -> dict[str, Any]:
    done = person.elsewhere(arguments[0], "--json", *arguments[1:])
    assert done.returncode == (1 if arguments[0] in ("create", "start") else 125), (done.stdout, done.stderr)
    return json.loads(done.stdout)["error"]


def ends(process: Any) -> tuple[str, str]:
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, (out, errors)
    return out, errors


def test_what_does_not_fit_waits_and_is_seen_waiting(person: Person) -> None:
    options = limit(person, **MOST_OF_IT)
    person.json("create", "--name", "first", *options)
    second = queue(person, "echo in", *options)
    (claim,) = waiting(person)
    assert claim["memory"] == person.json("inspect", "first")["sandbox"]["limits"]["memory"]
    assert person.json("top")["waiting"] == [claim]
    assert second.poll() is None
    person.json("rm", "--force", "first")
    out, errors = ends(second)
    assert out == "in\n"
    assert "elsewhere: waiting for room: " in errors
    assert "of memory are promised to others" in errors
    assert waiting(person) == []


def test_processors_are_shared_out_as_well(person: Person) -> None:
    person.json("create", "--name", "first", *limit(person, cpus=str(os.cpu_count())))
    second = queue(person, "echo in", *limit(person, cpus="0.5"))
    person.json("stop", "first")
    assert "processors are promised to others" in ends(second)[1]


def test_what_asks_for_nothing_does_not_wait(person: Person) -> None:
    person.json("create", "--name", "first", *limit(person, **MOST_OF_IT))
    assert person.json("run", "--", "true")["command"]["exit_code"] == 0


def test_whoever_came_first_is_first(person: Person) -> None:
    """The last one would fit beside the second, and waits all the same, because the third was here before."""
    place = person.place / "shared"
    place.mkdir()
    person.own(place)
    options = limit(person, **MOST_OF_IT)
    person.json("create", "--name", "first", *options)
    share = ("--share", f"{place}:rw")
    lines = (f"echo second >> {place}/order; until [ -e {place}/go ]; do sleep 0.05; done", f"echo third >> {place}/order")
    queued = [queue(person, line, *options, *share) for line in lines]
    queued.append(queue(person, f"echo small >> {place}/order", *limit(person, memory="64M"), *share))
    assert not (place / "order").exists()
    person.json("rm", "--force", "first")
    assert eventually((place / "order").exists)
    for _ in range(5):
        assert len(waiting(person)) == 2
    assert (place / "order").read_text() == "second\n"
    (place / "go").touch()
    said = [ends(process)[1] for process in queued]
    assert sorted((place / "order").read_text().split()) == ["second", "small", "third"]
    assert "2 others before this one" in said[2]


def test_without_patience_it_is_refused(person: Person) -> None:
    options = limit(person, **MOST_OF_IT)
    person.json("create", "--name", "first", *options)
    for verb in (["run", "--no-wait", *options, "--", "touch", "ran"], ["create", "--no-wait", *options]):
        error = refusal(person, *verb)
        assert (error["code"], "--no-wait" in error["hint"]) == ("no_room_now", True)
    assert [one["name"] for one in person.json("list")["sandboxes"]] == ["first"]
    assert waiting(person) == []
    person.json("rm", "--force", "first")
    assert person.json("run", "--no-wait", *options, "--", "true")["command"]["exit_code"] == 0


def test_no_more_than_so_many_run(person: Person) -> None:
    person.extra["ELSEWHERE_ADMISSION_MOST"] = "2"
    person.json("create", "--name", "one")
    person.json("create", "--name", "two")
    error = refusal(person, "create", "--no-wait")
    assert (error["code"], "at most 2" in error["message"]) == ("no_room_now", True)
    third = queue(person, "echo in")
    person.json("stop", "one")
    assert ends(third)[0] == "in\n"


def test_a_stopped_one_needs_room_to_run_again(person: Person) -> None:
    person.extra["ELSEWHERE_ADMISSION_MOST"] = "1"
    person.json("create", "--name", "one")
    person.json("stop", "one")
    person.json("create", "--name", "two")
    person.extra["ELSEWHERE_ADMISSION_WAIT"] = "false"
    for verb in (["start", "one"], ["exec", "one", "--", "true"]):
        assert refusal(person, *verb)["code"] == "no_room_now"
    person.json("stop", "two")
    assert person.json("exec", "one", "--", "true")["command"]["exit_code"] == 0


def test_one_that_is_killed_loses_its_place(person: Person) -> None:
    options = limit(person, **MOST_OF_IT)
    person.json("create", "--name", "first", *options)
    second, third = queue(person, "echo second", *options), queue(person, "echo third", *options)
    second.kill()
    second.communicate(timeout=10)
    assert eventually(lambda: len(waiting(person)) == 1), waiting(person)
    person.json("rm", "--force", "first")
    assert ends(third)[0] == "third\n"


def test_one_that_is_interrupted_loses_its_place(person: Person) -> None:
    options = limit(person, **MOST_OF_IT)
    person.json("create", "--name", "first", *options)
    second = queue(person, "echo second", *options)
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=10)
    assert second.returncode != 0
    assert eventually(lambda: waiting(person) == []), waiting(person)


def test_what_a_killed_sandbox_had_is_free(person: Person) -> None:
    options = limit(person, **MOST_OF_IT)
    made = person.json("create", "--name", "first", *options)["sandbox"]["id"]
    assert refusal(person, "run", "--no-wait", *options, "--", "true")["code"] == "no_room_now"
    keeper = json.loads((person.state / "sandboxes" / made / "sandbox.json").read_bytes())["keeper"][0]
    os.kill(keeper, signal.SIGKILL)
    assert eventually(lambda: person.json("list")["sandboxes"][0]["state"] == "stopped")
    assert person.json("run", "--no-wait", *options, "--", "true")["command"]["exit_code"] == 0


def test_a_reserve_of_memory_is_kept(person: Person) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    person.extra["ELSEWHERE_ADMISSION_MEMORY_RESERVE"] = str(total)
    error = refusal(person, "run", "--no-wait", "--", "touch", "ran")
    assert (error["code"], "memory are free" in error["message"]) == ("no_room_now", True)
    assert person.json("list")["sandboxes"] == []
    patient = queue(person, "echo in")
    patient.kill()
    patient.communicate(timeout=10)
    assert eventually(lambda: waiting(person) == [])
    person.extra["ELSEWHERE_ADMISSION_MEMORY_RESERVE"] = "1M"
    assert person.json("run", "--no-wait", "--", "true")["command"]["exit_code"] == 0


def test_below_the_reserve_of_the_disk_nothing_begins(person: Person) -> None:
    """Nobody waits for that: nothing frees it by itself."""
    room = os.statvfs(person.place)
    person.json("create", "--name", "box")
    person.json("stop", "box")
    person.extra["ELSEWHERE_ADMISSION_DISK_RESERVE"] = str(room.f_blocks * room.f_frsize)
    for verb in (["run", "--", "touch", "ran"], ["create"], ["start", "box"], ["exec", "box", "--", "true"]):
        error = refusal(person, *verb)
        assert (error["code"], "are kept" in error["message"]) == ("disk_reserve", True), verb
    assert [one["state"] for one in person.json("list")["sandboxes"]] == ["stopped"]
    assert plain(person.json("diff", "box")["changes"]) == {"added": [], "modified": [], "deleted": []}
    person.extra["ELSEWHERE_ADMISSION_DISK_RESERVE"] = "1M"
    assert person.json("exec", "box", "--", "true")["command"]["exit_code"] == 0


def test_a_small_disk_is_never_filled(person: Person) -> None:
    """Whoever writes into the reserve is ended for it; afterwards nothing new begins until there is room again."""
    needs_root()
    person.extra["ELSEWHERE_ADMISSION_DISK_RESERVE"] = "40M"
    host = Elsewhere(person, "--tmpfs", str(person.state), "--tmpfs-size", "100m")
    slow = "for i in $(seq 30); do head -c 4000000 /dev/zero > big$i; sleep 0.1; done"
    done = host.script(
        f"""
        e run --json --keep -c {shlex.quote(slow)} || true
        e run --json -- touch ran || true
        e list --json
        e rm --all --force > /dev/null; e run --json -- true || true
        df --output=avail -B1 {person.state} | tail -1
        """
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 5, (done.stdout, done.stderr)
    filled, refused, listing, after = (json.loads(line) for line in lines[:4])
    assert (filled["command"]["reason"], filled["command"]["exit_code"]) == ("disk", 137)
    assert [one["what"] for one in filled["command"]["denials"]] == ["disk"]
    assert refused["error"]["code"] == "disk_reserve"
    assert len(listing["sandboxes"]) == 1, "what it wrote is kept, as was asked for"
    assert "command" in after or after["error"]["code"] == "disk_reserve"
    assert int(lines[4]) > 8 << 20


def test_one_file_cannot_take_all_that_is_free(person: Person) -> None:
    """It is refused before anything is written: to end somebody for it would be too late."""
    needs_root()
    person.extra["ELSEWHERE_ADMISSION_DISK_RESERVE"] = "60M"
    host = Elsewhere(person, "--tmpfs", str(person.state), "--tmpfs-size", "200m")
    done = host.script("e run --json --keep -c 'fallocate -l 160000000 big && sleep 5; exit 6' || true; e run --json -- true")
    refused, after = map(json.loads, done.stdout.splitlines())
    assert (refused["command"]["reason"], refused["command"]["exit_code"]) == ("exited", 6), refused["command"]
    assert after["command"]["exit_code"] == 0, "there is still room"


@pytest.mark.own_launcher
def test_more_commands_than_a_keeper_can_hold_are_refused(person: Person) -> None:
    """It has as many descriptors as whoever started the launcher, and needs two for each command."""
    words = person.command("create", "--name", "box")
    person.shell("sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *words, cwd=person.project)
    keeper = person.json("inspect", "box")["sandbox"]["keeper"]["pid"]
    number, document = 0, person.json("exec", "-d", "box", "--", "sleep", "1000")
    while "error" not in document and number < 64:
        number, document = number + 1, person.json("exec", "-d", "box", "--", "sleep", "1000")
    assert document["error"]["code"] == "commands_reached", document
    assert number > 8
    shown = person.json("ps", "box")["processes"]
    assert len(shown) == number
    assert person.json("exec", "box", "--", "true")["error"]["code"] == "commands_reached"
    assert person.elsewhere("kill", "box", str(shown[0]["pid"]), "-s", "KILL").returncode == 0
    assert eventually(lambda: len(person.json("ps", "box")["processes"]) == number - 1)
    assert person.json("exec", "box", "--", "true")["command"]["exit_code"] == 0
    assert person.json("inspect", "box")["sandbox"]["keeper"]["pid"] == keeper
