"""Each limit, hit on purpose from the front door: its own reason, its exit code, what was used, and nothing left afterwards."""

import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, eventually, plain
from limited import MEMORY, archived, groups_of, held, hog, leaves_nothing, limit, loops_of, start

pytestmark = pytest.mark.one_launcher

FORKS = "for i in $(seq 60); do sleep 3 & done; echo all; exit 0"
BURN = "import time; end = time.monotonic() + {wall}\nwhile time.monotonic() < end: pass"


@pytest.fixture(autouse=True)
def all_is_cleared_away(person: Person) -> Iterator[None]:
    yield
    leaves_nothing(person)


def run(person: Person, *words: str, code: int, **more: Any) -> dict[str, Any]:
    """What is told of one command; its exit code is elsewhere's."""
    done = person.elsewhere("run", "--json", "--discard", *words, **more)
    assert done.stdout.count("\n") == 1, (done.stdout, done.stderr)
    document = json.loads(done.stdout)
    assert "command" in document, document
    assert (done.returncode, document["command"]["exit_code"]) == (code, code), document["command"]
    return document


def inside(person: Person, *words: str, box: str = "box") -> dict[str, Any]:
    document = person.json("exec", box, "--", *words)
    assert "command" in document, document
    return document["command"]


def detached(person: Person, *words: str) -> str:
    """The request of a command that nobody waited for and that has ended."""
    request = person.json("exec", "-d", "box", "--", *words)["command"]["request"]

    def over() -> bool:
        return any(one["id"] == request and one["ended_at"] for one in person.json("requests", "box")["requests"])

    assert eventually(over), person.json("requests", "box")
    return request


def record(person: Person, name: str = "box") -> dict[str, Any]:
    for path in (person.state / "sandboxes").glob("*/sandbox.json"):
        found = json.loads(path.read_bytes())
        if found["name"] == name:
            return found
    raise AssertionError(f"there is no record of {name}")


def limits_denied(command: dict[str, Any]) -> list[str]:
    return [one["what"] for one in command["denials"] if one["kind"] == "limit"]


# -- memory ---


def test_a_command_that_takes_too_much_memory_is_killed_for_it(person: Person) -> None:
    document = run(person, *limit(person, memory="64M"), "--", *hog(person), code=137)
    command = document["command"]
    assert (command["reason"], limits_denied(command)) == ("memory", ["memory"])
    assert document["sandbox"]["limits"]["memory"] == MEMORY
    if "memory" in held(person):
        assert MEMORY * 9 // 10 < command["usage"]["memory_peak_bytes"] <= MEMORY
    else:
        assert command["usage"]["memory_peak_bytes"] > MEMORY, "the watchdog saw it"
    assert person.json("list")["sandboxes"] == []


def test_a_command_that_takes_little_is_let_alone(person: Person) -> None:
    command = run(person, *limit(person, memory="64M"), "--", *hog(person, size=16, seconds=1), code=0)["command"]
    assert (command["reason"], command["denials"]) == ("exited", [])


def test_a_killed_grandchild_is_told_even_if_its_parent_copes(person: Person) -> None:
    line = f"""{person.python} -I -S -c '{hog(person)[-1].replace("'", '"')}'; echo survived $?; exit 3"""
    if "memory" in held(person):
        command = run(person, *limit(person, memory="64M"), "-c", line, code=3)["command"]
        assert command["stdout"] == "survived 137\n"
    else:
        command = run(person, *limit(person, memory="64M"), "-c", line, code=137)["command"]
    assert (command["reason"], limits_denied(command)) == ("memory", ["memory"])


def test_a_sandbox_survives_the_memory_kill_of_a_command(person: Person) -> None:
    person.json("create", "--name", "box", *limit(person, memory="64M"))
    keeper = person.json("inspect", "box")["sandbox"]["keeper"]["pid"]
    for _ in range(2):
        assert inside(person, *hog(person))["reason"] == "memory"
        following = inside(person, "echo", "fine")
        assert (following["stdout"], following["reason"], following["denials"]) == ("fine\n", "exited", [])
    assert person.json("inspect", "box")["sandbox"]["keeper"]["pid"] == keeper
    assert bool(groups_of(person)) == bool(record(person)["group"]), "what is looked for afterwards is found now"


