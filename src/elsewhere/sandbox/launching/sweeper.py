"""The sweeper: a process that empties the trash, lets go of mounts and merges layers, so that nobody waits. It ends with the
launcher."""

import contextlib
import os
import socket
import sys
import time
from typing import NoReturn

from elsewhere.errors import ElsewhereError
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching.forking import leave_the_launcher
from elsewhere.sandbox.records import truth
from elsewhere.storage.layers import LAYERS, Layers
from elsewhere.storage.state import State

__all__ = ["start"]

_MEASURING_S = 60.0


def start(state: State) -> socket.socket:
    """Tell it ("sweep",) with a mount namespace, or none, or ("tidy", layer) whenever there is something to do."""
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
            order, fds = wire.receive(orders)
            for fd in fds:
                os.close(fd)
            if order[0] == "tidy":
                _tidy(state, order[1])
        except (EOFError, OSError):
            break
    with contextlib.suppress(OSError):
        truth.empty_trash(state)
    os._exit(0)


def _tidy(state: State, tip: str) -> None:
    """A layer that was just frozen: to the disk with it, and how large it is; and what has to be merged, if it ends a run."""
    layers = Layers(state)
    try:
        layers.sync()
        layers.measured(layers.load(tip), state.room(LAYERS), _MEASURING_S)
        for layer_id in layers.merge_due(tip):
            layers.merge(layer_id)
    except (ElsewhereError, OSError) as error:
        print(f"the layer {tip} was not looked after: {error}", file=sys.stderr, flush=True)
