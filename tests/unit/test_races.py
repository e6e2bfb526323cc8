"""Races as they are written, and what of an approach's changes is put back before it is verified."""

from pathlib import Path

import pytest

from elsewhere.cli import main, racing
from elsewhere.errors import UsageError
from elsewhere.experiments.guarding import Guard
from elsewhere.experiments.model import Approach, Check, Race
from elsewhere.experiments.parsing import approach_of, complete, from_file, from_table, repeated

WHOLE = b"""
name = "upgrade"
setup = "make deps"
verify = ["pytest -q", { name = "types", command = "mypy", junit = "out.xml" }]
scored = "make lint"
score = "./score.sh"
lower = true
first = true
allow_failing = true
verify_files = ["checks/**"]
verify_timeout = "1m"
timeout = "10m"
repeat = 2
base = "pinned"
env = { A = "1" }
limits = { memory = "1G" }
network = "none"
[[approaches]]
name = "one"
command = "true"
[[approaches]]
name = "two"
command = "x=1 true"
env = { B = "2" }
limits = { cpus = 1 }
network = "host"
timeout = "5s"
repeat = 3
"""


def test_everything_that_can_be_written_is_understood_and_can_be_written_down() -> None:
    found = from_file(WHOLE, "race.toml")
    assert found == Race(
        approaches=(
            Approach("one", "true", timeout=600.0, repeat=2),
            Approach("two", "x=1 true", {"B": "2"}, {"limits.cpus": 1.0, "sandbox.network": "host"}, 5.0, 3),
        ),
        checks=(
            Check("pytest -q", "pytest -q"),
            Check("types", "mypy", True, "out.xml"),
            Check("make lint", "make lint", required=False),
        ),
        setup="make deps",
        score="./score.sh",
        lower=True,
        first=True,
        allow_failing=True,
        verify_files=("checks/**",),
        verify_timeout=60.0,
        base="pinned",
        env={"A": "1"},
        settings={"limits.memory": 1 << 30, "sandbox.network": "none"},
        name="upgrade",
    )
    assert Race.unpacked({**found.packed(), "of a later version": 1}) == found