def test_files_in_memory_are_memory(person: Person) -> None:
    for place in ("/dev/shm", "/run"):
        words = (*limit(person, memory="64M"), "-c", f"head -c 200000000 /dev/zero > {place}/x; sleep 30; exit 9")
        assert person.json("run", "--discard", *words)["command"]["reason"] == "memory", place


def test_a_group_full_of_files_does_not_cost_the_keeper_its_life(person: Person) -> None:
    """They belong to no process, so that the largest one is the keeper, wherever it is counted as well."""
    if "memory" not in held(person):
        pytest.skip("nothing holds memory for this person")
    person.json("create", "--name", "box", "--memory", "32M")
    keeper = person.json("inspect", "box")["sandbox"]["keeper"]["pid"]
    assert inside(person, "sh", "-c", "exec head -c 1G /dev/zero > /dev/shm/x")["reason"] == "memory"
    for _ in range(3):
        person.json("exec", "box", "--", person.python, "-I", "-S", "-c", "pass")  # which may well be killed
        box = person.json("inspect", "box")["sandbox"]
        assert (box["state"], box["keeper"]["pid"]) == ("running", keeper)
    person.json("stop", "box")
    assert inside(person, "echo", "fine")["stdout"] == "fine\n"


def test_all_processes_of_a_sandbox_are_counted_together(person: Person) -> None:
    """None of them takes too much by itself."""
    line = " ".join(
        f"{person.python} -I -S -c '{hog(person, size=24, seconds=4)[-1].replace(chr(39), chr(34))}' &" for _ in range(5)
    )
    command = run(person, *limit(person, memory="64M"), "-c", f"{line} wait; exit 5", code=5 if "memory" in held(person) else 137)
    assert command["command"]["reason"] == "memory"


# -- processes ---


def test_a_refused_fork_is_told_with_the_commands_own_code(person: Person) -> None:
    document = run(person, *limit(person, pids="20"), "-c", FORKS, code=2)
    command = document["command"]
    assert (command["reason"], limits_denied(command)) == ("pids", ["pids"])
    assert "fork" in command["stderr"].lower()
    assert "all" not in command["stdout"]
    if "cgroup" in document["sandbox"]["enforced"]["limits"]["pids"]:
        assert command["usage"]["processes_peak"] == 20


def test_as_many_processes_as_were_asked_for_fit(person: Person) -> None:
    """The shell and nineteen more, neither fewer nor more."""
    line = "import subprocess\nchildren = [subprocess.Popen(['sleep', '20']) for _ in range({})]\nprint(len(children))"
    argv = [person.python, "-I", "-S", "-c"]
    fits = run(person, *limit(person, pids="20"), "--", *argv, line.format(19), code=0)["command"]
    assert (fits["stdout"], fits["reason"]) == ("19\n", "exited")
    assert run(person, *limit(person, pids="20"), "--", *argv, line.format(20), code=1)["command"]["reason"] == "pids"


def test_a_refused_fork_that_a_command_copes_with_is_only_noted(person: Person) -> None:
    line = (
        "import os, time\ntry:\n    for _ in range(40):\n        if not os.fork(): time.sleep(20)\nexcept OSError: print('coped')"
    )
    document = run(person, *limit(person, pids="20"), "--", person.python, "-I", "-S", "-c", line, code=0)
    command = document["command"]
    assert (command["stdout"], command["reason"]) == ("coped\n", "exited")
    if "cgroup" in document["sandbox"]["enforced"]["limits"]["pids"]:
        assert limits_denied(command) == ["pids"]


def test_the_next_command_of_a_sandbox_that_was_full_of_processes(person: Person) -> None:
    person.json("create", "--name", "box", *limit(person, pids="20"))
    assert inside(person, "sh", "-c", FORKS)["reason"] == "pids"
    for one in person.json("ps", "box")["processes"]:
        person.elsewhere("kill", "box", str(one["pid"]), "-s", "KILL")
    assert eventually(lambda: not person.json("ps", "box")["processes"])
    following = inside(person, "sh", "-c", "true & wait; echo fine")
    assert (following["stdout"], following["reason"]) == ("fine\n", "exited")


# -- processors ---


