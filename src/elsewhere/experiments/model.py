"""What a race is asked to be: approaches, checks, and what holds for all of them.

    approach    a command, or a Python function, in a sandbox of its own; tried `repeat` times
    check       a command that says whether the end state is good: required, or only scored
    score       a command whose last number ranks those that verified

Plain data that can be written down and read back, so that an interrupted race can go on. Not here: how it is written on a command
line or in a file (`parsing.py`), what became of it (`records.py`).
"""

from collections.abc import Mapping
from dataclasses import asdict, field, fields
from typing import Any

from elsewhere.values import dataclass

__all__ = ["VERIFY_FILES", "Approach", "Check", "Race", "is_everything"]

# What tests are usually called. An approach must not win by editing them.
VERIFY_FILES = (
    "tests",
    "Tests",
    "test",
    "spec",
    "__tests__",
    "test*.py",
    "test.*",
    "test-*.*",
    "test_*.*",
    "*-test.*",
    "*_test.*",
    "*.test.*",
    "*.spec.*",
    "*_spec.rb",
    "*Test.java",
    "*Tests.java",
    "*TestCase.java",
    "*IT.java",
    "Test*.java",
    "*Tests.cs",
    "*Test.php",
    "*.bats",
    "*.t",
    ".proverc",
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
)


@dataclass(frozen=True, slots=True)
class Check:
    """`required`: without it, nothing is verified; otherwise each one that passes counts for the rank. `junit` is a file of
    results that the command writes."""

    name: str
    command: str
    required: bool = True
    junit: str | None = None


@dataclass(frozen=True, slots=True)
class Approach:
    """`command` is None for a Python function, which cannot be written down. `settings` are about its limits and its network, by
    the names of the settings."""

    name: str
    command: str | None
    env: Mapping[str, str | None] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Race:
    """`verify_files` are globs of what is as in the base when anything is verified, beside `VERIFY_FILES`; with `!` before them,
    of what is the approach's own though a verifying command names it, or though it is called like a test. `score` is None
    if there is none, or if it is a Python function (`scored_by_python`). `directory` is where all commands start, relative to the
    project's top."""

    approaches: tuple[Approach, ...]
    checks: tuple[Check, ...] = ()
    setup: str | None = None
    score: str | None = None
    scored_by_python: bool = False
    lower: bool = False
    first: bool = False
    promote: bool = False
    allow_failing: bool = False
    verify_files: tuple[str, ...] | None = None
    verify_from_approach: bool = False
    verify_timeout: float | None = None
    base: str = "auto"
    base_ref: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    directory: str = ""

    def packed(self) -> dict[str, Any]:
        """Plain values, fit for a record."""
        return asdict(self)

    @staticmethod
    def unpacked(values: Mapping[str, Any]) -> "Race":
        """What `packed` gave; parts that a newer version wrote are passed over."""
        known = _known(Race, values)
        known["approaches"] = tuple(Approach(**_known(Approach, one)) for one in values["approaches"])
        known["checks"] = tuple(Check(**_known(Check, one)) for one in values.get("checks", ()))
        if known.get("verify_files") is not None:
            known["verify_files"] = tuple(known["verify_files"])
        return Race(**known)

    def approach(self, name: str) -> Approach:
        return next(one for one in self.approaches if one.name == name)


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def is_everything(pattern: str) -> bool:
    """Whether it means nothing, or the whole project."""
    return set(pattern) <= set("*?./")
