"""The Python face of sandboxes that stay: made, found, listed; commands in the background; many threads; and no fork of the host."""

import json
from collections.abc import Iterator

import pytest

from conftest import Person, eventually, tree

pytestmark = pytest.mark.one_launcher


@pytest.fixture
def person(person: Person) -> Iterator[Person]:
    """Whoever makes sandboxes that stay removes them in the end."""
    yield person
    person.elsewhere("rm", "--all", "--force")


def test_create_get_list_and_what_becomes_of_them(person: Person) -> None:
    before = tree(person.project)
    code = """
import os
from datetime import UTC, datetime
from elsewhere import ElsewhereError, Sandbox

def refused(call):
    try:
        call()
    except ElsewhereError as error:
        return error.code
    raise AssertionError('not refused')

with Sandbox.create(name='kept', labels={'a': 'b'}, on_exit='keep', ttl='1h') as box:
    assert (box.name, box.labels, box.project) == ('kept', {'a': 'b'}, os.getcwd())
    assert box.base['kind'] == 'pinned' and box.base['head']
    assert box.mechanism in box.enforced['mechanism']
    box.run('echo one > one').check()
    first = box.id
assert refused(lambda: box.run('true')) == 'sandbox_ended'
assert refused(lambda: box.files) == 'sandbox_ended'
assert refused(lambda: box.changes()) == 'sandbox_ended'
with Sandbox.create() as passing:
    assert {one.id for one in Sandbox.list()} == {first, passing.id}
    assert [one.id for one in Sandbox.list(labels={'a': 'b'})] == [first]
    gone = passing.id
assert refused(lambda: Sandbox.get(gone)) == 'sandbox_not_found'
(found,) = Sandbox.list()
assert (found.id, found.name, found.labels, found.project) == (first, 'kept', {'a': 'b'}, os.getcwd())
assert abs((datetime.now(UTC) - found.created_at).total_seconds()) < 600
for word in ('kept', first, first[:-2], '@last'):
    with Sandbox.get(word) as again:
        assert (again.id, again.run('cat one').stdout) == (first, 'one\\n')
with Sandbox.get('kept') as again:
    again.stop()
    assert refused(lambda: again.run('true')) == 'sandbox_ended'
assert [one.state for one in Sandbox.list()] == ['stopped']
assert Sandbox.list(state='running') == []
with Sandbox.get('kept') as again:
    assert again.run('cat one').stdout == 'one\\n'
    assert [one.state for one in Sandbox.list()] == ['running']
    assert again.changes().added == [os.path.join(os.getcwd(), 'one')]
# Owned ones can be stopped and found again, too.
with Sandbox.create() as box:
    box.run('echo two > two').check()
    box.stop()
with Sandbox.get(box.id, on_exit='discard') as again:
    assert again.run('cat two').stdout == 'two\\n'
assert refused(lambda: Sandbox.get(box.id)) == 'sandbox_not_found'
again = Sandbox.get('kept')
again.remove()
again.remove()
assert Sandbox.list() == []
assert refused(lambda: Sandbox.get('kept')) == 'sandbox_not_found'
assert refused(lambda: Sandbox.get('kept', on_exit='publish')) == 'bad_on_exit'
assert refused(lambda: Sandbox.create(name='a/b')) == 'bad_name'
assert refused(lambda: Sandbox.create(ttl='soon')) == 'bad_option'
# An error in the block is the caller's own, and the sandbox ends all the same.
try:
    with Sandbox.create(name='failing') as box:
        raise KeyError('mine')
except KeyError:
    pass
assert Sandbox.list() == []
print('fine')
"""
    assert person.sdk(code).stdout == "fine\n"
    assert person.json("list")["total"] == 0
    assert tree(person.project) == before
    assert eventually(lambda: not list((person.state / "trash").iterdir()))


