"""Disk images for real: a limit that holds, devices that never stay behind, and what becomes of them when things go wrong."""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import base_directory, eventually, host_mounts
from elsewhere.errors import InUse, StateError
from elsewhere.linux import loop, probe
from elsewhere.linux import syscalls as sys_
from elsewhere.storage import images

MIB = 1 << 20
OWNER = 1 << 30


def devices(place: Path) -> list[str]:
    """Loop devices whose file lies below a place."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if backing.read_text().startswith(str(place)):
                found.append(backing.parts[3])
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for images, after which nothing may be left."""
    if os.geteuid():
        pytest.skip("loop devices need root")
    made = Path(tempfile.mkdtemp(prefix="ew-images-", dir=base_directory())).resolve()
    mounts = host_mounts()
    reason = images.available(str(made))
    if reason is not None:
        made.rmdir()
        pytest.skip(f"no disk images here: {reason}")
    assert list(made.iterdir()) == []
    yield made
    assert eventually(lambda: not devices(made)), f"loop devices were left behind: {devices(made)}"
    assert host_mounts() == mounts
    shutil.rmtree(made)


@contextlib.contextmanager
def mounted(path: Path) -> Iterator[Path]:
    fd = images.mounted(str(path))
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def image(place: Path, size: int = 32 * MIB, name: str = "layers.img") -> Path:
    path = place / name
    images.create(str(path), size, owner=OWNER)
    return path


def number(root: Path) -> int:
    return int(root.name)


