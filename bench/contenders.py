"""Who takes part: elsewhere, and the neighbours that somebody would use instead. One that is not there says why.

A neighbour is a command line wherever it can be, so that it can be started from a warm process and from a shell alike.
"""

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elsewhere import Sandbox
from workspace import Workspace

__all__ = ["Parts", "Program", "Sandlock", "cycle", "neighbours", "spawned", "version_of"]

Parts = dict[str, float]
"""Seconds by name; `total` is always there."""

_PROBE_S = 20.0


@dataclass(frozen=True, slots=True)
class Program:
    """A command line that runs `true` in its own kind of isolation."""

    name: str
    argv: tuple[str, ...]
    isolates: str
    absent: str = ""


def neighbours(docker_image: str) -> dict[str, Program]:
    """By short name, each tried once: what stands here although the kernel refuses it would be timed as a failure."""
    found = [
        Program("true", ("true",), "nothing: the floor"),
        Program(
            "unshare",
            ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"),
            "user, mount and process namespace; no copy on write",
        ),
        Program(
            "bwrap",
            ("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "true"),
            "all namespaces, machine read-only; no copy on write",
        ),
        _docker(docker_image),
    ]
    return {program.name: _tried(program) for program in found}


def _docker(image: str) -> Program:
    program = Program("docker", ("docker", "run", "--rm", "--pull", "never", image, "true"), f"container of the image {image}")
    if shutil.which("docker") is None:
        return replace(program, absent="docker is not installed")
    if _output(["docker", "version", "--format", "{{.Server.Version}}"]) is None:
        return replace(program, absent="no engine")
    if _output(["docker", "image", "inspect", image]) is None:
        return replace(program, absent=f"the engine has no image {image}: docker pull {image}")
    return program


def _tried(program: Program) -> Program:
    if program.absent:
        return program
    path = shutil.which(program.argv[0])
    if path is None:
        return replace(program, absent=f"{program.argv[0]} is not installed")
    program = replace(program, argv=(path, *program.argv[1:]))
    try:
        done = subprocess.run(program.argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        return replace(program, absent=f"did not end within {_PROBE_S:.0f} s")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return replace(program, absent=f"does not work here: {said[-1] if said else f'exit code {done.returncode}'}")
    return program


def spawned(program: Program) -> Callable[[], Parts]:
    """The fastest way that Python has to start a program: anything else would flatter us."""

    def once() -> Parts:
        began = time.perf_counter()
        pid = os.posix_spawn(program.argv[0], program.argv, os.environ)
        _, status = os.waitpid(pid, 0)
        took = time.perf_counter() - began
        if status:
            raise RuntimeError(f"{program.name} ended with {os.waitstatus_to_exitcode(status)}")
        return {"total": took}

    return once


def cycle(project: str) -> Callable[[], Parts]:
    """elsewhere from its front door, as a program would use it, with everything on."""

    def once() -> Parts:
        began = time.perf_counter()
        box = Sandbox.create(project=project, base="live")
        created = time.perf_counter()
        result = box.run(["true"])
        ran = time.perf_counter()
        box.remove()
        removed = time.perf_counter()
        result.check()
        return {
            "total": removed - began,
            "create": created - began,
            "run": ran - created,
            "remove": removed - ran,
        }

    return once


class Sandlock:
    """The closest peer: Landlock and a supervisor of system calls. It has no command of its own on PyPI, so from a shell it is a
    Python program."""

    def __init__(self, place: Workspace) -> None:
        self._place = place
        self.absent = ""
        try:
            self._sandlock: Any = importlib.import_module("sandlock")
            self._run(copy_on_write=True)
        except ImportError:
            self.absent = "not installed: pip install --group bench"
        except Exception as error:  # whatever a neighbour's library raises is the reason why it does not take part
            self.absent = f"does not work here: {error}"

    def once(self, *, copy_on_write: bool) -> Callable[[], Parts]:
        def run() -> Parts:
            began = time.perf_counter()
            self._run(copy_on_write=copy_on_write)
            return {"total": time.perf_counter() - began}

        return run

    def _run(self, *, copy_on_write: bool) -> None:
        options: dict[str, object] = {"fs_readable": ["/"]}
        if copy_on_write:
            options |= {
                "workdir": self._place.project,
                "cwd": self._place.project,
                "fs_storage": self._place.branches,
                "on_exit": self._sandlock.BranchAction.ABORT,
            }
        result = self._sandlock.Sandbox(**options).run(["true"])
        if not result.success:
            raise RuntimeError(f"sandlock ended with {result.exit_code}: {result.stderr!r}")

    def program(self, *, copy_on_write: bool) -> Program:
        """The same from a shell; copy on write with one write, as it is for elsewhere."""
        options, command = 'fs_readable=["/"]', ["true"]
        if copy_on_write:
            options += (
                f", fs_writable=[{self._place.project!r}], workdir={self._place.project!r}, cwd={self._place.project!r}"
                f", fs_storage={self._place.branches!r}, on_exit='abort'"
            )
            command = ["touch", "written"]
        source = f"import sys; from sandlock import Sandbox; sys.exit(not Sandbox({options}).run({command!r}).success)"
        name = "sandlock in Python, copy on write, one write" if copy_on_write else "sandlock in Python"
        return Program(name, (sys.executable, "-c", source), "Landlock, system calls supervised", self.absent)


def version_of(name: str) -> str | None:
    """Of a neighbour, as it says itself."""
    if name == "sandlock":
        try:
            return importlib.metadata.version("sandlock")
        except importlib.metadata.PackageNotFoundError:
            return None
    if name == "docker":
        return _output(["docker", "version", "--format", "{{.Server.Version}}"])
    said = _output([name, "--version"])
    if not said:
        return None
    words = said.splitlines()[0].split()
    return words[words.index("version") + 1] if "version" in words[:-1] else words[-1]


def _output(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
