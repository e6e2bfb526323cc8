"""The small DNS: what it answers, what it says nothing to, and the book of made-up addresses."""

import asyncio
import os
import random
import socket
import struct

import pytest

from elsewhere.network.addresses import MADE_UP
from elsewhere.network.answers import Denied
from elsewhere.network.resolving import Book, Names
from elsewhere.network.rules import Rules, Verdict, decide_name, parse

A, PTR, MX, TXT, AAAA, HTTPS = 1, 12, 15, 16, 28, 65
FINE, MALFORMED, BROKEN, NO_SUCH_NAME, UNKNOWN_OPERATION = 0, 1, 2, 3, 4


def encoded(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode("latin-1") for label in name.split(".") if label) + b"\0"


def asked(name: str, kind: int = A, group: int = 1, flags: int = 0x0100, questions: int = 1) -> bytes:
    return struct.pack("!6H", 0x1234, flags, questions, 0, 0, 0) + encoded(name) + struct.pack("!HH", kind, group)


class Stub:
    def __init__(self, *allow: str, deny: tuple[str, ...] = ()) -> None:
        self.rules = Rules(allow=tuple(map(parse, allow)), deny=tuple(parse(rule, deny=True) for rule in deny), presets=())
        self.denied: list[Denied] = []
        self.book = Book()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            self.names = Names(sock, self.book, lambda name: decide_name(self.rules, name, "calm-otter"), self.denied.append)

    def ask(self, question: bytes) -> tuple[int, str]:
        """The code, and the address."""
        answer = self.names.answer(question)
        number, flags, questions, found, *_ = struct.unpack_from("!6H", answer)
        assert (number, questions) == (0x1234, 1)
        assert flags & 0xFFF0 == 0x8180  # an answer, recursion wanted and had
        assert answer[12 : len(question)] == question[12:]
        if not found:
            assert len(answer) == len(question)
            return flags & 15, ""
        pointer, kind, group, seconds, length, address = struct.unpack("!HHHIH4s", answer[len(question) :])
        assert (pointer, kind, group, length) == (0xC00C, A, 1, 4)
        assert 0 < seconds <= 60
        return flags & 15, socket.inet_ntoa(address)


def test_a_name_that_is_allowed_has_an_address_of_its_own() -> None:
    stub = Stub("example.org", "*.example.net:22")
    code, one = stub.ask(asked("example.org"))
    other = stub.ask(asked("a.example.net"))[1]
    assert code == FINE
    assert one != other
    assert stub.book.name_of(one) == "example.org"
    assert stub.book.name_of(other) == "a.example.net"
    assert stub.ask(asked("EXAMPLE.oRG")) == (FINE, one)
    assert stub.denied == []


@pytest.mark.parametrize("kind", [AAAA, MX, TXT, HTTPS])
def test_it_has_nothing_else(kind: int) -> None:
    stub = Stub("example.org")
    assert stub.ask(asked("example.org", kind)) == (FINE, "")
    assert stub.ask(asked("example.org", A, group=3)) == (FINE, "")
    assert len(stub.book) == 0


def test_another_name_does_not_exist_and_is_told_once() -> None:
    stub = Stub("example.org")
    for kind in (A, AAAA, HTTPS):
        assert stub.ask(asked("Evil.test", kind)) == (NO_SUCH_NAME, "")
    assert stub.denied == [
        Denied(
            "evil.test",
            0,
            "nothing allows it",
            "elsewhere network calm-otter --allow evil.test (for the web; else --allow evil.test:PORT)",
        ),
    ]
    assert len(stub.book) == 0


def test_a_name_without_a_dot_is_told_unless_it_is_the_machines_own() -> None:
    stub = Stub("example.org")
    for name in ("intranet", os.uname().nodename.partition(".")[0]):
        assert stub.ask(asked(name, A)) == (NO_SUCH_NAME, "")
    assert [(one.host, one.how) for one in stub.denied] == [("intranet", "elsewhere network calm-otter --allow intranet:PORT")]


def test_rules_hold_at_once() -> None:
    stub = Stub()
    assert stub.ask(asked("example.org"))[0] == NO_SUCH_NAME
    stub.rules = Rules(allow=(parse("example.org:22"),), presets=())
    assert stub.ask(asked("example.org"))[0] == FINE


def test_localhost_is_ones_own_and_nobody_has_an_address_backwards() -> None:
    stub = Stub()
    assert stub.ask(asked("localhost")) == (FINE, "127.0.0.1")
    assert stub.ask(asked("db.localhost")) == (FINE, "127.0.0.1")
    assert stub.ask(asked("localhost", AAAA)) == (FINE, "")
    assert stub.ask(asked("1.0.18.198.in-addr.arpa", PTR)) == (NO_SUCH_NAME, "")
    assert stub.denied == []


@pytest.mark.parametrize("name", ["", "10.0.0.5", "a b.test", "ex\nample.org", "-x.test", "127.1", "\xff.test"])
def test_a_name_that_no_host_can_have_does_not_exist(name: str) -> None:
    stub = Stub("10.0.0.5:80", "example.org")
    assert stub.ask(asked(name)) == (NO_SUCH_NAME, "")
    assert stub.denied == []


def test_one_label_that_looks_like_two_is_not_the_name_of_another() -> None:
    question = struct.pack("!6H", 0x1234, 0x0100, 1, 0, 0, 0) + b"\x0bexample.org\0" + struct.pack("!HH", A, 1)
    assert Stub("example.org").ask(question) == (NO_SUCH_NAME, "")


