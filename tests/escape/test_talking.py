"""Sockets, fifos, shared memory, queues, terminals, counters: nobody inside reaches anybody outside, or is reached.

A neighbour, a process of the same person on the host, listens wherever it can. `enforced` says what the kernel of this host cannot
hold: abstract sockets in the host's network before Linux 6.12, and fifos in read-only places.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

from conftest import UID, Person, dismiss, make_person
from escape.attempts import Attempts, Place, Trial, neighbour, somebody, without_landlock
from escape.prelude import (
    LIBC,
    Path,
    Refused,
    checked,
    contextlib,
    ctypes,
    errno,
    fcntl,
    found,
    greeting,
    hold,
    os,
    select,
    socket,
    struct,
    sys,
    text_of,
    threading,
)

ATTEMPTS = Attempts()
WORD = "s3cret-of-a-neighbour"
ADDRESSES = ("SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "WAYLAND_DISPLAY", "DISPLAY", "DOCKER_HOST", "XDG_RUNTIME_DIR")


def neighbour_that_listens(place):
    """On every socket, at the other end of every fifo, with shared memory, semaphores and queues."""

    def answer(server):
        while True:
            caller = server.accept()[0]
            caller.sendall(b"hello")
            caller.close()

    for path in place["sockets"].values():
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        threading.Thread(target=answer, args=(server,), daemon=True).start()
    mailbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mailbox.bind(place["mailbox"])
    for path in place["fifos"].values():
        os.open(path, os.O_RDWR)
    held = os.open(place["lock"], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    key = place["key"]
    create = 0o1000 | 0o600
    memory = checked("shmget", LIBC.shmget(key, 4096, create))
    at = LIBC.shmat(memory, None, 0)
    ctypes.memmove(at, place["word"].encode(), len(place["word"]))
    semaphores = checked("semget", LIBC.semget(key, 1, create))
    queue = checked("msgget", LIBC.msgget(key, create))
    posix = LIBC.mq_open(place["queue"].encode(), os.O_CREAT | os.O_RDWR, 0o600, None)
    checked("mq_open", posix)
    terminal, slave = os.openpty()
    os.setsid()
    fcntl.ioctl(slave, 0x540E, 0)  # its controlling terminal, as it is for a shell
    try:
        hold({"terminal": os.ttyname(slave), "memory": memory, "semaphores": semaphores, "messages": queue})
    finally:
        os.close(terminal)
        LIBC.shmctl(memory, 0, None)
        LIBC.semctl(semaphores, 0, 0)
        LIBC.msgctl(queue, 0, None)
        LIBC.mq_unlink(place["queue"].encode())


@contextlib.contextmanager
def planted(person: Person) -> Iterator[Place]:
    name = f"elsewhere-escape-{os.getpid()}-{person.name}"
    beside = person.place / "beside"
    beside.mkdir()
    (beside / "lock").touch()
    (person.home / ".gnupg").mkdir()
    directories = [
        Path(tempfile.mkdtemp(prefix=name, dir=parent))
        for parent in ("/tmp", "/var/tmp", "/dev/shm", "/run")
        if os.access(parent, os.W_OK)
    ]
    for directory in (*directories, beside, person.home):
        person.own(directory)
    sockets = {directory.parts[1]: str(directory / "socket") for directory in directories}
    sockets |= {"vartmp": sockets.pop("var"), "shm": sockets.pop("dev")}
    fifos = {"project": person.project / "fifo", "home": person.home / "fifo", "beside": beside / "fifo"}
    for fifo in fifos.values():
        os.mkfifo(fifo)
        if os.geteuid() == 0:
            os.chown(fifo, person.uid, person.uid)
    shared = Path("/dev/shm") / name
    shared.write_text(WORD)
    if os.geteuid() == 0:
        os.chown(shared, person.uid, person.uid)
    try:
        yield {
            "word": WORD,
            "sockets": {
                **sockets,
                "home": str(person.home / "socket"),
                "agent": str(person.home / ".gnupg/S.gpg-agent"),
                "project": str(person.project / "socket"),
                "beside": str(beside / "socket"),
                "abstract": f"\0{name}",
            },
            "mailbox": str(person.project / "mailbox"),
            "fifos": {key: str(value) for key, value in fifos.items()},
            "shared": str(shared),
            "lock": str(beside / "lock"),
            "key": os.getpid() << 1 | person.is_root,
            "queue": f"/{name}",
        }
    finally:
        for directory in directories:
            shutil.rmtree(directory)
        shared.unlink()


@pytest.fixture(scope="module", params=["root", "user"])
def trial(request: pytest.FixtureRequest, library: Path, hosts: Callable[[Person], Person]) -> Iterator[Trial]:
    with (
        somebody(request.param, library, hosts) as person,
        planted(person) as place,
        neighbour(person, neighbour_that_listens, place) as other,
    ):
        person.extra = dict.fromkeys(ADDRESSES, f"unix:path={place['sockets']['beside']}")
        person.extra["PASSWORD_OF_THE_CALLER"] = WORD
        handed = os.open(place["shared"], os.O_RDONLY)
        terminal = os.open(other.said["terminal"], os.O_RDWR | os.O_NOCTTY)
        try:
            case = Trial(person, ATTEMPTS, {**place, **other.said, "handed": handed})
            os.set_inheritable(handed, True)
            case.run(stdin=terminal, pass_fds=[handed])
            yield case
        finally:
            os.close(handed)
            os.close(terminal)


def no_family(number: int) -> str | None:
    try:
        socket.socket(number, socket.SOCK_STREAM).close()
    except OSError as error:
        return f"this kernel has no such sockets: {error}"
    return None


def abstract_sockets_are_open(trial: Trial) -> str | None:
    """What the kernel cannot close must be said."""
    said = trial.enforced["abstract_sockets"]
    assert said.startswith(("reachable: ", "unreachable: "))
    return said if said.startswith("reachable: ") else None


# -- sockets ---


@ATTEMPTS.made()
def talk_to_a_socket_in_the_project(place):
    return greeting(place["sockets"]["project"])


@ATTEMPTS.made()
def talk_to_a_socket_in_the_home(place):
    return greeting(place["sockets"]["home"])


@ATTEMPTS.made()
def talk_to_an_agent_in_a_hidden_place(place):
    return greeting(place["sockets"]["agent"])


@ATTEMPTS.made()
def talk_to_a_socket_in_a_place_that_is_only_read(place):
    return greeting(place["sockets"]["beside"])


@ATTEMPTS.made()
def talk_to_a_socket_in_tmp(place):
    return greeting(place["sockets"]["tmp"])


@ATTEMPTS.made()
def talk_to_a_socket_in_var_tmp(place):
    return greeting(place["sockets"]["vartmp"])


@ATTEMPTS.made()
def talk_to_a_socket_in_shared_memory(place):
    return greeting(place["sockets"]["shm"])


@ATTEMPTS.made(needs=lambda: None if os.access("/run", os.W_OK) else "only root can listen in /run")
def talk_to_a_socket_in_run(place):
    return greeting(place["sockets"]["run"])


@ATTEMPTS.made()
def talk_to_a_socket_by_a_link_to_it(place):
    name = f"/tmp/elsewhere-link-{os.getpid()}"
    os.symlink(place["sockets"]["beside"], name)
    try:
        return greeting(name)
    finally:
        os.unlink(name)


@ATTEMPTS.made()
def talk_to_a_socket_by_its_descriptor(place):
    """A path descriptor and its magic link."""
    file = os.open(place["sockets"]["beside"], os.O_PATH)
    return greeting(f"/proc/self/fd/{file}")


@ATTEMPTS.made()
def send_a_datagram_to_the_project(place):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        return sender.sendto(b"hello", place["mailbox"])


@ATTEMPTS.made()
def hand_out_a_descriptor(place):
    """By SCM_RIGHTS, to whoever waits in the project."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(place["mailbox"])
        return socket.send_fds(sender, [b"x"], [0])


