"""The environment of a command: a short list of names from the caller's, what was asked for, and the sandbox's identity.

The caller's whole environment never goes in. The names (never the values) of what was left out are kept, so that somebody who
misses a variable can find out why.
"""

import os
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping

from elsewhere.errors import UsageError
from elsewhere.linux.network import PROXY_PORT
from elsewhere.sandbox.identity import ALLOWED, RESERVED
from elsewhere.values import dataclass

__all__ = ["Environment", "compose", "looks_secret", "parse_assignment", "read_env_file"]

_PASSED = frozenset(
    """LANG LANGUAGE TZ TERM COLORTERM NO_COLOR PATH HOME USER LOGNAME SHELL VIRTUAL_ENV NVM_DIR JAVA_HOME GOPATH CARGO_HOME
    RUSTUP_HOME PYENV_ROOT CI SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE PIP_CERT NODE_EXTRA_CA_CERTS
    GIT_SSL_CAINFO CARGO_HTTP_CAINFO""".split()
)
_TUNNEL = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "network", "tunnel.py")
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
_NOT_PROXIED = "localhost,127.0.0.1,::1,0.0.0.0,::"  # all of them are the sandbox itself
_PASSED_PREFIXES = ("LC_", "CONDA_")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SECRET_PARTS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "PRIVATE", "APIKEY", "AUTH")
_SECRET_WORDS = frozenset(("KEY", "KEYS", "PASS", "PWD", "PAT"))


@dataclass(frozen=True, slots=True)
class Environment:
    variables: dict[str, str]
    left_out: tuple[str, ...]


def compose(
    caller: Mapping[str, str],
    *,
    asked: Iterable[tuple[str, str | None]] = (),
    passed: Iterable[str] = (),
    identity: Mapping[str, str],
    network: str = "host",
    redirected: bool = True,
    within_repository: bool = False,
) -> Environment:
    """`asked` are `--env` and `--env-file` (None: the caller's own value); `passed` are names from settings. `redirected`:
    connections of programs that know no proxy find ours all the same. `within_repository`: the project is a part of one."""
    chosen = {name: value for name, value in caller.items() if _is_passed(name)}
    if within_repository:
        chosen["GIT_DISCOVERY_ACROSS_FILESYSTEM"] = "1"  # the project is a mount inside, at which git would stop looking
    chosen |= _proxies(caller, network)
    if network == "allow" and not redirected:
        chosen["GIT_SSH_COMMAND"] = f"ssh -o ProxyCommand='{shlex.quote(sys.executable)} {shlex.quote(_TUNNEL)} %h %p'"
    for name in passed:
        _refuse_reserved(name)
        if name in caller:
            chosen[name] = caller[name]
    for name, value in asked:
        _refuse_reserved(name)
        if value is not None:
            chosen[name] = value
        elif name in caller:
            chosen[name] = caller[name]
        else:
            raise UsageError(
                "env_not_set",
                f"--env {name}: this variable is not set here",
                hint=f"give it a value: --env {name}=VALUE",
            )
    chosen.setdefault("PATH", _DEFAULT_PATH)
    left_out = tuple(sorted(name for name in caller if name not in chosen))
    return Environment({**chosen, **identity}, left_out)


def _proxies(caller: Mapping[str, str], network: str) -> dict[str, str]:
    """The host's own proxy is the host's affair, its password above all: only with the host's network is it that of commands."""
    if network == "host":
        names = (*_PROXIES, *map(str.upper, _PROXIES))
        return {name: caller[name] for name in names if name in caller}
    if network == "none":
        return {}
    ours = f"http://127.0.0.1:{PROXY_PORT}"
    found = {"http_proxy": ours, "https_proxy": ours, "all_proxy": ours, "no_proxy": _NOT_PROXIED}
    return found | {name.upper(): value for name, value in found.items()}


def _is_passed(name: str) -> bool:
    return name in _PASSED or name.startswith(_PASSED_PREFIXES)


def _refuse_reserved(name: str) -> None:
    if name not in ALLOWED and any(name == word or (word.endswith("_") and name.startswith(word)) for word in RESERVED):
        raise UsageError(
            "env_reserved", f"{name} is part of the sandbox's identity and cannot be set", hint="choose another name"
        )


def looks_secret(name: str) -> bool:
    """Whether somebody who is asked to trust a project's file should be told: a stranger's repository could get the user's keys.
    Without trust it gets no variable at all, whatever it is called."""
    upper = name.upper()
    words = upper.split("_")
    return any(part in upper for part in _SECRET_PARTS) or (len(words) > 1 and any(word in _SECRET_WORDS for word in words))


def parse_assignment(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name or not (name[0].isalpha() or name[0] == "_") or not name.replace("_", "a").isalnum() or not name.isascii():
        raise UsageError(
            "bad_env",
            f"{name!r} is not the name of an environment variable",
            hint="write NAME=VALUE, or NAME to pass the caller's own value",
        )
    if "\0" in value:
        raise UsageError("bad_env", f"the value of {name} contains a NUL byte", hint="remove it")
    return name, value if equals else None


def _without_waiting(path: str, flags: int) -> int:
    """A fifo would keep us waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def read_env_file(path: str) -> list[tuple[str, str | None]]:
    """`KEY=value` lines; blank lines and `#` comments are skipped, a leading `export` and surrounding quotes are dropped."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", opener=_without_waiting) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise UsageError(
                    "bad_env_file", f"--env-file {path!r} is not a regular file", hint="name a file of KEY=value lines"
                )
            lines = stream.read().split("\n")  # not splitlines: a value may contain every other line break
    except OSError as error:
        raise UsageError(
            "bad_env_file",
            f"--env-file {path!r} cannot be read: {error.strerror}",
            hint="name a file of KEY=value lines",
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        text = text.removeprefix("export ").lstrip()
        if "=" not in text:
            raise UsageError(
                "bad_env_file",
                f"{path}, line {number}: there is no = in it",
                hint="write one KEY=value on each line",
            )
        try:
            name, value = parse_assignment(text)
        except UsageError as error:
            raise UsageError("bad_env_file", f"{path}, line {number}: {error.message}", hint=error.hint) from None
        if value and len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found.append((name, value))
    return found
