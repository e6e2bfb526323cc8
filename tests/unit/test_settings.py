"""Settings: what the file may say, and that whatever is wrong with it is told with its name."""

import os
from pathlib import Path

import pytest

from elsewhere import settings
from elsewhere.errors import UsageError
from elsewhere.settings import Settings


def load(place: Path, text: str | bytes) -> Settings:
    file = place / "elsewhere.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return settings.load(str(file))


def refusal(place: Path, text: str | bytes) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(place, text)
    assert str(place / "elsewhere.toml") in caught.value.message
    assert caught.value.hint
    return caught.value


def test_without_a_file_the_defaults_hold(place: Path) -> None:
    assert settings.load(str(place / "missing.toml")) == Settings() == Settings(env_pass=())


@pytest.mark.parametrize("text", ["", "# nothing\n", "[env]\n", "[env]\npass = []\n"])
def test_a_file_that_says_nothing_leaves_the_defaults(place: Path, text: str) -> None:
    assert load(place, text) == Settings()


def test_env_pass_is_a_list_of_names(place: Path) -> None:
    assert load(place, '[env]\npass = ["NODE_ENV", "DEBUG"]\n').env_pass == ("NODE_ENV", "DEBUG")


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("[evn]\n", "'evn'", "'env'"),
        ("evn = 1\n", "'evn'", "'env'"),
        ("[env]\npas = []\n", "'env.pas'", "'env.pass'"),
        ("[zzz]\n", "'zzz'", "known here: base, env"),
        ("[env]\nzzz = 1\n", "'env.zzz'", "known here: env.pass"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_right_one(place: Path, text: str, said: str, hint: str) -> None:
    error = refusal(place, text)
    assert error.code == "unknown_setting"
    assert said in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    "value", ['"NAME"', "1", "true", "[1]", '["A", 1]', '[["A"]]', "{ A = 1 }", "2024-01-01", "1.5", "[true]"]
)
def test_a_value_of_the_wrong_type_is_refused_with_its_key(place: Path, value: str) -> None:
    error = refusal(place, f"[env]\npass = {value}\n")
    assert error.code == "bad_settings"
    assert "env.pass" in error.message


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
        "a = " + "[" * 100_000,
        "a = " + "1" * 10_000,
        "a = 2024-99-99\n",
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_a_broken_file_is_refused_by_name(place: Path, text: str | bytes) -> None:
    assert refusal(place, text).code in ("bad_settings", "unknown_setting")


def test_a_directory_in_place_of_the_file_is_refused_by_name(place: Path) -> None:
    (place / "elsewhere.toml").mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        settings.load(str(place / "elsewhere.toml"))


def test_an_unreadable_file_is_refused_by_name(place: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    (place / "elsewhere.toml").touch(mode=0)
    with pytest.raises(UsageError, match="Permission denied"):
        settings.load(str(place / "elsewhere.toml"))


@pytest.mark.timeout(5)
def test_a_fifo_that_a_stranger_put_in_place_of_the_file_is_not_waited_for(place: Path) -> None:
    os.mkfifo(place / "elsewhere.toml")
    with pytest.raises(UsageError, match=r"elsewhere\.toml"):
        settings.load(str(place / "elsewhere.toml"))


def test_the_users_own_file_lies_where_configuration_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert settings.user_file("/home/me") == "/home/me/.config/elsewhere/elsewhere.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/my/config")
    assert settings.user_file("/home/me") == "/my/config/elsewhere/elsewhere.toml"
