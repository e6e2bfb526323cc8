"""How often each thing is done. The default is for numbers that mean something; `--quick` only shows that everything works."""

from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Effort"]


@dataclass(frozen=True, slots=True)
class Effort:
    project_files: int
    warm_rounds: int
    cold_rounds: int
    clones: int
    work_rounds: int
    work_files: int
    open_sandboxes: int
    memory_rounds: int
    sustained: int
    strange_projects: int
    pinned_files: tuple[int, ...]
    pinned_rounds: int
    at_once: int
    running_at_once: int
    pause: float = 0.015
    """Before each start, not timed, the same for all: time in which waiting keepers are replaced, as between the commands of
    any real user. F leaves it out."""


FULL = Effort(
    project_files=20_000,
    warm_rounds=200,
    cold_rounds=60,
    clones=7,
    work_rounds=15,
    work_files=10_000,
    open_sandboxes=20,
    memory_rounds=3,
    sustained=200,
    strange_projects=40,
    pinned_files=(1_000, 20_000, 200_000),
    pinned_rounds=7,
    at_once=50,
    running_at_once=1_000,
)
QUICK = Effort(
    project_files=2_000,
    warm_rounds=5,
    cold_rounds=3,
    clones=1,
    work_rounds=1,
    work_files=2_000,
    open_sandboxes=5,
    memory_rounds=1,
    sustained=20,
    strange_projects=3,
    pinned_files=(500, 2_000),
    pinned_rounds=2,
    at_once=8,
    running_at_once=10,
)
