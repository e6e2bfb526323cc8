"""A stage that did not pass, or is undone, becomes what it was before.

    directory    by its journal: what was found there is put back, three-way
    replay       what the paths that the sandbox changed were is put back
    branch       moved back, if it is still where it was moved to
    deploy       what still runs of an interrupted one is ended; then `rollback` is run, whether `deploy` came to its end or not
    nothing      had to be done there, so that nothing is taken back

What somebody else changed meanwhile stays as they made it. If a stage could not become what it was, its entry says in
`not_reversed` what is missing, and an undo tries that again.
"""

import os
from collections.abc import Callable
from typing import Any

from elsewhere.errors import CheckFailed, Conflict, ElsewhereError
from elsewhere.promotion import applying, branches, deploying, planning, replaying
from elsewhere.promotion.choosing import Choices
from elsewhere.promotion.planning import Plan
from elsewhere.promotion.records import Promotion
from elsewhere.promotion.stages import AT_WORK, standing

__all__ = [
    "application",
    "command",
    "did",
    "fresh",
    "left",
    "left_by_others",
    "put_back",
    "recover",
    "refuse_moved",
    "silent",
    "take_back",
]

Step = Callable[[str], None]
Entry = dict[str, Any]


def silent(_: str) -> None:
    """For those who need not be told."""


def application(promotion: Promotion) -> str:
    """A directory for a journal of one more application. It is one of the promotion's own when its stage has passed."""
    number = 1
    while str(number) in promotion.applications or os.path.lexists(os.path.join(promotion.directory, str(number))):
        number += 1
    return os.path.join(promotion.directory, str(number))


def fresh(promotion: Promotion, stem: str) -> str:
    """A path in the promotion's directory for something new: the stem and a number, which nothing there begins with."""
    known = os.listdir(promotion.directory)
    number = 1
    while any(f"{name}.".replace("-", ".").startswith(f"{stem}-{number}.".replace("-", ".")) for name in known):
        number += 1
    return os.path.join(promotion.directory, f"{stem}-{number}")


def put_back(promotion: Promotion, entry: Entry, step: Step = silent, *, interrupted: bool = False) -> None:
    """What was begun at a stage, as far as it came. Whoever is killed here is followed by somebody who does it again."""
    step("reversing")
    entry["status"] = "reversing"
    promotion.save()
    done = entry["application"]
    try:
        if isinstance(done, str):
            _files_back(promotion, entry, done, step)
        elif done is not None and done["kind"] == "replay":
            others = replaying.put_back(promotion, application(promotion), interrupted=interrupted)
            if others:
                entry["not_reversed"] = f"these are other than a command left them, and stay: {', '.join(others)}"
        elif done is not None:
            entry["not_reversed"] = _outward_back(promotion, entry)
    except ElsewhereError as error:
        entry["not_reversed"] = error.message
    except OSError as error:
        entry["not_reversed"] = str(error)
    promotion.save()


def _outward_back(promotion: Promotion, entry: Entry) -> str | None:
    """A branch or a deployment; what is in the way of that, in words."""
    done = entry["application"]
    try:
        if done["kind"] == "branch":
            branches.take_back(done, f"elsewhere: promotion {promotion.id} taken back")
        elif done["kind"] == "deploy":
            if done.get("begun") is not None:
                deploying.end_left_over(promotion.id, entry["name"])
            ended = command(promotion, entry, "rollback")
            return None if ended.good else f"{ended.command!r} ended with {ended.exit_code} ({ended.reason})"
    except ElsewhereError as error:
        return error.message
    except OSError as error:
        return str(error)
    return None


def _files_back(promotion: Promotion, entry: Entry, name: str, step: Step) -> None:
    place = os.path.join(promotion.directory, name)
    if applying.recover(place) != "applied":
        entry["not_reversed"] = left_by_others(place) or None
        return
    earlier = entry["reversal"]
    if earlier is not None and applying.recover(os.path.join(promotion.directory, earlier)) == "applied":
        return
    plan, others = _backwards(place)
    if others:
        entry["not_reversed"] = others
    if plan.operations:
        back = application(promotion)
        entry["reversal"] = os.path.basename(back)
        promotion.save()
        applying.apply(back, plan.operations, step)


def _backwards(place: str) -> tuple[Plan, str]:
    """What somebody changed since stays, and is told."""
    pieces, theirs = applying.pieces(place), dict[str, str]()
    while True:
        plan = planning.plan(pieces, Choices(theirs=tuple(theirs)), restoring=True)
        new = {os.path.join(one.root, one.path): one.sentence for one in plan.conflicts}
        if new.keys() <= theirs.keys():
            return plan, "; ".join(f"{path}: {sentence}" for path, sentence in theirs.items())
        theirs |= new