@ATTEMPTS.made(open=abstract_sockets_are_open)
def talk_to_an_abstract_socket(place):
    return greeting(place["sockets"]["abstract"])


@ATTEMPTS.made()
def use_the_agents_that_the_environment_names(place):
    """SSH, D-Bus, Wayland, X, Docker."""
    for name in ("SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "WAYLAND_DISPLAY", "DISPLAY", "DOCKER_HOST", "XDG_RUNTIME_DIR"):
        if name in os.environ:
            return greeting(os.environ[name].partition("=")[2])
    raise Refused("none is named")


@ATTEMPTS.made()
def read_the_secrets_of_the_callers_environment(place):
    return found(repr(dict(os.environ)), place["word"])


@ATTEMPTS.made(control="namespaces")
def send_packets_of_any_kind(place):
    return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).fileno()


@ATTEMPTS.made(control="namespaces")
def listen_to_the_wire(place):
    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)).fileno()


@ATTEMPTS.made(control="namespaces")
def change_the_network(place):
    """By netlink, as `ip link add elsewhere0 type bridge` does; the error number comes back in a message."""
    about = struct.pack("=HH", 15, 3) + b"elsewhere0\0\0"
    kind = struct.pack("=HH", 10, 1) + b"bridge\0\0"
    about = struct.pack("=HH", 4 + 11, 3) + b"elsewhere0\0" + b"\0"
    about += struct.pack("=HH", 4 + len(kind), 18) + kind
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + about
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(5)
        link.send(struct.pack("=IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
        number = -struct.unpack_from("=i", link.recv(4096), 16)[0]
    if number in (errno.EPERM, errno.EACCES):
        raise OSError(number, os.strerror(number))
    return os.strerror(number)


@ATTEMPTS.made(needs=lambda: no_family(40))
def talk_to_the_machine_below(place):
    """AF_VSOCK leads from a virtual machine to its host."""
    return socket.socket(40, socket.SOCK_STREAM).fileno()


# -- fifos and locks ---


def locks_are_shared(trial: Trial) -> str | None:
    return None if trial.person.is_root else "a read-only mount has the host's own files: a lock on one of them is a lock outside"


@ATTEMPTS.made(open=locks_are_shared)
def see_that_somebody_outside_holds_a_lock(place):
    """Who sees it could hold it as well, and keep others waiting."""
    try:
        fcntl.flock(os.open(place["lock"], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "somebody has it"
    raise Refused("it is free here")


@ATTEMPTS.made()
def write_into_a_fifo_in_the_project(place):
    return os.write(os.open(place["fifos"]["project"], os.O_WRONLY | os.O_NONBLOCK), b"hello")


@ATTEMPTS.made()
def write_into_a_fifo_in_the_home(place):
    return os.write(os.open(place["fifos"]["home"], os.O_WRONLY | os.O_NONBLOCK), b"hello")


@ATTEMPTS.made(open=without_landlock)
def write_into_a_fifo_in_a_place_that_is_only_read(place):
    return os.write(os.open(place["fifos"]["beside"], os.O_WRONLY | os.O_NONBLOCK), b"hello")


# -- shared memory, semaphores, queues ---


@ATTEMPTS.made()
def read_shared_memory(place):
    memory = checked("shmget", LIBC.shmget(place["key"], 4096, 0o600))
    return found(ctypes.string_at(LIBC.shmat(memory, None, 0), 100).decode(), place["word"])


@ATTEMPTS.made()
def attach_shared_memory_by_its_number(place):
    at = LIBC.shmat(place["memory"], None, 0)
    if at is None or ctypes.c_long(at).value == -1:
        raise OSError(ctypes.get_errno(), "shmat")
    return found(ctypes.string_at(at, 100).decode(), place["word"])


@ATTEMPTS.made()
def change_a_semaphore(place):
    semaphores = checked("semget", LIBC.semget(place["key"], 1, 0o600))
    return checked("semop", LIBC.semop(semaphores, struct.pack("Hhh", 0, 1, 0), 1))


@ATTEMPTS.made()
def put_a_message_into_a_queue(place):
    queue = checked("msgget", LIBC.msgget(place["key"], 0o600))
    return checked("msgsnd", LIBC.msgsnd(queue, struct.pack("l5s", 1, b"hello"), 5, 0))


@ATTEMPTS.made()
def open_a_posix_queue(place):
    return checked("mq_open", LIBC.mq_open(place["queue"].encode(), os.O_WRONLY))


@ATTEMPTS.made()
def read_posix_shared_memory(place):
    return found(text_of(place["shared"]), place["word"])


@ATTEMPTS.made()
def see_what_others_share(place):
    """The tables of /proc/sysvipc."""
    tables = "".join(text_of(f"/proc/sysvipc/{name}") for name in ("shm", "sem", "msg"))
    return found(tables, str(place["key"]))


# -- terminals and descriptors ---


@ATTEMPTS.made()
def write_to_another_terminal(place):
    """A terminal of the neighbour, by its number."""
    return os.write(os.open(place["terminal"], os.O_WRONLY | os.O_NOCTTY), b"hello")


@ATTEMPTS.made(control="root")
def push_keys_into_the_terminal_of_the_caller(place):
    """Standard input is the caller's terminal. TIOCSTI needs it to be one's own, or a power."""
    return fcntl.ioctl(0, 0x5412, b"x")


@ATTEMPTS.made(control="root")
def push_keys_with_bits_that_nobody_looks_at(place):
    """The kernel takes the low half of the number only."""
    return checked(
        "ioctl", LIBC.syscall(ctypes.c_long(16 if os.uname().machine == "x86_64" else 29), 0, ctypes.c_long(0x1_00005412), b"x")
    )


@ATTEMPTS.made(
    needs=lambda: (
        None
        if not os.path.exists("/proc/sys/dev/tty/legacy_tiocsti") or text_of("/proc/sys/dev/tty/legacy_tiocsti").strip() == "1"
        else "TIOCSTI is switched off here"
    )
)
def push_keys_into_an_own_terminal(place):
    """Whoever holds the other end would read them as typed."""
    os.setsid()
    _, slave = os.openpty()
    fcntl.ioctl(slave, 0x540E, 0)
    return fcntl.ioctl(slave, 0x5412, b"x")


@ATTEMPTS.made()
def use_a_descriptor_of_the_caller(place):
    os.lseek(place["handed"], 0, os.SEEK_SET)
    return found(os.read(place["handed"], 100).decode(), place["word"])


@ATTEMPTS.made(control="root")
def take_the_terminal_of_the_caller_away(place):
    """TIOCSCTTY by force: then keys typed there are signals here, and the caller's shell loses it. The last one: it does."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    return fcntl.ioctl(0, 0x540E, 1)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_does_not_get_out(trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    trial.judge(name, request)


# -- shared counters ---


def take_inotify_instances(place):
    """As many as there are, and then wait."""
    files = []
    with contextlib.suppress(OSError):
        while len(files) < 5000:
            files.append(checked("inotify_init1", LIBC.inotify_init1(0)))
    hold({"taken": len(files)})


ONE_INSTANCE = (
    "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); print(c.inotify_init1(0) >= 0 or os.strerror(ctypes.get_errno()))"
)


@pytest.fixture(params=["root", "user"])
def loner(request: pytest.FixtureRequest, library: Path) -> Iterator[Person]:
    """Somebody whose id nobody else has who runs tests at the same time: what is counted for an id is counted for them alone."""
    someone = make_person(request.param, library, uid=UID + 1 + os.getpid() % 10_000)
    assert someone.project
    yield someone
    dismiss(someone)


@pytest.mark.skipif(
    int(text_of("/proc/sys/fs/inotify/max_user_instances")) > 900, reason="one process cannot take all instances of inotify here"
)
def test_a_sandbox_that_takes_inotify_instances_leaves_some_to_others(loner: Person) -> None:
    def one_more() -> str:
        return loner.shell(loner.python, "-I", "-c", ONE_INSTANCE).stdout

    if not loner.is_root:  # root's are needed on this machine
        with neighbour(loner, take_inotify_instances, {}) as other:
            assert other.said["taken"] > 1
            assert one_more() == "Too many open files\n"
    assert one_more() == "True\n"
    with neighbour(loner, take_inotify_instances, {}, inside=("run", "--discard", "--")) as other:
        assert other.said["taken"] > 1
        assert one_more() == "True\n"
        done = loner.elsewhere("run", "--discard", "--", loner.python, "-I", "-c", ONE_INSTANCE)
        assert done.stdout == "True\n", done.stderr


# -- descriptors ---


def test_a_descriptor_that_the_caller_closed_is_not_one_of_elsewheres(person: Person) -> None:
    """The number that is free goes to whatever is opened first: that must not be a socket of ours."""
    look = 'readlink /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 > "$1"'
    end, other = socket.socketpair()
    with end, other:
        assert person.shell("sh", "-c", "readlink /proc/self/fd/0", stdin=end).stdout.startswith("socket:")
    words = person.command("run", "--keep", "--", "sh", "-c", look, "sh", "seen")
    person.shell("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words, cwd=person.project)
    seen = person.elsewhere("exec", "@last", "--", "cat", "seen").stdout.split()
    assert seen[:1] + seen[2:] == ["/dev/null"] * 2, seen


# -- what comes later ---


def talk_to_a_socket_that_comes_later(place):
    """It is not there when the sandbox is made: no cover lies on it."""
    print("{}", flush=True)
    sys.stdin.readline()
    try:
        print(greeting(place["later"]), flush=True)
    except OSError as error:
        print(error.strerror, flush=True)


def test_a_socket_that_comes_later_is_not_reached(person: Person, request: pytest.FixtureRequest) -> None:
    if not person.is_root:
        why = "a socket that appears later in a read-only place has no cover"
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    later = person.place / "later"
    for inside in ((), ("run", "--discard", "--")):
        with (
            neighbour(person, talk_to_a_socket_that_comes_later, {"later": str(later)}, inside=inside) as caller,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.bind(str(later))
            server.listen()
            later.chmod(0o777)
            said = caller.process.stdout
            assert said
            assert caller.process.stdin
            caller.process.stdin.write("\n")
            caller.process.stdin.flush()
            if server in select.select([server, said], [], [], 60)[0]:
                connection = server.accept()[0]
                connection.sendall(b"hello")
                connection.close()
            answer = said.readline()
        later.unlink()
        assert (answer == "hello\n") == (not inside), answer
