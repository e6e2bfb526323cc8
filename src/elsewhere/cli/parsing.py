"""What all verbs share: how one is added to the parser, and arguments that several of them have."""

import argparse
import json
from collections.abc import Callable
from typing import Any, NoReturn

from elsewhere import units
from elsewhere.errors import UsageError
from elsewhere.sandbox import environment

__all__ = [
    "Parser",
    "Verbs",
    "add_base",
    "add_command",
    "add_environment",
    "add_id",
    "command_of",
    "count",
    "environment_of",
    "print_json",
]

_MOST_DIGITS = 18
_ID = "an id, a name, the beginning or the last part of an id, or @last"


class Parser(argparse.ArgumentParser):
    """`after_id` knows the options of a verb that takes an ID and a command: argparse would give what stands between the two to
    the command. `gathers` names a list of words that may also stand after options, where argparse would not look for them; nor
    would it for a word that need not be there. What
    the type of an option says against a value is told, where argparse would only say that it is invalid."""

    after_id: "Parser | None" = None
    gathers = ""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.register("type", int, _whole_number)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        words = getattr(found, "argv", [])
        if self.after_id is not None and words and words[0].startswith("-") and words[0] not in ("-", "--"):
            found.argv = []
            found, more = self.after_id.parse_known_args(words, found)
            unknown += more
        self._take_late(found, unknown)
        if self.gathers:
            end = unknown.index("--") if "--" in unknown else len(unknown)
            words = [word for word in unknown[:end] if not word.startswith("-")] + unknown[end + 1 :]
            unknown = [word for word in unknown[:end] if word.startswith("-")]
            setattr(found, self.gathers, [*getattr(found, self.gathers), *words])
        return found, unknown

    def _take_late(self, found: argparse.Namespace, unknown: list[str]) -> None:
        end = unknown.index("--") if "--" in unknown else len(unknown)
        late = [word for word in unknown[:end] if not word.startswith("-")]
        for action in self._get_positional_actions():
            if late and action.nargs == "?" and getattr(found, action.dest) is None:
                unknown.remove(late[0])
                try:
                    setattr(found, action.dest, self._get_values(action, [late.pop(0)]))
                except argparse.ArgumentError as error:
                    self.error(str(error))

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            said = error.__context__
            if not isinstance(said, UsageError):
                raise
            said.message = f"{error.argument_name}: {said.message}"
            raise said from None

    def error(self, message: str) -> NoReturn:
        raise UsageError("usage", message, hint=f"{self.prog} --help")


class Verbs:
    """The verbs of the command line, by name."""

    def __init__(self, top: Parser) -> None:
        self._verbs = top.add_subparsers(dest="verb", metavar="VERB", title="verbs")
        self.parsers: dict[str, Parser] = {}

    def add(self, name: str, function: Callable[..., int], text: str, epilog: str) -> Parser:
        parser: Parser = self._verbs.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")
        parser.set_defaults(function=function)
        self.parsers[name] = parser
        return parser


def add_id(parser: argparse.ArgumentParser, **more: Any) -> None:
    parser.add_argument("ids" if more else "id", metavar="ID", help=_ID, **more)


def count(text: str) -> int:
    """How many: none or more."""
    if not (text.isascii() and text.isdigit()) or len(text) > _MOST_DIGITS:
        raise UsageError("bad_count", f"{units.brief(text)} is not a count", hint="write a whole number, such as 3")
    return int(text)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError("usage", f"{units.brief(text)} is not a whole number", hint="write digits only, such as 42") from None


def add_base(parser: argparse.ArgumentParser, default: str, *, over_a_file: bool = False) -> None:
    """`over_a_file`: what is not said is None, since a file may say it."""
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--base",
        choices=["live", "pinned", "auto"],
        default=None if over_a_file else default,
        help="what the sandbox starts from: live (reality, seen through), pinned (the project as it is now), auto (pinned where "
        f"that is cheap); default {default}",
    )
    start.add_argument("--base-ref", metavar="REF", help="start from this commit of the project: a branch, a tag, a commit")
    parser.add_argument(
        "--project", metavar="DIR", help="the project (default: nearest elsewhere.toml, else git top level, else here)"
    )


def add_environment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--env", metavar="NAME[=VALUE]", action="append", default=[], help="set a variable, or pass the caller's own"
    )
    parser.add_argument(
        "--env-file", metavar="FILE", action="append", default=[], help="variables from a file of KEY=value lines"
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=units.duration,
        help="end the command and all it started after this long (90s, 15m)",
    )


def environment_of(arguments: argparse.Namespace) -> list[tuple[str, str | None]]:
    asked = [pair for path in arguments.env_file for pair in environment.read_env_file(path)]
    return asked + [environment.parse_assignment(text) for text in arguments.env]


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", dest="line", metavar="LINE", help="a shell line instead of a command")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")


def command_of(arguments: argparse.Namespace) -> list[str]:
    argv: list[str] = arguments.argv
    if argv[:1] == ["--"]:
        argv = argv[1:]
    if arguments.line is None:
        return argv
    if argv:
        raise UsageError("two_commands", f"both -c and a command ({argv[0]!r}) were given", hint="give one of them")
    return ["/bin/sh", "-c", arguments.line]


def print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)
