"""Mounts and namespaces: nothing can be mounted, unmounted or entered, and no namespace can be made in which it could be.

Most controls run in namespaces of their own: an ordinary person can mount nowhere else, and root's mounts would be this machine's.
"""

from collections.abc import Callable, Iterator

import pytest

from conftest import Person
from escape.attempts import Attempts, Place, Trial, neighbour, somebody
from escape.prelude import (
    AT_FDCWD,
    LIBC,
    Path,
    Refused,
    call,
    checked,
    ctypes,
    fcntl,
    found,
    hold,
    nest,
    os,
    platform,
    signal,
    subprocess,
    text_of,
)

ATTEMPTS = Attempts()
SECRET, CONTENT = "s3cret-below-a-cover", "of reality\n"


def plant(person: Person) -> Place:
    outside = person.place / "outside"
    (outside / "empty").mkdir(parents=True)
    (outside / "file").write_text(CONTENT)
    hidden = person.home / ".ssh"
    hidden.mkdir()
    (hidden / "id").write_text(SECRET)
    person.own(outside)
    person.own(person.home)
    return {
        "outside": str(outside),
        "empty": str(outside / "empty"),
        "hidden": str(hidden),
        "covers": [str(hidden)],
        "secret": SECRET,
        "project": str(person.project),
        "state": str(person.state),
    }


def neighbour_to_join(place):
    hold({})


@pytest.fixture(scope="module", params=["root", "user"])
def trial(request: pytest.FixtureRequest, library: Path, hosts: Callable[[Person], Person]) -> Iterator[Trial]:
    with somebody(request.param, library, hosts) as person, neighbour(person, neighbour_to_join, {}) as other:
        case = Trial(person, ATTEMPTS, {**plant(person), "neighbour": other.process.pid})
        case.run()
        yield case


def x86() -> str | None:
    return None if platform.machine() == "x86_64" else "only for x86_64"


# -- mounts ---


@ATTEMPTS.made(control="namespaces")
def mount_a_file_system(place):
    return call("mount", b"none", place["empty"].encode(), b"tmpfs", 0, None)


@ATTEMPTS.made(control="namespaces")
def mount_a_place_again_elsewhere(place):
    return call("mount", place["outside"].encode(), place["empty"].encode(), None, 0x1000, None)


@ATTEMPTS.made(control="namespaces")
def mount_proc_without_its_covers(place):
    return call("mount", b"proc", place["empty"].encode(), b"proc", 0, None)


@ATTEMPTS.made(control="namespaces")
def mount_the_same_again_writable(place):
    """A remount: the flags of the mount that has the hidden place, less read-only."""
    return call("mount", None, place["hidden"].encode(), None, 0x20 | 0x1000, None)


@ATTEMPTS.made(control="namespaces")
def take_a_cover_away(place):
    """In the control, too, something lies on the place: it can be taken away there, and what is below shows."""
    call("umount2", place["hidden"].encode(), 2)
    return found(text_of(place["hidden"] + "/id"), place["secret"])


@ATTEMPTS.made(control="namespaces")
def move_a_cover_away(place):
    call("mount", place["hidden"].encode(), place["empty"].encode(), None, 0x2000, None)
    return found(text_of(place["hidden"] + "/id"), place["secret"])


@ATTEMPTS.made(control="namespaces")
def look_below_a_cover_by_a_clone_of_the_mount(place):
    """Not recursive: a clone of the tree has no covers."""
    tree = call("open_tree", AT_FDCWD, os.path.dirname(place["hidden"]).encode(), 1)
    file = os.open(os.path.basename(place["hidden"]) + "/id", os.O_RDONLY, dir_fd=tree)
    return found(os.read(file, 100).decode(), place["secret"])


@ATTEMPTS.made(control="namespaces")
def move_a_tree_that_was_cloned(place):
    tree = call("open_tree", AT_FDCWD, place["outside"].encode(), 1)
    return call("move_mount", tree, b"", AT_FDCWD, place["empty"].encode(), 4)


@ATTEMPTS.made(control="namespaces")
def mount_by_the_newer_calls(place):
    context = call("fsopen", b"tmpfs", 0)
    call("fsconfig", context, 6, None, None, 0)
    mount = call("fsmount", context, 0, 0)
    return call("move_mount", mount, b"", AT_FDCWD, place["empty"].encode(), 4)


@ATTEMPTS.made(control="namespaces")
def make_a_mount_writable_by_its_attributes(place):
    attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
    return call("mount_setattr", AT_FDCWD, place["hidden"].encode(), 0, attributes, 32)


@ATTEMPTS.made(control="namespaces")
def make_another_place_the_root(place):
    """In the control the hidden place is a mount of its own, as inside: only such a one can be the root."""
    return call("pivot_root", place["hidden"].encode(), place["hidden"].encode())


@ATTEMPTS.made(control="namespaces", who=("root",), effect=lambda place: Path(place["outside"], "marked").exists())
def leave_a_changed_root(place):
    """The old way out: a directory that lies outside a root made by chroot leads upwards, to whatever root there is."""
    above = os.open("/", os.O_RDONLY)
    os.chroot(place["empty"])
    os.fchdir(above)
    for _ in range(50):
        os.chdir("..")
    os.chroot(".")
    Path(place["outside"], "marked").write_text("by chroot")
    return "written"


@ATTEMPTS.made(control="namespaces", who=("user",))
def change_the_root(place):
    return os.chroot(place["empty"])


# -- namespaces ---


@ATTEMPTS.made()
def make_a_user_namespace(place):
    return call("unshare", 0x10000000)


