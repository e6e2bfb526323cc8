"""Patterns for paths, as people write them: which of them a path fits.

*.py          a name anywhere: without a slash, a pattern is about one name on the way
src           a directory, with all that lies in it
src/*.py      from the top of the project: * stays within a name
src/**/test   ** goes through any number of directories
/etc/*        from the root of the machine
"""

import re
from collections.abc import Callable, Iterable

from elsewhere.errors import UsageError

__all__ = ["matcher"]


def matcher(patterns: Iterable[str], project: str) -> Callable[[str], bool]:
    """Whether an absolute path fits any of the patterns; without patterns, every one does."""
    patterns = list(patterns)
    found = [_expression(pattern, project.rstrip("/")) for pattern in patterns]
    if not found:
        return lambda _: True
    try:
        whole = re.compile("|".join(found), re.DOTALL)
    except re.error as error:
        raise UsageError(
            "bad_pattern", f"{' '.join(patterns)!r} cannot be understood: {error}", hint="*, **, ? and [a-z] have a meaning"
        ) from error
    return lambda path: whole.fullmatch(path) is not None


def _expression(pattern: str, project: str) -> str:
    if not pattern:  # an unset variable, most likely, and not meant to be everything
        raise UsageError("bad_pattern", "a pattern is empty: '' names nothing", hint="write . for everything, or leave it out")
    pattern = pattern.removeprefix("./").rstrip("/") or "**"
    if pattern == ".":
        pattern = "**"
    if pattern.startswith("/"):
        return _translated(pattern) + "(?:/.*)?"
    if "/" in pattern or pattern == "**":
        return re.escape(f"{project}/") + _translated(pattern) + "(?:/.*)?"
    return f"(?:{re.escape(project)}/)(?:.*/)?{_translated(pattern)}(?:/.*)?"


def _translated(pattern: str) -> str:
    text, at = "", 0
    while at < len(pattern):
        letter = pattern[at]
        if pattern.startswith("**/", at):
            text, at = text + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            text, at = text + ".*", at + 2
        elif letter == "[" and (end := pattern.find("]", at + 2)) > 0:
            inside = pattern[at + 1 : end]
            negated = inside[0] in "!^"
            text += f"[{'^/' if negated else ''}{_escaped(inside[negated:])}]"
            at = end + 1
        else:
            text += {"*": "[^/]*", "?": "[^/]"}.get(letter) or re.escape(letter)
            at += 1
    return text


def _escaped(inside: str) -> str:
    """Of a set of letters, everything is itself but a dash between two of them."""
    return "".join(letter if letter == "-" else re.escape(letter) for letter in inside)
