"""What changed is told on every rung of the ladder, while it runs and when it is stopped, and as a patch that git takes."""

import base64
import os
import subprocess
from pathlib import Path

import pytest
from test_ladder import Elsewhere, give_the_hosts_network, needs_fuse, needs_landlock, needs_root

from conftest import Person
from limited import held

WORK = """
e create --name box --base live >/dev/null
e exec box -- sh -c 'echo 1 > new; rm README.md; rm -r src; mkdir src; echo n > src/n; ln -sfn src link; chmod 755 .env; printf "\\0\\1" > blob'
e snapshot box saved >/dev/null
e exec box -- sh -c 'echo 2 >> new; rm blob; echo b > src/m'
"""
TELL = """
e diff box --patch | base64 -w0; echo
e diff box --name-only --from saved | tr '\\n' ' '; echo
e diff box --name-only --to saved | tr '\\n' ' '; echo
"""


def told(stdout: str) -> list[tuple[bytes, str, str]]:
    lines = stdout.splitlines()
    return [(base64.b64decode(lines[at]), lines[at + 1].strip(), lines[at + 2].strip()) for at in range(0, len(lines), 3)]


def applied(person: Person, patch: bytes) -> Path:
    target = person.place / "applied"
    person.shell("cp", "-a", str(person.project), str(target))
    done = subprocess.run(
        ["git", "apply", "--binary"], cwd=target, input=patch, env=person.environment(), capture_output=True, **person.identity()
    )
    assert done.returncode == 0, done.stderr
    return target


def check(person: Person, stdout: str, errors: str) -> None:
    running, stopped = told(stdout)
    assert running == stopped, errors
    patch, since, until = running
    assert since == "blob new src/m"
    assert until == ".env README.md blob link new src/app.py src/n src/test_app.py"
    tree = applied(person, patch)
    assert sorted(os.listdir(tree)) == [".env", ".git", ".gitignore", "link", "new", "src"]
    assert (tree / "new").read_text() == "1\n2\n"
    assert sorted(os.listdir(tree / "src")) == ["m", "n"]
    assert os.readlink(tree / "link") == "src"
    assert os.access(tree / ".env", os.X_OK)


@pytest.mark.parametrize(
    ("mechanism", "taken"),
    [
        ("overlay-idmap", ()),
        ("overlay-userns", ("--overlay-root", "1", "--tmpfs", "STATE")),
        pytest.param("overlay-userns-memory", ("--overlay-root", "1"), marks=pytest.mark.slow),
        pytest.param("overlay-idmap-memory", ("--overlay-state", "STATE"), marks=pytest.mark.slow),
        ("fuse-overlayfs", ("--overlay-root", "2")),
        ("copy-landlock", ("--overlay-root", "2", "--no-fuse")),
    ],
)
def test_changes_are_told_on_every_rung(person: Person, mechanism: str, taken: tuple[str, ...]) -> None:
    needs_root()
    if mechanism.startswith("overlay-idmap") and not person.is_root:
        pytest.skip("only root has the whole machine")
    if mechanism == "fuse-overlayfs":
        needs_fuse()
    if mechanism == "copy-landlock":
        needs_landlock()
        give_the_hosts_network(person)
    host = Elsewhere(person, *(str(person.state) if word == "STATE" else word for word in taken))
    done = host.script(f"{WORK}{TELL}e stop box >/dev/null{TELL}e rm --force box >/dev/null")
    assert done.returncode == 0, (done.stdout, done.stderr)
    check(person, done.stdout, done.stderr)


def test_changes_are_told_of_layers_in_an_image(root: Person) -> None:
    if "disk" not in held(root):
        pytest.skip("nothing holds the disk here")
    script = WORK.replace("--base live", "--base live --disk 20M")
    done = Elsewhere(root).script(f"{script}{TELL}e stop box >/dev/null{TELL}e rm --force box >/dev/null")
    assert done.returncode == 0, (done.stdout, done.stderr)
    check(root, done.stdout, done.stderr)
