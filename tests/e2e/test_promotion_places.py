"""Promotions of projects that are a part of something larger, or have a part of something else in them."""

import json

import pytest

from conftest import Person
from e2e.test_promotion import World
from linux.test_ladder import Elsewhere, needs_root


@pytest.mark.one_launcher
def test_what_the_repository_around_a_project_ignores_stays_as_it_is(person: Person) -> None:
    world = World(
        person, "echo SECRET=real > src/.env; echo tracked > src/kept.log; git add -f src/kept.log; git commit -qm kept"
    )
    box = world.made(
        "echo SECRET=sandbox > .env; echo sandbox | tee kept.log a.log app.py", "--project", str(world.project / "src")
    )
    said = world.promote(box)
    assert (said["applied"], said["left_out"]["ignored"]) == (["app.py", "kept.log"], [".env", "a.log"])
    assert (world.text("src/.env"), world.text("src/kept.log")) == ("SECRET=real\n", "sandbox\n")
    assert not (world.project / "src" / "a.log").exists()


@pytest.mark.parametrize("base", [("--base", "pinned"), ("--base-ref", "HEAD")], ids=["pinned", "commit"])
def test_what_is_mounted_below_a_project_is_like_a_live_base(root: Person, base: tuple[str, str]) -> None:
    needs_root()
    mounted = root.project / "mounted"
    mounted.mkdir()
    done = Elsewhere(root, "--tmpfs", str(mounted)).script(
        f"""
        for name in gone edited kept; do echo one > mounted/$name; done; git add mounted/kept; git commit -qm kept; sleep 0.1
        e create --name box {" ".join(base)} > /dev/null
        e exec box -c 'rm mounted/gone; echo two >> mounted/edited; echo new > mounted/made'
        e drift --json box
        e promote --json box
        e promote --json box
        (cd mounted; grep . *)
        e exec box -c 'echo sandbox > mounted/kept'
        echo reality > mounted/kept
        e promote --json box || (cd mounted; grep . *)
        e rm --force box > /dev/null
        """
    )
    assert done.returncode == 0, done.stderr
    drift, first, again, *rest = done.stdout.splitlines()
    assert (json.loads(drift)["drift"]["changed"], json.loads(drift)["drift"]["overlapping"]) == ([], [])
    found, nothing = json.loads(first)["promotion"], json.loads(again)["promotion"]
    assert (found["applied"], found["deleted"]) == (["mounted/edited", "mounted/made"], ["mounted/gone"])
    assert (nothing["applied"], nothing["deleted"]) == ([], [])
    assert rest[:4] == ["edited:one", "edited:two", "kept:one", "made:new"]
    assert {one["path"] for one in json.loads(rest[4])["error"]["detail"]["conflicts"]} == {"mounted/kept"}
    assert rest[5:] == ["edited:one", "edited:two", "kept:reality", "made:new"]


def test_what_is_mounted_where_the_base_has_nothing_is_not_overwritten(root: Person) -> None:
    """There the sandbox does not see it."""
    needs_root()
    mounted = root.project / "mounted"
    mounted.mkdir()
    done = Elsewhere(root, "--tmpfs", str(mounted)).script(
        """
        echo reality > mounted/file; sleep 0.1
        e create --name box --base-ref HEAD > /dev/null
        e exec box -c 'mkdir mounted; echo sandbox > mounted/file'
        e promote --json box || cat mounted/file
        e rm --force box > /dev/null
        """
    )
    assert done.returncode == 0, done.stderr
    refused, *rest = done.stdout.splitlines()
    conflicts = {one["path"]: one["reason"] for one in json.loads(refused)["error"]["detail"]["conflicts"]}
    assert (conflicts["mounted/file"], rest) == ("both_added", ["reality"])
