"""Samples and the rows and sections that they become. No timing here (see `rounds.py`) and no printing (see `report.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Finding", "Row", "Samples", "Section", "against"]


@dataclass(frozen=True, slots=True)
class Samples:
    """Numbers in the unit of their section. Medians, since one hiccup of the machine must not decide; p10 and p90 show how wide
    it was."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> "Samples":
        return cls(tuple(value * scale for value in values))

    def quantile(self, share: float) -> float:
        ordered = sorted(self.values)
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


@dataclass(slots=True)
class Row:
    """One line of a table: what was measured, or why it could not be. `undisturbed` is the ratio of the p10, where noise can be
    larger than what is measured."""

    name: str
    note: str = ""
    samples: Samples | None = None
    absent: str = ""
    ratio: float | None = None
    undisturbed: float | None = None
    part: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen where nothing is timed: a cell of a table with a line for each `what` and a column for each `who`. `said` is
    what `who` said, in its own words."""

    what: str
    who: str
    outcome: str
    said: str = ""


@dataclass(slots=True)
class Section:
    """Either rows of numbers, or findings."""

    letter: str
    title: str
    text: str
    unit: str
    rows: list[Row] = field(default_factory=list)
    baseline: str = ""
    findings: list[Finding] = field(default_factory=list)

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


def against(section: Section, baseline: str) -> None:
    """Fill in the ratios of all rows to the median of one."""
    section.baseline = baseline
    found = section.row(baseline)
    if found is None or found.samples is None:
        return
    for row in section.rows:
        if row.samples is not None and not row.part:
            row.ratio = row.samples.median / found.samples.median
