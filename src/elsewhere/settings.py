"""Settings: which keys there are, what each may say, and what a project's own file may not say by itself.

One table, `KEYS`, is the truth about all of them: the template of `elsewhere init`, the list of `elsewhere config`, the variables
of the environment, the errors and the pages follow it. A value comes from the strongest source that has one:

    command line > environment > project (its elsewhere.toml) > user (~/.config/elsewhere/elsewhere.toml) > default

Lists add up over all sources. A project's file may come from a stranger, so what would widen that which holds without it is held
back (`held_back`) unless the user trusts the file. `untrusted` tightens what weaker sources than its own say.

Not here: where the files lie and whether one is trusted (`operations/settings.py`), and what a value does.
"""

import difflib
import os
import resource
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elsewhere import limits, units
from elsewhere.errors import Unavailable, UsageError
from elsewhere.meeting import home_directory
from elsewhere.paths import is_within

__all__ = [
    "FILE",
    "KEYS",
    "Key",
    "Value",
    "built_in",
    "check_backend",
    "from_environment",
    "from_given",
    "held_back",
    "human",
    "merge",
    "parse",
    "read",
    "template",
    "unknown",
    "user_file",
]

FILE = "elsewhere.toml"
SOURCES = ("default", "user", "project", "environment", "command line")
_LARGEST = 64 << 10
_LONGEST_LINE = 4096  # a key of thousands of parts would keep the parser busy for minutes
_LONGEST_LIST = 256  # each place costs whoever waits for the sandbox
_UNAVAILABLE = ("docker", "podman", "macos-container", "seatbelt", "none")
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


@dataclass(frozen=True, slots=True)
class Value:
    """`source` is one of `SOURCES`; `untrusted`, if that tightened it; for a list, all sources that had a part in it."""

    value: Any
    source: str


def _limit(name: str, example: str, text: str, without: str) -> Key:
    return Key("limits", name, "limit", None, "smaller", example, text, "it takes more", without)


def _switch(name: str, text: str, widening: str) -> Key:
    return Key("sandbox", name, "switch", False, "false", "true", text, widening)


_RESERVE = limits.parse("memory", "10%")
_ALL = (
    Key(
        "sandbox", "backend", "choice", "auto", "available", '"native"', "what sandboxes are made of: auto or native",
        "it cannot be had here", choices=("auto", "native", *_UNAVAILABLE),
    ),
    Key(
        "sandbox", "view", "choice", "machine", "earlier", '"project"',
        "how much is seen: machine (all but what is hidden) or project (system, toolchains, this project)",
        "it shows more of the machine", choices=("project", "machine"),
    ),
    Key(
        "sandbox", "network", "choice", "host", "earlier", '"none"', "which network there is inside: host or none",
        "it opens the network", choices=("none", "host"),
    ),
    Key(
        "sandbox", "untrusted", "switch", False, "true", "true",
        "for code that nobody trusts: project view, no network, tight limits", "it takes the tight limits away",
    ),
    _switch("nested", "allow user namespaces inside", "it gives the sandbox more of the kernel"),
    _switch("best_effort", "run even if the host cannot enforce a limit that was asked for", "it gives limits up"),
    _switch("gpu", "show the devices of NVIDIA", "it gives the sandbox devices"),
    Key("sandbox", "hide", "paths", (), "anything", '["~/notes", "secrets"]', "places that are not seen, besides the usual ones"),
    Key(
        "sandbox", "share", "shares", (), "nothing", '["~/datasets", "/srv/cache:rw"]',
        "places of the host that are seen as they are: read-only, or writable with :rw", "it shows places of the host",
    ),
    Key("sandbox", "device", "paths", (), "nothing", '["/dev/kvm"]', "devices of the host", "it gives the sandbox devices"),
    _limit("memory", '"2G"', "memory of all processes together: a size, or a share such as 50%", "80% of the machine's"),
    _limit("cpus", "1.5", "how many processors' worth of time", "no limit"),
    _limit("pids", "256", "how many processes and threads at once", "4096"),
    _limit("disk", '"1G"', "how many bytes may be written, all layers together", "20G"),
    _limit("open_files", "1024", "how many descriptors one process may have open", "the launcher's own"),
    _limit("timeout", '"10m"', "how long one command may take", "no limit"),
    _limit("ttl", '"2h"', "how long a sandbox lives", "24h for create"),
    _limit("idle", '"30m"', "how long a sandbox lives after the end of its last command", "no limit"),
    Key(
        "env", "pass", "names", (), "nothing", '["DATABASE_URL", "RUST_LOG"]',
        "variables of the caller that go in, besides the built-in list", "it takes variables of the caller",
    ),
    Key(
        "base", "live", "places", (), "anything", '["data/", "build/"]',
        "directories of the project that a pinned base does not copy: they show reality as it is",
    ),
    Key("admission", "most", "count", None, "never", "16", "how many sandboxes may run at once", without="no limit"),
    Key(
        "admission", "memory_reserve", "size", _RESERVE, "never", '"2G"',
        "memory that is left to the host: a size, or a share such as 10%", without="10% of the machine's",
    ),
    Key(
        "admission", "disk_reserve", "size", None, "never", '"2G"', "bytes that stay free on the disk of the state directory",
        without="5% of the file system, at most 1G",
    ),
    Key("admission", "wait", "switch", True, "never", "false", "wait until there is room, instead of being refused"),
)  # fmt: skip
KEYS = {key.dotted: key for key in _ALL}
_SECTIONS = tuple(dict.fromkeys(key.section for key in _ALL))
_DEFAULTS = {name: Value(key.default, "default") for name, key in KEYS.items()}
_VARIABLES = {key.variable: key for key in _ALL}
_TIGHT = {
    "sandbox.view": "project",
    "sandbox.network": "none",
    **{f"limits.{name}": value for name, value in limits.UNTRUSTED.given().items()},
}
_LIMITED = limits.LIVING.given()


