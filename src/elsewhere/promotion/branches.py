"""A change on a branch, without a working tree: the pieces become a commit on top of its tip, and the branch moves to it.

    1   the tip is looked at: its tree, as sides
    2   three-way, like any promotion; git knows files, whether they can be executed, and links
    3   blobs, a tree in an index of our own, a commit: objects that nothing leads to yet
    4   what is about to be done is written down by the caller: {"repository", "branch", "old", "new"}
    5   the branch is moved from `old` to `new` in one step                  ◄── from here on it is done

Contents go as they are: no filter, no conversion of line ends. A branch that is checked out in a working tree is refused, since
the files there would seem to be changed back. To take it back is to move the branch from `new` to `old`, if it is still there.

Not here: commits that were made in a sandbox (`commits.py`).
"""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elsewhere.changes import threeway
from elsewhere.changes.model import Side
from elsewhere.changes.patch import is_git
from elsewhere.changes.threeway import Decision
from elsewhere.errors import Conflict, NotFound
from elsewhere.meeting import home_directory
from elsewhere.paths import above
from elsewhere.promotion.applying import Operation
from elsewhere.promotion.choosing import Choices, Chosen, fitting
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.planning import Conflicting, Plan, leads_outside
from elsewhere.promotion.repository import Repository, failed, repository_of
from elsewhere.storage import git
from elsewhere.values import dataclass

__all__ = ["Tip", "commit", "find", "move", "plan", "state", "take_back"]

_FILE, _PROGRAM, _LINK = "100644", "100755", "120000"
_DURABLE = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.fsync", "GIT_CONFIG_VALUE_0": "committed,loose-object"}
_NOBODY = ("elsewhere", "elsewhere@localhost")


class _Entry(NamedTuple):
    mode: str
    sha: str


@dataclass(frozen=True, slots=True)
class Tip:
    """A branch as it was found."""

    repository: Repository
    branch: str
    sha: str
    entries: Mapping[str, _Entry]

    @property
    def ref(self) -> str:
        return f"refs/heads/{self.branch}"


def find(repository: str, branch: str) -> Tip:
    """`repository` is the top directory of one."""
    found = repository_of(repository)
    sha = _tip(found, branch)
    if sha is None:
        raise NotFound(
            "branch_unknown", f"there is no branch {branch!r} in {repository!r}", hint=f"git -C {repository} branch {branch}"
        )
    _refuse_checked_out(found, branch)
    listed = found.run("ls-tree", "-r", "-z", "--full-tree", sha)
    if listed.returncode:
        raise failed("ls-tree", listed.stderr)
    entries = {}
    for line in listed.stdout.split(b"\0"):
        about, tab, path = line.partition(b"\t")
        if tab:
            mode, _, name = about.decode("ascii").split(" ")
            entries[os.fsdecode(path)] = _Entry(mode, name)
    return Tip(found, branch, sha, entries)


def _tip(repository: Repository, branch: str) -> str | None:
    done = repository.run("rev-parse", "--verify", "--quiet", "--end-of-options", f"refs/heads/{branch}^{{commit}}")
    return None if done.returncode else os.fsdecode(done.stdout).strip()


def _refuse_checked_out(repository: Repository, branch: str) -> None:
    where = repository.checked_out().get(f"refs/heads/{branch}")
    if where is not None:
        raise Conflict(
            "branch_checked_out",
            f"the branch {branch!r} is checked out in {where!r}, where its files would seem to be changed back",
            hint="check another branch out there, or name the directory as the stage's target",
            detail={"branch": branch, "worktree": where},
        )


# -- three-way ------------------------------------------------------------------------------------------------------------------


def plan(tip: Tip, pieces: Sequence[Piece], choices: Choices) -> Plan:
    """What is to stand at each path of the branch, what goes before what comes. Pieces outside of the project, directories and
    git's own files are nothing to a branch."""
    made, root = _Maker(tip, choices), tip.repository.project
    for piece in pieces:
        if piece.root != "/" and not is_git(os.path.join(root, piece.path), root):
            made.take(piece)
    made.check_places()
    if choices != Choices():
        made.tell_choices(choices)
    made.plan.operations.sort(key=lambda one: (one.wanted is not None, one.path))
    return made.plan


