"""What `enforced` claims is what happens: on hosts that lack a mechanism, really, and for settings that nobody chose."""

import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_ladder import Elsewhere, needs_root

from conftest import Person
from limited import leaves_nothing

NO_CGROUPS = ("--tmpfs", "/sys/fs/cgroup")
ASKED = {"memory": "64M", "cpus": "0.5", "pids": "64", "disk": "20M"}
CAPABILITIES = {
    "chown": 0,
    "dac_override": 1,
    "dac_read_search": 2,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "net_bind_service": 10,
    "sys_chroot": 18,
    "mknod": 27,
    "audit_write": 29,
    "setfcap": 31,
}


@pytest.fixture(autouse=True)
def all_is_cleared_away(person: Person) -> Iterator[None]:
    yield
    person.extra.clear()
    leaves_nothing(person)


# -- hosts without a mechanism ---


def host(person: Person, lacking: str) -> Elsewhere:
    needs_root()
    if lacking == "cgroups":
        return Elsewhere(person, *NO_CGROUPS)
    if not person.is_root:
        pytest.skip("an ordinary user has no images anyway")
    nothing = person.place / "nothing"
    nothing.touch(mode=0o644)
    covered = "/dev/loop-control" if lacking == "loop" else shutil.which("mkfs.ext4", path="/usr/sbin:/sbin")
    if covered is None or not os.path.exists(covered):
        pytest.skip(f"this host has no {lacking} anyway")
    return Elsewhere(person, "--bind", f"{nothing}:{os.path.realpath(covered)}")


def open_place(person: Person) -> Path:
    """Where whatever ran leaves a trace in reality."""
    place = person.place / "open"
    if not place.exists():
        place.mkdir()
        person.own(place)
    return place


@pytest.mark.parametrize(
    ("lacking", "name"),
    [
        ("cgroups", "memory"),
        pytest.param("cgroups", "cpus", marks=pytest.mark.slow),
        ("loop", "disk"),
        pytest.param("mkfs", "disk", marks=pytest.mark.slow),
    ],
)
def test_what_was_asked_for_is_refused_and_nothing_runs(person: Person, lacking: str, name: str) -> None:
    elsewhere, place = host(person, lacking), open_place(person)
    option = (f"--{name}", ASKED[name])
    share = ("--share", f"{place}:rw")
    for verb in (["run", "--json", *option, *share, "--", "touch", f"{place}/ran"], ["create", "--json", *option, *share]):
        code, document, errors = elsewhere(*verb)
        assert code == (125 if verb[0] == "run" else 1), errors
        error = document["error"]
        assert error["code"] == "limit_not_enforceable", error
        assert (list(error["detail"]["limits"]), name in error["message"]) == ([name], True)
        assert "--best-effort" in error["hint"]
        assert error["message"] in errors
    assert list(place.iterdir()) == []
    assert elsewhere("list", "--json")[1]["sandboxes"] == []
    # Without it the same line does leave its trace.
    code, document, errors = elsewhere("run", "--json", *option, *share, "--best-effort", "--", "touch", f"{place}/ran")
    assert code == 0, errors
    assert [path.name for path in place.iterdir()] == ["ran"]
    assert f"elsewhere: best effort: {name}: not enforced" in errors
    assert document["sandbox"]["enforced"]["limits"][name].startswith("not enforced")
    assert document["sandbox"]["limits"][name] > 0


def test_processes_are_held_by_something_else_or_refused(person: Person) -> None:
    """Without groups: an ordinary user's by a limit of their own namespace, root's by nothing."""
    elsewhere, place = host(person, "cgroups"), open_place(person)
    line = "for i in $(seq 80); do sleep 20 & done; exit 0"
    code, document, _ = elsewhere("run", "--json", "--pids", "32", "--share", f"{place}:rw", "-c", f"touch {place}/ran; {line}")
    if person.is_root:
        assert (code, document["error"]["code"]) == (125, "limit_not_enforceable")
        assert list(place.iterdir()) == []
    else:
        assert (code, document["command"]["reason"]) == (2, "pids")
        assert document["sandbox"]["enforced"]["limits"]["pids"].startswith("rlimit")


@pytest.mark.parametrize("source", ["environment", "project", "user"])
def test_it_binds_wherever_it_was_asked_for(person: Person, source: str) -> None:
    elsewhere, place = host(person, "cgroups"), open_place(person)
    if source == "environment":
        person.extra["ELSEWHERE_MEMORY"] = "64M"
    elif source == "project":
        (person.project / "elsewhere.toml").write_text('[limits]\nmemory = "64M"\n')
    else:
        (person.home / ".config" / "elsewhere").mkdir(parents=True)
        (person.home / ".config" / "elsewhere" / "elsewhere.toml").write_text('[limits]\nmemory = "64M"\n')
        person.own(person.home)
    code, document, _ = elsewhere("run", "--json", "--share", f"{place}:rw", "--", "touch", f"{place}/ran")
    assert (code, document["error"]["code"]) == (125, "limit_not_enforceable"), document
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("lacking", ["cgroups", "loop", "mkfs"])
def test_defaults_run_and_say_what_does_not_hold(person: Person, lacking: str) -> None:
    code, document, errors = host(person, lacking)("run", "--json", "--", "true")
    assert code == 0, errors
    limits = document["sandbox"]["enforced"]["limits"]
    assert set(limits) == {"memory", "pids", "disk"}
    loose = {name for name, words in limits.items() if words.startswith("not enforced")}
    without_groups = {"memory", "pids"} if person.is_root else {"memory"}
    assert loose == {"disk"} | (without_groups if lacking == "cgroups" else set()), limits


