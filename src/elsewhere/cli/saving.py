"""Verbs about a sandbox's states: snapshot, snapshots, rollback, fork, rm-snapshot."""

import argparse
import sys

from elsewhere import units
from elsewhere.cli import show
from elsewhere.cli.parsing import Verbs, add_id, count, print_json
from elsewhere.clock import stamp
from elsewhere.errors import ElsewhereError
from elsewhere.operations import snapshots
from elsewhere.operations.documents.sandboxes import fork_document, rollback_document, snapshot_document, snapshots_document
from elsewhere.sandbox.keeping.callers import Signals
from elsewhere.sandbox.records.record import Record

__all__ = ["add"]


def add(verbs: Verbs) -> None:
    epilog = "Files only: what runs in it goes on, and is not part of a snapshot.\n\nexamples:\n  elsewhere snapshot fix green\n"
    snapshot = verbs.add("snapshot", _snapshot, "save the state of a sandbox", epilog)
    add_id(snapshot)
    snapshot.add_argument("name", metavar="NAME", nargs="?", help="what to call it; made up if not given")

    epilog = "examples:\n  elsewhere snapshots fix\n  elsewhere snapshots fix --tree\n"
    listing = verbs.add("snapshots", _snapshots, "the saved states of a sandbox, oldest first", epilog)
    add_id(listing)
    listing.add_argument("--tree", action="store_true", help="which came from which")

    epilog = """What it has now is saved first, so that this, too, can be taken back.

examples:
  elsewhere rollback fix green
  elsewhere rollback fix base
"""
    rollback = verbs.add("rollback", _rollback, "return a sandbox to a saved state", epilog)
    add_id(rollback)
    rollback.add_argument("name", metavar="NAME", help="a snapshot, older or newer, or base: what the sandbox started from")
    rollback.add_argument("--force", action="store_true", help="end what runs in it")

    epilog = """The ids are printed. A fork is only directories until something runs in it.

examples:
  elsewhere fork fix -n 2
  elsewhere fork fix --from green --name other
"""
    fork = verbs.add("fork", _fork, "make sandboxes that start from the state of another one", epilog)
    add_id(fork)
    fork.add_argument("-n", dest="count", metavar="N", type=count, default=1, help="how many; default 1")
    fork.add_argument("--from", dest="source", metavar="SNAPSHOT", help="start from this snapshot, not from what there is now")
    fork.add_argument("--name", metavar="NAME", help="what to call it; of several, NAME-1, NAME-2, …")

    gone = verbs.add("rm-snapshot", _remove, "forget a saved state", "examples:\n  elsewhere rm-snapshot fix green\n")
    add_id(gone)
    gone.add_argument("name", metavar="NAME", help="the snapshot")


def _running(stopped: int | None) -> None:
    if stopped:
        running = units.count(stopped, "process", "processes")
        show.remark(f"{running} went on running: only files are saved, as they were at one moment")


def _snapshot(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    taken = snapshots.snapshot(arguments.id, arguments.name)
    if arguments.json:
        print_json(snapshot_document(taken))
        return 0
    _running(taken.stopped)
    if taken.snapshot["copied"] and not taken.stopped:
        show.remark(f"copied: on {taken.record.mechanism} nothing can be gone on from without a copy")
    print(taken.snapshot["name"])
    return 0


def _snapshots(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    _, found, sizes = snapshots.snapshots(arguments.id)
    if arguments.json:
        print_json(snapshots_document(found, sizes))
    elif arguments.tree:
        _print_tree(found)
    else:
        rows = [
            [one["name"], one["parent"] or "base", stamp(one["created_at"]), _size(sizes.get(one["name"])), _here(found, one)]
            for one in found.snapshots
        ]
        show.table(rows, sys.stdout, ["NAME", "FROM", "CREATED", "SIZE", ""])
    return 0


def _size(found: int | None) -> str:
    return "-" if found is None else units.format_size(found)


def _here(found: Record, one: dict[str, object]) -> str:
    return "◄ goes on from here" if one["name"] == found.at else ""


def _print_tree(found: Record) -> None:
    children: dict[str | None, list[dict[str, object]]] = {}
    for one in found.snapshots:
        children.setdefault(one["parent"], []).append(one)
    print("base" + ("  ◄ goes on from here" if found.at is None else ""))
    waiting: list[tuple[str, dict[str, object], bool]] = []

    def below(name: object, indent: str) -> None:
        named = children.get(name if isinstance(name, str) else None, [])
        waiting.extend((indent, one, one is named[-1]) for one in reversed(named))

    below(None, "")
    while waiting:  # not by recursion: a chain of snapshots may be long
        indent, one, last = waiting.pop()
        print(f"{indent}{'└─' if last else '├─'} {one['name']}  {_here(found, one)}".rstrip())
        below(one["name"], indent + ("   " if last else "│  "))


def _rollback(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    returned = snapshots.rollback(arguments.id, arguments.name, force=arguments.force)
    if arguments.json:
        print_json(rollback_document(returned))
        return 0
    if returned.left:
        show.remark(f"what it had is saved as {returned.left}: elsewhere rollback {returned.record.id} {returned.left}")
    print(returned.snapshot["name"])
    return 0


def _fork(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    forked = snapshots.fork(arguments.id, arguments.count, name=arguments.name, source=arguments.source)
    failed = [child for child in forked.children if isinstance(child, ElsewhereError)]
    if arguments.json:
        print_json(fork_document(forked))
    else:
        _running(forked.stopped)
        for child in forked.children:
            if isinstance(child, ElsewhereError):
                show.error(child)
            else:
                print(child.id)
    return 1 if failed else 0


def _remove(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    _, found, gone = snapshots.remove(arguments.id, arguments.name)
    if arguments.json:
        print_json({"removed": [gone["name"]], "sandbox": {"id": found.id}})
    else:
        print(gone["name"])
    return 0
