"""Settings: what the files may say, which source holds, what a project's file may not say by itself, and what trust changes."""

import contextlib
import json
import os
import random
import re
import resource
import tomllib
from pathlib import Path
from typing import Any

import pytest

from elsewhere import limits, settings
from elsewhere.errors import ElsewhereError, NotFound, Refused, Unavailable, UsageError
from elsewhere.operations import settings as operations
from elsewhere.operations.settings import Resolved, resolve
from elsewhere.settings import KEYS
from elsewhere.storage.state import State


def load(place: Path, text: str | bytes, *, project: bool = True) -> dict[str, Any]:
    file = place / "elsewhere.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    content = settings.read(str(file), within=str(place))
    assert content is not None
    return settings.parse(str(file), content, str(place), project=project)


def refusal(place: Path, text: str | bytes) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(place, text)
    assert str(place / "elsewhere.toml") in caught.value.message
    assert caught.value.hint
    return caught.value


class World:
    """Somebody with a home, a state directory and a project."""

    def __init__(self, place: Path) -> None:
        self.home, self.project = place / "home", place / "project"
        for directory in (self.home / ".config" / "elsewhere", self.project):
            directory.mkdir(parents=True)
        self.state = State.open(str(place / "state"))
        self.project_file = self.project / "elsewhere.toml"
        self.user_file = self.home / ".config" / "elsewhere" / "elsewhere.toml"

    def resolve(self, given: dict[str, object] | None = None, **variables: str) -> Resolved:
        return resolve(self.state, str(self.project), given, variables)


@pytest.fixture
def world(place: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(place)
    monkeypatch.setenv("HOME", str(found.home))
    monkeypatch.setenv("ELSEWHERE_HOME", str(place / "state"))
    for name in (*os.environ,):
        if name == "XDG_CONFIG_HOME" or name.startswith("ELSEWHERE_SANDBOX") or name in settings._VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.chdir(found.project)
    return found


def assignment(name: str, text: str) -> str:
    """As a file of its own."""
    section, _, key = name.partition(".")
    return f"[{section}]\n{key} = {text}\n"


# -- files ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# nothing\n", "[env]\n", "[limits]\n[sandbox]\n"])
def test_a_file_that_says_nothing_says_nothing(place: Path, text: str) -> None:
    assert load(place, text) == {}


def test_a_file_that_is_not_there_is_none(place: Path) -> None:
    assert settings.read(str(place / "missing.toml")) is None


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ('[env]\npass = ["NODE_ENV", "DEBUG", "DEBUG"]\n', "env.pass", ("NODE_ENV", "DEBUG")),
        ('base.live = ["data/"]\n', "base.live", ("data/",)),
        ('[limits]\nmemory = "2G"\n', "limits.memory", 2 << 30),
        ("[limits]\nmemory = 33554432\n", "limits.memory", 32 << 20),
        ('[limits]\nttl = "1h30m"\n', "limits.ttl", 5400),
        ("[limits]\ncpus = 0.5\n", "limits.cpus", 0.5),
        ("[limits]\npids = 12\n", "limits.pids", 12),
        ('[sandbox]\nview = "project"\n', "sandbox.view", "project"),
        ("[sandbox]\nuntrusted = true\n", "sandbox.untrusted", True),
        ('[sandbox]\nbackend = "docker"\n', "sandbox.backend", "docker"),
    ],
)
def test_values_are_understood(place: Path, text: str, key: str, value: object) -> None:
    assert load(place, text) == {key: value}


