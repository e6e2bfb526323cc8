"""The head of a request to a proxy, read strictly: whatever two programs could read differently is refused, not repaired.

That is what keeps a request from hiding a second one in itself (smuggling): lines end in CR LF, no line goes on in the next, a
body has exactly one length, and the Host says the same as the address. h11 parses what is left, and whatever is passed on is
written anew from what it found.
"""

import re

import h11

from elsewhere.network import names
from elsewhere.values import dataclass

__all__ = ["LARGEST", "BadRequest", "Head", "could_begin", "parse", "passed_on"]

LARGEST = 64 << 10
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host"))
# What is about one connection only, and ends with it. With Max-Forwards a client would choose who answers: a proxy on the way.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive max-forwards proxy-authenticate proxy-authentication-info proxy-authorization proxy-connection te"
    b" trailer transfer-encoding upgrade http2-settings".split()
)
_ECHOES = ("TRACE", "TRACK")
_BARE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_FIRST_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32} [\x21-\x7e]+ HTTP/1\.[01]")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
_BARE = "a line of the request does not end in CR LF"
_FORM = re.compile(r"http://([^/?#\\@]*)(/[^#]*|\?[^#]*|)", re.IGNORECASE)


class BadRequest(Exception):
    """What is wrong with a request, as a sentence for whoever sent it."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """`host` in its one spelling; `path` with its question mark and what follows, empty for a tunnel."""

    method: str
    host: str
    port: int
    path: str
    request: h11.Request

    @property
    def tunnel(self) -> bool:
        return self.method == "CONNECT"

    @property
    def has_body(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") and value != b"0" for name, value in self.request.headers)

    @property
    def authority(self) -> str:
        return names.authority(self.host, None if self.port == 80 and not self.tunnel else self.port)


def could_begin(data: bytes | bytearray) -> str:
    """What is wrong already with the beginning of a head, before its end is there; empty if nothing is."""
    if data[:1] in (b"\x16", b"\x80"):
        return "this proxy is spoken to without TLS: its address begins with http://, also for https:// pages"
    if data[:1] in (b"\x04", b"\x05"):
        return "this is a proxy for HTTP, not for SOCKS: use http:// in its address, or CONNECT"
    line, ended, _ = data.partition(b"\n")
    if not ended:
        token = data.partition(b" ")[0]
        return "" if _TOKEN.fullmatch(token) else "this is no request of HTTP/1.1"
    if not _FIRST_LINE.fullmatch(line.removesuffix(b"\r")):
        return "this is no request of HTTP/1.1"
    return "" if line.endswith(b"\r") else _BARE


def parse(raw: bytes, connection: h11.Connection) -> Head:
    """`raw` ends with the empty line; `connection` is fresh, has got nothing yet, and reads the body afterwards."""
    _check(raw)
    try:
        connection.receive_data(raw)
        request = connection.next_event()
    except h11.RemoteProtocolError as error:
        raise BadRequest(f"the request cannot be understood: {error}", error.error_status_hint) from None
    if not isinstance(request, h11.Request):
        raise BadRequest("the request has no end")
    method = request.method.decode("ascii")
    if method.upper() in _ECHOES:
        raise BadRequest(
            f"{method} is not passed on: its answer would show what the request has on the way, credentials, too", 501
        )
    head = _tunnel(request) if request.method == b"CONNECT" else _plain(request)
    _check_host(head)
    _check_connection(request)
    return head


def _check(raw: bytes) -> None:
    wrong = could_begin(raw)
    if wrong or _BARE_END.search(raw):
        raise BadRequest(wrong or _BARE)
    first, *lines = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    seen = set()
    for line in lines:
        if line[:1] in (b" ", b"\t"):
            raise BadRequest("a header goes on in the next line")
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in _FRAMING and name in seen:
            raise BadRequest(f"the header {name.decode('ascii')} is there twice")
        if name == b"content-length" and not value.strip(b" \t").isdigit():
            raise BadRequest("the Content-Length is no number")
        seen.add(name)
    if b"content-length" in seen and b"transfer-encoding" in seen:
        raise BadRequest("the body has two lengths: Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in seen and first.endswith(b"1.0"):
        raise BadRequest("HTTP/1.0 has no Transfer-Encoding")
    if first.startswith(b"CONNECT ") and seen & {b"content-length", b"transfer-encoding"}:
        raise BadRequest("a CONNECT has no body")


def _tunnel(request: h11.Request) -> Head:
    target = request.target.decode("ascii")
    host, port = _host_and_port(target)
    if port is None:
        raise BadRequest(f"CONNECT {target} names no port")
    return Head("CONNECT", host, port, "", request)


def _plain(request: h11.Request) -> Head:
    target = request.target.decode("ascii")
    if target.startswith("/") or target == "*":
        raise BadRequest("this is a proxy and no web server: ask it for a whole address, such as http://example.org/")
    form = _FORM.fullmatch(target)
    if form is None:
        scheme = target.partition("://")[0].lower() if "://" in target else ""
        if scheme and scheme != "http" and scheme.isalnum():
            raise BadRequest(f"this proxy does not fetch {scheme}:// addresses; for https:// it is asked to CONNECT", 501)
        raise BadRequest("the address of the request is none that a proxy can be asked for")
    host, port = _host_and_port(form[1])
    path = form[2] if form[2].startswith("/") else f"/{form[2]}"
    return Head(request.method.decode("ascii"), host, port or 80, path, request)


def _host_and_port(text: str) -> tuple[str, int | None]:
    try:
        host, port = names.split(text)
        return names.canonical(host), port
    except names.Nonsense as wrong:
        raise BadRequest(f"the host {text[:200]!r} {wrong}") from None


def _check_host(head: Head) -> None:
    """One host, told twice: whoever believes the other one could be led elsewhere."""
    told = next((value for name, value in head.request.headers if name == b"host"), None)
    if told is None:
        return  # HTTP/1.0
    host, port = _host_and_port(told.decode("ascii", "replace"))
    if host != head.host or (port is not None and port != head.port) or (port is None and not head.tunnel and head.port != 80):
        raise BadRequest(f"the Host is {told.decode('ascii', 'replace')[:200]!r}, but the address says {head.authority!r}")


def _check_connection(request: h11.Request) -> None:
    if _named_by_connection(request) & _FRAMING:
        raise BadRequest("the header Connection names one that the request cannot do without")


def _named_by_connection(message: h11.Request | h11.Response) -> set[bytes]:
    return {word.strip().lower() for name, value in message.headers if name == b"connection" for word in value.split(b",")}


def passed_on(message: h11.Request | h11.Response) -> list[tuple[bytes, bytes]]:
    """Those that are about the message and not about the connection, as they were written. How long the body is comes along."""
    dropped = _HOP_BY_HOP | (_named_by_connection(message) - _FRAMING)
    kept = [(raw, value) for raw, value in message.headers.raw_items() if raw.lower() not in dropped]
    if any(name == b"transfer-encoding" for name, _ in message.headers):
        kept = [(name, value) for name, value in kept if name.lower() != b"content-length"]
        kept.append((b"Transfer-Encoding", b"chunked"))
    return kept
