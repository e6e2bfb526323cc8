"""Commits that were made in a sandbox, on their way to a branch of reality's repository.

    inside     `inside_script` is run there: it says which branches have commits that reality had not, and writes a bundle of them
    between    `read_answer`: nothing that comes out of a sandbox is believed; names, lengths and forms are checked
    outside    `look` tells what the bundle holds, `fetch` makes a branch of it; both check it first (`quarantine.py`)

No `git fetch` runs on reality, so that no hook, helper, transport, rewriting of addresses, tag, FETCH_HEAD, submodule or gc has a
part in it. What passed the checks is handed to reality's directory of objects as one pack, and a single change of one ref makes
it count; whatever fails before leaves reality's refs as they were. HEAD, index, working tree and stash are not touched.

Commits that name a commit of a submodule travel; the submodule's own commits do not (`Commits.submodules` lists what changed).
Pointers of LFS are files like any other; the objects that they stand for stay in the sandbox (`Commits.lfs` lists the pointers).

Not here: running something in a sandbox; HEAD and index (`heads.py`). An undo leaves the branch where it is.
"""

from collections.abc import Mapping

from elsewhere.errors import Conflict, Refused, UsageError
from elsewhere.promotion.quarantine import Room, quarantine
from elsewhere.promotion.repository import Repository, failed, is_name, is_sha, repository_of, words_of
from elsewhere.values import dataclass

__all__ = [
    "LARGEST",
    "Answer",
    "Commits",
    "Fetched",
    "Submodule",
    "default_branch",
    "fetch",
    "foresee",
    "inside_script",
    "known",
    "look",
    "read_answer",
]

LARGEST = 1 << 30  # of a bundle
_LONGEST_ANSWER = 1 << 20
_MOST_KNOWN = 1000  # commits that fit into an argument list, whatever their form
_MOST_SUBJECTS = 20
_LONGEST_SUBJECT = 200
_HEADS = "refs/heads/"
_GREETING = "elsewhere-commits 1"
_NOTHING = ("none", "none no-git", "none no-repository")

_SCRIPT = r"""
set -f
bundle=$1
shift
known=$*
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_NAMESPACE
export LC_ALL=C GIT_NO_REPLACE_OBJECTS=1 GIT_OPTIONAL_LOCKS=0 GIT_TERMINAL_PROMPT=0 GIT_CEILING_DIRECTORIES="${PWD%/*}"
quiet() { git --no-pager -c 'safe.directory=*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c gc.auto=0 "$@"; }
made() { [ -n "$(quiet rev-list --ignore-missing --max-count=1 "$1" --not $known)" ]; }
echo 'elsewhere-commits 1'
rm -f -- "$bundle"
command -v git >/dev/null || { echo 'none no-git'; echo end; exit 0; }
quiet rev-parse --git-dir >/dev/null 2>&1 || { echo 'none no-repository'; echo end; exit 0; }
head=$(quiet rev-parse --verify --quiet 'HEAD^{commit}') || head=unborn
branch=$(quiet symbolic-ref --quiet HEAD) || branch=detached
echo "HEAD $branch $head"
refs=
if [ "$head" != unborn ] && made "$head"; then
    echo "ref HEAD $head"
    refs=HEAD
fi
while read -r sha kind name; do
    [ "$kind" = commit ] || continue
    case " $known " in *" $sha "*) continue ;; esac
    made "$sha" || continue
    echo "ref $name $sha"
    refs="$refs $name"
done <<LIST
$(quiet for-each-ref --format='%(objectname) %(objecttype) %(refname)' refs/heads)
LIST
if [ -z "$refs" ]; then
    echo none
elif quiet bundle create --quiet "$bundle" --ignore-missing $refs --not $known >/dev/null; then
    echo bundle
else
    echo failed
fi
echo end
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a sandbox says of its repository. `refs` are those with commits that were made inside (`HEAD`, `refs/heads/…`) and
    what they point to; `branch` is the one that HEAD is on, None if it is detached; `why` says why there is no repository."""

    head: str | None
    branch: str | None
    refs: dict[str, str]
    why: str = ""

    @property
    def made(self) -> bool:
        return bool(self.refs)

    @property
    def ref(self) -> str:
        """What travels unless something else is named: HEAD, if commits were made on it, or the first branch that has some."""
        return "HEAD" if "HEAD" in self.refs else min(self.refs)


@dataclass(frozen=True, slots=True)
class Submodule:
    """One that the commits name another commit of. None: it was not there."""

    path: str
    old: str | None
    new: str


