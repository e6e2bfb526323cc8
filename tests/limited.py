"""Shared by tests of limits: programs that use things up, what this host holds, and the proof that nothing of it is left.

A limit that this host cannot hold for somebody is refused unless `--best-effort` is said; `limit` says it where it has to be said,
so that the same test proves the group of one person and the watchdog of another.
"""

import contextlib
import os
import signal
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import Person, eventually, host_mounts

__all__ = ["HOG", "MEMORY", "archived", "groups_of", "held", "hog", "launchers", "leaves_nothing", "limit", "loops_of", "start"]

MEMORY = 64 << 20
HOG = "import time; held = bytearray(b'x') * ({size} << 20); time.sleep({seconds})"
_TRIED = {"memory": "64M", "cpus": "1", "pids": "64", "disk": "20M"}
_HELD: dict[str, frozenset[str]] = {}


def hog(person: Person, size: int = 200, seconds: int = 30) -> list[str]:
    """A process that takes so many MiB and keeps them."""
    return [person.python, "-I", "-S", "-c", HOG.format(size=size, seconds=seconds)]


def held(person: Person) -> frozenset[str]:
    """The limits that this host really holds for such a person, as a sandbox of theirs says."""
    if person.name not in _HELD:
        options = [word for name, value in _TRIED.items() for word in (f"--{name}", value)]
        enforced = person.json("run", "--best-effort", *options, "--", "true")["sandbox"]["enforced"]["limits"]
        assert set(_TRIED) <= set(enforced), enforced
        _HELD[person.name] = frozenset(name for name in _TRIED if not enforced[name].startswith("not enforced"))
    return _HELD[person.name]


def limit(person: Person, **wanted: str) -> list[str]:
    """The options for these limits."""
    options = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", value)]
    return options if {name for name in wanted if name in _TRIED} <= held(person) else [*options, "--best-effort"]


def start(person: Person, *arguments: str, **more: Any) -> "subprocess.Popen[str]":
    """The command, not waited for."""
    return subprocess.Popen(
        person.command(*arguments),
        cwd=person.project,
        env=person.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **person.identity(),
        **more,
    )


# -- what must be gone ---


def launchers(person: Person) -> list[int]:
    return [pid for pid, words in person.processes() if "elsewhere.cli.launch" in words]


def groups_of(person: Person) -> list[str]:
    """Groups of the kernel's that this person's launchers made, wherever they lie: the name says of which state directory."""
    mark = f"{zlib.crc32(os.fsencode(person.state)):08x}-"
    return [str(place / name) for place in _parents(Path("/sys/fs/cgroup")) for name in listed(place) if name.startswith(mark)]


def listed(place: Path) -> list[str]:
    """Empty if it is gone: others' come and go."""
    try:
        return os.listdir(place)
    except OSError:
        return []


def _parents(top: Path) -> Iterator[Path]:
    for directory, names, _ in os.walk(top):
        if "elsewhere" in names:
            yield Path(directory, "elsewhere")
            names.remove("elsewhere")


def loops_of(person: Person) -> list[str]:
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = path.read_text()
        except OSError:
            continue
        if str(person.state) in backing:
            found.append(f"{path.parent.parent.name}: {backing.strip()}")
    return found


def archived(person: Person) -> list[str]:
    place = person.state / "archive"
    return sorted(listed(place))


def leaves_nothing(person: Person) -> None:
    """Everything that this person has is removed; then there is no process, group, loop device, mount, claim or sandbox of it."""
    person.elsewhere("rm", "--all", "--force", cwd="/")
    listing = person.json("list", cwd="/")
    assert (listing["sandboxes"], listing["waiting"]) == ([], [])
    assert set(listed(person.state / "claims")) <= {"lock"}
    if person.shared:  # the launcher stays for the next one; at the end of the module all of it must be gone
        assert eventually(lambda: not person.commands()), person.commands()
        return
    person.stop_launcher()
    if not eventually(lambda: not launchers(person), 0.3):
        for pid in launchers(person):  # one that was started in other namespaces cannot be reached from here
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    assert eventually(lambda: not person.processes()), person.processes()
    assert eventually(lambda: not groups_of(person)), groups_of(person)
    assert eventually(lambda: not loops_of(person)), loops_of(person)
    assert not [line for line in host_mounts() if str(person.place) in line]
