"""Copy on write: the overlay as an operation of a mount plan, and the two ways in which kernels let one be made.

Everything that is new lies in `upper`; the marks by which it says what is deleted are read by `storage/encodings.py`.
"""

import contextlib
import errno
import os

from elsewhere.linux import syscalls as sys_
from elsewhere.linux.mounts import Bench, Clone, Operation, configure, set_attributes, tmpfs
from elsewhere.linux.syscalls import AT_FDCWD, AT_NO_AUTOMOUNT, OPEN_TREE_CLONE
from elsewhere.paths import is_within
from elsewhere.values import dataclass

__all__ = ["Overlay"]


@dataclass(frozen=True, slots=True)
class Overlay(Operation):
    """Copy on write: `lower` of reality, frozen `layers` above it (newest first), everything new in `upper`. Layers, upper and
    work are relative to the sandbox's directory, or absolute. Without a `lower` nothing of reality shows, only the layers. One
    that is not `required` becomes read-only where the kernel refuses it, and is left out where the sandbox itself put something
    else in its place, before it was started again.

    With layers that lie below `lower` there are two overlays: the kernel refuses a lower that lies below another one. The inner
    one has no upper and shows reality alone; an overlay without an upper needs two lowers, so an empty one joins it."""

    lower: str | None
    upper: str
    work: str
    layers: tuple[str, ...] = ()
    attributes: int = 0
    idmapped: bool = False
    userxattr: bool = False
    redirects: bool = True
    volatile: bool = True
    required: bool = True

    def make(self, bench: Bench) -> int:
        try:
            return self._make(bench)
        except OSError as error:
            if self.required or self.lower is None:
                raise
            bench.weaker[self.target] = error.strerror or "refused"
            return Clone(self.target, self.lower, self.attributes | sys_.MOUNT_ATTR_RDONLY).make(bench)

    def execute(self, bench: Bench) -> None:
        try:
            Operation.execute(self, bench)
        except OSError as error:
            if self.required or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL):
                raise
            bench.weaker[self.target] = f"not shown: something else is in its place inside ({error.strerror})"

    def _make(self, bench: Bench) -> int:
        with contextlib.ExitStack() as stack:
            frozen = [os.path.realpath(os.path.join(bench.own, layer)) for layer in self.layers]
            lowers = [_owned(stack, os.open(layer, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) for layer in frozen]
            if self.lower is not None:
                lowers.append(self._reality(stack, self.lower, frozen, bench))
            upper = _owned(stack, os.open(os.path.join(bench.own, self.upper), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            work = _owned(stack, os.open(os.path.join(bench.own, self.work), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            # A device node of reality that lies outside /dev (in a chroot, say) must not open the device.
            attributes = self.attributes | sys_.MOUNT_ATTR_NODEV
            return _overlay(lowers, self._options(writable=True), upper, work, attributes, bench)

    def _reality(self, stack: contextlib.ExitStack, lower: str, frozen: list[str], bench: Bench) -> int:
        reality = _owned(stack, sys_.open_tree(AT_FDCWD, lower, OPEN_TREE_CLONE | AT_NO_AUTOMOUNT))
        if self.idmapped:
            set_attributes(reality, sys_.MOUNT_ATTR_IDMAP, 0, bench)
        if not any(is_within(layer, lower) for layer in frozen):
            return reality
        empty = _owned(stack, tmpfs((("size", "4k"), ("mode", "755"))))
        return _owned(stack, _overlay([reality, empty], self._options(writable=False), None, None, 0, bench))

    def _options(self, *, writable: bool) -> tuple[tuple[str, str], ...]:
        """All of them, always: the defaults are build options and module parameters of the kernel at hand."""
        options = [("metacopy", "off"), ("index", "off"), ("xino", "off")]
        if self.userxattr:
            options.append(("userxattr", ""))
        else:
            options.append(("redirect_dir", ("on" if self.redirects else "nofollow") if writable else "follow"))
        if writable and self.volatile:
            options.append(("volatile", ""))
        return tuple(options)

    def words(self) -> str:
        over = [*([self.lower] if self.lower is not None else []), *([f"layers ({len(self.layers)})"] if self.layers else [])]
        return f"copy on write over {' and '.join(over)}"


def _owned(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _overlay(
    lowers: list[int],
    options: tuple[tuple[str, str], ...],
    upper: int | None,
    work: int | None,
    attributes: int,
    bench: Bench,
) -> int:
    """Lowers are given as descriptors, newest first. Upper and work go in by way of /proc: a string may have 255 bytes only, and
    the mount table inside then does not show where on the host they lie."""
    writable = () if upper is None else (("upperdir", f"/proc/self/fd/{upper}"), ("workdir", f"/proc/self/fd/{work}"))
    context = sys_.fsopen("overlay")
    try:
        for lower in lowers:
            sys_.fsconfig_fd(context, "lowerdir+", lower)
        configure(context, (*writable, *options))
        sys_.fsconfig_create(context)
        return sys_.fsmount(context, attributes)
    except OSError as first:
        try:
            return _overlay_by_path(lowers, (*writable, *options), attributes, bench)
        except OSError as second:
            raise OSError(second.errno, f"{first.strerror}; {second.strerror}") from first
    finally:
        os.close(context)


def _overlay_by_path(lowers: list[int], options: tuple[tuple[str, str], ...], attributes: int, bench: Bench) -> int:
    """For kernels that take no descriptors (before 6.13): detached mounts have to be attached to be found by a path at all. It
    leads through /proc here too: one through the state directory would show inside, and a comma or colon in it would end it."""
    for lower in lowers:
        if _is_detached(lower):
            sys_.move_mount(lower, "", AT_FDCWD, bench.scratch_directory())
    places = [f"/proc/self/fd/{lower}" for lower in lowers]
    target = bench.scratch_directory()
    data = ",".join([f"lowerdir={':'.join(places)}", *(f"{key}={value}" if value else key for key, value in options)])
    sys_.mount("overlay", target, "overlay", 0, data)
    fd = sys_.open_tree(AT_FDCWD, target, 0)
    if attributes:
        set_attributes(fd, attributes, 0, bench)
    return fd


def _is_detached(fd: int) -> bool:
    """A descriptor of a detached mount reads as a path of its own root: '/'. An attached one reads as where it is."""
    return os.readlink(f"/proc/self/fd/{fd}") == "/"
