"""Sockets of a sandbox's network, for whoever is outside of it: a keeper makes them in there and hands them out.

    order                    answer
    ports                    "ports NAME …", each with its descriptor: those that were made with the network
    listen ADDRESS PORT      "listen" with a new socket that listens there | "refused ERRNO"
    listen-at PATH           "listen-at" with a new Unix socket that listens there | "refused ERRNO"
    socket FAMILY            "socket" with a new one that leads nowhere yet | "refused ERRNO"

A socket stays in the network in which it was made, whoever has it.
"""

import errno
import os
import socket
import stat
from typing import Any

__all__ = ["ORDERS", "Ports"]

ORDERS = ("ports", "listen", "listen-at", "socket")
_BACKLOG = 128


class Ports:
    def __init__(self, made: dict[str, socket.socket]) -> None:
        self._made = made

    def answer(self, peer: socket.socket, message: tuple[Any, ...]) -> None:
        word = message[0]
        if word == "ports":
            if self._made:
                socket.send_fds(peer, [" ".join(("ports", *self._made)).encode()], [one.fileno() for one in self._made.values()])
            else:
                peer.send(b"ports")
            return
        try:
            made = self._new(word, message[1:])
        except OSError as error:
            peer.send(b"refused %d" % (error.errno or 0))
            return
        with made:
            socket.send_fds(peer, [word.encode()], [made.fileno()])

    def _new(self, word: str, about: tuple[Any, ...]) -> socket.socket:
        if word == "socket":
            return socket.socket(about[0], socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        family = socket.AF_UNIX if word == "listen-at" else socket.AF_INET6 if ":" in about[0] else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            if word == "listen-at":
                _bind_at(made, about[0])
            else:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made.bind(about)
            made.listen(_BACKLOG)
        except BaseException:
            made.close()
            raise
        return made


def _bind_at(made: socket.socket, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, path)  # what covers a socket of the host, too
        if _is_left_over(path):
            os.unlink(path)
    made.bind(path)
    os.chmod(path, 0o666)  # it is for everybody inside


def _is_left_over(path: str) -> bool:
    """Of an earlier life of the sandbox, or of reality: a socket that nobody listens at."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED
