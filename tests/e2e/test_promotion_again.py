"""Promotions one after the other, of one sandbox, its forks, and after everything that changes where they start from: what a path
goes on from is what the sandbox had there when it was last moved, and nothing else."""

import pytest

from conftest import Person
from e2e.test_promotion import World

pytestmark = pytest.mark.one_launcher

GIT = "git config user.name inside; git config user.email inside@example.org"


def repository(person: Person, line: str) -> World:
    world = World(person, "git init -q; git config user.name you; git config user.email you@example.org; " + line)
    world.real("git add -A; git commit -qm begin")
    return world


def test_a_mode_that_was_promoted_says_nothing_about_the_content(person: Person) -> None:
    world = repository(person, "echo base > a.sh")
    box = world.made("chmod +x a.sh", "--base", "pinned")
    world.promote(box)
    world.real("echo 'the user was here' > a.sh")
    world.inside(box, "echo sandbox > a.sh")
    assert world.refused("promote", box) == {"a.sh": "text_conflict"}
    world.inside(box, "echo base > a.sh; chmod -x a.sh")
    world.promote(box)
    assert world.text("a.sh") == "the user was here\n"


def test_what_was_promoted_before_a_refresh_is_not_brought_again(person: Person) -> None:
    world = repository(person, "seq 7 > a")
    box = world.made("sed -i s/1/sandbox/ a", "--base", "pinned")
    world.promote(box)
    world.real("sed -i s/7/user/ a")
    person.elsewhere("refresh", box, check=True)
    world.real("sed -i s/user/7/ a")
    world.inside(box, "echo other > k")
    assert world.promote(box)["applied"] == ["k"]
    assert world.text("a").split() == ["sandbox", *"234567"]


def test_a_fork_of_an_earlier_state_does_not_take_back_what_came_later(person: Person) -> None:
    world = repository(person, "echo v1 > a")
    box = world.made("true", "--base", "pinned")
    person.elsewhere("snapshot", box, "before", check=True)
    world.inside(box, "echo v2 > a")
    world.promote(box)
    fork = person.json("fork", box, "--from", "before")["sandboxes"][0]["id"]
    world.inside(fork, "echo other > k")
    assert world.promote(fork)["applied"] == ["k"]
    assert world.text("a") == "v2\n"


def test_what_the_user_took_back_no_descendant_brings_again(person: Person) -> None:
    world = repository(person, "echo v1 > a")
    box = world.made("echo v2 > a", "--base", "pinned")
    world.promote(box)
    child = person.json("fork", box)["sandboxes"][0]["id"]
    grandchild = person.json("fork", child)["sandboxes"][0]["id"]
    world.real("git checkout -q a")
    world.inside(grandchild, "echo other > k")
    assert world.promote(grandchild, "--dry-run")["applied"] == ["k"]


@pytest.mark.parametrize("reality", ["", "printf 'a\\0S1' > bin"], ids=["taken", "same already"])
def test_a_binary_can_be_promoted_again_and_again(person: Person, reality: str) -> None:
    world = repository(person, "printf 'a\\0b' > bin")
    box = world.made("printf 'a\\0S1' > bin; head -c 3000000 /dev/zero > large", "--base", "pinned")
    world.real(reality)
    world.promote(box)
    world.inside(box, "printf 'a\\0S2' > bin; echo end >> large")
    assert world.promote(box)["applied"] == ["bin", "large"]
    world.inside(box, "rm large")
    assert world.promote(box)["deleted"] == ["large"]


def test_conflicts_are_settled_after_an_earlier_promotion(person: Person) -> None:
    world = repository(person, "echo v1 > a")
    box = world.made("echo v2 > a", "--base", "pinned")
    world.promote(box)
    world.real("echo r2 > a")
    world.inside(box, "echo s3 > a")
    assert world.refused("promote", box) == {"a": "text_conflict"}
    fork = person.json("promote", box, "--resolve")["sandbox"]["id"]
    world.inside(fork, "echo settled > a")
    world.promote(fork)
    assert world.text("a") == "settled\n"


def test_marks_of_a_file_with_other_line_ends_do_not_reach_reality(person: Person) -> None:
    world = repository(person, "printf 'one\\r\\n' > a")
    box = world.made("printf 'two\\r\\n' > a", "--base", "pinned")
    world.real("printf 'three\\r\\n' > a")
    fork = person.json("promote", box, "--resolve")["sandbox"]["id"]
    assert world.refused("promote", fork) == {"a": "markers_left"}


