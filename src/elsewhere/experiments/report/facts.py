"""What the document says, in words and numbers that people read. Only what several parts of a report, or the table on a terminal,
say in the same way."""

import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from elsewhere import units

__all__ = ["changed", "denied", "key", "moment", "names", "peak", "score", "span", "tests", "took", "verdict", "winner"]

Attempt = dict[str, Any]


def key(attempt: Attempt) -> str:
    """By which its patch and its output are found."""
    return f"{attempt['name']}-{attempt.get('attempt', 1)}"


def names(attempts: Sequence[Attempt]) -> list[str]:
    """What each is called: with its number where an approach was tried more than once."""
    times = Counter(one["name"] for one in attempts)
    return [one["name"] if times[one["name"]] == 1 else f"{one['name']} #{one.get('attempt', 1)}" for one in attempts]


def winner(experiment: dict[str, Any]) -> Attempt | None:
    """The attempt that won; where its number is not said, the best one of the approach that is named."""
    name, number = experiment.get("winner"), experiment.get("winner_attempt")
    found = [one for one in experiment.get("approaches") or () if one["name"] == name and number in (None, one.get("attempt"))]
    return min(found, key=lambda one: (not one.get("verified"), _rank(one)), default=None) if name else None


def verdict(attempt: Attempt) -> str:
    state = attempt.get("state", "done")
    if state != "done":
        return str(state)
    return "verified" if attempt.get("verified") else "not verified"


def score(attempt: Attempt) -> str:
    value = attempt.get("score")
    return "" if value is None else f"{value:.10g}" if isinstance(value, (int, float)) else str(value)


def tests(attempt: Attempt) -> tuple[int, int] | None:
    """Passed and failed, in all checks that told."""
    told = [one["tests"] for one in attempt.get("checks") or () if one.get("tests")]
    return (sum(one.get("passed") or 0 for one in told), sum(one.get("failed") or 0 for one in told)) if told else None


def took(milliseconds: float | None) -> str:
    return "" if milliseconds is None else units.format_duration(max(0.0, milliseconds / 1000))


def peak(attempt: Attempt) -> int | None:
    """The most memory that it had; without a peak from the kernel, the most that was seen. Nothing at all was not measured."""
    told = attempt.get("peak_memory_bytes")
    seen = [int(one[1]) for one in attempt.get("samples") or () if one[1] is not None and math.isfinite(one[1])]
    return (int(told) if told is not None else max(seen, default=0)) or None


def changed(attempt: Attempt) -> str:
    """How many files, and how many lines came and went."""
    changes = attempt.get("changes")
    if not changes:
        return ""
    if not changes.get("files"):
        return "nothing"
    added, removed = changes.get("added") or 0, changes.get("removed") or 0
    return f"{units.count(changes['files'], 'file')}, +{added:,} \N{MINUS SIGN}{removed:,}"


def denied(attempt: Attempt) -> int:
    return sum(int(one.get("count") or 1) for one in attempt.get("denials") or ())


def moment(value: object) -> float | None:
    """Seconds since the epoch, of a time as documents write it, or of a number."""
    if isinstance(value, (int, float)):
        return float(value) if math.isfinite(value) else None
    try:
        return datetime.fromisoformat(str(value)).timestamp() if value else None
    except ValueError:
        return None


def span(attempt: Attempt) -> tuple[float, float] | None:
    """From when to when it was at work; until now, as far as is known, if it still is."""
    began = moment(attempt.get("started_at"))
    if began is None:
        return None
    ended = moment(attempt.get("ended_at"))
    return began, max(began, began + (attempt.get("duration_ms") or 0) / 1000 if ended is None else ended)


def _rank(attempt: Attempt) -> float:
    rank = attempt.get("rank")
    return math.inf if rank is None else rank
