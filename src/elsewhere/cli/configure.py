"""Verbs about settings: init, config, trust."""

import argparse
import sys

from elsewhere.cli import show
from elsewhere.cli.parsing import Verbs, print_json
from elsewhere.errors import UsageError
from elsewhere.operations import settings
from elsewhere.operations.documents.about import config_document, trust_document
from elsewhere.operations.documents.common import name
from elsewhere.operations.settings import Ignored, Trust
from elsewhere.sandbox.keeping.callers import Signals
from elsewhere.settings import KEYS, human

__all__ = ["add"]

_PROJECT = "the project (default: nearest elsewhere.toml, else git top level, else here)"


def add(verbs: Verbs) -> None:
    init = verbs.add(
        "init",
        _init,
        "write an elsewhere.toml that shows every setting",
        "examples:\n  elsewhere init && $EDITOR elsewhere.toml\n",
    )
    init.add_argument("--force", action="store_true", help="replace the one that is there")
    config = verbs.add(
        "config",
        _config,
        "what each setting is, and where that comes from",
        "examples:\n  elsewhere config\n  elsewhere config limits\n  elsewhere config --json sandbox.view\n",
    )
    config.add_argument("key", metavar="KEY", nargs="?", help="only this key, or the keys of this section")
    config.add_argument("--project", metavar="DIR", help=_PROJECT)
    trust = verbs.add(
        "trust",
        _trust,
        "let a project's elsewhere.toml widen what its sandboxes may do, until the file changes",
        "examples:\n  elsewhere trust\n  elsewhere trust --list\n  elsewhere trust --revoke --project ~/work/shop\n",
    )
    trust.add_argument("--project", metavar="DIR", help=_PROJECT)
    how = trust.add_mutually_exclusive_group()
    how.add_argument("--revoke", action="store_true", help="trust it no longer")
    how.add_argument("--list", action="store_true", help="which projects are trusted")


def _init(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    path = settings.init(force=arguments.force)
    if arguments.json:
        print_json({"file": name(path)})
    else:
        print(show.safe(path))
    return 0


def _config(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    found = settings.config(arguments.key, arguments.project)
    if arguments.json:
        print_json(config_document(found))
        return 0
    rows = []
    for key in found.shown:
        about = found.resolved.values[key]
        rows.append([key, show.safe(human(KEYS[key], about.value)), about.source])
    show.table(rows, sys.stdout, ["key", "value", "source"])
    if found.ignored():
        print("\nignored, since the project's elsewhere.toml is not trusted:")
        _widening(found.ignored())
    return 0


def _trust(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    if arguments.list and arguments.project is not None:
        raise UsageError("usage", "--list shows all projects", hint="leave --list or --project out")
    if arguments.list:
        found = settings.trusted_projects()
    else:
        found = [settings.revoke(arguments.project) if arguments.revoke else settings.trust(arguments.project)]
    if arguments.json:
        print_json(trust_document(found))
    elif arguments.list:
        rows = [[show.safe(one.project), "trusted" if one.holds else "changed since", one.sha256[:16]] for one in found]
        show.table(rows, sys.stdout, ["project", "state", "sha256"]) if rows else print("no project is trusted")
    else:
        _trusted(found[0])
    return 0


def _trusted(one: Trust) -> None:
    if not one.holds:
        print(f"not trusted any more: {show.safe(one.project)}")
        return
    _widening(list(one.widens))
    what = "" if one.widens else "; nothing in it widens anything now"
    print(f"trusted until it changes: {show.safe(one.project)}/elsewhere.toml{what}")


def _widening(found: list[Ignored]) -> None:
    show.table([[show.safe(one.key), show.safe(_human(one)), show.safe(one.why)] for one in found], sys.stdout)


def _human(one: Ignored) -> str:
    return human(KEYS[one.key], one.value) if one.key in KEYS else str(one.value)
