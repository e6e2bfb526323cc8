"""The proxy: what is allowed passes whole, all else is refused and explained, and nobody can use up more than his share."""

import asyncio
import contextlib
import gc
import hashlib
import http.client
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence

import pytest

from elsewhere.network import dialling, outward
from elsewhere.network.proxy import Patience
from elsewhere.network.rules import Rules, Verdict, parse
from elsewhere.network.upstream import Server, Upstream
from proxied import LOOPBACK, Origin, Proxied, everything, exactly, hello, origin, proxied, read_head

PIECE = b"0123456789abcdef" * 4096  # 64 KiB
LARGE = 64 << 20


def get(host: str, port: int, path: str = "/", more: str = "Connection: close\r\n") -> bytes:
    return f"GET http://{host}:{port}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n{more}\r\n".encode()


# -- requests -------------------------------------------------------------------------------------------------------------------


def test_an_allowed_request_passes_without_what_is_about_the_connection() -> None:
    with origin(hello) as server, proxied(f"server.test:{server.port}") as proxy:
        more = "Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nProxy-Authorization: Basic eA==\r\nProxy-Connection: close\r\nTE: trailers\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nMax-Forwards: 0\r\nX-Kept: Yes\r\n"
        said = proxy.ask(get("server.test", server.port, "/path?query=1", more))
        assert said.startswith(b"HTTP/1.1 200 OK\r\n")
        assert said.endswith(b"\r\n\r\nhello")
        assert b"connection: close" in said.lower()
        first, *lines = server.heads[0].removesuffix(b"\r\n\r\n").split(b"\r\n")
        assert first == b"GET /path?query=1 HTTP/1.1"
        assert sorted(lines) == sorted([f"Host: server.test:{server.port}".encode(), b"X-Kept: Yes"])
    assert proxy.denied == []


def test_a_connection_is_kept_on_both_sides_and_requests_may_follow_at_once() -> None:
    made = []

    def counted(sock: socket.socket, server: Origin) -> None:
        made.append(sock)
        hello(sock, server)

    with origin(counted) as server, proxied(f"server.test:{server.port}") as proxy:
        said = proxy.ask(
            get("server.test", server.port, "/1", "")
            + get("server.test", server.port, "/2", "")
            + get("server.test", server.port, "/3")
        )
        assert said.count(b"200 OK") == 3
        assert [head.split()[1] for head in server.heads] == [b"/1", b"/2", b"/3"]
        assert len(made) == 1


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    def once(sock: socket.socket, server: Origin) -> None:
        server.heads.append(read_head(sock))
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")  # and closes, though it said nothing of it

    with origin(once) as server, proxied(f"server.test:{server.port}") as proxy, proxy.connect() as sock:
        for _ in range(5):
            sock.sendall(get("server.test", server.port, more=""))
            assert read_head(sock).startswith(b"HTTP/1.1 200 ")
            assert exactly(sock, 5) == b"hello"
        assert len(server.heads) == 5


def test_a_kept_connection_is_judged_by_the_rules_of_now() -> None:
    with origin(hello) as server, proxied(f"server.test:{server.port}") as proxy, proxy.connect() as sock:
        sock.sendall(get("server.test", server.port, more=""))
        assert read_head(sock)
        assert exactly(sock, 5) == b"hello"
        proxy.rules = Rules(presets=())
        sock.sendall(get("server.test", server.port, more=""))
        assert everything(sock).startswith(b"HTTP/1.1 403 ")
        assert len(server.heads) == 1


def test_requests_to_several_servers_over_one_connection() -> None:
    with origin(hello) as one, origin(hello) as two, proxied(f"one.test:{one.port}", f"two.test:{two.port}") as proxy:
        said = proxy.ask(get("one.test", one.port, more="") + get("two.test", two.port, more="") + get("one.test", one.port))
        assert said.count(b"200 OK") == 3
        assert (len(one.heads), len(two.heads)) == (2, 1)


def test_a_body_may_be_anything_and_come_with_its_head() -> None:
    content = b"\n\n\r\r\n\r\n\0 GET http://server.test/ HTTP/1.1\n"

    def takes(sock: socket.socket, server: Origin) -> None:
        server.heads.append(read_head(sock))
        assert exactly(sock, len(content)) == content
        sock.sendall(b"HTTP/1.1 204 Fine\r\n\r\n")

    with origin(takes) as server, proxied(f"server.test:{server.port}") as proxy:
        head = get("server.test", server.port, more=f"Content-Length: {len(content)}\r\nConnection: close\r\n").replace(
            b"GET", b"PUT"
        )
        assert proxy.ask(head + content).startswith(b"HTTP/1.1 204 ")
        with proxy.connect() as sock:
            for byte in head + content:
                sock.sendall(bytes([byte]))
            assert everything(sock).startswith(b"HTTP/1.1 204 ")


