"""Starting a program from the keeper: like a shell would, in a session of its own, on the descriptors that were handed in.

A program has its parent's limits and is in its parent's group. What is to hold for it and not for the keeper, its process has to
take on before it becomes the program (`Own`): that takes a fork, which costs more than `posix_spawn`.
"""

import errno
import fcntl
import os
import resource
import signal
import struct
import termios
from collections.abc import Callable
from typing import Any, NoReturn

from elsewhere.values import dataclass

__all__ = ["Own", "start", "terminal"]

_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430
_RESET = [number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP)]


def terminal(rows: int, columns: int) -> tuple[int, str]:
    """A new terminal of the sandbox's own: the master's descriptor and the name of its other side."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
    number = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, struct.pack("i", 0)))[0]
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return master, f"/dev/pts/{number}"


@dataclass(frozen=True, slots=True)
class Own:
    """What a program has that the keeper has not: a limit of descriptors, a group that is entered."""

    open_files: int | None = None
    enter: Callable[[], None] | None = None


def start(argv: list[str], environment: dict[str, str], fds: list[int], terminal_name: str | None, own: Own | None = None) -> int:
    """Like execvp, with the search path of the command's own environment; a script without `#!` goes to the shell. `fds` are
    its 0, 1 and 2; with a terminal, that is all three of them, or all but the last."""
    if len(fds) > 3 or (terminal_name is None and len(fds) < 3):
        raise OSError(errno.EMFILE, "descriptors are missing")
    if terminal_name is None:
        actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
    else:
        actions = [(os.POSIX_SPAWN_OPEN, 0, terminal_name, os.O_RDWR, 0), (os.POSIX_SPAWN_DUP2, 0, 1)]
        actions.append((os.POSIX_SPAWN_DUP2, fds[0] if fds else 0, 2))
    name = argv[0]
    places = [name] if "/" in name else [f"{place or '.'}/{name}" for place in environment.get("PATH", "").split(":")]
    refusal = OSError(errno.ENOENT, "not found")
    for path in filter(os.path.lexists, places):  # looking costs a fraction of a failed start
        try:
            return _spawn(path, argv, environment, actions, own)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                return _spawn("/bin/sh", ["/bin/sh", path, *argv[1:]], environment, actions, own)
            if error.errno == errno.ENOENT:
                error = OSError(errno.EACCES, "the program that should run it is missing")
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refusal = error
    raise refusal


def _spawn(path: str, argv: list[str], environment: dict[str, str], actions: list[Any], own: Own | None) -> int:
    # A session of its own: no terminal of the host can be its controlling terminal, and one of ours becomes it when opened.
    if own is None:
        return os.posix_spawn(path, argv, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            _become(path, argv, environment, actions, own, writer)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        refusal = os.read(reader, 16)  # nothing, as soon as it has become the program
    finally:
        os.close(reader)
    if refusal:
        os.waitpid(pid, 0)
        raise OSError(int(refusal), os.strerror(int(refusal)))
    return pid


def _become(path: str, argv: list[str], environment: dict[str, str], actions: list[Any], own: Own, writer: int) -> NoReturn:
    """What `posix_spawn` does, in a process of our own."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for kind, *words in actions:
            if kind == os.POSIX_SPAWN_DUP2:
                os.dup2(words[0], words[1])
            else:
                opened = os.open(words[1], words[2])
                os.dup2(opened, words[0])
                os.close(opened)
        if own.enter is not None:
            own.enter()
        if own.open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (own.open_files, own.open_files))
        os.execve(path, argv, environment)
    except OSError as error:
        os.write(writer, b"%d" % (error.errno or errno.EINVAL))
    except ValueError:
        os.write(writer, b"%d" % errno.EINVAL)
    finally:
        os._exit(127)
