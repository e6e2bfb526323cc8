"""A change on its way through stages: it passes, waits, fails and is put back, is interrupted, and goes on."""

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, about_process, tree

pytestmark = pytest.mark.one_launcher

DEPLOY = """#!/bin/sh
set -e
cp -a ../production ../backup
cp -a "$ELSEWHERE_CHANGE/tree/." ../production/
(cd ../production && xargs -0 -r rm -f --) < "$ELSEWHERE_CHANGE/deleted"
echo "$ELSEWHERE_STAGE got $ELSEWHERE_PROMOTION"
test ! -e ../production/breaks-deploy
"""
ROLLBACK = """#!/bin/sh
test -d ../backup || exit 0
mv ../production ../broken-$$
mv ../backup ../production
"""
STAGES = """
[[stages]]
name = "dev"
target = "."
checks = ["test -e README.md", "! grep -rn dev-hates src"]
[[stages]]
name = "staging"
target = { branch = "staging" }
checks = ["! grep -rn staging-hates src", "git rev-parse HEAD"]
[[stages]]
name = "production"
deploy = "./deploy.sh"
rollback = "./rollback.sh"
approve = "person"
checks = ["grep -q return src/app.py"]
"""


class World:
    """A project with three stages, a branch and a production of its own; trusted."""

    def __init__(self, person: Person, stages: str = STAGES) -> None:
        self.person = person
        self.project = person.project
        self.production = person.place / "production"
        self.file = self.project / "elsewhere.toml"
        self.production.mkdir()
        (self.production / "link").symlink_to("nowhere")
        (self.production / "app.py").write_text("as it was\n")
        for name, content in (("deploy.sh", DEPLOY), ("rollback.sh", ROLLBACK)):
            (self.project / name).write_text(content)
            (self.project / name).chmod(0o755)
        person.own(self.production)
        person.own(self.project)
        self.git("add", "-A")
        self.git("commit", "-qm", "scripts")
        self.git("branch", "staging")
        self.say(stages)

    def say(self, stages: str) -> None:
        self.file.write_text(stages)
        self.person.own(self.project)
        self.person.elsewhere("trust", check=True)

    def git(self, *words: str) -> str:
        return self.person.shell("git", *words, cwd=self.project).stdout.strip()

    def tip(self) -> str:
        return self.git("rev-parse", "staging")

    def made(self, line: str, name: str = "box") -> str:
        found = self.person.json("create", "--name", name)["sandbox"]["id"]
        self.person.elsewhere("exec", name, "-c", line, check=True)
        return str(found)

    def promote(self, *options: str, code: int = 0, name: str = "box") -> dict[str, Any]:
        done = self.person.elsewhere("promote", "--json", name, "--yes", *options)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return dict(json.loads(done.stdout))

    def show(self, which: str = "@last") -> dict[str, Any]:
        return dict(self.person.json("promotions", "show", which)["promotion"])

    def statuses(self, which: str = "@last") -> dict[str, str]:
        return {one["name"]: one["status"] for one in self.show(which)["stages"]}

    def before(self) -> tuple[object, ...]:
        """All that stages change, but for when and by which inode."""
        return plain(self.project), self.tip(), plain(self.production)


def plain(path: Path) -> dict[str, tuple[object, ...]]:
    """What stands where: modification times are new where something was put back, and git's own files are git's."""
    here = {place: (*about[:4], about[5]) for place, about in tree(path).items() if "/.git" not in place.removeprefix(str(path))}
    return {place: about if not stat.S_ISDIR(about[0]) else about[:3] for place, about in here.items()}  # type: ignore[call-overload]


GOOD = """echo '# good' >> src/app.py; rm link; printf '\\0\\377' > src/tool; chmod 755 src/tool; ln -s tool src/way
mkdir -m 700 src/empty; mkdir -p src/new/deep; echo new > src/new/deep/file"""


# -- through all of them --------------------------------------------------------------------------------------------------------


