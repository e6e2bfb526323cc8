"""Files that tell a program what to do: whoever writes them writes the command. Of some of them only a part is about that: these
are compared by what they say. Pure: names and contents go in."""

import configparser
import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["COMPANIONS", "CONFIGURES", "MAKE", "package", "plugins", "python_files"]

MAKE = ("Makefile", "makefile", "GNUmakefile", "*.mk")
_NPM = (
    *(".npmrc", ".yarnrc*", ".yarn", ".pnp*", "bunfig.toml", "babel.config.*", ".babelrc"),
    *("jest.config.*", ".mocharc*", "vitest.config.*", "vite.config.*"),
)
_MAVEN = ("pom.xml", ".mvn", "mvnw*")
_GRADLE = ("build.gradle*", "settings.gradle*", "buildSrc", "gradle*")
COMPANIONS = {
    "make": MAKE,
    "gmake": MAKE,
    "just": ("justfile", "Justfile", ".justfile"),
    "task": ("Taskfile*", "taskfile*"),
    "rake": ("Rakefile", "rakefile", "*.rake"),
    "cmake": ("CMakeLists.txt", "*.cmake", "CMakePresets.json"),
    "ctest": ("CMakeLists.txt", "*.cmake", "CTestTestfile.cmake"),
    "ninja": ("build.ninja",),
    "meson": ("meson.build", "meson.options", "meson_options.txt"),
    "nox": ("noxfile.py",),
    "invoke": ("tasks.py", "invoke.*"),
    "inv": ("tasks.py", "invoke.*"),
    "jest": _NPM,
    "vitest": _NPM,
    "mocha": _NPM,
    "ava": ("ava.config.*",),
    "playwright": ("playwright.config.*",),
    "npm": _NPM,
    "yarn": _NPM,
    "pnpm": _NPM,
    "bun": _NPM,
    "deno": ("deno.json*",),
    "c8": (".c8rc*",),
    "nyc": (".nycrc*", "nyc.config.*"),
    "ts-node": ("tsconfig*.json",),
    "tsx": ("tsconfig*.json",),
    "rspec": (".rspec",),
    "bats": ("*.bats",),
    "cargo": (".cargo", "build.rs", "rust-toolchain*", "clippy.toml", ".clippy.toml"),
    "phpunit": ("phpunit.xml*",),
    "behave": ("features", "behave.ini"),
    "ruff": ("ruff.toml", ".ruff.toml"),
    "mypy": ("mypy.ini", ".mypy.ini"),
    "dmypy": ("mypy.ini", ".mypy.ini"),
    "flake8": (".flake8",),
    "pylint": (".pylintrc", "pylintrc", ".pylintrc.toml", "pylintrc.toml"),
    "pyright": ("pyrightconfig.json",),
    "basedpyright": ("pyrightconfig.json",),
    "isort": (".isort.cfg",),
    "tsc": ("tsconfig*.json",),
    "eslint": ("eslint.config.*", ".eslintrc*", ".eslintignore"),
    "golangci-lint": (".golangci*",),
    "pre-commit": (".pre-commit-config.yaml",),
    "coverage": (".coveragerc",),
    "pytest": (".coveragerc",),
    "gradle": _GRADLE,
    "gradlew": _GRADLE,
    "mvn": _MAVEN,
    "mvnw": _MAVEN,
}
_PLUGINS = re.compile(r"""^pytest_plugins\b[^=\n]*=\s*(\[[^\]]*\]|\([^)]*\)|.+)""", re.MULTILINE)
_LINTERS = ("mypy", "ruff", "flake8", "pylint", "pyright", "basedpyright", "black", "isort")
_OF_TOOLS = ("pytest", "coverage", "tox", "nox", "hatch", "poe", "pdm", "taskipy", *_LINTERS)


def _toml(content: bytes | None) -> Any:
    try:
        tool = tomllib.loads((content or b"").decode()).get("tool", {})
        return {name: tool.get(name) for name in _OF_TOOLS}
    except (ValueError, RecursionError, AttributeError):
        return content


def _cargo(content: bytes | None) -> Any:
    try:
        found = tomllib.loads((content or b"").decode())
        package = {name: value for name, value in found.get("package", {}).items() if name.startswith(("auto", "build"))}
        profile = {name: found.get("profile", {}).get(name) for name in ("test", "dev")}
        parts = {name: found.get(name) for name in ("test", "bench", "lib", "dev-dependencies", "workspace")}
        return parts | {"package": package, "profile": profile}
    except (ValueError, RecursionError, AttributeError):
        return content


def _ini(content: bytes | None) -> Any:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string((content or b"").decode())
    except (configparser.Error, ValueError):
        return content
    told = (name for name in parser.sections() if name.removeprefix("tool:").startswith(("pytest", "coverage", "tox", *_LINTERS)))
    return {name: dict(parser[name]) for name in told}


def python_files(name: str, content: bytes | None) -> list[str]:
    """What tests are called, by one of the files that may configure pytest."""
    return _of_pytest(name, content, "python_files")


def plugins(name: str, content: bytes | None) -> list[str]:
    """Modules that pytest loads, by one of the files that may configure it, or by a conftest.py."""
    if name.endswith("conftest.py"):
        told = _PLUGINS.search((content or b"").decode("utf-8", "replace"))
        return re.findall(r"""["']([\w.]+)["']""", told[1]) if told else []
    words = _of_pytest(name, content, "addopts")
    return [word for before, word in itertools.pairwise(words) if before == "-p"] + [one[2:] for one in words if one[:2] == "-p"]


def _of_pytest(name: str, content: bytes | None, option: str) -> list[str]:
    told: Any = None
    try:
        if name.endswith(".toml"):
            read = tomllib.loads((content or b"").decode())
            pytest = read.get("tool", {}).get("pytest", {}) if name == "pyproject.toml" else read.get("pytest", {})
            told = pytest.get("ini_options", pytest).get(option)
        elif isinstance(sections := _ini(content), dict):
            told = next((one[option] for one in sections.values() if option in one), None)
    except (ValueError, RecursionError, AttributeError):
        return []
    names = told.split() if isinstance(told, str) else told if isinstance(told, list) else []
    return [one for one in names if isinstance(one, str)]


def _json(content: bytes | None, names: Iterable[str]) -> Any:
    try:
        found = json.loads(content or b"{}")
        return {name: found.get(name) for name in names}
    except (ValueError, RecursionError, AttributeError):
        return content


def package(content: bytes | None) -> Any:
    return _json(content, ("scripts", "jest", "mocha", "ava", "vitest", "eslintConfig", "c8", "nyc"))


def _composer(content: bytes | None) -> Any:
    return _json(content, ("scripts", "autoload-dev", "config"))


CONFIGURES: dict[str, Callable[[bytes | None], Any]] = {
    "pyproject.toml": _toml,
    "setup.cfg": _ini,
    "package.json": package,
    "composer.json": _composer,
    "Cargo.toml": _cargo,
}
