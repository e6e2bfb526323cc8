"""Groups really limit, count and go away; and whoever keeps one is spared. On version 1 and 2, whichever this host has."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elsewhere.linux import capabilities, cgroups
from elsewhere.linux.cgroups import Group, Host
from elsewhere.linux.gauges import Gauges, keeper_place, work_place

MIB = 1 << 20
PYTHON = os.path.realpath(sys.executable)
# Not endless: where no limit holds it must not take the machine's memory.
MEMORY_BOMB = "hoard = []\nfor _ in range(256): hoard.append(b'x' * (1 << 20))"
FORK_BOMB = """
import os, signal
children = []
try:
    while len(children) < 50:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        children.append(pid)
except BlockingIOError:
    pass
print(len(children), flush=True)
input()
for pid in children:
    os.kill(pid, signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def host() -> Host:
    found = cgroups.look()
    if found.version == 0:
        pytest.skip(f"no group can be made here: {found.missing}")
    return found


@pytest.fixture
def apart(host: Host) -> Iterator[Host]:
    """The same, with bases that nobody else uses: sandboxes of others must not be swept by a test."""
    bases = {controller: os.path.join(base, f"apart-{os.urandom(6).hex()}") for controller, base in host.bases.items()}
    if host.version == 2:
        bases = dict.fromkeys(bases, next(iter(bases.values())))
    for base in sorted(set(bases.values())):
        os.mkdir(base)
        if host.version == 2:
            Path(base, "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in host.controllers()))
    try:
        yield Host(host.version, bases)
    finally:
        for base in sorted(set(bases.values())):
            os.rmdir(base)


@pytest.fixture
def name() -> str:
    return f"test-{os.urandom(6).hex()}"


@pytest.fixture
def group(host: Host, name: str) -> Iterator[Group]:
    made = cgroups.make(host, name)
    try:
        yield made
    finally:
        for pid in members(made):
            os.kill(pid, signal.SIGKILL)
        assert cgroups.remove(made), f"still there: {directories(made)}, with {members(made)}"
        assert not directories(made)


def directories(group: Group) -> list[str]:
    every = {*group.directories.values(), *keeper_place(group), *work_place(group)}
    return sorted(path for path in every if os.path.exists(path))


def members(group: Group) -> set[int]:
    return {int(pid) for path in directories(group) for pid in Path(path, "cgroup.procs").read_text().split()}


def needs(host: Host, controller: str) -> None:
    if controller not in host.controllers():
        pytest.skip(f"no {controller} controller: {host.missing[controller]}")


def child(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run it in a process of its own; call the result for what it returned. What it raises is raised here."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            said: list[Any] = ["returned", function()]
        except BaseException as error:
            said = ["raised", repr(error)]
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)

    def result() -> Any:
        with os.fdopen(reader, "rb") as stream:
            data = stream.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"the process itself ended with {status}"
        how, what = json.loads(data)
        assert how == "returned", what
        return what

    return result


def start(gauges: Gauges, code: str, **streams: int) -> int:
    """As a keeper does it: step in, spawn, step out."""
    actions = [(os.POSIX_SPAWN_DUP2, fd, {"stdin": 0, "stdout": 1}[stream]) for stream, fd in streams.items()]
    gauges.enter_work()
    try:
        return os.posix_spawn(PYTHON, [PYTHON, "-I", "-S", "-c", code], {}, file_actions=actions)
    finally:
        gauges.leave_work()


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- limits ---


def test_a_memory_bomb_is_killed_and_a_bigger_keeper_is_not(host: Host, group: Group) -> None:
    needs(host, "memory")
    cgroups.limit(group, memory=48 * MIB)

    def keeper() -> list[Any]:
        cgroups.enter(group)
        gauges = Gauges(group)
        hoard = b"x" * (96 * MIB)  # what the killer would choose first
        before = gauges.oom_kills()
        code = ended(start(gauges, MEMORY_BOMB))
        return [before, gauges.oom_kills(), code, gauges.memory_peak(), len(hoard)]

    before, after, code, peak, _ = child(keeper)()
    assert (before, after, code) == (0, 1, -signal.SIGKILL)
    if peak is not None:  # older kernels of version 2 have none
        assert 32 * MIB < peak <= 48 * MIB


def test_what_fits_into_the_memory_limit_is_not_killed(host: Host, group: Group) -> None:
    needs(host, "memory")
    cgroups.limit(group, memory=96 * MIB)

    def keeper() -> list[Any]:
        cgroups.enter(group)
        gauges = Gauges(group)
        return [ended(start(gauges, f"hoard = b'x' * {32 * MIB}")), gauges.oom_kills()]

    assert child(keeper)() == [0, 0]


def test_a_memory_limit_can_be_raised_and_lowered(host: Host, group: Group) -> None:
    needs(host, "memory")
    file = Path(group.directories["memory"], "work", "memory.limit_in_bytes" if group.version == 1 else "memory.max")
    for size in (64 * MIB, 256 * MIB, 32 * MIB):
        cgroups.limit(group, memory=size)
        assert int(file.read_text()) == size


def test_the_peak_of_memory_can_be_taken_for_each_command(host: Host, group: Group) -> None:
    needs(host, "memory")

    def keeper() -> list[Any]:
        cgroups.enter(group)
        gauges = Gauges(group)
        peaks = []
        for size in (64, 1):
            gauges.reset_peak()
            assert ended(start(gauges, f"hoard = b'x' * {size * MIB}")) == 0
            peaks.append(gauges.memory_peak())
        return peaks

    large, small = child(keeper)()
    if large is None:
        pytest.skip("this kernel keeps no peak of memory")
    assert large > 64 * MIB
    if group.version == 1:
        assert small < 48 * MIB
    else:
        assert small <= large  # before 6.12 it cannot be reset


def test_a_fork_bomb_has_as_many_processes_as_were_asked_for(host: Host, group: Group) -> None:
    needs(host, "pids")
    cgroups.limit(group, pids=5)

    def keeper() -> dict[str, Any]:
        cgroups.enter(group)
        gauges = Gauges(group)
        (stdin, go), (told, stdout) = os.pipe(), os.pipe()
        seen: dict[str, Any] = {"before": gauges.refused_forks()}
        pid = start(gauges, FORK_BOMB, stdin=stdin, stdout=stdout)
        seen["forked"] = int(os.read(told, 100))
        seen["processes"], seen["refused"] = gauges.processes(), gauges.refused_forks()
        os.write(go, b"\n")
        seen["code"], seen["peak"] = ended(pid), gauges.processes_peak()
        return seen

    seen = child(keeper)()
    peak = seen.pop("peak")
    assert seen == {"before": 0, "forked": 4, "processes": 5, "refused": 1, "code": 0}
    assert peak in (5, None)


def test_a_limit_of_one_process_lets_one_run(host: Host, group: Group) -> None:
    needs(host, "pids")
    cgroups.limit(group, pids=1)

    def keeper() -> list[Any]:
        cgroups.enter(group)
        gauges = Gauges(group)
        return [
            ended(start(gauges, "")),
            gauges.refused_forks(),
            ended(start(gauges, "import os; os.fork()")),
            gauges.refused_forks(),
        ]

    assert child(keeper)() == [0, 0, 1, 1]


@pytest.mark.parametrize(("cpus", "throttled"), [(0.2, True), (None, False)])
def test_a_share_of_a_processor_is_no_more_than_that(host: Host, group: Group, cpus: float | None, throttled: bool) -> None:
    needs(host, "cpu")
    cgroups.limit(group, cpus=cpus)

    def keeper() -> list[Any]:
        cgroups.enter(group)
        gauges = Gauges(group)
        code = ended(start(gauges, "import time\nwhile time.process_time() < 0.3: pass"))
        return [code, gauges.cpu_s()]

    code, used = child(keeper)()
    assert code == 0
    assert 0.25 < used < 1.5
    words = Path(group.directories["cpu"], "work", "cpu.stat").read_text().split()
    periods = int(words[words.index("nr_throttled") + 1])
    # 300 ms of work at 20 ms in each 100 ms are 15 periods, of which all but the last are cut short.
    assert periods >= 5 if throttled else periods == 0


def test_what_the_host_lacks_is_refused_by_name(host: Host, name: str) -> None:
    rest = Host(host.version, {key: base for key, base in host.bases.items() if key != "pids"}, {})
    lacking = cgroups.make(rest, name)
    try:
        with pytest.raises(OSError, match="no pids controller"):
            cgroups.limit(lacking, pids=5)
    finally:
        assert cgroups.remove(lacking)


# -- gauges ---


def places() -> set[str]:
    return set(Path("/proc/self/cgroup").read_text().splitlines())


def test_a_keeper_without_powers_still_moves_and_reads(host: Host, group: Group, name: str) -> None:
    def keeper() -> list[Any]:
        cgroups.enter(group)
        gauges = Gauges(group)
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(4242, 4242, 4242)
            os.setresuid(4242, 4242, 4242)
            capabilities.give_up_all_but(())
            with pytest.raises(PermissionError):
                cgroups.enter(group)
        before = places()
        gauges.enter_work()
        inside = places()
        gauges.leave_work()
        after = places()
        gauges.reset_peak()
        read = [gauges.oom_kills(), gauges.refused_forks(), gauges.memory(), gauges.cpu_s(), gauges.processes()]
        gauges.close()
        return [sorted(inside - before), before == after, read]

    inside, back, read = child(keeper)()
    assert inside
    assert all(line.endswith(f"/elsewhere/{name}/work") for line in inside)
    assert back
    wanted = {"memory": 2, "cpu": 3, "pids": 4}
    assert read[:2] == [0, 0]
    assert all(read[index] is not None for controller, index in wanted.items() if controller in host.controllers())
    assert read[4] in (0, None)


def test_stepping_twice_is_stepping_once(group: Group) -> None:
    def keeper() -> list[bool]:
        cgroups.enter(group)
        gauges = Gauges(group)
        outside = places()
        gauges.leave_work()
        stayed = places() == outside
        for _ in range(2):
            gauges.enter_work()
        inside = places()
        for _ in range(2):
            gauges.leave_work()
        return [stayed, inside != outside, places() == outside]

    assert child(keeper)() == [True, True, True]


def test_gauges_reach_no_command_and_are_all_closed(group: Group) -> None:
    def keeper() -> list[Any]:
        before = os.listdir("/proc/self/fd")
        gauges = Gauges(group)
        opened = [int(fd) for fd in os.listdir("/proc/self/fd") if fd not in before]
        inherited = [fd for fd in opened if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)]
        gauges.close()
        return [len(opened), inherited, os.listdir("/proc/self/fd") == before]

    opened, inherited, closed = child(keeper)()
    assert 4 <= opened <= 16
    assert (inherited, closed) == ([], True)


def test_gauges_of_a_group_that_is_gone_say_nothing(host: Host, name: str) -> None:
    made = cgroups.make(host, name)
    gauges = Gauges(made)
    assert cgroups.remove(made)
    assert (gauges.memory(), gauges.processes(), gauges.cpu_s(), gauges.oom_kills()) == (None, None, None, 0)
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
        gauges.enter_work()
    gauges.close()


# -- coming and going ---


def occupied(group: Group) -> tuple[Callable[[], Any], int]:
    """A process in the keeper's place that stays until the descriptor is closed."""
    (told, tell), (wait, go) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)

    def keeper() -> None:
        cgroups.enter(group)
        os.close(go)
        os.write(tell, b"+")
        os.read(wait, 1)

    result = child(keeper)
    os.read(told, 1)
    for fd in (told, tell, wait):
        os.close(fd)
    return result, go