@ATTEMPTS.made()
def make_all_namespaces_by_program(place):
    done = subprocess.run(["unshare", "-Urmpf", "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(done.stderr.strip())
    return "made"


@ATTEMPTS.made(control="namespaces")
def make_each_kind_of_namespace(place):
    """Mount, cgroup, UTS, IPC, user, process, network, time: one that can be made is enough."""
    why = None
    for kind in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
        try:
            call("unshare", kind)
            return hex(kind)
        except OSError as error:
            why = error
    raise why


@ATTEMPTS.made()
def start_a_process_in_a_user_namespace(place):
    child = call("clone", 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return "started"


@ATTEMPTS.made()
def start_a_process_in_a_namespace_by_clone3(place):
    """Its flags lie in memory, where a filter cannot look."""
    arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, signal.SIGCHLD)
    child = call("clone3", arguments, 88)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return "started"


@ATTEMPTS.made(needs=x86)
def make_a_user_namespace_with_bits_that_nobody_looks_at(place):
    """The kernel takes the low half of clone's flags only: so must the filter."""
    child = int(LIBC.syscall(ctypes.c_long(56), ctypes.c_long(0x1_10000000 | signal.SIGCHLD), 0, 0, 0, 0))
    if child == 0:
        os._exit(0)
    checked("clone", child)
    os.waitpid(child, 0)
    return "started"


@ATTEMPTS.made(needs=x86)
def call_the_kernel_as_an_old_program_does(place):
    """unshare(CLONE_NEWUSER) by `int 0x80`, where calls have other numbers: 310 for this one."""
    code = b"\x53\xb8\x36\x01\x00\x00\xbb\x00\x00\x00\x10\xcd\x80\x5b\xc3"
    memory = LIBC.mmap(None, ctypes.c_size_t(4096), 7, 0x22, -1, ctypes.c_long(0))
    ctypes.memmove(memory, code, len(code))
    done = ctypes.CFUNCTYPE(ctypes.c_int)(memory)()
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    return "made"


@ATTEMPTS.made(control="namespaces")
def join_the_namespaces_of_the_first_process(place):
    for kind in ("mnt", "uts", "ipc", "net", "user"):
        try:
            return call("setns", os.open(f"/proc/1/ns/{kind}", os.O_RDONLY), 0)
        except OSError as error:
            why = error
    raise why


@ATTEMPTS.made(control="root")
def join_the_namespaces_of_a_neighbour(place):
    """By its number: inside, another process or none has it."""
    return call("setns", os.open(f"/proc/{place['neighbour']}/ns/uts", os.O_RDONLY), 0)


@ATTEMPTS.made(control="namespaces")
def enter_a_namespace_that_one_is_in(place):
    return call("setns", os.open("/proc/self/ns/uts", os.O_RDONLY), 0)


@ATTEMPTS.made(control="root", who=("root",))
def find_the_owner_of_a_namespace(place):
    """NS_GET_USERNS leads to the user namespace that owns the process namespace: in root's sandbox that is reality's."""
    return fcntl.ioctl(os.open("/proc/self/ns/pid", os.O_RDONLY), 0xB701)


# -- namespaces that are allowed ---

NESTED = Attempts()


@pytest.fixture(scope="module", params=["root", "user"])
def nested_trial(request: pytest.FixtureRequest, library: Path, hosts: Callable[[Person], Person]) -> Iterator[Trial]:
    with somebody(request.param, library, hosts) as person:
        case = Trial(person, NESTED, plant(person))
        case.run("--nested")
        yield case


@NESTED.made(control="namespaces")
def take_a_cover_away_as_root_of_an_own_namespace(place):
    nest()
    call("umount2", place["hidden"].encode(), 2)
    return found(text_of(place["hidden"] + "/id"), place["secret"])


@NESTED.made(control="namespaces")
def clone_what_lies_below_a_cover_as_root_of_an_own_namespace(place):
    nest()
    call("mount", os.path.dirname(place["hidden"]).encode(), place["empty"].encode(), None, 0x1000, None)
    return found(text_of(place["empty"] + "/.ssh/id"), place["secret"])


@NESTED.made(control="namespaces")
def take_the_copy_of_a_cover_away(place):
    nest()
    call("mount", os.path.dirname(place["hidden"]).encode(), place["empty"].encode(), None, 0x1000 | 0x4000, None)
    call("umount2", place["empty"].encode() + b"/.ssh", 2)
    return found(text_of(place["empty"] + "/.ssh/id"), place["secret"])


@NESTED.made(control="namespaces")
def overlay_what_lies_below_a_cover(place):
    nest()
    options = f"lowerdir={os.path.dirname(place['hidden'])}:{place['empty']}".encode()
    call("mount", b"overlay", place["empty"].encode(), b"overlay", 1, options)
    return found(text_of(place["empty"] + "/.ssh/id"), place["secret"])


@NESTED.made(control="namespaces")
def mount_proc_as_root_of_an_own_namespace(place):
    """It would come without covers."""
    nest()
    return call("mount", b"proc", place["empty"].encode(), b"proc", 0, None)


@NESTED.made(control="namespaces")
def make_everything_writable_as_root_of_an_own_namespace(place):
    nest()
    call("mount", None, b"/proc/sys", None, 0x20 | 0x1000, None) if os.path.ismount("/proc/sys") else None
    attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
    return call("mount_setattr", AT_FDCWD, place["hidden"].encode(), 0x8000, attributes, 32)


@pytest.mark.parametrize("name", NESTED)
def test_it_does_not_get_out_of_a_nested_namespace(nested_trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    nested_trial.judge(name, request)
    assert not mounted(nested_trial)


def mounted(trial: Trial) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if trial.place["outside"] in line]


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_does_not_get_out(trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    trial.judge(name, request)
    assert not mounted(trial)