def test_processor_time_is_held_back(person: Person) -> None:
    """Two processes that spin for a second of the clock get what was asked for, and the kernel counts that it held them back."""
    burn = [person.python, "-I", "-S", "-c", BURN.format(wall=1)]
    if "cpus" not in held(person):
        error = refused(person, "--cpus", "0.2", "--", *burn)
        assert set(error["detail"]["limits"]) == {"cpus"}
        return
    person.json("create", "--name", "box", "--cpus", "0.2")
    both = f"{' '.join(burn[:4])} '{burn[4]}' & {' '.join(burn[:4])} '{burn[4]}'; wait"
    done = inside(person, "sh", "-c", both)
    used = done["usage"]
    assert used["cpu_ms"] < 0.3 * done["duration_ms"] + 200, "0.2 processors for as long as it took, and what a period is late"
    assert throttled(record(person)) > 0
    person.json("create", "--name", "free")
    free = inside(person, "sh", "-c", both, box="free")["usage"]
    assert throttled(record(person, "free")) == 0
    assert free["cpu_ms"] > used["cpu_ms"]


def throttled(found: dict[str, Any]) -> int:
    words = Path(found["group"][1]["cpu"], "work", "cpu.stat").read_text().split()
    return int(words[words.index("nr_throttled") + 1])


def refused(person: Person, *words: str) -> dict[str, Any]:
    """Asked for, not held, so not run."""
    sentinel = person.place / "ran"
    sentinel.mkdir(exist_ok=True)
    person.own(sentinel)
    done = person.elsewhere("run", "--json", "--share", f"{sentinel}:rw", *words)
    assert done.returncode == 125
    assert person.json("list")["sandboxes"] == []
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "limit_not_enforceable", error
    assert "--best-effort" in error["hint"]
    return error


# -- disk ---


def test_a_full_disk_is_the_commands_own_failure(person: Person) -> None:
    line = "for i in 1 2 3 4 5; do head -c 8000000 /dev/zero > big$i || exit 6; done; sleep 20"
    document = run(person, *limit(person, disk="20M"), "-c", line, code=6 if "disk" in held(person) else 137)
    command = document["command"]
    assert (command["reason"], limits_denied(command)) == ("disk", ["disk"])
    if "disk" in held(person):
        assert "No space left on device" in command["stderr"]
        assert document["sandbox"]["enforced"]["limits"]["disk"] == "image"


def test_one_large_file_is_too_much_as_well(person: Person) -> None:
    command = run(person, *limit(person, disk="20M"), "-c", "head -c 60000000 /dev/zero > big || exit 6", code=6)["command"]
    assert (command["reason"], limits_denied(command)) == ("disk", ["disk"])


def test_a_disk_limit_counts_what_is_written_anywhere(person: Person) -> None:
    """The project, the home and /tmp together."""
    places = [str(person.project / "a"), str(person.home / "b"), "/tmp/c", "/var/tmp/d"]
    line = "; ".join(f"head -c 7000000 /dev/zero > {place} || exit 6" for place in places) + "; sleep 20"
    command = run(person, *limit(person, disk="20M"), "-c", line, code=6 if "disk" in held(person) else 137)["command"]
    assert command["reason"] == "disk"


def test_a_disk_limit_that_nothing_holds_is_refused(person: Person) -> None:
    if "disk" in held(person):
        pytest.skip("this person has images")
    assert "no quota" in refused(person, "--disk", "20M", "--", "true")["message"]


def test_an_image_keeps_its_content(person: Person) -> None:
    """Stopped, started, compared, removed: the layers lie in it all the while, and it is attached only while it is needed."""
    if "disk" not in held(person):
        pytest.skip("nothing holds the disk for this person")
    person.json("create", "--name", "box", "--disk", "20M")
    assert len(loops_of(person)) == 1
    assert inside(person, "sh", "-c", "echo kept > kept; rm README.md; echo more >> src/app.py")["exit_code"] == 0
    changes = {"added": ["kept"], "modified": ["src/app.py"], "deleted": ["README.md"]}
    assert plain(person.json("diff", "box")["changes"]) == changes
    person.json("stop", "box")
    assert eventually(lambda: not loops_of(person)), loops_of(person)
    assert plain(person.json("diff", "box")["changes"]) == changes
    assert person.elsewhere("cp", "box:kept", "copy", check=True).returncode == 0
    assert (person.project / "copy").read_text() == "kept\n"
    (person.project / "copy").unlink()
    person.json("stop", "box")
    assert eventually(lambda: not loops_of(person)), loops_of(person)
    person.json("start", "box")
    assert inside(person, "cat", "kept")["stdout"] == "kept\n"
    assert inside(person, "sh", "-c", "head -c 40000000 /dev/zero > big")["reason"] == "disk"
    assert inside(person, "sh", "-c", "rm big; echo again > again")["reason"] == "exited"
    assert person.elsewhere("rm", "box").returncode == 1, "it has changes"
    assert person.json("rm", "--force", "box")["removed"]
    assert eventually(lambda: not loops_of(person)), loops_of(person)


