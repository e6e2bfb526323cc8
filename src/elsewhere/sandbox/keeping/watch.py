"""What a sandbox uses up, seen by its keeper: counted for results, and looked at where nothing stronger holds a limit.

    gauges      the kernel's own counters of the sandbox's group, where there is one: used up, refused, killed
    watchdog    where the kernel holds no limit for a tree, what is used is looked at several times a second; it sees what was
                used up a moment ago, and can only end it
    floor       the host's own disk: a sandbox that has written while it is nearly full is ended. What is free is asked at every
                look, since that costs nothing; what the sandbox has is counted as often as its size allows

Not here: what becomes of a command for it (`keeper.py`), and which limit is held by what (`enforcement.py`).
"""

import os
import time
from collections.abc import Callable
from typing import Any

from elsewhere.linux import measuring
from elsewhere.linux.gauges import Gauges
from elsewhere.sandbox.keeping.processes import Process
from elsewhere.values import dataclass

__all__ = ["Meter", "Watch"]

_LOOK_S = 0.2
_DUTY = 20  # going through the files may take one part in so many of the time
_WALK_S = 1.0
_FULL, _FULL_PART = 1 << 20, 50
# What a sandbox must have written before the host's full disk is its fault: so many bytes, or more names than can be counted
# at every look.
_OWN_PART, _OWN_NAMES = 16 << 20, 20_000


