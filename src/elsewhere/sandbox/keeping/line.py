"""The line to a keeper: how whoever may enter a sandbox's directory finds it, asks it, and sees it end.

    sandboxes/<sandbox-id>/keeper      the keeper's socket, for as long as it lives

What comes back was written by a process that lives in the sandbox: plain words, read with suspicion.
"""

import contextlib
import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from elsewhere.clock import monotonic
from elsewhere.errors import Broken, InUse, NotFound, UsageError
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.keeping.processes import WINDOW
from elsewhere.sandbox.keeping.spec import PROTOCOL
from elsewhere.sandbox.records import record
from elsewhere.values import dataclass

__all__ = ["PROTOCOL", "WINDOW", "Line", "Process", "Usage", "bind", "connect", "wait"]

_FILE = "keeper"
_PATIENCE_S = 10.0
_OPENING_S = 10.0
_LEAVING_S = 0.25
_MOST_PROCESSES = 100_000
_MOST_PORTS = 8


def bind(listener: socket.socket, directory: str) -> None:
    """Give a socket its place in a sandbox's directory, by way of a descriptor: a socket's own path must be short."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_FILE, dir_fd=fd)
        listener.bind(f"/proc/self/fd/{fd}/{_FILE}")
        os.chmod(_FILE, 0o600, dir_fd=fd)
    finally:
        os.close(fd)


def connect(directory: str) -> "Line | None":
    """None: nobody answers there. A keeper that holds its lock and does not listen is about to."""
    deadline = monotonic() + _OPENING_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(_PATIENCE_S)
        try:
            fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{fd}/{_FILE}")
            finally:
                os.close(fd)
            return Line(sock, os.path.basename(directory))
        except OSError as error:
            sock.close()
            if not isinstance(error, ConnectionRefusedError) or monotonic() > deadline or not record.is_held(directory):
                return None
        time.sleep(0.001)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a sandbox; its numbers are those inside. `request` is what it came from, if it still says so."""

    pid: int
    parent: int
    state: str
    cpu_ticks: int
    started_ticks: int
    rss_kib: int
    request: str | None
    command: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox uses, as its keeper sees it; None is what nobody can tell on this host."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    cpu_s: float | None
    processes: int | None
    processes_peak: int | None
    disk_bytes: int | None
    written_bytes: int | None
    denials: int | None = None


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


