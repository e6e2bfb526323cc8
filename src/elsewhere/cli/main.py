"""The command line proper: one parser, and one place where errors become words or a document. The verbs are in the modules of
their groups, and a group is loaded when one of its verbs is asked for: to load them all takes longer than most verbs do."""

import argparse
import difflib
import errno
import functools
import importlib
import os

from elsewhere import __version__
from elsewhere.cli import show
from elsewhere.cli.parsing import Parser, Verbs, print_json
from elsewhere.errors import ElsewhereError, StateError, UsageError
from elsewhere.meeting import default_state
from elsewhere.operations import interrupted
from elsewhere.operations.documents.common import error_document
from elsewhere.sandbox.keeping.callers import CallerGone, Signals
from elsewhere.storage.state import State

__all__ = ["GROUPS", "main", "parser"]

# Modules and their verbs, in the order in which the help shows them.
GROUPS = {
    "work": ["run", "exec", "shell", "ps", "kill", "logs", "requests", "top", "cancel"],  # commands
    "manage": ["create", "list", "inspect", "diff", "stop", "start", "extend", "keep", "open", "cp", "rm"],  # sandboxes
    "saving": ["snapshot", "snapshots", "rollback", "fork", "rm-snapshot"],  # their states
    "drifting": ["drift", "refresh"],  # reality, meanwhile
    "networking": ["network"],  # what they reach
    "promotion": ["promote", "promotions", "undo", "approve"],  # the way back
    "racing": ["race", "experiments"],  # several approaches at once
    "housekeeping": ["df", "janitor"],  # the disk
    "configure": ["init", "config", "trust"],  # settings
    "about": ["doctor", "version"],  # elsewhere itself
}
_GROUP_OF = {verb: group for group, verbs in GROUPS.items() for verb in verbs}

_EPILOG = """examples:
  elsewhere run -- rm -rf src             see what it would do, without doing it
  elsewhere run --timeout 5m -- pytest -q
  elsewhere run --json -- ./fix.sh        one JSON document for programs
  elsewhere create --name fix             a sandbox that stays
  elsewhere exec fix -- make test         a command in it
  elsewhere diff fix                      what it changed
  elsewhere doctor                        what this machine can do
"""
# A command runs under these: their own exit code for a failure of ours must not be one that a command could have.
_RUN_COMMANDS = ("run", "exec", "shell")


def parser(verb: str | None = None) -> tuple[argparse.ArgumentParser, Verbs]:
    """With the verbs of this one's group; with all of them if there is no such verb."""
    return _parser(_GROUP_OF.get(verb or ""))


@functools.cache
def _parser(wanted: str | None) -> tuple[argparse.ArgumentParser, Verbs]:
    top = Parser(
        prog="elsewhere",
        description="Run anything in an instant, disposable copy of this machine. Reality stays as it is.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"elsewhere {__version__}")
    verbs = Verbs(top)
    for group in [wanted] if wanted else GROUPS:
        importlib.import_module(f"elsewhere.cli.{group}").add(verbs)
    return top, verbs


def main(argv: list[str], signals: Signals | None) -> int:
    """Parse and do. `signals` come from the client when the work is done on its behalf."""
    as_json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        top, verbs = parser(argv[0] if argv else None)
        _check_verb(argv, verbs)
        arguments, unknown = top.parse_known_args(argv)
        if unknown:
            raise _unknown_option(verbs.parsers.get(arguments.verb, top), arguments.verb, unknown[0])
        if arguments.verb is None:
            top.print_help()
            return 0
        as_json = arguments.json
        _see_to_what_was_interrupted()
        return int(arguments.function(arguments, signals))
    except ElsewhereError as error:
        return _report(error, as_json=as_json, verb=argv[0] if argv else "")
    except BrokenPipeError:
        return 1  # whoever read our output has had enough
    except OSError as error:
        where = f"{error.filename or 'the system'}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = StateError("no_room", where, hint="free some space, and try again")
        else:
            problem = StateError("system_error", where, hint="elsewhere doctor looks around")
        return _report(problem, as_json=as_json, verb=argv[0] if argv else "")
    except CallerGone:
        return 125
    except KeyboardInterrupt:
        return 130


def _see_to_what_was_interrupted() -> None:
    """Whoever comes next finishes, or puts back, what was half moved to reality; if that cannot be done, it is said."""
    try:
        for words in interrupted.look(State(os.path.realpath(default_state()))):
            show.remark(words)
    except ElsewhereError as error:
        show.remark(error.message)


def _check_verb(argv: list[str], verbs: Verbs) -> None:
    if argv and not argv[0].startswith("-") and argv[0] not in verbs.parsers:
        near = difflib.get_close_matches(argv[0], verbs.parsers, n=2)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"one of: {', '.join(verbs.parsers)}"
        raise UsageError("unknown_verb", f"unknown verb {argv[0]!r}", hint=hint)


def _unknown_option(known: argparse.ArgumentParser, verb: str | None, option: str) -> UsageError:
    if option in known._option_string_actions:
        hint = f"write it after the verb: {known.prog} {option}"
    else:
        near = difflib.get_close_matches(option.partition("=")[0], known._option_string_actions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{known.prog} --help"
    return UsageError("unknown_option", f"{verb or 'elsewhere'} does not know {option!r}", hint=hint)


def _report(error: ElsewhereError, *, as_json: bool, verb: str) -> int:
    if as_json:
        print_json(error_document(error))
    show.error(error)
    if verb in _RUN_COMMANDS and error.exit_code == 1:
        return 125
    return error.exit_code
