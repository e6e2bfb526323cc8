"""Which rung a sandbox stands on: one step down at a time, and never for good because of something that passes."""

import errno
from typing import Any

import pytest

from elsewhere.errors import Broken, Unavailable
from elsewhere.sandbox import rungs
from elsewhere.sandbox.launching import creation
from elsewhere.sandbox.launching.blanks import BuildFailed
from elsewhere.sandbox.launching.creation import Climber

MOVED = BuildFailed("mounts", errno.ENOENT, "/srv/project/link: No such file or directory")
REFUSED = BuildFailed("namespaces", errno.EPERM, "Operation not permitted")
NO_PROGRAM = BuildFailed("fuse-overlayfs", errno.ENOENT, "the program fuse-overlayfs is not installed")
KILLED = BuildFailed("builder", 0, "the builder ended without an answer")


class Attempts:
    """What the attempts of one climb run into, one after the other; then they succeed."""

    def __init__(self, climber: Climber, *failures: BuildFailed) -> None:
        self.climber, self.failures = climber, list(failures)
        self.tried: list[tuple[str, object]] = []

    def __call__(self, mechanism: rungs.Mechanism) -> Any:
        self.tried.append((mechanism.name, self.climber.host("/home", "/state")))
        if self.failures:
            raise self.failures.pop(0)
        return mechanism


@pytest.fixture
def climber(monkeypatch: pytest.MonkeyPatch) -> Climber:
    monkeypatch.setattr(creation.Host, "look", lambda _home, _state: object())
    monkeypatch.setattr(rungs, "ladder", lambda: rungs.LADDER)
    return Climber()


def climb(climber: Climber, *failures: BuildFailed) -> tuple[str, Attempts]:
    attempts = Attempts(climber, *failures)
    raised: Any = climber.climb("/project", attempts)[0]
    return raised.name, attempts


FIRST, SECOND, THIRD = (rung.name for rung in rungs.LADDER[:3])


def test_before_a_step_down_the_host_is_looked_at_again(climber: Climber) -> None:
    stood, attempts = climb(climber, MOVED)
    assert stood == FIRST
    assert [name for name, _ in attempts.tried] == [FIRST, FIRST]
    assert attempts.tried[0][1] is not attempts.tried[1][1]
    assert climb(climber)[0] == FIRST


def test_what_the_host_refuses_is_remembered_with_its_reason(climber: Climber) -> None:
    stood, attempts = climb(climber, REFUSED, REFUSED, NO_PROGRAM)
    assert stood == THIRD
    assert [name for name, _ in attempts.tried] == [FIRST, FIRST, SECOND, THIRD], "one more look is enough for a climb"
    again = Attempts(climber)
    _, reasons = climber.climb("/project", again)
    assert [name for name, _ in again.tried] == [THIRD]
    assert [name for name, _ in reasons] == [FIRST, SECOND]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ESTALE])
@pytest.mark.parametrize("step", ["mounts", "directories"])
def test_a_rung_that_was_left_because_of_something_that_passes_is_tried_again(climber: Climber, step: str, number: int) -> None:
    passing = BuildFailed(step, number, "a path that somebody changed")
    assert climb(climber, passing, passing)[0] == SECOND
    stood, attempts = climb(climber)
    assert (stood, [name for name, _ in attempts.tried]) == (FIRST, [FIRST])


def test_what_passes_below_does_not_make_a_project_forget_the_rung_that_it_knows(climber: Climber) -> None:
    assert climb(climber, REFUSED, REFUSED)[0] == SECOND
    assert climb(climber, MOVED, MOVED)[0] == THIRD
    assert [name for name, _ in climb(climber)[1].tried] == [SECOND]


def test_an_accident_is_no_reason_to_go_down(climber: Climber) -> None:
    with pytest.raises(Broken):
        climb(climber, KILLED)
    with pytest.raises(Broken):
        climb(climber, MOVED, KILLED)
    assert climb(climber)[0] == FIRST


def test_where_nothing_stands_every_rung_says_why(climber: Climber) -> None:
    with pytest.raises(Unavailable) as caught:
        climb(climber, *[REFUSED] * (len(rungs.LADDER) + 1))
    assert [one["mechanism"] for one in caught.value.detail["reasons"]] == [rung.name for rung in rungs.LADDER]
