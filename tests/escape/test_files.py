"""Files and links: nothing that is written inside is written in reality, and what is hidden has no other name.

Writing may succeed inside, where it goes to a copy: what decides is reality afterwards.
"""

import shutil
from collections.abc import Callable, Iterator

import pytest

from conftest import Person, base_directory
from escape.attempts import Attempts, Place, Trial, somebody
from escape.prelude import AT_FDCWD, LIBC, Path, Refused, call, checked, ctypes, fcntl, found, mmap, os, stat, sys, text_of

ATTEMPTS = Attempts()
ORIGINAL, SECRET = "of reality\n", "s3cret-of-reality"
WRITTEN = (
    "by_link", "by_hard_link", "by_new_hard_link", "truncated", "by_cwd", "by_descriptor", "mode", "times", "attribute", "flags",
    "mapped", "renamed", "removed", "replaced", "by_old_descriptor", "owner", "handed",
)  # fmt: skip


def handle_of(path: Path) -> bytes:
    handle = ctypes.create_string_buffer((128).to_bytes(4, sys.byteorder), 136)
    call("name_to_handle_at", AT_FDCWD, os.fsencode(path), handle, ctypes.byref(ctypes.c_int()), 0)
    return handle.raw


def no_handles() -> str | None:
    try:
        handle_of(Path(base_directory()))
    except OSError as error:
        return f"the file system here has no handles: {error}"
    return None


def plant(person: Person) -> Place:
    outside = person.place / "outside"
    outside.mkdir()
    for name in WRITTEN:
        (outside / name).write_text(ORIGINAL)
    (outside / "directory").mkdir()
    project = person.project
    (project / "link-to-file").symlink_to(outside / "by_link")
    (project / "hard-link").hardlink_to(outside / "by_hard_link")
    (person.home / ".ssh").mkdir(mode=0o700)
    (person.home / ".ssh/id").write_text(SECRET)
    (person.home / ".config/gh").mkdir(parents=True)
    (person.home / ".config/gh/hosts.yml").write_text(SECRET)
    (project / "link-to-secret").symlink_to(person.home / ".ssh/id")
    (project / "link-to-home").symlink_to("../home")
    for name in ("outside", "home", "project"):
        person.own(person.place / name)
    place: Place = {
        "handle": "" if no_handles() else handle_of(person.home / ".ssh/id").hex(),
        "outside": str(outside),
        "project": str(project),
        "home": str(person.home),
        "state": str(person.state),
        "original": ORIGINAL,
        "secret": SECRET,
        "device": os.stat("/").st_dev,
        "scratch": str(person.place / "scratch"),
    }
    (person.place / "scratch").mkdir()
    person.own(person.place / "scratch")
    if os.geteuid() == 0:
        other = Path("/home") / person.place.name
        other.mkdir(parents=True, mode=0o755)
        (other / "notes").write_text(SECRET)
        place["other"] = str(other)
        for directory in (outside, person.home, project):
            os.mknod(directory / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
            os.chown(directory / "zero", person.uid, person.uid)
            os.chmod(directory / "zero", 0o666)
    return place


@pytest.fixture(scope="module", params=["root", "user"])
def trial(request: pytest.FixtureRequest, library: Path, hosts: Callable[[Person], Person]) -> Iterator[Trial]:
    with somebody(request.param, library, hosts) as person:
        place = plant(person)
        try:
            case = Trial(person, ATTEMPTS, place)
            with open(place["outside"] + "/handed") as stdin:
                case.run(stdin=stdin)
            yield case
        finally:
            if "other" in place:
                shutil.rmtree(place["other"])


def written(name: str) -> Callable[[Place], bool]:
    """Whether the file that an attempt was to write has another content now, or is gone."""
    return lambda place: not (path := Path(place["outside"]) / name).exists() or path.read_text() != ORIGINAL


# -- writing ---


@ATTEMPTS.made(effect=written("by_link"))
def write_through_a_link_that_was_there(place):
    with open("link-to-file", "w") as stream:
        stream.write("through the link")
    return "written"


@ATTEMPTS.made(effect=written("by_hard_link"))
def write_through_a_hard_link_that_was_there(place):
    with open("hard-link", "r+") as stream:
        stream.write("through the link")
    return "written"


@ATTEMPTS.made(effect=written("by_new_hard_link"))
def write_through_a_hard_link_made_now(place):
    os.link(place["outside"] + "/by_new_hard_link", place["outside"] + "/directory/another-name")
    with open(place["outside"] + "/directory/another-name", "r+") as stream:
        stream.write("through the link")
    return "written"


@ATTEMPTS.made(effect=written("truncated"))
def empty_a_file_by_way_of_proc_self_root(place):
    os.truncate("/proc/self/root" + place["outside"] + "/truncated", 0)
    return "emptied"


@ATTEMPTS.made(effect=written("by_cwd"))
def write_by_way_of_proc_self_cwd(place):
    with open("/proc/self/cwd/../outside/by_cwd", "w") as stream:
        stream.write("by another way")
    return "written"


@ATTEMPTS.made(effect=written("by_descriptor"))
def write_below_a_descriptor_of_a_directory(place):
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    above = os.open("..", os.O_PATH, dir_fd=here)
    file = os.open("outside/by_descriptor", os.O_WRONLY | os.O_TRUNC, dir_fd=above)
    os.write(file, b"by descriptor")
    return "written"


@ATTEMPTS.made(effect=written("by_old_descriptor"))
def write_through_a_descriptor_opened_again(place):
    """Opened for reading, then once more for writing by its magic link."""
    file = os.open(place["outside"] + "/by_old_descriptor", os.O_RDONLY)
    again = os.open(f"/proc/self/fd/{file}", os.O_WRONLY)
    os.write(again, b"by magic link")
    return "written"


@ATTEMPTS.made(effect=lambda place: "by magic link" in text_of(place["outside"] + "/handed"))
def write_to_the_file_that_is_standard_input(place):
    """The caller opened it for reading, in reality: its magic link would open it again, for writing."""
    with open("/proc/self/fd/0", "r+") as stream:
        stream.write("by magic link")
    return "written"


@ATTEMPTS.made(effect=lambda place: os.stat(place["outside"] + "/handed").st_size == 1000)
def change_the_size_of_the_file_that_is_standard_input(place):
    os.truncate("/proc/self/fd/0", 1000)
    return "changed"


@ATTEMPTS.made(effect=lambda place: os.stat(place["outside"] + "/handed").st_mode & 0o777 == 0o777)
def open_the_file_that_is_standard_input_to_everybody(place):
    os.fchmod(0, 0o777)
    return "changed"


@ATTEMPTS.made(effect=written("mapped"))
def write_to_a_shared_mapping(place):
    with open(place["outside"] + "/mapped", "r+b") as stream, mmap.mmap(stream.fileno(), 5) as memory:
        memory[:5] = b"WROTE"
        memory.flush()
    return "written"


@ATTEMPTS.made(effect=written("renamed"))
def take_a_file_away_by_renaming(place):
    os.rename(place["outside"] + "/renamed", place["outside"] + "/directory/taken")
    return "taken"


@ATTEMPTS.made(effect=written("removed"))
def remove_a_file(place):
    os.unlink(place["outside"] + "/removed")
    return "removed"


@ATTEMPTS.made(effect=written("replaced"))
def replace_a_file_by_renaming_over_it(place):
    with open(place["outside"] + "/replacement", "w") as stream:
        stream.write("another")
    os.rename(place["outside"] + "/replacement", place["outside"] + "/replaced")
    return "replaced"


@ATTEMPTS.made(effect=lambda place: os.path.exists(place["outside"] + "/directory/from-nowhere"))
def bring_a_nameless_file_into_a_directory(place):
    file = os.open(place["outside"] + "/directory", os.O_TMPFILE | os.O_RDWR, 0o600)
    target = os.fsencode(place["outside"] + "/directory/from-nowhere")
    at_symlink_follow = 0x400
    checked("linkat", LIBC.linkat(AT_FDCWD, f"/proc/self/fd/{file}".encode(), AT_FDCWD, target, at_symlink_follow))
    return "linked"


@ATTEMPTS.made(effect=lambda place: stat.S_IMODE(os.stat(place["outside"] + "/mode").st_mode) == 0o777)
def open_a_file_to_everybody(place):
    os.chmod(place["outside"] + "/mode", 0o777)
    return "changed"


@ATTEMPTS.made(effect=lambda place: os.stat(place["outside"] + "/times").st_mtime < 10)
def change_the_times_of_a_file(place):
    os.utime(place["outside"] + "/times", (1, 1))
    return "changed"


@ATTEMPTS.made(effect=lambda place: "user.mark" in os.listxattr(place["outside"] + "/attribute"))
def put_an_attribute_on_a_file(place):
    os.setxattr(place["outside"] + "/attribute", "user.mark", b"was here")
    return "changed"


@ATTEMPTS.made(effect=lambda place: os.stat(place["outside"] + "/owner").st_gid == 4343, who=("root",))
def give_a_file_away(place):
    os.chown(place["outside"] + "/owner", 4343, 4343)
    return "given"


def no_dump(place: Place) -> bool:
    """One of the flags of chattr that the owner may set without any power."""
    flags = ctypes.c_long()
    with open(place["outside"] + "/flags") as stream:
        fcntl.ioctl(stream, 0x80086601, flags)
    return bool(flags.value & 0x40)


@ATTEMPTS.made(effect=no_dump)
def put_a_flag_on_a_file(place):
    """As `chattr +d` does."""
    flags = ctypes.c_long()
    with open(place["outside"] + "/flags") as stream:
        fcntl.ioctl(stream, 0x80086601, flags)
        flags.value |= 0x40
        fcntl.ioctl(stream, 0x40086602, flags)
    return "changed"


# -- reading what is hidden ---


@ATTEMPTS.made()
def read_a_credential_by_its_other_names(place):
    home = place["home"]
    names = [
        home + "/.ssh/id",
        "/" + home + "//.ssh/./id",
        home + "/.config/../.ssh/id",
        "/proc/self/root" + home + "/.ssh/id",
        "/proc/thread-self/cwd/../home/.ssh/id",
        "link-to-secret",
        "link-to-home/.ssh/id",
        "../home/.ssh/id",
        home + "/.SSH/id",
    ]
    for name in names:
        try:
            return found(text_of(name), place["secret"]) + " by " + name
        except (OSError, Refused):
            pass
    raise Refused("by none of its names")


@ATTEMPTS.made()
def read_a_credential_below_a_directory_that_is_renamed(place):
    """The cover lies on a name below: it must go along."""
    os.rename(place["home"] + "/.config", place["home"] + "/elsewhere")
    try:
        return found(text_of(place["home"] + "/elsewhere/gh/hosts.yml"), place["secret"])
    finally:
        os.rename(place["home"] + "/elsewhere", place["home"] + "/.config")


@ATTEMPTS.made()
def read_a_credential_by_linking_it(place):
    os.link(place["home"] + "/.ssh/id", place["home"] + "/linked")
    return found(text_of(place["home"] + "/linked"), place["secret"])


@ATTEMPTS.made(control="root", needs=no_handles)
def read_a_credential_by_its_handle(place):
    """A handle names the inode, whatever is mounted on its name."""
    handle = ctypes.create_string_buffer(bytes.fromhex(place["handle"]))
    for directory in ("/", place["outside"], place["home"], place["project"]):
        try:
            file = call("open_by_handle_at", os.open(directory, os.O_RDONLY), handle, os.O_RDONLY)
            break
        except OSError as error:
            why = error
    else:
        raise why
    return found(os.read(file, 100).decode(), place["secret"])


def no_disk() -> str | None:
    """A machine that is itself confined keeps even its root from the disk; then there is no control."""
    node = f"{base_directory()}/.elsewhere-escape-{os.getpid()}"
    try:
        os.mknod(node, stat.S_IFBLK | 0o600, os.stat("/").st_dev)
        os.close(os.open(node, os.O_RDONLY))
    except OSError as error:
        return f"nobody can read the disk here: {error}"
    finally:
        Path(node).unlink(missing_ok=True)
    return None


@ATTEMPTS.made(control="root", needs=no_disk)
def read_the_disk_itself(place):
    node = place["scratch"] + "/disk"
    os.mknod(node, stat.S_IFBLK | 0o600, place["device"])
    try:
        return len(os.read(os.open(node, os.O_RDONLY), 512))
    finally:
        os.unlink(node)


@ATTEMPTS.made(control="root")
def read_the_kernels_messages_by_a_device_made_here(place):
    node = place["scratch"] + "/kmsg"
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(1, 11))
    try:
        return os.open(node, os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.unlink(node)


def only_root_makes_devices() -> str | None:
    return None if os.geteuid() == 0 else "only root can make devices"


@ATTEMPTS.made(needs=only_root_makes_devices)
def open_a_device_that_lies_in_the_project(place):
    """Nodes lie in chroots and backups, and may be disks; this one is harmless."""
    return found(repr(os.read(os.open("zero", os.O_RDONLY), 1)), repr(b"\0"))


@ATTEMPTS.made(needs=only_root_makes_devices)
def open_a_device_that_lies_at_home(place):
    return found(repr(os.read(os.open(place["home"] + "/zero", os.O_RDONLY), 1)), repr(b"\0"))


@ATTEMPTS.made(needs=only_root_makes_devices)
def open_a_device_that_lies_anywhere(place):
    return found(repr(os.read(os.open(place["outside"] + "/zero", os.O_RDONLY), 1)), repr(b"\0"))


@ATTEMPTS.made()
def read_what_elsewhere_knows(place):
    """Its state directory, and the layers that mountinfo names."""
    names = [place["state"], place["state"] + "/sandboxes", "/proc/self/root" + place["state"]]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        names += [
            word.partition("=")[2] for word in line.rpartition(" ")[2].split(",") if word.startswith(("upperdir=", "workdir="))
        ]
    for name in names:
        try:
            if seen := os.listdir(name):
                return f"{seen} in {name}"
        except OSError:
            pass
    raise Refused("no name led there")


@ATTEMPTS.made(needs=lambda: None if os.geteuid() == 0 else "only root can make another home")
def read_in_another_home(place):
    return found(text_of(place["other"] + "/notes"), place["secret"])


# -- the view of the project only ---

NARROW = Attempts()


@pytest.fixture(scope="module", params=["root", "user"])
def narrow_trial(request: pytest.FixtureRequest, library: Path, hosts: Callable[[Person], Person]) -> Iterator[Trial]:
    with somebody(request.param, library, hosts) as person:
        place = person.place
        (place / "outside/other-project").mkdir(parents=True)
        (place / "outside/other-project/file").write_text(SECRET)
        (person.home / "notes").write_text(SECRET)
        (person.project / "link-to-notes").symlink_to(person.home / "notes")
        for name in ("outside", "home", "project"):
            person.own(place / name)
        case = Trial(
            person, NARROW, {"secret": SECRET, "outside": str(place / "outside"), "home": str(person.home), "place": str(place)}
        )
        case.run("--view", "project")
        yield case


@NARROW.made()
def read_another_project(place):
    return found(text_of(place["outside"] + "/other-project/file"), place["secret"])


@NARROW.made()
def read_another_project_from_the_own_one(place):
    return found(text_of("/proc/self/cwd/../outside/other-project/file"), place["secret"])


@NARROW.made()
def read_the_notes_at_home(place):
    return found(text_of(place["home"] + "/notes"), place["secret"])


@NARROW.made()
def read_the_notes_by_a_link_in_the_project(place):
    return found(text_of("link-to-notes"), place["secret"])


@NARROW.made()
def see_what_lies_beside_the_project(place):
    return found(repr(os.listdir(place["place"])), "outside")


@NARROW.made(effect=lambda place: os.path.exists(place["home"] + "/left"))
def leave_something_at_home(place):
    with open(place["home"] + "/left", "w") as stream:
        stream.write("x")
    return "left"


@pytest.mark.parametrize("name", NARROW)
def test_it_does_not_get_out_of_the_project(narrow_trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    narrow_trial.judge(name, request)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_does_not_get_out(trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    trial.judge(name, request)