def test_commands_in_the_background(person: Person) -> None:
    code = """
import signal, threading
from elsewhere import ElsewhereError, Sandbox
with Sandbox.create() as box:
    with box.start('while read -r word; do echo got $word; echo err $word >&2; done; exit 3') as talk:
        assert talk.running and talk.pid > 1
        lines = talk.stdout()
        talk.send_stdin('one\\n')
        assert next(lines) == b'got one\\n'
        talk.send_stdin(b'two\\n')
        assert next(lines) == b'got two\\n'
        try:
            talk.wait(timeout=0.01)
            raise AssertionError
        except TimeoutError:
            pass
        assert talk.running
        # Whoever waits does not keep others from asking, killing or reading.
        results = []
        waiting = threading.Thread(target=lambda: results.append(talk.wait()))
        waiting.start()
        asked = threading.Thread(target=lambda: results.append(talk.running))
        asked.start()
        asked.join(30)
        assert results == [True], results
        talk.close_stdin()
        waiting.join(30)
        result = results[1]
        assert (result.exit_code, result.reason, result.stdout, result.stderr) == (3, 'exited', 'got one\\ngot two\\n', 'err one\\nerr two\\n')
        assert list(lines) == [] and list(talk.stderr()) == [b'err one\\nerr two\\n']
        assert not talk.running
        assert talk.wait() == result and talk.wait(timeout=1) == result
        talk.kill()
        try:
            talk.send_stdin('late')
            raise AssertionError
        except ElsewhereError as error:
            assert error.code == 'stdin_closed'
    slow = box.start(['sleep', '9001'])
    slow.kill()
    assert (slow.wait(timeout=30).reason, slow.wait().exit_code) == ('signaled', 143)
    slow = box.start('trap "" TERM; echo ready; sleep 9002')
    assert next(slow.stdout()) == b'ready\\n'
    slow.kill(signal.SIGKILL)
    assert slow.wait(timeout=30).exit_code == 137
    late = box.start('sleep 9003', timeout='200ms')
    assert (late.wait(timeout=30).reason, late.wait().exit_code) == ('timeout', 124)
    assert box.start('pwd', cwd='src').wait(30).stdout.endswith('/src\\n')
    assert box.start('echo $X', env={'X': 'y'}).wait(30).stdout == 'y\\n'
    big = box.start('head -c 3000000 /dev/zero')
    assert len(big.wait(30).stdout) == 3000000
    assert sum(map(len, big.stdout())) == 3000000
    for bad, code in ((['no-such'], 'command_not_found'), ([], 'no_command')):
        try:
            box.start(bad)
            raise AssertionError
        except ElsewhereError as error:
            assert error.code == code
    # Let go of, it ends; what others started goes on.
    first, second = box.start('echo a; sleep 9004'), box.start('sleep 9005')
    assert next(first.stdout()) == b'a\\n'
    first.close()
    assert (first.running, first.wait().reason) == (False, 'cancelled')
    assert [line for line in box.run('ps ax -o args').stdout.splitlines() if line.startswith('sleep')] == ['sleep 9005']
    assert b''.join(box.logs(first.id)) == b'a\\n'
    ended = second
print(ended.wait(30).reason)
"""
    assert person.sdk(code).stdout in ("killed\n", "lost\n")
    assert not [words for _, words in person.processes() if "sleep 900" in words]


def test_what_is_detached_goes_on_without_the_program(person: Person) -> None:
    code = """
from elsewhere import Sandbox
with Sandbox.create(name='server', on_exit='keep') as box:
    going = box.start('echo there; sleep 9101', detached=True)
    attached = box.start('sleep 9102')
    assert b''.join(box.logs(going.id)) in (b'', b'there\\n')
    print(going.id)
"""
    request = person.sdk(code).stdout.strip()
    assert eventually(lambda: [one["command"] for one in person.json("ps", "server")["processes"]][-1:] == ["sleep 9101"])
    assert eventually(lambda: not [words for _, words in person.processes() if "sleep 9102" in words])
    assert person.elsewhere("logs", "server", request).stdout == "there\n"
    known = {one["id"]: one["state"] for one in person.json("requests", "server")["requests"]}
    assert (known.pop(request), list(known.values())) == ("running", ["cancelled"])
    code = f"""
from elsewhere import Sandbox
with Sandbox.get('server') as box:
    assert b''.join(box.logs({request!r})) == b'there\\n'
    box.run('pkill -f 9101 || kill $(pgrep -f 9101)')
    assert b''.join(box.logs({request!r}, follow=True)) == b'there\\n'
"""
    person.sdk(code)


