"""Gauges: a group's counters and its two doors, as descriptors that outlive the power to open them.

A keeper has no powers and, once its root is the sandbox's, no path to a cgroup. What was opened before still works: the kernel
asks what whoever opened a file may do, not who writes to it. So a keeper can step into its commands' group before it starts one
and out again afterwards, and can read what the commands have used up. Nothing is imported here but `os`, nothing at all later.

Counted is what happened since the group was made, or since `reset_peak`. The process that keeps the group is left out of the
processes. Not here: groups and their limits (`cgroups.py`, which draws the tree).
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsewhere.linux.cgroups import Group

__all__ = ["MOVERS", "WORK", "Gauges", "keeper_place", "work_place"]

WORK = "work"
# To move a whole process the kernel stops all forks of the machine first, for which it waits 10 to 20 ms unless it has just
# done so; not for a single thread that moves itself. But with memory, version 2 moves whole processes only.
MOVERS = {1: "tasks", 2: "cgroup.procs"}
# What is read: the controller in whose group the file is, the file, and the word that its line begins with.
_FILES = {
    1: {
        "memory": ("memory", "work/memory.usage_in_bytes", b""),
        "memory_limit": ("memory", "work/memory.limit_in_bytes", b""),
        "memory_peak": ("memory", "work/memory.max_usage_in_bytes", b""),
        "oom_kills": ("memory", "work/memory.oom_control", b"oom_kill"),
        "cpu": ("cpuacct", "work/cpuacct.usage", b""),
        "processes": ("pids", "pids.current", b""),
        "processes_peak": ("pids", "pids.peak", b""),
        "refused_forks": ("pids", "pids.events", b"max"),
    },
    2: {
        "memory": ("memory", "work/memory.current", b""),
        "memory_limit": ("memory", "work/memory.max", b""),
        "memory_peak": ("memory", "work/memory.peak", b""),
        "oom_kills": ("memory", "work/memory.events", b"oom_kill"),
        "cpu": ("", "work/cpu.stat", b"usage_usec"),
        "processes": ("pids", "pids.current", b""),
        "processes_peak": ("pids", "pids.peak", b""),
        "refused_forks": ("pids", "pids.events", b"max"),
    },
}
_SECOND = {1: 1e9, 2: 1e6}
_LONGEST = 4096


def keeper_place(group: "Group") -> list[str]:
    """The directories in which a process is that keeps the group and is not limited by it."""
    places = sorted(set(group.directories.values()))
    return places if group.version == 1 else [os.path.join(place, "keeper") for place in places]


def work_place(group: "Group") -> list[str]:
    """The directories in which commands are; in those of `keeper_place` that have none, everybody is in the same one."""
    limited = {directory for controller, directory in group.directories.items() if group.version == 2 or controller != "pids"}
    return [os.path.join(directory, WORK) for directory in sorted(limited)]


class Gauges:
    def __init__(self, group: "Group") -> None:
        self._version = group.version
        self._readers: dict[str, tuple[int, bytes]] = {}
        self._to_work: list[int] = []
        self._to_keeper: list[int] = []
        self._inside = False
        try:
            for name, (controller, file, word) in _FILES.get(group.version, {}).items():
                directory = group.directories.get(controller) if controller else next(iter(group.directories.values()), None)
                fd = _opened(directory, file, writing=name == "memory_peak")
                if fd >= 0:
                    self._readers[name] = fd, word
            file = MOVERS[group.version]
            for place in work_place(group):
                self._to_work.append(os.open(os.path.join(place, file), os.O_WRONLY | os.O_CLOEXEC))
                back = os.path.dirname(place) if group.version == 1 else os.path.join(os.path.dirname(place), "keeper")
                self._to_keeper.append(os.open(os.path.join(back, file), os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            self.close()
            raise

    def enter_work(self) -> None:
        """What the calling process starts from here on is under the group's limits, and so is it itself: the memory killer may
        choose it until it leaves. Costs nothing if it is there already."""
        if not self._inside:
            self._inside = True
            for fd in self._to_work:
                os.write(fd, b"0")

    def enter_work_alone(self) -> None:
        """For a child of the process that has these: only it goes there."""
        for fd in self._to_work:
            os.write(fd, b"0")

    def leave_work(self) -> None:
        if self._inside:
            for fd in self._to_keeper:
                os.write(fd, b"0")
            self._inside = False

    def oom_kills(self) -> int:
        return self._read("oom_kills") or 0

    def refused_forks(self) -> int:
        return self._read("refused_forks") or 0

    def memory(self) -> int | None:
        return self._read("memory")

    def memory_left(self) -> int | None:
        """What the group may still take; None: as much as there is."""
        limit, used = self._read("memory_limit"), self._read("memory")
        return None if limit is None or used is None else limit - used

    def memory_peak(self) -> int | None:
        return self._read("memory_peak")

    def cpu_s(self) -> float | None:
        used = self._read("cpu")
        return None if used is None else used / _SECOND[self._version]

    def processes(self) -> int | None:
        return _without_the_keeper(self._read("processes"))

    def processes_peak(self) -> int | None:
        return _without_the_keeper(self._read("processes_peak"))

    def reset_peak(self) -> None:
        """Count the peak of memory from here on, where the kernel can (version 2: since 6.12, and for this reader only)."""
        fd, _ = self._readers.get("memory_peak", (-1, b""))
        if fd >= 0:
            try:
                os.write(fd, b"0")
            except OSError:
                pass  # it can only be read here

    def close(self) -> None:
        for fd in (*(fd for fd, _ in self._readers.values()), *self._to_work, *self._to_keeper):
            os.close(fd)
        self._readers.clear()
        self._to_work.clear()
        self._to_keeper.clear()

    def _read(self, name: str) -> int | None:
        """Nothing where there is no such gauge, or no such group any more."""
        fd, word = self._readers.get(name, (-1, b""))
        if fd < 0:
            return None
        try:
            said = os.pread(fd, _LONGEST, 0)
        except OSError:
            return None
        if not word:
            return int(said) if said.strip().isdigit() else None  # a limit may be a word
        for line in said.split(b"\n"):
            first, _, number = line.partition(b" ")
            if first == word:
                return int(number)
        return None


def _opened(directory: str | None, file: str, *, writing: bool) -> int:
    """-1 where there is no such file: older kernels have fewer."""
    if directory is None:
        return -1
    path = os.path.join(directory, file)
    for mode in (os.O_RDWR, os.O_RDONLY) if writing else (os.O_RDONLY,):
        try:
            return os.open(path, mode | os.O_CLOEXEC)
        except OSError:
            continue
    return -1


def _without_the_keeper(count: int | None) -> int | None:
    return None if count is None else max(0, count - 1)
