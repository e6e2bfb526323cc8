"""A change, written down whole: what each path was and what it became, so that it can be moved on when its sandbox has changed,
or is gone.

    <directory>/pieces.json     [{"root", "path", "known", "moved", "owner", "before", "after"}]; a side is null or
                                {"about": stat, "target": link's, "file": the name of its content, "size": that content's}
    <directory>/<n>.before, <n>.after     contents; small ones stand in pieces.json itself

pieces.json is written when all contents are on the disk, so that after a power cut whoever finds it can rely on them.
"""

import base64
import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

from elsewhere.changes.model import Place, Side
from elsewhere.errors import Broken
from elsewhere.linux import syscalls
from elsewhere.promotion.pieces import Piece

__all__ = ["freeze", "thawed"]

_FILE = "pieces.json"
_SMALL = 16 << 10
_SINGLY = 8  # so many are synced one by one: beyond that it costs less to sync the file system


def freeze(pieces: Iterable[Piece], directory: str) -> list[Piece]:
    """The same pieces, with contents that lie in the directory, which is made."""
    os.mkdir(directory, 0o700)
    said: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        sides = {name: _kept(getattr(piece, name), directory, f"{number}.{name}") for name in ("before", "after")}
        said.append(
            {"root": piece.root, "path": piece.path, "known": piece.known, "moved": piece.moved, "owner": piece.owner} | sides
        )
    _sync(directory, [side["file"] for one in said for side in (one["before"], one["after"]) if side and side["file"]])
    with open(os.path.join(directory, _FILE), "w", encoding="utf-8") as stream:
        json.dump(said, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return thawed(directory)


def _sync(directory: str, names: Sequence[str]) -> None:
    several = len(names) > _SINGLY
    for name in ("",) if several else names:
        fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            syscalls.syncfs(fd) if several else os.fsync(fd)
        finally:
            os.close(fd)


def _kept(side: Side | None, directory: str, name: str) -> dict[str, Any] | None:
    if side is None:
        return None
    said = {"about": list(side.about[:10]), "target": side.target, "file": None}
    if side.type != "file":
        return said
    with side.open() as source:
        attributes = _attributes(source)
        beginning = source.read(_SMALL + 1)
        if len(beginning) <= _SMALL and not attributes:
            return {**said, "content": base64.b64encode(beginning).decode()}
        with open(os.path.join(directory, name), "xb") as target:
            target.write(beginning)
            shutil.copyfileobj(source, target, 1 << 20)
            for attribute, value in attributes.items():
                os.setxattr(target.fileno(), attribute, value)
            size = target.tell()
    return {**said, "file": name, "size": size}


def _attributes(source: BinaryIO) -> dict[str, bytes]:
    found = {}
    with contextlib.suppress(OSError):  # it is no file, or its file system has none
        for name in os.listxattr(source.fileno()):
            if name.startswith("user.") and not name.startswith("user.overlay."):
                found[name] = os.getxattr(source.fileno(), name)
    return found


def thawed(directory: str) -> list[Piece]:
    try:
        with open(os.path.join(directory, _FILE), encoding="utf-8") as stream:
            said = json.load(stream)
        return [_piece(one, directory) for one in said]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Broken("change_broken", f"what is written about a change in {directory!r} cannot be read: {error}") from error


def _piece(said: dict[str, Any], directory: str) -> Piece:
    owner: Sequence[int] | None = said["owner"]
    return Piece(
        said["root"],
        said["path"],
        _side(said["before"], directory),
        _side(said["after"], directory),
        said["known"],
        said["moved"],
        None if owner is None else (owner[0], owner[1]),
    )


def _side(said: dict[str, Any] | None, directory: str) -> Side | None:
    if said is None:
        return None
    about, name = os.stat_result(said["about"]), said["file"]
    if "content" in said:
        return Side(about, None, None, base64.b64decode(said["content"]))
    if name is None:
        return Side(about, None, said["target"])
    if not stat.S_ISREG(about.st_mode) or "/" in name:
        raise ValueError(f"{name!r} is no content")
    size = os.stat(os.path.join(directory, name)).st_size
    if size != said.get("size", size):
        raise ValueError(f"{name!r} has {size} bytes, and {said['size']} were written")
    return Side(os.stat_result((*about[:6], size, *about[7:10])), Place(directory, name), None)
