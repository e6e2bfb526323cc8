"""The minimum boundary: what a command inside cannot see, keep, or do."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from test_ladder import Elsewhere

from conftest import Person, about_process, eventually


def inside(person: Person, line: str, **more: object) -> "tuple[int, str, str]":
    document = person.json("run", "--discard", "-c", line, **more)
    command = document["command"]
    return command["exit_code"], command["stdout"], command["stderr"]


def python_inside(person: Person, code: str) -> str:
    done = person.elsewhere("run", "--discard", "--", person.python, "-I", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- powers ---


def test_capabilities_are_the_kept_ones_and_nothing_can_be_gained(person: Person) -> None:
    _, status, _ = inside(person, "cat /proc/self/status")
    values = dict(line.split(":\t") for line in status.splitlines())
    wanted = "00000000a80405ff" if person.is_root else "0" * 16
    assert {values[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {wanted}
    assert values["CapAmb"] == values["CapInh"] == "0" * 16
    assert values["NoNewPrivs"] == "1"
    assert values["Seccomp"] == "2"


def test_root_inside_is_nobody_outside(root: Person) -> None:
    document = root.json("run", "--", "sh", "-c", "id -u; touch mine")
    assert document["command"]["stdout"] == "0\n"
    made = next((root.state / "sandboxes" / document["sandbox"]["id"]).rglob("mine"))
    assert made.stat().st_uid == 1 << 30


@pytest.mark.one_launcher
@pytest.mark.parametrize(
    "call",
    [
        "mount(None, b'/mnt', b'tmpfs', 0, None)",
        "umount2(b'/proc', 2)",
        "unshare(0x10000000)",
        "unshare(0x00020000)",
        "setns(os.open('/proc/self/ns/net', 0), 0)",
        "pivot_root(b'.', b'.')",
        "sethostname(b'x', 1)",
        "swapon(b'/x', 0)",
        "acct(b'/x')",
        "syscall(321, 0, 0, 0)",  # bpf
        "syscall(425, 1, 0)",  # io_uring_setup
        "syscall(298, 0, 0, 0, 0, 0)",  # perf_event_open
        "syscall(250, 0, 0)",  # keyctl
        "syscall(430, b'tmpfs', 0)",  # fsopen
        "syscall(428, -100, b'/', 1)",  # open_tree
        "syscall(56, 0x10000011, 0, 0, 0, 0)",  # clone with a user namespace
    ],
)
def test_what_containers_deny_is_denied(person: Person, call: str) -> None:
    code = (
        f"import ctypes, os, errno; c = ctypes.CDLL(None, use_errno=True); print(c.{call}, errno.errorcode[ctypes.get_errno()])"
    )
    assert python_inside(person, code) == "-1 EPERM\n"


def test_threads_and_processes_still_work(person: Person) -> None:
    code = (
        "import multiprocessing, threading; t = threading.Thread(target=print, args=('thread',), kwargs={'flush': True}); t.start(); t.join();"
        "p = multiprocessing.get_context('fork').Process(target=print, args=('process',)); p.start(); p.join(); print(p.exitcode)"
    )
    assert python_inside(person, code) == "thread\nprocess\n0\n"


def test_set_user_id_programs_gain_nothing(user: Person) -> None:
    if not shutil.which("su"):
        pytest.skip("needs su")
    code, out, _ = inside(user, "su -c id 2>&1 </dev/null")
    assert code != 0
    assert "uid=0" not in out


# -- what is seen ---


def test_processes_of_the_host_are_not_seen(person: Person) -> None:
    _, out, _ = inside(
        person, "ls -d /proc/[0-9]* | wc -l; cat /proc/1/environ /proc/1/maps; kill -9 1; kill -TERM 1; echo alive"
    )
    assert int(out.split()[0]) < 8
    assert out.endswith("alive\n")
    assert "ELSEWHERE_HOME" not in out


def test_the_keeper_cannot_be_traced_or_read(person: Person) -> None:
    code = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.ptrace(16, 1, 0, 0))"
    assert python_inside(person, code) == "-1\n"
    _, out, err = inside(person, "ls /proc/1/fd /proc/1/root /proc/1/cwd; cat /proc/1/mem")
    assert out == ""
    assert "Permission denied" in err


CREDENTIALS = [
    ".ssh/id_ed25519",
    ".aws/credentials",
    ".netrc",
    ".config/gh/hosts.yml",
    ".gnupg/key",
    ".claude/token",
    ".docker/config.json",
]


def test_credentials_are_hidden(person: Person) -> None:
    for name in CREDENTIALS:
        (person.home / name).parent.mkdir(parents=True, exist_ok=True)
        (person.home / name).write_text("s3cret")
    (person.home / ".bashrc").write_text("visible")
    person.own(person.home)
    line = "cat " + " ".join(f"$HOME/{name}" for name in CREDENTIALS) + "; grep -rs s3cret $HOME; cat $HOME/.bashrc"
    _, out, _ = inside(person, line)
    assert out == "visible"


def test_a_credential_place_that_is_a_link_is_hidden_where_it_leads(person: Person) -> None:
    real = person.place / "real-ssh"
    real.mkdir()
    (real / "id").write_text("s3cret")
    (person.home / ".ssh").symlink_to(real)
    person.own(person.place / "real-ssh")
    _, out, _ = inside(person, f"cat $HOME/.ssh/id {real}/id")
    assert out == ""


def test_a_place_that_comes_later_is_hidden_in_the_next_sandbox(person: Person) -> None:
    """Sandboxes that were raised ahead of time do not show what has to be hidden since."""
    assert person.elsewhere("run", "--", "true").returncode == 0
    assert eventually(lambda: len(list((person.state / "spare").iterdir())) >= 2)
    (person.home / ".ssh").mkdir()
    (person.home / ".ssh" / "id").write_text("s3cret")
    person.own(person.home)
    _, out, _ = inside(person, "cat $HOME/.ssh/id")
    assert out == ""


def test_elsewheres_own_state_is_hidden(person: Person) -> None:
    code, out, _ = inside(person, f"ls {person.state}; cat {person.state}/schema")
    assert code != 0
    assert out == ""


def test_passwords_are_not_readable_and_accounts_still_work(root: Person) -> None:
    if not Path("/etc/shadow").exists():
        pytest.skip("no /etc/shadow here")
    _, out, _ = inside(root, "cut -d: -f2 /etc/shadow | sort -u; su nobody -s /bin/sh -c 'id -u'")
    words = out.split()
    assert words[-1] == "65534"
    assert all(word.startswith(("!", "*")) for word in words[:-1])
    document = root.json("run", "--", "true")
    assert document["changes"] == {"added": [], "modified": [], "deleted": []}


def test_accounts_can_be_added_inside(root: Person) -> None:
    if not shutil.which("useradd"):
        pytest.skip("needs useradd")
    document = root.json("run", "-c", "useradd -m newcomer && su newcomer -c 'id -un; cd; pwd'")
    assert document["command"]["stdout"] == "newcomer\n/home/newcomer\n", document["command"]
    assert {"/etc/passwd", "/etc/shadow"} <= set(document["changes"]["modified"])


def test_sockets_of_the_host_cannot_be_reached(person: Person) -> None:
    """A server in the project, one beside it, one in /run or /tmp: none answers."""
    server = subprocess.Popen(
        [
            person.python,
            "-c",
            "import socket, sys, time\nfor path in sys.argv[1:]:\n s = socket.socket(socket.AF_UNIX); s.bind(path); s.listen(); globals()[path] = s\n"
            "print('up', flush=True); time.sleep(100)",
            str(person.project / "in-project"),
            str(person.place / "beside"),
            f"/tmp/elsewhere-socket-{os.getpid()}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        **person.identity(),
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        code = (
            "import socket, sys\n"
            f"for path in ({str(person.project / 'in-project')!r}, {str(person.place / 'beside')!r}, '/tmp/elsewhere-socket-{os.getpid()}'):\n"
            " s = socket.socket(socket.AF_UNIX)\n"
            " try: s.connect(path); print('reached', path)\n"
            " except OSError: print('no')\n"
        )
        assert python_inside(person, code) == "no\nno\nno\n"
    finally:
        server.kill()
        server.communicate()
        Path(f"/tmp/elsewhere-socket-{os.getpid()}").unlink()


# -- descriptors and terminals ---


def test_no_descriptor_is_inherited(person: Person) -> None:
    """Neither from the caller nor from whoever started the launcher."""
    secret = person.place / "secret"
    secret.write_text("s3cret")
    with secret.open() as stream:
        os.set_inheritable(stream.fileno(), True)
        done = person.elsewhere("run", "--", "sh", "-c", "ls /proc/self/fd", pass_fds=[stream.fileno()])
    assert done.stdout.split() == ["0", "1", "2", "3"]


def test_the_hosts_terminal_is_nobodys_controlling_terminal(person: Person) -> None:
    done = person.elsewhere("run", "--", person.python, "-c", "open('/dev/tty')")
    assert "No such device" in done.stderr


def test_keys_cannot_be_pushed_into_a_terminal(person: Person) -> None:
    code = (
        "import fcntl, os, pty, termios; m, s = pty.openpty()\n"
        "for request in (0x5412, 0x541C):\n"
        " try: fcntl.ioctl(s, request, b'x'); print('pushed')\n"
        " except OSError as error: print(error.errno)\n"
    )
    assert python_inside(person, code) == "1\n1\n"


# -- the keeper ---


def test_the_keeper_imports_nothing_once_the_root_is_the_sandboxs(root: Person) -> None:
    """Traced while it starts commands, fails to, times out and reaps: it opens no file but what it is asked to use."""
    if not shutil.which("strace"):
        pytest.skip("needs Debian's strace")
    code = """
