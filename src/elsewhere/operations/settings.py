"""Settings as they hold for a project, and the verbs about them: `init`, `config`, `trust`.

    $ELSEWHERE_HOME/trust/<sha256 of the project's path>    {"project", "sha256", "at"}: whose file was trusted, and what it said

Trust is bound to the content of the project's file: the bytes that are parsed are the bytes that were compared, and another
content is another file. Settings are read from reality only, never from a sandbox's copy.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elsewhere import settings
from elsewhere.clock import wall
from elsewhere.errors import ElsewhereError, NotFound, Refused
from elsewhere.limits import NAMES
from elsewhere.meeting import home_directory
from elsewhere.operations.projects import find_project, refuse_inside
from elsewhere.paths import is_within
from elsewhere.sandbox import environment as variables
from elsewhere.settings import FILE, KEYS, Value
from elsewhere.storage.state import State, write_aside, write_new
from elsewhere.values import dataclass

if TYPE_CHECKING:
    from elsewhere.promotion.stages import Stage  # of no use to whoever only starts a command

__all__ = [
    "Ignored",
    "Resolved",
    "Setup",
    "Trust",
    "cannot_be_hidden",
    "config",
    "init",
    "races",
    "resolve",
    "revoke",
    "stages",
    "trust",
    "trusted_projects",
    "wider",
]

_OWN = ("/proc", "/sys", "/dev")  # without these nothing runs


@dataclass(frozen=True, slots=True)
class Ignored:
    """What a project's file asked for and did not get."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """What holds, by dotted key, with where it comes from; and what a project's file may not say."""

    values: dict[str, Value]
    ignored: tuple[Ignored, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.values[key].value

    def asked_limits(self) -> dict[str, float]:
        """Those that were asked for by themselves."""
        return self._limits("default", "untrusted")

    def tight_limits(self) -> dict[str, float]:
        """Those that hold because of `untrusted`."""
        return self._limits(*settings.SOURCES)

    def _limits(self, *but: str) -> dict[str, float]:
        found = ((name, self.values[f"limits.{name}"]) for name in NAMES)
        return {name: value.value for name, value in found if value.source not in but}

    def remark(self) -> str:
        """One line for whoever is about to use it; empty if nothing was ignored."""
        if not self.ignored:
            return ""
        names = ", ".join(dict.fromkeys(one.key for one in self.ignored))
        return f"ignored, since the project's {FILE} is not trusted: {names} (elsewhere config says why)"


@dataclass(frozen=True, slots=True)
class _ProjectFile:
    project: str
    path: str
    content: bytes
    values: dict[str, Any]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def resolve(
    state: State,
    project: str | None,
    given: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """What holds for the project at this path. `given` are values of the command line or of a program, by dotted key."""
    file = None if project is None else _project_file(project)
    return _resolve(state, file, given, os.environ if environment is None else environment)


def _resolve(
    state: State, file: _ProjectFile | None, given: Mapping[str, object] | None, environment: Mapping[str, str]
) -> Resolved:
    users = _user_values()
    below = ("user", users)
    above = [("environment", settings.from_environment(environment))]
    if given:
        above.append(("command line", settings.from_given(given)))
    without = settings.merge([below, *above])
    if file is None:
        return Resolved(without)
    wider = settings.held_back(file.values, without)
    hide = file.values.get("sandbox.hide", ())
    never = {path: reason for path in hide if (reason := cannot_be_hidden(path, file.project))}
    if (wider or never) and _trusts(state, file):
        wider, never = {}, {}
    allowed = {
        name: value
        for name, value in file.values.items()
        if name not in wider and (name in users or not _is_built_in(name, value))
    }
    if never:
        allowed["sandbox.hide"] = tuple(path for path in hide if path not in never)
    ignored = _ignored(wider, without) + tuple(Ignored("sandbox.hide", (path,), reason) for path, reason in never.items())
    return Resolved(settings.merge([below, ("project", allowed), *above]), ignored)


def cannot_be_hidden(path: str, project: str) -> str:
    """Why a place cannot be hidden; empty if it can."""
    place = os.path.realpath(path)
    if is_within(project, place):
        return "the project itself lies there"
    return "the sandbox has its own there" if any(is_within(place, own) for own in _OWN) else ""


def _is_built_in(name: str, value: Any) -> bool:
    """A limit that holds anyway, best effort: a stranger's file that repeats it does not make it one that was asked for."""
    return KEYS[name].kind == "limit" and bool(value == settings.built_in(KEYS[name]))


