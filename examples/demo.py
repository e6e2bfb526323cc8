"""A small project is broken in several ways, each time elsewhere, and after each one reality is proven to be what it was. Then a
change that was tried out is moved to reality, in stages, and one that is not good enough does not get there. At the end three
ways out of a broken upgrade race each other, and the one that is right gets to reality.

    make demo                    in a checkout
    python examples/demo.py      wherever elsewhere is installed

It makes its own project, state directory and launcher in a temporary place and removes all of it at the end. It ends with 0 only
if every proof held. Commands that are shown after a `$` are really run, just like that.
"""

import importlib.util
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dependency_upgrade
from elsewhere import ElsewhereError, Experiment, Sandbox
from scratch import fingerprint, git, make_repository, own_state, processes, temporary_place, write

SOURCES = {
    "src/shop/__init__.py": "",
    "src/shop/cart.py": """\
        def total(prices: list[float]) -> float:
            return sum(prices)
        """,
    "tests/test_cart.py": """\
        import unittest

        from shop.cart import total


        class CartTest(unittest.TestCase):
            def test_nothing_costs_nothing(self) -> None:
                self.assertEqual(total([]), 0)

            def test_two_prices(self) -> None:
                self.assertEqual(total([0.1, 0.2]), 0.3)

            def test_ten_prices(self) -> None:
                self.assertEqual(total([0.1] * 10), 1.0)
        """,
    ".gitignore": ".venv/\n.env\n",
    ".env": "SHOP_DATABASE=postgresql://localhost/shop\n",
}
FIXES = {
    "round": "def total(prices):\n    return round(sum(prices), 2)\n",
    "fsum": "import math\n\n\ndef total(prices):\n    return math.fsum(prices)\n",
    "decimal": "from decimal import Decimal\n\n\ndef total(prices):\n    return float(sum(Decimal(str(p)) for p in prices))\n",
}
UNIT_TESTS = "PYTHONPATH=src python3 -B -m unittest discover -q -s tests"
STAGES = f"""\
[[stages]]
name = "dev"
target = "."
checks = ["{UNIT_TESTS}"]

[[stages]]
name = "staging"
target = "../staging"
checks = ["{UNIT_TESTS}", "! grep -rn breakpoint src"]

[[stages]]
name = "production"
target = "../production"
checks = ["{UNIT_TESTS}"]
"""
TESTS = [".venv/bin/python", "-B", "-m", "unittest", "discover", "-s", "tests"]
WHEEL = "vendor/greetings-1.0-py3-none-any.whl"


# -- what is seen ---------------------------------------------------------------------------------------------------------------

COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
broken_proofs: list[str] = []


def paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOUR else text


def say(text: str = "") -> None:
    print(text, flush=True)


def title(text: str) -> None:
    say()
    say(paint(text, "1"))


def prove(holds: bool, text: str) -> None:
    say(paint(f"   ✓ {text}", "32") if holds else paint(f"   ✗ NOT TRUE: {text}", "31;1"))
    if not holds:
        broken_proofs.append(text)


# -- reality --------------------------------------------------------------------------------------------------------------------


def make_project(project: Path) -> None:
    """A git repository with sources, tests, an ignored file, a virtual environment, and a package that could be installed."""
    write(project, SOURCES)
    write_wheel(project / WHEEL)
    make_virtual_environment(project / ".venv")
    if shutil.which("git"):
        make_repository(project, "A shop")