def test_a_change_passes_through_all_stages(person: Person) -> None:
    world = World(person)
    tip, production = world.tip(), plain(world.production)
    world.made(GOOD)
    said = world.promote("--to", "production")["promotion"]
    assert said["status"] == "waiting"
    assert world.statuses() == {"dev": "passed", "staging": "passed", "production": "waiting"}
    # dev: the directory itself, with modes, links and deletions
    assert (world.project / "src" / "app.py").read_text().endswith("# good\n")
    assert (world.project / "src" / "tool").read_bytes() == b"\0\xff"
    assert stat.S_IMODE((world.project / "src" / "tool").stat().st_mode) == 0o755
    assert os.readlink(world.project / "src" / "way") == "tool"
    assert stat.S_IMODE((world.project / "src" / "empty").stat().st_mode) == 0o700
    assert (world.project / "src" / "new" / "deep" / "file").read_text() == "new\n"
    assert not (world.project / "link").is_symlink()
    # staging: one commit on the branch, and nothing else of the repository has moved
    assert world.git("rev-parse", "staging^") == tip
    changed = world.git("diff", "--raw", "--no-abbrev", "--no-renames", tip, "staging").splitlines()
    assert {line.split("\t")[1]: line.split()[1] for line in changed} == {
        "link": "000000", "src/app.py": "100644", "src/tool": "100755", "src/way": "120000",
        "src/new/deep/file": "100644",
    }  # fmt: skip
    assert world.git("branch", "--show-current") == "main"
    # production: nothing yet
    assert plain(world.production) == production
    done = person.json("approve", said["id"])["promotion"]
    assert done["status"] == "applied"
    assert world.statuses() == dict.fromkeys(("dev", "staging", "production"), "passed")
    assert (world.production / "src" / "tool").read_bytes() == b"\0\xff"
    assert not (world.production / "link").is_symlink()
    shown = world.show()
    *_, last = shown["stages"]
    assert last["approved"]["uid"] == person.uid
    assert last["approved"]["at"]
    (run,) = last["application"]["runs"]
    assert Path(run["stdout"]).read_text() == f"production got {said['id']}\n"
    assert {(one["stage"], one["when"]) for one in shown["checks"]} == {
        (stage, when) for stage in ("dev", "staging", "production") for when in ("before", "after")
    }
    assert all(one["exit_code"] == 0 for one in shown["checks"])
    (head,) = {
        Path(one["stdout"]).read_text().strip() for one in shown["checks"] if "HEAD" in one["command"] and one["when"] == "after"
    }
    assert head == world.tip(), "what was checked afterwards is what the branch has"
    assert person.json("list")["total"] == 1, "sandboxes of checks that succeeded are gone"


def test_without_a_name_it_goes_to_the_first_and_then_on(person: Person) -> None:
    world = World(person)
    tip = world.tip()
    world.made(GOOD)
    first = world.promote()["promotion"]
    assert (first["status"], world.tip()) == ("applied", tip)
    second = world.promote("--to", "staging")["promotion"]
    assert (second["id"], second["status"]) == (first["id"], "applied")
    assert world.tip() != tip
    assert len([one for one in world.show()["checks"] if one["stage"] == "dev"]) == 4, "what has passed is not walked again"


DEPLOYED = """
[[stages]]
name = "dev"
target = "."
[[stages]]
name = "production"
deploy = "./deploy.sh && rm -rf ../backup"
rollback = "true"
"""


def test_what_is_deployed_has_what_others_wrote_to_it(person: Person) -> None:
    """Also when it is deployed once more, and the sandbox did not touch it since."""
    world = World(person, DEPLOYED)
    text = world.project / "src" / "long"
    text.write_text("".join(f"{number}\n" for number in range(9)))
    person.own(world.project)
    world.made("sed -i s/1/sandbox/ src/long")
    text.write_text(text.read_text().replace("7", "user"))
    merged = "0\nsandbox\n2\n3\n4\n5\n6\nuser\n8\n"
    for again in ("true", "echo again > src/other"):
        person.elsewhere("exec", "box", "-c", again, check=True)
        assert world.promote("--to", "production")["promotion"]["status"] == "applied"
        assert text.read_text() == merged
        assert (world.production / "src" / "long").read_text() == merged
    assert (world.production / "src" / "other").read_text() == "again\n"


def test_after_a_refresh_it_goes_on_from_the_new_base(person: Person) -> None:
    world = World(person, DEPLOYED)
    world.made("echo one > src/new")
    world.promote()
    (world.project / "src" / "new").write_text("two\n")
    person.own(world.project)
    person.elsewhere("exec", "box", "--", "rm", "src/new", check=True)
    person.elsewhere("refresh", "box", check=True)
    person.elsewhere("exec", "box", "-c", "grep two src/new && echo three > src/new", check=True)
    assert world.promote("--dry-run")["promotion"]["stages"][0]["conflicts"] == []
    world.promote()
    assert (world.project / "src" / "new").read_text() == "three\n"


# -- failures -------------------------------------------------------------------------------------------------------------------


def test_a_check_that_fails_before_leaves_the_stage_and_what_follows_untouched(person: Person) -> None:
    asking = (
        f"{person.python} -Ic \"import urllib.request as r; r.urlopen('http://refused.test/')\"; ! grep -rn staging-hates src"
    )
    world = World(person, STAGES.replace('"! grep -rn staging-hates src"', json.dumps(asking)))
    tip, production = world.tip(), plain(world.production)
    world.made("echo '# staging-hates this' >> src/app.py")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # as by the sandbox itself: checks publish nothing
        person.extra["ELSEWHERE_NETWORK_PUBLISH"] = f"{taken.getsockname()[1]}:80"
        error = world.promote("--to", "production", code=4)["error"]
    assert error["code"] == "check_failed"
    assert "staging" in error["message"]
    assert "nothing was done there" in error["message"]
    assert world.statuses() == {"dev": "passed", "staging": "failed", "production": "pending"}
    assert (world.tip(), plain(world.production)) == (tip, production)
    shown = world.show()
    assert shown["status"] == "failed"
    (bad,) = [one for one in shown["checks"] if one["exit_code"]]
    assert "staging-hates this" in Path(bad["stdout"]).read_text()
    assert [(one["kind"], one["what"], one["rule"]) for one in bad["denials"]] == [
        ("network", "refused.test:80", "nothing allows it")
    ]
    said = person.elsewhere("promotions", "show", shown["id"], check=True).stdout
    assert "      denied refused.test:80: nothing allows it → " in said
    patch = (person.state / "journal" / shown["id"] / "change.patch").read_text()
    assert "+# staging-hates this" in patch
    inside = person.elsewhere("exec", bad["sandbox"], "--", "cat", "src/app.py")
    assert "staging-hates" in inside.stdout, "the sandbox of the check is kept as it was"