def _user_values() -> dict[str, Any]:
    path = settings.user_file()
    content = settings.read(path)
    return {} if content is None else settings.parse(path, content, home_directory(), project=False)


def _project_file(project: str) -> _ProjectFile | None:
    path = os.path.join(project, FILE)
    content = settings.read(path, within=project)
    return None if content is None else _ProjectFile(project, path, content, settings.parse(path, content, project, project=True))


def _ignored(wider: Mapping[str, Any], without: Mapping[str, Value]) -> tuple[Ignored, ...]:
    found = []
    for name, value in wider.items():
        why = KEYS[name].widening
        if name == "env.pass":
            secrets = [word for word in value if variables.looks_secret(word)]
            why += f", and {', '.join(secrets)} could be secret" if secrets else ""
        elif not KEYS[name].adds_up:
            why += f"; without it: {settings.human(KEYS[name], without[name].value)}"
        found.append(Ignored(name, value, why))
    return tuple(found)


# -- trust ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trust:
    """`holds` as long as the file is what was trusted. `widens` is what it is about."""

    project: str
    sha256: str
    at: float
    holds: bool
    widens: tuple[Ignored, ...] = ()


def trust(chosen: str | None = None) -> Trust:
    """From now on, and until it changes, the project's file may say everything."""
    refuse_inside()
    project = find_project(chosen, os.getcwd()).path
    file = _project_file(project)
    if file is None:
        raise NotFound("no_settings", f"the project {project!r} has no {FILE}", hint=f"elsewhere init, in {project}")
    without = settings.merge([("user", _user_values())])
    widens = _ignored(settings.held_back(file.values, without), without) + _reaching(file)
    made = Trust(project, file.digest, wall(), True, widens)
    state = State.open()
    content = {"project": project, "sha256": made.sha256, "at": made.at}
    write_aside(_trust_path(state, project), json.dumps(content).encode())
    return made


def revoke(chosen: str | None = None) -> Trust:
    """A project that is gone can be named, too."""
    refuse_inside()
    state = State.open()
    here = os.getcwd()
    try:
        project = find_project(chosen, here).path
    except NotFound:
        project = os.path.realpath(os.path.join(here, chosen or ""))
    found = _trust_of(state, project)
    if found is None:
        raise NotFound("not_trusted", f"the {FILE} of {project!r} was not trusted", hint="elsewhere trust --list shows which are")
    os.unlink(_trust_path(state, project))
    return Trust(project, found["sha256"], found["at"], False)


def trusted_projects() -> list[Trust]:
    """All that were trusted, the newest first, and whether that still holds."""
    state = State.open()
    found = []
    for name in os.listdir(state.room("trust")):
        about = _read_trust(os.path.join(state.room("trust"), name))
        if about is not None:
            found.append(Trust(about["project"], about["sha256"], about["at"], _still(about)))
    return sorted(found, key=lambda one: one.at, reverse=True)


def _still(about: dict[str, Any]) -> bool:
    with contextlib.suppress(ElsewhereError, OSError):
        content = settings.read(os.path.join(about["project"], FILE), within=about["project"])
        return content is not None and hashlib.sha256(content).hexdigest() == about["sha256"]
    return False


def stages(state: State, project: str) -> "list[Stage]":
    """Those of the project, in order, as its file says them now. Whether each may do what it says goes with it: the bytes that
    are parsed are the bytes that are trusted, or not."""
    file = _project_file(project)
    return [] if file is None else _stages(file, trusted=_trusts(state, file))