def test_paths_are_relative_to_where_they_are_written(world: World) -> None:
    world.project_file.write_text('sandbox.hide = ["a", "./b/", "~/c", "/d", "~", "x/../y"]\n')
    world.user_file.write_text('sandbox.hide = ["u"]\nsandbox.share = ["s:rw", "t:ro", "v", "od:d"]\n')
    found = world.resolve({"sandbox.hide": ["here"]}, ELSEWHERE_HIDE="e:~/f")
    project, home = str(world.project), str(world.home)
    assert found["sandbox.hide"] == (
        f"{home}/u", f"{project}/a", f"{project}/b", f"{home}/c", "/d", home, f"{project}/x/../y",
        f"{project}/e", f"{home}/f", f"{project}/here",
    )  # fmt: skip
    assert found["sandbox.share"] == (f"{home}/s:rw", f"{home}/t", f"{home}/v", f"{home}/od:d")


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("[evn]\n", "'evn'", "'env'"),
        ("evn = 1\n", "'evn'", "'env'"),
        ("[env]\npas = []\n", "'env.pas'", "'env.pass'"),
        ("[zzz]\n", "'zzz'", "known here: admission, base, env, experiments, limits, network, promotion, races, sandbox, stages"),
        ("[env]\nzzz = 1\n", "'env.zzz'", "known here: env.pass"),
        ("[limits]\nmemmory = 1\n", "'limits.memmory'", "'limits.memory'"),
        ("[sandbox]\nveiw = 1\n", "'sandbox.veiw'", "'sandbox.view'"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_right_one(place: Path, text: str, said: str, hint: str) -> None:
    error = refusal(place, text)
    assert error.code == "unknown_setting"
    assert said in error.message
    assert hint in error.hint


WRONG = ['""', '"NAME"', "-1", "[1]", '["A", 1]', '[["A"]]', "{ A = 1 }", "2024-01-01", "[true]", "nan", "inf", "1" + "0" * 400]


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("value", WRONG)
def test_a_value_of_the_wrong_type_is_refused_with_its_key(place: Path, name: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(place, assignment(name, value), project=False)
    assert caught.value.code == "bad_settings"
    assert name in caught.value.message
    assert KEYS[name].example in caught.value.hint


HUGE = ["0x" + "f" * 4000, "-" + "9" * 4000, "[0x" + "f" * 4000 + "]", "{ A = 0x" + "f" * 4000 + " }", str(1 << 63)]


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("value", HUGE, ids=lambda value: value[:8])
def test_a_number_that_nobody_can_write_out_is_refused_with_its_key(place: Path, name: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(place, assignment(name, value), project=False)
    assert (caught.value.code, len(caught.value.message) < 1000) == ("bad_settings", True)
    assert f"{name} = " in caught.value.message
    assert " bits>" in caught.value.message


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("value", [16**4000, [16**4000], (16**4000,)], ids=lambda value: type(value).__name__)
def test_a_program_that_gives_such_a_number_is_refused_too(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        settings.from_given({name: value})
    assert caught.value.code == "bad_option"
    assert " bits>" in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "env.pass = ['A B']", "env.pass = ['1A']", "env.pass = ['']", "env.pass = ['A=B']", "env.pass = ['Ä']",
        "sandbox.hide = ['']", 'sandbox.hide = ["a\\u0000b"]', "sandbox.hide = ['~other/x']", "sandbox.share = ['~other:rw']",
        "sandbox.view = 'all'", "sandbox.network = 'allow-all'", "sandbox.backend = 'dokcer'", "sandbox.gpu = 1",
        "limits.memory = '1'", "limits.memory = '101%'", "limits.pids = 0", "limits.pids = 1.5", "limits.cpus = 0",
    ],
)  # fmt: skip
def test_an_impossible_value_is_refused(place: Path, text: str) -> None:
    error = refusal(place, text)
    assert error.code == "bad_settings"
    assert text.split(" ")[0] in error.message


@pytest.mark.parametrize("text", ["env = 1\n", "env = []\n", 'env = "x"\n', "[[env]]\n"])
def test_a_section_that_is_no_table_is_refused(place: Path, text: str) -> None:
    error = refusal(place, text)
    assert error.code == "bad_settings"
    assert "[env]" in error.hint


@pytest.mark.parametrize(
    "text",
    [
        "[env\n",
        "env",
        "[env]\npass = [\n",
        "[env]\n[env]\n",
        "a = \x00\n",
        b"\xff\xfe",
        b"[env]\npass = ['\xff']\n",
        "a = [" + "[\n" * 10_000,
        "a = " + "1" * 4_000,
        "a = 2024-99-99\n",
        "#\n" * 40_000,
        "sandbox.view." + "a." * 2_000 + "a = 1",
        "a." * 20_000 + "a = 1",
    ],
    ids=lambda text: ascii(text[:20]),
)
@pytest.mark.timeout(20)
def test_a_broken_file_is_refused_by_name(place: Path, text: str | bytes) -> None:
    assert refusal(place, text).code in ("bad_settings", "unknown_setting")


def test_a_directory_in_place_of_the_file_is_refused_by_name(place: Path) -> None:
    (place / "elsewhere.toml").mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        settings.read(str(place / "elsewhere.toml"))


def test_an_unreadable_file_is_refused_by_name(place: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    (place / "elsewhere.toml").touch(mode=0)
    with pytest.raises(UsageError, match="Permission denied"):
        settings.read(str(place / "elsewhere.toml"))


@pytest.mark.timeout(5)
def test_a_fifo_that_a_stranger_put_in_place_of_the_file_is_not_waited_for(place: Path) -> None:
    os.mkfifo(place / "elsewhere.toml")
    with pytest.raises(UsageError, match=r"elsewhere\.toml"):
        settings.read(str(place / "elsewhere.toml"))


def test_a_projects_file_may_be_a_link_inside_the_project_and_not_out_of_it(place: Path) -> None:
    (place / "inside").mkdir()
    (place / "inside" / "real.toml").write_text("[limits]\npids = 5\n")
    (place / "outside.toml").write_text("[limits]\npids = 6\n")
    file = place / "inside" / "elsewhere.toml"
    file.symlink_to("real.toml")
    assert settings.read(str(file), within=str(place / "inside")) == b"[limits]\npids = 5\n"
    for target in ("../outside.toml", "/proc/self/environ", "missing", "elsewhere.toml"):
        file.unlink()
        file.symlink_to(target)
        with pytest.raises(UsageError, match=r"inside/elsewhere\.toml") as caught:
            settings.read(str(file), within=str(place / "inside"))
        assert caught.value.code == "bad_settings"
    file.unlink()
    file.symlink_to("../outside.toml")
    assert settings.read(str(file)) == b"[limits]\npids = 6\n"  # the user's own may


def test_the_users_own_file_lies_where_configuration_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert settings.user_file() == "/home/me/.config/elsewhere/elsewhere.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/my/config")
    assert settings.user_file() == "/my/config/elsewhere/elsewhere.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")  # would depend on where one stands, perhaps in a stranger's project
    assert settings.user_file() == "/home/me/.config/elsewhere/elsewhere.toml"


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.narrows == "never"])
def test_what_is_about_the_machine_is_not_for_a_projects_file(place: Path, name: str) -> None:
    text = assignment(name, KEYS[name].example)
    assert refusal(place, text).code == "bad_settings"
    assert name in load(place, text, project=False)


