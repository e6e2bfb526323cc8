"""The cost of failure: attempts that go wrong as badly as they can, one after the other, and what it takes to be rid of each.

    python examples/cost_of_failure.py

It makes its own project, and leaves nothing. Times are shown and prove nothing; that nothing is lost and nothing left is proven.
"""

import os
import statistics
import sys
import time
from pathlib import Path

from elsewhere import Sandbox
from scratch import fingerprint, scratch_project

FAILURES = {
    "deletes everything": "rm -rf ./* .git",
    "fills files with nonsense": "for f in $(find . -type f); do echo nonsense > $f; done",
    "leaves its rubbish": "mkdir rubbish && seq -f rubbish/%g 100 | xargs touch && false",
    "leaves programs running": "sleep 1000 > /dev/null 2>&1 & exit 1",
}


def main() -> int:
    files = {f"src/part{number}.py": f"PART = {number}\n" for number in range(200)}
    with scratch_project("parts", files) as project:
        before = fingerprint(project)
        for what, line in FAILURES.items():
            made, removed = zip(*(failed(project, line) for _ in range(3)), strict=True)
            taken = [f"{name} in {statistics.median(times) * 1000:.1f} ms" for name, times in (("made", made), ("gone", removed))]
            print(f"{what:28} {', '.join(taken)}")
            assert fingerprint(project) == before
        assert Sandbox.list() == []
        assert os.listdir(Path(os.environ["ELSEWHERE_HOME"], "sandboxes")) == []
    print(f"reality is byte for byte what it was: {len(files)} files, and their repository")
    return 0


def failed(project: Path, line: str) -> tuple[float, float]:
    """How long it took to make the sandbox, and to throw it away."""
    marks = [time.perf_counter()]
    box = Sandbox.create(project)
    marks.append(time.perf_counter())
    box.run(line, timeout="1m")
    begun = time.perf_counter()
    box.remove()
    return marks[1] - marks[0], time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
