"""A running sandbox as whoever works in it has it: the way to its keeper, its record, its environment.

Two kinds. One that was made for a single piece of work belongs to whoever made it and ends with them, by `settle` (the directory
stays) or `remove` (it goes). One that lives on its own is entered by anybody who finds it; its end is in `ending.py`.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from elsewhere.changes.compare import Changes
from elsewhere.clock import monotonic, wall
from elsewhere.errors import Broken, Refused, UsageError
from elsewhere.sandbox import contents, environment, rebasing, rungs, snapshots
from elsewhere.sandbox.environment import Environment
from elsewhere.sandbox.identity import Identity
from elsewhere.sandbox.keeping import line
from elsewhere.sandbox.keeping.spec import Spec
from elsewhere.sandbox.launching.engine import Answer, Engine
from elsewhere.sandbox.networking import proxies
from elsewhere.sandbox.records import record, truth
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import repositories, saving
from elsewhere.storage.state import State

__all__ = ["Live", "create", "enter", "shift_for"]

_ENDING_S = 5.0  # a keeper that is about to be gone
_LOOKS = 5  # at layers that somebody else moves just then


class Live:
    def __init__(self, engine: Engine, found: Record, control: socket.socket, *, owned: bool, layers_fd: int = -1) -> None:
        self.engine = engine
        self.id = found.id
        self._control = control
        self._starting: Answer | None = None
        self.record = found
        self.owned = owned
        self._layers_fd = layers_fd
        self._open = True

    @property
    def control(self) -> socket.socket:
        """To its keeper; to the new one, if it was told to run again."""
        if self._starting is not None:
            answer, self._starting = self._starting, None
            (_, started), fds = answer.get()
            self.record = Record(**started)
            if self.owned:
                self._control = socket.socket(fileno=fds[0])
                self._layers_fd = fds[1] if len(fds) > 1 else -1
            else:
                self._control = _entered(self.engine, self.record).control
        return self._control

    @property
    def state(self) -> State:
        return self.engine.state

    @property
    def directory(self) -> str:
        return self.state.sandbox(self.id)

    @property
    def project_path(self) -> str:
        """Where the project is inside: at the same path, unless it had to be copied."""
        return contents.project_path(self.state, self.record)

    @property
    def private_place(self) -> str:
        """A directory inside for what is nobody's business."""
        return os.path.join(self.directory, "tmp") if rungs.named(self.record.mechanism).copy else "/tmp"

    def line(self) -> line.Line:
        """A line of its own to the keeper: answers to one question must not meet those to another."""
        _ = self.control  # it may only be starting
        found = line.connect(self.directory)
        if found is None:
            raise Broken("sandbox_gone", f"the sandbox {self.id!r} is not running any more", hint=f"elsewhere start {self.id}")
        return found

    def spec(
        self,
        argv: list[str],
        directory: str,
        asked: Iterable[tuple[str, str | None]] = (),
        passed: Iterable[str] = (),
        *,
        caller: Mapping[str, str] | None = None,
        timeout: float | None = None,
        ends_sandbox: bool = False,
        detached: bool = False,
        request: str = "",
    ) -> Spec:
        """A command of this sandbox. `directory` is where the caller stands, in reality's paths; `timeout` is what holds for it
        (see `timeout`)."""
        chosen = self._environment(asked, passed, directory, caller=os.environ if caller is None else caller)
        self.record.environment_left_out = list(chosen.left_out)
        for word in (*argv, directory, *chosen.variables.values()):
            if "\0" in word:
                raise UsageError(
                    "nul_byte", f"{word!r} contains a NUL byte", hint="no argument, directory or variable can have one"
                )
        return Spec(
            argv,
            chosen.variables,
            self._inside(directory),
            request=request,
            umask=_umask(),
            timeout=timeout,
            ends_sandbox=ends_sandbox,
            detached=detached,
        )

    def timeout(self, asked: float | None) -> float | None:
        """Of a command: what is asked for it, or what every command in here has; whichever is shorter."""
        known = [seconds for seconds in (asked, self.record.limits.get("timeout")) if seconds is not None]
        return min(known, default=None)

    def _environment(
        self,
        asked: Iterable[tuple[str, str | None]],
        passed: Iterable[str],
        directory: str,
        *,
        caller: Mapping[str, str],
    ) -> Environment:
        identity = {
            **Identity(**self.record.identity).variables(),
            "ELSEWHERE_SANDBOX_EXECUTION": "true",
            "ELSEWHERE_SANDBOX_REPO_ROOT": self.project_path,
            "ELSEWHERE_SANDBOX_REQUESTED_CWD": directory,
            "PWD": self._inside(directory),
        }
        if rungs.named(self.record.mechanism).copy:
            identity["TMPDIR"] = self.private_place
        passed = (*passed, *self.record.confinement.get("variables", ()))
        return environment.compose(
            caller,
            asked=asked,
            passed=passed,
            identity=identity,
            network=self.record.confinement.get("network", "host"),
            redirected=self.record.network.get("redirected", True),
            within_repository=next(repositories.tops(self.record.project), self.record.project) != self.record.project,
        )

    def _inside(self, directory: str) -> str:
        """Where a directory of reality is in here."""
        if self.project_path != self.record.project:
            relative = os.path.relpath(directory, self.record.project)
            return self.project_path if relative.startswith("..") else os.path.normpath(os.path.join(self.project_path, relative))
        return directory

    def changes(self) -> Changes:
        for left in reversed(range(_LOOKS)):
            if not self.owned:
                self.record = record.load(self.state, self.id)  # somebody else may have taken a snapshot, or have removed it
            try:
                return contents.changes_of(self.state, self.record, self._layers())
            except FileNotFoundError:
                if self.owned or not left:
                    raise
        raise AssertionError("unreachable")

    def _layers(self) -> int:
        """Layers that lie in memory or in an image can be read for as long as somebody holds them."""
        if self._layers_fd < 0 and not self.owned and self.record.layers_apart:
            with self.line() as keeper:
                found = keeper.layers()
            self._layers_fd = -1 if found is None else found
        return self._layers_fd

    def close(self) -> None:
        """Let go of it; what lives on its own lives on."""
        self.control.close()
        self._close_layers()

    def let_go(self) -> None:
        """Its keeper has ended, by our wish, and is to be replaced: see `run_again`."""
        if self._starting is not None and not self.owned:
            answer, self._starting = self._starting, None
            answer.get()  # of the one that has just ended
        else:
            self.control.close()
        if self.owned and self.record.layers_apart:
            self.engine.ask("settle", self.id)  # what holds its image has to go before anybody else can look at it
        self._close_layers()

    def run_again(self, reserve: int, group: list[Any] | None, fds: Sequence[int]) -> None:
        """With another keeper, which nobody waits for before it is needed; what is owned stays owned."""
        self._starting = self.engine.later("start", self.id, reserve, "discard" if self.owned else "", group, fds=fds)

    # -- the end of one that is owned -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """End everything that runs and keep the directory."""
        in_memory = self._layers_fd >= 0 and self.record.disk != "image"
        if in_memory:
            saving.check_room(self._layers_fd, self.directory)  # afterwards there would be no way back
        self._end("settle")
        if in_memory:
            # Only now: nothing that still runs may change what is being read.
            saving.save_layers(f"/proc/self/fd/{self._layers_fd}/upper", os.path.join(self.directory, "upper"))
        self._close_layers()
        proxies.forget(self.directory)
        saved = record.load(self.state, self.id)  # a snapshot may have been taken, or removed, meanwhile
        self.record.tip, self.record.at = saved.tip, saved.at
        self.record.snapshots, self.record.base, self.record.network = saved.snapshots, saved.base, saved.network
        self.record.state, self.record.ended_at = "stopped", wall()
        try:
            record.save(self.record, self.directory)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The disk is full, probably by the command itself: its outcome still counts, and the old record reads as lost.
            self.record.lost = True

    def remove(self) -> None:
        """End everything that runs and throw the rest away. Twice is once."""
        if self._open:
            self._end("remove")
            self._close_layers()
            self.record.state = "removed"

    def _end(self, how: str) -> None:
        assert self.owned
        self._open = False
        try:
            self.engine.ask(how, self.id)
        except Broken as error:
            if error.code != "launcher_gone":
                raise
            # The launcher died. The keeper ends with its control socket, and a new launcher does the rest.
            self.control.close()
            record.wait_for_end(self.state, self.id)
            self.engine.ask(how, self.id)
        self.control.close()

    def _close_layers(self) -> None:
        if self._layers_fd >= 0:
            os.close(self._layers_fd)
            self._layers_fd = -1


