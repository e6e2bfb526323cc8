"""A program of its own, run by whoever owns the project: somebody else writes, replaces, deletes, truncates and links files while a
promotion replaces, adds and deletes the very same ones, over and over. What they did last must be in reality; only what was written
through a descriptor of a file that had been replaced may be in the data for an undo instead.

    promotion_races.py SEED ROUNDS      run in an empty directory; `promotion_blows.py` and `blows.py` must lie beside this file

In each round one of them works at some step of the promotion, which waits for that, or all the time, which nobody waits for.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from blows import apart
from promotion_blows import described, told, write

from elsewhere import Sandbox
from elsewhere.errors import Conflict
from elsewhere.operations import promoting, sandboxes, undoing
from elsewhere.operations.promoting import Asked
from elsewhere.promotion import records
from elsewhere.storage import trash
from elsewhere.storage.state import State

STEPS = "prepare stage sync note begin take swap add rmdir mode check settle commit clear end".split()
FILES = {"f": "base\n", "gone": "base\n", "dir/1": "base\n", "left": "base\n"}
CHANGE = "echo sandbox > f; echo sandbox > left; rm gone; rm -r dir; echo sandbox > fresh; echo sandbox > other"
PATHS = ("f", "f", "gone", "fresh", "dir/1")


class Writer:
    """What it did last is in `last`: a content, a link's target, or None if it deleted it; `inside`: through a descriptor that it
    opened before all began."""

    def __init__(self, path: str, kind: str) -> None:
        self.path, self.kind, self.number = path, kind, 0
        self.last: tuple[str, str | None] | None = None
        self.fd = os.open(path, os.O_RDWR) if kind == "inside" else -1

    def work(self) -> None:
        self.number += 1
        text = f"written {self.number} by {os.getpid()} at {time.monotonic_ns()}\n"
        with contextlib.suppress(FileNotFoundError):  # also of the directory that it is in
            getattr(self, f"_{self.kind}")(text)
        with contextlib.suppress(FileNotFoundError):
            os.unlink("../aside")

    def _inside(self, text: str) -> None:
        os.pwrite(self.fd, text.encode().ljust(80), 0)
        self.last = ("file", text.ljust(80))

    def _rename(self, text: str) -> None:
        write("../aside", text)
        os.rename("../aside", self.path)
        self.last = ("file", text)

    def _link(self, text: str) -> None:
        os.symlink(text, "../aside")
        os.rename("../aside", self.path)
        self.last = ("link", text)

    def _delete(self, _: str) -> None:
        os.unlink(self.path)
        self.last = ("nothing", None)

    def _truncate(self, _: str) -> None:
        os.truncate(self.path, 0)
        self.last = ("file", "")

    def _open(self, text: str) -> None:
        """In place, whatever stands there, or new."""
        write(self.path, text)
        self.last = ("file", text)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


KINDS = {
    "f": ("inside", "inside", "rename", "link", "delete", "truncate", "open"),
    "gone": ("inside", "rename", "link", "open"),
    "dir/1": ("inside", "rename", "open"),
    "fresh": ("rename", "link", "open"),
}


@dataclass
class Races:
    seed: int
    rounds: int
    found: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def run(self) -> None:
        self.chance = random.Random(self.seed)
        os.makedirs("project/dir")
        os.chdir("project")
        subprocess.run(["git", "init", "-q", "."], check=True)
        self._reset()
        self.box = str(apart(self._filled))
        try:
            for _ in range(self.rounds):
                self._round()
        except BaseException:
            print(f"\nELSEWHERE_TEST_SEED={self.seed}; the last rounds:", *self.said[-5:], sep="\n  ", file=sys.stderr)
            raise
        print(json.dumps(self.found))

    def _filled(self) -> str:
        with Sandbox.create(".", base="pinned", on_exit="keep") as box:
            box.run(CHANGE).check()
        sandboxes.stop(box.id)
        return box.id

    def _reset(self) -> None:
        """Reality as it was, and nobody knows of any promotion."""
        os.makedirs("dir", exist_ok=True)
        for path in ("fresh", "other", *FILES):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        for path, text in FILES.items():
            write(path, text)

    def _round(self) -> None:
        path = self.chance.choice(PATHS)
        kind, step = self.chance.choice(KINDS[path]), self.chance.choice((None, *STEPS))
        self.said.append(f"{kind} of {path} {'all the time' if step is None else f'at {step}'}:")
        writer = Writer(path, kind)
        done = self._raced(writer, step)
        writer.close()
        apart(undoing.promotions)
        here = described(".")
        left = [one for one in here if ".elsewhere-" in one]
        assert not left, (left, self.said[-1])
        self.said[-1] += f" {done}, last {writer.last}"
        self._nothing_is_lost(writer, here, done)
        apart(_forgotten)
        self._reset()

    def _raced(self, writer: Writer, step: str | None) -> str:
        """What came of the promotion: applied, or refused."""
        asking, telling = os.pipe()
        going, letting = os.pipe()

        def tell(name: str) -> None:
            if name == step:
                os.write(telling, b"x")
                os.read(going, 1)

        def work() -> str:
            for fd in (asking, letting):
                os.close(fd)
            told(tell)
            try:
                promoting.promote(self.box, Asked(commits=False))
            except Conflict:
                return "refused"
            return "applied"

        answer, child = self._begun(work)
        os.close(telling)
        if step is None:
            until = time.monotonic() + self.chance.uniform(0.01, 0.4)
            while time.monotonic() < until and not _ended(child):
                writer.work()
                time.sleep(self.chance.choice((0, 0, 0.0005, 0.002)))
        else:
            while os.read(asking, 1):
                writer.work()
                os.write(letting, b"x")
        for fd in (asking, going, letting):
            os.close(fd)
        with open(answer) as stream:
            said = stream.read()
        os.waitpid(child, 0)
        assert said, f"it ended by itself: {self.said[-1]}"
        return said

    def _begun(self, work: Callable[[], str]) -> tuple[int, int]:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, work().encode())
            except BaseException as error:
                print(repr(error), getattr(error, "message", ""), file=sys.stderr, flush=True)
            finally:
                os._exit(0)
        os.close(writer)
        return reader, child

    def _nothing_is_lost(self, writer: Writer, here: dict[str, tuple[object, ...]], done: str) -> None:
        if writer.last is None:
            return self._count("nothing was written")
        kind, text = writer.last
        stands = here.get(writer.path)
        content = None if stands is None else stands[3]
        if isinstance(content, bytes):
            content = content.decode()
        is_link = stands is not None and str(stands[0]).startswith("l")
        if content == text and is_link == (kind == "link"):
            return self._count("in reality")
        # Whoever opened the path just before it was replaced has the old file as well.
        assert writer.kind in ("inside", "open", "truncate"), (content, self.said[-1])
        assert done == "applied", (content, self.said[-1])
        assert text in self._kept(), (content, self.said[-1])
        return self._count("in the data for an undo")

    def _count(self, what: str) -> None:
        self.found[what] = self.found.get(what, 0) + 1

    def _kept(self) -> list[str]:
        found = []
        for directory, _, files in os.walk(State.open().room("journal")):
            if "/old-" in directory:
                for name in files:
                    with open(os.path.join(directory, name)) as stream:
                        found.append(stream.read())
        return found


def _forgotten() -> None:
    state = State.open()
    for one in records.listed(state):
        trash.discard(one.directory, state.room("trash"))


def _ended(child: int) -> bool:
    with open(f"/proc/{child}/stat") as stream:
        return stream.read().rpartition(")")[2].split()[0] in "ZX"


if __name__ == "__main__":
    Races(int(sys.argv[1]), int(sys.argv[2])).run()
