"""procfs and sysfs: the kernel's settings, its secrets, its other processes, and its ways to start programs as root.

A file that would harm this machine if it were written is only opened for writing, or gets the value that it has.
"""

from collections.abc import Callable, Iterator

import pytest

from conftest import Person
from escape.attempts import Attempts, Place, Trial, neighbour, somebody
from escape.prelude import Path, Refused, found, hold, os, stat, text_of

ATTEMPTS = Attempts()
SECRET = "s3cret-of-a-neighbour"


def having(path: str) -> Callable[[], str | None]:
    """A reason why an attempt cannot be made here: this kernel has no such file."""
    return lambda: None if os.path.exists(path) else f"there is no {path} here"


def no_formats() -> str | None:
    """Not by looking there: that would mount it on a machine that mounts it on demand."""
    mounts = Path("/proc/self/mountinfo").read_text()
    return None if " - binfmt_misc " in mounts else "binfmt_misc is not mounted here"


def neighbour_with_a_secret(place):
    """Its environment has it; it can be traced and read by whoever may."""
    hold({"here": os.getpid()})


def plant(person: Person) -> Place:
    return {"home": str(person.home), "secret": SECRET}


@pytest.fixture(scope="module", params=["root", "user"])
def trial(request: pytest.FixtureRequest, library: Path, hosts: Callable[[Person], Person]) -> Iterator[Trial]:
    with somebody(request.param, library, hosts) as person:
        place = plant(person)
        environment = {**person.environment(), "PASSWORD": SECRET}
        with neighbour(person, neighbour_with_a_secret, place, env=environment) as other:
            case = Trial(person, ATTEMPTS, {**place, "neighbour": other.process.pid})
            case.run()
            yield case


@ATTEMPTS.made(control="root")
def name_a_program_for_core_dumps(place):
    """It would be run as root, in reality."""
    pattern = text_of("/proc/sys/kernel/core_pattern")
    with open("/proc/sys/kernel/core_pattern", "w") as stream:
        stream.write(pattern)
    return "written"


@ATTEMPTS.made(control="root", needs=having("/proc/sys/kernel/modprobe"))
def name_a_program_for_modules(place):
    program = text_of("/proc/sys/kernel/modprobe")
    with open("/proc/sys/kernel/modprobe", "w") as stream:
        stream.write(program)
    return "written"


@ATTEMPTS.made(control="root", needs=having("/sys/kernel/uevent_helper"))
def name_a_program_for_devices(place):
    program = text_of("/sys/kernel/uevent_helper")
    with open("/sys/kernel/uevent_helper", "w") as stream:
        stream.write(program)
    return "written"


@ATTEMPTS.made(control="root", needs=no_formats)
def name_a_program_for_formats(place):
    return os.open("/proc/sys/fs/binfmt_misc/register", os.O_WRONLY)


@ATTEMPTS.made(control="root", needs=having("/proc/sysrq-trigger"))
def press_the_magic_key(place):
    file = os.open("/proc/sysrq-trigger", os.O_WRONLY)
    if stat.S_ISCHR(os.fstat(file).st_mode):
        raise Refused("it is /dev/null")
    return "opened"


@ATTEMPTS.made(control="root")
def change_a_setting_of_the_kernel(place):
    for path in ("/proc/sys/vm/swappiness", "/proc/sys/kernel/randomize_va_space"):
        value = text_of(path)
        with open(path, "w") as stream:
            stream.write(value)
    return "written"


@ATTEMPTS.made(control="root")
def make_the_caches_go(place):
    with open("/proc/sys/vm/drop_caches", "w"):
        return "opened"


@ATTEMPTS.made(control="root", needs=having("/proc/kcore"))
def read_the_memory_of_the_kernel(place):
    with open("/proc/kcore", "rb") as stream:
        return found(repr(stream.read(4)), "ELF")


@ATTEMPTS.made(control="root", needs=having("/proc/kallsyms"))
def read_the_addresses_of_the_kernel(place):
    addresses = [line.split(" ")[0] for line in text_of("/proc/kallsyms").splitlines()]
    if not any(address.strip("0") for address in addresses):  # some really lie at zero
        raise Refused("only zeros" if addresses else "nothing")
    return "an address"


