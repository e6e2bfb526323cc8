"""How a sandbox that lives on its own is stopped and removed. Only this and the launcher (for what it made itself) take away.

    stop      ask everything in it to end, wait, keep the directory
    remove    the same, then: with changes, the directory is renamed into the archive; without, into the trash

In that order, whatever state the sandbox is in: half-made, without a record, with a keeper that does not answer. A name from
outside never becomes a path: a sandbox is a directory directly below sandboxes/, and a link there is not one.
"""

import contextlib
import os
import signal

from elsewhere.clock import wall
from elsewhere.errors import Broken, ElsewhereError, InUse
from elsewhere.linux import cgroups, syscalls
from elsewhere.linux.cgroups import Group
from elsewhere.sandbox import rungs
from elsewhere.sandbox.contents import IMAGE
from elsewhere.sandbox.keeping import line
from elsewhere.sandbox.launching.engine import Engine
from elsewhere.sandbox.networking import proxies
from elsewhere.sandbox.records import record, truth
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.records.request import Caller
from elsewhere.storage import images, saving, trash
from elsewhere.storage.layers import Layers
from elsewhere.storage.state import State

__all__ = ["archive_or_discard", "end_keeper", "end_unknown", "prune", "stop", "sweep"]


def stop(state: State, sandbox_id: str, grace: float) -> Record:
    """Twice is once."""
    with record.exclusive(state, sandbox_id) as found:
        if found.state == "running":
            end_keeper(state, found, grace)
        if found.lost or found.state == "running":
            _settle(state, found)
        return found


def end_keeper(state: State, found: Record, grace: float, *, if_idle: bool = False, own: int = 1) -> bool:
    """Afterwards nothing of the sandbox runs, and what it wrote is on disk, in memory no longer. False, with `if_idle`: something
    runs in it, and goes on."""
    directory = state.sandbox(found.id)
    reached = line.connect(directory)
    memory = None
    if reached is not None:
        with reached, contextlib.ExitStack() as stack:
            memory = reached.layers() if rungs.named(found.mechanism).memory else None
            if memory is not None:
                stack.callback(os.close, memory)
                saving.check_room(memory, directory)  # afterwards there would be no way back
            if not if_idle:
                reached.finish(grace)
            elif not reached.rest(own):
                return False
            if memory is not None:
                saving.save_layers(f"/proc/self/fd/{memory}/upper", os.path.join(directory, "upper"))
    elif found.keeper is not None:
        _kill(Caller(*found.keeper))
    record.wait_for_end(state, found.id)
    if record.is_alive(state, found.id):
        raise InUse(
            "sandbox_will_not_end",
            f"the keeper of {found.id!r} neither answers nor ends",
            hint="it may wait for a disk or a server; try again later",
        )
    if found.group is not None:
        cgroups.remove(Group(*found.group))
    return True


def _kill(keeper: Caller) -> None:
    """One that does not answer. The number is checked again once a descriptor holds the process that has it."""
    try:
        watch = os.pidfd_open(keeper.pid)
    except ProcessLookupError:
        return
    try:
        if keeper.is_alive():
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            line.wait(watch)
    finally:
        os.close(watch)


def _settle(state: State, found: Record) -> None:
    directory = state.sandbox(found.id)
    places = [f"{directory}/{IMAGE}"] if found.disk == "image" else [f"{directory}/upper/{one['number']}" for one in found.layers]
    for place in places:
        with contextlib.suppress(OSError):
            _sync(place)
    if found.disk == "image":
        _give_back(places[0])
    found.state, found.ended_at, found.keeper = "stopped", found.ended_at or wall(), None
    proxies.forget(directory)
    record.save(found, directory)


def _give_back(image: str) -> None:
    """What was deleted in it is the host's again."""
    with contextlib.suppress(ElsewhereError, OSError):
        fd = images.mounted(image)
        try:
            images.trim(fd)
        finally:
            os.close(fd)


def _sync(path: str) -> None:
    """Overlay was told not to wait for the disk while the sandbox ran."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.syncfs(fd)
    finally:
        os.close(fd)


def archive_or_discard(state: State, sandbox_id: str, found: Record | None, *, archive: bool) -> str | None:
    """Away with the directory, in constant time. The place in the archive, if it went there."""
    directory = state.sandbox(sandbox_id)
    if found is not None and found.group is not None:
        cgroups.remove(Group(*found.group), 0.0)  # of a keeper that died before
    if not archive:
        trash.discard(directory, state.room("trash"))
        return None
    if found is not None:
        found.state, found.ended_at = "removed", found.ended_at or wall()
        record.save(found, directory)
    proxies.forget(directory)
    truth.forget(state, sandbox_id, directory)  # before it goes: nobody looks for requests in the archive
    for number in range(1000):
        target = os.path.join(state.room("archive"), sandbox_id + (f".{number}" if number else ""))
        if not os.path.lexists(target):
            os.rename(directory, target)
            truth.forget(state, sandbox_id, target)
            return target
    raise Broken("archive_full", f"the archive has a thousand sandboxes named {sandbox_id!r}", hint="move some of them elsewhere")


def sweep(state: State, *, layers: bool = False) -> None:
    """Have the trash emptied: by the launcher, if there is one, else here. With `layers`, what nobody needs of them goes there
    first."""
    if layers:
        with contextlib.suppress(Broken):  # the janitor says so
            prune(state)
    if not Engine.shared(state).nudge("sweep"):
        with contextlib.suppress(OSError):
            truth.empty_trash(state)


def prune(state: State, *, dry_run: bool = False) -> list[str]:
    """Take away the layers that no sandbox needs, here or in the archive. Where a record cannot be read, nobody knows what it
    needs: that is an error, and everything stays."""
    layers = Layers(state)

    def tips() -> list[str]:
        found = []
        for room in ("sandboxes", "archive"):
            with os.scandir(state.room(room)) as entries:
                places = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            for place in places:
                found += record.layers_of(place)
                # One that runs has them mounted one by one, even if they were merged since.
                found += [layer.id for layer in layers.ancestors(record.layers_running(place))]
        return found

    return layers.prune(tips, dry_run=dry_run)


def end_unknown(state: State, sandbox_id: str) -> None:
    """A sandbox whose record cannot be read: whoever answers in its directory is asked to go."""
    reached = line.connect(state.sandbox(sandbox_id))
    if reached is not None:
        with reached:
            reached.finish(0.0)
    record.wait_for_end(state, sandbox_id)
