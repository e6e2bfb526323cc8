"""Ports that lead through a sandbox's wall because somebody asked for it, as texts and as what they mean.

    --forward 5432                   127.0.0.1:5432 of the host, reached inside at 127.0.0.1:5432
    --forward db.example.org:5432    that host as the host reaches it, inside at 127.0.0.1:5432
    --forward 15432=localhost:5432   the same with another port inside
    --forward unix:/run/db.sock      a Unix socket of the host, at the same path inside

    --publish 8080                   port 8080 of the sandbox, reached on the host at 127.0.0.1:8080
    --publish 8000:80                port 80 of the sandbox, reached on the host at 127.0.0.1:8000
    --publish 0:80                   the same at a port of the host that is free

Not here: who listens and passes on (`sandbox/networking/`).
"""

import os

from elsewhere.errors import UsageError
from elsewhere.linux.network import OWN_PORTS
from elsewhere.network import names
from elsewhere.units import brief
from elsewhere.values import dataclass

__all__ = ["Forward", "Publish"]

_LOOPBACK = "127.0.0.1"
_LONGEST_PATH = 107  # of a Unix socket


@dataclass(frozen=True, slots=True)
class Forward:
    """A service of the host, for a sandbox: at `host` and `port`, inside at the port `inside`; or a Unix socket at `path`."""

    inside: int = 0
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, value: object) -> "Forward":
        if not isinstance(value, str):
            raise _bad_forward(value, "is no text")
        text = value.strip()
        try:
            if text.startswith("unix:"):
                return cls(path=_path(text.removeprefix("unix:")))
            inner, equals, target = text.rpartition("=")
            host, port = _target(target)
            return cls(_free(names.port(inner) if equals else port), host, port)
        except names.Nonsense as wrong:
            raise _bad_forward(value, str(wrong)) from None

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        inner = "" if self.inside == self.port else f"{self.inside}="
        return inner + (str(self.port) if self.host == _LOOPBACK else names.authority(self.host, self.port))


@dataclass(frozen=True, slots=True)
class Publish:
    """A service of a sandbox, for the host: the port `inside`, at the port `port` of the host's loopback; 0: at a free one."""

    inside: int
    port: int

    @classmethod
    def parse(cls, value: object) -> "Publish":
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise _bad_publish(value, "is neither a port nor a pair of them")
        outer, colon, inner = str(value).strip().rpartition(":")
        if not colon and inner == "0":
            raise _bad_publish(value, "names no port of the sandbox: 0 stands in front of it", "for example: --publish 0:80")
        if ":" in outer or (colon and not outer.isdigit()):
            raise _bad_publish(value, f"names an address of the host, and published ports are reached at {_LOOPBACK} alone")
        try:
            inside = names.port(inner)
            if inside in OWN_PORTS:
                raise names.Nonsense(f"would publish port {inside}, which is the sandbox's own way out")
            return cls(inside, (0 if outer == "0" else names.port(outer)) if colon else inside)
        except names.Nonsense as wrong:
            raise _bad_publish(value, str(wrong)) from None

    def __str__(self) -> str:
        return str(self.inside) if self.port == self.inside else f"{self.port}:{self.inside}"


def _target(text: str) -> tuple[str, int]:
    if text.isdigit():
        return _LOOPBACK, names.port(text)
    if "/" in text or "@" in text:
        raise names.Nonsense("is not a host and a port alone; a path of a Unix socket begins with unix:")
    if not text:
        raise names.Nonsense("is empty")
    host, port = names.split(text)
    if port is None:
        raise names.Nonsense("has no port")
    return names.canonical(host), port


def _free(inside: int) -> int:
    if inside in OWN_PORTS:
        raise names.Nonsense(
            f"takes port {inside} inside, where the sandbox has its own way out: choose another one, as in 5432={inside}"
        )
    return inside


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise names.Nonsense("has a path that does not begin with /")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text) or text.endswith("/"):
        raise names.Nonsense("has a path that no socket can have")
    path = os.path.normpath(text)
    path = path[1:] if path.startswith("//") else path
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise names.Nonsense(f"has a path of more than {_LONGEST_PATH} bytes, which is the most that a socket's can have")
    return path


def _bad_forward(value: object, reason: str) -> UsageError:
    return UsageError(
        "bad_forward",
        f"--forward {brief(value)} {reason}",
        hint="for example: 5432, db.example.org:5432, 15432=localhost:5432 or unix:/run/db.sock",
    )


def _bad_publish(value: object, reason: str, hint: str = "") -> UsageError:
    return UsageError(
        "bad_publish", f"--publish {brief(value)} {reason}", hint=hint or "for example: 8080, 8000:80, or 0:80 for a free port"
    )