@dataclass(frozen=True, slots=True)
class Commits:
    """`ref` is what was looked at, `branch` its name inside (None: detached), `count` how many commits no ref of reality leads to
    yet, `subjects` the first lines of the newest ones, `others` further branches with commits that were made inside and are not
    among these."""

    ref: str
    head: str
    branch: str | None
    count: int
    subjects: list[str]
    others: dict[str, str]
    submodules: list[Submodule]
    lfs: list[str]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The branch (without `refs/heads/`), what it was, and what it is; no ref of reality led to `count` of its commits."""

    branch: str
    old: str | None
    new: str
    count: int


# -- inside ---------------------------------------------------------------------------------------------------------------------


def known(project: str) -> dict[str, str]:
    """Reality's branches, for `inside_script`: what they lead to need not travel."""
    return repository_of(project).refs(_HEADS)


def inside_script(base_head: str | None, bundle_path: str, refs: Mapping[str, str] | None = None) -> list[str]:
    """The command to run in the project's directory inside. The bundle has exactly the commits that neither `base_head` nor
    one of `refs` leads to; the sandbox need not have all of those."""
    shas = [sha for sha in (base_head, *sorted((refs or {}).values())) if sha is not None]
    for sha in shas:
        if not is_sha(sha):
            raise UsageError("bad_commit", f"{sha!r} is no full name of a commit", hint="git rev-parse tells it")
    return ["/bin/sh", "-c", _SCRIPT, "elsewhere-commits", bundle_path, *list(dict.fromkeys(shas))[:_MOST_KNOWN]]


def read_answer(said: bytes) -> Answer:
    """What the script printed. Whoever is inside can print anything."""
    if len(said) > _LONGEST_ANSWER:
        raise _bad_answer(f"{len(said)} bytes, where {_LONGEST_ANSWER} are the most")
    try:
        lines = said.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise _bad_answer("it is no text; names of branches have to be UTF-8") from None
    if lines[0] != _GREETING or lines[-2:] != ["end", ""]:
        raise _bad_answer("it does not begin and end as it should")
    body = lines[1:-2]
    if len(body) == 1 and body[0] in _NOTHING:
        return Answer(None, None, {}, body[0].partition(" ")[2])
    if len(body) < 2 or body[-1] not in ("none", "bundle"):
        raise _bad_answer("git could not write the bundle" if body[-1:] == ["failed"] else "it is not whole")
    head, branch = _head(body[0])
    refs = dict(_ref(line) for line in body[1:-1])
    if len(refs) != len(body) - 2 or bool(refs) != (body[-1] == "bundle") or refs.get("HEAD", head) != head:
        raise _bad_answer("it contradicts itself")
    return Answer(head, branch, refs)


def _head(line: str) -> tuple[str | None, str | None]:
    words = line.split(" ")
    if len(words) != 3 or words[0] != "HEAD" or not (words[2] == "unborn" or is_sha(words[2])):
        raise _bad_answer(f"{line[:100]!r} tells nothing about HEAD")
    head = None if words[2] == "unborn" else words[2]
    if words[1] == "detached":
        return head, None
    if not words[1].startswith("refs/") or not is_name(words[1]):
        raise _bad_answer(f"{words[1][:100]!r} is no ref")
    return head, words[1].removeprefix(_HEADS)


def _ref(line: str) -> tuple[str, str]:
    words = line.split(" ")
    if len(words) != 3 or words[0] != "ref" or not is_sha(words[2]) or not _is_ref(words[1]):
        raise _bad_answer(f"{line[:100]!r} tells nothing about a branch")
    return words[1], words[2]


def _is_ref(name: str) -> bool:
    return name == "HEAD" or (name.startswith(_HEADS) and is_name(name.removeprefix(_HEADS)))


def _bad_answer(why: str) -> Refused:
    return Refused(
        "bad_answer",
        f"the sandbox did not say properly which commits it has: {why}",
        hint="look at its repository with: elsewhere shell ID; or promote the files without the commits",
    )


# -- outside --------------------------------------------------------------------------------------------------------------------


def default_branch(sandbox: str) -> str:
    return f"elsewhere/{sandbox}"


def look(
    project: str,
    bundle: str,
    answer: Answer,
    base_head: str | None = None,
    *,
    ref: str | None = None,
    largest: int = LARGEST,
) -> Commits:
    """What would come, checked in the same way as when it comes. Nothing is written to reality's repository. What changed in
    submodules and pointers is told against `base_head`, or against nothing if reality has it no more."""
    name, head = _asked(answer, ref)
    with quarantine(repository_of(project), bundle, answer.refs, largest) as room:
        changed = list(room.changed(base_head, head))
        return Commits(
            name,
            head,
            answer.branch if name == "HEAD" else name.removeprefix(_HEADS),
            room.count(head),
            [words_of(line, 1)[:_LONGEST_SUBJECT] for line in room.subjects(head, _MOST_SUBJECTS)],
            {other: sha for other, sha in answer.refs.items() if not room.leads_to(sha, head)},
            [Submodule(one.path, one.old_commit, one.new) for one in changed if one.is_submodule],
            room.pointers(changed),
        )