# -- the environment and the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("ELSEWHERE_MEMORY", "2G", "limits.memory", 2 << 30),
        ("ELSEWHERE_OPEN_FILES", "100", "limits.open_files", 100),
        ("ELSEWHERE_VIEW", "project", "sandbox.view", "project"),
        ("ELSEWHERE_UNTRUSTED", "Yes", "sandbox.untrusted", True),
        ("ELSEWHERE_NESTED", "0", "sandbox.nested", False),
        ("ELSEWHERE_HIDE", "/a::/b", "sandbox.hide", ("/a", "/b")),
        ("ELSEWHERE_SHARE", "/a:rw:/b:/c:ro", "sandbox.share", ("/a:rw", "/b", "/c")),
        ("ELSEWHERE_ENV_PASS", "A, B,,A", "env.pass", ("A", "B")),
        ("ELSEWHERE_PROFILE", "claude, codex", "sandbox.profile", ("claude", "codex")),
        ("ELSEWHERE_BASE_LIVE", "data:build", "base.live", ("data", "build")),
        ("ELSEWHERE_ADMISSION_MOST", "3", "admission.most", 3),
        ("ELSEWHERE_ADMISSION_DISK_RESERVE", "0", "admission.disk_reserve", 0),
        ("ELSEWHERE_ADMISSION_WAIT", "off", "admission.wait", False),
        ("ELSEWHERE_PROMOTION_KEEP", "7d", "promotion.keep", 7 * 86400),
        ("ELSEWHERE_PROMOTION_CAP", "1G", "promotion.cap", 1 << 30),
    ],
)
def test_a_variable_is_understood(world: World, variable: str, text: str, key: str, value: object) -> None:
    found = world.resolve(**{variable: text})
    assert (found[key], found.values[key].source) == (value, "environment")
    assert world.resolve(**{variable: ""}).values[key].source == "default"


@pytest.mark.parametrize("variable", sorted(settings._VARIABLES))
def test_a_wrong_variable_is_refused_by_its_name(world: World, variable: str) -> None:
    if settings._VARIABLES[variable].kind in ("paths", "shares", "places", "words"):
        text = "~nobody/x" if settings._VARIABLES[variable].kind in ("paths", "shares") else ""
    else:
        text = "!?"
    if not text:
        pytest.skip("every text is a name, or is looked at by whoever knows what it means")
    with pytest.raises(UsageError, match=rf"^{variable} = ") as caught:
        world.resolve(**{variable: text})
    assert caught.value.code == "bad_settings"


def test_variables_do_not_collide_with_others_of_ours() -> None:
    assert len(settings._VARIABLES) == len(KEYS)
    for variable in settings._VARIABLES:
        assert not variable.startswith(("ELSEWHERE_SANDBOX_", "ELSEWHERE_LAUNCHER_"))
    assert not {"ELSEWHERE_HOME", "ELSEWHERE_ALLOW_NESTED"} & set(settings._VARIABLES)


