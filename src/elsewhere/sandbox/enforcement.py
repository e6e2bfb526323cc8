"""Which limit is held by what on this host, decided when a sandbox stands; and what is refused because nothing holds it.

    limit        held by                                      without that
    memory       a group of the kernel's (cgroup v1 or v2)    a watchdog, which is none
    cpus         a group                                      nothing
    pids         a group; else RLIMIT_NPROC in a user         nothing
                 namespace of an ordinary user's own
    disk         an image of that size; layers in memory      a watchdog, which is none
    open_files   RLIMIT_NOFILE                                -
    timeout      the keeper                                   -
    ttl, idle    the keeper                                   -

A watchdog sees what was used up a moment ago and ends it: it helps, and is not counted as holding anything. Not here: how a limit
is set (`launching/creation.py`) and how the keeper counts (`keeping/watch.py`).
"""

from collections.abc import Iterable, Mapping

from elsewhere import units
from elsewhere.errors import Unavailable
from elsewhere.sandbox.rungs import Mechanism
from elsewhere.values import dataclass

__all__ = ["RLIMIT", "WATCHED", "Facts", "Hold", "amount", "check", "hold"]

RLIMIT, WATCHED = "rlimit", "not enforced, watched"
_CONTROLLERS = {"memory": "memory", "pids": "pids", "cpus": "cpu"}
_SIZES = ("memory", "disk")
_TIMES = ("timeout", "ttl", "idle")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a sandbox that stands has: the version of its group (0: none), why a controller is missing, and what keeps its layers
    from growing (empty: `no_disk` says why not). `ordinary`: whoever runs it is not the host's root."""

    rung: Mechanism
    group: int
    missing: Mapping[str, str]
    ordinary: bool
    disk: str
    no_disk: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Who holds a limit, in words; `holds`: whether that is more than a good intention."""

    words: str
    holds: bool = True


def hold(limits: Iterable[str], facts: Facts) -> dict[str, Hold]:
    return {name: _hold(name, facts) for name in limits}


def _hold(name: str, facts: Facts) -> Hold:
    if name in _TIMES:
        return Hold("keeper")
    if name == "open_files":
        return Hold(RLIMIT)
    if name == "disk":
        return Hold(facts.disk) if facts.disk else _watched(facts.no_disk)
    controller = _CONTROLLERS[name]
    if facts.group and controller not in facts.missing:
        return Hold(f"cgroup-v{facts.group}")
    why = facts.missing.get(controller, "there is no cgroup for it")
    if name == "memory":
        return _watched(why)
    if name == "pids" and facts.ordinary and not facts.rung.copy:
        return Hold(f"{RLIMIT}, in the sandbox's own user namespace")
    return Hold(f"not enforced: {why}", holds=False)


def _watched(why: str) -> Hold:
    return Hold(f"{WATCHED}: {why}", holds=False)


def check(limits: Mapping[str, float], holds: Mapping[str, Hold], binding: Iterable[str]) -> None:
    """What was asked for binds."""
    loose = [name for name in binding if name in holds and not holds[name].holds]
    if not loose:
        return
    said = "; ".join(f"{name} {amount(name, limits[name])}: {holds[name].words}" for name in loose)
    raise Unavailable(
        "limit_not_enforceable",
        f"this host cannot hold the sandbox to what was asked for ({said})",
        hint="--best-effort runs without it and says so; elsewhere doctor tells what is missing",
        detail={"limits": {name: holds[name].words for name in loose}},
    )


def amount(name: str, value: float) -> str:
    """A limit's value, in words."""
    return units.format_size(int(value)) if name in _SIZES else f"{value:g}"
