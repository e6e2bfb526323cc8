"""HEAD and the index of a project moved to a branch that was fetched, and back. The working tree is the business of others.

    <directory>/            in the journal of a promotion
        checkout.json       written before anything is moved: which repository, from where to where, how far
        index.old           the index as it was (none: there was none)
        index.new           the one that is to be

    moving ─► moved ─► returning ─► returned
       └──────────────────┴──► `recover_checkout`: moved, returned, or left (somebody else moved HEAD or index since)

The new index is that of the branch's tree; what git knew of unchanged files is kept. It is made beside, and moved as git itself
does it: whoever has made `index.lock` may write, and renames it to `index`. Ours is linked there whole, so that its content tells
it from anybody else's. While it stands, no other git commits or checks out; then HEAD is moved, then the index. A crash between
them leaves the lock, and both contents in the journal: enough to go either way.

Nothing runs on the way: no hook, no filter, no monitor. Not here: the branch itself (`commits.py`), files.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Literal, NamedTuple

from elsewhere.errors import Broken, Conflict, ElsewhereError
from elsewhere.promotion.commits import Fetched
from elsewhere.promotion.repository import Repository, failed, repository_of
from elsewhere.values import dataclass

__all__ = ["Checkout", "check", "checkout", "checkout_state", "recover_checkout", "refuse_moved", "undo_checkout"]

State = Literal["moving", "moved", "returning", "returned", "left"]

_ASIDE = "index.elsewhere"
_NO_INDEX = b"elsewhere: there was no index\n"  # what a lock holds then; one of git's own may be empty
_HEADS = "refs/heads/"


@dataclass(frozen=True, slots=True)
class Checkout:
    """`old_ref` is what HEAD named (None: it was detached), `old` the commit that it led to (None: there was none yet)."""

    project: str
    branch: str
    new: str
    old_ref: str | None
    old: str | None
    state: State


class Index(NamedTuple):
    """Its bytes, and when git wrote it: files that changed at that very moment or later are looked at again."""

    content: bytes
    moment: int


def check(project: str, base_head: str | None) -> None:
    """What can be known before anything is fetched: whether HEAD and index are such that they could be moved."""
    repository = repository_of(project)
    _check_quiet(repository)
    _, commit = repository.head()
    if commit != base_head:
        raise _moved(f"HEAD is at {_short(commit)}, and the sandbox began at {_short(base_head)}", base_head, commit)
    _check_clean(repository, commit)


def checkout(project: str, fetched: Fetched, base_head: str | None, directory: str) -> Checkout:
    """Move HEAD to the branch, and the index to its tree. What is needed to return is in `directory`, which is made here."""
    check(project, base_head)
    repository = repository_of(project)
    ref, commit = repository.head()
    if commit is not None and repository.run("merge-base", "--is-ancestor", commit, fetched.new).returncode:
        raise _moved(f"HEAD is at {_short(commit)}, which the commits made inside do not come from", commit, fetched.new)
    _check_free(repository, fetched)
    os.mkdir(directory, 0o700)
    before = _index(os.path.join(repository.git, "index"))
    if before is not None:
        _write_index(os.path.join(directory, "index.old"), before)
    _write_index(os.path.join(directory, "index.new"), _index_for(repository, fetched.new, before, directory))
    found = _note(directory, Checkout(project, fetched.branch, fetched.new, ref, commit, "moving"), "moving")
    try:
        _forward(repository, directory, found, before)
    except ElsewhereError:
        if repository.head() == (ref, commit):
            _note(directory, found, "returned")
        raise
    return _note(directory, found, "moved")


def refuse_moved(directory: str) -> None:
    """Before anything is taken back: whether HEAD and index are still as they were left."""
    found = _noted(directory)
    _check_left(repository_of(found.project), found)


def _check_left(repository: Repository, found: Checkout) -> None:
    _check_quiet(repository)
    ref, commit = repository.head()
    if (ref, commit) != (_HEADS + found.branch, found.new):
        left = f"it was left on {found.branch!r} at {_short(found.new)}"
        raise _moved(f"HEAD is {_where(ref, commit)}, and {left}", found.new, commit)
    _check_clean(repository, commit)


def undo_checkout(directory: str) -> Checkout:
    """HEAD and index as they were, if both are still as they were left."""
    found = _noted(directory)
    if found.state == "returned":
        return found
    repository = repository_of(found.project)
    _check_left(repository, found)
    before = _index(os.path.join(repository.git, "index"))
    _note(directory, found, "returning")
    try:
        _back(repository, directory, found, before)
    except ElsewhereError:
        if repository.head() == (_HEADS + found.branch, found.new):
            _note(directory, found, "moved")
        raise
    return _note(directory, found, "returned")


def checkout_state(directory: str) -> State | None:
    """How far it got; None: it was never begun."""
    return _noted(directory).state if os.path.exists(os.path.join(directory, "checkout.json")) else None


def recover_checkout(directory: str, *, finish: bool) -> State | None:
    """What somebody did not finish is finished (HEAD on the branch) or reversed (HEAD as it was). If somebody else moved HEAD or
    the index since, both stay as they are; our lock goes. Can itself be interrupted, and repeated."""
    if checkout_state(directory) is None:
        return None
    found = _noted(directory)
    if found.state not in ("moving", "returning", *(() if finish else ("moved",))):
        return found.state
    repository = repository_of(found.project)
    with _git_directory(repository) as descriptor:
        _drop_ours(repository, directory, descriptor)
    before = _index(os.path.join(repository.git, "index"))
    if not _is_ours(repository, directory, found, before):
        return _note(directory, found, "left").state
    (_forward if finish else _back)(repository, directory, found, before)
    return _note(directory, found, "moved" if finish else "returned").state


# -- moving ---------------------------------------------------------------------------------------------------------------------


def _forward(repository: Repository, directory: str, found: Checkout, before: Index | None) -> None:
    _move(repository, found, before, _index(os.path.join(directory, "index.new")), _HEADS + found.branch, None)


def _back(repository: Repository, directory: str, found: Checkout, before: Index | None) -> None:
    _move(repository, found, before, _index(os.path.join(directory, "index.old")), found.old_ref, found.old)


def _move(
    repository: Repository, found: Checkout, before: Index | None, after: Index | None, ref: str | None, commit: str | None
) -> None:
    """The index from `before` to `after` (None: there is none), HEAD to a ref or, without one, to a commit."""
    with _git_directory(repository) as descriptor:
        _take_lock(repository, descriptor, Index(_NO_INDEX, 0) if after is None else after)
        try:
            if _index(os.path.join(repository.git, "index")) != before:
                raise Conflict("repository_busy", "another git wrote the index meanwhile", hint="try again when it is done")
            if (now := repository.head()) not in _ends(found):  # another branch of the same commit needs no new index
                raise _moved(f"HEAD was moved meanwhile, and is {_where(*now)}", found.old, now[1])
            _set_head(repository, ref, commit)
        except BaseException:
            os.unlink("index.lock", dir_fd=descriptor)
            raise
        if after is not None:
            os.rename("index.lock", "index", src_dir_fd=descriptor, dst_dir_fd=descriptor)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink("index", dir_fd=descriptor)
            os.unlink("index.lock", dir_fd=descriptor)
        os.fsync(descriptor)


def _set_head(repository: Repository, ref: str | None, commit: str | None) -> None:
    message = ("-m", "elsewhere: promote")
    if ref is not None:
        done = repository.run("symbolic-ref", *message, "HEAD", ref)
    else:
        done = repository.run("update-ref", *message, "--no-deref", "HEAD", commit or "")
    if done.returncode:
        raise failed("symbolic-ref" if ref is not None else "update-ref", done.stderr)


def _take_lock(repository: Repository, descriptor: int, index: Index) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_ASIDE, dir_fd=descriptor)
    about = os.stat("index" if _exists(descriptor, "index") else "HEAD", dir_fd=descriptor, follow_symlinks=False)
    aside = os.open(_ASIDE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=descriptor)
    with open(aside, "wb") as stream:
        stream.write(index.content)
        stream.flush()
        os.utime(aside, ns=(index.moment, index.moment))
        os.fchmod(aside, about.st_mode & 0o777)
        if os.geteuid() == 0:
            os.fchown(aside, about.st_uid, about.st_gid)
        os.fsync(aside)
    try:
        os.link(_ASIDE, "index.lock", src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except FileExistsError:
        raise _busy(repository, "index.lock") from None
    finally:
        os.unlink(_ASIDE, dir_fd=descriptor)


def _drop_ours(repository: Repository, directory: str, descriptor: int) -> None:
    """What a crash left of a lock of ours, which its content tells."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_ASIDE, dir_fd=descriptor)
    lock = _index(os.path.join(repository.git, "index.lock"))
    if lock is None:
        return
    if lock.content not in (_NO_INDEX, *_contents(directory)):
        raise _busy(repository, "index.lock")
    os.unlink("index.lock", dir_fd=descriptor)


