"""What can go wrong, going wrong: bad projects, bad commands, dead processes, full disks. Clear words, nothing left behind."""

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import Person, about_process, eventually, session_of, tree

pytestmark = pytest.mark.one_launcher


def error_of(person: Person, *arguments: str, code: int, **more: object) -> dict[str, str]:
    """The one error document of a verb that fails; its words are on stderr, too, with the next step."""
    done = person.elsewhere(arguments[0], "--json", *arguments[1:], **more)
    assert done.returncode == code, (done.stdout, done.stderr)
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"code", "message", "detail", "hint"}
    assert done.stderr.startswith("elsewhere: ")
    return error


# -- projects ---


@pytest.mark.parametrize(
    ("project", "code", "exit_code"),
    [
        ("missing", "project_not_found", 125),
        ("project/README.md", "project_not_directory", 2),
        ("/", "project_is_root", 125),
        ("home", "project_is_home", 125),
        ("loop", "project_unreachable", 125),
    ],
)
def test_a_project_that_cannot_be_one(person: Person, project: str, code: str, exit_code: int) -> None:
    person.shell("ln", "-s", "loop", "loop")
    error = error_of(person, "run", "--project", project, "--", "true", code=exit_code, cwd=person.place)
    assert error["code"] == code
    assert project.strip("/") in error["message"] or project == "/"


def test_a_project_that_may_not_be_read(user: Person) -> None:
    closed = user.place / "closed"
    closed.mkdir(mode=0o000)
    assert error_of(user, "run", "--project", "closed", "--", "true", code=125, cwd=user.place)["code"] == "project_unreadable"


@pytest.mark.parametrize("name", [b"with\nnewline", b"not-utf8-\xff\xfe", b"comma,colon:back\\slash", b"x" * 200])
def test_names_that_are_hard_to_write(person: Person, name: bytes) -> None:
    project = Path(os.fsdecode(os.path.join(os.fsencode(person.place), name)))
    project.mkdir()
    (project / "kept").write_text("kept")
    person.own(project)
    done = person.elsewhere("run", "--json", "--", "sh", "-c", "cat kept; pwd; : > new; rm kept", cwd=project)
    document = json.loads(done.stdout)
    assert document["command"]["exit_code"] == 0, document
    assert document["command"]["stdout"].startswith("kept")
    assert document["changes"] == {"added": ["new"], "modified": [], "deleted": ["kept"]}
    assert (project / "kept").exists()


def test_a_changed_name_that_is_not_utf8_comes_with_its_bytes(person: Person) -> None:
    document = person.json("run", "--", "sh", "-c", "touch $(printf 'a\\377b')")
    assert document["changes"]["added"] == [{"path": "a�b", "path_b64": "Yf9i"}]


def test_a_directory_that_is_gone(person: Person) -> None:
    gone = person.place / "gone"
    done = person.shell(
        "sh", "-c", f"mkdir {gone}; cd {gone}; rmdir {gone}; exec {person.python} -m elsewhere run -- true", check=False
    )
    assert done.returncode == 125
    assert "does not exist" in done.stderr
    line = f"mkdir {gone}; cd {gone}; rmdir {gone}; exec {person.python} -m elsewhere list --json"
    done = person.shell("sh", "-c", line, check=False)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (1, "system_error")


