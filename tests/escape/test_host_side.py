"""The host's side: verbs that read, copy, list or remove what a sandbox made are not led anywhere else by it, run nothing of it,
and say nothing that it dictates to the caller's terminal. Each test first shows, with plain tools, that the trap works.
"""

import base64
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conftest import Person, eventually, tree
from escape.attempts import somebody
from escape.prelude import Path, json, os, stat, struct, subprocess

pytestmark = pytest.mark.one_launcher

SECRET, PRECIOUS = "s3cret-of-reality", "precious\n"


@dataclass
class Scene:
    """A person, a sandbox of theirs that stays, something precious outside and something hidden at home."""

    person: Person
    box: str

    @property
    def outside(self) -> Path:
        return self.person.place / "outside"

    def inside(self, code: str, *, check: bool = True) -> str:
        """A small program in the sandbox, in its project."""
        done = self.person.elsewhere("exec", self.box, "--", self.person.python, "-I", "-c", code)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def unharmed(self) -> bool:
        return {path.name: path.read_text() for path in self.outside.iterdir()} == {"precious": PRECIOUS}


@pytest.fixture(scope="module", params=["root", "user"])
def scene(request: pytest.FixtureRequest, library: Path) -> Iterator[Scene]:
    with somebody(request.param, library) as person:
        (person.place / "outside").mkdir()
        (person.place / "outside/precious").write_text(PRECIOUS)
        (person.place / "taken").mkdir()
        (person.home / ".ssh").mkdir()
        (person.home / ".ssh/id").write_text(SECRET)
        (person.home / ".netrc").write_text(SECRET)
        (person.home / ".config/gh").mkdir(parents=True)
        (person.home / ".config/gh/hosts.yml").write_text(SECRET)
        for name in ("outside", "taken", "home"):
            person.own(person.place / name)
        yield Scene(person, person.json("create", "--base", "live", "--name", "box")["sandbox"]["id"])


# -- copying ---


def test_a_link_does_not_lead_a_copy_to_what_is_hidden(scene: Scene) -> None:
    person = scene.person
    scene.inside(
        f"import os; os.symlink({str(person.home)!r} + '/.ssh/id', 'key'); os.symlink({str(person.home)!r} + '/.ssh', 'keys')"
    )
    (person.place / "trap").symlink_to(person.home / ".ssh/id")
    assert person.shell("cat", person.place / "trap").stdout == SECRET
    climbing = "/".join([".."] * 30) + str(person.home / ".ssh/id")
    for number, name in enumerate(
        ("key", "keys/id", climbing, str(person.home / ".ssh/id"), "/proc/self/root" + str(person.home / ".ssh/id"), "keys")
    ):
        target = person.place / "taken" / f"out-{number}"
        person.elsewhere("cp", f"{scene.box}:{name}", str(target))
        left = [path for path in (target, *target.rglob("*")) if path.is_file() and not path.is_symlink()]
        assert all(SECRET not in path.read_text(errors="replace") for path in left), name


def test_a_link_does_not_lead_a_copy_to_a_file_of_reality(scene: Scene) -> None:
    person = scene.person
    scene.inside(
        f"import os; os.symlink({str(scene.outside)!r} + '/precious', 'target'); os.symlink({str(scene.outside)!r}, 'targets')"
    )
    (person.place / "new").write_text("harm")
    (person.place / "taken/copy").write_text("")
    (person.place / "link").symlink_to(person.place / "taken/copy")
    shutil.copyfile(person.place / "new", person.place / "link")
    assert (person.place / "taken/copy").read_text() == "harm"
    for target in ("target", "targets/precious", "targets/another", "targets/"):
        person.elsewhere("cp", "--force", str(person.place / "new"), f"{scene.box}:{target}")
    assert scene.unharmed()