@dataclass(slots=True)
class Meter:
    """Where the counters stood when a command began, and a descriptor by which what it wrote can be read until it is reaped: the
    file itself cannot be opened any more once it has ended."""

    oom_kills: int
    refused_forks: int
    cpu_s: float | None
    io: int = -1

    def follow(self, pid: int) -> None:
        """Of a process that is still becoming its program nobody may know anything: then this is done again in a moment."""
        if self.io < 0:
            try:
                self.io = os.open(f"/proc/{pid}/io", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                pass

    def written(self) -> int | None:
        """Bytes that it, and those of its children that it waited for, caused to be written."""
        if self.io < 0:
            return None
        try:
            _, found, rest = os.pread(self.io, 4096, 0).partition(b"\nwrite_bytes:")
            return int(rest.split(b"\n")[0]) if found else None
        except (OSError, ValueError):
            return None
        finally:
            os.close(self.io)
            self.io = -1


class Watch:
    def __init__(self, gauges: Gauges | None) -> None:
        self.gauges = gauges
        self._memory: int | None = None
        self._processes: int | None = None
        self._disk: int | None = None
        self._reserve = 0
        self._file_size: int | None = None
        self._layers = self._host = -1
        self._in_memory: list[int] = []
        self._frozen = 0
        self._hard = False
        self._next = self._next_walk = 0.0
        self._disk_used: int | None = None
        self._beside = 0
        self._peak = 0
        self._written = 0
        self._reached: set[str] = set()

    def arm(self, rules: dict[str, Any], layers: int, host: int) -> None:
        """`memory` and `disk` are limits that only we hold; `processes` and `file_size` are some that the kernel holds without
        telling. `in_memory`: where files lie that are memory. `hard`: the file system that the layers lie on is the limit itself,
        and we only have to notice that it is full. `reserve`: what the host's disk is to keep free. `frozen`: bytes of earlier
        layers, which count as well."""
        self._memory, self._disk = rules.get("memory"), rules.get("disk")
        self._processes, self._file_size = (rules.get("rlimits", {}).get(name) for name in ("processes", "file_size"))
        if self._memory is not None:
            self._in_memory = [os.open(place, os.O_PATH | os.O_CLOEXEC) for place in rules.get("in_memory", ())]
        self._hard, self._reserve = bool(rules.get("hard")), int(rules.get("reserve") or 0)
        self._layers, self._host, self._frozen = layers, host, int(rules.get("frozen") or 0)

    # -- looking ----------------------------------------------------------------------------------------------------------------

    def due(self, *, busy: bool) -> float | None:
        """When to look again; None: nothing runs, or there is nothing to look for."""
        if not busy or (self._memory is None and self._processes is None and self._layers < 0):
            return None
        if not self._next:
            self._next = time.monotonic() + _LOOK_S
        return self._next

    def look(self, others: dict[int, Process]) -> str:
        """The limit that is broken; empty: none is."""
        broken = ""
        used = (sum(one.rss_kib for one in others.values()) << 10) + self._files_in_memory()
        self._peak = max(self._peak, used)
        if self._memory is not None and used > self._memory and self._proportional(others) > self._memory:
            broken = "memory"
        self._count(others)
        if self._layers >= 0 and self._look_at_disk():
            broken = broken or "disk"
        self._next = time.monotonic() + _LOOK_S
        return broken

    def rest(self) -> None:
        self._next = 0.0

    def _files_in_memory(self) -> int:
        return sum(map(_taken, self._in_memory))

    def _proportional(self, others: dict[int, Process]) -> int:
        return sum(map(_proportional_bytes, others.values())) + self._files_in_memory()

    def _look_at_disk(self) -> bool:
        """Whether somebody has to be ended for it: a limit that is hard ends nobody, but the host's disk must not fill. Beside
        such a file system lies what commands that nobody waits for say: as much again, and no more."""
        if self._hard and self._is_full():
            self._reached.add("disk")
        try:
            if _free(self._host) < self._reserve and self._has_a_part():
                return True
            began = time.monotonic()
            if began >= self._next_walk:
                self._walk(began + _WALK_S)
                now = time.monotonic()
                self._next_walk = now + (now - began) * _DUTY
        except OSError:
            return False
        if self._hard:
            return self._beside > 2 * _size(self._layers)
        return self._disk is not None and (self._disk_used or 0) > self._disk

    def _walk(self, deadline: float) -> None:
        if self._hard:
            self._disk_used = _taken(self._layers)
            self._beside = measuring.used(self._host, deadline=deadline).bytes
        else:
            self._disk_used = self._measured(deadline)

    def _has_a_part(self) -> bool:
        """In a disk that is nearly full. Who has more than can be counted has."""
        if self._hard and _taken(self._layers) > _OWN_PART:
            return True
        place, earlier = (self._host, 0) if self._hard else (self._layers, self._frozen)
        found = measuring.used(place, most=_OWN_PART, names=_OWN_NAMES, deadline=time.monotonic() + _WALK_S)
        return not found.complete or found.bytes + earlier > _OWN_PART

    def _is_full(self) -> bool:
        """Of a file system that is the limit itself: it keeps a little for its own notes and says that it is full before."""
        try:
            room = os.fstatvfs(self._layers)
        except OSError:
            return False
        nearly = max(_FULL, room.f_blocks * room.f_frsize // _FULL_PART)
        return room.f_bavail * room.f_frsize <= nearly or (room.f_files > 0 and room.f_favail == 0)

    def _count(self, others: dict[int, Process], ended: int = 0) -> None:
        if self._processes is not None and sum(one.threads for one in others.values()) + ended + 1 >= self._processes:
            self._reached.add("pids")

    # -- counting ---------------------------------------------------------------------------------------------------------------

    def begin(self, *, alone: bool) -> Meter:
        """A command begins; `alone`: nothing else runs, so peaks are its own."""
        gauges = self.gauges
        if alone:
            self._peak = 0
            self._reached.clear()
        if gauges is None:
            return Meter(0, 0, None)
        if alone:
            gauges.reset_peak()
        return Meter(gauges.oom_kills(), gauges.refused_forks(), gauges.cpu_s())

    def broken_since(self, meter: Meter, others: Callable[[], dict[int, Process]], *, failed: bool) -> list[str]:
        """The limits that were reached since. What the kernel does not count is looked at once more for a command that failed."""
        if failed and self._processes is not None:
            self._count(others(), ended=1)
        if failed and self._layers >= 0 and self._disk_is_out():
            self._reached.add("disk")
        found = []
        if self.gauges is not None:
            if self.gauges.oom_kills() > meter.oom_kills:
                found.append("memory")
            if self.gauges.refused_forks() > meter.refused_forks:
                found.append("pids")
        return found + sorted(self._reached)

    def _disk_is_out(self) -> bool:
        if self._hard:
            return self._is_full()
        most = [limit for limit in (self._disk, self._file_size) if limit is not None]
        if not most:
            return False
        try:
            return self._measured(time.monotonic() + 0.2) >= min(most) - _FULL
        except OSError:
            return False

    def used_since(self, meter: Meter, written: int | None) -> str:
        """CPU_S MEMORY_PEAK PROCESSES_PEAK WRITTEN, in words; `-` is what nobody knows."""
        self._written += written or 0
        cpu = None
        if self.gauges is not None and meter.cpu_s is not None:
            now = self.gauges.cpu_s()
            cpu = None if now is None else max(0.0, now - meter.cpu_s)
        return f"{_seconds(cpu)} {_whole(self._memory_peak())} {_whole(self._processes_peak())} {_whole(written)}"

    def told(self, others: dict[int, Process], ticks: int, *, measure: bool) -> str:
        """What is used now: MEMORY MEMORY_PEAK CPU_S PROCESSES PROCESSES_PEAK DISK WRITTEN. Without `measure` the disk is as it
        was when it was last looked at."""
        memory = self.gauges.memory() if self.gauges is not None else None
        if memory is None:
            memory = (sum(one.rss_kib for one in others.values()) << 10) + self._files_in_memory()
            self._peak = max(self._peak, memory)
        cpu = self.gauges.cpu_s() if self.gauges is not None else None
        if cpu is None:
            cpu = sum(one.ticks for one in others.values()) / ticks
        count = self.gauges.processes() if self.gauges is not None else None
        if count is None:
            count = sum(one.state not in "ZX" for one in others.values())
        words = (memory, self._memory_peak(), None, count, self._processes_peak(), self._disk_now(measure=measure), self._written)
        return " ".join(_seconds(cpu) if place == 2 else _whole(word) for place, word in enumerate(words))

    def _memory_peak(self) -> int | None:
        found = self.gauges.memory_peak() if self.gauges is not None else None
        return found if found is not None else self._peak or None

    def _processes_peak(self) -> int | None:
        return self.gauges.processes_peak() if self.gauges is not None else None

    def _measured(self, deadline: float) -> int:
        return measuring.used(self._layers, deadline=deadline).bytes + self._frozen

    def _disk_now(self, *, measure: bool) -> int | None:
        if self._layers < 0 or not measure:
            return self._disk_used
        try:
            if self._hard:
                return _taken(self._layers)
            self._disk_used = self._measured(time.monotonic() + 0.5)
        except OSError:
            pass  # what was known last is told
        return self._disk_used


def _proportional_bytes(process: Process) -> int:
    """What a process has for itself, and its part of what it shares: that would else be counted many times. Of one that hides,
    all of it."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", "rb") as stream:
            _, found, rest = stream.read().partition(b"\nPss:")
            return int(rest.split()[0]) << 10 if found else 0
    except PermissionError:
        return process.rss_kib << 10
    except (OSError, ValueError):
        return 0  # gone, or about to be


def _taken(fd: int) -> int:
    room = os.fstatvfs(fd)
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def _size(fd: int) -> int:
    room = os.fstatvfs(fd)
    return room.f_blocks * room.f_frsize


def _free(fd: int) -> int:
    room = os.fstatvfs(fd)
    return room.f_bavail * room.f_frsize


def _whole(number: int | float | None) -> str:
    return "-" if number is None else str(int(number))


def _seconds(number: float | None) -> str:
    return "-" if number is None else f"{number:.6f}"