@pytest.mark.parametrize("stage", ["dev", "staging", "production"])
def test_a_check_that_fails_afterwards_puts_the_stage_back(person: Person, stage: str) -> None:
    """The flag appears when the change was applied, and before it is checked again."""
    world = World(person)
    flag = person.place / "flag"
    text = STAGES.replace('approve = "person"', 'approve = "auto"')
    head, name, rest = text.partition(f'name = "{stage}"')
    world.say(head + name + rest.replace("checks = [", f'checks = ["test ! -e {flag}", ', 1))
    before = dict(zip(("dev", "staging", "production"), world.before(), strict=True))
    world.made(GOOD)
    code = f"""
import os
from elsewhere.errors import CheckFailed
from elsewhere.operations import promoting
def tell(words):
    if words == "{stage}: checks, after":
        open({str(flag)!r}, "w").close()
try:
    promoting.promote("box", promoting.Asked(to="production", agree=lambda _: True), tell=tell)
except CheckFailed as error:
    print(error.exit_code, error.code, error.message.rpartition("; ")[2])
"""
    assert person.sdk(code).stdout == "4 check_failed the stage is as it was\n"
    now = dict(zip(("dev", "staging", "production"), world.before(), strict=True))
    order = list(before)
    for other in order:
        assert (now[other] == before[other]) == (order.index(other) >= order.index(stage)), other
    statuses = world.statuses()
    assert [statuses[other] for other in order[: order.index(stage)]] == ["passed"] * order.index(stage)
    assert statuses[stage] == "failed"
    assert world.show()["status"] == "failed"
    assert not list(world.project.glob(".elsewhere-*"))
    flag.unlink()
    assert world.promote("--to", "production")["promotion"]["status"] == "applied", "it can be tried again"


def test_what_somebody_changed_meanwhile_stays_when_a_stage_is_put_back(person: Person) -> None:
    world = World(person)
    flag = person.place / "flag"
    world.say(STAGES.replace("checks = [", f'checks = ["test ! -e {flag}", ', 1))
    world.made(GOOD)
    code = f"""
from elsewhere.errors import CheckFailed
from elsewhere.operations import promoting
def tell(words):
    if words == "dev: checks, after":
        open({str(flag)!r}, "w").close()
        open("src/tool", "wb").write(b"\\0mine")
        open("src/mine", "w").write("mine")
try:
    promoting.promote("box", promoting.Asked(agree=lambda _: True), tell=tell)
except CheckFailed as error:
    print(error.message.partition("not all could be put back: ")[2])
"""
    said = person.sdk(code).stdout
    assert said.startswith(f"{world.project}/src/tool: ")
    assert said.count(": ") == 1
    assert (world.project / "src" / "tool").read_bytes() == b"\0mine"
    assert (world.project / "src" / "mine").read_text() == "mine"
    assert "good" not in (world.project / "src" / "app.py").read_text()
    assert (world.project / "link").is_symlink()
    assert not (world.project / "src" / "way").is_symlink()


def test_a_deploy_that_fails_is_rolled_back(person: Person) -> None:
    world = World(person)
    production = plain(world.production)
    world.made("echo x > breaks-deploy")
    promotion = world.promote("--to", "production")["promotion"]["id"]
    done = person.elsewhere("approve", "--json", promotion)
    assert done.returncode == 4
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "deploy_failed"
    assert error["message"].endswith("the stage is as it was")
    assert plain(world.production) == production
    runs = world.show()["stages"][2]["application"]["runs"]
    assert [(run["which"], run["exit_code"]) for run in runs] == [("deploy", 1), ("rollback", 0)]


def test_a_rollback_that_fails_is_told(person: Person) -> None:
    world = World(person)
    world.say(STAGES.replace('rollback = "./rollback.sh"', 'rollback = "exit 9"'))
    world.made("echo x > breaks-deploy")
    promotion = world.promote("--to", "production")["promotion"]["id"]
    error = json.loads(person.elsewhere("approve", "--json", promotion).stdout)["error"]
    assert "not all could be put back: 'exit 9' ended with 9" in error["message"]
    assert world.show()["stages"][2]["not_reversed"]


