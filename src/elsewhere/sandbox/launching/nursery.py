"""The nursery: a lean process beside the launcher that does nothing but fork blanks (`builder.py`).

A process that forks shares its memory with the child, and both pay for it at everything they write afterwards: the launcher with
page faults in the middle of the next request, a keeper with memory for as long as it lives. So the launcher asks, and a process
forks that is an interpreter of its own with next to nothing loaded: above all nothing that registers itself for forks (`random`,
`threading`), which alone would cost each keeper half a megabyte.

    ("blank", kind, name of its group) with the keeper's and the builder's ends

A keeper whose builder has ended becomes the launcher's child, which reaps it: the launcher is the nearest subreaper above.
"""

import codecs
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from typing import NoReturn

import elsewhere
from elsewhere.linux import cgroups, network, syscalls
from elsewhere.linux.mounts import Operation
from elsewhere.sandbox import standing
from elsewhere.sandbox.keeping import processes, wire
from elsewhere.sandbox.keeping.keeper import Keeper
from elsewhere.sandbox.keeping.processes import Process
from elsewhere.sandbox.launching import blanks, builder, sealing
from elsewhere.sandbox.launching.blanks import Blank, Groups, Kind
from elsewhere.sandbox.launching.forking import close_all_but, original_descriptor_limit
from elsewhere.sandbox.launching.sealing import Filters

__all__ = ["Nursery", "serve"]

_ORDERS = 3
_ROUNDS = 12
_IMPORT = "from elsewhere.sandbox.launching import nursery"
_START = f"import sys; sys.path.insert(0, sys.argv[1]); {_IMPORT}; nursery.serve(*sys.argv[2:])"


class Nursery:
    def __init__(self, state_path: str) -> None:
        self._state_path = state_path
        self._orders = self._start()

    def _start(self) -> socket.socket:
        ours, theirs = wire.pair()
        package = os.path.dirname(os.path.dirname(os.path.abspath(elsewhere.__file__)))
        argv = [
            sys.executable,
            "-I",
            "-S",
            "-X",
            "utf8",
            "-c",
            _START,
            package,
            self._state_path,
            *map(str, original_descriptor_limit()),
        ]
        with theirs:
            actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), _ORDERS)]
            os.posix_spawn(sys.executable, argv, dict(os.environ), file_actions=actions, setsigdef=[signal.SIGCHLD])
        return ours

    def blank(self, kind: Kind, group: str) -> Blank:
        blank, ends = blanks.unborn()
        order = ("blank", (kind.whole_machine, kind.network, kind.nested), group)
        fds = [end.fileno() for end in ends]
        try:
            try:
                wire.send(self._orders, order, fds)
            except OSError:  # it was killed
                self._orders.close()
                self._orders = self._start()
                wire.send(self._orders, order, fds)
        finally:
            for end in ends:
                end.close()
        return blank

    def close(self) -> None:
        self._orders.close()


def serve(state_path: str, soft: str, hard: str) -> NoReturn:
    """Until the launcher is gone. `soft` and `hard` are the limits of descriptors that commands are to have."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    orders = socket.socket(fileno=_ORDERS)
    programs: dict[bool, Filters] = {False: sealing.filters()}
    made: dict[bool, tuple[object, tuple[Operation, ...]]] = {}
    host = cgroups.look()
    _warm_up()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # builders are reaped by the kernel
    gc.collect()
    gc.freeze()  # what is there now stays, and is not touched in every child
    try:
        while True:
            (_, about, group), fds = wire.receive(orders)
            kind = Kind(*about)
            stamp = standing.stamp()
            if made.get(kind.whole_machine, (None,))[0] != stamp:
                made[kind.whole_machine] = (stamp, standing.mounts(whole_machine=kind.whole_machine))
            if kind.nested not in programs:
                programs[kind.nested] = sealing.filters(nested=kind.nested)
            if os.fork() == 0:
                try:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    close_all_but(fds)
                    ends = [socket.socket(fileno=fd) for fd in fds]
                    operations, filters = made[kind.whole_machine][1], programs[kind.nested]
                    builder.run(ends[0], ends[1], operations, state_path, kind, filters, Groups(host, group), None)
                finally:
                    os._exit(1)
            for fd in fds:
                os.close(fd)
    finally:
        os._exit(0)


def _none_of_ours() -> dict[int, Process]:
    """Not to go through all processes of the host again and again, only to find none of our own."""
    return {pid: one for pid, one in processes.everything([str(os.getpid())]).items() if pid != os.getpid()}


def _warm_up() -> None:
    """Python rewrites code while it runs for the first few times. Done here, that is done for all keepers: they share it, and do
    not each get pages of their own for it."""
    codecs.lookup("ascii")  # which every builder opens files with: it would import that, each for itself
    network.prepare()
    ours, theirs = wire.pair()
    with ours, theirs:
        keeper = Keeper(theirs, alone=False, others=_none_of_ours)
        for _ in range(_ROUNDS):
            keeper.rehearse()
            with contextlib.suppress(OSError):
                os.close(syscalls.fsopen("proc"))
            syscalls.prctl(syscalls.PR_GET_DUMPABLE)
            syscalls.capget()
        keeper.close()