def fill(path: Path, block: int = MIB) -> int:
    """Write until it fails; the error's number."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while True:
            os.write(fd, os.urandom(block))
    except OSError as error:
        return error.errno or 0
    finally:
        os.close(fd)


def make_files(directory: Path) -> None:
    for name in range(1 << 30):
        (directory / f"{name}").touch()


def write_through(path: Path, megabytes: int) -> None:
    with open(path, "wb", buffering=0) as stream:
        stream.writelines(os.urandom(MIB) for _ in range(megabytes))
        os.fsync(stream.fileno())


def state_of(path: Path) -> int:
    with open(path, "rb") as stream:
        stream.seek(1024 + 0x3A)
        found: int = struct.unpack("<H", stream.read(2))[0]
    return found


# -- what an image is ---


def test_an_image_is_a_closed_sparse_file_of_exactly_that_size(place: Path) -> None:
    path = image(place, 300 * MIB)
    about = path.stat()
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert about.st_size == 300 * MIB
    assert about.st_blocks * 512 < MIB
    assert list(place.iterdir()) == [path]
    with mounted(path) as root:
        assert (root.stat().st_uid, root.stat().st_gid) == (OWNER, OWNER)
        assert os.listdir(root) == ["lost+found"]
        flags = os.statvfs(root).f_flag
        assert flags & os.ST_NOSUID
        assert flags & os.ST_NODEV


def test_it_takes_no_more_of_the_host_than_is_in_it(place: Path) -> None:
    path = image(place, 2048 * MIB)
    with mounted(path) as root:
        write_through(root / "file", 1)
        assert path.stat().st_blocks * 512 < 3 * MIB
    assert path.stat().st_blocks * 512 < 3 * MIB


def test_too_small_is_refused(place: Path) -> None:
    with pytest.raises(StateError) as raised:
        image(place, images.LEAST - 1)
    assert raised.value.code == "image_too_small"
    assert list(place.iterdir()) == []
    with mounted(image(place, images.LEAST)) as root:
        (root / "file").write_bytes(b"x" * 100_000)


def test_what_cannot_be_made_leaves_nothing(place: Path) -> None:
    for size in (1 << 60, 1 << 62):
        with pytest.raises(StateError) as raised:
            image(place, size)
        assert raised.value.code == "image_not_made"
        assert str(size) in raised.value.message
        assert raised.value.hint
    assert list(place.iterdir()) == []


def test_content_outlives_the_mount(place: Path) -> None:
    path = image(place)
    with mounted(path) as root:
        (root / "file").write_text("kept")
    assert state_of(path) == 1, "not clean"
    with mounted(path) as root:
        assert (root / "file").read_text() == "kept"


# -- the limit ---


def test_a_full_image_is_no_space_left_and_hurts_nobody_else(place: Path) -> None:
    one, other = image(place, name="one"), image(place, name="other")
    with mounted(one) as root, mounted(other) as neighbour:
        assert fill(root / "big") == errno.ENOSPC
        assert 27 * MIB < (root / "big").stat().st_size <= 32 * MIB
        (neighbour / "file").write_bytes(os.urandom(20 * MIB))
        os.unlink(root / "big")
        (root / "after").write_bytes(os.urandom(20 * MIB))
    assert one.stat().st_blocks * 512 <= 33 * MIB


def test_many_small_files_end_with_the_same_error(place: Path) -> None:
    with mounted(image(place, 8 * MIB)) as root:
        before = images.usage(number(root)).used_files
        with pytest.raises(OSError, match="No space left"):
            make_files(root)
        assert images.usage(number(root)).used_files - before == len(os.listdir(root)) - 1 > 1900
        assert images.usage(number(root)).free_files == 0


def test_usage_follows_what_is_written_and_deleted(place: Path) -> None:
    with mounted(image(place)) as root:
        empty = images.usage(number(root))
        assert empty.used_bytes < 100_000
        assert 29 * MIB < empty.used_bytes + empty.free_bytes <= 32 * MIB
        (root / "directory").mkdir()
        write_through(root / "directory" / "file", 10)
        full = images.usage(number(root))
        assert 10 * MIB <= full.used_bytes - empty.used_bytes < 11 * MIB
        assert full.free_bytes <= empty.free_bytes - 10 * MIB
        assert full.used_files - empty.used_files == 2
        assert empty.free_files - full.free_files == 2
        shutil.rmtree(root / "directory")
        assert images.usage(number(root)) == empty


def test_what_was_deleted_is_given_back_to_the_host(place: Path) -> None:
    path = image(place, 64 * MIB)
    with mounted(path) as root:
        (root / "file").write_bytes(os.urandom(40 * MIB))
        os.sync()
        assert path.stat().st_blocks * 512 > 40 * MIB
        os.unlink(root / "file")
        images.trim(number(root))
        assert path.stat().st_blocks * 512 < 4 * MIB


# -- layers in it ---


def test_an_overlay_has_its_layers_in_it(place: Path) -> None:
    lower = place / "lower"
    (lower / "directory" / "below").mkdir(parents=True)
    for name in ("changed", "deleted", "directory/file"):
        (lower / name).write_text("reality")
    with mounted(image(place)) as root:
        (root / "upper").mkdir()
        (root / "work").mkdir()
        context = sys_.fsopen("overlay")
        options = {"lowerdir+": str(lower), "upperdir": f"{root}/upper", "workdir": f"{root}/work", "redirect_dir": "on"}
        for key, value in options.items():
            sys_.fsconfig_string(context, key, value)
        sys_.fsconfig_flag(context, "volatile")
        sys_.fsconfig_create(context)
        fd = sys_.fsmount(context)
        os.close(context)
        view = Path(f"/proc/self/fd/{fd}")
        (view / "changed").write_text("mine")
        os.unlink(view / "deleted")
        os.rename(view / "directory", view / "renamed")
        assert sorted(os.listdir(view)) == ["changed", "renamed"]
        assert (view / "renamed" / "file").read_text() == "reality"
        assert fill(view / "big") == errno.ENOSPC
        os.unlink(view / "big")
        os.close(fd)
        mark = (root / "upper" / "deleted").stat()
        assert stat.S_ISCHR(mark.st_mode)
        assert mark.st_rdev == 0
        assert os.getxattr(root / "upper" / "renamed", "trusted.overlay.redirect") == b"directory"
        assert (root / "upper" / "changed").read_text() == "mine"
    assert (lower / "changed").read_text() == "reality"


# -- devices come and go ---


def test_no_mount_table_shows_it(place: Path) -> None:
    before = host_mounts()
    with mounted(image(place)):
        assert host_mounts() == before
        assert len(devices(place)) == 1


def test_the_device_goes_with_the_last_descriptor(place: Path) -> None:
    path = image(place)
    device = loop.attach(str(path))
    assert stat.S_ISBLK(os.fstat(device).st_mode)
    assert not os.get_inheritable(device)
    assert len(devices(place)) == 1
    os.close(device)
    assert eventually(lambda: not devices(place))


def test_the_device_goes_when_its_owner_is_killed(place: Path) -> None:
    path = image(place)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fd = images.mounted(str(path))
            Path(f"/proc/self/fd/{fd}/file").write_text("written before the end")
            os.write(writer, b"+")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"+"
    os.close(reader)
    assert len(devices(place)) == 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with mounted(path) as root:
        assert (root / "file").read_text() == "written before the end"


def test_one_image_is_never_mounted_twice(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_LEAVING", 0.05)
    path = image(place)
    with mounted(path):
        with pytest.raises(InUse) as raised:
            images.mounted(str(path))
        assert raised.value.code == "image_in_use"
        assert str(path) in raised.value.message
        assert len(devices(place)) == 1
    with mounted(path):
        pass


def test_an_open_file_inside_keeps_the_image_in_use(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_LEAVING", 0.05)
    path = image(place)
    with mounted(path) as root:
        stream = open(root / "file", "w")  # noqa: SIM115
    with pytest.raises(InUse):
        images.mounted(str(path))
    stream.write("late")
    stream.close()
    with mounted(path) as root:
        assert (root / "file").read_text() == "late"


def test_a_mount_that_is_on_its_way_out_is_waited_for(place: Path) -> None:
    path = image(place)
    device = loop.attach(str(path))
    pid = os.fork()
    if pid == 0:
        time.sleep(0.2)
        os._exit(0)
    os.close(device)  # the child still has it
    with mounted(path) as root:
        assert root.is_dir()
    os.waitpid(pid, 0)


def _attach_often(path: str) -> None:
    for _ in range(20):
        device = loop.attach(path, wait=20)
        assert os.pread(device, 4, 0) == os.path.basename(path).encode()
        os.close(device)


def test_many_who_want_a_device_at_once_all_get_their_own(place: Path) -> None:
    paths = [str(place / f"{number:04}") for number in range(8)]
    for path in paths:
        Path(path).write_bytes(os.path.basename(path).encode() * 1024)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_attach_often, args=(path,)) for path in paths]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)


def test_a_read_only_device_cannot_be_written(place: Path) -> None:
    path = image(place)
    first, second = loop.attach(str(path), read_only=True), loop.attach(str(path), read_only=True)
    with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
        os.pwrite(first, b"x", 0)
    with pytest.raises(BlockingIOError):
        loop.attach(str(path))
    os.close(first)
    os.close(second)


def test_errors_name_the_step(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"open .*/missing"):
        loop.attach(str(place / "missing"))
    (place / "link").symlink_to(image(place))
    with pytest.raises(OSError, match=r"open .*/link"):
        loop.attach(str(place / "link"))
    with pytest.raises(StateError) as raised:
        images.mounted(str(place / "missing"))
    assert raised.value.code == "image_unusable"


def _own_dev(*nodes: str) -> None:
    """A /dev with nothing but these in it, in a mount namespace of its own."""
    numbers = {name: os.stat(f"/dev/{name}") for name in nodes}
    sys_.unshare(sys_.CLONE_NEWNS)
    sys_.mount(None, "/", None, sys_.MS_REC | sys_.MS_PRIVATE)
    sys_.mount("tmpfs", "/dev", "tmpfs", 0)
    for name, about in numbers.items():
        os.mknod(f"/dev/{name}", about.st_mode, about.st_rdev)


def test_missing_nodes_are_made_and_taken_away_again(place: Path) -> None:
    path = image(place)

    def trial() -> str:
        _own_dev("loop-control", "null")
        with mounted(path) as root:
            (root / "file").write_text("x")
        return " ".join(sorted(os.listdir("/dev")))

    tried = probe.attempt(trial, limit=20)
    assert tried.text == "loop-control null"
    assert tried.ok


# -- hosts that cannot ---


def test_without_loop_devices_it_says_so(place: Path) -> None:
    def trial() -> str:
        images._tried.clear()
        _own_dev("null")
        return f"{images.available(str(place))} {os.listdir(place)}"

    tried = probe.attempt(trial, limit=20)
    assert "no loop devices (open /dev/loop-control: No such file or directory)" in tried.text
    assert tried.text.endswith(" []")


@pytest.mark.parametrize("missing", ["mkfs.ext4", "e2fsck"])
def test_without_the_programs_it_says_what_to_install(place: Path, missing: str) -> None:
    def trial() -> str:
        images._tried.clear()
        sys_.unshare(sys_.CLONE_NEWNS)
        sys_.mount(None, "/", None, sys_.MS_REC | sys_.MS_PRIVATE)
        while (found := shutil.which(missing, path="/usr/local/sbin:/usr/sbin:/sbin:" + os.environ["PATH"])) is not None:
            sys_.mount("/dev/null", os.path.realpath(found), None, sys_.MS_BIND)
        return str(images.available(str(place)))

    tried = probe.attempt(trial, limit=20)
    assert missing in tried.text
    assert "apt-get install e2fsprogs" in tried.text


def test_an_ordinary_user_is_told_that_it_needs_root() -> None:
    def trial() -> str:
        images._tried.clear()
        if os.geteuid() == 0:
            os.setresuid(4242, 4242, 4242)
        return str(images.available("/tmp"))

    assert "root" in probe.attempt(trial).text


# -- after a crash ---


def test_an_image_that_was_not_unmounted_is_checked_and_mounted(place: Path) -> None:
    path, copy = image(place), place / "copy.img"
    with mounted(path) as root:
        for name in range(100):
            (root / f"{name}").write_text("before the crash")
        root_fd = os.open(root, os.O_RDONLY)
        sys_.syncfs(root_fd)
        os.close(root_fd)
        subprocess.run(["cp", "--sparse=always", path, copy], check=True)
    assert state_of(copy) == 0
    with mounted(copy) as root:
        assert (root / "7").read_text() == "before the crash"
    assert state_of(copy) == 1, "it was mounted without a check"


def test_an_image_copied_in_full_motion_is_repaired(place: Path) -> None:
    path, copy = image(place, 128 * MIB), place / "copy.img"
    code = (
        "import os, random, sys\n"
        "os.chdir(sys.argv[1])\n"
        "for n in range(10**9):\n"
        "    os.makedirs(d := f'd{random.randrange(20)}', exist_ok=True)\n"
        "    with open(p := f'{d}/{random.randrange(200)}', 'wb') as f: f.write(os.urandom(random.choice((10, 9000))))\n"
        "    if n % 3 == 0: os.rename(p, f'{d}/r{random.randrange(200)}')\n"
        "    if n % 7 == 0: os.unlink(p) if os.path.exists(p) else None\n"
        "    if n % 500 == 0: os.sync(); os.write(1, b'+')\n"
    )
    with mounted(path) as root:
        top = os.open(root, os.O_RDONLY)
        writer = subprocess.Popen(
            [sys.executable, "-c", code, f"/proc/self/fd/{top}"], pass_fds=[top], stdout=subprocess.PIPE, bufsize=0
        )
        try:
            assert writer.stdout is not None
            writer.stdout.read(1)
            writer.stdout.read(1)
            subprocess.run(["cp", "--sparse=always", path, copy], check=True)
        finally:
            writer.kill()
            writer.communicate()
            os.close(top)
    with mounted(copy) as root:
        assert any(name.startswith("d") for name in os.listdir(root))
        (root / "new").write_text("works")
    assert subprocess.run(["e2fsck", "-f", "-n", copy], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("where", "length"), [(0, 4096), (4096, 400_000)], ids=["no beginning", "not clean, and its tables overwritten"]
)
def test_damage_beyond_repair_is_said_and_nothing_is_mounted(place: Path, where: int, length: int) -> None:
    path = image(place)
    with mounted(path) as root:
        for name in range(100):
            (root / f"{name}").write_text("x")
    with open(path, "r+b") as stream:
        stream.seek(1024 + 0x3A)
        stream.write(b"\0\0")  # not clean
        stream.seek(where)
        stream.write(b"\xa5" * length)
    with pytest.raises(StateError) as raised:
        images.mounted(str(path))
    assert raised.value.code == "image_damaged"
    assert str(path) in raised.value.message
    assert "e2fsck" in raised.value.hint


# -- a full host ---


def test_a_full_host_hurts_who_writes_and_everything_goes_on_once_there_is_room(place: Path) -> None:
    """The host's disk is a small tmpfs here. Data that the host has no room for is lost, and a program hears of it by fsync."""
    context = sys_.fsopen("tmpfs")
    sys_.fsconfig_string(context, "size", "48M")
    sys_.fsconfig_create(context)
    host_fd = sys_.fsmount(context)
    os.close(context)
    host = Path(f"/proc/{os.getpid()}/fd/{host_fd}")
    one, other = image(host, 200 * MIB, "one"), image(host, 200 * MIB, "other")
    with mounted(one) as root, mounted(other) as neighbour:
        (neighbour / "file").write_bytes(content := os.urandom(4 * MIB))
        os.sync()
        with pytest.raises(OSError, match=r"No space left|Input/output"):
            write_through(root / "big", 80)
        assert (neighbour / "file").read_bytes() == content
        os.unlink(root / "big")
        images.trim(number(root))
        for somebody in (root, neighbour):
            write_through(somebody / "after", 4)
    for path in (one, other):
        with mounted(path) as root:
            assert (root / "after").stat().st_size == 4 * MIB
    with mounted(other) as neighbour:
        assert (neighbour / "file").read_bytes() == content
    os.close(host_fd)


def test_an_image_for_which_the_host_has_no_room_is_not_made(place: Path) -> None:
    context = sys_.fsopen("tmpfs")
    sys_.fsconfig_string(context, "size", "16k")
    sys_.fsconfig_create(context)
    host_fd = sys_.fsmount(context)
    os.close(context)
    host = Path(f"/proc/self/fd/{host_fd}")
    with pytest.raises(StateError) as raised:
        image(host)
    assert raised.value.code == "image_not_made"
    assert "free some space" in raised.value.hint
    assert list(host.iterdir()) == []
    os.close(host_fd)
