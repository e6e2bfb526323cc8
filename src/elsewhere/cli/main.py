"""The command line proper: one parser, one function for each verb, one place where errors become words or a document."""

import argparse
import difflib
import functools
import json
from collections.abc import Callable
from typing import Any, NoReturn

from elsewhere import __version__, units
from elsewhere.cli import show
from elsewhere.errors import ElsewhereError, StateError, UsageError
from elsewhere.operations import documents, running, sandboxes
from elsewhere.operations.running import RunRequest
from elsewhere.sandbox import environment
from elsewhere.sandbox.commands import CallerGone, Signals
from elsewhere.sandbox.live import Live

__all__ = ["main", "parser"]

_EPILOG = """examples:
  elsewhere run -- rm -rf src             see what it would do, without doing it
  elsewhere run -c 'make && make install' a shell line
  elsewhere run --timeout 5m -- pytest -q
  elsewhere run --json -- ./fix.sh        one JSON document for programs
  elsewhere diff @last                    what the last one changed
  elsewhere doctor                        what this machine can do
"""


_VERBS: dict[str, argparse.ArgumentParser] = {}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("usage", message, hint=f"{self.prog} --help")


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Built once; the launcher builds it ahead of time."""
    top = _Parser(
        prog="elsewhere",
        description="Run anything in an instant, disposable copy of this machine. Reality stays as it is.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"elsewhere {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", title="verbs")

    run = _verb(verbs, "run", _run, "clone, run a command, show what changed", _RUN_EPILOG)
    run.add_argument("-c", dest="line", metavar="LINE", help="a shell line instead of a command")
    run.add_argument(
        "--project", metavar="DIR", help="the project (default: nearest elsewhere.toml, else git top level, else here)"
    )
    run.add_argument("--cwd", metavar="DIR", help="where the command starts, inside the project (default: here)")
    run.add_argument(
        "--base", choices=["live"], default="live", help="what the sandbox starts from: live (reality, seen through)"
    )
    keeping = run.add_mutually_exclusive_group()
    keeping.add_argument("--keep", action="store_true", help="keep the sandbox even if nothing changed")
    keeping.add_argument("--discard", action="store_true", help="throw the sandbox away even if something changed")
    run.add_argument(
        "--timeout",
        metavar="TIME",
        type=units.duration,
        help="end the command and all it started after this long (90s, 15m)",
    )
    run.add_argument(
        "--env", metavar="NAME[=VALUE]", action="append", default=[], help="set a variable, or pass the caller's own"
    )
    run.add_argument("--env-file", metavar="FILE", action="append", default=[], help="variables from a file of KEY=value lines")
    run.add_argument("--explain", action="store_true", help="list every mount of the sandbox on stderr before the command starts")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")

    _verb(verbs, "list", _list, "sandboxes, newest first", "examples:\n  elsewhere list\n  elsewhere list --json\n")
    inspect = _verb(verbs, "inspect", _inspect, "everything about one sandbox", "examples:\n  elsewhere inspect @last\n")
    inspect.add_argument("id", metavar="ID", help="an id, the beginning or the last part of one, or @last")
    diff = _verb(verbs, "diff", _diff, "what a sandbox changed", "examples:\n  elsewhere diff @last --stat\n")
    diff.add_argument("id", metavar="ID", help="an id, the beginning or the last part of one, or @last")
    diff.add_argument("--stat", action="store_true", help="only how many, by directory")
    remove = _verb(verbs, "rm", _rm, "throw sandboxes away", "examples:\n  elsewhere rm @last\n  elsewhere rm --all\n")
    remove.add_argument("ids", metavar="ID", nargs="*", help="an id, the beginning or the last part of one, or @last")
    remove.add_argument("--all", action="store_true", help="every sandbox that is not running")
    remove.add_argument("--force", action="store_true", help="running ones too")
    _verb(
        verbs,
        "doctor",
        _doctor,
        "what this machine can do, and how to get what is missing",
        "examples:\n  elsewhere doctor\n",
    )
    _verb(verbs, "version", _version, "version and capabilities", "examples:\n  elsewhere version --json\n")
    return top


_RUN_EPILOG = """The exit code is the command's own; 124 after a time-out, 125 if elsewhere failed, 126 and 127 as in a shell.

examples:
  elsewhere run -- rm -rf src
  elsewhere run --timeout 5m -- pytest -q
  elsewhere run --env DEBUG=1 -c 'make && ./server --check'
  elsewhere run --json --discard -- npm test
