"""A base survives what goes wrong while it is captured: races, kills, a full disk, another capture."""

import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elsewhere.errors import StateError
from elsewhere.linux import syscalls
from elsewhere.storage import capturing, scanning
from elsewhere.storage.bases import Base, capture
from elsewhere.storage.rooms import room_for
from elsewhere.storage.state import State

SOURCE = Path(__file__).resolve().parents[2] / "src"


def later() -> float:
    return time.time() + 60


@pytest.fixture
def state(place: Path) -> State:
    return State.open(str(place / "state"))


@pytest.fixture
def project(place: Path) -> Path:
    (place / "project/sub/deep").mkdir(parents=True)
    (place / "project/one").write_text("1")
    (place / "project/sub/two").write_text("22")
    (place / "project/sub/deep/three").write_text("333")
    return place / "project"


def next_tick() -> None:
    """Kernels before 6.13 stamp files by the tick only: what the lying clock calls old must really differ from what comes next."""
    for _ in range(2):
        now = time.clock_gettime_ns(5)  # CLOCK_REALTIME_COARSE
        while time.clock_gettime_ns(5) == now:
            pass


def take(state: State, project: Path, **options: Any) -> Base:
    base = capture(state, str(project), **{"clock": later, **options})
    next_tick()
    return base


def shown(layers: tuple[str, ...]) -> dict[str, str]:
    """The layers as an overlay shows them, for the plain trees of these tests."""
    found: dict[str, str] = {}
    for layer in reversed(layers):
        for here, directories, names in os.walk(layer):
            for name in [*directories, *names]:
                path = os.path.join(here, name)
                relative = os.path.relpath(path, layer)
                mode = os.lstat(path).st_mode
                if not stat.S_ISDIR(mode):
                    found = {known: value for known, value in found.items() if not f"{known}/".startswith(f"{relative}/")}
                if stat.S_ISDIR(mode):
                    found.setdefault(relative, "/")
                elif stat.S_ISLNK(mode):
                    found[relative] = "-> " + os.readlink(path)
                elif stat.S_ISREG(mode):
                    found[relative] = Path(path).read_text()
    return found


