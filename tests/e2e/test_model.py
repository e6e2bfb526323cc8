"""Random sequences of everything that can be done with sandboxes, from several processes at once, against a model.

Each worker has sandboxes of its own, of which it knows exactly what they must hold and in which state they are; a few are shared,
of which it knows what is possible: an operation works, or is refused with a word for it. Every file that a command was said to
have written is found in exactly one place afterwards, a removed sandbox's in the archive.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from chance import seed_of
from conftest import Person, tree
from e2e.test_kill_points import PATIENCE_S, Witness, nothing_is_left

# What a worker does. It prints a line for each step; a step that contradicts the model, or ends in an error that has no code,
# ends it.
WORKER = r"""
import json, os, random, sys, time, traceback
from elsewhere.errors import ElsewhereError
from elsewhere.operations import creating, executing, processes, sandboxes
from elsewhere.operations.creating import Wish
from elsewhere.operations.executing import ExecRequest

me, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
chance = random.Random(f'{seed}-{me}')
counter = 0
# Of ours: name -> what it must be. A sandbox that is not there has no entry.
mine = {}
DONE = time.monotonic() + seconds

def say(**what):
    print(json.dumps({'worker': me, **what}), flush=True)

def attempt(allowed, call):
    '''What came back, or the code of a refusal that the model allows.'''
    try:
        return call(), None
    except ElsewhereError as error:
        assert allowed is None or error.code in allowed, f'{error.code}: {error.message}, not one of {allowed}'
        return None, error.code

def write(name):
    '''A command that writes a file with a number and lists what is there.'''
    global counter
    counter += 1
    file = f'{me}-{counter}.txt'
    return file, ExecRequest(name, ['sh', '-c', f'echo {file} > {file} && ls'], capture=True)

def written(text):
    return {line for line in text.decode().split() if line.endswith('.txt')}

# -- one's own ---

def create_own():
    name = f'{me}-{chance.randrange(3)}'
    request = f'req-{name}' if chance.random() < 0.6 else None
    known = mine.get(name)
    expected = None
    if known is not None:
        # The same request again is the same sandbox; anything else with that name is refused.
        expected = 'same' if request and known['request'] == request else 'refused'
    got, code = attempt({'name_in_use'} if expected == 'refused' else set(), lambda: creating.create(Wish(name=name, request=request)))
    say(did='create', name=name, request=request, code=code)
    if expected == 'refused':
        assert code == 'name_in_use', (name, known)
    elif expected == 'same':
        assert got[1] is False and got[0].id == known['id'], (got, known)
    else:
        assert got[1] is True and got[0].state == 'running', got
        mine[name] = {'id': got[0].id, 'request': request, 'state': 'running', 'files': set(), 'busy': []}

def pick():
    return chance.choice(sorted(mine)) if mine else None

def exec_own():
    name = pick()
    if name is None: return create_own()
    box = mine[name]
    if box['state'] == 'stopped': box['busy'] = []
    file, wanted = write(name)
    result = executing.execute(wanted)
    say(did='exec', name=name, id=box['id'], file=file, request=result.request.id, code=result.outcome.exit_code)
    assert result.outcome.exit_code == 0 and result.outcome.reason == 'exited', result
    box['files'].add(file)
    box['state'] = 'running'
    assert written(result.outcome.stdout) == box['files'], (written(result.outcome.stdout), box['files'])

def detach_own():
    name = pick()
    if name is None: return create_own()
    result = executing.execute(ExecRequest(name, ['sleep', '1000'], detached=True))
    say(did='detach', name=name, request=result.request.id)
    mine[name]['state'] = 'running'
    mine[name]['busy'].append(result.request.id)

def cancel_own():
    busy = [(name, request) for name, box in mine.items() for request in box['busy'] if box['state'] == 'running']
    if not busy: return detach_own()
    name, request = chance.choice(busy)
    (ended,) = processes.cancel(request)
    say(did='cancel', name=name, request=request)
    assert (ended.state, ended.reason) == ('cancelled', 'cancelled'), ended
    mine[name]['busy'].remove(request)

def stop_own():
    name = pick()
    if name is None: return create_own()
    _, found = sandboxes.stop(name, grace=0.5)
    say(did='stop', name=name)
    assert found.state == 'stopped'
    mine[name].update(state='stopped', busy=[])

def start_own():
    name = pick()
    if name is None: return create_own()
    _, found = sandboxes.start(name)
    say(did='start', name=name)
    assert found.state == 'running'
    if mine[name]['state'] == 'stopped': mine[name]['busy'] = []
    mine[name]['state'] = 'running'

def remove_own():
    name = pick()
    if name is None: return create_own()
    box = mine[name]
    got, code = attempt({'sandbox_in_use', 'unpromoted_changes'}, lambda: sandboxes.remove([name]))
    say(did='rm', name=name, code=code)
    if box['busy'] and box['state'] == 'running':
        assert code == 'sandbox_in_use', (code, box)
    elif box['files']:
        assert code == 'unpromoted_changes', (code, box)
    else:
        assert code is None and got.removed == [box['id']] and got.archived == [], (code, got, box)
        del mine[name]

def force_own():
    name = pick()
    if name is None: return create_own()
    box = mine.pop(name)
    got = sandboxes.remove([name], force=True)
    say(did='rm --force', name=name)
    assert got.removed == [box['id']] and got.archived == ([box['id']] if box['files'] else []), (got, box)

def look_at_own():
    listed = {found.name: found for found in sandboxes.list_sandboxes().records}
    say(did='list')
    for name, box in mine.items():
        assert listed[name].id == box['id'] and listed[name].state == box['state'], (listed[name], box)
    for name in (f'{me}-{number}' for number in range(3)):
        assert (name in listed) == (name in mine), name

