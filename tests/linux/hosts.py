"""Other hosts, made of this one: a program that takes things away for real, then becomes somebody and executes a command.

    --overlay-root N   `/` is N overlays on top of each other, as inside one or two containers (2 is the kernel's limit)
    --tmpfs PATH       a tmpfs of its own at PATH (made after the overlays), owned by --uid
    --tmpfs-size SIZE  how large each of them is
    --overlay-state PATH  PATH is an overlay, while `/` is what it was
    --bind FROM:TO     FROM is bound on TO
    --autofs PATH      an automount point nobody serves; "triggered" on stderr if something asked it to mount
    --no-fuse          /dev without /dev/fuse
    --node NAME        with --no-fuse: another name of /dev/zero in /dev
    --plant PATH       another file system at PATH, with a file named ew-secret in it
    --deny NAME,…      a system-call filter that answers EPERM, as an outer container has
    --mask-proc        a part of /proc is covered, as in most containers
    --uid N            give up root

Run by tests in a process of its own; everything it mounts is in a mount namespace that ends with the command.
"""

import argparse
import ctypes
import errno
import os
import struct
import sys

from elsewhere.linux import seccomp
from elsewhere.linux import syscalls as sys_

NUMBERS = {"unshare": 272, "mount": 165, "fsopen": 430, "open_tree": 428, "landlock_create_ruleset": 444, "mount_setattr": 442}


def overlay_root(place: str, depth: int) -> None:
    sys_.mount("stage", place, "tmpfs", 0, "mode=755")
    lower = "/"
    for number in range(depth):
        for name in ("upper", "work", "root"):
            os.makedirs(f"{place}/{number}/{name}")
        options = f"lowerdir={lower},upperdir={place}/{number}/upper,workdir={place}/{number}/work"
        sys_.mount("overlay", f"{place}/{number}/root", "overlay", 0, options)
        lower = f"{place}/{number}/root"
    root = lower
    for name in ("proc", "sys"):
        sys_.mount(f"/{name}", f"{root}/{name}", None, sys_.MS_BIND | sys_.MS_REC)
    devices(f"{root}/dev")
    os.chdir(root)
    sys_.pivot_root(".", ".")
    sys_.umount2(".", sys_.MNT_DETACH)
    os.chdir("/")


def overlay_at(place: str, target: str, uid: int) -> None:
    sys_.mount("stage", place, "tmpfs", 0, "mode=755")
    for name in ("upper", "work"):
        os.makedirs(f"{place}/{name}", mode=0o700)
        os.chown(f"{place}/{name}", uid, uid)
    sys_.mount("overlay", target, "overlay", 0, f"lowerdir={target},upperdir={place}/upper,workdir={place}/work")


def watch_autofs(place: str) -> None:
    """Fork: the child becomes the host, the parent is the automounter that waits to be asked and then says so."""
    reader, writer = os.pipe()
    os.setpgid(0, 0)
    options = f"fd={writer},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
    sys_.mount("test", place, "autofs", 0, options)
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setpgid(0, 0)
        return
    os.set_blocking(reader, False)
    _, status = os.waitpid(pid, 0)
    try:
        if os.read(reader, 1):
            os.write(2, b"triggered\n")
    except BlockingIOError:
        pass
    os._exit(os.waitstatus_to_exitcode(status))


def devices(place: str) -> None:
    sys_.mount("dev", place, "tmpfs", 0, "mode=755")
    nodes = {
        "null": (1, 3),
        "zero": (1, 5),
        "full": (1, 7),
        "random": (1, 8),
        "urandom": (1, 9),
        "tty": (5, 0),
        "fuse": (10, 229),
    }
    for name, (major, minor) in nodes.items():
        os.mknod(f"{place}/{name}", 0o20666, os.makedev(major, minor))
        os.chmod(f"{place}/{name}", 0o666)
    for name in ("pts", "shm"):
        os.mkdir(f"{place}/{name}")
    sys_.mount("devpts", f"{place}/pts", "devpts", 0, "newinstance,ptmxmode=0666")
    sys_.mount("shm", f"{place}/shm", "tmpfs", 0, "mode=1777")


def deny(names: list[str]) -> None:
    load, equal, give = 0x20, 0x15, 0x06
    code = [struct.pack("HBBI", load, 0, 0, 0)]
    for name in names:
        code += [struct.pack("HBBI", equal, 0, 1, NUMBERS[name]), struct.pack("HBBI", give, 0, 0, 0x00050000 | errno.EPERM)]
    code.append(struct.pack("HBBI", give, 0, 0, 0x7FFF0000))
    seccomp.install(b"".join(code))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--overlay-root", type=int, default=0)
    parser.add_argument("--stage", default="/mnt")
    parser.add_argument("--tmpfs", action="append", default=[])
    parser.add_argument("--tmpfs-size", default="1g")
    parser.add_argument("--overlay-state")
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--autofs")
    parser.add_argument("--plant", action="append", default=[])
    parser.add_argument("--node", action="append", default=[])
    parser.add_argument("--no-fuse", action="store_true")
    parser.add_argument("--mask-proc", action="store_true")
    parser.add_argument("--deny", default="")
    parser.add_argument("--uid", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    here = os.getcwd()
    if os.geteuid() == 0:
        sys_.unshare(sys_.CLONE_NEWNS)
        sys_.mount(None, "/", None, sys_.MS_REC | sys_.MS_PRIVATE)
        if asked.overlay_root:
            overlay_root(asked.stage, asked.overlay_root)
        elif asked.no_fuse:
            devices("/dev")
        for path in asked.tmpfs:
            sys_.mount("tmpfs", path, "tmpfs", 0, f"mode=700,uid={asked.uid},gid={asked.uid},size={asked.tmpfs_size}")
        for path in asked.plant:
            sys_.mount("tmpfs", path, "tmpfs", 0, "mode=755,size=64k")
            with open(f"{path}/ew-secret", "w") as stream:
                stream.write("what-nobody-inside-may-know")
        for pair in asked.bind:
            source, _, target = pair.partition(":")
            sys_.mount(source, target, None, sys_.MS_BIND)
        if asked.autofs:
            watch_autofs(asked.autofs)
        if asked.overlay_state:
            overlay_at(asked.stage, asked.overlay_state, asked.uid)
        if asked.no_fuse:
            os.unlink("/dev/fuse")
            for name in asked.node:
                os.mknod(f"/dev/{name}", 0o20666, os.makedev(1, 5))
                os.chmod(f"/dev/{name}", 0o666)
        if asked.mask_proc:
            sys_.mount("tmpfs", "/proc/acpi" if os.path.isdir("/proc/acpi") else "/proc/sys", "tmpfs", sys_.MS_RDONLY, "")
        if asked.uid:
            os.setgroups([])
            os.setresgid(asked.uid, asked.uid, asked.uid)
            os.setresuid(asked.uid, asked.uid, asked.uid)
            # A change of ids takes away what proc lets us see of ourselves; an ordinary login does not have that problem.
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    os.chdir(here)
    if asked.deny:
        deny(asked.deny.split(","))
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
