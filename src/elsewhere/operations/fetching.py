"""Commits that were made in a sandbox: packed inside, taken out, read outside as something that a stranger wrote, and fetched
into branches of the project.

Only if git's own files were changed in the sandbox is anything run in it.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from elsewhere.changes.drift import is_repository_path
from elsewhere.clock import wall
from elsewhere.errors import Refused, UsageError
from elsewhere.operations import sandboxes
from elsewhere.operations.entering import enter
from elsewhere.operations.files import files_of
from elsewhere.promotion import commits, heads, records, stranded
from elsewhere.promotion.commits import Answer, Commits
from elsewhere.promotion.records import Promotion
from elsewhere.sandbox.access import transfer
from elsewhere.sandbox.keeping import commands
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import repositories
from elsewhere.storage.scratch import scratch
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Bundle", "bundled", "coming", "fetch", "foresee", "none_to_fetch"]

_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Bundle:
    """A file that holds the commits, and what the sandbox says about them; `at`: what was made later is not in it."""

    path: str
    answer: Answer
    project: str
    base_head: str | None
    at: float

    def look(self) -> Commits:
        """What would come, checked."""
        return commits.look(self.project, self.path, self.answer, self.base_head)


@contextlib.contextmanager
def bundled(state: State, found: Record, box: Live | None) -> Iterator[Bundle | None]:
    """None: no commits were made inside."""
    if repositories.look(found.project) is None or not _touched(found.id):
        yield None
        return
    with scratch(state, "commits") as place:
        path, head, at = os.path.join(place, "commits.bundle"), found.base.get("head"), wall()
        entered = enter(state, found.id) if box is None else box
        try:
            answer = _packed(entered, path, head, _known(state, found))
        finally:
            if box is None:
                entered.close()
        yield Bundle(path, answer, found.project, head, at) if answer.made else None


def none_to_fetch(found: Record, option: str) -> UsageError:
    """What is said to somebody who asks for commits by this option: there are none, or they stay where they are."""
    _, changes = sandboxes.changes(found.id)
    tops = stranded.tops((one.path for one in changes.entries), found.project)
    if tops:
        return UsageError(
            "no_commits",
            f"{option}: commits made in {found.id!r} stay there: the project {found.project!r} is not the top of {tops[0]!r}",
            hint=f"leave it out; elsewhere exec {found.id} -- git format-patch --stdout COMMITS gives them as text for git am",
        )
    return UsageError(
        "no_commits",
        f"no commits were made in {found.id!r}, and {option} is about those",
        hint="leave it out; elsewhere exec ID -- git log shows what there is",
    )


def coming(bundle: Bundle, sandbox_id: str, branch: str | None) -> dict[str, Any]:
    """Every branch with commits made inside, and where it goes; the one that HEAD is on gives the others their names."""
    found = bundle.look()
    branch = branch or commits.default_branch(sandbox_id)
    others: dict[str, str] = {}
    for ref in sorted(found.others):
        name = f"{branch}-{ref.removeprefix('refs/heads/').replace('/', '-')}"
        while name in others.values():  # x/y and x-y
            name += "-"
        others[ref] = name
    return {**asdict(found), "inside": found.branch, "branch": branch, "others": others}


def foresee(bundle: Bundle, found: dict[str, Any]) -> None:
    """Refuse what `fetch` would refuse; `found` is what is `coming`."""
    commits.foresee(bundle.project, bundle.path, bundle.answer, {found["ref"]: found["branch"], **found["others"]})


def fetch(promotion: Promotion, bundle: Bundle, branch: str | None, *, checkout: bool) -> None:
    """Into branches of the project; the record of the promotion tells which."""
    found = coming(bundle, promotion.sandbox, branch)
    if found["others"]:
        foresee(bundle, found)  # all of them come, or none
    if checkout:
        heads.check(promotion.project, bundle.base_head)  # before there is a branch
    fetched = commits.fetch(promotion.project, bundle.path, bundle.answer, found["branch"], ref=found["ref"])
    promotion.commits = {**found, **asdict(fetched), "at": bundle.at}
    promotion.save()
    for ref, other in found["others"].items():
        commits.fetch(promotion.project, bundle.path, bundle.answer, other, ref=ref)
    if checkout:
        heads.checkout(promotion.project, fetched, bundle.base_head, promotion.checkout)


def _touched(sandbox_id: str) -> bool:
    _, changes = sandboxes.changes(sandbox_id)
    return any(is_repository_path(one.path) for one in changes.entries)


def _known(state: State, found: Record) -> dict[str, str]:
    """Reality's branches, but those that hold what this sandbox made: after an undo, or an interruption, it can come again."""
    said = [one.commits for one in records.listed(state) if one.sandbox == found.id and one.commits is not None]
    ours = {commits.default_branch(found.id)}
    ours.update(name for one in said for name in (one["branch"], *one.get("others", {}).values()))
    return {ref: sha for ref, sha in commits.known(found.project).items() if ref.removeprefix("refs/heads/") not in ours}


def _packed(box: Live, path: str, head: str | None, known: dict[str, str]) -> Answer:
    inside = os.path.join(box.private_place, f"elsewhere-{secrets.token_hex(8)}.bundle")
    argv = commits.inside_script(head, inside, known)
    spec = box.spec(argv, box.record.project, caller={"PATH": os.environ.get("PATH", os.defpath)}, timeout=_PATIENCE_S)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        outcome = commands.captured(box.control, spec, null, None)
    finally:
        os.close(null)
    if outcome.exit_code != 0:
        raise Refused(
            "commits_not_packed",
            f"git in the sandbox {box.id!r} ended with {outcome.exit_code} ({outcome.reason})",
            hint="--no-commits moves the files alone",
            detail={"stderr": outcome.stderr.decode("utf-8", "replace")[-2000:]},
        )
    answer = commits.read_answer(outcome.stdout)
    if answer.made:
        with files_of(box) as files:
            transfer.download(files, inside, path, limit=commits.LARGEST)
            files.remove(inside)
    return answer
