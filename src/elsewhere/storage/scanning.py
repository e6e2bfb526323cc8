"""A scan: what a tree looked like at one moment, in a form in which two of them are compared quickly.

For each directory the names of what it holds, and five numbers for each name: mode, inode, size, time of the last write and time
of the last change. Whatever happens to a file (content, mode, owner, attributes, links) changes the last of them, and a file
that was replaced has another inode. Names and numbers of one directory are one string and one run of bytes, so that a directory
in which nothing happened costs one comparison, and loading a scan does not make an object for each file.

On disk (`save`, `load`): the checksum of what follows, then, with `marshal`, the format's number and the fields.

Not here: reading or copying content (see `capturing.py`), and what is done about a difference.
"""

import array
import errno
import marshal
import os
import stat
import zlib
from collections.abc import Collection
from dataclasses import field

from elsewhere.clock import Clock, wall
from elsewhere.linux import mountinfo
from elsewhere.values import dataclass

__all__ = [
    "DIRECTORY",
    "NOTHING",
    "Difference",
    "Listing",
    "Row",
    "Scan",
    "differences",
    "find",
    "inherit",
    "join",
    "load",
    "names_of",
    "newest",
    "reason",
    "row_of",
    "rows_of",
    "save",
    "scan",
    "settled",
    "unsure",
]

Listing = tuple[str, bytes]
Row = tuple[int, int, int, int, int]

NOTHING: Listing = ("", b"")
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_FORMAT = 1
_WIDTH = 5

# The kernel stamps files by the tick, up to 10 ms apart; file systems that keep no finer times than milliseconds may keep none
# finer than two seconds.
_TICK_NS = 100_000_000
_COARSE_NS = 2_100_000_000

# File systems of which it is known that a directory's times change with the names in it.
_KEEPING_TIMES = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})

# Whoever lists a directory and has no more descriptors or memory knows nothing about the tree.
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(slots=True)
class Scan:
    """`directories` holds a listing for each directory that was looked into, by its path relative to the tree ("" for the tree
    itself); `own` are the numbers of the tree's own directory. `left_out` are paths with the reason why a copy will not have
    them; `partial` are the directories whose listing lacks something that is there. `shut` are directories that count without
    what is in them. `inodes` (fresh scans only) say which directory it was."""

    own: Row
    directories: dict[str, Listing] = field(default_factory=dict)
    files: int = 0
    bytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    shut: set[str] = field(default_factory=set)
    mounts: set[str] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    inodes: dict[str, int] = field(default_factory=dict)
    device: int = 0
    began_ns: int = 0

    def leave(self, path: str, name: str) -> None:
        """The entry `name` is there, but not for us."""
        rows = rows_of(self.directories[path])
        del rows[name]
        self.replace(path, rows)
        self.partial.add(path)

    def shutter(self, path: str, name: str, found: os.stat_result) -> None:
        """Its times change with what is in it, which is none of our business; its owner and mode count."""
        child = join(path, name)
        self.shut.add(child)
        if found.st_dev != self.device:
            self.mounts.add(child)
        self.directories[child] = NOTHING
        rows = rows_of(self.directories[path])
        rows[name] = (found.st_mode, found.st_gid, found.st_uid, 0, 0)
        self.replace(path, rows)

    def replace(self, path: str, rows: dict[str, Row]) -> None:
        self.directories[path] = _listing(rows)

    def forget(self, path: str) -> None:
        """The directory `path` is not there after all, with all that is below it."""
        parent, _, name = path.rpartition("/")
        rows = rows_of(self.directories.get(parent, NOTHING))
        if name in rows:
            self.leave(parent, name)
        for known in [known for known in self.directories if known == path or known.startswith(f"{path}/")]:
            for row in rows_of(self.directories.pop(known)).values():
                self.count(row, -1)

    def count(self, row: Row, times: int) -> None:
        if stat.S_ISREG(row[0]):
            self.files += times
            self.bytes += times * row[2]


