"""Round-robin: every contender once in each round, so that the machine's noise hits all alike.

The order changes from round to round: whoever always came after the same neighbour would pay for that neighbour's aftermath
(pages to be freed, a pool to be refilled). The pause before each start is the same for all and is not timed.

Imports next to nothing, because `starter.py`, which must stay lean, uses it too.
"""

import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")

__all__ = ["interleaved"]

_AT_LEAST = 3


def interleaved(
    steps: Sequence[Callable[[], Result]], rounds: int, pause: float, *, warm_ups: int = 1, patience: float = 60.0
) -> list[list[Result]]:
    """The results of each step, in the order of `steps`; the first `warm_ups` rounds are thrown away. After `patience` seconds
    no further round begins, but for the few that a median needs: on a machine with a slow disk a copy takes its time."""
    deadline = time.monotonic() + patience
    results: list[list[Result]] = [[] for _ in steps]
    shuffled = random.Random(20_000)
    gc.collect()
    gc.disable()  # a collection in the middle would be charged to whoever happens to run
    try:
        for number in range(rounds + warm_ups):
            if number >= warm_ups + _AT_LEAST and time.monotonic() > deadline:
                break
            order = list(range(len(steps)))
            shuffled.shuffle(order)
            for index in order:
                time.sleep(pause)
                result = steps[index]()
                if number >= warm_ups:
                    results[index].append(result)
    finally:
        gc.enable()
    return results
