"""The commands that a sandbox ran, run again in reality instead of moving files: for package managers, which keep books of their
own.

    <promotion>/touched/       all that the sandbox changed, chosen or not, but for git's own files: only where, not what
    <promotion>/before/        what reality had there, written down before the first command
    <promotion>/replayed-<n>/  what it had there after so many commands; the last of them

A command that fails puts those paths back; `undo` does, too, three-way. After an interruption those go back that are still as the
last command left them; what is other may be somebody's work, stays as it is, and is told. What a command changes anywhere else it
changes for good, and so it does outside of the project where whoever runs it may not read.

What was put back is forgotten: another attempt finds another reality.
"""

import contextlib
import os
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence

from elsewhere.changes import threeway
from elsewhere.changes.sides import sides_of
from elsewhere.errors import CheckFailed
from elsewhere.paths import is_within
from elsewhere.promotion import applying, freezing, planning
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.records import Promotion
from elsewhere.storage import trash

__all__ = ["put_back", "replay", "replayed", "touch"]

_TOUCHED, _BEFORE, _AFTER = "touched", "before", "replayed"


def touch(promotion: Promotion, places: Iterable[tuple[str, str]]) -> None:
    """What is to be kept, by root and path."""
    freezing.freeze((Piece(*place, None, None) for place in places), os.path.join(promotion.directory, _TOUCHED))


def replay(promotion: Promotion, pieces: Sequence[Piece], tell: Callable[[str], None], stage: str | None = None) -> None:
    """The promotion's commands in order, each where it was run. After the first that fails there is nothing to be done but to
    `put_back`."""
    if not any(one["status"] == "passed" and one["application"] == {"kind": "replay"} for one in promotion.stages):
        _forget(promotion)  # of an attempt of which not all could be put back
    if not os.path.isdir(os.path.join(promotion.directory, _BEFORE)):
        freezing.freeze(_found(promotion, pieces), os.path.join(promotion.directory, _BEFORE))
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


def _found(promotion: Promotion, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """What reality has wherever the sandbox changed something."""
    touched = freezing.thawed(os.path.join(promotion.directory, _TOUCHED))
    for root, path in dict.fromkeys((one.root, one.path) for one in (*pieces, *touched)):
        try:
            found = _now(root, path)
            if found.after is not None and found.after.type == "file":
                found.after.open().close()
        except PermissionError:
            if root != "/":
                raise
            continue  # nor could it be put back
        yield found


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
    _drop(promotion, os.path.basename(place))  # of a stage before this one, at the same target
    freezing.freeze([one._replace(before=_now(one.root, one.path).after) for one in was], place)
    _drop(promotion, f"{_AFTER}-{number - 1}")


def _now(root: str, path: str) -> Piece:
    """What reality has there."""
    side = sides_of([root])(path)
    owner = None if side is None or os.geteuid() != 0 else (side.about.st_uid, side.about.st_gid)
    return Piece(root, path, None, side, owner=owner)


def put_back(promotion: Promotion, directory: str, *, interrupted: bool = False) -> list[str]:
    """What reality had at the paths that the sandbox changed. `directory` is for the journal of that. The answer names what
    stays: if it was interrupted, what is other than the last command left it; and what something is in the way of, with that."""
    place = os.path.join(promotion.directory, _BEFORE)
    if not os.path.exists(os.path.join(place, "pieces.json")):
        return []  # nothing was run yet
    back, left = [], []
    for one in replayed(promotion) or [one._replace(before=one.after) for one in freezing.thawed(place)]:
        here = _now(one.root, one.path).after
        if not interrupted:
            back.append(one._replace(before=here))
        elif threeway.equal(one.before, here) or threeway.equal(one.after, here):  # or somebody came as far as that
            back.append(one)
        else:
            left.append(_named(one.root, one.path))
    plan = planning.plan(back, restoring=True)
    applying.apply(directory, plan.operations)
    left += [f"{_named(one.root, one.path)} ({one.sentence})" for one in plan.conflicts]
    if not left:
        with contextlib.suppress(OSError):  # all is back; whoever tries it again begins with this
            _forget(promotion)
    return left


def _named(root: str, path: str) -> str:
    return f"/{path}" if root == "/" else path


def _forget(promotion: Promotion) -> None:
    """The beginning goes last: whoever is killed here is followed by somebody who finds all of it back."""
    for number in range(1, len(promotion.commands) + 1):
        _drop(promotion, f"{_AFTER}-{number}")
    _drop(promotion, _BEFORE)


def _drop(promotion: Promotion, name: str) -> None:
    """What is only half there must not be believed."""
    place = os.path.join(promotion.directory, name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(place, "pieces.json"))
    trash.remove_tree(place)


def replayed(promotion: Promotion) -> list[Piece]:
    """For the undo: what the last command left, and what there was."""
    for number in range(len(promotion.commands), 0, -1):
        place = os.path.join(promotion.directory, f"{_AFTER}-{number}")
        if os.path.exists(os.path.join(place, "pieces.json")):
            return freezing.thawed(place)
    return []
