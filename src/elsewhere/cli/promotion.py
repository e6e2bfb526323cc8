"""Verbs about the way back to reality: promote, promotions, undo, approve."""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

from elsewhere import units
from elsewhere.cli import show
from elsewhere.cli.parsing import Verbs, add_id, print_json
from elsewhere.errors import Conflict, UsageError
from elsewhere.operations import promoted, promoting, resolving, undoing
from elsewhere.operations.documents.common import name
from elsewhere.operations.documents.sandboxes import sandbox_document
from elsewhere.operations.earlier import named
from elsewhere.operations.promoting import Asked
from elsewhere.promotion.settling import NOT_BY_OURS
from elsewhere.sandbox.keeping.callers import Signals

__all__ = ["add", "agree_of", "show_done", "thinks"]

_SHOWN = 50
_SHOWN_LINES = 20
_PROMOTE_EPILOG = """Three-way: what only the sandbox changed is taken, what both changed is merged if it is
text, and anything else is a conflict: then nothing at all is done, and the exit code is 3.

examples:
  elsewhere promote fix --dry-run
  elsewhere promote fix
  elsewhere promote fix --path 'src/**'
  elsewhere promote fix --ours settings.py --theirs notes.txt
  elsewhere promote fix --to staging
"""
_UNDO_EPILOG = """What was changed in reality since stays, or is in the way: then nothing is done (exit code 3).

examples:
  elsewhere undo
  elsewhere undo p6919 --dry-run
"""


def add(verbs: Verbs) -> None:
    promote = verbs.add("promote", _promote, "move what a sandbox changed to reality", _PROMOTE_EPILOG)
    add_id(promote)
    promote.add_argument("--path", dest="paths", metavar="GLOB", action="append", default=[], help="only what fits")
    _add_choices(promote, "take the sandbox's version of a path in conflict", "leave reality's")
    promote.add_argument("--ignored", action="store_true", help="what git ignores as well")
    promote.add_argument(
        "--outside",
        metavar="GLOB",
        action="append",
        default=[],
        help="what fits outside of the project as well, for example /etc/hosts",
    )
    promote.add_argument("--to", metavar="STAGE", help="through the project's stages up to this one; default: the first")
    promote.add_argument("--branch", metavar="NAME", help="where commits made inside go; default elsewhere/SANDBOX")
    promote.add_argument("--checkout", action="store_true", help="move HEAD and the index to that branch as well")
    promote.add_argument("--no-commits", action="store_true", help="leave commits made inside where they are")
    promote.add_argument(
        "--replay", action="store_true", help="run the sandbox's commands again, in reality, instead of moving files"
    )
    promote.add_argument("--resolve", action="store_true", help="make a fork with both versions in it, to settle conflicts there")
    promote.add_argument("--yes", action="store_true", help="agree to paths that run by themselves (hooks, CI files, …)")
    promote.add_argument("--dry-run", action="store_true", help="only tell what would happen")

    epilog = "examples:\n  elsewhere promotions\n  elsewhere promotions show @last\n"
    listing = verbs.add("promotions", _promotions, "what was moved to reality, and what became of it", epilog)
    listing.add_argument("what", metavar="show", nargs="?", choices=["show"], help="everything about one")
    listing.add_argument("id", metavar="PROMOTION", nargs="?", help="an id, the beginning of one, or @last")

    undo = verbs.add("undo", _undo, "take a promotion back", _UNDO_EPILOG)
    undo.add_argument(
        "id", metavar="PROMOTION", nargs="?", help="an id, the beginning of one, or @last; default: the project's last"
    )
    _add_choices(undo, "take a path in conflict back even so", "leave it as it is")
    undo.add_argument("--dry-run", action="store_true", help="only tell what would happen")

    epilog = "Who approves is written down.\n\nexamples:\n  elsewhere approve @last\n"
    approve = verbs.add("approve", _approve, "let a promotion go on that waits for a person", epilog)
    approve.add_argument("id", metavar="PROMOTION", help="an id, the beginning of one, or @last")


def _add_choices(parser: argparse.ArgumentParser, ours: str, theirs: str) -> None:
    parser.add_argument("--ours", metavar="PATH", action="append", default=[], help=ours)
    parser.add_argument("--theirs", metavar="PATH", action="append", default=[], help=theirs)


# -- promote --------------------------------------------------------------------------------------------------------------------