import os, subprocess, sys, time
from pathlib import Path
from elsewhere import ElsewhereError, Sandbox
with Sandbox.create() as box:
    children = subprocess.run(['ps', '-eo', 'pid='], capture_output=True, text=True).stdout.split()
    def keepers():
        for pid in children:
            try:
                status = Path(f'/proc/{pid}/status').read_text()
                root = os.stat(f'/proc/{pid}/root/proc/1')
                environ = Path(f'/proc/{pid}/environ').read_bytes()
            except OSError:
                continue
            ns = next(line for line in status.splitlines() if line.startswith('NSpid')).split()
            if len(ns) == 3 and ns[2] == '1' and os.environ['ELSEWHERE_HOME'].encode() in environ:
                yield pid
    traces = [subprocess.Popen(['strace', '-qq', '-e', 'trace=open,openat,openat2,execve', '-o', f'{sys.argv[1]}.{pid}', '-p', pid]) for pid in keepers()]
    time.sleep(1)
    box.run('true')
    box.run('sleep 5', timeout=0.2)
    box.run('sleep 100 & exit 3')
    for bad in (['no-such'], ['./README.md'], '/'):
        try:
            box.run(bad if isinstance(bad, list) else ['true'], cwd=None if isinstance(bad, list) else 'missing')
        except ElsewhereError:
            pass