def test_a_program_is_refused_as_well(person: Person) -> None:
    elsewhere = host(person, "cgroups")
    code = (
        "from elsewhere import ElsewhereError, Limits, Sandbox\n"
        "try:\n    Sandbox.create(limits=Limits(memory='64M'))\n"
        "except ElsewhereError as error: print(error.code)"
    )
    done = elsewhere.script(f'{person.python} -c "{code}"; e list --json')
    first, second = done.stdout.splitlines()
    assert first == "limit_not_enforceable", done.stderr
    assert json.loads(second)["sandboxes"] == []


# -- settings that nobody chose ---

PROBE = """
import ctypes, json, os, resource, signal, socket, sys, time

want = json.loads(sys.argv[1])
found = {}


def attempt(action):
    try:
        return [True, action()]
    except OSError as error:
        return [False, error.errno]


def content(path):
    with open(path) as stream:
        return stream.read()


def written(path):
    with open(path, "w") as stream:
        stream.write("x")


def nested():
    pid = os.fork()
    if not pid:
        os._exit(0 if ctypes.CDLL(None).unshare(0x10000000) == 0 else 1)
    return os.waitpid(pid, 0)[1] == 0


def forks():
    children = []
    try:
        for _ in range(want["forks"]):
            pid = os.fork()
            if not pid:
                time.sleep(60)
                os._exit(0)
            children.append(pid)
    except OSError:
        pass
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(children)


def hog():
    pid = os.fork()
    if not pid:
        held = bytearray(b"x") * want["hog"]
        os._exit(len(held) == 0)
    return os.waitpid(pid, 0)[1]


def fill():
    fd = os.open("fill", os.O_WRONLY | os.O_CREAT)
    try:
        for _ in range(want["fill"]):
            if os.write(fd, bytes(1 << 20)) < 1 << 20:
                raise OSError(28, "in part")
    finally:
        os.close(fd)
        os.unlink("fill")


def call():
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(5)
        caller.connect("\\0" + want["abstract"])


found["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
found["interfaces"] = sorted(line.split(":")[0].strip() for line in content("/proc/net/dev").splitlines()[2:])
found["sibling"] = attempt(lambda: content(want["sibling"]))
found["hidden"] = attempt(lambda: content(want["hidden"]))
found["given"] = attempt(lambda: content(want["given"]))
found["wrote"] = attempt(lambda: written(want["trace"]))
found["abstract"] = attempt(call)[0]
found["nested"] = nested()
status = dict(line.split(":", 1) for line in content("/proc/self/status").splitlines())
found["no_new_privileges"] = status["NoNewPrivs"].strip() == "1"
found["powers"] = int(status["CapBnd"].strip(), 16)
if want["forks"]:
    found["forks"] = forks()
if want["fill"]:
    found["fill"] = attempt(fill)[0]
if want["hog"]:
    found["hog"] = hog()
print(json.dumps(found))
"""


def random_settings(dice: random.Random) -> dict[str, Any]:
    return {
        "memory": dice.choice([None, None, "64M", "96M"]),
        "pids": dice.choice([None, "24", "40"]),
        "cpus": dice.choice([None, None, "0.5", "1"]),
        "disk": dice.choice([None, None, "20M"]),
        "open-files": dice.choice([None, "64", "300"]),
        "view": dice.choice([None, "machine", "project"]),
        "network": dice.choice([None, "allow", "host", "none"]),
        "share": dice.choice([None, "ro", "rw", "rw"]),
        "nested": dice.random() < 0.3,
        "hide": dice.random() < 0.6,
        "untrusted": dice.random() < 0.15,
        "best-effort": dice.random() < 0.6,
    }