def test_nothing_is_left_of_a_group_and_a_populated_one_stays(host: Host, name: str) -> None:
    made = cgroups.make(host, name)
    result, go = occupied(made)
    assert directories(made) == sorted({*made.directories.values(), *keeper_place(made), *work_place(made)})
    assert not cgroups.remove(made, 0.05)
    assert len(members(made)) == 1
    os.close(go)
    result()
    assert cgroups.remove(made)
    assert directories(made) == []


def test_a_sweep_takes_what_is_empty_and_old_and_nothing_else(apart: Host) -> None:
    names = {word: f"test-{word}-{os.urandom(6).hex()}" for word in ("left", "fresh", "populated")}
    made = {word: cgroups.make(apart, name) for word, name in names.items()}
    result, go = occupied(made["populated"])
    try:
        for word in ("left", "populated"):
            for directory in directories(made[word]):
                os.utime(directory, (0, 0))
        swept = cgroups.sweep(apart)
        assert swept == [names["left"]]
        assert directories(made["left"]) == []
        assert directories(made["populated"]) == sorted(
            {*keeper_place(made["populated"]), *work_place(made["populated"]), *made["populated"].directories.values()}
        )
    finally:
        os.close(go)
        result()
        left = [word for word, group in made.items() if not cgroups.remove(group)]
        assert left == []