def test_a_keeper_that_is_killed_leaves_a_usable_image(person: Person) -> None:
    if "disk" not in held(person):
        pytest.skip("nothing holds the disk for this person")
    person.json("create", "--name", "box", "--disk", "20M")
    assert inside(person, "sh", "-c", "echo kept > kept; sync kept")["exit_code"] == 0
    os.kill(record(person)["keeper"][0], signal.SIGKILL)
    assert eventually(lambda: person.json("inspect", "box")["sandbox"]["state"] == "stopped")
    assert inside(person, "cat", "kept")["stdout"] == "kept\n"


# -- descriptors ---


def test_descriptors_are_limited(person: Person) -> None:
    line = "import os, resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE))\nfor _ in range(64): os.open('/dev/null', 0)"
    done = run(person, "--open-files", "64", "--", person.python, "-I", "-S", "-c", line, code=1)
    assert done["command"]["stdout"] == "(64, 64)\n"
    assert "Too many open files" in done["command"]["stderr"]
    assert done["sandbox"]["enforced"]["limits"]["open_files"] == "rlimit"
    assert run(person, "--", person.python, "-I", "-S", "-c", line, code=0)["command"]["reason"] == "exited"


def test_few_descriptors_are_the_commands_and_not_its_keepers(person: Person) -> None:
    person.json("create", "--name", "box", "--open-files", "16")
    keeper = person.json("inspect", "box")["sandbox"]["keeper"]["pid"]
    for number in range(12):
        assert "command" in person.json("exec", "-d", "box", "--", "sleep", "1000"), number
    assert inside(person, "sh", "-c", "ulimit -n; ulimit -Hn")["stdout"] == "16\n16\n"
    assert len(person.json("ps", "box")["processes"]) == 12
    assert person.json("inspect", "box")["sandbox"]["keeper"]["pid"] == keeper
    assert run(person, "--open-files", "16", "--", "true", code=0)["command"]["reason"] == "exited"


def test_a_start_under_few_descriptors_is_refused_like_any_other(person: Person) -> None:
    person.json("create", "--name", "box", "--open-files", "16")
    for words, code in ((["/no/such/program"], 127), (["/etc/passwd"], 126)):
        done = person.elsewhere("exec", "box", "--", *words)
        assert done.returncode == code, done.stderr
    (person.project / "plain").write_text("echo by the shell\n")
    (person.project / "plain").chmod(0o755)
    assert person.elsewhere("run", "--open-files", "16", "--", "./plain").stdout == "by the shell\n"
    assert person.json("ps", "box")["processes"] == []


# -- time ---


@pytest.mark.slow
def test_a_program_that_hides_ends_with_its_time(person: Person) -> None:
    """Its own session, no parent but the keeper, and an environment that says nothing."""
    hide = (
        "import os, time\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if not os.fork(): os.execve('/bin/sh', ['sh', '-c', 'trap \"\" TERM; : > hidden; exec sleep 1000'], {})\n"
        "    os._exit(0)\n"
        "time.sleep(1000)"
    )
    person.json("create", "--name", "box")
    person.json("exec", "box", "--", "sh", "-c", "sleep 2000 & exit 0")
    assert [one["command"] for one in person.json("ps", "box")["processes"]] == ["sleep 2000"]
    started = start(person, "exec", "--json", "--timeout", "5s", "box", "--", person.python, "-I", "-S", "-c", hide)
    assert eventually(lambda: "sleep 1000" in [one["command"] for one in person.json("ps", "box")["processes"]], 5)
    command = json.loads(started.communicate(timeout=60)[0])["command"]
    assert (command["reason"], command["exit_code"]) == ("timeout", 124)
    assert [one["command"] for one in person.json("ps", "box")["processes"]] == ["sleep 2000"], "what was there before stays"