def test_a_variable_that_is_not_known_is_nobodys_business(world: World) -> None:
    assert world.resolve(ELSEWHERE_MEMMORY="x").values == world.resolve().values


def test_what_is_given_may_be_human_or_not_and_none_is_not_given(world: World) -> None:
    found = world.resolve(
        {"limits.memory": "1G", "limits.ttl": 60.0, "sandbox.view": None, "env.pass": ("A",), "sandbox.gpu": False}
    )
    assert (found["limits.memory"], found["limits.ttl"], found["env.pass"]) == (1 << 30, 60, ("A",))
    assert [found.values[f"sandbox.{name}"].source for name in ("view", "gpu")] == ["default", "command line"]
    with pytest.raises(UsageError) as caught:
        world.resolve({"limits.memroy": 1})
    assert "limits.memory" in caught.value.hint


# -- which source holds ---------------------------------------------------------------------------------------------------------


def test_the_strongest_source_holds(world: World) -> None:
    expected = ["default", "user", "project", "environment", "command line"]
    seen = [world.resolve()]
    world.user_file.write_text("[limits]\npids = 400\n")
    seen.append(world.resolve())
    world.project_file.write_text("[limits]\npids = 300\n")
    seen.append(world.resolve())
    seen.append(world.resolve(ELSEWHERE_PIDS="500"))
    seen.append(world.resolve({"limits.pids": 600}, ELSEWHERE_PIDS="500"))
    assert [(one["limits.pids"], one.values["limits.pids"].source) for one in seen] == list(
        zip([None, 400, 300, 500, 600], expected, strict=True)
    )
    assert not any(one.ignored for one in seen)


def test_lists_add_up_over_all_sources(world: World) -> None:
    world.user_file.write_text('base.live = ["a", "b"]\n')
    world.project_file.write_text('base.live = ["b", "c"]\n')
    found = world.resolve({"base.live": ["e"]}, ELSEWHERE_BASE_LIVE="d")
    assert found["base.live"] == ("a", "b", "c", "d", "e")
    assert found.values["base.live"].source == "user, project, environment, command line"


def test_limits_are_those_that_were_asked_for(world: World) -> None:
    assert world.resolve().asked_limits() == {}
    world.user_file.write_text('[limits]\nmemory = "1G"\nidle = "5m"\n')
    assert world.resolve({"limits.pids": 7}).asked_limits() == {"memory": 1 << 30, "idle": 300.0, "pids": 7}
    assert world.resolve().tight_limits() == {}


@pytest.mark.parametrize("trusted", [False, True])
def test_a_project_that_repeats_what_is_built_in_asks_for_nothing(world: World, trusted: bool) -> None:
    world.project_file.write_text('[limits]\nmemory = "80%"\npids = 4096\ndisk = "20G"\nttl = "24h"\ncpus = 1\n')
    if trusted:
        operations.trust(str(world.project))
    found = world.resolve()
    assert (found.asked_limits(), found.ignored) == ({"cpus": 1.0}, ())
    assert world.resolve({"limits.disk": "20G"}).asked_limits() == {"cpus": 1.0, "disk": 20 << 30}, "whoever types it means it"
    world.user_file.write_text('[limits]\npids = 100\ndisk = "30G"\n')
    asked = {"cpus": 1.0, "pids": 4096 if trusted else 100, "disk": 20 << 30}
    assert world.resolve().asked_limits() == asked, "where the user's own file says something else, it is no repetition"


def test_untrusted_brings_its_own_values(world: World) -> None:
    for found in (world.resolve({"sandbox.untrusted": True}), world.resolve(ELSEWHERE_UNTRUSTED="1")):
        assert (found["sandbox.view"], found["sandbox.network"]) == ("project", "none")
        assert found.values["sandbox.view"].source == "untrusted"
        assert found.asked_limits() == {}
        assert found.tight_limits() == limits.UNTRUSTED.given()


def test_untrusted_tightens_weaker_sources_and_leaves_stronger_ones(world: World) -> None:
    world.user_file.write_text('[sandbox]\nview = "machine"\nnetwork = "host"\n[limits]\nmemory = "3G"\npids = 9\n')
    found = world.resolve({"sandbox.untrusted": True, "limits.ttl": "10h"}, ELSEWHERE_DISK="9G")
    assert (found["sandbox.view"], found["sandbox.network"], found["limits.memory"]) == ("project", "none", 2 << 30)
    assert (found["limits.pids"], found["limits.ttl"]) == (9, 36000)
    assert found["limits.disk"] == 2 << 30, "the command line is stronger than the environment"
    found = world.resolve({"sandbox.view": "machine", "limits.memory": "3G"}, ELSEWHERE_UNTRUSTED="1")
    assert (found["sandbox.view"], found["sandbox.network"], found["limits.memory"]) == ("machine", "none", 3 << 30)
    world.user_file.write_text('[sandbox]\nview = "machine"\nuntrusted = true\n')
    assert world.resolve()["sandbox.view"] == "machine"


