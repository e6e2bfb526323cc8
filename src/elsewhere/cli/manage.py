"""Verbs about sandboxes: create, list, inspect, diff, start, stop, extend, keep, open, cp, rm."""

import argparse
import os
import shlex
import subprocess
import sys

from elsewhere import units
from elsewhere.cli import differences, show
from elsewhere.cli.confining import add_confinement, settings_of
from elsewhere.cli.parsing import Verbs, add_base, add_id, count, print_json
from elsewhere.cli.progress import teller
from elsewhere.errors import UsageError
from elsewhere.operations import creating, files, sandboxes
from elsewhere.operations.creating import Wish
from elsewhere.operations.documents.sandboxes import cp_document, list_document, open_document, removal_document
from elsewhere.operations.inspecting import inspect_document
from elsewhere.operations.sandboxes import Filter
from elsewhere.sandbox.keeping.callers import Signals, pause_of
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State

__all__ = ["add"]

_STATES = ("running", "stopped")
_CREATE_EPILOG = """The id is printed. The same --request again gives the same sandbox.

examples:
  elsewhere create --name fix
  elsewhere create --base-ref main~3 --label ticket=42
  elsewhere create --ttl 2h --json
"""
_CP_EPILOG = """A place in a sandbox is written ID:PATH; a path without / in front is relative to the project.

examples:
  elsewhere cp notes.txt fix:src/
  elsewhere cp fix:build/report.html .
"""


def add(verbs: Verbs) -> None:
    create = verbs.add("create", _create, "make a sandbox that stays", _CREATE_EPILOG)
    add_base(create, "auto")
    create.add_argument("--name", metavar="NAME", help="a name to call it by, one of a kind")
    create.add_argument("--label", metavar="KEY=VALUE", action="append", default=[], help="to find it by; may be repeated")
    create.add_argument("--workflow", metavar="TEXT", help="part of its identity; default: the project's name")
    create.add_argument("--story", metavar="TEXT", help="part of its identity; default: sandbox")
    create.add_argument("--request", metavar="TEXT", help="part of its identity; default: made up")
    add_confinement(create, lives=True)

    epilog = "examples:\n  elsewhere list\n  elsewhere list --state running --label ticket=42\n"
    listing = verbs.add("list", _list, "sandboxes, newest first", epilog)
    listing.add_argument("--state", action="append", choices=_STATES, help="only those in this state")
    listing.add_argument("--label", metavar="KEY=VALUE", action="append", default=[], help="only those with this label")
    listing.add_argument("--project", metavar="DIR", help="only those of this project")
    listing.add_argument("--limit", metavar="N", type=count, help="at most so many")
    add_id(verbs.add("inspect", _inspect, "everything about one sandbox", "examples:\n  elsewhere inspect @last\n"))
    differences.add(verbs)

    stop = verbs.add("stop", _stop, "end everything in a sandbox and keep its files", "examples:\n  elsewhere stop fix\n")
    add_id(stop)
    stop.add_argument(
        "--grace",
        metavar="TIME",
        type=units.duration,
        default=5.0,
        help="how long programs have to end by themselves; default 5s",
    )
    add_id(verbs.add("start", _start, "make a stopped sandbox run again", "examples:\n  elsewhere start fix\n"))
    extend = verbs.add(
        "extend",
        _extend,
        "change when a sandbox ends by itself",
        "examples:\n  elsewhere extend fix 2h\n  elsewhere extend fix --never\n",
    )
    add_id(extend)
    extend.add_argument("time", metavar="TIME", nargs="?", type=units.duration, help="from now on (30m, 12h)")
    extend.add_argument("--never", action="store_true", help="it does not end by itself")
    keep = verbs.add("keep", _keep, "protect a sandbox from being removed", "examples:\n  elsewhere keep fix\n")
    add_id(keep)
    keep.add_argument("--off", action="store_true", help="protect it no longer")

    opened = verbs.add(
        "open",
        _open,
        "the sandbox's project as a path for an editor",
        "The path is good while the sandbox runs.\n\nexamples:\n  elsewhere open fix\n  elsewhere open fix --with 'code -n'\n",
    )
    add_id(opened)
    opened.add_argument("--with", dest="editor", metavar="PROGRAM", help="open it with this program")
    cp = verbs.add("cp", _cp, "copy files between the host and a sandbox", _CP_EPILOG)
    cp.add_argument("source", metavar="SRC", help="a path of the host, or ID:PATH")
    cp.add_argument("target", metavar="DST", help="a path of the host, or ID:PATH")
    cp.add_argument("--force", action="store_true", help="overwrite files of the host")

    remove = verbs.add(
        "rm", _rm, "throw sandboxes away", "examples:\n  elsewhere rm fix\n  elsewhere rm --all\n  elsewhere rm --force @last\n"
    )
    add_id(remove, nargs="*")
    remove.add_argument("--all", action="store_true", help="every sandbox in which nothing runs and nothing changed")
    remove.add_argument(
        "--force", action="store_true", help="also those at work, kept or changed; what was changed goes to the archive"
    )