def test_a_conflict_with_the_target_stops_there(person: Person) -> None:
    world = World(person)
    world.made("echo '# ours' > src/app.py")
    world.promote()
    world.git("checkout", "-q", "staging")
    (world.project / "src" / "app.py").write_text("# theirs\n")
    person.own(world.project)
    world.git("commit", "-qam", "theirs")
    world.git("checkout", "-q", "-f", "main")
    tip = world.tip()
    error = world.promote("--to", "staging", code=3)["error"]
    assert error["code"] == "promotion_conflict"
    assert [one["path"] for one in error["detail"]["conflicts"]] == ["src/app.py"]
    assert (world.tip(), world.statuses()["staging"]) == (tip, "refused")
    assert world.promote("--to", "staging", "--ours", "src/app.py")["promotion"]["status"] == "applied"
    assert world.git("show", "staging:src/app.py") == "# ours"


def test_a_choice_has_to_be_about_a_conflict_of_one_of_the_stages(person: Person) -> None:
    world = World(person)
    world.say(STAGES.replace('approve = "person"', 'approve = "auto"'))
    world.made("echo '# ours' > src/app.py; echo 'return' >> src/app.py")
    (world.project / "src" / "app.py").write_text("# theirs\n")
    person.own(world.project)
    for more in ((), ("--dry-run",)):
        error = world.promote("--to", "production", "--ours", "src/app.py", "--theirs", "README.md", *more, code=2)["error"]
        assert (error["code"], error["detail"]["value"]) == ("no_such_conflict", "README.md")
    assert (world.project / "src" / "app.py").read_text() == "# theirs\n"
    (world.project / "deploy.sh").rename(world.project / "later")
    world.promote("--to", "production", "--ours", "src/app.py", code=4)
    assert world.statuses() == {"dev": "passed", "staging": "passed", "production": "failed"}
    (world.project / "later").rename(world.project / "deploy.sh")
    again = world.promote("--to", "production", "--ours", "src/app.py")["promotion"]
    assert again["status"] == "applied", "it was about a stage that has passed"


# -- verified -------------------------------------------------------------------------------------------------------------------


def befores(world: World, stage: str) -> int:
    return len([one for one in world.show()["checks"] if (one["stage"], one["when"]) == (stage, "before")])


@pytest.mark.parametrize("moved", ["nothing", "change's own path", "another path", "the branch"])
def test_what_was_verified_earlier_is_verified_again_if_it_moved(person: Person, moved: str) -> None:
    world = World(person)
    target = "{ branch = 'staging' }" if moved == "the branch" else "'.'"
    world.say(f"[[stages]]\nname = 'one'\ntarget = {target}\nchecks = ['true']\napprove = 'person'\n")
    world.made("sed -i s/add/plus/ src/app.py")
    promotion = world.promote()["promotion"]
    assert (promotion["status"], befores(world, "one")) == ("waiting", 1)
    if moved == "change's own path":
        with (world.project / "src" / "app.py").open("a") as stream:
            stream.write("\n\n# theirs, and merged\n")
    elif moved == "another path":
        (world.project / "README.md").write_text("something that the check looks at\n")
    elif moved == "the branch":
        world.git("branch", "-f", "staging", world.git("commit-tree", "staging^{tree}", "-p", "staging", "-m", "moved"))
    person.json("approve", promotion["id"])
    assert world.show()["status"] == "applied"
    assert befores(world, "one") == (1 if moved == "nothing" else 2)
    assert world.show()["stages"][0]["verified"]["reused"] is (moved == "nothing")


def test_an_approval_is_used_up_by_an_attempt_that_fails(person: Person) -> None:
    world = World(person)
    world.made("echo x > breaks-deploy")
    promotion = world.promote("--to", "production")["promotion"]["id"]
    assert person.elsewhere("approve", promotion).returncode == 4
    assert world.show()["stages"][2]["approved"] is None
    again = world.promote("--to", "production")["promotion"]
    assert (again["id"], again["status"]) == (promotion, "waiting")


def test_an_approval_is_about_what_was_chosen_then(person: Person) -> None:
    world = World(person)
    world.say("[[stages]]\nname = 'one'\ntarget = '.'\napprove = 'person'\n")
    world.made("echo ours > src/app.py")
    (world.project / "src" / "app.py").write_text("theirs\n")
    person.own(world.project)
    promotion = world.promote("--theirs", "src/app.py")["promotion"]["id"]
    approved = f"""
from elsewhere.operations import staging
from elsewhere.promotion import records
from elsewhere.storage.state import State
staging.approve(records.load(State.open(), {promotion!r}))
"""
    person.sdk(approved)  # whoever approved was killed then
    assert world.promote("--ours", "src/app.py")["promotion"]["status"] == "waiting"
    assert (world.project / "src" / "app.py").read_text() == "theirs\n"
    person.sdk(approved)
    assert world.promote("--ours", "src/app.py")["promotion"]["status"] == "applied"
    assert (world.project / "src" / "app.py").read_text() == "ours\n"


# -- what is refused ------------------------------------------------------------------------------------------------------------