def test_a_backend_of_another_tool_is_told_to_be_unavailable() -> None:
    for name in ("auto", "native"):
        settings.check_backend(name)
    for name in ("docker", "podman", "macos-container", "seatbelt", "none"):
        with pytest.raises(Unavailable, match=name) as caught:
            settings.check_backend(name)
        assert caught.value.code == "backend_unavailable"
        assert "native" in caught.value.hint


# -- what a project's file may say ----------------------------------------------------------------------------------------------

NARROWER = {
    "sandbox.view": '"project"',
    "sandbox.network": '"none"',
    "network.deny": '["pypi.org"]',
    "sandbox.untrusted": "true",
    "sandbox.backend": '"native"',
    "sandbox.hide": '["x"]',
    "base.live": '["x"]',
    "promotion.runs": '["x"]',
    "limits.memory": '"64M"',
    "limits.cpus": "0.1",
    "limits.pids": "9",
    "limits.disk": '"1G"',
    "limits.open_files": "16",
    "limits.timeout": '"1h"',
    "limits.ttl": '"23h"',
    "limits.idle": '"1h"',
}
WIDER = {
    "sandbox.nested": "true",
    "sandbox.best_effort": "true",
    "sandbox.gpu": "true",
    "sandbox.share": '["/etc"]',
    "sandbox.profile": '["claude"]',
    "network.allow": '["example.org"]',
    "network.preset": '["models"]',
    "network.forward": '["5432"]',
    "network.publish": '["8080"]',
    "sandbox.network": '"host"',
    "sandbox.device": '["/dev/kvm"]',
    "sandbox.backend": '"none"',
    "env.pass": '["AWS_SECRET_ACCESS_KEY"]',
    "limits.memory": '"99%"',
    "limits.pids": "5000",
    "limits.disk": '"21G"',
    "limits.ttl": '"25h"',
}
WIDER_THAN_THE_USERS = {  # what the user says, what the project says
    "sandbox.view": ('"project"', '"machine"'),
    "sandbox.network": ('"none"', '"host"'),
    "sandbox.untrusted": ("true", "false"),
    "limits.memory": ('"1G"', '"2G"'),
    "limits.cpus": ("1", "2"),
    "limits.timeout": ('"1m"', '"2m"'),
    "limits.open_files": ("20", "30"),
    "env.pass": ('["A"]', '["B"]'),
}


def test_every_key_is_tried() -> None:
    assert {*NARROWER, *WIDER, *WIDER_THAN_THE_USERS} == {name for name, key in KEYS.items() if key.narrows != "never"}


@pytest.mark.parametrize("name", NARROWER)
def test_a_projects_file_may_narrow(world: World, name: str) -> None:
    world.project_file.write_text(assignment(name, NARROWER[name]))
    found = world.resolve()
    assert found.values[name].source == "project"
    assert not found.ignored
    assert found.remark() == ""


@pytest.mark.parametrize("name", WIDER)
def test_what_widens_is_ignored_and_reported_and_counts_after_trust(world: World, name: str) -> None:
    world.project_file.write_text(assignment(name, WIDER[name]))
    found = world.resolve()
    assert found.values == resolve(world.state, None, None, {}).values
    assert [one.key for one in found.ignored] == [name]
    assert name in found.remark()
    assert found.ignored[0].why
    told = operations.trust()
    assert [one.key for one in told.widens] == [name]
    assert world.resolve().values[name].source == "project"
    assert not world.resolve().ignored


@pytest.mark.parametrize("name", WIDER_THAN_THE_USERS)
def test_what_the_user_narrowed_a_project_does_not_widen(world: World, name: str) -> None:
    mine, theirs = WIDER_THAN_THE_USERS[name]
    world.user_file.write_text(assignment(name, mine))
    world.project_file.write_text(assignment(name, theirs))
    found = world.resolve()
    assert (found.values[name].source, [one.key for one in found.ignored]) == ("user", [name])
    operations.trust()
    assert world.resolve()[name] != found[name]