def _is_ours(repository: Repository, directory: str, found: Checkout, index: Index | None) -> bool:
    """Whether HEAD is at one of both ends, and the index as well, but for what git notes in it in passing."""
    ref, commit = repository.head()
    at_an_end = (ref, commit) in _ends(found)
    return at_an_end and ((index and index.content) in _contents(directory) or not _is_staged(repository, commit))


def _ends(found: Checkout) -> tuple[tuple[str | None, str | None], ...]:
    """Where HEAD is before it is moved, and afterwards."""
    return (found.old_ref, found.old), (_HEADS + found.branch, found.new)


def _contents(directory: str) -> list[bytes | None]:
    found = [_index(os.path.join(directory, name)) for name in ("index.old", "index.new")]
    return [index and index.content for index in found]


# -- looking --------------------------------------------------------------------------------------------------------------------


def _index_for(repository: Repository, commit: str, before: Index | None, directory: str) -> Index:
    """Made from the one that is there, so that git need not read all files again to know that they are unchanged; as old as that
    one, since what it knows of them was written down then."""
    parent = directory if repository.owner is None else None  # where its owner can reach it as well
    with tempfile.TemporaryDirectory(prefix="index-", dir=parent) as place:
        path = os.path.join(place, "index")
        if before is not None:
            _write_index(path, before)
        if repository.owner is not None:
            for one in (place, *([path] if before is not None else [])):
                os.chown(one, *repository.owner)
        words = ("read-tree", "-i", "-m", commit) if before is not None else ("read-tree", commit)
        done = repository.run(*words, more={"GIT_INDEX_FILE": path})
        made = _index(path)
    if done.returncode or made is None:
        raise failed("read-tree", done.stderr)
    return made if before is None else Index(made.content, before.moment)


