"""From a cold shell: whole programs, from their start to their end (B)."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import elsewhere.cli.client
from contenders import Program, Sandlock
from effort import Effort
from measure import Row, Samples, Section, against
from workspace import Workspace

__all__ = ["ELSEWHERE", "PYTHON", "cold", "environment"]

ELSEWHERE = "elsewhere run -- true"
PYTHON = "python -c pass"


def environment() -> dict[str, str]:
    """Ours without settings of Python: a forbidden bytecode cache would be timed as start-up."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def cold(place: Workspace, effort: Effort, neighbours: dict[str, Program], sandlock: Sandlock) -> Section:
    section = Section(
        "B",
        "From a cold shell: whole programs",
        f"In changing order, with a pause of {effort.pause * 1000:.0f} ms before each start (not timed, the same for all), by "
        "posix_spawn from a lean process in the project's directory, waited for. The launcher is warm.",
        "ms",
    )
    section.text += _about_bytecode()
    programs = [
        _ours(ELSEWHERE, "true"),
        _ours("elsewhere run -- touch FILE (kept)", "touch", "written"),
        Program(PYTHON, (sys.executable, "-c", "pass"), "nothing: the floor of anything in Python"),
        neighbours["unshare"],
        neighbours["bwrap"],
        _sandlock_command(),
        sandlock.program(copy_on_write=False),
        sandlock.program(copy_on_write=True),
    ]
    present = [program for program in programs if not program.absent]
    times = iter(_timed(present, place.project, effort))
    for program in programs:
        row = Row(program.name, program.isolates, absent=program.absent)
        if not program.absent:
            row.samples = Samples.of(next(times), 1000)
        section.rows.append(row)
    against(section, PYTHON)
    return section


def _ours(name: str, *command: str) -> Program:
    """The command that was installed beside the interpreter which runs us."""
    path = os.path.join(os.path.dirname(sys.executable), "elsewhere")
    return Program(name, (path, "run", "--", *command), "copy on write, namespaces, identity, record, filter")


def _sandlock_command() -> Program:
    path = shutil.which("sandlock")
    argv = (path or "sandlock", "run", "-r", "/", "--", "true")
    return Program(
        "sandlock run", argv, "Landlock, system calls supervised", "" if path else "no such command: not part of PyPI's package"
    )


def _timed(programs: list[Program], directory: str, effort: Effort) -> list[list[float]]:
    order = {
        "commands": [{"argv": program.argv, "directory": directory} for program in programs],
        "rounds": effort.cold_rounds,
        "pause": effort.pause,
        "environment": environment(),
    }
    starter = os.path.join(os.path.dirname(os.path.abspath(__file__)), "starter.py")
    done = subprocess.run([sys.executable, "-E", "-S", starter], input=json.dumps(order), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a command failed: {done.stderr.strip()}")
    answer: list[list[float]] = json.loads(done.stdout)
    return answer


def _about_bytecode() -> str:
    """Somebody else's read-only installation without a cache would be compiled at each start: true, but not what was meant."""
    cached = importlib.util.cache_from_source(elsewhere.cli.client.__file__)
    writable = os.access(os.path.dirname(elsewhere.cli.client.__file__), os.W_OK)
    return "" if writable or os.path.exists(cached) else " There is no bytecode cache here, and none can be written."
