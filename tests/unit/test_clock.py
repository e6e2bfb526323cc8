"""Times as they stand in documents."""

import time

import pytest

from elsewhere import clock


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (0.5, "1970-01-01T00:00:00.500Z"),
        (1.001, "1970-01-01T00:00:01.001Z"),
        (951782400, "2000-02-29T00:00:00.000Z"),
        (1700000000.25, "2023-11-14T22:13:20.250Z"),
        (2147483648, "2038-01-19T03:14:08.000Z"),
    ],
)
def test_a_stamp_is_utc_with_milliseconds(seconds: float, text: str) -> None:
    assert clock.stamp(seconds) == text


def test_a_stamp_does_not_depend_on_the_local_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        assert clock.stamp(0) == "1970-01-01T00:00:00.000Z"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_stamps_sort_as_the_times_do() -> None:
    times = [0, 0.001, 0.999, 1, 59.5, 86400, 1700000000, 4102444800]
    assert sorted(map(clock.stamp, times)) == [clock.stamp(moment) for moment in times]
