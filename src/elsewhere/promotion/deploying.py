"""Commands of a stage on the host, `deploy` and `rollback`: a change laid out for them, run, watched, and told about.

    <place>/tree/…           the changed files as they are to be
    <place>/change.patch     all of the change, as `git apply --binary` understands it
    <place>/deleted          paths that are to go, each ended by a zero byte

A command is a line for `sh -c`, in the project's directory, with the caller's environment and these variables:

    ELSEWHERE_PROMOTION      the promotion's id
    ELSEWHERE_STAGE          the stage's name
    ELSEWHERE_CHANGE         the directory above

It has a session and a process group of its own. Its end is the exit of the shell, not the end of its output: what it leaves
running lives on, for `rollback` to see to. When its time is over, all of its group is ended. Whoever is killed while a command
runs leaves it running: what did not come to its end is known by its variables, and ended (`end_left_over`), before anything is
taken back.

Nothing here is confined. Not here: whether a command is trusted, and what its failure means.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elsewhere.changes import patch
from elsewhere.changes.model import Change, Changes, Side
from elsewhere.clock import monotonic, wall
from elsewhere.errors import Broken
from elsewhere.promotion.pieces import Piece
from elsewhere.values import dataclass

__all__ = ["CAP", "Ended", "end_left_over", "lay_out", "patch_of", "run", "variables"]

CAP = 1 << 20  # bytes of each output that are kept
_GRACE = 5.0
_CHUNK = 1 << 16
_DRAINED = 64  # pieces that are still read when it has ended: what others write must not keep us


@dataclass(frozen=True, slots=True)
class Ended:
    """`reason`: exited, signaled or timeout. `stdout` and `stderr` are files, of which no more than `CAP` bytes were kept if
    `truncated`."""

    command: str
    exit_code: int
    reason: str
    seconds: float
    stdout: str
    stderr: str
    truncated: bool
    at: float

    @property
    def good(self) -> bool:
        return self.reason == "exited" and self.exit_code == 0

    def document(self) -> dict[str, Any]:
        return asdict(self)


def variables(promotion: str, stage: str, change: str) -> dict[str, str]:
    return {"ELSEWHERE_PROMOTION": promotion, "ELSEWHERE_STAGE": stage, "ELSEWHERE_CHANGE": change}


def run(command: str, directory: str, outputs: str, surroundings: Mapping[str, str], timeout: float) -> Ended:
    """In `directory`, with what it says in the files `<outputs>.out` and `<outputs>.err`."""
    began, at = monotonic(), wall()
    with contextlib.ExitStack() as stack:
        sinks = [stack.enter_context(_Sink(f"{outputs}.{end}")) for end in ("out", "err")]
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                cwd=directory,
                env={**os.environ, **surroundings},
                stdin=subprocess.DEVNULL,
                stdout=sinks[0].writer,
                stderr=sinks[1].writer,
                start_new_session=True,
            )
        except OSError as error:
            raise Broken("deploy_not_started", f"{command!r} cannot be started in {directory!r}: {error.strerror}") from error
        for sink in sinks:
            sink.close_writer()
        try:
            in_time = _wait(process, sinks, began + timeout)
        except BaseException:
            _end(process)
            raise
        if not in_time:
            _end(process)
        for sink in sinks:
            sink.drain()
    code = process.returncode
    reason = "timeout" if not in_time else "signaled" if code < 0 else "exited"
    truncated = any(sink.truncated for sink in sinks)
    said = [sink.path for sink in sinks]
    return Ended(command, 128 - code if code < 0 else code, reason, monotonic() - began, said[0], said[1], truncated, at)


class _Sink:
    """One output: read as long as the command runs, so that it never stalls, and kept up to a cap."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.truncated = False
        self._left = CAP
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)

    def __enter__(self) -> "_Sink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_writer()
        os.close(self.reader)
        os.close(self._file)

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def take(self) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return False
        kept = memoryview(data)[: self._left]
        self.truncated |= len(kept) < len(data)
        self._left -= len(kept)
        while kept:
            kept = kept[os.write(self._file, kept) :]
        return bool(data)

    def drain(self) -> None:
        for _ in range(_DRAINED):
            if not self.take():
                return


def _wait(process: "subprocess.Popen[bytes]", sinks: Sequence[_Sink], deadline: float) -> bool:
    """Whether it ended in time."""
    ended = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        for sink in sinks:
            poll.register(sink.reader, select.POLLIN)
        known = {sink.reader: sink for sink in sinks}
        while (left := deadline - monotonic()) > 0:
            for fd, _ in poll.poll(min(left, 3600.0) * 1000 + 1):
                if fd == ended:
                    process.wait()
                    return True
                if not known[fd].take():
                    poll.unregister(fd)
    finally:
        os.close(ended)
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The whole group: asked first, then not."""
    for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def end_left_over(promotion: str, stage: str, patience: float = 10.0) -> int:
    """End what commands of this stage left running, and wait until it is gone; how many processes that were."""
    marks = {f"ELSEWHERE_PROMOTION={promotion}".encode(), f"ELSEWHERE_STAGE={stage}".encode()}
    seen: set[int] = set()
    deadline = monotonic() + patience
    while found := [pid for pid in _processes() if marks <= _environment(pid)]:
        if monotonic() > deadline:
            raise Broken(
                "deploy_left_over",
                f"a command of the stage {stage!r} that was interrupted still runs, and cannot be ended",
                hint=f"look at the processes {', '.join(map(str, found))}",
            )
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        seen.update(found)
        time.sleep(0.02)
    return len(seen)


def _processes() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> set[bytes]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as stream:
        return set(stream.read().split(b"\0"))
    return set()


# -- the change, for whoever deploys it -----------------------------------------------------------------------------------------


def lay_out(place: str, wanted: Iterable[tuple[str, Side | None]], change: bytes) -> None:
    """`wanted` are paths with what is to stand there; `place` is made."""
    tree = os.path.join(place, "tree")
    os.makedirs(tree, 0o700)
    deleted = []
    directories: list[tuple[str, int]] = []
    for path, side in sorted(wanted, key=lambda one: one[0]):
        if side is None:
            deleted.append(path)
            continue
        target = os.path.join(tree, path)
        if side.type == "directory":
            os.makedirs(target, exist_ok=True)
            directories.append((target, side.mode))
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if side.type == "link":
            os.symlink(side.target or "", target)
        elif side.type == "file":
            with side.open() as source, open(target, "xb") as stream:
                shutil.copyfileobj(source, stream, _CHUNK)
                os.fchmod(stream.fileno(), side.mode & 0o777)
    for target, mode in reversed(directories):
        os.chmod(target, mode & 0o777)
    with open(os.path.join(place, "deleted"), "wb") as stream:
        stream.write(b"".join(os.fsencode(path) + b"\0" for path in deleted))
    with open(os.path.join(place, "change.patch"), "wb") as stream:
        stream.write(change)


def patch_of(pieces: Iterable[Piece], project: str) -> bytes:
    """The change as a patch relative to the project. What nobody knows the beginning of is in it as if it were new."""
    changes = Changes(project=project)
    for piece in pieces:
        if piece.root != project:
            continue
        path, before, after = os.path.join(project, piece.path), _in_patch(piece.before), _in_patch(piece.after)
        if before is not None or after is not None:
            kind = "added" if before is None else "deleted" if after is None else "modified"
            changes.add(Change(path, kind, before, after))
    changes.sort()
    return patch.patch(changes).text


def _in_patch(side: Side | None) -> Side | None:
    """Git knows no directories."""
    return None if side is None or side.type == "directory" else side
