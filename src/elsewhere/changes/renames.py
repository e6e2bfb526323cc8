"""Which files were only moved: what was deleted in one place and added in another with the very same content.

Only files of the same size are read, and not more of them than is worth it; what is not found out stays deleted and added. Empty
files are all the same, and never count as moved.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable

from elsewhere.changes.model import Change, Changes, Side

__all__ = ["with_renames"]

_CHUNK = 1 << 20
_MOST_BYTES = 256 << 20  # that are read to find out
_MOST_FILES = 20_000


def with_renames(found: Changes) -> Changes:
    """The same, with what was moved told as such. A path is in one list only."""
    pairs = _pairs(found)
    if not pairs:
        return found
    moved = {id(one) for pair in pairs for one in pair}
    left = [one for one in found.entries if id(one) not in moved]
    result = Changes(directories=found.directories, project=found.project, scratch=found.scratch)
    for one in left:
        result.add(one)
    for old, new in pairs:
        result.add(Change(new.path, "renamed", old.before, new.after, old.path, same_content=True))
    result.sort()
    return result


def _pairs(found: Changes) -> list[tuple[Change, Change]]:
    gone = _by_size((one, one.before) for one in found.entries if one.kind == "deleted")
    come = _by_size((one, one.after) for one in found.entries if one.kind == "added")
    pairs = []
    budget = _MOST_BYTES
    files = _MOST_FILES
    for size in sorted(gone.keys() & come.keys()):
        old, new = gone[size], come[size]
        budget -= size * (len(old) + len(new))
        files -= len(old) + len(new)
        if budget < 0 or files < 0:
            break
        pairs += _matches(old, new)
    return pairs


def _by_size(sides: Iterable[tuple[Change, Side | None]]) -> dict[int, list[tuple[Change, Side]]]:
    found: dict[int, list[tuple[Change, Side]]] = defaultdict(list)
    for one, side in sides:
        if side is not None and side.type == "file" and side.size:
            found[side.size].append((one, side))
    return found


def _matches(old: list[tuple[Change, Side]], new: list[tuple[Change, Side]]) -> list[tuple[Change, Change]]:
    """Each with one of the same content, of the same name if there is one."""
    waiting: dict[bytes, list[Change]] = defaultdict(list)
    for one, side in old:
        digest = _digest(side)
        if digest is not None:
            waiting[digest].append(one)
    pairs = []
    for one, side in new if waiting else ():
        digest = _digest(side)
        candidates = waiting.get(digest) if digest is not None else None
        if candidates:
            name = one.path.rpartition("/")[2]
            best = next((other for other in candidates if other.path.rpartition("/")[2] == name), candidates[0])
            candidates.remove(best)
            pairs.append((best, one))
    return pairs


def _digest(side: Side) -> bytes | None:
    digest = hashlib.blake2b(digest_size=20)
    try:
        with side.open() as stream:
            while piece := stream.read(_CHUNK):
                digest.update(piece)
    except OSError:
        return None
    return digest.digest()
