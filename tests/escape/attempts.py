"""Attempts to get out of a sandbox, and their trial.

An attempt is a small program (`prelude.py` says how it is written and how it ends). A trial plants what the programs of a module go
for, runs them all in one real sandbox, from the front door, looks at reality, then runs the very same programs outside, where
nothing keeps them: there each must succeed, or its refusal inside proves nothing.

    inside     REFUSED, and if the attempt has an `effect` to look for in reality: it is not there. Where writing is allowed because
               it goes to a copy, the effect alone decides
    outside    ESCAPED, and the effect is there

    control        the programs outside run …
    outside        as the same person
    root           as root, what an ordinary person cannot do at all; without root the attempt is skipped
    namespaces     as the same person, who is root of their own user, mount, process, IPC, UTS and network namespaces: for what would
                   otherwise change this machine, and for what needs powers that an ordinary person has nowhere else
"""

import contextlib
import ctypes
import inspect
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conftest import PATIENCE, Person, dismiss, leave, make_person

Place = dict[str, Any]
Program = Callable[[Place], object]
PRELUDE = Path(__file__).with_name("prelude.py")
NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--ipc", "--uts", "--net")


@dataclass(frozen=True)
class Attempt:
    """`who` may try it; `effect` looks whether it had one in reality; `needs` says why it cannot be tried here, if so; `open` says
    why it is known to succeed (a hole that the documentation names), if so: then it must."""

    program: Program
    effect: Callable[[Place], bool] | None = None
    control: str = "outside"
    who: tuple[str, ...] = ("root", "user")
    needs: Callable[[], str | None] = lambda: None
    open: Callable[["Trial"], str | None] = lambda trial: None

    @property
    def name(self) -> str:
        return self.program.__name__


class Attempts(dict[str, Attempt]):
    """Those of a module, by name. `made` decorates a program."""

    def made(self, **more: Any) -> Callable[[Program], Program]:
        def register(program: Program) -> Program:
            self[program.__name__] = Attempt(program, **more)
            return program

        return register


@dataclass(repr=False)
class Trial:
    person: Person
    attempts: Attempts
    place: Place
    enforced: dict[str, Any] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    effects_inside: dict[str, bool] = field(default_factory=dict)
    effects_outside: dict[str, bool] = field(default_factory=dict)

    def judge(self, name: str, request: pytest.FixtureRequest) -> None:
        attempt = self.attempts[name]
        if self.person.name not in attempt.who:
            pytest.skip(f"only for {' and '.join(attempt.who)}")
        if reason := self._impossible(attempt):
            pytest.skip(reason)
        assert self.outside[name].startswith("ESCAPED "), f"the control does not work: {self.outside[name]}"
        assert attempt.effect is None or self.effects_outside[name], "the control had no effect"
        assert self.inside[name].startswith(("REFUSED ", "ESCAPED ")), self.inside[name]
        if reason := attempt.open(self):  # only now: a control that does not work is never expected
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
        if attempt.effect is None:
            assert self.inside[name].startswith("REFUSED "), self.inside[name]
        else:
            assert not self.effects_inside[name], f"it had an effect in reality: {self.inside[name]}"

    def run(self, *options: str, **more: Any) -> None:
        """Inside first, reality, then the controls."""
        possible = [one for one in self.attempts.values() if self.person.name in one.who and not self._impossible(one)]
        script = write_script(self.person, "attempts", [one.program for one in possible], self.place)
        names = [one.name for one in possible]
        words = ("run", "--discard", *options, "--", self.person.python, "-I", "-S", str(script), *names)
        document = self.person.json(*words, **more)
        assert "command" in document, document
        self.enforced = document["sandbox"]["enforced"]
        self.inside = parsed(document["command"]["stdout"], document["command"]["stderr"], names)
        self.effects_inside = self._effects(possible)
        for control in ("outside", "root", "namespaces"):
            chosen = [one.name for one in possible if one.control == control]
            if chosen:
                self.outside |= self._controls(control, script, chosen, **more)
        self.effects_outside = self._effects(possible)

    def _controls(self, control: str, script: Path, names: list[str], **more: Any) -> dict[str, str]:
        argv = [self.person.python, "-I", "-S", str(script), *names]
        if control == "namespaces":
            argv = [*NAMESPACES, *argv, "--own-mounts"]
        identity = {} if control == "root" else self.person.identity()
        more = {"cwd": self.person.project, "env": self.person.environment(), "stdin": subprocess.DEVNULL, **more}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=110 * PATIENCE, **identity, **more)
        return parsed(done.stdout, done.stderr, names)

    def _impossible(self, attempt: Attempt) -> str | None:
        if attempt.control == "root" and os.geteuid() != 0:
            return "its control needs root"
        return attempt.needs()

    def _effects(self, attempts: list[Attempt]) -> dict[str, bool]:
        return {one.name: one.effect(self.place) for one in attempts if one.effect}


