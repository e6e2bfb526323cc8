"""Who is first, and the sentence that says why."""

import itertools
import random

import pytest

from elsewhere.experiments.ranking import rank, reason
from elsewhere.experiments.records import Attempt


def made(name: str, *, verified: bool = True, attempt: int = 1, lines: int = 1, seconds: float = 1.0, **more: object) -> Attempt:
    changes = {"files": 1, "added": lines, "removed": 0, "paths": []}
    found = Attempt(name, attempt, "true", verified=verified, changes=changes, seconds=seconds)
    for key, value in more.items():
        setattr(found, key, value)
    return found


def names(attempts: list[Attempt], *, lower: bool = False) -> list[str]:
    return [one.name for one in rank(attempts, lower=lower)]


@pytest.mark.parametrize(
    ("better", "worse", "lower", "why"),
    [
        (made("a", lines=90, seconds=9.0, score=0.0), made("b", verified=False, score=9.0), False, "the only one that verified"),
        (made("a", score=3.0, lines=90), made("b", score=2.5), False, "its score 3 is higher than 2.5 of b"),
        (made("a", score=2.5, lines=90), made("b", score=3.0), True, "its score 2.5 is lower than 3 of b"),
        (made("a", score=-1.0), made("b", lines=0), False, "it has a score (-1), and b has none"),
        (made("a", score=-1.0), made("b", lines=0), True, "it has a score (-1), and b has none"),
        (made("a", scored=2, lines=90), made("b", scored=1), False, "it passed 2 of the scored checks, and b 1"),
        (made("a", score=1.0, scored=2), made("b", score=1.0), False, "with the same score as b (1), it passed 2"),
        (made("a", lines=3, seconds=9.0), made("b", lines=4), False, "it changed fewer lines (3) than b (4)"),
        (
            made("a", seconds=1.0),
            made("b", seconds=2.0),
            False,
            "as many changed lines, it took less time (1.0 s) than b (2.0 s)",
        ),
        (made("a"), made("b"), False, "nothing tells it from b, and it was named first"),
    ],
)
def test_each_criterion_decides_where_those_before_it_do_not(better: Attempt, worse: Attempt, lower: bool, why: str) -> None:
    ranked = rank([better, worse], lower=lower)
    assert [one.name for one in ranked] == ["a", "b"]
    assert [one.rank for one in ranked] == [1, 2]
    said = reason(ranked, lower=lower)
    assert said.startswith("a won: ")
    assert why in said
    if "named first" not in why:
        assert names([worse, better], lower=lower) == ["a", "b"], "the order of naming decides only what nothing else does"


def test_the_same_attempts_are_ranked_the_same_however_they_came() -> None:
    """Any two can be told apart by something, so that every order of them has one outcome."""
    every = [
        made(f"n{number}", verified=verified, score=score, lines=lines, seconds=float(number))
        for number, (verified, score, lines) in enumerate(itertools.product((True, False), (None, 1.0, 2.0), (1, 2)))
    ]
    expected = names(list(every))
    chance = random.Random(8)
    for _ in range(50):
        chance.shuffle(every)
        assert names(list(every)) == expected
    assert [one.verified for one in rank(every)] == [True] * 6 + [False] * 6


def test_if_none_verified_the_reason_is_what_each_died_of() -> None:
    ranked = rank([made("a", verified=False, why="it was slow"), made("b", verified=False, why="it broke")])
    assert reason(ranked) == "none of 2 attempts verified: a: it was slow; b: it broke"
    many = rank([made(f"n{number}", verified=False, why="x") for number in range(9)])
    assert reason(many).endswith("; and 4 more")
    assert reason([]) == "there was nothing to rank"


def test_attempts_of_one_approach_are_told_apart() -> None:
    ranked = rank([made("a", attempt=1, lines=2), made("a", attempt=2, lines=1)])
    assert reason(ranked).startswith("a (attempt 2) won: it changed fewer lines (1) than a (attempt 1) (2)")