@pytest.mark.parametrize("name", ["limits.memory", "sandbox.view", "sandbox.network"])
@pytest.mark.parametrize("how", ["command line", "environment", "user"])
def test_a_project_does_not_undo_untrusted(world: World, name: str, how: str) -> None:
    value = {"limits.memory": '"3G"', "sandbox.view": '"machine"', "sandbox.network": '"host"'}[name]
    world.project_file.write_text(assignment(name, value))
    if how == "user":
        world.user_file.write_text("[sandbox]\nuntrusted = true\n")
        found = world.resolve()
    else:
        found = world.resolve({"sandbox.untrusted": True}) if how == "command line" else world.resolve(ELSEWHERE_UNTRUSTED="1")
    assert (found[name], found.values[name].source) == (settings._TIGHT[name], "untrusted")
    assert [one.key for one in found.ignored] == [name]


def test_open_files_may_not_grow_beyond_what_the_caller_has(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 1000) if kind == resource.RLIMIT_NOFILE else (0, 0))
    world.project_file.write_text("[limits]\nopen_files = 1000\n")
    assert world.resolve()["limits.open_files"] == 1000
    world.project_file.write_text("[limits]\nopen_files = 1001\n")
    assert [one.key for one in world.resolve().ignored] == ["limits.open_files"]


def test_entries_that_hold_anyway_are_not_ignored(world: World) -> None:
    world.user_file.write_text('[env]\npass = ["A"]\n')
    world.project_file.write_text('[env]\npass = ["A"]\n')
    assert not world.resolve().ignored
    world.project_file.write_text('[env]\npass = ["A", "MY_TOKEN"]\n')
    found = world.resolve()
    assert found["env.pass"] == ("A",)
    assert [one.value for one in found.ignored] == [("MY_TOKEN",)]
    assert "MY_TOKEN could be secret" in found.ignored[0].why


def test_what_a_stronger_source_says_anyway_is_not_reported(world: World) -> None:
    world.project_file.write_text("[sandbox]\nnested = true\n")
    assert world.resolve().ignored
    found = world.resolve({"sandbox.nested": False})
    assert (found["sandbox.nested"], found.ignored) == (False, ())


# -- random files ---------------------------------------------------------------------------------------------------------------


def some_value(dice: random.Random, name: str) -> str:
    key = KEYS[name]
    if key.kind == "choice":
        return f'"{dice.choice(key.choices)}"'
    if key.kind == "switch":
        return dice.choice(["true", "false"])
    if key.adds_up:
        paths = {"paths": ["/a", "b", "~/c"], "shares": ["/a", "/a:rw", "b"], "places": "ab"}
        entries = {"names": "ABC", "words": "abc", **paths}[key.kind]
        return json.dumps(dice.sample(list(entries), dice.randrange(3)))
    if key.name in ("memory", "disk"):
        return f'"{dice.choice(["20M", "1G", "3G", "19G", "30G", "1T"])}"'
    if key.name in ("timeout", "ttl", "idle"):
        return f'"{dice.choice(["1s", "9m", "59m", "2h", "30h"])}"'
    return str(dice.choice([16, 100, 1000, 4000, 4097, 4_000_000] if key.name != "cpus" else [0.5, 1, 2, 64]))


def some_file(dice: random.Random) -> str:
    names = dice.sample([name for name, key in KEYS.items() if key.narrows != "never"], dice.randrange(8))
    return "".join(f"{name} = {some_value(dice, name)}\n" for name in names)


def openness(found: Resolved) -> dict[str, Any]:
    """How wide each value is, written down once more and without the table: a number, or the set of what is let in."""
    untrusted = found["sandbox.untrusted"]
    wide: dict[str, Any] = {
        "view": found["sandbox.view"] == "machine",
        "network": found["sandbox.network"] == "host",
        "untrusted": not untrusted,
        "nested": found["sandbox.nested"],
        "best_effort": found["sandbox.best_effort"],
        "gpu": found["sandbox.gpu"],
        "backend": found["sandbox.backend"] not in ("auto", "native"),
    }
    built_in = {"memory": limits.DEFAULTS.memory, "pids": 4096, "disk": 20 << 30, "ttl": 86400}
    for name in limits.NAMES:
        value = found[f"limits.{name}"]
        wide[name] = value if value is not None else built_in.get(name, float("inf"))
    for name in ("share", "profile", "device"):
        wide[name] = set(found[f"sandbox.{name}"])
    wide["pass"] = set(found["env.pass"])
    return wide