@pytest.mark.parametrize(
    ("question", "code"),
    [
        (asked("example.org", questions=0), MALFORMED),
        (asked("example.org", questions=2), MALFORMED),
        (asked("example.org")[:-1], MALFORMED),
        (asked("example.org")[:20], MALFORMED),
        (asked("example.org")[:12], MALFORMED),
        (asked("")[:12] + b"\xc0\x0c" + struct.pack("!HH", A, 1), MALFORMED),
        (asked("")[:12] + b"\x3f" + b"a" * 63 * 9, MALFORMED),
        (asked(".".join(["a" * 60] * 10)), MALFORMED),
        (asked("example.org", flags=0x2800), UNKNOWN_OPERATION),
    ],
)
def test_what_cannot_be_understood_is_said_to_be_so_in_a_few_bytes(question: bytes, code: int) -> None:
    answer = Stub("example.org").names.answer(question)
    assert len(answer) == 12
    assert answer[3] & 15 == code
    assert answer[4:] == bytes(8)


@pytest.mark.parametrize("question", [b"", b"x" * 11, asked("example.org", flags=0x8180)])
def test_nothing_is_said_to_what_is_no_question(question: bytes) -> None:
    assert Stub("example.org").names.answer(question) == b""


def test_nothing_that_is_sent_breaks_it_or_is_answered_at_length() -> None:
    stub, chance = Stub("example.org"), random.Random(7)
    for _ in range(3000):
        question = bytearray(asked("example.org"))
        for _ in range(chance.randrange(1, 6)):
            question[chance.randrange(len(question))] = chance.randrange(256)
        answer = stub.names.answer(bytes(question[: chance.randrange(len(question) + 1)]))
        assert len(answer) <= len(question) + 16


def test_a_decision_that_fails_is_an_answer_too_and_the_next_one_is_served() -> None:
    async def conversation() -> list[bytes]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: told.append(context["message"]))
        broken = [True]

        def judge(_name: str) -> Verdict:
            if broken.pop() if broken else False:
                raise RuntimeError
            return Verdict(True, "")

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            sock.bind(("127.0.0.1", 0))
            client.setblocking(False)
            task = asyncio.create_task(Names(sock, Book(), judge, lambda _: None).serve())
            found = []
            for question in (asked("example.org"), b"?", asked("example.org")):
                client.sendto(question, sock.getsockname())
                if len(question) > 1:
                    found.append(await asyncio.wait_for(loop.sock_recv(client, 999), 20))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return found

    told: list[str] = []
    first, second = asyncio.run(conversation())
    assert first[3] & 15 == BROKEN
    assert second[3] & 15 == FINE
    assert told == ["a name could not be judged"]


# -- the book -------------------------------------------------------------------------------------------------------------------


def test_made_up_addresses_are_all_different_and_of_nobodys_network() -> None:
    book = Book()
    found = [book.address_for(f"n{number}.test") for number in range(4096)]
    assert len(set(found)) == 4096
    assert all(address.startswith("198.18.") for address in found)
    assert not {str(MADE_UP[0]), str(MADE_UP[-1])} & set(found)
    assert all(book.name_of(address) == f"n{number}.test" for number, address in enumerate(found))


def test_the_one_that_was_not_used_for_the_longest_time_goes() -> None:
    book = Book(most=3)
    one, two, three = (book.address_for(name) for name in ("one.test", "two.test", "three.test"))
    assert book.address_for("one.test") == one
    assert book.name_of(two) == "two.test"
    book.address_for("four.test")
    assert book.name_of(three) is None
    assert (book.name_of(one), book.name_of(two)) == ("one.test", "two.test")
    assert len(book) == 3


def test_a_book_is_never_larger_than_it_may_be() -> None:
    book = Book(most=100)
    for number in range(10_000):
        book.address_for(f"n{number}.test")
    assert len(book) == 100
    assert len(book._names) == 100


def test_a_name_has_the_same_address_in_the_next_book() -> None:
    assert Book().address_for("example.org") == Book().address_for("example.org")


@pytest.mark.parametrize("address", ["198.18.0.0", "10.0.0.1", "::1", "nonsense", ""])
def test_an_address_that_was_never_given_is_nobodys(address: str) -> None:
    book = Book()
    book.address_for("example.org")
    assert book.name_of(address) is None


# -- whether a name is allowed on any port --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "deny", "host", "allowed"),
    [
        ("example.org", "", "example.org", True),
        ("example.org:22", "", "Example.org.", True),
        ("*.example.org:22", "", "a.example.org", True),
        ("*.example.org:22", "", "example.org", False),
        ("example.org", "example.org", "example.org", False),
        ("example.org", "example.org:443", "example.org", True),
        ("example.org:22", "example.org:22", "example.org", False),
        ("example.org", "", "a b", False),
    ],
)
def test_whether_a_name_is_allowed_on_any_port(allow: str, deny: str, host: str, allowed: bool) -> None:
    rules = Rules(allow=(parse(allow),), deny=(parse(deny, deny=True),) if deny else (), presets=())
    assert decide_name(rules, host).allowed is allowed


def test_a_name_by_mode_and_preset() -> None:
    assert decide_name(Rules(), "pypi.org").allowed
    assert not decide_name(Rules(mode="none"), "pypi.org").allowed
    assert decide_name(Rules(mode="host"), "anything.test").allowed
    refused = decide_name(Rules(), "intranet", "calm-otter")
    assert not refused.allowed
    assert refused.how == "elsewhere network calm-otter --allow intranet:PORT", "nobody has said yet on which"
    assert decide_name(Rules(allow=(parse("intranet:22"),)), "intranet").allowed
