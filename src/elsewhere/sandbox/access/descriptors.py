"""Handling by descriptors what a hostile sandbox holds: the steps of which `files.py` and `transfer.py` are made.

Each step acts on one thing that is held open already, or on one name in a directory that is. None resolves a path, so none can be
led elsewhere; which paths there are is `files.py`'s business. Errors of the system get our words here, too.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from elsewhere.errors import ElsewhereError, InUse, NotFound, Refused, StateError, UsageError
from elsewhere.linux import syscalls

__all__ = [
    "Path",
    "aside",
    "checked",
    "fresh_name",
    "inherit_owner",
    "kind_of",
    "naming",
    "open_regular",
    "reason",
    "refuse_kernel",
    "remove_tree",
    "settle",
    "want_regular",
]

Path = str | os.PathLike[str]

_PASSES = 64  # over a tree that is filled again while it is removed
_DEEPEST = 100_000  # levels; one that grows faster than it is removed must end somewhere

_KERNEL = {
    0x9FA0: "proc", 0x62656572: "sysfs", 0x27E0EB: "cgroup", 0x63677270: "cgroup2", 0x64626720: "debugfs",
    0x74726163: "tracefs", 0x73636673: "securityfs", 0xCAFE4A11: "bpf", 0x42494E4D: "binfmt_misc", 0x6E736673: "nsfs",
    0xF97CFF8C: "selinuxfs", 0x43415D53: "smackfs", 0xDE5E81E4: "efivarfs", 0x6165676C: "pstore", 0x62656570: "configfs",
    0x7655821: "resctrl", 0x65735543: "fusectl",
}  # fmt: skip

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link", stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket"}

_MEANINGS: dict[int, tuple[type[ElsewhereError], str, str, str]] = {
    errno.ENOENT: (NotFound, "file_not_found", "there is no {}", "check its spelling; relative paths begin at the project"),
    errno.ENOTDIR: (UsageError, "not_a_directory", "{} is not a directory, or lies below a file", "name a directory"),
    errno.EISDIR: (UsageError, "is_a_directory", "{} is a directory", "name a file"),
    errno.EEXIST: (UsageError, "file_exists", "{} exists already", "remove it first, choose another name, or allow to overwrite"),
    errno.ENOTEMPTY: (UsageError, "directory_not_empty", "the directory {} is not empty", "remove it with recursive=True"),
    errno.ELOOP: (
        Refused,
        "outside_root",
        "{} cannot be followed inside the sandbox",
        "it is a loop of links, or a link of /proc",
    ),
    errno.EXDEV: (Refused, "outside_root", "{} leads out of the sandbox", "name a path that stays inside"),
    errno.ENOSPC: (StateError, "no_room", "no room is left for {}", "free some, or raise the limit"),
    errno.EDQUOT: (StateError, "no_room", "the quota leaves no room for {}", "free some, or raise the limit"),
    errno.EFBIG: (UsageError, "file_too_large", "{} is larger than a file may be here", "split it, or raise ulimit -f"),
    errno.EACCES: (Refused, "file_denied", "{} may not be used", "look at its owner and mode, and at those of its directory"),
    errno.EPERM: (Refused, "file_denied", "{} may not be changed", "look at its owner, mode and attributes"),
    errno.EROFS: (Refused, "read_only", "{} lies on a read-only mount", "write to the project, or below /tmp"),
    errno.ENAMETOOLONG: (UsageError, "bad_path", "the path {} is too long", "name a shorter one"),
    errno.EAGAIN: (InUse, "file_busy", "{} is held or moved by programs inside", "try again, or stop them"),
    errno.EBUSY: (InUse, "file_busy", "{} is in use by a mount or a program", "name what lies below it"),
    errno.ETXTBSY: (InUse, "file_busy", "{} is being executed", "stop the program first"),
}


def reason(error: OSError) -> str:
    """What the system said; without the call and its arguments, which `syscalls.py` puts before it."""
    return (error.strerror or str(error)).rpartition("): ")[2]


@contextlib.contextmanager
def naming(path: Path, side: str = "") -> Iterator[None]:
    """What the system refuses becomes an error of ours that names the path; `side` says where that path is."""
    try:
        yield
    except ElsewhereError:  # some are OSErrors, too
        raise
    except OSError as error:
        text = os.fspath(path)
        fallback = (StateError, "system_error", "{} cannot be used", "look at the file system it lies on")
        kind, code, message, hint = _MEANINGS.get(error.errno or 0, fallback)
        detail: dict[str, object] = {"path": text, "errno": errno.errorcode.get(error.errno or 0, "")}
        raise kind(code, f"{message.format(f'{text!r}{side}')} ({reason(error)})", hint=hint, detail=detail) from error


def checked(path: Path) -> str:
    text = os.fspath(path)
    if "\0" in text:
        raise UsageError("nul_byte", f"the path {text!r} contains a NUL byte, which no file name can", hint="take it out")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise UsageError(
            "bad_path", f"the path {text!r} cannot be written as bytes", hint="decode names with os.fsdecode"
        ) from error
    return text


def kind_of(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "device")


def fresh_name() -> str:
    return f".elsewhere-{os.urandom(8).hex()}"


def want_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(
            "not_a_regular_file",
            f"{os.fspath(path)!r} is a {kind_of(found.st_mode)}, not a regular file",
            hint="name a regular file; the others are for commands inside",
        )


def refuse_kernel(fd: int, path: Path) -> None:
    kind = _KERNEL.get(syscalls.fstatfs(fd))
    if kind is not None:
        raise Refused(
            "outside_root",
            f"{os.fspath(path)!r} leads into {kind}, which belongs to the host's kernel and not to the sandbox",
            hint="use a command inside: elsewhere exec ID -- cat PATH",
        )


def open_regular(handle: int, path: Path) -> int:
    """The very file that the O_PATH descriptor holds. Not blocking: a program inside may hold a lease on it."""
    want_regular(os.fstat(handle), path)
    refuse_kernel(handle, path)
    return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


@contextlib.contextmanager
def aside(parent: int, name: str, *, replace: bool = True) -> Iterator[int]:
    """A new file that takes the name once all of it is written, and leaves nothing behind if it is not."""
    temporary = fresh_name()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        try:
            yield fd
        finally:
            os.close(fd)
        settle(parent, temporary, parent, name, replace=replace)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise


def settle(parent: int, name: str, new_parent: int, new_name: str, *, replace: bool) -> None:
    """Rename; without `replace`, only to a name that is free."""
    if replace:
        os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=new_parent)
        return
    try:
        syscalls.renameat2(parent, name, new_parent, new_name, syscalls.RENAME_NOREPLACE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some file systems (NFS) cannot do both in one step; there, a look before is all that can be had.
        with contextlib.suppress(FileNotFoundError):
            os.lstat(new_name, dir_fd=new_parent)
            raise FileExistsError(errno.EEXIST, "it exists") from error
        os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=new_parent)


def inherit_owner(fd: int, old: os.stat_result, first: int) -> None:
    """Owners below `first` mean nobody inside, and are not handed on."""
    new = os.fstat(fd)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid) and min(old.st_uid, old.st_gid) >= first:
        with contextlib.suppress(PermissionError):  # an ordinary user's new file is their own
            os.fchown(fd, old.st_uid, old.st_gid)


def remove_tree(parent: int, name: str) -> None:
    """Remove a directory with all that it holds, and nothing else, whoever changes it meanwhile."""
    for _ in range(_PASSES):
        try:
            top = _enter(parent, name)
            _empty(top, os.fstat(top).st_dev)
            os.rmdir(name, dir_fd=parent)
            return
        except OSError as error:
            # Filled again, gone, or another thing by now.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise
            try:
                found = os.lstat(name, dir_fd=parent)
            except FileNotFoundError:
                return
            if not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "it was replaced meanwhile") from error
    raise OSError(errno.ENOTEMPTY, "programs inside keep filling it")


def _enter(parent: int, name: str) -> int:
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, os.O_PATH | flags, dir_fd=parent)
    try:
        closed = os.fstat(handle).st_mode & stat.S_IRWXU != stat.S_IRWXU
        if closed and os.geteuid() != 0:
            with contextlib.suppress(PermissionError):
                os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)


def _empty(here: int, device: int) -> None:
    """Not by recursion, and with one descriptor: a tree may be deeper than there are frames, files or bytes in a path. The way
    up is `..`, which counts only if it leads to the directory that we came from."""
    trail: list[tuple[str, os.stat_result]] = []
    try:
        waiting = [os.listdir(here)]
        while True:
            if waiting[-1]:
                name = waiting[-1].pop()
                try:
                    os.unlink(name, dir_fd=here)
                    continue
                except FileNotFoundError:
                    continue
                except IsADirectoryError:
                    below = _enter(here, name)
                trail.append((name, os.fstat(here)))
                os.close(here)
                here = below
                if os.fstat(here).st_dev != device:
                    raise OSError(errno.EBUSY, f"{name!r} in it is another mount")
                if len(trail) > _DEEPEST:
                    raise OSError(errno.ENAMETOOLONG, f"it is deeper than {_DEEPEST} levels")
                waiting.append(os.listdir(here))
            elif trail:
                name, expected = trail.pop()
                waiting.pop()
                above = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
                os.close(here)
                here = above
                if not os.path.samestat(os.fstat(here), expected):
                    raise OSError(errno.ESTALE, "directories in it were moved")
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(name, dir_fd=here)
            else:
                return
    finally:
        os.close(here)
