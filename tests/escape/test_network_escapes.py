"""Ways out of a sandbox's network that are not its rules: other protocols, other addresses, other spellings, other people's doors.

A neighbour on the host has a server for each of them, on loopback, and a proxy that refuses nobody. What is asked of the sandbox's
own proxy inside is asked of that one outside: there it must work, or the refusal inside proves nothing. What is said about names
is tried on a host whose resolver is the test's own.
"""

import contextlib
import ipaddress
import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import Person
from escape.attempts import Attempts, Trial, neighbour, somebody
from escape.prelude import (
    Path,
    Refused,
    found,
    greeting,
    hold,
    netlink_error,
    os,
    socket,
    struct,
    text_of,
    threading,
    through_proxy,
    tunnelled,
)
from resolved import resolved

ATTEMPTS = Attempts()


def neighbour_on_the_network(place):
    """Says hello to whoever reaches one of its servers, and passes on whatever it is asked to pass on."""

    def accept(server, serve):
        while True:
            caller = server.accept()[0]
            threading.Thread(target=serve, args=(caller,), daemon=True).start()

    def hello(caller):
        with caller:
            caller.sendall(b"hello")

    def head_of(caller):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            data = caller.recv(1)
            if not data:
                return head
            head += data
        return head

    def echo_head(caller):
        """A web server that tells what it was asked."""
        with caller:
            while head := head_of(caller):
                caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(head), head))

    def web(caller):
        with caller:
            if head_of(caller):
                caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")

    def pass_on(caller):
        with caller, contextlib.suppress(OSError):
            while head := head_of(caller):
                method, target = head.decode().split(" ")[:2]
                where = target if method == "CONNECT" else target.split("/")[2]
                host, _, port = where.rpartition(":")
                with socket.create_connection((host.strip("[]"), int(port)), 5) as far:
                    if method == "CONNECT":
                        caller.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                        caller.sendall(far.recv(100))
                        return
                    far.sendall(head)
                    answer = far.recv(4096)
                    caller.sendall(answer)

    def tcp(serve, address="127.0.0.1", family=socket.AF_INET):
        server = socket.create_server((address, 0), family=family)
        threading.Thread(target=accept, args=(server, serve), daemon=True).start()
        return server.getsockname()[1]

    def udp(family, address):
        server = socket.socket(family, socket.SOCK_DGRAM)
        server.bind((address, 0))

        def serve():
            while True:
                data, sender = server.recvfrom(1000)
                with open(place["datagrams"], "ab") as stream:
                    stream.write(data + b"\n")
                server.sendto(b"hello " + data, sender)

        threading.Thread(target=serve, daemon=True).start()
        return server.getsockname()[1]

    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(place["abstract"])
    abstract.listen()
    threading.Thread(target=accept, args=(abstract, hello), daemon=True).start()
    ports = {"tcp": tcp(hello), "web": tcp(web), "allowed": tcp(echo_head, "127.0.0.2"), "open_proxy": tcp(pass_on)}
    ports |= {"udp": udp(socket.AF_INET, "127.0.0.1")}
    if place["ipv6"]:
        ports |= {"tcp6": tcp(hello, "::1", socket.AF_INET6), "udp6": udp(socket.AF_INET6, "::1")}
    hold(ports)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def no_ipv6() -> str | None:
    return None if has_ipv6() else "this host has no IPv6"


