"""Settings: which keys there are, what each may say, and what a project's own file may not say by itself.

One table, `KEYS`, is the truth about all of them: the template of `elsewhere init`, the list of `elsewhere config`, the variables
of the environment, the errors and the pages follow it. A value comes from the strongest source that has one:

    command line > environment > project (its elsewhere.toml) > user (~/.config/elsewhere/elsewhere.toml) > default

Lists add up over all sources. A project's file may come from a stranger, so what would widen that which holds without it is held
back (`held_back`) unless the user trusts the file. `untrusted` tightens what weaker sources than its own say.

Not here: what a value may be (`keys.py`), whether a file is trusted (`operations/settings.py`), what a value does, and what a
stage of promotion (`promotion/stages.py`) or a race (`experiments/parsing.py`) is: here they are only tables of a project's file.
"""

import difflib
import os
import resource
import stat
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from elsewhere import limits, units
from elsewhere.errors import Unavailable, UsageError
from elsewhere.keys import UNAVAILABLE, Key, Wrong, from_text, understood
from elsewhere.meeting import home_directory
from elsewhere.paths import is_within
from elsewhere.values import dataclass

__all__ = [
    "FILE",
    "KEYS",
    "RACES",
    "STAGES",
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
    "races",
    "read",
    "stages",
    "template",
    "unknown",
    "user_file",
]

