"""Many at once: created, run and removed by as many threads; and how many can run beside each other (I)."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import launcher
from effort import Effort
from elsewhere import Sandbox
from measure import Row, Samples, Section
from memory import available_mib, proportional_mib
from workspace import Workspace

__all__ = ["crowd"]

_ASKED = 50


def crowd(place: Workspace, effort: Effort) -> Section:
    section = Section(
        "I",
        "Many at once",
        f"{effort.at_once} created, run and removed by as many threads of one process at the same time: each one's own time, and "
        f"the time until the last was done. Then {effort.running_at_once} sandboxes that run beside each other, idle: how long "
        "each took to make, and what each costs in memory (proportional set size of a sample, and what the machine lost).",
        "ms",
    )
    began = time.perf_counter()
    with ThreadPoolExecutor(effort.at_once) as threads:
        taken = list(threads.map(lambda _: _life(place.project), range(effort.at_once)))
    whole = time.perf_counter() - began
    section.rows.append(Row(f"each of {effort.at_once} at once", "create + run + remove", samples=Samples.of(taken, 1000)))
    section.rows.append(Row(f"all of {effort.at_once}", "until the last was done", samples=Samples.of([whole], 1000)))
    made: list[float] = []
    with contextlib.ExitStack() as stack:
        before = available_mib()
        for _ in range(effort.running_at_once):
            moment = time.perf_counter()
            stack.enter_context(Sandbox.create(project=place.project, base="live"))
            made.append(time.perf_counter() - moment)
        lost = (before - available_mib()) / effort.running_at_once
        note = f"the machine lost {lost:.2f} MiB for each"
        with contextlib.suppress(PermissionError):
            sample = launcher.keepers(place.state)[-_ASKED:]
            mean = sum(map(proportional_mib, sample)) / len(sample)
            note = f"keeper {mean:.2f} MiB proportional; {note}"
        section.rows.append(Row(f"create, with up to {effort.running_at_once} running", note, samples=Samples.of(made, 1000)))
    return section


def _life(project: str) -> float:
    began = time.perf_counter()
    with Sandbox.create(project=project, base="live") as box:
        box.run(["true"]).check()
    return time.perf_counter() - began
