"""How everybody else talks to the launcher: find it, start it, ask it. Safe in a threaded program: nothing here forks.

One connection for a process, under a lock; a sandbox's own socket, which leads straight to its keeper, needs none.
"""

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from elsewhere import errors
from elsewhere.errors import Broken, ElsewhereError
from elsewhere.linux import cgroups
from elsewhere.meeting import handed_on, socket_name
from elsewhere.sandbox.keeping import wire
from elsewhere.storage.state import State

__all__ = ["Answer", "Engine", "connect", "socket_name", "start"]

_START_S = 60.0


def connect(state_path: str, name: str) -> socket.socket | None:
    """A connection to a launcher that is there, or None."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        directory = os.open(os.path.join(state_path, "run"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sock.connect(f"/proc/self/fd/{directory}/{name}")
        finally:
            os.close(directory)
    except OSError:
        sock.close()
        return None
    return sock


def start(state: State, name: str) -> None:
    """Start a launcher and wait until it listens. Two at once: one of them wins, and both callers are served."""
    log = os.path.join(state.room("run"), f"{name}.log")
    scope = _scope(name)
    if not (scope and _start(state, name, log, scope)) and not _start(state, name, log, []):
        raise Broken("launcher_did_not_start", f"the launcher did not start: {_last_line(log)}", hint=f"see {log}")


def _scope(name: str) -> list[str]:
    """What puts it, and with it all sandboxes, into a group that is this user's own to divide, where there is such a thing."""
    if (
        os.geteuid() == 0
        or not os.path.exists("/sys/fs/cgroup/cgroup.controllers")
        or not os.path.exists(f"{_manager()}/private")
    ):
        return []
    return cgroups.scope(f"{name}-{os.getpid()}-{os.urandom(3).hex()}")


def _manager() -> str:
    return f"/run/user/{os.getuid()}/systemd"


def _start(state: State, name: str, log: str, scope: list[str]) -> bool:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as output:
            paths = os.pathsep.join(path for path in sys.path if path)
            runtime = {"XDG_RUNTIME_DIR": os.path.dirname(_manager())} if scope else {}
            subprocess.run(
                [*scope, sys.executable, "-X", "utf8", "-W", "ignore", "-m", "elsewhere.cli.launch", name, str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={**handed_on(), **runtime, "ELSEWHERE_HOME": state.path, "PYTHONPATH": paths},
                pass_fds=[writer],
                check=False,
            )
    except FileNotFoundError:
        return False  # there is no systemd-run
    finally:
        os.close(writer)
        with open(reader, "rb", buffering=0) as pipe:
            word = pipe.read(16)  # when it listens, or found another one there; nothing when it failed
    return bool(word)


def _last_line(path: str) -> str:
    with open(path, "rb") as stream:
        lines = stream.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "without a word"


class Answer:
    """To a question that nobody has waited for yet."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._said: tuple[Any, list[int]] | None = None

    def arrived(self, answer: Any, fds: list[int]) -> None:
        self._said = answer, fds

    def get(self) -> tuple[Any, list[int]]:
        """Wait for it; once."""
        if self._said is None:
            self._engine.catch_up()
        if self._said is None:
            raise _gone()
        answer, fds = self._said
        return _checked(answer), fds


class Engine:
    """A process's line to its launcher."""

    _shared: ClassVar["dict[str, Engine]"] = {}
    _sharing = threading.Lock()

    def __init__(self, state: State) -> None:
        self.state = state
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._process = os.getpid()
        self._owed: list[Answer | None] = []

    def _take_what_is_owed(self, sock: socket.socket) -> None:
        """Answers to questions that nobody waited for, or that were interrupted; a sandbox that nobody took has its control
        socket closed, and so ends."""
        while self._owed:
            self._take_one(sock)

    def _take_one(self, sock: socket.socket) -> None:
        answer, fds = wire.receive(sock)
        wanted = self._owed.pop(0)
        if wanted is not None:
            wanted.arrived(answer, fds)
            return
        for fd in fds:
            os.close(fd)
        if answer[0] == "created" and answer[1]["keeper"] is None:
            wire.call(sock, ("remove", answer[1]["id"]))

    @classmethod
    def shared(cls, state: State) -> "Engine":
        with cls._sharing:
            engine = cls._shared.get(state.path)
            if engine is None or engine._process != os.getpid():  # after a fork the parent's line is not ours
                engine = cls._shared[state.path] = cls(state)
            return engine

    def ask(self, *message: object, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        """The answer and its descriptors. Those that go along are held by the launcher until it has answered."""
        with self._lock:
            if self._sock is None:
                self._sock = self._open()
            try:
                self._take_what_is_owed(self._sock)
                self._owed.append(None)
                answer, taken = wire.call(self._sock, message, tuple(fds))
                self._owed.pop()
            except (Broken, EOFError, OSError) as error:
                self._hang_up()
                raise (error if isinstance(error, Broken) else _gone()) from error
        return _checked(answer), taken

    def later(self, *message: object, fds: Sequence[int] = ()) -> Answer:
        """Ask, and go on; the answer waits until somebody wants it, or until the next question."""
        with self._lock:
            if self._sock is None:
                self._sock = self._open()
            answer = Answer(self)
            try:
                while self._owed and wire.readable(self._sock):  # what is never read would fill the line, and stop the other end
                    self._take_one(self._sock)
                wire.send(self._sock, message, tuple(fds))
                self._owed.append(answer)
            except OSError as error:
                self._hang_up()
                raise _gone() from error
        return answer

    def catch_up(self) -> None:
        """Take every answer that is still to come."""
        with self._lock:
            if self._sock is not None:
                try:
                    self._take_what_is_owed(self._sock)
                except (Broken, EOFError, OSError) as error:
                    self._hang_up()
                    raise _gone() from error

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock, self._owed = None, []

    def revive(self) -> None:
        """Let go of a line whose other end is gone: the next question starts a launcher. Only for who has nothing there yet."""
        with self._lock:
            if self._sock is not None and not self._owed and wire.readable(self._sock):  # nothing was asked: this is no answer
                self._sock.close()
                self._sock = None

    def nudge(self, *message: object) -> bool:
        """Ask a launcher that is there already; False: there is none."""
        with self._lock:
            if self._sock is None:
                self._sock = connect(self.state.path, socket_name())
        if self._sock is None:
            return False
        try:
            self.ask(*message)
        except Broken:
            return False
        return True

    def _open(self) -> socket.socket:
        name = socket_name()
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            sock = connect(self.state.path, name)
            if sock is not None:
                return sock
            start(self.state, name)
            time.sleep(0.005)  # another one that was faster may not listen yet
        log = os.path.join(self.state.room("run"), f"{name}.log")
        raise Broken("launcher_did_not_start", f"the launcher did not start within {_START_S:.0f} s", hint=f"see {log}")

    @classmethod
    def _close_all(cls) -> None:
        for engine in cls._shared.values():
            if engine._process == os.getpid():
                engine.close()

    def close(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None


def _gone() -> Broken:
    return Broken("launcher_gone", "the launcher ended before it was asked", hint="try again: it is started on demand")


def _checked(answer: Any) -> Any:
    if answer[0] == "error":
        kind, code, text, hint, detail = answer[1:]
        raise getattr(errors, kind, ElsewhereError)(code, text, hint=hint, detail=detail)
    return answer


atexit.register(Engine._close_all)
