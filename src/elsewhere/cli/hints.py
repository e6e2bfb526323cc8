"""What somebody may have meant who wrote a verb or an option that there is not: what is spelled nearly so, or what other programs
call it."""

import argparse
import difflib
from collections.abc import Iterable

__all__ = ["for_option", "for_verb"]

_OTHER_WORDS = {
    "abort": "cancel",
    "apply": "promote",
    "attach": "shell",
    "bash": "shell",
    "branch": "fork",
    "changes": "diff",
    "checkpoint": "snapshot",
    "clean": "janitor rm",
    "cleanup": "janitor rm",
    "clone": "fork",
    "commit": "promote snapshot",
    "copy": "cp",
    "delete": "rm",
    "destroy": "rm",
    "discard": "rm",
    "edit": "open",
    "enter": "shell",
    "gc": "janitor",
    "history": "requests promotions",
    "info": "inspect doctor",
    "jobs": "requests",
    "land": "promote",
    "ls": "list",
    "merge": "promote",
    "new": "create",
    "pause": "stop",
    "prune": "janitor",
    "purge": "rm janitor",
    "push": "promote",
    "rebase": "refresh",
    "remove": "rm",
    "reset": "rollback",
    "restart": "stop start",
    "restore": "rollback",
    "resume": "start",
    "revert": "undo",
    "save": "snapshot",
    "settings": "config",
    "sh": "shell",
    "show": "inspect",
    "ssh": "shell",
    "stats": "top",
    "status": "list inspect",
    "sync": "refresh",
    "tail": "logs",
    "update": "refresh",
    "usage": "df top",
}
_OTHER_LETTERS = {"-n": "--dry-run"}
_MOST = 2


def for_verb(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = _OTHER_WORDS.get(word.lower(), "").split() or difflib.get_close_matches(word, known, n=_MOST)
    return _meant(map(repr, near)) if near else f"one of: {', '.join(known)}"


def for_option(option: str, known: argparse.ArgumentParser) -> str:
    options, name = known._option_string_actions, option.partition("=")[0]
    if option in options:
        return f"write it after the verb: {known.prog} {option}"
    if len(name) == 2 and name.startswith("-"):
        usual = _OTHER_LETTERS.get(name)
        near = [usual] if usual in options else [one for one in options if one.startswith(f"--{name[1]}") and one != "--help"]
    else:
        near = difflib.get_close_matches(name, options, n=1)
    return _meant(near[:_MOST]) if near else f"{known.prog} --help"


def _meant(near: Iterable[str]) -> str:
    return f"did you mean {' or '.join(near)}?"
