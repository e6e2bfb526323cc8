"""What an application keeps for its undo, seen as pieces."""

import contextlib
import hashlib
import os
import stat
from typing import BinaryIO

from elsewhere.changes.model import Place, Side
from elsewhere.promotion import journal, shelves
from elsewhere.promotion.journal import About, Entry, Journal
from elsewhere.promotion.pieces import Piece
from elsewhere.promotion.working import put_of

__all__ = ["pieces"]


def pieces(directory: str) -> list[Piece]:
    """For an undo: `before` is what was put there, `after` what was found there. Of a new file whose content is not kept it is
    told whether it changed since."""
    if journal.word_in(directory) not in ("committed", "applied"):
        return []
    steps: dict[tuple[str, str], list[Entry]] = {}
    for entry in Journal(directory, -1).entries()[0]:
        steps.setdefault((entry.root, entry.path), []).append(entry)
    return [_piece(directory, steps[where]) for where in sorted(steps)]


def _piece(directory: str, steps: list[Entry]) -> Piece:
    first, last = steps[0], steps[-1]
    owner = None if first.found is None else (first.found.uid, first.found.gid)
    after = _kept(directory, first)
    if last.put is None:
        return Piece(last.root, last.path, None, after, owner=owner)
    if last.kind == "mode" and stat.S_ISREG(last.put.mode):
        return Piece(last.root, last.path, _standing(last, last.put), after, owner=owner)
    before = Side(last.put.stat_result(), _copied(directory, last), last.put.target)
    if not stat.S_ISREG(last.put.mode) or before.place is not None:
        return Piece(last.root, last.path, before, after, owner=owner)
    return Piece(last.root, last.path, before, after, known=False, moved=_moved(last), owner=owner)


def _kept(directory: str, entry: Entry) -> Side | None:
    """What was found at the path, as it lies in the journal now, with the mode and owner that it had in reality."""
    if entry.found is None:
        return None
    if entry.kind == "mode":
        return _standing(entry, entry.found)
    place = os.path.join(directory, f"old-{entry.shelf}")
    name = next((one for one in (entry.name, f"{entry.name}.old") if os.path.lexists(os.path.join(place, one))), entry.name)
    found = entry.found
    if stat.S_ISREG(found.mode):
        with contextlib.suppress(FileNotFoundError):
            found = found._replace(size=os.lstat(os.path.join(place, name)).st_size)
    return Side(found.stat_result(), Place(place, name), found.target)


def _standing(entry: Entry, about: About) -> Side:
    """Of what was given another mode and nothing else, the content is reality's own, whatever it is by now."""
    place = Place(entry.root, entry.path)
    if stat.S_ISREG(about.mode):
        with contextlib.suppress(OSError), place.open() as stream:
            about = about._replace(size=os.fstat(stream.fileno()).st_size)
    return Side(about.stat_result(), place)


def _copied(directory: str, entry: Entry) -> Place | None:
    """The copy counts only if it is whole: it was not worth a sync of its own."""
    if not entry.copy:
        return None
    top = os.path.dirname(directory) if entry.copy.startswith("../") else directory
    place = Place(top, entry.copy.removeprefix("../"))
    try:
        with place.open() as stream:
            return place if _digest(stream) == entry.digest else None
    except OSError:
        return None


def _digest(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while piece := stream.read(shelves.LARGEST_TEXT):
        digest.update(piece)
    return digest.hexdigest()


def _moved(entry: Entry) -> bool:
    """Whether somebody changed a new file of which only the digest is known."""
    put = put_of(entry)
    try:
        with Place(entry.root, entry.path).open() as stream:
            here = os.fstat(stream.fileno())
            return (here.st_mode, here.st_size) != (put.mode, put.size) or _digest(stream) != entry.digest
    except OSError:
        return True