def races(project: str) -> tuple[str, list[dict[str, Any]]]:
    """The project's file, and its tables of races."""
    file = _project_file(project)
    return (FILE, []) if file is None else (file.path, settings.races(file.path, file.content))


def wider(state: State, project: str, values: Mapping[str, Any]) -> set[str]:
    """Of values that the project's file asks for in another place than its settings, those that may not count."""
    file = _project_file(project)
    if file is not None and _trusts(state, file):
        return set()
    return set(settings.held_back(values, _resolve(state, file, None, os.environ).values))


def _stages(file: _ProjectFile, *, trusted: bool) -> "list[Stage]":
    from elsewhere.promotion.stages import parse

    return parse(settings.stages(file.path, file.content), file.path, file.project, trusted=trusted)


def _reaching(file: _ProjectFile) -> tuple[Ignored, ...]:
    """What its stages do beyond the project, and beyond every sandbox."""
    return tuple(
        Ignored(f"{settings.STAGES}.{stage.name}", stage.target.words(), stage.reaches)
        for stage in _stages(file, trusted=False)
        if stage.reaches
    )


def _trusts(state: State, file: _ProjectFile) -> bool:
    found = _trust_of(state, file.project)
    return found is not None and found["sha256"] == file.digest


def _trust_of(state: State, project: str) -> dict[str, Any] | None:
    found = _read_trust(_trust_path(state, project))
    return found if found is not None and found["project"] == project else None


def _read_trust(path: str) -> dict[str, Any] | None:
    """What cannot be understood trusts nobody."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError), open(path, "rb") as stream:
        found = json.load(stream)
        return {"project": str(found["project"]), "sha256": str(found["sha256"]), "at": float(found["at"])}
    return None


def _trust_path(state: State, project: str) -> str:
    return os.path.join(state.room("trust"), hashlib.sha256(os.fsencode(project)).hexdigest())


# -- init and config ------------------------------------------------------------------------------------------------------------


def init(*, force: bool = False) -> str:
    """A file for the current directory that says nothing and shows everything that it could say; its path."""
    project = find_project(".", os.getcwd()).path
    path = os.path.join(project, FILE)
    content = settings.template().encode()
    if force:
        write_aside(path, content, 0o666)
        return path
    try:
        write_new(path, content, 0o666)
    except FileExistsError:
        raise Refused(
            "settings_exist", f"there is an {FILE} in {project!r} already", hint="elsewhere init --force replaces it"
        ) from None
    return path


@dataclass(frozen=True, slots=True)
class Setup:
    """All that `config` shows. `files` are those that exist."""

    resolved: Resolved
    shown: tuple[str, ...]
    project_file: str | None
    user_file: str | None
    trusted: bool

    def value(self, name: str) -> Any:
        """As it will be: a limit that nobody asked for has its built-in one."""
        found = self.resolved.values[name]
        return settings.built_in(KEYS[name]) if found.source == "default" else found.value

    def ignored(self) -> list[Ignored]:
        return [one for one in self.resolved.ignored if one.key in self.shown]


def config(key: str | None = None, chosen: str | None = None) -> Setup:
    """What holds here, without a command line. `key` is a key or a section."""
    shown = tuple(name for name in KEYS if key is None or name == key or name.startswith(f"{key}."))
    if not shown:
        raise settings.unknown(str(key), KEYS)
    state = State.open()
    project: str | None = None
    try:
        project = find_project(chosen, os.getcwd()).path
    except Refused:
        if chosen is not None:
            raise  # where nothing can be a project, the rest still holds
    file = None if project is None else _project_file(project)
    user = settings.user_file()
    return Setup(
        _resolve(state, file, None, os.environ),
        shown,
        None if file is None else file.path,
        user if os.path.lexists(user) else None,
        file is not None and _trusts(state, file),
    )
