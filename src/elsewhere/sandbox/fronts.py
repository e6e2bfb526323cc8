"""Fronts: processes that wait, with everything loaded and rehearsed, to do one command line's work on its client's behalf."""

import contextlib
import os
import socket
import sys
import traceback
from typing import NoReturn, Protocol

from elsewhere.sandbox import wire

__all__ = ["Front", "wait"]


class Front(Protocol):
    """The command line, which this floor does not know."""

    def rehearse(self) -> None:
        """Do what every command line does, without effect."""

    def serve(self, argv: list[str], client: socket.socket) -> int:
        """One command line, on the descriptors, in the directory and with the environment of this process: its exit code."""


def wait(orders: socket.socket, front: Front) -> NoReturn:
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
        for number, mode in enumerate("rww"):
            lines = 1 if number == 2 else -1  # remarks come at once, between what the command says
            stream = open(number, mode, lines, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
            setattr(sys, ("stdin", "stdout", "stderr")[number], stream)
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
            client.send(b"exit %d" % code)
        os._exit(code & 0xFF)
