"""The network service and whoever talks to it: real processes and network namespaces, and a stand-in for the keeper."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import eventually
from elsewhere.errors import ElsewhereError
from elsewhere.network.dialling import Resolver
from elsewhere.sandbox.networking import calling, proxies
from elsewhere.sandbox.networking.asking import Keepers
from elsewhere.sandbox.networking.service import Service
from elsewhere.sandbox.networking.serving import Serving, Shared
from elsewhere.sandbox.networking.switchboard import Switchboard
from networked import CLIENT, Network, asks, networked


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with networked(tmp_path) as found:
        yield found


@contextlib.contextmanager
def host_server(said: bytes, path: str = "") -> Iterator[int]:
    """Answers with this and what it was told; its port."""
    if path:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
    else:
        server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                with sock, contextlib.suppress(OSError):
                    sock.sendall(said + sock.recv(100))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield 0 if path else server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def spoken(port: int, words: bytes = b"hello") -> bytes:
    """What somebody says who is reached on the host's loopback."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(words)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while more := sock.recv(100):
                found += more
        return found


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def connect_to(port: int) -> str:
    return f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"


# -- ways out -------------------------------------------------------------------------------------------------------------------


def test_what_is_allowed_passes_and_all_else_is_refused_and_told(network: Network) -> None:
    with host_server(b"the host: ") as port:
        box = network.sandbox("ew-a", allow=[f"127.0.0.1:{port}"])
        assert "the host: hi" in box.run(asks(connect_to(port) + "hi"))
        refused = box.run(asks("CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n"))
    assert "403" in refused
    assert "to allow it: --allow example.org" in refused
    assert eventually(lambda: box.heard() == ["network:example.org/443"])


def test_two_sandboxes_have_their_own_rules(network: Network) -> None:
    with host_server(b"the host: ") as port:
        one, other = network.sandbox("ew-a", allow=[f"127.0.0.1:{port}"]), network.sandbox("ew-b")
        assert "the host: hi" in one.run(asks(connect_to(port) + "hi"))
        assert "403" in other.run(asks(connect_to(port)))
    assert one.heard() == []


def test_without_a_record_that_can_be_read_nothing_passes(network: Network) -> None:
    with host_server(b"the host: ") as port:
        box = network.sandbox("ew-a", allow=[f"127.0.0.1:{port}"])
        (box.directory / "sandbox.json").write_text("{")
        assert "403" in box.run(asks(connect_to(port)))
        box.change(allow=[f"127.0.0.1:{port}"])
        assert "the host: hi" in box.run(asks(connect_to(port) + "hi"))


