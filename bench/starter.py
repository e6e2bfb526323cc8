"""A lean process that starts commands as a shell would and times them: start to exit.

Not for people: `shell.py` runs it. It reads one JSON document on standard input (`commands`, each with `argv` and `directory`;
`rounds`; `pause`; `environment`) and writes one on standard output: for each command its times in seconds.
"""

import json
import os
import sys
import time
from collections.abc import Callable

from rounds import interleaved


def start(path: str, argv: list[str], directory: str, environment: dict[str, str]) -> float:
    """What a command says goes nowhere: a terminal would be timed with it."""
    os.chdir(directory)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    began = time.perf_counter()
    pid = os.posix_spawn(path, argv, environment, file_actions=actions)
    _, status = os.waitpid(pid, 0)
    took = time.perf_counter() - began
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise SystemExit(f"{' '.join(argv)[:200]}: ended with {code}")
    return took


def _step(command: dict[str, object], environment: dict[str, str]) -> Callable[[], float]:
    argv, directory = command["argv"], command["directory"]
    assert isinstance(argv, list)
    assert isinstance(directory, str)
    return lambda: start(argv[0], argv, directory, environment)


def main() -> None:
    order = json.load(sys.stdin)
    steps = [_step(command, order["environment"]) for command in order["commands"]]
    json.dump(interleaved(steps, order["rounds"], order["pause"]), sys.stdout)


if __name__ == "__main__":
    main()
