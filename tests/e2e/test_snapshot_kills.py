"""kill -9 of whoever performs a snapshot, a rollback, a fork, a merge of layers or a refresh, at three hundred moments: what a sandbox
shows afterwards is what it showed before or what it was to show, all its snapshots show what they showed, and nothing is left.

`blows.py` strikes; a failure prints the seed, and with ELSEWHERE_TEST_SEED set to it the same work begins again, with blows at about
the same moments. Who else may be killed: `test_snapshot_faults.py`.
"""

import json
import os
from pathlib import Path

import pytest

from chance import seed_of
from conftest import PATIENCE, Person, eventually
from e2e.test_kill_points import PATIENCE_S, Witness, nothing_is_left
from e2e.test_snapshot_faults import prune
from e2e.test_snapshots import layers_left

BLOWS = Path(__file__).with_name("blows.py")
ALL = ("snapshot", "rollback", "fork", "merge", "refresh")


def strike(person: Person, wanted: dict[str, int]) -> None:
    words = person.python, "-c", BLOWS.read_text(), str(seed_of()), json.dumps(wanted)
    done = person.shell(*words, cwd=person.project, check=False, timeout=500 * PATIENCE)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    print(person.name, document)
    assert document["hits"] == wanted
    person.sdk(f"from elsewhere import Sandbox\nSandbox.get({document['box']!r}, on_exit='discard').remove()")
    assert eventually(lambda: not layers_left(person) or not prune(person), PATIENCE_S)
    assert layers_left(person) == []
    Witness(person).agrees()
    gone = person.json("janitor")
    assert not gone["skipped"], gone
    nothing_is_left(person)
    for base in (person.state / "bases").iterdir():
        assert set(os.listdir(base / "layers")) == set(map(str, json.loads((base / "base.json").read_text())["layers"]))
        assert not list((base / "building").iterdir())


def test_killed_while_layers_are_merged_and_while_it_is_moved_to_a_new_base(person: Person) -> None:
    strike(person, {"merge": 5, "refresh": 5})


@pytest.mark.slow(120)
@pytest.mark.timeout(600)
def test_killed_at_three_hundred_moments(person: Person) -> None:
    strike(person, dict.fromkeys(ALL, 30))  # as root and as an ordinary user
