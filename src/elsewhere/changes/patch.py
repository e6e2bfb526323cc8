"""What changed in the project as a patch that `git apply --binary` understands, and in numbers.

Git itself does it, and sees nothing of the sandbox but the names and contents of what changed: they are fed into an empty
repository of our own as two trees, which are then compared. There is no working tree, so no `.gitattributes`, no configuration,
no filter and no driver of anybody takes part, and no content is ever converted.

    <scratch>/patch-…/         removed at the end
        HEAD objects/ refs/    a repository with the refs `before` and `after`

Git knows files, whether they can be executed, and links. What else changed cannot be in a patch, and is told (`left_out`). Git's
own files (`.git`) never are: what a repository holds has other ways to travel.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO

from elsewhere.changes.model import Change, Changes, Side
from elsewhere.errors import Broken, InUse, Refused
from elsewhere.storage.git import quoted, start
from elsewhere.values import dataclass

__all__ = ["FileStat", "LeftOut", "Patch", "is_git", "patch", "stat"]

_CHUNK = 1 << 20
_LARGEST = 512 << 20  # git holds a file in memory when it compares it
_LOOKED_AT = 8000  # bytes in which git looks for a zero, to tell text from anything else
_NO_DRIVER = ("--no-ext-diff", "--no-textconv", "--no-renames", "--no-color")


@dataclass(frozen=True, slots=True)
class LeftOut:
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Patch:
    text: bytes
    left_out: list[LeftOut]


@dataclass(frozen=True, slots=True)
class FileStat:
    """How much of a file changed. Lines are None for what is not text; bytes are None where there was or is nothing."""

    path: str
    kind: str
    lines_added: int | None
    lines_deleted: int | None
    bytes_before: int | None
    bytes_after: int | None

    @property
    def binary(self) -> bool:
        return self.lines_added is None


def is_git(path: str, project: str) -> bool:
    """Whether a path of the project is one of git's own files, of any repository in it."""
    return path.startswith(f"{project}/") and ".git" in path[len(project) + 1 :].split("/")


def patch(changes: Changes) -> Patch:
    """Of what lies in the project, whole; of renamed files, both what goes and what comes."""
    left_out: list[LeftOut] = []
    found = list(_portable(changes, left_out))
    if not found:
        return Patch(b"", left_out)
    with _repository(changes.scratch) as git:
        _feed(git, changes.project, found)
        text = _output(git, "diff-tree", "-p", "--binary", "--full-index", *_NO_DRIVER, "before", "after")
    return Patch(text, left_out)


def stat(changes: Changes) -> list[FileStat]:
    """In the order of paths. Without git, everything is counted in bytes."""
    found = [one for one in changes.entries if _is_inside(one.path, changes.project) and not one.path.endswith("/")]
    found = [one for one in found if not is_git(one.path, changes.project)]
    lines = _lines(changes, [one for one in found if one.source is None])
    return [_stat(one, lines.get(os.fsencode(one.path[len(changes.project.rstrip("/")) + 1 :]))) for one in found]


def _stat(one: Change, lines: tuple[int, int] | None) -> FileStat:
    if one.source is not None and one.after is not None:
        lines = (0, 0) if _is_text(one.after) else None
    added, deleted = lines or (None, None)
    before = None if one.before is None else one.before.size
    return FileStat(one.path, one.kind, added, deleted, before, None if one.after is None else one.after.size)


def _lines(changes: Changes, found: list[Change]) -> dict[bytes, tuple[int, int]]:
    """How many lines were added and deleted, by path; what is no text is missing."""
    countable = [one for one in found if _git_takes(one.path, changes.project) and _is_countable(one)]
    lines: dict[bytes, tuple[int, int]] = {}
    if not countable or shutil.which("git") is None:
        return lines
    with _repository(changes.scratch) as git:
        _feed(git, changes.project, countable)
        said = _output(git, "diff-tree", "-r", "-z", "--numstat", *_NO_DRIVER, "before", "after")
    for line in said.split(b"\0"):
        added, _, rest = line.partition(b"\t")
        deleted, _, name = rest.partition(b"\t")
        if added.isdigit() and deleted.isdigit():
            lines[name] = (int(added), int(deleted))
    return lines


def _is_countable(one: Change) -> bool:
    sides = [side for side in (one.before, one.after) if side is not None]
    return all(side.type in ("file", "link") and side.size <= _LARGEST and _is_readable(side) for side in sides)


def _is_readable(side: Side) -> bool:
    if side.type != "file":
        return True
    try:
        side.open().close()
    except OSError:
        return False
    return True


def _is_text(side: Side) -> bool:
    try:
        with side.open() as stream:
            return b"\0" not in stream.read(_LOOKED_AT)
    except OSError:
        return False


# -- what git can carry ---------------------------------------------------------------------------------------------------------