def test_an_old_client_gets_an_answer_that_it_understands() -> None:
    def chunked(sock: socket.socket, server: Origin) -> None:
        server.heads.append(read_head(sock))
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: x\r\n\r\n")

    with origin(chunked) as server, proxied(f"server.test:{server.port}") as proxy:
        head, _, body = proxy.ask(f"GET http://server.test:{server.port}/ HTTP/1.0\r\n\r\n".encode()).partition(b"\r\n\r\n")
        assert body == b"abcde"
        assert b"chunked" not in head
        head, _, body = proxy.ask(get("server.test", server.port)).partition(b"\r\n\r\n")
        assert b"chunked" in head
        assert body.endswith(b"0\r\n\r\n")


def test_a_head_has_no_body() -> None:
    def about(sock: socket.socket, server: Origin) -> None:
        while head := read_head(sock):
            server.heads.append(head)
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")

    with origin(about) as server, proxied(f"server.test:{server.port}") as proxy:
        request = get("server.test", server.port).replace(b"GET", b"HEAD")
        said = proxy.ask(request)
        assert b"Content-Length: 1000" in said
        assert said.endswith(b"\r\n\r\n")
        refused = proxy.ask(request.replace(b"server.test", b"evil.test"))
        assert refused.startswith(b"HTTP/1.1 403 ")
        assert refused.endswith(b"\r\n\r\n")


def test_a_body_waits_until_the_server_wants_it() -> None:
    def careful(sock: socket.socket, server: Origin) -> None:
        server.heads.append(read_head(sock))
        sock.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        assert exactly(sock, 5) == b"12345"
        sock.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")

    with origin(careful) as server, proxied(f"server.test:{server.port}") as proxy, proxy.connect() as sock:
        sock.sendall(
            get("server.test", server.port, more="Expect: 100-continue\r\nContent-Length: 5\r\n").replace(b"GET", b"PUT")
        )
        assert read_head(sock).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"12345")
        assert read_head(sock).startswith(b"HTTP/1.1 201 ")
        assert b"Expect: 100-continue" in server.heads[0]


def test_a_server_may_answer_before_it_has_read_all() -> None:
    def hasty(sock: socket.socket, server: Origin) -> None:
        read_head(sock)
        sock.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nno!")
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass

    with origin(hasty) as server, proxied(f"server.test:{server.port}") as proxy, proxy.connect() as sock:
        sock.sendall(get("server.test", server.port, more=f"Content-Length: {LARGE}\r\n").replace(b"GET", b"POST"))
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                sock.sendall(PIECE)
        said = everything(sock)
        assert said.startswith(b"HTTP/1.1 413 ")
        assert said.endswith(b"no!")
        assert b"connection: close" in said.lower()


def test_an_answer_that_breaks_off_does_not_look_whole() -> None:
    def half(sock: socket.socket, server: Origin) -> None:
        read_head(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel")

    with origin(half) as server, proxied(f"server.test:{server.port}") as proxy:
        connection = http.client.HTTPConnection(LOOPBACK, proxy.listener.getsockname()[1], timeout=30)
        connection.request("GET", f"http://server.test:{server.port}/")
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            connection.getresponse().read()
        connection.close()


def test_an_answer_that_breaks_off_is_a_reset_to_whom_the_end_of_the_connection_is_the_end() -> None:
    def half(sock: socket.socket, server: Origin) -> None:
        read_head(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nhel")

    with origin(half) as server, proxied(f"server.test:{server.port}") as proxy, proxy.connect() as sock:
        sock.sendall(f"GET http://server.test:{server.port}/ HTTP/1.0\r\n\r\n".encode())
        with pytest.raises(ConnectionResetError):
            list(iter(lambda: sock.recv(1), b""))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "cannot be understood"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "cannot be understood"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "cannot be understood"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", ""),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, "cannot be understood"),
    ],
)
def test_an_answer_that_nobody_understands_is_not_passed_on(answer: bytes, words: str) -> None:
    def nonsense(sock: socket.socket, server: Origin) -> None:
        read_head(sock)
        with contextlib.suppress(ConnectionError):
            sock.sendall(answer)

    with origin(nonsense) as server, proxied(f"server.test:{server.port}") as proxy:
        said = proxy.ask(get("server.test", server.port))
        assert said.startswith(b"HTTP/1.1 502 ")
        assert words.encode() in said
        assert f"server.test:{server.port}".encode() in said


# -- refusals -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "CONNECT"])
def test_a_refusal_says_what_and_why_and_what_to_type(method: str) -> None:
    with proxied("example.org") as proxy:
        if method == "GET":
            said = proxy.ask(get("evil.test", 8443))
        else:
            said = proxy.ask(b"CONNECT evil.test:8443 HTTP/1.1\r\nHost: evil.test:8443\r\n\r\n")
    head, _, body = said.partition(b"\r\n\r\n")
    first, *headers = head.decode("ascii").split("\r\n")
    typed = "elsewhere network calm-otter --allow evil.test:8443"
    assert first == f"HTTP/1.1 403 elsewhere refused evil.test:8443; to allow it: {typed}"
    assert "X-Elsewhere-Denied: evil.test:8443; nothing allows it" in headers
    assert body.decode() == f"elsewhere refused evil.test:8443\nbecause: nothing allows it\nto allow it: {typed}\n"
    assert [(one.host, one.port, one.rule, one.how) for one in proxy.denied] == [("evil.test", 8443, "nothing allows it", typed)]