class _Maker:
    def __init__(self, tip: Tip, choices: Choices) -> None:
        self._tip = tip
        self._root = tip.repository.project
        self._chosen = Chosen(self._root, choices)
        self._disputed: list[str] = []
        self.plan = Plan()

    def take(self, piece: Piece) -> None:
        if any(side is not None and side.type == "other" for side in (piece.before, piece.after)):
            self._follow(piece.path, threeway.conflict("not_a_file"), None, None)
            return
        base, ours = _like_git(piece.before), _like_git(piece.after)
        if base is None and ours is None:
            return
        found = self._tip.entries.get(piece.path)
        theirs, too_large = self._theirs_of(found, base, ours)
        if too_large:
            decision = threeway.conflict("too_large")
        elif piece.known:
            decision = threeway.decide(base, ours, theirs)
        else:
            decision = threeway.decide_without_base(ours, theirs, theirs_changed=True)
        if decision.result == "ours" and leads_outside(piece.path, ours, None):
            decision = threeway.conflict("link_outside")
        self._follow(piece.path, decision, ours, theirs)

    def _follow(self, path: str, decision: Decision, ours: Side | None, theirs: Side | None) -> None:
        result = decision.result
        if result == "conflict":
            self._disputed.append(path)
            choice = self._chosen(path)
            if choice == "theirs":
                self.plan.kept.append(path)
                return
            if choice == "ours" and self._ours_settles(path, decision, ours):
                result = "ours"
        if result == "conflict":
            self._conflict(path, decision)
        elif result in ("same", "theirs"):
            self.plan.same.append(path)
        elif result == "ours":
            self._write(path, theirs, ours)
            self.plan.applied.append(path)
        else:
            mode = stat.S_IFREG | (decision.mode or 0o644)
            self._write(path, theirs, Side(_about(mode), content=decision.content))
            self.plan.merged.append(path)

    def _ours_settles(self, path: str, decision: Decision, ours: Side | None) -> bool:
        if decision.reason == "not_a_file":
            return False
        return self._chosen.exactly(path) or not leads_outside(path, ours, None)

    def _write(self, path: str, expected: Side | None, wanted: Side | None) -> None:
        self.plan.operations.append(Operation(self._root, path, expected, wanted))

    def _conflict(self, path: str, decision: Decision) -> None:
        self.plan.conflicts.append(Conflicting(self._root, path, decision.reason, decision.sentence, decision.content))

    def _theirs_of(self, found: _Entry | None, base: Side | None, ours: Side | None) -> tuple[Side | None, bool]:
        """What the branch has; known by its name, if it is what one of the others has. Whether it is too large to be read."""
        if found is None:
            return None, False
        for side in (ours, base):
            if side is not None and found == _Entry(_git_mode(side), _name_of(side, found.sha)):
                return side, False
        if found.mode not in (_FILE, _PROGRAM, _LINK):
            return Side(_about(stat.S_IFDIR | 0o755)), False  # a submodule: to everybody else a directory
        repository = self._tip.repository
        if int(repository.ask("cat-file", "-s", found.sha)) > threeway.LARGEST:
            return None, True
        done = repository.run("cat-file", "blob", found.sha)
        if done.returncode:
            raise failed("cat-file", done.stderr)
        if found.mode == _LINK:
            return Side(_about(stat.S_IFLNK | 0o777), target=os.fsdecode(done.stdout)), False
        return Side(_about(stat.S_IFREG | (0o755 if found.mode == _PROGRAM else 0o644)), content=done.stdout), False

    def check_places(self) -> None:
        """Nothing can be below a file, nor a file where something else is a directory. Where the branch's was chosen, ours is
        left out, which may be room for another one."""
        while left_out := {path for path in self._misplaced() if self._chosen(path) == "theirs"}:
            self.plan.operations = [one for one in self.plan.operations if one.path not in left_out]
            self.plan.applied = [path for path in self.plan.applied if path not in left_out]
            self.plan.merged = [path for path in self.plan.merged if path not in left_out]
            self.plan.kept += sorted(left_out)
            self._disputed += sorted(left_out)
        for path, reason in self._misplaced().items():
            self._conflict(path, threeway.conflict(reason))

    def _misplaced(self) -> dict[str, str]:
        """What cannot be where it is to be, and why."""
        final = {*self._tip.entries}
        for one in self.plan.operations:
            (final.discard if one.wanted is None else final.add)(one.path)
        directories = {parent for path in final for parent in above(path)}
        found = {}
        for one in [one for one in self.plan.operations if one.wanted is not None]:
            if one.path in directories:
                found[one.path] = "type_changed"
            elif any(parent in final for parent in above(one.path)):
                found[one.path] = "parent_replaced"
        return found

    def tell_choices(self, choices: Choices) -> None:
        """Which of them were about something here."""
        names = dict.fromkeys([*self._disputed, *(one.path for one in self.plan.conflicts)])
        self.plan.disputed = list(names)
        self.plan.fitting = fitting(choices, [(self._root, name) for name in names])


