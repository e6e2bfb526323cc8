"""What of a race's result comes to reality, and what stays behind: what was verified, and nothing else."""

import json
import os
import signal
import socket
from typing import Any

import pytest

from conftest import Person, eventually
from e2e.test_race import GOOD, VERIFY, Track, _attempts, _racing

pytestmark = [pytest.mark.one_launcher, pytest.mark.timeout(240)]


@pytest.fixture
def track(person: Person) -> Track:
    return Track(person)


def git(track: Track, *words: str) -> str:
    return track.person.shell("git", *words, cwd=track.project).stdout


def promote(track: Track, *words: str, code: int = 0) -> dict[str, Any]:
    done = track.person.elsewhere("experiments", "promote", *words)
    assert done.returncode == code, done.stderr
    return {"said": done.stdout + done.stderr}


def test_what_is_moved_among_the_tests_stays_where_it_was(track: Track) -> None:
    (track.project / "helpers.py").write_text("# not committed\n")
    track.person.own(track.project)
    words = ("-a", f"x={GOOD}; mv helpers.py tests/helpers.py", "--verify", VERIFY, "--promote")
    _, each = track.raced(*words)
    assert sorted(each["x"]["put_back"]) == ["helpers.py", "tests/helpers.py"]
    assert "a + b" in track.text("calc.py")
    assert track.text("helpers.py") == "# not committed\n"
    assert not (track.project / "tests/helpers.py").exists()


def test_commits_may_hold_what_was_not_verified_and_stay_inside(track: Track) -> None:
    """The tests are themselves again in the end, and gone in the commit."""
    before = git(track, "for-each-ref")
    cheat = f"{GOOD}; : > tests/test_calc.py; git commit -qam fix; git checkout -q HEAD~ -- tests"
    done = track.person.elsewhere("race", "-a", f"x={cheat}", "--verify", VERIFY, "--promote")
    assert done.returncode == 0, done.stderr
    assert "commits that were made inside stay there" in done.stderr
    assert "a + b" in track.text("calc.py")
    assert git(track, "for-each-ref") == before
    track.person.elsewhere("undo", check=True)
    done = track.person.elsewhere("race", "-a", f"x={cheat}", "--verify", VERIFY, "--verify-from-approach", "--promote")
    assert done.returncode == 0, done.stderr
    assert git(track, "for-each-ref") != before, "whoever wants all of it gets it"


def test_running_the_tests_leaves_nothing_behind_that_is_worth_a_word(track: Track) -> None:
    """And a repository that was removed holds no commits."""
    done = track.person.elsewhere("race", "-a", f"x={GOOD}; {VERIFY}; rm -rf .git", "--verify", VERIFY, "--promote")
    assert done.returncode == 0, done.stderr
    assert "left behind" not in done.stderr
    assert "commits" not in done.stderr


def test_a_conflict_of_a_race_is_settled_by_the_race(track: Track) -> None:
    found, _ = track.raced("-a", f"x={GOOD}; : > tests/test_calc.py", "-a", "y=false", "--verify", VERIFY)
    (track.project / "calc.py").write_text("def add(a, b):\n    return a  -  b\n")
    track.person.own(track.project)
    refused = promote(track, found["id"], code=3)["said"]
    assert f"elsewhere experiments promote {found['id']} x:1 with --ours PATH" in refused
    promote(track, found["id"], "x:1", "--ours", "calc.py")
    assert "a + b" in track.text("calc.py")
    assert "assertEqual" in track.text("tests/test_calc.py")


def test_one_that_never_came_to_its_end_cannot_be_taken(track: Track) -> None:
    found, each = track.raced("-a", f"quick={GOOD}", "-a", "slow=sleep 60", "--verify", VERIFY, "--first")
    assert each["slow"]["why"] == "was ended, since quick verified first"
    report = track.person.elsewhere("experiments", "report", found["id"], "--output", "/nowhere/at/all.html")
    assert (report.returncode, "'/nowhere/at/all.html' cannot be written" in report.stderr) == (2, True)
    assert "did not come to its end: was ended, since quick" in promote(track, found["id"], "slow", code=1)["said"]


