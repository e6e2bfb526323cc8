"""Files of a sandbox from outside: `cp` for people, `Files` for programs, and `open` for an editor."""

import contextlib
import os
import time
from collections.abc import Iterator

from elsewhere.clock import monotonic
from elsewhere.errors import Unavailable
from elsewhere.operations.entering import enter
from elsewhere.operations.projects import refuse_inside
from elsewhere.sandbox import rungs
from elsewhere.sandbox.access import transfer
from elsewhere.sandbox.access.files import Files
from elsewhere.sandbox.access.transfer import Transferred
from elsewhere.sandbox.keeping import commands, line
from elsewhere.sandbox.keeping.processes import MARK
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State

__all__ = ["copy", "files_of", "open_tree"]

_PATIENCE_S = 5.0


@contextlib.contextmanager
def files_of(box: Live) -> Iterator[Files]:
    """The sandbox's files, for as long as the block lasts."""
    with box.line() as keeper:
        root = keeper.root()
    try:
        yield Files(root, box.project_path, rungs.named(box.record.mechanism).shift)
    finally:
        os.close(root)


def copy(source: str, target: str, *, overwrite: bool = False) -> tuple[Record, Transferred]:
    """Between the host and a sandbox, which is written ID:PATH."""
    refuse_inside()
    sides = transfer.parse_sides(source, target)
    state = State.open()
    box = enter(state, sides.sandbox)
    try:
        with files_of(box) as files:
            if sides.uploads:
                return box.record, transfer.upload(files, sides.host, sides.inside)
            return box.record, transfer.download(files, sides.inside, sides.host, overwrite=overwrite)
    finally:
        box.close()


def open_tree(wanted: str) -> tuple[Record, str]:
    """A path of the host at which the sandbox's project can be read and written by an editor, for as long as the sandbox runs."""
    refuse_inside()
    state = State.open()
    box = enter(state, wanted)
    try:
        if rungs.named(box.record.mechanism).copy:
            return box.record, box.project_path
        with box.line() as keeper:
            pid = keeper.pid() if os.geteuid() == 0 else _window(box, keeper.pid())
        path = f"/proc/{pid}/root{box.project_path}"
        if not os.path.isdir(path):
            raise Unavailable(
                "tree_closed", f"{path} cannot be entered on this host", hint="elsewhere cp, or elsewhere exec ID -- EDITOR"
            )
        return box.record, path
    finally:
        box.close()


def _window(box: Live, keeper: int) -> int:
    """The keeper is closed to everybody but root; a process that does nothing but wait is not. It ends with the sandbox."""
    inside = _find_window(box.id, keeper)
    if inside is None:
        spec = box.spec(["sleep", "infinity"], "/", caller={"PATH": os.defpath}, detached=True, request=line.WINDOW)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            commands.detached(box.control, spec, (null, null, null))
        finally:
            os.close(null)
        # It has started, but its environment can be read only when the kernel has put it in place.
        deadline = monotonic() + _PATIENCE_S
        while (inside := _find_window(box.id, keeper)) is None and monotonic() < deadline:
            time.sleep(0.005)
    if inside is None:
        raise Unavailable("tree_closed", f"the tree of {box.id!r} cannot be shown on this host", hint="elsewhere cp")
    return inside


def _find_window(sandbox_id: str, keeper: int) -> int | None:
    """A child of the keeper itself: anybody can claim anything in an environment."""
    marks = (f"ELSEWHERE_SANDBOX_ID={sandbox_id}".encode(), f"{MARK}={line.WINDOW}".encode())
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as stream:
                words = stream.read().split(b"\0")
                if all(mark in words for mark in marks) and _parent(name) == keeper:
                    return int(name)
    return None


def _parent(pid: str) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stream:
        return int(stream.read().rpartition(b")")[2].split()[1])