def when_opened(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object], *, times: int = 1) -> None:
    """`act` at the moment at which the entry `name` is opened to be copied."""
    true, left = os.open, [times]

    def racing(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = true(path, flags, mode, dir_fd=dir_fd)
        if path == name and dir_fd is not None and left[0]:
            left[0] -= 1
            act()
        return fd

    monkeypatch.setattr(os, "open", racing)


def when_reached(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """`act` between scan and copy."""
    true = scanning.differences

    def racing(old: Any, new: Any) -> Any:
        found = true(old, new)
        if found:
            act()
        return found

    monkeypatch.setattr(scanning, "differences", racing)


def test_a_file_that_changes_while_it_is_copied_is_copied_again(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, left = capturing.Capture._copy_content, [2]

    def writing(self: Any, reader: int, writer: int, about: os.stat_result) -> bool:
        done = true(self, reader, writer, about)
        if left[0] and about.st_ino == (project / "one").stat().st_ino:
            left[0] -= 1
            (project / "one").write_text("x" * (9 - left[0]))
        return done

    monkeypatch.setattr(capturing.Capture, "_copy_content", writing)
    base = take(state, project)
    assert (base.unsettled, (Path(base.layers[0]) / "one").read_text()) == ((), "x" * 9)
    assert (base.copied_files, base.bytes) == (3, 9 + 5)
    assert take(state, project).copied_files == 0


def test_a_file_that_never_holds_still_is_named_and_captured_next_time(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = capturing.Capture._copy_content

    def writing(self: Any, reader: int, writer: int, about: os.stat_result) -> bool:
        done = true(self, reader, writer, about)
        if about.st_ino == (project / "one").stat().st_ino:
            with open(project / "one", "a") as stream:
                stream.write("more")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(capturing.Capture, "_copy_content", writing)
        assert take(state, project).unsettled == ("one",)
    base = take(state, project)
    assert (base.unsettled, base.copied_files) == ((), 1)
    assert shown(base.layers)["one"] == (project / "one").read_text()


@pytest.mark.parametrize("first", [True, False], ids=["first capture", "later capture"])
@pytest.mark.parametrize("name", ["one", "sub/deep/three", "sub"])
def test_what_vanishes_between_scan_and_copy_is_absent(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: bool
) -> None:
    if not first:
        take(state, project)
        for path in ("one", "sub/two", "sub/deep/three"):
            (project / path).write_text("changed")

    def vanish() -> None:
        if (project / name).is_dir():
            shutil.rmtree(project / name)
        else:
            (project / name).unlink()

    with monkeypatch.context() as patch:
        when_reached(patch, vanish)
        base = take(state, project)
    expected = shown((str(project),))
    assert shown(base.layers) == expected
    assert (base.unsettled, base.left_out) == ((), {})
    assert base.files == sum(1 for path in project.rglob("*") if path.is_file())
    assert shown(take(state, project).layers) == expected


@pytest.mark.parametrize("first", [True, False], ids=["first capture", "later capture"])
def test_a_directory_that_becomes_a_link_is_never_followed(
    state: State, project: Path, place: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    (place / "outside/deep").mkdir(parents=True)
    (place / "outside/two").write_text("secret")
    (place / "outside/deep/three").write_text("secret")
    if not first:
        take(state, project)
        (project / "sub/two").write_text("changed")
        (project / "sub/deep/three").write_text("changed")

    def replace() -> None:
        (project / "sub").rename(place / "away")
        (project / "sub").symlink_to(place / "outside")

    with monkeypatch.context() as patch:
        when_reached(patch, replace)
        base = take(state, project)
    assert "secret" not in shown(base.layers).values()
    assert "sub" in base.unsettled
    assert shown(take(state, project).layers) == shown((str(project),))


@pytest.mark.parametrize("becomes", ["link", "directory", "fifo", "other file"])
def test_a_file_that_becomes_something_else_is_never_read_through(
    state: State, project: Path, place: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    (place / "secret").write_text("secret")

    def replace() -> None:
        (project / "one").unlink()
        if becomes == "link":
            (project / "one").symlink_to(place / "secret")
        elif becomes == "directory":
            (project / "one").mkdir()
        elif becomes == "fifo":
            os.mkfifo(project / "one")
        else:
            (project / "one").write_text("other")

    with monkeypatch.context() as patch:
        when_reached(patch, replace)
        base = take(state, project)
    assert "secret" not in shown(base.layers).values()
    assert (becomes == "directory") == ("one" in base.unsettled)
    assert shown(take(state, project).layers) == shown((str(project),))


def test_a_file_that_is_replaced_while_it_is_copied_is_captured_next_time(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace() -> None:
        (project / "new").write_text("new")
        os.rename(project / "new", project / "one")

    with monkeypatch.context() as patch:
        when_opened(patch, "one", replace)
        base = take(state, project)
    assert shown(base.layers)["one"] in ("1", "new")
    assert shown(take(state, project).layers) == shown((str(project),))


def test_a_name_of_a_linked_file_that_changes_in_between_is_not_linked_to_the_old_content(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.link(project / "one", project / "sub/uno")
    true, left = capturing.Capture._copy_file, [1]

    def writing(self: Any, *arguments: Any) -> Any:
        done = true(self, *arguments)
        if left[0] and arguments[1] in ("one", "uno"):
            left[0] = 0
            (project / "one").write_text("changed")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(capturing.Capture, "_copy_file", writing)
        first = take(state, project)
    assert sorted(shown(first.layers)[name] for name in ("one", "sub/uno")) == ["1", "changed"]
    base = take(state, project)
    assert shown(base.layers) == shown((str(project),))
    assert (Path(base.layers[0]) / "one").stat().st_ino == (Path(base.layers[0]) / "sub/uno").stat().st_ino


def test_a_file_that_cannot_be_read_is_named_every_time_and_no_layer_is_made_for_it(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = os.open

    def closed(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "two" and dir_fd is not None:
            raise PermissionError(errno.EACCES, "Permission denied")
        return true(path, flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", closed)
        for _ in range(3):
            base = take(state, project)
            assert base.left_out == {"sub/two": "unreadable"}
            assert len(base.layers) == 1
        assert "sub/two" not in shown(base.layers)
        (project / "sub/two").write_text("changed")
        assert take(state, project).left_out == {"sub/two": "unreadable"}
    (project / "sub/two").chmod(0o600)
    base = take(state, project)
    assert base.left_out == {}
    assert shown(base.layers) == shown((str(project),))


def test_a_file_that_was_captured_and_cannot_be_read_any_more_does_not_show_its_old_content(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(state, project)
    (project / "one").write_text("secret now")
    true = os.open

    def closed(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "one" and dir_fd is not None:
            raise PermissionError(errno.EACCES, "Permission denied")
        return true(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", closed)
    base = take(state, project)
    assert base.left_out == {"one": "unreadable"}
    assert "one" not in shown(base.layers)


def test_an_ordinary_user_gets_what_can_be_read_and_the_names_of_the_rest(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("root lends the files that cannot be read")
    place.chmod(0o755)
    (place / "project").mkdir(0o755)
    for name, mode in {"secret": 0o600, "open": 0o644, "setuid": 0o6755, "group": 0o640}.items():
        (place / "project" / name).write_text(name)
        (place / "project" / name).chmod(mode)
    (place / "project/closed").mkdir(0o700)
    (place / "project/closed/inside").touch()
    os.chown(place / "project/group", 0, 4242)
    (place / "home").mkdir()
    os.chown(place / "home", 4242, 4242)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(4242, 4242, 4242)
            os.setresuid(4242, 4242, 4242)
            state = State.open(str(place / "home/state"))
            base = take(state, place / "project")
            assert base.left_out == {"secret": "unreadable", "closed": "unreadable"}, base
            layer = Path(base.layers[0])
            assert sorted(path.name for path in layer.rglob("*")) == ["group", "open", "setuid"]
            assert stat.S_IMODE((layer / "setuid").stat().st_mode) == 0o755
            assert (layer / "group").stat().st_gid == 4242
            again = take(state, place / "project")
            assert (again.layers, again.left_out) == (base.layers, base.left_out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_ordinary_user_can_capture_prune_and_capture_again_what_may_not_be_written(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("root becomes an ordinary user here")
    os.chown(place, 4242, 4242)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(4242, 4242, 4242)
            os.setresuid(4242, 4242, 4242)
            state = State.open(str(place / "state"))
            project = place / "project"
            (project / "sub").mkdir(parents=True)
            for number in range(12):
                for path in (project, project / "sub"):
                    path.chmod(0o755)
                (project / "sub/file").write_text(str(number))
                for path in (project / "sub", project):
                    path.chmod(0o555)
                base = take(state, project)
                assert shown(base.layers) == {"sub": "/", "sub/file": str(number)}
            assert len(base.layers) < 9
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def change(project: Path, number: int) -> None:
    (project / "one").write_text(str(number))
    (project / f"new{number}").write_text("x")
    shutil.rmtree(project / "sub", ignore_errors=True)
    (project / "sub").mkdir()
    (project / f"sub/{number}").write_text(str(number))
    if number:
        (project / f"new{number - 1}").unlink(missing_ok=True)


def killed_at(state: State, project: Path, point: int) -> bool:
    """Capture in a process that is killed at its `point`-th call of the system; whether it got that far."""
    child = os.fork()
    if child == 0:
        count = [0]

        def deadly(true: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                count[0] += 1
                if count[0] == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return true(*arguments, **options)

            return call

        for name in ("rename", "mkdir", "mknod", "link", "unlink", "open", "write", "chmod", "utime", "close"):
            setattr(os, name, deadly(getattr(os, name)))
        try:
            take(state, project)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param(0, id="first capture"),
        pytest.param(1, id="delta", marks=pytest.mark.slow),
        pytest.param(8, id="merger", marks=pytest.mark.slow),
    ],
)
def test_a_capture_that_is_killed_at_any_point_leaves_a_base_that_is_right(
    state: State, project: Path, deltas: int, place: Path
) -> None:
    for number in range(deltas and deltas + 1):
        change(project, number)
        take(state, project)
    before = shown(take(state, project).layers) if deltas else {}
    change(project, 100)
    subprocess.run(["cp", "-a", state.path, place / "pristine"], check=True)
    point = 0
    while True:
        point += 1
        if point > 1:
            shutil.rmtree(state.path)
            subprocess.run(["cp", "-a", place / "pristine", state.path], check=True)
        if not killed_at(state, project, point):
            break
        room = room_for(state, str(project))
        record = Path(room.inside("base.json"))
        if record.exists():
            layers = tuple(room.layer(number) for number in json.loads(record.read_text())["layers"])
            assert shown(layers) in (before, shown((str(project),)))
        base = take(state, project)
        assert shown(base.layers) == shown((str(project),))
        assert os.listdir(room.inside("building")) == []
        assert len([name for name in os.listdir(room.path) if name.startswith("scan.")]) == 1
    assert point > 30


def test_captures_at_once_by_threads_and_processes_agree(state: State, project: Path) -> None:
    program = (
        "import sys, time\n"
        "from elsewhere.storage.bases import capture\n"
        "from elsewhere.storage.state import State\n"
        "for _ in range(10):\n"
        "    base = capture(State.open(sys.argv[1]), sys.argv[2])\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, state.path, project], env={**os.environ, "PYTHONPATH": str(SOURCE)})
        for _ in range(3)
    ]
    failures: list[BaseException] = []

    def several() -> None:
        try:
            for _ in range(10):
                capture(state, str(project))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=several) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(30):
        change(project, number)
    for thread in threads:
        thread.join()
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert failures == []
    assert shown(take(state, project).layers) == shown((str(project),))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "write", "symlink", "link", "rename"])
def test_a_full_disk_is_said_clearly_and_leaves_nothing_half_made(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    first = take(state, project)
    (project / "sub/two").write_text("changed")
    (project / "link").symlink_to("one")
    (project / "new").mkdir()
    os.link(project / "sub/two", project / "zwei")
    true = getattr(os, call)

    def full(*arguments: Any, **options: Any) -> Any:
        if call != "rename" or "trash" not in str(arguments[1]):
            raise OSError(code, os.strerror(code))
        return true(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StateError) as caught:
            take(state, project)
    assert caught.value.code == "no_room"
    assert caught.value.hint
    room = room_for(state, str(project))
    assert os.listdir(room.inside("building")) == []
    assert os.listdir(room.inside("layers")) == ["0"]
    base = take(state, project)
    assert base.layers[1:] == first.layers
    assert shown(base.layers) == shown((str(project),))


def test_a_layer_whose_record_cannot_be_written_is_taken_back(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(state, project)
    (project / "one").write_text("changed")
    true = os.rename

    def full(source: str, target: str, **options: Any) -> None:
        if target.endswith("base.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        true(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(StateError, match="No space left"):
            take(state, project)
    assert os.listdir(room_for(state, str(project)).inside("layers")) == ["0"]
    assert shown(take(state, project).layers) == shown((str(project),))


def test_a_file_larger_than_the_limit_is_no_room(state: State, project: Path) -> None:
    (project / "large").write_bytes(bytes(3 << 20))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            take(state, project)
        except StateError as error:
            code = 0 if error.code == "no_room" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (Path(take(state, project).layers[0]) / "large").stat().st_size == 3 << 20


def test_a_disk_that_is_really_full_is_no_room_and_afterwards_all_is_well(project: Path, place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    for number in range(20):
        (project / f"large{number}").write_bytes(os.urandom(200_000))
    (place / "disk").mkdir()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            syscalls.mount("tmpfs", str(place / "disk"), "tmpfs", 0, "size=2m")
            state = State.open(str(place / "disk/state"))
            for _ in range(2):
                with pytest.raises(StateError, match="No space left"):
                    take(state, project)
                room = room_for(state, str(project))
                assert os.listdir(room.inside("building")) == os.listdir(room.inside("layers")) == []
                assert os.listdir(state.room("trash"))
            for number in range(5, 20):
                (project / f"large{number}").unlink()
            shutil.rmtree(state.room("trash"))
            os.mkdir(state.room("trash"))
            base = take(state, project)
            assert sorted(os.listdir(base.layers[0])) == sorted(os.listdir(project))
            assert (Path(base.layers[0]) / "large4").read_bytes() == (project / "large4").read_bytes()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_tree_whose_copy_would_be_deeper_than_a_path_may_be_is_named(state: State, project: Path) -> None:
    path = str(project)
    while len(path) < 4060:
        path += "/" + "d" * 100 if len(path) < 3950 else "/d"
        os.mkdir(path)
    base = take(state, project)
    assert set(base.left_out.values()) == {"path too long"}
    assert base.files == 3
    assert take(state, project).left_out == base.left_out


def test_an_interrupt_leaves_nothing_half_made(state: State, project: Path) -> None:
    for number in range(600):
        (project / f"f{number}").touch()

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(state, project, tell=interrupted)
    assert os.listdir(room_for(state, str(project)).inside("building")) == []
    assert take(state, project).files == 603
