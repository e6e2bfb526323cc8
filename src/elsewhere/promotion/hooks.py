"""Where git runs something by itself, beside the names that everybody knows: directories of hooks that somebody's configuration
names, and bare repositories in the middle of a project, in which git goes by their own configuration.

Reality's configuration is asked for, never that of a tree that a sandbox wrote.
"""

import os
from collections.abc import Iterable, Iterator

from elsewhere.errors import Unavailable
from elsewhere.meeting import home_directory
from elsewhere.paths import above
from elsewhere.storage import checkouts, git, repositories

__all__ = ["hooks_of", "runs_in_repositories"]

_PATIENCE = 30.0
_MADE_OF = ("HEAD", "objects", "refs")
_RUN = ("HEAD", "commondir", "config", "config.worktree", "hooks")
_NAMES = frozenset(_MADE_OF + _RUN)


def hooks_of(project: str) -> set[str]:
    """The directories that `core.hooksPath` names, in the repository's configuration, the user's, or the machine's; and so for
    each repository that the project lies in, whose hooks may lie in the project."""
    return {place for top in repositories.tops(project) for place in _hooks_of(top)}


def _hooks_of(top: str) -> set[str]:
    places = checkouts.git_places(top)
    if places is None:
        return set()
    found = set()
    for configuration in git.user_configurations(unused=True):
        more = {"HOME": home_directory(), "GIT_DIR": places[0], "GIT_CONFIG_GLOBAL": configuration, "GIT_CONFIG_NOSYSTEM": "0"}
        words = ["config", "--show-scope", "-z", "--type=path", "--get-all", "core.hooksPath"]
        try:
            said = git.run(words, purpose="finding hooks", patience=_PATIENCE, more=more).stdout.split(b"\0")
        except Unavailable:
            return set()  # without git nobody runs them
        pairs = zip(said[::2], said[1::2], strict=False)
        found |= {os.fsdecode(value) for scope, value in pairs if scope != b"command" and value}  # the last one is our own
    return {os.path.normpath(os.path.join(top, value)) for value in found}


def runs_in_repositories(paths: Iterable[str]) -> Iterator[str]:
    """Of paths that are about to be changed, those that count in a repository that lies in the open, or make one of what was
    none: what says which programs it runs, or, if there is nothing of that among them, the first."""
    paths = sorted(path for path in (one.rstrip("/") for one in paths) if not _NAMES.isdisjoint(path.split("/")))
    there = {*paths, *(directory for path in paths for directory in above(path))}
    inside: dict[str, list[str]] = {}
    for path in paths:
        for directory in above(path):
            inside.setdefault(directory, []).append(path)
    for directory, below in inside.items():
        names = [os.path.join(directory, name) for name in _MADE_OF]
        if not any(os.path.join(directory, name) in there for name in _NAMES):
            continue
        now = [os.path.lexists(name) for name in names]
        if all(name in there or known for name, known in zip(names, now, strict=True)):
            running = [path for path in below if path[len(directory) + 1 :].split("/")[0] in _RUN]
            yield from running or ([] if all(now) else below[:1])
