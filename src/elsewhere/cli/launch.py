"""Started by `engine.start` as a process of its own: be the launcher, with the command line as its front."""

import os
import socket
import sys

from elsewhere import units
from elsewhere.cli.main import GROUPS, main, parser
from elsewhere.errors import UsageError
from elsewhere.operations import running
from elsewhere.sandbox.keeping.callers import Signals
from elsewhere.sandbox.launching.launcher import serve
from elsewhere.storage.state import State


class CommandLine:
    """What a launcher does on behalf of the command's client."""

    def load(self) -> None:
        for verbs in GROUPS.values():
            parser(verbs[0])

    def rehearse(self) -> None:
        parser("run")[0].parse_known_args(["run", "--json", "--", "true"])
        running.rehearse()

    def serve(self, argv: list[str], client: socket.socket) -> int:
        return main(argv, Signals(client))


def _ahead(wanted: str) -> int:
    """How many sandboxes stand ready for whoever asks next."""
    if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 3):
        raise UsageError("bad_settings", f"ELSEWHERE_LAUNCHER_READY = {wanted!r} is not a whole number between 0 and 99")
    return int(wanted)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # whoever started us is not to be our parent: they may live long, and would have to reap us
    os.setsid()
    parser("run")  # ahead of time
    idle = units.duration(os.environ.get("ELSEWHERE_LAUNCHER_IDLE_S") or 300)
    ahead = _ahead(os.environ.get("ELSEWHERE_LAUNCHER_READY") or "3")
    raise SystemExit(serve(State.open(), sys.argv[1], CommandLine(), idle=idle, ahead=ahead, ready=int(sys.argv[2])))
