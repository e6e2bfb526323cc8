"""How a process becomes a keeper: it takes what it still needs, then gives everything up, for good. With namespaces of its own,
as a builder's child (`builder.py`); without any, held by Landlock alone."""

import os
import signal
import socket
from typing import Any, NoReturn

from elsewhere.limits import DEFAULTS
from elsewhere.linux import capabilities, cgroups, landlock, seccomp
from elsewhere.linux import syscalls as sys_
from elsewhere.linux.gauges import Gauges
from elsewhere.sandbox.ids import FIRST_ID, ID_COUNT
from elsewhere.sandbox.keeping import processes, wire
from elsewhere.sandbox.keeping.keeper import Keeper, seal_imports
from elsewhere.sandbox.launching.blanks import PATIENCE_S, BuildFailed, Groups, ask
from elsewhere.sandbox.launching.forking import leave_the_launcher

__all__ = ["Filters", "become_keeper", "filters", "join_group", "landlocked", "receive", "share_counters"]

_INOTIFY_SHARE = 2  # of its user's watches, a sandbox without an id of its own may have one part in so many

Filters = tuple[bytes, bytes]


def filters(*, nested: bool = False, unix_sockets: bool = True) -> Filters:
    """The filter that only refuses, and the one that also tells what it refused, for kernels that can."""
    plain = seccomp.program(unix_sockets=unix_sockets, nested=nested)
    return plain, seccomp.program(unix_sockets=unix_sockets, nested=nested, notify=True)


def join_group(groups: Groups) -> tuple[dict[str, Any], Gauges | None]:
    """Make a group, with the built-in limits, and go there: what we start is born in it. Without one, why there is none."""
    host = groups.host
    if not host.version:
        return {"group": None, "ungrouped": host.missing}, None
    group = None
    try:
        group = cgroups.make(host, groups.name)
        known = {name: _number(getattr(DEFAULTS, name)) for name in ("memory", "pids") if name in host.bases}
        cgroups.limit(group, **known)
        cgroups.enter(group)
        gauges = Gauges(group)
    except OSError as error:
        if group is not None:
            cgroups.remove(group, 0)
        return {"group": None, "ungrouped": dict.fromkeys(cgroups.CONTROLLERS, f"no group could be made: {error}")}, None
    return {"group": [group.version, group.directories], "ungrouped": host.missing}, gauges


def _number(value: str | int | None) -> int:
    assert isinstance(value, int)
    return value