# -- where they come from -------------------------------------------------------------------------------------------------------


def user_file() -> str:
    chosen = os.environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(chosen if chosen.startswith("/") else os.path.join(home_directory(), ".config"), "elsewhere", FILE)


def read(path: str, within: str | None = None) -> bytes | None:
    """What the file says, read once; None if there is none. `within`: it may not be a link that leads out of this directory."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a stranger's fifo must not keep us waiting
    try:
        with open(os.open(path, flags), "rb") as stream:
            about = os.fstat(stream.fileno())
            if stat.S_ISDIR(about.st_mode):
                raise _bad_file(path, "Is a directory")
            if not stat.S_ISREG(about.st_mode):
                raise _bad_file(path, "not a regular file")
            if within is not None:
                place = os.readlink(f"/proc/self/fd/{stream.fileno()}")
                if not is_within(place, within):
                    raise _bad_file(path, f"a link that leads out of the project, to {place!r}", "put a file in its place")
            content = stream.read(_LARGEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise _bad_file(path, "a link that leads nowhere") from None
        return None
    except OSError as error:
        raise _bad_file(path, str(error.strerror)) from error
    if len(content) > _LARGEST:
        raise _bad_file(path, f"larger than {units.format_size(_LARGEST)}", "settings are small: move the rest elsewhere")
    return content


def parse(path: str, content: bytes, base: str, *, project: bool) -> dict[str, Any]:
    """The values of a file, by dotted key. Relative paths in it are relative to `base`."""
    if max(map(len, content.split(b"\n"))) > _LONGEST_LINE:
        raise _bad_file(path, f"a line of more than {_LONGEST_LINE} bytes", "a list may have as many lines as it likes")
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise _bad_file(path, str(error)) from error
    found = {}
    for section, values in document.items():
        if section not in _SECTIONS:
            raise unknown(section, _SECTIONS, f"{path}: ")
        if not isinstance(values, dict):
            raise UsageError(
                "bad_settings", f"{path}: {section!r} is not a table", hint=f"write [{section}] on a line of its own"
            )
        for name, value in values.items():
            key = KEYS.get(f"{section}.{name}")
            if key is None:
                raise unknown(f"{section}.{name}", [known for known in KEYS if known.startswith(f"{section}.")], f"{path}: ")
            if project and key.narrows == "never":
                raise UsageError(
                    "bad_settings",
                    f"{path}: {key.dotted} is about the whole machine, not about a project",
                    hint=f"write it into {user_file()}",
                )
            if isinstance(value, list) and len(value) > _LONGEST_LIST:
                raise _bad_file(path, f"{key.dotted} has {len(value)} entries, more than {_LONGEST_LIST}", "name directories")
            found[key.dotted] = _parsed(key, value, f"{path}: {key.dotted}", base)
    return found


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """An empty variable is one that is not set."""
    found = {}
    for variable in environment:
        key = _VARIABLES.get(variable) if variable.startswith("ELSEWHERE_") else None
        if key is not None and (text := environment[variable]):
            found[key.dotted] = _parsed(key, _from_text(key, text), variable, "")
    return found


def from_given(given: Mapping[str, object]) -> dict[str, Any]:
    """Of the command line, or of a program; None is what was not given."""
    found = {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in KEYS:
            raise unknown(name, KEYS)
        key, option = KEYS[name], f"--{KEYS[name].name.replace('_', '-')}"
        try:
            found[name] = _understood(key, list(value) if isinstance(value, tuple) else value, "")
        except _Wrong as wrong:
            example = key.example.strip("[]").split(",")[0].strip('"')
            raise UsageError(
                "bad_option", f"{option} {units.brief(value)} {wrong}", hint=f"for example: {option} {example}"
            ) from None
    return found


def unknown(name: str, known: Iterable[str], where: str = "") -> UsageError:
    """An error that names the nearest right one: by its spelling, or by its last part alone."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1) or [right for right in known if right.endswith(f".{name}")]
    return UsageError(
        "unknown_setting",
        f"{where}unknown key {name!r}",
        hint=f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}",
    )


