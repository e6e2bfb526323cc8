"""Directories that were renamed in the layers of an overlay: overlay marks each with where it came from."""

import contextlib
import os

from elsewhere.storage.encodings import TRUSTED
from elsewhere.storage.stacks import Stack
from elsewhere.storage.trees import open_beneath

__all__ = ["moves"]

_ATTRIBUTE = "trusted.overlay.redirect"


def moves(*layers: str) -> list[tuple[str, str]]:
    """Where each renamed directory is now and where it was in what lies below the layers (newest first), both relative to the
    overlay."""
    found: list[tuple[str, str]] = []
    if not any(_has_any(layer) for layer in layers):
        return found
    with contextlib.ExitStack() as stack:
        waiting = [Stack(layers, TRUSTED, stack).root()]
        while waiting:
            with waiting.pop() as folder:
                for name in folder.directories():
                    inner = folder.folder(name)
                    waiting.append(inner)
                    if inner.below is not None and inner.below != folder.beneath(name):
                        found.append((inner.path, inner.below))
    return found


def _has_any(layer: str) -> bool:
    """Without a look at the files."""
    top = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        waiting = ["."]
        while waiting:
            here = waiting.pop()
            fd = open_beneath(top, here)
            try:
                with os.scandir(fd) as entries:
                    names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
                if any(_is_set(f"/proc/self/fd/{fd}/{name}") for name in names):
                    return True
            finally:
                os.close(fd)
            waiting += [f"{here}/{name}" for name in names]
    finally:
        os.close(top)
    return False


def _is_set(path: str) -> bool:
    try:
        os.getxattr(path, _ATTRIBUTE, follow_symlinks=False)
    except OSError:
        return False
    return True
