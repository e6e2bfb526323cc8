"""Settings from the front doors: what a project's file may not say by itself, what trust changes, and who cannot give it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from conftest import Person, tree

pytestmark = pytest.mark.one_launcher

HOSTILE = """[sandbox]
backend = "none"
view = "machine"
network = "host"
nested = true
best_effort = true
gpu = true
share = ["~/:rw", "/etc", "/var/run/docker.sock:rw"]
device = ["/dev/mem"]
[limits]
memory = "100%"
pids = 4000000
disk = "1T"
ttl = "365d"
[env]
pass = ["MY_TOKEN", "PLAIN"]
[network]
allow = ["attacker.example"]
preset = ["models"]
forward = ["5432"]
publish = ["8080"]
"""
WIDENING = [
    "network.allow", "network.preset", "network.forward", "network.publish", "sandbox.network", "sandbox.backend", "sandbox.nested", "sandbox.best_effort", "sandbox.gpu", "sandbox.share", "sandbox.device",
    "limits.memory", "limits.pids", "limits.disk", "limits.ttl", "env.pass",
]  # fmt: skip


def settings_of(person: Person, text: str) -> Path:
    file = person.project / "elsewhere.toml"
    file.write_text(text)
    person.own(person.project)
    return file


def value(person: Person, key: str, **more: object) -> tuple[object, str]:
    (found,) = person.json("config", key, **more)["settings"]
    return found["value"], found["source"]


def test_a_project_does_not_get_variables_until_it_is_trusted(person: Person) -> None:
    person.extra.update({"MY_TOKEN": "s3cret", "PLAIN": "plain"})
    settings_of(person, '[env]\npass = ["MY_TOKEN", "PLAIN"]\n')
    for verb in (["run", "--"], ["exec", "fix", "--"]):
        if verb[0] == "exec":
            person.elsewhere("create", "--name", "fix", check=True)
        done = person.elsewhere(*verb, "env")
        assert done.returncode == 0
        assert "s3cret" not in done.stdout
        assert "PLAIN" not in done.stdout
        assert done.stderr.count("env.pass") == 1
        assert "not trusted" in done.stderr
    out = person.sdk("from elsewhere import Sandbox\nwith Sandbox.create() as box: print(box.run('env').stdout)").stdout
    assert "s3cret" not in out
    person.elsewhere("trust", check=True)
    done = person.elsewhere("run", "--", "env")
    assert {"MY_TOKEN=s3cret", "PLAIN=plain"} <= set(done.stdout.splitlines())
    assert "not trusted" not in done.stderr
    assert "s3cret" in person.elsewhere("exec", "fix", "--", "env").stdout
    assert (
        "s3cret" in person.sdk("from elsewhere import Sandbox\nwith Sandbox.create() as box: print(box.run('env').stdout)").stdout
    )


def test_a_document_stays_one_document_when_something_is_ignored(person: Person) -> None:
    settings_of(person, '[env]\npass = ["PLAIN"]\n')
    assert person.json("run", "--", "true")["command"]["exit_code"] == 0


def test_a_hostile_file_widens_nothing_and_everything_of_it_is_reported(person: Person) -> None:
    before = person.json("config")["settings"]
    settings_of(person, HOSTILE)
    found = person.json("config")
    assert [one["value"] for one in found["settings"]] == [one["value"] for one in before]
    assert sorted(one["key"] for one in found["ignored"]) == sorted(WIDENING)
    assert found["trusted"] is False
    assert found["files"] == {"project": str(person.project / "elsewhere.toml"), "user": None}
    done = person.elsewhere("config")
    assert all(key in done.stdout for key in WIDENING)


@pytest.mark.own_launcher
def test_trust_is_bound_to_the_content(person: Person) -> None:
    file = settings_of(person, "[sandbox]\nnested = true\n")
    assert value(person, "sandbox.nested") == (False, "default")
    (told,) = person.json("trust")["projects"]
    assert (told["project"], told["trusted"]) == (str(person.project), True)
    assert [one["key"] for one in told["widens"]] == ["sandbox.nested"]
    assert value(person, "sandbox.nested") == (True, "project")
    file.write_text("[sandbox]\nnested = true\ngpu = true\n")
    assert value(person, "sandbox.nested") == (False, "default")
    assert [one["trusted"] for one in person.json("trust", "--list")["projects"]] == [False]
    person.elsewhere("trust", check=True)
    assert value(person, "sandbox.gpu") == (True, "project")
    assert person.json("trust", "--revoke")["projects"][0]["trusted"] is False
    assert value(person, "sandbox.gpu") == (False, "default")
    assert person.json("trust", "--list") == {"projects": []}
    assert person.json("trust", "--revoke")["error"]["code"] == "not_trusted"


def test_a_clone_does_not_bring_its_trust_along(person: Person) -> None:
    """Neither a state directory inside it, nor the same content at another place, nor a nested project of a trusted one."""
    settings_of(person, "[sandbox]\nnested = true\n")
    person.elsewhere("trust", check=True)
    clone = person.place / "clone"
    person.shell("cp", "-a", person.project, clone)
    person.shell("cp", "-a", person.state / "trust", clone / "trust")
    assert value(person, "sandbox.nested", cwd=clone) == (False, "default")
    inner = person.project / "vendor"
    inner.mkdir()
    (inner / "elsewhere.toml").write_text("[sandbox]\ngpu = true\n")
    person.own(inner)
    assert value(person, "sandbox.gpu", cwd=inner) == (False, "default")


def test_nothing_is_trusted_or_changed_from_inside_a_sandbox(person: Person) -> None:
    file = settings_of(person, "[limits]\npids = 500\n")
    person.elsewhere("create", "--name", "fix", check=True)
    before = tree(person.state / "trust")
    assert before
    program = f"""
        printf '[sandbox]\\nnested = true\\n' > elsewhere.toml
        {person.python} -m elsewhere trust; echo trust=$?
        unset ELSEWHERE_SANDBOX_EXECUTION
        ELSEWHERE_ALLOW_NESTED=1 {person.python} -m elsewhere trust; echo nested=$?
        mkdir -p {person.state}/trust ~/.config/elsewhere
        echo '[sandbox]' > ~/.config/elsewhere/elsewhere.toml; echo 'gpu = true' >> ~/.config/elsewhere/elsewhere.toml
    """
    done = person.elsewhere("exec", "--env", f"PYTHONPATH={person.place}/lib", "fix", "-c", program)
    assert "trust=1" in done.stdout, done.stderr
    assert file.read_text() == "[limits]\npids = 500\n"
    assert tree(person.state / "trust") == before
    assert not (person.home / ".config" / "elsewhere" / "elsewhere.toml").exists()
    assert value(person, "sandbox.nested") == (False, "default")
    assert value(person, "sandbox.gpu") == (False, "default")
    assert value(person, "limits.pids") == (500, "project")
    person.extra["PLAIN"] = "plain"
    inside = "printf '[env]\\npass = [\"PLAIN\"]\\n' > elsewhere.toml"
    person.elsewhere("exec", "fix", "-c", inside, check=True)
    assert "PLAIN" not in person.elsewhere("exec", "fix", "--", "env").stdout


def test_a_link_out_of_the_project_and_a_fifo_are_refused_by_name(person: Person) -> None:
    file = person.project / "elsewhere.toml"
    secret = person.home / "secret"
    secret.write_text("top secret words\n")
    file.symlink_to(secret)
    done = person.elsewhere("run", "--", "true")
    assert (done.returncode, "leads out of the project" in done.stderr) == (2, True)
    assert "top secret" not in done.stderr
    file.unlink()
    os.mkfifo(file)
    done = person.elsewhere("run", "--", "true", timeout=20)
    assert (done.returncode, "not a regular file" in done.stderr) == (2, True)


def test_every_source_has_its_place(person: Person) -> None:
    assert value(person, "limits.pids") == (4096, "default")
    (person.home / ".config" / "elsewhere").mkdir(parents=True)
    (person.home / ".config" / "elsewhere" / "elsewhere.toml").write_text('[limits]\npids = 400\nmemory = "1G"\n')
    person.own(person.home)
    assert value(person, "limits.pids") == (400, "user")
    settings_of(person, '[limits]\npids = 300\nmemory = "2G"\n')
    assert value(person, "limits.pids") == (300, "project")
    assert value(person, "limits.memory") == (1 << 30, "user")
    person.extra["ELSEWHERE_PIDS"] = "350"
    assert value(person, "limits.pids") == (350, "environment")
    person.extra["ELSEWHERE_PIDS"] = "many"
    error = person.json("config")["error"]
    assert (error["code"], "ELSEWHERE_PIDS" in error["message"]) == ("bad_settings", True)


def test_init_writes_a_file_that_changes_nothing(person: Person) -> None:
    before = person.json("config")["settings"]
    written = person.json("init")["file"]
    assert written == str(person.project / "elsewhere.toml")
    assert os.stat(written).st_uid == person.uid
    after = person.json("config")
    assert (after["settings"], after["ignored"]) == (before, [])
    assert person.elsewhere("run", "--", "true").returncode == 0
    assert person.json("init")["error"]["code"] == "settings_exist"
    Path(written).write_text("broken")
    assert person.elsewhere("init", "--force").returncode == 0
    assert person.json("config")["settings"] == before
    assert person.json("init", cwd=person.home)["error"]["code"] == "project_is_home"


@pytest.mark.parametrize(("wanted", "right"), [("limits.memroy", "limits.memory"), ("view", "sandbox.view")])
def test_an_unknown_key_is_answered_with_the_nearest(user: Person, wanted: str, right: str) -> None:
    done = user.elsewhere("config", wanted)
    assert (done.returncode, right in done.stderr) == (2, True)


def test_trust_without_settings_and_for_a_list_of_one_is_refused(user: Person) -> None:
    assert user.json("trust")["error"]["code"] == "no_settings"
    assert user.json("trust", "--list", "--project", ".")["error"]["code"] == "usage"


def test_names_that_are_not_utf8_come_as_bytes(user: Person) -> None:
    project = os.fsencode(user.place) + b"/p\xff"
    os.mkdir(project)
    with open(project + b"/elsewhere.toml", "w") as stream:
        stream.write('[sandbox]\nshare = ["data"]\n')
    if os.geteuid() == 0:
        os.chown(project, user.uid, user.uid)
    done = subprocess.run(
        user.command("trust", "--json"), cwd=project, env=user.environment(), capture_output=True, check=True, **user.identity()
    )
    (told,) = json.loads(done.stdout)["projects"]
    assert "path_b64" in told["project"]
    assert "path_b64" in told["widens"][0]["value"][0]
