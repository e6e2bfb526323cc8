"""Files and whole trees into a sandbox and out of it, and what `elsewhere cp` means by its two arguments.

- What is named is followed if it is a link; links below it are copied as links, wherever they point, and never followed.
- Content, holes, permission bits and times are kept. Owners are not (inside: the sandbox's root or user, outside: whoever
  downloads; a file that is replaced keeps its owner), nor setuid, setgid and sticky bits, nor attributes: a program that a
  sandbox made must not come out with powers. Hard links become separate files.
- Fifos, sockets, devices, what lies on proc and its like, and what may not be read are left out and named in the result.
- An existing directory as the target means: below it, under its own name, as `cp -r` does. Something that is there already is
  replaced only with `overwrite`; a directory is then merged into, and what only it has stays.
- A new tree grows under a name of its own and gets its own when it is complete; a single file likewise. A transfer that fails
  leaves nothing of these. A merge is complete file by file.
- Both sides are walked by the kernel without following links. A tree is left out below the point where its path is longer than
  the kernel takes (4,096 bytes).

Not here: single files (`files.py`); sandbox to sandbox; waiting for a program inside to be done with a file.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import field

from elsewhere.errors import ElsewhereError, UsageError
from elsewhere.linux import syscalls
from elsewhere.sandbox.access.descriptors import (
    Path,
    aside,
    checked,
    fresh_name,
    inherit_owner,
    kind_of,
    naming,
    open_regular,
    reason,
    refuse_kernel,
    remove_tree,
    settle,
    want_regular,
)
from elsewhere.sandbox.access.files import Files
from elsewhere.values import dataclass

__all__ = ["LeftOut", "Sides", "Transferred", "download", "parse_place", "parse_sides", "upload"]

_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_CHUNK = 1 << 20
_LONGEST = 4096  # PATH_MAX, the byte at its end included
_ON_HOST = " on the host"


@dataclass(frozen=True, slots=True)
class LeftOut:
    path: str
    """below what was transferred"""
    why: str


@dataclass(slots=True)
class Transferred:
    files: int = 0
    """links count as files, directories do not"""
    bytes: int = 0
    left_out: list[LeftOut] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sides:
    """What `cp` was asked for."""

    sandbox: str
    inside: str
    host: str
    uploads: bool


def parse_place(text: str) -> tuple[str | None, str]:
    """`ID:PATH` lies in a sandbox (no PATH: its project); everything else on the host, and also what has a slash before the
    colon, as in `./a:b`."""
    if text in ("", "-") or text.startswith(":"):
        raise UsageError(
            "cp_place",
            f"{text!r} names no place to copy from or to",
            hint="write ID:PATH for a sandbox or PATH for the host; for a stream use elsewhere exec ID -- cat PATH",
        )
    before, colon, after = text.partition(":")
    if not colon or "/" in before:
        return None, text
    return before, after or "."


def parse_sides(source: str, target: str) -> Sides:
    from_sandbox, from_path = parse_place(source)
    to_sandbox, to_path = parse_place(target)
    if from_sandbox is not None and to_sandbox is None:
        return Sides(from_sandbox, from_path, to_path, uploads=False)
    if to_sandbox is not None and from_sandbox is None:
        return Sides(to_sandbox, to_path, from_path, uploads=True)
    both = "on the host" if from_sandbox is None else "in sandboxes"
    raise UsageError(
        "cp_sides",
        f"{source!r} and {target!r} are both {both}",
        hint="write ID:PATH for exactly one of them; a host path with a colon is written ./a:b",
    )


def upload(files: Files, host_path: Path, path: Path, *, overwrite: bool = True) -> Transferred:
    """From the host into the sandbox. Missing directories above `path` are made; one that ends with a slash is a directory."""
    source = checked(host_path)
    with contextlib.ExitStack() as stack:
        with naming(source, _ON_HOST):
            handle = os.open(source, os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, handle)
        with naming(path):
            own = os.path.basename(os.path.abspath(source))
            if checked(path).endswith("/"):
                files.mkdir(path)
            try:
                parent = stack.enter_context(files.held(path, os.O_DIRECTORY))
                name, shown = own, os.path.join(os.fspath(path), own)
                refuse_kernel(parent, path)
            except (FileNotFoundError, NotADirectoryError):
                with files.acting():
                    parent, name = stack.enter_context(files.destination(path, parents=True))
                shown = os.fspath(path)
        copy = _Copy(shown, files.acting, owners_from=files.shift, overwrite=overwrite)
        return copy.run(handle, source, _ON_HOST, parent, name)


def download(files: Files, path: Path, host_path: Path, *, overwrite: bool = False, limit: int | None = None) -> Transferred:
    """Out of the sandbox onto the host, below a directory that exists. More than `limit` bytes in all are refused."""
    target = checked(host_path)
    with contextlib.ExitStack() as stack:
        with naming(path):
            handle = stack.enter_context(files.held(path))
        own = os.path.basename(os.path.normpath(os.path.join(files.project, os.fspath(path))))
        with naming(target, _ON_HOST):
            above, name = os.path.split(target)
            if os.path.isdir(target):
                above, name, target = target, own, os.path.join(target, own)
            elif not name:
                raise FileNotFoundError(errno.ENOENT, "there is no such directory")
            parent = os.open(above or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, parent)
        copy = _Copy(target, contextlib.nullcontext, overwrite=overwrite, limit=limit, side=_ON_HOST, hostile=True)
        return copy.run(handle, os.fspath(path), "", parent, name)


@dataclass(slots=True)
class _Copy:
    """One transfer. `acting` is how the target's side makes things, `owners_from` the first id that means somebody there; of a
    hostile source a file is only read as far as it reached when it was opened, and nothing of the kernel's."""

    target: str
    acting: Callable[[], contextlib.AbstractContextManager[None]]
    overwrite: bool
    owners_from: int = 0
    limit: int | None = None
    side: str = ""
    hostile: bool = False
    result: Transferred = field(default_factory=Transferred)
    made: list[tuple[str, os.stat_result]] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)
    top: os.stat_result | None = None

    def run(self, handle: int, source: str, source_side: str, parent: int, name: str) -> Transferred:
        with naming(source, source_side):
            found = os.fstat(handle)
            directory = stat.S_ISDIR(found.st_mode)
            if not directory:
                want_regular(found, source)
            if self.hostile:
                refuse_kernel(handle, source)
            reader = self._reopen(handle, directory=directory, path=source)
        try:
            with naming(self.target, self.side):
                old = _lstat(parent, name)
                if not name:
                    raise IsADirectoryError(errno.EISDIR, "what is copied has no name of its own; write one")
                if old is not None and not self.overwrite:
                    raise FileExistsError(errno.EEXIST, "it is not overwritten unasked")
                if not directory:
                    if old is not None and stat.S_ISDIR(old.st_mode):
                        raise IsADirectoryError(errno.EISDIR, "a file does not replace it")
                    self._file(reader, parent, name, found)
                elif old is None:
                    self._new_tree(reader, parent, name, found)
                else:
                    top = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                    try:
                        self._tree(reader, top)
                    finally:
                        os.close(top)
        finally:
            os.close(reader)
        return self.result

    def _reopen(self, handle: int, *, directory: bool, path: str) -> int:
        if directory:
            return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if self.hostile:
            return open_regular(handle, path)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)

    def _new_tree(self, reader: int, parent: int, name: str, found: os.stat_result) -> None:
        temporary = fresh_name()
        with self.acting():
            os.mkdir(temporary, 0o700, dir_fd=parent)
        try:
            top = os.open(temporary, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            try:
                self.made.append((".", found))
                self._tree(reader, top)
            finally:
                os.close(top)
            with self.acting():
                settle(parent, temporary, parent, name, replace=False)
        except BaseException:
            with contextlib.suppress(OSError), self.acting():
                remove_tree(parent, temporary)
            raise

    def _tree(self, source: int, target: int) -> None:
        """By a list of what is still to do: a tree may be deeper than Python has frames and a process descriptors."""
        self.top = os.fstat(target)
        self.todo = ["."]
        while self.todo:
            path = self.todo.pop()
            with contextlib.ExitStack() as stack:
                try:
                    reader = syscalls.openat2(source, path, os.O_RDONLY | os.O_DIRECTORY, _BENEATH)
                    stack.callback(os.close, reader)
                    names = os.listdir(reader)
                except OSError as error:
                    self._leave_out(path, error)
                    continue
                with self._naming(path):
                    writer = syscalls.openat2(target, path, os.O_PATH | os.O_DIRECTORY, _BENEATH)
                    stack.callback(os.close, writer)
                for name in names:
                    self._entry(reader, writer, path, name)
        for path, found in reversed(self.made):  # what lies below first: a directory may be closed, and its time is the last
            with self._naming(path), self.acting():
                fd = syscalls.openat2(target, path, os.O_RDONLY | os.O_DIRECTORY, _BENEATH)
                try:
                    _attributes(fd, found)
                finally:
                    os.close(fd)

    def _entry(self, reader: int, writer: int, above: str, name: str) -> None:
        path = name if above == "." else f"{above}/{name}"
        content = -1
        try:
            handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=reader)
        except OSError as error:
            self._leave_out(path, error)
            return
        try:
            found = os.fstat(handle)
            kind = kind_of(found.st_mode)
            if kind not in ("file", "directory", "link"):
                self.result.left_out.append(LeftOut(path, f"a {kind}"))
                return
            try:
                if self.hostile:
                    refuse_kernel(handle, path)
                if kind == "directory" and len(os.fsencode(path)) >= _LONGEST:
                    raise OSError(errno.ENAMETOOLONG, "its path is longer than the kernel takes")
                if kind != "link":
                    content = self._reopen(handle, directory=kind == "directory", path=path)
            except OSError as error:
                self._leave_out(path, error)
                return
            with self._naming(path):
                if kind == "link":
                    self._link(os.readlink("", dir_fd=handle), writer, name, found)
                elif kind == "file":
                    self._file(content, writer, name, found)
                elif self.top is None or not os.path.samestat(
                    found, self.top
                ):  # a tree may be copied into itself where it is shared
                    self._directory(writer, name, path, found)
        finally:
            os.close(handle)
            if content >= 0:
                os.close(content)

    def _directory(self, writer: int, name: str, path: str, found: os.stat_result) -> None:
        try:
            with self.acting():
                os.mkdir(name, 0o700, dir_fd=writer)
            self.made.append((path, found))
        except FileExistsError:
            old = _lstat(writer, name)
            if old is not None and not stat.S_ISDIR(old.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "a directory does not replace it") from None
        self.todo.append(path)

    def _link(self, leads_to: str, writer: int, name: str, found: os.stat_result) -> None:
        temporary = fresh_name()
        with self.acting():
            os.symlink(leads_to, temporary, dir_fd=writer)
            try:
                os.utime(temporary, ns=(found.st_atime_ns, found.st_mtime_ns), dir_fd=writer, follow_symlinks=False)
                settle(writer, temporary, writer, name, replace=self.overwrite)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=writer)
                raise
        self.result.files += 1

    def _file(self, reader: int, writer: int, name: str, found: os.stat_result) -> None:
        size = os.fstat(reader).st_size
        if self.limit is not None and self.result.bytes + size > self.limit:
            raise UsageError(
                "file_too_large",
                f"{name!r} with its {size} bytes makes more than the {self.limit} that may be transferred",
                hint="raise the limit, or transfer less",
                detail={"size": size, "limit": self.limit},
            )
        old = _lstat(writer, name)
        with self.acting(), aside(writer, name, replace=self.overwrite) as fd:
            # Of the host's own /proc files nobody knows the size before they are read.
            done = _copy_all(reader, fd) if size == 0 and not self.hostile else _copy_data(reader, fd, size)
            if old is not None and stat.S_ISREG(old.st_mode):
                inherit_owner(fd, old, self.owners_from)
            _attributes(fd, found)
        self.result.files += 1
        self.result.bytes += done

    def _leave_out(self, path: str, error: OSError) -> None:
        if error.errno != errno.ENOENT:  # that one is just gone since it was listed
            why = error.message if isinstance(error, ElsewhereError) else reason(error)
            self.result.left_out.append(LeftOut(path, why))

    def _naming(self, path: str) -> contextlib.AbstractContextManager[None]:
        return naming(os.path.normpath(os.path.join(self.target, path)), self.side)


def _lstat(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return None


def _attributes(fd: int, found: os.stat_result) -> None:
    os.fchmod(fd, found.st_mode & 0o777)
    os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))


def _copy_all(reader: int, writer: int) -> int:
    done = 0
    while part := os.read(reader, _CHUNK):
        done += len(part)
        while part:
            part = part[os.write(writer, part) :]
    return done


def _copy_data(reader: int, writer: int, size: int) -> int:
    """Only what is data, so that holes stay holes; and only as far as the file reached, so that one that grows ends."""
    position = 0
    while position < size:
        try:
            start = os.lseek(reader, position, os.SEEK_DATA)
            end = min(size, os.lseek(reader, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        os.lseek(reader, start, os.SEEK_SET)
        os.lseek(writer, start, os.SEEK_SET)
        position = start
        while position < end and (done := os.sendfile(writer, reader, None, min(_CHUNK, end - position))):
            position += done
        if position < end:
            break  # it was cut meanwhile
    size = min(size, os.fstat(reader).st_size)
    os.ftruncate(writer, size)
    return size
