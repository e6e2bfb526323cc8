"""kill -9 of whoever promotes, undoes or walks through stages, and of whoever recovers after that; a full disk, a directory that
cannot be written to, a permission that is lost in the middle; somebody who writes to the very files that are being replaced.
Reality is what it was or what it was to be, `promotions` tells which, nothing that anybody wrote is lost, and nothing is left.

`promotion_blows.py` strikes; a failure prints the seed, and with ELSEWHERE_TEST_SEED set to it the same work begins again, with blows
at about the same moments.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from chance import seed_of
from conftest import PATIENCE, Person
from linux.test_ladder import Elsewhere, needs_root

HERE = Path(__file__).parent
APPLYING = {*"prepare shelf stage sync note begin take rmdir add swap mode check settle commit clear end".split()}
STAGING = {*"checking applying verifying passed reversing".split()}
# At which somebody must have been struck; there is no `halfway` where names can be exchanged.
STEPS = {
    "plain": {*APPLYING, "reverse", "return"},
    "commits": APPLYING,
    "stages": {*APPLYING, *STAGING, "moving", "deploying"},
    "checks": {*APPLYING, *STAGING, "checked"},
}


def strike(person: Person, wanted: dict[str, int], named: int) -> set[str]:
    """The names of the steps at which somebody was struck."""
    document = program(person, "promotion_blows.py", json.dumps(wanted), str(named))
    assert document["hits"] == wanted
    return set(document["steps"])


def ready(person: Person) -> Path:
    """Where the programs are: the checkout may lie in root's home."""
    tools = person.place / "tools"
    person.shell("mkdir", "-p", tools, person.place / "worlds")
    for one in ("blows.py", "promotion_blows.py", "promotion_races.py"):
        shutil.copy(HERE / one, tools)
        (tools / one).chmod(0o644)
    return tools


def program(person: Person, name: str, *arguments: str) -> dict[str, Any]:
    """What one of the programs beside this file says in the end."""
    words = person.python, ready(person) / name, str(seed_of()), *arguments
    done = person.shell(*words, cwd=person.place / "worlds", check=False, timeout=500 * PATIENCE)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    print(person.name, document)
    return document


@pytest.mark.parametrize("world", ["plain", "commits", "stages"])
def test_killed_at_some_moments(person: Person, world: str) -> None:
    strike(person, {world: 4}, 1)


@pytest.mark.slow(90)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "count"), [("plain", 220), ("commits", 10), ("stages", 15), ("checks", 5)])
def test_killed_at_five_hundred_moments_and_at_every_step(person: Person, world: str, count: int) -> None:
    names = strike(person, {world: count}, 100)  # as root and as an ordinary user
    missing = STEPS[world] - names
    assert not missing, missing


# -- somebody else writes at the same time --------------------------------------------------------------------------------------


def test_nothing_that_somebody_writes_meanwhile_is_lost(person: Person) -> None:
    race(person, 30)


@pytest.mark.slow(20)
@pytest.mark.timeout(600)
def test_nothing_that_somebody_writes_meanwhile_is_lost_in_many_races(person: Person) -> None:
    found = race(person, 150)
    assert found["in the data for an undo"] > 0, found


def race(person: Person, rounds: int) -> dict[str, int]:
    found = program(person, "promotion_races.py", str(rounds))
    assert sum(found.values()) == rounds
    assert found["in reality"] > rounds / 4, found
    return found


# -- a full disk ----------------------------------------------------------------------------------------------------------------

# It is filled to the last block, and given back a little between the tries: each comes further than the one before.
FULL = r"""
show() { find . -path ./.git -prune -o -printf '%p %y %m %l\n' | sort; find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 md5sum; }
fill() { mkdir -p "$SMALL/fill"; n=0; while head -c 4096 /dev/zero > "$SMALL/fill/$n" 2>/dev/null; do n=$((n+1)); done; }
try() {
  fill; tries=0
  while ! "$@" > "$OUT/document" 2> "$OUT/errors"; do
    cat "$OUT/document" >> "$OUT/documents"
    show > "$OUT/now"; diff "$OUT/before" "$OUT/now"
    tries=$((tries+1)); test $tries -lt 80
    for one in 1 2 3; do rm -f "$SMALL/fill/$n"; n=$((n-1)); done
  done
  rm -r "$SMALL/fill"
}
if test PLACE = project; then mkdir "$SMALL/project"; cd "$SMALL/project"; git init -q .; fi
echo 0 > f; echo 0 > gone; mkdir d; echo 0 > d/1; ln -sfn f link
e create --name box > /dev/null
e exec box -c 'echo 1 > f; rm gone; rm -r d; mkdir -p n/m; for i in 1 2 3 4 5 6; do head -c 9000 /dev/urandom > n/m/$i; done; ln -sfn n link'
e stop box > /dev/null
show > "$OUT/start"; cp "$OUT/start" "$OUT/before"
try e promote --json box
e promotions --json > "$OUT/promotions"
show > "$OUT/before"; if cmp -s "$OUT/start" "$OUT/before"; then exit 9; fi
try e undo --json
show | cmp - "$OUT/start"
e promote --json box > /dev/null
ls "$ELSEWHERE_HOME/journal/unfinished"
e rm --force box > /dev/null
"""


