"""Ids and capabilities: nobody inside becomes somebody else in reality, gets a power back, or touches a process outside."""

import shutil
from collections.abc import Callable, Iterator

import pytest

from conftest import Person
from escape.attempts import Attempts, Place, Trial, neighbour, somebody
from escape.prelude import (
    LIBC,
    Path,
    call,
    checked,
    ctypes,
    errno,
    found,
    hold,
    os,
    resource,
    signal,
    struct,
    subprocess,
    text_of,
)

ATTEMPTS = Attempts()
STRANGER = 4343
SECRET = "s3cret-of-root"


def only_root_plants() -> str | None:
    return None if os.geteuid() == 0 else "only root can plant it"


def plant(person: Person) -> Place:
    place: Place = {"stranger": STRANGER, "secret": SECRET, "key": f"elsewhere-escape-{os.getpid()}-{person.name}"}
    programs = person.place / "programs"
    programs.mkdir()
    place["closed"] = str(programs / "closed")
    Path(place["closed"]).write_text(SECRET)
    Path(place["closed"]).chmod(0o600)
    place["set_user_id"], place["capable"] = str(programs / "id"), str(programs / "cat")
    if os.geteuid() == 0:
        shutil.copy(shutil.which("id") or "/usr/bin/id", place["set_user_id"])
        os.chown(place["set_user_id"], STRANGER, STRANGER)
        os.chmod(place["set_user_id"], 0o6755)
        shutil.copy(shutil.which("cat") or "/bin/cat", place["capable"])
        dac_read_search, effective = 1 << 2, 1
        words = struct.pack("<IIIII", 0x02000000 | effective, dac_read_search, 0, 0, 0)
        os.setxattr(place["capable"], "security.capability", words)
    return place


def neighbour_with_a_key(place):
    """In the keyring that all processes of a user share, for everybody who has its id."""
    key = call("add_key", b"user", place["key"].encode(), b"opens", 5, -4)
    call("keyctl", 5, key, 0x3F3F0000)
    try:
        hold({})
    finally:
        call("keyctl", 9, key, -4)


@pytest.fixture(scope="module", params=["root", "user"])
def trial(request: pytest.FixtureRequest, library: Path, hosts: Callable[[Person], Person]) -> Iterator[Trial]:
    with somebody(request.param, library, hosts) as person:
        place = plant(person)
        with neighbour(person, neighbour_with_a_key, place) as other:
            case = Trial(person, ATTEMPTS, {**place, "neighbour": other.process.pid})
            case.run()
            yield case


def sysctl(path: str, *, free: str, why: str) -> Callable[[], str | None]:
    """A reason if the host itself switched it off for everybody."""
    return lambda: None if not os.path.exists(path) or text_of(path).strip() == free else why


# -- becoming somebody ---


@ATTEMPTS.made(needs=only_root_plants)
def become_somebody_by_a_set_user_id_program(place):
    done = subprocess.run([place["set_user_id"]], capture_output=True, text=True, check=True)
    return found(done.stdout, f"euid={place['stranger']}")


@ATTEMPTS.made(needs=only_root_plants, who=("user",))
def get_a_power_by_a_program_that_has_it(place):
    """A copy of `cat` that may read everything."""
    done = subprocess.run([place["capable"], place["closed"]], capture_output=True, text=True, check=False)
    return found(done.stdout + done.stderr, place["secret"])


@ATTEMPTS.made(control="root", who=("user",))
def become_root(place):
    os.setresuid(0, 0, 0)
    return os.getuid()


@ATTEMPTS.made(control="root", who=("user",))
def become_a_stranger(place):
    os.setresgid(place["stranger"], place["stranger"], place["stranger"])
    os.setresuid(place["stranger"], place["stranger"], place["stranger"])
    return os.getuid()


@ATTEMPTS.made(control="root", who=("user",))
def join_other_groups(place):
    os.setgroups([0, place["stranger"]])
    return os.getgroups()


@ATTEMPTS.made(control="root", who=("user",))
def give_a_file_to_root(place):
    Path("mine").write_text("")
    try:
        os.chown("mine", 0, 0)
    finally:
        os.unlink("mine")
    return "given"


@ATTEMPTS.made(control="root")
def take_a_power_back(place):
    """CAP_SYS_ADMIN, into the permitted and the effective set."""
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)(1 << 21, 1 << 21, 0, 0, 0, 0)
    return call("capset", head, sets)


@ATTEMPTS.made(control="root")
def keep_a_power_for_programs(place):
    """An ambient capability: CAP_NET_RAW."""
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)(1 << 13, 1 << 13, 1 << 13, 0, 0, 0)
    call("capset", head, sets)
    return checked("prctl", LIBC.prctl(47, 2, 13, 0, 0))


@ATTEMPTS.made(control="root")
def become_more_important(place):
    return os.setpriority(os.PRIO_PROCESS, 0, -10)