"""


def _verb(verbs: Any, name: str, function: Callable[..., int], text: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")
    parser.set_defaults(function=function)
    _VERBS[name] = parser
    return parser


def main(argv: list[str], signals: Signals | None) -> int:
    """Parse and do. `signals` come from the client when the work is done on its behalf."""
    as_json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        _check_verb(argv)
        arguments, unknown = parser().parse_known_args(argv)
        if unknown:
            raise _unknown_option(arguments.verb, unknown[0])
        if arguments.verb is None:
            parser().print_help()
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


def _check_verb(argv: list[str]) -> None:
    parser()
    if argv and not argv[0].startswith("-") and argv[0] not in _VERBS:
        near = difflib.get_close_matches(argv[0], _VERBS, n=2)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"one of: {', '.join(_VERBS)}"
        raise UsageError("unknown_verb", f"unknown verb {argv[0]!r}", hint=hint)


def _unknown_option(verb: str | None, option: str) -> UsageError:
    table = parser()._option_string_actions if verb is None else _VERBS[verb]._option_string_actions
    near = difflib.get_close_matches(option.partition("=")[0], table, n=1)
    hint = f"did you mean {near[0]}?" if near else f"elsewhere {verb} --help".replace("None ", "")
    return UsageError("unknown_option", f"{verb or 'elsewhere'} does not know {option!r}", hint=hint)


def _report(error: ElsewhereError, *, as_json: bool, verb: str) -> int:
    if as_json:
        print(json.dumps(error.document()))
    show.error(error)
    if verb in ("run", "exec") and error.exit_code == 1:
        return 125
    return error.exit_code


def _print(document: dict[str, Any]) -> None:
    print(json.dumps(document))


# -- verbs ----------------------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace, signals: Signals | None) -> int:
    argv = arguments.argv
    if argv[:1] == ["--"]:
        argv = argv[1:]
    if arguments.line is not None:
        if argv:
            raise UsageError("two_commands", f"both -c and a command ({argv[0]!r}) were given", hint="give one of them")
        argv = ["/bin/sh", "-c", arguments.line]
    asked = [pair for path in arguments.env_file for pair in environment.read_env_file(path)]
    asked += [environment.parse_assignment(text) for text in arguments.env]
    request = RunRequest(
        argv=argv,
        project=arguments.project,
        directory=arguments.cwd,
        base=arguments.base,
        keep=arguments.keep,
        discard=arguments.discard,
        timeout=None if arguments.timeout is None else units.duration(arguments.timeout),
        environment=asked,
        capture=arguments.json,
    )

    def on_ready(live: Live) -> None:
        if arguments.explain:
            show.plan(live.record)
        show.weaker(live.record)

    result = running.run(request, signals, on_ready)
    if arguments.json:
        _print(documents.run_document(result))
    else:
        show.run(result)
    return result.outcome.exit_code


def _list(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    listing = sandboxes.list_sandboxes()
    if arguments.json:
        _print(documents.list_document(listing))
    else:
        show.listing(listing)
    return 0


def _inspect(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    document = documents.inspect_document(*sandboxes.inspect(arguments.id))
    if arguments.json:
        _print(document)
    else:
        show.inspect(document["sandbox"])
    return 0


def _diff(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    record, changes = sandboxes.changes(arguments.id)
    if arguments.json:
        _print(documents.diff_document(record, changes))
    elif arguments.stat:
        show.stat(record, changes)
    else:
        show.changes(record.project, changes, limit=None)
    return 0


def _rm(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    if arguments.all == bool(arguments.ids):
        raise UsageError("no_selector", "rm needs sandboxes to remove, or --all", hint="elsewhere list shows them")
    removal = (
        sandboxes.remove_all(force=arguments.force) if arguments.all else sandboxes.remove(arguments.ids, force=arguments.force)
    )
    if arguments.json:
        _print(documents.removal_document(removal))
    else:
        show.removal(removal)
    return 1 if removal.skipped and not arguments.all else 0


def _doctor(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    from elsewhere.operations import doctor

    checks = doctor.examine()
    if arguments.json:
        _print(doctor.document(checks))
    else:
        show.doctor(checks)
    return 0 if doctor.healthy(checks) else 1


def _version(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    document = documents.version_document()
    if arguments.json:
        _print(document)
    else:
        print(f"elsewhere {document['version']} (schema {document['schema']}; {', '.join(document['capabilities'])})")
    return 0
