"""The copy is the machine: same user, paths, tools, environment; where it departs from the original, it does so as documented."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from conftest import Person, tree

pytestmark = pytest.mark.one_launcher


def inside(person: Person, line: str, **more: object) -> str:
    """What a shell line prints in a sandbox; it must succeed."""
    document = person.json("run", "--discard", "-c", line, **more)
    assert document["command"]["exit_code"] == 0, document["command"]
    return str(document["command"]["stdout"])


# -- the same as outside ---


def test_user_home_directory_and_paths_are_the_same(person: Person) -> None:
    line = "id -u; id -g; echo $HOME; pwd; cat .env; readlink link; ls -a"
    assert inside(person, line) == person.shell("sh", "-c", line, cwd=person.project).stdout


def test_the_working_directory_is_the_callers(person: Person) -> None:
    assert inside(person, "pwd", cwd=person.project / "src") == f"{person.project}/src\n"
    assert inside(person, "pwd", cwd=person.place) == f"{person.place}\n"
    done = person.elsewhere("run", "--project", str(person.project), "--", "pwd", cwd="/")
    assert done.stdout == f"{person.project}\n"


def test_a_chosen_working_directory_lies_in_the_project(person: Person) -> None:
    assert person.elsewhere("run", "--cwd", "src", "--", "pwd").stdout == f"{person.project}/src\n"
    done = person.elsewhere("run", "--cwd", "..", "--", "pwd")
    assert done.returncode == 2
    assert "outside the project" in done.stderr


def test_locale_and_time_zone_are_the_callers(person: Person) -> None:
    person.extra.update({"TZ": "Asia/Kathmandu", "LC_TIME": "C.UTF-8"})
    assert inside(person, "date +%z; echo $LC_TIME") == "+0545\nC.UTF-8\n"


def test_a_virtual_environment_works(person: Person) -> None:
    person.shell(person.python, "-m", "venv", "--without-pip", "venv", cwd=person.project)
    person.extra["VIRTUAL_ENV"] = str(person.project / "venv")
    person.extra["PATH"] = f"{person.project}/venv/bin:{os.environ['PATH']}"
    assert inside(person, "python -c 'import sys; print(sys.prefix)'") == f"{person.project}/venv\n"


def test_git_finds_nothing_changed(person: Person) -> None:
    """Same inode numbers, times and owners: git need not look at a single file again."""
    assert (
        inside(person, "git status --porcelain; git rev-parse HEAD")
        == person.shell("git", "rev-parse", "HEAD", cwd=person.project).stdout
    )


def test_a_commit_inside_stays_inside(person: Person) -> None:
    before = tree(person.project)
    assert "second" in inside(person, "echo x > x; git add x; git commit -qm second; git log --oneline")
    assert tree(person.project) == before


@pytest.mark.parametrize("where", ["/tmp", "/var/tmp", "/dev/shm"])
def test_a_project_in_a_place_that_is_private_inside(person: Person, where: str) -> None:
    """The project is seen at its own path; nothing else of that place is."""
    place = Path(where) / f"elsewhere-test-{os.getpid()}-{person.name}"
    project = place / "deep" / "project"
    project.mkdir(parents=True)
    (place / "neighbour").write_text("n")
    (project / "file").write_text("content")
    person.own(place)
    try:
        private = where == "/tmp" or where == "/dev/shm" or not person.is_root
        document = person.json("run", "-c", "cat file; echo new > new; ls ../..", cwd=project)
        assert document["command"]["stdout"] == "content" + ("deep\n" if private else "deep\nneighbour\n")
        assert document["changes"] == {"added": ["new"], "modified": [], "deleted": []}
        assert sorted(os.listdir(project)) == ["file"]
    finally:
        shutil.rmtree(place)


def test_a_project_behind_a_link(person: Person) -> None:
    (person.place / "by-link").symlink_to(person.project)
    document = person.json("run", "-c", "rm README.md; pwd", cwd=person.place / "by-link")
    assert document["changes"]["deleted"] == ["README.md"]
    assert (person.project / "README.md").exists()


def test_a_linked_worktree(person: Person) -> None:
    """Its repository lies outside the project, and git works in it all the same."""
    outside = person.place / "trees" / "one"
    person.shell("git", "worktree", "add", "-q", "-b", "one", str(outside), cwd=person.project)
    before = tree(person.project)
    document = person.json(
        "run", "-c", "echo x > x; git add x; git commit -qm inside; git status --porcelain; git log --oneline", cwd=outside
    )
    assert document["command"]["exit_code"] == 0, document
    assert "inside" in document["command"]["stdout"]
    assert document["sandbox"]["project"] == str(outside)
    assert tree(person.project) == before


def test_settings_mark_the_project(person: Person) -> None:
    (person.project / "src" / "elsewhere.toml").write_text("")
    assert person.json("run", "--keep", "--", "true", cwd=person.project / "src")["sandbox"]["project"] == f"{person.project}/src"


def test_names_are_looked_up(person: Person) -> None:
    assert inside(person, "getent hosts localhost || grep localhost /etc/hosts")
    assert inside(person, "cat /etc/resolv.conf") == Path("/etc/resolv.conf").read_text()


def test_temporary_places_are_private_and_empty(person: Person) -> None:
    marker = Path(f"/tmp/elsewhere-marker-{os.getpid()}")
    marker.write_text("host")
    try:
        assert inside(person, "ls -A /tmp /dev/shm; touch /tmp/mine /dev/shm/mine /var/tmp/mine") == "/dev/shm:\n\n/tmp:\n"
    finally:
        marker.unlink()
    assert not Path("/tmp/mine").exists()
    assert not Path("/dev/shm/mine").exists()


def test_many_sandboxes_at_once_do_not_see_each_other(person: Person) -> None:
    before = tree(person.project)
    lines = [f"echo {number} > mine; sleep 0.2; cat mine" for number in range(10)]
    running = [
        subprocess.Popen(
            person.command("run", "--discard", "-c", line),
            cwd=person.project,
            env=person.environment(),
            stdout=subprocess.PIPE,
            text=True,
            **person.identity(),
        )
        for line in lines
    ]
    assert [process.communicate()[0] for process in running] == [f"{number}\n" for number in range(10)]
    assert tree(person.project) == before


# -- the environment ---


def test_only_named_variables_go_in(person: Person) -> None:
    person.extra.update({"SECRET_TOKEN": "s3cret", "MINE": "mine", "OTHER": "other", "LANG": "C.UTF-8"})
    (person.place / "vars").write_text("# comment\nFROM_FILE='a b'\nexport ALSO=1\n")
    seen = inside(person, "env", cwd=person.project)
    assert "s3cret" not in seen
    assert "LANG=C.UTF-8" in seen
    done = person.elsewhere("run", "--env", "MINE", "--env", "SET=x=y", "--env-file", str(person.place / "vars"), "--", "env")
    assert {"MINE=mine", "SET=x=y", "FROM_FILE=a b", "ALSO=1"} <= set(done.stdout.splitlines())
    assert "OTHER" not in done.stdout


def test_settings_pass_variables(person: Person) -> None:
    person.extra.update({"BUILD_NUMBER": "12", "FROM_USER": "u", "MY_TOKEN": "t"})
    (person.project / "elsewhere.toml").write_text('[env]\npass = ["BUILD_NUMBER"]\n')
    person.elsewhere("trust", check=True)
    (person.home / ".config/elsewhere").mkdir(parents=True)
    (person.home / ".config/elsewhere/elsewhere.toml").write_text('[env]\npass = ["FROM_USER", "MY_TOKEN"]\n')
    person.own(person.home)
    assert inside(person, "echo $BUILD_NUMBER $FROM_USER $MY_TOKEN") == "12 u t\n"


def test_a_misspelt_setting_is_named(person: Person) -> None:
    (person.project / "elsewhere.toml").write_text("[env]\npas = []\n")
    done = person.elsewhere("run", "--", "true")
    assert done.returncode == 2
    assert "env.pas" in done.stderr
    assert "env.pass" in done.stderr


def test_identity_is_inside_and_cannot_be_overridden(person: Person) -> None:
    document = person.json("run", "--keep", "--", "env")
    seen = dict(line.partition("=")[::2] for line in document["command"]["stdout"].splitlines())
    box = document["sandbox"]
    assert seen["ELSEWHERE_SANDBOX_ID"] == box["id"]
    assert seen["COMPOSE_PROJECT_NAME"] == box["identity"]["compose_project_name"]
    assert seen["ELSEWHERE_SANDBOX_EXECUTION"] == "true"
    assert seen["ELSEWHERE_SANDBOX_BASE_SHA"] == person.shell("git", "rev-parse", "HEAD", cwd=person.project).stdout.strip()
    file = person.state / "sandboxes" / box["id"] / ".sandbox.env"
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    on_disk = dict(line.partition("=")[::2] for line in file.read_text().splitlines())
    assert on_disk
    assert {key: seen[key] for key in on_disk} == on_disk
    for name in ("COMPOSE_PROJECT_NAME", "ELSEWHERE_SANDBOX_ID"):
        done = person.elsewhere("run", "--env", f"{name}=x", "--", "true")
        assert done.returncode == 2
        assert name in done.stderr


def test_what_was_left_out_is_named_without_its_value(person: Person) -> None:
    person.extra["SECRET_TOKEN"] = "s3cret"
    document = person.json("run", "--keep", "--", "true")
    done = person.elsewhere("inspect", "--json", document["sandbox"]["id"])
    assert "SECRET_TOKEN" in json.loads(done.stdout)["sandbox"]["environment"]["left_out"]
    assert "s3cret" not in done.stdout
    assert "s3cret" not in (person.state / "sandboxes" / document["sandbox"]["id"] / "sandbox.json").read_text()


# -- departures of overlay, each with a line in docs/limits.md ---


def test_renaming_a_directory_of_reality(person: Person) -> None:
    """Root's overlay can; an ordinary user's cannot, and says so by EXDEV, which mv understands and git mv does not."""
    document = person.json("run", "-c", "git mv src lib && ls lib")
    assert (document["command"]["exit_code"] == 0) == person.is_root
    if person.is_root:
        assert document["changes"]["added"] == ["lib/app.py", "lib/test_app.py"]
        assert document["changes"]["deleted"] == ["src/app.py", "src/test_app.py"]
    else:
        assert "cross-device" in document["command"]["stderr"].lower()
    moved = person.json("run", "-c", "mv src lib && mkdir new && mv new newer && ls lib")
    assert moved["command"]["exit_code"] == 0
    assert moved["command"]["stdout"] == "app.py\ntest_app.py\n"


def test_a_hard_link_of_reality_breaks_when_it_is_written(person: Person) -> None:
    os.link(person.project / "README.md", person.project / "other-name")
    assert inside(person, "echo new > README.md; cat other-name") == "# a project\n"
    assert inside(person, "echo a > one; ln one two; echo b > one; cat two") == "b\n"


def test_inode_numbers_are_realitys_and_stay(person: Person) -> None:
    line = "stat -c %i README.md src/app.py src; echo x >> README.md; stat -c %i README.md"
    numbers = inside(person, line).split()
    real = [str((person.project / name).stat().st_ino) for name in ("README.md", "src/app.py", "src")]
    assert numbers[:2] == real[:2]
    assert numbers[3] == numbers[0]


def test_a_mapping_for_reading_goes_stale(person: Person) -> None:
    """A descriptor that was opened before the first write follows it; memory that was mapped before does not."""
    code = (
        "import mmap; f = open('README.md', 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); before = m[:];"
        "w = open('README.md', 'r+b'); w.write(b'#!'); w.close();"
        "print(f.read(2), m[:2], open('README.md', 'rb').read(2), m[:] == before)"
    )
    assert person.elsewhere("run", "--discard", "--", person.python, "-c", code).stdout == "b'#!' b'# ' b'#!' True\n"


def test_reality_changing_underneath_shows_where_nothing_was_written(person: Person) -> None:
    code = """
import sys
from elsewhere import Sandbox
with Sandbox.create(base="live") as box:
    box.run('echo mine > README.md').check()
    open('README.md', 'w').write('theirs')
    open('src/app.py', 'w').write('changed later')
    print(box.run('cat README.md src/app.py').stdout)
"""
    assert person.sdk(code).stdout == "mine\nchanged later\n"


def test_ids_above_65535_are_kept(root: Person) -> None:
    big = root.project / "big"
    big.write_text("x")
    os.chown(big, 3_000_000, 4_000_000)
    assert (
        inside(root, "stat -c '%u %g' big; echo y >> big; chown 70000:80000 big; stat -c '%u %g' big; rm big")
        == "3000000 4000000\n70000 80000\n"
    )
    assert big.stat().st_uid == 3_000_000


def test_times_are_kept(person: Person) -> None:
    before = int(time.time()) - 100_000
    os.utime(person.project / "README.md", (before, before))
    assert inside(person, "chmod 600 README.md; stat -c %Y README.md") == f"{before}\n"