@pytest.mark.parametrize(("words", "code"), [("list", 1), ("list --json", 1), ("--version", 1), ("run --json -- true", 125)])
def test_output_that_cannot_be_written(person: Person, words: str, code: int) -> None:
    with open("/dev/full", "w") as full:
        done = person.elsewhere(*words.split(), stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (code, "elsewhere: standard output cannot be written: No space left on device\n")


# -- commands ---


def test_a_command_that_is_not_there(person: Person) -> None:
    error = error_of(person, "run", "--", "no-such-command", code=127)
    assert error["code"] == "command_not_found"
    assert "no-such-command" in error["message"]
    assert person.json("list")["total"] == 0


def test_a_command_that_is_not_executable(person: Person) -> None:
    error = error_of(person, "run", "--", "./README.md", code=126)
    assert error["code"] == "command_not_executable"


def test_a_script_without_a_first_line_runs_as_in_a_shell(person: Person) -> None:
    document = person.json("run", "--", "sh", "-c", "printf 'echo from a script' > s; chmod +x s; exec ./s")
    assert document["command"]["stdout"] == "from a script\n"


@pytest.mark.parametrize(
    ("line", "code", "reason"), [("kill -9 $$", 137, "signaled"), ("kill $$", 143, "signaled"), ("exit 255", 255, "exited")]
)
def test_the_exit_code_is_the_commands_own(person: Person, line: str, code: int, reason: str) -> None:
    done = person.elsewhere("run", "--json", "-c", line)
    document = json.loads(done.stdout)
    assert (done.returncode, document["command"]["exit_code"], document["command"]["reason"]) == (code, code, reason)


def test_arguments_arrive_as_they_are(person: Person) -> None:
    odd = ["two words", "", "'quotes\"", "$HOME", "*", "back\\slash", "new\nline", "--json", "--"]
    done = person.elsewhere("run", "--", person.python, "-c", "import sys; print(sys.argv[1:])", *odd)
    assert done.stdout == f"{odd}\n"


@pytest.mark.slow
def test_gigabytes_of_output_are_capped_and_said_so(person: Person) -> None:
    document = person.json("run", "-c", "head -c 1500000000 /dev/zero | tr '\\0' 'x'; echo err >&2")
    command = document["command"]
    assert command["exit_code"] == 0
    assert command["stdout_truncated"] is True
    assert len(command["stdout"]) == 16 << 20
    assert (command["stderr"], command["stderr_truncated"]) == ("err\n", False)


@pytest.mark.slow
def test_gigabytes_of_output_go_straight_through(person: Person) -> None:
    line = shlex.join(person.command("run", "-c", "head -c 1500000000 /dev/zero")) + " | wc -c"
    assert person.shell("sh", "-c", line, cwd=person.project).stdout.strip() == "1500000000"


def test_a_child_that_holds_the_output_does_not_hold_the_document(person: Person) -> None:
    began = time.monotonic()
    document = person.json("run", "--", "sh", "-c", "(sleep 60; echo late) & echo early")
    assert document["command"]["stdout"] == "early\n"
    assert time.monotonic() - began < 30


def test_a_time_out_takes_the_whole_tree(person: Person) -> None:
    """TERM is ignored by all of them, one has its own session: all are gone, and the reason is told."""
    line = "trap '' TERM; setsid sh -c \"trap '' TERM; sleep 77\" & (trap '' TERM; sleep 77) & sleep 77"
    done = person.elsewhere("run", "--json", "--timeout", "300ms", "-c", line)
    command = json.loads(done.stdout)["command"]
    assert (done.returncode, command["exit_code"], command["reason"]) == (124, 124, "timeout")
    assert not [words for _, words in person.processes() if "sleep 77" in words]


def test_a_time_out_is_kind_first(person: Person) -> None:
    document = person.json("run", "--timeout", "300ms", "-c", "trap 'echo bye; exit 3' TERM; while :; do sleep 0.05; done")
    assert document["command"]["stdout"] == "bye\n"
    assert document["command"]["reason"] == "timeout"


def test_input_is_passed_through(person: Person) -> None:
    assert person.elsewhere("run", "--", "cat", input="from outside\n").stdout == "from outside\n"
    assert person.json("run", "--", "cat", input="from outside\n")["command"]["stdout"] == "from outside\n"


# -- signals and deaths ---


def start(person: Person, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        person.command(*arguments),
        cwd=person.project,
        env=person.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **person.identity(),
    )


def wait_for_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_command_and_not_the_cleaning_up(person: Person, number: int, code: int) -> None:
    process = start(person, "run", "--", "sh", "-c", ": > made; echo there; exec sleep 60")
    assert wait_for_line(process) == "there\n"
    process.send_signal(number)
    assert finish(process)[0] == code
    found = person.json("list")
    assert [box["state"] for box in found["sandboxes"]] == ["stopped"]
    assert not [words for _, words in person.processes() if "sleep 60" in words]


def test_nohup_keeps_a_command(person: Person) -> None:
    line = "trap '' HUP; exec " + shlex.join(person.command("run", "--", "sh", "-c", "echo there; exec sleep 60"))
    process = subprocess.Popen(
        ["sh", "-c", line],
        cwd=person.project,
        env=person.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **person.identity(),
    )
    assert wait_for_line(process) == "there\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143


def test_a_command_that_handles_a_signal_decides_itself(person: Person) -> None:
    process = start(person, "run", "--", "sh", "-c", "trap 'echo caught; exit 9' INT; echo there; while :; do sleep 0.05; done")
    assert wait_for_line(process) == "there\n"
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    assert (code, out) == (9, "caught\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_what_would_go_on(person: Person, number: int, code: int) -> None:
    person.json("create", "--name", "box")
    person.json("exec", "-d", "box", "--", "sh", "-c", "echo there; exec sleep 60")
    process = start(person, "logs", "-f", "box")
    assert wait_for_line(process) == "there\n"
    process.send_signal(number)
    assert finish(process) == (code, "", "")
    assert eventually(lambda: not busy_fronts(person))


def busy_fronts(person: Person) -> list[int]:
    """Those that write to somebody: standard output of one that waits is the launcher's log."""
    fronts = [pid for pid, words in person.processes() if "elsewhere.cli.launch" in words]
    return [pid for pid in fronts if os.readlink(f"/proc/{pid}/fd/1").startswith("pipe:")]


def test_a_promotion_that_is_interrupted_is_all_there_or_not_at_all(user: Person) -> None:
    before = contents(user)
    user.json("create", "--name", "box")
    user.elsewhere("exec", "box", "-c", "mkdir new; cd new; seq 3000 | xargs touch", check=True)
    process = start(user, "promote", "box")
    assert eventually((user.project / "new").exists)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    (told,) = user.json("promotions")["promotions"]
    assert (told["status"], contents(user)) == ("reversed", before)


def contents(person: Person) -> dict[str, bytes | None]:
    return {path: content for path, (*_, content) in tree(person.project).items()}


def test_the_caller_killed(person: Person) -> None:
    """kill -9 of the command itself: the work inside ends, what it wrote is kept and said to be lost."""
    process = start(person, "run", "--", "sh", "-c", ": > made; echo there; exec sleep 61")
    assert wait_for_line(process) == "there\n"
    process.kill()
    finish(process)
    assert eventually(lambda: not [words for _, words in person.processes() if "sleep 61" in words])
    assert eventually(lambda: [box["state"] for box in person.json("list")["sandboxes"]] == ["stopped"])
    (box,) = person.json("list")["sandboxes"]
    assert box["lost"] is True
    assert person.json("diff", box["id"])["changes"]["added"] == ["made"]


def test_the_caller_killed_with_nothing_written(person: Person) -> None:
    process = start(person, "run", "--", "sh", "-c", "echo there; exec sleep 62")
    wait_for_line(process)
    process.kill()
    finish(process)
    assert eventually(lambda: person.json("list")["total"] == 0)
    assert eventually(lambda: not [words for _, words in person.processes() if "sleep 62" in words])


def keepers(person: Person) -> list[int]:
    """Processes that are pid 1 of a process namespace of their own and have a child."""
    found = []
    for pid, _ in person.processes():
        try:
            status = about_process(pid, "status")
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        except OSError:
            continue
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
        if len(numbers) > 1 and numbers[-1] == "1" and children.strip():
            found.append(pid)
    return found


def test_the_keeper_killed(person: Person) -> None:
    if os.geteuid() != 0:
        pytest.skip("a keeper hides from its own user: only root finds it")
    process = start(person, "run", "--", "sh", "-c", ": > made; echo there; exec sleep 63")
    wait_for_line(process)
    (asleep,) = [pid for pid, words in person.commands() if words.startswith("sleep 63")]
    (keeper,) = [pid for pid in keepers(person) if str(asleep) in about_process(pid, f"task/{pid}/children").split()]
    os.kill(keeper, signal.SIGKILL)
    code, _, errors = finish(process)
    assert code == 125
    assert "unexpectedly" in errors
    assert not [words for _, words in person.processes() if "sleep 63" in words]


def launchers(person: Person) -> list[int]:
    return [pid for pid, words in person.processes() if "elsewhere.cli.launch" in words and session_of(pid) == pid]


@pytest.mark.own_launcher
def test_the_launcher_killed(person: Person) -> None:
    """A command that runs is not disturbed, and the next one starts a new launcher."""
    process = start(person, "run", "--", "sh", "-c", ": > made; echo there; read line; sleep 0.5")
    wait_for_line(process)
    (launcher,) = launchers(person)
    os.kill(launcher, signal.SIGKILL)
    code, _, errors = finish(process)
    assert code == 0, errors
    assert person.elsewhere("run", "--", "true").returncode == 0
    assert all(box["state"] == "stopped" for box in person.json("list")["sandboxes"])
    assert not list((person.state / "spare").glob(f"{launcher}-*"))


# -- the state directory ---


@pytest.mark.own_launcher
def test_a_state_directory_of_somebody_else(user: Person) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make one")
    os.chown(user.state, 0, 0)
    error = error_of(user, "run", "--", "true", code=125)
    assert error["code"] in ("state_not_ours", "state_unusable")
    assert "ELSEWHERE_HOME" in error["hint"]
    os.chown(user.state, user.uid, user.uid)


def test_a_state_directory_that_cannot_be_written(person: Person) -> None:
    person.extra["ELSEWHERE_HOME"] = "/proc/elsewhere"
    error = error_of(person, "run", "--", "true", code=125)
    assert error["code"] == "state_unusable"
    assert "/proc/elsewhere" in error["message"]
    assert "ELSEWHERE_HOME" in error["hint"]


@pytest.mark.own_launcher
def test_a_layout_from_the_future(person: Person) -> None:
    (person.state / "schema").write_text("99\n")
    person.own(person.state)
    assert error_of(person, "list", code=1)["code"] == "state_too_new"


@pytest.mark.parametrize("name", ["s" * 150, "with space, comma:colon"])
def test_a_state_directory_with_a_hard_name(person: Person, name: str) -> None:
    """Longer than a socket's path may be; with what separates mount options."""
    place = person.place / name
    place.mkdir()
    person.own(place)
    person.extra["ELSEWHERE_HOME"] = str(place)
    try:
        assert person.json("run", "-c", "echo hi > new")["changes"]["added"] == ["new"]
    finally:
        person.shell(
            person.python,
            "-c",
            "from elsewhere.sandbox.launching.engine import connect, socket_name\nfrom elsewhere.sandbox.keeping import wire\n"
            f"sock = connect({str(place)!r}, socket_name())\nwire.send(sock, ('stop',)); wire.receive(sock)",
        )
        assert eventually(lambda: not launchers_of(str(place)))


def launchers_of(state: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if f"ELSEWHERE_HOME={state}\0".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(entry)
            except OSError:
                continue
    return [pid for pid in found if int(pid) != os.getpid()]


# -- many ---


@pytest.mark.own_launcher
@pytest.mark.slow
def test_two_hundred_runs_leave_nothing(person: Person) -> None:
    """No mount, process, descriptor or directory more than after the first."""
    before = tree(person.project)
    code = """
import os, subprocess, sys, time
from pathlib import Path
from elsewhere import Sandbox
def launcher():
    for p in os.listdir('/proc'):
        try:
            if f"ELSEWHERE_HOME={os.environ['ELSEWHERE_HOME']}".encode() in Path(f'/proc/{p}/environ').read_bytes():
                if Path(f'/proc/{p}/stat').read_text().split()[5] == p and 'launch' in Path(f'/proc/{p}/cmdline').read_text():
                    return p
        except OSError:
            continue
def look():
    return len(os.listdir('/proc/self/fd')), len(os.listdir(f'/proc/{launcher()}/fd'))
def settled():  # what is made ahead of time comes and goes
    seen = None
    for _ in range(100):
        now = look()
        if now == seen:
            return now
        seen = now
        time.sleep(0.5)
    raise AssertionError(f'it never comes to rest: {seen}')
def once(n):
    with Sandbox.create() as box:
        assert box.run(f'echo {n} > file; sleep 100 & echo out').stdout == 'out\\n'
for n in range(10):
    once(n)
first = settled()
for n in range(190):
    once(n)
last = settled()
assert last[0] <= first[0], (first, last)
assert last[1] <= first[1] + 4, (first, last)
"""
    person.sdk(code)
    assert person.json("list")["total"] == 0
    assert not [words for _, words in person.processes() if "sleep 100" in words]
    assert eventually(lambda: not list((person.state / "trash").iterdir()))
    assert len(list((person.state / "spare").iterdir())) <= 4
    assert tree(person.project) == before