def test_an_approach_of_the_command_line_has_a_name_and_the_rest_is_its_command() -> None:
    assert approach_of("a=X=1 y") == Approach("a", "X=1 y")


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("", "no_approach", "there is no approach"),
        ("aproaches = []", "unknown_setting", "aproaches"),
        ("promote = true", "unknown_setting", "promote"),
        ('[[approaches]]\nname = "a"', "bad_race", "has no command"),
        ('[[approaches]]\nname = "a/b"\ncommand = "x"', "bad_name", "'a/b'"),
        ('[[approaches]]\nname = "a"\ncommand = "x"\nsandbox = 1', "unknown_setting", "approach 1"),
        ('[[approaches]]\nname = "a"\ncommand = "x"\n[[approaches]]\nname = "a"\ncommand = "y"', "same_name", "'a'"),
        ('[[approaches]]\nname = "a"\ncommand = "x"\nlimits = { memory = "lots" }', "bad_race", "lots"),
        ('[[approaches]]\nname = "a"\ncommand = "x"\nlimits = { colour = 1 }', "bad_race", "limits.colour"),
        ('[[approaches]]\nname = "a"\ncommand = "x"\nenv = { A = 1 }', "bad_race", "env"),
        ('[[approaches]]\nname = "a"\ncommand = "x"\nrepeat = 0', "bad_race", "repeat"),
        ('[[approaches]]\nname = "a"\ncommand = "x"\ntimeout = "soon"', "bad_race", "soon"),
        ('lower = true\n[[approaches]]\nname = "a"\ncommand = "x"', "no_score", "less is better of what"),
        ('base = "moon"\n[[approaches]]\nname = "a"\ncommand = "x"', "bad_race", "moon"),
        ('verify = [{ name = "x" }]\n[[approaches]]\nname = "a"\ncommand = "x"', "bad_race", "verify"),
        ('verify = 5\n[[approaches]]\nname = "a"\ncommand = "x"', "bad_race", "verify = 5"),
        ('scored = true\n[[approaches]]\nname = "a"\ncommand = "x"', "bad_race", "scored = True"),
        (
            'verify_files = ["a"]\nverify_from_approach = true\n[[approaches]]\nname = "a"\ncommand = "x"',
            "bad_race",
            "means nothing",
        ),
        ('base = "live"\nbase_ref = "v1"\n[[approaches]]\nname = "a"\ncommand = "x"', "bad_race", "'live' means nothing beside"),
        ("= 1", "bad_race", "race.toml"),
    ],
)
def test_what_is_wrong_is_named_with_where_it_stands(content: str, code: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_file(content.encode(), "race.toml")
    assert caught.value.code == code
    assert said in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("written", "words", "base", "base_ref"),
    [
        ('base = "pinned"', (), "pinned", None),
        ('base = "pinned"', ("--base", "auto"), "auto", None),
        ('base = "pinned"', ("--base-ref", "v2"), "auto", "v2"),
        ('base_ref = "v1"', (), "auto", "v1"),
        ('base_ref = "v1"', ("--base", "live"), "live", None),
        ('base_ref = "v1"', ("--base-ref", "v2"), "auto", "v2"),
    ],
)
def test_where_a_race_starts_is_said_by_the_command_line_or_else_by_its_file(
    tmp_path: Path, written: str, words: tuple[str, ...], base: str, base_ref: str | None
) -> None:
    (tmp_path / "race.toml").write_text(f'{written}\n[[approaches]]\nname = "a"\ncommand = "x"\n')
    arguments = main.parser("race")[0].parse_args(["race", "--file", str(tmp_path / "race.toml"), *words])
    asked = racing._asked(arguments)
    assert (asked.base, asked.base_ref) == (base, base_ref)


def test_repeats_have_bounds() -> None:
    race = complete(Race((approach_of("a=b"),)))
    assert repeated(race, 3).approaches[0].repeat == 3
    for count in (0, -1, 101):
        with pytest.raises(UsageError):
            repeated(race, count)


@pytest.mark.parametrize("pattern", ["", " ", "/", ".", "./", "*", "**", "**/*", "!", "!/", "!./", "!.", "!**", "!*"])
def test_no_pattern_takes_or_frees_the_whole_project(pattern: str) -> None:
    with pytest.raises(UsageError) as caught:
        complete(Race((approach_of("a=b"),), verify_files=("checks", pattern)))
    assert caught.value.code == "bad_pattern"
    assert repr(pattern) in caught.value.message
    complete(Race((approach_of("a=b"),), verify_files=("checks/**", "!app.py", "./a", "*.py")))


def test_a_table_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError):
        from_table({"approaches": ["a=b"]}, "here")


# -- what is put back -----------------------------------------------------------------------------------------------------------

P = "/srv/p"
TREE = {
    "calc.py": "",
    "README.md": "",
    "golden/a/b.txt": "",
    "rules.inc": "",
    "Makefile": "include rules.inc\ntest: calc.py\n\t@./checks/run.sh calc.py\n\tcc -o app app.c\n",
    "app.c": "",
    "verify.sh": "#!/bin/sh\n. ./lib/common.sh\nrun_tests\nwc -l < calc.py\n",
    "lib/common.sh": '. "$(dirname $0)/lib/deep.sh"\nrun_tests() { diff out expected.txt; }\n',
    "lib/deep.sh": "sh lib/deeper.sh\n",
    "lib/deeper.sh": "sh lib/deepest.sh\n",
    "lib/deepest.sh": "",
    "expected.txt": "",
    "checks/run.sh": "python3 checks/all.py\n",
    "checks/all.py": "import calc\n",
    "sub/score.sh": "",
    "package.json": '{"scripts": {"test": "node scripts/run.js"}}',
    "scripts/run.js": "",
    "link.sh": "",
}


