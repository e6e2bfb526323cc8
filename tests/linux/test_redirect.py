"""Programs that know no proxy, in a network namespace that has nothing but loopback: what is allowed is reached, and nothing hangs.

The namespace is made by an ordinary process of that person; it hands its sockets to the test, which serves them from outside, as
the product does.
"""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from conftest import Person
from elsewhere.network import rules as policy
from elsewhere.network.answers import Denied
from elsewhere.network.dialling import Resolver
from elsewhere.network.redirected import Redirected
from elsewhere.network.resolving import Book, Names
from elsewhere.network.rules import Rules, parse
from proxied import LOOPBACK, Origin, exactly, hello, origin

AGENT = """
import json, os, socket, subprocess, sys
from elsewhere.linux import network, redirect, syscalls, userns

channel = socket.socket(fileno=int(sys.argv[1]))
uid, gid = os.getuid(), os.getgid()
syscalls.unshare((0 if uid == 0 else 0x10000000) | 0x40000000 | syscalls.CLONE_NEWNS)
if uid:
    userns.map_myself(uid, gid)
syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
syscalls.mount(sys.argv[2], "/etc/resolv.conf", None, syscalls.MS_BIND)
network.raise_loopback()
try:
    redirect.install(61081, 61053)
except OSError as error:
    channel.sendall(json.dumps({"error": str(error)}).encode())
    sys.exit(0)
listener = socket.create_server(("127.0.0.1", 61081), backlog=128)
names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
names.bind(("127.0.0.1", 61053))
socket.send_fds(channel, [b"{}"], [listener.fileno(), names.fileno()])
for line in channel.makefile("r"):
    done = subprocess.run(json.loads(line), capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    channel.sendall(json.dumps([done.returncode, done.stdout, done.stderr]).encode() + b"\\n")
"""

TRY = """
import errno, json, socket, struct, sys
def tried(what):
    try:
        return what()
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
def udp(host, port, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(20)
        sock.connect((host, port))
        sock.send(b"x")
        return repr(sock.recv(99))
def tcp(host, port, family=socket.AF_INET):
    with socket.socket(family) as sock:
        sock.settimeout(20)
        sock.connect((host, port))
        return repr(sock.recv(99))
def ping(host):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as sock:
        sock.settimeout(20)
        sock.sendto(struct.pack("!BBHHH", 8, 0, 0, 0, 0) + b"question", (host, 0))
        return repr(sock.recv(99)[8:])
"""


@dataclass
class Inside:
    person: Person
    channel: socket.socket
    replies: Any
    rules: Rules
    names: dict[str, str]
    denied: list[Denied] = field(default_factory=list)

    def run(self, *argv: str) -> tuple[int, str, str]:
        self.channel.sendall(json.dumps(argv).encode() + b"\n")
        code, out, err = json.loads(self.replies.readline())
        return code, out, err

    def tried(self, expression: str) -> Any:
        code, out, err = self.run(self.person.python, "-c", f"{TRY}\nprint(json.dumps(tried(lambda: {expression})))")
        assert code == 0, err
        return json.loads(out)

    def lookup(self, host: str, _port: int) -> list[str]:
        return [self.names.get(host, LOOPBACK)]


@contextlib.contextmanager
def inside(person: Person, *allow: str, names: dict[str, str] | None = None) -> Iterator[Inside]:
    settings = person.place / "resolv.conf"
    settings.write_text("nameserver 192.0.2.53\noptions timeout:20 attempts:1\n")
    near, far = socket.socketpair()
    command = [person.python, "-c", AGENT, str(far.fileno()), str(settings)]
    agent = subprocess.Popen(
        command, pass_fds=[far.fileno()], env=person.environment(), cwd=person.place, stderr=subprocess.PIPE, **person.identity()
    )
    far.close()
    near.settimeout(100)
    with near, agent:
        try:
            message, fds, _, _ = socket.recv_fds(near, 4096, 2)
            if not fds:
                pytest.skip(json.loads(message)["error"] if message else agent.communicate()[1].decode()[-300:])
            rules = Rules(allow=tuple(map(parse, allow)), presets=())
            with (
                near.makefile("r") as replies,
                socket.socket(fileno=fds[0]) as listener,
                socket.socket(fileno=fds[1]) as questions,
            ):
                found = Inside(person, near, replies, rules, names or {})
                with _served(found, listener, questions):
                    yield found
        finally:
            near.shutdown(socket.SHUT_RDWR)
            agent.wait(30)


@contextlib.contextmanager
def _served(found: Inside, listener: socket.socket, questions: socket.socket) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    resolver, book = Resolver(found.lookup, seconds=5.0), Book()

    async def serve() -> None:
        redirected = Redirected(
            listener,
            lambda host, port: policy.decide(found.rules, host, port, "calm-otter"),
            book,
            resolver=resolver,
            observe=found.denied.append,
            sandbox="calm-otter",
        )
        names = Names(questions, book, lambda name: policy.decide_name(found.rules, name, "calm-otter"), found.denied.append)
        await asyncio.gather(redirected.serve(), names.serve())

    future = asyncio.run_coroutine_threadsafe(serve(), loop)
    try:
        yield
    finally:
        future.cancel()
        with contextlib.suppress(BaseException):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        resolver.close()


