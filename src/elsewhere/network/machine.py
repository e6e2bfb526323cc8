"""What this machine's own settings name: the registries and mirrors that its pip, npm, apt, cargo, go and git are told of.

Only hosts and ports are taken out of them: a user, a password or a token beside them is dropped where it is read. A proxy that
they name is no host to reach: through it everything could be reached (`upstream.py` is about that one). Nothing is followed,
resolved or connected to, what is nonsense is passed over, and a file that is no small regular file is not read.
"""

import contextlib
import glob
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import urlsplit

from elsewhere.errors import UsageError
from elsewhere.network import names
from elsewhere.network.rules import Rule, parse

__all__ = ["named_by_machine"]

_LARGEST = 256 << 10
_MOST_FILES, _MOST_RULES, _LONGEST = 100, 200, 2000
_PORTS = {"http": 80, "https": 443, "ssh": 22, "git": 9418}
_URL = re.compile(r"(?:[a-z]+\+)?(?:https?|ssh|git)://[^\s\"'<>|,;]+", re.IGNORECASE)
_SHORT_SSH = re.compile(r"[\w.-]+@([\w.-]+):(?!\d+/?$)\S*")  # git@example.org:path
_SECTION = re.compile(r'^\s*\[\s*url\s+"((?:[^"\\]|\\.)*)"\s*\]', re.IGNORECASE)

Found = Iterator[tuple[str, str]]  # an address of the web, and who names it


def named_by_machine(home: str, environ: Mapping[str, str], root: str = "/") -> tuple[Rule, ...]:
    """Rules for all that is named, each once, with the place that names it; `root` is where the system's own files lie."""
    found: dict[Rule, None] = {}
    root = root.rstrip("/")
    for reader in (_pip, _npm, _apt, _cargo, _go, _git):
        for url, place in reader(home, environ, root):
            rule = _rule(url, place)
            if rule is not None and len(found) < _MOST_RULES:
                found.setdefault(rule)
    return tuple(found)


def _rule(url: str, place: str) -> Rule | None:
    """The port is always named, since it always is in what is meant: a private mirror is one that somebody wrote down."""
    with contextlib.suppress(ValueError, UsageError):
        parts = urlsplit(url[:_LONGEST].rpartition("+")[2] if "+" in url.partition(":")[0] else url[:_LONGEST])
        port = _PORTS.get(parts.scheme.lower()) if parts.port is None else parts.port
        if parts.hostname and port:
            return parse(names.authority(parts.hostname, port), why=place)
    return None


# -- one reader for each program ------------------------------------------------------------------------------------------------


def _pip(home: str, environ: Mapping[str, str], root: str) -> Found:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX",
                 "UV_DEFAULT_INDEX", "UV_FIND_LINKS"):  # fmt: skip
        yield from _urls(environ.get(name, ""), name)
    config = _config_home(home, environ)
    places = [f"{root}/etc/pip.conf", f"{root}/etc/xdg/pip/pip.conf", f"{home}/.pip/pip.conf", f"{config}/pip/pip.conf"]
    for path in [*places, environ.get("PIP_CONFIG_FILE", "")]:
        yield from _urls_of_keys(path, ("index-url", "extra-index-url", "find-links"), home)
    for path in (f"{root}/etc/uv/uv.toml", f"{config}/uv/uv.toml"):
        document = _toml(path)
        for key in ("index-url", "extra-index-url", "find-links"):
            yield from _texts(document.get(key), path, home)
        for index in _tables(document.get("index")):
            yield from _texts(index.get("url"), path, home)


def _npm(home: str, environ: Mapping[str, str], root: str) -> Found:
    for name in ("NPM_CONFIG_REGISTRY", "npm_config_registry", "YARN_NPM_REGISTRY_SERVER"):
        yield from _urls(environ.get(name, ""), name)
    chosen = environ.get("NPM_CONFIG_USERCONFIG", environ.get("npm_config_userconfig", f"{home}/.npmrc"))
    for path in (f"{root}/etc/npmrc", chosen, f"{home}/.yarnrc", f"{home}/.yarnrc.yml"):
        for line in _lines(path):
            # Either the registry, or that of a scope: `@scope:registry=…`. Lines with tokens begin with `//` and are not for us.
            key, _, value = line.partition("=") if "=" in line else line.strip().partition(" ")
            if key.strip(" \t\"':").rpartition(":")[2] in ("registry", "npmRegistryServer"):
                yield from _urls(value, _shown(path, home))


