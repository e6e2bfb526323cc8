"""Verbs about several approaches at once: race, experiments."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from elsewhere import units
from elsewhere.cli import promotion, show
from elsewhere.cli.confining import add_confinement, settings_of
from elsewhere.cli.parsing import Verbs, add_base, add_environment, count, environment_of, print_json
from elsewhere.cli.progress import teller
from elsewhere.cli.race_table import RaceTable
from elsewhere.errors import ElsewhereError, UsageError
from elsewhere.experiments import parsing, records
from elsewhere.experiments.model import Race
from elsewhere.experiments.records import Experiment
from elsewhere.operations import experiments, promoted
from elsewhere.operations.documents.common import error_document
from elsewhere.operations.promoting import Agree, Asked, Promoted
from elsewhere.operations.racing import race as races
from elsewhere.operations.racing import written
from elsewhere.operations.racing.race import Raced, Telling
from elsewhere.sandbox.keeping.callers import Signals, pause_of

__all__ = ["add"]

_RACE_EPILOG = """Each approach runs in a sandbox of its own, from one base. What a promotion would move of it is verified in
other sandboxes of that base, with the tests, and what else could fake them, as they are in the base. Those that verify
are ranked by the score, then by fewer changed lines, then by time. The exit code is 0 if there is a winner and 5 if
none verified; with --promote 3 after a conflict and 4 after a failed check.

examples:
  elsewhere race -a 'upgrade=pip install -U django' -a 'patch=git apply fix.patch' --verify 'pytest -q'
  elsewhere race -a 'a=./fix-a.sh' -a 'b=./fix-b.sh' --verify 'make test' --score ./score.sh --promote
  elsewhere race -n 3 -a 'agent=./agent.sh' --verify 'pytest -q' --first --timeout 10m
  elsewhere race upgrade                  a race of the project's elsewhere.toml
  elsewhere race --file race.toml --json
"""
_EXPERIMENTS_EPILOG = """EXPERIMENT is an id, the beginning of one, or @last.

examples:
  elsewhere experiments list
  elsewhere experiments show @last
  elsewhere experiments compare @last:upgrade @last:patch
  elsewhere experiments report @last --output report.html
  elsewhere experiments promote @last patch
  elsewhere experiments promote @last --ours settings.py
  elsewhere experiments resume @last
