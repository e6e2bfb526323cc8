"""Frozen layers on disk: what has to be mounted, what is needed, what goes, and what merging changes (nothing that is shown)."""

import fcntl
import json
import os
import random
from pathlib import Path

import pytest

from elsewhere.errors import Broken
from elsewhere.storage.layers import Layers
from elsewhere.storage.state import State


@pytest.fixture
def layers(place: Path) -> Layers:
    return Layers(State.open(str(place / "state")))


def add(layers: Layers, parent: str | None, **files: str) -> str:
    """A layer of one overlay, whose names are said by keywords; with its content where it belongs."""
    made = layers.new(parent, ["0"], "trusted" if os.geteuid() == 0 else "user")
    upper = Path(layers.place(made.id), "upper", "0")
    upper.mkdir(parents=True)
    for name, content in files.items():
        (upper / name).write_text(content)
    layers.moved(made.id)
    return made.id


def stack(layers: Layers, count: int, parent: str | None = None) -> list[str]:
    """Each writes its own number, and a name that it shares with every seventh."""
    found = []
    for number in range(1, count + 1):
        parent = add(layers, parent, **{"last": str(number), f"n{number}": str(number), f"m{number % 7}": str(number)})
        found.append(parent)
    return found


def shows(layers: Layers, tip: str) -> dict[str, str]:
    """As an overlay would: the newest wins."""
    found: dict[str, str] = {}
    for step in layers.chain(tip):
        place = Path(layers.state.room("layers"), step.place, "0")
        for entry in place.iterdir():
            found.setdefault(entry.name, entry.read_text())
    return found


def expected(number: int) -> dict[str, str]:
    found = {"last": str(number)}
    for one in range(1, number + 1):
        found |= {f"n{one}": str(one), f"m{one % 7}": str(one)}
    return found


def merge_all(layers: Layers, tip: str) -> None:
    for layer in layers.merge_due(tip):
        assert layers.merge(layer)


def test_a_chain_is_newest_first(layers: Layers) -> None:
    ids = stack(layers, 3)
    assert [step.place for step in layers.chain(ids[2])] == [f"{one}/upper" for one in reversed(ids)]
    assert layers.chain(None) == []
    assert [layers.load(one).depth for one in ids] == [1, 2, 3]
    assert [layer.id for layer in layers.ancestors(ids[1])] == [ids[1], ids[0]]
    assert layers.ancestors(None) == []


def test_what_is_said_survives_the_process(layers: Layers) -> None:
    made = layers.new(None, ["tmp", "0"], "user")
    assert layers.is_moving(made.id)
    again = Layers(layers.state)
    assert again.load(made.id) == made
    assert again.load(made.id).holds == ("0", "tmp")
    again.moved(made.id)
    again.moved(made.id)
    assert not layers.is_moving(made.id)


def test_sizes_are_measured_once_and_added_up(layers: Layers) -> None:
    first = add(layers, None, a="x" * 100_000)
    assert layers.load(first).bytes is None
    room = layers.state.room("layers")
    measured = layers.measured(layers.load(first), room, 10.0)
    assert measured.bytes is not None
    assert measured.bytes >= 100_000
    second = layers.new(first, ["0"], "user")
    assert layers.total(second.id) == second.below == measured.bytes
    assert layers.total(None) == 0
    assert Layers(layers.state).measured(layers.load(first), "/nowhere", 0.0).bytes == measured.bytes


@pytest.mark.parametrize("count", [9, 10, 11, 25, 99, 100, 111])
def test_merging_changes_nothing_that_is_shown(layers: Layers, count: int) -> None:
    ids = stack(layers, count)
    merge_all(layers, ids[-1])
    assert layers.merge_due(ids[-1]) == []
    assert len(layers.chain(ids[-1])) <= 9 + count // 10 % 10 + count // 100
    for number in random.Random(count).sample(range(1, count + 1), min(6, count)):
        assert shows(layers, ids[number - 1]) == expected(number)
    assert shows(layers, ids[-1]) == expected(count)


def test_five_hundred_are_few(layers: Layers) -> None:
    parent = None
    for number in range(1, 501):
        parent = add(layers, parent, last=str(number))
        if layers.is_due(parent):
            merge_all(layers, parent)
        assert len(layers.chain(parent)) <= 23
    assert parent is not None
    assert shows(layers, parent) == {"last": "500"}


def test_branches_share_what_they_came_from(layers: Layers) -> None:
    trunk = stack(layers, 8)
    branches = [stack(layers, 5, trunk[7 - number])[-1] for number in range(3)]
    before = [shows(layers, one) for one in branches]
    for one in branches:
        merge_all(layers, one)
    assert [shows(layers, one) for one in branches] == before
    merged = [one for one in layers.all() if Path(layers.place(one), "merged.json").exists()]
    assert len(merged) == 3


def test_merging_twice_and_after_a_half_made_one(layers: Layers) -> None:
    ids = stack(layers, 10)
    half = Path(layers.place(ids[-1]), "merged.new", "0")
    half.mkdir(parents=True)
    (half / "nonsense").write_text("x")
    unsaid = Path(layers.place(ids[-1]), "merged", "0")
    unsaid.mkdir(parents=True)
    (unsaid / "nonsense").write_text("x")
    assert shows(layers, ids[-1]) == expected(10), "not said, it does not count"
    assert layers.merge(ids[-1])
    assert layers.merge(ids[-1])
    assert shows(layers, ids[-1]) == expected(10)
    assert not half.parent.exists()


def test_one_merges_at_a_time(layers: Layers) -> None:
    ids = stack(layers, 10)
    place = os.open(Path(layers.state.room("layers"), "merging"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        assert layers.merge(ids[-1]) is False
        assert shows(layers, ids[-1]) == expected(10)
    finally:
        os.close(place)
    assert layers.merge(ids[-1]) is True


def test_merged_files_are_not_copied(layers: Layers) -> None:
    ids = stack(layers, 10)
    layers.merge(ids[-1])
    one, other = (Path(layers.place(ids[-1]), kind, "0", "last").stat() for kind in ("upper", "merged"))
    assert one.st_ino == other.st_ino


def test_what_nobody_needs_goes(layers: Layers) -> None:
    ids = stack(layers, 5)
    branch = add(layers, ids[2], b="b")
    assert layers.prune(lambda: [ids[4], branch], dry_run=True) == []
    assert layers.prune(lambda: [branch], dry_run=True) == sorted(ids[3:])
    assert len(layers.all()) == 6
    assert layers.prune(lambda: [branch]) == sorted(ids[3:])
    assert layers.all() == sorted([*ids[:3], branch])
    assert layers.prune(list) == sorted([*ids[:3], branch])
    assert layers.all() == []
    assert len(os.listdir(layers.state.room("trash"))) == 6


def test_of_what_was_merged_only_the_merged_is_needed(layers: Layers) -> None:
    ids = stack(layers, 12)
    merge_all(layers, ids[-1])
    assert layers.needed([ids[-1]]) == {ids[9], ids[10], ids[11]}
    layers.prune(lambda: [ids[-1]])
    fresh = Layers(layers.state)
    assert shows(fresh, ids[-1]) == expected(12)
    more = stack(fresh, 8, ids[-1])
    merge_all(fresh, more[-1])
    assert len(fresh.chain(more[-1])) == 2
    assert shows(fresh, more[-1])["n12"] == "12"


def test_what_was_left_half_made_goes(layers: Layers) -> None:
    """Its maker was killed before it said anything about it."""
    kept = add(layers, None, a="a")
    left = Path(layers.place("0-left"))
    left.mkdir()
    (left / "moving").touch()
    assert layers.prune(lambda: [kept]) == ["0-left"]
    assert not left.exists()
    assert Path(layers.state.room("layers"), "lock").exists()


def test_nothing_goes_while_somebody_is_about_to_refer_to_it(layers: Layers) -> None:
    ids = stack(layers, 2)
    with Layers(layers.state).referring():
        assert layers.prune(list) == []
    assert layers.all() == sorted(ids)


def test_a_layer_that_is_missing_or_broken_is_said(layers: Layers) -> None:
    with pytest.raises(Broken) as caught:
        layers.load("not-there")
    assert caught.value.code == "layer_missing"
    first, second = stack(layers, 2)
    Path(layers.place(first), "layer.json").write_text("{")
    with pytest.raises(Broken) as caught:
        Layers(layers.state).chain(second)
    assert caught.value.code == "layer_broken"
    Path(layers.place(first), "layer.json").write_text(json.dumps({"parent": None}))
    with pytest.raises(Broken) as caught:
        Layers(layers.state).chain(second)
    assert caught.value.code == "layer_broken"


def test_parents_in_a_circle_come_to_an_end(layers: Layers) -> None:
    first, second = stack(layers, 2)
    said = json.loads(Path(layers.place(first), "layer.json").read_text())
    Path(layers.place(first), "layer.json").write_text(json.dumps({**said, "parent": second}))
    assert len(Layers(layers.state).chain(second)) == 2
    assert len(Layers(layers.state).ancestors(second)) == 2
