"""Images: a file system of a fixed size in a sparse file, for the layers of a sandbox that has a disk limit.

A full image is "no space left on device" for the sandbox that filled it and nothing at all for the others. It never takes more
of the host's disk than its size, and is a plain file when nobody uses it.

    create(path, size)   ─► the file: ext4, empty, one inode for each 4 KiB, so that blocks and files end together
    mounted(path)        ─► a descriptor of the mount's root; attached nowhere, so no mount table of the host shows it
    trim(fd)             ─► what was deleted in it is given back to the host's disk
    the last descriptor, and the last mount that was made from it, is closed   ─► clean, and free to be mounted again

No journal: layers are brought to disk when a sandbox is stopped and not before, and an image with a journal turns read-only when
the host's disk is full, where one without goes on as soon as there is room again. An image that was in use when the machine went
down is checked, and repaired where the program that does it needs no decision, before it is mounted again.

No `discard` at each deletion: that is a journey to the device and back for every file, which makes deleting many times slower.

When the host's own disk is full, whoever writes to an image learns of it late or never: the kernel finds out when it brings the
data to disk. Whoever makes images keeps a reserve on that disk. Not here: how much.

Not here: what lies in an image (`sandbox/launching/`), loop devices (`linux/loop.py`).
"""

import contextlib
import errno
import fcntl
import os
import shutil
import struct
from _thread import get_ident

from elsewhere.errors import ElsewhereError, InUse, StateError, Unavailable
from elsewhere.linux import loop
from elsewhere.linux import syscalls as sys_
from elsewhere.values import dataclass

__all__ = ["LEAST", "Usage", "available", "create", "mounted", "trim", "usage"]

LEAST = 1 << 20  # below that there is little room beside the file system's own notes

_BLOCK = 4096
# Named one by one and not by the host's configuration: that differs, and may switch on what an older kernel does not know.
_FEATURES = (
    "none,ext_attr,dir_index,filetype,extent,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum,64bit"
)
_FITRIM = 0xC0185879
_SUPERBLOCK, _MAGIC, _CLEAN, _ERRORS = 1024, 0xEF53, 1, 2
_NOWHERE = "/proc/self/none"  # no configuration of the host: a file that is not there means the program's own defaults
_PLACES = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_INSTALL = "install e2fsprogs (apt-get install e2fsprogs)"
_LEAVING = 10.0  # seconds that the mount of a sandbox which just ended may take to go
_DAMAGED = (errno.EUCLEAN, errno.EINVAL, errno.EBADMSG)
_tried: set[int] = set()  # host file systems


@dataclass(frozen=True, slots=True)
class Usage:
    used_bytes: int
    free_bytes: int
    used_files: int
    free_files: int


def create(path: str, size: int, *, owner: int) -> None:
    """An empty image of `size` bytes, whose root directory belongs to `owner`. Whole or not at all."""
    if size < LEAST:
        raise StateError("image_too_small", f"an image of {size} bytes is too small", hint=f"make it at least {LEAST} bytes")
    aside = f"{path}.{os.getpid()}-{get_ident()}.new"
    try:
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size // _BLOCK * _BLOCK)
            _format(fd, owner)
        finally:
            os.close(fd)
        os.rename(aside, path)
    except OSError as error:
        raise _cannot_create(path, size, error) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)


def _format(fd: int, owner: int) -> None:
    words = f"mkfs.ext4 -q -F -b {_BLOCK} -I 256 -i {_BLOCK} -m 0 -e continue -O {_FEATURES}".split()
    code, said = _run([*words, "-E", f"lazy_itable_init=1,nodiscard,root_owner={owner}:{owner}"], fd)
    if code:
        raise OSError(errno.ENOSPC if "No space left" in said else errno.EIO, f"mkfs.ext4 ended with {code}: {said}")


def _cannot_create(path: str, size: int, error: OSError) -> StateError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space there, or set ELSEWHERE_HOME to a directory on another file system"
    elif error.errno == errno.EFBIG:
        hint = "ask for a smaller disk limit: the file system there holds no file of that size"
    else:
        hint = "run `elsewhere doctor` to see what this host can do"
    why = error.strerror or str(error)
    return StateError("image_not_made", f"the disk image {path!r} of {size} bytes cannot be made: {why}", hint=hint)


def mounted(path: str) -> int:
    """The root of the image, mounted and attached nowhere, for as long as the descriptor (O_PATH) or a mount made from it is
    open. One that was not unmounted is checked first."""
    try:
        device = loop.attach(path, wait=_LEAVING)
        try:
            if not _is_clean(device, path):
                _repair(device, path)
            return _mount(device)
        finally:
            os.close(device)
    except BlockingIOError as error:
        raise InUse(
            "image_in_use", f"the disk image {path!r} is in use", hint="wait until the sandbox that uses it has ended"
        ) from error
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in _DAMAGED:
            raise _damaged(path, why) from error
        hint = "run `elsewhere doctor` to see what this host can do"
        raise StateError("image_unusable", f"the disk image {path!r} cannot be used: {why}", hint=hint) from error


