"""Refused system calls are told, in real processes under the real filter: which call, by whom, and nothing ever waits for good.

The harness is to its commands what the keeper is: it installs the filter on itself, starts them, and answers what they ask.
"""

import errno
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elsewhere.linux import notifications, seccomp, syscalls

SOURCE = Path(seccomp.__file__).parents[2]
CAP_SYS_ADMIN = 21
POWERFUL = os.geteuid() == 0 and bool(syscalls.capget()[0] >> CAP_SYS_ADMIN & 1)

HARNESS = """
import errno, json, os, select, signal, sys, time
from elsewhere.linux import notifications, seccomp, syscalls

def number(name):
    return next(number for number, (called, _) in seccomp.calls().items() if called == name)

def tried(name, *arguments):
    "The call itself, not the C library's idea of it."
    import ctypes
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    ctypes.set_errno(0)
    done = syscalls._libc.syscall(ctypes.c_long(number(name)), *words)
    return errno.errorcode[ctypes.get_errno()] if done < 0 else "done"

def start(function):
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    return pid

def answer(listener, pid, handle=lambda asked: True):
    "Until this child has ended."
    heard = []
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        if poll.poll(20):
            asked = notifications.read(listener)
            if asked is not None:
                heard.append([notifications.name(asked.number), asked.pid])
                if handle(asked):
                    notifications.refuse(listener, asked, errno.EPERM)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return heard, os.waitstatus_to_exitcode(status)

def listen(**options):
    listener = seccomp.install_best(seccomp.program(**options), seccomp.program(**options, notify=True))
    if listener < 0:
        print(json.dumps("no listener"))
        raise SystemExit
    return listener

def tell(**what):
    print(json.dumps(what))
"""

SAMPLE: dict[str, tuple[str, set[str]]] = {  # how it is called, and how that ends for a powerful root without a filter
    "mount": ("b'none', b'/nonexistent', b'tmpfs', 0, None", {"ENOENT"}),
    "setns": ("-1, 0", {"EBADF"}),
    "bpf": ("9999, None, 0", {"EINVAL", "EFAULT", "ENOSYS"}),
    "perf_event_open": ("None, 0, -1, -1, 0", {"EFAULT", "ENOSYS"}),
    "keyctl": ("9999, 0, 0, 0, 0", {"ENOTSUP", "ENOSYS"}),
    "init_module": ("None, 0, None", {"ENOEXEC", "EFAULT", "ENOSYS", "EINVAL"}),
    "kexec_load": ("0, 9999, None, 0", {"EINVAL", "EFAULT", "ENOSYS"}),
    "mknodat": ("-100, (place + '/node').encode(), 0o020600, 0", {"done"}),
    "open_by_handle_at": ("-1, None, 0", {"EFAULT", "EBADF", "ENOSYS"}),
    "swapon": ("None, 0x7FFF0000", {"EINVAL", "ENOSYS"}),
    "reboot": ("1, 2, 3, None", {"EINVAL"}),
    "unshare": ("0x10000000", {"done", "ENOSPC", "EUSERS"}),  # last: where it is done, the rest is refused
}
CALLS = "\n".join(f"results[{name!r}] = tried({name!r}, {arguments})" for name, (arguments, _) in SAMPLE.items())
EACH = f"""
place = sys.argv[1]
def body():
    results = {{"pid": os.getpid()}}
    {CALLS.replace(chr(10), chr(10) + "    ")}
    print(json.dumps(results), flush=True)
"""