def test_marks_do_not_reach_a_stage(person: Person) -> None:
    world = repository(person, 'echo one > a; printf \'[[stages]]\\nname = "dev"\\ntarget = "."\\n\' > elsewhere.toml')
    box = world.made("echo two > a", "--base", "pinned")
    world.real("echo three > a")
    fork = person.json("promote", box, "--resolve")["sandbox"]["id"]
    assert world.promote(fork, "--dry-run", code=3)["status"] == "refused"
    assert world.refused("promote", fork) == {"a": "markers_left"}


def test_a_new_file_is_no_conflict_because_its_directory_was_touched(person: Person) -> None:
    world = repository(person, "echo v1 > a")
    box = world.made("echo v2 > a", "--base", "live")
    world.promote(box)
    world.inside(box, "echo n > new")
    world.real("echo x > own")
    assert world.promote(box)["applied"] == ["new"]


def test_a_directory_that_was_put_in_the_place_of_another_is_noticed(person: Person) -> None:
    world = repository(person, "mkdir dir other; echo 1 > dir/f; echo 'of the user' > other/f")
    world.real("touch -d '1 hour ago' dir other dir/f other/f; sleep 0.1")
    box = world.made("echo sandbox > dir/f", "--base", "live")
    world.real("mv dir dir.old; mv other dir")
    assert world.refused("promote", box) == {"dir/f": "no_base"}


@pytest.mark.parametrize(
    ("work", "options"),
    [(f"{GIT}; echo 2 > a; git commit -qam inside", ("--no-commits",)), (f"{GIT}; echo 2 > a; git stash -q; echo 3 > a", ())],
    ids=["commits left behind", "a stash"],
)
def test_what_only_the_sandbox_s_repository_has_is_not_thrown_away(person: Person, work: str, options: tuple[str, ...]) -> None:
    world = repository(person, "echo 1 > a")
    box = world.made(work, "--base", "pinned")
    world.promote(box, *options)
    assert person.json("rm", box, check=False)["error"]["code"] == "unpromoted_changes"


def test_commits_that_were_fetched_can_be_thrown_away(person: Person) -> None:
    world = repository(person, "echo 1 > a")
    box = world.made(f"{GIT}; echo 2 > a; git commit -qam inside", "--base", "pinned")
    assert world.promote(box)["commits"]["count"] == 1
    assert person.json("rm", box)["removed"] == [box]


def test_commits_of_a_repository_that_has_another_top_stay_and_that_is_said(person: Person) -> None:
    """The project is a directory of a repository, and has another one in it."""
    made = f"{GIT}; git add -A; git commit -qm made"
    world = World(person, f"mkdir -p ~/mono/svc/lib; cd ~/mono; echo > svc/elsewhere.toml; echo 1 > svc/a; git init -q; {made}")
    top = str(person.home / "mono")
    world.real(f"cd {top}/svc/lib; echo 1 > b; git init -q; {made}")
    box = person.json("create", "--project", f"{top}/svc")["sandbox"]["id"]
    world.inside(box, "git status -s; git add -A")
    assert world.promote(box, "--dry-run")["left_out"]["commits"] == []
    assert "no commits were made" in world.promote(box, "--branch", "mine", code=2)["message"]
    world.inside(box, f"echo 2 > a; {made}; cd lib; echo 2 > b; {made}; git clone -q --no-hardlinks . ../clone")
    refused = world.promote(box, "--branch", "mine", code=2)
    assert (refused["code"], f"is not the top of '{top}'" in refused["message"]) == ("no_commits", True)
    said = person.elsewhere("promote", box, "--dry-run", check=True).stderr
    assert f"commits made inside stay there: the project is not the top of their repository, {top}, lib\n" in said
    done = world.promote(box)
    assert ("a" in done["applied"], done["commits"], done["left_out"]["commits"]) == (True, None, [top, "lib"])


def test_options_that_would_do_nothing_are_refused(person: Person) -> None:
    world = repository(person, "echo 1 > a")
    box = world.made("echo 2 > a", "--base", "pinned")
    for options in (("--resolve", "--dry-run"), ("--replay", "--path", "a"), ("--no-commits", "--checkout")):
        assert world.promote(box, *options, code=2)["code"] == "options_together"
    assert world.promote(box, "--branch", "x", code=2)["code"] == "no_commits"
    assert world.text("a") == "1\n"
