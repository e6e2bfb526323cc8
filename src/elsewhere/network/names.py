"""Hosts as people and programs write them, each brought into one spelling: what is not the same here is not the same host.

    Example.ORG.            example.org          a name: lower case, ASCII (IDNA), no dot at its end
    bücher.example          xn--bcher-kva.example
    [::FFFF:10.0.0.5]       10.0.0.5             an address: as short as it can be written, IPv4 as IPv4

Not here: what may be reached (`rules.py`), and what a name's addresses are (`dialling.py`).
"""

import ipaddress
import re
import unicodedata

__all__ = [
    "Address", "Nonsense", "address", "authority", "canonical", "is_local", "is_private", "port", "split", "to_allow",
    "to_forward",
]  # fmt: skip

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LONGEST, _LONGEST_LABEL = 253, 63
_TOO_LONG = f"has more than {_LONGEST} characters"
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_DOTS = re.compile("[.\u3002\uff0e\uff61]")
# The older IDNA turns these into others, or into nothing; the newer one, which browsers and curl have, keeps them: another host.
_DEVIATING = frozenset("ß\u1e9eς\u200c\u200d")
# Under these nobody can buy a name: whoever is asked for one is of the network that the host is in.
_PRIVATE = (".internal", ".local", ".lan", ".home", ".corp", ".test", ".localdomain", ".home.arpa")


class Nonsense(ValueError):
    """Says of something what is wrong with it, in words that follow its name: `is …`, `has …`."""


def canonical(text: str) -> str:
    """The one spelling of a host, a name or an address; of IPv6 without brackets."""
    found = address(text)
    if found is not None:
        return str(found)
    if not _DEVIATING.isdisjoint(text):
        raise Nonsense(f"has letters that programs read differently: write the name as {canonical(_kept(text))}")
    name = text.removesuffix(".").lower()
    if not name.isascii():
        name = _idna(name)
    if not name:
        raise Nonsense("is empty")
    if len(name) > _LONGEST:
        raise Nonsense(_TOO_LONG)
    labels = name.split(".")
    for label in labels:
        if len(label) > _LONGEST_LABEL or not _LABEL.fullmatch(label):
            raise Nonsense("is neither a host name nor an address")
    if _NUMBER.fullmatch(labels[-1]):
        # `127.1`, `2130706433` and `0x7f000001` are all 127.0.0.1 to some programs, and nothing to others.
        raise Nonsense("is an address in a form that programs read differently")
    return name


def _idna(name: str) -> str:
    try:
        return name.encode("idna").decode("ascii").lower()
    except UnicodeError:
        raise Nonsense("is not a name that can be written in ASCII (IDNA)") from None


def _kept(text: str) -> str:
    """In ASCII as the newer IDNA has it, with every letter."""
    if len(text) > _LONGEST:
        raise Nonsense(_TOO_LONG)
    labels = _DOTS.split(unicodedata.normalize("NFC", text.removesuffix(".").lower()))
    return ".".join(label if label.isascii() else f"xn--{label.encode('punycode').decode('ascii')}" for label in labels)


def address(text: str) -> Address | None:
    """The address that a host is, with or without the brackets of IPv6; None if it is a name, or nonsense."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if "%" in inner:
        return None  # a zone means something on one machine only
    try:
        found = ipaddress.ip_address(inner)
    except ValueError:
        return None
    if found.version == 4:
        return None if inner is not text else found
    return found.ipv4_mapped or found


def split(text: str) -> tuple[str, int | None]:
    """Host and port of `HOST[:PORT]`, the host as it is written, but without brackets."""
    if text.startswith("["):
        inner, closed, rest = text[1:].partition("]")
        if not closed or address(f"[{inner}]") is None or (rest and not rest.startswith(":")):
            raise Nonsense("is no IPv6 address in brackets")
        return inner, port(rest[1:]) if rest else None
    host, colon, rest = text.partition(":")
    if ":" in rest:
        raise Nonsense("has more than one colon: an IPv6 address stands in brackets")
    return host, port(rest) if colon else None


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise Nonsense("has a port that is no number from 1 to 65535")
    return int(text)


def authority(host: str, number: int | None) -> str:
    """Host and port as they stand in an address of the web."""
    shown = f"[{host}]" if ":" in host else host
    return shown if number is None else f"{shown}:{number}"


def is_local(host: str) -> bool:
    """Whether it says itself that it is loopback, all of 127.0.0.0/8 included: the sandbox's own, for whoever asks no proxy."""
    found = address(host)
    return host == "localhost" or host.endswith(".localhost") if found is None else found.is_loopback


def is_private(name: str) -> bool:
    """Whether it is the name of a host of a private network, which no stranger can have."""
    return address(name) is None and ("." not in name or name.endswith(_PRIVATE) or is_local(name))


def to_allow(rule: str, sandbox: str) -> str:
    """What to type so that it can be reached: by a sandbox that stays, or by the next one."""
    return f"elsewhere network {sandbox} --allow {rule}" if sandbox else f"--allow {rule}"


def to_forward(host: str, number: int, sandbox: str) -> str:
    """What to type so that a service of the host's loopback is there inside, at 127.0.0.1 and the same port."""
    found = address(host)
    other = found is not None and found.is_loopback and host != "127.0.0.1"
    service = f"--forward {authority(host, number) if other else number}"
    return f"elsewhere network {sandbox} {service}" if sandbox else service