def test_the_shorter_of_two_timeouts_wins(person: Person) -> None:
    person.json("create", "--name", "box", "--timeout", "500ms")
    for options in ([], ["--timeout", "1h"]):
        command = person.json("exec", *options, "box", "--", "sleep", "60")["command"]
        assert (command["reason"], command["exit_code"]) == ("timeout", 124), options
    person.json("create", "--name", "patient", "--timeout", "1h")
    command = person.json("exec", "--timeout", "500ms", "patient", "--", "sleep", "60")["command"]
    assert (command["reason"], command["exit_code"]) == ("timeout", 124)
    assert inside(person, "echo", "fine")["stdout"] == "fine\n"


def test_the_command_line_is_stronger_than_a_weaker_sources_timeout(person: Person) -> None:
    weak = {**person.environment(), "ELSEWHERE_TIMEOUT": "300ms"}
    for options, reason in (([], "timeout"), (["--timeout", "1h"], "exited"), (["--untrusted", "--timeout", "1h"], "exited")):
        done = person.elsewhere("run", "--json", "--keep", *options, "--", "sleep", "1", env=weak)
        document = json.loads(done.stdout)
        assert document["command"]["reason"] == reason, options
    assert document["sandbox"]["limits"]["timeout"] == 0.3, "it was for this command: what the settings say holds for the next"
    command = person.json("exec", document["sandbox"]["id"], "--", "sleep", "60")["command"]
    assert (command["reason"], command["exit_code"]) == ("timeout", 124)


def test_what_is_over_goes_and_what_it_changed_is_archived(person: Person) -> None:
    changed = person.json("create", "--name", "changed", "--ttl", "1h")["sandbox"]["id"]
    person.json("create", "--name", "idle", "--ttl", "1h")
    person.json("create", "--name", "kept", "--ttl", "1h")
    assert inside(person, "sh", "-c", "echo work > work", box="changed")["exit_code"] == 0
    person.json("keep", "kept")
    for name in ("changed", "idle", "kept"):
        person.json("extend", name, "300ms")
    assert eventually(lambda: [one["name"] for one in person.json("list")["sandboxes"]] == ["kept"])
    assert archived(person) == [changed]
    assert eventually(lambda: person.json("list")["sandboxes"][0]["state"] == "stopped")


def test_a_command_that_runs_when_the_time_is_over(person: Person) -> None:
    person.json("create", "--name", "box", "--ttl", "2s")
    command = inside(person, "sleep", "60")
    assert (command["reason"], command["exit_code"]) == ("expired", 124)
    assert eventually(lambda: person.json("list")["sandboxes"] == [])


def test_an_idle_sandbox_ends_and_a_busy_one_does_not(person: Person) -> None:
    """A command runs longer than the sandbox may be idle; the count begins at its end."""
    box = person.json("create", "--name", "box", "--idle", "700ms")["sandbox"]
    assert box["enforced"]["limits"]["idle"] == "keeper"
    command = inside(person, "sleep", "2")
    assert (command["reason"], command["exit_code"]) == ("exited", 0)
    assert eventually(lambda: person.json("list")["sandboxes"] == [])
    assert archived(person) == []


def test_more_time_is_more_time(person: Person) -> None:
    box = person.json("create", "--name", "box", "--ttl", "1500ms")["sandbox"]
    person.json("extend", "box", "1h")
    over = datetime.fromisoformat(box["expires_at"]).replace(tzinfo=UTC).timestamp() + 0.5
    assert eventually(lambda: time.time() > over)
    assert [one["state"] for one in person.json("list")["sandboxes"]] == ["running"]
    assert inside(person, "echo", "fine")["stdout"] == "fine\n"


def test_whoever_comes_next_ends_what_nobody_could(person: Person) -> None:
    """The keeper was gone when the time was over, as after a reboot."""
    box = person.json("create", "--name", "box", "--ttl", "3s")["sandbox"]["id"]
    assert inside(person, "sh", "-c", "echo work > work")["exit_code"] == 0
    os.kill(record(person)["keeper"][0], signal.SIGKILL)
    assert eventually(lambda: person.json("list")["sandboxes"] == [])
    assert archived(person) == [box]


# -- what was used ---


