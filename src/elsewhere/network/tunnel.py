"""A ProxyCommand for ssh inside a sandbox: `python3 tunnel.py HOST PORT` asks the sandbox's proxy for a connection, and passes on
between it and its own input and output. Only the standard library: it runs inside, as a file, by whatever Python there is.
"""

import contextlib
import os
import select
import socket
import sys

PROXY = ("127.0.0.1", 61080)
_LONGEST_HEAD = 16 << 10
_CHUNK = 64 << 10


def connect(host: str, port: int) -> tuple[socket.socket, bytes]:
    """The connection, and what came along with the proxy's answer."""
    sock = socket.create_connection(PROXY)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    sock.sendall(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _LONGEST_HEAD:
        data = sock.recv(_CHUNK)
        if not data:
            break
        head += data
    head, _, rest = head.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ", 2)
    if status[1:2] != ["200"]:
        sys.exit(" ".join(status[2:]) or "the proxy gave no answer")
    return sock, rest


def relay(sock: socket.socket, heard: bytes) -> None:
    """Until the other side has nothing more to say. `heard` was read from it already. Neither way waits for the other: each has
    at most one chunk, and reads the next one when that is passed on."""
    sock.setblocking(False)
    said, speaks, hears = b"", True, True
    while hears or heard:
        ready = _ready(sock, said, heard, speaks=speaks, hears=hears)
        if 0 in ready:
            said = os.read(0, _CHUNK)
            speaks = bool(said)
        if sock.fileno() in ready and not heard and hears:
            with contextlib.suppress(BlockingIOError):
                heard = sock.recv(_CHUNK)
                hears = bool(heard)
        if sock.fileno() in ready and said:
            with contextlib.suppress(BlockingIOError):
                said = said[sock.send(said) :]
        elif 0 in ready and not speaks:
            sock.shutdown(socket.SHUT_WR)
        if 1 in ready:
            heard = heard[os.write(1, heard[: select.PIPE_BUF]) :]  # so much never blocks, where anything can be written


def _ready(sock: socket.socket, said: bytes, heard: bytes, *, speaks: bool, hears: bool) -> set[int]:
    poll = select.poll()
    if speaks and not said:
        poll.register(0, select.POLLIN)
    if heard:
        poll.register(1, select.POLLOUT)
    wanted = (select.POLLOUT if said else 0) | (select.POLLIN if hears and not heard else 0)
    if wanted:
        poll.register(sock, wanted)
    return {fd for fd, _ in poll.poll()}


def main() -> None:
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal():
        sys.exit("usage: tunnel.py HOST PORT")
    sock, rest = connect(sys.argv[1], int(sys.argv[2]))
    relay(sock, rest)


if __name__ == "__main__":
    main()
