"""Loop devices: a file as a disk. The device belongs to whoever uses it and goes away with the last of them, whatever ends them.

    attach(path)   ─► descriptor of /dev/loopN
                         └─ a mount made from it keeps the device, after the descriptor is closed, too
    the last descriptor or mount is gone, by kill -9 as well   ─► the kernel frees the device

The file is locked (`flock`) by the very open file that the device keeps, so the lock lives as long as the device: nobody gets a
second device for a file that somebody else writes, which would destroy what is in it.

Not here: what is on the disk (`storage/images.py`).
"""

import errno
import fcntl
import os
import stat
import struct
import time

__all__ = ["attach"]

_CONTROL = "/dev/loop-control"
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_READ_ONLY, _AUTOCLEAR = 1, 4
_MAJOR = 7

# fd, block size; five words about the backing file, device number, encryption (2), flags, names and keys, reserved: all zero.
_CONFIGURATION = struct.Struct("II 5Q 4I 176x 64x")
_TRIES = 100  # each free number that somebody else took before us costs one
_TAKEN = (errno.EBUSY, errno.ENXIO, errno.ENODEV, errno.EAGAIN)


def attach(path: str, *, read_only: bool = False, wait: float = 0.0) -> int:
    """A descriptor of a loop device for the file. BlockingIOError when the file has a device already, for longer than `wait`
    seconds: a mount that is on its way out keeps it for a moment. An OSError names the step that failed."""
    try:
        backing = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise _failed(f"open {path}", error) from error
    try:
        _lock(backing, path, shared=read_only, until=time.monotonic() + wait)
        return _device(backing, read_only)
    finally:
        os.close(backing)


def _lock(backing: int, path: str, *, shared: bool, until: float) -> None:
    while True:
        try:
            return fcntl.flock(backing, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= until:
                raise _failed(f"lock {path}", error) from error
            time.sleep(0.002)


def _device(backing: int, read_only: bool) -> int:
    """Between asking for a free number and taking it somebody else may take it."""
    try:
        control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _failed(f"open {_CONTROL}", error) from error
    try:
        for number in range(_TRIES):
            try:
                return _take(control, backing, read_only)
            except OSError as error:
                if error.errno not in _TAKEN or number == _TRIES - 1:
                    raise
                time.sleep(0.0005 * number)
        raise AssertionError
    finally:
        os.close(control)


def _take(control: int, backing: int, read_only: bool) -> int:
    try:
        number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    except OSError as error:
        raise _failed("LOOP_CTL_GET_FREE", error) from error
    device = _open_device(number, os.O_RDONLY if read_only else os.O_RDWR)
    try:
        flags = _AUTOCLEAR | (_READ_ONLY if read_only else 0)
        fcntl.ioctl(device, _LOOP_CONFIGURE, bytearray(_CONFIGURATION.pack(backing, 0, 0, 0, 0, 0, 0, 0, 0, 0, flags)))
    except OSError as error:
        os.close(device)
        raise _failed(f"LOOP_CONFIGURE /dev/loop{number}", error) from error
    return device


def _open_device(number: int, how: int) -> int:
    """Where nobody makes the nodes of new devices (a container's own /dev), one is made for as long as it takes to open it."""
    path = f"/dev/loop{number}"
    try:
        try:
            return os.open(path, how | os.O_CLOEXEC)
        except FileNotFoundError:
            path = f"/dev/.elsewhere-loop{number}-{os.getpid()}"
            os.mknod(path, 0o600 | stat.S_IFBLK, _device_number(number))
            try:
                return os.open(path, how | os.O_CLOEXEC)
            finally:
                os.unlink(path)
    except OSError as error:
        raise _failed(f"open {path}", error) from error


def _device_number(number: int) -> int:
    """As the kernel says it: with partitions on loop devices a minor number is not the device's."""
    try:
        with open(f"/sys/block/loop{number}/dev", encoding="ascii") as stream:
            major, minor = stream.read().split(":")
        return os.makedev(int(major), int(minor))
    except (OSError, ValueError):
        return os.makedev(_MAJOR, number)


def _failed(step: str, error: OSError) -> OSError:
    number = error.errno or 0
    return OSError(number, f"{step}: {os.strerror(number)}")