def test_without_trust_nothing_is_ever_wider_than_without_the_projects_file(world: World) -> None:
    dice = random.Random(20)
    effective = held = 0
    for _ in range(600):
        world.user_file.write_text(some_file(dice))
        given: dict[str, object] = {}
        if dice.random() < 0.3:
            given = {"sandbox.untrusted": dice.random() < 0.7}
        variables = {"ELSEWHERE_MEMORY": "2G"} if dice.random() < 0.2 else {}
        world.project_file.unlink(missing_ok=True)
        without = world.resolve(given, **variables)
        world.project_file.write_text(some_file(dice))
        found = world.resolve(given, **variables)
        about = f"user:\n{world.user_file.read_text()}project:\n{world.project_file.read_text()}{given} {variables}"
        before, after = openness(without), openness(found)
        for name, wide in before.items():
            if isinstance(wide, set):
                assert after[name] <= wide, f"{name}\n{about}"
            else:
                assert after[name] <= wide, f"{name}: {wide} became {after[name]}\n{about}"
        assert set(without["sandbox.hide"]) <= set(found["sandbox.hide"]), about
        effective += found.values != without.values
        held += bool(found.ignored)
    assert effective > 100, "the files changed nothing, so nothing was tried"
    assert held > 100


# -- trust ----------------------------------------------------------------------------------------------------------------------


def test_trust_ends_with_any_change_of_the_file_and_comes_back_with_its_old_content(world: World) -> None:
    text = "[sandbox]\nnested = true\n"
    world.project_file.write_text(text)
    operations.trust()
    assert world.resolve()["sandbox.nested"] is True
    world.project_file.write_text(text + "\n")
    assert world.resolve()["sandbox.nested"] is False
    assert [one.holds for one in operations.trusted_projects()] == [False]
    world.project_file.write_text(text)
    assert world.resolve()["sandbox.nested"] is True
    assert [one.holds for one in operations.trusted_projects()] == [True]
    assert operations.revoke().holds is False
    assert world.resolve()["sandbox.nested"] is False
    assert operations.trusted_projects() == []
    with pytest.raises(NotFound) as caught:
        operations.revoke()
    assert caught.value.code == "not_trusted"


def test_trust_is_for_one_project(world: World, place: Path) -> None:
    other = place / "other"
    other.mkdir()
    for file in (world.project_file, other / "elsewhere.toml"):
        file.write_text("[sandbox]\nnested = true\n")
    operations.trust()
    assert resolve(world.state, str(other), None, {})["sandbox.nested"] is False
    (other / "elsewhere.toml").unlink()
    (other / "elsewhere.toml").hardlink_to(world.project_file)
    assert resolve(world.state, str(other), None, {})["sandbox.nested"] is False


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"project": 1, "sha256": 2, "at": "x"}', b"null"])
def test_a_broken_record_of_trust_trusts_nobody(world: World, content: bytes) -> None:
    world.project_file.write_text("[sandbox]\nnested = true\n")
    operations.trust()
    (record,) = (Path(world.state.path) / "trust").iterdir()
    assert record.stat().st_mode & 0o077 == 0
    record.write_bytes(content)
    assert world.resolve()["sandbox.nested"] is False
    assert operations.trusted_projects() == []


def test_a_project_that_is_gone_can_be_trusted_no_longer(world: World, place: Path) -> None:
    gone = place / "gone"
    gone.mkdir()
    (gone / "elsewhere.toml").write_text("")
    operations.trust(str(gone))
    (gone / "elsewhere.toml").unlink()
    gone.rmdir()
    assert [(one.project, one.holds) for one in operations.trusted_projects()] == [(str(gone), False)]
    operations.revoke(str(gone))
    assert operations.trusted_projects() == []


def test_there_is_nothing_to_trust_without_a_file_and_nobody_trusts_inside_a_sandbox(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound) as caught:
        operations.trust()
    assert caught.value.code == "no_settings"
    world.project_file.write_text("")
    monkeypatch.setenv("ELSEWHERE_SANDBOX_EXECUTION", "true")
    for verb in (operations.trust, operations.revoke):
        with pytest.raises(Refused) as inside:
            verb()
        assert inside.value.code == "nested"


