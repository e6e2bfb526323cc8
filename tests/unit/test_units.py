"""Sizes and durations as people write them, and as people read them."""

from collections.abc import Callable

import pytest

from elsewhere import units
from elsewhere.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1ms", 0.001),
        ("250ms", 0.25),
        ("90s", 90.0),
        ("90", 90.0),
        ("15m", 900.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1h30m", 5400.0),
        ("1m500ms", 60.5),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("2.s", 2.0),
        (" 30s ", 30.0),
        (7, 7.0),
        (0.25, 0.25),
        ("999999999s", 999999999.0),
    ],
)
def test_a_duration_is_read_as_seconds(text: str | float, seconds: float) -> None:
    assert units.duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "s", "m", "abc", "1x", "1sm", "1S", "5 m", "1.2.3s", ".", ".s", "-1s", "+1s", "1e3", "0x10", "1_000s"),
        *("0", "0s", "0h0m", "1000000000s", "nan", "inf", "٣s", "1h-30m", "1,5s"),
        *(0, -1, 0.0, -0.5, 10**9, float("nan"), float("inf"), True, False),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_positive_duration_is_refused_by_name(text: str | float) -> None:
    with pytest.raises(UsageError) as caught:
        units.duration(text)
    assert caught.value.code == "bad_duration"
    assert repr(text) in caught.value.message
    assert "15m" in caught.value.hint


@pytest.mark.parametrize("understand", [units.duration, units.size])
@pytest.mark.parametrize(
    ("value", "shown"),
    [("x" * 5000, "xxx...xxx"), (-(10**400), "<a number of 1329 bits>"), (16**4000, "<a number of 16001 bits>")],
    ids=["text", "number", "number that Python does not write out"],
)
def test_what_is_too_long_for_a_message_is_shown_in_brief(
    understand: Callable[[str | int], float], value: str | int, shown: str
) -> None:
    with pytest.raises(UsageError) as caught:
        understand(value)
    assert shown in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1", 1),
        ("1B", 1),
        ("1K", 1024),
        ("1k", 1024),
        ("1KB", 1024),
        ("1KiB", 1024),
        ("512M", 512 << 20),
        ("512 MiB", 512 << 20),
        ("2G", 2 << 30),
        ("1T", 1 << 40),
        ("1.5G", 3 << 29),
        ("0.5K", 512),
        (" 10m ", 10 << 20),
        (0, 0),
        (4096, 4096),
        ("9007199254740993", 2**53 + 1),
        (2**53 + 1, 2**53 + 1),
    ],
)
def test_a_size_is_read_as_bytes(text: str | int, count: int) -> None:
    assert units.size(text) == count


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "G", "B", "iB", "-1", "-1K", "-0.5", "1X", "1P", "1KM", "1BK", "1KBB", "1BiB", "1KiBiB", "1Ki", "1iB"),
        *("nan", "inf", "1..5G", "1.2.3", "0x10", "1e3", "1_000", "٣", "five"),
        *(-1, True),
    ],
    ids=repr,
)
def test_what_is_no_size_is_refused_by_name(text: str | int) -> None:
    with pytest.raises(UsageError) as caught:
        units.size(text)
    assert caught.value.code == "bad_size"
    assert repr(text) in caught.value.message
    assert "512M" in caught.value.hint


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0014, "1 ms"),
        (0.5, "500 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (1.0, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (60.0, "1 min 0 s"),
        (61.4, "1 min 1 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (5400.0, "1 h 30 min"),
        (48 * 3600 - 1, "47 h 59 min"),
        (48 * 3600, "2 d 0 h"),
        (75 * 3600, "3 d 3 h"),
    ],
)
def test_a_duration_is_shown_in_its_largest_unit_also_where_rounding_crosses_over(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 60, "1023.9 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1 << 20, "1.0 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 39, "1.5 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_a_size_is_shown_in_its_largest_unit_also_where_rounding_crosses_over(count: int, text: str) -> None:
    assert units.format_size(count) == text


@pytest.mark.parametrize("count", [1, 1024, 512 << 20, 2 << 30, 1 << 40])
def test_a_size_that_was_shown_can_be_read_again(count: int) -> None:
    assert units.size(units.format_size(count)) == count
