"""Verbs about the disk: df, janitor."""

import argparse
import sys

from elsewhere import units
from elsewhere.cli import show
from elsewhere.cli.parsing import Verbs, print_json
from elsewhere.operations import housekeeping
from elsewhere.sandbox.keeping.callers import Signals

__all__ = ["add"]


def add(verbs: Verbs) -> None:
    verbs.add("df", _df, "what sandboxes, snapshots, bases and the archive take on the disk", "examples:\n  elsewhere df\n")
    epilog = "examples:\n  elsewhere janitor --dry-run\n  elsewhere janitor\n"
    janitor = verbs.add("janitor", _janitor, "take away what no sandbox needs any more", epilog)
    janitor.add_argument("--dry-run", action="store_true", help="only say what would go")


def _df(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    disk = housekeeping.df()
    if arguments.json:
        items = [{"kind": one.kind, "id": one.id, "bytes": one.bytes, "shared_bytes": one.shared} for one in disk.items]
        print_json({"total_bytes": disk.total, "items": items})
        return 0
    size = units.format_size
    rows = [[one.kind, one.id, size(one.bytes), size(one.shared) if one.shared else ""] for one in disk.items if one.bytes]
    show.table(rows, sys.stdout, ["KIND", "ID", "OWN", "SHARED"])
    print(f"{size(disk.total)} in all")
    return 0


def _janitor(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    done = housekeeping.janitor(dry_run=arguments.dry_run)
    if arguments.json:
        names = ("matched", "removed", "skipped", "healed", "dry_run")
        print_json({name: getattr(done, name) for name in names})
        return 0
    for name in done.matched:
        print(f"{'would remove' if done.dry_run else 'removed'} {name}")
    for one in done.skipped:
        show.remark(f"skipped {one['id']}: {one['reason']}")
    if not done.matched:
        show.remark("nothing that no sandbox needs")
    return 0