def test_a_group_is_made_while_others_remove_the_empty_parent(apart: Host, name: str) -> None:
    def busy(which: int) -> int:
        for number in range(60):
            assert cgroups.remove(cgroups.make(apart, f"{name}-{which}-{number}"))
        return which

    results = [child(lambda which=which: busy(which)) for which in range(3)]
    assert [result() for result in results] == [0, 1, 2]


def test_an_ordinary_user_without_a_group_is_told_what_to_do() -> None:
    if os.getuid() != 0:
        pytest.skip("giving up root needs root; as an ordinary user the other tests tell")

    def somebody() -> list[Any]:
        os.setgroups([])
        os.setresgid(4242, 4242, 4242)
        os.setresuid(4242, 4242, 4242)
        found = cgroups.look()
        return [found.version, found.bases, found.missing]

    version, bases, missing = child(somebody)()
    assert (version, bases) == (0, {})
    assert set(missing) == set(cgroups.CONTROLLERS)
    for reason in missing.values():
        assert "only root can" in reason or "systemd-run --user --scope" in reason or "read-only" in reason or "mounted" in reason


def test_looking_leaves_nothing_behind_and_says_the_same_again(host: Host) -> None:
    assert cgroups.look() == host
    for base in set(host.bases.values()):
        parent = Path(base, "elsewhere")
        assert not parent.exists() or not [path for path in parent.iterdir() if path.name.startswith(f"trial-{os.getpid()}-")]


