"""A commit of the project's repository as a base, without touching the repository.

    bases/<project>/commits/<sha>/     made whole in building/ and renamed; owners shifted: <sha>+<shift>
        tree/                          the commit's files, owned like the project, dated like the commit
        index                          git's index for them, as a git inside a sandbox would have written it
        HEAD                           the commit's name: a detached HEAD

Git runs on reality only to ask what a name means. Trees are made with a repository of our own, which borrows reality's objects
and has its own configuration: what a project's configuration names (filters, monitors, hooks, helpers) never runs, and nothing
can be written into reality's .git. Submodules are empty directories, LFS pointers stay pointers, nothing is fetched.

Not here: refs and configuration of the sandbox's own .git.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable, Collection

from elsewhere.clock import monotonic, wall
from elsewhere.errors import Broken, NotFound, StateError, UsageError
from elsewhere.storage import repositories
from elsewhere.storage.capturing import Progress, Tell
from elsewhere.storage.git import quoted, run
from elsewhere.storage.repositories import small_file
from elsewhere.storage.rooms import Room, room_for, room_needed
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = [
    "Checkout",
    "between",
    "checkout",
    "commits_since",
    "deleted",
    "dirty",
    "git_places",
    "prune_commits",
    "resolve",
    "unused_commits",
]

_PATIENCE = 30.0
_NO_SPACE = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), os.strerror(errno.EFBIG))
# Settings of the repository that say what its files look like, and can run nothing.
_CARRIED = ("core.autocrlf", "core.eol", "core.symlinks", "core.filemode", "core.ignorecase", "extensions.objectformat")


@dataclass(frozen=True, slots=True)
class Checkout:
    """Paths of the tree, its index and its HEAD; `made` is false if it was there already."""

    sha: str
    tree: str
    index: str
    head: str
    made: bool
    seconds: float


def git_places(project: str) -> tuple[str, str] | None:
    """The repository's own and its common directory (the same, but for a linked worktree); None: the project is no repository, or
    points to one that is not its own."""
    found = repositories.look(project)
    return (found.git, found.common) if found and found.belongs else None


def resolve(project: str, ref: str) -> str:
    """The full name of the commit that `ref` means: a full or short name, a branch, a tag, `HEAD~3`. What could mean two
    different commits is refused, where git itself would take one of them and warn."""
    git, _ = _repository(project)
    if not ref or ref.startswith("-") or "\0" in ref:
        raise _unknown(ref)
    found = _ask(git, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}")
    sha = found.stdout.strip()
    full = len(ref) in (40, 64) and not ref.strip("0123456789abcdefABCDEF")
    if "is ambiguous" in found.stderr and not full:
        candidates = _candidates(git, ref)
        if found.returncode or len({commit for _, commit in candidates}) > 1:
            raise UsageError(
                "base_ref_ambiguous",
                f"{ref!r} could mean {' or '.join(f'{name} ({commit[:12]})' for name, commit in candidates)}",
                hint="write it out: refs/heads/NAME, refs/tags/NAME, or more digits of the commit",
                detail={"ref": ref, "candidates": [name for name, _ in candidates]},
            )
    if found.returncode or not sha:
        raise _unknown(ref)
    return sha


def checkout(state: State, project: str, sha: str, *, shift: int = 0, tell: Tell | None = None) -> Checkout:
    """The tree of the commit `sha` (a full name, see `resolve`), made if it is not there yet."""
    began = monotonic()
    if len(sha) not in (40, 64) or sha.strip("0123456789abcdef"):
        raise _unknown(sha)
    git, common = _repository(project)
    room = room_for(state, project)
    place = room.inside("commits", f"{sha}+{shift}" if shift else sha)
    made = False
    if not os.path.isdir(place):
        with room.locked(fcntl.LOCK_EX), room_needed(room):
            if not os.path.isdir(place):
                room.clear()
                try:
                    _Maker(room.inside("building", "commit"), project, git, common, sha, os.stat(project), shift, tell).run()
                    os.rename(room.inside("building", "commit"), place)
                except BaseException:
                    with contextlib.suppress(OSError):
                        room.clear()
                    raise
                made = True
    tree, index, head = (os.path.join(place, name) for name in ("tree", "index", "HEAD"))
    return Checkout(sha, tree, index, head, made, monotonic() - began)


def dirty(project: str) -> list[str]:
    """What git has no copy of: files of the working tree that look other than at the last commit, and untracked ones that are not
    ignored; relative to the project. Where times do not tell, content is compared as it is: no filter of theirs is run."""
    places = git_places(project)
    if places is None:
        return []
    return _names(places[0], project, "ls-files", "-z", "--modified", "--others", "--exclude-standard", "--deduplicate")


def deleted(project: str) -> list[str]:
    """What the last commit or the index has and the working tree has not; relative to the project."""
    places = git_places(project)
    if places is None:
        return []
    missing = _names(places[0], project, "ls-files", "-z", "--deleted", "--deduplicate")
    return [*missing, *_names(places[0], project, "diff-index", "-z", "--cached", "--name-only", "--diff-filter=D", "HEAD")]


def between(project: str, old: str, new: str) -> list[str] | None:
    """The paths in which two commits differ, relative to the project; None: one of them is not there (any more)."""
    places = git_places(project)
    if places is None:
        return None
    words = ("diff-tree", "-r", "-z", "--name-only", "--no-renames", "--end-of-options", old, new)
    done = _run(places[0], words, _PATIENCE, cwd=project)
    return [path for path in done.stdout.split("\0") if path] if done.returncode == 0 else None


def commits_since(project: str, old: str, new: str) -> int | None:
    """How many commits `new` has on top of `old`; None: it does not lie on top of it, or is not there (any more)."""
    places = git_places(project)
    if places is None:
        return None
    done = _ask(places[0], "rev-list", "--count", "--left-right", "--end-of-options", f"{old}...{new}")
    counts = done.stdout.split()
    return int(counts[1]) if done.returncode == 0 and len(counts) == 2 and counts[0] == "0" else None


def _names(git: str, project: str, *words: str) -> list[str]:
    """Paths that git lists of a working tree. It reads files that may have changed, through the programs that the repository's
    configuration names as filters: an empty name takes each of them away."""
    asked = _ask(git, "config", "-z", "--name-only", "--get-regexp", r"^filter\..*\.(clean|smudge|process|required)$")
    filters = dict.fromkeys(key for key in asked.stdout.split("\0") if key)
    surroundings = {"GIT_WORK_TREE": project, "GIT_CONFIG_COUNT": str(len(filters))}
    for number, key in enumerate(filters):
        value = "false" if key.endswith(".required") else ""
        surroundings |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    done = _run(git, words, _PATIENCE, cwd=project, **surroundings)
    return [path for path in done.stdout.split("\0") if path] if done.returncode == 0 else []


def unused_commits(room: Room, used: Collection[str], *, younger: float = 0.0) -> list[str]:
    """The commits whose tree is not in `used`; none that is younger than so many seconds: somebody may be about to use it."""
    with contextlib.suppress(FileNotFoundError):
        places = [room.inside("commits", name) for name in sorted(os.listdir(room.inside("commits")))]
        return [
            place for place in places if os.path.join(place, "tree") not in used and os.lstat(place).st_ctime <= wall() - younger
        ]
    return []


def prune_commits(room: Room, used: Callable[[], Collection[str]], *, younger: float = 0.0) -> list[str]:
    """Move those to the trash."""
    if not os.path.isdir(room.path):
        return []
    with room.locked(fcntl.LOCK_EX):
        gone = unused_commits(room, used(), younger=younger)
        for place in gone:
            room.discard(place)
        return gone


@dataclass(frozen=True, slots=True)
class _Maker:
    """One commit's directory, half made as long as this runs."""

    place: str
    project: str
    git: str
    common: str
    sha: str
    owner: os.stat_result
    shift: int
    tell: Tell | None

    def run(self) -> None:
        tree, own = os.path.join(self.place, "tree"), os.path.join(self.place, "git")
        for directory in (self.place, tree, own, f"{own}/objects", f"{own}/objects/info", f"{own}/refs", f"{own}/info"):
            os.mkdir(directory, 0o700)
        _write(f"{own}/objects/info/alternates", f"{quoted(os.path.join(self.common, 'objects')).decode('ascii')}\n")
        _write(f"{own}/info/attributes", small_file(os.path.join(self.common, "info/attributes"), 1 << 20) or "")
        _write(f"{own}/HEAD", "ref: refs/heads/none\n")
        _write(f"{own}/config", self._configuration())
        surroundings = {"GIT_INDEX_FILE": f"{self.place}/index", "GIT_WORK_TREE": tree, "GIT_INDEX_VERSION": "2"}
        self._git("read-tree", self.sha, **surroundings)
        self._git("checkout-index", "--all", "--force", **surroundings)
        moment = int(self._git("show", "--no-patch", "--no-show-signature", "--format=%ct", self.sha).strip() or 0)
        shutil.rmtree(own)
        self._make_place_for_git(tree)
        self._finish(tree, moment)

    def _make_place_for_git(self, tree: str) -> None:
        """Where the repository is shown later: a directory to mount on, or the file that says where it lies."""
        pointer = small_file(os.path.join(self.project, ".git"))
        if pointer is None:
            os.mkdir(os.path.join(tree, ".git"), 0o700)
        else:
            _write(os.path.join(tree, ".git"), f"{pointer}\n")

    def _configuration(self) -> str:
        lines = ["[core]", "repositoryformatversion = 1", "bare = false", "logallrefupdates = false", "fsmonitor = false"]
        for name in _CARRIED:
            value = _ask(self.git, "config", "--get", name).stdout.strip()
            if value and value.isalnum():
                section, key = name.split(".")
                lines += [f"[{section}]", f"{key} = {value}"]
        return "\n".join([*lines, ""])

    def _git(self, *words: str, **surroundings: str) -> str:
        done = _run(os.path.join(self.place, "git"), words, None, cwd=os.path.join(self.place, "tree"), **surroundings)
        if done.returncode == 0:
            return done.stdout
        for message in _NO_SPACE:
            if message in done.stderr:
                raise OSError(errno.ENOSPC, message)
        raise StateError(
            "base_ref_incomplete",
            f"the commit {self.sha[:12]} cannot be checked out: {done.stderr.strip().rpartition(chr(10))[2]}",
            hint="its objects may be missing or damaged here (a partial or shallow clone): git fetch, or git fsck",
            detail={"sha": self.sha, "git": " ".join(words)},
        )

    def _finish(self, tree: str, moment: int) -> None:
        """Owners and times of everything, then the index, which has to know them."""
        owners = (self.owner.st_uid + self.shift, self.owner.st_gid + self.shift) if os.geteuid() == 0 else None
        files, paths, waiting = 0, [tree], [tree]
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    paths.append(entry.path)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        files += 1
        for path in paths:
            if owners:
                os.chown(path, *owners, follow_symlinks=False)
            os.utime(path, (moment, moment), follow_symlinks=False)
        os.chmod(tree, stat.S_IMODE(self.owner.st_mode) | stat.S_IRWXU)
        index = os.path.join(self.place, "index")
        with open(index, "rb") as stream:
            content = stream.read()
        with open(index, "wb") as stream:
            stream.write(_known_to_git(content, os.fsencode(tree), self.shift, len(self.sha) // 2))
        head = os.path.join(self.place, "HEAD")
        _write(head, f"{self.sha}\n")
        for path in (index, head):
            os.chmod(path, 0o644)
            if owners:
                os.chown(path, *owners)
        if self.tell:
            self.tell(Progress(files, 0, files, 0))


def _known_to_git(content: bytes, tree: bytes, shift: int, digest: int) -> bytes:
    """The index with the times, numbers and owners that a git inside will find, so that it need not read the files to know that
    they are unchanged. Version 2: a header of 12 bytes, then for each entry ten numbers, the object's name, flags and path."""
    result = bytearray(content)
    magic, version, count = struct.unpack_from(">4sII", result)
    if magic != b"DIRC" or version != 2:
        raise Broken("git_index_unknown", f"git wrote an index of version {version}, where 2 was asked for")
    position = 12
    for _ in range(count):
        name = position + 40 + digest + 2
        end = result.index(b"\0", name)
        mode = struct.unpack_from(">I", result, position + 24)[0]
        if stat.S_IFMT(mode) in (stat.S_IFREG, stat.S_IFLNK):
            found = os.lstat(os.path.join(tree, bytes(result[name:end])))
            times = *divmod(found.st_ctime_ns, 10**9), *divmod(found.st_mtime_ns, 10**9), found.st_dev, found.st_ino
            struct.pack_into(">6I", result, position, *(number & 0xFFFFFFFF for number in times))
            owners = found.st_uid - shift, found.st_gid - shift, found.st_size
            struct.pack_into(">3I", result, position + 28, *(number & 0xFFFFFFFF for number in owners))
        position += (end - position + 8) // 8 * 8
    body = bytes(result[:-digest])
    return body + (hashlib.sha1(body, usedforsecurity=False) if digest == 20 else hashlib.sha256(body)).digest()


def _repository(project: str) -> tuple[str, str]:
    places = git_places(project)
    if places is None:
        raise UsageError(
            "base_ref_without_git",
            f"{project!r} is not the top of a git repository, so it has no commits to start from",
            hint="leave out --base-ref, or name the repository's top directory with --project",
        )
    return places


def _unknown(ref: str) -> NotFound:
    return NotFound(
        "base_ref_unknown",
        f"{ref!r} names no commit of this repository",
        hint="name a branch, a tag or a commit that `git log` shows; what is only on a server has to be fetched first",
        detail={"ref": ref},
    )


def _candidates(git: str, ref: str) -> list[tuple[str, str]]:
    """Everything that the name could mean, with the commit that it leads to."""
    name = ref
    for mark in "~^@":
        name = name.partition(mark)[0]
    asked = [f"refs/{name}", f"refs/tags/{name}", f"refs/heads/{name}", f"refs/remotes/{name}"]
    if not name.strip("0123456789abcdefABCDEF") and len(name) >= 4:
        asked += _ask(git, "rev-parse", f"--disambiguate={name}").stdout.split()
    found = []
    for one in asked:
        done = _ask(git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{one}^{{commit}}")
        if done.returncode == 0:
            found.append((one, done.stdout.strip()))
    return found


def _ask(git: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return _run(git, words, _PATIENCE, cwd="/")


def _run(
    git: str, words: Collection[str], patience: float | None, *, cwd: str, **more: str
) -> "subprocess.CompletedProcess[str]":
    done = run(words, purpose="--base-ref", cwd=cwd, patience=patience, more={"GIT_DIR": git, **more})
    said, complaint = (stream.decode("utf-8", "surrogateescape") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, said, complaint)


def _write(path: str, text: str) -> None:
    with open(path, "wb") as stream:
        stream.write(os.fsencode(text))
