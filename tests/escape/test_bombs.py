"""Bombs: a sandbox that uses up all it can get. The host answers meanwhile, the end has the right reason, the sandbox's next command and
the next sandbox are as if nothing had been, and nothing is left. Each bomb runs under small limits, and only inside. They all go
off under one launcher, one after the other: what one of them did to it, the next one would feel."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import PATIENCE, Person, eventually
from limited import archived, held, leaves_nothing, limit, start

pytestmark = pytest.mark.one_launcher

LIMITS = {"memory": "64M", "pids": "32", "disk": "20M"}
FORKS = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
MEMORY = "held = []\nwhile True: held.append(bytearray(b'x') * (1 << 20))"
DISK = "number = 0\nwhile True:\n    number += 1\n    with open(f'big{number}', 'wb') as stream: stream.write(bytes(1 << 20))"
DESCRIPTORS = "import os\nheld = []\nwhile True: held.append(os.open('/dev/null', 0))"
SMALL_FILES = "number = 0\nwhile True:\n    number += 1\n    open(f'small{number}', 'w').close()"
ZOMBIES = """
import os
for _ in range({count}):
    if not os.fork():
        if not os.fork(): os._exit(0)
        os._exit(0)
    os.wait()
print("done")
"""
DEEP = """
import os
for _ in range({levels}):
    os.mkdir("d")
    os.chdir("d")
print("done")
"""


@pytest.fixture(autouse=True)
def all_is_cleared_away(person: Person) -> Iterator[None]:
    yield
    leaves_nothing(person)


def python(person: Person, code: str) -> list[str]:
    return [person.python, "-I", "-S", "-c", code]


def the_next_one_is_fine(person: Person) -> None:
    done = person.json("run", "--discard", "--", "sh", "-c", "echo fine > there; cat there")
    assert (done["command"]["stdout"], done["command"]["reason"], done["command"]["denials"]) == ("fine\n", "exited", [])


def explode(person: Person, code: str, *options: str, timeout: str = "100s") -> dict[str, Any]:
    """In a sandbox that stays, beside which another one works at the same time, and in which another command works afterwards.
    Time ends only what nothing else ends."""
    person.json("create", "--name", "box", *options)
    keeper = person.json("inspect", "box")["sandbox"]["keeper"]["pid"]
    bomb = start(person, "exec", "--json", "--timeout", timeout, "box", "--", *python(person, code))
    the_next_one_is_fine(person)
    out, errors = bomb.communicate(timeout=110 * PATIENCE)
    assert out, errors
    assert person.json("inspect", "box")["sandbox"]["keeper"]["pid"] == keeper
    the_next_one_is_fine(person)
    return json.loads(out)["command"]


def still_good(person: Person) -> None:
    done = person.json("exec", "box", "--", "sh", "-c", "true | true; echo good")
    assert (done["command"]["stdout"], done["command"]["reason"]) == ("good\n", "exited"), done["command"]


def test_a_bomb_of_forks(person: Person) -> None:
    """It copes with every refusal, so only time ends it; and then the whole of it."""
    command = explode(person, FORKS, *limit(person, **{**LIMITS, "memory": "1G"}), timeout="5s")
    assert (command["reason"], command["exit_code"]) == ("timeout", 124)
    assert [one["what"] for one in command["denials"] if one["kind"] == "limit"] == ["pids"]
    assert eventually(lambda: person.json("ps", "box")["processes"] == []), person.json("ps", "box")
    still_good(person)


def test_a_bomb_of_memory(person: Person) -> None:
    command = explode(person, MEMORY, *limit(person, **LIMITS))
    assert (command["reason"], command["exit_code"]) == ("memory", 137)
    still_good(person)


def test_a_bomb_of_large_files(person: Person) -> None:
    command = explode(person, DISK, *limit(person, **LIMITS))
    assert (command["reason"], command["exit_code"]) == ("disk", 1 if "disk" in held(person) else 137)
    person.json("exec", "box", "--", "sh", "-c", "rm big*")
    still_good(person)


def test_a_bomb_of_small_files(person: Person) -> None:
    """They have no content: what they use up is the table of files, or the disk that their names need."""
    timeout = "100s" if "disk" in held(person) else "5s"
    command = explode(person, SMALL_FILES, *limit(person, **LIMITS), timeout=timeout)
    if "disk" in held(person):
        assert (command["reason"], command["exit_code"]) == ("disk", 1)
        assert "No space left on device" in command["stderr"]
    else:
        assert command["reason"] in ("disk", "timeout")
    assert person.json("rm", "--force", "box")["removed"]
    the_next_one_is_fine(person)


def test_a_bomb_of_descriptors(person: Person) -> None:
    command = explode(person, DESCRIPTORS, *limit(person, **LIMITS, open_files="256"))
    assert (command["reason"], command["exit_code"]) == ("exited", 1)
    assert "Too many open files" in command["stderr"]
    still_good(person)


def test_a_flood_of_output_is_cut_off(person: Person) -> None:
    """It is read to the end, so that the command ends by itself; what is more than the cap is dropped, and said to be."""
    done = person.json("run", *limit(person, **LIMITS), "-c", f"yes | head -c {20 << 20}")
    command = done["command"]
    assert (command["reason"], command["exit_code"], command["stdout_truncated"]) == ("exited", 0, True)
    assert len(command["stdout"]) == 16 << 20
    the_next_one_is_fine(person)


def test_a_flood_of_output_that_nobody_reads_does_not_fill_the_disk(person: Person) -> None:
    """What a detached command says goes to a file, which is no layer of the sandbox's own."""
    person.json("create", "--name", "box", *limit(person, **LIMITS))
    request = person.json("exec", "-d", "--timeout", "100s", "box", "--", "yes")["command"]["request"]

    def end() -> dict[str, Any]:
        return next(one for one in person.json("requests", "box")["requests"] if one["id"] == request)

    assert eventually(lambda: end()["ended_at"] is not None, 100), end()
    assert end()["reason"] == "disk"
    assert [one["what"] for one in person.json("logs", "--stream", "stderr", "box", request)["denials"]] == ["disk"]
    assert person.json("rm", "--force", "box")["removed"]
    the_next_one_is_fine(person)


