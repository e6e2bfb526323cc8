"""A stock Debian 12 machine under software emulation: kernel 6.1, systemd, cgroup v2, no network.

The kernel that tests run on shows only one way through the code. This one is older (no overlay layers by descriptor, for
one), is set up by systemd, and has an ordinary user with a session, so it shows the others. No KVM is used: tests have to run
on a virtual machine that cannot nest as well.

    <cache>/                    `.cache/vm` in the checkout, or $ELSEWHERE_VM_CACHE
      lock                      held while an image is built and while a machine runs: two at once only slow each other down
      <hash of the recipe>/     root.img, vmlinuz, initrd, build.log; there is one, a changed recipe replaces it
      building-*/ running-*/    work in progress, renamed or removed at the end
      output.log console.log    of the last boot, written while it runs: follow them with `tail -f`
      emulator.log              what the emulator itself had to say about it

A folder becomes the machine's second disk, at `FOLDER`. A command runs in it, by root, once the machine is up; what it prints
and its exit code come back, and the machine is switched off. Not here: what is tested in it (`test_vm.py`).
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOLDER", "USER", "MachineError", "Outcome", "boot", "cache_directory", "why_not"]

USER = "dev"
FOLDER = "/media/folder"

_SUITE = "bookworm"
_PACKAGES = (
    "linux-image-cloud-amd64 systemd-sysv dbus dbus-user-session libpam-systemd udev kmod passwd procps iproute2 util-linux "
    "uidmap python3 python3-venv git fuse-overlayfs fuse3 strace tmux libcap2-bin attr acl"
).split()
_JOB = ".job"
_OUTPUT_PORT = "elsewhere.output"
_END = re.compile(rb"\n?the job ended with (\d+)\n\Z")

_RUN_JOB = f"""\
#!/bin/sh
# The port can be opened once only: everything below inherits it.
exec >/dev/virtio-ports/{_OUTPUT_PORT} 2>&1 </dev/null
mount --mkdir /dev/vdb {FOLDER} && cd {FOLDER} && ./{_JOB}
printf '\\nthe job ended with %s\\n' $?
systemctl poweroff --force --force >/dev/null 2>&1
"""
_UNIT = """\
[Unit]
Description=What the second disk asks for
After=multi-user.target user@1000.service

[Service]
Type=oneshot
ExecStart=/usr/local/sbin/run-job
TimeoutStartSec=infinity

[Install]
WantedBy=multi-user.target
"""
_FILES = {
    "etc/hostname": ("machine\n", 0o644),
    "etc/hosts": ("127.0.0.1 localhost machine\n::1 localhost\n", 0o644),
    "etc/systemd/system/job.service": (_UNIT, 0o644),
    "usr/local/sbin/run-job": (_RUN_JOB, 0o755),
    # Their own service managers run without anybody being logged in: a user has no cgroup of their own without one, and
    # nobody's /run/user comes or goes while somebody else's tests compare the machine before with the machine after.
    f"var/lib/systemd/linger/{USER}": ("", 0o644),
    "var/lib/systemd/linger/root": ("", 0o644),
}
_LINKS = {
    "etc/systemd/system/multi-user.target.wants/job.service": "../job.service",
    # Chores of a machine that lives long; here they would only take time away from what is tested.
    **{
        f"etc/systemd/system/{name}": "/dev/null"
        for name in ("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer", "fstrim.timer", "dpkg-db-backup.timer")
    },
}
_HOOKS = (f'chroot "$1" useradd --create-home --uid 1000 --shell /bin/bash {USER}',)
_ROOT_SIZE = "4G"
_FOLDER_SIZE = "1G"
_BUILD_LIMIT_S = 900.0

# Debian keeps administrators' programs out of an ordinary user's search path.
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_TO_BUILD = {"mmdebstrap": "mmdebstrap"}
_TO_BOOT = {"qemu-system-x86_64": "qemu-system-x86", "mkfs.ext4": "e2fsprogs", "setpriv": "util-linux"}


class MachineError(Exception):
    """The machine could not be built or did not get as far as the job; says what to look at."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job went; without an exit code it was stopped at the time limit."""

    exit_code: int | None
    output: str
    console: str
    seconds: float


def cache_directory() -> Path:
    named = os.environ.get("ELSEWHERE_VM_CACHE")
    return Path(named).absolute() if named else Path(__file__).resolve().parents[2] / ".cache" / "vm"


def why_not() -> str | None:
    """What keeps the machine from being used here, in words that say what to install; nothing when it can be."""
    if platform.machine() != "x86_64":
        return f"the machine is an x86_64 one, and its image is built natively; this is {platform.machine()}"
    built = _image_directory().is_dir()
    needed = _TO_BOOT if built else {**_TO_BUILD, **_TO_BOOT}
    absent = sorted({package for program, package in needed.items() if shutil.which(program, path=_PATH) is None})
    if absent:
        return f"not installed, Debian's {', '.join(absent)}: apt-get install {' '.join(absent)}"
    if not built and os.geteuid() != 0:
        return f"building the image ({', '.join(_TO_BUILD.values())}) needs root, once; nothing is in {cache_directory()} yet"
    return None


