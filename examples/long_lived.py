"""A sandbox that outlives the program: made the first time, found again the next times, stopped in between.

    python examples/long_lived.py             run it twice
    python examples/long_lived.py --remove

In between, `elsewhere list`, `elsewhere exec garden -- cat garden.log` and all other verbs work on it as well.
"""

import sys

from elsewhere import ElsewhereError, Sandbox

NAME = "garden"
SERVER = 'echo "ready on $ELSEWHERE_SANDBOX_ID"; read line; echo "asked to $line"'


def enter() -> Sandbox:
    try:
        box = Sandbox.get(NAME)  # started, if it is stopped
    except ElsewhereError as error:
        if error.code != "sandbox_not_found":
            raise
        box = Sandbox.create(".", name=NAME, labels={"example": "long_lived"}, on_exit="keep")
        print(f"made {NAME}: {box.id}, from a {box.base['kind']} base")
    else:
        print(f"found {NAME} again: {box.id}")
    return box


def work(box: Sandbox) -> None:
    # Files, without a command: they are read and written from outside.
    before = box.files.read_text("garden.log") if box.files.exists("garden.log") else ""
    box.files.write("garden.log", before + "started\n")
    print(f"started {box.files.read_text('garden.log').count('started')} times")

    # A command that goes on while this program does something else.
    with box.start(SERVER) as server:
        print(next(server.stdout()).decode().strip())
        server.send_stdin("stop\n")
        print(server.wait("10s").check().stdout.splitlines()[-1])
    print(box.changes().summary())


def main(words: list[str]) -> int:
    if words == ["--remove"]:
        box = Sandbox.get(NAME)
        box.remove()
        print(f"removed {box.id}")
        return 0
    box = enter()
    work(box)
    box.stop()  # only a directory from here on; `Sandbox.get` starts it again
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