for trace in traces:
    trace.terminate()
    trace.wait(20)
"""
    trace = root.place / "trace"
    root.shell(root.python, "-W", "ignore", "-c", code, trace, cwd=root.project)
    seen = "".join(path.read_text(errors="replace") for path in root.place.glob("trace.*"))
    opened = [line for line in seen.splitlines() if "open" in line]
    assert opened, "nothing was traced"
    # The directories are those of its own layers, which it looks after: names only, by way of a mount that ends there.
    unexpected = [line for line in opened if not any(place in line for place in ('"/proc', '"/dev/', "O_DIRECTORY"))]
    assert not unexpected, unexpected


# -- the host's mounts ---


def test_every_mount_of_the_host_is_overlaid_read_only_or_not_shown(person: Person) -> None:
    """More mounts than this host has: a tmpfs, one on top of it, a bound file, a mount below the project and below home."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    for name in ("data", "project/sub", "home/sub"):
        (person.place / name).mkdir()
    (person.place / "file").write_text("file")
    person.own(person.place)
    host = Elsewhere(
        person,
        *("--tmpfs", str(person.place / "data")),
        *("--tmpfs", str(person.project / "sub")),
        *("--tmpfs", str(person.home / "sub")),
        *("--bind", f"{person.place / 'file'}:/etc/resolv.conf"),
    )
    places = [
        person.place / "data",
        person.project / "sub",
        person.home / "sub",
        Path("/etc"),
        Path("/usr"),
        person.project,
        person.home,
    ]
    line = "; ".join(f"echo x > {place}/written 2>/dev/null && echo wrote {place}" for place in places)
    _, document, errors = host("run", "--json", "--keep", "-c", f"{line}; cat /etc/resolv.conf; echo x > /etc/resolv.conf")
    assert "file" in document["command"]["stdout"], errors
    for place in places:
        assert not (place / "written").exists()
    assert (person.place / "file").read_text() == "file"
    _, found, _ = host("inspect", "--json", document["sandbox"]["id"])
    plan = {step["target"]: step["what"] for step in found["sandbox"]["plan"]}
    assert plan["/tmp"].startswith("private")
    if person.is_root:
        assert {plan[str(place)] for place in places[:3]} == {f"copy on write over {place}" for place in places[:3]} & set(
            plan.values()
        )
        assert plan["/etc/resolv.conf"].startswith("read-only")
    explained = host.words("run", "--explain", "--", "true")
    assert "/proc" in explained
    assert "copy on write over" in explained


def test_autofs_is_not_triggered(person: Person) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    if "autofs" not in Path("/proc/filesystems").read_text():
        pytest.skip("this kernel has no autofs")
    place = person.place / "auto"
    place.mkdir()
    host = Elsewhere(person, "--autofs", str(place))
    code, document, errors = host("run", "--json", "-c", f"ls -d {place}; ls {place.parent} >/dev/null; echo done")
    assert code == 0, errors
    assert "done" in document["command"]["stdout"]
    assert "triggered" not in errors


