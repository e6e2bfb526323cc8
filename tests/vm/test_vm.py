"""The project's own suite on a stock Debian 12 machine: as root, and as an ordinary user with a session of their own.

One boot serves both. The machine has no network, so everything that the suite needs comes along in a folder: the checkout,
and pytest out of the environment that runs this test. What the machine lacks (compilers, databases, a network) tests notice
by themselves. What happens inside is in `job.py`, the machine in `machine.py`.
"""

import importlib.metadata
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vm import machine

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
TOOLS = ("pytest", "pytest-timeout")
SUITE_LIMIT_S = 480
BOOT_LIMIT_S = 300.0
# How many have to pass, and none to fail, for the run to count: how far it comes in its time depends on the host.
LEAST = {"root": 20, machine.USER: 15}
STOPPED_BY_TIME = 124

# Building (once) and booting are part of the first test's time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]


@dataclass(frozen=True, slots=True)
class Run:
    """The suite, run by one person in the machine."""

    exit_code: int | None
    report: str

    def counts(self) -> dict[str, int]:
        """How many passed, skipped and so on, from pytest's closing line."""
        closing = [line for line in self.report.splitlines() if re.search(r" in \d+(\.\d+)?s\b", line)]
        if not closing:
            return {}
        return {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", closing[-1].split(" in ")[0])}


def run_of(who: str, output: str) -> Run:
    """One person's lines out of what everybody said."""
    lines = re.findall(rf"^{who} \d+\| (.*)$", output, re.MULTILINE)
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    reason = machine.why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("folder")
    bring_checkout(folder / "checkout")
    bring_tools(folder / "tools")
    shutil.copy(Path(__file__).with_name("job.py"), folder / "job.py")
    outcome = machine.boot(folder, ["./job.py", str(SUITE_LIMIT_S), *LEAST], limit=SUITE_LIMIT_S + BOOT_LIMIT_S)
    shutil.rmtree(folder)
    if not outcome.output:
        pytest.fail(f"the machine did not come up in {outcome.seconds:.0f} s:\n{outcome.console[-3000:]}")
    return {who: run_of(who, outcome.output) for who in LEAST}


@pytest.mark.parametrize("who", list(LEAST))
def test_the_suite_passes_on_a_stock_debian(who: str, runs: dict[str, Run]) -> None:
    run, counts = runs[who], runs[who].counts()
    everything = machine.cache_directory() / "output.log"
    seen = f"as {who}: exit code {run.exit_code}, {counts}; all of it is in {everything}\n{run.report[-6000:]}"
    assert run.exit_code in (0, STOPPED_BY_TIME), seen
    assert not {"failed", "error", "errors"} & set(counts), seen
    passed = counts.get("passed", 0)
    assert passed >= LEAST[who], seen
