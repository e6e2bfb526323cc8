"""What somebody who was interrupted left half done in reality is finished, or put back, by whoever comes next.

One look at the journal, and nothing more, if nothing was interrupted.
"""

import contextlib
import os

from elsewhere.errors import Broken, CheckFailed, ElsewhereError, InUse, NotFound
from elsewhere.promotion import applying, heads, records, replaying, restoring
from elsewhere.promotion.records import Promotion
from elsewhere.promotion.stages import AT_WORK
from elsewhere.storage.state import State

__all__ = ["recover", "undone"]


def recover(state: State, project: str | None = None) -> list[Promotion]:
    """Those that were interrupted, as they are now. One that somebody works on is left to them. One that can be neither finished
    nor put back says why, and is tried again by whoever comes next; only for those who are about to move something to the same
    project it is in the way."""
    found: list[Promotion] = []
    problems: list[Exception] = []
    for one in records.unfinished(state):
        try:
            with records.held(one):
                again = records.load(state, one.id)
                had_ended = again.status in records.ENDS
                try:
                    _see_to(state, again)
                except InUse:
                    continue
                except (ElsewhereError, OSError) as error:
                    _note(again, error)
                    problems += [error] if again.project == project else []
                found += [] if had_ended else [again]
        except (InUse, NotFound, Broken, OSError):
            continue  # somebody works on it, or it can only be asked for by its name
    if problems:
        raise problems[0]
    return found


def _note(promotion: Promotion, error: Exception) -> None:
    words = f"interrupted, and could not be put back: {error.message if isinstance(error, ElsewhereError) else error}"
    if promotion.status not in records.ENDS and promotion.note != words:
        promotion.note = words
        with contextlib.suppress(OSError):
            promotion.save()


def _see_to(state: State, promotion: Promotion) -> None:
    there = os.path.isdir(promotion.project)
    if promotion.status not in records.ENDS:
        if there:
            _finish(state, promotion)
        else:
            _give_up(promotion)
    elif there:
        for place in promotion.uncleared():
            applying.recover(place)
        promotion.save()  # which takes it off the list, if nothing is left to do


def _give_up(promotion: Promotion) -> None:
    """There is nothing any more that could be put back. Should the project return, it is put back then."""
    words = f"the project {promotion.project!r} is gone; what was replaced in it lies in {promotion.directory}, or in a"
    words += " directory .elsewhere-… wherever the project is now"
    for entry in promotion.stages:
        if entry["status"] in AT_WORK:
            entry.update({"status": "reversed", "approved": None, "not_reversed": words})
    promotion.end("reversed", f"interrupted, and {words}")


def _finish(state: State, promotion: Promotion) -> None:
    if promotion.stages:
        restoring.recover(promotion)
        return
    if promotion.kind == "replay":
        left = replaying.put_back(promotion, promotion.application(), interrupted=True)
        words = f"interrupted; these could not be put back, and stay: {', '.join(left)}" if left else "interrupted, and put back"
        promotion.end("reversed", words)
        return
    ends = [applying.recover(place) for place in promotion.places()]
    done = bool(ends) and all(end == "applied" for end in ends)
    heads.recover_checkout(promotion.checkout, finish=done)
    others = "; ".join(filter(None, map(restoring.left_by_others, promotion.places())))
    words = "interrupted, and " + ("finished" if done else "put back") + (f", but for {others}" if others else "")
    try:
        original = records.load(state, promotion.undoes) if done and promotion.undoes is not None else None
    except NotFound:
        original = None  # forgotten meanwhile
    if original is None:
        if not done:
            promotion.drop_contents()
        promotion.end("applied" if done else "reversed", words)
        return
    with records.held(original):
        undone(state, original, promotion, words)


def undone(state: State, original: Promotion, promotion: Promotion, words: str = "") -> None:
    """Files are as they were before the original, so the rest of it follows: HEAD and index, branches, what was deployed. Whoever
    is killed here is followed by somebody who goes on. If something could not be taken back, both have failed, and the original
    can be undone once more."""
    heads.recover_checkout(original.checkout, finish=False)
    try:
        restoring.take_back(original)
    except CheckFailed as error:
        with contextlib.suppress(OSError):  # whoever comes next writes it
            original.end("failed", error.message)
            promotion.end("failed", error.message)
        raise
    _mark(state, original, promotion, words)


def _mark(state: State, original: Promotion, promotion: Promotion, words: str) -> None:
    """If there is no room for these words, whoever comes next writes them."""
    with contextlib.suppress(OSError):
        original.undone_by = promotion.id
        original.end("undone")
        promotion.end("applied", words)
    if original.undoes is not None:
        with contextlib.suppress(NotFound, OSError):  # forgotten meanwhile, or no room for words
            again = records.load(state, original.undoes)
            again.undone_by = None
            again.end("applied", "done again")
