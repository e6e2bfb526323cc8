"""The verb `diff`: what changed, for people. In a terminal a patch is coloured, and nothing in it can speak to the terminal."""

import argparse
import sys

from elsewhere import units
from elsewhere.changes.model import Change, Changes
from elsewhere.changes.patch import FileStat
from elsewhere.cli import show
from elsewhere.cli.parsing import Verbs, add_id, print_json
from elsewhere.operations.diffing import Difference, difference
from elsewhere.operations.documents.changes import changed_names, diff_document
from elsewhere.paths import relative
from elsewhere.sandbox.keeping.callers import Signals

__all__ = ["add"]

_EPILOG = """A STATE is base, now, the name of a snapshot, or ID or ID:STATE for another sandbox of the same project.

examples:
  elsewhere diff @last --stat
  elsewhere diff fix --patch 'src/**/*.py'
  elsewhere diff fix --patch > fix.patch && git apply --binary fix.patch
  elsewhere diff fix --from other
"""
_BAR = 40
_HEADS = (b"diff ", b"index ", b"old mode", b"new mode", b"new file", b"deleted file", b"--- ", b"+++ ", b"GIT binary")
_COLOURS = {b"@": "36", b"+": "32", b"-": "31"}


def add(verbs: Verbs) -> None:
    diff = verbs.add("diff", _diff, "what a sandbox changed", _EPILOG)
    add_id(diff)
    diff.add_argument("patterns", metavar="GLOB", nargs="*", help="only paths that fit: *.py, src, 'src/**/test_*', /etc")
    diff.gathers = "patterns"
    shape = diff.add_mutually_exclusive_group()
    shape.add_argument("--stat", action="store_true", help="how much changed in each file")
    shape.add_argument("--patch", action="store_true", help="the project's part as a patch for `git apply --binary`")
    shape.add_argument("--name-only", action="store_true", help="only the names, one on a line")
    diff.add_argument("--from", dest="before", metavar="STATE", default="base", help="compared with this; default base")
    diff.add_argument("--to", dest="after", metavar="STATE", default="now", help="what became of it; default now")


def _diff(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    with difference(arguments.id, arguments.before, arguments.after, arguments.patterns) as found:
        if arguments.json:
            shapes = {"names": arguments.name_only, "stat": arguments.stat, "patch": arguments.patch}
            print_json(diff_document(found, **shapes))
        elif arguments.patch:
            _print_patch(found)
        elif arguments.name_only:
            for path in changed_names(found):
                print(show.safe(path))
        elif arguments.stat:
            _print_stat(found)
        else:
            _print_names(found.record.project, found.inside)
            _print_rest(found)
    return 0


# -- names ----------------------------------------------------------------------------------------------------------------------


def _print_names(project: str, changes: Changes) -> None:
    about = {one.path: one for one in changes.entries}
    for kind, path in changes:
        mark, colour = show.MARKS[kind]
        words = _words(about.get(path), project)
        print(show.paint(f"   {mark} {show.safe(relative(path, project))}{words}", colour, sys.stdout))


def _words(one: Change | None, project: str) -> str:
    """What is worth a word besides the name."""
    if one is None:
        return ""
    said = []
    if one.source is not None:
        said.append(f"was {show.safe(relative(one.source, project))}")
    if one.before is not None and one.after is not None:
        if "mode" in one.what:
            said.append(f"mode {one.before.mode:o} → {one.after.mode:o}")
        if "link" in one.what:
            said.append(f"link {show.safe(one.before.target or '')} → {show.safe(one.after.target or '')}")
        if "type" in one.what:
            said.append(f"{one.before.type} → {one.after.type}")
    return f" ({', '.join(said)})" if said else ""


def _print_rest(found: Difference) -> None:
    """What lies outside of the project, git's own files, and a line that sums up."""
    if found.outside:
        print(show.paint("outside the project", "1", sys.stdout))
        for one in found.summary.packages:
            versions = " → ".join(show.safe(version) for version in (one.before, one.after) if version)
            words = " ".join(word for word in (show.safe(one.name), versions, one.what) if word)
            print(f"   {one.manager}: {words}, {units.count(one.files, 'file')}")
        for manager, count in found.summary.managed.items():
            print(f"   {manager}: {units.count(count, 'file')} of its own")
        _print_names(found.record.project, found.summary.rest)
        shown = {one.path for one in found.summary.rest.entries}
        for path in found.configuration():
            if path not in shown:
                print(f"   configuration {show.safe(path)}")
    parts = [found.inside.summary()] if found.inside or not found.outside else []
    parts += [f"outside the project: {found.outside.summary()}"] if found.outside else []
    parts += [f"git: {units.count(found.git, 'file')} of its own"] if found.git else []
    print("; ".join(parts))


# -- numbers --------------------------------------------------------------------------------------------------------------------


def _print_stat(found: Difference) -> None:
    told = found.stat()
    project = found.record.project
    most = max((_changed(one) for one in told), default=0)
    rows = [(show.safe(relative(one.path, project)), one) for one in told]
    width = max((len(name) for name, _ in rows), default=0)
    for name, one in rows:
        print(f"   {name.ljust(width)} | {_amount(one, most)}")
    for change in found.inside.entries:
        if change.path.endswith("/"):
            print(f"   {show.safe(relative(change.path, project)).ljust(width)} | {change.kind}{_words(change, project)}")
    added, deleted = (sum(getattr(one, key) or 0 for one in told) for key in ("lines_added", "lines_deleted"))
    if told:
        print(f"{units.count(len(told), 'file')}, {units.count(added, 'line')} added, {units.count(deleted, 'line')} deleted")
    _print_rest(found)


def _changed(one: FileStat) -> int:
    return (one.lines_added or 0) + (one.lines_deleted or 0)


def _amount(one: FileStat, most: int) -> str:
    if one.binary:
        sizes = ["nothing" if size is None else units.format_size(size) for size in (one.bytes_before, one.bytes_after)]
        return f"binary, {sizes[0]} → {sizes[1]}"
    scale = min(1.0, _BAR / most) if most else 1.0
    bars = [
        show.paint(mark * (max(1, round(count * scale)) if count else 0), colour, sys.stdout)
        for mark, count, colour in (("+", one.lines_added or 0, "32"), ("-", one.lines_deleted or 0, "31"))
    ]
    return f"{_changed(one)} {''.join(bars)}".rstrip() + (" (renamed)" if one.kind == "renamed" else "")


# -- the patch ------------------------------------------------------------------------------------------------------------------


def _print_patch(found: Difference) -> None:
    made = found.patch()
    sys.stdout.flush()
    if sys.stdout.isatty():
        for text in _coloured(made.text):
            print(text)
    else:
        sys.stdout.buffer.write(made.text)
        sys.stdout.buffer.flush()
    for one in made.left_out:
        show.remark(f"not in the patch: {relative(one.path, found.record.project)}: {one.why}")


def _coloured(patch: bytes) -> list[str]:
    """Lines for a terminal. Heads end with the first hunk: after that, a line that looks like one is content."""
    shown, head = [], True
    for line in patch.split(b"\n")[:-1]:
        if line.startswith(b"diff --git "):
            head = True
        elif line.startswith(b"@@"):
            head = False
        colour = "1" if head and line.startswith(_HEADS) else "" if head else _COLOURS.get(line[:1], "")
        text = "\t".join(show.safe(part.decode("utf-8", "surrogateescape")) for part in line.split(b"\t"))
        shown.append(show.paint(text, colour, sys.stdout) if colour else text)
    return shown
