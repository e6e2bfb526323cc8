"""A proxy on a loop of its own, in a thread, and servers for it to reach: all on loopback, all in the test's own process."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elsewhere.network import rules as policy
from elsewhere.network.answers import Denied
from elsewhere.network.dialling import Resolver
from elsewhere.network.proxy import Patience, Proxy
from elsewhere.network.rules import Rules, Verdict
from elsewhere.network.upstream import Upstream

LOOPBACK = "127.0.0.1"
_PATIENCE = Patience(linger=1.0)


@dataclass
class Proxied:
    """`rules` may be changed at any time."""

    loop: asyncio.AbstractEventLoop
    listener: socket.socket
    rules: Rules
    judge: Callable[[str, int], Verdict] | None = None  # in place of the rules
    proxy: Proxy = field(init=False)
    denied: list[Denied] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.listener.getsockname()[1]}"

    def decide(self, host: str, port: int) -> Verdict:
        return self.judge(host, port) if self.judge else policy.decide(self.rules, host, port, "calm-otter")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def change(self, rules: Rules) -> int:
        async def changed() -> int:
            self.rules = rules
            return self.proxy.recheck()

        return int(self.run(changed()))

    def connections(self) -> int:
        async def counted() -> int:
            return self.proxy.connections

        return int(self.run(counted()))

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=30)

    def ask(self, request: bytes) -> bytes:
        """All that comes back until the proxy closes."""
        with self.connect() as sock:
            sock.sendall(request)
            return everything(sock)

    def tunnel(self, host: str, port: int) -> socket.socket:
        sock = self.connect()
        sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        said = b""
        while not said.endswith(b"\r\n\r\n"):
            said += sock.recv(1)
        assert said.startswith(b"HTTP/1.1 200 "), said
        return sock


def everything(sock: socket.socket) -> bytes:
    found = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            found += data
    return bytes(found)


def exactly(sock: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (data := sock.recv(size - len(found))):
        found += data
    return bytes(found)


@contextlib.contextmanager
def proxied(
    *allow: str,
    deny: Sequence[str] = (),
    lookup: Callable[[str, int], Sequence[str]] = lambda _host, _port: [LOOPBACK],
    upstream: Upstream | None = None,
    most: int = 300,
    patience: Patience = _PATIENCE,
) -> Iterator[Proxied]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    rules = Rules(allow=tuple(map(policy.parse, allow)), deny=tuple(map(partial(policy.parse, deny=True), deny)), presets=())
    with socket.create_server((LOOPBACK, 0), backlog=512) as listener:
        found = Proxied(loop, listener, rules)
        resolver = Resolver(lookup, seconds=2.0)

        async def start() -> "asyncio.Task[None]":
            found.proxy = Proxy(
                listener,
                found.decide,
                resolver=resolver.share(),
                upstream=upstream,
                observe=found.denied.append,
                most=most,
                patience=patience,
                sandbox="calm-otter",
            )
            return asyncio.create_task(found.proxy.serve())

        task = found.run(start())

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert found.proxy.connections == 0

        try:
            yield found
        finally:
            found.run(stop())
            resolver.close()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


@dataclass
class Origin:
    port: int
    errors: list[BaseException] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)


@contextlib.contextmanager
def origin(handle: Callable[[socket.socket, Origin], None]) -> Iterator[Origin]:
    """A server whose every connection is handled in a thread; what goes wrong there fails the test."""
    with socket.create_server((LOOPBACK, 0), backlog=512) as listener:
        found = Origin(listener.getsockname()[1])
        threads: list[threading.Thread] = []

        def one(sock: socket.socket) -> None:
            sock.settimeout(60)
            try:
                with sock:
                    handle(sock, found)
            except BaseException as error:
                found.errors.append(error)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    threads.append(threading.Thread(target=one, args=(sock,)))
                    threads[-1].start()

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield found
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join(60)
    assert not found.errors, found.errors


def read_head(sock: socket.socket) -> bytes:
    """Up to the empty line, byte by byte; empty at the end of the connection."""
    found = b""
    while not found.endswith(b"\r\n\r\n"):
        data = sock.recv(1)
        if not data:
            return b""
        found += data
    return found


def hello(sock: socket.socket, server: Origin) -> None:
    """Answers every request of a connection, and keeps what it was asked."""
    while head := read_head(sock):
        server.heads.append(head)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
