"""What somebody asked to see besides the view: shares, private copies and devices, as they are found now.

Not here: who may ask for them, and how they are mounted (`linux/mounts.py`).
"""

import contextlib
import os
import stat

from elsewhere.paths import is_within
from elsewhere.sandbox.confinement import Confinement, Share

__all__ = ["copies", "nodes", "shares", "ways_out"]

_LOOKED_AT = 20_000  # as much of a share as can be searched while somebody waits


def shares(confinement: Confinement) -> list[Share]:
    """Those that can be shown as they were meant: files and directories at the end of a path without links. A socket or a fifo
    would lead to the host."""
    found = []
    for share in confinement.shares:
        about = _about(share.path)
        if about and stat.S_IFMT(about.st_mode) in (stat.S_IFDIR, stat.S_IFREG) and os.path.realpath(share.path) == share.path:
            found.append(share)
    return found


def copies(confinement: Confinement) -> tuple[list[str], list[str]]:
    """Those that can be made: directories, and files, at the end of a path without links."""
    found: dict[int, list[str]] = {stat.S_IFDIR: [], stat.S_IFREG: []}
    for path in confinement.copies:
        about = _about(path)
        if about and stat.S_IFMT(about.st_mode) in found and os.path.realpath(path) == path:
            found[stat.S_IFMT(about.st_mode)].append(path)
    return found[stat.S_IFDIR], found[stat.S_IFREG]


def ways_out(share: str) -> list[str]:
    """Fifos and sockets in a share, which no read-only mount closes; in a very large one, those that are found first."""
    found: list[str] = []
    waiting, looked_at = [share], 0
    while waiting and looked_at < _LOOKED_AT:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                looked_at += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                        found.append(entry.path)
    return found


def nodes(confinement: Confinement) -> list[str]:
    """The nodes that are there; those in it, where a directory was named."""
    found: dict[str, None] = {}
    for path in confinement.devices:
        inner = [os.path.join(directory, name) for directory, _, names in os.walk(path) for name in names]
        for node in (path, *sorted(inner)):
            about = _about(node)
            if about and (stat.S_ISCHR(about.st_mode) or stat.S_ISBLK(about.st_mode)) and is_within(node, "/dev"):
                found[node] = None
    return list(found)


def _about(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None
