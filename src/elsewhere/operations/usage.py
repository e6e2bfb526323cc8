"""What running sandboxes use, asked of their keepers."""

import contextlib
from collections.abc import Iterable

from elsewhere.errors import ElsewhereError
from elsewhere.operations import admission
from elsewhere.operations.admission import Claim
from elsewhere.sandbox.keeping import line
from elsewhere.sandbox.keeping.line import Usage
from elsewhere.sandbox.records import record, truth
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Top", "top", "usage_of"]


@dataclass(frozen=True, slots=True)
class Top:
    """What runs now, the largest first, and who waits for room."""

    running: list[tuple[Record, Usage]]
    waiting: list[Claim]


def usage_of(state: State, found: Record, *, measure: bool = True) -> Usage | None:
    """None: it does not run, or its keeper cannot say."""
    if found.state != "running":
        return None
    with contextlib.suppress(ElsewhereError):
        reached = line.connect(state.sandbox(found.id))
        if reached is not None:
            with reached:
                return reached.usage(measure=measure)
    return None


def top(wanted: Iterable[str] = ()) -> Top:
    state = State.open()
    chosen = {record.find(state, word) for word in wanted}
    running = []
    for found in truth.survey(state).records:
        usage = usage_of(state, found) if not chosen or found.id in chosen else None
        if usage is not None:
            running.append((found, usage))
    running.sort(key=lambda pair: pair[1].memory_bytes or 0, reverse=True)
    return Top(running, admission.waiting(state))