def test_thousands_of_orphans_are_buried(person: Person) -> None:
    """More of them, one after the other, than may be there at once."""
    command = explode(person, ZOMBIES.format(count=500), *limit(person, **{**LIMITS, "pids": "64"}))
    assert (command["stdout"], command["reason"]) == ("done\n", "exited"), command
    assert person.json("ps", "box")["processes"] == []
    still_good(person)


def test_directories_deeper_than_any_path_are_removed(person: Person) -> None:
    """Than a path can be long, and than a program may call itself."""
    options = limit(person, memory="256M", pids="32")
    command = person.json("run", "--discard", *options, "--", *python(person, DEEP.format(levels=3_000)))["command"]
    assert (command["stdout"], command["reason"]) == ("done\n", "exited"), command
    the_next_one_is_fine(person)
    assert (person.json("list")["sandboxes"], archived(person)) == ([], [])
    assert eventually(lambda: not list((person.state / "trash").iterdir()), 60)


def test_a_command_cannot_keep_its_keeper_from_its_work(person: Person) -> None:
    """Neither stopped nor killed from inside, and never out of turn: the time is over when it is over."""
    person.json("create", "--name", "box", *limit(person, **LIMITS))
    line = "kill -STOP 1; kill -KILL 1; while :; do :; done"
    command = person.json("exec", "--timeout", "1s", "box", "--", "sh", "-c", line)["command"]
    assert (command["reason"], command["exit_code"]) == ("timeout", 124)
    still_good(person)


@pytest.mark.slow
def test_all_bombs_at_once(person: Person) -> None:
    bombs = {
        name: start(person, "run", "--json", "--discard", "--timeout", timeout, *options, "--", *python(person, code))
        for name, code, timeout, options in (
            ("forks", FORKS, "10s", limit(person, **LIMITS)),
            ("memory", MEMORY, "80s", limit(person, **LIMITS)),
            ("disk", DISK, "80s", limit(person, **LIMITS)),
            ("descriptors", DESCRIPTORS, "80s", limit(person, **LIMITS, open_files="256")),
        )
    }
    the_next_one_is_fine(person)
    ends = {name: json.loads(bomb.communicate(timeout=100)[0])["command"]["reason"] for name, bomb in bombs.items()}
    assert ends == {"forks": "timeout", "memory": "memory", "disk": "disk", "descriptors": "exited"}
    the_next_one_is_fine(person)