def test_what_to_type_then_works_at_once() -> None:
    with origin(hello) as server, proxied() as proxy:
        assert proxy.ask(get("server.test", server.port)).startswith(b"HTTP/1.1 403 ")
        proxy.change(Rules(allow=(parse(proxy.denied[0].how.rpartition(" ")[2]),)))
        assert proxy.ask(get("server.test", server.port)).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_is_still_sending_is_told_too() -> None:
    with proxied() as proxy, proxy.connect() as sock:
        sock.sendall(get("evil.test", 80, more="Content-Length: 1000000\r\n").replace(b"GET", b"POST"))
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"x" * 1_000_000)
        assert everything(sock).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "no web server"),
        (b"OPTIONS * HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "no web server"),
        (b"GET https://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 501, "CONNECT"),
        (b"GET ftp://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 501, "ftp"),
        (b"GET example.org HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "none that a proxy"),
        (b"GET http://user:pass@example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "none that a proxy"),
        (b"GET http://example.org\\@evil.test/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "none that a proxy"),
        (b"GET http://example.org/#x HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "none that a proxy"),
        (b"GET http:/// HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "empty"),
        (b"GET http://127.1/ HTTP/1.1\r\nHost: 127.1\r\n\r\n", 400, "read differently"),
        (b"GET http://example.org:0/ HTTP/1.1\r\nHost: example.org:0\r\n\r\n", 400, "port"),
        (b"CONNECT example.org HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "names no port"),
        (b"CONNECT http://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "port"),
        (b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\nContent-Length: 5\r\n\r\nhello", 400, "no body"),
        # Whoever answers these shows the request, with what was added to it on the way.
        (b"TRACE http://example.org/ HTTP/1.1\r\nHost: example.org\r\nMax-Forwards: 0\r\n\r\n", 501, "TRACE is not passed on"),
        (b"trace http://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 501, "trace is not passed on"),
        (b"TRACK http://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 501, "TRACK is not passed on"),
        # Somebody who speaks of something else.
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "without TLS"),
        (b"\x05\x01\x00", 400, "SOCKS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", 400, "no request of HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "no request of HTTP"),
        (b"GET http://example.org/ HTTP/0.9\r\n\r\n", 400, "no request of HTTP"),
        (b"GET  http://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "no request of HTTP"),
        (b"\x00\x00\x00\x08", 400, "no request of HTTP"),
        # Two programs could read these differently.
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "two lengths"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n", 400, "two lengths"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\nabcd", 400, "twice"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nContent-Length: 4, 4\r\n\r\nabcd", 400, "no number"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nContent-Length: +4\r\n\r\nabcd", 400, "no number"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nContent-Length: 0x4\r\n\r\nabcd", 400, "no number"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nContent-Length : 4\r\n\r\nabcd", 400, "understood"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n", 400, "twice"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501, "understood"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: xchunked\r\n\r\n", 501, "understood"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding:\x0bchunked\r\n\r\n", 400, "understood"),
        (b"POST http://example.org/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "HTTP/1.0"),
        (b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\nX: a\r\n b\r\n\r\n", 400, "next line"),
        (b"GET http://example.org/ HTTP/1.1\r\n Host: example.org\r\n\r\n", 400, "next line"),
        (b"GET http://example.org/ HTTP/1.1\nHost: example.org\n\n", 400, "CR LF"),
        (b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\nX: y\r\n\r\n", 400, "CR LF"),
        (b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\nX: a\rY: b\r\n\r\n", 400, "CR LF"),
        (b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\nX: a\0b\r\n\r\n", 400, "understood"),
        (b"GET http://example.org/ HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET http://example.org/ HTTP/1.1\r\nHost: evil.test\r\n\r\n", 400, "Host"),
        (b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\nHost: evil.test\r\n\r\n", 400, "twice"),
        (b"GET http://example.org/ HTTP/1.1\r\nHost: example.org:8080\r\n\r\n", 400, "Host"),
        (b"GET http://example.org:8080/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "Host"),
        (b"GET http://example.org/ HTTP/1.1\r\nHost: example.org, evil.test\r\n\r\n", 400, "host"),
        (b"CONNECT example.org:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n", 400, "Host"),
        (b"POST http://example.org/ HTTP/1.1\r\nHost: example.org\r\nConnection: content-length\r\nContent-Length: 4\r\n\r\nabcd", 400, "Connection"),
        (b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431, "bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_passed_on_for_certain_is_refused(request_: bytes, status: int, words: str) -> None:
    def nobody(host: str, port: int) -> list[str]:
        raise AssertionError(f"{host} was looked up")

    with proxied("example.org", "example.org:8080", "evil.test", lookup=nobody) as proxy:
        said = proxy.ask(request_)
        assert said.startswith(f"HTTP/1.1 {status} ".encode()), said
        assert words.encode() in said
        assert said.count(b"HTTP/1.1 ") == 1 + said.partition(b"\r\n\r\n")[2].count(b"HTTP/1.1 ")
        assert proxy.denied == []


@pytest.mark.parametrize(
    "body", [b"5\r\nabc\r\n0\r\n\r\n", b"zz\r\n", b"5\nabcde\n0\n\n", b"-1\r\n\r\n", b"fffffffffffffffffffff\r\n"]
)
def test_a_body_that_is_badly_framed_ends_the_connection_and_hides_nothing(body: bytes) -> None:
    hidden = b"GET http://server.test/hidden HTTP/1.1\r\n\r\n"

    def quiet(sock: socket.socket, server: Origin) -> None:
        server.heads.append(read_head(sock))
        with contextlib.suppress(ConnectionError):
            while sock.recv(65536):
                pass

    with origin(quiet) as server, proxied(f"server.test:{server.port}") as proxy:
        said = proxy.ask(
            get("server.test", server.port, more="Transfer-Encoding: chunked\r\n").replace(b"GET", b"POST") + body + hidden
        )
        assert said == b"" or said.startswith(b"HTTP/1.1 400 ")
        until(lambda: bool(server.heads))  # the server may notice its connection after the client was answered
    assert len(server.heads) == 1


# -- addresses ------------------------------------------------------------------------------------------------------------------


class Resolving:
    """A resolver that answers something else each time: what rebinding does."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


def test_a_name_that_leads_to_this_machine_is_refused_unless_it_was_named_with_its_port() -> None:
    with origin(hello) as server, proxied("rebind.test", f"*.rebind.test:{server.port}") as proxy:
        for host, port in (("rebind.test", 80), ("a.rebind.test", server.port)):
            for request in (get(host, port), f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n".replace("1.1", "1.0").encode()):
                said = proxy.ask(request)
                assert said.startswith(b"HTTP/1.1 403 ")
                assert f"{host} leads to 127.0.0.1, a loopback address".encode() in said
                assert f"elsewhere network calm-otter --allow {host}:{port}\n".encode() in said
        assert server.heads == []
        proxy.change(Rules(allow=(parse(f"a.rebind.test:{server.port}"),)))
        assert proxy.ask(get("a.rebind.test", server.port)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("answer", ["127.0.0.1", "10.0.0.5", "192.168.1.1", "fd00::5"])
def test_whoever_owns_a_name_of_the_world_does_not_lead_it_home(answer: str) -> None:
    """Not even if it was allowed with its port. What is to be typed then works."""
    with origin(hello) as server, proxied(f"example.org:{server.port}", lookup=Resolving([answer])) as proxy:
        said = proxy.ask(get("example.org", server.port))
        assert said.startswith(b"HTTP/1.1 403 ")
        rule = proxy.denied[0].how.rpartition(" ")[2]
        assert answer in rule
        proxy.change(Rules(allow=(parse(f"example.org:{server.port}"), parse(rule)), presets=()))
        if answer == LOOPBACK:
            assert proxy.ask(get("example.org", server.port)).startswith(b"HTTP/1.1 200 ")
            proxy.change(Rules(allow=(parse(rule),), presets=()))
            assert proxy.ask(get("example.org", server.port)).startswith(b"HTTP/1.1 403 "), "the name needs its own rule"


def test_what_the_machine_names_is_reached_in_its_network_but_not_at_its_loopback() -> None:
    with origin(hello) as server, proxied() as proxy:
        for name, status in (("pypi.example.org", 403), ("localhost", 200), ("127.0.0.1", 200)):
            machine = (parse(f"{name}:{server.port}", why="~/.pip/pip.conf"),)
            proxy.change(Rules(machine=machine))
            assert proxy.ask(get(name, server.port)).startswith(f"HTTP/1.1 {status} ".encode()), name


def test_what_was_judged_is_what_is_connected_to() -> None:
    """The second answer of the resolver would be the attacker's: it is never asked for."""
    lookup = Resolving(["127.0.0.77"], ["127.0.0.1"])
    with origin(hello) as server, proxied(f"rebind.test:{server.port}", lookup=lookup) as proxy:
        assert proxy.ask(get("rebind.test", server.port)).startswith(b"HTTP/1.1 502 ")  # nobody listens there
        assert lookup.asked == ["rebind.test"]
        assert server.heads == []


def test_of_several_addresses_only_those_that_are_allowed_are_tried() -> None:
    lookup = Resolving(["169.254.169.254", "127.0.0.1"])
    with origin(hello) as server, proxied(f"mixed.test:{server.port}", lookup=lookup) as proxy:
        assert proxy.ask(get("mixed.test", server.port)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "answer", ["169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "168.63.129.16", "fd00:ec2::254"]
)
def test_a_name_does_not_lead_to_credentials_even_if_it_was_named(answer: str) -> None:
    with proxied("meta.test:80", lookup=Resolving([answer])) as proxy:
        said = proxy.ask(get("meta.test", 80))
        assert said.startswith(b"HTTP/1.1 403 ")
        assert b"credentials" in said
    assert parse(proxy.denied[0].how.rpartition(" ")[2]).named == "address"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "10.0.0.5", "169.254.169.254", "localhost", "0.0.0.0"]
)
def test_an_address_needs_a_rule_that_names_it(host: str) -> None:
    with origin(hello) as server, proxied("*.example.test") as proxy:
        assert proxy.ask(get(host, server.port)).startswith(b"HTTP/1.1 403 ")
        assert server.heads == []


def test_a_denied_address_is_not_reached_by_any_name() -> None:
    with origin(hello) as server, proxied(f"server.test:{server.port}", deny=["127.0.0.1"]) as proxy:
        said = proxy.ask(get("server.test", server.port))
        assert said.startswith(b"HTTP/1.1 403 ")
        assert b"--deny 127.0.0.1" in said


def test_a_name_that_nobody_knows_is_not_a_denial() -> None:
    def unknown(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with proxied("nobody.test", lookup=unknown) as proxy:
        said = proxy.ask(get("nobody.test", 80))
        assert said.startswith(b"HTTP/1.1 502 ")
        assert b"Name or service not known" in said
        assert proxy.denied == []


def test_a_resolver_that_hangs_is_a_timeout() -> None:
    released = threading.Event()

    def hang(host: str, port: int) -> Sequence[str]:
        released.wait(60)
        return []

    with proxied("slow.test", lookup=hang) as proxy:
        said = proxy.ask(get("slow.test", 80))
        released.set()
        assert said.startswith(b"HTTP/1.1 504 ")


# -- tunnels --------------------------------------------------------------------------------------------------------------------


def echo(sock: socket.socket, server: Origin) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


def test_a_tunnel_passes_whatever_is_spoken() -> None:
    """As a WebSocket does: a frame there, a frame back, at any time, in any bytes."""
    with origin(echo) as server, proxied(f"server.test:{server.port}") as proxy, proxy.tunnel("server.test", server.port) as sock:
        for size in (1, 2, 125, 126, 65535, 65536, 300_000):
            frame = bytes([0x82, size % 256]) + bytes(range(256)) * (size // 256 + 1)
            sender = threading.Thread(target=sock.sendall, args=(frame,))
            sender.start()
            assert exactly(sock, len(frame)) == frame
            sender.join()


def test_what_follows_a_connect_at_once_is_not_lost_and_a_server_may_speak_first() -> None:
    def banner(sock: socket.socket, server: Origin) -> None:
        sock.sendall(b"220 welcome\r\n")
        echo(sock, server)

    with origin(banner) as server, proxied(f"server.test:{server.port}") as proxy, proxy.connect() as sock:
        sock.sendall(f"CONNECT server.test:{server.port} HTTP/1.0\r\n\r\nHELO".encode())
        sock.shutdown(socket.SHUT_WR)
        assert everything(sock) == b"HTTP/1.1 200 Connection established\r\n\r\n220 welcome\r\nHELO"


def test_a_half_closed_tunnel_still_brings_the_answer() -> None:
    def counts(sock: socket.socket, server: Origin) -> None:
        total = 0
        while data := sock.recv(65536):
            total += len(data)
        sock.sendall(str(total).encode())

    with (
        origin(counts) as server,
        proxied(f"server.test:{server.port}") as proxy,
        proxy.tunnel("server.test", server.port) as sock,
    ):
        for _ in range(100):
            sock.sendall(PIECE)
        sock.shutdown(socket.SHUT_WR)
        assert everything(sock) == str(100 * len(PIECE)).encode()


def test_rules_that_change_end_what_they_no_longer_allow() -> None:
    with origin(echo) as one, origin(echo) as two, proxied(f"one.test:{one.port}", f"two.test:{two.port}") as proxy:
        with proxy.tunnel("one.test", one.port) as lost, proxy.tunnel("two.test", two.port) as kept:
            assert proxy.change(Rules(allow=(parse(f"two.test:{two.port}"),), presets=())) == 1
            with contextlib.suppress(ConnectionResetError):
                assert lost.recv(1) == b""
            kept.sendall(b"x")
            assert kept.recv(1) == b"x"
        assert proxy.denied == [], "nobody was refused what they asked for"


def test_a_connection_that_is_being_made_is_judged_by_the_rules_that_hold_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An address was denied while it was connected to: nobody can know of that before."""
    on_the_way, go_on = threading.Event(), threading.Event()

    async def slow(found: Sequence[object], port: int, seconds: float) -> object:
        made = await dialling.connect(found, port, seconds)  # type: ignore[arg-type]
        on_the_way.set()
        await asyncio.to_thread(go_on.wait, 60)
        return made

    monkeypatch.setattr(outward, "connect", slow)
    allow = "server.test:{}"
    with origin(hello) as server, proxied(allow.format(server.port)) as proxy, proxy.connect() as sock:
        sock.sendall(get("server.test", server.port))
        assert on_the_way.wait(60)
        proxy.change(Rules(allow=proxy.rules.allow, deny=(parse(LOOPBACK, deny=True),), presets=()))
        go_on.set()
        assert b"--deny 127.0.0.1" in everything(sock)
        assert server.heads == []


def test_a_decision_that_fails_lets_nobody_through(caplog: pytest.LogCaptureFixture) -> None:
    def broken(host: str, port: int) -> Verdict:
        raise RuntimeError("broken")

    with origin(hello) as server, proxied(f"server.test:{server.port}") as proxy:
        proxy.judge = broken
        assert proxy.ask(get("server.test", server.port)).startswith(b"HTTP/1.1 500 ")
        assert server.heads == []
    assert "RuntimeError: broken" in caplog.text


# -- much, many and slow --------------------------------------------------------------------------------------------------------


def peak_of(work: Callable[[], None]) -> int:
    """Bytes that Python held more at the worst moment, proxy, client and server together."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def sink_and_source(sock: socket.socket, server: Origin) -> None:
    """Takes all of a request's body, and answers with as much."""
    head = read_head(sock).lower()
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    digest, rest = hashlib.sha256(), length
    while rest:
        data = sock.recv(min(rest, 65536))
        digest.update(data)
        rest -= len(data)
    sock.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nX-Digest: {digest.hexdigest()}\r\n\r\n".encode())
    for _ in range(length // len(PIECE)):
        sock.sendall(PIECE)


def test_large_bodies_both_ways_in_little_memory() -> None:
    whole = hashlib.sha256()
    for _ in range(LARGE // len(PIECE)):
        whole.update(PIECE)
    with origin(sink_and_source) as server, proxied(f"server.test:{server.port}") as proxy:

        def work() -> None:
            with proxy.connect() as sock:
                sock.sendall(
                    get("server.test", server.port, more=f"Content-Length: {LARGE}\r\nConnection: close\r\n").replace(
                        b"GET", b"POST"
                    )
                )
                for _ in range(LARGE // len(PIECE)):
                    sock.sendall(PIECE)
                head = read_head(sock)
                assert whole.hexdigest().encode() in head
                found = hashlib.sha256()
                while data := sock.recv(65536):
                    found.update(data)
                assert found.digest() == whole.digest()

        assert peak_of(work) < 4 << 20


@pytest.mark.parametrize("way", ["request", "tunnel"])
def test_a_client_that_does_not_read_stops_the_server(way: str) -> None:
    sent = 0

    def endless(sock: socket.socket, server: Origin) -> None:
        nonlocal sent
        if way == "request":
            read_head(sock)
            sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                sent += sock.send(PIECE)

    def work() -> None:
        sock = proxy.tunnel("server.test", server.port) if way == "tunnel" else proxy.connect()
        with sock:
            if way == "request":
                sock.sendall(get("server.test", server.port))
            before = -1
            while sent == 0 or before != sent:
                before = sent
                time.sleep(0.3)
            assert sent < 64 << 20

    with origin(endless) as server, proxied(f"server.test:{server.port}") as proxy:
        assert peak_of(work) < 2 << 20


@pytest.mark.parametrize("way", ["request", "tunnel"])
def test_two_hundred_connections_at_once_in_bounded_memory(way: str) -> None:
    many, each = 200, 512 << 10

    def served(sock: socket.socket, server: Origin) -> None:
        if way == "request":
            sink_and_source(sock, server)
        else:
            echo(sock, server)

    with origin(served) as server, proxied(f"server.test:{server.port}") as proxy:

        async def one() -> int:
            reader, writer = await asyncio.open_connection(*proxy.listener.getsockname(), limit=1 << 16)
            if way == "request":
                writer.write(
                    get("server.test", server.port, more=f"Content-Length: {each}\r\nConnection: close\r\n").replace(
                        b"GET", b"PUT"
                    )
                )
            else:
                writer.write(f"CONNECT server.test:{server.port} HTTP/1.0\r\n\r\n".encode())
                await reader.readuntil(b"\r\n\r\n")

            async def send() -> None:
                for _ in range(each // len(PIECE)):
                    writer.write(PIECE)
                    await writer.drain()
                if way == "tunnel":
                    writer.write_eof()

            sender = asyncio.create_task(send())
            if way == "request":
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            total = 0
            while data := await reader.read(1 << 16):
                total += len(data)
            await sender
            writer.close()
            return total

        async def all_of_them() -> list[int]:
            return await asyncio.gather(*(one() for _ in range(many)))

        def work() -> None:
            assert asyncio.run(all_of_them()) == [each] * many

        # A client's own buffers (up to 3 times 64 KiB), a server's and ours, for each: far below the 1 MiB that passed through.
        assert peak_of(work) < many * (448 << 10)


def test_one_too_many_is_told_so_and_the_others_go_on() -> None:
    with origin(echo) as server, proxied(f"server.test:{server.port}", most=3) as proxy, contextlib.ExitStack() as stack:
        tunnels = [stack.enter_context(proxy.tunnel("server.test", server.port)) for _ in range(3)]
        for _ in range(3):
            said = proxy.ask(get("server.test", server.port))
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"3 connections" in said
        for tunnel in tunnels:
            tunnel.sendall(b"x")
            assert tunnel.recv(1) == b"x"
        tunnels[0].close()
        until(lambda: proxy.connections() == 2)
        stack.enter_context(proxy.tunnel("server.test", server.port))


def test_a_head_that_never_ends_does_and_the_others_do_not_wait_for_it() -> None:
    with origin(hello) as server, proxied(f"server.test:{server.port}", patience=Patience(head=0.4, linger=0.2)) as proxy:
        with proxy.connect() as slow:
            slow.sendall(b"GET http://server.test/ HTTP/1.1\r\n")
            assert proxy.ask(get("server.test", server.port)).startswith(b"HTTP/1.1 200 ")
            with contextlib.suppress(OSError):  # one byte at a time does not prolong it
                for _ in range(200):
                    slow.sendall(b"X")
                    time.sleep(0.02)
            assert b"HTTP/1.1 408 " in everything(slow)
        until(lambda: proxy.connections() == 0)


def test_a_client_that_says_nothing_is_let_go() -> None:
    with proxied(patience=Patience(head=0.2)) as proxy, proxy.connect() as sock:
        assert everything(sock) == b""


@pytest.mark.parametrize("way", ["request", "tunnel"])
def test_quiet_has_an_end(way: str) -> None:
    def silent(sock: socket.socket, server: Origin) -> None:
        with contextlib.suppress(ConnectionError):
            while sock.recv(1000):
                pass

    with origin(silent) as server, proxied(f"server.test:{server.port}", patience=Patience(idle=0.3, linger=0.2)) as proxy:
        if way == "request":
            assert proxy.ask(get("server.test", server.port)).startswith(b"HTTP/1.1 504 ")
        else:
            with proxy.tunnel("server.test", server.port) as sock:
                assert everything(sock) == b""


def test_a_long_upload_is_not_quiet() -> None:
    with (
        origin(sink_and_source) as server,
        proxied(f"server.test:{server.port}", patience=Patience(idle=0.6)) as proxy,
        proxy.connect() as sock,
    ):
        sock.sendall(
            get("server.test", server.port, more=f"Content-Length: {20 * len(PIECE)}\r\nConnection: close\r\n").replace(
                b"GET", b"POST"
            )
        )
        for _ in range(20):
            sock.sendall(PIECE)
            time.sleep(0.06)
        assert everything(sock).startswith(b"HTTP/1.1 200 ")


# -- behind the host's own proxy ------------------------------------------------------------------------------------------------


SECRET = "Basic dXNlcjpodW50ZXIy"
TOKEN, PASSWORD = "dXNlcjpodW50ZXIy", "hunter2"


def behind(port: int, direct: tuple[str, ...] = ()) -> Upstream:
    server = Server(LOOPBACK, port, SECRET)
    return Upstream(server, server, direct)


def nobody(host: str, port: int) -> Sequence[str]:
    raise AssertionError(f"{host} was resolved")


def test_requests_go_through_the_hosts_proxy_with_its_credentials() -> None:
    with origin(hello) as host, proxied("example.org", lookup=nobody, upstream=behind(host.port)) as proxy:
        said = proxy.ask(
            b"GET http://example.org/x HTTP/1.1\r\nHost: example.org\r\nProxy-Authorization: Basic aW5zaWRl\r\nConnection: close\r\n\r\n"
        )
        assert said.endswith(b"hello")
        assert host.heads[0].startswith(b"GET http://example.org/x HTTP/1.1\r\n")
        assert SECRET.encode() in host.heads[0]
        assert b"aW5zaWRl" not in host.heads[0]


def test_tunnels_go_through_the_hosts_proxy_with_its_credentials() -> None:
    def tunnelling(sock: socket.socket, server: Origin) -> None:
        server.heads.append(read_head(sock))
        sock.sendall(b"HTTP/1.1 200 Fine\r\nX-Own: 1\r\n\r\nbanner ")
        echo(sock, server)

    with (
        origin(tunnelling) as host,
        proxied("example.org", lookup=nobody, upstream=behind(host.port)) as proxy,
        proxy.connect() as sock,
    ):
        sock.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n\x16\x03\x01")
        sock.shutdown(socket.SHUT_WR)
        assert everything(sock) == b"HTTP/1.1 200 Connection established\r\n\r\nbanner \x16\x03\x01"
        assert host.heads[0].startswith(b"CONNECT example.org:443 HTTP/1.1\r\n")
        assert SECRET.encode() in host.heads[0]


@pytest.mark.parametrize("status", [403, 407, 502])
@pytest.mark.parametrize("method", ["GET", "CONNECT"])
def test_what_the_hosts_proxy_says_about_itself_stays_outside(status: int, method: str) -> None:
    def refusing(sock: socket.socket, server: Origin) -> None:
        server.heads.append(read_head(sock))
        sock.sendall(
            f"HTTP/1.1 {status} No\r\nProxy-Authenticate: Basic realm=inside-story\r\nContent-Length: 2\r\n\r\nno".encode()
        )

    with origin(refusing) as host, proxied("example.org", lookup=nobody, upstream=behind(host.port)) as proxy:
        target = "http://example.org/" if method == "GET" else "example.org:443"
        said = proxy.ask(f"{method} {target} HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n".encode())
        assert b"inside-story" not in said
        assert b"the host's own proxy answered with status " + str(status).encode() in said
        assert said.startswith(b"HTTP/1.1 502 " if method == "CONNECT" or status == 407 else f"HTTP/1.1 {status} ".encode())


def echoing(status: int, header: str = "X-Fine: 1") -> Callable[[socket.socket, Origin], None]:
    """A proxy that shows what it was asked, in its answer's body."""

    def handle(sock: socket.socket, server: Origin) -> None:
        head = read_head(sock)
        server.heads.append(head)
        sock.sendall(f"HTTP/1.1 {status} Said\r\n{header}\r\nContent-Length: {len(head)}\r\n\r\n".encode() + head)

    return handle


@pytest.mark.parametrize("status", [400, 404, 500, 599])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_an_error_page_of_the_hosts_proxy_does_not_show_its_password(status: int, method: str) -> None:
    with origin(echoing(status, "WWW-Authenticate: Basic realm=x")) as host:
        with proxied("example.org", lookup=nobody, upstream=behind(host.port)) as proxy:
            said = proxy.ask(f"{method} http://example.org/ HTTP/1.1\r\nHost: example.org\r\nMax-Forwards: 0\r\n\r\n".encode())
        assert said.startswith(f"HTTP/1.1 {status} ".encode())
        assert TOKEN.encode() not in said
        assert b"\r\nWWW-Authenticate: Basic realm=x\r\n" in said
        assert said.endswith(b"\r\n\r\n") is (method == "HEAD")
        assert SECRET.encode() in host.heads[0]
        assert b"max-forwards" not in host.heads[0].lower()


def test_an_error_by_way_of_a_proxy_without_a_password_is_passed_on_whole() -> None:
    with origin(echoing(404)) as host:
        upstream = Upstream(Server(LOOPBACK, host.port))
        with proxied("example.org", lookup=nobody, upstream=upstream) as proxy:
            said = proxy.ask(b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 404 Said\r\n")
        assert said.endswith(host.heads[0])


@pytest.mark.parametrize("said", [f"X-Debug: {TOKEN}", f"Location: http://x/?{PASSWORD}", f"X-{PASSWORD}: 1"])
@pytest.mark.parametrize("status", [200, 302, 404])
def test_an_answer_whose_head_shows_the_password_is_refused(said: str, status: int) -> None:
    with origin(echoing(status, said)) as host, proxied("example.org", lookup=nobody, upstream=behind(host.port)) as proxy:
        told = proxy.ask(b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 502 ")
    assert b"shows its credentials" in told
    assert TOKEN.encode() not in told
    assert PASSWORD.encode() not in told


def test_an_upload_that_fails_by_way_of_the_hosts_proxy_is_answered() -> None:
    """After the client was told to go on, too."""

    def full(sock: socket.socket, server: Origin) -> None:
        head = read_head(sock)
        sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert exactly(sock, 5) == b"12345"
        sock.sendall(f"HTTP/1.1 507 Full\r\nContent-Length: {len(head)}\r\n\r\n".encode() + head)

    with (
        origin(full) as host,
        proxied("example.org", lookup=nobody, upstream=behind(host.port)) as proxy,
        proxy.connect() as sock,
    ):
        sock.sendall(
            b"PUT http://example.org/ HTTP/1.1\r\nHost: example.org\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
        )
        assert read_head(sock).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"12345")
        said = everything(sock)
        assert said.startswith(b"HTTP/1.1 507 ")
        assert TOKEN.encode() not in said


def test_rules_hold_behind_the_hosts_proxy_too() -> None:
    with origin(hello) as host, proxied("example.org", "10.0.0.5:80", lookup=nobody, upstream=behind(host.port)) as proxy:
        for target in ("evil.test", "127.0.0.1", "169.254.169.254", "[::1]", LOOPBACK + f":{host.port}"):
            assert proxy.ask(f"GET http://{target}/ HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()).startswith(b"HTTP/1.1 403 "), (
                target
            )
        assert host.heads == []
        assert proxy.ask(b"GET http://10.0.0.5/ HTTP/1.1\r\nHost: 10.0.0.5\r\nConnection: close\r\n\r\n").startswith(
            b"HTTP/1.1 200 "
        )


def test_what_is_meant_to_be_reached_without_it_is() -> None:
    with origin(hello) as host, origin(hello) as server:
        with proxied(f"server.test:{server.port}", upstream=behind(host.port, ("server.test",))) as proxy:
            assert proxy.ask(get("server.test", server.port)).startswith(b"HTTP/1.1 200 ")
        assert SECRET.encode() not in server.heads[0]
        assert host.heads == []


def test_a_hosts_proxy_that_is_not_there_is_not_passed_by() -> None:
    with socket.socket() as bound, origin(hello) as server:
        bound.bind((LOOPBACK, 0))
        with proxied(f"server.test:{server.port}", upstream=behind(bound.getsockname()[1])) as proxy:
            said = proxy.ask(get("server.test", server.port))
        assert said.startswith(b"HTTP/1.1 502 ")
        assert b"the host's own proxy" in said
        assert server.heads == []


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stopping_ends_every_connection() -> None:
    with origin(echo) as server:
        with proxied(f"server.test:{server.port}") as proxy:
            tunnel = proxy.tunnel("server.test", server.port)
            assert isinstance(proxy, Proxied)
        with tunnel, contextlib.suppress(ConnectionResetError):
            assert tunnel.recv(1) == b""