class Base:
    def read(self, path: str) -> bytes | None:
        return TREE[path].encode() if path in TREE else None

    def leads_to(self, path: str) -> str | None:
        return "checks/run.sh" if path == "link.sh" else None

    def is_directory(self, path: str) -> bool:
        return any(name.startswith(f"{path}/") for name in TREE)

    def names(self, path: str) -> set[str]:
        inside = f"{path}/" if path else ""
        return {name[len(inside) :].partition("/")[0] for name in TREE if name.startswith(inside)}


def guard(*commands: str, patterns: tuple[str, ...] = ()) -> Guard:
    return Guard(commands, patterns, P, Base(), ["pytest", "iniconfig"])


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("pytest", "tests/test_a.py"),
        ("pytest", "tests"),
        ("pytest", "tests/"),
        ("pytest", "Tests/a.cs"),
        ("pytest", "tests.py"),
        ("pytest", "app/tests.py"),
        ("pytest", "pkg/tests/data.json"),
        ("pytest", "pkg/test_a.py"),
        ("pytest", "conftest.py"),
        ("pytest", "pytest.ini"),
        ("pytest", "pytest.toml"),
        ("pytest", ".pytest.toml"),
        ("pytest", "pkg/__pycache__/a.cpython-311.pyc"),
        ("pytest", "sitecustomize.py"),
        ("pytest", "evil.egg-info/entry_points.txt"),
        ("pytest", ".venv/bin/pytest"),
        ("pytest", "a/site-packages/pytest/main.py"),
        ("python -m pytest", "pytest.py"),
        ("mvn test", "src/test/java/AppTest.java"),
        ("./score.sh", "score.sh"),
        ("cd sub && ./score.sh", "sub/score.sh"),
        ("make -C sub; sub/score.sh", "sub/score.sh"),
        ("cd $HERE && ./score.sh", "sub/score.sh"),
        ("sh -c 'cd sub; ./score.sh'", "sub/score.sh"),
        ("sh -c true; sh checks/all.sh", "checks/all.sh"),
        ("diff got expected.txt", "expected.txt"),
        ("diff -r out golden", "golden/a/b.txt"),
        ("diff -r out golden", "golden/new"),
        ("sh checks/*.sh", "checks/run.sh"),
        ("make test", "rules.inc"),
        ("./verify.sh", "lib/common.sh"),
        ("./verify.sh", "lib"),
        ("./verify.sh", "lib/"),
        ("./verify.sh", "lib/deep.sh"),
        ("./verify.sh", "lib/deeper.sh"),
        ("./verify.sh", "expected.txt"),
        ("sh link.sh", "checks/all.py"),
        ("make test", "GNUmakefile"),
        ("make test", "checks/run.sh"),
        ("make test", "checks/all.py"),
        ("npm test", "scripts/run.js"),
        ("npm test", "node_modules/npm/index.js"),
        ("npx jest", "node_modules/.bin/jest"),
        ("npx jest", "jest.config.js"),
        ("rake", "Rakefile"),
        ("ctest", "CMakeLists.txt"),
        ("task test", "Taskfile.yml"),
        ("nox", "noxfile.py"),
        ("inv test", "tasks.py"),
        ("go test ./...", "a_test.go"),
        ("true", "elsewhere.toml"),
    ],
)
def test_what_could_fake_a_verification_is_as_in_the_base(command: str, path: str) -> None:
    assert guard(command).takes(f"{P}/{path}", added=False)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("pytest", "src/app.py"),
        ("pytest", "latest.py"),
        ("pytest", "contest/a.py"),
        ("pytest", "app/tasks.py"),
        ("grep -q fixed README.md", "README.md"),
        ("wc -l < calc.py", "calc.py"),
        ("ruff check calc.py", "calc.py"),
        ("cc -o app app.c && ./app", "app.c"),
        ("./verify.sh", "calc.py"),
        ("./verify.sh", "lib/deepest.sh"),
        ("make test", "calc.py"),
        ("make test", "app.c"),
        ("pytest", "a/site-packages/django/__init__.py"),
        ("pytest", "Makefile"),
    ],
)
def test_what_an_approach_is_for_is_its_own(command: str, path: str) -> None:
    assert not guard(command).takes(f"{P}/{path}", added=False)


