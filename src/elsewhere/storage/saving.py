"""Bringing layers out of memory onto a disk that cannot hold overlay's own marks (a state directory on overlay, for one).

Deletions become empty `.wh.NAME` files and opaque directories get a `.wh..wh..opq`, as container images have them.
"""

import os
import shutil
import stat

from elsewhere.storage.copying import copy_attributes, copy_file

__all__ = ["save_layers"]

_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


def save_layers(source: str, target: str) -> None:
    """Replace the layers in `target` by those in `source`."""
    shutil.rmtree(target, ignore_errors=True)
    _save(source, target)


def _save(source: str, target: str) -> None:
    os.mkdir(target, 0o700)
    with os.scandir(source) as entries:
        children = list(entries)
    for entry in children:
        place = os.path.join(target, entry.name)
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
            _touch(os.path.join(target, f".wh.{entry.name}"))
        elif stat.S_ISDIR(found.st_mode):
            _save(entry.path, place)
            if any(_is_set(entry.path, name) for name in _OPAQUE):
                _touch(os.path.join(place, ".wh..wh..opq"))
            copy_attributes(entry.path, place, found)
        elif stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(entry.path), place)
            copy_attributes(entry.path, place, found)
        elif stat.S_ISREG(found.st_mode):
            copy_file(entry.path, place)
            copy_attributes(entry.path, place, found)


def _is_set(path: str, name: str) -> bool:
    try:
        return os.getxattr(path, name, follow_symlinks=False) == b"y"
    except OSError:
        return False


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
