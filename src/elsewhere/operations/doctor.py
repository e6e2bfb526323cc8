"""`doctor`: what this machine can do, tried for real; what each missing thing costs, and the exact fix.

Every check is bounded to three seconds. Unhealthy only when no rung of the ladder works.
"""

import importlib.util
import os
import shutil
import tempfile
from typing import Any

from elsewhere.errors import ElsewhereError
from elsewhere.linux import cgroups, mountinfo, probe
from elsewhere.meeting import default_state, home_directory
from elsewhere.operations.projects import find_project
from elsewhere.sandbox import project, rungs
from elsewhere.sandbox.launching import trial
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.rungs import Mechanism
from elsewhere.storage import images
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Check", "document", "examine", "healthy"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: str
    detail: str
    hint: str = ""

    def document(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "detail": self.detail, "hint": self.hint}


def examine() -> list[Check]:
    state, checks = _state()
    return [*checks, *_rungs(state), *_parts(state), *_limits(state), *_backends(), *_surroundings()]


def healthy(checks: list[Check]) -> bool:
    return any(check.status == "ok" for check in checks if check.name.startswith("rung "))


def document(checks: list[Check]) -> dict[str, Any]:
    return {"healthy": healthy(checks), "checks": [check.document() for check in checks]}


def _state() -> tuple[State | None, list[Check]]:
    try:
        state = State.open()
    except ElsewhereError as error:
        return None, [Check("state directory", "missing", error.message, error.hint)]
    below = mountinfo.containing(state.path, mountinfo.read())
    if below.remote:
        return state, [
            Check(
                "state directory",
                "degraded",
                f"{state.path} is on {below.kind}, which cannot hold what a sandbox writes",
                "set ELSEWHERE_HOME to a directory on a local disk",
            )
        ]
    return state, [Check("state directory", "ok", f"{state.path} ({below.kind})")]


# -- rungs -----------------------------------------------------------------------------------------


def _rungs(state: State | None) -> list[Check]:
    """The ladder, from the strongest: the first that is ok is the one in use."""
    if state is None:
        return []
    home = home_directory()
    checks = []
    with tempfile.TemporaryDirectory(prefix="elsewhere-doctor-") as place:
        small = project.find(place, home, chosen=True)
        try:
            here = find_project(None, os.getcwd())
        except (ElsewhereError, OSError):
            here = small
        for mechanism in rungs.ladder():
            checks.append(_rung(mechanism, state, small if mechanism.copy else here, home))
    return checks


def _rung(mechanism: Mechanism, state: State, where: Project, home: str) -> Check:
    tried = probe.attempt(lambda: trial.try_rung(mechanism, state, where, home))
    if tried.ok:
        return Check(f"rung {mechanism.name}", "ok", tried.text)
    return Check(f"rung {mechanism.name}", "missing", tried.text)


# -- parts -----------------------------------------------------------------------------------------


def _parts(state: State | None) -> list[Check]:
    place = state.path if state is not None else os.path.dirname(default_state())
    namespaces = probe.attempt(probe.user_namespace)
    checks = [
        _part(
            "user namespaces",
            namespaces,
            "without them only a copy of the project can be isolated",
            _namespace_hint(namespaces.text),
        ),
        _part(
            "mounts in them",
            probe.attempt(probe.mounts),
            "without them only a copy of the project can be isolated",
            _namespace_hint(""),
        ),
        _part(
            "own proc",
            probe.attempt(probe.proc),
            "no namespace rung works: a container that covers parts of /proc forbids it",
            "docker run --security-opt systempaths=unconfined …",
        ),
        _part(
            "overlay for users",
            probe.attempt(probe.overlay(place)),
            "home and project need fuse-overlayfs or a copy",
            _overlay_hint(),
        ),
    ]
    if os.geteuid() == 0:
        checks.append(
            _part(
                "id-mapped mounts",
                probe.attempt(probe.idmap("/")),
                "root's sandboxes see home and project only, not the whole machine",
                "put / on ext4, xfs or btrfs; a container's own / cannot be mapped",
            )
        )
    checks += [_fuse(), _landlock()]
    checks.append(
        _part(
            "system-call filter",
            probe.attempt(probe.filter_can_be_installed),
            "no rung works without it",
            "allow seccomp(2) in the outer container",
        )
    )
    return checks


def _part(name: str, tried: probe.Attempt, cost: str, hint: str) -> Check:
    return Check(name, "ok", tried.text or "works") if tried.ok else Check(name, "missing", f"{tried.text}: {cost}", hint)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _namespace_hint(said: str) -> str:
    if _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "Ubuntu's AppArmor forbids it: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, "
            "or give this Python a profile with `userns,` in /etc/apparmor.d"
        )
    if _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if _read("/proc/sys/user/max_user_namespaces") == "0" or "space" in said.lower():
        return "sysctl -w user.max_user_namespaces=15000"
    if _in_container():
        options = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        return f"an outer container's filter forbids it: docker run {options} …"
    if _read("/sys/fs/selinux/enforce") == "1":
        return "SELinux may forbid it: setsebool -P user_namespaces_enabled on, or look at ausearch -m avc"
    return "a system-call filter around this process may forbid it (Seccomp in /proc/self/status)"


def _overlay_hint() -> str:
    return "put ELSEWHERE_HOME on ext4, xfs, btrfs or tmpfs, or install fuse-overlayfs; kernels before 5.11 lack it"


def _fuse() -> Check:
    cost = "needed only where the kernel's overlay cannot be used"
    if shutil.which("fuse-overlayfs") is None:
        return Check("fuse-overlayfs", "degraded", f"not installed; {cost}", "apt-get install fuse-overlayfs")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return Check(
            "fuse-overlayfs",
            "degraded",
            f"/dev/fuse cannot be opened; {cost}",
            "modprobe fuse; in a container: --device /dev/fuse",
        )
    return Check("fuse-overlayfs", "ok", "installed")


