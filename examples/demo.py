"""A small project is broken in several ways, each time elsewhere, and after each one reality is proven to be what it was.

    make demo                    in a checkout
    python examples/demo.py      wherever elsewhere is installed

It makes its own project, state directory and launcher in a temporary place and removes all of it at the end. It ends with 0 only
if every proof held. Commands that are shown after a `$` are really run, just like that.
"""

import contextlib
import hashlib
import importlib.util
import os
import shlex
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elsewhere import ElsewhereError, Sandbox
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching.engine import connect, socket_name

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
    for name, text in SOURCES.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(textwrap.dedent(text))
    write_wheel(project / WHEEL)
    make_virtual_environment(project / ".venv")
    if shutil.which("git"):
        own = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        author = ["-c", "user.name=Demo", "-c", "user.email=demo@example.org"]
        for line in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "A shop"]):
            subprocess.run(["git", *line], cwd=project, env=own, check=True)


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


def fingerprint(path: Path) -> tuple[int, str]:
    """How many entries a tree has, and one hash over all their names, modes, contents and link targets."""
    digest, count = hashlib.sha256(), 0
    for directory, names, files in os.walk(path):
        names.sort()
        for name in sorted((*names, *files)):
            place = os.path.join(directory, name)
            mode = os.lstat(place).st_mode
            if stat.S_ISLNK(mode):
                content = os.fsencode(os.readlink(place))
            elif stat.S_ISREG(mode):
                content = Path(place).read_bytes()
            else:
                content = b""
            digest.update(b"%s\0%o\0%d\0%s" % (os.fsencode(os.path.relpath(place, path)), mode, len(content), content))
            count += 1
    return count, digest.hexdigest()


def processes() -> Iterator[tuple[list[bytes], list[bytes]]]:
    """The arguments and the environment of every process of the machine that may be looked at."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield (entry / "cmdline").read_bytes().split(b"\0"), (entry / "environ").read_bytes().split(b"\0")


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


@contextlib.contextmanager
def temporary_place() -> Iterator[Path]:
    """Not in /tmp if there is another choice: a sandbox has a /tmp of its own, and only the project would be seen in there."""
    places = [os.path.expanduser("~/.cache"), "/var/tmp", tempfile.gettempdir()]
    parent = next(place for place in places if os.access(place, os.W_OK | os.X_OK))
    with tempfile.TemporaryDirectory(prefix="elsewhere-demo-", dir=parent) as place:
        yield Path(place).resolve()


@contextlib.contextmanager
def own_state(state: Path) -> Iterator[None]:
    """Sandboxes and a launcher of our own; whoever watches may have others, which are none of our business."""
    state.mkdir()
    os.environ["ELSEWHERE_HOME"] = str(state)
    try:
        yield
    finally:
        stop_launcher(state)


def stop_launcher(state: Path) -> None:
    """It would go by itself after a few idle minutes; ours is asked to go now, and takes what it has in stock with it."""
    sock = connect(str(state), socket_name())
    if sock is not None:
        with sock:
            wire.send(sock, ("stop",))
            wire.receive(sock)
    mark, deadline = os.fsencode(f"ELSEWHERE_HOME={state}"), time.monotonic() + 10
    while left := [b" ".join(words) for words, environment in processes() if mark in environment]:
        if time.monotonic() > deadline:
            prove(False, f"everything that we started is gone (there is still {left})")
            return
        time.sleep(0.02)


def main() -> int:
    began = time.monotonic()
    with temporary_place() as place:
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
