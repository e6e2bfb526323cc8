"""A refusal in the language that the client speaks, told by its first words. Most programs show what a server says, and of a
connection that breaks off only that it did.

    GET / HTTP/1.1      the answer of the proxy
    SSH-2.0-…           a disconnection, with the sentence
    TLS                 an alert: access denied
    PostgreSQL          a fatal error, with the sentence, after its wish for encryption was declined

Not here: who is refused, and for what reason.
"""

import struct

from elsewhere.network import heads
from elsewhere.network.answers import Answer

__all__ = ["LONGEST_GREETING", "declined", "may_grow", "refusal"]

LONGEST_GREETING = heads.LARGEST
_TLS_HANDSHAKE = b"\x16\x03"
_TLS_ALERT = b"\x15\x03\x01\x00\x02\x02"
_ACCESS_DENIED = b"\x31"
_SSH_DISCONNECT, _SSH_BY_APPLICATION = 1, 11
# How a conversation with PostgreSQL begins, after four bytes of length.
_POSTGRESQL = b"\x00\x03\x00\x00"
_POSTGRESQL_WISHES = (b"\x04\xd2\x16\x2f", b"\x04\xd2\x16\x30")  # TLS, GSSAPI


def may_grow(first: bytes) -> bool:
    """Whether more must be read before it is known what is spoken: what could be a request, but has no line yet."""
    if first.startswith((b"SSH-", _TLS_HANDSHAKE)):
        return False
    return not first or (b"\n" not in first and len(first) < LONGEST_GREETING and not heads.could_begin(first))


def declined(first: bytes) -> bytes:
    """What is said to a wish that comes before the first words; empty if it is none. Before that no client shows an error."""
    return b"N" if len(first) == 8 and first[4:] in _POSTGRESQL_WISHES else b""


def refusal(first: bytes, answer: Answer) -> bytes:
    """Empty if nothing can be said that would be understood."""
    if first.startswith(b"SSH-"):
        return b"SSH-2.0-elsewhere\r\n" + _ssh(answer.reason if answer.status == 403 else answer.text)
    if first.startswith(_TLS_HANDSHAKE):
        return _TLS_ALERT + _ACCESS_DENIED if answer.status == 403 else b""
    if first[4:8] == _POSTGRESQL:
        return _postgresql(answer.text)
    if b"\n" in first and not heads.could_begin(first):
        return answer.message(body=not first.startswith(b"HEAD "))
    return b""


def _ssh(sentence: str) -> bytes:
    told = sentence.encode()
    payload = struct.pack("!BII", _SSH_DISCONNECT, _SSH_BY_APPLICATION, len(told)) + told + struct.pack("!I", 0)
    padding = 8 - (5 + len(payload)) % 8 + 4
    padding += -(5 + len(payload) + padding) % 8
    return struct.pack("!IB", 1 + len(payload) + padding, padding) + payload + bytes(padding)


def _postgresql(sentence: str) -> bytes:
    fields = b"".join(
        letter + text.encode() + b"\0" for letter, text in ((b"S", "FATAL"), (b"V", "FATAL"), (b"C", "28000"), (b"M", sentence))
    )
    return b"E" + struct.pack("!I", 4 + len(fields) + 1) + fields + b"\0"
