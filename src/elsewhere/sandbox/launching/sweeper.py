"""The sweeper: a process that empties the trash and lets go of mounts, so that nobody waits. It ends with the launcher."""

import contextlib
import os
import socket
import sys
import time
from typing import NoReturn

from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching.forking import leave_the_launcher
from elsewhere.sandbox.records import truth
from elsewhere.storage.state import State

__all__ = ["start"]


def start(state: State) -> socket.socket:
    """Tell it ("sweep",) with a mount namespace, or none, whenever there is something to do."""
    ours, theirs = wire.pair()
    ours.setblocking(False)
    if os.fork():
        theirs.close()
        return ours
    try:
        leave_the_launcher([theirs.fileno()])
        with contextlib.suppress(OSError):
            os.nice(10)
        _sweep(state, theirs)
    finally:
        os._exit(0)


def _sweep(state: State, orders: socket.socket) -> NoReturn:
    while True:
        try:
            if truth.empty_trash(state):
                time.sleep(0.2)  # something is still held by a sandbox that is going
                truth.empty_trash(state)
        except OSError as error:
            print(f"the trash could not be emptied: {error}", file=sys.stderr, flush=True)
        try:
            _, fds = wire.receive(orders)
            for fd in fds:
                os.close(fd)
        except (EOFError, OSError):
            break
    with contextlib.suppress(OSError):
        truth.empty_trash(state)
    os._exit(0)
