"""How whoever has a question finds the network service, starts it, and speaks to it.

    run/network          its socket, for as long as it lives; left behind by one that died
    run/network.lock     held by it, from before it exists: whoever starts it takes the lock, listens, and hands both over
    run/network.log      what it had to say

    ("add", id, names[, opens])  with the keeper's pidfd and the sockets of these names    no answer; `opens`: as `open`, later
    ("open", id)                 its forwards and published ports, made now                ("opened", published, forwards)
    ("changed", id[, added])     its record is another one; without what is `added`        ("opened", published, forwards, ended)
                                 there, as in `--publish 80`, that is an error
    ("about", id)                                                                          ("about", {…})
    ("adopt",)                   what runs, and it was not told of                         no answer
    ("stop",)                    go, whatever runs                                         ("bye", …)
    on its own, when it hears us                                                           ("here",)
    on its own, before it goes                                                             ("bye", adds that it has seen)

What is asked of one that is only being started waits in its socket: nobody waits for it. This module runs in the launcher, too
(`switchboard.py`), which forks and is to stay small: what the service itself needs is not loaded here.
"""

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import elsewhere
from elsewhere import errors
from elsewhere.clock import monotonic
from elsewhere.errors import Broken, ElsewhereError
from elsewhere.meeting import handed_on
from elsewhere.sandbox.keeping import wire
from elsewhere.storage.state import State

__all__ = ["LOCK", "SOCKET", "ask", "close_all", "is_held", "reached", "see", "stop"]

SOCKET, LOCK = "network", "network.lock"

_LOG = "network.log"
_LARGEST_LOG = 1 << 20
_BACKLOG = 256
_MEETING_S = 0.5  # for the moment in which one comes or goes
_ANSWER_S = 60.0
_PATIENCE_S = 0.1  # of somebody who may have had enough
_MOST_STARTS = 3
_LISTENER_FD, _LOCK_FD = 3, 4


def ask(
    state: State, message: tuple[Any, ...], seconds: float = _ANSWER_S, *, pause: Callable[[float], None] = time.sleep
) -> Any:
    """The answer to a question. A service that ends just now is followed by another one. `pause`, which is called now and then,
    raises for whoever has had enough."""
    deadline, starts = monotonic() + seconds, 0
    while True:
        try:
            line, started = reached(state, direct=False)
            starts += started
        except OSError as error:
            raise Broken(
                "network_service_did_not_start", f"the network service cannot be started: {error}", hint=see(state)
            ) from error
        with line:
            line.settimeout(max(0.001, deadline - monotonic()))
            try:
                wire.send(line, message)
                answer, fds = _heard(line, deadline, pause)
                while answer[0] == "here":
                    answer, fds = _heard(line, deadline, pause)
            except TimeoutError:
                text = f"the network service did not answer within {seconds:.0f} s"
                raise Broken("network_service_silent", text, hint=see(state)) from None
            except (OSError, EOFError):
                answer, fds = ("bye",), []
        close_all(fds)
        if answer[0] != "bye":
            return _checked(answer)
        if monotonic() >= deadline or starts >= _MOST_STARTS:
            raise Broken("network_service_gone", "the network service ended while it was asked for something", hint=see(state))
        time.sleep(0.01)


def _heard(line: socket.socket, deadline: float, pause: Callable[[float], None]) -> tuple[Any, list[int]]:
    while not wire.readable(line, max(0.0, min(_PATIENCE_S, deadline - monotonic()))):
        pause(0.0)
        if monotonic() >= deadline:
            raise TimeoutError
    return wire.receive(line)


