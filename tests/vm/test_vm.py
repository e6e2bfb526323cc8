"""The project's own suite on a stock Debian 12 machine: as root, and as an ordinary user with a session of their own.

One boot serves both. The machine has no network, so everything that the suite needs comes along in a folder: the checkout,
and pytest out of the environment that runs this test, all of it compiled: under emulation compiling takes longer than the tests.
What the machine lacks (compilers, databases, a network) tests notice by themselves. What happens inside is in `job.py`, the machine
in `machine.py`.
"""

import compileall
import importlib.metadata
import marshal
import os
import py_compile
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest
from packaging.requirements import Requirement

from vm import job, machine

CHECKOUT = Path(__file__).resolve().parents[2]
BROUGHT = (
    "src",
    "tests",
    "docs",
    "examples",
    "scripts",
    "bench",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
)
TOOLS = ("h11", "pytest", "pytest-timeout")
PEOPLE = ("root", machine.USER)
# The escape suite has to come to its end, however slow the host is; of the rest counts what was reached when this time is over.
ESCAPE_LIMIT_S = 1500
REST_LIMIT_S = 210
BOOT_LIMIT_S = 300.0
STOPPED_BY_TIME = 124

# Building (once) and booting are part of the first test's time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]


@dataclass(frozen=True, slots=True)
class Run:
    """A part of the suite, run by one person in the machine; without an exit code it did not come to an end."""

    exit_code: int | None
    report: str

    def counts(self) -> dict[str, int]:
        """How many passed, skipped and so on, from pytest's closing line."""
        closing = [line for line in self.report.splitlines() if re.search(r" in \d+(\.\d+)?s\b", line)]
        if not closing:
            return {}
        return {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", closing[-1].split(" in ")[0])}

    def passed(self) -> dict[str, int]:
        """How many passed of each module."""
        found: dict[str, int] = {}
        for module in re.findall(r"^(\S+?)::.* PASSED\b", self.report, re.MULTILINE):
            found[module] = found.get(module, 0) + 1
        return found

    def __str__(self) -> str:
        everything = machine.cache_directory() / "output.log"
        return f"exit code {self.exit_code}, {self.counts()}; all of it is in {everything}\n{self.report[-6000:]}"


def run_of(who: str, part: str, output: str) -> Run:
    """One person's lines of one part out of what everybody said."""
    lines = re.findall(rf"^{who} {part} \d+\| (.*)$", output, re.MULTILINE)
    ended = re.fullmatch(r"exit code (\d+)", lines[-1]) if lines else None
    return Run(int(ended[1]), "\n".join(lines[:-1])) if ended else Run(None, "\n".join(lines))


def distributions(names: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """The named ones and all that they require, as installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            requirements = map(Requirement, found[name].requires or ())
            waiting += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def bring_tools(target: Path) -> None:
    """Pure Python, with its metadata (pytest finds its plugins there); programs and compiled files stay behind."""
    for distribution in distributions(TOOLS).values():
        for path in distribution.files or ():
            if ".." not in path.parts and path.suffix != ".pyc":
                place = target / path
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(distribution.locate_file(path)), place)


def bring_checkout(target: Path) -> None:
    target.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "results")
    for name in BROUGHT:
        if (CHECKOUT / name).is_dir():
            shutil.copytree(CHECKOUT / name, target / name, ignore=left_out, symlinks=True)
        elif (CHECKOUT / name).exists():
            shutil.copy2(CHECKOUT / name, target / name)


def compile_everything(folder: Path) -> None:
    """By this Python: another minor version there would compile again, and only be slower. Times of files are not looked at, but by
    pytest: it rewrites tests before it compiles them, so it is made to look at them all here."""
    for name in ("tools", "checkout/src"):
        compileall.compile_dir(folder / name, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = f"{folder}/checkout/src:{folder}/tools"
    words = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *job.ESCAPE, *job.REST]
    subprocess.run(words, cwd=folder / "checkout", env=environment, check=True, capture_output=True)
    for path in folder.rglob("*-pytest-*.pyc"):
        moved(path, str(folder), machine.FOLDER)


def moved(path: Path, old: str, new: str) -> None:
    """Code knows the file that it was made of; tests read the source of their own functions there."""
    header, code = path.read_bytes()[:16], marshal.loads(path.read_bytes()[16:])

    def elsewhere(one: CodeType) -> CodeType:
        constants = tuple(elsewhere(value) if isinstance(value, CodeType) else value for value in one.co_consts)
        return one.replace(co_filename=one.co_filename.replace(old, new, 1), co_consts=constants)

    path.write_bytes(header + marshal.dumps(elsewhere(code)))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    reason = machine.why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("folder")
    bring_checkout(folder / "checkout")
    bring_tools(folder / "tools")
    shutil.copy(Path(__file__).with_name("job.py"), folder / "job.py")
    compile_everything(folder)
    words = ["./job.py", str(ESCAPE_LIMIT_S), str(REST_LIMIT_S), *PEOPLE]
    outcome = machine.boot(folder, words, limit=ESCAPE_LIMIT_S + BOOT_LIMIT_S)
    shutil.rmtree(folder)
    if not outcome.output:
        pytest.fail(f"the machine did not come up in {outcome.seconds:.0f} s:\n{outcome.console[-3000:]}")
    return outcome.output


@pytest.mark.parametrize("who", PEOPLE)
def test_nothing_gets_out_on_a_stock_debian(who: str, output: str) -> None:
    """What the kernel has a say in, to its end."""
    run = run_of(who, "escape", output)
    assert run.exit_code == 0, f"as {who}: {run}"
    assert sorted(run.passed()) == sorted(job.ESCAPE), f"as {who}: {run}"


@pytest.mark.parametrize("who", PEOPLE)
def test_the_suite_passes_on_a_stock_debian(who: str, output: str) -> None:
    """How far the rest comes in its time depends on the host; what was reached has to pass."""
    run = run_of(who, "rest", output)
    if not run.report:
        pytest.skip("the escape suite took all the time")
    assert run.exit_code in (0, STOPPED_BY_TIME), f"as {who}: {run}"
    assert not {"failed", "error", "errors"} & set(run.counts()), f"as {who}: {run}"
    assert run.passed() or run.exit_code == STOPPED_BY_TIME, f"as {who}: {run}"