# -- what is shared ---

# Somebody else may remove, stop or start it at any moment.
GONE = {'sandbox_not_found', 'sandbox_gone', 'sandbox_in_use', 'unpromoted_changes', 'identity_in_use', 'name_in_use',
        'sandbox_ended', 'sandbox_busy', 'command_refused'}

def shared():
    return f'shared-{chance.randrange(2)}'

def create_shared():
    name = shared()
    got, code = attempt(GONE, lambda: creating.create(Wish(name=name, request=f'req-{name}')))
    say(did='create', name=name, code=code, id=got and got[0].id, new=got and got[1])

def exec_shared():
    name = shared()
    file, wanted = write(name)
    got, code = attempt(GONE, lambda: executing.execute(wanted))
    done = got is not None and got.outcome.exit_code == 0 and got.outcome.reason == 'exited'
    say(did='exec', name=name, file=file, done=done, code=code, reason=got and got.outcome.reason, request=got and got.request.id)

def other_shared():
    name = shared()
    verb, call = chance.choice([
        ('stop', lambda: sandboxes.stop(name, grace=0.5)),
        ('start', lambda: sandboxes.start(name)),
        ('rm', lambda: sandboxes.remove([name])),
        ('rm --force', lambda: sandboxes.remove([name], force=True)),
        ('cancel', lambda: processes.cancel(name)),
    ])
    _, code = attempt(GONE, call)
    say(did=verb, name=name, code=code)

STEPS = [create_own, exec_own, exec_own, exec_own, detach_own, cancel_own, stop_own, start_own, remove_own, force_own,
         look_at_own, create_shared, create_shared, exec_shared, exec_shared, exec_shared, other_shared, other_shared]
step = None
try:
    while time.monotonic() < DONE:
        step = chance.choice(STEPS)
        step()
    look_at_own()
    say(did='end', mine={name: {**box, 'files': sorted(box['files'])} for name, box in mine.items()})
except BaseException:
    say(did='failed', step=step.__name__, trace=traceback.format_exc())
"""


def run_workers(person: Person, workers: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    running = [
        subprocess.Popen(
            [person.python, "-c", WORKER, f"w{number}", str(seed), str(seconds)],
            cwd=person.project,
            env=person.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **person.identity(),
        )
        for number in range(workers)
    ]
    steps = []
    for worker in running:
        out, _ = worker.communicate(timeout=seconds + 90)
        for line in out.splitlines():
            assert line.startswith("{"), out[-3000:]
            steps.append(json.loads(line))
    failed = [step for step in steps if step["did"] == "failed"]
    for step in failed:
        before = [one for one in steps if one["worker"] == step["worker"]][-8:]
        print(f"\n{step['worker']} in {step['step']}:\n{step['trace']}", *before, sep="\n  ")
    assert not failed, failed[0]["trace"]
    assert sum(step["did"] == "end" for step in steps) == workers
    return steps


def places_of_files(person: Person) -> dict[str, list[str]]:
    """Every numbered file, in the sandboxes that are there and in the archive."""
    found: dict[str, list[str]] = {}
    for room in ("sandboxes", "archive"):
        for directory, _, files in os.walk(person.state / room):
            for file in files:
                if file.endswith(".txt") and Path(directory, file).read_text() == f"{file}\n":  # or killed before it wrote
                    found.setdefault(file, []).append(directory)
    return found


def compare(person: Person, workers: int, seconds: float) -> None:
    seed = seed_of()
    try:
        witness = Witness(person)
        before = tree(person.project)
        steps = run_workers(person, workers, seconds, seed)
        print(f"{person.name}: {len(steps)} steps, seed {seed}")
        assert tree(person.project) == before, "something was written into reality"
        witness.agrees()
        own = {name: box for step in steps if step["did"] == "end" for name, box in step["mine"].items()}
        listed = {box["name"]: box for box in person.json("list")["sandboxes"]}
        assert set(listed) - {"shared-0", "shared-1"} == set(own)
        for name, box in own.items():
            assert (listed[name]["id"], listed[name]["state"]) == (box["id"], box["state"])
        places = places_of_files(person)
        written = {step["file"] for step in steps if step["did"] == "exec" and (step.get("done") or step["code"] == 0)}
        assert written <= set(places), f"lost: {sorted(written - set(places))}"
        assert not [file for file, found in places.items() if len(found) > 1]
        requests = {request["id"]: request for request in person.json("requests", "--limit", "1000000")["requests"]}
        for step in steps:
            if step["did"] == "exec" and step["file"] in written:
                request = requests[step["request"]]
                assert (request["state"], request["reason"], request["exit_code"]) == ("completed", "exited", 0), request
                assert step["file"] in request["argv"][2]
        for step in steps:
            if step["did"] == "cancel" and "request" in step:
                assert requests[step["request"]]["reason"] == "cancelled"
        assert person.json("rm", "--force", "--all", timeout=PATIENCE_S * 5)["skipped"] == []
        witness.agrees()
        assert written <= set(places_of_files(person)), "lost by the last removal"
        nothing_is_left(person)
    except BaseException:
        print(f"\nELSEWHERE_TEST_SEED={seed} as {person.name}")
        raise


def test_everything_agrees_with_the_model(person: Person) -> None:
    compare(person, workers=3, seconds=5)


@pytest.mark.slow(25)
@pytest.mark.timeout(240)
def test_everything_agrees_with_the_model_for_long(person: Person) -> None:
    compare(person, workers=random.Random(seed_of()).choice((4, 6)), seconds=20)
