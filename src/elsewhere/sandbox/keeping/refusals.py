"""How a keeper hears of what was refused to the commands that run: by the filter of system calls, which asks us and is told to
refuse, and by somebody outside (the network service), who sends a packet for each."""

import errno
import select
import socket

from elsewhere.linux import notifications
from elsewhere.sandbox.keeping.work import Work

__all__ = ["Refusals"]

_LONGEST = 512


class Refusals:
    def __init__(self, poll: select.poll, work: Work) -> None:
        self._poll = poll
        self._work = work
        self._calls = -1
        self._told: socket.socket | None = None

    def of_the_filter(self, listener: int) -> None:
        """System calls that it refuses are asked of us, and we refuse them: so we know which they were."""
        self._calls = listener
        self._poll.register(listener, select.POLLIN)

    def of_somebody_outside(self, told: socket.socket) -> None:
        self._forget()
        told.setblocking(False)
        self._told = told
        self._poll.register(told.fileno(), select.POLLIN)

    def hears(self, fd: int) -> None:
        if fd == self._calls:
            self._refuse()
        elif self._told is not None and fd == self._told.fileno():
            self.catch_up()

    def _refuse(self) -> None:
        asked = notifications.read(self._calls)
        if asked is None:
            return
        command = self._work.whose(asked.pid)  # once it has its answer it may be gone
        notifications.refuse(self._calls, asked, errno.EPERM)
        self._work.note(command, f"{notifications.explain(asked.number).kind}:{notifications.name(asked.number)}")

    def catch_up(self) -> None:
        """All that was told until now."""
        while self._told is not None:
            try:
                what = self._told.recv(_LONGEST).decode("ascii", "replace")
            except BlockingIOError:
                return
            except OSError:
                what = ""
            if not what:
                self._forget()
                return
            self._work.note_for_all(what)

    def _forget(self) -> None:
        if self._told is not None:
            self._poll.unregister(self._told.fileno())
            self._told.close()
            self._told = None
