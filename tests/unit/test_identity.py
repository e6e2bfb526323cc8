"""Identity: the same request has the same names everywhere, different requests never share one."""

import hashlib
import json
import re

import pytest

from elsewhere.sandbox import identity
from elsewhere.sandbox.identity import derive, env_file

LONG = "ten chars " * 10
ODD = ["", " ", "---", "///", "..", "日本語", "\udcff\udcfe", "\n", "_", "!?"]
NAMES = ["app", "My App", "-x-", "a" * 300, "x/../y", "ß", "İstanbul", "\udcff", "tab\tname", "UPPER_case.1", *ODD]


def digest(workflow: str, story: str, request: str) -> str:
    return hashlib.sha1(f"{workflow}:{story}:{request}".encode()).hexdigest()[:8]


def parse_back(data: bytes) -> dict[str, str]:
    lines = data.decode("ascii").split("\n")
    assert lines.pop() == ""
    pairs = (line.split("=", 1) for line in lines)
    return {key: json.loads(value) if value.startswith('"') else value for key, value in pairs}


def test_the_same_request_always_has_the_same_identity() -> None:
    assert derive("app", "fix", "r1", "abc") == derive("app", "fix", "r1", "abc")


def test_the_names_are_the_documented_ones() -> None:
    found = derive("My App", "Fix it", "r1", "c0ffee")
    tail = digest("My App", "Fix it", "r1")
    assert found.sandbox_id == f"ew-my-app-fix-it-{tail}"
    assert found.compose_project_name == f"ew_my_app_{tail}"
    assert found.slug == "my-app-fix-it"
    assert (found.workflow, found.story, found.request, found.base_sha) == ("My App", "Fix it", "r1", "c0ffee")


@pytest.mark.parametrize("changed", [("b", "s", "r"), ("w", "b", "r"), ("w", "s", "b")])
def test_each_part_of_a_request_changes_both_names(changed: tuple[str, str, str]) -> None:
    first, second = derive("w", "s", "r"), derive(*changed)
    assert first.sandbox_id != second.sandbox_id
    assert first.compose_project_name != second.compose_project_name


def test_without_a_request_each_identity_is_new() -> None:
    assert len({derive("app", "fix").sandbox_id for _ in range(50)}) == 50


@pytest.mark.parametrize("workflow", NAMES, ids=lambda name: ascii(name[:12]))
@pytest.mark.parametrize("story", ["fix", "", "s" * 300], ids=["short", "empty", "long"])
def test_names_have_safe_characters_and_lengths_whatever_the_request_is_called(workflow: str, story: str) -> None:
    found = derive(workflow, story, "r")
    assert re.fullmatch(r"ew(-[a-z0-9]+)+-[0-9a-f]{8}", found.sandbox_id)
    assert re.fullmatch(r"ew(_[a-z0-9]+)+_[0-9a-f]{8}", found.compose_project_name)
    assert len(found.sandbox_id) <= 48
    assert len(found.compose_project_name) <= 40


@pytest.mark.parametrize("length", range(1, 60))
def test_what_is_too_long_is_cut_before_the_hash_never_in_it(length: int) -> None:
    for workflow in ("w" * length, "w-" * length):
        found = derive(workflow, "story", "r")
        tail = digest(workflow, "story", "r")
        assert re.search(rf"[a-z0-9]-{tail}$", found.sandbox_id)
        assert re.search(rf"[a-z0-9]_{tail}$", found.compose_project_name)


def test_the_longest_names_use_all_the_room() -> None:
    found = derive("w" * 100, "s" * 100, "r")
    assert (len(found.sandbox_id), len(found.compose_project_name)) == (48, 40)


def test_a_thousand_requests_that_share_a_hundred_characters_are_all_distinct() -> None:
    assert len(LONG) == 100
    found = [derive("app", "fix", f"{LONG}{number}") for number in range(1000)]
    assert len({each.sandbox_id for each in found}) == 1000
    assert len({each.compose_project_name for each in found}) == 1000


def test_a_thousand_workflows_that_share_a_hundred_characters_are_all_distinct() -> None:
    found = [derive(f"{LONG}{number}", "fix", "r") for number in range(1000)]
    assert len({each.sandbox_id for each in found}) == 1000
    assert len({each.compose_project_name for each in found}) == 1000


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_a_name_with_nothing_usable_in_it_becomes_sandbox(name: str) -> None:
    found = derive(name, name, "r")
    assert found.slug == "sandbox-sandbox"
    assert found.sandbox_id.startswith("ew-sandbox-sandbox-")
    assert found.compose_project_name.startswith("ew_sandbox_")


def test_every_variable_of_an_identity_is_reserved() -> None:
    variables = derive("app", "fix", "r", "abc").variables()
    assert variables["ELSEWHERE_SANDBOX_ID"] == derive("app", "fix", "r").sandbox_id
    assert variables["COMPOSE_PROJECT_NAME"] == derive("app", "fix", "r").compose_project_name
    assert all(name.startswith(identity.RESERVED) for name in variables)


def test_an_env_file_is_sorted_lines() -> None:
    assert env_file({"B": "2", "A": "1", "A_B": "3"}) == b"A=1\nA_B=3\nB=2\n"


def test_an_env_file_of_nothing_is_empty() -> None:
    assert env_file({}) == b""


VALUES = {
    "EMPTY": "",
    "PLAIN": "a-b_c./:@%+,=1",
    "SPACES": " two words ",
    "QUOTES": "\"double\" 'single'",
    "QUOTED": '"',
    "DOLLAR": "$HOME `id` \\",
    "HASH": "# no comment",
    "UNICODE": "grüße 日本 \u2028\x85\x0b\x0c\x1c",
    "BYTES": "\udcff",
    "NUL": "a\0b",
}


@pytest.mark.parametrize("name", VALUES)
def test_an_env_file_parses_back_to_what_went_in(name: str) -> None:
    assert parse_back(env_file({name: VALUES[name], "NEXT": "1"})) == {name: VALUES[name], "NEXT": "1"}


@pytest.mark.parametrize("value", ["a\nEVIL=1", "a\r\nEVIL=1", "\nEVIL=1\n", "a\rEVIL=1", "a\n\nEVIL=1"])
def test_no_value_can_add_a_line_to_an_env_file(value: str) -> None:
    data = env_file({"NAME": value})
    assert data.count(b"\n") == 1
    assert b"\r" not in data
    assert parse_back(data) == {"NAME": value.replace("\r", "").replace("\n", "")}


def test_the_env_file_of_an_identity_parses_back_to_its_variables() -> None:
    variables = derive("My App", "a story", "r 1", "abc").variables()
    assert parse_back(env_file(variables)) == variables
