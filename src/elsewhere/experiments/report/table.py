"""All attempts in one table, best first. Where it is too narrow for a table, each row is a card of its own."""

from collections.abc import Sequence
from typing import Any

from elsewhere import units
from elsewhere.experiments.report import facts
from elsewhere.experiments.report.markup import Markup, element
from elsewhere.experiments.report.words import line

__all__ = ["anchor", "badge", "comparison"]

_HEADS = ("approach", "verdict", "score", "tests", "time", "peak memory", "changed", "denials", "why")
_NUMBERS = ("score", "tests", "time", "peak memory", "denials")
_TONES = {"verified": "good", "not verified": "bad"}


def comparison(attempts: Sequence[dict[str, Any]], won: dict[str, Any] | None) -> Markup:
    """A column in which nobody has anything to say is left out."""
    rows = [_cells(one, name, number) for number, (one, name) in enumerate(zip(attempts, facts.names(attempts), strict=True))]
    heads = [head for at, head in enumerate(_HEADS) if head in ("approach", "verdict", "why") or any(row[at] for row in rows)]
    head = element("tr", *(element("th", one, scope="col", role="columnheader", class_=_kind(one)) for one in heads), role="row")
    body = [_row(dict(zip(_HEADS, row, strict=True)), heads, won is one) for one, row in zip(attempts, rows, strict=True)]
    return element(
        "table",
        element("caption", "All attempts, best first", class_="unseen"),
        element("thead", head, role="rowgroup"),
        element("tbody", *body, role="rowgroup"),
        class_="comparison",
        role="table",
    )


def badge(attempt: dict[str, Any]) -> Markup:
    words = facts.verdict(attempt)
    sign = {"verified": "✓ ", "not verified": "✗ "}.get(words, "")
    return element("span", f"{sign}{words}", class_=f"badge {_TONES.get(words, 'going')}")


def anchor(number: int) -> str:
    """By position: a name is somebody else's."""
    return f"attempt-{number + 1}"


def _cells(attempt: dict[str, Any], name: str, number: int) -> list[Markup | str]:
    peak, denied = facts.peak(attempt), facts.denied(attempt)
    return [
        element("a", line(name, 120), href=f"#{anchor(number)}"),
        badge(attempt),
        facts.score(attempt),
        _tests(attempt),
        facts.took(attempt.get("duration_ms")),
        "" if peak is None else units.format_size(peak),
        facts.changed(attempt),
        f"{denied:,}" if denied else "",
        line(str(attempt.get("why") or ""), 600),
    ]


def _tests(attempt: dict[str, Any]) -> Markup | str:
    told = facts.tests(attempt)
    if told is None:
        return ""
    passed, failed = told
    lost = element("span", f"{failed:,} failed", class_="minus") if failed else None
    return element("span", f"{passed:,} passed", ", " if failed else None, lost)


def _row(cells: dict[str, Markup | str], heads: list[str], won: bool) -> Markup:
    shown = []
    for head in heads:
        name, scope, role = ("th", "row", "rowheader") if head == "approach" else ("td", None, "cell")
        kind = " ".join(filter(None, (_kind(head), None if cells[head] else "none")))
        shown.append(element(name, cells[head] or "\N{EN DASH}", scope=scope, role=role, data_head=head, class_=kind or None))
    return element("tr", *shown, role="row", class_="won" if won else None)


def _kind(head: str) -> str | None:
    return "figure" if head in _NUMBERS else "why" if head == "why" else "name" if head == "approach" else None