@pytest.mark.parametrize("where", ["project", "state"])
def test_a_full_disk_in_the_middle_changes_nothing(person: Person, where: str) -> None:
    needs_root()
    out, small = person.place / "out", person.place / "small"
    person.shell("mkdir", out, small)
    small = person.state if where == "state" else small
    person.extra.update({"OUT": str(out), "SMALL": str(small)})
    host = Elsewhere(person, "--tmpfs", str(small), "--tmpfs-size", "4m" if where == "state" else "1m")
    assert person.project
    done = host.script(FULL.replace("PLACE", where))
    for name in ("OUT", "SMALL"):
        del person.extra[name]
    tried = (out / "documents").read_text().splitlines() if (out / "documents").exists() else []
    assert done.returncode == 0, (done.stdout, done.stderr, tried[-2:], (out / "errors").read_text())
    assert done.stdout == "", "something is left that was not finished"
    errors = [json.loads(line)["error"] for line in tried]
    assert errors, "it was never full"
    for error in errors:
        assert "space" in error["message"] + error["hint"], error
        assert error["code"] in ("no_room", "state_unusable"), error
    statuses = [one["status"] for one in json.loads((out / "promotions").read_text())["promotions"]]
    assert statuses[-1] == "applied", statuses
    assert set(statuses[:-1]) <= {"failed", "reversed"}, statuses


# -- a permission that is lost --------------------------------------------------------------------------------------------------

# At each step of a promotion and of its undo the project becomes one that cannot be written to, and afterwards as it was. As root
# by a mount, since no mode keeps root out.
LOST = r"""
import json, os, sys
from promotion_blows import CHANGE, described, told, write
from elsewhere import Sandbox
from elsewhere.errors import ElsewhereError
from elsewhere.linux import syscalls as sys_
from elsewhere.operations import promoting, sandboxes, undoing
from elsewhere.operations.promoting import Asked

project = os.getcwd()
if os.geteuid() == 0:
    sys_.mount(project, project, None, sys_.MS_BIND)
    os.chdir("/"); os.chdir(project)
modes = {}

def take_away():
    if os.geteuid() == 0:
        sys_.mount(None, project, None, 32 | sys_.MS_BIND | sys_.MS_RDONLY)  # MS_REMOUNT
        return
    for directory, names, _ in os.walk("."):
        if ".git" in names: names.remove(".git")
        modes[directory] = os.lstat(directory).st_mode & 0o7777
    for directory in reversed(list(modes)):
        os.chmod(directory, modes[directory] & ~0o222)

def give_back():
    if os.geteuid() == 0:
        sys_.mount(None, project, None, 32 | sys_.MS_BIND)
    while modes:
        directory, mode = modes.popitem()
        if os.path.isdir(directory): os.chmod(directory, mode)

for name in ("f", "mode", "gone", "was-file", "moved", "was-link"): write(name, "0\n")
write("both", "".join(f"line {number}\n" for number in range(12)))
for name in ("gone-dir", "was-dir", "dir-mode"):
    os.mkdir(name)
    write(f"{name}/1", "1\n")
with Sandbox.create(".", base="pinned", on_exit="keep") as box: box.run(CHANGE).check()
sandboxes.stop(box.id)
steps, lost, said = [], None, []

def tell(step):
    global lost
    steps.append(step)
    if step == lost:
        lost = None
        take_away()

def forward(): promoting.promote(box.id, Asked(commits=False))
def back(): undoing.undo()

told(tell)
ends = [described(".")]
forward()
ends.append(described("."))
back()
names = list(dict.fromkeys(steps))
for way, before, after in ((forward, *ends), (back, *reversed(ends))):
    for name in names:
        if way is back and described(".") != before: forward()
        lost, code = name, None
        try:
            way()
        except ElsewhereError as error:
            code = error.code
        assert lost is None or name not in steps, name
        lost = None
        give_back()
        last = undoing.promotions()[-1]
        now = described(".")
        said.append((way.__name__, name, code, last.status))
        if code is None:
            assert now == after, said[-1]
            assert last.status == "applied", said[-1]
        else:
            assert now == before, (said[-1], {path: (now.get(path), before.get(path)) for path in {*now, *before} if now.get(path) != before.get(path)})
            assert last.status in ("refused", "reversed", "failed"), said[-1]
            way()
            assert described(".") == after, said[-1]
        if way is forward: back()
        assert way is back or described(".") == ends[0], said[-1]
sandboxes.discard(box.id)
print(json.dumps(said))
"""


@pytest.mark.slow
def test_a_permission_that_is_lost_in_the_middle_changes_nothing(person: Person) -> None:
    needs_root()
    tools, project = ready(person), person.place / "small"
    person.shell("mkdir", project)
    person.shell("git", "init", "-q", ".", cwd=project)
    words = f'cd {project} && PYTHONPATH={tools}:$PYTHONPATH exec {person.python} -c "$LOST"'
    person.extra["LOST"] = LOST
    done = Elsewhere(person).script(words)
    del person.extra["LOST"]
    assert done.returncode == 0, done.stderr
    said = [tuple(one) for one in json.loads(done.stdout)]
    codes = {code for _, _, code, _ in said}
    # To whoever may not write to a directory any more, its mode has changed.
    assert codes <= {None, "not_permitted", "not_reversed", "changed_meanwhile"}, said
    assert {(way, step) for way, step, code, _ in said if code} >= {
        (way, step) for way in ("forward", "back") for step in ("stage", "swap", "take", "add", "rmdir")
    }, said