def greets(sock: socket.socket, server: Origin) -> None:
    sock.sendall(b"welcome")


def test_a_plain_socket_reaches_what_is_allowed_by_its_name(person: Person) -> None:
    with origin(greets) as server, inside(person, f"server.test:{server.port}") as box:
        assert box.tried(f"tcp('server.test', {server.port})") == "b'welcome'"
        # As Java has it: a socket of IPv6 to an address of IPv4.
        assert box.tried(f"tcp('::ffff:' + socket.gethostbyname('server.test'), {server.port}, socket.AF_INET6)") == "b'welcome'"
        assert box.denied == []


def test_an_address_that_is_allowed_is_reached_by_itself(person: Person) -> None:
    with inside(person, "192.0.2.7:4444") as box:
        # Nobody is there, so it is not reached; but it was not refused, either.
        box.tried("tcp('192.0.2.7', 4445)")
        assert [(one.host, one.port) for one in box.denied] == [("192.0.2.7", 4445)]


def test_a_large_conversation_passes_whole(person: Person) -> None:
    size = 8 << 20

    def doubles(sock: socket.socket, server: Origin) -> None:
        assert exactly(sock, size) == b"x" * size
        sock.sendall(b"y" * size)

    code = """
        import socket, sys
        sock = socket.create_connection(("server.test", int(sys.argv[1])), timeout=60)
        sock.sendall(b"x" * (8 << 20)); sock.shutdown(socket.SHUT_WR)
        print(sum(len(data) for data in iter(lambda: sock.recv(65536), b"")))
    """
    with origin(doubles) as server, inside(person, f"server.test:{server.port}") as box:
        lines = "\n".join(line.strip() for line in code.strip().splitlines())
        assert box.run(person.python, "-c", lines, str(server.port)) == (0, f"{size}\n", "")


def test_a_name_that_nothing_allows_does_not_exist_and_is_told(person: Person) -> None:
    with inside(person) as box:
        assert box.tried("socket.getaddrinfo('evil.test', 443)") == "gaierror"
        assert [(one.host, one.port, one.how) for one in box.denied] == [
            ("evil.test", 0, "elsewhere network calm-otter --allow evil.test (for the web; else --allow evil.test:PORT)")
        ]


def test_a_name_is_allowed_on_its_port_and_no_other(person: Person) -> None:
    with origin(greets) as server, inside(person, f"server.test:{server.port}") as box:
        assert box.tried("tcp('server.test', 4444)") == "ECONNRESET"
        assert [(one.host, one.port) for one in box.denied] == [("server.test", 4444)]


@pytest.mark.parametrize("address", ["10.0.0.5", "169.254.169.254", "127.0.0.1", "192.168.1.1"])
def test_no_name_leads_to_the_host_or_its_neighbours(person: Person, address: str) -> None:
    with inside(person, "server.test", names={"server.test": address}) as box:
        assert box.tried("tcp('server.test', 443)") == "ECONNRESET"
        assert len(box.denied) == 1
        assert address in box.denied[0].rule


def test_loopback_is_the_sandboxs_own(person: Person) -> None:
    with origin(greets) as server, inside(person, f"127.0.0.1:{server.port}", f"localhost:{server.port}") as box:
        assert box.tried(f"tcp('127.0.0.1', {server.port})") == "ECONNREFUSED"
        assert box.tried(f"tcp('0.0.0.0', {server.port})") == "ECONNREFUSED"
        assert box.tried(f"tcp('198.19.255.254', {server.port})") == "ECONNREFUSED"
        assert box.tried("tcp('127.0.0.53', 53)") == "ECONNREFUSED"
        assert box.denied == []


def test_whoever_comes_straight_to_us_goes_nowhere(person: Person) -> None:
    with inside(person) as box:
        assert box.tried("tcp('127.0.0.1', 61081)") == "ECONNRESET"
        assert box.tried("tcp('198.18.7.7', 443)") == "ECONNRESET"
        assert [one.host for one in box.denied] == ["198.18.7.7"]


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        ("udp('192.0.2.1', 443)", "EPERM"),
        ("udp('224.0.0.251', 5353)", "EPERM"),
        ("udp('2001:db8::1', 53, socket.AF_INET6)", "ENETUNREACH"),
        ("tcp('2001:db8::1', 443, socket.AF_INET6)", "ENETUNREACH"),
        ("tcp('224.0.0.1', 443)", "ENETUNREACH"),
    ],
)
def test_what_cannot_pass_is_refused_at_once(person: Person, attempt: str, error: str) -> None:
    with inside(person) as box:
        assert box.tried(attempt) == error


