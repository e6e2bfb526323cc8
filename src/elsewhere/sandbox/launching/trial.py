"""Trying one rung of the ladder from end to end: a sandbox is made by it, a command runs in it, everything is taken down again.

For `doctor`, which must be right about each rung; in a child process of its own (see `linux/probe.py`), since it forks.
"""

import contextlib
import os
import signal

from elsewhere.linux import cgroups, syscalls
from elsewhere.sandbox import standing
from elsewhere.sandbox.confinement import Confinement
from elsewhere.sandbox.keeping import commands
from elsewhere.sandbox.keeping.spec import Spec
from elsewhere.sandbox.launching import builder, mechanisms
from elsewhere.sandbox.launching.blanks import Blank, Kind
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.rungs import Mechanism
from elsewhere.sandbox.view import Host, Subject
from elsewhere.storage import trash
from elsewhere.storage.state import State

__all__ = ["try_rung"]


def try_rung(mechanism: Mechanism, state: State, project: Project, home: str) -> str:
    """What was enforced, in a few words; raises what the rung raised."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    directory = os.path.join(state.room("spare"), f"{os.getpid()}-trial")
    os.mkdir(directory, 0o755 if os.geteuid() == 0 else 0o700)

    def take(kind: Kind) -> Blank:
        return builder.blank(standing.mounts(whole_machine=kind.whole_machine), state.path, kind, groups=mechanisms.groups(state))

    raised = None
    try:
        confined = Confinement(network="host" if mechanism.copy else "allow")  # without namespaces there is no other
        subject = Subject(Host.look(home, state.path), project, confinement=confined)
        raised = mechanisms.raise_sandbox(mechanism, subject, state, directory, take)
        with raised.control:
            spec = Spec(["true"], {"PATH": os.defpath}, raised.project_path, ends_sandbox=True)
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            outcome = commands.attached(raised.control, spec, (null, null, null))
        if outcome.exit_code:
            raise OSError(0, f"true ended with {outcome.exit_code} in it")
        return _words(mechanism)
    finally:
        _reap()
        if raised is not None and raised.group is not None:
            cgroups.remove(raised.group)
        trash.remove_tree(directory)


def _words(mechanism: Mechanism) -> str:
    if mechanism.copy:
        return "a copy of the project, the rest read-only; only with --network host"
    files = "the whole machine" if mechanism.whole_machine else "home and project"
    return f"{files}, copy on write" + (f", at most {mechanism.memory >> 20} MiB in memory" if mechanism.memory else "")


def _reap() -> None:
    """Everything that the trial started ends with it."""
    signal.alarm(2)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    signal.alarm(0)
