"""Everyday forms of checks, and the files of each that an approach must not win with; and what stays its own."""

from collections.abc import Iterable

import pytest

from elsewhere.experiments.guarding import Guard

P = "/srv/p"


class Base:
    """Empty files but for those that are told; links have a target."""

    def __init__(self, files: Iterable[str], told: dict[str, str], links: dict[str, str]) -> None:
        self._files = {**dict.fromkeys(files, ""), **told}
        self._links = links

    def read(self, path: str) -> bytes | None:
        return b"" if path in self._links else self._files[path].encode() if path in self._files else None

    def leads_to(self, path: str) -> str | None:
        return self._links.get(path)

    def is_directory(self, path: str) -> bool:
        return any(name.startswith(f"{path}/") for name in self._files)

    def names(self, path: str) -> set[str]:
        place = f"{path}/" if path else ""
        return {name.removeprefix(place).partition("/")[0] for name in self._files if name.startswith(place)}


FILES = (
    *("app.py", "app.c", "app.sh", "app.js", "check.sh", "check.py", "check.awk", "pats", "tools/cases.sh", "tools/mycheck"),
    *("cases/a.sh", "cases/b.sh", "expected/a.txt", "t/a/b.sh", "chk/main.go", "setup.js", "qa.js", "suite/index.js"),
    *("qa/__main__.py", "qa/parts.py", "qa/test_a.py", "checks/test_a.py", "checks/help.py", "checks/more/x.py"),
    *("src/app.py", "src/unit/test_app.py", "src/deep/check_b.py", "installed/__init__.py"),
)


def guard(command: str, told: dict[str, str] | None = None, links: dict[str, str] | None = None) -> Guard:
    base = Base(FILES, told or {}, links or {})
    return Guard([command], (), P, base, ["pytest", "installed"])


