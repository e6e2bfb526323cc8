"""What is mounted: `/proc/self/mountinfo` as data."""

import os
from dataclasses import dataclass

__all__ = ["Mount", "containing", "parse", "read"]


@dataclass(frozen=True, slots=True)
class Mount:
    id: int
    parent: int
    device: str
    root: str
    target: str
    options: frozenset[str]
    kind: str
    source: str


def read(process: str = "self") -> list[Mount]:
    with open(f"/proc/{process}/mountinfo", "rb") as table:
        return parse(os.fsdecode(table.read()))


def parse(text: str) -> list[Mount]:
    """The mounts that can be seen, in the order in which they were made. What is mounted over at its own place, or lies below
    such a place and is older, cannot be seen and is left out."""
    mounts = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        number, parent, device, root, target, options, *_ = left.split(" ")
        kind, source, *_ = right.split(" ")
        mounts.append(
            Mount(
                int(number),
                int(parent),
                device,
                _unescape(root),
                _unescape(target),
                frozenset(options.split(",")),
                kind,
                _unescape(source),
            )
        )
    return _visible(mounts)


def _unescape(field: str) -> str:
    if "\\" not in field:
        return field
    data = os.fsencode(field)
    for code, byte in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        data = data.replace(code, byte)
    return os.fsdecode(data)


def _visible(mounts: list[Mount]) -> list[Mount]:
    by_id = {mount.id: mount for mount in mounts}

    def chain(mount: Mount) -> list[Mount]:
        found = [mount]
        while (parent := by_id.get(found[-1].parent)) is not None and parent is not found[-1]:
            found.append(parent)
        return found

    covers = {mount.parent: mount.id for mount in mounts if mount.parent in by_id and by_id[mount.parent].target == mount.target}
    # A mount made later on a directory further up hides this one too: it is then not one of those that this one stands on.
    by_target = {mount.target: mount for mount in mounts if mount.id not in covers}
    seen = []
    for mount in mounts:
        line = chain(mount)
        standing = {step.id for step in line}
        covered = mount.id in covers or any(covers.get(step.id, step.id) not in standing for step in line[1:])
        if not covered and not any(
            above in by_target and by_target[above].id not in standing for above in _ancestors(mount.target)
        ):
            seen.append(mount)
    return seen


def _ancestors(path: str) -> list[str]:
    parts = path.split("/")[1:-1]
    return ["/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def containing(path: str, mounts: list[Mount]) -> Mount:
    """The mount on which `path` lies; `path` is absolute and free of links."""
    best = None
    for mount in mounts:
        prefix = mount.target.rstrip("/") + "/"
        if (path + "/").startswith(prefix) and (best is None or len(mount.target) >= len(best.target)):
            best = mount
    if best is None:
        raise LookupError(f"no mount contains {path!r}")
    return best
