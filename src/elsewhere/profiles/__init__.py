"""Profiles: what one agent program needs in a sandbox and no more, as small files of data.

    allow       hosts that it talks to: rules of --allow
    variables   variables of the caller that go in, if they are set: keys, and what chooses a model or an address
    token       files that hold its login: shown as they are, read-only
    state       files and directories that it reads and writes: the sandbox has a copy of its own, on the first write
    program     directories that it is installed in, for the project view
    moved       a variable by which its user moves a place, and the place: TOOL_HOME = "~/.tool"

Paths begin with `~/` or `/`; what is not there is left out by whoever uses a profile. The built-in ones lie beside this file, a
user's own in `profiles/` beside the user's settings, where one of the same name counts instead. A project brings none.

Not here: who may name a profile, what becomes of its places (`operations/profiling.py`), and what values variables have.
"""

import os
import tomllib
from collections.abc import Mapping
from typing import Any

from elsewhere import settings
from elsewhere.errors import UsageError
from elsewhere.meeting import home_directory
from elsewhere.network import rules
from elsewhere.units import brief
from elsewhere.values import dataclass

__all__ = ["Profile", "known", "load"]

_SUFFIX = ".toml"
_LISTS = {
    "allow": 'a list of hosts, such as ["api.example.org"]',
    "variables": 'a list of names of variables, such as ["TOOL_API_KEY"]',
    "token": 'a list of paths, such as ["~/.tool/auth.json"]',
    "state": 'a list of paths, such as ["~/.tool"]',
    "program": 'a list of paths, such as ["~/.local/share/tool"]',
}
_EXPECTED = {"about": 'a text, such as "the tool of somebody"', **_LISTS, "moved": 'a table of paths: TOOL_HOME = "~/.tool"'}


@dataclass(frozen=True, slots=True)
class Profile:
    """Paths are absolute, and where the caller's variables moved them; whether anything is there is not known here."""

    name: str
    file: str
    about: str
    allow: tuple[str, ...]
    variables: tuple[str, ...]
    token: tuple[str, ...]
    state: tuple[str, ...]
    program: tuple[str, ...]


def known() -> dict[str, str]:
    """The files of all profiles, by their names."""
    found: dict[str, str] = {}
    for place in (os.path.dirname(os.path.abspath(__file__)), _users_own()):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue  # a user without profiles of their own
        stems = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
        found.update({stem: os.path.join(place, stem + _SUFFIX) for stem in stems if _is_name(stem)})
    return dict(sorted(found.items()))


def load(name: str, environment: Mapping[str, str]) -> Profile:
    """The profile of this name, for a caller with this environment."""
    files = known()
    if name not in files:
        raise UsageError(
            "bad_profile",
            f"there is no profile {name!r}",
            hint=f"known: {', '.join(files)}; your own would be {os.path.join(_users_own(), 'NAME' + _SUFFIX)}",
        )
    return _read(name, files[name], environment)


def _users_own() -> str:
    return os.path.join(os.path.dirname(settings.user_file()), "profiles")


def _is_name(text: str) -> bool:
    return text.isascii() and text.replace("-", "a").replace("_", "a").isalnum()


# -- what a file may say --------------------------------------------------------------------------------------------------------


def _read(name: str, path: str, environment: Mapping[str, str]) -> Profile:
    values = _document(path)
    for key in values:
        if key not in _EXPECTED:
            raise _bad(path, f"unknown key {key!r}", f"known here: {', '.join(_EXPECTED)}")
    about = values.get("about", "")
    if not isinstance(about, str):
        raise _wrong(path, "about", about)
    lists = {key: _texts(path, key, values.get(key, [])) for key in _LISTS}
    for text in lists["variables"]:
        if not _is_variable(text):
            raise _wrong(path, "variables", text)
    moved = _moved(path, values.get("moved", {}))
    chosen = {variable: place for variable, place in moved.items() if environment.get(variable, "").startswith("/")}

    def places(key: str) -> tuple[str, ...]:
        return tuple(_absolute(path, key, _where(text, chosen, environment)) for text in lists[key])

    return Profile(
        name=name,
        file=path,
        about=about,
        allow=tuple(_rule(path, text) for text in lists["allow"]),
        variables=tuple(dict.fromkeys((*lists["variables"], *moved))),
        token=places("token"),
        state=places("state"),
        program=places("program"),
    )


def _document(path: str) -> dict[str, Any]:
    try:
        content = settings.read(path)
        return tomllib.loads((content or b"").decode())
    except UsageError as error:
        raise UsageError("bad_profile_file", error.message, hint=error.hint) from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, str(error), "mend the file, or move it away") from None


def _texts(path: str, key: str, value: object) -> list[str]:
    if not isinstance(value, list):
        raise _wrong(path, key, value)
    for text in value:
        if not isinstance(text, str) or not text or "\0" in text:
            raise _wrong(path, key, text)
    return value


def _rule(path: str, text: str) -> str:
    try:
        return str(rules.parse(text))
    except UsageError as error:
        reason = error.message.removeprefix("--allow ")
        raise _bad(path, f"allow: {reason}", f"expected: {_EXPECTED['allow']}") from None


def _moved(path: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(path, "moved", value)
    for variable, place in value.items():
        if not _is_variable(variable) or not isinstance(place, str) or not place.startswith(("~/", "/")):
            raise _wrong(path, f"moved.{variable}", place)
    return value


def _where(text: str, chosen: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """A path as the caller's variables have it."""
    for variable, place in chosen.items():
        if text == place or text.startswith(place.rstrip("/") + "/"):
            return environment[variable].rstrip("/") + text[len(place.rstrip("/")) :]
    return text


def _absolute(path: str, key: str, text: str) -> str:
    if text.startswith("~/"):
        text = os.path.join(home_directory(), text[2:])
    if not text.startswith("/") or ".." in text.split("/"):
        raise _wrong(path, key, text)
    return os.path.normpath(text)


def _is_variable(text: str) -> bool:
    return text.isascii() and text.replace("_", "a").isalnum() and not text[0].isdigit()


def _wrong(path: str, key: str, value: object) -> UsageError:
    return _bad(path, f"{key}: {brief(value)} is not what it can be", f"expected: {_EXPECTED[key.split('.')[0]]}")


def _bad(path: str, reason: str, hint: str) -> UsageError:
    return UsageError("bad_profile_file", f"{path}: {reason}", hint=hint)
