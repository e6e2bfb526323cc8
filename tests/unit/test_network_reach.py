"""What is asked for beside a kind of network with which it does nothing."""

import pytest

from elsewhere import settings
from elsewhere.errors import UsageError
from elsewhere.operations import reach
from elsewhere.operations.settings import Resolved

DENIED = {"network.deny": ("example.org",)}


def test_a_denial_that_is_typed_does_nothing_without_a_network() -> None:
    resolved = Resolved(
        settings.merge([("user", DENIED), ("command line", {"sandbox.network": "none", "network.deny": ("a.test",)})])
    )
    with pytest.raises(UsageError, match=r"--deny a\.test does nothing with no network: --network none") as caught:
        reach.of_settings(resolved)
    assert caught.value.code == "bad_network"


@pytest.mark.parametrize("source", ["user", "project", "environment"])
def test_a_denial_of_a_file_is_in_nobodys_way(source: str) -> None:
    """What a stranger's project denies must not keep anybody from looking at it without a network."""
    resolved = Resolved(settings.merge([(source, DENIED), ("command line", {"sandbox.network": "none"})]))
    assert reach.of_settings(resolved)["deny"] == ["example.org"]
