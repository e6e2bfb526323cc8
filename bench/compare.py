"""elsewhere against its neighbours, side by side in one run: what starting, cloning, file work, memory, snapshots,
changes, promotion, the network and races cost, and what becomes of an edit that a user makes meanwhile.

Timings never fail it: a missed budget is a finding, not an error. Exit codes: 0 measured; 1 something did not work; 2 usage;
130 interrupted. It works in one temporary directory with a state directory and a launcher of its own, and leaves nothing
behind.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import budget
import launcher
import machine
import progress
import project
import workspace
from cloning import cloning
from contenders import Sandlock, neighbours
from crowd import crowd
from depth import depth_curve
from differing import differing
from effort import FULL, QUICK, Effort
from elsewhere import Sandbox
from elsewhere.sandbox.launching.engine import socket_name
from execing import executing
from filework import file_work
from lost_updates import lost_updates
from measure import Section
from memory import idle_memory
from networking import networking
from pinned import pinned
from promoting import promoting
from racing import racing
from report import Report
from saving import saving
from shell import cold
from warm import in_process, sustained
from workspace import Workspace

_RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", "latest.json")
_LETTERS = "ABCDEFGHIJKLMNOP"
_EXAMPLES = """examples:
  bench/compare.py                                   everything, nine minutes
  bench/compare.py --quick                           a smoke test, some seconds
  bench/compare.py --sections AB                     only starts, from a warm process and from a shell
  bench/compare.py --markdown docs/performance.md    everything, and the page for the documentation

sections:
  A in process, warm    B from a cold shell    C cloning    D file work    E memory    F sustained
  G pinned bases    H commands in a running sandbox    I many at once    J snapshot, rollback, fork
  K what changed    L many snapshots    M back to reality    N edits made meanwhile    O the network
  P a race
"""

Sections = dict[str, Callable[[], Section]]


def main() -> int:
    arguments = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    effort = QUICK if arguments.quick else FULL
    try:
        report = _measure(arguments, effort)
    except KeyboardInterrupt:
        print("\ninterrupted; everything is cleared away", file=sys.stderr)
        return 130
    print(report.text())
    if arguments.markdown:
        with open(arguments.markdown, "w", encoding="utf-8") as page:
            page.write(report.markdown())
    _save(report, arguments.json)
    return 1 if report.errors else 0


def _measure(arguments: argparse.Namespace, effort: Effort) -> Report:
    began = time.monotonic()
    faults: list[str] = []
    with workspace.opened(arguments.directory) as place, _own_state(place, faults):
        progress.say(f"making a project of {effort.project_files:,} files")
        project.generate(place.project, effort.project_files)
        with Sandbox.create(project=place.project, base="live") as box:  # starts the launcher, and says what it stands on
            mechanism = box.mechanism
        for directory in (place.scratch, place.branches, *_rooms(place.state)):
            workspace.spread(directory)
        report = Report(machine.describe(place.project, mechanism), arguments.quick)
        code = socket_name()
        known, sandlock = neighbours(arguments.docker_image), Sandlock(place)
        sections: Sections = {
            "A": lambda: in_process(place, effort, known, sandlock),
            "B": lambda: cold(place, effort, known, sandlock),
            "C": lambda: cloning(place, effort),
            "D": lambda: file_work(place, effort),
            "E": lambda: idle_memory(place, effort),
            "F": lambda: sustained(place, effort, known),
            "G": lambda: pinned(place, effort),
            "H": lambda: executing(place, effort, arguments.docker_image),
            "I": lambda: crowd(place, effort),
            "J": lambda: saving(place, effort),
            "K": lambda: differing(place, effort),
            "L": lambda: depth_curve(place, effort),
            "M": lambda: promoting(place, effort),
            "N": lambda: lost_updates(place, effort, sandlock),
            "O": lambda: networking(place, effort),
            "P": lambda: racing(place, effort),
        }
        for letter, section in sections.items():
            if letter not in arguments.sections:
                continue
            progress.say(f"measuring {letter}")
            try:
                report.sections.append(section())
            except Exception as error:  # the other sections are still worth having; the run fails at its end
                faults.append(f"{letter}: {type(error).__name__}: {error}".replace(place.root, "…"))
        if socket_name() != code:  # it says version, code and mounts: what a launcher shares with its users
            faults.append("the code of elsewhere changed during the run: these numbers are of no version; repeat it")
    report.verdicts = budget.judge(report.sections)
    report.errors = faults
    report.took_s = time.monotonic() - began
    return report


def _rooms(state: str) -> list[str]:
    with os.scandir(state) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


@contextlib.contextmanager
def _own_state(place: Workspace, faults: list[str]) -> Iterator[None]:
    """Everything that is started from here on works with the state directory of this run; its launcher ends with it."""
    os.environ["ELSEWHERE_HOME"] = place.state
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        del os.environ[name]
    try:
        yield
    finally:
        workspace.undisturbed()
        left = launcher.stop(place.state)
        if left:
            faults.append(f"{len(left)} processes of elsewhere did not end with their launcher and were killed")


def _save(report: Report, path: str) -> None:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report.document(), file, indent=1)
            file.write("\n")
    except PermissionError as error:
        if path != _RESULTS:
            raise
        # Somebody else's checkout: the numbers are on the screen all the same.
        print(f"results are not saved ({error.strerror}); use --json FILE", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="very few repetitions: shows that everything works")
    parser.add_argument("--markdown", metavar="FILE", help="also write a page with the tables")
    parser.add_argument("--json", metavar="FILE", default=_RESULTS, help="where to write all numbers (bench/results/latest.json)")
    parser.add_argument("--sections", metavar="LETTERS", default=_LETTERS, type=_letters, help="only these, like AB")
    parser.add_argument(
        "--directory",
        metavar="DIR",
        default=workspace.default_parent(),
        type=_parent,
        help="where to make the temporary directory; not below /tmp (root: /srv, others: ~/.cache)",
    )
    parser.add_argument("--docker-image", metavar="IMAGE", default="alpine", help="for docker run; never pulled (alpine)")
    arguments = parser.parse_args()
    for option in ("markdown", "json"):
        path = getattr(arguments, option)
        if path and path != _RESULTS and not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            parser.error(f"--{option} {path}: the directory cannot be written")
    return arguments


def _letters(text: str) -> str:
    letters = text.upper()
    if not letters or set(letters) - set(_LETTERS):
        raise argparse.ArgumentTypeError(f"{text!r}: use letters of {_LETTERS}")
    return letters


def _parent(text: str) -> str:
    path = os.path.realpath(text)
    if any(path == place or path.startswith(place + "/") for place in ("/tmp", "/var/tmp")):
        raise argparse.ArgumentTypeError(f"{text!r}: a sandbox has its own /tmp and /var/tmp; choose another place")
    return path


def _interrupted(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
