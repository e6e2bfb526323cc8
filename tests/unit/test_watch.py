"""What a keeper sees of the disk and of memory, with a clock and a disk of the test's own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elsewhere.linux import measuring
from elsewhere.sandbox.keeping import watch
from elsewhere.sandbox.keeping.watch import Watch

EVERYTHING = 1 << 60  # a reserve that no disk has
LIMIT = 1 << 30


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def armed(layers: int, **rules: object) -> Watch:
    seen = Watch(None)
    seen.arm({"disk": LIMIT, **rules}, layers, layers)
    return seen


def write(path: Path, size: int) -> None:
    with open(path, "wb") as stream:
        stream.write(b"x" * size)


def test_a_nearly_full_disk_is_the_fault_of_who_has_written(layers: int, tmp_path: Path) -> None:
    seen = armed(layers, reserve=EVERYTHING)
    write(tmp_path / "small", 1 << 20)
    assert seen.look({}) == ""
    write(tmp_path / "large", 17 << 20)
    assert seen.look({}) == "disk", "what was counted a moment ago does not excuse"
    assert armed(layers, reserve=0).look({}) == "", "on a disk that has room it is no fault"


def test_more_names_than_can_be_counted_are_a_part_of_it(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_OWN_NAMES", 200)
    seen = armed(layers, reserve=EVERYTHING)
    for number in range(200):
        (tmp_path / str(number)).touch()
    assert seen.look({}) == ""
    (tmp_path / "more").touch()
    (tmp_path / "and more").touch()
    assert seen.look({}) == "disk"


def test_a_count_that_is_not_complete_is_a_large_one(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "used", lambda *_, **__: measuring.Used(0, 0, complete=False))
    assert armed(layers, reserve=EVERYTHING).look({}) == "disk"
    assert armed(layers, reserve=0).look({}) == ""


def test_a_slow_count_is_done_less_often_and_the_free_space_is_not(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, free, counts = [1000.0], [LIMIT], []

    def slow(*_: object, **limits: object) -> measuring.Used:
        counts.append(bool(limits.get("names")))
        now[0] += 0.9
        return measuring.Used(1 << 20, 1, complete=True)

    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "_free", lambda _: free[0])
    monkeypatch.setattr(measuring, "used", slow)
    seen = armed(layers, reserve=LIMIT)
    seen.look({})
    assert counts == [False]
    due = seen.due(busy=True)
    assert due is not None
    assert due - now[0] == pytest.approx(0.2)
    now[0] += 0.2
    seen.look({})
    assert counts == [False], "not again so soon"
    free[0] = LIMIT - 1
    now[0] += 0.2
    seen.look({})
    assert counts == [False, True]
    now[0] += 20
    seen.look({})
    assert counts == [False, True, True, False]


def test_one_file_of_all_that_was_free_is_the_disks_end(layers: int, tmp_path: Path) -> None:
    """The kernel refuses to let it grow, and says no more than that."""
    seen = armed(layers, rlimits={"file_size": 4 << 20})
    meter = seen.begin(alone=True)
    write(tmp_path / "large", 2 << 20)
    assert seen.broken_since(meter, dict, failed=True) == []
    write(tmp_path / "large", 4 << 20)
    assert seen.broken_since(meter, dict, failed=True) == ["disk"]


def test_files_in_memory_are_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [0]
    monkeypatch.setattr(watch, "_taken", lambda _: taken[0])
    seen = Watch(None)
    seen.arm({"memory": 1 << 20, "in_memory": [str(tmp_path)]}, -1, -1)
    assert seen.look({}) == ""
    taken[0] = (1 << 20) + 1
    assert seen.look({}) == "memory"