def share_counters() -> None:
    """Watches are counted for a user, in all of their namespaces together: one sandbox must not take them all."""
    for name in ("max_inotify_instances", "max_inotify_watches"):
        try:
            with open(f"/proc/sys/user/{name}", "r+", encoding="ascii") as setting:
                most = int(setting.read())
                with open(f"/proc/sys/fs/inotify/{name.replace('inotify_', 'user_')}", encoding="ascii") as users:
                    most = min(most, int(users.read()))
                setting.seek(0)
                setting.write(str(max(1, most // _INOTIFY_SHARE)))
        except (OSError, ValueError):
            continue  # a kernel without that counter has nothing to share


def become_keeper(
    control: socket.socket,
    builder_end: socket.socket,
    whole_machine: bool,
    programs: Filters,
    groups: Groups,
    ports: dict[str, socket.socket],
) -> NoReturn:
    """Take what is still needed, then give everything up; from the filter on, only serve."""
    step = "group"
    try:
        group, gauges = join_group(groups)
        sys_.unshare(sys_.CLONE_NEWCGROUP)  # now: its root is the group that we are in
        step = "proc"
        proc = sys_.fsopen("proc")
        sys_.fsconfig_create(proc)
        proc_mount = sys_.fsmount(proc, sys_.MOUNT_ATTR_NOSUID | sys_.MOUNT_ATTR_NODEV | sys_.MOUNT_ATTR_NOEXEC)
        os.close(proc)
        if whole_machine:
            step = "user namespace"
            # Counters (inotify, for one) are kept for whoever creates a user namespace: under an id of its own, each sandbox has
            # its own budget. The id lies outside of what sandboxes map.
            os.seteuid(FIRST_ID + ID_COUNT + int.from_bytes(os.urandom(4), "big") % (1 << 20))
            capabilities.regain()
            sys_.unshare(sys_.CLONE_NEWUSER)
            wire.send(builder_end, "unshared")
            receive(builder_end)
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        step = "capabilities"
        keeper = Keeper(control, alone=True, gauges=gauges, ports=ports)
        capabilities.give_up_all_but(capabilities.KEPT if os.getuid() == 0 else ())
        sys_.prctl(sys_.PR_SET_DUMPABLE, 0)
        # An ordinary user's keeper does it once its root stands, together with what is about files: one after the other, the two
        # would forbid to move anything.
        scoped = landlock.scope() if whole_machine else landlock.can_scope()
        facts = _seal(keeper, programs, scoped=scoped)
        wire.send(builder_end, ("sealed", {**facts, **group}), [proc_mount])
        os.close(proc_mount)
        builder_end.close()
    except BaseException as error:
        number = getattr(error, "errno", None) or 0
        wire.send(builder_end, ("failed", step, number, getattr(error, "strerror", None) or str(error)))
        os._exit(1)
    keeper.serve()


def _seal(keeper: Keeper, programs: Filters, *, scoped: bool) -> dict[str, Any]:
    """For good: the filter. What became of it is told."""
    _quiet_signals()
    sys_.prctl(sys_.PR_SET_NO_NEW_PRIVS, 1)
    listener = seccomp.install_best(*programs)
    if listener >= 0:
        keeper.hear_of_refusals(listener)
    seal_imports()
    return {"scoped": scoped, "told": listener >= 0}


def landlocked(rules: list[tuple[str, int]], groups: Groups, *, nested: bool) -> tuple[int, int, socket.socket, dict[str, Any]]:
    """A keeper without namespaces, held by Landlock and the filter alone: its pid, that of its guardian, its control socket, and
    how it was sealed.

    The guardian stays outside of Landlock, where a command cannot reach it, and ends what is left when the keeper is gone: no
    kernel does that without a process namespace."""
    control, keeper_end = wire.pair()
    ours, theirs = wire.pair()
    ours.settimeout(PATIENCE_S)
    guardian = os.fork()
    if guardian == 0:
        try:
            leave_the_launcher([keeper_end.fileno(), theirs.fileno()])
            os.setsid()
            sys_.prctl(sys_.PR_SET_CHILD_SUBREAPER, 1)
            keeper = os.fork()
            if keeper == 0:
                _landlocked_keeper(keeper_end, theirs, rules, filters(nested=nested, unix_sockets=False), groups)
            keeper_end.close()
            theirs.close()
            os.waitpid(keeper, 0)
            while mine := processes.descendants(os.getpid()):
                for pid in mine:
                    processes.kill_quietly(pid, signal.SIGKILL)
                processes.reap_all()
        finally:
            os._exit(0)
    keeper_end.close()
    theirs.close()
    with ours:
        message, _ = ask(ours)
    if message[0] != "sealed":
        control.close()
        raise BuildFailed(*message[1:])
    return message[1], guardian, control, message[2]


def _landlocked_keeper(
    control: socket.socket,
    starter: socket.socket,
    rules: list[tuple[str, int]],
    programs: Filters,
    groups: Groups,
) -> NoReturn:
    step = "landlock"
    try:
        group, gauges = join_group(groups)
        sys_.prctl(sys_.PR_SET_CHILD_SUBREAPER, 1)
        pid = os.getpid()
        keeper = Keeper(control, alone=False, gauges=gauges)
        landlock.restrict(rules)
        if os.getuid() == 0:
            capabilities.give_up_all_but(())
        sys_.prctl(sys_.PR_SET_DUMPABLE, 0)
        step = "filter"
        facts = _seal(keeper, programs, scoped=landlock.can_scope())
        wire.send(starter, ("sealed", pid, {**facts, **group}))
        starter.close()
    except BaseException as error:
        wire.send(starter, ("failed", step, getattr(error, "errno", None) or 0, getattr(error, "strerror", None) or str(error)))
        os._exit(1)
    keeper.serve()


def _quiet_signals() -> None:
    """Pid 1 is immune to signals from inside only where it leaves them at their default; Python handles INT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    try:
        return wire.receive(sock)
    except EOFError:
        raise OSError(0, "the other process ended without a word") from None