def test_what_is_used_now_agrees_with_an_independent_reading(person: Person) -> None:
    person.json("create", "--name", "box", *limit(person, memory="256M"))
    line = (
        f"import time\n{BURN.format(wall=0.5)}\nheld = bytearray(b'x') * (40 << 20)\nopen('there', 'w').close()\ntime.sleep(60)"
    )
    person.json("exec", "-d", "box", "--", person.python, "-I", "-S", "-c", line)
    assert (
        inside(person, "sh", "-c", "head -c 5000000 /dev/zero > data; until test -e there; do sleep 0.05; done")["exit_code"] == 0
    )
    told = [
        person.json("top")["sandboxes"][0]["usage"],
        person.json("list")["sandboxes"][0]["usage"],
        person.json("inspect", "box")["sandbox"]["usage"],
    ]
    memory, cpu_ms, processes, disk = reading(person)
    for used in told:
        assert used["processes"] == processes == 1
        assert used["memory_bytes"] == pytest.approx(memory, abs=4 << 20)
        assert used["memory_bytes"] > 40 << 20
        assert used["memory_peak_bytes"] is None or used["memory_peak_bytes"] >= used["memory_bytes"] - (4 << 20)
        assert used["cpu_ms"] == pytest.approx(cpu_ms, abs=100)
        assert used["disk_bytes"] == pytest.approx(disk, abs=1 << 20)
        assert used["disk_bytes"] >= 5_000_000
        assert used["written_bytes"] >= 5_000_000


def reading(person: Person) -> tuple[int, float, int, int]:
    """Memory, processor time, processes and disk of the one sandbox, not asked of its keeper."""
    found = record(person)
    layers = [Path(found_path) for found_path in (person.state / "sandboxes" / found["id"]).glob("upper/*")]
    disk = sum(int(person_du(person, place)) for place in layers)
    if found["group"]:
        version, places = found["group"]
        words = {1: ("memory.usage_in_bytes", "cpuacct", "cpuacct.usage"), 2: ("memory.current", "cpu", "cpu.stat")}[version]
        memory = int(Path(places["memory"], "work", words[0]).read_text())
        cpu = Path(places[words[1]], "work", words[2]).read_text().split()
        cpu_ms = int(cpu[0]) / 1e6 if version == 1 else int(cpu[cpu.index("usage_usec") + 1]) / 1e3
        return memory, cpu_ms, int(Path(places["pids"], "pids.current").read_text()) - 1, disk
    pids = [pid for pid, words in person.processes() if "bytearray" in words]
    memory = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") for pid in pids)
    ticks = sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) for pid in pids)
    return memory, ticks * 1000 / os.sysconf("SC_CLK_TCK"), len(pids), disk


def person_du(person: Person, place: Path) -> str:
    return person.shell("du", "-s", "--block-size=1", place).stdout.split()[0]


def test_what_a_command_used_agrees_with_what_it_saw_itself(person: Person) -> None:
    line = (
        "import resource, time, os, json\n" + BURN.format(wall=0.3) + "\nheld = bytearray(b'x') * (30 << 20)\n"
        "stream = open('data', 'wb'); stream.write(held[:3 << 20]); stream.flush(); os.fsync(stream.fileno())\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\nprint(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss]))"
    )
    document = run(person, *limit(person, memory="256M"), "--", person.python, "-I", "-S", "-c", line, code=0)
    own_cpu, own_peak = json.loads(document["command"]["stdout"])
    used = document["command"]["usage"]
    assert used["user_ms"] + used["system_ms"] == pytest.approx(own_cpu * 1000, abs=100)
    assert used["max_rss_kib"] == pytest.approx(own_peak, abs=4096)
    assert 3 << 20 <= used["written_bytes"] <= 4 << 20
    if "memory" in held(person):
        assert used["cpu_ms"] == pytest.approx(own_cpu * 1000, abs=150)
        assert 30 << 20 <= used["memory_peak_bytes"] <= 60 << 20
        assert used["processes_peak"] == 1
    shown = person.json("create", "--name", "box")
    assert inside(person, "true")["usage"]["written_bytes"] in (0, None), shown
    (request,) = person.json("requests", "box")["requests"]
    assert request["usage"]["max_rss_kib"] > 0


# -- denials ---