def _apt(home: str, environ: Mapping[str, str], root: str) -> Found:  # noqa: ARG001 (all readers are called alike)
    lists = sorted(glob.glob(f"{glob.escape(root)}/etc/apt/sources.list.d/*.list"))[:_MOST_FILES]
    for path in [f"{root}/etc/apt/sources.list", *lists]:
        for line in _lines(path):
            if line.split(None, 1)[:1] in (["deb"], ["deb-src"]):
                yield from _urls(line, _shown(path, home))
    for path in sorted(glob.glob(f"{glob.escape(root)}/etc/apt/sources.list.d/*.sources"))[:_MOST_FILES]:
        inside = False
        for line in _lines(path):
            inside = line.lower().startswith("uris:") or (inside and line.startswith((" ", "\t")))
            if inside:
                yield from _urls(line, _shown(path, home))


def _cargo(home: str, environ: Mapping[str, str], root: str) -> Found:  # noqa: ARG001
    for name, value in environ.items():
        if name.startswith("CARGO_REGISTRIES_") and name.endswith("_INDEX"):
            yield from _urls(value, name)
    place = environ.get("CARGO_HOME") or f"{home}/.cargo"
    for path in (f"{place}/config.toml", f"{place}/config"):
        document = _toml(path)
        for section, key in (("source", "registry"), ("registries", "index"), ("registry", "index")):
            within = document.get(section)
            for table in _tables(list(within.values())) if isinstance(within, dict) else []:
                yield from _texts(table.get(key), path, home)


def _go(home: str, environ: Mapping[str, str], root: str) -> Found:  # noqa: ARG001
    for name in ("GOPROXY", "GOSUMDB"):
        yield from _urls(environ.get(name, ""), name)
    path = environ.get("GOENV") or f"{_config_home(home, environ)}/go/env"
    for line in _lines(path):
        if line.startswith(("GOPROXY=", "GOSUMDB=")):
            yield from _urls(line.partition("=")[2], _shown(path, home))


def _git(home: str, environ: Mapping[str, str], root: str) -> Found:
    """What addresses are rewritten to: `[url "https://mirror.example/"] insteadOf = …`."""
    for path in (f"{root}/etc/gitconfig", f"{_config_home(home, environ)}/git/config", f"{home}/.gitconfig"):
        for line in _lines(path):
            section = _SECTION.match(line)
            if section:
                short = _SHORT_SSH.fullmatch(section[1])
                yield from _urls(f"ssh://{short[1]}" if short else section[1], _shown(path, home))


# -- reading --------------------------------------------------------------------------------------------------------------------


def _urls(text: str, place: str) -> Found:
    for match in _URL.finditer(text[: _LONGEST * 4]):
        yield match[0], place


def _urls_of_keys(path: str, keys: tuple[str, ...], home: str) -> Found:
    """Of a file of `key = value` lines, of which a value may go on, indented, on those that follow."""
    inside = False
    for line in _lines(path):
        if not line[:1].isspace():
            inside = line.partition("=")[0].strip().lower().replace("_", "-") in keys
        if inside:
            yield from _urls(line, _shown(path, home))


def _texts(value: object, path: str, home: str) -> Found:
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            yield from _urls(text, _shown(path, home))


def _tables(value: object) -> Iterable[dict[str, object]]:
    return [table for table in value if isinstance(table, dict)] if isinstance(value, list) else []


def _toml(path: str) -> dict[str, object]:
    try:
        return tomllib.loads(_text(path))
    except (ValueError, RecursionError):
        return {}


def _lines(path: str) -> list[str]:
    """Without comments and what is empty."""
    return [line for line in _text(path).splitlines() if line.strip() and not line.lstrip().startswith(("#", ";"))]


def _text(path: str) -> str:
    if not path.startswith("/"):
        return ""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST:
                return ""
            return stream.read(_LARGEST).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _config_home(home: str, environ: Mapping[str, str]) -> str:
    chosen = environ.get("XDG_CONFIG_HOME", "")
    return chosen if chosen.startswith("/") else f"{home}/.config"


def _shown(path: str, home: str) -> str:
    path = os.path.normpath(path)
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") else path
