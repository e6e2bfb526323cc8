"""What a sandbox may see, do and use up: settings and options become a confinement and limits, checked against reality."""

import glob
import os
import stat
from collections.abc import Mapping

from elsewhere.errors import Refused, Unavailable, UsageError
from elsewhere.limits import DEFAULTS, LIVING
from elsewhere.linux import mountinfo
from elsewhere.meeting import home_directory
from elsewhere.operations import profiling, reach, settings
from elsewhere.operations.settings import Resolved
from elsewhere.paths import is_within
from elsewhere.sandbox.confinement import Confinement, Share
from elsewhere.settings import check_backend, from_given
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Confined", "confine"]

_ONLY_LIVING = ("ttl", "idle")
_TOOLCHAIN_VARIABLES = (
    "VIRTUAL_ENV",
    "NVM_DIR",
    "JAVA_HOME",
    "RUSTUP_HOME",
    "PYENV_ROOT",
    "CONDA_PREFIX",
)
# Beside what is needed of these lie credentials, or anybody's sources.
_PARTS_OF_TOOLCHAINS = {"CARGO_HOME": ("bin", "registry", "git"), "GOPATH": ("bin", "pkg")}
_CARGO_CREDENTIALS = ("credentials", "credentials.toml")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt")
_GPU = (
    "/dev/nvidia[0-9]*",
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
    "/dev/nvidia-caps/*",
)


@dataclass(frozen=True, slots=True)
class Confined:
    """`reach` is what of the network it may use (`reach.py`); `binding`: the limits that were asked for, without which there is
    to be no sandbox; `absent`: what was to be hidden by whoever asks just now, and is not there: a misspelt name, most likely."""

    confinement: Confinement
    reach: dict[str, list[str]]
    limits: dict[str, float]
    binding: list[str]
    settings: Resolved
    absent: tuple[str, ...] = ()

    def remark(self) -> str:
        """For whoever asks; empty if all that was to be hidden is there."""
        return f"--hide: there is no {', '.join(map(repr, self.absent))}, so nothing is hidden there" if self.absent else ""


def confine(
    state: State,
    project: str,
    given: Mapping[str, object],
    *,
    lives: bool,
    environment: Mapping[str, str] | None = None,
) -> Confined:
    """`given` is what the command line or the program said, by the names of the settings."""
    environment = os.environ if environment is None else environment
    resolved = settings.resolve(state, project, given, environment)
    check_backend(resolved["sandbox.backend"])
    view = resolved["sandbox.view"]
    devices = [_device(path) for path in resolved["sandbox.device"]]
    if resolved["sandbox.gpu"]:
        devices += _gpu_nodes()
    needs = profiling.needs(resolved["sandbox.profile"], state, environment)
    shares = [_share(text, state, project) for text in resolved["sandbox.share"]]
    confinement = Confinement(
        view=view,
        network=resolved["sandbox.network"],
        nested=resolved["sandbox.nested"],
        hide=tuple(sorted({*(_hidden(path, project) for path in resolved["sandbox.hide"]), *_credentials(environment)})),
        shares=needs.shares_besides(shares),
        copies=needs.copies,
        links=needs.links,
        variables=needs.variables,
        profiles=resolved["sandbox.profile"],
        devices=tuple(sorted(set(devices))),
        toolchains=tuple(sorted({*_toolchains(environment), *needs.programs})) if view == "project" else (),
    )
    limits, binding = _limits(resolved, lives=lives)
    network = reach.of_settings(resolved, needs.allow, confinement.writable)
    asked = from_given({"sandbox.hide": given.get("sandbox.hide")}).get("sandbox.hide", ())
    return Confined(confinement, network, limits, binding, resolved, tuple(path for path in asked if not os.path.exists(path)))


def _limits(resolved: Resolved, *, lives: bool) -> tuple[dict[str, float], list[str]]:
    """The built-in ones, and the tight ones of untrusted work, are best effort; what somebody asked for by itself binds, unless
    they said that it need not."""
    asked = resolved.asked_limits()
    wanted = {**(LIVING if lives else DEFAULTS).given(), **resolved.tight_limits(), **asked}
    binding = [] if resolved["sandbox.best_effort"] else list(asked)
    unwanted = () if lives else _ONLY_LIVING
    return (
        {name: value for name, value in wanted.items() if name not in unwanted},
        [name for name in binding if name not in unwanted],
    )


# -- hiding ----------------------------------------------------------------------------------------------------------------------


def _hidden(path: str, project: str) -> str:
    if reason := settings.cannot_be_hidden(path, project):
        raise Refused("hide_refused", f"--hide {path!r}: {reason}", hint="name what is secret in it")
    return os.path.realpath(path)


