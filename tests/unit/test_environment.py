"""The environment of a command: a short list passes, everything else is named and stays outside."""

import os
from pathlib import Path

import pytest

from elsewhere.errors import UsageError
from elsewhere.sandbox.environment import compose, looks_secret, parse_assignment, read_env_file

PASSED = """LANG LC_ALL LC_CTYPE LC_MESSAGES TZ TERM COLORTERM PATH HOME USER LOGNAME SHELL VIRTUAL_ENV CONDA_PREFIX
    CONDA_DEFAULT_ENV NVM_DIR JAVA_HOME GOPATH CARGO_HOME RUSTUP_HOME PYENV_ROOT CI http_proxy https_proxy all_proxy no_proxy
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY""".split()
NOT_PASSED = """AWS_SECRET_ACCESS_KEY GITHUB_TOKEN OPENAI_API_KEY SSH_AUTH_SOCK DBUS_SESSION_BUS_ADDRESS XDG_RUNTIME_DIR DISPLAY
    LD_PRELOAD LD_LIBRARY_PATH PYTHONPATH PYTHONSTARTUP NODE_OPTIONS BASH_ENV ENV IFS PWD OLDPWD MAIL EDITOR DOCKER_HOST
    KUBECONFIG LANGX XLANG lang path LC CONDA CIRCLE_TOKEN ELSEWHERE_HOME ELSEWHERE_SANDBOX_ID COMPOSE_PROJECT_NAME""".split()
IDENTITY = {"ELSEWHERE_SANDBOX_ID": "ew-x", "COMPOSE_PROJECT_NAME": "ew_x"}


@pytest.mark.parametrize("name", PASSED)
def test_a_name_of_the_list_passes_with_its_value(name: str) -> None:
    found = compose({name: "its value"}, identity={})
    assert found.variables[name] == "its value"
    assert found.left_out == ()


@pytest.mark.parametrize("name", NOT_PASSED)
def test_any_other_name_stays_outside_and_is_named(name: str) -> None:
    found = compose({name: "sensitive value", "LANG": "C"}, identity={})
    assert name not in found.variables
    assert found.left_out == (name,)


def test_what_was_left_out_is_told_by_sorted_names_and_never_by_values() -> None:
    caller = {name: f"value-of-{number}" for number, name in enumerate(NOT_PASSED)}
    found = compose(caller, identity=IDENTITY)
    assert found.left_out == tuple(sorted(NOT_PASSED))
    assert "value-of-" not in repr(found)


def test_the_identity_wins_over_whatever_the_caller_has() -> None:
    found = compose({"COMPOSE_PROJECT_NAME": "mine", "PATH": "/bin"}, identity=IDENTITY)
    assert found.variables == {"PATH": "/bin", **IDENTITY}


def test_there_is_always_a_path() -> None:
    assert "/usr/bin" in compose({}, identity={}).variables["PATH"].split(":")
    assert compose({"PATH": "/mine"}, identity={}).variables["PATH"] == "/mine"


def test_asking_for_a_name_takes_the_callers_own_value_and_no_longer_leaves_it_out() -> None:
    found = compose({"DEBUG": "1", "OTHER": "2"}, asked=[parse_assignment("DEBUG")], identity={})
    assert found.variables["DEBUG"] == "1"
    assert found.left_out == ("OTHER",)


@pytest.mark.parametrize("value", ["1", "", "a=b", " spaced ", "two\nlines", "grüße"])
def test_asking_for_a_name_with_a_value_sets_exactly_that_value(value: str) -> None:
    found = compose({"NAME": "the caller's"}, asked=[parse_assignment(f"NAME={value}")], identity={})
    assert found.variables["NAME"] == value


def test_what_is_asked_for_later_wins() -> None:
    found = compose({"A": "0"}, asked=[("A", "1"), ("A", None), ("A", "2")], identity={})
    assert found.variables["A"] == "2"


def test_asking_for_a_name_that_is_not_set_is_an_error_that_names_it() -> None:
    with pytest.raises(UsageError, match="MISSING") as caught:
        compose({}, asked=[("MISSING", None)], identity={})
    assert caught.value.code == "env_not_set"
    assert "MISSING=VALUE" in caught.value.hint


def test_a_name_from_settings_passes_if_it_is_set_and_is_no_error_if_not() -> None:
    found = compose({"NODE_ENV": "test", "OTHER": "x"}, passed=["NODE_ENV", "UNSET"], identity={})
    assert found.variables["NODE_ENV"] == "test"
    assert "UNSET" not in found.variables
    assert found.left_out == ("OTHER",)


@pytest.mark.parametrize("name", ["ELSEWHERE_SANDBOX_ID", "ELSEWHERE_HOME", "ELSEWHERE_ANYTHING", "COMPOSE_PROJECT_NAME"])
@pytest.mark.parametrize("way", ["value", "name", "settings"])
def test_reserved_names_are_refused_on_every_way_in(name: str, way: str) -> None:
    asked = {"value": [(name, "x")], "name": [(name, None)], "settings": []}[way]
    with pytest.raises(UsageError, match=name) as caught:
        compose({name: "x"}, asked=asked, passed=[name] if way == "settings" else [], identity=IDENTITY)
    assert caught.value.code == "env_reserved"