def without_landlock(trial: Trial) -> str | None:
    """What only Landlock keeps an ordinary person's sandbox from (its second version, Linux 5.19), and root's ownership."""
    create_ruleset, version_flag = 444, 1
    version = ctypes.CDLL(None).syscall(create_ruleset, None, 0, version_flag)
    return None if trial.person.is_root or version >= 2 else "this kernel has no Landlock: an ordinary user's fifos are open"


def write_script(person: Person, name: str, programs: list[Program], place: Place) -> Path:
    """The programs as one file that everybody can read: what is in front of them, themselves, and the call."""
    script = person.project / f"{name}.py"  # seen in every view
    sources = [without_decorator(inspect.getsource(program)) for program in programs]
    end = f"run_all(sys.argv[1:], json.loads({json.dumps(place)!r}))\n"
    script.write_text("\n\n".join([PRELUDE.read_text(), *sources, end]))
    script.chmod(0o644)
    return script


def without_decorator(source: str) -> str:
    lines = source.splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if line.startswith("def "))
    return "".join(lines[first:])


def parsed(output: str, errors: str, names: list[str]) -> dict[str, str]:
    found = dict(json.loads(line) for line in output.splitlines() if line.startswith('["'))
    missing = f"BROKEN: not run\n{errors[-2000:]}"
    return {name: found.get(name, missing) for name in names}


@dataclass(frozen=True)
class Neighbour:
    """A process that goes on beside an attempt; `said` is what it says it holds."""

    process: "subprocess.Popen[str]"
    said: Place


@contextlib.contextmanager
def neighbour(
    person: Person, program: Program, place: Place, *, inside: tuple[str, ...] = (), **more: Any
) -> Iterator[Neighbour]:
    """A program (that ends with `hold`) of the same person on the host, or `inside` a sandbox: the words that start one."""
    script = person.place / f"{program.__name__}.py"
    call = f"{program.__name__}(json.loads({json.dumps(place)!r}))\n"
    script.write_text("\n\n".join([PRELUDE.read_text(), inspect.getsource(program), call]))
    more = {"cwd": person.project, "env": person.environment(), **person.identity(), **more}
    argv = [*(person.command(*inside) if inside else ()), person.python, "-I", "-S", str(script)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)
    assert process.stdout
    try:
        line = process.stdout.readline()
        assert line, "the neighbour did not start"
        yield Neighbour(process, json.loads(line))
    finally:
        process.communicate()


@contextlib.contextmanager
def somebody(kind: str, library: Path, hosts: Callable[[Person], Person] | None = None) -> Iterator[Person]:
    """A person for all tests of a module; with `hosts`, one who shares a launcher with others, and keeps no sandbox."""
    person = make_person(kind, library)
    if hosts is not None:
        person.shared = hosts(person).state
    try:
        assert person.project
        yield person
    finally:
        (dismiss if hosts is None else leave)(person)
