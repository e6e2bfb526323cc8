"""Which base a sandbox starts from: what was asked for, what that takes, and how it ends up in the sandbox's record.

live      reality, seen through
pinned    the project at this moment: captured, or only what changed since the last capture
auto      pinned where that is cheap, else live with a record of what reality was like
a commit  its tree at the project's own path, HEAD detached there, with the rest of the repository as it is
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from elsewhere import units
from elsewhere.errors import UsageError
from elsewhere.operations.settings import resolve
from elsewhere.paths import is_within
from elsewhere.sandbox.project import Project
from elsewhere.storage import bases, checkouts
from elsewhere.storage.bases import Estimate
from elsewhere.storage.capturing import Progress
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["KINDS", "Chosen", "Teller", "choose"]

KINDS = ("live", "pinned", "auto")


@dataclass(frozen=True, slots=True)
class Teller:
    """Whoever wants to know how a capture goes: what a first copy will be, and how far any copy has come."""

    estimate: Callable[[Estimate], None]
    progress: Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Chosen:
    """`base` is for the record. `shift` says whose owners the base has on disk; None: it has none of its own. `manifest` says
    what reality was like, and `dirty` are the files of which there is no copy anywhere; `scan` is a file that says the same of a
    base that was captured. `remark` is what somebody should know."""

    base: dict[str, Any]
    shift: int | None = None
    manifest: bytes | None = None
    dirty: list[str] = field(default_factory=list)
    remark: str = ""
    scan: str | None = None


@contextlib.contextmanager
def choose(
    state: State, project: Project, kind: str, ref: str | None, shift: int, teller: Teller | None = None
) -> Iterator[Chosen]:
    """What it names stays there until the caller is done."""
    if kind not in KINDS:
        raise UsageError("bad_base", f"the base {kind!r} is not known", hint=f"one of: {', '.join(KINDS)}")
    if ref is not None:
        yield _commit(state, project, ref, shift, teller)
        return
    live = {"kind": "live", "head": project.head}
    if kind == "live":
        yield Chosen(live)
        return
    shown = resolve(state, project.path)["base.live"]
    estimate = bases.estimate(state, project.path, shift=shift, live=shown)
    if kind == "auto" and not estimate.cheap:
        from elsewhere.storage import scanning

        why = f"a first copy would be {estimate.files} files, {units.format_size(estimate.bytes)}"
        remark = f"live base: {why}; --base pinned makes it"
        yield Chosen({**live, "manifest": True}, None, scanning.save(estimate.scan), checkouts.dirty(project.path), remark)
        return
    if teller is not None and not estimate.exists:
        teller.estimate(estimate)
    tell = None if teller is None else teller.progress
    with bases.capturing(state, project.path, shift=shift, live=shown, estimated=estimate, tell=tell) as base:
        about = {
            "kind": "pinned",
            "head": project.head,
            "at": base.captured_at,
            "layers": list(base.layers),
            "live": [os.path.join(project.path, os.path.normpath(path)) for path in shown],
            "files": base.files,
            "bytes": base.bytes,
            "copied_files": base.copied_files,
            "unsettled": list(base.unsettled),
            "left_out": sorted(base.left_out),
        }
        remark = f"{len(base.unsettled)} files changed while they were captured" if base.unsettled else ""
        yield Chosen(about, shift, remark=remark, scan=base.scan)


def _commit(state: State, project: Project, ref: str, shift: int, teller: Teller | None) -> Chosen:
    sha = checkouts.resolve(project.path, ref)
    made = checkouts.checkout(state, project.path, sha, shift=shift, tell=None if teller is None else teller.progress)
    places = checkouts.git_places(project.path)
    assert places is not None, "a repository was resolved in it"
    git, common = places
    inside = is_within(common, project.path)
    return Chosen(
        {
            "kind": "commit",
            "head": sha,
            "ref": ref,
            "layers": [made.tree],
            "live": [common] if inside else [],
            "seeds": [[os.path.join(git, "HEAD"), made.head], [os.path.join(git, "index"), made.index]],
        },
        shift,
    )
