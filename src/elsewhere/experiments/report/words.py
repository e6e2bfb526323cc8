"""Text that came out of a sandbox, made fit to be read: no terminal codes, no control characters, no letters that reorder others,
and never more than can be read. What was cut is said."""

import re

from elsewhere.values import dataclass

__all__ = ["Cut", "cut", "fit", "last_line", "line", "plain"]

_LONGEST_LINE = 1_000
_LONGEST_TEXT = 4_000_000  # letters that are looked at, at each end
_TERMINAL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?"  # colours and cursor
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # titles, links and other strings; never more than a line
    r"|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]?"
)
# Besides control characters: what turns the direction of text around it, what cannot be seen, and halves of letters.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """`left_out`: how many lines are not there; they were between `head` and `tail`."""

    head: str
    tail: str
    left_out: int


def fit(text: str) -> str:
    """The same, with a number in place of every letter that does something else than being seen."""
    return _UNFIT.sub(_named, text)


def plain(text: str) -> str:
    """What a terminal would show in the end, as far as that is text."""
    text = _TERMINAL.sub("", text)
    if "\r" in text:
        text = "\n".join(one.rstrip("\r").rpartition("\r")[2] for one in text.split("\n"))
    return fit(text)


def line(text: str, longest: int = _LONGEST_LINE) -> str:
    """One line, however long it was."""
    shown = fit(text)
    return shown if len(shown) <= longest else f"{shown[:longest]} … and {len(shown) - longest:,} more letters"


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = plain(text[-8_000:]).split("\n")
    return next((one.strip() for one in reversed(lines) if one.strip()), "")


def cut(text: str, head: int, tail: int) -> Cut:
    """The first and the last lines, each of a length that can be read."""
    missing = max(0, len(text) - 2 * _LONGEST_TEXT)
    between = text[_LONGEST_TEXT : len(text) - _LONGEST_TEXT].count("\n") if missing else 0
    lines = plain(text if not missing else f"{text[:_LONGEST_TEXT]}\n{text[-_LONGEST_TEXT:]}").rstrip("\n").split("\n")
    if len(lines) <= head + tail:
        return Cut("\n".join(map(line, lines)), "", between)
    left_out = len(lines) - head - tail + between
    return Cut("\n".join(map(line, lines[:head])), "\n".join(map(line, lines[-tail:])), left_out)


def _named(found: re.Match[str]) -> str:
    return f"\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}{ord(found[0]):02X}\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
