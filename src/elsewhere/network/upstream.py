"""The host's own proxy, if it has one: everything that is allowed goes through it, with its credentials, which stay out here.

    http_proxy, https_proxy, all_proxy    where it is; http://USER:PASSWORD@HOST:PORT
    no_proxy                              what is reached without it: names (and their subdomains), addresses, networks, *

In lower or upper case; lower wins. Behind it, names are resolved by it and not by us. Only proxies that are spoken to without
encryption are known here: another kind is refused, and never passed by.

    UNUSABLE/http_proxy/socks5://proxy.example.org:1080    which one it is that cannot be used, as a denial has it: no credentials
"""

import ipaddress
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import field
from urllib.parse import unquote, urlsplit

from elsewhere.errors import UsageError
from elsewhere.network import names
from elsewhere.values import dataclass

__all__ = ["UNUSABLE", "Server", "Upstream", "from_environment", "why_unusable"]

UNUSABLE = "unusable"

_SHORTEST_SECRET = 6
_LONGEST_SHOWN = 60
_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_SCHEME = re.compile(r"[a-z][a-z0-9]*")
_PLACE = re.compile(r"(\[[0-9a-f:.]*\]|[^:]*)(:[0-9]{1,5})?", re.IGNORECASE)
_NOT_SHOWN = re.compile(r"[^A-Za-z0-9_./:\[\]-]")


@dataclass(frozen=True, slots=True)
class Server:
    """A proxy; `authorization` is what its header of that name says, and never shown."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """What nobody inside may read: the header's value, and the password in it, unless that is too short to be told apart."""
        token = self.authorization.partition(" ")[2]
        password = b64decode(token).partition(b":")[2] if token else b""
        return tuple(found for found in (token.encode(), password) if len(found) >= _SHORTEST_SECRET)


@dataclass(frozen=True, slots=True)
class Upstream:
    """`plain` for requests that it is to read, `tunnel` for connections; None: none. `direct`: what is reached without it."""

    plain: Server | None = None
    tunnel: Server | None = None
    direct: tuple[str, ...] = ()

    def server(self, host: str, port: int, *, tunnel: bool) -> Server | None:
        """The proxy through which this host is to be reached; None: directly."""
        chosen = self.tunnel if tunnel else self.plain
        return None if chosen is None or any(_is_direct(entry, host, port) for entry in self.direct) else chosen


def from_environment(environ: Mapping[str, str]) -> Upstream | None:
    """None if the environment names no proxy."""
    either = _server(environ, "all_proxy")
    found = Upstream(
        plain=_server(environ, "http_proxy") or either,
        tunnel=_server(environ, "https_proxy") or either,
        direct=tuple(entry.strip().lower() for entry in _value(environ, "no_proxy").split(",") if entry.strip()),
    )
    return found if found.plain or found.tunnel else None


def _value(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper()) or ""


def _server(environ: Mapping[str, str], name: str) -> Server | None:
    text = _value(environ, name).strip()
    if not text:
        return None
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = names.canonical(parts.hostname or ""), parts.port or 80
        if parts.scheme.lower() != "http":
            raise ValueError
    except ValueError:
        which = f"{name}/{_without_credentials(text)}"
        rule, how = why_unusable(which)
        raise UsageError("bad_proxy", rule, hint=how, detail={"which": which}) from None
    authorization = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + b64encode(pair.encode()).decode("ascii")
    return Server(host, port, authorization)


def why_unusable(which: str) -> tuple[str, str]:
    """What is wrong, and what to do. `which` is VARIABLE/VALUE; empty: nobody can read it any more."""
    name, _, value = which.partition("/")
    if name not in _VARIABLES:
        return "which proxy of the host it is to use cannot be read", "stop the sandbox, and start it again"
    scheme, there, _ = value.partition("://")
    known = not there or scheme.lower() == "http" or not _SCHEME.fullmatch(scheme.lower())
    reason = "no proxy that can be understood" if known else f"spoken to by {scheme}, and only http:// is supported"
    return (
        f"the host's proxy cannot be used: the variable {name} has {value}, which is {reason}",
        f"set it right, as in {name}=http://proxy.example.org:3128, or unset it; then make the sandbox, or stop and start it",
    )


def _without_credentials(text: str) -> str:
    """As it can be shown to anybody. In what cannot be understood, whatever may be a part of a password is a star."""
    scheme, there, rest = text.rpartition("://")
    place = re.split("[/?#]", rest.rpartition("@")[2])[0]
    found = _PLACE.match(place)
    if found is not None and found.end() < len(place):
        place = f"{found[1]}:*"
    scheme = scheme if _SCHEME.fullmatch(scheme.lower()) else "*"
    shown = f"{scheme}://{place}" if there else place
    return _NOT_SHOWN.sub("*", shown[:_LONGEST_SHOWN])


def _is_direct(entry: str, host: str, port: int) -> bool:
    if entry == "*":
        return True
    address = names.address(host)
    if "/" in entry:
        try:
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    try:
        wanted, only = names.split(entry) if entry.count(":") < 2 or entry.startswith("[") else (entry, None)
        wanted = names.canonical(wanted.removeprefix("*").removeprefix("."))
    except names.Nonsense:
        return False
    if only not in (None, port):
        return False
    return host == wanted or (address is None and host.endswith(f".{wanted}"))