def test_commands_on_the_host_need_trust(person: Person) -> None:
    world = World(person)
    before = world.before()
    world.made(GOOD)
    world.file.write_text(STAGES + "# another line\n")
    error = world.promote("--to", "production", code=1)["error"]
    assert error["code"] == "stage_not_trusted"
    assert world.before()[1:] == before[1:]
    assert not (world.project / "src" / "tool").exists(), "nothing was done, not even at the first stage"
    assert world.promote("--to", "staging")["promotion"]["status"] == "applied", "nothing of these needs trust"


def test_what_cannot_be_reached_is_told_before_anything_is_done(person: Person) -> None:
    world = World(person)
    world.made(GOOD)
    for target, code in (
        ('target = "nowhere"', "stage_target_missing"),
        ('target = { branch = "stagin" }', "branch_unknown"),
        ('target = { branch = "main" }', "branch_checked_out"),
        ('target = { repository = "src", branch = "main" }', "no_repository"),
    ):
        world.say(f'[[stages]]\nname = "dev"\ntarget = "."\n[[stages]]\nname = "last"\n{target}\n')
        assert world.promote("--to", "last", code=3 if code == "branch_checked_out" else 1)["error"]["code"] == code
        assert not (world.project / "src" / "tool").exists()
    assert world.promote("--to", "prod", code=1)["error"]["code"] == "no_such_stage"


def test_another_directory_is_a_target_of_its_own(person: Person) -> None:
    world = World(person)
    (world.production / "src").mkdir()
    (world.production / "src" / "app.py").write_bytes((world.project / "src" / "app.py").read_bytes())
    (world.production / "src" / "app.py").chmod(0o644)
    person.own(world.production)
    world.say(
        f'[[stages]]\nname = "www"\ntarget = "{world.production}"\nchecks = ["grep -q plus src/app.py", "test -x src/new"]\n'
    )
    before = plain(world.project)
    world.made("sed -i s/add/plus/ src/app.py; echo new > src/new; chmod 755 src/new")
    world.promote("--to", "www")
    assert "plus" in (world.production / "src" / "app.py").read_text()
    assert (world.production / "src" / "new").read_text() == "new\n"
    assert plain(world.project) == before


def test_a_branch_has_directories_as_long_as_something_is_in_them(person: Person) -> None:
    world = World(person)
    checks = ["test -f new/deep/x", "test ! -e src", "test -f README.md/now/a/directory", "test ! -x link", "test -L back"]
    world.say(f"[[stages]]\nname = 'one'\ntarget = {{ branch = 'staging' }}\nchecks = {json.dumps(checks)}\n")
    before = plain(world.project)
    world.made(
        "mkdir -p new/deep; echo x > new/deep/x; rm -r src; rm README.md; mkdir -p README.md/now/a; echo > README.md/now/a/directory;"
        " rm link; echo x > link; ln -s new/deep/x back"
    )
    assert world.promote()["promotion"]["status"] == "applied"
    assert plain(world.project) == before
    assert "README.md/now/a/directory" in world.git("ls-tree", "-r", "--name-only", "staging").splitlines()


def test_an_undo_takes_all_stages_back(person: Person) -> None:
    world = World(person)
    world.say(STAGES.replace('approve = "person"', 'approve = "auto"'))
    before = world.before()
    world.made(GOOD)
    promotion = world.promote("--to", "production")["promotion"]
    assert promotion["status"] == "applied"
    assert all(one != other for one, other in zip(world.before(), before, strict=True))
    assert person.json("undo", promotion["id"])["promotion"]["status"] == "applied"
    assert world.before() == before
    assert world.statuses(promotion["id"]) == dict.fromkeys(("dev", "staging", "production"), "undone")


def test_an_undo_that_cannot_take_one_stage_back_goes_on_with_the_others_and_can_be_repeated(person: Person) -> None:
    world = World(person)
    flag = person.place / "flag"
    stages = STAGES.replace('approve = "person"', 'approve = "auto"')
    world.say(stages.replace('"./rollback.sh"', f'"test ! -e {flag} && ./rollback.sh"'))
    before = world.before()
    world.made(GOOD)
    promotion = world.promote("--to", "production")["promotion"]["id"]
    flag.touch()
    done = person.elsewhere("undo", "--json", promotion)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (4, "rollback_failed")
    assert world.before()[:2] == before[:2]
    assert world.before()[2] != before[2]
    assert world.statuses(promotion) == {"dev": "undone", "staging": "undone", "production": "passed"}
    assert world.show(promotion)["status"] == "failed"
    assert world.show(promotion)["stages"][2]["not_reversed"]
    flag.unlink()
    assert person.json("undo", promotion)["promotion"]["status"] == "applied"
    assert world.before() == before
    assert world.show(promotion)["status"] == "undone"
    assert world.show(promotion)["stages"][2]["not_reversed"] is None
    assert json.loads(person.elsewhere("undo", "--json", promotion).stdout)["error"]["code"] == "not_applied"


