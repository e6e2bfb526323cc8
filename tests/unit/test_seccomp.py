"""The system-call filter, judged by what it answers: by a small machine that runs it, and by the kernel itself."""

import errno
import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from elsewhere.linux import seccomp, syscalls

SOURCE = Path(seccomp.__file__).parents[2]
ALLOW, KILL, TOLD = "allow", "kill", "told"
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# From the kernel's own tables, not from the module under test.
X86_64 = {
    "read": 0, "write": 1, "mmap": 9, "ioctl": 16, "socket": 41, "clone": 56, "fork": 57, "execve": 59, "ptrace": 101,
    "personality": 135, "openat": 257, "unshare": 272, "mount": 165, "umount2": 166, "pivot_root": 155, "setns": 308,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "bpf": 321, "perf_event_open": 298,
    "add_key": 248, "request_key": 249, "keyctl": 250, "userfaultfd": 323, "open_by_handle_at": 304, "reboot": 169,
    "swapon": 167, "settimeofday": 164, "clock_settime": 227, "syslog": 103, "acct": 163, "sethostname": 170, "iopl": 172,
    "process_vm_readv": 310, "process_vm_writev": 311, "quotactl": 179, "mknod": 133, "mknodat": 259, "set_mempolicy": 238,
    "kcmp": 312, "sysfs": 139, "ustat": 136, "fanotify_init": 300, "modify_ldt": 154, "socketpair": 53,
}  # fmt: skip
AARCH64 = {
    "read": 63, "write": 64, "mmap": 222, "ioctl": 29, "socket": 198, "clone": 220, "execve": 221, "ptrace": 117,
    "personality": 92, "openat": 56, "unshare": 97, "mount": 40, "umount2": 39, "pivot_root": 41, "setns": 268,
    "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104, "bpf": 280, "perf_event_open": 241,
    "add_key": 217, "request_key": 218, "keyctl": 219, "userfaultfd": 282, "open_by_handle_at": 265, "reboot": 142,
    "swapon": 224, "settimeofday": 170, "clock_settime": 112, "syslog": 116, "acct": 89, "sethostname": 161,
    "process_vm_readv": 270, "process_vm_writev": 271, "quotactl": 60, "mknodat": 33, "set_mempolicy": 237,
    "kcmp": 272, "fanotify_init": 262, "socketpair": 199,
}  # fmt: skip
EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "openat2": 437, "mount_setattr": 442,
    "landlock_restrict_self": 446, "pidfd_getfd": 438, "process_madvise": 440,
}  # fmt: skip
DENIED = [
    *("mount", "umount2", "pivot_root", "setns", "init_module", "finit_module", "delete_module", "kexec_load", "bpf"),
    *("perf_event_open", "add_key", "request_key", "keyctl", "userfaultfd", "open_by_handle_at", "reboot", "swapon"),
    *("settimeofday", "clock_settime", "syslog", "acct", "sethostname", "iopl", "process_vm_readv", "process_vm_writev"),
    *("quotactl", "io_uring_setup", "io_uring_enter", "io_uring_register", "open_tree", "move_mount", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "set_mempolicy", "kcmp", "sysfs", "ustat", "fanotify_init", "modify_ldt"),
    "pidfd_getfd",
]
QUIET = ["io_uring_setup", "io_uring_enter", "io_uring_register", "process_vm_readv", "set_mempolicy"]
MOUNTING = [
    *("mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr"),
    "setns",
]
ALLOWED = ["read", "write", "mmap", "openat", "openat2", "execve", "fork", "ptrace", "landlock_restrict_self", "process_madvise"]

