"""Making a sandbox, in the launcher: its directory, its record, its keeper; and what becomes of one whose owner died.

The directory is filled before its record says `running`; whoever finds one without a record, or with one whose keeper is gone,
knows what happened.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import asdict, field, replace
from typing import Any

from elsewhere import __version__
from elsewhere.clock import wall
from elsewhere.errors import Broken, ElsewhereError, InUse, NotFound, StateError, Unavailable
from elsewhere.linux import capabilities, seccomp, userns
from elsewhere.sandbox import identity, rungs, seeds
from elsewhere.sandbox.confinement import Confinement
from elsewhere.sandbox.enforcement import Hold
from elsewhere.sandbox.ids import FIRST_ID
from elsewhere.sandbox.keeping import processes, wire
from elsewhere.sandbox.launching import limiting, mechanisms
from elsewhere.sandbox.launching.blanks import BuildFailed
from elsewhere.sandbox.launching.mechanisms import Raised
from elsewhere.sandbox.launching.stock import Stock
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.records.request import Caller
from elsewhere.sandbox.rungs import Mechanism
from elsewhere.sandbox.view import Base, Host, Subject
from elsewhere.storage import trash
from elsewhere.storage.layers import LAYERS, Layers
from elsewhere.storage.state import State, write_new
from elsewhere.values import dataclass

__all__ = ["Climber", "Made", "Order", "abandon", "clear_spare", "create", "recover", "start"]

_DENIED_CALLS = {nested: len(seccomp.denied(nested=nested)) for nested in (False, True)}


@dataclass(frozen=True, slots=True)
class Order:
    """What a caller asks for. `lives`: it outlives whoever asked; otherwise `abandoned` says what becomes of it if the caller
    dies: `discard`, or `keep` if it wrote anything. `base`, `limits`, `confinement` and `network` are as they stand in the
    record; `binding` names the limits without which there is to be no sandbox, and `ignored` the settings of the project that did
    not count. `own_disk`: its layers are to have a file system of their own, where the host has one for them, that holds the
    limit."""

    project: str
    git: str | None
    home: str
    base: dict[str, Any]
    workflow: str
    story: str
    request: str | None = None
    name: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    binding: list[str] = field(default_factory=list)
    own_disk: bool = False
    confinement: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    reserve: int = 0
    asked: dict[str, Any] = field(default_factory=dict)
    shift: int | None = None
    lives: bool = False
    abandoned: str = "discard"


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

    def shift(self, project: str) -> int:
        """Of the rung that stood last time, else of the first that could: root of a container has no ids to shift to."""
        known, _ = self._found.get(project, (None, []))
        if known is not None:
            return known.shift
        return rungs.ladder()[0].shift if userns.is_mapped(FIRST_ID) else 0

    def climb(self, project: str, attempt: Callable[[Mechanism], Raised]) -> tuple[Raised, list[tuple[str, str]]]:
        """The first rung that stands, tried for real; the one that stood last time first. Before the first step down the host is
        looked at again, since what failed may only have been drawn from an old look. A rung that was left because of something
        that passes is tried again next time."""
        known, reasons = self._found.get(project, (None, []))
        ladder = rungs.ladder()
        reasons, looked, passing = list(reasons), False, False
        waiting = list(ladder[ladder.index(known) if known else 0 :])
        while waiting:
            mechanism = waiting[0]
            try:
                raised = attempt(mechanism)
            except BuildFailed as failure:
                if failure.accident:
                    raise Broken("builder_failed", f"the sandbox could not be made: {failure}", hint="try again") from failure
                if not looked:
                    looked, self._host = True, None
                    continue
                passing = passing or failure.passing
                reasons.append((mechanism.name, str(failure)))
                del waiting[0]
                continue
            except StateError as error:
                if error.code == "base_owners":
                    self._found[project] = (mechanism, reasons)  # with the right base, this one is next
                raise
            if not passing:
                self._found[project] = (mechanism, reasons)
            return raised, reasons
        raise mechanisms.unavailable(reasons)


def create(state: State, order: Order, climber: Climber, stock: Stock) -> Made:
    try:
        return _create(state, order, climber, stock)
    except (BrokenPipeError, ConnectionResetError):
        stock.empty()  # the keeper that was handed out had died, and the others may have
    return _create(state, order, climber, stock)


def _create(state: State, order: Order, climber: Climber, stock: Stock) -> Made:
    who = identity.derive(order.workflow, order.story, order.request, order.base.get("head"))
    _check_name(state, order.name, who.sandbox_id)

    def subject() -> Subject:
        host = climber.host(order.home, state.path)  # which may have been looked at again since the last attempt
        found = _subject(order.project, order.git, order.base, host, order.confinement)
        return replace(found, disk=int(order.limits["disk"]) if order.own_disk else 0)

    raised, reasons = climber.climb(order.project, lambda rung: stock.raise_sandbox(_fit(rung, order.shift), subject()))
    try:
        holds = limiting.apply(raised, order.limits, order.binding)
    except BaseException:
        raised.discard()
        trash.discard(raised.directory, state.room("trash"))
        raise
    now = wall()
    lifetime = order.limits.get("ttl") if order.lives else None
    made = Record(
        id=who.sandbox_id,
        state="running",
        project=order.project,
        base={**order.base, "at": order.base.get("at", now)},
        created_at=now,
        mechanism=raised.mechanism.name,
        identity=asdict(who),
        enforced=_enforced(raised, reasons, subject(), holds),
        layers=_layers(raised),
        plan=[list(step) for step in raised.view.description],
        home=order.home,
        git=order.git,
        name=order.name,
        labels=order.labels,
        expires_at=None if lifetime is None else now + lifetime,
        limits=order.limits,
        binding=order.binding,
        confinement=order.confinement,
        network={**order.network, "redirected": _redirected(raised)},
        ignored=order.ignored,
        group=raised.sealed.get("group"),
        disk=raised.disk,
        asked=order.asked,
        version=__version__,
    )
    try:
        # Not aside: nobody knows this directory before it is moved in.
        write_new(os.path.join(raised.directory, ".sandbox.env"), identity.env_file(who.variables()))
        made.keeper = list(Caller.of(raised.keeper_pid)) if order.lives else None
        record.save_new(made, raised.directory)
        _move_in(raised.directory, state.sandbox(made.id))
        raised.directory = state.sandbox(made.id)
        limiting.open_up(made, raised, order.reserve)
        if order.lives:
            _let_live(made, raised)
    except (OSError, ElsewhereError):
        raised.discard()
        trash.discard(raised.directory, state.room("trash"))
        raise
    return Made(made, raised)


def _check_name(state: State, name: str | None, sandbox_id: str) -> None:
    """Whoever asked has claimed it; but a claim dies with its owner, and what they asked for may wait here longer."""
    if name is not None and any(found.name == name and found.id != sandbox_id for found in record.load_all(state)[0]):
        raise InUse("name_in_use", f"there is a sandbox named {name!r} already", hint="choose another name")


def start(state: State, sandbox_id: str, reserve: int, climber: Climber, stock: Stock, *, lives: bool = True) -> Made:
    """A sandbox that is only directories runs again. Whoever asks holds the lock on its directory."""
    with Layers(state).referring():  # until its record says that it runs, nobody knows which layers it has mounted
        return _start(state, sandbox_id, reserve, climber, stock, lives=lives)


def _start(state: State, sandbox_id: str, reserve: int, climber: Climber, stock: Stock, *, lives: bool) -> Made:
    found = record.load(state, sandbox_id)
    if found.state == "running":
        raise InUse("sandbox_in_use", f"the sandbox {sandbox_id!r} is running already", hint="elsewhere list shows it")
    mechanism = rungs.named(found.mechanism)
    known = tuple((layer["at"], layer["number"]) for layer in found.layers)
    host = climber.host(found.home, state.path)
    subject = replace(
        _subject(found.project, found.git, found.base, host, found.confinement),
        numbers=known,
        disk=int(found.limits["disk"]) if found.disk else 0,
        frozen=_frozen(state, found),
    )
    try:
        raised = stock.raise_again(mechanism, subject, state.sandbox(sandbox_id))
    except BuildFailed as failure:
        raise Unavailable(
            "cannot_start_again",
            f"the sandbox {sandbox_id!r} was made by {mechanism.name}, which does not work here now: {failure}",
            hint="elsewhere doctor says what is missing",
        ) from failure
    try:
        holds = limiting.apply(raised, found.limits, found.binding)
    except BaseException:
        raised.discard()
        raise
    drawn = {layer["at"]: layer for layer in _layers(raised)}
    found.layers = [drawn.pop(layer["at"], layer) for layer in found.layers] + list(drawn.values())
    found.plan = [list(step) for step in raised.view.description]
    found.enforced = {
        **found.enforced,
        "hidden": list(raised.view.hidden),
        "read_only_instead": raised.weaker,
        "limits": {name: one.words for name, one in holds.items()},
    }
    found.network = {**found.network, "redirected": _redirected(raised)}
    found.group = raised.sealed.get("group")
    found.state, found.lost, found.ended_at, found.version = "running", False, None, __version__
    found.keeper = list(Caller.of(raised.keeper_pid)) if lives else None
    try:
        record.save(found, state.sandbox(sandbox_id))
        # Not before: whoever gets in has a request, and a request in a sandbox that does not run reads as lost.
        limiting.open_up(found, raised, reserve, Layers(state).total(found.tip))
        if lives:
            _let_live(found, raised)
    except OSError:
        raised.discard()
        raise
    return Made(found, raised)


def _frozen(state: State, found: Record) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What it wrote before its last snapshot. With an image, that is in there."""
    where = LAYERS if found.disk == "image" else state.room(LAYERS)
    return tuple((os.path.join(where, step.place), step.holds) for step in Layers(state).chain(found.tip))


