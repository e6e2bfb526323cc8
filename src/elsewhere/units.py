"""Human sizes and durations: `512M`, `2G`, `30s`, `15m`. Parsing names the offending value; formatting is for people."""

import reprlib

from elsewhere.errors import UsageError

__all__ = ["brief", "count", "duration", "format_duration", "format_size", "is_huge", "size"]

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_POWERS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES = {"": 1, "B": 1, **{letter + end: count for letter, count in _POWERS.items() for end in ("", "B", "IB")}}


def is_huge(value: object) -> bool:
    """Whether it is a whole number of more than 64 bits: no setting has one, and of some Python refuses to write the digits."""
    return isinstance(value, int) and not -1 << 63 <= value < 1 << 63


class _Brief(reprlib.Repr):
    def repr_int(self, value: int, level: int) -> str:
        return f"<a number of {value.bit_length()} bits>" if is_huge(value) else super().repr_int(value, level)


_brief = _Brief()
_brief.maxstring = _brief.maxother = 200


def brief(value: object) -> str:
    """A value of whatever kind and size, as a message shows it."""
    return _brief.repr(value)


def duration(value: str | int | float) -> float:
    """Seconds. A bare number counts as seconds; `ms s m h d` may follow, and parts may be joined: `1h30m`."""
    if isinstance(value, bool):
        raise _bad_duration(value)
    if isinstance(value, (int, float)):
        seconds = float(value) if abs(value) < 1e9 else 0.0
    else:
        seconds = _parse_duration(value)
    if not 0 < seconds < 1e9:
        raise _bad_duration(value)
    return seconds


def _parse_duration(text: str) -> float:
    total, digits, rest = 0.0, "", text.strip()
    if not rest:
        raise _bad_duration(text)
    while rest:
        digits = rest[: len(rest) - len(rest.lstrip("0123456789."))]
        rest = rest[len(digits) :]
        letters = rest[: len(rest) - len(rest.lstrip("mshd"))]
        rest = rest[len(letters) :]
        unit = letters or "s"
        if unit not in _SECONDS or digits.count(".") > 1 or not digits.strip("."):
            raise _bad_duration(text)
        total += float(digits) * _SECONDS[unit]
    return total


def _bad_duration(value: object) -> UsageError:
    return UsageError(
        "bad_duration",
        f"{brief(value)} is not a duration",
        hint="write a positive number with ms, s, m, h or d, such as 90s, 15m or 1h30m",
    )


def size(value: str | int) -> int:
    """Bytes. `K M G T` are powers of 1,024; a trailing `B` or `iB` is accepted."""
    text = "" if is_huge(value) else str(value).strip().upper()
    number = text[: len(text) - len(text.lstrip("0123456789."))]
    unit = text[len(number) :].strip()
    try:
        factor = _BYTES[unit]
        result = int(number) * factor if number.isdigit() else int(float(number) * factor)
    except (ValueError, KeyError, OverflowError):
        result = -1
    if result < 0:
        raise UsageError("bad_size", f"{brief(value)} is not a size", hint="write a number with K, M, G or T, such as 512M or 2G")
    return result


def format_duration(seconds: float) -> str:
    if round(seconds * 1000) < 1000:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def count(number: int, one: str, several: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def format_size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(amount, 1) < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
