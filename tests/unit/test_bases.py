"""A pinned base looks exactly like the project at the moment of its capture, whatever happened since the last one."""

import contextlib
import json
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elsewhere.errors import UsageError
from elsewhere.linux import syscalls
from elsewhere.storage import bases, scanning
from elsewhere.storage.bases import Base, capture, estimate, prune, unused_layers
from elsewhere.storage.capturing import Progress
from elsewhere.storage.rooms import room_for
from elsewhere.storage.state import State

MIB = 1 << 20
SHIFT = 1 << 30


def later() -> float:
    """A clock by which everything on disk is old enough to be trusted."""
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


def manifest(top: str) -> dict[str, object]:
    """Everything that a program can find out about a tree."""
    found: dict[str, object] = {}
    groups: dict[int, list[str]] = {}
    waiting = [""]
    while waiting:
        path = waiting.pop()
        with os.scandir(os.path.join(top, path)) as entries:
            children = [os.path.join(path, entry.name) for entry in entries]
        for child in [*children, *([""] if not path else [])]:
            place = os.path.join(top, child)
            about = os.lstat(place)
            content: object = None
            if stat.S_ISDIR(about.st_mode):
                if child:
                    waiting.append(child)
            elif stat.S_ISLNK(about.st_mode):
                content = os.readlink(place)
            elif stat.S_ISREG(about.st_mode):
                content = Path(place).read_bytes().hex()
                groups.setdefault(about.st_ino, []).append(child)
            attributes = {
                name: os.getxattr(place, name, follow_symlinks=False).hex()
                for name in os.listxattr(place, follow_symlinks=False)
                if not name.startswith("trusted.overlay.")
            }
            found[child] = [about.st_mode, about.st_uid, about.st_gid, about.st_mtime_ns, content, attributes]
    return {"entries": found, "groups": sorted(sorted(names) for names in groups.values() if len(names) > 1)}


