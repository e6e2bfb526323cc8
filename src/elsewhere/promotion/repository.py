"""The repository of a project in reality, for those who add to it: what its refs are, and a git that runs on it.

It is run as whoever owns the repository, if that is somebody else than root, who promotes, and can reach it: what is made there
belongs to its owner, who can delete it again.

Not here: what is added (`commits.py`), and where HEAD points (`heads.py`).
"""

import os
import subprocess
from collections.abc import Iterator
from typing import IO

from elsewhere.errors import Broken, Conflict, ElsewhereError, NotFound, StateError
from elsewhere.storage import git, repositories
from elsewhere.storage.git import Owner
from elsewhere.values import dataclass

__all__ = ["Repository", "failed", "is_name", "is_sha", "repository_of", "words_of"]

_PATIENCE = 120.0
_LONGEST_NAME = 1000
_LONGEST_PART = 240  # of a file's name, which git makes longer while it writes it
_FORBIDDEN = frozenset(" ~^:?*[\\\x7f").union(map(chr, range(32)))
_BUSY = (
    "MERGE_HEAD",
    "CHERRY_PICK_HEAD",
    "REVERT_HEAD",
    "BISECT_LOG",
    "rebase-merge",
    "rebase-apply",
    "sequencer",
    "index.lock",
    "HEAD.lock",
)


@dataclass(frozen=True, slots=True)
class Repository:
    """`git` is the directory of the project's own HEAD and index, `common` that of everything else: the same, but for a linked
    worktree."""

    project: str
    git: str
    common: str
    owner: Owner | None

    @property
    def objects(self) -> str:
        return os.path.join(self.common, "objects")

    def run(
        self, *words: str, source: bytes | IO[bytes] | None = None, more: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[bytes]":
        surroundings = {
            "GIT_DIR": self.git,
            "GIT_COMMITTER_NAME": "elsewhere",  # in the log of a ref; whoever makes a commit says its committer
            "GIT_COMMITTER_EMAIL": "elsewhere@localhost",
            **(more or {}),
        }
        return git.run(
            words,
            purpose="moving commits",
            patience=_PATIENCE,
            settings=("core.splitIndex=false",),
            source=source,
            owner=self.owner,
            umask=-1,
            more=surroundings,
        )

    def ask(self, *words: str, source: bytes | None = None) -> str:
        done = self.run(*words, source=source)
        if done.returncode:
            raise failed(words[0], done.stderr)
        return os.fsdecode(done.stdout)

    def object_format(self) -> str:
        return self.ask("rev-parse", "--show-object-format").strip()

    def refs(self, below: str = "refs/") -> dict[str, str]:
        """Every ref below that, with what it points to."""
        lines = self.ask("for-each-ref", "--format=%(objectname) %(refname)", below).splitlines()
        return {name: sha for sha, _, name in (line.partition(" ") for line in lines)}

    def head(self) -> tuple[str | None, str | None]:
        """The ref that HEAD names, None if it is detached; and the commit, None if there is none yet."""
        symbolic = self.run("symbolic-ref", "--quiet", "HEAD")
        commit = self.run("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        name, sha = os.fsdecode(symbolic.stdout).strip(), os.fsdecode(commit.stdout).strip()
        return (name if symbolic.returncode == 0 else None), (sha if commit.returncode == 0 else None)

    def checked_out(self) -> dict[str, str]:
        """Refs that a working tree is on, or will return to after what it is in the middle of; with that tree."""
        found = {}
        tree = ""
        for line in self.ask("worktree", "list", "--porcelain", "-z").split("\0"):
            word, _, value = line.partition(" ")
            if word == "worktree":
                tree = value
            elif word == "branch":
                found[value] = tree
        for place in self._places():
            for name in ("rebase-merge/head-name", "rebase-apply/head-name"):
                returning = repositories.small_file(os.path.join(place, name))
                if returning:
                    found[returning] = place
        return found

    def busy(self) -> str | None:
        """What shows that somebody is in the middle of something in this working tree."""
        return next((name for name in _BUSY if os.path.lexists(os.path.join(self.git, name))), None)

    def _places(self) -> Iterator[str]:
        yield self.common
        trees = os.path.join(self.common, "worktrees")
        if os.path.isdir(trees):
            yield from (os.path.join(trees, name) for name in os.listdir(trees))


def repository_of(project: str) -> Repository:
    found = repositories.look(project)
    if found is None or not found.belongs:
        raise NotFound(
            "no_repository",
            f"{project!r} is not the top of a git repository of its own, so that commits have nowhere to go",
            hint="git init there, or promote the files without the commits",
            detail={"project": project},
        )
    return Repository(project, found.git, found.common, _owner(found.git, found.common))


def _owner(git_directory: str, common: str) -> Owner | None:
    about = os.stat(common)
    if os.geteuid() != 0 or about.st_uid == 0:
        return None
    owner = about.st_uid, about.st_gid
    reached = git.run(
        ("rev-parse", "--git-dir"), purpose="moving commits", patience=_PATIENCE, owner=owner, more={"GIT_DIR": git_directory}
    )
    return owner if reached.returncode == 0 else None


def is_sha(text: str) -> bool:
    return len(text) in (40, 64) and not text.strip("0123456789abcdef")


def is_name(name: str) -> bool:
    """Whether git takes it as the name of a branch, and a terminal can show it."""
    parts = name.split("/")
    return (
        name.isprintable()
        and len(os.fsencode(name)) <= _LONGEST_NAME
        and not _FORBIDDEN.intersection(name)
        and not any(sequence in name for sequence in ("..", "@{"))
        and not name.startswith("-")
        and not name.endswith(".")
        and name not in ("@", "HEAD")
        and all(_is_part(part) for part in parts)
    )


def _is_part(part: str) -> bool:
    return bool(part) and not part.startswith(".") and not part.endswith(".lock") and len(os.fsencode(part)) <= _LONGEST_PART


def words_of(said: bytes, lines: int = 3) -> str:
    """What git or a stranger said, in so many lines, without anything that a terminal would obey."""
    text = said.decode("utf-8", "replace").strip()
    shown = ("".join(sign if sign.isprintable() else "?" for sign in line) for line in text.splitlines()[-lines:])
    return "; ".join(line[:300] for line in shown)


def failed(what: str, complaint: bytes) -> ElsewhereError:
    """Why git could not, in the words that the rest of a promotion has for it."""
    said = words_of(complaint)
    if any(words in said for words in ("No space left", "Disk quota exceeded", "File too large")):
        return StateError("no_room", f"git {what} found no room: {said}", hint="elsewhere df shows what takes it")
    if any(words in said for words in ("Permission denied", "Read-only file system", "Operation not permitted")):
        return Conflict("not_permitted", f"git {what} may not write: {said}", hint="look at the owner and the mode of .git")
    if ".lock': File exists" in said:
        return Conflict("repository_busy", f"another git is at work: {said}", hint="wait for it, and try again")
    return Broken("git_failed", f"git {what} failed: {said}", hint="git fsck and free space are worth a look")
