"""Which attempt is better, and why, in a sentence. Pure: the same attempts are always ranked the same.

1   verified before not verified
2   the score command's number, higher first (`lower`: lower first); one without a number comes last
3   more of the scored checks
4   fewer changed lines
5   less time
6   the order in which they were named, then the number of the attempt
"""

from collections.abc import Callable, Sequence

from elsewhere import units
from elsewhere.experiments.records import Attempt

__all__ = ["described", "number", "rank", "reason"]

_Key = Callable[[Attempt], float]


def rank(attempts: Sequence[Attempt], *, lower: bool = False) -> list[Attempt]:
    """Best first; each is given its rank. `attempts` are in the order in which they were named."""
    order = {id(one): place for place, one in enumerate(attempts)}
    ranked = sorted(attempts, key=lambda one: (*(key(one) for key in _keys(lower)), order[id(one)]))
    for place, one in enumerate(ranked, 1):
        one.rank = place
    return ranked


def _keys(lower: bool) -> tuple[_Key, ...]:
    def score(one: Attempt) -> float:
        if one.score is None:
            return float("inf")
        return one.score if lower else -one.score

    return (
        lambda one: 0.0 if one.verified else 1.0,
        score,
        lambda one: float(-one.scored),
        lambda one: float(one.lines),
        lambda one: float("inf") if one.seconds is None else one.seconds,
    )


def reason(ranked: Sequence[Attempt], *, lower: bool = False) -> str:
    """Why the first one is first, or why none is."""
    if not ranked or not ranked[0].verified:
        return _none(ranked)
    best, others = ranked[0], [one for one in ranked[1:] if one.verified]
    if not others:
        total = units.count(len(ranked), "attempt")
        return f"{described(best, ranked)} won: of {total}, it is the only one that verified"
    return (
        f"{described(best, ranked)} won: {_better(best, others[0], ranked, lower)}; {len(others) + 1} of {len(ranked)} verified"
    )


def _better(best: Attempt, second: Attempt, ranked: Sequence[Attempt], lower: bool) -> str:
    other = described(second, ranked)
    if best.score != second.score:
        if second.score is None:
            return f"it has a score ({number(best.score)}), and {other} has none"
        return f"its score {number(best.score)} is {'lower' if lower else 'higher'} than {number(second.score)} of {other}"
    same = "" if best.score is None else f"with the same score as {other} ({number(best.score)}), "
    if best.scored != second.scored:
        return f"{same}it passed {best.scored} of the scored checks, and {other} {second.scored}"
    if best.lines != second.lines:
        return f"{same}it changed fewer lines ({best.lines}) than {other} ({second.lines})"
    if best.seconds != second.seconds:
        mine, theirs = (units.format_duration(one.seconds or 0.0) for one in (best, second))
        return f"{same}{'with ' if same else ''}as many changed lines, it took less time ({mine}) than {other} ({theirs})"
    return f"nothing tells it from {other}, and it was named first"


def _none(ranked: Sequence[Attempt]) -> str:
    if not ranked:
        return "there was nothing to rank"
    died = "; ".join(f"{described(one, ranked)}: {one.why or 'not verified'}" for one in ranked[:5])
    more = f"; and {len(ranked) - 5} more" if len(ranked) > 5 else ""
    return f"none of {units.count(len(ranked), 'attempt')} verified: {died}{more}"


def described(one: Attempt, among: Sequence[Attempt]) -> str:
    """Its name; with the number of the attempt, if there are several."""
    several = sum(other.name == one.name for other in among) > 1
    return f"{one.name} (attempt {one.attempt})" if several else one.name


def number(value: float | None) -> str:
    """A score as people write it."""
    return "none" if value is None else f"{value:.10g}"