def test_what_lies_outside_of_the_project_is_never_where_it_is_verified() -> None:
    assert not guard("pytest").takes("/usr/bin/pytest", added=False)


def test_a_new_module_must_not_stand_before_the_real_one() -> None:
    found = guard("python -m unittest", "PYTHONPATH=checks python checks/all.py")
    for name in (
        "json.py",
        "unittest",
        "unittest/__init__.py",
        "random.pyc",
        "os.cpython-311-x86_64-linux-gnu.so",
        "iniconfig.py",
        "src/pytest/__init__.py",
        "checks/json.py",
    ):
        assert found.takes(f"{P}/{name}", added=True), name
    assert not found.takes(f"{P}/json.py", added=False), "one that was there before is part of the project"
    for name in ("pkg/types.py", "random.txt", "types.json", "mine.py", "site/", "site/index.html", "types/a.py"):
        assert not found.takes(f"{P}/{name}", added=True), name


@pytest.mark.parametrize(
    ("path", "before", "after", "taken"),
    [
        ("pyproject.toml", b"[project]\nversion = '1'", b"[project]\nversion = '2'", False),
        ("pyproject.toml", b"", b"[tool.pytest.ini_options]\naddopts = '-p cheat'", True),
        ("pyproject.toml", b"", b"[tool", True),
        ("pyproject.toml", b"[tool", b"[tool\n[tool.pytest.ini_options]", True),
        ("setup.cfg", b"[metadata]\nname = a", b"[metadata]\nname = b", False),
        ("setup.cfg", b"", b"[tool:pytest]\naddopts = -p cheat", True),
        ("pyproject.toml", b"[tool.mypy]\nstrict = true", b"[tool.mypy]\nstrict = false", True),
        ("pyproject.toml", b"", b"[tool.ruff]\nexclude = ['*']", True),
        ("setup.cfg", None, b"[mypy]\nignore_errors = True", True),
        ("setup.cfg", b"", b"[mypy-app.*]\nignore_errors = True", True),
        ("setup.cfg", b"", b"[flake8]\nignore = E,F", True),
        ("composer.json", b"{}", b'{"scripts": {"test": "true"}}', True),
        ("composer.json", b"{}", b'{"require": {"a/b": "2"}}', False),
        ("package.json", b'{"scripts": {"test": "jest"}}', b'{"scripts": {"test": "jest"}, "dependencies": {"a": "2"}}', False),
        ("package.json", b'{"scripts": {"test": "jest"}}', b'{"scripts": {"test": "true"}}', True),
        ("Cargo.toml", b"[dependencies]\na = '1'", b"[dependencies]\na = '2'", False),
        ("Cargo.toml", b"", b"[lib]\ntest = false", True),
        ("Cargo.toml", b"[package]\nname = 'a'", b"[package]\nname = 'a'\nautotests = false", True),
    ],
)
def test_of_some_files_it_depends_on_what_they_say(path: str, before: bytes | None, after: bytes, taken: bool) -> None:
    found = guard("pytest")
    assert not found.takes(f"{P}/{path}", added=before is None)
    assert found.reads(f"{P}/{path}")
    assert found.takes_content(f"{P}/{path}", before, after) is taken


def test_patterns_that_are_named_come_to_the_usual_ones_or_free_something() -> None:
    found = guard("make", "sh verify.sh", patterns=("golden", "!lib/common.sh", "!tests/data"))
    assert found.takes(f"{P}/golden/a", added=False)
    assert found.takes(f"{P}/tests/test_a.py", added=False)
    assert not found.takes(f"{P}/lib/common.sh", added=False)
    assert not found.takes(f"{P}/tests/data/a.json", added=False)
