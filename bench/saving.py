"""Saving a sandbox's state, going back and forking it, by how much was changed in it, against what people use instead (J)."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import amounts
import progress
from amounts import Amount
from cloning import WORKTREE, worktree
from contenders import Parts, version_of
from effort import Effort
from elsewhere import Sandbox
from elsewhere.storage import trash
from measure import Row, Samples, Section
from project import git
from rounds import interleaved
from subvolumes import Subvolumes
from workspace import Workspace

__all__ = ["OPERATIONS", "ROW", "saving"]

OPERATIONS = ("snapshot", "rollback", "fork")
ROW = "elsewhere: {}, {}"
_PATIENCE_S = 60.0
_PAUSE_S = 0.2
_SHARED = "whole environment; nothing is copied"
_COPIED = "copied: layers cannot be shared on this rung"


@dataclass(slots=True)
class _Contender:
    """Something that is timed with one amount of changes after the other: a row for each, and one for what comes afterwards."""

    once: Callable[[Amount], Parts]
    rows: dict[Amount, Row]
    afterwards: dict[Amount, Row] = field(default_factory=dict)

    def present(self) -> list[Amount]:
        return [amount for amount, row in self.rows.items() if not row.absent]


def saving(place: Workspace, effort: Effort) -> Section:
    large = [amounts.large(mib) for mib in effort.saved_mib]
    every = [*large, amounts.small(effort.saved_files)]
    section = Section(
        "J",
        "Snapshot, rollback and fork of an idle sandbox, by how much was changed in it",
        f"A fresh sandbox of the project of {effort.project_files:,} files each time, in which so much was just written (new, in "
        f"{large[0].files} files, or in small ones of {every[-1].size // 1024} KiB), which is not timed; nor, for anybody, is "
        "what the disk takes to write it. A rollback goes to what the sandbox started from and saves what it leaves; forwards "
        "again leads back to that. A sandbox goes on with another first process, and a fork starts when it is first used: so the "
        "first command afterwards is shown, too. Neighbours save the same files, `cp -a` and btrfs those alone, git those of a "
        "clone of the project. In changing order, with a pause before each, in which what the one before left is deleted; `cp "
        "-a` and `git stash`, which may take seconds, fewer times, and after the others.",
        "ms",
        baseline=f"the same with {every[0].name}",
    )
    ours = [_ours(place, operation, every) for operation in OPERATIONS]
    copy, stash = _copy(place, every), _stash(place, large[: effort.stashed])
    checkout = _Contender(
        lambda _: {"total": worktree(place)}, {every[0]: Row(WORKTREE, "tracked files of the project", absent=_no_git())}
    )
    progress.say("J: a disk with btrfs")
    with Subvolumes(place, [amount for amount in every if not amount.does_not_fit(place.root)]) as disk:
        volumes = _volumes(place, disk, every)
        progress.say(f"J: {', '.join(OPERATIONS)}")
        _measure([*ours, checkout, volumes], effort.saved_rounds, effort.pause)
    progress.say("J: cp -a, git stash")
    _measure([copy, stash], effort.heavy_rounds, effort.pause)
    for contender in (*ours, copy, stash, checkout, volumes):
        section.rows += _rows(contender)
    return section


def _measure(contenders: list[_Contender], rounds: int, pause: float) -> None:
    """Everybody warms up with the least: a gigabyte more for each would take longer than it is worth."""
    for contender in contenders:
        for amount in contender.present()[:1]:
            contender.once(amount)
    present = [(contender, amount) for contender in contenders for amount in contender.present()]
    steps = [lambda pair=pair: pair[0].once(pair[1]) for pair in present]
    results = interleaved(steps, rounds, pause, warm_ups=0, patience=_PATIENCE_S)
    for (contender, amount), taken in zip(present, results, strict=True):
        contender.rows[amount].samples = Samples.of([parts["total"] for parts in taken], 1000)
        if amount in contender.afterwards:
            contender.afterwards[amount].samples = Samples.of([parts["afterwards"] for parts in taken], 1000)


def _rows(contender: _Contender) -> list[Row]:
    """With their ratios to the first, which has the least changes."""
    rows = []
    first = next(iter(contender.rows.values()))
    for amount, row in contender.rows.items():
        if row.samples is not None and first.samples is not None and len(contender.rows) > 1:
            row.ratio = row.samples.median / first.samples.median
        rows.append(row)
        if amount in contender.afterwards and row.samples is not None:
            rows.append(contender.afterwards[amount])
    return rows


# -- elsewhere ------------------------------------------------------------------------------------------------------------------


def _ours(place: Workspace, operation: str, every: list[Amount]) -> _Contender:
    timed, afterwards = {
        "snapshot": (_snapshot, "first command afterwards"),
        "rollback": (_rollback, "forwards again"),
        "fork": (_fork, "first command in it"),
    }[operation]
    rows = {amount: Row(ROW.format(operation, amount.name), absent=amount.does_not_fit(place.root)) for amount in every}

    def once(amount: Amount) -> Parts:
        with Sandbox.create(project=place.project, base="live") as box:
            amount.write_inside(box)
            os.sync()
            time.sleep(_PAUSE_S)
            parts = timed(box)
            rows[amount].note = _COPIED if any(one.copied for one in box.snapshots()) else _SHARED
            return parts

    return _Contender(once, rows, {amount: Row(afterwards, part=True) for amount in every})


def _snapshot(box: Sandbox) -> Parts:
    return _timed(box.snapshot, lambda: box.run(["true"]).check())


def _rollback(box: Sandbox) -> Parts:
    left: list[str | None] = []
    parts = _timed(lambda: left.append(box.rollback("base")), lambda: box.rollback(left[0] or ""))
    if not box.files.exists("changed"):
        raise RuntimeError("a rollback did not bring back what another one had left")
    return parts


def _fork(box: Sandbox) -> Parts:
    made: list[Sandbox] = []
    try:
        return _timed(lambda: made.extend(box.fork()), lambda: made[0].run(["test", "-d", "changed"]).check())
    finally:
        for child in made:
            child.remove()


def _timed(action: Callable[[], object], afterwards: Callable[[], object]) -> Parts:
    began = time.perf_counter()
    action()
    done = time.perf_counter()
    afterwards()
    return {"total": done - began, "afterwards": time.perf_counter() - done}


# -- neighbours -----------------------------------------------------------------------------------------------------------------


def _copy(place: Workspace, every: list[Amount]) -> _Contender:
    no_copy = "" if shutil.which("cp") else "cp is not installed"

    def once(amount: Amount) -> Parts:
        source, target = place.fresh("changes"), place.fresh("copy")
        os.mkdir(source)
        try:
            amount.write_outside(source)
            os.sync()
            began = time.perf_counter()
            subprocess.run(["cp", "-a", source, target], check=True)
            return {"total": time.perf_counter() - began}
        finally:
            for directory in (source, target):
                trash.remove_tree(directory)

    note = "the changed files alone"
    return _Contender(
        once, {amount: Row(f"cp -a, {amount.name}", note, absent=no_copy or amount.does_not_fit(place.root)) for amount in every}
    )


def _stash(place: Workspace, sizes: list[Amount]) -> _Contender:
    """In a clone for each: an object that is there from the time before would not be written again."""

    def once(amount: Amount) -> Parts:
        clone = place.fresh("clone")
        try:
            git(place.project, "clone", "--quiet", "--shared", place.project, clone)
            amount.write_outside(clone)
            os.sync()
            who = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")
            began = time.perf_counter()
            git(clone, *who, "stash", "push", "--quiet", "--include-untracked")
            return {"total": time.perf_counter() - began}
        finally:
            trash.remove_tree(clone)

    note = "untracked files too; they are gone from the tree afterwards"
    return _Contender(
        once,
        {amount: Row(f"git stash, {amount.name}", note, absent=_no_git() or amount.does_not_fit(place.root)) for amount in sizes},
    )


def _volumes(place: Workspace, disk: Subvolumes, every: list[Amount]) -> _Contender:
    """The changes were written long before: btrfs has nothing left to bring to disk."""
    rows = {}
    for amount in every:
        row = Row(f"btrfs subvolume snapshot, {amount.name}", "the changed files alone; needs root and btrfs")
        row.absent = disk.absent or amount.does_not_fit(place.root)
        rows[amount] = row
    return _Contender(lambda amount: {"total": disk.once(amount)}, rows)


def _no_git() -> str:
    return "" if version_of("git") else "git is not installed"