def test_rules_that_change_hold_at_once_and_end_what_runs(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        box = network.sandbox("ew-a", allow=[f"127.0.0.1:{port}"])
        stays = asks(connect_to(port)).replace("print(found", "print('ended', found")
        found: list[str] = []
        running = threading.Thread(target=lambda: found.append(box.run(stays)))
        running.start()
        with server.accept()[0]:
            assert eventually(lambda: network.ask("about", "ew-a")[1]["connections"] == 1)
            assert not found
            box.change(allow=["example.org"])
            assert network.ask("changed", "ew-a") == ("opened", [], [], 1)
            running.join(30)
        assert found
        assert "ended" in found[0]
        assert "403" in box.run(asks(connect_to(port)))


ASKS_FOR_A_NAME = """
import socket, struct
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asking.settimeout(30)
name = b"".join(bytes([len(label)]) + label for label in {name!r}.split(b".")) + bytes(1)
asking.sendto(struct.pack("!6H", 1, 256, 1, 0, 0, 0) + name + struct.pack("!2H", 1, 1), ("192.0.2.53", 53))
answer = asking.recv(512)
if answer[3] & 15:
    raise SystemExit("no such name")
sock = socket.create_connection((socket.inet_ntoa(answer[-4:]), {port}), timeout=30)
sock.sendall(b"hi")
print(sock.recv(100).decode())
"""


def test_programs_that_know_no_proxy_reach_what_is_allowed_by_its_name(network: Network) -> None:
    """Behind a proxy of the host, which is the one to resolve the name."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        box = network.sandbox("ew-a", allow=["db.example.org:5432"])
        proxies.keep(str(box.directory), {"https_proxy": f"http://127.0.0.1:{proxy.getsockname()[1]}"})
        if "redirect" not in network.ports_of(box):
            pytest.skip("no redirection can be installed here")
        said: list[str] = []
        asked = ASKS_FOR_A_NAME.format(name=b"db.example.org", port=5432)
        inside = threading.Thread(target=lambda: said.append(box.run(asked)))
        inside.start()
        with proxy.accept()[0] as line:
            assert line.recv(1000).startswith(b"CONNECT db.example.org:5432 ")
            line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            assert line.recv(10) == b"hi"
            line.sendall(b"the host")
            inside.join(30)
        assert said == ["the host\n"]
        assert "no such name" in box.run(ASKS_FOR_A_NAME.format(name=b"other.example.org", port=5432))
        box.run("import socket; socket.create_connection(('192.0.2.1', 25), timeout=30).recv(1)")
    assert eventually(lambda: box.heard() == ["network:other.example.org/0", "network:192.0.2.1/25"])


# -- forwards and published ports -------------------------------------------------------------------------------------------------


def test_services_of_two_sandboxes_on_the_same_inner_port_are_published(network: Network) -> None:
    boxes = [network.sandbox(name, "none", publish=["0:80"]) for name in ("ew-a", "ew-b")]
    for box in boxes:
        box.serve(80, box.id.encode() + b": ")
    ports = []
    for box in boxes:
        word, published, forwards = network.ask("open", box.id)
        assert (word, forwards) == ("opened", [])
        ((port, inside, host),) = ((one["port"], one["inside"], one["host"]) for one in published)
        assert (inside, host) == (80, "127.0.0.1")
        assert spoken(port) == box.id.encode() + b": hello"
        ports.append(port)
    assert ports[0] != ports[1]
    assert network.ask("open", "ew-a")[1][0]["port"] == ports[0]
    boxes[0].end()
    assert eventually(lambda: not is_open(ports[0]))
    assert spoken(ports[1]) == b"ew-b: hello"


def test_a_server_that_listens_on_ipv6_alone_is_published(network: Network) -> None:
    box = network.sandbox("ew-a", publish=["0:8000"])
    code = 'import socket\nserver = socket.create_server(("::1", 8000), family=socket.AF_INET6)\nprint("listens", flush=True)\n'
    assert box._order("start", code + "sock, _ = server.accept()\nsock.sendall(b'six')\n") == "listens\n"
    assert spoken(network.ask("open", "ew-a")[1][0]["port"]) == b"six"


def test_a_host_service_is_reached_inside_by_two_at_the_same_port(network: Network) -> None:
    with host_server(b"the host: ") as port:
        for name in ("ew-a", "ew-b"):
            box = network.sandbox(name, forward=[f"5432=127.0.0.1:{port}"])
            assert network.ask("open", name) == ("opened", [], [{"forward": f"5432={port}"}])
            assert box.run(CLIENT.format(port=5432)) == "the host: hello\n"


def test_a_unix_socket_of_the_host_is_reached_inside(network: Network, tmp_path: Path) -> None:
    """The stand-in has the host's files, so the path inside must be another one than the host's: the directory is renamed."""
    inside, outside = tmp_path / "run" / "db.sock", tmp_path / "moved"
    box = network.sandbox("ew-a", forward=[f"unix:{inside}"])
    network.ask("open", "ew-a")
    made = outside / "db.sock"
    inside.parent.rename(outside)
    inside.parent.mkdir()
    client = CLIENT.format(port=0).replace(
        'socket.create_connection(("127.0.0.1", 0), timeout=30)', "socket.socket(socket.AF_UNIX); sock.settimeout(30)"
    )
    client = client.replace("sock.sendall", f"sock.connect({str(made)!r})\nsock.sendall")
    with host_server(b"the host: ", str(inside)):
        assert box.run(client) == "the host: hello\n"


def test_a_forward_to_nobody_is_closed_at_once_and_the_log_says_why(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    box = network.sandbox("ew-a", forward=[str(port)])
    network.ask("open", "ew-a")
    for _ in range(3):
        assert box.run(CLIENT.format(port=port)) == "\n"
    told = f"ew-a: 127.0.0.1:{port} cannot be connected to: Connection refused"
    assert network.log().count(told) == 1
    assert network.ask("about", "ew-a")[1]["forwards"][0]["trouble"] in told


def test_what_is_no_longer_asked_for_is_closed_and_what_is_new_is_made(network: Network) -> None:
    with host_server(b"the host: ") as port:
        box = network.sandbox("ew-a", publish=["0:80"], forward=[f"5432=127.0.0.1:{port}"])
        box.serve(80, b"box: ")
        before = network.ask("open", "ew-a")[1][0]["port"]
        with socket.create_connection(("127.0.0.1", before)) as held:
            assert eventually(lambda: network.ask("about", "ew-a")[1]["connections"] == 1)
            box.change(forward=[f"6543=127.0.0.1:{port}"])
            word, published, forwards, ended = network.ask("changed", "ew-a")
            assert (word, published, forwards, ended) == ("opened", [], [{"forward": f"6543={port}"}], 1)
            with contextlib.suppress(ConnectionResetError):
                assert held.recv(10) == b""
        assert not is_open(before)
        assert box.run(CLIENT.format(port=6543)) == "the host: hello\n"
        assert "ConnectionRefusedError" in box.run(CLIENT.format(port=5432))


def test_a_port_can_lead_somewhere_else_at_once(network: Network) -> None:
    with host_server(b"one: ") as one, host_server(b"two: ") as two, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        box = network.sandbox("ew-a", publish=[f"{port}:80"], forward=[f"5432={one}"])
        box.serve(80, b"eighty: ")
        box.serve(81, b"eighty-one: ")
        network.ask("open", "ew-a")
        assert (spoken(port), box.run(CLIENT.format(port=5432))) == (b"eighty: hello", "one: hello\n")
        box.change(publish=[f"{port}:81"], forward=[f"5432={two}"])
        network.ask("changed", "ew-a")
        assert (spoken(port), box.run(CLIENT.format(port=5432))) == (b"eighty-one: hello", "two: hello\n")


def test_a_record_that_became_nonsense_allows_nothing(network: Network) -> None:
    with host_server(b"the host: ") as port:
        box = network.sandbox("ew-a", allow=[f"127.0.0.1:{port}"])
        assert "the host: hi" in box.run(asks(connect_to(port) + "hi"))
        box.change(allow=["*"])
        with pytest.raises(ElsewhereError):
            network.ask("changed", "ew-a")
        assert "403" in box.run(asks(connect_to(port)))


def test_a_port_of_the_host_that_is_taken_is_named(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        network.sandbox("ew-a", publish=[f"{port}:80", "0:81"])
        with pytest.raises(ElsewhereError) as caught:
            network.ask("open", "ew-a")
        assert caught.value.code == "port_in_use"
        assert str(port) in caught.value.message
        assert "--publish 0:80" in caught.value.hint
        assert [one["inside"] for one in network.ask("about", "ew-a")[1]["published"]] == [81]
    assert {one["port"] for one in network.ask("open", "ew-a")[1]} > {port}


def test_a_port_inside_that_is_taken_is_named(network: Network) -> None:
    box = network.sandbox("ew-a")
    box.serve(5432, b"")
    box.change(forward=["5432"])
    with pytest.raises(ElsewhereError) as caught:
        network.ask("changed", "ew-a", ("--forward 5432",))
    assert caught.value.code == "port_in_use_inside"


def test_what_cannot_be_had_is_in_no_rules_way_unless_it_is_new(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, host_server(b"the host: ") as port:
        wanted = f"{taken.getsockname()[1]}:80"
        box = network.sandbox("ew-a", allow=[f"127.0.0.1:{port}"], publish=[wanted])
        assert "the host: hi" in box.run(asks(connect_to(port) + "hi"))
        box.change(deny=[f"127.0.0.1:{port}"], publish=[wanted])
        assert network.ask("changed", "ew-a") == ("opened", [], [], 0)
        assert "403" in box.run(asks(connect_to(port)))
        (trouble,) = network.ask("about", "ew-a")[1]["trouble"]
        assert trouble["what"] == f"--publish {wanted}"
        assert "in use" in trouble["why"]
        with pytest.raises(ElsewhereError) as caught:
            network.ask("changed", "ew-a", (f"--publish {wanted}",))
        assert caught.value.code == "port_in_use"
    assert len(network.ask("changed", "ew-a")[1]) == 1, "it is tried again"
    assert network.ask("about", "ew-a")[1]["trouble"] == []


def by_path(path: Path) -> str:
    client = CLIENT.format(port=0).replace(
        'socket.create_connection(("127.0.0.1", 0), timeout=30)', "socket.socket(socket.AF_UNIX); sock.settimeout(30)"
    )
    return client.replace("sock.sendall", f"sock.connect({str(path)!r})\nsock.sendall")


def test_a_link_in_the_place_of_a_socket_of_the_host_is_not_followed(network: Network, tmp_path: Path) -> None:
    """The stand-in has the host's files, as a sandbox has those of a share that it may write."""
    place, renamed, secret = tmp_path / "run" / "db.sock", tmp_path / "run" / "mine.sock", tmp_path / "secret.sock"
    box = network.sandbox("ew-a", forward=[f"unix:{place}"])
    network.ask("open", "ew-a")
    place.rename(renamed)
    with host_server(b"the secret: ", str(secret)), host_server(b"the service: ", str(tmp_path / "other.sock")):
        place.symlink_to(secret)
        assert "the secret" not in box.run(by_path(renamed))
        assert "a link lies on the way" in network.ask("about", "ew-a")[1]["forwards"][0]["trouble"]
        place.unlink()
        (tmp_path / "other.sock").rename(place)
        assert box.run(by_path(renamed)) == "the service: hello\n", "the control: what is no link is reached"
        renamed.parent.rename(tmp_path / "moved")
        (tmp_path / "run").symlink_to("moved")
        assert "the service" not in box.run(by_path(tmp_path / "moved" / "mine.sock"))


@pytest.mark.parametrize("name", ["writable", "docker.sock", "state"])
def test_the_service_itself_refuses_sockets_that_lead_out(network: Network, tmp_path: Path, name: str) -> None:
    place = {"writable": tmp_path / "share" / "db.sock", "docker.sock": tmp_path / "docker.sock"}.get(
        name, Path(network.state.room("run")) / "db.sock"
    )
    network.sandbox("ew-a", forward=[f"unix:{place}"], shares=[[str(tmp_path / "share"), True]])
    with pytest.raises(ElsewhereError) as caught:
        network.ask("open", "ew-a")
    assert caught.value.code == "forward_refused"
    assert str(place) in caught.value.message
    assert not place.exists(), "nothing was put there"


def test_a_sandbox_that_does_not_run_or_is_not_there_is_an_error(network: Network) -> None:
    box = network.sandbox("ew-a", add=False)
    box.end()
    for name, code in (("ew-a", "sandbox_not_running"), ("ew-nobody", "sandbox_not_found")):
        with pytest.raises(ElsewhereError) as caught:
            network.ask("open", name)
        assert caught.value.code == code


# -- its life ---------------------------------------------------------------------------------------------------------------------


def test_one_that_is_killed_is_followed_by_another_that_recovers_everything(network: Network) -> None:
    with host_server(b"the host: ") as port:
        box = network.sandbox("ew-a", publish=["0:80"], forward=[f"5432=127.0.0.1:{port}"], allow=[f"127.0.0.1:{port}"])
        box.serve(80, b"box: ")
        published = network.ask("open", "ew-a")[1][0]["port"]
        (first,) = network.services()
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        assert calling.wire.readable(network.board.fileno(), 10)
        network.board.heard()
        assert eventually(lambda: is_open(published))
        assert network.services() not in ([], [first])
        assert spoken(published) == b"box: hello"
        assert box.run(CLIENT.format(port=5432)) == "the host: hello\n"
        assert "the host: hi" in box.run(asks(connect_to(port) + "hi"))


def test_whoever_asks_about_ports_is_told_of_those_that_stand_by_then(network: Network) -> None:
    network.sandbox("ew-a")
    network.ask("about", "ew-a")
    network.sandbox("ew-b", publish=["0:80"])
    (one,) = network.ask("about", "ew-b")[1]["published"]
    assert is_open(one["port"])


def test_whoever_starts_next_finds_that_the_last_one_died(network: Network) -> None:
    box = network.sandbox("ew-a", publish=["0:80"])
    box.serve(80, b"box: ")
    port = network.ask("open", "ew-a")[1][0]["port"]
    network.board.close()
    (first,) = network.services()
    network.board = Switchboard(network.state)
    network.board.revive_if_died()
    assert network.services() == [first]
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    network.board.revive_if_died()
    assert eventually(lambda: is_open(port))
    assert spoken(port) == b"box: hello"


def test_it_goes_with_the_last_sandbox_and_the_next_one_has_another(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE_NETWORK_IDLE_S", "0.2")
    box = network.sandbox("ew-a")
    network.ask("about", "ew-a")
    (first,) = network.services()
    box.end()
    assert calling.wire.readable(network.board.fileno(), 60)
    network.board.heard()
    assert os.waitpid(first, 0)[1] == 0
    assert network.services() == []
    assert not {"network", "network.closing"} & set(os.listdir(network.state.room("run")))
    network.board.revive_if_died()
    assert network.services() == []
    network.sandbox("ew-b")
    about = network.ask("about", "ew-b")[1]
    assert (about["connections"], about["published"], about["forwards"], about["trouble"]) == (0, [], [], [])


def test_a_question_alone_starts_it_and_it_is_nobodys_child(network: Network) -> None:
    box = network.sandbox("ew-a", add=False, publish=["0:80"])
    box.serve(80, b"box: ")
    assert spoken(network.ask("open", "ew-a")[1][0]["port"]) == b"box: hello"
    (pid,) = network.services()
    assert pid not in {int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    box.end()
    assert eventually(lambda: network.services() == [], 20)


def test_adding_never_waits_and_nothing_is_lost_if_it_is_slow(network: Network) -> None:
    box = network.sandbox("ew-a")
    network.ask("about", "ew-a")
    (pid,) = network.services()
    assert eventually(lambda: network.board.heard() or network.board._here)
    os.kill(pid, signal.SIGSTOP)
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        ids = [f"ew-{number}" for number in range(600)]
        for name in ids:
            network.board.add(name, box.process.pid, {})
    finally:
        os.kill(pid, signal.SIGCONT)
    assert network.board._waiting  # else it was not full, and nothing is proven
    deadline = time.monotonic() + 60
    while network.board._waiting and time.monotonic() < deadline:
        calling.wire.readable(network.board.fileno(), 1)
        network.board.heard()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) > 600)


def test_one_that_dies_at_once_is_not_started_again_and_again(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    box = network.sandbox("ew-a", add=False)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/bin/false")
        network.add(box)
        while network.board._line is not None:
            assert calling.wire.readable(network.board.fileno(), 10)
            network.board.heard()
        for _ in range(3):
            network.add(box)
            network.board.heard()
        assert network.board._line is None
        with pytest.raises(ElsewhereError) as caught:
            network.ask("about", "ew-a")
        assert caught.value.code == "network_service_gone"
    network.board._not_before = 0.0
    network.board.heard()
    assert "403" in box.run(asks(connect_to(1)))


def test_whoever_connects_while_none_starts_is_told_so_at_once(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    box, other = (network.sandbox(name, add=False) for name in ("ew-a", "ew-b"))
    network.add(box, kept=True)
    said: list[str] = []

    def tried(code: str) -> str:
        inside = threading.Thread(target=lambda: said.append(box.run(code)))
        inside.start()
        while inside.is_alive():
            calling.wire.readable(network.board.fileno(), 0.1)
            network.board.heard()
        return said[-1]

    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/bin/false")
        for _ in range(2):
            answer = tried(asks(connect_to(1)))
            assert answer.startswith("HTTP/1.1 503 elsewhere: the network service does not start, see ")
            assert "network.log" in answer
        network.add(other)
        assert "503" in tried(asks("x" * 100_000)), "however much it has to say"
        if "names" in network.ports_of(box):
            assert "no such name" in tried(ASKS_FOR_A_NAME.format(name=b"example.org", port=80))
    network.board._not_before = 0.0
    network.board.heard()
    assert "403" in box.run(asks(connect_to(1))), "as soon as there can be one, there is"
    assert "403" in other.run(asks(connect_to(1)))
    network.board.heard()
    assert not network.board._kept
    assert not network.board._unsure


def test_a_time_that_makes_no_sense_is_no_reason_not_to_start(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE_NETWORK_IDLE_S", "abc")
    box = network.sandbox("ew-a")
    assert "403" in box.run(asks(connect_to(1)))
    assert "ELSEWHERE_NETWORK_IDLE_S: 'abc'" in network.log()


def test_one_that_goes_without_having_heard_everything_is_followed_by_another(network: Network) -> None:
    box = network.sandbox("ew-a", add=False)
    run = network.state.room("run")
    lock = os.open(f"{run}/network.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as going:
        going.bind(f"{run}/network")
        going.listen()
        network.add(box)
        line, _ = going.accept()
        os.unlink(f"{run}/network")
        os.close(lock)
        with line:
            calling.wire.send(line, ("bye", 0))
            assert network.services() == []
            network.board.heard()
    assert "403" in box.run(asks(connect_to(1)))


def test_it_stays_if_somebody_knocks_or_has_just_said_something(network: Network) -> None:
    place = Path(network.state.room("run")) / "network"

    async def tried() -> list[bool]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(place))
            listener.listen()
            service = Service(Shared(network.state, Keepers(network.state), Resolver()), listener, 0)
            found = []
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
                caller.connect(str(place))
                found.append(service._nobody_knocks())
                service._accept()
                calling.wire.send(caller, ("about", "ew-a"))
                found += [service._nobody_knocks(), place.exists()]
                (connection,) = service._connections.values()
                calling.wire.receive(connection.sock)
                found += [service._nobody_knocks(), place.exists()]
                service._hang_up(connection)
            return found

    assert asyncio.run(tried()) == [False, False, True, True, False]


def test_one_that_is_told_to_stop_is_followed_by_nobody(network: Network) -> None:
    calling.stop(network.state)
    box = network.sandbox("ew-a", publish=["0:80"])
    port = network.ask("open", "ew-a")[1][0]["port"]
    calling.stop(network.state)
    assert eventually(lambda: network.services() == [])
    network.board.heard()
    assert eventually(lambda: network.services() == [])
    assert not is_open(port)
    assert network.ask("open", "ew-a")[1] == [{"inside": 80, "host": "127.0.0.1", "port": port}]
    assert "403" in box.run(asks(connect_to(1)))


# -- nobody is in anybody's way -----------------------------------------------------------------------------------------------------


def test_a_sandbox_whose_keeper_does_not_answer_is_in_nobodys_way(network: Network) -> None:
    with host_server(b"the host: ") as port:
        stuck = network.sandbox("ew-a", publish=["0:80"])
        other = network.sandbox("ew-b", publish=["0:80"], allow=[f"127.0.0.1:{port}"])
        other.serve(80, b"box: ")
        (stuck_port,), (other_port,) = ([one["port"] for one in network.ask("open", name)[1]] for name in ("ew-a", "ew-b"))
        os.kill(stuck.process.pid, signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", stuck_port), timeout=10))
            assert eventually(lambda: network.ask("about", "ew-a")[1]["connections"] == 100)
            assert spoken(other_port) == b"box: hello"
            assert "the host: hi" in other.run(asks(connect_to(port) + "hi"))


def test_nothing_is_left_of_connections_and_of_sandboxes(network: Network) -> None:
    with host_server(b"the host: ") as port:
        stays = network.sandbox("ew-a")
        network.ask("about", "ew-a")
        (pid,) = network.services()
        assert "403" in stays.run(asks(connect_to(port)))
        before = len(os.listdir(f"/proc/{pid}/fd"))
        box = network.sandbox("ew-b", publish=["0:80"], forward=[f"5432=127.0.0.1:{port}"], allow=[f"127.0.0.1:{port}"])
        box.serve(80, b"box: ")
        published = network.ask("open", "ew-b")[1][0]["port"]
        for _ in range(20):
            assert spoken(published) == b"box: hello"
        many = "for _ in range(20):\n" + "".join(f"    {line}\n" for line in CLIENT.format(port=5432).splitlines())
        assert box.run(many) == "the host: hello\n" * 20
        assert "the host: hi" in box.run(asks(connect_to(port) + "hi"))
        with socket.create_connection(("127.0.0.1", published)):
            assert eventually(lambda: network.ask("about", "ew-b")[1]["connections"] == 1)
            box.end()
            assert eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before)
        assert "403" in stays.run(asks(connect_to(port)))


def test_more_connections_than_one_sandbox_may_have_wait(network: Network) -> None:
    """More than its room, and than the threads and sockets of the service: all are answered in the end."""
    box = network.sandbox("ew-a", publish=["0:80"])
    box.serve(80, b"box: ")
    port = network.ask("open", "ew-a")[1][0]["port"]
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(300)]
        assert network.ask("about", "ew-a")[1]["connections"] <= 256
        for sock in waiting:
            sock.sendall(b"hello")
        for sock in waiting:
            assert sock.recv(100) == b"box: hello"
            sock.close()


def test_what_a_keeper_hands_out_is_looked_at(network: Network, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkdir(network.state.sandbox("ew-a"))

    async def given() -> tuple[list[str], int]:
        before = len(os.listdir("/proc/self/fd"))
        plain, datagrams = os.open("/dev/null", os.O_RDONLY), socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()
        listener = socket.create_server(("127.0.0.1", 0)).detach()
        unknown = os.open("/dev/null", os.O_RDONLY)
        ports = {"redirect": plain, "proxy": datagrams, "names": listener, "other": unknown}
        serving = Serving(Shared(network.state, Keepers(network.state), Resolver()), "ew-a", os.pidfd_open(os.getpid()), ports)
        found = list(serving._ports)
        serving.close()
        return found, len(os.listdir("/proc/self/fd")) - before

    assert asyncio.run(given()) == ([], 0)
    assert capsys.readouterr().err.count("a keeper handed out") == 3


# -- what it takes along ------------------------------------------------------------------------------------------------------------


def test_it_has_nothing_of_whoever_started_it(network: Network) -> None:
    with open("/dev/null") as file:
        os.set_inheritable(file.fileno(), True)
        network.sandbox("ew-a").run(asks(connect_to(1)))
        network.ask("about", "ew-a")
        (pid,) = network.services()
        held = [os.readlink(f"/proc/{pid}/fd/{number}") for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd")))]
    log = os.path.join(network.state.room("run"), "network.log")
    assert held[:3] == ["/dev/null", log, log]
    assert held[4] == os.path.join(network.state.room("run"), "network.lock")
    assert all(name.startswith(("socket:", "pidfd:", "anon_inode:")) for name in (held[3], *held[5:])), held
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"


def test_it_loads_nothing_from_where_whoever_started_it_does(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    network.sandbox("ew-a")
    assert eventually(network.services)
    (pid,) = network.services()
    known = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (places,) = (one.partition(b"=")[2].split(b":") for one in known if one.startswith(b"PYTHONPATH="))
    assert os.fsencode(tmp_path / "own") not in places
    assert all(os.path.isdir(os.path.join(place, b"elsewhere")) or os.path.isdir(os.path.join(place, b"h11")) for place in places)


def test_the_launcher_does_not_load_what_the_service_needs() -> None:
    code = (
        "import sys, elsewhere.sandbox.networking.calling\n"
        "print([name for name in ('asyncio', 'h11', 'elsewhere.network.proxy', 'subprocess') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert found.stdout == "[]\n", found.stderr


def test_a_proxy_of_the_host_that_cannot_be_used_is_not_passed_by(network: Network) -> None:
    with host_server(b"the host: ") as port:
        box = network.sandbox("ew-a", allow=[f"127.0.0.1:{port}"])
        proxies.keep(str(box.directory), {"all_proxy": "socks5://proxy.example.org:1080"})
        refused = box.run(asks(connect_to(port)))
    assert "403" in refused
    assert "all_proxy has socks5://proxy.example.org:1080, which is spoken to by socks5" in refused
    told = f"network:127.0.0.1/{port}/unusable/all_proxy/socks5://proxy.example.org:1080"
    assert eventually(lambda: box.heard() == [told])


def test_each_sandbox_has_the_proxy_of_whoever_started_it(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, host_server(b"HTTP/1.1 200 OK\r\n\r\ntheirs ") as theirs:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{ours.getsockname()[1]}")
        with host_server(b"the host: ") as port:
            one, two, three, four = (
                network.sandbox(name, allow=[f"127.0.0.1:{port}"]) for name in ("ew-1", "ew-2", "ew-3", "ew-4")
            )
            proxies.keep(str(one.directory), {"PATH": "/", "ALL_PROXY": f"http://me:s3cret@127.0.0.1:{theirs}"})
            proxies.keep(str(two.directory), {"http_proxy": "http://127.0.0.1:1"})
            proxies.keep(str(two.directory), {})  # whoever started it later has none
            assert not (two.directory / "network.proxy").exists()
            proxies.keep(str(three.directory), {"all_proxy": "socks5://127.0.0.1:1"})
            (four.directory / "network.proxy").write_text("{")
            assert (one.directory / "network.proxy").stat().st_mode & 0o777 == 0o600
            assert "theirs" in one.run(asks(connect_to(port)))
            assert "the host: hi" in two.run(asks(connect_to(port) + "hi"))
            assert "spoken to by socks5" in three.run(asks(connect_to(port)))
            assert "403" in four.run(asks(connect_to(port))), "nothing goes past a proxy that nobody knows"
            assert network.ask("about", "ew-1")[1]["proxy"] == [f"127.0.0.1:{theirs}"]
            assert network.ask("about", "ew-2")[1]["proxy"] == []
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.accept()
    assert "s3cret" not in network.log()


# -- while there is no service ------------------------------------------------------------------------------------------------------


def test_nothing_is_started_before_somebody_connects(network: Network) -> None:
    with host_server(b"the host: ") as port:
        box, other = (network.sandbox(name, add=False, allow=[f"127.0.0.1:{port}"]) for name in ("ew-a", "ew-b"))
        network.add(box, kept=True)
        network.add(other, kept=True)
        network.board.heard()
        assert network.services() == []
        said: list[str] = []
        inside = threading.Thread(target=lambda: said.append(box.run(asks(connect_to(port) + "hi"))))
        inside.start()
        assert calling.wire.readable(network.board.fileno(), 30)
        network.board.heard()
        inside.join(30)
        assert "the host: hi" in said[0]
        assert "the host: hi" in other.run(asks(connect_to(port) + "hi"))
        assert not network.board._kept


def test_a_sandbox_that_ends_before_anybody_connects_is_forgotten(network: Network) -> None:
    box = network.sandbox("ew-a", add=False)
    before = len(os.listdir("/proc/self/fd"))
    network.add(box, kept=True)
    box.end()
    assert calling.wire.readable(network.board.fileno(), 30)
    network.board.heard()
    assert not network.board._kept
    assert len(os.listdir("/proc/self/fd")) <= before
    assert network.services() == []


def test_whoever_leaves_hands_over_what_lives_on(network: Network) -> None:
    with host_server(b"the host: ") as port:
        box = network.sandbox("ew-a", add=False, allow=[f"127.0.0.1:{port}"])
        network.add(box, kept=True)
        network.board.close()
        network.board = Switchboard(network.state)
        assert "the host: hi" in box.run(asks(connect_to(port) + "hi"))
