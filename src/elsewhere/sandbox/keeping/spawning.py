"""Starting a program from the keeper: like a shell would, in a session of its own, on the descriptors that were handed in."""

import errno
import fcntl
import os
import signal
import struct
import termios
from typing import Any

__all__ = ["start", "terminal"]

_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430
_RESET = [number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP)]


def terminal(rows: int, columns: int) -> tuple[int, str]:
    """A new terminal of the sandbox's own: the master's descriptor and the name of its other side."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
    number = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, struct.pack("i", 0)))[0]
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return master, f"/dev/pts/{number}"


def start(argv: list[str], environment: dict[str, str], fds: list[int], terminal_name: str | None) -> int:
    """Like execvp, with the search path of the command's own environment; a script without `#!` goes to the shell. `fds` are
    its 0, 1 and 2; with a terminal, that is all three of them, or all but the last."""
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
            return _spawn(path, argv, environment, actions)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                return _spawn("/bin/sh", ["/bin/sh", path, *argv[1:]], environment, actions)
            if error.errno == errno.ENOENT:
                error = OSError(errno.EACCES, "the program that should run it is missing")
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refusal = error
    raise refusal


def _spawn(path: str, argv: list[str], environment: dict[str, str], actions: list[Any]) -> int:
    # A session of its own: no terminal of the host can be its controlling terminal, and one of ours becomes it when opened.
    return os.posix_spawn(path, argv, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET)
