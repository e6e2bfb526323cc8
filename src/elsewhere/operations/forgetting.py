"""How long a promotion can be undone: for as long as the settings say, and as long as all of them together do not take too much.

One that has not ended, or that waits for a person, stays whatever its age; so does one that could not be put back, since its
project is gone: should that return, it is put back then.
"""

import contextlib
import os

from elsewhere.clock import Clock, wall
from elsewhere.errors import ElsewhereError, InUse, NotFound
from elsewhere.linux import measuring
from elsewhere.operations.settings import resolve
from elsewhere.promotion import records
from elsewhere.promotion.records import ENDS, Promotion
from elsewhere.storage import trash
from elsewhere.storage.state import State

__all__ = ["cost", "forget"]


def forget(state: State, *, dry_run: bool = False, clock: Clock = wall) -> list[str]:
    """The ids of those that went, or would go, oldest first."""
    settings = resolve(state, None)
    keep, cap = settings["promotion.keep"], settings["promotion.cap"]
    ended = [one for one in records.listed(state) if _may_go(one)]
    costs = {one.id: _known_cost(state, one) for one in ended}
    total, gone = sum(costs.values()), []
    for one in ended[:-1]:  # the last one stays: whoever has just been told that it can be undone counts on it
        if clock() - (one.ended_at or one.created_at) < keep and total <= cap:
            continue
        total -= costs[one.id]
        if dry_run or _discard(state, one):
            gone.append(one.id)
    return gone


def _may_go(promotion: Promotion) -> bool:
    try:
        return promotion.status in ENDS and promotion.status != "waiting" and not promotion.uncleared()
    except FileNotFoundError:
        return False  # somebody else has just thrown it away


def _discard(state: State, promotion: Promotion) -> bool:
    try:
        with records.held(promotion):
            if not _may_go(records.load(state, promotion.id)):  # somebody may have gone on with it until now
                return False
            trash.discard(promotion.directory, state.room("trash"))
    except (InUse, NotFound, FileNotFoundError):
        return False
    return True


def _known_cost(state: State, promotion: Promotion) -> int:
    """Measured once: what has ended does not grow. Not written down if there is no room, or somebody else is at it."""
    if promotion.bytes is None:
        promotion.bytes = cost(promotion)
        with contextlib.suppress(ElsewhereError, OSError), records.held(promotion):
            now = records.load(state, promotion.id)  # it may have been undone since
            now.bytes = promotion.bytes
            now.save()
    return promotion.bytes


def cost(promotion: Promotion) -> int:
    """What it takes on the disk."""
    fd = os.open(promotion.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return measuring.used(fd).bytes
    finally:
        os.close(fd)
