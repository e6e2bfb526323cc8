"""Who a sandbox is: derived once from workflow, story and request, the same everywhere; and no sandboxes in sandboxes unasked."""

import json
import shlex
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import Person
from elsewhere.sandbox.identity import derive

pytestmark = pytest.mark.one_launcher


@pytest.fixture
def person(person: Person) -> Iterator[Person]:
    """Whoever makes sandboxes that stay removes them in the end."""
    yield person
    person.elsewhere("rm", "--all", "--force")


def error_of(person: Person, *arguments: str, code: int = 1, **more: Any) -> dict[str, Any]:
    done = person.elsewhere(arguments[0], "--json", *arguments[1:], **more)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    error = json.loads(done.stdout)["error"]
    assert error["hint"], error
    return error


def test_the_same_request_is_the_same_sandbox(person: Person) -> None:
    asked = ["--workflow", "release", "--story", "S-1", "--request", "R-1", "--label", "a=b"]
    first = person.json("create", *asked)
    again = person.json("create", *asked)
    assert (first["created"], again["created"]) == (True, False)
    assert first["sandbox"]["id"] == again["sandbox"]["id"]
    box = first["sandbox"]["id"]
    assert box == derive("release", "S-1", "R-1").sandbox_id
    person.elsewhere("exec", box, "-c", "echo kept > kept", check=True)
    # A stopped one is the same one; so is one that somebody else asks for from a program.
    person.json("stop", box)
    assert person.json("create", *asked)["sandbox"]["id"] == box
    code = """
from elsewhere import Sandbox
box = Sandbox.create(workflow='release', story='S-1', request='R-1', labels={'a': 'b'}, on_exit='keep')
print(box.id, box.run('cat kept').stdout)
"""
    assert person.sdk(code).stdout.split() == [box, "kept"]
    for differing, what in (
        (["--name", "other"], "name"),
        (["--label", "a=c"], "labels"),
        (["--base", "live"], "base"),
        (["--base-ref", "HEAD"], "base_ref"),
        (["--ttl", "1h"], "limits.ttl"),
        (["--project", "src"], "project"),
    ):
        error = error_of(person, "create", *asked, *differing)
        assert error["code"] == "identity_in_use", (differing, error)
        assert box in error["message"]
        assert what in error["detail"]["differs"], (differing, error)
    assert person.json("list")["total"] == 1
    # A name that was refused is not taken.
    assert person.json("create", "--name", "other")["created"] is True
    person.json("rm", "--force", box)
    fresh = person.json("create", *asked)
    assert (fresh["created"], fresh["sandbox"]["id"]) == (True, box)
    assert person.elsewhere("exec", box, "--", "test", "-e", "kept").returncode == 1


def test_one_request_asked_by_many_at_once(person: Person) -> None:
    def ask(_: int) -> dict[str, Any]:
        return person.json("create", "--request", "same", "--name", "shared")

    person.json("list")
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    assert all("sandbox" in answer for answer in answers), answers
    assert len({answer["sandbox"]["id"] for answer in answers}) == 1
    assert sum(answer["created"] for answer in answers) == 1
    listing = person.json("list")
    assert (listing["total"], listing["broken"], listing["healed"]) == (1, [], [])
    person.json("rm", "shared")


def test_a_thousand_requests_with_a_hundred_common_characters() -> None:
    common = "x" * 100
    made = [derive(common, common, f"{common}{number}") for number in range(1000)]
    for identity in made:
        assert len(identity.sandbox_id) <= 48
        assert len(identity.compose_project_name) <= 40
    assert len({identity.sandbox_id for identity in made}) == 1000
    assert len({identity.compose_project_name for identity in made}) == 1000
    assert len({derive(f"{common}{n}", common, common).sandbox_id for n in range(1000)}) == 1000
    assert len({derive(common, f"{common}{n}", common).compose_project_name for n in range(1000)}) == 1000


def test_made_up_requests_never_meet(person: Person) -> None:
    ids = {person.json("create", "--base", "live")["sandbox"]["id"] for _ in range(6)}
    assert len(ids) == 6


