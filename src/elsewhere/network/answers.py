"""What the proxy itself answers, in words for whoever reads them: a person, an agent, a log that shows one line.

Many programs show nothing of a refused CONNECT but its first line, so that one says what to type.
"""

from elsewhere.network import names
from elsewhere.network.rules import Verdict
from elsewhere.values import dataclass

__all__ = ["ESTABLISHED", "Answer", "Denied", "denial", "plain"]

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

_LONGEST_REASON = 200
_REASONS = {
    400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
    501: "Not Implemented", 502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Denied:
    """A connection that was refused by policy: what was wanted, what decided, what to type; and the address that the host
    leads to, if that was why."""

    host: str
    port: int
    rule: str
    how: str
    address: str = ""


class Answer(Exception):
    """Ends a request with an answer of our own, and with it the connection."""

    def __init__(self, status: int, reason: str, text: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.text = text
        self.headers = headers

    def message(self, *, body: bool = True) -> bytes:
        content = f"{self.text}\n".encode()
        lines = [
            f"HTTP/1.1 {self.status} {_one_line(self.reason)}",
            "Content-Type: text/plain; charset=utf-8",
            f"Content-Length: {len(content)}",
            *(f"{name}: {_one_line(value)}" for name, value in self.headers),
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode("ascii") + (content if body else b"")


def plain(status: int, sentence: str, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    return Answer(status, f"{_REASONS.get(status, 'Refused')}: {sentence}", f"elsewhere: {sentence}", headers)


def denial(host: str, port: int, verdict: Verdict, address: str = "") -> tuple[Answer, Denied]:
    """The refusal as the client sees it, and as it is recorded."""
    where = names.authority(host, port)
    answer = Answer(
        403,
        f"elsewhere refused {where}; to allow it: {verdict.how}",
        f"elsewhere refused {where}\nbecause: {verdict.rule}\nto allow it: {verdict.how}",
        (("X-Elsewhere-Denied", f"{where}; {verdict.rule}"),),
    )
    return answer, Denied(host, port, verdict.rule, verdict.how, address)


def _one_line(text: str) -> str:
    """Printable ASCII, and short."""
    shown = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
    return shown if len(shown) <= _LONGEST_REASON else f"{shown[: _LONGEST_REASON - 3]}..."