@pytest.mark.parametrize("name", ["ELSEWHERE", "MY_ELSEWHERE_HOME", "COMPOSE_FILE", "COMPOSE_PROJECT_NAMES"])
def test_names_that_only_resemble_reserved_ones_are_free(name: str) -> None:
    assert compose({}, asked=[(name, "x")], identity=IDENTITY).variables[name] == "x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NAME", ("NAME", None)),
        ("NAME=", ("NAME", "")),
        ("NAME=value", ("NAME", "value")),
        ("NAME=a=b", ("NAME", "a=b")),
        ("_x1=y", ("_x1", "y")),
        ("lower=y", ("lower", "y")),
    ],
)
def test_an_assignment_is_a_name_and_perhaps_a_value(text: str, expected: tuple[str, str | None]) -> None:
    assert parse_assignment(text) == expected


def test_a_sandbox_asks_no_proxy_for_what_is_itself() -> None:
    found = compose({"no_proxy": "the caller's"}, identity={}, network="allow").variables
    assert found["no_proxy"] == found["NO_PROXY"]
    assert {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"} == {*found["no_proxy"].split(",")}


@pytest.mark.parametrize("text", ["", "=", "=x", "1A=x", "A B=x", "A-B", "A.B=1", "Ä=1", "A\n=1", " A=1", "A =1", "A²=1"])
def test_what_names_no_variable_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_assignment(text)
    assert caught.value.code == "bad_env"
    assert repr(text.partition("=")[0]) in caught.value.message


def test_a_value_with_a_nul_byte_is_refused_without_being_repeated() -> None:
    with pytest.raises(UsageError, match="NUL") as caught:
        parse_assignment("NAME=hidden\0value")
    assert "hidden" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1\nB=2\n", [("A", "1"), ("B", "2")]),
        ("A=1", [("A", "1")]),
        ("", []),
        ("\n  \n# comment\n  # another\nA=1\n", [("A", "1")]),
        ("export A=1\nexport   B=2\n", [("A", "1"), ("B", "2")]),
        ("exported=1\n", [("exported", "1")]),
        ("A=\"two words\"\nB='single'\n", [("A", "two words"), ("B", "single")]),
        ('A="mixed\'\nB="\nC=""\n', [("A", "\"mixed'"), ("B", '"'), ("C", "")]),
        ("A=\n", [("A", "")]),
        ("A=b=c\n", [("A", "b=c")]),
        ("A=1 # stays\n", [("A", "1 # stays")]),
        ("A=1\r\nB=2\r\n", [("A", "1"), ("B", "2")]),
        ("A=1\nA=2\n", [("A", "1"), ("A", "2")]),
        ("A=x\x0cy\x1cz\u2028w\x85v\n", [("A", "x\x0cy\x1cz\u2028w\x85v")]),
    ],
)
def test_an_env_file_is_read_line_by_line(place: Path, text: str, expected: list[tuple[str, str]]) -> None:
    (place / "env").write_bytes(text.encode())
    assert read_env_file(str(place / "env")) == expected


def test_bytes_that_are_no_utf_8_in_an_env_file_reach_the_command_unchanged(place: Path) -> None:
    (place / "env").write_bytes(b"A=\xff\xfe\n")
    ((name, value),) = read_env_file(str(place / "env"))
    assert (name, os.fsencode(value or "")) == ("A", b"\xff\xfe")


@pytest.mark.parametrize("line", ["NAME", "no assignment", "1A=x", "=x", "A-B=x", "A=a\0b"])
def test_a_bad_line_of_an_env_file_is_named_with_file_and_line(place: Path, line: str) -> None:
    (place / "env").write_text(f"# first\nGOOD=1\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read_env_file(str(place / "env"))
    assert caught.value.code == "bad_env_file"
    assert f"{place}/env, line 3" in caught.value.message


def test_an_env_file_that_is_missing_is_an_error_that_names_it(place: Path) -> None:
    with pytest.raises(UsageError, match="No such file") as caught:
        read_env_file(str(place / "missing"))
    assert str(place / "missing") in caught.value.message


def test_a_directory_is_no_env_file(place: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_env_file(str(place))
    assert caught.value.code == "bad_env_file"


@pytest.mark.timeout(5)
def test_a_fifo_is_no_env_file_and_nobody_waits_for_it(place: Path) -> None:
    os.mkfifo(place / "env")
    with pytest.raises(UsageError, match="not a regular file"):
        read_env_file(str(place / "env"))


@pytest.mark.parametrize(
    "name",
    """AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN GITHUB_TOKEN GH_TOKEN NPM_TOKEN OPENAI_API_KEY ANTHROPIC_API_KEY
    PGPASSWORD MYSQL_PWD DB_PASS DB_PASSWD GPG_PASSPHRASE SSH_AUTH_SOCK GOOGLE_APPLICATION_CREDENTIALS STRIPE_SIGNING_KEY
    SSH_PRIVATE_KEY github_token MyApiKey""".split(),
)
def test_names_of_well_known_secrets_look_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", "LANG DEBUG NODE_ENV EDITOR DISPLAY KEYBOARD MONKEY_COUNT COMPASS PWD OLDPWD".split())
def test_everyday_names_do_not_look_secret(name: str) -> None:
    assert not looks_secret(name)
