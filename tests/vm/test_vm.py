"""The project's own suite on a stock Debian 12 machine: once as root, once as an ordinary user with a session of their own.

One boot serves both. The machine has no network, so everything that the suite needs comes along in a folder: the checkout,
and pytest out of the environment that runs this test. What the machine lacks (compilers, databases, a network) tests notice
by themselves.
"""

import importlib.metadata
import re
import shlex
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
    "LICENSE",
)
FLOORS = ("unit", "linux", "contract", "e2e")
TOOLS = ("pytest", "pytest-timeout")

BOOT_LIMIT_S = 1500.0
TEST_LIMIT_S = 600  # the suite's own limit of a test is for real machines; emulation takes about ten times as long
# What has to pass for the run to count, of everything that was selected: as `dev` each test for root skips.
LEAST_SHARE = {"root": 0.8, machine.USER: 0.4}
LEAST = {"root": 6, machine.USER: 3}

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
        return (
            {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", closing[-1].split(" in ")[0])} if closing else {}
        )


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
    """Pure Python, with its metadata (pytest finds its plugins there); programs and what is compiled stay behind."""
    for distribution in distributions(TOOLS).values():
        for path in distribution.files or ():
            if ".." not in path.parts and path.suffix != ".pyc":
                place = target / path
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(distribution.locate_file(path)), place)


def job(floors: list[str]) -> str:
    """The suite twice, each in a login session; the first one leaves its bytecode for the second."""
    suite = ["python3", "-m", "pytest", *floors, "-m", "not slow", "-p", "no:cacheprovider", "-rfEs", "--durations=15"]
    suite += ["--timeout", str(TEST_LIMIT_S)]
    line = f"cd /mnt/checkout && PYTHONPATH=/mnt/checkout/src:/mnt/tools {shlex.join(suite)}"
    runs = [f'echo "{mark(who)}"\nsu - {who} -c {shlex.quote(line)}\necho "{mark(who)} exit $?"\n' for who in LEAST]
    return "#!/bin/sh\n" + "".join(runs)


def mark(who: str) -> str:
    return f"=== the suite as {who} ==="


def run_of(who: str, output: str) -> Run:
    found = re.search(rf"^{mark(who)}\n(.*?)(?:^{mark(who)} exit (\d+)$|\Z)", output, re.DOTALL | re.MULTILINE)
    return Run(int(found[2]) if found and found[2] else None, found[1] if found else "")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    reason = machine.why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("folder")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in BROUGHT:
        if (CHECKOUT / name).is_dir():
            shutil.copytree(
                CHECKOUT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "results"), symlinks=True
            )
        elif (CHECKOUT / name).exists():
            shutil.copy2(CHECKOUT / name, checkout / name)
    bring_tools(folder / "tools")
    floors = [f"tests/{floor}" for floor in FLOORS if list((checkout / "tests" / floor).rglob("test_*.py"))]
    script = folder / machine.JOB
    script.write_text(job(floors))
    script.chmod(0o755)
    outcome = machine.boot(folder, limit=BOOT_LIMIT_S)
    shutil.rmtree(folder)
    if outcome.exit_code is None and not outcome.output:
        pytest.fail(f"the machine did not come up in {outcome.seconds:.0f} s:\n{outcome.console[-3000:]}")
    return {who: run_of(who, outcome.output) for who in LEAST}


@pytest.mark.parametrize("who", list(LEAST))
def test_the_suite_passes_on_a_stock_debian(who: str, runs: dict[str, Run]) -> None:
    run = runs[who]
    everything = machine.cache_directory() / "output.log"
    seen = f"as {who}: exit code {run.exit_code}, {run.counts()}; all of it is in {everything}\n{run.report[-6000:]}"
    assert run.exit_code == 0, seen
    counts = run.counts()
    passed = counts.get("passed", 0)
    selected = sum(counts.get(word, 0) for word in ("passed", "skipped", "xfailed", "xpassed"))
    assert passed >= LEAST[who], seen
    assert passed >= LEAST_SHARE[who] * selected, seen