@ATTEMPTS.made(control="root")
def run_before_everybody_else(place):
    return os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


@ATTEMPTS.made()
def change_how_memory_is_laid_out(place):
    """A personality that makes every page executable."""
    return call("personality", 0x0400000)


# -- other processes ---


@ATTEMPTS.made()
def signal_a_neighbour(place):
    return os.kill(place["neighbour"], signal.SIGCONT)


@ATTEMPTS.made()
def hold_a_neighbour_by_a_descriptor(place):
    return signal.pidfd_send_signal(os.pidfd_open(place["neighbour"]), signal.SIGCONT)


@ATTEMPTS.made()
def change_the_limits_of_a_neighbour(place):
    return resource.prlimit(place["neighbour"], resource.RLIMIT_CORE)


@ATTEMPTS.made(control="namespaces")
def trace_the_first_process(place):
    ptrace_seize = 0x4206
    return call("ptrace", ptrace_seize, 1, 0, 0)


@ATTEMPTS.made(control="root")
def trace_a_neighbour(place):
    ptrace_seize = 0x4206
    return call("ptrace", ptrace_seize, place["neighbour"], 0, 0)


@ATTEMPTS.made(control="namespaces")
def read_the_memory_of_the_first_process(place):
    """The address of something that every program has: its first mapping."""
    here, there = ctypes.create_string_buffer(16), (ctypes.c_uint64 * 2)()
    first = int(text_of("/proc/1/maps").split("-")[0], 16)
    there[:] = (first, 16)
    own = (ctypes.c_uint64 * 2)(ctypes.addressof(here), 16)
    return call("process_vm_readv", 1, own, 1, there, 1, 0)


@ATTEMPTS.made(control="namespaces")
def take_a_descriptor_of_the_first_process_by_call(place):
    return call("pidfd_getfd", os.pidfd_open(1), 1, 0)


@ATTEMPTS.made()
def write_into_the_memory_of_another_process(place):
    """Of a child, even: the call is denied as such, gdb does without."""
    page = ctypes.create_string_buffer(16)
    child = os.fork()
    if not child:
        signal.pause()
    where = (ctypes.c_uint64 * 2)(ctypes.addressof(page), 16)
    try:
        return call("process_vm_writev", child, where, 1, where, 1, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# -- the kernel's other doors ---


@ATTEMPTS.made()
def find_a_key_of_the_user(place):
    key = call("keyctl", 10, -4, b"user", place["key"].encode(), 0)
    content = ctypes.create_string_buffer(16)
    call("keyctl", 11, key, content, 16)
    return found(content.value.decode(), "opens")


@ATTEMPTS.made()
def leave_a_key_for_others(place):
    """In the thread's own keyring, so that the control leaves nothing."""
    return call("add_key", b"user", place["key"].encode() + b"-left", b"x", 1, -1)


@ATTEMPTS.made(
    control="root", needs=lambda: None if os.path.exists("/proc/sys/kernel/unprivileged_bpf_disabled") else "no bpf here"
)
def make_a_map_for_bpf(place):
    return call("bpf", 0, (ctypes.c_uint32 * 32)(2, 4, 4, 1), 128)


@ATTEMPTS.made(control="root", needs=lambda: None if os.path.exists("/proc/sys/kernel/perf_event_paranoid") else "no perf here")
def watch_the_processor(place):
    attributes = (ctypes.c_uint32 * 32)(1, 128)
    return call("perf_event_open", attributes, 0, -1, -1, 0)


@ATTEMPTS.made(needs=lambda: None if os.path.exists("/proc/sys/vm/unprivileged_userfaultfd") else "no userfaultfd here")
def handle_page_faults(place):
    user_mode_only = 1
    return call("userfaultfd", user_mode_only)


@ATTEMPTS.made(needs=sysctl("/proc/sys/kernel/io_uring_disabled", free="0", why="io_uring is switched off here"))
def ask_for_work_by_io_uring(place):
    """A way round any filter of calls."""
    return call("io_uring_setup", 1, (ctypes.c_uint32 * 30)())


@ATTEMPTS.made(control="root", needs=sysctl("/proc/sys/kernel/modules_disabled", free="0", why="modules are switched off here"))
def load_code_into_the_kernel(place):
    """Nothing is loaded: to be told that an empty module is none is to have been let in."""
    try:
        return call("init_module", b"", 0, b"")
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise
        return error.strerror


@ATTEMPTS.made(control="root")
def read_the_kernels_log(place):
    read_all, buffer = 3, ctypes.create_string_buffer(1000)
    return call("syslog", read_all, buffer, 1000)


@ATTEMPTS.made(control="root")
def watch_every_file(place):
    return call("fanotify_init", 0, 0)


@ATTEMPTS.made(control="namespaces")
def give_the_machine_another_name(place):
    return checked("sethostname", LIBC.sethostname(b"another", 7))


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_does_not_get_out(trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    trial.judge(name, request)
