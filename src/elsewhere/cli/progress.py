"""How far a copy has come, for people: one line on a terminal that is written over, nothing anywhere else."""

import os
import sys
import time

from elsewhere import units
from elsewhere.operations.bases import Teller
from elsewhere.storage.bases import Estimate
from elsewhere.storage.capturing import Progress

__all__ = ["teller"]

_WIDTH = 30
_EVERY_S = 0.1


def teller() -> Teller:
    """The estimate is worth a line everywhere, how far it is only where somebody watches."""
    bar = _Bar()
    return Teller(bar.estimate, bar.progress)


class _Bar:
    def __init__(self) -> None:
        self._watched = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._last = 0.0

    def estimate(self, found: Estimate) -> None:
        how = "sharing their blocks" if found.shares_blocks else "copying"
        what = f"{units.count(found.files, 'file')}, {units.format_size(found.bytes)}"
        print(f"elsewhere: the first base of this project: {how} {what}; later only what changed", file=sys.stderr)

    def progress(self, so_far: Progress) -> None:
        now = time.monotonic()
        done = so_far.files >= so_far.total_files
        if not self._watched or (now - self._last < _EVERY_S and not done):
            return
        self._last = now
        part = min(1.0, so_far.bytes / so_far.total_bytes if so_far.total_bytes else so_far.files / max(1, so_far.total_files))
        bar = ("#" * round(part * _WIDTH)).ljust(_WIDTH)
        size = f"{units.format_size(so_far.bytes)} of {units.format_size(so_far.total_bytes)}"
        line = f"  [{bar}] {so_far.files} of {so_far.total_files} files, {size}"
        print(f"\r\x1b[K{'' if done else line}", end="", file=sys.stderr, flush=True)
