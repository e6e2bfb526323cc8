"""What a setting is, and what its values may be, by their kind.

Not here: which settings there are, where values come from, and which of them holds (`settings.py`).
"""

import os
from collections.abc import Callable
from typing import Any

from elsewhere import limits, units
from elsewhere.errors import UsageError
from elsewhere.meeting import home_directory
from elsewhere.values import dataclass

__all__ = ["UNAVAILABLE", "Key", "Wrong", "from_text", "understood"]

UNAVAILABLE = ("docker", "podman", "macos-container", "seatbelt", "none")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. `narrows` says what a project's file may do with it before it is trusted:

    smaller    make it smaller
    earlier    choose one that stands before the one that holds, in `choices`
    true       switch it on
    false      switch it off
    available  choose what there is
    anything   whatever it likes
    nothing    nothing
    never      it is not for a project's file at all
    """

    section: str
    name: str
    kind: str
    default: Any
    narrows: str
    example: str
    help: str
    widening: str = ""
    without: str = ""
    choices: tuple[str, ...] = ()

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """ELSEWHERE_SANDBOX_… are the identity inside a sandbox, so the two large sections do without their names."""
        section = "" if self.section in ("sandbox", "limits") else f"{self.section}_"
        return f"ELSEWHERE_{section}{self.name}".upper()

    @property
    def adds_up(self) -> bool:
        return isinstance(self.default, tuple)


class Wrong(Exception):
    """What is wrong with a value, for whoever knows where it stands."""


def understood(key: Key, value: object, base: str) -> Any:
    """The value as the rest of the program has it, or `Wrong`. Relative paths in it are relative to `base`."""
    if units.is_huge(value):
        raise Wrong("is too large a number")
    return _PARSERS[key.kind](key, value, base)


def from_text(key: Key, text: str) -> object:
    """A variable's text as a file would have it."""
    if key.kind == "switch":
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else text
    if key.kind in ("names", "words"):
        return [word.strip() for word in text.split(",") if word.strip()]
    if key.adds_up:
        words: list[str] = []
        for word in text.split(":"):
            if key.kind == "shares" and words and word in ("rw", "ro"):
                words[-1] += f":{word}"
            elif word:
                words.append(word)
        return words
    return text


def _choice(key: Key, value: object, _base: str) -> str:
    if not isinstance(value, str) or value not in key.choices:
        unavailable = UNAVAILABLE if key.name == "backend" else ()
        raise Wrong(f"is none of {', '.join(one for one in key.choices if one not in unavailable)}")
    return value


def _on_or_off(_key: Key, value: object, _base: str) -> bool:
    if not isinstance(value, bool):
        raise Wrong("is neither true nor false")
    return value


def _limited(key: Key, value: object, _base: str) -> int | float:
    try:
        return limits.parse(key.name, value)
    except UsageError as error:
        raise Wrong(f"is no limit for {key.name}: {error.hint}") from None


def _count(_key: Key, value: object, _base: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 22:
        raise Wrong("is not a whole number of at least 1")
    return value


def _size(key: Key, value: object, _base: str) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Wrong("is not a size")
    try:
        if key.name.startswith("memory") and str(value).endswith("%"):
            return int(limits.parse("memory", value))
        found = units.size(value)
    except UsageError as error:
        raise Wrong(f"is not a size: {error.hint}") from None
    if found >= 1 << 60:
        raise Wrong("is more than any machine has")
    return found


def _time(_key: Key, value: object, _base: str) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Wrong("is not a duration")
    try:
        return units.duration(value)
    except UsageError as error:
        raise Wrong(f"is not a duration: {error.hint}") from None


def _texts(value: object, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Wrong(f"is not a list of {what}")
    if any(not item or "\0" in item for item in value):
        raise Wrong("has an empty or impossible entry")
    return value


def _names(_key: Key, value: object, _base: str) -> tuple[str, ...]:
    found = _texts(value, "names")
    for name in found:
        if not name.isascii() or not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise Wrong(f"has {name!r}, which is not the name of a variable")
    return tuple(dict.fromkeys(found))


def _places(_key: Key, value: object, _base: str) -> tuple[str, ...]:
    """Parts of the project, whatever the source."""
    return tuple(dict.fromkeys(_texts(value, "names")))


def _words(_key: Key, value: object, _base: str) -> tuple[str, ...]:
    """What they mean is for somebody else to say."""
    return tuple(dict.fromkeys(_texts(value, "texts")))


def _paths(_key: Key, value: object, base: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_path(text, base) for text in _texts(value, "paths")))


def _shares(_key: Key, value: object, base: str) -> tuple[str, ...]:
    """Absolute paths, with `:rw` for those that may be written."""
    found = []
    for text in _texts(value, "paths"):
        path, colon, how = text.rpartition(":")
        if not colon or how not in ("rw", "ro") or not path:
            path, how = text, "ro"
        found.append(_path(path, base) + (":rw" if how == "rw" else ""))
    return tuple(dict.fromkeys(found))


def _path(text: str, base: str) -> str:
    if text == "~" or text.startswith("~/"):
        text = home_directory() + text[1:]
    elif text.startswith("~"):
        raise Wrong(f"has {text!r}, and only ~ itself is understood")
    joined = os.path.join(base or os.getcwd(), text)
    # What `..` means behind a link is for the kernel to say.
    return joined if ".." in joined.split("/") else os.path.normpath(joined)


_PARSERS: dict[str, Callable[[Key, object, str], Any]] = {
    "choice": _choice,
    "switch": _on_or_off,
    "limit": _limited,
    "count": _count,
    "size": _size,
    "time": _time,
    "names": _names,
    "places": _places,
    "words": _words,
    "paths": _paths,
    "shares": _shares,
}