def _promote(arguments: argparse.Namespace, signals: Signals | None) -> int:
    asked = Asked(
        paths=tuple(arguments.paths),
        ours=tuple(arguments.ours),
        theirs=tuple(arguments.theirs),
        ignored=arguments.ignored,
        outside=tuple(arguments.outside),
        commits=not arguments.no_commits,
        branch=arguments.branch,
        checkout=arguments.checkout,
        replay=arguments.replay,
        to=arguments.to,
        dry_run=arguments.dry_run,
        agree=agree_of(arguments, signals),
        thinks=thinks(arguments),
    )
    if arguments.resolve:
        _refuse_beside_resolve(arguments)
        return _resolve(arguments, asked)
    done = promoting.promote(arguments.id, asked, tell=show.remark)
    _tell(arguments, promoted.of_promote(done))
    return Conflict.exit_code if done.is_refused else 0


def _refuse_beside_resolve(arguments: argparse.Namespace) -> None:
    """Options that would have no effect: nothing is moved."""
    for other in ("dry_run", "to", "replay", "branch", "checkout", "no_commits", "yes"):
        if getattr(arguments, other):
            raise UsageError(
                "options_together",
                f"--{other.replace('_', '-')} means nothing beside --resolve",
                hint="leave one of them out",
            )


def _tell(arguments: argparse.Namespace, said: dict[str, Any]) -> None:
    if arguments.json:
        print_json(promoted.document(said))
    else:
        show_done(said)


def _resolve(arguments: argparse.Namespace, asked: Asked) -> int:
    made, ready = resolving.resolve(arguments.id, asked)
    if arguments.json:
        found = (promoting.conflict_document(one, made.project) for one in ready.plan.conflicts)
        conflicts = [{**one, "path": name(one["path"])} for one in found]
        print_json({"sandbox": sandbox_document(made), "conflicts": conflicts})
        return 0
    for one in ready.plan.conflicts:
        how = "both versions are marked in it" if one.content is not None else _how(one.reason)
        print(f"   ! {show.safe(named(one.root, one.path, made.project))}: {show.safe(one.sentence)}; {how}", file=sys.stderr)
    show.remark(f"settle {units.count(len(ready.plan.conflicts), 'conflict')} in {made.id}, then promote it")
    print(made.id)
    return 0


def _how(reason: str) -> str:
    return NOT_BY_OURS.get(reason, "change it, or --ours") + ("" if reason == "markers_left" else ", or --theirs")


def agree_of(arguments: argparse.Namespace, signals: Signals | None) -> promoting.Agree | None:
    if arguments.yes:
        return lambda _: True
    return functools.partial(_asked, signals) if _has_terminal(arguments) else None


def thinks(arguments: argparse.Namespace) -> bool:
    """Whether it is a person who is asked."""
    return not arguments.yes and _has_terminal(arguments)


def _has_terminal(arguments: argparse.Namespace) -> bool:
    return not arguments.json and sys.stdin.isatty() and sys.stderr.isatty()