def test_a_link_put_in_the_place_of_a_directory_meanwhile_leads_nowhere(scene: Scene) -> None:
    """The sandbox swaps a directory for a link all the time; outside the same trap catches a plain reader soon."""
    person = scene.person
    swap = (
        "import os, sys, time\n"
        "os.makedirs('swap/real', exist_ok=True); open('swap/real/id', 'w').write('harmless')\n"
        "os.symlink(sys.argv[1], 'swap/link')\n"
        "os.rename('swap/real', 'swap/now')\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end and not os.path.exists('swap/enough'):\n"
        "    os.rename('swap/now', 'swap/real'); os.rename('swap/link', 'swap/now')\n"
        "    os.rename('swap/now', 'swap/link'); os.rename('swap/real', 'swap/now')\n"
    )
    hidden = str(person.home / ".ssh")
    words = [person.python, "-I", "-c", swap, hidden]
    (person.place / "harmless").write_text("harmless")
    trap = person.place / "taken"
    caught = subprocess.Popen(words, cwd=trap, stdout=subprocess.PIPE, text=True, **person.identity())
    assert caught.stdout
    assert caught.stdout.readline() == "ready\n"

    def seen() -> bool:
        try:
            return (trap / "swap/now/id").read_text() == SECRET
        except OSError:
            return False

    assert eventually(seen, 60)
    (trap / "swap/enough").touch()
    caught.communicate()
    shutil.rmtree(trap / "swap")

    inside = subprocess.Popen(
        person.command("exec", scene.box, "--", *words),
        cwd=person.project,
        env=person.environment(),
        stdout=subprocess.PIPE,
        text=True,
        **person.identity(),
    )
    assert inside.stdout
    assert inside.stdout.readline() == "ready\n"
    copied = []
    for number in range(8):
        target = trap / f"swapped-{number}"
        person.elsewhere("cp", f"{scene.box}:swap/now/id" if number % 2 else f"{scene.box}:swap", str(target))
        copied += [path.read_text() for path in (target, *target.rglob("id")) if path.is_file() and not path.is_symlink()]
        person.elsewhere("cp", "--force", str(person.place / "harmless"), f"{scene.box}:swap/now/id")
    scene.inside("open('swap/enough', 'w')")
    inside.communicate()
    assert SECRET not in "".join(copied)
    assert (person.home / ".ssh/id").read_text() == SECRET


def test_what_is_no_file_keeps_nobody_waiting(scene: Scene) -> None:
    person = scene.person
    os.mkfifo(person.place / "fifo", 0o666)
    assert person.shell("timeout", "0.3", "cat", person.place / "fifo", check=False).returncode == 124
    scene.inside("import os; os.mkfifo('fifo'); os.makedirs('odd'); os.mkfifo('odd/fifo'); open('odd/file', 'w').write('x')")
    for name in ("fifo", "/dev/zero", "/dev/tty", "/proc/self/mem"):
        done = person.elsewhere("cp", f"{scene.box}:{name}", str(person.place / "taken/none"), timeout=60)
        assert done.returncode in (1, 2), (name, done.stderr)
        assert not (person.place / "taken/none").exists()
    person.elsewhere("cp", f"{scene.box}:odd", str(person.place / "taken/odd"), timeout=60)
    assert [path.name for path in (person.place / "taken/odd").iterdir()] == ["file"]


def test_powers_stay_behind(scene: Scene) -> None:
    """What a sandbox marks as set-user-id, or gives capabilities, is nobody's power outside: neither in its layer nor copied."""
    person = scene.person
    mark = "import os, shutil, struct\nshutil.copy('/bin/sh', 'sh'); os.chmod('sh', 0o6755)\n"
    if person.is_root:
        mark += "os.setxattr('sh', 'security.capability', struct.pack('<IIIII', 0x02000001, 1 << 21, 0, 0, 0))\n"
    scene.inside(mark)
    person.shell(person.python, "-I", "-c", mark, cwd=person.place / "taken")
    control = (person.place / "taken/sh").stat()
    assert control.st_mode & stat.S_ISUID
    assert control.st_uid == person.uid
    person.elsewhere("cp", f"{scene.box}:sh", str(person.place / "taken/copied"), check=True)
    assert not (person.place / "taken/copied").stat().st_mode & (stat.S_ISUID | stat.S_ISGID)
    if os.geteuid() == 0:
        assert "security.capability" not in os.listxattr(person.place / "taken/copied")
    layers = list((person.state / "sandboxes" / scene.box / "upper").rglob("sh"))
    assert layers
    for path in layers:
        assert stat.S_IMODE(person.state.stat().st_mode) == 0o700
        if person.is_root:
            version, *_ = struct.unpack_from("<I", os.getxattr(path, "security.capability"))
            assert path.stat().st_uid == 1 << 30
            assert version >> 24 == 3, "it would count for everybody"