# -- version 2 ---


def test_version_2_keeps_processes_in_leaves(host: Host, group: Group) -> None:
    if host.version != 2:
        pytest.skip(f"controllers are on cgroup version {host.version} here")
    (directory,) = set(group.directories.values())
    handed_on = Path(directory, "cgroup.subtree_control").read_text().split()
    assert sorted(handed_on) == sorted({"memory", "cpu"} & set(host.controllers()))
    result, go = occupied(group)
    try:
        assert Path(directory, "cgroup.procs").read_text() == ""
        assert len(Path(directory, "keeper", "cgroup.procs").read_text().split()) == 1
    finally:
        os.close(go)
        result()


def test_version_2_leaves_our_own_group_able_to_have_groups_with_processes(host: Host) -> None:
    """The kernel hands the controllers of threads on even where there are processes, and then refuses all others below."""
    if host.version != 2:
        pytest.skip(f"controllers are on cgroup version {host.version} here")
    (base,) = set(host.bases.values())
    own = Path("/sys/fs/cgroup" + places().pop().partition("::")[2])
    for place in (own, Path(base)):
        kind = place / "cgroup.type"
        assert not kind.exists() or kind.read_text() == "domain\n"
    assert not (own / "cgroup.type").exists() or (own / "cgroup.subtree_control").read_text().strip() == ""


def test_our_own_processes_make_room_in_a_delegated_scope(host: Host) -> None:
    if not os.environ.get("IN_A_DELEGATED_SCOPE"):
        pytest.skip("not started in a scope of its own; the next test does that")
    (base,) = set(host.bases.values())
    assert os.path.basename(base).startswith("elsewhere-test-")
    assert base.endswith(".scope")
    assert [line.rpartition("/")[2] for line in places()] == ["elsewhere-launcher"]
    assert host.missing == {}


def test_a_user_has_all_of_this_in_a_delegated_scope(name: str) -> None:
    """The same tests, started as an ordinary user's launcher has to be. Run as that user."""
    manager = Path(f"/run/user/{os.getuid()}/systemd/private")
    if os.getuid() == 0 or os.environ.get("IN_A_DELEGATED_SCOPE"):
        pytest.skip("this is about an ordinary user who is not in a delegated scope yet")
    if not manager.exists():
        pytest.skip(f"no service manager of this user: {manager} does not exist")
    environment = {**os.environ, "XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", "IN_A_DELEGATED_SCOPE": "1"}
    tests = [sys.executable, "-m", "pytest", __file__, "-vv", "-rs", "-p", "no:cacheprovider", "--timeout", "600"]
    began = time.monotonic()
    done = subprocess.run([*cgroups.scope(name), *tests], env=environment, capture_output=True, text=True)
    seen = f"after {time.monotonic() - began:.0f} s\n{done.stdout[-6000:]}\n{done.stderr}"
    assert done.returncode == 0, seen
    print(done.stdout)
    for wanted in (
        "test_a_memory_bomb",
        "test_a_fork_bomb",
        "test_a_keeper_without_powers",
        "test_version_2",
        "test_our_own_processes_make_room",
    ):
        assert any(wanted in line and "PASSED" in line for line in done.stdout.splitlines()), seen