def _portable(changes: Changes, left_out: list[LeftOut]) -> Iterator[Change]:
    for one in changes.entries:
        if not _is_inside(one.path, changes.project) or is_git(one.path, changes.project):
            continue
        why = _why_not(one, changes.project)
        if why:
            left_out.append(LeftOut(one.path, why))
        if not why or why == _HALF:
            yield one


_HALF = "git knows of its mode only whether it can be executed"


def _why_not(one: Change, project: str) -> str:
    sides = [side for side in (one.before, one.after) if side is not None]
    if one.path.endswith("/"):
        return "git knows neither empty directories nor modes of directories"
    if any(side.type not in ("file", "link") for side in sides):
        return "git knows only files and links"
    if not _git_takes(one.path, project):
        return "git takes no such name"
    if "mode" in one.what and len({side.mode & 0o100 for side in sides}) == 1:
        return _HALF
    return ""


def _git_takes(path: str, project: str) -> bool:
    """Git refuses names that are its own, also on file systems that it is not on."""
    parts = _relative(path, project).split("/")
    return not any(part.lower().partition(":")[0].rstrip(" .") in (".git", "git~1") for part in parts)


def _is_inside(path: str, project: str) -> bool:
    return path.startswith(f"{project.rstrip('/')}/")


def _relative(path: str, project: str) -> str:
    return path[len(project.rstrip("/")) + 1 :]


# -- git ------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _repository(scratch: str | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="patch-", dir=scratch) as place:
        for name in ("objects", "refs"):
            os.mkdir(os.path.join(place, name), 0o700)
        with open(os.path.join(place, "HEAD"), "w", encoding="ascii") as stream:
            stream.write("ref: refs/heads/none\n")
        yield place


def _feed(git: str, project: str, found: Iterable[Change]) -> None:
    """Both trees, as far as anything changed in them. Contents go by their length: no name or content can say anything else."""
    found = list(found)
    with tempfile.TemporaryFile() as complaints:
        process = _start(git, "fast-import", "--quiet", "--done", stdin=subprocess.PIPE, stderr=complaints)
        assert process.stdin is not None
        try:
            with process.stdin as stream:
                for ref in ("before", "after"):
                    stream.write(b"commit refs/heads/%b\ncommitter a <> 0 +0000\ndata 0\n" % ref.encode())
                    for one in found:
                        side: Side | None = getattr(one, ref)
                        path = one.source if ref == "before" and one.source is not None else one.path
                        if side is not None:
                            _write(stream, one.path, quoted(_relative(path, project)), side)
                    stream.write(b"\n")
                stream.write(b"done\n")
        except BrokenPipeError:
            pass  # it says why below
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
        if code:
            complaints.seek(0)
            raise _failed("fast-import", complaints.read(2000))


def _write(stream: IO[bytes], path: str, name: bytes, side: Side) -> None:
    if side.type == "link":
        target = os.fsencode(side.target or "")
        stream.write(b"M 120000 inline %b\ndata %d\n%b\n" % (name, len(target), target))
        return
    try:
        source = side.open()
    except OSError as error:
        raise Refused(
            "unreadable_change",
            f"{path!r} cannot be read: {error.strerror}",
            hint="open it inside (chmod u+r), or name the paths that the patch is to have",
            detail={"path": path},
        ) from error
    with source:
        size = side.size if side.content is not None else os.fstat(source.fileno()).st_size
        if size > _LARGEST:
            raise Refused(
                "too_large_for_patch",
                f"{path!r} has {size} bytes, and a patch takes files of up to {_LARGEST}",
                hint="name the paths that the patch is to have; elsewhere cp copies large files",
                detail={"path": path, "bytes": size},
            )
        stream.write(b"M %b inline %b\ndata %d\n" % (b"100755" if side.mode & 0o100 else b"100644", name, size))
        while size:
            piece = source.read(min(size, _CHUNK))
            if not piece:
                raise InUse(
                    "read_meanwhile",
                    f"{path!r} became shorter while it was read",
                    hint="stop the sandbox, or wait until nothing writes in it",
                    detail={"path": path},
                )
            stream.write(piece)
            size -= len(piece)
        stream.write(b"\n")


def _output(git: str, *words: str) -> bytes:
    process = _start(git, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said, complaint = process.communicate()
    if process.returncode:
        raise _failed(words[0], complaint)
    return said


def _start(git: str, *words: str, **descriptors: object) -> "subprocess.Popen[bytes]":
    settings = (
        "core.bare=true",
        "core.attributesFile=/dev/null",
        "core.compression=0",
        "core.fsync=none",
        "core.quotePath=true",
        "fastimport.unpackLimit=0",
    )
    return start(words, purpose="a patch", cwd=git, settings=settings, more={"GIT_DIR": git}, **descriptors)


def _failed(what: str, complaint: bytes) -> Broken:
    said = complaint.decode("utf-8", "replace").strip()
    return Broken("git_failed", f"git {what} failed: {said}", hint="git fsck and free space are worth a look")
