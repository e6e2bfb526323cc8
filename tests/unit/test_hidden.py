"""Which places are hidden: by their names, by what they say, and under other mounts; and how much work that is."""

import os
from pathlib import Path

import pytest

from elsewhere.linux.mountinfo import Mount
from elsewhere.sandbox import hidden


def places(home: Path, **more: object) -> list[str]:
    found = hidden.hidden_places(str(home), (f"{home}/project",), f"{home}/state", **more)  # type: ignore[arg-type]
    return [path for path in found if path.startswith(f"{home.parent}/")]


def plant(home: Path, name: str, text: str = "x") -> str:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def mount(target: str, root: str = "/", device: str = "8:1") -> Mount:
    return Mount(0, 0, device, root, target, frozenset(), "ext4", "disk")


@pytest.mark.parametrize("name", hidden.CREDENTIALS)
def test_a_credential_is_hidden_if_it_is_there(place: Path, name: str) -> None:
    home = place / "home"
    home.mkdir()
    assert places(home) == []
    planted = plant(home, name)
    assert places(home) == [planted]


@pytest.mark.parametrize("name", hidden.TELLING)
@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("", False),
        ("registry = https://example.org/\n", False),
        ("email = me@example.org\n", False),
        ("//example.org/:_authToken=x\n", True),
        ("_PASSWORD=x\n", True),
        ("index-url = https://me:x@example.org/simple\n", True),
        ("index-url = https://bare-token@example.org/simple\n", True),
        ("mavenApiKey=x\n", True),
        (" " * 70_000 + "\n", True),
    ],
)
def test_settings_are_hidden_if_they_say_something_secret(place: Path, name: str, text: str, secret: bool) -> None:
    planted = plant(place / "home", name, text)
    assert places(place / "home") == ([planted] if secret else [])
    assert planted in hidden.watched(str(place / "home"), f"{place}/home/project"), "its content decides"


@pytest.mark.timeout(5)
def test_settings_that_are_no_file_keep_nobody_waiting(place: Path) -> None:
    (place / "home").mkdir()
    os.mkfifo(place / "home/.npmrc")
    assert places(place / "home") == [f"{place}/home/.npmrc"]


def test_a_place_is_hidden_under_every_mount_that_shows_it(place: Path) -> None:
    home = place / "home"
    secret = os.path.dirname(plant(home, ".ssh/id"))
    plant(home, "state/file")
    mounts = [
        mount("/"),
        mount("/all"),
        mount("/homes", str(place)),
        mount("/key", f"{secret}/id"),
        mount("/covered"),
        mount(f"/covered{home}", "/", "8:2"),  # another file system on the way
        mount("/beside", f"{home}/project"),
        mount("/like", f"{secret}-like"),
        mount("/other-disk", str(place), "8:3"),
    ]
    found = hidden.hidden_places(str(home), (f"{home}/project",), f"{home}/state", mounts=mounts)
    assert {f"/all{secret}", "/homes/home/.ssh", "/key", f"/all{home}/state", "/homes/home/state"} <= set(found)
    assert not {"/beside", "/like", "/all", "/homes", "/covered"} & set(found)
    assert not [path for path in found if path.startswith((f"/covered{home}", "/other-disk"))]


def test_a_second_place_that_is_the_home_is_not_hidden_as_a_whole(place: Path) -> None:
    """Somebody's home is mounted where this one lies."""
    home = place / "home"
    secret = os.path.dirname(plant(home, ".ssh/id"))
    other = str(place / "others")
    os.mkdir(other)
    mounts = [mount("/"), mount(str(home), f"{other}/bob")]
    found = hidden.hidden_places(str(home), (f"{home}/project",), f"{home}/state", hide=(other,), mounts=mounts)
    assert str(home) not in found
    assert {secret, other} <= set(found)


def test_many_places_are_not_compared_with_each_other(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's project may name hundreds; whoever makes the sandbox waits for it."""
    home = place / "home"
    hide = tuple(plant(home, f"project/{number}") for number in range(500))
    calls = []
    is_within = hidden.is_within

    def counted(path: str, around: str) -> bool:
        calls.append(path)
        return is_within(path, around)

    monkeypatch.setattr(hidden, "is_within", counted)
    assert places(home, hide=hide) == sorted(hide, key=len)
    assert len(calls) < 20 * len(hide)


def test_what_lies_in_a_hidden_place_needs_no_cover_but_in_a_share_it_does(place: Path) -> None:
    home = place / "home"
    inner, secret = plant(home, "closed/share/inner/file"), plant(home, "closed/file")
    closed, share = f"{home}/closed", f"{home}/closed/share"
    assert places(home, hide=(closed, inner, secret)) == [closed]
    assert places(home, hide=(closed, inner, secret), shares=(share,)) == [closed, inner]