def own_address() -> str | None:
    """An address of this machine other than its loopback. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.connect(("192.0.2.1", 9))
        return str(sock.getsockname()[0])
    return None


def no_address() -> str | None:
    return None if own_address() else "this host has no address but its loopback"


def no_family(number: int) -> str | None:
    try:
        socket.socket(number, socket.SOCK_STREAM).close()
    except OSError as error:
        return f"this kernel has no such sockets: {error}"
    return None


@contextlib.contextmanager
def another_sandbox(person: Person, port: int) -> Iterator[dict[str, str]]:
    """That runs beside, with a server at a port that is published at the same one."""
    code = (
        "import socket; server = socket.create_server(('127.0.0.1', {port}))\n"
        "while True:\n    caller = server.accept()[0]; caller.sendall(b'hello'); caller.close()\n"
    )
    made = person.json("create", "--name", "other", "--publish", str(port))["sandbox"]
    person.elsewhere("exec", "-d", "other", "--", person.python, "-I", "-c", code.format(port=port), check=True)
    yield {"state": str(person.state), "other": made["id"]}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module", params=["root", "user"])
def trial(request: pytest.FixtureRequest, library: Path) -> Iterator[Trial]:
    with somebody(request.param, library) as person:
        datagrams = person.place / "datagrams"
        datagrams.touch()
        person.own(person.place)
        place: dict[str, Any] = {
            "abstract": f"\0elsewhere-network-{os.getpid()}-{person.name}",
            "datagrams": str(datagrams),
            "ipv6": has_ipv6(),
            "address": own_address(),
            "published": free_port(),
        }
        with neighbour(person, neighbour_on_the_network, place) as other:
            place |= other.said
            with another_sandbox(person, place["published"]) as beside:
                case = Trial(person, ATTEMPTS, {**place, **beside})
                case.run("--network", "allow", "--allow", f"127.0.0.2:{place['allowed']}")
                yield case


# -- without the proxy ---


@ATTEMPTS.made()
def connect_to_a_server_of_the_host(place):
    with socket.create_connection(("127.0.0.1", place["tcp"]), 5) as sock:
        return found(sock.recv(100).decode(), "hello")


@ATTEMPTS.made(needs=no_ipv6)
def connect_by_ipv6(place):
    with socket.create_connection(("::1", place["tcp6"]), 5) as sock:
        return found(sock.recv(100).decode(), "hello")


@ATTEMPTS.made(effect=lambda place: "by-udp" in text_of(place["datagrams"]))
def send_a_datagram(place):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.5)
        sock.sendto(b"by-udp", ("127.0.0.1", place["udp"]))
        return found(sock.recv(100).decode(), "hello")


@ATTEMPTS.made(needs=no_ipv6, effect=lambda place: "by-udp6" in text_of(place["datagrams"]))
def send_a_datagram_by_ipv6(place):
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.5)
        sock.sendto(b"by-udp6", ("::1", place["udp6"]))
        return found(sock.recv(100).decode(), "hello")


@ATTEMPTS.made(needs=no_address, control="root")
def send_an_echo_request(place):
    """To the machine's own address: a reply comes from whoever has it."""
    message = struct.pack("!BBHHH", 8, 0, 0xFFFF - 0x0800 - 2, 1, 1)
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    except PermissionError:
        sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    with sock:
        sock.settimeout(0.5)
        sock.sendto(message, (place["address"], 0))
        while True:
            said = sock.recv(100)
            if said[20 if sock.type == socket.SOCK_RAW else 0] == 0:
                return "a reply"


@ATTEMPTS.made(control="namespaces")
def make_packets_of_ones_own(place):
    return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW).fileno()


@ATTEMPTS.made(control="namespaces")
def take_packets_from_the_wire(place):
    return socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)).fileno()


@ATTEMPTS.made(needs=lambda: no_family(40))
def connect_to_the_machine_below(place):
    return socket.socket(40, socket.SOCK_STREAM).fileno()


@ATTEMPTS.made()
def connect_to_an_abstract_socket(place):
    return greeting(place["abstract"])


@ATTEMPTS.made(needs=no_address)
def find_another_way_out(place):
    """A network card, which nothing but a loopback is."""
    cards = [line.split(":")[0].strip() for line in text_of("/proc/net/dev").splitlines()[2:]]
    if cards == ["lo"]:
        raise Refused("there is only lo")
    return cards


# -- other doors ---


@ATTEMPTS.made()
def connect_to_another_sandbox(place):
    """Whose port everybody on the host may reach: it is published there."""
    with socket.create_connection(("127.0.0.1", place["published"]), 5) as sock:
        return found(sock.recv(100).decode(), "hello")


@ATTEMPTS.made()
def reach_another_sandbox_through_the_proxy(place):
    return tunnelled(place, f"127.0.0.1:{place['published']}")


@ATTEMPTS.made()
def talk_to_the_network_service(place):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(f"{place['state']}/run/network")
        return "connected"


@ATTEMPTS.made()
def talk_to_the_keeper_of_another_sandbox(place):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(f"/proc/self/fd/{os.open(place['state'] + '/sandboxes/' + place['other'], os.O_PATH)}/keeper")
        return "connected"


@ATTEMPTS.made()
def read_the_rules_of_another_sandbox(place):
    return found(text_of(f"{place['state']}/sandboxes/{place['other']}/sandbox.json"), place["other"])


@ATTEMPTS.made()
def write_rules_of_ones_own(place):
    """Whoever can make a file among the records could change one."""
    path = f"{place['state']}/sandboxes/{place['other']}/tried"
    with open(path, "w") as stream:
        stream.write("x")
    os.unlink(path)
    return "written"