CLONE_THREAD = 0x003D0F00  # what pthread_create asks for
CLONE_FORK = 0x01200011  # what fork asks for: settid, cleartid, SIGCHLD
NAMESPACES = {
    "time": 0x80, "mount": 0x00020000, "cgroup": 0x02000000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000,
    "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip


class Filter:
    """A filter for one architecture, and the few instructions of the kernel's machine that runs it."""

    def __init__(self, machine: str, **options: bool) -> None:
        self.machine = machine
        self.numbers = {**(X86_64 if machine == "x86_64" else AARCH64), **EVERYWHERE}
        self.code = seccomp.program(**options)

    def call(self, name: str, *arguments: int) -> object:
        if name not in self.numbers:
            pytest.skip(f"{self.machine} has no {name}")
        return self.answer(self.numbers[name], *arguments)

    def answer(self, number: int, *arguments: int, architecture: int | None = None) -> object:
        padded = (*arguments, *[0] * (6 - len(arguments)))
        data = struct.pack(
            "<IIQ6Q", number & 0xFFFFFFFF, architecture or ARCHITECTURES[self.machine], 0, *(word % 2**64 for word in padded)
        )
        assert len(data) == 64
        place = accumulator = 0
        while True:
            code, if_true, if_false, value = struct.unpack_from("<HBBI", self.code, place * 8)
            place += 1
            match code:
                case 0x20:  # load a word of the data
                    assert value % 4 == 0
                    (accumulator,) = struct.unpack_from("<I", data, value)
                case 0x15:
                    place += if_true if accumulator == value else if_false
                case 0x35:
                    place += if_true if accumulator >= value else if_false
                case 0x45:
                    place += if_true if accumulator & value else if_false
                case 0x54:
                    accumulator &= value
                case 0x06:
                    break
                case _:
                    pytest.fail(f"instruction {place - 1} has the unknown code {code:#x}")
        action, low = value & 0xFFFF0000, value & 0xFFFF
        return {0x7FFF0000: ALLOW, 0x80000000: KILL, 0x7FC00000: TOLD, 0x00050000: errno.errorcode.get(low, low)}[action]


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(syscalls, "machine", request.param)  # the other one cannot be had here
    return str(request.param)


@pytest.fixture
def rules(machine: str) -> Filter:
    return Filter(machine)


VARIANTS = [
    dict(zip(("unix_sockets", "nested", "notify"), values, strict=True)) for values in itertools.product((True, False), repeat=3)
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_program_is_whole_instructions_and_short_enough_for_the_kernel(machine: str, options: dict[str, bool]) -> None:
    code = seccomp.program(**options)
    assert len(code) % 8 == 0
    assert 0 < len(code) // 8 <= 4096


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_jump_lands_inside_the_program(machine: str, options: dict[str, bool]) -> None:
    instructions = list(struct.iter_unpack("<HBBI", seccomp.program(**options)))
    for place, (code, if_true, if_false, _) in enumerate(instructions):
        assert place + 1 + max(if_true, if_false) < len(instructions) or code == 0x06
    assert instructions[-1][0] == 0x06


@pytest.mark.parametrize("name", DENIED)
def test_what_containers_deny_is_denied(rules: Filter, name: str) -> None:
    assert rules.call(name) == "EPERM"


@pytest.mark.parametrize("name", sorted({*DENIED} - {*QUIET}))
def test_rare_refusals_are_told(machine: str, name: str) -> None:
    assert Filter(machine, notify=True).call(name) == TOLD


@pytest.mark.parametrize("name", QUIET)
def test_what_programs_try_on_the_chance_is_refused_plainly(machine: str, name: str) -> None:
    assert Filter(machine, notify=True).call(name) == "EPERM"


def test_a_filter_that_tells_differs_from_the_plain_one_in_nothing_else(machine: str) -> None:
    plain, telling = Filter(machine), Filter(machine, notify=True)
    tried = [(number, *[argument] * 6) for number in range(600) for argument in (0, 1, 0x5412, 0x2000, 0x10000000, 38, 40)]
    differing = 0
    for call in tried:
        before, after = plain.answer(*call), telling.answer(*call)
        assert after == before or (before, after) == ("EPERM", TOLD), call
        differing += before != after
    assert differing > 100


@pytest.mark.parametrize("notify", [False, True])
@pytest.mark.parametrize("name", MOUNTING)
def test_nested_namespaces_may_mount(machine: str, name: str, notify: bool) -> None:
    assert Filter(machine, nested=True, notify=notify).call(name) == ALLOW


def test_nested_allows_namespaces_and_mounts_and_nothing_else(machine: str) -> None:
    usual, nested = Filter(machine), Filter(machine, nested=True)
    opened = set()
    for number, argument in itertools.product(range(600), (0, 1, 0x5412, 0x2000, 0x6000, 0x10000000, 38, 40)):
        before, after = usual.answer(number, *[argument] * 6), nested.answer(number, *[argument] * 6)
        if before != after:
            assert (before, after) == ("EPERM", ALLOW)
            opened.add(number)
    assert opened == {usual.numbers[name] for name in (*MOUNTING, "clone", "unshare")} | {467}
    assert nested.call("clone3") == "ENOSYS"


@pytest.mark.parametrize("name", ["mknod", "mknodat"])
def test_devices_cannot_be_made_but_files_fifos_and_sockets_can(rules: Filter, name: str) -> None:
    def make(mode: int, device: int = 0x103) -> object:
        return rules.call(name, *([0] if name == "mknod" else [0, 0]), mode, device)

    for mode in (0o020666, 0o060600, 0o020000, 0o020666 | 1 << 16, 0o060600 | 1 << 33):
        assert make(mode) == "EPERM"
    assert make(0o020000, 0) == "EPERM"  # overlay reads a device 0:0 as "deleted"
    for mode in (0o644, 0o100644, 0o010600, 0o140600):
        assert make(mode) == ALLOW


def test_a_device_is_told(machine: str) -> None:
    assert Filter(machine, notify=True).call("mknodat", 0, 0, 0o020666, 0x103) == TOLD


def test_the_way_to_the_hypervisor_is_closed_and_ciphers_of_the_kernel_seem_not_to_exist(rules: Filter) -> None:
    assert rules.call("socket", 40, 1) == "EPERM"
    assert rules.call("socket", 38, 5) == "EAFNOSUPPORT"
    assert rules.call("socket", 16, 3) == ALLOW


def test_every_call_has_one_name_and_every_name_one_number(machine: str) -> None:
    known = seccomp.calls()
    assert len({name for name, _ in known.values()}) == len(known)
    numbers = {**(X86_64 if machine == "x86_64" else AARCH64), **EVERYWHERE}
    for number, (name, _) in known.items():
        assert numbers.get(name, number) == number
    assert {*DENIED} & {*numbers} <= {name for name, _ in known.values()}


@pytest.mark.parametrize("name", ALLOWED)
def test_everyday_calls_are_allowed(rules: Filter, name: str) -> None:
    assert rules.call(name) == ALLOW


def test_the_documented_list_names_what_is_denied() -> None:
    assert set(DENIED) <= set(seccomp.denied())
    assert seccomp.denied() == sorted(seccomp.denied())
    assert {"mount", "unshare"}.isdisjoint(seccomp.denied(nested=True))


def test_clone3_seems_not_to_exist_so_that_libraries_use_clone(rules: Filter) -> None:
    assert rules.call("clone3") == "ENOSYS"


@pytest.mark.parametrize("flags", [0, 17, CLONE_FORK, CLONE_THREAD, 0x4111], ids=hex)
def test_processes_and_threads_can_be_started(rules: Filter, flags: int) -> None:
    assert rules.call("clone", flags) == ALLOW


@pytest.mark.parametrize("kind", NAMESPACES)
def test_no_namespace_can_be_made(rules: Filter, kind: str) -> None:
    flag = NAMESPACES[kind]
    assert rules.call("unshare", flag) == "EPERM"
    assert rules.call("unshare", flag | 0x400) == "EPERM"
    if kind != "time":  # in the flags of clone, these bits are the signal at the end
        assert rules.call("clone", flag) == "EPERM"
        assert rules.call("clone", flag | CLONE_FORK) == "EPERM"


def test_unsharing_what_is_no_namespace_is_allowed(rules: Filter) -> None:
    assert rules.call("unshare", 0x200 | 0x400) == ALLOW


@pytest.mark.parametrize("high", [0, 1 << 32, 0xFFFFFFFF << 32], ids=hex)
@pytest.mark.parametrize("command", [0x5412, 0x541C], ids=["TIOCSTI", "TIOCLINUX"])
def test_nothing_can_be_typed_into_the_callers_terminal_also_not_with_high_bits_set(
    rules: Filter, command: int, high: int
) -> None:
    assert rules.call("ioctl", 0, command | high) == "EPERM"


@pytest.mark.parametrize("command", [0x5401, 0x5413, 0x5421, 0x5411], ids=hex)
def test_terminals_can_be_used(rules: Filter, command: int) -> None:
    assert rules.call("ioctl", 0, command) == ALLOW


def test_only_the_command_of_an_ioctl_is_looked_at(rules: Filter) -> None:
    assert rules.call("ioctl", 0x5412, 0x5401, 0x5412) == ALLOW


@pytest.mark.parametrize("value", [0, 8, 0x20000, 0x40000, 0x60000, 0xFFFFFFFF], ids=hex)
def test_personalities_of_the_list_are_allowed(rules: Filter, value: int) -> None:
    assert rules.call("personality", value) == ALLOW


@pytest.mark.parametrize("value", [1, 4, 0x100000, 0x400000, 0x440000, 0x0040001, 0xFFFFFFFE], ids=hex)
def test_personalities_that_weaken_the_process_are_refused(rules: Filter, value: int) -> None:
    assert rules.call("personality", value) == "EPERM"


@pytest.mark.parametrize("name", ["read", "mount", "clone3"])
def test_calls_of_another_architecture_end_the_process(rules: Filter, name: str) -> None:
    others = {0x40000003, 0x40000028, *ARCHITECTURES.values()} - {ARCHITECTURES[rules.machine]}
    for other in others:
        assert rules.answer(rules.numbers[name], architecture=other) == KILL


@pytest.mark.parametrize("number", [0x40000000, 0x40000000 + 165, 0x40000000 + 520, 0xFFFFFFFF], ids=hex)
def test_x32_calls_seem_not_to_exist(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(syscalls, "machine", "x86_64")
    assert Filter("x86_64").answer(number) == "ENOSYS"


def test_arguments_of_other_calls_do_not_matter(rules: Filter) -> None:
    for name in ("read", "openat", "socket"):
        assert rules.call(name, 0x10000000, 0x5412, 0x40000, 1, 1, 1) == ALLOW


@pytest.mark.parametrize("kind", [1, 5, 0x80001, 0x801], ids=hex)
def test_without_unix_sockets_only_those_are_refused(machine: str, kind: int) -> None:
    rules = Filter(machine, unix_sockets=False)
    assert rules.call("socket", 1, kind) == "EPERM"
    assert rules.call("socket", 1 | 1 << 32, kind) == "EPERM"
    assert rules.call("socket", 2, kind) == ALLOW
    assert rules.call("socket", 10, kind) == ALLOW
    assert rules.call("mount") == "EPERM"


def test_without_unix_sockets_pairs_that_cannot_be_turned_elsewhere_are_allowed(machine: str) -> None:
    rules = Filter(machine, unix_sockets=False)
    for kind in (2, 2 | 0x80000):
        assert rules.call("socketpair", 1, kind) == "EPERM"
    for kind in (1, 5, 1 | 0x80000):
        assert rules.call("socketpair", 1, kind) == ALLOW


def test_with_unix_sockets_they_are_allowed(rules: Filter) -> None:
    assert rules.call("socket", 1, 1) == ALLOW


def test_an_unknown_machine_has_no_filter_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "machine", "pdp11")
    with pytest.raises(OSError, match="pdp11") as caught:
        seccomp.program()
    assert caught.value.errno == errno.ENOSYS


CHILD = """
import errno, json, os, socket, sys, threading
from elsewhere.linux import seccomp, syscalls

def tried(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

before = tried(syscalls.mount, None, "/nonexistent", "tmpfs", 0)
seccomp.install(seccomp.program(unix_sockets=sys.argv[1] == "with"))
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
child = os.posix_spawn("/bin/true", ["true"], {})
print(json.dumps({
    "mount before": before,
    "mount": tried(syscalls.mount, None, "/nonexistent", "tmpfs", 0),
    "unshare": tried(syscalls.unshare, syscalls.CLONE_NEWUSER),
    "open": tried(lambda: os.close(os.open("/", os.O_RDONLY))),
    "child": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
    "unix": tried(lambda: socket.socket(socket.AF_UNIX).close()),
    "inet": tried(lambda: socket.socket(socket.AF_INET).close()),
}))
"""


@pytest.mark.parametrize("unix_sockets", ["with", "without"])
def test_the_kernel_takes_the_program_and_answers_the_same(unix_sockets: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", CHILD, unix_sockets],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode and ("ENOSYS" in done.stderr or "not implemented" in done.stderr):
        pytest.skip("this kernel has no system-call filters")
    found = json.loads(done.stdout or "null")
    assert found, done.stderr
    assert found.pop("mount before") in ("ENOENT", "EPERM")
    assert found == {
        "mount": "EPERM",
        "unshare": "EPERM",
        "open": "done",
        "child": 0,
        "unix": "done" if unix_sockets == "with" else "EPERM",
        "inet": "done",
    }
