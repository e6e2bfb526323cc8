"""The host's own proxy, if it has one: everything that is allowed goes through it, with its credentials, which stay out here.

    http_proxy, https_proxy, all_proxy    where it is; http://USER:PASSWORD@HOST:PORT
    no_proxy                              what is reached without it: names (and their subdomains), addresses, networks, *

In lower or upper case; lower wins. Behind it, names are resolved by it and not by us. Only proxies that are spoken to without
encryption are known here: another kind is refused, and never passed by.
"""

import ipaddress
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import field
from urllib.parse import unquote, urlsplit

from elsewhere.errors import UsageError
from elsewhere.network import names
from elsewhere.values import dataclass

__all__ = ["Server", "Upstream", "from_environment"]

_SHORTEST_SECRET = 6


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
    except ValueError:
        raise _bad(name, "names no proxy that can be understood") from None
    if parts.scheme.lower() != "http":
        raise _bad(name, f"names a proxy that is spoken to by {parts.scheme}, which is not supported")
    authorization = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + b64encode(pair.encode()).decode("ascii")
    return Server(host, port, authorization)


def _bad(name: str, reason: str) -> UsageError:
    """Without the value: there may be a password in it."""
    return UsageError("bad_proxy", f"the variable {name} {reason}", hint=f"for example: {name}=http://proxy.example.org:3128")


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
