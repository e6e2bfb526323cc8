"""The project: which directory is being worked on, and what of it lies elsewhere.

The nearest `elsewhere.toml` upwards, else the git top level, else the current directory. `/` and the home directory itself are
refused. Git is never run here: two small files are read.
"""

import contextlib
import os
import stat
from dataclasses import dataclass

from elsewhere.errors import NotFound, Refused, UsageError
from elsewhere.settings import FILE

__all__ = ["Project", "find"]


@dataclass(frozen=True, slots=True)
class Project:
    """`path` is free of links; `git` is the repository's common directory where that lies outside the project (a linked worktree,
    a submodule), else None."""

    path: str
    git: str | None
    head: str | None


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
    git = _git_directory(top)
    common = _common_directory(git) if git else None
    outside = common if common and not (common + "/").startswith(top + "/") else None
    return Project(top, outside, _head(git, common) if git and common else None)


def _top(path: str, home: str) -> str:
    git = None
    place = path
    while True:
        if place not in ("/", home):
            if os.path.lexists(os.path.join(place, FILE)):
                return place
            if git is None and os.path.lexists(os.path.join(place, ".git")):
                git = place
        if place == "/":
            return git or path
        place = os.path.dirname(place)


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


def _read(path: str, limit: int = 4096) -> str | None:
    """A small file that a stranger may have written: regular, bounded, never followed into a fifo."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(fd, "rb") as stream:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                text = os.fsdecode(stream.read(limit)).strip()
                return None if "\0" in text else text
    return None


def _git_directory(top: str) -> str | None:
    git = os.path.join(top, ".git")
    if os.path.isdir(git):
        return os.path.realpath(git)
    text = _read(git)
    if text and text.startswith("gitdir:"):
        place = os.path.realpath(os.path.join(top, text[len("gitdir:") :].strip()))
        return place if os.path.isdir(place) else None
    return None


def _common_directory(git: str) -> str | None:
    text = _read(os.path.join(git, "commondir"))
    place = os.path.realpath(os.path.join(git, text)) if text else git
    # A pointer that names anything but a repository must not become a writable place of the sandbox.
    return place if _is_repository(place) else None


def _is_repository(place: str) -> bool:
    """As git itself asks."""
    directories = all(os.path.isdir(os.path.join(place, name)) for name in ("objects", "refs"))
    return directories and os.path.lexists(os.path.join(place, "HEAD"))


def _head(git: str, common: str) -> str | None:
    """The commit that HEAD names, from the files themselves."""
    text = _read(os.path.join(git, "HEAD"))
    for _ in range(5):
        if not text or not text.startswith("ref:"):
            return text if text and len(text) in (40, 64) and not text.strip("0123456789abcdef") else None
        name = text[len("ref:") :].strip()
        if name.startswith("/") or ".." in name.split("/"):
            return None
        text = _read(os.path.join(git, name)) or _read(os.path.join(common, name)) or _packed(common, name)
    return None


def _packed(common: str, name: str) -> str | None:
    for line in (_read(os.path.join(common, "packed-refs"), 64 << 20) or "").split("\n"):
        words = line.split(" ")
        if len(words) == 2 and words[1] == name:
            return words[0]
    return None
