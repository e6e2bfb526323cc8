"""Making a sandbox, in the launcher: its directory, its record, its keeper; and what becomes of one whose owner died.

The directory is filled before its record says `running`; whoever finds one without a record, or with one whose keeper is gone,
knows what happened.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

from elsewhere import __version__
from elsewhere.clock import wall
from elsewhere.errors import Broken, ElsewhereError, NotFound, UsageError
from elsewhere.linux import capabilities, seccomp
from elsewhere.sandbox import identity, mechanisms, record, rungs, seeds
from elsewhere.sandbox.builder import BuildFailed
from elsewhere.sandbox.mechanisms import Raised
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.record import Record
from elsewhere.sandbox.rungs import Mechanism
from elsewhere.sandbox.stock import Stock
from elsewhere.sandbox.view import Host
from elsewhere.storage import trash
from elsewhere.storage.state import State, write_aside

__all__ = ["Climber", "Made", "Request", "abandon", "create", "recover"]


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for. `abandoned` says what becomes of the sandbox if the caller dies: `discard`, or `keep` if it wrote
    anything."""

    project: str
    git: str | None
    head: str | None
    home: str
    base: str
    story: str
    abandoned: str


@dataclass(slots=True)
class Made:
    record: Record
    raised: Raised


class Climber:
    """Which rung stood last time for a project, and why the stronger ones did not."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Mechanism, list[tuple[str, str]]]] = {}
        self._host: tuple[str, Host] | None = None

    def forget(self) -> None:
        self._found.clear()
        self._host = None

    def host(self, home: str, state: str) -> Host:
        if self._host is None or self._host[0] != home:
            self._host = (home, Host.look(home, state))
        return self._host[1]

    def climb(self, project: str, attempt: Callable[[Mechanism], Raised]) -> tuple[Raised, list[tuple[str, str]]]:
        """The first rung that stands, tried for real; the one that stood last time first."""
        known, reasons = self._found.get(project, (None, []))
        ladder = rungs.ladder()
        reasons = list(reasons)
        for mechanism in ladder[ladder.index(known) if known else 0 :]:
            try:
                raised = attempt(mechanism)
            except BuildFailed as failure:
                if failure.accident:
                    raise Broken("builder_failed", f"the sandbox could not be made: {failure}", hint="try again") from failure
                reasons.append((mechanism.name, str(failure)))
                continue
            self._found[project] = (mechanism, reasons)
            return raised, reasons
        raise mechanisms.unavailable(reasons)


def create(state: State, request: Request, climber: Climber, stock: Stock) -> Made:
    if request.base != "live":
        raise UsageError("bad_base", f"the base {request.base!r} is not known", hint="use live")
    who = identity.derive(os.path.basename(request.project), request.story, None, request.head)
    host = climber.host(request.home, state.path)
    project = Project(request.project, request.git, request.head)
    raised, reasons = climber.climb(request.project, lambda rung: stock.raise_sandbox(rung, host, project))
    now = wall()
    made = Record(
        id=who.sandbox_id,
        state="running",
        project=request.project,
        base={"kind": "live", "head": request.head, "at": now},
        created_at=now,
        mechanism=raised.mechanism.name,
        identity=asdict(who),
        enforced=_enforced(raised, reasons),
        layers=[{"at": layer.at, "lower": layer.lower, "number": layer.number} for layer in raised.view.layers],
        plan=[list(step) for step in raised.view.description],
        version=__version__,
    )
    try:
        write_aside(os.path.join(raised.directory, ".sandbox.env"), identity.env_file(who.variables()))
        record.save(made, raised.directory)
        os.rename(raised.directory, state.sandbox(made.id))
    except OSError:
        raised.discard()
        trash.discard(raised.directory, state.room("trash"))
        raise
    if raised.mechanism.copy:
        raised.project_path = os.path.join(state.sandbox(made.id), "copy")
    return Made(made, raised)


def _enforced(raised: Raised, reasons: list[tuple[str, str]]) -> dict[str, object]:
    """Which mechanism enforces what, and what is not enforced at all."""
    rung = raised.mechanism
    if rung.copy:
        files = f"a {raised.copied} of the project; everything else read-only by Landlock, but for modes and times of own files"
    elif rung.whole_machine:
        files = "the whole machine, copy on write"
    else:
        files = "home and project, copy on write; everything else read-only"
    return {
        "mechanism": rung.name,
        "files": files,
        "layers": f"in memory, at most {rung.memory} bytes" if rung.memory else "on disk",
        "processes": "descendants of the keeper" if rung.copy else "own process namespace",
        "user": "own user namespace" if not rung.copy else "the caller's",
        "network": "host",
        "capabilities": list(capabilities.KEPT) if os.geteuid() == 0 and not rung.copy else [],
        "no_new_privileges": True,
        "system_calls": f"{len(seccomp.DENIED)} denied",
        "hidden": list(raised.view.hidden),
        "read_only_instead": raised.weaker,
        "not_copied": raised.not_copied,
        "limits": ["timeout"],
        "stronger_rungs": [{"mechanism": name, "reason": reason} for name, reason in reasons],
        "differs": _differs(rung),
    }


def _differs(rung: Mechanism) -> list[str]:
    """How far the copy is from the original, so that nobody trusts a result too far."""
    said = ["services of the host are not part of the sandbox", "the kernel is the host's"]
    if rung.copy:
        return [
            *said,
            "the project is at another path",
            "/tmp is the host's and read-only; TMPDIR points to a private one",
        ]
    said += ["/run, /tmp, /dev/shm are fresh", "a file that reality changes later may show inside (live base)"]
    if not rung.whole_machine:
        said += ["/usr and /etc cannot be written", "directories that exist in reality cannot be renamed in place"]
    return said


def abandon(state: State, sandbox_id: str, wish: str) -> None:
    """The owner died. What nobody asked to keep, or what is empty, goes; anything else stays and says that it was lost."""
    if wish == "keep":
        try:
            found = record.load(state, sandbox_id)
            wrote = _wrote_anything(state, found)
        except NotFound:
            return
        except (ElsewhereError, OSError):
            return  # what cannot be read is not what was not written; the old record reads as lost
        if wrote:
            found.state, found.lost, found.ended_at = "stopped", True, wall()
            with contextlib.suppress(OSError):  # a full disk: the old record reads as lost, too
                record.save(found, state.sandbox(sandbox_id))
            return
    trash.discard(state.sandbox(sandbox_id), state.room("trash"))


def _wrote_anything(state: State, found: Record) -> bool:
    """Whether a layer holds more than what it started with."""
    if rungs.named(found.mechanism).copy:
        return True
    seeded = {os.path.basename(path) for path in seeds.ACCOUNTS}
    for layer in found.layers:
        upper = f"{state.sandbox(found.id)}/upper/{layer['number']}"
        names = set(os.listdir(upper))
        etc = os.path.relpath("/etc", layer["at"])
        if etc == "." and names <= seeded:
            continue
        if names - {etc} or (names and not set(os.listdir(os.path.join(upper, etc))) <= seeded):
            return True
    return False


def recover(state: State) -> None:
    """After a launcher died: what it had in stock goes, unless another launcher holds it."""
    with os.scandir(state.room("spare")) as entries:
        for entry in entries:
            maker = entry.name.partition("-")[0]
            if not record.is_held(entry.path) and not _is_running(maker):
                trash.discard(entry.path, state.room("trash"))


def _is_running(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