# -- names ---


HOSTILE = [
    b"clear\x1b[2J\x1b[H",
    b"title\x1b]0;owned\x07",
    b"two\nlines",
    b"\nAdded:\n  forged",
    b"back\x08\x08\x08space",
    b"return\rover",
    b"eight-bit\x9b31m",
    b"not-utf8-\xff\xfe",
    b"over\xe2\x80\xaeride",
    b"--force",
    b"-rf",
    b"$(touch pwned)",
    b"a'b\"c`d",
]


def signs_for_terminals(text: str) -> list[str]:
    """What a terminal would obey, or would write backwards."""
    return [
        sign
        for sign in text
        if (ord(sign) < 32 and sign not in "\n\t") or 0x7F <= ord(sign) < 0xA0 or ord(sign) in range(0x202A, 0x202F)
    ]


def test_names_cannot_speak_to_the_terminal(scene: Scene) -> None:
    person = scene.person
    place = person.place / "names"
    make = f"import os\nfor name in {HOSTILE!r}:\n    open(name, 'w').close()\n"
    place.mkdir()
    person.own(place)
    person.shell(person.python, "-I", "-c", make, cwd=place)
    assert "\x1b[2J" in person.shell("find", ".", cwd=place).stdout
    scene.inside("import os; os.makedirs('names'); os.chdir('names')\n" + make)
    for words in (
        ["diff", scene.box],
        ["diff", "--stat", scene.box],
        ["list"],
        ["inspect", scene.box],
        ["ps", scene.box],
        ["requests"],
    ):
        done = person.elsewhere(*words)
        said = done.stdout + done.stderr
        assert done.returncode == 0, done.stderr
        assert not signs_for_terminals(said), said
        assert "\n  forged" not in said
    speak = ("sh", "-c", "sleep 60; :", "\x1b]0;owned\x07\nforged")
    person.elsewhere("exec", "--detach", scene.box, "--", *speak, check=True)
    shown = person.elsewhere("ps", scene.box).stdout
    assert "sleep 60; :" in shown
    assert "forged" in shown
    assert not signs_for_terminals(shown), shown
    assert "\nforged" not in shown
    run = person.elsewhere("run", "--", person.python, "-I", "-c", make)
    assert not signs_for_terminals(run.stdout + run.stderr)
    document = person.json("diff", scene.box)
    assert not (person.project / "pwned").exists()
    added = [one for one in document["changes"]["added"] if isinstance(one, dict)]
    assert any(base64.b64decode(one["path_b64"]).endswith(b"\xff\xfe") for one in added)


@pytest.mark.parametrize("name", ["../../outside", "/etc/cron.d/x", "..", "", "x\x1b[2J\ny", "n" * 300])
def test_what_the_caller_names_is_never_a_path(scene: Scene, name: str) -> None:
    """Names come from issue titles and branches as often as from people."""
    person = scene.person
    before = sorted(os.listdir(person.place)), sorted(os.listdir(person.state)), tree(scene.outside)
    assert person.json("create", "--base", "live", f"--name={name}")["error"]["hint"]
    words = (f"--request={name}", f"--workflow={name}", f"--story={name}", f"--label=key={name}")
    document = person.json("create", "--base", "live", *words)
    if "error" in document:
        assert document["error"]["hint"]
    else:
        made = document["sandbox"]["id"]
        assert "/" not in made
        assert (person.state / "sandboxes" / made).is_dir()
        shown = person.elsewhere("list").stdout + person.elsewhere("inspect", made).stdout
        assert not signs_for_terminals(shown), shown
        assert person.elsewhere("rm", "--force", made).returncode == 0
    assert (sorted(os.listdir(person.place)), sorted(os.listdir(person.state)), tree(scene.outside)) == before


