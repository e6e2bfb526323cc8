"""Copy on write by fuse-overlayfs, a program, where the kernel's own overlay cannot be used."""

import os
import signal
import time
from typing import TYPE_CHECKING

from elsewhere.linux import capabilities
from elsewhere.linux import syscalls as sys_
from elsewhere.linux.mounts import Bench
from elsewhere.sandbox.view import Layer
from elsewhere.values import dataclass

__all__ = ["Fuse", "outlive", "start"]

if TYPE_CHECKING:
    import subprocess

    Daemon = subprocess.Popen[bytes]

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Fuse:
    """Copy on write by a program of its own, for each layer of a sandbox directory; it must start outside the sandbox's process
    namespace, where nothing inside can reach it, and so before the rest."""

    program: str
    directory: str
    layers: tuple[Layer, ...]


def start(fuse: Fuse, bench: Bench) -> "list[Daemon]":
    """One fuse-overlayfs for each layer, running when this returns."""
    import subprocess  # what registers itself for forks is a cost to every keeper, and few sandboxes need it

    daemons = []
    for layer in fuse.layers:
        place = bench.scratch_directory()
        flags = os.O_PATH | os.O_DIRECTORY
        lowers = [os.open(place, flags) for place in (*layer.stacked, *layer.frozen, *([layer.lower] if layer.lower else []))]
        parts = {
            "lowerdir": lowers,
            "upperdir": [os.open(f"{fuse.directory}/upper/{layer.number}", flags)],
            "workdir": [os.open(f"{fuse.directory}/work/{layer.number}", flags)],
        }
        options = ",".join(f"{name}={':'.join(f'/proc/self/fd/{fd}' for fd in fds)}" for name, fds in parts.items())
        opened = [fd for fds in parts.values() for fd in fds]
        before = os.stat(place).st_dev
        daemon = subprocess.Popen(
            [fuse.program, "-f", "-o", options, place],
            pass_fds=opened,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=_keep_powers,  # noqa: PLW1509  (the builder has one thread)
        )
        daemons.append(daemon)
        deadline = time.monotonic() + _PATIENCE_S
        while os.stat(place).st_dev == before:
            if daemon.poll() is not None or time.monotonic() > deadline:
                daemon.kill()
                said = (daemon.communicate()[1] or b"").decode(errors="replace").strip().splitlines()
                raise OSError(0, f"{fuse.program} over {layer.at}: {said[-1] if said else 'it did not mount'}")
            time.sleep(0.001)
        for fd in opened:
            os.close(fd)
        bench.handed[layer.at] = sys_.open_tree(sys_.AT_FDCWD, place, sys_.OPEN_TREE_CLONE)
    return daemons


def outlive(keeper: int, daemons: "list[Daemon]") -> None:
    """The programs that serve the sandbox's files hold the mounts that they serve, and so never end by themselves."""
    os.waitpid(keeper, 0)
    for daemon in daemons:
        daemon.kill()
        daemon.wait()


def _keep_powers() -> None:
    """A program that an ordinary user executes loses the capabilities of its user namespace unless they are ambient."""
    sys_.prctl(sys_.PR_SET_PDEATHSIG, signal.SIGKILL)
    capabilities.hand_on()