def test_what_is_deployed_is_not_deployed_again_and_stands_until_its_own_undo(person: Person) -> None:
    stages = DEPLOYED.replace("./deploy.sh && rm -rf ../backup", "mkdir ../live && echo >> ../runs")
    world = World(person, stages.replace('rollback = "true"', 'rollback = "rm -rf ../live"'))
    live, runs = person.place / "live", person.place / "runs"
    before = plain(world.project)
    world.made(GOOD)
    first = world.promote("--to", "production")["promotion"]["id"]
    second = world.promote("--to", "production")["promotion"]
    assert (second["status"], second["id"] != first, runs.read_text()) == ("applied", True, "\n")
    assert [one["application"] for one in world.show()["stages"]] == [{"kind": "nothing"}] * 2
    person.json("undo", second["id"])
    assert live.is_dir(), "the first one still counts"
    assert world.statuses(second["id"]) == {"dev": "undone", "production": "undone"}
    world.promote("--to", "production")
    assert person.json("undo")["promotion"]["undoes"] == first
    assert not live.exists()
    assert plain(world.project) == before
    world.promote("--to", "production")
    assert live.is_dir(), "what had nothing to bring does not stand for what was undone"
    assert (world.project / "src" / "tool").exists()


def test_an_undo_rolls_back_what_could_not_be_rolled_back_when_it_failed(person: Person) -> None:
    """Also if the change was tried again meanwhile, and did not come as far as to deploy."""
    world = World(person)
    flag = person.place / "flag"
    flag.touch()
    world.say(STAGES.replace('rollback = "./rollback.sh"', f'rollback = "test ! -e {flag} && ./rollback.sh"'))
    before = world.before()
    world.made("echo x > breaks-deploy")
    promotion = world.promote("--to", "production")["promotion"]["id"]
    assert person.elsewhere("approve", promotion).returncode == 4
    assert world.promote("--to", "production")["promotion"]["status"] == "waiting"
    done = person.elsewhere("undo", "--json", promotion)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (4, "rollback_failed")
    assert world.before()[2] != before[2]
    flag.unlink()
    person.json("undo", promotion)
    assert world.before() == before
    assert world.show(promotion)["status"] == "undone"


def test_an_undo_asks_about_what_others_changed_at_a_stage_that_failed(person: Person) -> None:
    world = World(person)
    flag = person.place / "flag"
    world.say(STAGES.replace("checks = [", f'checks = ["test ! -e {flag}", ', 1))
    world.made(GOOD)
    code = f"""
from elsewhere.errors import CheckFailed
from elsewhere.operations import promoting
def tell(words):
    if words == "dev: checks, after":
        open({str(flag)!r}, "w").close()
        open("src/tool", "wb").write(b"\\0mine")
try:
    promoting.promote("box", promoting.Asked(agree=lambda _: True), tell=tell)
except CheckFailed as error:
    print(error.code)
"""
    assert person.sdk(code).stdout == "check_failed\n"
    done = person.elsewhere("undo", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "undo_conflict")
    person.json("undo", "--ours", "src/tool")
    assert not (world.project / "src" / "tool").exists()
    assert world.show(world.show()["undoes"])["stages"][0]["not_reversed"] is None


def test_an_undo_goes_by_what_is_written_when_it_is_its_turn(person: Person) -> None:
    world = World(person, DEPLOYED)
    world.made(GOOD)
    promotion = world.promote("--to", "production")["promotion"]["id"]
    code = f"""
from elsewhere.errors import Refused
from elsewhere.operations import undoing
from elsewhere.promotion import records
from elsewhere.storage.state import State
stale = records.load(State.open(), {promotion!r})
undoing.undo({promotion!r})
records.find = lambda *_: stale
try:
    undoing.undo({promotion!r})
except Refused as error:
    print(error.code)
"""
    assert person.sdk(code, cwd=world.project).stdout == "not_applied\n"


def test_nobody_approves_what_does_not_wait(person: Person) -> None:
    world = World(person)
    world.made(GOOD)
    promotion = world.promote()["promotion"]["id"]
    done = person.elsewhere("approve", "--json", promotion)
    assert json.loads(done.stdout)["error"]["code"] == "not_waiting"


# -- commands again -----------------------------------------------------------------------------------------------------------


def test_each_attempt_to_run_commands_again_is_one_of_its_own(person: Person) -> None:
    world = World(person, '[[stages]]\nname = "dev"\ntarget = "."\n')
    stop, text = person.place / "stop", world.project / "text"
    text.write_text("1\n2\n3\n4\n5\n")
    person.own(text.parent)
    world.made(f"sed -i s/1/one/ text; test ! -e {stop}")
    stop.touch()
    first = world.promote("--replay", code=4)["error"]["detail"]["promotion"]
    assert text.read_text() == "1\n2\n3\n4\n5\n"
    text.write_text("1\n2\n3\n4\nfive\n")
    assert world.promote("--replay", code=4)["error"]["detail"]["promotion"] == first
    assert text.read_text() == "1\n2\n3\n4\nfive\n"
    # nobody has asked for commands
    done = world.promote()["promotion"]
    assert (done["kind"], done["checks"], done["id"] == first) == ("promote", [], False)
    assert text.read_text() == "one\n2\n3\n4\nfive\n"


