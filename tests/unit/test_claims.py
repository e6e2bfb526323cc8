"""Claims for room on the machine: one that cannot be written is an error of ours and leaves nothing behind."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from elsewhere.errors import StateError
from elsewhere.operations.admission import Claim, _Ticket


@pytest.mark.parametrize(
    ("module", "call", "number", "code"),
    [
        (os, "pwrite", errno.ENOSPC, "no_room"),
        (os, "pwrite", errno.EDQUOT, "no_room"),
        (os, "ftruncate", errno.EIO, "state_unusable"),
        (fcntl, "flock", errno.ENOLCK, "state_unusable"),
        (os, "open", errno.EACCES, "state_unusable"),
    ],
)
def test_a_claim_that_cannot_be_written_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, module: object, call: str, number: int, code: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    open_before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as world:
        world.setattr(module, call, fails)
        with pytest.raises(StateError) as caught:
            _Ticket(str(place), Claim("1-2-3"))
    assert (caught.value.code, os.strerror(number) in caught.value.message) == (code, True)
    assert caught.value.hint
    assert list(place.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == open_before