def check(person: Person, settings: dict[str, Any], name: str) -> bool:
    """One sandbox with these settings is what it says it is. Whether it ran."""
    place = open_place(person)
    for path, text in (("sibling", "beside"), ("secret", "hidden"), ("open/given", "given")):
        (person.place / path).parent.mkdir(exist_ok=True)
        if not (person.place / path).exists():
            (person.place / path).write_text(text)
    trace = place / "trace"
    trace.unlink(missing_ok=True)
    options = [word for key in ("memory", "pids", "cpus", "disk", "open-files", "view", "network") if settings[key]
               for word in (f"--{key}", settings[key])]  # fmt: skip
    options += [f"--{key}" for key in ("nested", "untrusted", "best-effort") if settings[key]]
    options += ["--hide", str(person.place / "secret")] if settings["hide"] else []
    options += ["--share", f"{place}{':rw' if settings['share'] == 'rw' else ''}"] if settings["share"] else []
    claimed = person.json("run", "--discard", *options, "--", "true")
    if "error" in claimed:
        assert claimed["error"]["code"] == "limit_not_enforceable", claimed
        assert not settings["best-effort"]
        refused = set(claimed["error"]["detail"]["limits"])
        assert refused <= {key for key in ASKED if settings[key]}
        loose = person.json("run", "--discard", "--best-effort", *options, "--", "true")["sandbox"]["enforced"]["limits"]
        assert refused == {key for key in ASKED if settings[key] and loose[key].startswith("not enforced")}
        return False
    limits = {key: words for key, words in claimed["sandbox"]["enforced"]["limits"].items() if not words.startswith("not enf")}
    amounts = claimed["sandbox"]["limits"]
    small = {"memory": amounts["memory"] <= 128 << 20, "pids": amounts["pids"] <= 64, "disk": amounts["disk"] <= 64 << 20}
    want = {
        "sibling": str(person.place / "sibling"),
        "hidden": str(person.place / "secret"),
        "given": str(place / "given"),
        "trace": str(trace),
        "abstract": name,
        "forks": amounts["pids"] + 10 if "pids" in limits and small["pids"] else 0,
        "hog": amounts["memory"] + (32 << 20) if "memory" in limits and small["memory"] else 0,
        "fill": 30 if "disk" in limits and small["disk"] else 0,
    }
    document = person.json("run", "--discard", *options, "--", person.python, "-I", "-S", "-c", PROBE, json.dumps(want))
    assert document["sandbox"]["enforced"] == claimed["sandbox"]["enforced"], "the same settings, the same claims"
    assert document["command"]["exit_code"] == 0, document["command"]
    agree(person, settings, document, json.loads(document["command"]["stdout"]), want, trace)
    return True


def agree(
    person: Person, settings: dict[str, Any], document: dict[str, Any], found: dict[str, Any], want: dict[str, Any], trace: Path
) -> None:
    sandbox, enforced = document["sandbox"], document["sandbox"]["enforced"]
    limits, amounts = enforced["limits"], document["sandbox"]["limits"]
    for key in ("memory", "pids", "cpus", "disk"):
        assert (key in amounts) == (key in limits)
    if "open_files" in limits:
        assert found["files"] == amounts["open_files"]
    if want["forks"]:
        assert found["forks"] == amounts["pids"] - 1, "itself and so many others"
    if want["hog"]:
        assert (found["hog"], document["command"]["reason"]) == (9, "memory")
    if want["fill"]:
        assert found["fill"] is False
    everything = sorted(line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    assert found["interfaces"] == (["lo"] if "own network namespace" in enforced["network"] else everything)
    assert ("own network namespace" in enforced["network"]) == (sandbox["network"] != "host")
    assert found["abstract"] == (not enforced["abstract_sockets"].startswith("unreachable")), enforced["abstract_sockets"]
    assert found["sibling"][0] == (enforced["view"] == "machine")
    assert enforced["view"] == sandbox["view"] == (settings["view"] or ("project" if settings["untrusted"] else "machine"))
    hidden = str(person.place / "secret") in enforced["hidden"]
    assert hidden == settings["hide"] or enforced["view"] == "project"
    assert found["hidden"][0] == (not hidden and enforced["view"] == "machine")
    assert found["nested"] == settings["nested"]
    assert enforced["nested"].startswith("no namespaces") != settings["nested"]
    assert found["given"][0] == (bool(settings["share"]) or enforced["view"] == "machine")
    assert trace.exists() == (settings["share"] == "rw"), "reality is written to by way of a writable share only"
    assert found["no_new_privileges"] is enforced["no_new_privileges"] is True
    assert found["powers"] == sum(1 << CAPABILITIES[power] for power in enforced["capabilities"])


@pytest.fixture
def listener() -> Iterator[str]:
    """An abstract socket of the host."""
    name = f"elsewhere-enforced-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"\0{name}")
        sock.listen(64)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(f"\0{name}")
        yield name


def try_many(person: Person, listener: str, seeds: range) -> None:
    ran = 0
    for seed in seeds:
        settings = random_settings(random.Random(seed))
        try:
            ran += check(person, settings, listener)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {settings}\n{error}") from error
    assert ran >= len(seeds) // 4, "most were refused"


@pytest.mark.slow
def test_what_is_claimed_is_what_happens(person: Person, listener: str) -> None:
    try_many(person, listener, range(25))


@pytest.mark.slow(40)
@pytest.mark.timeout(600)
def test_what_is_claimed_is_what_happens_for_many(person: Person, listener: str) -> None:
    try_many(person, listener, range(1000, 1100))
