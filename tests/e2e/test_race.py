"""`race` and `experiments` from the front door: several approaches at once, of which the best wins, no cheat does, and whatever
becomes of one is nothing to the others or to reality."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, eventually, tree

pytestmark = [pytest.mark.one_launcher, pytest.mark.timeout(240)]

GOOD = "sed -i 's/a - b/a + b/' calc.py"
LONG = "printf 'def add(a, b):\\n    # the sum\\n    return a + b\\n' > calc.py"
VERIFY = "python3 -m unittest -q tests.test_calc"


class Track:
    """A person's project with a mistake in it, a test that shows it, and a score."""

    def __init__(self, person: Person) -> None:
        self.person, self.project = person, person.project
        files = {
            "calc.py": "def add(a, b):\n    return a - b\n",
            "tests/__init__.py": "",
            "tests/test_calc.py": (
                "import unittest\nfrom calc import add\n\n\n"
                "class TestAdd(unittest.TestCase):\n"
                "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n\n"
                "    def test_zero(self):\n        self.assertEqual(add(0, 0), 0)\n"
            ),
            "score.sh": "#!/bin/sh\necho the size of it\nwc -c < calc.py\n",
            "Makefile": "check:\n\tpython3 -m unittest -q tests.test_calc\n",
        }
        for name, content in files.items():
            path = self.project / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        (self.project / "score.sh").chmod(0o755)
        person.own(self.project)
        for line in ("add -A", "commit -qm race"):
            person.shell("git", *line.split(), cwd=self.project)

    def race(self, *words: str, code: int = 0, **more: Any) -> dict[str, Any]:
        """The document, of which there is one."""
        done = self.person.elsewhere("race", "--json", *words, **more)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}\n{done.stderr}"
        assert done.stdout.count("\n") == 1, done.stdout
        return dict(json.loads(done.stdout))

    def raced(self, *words: str, code: int = 0, **more: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The experiment, and what became of each approach."""
        found = self.race(*words, code=code, **more)["experiment"]
        return found, {one["name"]: one for one in found["approaches"]}

    def text(self, path: str) -> str:
        return (self.project / path).read_text()


@pytest.fixture
def track(person: Person) -> Track:
    return Track(person)


# -- who wins -------------------------------------------------------------------------------------------------------------------


def test_attempts_that_have_ended_are_one_line_of_the_list(track: Track) -> None:
    experiment, each = track.raced("-a", f"good={GOOD}", "-a", "bad=false", "--verify", VERIFY)
    track.person.elsewhere("create", "--name", "mine", "--label", "approach=mine", check=True)
    track.person.elsewhere("stop", "mine", check=True)
    listed = track.person.elsewhere("list", check=True).stdout
    assert "mine" in listed
    assert f"2 attempts of {experiment['id']}: elsewhere experiments show {experiment['id']}" in listed
    assert not any(one["sandbox"] in listed for one in each.values())
    labelled = track.person.elsewhere("list", "--label", f"experiment={experiment['id']}", check=True).stdout
    assert all(one["sandbox"] in labelled for one in each.values())
    known = {one["id"] for one in track.person.json("list")["sandboxes"]}
    assert {one["sandbox"] for one in each.values()} <= known


def test_the_best_of_those_that_verify_wins_and_reality_stays_as_it_is(track: Track) -> None:
    before = tree(track.project)
    words = ("-a", f"long={LONG}", "-a", f"good={GOOD}", "-a", "broken=false", "-a", "idle=true")
    found, each = track.raced(*words, "--verify", VERIFY, "--score", "./score.sh", "--lower")
    assert tree(track.project) == before
    assert (found["state"], found["winner"], found["promotion"]) == ("finished", "good", None)
    assert "good won: its score 32 is lower than" in found["reason"]
    assert [(one["name"], one["verified"]) for one in found["approaches"]][:2] == [("good", True), ("long", True)]
    assert each["good"]["score"] == 32
    assert each["good"]["checks"][0]["tests"] == {"passed": 2, "failed": 0, "skipped": 0}
    assert each["good"]["changes"] == {"files": 1, "added": 1, "removed": 1, "paths": [{"path": "calc.py", "kind": "modified"}]}
    assert (each["broken"]["exit_code"], each["broken"]["checks"]) == (1, [])
    assert each["broken"]["why"] == "its command ended with 1"
    assert each["idle"]["checks"][0]["tests"] == {"passed": 1, "failed": 1, "skipped": 0}
    place = track.person.state / "experiments" / found["id"]
    assert "+    return a + b" in (place / "good-1" / "changes.patch").read_text()
    again = track.person.json("experiments", "show", found["id"])["experiment"]
    assert again == found


def test_the_winner_is_promoted_and_can_be_taken_back(track: Track) -> None:
    said = track.race("-a", f"good={GOOD}", "-a", "other=true", "--verify", VERIFY, "--promote")
    assert said["experiment"]["promotion"] == said["promotion"]["id"]
    assert "a + b" in track.text("calc.py")
    track.person.elsewhere("undo", check=True)
    assert "a - b" in track.text("calc.py")


def test_a_loser_can_be_promoted_later(track: Track) -> None:
    found, _ = track.raced("-a", f"good={GOOD}", "-a", f"long={LONG}", "--verify", VERIFY)
    assert found["winner"] == "good"
    said = track.person.json("experiments", "promote", found["id"], "long")["promotion"]
    assert said["applied"] == ["calc.py"]
    assert "# the sum" in track.text("calc.py")
    assert track.person.json("experiments", "show", found["id"])["experiment"]["promotion"] == said["id"]


def test_what_is_counted_agrees_with_the_registry_and_with_git(track: Track) -> None:
    person = track.person
    words = ("-a", f"good={GOOD}; git commit -qam good", "-a", f"long={LONG}", "-a", "broken=exit 3", "-a", "idle=true")
    found, _ = track.raced(*words, "-n", "2", "--verify", VERIFY, "--promote")
    assert found["counts"] == {"attempts": 8, "started": 8, "verified": 4, "failed": 4, "cancelled": 0, "promoted": 1}
    # The registry: a sandbox for each that was started, and one command in each that ended as it says.
    here = [one for one in person.json("list")["sandboxes"] if one["labels"].get("experiment") == found["id"]]
    assert {one["id"] for one in here} == {one["sandbox"] for one in found["approaches"]}
    assert len(here) == found["counts"]["started"]
    requests = [one for one in person.json("requests")["requests"] if one["sandbox"] in {box["id"] for box in here}]
    ended = {one["sandbox"]: one["exit_code"] for one in requests}
    assert len(requests) == len(ended) == found["counts"]["started"]
    assert ended == {one["sandbox"]: one["exit_code"] for one in found["approaches"]}
    # Promotions, and git: what arrived is what the winner changed, and nothing else did.
    promotions = _promotions(track)
    assert [one["id"] for one in promotions] == found["promotions"] == [found["promotion"]]
    assert promotions[0]["sandbox"] == found["approaches"][0]["sandbox"]
    changed = person.shell("git", "diff", "--numstat", cwd=track.project).stdout.split()
    won = found["approaches"][0]["changes"]
    assert changed == [str(won["added"]), str(won["removed"]), "calc.py"]
    assert [one["path"] for one in won["paths"]] == ["calc.py"]
    assert person.shell("git", "for-each-ref", "--format=%(refname)", cwd=track.project).stdout == "refs/heads/main\n"
    # Another one later, and all of it undone: promoted is what was done, not what is left of it.
    person.elsewhere("undo", check=True)
    person.json("experiments", "promote", found["id"], "long")
    again = person.json("experiments", "show", found["id"])["experiment"]
    assert again["counts"] == {**found["counts"], "promoted": 2}
    listed = person.json("experiments", "list")["experiments"]
    assert [one["counts"] for one in listed if one["id"] == found["id"]] == [again["counts"]]
    assert sorted(one["id"] for one in _promotions(track)) == sorted(again["promotions"])


def _promotions(track: Track) -> list[dict[str, Any]]:
    """Of this project; undoing one is none."""
    every = track.person.json("promotions")["promotions"]
    return [one for one in every if one["project"] == str(track.project) and one["kind"] == "promote"]


def test_who_was_not_begun_or_was_ended_is_no_failure(track: Track) -> None:
    words = [word for number in range(9) for word in ("-a", f"slow{number}=sleep 1000")]
    extra = {"ELSEWHERE_EXPERIMENTS_AT_ONCE": "2"}
    found, _ = track.raced(
        "-a", f"good={GOOD}", *words, "--verify", VERIFY, "--first", env={**track.person.environment(), **extra}
    )
    counts = found["counts"]
    assert (counts["attempts"], counts["verified"], counts["failed"], counts["promoted"]) == (10, 1, 0, 0)
    assert counts["started"] == 1 + counts["cancelled"] < 10


def test_if_none_verifies_nothing_is_promoted_and_each_says_what_it_died_of(track: Track) -> None:
    before = tree(track.project)
    words = ("-a", "broken=exit 3", "-a", "sleepy=sleep 1000", "-a", "wrong=echo > calc.py", "--timeout", "1s")
    found, each = track.raced(*words, "--verify", VERIFY, "--promote", code=5)
    assert (found["winner"], found["promotion"]) == (None, None)
    assert tree(track.project) == before
    assert each["broken"]["why"] == "its command ended with 3"
    assert (each["sleepy"]["reason"], each["sleepy"]["why"]) == ("timeout", "it took longer than 1.0 s")
    assert "the check" in each["wrong"]["why"]
    assert all(one["why"] in found["reason"] for one in each.values())


def test_reality_that_changed_the_same_meanwhile_is_a_conflict(track: Track) -> None:
    edit = track.project / "calc.py"
    words = ["-a", f"good={GOOD}; touch ran; sleep 3", "--promote"]
    with subprocess.Popen(
        track.person.command("race", "--json", *words),
        cwd=track.project,
        env=track.person.environment(),
        stdout=subprocess.PIPE,
        text=True,
        **track.person.identity(),
    ) as process:
        assert eventually(lambda: _attempts(track.person, "running"))
        edit.write_text("def add(a, b):\n    return 7\n")
        out, _ = process.communicate(timeout=60)
    said = json.loads(out)
    assert process.returncode == 3
    assert said["experiment"]["winner"] == "good"
    assert [one["path"] for one in said["error"]["detail"]["conflicts"]] == ["calc.py"]
    assert edit.read_text() == "def add(a, b):\n    return 7\n"
    # It is written down, and tried again by whoever goes on.
    found = track.person.json("experiments", "show", "@last")["experiment"]
    assert found["refused"] == f"good: {said['error']['message']}"
    again = track.person.elsewhere("experiments", "--json", "resume", "@last")
    assert (again.returncode, json.loads(again.stdout)["error"]["code"]) == (3, "promotion_conflict")
    edit.write_text("def add(a, b):\n    return a - b\n")
    found = track.person.json("experiments", "resume", "@last")["experiment"]
    assert (found["refused"], found["promotion"] is None, "a + b" in edit.read_text()) == (None, False, True)


def test_the_first_that_verifies_ends_the_others(track: Track) -> None:
    found, each = track.raced("-a", "slow=sleep 1000", "-a", f"good={GOOD}", "--verify", VERIFY, "--first")
    assert found["winner"] == "good"
    assert (each["slow"]["reason"], each["slow"]["verified"]) == ("cancelled", False)
    assert not track.person.commands()


def test_scored_checks_count_and_required_ones_decide(track: Track) -> None:
    found, each = track.raced(
        "-a", "plain=echo > mark", "-a", f"good={GOOD}; echo > mark", "--verify", "test -e mark", "--scored", VERIFY
    )
    assert found["winner"] == "good"
    assert [each[name]["score"] for name in ("good", "plain")] == [1, 0]
    assert all(one["verified"] for one in each.values())


def test_a_file_of_results_is_counted_and_one_that_was_there_before_is_not(track: Track) -> None:
    suite = "<testsuite><testcase/><testcase/><testcase><skipped/></testcase></testsuite>"
    words = (
        "-a",
        f"a=echo '{suite}' > out.xml; echo '{suite}' > mine",
        "--verify",
        "sh -c 'test ! -e out.xml' ; cp mine out.xml; : --junitxml=out.xml",
    )
    _, each = track.raced(*words)
    assert each["a"]["checks"][0]["tests"] == {"passed": 2, "failed": 0, "skipped": 1}
    _, each = track.raced("-a", f"a=echo '{suite}' > out.xml", "--verify", ": --junitxml=out.xml")
    assert each["a"]["checks"][0]["tests"] is None


def test_a_failing_command_may_be_allowed(track: Track) -> None:
    found, _ = track.raced("-a", f"good={GOOD}; exit 1", "--verify", VERIFY, "--allow-failing")
    assert found["winner"] == "good"


# -- how they are asked for -----------------------------------------------------------------------------------------------------


def test_a_race_of_the_projects_file_with_its_own_limits_environment_and_repeats(track: Track) -> None:
    (track.project / "elsewhere.toml").write_text(
        '[[races]]\nname = "mend"\nsetup = "echo once >> setup"\nverify = ["grep -q ^mine$ word", "test $(wc -l < setup) = 1"]\n'
        'env = { WORD = "theirs" }\n'
        '[[races.approaches]]\nname = "mine"\ncommand = "echo $WORD > word"\nenv = { WORD = "mine" }\nrepeat = 2\n'
        '[[races.approaches]]\nname = "theirs"\ncommand = "echo $WORD > word"\n'
        '[[races.approaches]]\nname = "late"\ncommand = "sleep 60"\nlimits = { timeout = "500ms" }\n'
        '[[races.approaches]]\nname = "many"\ncommand = "for i in 1 2 3 4 5 6 7 8 9; do sleep 5 & done; wait"\n'
        'limits = { pids = 4 }\n'
    )  # fmt: skip
    found, _ = track.raced("mend")
    ends = {(one["name"], one["attempt"]): one for one in found["approaches"]}
    assert found["winner"] == "mine"
    assert found["setup"]["exit_code"] == 0
    assert [ends["mine", number]["verified"] for number in (1, 2)] == [True, True]
    assert not ends["theirs", 1]["verified"]
    assert (ends["late", 1]["reason"], ends["late", 1]["why"]) == ("timeout", "it took longer than 500 ms")
    assert not ends["many", 1]["verified"]
    assert ends["many", 1]["reason"] == "pids"


def test_a_projects_file_does_not_widen_by_way_of_a_race(track: Track) -> None:
    config = track.person.home / ".config" / "elsewhere"
    config.mkdir(parents=True)
    (config / "elsewhere.toml").write_text('[sandbox]\nnetwork = "none"\n')
    track.person.own(track.person.home)
    (track.project / "elsewhere.toml").write_text(
        '[[races]]\nname = "out"\n[[races.approaches]]\nname = "a"\nnetwork = "host"\n'
        'command = "ls /sys/class/net > seen"\n'
    )  # fmt: skip
    done = track.person.elsewhere("race", "out")
    assert "ignored, since the project's elsewhere.toml is not trusted: sandbox.network" in done.stderr
    found = track.person.json("experiments", "show", "@last")["experiment"]["approaches"][0]
    assert track.person.json("inspect", found["sandbox"])["sandbox"]["network"] == "none"
    track.person.elsewhere("trust", check=True)
    _, each = track.raced("out")
    assert track.person.json("inspect", each["a"]["sandbox"])["sandbox"]["network"] == "host"


def test_a_race_in_a_file_of_its_own(track: Track) -> None:
    path = track.person.place / "race.toml"
    path.write_text(f'verify = "{VERIFY}"\n[[approaches]]\nname = "good"\ncommand = """{GOOD}"""\n')
    found, _ = track.raced("--file", str(path), "-n", "2")
    assert [one["verified"] for one in found["approaches"]] == [True, True]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), "no_approach"),
        (("-a", "nothing"), "bad_approach"),
        (("-a", "a=true", "-a", "a=false"), "same_name"),
        (("-a", "../a=true"), "bad_name"),
        (("-a", "a=true", "--lower"), "no_score"),
        (("-a", "a=true", "-n", "0"), "bad_count"),
        (("-a", "a=true", "--yes"), "options_together"),
        (("-a", "a=true", "--memory", "much"), "bad_option"),
        (("-a", "a=true", "--publish", "0:8000"), "bad_publish"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_done(root: Person, words: tuple[str, ...], code: str) -> None:
    done = root.elsewhere("race", "--json", *words)
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == code
    assert not list((root.state / "sandboxes").glob("*"))


def test_a_set_up_that_fails_lets_nobody_start(track: Track) -> None:
    track.person.extra["ELSEWHERE_NETWORK_PUBLISH"] = "0:8000"
    said = track.person.elsewhere("race", "-a", f"good={GOOD}", "--setup", "echo no deps; exit 9")
    assert (said.returncode, "published" in said.stderr) == (5, False), "nobody would listen there"
    found = track.person.json("experiments", "show", "@last")["experiment"]
    (good,) = found["approaches"]
    assert (found["setup"]["exit_code"], found["setup"]["output"]) == (9, "no deps\n")
    assert found["reason"] == "the set-up failed with 9, so nothing was tried; the last that it said: no deps"
    assert found["reason"] in said.stdout
    assert good["started_at"] is None


# -- cheats ---------------------------------------------------------------------------------------------------------------------

CHEATS = {
    "edits-tests": "printf 'import unittest\\nclass T(unittest.TestCase):\\n  def test_x(self): pass\\n' > tests/test_calc.py",
    "removes-tests": "rm -r tests; mkdir tests; touch tests/__init__.py; printf 'import unittest\\n' > tests/test_calc.py",
    "links-tests": "mv tests away; mkdir fake; touch fake/__init__.py; printf 'import unittest\\nclass T(unittest.TestCase):\\n"
    "  def test_x(self): pass\\n' > fake/test_calc.py; ln -s fake tests",
    "compiles-tests": "python3 -c \"import py_compile, os; s=os.stat('tests/test_calc.py'); open('t.py','w').write('import unittest\\n"
    "class T(unittest.TestCase):\\n  def test_x(self): pass\\n'); os.makedirs('tests/__pycache__', exist_ok=True); "
    "py_compile.compile('t.py', 'tests/__pycache__/test_calc.cpython-3%d.pyc' % __import__('sys').version_info[1], "
    'invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"; rm -f t.py',
    "shadows-runner": "printf 'import sys\\nprint(\"Ran 2 tests in 0.1s\\\\n\\\\nOK\")\\nsys.exit(0)\\n' > unittest.py",
    "shadows-library": "printf 'import os\\nprint(\"Ran 2 tests in 0.1s\\\\n\\\\nOK\", flush=True)\\nos._exit(0)\\n' > difflib.py",
    "ends-the-runner": "printf 'import os\\nos._exit(0)\\n' > calc.py",
    "prints-a-score": "echo 0; echo 0 > score; printf '#!/bin/sh\\necho 0\\n' > score.sh",
    "writes-a-start-file": "for d in . tests $(python3 -c 'import site; print(*site.getsitepackages(), site.getusersitepackages())'); do"
    " mkdir -p $d 2>/dev/null; echo 'import os; os.write(1, b\"Ran 2 tests in 0.1s\\\\n\\\\nOK\\\\n\"); os._exit(0)' | tee $d/sitecustomize.py"
    " > $d/x.pth; done 2>/dev/null; true",
    "replaces-the-interpreter": "for p in $(command -v python3) /usr/bin/python3 /usr/local/bin/python3 $HOME/.local/bin/python3; do rm -f $p;"
    " mkdir -p $(dirname $p); printf '#!/bin/sh\\necho Ran 2 tests in 0.1s; echo; echo OK\\n' > $p; chmod +x $p; done 2>/dev/null; true",
    "leaves-somebody": "(while sleep 0.05; do echo > tests/test_calc.py; done) > /dev/null 2>&1 & true",
    "kills-the-others": "kill -9 -1; pkill -9 -f elsewhere; true",
    "needs-what-is-ignored": "echo real.py > .gitignore; echo 'def add(a, b): return a + b' > real.py; echo 'from real import *' > calc.py",
    "needs-what-is-outside": "echo 'def add(a, b): return a + b' > $HOME/real.py; printf 'import os, sys\\n"
    'sys.path.append(os.path.expanduser("~"))\\nfrom real import *\\n\' > calc.py',
    "shuts-tests": "chmod 000 tests",
    "skips-tests": "printf 'import unittest\\nraise unittest.SkipTest()\\n' > calc.py",
    "skips-one": "printf 'import unittest\\ndef add(a, b):\\n  if a: raise unittest.SkipTest()\\n  return 0\\n' > calc.py",
    "leaves-a-process": "printf 'import os, time\\ndef add(a, b): return a + b\\nif not os.fork():\\n  os.setsid()\\n  time.sleep(20)\\n"
    "  os._exit(0)\\n' > calc.py",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_who_cheats_does_not_win_and_harms_nobody(track: Track, cheat: str) -> None:
    before = tree(track.project)
    # Longer and with a worse score than the cheat's, so that only its failure to verify lets the other one win.
    honest = f"sleep 1; {LONG}"
    words = ("-a", f"{cheat}={CHEATS[cheat]}", "-a", f"honest={honest}", "--verify", VERIFY, "--score", "./score.sh", "--lower")
    found, each = track.raced(*words)
    assert not each[cheat]["verified"], each[cheat]
    assert found["winner"] == "honest", each["honest"]
    assert each["honest"]["score"] == len("def add(a, b):\n    # the sum\n    return a + b\n")
    assert tree(track.project) == before
    assert not track.person.commands()


FORGERIES = (
    "edits-tests",
    "links-tests",
    "compiles-tests",
    "shadows-runner",
    "shadows-library",
    "needs-what-is-ignored",
    "needs-what-is-outside",
    "skips-one",
)


@pytest.mark.parametrize("cheat", FORGERIES)
def test_how_it_is_verified_is_what_stops_the_cheats(root: Person, cheat: str) -> None:
    """Or the test above would show nothing."""
    words = ("-a", f"{cheat}={CHEATS[cheat]}", "--verify", VERIFY, "--verify-from-approach")
    assert Track(root).raced(*words)[0]["winner"] == cheat


def test_a_forged_score_counts_for_nothing(track: Track) -> None:
    """Not one that the approach prints, nor its own score command, nor one that the code under test writes while it is tested."""
    forged = "printf '#!/bin/sh\\necho 0\\n' > score.sh"
    late = f'{LONG}; printf \'open("score.sh", "w").write("echo 0\\\\n")\\n\' >> calc.py'
    words = ("-a", f"prints={LONG}; echo 0; {forged}", "-a", f"late={late}", "-a", f"good={GOOD}")
    found, each = track.raced(*words, "--verify", VERIFY, "--score", "./score.sh", "--lower")
    assert [each[name]["score"] for name in ("good", "prints")] == [32, 46]
    assert "what verifies it was rewritten while it ran: score.sh" in each["late"]["why"]
    assert (found["winner"], each["late"]["verified"], each["late"]["score"]) == ("good", False, None)
    assert (each["late"]["put_back"], each["prints"]["put_back"]) == ([], ["score.sh"])


def test_a_number_of_somebody_who_outlives_the_score_command_does_not_count(root: Person) -> None:
    forged = (
        "import os, select, time\nshell = os.pidfd_open(os.getppid())\nif not os.fork():\n    while not os.path.exists('said'):\n"
        "        time.sleep(0.01)\n    os.write(1, b'999\\n')\n    open('go', 'w')\n    select.select([shell], [], [])\n"
    )
    words = ("-a", f"forged=cat > calc.py <<'P'\n{forged}P", "-a", 'good=echo \'open("go", "w")\' > calc.py')
    score = "python3 calc.py; echo 5; : > said; until [ -e go ]; do sleep 0.01; done"
    found, each = Track(root).raced(*words, "--score", score, "--verify-files", "!calc.py")
    assert (found["winner"], each["good"]["score"], each["forged"]["score"]) == ("good", 5, None)
    assert "left behind" in each["forged"]["why"]


def test_what_verifies_is_not_rewritten_by_what_it_verifies(root: Person) -> None:
    """But what the check itself writes, it writes in the base as well."""
    track = Track(root)
    for name, content in {"app.py": "print(4)\n", "expected": "5\n", "out": ""}.items():
        (track.project / name).write_text(content)
    check = "python3 app.py | dd of=out status=none; diff out expected"
    cheat = 'echo \'open("expected", "w").write("4\\\\n"); print(4)\' > app.py'
    program = "cp cheat.py app.py"
    (track.project / "cheat.py").write_text('import shutil\nshutil.copy("/bin/true", "/usr/bin/diff")\nprint(4)\n')
    words = ("-a", f"file={cheat}", "-a", f"program={program}", "-a", "good=echo 'print(5)' > app.py", "--verify", check)
    found, each = track.raced(*words, "--score", f"{check} && echo 7", "--verify-files", "!app.py")
    assert (found["winner"], each["good"]["score"]) == ("good", 7)
    for name, path in {"file": "expected", "program": "/usr/bin/diff"}.items():
        assert f"what verifies it was rewritten while it ran: {path}" in each[name]["why"]
        assert each[name]["checks"][0]["note"].startswith(f"what verifies it was rewritten while it ran: {path}")


SCRIPTED = {
    "common": "echo 'run() { echo Ran 2 tests in 0.1s; echo; echo OK; }' > lib/common.sh",
    "linked": "mv lib away; mkdir fake; echo 'run() { echo Ran 2 tests in 0.1s; echo; echo OK; }' > fake/common.sh; ln -s fake lib",
}


@pytest.mark.parametrize("cheat", SCRIPTED)
def test_what_a_verifying_script_runs_is_the_bases(root: Person, cheat: str) -> None:
    track = Track(root)
    (track.project / "lib").mkdir()
    (track.project / "lib" / "common.sh").write_text(f"run() {{ {VERIFY}; }}\n")
    (track.project / "verify.sh").write_text("#!/bin/sh\n. ./lib/common.sh\nrun\n")
    words = ("-a", f"cheat={SCRIPTED[cheat]}", "-a", f"good={GOOD}", "--verify", "sh ./verify.sh")
    found, each = track.raced(*words)
    assert (found["winner"], each["cheat"]["verified"]) == ("good", False)
    assert track.raced(*words[:2], *words[4:], "--verify-from-approach")[0]["winner"] == "cheat"


def test_what_only_works_with_more_than_a_promotion_moves_says_so(track: Track) -> None:
    line = CHEATS["needs-what-is-ignored"]
    found, each = track.raced("-a", f"a={line}", "--verify", VERIFY, "--promote", code=5)
    assert (
        "verifies only with 1 change that a promotion does not move (1 ignored by git; --verify-from-approach counts them)"
        in each["a"]["why"]
    )
    assert (found["promotion"], "a - b" in track.text("calc.py")) == (None, True)


def test_results_in_a_file_do_not_stand_for_a_run(track: Track) -> None:
    suite = '<testsuite><testcase name="a"/><testcase name="b"/></testsuite>'
    forged = f"cat > calc.py <<'P'\nimport os\nopen('out.xml', 'w').write('{suite}')\nos._exit(0)\nP"
    words = ("-a", f"forged={forged}", "-a", f"good={GOOD}", "--verify", "make check # --junitxml=out.xml")
    found, each = track.raced(*words)
    assert (found["winner"], each["forged"]["verified"]) == ("good", False)
    assert "it ran 0 tests, and 2 in the base" in each["forged"]["why"]


def test_each_check_and_the_score_start_anew(track: Track) -> None:
    """What the code under test does while it is tested is nowhere afterwards, and not in what is promoted."""
    line = 'printf \'def add(a, b):\\n    return a + b\\nopen("seen", "a").write("x")\\n\' > calc.py'
    look = "python3 -c 'import calc' && test $(wc -c < seen) = 1"
    found, _ = track.raced(
        "-a", f"a={line}", "--verify", look, "--verify", f"{look} # again", "--score", f"{look} && wc -c < seen", "--promote"
    )
    assert (found["winner"], found["approaches"][0]["score"]) == ("a", 1)
    assert not (track.project / "seen").exists()


def test_files_that_verify_can_be_named_or_freed(track: Track) -> None:
    (track.project / "expected").write_text("5\n")
    line = "echo 6 > expected; echo 6 > got"
    words = ("-a", f"a={line}", "--verify", "diff got expected")
    _, each = track.raced(*words, code=5)
    assert each["a"]["put_back"] == ["expected"]
    assert track.raced(*words, "--verify-files", "!expected")[0]["winner"] == "a"
    words = ("-a", f"a={line}", "--verify", "grep -q 6 expected")
    assert track.raced(*words)[0]["winner"] == "a"
    _, each = track.raced(*words, "--verify-files", "expected", code=5)
    assert each["a"]["put_back"] == ["expected"]


# -- what is promoted is what was verified ---------------------------------------------------------------------------------------

MENDS_AND_EDITS = f"{GOOD}; echo '# mine' >> tests/test_calc.py; echo > tests/test_more.py"


def test_what_it_was_verified_without_stays_behind(track: Track) -> None:
    before = track.text("tests/test_calc.py")
    found, each = track.raced("-a", f"a={MENDS_AND_EDITS}", "--verify", VERIFY, "--promote")
    assert each["a"]["put_back"] == ["tests/test_calc.py", "tests/test_more.py"]
    assert [one["path"] for one in each["a"]["changes"]["paths"]] == ["calc.py"]
    assert found["promotion"]
    assert ("a + b" in track.text("calc.py"), track.text("tests/test_calc.py")) == (True, before)
    assert not (track.project / "tests/test_more.py").exists()
    patch = (track.person.state / "experiments" / found["id"] / "a-1" / "changes.patch").read_text()
    assert "tests" not in patch


def test_commits_that_may_hold_what_stays_behind_stay_behind_as_well(track: Track) -> None:
    found, _ = track.raced("-a", f"a={MENDS_AND_EDITS}; git add -A; git commit -qm mine", "--verify", VERIFY, "--promote")
    assert found["promotion"]
    assert "a + b" in track.text("calc.py")
    assert not track.person.shell("git", "branch", "--list", "elsewhere/*", cwd=track.project).stdout


def test_what_a_stage_checks_with_is_the_bases(root: Person) -> None:
    track = Track(root)
    (track.project / "ready.sh").write_text("#!/bin/sh\ngrep -q 'a + b' calc.py\n")
    (track.project / "ready.sh").chmod(0o755)
    (track.project / "elsewhere.toml").write_text('[[stages]]\nname = "dev"\ntarget = "."\nchecks = ["./ready.sh"]\n')
    words = ("-a", "cheat=echo > new; echo exit 0 > ready.sh", "--verify", "test -e new")
    found, each = track.raced(*words, "--promote", code=4)
    assert (found["winner"], found["promotion"], each["cheat"]["put_back"]) == ("cheat", None, ["ready.sh"])
    assert not (track.project / "new").exists()


def test_one_whose_layers_lie_in_an_image_is_promoted_like_any_other(root: Person) -> None:
    track = Track(root)
    words = ("-a", f"a={MENDS_AND_EDITS}", "-a", "ignored=" + CHEATS["needs-what-is-ignored"], "--disk", "32M", "--best-effort")
    found, each = track.raced(*words, "--verify", VERIFY, "--promote")
    assert (found["winner"], found["promotion"] is not None, "a + b" in track.text("calc.py")) == ("a", True, True)
    assert "verifies only with 1 change" in each["ignored"]["why"]


def test_verified_from_the_approach_all_of_it_is_promoted(track: Track) -> None:
    track.raced("-a", f"a={MENDS_AND_EDITS}", "--verify", VERIFY, "--promote", "--verify-from-approach")
    assert "# mine" in track.text("tests/test_calc.py")
    assert (track.project / "tests/test_more.py").exists()


def test_what_was_changed_since_is_not_promoted_as_verified(track: Track) -> None:
    found, each = track.raced("-a", f"a={GOOD}", "--verify", VERIFY)
    box = each["a"]["sandbox"]
    track.person.elsewhere("exec", box, "--", "sh", "-c", "echo evil >> calc.py", check=True)
    refused = track.person.json("experiments", "promote", found["id"])
    assert refused["error"]["code"] == "attempt_changed"
    assert track.person.json("experiments", "show", found["id"])["experiment"]["refused"].startswith("a: the sandbox")
    assert "a - b" in track.text("calc.py")
    track.person.elsewhere("rollback", box, "end", check=True)
    track.person.elsewhere("experiments", "promote", found["id"], check=True)
    assert track.text("calc.py") == "def add(a, b):\n    return a + b\n"


def test_the_same_twice_is_one_promotion(track: Track) -> None:
    found, _ = track.raced("-a", f"a={GOOD}", "--verify", VERIFY, "--promote")
    said = track.person.json("experiments", "promote", found["id"])["promotion"]
    assert (said["id"], said["applied"]) == (None, [])
    again = track.person.json("experiments", "show", found["id"])["experiment"]
    assert (again["promotion"], again["promotions"]) == (found["promotion"], [found["promotion"]])
    assert len(_promotions(track)) == 1
    page = track.project.parent / "page.html"
    for undone in (False, True):
        if undone:
            track.person.elsewhere("undo", check=True)
        track.person.elsewhere("experiments", "report", found["id"], "--output", page, check=True)
        assert ("it is in reality" in page.read_text()) != undone
    track.person.elsewhere("experiments", "resume", found["id"], check=True)
    assert "a + b" in track.text("calc.py"), "it was to be moved, and is there no more"
    assert len(_promotions(track)) == 2
    track.person.elsewhere("undo", check=True)
    assert track.person.json("experiments", "promote", found["id"])["promotion"]["applied"] == ["calc.py"]
    assert "a + b" in track.text("calc.py")


def test_of_nothing_there_is_no_promotion(track: Track) -> None:
    """Also if what it did stays behind; and whoever asks again is not told of a plan."""
    said = track.race("-a", "x=touch tests/test_more.py", "--verify", "true", "--promote")
    assert (said["experiment"]["counts"]["promoted"], said["promotion"]["id"], _promotions(track)) == (0, None, [])
    told = track.person.elsewhere("experiments", "promote", "@last", check=True).stdout
    assert told == "nothing to move: it changed nothing that a promotion moves\n"
    track.raced("-a", f"x={GOOD}", "--promote")
    told = track.person.elsewhere("experiments", "promote", "@last", check=True).stdout
    assert told == "nothing to move: all of it is there already\n"


def test_outputs_of_attempts_with_alike_names_are_apart(track: Track) -> None:
    _, each = track.raced("-a", "a=echo command of a", "-a", "a-1-check=echo command of the other", "--verify", "echo check")
    assert [each[name]["output"] for name in ("a", "a-1-check")] == ["command of a\n", "command of the other\n"]
    assert [each[name]["checks"][0]["output"] for name in ("a", "a-1-check")] == ["check\n"] * 2


def test_what_a_program_is_told_by_is_the_bases(track: Track) -> None:
    cheat = "printf 'check:\\n\\ttrue\\n' > GNUmakefile; printf 'check:\\n\\ttrue\\n' > Makefile"
    _, each = track.raced("-a", f"a={cheat}", "--verify", "make check", code=5)
    assert each["a"]["put_back"] == ["GNUmakefile", "Makefile"]


def test_who_fills_the_disk_or_the_memory_ends_alone(track: Track) -> None:
    words = ("-a", "disk=head -c 200M /dev/zero > full", "-a", f"good={GOOD}", "--disk", "32M", "--best-effort")
    found, each = track.raced(*words, "--verify", VERIFY)
    assert found["winner"] == "good"
    assert each["disk"]["exit_code"] != 0
    assert not each["disk"]["verified"]


# -- interruptions --------------------------------------------------------------------------------------------------------------


def _attempts(person: Person, state: str) -> list[str]:
    """The names of those that are in this state, of the newest experiment."""
    found = sorted((person.state / "experiments").glob("*/experiment.json"), key=os.path.getmtime)
    if not found:
        return []
    said = json.loads(found[-1].read_bytes())
    return [one["name"] for one in said["attempts"] if one["state"] == state and said["state"] == "running"]


def _racing(track: Track, *words: str, cwd: Path | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        track.person.command("race", *words),
        cwd=cwd or track.project,
        env=track.person.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **track.person.identity(),
    )


WAITS = f"{GOOD}; test -e go || sleep 1000"  # until it is tried again, with another state


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_race_goes_on_where_it_was(track: Track, number: int) -> None:
    """SIGINT comes to the command; SIGKILL to whoever does its work."""
    words = ("-a", "done=true", "-a", "ran=sleep 1000", "--verify", VERIFY, "--timeout", "1h")
    with _racing(track, *words) as process:
        assert eventually(
            lambda: _attempts(track.person, "done") == ["done"] and _attempts(track.person, "running") == ["ran"], 30
        )
        path = max((track.person.state / "experiments").glob("*/experiment.json"), key=os.path.getmtime)
        worker = json.loads(path.read_bytes())["caller"][0]
        os.kill(process.pid if number == signal.SIGINT else worker, number)
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "elsewhere experiments resume" in said
    found = track.person.json("experiments", "show", path.parent.name)["experiment"]
    assert found["state"] == ("cancelled" if number == signal.SIGINT else "interrupted")
    states = {one["name"]: one["state"] for one in found["approaches"]}
    assert states == {"done": "done", "ran": "waiting"}
    assert eventually(lambda: not track.person.commands())
    # What the second approach does is different the second time, so that the race has an end.
    said = json.loads(path.read_bytes())
    for one in (*said["attempts"], *said["race"]["approaches"]):
        if one["name"] == "ran":
            one["command"] = GOOD
    path.write_text(json.dumps(said))
    before = next(one for one in said["attempts"] if one["name"] == "done")
    again = track.person.json("experiments", "resume", found["id"])["experiment"]
    assert (again["state"], again["winner"]) == ("finished", "ran")
    kept = next(one for one in again["approaches"] if one["name"] == "done")
    assert kept["sandbox"] == before["sandbox"], "what was over is not done again"
    labels = [one["labels"] for one in track.person.json("list")["sandboxes"] if one["labels"].get("experiment") == found["id"]]
    assert sorted(one.get("approach", "?") for one in labels) == ["done-1", "ran-1"], "nothing else of it is left"


def test_one_that_verified_before_an_interruption_is_the_first_all_the_same(track: Track) -> None:
    words = ("-a", f"good={GOOD}", "-a", "slow=sleep 1000", "--verify", VERIFY, "--json")
    with _racing(track, *words) as process:
        assert eventually(lambda: _attempts(track.person, "done") == ["good"], 60)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    said = json.loads(out)["experiment"]  # also of one that was ended there is a document
    assert (said["state"], [one["verified"] for one in said["approaches"]]) == ("cancelled", [True, False])
    path = track.person.state / "experiments" / said["id"] / "experiment.json"
    asked = json.loads(path.read_bytes())
    asked["race"]["first"] = True
    path.write_text(json.dumps(asked))
    again = track.person.json("experiments", "resume", said["id"])["experiment"]
    slow = next(one for one in again["approaches"] if one["name"] == "slow")
    assert (again["winner"], slow["reason"], slow["why"]) == ("good", "cancelled", "was not begun, since good verified first")


# -- many, and afterwards -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fifty_approaches_finish_and_leave_nothing(track: Track) -> None:
    words = [word for number in range(50) for word in ("-a", f"n{number}=echo {number} > mine; test {number} != 7")]
    found, each = track.raced(*words, "--verify", "test -s mine", "--score", "cat mine")
    assert (found["winner"], len(each)) == ("n49", 50)
    assert [name for name, one in each.items() if not one["verified"]] == ["n7"]
    running = [one for one in track.person.json("list")["sandboxes"] if one["state"] == "running"]
    assert not running
    assert not track.person.commands()


@pytest.mark.parametrize("short", ["most", "processors"])
def test_if_there_is_room_for_one_they_go_one_after_the_other(track: Track, short: str) -> None:
    """Each stops and starts several times, and none may wait for a place that another one only wants."""
    words = [word for number in range(5) for word in ("-a", f"n{number}=echo {number} > mine")]
    if short == "most":
        track.person.extra["ELSEWHERE_ADMISSION_MOST"] = "1"
    # An ordinary user's processors may be nobody's to hold; what is asked for as a best effort is not set aside.
    held = ("--cpus", str(os.cpu_count()), *(() if track.person.is_root else ("--best-effort",)))
    limits = held if short == "processors" else ()
    found, each = track.raced(*words, *limits, "--verify", "test -s mine", "--verify", "true", "--score", "cat mine")
    assert (found["winner"], [one["verified"] for one in each.values()]) == ("n4", [True] * 5)


def test_old_experiments_are_forgotten_and_cost_is_told(track: Track) -> None:
    found, each = track.raced("-a", f"good={GOOD}")
    items = track.person.json("df")["items"]
    assert any(one["kind"] == "experiment" and one["id"] == found["id"] and one["bytes"] for one in items)
    assert f"experiments/{found['id']}" not in track.person.json("janitor")["removed"]
    track.person.extra["ELSEWHERE_EXPERIMENTS_KEEP"] = "1ms"
    removed = track.person.json("janitor")["removed"]
    assert f"experiments/{found['id']}" in removed
    done = track.person.elsewhere("experiments", "show", found["id"])
    assert (done.returncode, "there is no experiment" in done.stderr) == (1, True)
    assert track.person.json("inspect", each["good"]["sandbox"])["sandbox"]["state"] == "stopped"


def test_sandboxes_of_a_race_go_after_their_time_and_what_they_changed_stays(track: Track) -> None:
    track.person.extra["ELSEWHERE_EXPERIMENTS_SANDBOXES"] = "1s"
    found, each = track.raced("-a", f"good={GOOD}", "-a", "other=true")
    time.sleep(1.1)
    left = [one["id"] for one in track.person.json("list")["sandboxes"]]
    assert not {one["sandbox"] for one in each.values()} & set(left)
    assert not any((track.person.state / "archive").glob(f"{each['good']['sandbox']}*"))
    assert (track.person.state / "experiments" / found["id"] / "good-1" / "changes.patch").read_text()
    track.person.elsewhere("experiments", "promote", found["id"], "good", check=True)
    assert "a + b" in track.text("calc.py")
    track.person.elsewhere("undo", check=True)
    (track.project / "calc.py").write_text("def add(a, b):\n    return 7\n")
    refused = track.person.elsewhere("experiments", "promote", found["id"], "good")
    assert (refused.returncode, "does not fit" in refused.stderr) == (3, True)
    assert track.text("calc.py") == "def add(a, b):\n    return 7\n"
    assert len(track.person.json("list")["sandboxes"]) == len(left)


def test_two_attempts_are_compared_and_a_report_is_made(track: Track) -> None:
    track.raced("-a", f"good={GOOD}", "-a", f"long={LONG}", "--verify", VERIFY)
    said = track.person.json("experiments", "compare", "@last:long", "@last:good")["compare"]
    assert (said["better"], said["both"]) == ("b", ["calc.py"])
    path = Path(track.person.json("experiments", "report", "@last", "--output", "report.html")["report"]["path"])
    assert path.read_text().startswith("<!DOCTYPE html>") or path.read_text().lower().startswith("<!doctype html>")


def test_what_somebody_did_in_it_since_is_not_lost_with_a_sandbox_of_a_race(track: Track) -> None:
    track.person.extra["ELSEWHERE_EXPERIMENTS_SANDBOXES"] = "3s"
    _, each = track.raced("-a", f"good={GOOD}")
    box = each["good"]["sandbox"]
    track.person.elsewhere("exec", box, "--", "touch", "mine", check=True)
    assert eventually(lambda: box not in [one["id"] for one in track.person.json("list")["sandboxes"]])
    assert any((track.person.state / "archive").glob(f"{box}*"))


# -- programs -------------------------------------------------------------------------------------------------------------------

SDK = """
import json
from elsewhere import Approach, Experiment, Limits, NoWinner, race
from elsewhere.errors import UsageError

def mends(box):
    box.files.write("calc.py", "def add(a, b):\\n    return a + b\\n")
    return box.run("python3 -c 'import calc; assert calc.add(1, 1) == 2'")

def raises(box):
    raise ValueError("no idea")

def fails(box):
    return box.run("exit 4")

def waits(box):
    box.run("sleep 1000")

def shortness(box):
    return -len(box.files.read("calc.py"))

done = race(
    [("mends", mends), Approach("raises", raises), ("fails", fails), Approach("waits", waits, timeout="1s"),
     Approach("line", LONG, limits=Limits(pids=64))],
    verify=VERIFY, score=shortness,
).check()
print(json.dumps({"winner": done.winner.name, "why": {one.name: one.why for one in done.results}, "scores":
                  {one.name: one.score for one in done.results}, "reason": done.reason}))
for wrong in (("x", 3), (3, "true"), Approach("x", None), 7, ("x",)):
    try:
        race([wrong])
    except UsageError as error:
        assert error.code == "bad_approach", error
    else:
        raise AssertionError(wrong)
try:
    race([("bad", "false")]).check()
except NoWinner as error:
    print(error.code)
print(done.promote().applied)
assert done.promote().id == done.promotion.id
slow = race([("a", "true")], score=lambda box: box.run("sleep 1000").duration, verify_timeout="1s")
print(slow.winner, slow.results[0].why)
assert Experiment.get(done.id).winner.patch == done.winner.patch
assert [one.id for one in Experiment.list()][-3] == done.id
"""


def test_a_base_that_hangs_does_not_hold_up_who_verified(root: Person) -> None:
    code = (
        "from elsewhere import race\nfrom elsewhere.operations.racing import verifying\nverifying._BASE_S = 0.5\n"
        "print(race(['a=touch done'], verify=['test -e done || sleep 600'], verify_timeout='100s').winner.name)"
    )
    assert Track(root).person.sdk(code, timeout=60).stdout == "a\n"


def test_functions_race_like_commands(track: Track) -> None:
    code = SDK.replace("LONG", repr(LONG)).replace("VERIFY", repr(VERIFY))
    lines = track.person.sdk(code).stdout.splitlines()
    said = json.loads(lines[0])
    assert said["winner"] == "mends"
    assert said["scores"] == {"mends": -32, "line": -46, "raises": None, "fails": None, "waits": None}
    assert said["why"]["waits"] == "it took longer than 1.0 s"
    assert said["why"]["raises"] == "its function raised ValueError: no idea"
    assert lines[1] == "no_winner"
    assert "'calc.py'" in lines[2]
    assert lines[3].startswith("None the score function failed: ")
    assert "a + b" in track.text("calc.py")


def test_the_command_line_counts_more_than_what_a_file_says_of_one_approach(person: Person) -> None:
    (person.project / "elsewhere.toml").write_text(
        """[[races]]
name = "mend"
[[races.approaches]]
name = "wide"
command = "true"
network = "allow"
limits = { memory = "1G", pids = 200 }
[[races.approaches]]
name = "plain"
command = "true"
"""
    )
    person.own(person.project)
    for options, network, pids in ((["--untrusted"], "none", None), (["--network", "none", "--pids", "20"], "none", 20)):
        found = person.json("race", "mend", *options)["experiment"]
        for one in found["approaches"]:
            sandbox = person.json("inspect", one["sandbox"])["sandbox"]
            assert sandbox["network"] == network, one["name"]
            assert pids is None or sandbox["limits"]["pids"] == pids
    first, second = (person.json("inspect", one["sandbox"])["sandbox"]["limits"] for one in found["approaches"])
    assert first["pids"] == second["pids"] == 20


def test_an_attempt_that_was_interrupted_is_not_promoted(track: Track) -> None:
    person = track.person
    with _racing(track, "-a", "half=echo half > half.txt; sleep 60; echo whole > half.txt") as process:
        assert eventually(lambda: any("sleep 60" in words for _, words in person.commands()))
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    refused = person.json("experiments", "promote", "@last", "half")
    assert refused["error"]["code"] == "attempt_unfinished"
    assert not (person.project / "half.txt").exists()


# -- input --


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("race", "-a", "a=true", "--score", ""), "bad_command", ("--score ''", "shell line")),
        (("race", "-a", "a=true", "--setup", " "), "bad_command", ("--setup ' '", "shell line")),
        (("race", "-a", "a=true", "--verify", "true", "--verify", ""), "bad_command", ("--verify ''", "shell line")),
        (("race", "-a", "a=true", "--scored", ""), "bad_command", ("--scored ''", "shell line")),
        (("race", "-a", "x="), "bad_approach", ("-a 'x='", "x=COMMAND")),
        (("race", "-a", "a=true", "--timeout", "foo"), "bad_duration", ("--timeout: 'foo'", "15m")),
        (("race", "-a", "a=true", "--timeout", "0"), "bad_duration", ("--timeout: '0'", "positive")),
        (("race", "-a", "a=true", "--verify-timeout", "0s"), "bad_duration", ("--verify-timeout: '0s'", "positive")),
        (("race", "-a", "a=true", "-n", "x"), "bad_count", ("-n/--repeat: 'x'", "whole number")),
        (("extend", "@last", "soon"), "bad_duration", ("TIME: 'soon'", "15m")),
        (("fork", "@last", "-n", "-1"), "bad_count", ("-n: '-1'", "whole number")),
        (("kill", "@last", "me"), "usage", ("PID: 'me'", "digits")),
        (("run", "--timeout", "1x", "--", "true"), "bad_duration", ("--timeout: '1x'", "15m")),
        (
            ("race", "-a", "a=true", "--verify-from-approach", "--verify-files", "x"),
            "options_together",
            ("--verify-files means nothing beside --verify-from-approach", "leave"),
        ),
        (("experiments", "resume", "@last", "--ours", "x"), "options_together", ("--ours means nothing for resume", "leave")),
    ],
)
def test_what_is_wrong_with_an_option_is_said(root: Person, words: tuple[str, ...], code: str, told: tuple[str, str]) -> None:
    done = root.elsewhere(words[0], "--json", *words[1:])
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, code), done.stderr
    assert told[0] in error["message"]
    assert told[1] in error["hint"]
    assert not list((root.state / "sandboxes").glob("*"))


def test_a_promotion_that_was_refused_is_told_and_one_side_of_a_conflict_settles_it(track: Track) -> None:
    track.raced("-a", f"good={GOOD}; echo b > b.txt; echo c > c.txt", "--verify", VERIFY)
    reality = "def add(a, b):\n    return 7\n"
    (track.project / "calc.py").write_text(reality)
    refused = track.person.elsewhere("experiments", "promote", "@last")
    assert refused.returncode == 3, refused.stderr
    shown = track.person.elsewhere("experiments", "show", "@last", check=True)
    assert [line for line in shown.stderr.splitlines() if "it was not promoted: good: " in line]
    track.person.elsewhere("experiments", "promote", "@last", "--path", "b.txt", check=True)
    assert [(track.project / name).exists() for name in ("b.txt", "c.txt")] == [True, False]
    assert track.text("calc.py") == reality
    track.person.elsewhere("experiments", "promote", "--ours", "calc.py", "@last", "good", check=True)
    assert "a + b" in track.text("calc.py")
    assert track.text("c.txt") == "c\n"
    assert "not promoted" not in track.person.elsewhere("experiments", "show", "@last", check=True).stderr


def test_theirs_leaves_what_is_in_reality(track: Track) -> None:
    track.raced("-a", f"good={GOOD}; echo c > c.txt")
    (track.project / "calc.py").write_text("mine\n")
    track.person.elsewhere("experiments", "promote", "@last", "--theirs", "calc.py", check=True)
    assert (track.text("calc.py"), track.text("c.txt")) == ("mine\n", "c\n")


WRONG = """
from elsewhere import ElsewhereError, explore, race
for wrong in (
    {"verify": 3}, {"verify": len}, {"verify": ["true", 3]}, {"verify": ""}, {"scored": [""]}, {"setup": ""}, {"score": ""}, {"score": 5},
    {"verify_files": 3}, {"verify_files": "x", "verify_from_approach": True}, {"env": {"A": 5}}, {"env": "A=5"}, {"limits": {"pids": 5}},
    {"repeat": "x"}, {"repeat": True}, {"timeout": []}, {"base_ref": 5}, {"base": "live", "base_ref": "HEAD"}, {"approaches": None}, {"approaches": "a=true"},
):
    try:
        race(**{"approaches": [("a", "true")], **wrong})
    except ElsewhereError as error:
        print(error.code, error.message, "|", error.hint)
"""


def test_arguments_of_python_that_make_no_sense_are_refused(root: Person) -> None:
    said = root.sdk(WRONG).stdout.splitlines()
    assert said == [
        "bad_command verify=3 is not a command | a shell line, or a list of them",
        "bad_command verify=<built-in function len> is not a command | a shell line, or a list of them",
        "bad_command verify=3 is not a command | a shell line, or a list of them",
        "bad_command verify='' is not a command | a shell line, or a list of them",
        "bad_command scored='' is not a command | a shell line, or a list of them",
        "bad_command setup='' is not a command | a shell line",
        "bad_command score='' is not a command | a shell line, or a function that is given a Sandbox",
        "bad_command score=5 is not a command | a shell line, or a function that is given a Sandbox",
        "bad_race verify_files=3 is not a glob | 'checks/**', or a list of such",
        "options_together verify_files means nothing beside verify_from_approach | leave one of them out",
        "bad_env env={'A': 5} is no mapping of texts to texts | env={'DEBUG': '1'}",
        "bad_env env='A=5' is no mapping of texts to texts | env={'DEBUG': '1'}",
        "bad_race limits={'pids': 5} are no Limits | limits=Limits(memory='2G')",
        "bad_count 'x' attempts cannot be made | between 1 and 100",
        "bad_count True attempts cannot be made | between 1 and 100",
        "bad_duration timeout=[] is not a duration | timeout='90s'",
        "bad_race base_ref=5 is not the name of a commit | base_ref='HEAD'",
        "bad_race base = 'live' means nothing beside base_ref = 'HEAD': a race starts from one of them | leave one of them out",
        "bad_approach None is no list of approaches | race([(name, work), …])",
        "bad_approach 'a=true' is no list of approaches | race([(name, work), …])",
    ]
    assert not list((root.state / "sandboxes").glob("*"))


PAIRS = """
from elsewhere import ElsewhereError, explore, race
files = race([("cheat", "echo 5 > data")], verify='test "$(cat data)" = 5', verify_files="data")
print(files.winner, files._found.race["verify_files"])
with explore(".", lambda box: [("five", "echo 5 > n"), ["touch", "n"], ("six", lambda box: box.run("echo 6 > n"))],
             lambda box: float(box.files.read_text("n") or 0) if box.files.exists("n") else None, depth=1) as tree:
    print([(node.step, node.score) for node in tree.nodes[1:]])
for wrong in (("echo", "a", "b"), 3, (len, "true")):
    try:
        explore(".", lambda box: [wrong], lambda box: 1)
    except ElsewhereError as error:
        print(error.code, error.message)
"""


def test_a_text_is_one_glob_and_a_pair_is_a_name_and_a_step(person: Person) -> None:
    said = person.sdk(PAIRS).stdout.splitlines()
    assert said == [
        "None ('data',)",
        "[('five', 5.0), ('touch n', 0.0), ('six', 6.0)]",
        "bad_search ('echo', 'a', 'b') is not a step",
        "bad_search 3 is not a step",
        "bad_search (<built-in function len>, 'true') is not a step",
    ]