def test_files_from_outside(person: Person) -> None:
    code = """
import os
from elsewhere import ElsewhereError, Sandbox
with Sandbox.create() as box:
    files = box.files
    assert files.read_text('README.md') == '# a project\\n'
    files.write('made/deep/file', 'text', mode=0o640)
    assert box.run('cat made/deep/file; stat -c %a made/deep/file').stdout == 'text640\\n'
    files.write('made/deep/file', b'\\x00\\xff')
    assert files.read('made/deep/file') == b'\\x00\\xff'
    assert sorted(entry.name for entry in files.list('made/deep')) == ['file']
    assert files.stat('made/deep/file').size == 2
    assert files.exists('made') and not files.exists('missing')
    files.rename('made/deep/file', 'made/other')
    files.mkdir('made/new/er')
    files.remove('made/deep', recursive=True)
    assert sorted(entry.name for entry in files.list('made')) == ['new', 'other']
    box.run('mkdir -p up/sub; echo 1 > up/sub/one; ln -s sub/one up/link').check()
    target = os.path.join(os.path.expanduser('~'), 'down')
    assert files.download('up', target).files == 2
    assert open(os.path.join(target, 'sub', 'one')).read() == '1\\n'
    assert files.upload(target, 'back').files == 2
    assert box.run('cat back/link').stdout == '1\\n'
    # What the sandbox planted reaches no file of the host and keeps nobody waiting.
    secret = os.path.join(os.path.expanduser('~'), 'secret')
    open(secret, 'w').write('of the host')
    box.run(f'rm -f {secret}; ln -s {secret} planted; ln -s / slash; mkfifo fifo; ln -s /proc/1/root{secret} magic').check()
    codes = []
    for path in ('planted', f'slash{secret}', 'fifo', 'magic', '../../../../../../..' + secret, 'missing'):
        try:
            codes.append(files.read(path))
        except ElsewhereError as error:
            assert path in str(error), error
            codes.append(type(error).__name__)
    assert b'of the host' not in codes, codes
    files.write('planted', 'mine')
    assert open(secret).read() == 'of the host'
print('fine')
"""
    before = tree(person.project)
    assert person.sdk(code).stdout == "fine\n"
    assert tree(person.project) == before


THREADS = """
import asyncio, os, resource, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from elsewhere import Sandbox

def children():
    return [pid for pid in Path(f'/proc/{os.getpid()}/task').glob('*/children') if pid.read_text().strip()]

def check(label):
    assert children() == [], label

def ten(box, thread):
    for n in range(10):
        result = box.run(f'echo {thread}-{n}; echo x > t-{thread}-{n}')
        assert (result.exit_code, result.stdout) == (0, f'{thread}-{n}\\n'), result
        check('run')
    return True

with Sandbox.create(name='shared') as shared, ThreadPoolExecutor(8) as pool:
    check('create')
    assert all(pool.map(lambda thread: ten(shared, thread), range(8)))
    assert len(shared.changes().added) == 80
    def own(thread):
        with Sandbox.create() as box:
            return ten(box, thread) and len(box.changes().added) == 10
    assert all(pool.map(own, range(8)))
    check('several')
    # Created by one thread, left by another.
    moved = pool.submit(Sandbox.create).result()
    with moved:
        assert moved.run('echo hi').stdout == 'hi\\n'

    async def many():
        async def one(n):
            return (await asyncio.to_thread(shared.run, f'echo {n}')).stdout
        return await asyncio.gather(*(one(n) for n in range(20)))
    assert asyncio.run(many()) == [f'{n}\\n' for n in range(20)]
    background = [shared.start(f'echo {n}; exit {n}') for n in range(8)]
    check('start')
    assert list(pool.map(lambda one: one.wait(60).exit_code, background)) == list(range(8))
    for one in background:
        one.close()
check('end')
# A program with many descriptors of its own.
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
if min(4096, hard) > 1200:
    held = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]
    with Sandbox.create() as box:
        assert box.run('echo many').stdout == 'many\\n'
        with box.start('echo back') as one:
            assert one.wait(60).stdout == 'back\\n'
        assert box.files.read_text('README.md') == '# a project\\n'
    with Sandbox.create(name='other') as box:
        assert box.run('echo many').stdout == 'many\\n'
    for fd in held:
        os.close(fd)
assert Sandbox.list() == []
print('fine', len(os.listdir('/proc/self/fd')) < 20, threading.active_count())
"""


def test_threads_tasks_and_many_descriptors(person: Person) -> None:
    """Eight threads in one sandbox and in several, asyncio, and a host process that never gets a child."""
    assert person.elsewhere("run", "--", "true").returncode == 0  # from here on the launcher is there, and nobody's child
    assert person.sdk(THREADS).stdout == "fine True 1\n"


