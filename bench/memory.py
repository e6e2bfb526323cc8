"""What an idle running sandbox costs in memory (E)."""

import contextlib
import re
import time

import launcher
from effort import Effort
from elsewhere import Sandbox
from measure import Row, Samples, Section
from workspace import Workspace

__all__ = ["KEEPER", "available_mib", "idle_memory", "proportional_mib"]

KEEPER = "keeper, proportional set size"
_SETTLE_S = 0.5


def idle_memory(place: Workspace, effort: Effort) -> Section:
    count = effort.open_sandboxes
    section = Section(
        "E",
        f"Memory of an idle running sandbox, with {count} open at once",
        "Proportional set size (Pss of smaps_rollup): pages that keepers share with each other and with the launcher count "
        "for each its share; sandboxes that stand ready in stock are alike and are counted too. The second row is what the "
        "whole machine lost for each sandbox, the kernel's own memory for namespaces and mounts included; other programs "
        "disturb it.",
        "MiB",
    )
    proportional: list[float] = []
    machine: list[float] = []
    refused = ""
    for _ in range(effort.memory_rounds):
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                Sandbox.create(project=place.project, base="live")
            )  # the launcher's own growth is not a sandbox's
            time.sleep(_SETTLE_S)
            before = available_mib()
            for _ in range(count):
                stack.enter_context(Sandbox.create(project=place.project, base="live"))
            time.sleep(_SETTLE_S)
            machine.append((before - available_mib()) / count)
            try:
                proportional += [proportional_mib(pid) for pid in _keepers(place, count)]
            except PermissionError:
                refused = "an ordinary user cannot read it: keepers are closed to everybody (not dumpable)"
    row = Row(KEEPER, "pid 1 of each sandbox", absent=refused)
    if proportional:
        row.samples = Samples.of(proportional)
    section.rows += [row, Row("whole machine, MemAvailable", "for each sandbox", samples=Samples.of(machine))]
    return section


def _keepers(place: Workspace, count: int) -> list[int]:
    found = launcher.keepers(place.state)
    if len(found) < count:
        raise RuntimeError(f"{len(found)} keepers were found where {count} sandboxes are open")
    return found


def proportional_mib(pid: int) -> float:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as stream:
        return _kib(stream.read(), "Pss") / 1024


def available_mib() -> float:
    with open("/proc/meminfo", encoding="ascii") as stream:
        return _kib(stream.read(), "MemAvailable") / 1024


def _kib(text: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the kernel does not tell {field}")
    return int(found[1])
