"""The commands that a sandbox ran, run again in reality instead of moving files: for package managers, which keep books of their
own.

    <promotion>/before/        what reality had at the paths that the sandbox changed, written down before the first command
    <promotion>/replayed-<n>/  what it had there after so many commands

A command that fails puts those paths back; `undo` does, too, three-way. After an interruption those go back that are still as the
last command left them; what is other may be somebody's work, stays as it is, and is told. What a command changes anywhere else it
changes for good.
"""

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence

from elsewhere.changes import threeway
from elsewhere.changes.sides import sides_of
from elsewhere.errors import CheckFailed
from elsewhere.paths import is_within
from elsewhere.promotion import applying, freezing, planning
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.records import Promotion

__all__ = ["put_back", "replay", "replayed"]

_BEFORE, _AFTER = "before", "replayed"


def replay(promotion: Promotion, pieces: Sequence[Piece], tell: Callable[[str], None], stage: str | None = None) -> None:
    """The promotion's commands in order, each where it was run. After the first that fails there is nothing to be done but to
    `put_back`."""
    if not os.path.isdir(os.path.join(promotion.directory, _BEFORE)):
        freezing.freeze([_now(one) for one in pieces], os.path.join(promotion.directory, _BEFORE))
    for number, one in enumerate(promotion.commands, 1):
        words = shlex.join(one["argv"])
        tell(f"$ {words}")
        place = one["cwd"] if is_within(one["cwd"], promotion.project) else promotion.project
        code = _run(one["argv"], place)
        promotion.checks.append({"stage": stage, "when": "replayed", "command": words, "exit_code": code})
        promotion.save()
        if code:
            raise CheckFailed(
                "replay_failed",
                f"{words!r} ended with {code} in reality",
                hint=f"elsewhere promotions show {promotion.id}; the paths that the sandbox changed are put back",
            )
        _note(promotion, number)


def _run(argv: list[str], place: str) -> int:
    """What it says is for people: the document of whoever asked is the only thing on its standard output."""
    try:
        return subprocess.run(argv, cwd=place, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
    except FileNotFoundError:
        return 127
    except OSError:
        return 126


def _note(promotion: Promotion, number: int) -> None:
    """What a command left, and what there was before all of them."""
    was = freezing.thawed(os.path.join(promotion.directory, _BEFORE))
    place = os.path.join(promotion.directory, f"{_AFTER}-{number}")
    if not os.path.isdir(place):
        freezing.freeze([one._replace(before=_now(one).after) for one in was], place)


def _now(piece: Piece) -> Piece:
    """What reality has there."""
    return Piece(piece.root, piece.path, None, sides_of([piece.root])(piece.path))


def put_back(promotion: Promotion, directory: str, *, interrupted: bool = False) -> list[str]:
    """What reality had at the paths that the sandbox changed. `directory` is for the journal of that. The paths that stay, if it
    was interrupted, since they are other than the last command left them."""
    place = os.path.join(promotion.directory, _BEFORE)
    if not os.path.exists(os.path.join(place, "pieces.json")):
        return []  # nothing was run yet
    back = replayed(promotion) or [one._replace(before=one.after) for one in freezing.thawed(place)]
    if not interrupted:
        back = [one._replace(before=_now(one).after) for one in back]
    left = [one for one in back if interrupted and not threeway.equal(one.before, _now(one).after)]
    applying.apply(directory, planning.plan([one for one in back if one not in left], restoring=True).operations)
    return [one.path for one in left]


def replayed(promotion: Promotion) -> list[Piece]:
    """For the undo: what the last command left, and what there was."""
    for number in range(len(promotion.commands), 0, -1):
        place = os.path.join(promotion.directory, f"{_AFTER}-{number}")
        if os.path.exists(os.path.join(place, "pieces.json")):
            return freezing.thawed(place)
    return []