def create(state: State, order: dict[str, Any]) -> Live:
    """A new sandbox, as a `creation.Order` says."""
    engine = Engine.shared(state)
    engine.revive()
    (_, made), fds = engine.ask("create", order)
    found = Record(**made)
    if order.get("lives"):
        return _entered(engine, found)
    return Live(engine, found, socket.socket(fileno=fds[0]), owned=True, layers_fd=fds[1] if len(fds) > 1 else -1)


def shift_for(state: State, project: str) -> int:
    """What a base has to add to every owner for the rung that a sandbox of this project will probably stand on."""
    (_, shift), _ = Engine.shared(state).ask("shift", project)
    return int(shift)


Admission = Callable[[Record], contextlib.AbstractContextManager[int]]


def enter(state: State, sandbox_id: str, admission: Admission) -> Live:
    """One that is there; started, if it is only directories. Then there has to be room: `admission` may wait, or refuse, and says
    how much of the disk is to stay free."""
    engine = Engine.shared(state)
    engine.revive()
    reached = _answering(state, sandbox_id)
    if reached is not None:
        try:
            return Live(engine, record.load(state, sandbox_id), _patient(reached.sock), owned=False)
        except BaseException:
            reached.close()
            raise
    with record.locked(state, sandbox_id) as lock:
        found, deadline = record.load(state, sandbox_id), monotonic() + _ENDING_S
        while found.state == "running":
            reached = _answering(state, sandbox_id)
            if reached is not None:
                return Live(engine, found, _patient(reached.sock), owned=False)
            if monotonic() >= deadline:
                raise _gone(found)
            time.sleep(0.001)  # whoever asked it to rest was stopped, or its time is over: it is just ending
            found = record.load(state, sandbox_id)
        if record.is_over(state, found):
            raise Refused(
                "sandbox_expired",
                f"the time of the sandbox {sandbox_id!r} is over",
                hint=f"elsewhere extend {sandbox_id} 1h",
            )
        with admission(found) as reserve:
            truth.end_earlier_life(state, sandbox_id)
            snapshots.mend_if_needed(state, found)
            rebasing.finish_if_needed(state, found)
            (_, started), _ = engine.ask("start", sandbox_id, reserve, "", fds=[lock])
            return _entered(engine, Record(**started))


def _answering(state: State, sandbox_id: str) -> line.Line | None:
    """A line to its keeper. One that is about to rest has not seen us yet, and will not."""
    reached = line.connect(state.sandbox(sandbox_id))
    if reached is not None:
        try:
            reached.version()
        except Broken:
            reached.close()
            return None
    return reached


def _entered(engine: Engine, found: Record) -> Live:
    reached = line.connect(engine.state.sandbox(found.id))
    if reached is None:
        raise _gone(found)
    return Live(engine, found, _patient(reached.sock), owned=False)


def _gone(found: Record) -> Broken:
    return Broken("sandbox_gone", f"the keeper of {found.id!r} does not answer", hint=f"elsewhere stop {found.id}")


def _patient(sock: socket.socket) -> socket.socket:
    """For starting commands: the answers come on channels of their own."""
    sock.settimeout(None)
    return sock


def _umask() -> int:
    """Without setting it, since that would be a race in a threaded program."""
    with (
        contextlib.suppress(OSError, StopIteration),
        open("/proc/self/status", encoding="ascii", errors="replace") as status,
    ):
        return int(next(line_.split()[1] for line_ in status if line_.startswith("Umask:")), 8)
    return 0o022
