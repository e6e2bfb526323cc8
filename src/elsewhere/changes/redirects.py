"""Directories that were renamed in a layer: overlay marks each with where it came from."""

import contextlib
import os

__all__ = ["moves"]

_ATTRIBUTE = "trusted.overlay.redirect"


def moves(upper: str) -> list[tuple[str, str]]:
    """Where each renamed directory is now and where it was in the layers below, both relative to the layer."""
    found = []
    waiting = [""]
    while waiting:
        here = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(os.path.join(upper, here)) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    path = os.path.join(here, entry.name)
                    waiting.append(path)
                    with contextlib.suppress(OSError):
                        source = os.fsdecode(os.getxattr(entry.path, _ATTRIBUTE, follow_symlinks=False))
                        found.append((path, source[1:] if source.startswith("/") else os.path.join(here, source)))
    return found
