"""Where the repository of a project lies, by its own small files: git is not run, and nothing of it is believed that leads away.

Whoever wrote the project wrote its pointer, too. So one that leads out of the project counts only if the other side points back:

    linked worktree    lies in `worktrees/` of the common directory, and its `gitdir` names the project's .git
    submodule          its own configuration names the project as `core.worktree`

Not here: what is in a repository (`checkouts.py`).
"""

import contextlib
import os
import stat
from collections.abc import Iterator

from elsewhere.paths import is_within
from elsewhere.values import dataclass

__all__ = ["Repository", "look", "small_file", "tops"]

_LARGEST_CONFIGURATION = 1 << 20
_ESCAPED = {"n": "\n", "t": "\t", "b": "\b", "\\": "\\", '"': '"'}


@dataclass(frozen=True, slots=True)
class Repository:
    """Its own and its common directory (the same, but for a linked worktree), free of links. One that does not `belong` to the
    project is only pointed at by it."""

    git: str
    common: str
    belongs: bool


def look(project: str) -> Repository | None:
    """What the .git of a project leads to, if that is a repository at all. `project` is free of links."""
    pointer = os.path.join(project, ".git")
    if os.path.isdir(pointer):
        git = os.path.realpath(pointer)
    else:
        text = small_file(pointer)
        if not text or not text.startswith("gitdir:"):
            return None
        git = os.path.realpath(os.path.join(project, text[len("gitdir:") :].strip()))
    text = small_file(os.path.join(git, "commondir"))
    common = os.path.realpath(os.path.join(git, text)) if text else git
    return Repository(git, common, _belongs(git, common, project)) if _is_repository(git, common) else None


def tops(project: str) -> Iterator[str]:
    """The top of each repository that the project is or lies in, the nearest first, as git looks for them: on one file system.
    What a stranger put into a directory above, such as /tmp, does not count; git does not go by it, either."""
    if look(project) is not None:
        yield project
    with contextlib.suppress(OSError):
        about, place = os.stat(project), project
        while place != "/" and os.stat(place := os.path.dirname(place)).st_dev == about.st_dev:
            if _is_trusted(os.path.join(place, ".git"), about.st_uid) and look(place) is not None:
                yield place


def _is_trusted(pointer: str, owner: int) -> bool:
    try:
        return os.lstat(pointer).st_uid in (0, os.geteuid(), owner)
    except FileNotFoundError:
        return False


def _is_repository(git: str, common: str) -> bool:
    """As git itself asks."""
    parts = all(os.path.isdir(os.path.join(common, name)) for name in ("objects", "refs"))
    return parts and all(os.path.lexists(os.path.join(place, "HEAD")) for place in (git, common))


def _belongs(git: str, common: str, project: str) -> bool:
    if is_within(git, project) and is_within(common, project):
        return True
    if git == common:
        return _leads_to(_work_tree(git), git, project)
    named = small_file(os.path.join(git, "gitdir")) if os.path.dirname(git) == os.path.join(common, "worktrees") else None
    return bool(named) and os.path.basename(named or "") == ".git" and _leads_to(os.path.dirname(named or ""), git, project)


def _leads_to(path: str | None, start: str, project: str) -> bool:
    return bool(path) and os.path.realpath(os.path.join(start, path or "")) == project


def _work_tree(git: str) -> str | None:
    """`core.worktree`; the configuration of the work tree alone wins over that of the repository."""
    for name in ("config.worktree", "config"):
        found = _setting(small_file(os.path.join(git, name), _LARGEST_CONFIGURATION) or "", "core", "worktree")
        if found:
            return found
    return None


def _setting(text: str, section: str, key: str) -> str | None:
    """The last value of a key in git's notation. What another file would add is not read."""
    found, here = None, False
    for line in text.split("\n"):
        head, closed, rest = line.strip().partition("]") if line.strip().startswith("[") else ("", "", line)
        if closed:
            here = head[1:].strip().lower() == section
        name, equals, value = rest.partition("=")
        if here and equals and name.strip().lower() == key:
            found = _value(value.strip())
    return found


def _value(text: str) -> str:
    """Without quotes, escapes and a comment behind it."""
    said, quoted, signs = "", False, iter(text)
    for sign in signs:
        if sign == '"':
            quoted = not quoted
        elif sign == "\\":
            said += _ESCAPED.get(next(signs, ""), "")
        elif sign in "#;" and not quoted:
            return said.rstrip()
        else:
            said += sign
    return said


def small_file(path: str, limit: int = 4096) -> str | None:
    """A file that a stranger may have written: regular, bounded, never waited for."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(fd, "rb") as stream:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                text = os.fsdecode(stream.read(limit)).strip()
                return None if "\0" in text else text
    return None
