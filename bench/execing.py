"""A command in a sandbox that runs already, against entering namespaces by hand and `docker exec` (H)."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable

import launcher
from effort import Effort
from elsewhere import Sandbox
from measure import Row, Samples, Section, against
from rounds import interleaved
from workspace import Workspace

__all__ = ["executing"]

_NSENTER = "nsenter"


def executing(place: Workspace, effort: Effort, docker_image: str) -> Section:
    section = Section(
        "H",
        "A command in a sandbox that runs",
        "`true`, started from one warm process, in changing order. elsewhere captures its output and writes down beginning and "
        "end; nsenter joins the same sandbox's namespaces and does neither.",
        "ms",
    )
    with Sandbox.create(project=place.project, base="live") as box:
        box.run(["true"]).check()
        known = launcher.keepers(place.state)
        entered = shutil.which(_NSENTER)
        absent = "" if entered and os.geteuid() == 0 else "needs root and nsenter"
        lineup: list[tuple[Row, Callable[[], float] | None]] = [
            (Row("elsewhere: run", "in a running sandbox"), lambda: _timed(lambda: box.run(["true"]).check())),
            (
                Row(_NSENTER, "namespaces only, no filter, nothing captured", absent=absent),
                None if absent else lambda: _timed(lambda: _spawn([entered or "", "-t", str(known[-1]), "-m", "-p", "true"])),
            ),
        ]
        with _Container(docker_image) as container:
            lineup.append(
                (
                    Row("docker exec", f"container of {docker_image}", absent=container.absent),
                    None if container.absent else lambda: _timed(lambda: _spawn(container.command)),
                )
            )
            steps = [once for _, once in lineup if once is not None]
            results = iter(interleaved(steps, effort.warm_rounds, effort.pause))
        for row, once in lineup:
            section.rows.append(row)
            if once is not None:
                row.samples = Samples.of(next(results), 1000)
    against(section, _NSENTER)
    return section


class _Container:
    """One that sleeps, for as long as the block lasts, where there is an engine and the image."""

    def __init__(self, image: str) -> None:
        self.absent = ""
        self.command: list[str] = []
        self._name = f"elsewhere-bench-{os.getpid()}"
        self._image = image

    def __enter__(self) -> "_Container":
        docker = shutil.which("docker")
        if docker is None:
            self.absent = "docker is not installed"
            return self
        start = [docker, "run", "--rm", "-d", "--pull", "never", "--name", self._name, self._image, "sleep", "1000"]
        done = subprocess.run(start, capture_output=True, text=True, check=False)
        if done.returncode:
            self.absent = (done.stderr.strip().splitlines() or ["no engine"])[0]
        self.command = [docker, "exec", self._name, "true"]
        return self

    def __exit__(self, *_: object) -> None:
        if not self.absent:
            subprocess.run(["docker", "rm", "-f", self._name], capture_output=True, check=False)


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _spawn(argv: list[str]) -> None:
    pid = os.posix_spawn(argv[0], argv, os.environ)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"{argv[0]} ended with {os.waitstatus_to_exitcode(status)}")