def _mount(device: int) -> int:
    """By way of the descriptor: that is the right device, even where its node has no name. The file was empty when it was made,
    so its inode tables are, and need not be filled with zeros behind the user's back."""
    context = sys_.fsopen("ext4")
    try:
        sys_.fsconfig_string(context, "source", f"/proc/self/fd/{device}")
        sys_.fsconfig_flag(context, "noinit_itable")
        sys_.fsconfig_create(context)
        return sys_.fsmount(context, sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV)
    finally:
        os.close(context)


def _is_clean(device: int, path: str) -> bool:
    block = os.pread(device, 1024, _SUPERBLOCK)
    if len(block) < 1024 or struct.unpack_from("<H", block, 0x38)[0] != _MAGIC:
        raise _damaged(path, "it does not begin like one")
    state = struct.unpack_from("<H", block, 0x3A)[0]
    return bool(state & _CLEAN) and not state & _ERRORS


def _repair(device: int, path: str) -> None:
    """What can be repaired without losing anything; 1 is "repaired"."""
    code, said = _run(["e2fsck", "-p"], device)
    if code not in (0, 1):
        raise _damaged(path, f"e2fsck ended with {code}: {said}")


def _damaged(path: str, why: str) -> StateError:
    return StateError(
        "image_damaged",
        f"the disk image {path!r} cannot be mounted: {why}",
        hint=f"copy it if its content matters, then repair the copy or the image with: e2fsck -f -y {path}",
    )


def usage(fd: int) -> Usage:
    """Of the file system that the descriptor belongs to."""
    found = os.fstatvfs(fd)
    return Usage(
        (found.f_blocks - found.f_bfree) * found.f_frsize,
        found.f_bavail * found.f_frsize,
        found.f_files - found.f_ffree,
        found.f_favail,
    )


def trim(fd: int) -> None:
    """Give back what was deleted: the image's file has holes there again. Where the host's file system cannot do that, nothing
    happens."""
    root = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # First, or a crash could leave notes of files whose blocks are gone. An error is that of an earlier write, said again.
        with contextlib.suppress(OSError):
            sys_.syncfs(root)
        fcntl.ioctl(root, _FITRIM, bytearray(struct.pack("QQQ", 0, (1 << 64) - 1, 0)))
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    finally:
        os.close(root)


def available(directory: str) -> str | None:
    """None if images in this directory can be made and used; otherwise why not. Tried for real, until it once worked on
    that file system."""
    host = os.stat(directory).st_dev
    if host in _tried:
        return None
    if os.geteuid() != 0:
        return "a disk image needs root"
    path = os.path.join(directory, f".trial-{os.getpid()}-{get_ident()}.img")
    try:
        _program("e2fsck")
        create(path, LEAST, owner=0)
        os.close(mounted(path))
    except ElsewhereError as error:
        return _why(error)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    _tried.add(host)
    return None


def _why(error: ElsewhereError) -> str:
    cause = error.__cause__
    if not isinstance(cause, OSError):
        return error.message
    said = cause.strerror or str(cause)
    if said.startswith("open /dev/loop-control"):
        return f"no loop devices ({said}): this kernel has none, or this container may not use them"
    if said.startswith("fsopen(ext4)"):
        return f"this kernel has no ext4 ({said})"
    return said


def _program(name: str) -> str:
    """Those places are often missing from the search path of somebody who became root."""
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *_PLACES)))
    if found is None:
        raise Unavailable("no_program", f"{name} is not installed: {_INSTALL}", hint=_INSTALL)
    return found


def _run(words: list[str], disk: int) -> tuple[int, str]:
    """A program on the disk or file behind a descriptor, which it finds as its own number 3; its exit code and what it said."""
    program = _program(words[0])
    with contextlib.ExitStack() as stack:
        said = _owned(stack, os.memfd_create("said", os.MFD_CLOEXEC))
        null = _owned(stack, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        # Above 3, or a descriptor could be overwritten before its turn.
        sources = [_owned(stack, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 4)) for fd in (null, said, said, disk)]
        actions = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(sources)]
        environment = {"PATH": os.pathsep.join(_PLACES), "LC_ALL": "C", "MKE2FS_CONFIG": _NOWHERE, "E2FSCK_CONFIG": _NOWHERE}
        pid = os.posix_spawn(program, [*words, "/proc/self/fd/3"], environment, file_actions=actions)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code, " ".join(os.pread(said, 4096, 0).decode(errors="replace").split())


def _owned(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd
