"""The sockets of forwards are no changes of a sandbox; whatever else lies where one was forwarded is its work."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from elsewhere.changes.compare import View
from elsewhere.sandbox.contents import differences
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State

PROJECT = "/srv/project"


def record(**network: list[str]) -> Record:
    return Record(
        id="ew-a", state="running", project=PROJECT, base={}, created_at=0.0, mechanism="copy-landlock", identity={}, enforced={},
        layers=[], plan=[], network=network,
    )  # fmt: skip


def nothing(place: Path) -> None:
    assert not place.exists()


def a_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(place))


def a_file(place: Path) -> None:
    place.write_text("work")


def a_directory(place: Path) -> None:
    place.mkdir()
    (place / "w").write_text("work")


def an_empty_directory(place: Path) -> None:
    place.mkdir()


@pytest.mark.parametrize("kind", ["forward", "forwarded"])
@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        (nothing, a_socket, []),
        (a_socket, nothing, []),
        (nothing, a_file, [("added", "db")]),
        (a_socket, a_file, [("modified", "db")]),
        (nothing, a_directory, [("added", "db/w")]),
        (a_socket, a_directory, [("added", "db/w"), ("deleted", "db")]),
        (a_socket, an_empty_directory, [("added", "db/"), ("deleted", "db")]),
        (a_directory, a_socket, [("deleted", "db/w")]),
        (a_file, nothing, [("deleted", "db")]),
    ],
)
def test_only_a_socket_is_the_forwards(
    place: Path, kind: str, was: Callable[[Path], None], now: Callable[[Path], None], told: list[tuple[str, str]]
) -> None:
    for name, make in (("before", was), ("after", now)):
        (place / name).mkdir()
        make(place / name / "db")
    (place / "after" / "other").touch()
    one = record(**{kind: [f"unix:{PROJECT}/db", "5432"]})
    before, after = ({PROJECT: View((), [str(place / name)])} for name in ("before", "after"))
    found = differences(State(str(place / "state")), (one, before), (one, after))
    assert sorted(found) == sorted((word, f"{PROJECT}/{path}") for word, path in [("added", "other"), *told])
    assert len(found.entries) == len(told) + 1


def test_a_socket_that_nobody_forwarded_is_a_change(place: Path) -> None:
    for name in ("before", "after"):
        (place / name).mkdir()
    a_socket(place / "after" / "db")
    before, after = ({PROJECT: View((), [str(place / name)])} for name in ("before", "after"))
    one = record(forward=[f"unix:{PROJECT}/db.sock"])
    assert list(differences(State(str(place / "state")), (one, before), (one, after))) == [("added", f"{PROJECT}/db")]