def check_backend(value: str) -> None:
    """Some are known by name from other tools: somebody who asks for one must not get another without being told."""
    if value in _UNAVAILABLE:
        raise Unavailable(
            "backend_unavailable",
            f"the backend {value!r} cannot be had: sandboxes are made of what the kernel gives, and nothing runs unconfined",
            hint='use backend "auto" or "native"; elsewhere doctor shows what this machine can do',
        )


def _bad_file(path: str, reason: str, hint: str = "mend the file, or move it away") -> UsageError:
    return UsageError("bad_settings", f"{path}: {reason}", hint=hint)


# -- what they may say ----------------------------------------------------------------------------------------------------------


class _Wrong(Exception):
    """What is wrong with a value, for whoever knows where it stands."""


def _parsed(key: Key, value: object, where: str, base: str) -> Any:
    try:
        return _understood(key, value, base)
    except _Wrong as wrong:
        raise UsageError(
            "bad_settings", f"{where} = {units.brief(value)} {wrong}", hint=f"for example: {key.name} = {key.example}"
        ) from None


def _understood(key: Key, value: object, base: str) -> Any:
    if units.is_huge(value):
        raise _Wrong("is too large a number")
    return _PARSERS[key.kind](key, value, base)


def _from_text(key: Key, text: str) -> object:
    """A variable's text as a file would have it."""
    if key.kind == "switch":
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else text
    if key.kind == "names":
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
        raise _Wrong(f"is none of {', '.join(one for one in key.choices if one not in _UNAVAILABLE)}")
    return value


def _on_or_off(_key: Key, value: object, _base: str) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("is neither true nor false")
    return value


def _limited(key: Key, value: object, _base: str) -> int | float:
    try:
        return limits.parse(key.name, value)
    except UsageError as error:
        raise _Wrong(f"is no limit for {key.name}: {error.hint}") from None


