"""Shared by all tests: people who use elsewhere from the front door, and the proof that nothing of it is left behind.

`person` runs a test twice, as root and as an ordinary user (really: by giving up root for the processes that it starts). Each
person has a home, a state directory and a launcher of their own, and at the end nothing of theirs may be left. Those of
tests that are marked `one_launcher` have one state directory and one launcher, one after the other, and a home and a project
of their own: to start a launcher takes longer than most tests. What is left of it is looked for at the end.
"""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import pytest

from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching import engine

SOURCE = Path(__file__).resolve().parent.parent / "src"
# How many times longer than on a real machine something may take that is waited for.
PATIENCE = float(os.environ.get("ELSEWHERE_TEST_PATIENCE", "1"))
UID = 4242  # in no user database on purpose: elsewhere must not need one


def interpreter_for_everybody() -> str | None:
    """A Python that an ordinary user can execute; the one that runs the tests may live in root's home."""
    for candidate in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        place = Path(candidate)
        if place.exists() and all(part.stat().st_mode & stat.S_IXOTH for part in (place, *place.parents)):
            done = subprocess.run([candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], check=False)
            if done.returncode == 0:
                return candidate
    return None


def base_directory() -> str:
    """Outside /tmp and /var/tmp, which a sandbox replaces: those have tests of their own."""
    for place in ("/srv", os.environ.get("HOME", "")):
        if place and os.access(place, os.W_OK):
            return place
    return tempfile.gettempdir()