CHEATS = {
    "for t in cases/*.sh; do sh $t; done": ("cases/a.sh", "cases/new.sh"),
    'result="$(sh tools/cases.sh)"; [ "$result" = ok ]': ("tools/cases.sh",),
    "result=`sh tools/cases.sh`": ("tools/cases.sh",),
    '[ "$(sh check.sh && echo y)" = y ]': ("check.sh",),
    'test "$(cd tools && sh cases.sh)" = ok': ("tools/cases.sh",),
    'eval "sh check.sh"': ("check.sh",),
    "T=check.sh; sh $T": ("check.sh",),
    'D=tools; sh "$D/cases.sh"': ("tools/cases.sh",),
    "bash -euo pipefail -c 'sh check.sh | cat'": ("check.sh",),
    "sh < check.sh": ("check.sh",),
    "python3 < check.py": ("check.py",),
    "python3 - < check.py": ("check.py",),
    "cat check.sh | sh": ("check.sh",),
    "cat check.py | python3": ("check.py",),
    "sed s/a/b/ check.sh | bash -s": ("check.sh",),
    "find . -name check.sh -exec sh {} +": ("check.sh", "x/check.sh"),
    "find t -name '*.sh' -exec sh {} \\;": ("t/a/b.sh",),
    "find t -name '*.sh' | xargs -n1 sh": ("t/a/b.sh", "t/c.sh"),
    "find t -name '*.sh' | sort | xargs -I {} sh {}": ("t/a/b.sh",),
    "ls cases/*.sh | xargs -n1 sh": ("cases/a.sh",),
    'python3 -c \'import subprocess as s; s.run(["sh","check.sh"], check=True)\'': ("check.sh",),
    "./app.py < in | diff - expected/$n.txt": ("expected/a.txt",),
    "for t in expected/*.in; do ./app.py < $t | diff - ${t%.in}.txt; done": ("expected/a.txt", "expected/a.in"),
    'for t in expected/*.in; do ./app.py < "$t" | cmp - "${t%.in}.txt" || exit 1; done': ("expected/a.txt",),
    "./app.py < expected/a.txt | diff - expected/b.txt": ("expected/a.txt",),
    "diff <(./app.py) expected/a.txt": ("expected/a.txt",),
    "awk -f check.awk out": ("check.awk",),
    "grep -vf pats out": ("pats",),
    "sed -n -f check.awk out": ("check.awk",),
    "go run chk/main.go": ("chk/main.go",),
    "node -r ./setup.js qa.js": ("setup.js", "qa.js"),
    "node --import ./setup.js qa.js": ("setup.js", "qa.js"),
    "node --require=./setup qa": ("setup.js", "qa.js"),
    "node suite": ("suite/index.js",),
    "cross-env A=1 node qa.js": ("qa.js",),
    "c8 --reporter text node qa.js": ("qa.js",),
    "nyc node qa.js": ("qa.js",),
    "npx ts-node qa.js": ("qa.js",),
    "npx tsx qa.js": ("qa.js",),
    "python3 qa": ("qa/parts.py", "qa/__main__.py", "qa/new.py"),
    "pytest -q checks/": ("checks/help.py", "checks/more/x.py"),
    "python3 -m unittest discover -s qa": ("qa/parts.py",),
    "python3 -m unittest discover -p 'check_*.py'": ("src/deep/check_b.py", "check_new.py"),
    "PATH=$PWD/tools:$PATH mycheck": ("tools/mycheck",),
    "export PATH=$(pwd)/tools:$PATH; mycheck": ("tools/mycheck",),
    "cargo test": ("build.rs", "rust-toolchain.toml"),
    "cargo clippy": ("clippy.toml",),
    "./mvnw test": (".mvn/jvm.config", "mvnw"),
    "./gradlew test": ("buildSrc/x", "gradle/wrapper/a.jar", "gradle.properties"),
    "ninja test": ("build.ninja",),
    "meson test": ("meson.build",),
    "deno test": ("deno.jsonc",),
    "bun test": ("bunfig.toml",),
    "yarn test": (".pnp.cjs", ".yarn/releases/y.cjs"),
    "flake8": (".flake8",),
    "pylint src": (".pylintrc",),
    "pyright": ("pyrightconfig.json",),
    "npx tsc": ("tsconfig.build.json",),
    "npx eslint .": ("eslint.config.mjs", ".eslintrc.json"),
    "golangci-lint run": (".golangci.yml",),
    "true": (
        "test.js",
        "test-app.js",
        "test_app.c",
        "app-test.js",
        "t/a.t",
        ".proverc",
        "TestApp.java",
        "ATestCase.java",
        "AIT.java",
    ),
}


@pytest.mark.parametrize("command", CHEATS)
def test_what_the_command_runs_is_as_in_the_base(command: str) -> None:
    found = guard(command)
    assert [path for path in CHEATS[command] if not found.takes(f"{P}/{path}", added=False)] == []


BELOW = {
    "run.sh": (
        ('for t in cases/*.sh; do\n  sh "$t"\ndone\n', "cases/a.sh"),
        ('result="$(sh tools/cases.sh)"\n', "tools/cases.sh"),
        ("T=check.sh\nif true; then\n  sh $T\nfi\n", "check.sh"),
        ('one() { sh "$1"; }\none check.sh\n', "check.sh"),
        ("for n in a b; do ./app.py | diff - expected/$n.txt; done\n", "expected/a.txt"),
        ("./app.py | diff - expected/$1.txt\n", "expected/a.txt"),
        ("c8 node qa.js\n", "qa.js"),
        ("cross-env A=1 node -r ./setup.js qa\n", "setup.js"),
        ("find t -name '*.sh' | xargs -n1 sh\n", "t/a/b.sh"),
        ("awk -f check.awk out\n", "check.awk"),
        ('. "$(dirname "$0")/tools/cases.sh"\n', "tools/cases.sh"),
        (". $(dirname $0)/tools/cases.sh\n", "tools/cases.sh"),
        ("export PATH=$PWD/tools:$PATH\nmycheck\n", "tools/mycheck"),
        ("while read a b; do\n  ./app.py $a\ndone < pats\n", "pats"),
        ("while read -u 3 a; do ./app.py $a; done 3< expected/a.txt\n", "expected/a.txt"),
        ("cat pats | while read a b; do ./app.py $a; done\n", "pats"),
        ("while read a b; do ./app.py $a; done < <(sort -u pats)\n", "pats"),
        ("for a in $(cat pats); do ./app.py $a; done\n", "pats"),
        ("mapfile -t all < pats\n", "pats"),
        ("exec < pats\nread a\n", "pats"),
    ),
    "Makefile": (
        ("test: ; sh check.sh\n", "check.sh"),
        ("CHECK = sh check.sh\ntest:\n\t$(CHECK)\n", "check.sh"),
        ("T := tools\nCHECK := sh $(T)/cases.sh\ntest:\n\t@$(CHECK)\n", "tools/cases.sh"),
        ("test:\n\tfor t in cases/*.sh; do sh $$t; done\n", "cases/b.sh"),
    ),
}


