"""What would be lost with a sandbox: what it changed, and reality does not have.

Of git's own files those count that lead to something: branches, HEAD, stashes, tags, configuration, hooks. After a promotion that
fetched commits, branches are in reality, unless they were moved since. Stashes and tags never are. The index, logs and objects
are only the way to these.
"""

import contextlib

from elsewhere.changes import threeway
from elsewhere.changes.model import Change, Changes
from elsewhere.changes.sides import sides_of
from elsewhere.promotion import records
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State

__all__ = ["nowhere_else"]

_WAYS = ("objects", "logs", "index", "COMMIT_EDITMSG", "ORIG_HEAD", "FETCH_HEAD", "MERGE_MSG", "gc.log", "info")
_NEVER_MOVED = ("refs/stash", "refs/tags")


def nowhere_else(state: State, found: Record, changes: Changes) -> Changes:
    if not changes:
        return changes
    reality, fetched_at = sides_of(["/"]), _fetched_at(state, found)
    directories = {one.path: one for one in changes.directories}  # of an empty one, the entry tells only that it is there

    def is_there(one: Change) -> bool:
        path = one.path.rstrip("/")
        if "/.git/" in path:
            return _is_known(one, path.rpartition("/.git/")[2], fetched_at)
        with contextlib.suppress(OSError):
            return threeway.equal(directories.get(one.path, one).after, reality(path.lstrip("/")))
        return False  # closed to us: then nobody can tell

    there = {one.path for one in changes.entries if is_there(one)}
    return changes.where(lambda path: path not in there)


def _is_known(one: Change, name: str, fetched_at: float) -> bool:
    """Of git's own files."""
    if name.startswith(_NEVER_MOVED):
        return one.after is None
    if name.split("/")[0] in _WAYS:
        return True
    return one.after is None or one.after.about.st_ctime < fetched_at


def _fetched_at(state: State, found: Record) -> float:
    """Until when commits made inside are in reality."""
    mine = [one for one in records.listed(state) if one.sandbox == found.id and one.status in ("applied", "waiting")]
    return max((one.commits.get("at", 0.0) for one in mine if one.commits is not None), default=0.0)
