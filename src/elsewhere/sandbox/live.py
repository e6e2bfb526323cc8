"""A running sandbox as its owner has it: the way to its keeper, its record, and the end."""

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Iterable, Mapping

from elsewhere.changes.compare import Changes
from elsewhere.clock import wall
from elsewhere.errors import Broken, UsageError
from elsewhere.meeting import home_directory
from elsewhere.sandbox import contents, environment, record, rungs
from elsewhere.sandbox.engine import Engine
from elsewhere.sandbox.environment import Environment
from elsewhere.sandbox.identity import Identity
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.record import Record
from elsewhere.sandbox.spec import Spec
from elsewhere.settings import Settings
from elsewhere.storage import saving
from elsewhere.storage.state import State

__all__ = ["Live", "create"]


class Live:
    """Made by `create`, alive until `settle` (the directory stays) or `remove` (it goes)."""

    def __init__(self, engine: Engine, made: Record, control: socket.socket, project_path: str, memory_fd: int) -> None:
        self.engine = engine
        self.id = made.id
        self.control = control
        self.project_path = project_path
        self.record = made
        self._memory_fd = memory_fd
        self._open = True

    @property
    def state(self) -> State:
        return self.engine.state

    def spec(
        self,
        argv: list[str],
        directory: str,
        asked: Iterable[tuple[str, str | None]] = (),
        settings: Iterable[tuple[Settings, bool]] = (),
        *,
        caller: Mapping[str, str] | None = None,
        timeout: float | None = None,
        ends_sandbox: bool = False,
    ) -> Spec:
        """A command of this sandbox. `directory` is where the caller stands, in reality's paths."""
        chosen = self._environment(asked, settings, directory, caller=os.environ if caller is None else caller)
        self.record.environment_left_out = list(chosen.left_out)
        for word in (*argv, directory, *chosen.variables.values()):
            if "\0" in word:
                raise UsageError(
                    "nul_byte", f"{word!r} contains a NUL byte", hint="no argument, directory or variable can have one"
                )
        return Spec(argv, chosen.variables, self._inside(directory), umask=_umask(), timeout=timeout, ends_sandbox=ends_sandbox)

    def _environment(
        self,
        asked: Iterable[tuple[str, str | None]],
        settings: Iterable[tuple[Settings, bool]],
        directory: str,
        *,
        caller: Mapping[str, str],
    ) -> Environment:
        passed: list[str] = []
        for source, trusted in settings:
            for name in source.env_pass:
                if not trusted and environment.looks_secret(name):
                    raise UsageError(
                        "env_pass_secret",
                        f"the project's elsewhere.toml asks for {name}, which looks like a secret",
                        hint=f"if you mean it, pass it yourself: --env {name}",
                    )
                passed.append(name)
        identity = {
            **Identity(**self.record.identity).variables(),
            "ELSEWHERE_SANDBOX_EXECUTION": "true",
            "ELSEWHERE_SANDBOX_REPO_ROOT": self.project_path,
            "ELSEWHERE_SANDBOX_REQUESTED_CWD": directory,
            "PWD": self._inside(directory),
        }
        if rungs.named(self.record.mechanism).copy:
            identity["TMPDIR"] = os.path.join(self.state.sandbox(self.id), "tmp")
        return environment.compose(caller, asked=asked, passed=passed, identity=identity)

    def _inside(self, directory: str) -> str:
        """Where a directory of reality is in here: at the same path, unless the project had to be copied."""
        if self.project_path != self.record.project:
            relative = os.path.relpath(directory, self.record.project)
            return self.project_path if relative.startswith("..") else os.path.normpath(os.path.join(self.project_path, relative))
        return directory

    def changes(self) -> Changes:
        return contents.changes_of(self.state, self.record, self._memory_fd)

    def settle(self) -> None:
        """End everything that runs and keep the directory."""
        self._end("settle")
        if self._memory_fd >= 0:
            # Only now: nothing that still runs may change what is being read.
            saving.save_layers(f"/proc/self/fd/{self._memory_fd}/upper", os.path.join(self.state.sandbox(self.id), "upper"))
            self._close_memory()
        for layer in self.record.layers:
            # Left by overlay as a warning that nothing was synced; it would refuse the next mount.
            shutil.rmtree(f"{self.state.sandbox(self.id)}/work/{layer['number']}/work/incompat", ignore_errors=True)
        self.record.state, self.record.ended_at = "stopped", wall()
        try:
            record.save(self.record, self.state.sandbox(self.id))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The disk is full, probably by the command itself: its outcome still counts, and the old record reads as lost.
            self.record.lost = True

    def remove(self) -> None:
        """End everything that runs and throw the rest away. Twice is once."""
        if self._open:
            self._end("remove")
            self._close_memory()
            self.record.state = "removed"

    def _end(self, how: str) -> None:
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

    def _close_memory(self) -> None:
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1


def create(
    state: State,
    project: Project,
    *,
    base: str = "live",
    story: str = "run",
    abandoned: str = "discard",
) -> Live:
    engine = Engine.shared(state)
    request = {
        "project": project.path,
        "git": project.git,
        "head": project.head,
        "home": home_directory(),
        "base": base,
        "story": story,
        "abandoned": abandoned,
    }
    (_, made, project_path), fds = engine.ask("create", request)
    return Live(engine, Record(**made), socket.socket(fileno=fds[0]), project_path, fds[1] if len(fds) > 1 else -1)


def _umask() -> int:
    """Without setting it, since that would be a race in a threaded program."""
    with (
        contextlib.suppress(OSError, StopIteration),
        open("/proc/self/status", encoding="ascii", errors="replace") as status,
    ):
        return int(next(line.split()[1] for line in status if line.startswith("Umask:")), 8)
    return 0o022
