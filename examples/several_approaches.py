"""Several approaches at once: each shell line gets a sandbox and a thread of its own, then the same check decides.

    python examples/several_approaches.py 'make test' 'git apply one.patch' 'git apply two.patch' './rewrite.sh'

Ends with 0 if at least one approach passed the check. Nothing of any of them is real.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elsewhere import Sandbox


@dataclass(frozen=True)
class Attempt:
    approach: str
    verdict: str
    changed: str


def attempt(approach: str, check: str) -> Attempt:
    with Sandbox.create(".") as box:
        done = box.run(approach, timeout="10m")
        if done.exit_code:
            verdict = f"failed with {done.exit_code}"
        else:
            checked = box.run(check, timeout="10m")
            verdict = "passed" if checked.exit_code == 0 else f"check ended with {checked.exit_code}"
        return Attempt(approach, verdict, box.changes().summary())


def main(words: list[str]) -> int:
    if len(words) < 2:
        print("usage: several_approaches.py CHECK APPROACH [APPROACH …]", file=sys.stderr)
        return 2
    check, *approaches = words
    with ThreadPoolExecutor() as threads:
        attempts = list(threads.map(lambda approach: attempt(approach, check), approaches))
    for tried in attempts:
        print(f"{tried.verdict:20}  {tried.changed:30}  {tried.approach}")
    return 0 if any(tried.verdict == "passed" for tried in attempts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
