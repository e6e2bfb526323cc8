"""Profiles: which there are, what their files may say, whose count, and what becomes of the places that they name."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from elsewhere import profiles
from elsewhere.errors import Refused, UsageError
from elsewhere.network import rules
from elsewhere.operations import profiling
from elsewhere.sandbox import hidden
from elsewhere.sandbox.confinement import Confinement, Share
from elsewhere.storage.state import State

ROOT = Path(__file__).parents[2]
BUILT_IN = ["aider", "claude", "codex", "gemini", "mini-swe-agent", "opencode"]


@pytest.fixture
def home(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = place / "home"
    made.mkdir()
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return made


def plant(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def own(home: Path, text: str, name: str = "mine") -> Path:
    return plant(home / f".config/elsewhere/profiles/{name}.toml", text)


def needs(home: Path, *names: str, **environment: str) -> profiling.Needs:
    return profiling.needs(names, State(str(home.parent / "state")), environment)


# -- which there are ---


def test_the_built_in_ones_are_known_and_can_be_read(home: Path) -> None:
    assert list(profiles.known()) == BUILT_IN
    for name in BUILT_IN:
        found = profiles.load(name, {})
        assert found.about
        assert found.allow
        assert found.token
        assert found.state
        assert all(path.startswith(f"{home}/") for path in (*found.token, *found.state, *found.program))


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_built_in_one_opens_more_than_single_hosts_of_the_web(home: Path, name: str) -> None:
    for text in profiles.load(name, {}).allow:
        rule = rules.parse(text)
        assert not rule.host.startswith("*.")
        assert rule.port is None


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_built_in_one_shows_as_a_login_is_hidden_without_it(home: Path, name: str) -> None:
    for path in profiles.load(name, {}).token:
        plant(Path(path), "x")
        covered = hidden.hidden_places(str(home), (f"{home}/project",), f"{home}/state")
        assert any(path == place or path.startswith(f"{place}/") for place in covered)


@pytest.mark.parametrize("name", ["nobody", "", "../claude", "claude.toml", "/etc/passwd", "CLAUDE"])
def test_an_unknown_one_is_refused_with_the_known_ones(home: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        profiles.load(name, {})
    assert caught.value.code == "bad_profile"
    assert repr(name) in caught.value.message
    assert all(known in caught.value.hint for known in BUILT_IN)


def test_the_users_own_lie_beside_their_settings_and_win(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(home, 'allow = ["api.example.org"]')
    own(home, 'allow = ["claude.example.org"]', "claude")
    own(home, "no toml at all", ".not-a-name")
    assert list(profiles.known()) == sorted([*BUILT_IN, "mine"])
    assert profiles.load("mine", {}).allow == ("api.example.org",)
    assert profiles.load("claude", {}).allow == ("claude.example.org",)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "elsewhere-else"))
    assert list(profiles.known()) == BUILT_IN


def test_a_project_brings_none(home: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for inside in (".config/elsewhere/profiles", "profiles", ".elsewhere/profiles"):
        plant(place / "project" / inside / "mine.toml", 'state = ["~/.ssh"]')
    monkeypatch.chdir(place / "project")
    assert list(profiles.known()) == BUILT_IN


# -- what a file may say ---


def test_a_file_says_what_it_says(home: Path) -> None:
    own(
        home,
        """
        about = "mine"
        allow = ["API.Example.org", "10.0.0.5:8080"]
        variables = ["MINE_KEY"]
        token = ["~/.mine/token"]
        state = ["~/.mine", "/opt/mine/state/"]
        program = ["~/tools/mine"]
        [moved]
        MINE_HOME = "~/.mine"
        """,
    )
    assert profiles.load("mine", {"MINE_HOME": "relative"}) == profiles.Profile(
        name="mine",
        file=f"{home}/.config/elsewhere/profiles/mine.toml",
        about="mine",
        allow=("api.example.org", "10.0.0.5:8080"),
        variables=("MINE_KEY", "MINE_HOME"),
        token=(f"{home}/.mine/token",),
        state=(f"{home}/.mine", "/opt/mine/state"),
        program=(f"{home}/tools/mine",),
    )
    moved = profiles.load("mine", {"MINE_HOME": "/srv/mine/"})
    assert moved.token == ("/srv/mine/token",)
    assert moved.state == ("/srv/mine", "/opt/mine/state")


def test_one_that_says_nothing_needs_nothing(home: Path) -> None:
    own(home, "")
    assert needs(home, "mine") == profiling.Needs()


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ('hosts = ["example.org"]', "'hosts'", "allow"),
        ("[sandbox]\nview = 'machine'", "'sandbox'", "allow"),
        ('allow = "example.org"', "allow", "list of hosts"),
        ('allow = ["*"]', "allow", "list of hosts"),
        ('allow = ["*.com"]', "allow", "list of hosts"),
        ("allow = [443]", "allow", "list of hosts"),
        ('variables = "KEY"', "variables", "names of variables"),
        ('variables = ["KEY=value"]', "variables", "names of variables"),
        ('variables = ["1KEY"]', "variables", "names of variables"),
        ('state = ["relative"]', "state", "list of paths"),
        ('state = ["~/../other"]', "state", "list of paths"),
        ('state = ["~other/x"]', "state", "list of paths"),
        ('state = [""]', "state", "list of paths"),
        ("token = {path = 'x'}", "token", "list of paths"),
        ("program = true", "program", "list of paths"),
        ("about = 1", "about", "text"),
        ('moved = ["X"]', "moved", "table"),
        ("[moved]\nX = 1", "moved.X", "table"),
        ("[moved]\nX = 'relative'", "moved.X", "table"),
        ("[moved]\n'X=' = '~/.x'", "moved.X=", "table"),
        ("allow = [", "end of document", "mend"),
    ],
)
def test_a_wrong_file_is_refused_by_file_key_and_what_is_expected(home: Path, text: str, key: str, expected: str) -> None:
    path = own(home, text)
    with pytest.raises(UsageError) as caught:
        profiles.load("mine", {})
    assert caught.value.code == "bad_profile_file"
    assert caught.value.message.startswith(f"{path}: ")
    assert key in caught.value.message
    assert expected in caught.value.hint


@pytest.mark.timeout(5)
def test_a_fifo_in_place_of_a_file_is_not_waited_for(home: Path) -> None:
    os.mkfifo(own(home, "").with_name("fifo.toml"))
    with pytest.raises(UsageError) as caught:
        profiles.load("fifo", {})
    assert caught.value.code == "bad_profile_file"


# -- what becomes of its places ---


def test_what_is_not_there_is_left_out(home: Path) -> None:
    found = needs(home, "claude")
    assert (found.shares, found.copies, found.links, found.programs) == ((), (), (), ())
    assert found.allow == ("api.anthropic.com",)
    assert "ANTHROPIC_API_KEY" in found.variables


def test_what_is_there_is_shown_and_copied(home: Path) -> None:
    token = plant(home / ".claude/.credentials.json")
    settings = plant(home / ".claude.json")
    found = needs(home, "claude", "codex", "claude")
    assert found.shares == (Share(str(token)),)
    assert found.copies == (str(token.parent), str(settings))
    assert found.allow == ("api.anthropic.com", "api.openai.com", "chatgpt.com")


def test_a_link_leads_where_it_leads(home: Path) -> None:
    token = plant(home / "dotfiles/claude/.credentials.json")
    (home / ".claude").symlink_to("dotfiles/claude")
    found = needs(home, "claude")
    assert found.shares == (Share(str(token)),)
    assert found.copies == (str(token.parent),)
    assert found.links == ((f"{home}/.claude", str(token.parent)),)


def test_what_somebody_asked_for_by_itself_holds(home: Path) -> None:
    token = str(plant(home / ".codex/auth.json"))
    found = needs(home, "codex")
    assert found.shares_besides([Share("/srv/x"), Share(token, writable=True)]) == (Share("/srv/x"), Share(token, writable=True))
    assert found.shares_besides([]) == (Share(token),)


def test_a_socket_is_neither_shown_nor_copied(home: Path) -> None:
    own(home, 'state = ["~/fifo"]\ntoken = ["~/fifo"]')
    os.mkfifo(home / "fifo")
    assert needs(home, "mine") == profiling.Needs()


@pytest.mark.parametrize("named", ["~/.", "/", "/proc/self", "~/link", "{state}", "{state}/sandboxes"])
@pytest.mark.parametrize("key", ["state", "token"])
def test_what_would_show_far_more_is_refused(home: Path, key: str, named: str) -> None:
    state = home.parent / "state"
    (state / "sandboxes").mkdir(parents=True)
    (home / "link").symlink_to(home)
    own(home, f'{key} = ["{named.format(state=state)}"]')
    with pytest.raises(Refused) as caught:
        needs(home, "mine")
    assert caught.value.code == "profile_refused"
    assert "'mine'" in caught.value.message


def test_a_confinement_comes_back_as_it_was() -> None:
    made = Confinement(copies=("/a",), links=(("/b", "/a"),), variables=("KEY",), profiles=("claude",))
    assert Confinement.unpacked(made.packed()) == made
    assert Confinement.unpacked({}).copies == ()


# -- they are shipped ---


def test_a_wheel_has_them(place: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"elsewhere/profiles/{name}.toml" for name in BUILT_IN} <= set(names)
