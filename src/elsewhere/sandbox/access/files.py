"""Files of a sandbox, read and written by its host while the sandbox is at work and may be hostile.

Every path is resolved by the kernel below the sandbox's root: a link leads where it leads inside, and never out. What is found
is held by a descriptor that cannot act (O_PATH) and looked at; only a regular file or a directory is then opened, and that very
one. So no fifo blocks, no device acts, and nothing can be swapped between the look and the opening. Where something is made,
its directory is held and the last name is used alone.

- A relative path is relative to the project. Links on the way are followed; `read`, `write`, `list` and `mkdir` also follow one
  at the end, while `stat`, `exists`, `remove` and `rename` mean the link itself.
- A file is written under a name of its own and renamed when it is whole. It keeps mode and owner of the one it replaces (but
  no setuid bit, as with any write); other hard links of that one keep the old content.
- Made by root for its sandboxes, files belong to the sandbox's root.
- proc, sysfs and their like show the host's kernel, and we may more there than the sandbox may: no content comes from them,
  and nothing is made or removed there.

Not here: whole trees in and out (`transfer.py`), and where the root's descriptor comes from.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from elsewhere.errors import ElsewhereError, Refused, UsageError
from elsewhere.linux import syscalls
from elsewhere.sandbox.access.descriptors import (
    Path,
    aside,
    checked,
    inherit_owner,
    kind_of,
    naming,
    open_regular,
    refuse_kernel,
    remove_tree,
    settle,
    want_regular,
)
from elsewhere.sandbox.ids import ID_COUNT
from elsewhere.values import dataclass

__all__ = ["LIST_LIMIT", "READ_LIMIT", "Entry", "Files", "Listing"]

READ_LIMIT = 1 << 30  # a sparse file of a terabyte costs the sandbox nothing and would cost us our memory
LIST_LIMIT = 1_000_000

_IN_ROOT = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
_TRIES = 256  # the kernel gives up on `..` whenever anything is renamed meanwhile
_LINKS = 40  # as many as the kernel follows
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Entry:
    """What lies under one name; owners as the sandbox sees them."""

    name: str
    kind: str
    """file, directory, link, fifo, socket or device"""
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None
    """where a link points to, in its own words"""


Listing = list[Entry]  # in the class below, `list` is the verb


class Files:
    """`root_fd` is a descriptor of the sandbox's root directory, which must outlive this object and is not closed by it;
    `shift` is added to an id inside to have the host's."""

    def __init__(self, root_fd: int, project: str, shift: int = 0) -> None:
        self._root = root_fd
        self.project = project
        self.shift = shift

    def read(self, path: Path, *, limit: int | None = READ_LIMIT) -> bytes:
        """As much as the file held when it was opened; more than `limit` bytes are refused."""
        with naming(path), self.held(path) as handle, open(open_regular(handle, path), "rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            if limit is not None and size > limit:
                raise UsageError(
                    "file_too_large",
                    f"{os.fspath(path)!r} has {size} bytes, more than the {limit} that are read at once",
                    hint="download it, or read it with a larger limit",
                    detail={"path": os.fspath(path), "size": size, "limit": limit},
                )
            parts = []
            while size > 0 and (part := stream.read(min(size, 1 << 24))):
                parts.append(part)
                size -= len(part)
            return b"".join(parts)

    def read_text(self, path: Path, *, limit: int | None = READ_LIMIT, errors: str = "strict") -> str:
        """As UTF-8, line ends as they are."""
        try:
            return self.read(path, limit=limit).decode(errors=errors)
        except UnicodeDecodeError as error:
            raise UsageError(
                "not_utf8", f"{os.fspath(path)!r} is not UTF-8: {error}", hint="read() gives its bytes, or pass errors='replace'"
            ) from error

    def write(self, path: Path, data: bytes | str, *, mode: int | None = None, parents: bool = True) -> None:
        """Replace or make a file. `mode`: else that of the file it replaces, else 0o644."""
        content = memoryview(data.encode(errors="surrogateescape") if isinstance(data, str) else data).cast("B")
        with naming(path), self.acting(), self.destination(path, parents=parents) as (parent, name):
            old = self.replaced(parent, name, path)
            with aside(parent, name) as fd:
                while content:
                    content = content[os.write(fd, content) :]
                if old is not None:
                    inherit_owner(fd, old, self.shift)
                kept = 0o644 if old is None else old.st_mode & 0o777
                os.fchmod(fd, kept if mode is None else mode & 0o7777)

    def list(self, path: Path = ".", *, limit: int | None = LIST_LIMIT) -> "Listing":
        """What a directory holds, sorted by name; more than `limit` entries are refused."""
        found = []
        with naming(path), self.held(path, os.O_DIRECTORY) as handle:
            fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                            found.append(self._entry(entry.name, os.lstat(entry.name, dir_fd=fd), fd, entry.name))
                        if limit is not None and len(found) > limit:
                            raise UsageError(
                                "directory_too_large",
                                f"{os.fspath(path)!r} holds more than {limit} entries",
                                hint="list it with a command inside, or with a larger limit",
                            )
            finally:
                os.close(fd)
        return sorted(found, key=lambda entry: entry.name)

    def stat(self, path: Path) -> Entry:
        where = self._where(path)
        with naming(path), self.held(path, os.O_NOFOLLOW) as handle:
            return self._entry(os.path.basename(os.path.normpath(where)) or "/", os.fstat(handle), handle, "")

    def exists(self, path: Path) -> bool:
        """Whether `stat` finds something: a link counts, wherever it points."""
        try:
            self.stat(path)
        except ElsewhereError as error:
            if error.code in ("file_not_found", "not_a_directory", "outside_root"):
                return False
            raise
        return True

    def mkdir(self, path: Path, *, mode: int = 0o755, parents: bool = True, exist_ok: bool = True) -> None:
        where = self._where(path)
        with naming(path), self.acting():
            if not self._make(where, mode, parents=parents) and not exist_ok:
                raise FileExistsError(errno.EEXIST, "it exists")

    def remove(self, path: Path, *, recursive: bool = False) -> None:
        """A file, a link (never what it points to), an empty directory; with `recursive` a directory with all it holds, even
        closed ones. Another mount below is not entered."""
        with naming(path), self.acting(), self._named(path) as (parent, name):
            found = os.lstat(name, dir_fd=parent)
            if not stat.S_ISDIR(found.st_mode):
                os.unlink(name, dir_fd=parent)
                return
            self._protect(path, found)
            if recursive:
                remove_tree(parent, name)
            else:
                os.rmdir(name, dir_fd=parent)

    def rename(self, source: Path, target: Path, *, overwrite: bool = True) -> None:
        """Both inside, and as `os.rename` does it: a file takes a file's place, a directory that of an empty directory."""
        with naming(source), self.acting(), self._named(source) as (parent, name):
            self._protect(source, os.lstat(name, dir_fd=parent))
            with naming(target), self._named(target) as (new_parent, new_name):
                with contextlib.suppress(FileNotFoundError):
                    self._protect(target, os.lstat(new_name, dir_fd=new_parent))
                try:
                    settle(parent, name, new_parent, new_name, replace=overwrite)
                except OSError as error:
                    if error.errno == errno.EXDEV:
                        raise UsageError(
                            "cannot_rename",
                            f"{os.fspath(source)!r} cannot become {os.fspath(target)!r} by renaming: they lie on different file"
                            " systems, or it is a directory of reality's, which this kind of sandbox can only copy",
                            hint="move it with a command inside: mv copies where it must",
                        ) from error
                    if error.errno == errno.EINVAL:
                        raise UsageError(
                            "into_itself", f"{os.fspath(source)!r} cannot be moved into itself", hint="name another target"
                        ) from error
                    raise

    # What follows is for this module and `transfer.py`: descriptors, and plain OSErrors.

    @contextlib.contextmanager
    def held(self, path: Path, flags: int = 0) -> Iterator[int]:
        """An O_PATH descriptor of what the path leads to."""
        handle = self._open(self._where(path), flags)
        try:
            yield handle
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def destination(self, path: Path, *, parents: bool) -> Iterator[tuple[int, str]]:
        """The directory and the name under which a file at this path would come to lie, with links at its end followed."""
        where = self._where(path)
        for _ in range(_LINKS):
            above, name = _split(where)
            if name in ("", "..") or where.endswith("/"):
                raise IsADirectoryError(errno.EISDIR, "it names a directory")
            if parents:
                self._make(above, 0o755, parents=True)
            parent = self._open(above, os.O_DIRECTORY)
            try:
                leads_to = _link(parent, name)
                if leads_to is None:
                    refuse_kernel(parent, path)
                    yield parent, name
                    return
            finally:
                os.close(parent)
            # The kernel resolves the two together from the root, so that even a `..` in the link means what it means inside.
            where = leads_to if leads_to.startswith("/") else f"{above}/{leads_to}"
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    @staticmethod
    def replaced(parent: int, name: str, path: Path) -> os.stat_result | None:
        """The regular file that is there; anything else that is there is refused."""
        try:
            found = os.lstat(name, dir_fd=parent)
        except FileNotFoundError:
            return None
        want_regular(found, path)
        return found

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """As the sandbox's root: what this thread makes belongs to it. A tmpfs of the sandbox would even refuse our own id,
        which has no meaning there (EOVERFLOW)."""
        if not self.shift:
            yield
            return
        powers = syscalls.capget()
        group = syscalls.setfsgid(self.shift)
        user = syscalls.setfsuid(self.shift)
        try:
            syscalls.capset(*powers)  # giving up the id took those for files away; going back to it restores them
            yield
        finally:
            syscalls.setfsuid(user)
            syscalls.setfsgid(group)

    def _where(self, path: Path) -> str:
        text = checked(path)
        return text if text.startswith("/") else f"{self.project}/{text}"

    def _open(self, where: str, flags: int = 0) -> int:
        for _ in range(_TRIES):
            try:
                return syscalls.openat2(self._root, where, os.O_PATH | flags, _IN_ROOT)
            except BlockingIOError:
                os.sched_yield()
        raise BlockingIOError(errno.EAGAIN, "directories on its way are moved all the time")

    @contextlib.contextmanager
    def _named(self, path: Path) -> Iterator[tuple[int, str]]:
        above, name = _split(self._where(path))
        if name in ("", ".."):
            raise _protected(path)
        parent = self._open(above, os.O_DIRECTORY)
        try:
            refuse_kernel(parent, path)
            yield parent, name
        finally:
            os.close(parent)

    def _make(self, where: str, mode: int, *, parents: bool) -> bool:
        """Whether a directory had to be made."""
        missing: list[str] = []
        while True:
            try:
                here = self._open(where, os.O_DIRECTORY)
                break
            except FileNotFoundError:
                above, name = _split(where)
                if name in ("", "..") or (missing and not parents):
                    raise
                missing.append(name)
                where = above
        made = bool(missing)
        try:
            if made:
                refuse_kernel(here, where)
            while missing:
                name = missing.pop()
                try:
                    os.mkdir(name, 0o755, dir_fd=here)
                    new = True
                except FileExistsError:  # the sandbox was faster; or a link that leads nowhere, and then opening it fails
                    new = False
                below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                os.close(here)
                here = below
                if new:  # whatever our umask is; the directory above may have handed down its group and the bit for it
                    wanted = (0o755 if missing else mode & 0o7777) | os.fstat(here).st_mode & stat.S_ISGID
                    os.chmod(f"/proc/self/fd/{here}", wanted)
        finally:
            os.close(here)
        return made

    def _protect(self, path: Path, found: os.stat_result) -> None:
        """Neither the root nor the project, nor what the project lies in."""
        if not stat.S_ISDIR(found.st_mode):
            return
        here, above = "", self.project
        while here != above:
            here, above = above, os.path.dirname(above)
            try:
                handle = self._open(here)
            except OSError:
                continue
            same = os.path.samestat(os.fstat(handle), found)
            os.close(handle)
            if same:
                raise _protected(path)

    def _entry(self, name: str, found: os.stat_result, directory: int, link: str) -> Entry:
        kind = kind_of(found.st_mode)
        return Entry(
            name=name,
            kind=kind,
            size=found.st_size,
            mode=stat.S_IMODE(found.st_mode),
            uid=self._inside(found.st_uid),
            gid=self._inside(found.st_gid),
            mtime=found.st_mtime,
            target=os.readlink(link, dir_fd=directory) if kind == "link" else None,
        )

    def _inside(self, number: int) -> int:
        if not self.shift:
            return number
        return number - self.shift if 0 <= number - self.shift < ID_COUNT else _NOBODY


def _link(parent: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError:  # something else, or nothing
        return None


def _split(where: str) -> tuple[str, str]:
    where = where.rstrip("/")
    while where.endswith("/."):
        where = where[:-2].rstrip("/")
    above, _, name = where.rpartition("/")
    return above or "/", name


def _protected(path: Path) -> Refused:
    return Refused(
        "protected_path",
        f"{os.fspath(path)!r} is the root or the project, or what the project lies in, and is neither removed nor moved",
        hint="name what lies below it; elsewhere rm removes a whole sandbox",
    )