def _check_quiet(repository: Repository) -> None:
    name = repository.busy()
    if name is not None:
        raise _busy(repository, name)


def _check_free(repository: Repository, fetched: Fetched) -> None:
    """That the branch is what was fetched, and that no other working tree is on it."""
    full = _HEADS + fetched.branch
    found = repository.refs(full).get(full)
    if found != fetched.new:
        raise _moved(f"the branch {fetched.branch!r} is at {_short(found)}, not at {_short(fetched.new)}", fetched.new, found)
    tree = repository.checked_out().get(full)
    if tree is not None and os.path.realpath(tree) != repository.project:
        raise Conflict(
            "branch_checked_out",
            f"the branch {fetched.branch!r} is checked out at {tree!r}",
            hint="name another one with --branch, or promote without --checkout",
            detail={"branch": fetched.branch, "worktree": tree},
        )


def _check_clean(repository: Repository, commit: str | None) -> None:
    if _is_staged(repository, commit):
        raise Conflict(
            "index_not_clean",
            f"the index of {repository.project!r} has staged changes, which would be lost",
            hint="git commit or git restore --staged them first; a promotion can do without --checkout",
        )


def _is_staged(repository: Repository, commit: str | None) -> bool:
    """Whether the index differs from the commit. Objects are compared by their names: nothing reads a file."""
    if commit is None:
        return bool(repository.ask("ls-files", "--cached", "-z"))
    words = ("diff-index", "--cached", "--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=none", commit)
    done = repository.run(*words)
    if done.returncode not in (0, 1):
        raise failed("diff-index", done.stderr)
    return done.returncode == 1


def _busy(repository: Repository, name: str) -> Conflict:
    return Conflict(
        "repository_busy",
        f"somebody is in the middle of something in {repository.project!r}: {os.path.join(repository.git, name)!r} is there",
        hint="finish or abort it (git status tells what it is), or promote without --checkout",
        detail={"path": os.path.join(repository.git, name)},
    )


def _moved(message: str, expected: str | None, found: str | None) -> Conflict:
    return Conflict(
        "head_moved",
        message,
        hint="the branch is there: git switch or git merge brings it in when it suits",
        detail={"expected": expected, "found": found},
    )


def _where(ref: str | None, commit: str | None) -> str:
    return (f"on {ref.removeprefix(_HEADS)!r}" if ref else "detached") + f" at {_short(commit)}"


def _short(commit: str | None) -> str:
    return commit[:12] if commit else "no commit"


# -- on disk --------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _git_directory(repository: Repository) -> Iterator[int]:
    """What cannot be written there is told in the words that git's own failures have."""
    descriptor = os.open(repository.git, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    except OSError as error:
        if isinstance(error, ElsewhereError):
            raise
        raise failed("checkout", os.fsencode(f"{repository.git}: {error.strerror}")) from error
    finally:
        os.close(descriptor)


def _exists(descriptor: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _index(path: str) -> Index | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            return Index(stream.read(), os.fstat(stream.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None


def _write_index(path: str, index: Index) -> None:
    _write(path, index.content)
    os.utime(path, ns=(index.moment, index.moment))


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _note(directory: str, found: Checkout, state: State) -> Checkout:
    """Written aside and renamed: it is there whole, or as it was."""
    now = replace(found, state=state)
    path = os.path.join(directory, "checkout.json")
    _write(f"{path}.new", json.dumps(asdict(now)).encode())
    os.rename(f"{path}.new", path)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return now


def _noted(directory: str) -> Checkout:
    try:
        with open(os.path.join(directory, "checkout.json"), "rb") as stream:
            return Checkout(**json.load(stream))
    except (OSError, ValueError, TypeError) as error:
        raise Broken("checkout_damaged", f"{directory!r} does not tell what was checked out: {error}") from None
