"""A host whose names are the test's: a DNS server on a loopback address of its own, and a /etc/resolv.conf that names it.

The file is bound in a mount namespace (`linux/hosts.py`), so nobody else on this machine sees it. Port 53 and the namespace need
root.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from test_ladder import Elsewhere, needs_root

from conftest import Person

A, AAAA = 1, 28


@dataclass
class Names:
    """`known` has the addresses of a name; if there are several answers, one after the other. `asked` is what anybody asked."""

    person: Person
    known: dict[str, list[list[str]]]
    asked: list[tuple[str, int]] = field(default_factory=list)

    def host(self) -> Elsewhere:
        return Elsewhere(self.person, "--bind", f"{self.person.place / 'resolv.conf'}:/etc/resolv.conf")

    def times(self, name: str, kind: int = A) -> int:
        return self.asked.count((name, kind))

    def answer(self, question: bytes) -> bytes:
        labels, place = [], 12
        while question[place]:
            labels.append(question[place + 1 : place + 1 + question[place]].decode())
            place += 1 + question[place]
        kind = struct.unpack_from("!H", question, place + 1)[0]
        name = ".".join(labels).lower()
        answers = self.known.get(name)
        before = self.times(name, kind)
        self.asked.append((name, kind))
        addresses = answers[min(before, len(answers) - 1)] if answers else []
        chosen = [one for one in addresses if kind == (AAAA if ":" in one else A)]
        head = question[:2] + struct.pack("!5H", 0x8180 | (0 if answers else 3), 1, len(chosen), 0, 0) + question[12 : place + 5]
        for one in chosen:
            packed = socket.inet_pton(socket.AF_INET6 if ":" in one else socket.AF_INET, one)
            head += struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(packed)) + packed
        return head


@contextlib.contextmanager
def resolved(person: Person, known: dict[str, list[list[str]]]) -> Iterator[Names]:
    needs_root()
    own = f"127.{100 + os.getpid() % 100}.{os.getpid() // 256 % 256}.{2 + os.getpid() % 250}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind((own, 53))
        except OSError as error:
            pytest.skip(f"somebody has port 53 of every address here: {error}")
        (person.place / "resolv.conf").write_text(f"nameserver {own}\noptions timeout:5 attempts:1\n")
        found = Names(person, known)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    question, sender = server.recvfrom(4096)
                    if question == b"end":
                        return
                    server.sendto(found.answer(question), sender)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield found
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"end", (own, 53))
            thread.join()