FILE = "elsewhere.toml"
STAGES = "stages"
RACES = "races"
SOURCES = ("default", "user", "project", "environment", "command line")
_LARGEST = 64 << 10
_LONGEST_LINE = 4096  # a key of thousands of parts would keep the parser busy for minutes
_LONGEST_LIST = 256  # each place costs whoever waits for the sandbox


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
        "it cannot be had here", choices=("auto", "native", *UNAVAILABLE),
    ),
    Key(
        "sandbox", "view", "choice", "machine", "earlier", '"project"',
        "how much is seen: machine (all but what is hidden) or project (system, toolchains, this project)",
        "it shows more of the machine", choices=("project", "machine"),
    ),
    Key(
        "sandbox", "network", "choice", "allow", "earlier", '"none"',
        "which network there is inside: none, allow (what the rules name) or host (all of it)",
        "it opens the network", choices=("none", "allow", "host"),
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
    Key(
        "sandbox", "profile", "words", (), "nothing", '["claude"]',
        "agent programs that are to work inside: their hosts, their login, a private copy of their state",
        "it shows the login of a program",
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
        "network", "allow", "words", (), "nothing", '["example.org", "*.example.org:8443"]',
        "hosts that can be reached, besides those of the presets", "it opens the network",
    ),
    Key("network", "deny", "words", (), "anything", '["registry.npmjs.org"]', "hosts that cannot be reached, even if allowed"),
    Key(
        "network", "preset", "words", ("packages",), "nothing", '["models"]',
        "hosts that are allowed by what they are for: packages, models; none forgets those before it", "it opens the network",
    ),
    Key(
        "network", "forward", "words", (), "nothing", '["5432", "db.local:5432", "unix:/run/postgresql/.s.PGSQL.5432"]',
        "services of the host that are reached inside, at the same port or path", "it opens services of the host",
    ),
    Key(
        "network", "publish", "words", (), "nothing", '["8080", "0:80"]',
        "ports inside that are reached on the host's loopback: PORT or HOST_PORT:PORT, 0 picks a free one",
        "it opens ports of the host",
    ),
    Key(
        "env", "pass", "names", (), "nothing", '["DATABASE_URL", "RUST_LOG"]',
        "variables of the caller that go in, besides the built-in list", "it takes variables of the caller",
    ),
    Key(
        "base", "live", "places", (), "anything", '["data/", "build/"]',
        "directories of the project that a pinned base does not copy: they show reality as it is",
    ),
    Key(
        "promotion", "runs", "places", (), "anything", '["Makefile", "scripts/*.sh"]',
        "files of the project that run by themselves, besides the usual ones: a promotion of them is marked; names or globs",
    ),
    Key("promotion", "keep", "time", 30 * 86400.0, "never", '"7d"', "how long a promotion can be undone"),
    Key("promotion", "cap", "size", 2 << 30, "never", '"500M"', "how much may be kept for undoing promotions, all together"),
    Key(
        "experiments", "keep", "time", 7 * 86400.0, "never", '"2d"',
        "how long an experiment stays, with the changes and outputs of all its attempts",
    ),
    Key("experiments", "sandboxes", "time", 3600.0, "never", '"8h"', "how long the sandboxes of a race stay after its end"),
    Key("experiments", "timeout", "time", 3600.0, "never", '"10m"', "how long an attempt of a race may take by default"),
    Key(
        "experiments", "at_once", "count", None, "never", "2", "how many attempts of a race run at once, if there is room",
        without="four for each processor",
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
_TEMPLATE_OF_STAGES = (
    "# Stages of promotion, in the order in which a change goes through them. A target is a directory or a branch. Commands on",
    "# the host, and targets other than the project and its branches, count after `elsewhere trust`.",
    "# [[stages]]",
    '# name = "dev"',
    '# target = "."',
    '# checks = ["pytest -q"]',
    "# [[stages]]",
    '# name = "staging"',
    '# target = { branch = "staging" }',
    '# checks = ["pytest -q", "make lint"]',
    "# [[stages]]",
    '# name = "production"',
    '# deploy = "./deploy.sh"',
    '# rollback = "./rollback.sh"',
    '# approve = "person"',
)
_TEMPLATE_OF_RACES = (
    "# Races: several approaches at once, each in a sandbox of its own. `elsewhere race NAME` runs one.",
    "# [[races]]",
    '# name = "upgrade"',
    '# verify = ["pytest -q"]',
    '# score = "./score.sh"',
    "# [[races.approaches]]",
    '# name = "newest"',
    '# command = "pip install -U django"',
)


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
    found = {}
    for section, values in _document(path, content).items():
        if section in (STAGES, RACES):
            if not project:
                raise _bad_file(path, f"{section} are those of one project", f"write them into the {FILE} of the project")
            _tables(path, section, values)
            continue
        if section not in _SECTIONS:
            raise unknown(section, (*_SECTIONS, STAGES, RACES), f"{path}: ")
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


def stages(path: str, content: bytes) -> list[dict[str, Any]]:
    """The tables of a project's file that say which stages it has, in order; what is in them is not looked at."""
    return _tables(path, STAGES, _document(path, content).get(STAGES, []))


def races(path: str, content: bytes) -> list[dict[str, Any]]:
    """The tables of a project's file that say which races it has; what is in them is not looked at."""
    return _tables(path, RACES, _document(path, content).get(RACES, []))


def _document(path: str, content: bytes) -> dict[str, Any]:
    if max(map(len, content.split(b"\n"))) > _LONGEST_LINE:
        raise _bad_file(path, f"a line of more than {_LONGEST_LINE} bytes", "a list may have as many lines as it likes")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise _bad_file(path, str(error)) from error


def _tables(path: str, name: str, values: object) -> list[dict[str, Any]]:
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise _bad_file(path, f"{name!r} is not a list of tables", f"write [[{name}]] before each of them")
    return values


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """An empty variable is one that is not set."""
    found = {}
    for variable in environment:
        key = _VARIABLES.get(variable) if variable.startswith("ELSEWHERE_") else None
        if key is not None and (text := environment[variable]):
            found[key.dotted] = _parsed(key, from_text(key, text), variable, "")
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
            found[name] = understood(key, list(value) if isinstance(value, tuple) else value, "")
        except Wrong as wrong:
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
    if value in UNAVAILABLE:
        raise Unavailable(
            "backend_unavailable",
            f"the backend {value!r} cannot be had: sandboxes are made of what the kernel gives, and nothing runs unconfined",
            hint='use backend "auto" or "native"; elsewhere doctor shows what this machine can do',
        )


def _bad_file(path: str, reason: str, hint: str = "mend the file, or move it away") -> UsageError:
    return UsageError("bad_settings", f"{path}: {reason}", hint=hint)


# -- what they may say ----------------------------------------------------------------------------------------------------------


def _parsed(key: Key, value: object, where: str, base: str) -> Any:
    try:
        return understood(key, value, base)
    except Wrong as wrong:
        raise UsageError(
            "bad_settings", f"{where} = {units.brief(value)} {wrong}", hint=f"for example: {key.name} = {key.example}"
        ) from None


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
        return value in UNAVAILABLE and value != than
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
    if key.kind == "time" or key.name in ("timeout", "ttl", "idle"):
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
    return "\n".join([*lines, "", *_TEMPLATE_OF_STAGES, "", *_TEMPLATE_OF_RACES]) + "\n"


def _trust_words(key: Key) -> str:
    if key.narrows == "smaller":
        return " More: (trust)." if built_in(key) is not None or key.name == "open_files" else ""
    return " (trust)" if key.narrows in ("nothing", "false") else ""
