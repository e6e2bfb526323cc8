"""The nursery: a process beside the launcher that does nothing but fork, so that the launcher does not have to.

A process that forks shares its memory with the child, and pays for it at everything it writes afterwards: hundreds of page faults
in the middle of the next request. So the launcher asks, and the nursery forks blanks (`builder.py`) and fronts (`launcher.py`).

    ("blank", whole_machine) with the keeper's and the builder's ends     ("front",) with the front's end

A keeper whose builder has ended becomes the launcher's child, which reaps it: the launcher is the nearest subreaper above.
"""

import os
import signal
import socket
from collections.abc import Callable
from typing import NoReturn

from elsewhere.linux import seccomp
from elsewhere.sandbox import builder, view, wire
from elsewhere.sandbox.builder import Blank
from elsewhere.sandbox.forking import leave_the_launcher

__all__ = ["Nursery"]


class Nursery:
    def __init__(self, state_path: str, front: Callable[[socket.socket], NoReturn]) -> None:
        """`front` is what a front does with its end; it is called in the child."""
        self._state_path = state_path
        self._front = front
        self._orders = self._start()

    def _start(self) -> socket.socket:
        ours, theirs = wire.pair()
        if os.fork() == 0:
            try:
                leave_the_launcher([theirs.fileno()])
                _Nurse(theirs, self._state_path, self._front).serve()
            finally:
                os._exit(1)
        theirs.close()
        return ours

    def blank(self, *, whole_machine: bool) -> Blank:
        blank, ends = builder.unborn()
        self._ask(("blank", whole_machine), ends)
        return blank

    def front(self) -> socket.socket:
        ours, theirs = wire.pair()
        self._ask(("front",), [theirs])
        return ours

    def _ask(self, order: tuple[object, ...], ends: list[socket.socket]) -> None:
        numbers = [end.fileno() for end in ends]
        try:
            try:
                wire.send(self._orders, order, numbers)
            except ConnectionError:  # it was killed: another one does the same
                self._orders.close()
                self._orders = self._start()
                wire.send(self._orders, order, numbers)
        finally:
            for end in ends:
                end.close()

    def close(self) -> None:
        self._orders.close()


class _Nurse:
    def __init__(self, orders: socket.socket, state_path: str, front: Callable[[socket.socket], NoReturn]) -> None:
        self._orders = orders
        self._state_path = state_path
        self._front = front
        self._filter = seccomp.program()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # builders and fronts are reaped by the kernel

    def serve(self) -> NoReturn:
        """Until the launcher is gone."""
        try:
            while True:
                order, fds = wire.receive(self._orders)
                if os.fork() == 0:
                    try:
                        leave_the_launcher(fds)
                        self._be(order, [socket.socket(fileno=fd) for fd in fds])
                    finally:
                        os._exit(1)
                for fd in fds:
                    os.close(fd)
        finally:
            os._exit(0)

    def _be(self, order: tuple[object, ...], ends: list[socket.socket]) -> NoReturn:
        if order[0] == "front":
            self._front(ends[0])
        whole_machine = bool(order[1])
        standing = view.standing(whole_machine=whole_machine)
        builder.run(ends[0], ends[1], standing, self._state_path, whole_machine, self._filter, None)
