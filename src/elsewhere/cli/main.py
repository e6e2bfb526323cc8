"""The command line proper: one parser, and one place where errors become words or a document. The verbs are in the modules of
their groups, and a group is loaded when one of its verbs is asked for: to load them all takes longer than most verbs do."""

import argparse
import contextlib
import errno
import functools
import importlib
import os
import sys

from elsewhere import __version__
from elsewhere.cli import hints, show
from elsewhere.cli.parsing import Parser, Verbs, print_json
from elsewhere.errors import ElsewhereError, StateError, UsageError
from elsewhere.meeting import default_state
from elsewhere.operations import interrupted
from elsewhere.operations.documents.common import error_document
from elsewhere.outputs import Unwritable
from elsewhere.sandbox.keeping.callers import CallerGone, Interrupted, Signals
from elsewhere.storage.state import State

__all__ = ["GROUPS", "main", "nowhere", "parser"]

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
# These pass signals on, or end what they do step by step.
_READ_SIGNALS = (*_RUN_COMMANDS, "race", "top")


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
    verb, as_json = _asked_for(argv)
    try:
        try:
            arguments = _parsed(argv)
            if arguments is None:
                return 0
            as_json = arguments.json
            return _done(arguments, signals)
        except ElsewhereError as error:
            return _report(error, as_json=as_json, verb=verb)
        except (BrokenPipeError, Unwritable):
            raise
        except OSError as error:
            where = f"{error.filename or 'the system'}: {error.strerror}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                problem = StateError("no_room", where, hint="free some space, and try again")
            else:
                problem = StateError("system_error", where, hint="elsewhere doctor looks around")
            return _report(problem, as_json=as_json, verb=verb)
        except CallerGone:
            return 125
        except Interrupted as interrupted_by:
            _drop_output()  # a part of what is left may have been written just then
            return 128 + interrupted_by.number
        except KeyboardInterrupt:
            return 130
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return 1  # whoever read our output has had enough
    except Unwritable as error:
        _drop_output()
        show.remark(f"standard output cannot be written: {error.strerror}")
        return 125 if verb in _RUN_COMMANDS else 1


def nowhere(argv: list[str]) -> int:
    """Whoever asks stands in a directory that was removed."""
    verb, as_json = _asked_for(argv)
    error = StateError("system_error", "the current directory does not exist any more", hint="change to one that does")
    return _report(error, as_json=as_json, verb=verb)


def _asked_for(argv: list[str]) -> tuple[str, bool]:
    """The verb, and whether a document is wanted, of what may not be right otherwise."""
    return argv[0] if argv else "", "--json" in (argv[: argv.index("--")] if "--" in argv else argv)


def _parsed(argv: list[str]) -> argparse.Namespace | None:
    """None: nothing was asked for, and the help was shown."""
    if argv[:1] == ["help"]:
        verb = [word for word in argv[1:2] if word != "help"]
        argv = [*verb, "--help", *argv[2:]]  # in front of what may be a command
    top, verbs = parser(argv[0] if argv else None)
    _check_verb(argv, verbs)
    arguments, unknown = top.parse_known_args(argv)
    if unknown:
        raise _unknown_option(verbs.parsers.get(arguments.verb, top), arguments.verb, unknown[0])
    if arguments.verb is None:
        top.print_help()
        return None
    return arguments


def _done(arguments: argparse.Namespace, signals: Signals | None) -> int:
    _see_to_what_was_interrupted()
    reads = arguments.verb in _READ_SIGNALS or (arguments.verb == "experiments" and arguments.what == "resume")
    with contextlib.nullcontext() if signals is None or reads else signals.interrupting():
        return int(arguments.function(arguments, signals))


def _drop_output() -> None:
    """What is still to be written of it goes nowhere: it would fail again."""
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nothing, 1)
    os.close(nothing)


def _see_to_what_was_interrupted() -> None:
    """Whoever comes next finishes, or puts back, what was half moved to reality; if that cannot be done, it is said."""
    try:
        for words in interrupted.look(State(os.path.realpath(default_state()))):
            show.remark(words)
    except ElsewhereError as error:
        show.remark(error.message)


def _check_verb(argv: list[str], verbs: Verbs) -> None:
    if argv and not argv[0].startswith("-") and argv[0] not in verbs.parsers:
        raise UsageError("unknown_verb", f"unknown verb {argv[0]!r}", hint=hints.for_verb(argv[0], verbs.parsers))


def _unknown_option(known: argparse.ArgumentParser, verb: str | None, option: str) -> UsageError:
    words = f"{verb or 'elsewhere'} does not know {option!r}"
    return UsageError("unknown_option", words, hint=hints.for_option(option, known))


def _report(error: ElsewhereError, *, as_json: bool, verb: str) -> int:
    if as_json:
        print_json(error_document(error))
    show.error(error)
    if verb in _RUN_COMMANDS and error.exit_code == 1:
        return 125
    return error.exit_code
