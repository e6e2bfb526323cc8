"""What HEAD of a repository is, and what is staged in it, from the files themselves: a sandbox may have written them, and git is
never run in what a sandbox wrote. So nothing here is believed: files are bounded, and what cannot be read whole has no answer.

What is staged is told as one value that is equal for equal entries: paths, modes, objects, stages and flags, but not what git
notes of the files on disk, which changes with every `git status`.

Not here: what becomes of an index (`operations/refreshing.py`).
"""

import hashlib
import struct
from collections.abc import Iterator

from elsewhere.changes.model import Side
from elsewhere.changes.sides import Sides
from elsewhere.errors import Unavailable
from elsewhere.storage import checkouts, git

__all__ = ["head_of", "staged_in", "staged_of_commit"]

_LARGEST = 128 << 20
_LARGEST_NAMES = 512 << 20  # written out, they may be many times what is on disk
_LARGEST_REFERENCE = 4096
_LARGEST_LIST = 64 << 20
_PATIENCE = 30.0
_ELSEWHERE = "refs/heads/.invalid"  # what HEAD says when references are kept as tables
_EXTENDED, _KEPT, _KEPT_EXTENDED = 0x4000, 0xB000, 0x6000  # bits of an entry's flags


def head_of(sides: Sides, repository: str) -> str:
    """What HEAD leads to: a commit, a branch without one, or, with references kept as tables, which tables these are."""
    text = _text(sides(f"{repository}/HEAD"), _LARGEST_REFERENCE)
    for _ in range(5):
        if not text.startswith("ref:"):
            break
        name = text[len("ref:") :].strip()
        if name == _ELSEWHERE:
            return _text(sides(f"{repository}/reftable/tables.list"), _LARGEST_LIST)
        if not name.startswith("refs/") or {"", ".", ".."} & set(name.split("/")) or "\0" in name:
            break
        found = _text(sides(f"{repository}/{name}"), _LARGEST_REFERENCE) or _packed(sides, repository, name)
        if not found:
            break
        text = found
    return text


def staged_in(index: Side | None, head: str) -> bytes | None:
    """Of an index; one that is not there holds nothing. None: nobody can tell. `head` tells how long names of objects are."""
    content = b"" if index is None else _content(index, _LARGEST)
    if content is None:
        return None
    digest = 32 if len(head) == 64 else 20
    found = hashlib.sha256()
    try:
        for entry in _entries(content, digest) if content else ():
            found.update(entry)
    except (ValueError, IndexError, struct.error):
        return None
    return found.digest()


def staged_of_commit(project: str, commit: str) -> bytes | None:
    """Of an index as it is when a commit of the project was just checked out; None: there is no such commit."""
    places = checkouts.git_places(project)
    if places is None or len(commit) not in (40, 64) or commit.strip("0123456789abcdef"):
        return None
    words = ("ls-tree", "-r", "-z", "--full-tree", "--end-of-options", commit)
    try:
        done = git.run(words, purpose="refresh", patience=_PATIENCE, more={"GIT_DIR": places[0]})
    except Unavailable:
        return None
    if done.returncode != 0:
        return None
    found = hashlib.sha256()
    for line in done.stdout.split(b"\0")[:-1]:
        about, _, path = line.partition(b"\t")
        mode, _, name = about.split(b" ")
        found.update(_entry(int(mode, 8), bytes.fromhex(name.decode("ascii")), 0, 0, path))
    return found.digest()


def _entry(mode: int, name: bytes, flags: int, extended: int, path: bytes) -> bytes:
    return struct.pack(">IHHI", mode, flags, extended, len(path)) + name + path


def _entries(content: bytes, digest: int) -> Iterator[bytes]:
    """Version 2 has for each entry ten numbers, the object's name, flags and path, and is padded; version 3 may have more flags;
    version 4 tells a path by how much of the last one is cut off and what is put there, and is not padded."""
    magic, version, count = struct.unpack_from(">4sII", content)
    if magic != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("no index, or of another version")
    end_of_all = len(content) - digest
    position, path, names = 12, b"", 0
    for _ in range(count):
        mode = struct.unpack_from(">I", content, position + 24)[0]
        name = content[position + 40 : position + 40 + digest]
        flags = struct.unpack_from(">H", content, position + 40 + digest)[0]
        at, extended = position + 42 + digest, 0
        if flags & _EXTENDED:
            extended = struct.unpack_from(">H", content, at)[0]
            at += 2
        kept = b""
        if version == 4:
            cut, at = _number(content, at)
            if cut > len(path):
                raise ValueError("more is cut off than there is")
            kept = path[: len(path) - cut]
        end = content.index(b"\0", at, end_of_all)
        path = kept + content[at:end]
        names += len(path)
        if names > _LARGEST_NAMES:
            raise ValueError("too much")
        position = end + 1 if version == 4 else position + (end - position + 8) // 8 * 8
        yield _entry(mode, name, flags & _KEPT, extended & _KEPT_EXTENDED, path)
    _check_extensions(content, position, end_of_all)


def _check_extensions(content: bytes, position: int, end: int) -> None:
    """Those with a small first letter must be understood: of them only the one that says that entries may be directories is."""
    while position < end:
        name, size = struct.unpack_from(">4sI", content, position)
        if not name[:1].isupper() and name != b"sdir":
            raise ValueError("an extension that says where other entries are, or worse")
        position += 8 + size
    if position != end:
        raise ValueError("it is cut off")


def _number(content: bytes, at: int) -> tuple[int, int]:
    """And where what follows it begins. Nothing that fits a path needs more than five bytes."""
    value = content[at] & 127
    for following in range(at + 1, at + 6):
        if not content[following - 1] & 128:
            return value, following
        value = ((value + 1) << 7) + (content[following] & 127)
    raise ValueError("too large a number")


def _packed(sides: Sides, repository: str, name: str) -> str:
    for line in _text(sides(f"{repository}/packed-refs"), _LARGEST_LIST).split("\n"):
        words = line.split(" ")
        if len(words) == 2 and words[1] == name:
            return words[0]
    return ""


def _text(side: Side | None, largest: int) -> str:
    content = None if side is None else _content(side, largest)
    return "" if content is None else content.decode("utf-8", "surrogateescape").strip()


def _content(side: Side, largest: int) -> bytes | None:
    """None: it is no file, or larger than that."""
    try:
        with side.open() as stream:
            content = stream.read(largest + 1)
    except OSError:
        return None
    return content if len(content) <= largest else None
