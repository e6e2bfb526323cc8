"""The public face: a short list of names, and what it costs to reach them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import elsewhere
from elsewhere.cli import hints
from elsewhere.cli.main import GROUPS, main, parser

SOURCE = Path(elsewhere.__file__).parents[1]
EXPENSIVE = ["socket", "json", "argparse", "re", "ctypes", "dataclasses", "subprocess", "enum"]
NOT_FOR_HELP = ["sqlite3", "_sqlite3", "http", "asyncio", "multiprocessing", "urllib.request", "ssl"]


def python(*words: str, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter without site packages, which knows nothing but the standard library and the package."""
    return subprocess.run(
        [sys.executable, "-S", "-s", *words],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "ELSEWHERE_HOME": str(state or "/nonexistent/state")},
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )


def test_the_public_names_are_one_sorted_list_and_all_that_dir_shows() -> None:
    assert elsewhere.__all__ == sorted(elsewhere.__all__)
    assert len(set(elsewhere.__all__)) == len(elsewhere.__all__)
    assert [name for name in dir(elsewhere) if not name.startswith("_")] == elsewhere.__all__


@pytest.mark.parametrize("name", elsewhere.__all__)
def test_each_public_name_is_a_documented_class_or_function_that_can_be_imported(name: str) -> None:
    found = getattr(elsewhere, name)
    assert isinstance(found, type) == name[0].isupper()
    assert callable(found)
    assert found.__doc__
    assert found is getattr(elsewhere, name)


def test_everything_public_comes_with_a_star() -> None:
    names: dict[str, object] = {}
    exec("from elsewhere import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == elsewhere.__all__


def test_a_name_that_is_not_public_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        elsewhere.Nonsense  # noqa: B018


@pytest.mark.parametrize("module", ["elsewhere", "elsewhere.cli.client"])
def test_the_hot_path_imports_next_to_nothing(module: str) -> None:
    plain = python("-c", "import os, sys; print(*sys.modules)")
    done = python("-c", f"import {module}, os, sys; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert module in loaded
    assert sorted(loaded & set(EXPENSIVE)) == []
    assert sorted(name for name in loaded - set(plain.stdout.split()) if not name.startswith("elsewhere")) == []


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_no_database_no_server_and_start_nothing(option: str, place: Path) -> None:
    done = python("-X", "importtime", "-m", "elsewhere", option, state=place / "state")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    loaded = {line.rsplit("|", 1)[1].strip() for line in lines}
    assert "elsewhere.cli.client" in loaded
    assert sorted(loaded & set(NOT_FOR_HELP)) == []
    assert "elsewhere" in done.stdout
    assert list(place.iterdir()) == []


def test_the_verbs_of_each_group_are_those_of_its_module_and_in_that_order() -> None:
    for verbs in GROUPS.values():
        assert list(parser(verbs[0])[1].parsers) == verbs
    assert list(parser()[1].parsers) == [verb for verbs in GROUPS.values() for verb in verbs]


@pytest.mark.parametrize(
    ("verb", "others"),
    [
        ("run", ["elsewhere.promotion.planning", "elsewhere.operations.racing", "elsewhere.experiments.report"]),
        ("list", ["elsewhere.promotion.planning", "elsewhere.operations.racing", "elsewhere.experiments.report"]),
        ("config", ["elsewhere.sandbox.live", "elsewhere.operations.promoting", "elsewhere.operations.racing"]),
        ("promote", ["elsewhere.operations.racing", "elsewhere.experiments.report"]),
    ],
)
def test_a_verb_loads_nothing_of_other_groups(verb: str, others: list[str]) -> None:
    done = python("-c", f"import sys; from elsewhere.cli.main import parser; parser({verb!r}); print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert f"elsewhere.cli.{next(group for group, verbs in GROUPS.items() if verb in verbs)}" in loaded
    assert [name for name in others if name in loaded] == []


def test_the_version_of_the_command_is_the_version_of_the_package() -> None:
    assert python("-m", "elsewhere", "--version").stdout == f"elsewhere {elsewhere.__version__}\n"


@pytest.mark.parametrize("words", [["run", "--", "true"], ["list"], ["doctor"], ["--help"], ["--json"], []], ids=repr)
@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_on_another_platform_the_command_says_so_in_one_sentence(platform: str, words: list[str], place: Path) -> None:
    code = (
        "import sys\n"
        "from elsewhere.cli.client import main\n"
        f"sys.platform, sys.argv = {platform!r}, {['elsewhere', *words]!r}\n"
        "raise SystemExit(main())\n"
    )
    done = python("-c", code, state=place / "state")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    assert "Linux" in done.stderr
    assert platform in done.stderr
    assert list(place.iterdir()) == []


def test_an_option_before_its_verb_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "inspect", "box"], None) == 2
    assert "elsewhere inspect --json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("delete fix", "'rm'"),
        ("status", "'list' or 'inspect'"),
        ("lisst", "'list'"),
        ("rm -f fix", "--force"),
        ("promote fix -n", "--dry-run"),
        ("run -e A=1 -- true", "--env or --env-file"),
        ("run --tiemout 3 -- true", "--timeout"),
    ],
)
def test_whoever_writes_another_word_is_told_ours(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split(), None) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_other_words_stand_for_verbs_that_there_are() -> None:
    known = {verb for verbs in GROUPS.values() for verb in verbs}
    assert {verb for words in hints._OTHER_WORDS.values() for verb in words.split()} <= known
    assert known.isdisjoint({"help", *hints._OTHER_WORDS})


@pytest.mark.parametrize(
    ("words", "same"),
    [("help", "--help"), ("help help", "--help"), ("help run", "run --help"), ("help run rm -rf .", "run --help")],
)
def test_help_may_be_written_as_a_verb(words: str, same: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for line in (words, same):
        with pytest.raises(SystemExit, match="0"):
            main(line.split(), None)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


@pytest.mark.parametrize(
    "words",
    [
        "logs fix --stream stdout r-12",
        "snapshot fix --json name",
        "extend fix --json 2h",
        "promotions show --json p12",
        "requests --json fix",
    ],
)
def test_a_word_that_need_not_be_there_may_stand_behind_an_option(words: str) -> None:
    verb, *rest = words.split()
    top, _ = parser(verb)
    options = rest[rest.index(next(word for word in rest if word.startswith("--"))) : -1]
    late, unknown = top.parse_known_args([verb, *rest])
    assert unknown == []
    assert late == top.parse_known_args([verb, *options, *(word for word in rest if word not in options)])[0]
    assert top.parse_known_args([verb, *rest, "more"])[1] == ["more"]