def run(code: str, *arguments: str, timeout: float = 60) -> list[Any]:
    """Each line that the code prints. A caller that nobody answers would wait for good: the time-out makes that a failure."""
    done = subprocess.run(
        [sys.executable, "-c", HARNESS + code, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if "no listener" in lines:
        pytest.skip("this kernel tells nobody about refused calls, or a filter around us is told already")
    return lines


@pytest.fixture(scope="module")
def under_the_filter(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[list[Any]]]:
    place = str(tmp_path_factory.mktemp("filtered"))
    results, told = run(EACH + "listener = listen()\nheard, code = answer(listener, start(body))\ntell(heard=heard)", place)
    return results, told["heard"]


@pytest.fixture(scope="module")
def without_filter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (results,) = run(EACH + "os.waitpid(start(body), 0)", str(tmp_path_factory.mktemp("free")))
    return dict(results)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_refused_call_is_told_with_its_name_and_its_caller(
    under_the_filter: tuple[dict[str, Any], list[list[Any]]], without_filter: dict[str, Any], name: str
) -> None:
    results, heard = under_the_filter
    assert results[name] == "EPERM"
    assert heard.count([name, results["pid"]]) == 1
    if POWERFUL:  # others are refused some of these by the kernel, too
        assert without_filter[name] in SAMPLE[name][1]


def test_nothing_else_was_told(under_the_filter: tuple[dict[str, Any], list[list[Any]]]) -> None:
    assert [name for name, _ in under_the_filter[1]] == list(SAMPLE)


def test_what_is_told_has_the_arguments() -> None:
    (told,) = run("""
listener = listen()
seen = []
heard, _ = answer(listener, start(lambda: tried("unshare", 0x10000000)), lambda asked: seen.append(asked.arguments) or True)
tell(arguments=seen)
""")
    assert told["arguments"][0][0] == 0x10000000


def test_the_callers_number_is_the_one_of_the_readers_process_namespace() -> None:
    found = run("""
uid, gid = os.geteuid(), os.getegid()
try:
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWPID)
except OSError:
    print(json.dumps("no namespaces"))
    raise SystemExit
def first():
    listener = listen()
    heard, code = answer(listener, start(lambda: tried("setns", -1, 0)))
    tell(heard=heard, me=os.getpid())
    sys.stdout.flush()
os.waitpid(start(first), 0)
""")
    if found == ["no namespaces"]:
        pytest.skip("no namespaces can be made here")
    assert found == [{"heard": [["setns", 2]], "me": 1}]


def test_an_answer_can_be_another_error() -> None:
    (told,) = run("""
listener = listen()
def body():
    os._exit(7 if tried("setns", -1, 0) == "EACCES" else 8)
heard, code = answer(listener, start(body), lambda asked: notifications.refuse(listener, asked, errno.EACCES))
tell(code=code)
""")
    assert told["code"] == 7


def test_many_callers_at_once_are_all_answered() -> None:
    (told,) = run("""
listener = listen()
def body():
    import threading
    refused = []
    def ask():
        for _ in range(50):
            refused.append(tried("setns", -1, 0))
    threads = [threading.Thread(target=ask) for _ in range(8)]
    children = [start(lambda: os._exit(tried("setns", -1, 0) != "EPERM")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert refused == ["EPERM"] * 400
heard, code = answer(listener, start(body))
tell(count=len(heard), code=code, callers=len({pid for _, pid in heard}))
""")
    assert (told["code"], told["count"]) == (0, 408)
    assert told["callers"] >= 9


def test_when_the_reader_closes_the_listener_calls_fail_and_nobody_waits() -> None:
    (told,) = run("""
listener = listen()
def body():
    waiting = tried("setns", -1, 0)
    os._exit(7 if (waiting, tried("setns", -1, 0)) == ("ENOSYS", "ENOSYS") else 8)
pid = start(lambda: (os.close(listener), body()))
poll = select.poll()
poll.register(listener, select.POLLIN)
assert poll.poll(10000)
notifications.read(listener)
os.close(listener)
tell(code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert told["code"] == 7


def test_a_caller_that_is_killed_keeps_nobody_waiting() -> None:
    (told,) = run("""
listener = listen()
poll = select.poll()
poll.register(listener, select.POLLIN)
ask = lambda: os._exit(0 if tried("setns", -1, 0) == "EPERM" else 8)
def end(pid):
    os.kill(pid, signal.SIGKILL)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])

before = start(ask)
assert poll.poll(10000)
ended = [end(before)]
unread = notifications.read(listener)  # readable when it was polled, and gone now

between = start(ask)
assert poll.poll(10000)
asked = notifications.read(listener)
ended.append(end(between))
notifications.refuse(listener, asked, errno.EPERM)

heard, code = answer(listener, start(ask))
tell(ended=ended, unread=unread, later=[len(heard), code])
""")
    assert told == {"ended": [signal.SIGKILL] * 2, "unread": None, "later": [1, 0]}


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (5, 19), reason="before Linux 5.19 a signal makes the caller ask again"
)
def test_signals_do_not_make_a_caller_ask_again() -> None:
    (told,) = run("""
listener = listen()
def body():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    os._exit(7 if tried("setns", -1, 0) == "EPERM" else 8)
pid = start(body)
heard, code = answer(listener, pid, lambda asked: time.sleep(0.1) or True)
tell(count=len(heard), code=code)
""")
    assert told == {"count": 1, "code": 7}


def test_the_listener_is_not_inherited_by_commands() -> None:
    (told,) = run("""
listener = listen()
tell(inheritable=os.get_inheritable(listener))
""")
    assert told == {"inheritable": False}


def test_where_somebody_is_told_already_the_plain_filter_is_installed() -> None:
    (told,) = run("""
listener = listen()
try:
    seccomp.install(seccomp.program(notify=True), listener=True)
    second = "installed"
except OSError as error:
    second = errno.errorcode[error.errno]
fallback = seccomp.install_best(seccomp.program(), seccomp.program(notify=True))
heard, code = answer(listener, start(lambda: os._exit(7 if tried("setns", -1, 0) == "EPERM" else 8)))
tell(second=second, fallback=fallback, heard=heard, code=code)
""")
    assert told == {"second": "EBUSY", "fallback": -1, "heard": [], "code": 7}  # a plain refusal is stronger


def test_nested_namespaces_can_be_made_and_mounted_in_and_the_rest_is_told() -> None:
    found = run("""
listener = listen(nested=True)
def body():
    if tried("unshare", 0x10000000 | 0x20000) != "done":
        os._exit(9)
    mounted = tried("mount", b"none", b"/proc", b"tmpfs", 0, None)
    os._exit(7 if (mounted, tried("keyctl", 9999, 0, 0, 0, 0)) == ("done", "EPERM") else 8)
heard, code = answer(listener, start(body))
tell(heard=[name for name, _ in heard], code=code)
""")
    if found[0]["code"] == 9:
        pytest.skip("no user namespaces can be made here")
    assert found == [{"heard": ["keyctl"], "code": 7}]


PYTHON = """
import multiprocessing, os, socket, subprocess, sys, threading, tempfile
if __name__ == "__main__":
    done = []
    threads = [threading.Thread(target=done.append, args=(n,)) for n in range(8)]
    [t.start() for t in threads]; [t.join() for t in threads]
    assert sorted(done) == list(range(8))
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(len, ["a", "bb"]) == [1, 2]
    subprocess.run(["sh", "-c", "exit 3"]).returncode == 3 or sys.exit(1)
    a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
    with tempfile.TemporaryDirectory() as place:
        os.mkfifo(place + "/fifo")
"""
GCC = "printf '#include <stdio.h>\\nint main(void){puts(\"built\");return 0;}' > a.c && gcc -O1 -g a.c -o a && ./a"
GIT = "git init -q r && cd r && echo a > a && git add a && git -c user.name=a -c user.email=a@b commit -qm a && git gc -q && git status"
NODE = """node -e 'const w = new (require("worker_threads").Worker)("1", {eval: true});
require("fs").readFile("a.py", () => require("child_process").execSync("true"))'"""
TOOLS = {
    "python3": f"{sys.executable} a.py",
    "gcc": GCC,
    "git": GIT,
    "node": NODE,
    "strace": "strace -f -o trace sh -c 'cat a.py > b.py' && grep -q 'b.py' trace",
    "gdb": "gdb -nx -batch -ex 'break main' -ex run -ex bt --args true | grep -q exited",
    "ps": "ps aux",
}


@pytest.mark.parametrize("tool", TOOLS)
def test_ordinary_programs_work_and_have_nothing_refused_that_would_be_told(tmp_path: Path, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    (tmp_path / "a.py").write_text(PYTHON)
    code = """
listener = listen()
os.chdir(sys.argv[1])
os.environ["HOME"] = sys.argv[1]
log = os.open("log", os.O_CREAT | os.O_WRONLY)
def body():
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execvp("sh", ["sh", "-ec", sys.argv[2]])
heard, code = answer(listener, start(body))
tell(heard=heard, code=code)
"""
    (told,) = run(code, str(tmp_path), TOOLS[tool], timeout=110)
    assert told == {"heard": [], "code": 0}, (tmp_path / "log").read_text()


def test_every_call_of_the_filter_has_a_name_and_an_explanation() -> None:
    for number, (called, _) in seccomp.calls().items():
        assert notifications.name(number) == called
        assert notifications.number(called) == number
        found = notifications.explain(number)
        assert found.kind in ("syscall", "device", "policy")
        assert found.rule != notifications.explain(9999).rule
        assert found.how_to_allow
    assert {called for called, _ in seccomp.calls().values()} >= {"mount", "unshare", "clone", "mknodat", "setns", "keyctl"}


@pytest.mark.parametrize(
    ("called", "kind", "word"),
    [
        ("mount", "syscall", "--nested"),
        ("pivot_root", "syscall", "--nested"),
        ("unshare", "syscall", "--nested"),
        ("clone", "syscall", "--nested"),
        ("setns", "syscall", "--nested"),
        ("init_module", "syscall", "virtual machine"),
        ("kexec_load", "syscall", "virtual machine"),
        ("keyctl", "syscall", "nothing"),
        ("mknodat", "device", "--device"),
        ("socket", "policy", "nothing"),
    ],
)
def test_an_explanation_says_what_would_allow_it(called: str, kind: str, word: str) -> None:
    number = notifications.number(called)
    assert number is not None
    found = notifications.explain(number)
    assert found.kind == kind
    assert word in found.how_to_allow


def test_a_call_that_nobody_knows_still_has_a_word_and_an_explanation() -> None:
    assert notifications.name(9999) == "syscall-9999"
    assert notifications.explain(9999).kind == "syscall"
    assert notifications.number("syscall-9999") is None


@pytest.mark.parametrize(("given", "flags"), [(0, [0x28]), (errno.EINVAL, [0x28, 0x08])])
def test_kernels_before_5_19_give_a_listener_without_the_newer_flag(
    monkeypatch: pytest.MonkeyPatch, given: int, flags: list[int]
) -> None:
    asked = []

    def kernel(operation: int, wanted: int, program: bytes | None) -> int:
        asked.append(wanted)
        if given and wanted & 0x20:
            raise OSError(given, "seccomp")
        return 5

    monkeypatch.setattr(syscalls, "seccomp", kernel)
    monkeypatch.setattr(syscalls, "prctl", lambda *_: 0)
    monkeypatch.setattr(syscalls, "seccomp_notification_sizes", lambda: (80, 24, 64))
    assert seccomp.install(b"", listener=True) == 5
    assert asked == flags


def test_notifications_of_a_size_that_is_not_known_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = []
    monkeypatch.setattr(syscalls, "seccomp", lambda _, flags, program: installed.append((flags, program)) or 0)
    monkeypatch.setattr(syscalls, "prctl", lambda *_: 0)
    monkeypatch.setattr(syscalls, "seccomp_notification_sizes", lambda: (96, 24, 64))
    assert seccomp.install_best(b"plain", b"telling") == -1
    assert installed == [(0, b"plain")]
