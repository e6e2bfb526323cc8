"""What git would ignore in a project once a change is there, without running git in a tree that a sandbox wrote.

Git is asked in a repository of our own, for the moment, with an empty index and nobody's configuration. Its working tree has
nothing but the .gitignore files of the directories that are asked about: those of the change where it has some, else reality's.
Beside them count, as they are in reality, the repository's `info/exclude` and the user's own list (`core.excludesFile`). What
reality's index has is never ignored, whatever the lists say.

The repository may be one that the project is a part of: then its lists above the project count as well, and git is asked with
paths from its top.
"""

import os
import stat
import tempfile
from collections.abc import Collection, Mapping

from elsewhere.changes.model import Side
from elsewhere.changes.sides import sides_of
from elsewhere.errors import Broken
from elsewhere.meeting import home_directory
from elsewhere.paths import above, is_within
from elsewhere.storage import checkouts, git, repositories

__all__ = ["LIST", "ignored_of"]

LIST = ".gitignore"
_LARGEST = 1 << 20  # of a list
_PATIENCE = 30.0
_PURPOSE = "finding out what is ignored"


def ignored_of(paths: Collection[str], project: str, lists: Mapping[str, Side | None]) -> set[str]:
    """Which of the paths are ignored; they are relative to the project, directories with a slash at their end. `lists` are the
    .gitignore files that the change has, by their paths; None is a deleted one."""
    if not paths:
        return set()
    top, places = _repository(project)
    if top != project:
        prefix = f"{os.path.relpath(project, top)}/"
        above = {prefix + path: side for path, side in lists.items()}
        found = _ignored([prefix[:-1], *(prefix + path for path in paths)], top, places, above)
        if prefix[:-1] not in found:
            found -= _tracked(places[0], top, prefix) if found and places is not None else set()
            return {path.removeprefix(prefix) for path in found}
        top, places = project, None  # it ignores the project as a whole, so that it has nothing to say about what is in it
    found = _ignored(paths, top, places, lists)
    return found - _tracked(places[0], top, "") if found and places is not None else found


def _repository(project: str) -> tuple[str, tuple[str, str] | None]:
    """The top of the repository that the project is, or is a part of, and where it lies; without one, the project itself. A home
    directory that is kept in git does not count, nor what is above it."""
    top = next(repositories.tops(project), project)
    home = os.path.realpath(os.path.expanduser("~"))
    if top != project and (top == "/" or (is_within(project, home) and is_within(home, top))):
        return project, None
    return top, checkouts.git_places(top)


def _ignored(paths: Collection[str], top: str, places: tuple[str, str] | None, lists: Mapping[str, Side | None]) -> set[str]:
    with tempfile.TemporaryDirectory(prefix="elsewhere-ignoring-") as place:
        own, tree = os.path.join(place, "git"), os.path.join(place, "tree")
        for directory in (own, tree, f"{own}/objects", f"{own}/refs", f"{own}/info"):
            os.mkdir(directory, 0o700)
        _write(f"{own}/HEAD", b"ref: refs/heads/none\n")
        _write(f"{own}/config", b"[core]\n\trepositoryformatversion = 0\n\tbare = false\n")
        if places is not None:
            _write(f"{own}/info/exclude", _content(os.path.join(places[1], "info/exclude")))
        _write(f"{own}/info/everywhere", _content(_list_of_the_user(own if places is None else places[0])))
        _plant(tree, paths, top, lists)
        return _asked(own, tree, paths)


def _plant(tree: str, paths: Collection[str], top: str, lists: Mapping[str, Side | None]) -> None:
    reality = sides_of([top])
    for directory in sorted({"", *(one for path in paths for one in above(path.rstrip("/")))}):
        name = os.path.join(directory, LIST)
        try:
            side = lists[name] if name in lists else reality(name)
            if side is None or side.type != "file":  # git does not follow a link there, either
                continue
            with side.open() as stream:
                content = stream.read(_LARGEST)
            os.makedirs(os.path.join(tree, directory), exist_ok=True)
            _write(os.path.join(tree, name), content)
        except OSError:
            continue  # closed, or gone meanwhile, or too deep: git would not read it, either


def _asked(own: str, tree: str, paths: Collection[str]) -> set[str]:
    done = git.run(
        ["check-ignore", "--no-index", "-z", "--stdin"],
        purpose=_PURPOSE,
        cwd=tree,
        settings=[f"core.excludesFile={own}/info/everywhere"],
        patience=_PATIENCE,
        source=b"".join(b"./%b\0" % os.fsencode(path) for path in paths),  # a colon first would have a meaning
        more={"GIT_DIR": own, "GIT_WORK_TREE": tree},
    )
    if done.returncode not in (0, 1):
        words = done.stderr.decode("utf-8", "replace").strip()
        what = f"git check-ignore ended with {done.returncode}: {words}"
        raise Broken("ignored_unknown", what, hint="--ignored takes everything, and need not ask")
    return {os.fsdecode(path).removeprefix("./") for path in done.stdout.split(b"\0") if path}


def _tracked(repository: str, top: str, prefix: str) -> set[str]:
    more = {"GIT_DIR": repository, "GIT_WORK_TREE": top, "GIT_LITERAL_PATHSPECS": "1"}
    words = ["ls-files", "-z", "--cached", "--", *([prefix] if prefix else [])]
    done = git.run(words, purpose=_PURPOSE, cwd=top, patience=_PATIENCE, more=more)
    return {os.fsdecode(path) for path in done.stdout.split(b"\0") if path} if done.returncode == 0 else set()


def _list_of_the_user(repository: str) -> str:
    """As git finds it: what the configuration names (asked of git, which runs nothing for that), or the usual place."""
    for configuration in git.user_configurations():
        more = {"HOME": home_directory(), "GIT_DIR": repository, "GIT_CONFIG_GLOBAL": configuration, "GIT_CONFIG_NOSYSTEM": "0"}
        done = git.run(["config", "--type=path", "--get", "core.excludesFile"], purpose=_PURPOSE, patience=_PATIENCE, more=more)
        if done.returncode == 0:
            return os.fsdecode(done.stdout).rstrip("\n")
    return os.path.join(git.user_directory(), "ignore")


def _content(path: str) -> bytes:
    """Of a small file that a person keeps; a link to it is as good as the file. Nothing, if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(fd, "rb") as stream:
            return stream.read(_LARGEST) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(content)
