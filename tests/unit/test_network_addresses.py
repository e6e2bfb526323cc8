"""Addresses that no name may lead to by accident, in all the forms in which they can be written."""

import asyncio
import ipaddress
import socket
import subprocess
import sys
import threading
import time

import pytest

from elsewhere.network import dialling
from elsewhere.network.addresses import is_own, refusal, why_refused
from elsewhere.network.dialling import Resolver, Unreachable, connect

PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "203.0.113.80",
    "140.82.121.4",
    "2606:4700::1111",
    "2a00:1450:4001::1",
    "64:ff9b::808:808",
    "2002:808:808::1",
]
PRIVATE = [
    "127.0.0.1", "127.8.8.8", "::1", "10.0.0.5", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.127.255.255",
    "169.254.1.1", "fe80::1", "fc00::1", "fd12:3456::1", "fec0::1", "192.0.0.8", "198.18.0.1", "240.0.0.1", "255.255.255.255",
    "2001:db8::1", "2001::1", "100::1", "4000::1", "64:ff9b:1::a00:5",
    "::ffff:127.0.0.1", "::ffff:10.0.0.5", "::127.0.0.1", "64:ff9b::10.0.0.5", "64:ff9b::7f00:1", "2002:a00:5::1", "2002:7f00:1::",
]  # fmt: skip
LOOPBACK = ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"]
METADATA = ["169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "::ffff:169.254.169.254"]
NEVER = ["0.0.0.0", "0.1.2.3", "::", "224.0.0.1", "239.1.1.1", "ff02::1", "::ffff:0.0.0.0"]


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_reached(text: str) -> None:
    assert why_refused(ipaddress.ip_address(text)) == ""


@pytest.mark.parametrize("text", PRIVATE)
def test_others_only_if_they_are_meant(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert why_refused(address)
    assert why_refused(address, named="private") == ""
    assert why_refused(address, named="address") == ""
    # What the machine's settings name may be in its network, but not the machine itself, unless they say so.
    assert bool(why_refused(address, named="machine")) is (text in LOOPBACK)


@pytest.mark.parametrize("text", METADATA)
def test_a_name_never_leads_to_credentials(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert "credentials" in why_refused(address)
    assert "credentials" in why_refused(address, named="private")
    assert "credentials" in why_refused(address, named="machine")
    assert why_refused(address, named="address") == ""


@pytest.mark.parametrize("text", NEVER)
def test_some_are_nobodys(text: str) -> None:
    assert why_refused(ipaddress.ip_address(text), named="address")


def test_an_address_of_this_machine_is_known_by_its_interfaces() -> None:
    assert is_own(ipaddress.ip_address("127.0.0.1"))
    assert is_own(ipaddress.ip_address("::1"))
    assert not is_own(ipaddress.ip_address("203.0.113.80"))


OWN = """
import fcntl, ipaddress, socket, struct
from elsewhere.linux.network import raise_loopback
from elsewhere.network.addresses import is_own, why_refused
raise_loopback()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:  # a second address, of the public kind
    fcntl.ioctl(sock, 0x8916, struct.pack("16sH2x4s8x", b"lo:1", socket.AF_INET, socket.inet_aton("203.0.113.7")))
with open("/proc/sys/net/ipv4/ip_nonlocal_bind", "w") as setting:
    setting.write("1")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind(("198.51.100.9", 0))  # the control: anything can be bound to
for text in ("203.0.113.7", "198.51.100.9", "2606:4700::1111"):
    print(text, is_own(ipaddress.ip_address(text)), why_refused(ipaddress.ip_address(text)))
"""


def test_an_address_is_not_this_machines_only_because_it_can_be_bound_to() -> None:
    """In a network of the test's own."""
    words = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*words, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("no network namespace can be made")
    done = subprocess.run([*words, sys.executable, "-c", OWN], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "203.0.113.7 True an address of this machine itself",
        "198.51.100.9 False ",
        "2606:4700::1111 False ",
    ], done.stderr


def test_a_kernel_that_cannot_be_asked_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> socket.socket:
        raise PermissionError

    monkeypatch.setattr(socket, "socket", refused)
    assert is_own(ipaddress.ip_address("203.0.113.80"))


@pytest.mark.parametrize(
    ("host", "address", "how"),
    [
        ("db.internal", "10.0.0.5", "elsewhere network calm-otter --allow db.internal:80"),
        ("db.internal", "127.0.0.1", "elsewhere network calm-otter --allow db.internal:80"),
        ("example.org", "10.0.0.5", "elsewhere network calm-otter --allow 10.0.0.5:80"),
        ("example.org", "127.0.0.1", "elsewhere network calm-otter --allow 127.0.0.1:80"),
        ("example.org", "fd00::5", "elsewhere network calm-otter --allow [fd00::5]:80"),
        ("meta.internal", "169.254.169.254", "a cloud gives out credentials there; if that is meant: elsewhere network calm-otter --allow 169.254.169.254:80"),
        ("db.internal", "0.0.0.0", "nothing can be connected to there, whatever is allowed"),
        ("example.org", "224.0.0.1", "nothing can be connected to there, whatever is allowed"),
    ],
)  # fmt: skip
def test_what_to_type_about_where_a_name_leads(host: str, address: str, how: str) -> None:
    said, typed = refusal(host, 80, ipaddress.ip_address(address), "calm-otter")
    assert said.startswith(f"{host} leads to {address}, a")
    assert typed == how


# -- resolving ------------------------------------------------------------------------------------------------------------------


def test_a_name_is_resolved_by_the_host() -> None:
    async def found() -> list[object]:
        resolver = Resolver()
        try:
            return list(await resolver.addresses("localhost", 80))
        finally:
            resolver.close()

    assert ipaddress.ip_address("127.0.0.1") in asyncio.run(found())


def test_a_resolver_that_hangs_is_not_waited_for_and_does_not_keep_others_waiting_for_ever() -> None:
    released = threading.Event()

    def lookup(host: str, port: int) -> list[str]:
        if host == "slow.test":
            assert released.wait(60)
        return ["192.0.2.1"]

    async def scenario() -> None:
        resolver = Resolver(lookup, seconds=0.2, threads=2)
        try:
            with pytest.raises(Unreachable) as caught:
                await resolver.addresses("slow.test", 80)
            assert caught.value.slow
            assert await resolver.addresses("fast.test", 80) == [ipaddress.ip_address("192.0.2.1")]
        finally:
            released.set()
            resolver.close()

    asyncio.run(scenario())


def test_only_so_many_wait_for_the_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "_MOST_WAITING", 3)
    released = threading.Event()

    def lookup(host: str, port: int) -> list[str]:
        assert released.wait(60)
        return ["192.0.2.1"]

    async def scenario() -> None:
        resolver = Resolver(lookup, seconds=30, threads=1)
        try:
            tasks = [asyncio.create_task(resolver.addresses("a.test", 80)) for _ in range(4)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().exception()
            assert isinstance(error, Unreachable)
            assert error.busy
            released.set()
            assert [type(found) for found in await asyncio.gather(*tasks, return_exceptions=True)].count(list) == 3
            assert await resolver.addresses("a.test", 80)  # there is room again
        finally:
            released.set()
            resolver.close()

    asyncio.run(scenario())


def test_one_share_never_has_all_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when it has stopped waiting for those that hang."""
    monkeypatch.setattr(dialling, "_TURNS", 0.2)
    released, busy = threading.Event(), []

    def lookup(host: str, port: int) -> list[str]:
        if host == "slow.test":
            busy.append(host)
            assert released.wait(60)
        return ["192.0.2.1"]

    async def scenario() -> None:
        resolver = Resolver(lookup, seconds=2.0, threads=5)
        one, other = resolver.share(), resolver.share()
        try:
            for _ in range(2):
                found = await asyncio.gather(*(one.addresses("slow.test", 80) for _ in range(10)), return_exceptions=True)
                assert {type(error) for error in found} == {Unreachable}
            assert len(busy) == 4
            assert await other.addresses("fast.test", 80) == [ipaddress.ip_address("192.0.2.1")]
            released.set()
            for _ in range(10):
                await one.addresses("fast.test", 80)  # what was taken is given back
        finally:
            released.set()
            resolver.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("lookup", "words"),
    [
        (lambda host, port: [], "no address"),
        (lambda host, port: (_ for _ in ()).throw(socket.gaierror(-2, "Name or service not known")), "Name or service not known"),
        (lambda host, port: (_ for _ in ()).throw(UnicodeError("label too long")), "cannot be resolved"),
    ],
)
def test_a_name_without_an_address_says_why(lookup: dialling.Lookup, words: str) -> None:
    async def scenario() -> None:
        resolver = Resolver(lookup)
        try:
            with pytest.raises(Unreachable, match=words):
                await resolver.addresses("a.test", 80)
        finally:
            resolver.close()

    asyncio.run(scenario())


# -- connecting -----------------------------------------------------------------------------------------------------------------


def test_the_next_address_is_tried_when_one_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        async def scenario() -> None:
            found = [ipaddress.ip_address("127.0.0.2"), ipaddress.ip_address("127.0.0.1")]
            sock, address = await connect(found, port, 10)
            with sock:
                assert str(address) == "127.0.0.1"
                assert sock.getpeername() == ("127.0.0.1", port)

        asyncio.run(scenario())


def test_nobody_there_says_so() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, and listening to nobody
        with pytest.raises(Unreachable, match="refused"):
            asyncio.run(connect([ipaddress.ip_address("127.0.0.1")], bound.getsockname()[1], 10))


def test_a_connection_that_nobody_takes_has_an_end_and_a_slow_address_is_not_waited_for() -> None:
    """A listener whose queue is full answers nothing, as a host behind a wall."""
    with socket.socket() as full, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        full.bind(("127.0.0.3", port))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.3", port))
        try:
            time.sleep(0.05)
            with pytest.raises(Unreachable, match="in time") as caught:
                asyncio.run(connect([ipaddress.ip_address("127.0.0.3")], port, 0.3))
            assert caught.value.slow

            async def scenario() -> None:
                sock, address = await connect([ipaddress.ip_address("127.0.0.3"), ipaddress.ip_address("127.0.0.1")], port, 30)
                sock.close()
                assert str(address) == "127.0.0.1"

            asyncio.run(scenario())
        finally:
            for filler in fillers:
                filler.close()