def test_a_ping_of_anywhere_is_not_answered_by_ourselves(root: Person) -> None:
    with inside(root) as box:
        assert box.tried("ping('127.0.0.1')") == "b'question'"
        assert box.tried("ping('192.0.2.1')") == "EPERM"


def test_every_resolver_is_ours_except_one_on_loopback_itself(person: Person) -> None:
    question = "b'\\x00\\x07\\x01\\x00\\x00\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x09localhost\\x00\\x00\\x01\\x00\\x01'"
    code = (
        "import socket, sys\nfor host in sys.argv[1:]:\n s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20)\n"
        f" s.sendto({question}, (host, 53)); data, sender = s.recvfrom(999); print(sender, data[-4:] == bytes([127, 0, 0, 1]))"
    )
    with inside(person) as box:
        _, out, err = box.run(person.python, "-c", code, "192.0.2.53", "127.0.0.53", "198.19.255.254")
        assert out == "('192.0.2.53', 53) True\n('127.0.0.53', 53) True\n('198.19.255.254', 53) True\n", err
        assert box.tried("udp('127.0.0.1', 53)") == "ECONNREFUSED"


def test_connections_of_loopback_with_itself_are_not_remembered(root: Person) -> None:
    code = (
        "import socket\nlistener = socket.create_server(('127.0.0.1', 0))\nfor _ in range(50):\n"
        " with socket.create_connection(listener.getsockname()), listener.accept()[0]: pass\n"
        "print(open('/proc/sys/net/netfilter/nf_conntrack_count').read())"
    )
    with inside(root) as box:
        assert box.run(root.python, "-c", code)[1].split() == ["0"]


@pytest.mark.parametrize(("before", "error"), [("syscalls.capset(0, 0, 0)", "EPERM"), ("redirect.install(1, 2)", "EEXIST")])
def test_where_it_cannot_be_it_says_so_and_leaves_no_route_into_nothing(person: Person, before: str, error: str) -> None:
    code = f"""
import errno, os
from elsewhere.linux import network, redirect, syscalls, userns
uid, gid = os.getuid(), os.getgid()
syscalls.unshare((0 if uid == 0 else 0x10000000) | 0x40000000)
if uid:
    userns.map_myself(uid, gid)
network.raise_loopback()
{before}
routes = open("/proc/net/route").read()
try:
    redirect.install(61081, 61053)
except OSError as caught:
    print(errno.errorcode[caught.errno], open("/proc/net/route").read() == routes)
"""
    assert person.shell(person.python, "-c", code).stdout == f"{error} True\n"


# -- programs -------------------------------------------------------------------------------------------------------------------


def program(name: str) -> str:
    return shutil.which(name) or pytest.skip(f"there is no {name} here")


def test_curl_is_answered_in_words(person: Person) -> None:
    with inside(person, "server.test:8443") as box:
        code, out, _ = box.run(program("curl"), "-sS", "http://server.test/", "--max-time", "30")
        assert code == 0
        assert "elsewhere refused server.test:80" in out
        assert "elsewhere network calm-otter --allow server.test" in out
        code, _, err = box.run(program("curl"), "-sS", "https://server.test/", "--max-time", "30")
        assert code == 35
        assert "access denied" in err.lower()


def test_ssh_is_told_what_to_type(person: Person) -> None:
    ssh = program("ssh")
    with inside(person, "server.test") as box:
        code, _, err = box.run(
            ssh, "-F", "/dev/null", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "git@server.test"
        )
        if "No user exists" in err:
            pytest.skip("ssh wants an entry in the user database")
        assert code == 255
        assert "elsewhere network calm-otter --allow server.test:22" in err


@pytest.mark.parametrize("encryption", ["disable", "prefer"])
def test_psql_is_told_what_to_type(person: Person, encryption: str) -> None:
    with inside(person, "server.test") as box:
        code, _, err = box.run(program("psql"), f"postgresql://someone@server.test/database?sslmode={encryption}")
        assert code == 2
        assert "elsewhere network calm-otter --allow server.test:5432" in err


def test_node_fetches(person: Person) -> None:
    node = program("node")
    with origin(hello) as server, inside(person, f"server.test:{server.port}") as box:
        code, out, err = box.run(node, "-e", f"fetch('http://server.test:{server.port}/').then(r => r.text()).then(console.log)")
        assert (code, out) == (0, "hello\n"), err


def test_java_connects(person: Person) -> None:
    java = program("java")
    source = person.place / "Ask.java"
    source.write_text(
        "public class Ask { public static void main(String[] a) throws Exception { try (var s = new java.net.Socket(a[0], Integer.parseInt(a[1])))"
        " { System.out.println(new String(s.getInputStream().readAllBytes())); } } }"
    )
    with origin(greets) as server, inside(person, f"server.test:{server.port}") as box:
        code, out, err = box.run(java, str(source), "server.test", str(server.port))
        if "compiler" in err:
            pytest.skip("this Java has no compiler")
        assert (code, out) == (0, "welcome\n"), err
