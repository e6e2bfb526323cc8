"""What of an approach's changes could fake a verification instead of passing it: all of it is as in the base when anything is
verified.

    named       files that the verifying commands run or take, what tells their programs what to do (`make`: Makefile), and what
                those of them that are made of commands run in turn
    matched     what tests are usually called and configured by, and what `verify_files` matches
    planted     what runs by itself before or beside the verifying command: start files and compiled files of interpreters,
                plugins, modules that stand before those that are installed

Only the project counts: what an approach did outside of it, or to what git ignores, is never where it is verified. The code under
test itself is the approach's; what it says about itself while it is tested is no concern of this module (but see
`counting.doubt`). Pure: paths and contents go in. Not here: who compares, and what becomes of it.
"""

import contextlib
import fnmatch
import itertools
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from elsewhere.changes.globs import matcher
from elsewhere.errors import UsageError
from elsewhere.experiments import configuring, lines
from elsewhere.experiments.model import VERIFY_FILES, is_everything

__all__ = ["Base", "Guard"]

_ALWAYS = (
    "__pycache__",
    "*.pyc",
    "*.pth",
    "*._pth",
    "**/*.egg-info/entry_points.txt",
    "**/*.dist-info/entry_points.txt",
    "sitecustomize.py",
    "sitecustomize",
    "usercustomize.py",
    "usercustomize",
    "pyvenv.cfg",
    "elsewhere.toml",
)
_MADE = re.compile(r"(?:^|/)__pycache__/|\.py[co]$")  # by whoever runs something
_BY_ITSELF = re.compile(r"(?:^|/)(?:conftest\.py|(?:site|user)customize(?:\.py|/.*)?|[^/]*\._?pth)$")
_OF_COMMANDS = re.compile(r"(?:^|/)(?:[^/.]+|.*\.(?:sh|bash|zsh|mk|bats)|\.?[jJ]ustfile|[tT]askfile[^/]*)$")
_RUN = re.compile(r"\.(?:sh|bash|zsh|bats|awk|pl|t)$")  # a file of that name is hardly ever only looked at
_PROGRAMS = ("bin", "sbin", ".bin", "shims")
_PACKAGES = ("site-packages", "dist-packages", "node_modules")
_HIDES = re.compile(r"(\w+)(?:\.py|\.pyc|\.pyd|(?:\.[\w-]+)*\.so|/__init__\.[^/]+)?")
_TOOLS = ("tools", "scripts", "ci", ".ci", "hack", "qa", "checks", "harness")
_IMPORTED = re.compile(r"^ *(?:from +\.?([\w.]+) +import\b|import +([\w., ]+?)(?: +as\b.*)?$)", re.MULTILINE)
_REQUIRED = re.compile(r"""(?:\brequire\(|\bfrom|\bimport\(?)\s*["'](\./[\w./-]+)["']""")
_INCLUDED = re.compile(r"[-s]?include\s+(.*)")
_AT_ONCE = re.compile(r"[^\t#=][^=]*?:[^=;]*;(.*)")  # `test: ; sh check.sh`
_VARIABLE = r"\$\{[^{}]*\}|\$\w+"
_COMPUTED = re.compile(rf"^(?:{_VARIABLE}|\$.*\))/")  # `$HERE/lib.sh`: where it begins is known when it runs
_GLOB = re.compile(r"[*?[]")
_TEST_CONFIGURATIONS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_DEEPEST, _MOST_NAMED, _MOST_VARIANTS = 3, 500, 1000


class Base(Protocol):
    """What all attempts started from, for as long as they are guarded. Paths are relative to the project."""

    def read(self, path: str) -> bytes | None:
        """The beginning of a file; None: there is no file of that name."""

    def leads_to(self, path: str) -> str | None:
        """Of a link, in its own words."""

    def is_directory(self, path: str) -> bool: ...

    def names(self, path: str) -> Iterable[str]:
        """What is in a directory."""