@ATTEMPTS.made(control="namespaces")
def listen_where_the_proxy_listens(place):
    """Others of the same sandbox would take it for the proxy. With every option that lets two share a port."""
    for address in ("127.0.0.1", "0.0.0.0"):
        for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
            with socket.socket() as sock, contextlib.suppress(OSError):
                for option in options:
                    sock.setsockopt(socket.SOL_SOCKET, option, 1)
                sock.bind((address, 61080))
                sock.listen()
                return f"{address} {options}"
    raise Refused("every way is taken")


@ATTEMPTS.made()
def ask_where_the_redirected_come_out(place):
    """That one passes on without a question: where to is said by the kernel alone."""
    inside = "ELSEWHERE_SANDBOX_REPO_ROOT" in os.environ
    where = f"127.0.0.1:{place['tcp']}"
    with socket.create_connection(("127.0.0.1", 61081 if inside else place["open_proxy"]), 5) as sock:
        sock.sendall(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        said = b""
        while data := sock.recv(1000):
            said += data
        return found(said.decode(), "hello")


# -- changing the network ---


@ATTEMPTS.made(control="namespaces")
def change_the_addresses(place):
    """As `ip address add 198.51.100.7/32 dev lo`."""
    body = struct.pack("=BBBBi", socket.AF_INET, 32, 0, 0, 1)
    for kind in (1, 2):
        body += struct.pack("=HH4s", 8, kind, socket.inet_aton("198.51.100.7"))
    return netlink_error(0, struct.pack("=IHHII", 16 + len(body), 20, 0x605, 1, 0) + body)


@ATTEMPTS.made(control="namespaces")
def change_the_routes(place):
    """As `ip route add 198.51.100.0/24 dev lo`; an error other than a refusal is one that only those get who may."""
    body = struct.pack("=BBBBBBBBI", socket.AF_INET, 24, 0, 0, 254, 3, 253, 1, 0)
    body += struct.pack("=HH4s", 8, 1, socket.inet_aton("198.51.100.0")) + struct.pack("=HHi", 8, 4, 1)
    return netlink_error(0, struct.pack("=IHHII", 16 + len(body), 24, 0x605, 1, 0) + body)


@ATTEMPTS.made(control="namespaces")
def change_the_packet_filter(place):
    """As `nft add table ip elsewhere-tried`."""

    def message(kind, flags, number, family, body, resource=0):
        head = struct.pack("=IHHII", 20 + len(body), kind, flags, number, 0)
        return head + struct.pack("!BBH", family, 0, resource) + body

    name = b"elsewhere-tried\0"
    table = struct.pack("=HH", 4 + len(name), 1) + name
    batch = message(16, 1, 1, 0, b"", 10) + message(10 << 8, 0x405, 2, 2, table) + message(17, 1, 3, 0, b"", 10)
    return netlink_error(12, batch)


@ATTEMPTS.made(control="namespaces")
def switch_forwarding_on(place):
    """Settings of the network, in /proc."""
    with open("/proc/sys/net/ipv4/ip_forward", "w") as stream:
        stream.write("1")
    return text_of("/proc/sys/net/ipv4/ip_forward")


# -- through the proxy, to the host itself ---


@ATTEMPTS.made()
def ask_for_loopback(place):
    return tunnelled(place, f"127.0.0.1:{place['tcp']}")


@ATTEMPTS.made()
def ask_for_localhost(place):
    return tunnelled(place, f"localhost:{place['tcp']}")


@ATTEMPTS.made()
def ask_for_no_address_at_all(place):
    """0.0.0.0, which leads to the machine itself."""
    return tunnelled(place, f"0.0.0.0:{place['tcp']}")


@ATTEMPTS.made()
def ask_for_a_number(place):
    return tunnelled(place, f"2130706433:{place['tcp']}")


@ATTEMPTS.made()
def ask_for_a_number_in_hexadecimal(place):
    return tunnelled(place, f"0x7f000001:{place['tcp']}")


@ATTEMPTS.made()
def ask_for_an_octal_address(place):
    return tunnelled(place, f"0177.0.0.1:{place['tcp']}")


@ATTEMPTS.made()
def ask_for_a_short_address(place):
    return tunnelled(place, f"127.1:{place['tcp']}")


@ATTEMPTS.made(needs=no_ipv6)
def ask_for_loopback_of_ipv6(place):
    return tunnelled(place, f"[::1]:{place['tcp6']}")


@ATTEMPTS.made(needs=no_ipv6)
def ask_for_an_address_inside_another(place):
    """IPv4 in IPv6."""
    return tunnelled(place, f"[::ffff:127.0.0.1]:{place['tcp']}")


@ATTEMPTS.made(needs=no_ipv6)
def ask_for_an_address_inside_another_in_hexadecimal(place):
    return tunnelled(place, f"[::ffff:7f00:1]:{place['tcp']}")


@ATTEMPTS.made()
def ask_for_a_page_of_the_host(place):
    where = f"127.0.0.1:{place['web']}"
    _, sock = through_proxy(place, f"GET http://{where}/ HTTP/1.1\r\nHost: {where}\r\n\r\n")
    with sock:
        return found(sock.recv(100).decode(), "hello")


# -- through the proxy, by what is allowed ---


@ATTEMPTS.made()
def pretend_by_the_host_header(place):
    """The address names what is not allowed, the header what is."""
    head = f"GET http://127.0.0.1:{place['web']}/ HTTP/1.1\r\nHost: 127.0.0.2:{place['allowed']}\r\n\r\n"
    _, sock = through_proxy(place, head)
    with sock:
        return found(sock.recv(100).decode(), "hello")


@ATTEMPTS.made()
def reach_another_site_by_the_host_header(place):
    """The address names what is allowed, the header another site on the same server."""
    head = f"GET http://127.0.0.2:{place['allowed']}/ HTTP/1.1\r\nHost: not-allowed.example\r\n\r\n"
    _, sock = through_proxy(place, head)
    with sock:
        return found(sock.recv(4096).decode(), "Host: not-allowed.example")


@ATTEMPTS.made()
def hide_a_second_request_behind_the_first(place):
    """On the connection on which the first one was allowed."""
    allowed = f"127.0.0.2:{place['allowed']}"
    _, sock = through_proxy(place, f"GET http://{allowed}/ HTTP/1.1\r\nHost: {allowed}\r\n\r\n")
    where = f"127.0.0.1:{place['web']}"
    with sock:
        sock.recv(4096)
        sock.sendall(f"GET http://{where}/ HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        said = sock.recv(4096).decode()
        return found(said, "hello")


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_does_not_get_out(trial: Trial, name: str, request: pytest.FixtureRequest) -> None:
    trial.judge(name, request)


def test_what_is_allowed_gets_out(trial: Trial) -> None:
    """Or all that was refused would prove nothing."""
    where = f"127.0.0.2:{trial.place['allowed']}"
    code = f"import urllib.request as r; print(r.urlopen('http://{where}/asked', timeout=20).read().decode().splitlines()[0])"
    words = ("run", "--discard", "--allow", where, "--", trial.person.python, "-I", "-c", code)
    assert trial.person.json(*words)["command"]["stdout"] == "GET /asked HTTP/1.1\n"


# -- names ---

PROBE = """
import json, socket, sys
port, *names = sys.argv[1:]

def said(name):
    sock = socket.create_connection(("127.0.0.1", 61080), 20)
    sock.sendall(f"CONNECT {name}:{port} HTTP/1.1\\r\\nHost: {name}:{port}\\r\\n\\r\\n".encode())
    data = b""
    while more := sock.recv(4096):
        data += more
    return data.decode()

print(json.dumps({name: said(name) for name in names}))
"""
NAMES = {
    "good.test": [["127.0.0.2"]],
    "turning.test": [["127.0.0.2"], ["127.0.0.9"]],
    "loopback.wild.test": [["127.0.0.2"]],
    "six.wild.test": [["::1"]],
    "mapped.wild.test": [["::ffff:127.0.0.2"]],
    "private.wild.test": [["10.255.255.1"]],
    "linklocal.wild.test": [["169.254.7.7"]],
    "nothing.wild.test": [["0.0.0.0"]],
    "metadata.test": [["169.254.169.254"]],
    "metadata6.test": [["fd00:ec2::254"]],
}


@contextlib.contextmanager
def greeter(address: str) -> Iterator[int]:
    with socket.create_server((address, 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller = server.accept()[0]
                    with caller:
                        caller.sendall(b"hello")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_name_that_leads_to_the_host_or_its_neighbours_leads_nowhere(person: Person) -> None:
    """After resolution, too. A rule that was written for exactly that name and port is the control: it was meant."""
    with greeter("127.0.0.2") as port, resolved(person, NAMES) as names:
        (person.project / "probe.py").write_text(PROBE)
        exact = ("good.test", "turning.test", "metadata.test", "metadata6.test")
        rules = [word for name in (*exact, "*.wild.test") for word in ("--allow", f"{name}:{port}")]
        words = ["run", "--json", "--discard", *rules, "--", person.python, "-I", "probe.py", str(port), *names.known]
        _, document, errors = names.host()(*words)
        assert document["command"]["exit_code"] == 0, (document["command"], errors)
        said = json.loads(document["command"]["stdout"])
        for name in ("good.test", "turning.test"):
            assert said[name].endswith("hello"), said[name]
            assert names.times(name) == 1, "what was judged is what is connected to: nobody asks again"
        for name in names.known.keys() - {"good.test", "turning.test"}:
            assert said[name].startswith("HTTP/1.1 403 "), said[name]
            assert str(ipaddress.ip_address(names.known[name][0][0])) in said[name], "it says where the name leads"
        told = {one["what"]: one["rule"] for one in document["command"]["denials"]}
        assert told.keys() == {f"{name}:{port}" for name in names.known.keys() - {"good.test", "turning.test"}}


TUNNEL = """
import contextlib, socket, struct, sys, urllib.request
name, where = sys.argv[1:]
packet = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + b"".join(bytes([len(one)]) + one.encode() for one in name.split(".")) + b"\\0"
packet += struct.pack("!HH", 16, 1)
with contextlib.suppress(OSError):
    print(socket.getaddrinfo(name, 80))
with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.settimeout(0.5)
    sock.sendto(packet, (where, 53))
    sock.recv(4096)
with contextlib.suppress(OSError):
    sock = socket.create_connection((where, 53), 2)
    sock.sendall(struct.pack("!H", len(packet)) + packet)
    sock.recv(4096)
with contextlib.suppress(OSError):
    urllib.request.urlopen(f"http://{name}/", timeout=10)
with contextlib.suppress(OSError):
    urllib.request.urlopen(f"https://{name}/", timeout=10)
print("tried")
"""


REPLACE = """
import os, socket, sys
place, target = sys.argv[1:]
os.rename(place, place + ".mine")
os.symlink(target, place)
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect(place + ".mine")
print(sock.recv(100).decode())
"""


@pytest.mark.parametrize("kind", ["rw", "private"])
def test_no_other_socket_of_the_host_is_reached_by_way_of_a_forward(person: Person, kind: str) -> None:
    """Inside, the socket is renamed and a link put in its place. The record is one that no version of today would write."""
    shared, secret = person.home / "shared", person.home / "secret.sock"
    shared.mkdir()
    person.own(person.home)
    place = shared / "db.sock"
    share = ("--share", f"{shared}:rw") if kind == "rw" else ()
    box = person.json("create", *share)["sandbox"]["id"]
    person.elsewhere("stop", box, check=True)
    path = person.state / "sandboxes" / box / "sandbox.json"
    document = json.loads(path.read_text())
    document["network"]["forward"] = [f"unix:{place}"]
    path.write_text(json.dumps(document))
    with listening(secret):
        done = person.elsewhere("exec", box, "--", person.python, "-I", "-c", REPLACE, str(place), str(secret))
        assert "the secret" not in done.stdout
        assert done.returncode != 0 or kind == "private"
        if kind == "rw":
            assert "where the sandbox may write in reality" in done.stderr
            assert "FileNotFoundError" in done.stderr, "there is nothing to be renamed"
        assert list(shared.iterdir()) == [], "nothing is left in reality"
        assert person.shell(person.python, "-c", SAY, secret).stdout == "the secret\n", "the control"


SAY = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(100).decode())"


@contextlib.contextmanager
def listening(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        os.chmod(path, 0o777)
        server.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as caller:
                        caller.sendall(b"the secret")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_no_word_gets_out_in_a_question_for_a_name(person: Person) -> None:
    """Asked of the resolver, of the server itself by both protocols, and of the proxy. Outside it arrives, and so does, from
    inside, a name that is allowed."""
    with resolved(person, {"allowed.test": [["127.0.0.2"]]}) as names:
        (person.project / "tunnel.py").write_text(TUNNEL)
        server = (person.place / "resolv.conf").read_text().split()[1]
        python = f"{person.python} -I tunnel.py"
        done = names.host().script(
            f"{python} word.outside.test {server}; e run --discard -- {python} word.inside.test 198.51.100.53; "
            f"e run --discard --allow allowed.test:9 -- {person.python} -I -c {shlex.quote(ASK_ALLOWED)}"
        )
        assert done.stdout.count("tried") == 2, done.stderr
        assert names.times("word.outside.test"), "the control"
        assert names.times("allowed.test") == 1, "the control inside"
        assert not [name for name, _ in names.asked if "inside" in name]


ASK_ALLOWED = (
    "import socket; sock = socket.create_connection(('127.0.0.1', 61080)); "
    "sock.sendall(b'CONNECT allowed.test:9 HTTP/1.1\\r\\nHost: allowed.test:9\\r\\n\\r\\n'); sock.recv(1000)"
)