# -- interrupted ----------------------------------------------------------------------------------------------------------------

KILL = """
import os, signal, sys
from elsewhere.operations import promoting, staging
stage, wanted = sys.argv[1:]
here = [""]
walk = staging.walk
def step(name):
    if (here[0], name) == (stage, wanted):
        os.kill(os.getpid(), signal.SIGKILL)
def tell(words):
    if words.endswith(": checks, before"):
        here[0] = words.partition(":")[0]
staging.walk = lambda *arguments: walk(*arguments, step=step)
promoting.promote("box", promoting.Asked(to="production", agree=lambda _: True), tell=tell)
"""
POINTS = [("dev", "swap"), ("staging", "verifying"), ("production", "passed")]
FURTHER_POINTS = [
    ("dev", "applying"), ("dev", "begin"), ("dev", "commit"), ("dev", "verifying"), ("dev", "passed"),
    ("staging", "checked"), ("staging", "applying"), ("staging", "moving"), ("staging", "passed"),
    ("production", "applying"), ("production", "deploying"), ("production", "verifying"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "step"), [*POINTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in FURTHER_POINTS)])
def test_a_stage_that_was_interrupted_is_as_it_was(person: Person, stage: str, step: str) -> None:
    world = World(person)
    world.say(STAGES.replace('approve = "person"', 'approve = "auto"'))
    before = dict(zip(("dev", "staging", "production"), world.before(), strict=True))
    world.made(GOOD)
    (person.place / "kill.py").write_text(KILL)
    done = person.shell(person.python, person.place / "kill.py", stage, step, check=False, cwd=world.project)
    assert done.returncode == -9, (done.returncode, done.stderr)
    statuses = world.statuses()  # whoever looks puts it back
    now = dict(zip(("dev", "staging", "production"), world.before(), strict=True))
    order = list(before)
    for other in order:
        passed = order.index(other) < order.index(stage)
        assert (now[other] != before[other]) == passed, other
        assert (statuses[other] == "passed") == passed
    assert statuses[stage] in ("reversed", "pending")
    assert world.show()["status"] == "reversed"
    assert not list(world.project.glob(".elsewhere-*"))
    assert world.promote("--to", "production")["promotion"]["status"] == "applied"


def test_what_others_changed_at_a_stage_that_was_interrupted_is_told(person: Person) -> None:
    world = World(person)
    world.made(GOOD)
    (person.place / "kill.py").write_text(KILL)
    done = person.shell(person.python, person.place / "kill.py", "dev", "commit", check=False, cwd=world.project)
    assert done.returncode == -9, (done.returncode, done.stderr)
    (world.project / "src" / "app.py").write_text("somebody else's\n")
    (dev, *_) = world.show()["stages"]
    assert dev["status"] == "reversed"
    assert dev["not_reversed"].startswith(f"{world.project}/src/app.py: somebody changed it meanwhile (what was there before is ")
    kept = Path(dev["not_reversed"].rpartition(" ")[2].rstrip(")"))
    assert kept.read_text().startswith("def add")


@pytest.mark.parametrize(
    "point", ["swap", *(pytest.param(one, marks=pytest.mark.slow) for one in ("reversing", "begin", "commit", "clear", "end"))]
)
def test_what_is_put_back_is_put_back_even_if_that_is_interrupted(person: Person, point: str) -> None:
    """The first time by whoever failed, the second time by whoever comes next."""
    world = World(person)
    flag = person.place / "flag"
    world.say(STAGES.replace("checks = [", f'checks = ["test ! -e {flag}", ', 1))
    before = world.before()
    world.made(GOOD)
    (person.place / "kill.py").write_text(f"""
import os, signal, sys
from elsewhere.operations import promoting, recovering, staging
from elsewhere.promotion import restoring
from elsewhere.storage.state import State
back = []
def step(name):
    back.extend([name] if name == "reversing" else [])
    if back and name == {point!r}:
        os.kill(os.getpid(), signal.SIGKILL)
def tell(words):
    if words == "dev: checks, after":
        open({str(flag)!r}, "w").close()
walk, recover = staging.walk, restoring.recover
staging.walk = lambda *arguments: walk(*arguments, step=step)
restoring.recover = lambda *arguments: recover(*arguments, step=step)
if sys.argv[1:]:
    recovering.recover(State.open())
else:
    promoting.promote("box", promoting.Asked(to="production", agree=lambda _: True), tell=tell)
""")
    first = person.shell(person.python, person.place / "kill.py", check=False, cwd=world.project)
    assert first.returncode == -9, first.stderr
    again = person.shell(person.python, person.place / "kill.py", "again", check=False, cwd=world.project)
    assert again.returncode in (0, -9), again.stderr
    assert world.statuses() == {"dev": "failed", "staging": "pending", "production": "pending"}
    assert world.show()["status"] == "failed"
    assert world.before() == before
    assert not list(world.project.glob(".elsewhere-*"))


