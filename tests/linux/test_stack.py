"""What the snapshot engine will need: reality, two frozen layers and an upper, stacked, read and written, in both modes.

The layers are made for real, by sandboxes, and frozen by taking their uppers away. They lie below `/`, beside which the kernel
refuses them as a lower, so that over the whole root two overlays are needed.
"""

import json

import pytest

from conftest import Person, tree

STACK = """
import dataclasses, json, os, shutil, sys
from elsewhere.linux import cgroups
from elsewhere.linux.overlay import Overlay
from elsewhere.sandbox import project, rungs, standing, view
from elsewhere.sandbox.keeping import commands
from elsewhere.sandbox.launching import builder, mechanisms
from elsewhere.sandbox.launching.blanks import Kind
from elsewhere.sandbox.keeping.spec import Spec
from elsewhere.sandbox.launching.mechanisms import groups, make_directories
from elsewhere.sandbox.view import Base, Host, Subject
from elsewhere.storage.state import State

over, steps = sys.argv[1], json.loads(sys.argv[2])
whole = os.geteuid() == 0
state = State.open()
here = project.find(os.getcwd(), os.environ['HOME'], chosen=True)
host = Host.look(os.environ['HOME'], state.path)
frozen, said = [], []
for number, step in enumerate(steps):
    directory = state.room('spare') + f'/stack-{number}'
    os.mkdir(directory, 0o711)
    drawn = view.draw(Subject(host, here), whole_machine=whole)
    if whole and over == 'project':
        extra = view.Layer(here.path, here.path, len(drawn.layers))
        stacked = Overlay(here.path, here.path, f'upper/{extra.number}', f'work/{extra.number}', idmapped=True)
        drawn = dataclasses.replace(drawn, layers=(*drawn.layers, extra), plan=dataclasses.replace(drawn.plan, places=(stacked, *drawn.plan.places)))
    at = '/' if over == 'root' else here.path
    def with_layers(operation):
        return dataclasses.replace(operation, layers=tuple(frozen)) if isinstance(operation, Overlay) and operation.target == at else operation
    plan = dataclasses.replace(drawn.plan, root=with_layers(drawn.plan.root), places=tuple(map(with_layers, drawn.plan.places)))
    assert any(getattr(o, 'layers', ()) for o in plan.operations()) == bool(frozen)
    make_directories(drawn, Base(), directory, rungs.ladder()[0])
    blank = builder.blank(standing.mounts(whole_machine=whole), state.path, Kind(whole), groups=groups(state))
    blank.order(plan, directory)
    blank.built()
    null = os.open('/dev/null', os.O_RDWR)
    outcome = commands.captured(blank.control, Spec(['sh', '-ec', step], {'PATH': os.defpath, 'HOME': os.environ['HOME']}, here.path, ends_sandbox=True), null)
    blank.control.close()
    os.waitpid(blank.builder_pid, 0)
    if blank.sealed['group']:
        cgroups.remove(cgroups.Group(*blank.sealed['group']))
    assert outcome.exit_code == 0, (step, outcome)
    said.append(outcome.stdout.decode())
    upper = next(layer.number for layer in drawn.layers if layer.at == at)
    frozen.insert(0, f'{state.path}/frozen-{number}')
    os.rename(f'{directory}/upper/{upper}', frozen[0])
print(json.dumps(said))
"""


def stack(person: Person, over: str, *steps: str) -> list[str]:
    done = person.shell(person.python, "-c", STACK, over, json.dumps(steps), cwd=person.project)
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("over", ["root", "project"])
def test_two_frozen_layers_and_an_upper(person: Person, over: str) -> None:
    if over == "root" and not person.is_root:
        pytest.skip("an ordinary user cannot overlay / at all")
    before = tree(person.project)
    etc = over == "root"
    said = stack(
        person,
        over,
        # the first layer: something new, something deleted, something changed, a directory replaced
        "echo one > one; rm README.md; echo first >> src/app.py; " + ("rm /etc/passwd-; echo a > /etc/layer; " if etc else ""),
        # the second, on top of it: takes back some of it
        "test ! -e README.md; cat one; rm one; echo second >> src/app.py; rm -r src; mkdir src; echo s > src/only; "
        + ("test ! -e /etc/passwd-; cat /etc/layer; rm /etc/layer; " if etc else ""),
        # the upper: sees both, reads, writes, deletes
        "test ! -e README.md; test ! -e one; ls src; cat src/only .env; echo third > third; rm .env; ls -A; "
        + ("test ! -e /etc/layer; test ! -e /etc/passwd-; echo b > /etc/again; rm /etc/hostname; " if etc else ""),
    )
    assert said[1].startswith("one\n")
    assert said[2].splitlines() == ["only", "s", "KEY=value", ".git", ".gitignore", "link", "src", "third"]
    assert tree(person.project) == before


def test_one_directory_cannot_be_started_twice(person: Person) -> None:
    """The kernel would allow one upper to be mounted twice; our lock does not."""
    code = """
import os
from elsewhere.errors import InUse
from elsewhere.linux import cgroups
from elsewhere.sandbox import project, rungs, standing, view
from elsewhere.sandbox.launching import builder, mechanisms
from elsewhere.sandbox.view import Base, Host, Subject
from elsewhere.storage.state import State
state = State.open()
rung = rungs.ladder()[0]
here = project.find(os.getcwd(), os.environ['HOME'], chosen=True)
host = Host.look(os.environ['HOME'], state.path)
directory = state.room('spare') + '/twice'
os.mkdir(directory, 0o711)
def take(kind):
    return builder.blank(standing.mounts(whole_machine=kind.whole_machine), state.path, kind, groups=mechanisms.groups(state))
first = mechanisms.raise_sandbox(rung, Subject(host, here), state, directory, take)
try:
    mechanisms.raise_sandbox(rung, Subject(host, here), state, directory, take)
except InUse as error:
    print(error.code)
first.control.close()
if first.group:
    cgroups.remove(first.group)
"""
    assert person.sdk(code, check=False).stdout == "sandbox_in_use\n"
