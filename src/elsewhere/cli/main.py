"""The command line proper: one parser, and one place where errors become words or a document. The verbs are in the modules of
their groups: `work.py` (commands), `manage.py` (sandboxes), `saving.py` (their states), `drifting.py` (reality, meanwhile),
`housekeeping.py` (the disk), `configure.py` (settings), `about.py` (elsewhere itself)."""

import argparse
import difflib
import functools

from elsewhere import __version__
from elsewhere.cli import about, configure, drifting, housekeeping, manage, saving, show, work
from elsewhere.cli.parsing import Parser, Verbs, print_json
from elsewhere.errors import ElsewhereError, StateError, UsageError
from elsewhere.sandbox.keeping.callers import CallerGone, Signals

__all__ = ["main", "parser"]

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


@functools.cache
def parser() -> tuple[argparse.ArgumentParser, Verbs]:
    """Built once; the launcher builds it ahead of time."""
    top = Parser(
        prog="elsewhere",
        description="Run anything in an instant, disposable copy of this machine. Reality stays as it is.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"elsewhere {__version__}")
    verbs = Verbs(top)
    for group in (work, manage, saving, drifting, housekeeping, configure, about):
        group.add(verbs)
    return top, verbs


def main(argv: list[str], signals: Signals | None) -> int:
    """Parse and do. `signals` come from the client when the work is done on its behalf."""
    as_json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        top, verbs = parser()
        _check_verb(argv, verbs)
        arguments, unknown = top.parse_known_args(argv)
        if unknown:
            raise _unknown_option(verbs.parsers.get(arguments.verb, top), arguments.verb, unknown[0])
        if arguments.verb is None:
            top.print_help()
            return 0
        as_json = arguments.json
        return int(arguments.function(arguments, signals))
    except ElsewhereError as error:
        return _report(error, as_json=as_json, verb=argv[0] if argv else "")
    except BrokenPipeError:
        return 1  # whoever read our output has had enough
    except OSError as error:
        problem = StateError(
            "system_error", f"{error.filename or 'the system'}: {error.strerror}", hint="elsewhere doctor looks around"
        )
        return _report(problem, as_json=as_json, verb=argv[0] if argv else "")
    except CallerGone:
        return 125
    except KeyboardInterrupt:
        return 130


def _check_verb(argv: list[str], verbs: Verbs) -> None:
    if argv and not argv[0].startswith("-") and argv[0] not in verbs.parsers:
        near = difflib.get_close_matches(argv[0], verbs.parsers, n=2)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"one of: {', '.join(verbs.parsers)}"
        raise UsageError("unknown_verb", f"unknown verb {argv[0]!r}", hint=hint)


def _unknown_option(known: argparse.ArgumentParser, verb: str | None, option: str) -> UsageError:
    near = difflib.get_close_matches(option.partition("=")[0], known._option_string_actions, n=1)
    hint = f"did you mean {near[0]}?" if near else f"{known.prog} --help"
    return UsageError("unknown_option", f"{verb or 'elsewhere'} does not know {option!r}", hint=hint)


def _report(error: ElsewhereError, *, as_json: bool, verb: str) -> int:
    if as_json:
        print_json(error.document())
    show.error(error)
    if verb in _RUN_COMMANDS and error.exit_code == 1:
        return 125
    return error.exit_code