def test_the_env_file_and_the_environment_agree(person: Person) -> None:
    story = "a story, with 'quotes' \"and\" ünïcode $HOME"
    box = person.json("create", "--workflow", "w f", "--story", story, "--request", "req/1")["sandbox"]
    path = Path(box["path"]) / ".sandbox.env"
    about = path.lstat()
    assert (stat.S_IMODE(about.st_mode), about.st_uid) == (0o600, person.uid)
    lines = path.read_text().splitlines()
    assert lines == sorted(lines)
    file = {}
    for line in lines:
        key, _, value = line.partition("=")
        file[key] = json.loads(value) if value.startswith('"') else value
    read = "import json, os; print(json.dumps(dict(os.environ)))"
    done = person.elsewhere("exec", box["id"], "--", person.python, "-c", read, check=True)
    inside = json.loads(done.stdout)
    assert {key: inside.get(key) for key in file} == file
    assert inside["ELSEWHERE_SANDBOX_EXECUTION"] == "true"
    assert inside["ELSEWHERE_SANDBOX_ID"] == box["id"]
    assert inside["ELSEWHERE_SANDBOX_STORY_ID"] == story
    assert inside["ELSEWHERE_SANDBOX_REPO_ROOT"] == str(person.project)
    assert inside["COMPOSE_PROJECT_NAME"] == box["identity"]["compose_project_name"]
    assert {"ELSEWHERE_SANDBOX_WORKFLOW_ID", "ELSEWHERE_SANDBOX_REQUEST_ID", "ELSEWHERE_SANDBOX_BASE_SHA"} <= set(file)
    head = person.shell("git", "rev-parse", "HEAD", cwd=person.project).stdout.strip()
    assert inside["ELSEWHERE_SANDBOX_BASE_SHA"] == head
    assert "ELSEWHERE_HOME" not in inside
    # The same through every door, and after a restart.
    person.json("stop", box["id"])
    code = f"from elsewhere import Sandbox\nwith Sandbox.get({box['id']!r}) as box: print(box.run([{person.python!r}, '-c', {read!r}]).check().stdout)"
    again = json.loads(person.sdk(code).stdout)
    assert {key: again.get(key) for key in file} == file
    # Nobody can say otherwise.
    error = error_of(person, "exec", "--env", "COMPOSE_PROJECT_NAME=x", box["id"], "--", "true", code=2)
    assert (error["code"], "COMPOSE_PROJECT_NAME" in error["message"]) == ("env_reserved", True)


def test_odd_identities_are_taken_or_refused_and_never_a_path(person: Person) -> None:
    for words in (
        ["--workflow", "../../etc"],
        ["--story", "/"],
        ["--request", "a\nb"],
        ["--workflow", "é" * 300],
        ["--story", "."],
    ):
        box = person.json("create", "--base", "live", *words)["sandbox"]
        assert len(box["id"]) <= 48
        assert Path(box["path"]).parent == person.state / "sandboxes"
        assert set(box["id"]) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert (Path(box["path"]) / ".sandbox.env").read_text().count("\n") == 8
        assert person.elsewhere("exec", box["id"], "-c", "echo $ELSEWHERE_SANDBOX_ID").stdout.strip() == box["id"]


def test_no_sandboxes_in_sandboxes_unless_asked_for(person: Person) -> None:
    box = person.json("create", "--name", "outer")["sandbox"]["id"]
    elsewhere = shlex.join(person.command())
    library = f"PYTHONPATH={shlex.quote(str((person.place / 'lib').resolve()))} ELSEWHERE_HOME=/tmp/state"

    def nested(line: str, *more: str) -> "subprocess.CompletedProcess[str]":
        return person.elsewhere("exec", *more, "outer", "-c", f"cd {person.project} && {library} {line}")

    for verb in (
        "run --json -- true",
        "create --json",
        "exec --json x -- true",
        "start --json x",
        "open --json x",
        "cp --json a x:b",
    ):
        done = nested(f"{elsewhere} {verb}")
        assert done.returncode in (1, 125), (verb, done.stdout, done.stderr)
        error = json.loads(done.stdout)["error"]
        assert (error["code"], box in error["message"]) == ("nested", True), verb
        assert "ELSEWHERE_ALLOW_NESTED=1" in error["hint"]
    code = "from elsewhere import Sandbox\ntry: Sandbox.create()\nexcept Exception as error: print(error.code)"
    assert nested(f"{person.python} -c {shlex.quote(code)}").stdout == "nested\n"
    assert nested(f"{elsewhere} version").returncode == 0
    assert nested(f"{elsewhere} list").returncode == 0

    for said in (["--env", "ELSEWHERE_ALLOW_NESTED=1"], []):
        done = nested(
            f"{'' if said else 'ELSEWHERE_ALLOW_NESTED=1 '}{elsewhere} run --network host --json -c 'echo inner > inner; cat README.md'",
            *said,
        )
        document = json.loads(done.stdout)
        assert "command" in document, document
        assert document["command"]["stdout"] == "# a project\n"
        assert document["changes"]["added"] == ["inner"]
        assert document["sandbox"]["id"] != box
    assert person.elsewhere("exec", "outer", "--", "test", "-e", "inner").returncode == 1
    assert not (person.project / "inner").exists()
    assert person.json("list")["total"] == 1