def test_what_is_kept_of_a_sandbox_comes_as_it_was(track: Track) -> None:
    (track.project / ".gitattributes").write_text("* text=auto eol=crlf\n")
    track.person.own(track.project)
    found, _ = track.raced("-a", r"x=printf 'x\ny' > lf.txt")
    track.person.elsewhere("rm", "--all", "--force", check=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        track.person.extra["ELSEWHERE_NETWORK_PUBLISH"] = f"{taken.getsockname()[1]}:80"
        promote(track, found["id"])
    assert (track.project / "lf.txt").read_bytes() == b"x\ny"


def test_gits_index_knows_the_files_of_the_base(track: Track) -> None:
    """Whose times are others in a copy."""
    made = f"{GOOD}; git diff > p; git checkout -q calc.py"
    line = f"git diff-index --quiet HEAD && {{ {made}; git apply --index p && rm p; }}"
    _, each = track.raced("-a", f"x={line}", "--verify", VERIFY)
    assert each["x"]["verified"], each["x"]


def test_a_file_without_lines_counts_as_one(track: Track) -> None:
    found, _ = track.raced("-a", f"more=head -c 100 /dev/zero > blob; {GOOD}", "-a", f"less={GOOD}", "--verify", VERIFY)
    assert found["winner"] == "less"
    assert "it changed fewer lines (2) than more (3)" in found["reason"]


def test_why_there_is_no_score_is_said(track: Track) -> None:
    _, each = track.raced("-a", f"x={GOOD}", "--verify", VERIFY, "--score", "echo 5; exit 1", code=5)
    assert each["x"]["why"] == "the score command failed: it ended with 1"
    code = f"""
from elsewhere import race
found = race([("x", {GOOD!r})], score=lambda box: None)
print(found.results[0].why)
"""
    assert "the score function gave None, which is no number" in track.person.sdk(code).stdout


def test_broken_stages_are_told_before_anything_runs(track: Track) -> None:
    (track.project / "elsewhere.toml").write_text("[[stages]]\nname = 3\n")
    track.person.own(track.project)
    done = track.person.elsewhere("race", "-a", f"x={GOOD}", "--verify", VERIFY, "--promote")
    assert done.returncode == 2, done.stderr
    assert "x: running" not in done.stderr


def test_that_it_was_interrupted_is_no_reason_any_more(track: Track) -> None:
    with _racing(track, "-a", f"x=cd ..; {GOOD}", "--verify", "sleep 1000", cwd=track.project / "tests") as process:
        assert eventually(lambda: _attempts(track.person, "verifying") == ["x"], 30)
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    path = max((track.person.state / "experiments").glob("*/experiment.json"), key=os.path.getmtime)
    path.write_text(path.read_text().replace("sleep 1000", f"cd ..; {VERIFY}"))
    found = track.person.json("experiments", "resume", path.parent.name)["experiment"]
    assert [one["why"] for one in found["approaches"]] == ["verified"]
    assert json.loads(path.read_bytes())["reason"].startswith("x won")


def test_commands_start_where_the_caller_stands(track: Track) -> None:
    """As those of `run` do; what they name there is the base's. A race of the project's file is the same from everywhere."""
    part = track.project / "part"
    part.mkdir()
    (part / "check.sh").write_text("pwd; grep -q good f\n")
    (part / "f").write_text("bad\n")
    (track.project / "elsewhere.toml").write_text('[[races]]\nname = "top"\n[[races.approaches]]\nname = "x"\ncommand = "pwd"\n')
    track.person.own(track.project)
    words = ("--setup", "pwd > where", "--verify", "sh check.sh", "--score", "wc -l < where")
    found, each = track.raced("-a", "good=pwd; echo good > f", "-a", "cheat=: > check.sh", *words, cwd=part)
    assert (found["winner"], each["good"]["score"], each["good"]["output"]) == ("good", 1, f"{part}\n")
    assert each["good"]["checks"][0]["output"] == f"{part}\n"
    assert each["cheat"]["put_back"] == ["part/check.sh"]
    _, each = track.raced("top", cwd=part)
    assert each["x"]["output"] == f"{track.project}\n"