def test_a_launcher_that_died_is_started_again_unnoticed(person: Person) -> None:
    code = """
import os, select, signal, socket, struct
from pathlib import Path
from elsewhere import Sandbox
from elsewhere.sandbox.launching.engine import connect, socket_name

with Sandbox.create(name='stays', on_exit='keep') as box:
    box.run('true').check()
    going = box.start('sleep 9301', detached=True)
assert not Path(f'/proc/self/task/{os.getpid()}/children').read_text()
with connect(os.environ['ELSEWHERE_HOME'], socket_name()) as sock:
    launcher, _, _ = struct.unpack('3i', sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
watch = os.pidfd_open(launcher)
os.kill(launcher, signal.SIGKILL)
select.select([watch], [], [])
with Sandbox.get('stays') as box:
    assert box.run('echo there').stdout == 'there\\n'
with Sandbox.create() as box:
    assert box.run('echo new').stdout == 'new\\n'
print('fine')
"""
    assert person.sdk(code).stdout == "fine\n"


def test_signals_and_handlers_of_the_program_are_its_own(person: Person) -> None:
    """Somebody who reaps their own children, or counts them, is not surprised."""
    code = """
import os, signal
seen = []
signal.signal(signal.SIGCHLD, lambda *_: seen.append(1))
from elsewhere import Sandbox
with Sandbox.create() as box:
    box.run('sh -c true & wait').check()
    box.start('true').wait(30)
try:
    os.waitpid(-1, os.WNOHANG)
    print('a child')
except ChildProcessError:
    print('none', len(seen), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    assert person.elsewhere("run", "--", "true").returncode == 0
    assert person.sdk(code).stdout == "none 0 True\n"


def test_whoever_looks_at_changes_while_they_are_moved_looks_again(person: Person) -> None:
    """Somebody else takes a snapshot, or removes the sandbox, between two looks at its files."""
    code = """
from elsewhere import ElsewhereError, Sandbox
from elsewhere.sandbox import contents
box = Sandbox.get('box')
box.run('echo 1 > new').check()
look = contents.changes_of
def moved(*known):
    contents.changes_of = look
    box.snapshot()
    raise FileNotFoundError(2, 'upper')
contents.changes_of = moved
print([path.rpartition('/')[2] for path in box.changes().added])
other = Sandbox.get('other')
def removed(*known):
    Sandbox.get('other', on_exit='discard').remove()
    raise FileNotFoundError(2, 'upper')
contents.changes_of = removed
try:
    other.changes()
except ElsewhereError as error:
    print(error.code)
"""
    for name in ("box", "other"):
        person.elsewhere("create", "--name", name, check=True)
    assert person.sdk(code).stdout == "['new']\nsandbox_not_found\n"


def test_requests_of_a_program_are_told_once_each(person: Person) -> None:
    code = """
from elsewhere import ElsewhereError, Sandbox
with Sandbox.create(name='told', on_exit='keep') as box:
    box.run('exit 0'); box.run('exit 3'); box.run('sleep 9', timeout=0.05)
    box.start('true').wait(30)
    try: box.run(['no-such'])
    except ElsewhereError: pass
print(box.id)
"""
    box = person.sdk(code).stdout.strip()
    found = [(one["state"], one["reason"], one["exit_code"]) for one in person.json("requests", "told")["requests"]]
    assert found[0] == ("failed", "refused", 127)
    assert found[1:3] == [("completed", "exited", 0), ("failed", "timeout", found[2][2])]
    assert found[3:] == [("failed", "exited", 3), ("completed", "exited", 0)]
    lines = (person.state / "sandboxes" / box / "journal").read_text().splitlines()
    ids = [json.loads(line)["start"]["id"] for line in lines if line.startswith('{"start"')]
    assert len(ids) == len(set(ids)) == 5
    for one in ids:
        ends = [line for line in lines if line.startswith(f"end {one} ") or (line.startswith('{"end"') and one in line)]
        assert len(ends) == 1, ends


def test_a_program_killed_leaves_what_was_to_stay_and_nothing_else(person: Person) -> None:
    code = """
import os
from elsewhere import Sandbox
box = Sandbox.create(name='stays', on_exit='keep')
box.run('echo x > x')
passing = Sandbox.create()
passing.run('echo y > y; sleep 9201 & echo')
going = box.start('sleep 9202')
os.kill(os.getpid(), 9)
"""
    assert person.sdk(code, check=False).returncode == -9
    assert eventually(lambda: [one["name"] for one in person.json("list")["sandboxes"]] == ["stays"])
    assert eventually(lambda: not [words for _, words in person.processes() if "sleep 920" in words])
    assert person.elsewhere("exec", "stays", "--", "cat", "x").stdout == "x\n"
    (request,) = [one for one in person.json("requests", "stays")["requests"] if one["argv"][-1] == "sleep 9202"]
    assert (request["state"], request["reason"]) == ("cancelled", "cancelled")