def _like_git(side: Side | None) -> Side | None:
    """As git would know it: no directories, and of a mode only whether it can be executed."""
    if side is None or side.type == "directory":
        return None
    if side.type == "link":
        return side
    mode = stat.S_IFREG | (0o755 if side.mode & 0o100 else 0o644)
    return side._replace(about=os.stat_result((mode, *side.about[1:10])))


def _about(mode: int) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, 0, 0, 0, 0, 0, 0))


def _git_mode(side: Side) -> str:
    if side.type == "link":
        return _LINK
    return _PROGRAM if side.mode & 0o100 else _FILE


def _name_of(side: Side, like: str) -> str:
    """Of a blob with this content, in the kind of names that the repository has."""
    digest = hashlib.sha1(usedforsecurity=False) if len(like) == 40 else hashlib.sha256()
    if side.type == "link":
        content = os.fsencode(side.target or "")
        digest.update(b"blob %d\0" % len(content) + content)
        return digest.hexdigest()
    with side.open() as stream:
        size = side.size if side.content is not None else os.fstat(stream.fileno()).st_size
        digest.update(b"blob %d\0" % size)
        while data := stream.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


# -- the commit -----------------------------------------------------------------------------------------------------------------


def commit(tip: Tip, planned: Plan, message: str, scratch: str | None = None) -> str:
    """The name of a commit on top of the tip that has what was planned; nothing leads to it yet."""
    repository = tip.repository
    parent = scratch if repository.owner is None else None  # where its owner can reach it as well
    with tempfile.TemporaryDirectory(prefix="elsewhere-branch-", dir=parent) as place:
        if repository.owner is not None:
            os.chown(place, *repository.owner)
        blobs = _blobs(repository, planned.operations, place)
        index = {"GIT_INDEX_FILE": os.path.join(place, "index"), **_DURABLE}
        _ask(repository, "read-tree", tip.sha, more=index)
        _ask(repository, "update-index", "-z", "--index-info", source=_index_info(planned.operations, blobs, tip.sha), more=index)
        tree = _ask(repository, "write-tree", more=index)
    author, address = _identity(repository)
    who = {
        f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in (("NAME", author), ("EMAIL", address))
    }
    return _ask(repository, "commit-tree", tree, "-p", tip.sha, source=message.encode(), more={**who, **_DURABLE})