def left_by_others(place: str) -> str:
    """What somebody else changed while an application was reversed, so that it stayed, in words."""
    told = applying.meanwhile(place)
    kept = (f" (what was there before is {os.path.join(place, one.kept)})" if one.kept else "" for one in told)
    return "; ".join(f"{os.path.join(one.root, one.path)}: {one.sentence}{where}" for one, where in zip(told, kept, strict=True))


def command(promotion: Promotion, entry: Entry, which: str) -> deploying.Ended:
    """`deploy` or `rollback` of a stage, as it was written down when it was trusted. Until it has come to its end, `begun` tells
    that something of it may be running still."""
    data = entry["application"]
    data["begun"] = which
    promotion.save()
    surroundings = deploying.variables(promotion.id, entry["name"], data["change"])
    outputs = fresh(promotion, f"{entry['name']}-{which}")
    ended = deploying.run(data[which], promotion.project, outputs, surroundings, data["timeout"])
    data["runs"].append({"which": which, **ended.document()})
    data["begun"] = None if ended.reason == "exited" else which
    promotion.save()
    return ended


def recover(promotion: Promotion, step: Step = silent) -> None:
    """Somebody was interrupted: what was done at a stage and had not passed is put back."""
    done = False
    for entry in promotion.stages:
        if entry["status"] in ("checking", "checked"):
            entry["status"] = "pending"
        elif entry["status"] in AT_WORK:
            done = True
            put_back(promotion, entry, step, interrupted=True)
            entry["status"] = "failed" if entry["said"] else "reversed"
            entry["approved"] = None
            promotion.save()
    statuses = {entry["name"]: entry["status"] for entry in promotion.stages}
    if statuses.get(promotion.stage or "") == "passed":
        status = "applied"
    else:
        status = next((word for word in ("waiting", "failed") if word in statuses.values()), "reversed")
    words = "interrupted, and put back" if done else "interrupted"
    promotion.end(status, f"{words}: {standing(promotion.stages)}")


def refuse_moved(promotion: Promotion) -> None:
    """Before anything of it is taken back: whether every branch is still where it was moved to."""
    for entry in promotion.stages:
        data = entry["application"]
        if (
            entry["status"] == "passed"
            and did(entry)
            and isinstance(data, dict)
            and data["kind"] == "branch"
            and branches.state(data) == "moved"
        ):
            raise Conflict(
                "branch_moved",
                f"the branch {data['branch']!r} of {data['repository']!r} was moved since; nothing was done",
                hint=f"git -C {data['repository']} log {data['branch']}",
                detail={"branch": data["branch"], "stage": entry["name"]},
            )


def did(entry: Entry) -> bool:
    """Whether a stage was changed, or commands were run for it, so that there is something to take back."""
    done = entry["application"]
    if isinstance(done, dict):
        return done["kind"] in ("deploy", "replay") or (done["kind"] == "branch" and done["new"] != done["old"])
    return done is not None


def left(promotion: Promotion) -> list[Entry]:
    """Stages that did not pass and could not become what they were, as far as that can be tried again: where somebody else
    changed files while a journal was reversed, those stay for good."""
    found = []
    for entry in promotion.stages:
        if entry["not_reversed"] and entry["status"] not in ("passed", "reversing", "undone"):
            done = entry["application"]
            if isinstance(done, str):
                again = applying.state(os.path.join(promotion.directory, done)) == "applied"
            else:
                again = did(entry) and (done["kind"] != "replay" or bool(replaying.replayed(promotion)))
            found += [entry] if again else []
    return found


def take_back(promotion: Promotion) -> None:
    """Branches and deploys, the last one first, of stages that have passed and of those that could not be put back when they
    failed; files are the caller's. A stage that cannot be taken back is in the way of no other, and stays what it was: whoever
    comes again goes on with what is left."""
    failed, again = [], [entry["name"] for entry in left(promotion)]
    for entry in reversed(promotion.stages):
        outward = isinstance(entry["application"], dict) and entry["application"]["kind"] in ("branch", "deploy")
        if entry["status"] in ("passed", "reversing"):
            entry["not_reversed"] = None
            if outward:
                put_back(promotion, entry)
            entry["status"] = "passed" if entry["not_reversed"] else "undone"
        elif entry["name"] in again:
            # Its status stays while that is tried: whoever is killed here is followed by somebody who tries it again.
            entry["not_reversed"] = _outward_back(promotion, entry) if outward else None
            entry["status"] = entry["status"] if entry["not_reversed"] else "undone"
        else:
            continue
        promotion.save()
        failed += [entry] if entry["not_reversed"] else []
    if failed:
        raise CheckFailed(
            "rollback_failed",
            "; ".join(f"the stage {entry['name']!r} could not be taken back: {entry['not_reversed']}" for entry in failed),
            hint=f"see to it; then elsewhere undo {promotion.id} goes on with what is left",
            detail={"promotion": promotion.id, "stage": failed[0]["name"], "stages": [entry["name"] for entry in failed]},
        )