class Line:
    """One connection to a keeper. Commands are started on `sock` (see `commands.py`); everything else is asked here."""

    def __init__(self, sock: socket.socket, sandbox_id: str) -> None:
        self.sock = sock
        self._id = sandbox_id

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def pid(self) -> int:
        """The keeper's, as numbered here: it called `listen` itself, so the kernel names it as our peer."""
        pid, _, _ = struct.unpack("iII", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    def version(self) -> tuple[str, str]:
        """Of the program that the keeper was started from, and of the orders that it understands."""
        words = self._ask(("hello",)).split()
        if len(words) != 3 or words[0] != "keeper":
            raise self._nonsense(" ".join(words))
        return words[1], words[2]

    def processes(self) -> list[Process]:
        self._send(("processes",))
        found: list[Process] = []
        while (packet := self._receive(64 * 1024)[0]) != "." and len(found) < _MOST_PROCESSES:
            found += [self._process(text) for text in packet.splitlines()]
        return found

    def _process(self, text: str) -> Process:
        try:
            pid, parent, state, ticks, started, rss, request, command = text.split(" ")
            raw = b"" if command == "-" else bytes.fromhex(command)
            words = raw.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "surrogateescape")
            return Process(
                int(pid), int(parent), state, int(ticks), int(started), int(rss), None if request == "-" else request, words
            )
        except ValueError as error:
            raise self._nonsense(text[:200]) from error

    def usage(self, *, measure: bool = True) -> Usage:
        """Without `measure` nobody goes through its files: the disk is as it was when it was last looked at."""
        words = self._ask(("usage", measure)).split(" ")
        if len(words) not in (8, 9) or words[0] != "usage":
            raise self._nonsense(" ".join(words)[:200])
        try:
            memory, peak, cpu, *others = (None if word == "-" else float(word) for word in words[1:])
            return Usage(_whole(memory), _whole(peak), cpu, *map(_whole, others))
        except (ValueError, OverflowError) as error:
            raise self._nonsense(" ".join(words)[:200]) from error

    def kill(self, pid: int, number: int) -> None:
        self._done(self._ask(("kill", pid, number)), f"process {pid}")

    def cancel(self, request: str) -> None:
        self._done(self._ask(("cancel", request)), f"request {request!r}")

    def expire(self, seconds: float | None) -> None:
        self._done(self._ask(("expire", seconds)), "the lifetime")

    def root(self) -> int:
        """A descriptor of the sandbox's root directory, good for looking things up below it and nothing else."""
        return self._descriptor("root")

    def layers(self) -> int | None:
        """A descriptor of the layers where they do not lie in the sandbox's directory."""
        try:
            return self._descriptor("layers")
        except NotFound:
            return None

    def ports(self) -> dict[str, int]:
        """Copies of the sockets that were made with its network, by name (`linux/network.py`)."""
        self._send(("ports",))
        words, fds = self._receive(count=_MOST_PORTS)
        names = words.split()
        if names[:1] == ["ports"] and len(fds) == len(names) - 1:
            return dict(zip(names[1:], fds, strict=True))
        raise self._wrong(words, fds, "network")

    def listen(self, address: str, port: int) -> int:
        """A new socket that listens there, in its network."""
        return self._descriptor("listen", address, port)

    def listen_at(self, path: str) -> int:
        """A new Unix socket that listens at that path of its root."""
        return self._descriptor("listen-at", path)

    def socket(self, family: int) -> int:
        """A new one of its network, which whoever has it can connect."""
        return self._descriptor("socket", family)

    def hear(self, told: int) -> None:
        """Hand it a socket on which it is told what was refused to the commands that run."""
        self._send(("hear",), [told])
        words, _ = self._receive()
        self._done(words, "denials")

    def finish(self, grace: float) -> None:
        """Ask everything in it to end, and wait until nothing of it is left."""
        # Before it is told to go: afterwards its number could be somebody else's.
        watch = os.pidfd_open(self.pid())
        try:
            self._done(self._ask(("finish", grace)), "the sandbox")
            if not wait(watch, grace + _PATIENCE_S):
                signal.pidfd_send_signal(watch, signal.SIGKILL)
                if not wait(watch, _PATIENCE_S):
                    raise InUse(
                        "sandbox_will_not_end",
                        f"the keeper of {self._id!r} did not end within {grace + 2 * _PATIENCE_S:.0f} s",
                        hint="look for a process in state D: elsewhere ps",
                    )
        finally:
            os.close(watch)

    def rest(self, own: int = 1) -> bool:
        """Ask it to end if nothing at all runs in it, and wait for that; False: see `will_rest`."""
        with self.will_rest(own) as watch:
            if watch >= 0 and not wait(watch):
                raise InUse("sandbox_will_not_end", f"the keeper of {self._id!r} does not end", hint="try again later")
            return watch >= 0

    @contextlib.contextmanager
    def will_rest(self, own: int = 1) -> Iterator[int]:
        """Ask it to end if nothing at all runs in it. From then on nothing in there is changed any more, even if the keeper takes
        another moment to go: a descriptor to wait for that (`wait`). Below 0: something runs, or somebody else has a connection
        to it (the caller has `own`), by which it could be written to, and does not go within a moment."""
        watch = os.pidfd_open(self.pid())
        try:
            words = self._ask(("rest", own))
            deadline = monotonic() + _LEAVING_S
            while words == f"refused {errno.EAGAIN}" and monotonic() < deadline:
                time.sleep(0.001)
                words = self._ask(("rest", own))
            if words in (f"refused {errno.EBUSY}", f"refused {errno.EAGAIN}"):
                yield -1
                return
            self._done(words, "the sandbox")
            yield watch
        finally:
            os.close(watch)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[int]:
        """While nothing in it goes on, and nothing new is started; the number of processes that were stopped for it."""
        words = self._ask(("freeze",)).split()
        if len(words) != 2 or words[0] != "frozen" or not words[1].isdigit():
            self._done(" ".join(words), "the sandbox")
            raise self._nonsense(" ".join(words))
        try:
            yield int(words[1])
        finally:
            self._done(self._ask(("thaw",)), "the sandbox")

    # -- packets ----------------------------------------------------------------------------------------------------------------

    def _send(self, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        try:
            wire.send(self.sock, message, tuple(fds))
        except OSError as error:
            raise self._gone() from error

    def _receive(self, size: int = 4096, count: int = 1) -> tuple[str, list[int]]:
        try:
            data, fds = wire.receive_raw(self.sock, size, count)
        except OSError as error:
            raise self._gone() from error
        if not data:
            raise self._gone()
        return data.decode("ascii", "replace"), fds

    def _ask(self, message: tuple[Any, ...]) -> str:
        self._send(message)
        words, fds = self._receive()
        for fd in fds:
            os.close(fd)
        return words

    def _descriptor(self, word: str, *about: object) -> int:
        self._send((word, *about))
        words, fds = self._receive()
        if words == word and len(fds) == 1:
            return fds[0]
        raise self._wrong(words, fds, word)

    def _wrong(self, words: str, fds: list[int], what: str) -> Broken:
        for fd in fds:
            os.close(fd)
        self._done(words, what)
        return self._nonsense(words)

    def _done(self, words: str, what: str) -> None:
        if words == "done":
            return
        refused, _, number = words.partition(" ")
        if refused != "refused" or not number.isdigit():
            raise self._nonsense(words)
        if int(number) in (errno.ESRCH, errno.ENOENT):
            raise NotFound("process_not_found", f"there is no {what} in {self._id!r}", hint=f"elsewhere ps {self._id}")
        raise UsageError("keeper_refused", f"{what} in {self._id!r}: {os.strerror(int(number))}")

    def _gone(self) -> Broken:
        return Broken("sandbox_gone", f"the sandbox {self._id!r} is not running any more", hint=f"elsewhere start {self._id}")

    def _nonsense(self, words: str) -> Broken:
        return Broken("keeper_nonsense", f"the keeper of {self._id!r} answered {words!r}")


def wait(watch: int, seconds: float = _PATIENCE_S) -> bool:
    """Whether the process behind a descriptor has ended, and everything in its process namespace with it."""
    return wire.readable(watch, seconds)