class Guard:
    """For one race: what its verifying commands name, and the patterns of what is theirs. `modules` are the names of modules that
    are installed in the base."""

    def __init__(
        self, commands: Iterable[str], patterns: Iterable[str], project: str, base: Base, modules: Collection[str] = ()
    ) -> None:
        patterns = list(patterns)
        self._base = base
        self._within = f"{project.rstrip('/')}/"
        named = _Named(base, self._within)
        for line in commands:
            named.command(line)
        for name in VERIFY_FILES:
            named.link(name)
        self._files, self._loose, self._programs, self._places = named.files, named.loose, named.programs, named.places
        self._outputs = named.outputs
        companions = [one for name in self._programs for one in configuring.COMPANIONS.get(name, ())]
        wanted = [one for one in patterns if not one.startswith("!")]
        self._matches = matcher([*VERIFY_FILES, *wanted, *companions, *named.patterns, *_ALWAYS], project)
        own = [one[1:] for one in patterns if one.startswith("!")]
        self._is_own = matcher(own, project) if own else lambda _: False
        self._modules = {*modules, *sys.stdlib_module_names, *self._programs}
        self._roots = {"", "src", "lib", "python", *named.directories}

    def takes(self, path: str, *, added: bool) -> bool:
        """Whether a path that the approach changed is to be as in the base. Directories end with a slash."""
        bare = path.rstrip("/")
        if not bare.startswith(self._within) or self._is_own(bare):
            return False
        name = bare[len(self._within) :]
        return (
            name in self._files
            or any(one.startswith(f"{name}/") for one in self._files)
            or any(name == one or name.endswith(f"/{one}") for one in self._loose)
            or self._matches(bare)
            or self._is_tool(name)
            or (added and bare == path and self._shadows(name))
        )

    def minds(self, path: str, *, added: bool) -> bool:
        """Whether a path is looked at that a verifying command left other than it was: tests write files among their own, but
        not into those that were there, nor what would run by itself."""
        name = path.removeprefix(self._within)
        if name in self._outputs:
            return False
        if name != path:
            return _BY_ITSELF.search(name) is not None if added else not _MADE.search(name)
        place, program = os.path.split(path)
        return os.path.basename(place) in _PROGRAMS and (not added or program in self._programs)

    def _is_tool(self, name: str) -> bool:
        """A verifying program itself, or a part of it, where a project keeps its own."""
        parts = name.split("/")
        place = os.path.dirname(name)
        if parts[-1] in self._programs and (place in self._places or os.path.basename(place) in _PROGRAMS):
            return True
        for place in _PACKAGES:
            if place in parts[:-1]:
                return parts[len(parts) - parts[::-1].index(place)] in self._programs
        return False

    def _shadows(self, name: str) -> bool:
        """A new module with the name of one that is meant to be loaded from elsewhere, unless the project has it already. A
        name without an ending may be a link to a package."""
        for root in self._roots:
            below = name.removeprefix(f"{root}/") if root else name
            if root and below == name:
                continue
            found = _HIDES.fullmatch(below)
            if found is not None and found[1] in self._modules:
                module = os.path.join(root, found[1])
                if all(self._base.read(one) is None for one in (f"{module}.py", f"{module}/__init__.py")):
                    return True
        return False

    def reads(self, path: str) -> bool:
        """Whether it depends on the content."""
        return os.path.basename(path) in configuring.CONFIGURES and path.startswith(self._within) and not self._is_own(path)

    def takes_content(self, path: str, before: bytes | None, after: bytes | None) -> bool:
        """The same, for those that it depends on: whether the part that configures tests is another than before."""
        read = configuring.CONFIGURES[os.path.basename(path)]
        return bool(read(before) != read(after))