def _blobs(repository: Repository, operations: Sequence[Operation], place: str) -> list[str]:
    """Names of the contents that are to be written, in order; written by one git, from files that its user can read."""
    names = []
    for number, one in enumerate(one for one in operations if one.wanted is not None):
        assert one.wanted is not None
        names.append(os.path.join(place, str(number)))
        with open(names[-1], "xb") as stream:
            if one.wanted.type == "link":
                stream.write(os.fsencode(one.wanted.target or ""))
            else:
                with one.wanted.open() as source:
                    shutil.copyfileobj(source, stream, 1 << 20)
            if repository.owner is not None:
                os.fchown(stream.fileno(), *repository.owner)
    if not names:
        return []
    listed = "".join(f"{name}\n" for name in names).encode()
    return _ask(repository, "hash-object", "-w", "--no-filters", "--stdin-paths", source=listed, more=_DURABLE).split("\n")


def _index_info(operations: Sequence[Operation], blobs: Sequence[str], like: str) -> bytes:
    """In the order of the plan: a directory may take the place of a file, and the other way round."""
    gone = [b"0 %b\t%b\0" % (b"0" * len(like), os.fsencode(one.path)) for one in operations if one.wanted is None]
    wanted = [(one.path, one.wanted) for one in operations if one.wanted is not None]
    come = [
        f"{_git_mode(side)} {name}\t".encode() + os.fsencode(path) + b"\0"
        for (path, side), name in zip(wanted, blobs, strict=True)
    ]
    return b"".join((*gone, *come))


def _identity(repository: Repository) -> tuple[str, str]:
    """Whom the user's own git would name as the author; made up by nobody."""
    chosen = {key: value for key in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL") if (value := os.environ.get(key))}
    settings = ("user.useConfigOnly=true",)
    for configuration in git.user_configurations():
        more = {"HOME": home_directory(), "GIT_DIR": repository.git, "GIT_CONFIG_GLOBAL": configuration, **chosen}
        done = git.run(("var", "GIT_AUTHOR_IDENT"), purpose="a branch", settings=settings, patience=60.0, more=more)
        name, less, rest = done.stdout.decode("utf-8", "surrogateescape").partition(" <")
        if done.returncode == 0 and less and name:
            return name, rest.partition(">")[0]
    return _NOBODY


def _ask(repository: Repository, *words: str, source: bytes | None = None, more: dict[str, str]) -> str:
    done = repository.run(*words, source=source, more=more)
    if done.returncode:
        raise failed(words[0], done.stderr)
    return os.fsdecode(done.stdout).strip()


# -- the branch -----------------------------------------------------------------------------------------------------------------


def move(tip: Tip, new: str, why: str) -> None:
    """In one step, if the branch is still where it was found."""
    _refuse_checked_out(tip.repository, tip.branch)
    _update(tip.repository, tip.branch, new, tip.sha, why)


def state(data: Mapping[str, str]) -> str:
    """`applied`, if the branch is where it was moved to; `moved`, if somebody went on from there; else `reversed`: it is where it
    was before, or somewhere else without us."""
    repository = repository_of(data["repository"])
    now = _tip(repository, data["branch"])
    if now == data["new"]:
        return "applied"
    if now is None or now == data["old"]:
        return "reversed"
    return "reversed" if repository.run("merge-base", "--is-ancestor", data["new"], now).returncode else "moved"


def take_back(data: Mapping[str, str], why: str) -> None:
    """To where it was before, if it is where it was moved to; nothing is done if it is not, and refused, if somebody went on from
    there."""
    if data["new"] == data["old"] or state(data) == "reversed":
        return
    repository = repository_of(data["repository"])
    _refuse_checked_out(repository, data["branch"])
    _update(repository, data["branch"], data["old"], data["new"], why)


def _update(repository: Repository, branch: str, new: str, old: str, why: str) -> None:
    done = repository.run("update-ref", "-m", why, f"refs/heads/{branch}", new, old, more=_DURABLE)
    if done.returncode == 0:
        return
    now = _tip(repository, branch)
    if now == old:
        raise failed("update-ref", done.stderr)
    raise Conflict(
        "branch_moved",
        f"the branch {branch!r} of {repository.project!r} was moved meanwhile, to {(now or 'nowhere')[:12]}; nothing was done",
        hint=f"git -C {repository.project} log {branch}",
        detail={"branch": branch, "expected": old, "found": now},
    )
