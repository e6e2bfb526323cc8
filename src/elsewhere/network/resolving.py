"""Names for programs that know no proxy: a small DNS that answers with made-up addresses, and the book that knows whose they are.

    A      of a name that is allowed on some port      an address of 198.18.0.0/16, for some seconds: `redirected.py` knows it
           of localhost                                127.0.0.1
           of anything else                            no such name, and a denial that is told
    AAAA, MX, …    of a name that exists               nothing: there is no IPv6 here, and a name is all that the other side needs
    PTR            of anything                         no such name

Nothing is asked of anybody: names are resolved on the host's side, when there is a connection to be made. An answer is hardly
longer than its question, and each question is one step of work.
"""

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import struct
import zlib
from collections.abc import Callable

from elsewhere.network import names
from elsewhere.network.addresses import MADE_UP
from elsewhere.network.answers import Denied
from elsewhere.network.rules import Verdict

__all__ = ["MOST_NAMES", "Book", "Judge", "Names"]

Judge = Callable[[str], Verdict]

MOST_NAMES = 4096

_SECONDS = 10  # that an answer may be kept: as long as a book that was lost is missed
_LARGEST = 4096
_HEADER = struct.Struct("!6H")
_ANSWER, _RECURSION_WANTED, _RECURSION_OFFERED, _OPERATION = 0x8000, 0x0100, 0x0080, 0x7800
_FINE, _MALFORMED, _BROKEN, _NO_SUCH_NAME, _UNKNOWN_OPERATION = 0, 1, 2, 3, 4
_A, _PTR, _INTERNET = 1, 12, 1
# Asked beside the A: each would tell of the same denial once more.
_BESIDE = (28, 64, 65)  # AAAA, SVCB, HTTPS


class Book:
    """The made-up addresses of one sandbox. There are at most so many: then the one goes that was not used for the longest time.

    A name has the same address again, if it can, also in the next book: programs keep addresses longer than they should."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._numbers: dict[str, int] = {}  # the one that was used last is last
        self._names: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def address_for(self, name: str) -> str:
        number = self._numbers.pop(name, None)
        if number is None:
            if len(self._numbers) >= self._most:
                oldest = next(iter(self._numbers))
                del self._names[self._numbers.pop(oldest)]
            number = self._free(name)
            self._names[number] = name
        self._numbers[name] = number
        return str(MADE_UP[number])

    def name_of(self, address: str) -> str | None:
        """Whose address it is; None if it is nobody's, or not anybody's any more."""
        try:
            found = ipaddress.IPv4Address(address)
        except ValueError:
            return None
        name = self._names.get(int(found) - int(MADE_UP.network_address))
        if name is not None:
            self._numbers[name] = self._numbers.pop(name)
        return name

    def _free(self, name: str) -> int:
        usable = MADE_UP.num_addresses - 2  # the first and the last look like a network's own
        start = zlib.crc32(name.encode()) % usable
        while start + 1 in self._names:
            start = (start + 1) % usable
        return start + 1


class Names:
    """`sock` is non-blocking from here on and stays the caller's. `judge` and `observe` are called on the loop: briefly."""

    def __init__(self, sock: socket.socket, book: Book, judge: Judge, observe: Callable[[Denied], None]) -> None:
        self._sock = sock
        self._book = book
        self._judge = judge
        self._observe = observe

    async def serve(self) -> None:
        """Until it is cancelled, or the socket is closed."""
        loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        while True:
            try:
                question, sender = await loop.sock_recvfrom(self._sock, _LARGEST)
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return
                await asyncio.sleep(0.1)
                continue
            answer = self.answer(question)
            if answer:
                # Whoever does not take it asks again.
                with contextlib.suppress(OSError):
                    self._sock.sendto(answer, sender)
            # A flood of questions is read without ever waiting: others must have their turn, too.
            await asyncio.sleep(0)

    def answer(self, question: bytes) -> bytes:
        """Empty if there is nothing to be said: to what is too short to be answered, and to what is an answer itself."""
        if len(question) < _HEADER.size:
            return b""
        number, flags, questions, *_ = _HEADER.unpack_from(question)
        if flags & _ANSWER:
            return b""
        shown = _ANSWER | flags & (_OPERATION | _RECURSION_WANTED) | _RECURSION_OFFERED
        if flags & _OPERATION:
            return _HEADER.pack(number, shown | _UNKNOWN_OPERATION, 0, 0, 0, 0)
        read = _read(question) if questions == 1 else None
        if read is None:
            return _HEADER.pack(number, shown | _MALFORMED, 0, 0, 0, 0)
        labels, kind, group, end = read
        try:
            code, address = self._found(labels, kind, group)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler({"message": "a name could not be judged", "exception": error})
            code, address = _BROKEN, ""
        head = _HEADER.pack(number, shown | code, 1, 1 if address else 0, 0, 0) + question[_HEADER.size : end]
        return head + _record(address) if address else head

    def _found(self, labels: list[bytes], kind: int, group: int) -> tuple[int, str]:
        """What is to be said, and the address if there is one."""
        name = _name(labels)
        if not name or kind == _PTR or name.endswith(".arpa"):
            return _NO_SUCH_NAME, ""
        wants_address = kind == _A and group == _INTERNET
        if name == "localhost" or name.endswith(".localhost"):
            return _FINE, "127.0.0.1" if wants_address else ""
        verdict = self._judge(name)
        if verdict.allowed:
            return _FINE, self._book.address_for(name) if wants_address else ""
        if kind not in _BESIDE and name != _own_name():  # which many programs ask for by the way
            self._observe(Denied(name, 0, verdict.rule, verdict.how))
        return _NO_SUCH_NAME, ""


def _read(question: bytes) -> tuple[list[bytes], int, int, int] | None:
    """The labels of the name, type and class, and where the question ends; None if it cannot be understood."""
    labels = []
    place = _HEADER.size
    while place < len(question) and (length := question[place]):
        # Longer ones would be pointers to a name further up, and there is none.
        if length > 63 or place - _HEADER.size > 255:
            return None
        labels.append(question[place + 1 : place + 1 + length])
        place += 1 + length
    if place + 5 > len(question):
        return None
    kind, group = struct.unpack_from("!HH", question, place + 1)
    return labels, kind, group, place + 5


def _name(labels: list[bytes]) -> str:
    """In its one spelling; empty if no host can have it, or if it is an address."""
    if any(b"." in label for label in labels):
        return ""  # a label that would be two
    try:
        name = names.canonical(b".".join(labels).decode("ascii"))
    except (names.Nonsense, UnicodeDecodeError):
        return ""
    return "" if names.address(name) is not None else name


def _own_name() -> str:
    """Of this machine, and of every sandbox."""
    return os.uname().nodename.partition(".")[0].lower()


def _record(address: str) -> bytes:
    """Of the name that the question has, right after the header."""
    return struct.pack("!HHHIH", 0xC000 | _HEADER.size, _A, _INTERNET, _SECONDS, 4) + socket.inet_aton(address)