def _asked(signals: Signals | None, marks: Sequence[tuple[str, str]]) -> bool:
    print("to be agreed to, since it runs by itself or is run:", file=sys.stderr)
    for path, why in marks:
        print(show.paint(f"   ! {show.safe(path)}: {why}", "33", sys.stderr), file=sys.stderr)
    print("go on? [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        if signals is not None:
            signals.wait_for(sys.stdin.fileno())
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise


def show_done(said: dict[str, Any]) -> None:
    merged = set(said["merged"])
    lines = [("!", f"{one['path']}: {one['sentence']} ({one['reason']})", "31") for one in said["conflicts"]]
    lines += [("m" if path in merged else "✓", path, "36" if path in merged else "32") for path in said["applied"]]
    lines += [("-", path, "31") for path in said["deleted"]]
    for mark, words, colour in lines[:_SHOWN]:
        print(show.paint(f"   {mark} {show.safe(words)}", colour, sys.stdout))
    if len(lines) > _SHOWN:
        print(f"   … and {len(lines) - _SHOWN:,} more")
    for one in said.get("marked", []):
        show.remark(f"runs by itself: {one['path']}: {one['why']}")
    for why, paths in said.get("left_out", {}).items():
        if paths and why == "commits":
            show.remark(f"commits made inside stay there: the project is not the top of their repository, {', '.join(paths)}")
        elif paths and why != "git":
            taken = {"ignored": "; --ignored takes that", "outside": "; --outside GLOB takes what fits"}.get(why, "")
            show.remark(f"left out, {why}: {units.count(len(paths), 'path')}, for example {paths[0]}{taken}")
    commits = said.get("commits")
    if commits:
        if commits["count"]:
            print(f"   {units.count(commits['count'], 'commit')}: {show.safe(commits['branch'] or 'HEAD')}")
        for one in commits["submodules"]:
            show.remark(f"the submodule {one['path']} is at another commit, which has to be fetched by itself: {one['new'][:12]}")
        if commits["lfs"]:
            show.remark(f"{units.count(len(commits['lfs']), 'LFS pointer')}: what they stand for stays in the sandbox")
        for ref, branch in commits["others"].items():
            print(f"   {show.safe(ref)}: {show.safe(branch)}")
    for one in said.get("stages", []):
        print(f"   {one['name']}: {one['status']}")
        for conflict in one["conflicts"] if said["id"] is None else ():
            print(show.paint(f"      ! {show.safe(conflict['path'])}: {show.safe(conflict['sentence'])}", "31", sys.stdout))
    counts = (
        (said["conflicts"], "in conflict"),
        (said["applied"], "written"),
        (said["deleted"], "deleted"),
        (merged, "of them merged"),
    )
    words = ", ".join(f"{len(paths):,} {word}" for paths, word in counts if paths) or "nothing to move"
    print(f"{words}: {said['status']}{_next(said)}")


def _next(said: dict[str, Any]) -> str:
    if said["id"] is None:
        return ""
    hints = {"applied": "elsewhere undo {} takes it back", "waiting": "elsewhere approve {} lets it go on"}
    commits = said.get("commits") or {"count": 0, "others": {}}
    moved = said["applied"] or said["deleted"] or commits["count"] or commits["others"] or said["kind"] == "replay"
    hint = hints.get(said["status"]) if moved or said["status"] != "applied" else None
    return f" as {said['id']}" + (f"; {hint.format(said['id'])}" if hint else "")


# -- undo, promotions -----------------------------------------------------------------------------------------------------------


def _undo(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    undone = undoing.undo(arguments.id, ours=tuple(arguments.ours), theirs=tuple(arguments.theirs), dry_run=arguments.dry_run)
    _tell(arguments, promoted.of_undo(undone))
    return Conflict.exit_code if undone.plan.conflicts else 0


def _promotions(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    if arguments.what is not None:
        return _one(arguments)
    found = undoing.promotions()
    if arguments.json:
        print_json(promoted.documents(found))
        return 0
    heads = ["PROMOTION", "WHEN", "STATUS", "STAGE", "SANDBOX", "WHAT"]
    show.table([_row(promoted.of_promotion(one)) for one in found], sys.stdout, heads)
    return 0


def _approve(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    _tell(arguments, promoted.of_promotion(promoting.approve(arguments.id, tell=show.remark)))
    return 0


def _row(said: dict[str, Any]) -> list[str]:
    counts = ((said["applied"], "written"), (said["deleted"], "deleted"))
    what = ", ".join(f"{len(paths)} {word}" for paths, word in counts if paths) or "-"
    if said["undoes"]:
        what = f"undoes {said['undoes']}: {what}"
    return [said["id"], said["created_at"], said["status"], said["stage"] or "-", said["sandbox"], what]


def _one(arguments: argparse.Namespace) -> int:
    said = promoted.in_full(undoing.promotion(arguments.id or "@last"))
    if arguments.json:
        print_json(promoted.document(said))
        return 0
    keys = ("id", "kind", "sandbox", "project", "status", "by", "created_at", "ended_at", "undoes", "undone_by", "note")
    show.table([[key, show.safe(str(said[key]))] for key in keys if said[key]], sys.stdout)
    for stage in said["stages"]:
        approved = stage["approved"]
        by = f", approved by {approved['by']}" if approved else ""
        print(f"{stage['name']}: {stage['status']}{by}: {show.safe(stage['target'])}")
    for check in said["checks"]:
        _print_check(check)
    show_done({**said, "stages": []})
    return 0


def _print_check(check: dict[str, Any]) -> None:
    where = " ".join(str(check[key]) for key in ("stage", "when") if check.get(key))
    print(f"   {where}: {show.safe(check['command'])}: exit {check['exit_code']}")
    for line in check["said"].splitlines()[-_SHOWN_LINES:]:
        print(f"      {show.safe(line)}")
    for one in check.get("denials", ()):  # a command that was run again in reality has none
        print(show.paint(f"      {show.denial(one)}", "33", sys.stdout))