@dataclass(frozen=True, slots=True)
class Difference:
    """What is new or changed in one directory and what is gone from it. Directories among them are named, not descended into:
    each has a difference of its own if something in it changed."""

    path: str
    changed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0


def join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def row_of(found: os.stat_result) -> Row:
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def unsure(row: Row) -> Row:
    """Equal to no row that a scan finds: the next capture takes the entry again."""
    return row[0], row[1], row[2], row[3], -1


def settled(row: Row, now_ns: int) -> Row:
    """The row as it may be remembered by whoever read the entry at `now_ns`. One that changed so shortly before could change
    once more without getting another time. A time of writing far in the future was set by hand and says nothing."""
    mtime, ctime = row[3], row[4]
    margin = _TICK_NS if ctime % 1_000_000 else _COARSE_NS
    if ctime >= now_ns - margin or abs(now_ns - mtime) <= margin:
        return unsure(row)
    return row


def names_of(listing: Listing) -> list[str]:
    return listing[0].split("\0") if listing[0] else []


def rows_of(listing: Listing) -> dict[str, Row]:
    numbers = array.array("q", listing[1]).tolist()
    columns = [iter(numbers)] * _WIDTH
    return dict(zip(names_of(listing), zip(*columns, strict=True), strict=True))


def find(scan: Scan, path: str) -> Row | None:
    """What the scan has at a path; whoever asks for many asks for whole directories."""
    parent, _, name = path.rpartition("/")
    return rows_of(scan.directories.get(parent, NOTHING)).get(name)


def newest(listing: Listing) -> int:
    """When the last of its entries changed; before all times, if it has none."""
    return max(array.array("q", listing[1])[_WIDTH - 1 :: _WIDTH], default=-1)


def _listing(rows: dict[str, Row]) -> Listing:
    return "\0".join(rows), array.array("q", [number for row in rows.values() for number in row]).tobytes()


def scan(
    tree: str,
    *,
    live: Collection[str] = (),
    leave_out: Collection[str] = (),
    known: Scan | None = None,
    clock: Clock = wall,
) -> Scan:
    """Look at every entry below `tree`, reading no content. Paths in `live` and mounts are directories that count without what is
    in them; paths in `leave_out` are not there at all. Both are relative to `tree`. With an older scan, directories in which
    no name came or went are not listed again, which saves a third of the time."""
    began_ns = int(clock() * 1e9)
    root = os.lstat(tree)
    made = Scan(row_of(root), inodes={"": root.st_ino}, device=root.st_dev, began_ns=began_ns)
    if known and not _keeps_times(tree):
        known = None
    waiting = [("", known is not None and known.own == made.own)]
    while waiting:
        path, same = waiting.pop()
        names = names_of(known.directories[path]) if known and same and path not in known.partial else None
        try:
            below = _look(tree, path, made, names)
        except (FileNotFoundError, NotADirectoryError):
            below = None  # gone since its parent was listed
        except OSError as error:
            if error.errno in _OURS or not path:
                raise
            below = None
            if error.errno != errno.ELOOP:  # a link by now
                made.left_out[path] = reason(error)
        if below is None:
            if not path:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), tree)
            made.forget(path)
        elif below:
            before = known.directories.get(path, NOTHING) if known else NOTHING
            alike = before == made.directories[path]
            past = {} if alike else rows_of(before)
            for name, found in below:
                child = join(path, name)
                if child in leave_out:
                    made.leave(path, name)
                elif found.st_dev != made.device or child in live:
                    made.shutter(path, name, found)
                else:
                    made.inodes[child] = found.st_ino
                    waiting.append((child, alike or past.get(name) == row_of(found)))
    return made


def _keeps_times(tree: str) -> bool:
    """Whether a directory's times surely tell that a name came or went: some file systems in user space forget to."""
    return mountinfo.containing(tree, mountinfo.read()).kind in _KEEPING_TIMES


