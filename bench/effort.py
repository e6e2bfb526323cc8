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
    saved_mib: tuple[int, ...]
    saved_files: int
    saved_rounds: int
    stashed: int
    """How many of the amounts are stashed with git, which needs a second for each 25 MiB."""
    heavy_rounds: int
    compared_files: tuple[int, ...]
    compared_changes: tuple[int, ...]
    compared_rounds: int
    moved_rounds: int
    depths: tuple[int, ...]
    depth_rounds: int
    network_rounds: int
    opened: int
    sent_mib: int
    connections: int
    created: int
    raced: tuple[int, ...]
    raced_files: int
    raced_rounds: int
    probes: int
    """How often each edit is tried against each contender: what was seen once might have been luck."""
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
    saved_mib=(1, 100, 1024),
    saved_files=10_000,
    saved_rounds=7,
    stashed=2,
    heavy_rounds=3,
    compared_files=(1_000, 100_000),
    compared_changes=(10, 1_000),
    compared_rounds=15,
    moved_rounds=7,
    depths=(1, 10, 20, 50, 99, 100, 199, 200),
    depth_rounds=5,
    network_rounds=7,
    opened=50,
    sent_mib=64,
    connections=200,
    created=20,
    raced=(1, 4, 16),
    raced_files=3_000,
    raced_rounds=2,
    probes=5,
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
    saved_mib=(1, 8, 32),
    saved_files=500,
    saved_rounds=1,
    stashed=2,
    heavy_rounds=1,
    compared_files=(500, 2_000),
    compared_changes=(10, 100),
    compared_rounds=2,
    moved_rounds=2,
    depths=(1, 10, 20),
    depth_rounds=1,
    network_rounds=1,
    opened=5,
    sent_mib=4,
    connections=200,
    created=2,
    raced=(1, 4),
    raced_files=500,
    raced_rounds=1,
    probes=1,
)