def mounted(layers: tuple[str, ...], empty: Path) -> dict[str, object]:
    """What a sandbox would see: the layers under a real overlay, mounted where nobody else sees it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount an overlay without a user namespace")
    for name in ("lower", "here"):
        (empty / name).mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            lowers = ":".join([*layers, str(empty / "lower")])
            syscalls.mount("overlay", str(empty / "here"), "overlay", 0, f"lowerdir={lowers},xino=off,redirect_dir=on")
            with open(writer, "w") as stream:
                json.dump(manifest(str(empty / "here")), stream)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text)  # type: ignore[no-any-return]


def check(state: State, project: Path, place: Path, **options: Any) -> Base:
    base = take(state, project, **options)
    assert mounted(base.layers, place / "empty") == json.loads(json.dumps(manifest(str(project))))
    return base


def test_the_first_capture_is_a_true_copy(state: State, project: Path, place: Path) -> None:
    base = take(state, project)
    assert manifest(base.layers[0]) == manifest(str(project))
    assert (base.files, base.bytes, base.copied_files, base.copied_bytes) == (3, 6, 3, 6)
    assert (base.unsettled, base.left_out, base.shut, base.strategy in ("copy", "reflink")) == ((), {}, (), True)
    assert base.layers == (room_for(state, str(project)).layer("0"),)


def test_nothing_changed_means_no_new_layer_and_nothing_written(state: State, project: Path) -> None:
    first = take(state, project)
    room = room_for(state, str(project)).path
    before = {path: path.stat().st_mtime_ns for path in Path(room).rglob("*")}
    second = take(state, project)
    assert second.layers == first.layers
    assert (second.copied_files, second.files, second.bytes) == (0, 3, 6)
    assert {path: path.stat().st_mtime_ns for path in Path(room).rglob("*")} == before


def test_a_later_capture_copies_only_what_changed(state: State, project: Path, place: Path) -> None:
    first = take(state, project)
    (project / "sub/two").write_text("changed")
    second = check(state, project, place)
    assert second.layers[1:] == first.layers
    assert (second.copied_files, second.copied_bytes, second.files) == (1, 7, 3)
    names = sorted(str(path.relative_to(second.layers[0])) for path in Path(second.layers[0]).rglob("*"))
    assert names == ["sub", "sub/two"]


def test_a_layer_never_changes_once_it_was_given_out(state: State, project: Path) -> None:
    first = take(state, project)
    before = manifest(first.layers[0])
    (project / "one").write_text("changed")
    (project / "sub/two").unlink()
    take(state, project)
    assert manifest(first.layers[0]) == before


def swap_directory_and_file(project: Path) -> None:
    shutil.rmtree(project / "sub")
    (project / "sub").write_text("now a file")
    (project / "one").unlink()
    (project / "one").mkdir()
    (project / "one/inside").touch()


def replace_directory(project: Path) -> None:
    shutil.rmtree(project / "sub")
    (project / "sub").mkdir()
    (project / "sub/new").write_text("x")


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda p: (p / "one").write_text("other"),
    "empty": lambda p: (p / "one").write_text(""),
    "new file": lambda p: (p / "sub/deep/new").write_text("x"),
    "new empty directory": lambda p: (p / "sub/empty").mkdir(),
    "deleted file": lambda p: (p / "sub/two").unlink(),
    "deleted directory": lambda p: shutil.rmtree(p / "sub"),
    "emptied directory": lambda p: [path.unlink() for path in (p / "sub/deep").iterdir()],
    "renamed file": lambda p: (p / "one").rename(p / "sub/renamed"),
    "renamed directory": lambda p: (p / "sub/deep").rename(p / "elsewhere"),
    "directory replaced by another": replace_directory,
    "kinds swapped": swap_directory_and_file,
    "file to link": lambda p: ((p / "one").unlink(), (p / "one").symlink_to("sub")),
    "mode of a file": lambda p: (p / "one").chmod(0o4750),
    "mode of a directory": lambda p: (p / "sub").chmod(0o1777),
    "mode of the project": lambda p: p.chmod(0o2750),
    "time of a file": lambda p: os.utime(p / "one", ns=(5, 1_234_567_890_123_456_789)),
    "time of a directory": lambda p: os.utime(p / "sub/deep", ns=(5, 7)),
    "owner": lambda p: os.chown(p / "sub/two", 1234, 5678),
    "attribute": lambda p: os.setxattr(p / "sub", "user.note", b"\0x"),
    "hard link": lambda p: os.link(p / "one", p / "sub/link"),
    "dangling link": lambda p: (p / "dangling").symlink_to("/nowhere"),
    "fifo": lambda p: os.mkfifo(p / "fifo"),
    "odd names": lambda p: [
        (p / os.fsdecode(name)).write_text("x") for name in (b"\xff\xfe", b"new\nline", b" ", b"y" * 255, b"-rf")
    ],
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_captured_as_an_overlay_shows_it(state: State, project: Path, place: Path, name: str) -> None:
    if name == "owner" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    take(state, project)
    CHANGES[name](project)
    check(state, project, place)
    assert take(state, project).copied_files == 0


def test_changes_can_be_undone_and_done_again(state: State, project: Path, place: Path) -> None:
    for _ in range(2):
        check(state, project, place)
        shutil.rmtree(project / "sub")
        check(state, project, place)
        (project / "sub").mkdir()
        (project / "sub/other").write_text("x")
        check(state, project, place)
        (project / "sub/deep").mkdir()
        (project / "sub/deep/three").write_text("again")
        check(state, project, place)


def test_random_work_is_followed_through_mergers(state: State, project: Path, place: Path) -> None:
    """Sixty captures of random work, each compared with reality under a real overlay."""
    chance = random.Random(7)
    names = [f"{a}{b}" for a in ("", "d0/", "d1/", "d0/e0/", "d1/e1/") for b in ("f0", "f1", "d0", "e0", "e1")]

    def work() -> None:
        path = project / chance.choice(names)
        kind = chance.randrange(8)
        with contextlib.suppress(OSError):
            if kind == 0:
                path.unlink()
            elif kind == 1:
                shutil.rmtree(path)
            elif kind == 2:
                path.mkdir(parents=True)
            elif kind == 3:
                path.symlink_to(chance.choice(names))
            elif kind == 4:
                path.rename(project / chance.choice(names))
            elif kind == 5:
                os.link(project / chance.choice(names), path)
            elif kind == 6:
                path.chmod(chance.choice([0o755, 0o700, 0o644]))
            else:
                path.write_text(str(chance.random()))

    most = 0
    for _ in range(60):
        for _ in range(chance.randrange(1, 12)):
            work()
        base = check(state, project, place)
        most = max(most, len(base.layers))
    assert most == 9


@pytest.mark.parametrize("change", ["one more name", "one name less", "content", "one name replaced"])
def test_a_group_of_hard_links_is_captured_together(state: State, project: Path, place: Path, change: str) -> None:
    os.link(project / "one", project / "sub/uno")
    os.link(project / "one", project / "sub/deep/un")
    check(state, project, place)
    if change == "one more name":
        os.link(project / "one", project / "eins")
    elif change == "one name less":
        (project / "sub/uno").unlink()
    elif change == "content":
        (project / "sub/deep/un").write_text("all of them")
    else:
        (project / "sub/uno").unlink()
        (project / "sub/uno").write_text("alone")
    base = check(state, project, place)
    assert base.copied_files == (2 if change == "one name replaced" else 1)


def test_holes_stay_holes(state: State, project: Path) -> None:
    with open(project / "sparse", "wb") as stream:
        stream.truncate(64 * MIB)
        stream.seek(32 * MIB)
        stream.write(b"data")
    if (project / "sparse").stat().st_blocks * 512 > MIB:
        pytest.skip("this file system has no holes")
    copy = Path(take(state, project).layers[0]) / "sparse"
    assert copy.stat().st_size == 64 * MIB
    assert copy.stat().st_blocks * 512 <= MIB
    with open(copy, "rb") as stream:
        stream.seek(32 * MIB)
        assert stream.read(8) == b"data" + bytes(4)


@pytest.mark.parametrize("size", [0, 1, 4097, MIB - 1, MIB, MIB + 1, 5 * MIB + 17])
def test_content_of_any_size_is_captured(state: State, project: Path, size: int) -> None:
    content = os.urandom(size)
    (project / "file").write_bytes(content)
    assert (Path(take(state, project).layers[0]) / "file").read_bytes() == content


def test_owners_are_shifted_everywhere(state: State, project: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(project / "one", 1000, 2000)
    (project / "one").chmod(0o6755)
    (project / "link").symlink_to("one")
    os.mkfifo(project / "fifo")
    base = Path(take(state, project, shift=SHIFT).layers[0])
    for name in ("", "sub", "sub/two", "link", "fifo"):
        assert ((base / name).lstat().st_uid, (base / name).lstat().st_gid) == (SHIFT, SHIFT)
    found = (base / "one").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (SHIFT + 1000, SHIFT + 2000, 0o6755)


def test_access_lists_are_shifted(state: State, project: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("setfacl"):
        pytest.skip("needs root and setfacl")
    done = subprocess.run(["setfacl", "-m", "u:1000:rw,g:2000:r", project / "one"], stderr=subprocess.PIPE)
    if done.returncode:
        pytest.skip("this file system has no access lists")
    subprocess.run(["setfacl", "-d", "-m", "u:1000:rwx", project / "sub"], check=True)
    base = Path(take(state, project, shift=SHIFT).layers[0])
    text = subprocess.run(["getfacl", "-np", base / "one"], capture_output=True, encoding="ascii", check=True).stdout
    assert f"user:{SHIFT + 1000}:rw-" in text
    assert f"group:{SHIFT + 2000}:r--" in text
    assert stat.S_IMODE((base / "one").stat().st_mode) == stat.S_IMODE((project / "one").stat().st_mode)
    text = subprocess.run(["getfacl", "-np", base / "sub"], capture_output=True, encoding="ascii", check=True).stdout
    assert f"default:user:{SHIFT + 1000}:rwx" in text
    plain = Path(take(state, project).layers[0])
    assert os.getxattr(plain / "one", "system.posix_acl_access") == os.getxattr(project / "one", "system.posix_acl_access")


def test_file_capabilities_count_in_the_shifted_namespace(state: State, project: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can set file capabilities")
    second = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
    third = struct.pack("<IIIIII", 0x03000001, 1 << 10, 0, 0, 0, 5000)
    os.setxattr(project / "one", "security.capability", second)
    os.setxattr(project / "sub/two", "security.capability", third)
    base = Path(take(state, project, shift=SHIFT).layers[0])
    assert os.getxattr(base / "one", "security.capability") == struct.pack("<IIIIII", 0x03000001, 1 << 10, 0, 0, 0, SHIFT)
    assert os.getxattr(base / "sub/two", "security.capability")[20:] == struct.pack("<I", SHIFT + 5000)
    plain = Path(take(state, project).layers[0])
    assert os.getxattr(plain / "one", "security.capability") == second


def test_marks_of_another_overlay_do_not_become_marks_of_the_base(state: State, project: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can set trusted attributes")
    os.setxattr(project / "sub", "trusted.overlay.opaque", b"y")
    os.setxattr(project / "sub", "trusted.other", b"kept")
    base = Path(take(state, project).layers[0])
    assert os.listxattr(base / "sub") == ["trusted.other"]


def test_another_shift_is_another_base(state: State, project: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    first = take(state, project)
    second = take(state, project, shift=SHIFT)
    assert len(second.layers) == 1
    assert second.layers != first.layers
    assert second.copied_files == 3
    assert take(state, project, shift=SHIFT).layers == second.layers


def test_live_directories_are_there_and_empty_and_may_change_their_mind(state: State, project: Path, place: Path) -> None:
    base = take(state, project, live=("sub/",))
    assert sorted(path.name for path in Path(base.layers[0]).rglob("*")) == ["one", "sub"]
    assert (base.shut, base.mounts, base.files) == (("sub",), (), 1)
    (project / "sub/new").touch()
    assert take(state, project, live=("sub",)).layers == base.layers
    check(state, project, place)
    base = take(state, project, live=("sub",))
    seen = mounted(base.layers, place / "empty")
    assert sorted(seen["entries"]) == ["", "one", "sub"]  # type: ignore[call-overload]


@pytest.mark.parametrize("path", ["/etc", "..", "../other", ".", "a/../.."])
def test_what_lies_outside_cannot_be_live(state: State, project: Path, path: str) -> None:
    with pytest.raises(UsageError) as caught:
        take(state, project, live=(path,))
    assert caught.value.code == "bad_live_path"


def test_our_own_state_is_not_in_a_base(project: Path) -> None:
    state = State.open(str(project / "sub/state"))
    base = take(state, project)
    assert not (Path(base.layers[0]) / "sub/state").exists()
    assert take(state, project).files == 3


def test_sockets_and_devices_are_left_out_and_named_every_time(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    expected = {"socket": "socket"}
    with contextlib.suppress(PermissionError):
        os.mknod(project / "sub/device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        expected["sub/device"] = "device"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for _ in range(2):
            base = take(state, project)
            assert base.left_out == expected
    assert not (Path(base.layers[0]) / "socket").exists()
    assert len(base.layers) == 1


def test_nested_mounts_are_empty_directories_and_named(state: State, project: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    (project / "mount").mkdir()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            syscalls.mount("tmpfs", str(project / "mount"), "tmpfs", 0, "mode=0751")
            (project / "mount/inside").touch()
            base = take(state, project)
            layer = Path(base.layers[0])
            assert base.mounts == base.shut == ("mount",)
            assert list((layer / "mount").iterdir()) == []
            assert stat.S_IMODE((layer / "mount").stat().st_mode) == 0o751
            (project / "mount/more").touch()
            assert take(state, project).layers == base.layers
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_entry_that_changed_just_before_its_capture_is_captured_again(state: State, project: Path) -> None:
    now = time.time()
    first = take(state, project, clock=lambda: now)
    assert first.copied_files == 3
    second = take(state, project)
    assert second.copied_files == 3
    assert len(second.layers) == 2
    assert take(state, project).layers == second.layers


def test_more_than_eight_deltas_become_one_without_copying_or_touching_the_old_ones(
    state: State, project: Path, place: Path
) -> None:
    (project / "big").write_bytes(bytes(MIB))
    older = []
    for number in range(9):
        (project / f"file{number}").write_text(str(number))
        (project / "one").write_text(str(number))
        base = take(state, project)
        older.append((base.layers, [manifest(layer)["entries"] for layer in base.layers]))
    assert len(base.layers) == 9
    (project / "file3").unlink()
    (project / "sub/two").unlink()
    merged = check(state, project, place)
    assert len(merged.layers) == 2
    assert merged.layers[1] == base.layers[-1]
    assert (Path(merged.layers[0]) / "file4").stat().st_ino == (Path(base.layers[-5]) / "file4").stat().st_ino
    names = {path.name: path.lstat().st_mode for path in Path(merged.layers[0]).rglob("*")}
    assert "file3" not in names  # made and deleted since the full copy: nothing to hide
    assert stat.S_ISCHR(names["two"])
    for layers, seen in older:
        assert [manifest(layer)["entries"] for layer in layers] == seen
    assert os.listdir(room_for(state, str(project)).inside("building")) == []


def test_a_merger_that_fails_is_put_off(state: State, project: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        (project / "one").write_text(str(number))
        take(state, project)

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(bases, "merge_deltas", broken)
        (project / "one").write_text("nine")
        assert len(check(state, project, place).layers) == 10
    (project / "one").write_text("ten")
    assert len(check(state, project, place).layers) == 2


def test_when_most_of_a_large_project_changed_a_full_copy_is_made(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bases, "_REWRITE", 1)
    take(state, project)
    for name in ("one", "sub/two"):
        (project / name).write_text("changed")
    base = take(state, project)
    assert len(base.layers) == 1
    assert manifest(base.layers[0]) == manifest(str(project))


def test_layers_that_nobody_needs_are_pruned_and_no_others(state: State, project: Path) -> None:
    history = []
    for number in range(10):
        (project / "one").write_text(str(number))
        history.append(take(state, project).layers)
    used = set(history[3])
    unused = unused_layers(room_for(state, str(project)), used)
    assert unused == sorted(set(history[8]) - set(history[9]) - used)
    assert prune(room_for(state, str(project)), lambda: used) == unused
    assert all(os.path.isdir(layer) for layer in used | set(history[9]))
    assert not any(os.path.exists(layer) for layer in unused)
    assert len(os.listdir(state.room("trash"))) >= len(unused)
    assert take(state, project).layers == history[9]


def test_pruning_a_project_without_a_base_does_nothing(state: State, project: Path) -> None:
    assert unused_layers(room_for(state, str(project)), set()) == []
    assert prune(room_for(state, str(project)), set) == []
    assert not os.path.exists(room_for(state, str(project)).path)


def test_nothing_is_pruned_while_somebody_is_about_to_use_a_layer(state: State, project: Path) -> None:
    base = take(state, project)
    (Path(base.layers[0]).parent / "77").mkdir()
    pruned = threading.Thread(target=prune, args=(room_for(state, str(project)), set))
    with room_for(state, str(project)).locked(bases.fcntl.LOCK_SH):
        pruned.start()
        pruned.join(0.2)
        assert pruned.is_alive()
        assert (Path(base.layers[0]).parent / "77").exists()
    pruned.join()
    assert not (Path(base.layers[0]).parent / "77").exists()


def test_a_layer_that_was_taken_between_capture_and_hold_is_captured_again(
    state: State, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, taken = bases.fcntl.flock, []

    def stealing(fd: int, how: int) -> None:
        if how == bases.fcntl.LOCK_SH and not taken:
            taken.append(room_for(state, str(project)).layer("0"))
            shutil.rmtree(taken[0])
        true(fd, how)

    monkeypatch.setattr(bases.fcntl, "flock", stealing)
    with bases.capturing(state, str(project), clock=later) as base:
        assert taken
        assert manifest(base.layers[0]) == manifest(str(project))
        with room_for(state, str(project)).locked(bases.fcntl.LOCK_SH):
            pass  # several may hold it


def test_an_estimate_saves_the_second_scan(state: State, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guess = estimate(state, str(project))
    assert (guess.files, guess.bytes, guess.exists, guess.cheap) == (3, 6, False, True)
    with monkeypatch.context() as patch:
        patch.setattr(scanning, "scan", None)
        capture(state, str(project), estimated=guess)
    assert estimate(state, str(project)).exists
    assert not estimate(state, str(project), shift=5).exists


def test_an_estimate_that_is_old_or_overtaken_is_not_used(state: State, project: Path, place: Path) -> None:
    guess = estimate(state, str(project), clock=later)
    (project / "new").write_text("x")
    capture(state, str(project), clock=later)
    check(state, project, place, estimated=guess)
    guess = estimate(state, str(project), clock=lambda: later() - 5)
    (project / "newer").write_text("x")
    check(state, project, place, estimated=guess)


def test_whether_blocks_are_shared_is_really_tried(state: State, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def trial(reader: int, writer: int) -> bool:
        tried.append((os.fstat(reader).st_size, os.fstat(writer).st_size))
        return True

    monkeypatch.setattr(bases, "clone", trial)
    assert estimate(state, str(project)).shares_blocks
    assert len(tried) == 1
    assert tried[0][1] == 0 < tried[0][0]


def test_a_large_copy_is_not_cheap_unless_blocks_can_be_shared() -> None:
    guess = bases.Estimate(1, 2 << 30, False, False, scanning.Scan((0, 0, 0, 0, 0)), 0, 0)
    assert not guess.cheap
    assert bases.Estimate(1, 2 << 30, True, False, guess.scan, 0, 0).cheap
    assert bases.Estimate(1, 2 << 30, False, True, guess.scan, 0, 0).cheap


def test_progress_is_told_rarely_and_ends_complete(state: State, project: Path) -> None:
    for number in range(1000):
        (project / f"f{number}").write_text("x")
    (project / "large").write_bytes(bytes(40 * MIB))
    told: list[Progress] = []
    base = take(state, project, tell=told.append)
    assert told[-1] == Progress(base.files, base.bytes, base.files, base.bytes)
    assert 4 <= len(told) <= 12
    assert all(one.files <= one.total_files and one.bytes <= one.total_bytes for one in told)


@pytest.mark.parametrize("damage", ["base.json", "scan", "layer", "another format"])
def test_a_damaged_base_is_no_base(state: State, project: Path, damage: str) -> None:
    take(state, project)
    room = Path(room_for(state, str(project)).path)
    if damage == "base.json":
        (room / "base.json").write_text("{")
    elif damage == "scan":
        (room / "scan.1").write_bytes(bytes(100))
    elif damage == "layer":
        shutil.rmtree(room / "layers/0")
    else:
        (room / "base.json").write_text('{"format": 99, "serial": 5}')
    assert not estimate(state, str(project)).exists
    base = take(state, project)
    assert len(base.layers) == 1
    assert manifest(base.layers[0]) == manifest(str(project))


def test_two_projects_of_one_name_have_two_bases(state: State, place: Path) -> None:
    rooms = {room_for(state, path).path for path in ("/a/x", "/b/x", "/a/X", "/\udcff", "/a/" + "long" * 60)}
    assert len(rooms) == 5
    assert all(len(os.path.basename(room)) <= 41 for room in rooms)


def test_a_project_that_its_owner_may_not_write_is_captured(state: State, project: Path) -> None:
    (project / "sub").chmod(0o555)
    project.chmod(0o555)
    base = take(state, project)
    project.chmod(0o755)
    assert stat.S_IMODE(os.stat(base.layers[0]).st_mode) == 0o555
    assert len(take(state, project).layers) == 2
