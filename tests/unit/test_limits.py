"""Limits as they are asked for, and who holds them on which host."""

import os

import pytest

from elsewhere.errors import Unavailable, UsageError
from elsewhere.limits import DEFAULTS, LIVING, NAMES, UNTRUSTED, Limits, parse
from elsewhere.sandbox import enforcement, rungs
from elsewhere.sandbox.confinement import Confinement, Share
from elsewhere.sandbox.enforcement import Facts

NOTHING = dict.fromkeys(("memory", "pids", "cpu"), "no cgroup")


@pytest.mark.parametrize(
    ("name", "value", "number"),
    [
        ("memory", "512M", 512 << 20),
        ("memory", 1 << 30, 1 << 30),
        ("memory", "50%", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2),
        ("cpus", "0.5", 0.5),
        ("cpus", 2, 2.0),
        ("pids", "256", 256),
        ("disk", "1G", 1 << 30),
        ("open_files", 1024, 1024),
        ("timeout", "5m", 300.0),
        ("ttl", "1h30m", 5400.0),
        ("idle", 10, 10.0),
    ],
)
def test_human_values_become_numbers(name: str, value: object, number: float) -> None:
    assert parse(name, value) == pytest.approx(number)
    assert Limits(**{name: value}).given() == {name: pytest.approx(number)}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["", "x", "-1", "0", "nan", "inf", True, [], "1e400", "101%", "9" * 40])
def test_nonsense_is_named(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse(name, value)
    assert caught.value.code == "bad_limit"
    assert repr(value) in caught.value.message
    assert name in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value", [1 << 63, -(1 << 64), 16**4000, -(16**4000), [16**4000]], ids=lambda value: type(value).__name__
)
def test_a_number_that_nobody_can_write_out_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse(name, value)
    assert caught.value.code == "bad_limit"
    assert " bits>" in caught.value.message


def test_what_is_untrusted_has_less() -> None:
    assert Limits().given() == {}
    assert LIVING.given() == {**DEFAULTS.given(), "ttl": 24 * 3600.0}
    assert all(UNTRUSTED.given()[name] < DEFAULTS.given()[name] for name in ("pids", "disk"))


def test_a_confinement_survives_the_wire() -> None:
    one = Confinement(
        view="project", network="none", nested=True, hide=("/a",), shares=(Share("/b"), Share("/c", True)),
        devices=("/dev/kvm",), toolchains=("/opt/x",),
    )  # fmt: skip
    assert Confinement.unpacked(one.packed()) == one
    assert Confinement.unpacked({}) == Confinement(network="host"), "of a record that was written before there were rules"


@pytest.mark.parametrize(
    ("name", "facts", "words", "holds"),
    [
        ("memory", Facts(rungs.named("overlay-idmap"), 1, {}, False, "", ""), "cgroup-v1", True),
        ("memory", Facts(rungs.named("overlay-userns"), 0, NOTHING, True, "", ""), "not enforced, watched: no cgroup", False),
        (
            "cpus",
            Facts(rungs.named("overlay-idmap"), 2, {"cpu": "not handed on"}, False, "", ""),
            "not enforced: not handed on",
            False,
        ),
        (
            "pids",
            Facts(rungs.named("overlay-userns"), 0, NOTHING, True, "", ""),
            "rlimit, in the sandbox's own user namespace",
            True,
        ),
        ("pids", Facts(rungs.named("overlay-userns"), 0, NOTHING, False, "", ""), "not enforced: no cgroup", False),
        ("pids", Facts(rungs.named("copy-landlock"), 0, NOTHING, True, "", ""), "not enforced: no cgroup", False),
        ("disk", Facts(rungs.named("overlay-idmap"), 1, {}, False, "image", ""), "image", True),
        ("disk", Facts(rungs.named("overlay-userns"), 1, {}, True, "", "no quota"), "not enforced, watched: no quota", False),
        ("open_files", Facts(rungs.named("copy-landlock"), 0, NOTHING, True, "", ""), "rlimit", True),
        ("timeout", Facts(rungs.named("copy-landlock"), 0, NOTHING, True, "", ""), "keeper", True),
    ],
)
def test_who_holds_what(name: str, facts: Facts, words: str, holds: bool) -> None:
    found = enforcement.hold([name], facts)[name]
    assert (found.words, found.holds) == (words, holds)
    if holds:
        enforcement.check({name: 1}, {name: found}, [name])
        return
    enforcement.check({name: 1}, {name: found}, [])  # nobody insists
    with pytest.raises(Unavailable) as caught:
        enforcement.check({name: 1}, {name: found}, [name])
    assert words in caught.value.message
    assert "--best-effort" in caught.value.hint
