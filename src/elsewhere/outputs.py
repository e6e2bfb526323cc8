"""Standard outputs that wait for whoever reads them.

Any program that shares a terminal or a pipe can set it not to block (Node does), for everybody. Python gives up then as soon as
there is no room, in the middle of a sentence, and a command that went well would end with an error.
"""

import io
import select
import sys
from typing import Any

__all__ = ["Unwritable", "opened", "use"]


class Unwritable(OSError):
    """Standard output takes nothing, for another reason than that nobody reads it any more."""


class _Patient(io.FileIO):
    def write(self, data: Any) -> int:
        while True:
            try:
                written: int | None = super().write(data)  # None: there was no room
            except BrokenPipeError:
                raise
            except OSError as error:
                if self.fileno() == 2:
                    return len(data)  # there is nobody to tell, and the work goes on
                raise Unwritable(error.errno, error.strerror) from error
            if written is not None:
                return written
            room = select.poll()
            room.register(self.fileno(), select.POLLOUT)
            room.poll()


def opened(number: int, *, by_line: bool) -> io.TextIOWrapper:
    """`by_line`: what is said comes at once, line by line, as it does on a terminal anyway."""
    raw = _Patient(number, "wb", closefd=False)
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, encoding="utf-8", errors="surrogateescape", line_buffering=by_line or raw.isatty())


def use() -> None:
    """As this process's own, from now on."""
    sys.stdout, sys.stderr = opened(1, by_line=False), opened(2, by_line=True)
