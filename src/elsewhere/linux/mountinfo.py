"""What is mounted: `/proc/self/mountinfo` as data."""

import os

from elsewhere.values import dataclass

__all__ = ["Mount", "containing", "parse", "read"]

_REMOTE = frozenset("nfs nfs4 cifs smb3 smbfs 9p afs ceph glusterfs lustre ocfs2 gfs2 coda drvfs virtiofs davfs".split())
_KERNELS_OWN = frozenset(
    """proc sysfs devtmpfs devpts cgroup cgroup2 debugfs tracefs securityfs configfs pstore efivarfs bpf binfmt_misc mqueue
    hugetlbfs fusectl rpc_pipefs nsfs selinuxfs ramfs""".split()
)


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

    @property
    def remote(self) -> bool:
        """Served by somebody else, who may be gone: another machine, or a program."""
        return self.kind in _REMOTE or self.kind.startswith("fuse")

    @property
    def kernels_own(self) -> bool:
        """No files: what the kernel tells of itself and of every process, and takes orders by."""
        return self.kind in _KERNELS_OWN


def read(process: str = "self") -> list[Mount]:
    with open(f"/proc/{process}/mountinfo", "rb") as table:
        return parse(os.fsdecode(table.read()))


def parse(text: str) -> list[Mount]:
    """The mounts that can be seen, in the order in which they were made. What is mounted over at its own place, or lies below
    such a place and is older, cannot be seen and is left out."""
    mounts = []
    for line in filter(None, text.split("\n")):  # not splitlines: the kernel escapes no other line break
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
    for code, byte in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\043", b"#"), (b"\\134", b"\\")):
        data = data.replace(code, byte)
    return os.fsdecode(data)


def _visible(mounts: list[Mount]) -> list[Mount]:
    """Those at which a walk along their own path arrives, when at each directory it climbs whatever stack stands there."""
    known = {mount.id for mount in mounts}
    standing: dict[tuple[int | None, str], Mount] = {}
    for mount in mounts:
        # The first one stands on itself, or on what this process cannot see.
        below = mount.parent if mount.parent in known and mount.parent != mount.id else None
        standing[below, mount.target] = mount
    seen = []
    for mount in mounts:
        here: int | None = None
        for place in ("/", *_ancestors(mount.target), mount.target):
            while (above := standing.get((here, place))) is not None:
                here = above.id
        if here == mount.id:
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
