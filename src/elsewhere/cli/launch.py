"""Started by `engine.start` as a process of its own: be the launcher, with the command line as its front."""

import os
import sys

from elsewhere import units
from elsewhere.cli.main import main, parser
from elsewhere.sandbox.commands import Signals
from elsewhere.sandbox.launcher import serve
from elsewhere.storage.state import State

if __name__ == "__main__":
    parser()  # ahead of time
    idle = units.duration(os.environ.get("ELSEWHERE_LAUNCHER_IDLE_S") or 300)
    raise SystemExit(
        serve(
            State.open(),
            sys.argv[1],
            lambda argv, sock: main(argv, Signals(sock)),
            idle=idle,
            ready=int(sys.argv[2]),
        )
    )