@pytest.mark.parametrize(("name", "content", "path"), [(name, *one) for name, many in BELOW.items() for one in many])
def test_what_a_file_of_commands_runs_is_as_in_the_base(name: str, content: str, path: str) -> None:
    found = guard("make test" if name == "Makefile" else f"./{name}", {name: content})
    assert found.takes(f"{P}/{path}", added=False)


def test_what_a_check_writes_itself_may_be_another_when_it_has_ended() -> None:
    found = guard("./run.sh | tee log", {"run.sh": "./app.py > out 2>> err\n(./app.py) > all\ndiff out expected/a.txt\n"})
    assert [name for name in ("log", "out", "err", "all") if found.minds(f"{P}/{name}", added=False)] == []
    for path, added in {"run.sh": False, "expected/a.txt": False, "sitecustomize.py": True, "checks/conftest.py": True}.items():
        assert found.minds(f"{P}/{path}", added=added), path
    for path in ("checks/__pycache__/x.pyc", "checks/new.txt"):  # by tests, as they run
        assert not found.minds(f"{P}/{path}", added=True), path
    assert not found.minds(f"{P}/checks/__pycache__/x.pyc", added=False)
    assert found.minds("/usr/local/bin/diff", added=True)
    assert not found.minds("/usr/local/bin/new", added=True)


def test_what_the_files_of_a_pattern_run_is_as_in_the_base() -> None:
    found = guard("for t in cases/*.sh; do sh $t; done", {"cases/c.sh": ". ./tools/cases.sh\n"})
    assert found.takes(f"{P}/tools/cases.sh", added=False)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("grep -q fixed app.py", "app.py"),
        ("wc -c < app.py", "app.py"),
        ("gcc app.c", "app.c"),
        ("shellcheck app.sh && python3 -m pytest", "app.sh"),
        ("find . -name '*.sh' | xargs shellcheck", "app.sh"),
        ("find . -name '*.py' | xargs python3 -m py_compile", "app.py"),
        ("cat app.py | wc -l", "app.py"),
        ("wc -l < app.py | diff - expected/a.txt", "app.py"),
        ("cat app.py | python3 check.py", "app.py"),
        ("for f in src/*.py; do ruff check $f; done; sh check.sh", "src/app.py"),
        ("for f in src/*.py; do python3 check.py $f; done", "src/app.py"),
        ("for m in app; do python3 check.py $m.py; done", "app.py"),
        ("python3 check.py $m.py", "app.py"),
        ("python3 -c 'import app; app.main()'", "app.py"),
        ("while read l; do test ${#l} -lt 80; done < app.py", "app.py"),
        ("cat app.py | while read l; do test ${#l} -lt 80; done", "app.py"),
        ('test "$(cat pats)" = 5', "pats"),
        ("pytest src", "src/app.py"),
        ("pytest .", "src/app.py"),
        ("pytest", "src/app.py"),
        ("sh $1", "app.py"),
        ("for f in *; do sh $f; done", "app.py"),
        ("PATH=$PWD/tools:$PATH mycheck", "app.py"),
        ("node -e 'require(\"./app.js\")'", "app.js"),
        ("pytest -q checks/", "src/app.py"),
        ("pytest", ".flake8"),
        ("pytest -k 'a[9-0]'", "app.py"),
        ("python3 -m unittest discover -p '*.py'", "src/app.py"),
    ],
)
def test_what_is_only_looked_at_is_the_approach_s_own(command: str, path: str) -> None:
    assert not guard(command).takes(f"{P}/{path}", added=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytest.ini", "[pytest]\npython_files = check_*.py *.py\n"),
        ("setup.cfg", "[tool:pytest]\npython_files =\n    check_*.py\n"),
        ("pyproject.toml", '[tool.pytest.ini_options]\npython_files = ["check_*.py"]\n'),
    ],
)
def test_tests_are_called_as_the_base_s_configuration_says(name: str, content: str) -> None:
    found = guard("pytest -q src/deep", {name: content, "src/deep/data.json": ""})
    assert found.takes(f"{P}/src/deep/check_b.py", added=False)
    assert found.takes(f"{P}/src/deep/data.json", added=False)
    assert not found.takes(f"{P}/src/app.py", added=False)
    assert guard("cd part && pytest", {f"part/{name}": content}).takes(f"{P}/part/check_b.py", added=False)


