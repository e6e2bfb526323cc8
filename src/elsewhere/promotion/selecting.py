"""Which changes of a sandbox are promoted, and which of them somebody should look at first.

    inside      in the project, in what `paths` names, not ignored by git (unless `ignored`)
    outside     only what a glob of `outside` names
    left out    ignored; outside; git: a repository's own files, which travel as commits; other: what can be neither read nor
                moved (devices, sockets, fifos, closed directories)

Directories that were made come with what is taken in them; those that were deleted, if everything in them is taken.

What was renamed is one change as long as both of its ends are of one sort, and a glob that names one end takes both. Otherwise
its ends are something deleted and something added, each by itself.

Not here: what becomes of a change (`planning.py`), how git tells what is ignored (`ignoring.py`), and where hooks lie
(`hooks.py`).
"""

import fnmatch
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field

from elsewhere.changes.drift import is_repository_path
from elsewhere.changes.globs import matcher
from elsewhere.changes.model import Change, Changes, Side
from elsewhere.errors import UsageError
from elsewhere.paths import above, is_within
from elsewhere.promotion import ignoring
from elsewhere.promotion.hooks import hooks_of, runs_in_repositories
from elsewhere.values import dataclass

__all__ = ["Selection", "marks", "select", "unfit"]

SORTS = ("ignored", "outside", "other", "git")


@dataclass(frozen=True, slots=True)
class Selection:
    """`left_out` has absolute paths, by the reason, sorted; what `paths` does not name is nowhere."""

    inside: list[Change] = field(default_factory=list)
    outside: list[Change] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=lambda: {sort: [] for sort in SORTS})

    @property
    def is_empty(self) -> bool:
        """Nothing fits what was named. What lies outside of the project is told whether it was named or not."""
        return not (self.inside or self.outside or any(self.left_out[sort] for sort in SORTS if sort != "outside"))


def select(
    changes: Changes,
    project: str,
    *,
    paths: Sequence[str] = (),
    ignored: bool = False,
    outside: Sequence[str] = (),
    leave: Collection[str] = (),
) -> Selection:
    """`leave` are absolute paths that stay behind, whatever else fits."""
    for pattern in outside:
        if pattern and not pattern.startswith("/"):
            raise UsageError(
                "bad_pattern",
                f"--outside {pattern!r} is relative, and what lies outside of the project is named from the root of the machine",
                hint="write it with a slash in front, such as /etc/hosts or '/etc/**'",
            )
    named, named_outside = matcher(paths, project), matcher(outside, project)
    within = f"{project.rstrip('/')}/"
    candidates = [
        one for one in changes.entries if not all(end.startswith(within) for end in _ends(one)) or any(map(named, _bare(one)))
    ]
    shut = set() if ignored else _ignored(candidates, within)

    def sort_of(path: str, *sides: Side | None) -> str:
        if path in leave:
            return "left"
        if is_repository_path(path):
            return "git"
        if any(side is not None and side.type == "other" for side in sides):
            return "other"
        if not path.startswith(within):
            return "chosen outside" if outside and named_outside(path.rstrip("/")) else "outside"
        return "ignored" if path in shut else "inside"

    directories = {one.path: one for one in changes.directories}
    found = Selection()
    for change in candidates:
        source = change.source or change.path
        here = (sort_of(change.path, change.after), named(change.path.rstrip("/")))
        there = (sort_of(source, change.before), named(source.rstrip("/")))
        for one in _apart(change, together=here == there):
            unreadable = one.before is None and one.after is None and one.path not in directories
            sort = "other" if unreadable else sort_of(one.path, one.before, one.after)
            if sort == "inside" and any(map(named, _bare(one))):
                found.inside.append(directories.get(one.path, one))
            elif sort == "chosen outside":
                found.outside.append(directories.get(one.path, one))
            elif sort in SORTS:
                found.left_out[sort] += _ends(one)
    _add_directories(found, changes, within)
    for left in found.left_out.values():
        left.sort()
    return found


def unfit(selection: Selection, outside: Iterable[str], project: str) -> list[str]:
    """Those patterns that name nothing of what was changed there. What cannot be moved, and is told, counts as well."""
    ends = [end for one in selection.outside for end in _ends(one)]
    ends += [end for left in selection.left_out.values() for end in left]
    there = [end.rstrip("/") for end in ends if not is_within(end, project)]
    return [pattern for pattern in outside if not any(map(matcher([pattern], project), there))]


def _add_directories(found: Selection, changes: Changes, within: str) -> None:
    taken = {end for one in (*found.inside, *found.outside) for end in _ends(one)}
    needed = {above for path in taken for above in _above(path)}
    staying = {above for one in changes.entries for end in _ends(one) if end not in taken for above in _above(end)}
    for one in changes.directories:
        if one.path in needed and one.path not in taken and (one.kind == "added" or one.path not in staying):
            (found.inside if one.path.startswith(within) else found.outside).append(one)


def _above(path: str) -> Iterator[str]:
    """The directories that it is in, each with a slash at its end."""
    return (f"{one}/" for one in above(path.rstrip("/")))


def _ends(change: Change) -> list[str]:
    return [change.path] if change.source is None else [change.path, change.source]


def _bare(change: Change) -> list[str]:
    return [end.rstrip("/") for end in _ends(change)]


def _apart(change: Change, *, together: bool) -> Iterator[Change]:
    """The two ends of what was renamed, if one of them goes where the other does not."""
    if change.source is None or together:
        yield change
        return
    yield Change(change.source, "deleted", change.before, None)
    yield Change(change.path, "added", None, change.after)


