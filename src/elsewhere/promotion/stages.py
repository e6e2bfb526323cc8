"""Stages: where a change goes on its way, in order, as a project's file says it; and how far one has come.

    [[stages]]
    name = "staging"
    target = "."  |  { branch = "staging" }  |  { repository = "../other", branch = "main" }
    deploy = "…", rollback = "…", timeout = "10m"     instead of a target
    checks = ["pytest -q"]
    approve = "auto" | "person"

A stage's entry in a promotion's record has one of these statuses:

    pending ─► checking ─► waiting ─► applying ─► verifying ─► passed
                  │           (for a person)  │        │
                  └─► refused (conflicts)     └────────┴─► reversing ─► failed | refused | reversed (interrupted)
                      failed

What of a stage runs on the host, or writes to other places than the project or a branch of it, needs trust (`reaches`).

Not here: who trusts what, whether a target is there, and what is done.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elsewhere import units
from elsewhere.errors import NotFound, Refused, UsageError
from elsewhere.meeting import home_directory
from elsewhere.paths import is_within
from elsewhere.promotion.repository import is_name
from elsewhere.settings import FILE, unknown
from elsewhere.values import dataclass

__all__ = [
    "AT_WORK",
    "Branch",
    "Deploy",
    "Directory",
    "Stage",
    "ahead",
    "entry",
    "entry_of",
    "parse",
    "refuse_untrusted",
    "standing",
]

AT_WORK = ("applying", "verifying", "reversing")  # when something may have been done that does not count yet
# What an attempt leaves: why it ended, the journal by which it was put back, and what could not be put back.
LEFT: dict[str, Any] = {"said": None, "reversal": None, "not_reversed": None}
_KEYS = ("name", "target", "deploy", "rollback", "timeout", "checks", "approve")
_TARGET_KEYS = ("branch", "repository")
_APPROVE = ("auto", "person")
_LONGEST_NAME = 63
_LONGEST_LIST = 64
_PATIENCE = 600.0


@dataclass(frozen=True, slots=True)
class Directory:
    """`path` is absolute and free of links."""

    path: str

    def words(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Branch:
    """Of the repository whose top directory is `repository`, absolute and free of links."""

    repository: str
    name: str

    def words(self) -> str:
        return f"the branch {self.name} of {self.repository}"


@dataclass(frozen=True, slots=True)
class Deploy:
    """Shell lines for the host, and the seconds that each of them may take."""

    deploy: str
    rollback: str
    timeout: float = _PATIENCE

    def words(self) -> str:
        return f"{self.deploy} (back: {self.rollback})"


@dataclass(frozen=True, slots=True)
class Stage:
    """`reaches` is why it needs trust; empty, if it needs none. `trusted`: the very file that it comes from is."""

    name: str
    target: Directory | Branch | Deploy
    checks: tuple[str, ...] = ()
    approve: str = "auto"
    reaches: str = ""
    trusted: bool = False


def parse(tables: Sequence[Mapping[str, Any]], path: str, project: str, *, trusted: bool = False) -> list[Stage]:
    """What the tables of the file at `path` say."""
    found: list[Stage] = []
    for number, table in enumerate(tables, 1):
        one = _Table(table, f"{path}: stage {number}", project).stage(trusted=trusted)
        if any(one.name == other.name for other in found):
            raise UsageError("bad_stage", f"{path}: two stages have the name {one.name!r}", hint="give each a name of its own")
        found.append(one)
    return found


class _Table:
    """One stage as it is written; errors name where it stands, and what would be right."""

    def __init__(self, table: Mapping[str, Any], where: str, project: str) -> None:
        self._table = table
        self._where = where
        self._project = project

    def stage(self, *, trusted: bool) -> Stage:
        name = self._name()
        self._where = f"{self._where} ({name})"
        self._check_keys(self._table, _KEYS)
        target, reaches = self._target()
        checks, approve = self._checks(), self._table.get("approve", "auto")
        if approve not in _APPROVE:
            raise self._bad(f"approve = {units.brief(approve)} is neither auto nor person", 'for example: approve = "person"')
        return Stage(name, target, checks, approve, reaches, trusted)

    def _name(self) -> str:
        name = self._table.get("name")
        if name is None:
            raise self._bad("it has no name", 'for example: name = "staging"')
        plain = name.replace("-", "a").replace("_", "a") if isinstance(name, str) else ""
        if not plain.isalnum() or not plain.isascii() or len(plain) > _LONGEST_NAME or name[0] == "-":
            raise self._bad(
                f"name = {units.brief(name)} cannot be the name of a stage",
                f"up to {_LONGEST_NAME} letters, digits, '-' and '_', not beginning with '-'",
            )
        return str(name)

    def _check_keys(self, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                raise unknown(key, known, f"{self._where}: ")

    def _target(self) -> tuple[Directory | Branch | Deploy, str]:
        commands = [key for key in ("deploy", "rollback") if key in self._table]
        if "target" in self._table and commands:
            raise self._bad(f"it has both a target and {commands[0]}", "make two stages of it")
        if "target" not in self._table and not commands:
            raise self._bad(
                "it has neither a target nor deploy and rollback",
                'for example: target = ".", or target = { branch = "staging" }, or deploy = "./deploy" and rollback = "./back"',
            )
        if commands:
            return self._deploy()
        if "timeout" in self._table:
            raise self._bad("timeout is for deploy and rollback, and it has a target", "limits.timeout is for checks")
        value = self._table["target"]
        return self._branch(value) if isinstance(value, dict) else self._directory(value)

    def _deploy(self) -> tuple[Deploy, str]:
        for key, other in (("rollback", "deploy"), ("deploy", "rollback")):
            if key not in self._table:
                raise self._bad(
                    f"it has {other} and no {key}", f'what cannot be taken back is no stage: write {key} = "./{key}.sh" beside it'
                )
        deploy, rollback = (self._text(key, self._table[key], f'{key} = "./{key}.sh"') for key in ("deploy", "rollback"))
        seconds = _PATIENCE
        if "timeout" in self._table:
            value = self._table["timeout"]
            try:
                seconds = units.duration(value if isinstance(value, str | int | float) else "")
            except UsageError as error:
                raise self._bad(f"timeout = {units.brief(value)} is not a duration", error.hint) from None
        return Deploy(deploy, rollback, seconds), "it runs on the host"

    def _directory(self, value: object) -> tuple[Directory, str]:
        path = self._place(self._text("target", value, 'target = "."'))
        if ".git" in path.split("/"):
            raise self._bad(
                f"target = {units.brief(value)} lies in git's own directory", 'for a branch: target = { branch = "NAME" }'
            )
        if path == self._project:
            return Directory(path), ""
        inside = is_within(path, self._project)
        # A name that is harmless at the top may run by itself in another directory, and nobody would be told.
        return Directory(path), "it puts files at other paths of the project" if inside else "it writes outside of the project"

    def _branch(self, value: dict[str, Any]) -> tuple[Branch, str]:
        self._check_keys(value, _TARGET_KEYS)
        if "branch" not in value:
            raise self._bad("its target has no branch", 'for example: target = { branch = "staging" }')
        name = self._text("branch", value["branch"], 'target = { branch = "staging" }')
        if not is_name(name):
            raise self._bad(f"branch = {name!r} cannot be the name of a branch", "git branch --list shows those that there are")
        place = self._project
        if "repository" in value:
            example = 'target = { repository = "../other", branch = "main" }'
            place = self._place(self._text("repository", value["repository"], example))
        return Branch(place, name), "" if place == self._project else "it writes into another repository"

    def _checks(self) -> tuple[str, ...]:
        value = self._table.get("checks", [])
        example = 'checks = ["pytest -q"]'
        if not isinstance(value, list) or len(value) > _LONGEST_LIST:
            raise self._bad(f"checks = {units.brief(value)} is not a list of commands", f"for example: {example}")
        return tuple(self._text("checks", one, example) for one in value)

    def _text(self, key: str, value: object, example: str) -> str:
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise self._bad(f"{key} = {units.brief(value)} is not a text that could be used", f"for example: {example}")
        return value

    def _place(self, text: str) -> str:
        if text == "~" or text.startswith("~/"):
            text = home_directory() + text[1:]
        return os.path.realpath(os.path.join(self._project, text))

    def _bad(self, what: str, hint: str) -> UsageError:
        return UsageError("bad_stage", f"{self._where}: {what}", hint=hint)


# -- how far a change has come --------------------------------------------------------------------------------------------------


def entry(stage: Stage) -> dict[str, Any]:
    """What a promotion's record says about a stage that it has not come to yet."""
    return {
        "name": stage.name,
        "target": stage.target.words(),
        "status": "pending",
        "checks": [],
        "verified": None,
        "approved": None,
        "chosen": [],
        "application": None,
        "applied": [],
        "merged": [],
        "deleted": [],
        "conflicts": [],
        **LEFT,
    }