def test_the_plan_can_be_compared_and_described(person: Person) -> None:
    first = person.json("run", "--keep", "--", "true")["sandbox"]["id"]
    second = person.json("run", "--keep", "--", "true")["sandbox"]["id"]
    plans = [person.json("inspect", box)["sandbox"]["plan"] for box in (first, second)]
    assert plans[0] == plans[1]
    assert all(set(step) == {"target", "what"} for step in plans[0])
    assert json.dumps(plans[0])


def test_kernel_settings_cannot_be_written(person: Person) -> None:
    line = "echo x > /proc/sys/kernel/core_pattern; echo 1 > /proc/sysrq-trigger; echo 1 > /proc/sys/vm/drop_caches; echo $?"
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    _, out, err = inside(person, line)
    assert out.strip() != "0"
    assert "core_pattern" in err
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


def test_root_in_a_container_cannot_write_kernel_settings_or_read_passwords(root: Person) -> None:
    """There, root inside is the host's root without capabilities: ownership alone must not be enough."""
    host = Elsewhere(root, "--overlay-root", "1", "--tmpfs", str(root.state))
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    line = "id -u; echo x > /proc/sys/kernel/core_pattern && echo wrote; cat /etc/shadow"
    _, document, _ = host("run", "--json", "-c", line)
    assert document["sandbox"]["enforced"]["mechanism"] == "overlay-userns"
    assert document["command"]["stdout"] == "0\n"
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


def test_passwords_are_not_readable_on_other_rungs(root: Person) -> None:
    for taken in (["--overlay-state", str(root.state)], ["--deny", "unshare"]):
        code, document, _ = Elsewhere(root, *taken)("run", "--json", "-c", "cat /etc/shadow")
        if "error" in document:
            assert code == 125  # refused altogether: this kernel has no such rung
            continue
        secrets = [line.split(":")[1] for line in document["command"]["stdout"].splitlines() if ":" in line]
        assert all(secret.startswith(("!", "*")) for secret in secrets), document["sandbox"]["enforced"]["mechanism"]


def test_a_sandbox_cannot_have_its_work_told_falsely(person: Person) -> None:
    """Names and attributes that mean deletion to other tools mean nothing here."""
    code = (
        "import contextlib, os; open('.wh.README.md', 'w')\n"
        "with contextlib.suppress(OSError): os.setxattr('src', 'user.overlay.opaque', b'y')\n"  # kernels before 6.7 refuse it
    )
    document = person.json("run", "--", person.python, "-c", code)
    assert document["command"]["exit_code"] == 0, document["command"]
    assert document["changes"] == {"added": [".wh.README.md"], "modified": [], "deleted": []}


def test_a_git_file_does_not_show_what_is_hidden(person: Person) -> None:
    """A repository that a stranger packed may point anywhere."""
    store = person.home / ".password-store"
    person.shell("git", "init", "-q", str(store))
    (store / "secret").write_text("s3cret")
    person.own(person.home)
    project = person.place / "stranger"
    project.mkdir()
    (project / ".git").write_text(f"gitdir: {store}/.git\n")
    person.own(project)
    _, out, _ = inside(person, f"cat {store}/secret", cwd=project)
    assert "s3cret" not in out


def test_a_keeper_that_died_in_stock_is_not_handed_out(person: Person) -> None:
    if os.geteuid() != 0:
        pytest.skip("a keeper hides from its own user: only root finds it")
    assert person.elsewhere("run", "--", "true").returncode == 0
    assert eventually(lambda: len(list((person.state / "spare").iterdir())) >= 3)
    for pid, _ in person.processes():
        status = about_process(pid, "status")
        if next((line for line in status.splitlines() if line.startswith("NSpid:")), "gone").split()[-1] == "1":
            os.kill(pid, 9)
    for _ in range(3):
        assert person.elsewhere("run", "--", "true", timeout=20).returncode == 0


def test_a_state_directory_is_never_somebody_elses_directory(person: Person) -> None:
    (person.place / "full").mkdir()
    (person.place / "full" / "thing").write_text("x")
    person.own(person.place / "full")
    before = (person.place / "full").stat().st_mode
    person.extra["ELSEWHERE_HOME"] = str(person.place / "full")
    done = person.elsewhere("run", "--", "true")
    assert done.returncode == 125
    assert "holds other things" in done.stderr
    assert (person.place / "full").stat().st_mode == before


def test_a_directory_that_a_command_closes_is_told_and_kept(user: Person) -> None:
    document = user.json("run", "--", "chmod", "000", ".")
    assert document["command"]["exit_code"] == 0
    assert document["changes"]["modified"]
    assert document["sandbox"]["state"] == "stopped"