def _ignored(candidates: Iterable[Change], within: str) -> set[str]:
    """Their absolute paths."""
    ends: dict[str, Side | None] = {}
    for change in candidates:
        if change.source is not None:
            ends.setdefault(change.source, None)
        ends[change.path] = change.after
    inside = {path[len(within) :]: side for path, side in ends.items() if path.startswith(within)}
    inside = {path: side for path, side in inside.items() if path and not is_repository_path(path)}
    lists = {path: side for path, side in inside.items() if os.path.basename(path) == ignoring.LIST}
    found = ignoring.ignored_of(inside, within.rstrip("/") or "/", lists)
    return {within + path for path in found}


# -- what runs by itself --------------------------------------------------------------------------------------------------------

# The reason, and for what: names anywhere on the way, or places of which the parts belong together; the first that fits tells.
_HOOK = "git runs it as a hook"
_RUN = (
    ("a CI service runs it", ".github/workflows .github/actions .gitlab-ci.yml .circleci .travis.yml .drone.yml .woodpecker"),
    ("a CI service runs it", ".woodpecker.yml .buildkite appveyor.yml .appveyor.yml azure-pipelines.yml Jenkinsfile .cirrus.yml"),
    ("a CI service runs it", "bitbucket-pipelines.yml cloudbuild.yaml .teamcity .gitea/workflows .forgejo/workflows"),
    (_HOOK, ".husky .githooks .pre-commit-config.yaml lefthook.yml .lefthook.yml .overcommit.yml"),
    ("git goes by what it says about other files", ".git*"),
    ("says how sandboxes of this project are made", "elsewhere.toml"),
    ("direnv runs it in whoever enters the directory", ".envrc"),
    ("an editor may run what it says", ".vscode .idea .fleet .zed *.code-workspace .devcontainer .devcontainer.json"),
    ("an editor may run what it says", ".exrc .vimrc .nvimrc .nvim.lua .dir-locals.el"),
    ("an agent may run what it says", ".claude .cursor .codex .gemini .mcp.json .aider.conf.yml"),
    ("a tool runs it in whoever works there", ".mise.toml mise.toml"),
    (
        "a shell runs it when it starts",
        ".bashrc .bash_profile .bash_login .bash_logout .profile .zshrc .zshenv .zprofile .zlogin",
    ),
    ("a shell runs it when it starts", "/etc/profile /etc/profile.d /etc/bash.bashrc /etc/zsh"),
    ("decides who is let in, and how", ".ssh .gnupg .netrc /etc/sudoers /etc/sudoers.d /etc/pam.d /etc/ssh"),
    (
        "cron runs it",
        "/etc/cron.d /etc/cron.hourly /etc/cron.daily /etc/cron.weekly /etc/cron.monthly /etc/crontab /var/spool/cron",
    ),
    (
        "it is run when the machine or a session starts",
        "/etc/systemd /lib/systemd /usr/lib/systemd .config/systemd /etc/rc.local",
    ),
    ("it is run when the machine or a session starts", "/etc/init.d /etc/xdg/autostart .config/autostart"),
    ("every program loads it", "/etc/ld.so.preload"),
)


def marks(changes: Iterable[Change], project: str, extra_globs: Sequence[str] = ()) -> list[tuple[str, str]]:
    """What runs by itself in reality sooner or later, with the reason: absolute paths, sorted. `extra_globs` are the project's
    own entry points. What is deleted counts as well: a check that is gone checks nothing. A directory does not run."""
    changes, hooks = list(changes), hooks_of(project)
    entry = matcher(extra_globs, project) if extra_globs else lambda _: False
    found: dict[str, str] = {}
    for change in changes:
        for path in () if change.path.endswith("/") else _ends(change):
            why = _why(path.rstrip("/"), project) or ("an entry point of the project" if entry(path.rstrip("/")) else "")
            if any(is_within(path, place) for place in hooks):
                why = _HOOK
            if why:
                found.setdefault(path, why)
        after = change.after
        if after is not None and after.type == "file" and after.mode & (stat.S_ISUID | stat.S_ISGID):
            found[change.path] = "runs with the rights of whom it belongs to (setuid or setgid)"
    for path in runs_in_repositories(end for change in changes for end in _ends(change)):
        found.setdefault(path, "git goes by what it says, in a repository that lies there")
    return sorted(found.items())


class _Table:
    """The table above, by what is asked of it: a name is looked up, and only the rest is tried one by one. The first row that
    fits tells. Spelled otherwise it counts as well: there are file systems, and machines, to which that is the same."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.rest: list[tuple[int, list[str]]] = []
        self.places: list[tuple[int, str]] = []
        for row, (_, words) in enumerate(_RUN):
            for word in words.casefold().split():
                if word.startswith("/"):
                    self.places.append((row, word))
                elif "/" in word or "*" in word:
                    self.rest.append((row, word.split("/")))
                else:
                    self.names.setdefault(word, row)

    def row(self, path: str, parts: list[str]) -> int | None:
        path, parts = path.casefold(), [part.casefold() for part in parts]
        found = [self.names[part] for part in parts if part in self.names]
        found += [row for row, wanted in self.rest if _has(parts, wanted)]
        found += [row for row, place in self.places if is_within(path, place)]
        return min(found, default=None)


_TABLE = _Table()


def _why(path: str, project: str) -> str | None:
    below = path.removeprefix(f"{project.rstrip('/')}/")
    row = _TABLE.row(path, [part for part in below.split("/") if part])
    return None if row is None else _RUN[row][0]


def _has(parts: list[str], wanted: list[str]) -> bool:
    """Whether parts of the path, one after the other, have these names."""
    for start in range(len(parts) - len(wanted) + 1):
        if all(fnmatch.fnmatchcase(part, name) for part, name in zip(parts[start:], wanted, strict=False)):
            return True
    return False