def _look(tree: str, path: str, made: Scan, names: list[str] | None) -> list[tuple[str, os.stat_result]] | None:
    """Look at what is in one directory, by `names` if they are known; the directories in it are returned. None: it is not the
    directory any more that its parent named."""
    fd = os.open(f"{tree}/{path}", DIRECTORY)
    try:
        here = os.fstat(fd)
        if here.st_ino != made.inodes[path] or here.st_dev != made.device:
            return None
        if names is None:
            names, entries = _listed(fd)
        else:
            try:
                entries = [os.stat(name, dir_fd=fd, follow_symlinks=False) for name in names]
            except FileNotFoundError:
                names, entries = _listed(fd)
    finally:
        os.close(fd)
    numbers: list[int] = []
    below: list[tuple[str, os.stat_result]] = []
    skipped = []
    other = other_bytes = 0
    for name, found in zip(names, entries, strict=True):
        mode = found.st_mode
        if mode & 0o170000 != 0o100000:
            kind = mode & 0o170000
            if kind == stat.S_IFDIR:
                below.append((name, found))
            elif kind not in (stat.S_IFLNK, stat.S_IFIFO):
                made.left_out[join(path, name)] = "socket" if kind == stat.S_IFSOCK else "device"
                skipped.append(name)
                continue
            other += 1
            other_bytes += found.st_size
        numbers += (mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if skipped:
        made.partial.add(path)
        names = [name for name in names if name not in skipped]
    made.directories[path] = ("\0".join(names), array.array("q", numbers).tobytes())
    made.files += len(names) - other
    made.bytes += sum(numbers[2::_WIDTH]) - other_bytes
    return below


def _listed(fd: int) -> tuple[list[str], list[os.stat_result]]:
    names, found = [], []
    with os.scandir(fd) as entries:
        for entry in entries:
            try:
                found.append(entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue  # gone since it was listed
            names.append(entry.name)
    return names, found


def reason(error: OSError) -> str:
    """Why something is not in a copy, in a word or two."""
    if isinstance(error, PermissionError):
        return "unreadable"
    return "path too long" if error.errno == errno.ENAMETOOLONG else error.strerror or "unreadable"


def differences(old: Scan | None, new: Scan) -> list[Difference]:
    """What a copy that looks like `old` lacks to look like `new`; without `old`, everything."""
    found = []
    before = old.directories if old else {}
    for path, listing in new.directories.items():
        known = before.get(path)
        if known == listing:
            continue
        rows, past = rows_of(listing), rows_of(known or NOTHING)
        changed = [name for name, row in rows.items() if past.get(name) != row]
        deleted = [name for name in past if name not in rows]
        if changed or deleted or known is None:
            sizes = [rows[name][2] for name in changed if stat.S_ISREG(rows[name][0])]
            found.append(Difference(path, tuple(changed), tuple(deleted), len(sizes), sum(sizes)))
    if old and old.own != new.own and not any(difference.path == "" for difference in found):
        found.append(Difference(""))
    return found


def inherit(old: Scan, new: Scan) -> None:
    """What could not be copied at the time of `old` and is as it was cannot be copied now either."""
    for path, why in old.left_out.items():
        parent, _, name = path.rpartition("/")
        row = rows_of(new.directories.get(parent, NOTHING)).get(name)
        if row is not None and rows_of(old.directories.get(parent, NOTHING)).get(name) == row:
            new.left_out.setdefault(path, why)


def save(scan: Scan) -> bytes:
    content = marshal.dumps(
        (_FORMAT, scan.own, scan.directories, scan.files, scan.bytes, scan.left_out, scan.shut, scan.mounts, scan.partial)
    )
    return zlib.crc32(content).to_bytes(4, "big") + content


def load(content: bytes) -> Scan | None:
    """None: not a scan, or of another format, or damaged."""
    if len(content) < 5 or zlib.crc32(memoryview(content)[4:]) != int.from_bytes(content[:4], "big"):
        return None
    form, *fields = marshal.loads(memoryview(content)[4:])  # noqa: S302 - our own file, in a directory closed to everybody else
    if form != _FORMAT:
        return None
    return Scan(*fields)
