"""A neighbour that only some have: snapshots of a btrfs subvolume, on a disk image of this run's own.

The image is mounted in the mount namespace of a process that takes its orders on standard input: nobody else sees it, and with
that process, however it or we may end, the mount and its loop device go.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from typing import IO

from amounts import SCRIPT, Amount
from shell import environment
from workspace import Workspace

__all__ = ["Subvolumes"]

_SERVER = """
import json, os, subprocess, sys, time
image, point, writer, amounts = *sys.argv[1:4], json.loads(sys.argv[4])
def run(*argv, cwd=None):
    done = subprocess.run(argv, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{argv[0]}: {done.stderr.strip()}")
def btrfs(*words):
    began = time.perf_counter()
    run("btrfs", "subvolume", *words)
    return time.perf_counter() - began
run("mount", "-t", "btrfs", "-o", "loop", image, point)
try:
    for number, words in enumerate(amounts):
        btrfs("create", f"{point}/{number}")
        run(sys.executable, "-I", "-S", "-c", writer, *words, cwd=f"{point}/{number}")
    print("ready", flush=True)
    for line in sys.stdin:
        took = btrfs("snapshot", f"{point}/{line.strip()}", f"{point}/copy")
        btrfs("delete", f"{point}/copy")
        print(took, flush=True)
finally:
    subprocess.run(["umount", point], check=True)
"""


class Subvolumes:
    """One for each amount, for as long as the block lasts; `absent` says why not."""

    def __init__(self, place: Workspace, amounts: list[Amount]) -> None:
        self.absent = _missing()
        self._place = place
        self._amounts = amounts
        self._stack = contextlib.ExitStack()
        self._input: IO[str] | None = None
        self._output: IO[str] | None = None

    def __enter__(self) -> "Subvolumes":
        if not self.absent:
            try:
                self._open()
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                self._stack.close()
                said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
                self.absent = f"does not work here: {said[-1] if said else 'no reason given'}".replace(self._place.root, "…")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def once(self, amount: Amount) -> float:
        """Seconds for a snapshot of the subvolume with that amount; it is deleted again, which is not timed."""
        assert self._input is not None
        assert self._output is not None
        self._input.write(f"{self._amounts.index(amount)}\n")
        self._input.flush()
        answer = self._output.readline()
        if not answer:
            raise RuntimeError("the process that mounted btrfs has ended")
        return float(answer)

    def _open(self) -> None:
        directory = self._place.fresh("btrfs")
        image, point = os.path.join(directory, "image"), os.path.join(directory, "mount")
        os.makedirs(point)
        self._stack.callback(shutil.rmtree, directory)
        with open(image, "wb") as file:
            file.truncate((1 << 30) + 2 * sum(amount.files * amount.size for amount in self._amounts))
        subprocess.run(["mkfs.btrfs", "--quiet", image], capture_output=True, text=True, check=True)
        orders = json.dumps([amount.words for amount in self._amounts])
        server = subprocess.Popen(
            ["unshare", "--mount", sys.executable, "-I", "-S", "-c", _SERVER, image, point, SCRIPT, orders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._stack.callback(_end, server)
        self._input, self._output = server.stdin, server.stdout
        if server.stdout is None or server.stderr is None or server.stdout.readline() != "ready\n":
            raise RuntimeError(server.stderr.read() if server.stderr else "")


def _missing() -> str:
    if os.geteuid():
        return "needs root, to mount a file system"
    absent = [name for name in ("mkfs.btrfs", "btrfs", "unshare", "mount") if shutil.which(name) is None]
    return f"{absent[0]} is not installed" if absent else ""


def _end(server: "subprocess.Popen[str]") -> None:
    """It unmounts when there are no more orders."""
    with contextlib.suppress(OSError):
        server.communicate()