def test_a_deploy_that_goes_on_without_us_is_ended_before_it_is_rolled_back(person: Person) -> None:
    world = World(person)
    (world.project / "deploy.sh").write_text(f"#!/bin/sh\necho $$ > {person.place}/pid\nsleep 67\ntouch ../production/late\n")
    person.own(world.project)
    world.git("commit", "-qam", "slow")
    world.say(STAGES.replace('approve = "person"', 'approve = "auto"'))
    production = plain(world.production)
    world.made("echo x > src/x")
    code = f"""
import os, signal, threading, time
from elsewhere.operations import promoting
def kill():
    while not os.path.exists({str(person.place / "pid")!r}) or not open({str(person.place / "pid")!r}).read().strip():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
promoting.promote("box", promoting.Asked(to="production", agree=lambda _: True))
"""
    assert person.sdk(code, check=False).returncode == -9
    pid = (person.place / "pid").read_text().strip()
    assert "ELSEWHERE_STAGE=production" in about_process(int(pid), "environ"), "it went on by itself"
    assert world.statuses()["production"] == "reversed"
    assert "ELSEWHERE_STAGE" not in about_process(int(pid), "environ"), "dead, and perhaps not buried yet"
    assert plain(world.production) == production
    assert [run["which"] for run in world.show()["stages"][2]["application"]["runs"]] == ["rollback"]


KILL_PLAIN = """
import os, signal
from elsewhere.operations import promoting
from elsewhere.promotion import applying
apply, swaps = applying.apply, []
def step(name):
    swaps.extend([name] if name == "swap" else [])
    if len(swaps) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
applying.apply = lambda directory, operations: apply(directory, operations, step)
promoting.promote("box", promoting.Asked())
"""


def half_moved(person: Person) -> World:
    """Whoever promoted was killed between two files."""
    world = World(person, "")
    world.made("echo new > README.md; echo new > src/app.py")
    assert person.sdk(KILL_PLAIN, check=False, cwd=world.project).returncode == -9
    assert {(world.project / name).read_text() == "new\n" for name in ("README.md", "src/app.py")} == {True, False}
    return world


def unfinished(person: Person) -> Path:
    (name,) = os.listdir(person.state / "journal" / "unfinished")
    return person.state / "journal" / name


def test_a_project_that_is_gone_is_in_nobodys_way_and_is_put_back_when_it_returns(person: Person) -> None:
    world = half_moved(person)
    other, moved = person.place / "other", person.place / "moved"
    other.mkdir()
    person.own(other)
    world.project.rename(moved)
    journal = unfinished(person)
    for words in (("create", "--name", "another"), ("list",), ("janitor",)):
        person.json(*words, cwd=other)
    person.extra["ELSEWHERE_PROMOTION_KEEP"] = "1ms"
    person.elsewhere("exec", "another", "-c", "echo 1 > a", cwd=other, check=True)
    person.json("promote", "another", cwd=other)  # what is too old goes now
    shown = person.json("promotions", "show", journal.name, cwd=other)["promotion"]
    assert shown["status"] == "reversed"
    assert str(journal) in shown["note"]
    moved.rename(world.project)
    person.json("list", cwd=other)
    assert "new" not in (world.project / "README.md").read_text() + (world.project / "src" / "app.py").read_text()
    assert not list(world.project.glob(".elsewhere-*"))
    assert not os.listdir(person.state / "journal" / "unfinished")


@pytest.mark.parametrize("broken", ["1/entries.json", "promotion.json"])
def test_what_cannot_be_put_back_is_in_nobody_elses_way(person: Person, broken: str) -> None:
    world = half_moved(person)
    other = person.place / "other"
    other.mkdir()
    person.own(other)
    journal = unfinished(person)
    content = (journal / broken).read_bytes()
    (journal / broken).write_bytes(b"{")
    person.json("create", "--name", "another", cwd=other)
    person.elsewhere("run", "--", "true", check=True, cwd=other)
    if broken != "promotion.json":
        assert "could not be put back" in json.loads((journal / "promotion.json").read_text())["note"]
        said = json.loads(person.elsewhere("undo", "--json", cwd=world.project).stdout)
        assert said["error"]["code"] == "journal_broken", "it is in the way of the project's own"
    (journal / broken).write_bytes(content)
    assert world.show(journal.name)["status"] == "reversed"
    assert "new" not in (world.project / "README.md").read_text() + (world.project / "src" / "app.py").read_text()


def test_what_others_changed_while_it_was_half_moved_is_told(person: Person) -> None:
    world = half_moved(person)
    journal = unfinished(person)
    (name,) = (name for name in ("README.md", "src/app.py") if (world.project / name).read_text() == "new\n")
    (world.project / name).write_text("somebody else's\n")
    shown = world.show(journal.name)
    assert shown["status"] == "reversed"
    assert f"put back, but for {world.project / name}: somebody changed it meanwhile" in shown["note"]
    assert (world.project / name).read_text() == "somebody else's\n"
