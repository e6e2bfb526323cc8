"""Putting a sandbox that stands under its limits, before anybody gets in: its group, and what its keeper is told."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from elsewhere.limits import DEFAULTS
from elsewhere.linux import cgroups
from elsewhere.linux import syscalls as sys_
from elsewhere.linux.mounts import Absent, Clone, Cover, Directory, File, Fresh, Link, Plan, ReadOnly, Shared
from elsewhere.sandbox import enforcement
from elsewhere.sandbox.enforcement import RLIMIT, WATCHED, Facts, Hold
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching.mechanisms import Raised, keeps_disk
from elsewhere.sandbox.records.record import Record

__all__ = ["apply", "open_up"]

_GROUPED = ("memory", "cpus", "pids")
_IN_MEMORY = ["/dev/shm", "/run"]
_LEAST_FILE = 64 << 20


def apply(raised: Raised, limits: Mapping[str, float], binding: Iterable[str]) -> dict[str, Hold]:
    """Who holds which limit; refused if something that binds is held by nobody."""
    holds = enforcement.hold(limits, facts_of(raised))
    enforcement.check(limits, holds, binding)
    group = raised.group
    if group is not None:
        # The built-in ones were set when the group was made.
        news = {name: value for name, value in limits.items() if name in _GROUPED and value != getattr(DEFAULTS, name)}
        held = {name: value for name, value in news.items() if holds[name].holds}
        if held:
            cgroups.limit(group, **held)  # type: ignore[arg-type]
    return holds


def facts_of(raised: Raised) -> Facts:
    group = raised.group
    kept, no_disk = (raised.disk, "") if raised.disk else ("", keeps_disk(raised.mechanism, raised.directory)[1])
    return Facts(
        raised.mechanism,
        group.version if group else 0,
        raised.sealed.get("ungrouped", {}),
        os.geteuid() != 0,
        kept,
        no_disk or "only a limit that was asked for gets a file system of its own",
    )


def open_up(made: Record, raised: Raised, reserve: int, frozen: int = 0) -> None:
    """Let commands in. From here on the keeper counts; it is told what only it can hold, and may look at what it has to watch."""
    limits, hard = made.limits, bool(raised.disk)
    holds = made.enforced["limits"]
    rlimits: dict[str, int] = {}
    if "open_files" in limits:
        rlimits["files"] = int(limits["open_files"])
    if str(holds.get("pids", "")).startswith(RLIMIT):
        rlimits["processes"] = int(limits["pids"]) + 1  # and the keeper
    if "disk" in limits and not hard:
        rlimits["file_size"] = min(int(limits["disk"]), _room(raised.seen_fd, reserve))
    rules: dict[str, Any] = {
        "rlimits": rlimits,
        "memory": limits.get("memory") if str(holds.get("memory", "")).startswith(WATCHED) else None,
        "disk": None if hard else limits.get("disk"),
        "in_memory": [] if raised.mechanism.copy else _IN_MEMORY,
        "hard": hard,
        "frozen": frozen,
        "reserve": reserve,
        "idle": limits.get("idle"),
    }
    if not raised.mechanism.whole_machine and not raised.mechanism.copy:
        nested = bool(made.confinement.get("nested"))  # Landlock about files would forbid to mount
        rules |= {"scope": nested, "writable": [] if nested else _writable(raised.view.plan)}
    watched = raised.layers_fd if raised.layers_fd >= 0 else raised.seen_fd
    wire.send(raised.control, ("open", rules), [watched, raised.seen_fd] if raised.seen_fd >= 0 else [])
    if raised.seen_fd >= 0:
        os.close(raised.seen_fd)
        raised.seen_fd = -1


def _room(seen_fd: int, reserve: int) -> int:
    """For one file: what the host's disk has to spare now, so that no single call can take all of it."""
    if seen_fd < 0:
        return 1 << 60
    found = os.fstatvfs(seen_fd)
    return max(_LEAST_FILE, found.f_bavail * found.f_frsize - reserve)


def _writable(plan: Plan) -> list[str]:
    """Where an ordinary user's sandbox may write: everything else is a read-only mount, which does not stop a fifo."""
    places = ["/dev", "/proc"]
    for operation in plan.operations():
        if isinstance(operation, Absent | Cover | Directory | File | Link | ReadOnly):
            continue
        if isinstance(operation, Shared) and not operation.writable:
            continue
        if isinstance(operation, Clone | Fresh) and operation.attributes & sys_.MOUNT_ATTR_RDONLY:
            continue
        places.append(operation.target)
    return sorted(set(places))