def entry_of(entries: list[dict[str, Any]], stage: Stage) -> dict[str, Any]:
    """The one of this stage, made if there is none yet."""
    for one in entries:
        if one["name"] == stage.name:
            return one
    entries.append(entry(stage))
    return entries[-1]


def ahead(stages: Sequence[Stage], entries: Iterable[Mapping[str, Any]], to: str) -> list[Stage]:
    """Those that a change still has to go through to have passed `to`: none can be skipped."""
    names = [stage.name for stage in stages]
    if not names:
        raise NotFound("no_stages", "the project has no stages", hint=f"write [[stages]] into its {FILE}")
    if to not in names:
        raise NotFound("no_such_stage", f"the project has no stage {to!r}", hint=f"its stages: {', '.join(names)}")
    passed = {one["name"] for one in entries if one["status"] == "passed"}
    return [stage for stage in stages[: names.index(to) + 1] if stage.name not in passed]


def refuse_untrusted(stages: Iterable[Stage], project: str) -> None:
    for stage in stages:
        if stage.reaches and not stage.trusted:
            raise Refused(
                "stage_not_trusted",
                f"the stage {stage.name!r} needs trust, since {stage.reaches}: {stage.target.words()}",
                hint=f"if you know the {FILE} of {project} and agree with it: elsewhere trust",
                detail={"stage": stage.name, "why": stage.reaches},
            )


def standing(entries: Iterable[Mapping[str, Any]]) -> str:
    """Where a change stands, in words: `passed dev; waiting at staging`."""
    entries = list(entries)
    passed = [str(one["name"]) for one in entries if one["status"] == "passed"]
    here = [f"{one['status']} at {one['name']}" for one in entries if one["status"] not in ("passed", "pending")]
    said = [f"passed {', '.join(passed)}"] if passed else []
    return "; ".join([*said, *here]) or "not begun"