def write_wheel(path: Path) -> None:
    """A package is a zip file with three lines about itself."""
    about = "greetings-1.0.dist-info"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("greetings.py", "def hello():\n    return 'Hello from a package that reality does not have.'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: demo\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def make_virtual_environment(place: Path) -> None:
    """`venv` takes seconds to put pip into a new environment, so the pip that we have is copied, if we have one."""
    ours = importlib.util.find_spec("pip")
    venv.create(place, symlinks=True, with_pip=ours is None)
    if ours is not None and ours.origin is not None:
        packages = next((place / "lib").glob("python*/site-packages"))
        shutil.copytree(Path(ours.origin).parent, packages / "pip")


# -- scenes ---------------------------------------------------------------------------------------------------------------------


class Stage:
    """The project in reality, and the `elsewhere` command in front of it."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.before = fingerprint(project)
        script = Path(sys.executable).with_name("elsewhere")
        self.command = [str(script)] if script.exists() else [sys.executable, "-m", "elsewhere"]

    def elsewhere(self, *words: str, ends_with: int = 0) -> None:
        with self.started(*words) as process:
            code = process.wait()
        if code != ends_with:
            prove(False, f"that ended with {ends_with} (it ended with {code})")

    def started(self, *words: str) -> subprocess.Popen[bytes]:
        say(paint(f"   $ elsewhere {shlex.join(words)}", "36"))
        return subprocess.Popen([*self.command, *words], cwd=self.project, stdin=subprocess.DEVNULL)

    def prove_that_reality_is_the_same(self) -> None:
        count, now = fingerprint(self.project)
        prove((count, now) == self.before, f"reality is byte for byte the same: {count:,} entries, sha256 {now[:12]}…")


def delete_the_sources(stage: Stage) -> None:
    title("1. Delete the sources")
    stage.elsewhere("run", "--", "rm", "-rf", "src", "tests")
    stage.elsewhere("diff", "@last")
    stage.prove_that_reality_is_the_same()


def install_a_package(stage: Stage) -> None:
    title("2. Install a package into the project's virtual environment")
    install = f".venv/bin/python -m pip install -q --no-index {WHEEL}"
    use = '.venv/bin/python -c "import greetings; print(greetings.hello())"'
    stage.elsewhere("run", "-c", f"{install} && {use}")
    stage.elsewhere("diff", "@last", "--stat")
    importing = [str(stage.project / ".venv/bin/python"), "-B", "-c", "import greetings"]
    outside = subprocess.run(importing, check=False, stderr=subprocess.PIPE)
    prove(b"ModuleNotFoundError" in outside.stderr, "outside, nobody can import it")
    stage.prove_that_reality_is_the_same()


def edit_etc(stage: Stage, whole_machine: bool) -> None:
    title("3. Edit the machine's own configuration")
    before = Path("/etc/passwd").read_bytes()
    if not whole_machine:
        say("   Here /etc can be read and not written, as for every user but root, so this fails.")
    intrude = "echo intruder:x:0:0::/:/bin/sh | tee -a /etc/passwd"
    stage.elsewhere("run", "-c", intrude, ends_with=0 if whole_machine else 1)
    prove(Path("/etc/passwd").read_bytes() == before, "/etc/passwd of reality is byte for byte the same")
    stage.prove_that_reality_is_the_same()


def run_away(stage: Stage) -> None:
    title("4. Run away, with children")
    seconds = f"86400.{os.getpid()}"  # an odd number, by which its processes are known

    def running() -> int:
        return sum(words[0] in (b"sh", b"sleep") and seconds in str(words) for words, _ in processes())

    with stage.started("run", "--timeout", "1s", "--", "sh", "-c", f"sleep {seconds} & sleep {seconds} & wait") as process:
        seen = 0
        while process.poll() is None:
            seen = max(seen, running())
            time.sleep(0.05)
    prove(process.returncode == 124, "the exit code says that time was up: 124")
    prove(seen == 3 and running() == 0, f"{seen} processes while it ran, none now")
    stage.prove_that_reality_is_the_same()


def three_fixes(stage: Stage) -> None:
    title("5. Try three fixes at once, from Python")
    say("   Two of the shop's three tests fail: 0.1 + 0.2 is not 0.3. Each fix gets a sandbox and a thread of its own.")

    def attempt(name: str) -> tuple[str, str, str]:
        with Sandbox.create(stage.project) as box:
            box.run("cat > src/shop/cart.py", input=FIXES[name]).check()
            tests = box.run(TESTS, env={"PYTHONPATH": "src"}, timeout="30s")
            changed = ", ".join(os.path.relpath(path, stage.project) for path in box.changes().modified)
            return name, tests.stderr.strip().splitlines()[-1], changed

    with ThreadPoolExecutor() as threads:
        results = list(threads.map(attempt, FIXES))
    for name, verdict, changed in results:
        passed = verdict == "OK"
        say(f"   {name:8} {paint(f'{verdict:22}', '32' if passed else '33')} changed {changed}")
    found = {name: (verdict, changed) for name, verdict, changed in results}
    expected = {"round": "OK", "fsum": "FAILED (failures=1)", "decimal": "OK"}
    prove(found == {name: (verdict, "src/shop/cart.py") for name, verdict in expected.items()}, "each saw its own fix only")
    stage.prove_that_reality_is_the_same()


def back_to_reality(stage: Stage) -> None:
    title("6. Move what was tried out to reality: dev, staging, production")
    project, further = stage.project, [stage.project.with_name(name) for name in ("staging", "production")]
    for place in further:
        shutil.copytree(project, place, symlinks=True, ignore=shutil.ignore_patterns(".venv", ".git"))
    (project / "elsewhere.toml").write_text(STAGES)
    stage.elsewhere("trust")
    cart = "src/shop/cart.py"
    stage.elsewhere("create", "--name", "fix")
    stage.elsewhere("exec", "fix", "--", "sed", "-i", "s/sum(prices)/round(sum(prices), 2)/", cart)
    stage.elsewhere("promote", "fix", "--to", "production")
    good = (project / cart).read_text()
    prove("round" in good, "the good change is in dev")
    prove(all((place / cart).read_text() == good for place in further), "and in staging and production as well")
    before = [fingerprint(place) for place in further]
    stage.elsewhere("exec", "fix", "-c", f"echo '# breakpoint()' >> {cart}")
    stage.elsewhere("promote", "fix", "--to", "production", ends_with=4)
    prove("breakpoint" in (project / cart).read_text(), "the other one got to dev, where it passed the tests")
    prove(fingerprint(further[0]) == before[0], "staging refused it, and is byte for byte what it was")
    prove(fingerprint(further[1]) == before[1], "production never saw it")
    stage.elsewhere("undo")
    prove((project / cart).read_text() == good, "undone, dev has the good change and nothing else")


def three_ways_out(project: Path) -> None:
    title("7. Race: an upgrade broke the tests, and three ways out of it are tried at once")
    if not shutil.which("git"):
        say("   Two of them need git, which is not here.")
        return
    write(project, dependency_upgrade.FILES)
    make_repository(project, "As it was")
    dependency_upgrade.complete(project)
    stage, head = Stage(project), git(project, "rev-parse", "HEAD")
    stage.elsewhere(*dependency_upgrade.COMMAND)
    counts = Experiment.get("@last").document()["experiment"]["counts"]
    prove(
        counts == {"attempts": 3, "started": 3, "verified": 1, "failed": 2, "cancelled": 0, "promoted": 1},
        "one of three is right",
    )
    prove(git(project, "status", "--porcelain") == " M invoice.py\n", "its patch is in reality, and nothing of the others")
    prove(git(project, "rev-parse", "HEAD") == head, "not even the commit that one of them made")
    stage.elsewhere("experiments", "report", "@last")
    prove(b"<html" in Path(Experiment.get("@last").report()).read_bytes(), "that is a page for a browser (gone with this demo)")
    stage.elsewhere("undo")
    prove(git(project, "status", "--porcelain") == "", "undone, everything is as it was before the race")


def take_times(stage: Stage, rounds: int = 15, seconds: float = 3.0) -> None:
    title("What it costs")
    times: dict[str, list[float]] = {"create": [], "run true": [], "remove": []}
    deadline = time.perf_counter() + seconds
    while len(times["create"]) < rounds and time.perf_counter() < deadline:
        marks = [time.perf_counter()]
        box = Sandbox.create(stage.project)
        marks.append(time.perf_counter())
        box.run(["true"]).check()
        marks.append(time.perf_counter())
        box.remove()
        marks.append(time.perf_counter())
        for name, start, end in zip(times, marks, marks[1:], strict=False):
            times[name].append((end - start) * 1000)
    say("   " + " · ".join(f"{name} {statistics.median(taken):.1f} ms" for name, taken in times.items()))
    say(f"   (medians of {len(times['create'])} from Python, on this machine as busy as it is now)")


# -- the whole ------------------------------------------------------------------------------------------------------------------


def main() -> int:
    began = time.monotonic()
    with temporary_place("demo") as place:
        say(paint("elsewhere", "1") + ": a project is about to be broken in several ways, and none of it will be real.")
        with own_state(place / "state"):
            project = place / "shop"
            make_project(project)
            stage = Stage(project)
            say(f"The project: {project}, {stage.before[0]:,} entries with its virtual environment.")
            try:
                with Sandbox.create(project) as box:
                    say(f"A sandbox here: {box.enforced['files']} ({box.mechanism}).")
                    whole_machine = box.mechanism.startswith("overlay-idmap")
                delete_the_sources(stage)
                install_a_package(stage)
                edit_etc(stage, whole_machine)
                run_away(stage)
                three_fixes(stage)
                take_times(stage)
                back_to_reality(stage)
                three_ways_out(place / "invoices")
                title("Clean up")
                stage.elsewhere("rm", "--all", "--force")
            except ElsewhereError as error:
                say(paint(f"elsewhere: {error.message}\n  next: {error.hint}", "31"))
                return 1
    prove(not place.exists(), "nothing is left: no sandbox, no launcher, no file")
    say()
    if broken_proofs:
        say(paint(f"{len(broken_proofs)} of the proofs did not hold.", "31;1"))
        return 1
    say(f"Every proof held, in {time.monotonic() - began:.1f} s. Next: docs/getting-started.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