"""


def add(verbs: Verbs) -> None:
    race = verbs.add("race", _race, "try several approaches at once, and keep the best", _RACE_EPILOG)
    race.add_argument("name", metavar="NAME", nargs="?", help="a race of the project's elsewhere.toml")
    race.add_argument("--file", metavar="FILE", help="a file that describes a race")
    race.add_argument(
        "-a", "--approach", metavar="NAME=COMMAND", action="append", default=[], help="one approach; may be repeated"
    )
    race.add_argument("--setup", metavar="COMMAND", help="run once, before; all approaches start from what it leaves")
    race.add_argument("--verify", metavar="COMMAND", action="append", default=[], help="must end with 0; may be repeated")
    race.add_argument(
        "--scored", metavar="COMMAND", action="append", default=[], help="a check that only counts for the rank; may be repeated"
    )
    race.add_argument(
        "--score", metavar="COMMAND", help="its last line that is a number ranks those that verified; higher is better"
    )
    race.add_argument("--lower", action="store_true", help="a lower score is better")
    race.add_argument("-n", "--repeat", metavar="N", type=count, help="attempts of each approach; default 1")
    race.add_argument("--first", action="store_true", help="end the others as soon as one verifies")
    race.add_argument("--promote", action="store_true", help="move what the winner changed to reality")
    race.add_argument("--yes", action="store_true", help="agree to paths that run by themselves (hooks, CI files, …)")
    race.add_argument("--allow-failing", action="store_true", help="verify even an approach whose command failed")
    race.add_argument(
        "--verify-files",
        metavar="GLOB",
        action="append",
        help="what is as in the base when it is verified, beside what tests are usually called; with ! before it, what is not",
    )
    race.add_argument("--verify-from-approach", action="store_true", help="verify with everything as the approach left it")
    race.add_argument("--verify-timeout", metavar="TIME", type=units.duration, help="of each check, and of the score")
    add_base(race, "auto", over_a_file=True)
    add_environment(race)
    add_confinement(race, lives=False)

    listing = verbs.add("experiments", _experiments, "what was raced, and what came of it", _EXPERIMENTS_EPILOG)
    listing.add_argument("what", metavar="VERB", choices=sorted(_VERBS), help="list, show, compare, report, promote or resume")
    listing.add_argument(
        "words", metavar="EXPERIMENT", nargs="*", help="which; for compare two of ID or ID:NAME; for promote ID [NAME]"
    )
    listing.add_argument("--output", metavar="FILE", help="where the report goes; default: beside the experiment")
    listing.add_argument("--yes", action="store_true", help="promote, resume: agree to paths that run by themselves")
    for option, metavar, text in (
        ("--path", "GLOB", "only what fits"),
        ("--ours", "PATH", "take the attempt's version of a path in conflict"),
        ("--theirs", "PATH", "leave reality's"),
    ):
        listing.add_argument(option, metavar=metavar, action="append", default=[], help=f"promote: {text}; may be repeated")
    listing.gathers = "words"


# -- race -----------------------------------------------------------------------------------------------------------------------


def _race(arguments: argparse.Namespace, signals: Signals | None) -> int:
    if arguments.yes and not arguments.promote:
        raise UsageError("options_together", "--yes means nothing without --promote", hint="leave it out")
    _refuse_empty(arguments)
    asked = _asked(arguments)
    with _Watching(arguments) as shown:
        telling = Telling(shown.update, shown.remark, teller(), pause_of(signals))
        agree = shown.asking(promotion.agree_of(arguments, signals))
        # A race of the project's file is the same wherever somebody stands: it is written from where the file lies.
        here = None if arguments.name else os.getcwd()
        thinks = promotion.thinks(arguments)
        done = races.race(asked, arguments.project, here=here, agree=agree, thinks=thinks, telling=telling)
    return _told(arguments, done, shown)


def _refuse_empty(arguments: argparse.Namespace) -> None:
    """An empty command is a variable of somebody's script that was not set, rather than a wish to do without."""
    for text in arguments.approach:
        name, equals, command = text.partition("=")
        if equals and not command.strip():
            raise UsageError(
                "bad_approach",
                f"-a {units.brief(text)}: the command is empty",
                hint=f"-a '{name or 'NAME'}=COMMAND', a shell line",
            )
    for option in ("setup", "verify", "scored", "score"):
        given = getattr(arguments, option)
        for line in given if isinstance(given, list) else [given]:
            if line is not None and not line.strip():
                raise UsageError(
                    "bad_command",
                    f"--{option} {units.brief(line)}: the command is empty",
                    hint="write a shell line, or leave it out",
                )


def _asked(arguments: argparse.Namespace) -> Race:
    if sum(map(bool, (arguments.name, arguments.file, arguments.approach))) != 1:
        raise UsageError(
            "no_approach",
            "a race is given by -a NAME=COMMAND, by --file FILE or by its name in elsewhere.toml, one of them",
            hint="elsewhere race --help",
        )
    if arguments.name:
        race = written.named(arguments.name, arguments.project, show.remark)
    elif arguments.file:
        race = written.in_file(arguments.file)
    else:
        race = Race(tuple(parsing.approach_of(text) for text in arguments.approach))
    return parsing.complete(_over(race, arguments))


def _over(race: Race, arguments: argparse.Namespace) -> Race:
    """What the command line says counts more than a file; of what may be repeated, both count."""
    if arguments.verify_files and (arguments.verify_from_approach or race.verify_from_approach):
        other = "--verify-from-approach" if arguments.verify_from_approach else "verify_from_approach, which the race has"
        raise UsageError("options_together", f"--verify-files means nothing beside {other}", hint="leave one of them out")
    checks = (
        *race.checks,
        *parsing.checks_of(arguments.verify, required=True),
        *parsing.checks_of(arguments.scored, required=False),
    )
    base, base_ref = race.base, race.base_ref
    if arguments.base is not None or arguments.base_ref is not None:  # one of both, which stands for both
        base, base_ref = arguments.base or "auto", arguments.base_ref
    race = replace(
        race,
        checks=checks,
        setup=arguments.setup or race.setup,
        score=arguments.score or race.score,
        lower=arguments.lower or race.lower,
        first=arguments.first or race.first,
        promote=arguments.promote,
        allow_failing=arguments.allow_failing or race.allow_failing,
        verify_files=(*(race.verify_files or ()), *(arguments.verify_files or ())),
        verify_from_approach=arguments.verify_from_approach or race.verify_from_approach,
        verify_timeout=arguments.verify_timeout or race.verify_timeout,
        base=base,
        base_ref=base_ref,
        env={**race.env, **dict(environment_of(arguments))},
        settings={**race.settings, **settings_of(arguments)},
        approaches=tuple(replace(one, settings=written.below(one.settings, settings_of(arguments))) for one in race.approaches),
    )
    if arguments.timeout is not None:
        race = replace(race, approaches=tuple(replace(one, timeout=arguments.timeout) for one in race.approaches))
    return race if arguments.repeat is None else parsing.repeated(race, arguments.repeat)


