"""Started by `engine.start` as a process of its own: be the launcher, with the command line as its front."""

import os
import socket
import sys

from elsewhere import units
from elsewhere.cli.main import main, parser
from elsewhere.operations import running
from elsewhere.sandbox.keeping.callers import Signals
from elsewhere.sandbox.launching.launcher import serve
from elsewhere.storage.state import State


class CommandLine:
    """What a launcher does on behalf of the command's client."""

    def rehearse(self) -> None:
        parser()[0].parse_known_args(["run", "--json", "--", "true"])
        running.rehearse()

    def serve(self, argv: list[str], client: socket.socket) -> int:
        return main(argv, Signals(client))


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # whoever started us is not to be our parent: they may live long, and would have to reap us
    os.setsid()
    parser()  # ahead of time
    idle = units.duration(os.environ.get("ELSEWHERE_LAUNCHER_IDLE_S") or 300)
    raise SystemExit(serve(State.open(), sys.argv[1], CommandLine(), idle=idle, ready=int(sys.argv[2])))
