"""Redirected connections, as they are served outside: by name or address, judged, passed on, refused in the client's own language.

Where a connection was meant to go is the kernel's to say, and here the test's; `tests/linux/test_redirect.py` has the kernel's word.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from conftest import eventually
from elsewhere.linux.redirect import original_destination
from elsewhere.network import redirected as module
from elsewhere.network import rules as policy
from elsewhere.network.answers import Denied
from elsewhere.network.dialling import Resolver
from elsewhere.network.redirected import Redirected
from elsewhere.network.resolving import Book
from elsewhere.network.rules import Rules, Verdict, parse
from elsewhere.network.serving import Patience
from elsewhere.network.upstream import Server, Upstream
from proxied import LOOPBACK, Origin, everything, exactly, origin, read_head

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Ways:
    """`rules` may be changed at any time; `meant` is where the next connections were meant to go."""

    loop: asyncio.AbstractEventLoop
    listener: socket.socket
    rules: Rules
    book: Book = field(default_factory=Book)
    meant: tuple[str, int] = ("192.0.2.1", 443)
    broken: bool = False
    denied: list[Denied] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    served: Redirected = field(init=False)

    def decide(self, host: str, port: int) -> Verdict:
        if self.broken:
            raise RuntimeError
        return policy.decide(self.rules, host, port, "calm-otter")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def to(self, host: str, port: int) -> socket.socket:
        """A connection that was meant for this host: by the made-up address of a name, or an address as it is."""
        self.meant = (host if host[0].isdigit() else self.book.address_for(host)), port
        return socket.create_connection(self.listener.getsockname(), timeout=30)

    def change(self, rules: Rules) -> int:
        async def changed() -> int:
            self.rules = rules
            return self.served.recheck()

        return int(self.run(changed()))

    def connections(self) -> int:
        async def counted() -> int:
            return self.served.connections

        return int(self.run(counted()))


@contextlib.contextmanager
def ways(
    monkeypatch: pytest.MonkeyPatch,
    *allow: str,
    lookup: Callable[[str, int], Sequence[str]] = lambda _host, _port: [LOOPBACK],
    upstream: Upstream | None = None,
    most: int = 300,
) -> Iterator[Ways]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    resolver = Resolver(lookup, seconds=2.0)
    with socket.create_server((LOOPBACK, 0), backlog=512) as listener:
        found = Ways(loop, listener, Rules(allow=tuple(map(parse, allow)), presets=()))
        monkeypatch.setattr(module, "original_destination", lambda _sock: found.meant)
        loop.set_exception_handler(lambda _loop, context: found.told.append(context["message"]))

        async def start() -> "asyncio.Task[None]":
            found.served = Redirected(
                listener,
                found.decide,
                found.book,
                resolver=resolver.share(),
                upstream=upstream,
                observe=found.denied.append,
                sandbox="calm-otter",
                most=most,
                patience=Patience(linger=1.0),
            )
            return asyncio.create_task(found.served.serve())

        task = found.run(start())

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert found.served.connections == 0

        try:
            yield found
        finally:
            found.run(stop())
            resolver.close()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def is_reset(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1)) and False
    except ConnectionResetError:
        return True


def is_turned_away(way: Ways, host: str, port: int) -> bool:
    """At once: perhaps even before the client knows that it is connected."""
    try:
        with way.to(host, port) as sock:
            return is_reset(sock)
    except ConnectionResetError:
        return True


def echo(sock: socket.socket, server: Origin) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


def test_a_name_is_reached_by_its_made_up_address_and_the_way_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4 << 20
    with (
        origin(echo) as server,
        ways(monkeypatch, f"server.test:{server.port}") as way,
        way.to("server.test", server.port) as sock,
    ):

        def send() -> None:
            sock.sendall(b"x" * size)
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        assert exactly(sock, size) == b"x" * size
        assert sock.recv(1) == b""
        sender.join()
        assert way.denied == []


def test_a_server_that_speaks_first_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        origin(lambda sock, _: sock.sendall(b"220 hello")) as server,
        ways(monkeypatch, f"server.test:{server.port}") as way,
        way.to("server.test", server.port) as sock,
    ):
        assert everything(sock) == b"220 hello"


def test_an_address_is_judged_as_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with ways(monkeypatch, "server.test:443") as way, way.to("192.0.2.9", 443) as sock:
        sock.sendall(b"\0")
        assert is_reset(sock)
        assert [(one.host, one.port, one.how) for one in way.denied] == [
            ("192.0.2.9", 443, "elsewhere network calm-otter --allow 192.0.2.9:443")
        ]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9"])
def test_loopback_is_never_the_hosts(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with origin(echo) as server, ways(monkeypatch, f"{address}:{server.port}") as way:
        assert is_turned_away(way, address, server.port)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.5", "169.254.169.254", "192.168.0.1", "::1"])
def test_a_name_does_not_lead_to_the_host_or_its_neighbours(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with ways(monkeypatch, "server.test", lookup=lambda _host, _port: [address]) as way, way.to("server.test", 443) as sock:
        sock.sendall(b"\0")
        assert is_reset(sock)
        assert address in way.denied[0].rule


def test_a_made_up_address_that_nobody_has_is_refused_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with ways(monkeypatch, "198.18.3.3:80") as way, way.to("198.18.3.3", 80) as sock:
        sock.sendall(REQUEST)
        assert everything(sock).startswith(b"HTTP/1.1 403 ")
        assert [(one.host, one.how) for one in way.denied] == [("198.18.3.3", "ask for the address of the name again")]


def test_a_connection_that_was_not_redirected_has_no_destination() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener, socket.create_connection(listener.getsockname()):
        sock, _ = listener.accept()
        with sock, pytest.raises(OSError, match=r"not redirected|No such file|not supported|Protocol not available"):
            original_destination(sock)


# -- refusals -------------------------------------------------------------------------------------------------------------------


def test_a_refusal_in_the_language_of_the_web(monkeypatch: pytest.MonkeyPatch) -> None:
    with ways(monkeypatch) as way:
        for port in (80, 8080):
            with way.to("evil.test", port) as sock:
                for piece in (REQUEST[:7], REQUEST[7:]):
                    sock.sendall(piece)
                said = everything(sock)
            assert said.startswith(b"HTTP/1.1 403 elsewhere refused evil.test")
            assert b"to allow it: elsewhere network calm-otter --allow evil.test" in said.partition(b"\r\n\r\n")[2]
        with way.to("evil.test", 80) as sock:
            sock.sendall(REQUEST.replace(b"GET", b"HEAD"))
            assert everything(sock).endswith(b"\r\n\r\n")


def test_a_refusal_in_the_language_of_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    with ways(monkeypatch) as way, way.to("git.test", 22) as sock:
        sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        greeting, _, packet = everything(sock).partition(b"\r\n")
    assert greeting.startswith(b"SSH-2.0-")
    length, padding, kind, reason, size = struct.unpack_from("!IBBII", packet)
    assert (len(packet), len(packet) % 8, kind, reason) == (4 + length, 0, 1, 11)
    assert padding >= 4
    assert packet[14 : 14 + size].endswith(b"elsewhere network calm-otter --allow git.test:22")
    assert len(packet) == 14 + size + 4 + padding


def test_a_refusal_in_the_language_of_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with ways(monkeypatch) as way, way.to("evil.test", 443) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert everything(sock) == b"\x15\x03\x01\x00\x02\x02\x31"


def test_a_refusal_in_the_language_of_postgresql(monkeypatch: pytest.MonkeyPatch) -> None:
    with ways(monkeypatch) as way, way.to("db.test", 5432) as sock:
        for wish in (b"\x00\x00\x00\x08\x04\xd2\x16\x30", b"\x00\x00\x00\x08\x04\xd2\x16\x2f"):
            sock.sendall(wish)
            assert exactly(sock, 1) == b"N"
        sock.sendall(b"\x00\x00\x00\x0d\x00\x03\x00\x00user\0")
        said = everything(sock)
    assert (said[:1], struct.unpack_from("!I", said, 1)[0]) == (b"E", len(said) - 1)
    assert b"elsewhere network calm-otter --allow db.test:5432" in said


@pytest.mark.parametrize("words", [b"", b"\0\1\2", b"EHLO x\r\n", b"GET"])
def test_whoever_speaks_anything_else_or_nothing_sees_a_reset(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    with ways(monkeypatch) as way, way.to("evil.test", 25) as sock:
        sock.sendall(words)
        assert is_reset(sock)


def test_a_server_that_cannot_be_reached_is_not_called_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = closed.getsockname()[1]
    with ways(monkeypatch, f"server.test:{port}") as way:
        with way.to("server.test", port) as sock:
            sock.sendall(REQUEST)
            assert everything(sock).startswith(b"HTTP/1.1 502 ")
        with way.to("server.test", port) as sock:
            sock.sendall(b"\x16\x03\x01")
            assert is_reset(sock)
        assert way.denied == []


# -- bounds and changes ---------------------------------------------------------------------------------------------------------


def test_rules_that_change_end_what_they_no_longer_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        origin(echo) as server,
        ways(monkeypatch, f"one.test:{server.port}", f"two.test:{server.port}") as way,
        way.to("one.test", server.port) as one,
    ):
        one.sendall(b"x")
        assert exactly(one, 1) == b"x"
        with way.to("two.test", server.port) as two:
            two.sendall(b"x")
            assert exactly(two, 1) == b"x"
            assert way.change(Rules(allow=(parse(f"two.test:{server.port}"),), presets=())) == 1
            assert is_reset(one)
            two.sendall(b"y")
            assert exactly(two, 1) == b"y"


def test_one_too_many_is_turned_away_and_there_is_room_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with origin(echo) as server, ways(monkeypatch, f"server.test:{server.port}", most=2) as way, contextlib.ExitStack() as stack:
        first = [stack.enter_context(way.to("server.test", server.port)) for _ in range(2)]
        for sock in first:
            sock.sendall(b"x")
            assert exactly(sock, 1) == b"x"
        assert is_turned_away(way, "server.test", server.port)
        first[0].close()
        assert eventually(lambda: way.connections() == 1)
        with way.to("server.test", server.port) as sock:
            sock.sendall(b"x")
            assert exactly(sock, 1) == b"x"


def test_a_decision_that_fails_lets_nothing_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with origin(echo) as server, ways(monkeypatch, f"server.test:{server.port}") as way:
        way.broken = True
        assert is_turned_away(way, "server.test", server.port)
        assert way.told == ["a connection could not be judged"]
        way.broken = False
        with way.to("server.test", server.port) as sock:
            sock.sendall(b"x")
            assert exactly(sock, 1) == b"x"


def test_behind_the_hosts_own_proxy_the_name_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def tunnels(sock: socket.socket, server: Origin) -> None:
        server.heads.append(read_head(sock))
        sock.sendall(b"HTTP/1.1 200 Fine\r\n\r\nfirst words")

    with origin(tunnels) as proxy:
        upstream = Upstream(tunnel=Server(LOOPBACK, proxy.port, "Basic secret"))
        with ways(monkeypatch, "server.test:22", upstream=upstream) as way, way.to("server.test", 22) as sock:
            assert everything(sock) == b"first words"
        assert proxy.heads[0].startswith(b"CONNECT server.test:22 ")