class _Watching:
    """The live table on a terminal; anywhere else a line for each change of state, and with --json nothing."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._table = RaceTable(sys.stderr) if sys.stderr.isatty() and not arguments.json else None
        self._quiet = arguments.json
        self._states: dict[tuple[str, int], str] = {}
        self._id = ""
        self._document: dict[str, Any] | None = None
        self.finished = False

    def __enter__(self) -> "_Watching":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._table is not None:
            self._table.clear()
        if kind is not None and self._id and not issubclass(kind, ElsewhereError):
            if self._quiet:
                print_json(records.document(experiments.show(self._id)))
            show.remark(f"the race was ended; elsewhere experiments resume {self._id} goes on with what is missing")

    def update(self, document: dict[str, Any]) -> None:
        self._id, self._document = document["experiment"]["id"], document
        if self._table is not None:
            if not self.finished:
                self._table.update(document)
        elif not self._quiet:
            self._lines(document["experiment"])

    def asking(self, agree: Agree | None) -> Agree | None:
        """Whoever is asked about the result has seen it."""

        def asked(marks: Sequence[tuple[str, str]]) -> bool:
            if self._document is not None and not self._quiet:
                self.finish(self._document)
            return agree is not None and agree(marks)

        return None if agree is None else asked

    def finish(self, document: dict[str, Any]) -> None:
        """What came of it, once."""
        if not self.finished:
            self.finished = True
            if self._table is not None:
                self._table.clear()
            RaceTable(sys.stdout).finish(document)

    def remark(self, words: str) -> None:
        if self._table is not None:
            self._table.clear()
        show.remark(words)

    def _lines(self, experiment: dict[str, Any]) -> None:
        for one in experiment["approaches"]:
            key, state = (one["name"], one["attempt"]), one["state"]
            if self._states.get(key, "waiting") != state:
                name = f"{one['name']} ({one['attempt']})" if one["attempt"] > 1 else one["name"]
                why = f": {one['why']}" if state == "done" else ""
                show.remark(f"{show.safe(name)}: {state}{show.safe(why)}")
            self._states[key] = state


def _told(arguments: argparse.Namespace, done: Raced, shown: _Watching) -> int:
    document = records.document(done.experiment)
    if arguments.json:
        refused = {} if done.refused is None else error_document(done.refused)
        taken = {} if done.promoted is None else promoted.document(promoted.of_promote(done.promoted))
        print_json({**document, **taken, **refused})
    else:
        shown.finish(document)
        if done.promoted is not None:
            _show_taken(done.promoted)
    if done.refused is not None:
        show.error(done.refused)
    if not arguments.json:
        show.remark(f"experiment {done.experiment.id}; elsewhere experiments report {done.experiment.id} makes a page of it")
    return done.exit_code


def _show_taken(done: Promoted) -> None:
    """If there is no promotion, there was nothing to move."""
    if done.promotion is not None:
        promotion.show_done(promoted.of_promote(done))
    else:
        same = done.ready.plan.same
        print(f"nothing to move: {'all of it is there already' if same else 'it changed nothing that a promotion moves'}")


# -- experiments ----------------------------------------------------------------------------------------------------------------


def _experiments(arguments: argparse.Namespace, signals: Signals | None) -> int:
    least, most, options = _COUNTS[arguments.what]
    if not least <= len(arguments.words) <= most:
        expected = units.count(least, "word") if least == most else f"{least} or {most} words"
        raise UsageError(
            "usage",
            f"experiments {arguments.what} takes {expected}, not {len(arguments.words)}",
            hint="elsewhere experiments --help",
        )
    for option in ("output", "yes", "path", "ours", "theirs"):
        if getattr(arguments, option) and option not in options:
            raise UsageError("options_together", f"--{option} means nothing for {arguments.what}", hint="leave it out")
    return _VERBS[arguments.what](arguments, signals)


def _list(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    found = experiments.experiments()
    if arguments.json:
        print_json(experiments.listed_document(found))
        return 0
    rows = [
        [one.id, one.state, one.winner or "-", races.summary(one), one.race.get("name") or "-", show.safe(one.project)]
        for one in reversed(found)
    ]
    if rows:
        show.table(rows, sys.stdout, ["EXPERIMENT", "STATE", "WINNER", "ATTEMPTS", "NAME", "PROJECT"])
    else:
        show.remark("there is no experiment yet; elsewhere race makes one")
    return 0


def _show(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    _shown(arguments, experiments.show(arguments.words[0]))
    return 0


def _shown(arguments: argparse.Namespace, found: Experiment) -> None:
    document = records.document(found)
    if arguments.json:
        print_json(document)
        return
    RaceTable(sys.stdout).finish(document)
    if found.refused is not None:
        show.remark(f"it was not promoted: {found.refused}")
    if found.state in ("interrupted", "cancelled"):
        show.remark(f"it was {found.state}; elsewhere experiments resume {found.id} goes on")


def _compare(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    said = experiments.compare(*arguments.words)
    if arguments.json:
        print_json(said)
        return 0
    found = said["compare"]
    rows = [[what, *(show.safe(str(value(found[side]))) for side in ("a", "b"))] for what, value in _COMPARED]
    heads = ["", *(f"{found[side]['experiment']}:{found[side]['name']}" for side in ("a", "b"))]
    show.table(rows, sys.stdout, heads)
    for words, key in (("changed by both", "both"), ("only by the first", "only_a"), ("only by the second", "only_b")):
        for path in found[key][:20]:
            print(f"   {words}: {show.safe(path)}")
    print(show.safe(found["reason"]))
    return 0


def _tests(one: dict[str, Any]) -> str:
    counted = [check["tests"] for check in one["checks"] if check["tests"]]
    return f"{sum(t['passed'] for t in counted)} passed, {sum(t['failed'] for t in counted)} failed" if counted else "-"


_COMPARED: tuple[tuple[str, Callable[[dict[str, Any]], object]], ...] = (
    ("verified", lambda one: "yes" if one["verified"] else "no"),
    ("score", lambda one: "-" if one["score"] is None else f"{one['score']:.10g}"),
    ("tests", _tests),
    ("time", lambda one: "-" if one["duration_ms"] is None else units.format_duration(one["duration_ms"] / 1000)),
    ("peak memory", lambda one: "-" if not one["peak_memory_bytes"] else units.format_size(one["peak_memory_bytes"])),
    ("files", lambda one: "-" if one["changes"] is None else one["changes"]["files"]),
    ("lines", lambda one: "-" if one["changes"] is None else f"+{one['changes']['added']} -{one['changes']['removed']}"),
    ("denials", lambda one: len(one["denials"])),
    ("why", lambda one: one["why"]),
)


def _report(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    path = experiments.report(arguments.words[0], arguments.output)
    if arguments.json:
        print_json({"report": {"path": path}})
    else:
        print(path)
    return 0


def _promote(arguments: argparse.Namespace, signals: Signals | None) -> int:
    wanted, name = [*arguments.words, None][:2]
    asked = Asked(
        paths=tuple(arguments.path),
        ours=tuple(arguments.ours),
        theirs=tuple(arguments.theirs),
        agree=promotion.agree_of(arguments, signals),
        thinks=promotion.thinks(arguments),
    )
    _, _, done = experiments.promote(str(wanted), name, asked, show.remark)
    if arguments.json:
        print_json(promoted.document(promoted.of_promote(done)))
    else:
        _show_taken(done)
    return 0


def _resume(arguments: argparse.Namespace, signals: Signals | None) -> int:
    with _Watching(arguments) as shown:
        telling = Telling(shown.update, shown.remark, teller(), pause_of(signals))
        agree = shown.asking(promotion.agree_of(arguments, signals))
        done = races.resume(arguments.words[0], agree=agree, thinks=promotion.thinks(arguments), telling=telling)
    return _told(arguments, done, shown)


_VERBS: dict[str, Callable[[argparse.Namespace, Signals | None], int]] = {
    "list": _list,
    "show": _show,
    "compare": _compare,
    "report": _report,
    "promote": _promote,
    "resume": _resume,
}
# How many words each takes, and which options.
_COUNTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "list": (0, 0, ()),
    "show": (1, 1, ()),
    "compare": (2, 2, ()),
    "report": (1, 1, ("output",)),
    "promote": (1, 2, ("yes", "path", "ours", "theirs")),
    "resume": (1, 1, ("yes",)),
}
