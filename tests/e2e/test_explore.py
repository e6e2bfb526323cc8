"""A search in which every node is a snapshot: the tree it gives, what it leaves, and the example that repairs a program."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, tree

pytestmark = pytest.mark.one_launcher
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "repair_by_search.py"

# Numbers are collected in a file; the sum counts, too much of it is a dead end.
PRELUDE = """
import json, os, sys, threading
from elsewhere import ElsewhereError, Sandbox
from elsewhere.sdk.exploring import Budget, explore

def numbers(box):
    return [int(word) for word in box.files.read_text('numbers').split()] if box.files.exists('numbers') else []

def expand(box):
    assert not box.files.exists('trace')
    box.files.write('trace', 'expand')
    return [f'echo {number} >> numbers' for number in (1, 5, 2)]

def score(box):
    assert not box.files.exists('trace')
    box.files.write('trace', 'score')
    total = sum(numbers(box))
    return None if total > 11 else total

def refused(call):
    try:
        call()
    except ElsewhereError as error:
        return error.code
    raise AssertionError('not refused')

def told(tree):
    return [[node.id, node.parent and node.parent.id, node.step, node.score, node.state] for node in tree.nodes]
"""


@pytest.fixture
def person(person: Person) -> Iterator[Person]:
    """Nothing of any search may be left."""
    yield person
    assert person.json("list")["sandboxes"] == []


def explored(person: Person, code: str) -> Any:
    """What a program says at its end; reality is what it was."""
    before = tree(person.project)
    done = person.sdk(PRELUDE + code)
    assert tree(person.project) == before
    return json.loads(done.stdout)


def test_every_node_is_its_parent_and_one_step(person: Person) -> None:
    said = explored(
        person,
        """
with explore('.', expand, score, beam=2, depth=2) as tree:
    assert sorted(one.id for one in Sandbox.list()) == [tree.best.sandbox.id]
    assert numbers(tree.best.sandbox) == [5, 5]
    assert not tree.best.sandbox.files.exists('trace')
    assert tree.best.sandbox.changes().added == [os.path.join(os.getcwd(), 'numbers')]
    assert [node.step for node in tree.best.path] == ['', 'echo 5 >> numbers', 'echo 5 >> numbers']
    assert b'+5\\n+5\\n' in tree.patch
    page = tree.report()
    assert 'Best: score 10 after 2 steps' in page and 'echo 5 &gt;&gt; numbers' in page
print(json.dumps(told(tree)))
""",
    )
    one, five, two = (f"echo {number} >> numbers" for number in (1, 5, 2))
    assert said == [
        [0, None, "", 0.0, "start"],
        [1, 0, one, 1.0, "passed over"],
        [2, 0, five, 5.0, "expanded"],
        [3, 0, two, 2.0, "expanded"],
        [4, 2, one, 6.0, "passed over"],
        [5, 2, five, 10.0, "kept"],
        [6, 2, two, 7.0, "kept"],
        [7, 3, one, 3.0, "passed over"],
        [8, 3, five, 7.0, "passed over"],
        [9, 3, two, 4.0, "passed over"],
    ]


@pytest.mark.slow
def test_dead_ends_are_removed_at_once_and_several_workers_give_the_same_tree(person: Person) -> None:
    said = explored(
        person,
        """
alive = []
def watched(box):
    alive.append(len(Sandbox.list()))
    return score(box)
def steps(box):
    return {'fails': 'echo 9 >> numbers; exit 3', 'raises': lambda box: box.run('exit 4').check(), 'too much': 'echo 99 >> numbers', 'good': lambda box: box.files.write('numbers', '3')}
with explore('.', steps, watched, beam=1, depth=1) as tree:
    pass
with explore('.', steps, score, beam=1, depth=1, workers=4) as again:
    pass
assert told(tree) == told(again), (told(tree), told(again))
print(json.dumps([alive, [[node.step, node.state, node.why, node.sandbox is None] for node in tree.nodes]]))
""",
    )
    # Reality's sandbox, the start's, and its trial; then each step has the sandboxes before it removed already.
    assert said[0] == [3, 4, 4]
    assert said[1] == [
        ["", "start", "", True],
        ["fails", "dead end", "the step ended with 3 (exited)", True],
        ["raises", "dead end", "'/bin/sh -c exit 4' ended with 4 (exited)", True],
        ["too much", "dead end", "it has no score", True],
        ["good", "kept", "", True],
    ]


def test_a_sandbox_to_start_from_is_left_as_it_is_and_its_state_is_gone_on_from(person: Person) -> None:
    said = explored(
        person,
        """
with Sandbox.create() as box:
    box.run('echo 4 > numbers').check()
    with explore(box, expand, score, beam=1, depth=1) as tree:
        assert numbers(tree.best.sandbox) == [4, 5]
    assert numbers(box) == [4]
    assert box.snapshots() == []
    assert not box.files.exists('trace')
print(json.dumps(told(tree)[0]))
""",
    )
    assert said == [0, None, "", 4.0, "start"]


@pytest.mark.slow
def test_budget_goal_and_the_end_of_all_ways_end_a_search_and_are_said(person: Person) -> None:
    said = explored(
        person,
        """
def ended(**how):
    with explore('.', how.pop('expand', expand), how.pop('score', score), **how) as tree:
        return [len(tree.nodes), tree.best and tree.best.score, tree.reason.partition('the search ended: ')[2]]
