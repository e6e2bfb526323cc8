"""A project for an example, with a state directory and a launcher of elsewhere's for it alone; all of it is gone afterwards.

    with scratch_project("shop", {"app.py": "print('open')\n"}) as project:
        …

Whoever runs an example may have sandboxes of their own, which are none of its business. Not an example itself: a program that
uses elsewhere needs nothing of this.
"""

import contextlib
import hashlib
import os
import stat
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from elsewhere import Sandbox
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching.engine import connect, socket_name

__all__ = ["fingerprint", "git", "make_repository", "own_state", "processes", "scratch_project", "temporary_place", "write"]


@contextlib.contextmanager
def scratch_project(name: str, files: Mapping[str, str]) -> Iterator[Path]:
    """A git repository with these files, in one commit."""
    with temporary_place(name) as place, own_state(place / "state"):
        project = place / name
        write(project, files)
        make_repository(project, "As it was")
        yield project


def make_repository(project: Path, message: str) -> None:
    git(project, "init", "-q", "-b", "main")
    git(project, "config", "user.name", "Example")
    git(project, "config", "user.email", "example@example.org")
    git(project, "add", "-A")
    git(project, "commit", "-qm", message)


@contextlib.contextmanager
def temporary_place(name: str) -> Iterator[Path]:
    """Not in /tmp if there is another choice: a sandbox has a /tmp of its own, and only the project would be seen in there."""
    places = [os.path.expanduser("~/.cache"), "/var/tmp", tempfile.gettempdir()]
    parent = next(place for place in places if os.access(place, os.W_OK | os.X_OK))
    with tempfile.TemporaryDirectory(prefix=f"elsewhere-{name}-", dir=parent) as place:
        yield Path(place).resolve()


@contextlib.contextmanager
def own_state(state: Path) -> Iterator[None]:
    """Where sandboxes are kept meanwhile. They end with it, however that comes about, and so does our launcher."""
    state.mkdir()
    before = os.environ.get("ELSEWHERE_HOME")
    os.environ["ELSEWHERE_HOME"] = str(state)
    try:
        yield
    finally:
        for one in Sandbox.list():
            Sandbox.get(one.id, on_exit="discard").remove()
        stop_launcher(state)
        os.environ.pop("ELSEWHERE_HOME")
        if before is not None:
            os.environ["ELSEWHERE_HOME"] = before


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
            raise AssertionError(f"not everything that was started is gone: {left}")
        time.sleep(0.02)


def processes() -> Iterator[tuple[list[bytes], list[bytes]]]:
    """The arguments and the environment of every other process of the machine that may be looked at."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                yield (entry / "cmdline").read_bytes().split(b"\0"), (entry / "environ").read_bytes().split(b"\0")


def write(project: Path, files: Mapping[str, str]) -> None:
    """Scripts can be executed."""
    for name, text in files.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        if name.endswith(".sh"):
            path.chmod(0o755)


def git(project: Path, *words: str) -> str:
    """What git says; nobody's own configuration counts."""
    own = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(["git", *words], cwd=project, env=own, check=True, stdout=subprocess.PIPE, text=True).stdout


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
