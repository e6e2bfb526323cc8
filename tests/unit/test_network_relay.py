"""The relay: both ways, each to its own end, nothing read that cannot be passed on."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elsewhere.network.relay import Idle, Moved, relay


@contextlib.contextmanager
def relayed(
    *, idle: float | None = None, first: tuple[bytes, bytes] = (b"", b""), kind: str = "tcp"
) -> Iterator[tuple[socket.socket, socket.socket, list[object]]]:
    """Two ends, and a relay between them that runs in a thread; the list has its outcome afterwards."""
    (one, near), (far, other) = pair(kind), pair(kind)
    outcome: list[object] = []

    def run() -> None:
        async def both() -> None:
            try:
                outcome.append(await relay(near, far, to_far=first[0], to_near=first[1], idle=idle))
            except (OSError, Idle) as error:
                outcome.append(error)

        near.setblocking(False)
        far.setblocking(False)
        asyncio.run(both())
        near.close()
        far.close()

    thread = threading.Thread(target=run)
    one.settimeout(30)
    other.settimeout(30)
    thread.start()
    try:
        yield one, other, outcome
    finally:
        one.close()
        other.close()
        thread.join(30)
        assert not thread.is_alive()


def pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_the_end_of_one_way_is_not_the_end_of_the_other(kind: str) -> None:
    with relayed(kind=kind) as (one, other, outcome):
        one.sendall(b"question")
        one.shutdown(socket.SHUT_WR)
        assert receive(other) == b"question"  # up to its end
        other.sendall(b"answer, ")
        other.sendall(b"later")
        other.close()
        assert receive(one) == b"answer, later"
    assert outcome == [Moved(8, 13)]


def test_what_was_read_before_goes_first() -> None:
    with relayed(first=(b"early ", b"banner ")) as (one, other, outcome):
        one.sendall(b"late")
        one.shutdown(socket.SHUT_WR)
        assert receive(other) == b"early late"
        other.sendall(b"more")
        other.close()
        assert receive(one) == b"banner more"
    assert outcome == [Moved(10, 11)]


def test_much_goes_through_both_ways_at_once_whole() -> None:
    content = bytes(range(256)) * (8 << 12)  # 8 MiB
    with relayed() as (one, other, outcome):

        def send(sock: socket.socket) -> None:
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)

        senders = [threading.Thread(target=send, args=(sock,)) for sock in (one, other)]
        found: dict[int, bytes] = {}
        readers = [threading.Thread(target=lambda sock=sock: found.update({id(sock): receive(sock)})) for sock in (one, other)]
        for thread in (*senders, *readers):
            thread.start()
        for thread in (*senders, *readers):
            thread.join(60)
        assert found == {id(one): content, id(other): content}
    assert outcome == [Moved(len(content), len(content))]


def test_a_reader_that_does_not_read_stops_the_writer() -> None:
    with relayed() as (one, other, _):
        one.setblocking(False)
        sent, quiet = 0, 0
        while quiet < 20:
            try:
                sent += one.send(b"x" * 65536)
                quiet = 0
            except BlockingIOError:
                quiet += 1
                threading.Event().wait(0.02)
            assert sent < 64 << 20  # what the kernel keeps in four buffers is far less
        one.settimeout(30)
        rest = threading.Thread(target=one.shutdown, args=(socket.SHUT_WR,))
        rest.start()
        assert len(receive(other)) == sent
        rest.join()


def test_a_reset_is_passed_on_as_a_reset() -> None:
    with relayed() as (one, other, outcome):
        one.sendall(b"x")
        assert other.recv(1) == b"x"
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        one.close()
        with pytest.raises(ConnectionResetError):
            other.recv(1)
    assert isinstance(outcome[0], ConnectionResetError)


def test_one_on_which_nothing_moves_ends() -> None:
    with relayed(idle=0.1) as (one, other, outcome):
        one.sendall(b"x")
        assert other.recv(1) == b"x"
        assert receive(one) == b""
    assert isinstance(outcome[0], Idle)


def test_cancelling_leaves_the_sockets_to_the_caller(place: Path) -> None:
    async def scenario() -> None:
        (one, near), (far, other) = pair("tcp"), pair("unix")
        with one, near, far, other:
            near.setblocking(False)
            far.setblocking(False)
            task = asyncio.create_task(relay(near, far))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            one.sendall(b"still there")
            assert await asyncio.get_running_loop().sock_recv(near, 100) == b"still there"

    asyncio.run(scenario())


def receive(sock: socket.socket) -> bytes:
    found = bytearray()
    while data := sock.recv(1 << 16):
        found += data
    return bytes(found)
