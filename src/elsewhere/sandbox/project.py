"""The project: which directory is being worked on, and what of it lies elsewhere.

The nearest `elsewhere.toml` upwards, else the git top level, else the current directory. `/` and the home directory itself are
refused, and so are markers above the current directory that somebody else put there, as git does. Git is never run here.
"""

import os
import stat

from elsewhere.errors import NotFound, Refused, UsageError
from elsewhere.paths import is_within
from elsewhere.settings import FILE
from elsewhere.storage import repositories
from elsewhere.storage.repositories import small_file
from elsewhere.values import dataclass

__all__ = ["Project", "find"]


@dataclass(frozen=True, slots=True)
class Project:
    """`path` is free of links; `git` is the repository's common directory where that lies outside the project (a linked worktree,
    a submodule), else None. `remark` is what somebody should know."""

    path: str
    git: str | None
    head: str | None
    remark: str = ""


def find(start: str, home: str, *, chosen: bool = False) -> Project:
    """The project that contains `start`; with `chosen`, `start` itself was named by the user and is the project."""
    try:
        path = os.path.realpath(start, strict=True)
        found = os.stat(path)
    except FileNotFoundError:
        raise NotFound(
            "project_not_found", f"the project {start!r} does not exist", hint="name a directory with --project"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise NotFound("project_unreachable", f"the project {start!r} cannot be reached: {reason}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(
            "project_not_directory",
            f"the project {start!r} is not a directory",
            hint="name the directory that contains it",
        )
    top = path if chosen else _top(path, os.path.realpath(home))
    _check(top, os.path.realpath(home))
    repository = repositories.look(top)
    if repository is None:
        return Project(top, None, None)
    git, common = repository.git, repository.common
    if not repository.belongs:
        # A pointer that anybody can write must not become a place of the sandbox.
        why = f"{os.path.join(top, '.git')!r} leads to {common!r}, which does not point back: that repository is not shown"
        return Project(top, None, None, f"{why} (git worktree repair, or core.worktree there, makes it the project's own)")
    return Project(top, None if is_within(common, top) else common, _head(git, common))


def _top(path: str, home: str) -> str:
    git = None
    place = path
    while True:
        if place not in ("/", home):
            if _marks(place, FILE, path):
                return place
            if git is None and _marks(place, ".git", path):
                git = place
        if place == "/":
            return git or path
        place = os.path.dirname(place)


def _marks(place: str, name: str, start: str) -> bool:
    """Whether this name makes a directory above `start` the project: in a directory such as /tmp anybody could have put it."""
    try:
        owner = os.lstat(os.path.join(place, name)).st_uid
        return place == start or owner in (0, os.geteuid()) or owner == os.stat(place).st_uid == os.stat(start).st_uid
    except OSError:
        return False


def _check(path: str, home: str) -> None:
    if path == "/":
        raise Refused(
            "project_is_root",
            "the whole machine cannot be the project",
            hint="change to the directory that you work in, or name it with --project",
        )
    if path == home:
        raise Refused(
            "project_is_home",
            f"the home directory {home!r} itself cannot be the project",
            hint="change to a directory below it, or name one with --project",
        )
    if not os.access(path, os.R_OK | os.X_OK):
        raise Refused(
            "project_unreadable",
            f"the project {path!r} cannot be read by uid {os.geteuid()}",
            hint=f"check its owner and mode: ls -ld {path}",
        )


def _head(git: str, common: str) -> str | None:
    """The commit that HEAD names, from the files themselves."""
    text = small_file(os.path.join(git, "HEAD"))
    for _ in range(5):
        if not text or not text.startswith("ref:"):
            return text if text and len(text) in (40, 64) and not text.strip("0123456789abcdef") else None
        name = text[len("ref:") :].strip()
        if name.startswith("/") or ".." in name.split("/"):
            return None
        text = small_file(os.path.join(git, name)) or small_file(os.path.join(common, name)) or _packed(common, name)
    return None


def _packed(common: str, name: str) -> str | None:
    for line in (small_file(os.path.join(common, "packed-refs"), 64 << 20) or "").split("\n"):
        words = line.split(" ")
        if len(words) == 2 and words[1] == name:
            return words[0]
    return None
