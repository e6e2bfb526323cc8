"""A small program with two mistakes is repaired by a search: a scripted mutator changes one thing at a time, each time in a
fork of the best states so far, and the tests say how many of them pass. No model takes part.

    python examples/repair_by_search.py [DIRECTORY]

The program is made in DIRECTORY (a temporary one unless it is named), and so is `report.html`, which shows the whole tree. Ends
with 0 if the repaired program was promoted and passes its tests in reality.
"""

import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from elsewhere import Sandbox, Tree, explore

PROGRAM = """\
def february(year):
    leap = year % 4 == 0 and (year % 100 == 0 or year % 400 == 0)
    return 29 if leap else 27
"""
TESTS = """\
from calendar import monthrange

from months import february

years = 1600, 1700, 1800, 1900, 1996, 1999, 2000, 2001, 2004, 2008, 2100, 2202
print(sum(february(year) == monthrange(year, 2)[1] for year in years), "of", len(years))
"""
SWAPPED = {"and": "or", "or": "and", "==": "!=", "!=": "=="}
PLACES = re.compile(r"\band\b|\bor\b|==|!=|\b[1-9]\d*\b")
ALL = 12


def mutations(box: Sandbox) -> dict[str, partial[None]]:
    """Everything that can be done to the program in one place: another operator, the next number, one line less."""
    text = box.files.read_text("months.py")
    found = {}
    for place in PLACES.finditer(text):
        word, line = place[0], text.count("\n", 0, place.start()) + 1
        for other in [SWAPPED[word]] if word in SWAPPED else [str(int(word) + 1), str(int(word) - 1)]:
            column = place.start() - text.rfind("\n", 0, place.start())
            name = f"{word} → {other} at {line}:{column}"
            found[name] = partial(write, text=text[: place.start()] + other + text[place.end() :])
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.strip():
            found[f"without line {number + 1}"] = partial(write, text="".join(lines[:number] + lines[number + 1 :]))
    return found


def write(box: Sandbox, text: str) -> None:
    box.files.write("months.py", text)


def passed(box: Sandbox) -> float | None:
    """How many checks pass; a program that does not even start is a dead end."""
    done = box.run(["python3", "-B", "tests.py"], timeout="10s")
    return float(done.stdout.split()[0]) if done.exit_code == 0 else None


def show(tree: Tree) -> None:
    for node in tree.best.path if tree.best else ():
        print(f"   {node.score:g} of {ALL}  {node.step or 'as it was'}")
    dead = sum(node.state == "dead end" for node in tree.nodes)
    print(f"{len(tree.nodes)} nodes, {dead} of them dead ends: {tree.reason}")


def repair(place: Path) -> int:
    project = place / "months"
    project.mkdir()
    (project / "months.py").write_text(PROGRAM)
    (project / "tests.py").write_text(TESTS)
    with explore(project, mutations, passed, beam=2, depth=3, budget=100, goal=ALL, workers=2) as tree:
        show(tree)
        if tree.best is None or tree.best.score != ALL:
            return 1
        tree.promote()
        (place / "report.html").write_text(tree.report())
    said = subprocess.run([sys.executable, "-B", "tests.py"], cwd=project, capture_output=True, text=True, check=True).stdout
    print(f"in reality: {said}{(project / 'months.py').read_text()}", end="")
    return 0 if said.split()[0] == str(ALL) else 1


def main(words: list[str]) -> int:
    if words:
        return repair(Path(words[0]).resolve())
    with tempfile.TemporaryDirectory(prefix="repair-", dir=Path.home()) as place:
        return repair(Path(place))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