def test_a_limit_that_was_reached_is_told_everywhere(person: Person) -> None:
    person.json("create", "--name", "box", *limit(person, pids="20"))
    request = detached(person, "sh", "-c", FORKS)
    expected = {
        "kind": "limit",
        "what": "pids",
        "rule": "pids is limited to 20",
        "how_to_allow": "--pids 1024, or less work at once",
        "count": 1,
        "told_by": "kernel",
        "request": request,
    }
    assert person.json("inspect", "box")["sandbox"]["denials"] == [expected]
    assert person.json("logs", "box", request)["denials"] == [expected]
    words = person.elsewhere("logs", "box", request).stderr.splitlines()
    line = "elsewhere: denied pids: pids is limited to 20 → --pids 1024, or less work at once"
    assert [word for word in words if "denied" in word] == [line]
    person.json("create", "--name", "other", *limit(person, pids="20"))
    done = person.elsewhere("exec", "other", "--", "sh", "-c", FORKS)
    assert (done.returncode, done.stderr.splitlines().count(line)) == (2, 1)
    done = person.elsewhere("run", *limit(person, pids="20"), "-c", FORKS)
    assert (done.returncode, done.stderr.splitlines().count(line)) == (2, 1)


REFUSALS = {
    "mount": ("syscall", "mount", "import ctypes\nctypes.CDLL(None).mount(b'x', b'/mnt', b'tmpfs', 0, None)"),
    "unshare": ("syscall", "unshare", "import ctypes\nctypes.CDLL(None).unshare(0x10000000)"),
    "device": ("device", "mknodat", "import os\nos.mknod('node', 0o20666, os.makedev(1, 3))"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refused_call_is_told_by_the_kernel(person: Person, case: str) -> None:
    kind, what, code = REFUSALS[case]
    person.json("create", "--name", "box")
    (denial,) = inside(person, person.python, "-I", "-c", code)["denials"]
    assert (denial["kind"], denial["told_by"], denial["count"]) == (kind, "kernel", 1)
    assert denial["what"] in (what, "mknod"), denial
    assert denial["rule"]
    assert denial["how_to_allow"]
    request = detached(person, person.python, "-I", "-c", code)
    assert person.json("logs", "box", request)["denials"] == [{**denial, "request": request}]
    assert [one["what"] for one in person.json("inspect", "box")["sandbox"]["denials"]] == [denial["what"]] * 2
    done = person.elsewhere("exec", "box", "--", person.python, "-I", "-c", code)
    assert f"elsewhere: denied {denial['what']}: {denial['rule']}" in done.stderr


def test_a_program_that_cannot_gain_privileges_is_told(person: Person) -> None:
    fake = person.project / "sudo"
    fake.write_text(
        "#!/bin/sh\necho 'sudo: The \"no new privileges\" flag is set, which prevents sudo from running as root.' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    for words in (["--", str(fake), "true"], ["-c", f"{fake} true"]):
        denials = run(person, *words, code=1)["command"]["denials"]
        if person.is_root:
            assert denials == [], "root has them already"
            continue
        (denial,) = denials
        assert (denial["kind"], denial["what"], denial["told_by"]) == ("policy", "sudo", "output")
        assert "no_new_privs" in denial["rule"]
        assert denial["how_to_allow"]


def test_a_hidden_place_that_a_message_names_is_told(person: Person) -> None:
    secret = person.place / "secret"
    secret.mkdir()
    (secret / "key").write_text("s3cret")
    person.own(secret)
    assert run(person, "--", "cat", str(secret / "key"), code=0)["command"]["stdout"] == "s3cret"
    command = run(person, "--hide", str(secret), "--", "cat", str(secret / "key"), code=1)["command"]
    (denial,) = command["denials"]
    assert (denial["kind"], denial["what"], denial["told_by"]) == ("path", str(secret / "key"), "output")
    assert denial["rule"] == f"{secret} is hidden"
    assert "--share" in denial["how_to_allow"]
    done = person.elsewhere("run", "--hide", str(secret), "--hide", "secrte", "--", "true", check=True)
    assert done.stderr.startswith(f"elsewhere: --hide: there is no '{person.project}/secrte', so nothing is hidden there\n")


def test_a_command_without_refusals_has_none(person: Person) -> None:
    assert run(person, "-c", "ls / > /dev/null; cat /no/such/place", code=1)["command"]["denials"] == []


# -- by a program ---


def test_limits_by_a_program(person: Person) -> None:
    """The words are the same as on the command line; what is asked for binds unless best effort is asked for, too."""
    code = f"""
import json
from elsewhere import ElsewhereError, Limits, Sandbox
told = {{}}
for name in ("memory", "disk", "cpus"):
    try:
        with Sandbox.create(limits=Limits(**{{name: "20M" if name != "cpus" else 0.5}})):
            told[name] = "made"
    except ElsewhereError as error:
        told[name] = error.code
limits = Limits(memory="64M", pids=20, disk="20M", open_files=64, timeout="1s")
with Sandbox.create(limits=limits, best_effort=True) as box:
    for name, words in {{
        "ended by memory": [{person.python!r}, "-I", "-S", "-c", "held = bytearray(b'x') * (200 << 20); import time; time.sleep(20)"],
        "ended by pids": ["sh", "-c", {FORKS!r}],
        "ended by disk": ["sh", "-c", "head -c 60000000 /dev/zero > big || exit 6"],
        "open files": ["sh", "-c", "ulimit -n"],
        "ended by time": ["sleep", "60"],
    }}.items():
        result = box.run(words)
        told[name] = [result.exit_code, result.reason, [one.what for one in result.denials], result.stdout]
        box.run(["sh", "-c", "kill -9 -1"])
        box.run(["rm", "-f", "big"])
try:
    Limits(memory="plenty")
except ElsewhereError as error:
    told["nonsense"] = [error.code, "plenty" in error.message]
print(json.dumps(told))
"""
    told = json.loads(person.sdk(code).stdout)
    for name in ("memory", "disk", "cpus"):
        assert told[name] == ("made" if name in held(person) else "limit_not_enforceable"), name
    assert told["ended by memory"] == [137, "memory", ["memory"], ""]
    assert told["ended by pids"][:3] == [2, "pids", ["pids"]]
    assert told["ended by disk"][:3] == [6, "disk", ["disk"]]
    assert told["open files"][3] == "64\n"
    assert told["ended by time"][:2] == [124, "timeout"]
    assert told["nonsense"] == ["bad_limit", True]


# -- nonsense ---

NONSENSE = {
    "--memory": ["plenty", "0", "-1G", "1M", "101%", "0%", "nan", "1e99"],
    "--cpus": ["many", "0", "-1", "nan", "inf", "100000"],
    "--pids": ["some", "0", "-5", "1.5", "99999999999"],
    "--disk": ["big", "0", "-1", "1k", "9999999999T"],
    "--open-files": ["none", "0", "3", "1.5"],
    "--timeout": ["soon", "0", "-1s", "nan"],
    "--ttl": ["later", "0", "-1s"],
    "--idle": ["never", "0", "-1s"],
    "--view": ["everything", ""],
    "--network": ["lan"],
    "--backend": ["magic"],
}


@pytest.mark.parametrize("option", NONSENSE)
def test_nonsense_is_named_and_nothing_is_made(person: Person, option: str) -> None:
    verbs = ("create",) if option in ("--ttl", "--idle") else ("create", "run")
    for verb in verbs:
        for value in NONSENSE[option]:
            done = person.elsewhere(verb, "--json", f"{option}={value}", *(("--", "true") if verb == "run" else ()))
            assert done.returncode == 2, (verb, option, value, done.stdout, done.stderr)
            assert repr(value) in json.loads(done.stdout)["error"]["message"], (verb, option, value, done.stdout)
    assert person.json("list")["sandboxes"] == []


def test_a_detached_command_is_limited_as_well(person: Person) -> None:
    """Nobody waits for it; its end is written down with the same reason."""
    person.json("create", "--name", "box", *limit(person, memory="64M"))
    request = detached(person, *hog(person))
    (end,) = [one for one in person.json("requests", "box")["requests"] if one["id"] == request]
    assert (end["reason"], end["exit_code"]) == ("memory", 137)
    assert [one["what"] for one in person.json("logs", "box", request)["denials"]] == ["memory"]


def test_a_waited_for_command_of_a_sandbox_that_expires(person: Person) -> None:
    person.json("create", "--name", "box", "--idle", "1h", "--ttl", "1h")
    waiting = start(person, "exec", "--json", "box", "--", "sleep", "60")
    assert eventually(lambda: person.json("ps", "box")["processes"])
    person.json("extend", "box", "100ms")
    out, _ = waiting.communicate(timeout=30)
    command = json.loads(out)["command"]
    assert (waiting.returncode, command["reason"], command["exit_code"]) == (124, "expired", 124)
