"""Layers of real overlays, read as one and merged, against a plain directory in which the same was done. See `stacking.py`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chance import seed_of
from conftest import Person

PROGRAM = (Path(__file__).parent / "stacking.py").read_text()
REFUSED = 77
# Done more than ten times in any dozen of seeds; what is rarer is done, or not.
COMMON = {"write", "mkdir", "chmod", "rename", "remove_tree", "unlink", "make_again", "symlink", "mkfifo"}


def rounds(person: Person, seed: int, count: int) -> Any:
    place = person.place / f"stacking-{seed}"
    person.shell("mkdir", place)
    done = person.shell(person.python, "-c", PROGRAM, place, str(seed), str(count), check=False)
    if done.returncode == REFUSED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, f"seed {seed}, {count} rounds\n{done.stderr}"
    return json.loads(done.stdout)


def together(person: Person, seeds: range, count: int) -> tuple[list[int], Counter[str]]:
    """The marks that there were (opaque, renamed, whiteouts), and how often each thing was done."""
    marks, done = [0, 0, 0], Counter[str]()
    for seed in seeds:
        said = rounds(person, seed, count)
        assert said["merged"]
        marks = [one + other for one, other in zip(marks, said["marks"], strict=True)]
        done.update(said["done"])
    return marks, done


def test_layers_read_as_one_and_merged_look_as_the_overlay_does(person: Person) -> None:
    (opaque, renamed, whiteouts), _ = together(person, range(4), 9)
    assert opaque
    assert whiteouts
    assert bool(renamed) == person.is_root, "an ordinary user's overlay renames no directories, root's does"


@pytest.mark.slow(40)
@pytest.mark.timeout(900)
def test_many_more_layers(person: Person) -> None:
    first = seed_of()
    _, done = together(person, range(first, first + 12), 18)
    assert done.keys() >= COMMON, f"something was never done: {COMMON - done.keys()}"
