"""Connections of programs that know no proxy, led to us: a route, an address and one table of nftables, by netlink alone.

    TCP, to anywhere that is not local            ──▶ tcp_port on 127.0.0.1; `original_destination` says where it was meant to go
    UDP to port 53, of anything but 127.0.0.1     ──▶ dns_port on 127.0.0.1
    all else that is not local                    ──▶ refused at once, so that nobody waits
    TCP between loopback and itself               ──▶ is not even remembered: it would fill the kernel's table of connections
    IPv6                                          ──▶ has no route but to its own loopback

In a network namespace that has nothing but loopback, by whoever may administer it. What is not local needs a route to get as far
as being redirected: the default route leads into loopback, where nobody takes what was not redirected. Not here: who listens on
those ports, and what may be reached.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from functools import cache

__all__ = ["ADDRESS", "install", "original_destination", "prepare"]

# The sandbox's own, beside loopback: what has no other address than loopback does not ask for names (AI_ADDRCONFIG).
ADDRESS = "198.19.255.254"

_NETLINK_ROUTE, _NETLINK_NETFILTER = 0, 12
_SOL_NETLINK, _NETLINK_CAP_ACK = 270, 10
_REQUEST, _ACK, _EXCLUSIVE, _CREATE, _APPEND = 0x1, 0x4, 0x200, 0x400, 0x800
_ERROR = 2
_NEW_ADDRESS, _NEW_ROUTE = 20, 24
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NFTABLES = 10
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = (_NFTABLES << 8 | number for number in (0, 3, 6))
_NESTED = 0x8000
_OUTPUT = 3  # the hook that everything passes which a program here sends
_TABLE = "elsewhere"
_REGISTER = 1
_EQUAL, _UNEQUAL = 0, 1
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_SOURCE, _DESTINATION = 12, 16  # in the header of IPv4
_SOURCE_PORT, _DESTINATION_PORT = 0, 2  # in those of TCP and UDP
_LOOPBACK_DEVICE = 1  # in every network namespace
_LOOPBACK = b"\x7f"  # how all of its addresses begin
_PROHIBITED = 13  # of ICMP's "unreachable"
_SO_ORIGINAL_DST = 80


def install(tcp_port: int, dns_port: int) -> None:
    """After loopback is up. Raises OSError where the kernel cannot; then all is as it was, or leads nowhere at once."""
    table, way_in = prepare(tcp_port, dns_port)
    # The table first, as a whole or not at all: with a route alone, whatever is sent would be waited for in vain.
    _talk(_NETLINK_NETFILTER, table)
    _talk(_NETLINK_ROUTE, way_in)


@cache
def prepare(tcp_port: int, dns_port: int) -> tuple[bytes, bytes]:
    """What `install` will say to the kernel. Most of its time goes by here, so whoever forks may have it done before."""
    return b"".join(_table(tcp_port, dns_port)), b"".join(_way_in())


def original_destination(sock: socket.socket) -> tuple[str, int]:
    """Where a connection was meant to go that was accepted here. Raises OSError of one that came by itself."""
    found = sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    port, address = struct.unpack_from("!2xH4s", found)
    if (socket.inet_ntoa(address), port) == sock.getsockname()[:2]:
        raise OSError(errno.ENOENT, "the connection was not redirected")
    return socket.inet_ntoa(address), port


# -- what is asked for ----------------------------------------------------------------------------------------------------------


def _way_in() -> list[bytes]:
    own = socket.inet_aton(ADDRESS)
    flags = _REQUEST | _ACK | _CREATE | _EXCLUSIVE
    address = struct.pack("BBBBI", socket.AF_INET, 32, 0, 0, _LOOPBACK_DEVICE) + _attribute(1, own) + _attribute(2, own)
    # Unicast, and not local: what was not redirected is not for us, so that a ping of anywhere has no answer from here.
    route = struct.pack("BBBBBBBBI", socket.AF_INET, 0, 0, 0, 254, 3, 253, 1, 0)
    route += _attribute(4, struct.pack("I", _LOOPBACK_DEVICE)) + _attribute(7, own)
    return [_message(_NEW_ADDRESS, flags, address), _message(_NEW_ROUTE, flags, route)]


def _table(tcp_port: int, dns_port: int) -> list[bytes]:
    tcp, udp = _protocol(socket.IPPROTO_TCP), _protocol(socket.IPPROTO_UDP)
    not_local = [*_destination_is_not(_LOOPBACK), *_destination_is_not(socket.inet_aton(ADDRESS))]
    question = [*_compared(_TRANSPORT_HEADER, _DESTINATION_PORT, struct.pack("!H", 53), _EQUAL)]
    question += _destination_is_not(socket.inet_aton("127.0.0.1"))
    between = [
        *_compared(_NETWORK_HEADER, _SOURCE, _LOOPBACK, _EQUAL),
        *_compared(_NETWORK_HEADER, _DESTINATION, _LOOPBACK, _EQUAL),
    ]
    # Except for what we say to a client that was redirected.
    between += _compared(_TRANSPORT_HEADER, _SOURCE_PORT, struct.pack("!H", tcp_port), _UNEQUAL)
    return [
        _about_tables(_BATCH_BEGIN, 0, family=socket.AF_UNSPEC, about=_NFTABLES),
        _about_tables(_NEW_TABLE, _CREATE | _EXCLUSIVE, _text(1, _TABLE)),
        _chain("forget", "filter", -300),
        _rule("forget", [*tcp, *between, _expression("notrack")]),
        _chain("redirect", "nat", -100),
        _rule("redirect", [*udp, *question, *_redirected(dns_port)]),
        _rule("redirect", [*tcp, *not_local, *_redirected(tcp_port)]),
        _chain("refuse", "filter", 0),
        _rule("refuse", [*not_local, _expression("reject", _number(1, 0), _attribute(2, bytes([_PROHIBITED])))], last=True),
        _about_tables(_BATCH_END, 0, family=socket.AF_UNSPEC, about=_NFTABLES),
    ]


def _chain(name: str, kind: str, priority: int) -> bytes:
    hook = _nested(4, _number(1, _OUTPUT), _attribute(2, struct.pack("!i", priority)))
    return _about_tables(_NEW_CHAIN, _CREATE | _EXCLUSIVE, _text(1, _TABLE), _text(3, name), hook, _text(7, kind))


def _rule(chain: str, expressions: Iterable[bytes], *, last: bool = False) -> bytes:
    """Expressions are carried out one after the other, until one of them does not hold."""
    flags = _CREATE | _APPEND | (_ACK if last else 0)
    return _about_tables(_NEW_RULE, flags, _text(1, _TABLE), _text(2, chain), _nested(4, *expressions))


# -- expressions ----------------------------------------------------------------------------------------------------------------


def _protocol(number: int) -> Sequence[bytes]:
    return _expression("meta", _number(1, _REGISTER), _number(2, 16)), _comparison(bytes([number]), _EQUAL)


def _destination_is_not(beginning: bytes) -> Sequence[bytes]:
    return _compared(_NETWORK_HEADER, _DESTINATION, beginning, _UNEQUAL)


def _compared(header: int, offset: int, value: bytes, how: int) -> Sequence[bytes]:
    loaded = _expression("payload", _number(1, _REGISTER), _number(2, header), _number(3, offset), _number(4, len(value)))
    return loaded, _comparison(value, how)


def _comparison(value: bytes, how: int) -> bytes:
    return _expression("cmp", _number(1, _REGISTER), _number(2, how), _nested(3, _attribute(1, value)))


def _redirected(port: int) -> Sequence[bytes]:
    loaded = _expression("immediate", _number(1, _REGISTER), _nested(2, _attribute(1, struct.pack("!H", port))))
    return loaded, _expression("redir", _number(1, _REGISTER))


def _expression(name: str, *about: bytes) -> bytes:
    return _nested(1, _text(1, name), _nested(2, *about))


# -- netlink --------------------------------------------------------------------------------------------------------------------


def _about_tables(kind: int, flags: int, *attributes: bytes, family: int = socket.AF_INET, about: int = 0) -> bytes:
    return _message(kind, _REQUEST | flags, struct.pack("!BBH", family, 0, about) + b"".join(attributes))


def _message(kind: int, flags: int, content: bytes) -> bytes:
    return struct.pack("IHHII", 16 + len(content), kind, flags, 0, 0) + content


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _nested(kind: int, *attributes: bytes) -> bytes:
    return _attribute(kind | _NESTED, b"".join(attributes))


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("!I", value))


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode("ascii") + b"\0")


def _talk(protocol: int, messages: bytes) -> None:
    """All at once. The kernel has answered when sending returns: every failure, and what asked to be acknowledged."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol) as sock:
        sock.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        sock.sendto(messages, (0, 0))
        answered = False
        while True:
            try:
                data = sock.recv(8192)
            except BlockingIOError:
                break
            answered = True
            _check(data)
    if not answered:
        raise OSError(errno.EPROTO, "the kernel did not say whether it redirects")


def _check(data: bytes) -> None:
    while len(data) >= 20:
        length, kind, _, _, _, code = struct.unpack_from("IHHIIi", data)
        if kind == _ERROR and code:
            raise OSError(-code, f"the kernel does not redirect: {os.strerror(-code)}")
        data = data[(max(length, 16) + 3) & ~3 :]
