"""What the ways out of a sandbox's network cost, against a client on the host itself; and a network of its own, at creation (O).

    direct         the client runs on the host                     what a loopback can do here
    proxy          CONNECT, by the proxy that HTTP_PROXY names
    redirection    a plain connection, led to us by the kernel
    forward        a plain connection to a port that was forwarded

One server on the host and one client, a script that times itself: the same for all of them.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from effort import Effort
from elsewhere import Sandbox
from measure import Row, Samples, Section
from rounds import interleaved
from workspace import Workspace

__all__ = ["networking"]

Mode = Literal["host", "none", "allow"]

_LOOPBACK = "127.0.0.1"
_DIRECT = "direct"
_MODES: tuple[Mode, ...] = ("host", "none", "allow")
_BLOCKS = 3
_EACH_KIB = 256
_PATIENCE_S = 20.0

# Sends as many bytes as it is asked for, again and again. Says its port when it listens.
_SERVER = """
import socket, struct, sys, threading
data = bytes(1 << 18)
def serve(sock):
    with sock:
        while True:
            wanted = sock.recv(8, socket.MSG_WAITALL)
            if len(wanted) < 8:
                return
            left = struct.unpack("!Q", wanted)[0]
            while left:
                left -= sock.send(data[:left])
def accept(listener):
    while True:
        sock = listener.accept()[0]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(sock,), daemon=True).start()
first = socket.create_server((sys.argv[1], 0), backlog=512)
port = first.getsockname()[1]
others = [socket.create_server((address, port), backlog=512) for address in sys.argv[2:]]
for listener in (first, *others):
    threading.Thread(target=accept, args=(listener,), daemon=True).start()
print(port, flush=True)
sys.stdin.read()
"""

# Prints seconds: of each of some connections with one byte, of one with much, of many at once with a little each.
_CLIENT = """
import json, socket, struct, sys, threading, time
way, host, port, opened, much, many, little = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
def connected():
    if way != "proxy":
        return socket.create_connection((host, port))
    sock = socket.create_connection(("127.0.0.1", 61080))
    sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n".encode())
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        more = sock.recv(4096)
        if not more:
            break
        head += more
    if b" 200 " not in head.split(b"\\r\\n")[0]:
        raise SystemExit(head.decode())
    return sock
def ask(wanted):
    room = bytearray(1 << 18)
    with connected() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(struct.pack("!Q", wanted))
        while wanted:
            got = sock.recv_into(room)
            if not got:
                raise SystemExit("the connection broke off")
            wanted -= got
