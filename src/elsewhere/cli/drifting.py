"""Verbs about reality as it went on meanwhile: drift, refresh."""

import argparse

from elsewhere.changes.drift import Drift
from elsewhere.cli import show
from elsewhere.cli.parsing import Verbs, add_id, print_json
from elsewhere.cli.progress import teller
from elsewhere.errors import Conflict
from elsewhere.operations import drifting, refreshing
from elsewhere.operations.documents.changes import drift_document, refresh_document
from elsewhere.operations.refreshing import RefreshPlan
from elsewhere.paths import relative
from elsewhere.sandbox.keeping.callers import Signals
from elsewhere.sandbox.records.record import Record

__all__ = ["add"]

_SHOWN = 50
_DRIFT_EPILOG = """Names with ! in front were changed in reality and in the sandbox, those with ~ in reality only.

examples:
  elsewhere drift fix
  elsewhere drift --json @last
"""


_REFRESH_EPILOG = """What the sandbox changed is merged with what reality changed since.
If that cannot be done, nothing is: exit code 3, and the list with reasons.

examples:
  elsewhere refresh fix --dry-run
  elsewhere refresh fix
"""


def add(verbs: Verbs) -> None:
    add_id(verbs.add("drift", _drift, "what happened in reality since a sandbox's base", _DRIFT_EPILOG))
    refresh = verbs.add("refresh", _refresh, "move a sandbox to reality as it is now, with what it changed", _REFRESH_EPILOG)
    add_id(refresh)
    refresh.add_argument("--dry-run", action="store_true", help="only tell what would become of each path")


def _drift(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    record, found = drifting.drift(arguments.id)
    if arguments.json:
        print_json(drift_document(record, found))
    else:
        _show(record, found)
    return 0


def _refresh(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    record, plan = refreshing.refresh(arguments.id, teller(), dry_run=arguments.dry_run)
    if arguments.json:
        print_json(refresh_document(record, plan, dry_run=arguments.dry_run))
    else:
        _show_plan(plan)
    return Conflict.exit_code if plan.conflicts else 0


def _show_plan(plan: RefreshPlan) -> None:
    for one in plan.conflicts:
        print(f"   ! {show.safe(one.path)}: {one.sentence} ({one.reason})")
    for written in plan.written:
        print(f"   m {show.safe(written.path)}")
    for path in plan.dropped:
        print(f"   = {show.safe(path)}")
    counts = ((plan.conflicts, "in conflict"), (plan.written, "merged"), (plan.dropped, "as in reality"), (plan.kept, "kept"))
    print(", ".join(f"{len(found)} {word}" for found, word in counts if found) or "nothing to merge")


def _show(record: Record, found: Drift) -> None:
    both = set(found.overlapping)
    shown = sorted(found.changed, key=lambda path: (path not in both, path))
    for path in shown[:_SHOWN]:
        print(f"   {'!' if path in both else '~'} {show.safe(relative(path, record.project))}")
    if len(shown) > _SHOWN:
        print(f"   … and {len(shown) - _SHOWN:,} more")
    for one in found.packages[:_SHOWN]:
        print(f"   {one.manager} {show.safe(one.name)} {show.safe(one.version or '')} {one.what}".replace("  ", " "))
    if len(found.packages) > _SHOWN:
        print(f"   … and {len(found.packages) - _SHOWN:,} more")
    print(found.summary())
