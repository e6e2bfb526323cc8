"""The scenarios of `examples/`: each one proves what it says by itself, and here is seen that it says so, and leaves nothing."""

import os
import re
import shutil
from pathlib import Path

import pytest

from conftest import SOURCE, Person

EXAMPLES = SOURCE.parent / "examples"
# What a scenario says when it has proven what it claims. Times and sizes are not told here.
SCENARIOS = {
    "fix_before_commit.py": [
        "   truncate   FAILED (failures=1)",
        "   round      OK",
        "the one that is green was committed: prices.py",
    ],
    "untrusted_script.py": [
        "the secret beside the project    outside: hunter2      inside: FileNotFoundError",
        "the token in a variable          outside: t0ken        inside: nothing",
        "the server on this machine       outside: thank you    inside: URLError",
        "the project                      outside: all is well  inside: all is well",
    ],
    "destructive_test.sh": ["   files left in the sandbox: 0", "nonsense", "reality is byte for byte what it was: 3 files"],
    "dependency_upgrade.py": [
        "   ✓ patch    verified",
        "   ✗ revert   the check './audit.sh' failed: ended with 1",
        "patch won: of 3 attempts, it is the only one that verified",
        "the patch was promoted, and taken back",
    ],
    "configuration_change.py": [
        "the real service says: good morning",
        "with the first change: ValueError: invalid literal for int() with base 10: 'none'",
        "promoted and restarted, the real service says: good evening",
    ],
    "cost_of_failure.py": ["reality is byte for byte what it was: 200 files, and their repository"],
}


def settle(person: Person) -> Path:
    """The examples where everybody can read them, and the command as an installation puts it into PATH."""
    shutil.copytree(EXAMPLES, person.place / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (person.home / ".cache").mkdir()
    (person.place / "bin").mkdir()
    script = person.place / "bin" / "elsewhere"
    script.write_text((SOURCE.parent / "scripts" / "elsewhere").read_text().replace("#!python", f"#!{person.python}"))
    script.chmod(0o755)
    person.own(person.home)
    person.extra |= {"PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    return person.place / "examples"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_holds_and_leaves_nothing(person: Person, scenario: str) -> None:
    examples = settle(person)
    done = person.shell("sh" if scenario.endswith(".sh") else person.python, examples / scenario, cwd=examples)
    said = done.stdout.splitlines()
    missing = [line for line in SCENARIOS[scenario] if line not in said]
    assert not missing, done.stdout + done.stderr
    assert len(said) <= 8
    assert [place.name for place in person.home.iterdir()] == [".cache"]
    assert list((person.home / ".cache").iterdir()) == []
    if scenario.endswith(".py"):
        assert list(person.state.iterdir()) == [], "it uses a state directory of its own"
    else:
        assert person.json("list", cwd=person.home)["sandboxes"] == []


def test_a_scenario_that_does_not_hold_fails(person: Person) -> None:
    examples = settle(person)
    path = examples / "fix_before_commit.py"
    path.write_text(path.read_text().replace("round(net * 1.19, 2)", "net"))
    assert person.shell(person.python, path, cwd=examples, check=False).returncode != 0
    assert list((person.home / ".cache").iterdir()) == []


def test_every_example_has_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    others = {
        name for path in EXAMPLES.glob("*.py") for name in re.findall(r"^from (\w+) import", path.read_text(), re.MULTILINE)
    }
    for example in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh")):
        assert f'"{example.name}"' in tests or example.stem in others, example.name