def fetch(
    project: str,
    bundle: str,
    answer: Answer,
    branch: str,
    *,
    ref: str | None = None,
    largest: int = LARGEST,
) -> Fetched:
    """Make the branch, or move it forward. Either it is there afterwards, with everything that it leads to, or no ref changed."""
    _refuse_bad(branch)
    repository = repository_of(project)
    _, new = _asked(answer, ref)
    with quarantine(repository, bundle, answer.refs, largest) as room:
        old = _movable(repository, room, branch, new)
        if old == new:
            return Fetched(branch, old, new, 0)
        count = room.count(new)
        if count:
            room.hand_over()
        _set(repository, branch, old, new)
    return Fetched(branch, old, new, count)


def foresee(project: str, bundle: str, answer: Answer, branches: Mapping[str, str], *, largest: int = LARGEST) -> None:
    """Refuse what `fetch` would refuse; `branches` by the refs that would go into them."""
    for branch in branches.values():
        _refuse_bad(branch)
    repository = repository_of(project)
    with quarantine(repository, bundle, answer.refs, largest) as room:
        for ref, branch in branches.items():
            _movable(repository, room, branch, _asked(answer, ref)[1])


def _refuse_bad(branch: str) -> None:
    if not is_name(branch) or branch.startswith("refs/"):  # git would take it, and everybody would read something else in it
        hint = f"leave out {_HEADS}" if branch.startswith(_HEADS) else "git help check-ref-format tells which are"
        raise UsageError("bad_branch", f"{branch!r} is no name for a branch", hint=hint)


def _movable(repository: Repository, room: Room, branch: str, new: str) -> str | None:
    """What the branch is now; refused if it cannot be made, or moved to `new`."""
    old = _found(repository, branch)
    if old == new:
        return old
    tree = repository.checked_out().get(_HEADS + branch)
    if tree is not None:
        raise Conflict(
            "branch_checked_out",
            f"the branch {branch!r} is checked out at {tree!r}, so that it cannot be moved",
            hint="name another one with --branch, or switch to another branch there",
            detail={"branch": branch, "worktree": tree},
        )
    if old is not None and not room.leads_to(old, new):
        raise _exists(branch, f"there is a branch {branch!r} with commits that the sandbox does not have")
    return old


def _asked(answer: Answer, ref: str | None) -> tuple[str, str]:
    if not answer.made:
        raise UsageError("no_commits", "no commits were made in the sandbox", hint="promote the files without the commits")
    name = answer.ref if ref is None else ref
    if name not in answer.refs:
        raise UsageError(
            "no_commits",
            f"no commits were made on {name!r} in the sandbox",
            hint=f"it has some on {', '.join(sorted(answer.refs))}",
            detail={"refs": sorted(answer.refs)},
        )
    return name, answer.refs[name]


def _found(repository: Repository, branch: str) -> str | None:
    """What the branch is now; refused if there cannot be one of that name."""
    refs, full = repository.refs(_HEADS), _HEADS + branch
    for name in refs:
        if full.startswith(f"{name}/") or name.startswith(f"{full}/"):
            raise _exists(branch, f"the branch {name.removeprefix(_HEADS)!r} leaves no place for one named {branch!r}")
    if repository.run("symbolic-ref", "--quiet", full).returncode == 0:
        raise _exists(branch, f"the branch {branch!r} only stands for another one")
    return refs.get(full)


def _set(repository: Repository, branch: str, old: str | None, new: str) -> None:
    order = f"create {_HEADS}{branch} {new}\n" if old is None else f"update {_HEADS}{branch} {new} {old}\n"
    done = repository.run("update-ref", "--no-deref", "-m", "elsewhere: promote", "--stdin", source=order.encode())
    if done.returncode == 0:
        return
    if repository.refs(_HEADS).get(_HEADS + branch) != old:
        raise _exists(branch, f"the branch {branch!r} was changed meanwhile")
    raise failed("update-ref", done.stderr)


def _exists(branch: str, message: str) -> Conflict:
    return Conflict(
        "branch_exists", message, hint="name another one with --branch, or delete that one first", detail={"branch": branch}
    )