def _count(_key: Key, value: object, _base: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 22:
        raise _Wrong("is not a whole number of at least 1")
    return value


def _size(key: Key, value: object, _base: str) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Wrong("is not a size")
    try:
        if key.name.startswith("memory") and str(value).endswith("%"):
            return int(limits.parse("memory", value))
        found = units.size(value)
    except UsageError as error:
        raise _Wrong(f"is not a size: {error.hint}") from None
    if found >= 1 << 60:
        raise _Wrong("is more than any machine has")
    return found


def _texts(value: object, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _Wrong(f"is not a list of {what}")
    if any(not item or "\0" in item for item in value):
        raise _Wrong("has an empty or impossible entry")
    return value


def _names(_key: Key, value: object, _base: str) -> tuple[str, ...]:
    found = _texts(value, "names")
    for name in found:
        if not name.isascii() or not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise _Wrong(f"has {name!r}, which is not the name of a variable")
    return tuple(dict.fromkeys(found))


def _places(_key: Key, value: object, _base: str) -> tuple[str, ...]:
    """Parts of the project, whatever the source."""
    return tuple(dict.fromkeys(_texts(value, "names")))


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
        raise _Wrong(f"has {text!r}, and only ~ itself is understood")
    joined = os.path.join(base or os.getcwd(), text)
    # What `..` means behind a link is for the kernel to say.
    return joined if ".." in joined.split("/") else os.path.normpath(joined)


_PARSERS: dict[str, Callable[[Key, object, str], Any]] = {
    "choice": _choice,
    "switch": _on_or_off,
    "limit": _limited,
    "count": _count,
    "size": _size,
    "names": _names,
    "places": _places,
    "paths": _paths,
    "shares": _shares,
}


# -- which one holds ------------------------------------------------------------------------------------------------------------


def merge(sources: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Value]:
    """What holds, from the weakest source to the strongest."""
    found = dict(_DEFAULTS)
    for source, values in sources:
        for name, value in values.items():
            below = found[name]
            if not KEYS[name].adds_up:
                found[name] = Value(value, source)
            elif value:
                both = source if below.source == "default" else f"{below.source}, {source}"
                found[name] = Value(tuple(dict.fromkeys((*below.value, *value))), both)
    untrusted = found["sandbox.untrusted"]
    if untrusted.value:
        rank = SOURCES.index(untrusted.source)
        for name, tight in _TIGHT.items():
            if SOURCES.index(found[name].source) < rank and _wider(KEYS[name], found[name].value, tight):
                found[name] = Value(tight, "untrusted")
    return found


def held_back(values: Mapping[str, Any], without: Mapping[str, Value]) -> dict[str, Any]:
    """Of a project's values, those that would widen what holds without them; of a list, the entries that would."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key, now = KEYS[name], without[name]
        if key.adds_up:
            new = tuple(item for item in value if item not in now.value)
            if new and key.narrows != "anything":
                found[name] = new
        elif now.source not in ("environment", "command line") and _wider(key, value, now.value):
            found[name] = value  # where a stronger source has its say, it would change nothing
    return found


def _wider(key: Key, value: Any, than: Any) -> bool:
    if key.narrows == "smaller":
        return _amount(key, value) > _amount(key, than)
    if key.narrows == "earlier":
        return key.choices.index(value) > key.choices.index(than)
    if key.narrows == "available":
        return value in _UNAVAILABLE and value != than
    return bool(value != than and value != (key.narrows == "true"))


def _amount(key: Key, value: float | None) -> float:
    """What a limit comes to; not given, there is still the built-in one."""
    if value is None:
        value = built_in(key)
    if value is None and key.name == "open_files":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        value = None if hard == resource.RLIM_INFINITY else hard
    return float("inf") if value is None else value


def built_in(key: Key) -> Any:
    """The default as it will be: those of limits are applied by whoever makes the sandbox."""
    return _LIMITED.get(key.name) if key.kind == "limit" else key.default


# -- for people -----------------------------------------------------------------------------------------------------------------


def human(key: Key, value: Any) -> str:
    """A value as somebody would write it."""
    if value is None:
        return key.without or "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if key.adds_up:
        return ", ".join(value) or "none"
    if key.kind == "size" or key.name in ("memory", "disk"):
        return _human(value, (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))) or units.format_size(value)
    if key.name in ("timeout", "ttl", "idle"):
        return _human(value, (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))) or f"{value}s"
    return str(value)


def _human(value: float, parts: Iterable[tuple[str, int]]) -> str:
    return next((f"{int(value // size)}{letter}" for letter, size in parts if value and not value % size), "")


def template() -> str:
    """A file that says nothing and shows everything that a project's file can say."""
    lines = [
        "# Settings of this project for elsewhere. Every key is shown with an example; remove the # in front of it to use it.",
        "# `elsewhere config` shows what holds and where it comes from.",
        "#",
        "# This file alone can only narrow what a sandbox sees and may use. Keys that widen it, marked (trust), count after",
        "# `elsewhere trust`, until this file changes. Relative paths are relative to this directory.",
    ]
    for section in _SECTIONS:
        keys = [key for key in _ALL if key.section == section and key.narrows != "never"]
        lines += ["", f"[{section}]"] if keys else []
        for key in keys:
            words = f"{key.help[0].upper()}{key.help[1:]}. Default: {human(key, key.default)}.{_trust_words(key)}"
            lines += [f"# {words}", f"#{key.name} = {key.example}"]
    return "\n".join(lines) + "\n"


def _trust_words(key: Key) -> str:
    if key.narrows == "smaller":
        return " More: (trust)." if built_in(key) is not None or key.name == "open_files" else ""
    return " (trust)" if key.narrows in ("nothing", "false") else ""