def test_the_bytes_that_are_compared_are_the_bytes_that_are_parsed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who swaps the file between two looks gains nothing: there is one look."""
    world.project_file.write_text("[sandbox]\nnested = true\n")
    operations.trust()
    looks = []
    read = settings.read

    def swapped_afterwards(path: str, within: str | None = None) -> bytes | None:
        content = read(path, within)
        if path == str(world.project_file):
            looks.append(path)
            world.project_file.write_text("[sandbox]\ngpu = true\n")
        return content

    monkeypatch.setattr(settings, "read", swapped_afterwards)
    found = world.resolve()
    assert (found["sandbox.nested"], found["sandbox.gpu"], len(looks)) == (True, False, 1)
    found = world.resolve()
    assert (found["sandbox.nested"], found["sandbox.gpu"]) == (False, False)


# -- init and config ------------------------------------------------------------------------------------------------------------


def test_the_template_says_nothing_and_each_of_its_keys_can_be_used(place: Path) -> None:
    text = settings.template()
    assert load(place, text) == {}
    used = re.sub(r"^#(?=\w)", "", text, flags=re.MULTILINE)
    assert tomllib.loads(used).keys() == {"sandbox", "limits", "network", "env", "base", "promotion"}
    assert set(load(place, used)) == {name for name, key in KEYS.items() if key.narrows != "never"}
    for key in KEYS.values():
        assert key.narrows == "never" or re.search(rf"^# .+\n#{key.name} = ", text, flags=re.MULTILINE), key.dotted


@pytest.mark.parametrize("name", KEYS)
def test_the_example_of_each_key_is_right_and_is_not_the_default(place: Path, name: str) -> None:
    key = KEYS[name]
    (found,) = load(place, assignment(name, key.example), project=False).values()
    assert found != key.default


def test_init_writes_once(world: World) -> None:
    assert operations.init() == str(world.project_file)
    assert world.project_file.stat().st_mode & 0o400
    assert world.resolve().values == resolve(world.state, None, None, {}).values
    world.project_file.write_text("[limits]\npids = 5\n")
    with pytest.raises(Refused) as caught:
        operations.init()
    assert caught.value.code == "settings_exist"
    assert world.project_file.read_text() == "[limits]\npids = 5\n"
    operations.init(force=True)
    assert world.project_file.read_text() == settings.template()
    assert sorted(os.listdir(world.project)) == ["elsewhere.toml"]


def test_init_does_not_write_through_a_link(world: World, place: Path) -> None:
    (place / "precious").write_text("precious")
    world.project_file.symlink_to(place / "precious")
    with pytest.raises(Refused):
        operations.init()
    operations.init(force=True)
    assert (place / "precious").read_text() == "precious"
    assert not world.project_file.is_symlink()


def test_config_shows_every_key_with_its_source(world: World) -> None:
    world.user_file.write_text('[limits]\nmemory = "1G"\n')
    world.project_file.write_text("[limits]\npids = 5\n[sandbox]\nnested = true\n")
    found = operations.config()
    assert found.shown == tuple(KEYS)
    assert (found.project_file, found.user_file, found.trusted) == (str(world.project_file), str(world.user_file), False)
    assert (found.value("limits.memory"), found.value("limits.pids"), found.value("limits.ttl")) == (1 << 30, 5, 86400)
    assert [one.key for one in found.ignored()] == ["sandbox.nested"]
    assert operations.config("limits").shown == tuple(name for name in KEYS if name.startswith("limits."))
    assert operations.config("limits.pids").shown == ("limits.pids",)
    assert operations.config("limits").ignored() == []
    operations.trust()
    assert operations.config().trusted
    for wrong, right in (("limits.pid", "limits.pids"), ("pids", "limits.pids"), ("view", "sandbox.view")):
        with pytest.raises(UsageError) as caught:
            operations.config(wrong)
        assert caught.value.code == "unknown_setting"
        assert right in caught.value.hint


def test_config_works_where_no_project_can_be(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.home / "elsewhere.toml").write_text("[limits]\npids = 5\n")
    monkeypatch.chdir(world.home)
    found = operations.config()
    assert (found.project_file, found.value("limits.pids")) == (None, 4096)
    with pytest.raises(Refused):
        operations.config(None, str(world.home))


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("limits.memory", 2 << 30, "2G"),
        ("limits.memory", (2 << 30) + 1, "2.0 GiB"),
        ("limits.memory", None, "80% of the machine's"),
        ("limits.ttl", 5400.0, "90m"),
        ("limits.ttl", 86400.0, "1d"),
        ("limits.timeout", 0.25, "0.25s"),
        ("sandbox.gpu", False, "false"),
        ("env.pass", ("A", "B"), "A, B"),
        ("env.pass", (), "none"),
        ("admission.disk_reserve", 0, "0 B"),
        ("promotion.keep", 30 * 86400.0, "30d"),
        ("promotion.cap", 2 << 30, "2G"),
    ],
)
def test_values_are_shown_as_somebody_would_write_them(name: str, value: object, shown: str) -> None:
    assert settings.human(KEYS[name], value) == shown


def test_random_bytes_are_an_error_of_ours_or_settings(world: World) -> None:
    dice = random.Random(7)
    words = [*KEYS, "[", "]", "=", '"', "'", "\n", "{", "}", "true", "1", "1e9", ",", "#", "\\", "\0", ".", "-"]
    for _ in range(300):
        world.project_file.write_text("".join(dice.choice(words) for _ in range(dice.randrange(12))))
        with contextlib.suppress(ElsewhereError):
            world.resolve()