def _credentials(environment: Mapping[str, str]) -> list[str]:
    """Of a program that was told to keep them in another place than the usual one, which is hidden anyway."""
    place = os.path.realpath(environment.get("CARGO_HOME", "") or "/")
    if place == os.path.join(os.path.realpath(home_directory()), ".cargo"):
        return []
    paths = [os.path.realpath(os.path.join(place, name)) for name in _CARGO_CREDENTIALS] if place != "/" else []
    return [path for path in paths if os.path.lexists(path)]


# -- shares and devices ---------------------------------------------------------------------------------------------------------


def _share(text: str, state: State, project: str) -> Share:
    path, colon, mode = text.rpartition(":")
    if not colon or mode not in ("rw", "ro"):
        path, mode = text, "ro"
    place = os.path.realpath(path)
    if not os.path.lexists(place):
        raise UsageError(
            "share_missing", f"--share {text!r}: there is no {place!r}", hint="name a file or directory that is there"
        )
    kind = os.stat(place).st_mode
    if stat.S_ISSOCK(kind) or stat.S_ISFIFO(kind):
        engine = os.path.basename(place) in reach.ENGINE_SOCKETS
        raise Refused(
            "share_refused",
            f"--share {text!r}: {'the socket of a container engine' if engine else 'a socket or fifo'} leads out of the sandbox",
            hint="whoever can talk to the engine is root on the host: run its commands outside"
            if engine
            else "share files; a service of the host is not part of a sandbox",
        )
    if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
        raise Refused("share_refused", f"--share {text!r} is a device", hint=f"--device {place}")
    own = any(is_within(place, top) for top in ("/proc", "/sys", "/dev"))
    if own or mountinfo.containing(place, mountinfo.read()).kernels_own:
        raise Refused(
            "share_refused",
            f"--share {text!r}: the kernel's own files lie there, and the sandbox has its own",
            hint="leave it out; --device shows one device",
        )
    home = os.path.realpath(home_directory())
    if is_within(home, place) or place in ("/", "/home", "/root") or _is_a_home(place):
        raise Refused(
            "share_refused",
            f"--share {text!r}: a whole home directory, or what contains one, is never shared",
            hint="name the directory in it that is needed",
        )
    directory, name = os.path.split(os.path.abspath(path))
    ways = (os.path.join(directory, name), os.path.join(os.path.realpath(directory), name))
    if any(is_within(way, project) for way in ways) and not is_within(place, project):
        raise Refused(
            "share_refused",
            f"--share {text!r} leads out of the project by a link, to {place!r}",
            hint=f"if you mean it: --share {place}",
        )
    if is_within(place, state.path) or is_within(state.path, place):
        raise Refused("share_refused", f"--share {text!r}: elsewhere's own state lies there", hint="name another directory")
    return Share(place, mode == "rw")


def _is_a_home(place: str) -> bool:
    return os.path.dirname(place) == "/home"


def _device(path: str) -> str:
    place = os.path.realpath(path)
    try:
        kind = os.stat(place).st_mode
    except OSError as error:
        raise UsageError(
            "device_missing", f"--device {path!r}: {error.strerror}", hint="ls -l /dev shows what is there"
        ) from error
    if not is_within(place, "/dev") or not (stat.S_ISCHR(kind) or stat.S_ISBLK(kind)):
        raise UsageError("bad_device", f"--device {path!r} is not a device below /dev", hint="name a node such as /dev/kvm")
    return place


def _gpu_nodes() -> list[str]:
    found = [path for pattern in _GPU for path in glob.glob(pattern)]
    if not found:
        raise Unavailable(
            "no_gpu", "there is no NVIDIA device on this host (/dev/nvidia0)", hint="leave --gpu out, or load the driver"
        )
    return found


def _toolchains(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Directories that the caller's programs come from, besides the system's."""
    named = [*environment.get("PATH", "").split(":"), *(environment.get(name, "") for name in _TOOLCHAIN_VARIABLES)]
    for variable, parts in _PARTS_OF_TOOLCHAINS.items():
        named += [os.path.join(place, part) for place in environment.get(variable, "").split(":") if place for part in parts]
    home = os.path.realpath(home_directory())
    found = set()
    for path in named:
        if path.startswith("/") and os.path.isdir(path):
            place = os.path.realpath(path)
            usual = any(is_within(place, system) for system in _SYSTEM)
            if not usual and not is_within(home, place):
                found.add(place)
    return tuple(sorted(found))
