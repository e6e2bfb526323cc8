"""The timeline and the plots, as SVG that stretches with the page. Words stand beside it as HTML, so that they never stretch."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from elsewhere import units
from elsewhere.experiments.report import facts
from elsewhere.experiments.report.markup import Markup, element, joined
from elsewhere.experiments.report.words import line

__all__ = ["resources", "timeline"]

_WIDE = 1000
_HIGH = 100
_MOST_POINTS = 400
_LONGEST_NAME = 60

Sample = tuple[float, float, float]


def timeline(experiment: dict[str, Any], attempts: Sequence[dict[str, Any]]) -> Markup | None:
    """Who was at work when, on one scale: the command, and its checks in a lighter tone."""
    spans = [facts.span(one) for one in attempts]
    known = [one for one in spans if one is not None]
    if not known:
        return None
    start = min(began for began, _ in known)
    asked = facts.moment(experiment.get("created_at"))
    start = start if asked is None else min(start, asked)
    whole = max(max(ended for _, ended in known) - start, 0.001)
    rows = []
    for one, name, span in zip(attempts, facts.names(attempts), spans, strict=True):
        words = "never began" if span is None else f"{facts.took((span[1] - span[0]) * 1000)}"
        bar = None if span is None else _bar(one, span, start, whole)
        drawn = _svg(bar, f"{line(name, _LONGEST_NAME)}: {words}", 10)
        rows.append(
            element("li", element("span", line(name, _LONGEST_NAME), class_="name"), drawn, element("span", words, class_="time"))
        )
    scale = element("div", *(element("span", facts.took(whole * part * 1000)) for part in (0, 0.5, 1)), class_="scale")
    key = _legend(("command good", "verified"), ("command bad", "not verified"), ("checks", "its checks"))
    return joined(key, element("ol", *rows, class_="timeline"), scale)


def _bar(attempt: dict[str, Any], span: tuple[float, float], start: float, whole: float) -> Markup:
    """The command's own part, then that of its checks."""
    began, ended = (_WIDE * (moment - start) / whole for moment in span)
    own = attempt.get("duration_ms")
    turn = ended if own is None else min(ended, began + _WIDE * own / 1000 / whole)
    kind = "good" if attempt.get("verified") else "bad" if attempt.get("state", "done") == "done" else "going"
    return joined(
        _box(began, max(turn - began, 2), 0, 10, f"command {kind}"),
        _box(turn, ended - turn, 2, 6, f"checks {kind}") if ended - turn >= 1 else None,
    )


def resources(attempts: Sequence[dict[str, Any]]) -> Markup | None:
    """Memory and processors of each attempt over time, all on the same scales, so that they can be compared."""
    told = [(one, name, _samples(one)) for one, name in zip(attempts, facts.names(attempts), strict=True)]
    drawn = [(one, name, samples) for one, name, samples in told if len(samples) > 1]
    if not drawn:
        return None
    longest = max(samples[-1][0] for _, _, samples in drawn) or 1.0
    most = max(max(memory for _, memory, _ in samples) for _, _, samples in drawn) or 1.0
    loads = [_loads(samples) for _, _, samples in drawn]
    busiest = max(1.0, math.ceil(max(load for points in loads for _, load in points)))
    figures = []
    for (one, name, samples), load in zip(drawn, loads, strict=True):
        memory = [(seconds, used) for seconds, used, _ in samples]
        peak, cpu = facts.peak(one), one.get("cpu_ms")
        figures.append(
            element(
                "figure",
                element("figcaption", line(name, _LONGEST_NAME)),
                _plot(
                    "memory", memory, longest, most, "memory: " + ("" if peak is None else f"at most {units.format_size(peak)}")
                ),
                _plot("load", load, longest, busiest, "processors: " + ("" if cpu is None else f"{facts.took(cpu)} in all")),
            )
        )
    ends = (facts.took(longest * 1000), units.format_size(int(most)), units.count(int(busiest), "processor"))
    scales = f"All plots end at {ends[0]}, {ends[1]} and {ends[2]}."
    left_out = len(told) - len(drawn)
    if left_out:
        scales += f" {units.count(left_out, 'attempt')} ended before anything was measured."
    return joined(element("p", scales, class_="quiet"), element("div", *figures, class_="plots"))


def _plot(kind: str, points: list[tuple[float, float]], right: float, top: float, words: str) -> Markup:
    places = [f"{_WIDE * seconds / right:.1f} {_HIGH - (_HIGH - 4) * min(value / top, 1):.1f}" for seconds, value in points]
    first, last = places[0].split()[0], places[-1].split()[0]
    trace = "L".join(places)
    area = element("path", d=f"M{first} {_HIGH}L{trace}L{last} {_HIGH}Z", class_="area")
    stroke = element("path", d=f"M{trace}", class_="stroke")
    floor = element("line", x1="0", x2=_WIDE, y1=_HIGH, y2=_HIGH, class_="floor")
    return element("div", _svg(joined(area, stroke, floor), words, _HIGH), element("span", words), class_=f"plot {kind}")


def _samples(attempt: dict[str, Any]) -> list[Sample]:
    """In order of time, and no more of them than there is room for."""
    found: list[Sample] = []
    for seconds, memory, cpu in attempt.get("samples") or ():
        sample = (float(seconds), float(memory or 0), float(cpu or 0))
        if all(math.isfinite(value) and value >= 0 for value in sample) and (not found or sample[0] > found[-1][0]):
            found.append(sample)
    step = math.ceil(len(found) / _MOST_POINTS) or 1
    return found if step == 1 else [_highest(found[at : at + step]) for at in range(0, len(found), step)]


def _highest(samples: list[Sample]) -> Sample:
    """Of several, one that hides no peak."""
    return samples[-1][0], max(memory for _, memory, _ in samples), samples[-1][2]


def _loads(samples: list[Sample]) -> list[tuple[float, float]]:
    """How many processors were busy, from the time that they were."""
    points = [(later[0], max(0.0, later[2] - sooner[2]) / 1000 / (later[0] - sooner[0])) for sooner, later in pairwise(samples)]
    return [(samples[0][0], points[0][1]), *points]


def _svg(children: Markup | None, words: str, high: int) -> Markup:
    return element("svg", children, viewBox=f"0 0 {_WIDE} {high}", preserveAspectRatio="none", role="img", aria_label=words)


def _box(x: float, width: float, y: float, height: float, kind: str) -> Markup:
    return element("rect", x=f"{x:.1f}", y=y, width=f"{width:.1f}", height=height, class_=kind)


def _legend(*entries: tuple[str, str]) -> Markup:
    return element("p", *(element("span", element("i", class_=kind), words) for kind, words in entries), class_="legend")
