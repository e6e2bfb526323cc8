"""Addresses that a name may not lead to by accident: this machine, its neighbours, and the services that give out credentials.

What a rule with a port was written for decides which of them are reached all the same (`Rule.named`):

    address    this very address                                          all but those that nobody can have
    private    a name of a private network, as `db.internal:5432`         but for those of credentials
    machine    a host that the machine's own settings name                and but for loopback
               anything else, as `example.org:8443`: whoever owns a name of the world says where it leads      none

Whatever is not known to be an address of the public network is refused, but for the IPv4 addresses of documentation: they are
nobody's, and some networks put the mirrors there that stand for the hosts of the world. Forms of IPv6 that carry an IPv4 address
are what they carry.
"""

import ipaddress
import socket
import struct

from elsewhere.network import names
from elsewhere.network.names import Address

__all__ = ["CAREFULLY", "MADE_UP", "gives_credentials", "instead", "is_own", "refusal", "why_refused"]

MADE_UP = ipaddress.IPv4Network("198.18.0.0/16")  # what names have inside (`resolving.py`)

_KINDS = tuple(
    (ipaddress.ip_network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", "an unspecified address, which is this machine itself"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "an address of a provider's own network"),
        ("127.0.0.0/8", "a loopback address, which is this machine itself"),
        ("169.254.0.0/16", "a link-local address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "a reserved address"),
        ("192.88.99.0/24", "a reserved address"),
        ("192.168.0.0/16", "a private address"),
        ("198.18.0.0/15", "an address of measurements"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved address"),
        ("::/128", "an unspecified address, which is this machine itself"),
        ("::1/128", "a loopback address, which is this machine itself"),
        ("2001::/23", "a reserved address"),
        ("2001:db8::/32", "an address of documentation"),
        ("3fff::/20", "an address of documentation"),
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a private address"),
        ("ff00::/8", "a multicast address"),
    )
)
# Where clouds hand their machines' credentials out. Some of them lie among the public addresses.
_METADATA = frozenset(
    ipaddress.ip_address(address)
    for address in (
        "100.100.100.200", "168.63.129.16", "169.254.169.123", "169.254.169.253", "169.254.169.254", "169.254.170.2",
        "169.254.170.23", "192.0.0.192", "fd00:a9fe:a9fe::254", "fd00:ec2::23", "fd00:ec2::254", "fd20:ce::254",
    )
)  # fmt: skip
_METADATA_KIND = "an address at which a cloud gives out credentials"
_PUBLIC_6 = ipaddress.ip_network("2000::/3")
_NEVER = ("an unspecified", "a multicast")
_LOOPBACK = "a loopback"
CAREFULLY = "a cloud gives out credentials there; if that is meant: "
_NOWHERE = "nothing can be connected to there, whatever is allowed"
_OWN_LOOPBACK = "the sandbox has a loopback of its own, and nothing allows the host's"
_OTHER_LOOPBACK = "the sandbox has a loopback of its own, for which 127.0.0.1 is to be used, and nothing allows the host's"
_USUAL_LOOPBACK = ("127.0.0.1", "::1")
# IPv4 inside IPv6: the network, and how many bits follow the address that it carries.
_CARRYING = tuple(
    (ipaddress.IPv6Network(network), below)
    for network, below in (("::ffff:0:0/96", 0), ("::/96", 0), ("64:ff9b::/96", 0), ("2002::/16", 80))
)
# Of netlink: how it is asked for the way to one address, and how it answers.
_REQUEST, _NEW_ROUTE, _GET_ROUTE, _DESTINATION = 1, 24, 26, 1
_HEADER, _TYPE_OF_ROUTE = 16, 7
_STAYS_HERE = (2, 3, 4)  # local, broadcast, anycast


def why_refused(address: Address, *, named: str = "") -> str:
    """What kind of address keeps it from being connected to; empty if nothing does. `named`: as of the rule."""
    kind = _kind(address)
    if not kind or kind.startswith(_NEVER):
        return kind
    if kind == _METADATA_KIND:
        return "" if named == "address" else kind
    if kind.startswith(_LOOPBACK):
        return "" if named in ("address", "private") else kind
    return "" if named else kind


def gives_credentials(host: str) -> bool:
    address = names.address(host)
    return address is not None and _listed(address) == _METADATA_KIND


def instead(host: str, port: int, sandbox: str) -> tuple[str, str] | None:
    """Of a host that nothing allows, and that is reached in another way than by a rule, or not at all: what is to be known, and
    what to do. None if a rule is the way."""
    address = names.address(host)
    if names.is_local(host) or (address is not None and address.is_unspecified):
        usual = address is None or host in _USUAL_LOOPBACK
        return _OWN_LOOPBACK if usual else _OTHER_LOOPBACK, names.to_forward(host, port, sandbox)
    if address is None:
        return None
    if address.version == 4 and address in MADE_UP:
        return f"{address} is an address that no name has (any more)", "ask for the address of the name again"
    kind = _listed(address)
    return (f"{address} is {kind}", _NOWHERE) if kind.startswith(_NEVER) else None


def refusal(host: str, port: int, address: Address, sandbox: str) -> tuple[str, str]:
    """Why a host may not be reached by the address that it leads to, or is, and what to type. What a name cannot open is opened
    by the address itself, beside the name."""
    kind = _kind(address)
    said = f"{address} is {kind}" if names.address(host) is not None else f"{host} leads to {address}, {kind}"
    if kind.startswith(_NEVER):
        return said, _NOWHERE
    by_name = names.is_private(host) and not why_refused(address, named="private")
    how = names.to_allow(names.authority(host if by_name else str(address), port), sandbox)
    return said, f"{CAREFULLY}{how}" if kind == _METADATA_KIND else how


def _kind(address: Address) -> str:
    return _listed(address) or ("an address of this machine itself" if is_own(_carried(address)) else "")


def _listed(address: Address) -> str:
    """As far as it can be told from the address alone."""
    address = _carried(address)
    if address in _METADATA:
        return _METADATA_KIND
    for network, kind in _KINDS:
        if address.version == network.version and address in network:
            return kind
    if address.version == 6 and address not in _PUBLIC_6:
        return "not an address of the public network"
    return ""


def _carried(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv4Address) or int(address) in (0, 1):
        return address
    for network, below in _CARRYING:
        if address in network:
            return ipaddress.IPv4Address(int(address) >> below & 0xFFFFFFFF)
    return address


def is_own(address: Address) -> bool:
    """Whether what is sent there stays on this machine. The kernel is asked for the way; if it cannot be asked, nothing is known
    to lead elsewhere."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
            sock.sendto(_question(address), (0, 0))
            answer = sock.recv(4096)
    except OSError:
        return True
    (kind,) = struct.unpack_from("=H", answer, 4)
    return kind == _NEW_ROUTE and answer[_HEADER + _TYPE_OF_ROUTE] in _STAYS_HERE  # else there is no way at all


def _question(address: Address) -> bytes:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    route = struct.pack("=8BI", family, address.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
    destination = struct.pack("=HH", 4 + len(address.packed), _DESTINATION) + address.packed
    return struct.pack("=IHHII", _HEADER + len(route + destination), _GET_ROUTE, _REQUEST, 1, 0) + route + destination