def timed(action):
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
done = []
def at_once():
    threads = [threading.Thread(target=lambda: (ask(little), done.append(1))) for _ in range(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(done) != many:
        raise SystemExit(f"{many - len(done)} of {many} connections failed")
print(json.dumps([[timed(lambda: ask(1)) for _ in range(opened)], timed(lambda: ask(much)), timed(at_once)]))
"""


@dataclass(frozen=True, slots=True)
class _Way:
    """How a client gets to the server, and who starts it; `absent` says why there is no such way here."""

    name: str
    host: str
    start: Callable[[list[str]], str]
    absent: str = ""


def networking(place: Workspace, effort: Effort) -> Section:
    section = Section(
        "O",
        "The network: ways out of a sandbox, and a network of its own",
        "One server on the host's loopback; the same client on the host (direct) and inside: connections with one byte each, "
        f"one with {effort.sent_mib} MiB, and {effort.connections} at once with {_EACH_KIB} KiB each until the last was done; in "
        "changing order. Then create + run `true` + remove, warm, with each kind of network, in blocks of one kind. Ratios are "
        "to the client on the host, and to the host's network.",
        "ms",
        baseline=_DIRECT,
    )
    section.rows += _ways_out(place, effort)
    section.rows += _creations(place, effort)
    return section


# -- ways out -------------------------------------------------------------------------------------------------------------------


def _ways_out(place: Workspace, effort: Effort) -> list[Row]:
    own = _own_address()
    with _server([_LOOPBACK, *([own] if own else [])]) as port:
        allowed = [f"{address}:{port}" for address in (_LOOPBACK, own) if address]
        with Sandbox.create(project=place.project, base="live", network="allow", allow=allowed, forward=[str(port)]) as box:

            def inside(argv: list[str]) -> str:
                return box.run(argv).check().stdout

            said = str(box.enforced["network"])
            redirects = "redirection" in said and "no redirection" not in said
            ways = [
                _Way(_DIRECT, _LOOPBACK, _outside),
                _Way("proxy", _LOOPBACK, inside),
                _Way(
                    "redirection",
                    own,
                    inside,
                    "" if own and redirects else "the kernel cannot redirect" if own else "this machine has a loopback only",
                ),
                _Way("forward", _LOOPBACK, inside),
            ]
            present = [way for way in ways if not way.absent]
            steps = [lambda way=way: _measured(way, port, effort) for way in present]
            results = dict(
                zip(
                    [way.name for way in present],
                    interleaved(steps, effort.network_rounds, effort.pause, patience=_PATIENCE_S),
                    strict=True,
                )
            )
    return _rows(ways, results, effort)


def _rows(ways: list[_Way], results: dict[str, list[tuple[list[float], float, float]]], effort: Effort) -> list[Row]:
    kinds: list[tuple[str, Callable[[tuple[list[float], float, float]], list[float]], float]] = [
        ("a connection, one byte", lambda one: one[0], 0),
        (f"{effort.sent_mib} MiB by one connection", lambda one: [one[1]], effort.sent_mib),
        (f"{effort.connections} at once", lambda one: [one[2]], effort.connections * _EACH_KIB / 1024),
    ]
    rows: list[Row] = []
    for what, pick, mib in kinds:
        group = []
        for way in ways:
            row = Row(f"{what}: {way.name}", absent=way.absent)
            if not way.absent:
                row.samples = Samples.of([value for one in results[way.name] for value in pick(one)], 1000)
                row.note = f"{mib / row.samples.median * 1000:,.0f} MiB/s" if mib else ""
            group.append(row)
        rows += _compared(group)
    return rows


def _compared(group: list[Row]) -> list[Row]:
    """To the first of them."""
    first = group[0].samples
    for row in group:
        if row.samples is not None and first is not None:
            row.ratio = row.samples.median / first.median
    return group


def _measured(way: _Way, port: int, effort: Effort) -> tuple[list[float], float, float]:
    numbers = [port, effort.opened, effort.sent_mib << 20, effort.connections, _EACH_KIB << 10]
    argv = [sys.executable, "-I", "-c", _CLIENT, way.name, way.host, *map(str, numbers)]
    each, much, many = json.loads(way.start(argv))
    return each, much, many


def _outside(argv: list[str]) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def _own_address() -> str:
    """An address of this machine that is not loopback: what leads to loopback is never redirected. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("203.0.113.1", 9))
        found = str(sock.getsockname()[0])
        return "" if found.startswith("127.") else found
    return ""


@contextlib.contextmanager
def _server(addresses: list[str]) -> Iterator[int]:
    """Its port; it ends with its input."""
    argv = [sys.executable, "-I", "-c", _SERVER, *addresses]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


# -- creation -------------------------------------------------------------------------------------------------------------------


def _creations(place: Workspace, effort: Effort) -> list[Row]:
    """What stands ready is of the kind that was asked for last: who changes the kind every time pays for that instead."""
    taken: dict[Mode, list[float]] = {mode: [] for mode in _MODES}
    for block in range(_BLOCKS):
        for mode in _MODES[block:] + _MODES[:block]:
            _life(place.project, mode)
            for _ in range(effort.created):
                time.sleep(effort.pause)
                taken[mode].append(_life(place.project, mode))
    notes: dict[Mode, str] = {
        "host": "the host's",
        "none": "a namespace with a loopback",
        "allow": "the same, with a proxy and a redirection",
    }
    return _compared(
        [Row(f"create + run + remove: {mode}", notes[mode], samples=Samples.of(taken[mode], 1000)) for mode in _MODES]
    )


def _life(project: str, mode: Mode) -> float:
    began = time.perf_counter()
    with Sandbox.create(project=project, base="live", network=mode) as box:
        box.run(["true"]).check()
    return time.perf_counter() - began