print(json.dumps([
    ended(budget=4, beam=2),
    ended(budget=Budget(nodes=3, time='1h'), depth=3),
    ended(budget=Budget(time=1e-9)),
    ended(goal=5, depth=3),
    ended(goal=5, depth=3, workers=3),
    ended(depth=9, beam=1),
    ended(depth=1, score=lambda box: None),
    ended(expand=lambda box: []),
]))
""",
    )
    assert said == [
        [5, 6.0, "the budget of 4 nodes is used up"],
        [4, 5.0, "the budget of 3 nodes is used up"],
        [1, 0.0, "the time is used up"],
        [3, 5.0, "the goal is reached"],
        [3, 5.0, "the goal is reached"],
        [13, 11.0, "there was nothing left to go on from"],
        [4, None, "there was nothing left to go on from"],
        [1, 0.0, "there was nothing left to go on from"],
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_interruption_leaves_no_sandbox(person: Person, workers: int) -> None:
    said = explored(
        person,
        f"""
def broken(box):
    if numbers(box) == [5]:
        raise KeyboardInterrupt
    return 1
try:
    explore('.', expand, broken, workers={workers})
except KeyboardInterrupt:
    print(json.dumps([len(Sandbox.list()), threading.active_count()]))
""",
    )
    assert said == [0, 1]


def test_whatever_one_way_does_the_search_comes_back_with_the_others(person: Person) -> None:
    """A step or a score that raises, a step without an end, more steps than anybody asked for."""
    said = explored(
        person,
        """
import itertools, time
def steps(box):
    return {'raises': lambda box: 1 / 0, 'odd': 'echo 3 >> numbers', 'nothing': ['no-such-program'], 'good': ('touch', 'numbers')}
def odd(box):
    if numbers(box):
        raise ValueError('an odd one')
    return 1 if box.files.exists('numbers') else 0
def last(box):
    if box.files.exists('numbers'):
        raise LookupError('no way')
    return steps(box)
found = []
with explore('.', last, odd, beam=1, depth=2) as tree:
    found.append([[node.step, node.state, node.score, node.why] for node in tree.nodes[1:]])
began = time.monotonic()
with explore('.', lambda box: {'slow': 'sleep 60'}, score, depth=1, budget='1s') as tree:
    found.append([tree.nodes[1].state, tree.nodes[1].why, tree.reason.partition('ended: ')[2], time.monotonic() - began < 30])
endless = lambda box: (f'echo {number} > numbers' for number in itertools.count(1))
with explore('.', endless, score, depth=1, budget=2) as tree:
    found.append([len(tree.nodes), tree.best.score])
with explore('.', endless, score, goal=0) as tree:
    found.append([len(tree.nodes), tree.best is tree.nodes[0], tree.reason.partition('ended: ')[2]])
found.append([refused(lambda: explore('.', endless, score))])
print(json.dumps(found))
""",
    )
    assert said == [
        [
            ["raises", "dead end", None, "ZeroDivisionError: division by zero"],
            ["odd", "dead end", None, "it has no score: ValueError: an odd one"],
            ["nothing", "dead end", None, said[0][2][3]],
            ["good", "kept", 1, "it has no steps: LookupError: no way"],
        ],
        ["dead end", "the time was used up while the step ran", "the time is used up", True],
        [3, 2],
        [1, True, "the goal is reached"],
        ["bad_search"],
    ]
    assert "no-such-program" in said[0][2][3]


def test_what_makes_no_sense_is_refused(person: Person) -> None:
    said = explored(
        person,
        """
nothing = explore('.', expand, lambda box: None, depth=1)
print(json.dumps([
    refused(lambda: explore('.', expand, score, beam=0)),
    refused(lambda: explore('.', expand, score, depth=True)),
    refused(lambda: explore('.', expand, score, workers=1.5)),
    refused(lambda: explore('.', expand, score, budget=0)),
    refused(lambda: explore('.', expand, score, budget=2.5)),
    refused(lambda: explore('.', expand, score, budget='soon')),
    refused(lambda: explore('.', expand, lambda box: 'much')),
    refused(lambda: explore('.', expand, lambda box: float('nan'))),
    refused(lambda: explore('.', expand, lambda box: 10**400)),
    *(refused(lambda: explore('.', lambda box: given, score)) for given in ('ls', None, 5)),
    refused(lambda: explore('.', expand, score, goal='high')),
    refused(nothing.promote),
]))
""",
    )
    assert said == [
        "bad_search", "bad_search", "bad_search", "bad_search", "bad_budget", "bad_duration", "bad_score", "bad_score", "bad_score",
        "bad_search", "bad_search", "bad_search", "bad_search", "nothing_found",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_example_repairs_the_program_and_the_repair_is_in_reality(person: Person) -> None:
    shutil.copy(EXAMPLE, person.place / "repair.py")
    person.own(person.place)
    done = person.shell(person.python, "-W", "error", person.place / "repair.py", person.place)
    assert "12 of 12" in done.stdout
    assert "the goal is reached" in done.stdout
    assert (person.place / "months" / "months.py").read_text() == (
        "def february(year):\n    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n    return 29 if leap else 28\n"
    )
    assert sorted(path.name for path in (person.place / "months").iterdir()) == ["months.py", "tests.py"]
    page = (person.place / "report.html").read_text()
    assert page.count("<circle") == 51
    assert "Best: score 12 after 2 steps" in page
    assert "elsewhere undo" in page