def _create(arguments: argparse.Namespace, signals: Signals | None) -> int:
    wish = Wish(
        project=arguments.project,
        base=arguments.base,
        base_ref=arguments.base_ref,
        name=arguments.name,
        labels=dict(map(creating.parse_label, arguments.label)),
        workflow=arguments.workflow,
        story=arguments.story,
        request=arguments.request,
        settings=settings_of(arguments),
    )
    made, new = creating.create(wish, teller(), show.remark, pause_of(signals))
    if arguments.json:
        state = State.open()
        print_json({**inspect_document(state, made, sandboxes.keeping(state, made)), "created": new})
    else:
        show.weaker(made)
        print(made.id)
    return 0


def _list(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    wanted = Filter(
        states=tuple(arguments.state or ()),
        labels=dict(map(creating.parse_label, arguments.label)),
        project=None if arguments.project is None else os.path.realpath(arguments.project),
        limit=arguments.limit,
    )
    listing = sandboxes.list_sandboxes(wanted)
    if arguments.json:
        print_json(list_document(listing))
    else:
        show.listing(listing, whole=bool(wanted.labels))
    return 0


def _inspect(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    document = inspect_document(*sandboxes.inspect(arguments.id))
    if arguments.json:
        print_json(document)
    else:
        show.inspect(document["sandbox"])
    return 0


def _stop(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    return _told(arguments, *sandboxes.stop(arguments.id, grace=arguments.grace))


def _start(arguments: argparse.Namespace, signals: Signals | None) -> int:
    return _told(arguments, *sandboxes.start(arguments.id, show.remark, pause_of(signals)))


def _extend(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    if (arguments.time is None) != arguments.never:
        raise UsageError("no_time", "extend needs a time, or --never, and not both", hint="elsewhere extend ID 2h")
    return _told(arguments, *sandboxes.extend(arguments.id, None if arguments.never else arguments.time))


def _keep(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    return _told(arguments, *sandboxes.keep(arguments.id, kept=not arguments.off))


def _told(arguments: argparse.Namespace, state: State, record: Record) -> int:
    if arguments.json:
        print_json(inspect_document(state, record, sandboxes.keeping(state, record)))
    else:
        show.state(record)
    return 0


def _open(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    if arguments.json and arguments.editor:
        raise UsageError("no_json", "a program that is opened has no document", hint="leave --with or --json out")
    record, path = files.open_tree(arguments.id)
    if arguments.editor:
        return subprocess.call([*shlex.split(arguments.editor), path])
    if arguments.json:
        print_json(open_document(record, path))
    else:
        print(path)
    return 0


def _cp(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    record, done = files.copy(arguments.source, arguments.target, overwrite=arguments.force)
    if arguments.json:
        print_json(cp_document(record, done))
    else:
        show.transferred(done)
    return 1 if done.left_out else 0


def _rm(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    if arguments.all == bool(arguments.ids):
        raise UsageError("no_selector", "rm needs sandboxes to remove, or --all", hint="elsewhere list shows them")
    if arguments.all:
        removal = sandboxes.remove_all(force=arguments.force)
    else:
        removal = sandboxes.remove(arguments.ids, force=arguments.force)
    if arguments.json:
        print_json(removal_document(removal))
    else:
        show.removal(removal)
    sys.stdout.flush()
    return 1 if removal.skipped and not arguments.all else 0
