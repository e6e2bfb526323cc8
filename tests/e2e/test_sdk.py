"""The Python face: typed, synchronous, safe in a threaded program."""

import pytest

from conftest import Person, tree

pytestmark = pytest.mark.one_launcher


def test_create_run_remove(person: Person) -> None:
    before = tree(person.project)
    code = """
from elsewhere import Sandbox
with Sandbox.create(project='.', base='live') as box:
    result = box.run('echo out; echo err >&2; exit 3')
    assert (result.exit_code, result.reason, result.stdout, result.stderr) == (3, 'exited', 'out\\n', 'err\\n'), result
    assert result.duration > 0
    assert box.run(['sh', '-c', 'echo "$0"', 'a b']).check().stdout == 'a b\\n'
    assert box.run('cat', input='in').stdout == 'in'
    assert box.run('pwd', cwd='src').stdout.endswith('/src\\n')
    assert box.run('echo $X', env={'X': 'y'}).stdout == 'y\\n'
    assert box.run('sleep 60', timeout='200ms').reason == 'timeout'
    box.run('rm README.md; echo new > new').check()
    changes = box.changes()
    assert [p.rsplit('/', 1)[1] for p in changes.added + changes.deleted] == ['new', 'README.md'], changes
    assert changes.summary() == '1 added, 1 deleted'
    assert box.run('cat new').stdout == 'new\\n'
box.remove()
try:
    box.run('true')
except ValueError as error:
    print(error)
"""
    assert "has ended" in person.sdk(code).stdout
    assert person.json("list")["total"] == 0
    assert tree(person.project) == before


def test_keeping(person: Person) -> None:
    code = """
from elsewhere import Sandbox
with Sandbox.create(on_exit='keep') as box:
    box.run('echo x > x')
print(box.id)
"""
    box = person.sdk(code).stdout.strip()
    assert person.json("diff", box)["changes"]["added"] == ["x"]


def test_errors_teach(person: Person) -> None:
    code = """
from elsewhere import ElsewhereError, Sandbox
for call in (
    lambda: Sandbox.create('missing'),
    lambda: Sandbox.create('/'),
    lambda: Sandbox.create(base='frozen'),
    lambda: Sandbox.create(on_exit='publish'),
    lambda: box.run([]),
    lambda: box.run(['no-such']),
    lambda: box.run('true', timeout='soon'),
    lambda: box.run('true', env={'COMPOSE_PROJECT_NAME': 'x'}),
    lambda: box.run('exit 3').check(),
):
    with Sandbox.create() as box:
        try:
            call()
        except ElsewhereError as error:
            print(error.code)
"""
    assert person.sdk(code).stdout.split() == [
        "project_not_found",
        "project_is_root",
        "bad_base",
        "bad_on_exit",
        "no_command",
        "command_not_found",
        "bad_duration",
        "env_reserved",
        "command_failed",
    ]


def test_threads_share_a_sandbox_and_make_their_own(person: Person) -> None:
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
from elsewhere import Sandbox
with Sandbox.create() as shared, ThreadPoolExecutor(8) as pool:
    def one(n):
        with Sandbox.create() as own:
            own.run(f'echo {n} > mine').check()
            both = shared.run(f'echo {n} > shared-{n}; sleep 0.05; echo {n}').stdout, own.run('cat mine').stdout
            return both
    assert list(pool.map(one, range(24))) == [(f'{n}\\n', f'{n}\\n') for n in range(24)]
    assert len(shared.changes().added) == 24
assert threading.active_count() == 1
print('fine')
"""
    assert person.sdk(code).stdout == "fine\n"


def test_a_time_out_takes_one_commands_tree_only(person: Person) -> None:
    """Another command's background process, and one that got itself a session of its own, are told apart."""
    code = """
from elsewhere import Sandbox
with Sandbox.create() as box:
    box.run('sleep 71 & echo').check()
    slow = box.run("setsid sleep 72 & (setsid sh -c 'sleep 73; echo' &) ; sleep 74", timeout=0.3)
    assert slow.reason == 'timeout'
    print(box.run("ps ax | grep -o 'sleep 7[0-9]' | sort -u").stdout)
"""
    assert person.sdk(code).stdout.split("\n")[0] == "sleep 71"


def test_a_forked_child_of_the_program_does_not_disturb(person: Person) -> None:
    code = """
import os
from elsewhere import Sandbox
with Sandbox.create() as box:
    if os.fork() == 0:
        with Sandbox.create() as other:
            assert other.run('echo child').stdout == 'child\\n'
        os._exit(0)
    assert os.wait()[1] == 0
    print(box.run('echo parent').stdout, end='')
"""
    assert person.sdk(code).stdout == "parent\n"


def test_a_program_that_dies_leaves_nothing(person: Person) -> None:
    code = "import os\nfrom elsewhere import Sandbox\nbox = Sandbox.create()\nbox.run('sleep 75 & echo x > x')\nos._exit(0)"
    person.sdk(code)
    from conftest import eventually

    assert eventually(lambda: not [words for _, words in person.processes() if "sleep 75" in words])
    assert eventually(lambda: person.json("list")["total"] == 0)
