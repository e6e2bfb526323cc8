"""Fronts: processes that wait, with everything loaded and rehearsed, to do one command line's work on its client's behalf.

They are forked by a process of their own (`Stand`), so that the launcher does not have to: one that forks pays for it afterwards.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

from elsewhere import outputs
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching.forking import leave_the_launcher

__all__ = ["Front", "Stand"]

_QUIET_S = 2.0


class Front(Protocol):
    """The command line, which this floor does not know."""

    def load(self) -> None:
        """What not every command line needs."""

    def rehearse(self) -> None:
        """Do what every command line does, without effect."""

    def serve(self, argv: list[str], client: socket.socket) -> int:
        """One command line, on the descriptors, in the directory and with the environment of this process: its exit code."""


class Stand:
    """Where fronts wait to be taken."""

    def __init__(self, work: Front, before_forking: Callable[[], None]) -> None:
        self._work = work
        self._before_forking = before_forking
        self._orders = self._start()

    def _start(self) -> socket.socket:
        self._before_forking()
        ours, theirs = wire.pair()
        if os.fork() == 0:
            leave_the_launcher([theirs.fileno()])
            _serve(theirs, self._work)
        theirs.close()
        return ours

    def front(self) -> socket.socket:
        """The way to a new one: it is sent the client's message, with the client's socket and descriptors."""
        ours, theirs = wire.pair()
        with theirs:
            try:
                wire.send(self._orders, ("front",), [theirs.fileno()])
            except OSError:  # it was killed
                self._orders.close()
                self._orders = self._start()
                wire.send(self._orders, ("front",), [theirs.fileno()])
        return ours

    def close(self) -> None:
        self._orders.close()


def _serve(orders: socket.socket, work: Front) -> NoReturn:
    """Until the launcher is gone. Whatever is loaded here is there in all fronts that come after."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        loaded = False
        while True:
            if not loaded and not wire.readable(orders, _QUIET_S):
                loaded = True
                with contextlib.suppress(Exception):
                    work.load()  # what is wrong here is told when it is done in earnest
                gc.collect()
                gc.freeze()
            _, fds = wire.receive(orders)
            if os.fork() == 0:
                try:
                    leave_the_launcher(fds)
                    _wait(socket.socket(fileno=fds[0]), work)
                finally:
                    os._exit(1)
            for fd in fds:
                os.close(fd)
    finally:
        os._exit(0)


def _wait(orders: socket.socket, front: Front) -> NoReturn:
    """In a process of its own: until a client comes, then until its work is done."""
    code = 125
    with contextlib.suppress(Exception):
        front.rehearse()  # what is wrong here is told when it is done in earnest
    try:
        message, (client_fd, *fds) = wire.receive(orders)
    except BaseException:
        os._exit(0)  # nobody needs us any more
    client = socket.socket(fileno=client_fd)
    try:
        _, argv, directory, environment, umask = message
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        for fd in fds:
            os.close(fd)
        os.umask(umask)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        outputs.use()
        os.chdir(directory)
        code = front.serve(argv, client)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 125
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(OSError):
            while client.recv(64, socket.MSG_DONTWAIT):
                pass  # signals that nobody read: the kernel would throw our answer away with them
        with contextlib.suppress(OSError):
            client.send(b"exit %d" % code)
        os._exit(code & 0xFF)