class _Named:
    """What lines name, and what the files that they name do in turn. `loose` is what nobody finds: it may be anywhere. `places`
    are where programs are looked for."""

    def __init__(self, base: Base, within: str) -> None:
        self._base = base
        self._within = within
        self._read: set[str] = set()
        self._test_names: dict[str, set[str]] = {}
        self.files: set[str] = set()
        self.loose: set[str] = set()
        self.patterns: set[str] = set()
        self.programs: set[str] = set()
        self.directories: set[str] = set()
        self.places: set[str] = set()
        self.outputs: set[str] = set()

    def command(self, line: str) -> None:
        """One that verifies."""
        for number, one in enumerate(lines.variants(line, lines.variables(line))):
            self._line(one, [""], 0, whole=number == 0)

    def link(self, name: str) -> None:
        """Of a link to a directory, what it leads to belongs to it."""
        target = self._base.leads_to(name)
        found = None if target is None else self._relative(os.path.dirname(name), target)
        if found and self._base.is_directory(found):
            self._add(self._within + found)

    def _add(self, pattern: str) -> None:
        """Unless it only looks like one: `-k 'x[9-0]'`."""
        with contextlib.suppress(UsageError):
            matcher([pattern], "/")
            self.patterns.add(pattern)

    def _line(self, line: str, places: list[str], depth: int, *, whole: bool = False) -> None:
        """`places` are directories that it may be run in. `whole`: all that it names counts, not only what it runs."""
        found = lines.parsed(line)
        self.programs |= found.programs
        for word in found.directories:
            for one in [self._relative(place, word) for place in places]:
                if one is not None and self._base.is_directory(one) and one not in places:
                    places.append(one)
                    self.directories.add(one)
        self.places |= {one for word in found.places for place in places if (one := self._relative(place, word)) is not None}
        self.outputs |= {one for word in found.outputs for place in places if (one := self._relative(place, word))}
        candidates = found.candidates | {os.path.join(place, name) for place in self.places for name in found.programs}
        if whole:
            candidates |= {word for word in found.files if "$" not in _COMPUTED.sub("", word)}
        candidates |= {word for word in found.files if _RUN.search(word)}
        for word in found.scripts | found.references | candidates | found.patterns:
            self._wide(word, places, is_reference=word in found.references)
            self._word(word, places, depth, is_script=word in found.scripts)
        for name in found.programs:
            for one in configuring.COMPANIONS.get(name, ()):
                self._word(one, places, depth, is_script=False)
            if name in ("npm", "yarn", "pnpm", "bun"):
                self._word("package.json", places, depth, is_script=False, taken=False)
        self._tests(found, places)

    def _tests(self, found: lines.Line, places: list[str]) -> None:
        """A directory that a test runner is given, with tests in it, is theirs with all that they need."""
        names = {*found.test_names, *(self._configured(places) if "pytest" in found.programs else ())}
        for name in names:
            self._add(name)
        if "pytest" in found.programs:
            self._plugins(places, [one for word in found.tested for place in places if (one := self._relative(place, word))])
        is_test = matcher([*(name for name in VERIFY_FILES if "*" in name), *(names & self.patterns)], "/")
        for one in {self._relative(place, word) for word in found.tested for place in places} - {None, ""}:
            self.link(str(one))
            inside = [name for name in self._base.names(str(one)) if not self._base.is_directory(f"{one}/{name}")]
            if any(is_test(f"/{name}") for name in inside):
                self._add(f"{self._within}{one}")

    def _configured(self, places: list[str]) -> set[str]:
        """What tests are called in the base's configuration of pytest, wherever it may be run."""
        for place in places:
            if place not in self._test_names:
                read = ((name, self._base.read(os.path.join(place, name))) for name in _TEST_CONFIGURATIONS)
                named = [one for name, content in read for one in configuring.python_files(name, content)]
                self._test_names[place] = {one for one in named if not is_everything(one.removesuffix(".py"))}
        return {one for place in places for one in self._test_names[place]}

    def _plugins(self, places: list[str], tested: list[str]) -> None:
        """Modules of the project that pytest is told to load before any test."""
        told = [os.path.join(place, name) for place in places for name in _TEST_CONFIGURATIONS]
        told += [os.path.join(place, name, "conftest.py") for place in places for name in ("", "tests", "test")]
        for path in dict.fromkeys([*told, *(os.path.join(one, "conftest.py") for one in tested)]):
            for module in configuring.plugins(os.path.basename(path), self._base.read(path)):
                for one in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
                    self._word(one, ["", "src", *places, os.path.dirname(path)], 1, is_script=False)

    def _wide(self, word: str, places: list[str], *, is_reference: bool) -> None:
        """A directory that something is compared with, or a pattern that the shell makes names of."""
        for one in (self._relative(place, word) for place in places):
            if one and (_GLOB.search(one) or (is_reference and self._base.is_directory(one))):
                self._add(self._within + one)

    def _word(self, word: str, places: list[str], depth: int, *, is_script: bool, taken: bool = True) -> None:
        there = [one for place in places if (path := self._relative(place, word)) is not None for one in self._meant(path)]
        found = [(one, content) for one in dict.fromkeys(there) if (content := self._base.read(one)) is not None]
        for one, content in found:
            if len(self.files) < _MOST_NAMED and taken:
                self.files.add(one)
            if one not in self._read and len(self._read) < _MOST_NAMED and depth < _DEEPEST:
                self._read.add(one)
                here = [*dict.fromkeys([*places, os.path.dirname(one)])]
                if leads_to := self._base.leads_to(one):
                    self.link(one)
                    self._word(leads_to, here, depth + 1, is_script=is_script)
                for word in _loaded(one, content):
                    self._word(word, [os.path.dirname(one)], depth + 1, is_script=False)
                for line in _lines_of(one, content):
                    self._line(line, here, depth + 1)
        if found or not is_script:
            return
        directories = [one for one in there if self._base.is_directory(one)]
        for one in directories:
            if self._base.read(os.path.join(one, "__main__.py")) is not None:
                self._add(f"{self._within}{one or '__main__.py'}")
        if there and not directories:
            self.loose.add(re.sub(r"^(?:\.\./)+", "", os.path.normpath(word)))
            self.files.update(there)

    def _meant(self, path: str) -> list[str]:
        """What the shell makes of a pattern."""
        directory, name = os.path.split(path)
        fitting = [one for one in self._base.names(directory) if fnmatch.fnmatchcase(one, name)] if _GLOB.search(name) else []
        return [os.path.join(directory, one) for one in fitting] or [path]

    def _relative(self, place: str, word: str) -> str | None:
        """None: it is not in the project, or no name of a file. What a variable holds may be anything."""
        word = re.sub(_VARIABLE, "*", _COMPUTED.sub("", word))
        if not word or "\0" in word or len(word) > 1000 or ("*" in word and is_everything(word)):
            return None
        if word.startswith(self._within):
            word, place = word[len(self._within) :], ""
        found = os.path.normpath(os.path.join(place, word))
        return None if found.startswith(("/", "..")) else "" if found == "." else found


