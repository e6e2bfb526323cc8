"""A bundle from a sandbox, unpacked where it can do no harm, and checked.

A bundle is a short text and a pack of objects. The text is read here. The pack goes into a repository of our own, with our own
configuration, that borrows reality's objects and is thrown away:

    commits-…/                      beside the bundle; removed at the end
        HEAD config refs/ shallow
        objects/info/alternates     reality's objects
        objects/pack/               the bundle's

There git checks every object, strictly (no `.git` in a tree, no `.gitmodules` with options for addresses, no broken links), and
whether all is there down to what reality has. Why not in reality at once: objects that were refused would lie there, and
reality's configuration would have a say. Only what passed is handed over, by a git that writes to reality's directory of objects
but still has our configuration.

Not here: refs of reality (`commits.py`).
"""

import contextlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO

from elsewhere.errors import Conflict, Refused
from elsewhere.promotion.repository import Repository, failed, is_sha, words_of
from elsewhere.storage import git, repositories
from elsewhere.values import dataclass

__all__ = ["Entry", "Room", "quarantine"]

_LONGEST_HEADER = 1 << 20
_LARGEST_SHALLOW = 1 << 20
_LARGEST_POINTER = 1024
_MOST_POINTERS = 10_000
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_GITLINK = "160000"
_PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A path that two trees disagree about."""

    path: str
    old_mode: str
    mode: str
    old: str
    new: str

    @property
    def is_submodule(self) -> bool:
        return self.mode == _GITLINK and self.old_commit != self.new

    @property
    def old_commit(self) -> str | None:
        return self.old if self.old_mode == _GITLINK else None


@dataclass(frozen=True, slots=True)
class Room:
    """Reality's objects and the bundle's; `tips` is where reality's refs point, as git is told not to go on from there."""

    place: str
    repository: Repository
    tips: bytes

    def count(self, head: str) -> int:
        """How many commits `head` has that no ref of reality leads to."""
        return int(self._ask("rev-list", "--ignore-missing", "--count", "--stdin", source=self._new(head)))

    def subjects(self, head: str, most: int) -> list[bytes]:
        """First lines of those, the newest first."""
        words = ("log", "-z", "--format=%s", f"--max-count={most}", "--ignore-missing", "--stdin")
        said = self._ask(*words, source=self._new(head))
        return said.removesuffix(b"\0").split(b"\0") if said else []

    def leads_to(self, old: str, new: str) -> bool:
        return self._run("merge-base", "--is-ancestor", old, new).returncode == 0

    def changed(self, base: str | None, head: str) -> Iterator[Entry]:
        """In what their trees differ; from nothing, if there is no such base."""
        empty = os.fsdecode(self._ask("hash-object", "-t", "tree", "-w", "--stdin", source=b"")).strip()
        start = base if base is not None and not self.missing([base]) else empty
        said = self._ask("diff-tree", "-r", "-z", "--raw", "--no-abbrev", "--no-renames", start, head).split(b"\0")
        for about, path in zip(said[::2], said[1::2], strict=False):
            old_mode, mode, old, new, _ = os.fsdecode(about[1:]).split(" ")
            yield Entry(os.fsdecode(path), old_mode, mode, old, new)

    def pointers(self, changed: list[Entry]) -> list[str]:
        """Files among those that are pointers to contents which LFS keeps."""
        files = [one for one in changed if one.mode.startswith("100")][:_MOST_POINTERS]
        sizes = self._ask("cat-file", "--batch-check=%(objectsize)", source=_lines(one.new for one in files)).split(b"\n")
        small = [one for one, size in zip(files, sizes, strict=False) if size.isdigit() and int(size) <= _LARGEST_POINTER]
        said = self._ask("cat-file", "--batch=%(objectsize)", source=_lines(one.new for one in small))
        found, position = [], 0
        for one in small:
            end = said.index(b"\n", position)
            if said.startswith(_POINTER, end + 1):
                found.append(one.path)
            position = end + 1 + int(said[position:end]) + 1
        return found

    def missing(self, commits: list[str]) -> list[str]:
        """Those that are nowhere, or are no commits."""
        said = self._ask("cat-file", "--batch-check=%(objecttype)", source=_lines(commits))
        return [sha for sha, line in zip(commits, said.split(b"\n"), strict=False) if line != b"commit"]

    def take(self, pack: IO[bytes]) -> None:
        done = self._run("index-pack", "--stdin", "--fix-thin", "--strict", source=pack)
        if done.returncode:
            problem = failed("index-pack", done.stderr)
            raise problem if problem.code == "no_room" else _bad_bundle(f"git does not take its objects: {words_of(done.stderr)}")

    def check_whole(self, head: str) -> None:
        """That nothing is missing between `head` and what reality's refs lead to. The bundle's objects have no gaps between
        them (`take`); if there is one, it is in what reality had."""
        done = self._run("rev-list", "--ignore-missing", "--objects", "--quiet", "--stdin", source=self._new(head))
        if done.returncode:
            raise _gone([], words_of(done.stderr))

    def hand_over(self) -> None:
        """The checked pack into reality's directory of objects."""
        packs = os.path.join(self.place, "objects", "pack")
        for name in os.listdir(packs):
            if name.endswith(".pack"):
                with open(os.open(os.path.join(packs, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
                    done = self._run("index-pack", "--stdin", source=stream, GIT_OBJECT_DIRECTORY=self.repository.objects)
                if done.returncode:
                    raise failed("index-pack", done.stderr)

    def _new(self, head: str) -> bytes:
        return head.encode() + b"\n" + self.tips

    def _ask(self, *words: str, source: bytes | None = None) -> bytes:
        done = self._run(*words, source=source)
        if done.returncode:
            raise failed(words[0], done.stderr)
        return done.stdout

    def _run(self, *words: str, source: bytes | IO[bytes] | None = None, **more: str) -> "subprocess.CompletedProcess[bytes]":
        return git.run(
            words,
            purpose="moving commits",
            patience=_PATIENCE,
            source=source,
            owner=self.repository.owner,
            umask=-1,
            more={"GIT_DIR": self.place, **more},
        )


@contextlib.contextmanager
def quarantine(repository: Repository, bundle: str, refs: Mapping[str, str], largest: int) -> Iterator[Room]:
    """The bundle's objects beside reality's, all checks passed. It has to hold `refs`, and nothing else."""
    form = repository.object_format()
    parent = os.path.dirname(bundle) if repository.owner is None else None  # where its owner can reach it as well
    with _opened(bundle, largest) as stream, tempfile.TemporaryDirectory(prefix="commits-", dir=parent) as place:
        header = _header(stream)
        if header.form != form:
            raise _bad_bundle(f"its objects are named by {header.form}, those of {repository.project!r} by {form}")
        if header.refs != refs:
            raise _bad_bundle("it does not hold what the sandbox said; perhaps commits were made meanwhile")
        _furnish(place, repository, form)
        tips = {*repository.refs().values(), *filter(None, repository.head()[1:])}
        room = Room(place, repository, _lines(f"^{sha}" for sha in sorted(tips)))
        missing = room.missing(header.prerequisites)
        if missing:
            raise _gone(missing, "")
        room.take(stream)
        for sha in sorted(set(refs.values())):
            if room.missing([sha]):
                raise _bad_bundle(f"the commit {sha[:12]} is not in it")
            room.check_whole(sha)
        yield room


def _furnish(place: str, repository: Repository, form: str) -> None:
    """An empty repository that borrows reality's objects."""
    for name in ("objects", "objects/info", "objects/pack", "refs"):
        os.mkdir(os.path.join(place, name), 0o700)
    configuration = f"[core]\nrepositoryformatversion = 1\nbare = true\n[extensions]\nobjectformat = {form}\n"
    shallow = repositories.small_file(os.path.join(repository.common, "shallow"), _LARGEST_SHALLOW) or ""
    files = {
        "HEAD": b"ref: refs/heads/none\n",
        "config": configuration.encode(),
        "objects/info/alternates": git.quoted(repository.objects) + b"\n",
        "shallow": f"{shallow}\n".encode() if shallow else b"",
    }
    for name, content in files.items():
        with open(os.path.join(place, name), "xb") as stream:
            stream.write(content)
    if repository.owner is not None:
        for directory, _, names in os.walk(place):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                os.chown(path, *repository.owner)


def _lines(words: Iterable[str]) -> bytes:
    return "".join(f"{word}\n" for word in words).encode()


# -- the text of a bundle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Header:
    """By what objects are named, the commits that it builds on, and what it brings."""

    form: str
    prerequisites: list[str]
    refs: dict[str, str]


@contextlib.contextmanager
def _opened(bundle: str, largest: int) -> Iterator[IO[bytes]]:
    """Unbuffered: git goes on reading where the text ends."""
    try:
        descriptor = os.open(bundle, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _bad_bundle(f"it cannot be opened: {error.strerror}") from None
    with open(descriptor, "rb", buffering=0) as stream:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise _bad_bundle("it is no file")
        if about.st_size > largest:
            raise _bad_bundle(f"it has {about.st_size} bytes, where {largest} are the most")
        yield stream


def _header(stream: IO[bytes]) -> _Header:
    """Leaves the stream where the pack begins."""
    text, gap, _ = os.pread(stream.fileno(), _LONGEST_HEADER, 0).partition(b"\n\n")
    lines = text.decode("utf-8", "surrogateescape").split("\n")
    if not gap or lines[0] not in ("# v2 git bundle", "# v3 git bundle"):
        raise _bad_bundle("it does not begin as a bundle does")
    stream.seek(len(text) + len(gap))
    found = _Header("sha1", [], {})
    for line in lines[1:]:
        sha, _, rest = line.removeprefix("-").partition(" ")
        if line in ("@object-format=sha1", "@object-format=sha256") and lines[0] == "# v3 git bundle":
            found = _Header(line.partition("=")[2], found.prerequisites, found.refs)
        elif not is_sha(sha):
            raise _bad_bundle(f"nobody knows what {words_of(os.fsencode(line), 1)[:80]!r} in it means")
        elif line.startswith("-"):
            found.prerequisites.append(sha)
        else:
            found.refs[rest] = sha
    return found


def _bad_bundle(why: str) -> Refused:
    return Refused(
        "bad_bundle",
        f"what the sandbox handed out as its commits is not taken: {why}",
        hint="try again when nothing runs in the sandbox; git fsck inside tells about broken objects",
    )


def _gone(missing: list[str], said: str) -> Conflict:
    what = f"lacks {', '.join(sha[:12] for sha in missing[:5])}" if missing else f"is not whole: {said}"
    return Conflict(
        "history_gone",
        f"the sandbox's commits build on history that reality no longer has: its repository {what}",
        hint="bring those commits back (git reflog shows them), or promote the files without the commits",
        detail={"missing": missing[:100]},
    )
