"""Entering a sandbox that is there: started if it is only directories, when there is room for it."""

import contextlib
import os
import time
from collections.abc import Callable

from elsewhere.operations import admission, networking
from elsewhere.operations.admission import Pause
from elsewhere.sandbox import live
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.networking import proxies
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State

__all__ = ["enter"]


def enter(
    state: State,
    wanted: str,
    tell: Callable[[str], None] | None = None,
    pause: Pause = time.sleep,
    *,
    needs_ports: bool = False,
) -> Live:
    """`needs_ports`: without its forwards and published ports that is an error; otherwise it is told."""

    def admitted(found: Record) -> contextlib.AbstractContextManager[int]:
        # Whoever starts it says which proxy the host has.
        if found.confinement.get("network") == "allow":
            proxies.keep(state.sandbox(found.id), os.environ)
        return admission.readmitted(state, found, tell, pause)

    box = live.enter(state, record.find(state, wanted), admitted)
    try:
        networking.reopen_ports(state, box.record, tell, pause, needed=needs_ports)
    except BaseException:
        box.close()
        raise
    return box
