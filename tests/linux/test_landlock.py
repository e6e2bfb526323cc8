"""Landlock beside the namespaces: nobody outside is reached, and nothing is written that was not meant to be. In real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elsewhere.linux import landlock

SOURCE = Path(landlock.__file__).parents[2]

HARNESS = """
import errno, json, os, signal, socket, sys
from elsewhere.linux import landlock

def tried(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

def opened(path, flags):
    os.close(os.open(path, flags))

def tell(**what):
    print(json.dumps(what), flush=True)
"""


def needs(version: int) -> None:
    try:
        found = landlock.abi()
    except OSError as error:
        pytest.skip(f"no Landlock here: {error.strerror}")
    if found < version:
        pytest.skip(f"Landlock {found} is too old: {version} is needed")


def run(code: str, *arguments: object, **more: Any) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", HARNESS + code, *map(str, arguments)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


SCOPE = """
outside, name, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def connect(address):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(address)

def look():
    inside = os.fork()
    if inside == 0:
        signal.pause()
    with socket.socket(socket.AF_UNIX) as own:
        own.bind("\\0" + name + "-own-" + str(os.getpid()))
        own.listen()
        own_socket = tried(connect, own.getsockname())
    own_process = tried(os.kill, inside, 0)
    os.kill(inside, signal.SIGKILL)
    os.waitpid(inside, 0)
    return {
        "signal": tried(os.kill, outside, 0), "abstract": tried(connect, "\\0" + name), "path": tried(connect, place + "/socket"),
        "own process": own_process, "own socket": own_socket,
    }

def files(directory):
    def work():
        os.makedirs(directory + "/a/b")
        with open(directory + "/a/b/file", "w") as stream:
            stream.write("x")
        os.rename(directory + "/a/b/file", directory + "/file")
        os.link(directory + "/file", directory + "/a/link")
        os.truncate(directory + "/file", 0)
        os.mkfifo(directory + "/fifo")
        opened(directory + "/fifo", os.O_RDWR)
        opened("/dev/null", os.O_RDWR)
    return tried(work)

tell(**look(), files=files(place + "/before"))
tell(scoped=landlock.scope())
tell(**look(), files=files(place + "/after"))
"""


def test_a_scoped_process_reaches_nobody_outside_and_all_files_as_before(tmp_path: Path) -> None:
    needs(6)
    name = f"elsewhere-{os.getpid()}"
    with (
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as path,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        abstract.bind("\0" + name)
        abstract.listen()
        path.bind(str(tmp_path / "socket"))
        path.listen()
        try:
            before, scoped, after = run(SCOPE, other.pid, name, tmp_path)
        finally:
            other.send_signal(signal.SIGKILL)
    assert set(before.values()) == {"done"}
    assert scoped == {"scoped": True}
    assert after == {**before, "signal": "EPERM", "abstract": "EPERM"}


KEEP = """
listed, other = sys.argv[1:]

def inside(directory):
    def new():
        with open(directory + "/new", "w") as stream:
            stream.write("x")
    return {
        "fifo": tried(opened, directory + "/fifo", os.O_WRONLY | os.O_NONBLOCK),
        "fifo both ways": tried(opened, directory + "/fifo", os.O_RDWR | os.O_NONBLOCK),
        "read": tried(opened, directory + "/file", os.O_RDONLY),
        "read fifo": tried(opened, directory + "/fifo", os.O_RDONLY | os.O_NONBLOCK),
        "write": tried(opened, directory + "/file", os.O_WRONLY),
        "append": tried(opened, directory + "/file", os.O_WRONLY | os.O_APPEND),
        "new": tried(new),
        "list": tried(os.listdir, directory),
        "run": tried(os.posix_spawn, "/bin/true", ["true"], {}),
        "null": tried(opened, "/dev/null", os.O_RDWR),
        "zero": tried(opened, "/dev/zero", os.O_RDWR),
        "pipe": tried(opened, f"/proc/self/fd/{pipe}", os.O_WRONLY),
    }

_, pipe = os.pipe()
holders = [os.open(place + "/fifo", os.O_RDONLY | os.O_NONBLOCK) for place in (listed, other)]  # else nobody can open it to write
tell(**inside(other))
os.unlink(other + "/new")
landlock.keep_from_writing_elsewhere([listed, "/dev/null", "/nonexistent"])
tell(**inside(other))
tell(**inside(listed))
os.mkdir(listed + "/one")
os.mkdir(listed + "/two")
opened(listed + "/one/file", os.O_CREAT | os.O_WRONLY)
tell(
    rename=tried(os.rename, listed + "/one/file", listed + "/two/file"),
    link=tried(os.link, listed + "/two/file", listed + "/one/link"),
    directory=tried(os.rename, listed + "/two", listed + "/one/two"),
    symlink=tried(os.symlink, other + "/fifo", listed + "/way"),
    by_symlink=tried(opened, listed + "/way", os.O_WRONLY | os.O_NONBLOCK),
    by_link=tried(os.link, other + "/fifo", listed + "/taken"),
    by_rename=tried(os.rename, other + "/fifo", listed + "/taken"),
)
"""


def test_only_what_lies_beneath_the_list_can_be_opened_for_writing(tmp_path: Path) -> None:
    needs(2)
    for name in ("listed", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
        os.mkfifo(tmp_path / name / "fifo")
    before, other, listed, moves = run(KEEP, tmp_path / "listed", tmp_path / "other")
    assert set(before.values()) == {"done"}
    refused = dict.fromkeys(("fifo", "fifo both ways", "write", "append", "new", "zero"), "EACCES")
    assert other == {**before, **refused}
    assert listed == {**before, "zero": "EACCES"}
    ways_around = {name: moves.pop(name) for name in ("by_symlink", "by_link", "by_rename")}
    assert set(moves.values()) == {"done"}
    assert ways_around == {"by_symlink": "EACCES", "by_link": "EXDEV", "by_rename": "EXDEV"}
    assert (tmp_path / "other" / "fifo").exists()


def test_a_file_that_was_handed_in_can_be_written_but_not_opened_again(tmp_path: Path) -> None:
    """What this costs; a pipe or a terminal of the sandbox can be opened again."""
    needs(2)
    (tmp_path / "listed").mkdir()
    with (tmp_path / "handed").open("w") as handed:
        (told,) = run(
            """
fd = int(sys.argv[2])
before = tried(opened, f"/proc/self/fd/{fd}", os.O_WRONLY)
landlock.keep_from_writing_elsewhere([sys.argv[1]])
tell(before=before, written=os.write(fd, b"word"), again=tried(opened, f"/proc/self/fd/{fd}", os.O_WRONLY))
""",
            tmp_path / "listed",
            handed.fileno(),
            pass_fds=[handed.fileno()],
        )
    assert told == {"before": "done", "written": 4, "again": "EACCES"}
    assert (tmp_path / "handed").read_text() == "word"


@pytest.mark.parametrize("spoken", [None, 1])
def test_older_kernels_are_told_apart_and_nothing_is_restricted(monkeypatch: pytest.MonkeyPatch, spoken: int | None) -> None:
    def kernel(attributes: bytes | None, flags: int = 0) -> int:
        assert attributes is None, "a ruleset was made"
        if spoken is None:
            raise OSError(95, "landlock_create_ruleset")
        return spoken

    monkeypatch.setattr(landlock.syscalls, "landlock_create_ruleset", kernel)
    assert landlock.scope() is False
    landlock.keep_from_writing_elsewhere(["/tmp"])


def test_a_single_file_can_be_in_the_rules_with_all_rights(tmp_path: Path) -> None:
    """Rights that only directories have are an error of the kernel's for a file."""
    needs(2)
    (tmp_path / "file").write_text("x")
    (told,) = run(
        """
landlock.restrict([(sys.argv[1] + "/file", landlock.WRITE)])
tell(file=tried(opened, sys.argv[1] + "/file", os.O_RDWR), beside=tried(opened, sys.argv[1] + "/other", os.O_CREAT | os.O_RDWR))
""",
        tmp_path,
    )
    assert told == {"file": "done", "beside": "EACCES"}