@pytest.mark.parametrize("name", ["../../outside", "../sandboxes/box", "/etc", "", "box/../box"])
def test_what_is_no_id_names_nothing(scene: Scene, name: str) -> None:
    person = scene.person
    for words in (["inspect", name], ["rm", "--force", name], ["exec", name, "--", "true"]):
        assert person.elsewhere(*words).returncode not in (0, 3), words
    assert scene.unharmed()
    assert person.elsewhere("inspect", "box").returncode == 0


# -- a tree that changes its shape ---


def test_a_directory_that_became_a_link_is_not_followed_when_it_is_compared_or_removed(scene: Scene) -> None:
    person = scene.person
    change = f"import os, shutil; shutil.rmtree('src'); os.symlink({str(scene.outside)!r}, 'src'); os.symlink('/', 'all')"
    (person.place / "copy").mkdir()
    (person.place / "copy/link").symlink_to(scene.outside)
    assert [path.name for path in (person.place / "copy/link").iterdir()] == ["precious"]
    box = person.json("create", "--base", "live")["sandbox"]["id"]
    assert person.elsewhere("exec", box, "--", person.python, "-I", "-c", change).returncode == 0
    found = person.json("diff", box)["changes"]
    assert "src" in found["added"] + found["modified"]
    assert not [name for name in found["added"] + found["modified"] if "precious" in str(name)]
    assert person.elsewhere("rm", "--force", box).returncode == 0
    assert scene.unharmed()


def test_a_directory_that_was_renamed_does_not_show_what_is_hidden_after_a_restart(scene: Scene) -> None:
    """The cover is made anew at every start, at the name that reality knows."""
    person = scene.person
    if not person.is_root:
        pytest.skip("an ordinary user's sandbox cannot rename a directory of reality")
    home = str(person.home)
    box = person.json("create", "--base", "live")["sandbox"]["id"]
    moves = (
        f"import os; os.rename({home!r} + '/.config', {home!r} + '/other'); os.mkdir({home!r} + '/deeper')\n"
        f"os.rename({home!r} + '/other', {home!r} + '/deeper/still'); os.rename({home!r}, {home!r} + '-moved')\n"
    )
    assert person.elsewhere("exec", box, "--", person.python, "-I", "-c", moves, cwd="/").returncode == 0
    for _ in range(2):
        assert person.elsewhere("stop", box).returncode == 0
        done = person.elsewhere(
            "exec", box, "-c", f"ls -a {home}-moved/deeper/still {home}-moved; grep -rs {SECRET} {home}-moved {home}; echo end"
        )
        assert done.stdout.endswith("end\n")
        assert "still" in done.stdout
        assert SECRET not in done.stdout
    assert person.shell("grep", "-rs", SECRET, home).stdout
    person.elsewhere("rm", "--force", box)


def test_what_is_hidden_stays_hidden_when_reality_replaces_it(scene: Scene) -> None:
    """An editor saves by renaming a new file over the old one: the kernel takes mounts in other places away for that."""
    person = scene.person
    read = f"cat {person.home}/.netrc {person.home}/.ssh/id; true"
    assert person.elsewhere("exec", scene.box, "-c", read).stdout == ""
    (person.home / ".netrc.new").write_text(SECRET)
    os.rename(person.home / ".netrc.new", person.home / ".netrc")
    shutil.rmtree(person.home / ".ssh")
    (person.home / ".ssh").mkdir()
    (person.home / ".ssh/id").write_text(SECRET)
    person.own(person.home)
    assert person.shell("cat", person.home / ".netrc").stdout == SECRET
    assert SECRET not in person.elsewhere("exec", scene.box, "-c", read).stdout


