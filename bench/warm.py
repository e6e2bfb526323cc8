"""From a process that is warm: a sandbox's whole life against its neighbours', with a pause between (A) and without help (F)."""

import time
from collections.abc import Callable

from contenders import Parts, Program, Sandlock, cycle, spawned
from effort import Effort
from measure import Row, Samples, Section, against
from rounds import interleaved
from workspace import Workspace

__all__ = ["ELSEWHERE", "in_process", "sustained"]

ELSEWHERE = "elsewhere: create + run + remove"
_ISOLATES = "copy on write, namespaces, identity, record, filter"
_PARTS = ("create", "run", "remove")
_REST_S = 0.5


def in_process(place: Workspace, effort: Effort, neighbours: dict[str, Program], sandlock: Sandlock) -> Section:
    section = Section(
        "A",
        f"In process, warm: `true` in a sandbox of a project of {effort.project_files:,} files",
        "Each contender once in every round, in changing order, all started by the same process, with a pause of "
        f"{effort.pause * 1000:.0f} ms before each start (not timed, the same for all). In that time elsewhere makes ready what "
        "the next sandbox needs; F shows what happens when it cannot. Neighbours are started by posix_spawn, the fastest way "
        "that Python has.",
        "ms",
    )
    known = list(neighbours.values())
    lineup: list[tuple[Row, Callable[[], Parts] | None]] = [
        (Row(ELSEWHERE, _ISOLATES), cycle(place.project)),
        *((Row(one.name, one.isolates, absent=one.absent), None if one.absent else spawned(one)) for one in known),
        _sandlock(sandlock, "sandlock", "Landlock, system calls supervised", copy_on_write=False),
        _sandlock(sandlock, "sandlock, copy on write", "the same, project copy on write", copy_on_write=True),
    ]
    steps = [once for _, once in lineup if once is not None]
    results = iter(interleaved(steps, effort.warm_rounds, effort.pause))
    for row, once in lineup:
        section.rows.append(row)
        if once is None:
            continue
        taken = next(results)
        row.samples = _milliseconds(taken, "total")
        if row.name == ELSEWHERE:
            section.rows += [Row(part, samples=_milliseconds(taken, part), part=True) for part in _PARTS]
    against(section, "bwrap")
    return section


def _sandlock(sandlock: Sandlock, name: str, isolates: str, *, copy_on_write: bool) -> tuple[Row, Callable[[], Parts] | None]:
    row = Row(name, isolates, absent=sandlock.absent)
    return row, None if sandlock.absent else sandlock.once(copy_on_write=copy_on_write)


def sustained(place: Workspace, effort: Effort, neighbours: dict[str, Program]) -> Section:
    """What is made ahead of time helps a user who pauses now and then in one project. This is everybody else."""
    section = Section(
        "F",
        "Sustained: nothing is ready ahead of time",
        f"{effort.sustained} in a tight loop without any pause, so that the stock of waiting keepers cannot keep up, by design; "
        "then, with pauses, another project each time, for which no sandbox stands ready. One contender after the other, not "
        "interleaved: their aftermath is part of it.",
        "ms",
    )
    section.rows.append(_loop(Row(ELSEWHERE, _ISOLATES), [cycle(place.project)], effort.sustained))
    strange = Row(f"{ELSEWHERE}, another project each time", _ISOLATES)
    section.rows.append(_loop(strange, [cycle(other) for other in place.others], effort.strange_projects, pause=effort.pause))
    bwrap = neighbours["bwrap"]
    row = Row(bwrap.name, bwrap.isolates, absent=bwrap.absent)
    section.rows.append(row if bwrap.absent else _loop(row, [spawned(bwrap)], effort.sustained))
    against(section, "bwrap")
    return section


def _loop(row: Row, steps: list[Callable[[], Parts]], count: int, pause: float = 0.0) -> Row:
    time.sleep(_REST_S)  # whoever was measured before has come to rest
    taken = []
    for turn in range(count):
        time.sleep(pause)
        taken.append(steps[turn % len(steps)]())
    row.samples = _milliseconds(taken, "total")
    row.note = f"mean {row.samples.mean:.2f} ms; {row.note}"
    return row


def _milliseconds(taken: list[Parts], part: str) -> Samples:
    return Samples.of([parts[part] for parts in taken], 1000)
