"""What this kernel lets this process do, found out by really trying: each attempt in a child of its own, bounded in time.

Reading a version number or a setting would not tell what a container's filter, a security module or a sysctl forbids.
"""

import contextlib
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable

from elsewhere.linux import landlock, network, seccomp, userns
from elsewhere.linux import syscalls as sys_
from elsewhere.values import dataclass

__all__ = [
    "Attempt",
    "attempt",
    "filter_can_be_installed",
    "idmap",
    "landlock_version",
    "mounts",
    "network_namespace",
    "overlay",
    "proc",
    "refusals_are_told",
    "scoping",
    "user_namespace",
]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of it: `text` is the result, or the reason why there is none."""

    ok: bool
    text: str
    seconds: float


def attempt(function: Callable[[], str | None], limit: float = 3.0) -> Attempt:
    """Run `function` in a child process; what it does to namespaces, mounts and privileges ends with the child."""
    began = time.monotonic()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setpgid(0, 0)
        try:
            said = b"+" + (function() or "").encode(errors="replace")
        except BaseException as error:  # the child's whole purpose is to say what happened
            said = b"-" + (getattr(error, "strerror", None) or str(error) or type(error).__name__).encode(errors="replace")
        os.write(writer, said[:4096])
        os._exit(0)
    os.close(writer)
    try:
        ready = select.select([reader], [], [], limit)[0]
        said = os.read(reader, 4096) if ready else b""
    finally:
        os.close(reader)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    took = time.monotonic() - began
    if not said:
        return Attempt(False, "died without an answer" if ready else f"no answer within {limit:.0f} s", took)
    return Attempt(said[:1] == b"+", said[1:].decode(errors="replace"), took)


def network_namespace() -> str:
    """Why programs that know no proxy cannot be led to one in it; empty if they can."""
    if os.geteuid() == 0:
        sys_.unshare(sys_.CLONE_NEWNET)
    else:
        _enter_user_namespace(sys_.CLONE_NEWNET)
    network.raise_loopback()
    return network.open_ports()[1]


def _enter_user_namespace(flags: int = 0) -> None:
    uid, gid = os.getuid(), os.getgid()
    sys_.unshare(sys_.CLONE_NEWUSER | flags)
    userns.map_myself(uid, gid)


def user_namespace() -> None:
    _enter_user_namespace()


def mounts() -> None:
    """A mount namespace in which something can be mounted: some hosts allow the first and forbid the second."""
    _enter_user_namespace(sys_.CLONE_NEWNS)
    sys_.mount(None, "/", None, sys_.MS_REC | sys_.MS_PRIVATE)
    os.close(sys_.open_tree(sys_.AT_FDCWD, "/", sys_.OPEN_TREE_CLONE | sys_.AT_RECURSIVE))
    context = sys_.fsopen("tmpfs")
    sys_.fsconfig_create(context)
    sys_.fsmount(context)


def proc() -> None:
    """proc of an own process namespace; refused where parts of the host's proc are covered, as in most containers."""
    _enter_user_namespace(sys_.CLONE_NEWNS | sys_.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        try:
            context = sys_.fsopen("proc")
            sys_.fsconfig_create(context)
            sys_.fsmount(context)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if number:
        raise OSError(number, os.strerror(number))


def overlay(directory: str) -> Callable[[], None]:
    """Whether `directory` can hold the upper of an overlay made in a user namespace."""

    def trial() -> None:
        with tempfile.TemporaryDirectory(dir=directory) as place:
            for name in ("lower", "upper", "work"):
                os.mkdir(os.path.join(place, name))
            # In a grandchild, since only who is still the host's user can remove the directory.
            pid = os.fork()
            if pid == 0:
                try:
                    _enter_user_namespace(sys_.CLONE_NEWNS)
                    os.chdir(place)
                    options = "lowerdir=lower,upperdir=upper,workdir=work,userxattr,index=off,metacopy=off"
                    sys_.mount("overlay", place, "overlay", 0, options)
                except OSError as error:
                    os._exit(error.errno or 1)
                os._exit(0)
            number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            for name in ("work/work", "work/index"):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(place, name))
            if number:
                raise OSError(number, os.strerror(number))

    return trial


def idmap(path: str) -> Callable[[], None]:
    """Whether the file system below `path` knows id-mapped mounts; root only."""

    def trial() -> None:
        holder = os.fork()
        if holder == 0:
            signal.alarm(5)
            sys_.unshare(sys_.CLONE_NEWUSER)
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(holder, os.WUNTRACED)
        try:
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{holder}/{name}", "w", encoding="ascii") as stream:
                    stream.write("0 1073741824 65536")
            userns = os.open(f"/proc/{holder}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            fd = sys_.open_tree(sys_.AT_FDCWD, path, sys_.OPEN_TREE_CLONE)
            sys_.mount_setattr(fd, "", sys_.AT_EMPTY_PATH, attr_set=sys_.MOUNT_ATTR_IDMAP, userns_fd=userns)
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)

    return trial


def landlock_version() -> str:
    return str(landlock.abi())


def scoping() -> None:
    if not landlock.scope():
        raise OSError(0, "this kernel's Landlock knows no scopes")


def refusals_are_told() -> None:
    if seccomp.install_best(seccomp.program(), seccomp.program(notify=True)) < 0:
        raise OSError(0, "the kernel gives no listener")


def filter_can_be_installed() -> None:
    seccomp.install(seccomp.program())