PLUG = {"tools/plug.py": "from lib import go\n", "tools/lib.py": "", "app.py": ""}


@pytest.mark.parametrize(
    ("command", "told", "path"),
    [
        ("pytest", {"pytest.ini": "[pytest]\naddopts = -q -p tools.plug\n"}, "tools/plug.py"),
        ("python3 -m pytest", {"pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-ptools.plug"\n'}, "tools/plug.py"),
        ("pytest -p tools.plug", {}, "tools/plug.py"),
        ("cd part; pytest", {"part/pytest.ini": "[pytest]\naddopts = -p plug\n", "part/plug.py": ""}, "part/plug.py"),
        ("pytest", {"conftest.py": 'import os\npytest_plugins = [\n    "tools.plug",\n]\n'}, "tools/plug.py"),
        ("pytest checks", {"checks/conftest.py": 'pytest_plugins = "tools.plug"\n'}, "tools/plug.py"),
        ("make test", {"Makefile": "test:\n\ttools/run\n", "tools/run": "#!/usr/bin/env python3\nimport plug\n"}, "tools/lib.py"),
        ("node ci/run.js", {"ci/run.js": 'const h = require("./harness");\n', "ci/harness.js": ""}, "ci/harness.js"),
    ],
)
def test_what_loads_beside_the_tests_is_as_in_the_base(command: str, told: dict[str, str], path: str) -> None:
    found = guard(command, {**PLUG, **told})
    assert found.takes(f"{P}/{path}", added=False)
    assert not found.takes(f"{P}/app.py", added=False)


def test_what_a_script_beside_the_code_loads_is_what_it_tests() -> None:
    found = guard("python3 check.py && node qa.js", {"check.py": "import app\n", "qa.js": 'require("./app")\n'})
    assert not found.takes(f"{P}/app.py", added=False)
    assert not found.takes(f"{P}/app.js", added=False)


def test_what_a_link_of_tests_leads_to_is_theirs() -> None:
    found = guard("pytest", links={"tests": "checks"})
    assert found.takes(f"{P}/checks/help.py", added=False)
    assert guard("pytest only", links={"only": "checks"}).takes(f"{P}/checks/help.py", added=False)
    assert not guard("pytest", links={"tests": "."}).takes(f"{P}/app.py", added=False)


def test_a_library_that_is_installed_as_well_can_be_worked_on() -> None:
    found = guard("pytest", {"src/installed/__init__.py": "", "site/index.html": ""})
    for path in ("installed/new.py", "src/installed/new.py", "installed/sub/__init__.py", "site/", "site/a.py", "code/a.py"):
        assert not found.takes(f"{P}/{path}", added=True), path
    for path in ("site/__init__.py", "lib/installed/__init__.py", "lib/installed.py", "code"):
        assert found.takes(f"{P}/{path}", added=True), path
