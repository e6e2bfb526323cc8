"""Try a command before it is real: run it in a copy of the current directory, look at the changes, throw the copy away.

python examples/try_before.py rm -rf build
"""

import sys

from elsewhere import ElsewhereError, Sandbox


def main(command: list[str]) -> int:
    if not command:
        print("usage: try_before.py COMMAND [ARGUMENT …]", file=sys.stderr)
        return 2
    try:
        with Sandbox.create(".") as box:
            result = box.run(command, timeout="5m")
            changes = box.changes()
    except ElsewhereError as error:
        print(f"{error.message} ({error.code}); {error.hint}", file=sys.stderr)
        return 1
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    for kind, path in changes:
        print(f"it would have {kind} {path}")
    print(f"exit code {result.exit_code} ({result.reason}), {changes.summary()}")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
