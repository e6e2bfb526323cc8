"""What a child of the launcher takes along: the code that is loaded, and nothing else."""

import itertools
import resource
import signal

from elsewhere.linux import syscalls

__all__ = ["close_all_but", "leave_the_launcher", "original_descriptor_limit", "raise_descriptor_limit"]

_original_limit: tuple[int, int] | None = None


def raise_descriptor_limit() -> None:
    """For a process that holds a descriptor or two for each sandbox; its children get back what it had before."""
    global _original_limit
    _original_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = _original_limit[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def original_descriptor_limit() -> tuple[int, int]:
    return _original_limit or resource.getrlimit(resource.RLIMIT_NOFILE)


def leave_the_launcher(kept: list[int]) -> None:
    """No descriptor but the kept ones, no signal handler, the limits of whoever started the launcher."""
    signal.set_wakeup_fd(-1)
    if _original_limit is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _original_limit)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    close_all_but(kept)


def close_all_but(kept: list[int]) -> None:
    """Besides standard input and outputs."""
    edges = [2, *sorted(kept), 1 << 31]
    for before, after in itertools.pairwise(edges):
        if before + 1 < after:
            syscalls.close_range(before + 1, after - 1, 0)
