"""Resources: nobody inside takes more than was given, raises a limit, gets ahead of others, or steps out of what counts them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Person
from escape.attempts import Attempts, Place, Trial, somebody
from escape.prelude import Refused, errno, mmap, resource, signal, time
from limited import held, limit

ATTEMPTS = Attempts()
LIMITS = {"memory": "64M", "pids": "32", "disk": "20M", "open_files": "64"}
HELD: dict[str, frozenset[str]] = {}


@pytest.fixture(scope="module", params=["root", "user"])
def trial(request: pytest.FixtureRequest, library: Path, hosts: Callable[[Person], Person]) -> Iterator[Trial]:
    with somebody(request.param, library, hosts) as person:
        HELD["now"] = held(person)
        case = Trial(person, ATTEMPTS, plant(person))
        case.run(*limit(person, **LIMITS))
        yield case


def plant(person: Person) -> Place:
    room = person.project / "room"
    room.mkdir()
    person.own(room)
    return {"room": str(room)}


def where_held(name: str) -> Callable[[], str | None]:
    """What a watchdog ends takes the whole sandbox with it; `test_bombs.py` tries that."""
    return lambda: None if name in HELD["now"] else f"nothing holds {name} for this person"


def has_power(number: int) -> bool:
    """Whether root here has a capability: root of a container lacks some."""
    words = Path("/proc/self/status").read_text().split()
    return bool(int(words[words.index("CapEff:") + 1], 16) >> number & 1)


# -- more than was given ---


@ATTEMPTS.made(needs=where_held("memory"))
def take_more_memory(place):
    """In a child, which is killed for it. Outside it is a moment's 100 MiB."""
    pid = os.fork()
    if not pid:
        with mmap.mmap(-1, 100 << 20) as block:
            for offset in range(0, len(block), 4096):
                block[offset] = 1
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        raise Refused("killed")
    return status


@ATTEMPTS.made()
def start_more_processes(place):
    children = []
    try:
        for _ in range(40):
            pid = os.fork()
            if not pid:
                time.sleep(30)
                os._exit(0)
            children.append(pid)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
    return len(children)


@ATTEMPTS.made(needs=where_held("disk"))
def write_more(place):
    path = f"{place['room']}/big"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for _ in range(30):
            written = os.write(fd, bytes(1 << 20))
            if written < 1 << 20:
                raise OSError(errno.ENOSPC, "written in part")
    finally:
        os.close(fd)
        os.unlink(path)
    return "30 MiB"


@ATTEMPTS.made()
def open_more_files(place):
    found = []
    try:
        for _ in range(100):
            found.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for fd in found:
            os.close(fd)
    return len(found)


# -- raise a limit ---


@ATTEMPTS.made()
def raise_the_limit_of_descriptors(place):
    """To what anybody outside may have."""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    except ValueError as error:
        raise Refused(str(error)) from None
    return 256


@ATTEMPTS.made(control="root")
def write_into_a_group(place):
    """Only opened: whoever can open it for writing can move itself, or raise its limits."""
    names = ("cgroup.procs", "tasks", "memory.limit_in_bytes", "memory.max", "pids.max")
    for top in ("/sys/fs/cgroup", "/proc/1/root/sys/fs/cgroup"):
        for directory, _, files in os.walk(top):
            for name in files:
                if name in names:
                    os.close(os.open(f"{directory}/{name}", os.O_WRONLY))
                    return f"{directory}/{name}"
    raise Refused("there is no group in sight")


@ATTEMPTS.made(control="root")
def change_a_setting_of_the_kernels_memory(place):
    os.close(os.open("/proc/sys/vm/overcommit_memory", os.O_WRONLY))
    return "open"


@ATTEMPTS.made(control="root")
def drop_the_hosts_caches(place):
    os.close(os.open("/proc/sys/vm/drop_caches", os.O_WRONLY))
    return "open"


@ATTEMPTS.made(control="root")
def lower_the_number_of_all_processes(place):
    os.close(os.open("/proc/sys/kernel/pid_max", os.O_WRONLY))
    return "open"


@ATTEMPTS.made(control="root", needs=lambda: None if os.path.exists("/proc/sysrq-trigger") else "this kernel has no such keys")
def press_the_kernels_keys(place):
    os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY))
    return "open"


# -- get ahead of others ---


@ATTEMPTS.made(control="root")
def come_before_others(place):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, before - 5)
    return os.getpriority(os.PRIO_PROCESS, 0)


@ATTEMPTS.made(control="root")
def run_in_real_time(place):
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return "done"


@ATTEMPTS.made(control="root", needs=lambda: None if has_power(24) else "root of this host may not either")
def be_killed_last(place):
    with open("/proc/self/oom_score_adj", "w") as stream:
        stream.write("-900")
    return Path("/proc/self/oom_score_adj").read_text()


@pytest.mark.parametrize("name", ATTEMPTS)
def test_resources(trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    trial.judge(name, request)
