"""Verb about what a sandbox may reach: network."""

import argparse
import sys

from elsewhere import units
from elsewhere.cli import show
from elsewhere.cli.confining import add_rules
from elsewhere.cli.parsing import Verbs, add_id, print_json
from elsewhere.operations import networking, reach
from elsewhere.operations.documents.sandboxes import network_document
from elsewhere.operations.networking import Network
from elsewhere.sandbox.keeping.callers import Signals, pause_of

__all__ = ["add"]

_CHANGES = ("allow", "deny", "preset", "forward", "publish", "forget")
_EPILOG = """Without options the rules are shown. A change holds at once, for connections that are there already, too.

examples:
  elsewhere network fix
  elsewhere network fix --allow example.org --allow '*.example.org:8443'
  elsewhere network fix --forget example.org
  elsewhere network fix --publish 0:8000
"""


def add(verbs: Verbs) -> None:
    network = verbs.add("network", _network, "what a sandbox may reach: shown, or changed while it runs", _EPILOG)
    add_id(network)
    rules = network.add_argument_group("changes")
    add_rules(rules)
    rules.add_argument(
        "--forget",
        metavar="RULE",
        action="append",
        help="a rule, preset, forward or published port; KIND:RULE, such as deny:example.org, if there are several",
    )


def _network(arguments: argparse.Namespace, signals: Signals | None) -> int:
    changes = {name: getattr(arguments, name) for name in _CHANGES if getattr(arguments, name)}
    pause = pause_of(signals)
    found = networking.change(arguments.id, **changes, pause=pause) if changes else networking.show(arguments.id, pause)
    hint = reach.remark({"allow": arguments.allow or (), "forward": found.record.network.get("forward", ())}, found.record.id)
    if hint:
        show.remark(hint)
    if arguments.json:
        print_json(network_document(found))
    else:
        _show(found)
    return 0


def _show(found: Network) -> None:
    print(f"{'network':10} {found.mode}")
    rules = found.record.network
    rows = [
        ("presets", ", ".join(rules.get("presets", ())) if found.mode == "allow" else ""),
        *(("allow", rule) for rule in rules.get("allow", ())),
        *(("deny", rule) for rule in rules.get("deny", ())),
        *(("machine", f"{one['rule']}  ({one['why']})") for one in found.machine),
        *(("forward", text) for text in rules.get("forward", ())),
        *(("publish", text) for text in rules.get("publish", ())),
        *(("published", f"127.0.0.1:{one['port']} → {one['inside']}") for one in found.published),
        *(("trouble", f"{one['what']}: {one['why']}") for one in found.trouble),
        ("proxy", ", ".join(found.proxy)),
    ]
    for name, text in rows:
        if text:
            print(f"{name:10} {show.safe(text)}")
    if found.ended:
        print(f"elsewhere: ended, since not allowed any more: {units.count(found.ended, 'connection')}", file=sys.stderr)
