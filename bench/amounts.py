"""Changes of a certain amount: the same files in a sandbox and outside of one, which no compression makes smaller."""

import shutil
import subprocess
import sys
from dataclasses import dataclass

from elsewhere import Sandbox
from shell import environment

__all__ = ["SCRIPT", "Amount", "large", "small"]

_LARGE_FILES = 8
_SMALL_BYTES = 4096
_ROOM = 8  # times the amount: several copies of it are there at once, and what was deleted takes a while to go
SCRIPT = """
import os, sys
files, size = int(sys.argv[1]), int(sys.argv[2])
piece = os.urandom(min(size, 1 << 20))
for number in range(files):
    directory = os.path.join("changed", f"{number // 100:03}")
    if number % 100 == 0:
        os.makedirs(directory)
    with open(os.path.join(directory, f"part-{number:05}"), "wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)
"""


@dataclass(frozen=True, slots=True)
class Amount:
    name: str
    files: int
    size: int
    """Of each file, in bytes."""

    @property
    def words(self) -> list[str]:
        return [str(self.files), str(self.size)]

    def write_inside(self, box: Sandbox) -> None:
        box.run(self._command).check()

    def write_outside(self, directory: str) -> None:
        subprocess.run(self._command, cwd=directory, env=environment(), check=True)

    @property
    def _command(self) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", SCRIPT, *self.words]

    def does_not_fit(self, directory: str) -> str:
        """Why it cannot be measured in `directory`, or nothing."""
        wanted = self.files * self.size * _ROOM
        if shutil.disk_usage(directory).free >= wanted:
            return ""
        return f"needs {wanted / (1 << 30):.0f} GiB of free disk"


def large(mib: int) -> Amount:
    """A few large files."""
    name = f"{mib // 1024} GiB" if mib % 1024 == 0 else f"{mib} MiB"
    return Amount(name, _LARGE_FILES, mib * (1 << 20) // _LARGE_FILES)


def small(files: int) -> Amount:
    return Amount(f"{files:,} small files", files, _SMALL_BYTES)