def _landlock() -> Check:
    tried = probe.attempt(probe.landlock_version)
    if tried.ok:
        return Check("landlock", "ok", f"version {tried.text}")
    return Check(
        "landlock",
        "degraded",
        f"{tried.text}; needed only where there are no namespaces",
        "boot with lsm=landlock,… (kernel 5.13 or later)",
    )


# -- limits and what makes sandboxes -----------------------------------------------------------------


def _limits(state: State | None) -> list[Check]:
    """What holds a limit that somebody asks for; without it, such a sandbox is refused, or watched at best."""
    host = cgroups.look()
    cost = {
        "memory": "--memory is watched at best",
        "pids": "--pids is held by an rlimit, or not at all",
        "cpu": "--cpus is refused",
    }
    checks = []
    for name in cgroups.CONTROLLERS:
        if name in host.bases:
            checks.append(Check(f"limit {name}", "ok", f"cgroup version {host.version}"))
        else:
            checks.append(Check(f"limit {name}", "degraded", f"{host.missing[name]}: {cost[name]}", _group_hint()))
    why = images.available(state.path) if state is not None else "there is no state directory"
    if why is None:
        checks.append(Check("limit disk", "ok", "a file system of its own for each sandbox that asks for it"))
    else:
        checks.append(
            Check("limit disk", "degraded", f"{why}: --disk is watched at best", "run as root, with e2fsprogs installed")
        )
    return [*checks, _network(), _abstract_sockets(), _refused_calls()]


def _group_hint() -> str:
    if os.geteuid() == 0:
        return "in a container: docker run --privileged, or limit the container itself"
    return "a systemd user session gives a user groups of their own (loginctl enable-linger); or run as root"


def _network() -> Check:
    if importlib.util.find_spec("h11") is None:
        return Check("network", "missing", "without h11 there is no proxy: only --network none and host", "pip install h11")
    tried = probe.attempt(probe.network_namespace)
    if not tried.ok:
        return Check("network", "missing", f"{tried.text}: only --network host", _namespace_hint(tried.text))
    if tried.text:
        return Check(
            "network", "degraded", f"{tried.text}: programs that know no proxy reach nothing", "load nf_tables and nft_redir"
        )
    return Check("network", "ok", "rules by host and port, also for programs that know no proxy")


def _abstract_sockets() -> Check:
    tried = probe.attempt(probe.scoping)
    if tried.ok:
        return Check("abstract sockets", "ok", "those of the host cannot be reached")
    return Check(
        "abstract sockets",
        "degraded",
        "those of the host can be reached, as long as the network is the host's",
        "--network none; Linux 6.12 and later close them",
    )


def _refused_calls() -> Check:
    tried = probe.attempt(probe.refusals_are_told)
    if tried.ok:
        return Check("refused calls", "ok", "a refused system call is told by name")
    return Check(
        "refused calls", "degraded", f"{tried.text}: a refused system call is refused without a word", "Linux 5.0 and later"
    )


def _backends() -> list[Check]:
    """Container engines are named, so that nobody wonders; none of them is used."""
    checks = [Check("backend native", "ok", "what makes sandboxes here")]
    for name, program in (
        ("docker", "docker"),
        ("podman", "podman"),
        ("macos-container", "container"),
        ("seatbelt", "sandbox-exec"),
    ):
        found = shutil.which(program)
        there = f"{found} is installed, and not used" if found else f"{program} is not installed, and not needed"
        checks.append(Check(f"backend {name}", "missing", f"not available in this version: {there}", "leave the backend at auto"))
    return checks


# -- surroundings ----------------------------------------------------------------------------------


def _surroundings() -> list[Check]:
    checks = []
    if os.geteuid() == 0:
        checks.append(Check("renaming directories", "ok", "directories of reality can be renamed inside"))
        checks.append(Check("packages", "ok", "package managers work inside"))
    else:
        checks.append(
            Check(
                "renaming directories",
                "degraded",
                "a user's overlay cannot rename a directory that exists in reality (git mv DIR fails; files are fine)",
                "mv copies instead and works; root's sandboxes do not have this limit",
            )
        )
        checks.append(
            Check(
                "packages",
                "degraded",
                "/usr and /etc are read-only for an ordinary user's sandbox",
                "run as root for apt-get inside",
            )
        )
    checks.append(Check("subordinate ids", "ok", "not needed: a user's sandbox has one id, so newuidmap is not used"))
    if "microsoft" in _read("/proc/version").lower():
        where = mountinfo.containing(os.path.realpath(os.getcwd()), mountinfo.read())
        if where.kind in ("9p", "drvfs", "virtiofs"):
            checks.append(
                Check(
                    "WSL2",
                    "degraded",
                    f"this directory is on a Windows drive ({where.target}), slow and without Linux modes",
                    "move the project below your Linux home",
                )
            )
        else:
            checks.append(Check("WSL2", "ok", "a Linux file system"))
    if _in_container():
        checks.append(Check("container", "ok", "this is a container: what it may do is up to the outer one"))
    if _read("/sys/fs/selinux/enforce") == "1":
        checks.append(Check("SELinux", "ok", "enforcing; if a rung above is missing, look at ausearch -m avc"))
    home = home_directory()
    if os.path.isdir(home):
        below = mountinfo.containing(os.path.realpath(home), mountinfo.read())
        if below.remote:
            checks.append(
                Check(
                    "home directory",
                    "degraded",
                    f"{home} is on {below.kind}",
                    "set ELSEWHERE_HOME to a directory on a local disk",
                )
            )
    return checks


def _in_container() -> bool:
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") or "container" in os.environ
