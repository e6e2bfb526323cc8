"""The launcher's line to the network service: sandboxes that run are told to it, or kept until it is needed.

Not here: how the service is found and started, and what it understands (`calling.py`).
"""

import contextlib
import errno
import fcntl
import os
import select
import socket
import sys
from typing import Any

from elsewhere.clock import monotonic
from elsewhere.errors import ElsewhereError
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.networking.calling import close_all, is_held, reached, see
from elsewhere.sandbox.records import record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Switchboard"]

_QUICK_S, _PAUSE_S = 5.0, 10.0
_PARTING_S, _MOST_PARTING = 1.0, 64
_LARGEST_QUESTION = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Add:
    """What the service is told of a sandbox, with the keeper's pidfd and its ports."""

    message: tuple[Any, ...]
    held: list[int]


class Switchboard:
    """Nothing here waits, and nothing here fails because the service is dead.

    Most commands never use the network: while there is no service, sandboxes are kept here, and one is started when somebody
    inside connects for the first time, or when we leave before they do. If it does not start, whoever connects is told so, and
    nobody waits for what does not come; now and then it is tried again."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._epoll = select.epoll()
        self._line: socket.socket | None = None
        self._sent = 0
        self._waiting: list[_Add] = []
        self._kept: dict[int, _Add] = {}
        self._unsure: list[_Add] = []  # nobody has heard of them yet, although they were sent
        self._here = False
        self._parting: list[tuple[float, socket.socket]] = []
        self._missed = False
        self._since = self._not_before = 0.0
        self._quick_deaths = 0

    def fileno(self) -> int:
        """Always the same one; readable when `heard` has something to do."""
        return self._epoll.fileno()

    def add(self, sandbox_id: str, keeper_pid: int, ports: dict[str, int], *, opens: bool = False) -> None:
        """A sandbox that runs; the ports stay the caller's. `opens`: its forwards and published ports, too: nobody will ask."""
        try:
            held = [os.pidfd_open(keeper_pid)]
        except OSError:
            return  # it is gone already, or we cannot have more descriptors: then adopted later
        try:
            held += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0) for fd in ports.values()]
        except OSError:
            close_all(held)
            self._missed = True
            return
        add = _Add(("add", sandbox_id, list(ports), opens), held)
        if self._line is None and not opens and not self._missed:
            self._keep(add)
        else:
            self._waiting.append(add)
            self._send()

    def heard(self) -> None:
        """To be called when there is something to read, and now and then: a service that went without having seen everything is
        followed by another one, which looks for itself what runs."""
        self._part(monotonic() - _PARTING_S)
        for fd, _ in self._epoll.poll(0):
            if self._line is not None and fd == self._line.fileno():
                self._take()
            elif fd in self._kept:
                self._stir(self._kept[fd], fd)
        if self._missed or self._waiting:
            self._send()

    def revive_if_died(self) -> None:
        """At the start: for the sandboxes that still run, if whoever looked after them was killed."""
        if not is_held(self._state) and any(record.is_held(self._state.sandbox(one)) for one in self._state.sandbox_ids()):
            self._missed = True
            self._send()

    def close(self) -> None:
        """Sandboxes that live on are handed over."""
        if any(not wire.readable(add.held[0]) for add in self._kept.values()):
            self._hand_over()
        for add in {*self._waiting, *self._kept.values()}:
            close_all(add.held)
        self._waiting.clear()
        self._kept.clear()
        self._part(monotonic())
        self._hang_up()
        self._epoll.close()

    # -- while there is no service ----------------------------------------------------------------------------------------------

    def _keep(self, add: _Add) -> None:
        for fd in add.held:
            self._kept[fd] = add
            self._epoll.register(fd, select.EPOLLIN)

    def _stir(self, add: _Add, fd: int) -> None:
        """The keeper has ended, or somebody inside connects."""
        if fd == add.held[0]:
            self._let_go(add)
            close_all(add.held)
        elif monotonic() < self._not_before:
            self._turn_away(fd)
        else:
            self._hand_over()

    def _let_go(self, add: _Add) -> None:
        for fd in add.held:
            del self._kept[fd]
            self._epoll.unregister(fd)

    def _hand_over(self) -> None:
        self._take_back()
        self._send()

    def _take_back(self) -> None:
        for add in dict.fromkeys(self._kept.values()):
            self._let_go(add)
            self._waiting.append(add)

    # -- while there can be none ------------------------------------------------------------------------------------------------

    def _turn_away(self, fd: int) -> None:
        """Whoever waits there."""
        sock = socket.socket(fileno=fd)
        try:
            sock.setblocking(False)
            for _ in range(_MOST_PARTING):
                if sock.type == socket.SOCK_DGRAM:
                    question, sender = sock.recvfrom(_LARGEST_QUESTION)
                    if _is_question(question):
                        sock.sendto(_no_answer(question), sender)
                else:
                    self._tell(sock.accept()[0])
        except OSError:
            pass  # nobody is left, or they do not listen
        finally:
            sock.detach()

    def _tell(self, caller: socket.socket) -> None:
        """Closed at once, what it still says would take our answer away again: it has a moment."""
        caller.setblocking(False)
        with contextlib.suppress(OSError):
            caller.send(_sorry(self._state))
            caller.shutdown(socket.SHUT_WR)
            caller.recv(1 << 16)
        self._parting.append((monotonic(), caller))
        while len(self._parting) > _MOST_PARTING:
            self._parting.pop(0)[1].close()

    def _part(self, before: float) -> None:
        while self._parting and self._parting[0][0] <= before:
            self._parting.pop(0)[1].close()

    # -- the line ---------------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """What waits, as far as it goes without waiting."""
        for _ in range(2):
            if self._line is None and not self._open():
                return
            assert self._line is not None
            try:
                if self._missed:
                    wire.send(self._line, ("adopt",))
                    self._missed = False
                while self._waiting:
                    add = self._waiting[0]
                    wire.send(self._line, add.message, add.held)
                    self._sent += 1
                    self._unsure.append(self._waiting.pop(0))
                if self._here:
                    self._sure()
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):
                    break  # it has enough to do
                self._lost()
                continue
            break
        if self._line is not None:
            self._epoll.modify(self._line, select.EPOLLIN | (select.EPOLLOUT if self._waiting else 0))

    def _open(self) -> bool:
        if monotonic() < self._not_before:
            self._drop()
            return False
        try:
            line, started = reached(self._state, direct=True)
        except (OSError, ElsewhereError) as error:
            print(f"the network service cannot be reached: {error}", file=sys.stderr, flush=True)
            self._not_before = monotonic() + _PAUSE_S
            self._drop()
            return False
        line.setblocking(False)
        self._line, self._sent, self._here = line, 0, False
        self._take_back()
        if started:
            self._since, self._missed = monotonic(), False  # it looks for itself what runs
        self._epoll.register(line, select.EPOLLIN)
        return True

    def _drop(self) -> None:
        """What nobody can be told: whoever comes next finds it by its record. Until then it is kept, to be turned away."""
        self._missed = True
        for add in self._waiting:
            self._keep(add)
        self._waiting.clear()

    def _sure(self) -> None:
        for add in self._unsure:
            close_all(add.held)
        self._unsure.clear()

    def _take(self) -> None:
        while self._line is not None:
            try:
                message, fds = wire.receive(self._line)
            except BlockingIOError:
                return
            except (OSError, EOFError, ValueError, TypeError):
                message, fds = ("died",), []
            close_all(fds)
            if message[0] == "here":
                self._here = True
                self._sure()
            elif message[0] == "bye" and message[1] == self._sent:
                self._hang_up()
            elif message[0] == "bye":
                self._missed = True
                self._hang_up()
            else:
                self._lost()

    def _lost(self) -> None:
        """It went without a word. Whoever is killed is followed at once; what cannot live is not tried all the time."""
        self._missed = True
        self._quick_deaths = self._quick_deaths + 1 if monotonic() - self._since < _QUICK_S else 0
        if self._quick_deaths > 1:
            self._not_before = monotonic() + _PAUSE_S
        for add in self._unsure:
            self._keep(add)
        self._unsure.clear()
        self._hang_up()

    def _hang_up(self) -> None:
        self._sure()
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(self._line)
            self._line.close()
            self._line = None


# -- when it does not start -----------------------------------------------------------------------------------------------------


def _sorry(state: State) -> bytes:
    text = f"elsewhere: the network service does not start, {see(state)}"
    plain = "".join(letter if letter.isprintable() else "?" for letter in text).encode("ascii", "replace")
    head = b"HTTP/1.1 503 %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (plain, len(plain) + 1) + plain + b"\n"


def _is_question(question: bytes) -> bool:
    """For a name, by its head; an answer to an answer would never end."""
    return len(question) >= 12 and not question[2] & 0x80


def _no_answer(question: bytes) -> bytes:
    """That whoever should know has failed."""
    return question[:2] + bytes((question[2] | 0x80, question[3] & 0x70 | 2)) + question[4:]
