"""Sandboxes for the network service without the sandbox: a stand-in for the keeper, in a real network namespace of its own.

The stand-in makes the sockets that a sandbox's builder would make, listens where a keeper listens, and answers the orders about
the network with the keeper's own code. Beside them it runs programs in its network.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elsewhere.sandbox.keeping.line import connect
from elsewhere.sandbox.networking import calling
from elsewhere.sandbox.networking.switchboard import Switchboard
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State

_STAND_IN = """
import json, os, socket, subprocess, sys, threading
from elsewhere.linux import syscalls
from elsewhere.linux.network import open_ports, raise_loopback
from elsewhere.sandbox.keeping import line, wire
from elsewhere.sandbox.keeping.ports import ORDERS, Ports
from elsewhere.sandbox.records import record

directory = sys.argv[1]
own = (os.geteuid(), os.getegid())
syscalls.unshare(0x40000000 | (0 if own[0] == 0 else 0x10000000))
if own[0]:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{own[0]} {own[0]} 1"), ("gid_map", f"{own[1]} {own[1]} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
raise_loopback()
ports = Ports(open_ports()[0])
lock = record.hold_lock(directory)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.bind(listener, directory)
listener.listen(64)

def converse(peer):
    while True:
        try:
            message, fds = wire.receive(peer)
        except (EOFError, OSError):
            return
        if message[0] in ORDERS:
            ports.answer(peer, message)
        elif message[0] == "hear":
            threading.Thread(target=listen, args=(socket.socket(fileno=fds[0]),), daemon=True).start()
            peer.send(b"done")

def listen(told):
    while what := told.recv(512):
        with open(directory + "/heard", "ab") as file:
            file.write(what + b"\\n")

def answer():
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=converse, args=(peer,), daemon=True).start()

threading.Thread(target=answer, daemon=True).start()
print("ready", flush=True)
for order in sys.stdin:
    words = json.loads(order)
    if words[0] == "start":
        server = subprocess.Popen([sys.executable, "-c", words[1]], stdout=subprocess.PIPE, text=True)
        print(json.dumps(server.stdout.readline()), flush=True)
    else:
        done = subprocess.run([sys.executable, "-c", words[1]], capture_output=True, text=True, timeout=60)
        print(json.dumps(done.stdout + done.stderr), flush=True)
os.killpg(0, 9)
"""

SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", {port}), backlog=512)
print("listens", flush=True)
while True:
    sock, _ = server.accept()
    sock.sendall({said!r} + sock.recv(100))
    sock.close()
"""

CLIENT = """
import socket
sock = socket.create_connection(("127.0.0.1", {port}), timeout=30)
sock.sendall(b"hello")
found = b""
while True:
    try:
        more = sock.recv(100)
    except ConnectionResetError:
        break
    if not more:
        break
    found += more
print(found.decode())
"""


def asks(head: str) -> str:
    """A program that says this to the proxy, and prints what comes back."""
    return CLIENT.format(port=61080).replace('b"hello"', repr(head.encode()))


@dataclass
class StandIn:
    """A sandbox, as far as the network goes."""

    state: State
    id: str
    process: "subprocess.Popen[str]"
    shares: Any = ()

    @property
    def directory(self) -> Path:
        return Path(self.state.sandbox(self.id))

    def change(self, mode: str = "allow", shares: Any = (), **network: Any) -> None:
        self.shares = shares
        self.record(mode, {"allow": [], "deny": [], "presets": [], "machine": [], "forward": [], "publish": [], **network})

    def record(self, mode: str, network: dict[str, Any]) -> None:
        made = Record(self.id, "running", "/", {}, time.time(), "overlay-userns", {}, {}, [], [])
        made.confinement, made.network = {"network": mode, "shares": self.shares}, network
        record.save(made, str(self.directory))

    def _order(self, word: str, code: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([word, code]) + "\n")
        self.process.stdin.flush()
        return str(json.loads(self.process.stdout.readline()))

    def run(self, code: str) -> str:
        """What a program says that is run inside."""
        return self._order("do", code)

    def serve(self, port: int, said: bytes) -> None:
        """Something inside that answers with this and what it was told."""
        assert self._order("start", SERVER.format(port=port, said=said)) == "listens\n"

    def heard(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / "heard").read_text().splitlines()
        return []

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@dataclass
class Network:
    """A state directory of its own, its launcher's switchboard, and stand-ins."""

    state: State
    board: Switchboard
    made: list[StandIn] = field(default_factory=list)

    def sandbox(self, name: str, mode: str = "allow", *, add: bool = True, **network: Any) -> StandIn:
        os.mkdir(self.state.sandbox(name), 0o700)
        words = [sys.executable, "-c", _STAND_IN, self.state.sandbox(name)]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        found = StandIn(self.state, name, process)
        self.made.append(found)
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            pytest.skip("no network namespace can be made here")
        found.change(mode, **network)
        if add:
            self.add(found)
        return found

    def add(self, sandbox: StandIn, *, kept: bool = False, **more: Any) -> None:
        """`kept`: with the switchboard, until somebody connects."""
        with self._ports(sandbox) as ports:
            self.board.add(sandbox.id, sandbox.process.pid, ports, **more)
        if not kept:
            self.board._hand_over()

    def ports_of(self, sandbox: StandIn) -> list[str]:
        with self._ports(sandbox) as ports:
            return list(ports)

    @contextlib.contextmanager
    def _ports(self, sandbox: StandIn) -> Iterator[dict[str, int]]:
        line = connect(str(sandbox.directory))
        assert line is not None
        with line:
            ports = line.ports()
        yield ports
        for fd in ports.values():
            os.close(fd)

    def ask(self, *message: Any) -> Any:
        return calling.ask(self.state, message)

    def services(self) -> list[int]:
        """The processes that serve this state directory."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                    state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                    if (
                        b"elsewhere.sandbox.networking.service" in words
                        and os.fsencode(self.state.path) in words
                        and state != "Z"
                    ):
                        found.append(int(entry))
        return found

    def log(self) -> str:
        return (Path(self.state.room("run")) / "network.log").read_text()


@contextlib.contextmanager
def networked(place: Path) -> Iterator[Network]:
    state = State.open(str(place / "state"))
    network = Network(state, Switchboard(state))
    try:
        yield network
    finally:
        network.board.close()
        for sandbox in network.made:
            sandbox.end()
        for pid in network.services():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