def stop(state: State, seconds: float = 5.0) -> None:
    """End the one that is there, if there is one, and wait for that; the sandboxes that it serves are cut off."""
    try:
        run = os.open(state.room("run"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        line = _connected(run)
    finally:
        os.close(run)
    if line is not None:
        with line, contextlib.suppress(OSError, EOFError):
            line.settimeout(seconds)
            wire.send(line, ("stop",))
            while True:
                wire.receive(line)


def _checked(answer: Any) -> Any:
    if answer[0] == "error":
        kind, code, text, hint, detail = answer[1:]
        raise getattr(errors, kind, ElsewhereError)(code, text, hint=hint, detail=detail)
    return answer


def see(state: State) -> str:
    return f"see {os.path.join(state.room('run'), _LOG)}"


# -- finding and starting it ----------------------------------------------------------------------------------------------------


def reached(state: State, *, direct: bool) -> tuple[socket.socket, bool]:
    """A connection to it, and whether it had to be started. Only in the moment in which another one comes or goes there is
    somebody who has the lock, and nobody who listens. `direct`: it may be a child of ours, which we reap."""
    run = os.open(state.room("run"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = monotonic() + _MEETING_S
        while True:
            line = _connected(run)
            if line is not None:
                return line, False
            lock = _locked(run)
            if lock is not None:
                try:
                    return _started(state, run, lock, direct=direct), True
                finally:
                    os.close(lock)
            if monotonic() >= deadline:
                raise Broken(
                    "network_service_stuck", "the network service lives, and does not listen", hint=f"end it: {see(state)}"
                )
            time.sleep(0.001)
    finally:
        os.close(run)


def _connected(run: int) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.setblocking(False)  # a queue that is full would be waited for
        line.connect(f"/proc/self/fd/{run}/{SOCKET}")
        line.setblocking(True)
    except OSError as error:
        line.close()
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
            return None
        raise
    return line


def _locked(run: int) -> int | None:
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=run)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def is_held(state: State) -> bool:
    with contextlib.suppress(OSError):
        lock = os.open(os.path.join(state.room("run"), LOCK), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


def _started(state: State, run: int, lock: int, *, direct: bool) -> socket.socket:
    """One that is on its way, and a connection to it already. Nobody else has the lock, so what lies there is a dead one's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=run)
        listener.bind(f"/proc/self/fd/{run}/{SOCKET}")
        os.chmod(SOCKET, 0o600, dir_fd=run)
        listener.listen(_BACKLOG)
        line = _connected(run)
        if line is None:
            raise Broken("network_service_did_not_start", "its socket was taken away while it was started", hint="try again")
        try:
            _spawn(state, listener.fileno(), lock, direct=direct)
        except BaseException:
            line.close()
            raise
        return line
    finally:
        listener.close()


def _spawn(state: State, listener: int, lock: int, *, direct: bool) -> None:
    """Of us it has nothing but the two, its environment, and its code. Unless it is a `direct` child, a shell stands between us
    for a moment: we would have to reap it, and may be anybody's program."""
    environment = {**handed_on(), "PYTHONPATH": os.pathsep.join(_code()), "ELSEWHERE_HOME": state.path}
    # -P: the directory that we are in may be a project, and nothing is to be loaded from there.
    own = [sys.executable, "-P", "-X", "utf8", "-W", "ignore", "-m", "elsewhere.sandbox.networking.service"]
    words = [*own, state.path, str(_LISTENER_FD), str(_LOCK_FD)]
    if not direct:
        words = ["/bin/sh", "-c", '"$@" &', "sh", *words]
    log = os.path.join(state.room("run"), _LOG)
    with contextlib.suppress(OSError):
        if os.lstat(log).st_size > _LARGEST_LOG:
            os.unlink(log)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (listener, lock)]  # neither is where the other goes
    try:
        pid = os.posix_spawn(
            words[0],
            words,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, high[0], _LISTENER_FD),
                (os.POSIX_SPAWN_DUP2, high[1], _LOCK_FD),
            ],
            setsid=True,
        )
    finally:
        close_all(high)
    if not direct:
        with contextlib.suppress(ChildProcessError):  # somebody else reaps everything here
            os.waitpid(pid, 0)


def _code() -> list[str]:
    """Where we and all that the service needs of others lie. Of what else a program may have been told to load from, nothing is
    loaded there."""
    found = [os.path.dirname(os.path.dirname(os.path.abspath(elsewhere.__file__)))]
    for path in filter(None, sys.path):
        if os.path.exists(os.path.join(path, "h11", "__init__.py")):
            found.append(os.path.abspath(path))
            break
    return list(dict.fromkeys(found))


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