def _loaded(name: str, content: bytes) -> Iterator[str]:
    """What a script of Python or JavaScript loads that lies beside it, where tools lie; elsewhere that may be what it tests."""
    if os.path.basename(os.path.dirname(name)) not in _TOOLS:
        return
    text = content.decode("utf-8", "replace")
    if name.endswith(".py") or re.match(r"#!.*python", text):
        told = [word for one in _IMPORTED.finditer(text) for word in (one[1] or one[2]).replace(" ", "").split(",")]
        yield from (one for word in told for path in [word.replace(".", "/")] for one in (f"{path}.py", f"{path}/__init__.py"))
    elif re.search(r"\.[cm]?[jt]s$", name) or re.match(r"#!.*node", text):
        yield from (f"{word}{end}" for word in _REQUIRED.findall(text) for end in ("", ".js", ".mjs", ".cjs", ".ts", "/index.js"))


def _lines_of(name: str, content: bytes) -> Iterator[str]:
    """Of a file that is made of commands, these; with what its variables hold, too."""
    text = content.decode("utf-8", "replace")
    if os.path.basename(name) == "package.json":
        told = configuring.package(content)
        scripts = told.get("scripts") if isinstance(told, dict) else None
        yield from (line for line in (scripts.values() if isinstance(scripts, dict) else ()) if isinstance(line, str))
    elif "\0" not in text and (_OF_COMMANDS.search(name) or re.match(r"#!.*\b(?:ba|da|z|k)?sh\b", text)):
        make = matcher(configuring.MAKE, "/")(f"/{name}")
        text = text.replace("\\\n", " ")
        text = text.replace("$$", "$") if make else text
        told = [command for line in text.splitlines() for command in (_recipe(line) if make else [line.strip()])]
        told = [command for command in told if command and not command.startswith("#")]
        yield from told
        values = lines.variables(text, make=make)
        yield from itertools.islice((one for line in told for one in lines.variants(line, values)[1:]), _MOST_VARIANTS)


def _recipe(line: str) -> Iterator[str]:
    """What a line of a Makefile runs or reads; what else such a file says is not run."""
    if (included := _INCLUDED.match(line)) is not None:
        yield from (f". {word}" for word in included[1].split())
    elif line.startswith("\t"):
        yield line.strip().lstrip("@-+")
    elif (at_once := _AT_ONCE.match(line)) is not None:
        yield at_once[1].strip().lstrip("@-+")
