"""One change through one stage: planned against its target, checked, approved, applied, checked again.

Checked means: these checks succeeded with exactly this change on exactly this target. A walk that goes on later runs them again,
unless both are what they were. A branch is known by its commit; a directory by the names, sizes and times of all that is in it.

Not here: the way from stage to stage, and what becomes of one that did not pass (`staging.py`).
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from elsewhere import units
from elsewhere.changes import threeway
from elsewhere.changes.model import Side
from elsewhere.changes.sides import sides_of
from elsewhere.clock import wall
from elsewhere.errors import CheckFailed, Conflict, ElsewhereError
from elsewhere.operations import checking
from elsewhere.operations.checking import Bench
from elsewhere.operations.projects import find_project
from elsewhere.promotion import applying, branches, deploying, freezing, planning, records, replaying, restoring
from elsewhere.promotion.choosing import Choices
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.planning import Plan
from elsewhere.promotion.records import Promotion
from elsewhere.promotion.settling import next_steps
from elsewhere.promotion.stages import LEFT, Branch, Deploy, Directory, Stage
from elsewhere.storage import scanning
from elsewhere.storage.scratch import scratch
from elsewhere.storage.state import State

__all__ = ["Entry", "Passage", "Step", "Tell", "coming", "digest_of", "names", "planned", "subject"]

Tell = Callable[[str], None]
Step = Callable[[str], None]
Entry = dict[str, Any]


class Passage:
    """One change through one stage."""

    def __init__(
        self,
        state: State,
        promotion: Promotion,
        pieces: Sequence[Piece],
        stage: Stage,
        entry: Entry,
        choices: Choices,
        tell: Tell,
        step: Step,
    ) -> None:
        self._state = state
        self._promotion = promotion
        self._stage = stage
        self._entry = entry
        self._choices = choices
        self._tell = tell
        self._step = step
        self._project = promotion.project
        self._root = stage.target.path if isinstance(stage.target, Directory) else promotion.project
        self._all = pieces
        self._pieces = coming(state, promotion.sandbox, promotion.base_at, promotion.id, stage, promotion.project, pieces)
        self._tip: branches.Tip | None = None

    def run(self) -> bool:
        """Whether it has passed; otherwise it waits for a person."""
        # What an earlier attempt left there is known until this one does something itself.
        self._say("checking", **{**LEFT, "not_reversed": self._entry["not_reversed"]})
        plan = self._plan()
        self._check_before(plan)
        if self._stage.approve != "person":
            self._entry["approved"] = {"by": "auto", "uid": None, "at": wall(), "change": subject(self._promotion)}
        elif (self._entry["approved"] or {}).get("change") != subject(self._promotion):
            self._say("waiting", approved=None)
            self._tell(f"{self._stage.name}: waiting for a person")
            return False
        self._apply(plan)
        self._say("verifying")
        self._check_after(plan)
        self._pass()
        return True

    def _say(self, status: str, **more: Any) -> None:
        self._step(status)
        self._entry.update({"status": status, "at": wall(), **more})
        self._promotion.save(durable=status == "applying")

    # -- what is to be done -----------------------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        plan, self._tip = planned(self._stage, self._pieces, self._choices)
        self._entry.update({**names(plan), "chosen": [*plan.fitting.ours, *plan.fitting.theirs]})
        if plan.conflicts:
            count = units.count(len(plan.conflicts), "conflict")
            raise Conflict(
                "promotion_conflict",
                f"{count} between the change and {self._stage.target.words()} at the stage {self._stage.name!r}",
                hint=next_steps(
                    (one.reason for one in plan.conflicts),
                    "--ours PATH takes the sandbox's",
                    "--theirs PATH leaves what is there",
                ),
                detail={"conflicts": self._entry["conflicts"]},
            )
        return plan

    # -- checks -----------------------------------------------------------------------------------------------------------------

    def _check_before(self, plan: Plan) -> None:
        if not self._stage.checks:
            return
        about = self._about()
        earlier = self._entry["verified"]
        if earlier is not None and all(earlier[key] == value for key, value in about.items()):
            earlier["reused"] = True
            self._tell(f"{self._stage.name}: verified earlier")
            return
        self._entry["verified"] = None
        self._check("before", self._bench(plan))
        self._entry["verified"] = {**about, "at": wall(), "reused": False}
        self._say("checked")

    def _check_after(self, plan: Plan) -> None:
        if not self._stage.checks:
            return
        target = self._stage.target
        if isinstance(target, Branch):
            assert self._tip is not None, "a branch was planned"
            bench = Bench(target.repository, base_ref=self._entry["application"].get("new", self._tip.sha))
        elif isinstance(target, Directory):
            bench = Bench(target.path, base="live")
        else:
            bench = Bench(self._project, base="live", operations=plan.operations)
        self._check("after", bench)

    def _bench(self, plan: Plan) -> Bench:
        if self._tip is not None:
            return Bench(self._tip.repository.project, base_ref=self._tip.sha, operations=plan.operations)
        return Bench(self._root, operations=plan.operations)

    def _check(self, when: str, bench: Bench) -> None:
        self._tell(f"{self._stage.name}: checks, {when}")
        outputs = restoring.fresh(self._promotion, f"{self._stage.name}-{when}")
        labels = {"promotion": self._promotion.id, "stage": self._stage.name}
        found = checking.checked(self._state, bench, self._stage.checks, outputs, labels, self._tell)
        self._entry["checks"] += [{"when": when, **one} for one in found]
        self._promotion.checks += [{"stage": self._stage.name, "when": when, **one} for one in found]
        self._promotion.save()
        bad = checking.failed(found)
        if bad is None:
            return
        self._keep_patch()
        raise CheckFailed(
            "check_failed",
            f"the check {bad['command']!r} of the stage {self._stage.name!r}, {when} the change was applied, ended with"
            f" {bad['exit_code']} ({bad['reason']})",
            hint=f"elsewhere promotions show {self._promotion.id}; elsewhere shell {bad['sandbox']} enters its sandbox",
            detail={**bad, "when": when},
        )

    def _about(self) -> dict[str, Any]:
        """What the word of the checks is about."""
        change = _digest([[piece.path, _side(piece.before), _side(piece.after), piece.known] for piece in self._pieces])
        if self._tip is not None:
            base = self._tip.sha
        else:
            around = sides_of(["/"])
            found = [[piece.path, _side(around(piece.path))] for piece in self._pieces if piece.root == "/"]
            base = _digest([find_project(self._root, "/").head, self._looks(), found])
        return {"change": _digest([change, self._choices]), "base": base, "checks": list(self._stage.checks)}

    def _looks(self) -> str:
        """Of the whole directory: a check may look at all of it."""
        leave_out = {".git", os.path.relpath(self._state.path, self._root)}
        seen = scanning.scan(self._root, leave_out=leave_out)
        rows = {path: sorted(scanning.rows_of(listing).items()) for path, listing in seen.directories.items()}
        return _digest([sorted(rows.items()), sorted(seen.left_out.items())])

    # -- the target -------------------------------------------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> None:
        target = self._stage.target
        if self._is_nothing(plan):
            self._tell(f"{self._stage.name}: nothing to move")
            self._begin({"kind": "nothing"})
            return
        self._tell(f"{self._stage.name}: {target.words()}")
        if isinstance(target, Branch):
            self._move(plan)
        elif isinstance(target, Deploy):
            self._deploy(target, plan)
        elif self._promotion.commands and target.path == self._project:
            self._begin({"kind": "replay"})
            replaying.replay(self._promotion, self._pieces, self._tell, self._stage.name)
        elif plan.operations:
            place = restoring.application(self._promotion)
            self._begin(os.path.basename(place))
            applying.apply(place, plan.operations, self._step)
        else:
            self._begin(None)

    def _begin(self, application: str | dict[str, Any] | None) -> None:
        """Written down before anything is done."""
        self._say("applying", application=application, not_reversed=None)

    def _is_nothing(self, plan: Plan) -> bool:
        """Whether all of it was brought here before, and stands: a second deployment would have a rollback of its own, which
        takes down the first one, too."""
        replays = bool(self._promotion.commands) and self._stage.target == Directory(self._project)
        if plan.operations or replays or self._entry["not_reversed"]:
            return False
        if any(not one.known or not threeway.equal(one.before, one.after) for one in self._pieces):
            return False
        return not isinstance(self._stage.target, Deploy) or not self._pieces or self._stands()

    def _stands(self) -> bool:
        """Whether what was run last at this stage is a deployment that this sandbox has brought: nobody can look at one."""
        runs = [
            (run["at"], run["which"] == "deploy" and entry["status"] == "passed" and _is_of(one, self._promotion))
            for one in records.listed(self._state)
            for entry in one.stages
            if one.project == self._project and entry["name"] == self._stage.name and isinstance(entry["application"], dict)
            for run in entry["application"].get("runs", ())
        ]
        return bool(runs) and max(runs)[1]

    def _move(self, plan: Plan) -> None:
        assert self._tip is not None, "a branch was planned"
        message = (
            f"Promote {self._promotion.sandbox}\n\nBy elsewhere, promotion {self._promotion.id}, stage {self._stage.name}.\n"
        )
        new = self._tip.sha
        if plan.operations:
            with scratch(self._state, "branch") as place:
                new = branches.commit(self._tip, plan, message, place)
        where = {"repository": self._tip.repository.project, "branch": self._tip.branch}
        self._begin({"kind": "branch", **where, "old": self._tip.sha, "new": new})
        self._step("moving")
        if new != self._tip.sha:
            branches.move(self._tip, new, f"elsewhere: promotion {self._promotion.id}")

    def _deploy(self, target: Deploy, plan: Plan) -> None:
        change = restoring.fresh(self._promotion, f"{self._stage.name}-change")
        deploying.lay_out(change, self._wanted(plan), deploying.patch_of(self._all, self._project))
        data = {
            "kind": "deploy",
            "change": change,
            "deploy": target.deploy,
            "rollback": target.rollback,
            "timeout": target.timeout,
            "runs": [],
            "begun": None,
        }
        self._begin(data)
        self._step("deploying")
        ended = restoring.command(self._promotion, self._entry, "deploy")
        if not ended.good:
            self._keep_patch()
            raise CheckFailed(
                "deploy_failed",
                f"{target.deploy!r} of the stage {self._stage.name!r} ended with {ended.exit_code} ({ended.reason})",
                hint=f"elsewhere promotions show {self._promotion.id}",
                detail=ended.document(),
            )

    def _wanted(self, plan: Plan) -> list[tuple[str, Side | None]]:
        """The changed files of the project as they are to be: what is there already as well, with all that others did to it."""
        there, same = sides_of([self._project]), set(plan.same)
        found = {piece.path: there(piece.path) for piece in self._pieces if piece.root == self._project and piece.path in same}
        found |= {one.path: one.wanted for one in plan.operations if one.root == self._project}
        return list(found.items())

    def _pass(self) -> None:
        if isinstance(self._entry["application"], str):
            self._promotion.applications.append(self._entry["application"])
        self._say("passed")
        self._tell(f"{self._stage.name}: passed")

    def _keep_patch(self) -> None:
        path = os.path.join(self._promotion.directory, "change.patch")
        with contextlib.suppress(ElsewhereError, OSError), open(path, "xb") as stream:
            stream.write(deploying.patch_of(self._all, self._project))


def _is_of(one: Promotion, promotion: Promotion) -> bool:
    return one.sandbox == promotion.sandbox and one.base_at == promotion.base_at


def _going_on(state: State, sandbox: str, base_at: float, promotion: str, stage: str, pieces: Sequence[Piece]) -> list[Piece]:
    """What the sandbox brought through this stage before is no difference any more: a path goes on from what it was then, as long
    as the sandbox has the base that it had then. A promotion that had nothing to bring does not count: the one that brought it
    may have been undone since."""
    then: dict[tuple[str, str], Side | None] = {}
    for one in records.listed(state):
        passed = any(
            entry["name"] == stage and entry["status"] == "passed" and entry["application"] != {"kind": "nothing"}
            for entry in one.stages
        )
        same = one.sandbox == sandbox and one.base_at == base_at
        if passed and same and one.status != "undone" and one.id != promotion:
            then.update({(piece.root, piece.path): piece.after for piece in freezing.thawed(one.frozen)})
    return [
        piece._replace(before=then[piece.root, piece.path], known=True) if (piece.root, piece.path) in then else piece
        for piece in pieces
    ]


def _aimed(pieces: Sequence[Piece], project: str, root: str) -> list[Piece]:
    """At another directory than the one that they come from: of what lies outside of the project nothing goes there, and nobody
    knows whether what has no known beginning was changed there."""
    if root == project:
        return list(pieces)
    return [piece._replace(root=root, moved=not piece.known) for piece in pieces if piece.root == project]


def digest_of(pieces: Sequence[Piece]) -> str:
    """The same for the same change, and only then."""
    return _digest([[one.root, one.path, _side(one.before), _side(one.after), one.known] for one in pieces])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _side(side: Side | None) -> list[object] | None:
    """What is the same for everybody who uses the path, and only then."""
    if side is None:
        return None
    if side.type != "file":
        return [side.type, None if side.type == "link" else side.mode, side.target]
    with side.open() as stream:
        return [side.type, side.mode, hashlib.file_digest(stream, "sha256").hexdigest()]  # type: ignore[arg-type]  # any reader


def coming(
    state: State, sandbox: str, base_at: float, promotion: str, stage: Stage, project: str, pieces: Sequence[Piece]
) -> list[Piece]:
    """What is new to a stage, aimed at its target."""
    root = stage.target.path if isinstance(stage.target, Directory) else project
    return _aimed(_going_on(state, sandbox, base_at, promotion, stage.name, pieces), project, root)


def planned(stage: Stage, pieces: Sequence[Piece], choices: Choices) -> tuple[Plan, branches.Tip | None]:
    """With the branch as it was found, if the target is one. A choice may be about a conflict of another stage."""
    target = stage.target
    if not isinstance(target, Branch):
        return planning.plan(pieces, choices, one_of_several=True), None
    tip = branches.find(target.repository, target.name)
    return branches.plan(tip, pieces, choices), tip


def names(plan: Plan) -> dict[str, Any]:
    conflicts = [{"path": one.path, "reason": one.reason, "sentence": one.sentence} for one in plan.conflicts]
    gone = {os.path.join(one.root, one.path) if one.root == "/" else one.path for one in plan.operations if one.wanted is None}
    applied = [path for path in plan.applied if path not in gone]
    return {"applied": applied, "merged": plan.merged, "deleted": sorted(gone), "conflicts": conflicts}


def subject(promotion: Promotion) -> str:
    """What somebody who approves has seen."""
    return _digest([promotion.change, promotion.choices])