@ATTEMPTS.made(control="root", needs=having("/proc/kmsg"))
def read_the_messages_of_the_kernel(place):
    file = os.open("/proc/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISCHR(os.fstat(file).st_mode):
        raise Refused("it is /dev/null")
    return "opened"


@ATTEMPTS.made(control="root", needs=having("/dev/kmsg"))
def write_to_the_log_of_the_kernel(place):
    return os.open("/dev/kmsg", os.O_WRONLY)


@ATTEMPTS.made(control="root", needs=having("/dev/mem"))
def read_the_memory_of_the_machine(place):
    return os.open("/dev/mem", os.O_RDONLY)


@ATTEMPTS.made(needs=having("/proc/keys"), control="root")
def read_which_keys_there_are(place):
    if not text_of("/proc/keys"):
        raise Refused("nothing")
    return "keys"


@ATTEMPTS.made(control="root")
def make_a_control_group(place):
    """Version 1's release_agent and version 2's limits both begin with that."""
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for root in (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            group = f"{root}{path}/elsewhere-escape-{os.getpid()}"
            try:
                os.mkdir(group)
            except OSError:
                continue
            try:
                return os.stat(f"{group}/cgroup.procs").st_uid
            except OSError:
                continue  # a plain directory
            finally:
                os.rmdir(group)
    raise Refused("nowhere")


@ATTEMPTS.made(
    control="root", needs=lambda: None if list(Path("/sys/fs/cgroup").glob("*/release_agent")) else "no cgroups of version 1 here"
)
def name_a_program_for_empty_groups(place):
    for path in Path("/sys/fs/cgroup").glob("*/release_agent"):
        os.close(os.open(path, os.O_WRONLY))
        return str(path)
    raise Refused("there is none")


@ATTEMPTS.made(control="root", needs=having("/sys/power/state"))
def put_the_machine_to_sleep(place):
    return os.open("/sys/power/state", os.O_WRONLY)


@ATTEMPTS.made(control="root", needs=having("/sys/kernel/mm/transparent_hugepage/enabled"))
def change_a_setting_in_sysfs(place):
    value = text_of("/sys/kernel/mm/transparent_hugepage/enabled")
    with open("/sys/kernel/mm/transparent_hugepage/enabled", "w") as stream:
        stream.write(value.partition("[")[2].partition("]")[0])
    return "written"


@ATTEMPTS.made(
    control="root", needs=lambda: None if list(Path("/sys/bus/pci/devices").glob("*/config")) else "no PCI devices here"
)
def write_to_a_device_by_sysfs(place):
    return os.open(next(Path("/sys/bus/pci/devices").glob("*/config")), os.O_RDWR)


@ATTEMPTS.made()
def read_the_environment_of_a_neighbour(place):
    return found(text_of(f"/proc/{place['neighbour']}/environ"), place["secret"])


@ATTEMPTS.made()
def find_a_neighbour_by_its_secret(place):
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and place["secret"] in text_of(f"/proc/{name}/environ"):
                return name
        except OSError:
            pass
    raise Refused("nobody has it")


@ATTEMPTS.made()
def reach_files_by_way_of_a_neighbours_root(place):
    return os.listdir(f"/proc/{place['neighbour']}/root/")


@ATTEMPTS.made(control="namespaces")
def reach_files_by_way_of_the_first_process(place):
    return os.listdir("/proc/1/root/") + os.listdir("/proc/1/cwd/")


@ATTEMPTS.made(control="namespaces")
def read_the_environment_and_memory_of_the_first_process(place):
    """Inside it is the keeper, which knows where the state directory lies; in the control it is a process like others."""
    os.open("/proc/1/mem", os.O_RDWR)
    return len(text_of("/proc/1/environ"))


@ATTEMPTS.made(control="namespaces")
def take_a_descriptor_of_the_first_process(place):
    return [os.readlink(f"/proc/1/fd/{name}") for name in os.listdir("/proc/1/fd")]


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_does_not_get_out(trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    trial.judge(name, request)