def boot(folder: Path, command: list[str], *, limit: float) -> Outcome:
    """Run a command in `folder` in a fresh machine: nothing that it does to either disk outlives it. The image is built first,
    if this recipe never was; that does not count towards the limit."""
    with _lock():
        directory = _image_directory()
        if not directory.is_dir():
            _build(directory)
        with _scratch("running-") as scratch:
            (folder / _JOB).write_text(f"#!/bin/sh\nexec {shlex.join(command)}\n")
            (folder / _JOB).chmod(0o755)
            _file_system(folder, scratch / "folder.img", _FOLDER_SIZE)
            return _job(directory, scratch / "folder.img", limit, scratch)


def _job(directory: Path, disk: Path, limit: float, temporary: Path) -> Outcome:
    logs = output, console, emulator = [cache_directory() / f"{name}.log" for name in ("output", "console", "emulator")]
    for log in logs:
        log.unlink(missing_ok=True)
    started = time.monotonic()
    code = _run(_emulator(directory, disk, output, console), emulator, limit, temporary)
    said = output.read_bytes() if output.exists() else b""
    end = _END.search(said)
    if end is None and code is not None:
        raise MachineError(
            f"the machine went away before the job ended (the emulator: exit code {code}, {_tail(emulator) or 'no message'}); "
            f"what the job said is in {output}, the end of the console:\n{_tail(console)}"
        )
    return Outcome(
        exit_code=int(end[1]) if end else None,
        output=(said[: end.start()] if end else said).decode(errors="replace"),
        console=console.read_text(errors="replace").replace("\r", "") if console.exists() else "",
        seconds=time.monotonic() - started,
    )


def _image_directory() -> Path:
    recipe = (_SUITE, _PACKAGES, _FILES, _LINKS, _HOOKS, _ROOT_SIZE)
    return cache_directory() / hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]


def _build(directory: Path) -> None:
    """Aside, then renamed: an image is either whole or not there."""
    reason = why_not()
    if reason:
        raise MachineError(reason)
    with _scratch("building-") as scratch:
        scratch.chmod(0o755)
        tree, result = scratch / "tree", scratch / "image"
        result.mkdir()
        log = result / "build.log"
        hooks = [f"--customize-hook={hook}" for hook in _HOOKS]
        what = ["--mode=root", "--variant=minbase", "--format=directory", f"--include={','.join(_PACKAGES)}", *hooks]
        if _run(["mmdebstrap", *what, _SUITE, str(tree)], log, _BUILD_LIMIT_S, scratch) != 0:
            raise MachineError(f"the image could not be built, mmdebstrap says:\n{_tail(log)}")
        _furnish(tree)
        for name, pattern in (("vmlinuz", "vmlinuz-*"), ("initrd", "initrd.img-*")):
            (found,) = (tree / "boot").glob(pattern)
            shutil.copy(found, result / name)
        _file_system(tree, result / "root.img", _ROOT_SIZE)
        for older in _older_images():
            shutil.rmtree(older)
        result.rename(directory)


def _older_images() -> list[Path]:
    return [path for path in cache_directory().iterdir() if re.fullmatch(r"[0-9a-f]{16}", path.name)]


def _furnish(tree: Path) -> None:
    for name, (content, mode) in _FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content)
        (tree / name).chmod(mode)
    for name, target in _LINKS.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).unlink(missing_ok=True)
        (tree / name).symlink_to(target)


def _file_system(folder: Path, disk: Path, size: str) -> None:
    """Filled while it is made, so that nothing has to be mounted and no root is needed. Sparse: only what is in it takes room."""
    command = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", "-d", str(folder), str(disk), size]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _PATH})
    if done.returncode:
        raise MachineError(f"{' '.join(command)}: {done.stderr.strip()}")


def _emulator(directory: Path, disk: Path, output: Path, console: Path) -> list[str]:
    """Both disks are opened as snapshots: what the machine writes goes to a nameless file, the image stays as it was built.

    A plain processor: what newer ones can do costs a third more time to emulate (wide vectors above all)."""
    how = "if=virtio,format=raw,snapshot=on,cache=unsafe"
    return [
        *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "qemu64", "-smp", "2", "-m", "3072"),
        *("-nodefaults", "-display", "none", "-no-reboot", "-nic", "none"),
        *("-kernel", str(directory / "vmlinuz"), "-initrd", str(directory / "initrd")),
        *("-append", "root=/dev/vda rw console=ttyS0 panic=-1 mitigations=off systemd.show_status=no"),
        *("-drive", f"file={_escaped(directory / 'root.img')},{how}", "-drive", f"file={_escaped(disk)},{how}"),
        *("-serial", f"file:{console}", "-chardev", f"file,id=output,path={_escaped(output)}"),
        *("-device", "virtio-serial-pci", "-device", f"virtserialport,chardev=output,name={_OUTPUT_PORT}"),
        *("-device", "virtio-rng-pci"),
    ]


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")


def _run(command: list[str], log: Path, limit: float, temporary: Path) -> int | None:
    """The exit code, or nothing where it had to be stopped. It ends with us, however we end: `finally` sees to interrupts and to
    the time limit of a test, the death signal to everything that runs no `finally`."""
    environment = {**os.environ, "PATH": _PATH, "TMPDIR": str(temporary), "LC_ALL": "C.UTF-8"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole session, politely first: mmdebstrap takes its own mounts away when it is asked to end."""
    for number, grace in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(prefix: str) -> Iterator[Path]:
    """Beside the images, not in /tmp: that may be memory. Who was killed left theirs here; who holds the lock clears up."""
    for left in cache_directory().glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=prefix, dir=cache_directory()))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _tail(path: Path, lines: int = 25) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""
