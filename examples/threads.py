"""Sandboxes from asyncio: every call blocks, so it goes to a thread. Each line gets a sandbox and two seconds of its own.

python examples/threads.py 'make test' 'make lint' 'sleep 60'
"""

import asyncio
import sys

from elsewhere import CommandResult, Sandbox


def attempt(line: str) -> CommandResult:
    """In a thread, and synchronous: the sandbox is gone when this returns, whatever happened."""
    with Sandbox.create(".") as box:
        return box.run(line, timeout="2s")


async def main(lines: list[str]) -> int:
    if not lines:
        print("usage: threads.py LINE [LINE …]", file=sys.stderr)
        return 2
    results = await asyncio.gather(*(asyncio.to_thread(attempt, line) for line in lines))
    for line, result in zip(lines, results, strict=True):
        print(f"{result.reason} {result.exit_code}  {result.duration:.1f} s  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