def _subject(project: str, git: str | None, base: dict[str, Any], host: Host, confinement: dict[str, Any]) -> Subject:
    seeds = tuple((path, source) for path, source in base.get("seeds", ()))
    about = Base(tuple(base.get("layers", ())), tuple(base.get("live", ())), seeds)
    return Subject(host, Project(project, git, head=None), about, Confinement.unpacked(confinement))


def _fit(rung: Mechanism, shift: int | None) -> Mechanism:
    """A base was captured with the owners that one kind of rung needs; on another one its files would belong to nobody."""
    if shift is not None and rung.shift != shift:
        raise StateError("base_owners", "the base was captured for another mechanism", detail={"shift": rung.shift})
    return rung


def _let_live(made: Record, raised: Raised) -> None:
    """From here on the keeper outlives us, and whoever asked for it."""
    lifetime = None if made.expires_at is None else max(0.0, made.expires_at - wall())
    wire.send(raised.control, ("stay", lifetime), [raised.layers_fd] if raised.layers_fd >= 0 else [])


def _move_in(directory: str, target: str) -> None:
    try:
        os.rename(directory, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise InUse(
            "identity_in_use",
            f"there is a sandbox {os.path.basename(target)!r} already",
            hint="choose another --request, or remove it first",
        ) from error


def _layers(raised: Raised) -> list[dict[str, Any]]:
    return [
        {"at": layer.at, "lower": layer.lower, "number": layer.number, "frozen": list(layer.frozen)}
        for layer in raised.view.layers
        if not layer.private
    ]


def _enforced(raised: Raised, reasons: list[tuple[str, str]], subject: Subject, holds: dict[str, Hold]) -> dict[str, object]:
    """Which mechanism enforces what, and what is not enforced at all."""
    rung = raised.mechanism
    if rung.copy:
        files = f"a {raised.copied} of the project; everything else read-only by Landlock, but for modes and times of own files"
    elif rung.whole_machine:
        files = "the whole machine, copy on write"
    else:
        files = "home and project, copy on write; everything else read-only"
    confined = subject.confinement
    layers = {"": "on disk", "image": "in an image on disk", "tmpfs": "in memory"}[raised.disk]
    return {
        "mechanism": rung.name,
        "files": files,
        "view": confined.view,
        "layers": f"in memory, at most {min(rung.memory, subject.disk or rung.memory)} bytes" if rung.memory else layers,
        "processes": "descendants of the keeper" if rung.copy else "own process namespace",
        "user": _user(rung),
        "network": _network(raised, confined),
        "abstract_sockets": _abstract_sockets(raised, confined),
        "refused_calls": "told" if raised.sealed.get("told") else "silent: this kernel cannot tell which they were",
        "nested": "programs inside may make user namespaces" if confined.nested else "no namespaces can be made inside",
        "capabilities": list(capabilities.KEPT) if os.geteuid() == 0 and not rung.copy else [],
        "no_new_privileges": True,
        "system_calls": f"{_DENIED_CALLS[confined.nested]} denied",
        "hidden": list(raised.view.hidden),
        "read_only_instead": raised.weaker,
        "not_copied": raised.not_copied,
        "limits": {name: one.words for name, one in holds.items()},
        "stronger_rungs": [{"mechanism": name, "reason": reason} for name, reason in reasons],
        "differs": _differs(rung, confined, live=not subject.base.layers),
    }


def _user(rung: Mechanism) -> str:
    """Who the command is on the host."""
    if rung.copy:
        return "the caller's"
    if rung.whole_machine or os.geteuid() != 0:
        return "own user namespace"
    return "own user namespace, in which root is the host's root: capabilities count inside only, ownership outside, too"


def _network(raised: Raised, confined: Confinement) -> str:
    if confined.network == "host":
        return "host"
    if confined.network == "none":
        return "own network namespace, loopback only"
    why = raised.sealed.get("unredirected")
    return f"own network namespace, with a proxy{f' ({why})' if why else ' and a redirection to it'}"


def _redirected(raised: Raised) -> bool:
    """Whether programs that know no proxy are led to ours."""
    return "redirect" in raised.ports


def _abstract_sockets(raised: Raised, confined: Confinement) -> str:
    if confined.network != "host":
        return "unreachable: own network namespace"
    if raised.sealed.get("scoped"):
        return "unreachable: Landlock"
    return "reachable: with the host's network only Linux 6.12 and later can close them"


def _differs(rung: Mechanism, confined: Confinement, *, live: bool) -> list[str]:
    """How far the copy is from the original, so that nobody trusts a result too far."""
    said = ["services of the host are not part of the sandbox", "the kernel is the host's"]
    if rung.copy:
        return [
            *said,
            "the project is at another path",
            "/tmp is the host's and read-only; TMPDIR points to a private one",
        ]
    said.append("/run, /tmp, /dev/shm are fresh")
    if confined.view == "project":
        said.append("home is empty and private; of the machine only the system, toolchains and the project are shown")
    if rung.memory:
        said.append("what it wrote lives in memory: only stop saves it; expiry or a crash loses it")
    what = "a file" if live else "a file outside the project"
    said.append(f"{what} that reality changes later may show inside")
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
    if rungs.named(found.mechanism).copy or found.disk == "image":
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
    clear_spare(state)
    mechanisms.groups_left_over(state, own=False)


def clear_spare(state: State, *, dry_run: bool = False) -> list[str]:
    """What is half-made, or was made in advance, and nobody is left who would use it goes: the names."""
    gone = []
    with os.scandir(state.room("spare")) as entries:
        for entry in entries:
            maker = entry.name.partition("-")[0]
            if not record.is_held(entry.path) and not processes.is_running(maker):
                gone.append(entry.name)
                if not dry_run:
                    trash.discard(entry.path, state.room("trash"))
    return sorted(gone)
