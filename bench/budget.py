"""The budgets of the design that apply so far, and whether they are met. Ratios of one run on one machine; never a failure."""

from dataclasses import dataclass

import cloning
import differing
import filework
import memory
import pinned
import saving
import shell
import warm
from measure import Row, Section

__all__ = ["Verdict", "judge"]

_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    budget: str
    measured: str
    verdict: str


def judge(sections: list[Section]) -> list[Verdict]:
    by_letter = {section.letter: section for section in sections}
    return [
        _ratio(by_letter.get("A"), warm.ELSEWHERE, "in-process create + run `true` + remove, against `bwrap`", 1.0, 0.8),
        _ratio(by_letter.get("B"), shell.ELSEWHERE, "cold `elsewhere run -- true`, against `python -c pass`", 2.5, 2.0),
        _memory(by_letter.get("E"), 2.0),
        _ratio(by_letter.get("D"), filework.TOTAL, "file work inside, against outside", 1.4, None),
        _faster(by_letter.get("G"), pinned.WARM.format(20_000), "pinned create, 20,000 files, warm"),
        _faster(by_letter.get("C"), cloning.ELSEWHERE, "live create"),
        *(_saving(by_letter.get("J"), operation) for operation in saving.OPERATIONS),
        *(_differing(by_letter.get("K"), base) for base in differing.BASES),
    ]


def _ratio(section: Section | None, name: str, what: str, limit: float, aim: float | None) -> Verdict:
    budget = f"≤ {limit:.1f} x" + (f" (aim {aim:.1f} x)" if aim else "")
    row = section.row(name) if section else None
    if row is None or row.ratio is None:
        return Verdict(what, budget, "-", f"not measured{_reason(section)}")
    verdict = _verdict(row.ratio, limit, aim)
    if row.undisturbed is None:
        return Verdict(what, budget, f"{row.ratio:.2f} x", verdict)
    second = _verdict(row.undisturbed, limit, aim)
    agreed = verdict if second == verdict else f"{verdict} by medians, {second} by p10: the disk was disturbed"
    return Verdict(what, budget, f"{row.ratio:.2f} x ({row.undisturbed:.2f} by p10)", agreed)


def _memory(section: Section | None, limit: float) -> Verdict:
    what, budget = "memory of an idle running sandbox, proportional", f"≤ {limit:.0f} MiB"
    row = section.row(memory.KEEPER) if section else None
    if row is None or row.samples is None:
        return Verdict(what, budget, "-", f"not measured{f': {row.absent}' if row and row.absent else ''}")
    return Verdict(what, budget, f"{row.samples.median:.2f} MiB", _verdict(row.samples.median, limit, None))


def _faster(section: Section | None, name: str, what: str) -> Verdict:
    what, budget = f"{what}, against `git worktree add`", "≥ 10 x faster"
    row = section.row(name) if section else None
    if row is None or not row.ratio:
        return Verdict(what, budget, "-", f"not measured{_reason(section)}")
    return Verdict(what, budget, f"{1 / row.ratio:.0f} x faster", "met" if 1 / row.ratio >= 10 else "missed")


def _saving(section: Section | None, operation: str) -> Verdict:
    names = [saving.ROW.format(operation, amount) for amount in ("1 MiB", "1 GiB")]
    return _constant(section, f"{operation} of an idle sandbox with 1 GiB of changes, against 1 MiB", 5.0, *names)


def _differing(section: Section | None, base: str) -> Verdict:
    names = [differing.ROW.format(10, files, base) for files in (1_000, 100_000)]
    return _constant(section, f"10 changes in 100,000 files ({base} base), against 1,000 files", 10.0, *names)


def _constant(section: Section | None, what: str, limit: float, little: str, much: str) -> Verdict:
    """So many milliseconds, and no more with much than with little, but for what the machine's noise may be."""
    budget = f"≤ {limit:.0f} ms, ≤ {_GROWTH} x"
    rows = [section.row(name) if section else None for name in (little, much)]
    medians = [row.samples.median for row in rows if row is not None and row.samples is not None]
    if len(medians) < 2:
        reasons = [f": {row.absent}" for row in rows if row is not None and row.absent]
        return Verdict(what, budget, "-", f"not measured{reasons[0] if reasons else ''}")
    ratio = medians[1] / medians[0]
    missed = [name for name, over in (("time", medians[1] > limit), ("growth", ratio > _GROWTH)) if over]
    return Verdict(what, budget, f"{medians[1]:.2f} ms, {ratio:.2f} x", f"missed: {' and '.join(missed)}" if missed else "met")


def _verdict(measured: float, limit: float, aim: float | None) -> str:
    if measured > limit:
        return "missed"
    if aim is None:
        return "met"
    return "met, and the aim too" if measured <= aim else "met, the aim is not"


def _reason(section: Section | None) -> str:
    if section is None:
        return ""
    baseline: Row | None = section.row(section.baseline)
    return f": {baseline.name} is absent ({baseline.absent})" if baseline is not None and baseline.absent else ""
