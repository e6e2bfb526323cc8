"""Verbs about elsewhere itself: doctor, version."""

import argparse

from elsewhere.cli import show
from elsewhere.cli.parsing import Verbs, print_json
from elsewhere.operations.documents.about import version_document
from elsewhere.sandbox.keeping.callers import Signals

__all__ = ["add"]


def add(verbs: Verbs) -> None:
    text = "what this machine can do, and how to get what is missing"
    verbs.add("doctor", _doctor, text, "examples:\n  elsewhere doctor\n")
    verbs.add("version", _version, "version and capabilities", "examples:\n  elsewhere version --json\n")


def _doctor(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    from elsewhere.operations import doctor

    checks = doctor.examine()
    if arguments.json:
        print_json(doctor.document(checks))
    else:
        show.doctor(checks)
    return 0 if doctor.healthy(checks) else 1


def _version(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    document = version_document()
    if arguments.json:
        print_json(document)
    else:
        print(f"elsewhere {document['version']} (schema {document['schema']}; {', '.join(document['capabilities'])})")
    return 0
