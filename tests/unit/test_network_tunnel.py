"""The tunnel that runs inside as a file: it passes on whatever is spoken, both ways at once."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from elsewhere.linux.network import OWN_PORTS, PROXY_PORT
from elsewhere.network import tunnel
from elsewhere.network.ports import Forward
from proxied import LOOPBACK, Origin, everything, exactly, origin, read_head

MUCH = 32 << 20  # more than the kernel keeps for a connection
RUN = "import sys; from elsewhere.network import tunnel; tunnel.PROXY = ('127.0.0.1', int(sys.argv.pop(1))); tunnel.main()"


def through(port: int, words: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", RUN, str(port), "server.test", "22"], input=words, capture_output=True, timeout=60
    )


def tunnelled(speak: Callable[[socket.socket], None]) -> Callable[[socket.socket, Origin], None]:
    def handle(sock: socket.socket, server: Origin) -> None:
        server.heads.append(read_head(sock))
        sock.sendall(b"HTTP/1.1 200 Fine\r\n\r\nbanner ")
        speak(sock)

    return handle


def test_it_knows_the_proxy_by_the_same_number_as_everybody_else() -> None:
    """It stands alone, so it cannot ask."""
    assert tunnel.PROXY == (LOOPBACK, PROXY_PORT)
    assert PROXY_PORT in OWN_PORTS
    assert len(OWN_PORTS) == 3
    assert Forward.parse(f"15432={PROXY_PORT}").port == PROXY_PORT


def test_it_passes_on_until_the_other_side_has_said_all() -> None:
    with origin(tunnelled(lambda sock: sock.sendall(everything(sock)))) as proxy:
        done = through(proxy.port, b"hello")
        assert (done.returncode, done.stdout) == (0, b"banner hello"), done.stderr
        assert proxy.heads[0].startswith(b"CONNECT server.test:22 HTTP/1.1\r\n")


def test_a_side_that_does_not_listen_before_it_has_said_all_is_heard() -> None:
    """While there is as much for it to hear: whoever waits for either to be taken waits for ever."""

    def stubborn(sock: socket.socket) -> None:
        sock.sendall(b"x" * MUCH)
        assert exactly(sock, MUCH) == b"y" * MUCH
        sock.sendall(b" heard")

    with origin(tunnelled(stubborn)) as proxy:
        done = through(proxy.port, b"y" * MUCH)
        assert done.returncode == 0, done.stderr
        assert done.stdout == b"banner " + b"x" * MUCH + b" heard"


def test_a_reader_that_is_slow_does_not_keep_words_from_the_other_side() -> None:
    heard = threading.Event()

    def both(sock: socket.socket) -> None:
        sender = threading.Thread(target=sock.sendall, args=(b"x" * MUCH,))
        sender.start()
        assert exactly(sock, MUCH) == b"y" * MUCH
        heard.set()
        sender.join()

    with origin(tunnelled(both)) as proxy:
        words = [sys.executable, "-c", RUN, str(proxy.port), "server.test", "22"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"y" * MUCH)
            process.stdin.close()
            assert heard.wait(60), "nothing of what it says was read yet"
            assert process.stdout.read() == b"banner " + b"x" * MUCH
        assert process.returncode == 0


def test_a_refusal_is_its_last_words() -> None:
    def refusing(sock: socket.socket, server: Origin) -> None:
        read_head(sock)
        sock.sendall(b"HTTP/1.1 403 elsewhere refused server.test:22\r\n\r\n")

    with origin(refusing) as proxy:
        done = through(proxy.port, b"")
        assert done.returncode == 1
        assert done.stderr == b"elsewhere refused server.test:22\n"