def test_a_file_that_was_asked_to_be_hidden_stays_hidden_when_reality_replaces_it(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    """The same, outside of home and project."""
    person = scene.person
    if not person.is_root:
        why = "the cover lies on reality's own file there, and the kernel takes it away with the name"
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    secret = person.place / "taken/secret"
    secret.write_text(SECRET)
    person.own(person.place / "taken")
    box = person.json("create", "--base", "live", "--hide", str(secret))["sandbox"]["id"]
    assert SECRET not in person.elsewhere("exec", box, "-c", f"cat {secret}; true").stdout
    (person.place / "taken/new").write_text(SECRET)
    person.own(person.place / "taken")
    os.rename(person.place / "taken/new", secret)
    assert person.shell("cat", secret).stdout == SECRET
    assert SECRET not in person.elsewhere("exec", box, "-c", f"cat {secret}; true").stdout
    assert person.elsewhere("rm", "--force", box).returncode == 0


def test_a_file_that_is_hidden_in_a_share_stays_hidden_when_reality_replaces_it(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    """The same where reality is shown as it is."""
    person = scene.person
    secret = person.place / "shared/secret"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    person.own(secret.parent)
    box = person.json("create", "--base", "live", "--share", str(secret.parent), "--hide", str(secret))["sandbox"]["id"]
    assert SECRET not in person.elsewhere("exec", box, "-c", f"cat {secret}; true").stdout
    (person.place / "shared/new").write_text(SECRET)
    person.own(secret.parent)
    os.rename(person.place / "shared/new", secret)
    shown = person.elsewhere("exec", box, "-c", f"cat {secret}; true").stdout
    assert person.elsewhere("rm", "--force", box).returncode == 0
    box = person.json("create", "--base", "live", "--share", str(secret.parent), "--hide", str(secret))["sandbox"]["id"]
    assert SECRET not in person.elsewhere("exec", box, "-c", f"cat {secret}; true").stdout, "the next one hides it again"
    assert person.elsewhere("rm", "--force", box).returncode == 0
    why = "the cover lies on reality's own file there, and the kernel takes it away with the name"
    request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    assert SECRET not in shown


def test_credentials_that_come_into_being_are_hidden_from_a_sandbox_that_runs(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    person = scene.person
    read = f"cat {person.home}/.aws/credentials; true"  # not before: where overlay found nothing once it looks no more
    (person.home / ".aws").mkdir()
    (person.home / ".aws/credentials").write_text(SECRET)
    person.own(person.home)
    shown = person.elsewhere("exec", scene.box, "-c", read).stdout
    for options in ([], ["--view", "project"]):
        assert person.elsewhere("run", "--discard", *options, "-c", read).stdout == "", "the next one hides it"
    request.applymarker(pytest.mark.xfail(reason="there was nothing to cover when it was started", strict=True))
    assert SECRET not in shown


# -- settings ---


def settings_project(person: Person, name: str) -> Path:
    project = person.place / name
    project.mkdir()
    (project / "file").write_text("x")
    return person.own(project)


def test_settings_that_are_no_settings_are_refused_and_not_shown(scene: Scene) -> None:
    """A link to what only the caller can read, a fifo, a device, something huge: an error that says nothing of the content."""
    person = scene.person
    good = settings_project(person, "settings-good")
    (good / "elsewhere.toml").write_text("")
    assert person.elsewhere("run", "--", "true", cwd=good).returncode == 0
    (person.home / "words").write_text(f'password = "{SECRET}"\n')
    person.own(person.home)
    for number, target in enumerate(
        (str(person.home / ".netrc"), str(person.home / "words"), "/dev/tty", "/", "fifo", "huge", "elsewhere.toml")
    ):
        project = settings_project(person, f"settings-{number}")
        os.mkfifo(project / "fifo", 0o666)
        with (project / "huge").open("wb") as stream:
            stream.truncate(100 << 20)
        (project / "elsewhere.toml").symlink_to(target)
        done = person.elsewhere("run", "--", "true", cwd=project, timeout=60)
        assert done.returncode in (2, 125), (target, done.stdout)
        assert SECRET not in done.stdout + done.stderr, target
        assert len(done.stderr) < 2000
    if person.is_root and Path("/etc/shadow").exists():
        project = settings_project(person, "settings-shadow")
        (project / "elsewhere.toml").symlink_to("/etc/shadow")
        said = person.elsewhere("run", "--", "true", cwd=project).stderr
        assert not any(line.split(":", 1)[0] + ":" in said for line in Path("/etc/shadow").read_text().splitlines())


def test_settings_cannot_hide_what_a_sandbox_needs(scene: Scene) -> None:
    """`hide` of a stranger's project may hide what it likes, but neither /proc nor the project, and not without end."""
    person = scene.person
    project = settings_project(person, "settings-hide")
    (project / "proc").symlink_to("/proc")
    (project / "closed").write_text("x")
    (project / "elsewhere.toml").write_text('[sandbox]\nhide = ["/proc", "proc", "/", "/dev/null", ".", "..", "closed"]\n')
    person.own(project)
    done = person.elsewhere(
        "run", "--discard", "-c", "cat file closed; echo $$ > /dev/null && test -d /proc/self && echo runs", cwd=project
    )
    assert done.stdout == "xruns\n", done.stderr
    assert done.stderr.count("sandbox.hide") == 1
    for path in ("/proc", "/", "/sys/kernel", ".", str(person.place)):
        document = person.json("run", "--hide", path, "--", "true", cwd=project)
        assert document["error"]["code"] == "hide_refused", path
        assert document["error"]["hint"]
    lines = "".join(f'"d{number}",\n' for number in range(4000))
    (project / "elsewhere.toml").write_text(f"[sandbox]\nhide = [\n{lines}]\n")
    document = person.json("run", "--", "true", cwd=project)
    assert document["error"]["code"] == "bad_settings"
    assert "256" in document["error"]["message"]


def test_settings_cannot_show_a_place_that_is_hidden(scene: Scene) -> None:
    """`[base] live` of a stranger's project: a link, a way up, an absolute path to the caller's keys."""
    person = scene.person
    good = settings_project(person, "live-good")
    (good / "data").mkdir()
    (good / "data/seen").write_text("seen")
    (good / "elsewhere.toml").write_text('[base]\nlive = ["data"]\n')
    person.own(good)
    done = person.elsewhere("run", "--base", "pinned", "--discard", "-c", "cat data/seen", cwd=good)
    assert done.stdout == "seen", done.stderr
    hidden = str(person.home / ".ssh")
    for number, value in enumerate(("link", "../home/.ssh", hidden, "real/../../home/.ssh", "link/../.ssh")):
        project = settings_project(person, f"live-{number}")
        (project / "link").symlink_to(hidden)
        (project / "real").mkdir()
        (project / "elsewhere.toml").write_text(f"[base]\nlive = [{json.dumps(value)}]\n")
        person.own(project)
        done = person.elsewhere(
            "run",
            "--base",
            "pinned",
            "--discard",
            "-c",
            f"cat link/id {hidden}/id ../home/.ssh/id .ssh/id real/id; echo end",
            cwd=project,
        )
        assert SECRET not in done.stdout + done.stderr, value
        assert done.returncode in (0, 2, 125), done.stderr


WIDE = """
[sandbox]
view = "machine"
network = "host"
untrusted = false
nested = true
best_effort = true
share = ["{outside}:rw", "{home}/.ssh"]
device = ["/dev/kmsg"]

[limits]
pids = 100000

[env]
pass = ["HARMLESS"]
"""


def test_a_strangers_settings_widen_nothing(scene: Scene) -> None:
    """From a cloned repository, or written by the sandbox itself; the same file counts once it is trusted."""
    person = scene.person
    project = settings_project(person, "settings-wide")
    content = WIDE.format(outside=scene.outside, home=person.home)
    look = f'echo "<$HARMLESS>"; cat {person.home}/.ssh/id; echo harm > {scene.outside}/precious; ls /dev/kmsg; unshare -Ur true && echo nested'
    person.extra["HARMLESS"] = "passed"
    try:
        done = person.elsewhere("run", "--discard", "-c", look, cwd=project)
        assert done.stdout.split() == ["<>"], done.stderr
        box = person.json("create", "--base", "live", cwd=project)["sandbox"]["id"]
        write = f"open('elsewhere.toml', 'w').write({content!r})"
        person.elsewhere("exec", box, "--", person.python, "-I", "-c", write, cwd=project, check=True)
        assert person.elsewhere("exec", box, "-c", look, cwd=project).stdout.split() == ["<>"]
        assert person.elsewhere("stop", box).returncode == 0
        assert person.elsewhere("exec", box, "-c", look, cwd=project).stdout.split() == ["<>"]
        assert person.elsewhere("rm", "--force", box).returncode == 0
        (project / "elsewhere.toml").write_text(content)
        person.own(project)
        done = person.elsewhere("run", "--discard", "-c", look, cwd=project)
        assert set(done.stdout.split()) <= {"<>"}, done.stderr
        assert SECRET not in done.stdout
        assert scene.unharmed()
        (project / "elsewhere.toml").write_text('[env]\npass = ["HARMLESS"]\n')
        person.own(project)
        assert person.elsewhere("run", "--discard", "-c", look, cwd=project).stdout.split() == ["<>"]
        assert person.elsewhere("trust", cwd=project).returncode == 0
        assert person.elsewhere("run", "--discard", "-c", look, cwd=project).stdout.split() == ["<passed>"]
    finally:
        del person.extra["HARMLESS"]


# -- a hostile repository ---


def hostile_repository(person: Person, sentinel: Path) -> Path:
    """Everything in it that git would run, or be led away by, leaves a mark."""
    project = person.place / "hostile"
    project.mkdir()
    person.own(project)

    def git(*words: str, check: bool = True) -> None:
        person.shell("git", *words, cwd=project, check=check)

    mark = f"touch {sentinel}/$(date +%N)"
    git("init", "-q", "-b", "main", ".")
    (project / "file.evil").write_text("content\n")
    (project / "--output=x").write_text("a name like an option\n")
    (project / "-rf").write_text("another\n")
    (project / ".gitattributes").write_text("*.evil filter=evil diff=evil merge=evil\n")
    (project / "up").symlink_to("../outside")
    person.own(project)
    author = ("-c", "user.name=T", "-c", "user.email=t@example.org")
    git(*author, "add", "-A")
    git(*author, "commit", "-qm", "first")
    git("update-index", "--add", "--cacheinfo", "160000," + "1" * 40 + ",module")
    (project / ".gitmodules").write_text(f'[submodule "module"]\n path = module\n url = ext::sh -c "{mark}"\n')
    person.own(project)
    git("add", ".gitmodules")
    git(*author, "commit", "-qm", "second")
    for key in (
        "core.fsmonitor", "core.pager", "core.editor", "core.sshCommand", "core.gitProxy", "core.askPass", "diff.external",
        "filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "diff.evil.textconv", "diff.evil.command", "merge.evil.driver",
        "credential.helper", "gpg.program", "uploadpack.packObjectsHook", "sequence.editor", "interactive.diffFilter",
    ):  # fmt: skip
        git("config", key, f"{mark}; cat #")
    git("config", "alias.status", f"!{mark}")
    git("config", "core.hooksPath", str(project / "hooks"))
    git("config", "core.alternateRefsCommand", mark)
    (project / "hooks").mkdir()
    for directory in (project / "hooks", project / ".git/hooks"):
        directory.mkdir(exist_ok=True)
        for name in (
            "post-checkout",
            "pre-commit",
            "post-index-change",
            "fsmonitor-watchman",
            "reference-transaction",
            "pre-auto-gc",
        ):
            (directory / name).write_text(f"#!/bin/sh\n{mark}\n")
            (directory / name).chmod(0o755)
    person.own(project)
    return project


def test_a_hostile_repository_runs_nothing_and_leads_nowhere(scene: Scene) -> None:
    person = scene.person
    sentinel = person.place / "sentinel"
    sentinel.mkdir()
    person.own(sentinel)
    project = hostile_repository(person, sentinel)
    person.shell("git", "status", cwd=project, check=False)
    assert list(sentinel.iterdir()), "the trap does not work: git status ran nothing"
    shutil.rmtree(sentinel)
    sentinel.mkdir()
    person.own(sentinel)
    before = tree(project)
    boxes = []
    ran = person.elsewhere("run", "--", "sh", "-c", "echo changed > file.evil; rm ./-rf", cwd=project)
    assert ran.returncode == 0, ran.stderr
    for base in (["--base", "live"], ["--base", "pinned"], ["--base-ref", "HEAD"]):
        document = person.json("create", *base, cwd=project)
        assert "sandbox" in document, document
        boxes.append(document["sandbox"]["id"])
        assert person.elsewhere("exec", boxes[-1], "-c", "echo changed > file.evil", cwd=project).returncode == 0
        assert person.elsewhere("diff", boxes[-1], cwd=project).returncode == 0
    for box in boxes:
        assert person.elsewhere("rm", "--force", box, cwd=project).returncode == 0
    assert not list(sentinel.iterdir())
    assert tree(project) == before
    assert scene.unharmed()
    assert not (person.place / "x").exists()


@pytest.mark.parametrize("damage", ["index", "head", "pointer", "objects", "commondir", "worktree"])
def test_a_lying_repository_leads_nowhere(scene: Scene, damage: str) -> None:
    person = scene.person
    project = settings_project(person, f"lying-{damage}")
    person.shell("git", "init", "-q", "-b", "main", ".", cwd=project)
    person.shell("git", "add", "-A", cwd=project)
    person.shell("git", "-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-qm", "x", cwd=project)
    git = project / ".git"
    lies = {
        "index": lambda: (git / "index").write_bytes(b"DIRC\0\0\0\2\xff\xff\xff\xff garbage"),
        "head": lambda: (git / "HEAD").write_text("ref: ../../../home/.netrc\n"),
        "pointer": lambda: [shutil.rmtree(git), git.write_text(f"gitdir: {scene.outside}\n")],
        "objects": lambda: [shutil.rmtree(git / "objects"), (git / "objects").symlink_to(person.home / ".ssh")],
        "commondir": lambda: (git / "commondir").write_text(f"{scene.outside}\n"),
        "worktree": lambda: person.shell("git", "config", "core.worktree", str(scene.outside), cwd=project),
    }
    lies[damage]()
    person.own(project)
    before = tree(project)
    line = f"echo x > file; cat {person.home}/.netrc {person.home}/.ssh/id; rm -rf .git; echo ended"
    base = ["--base-ref", "HEAD"] if damage in ("index", "objects", "worktree") else []
    done = person.elsewhere("run", *base, "--discard", "-c", line, cwd=project)
    if base:
        assert done.returncode in (0, 2, 125), done.stderr
    else:
        assert done.stdout == "ended\n", done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert tree(project) == before
    assert scene.unharmed()


@pytest.mark.parametrize("way", ["pointer", "link", "commondir", "worktree"])
def test_a_strangers_git_opens_no_repository_of_the_caller(scene: Scene, way: str) -> None:
    """Whoever wrote the project wrote its .git, too, and knows where people keep theirs."""
    person = scene.person
    private = settings_project(person, f"private-{way}")
    (private / "secret").write_text(SECRET)
    author = ("-c", "user.name=T", "-c", "user.email=t@example.org")
    for words in (["init", "-q", "-b", "main", "."], ["add", "-A"], [*author, "commit", "-qm", "x"]):
        person.shell("git", *words, cwd=private)
    linked = person.place / f"linked-{way}"
    person.shell("git", "worktree", "add", "-q", str(linked), cwd=private)
    project = settings_project(person, f"stranger-{way}")
    git = private / ".git"
    if way == "commondir":
        (project / ".git").mkdir()
        (project / ".git/HEAD").write_text("ref: refs/heads/main\n")
        (project / ".git/commondir").write_text(f"{git}\n")
    elif way == "link":
        (project / ".git").symlink_to(git)
    else:
        (project / ".git").write_text(f"gitdir: {git}{f'/worktrees/linked-{way}' if way == 'worktree' else ''}\n")
    person.own(project)
    look = f"git --git-dir={git} show main:secret; git show main:secret; ls {git}; true"
    safe = ("git", "-c", "safe.directory=*", f"--git-dir={git}")
    assert person.shell(*safe, "show", "main:secret", cwd=project).stdout == SECRET, "the trap works outside"
    for options in (["--view", "project"], ["--untrusted"]):
        done = person.elsewhere("run", "--discard", *options, "-c", look, cwd=project)
        assert done.stdout == "", done.stderr
        assert str(git) in done.stderr
        assert "does not point back" in done.stderr
    done = person.elsewhere("run", "--discard", "--base-ref", "main", "-c", "cat secret", cwd=project)
    assert done.returncode != 0
    assert SECRET not in done.stdout
    done = person.elsewhere("run", "--discard", "--untrusted", "-c", "git -c safe.directory='*' show HEAD:secret", cwd=linked)
    assert done.stdout == SECRET, "the control: a worktree that the repository knows"