@dataclass
class Person:
    name: str
    uid: int
    place: Path
    python: str
    extra: dict[str, str] = field(default_factory=dict)
    shared: Path | None = None
    ready: bool = True

    @property
    def home(self) -> Path:
        return self.place / "home"

    @property
    def state(self) -> Path:
        return self.shared or self.place / "state"

    @property
    def is_root(self) -> bool:
        return self.uid == 0

    def environment(self) -> dict[str, str]:
        passed = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "TERM")}
        return {
            **passed,
            "HOME": str(self.home),
            "ELSEWHERE_HOME": str(self.state),
            "PYTHONPATH": os.path.realpath(self.place / "lib"),  # one and the same for all who share a launcher
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "LC_ALL": "C.UTF-8",
            **({} if self.ready else {"ELSEWHERE_LAUNCHER_READY": "0"}),
            **self.extra,
        }

    def identity(self) -> dict[str, Any]:
        return {"user": self.uid, "group": self.uid, "extra_groups": []} if os.geteuid() == 0 and not self.is_root else {}

    def shell(self, *argv: str | os.PathLike[str], check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
        """Any command, as this person, on the host."""
        more.setdefault("cwd", self.place)
        more.setdefault("env", self.environment())
        more.setdefault("timeout", 110 * PATIENCE)
        done = subprocess.run(
            [str(word) for word in argv],
            capture_output="stdout" not in more,
            text=True,
            errors="surrogateescape",
            check=False,
            **self.identity(),
            **more,
        )
        if check and done.returncode:
            raise AssertionError(f"{argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def command(self, *arguments: str | os.PathLike[str]) -> list[str]:
        # As the installed command does: `-m` takes a fifth longer, and that is a part of nearly every test.
        return [self.python, "-c", "import elsewhere.__main__", *map(str, arguments)]

    def elsewhere(self, *arguments: str | os.PathLike[str], check: bool = False, **more: Any) -> subprocess.CompletedProcess[str]:
        """The command, as this person would type it; in the project unless said otherwise."""
        more.setdefault("cwd", self.place / "project")
        return self.shell(*self.command(*arguments), check=check, **more)

    def json(self, *arguments: str, **more: Any) -> Any:
        """The document that a verb prints, which must be the only thing on stdout."""
        done = self.elsewhere(arguments[0], "--json", *arguments[1:], **more)
        assert done.stdout.count("\n") == 1, f"not one document: {done.stdout!r}\n{done.stderr}"
        return json.loads(done.stdout)

    def sdk(self, code: str, **more: Any) -> subprocess.CompletedProcess[str]:
        more.setdefault("cwd", self.place / "project")
        return self.shell(self.python, "-X", "dev", "-W", "error", "-c", code, **more)

    def own(self, path: Path) -> Path:
        if os.geteuid() == 0 and not self.is_root:
            for directory, names, files in os.walk(path):
                os.chown(directory, self.uid, self.uid)
                for name in (*names, *files):
                    os.chown(os.path.join(directory, name), self.uid, self.uid, follow_symlinks=False)
        return path

    @property
    def project(self) -> Path:
        """A small git project with sources, tests, an ignored file and a link."""
        project = self.place / "project"
        if not project.exists():
            (project / "src").mkdir(parents=True)
            (project / "README.md").write_text("# a project\n")
            (project / "src" / "app.py").write_text("def add(a, b):\n    return a + b\n")
            (project / "src" / "test_app.py").write_text("from app import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
            (project / ".gitignore").write_text("*.log\n.env\n")
            (project / ".env").write_text("KEY=value\n")
            (project / "link").symlink_to("README.md")
            self.own(project)
            for line in (
                "init -q -b main .",
                "config user.name T",
                "config user.email t@example.org",
                "add -A",
                "commit -qm first",
            ):
                self.shell("git", *line.split(), cwd=project)
        return project

    def stop_launcher(self) -> None:
        for place in self.state.glob("run/*.lock"):
            sock = engine.connect(str(self.state), place.stem)
            if sock is not None:
                with sock, contextlib.suppress(OSError, EOFError):
                    wire.send(sock, ("stop",))
                    wire.receive(sock)

    def processes(self) -> list[tuple[int, str]]:
        """Every process that belongs to this person's elsewhere: launchers, keepers, and what runs in sandboxes."""
        found = self._marked(f"ELSEWHERE_HOME={self.state}\0".encode(), self._inside)
        known = {pid for pid, _ in found}
        return found + [(pid, "keeper") for pid in self._keepers() if pid not in known]

    def commands(self) -> list[tuple[int, str]]:
        """Only what runs in sandboxes, of this person's places."""
        return self._marked(self._inside)

    @property
    def _inside(self) -> bytes:
        return b"ELSEWHERE_SANDBOX_REPO_ROOT=" + os.fsencode(self.place)

    def _marked(self, *marks: bytes) -> list[tuple[int, str]]:
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                try:
                    environment = Path(f"/proc/{entry}/environ").read_bytes() + b"\0"
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if any(mark in environment for mark in marks) and "elsewhere.cli.client" not in words:
                    found.append((int(entry), words))
        return found

    def _keepers(self) -> Iterator[int]:
        """By their records: an ordinary user cannot read the environment of a keeper."""
        for path in (self.state / "sandboxes").glob("*/sandbox.json"):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                pid, started, boot = json.loads(path.read_bytes())["keeper"]
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                same_boot = boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
                if same_boot and int(words[19]) == started and words[0] not in ("Z", "X"):
                    yield pid


def plain(changes: dict[str, Any]) -> dict[str, Any]:
    """Of what `diff` tells, the lists that every document has; there must be nothing else to tell."""
    lists = {kind: changes[kind] for kind in ("added", "modified", "deleted")}
    assert not any(changes[key] for key in changes.keys() - lists.keys()), changes
    return lists


def about_process(pid: int, name: str) -> str:
    """A file of /proc/PID; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def session_of(pid: int) -> int:
    """The leader of its session; 0 if it is gone."""
    words = about_process(pid, "stat").rpartition(")")[2].split()
    return int(words[3]) if words else 0


def tree(path: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a tree that a sandbox must not change: types, modes, owners, contents, links, modification times."""
    found: dict[str, tuple[object, ...]] = {}
    for directory, names, files in os.walk(os.fsencode(path)):
        for name in (b"", *names, *files):
            place = os.path.join(directory, name) if name else directory
            about = os.lstat(place)
            content: object = None
            if stat.S_ISLNK(about.st_mode):
                content = os.readlink(place)
            elif stat.S_ISREG(about.st_mode):
                content = Path(os.fsdecode(place)).read_bytes()
            found[os.fsdecode(place)] = (
                about.st_mode,
                about.st_uid,
                about.st_gid,
                about.st_size,
                about.st_mtime_ns,
                content,
            )
    return found


def eventually(condition: Any, seconds: float = 10.0) -> bool:
    """Whether something comes true in time; only ever used for what other processes still have to do."""
    deadline = time.monotonic() + seconds * PATIENCE
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def groups_of(person: Person) -> list[str]:
    """Control groups that belong to this person's state directory."""
    mark = f"{zlib.crc32(os.fsencode(person.state)):08x}-"
    return [f"{place}/{name}" for place, names, _ in os.walk("/sys/fs/cgroup") for name in names if name.startswith(mark)]


def loop_devices() -> set[str]:
    return {place.name for place in Path("/sys/block").glob("loop*") if (place / "loop").exists()}


def host_mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def make_library() -> Path:
    """The package where everybody can read it, compiled: the checkout may lie in root's home."""
    place = Path(tempfile.mkdtemp(prefix="ew-lib-", dir=base_directory()))
    place.chmod(0o755)
    shutil.copytree(SOURCE / "elsewhere", place / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(h11.__file__).parent, place / "h11", ignore=shutil.ignore_patterns("__pycache__"))
    # Compiled once, so that an ordinary user who cannot write here does not compile at every start.
    subprocess.run(
        [interpreter_for_everybody() or sys.executable, "-m", "compileall", "-q", str(place)],
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    return place


def pytest_configure() -> None:
    """A shell without job control makes what it starts in the background deaf to Ctrl-C, and that is inherited."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """One for all workers: they would all compile the same."""
    if "ELSEWHERE_TEST_LIBRARY" not in os.environ:
        place = make_library()
        os.environ["ELSEWHERE_TEST_LIBRARY"] = str(place)
        config.add_cleanup(lambda: shutil.rmtree(place))


@pytest.fixture(scope="session")
def library() -> Iterator[Path]:
    if ready := os.environ.get("ELSEWHERE_TEST_LIBRARY"):
        yield Path(ready)
        return
    place = make_library()
    yield place
    shutil.rmtree(place)


def make_person(kind: str, library: Path, uid: int = UID) -> Person:
    root = os.geteuid() == 0
    if kind == "root" and not root:
        pytest.skip("needs root")
    if kind not in os.environ.get("ELSEWHERE_TEST_PEOPLE", "root user").split():
        pytest.skip("this run is for others")
    uid = 0 if kind == "root" else uid if root else os.getuid()
    # Not the one in .venv: a checkout may lie in /tmp, which is private inside.
    python = os.path.realpath(sys.executable)
    if kind == "user" and root:
        found = interpreter_for_everybody()
        if found is None:
            pytest.skip("no Python that an ordinary user can execute: install python3")
        python = found
    place = Path(tempfile.mkdtemp(prefix=f"ew-{kind}-", dir=base_directory()))
    place.chmod(0o755)
    person = Person(kind, uid, place, python)
    (place / "lib").symlink_to(library)
    person.home.mkdir()
    person.state.mkdir(mode=0o700)
    person.own(place)
    return person


def dismiss(person: Person) -> None:
    """Nothing may be left: no process, no mount, no control group, no directory that cannot be removed."""
    if (person.state / "sandboxes").is_dir() and any((person.state / "sandboxes").iterdir()):
        person.elsewhere("rm", "--all", "--force", cwd="/")  # some live on their own, and are meant to
    person.stop_launcher()
    for pid, words in person.processes():
        if "elsewhere.cli.launch" in words:  # one that was started in other namespaces cannot be reached from here
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    left = [] if eventually(lambda: not person.processes(), 5) else person.processes()
    for pid, _ in left:
        os.kill(pid, 9)
    mounts = [line for line in host_mounts() if str(person.place) in line]
    if not eventually(lambda: not groups_of(person), 3):
        # A launcher that was killed leaves them to the next one.
        person.elsewhere("run", "--", "true", cwd=person.project)
        person.stop_launcher()
        eventually(lambda: not person.processes(), 5)
    groups = [] if eventually(lambda: not groups_of(person), 10) else groups_of(person)
    if os.geteuid() == 0:
        shutil.rmtree(person.place)
    else:
        person.shell("chmod", "-R", "u+rwX", person.place, check=False)
        shutil.rmtree(person.place)
    assert not left, f"processes were left behind: {left}"
    assert not mounts, f"mounts were left behind: {mounts}"
    assert not groups, f"control groups were left behind: {groups}"


def leave(person: Person) -> None:
    """What one of those who share a launcher leaves to the next: nothing but the launcher, and what it learned."""
    said = ""
    if any((person.state / "sandboxes").glob("*")):
        said = person.elsewhere("rm", "--all", "--force", cwd="/").stderr
    left = [] if eventually(lambda: not person.commands(), 5) else person.commands()
    for pid, _ in left:
        os.kill(pid, 9)
    mounts = [line for line in host_mounts() if str(person.place) in line]
    sandboxes = list((person.state / "sandboxes").glob("*"))
    archived = list((person.state / "archive").glob("*"))
    person.shell("chmod", "-R", "u+rwX", person.place, *archived, check=False)
    for path in (person.place, *archived):
        shutil.rmtree(path)
    assert not left, f"processes were left behind: {left}"
    assert not mounts, f"mounts were left behind: {mounts}"
    assert not sandboxes, f"sandboxes were left behind: {sandboxes} {said}"


@pytest.fixture(scope="session")
def hosts(library: Path) -> Iterator[Callable[[Person], Person]]:
    """Whose state directory and launcher all of a kind have who share one."""
    known: dict[tuple[str, bool], Person] = {}

    def host(someone: Person) -> Person:
        kind = (someone.name, someone.ready)
        if kind not in known:
            known[kind] = make_person(someone.name, library)
            stack.callback(dismiss, known[kind])
        return known[kind]

    with contextlib.ExitStack() as stack:
        yield host


@contextlib.contextmanager
def living(kind: str, library: Path, request: pytest.FixtureRequest) -> Iterator[Person]:
    someone = make_person(kind, library)
    someone.ready = request.path.stem not in UNPREPARED
    shares = request.node.get_closest_marker("one_launcher") and not request.node.get_closest_marker("own_launcher")
    if shares:
        someone.shared = request.getfixturevalue("hosts")(someone).state
    assert someone.project
    yield someone
    (leave if shares else dismiss)(someone)


@pytest.fixture(params=["root", "user"])
def person(request: pytest.FixtureRequest, library: Path) -> Iterator[Person]:
    with living(request.param, library, request) as someone:
        yield someone


@pytest.fixture
def root(request: pytest.FixtureRequest, library: Path) -> Iterator[Person]:
    with living("root", library, request) as someone:
        yield someone


@pytest.fixture
def user(request: pytest.FixtureRequest, library: Path) -> Iterator[Person]:
    with living("user", library, request) as someone:
        yield someone


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The host after all tests is the host before them. Others may test at the same time, and have loop devices for a while."""
    before, loops = host_mounts(), loop_devices()
    yield
    assert host_mounts() == before
    assert eventually(lambda: loop_devices() <= loops, 90), loop_devices() - loops


# What hardly depends on who it is: half of these tests is run as root and the other half as an ordinary user.
EITHER = """test_admission test_bases_front test_bombs test_boundary test_crowd test_diff test_diff_rungs test_documentation test_drift_front
test_enforced test_examples test_faults test_fidelity test_identity_front test_life test_limits test_reboot test_run test_sdk test_sdk_life test_settings_front
test_explore test_ladder test_network test_profiles test_redirect test_promotion test_promotion_again test_race test_race_taking test_snapshot_faults test_snapshots test_stages test_terminal
test_tools test_verbs test_views""".split()
# What needs no sandboxes that were made ahead of time, which takes a fifth of all processor time: others have them.
UNPREPARED = """
test_admission test_bases_front test_diff test_diff_rungs test_documentation test_drift_front test_enforced
test_examples test_explore test_fidelity test_identity_front test_ladder test_life test_limits test_network
test_profiles test_promotion test_promotion_again test_promotion_kills test_promotion_model test_race test_race_taking
test_reboot test_redirect test_sdk_life test_settings_front test_snapshot_faults test_snapshot_kills test_snapshot_model
test_snapshots test_stages test_terminal test_tools
""".split()
# Of these only the quick ones: the slow ones count moments over everybody.
EITHER_IF_QUICK = (
    "test_kill_points test_model test_promotion_kills test_promotion_model test_snapshot_kills test_snapshot_model".split()
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`ELSEWHERE_TEST_EVERYBODY=1` runs all tests as everybody. Who cannot become somebody else is everybody."""
    items.sort(key=_shortness)
    if os.geteuid() != 0 or {"ELSEWHERE_TEST_EVERYBODY", "ELSEWHERE_TEST_PEOPLE"} & os.environ.keys():
        return
    config.hook.pytest_deselected(items=[item for item in items if _is_for_the_other(item)])
    items[:] = [item for item in items if not _is_for_the_other(item)]


def _shortness(item: pytest.Item) -> float:
    """What takes minutes begins first, so that nobody waits for it alone at the end."""
    marker = item.get_closest_marker("slow")
    return -float(marker.args[0]) if marker and marker.args else 0.0


def _is_for_the_other(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    halved = item.path.stem in EITHER or (item.path.stem in EITHER_IF_QUICK and item.get_closest_marker("slow") is None)
    if call is None or not halved or call.params.get("person") not in ("root", "user"):
        return False
    other = {name: str(value) for name, value in call.params.items() if name != "person"}
    number = zlib.crc32(f"{item.originalname} {sorted(other.items())}".encode())  # type: ignore[attr-defined]
    return call.params["person"] != ("root", "user")[number % 2]
