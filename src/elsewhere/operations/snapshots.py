"""Saving a sandbox's state, going back to it, and going on from it in several directions: snapshot, rollback, fork."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from elsewhere import __version__, units
from elsewhere.clock import wall
from elsewhere.errors import ElsewhereError, InUse, StateError, UsageError
from elsewhere.linux import syscalls
from elsewhere.operations import admission, creating
from elsewhere.operations.projects import refuse_inside
from elsewhere.operations.sandboxes import refuse_owned
from elsewhere.operations.settings import resolve
from elsewhere.sandbox import ending, identity, rebasing, rungs
from elsewhere.sandbox import snapshots as kept
from elsewhere.sandbox.contents import IMAGE
from elsewhere.sandbox.keeping import line
from elsewhere.sandbox.launching.engine import Engine
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.records import record, truth
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.snapshots import Place
from elsewhere.storage import copying, saving, trash
from elsewhere.storage.layers import LAYERS, Layers
from elsewhere.storage.state import State, write_new
from elsewhere.values import dataclass

__all__ = ["Forked", "Held", "Returned", "Taken", "busy", "fork", "quiet", "remove", "rollback", "snapshot", "snapshots"]

_MOST_FORKS = 1000
_LIFETIME_S = 86400.0  # of a fork of something that has no time of its own, since it ends with its owner


@dataclass(slots=True)
class Held:
    """A sandbox that nobody else changes, and in which nothing goes on: at rest, or (`stopped` processes) frozen. What
    is at rest may still have a keeper that is just ending, which `watch` tells."""

    found: Record
    place: Place
    owned: bool = False
    frozen: bool = False
    stopped: int = 0
    memory: int = -1
    watch: int = -1

    @property
    def layers(self) -> int:
        """What leads to layers that lie apart. An image at rest is mounted once, by whoever holds the sandbox."""
        if self.memory >= 0 or self.found.disk != "image":
            return self.memory
        return int(os.path.basename(self.place.own))


@dataclass(frozen=True, slots=True)
class Taken:
    """`stopped`: how many processes went on running, and are not part of it; None: none ran."""

    record: Record
    snapshot: dict[str, Any]
    bytes: int | None
    stopped: int | None


@dataclass(frozen=True, slots=True)
class Returned:
    """`left`: the snapshot in which what the sandbox had before is; None: that was in one already."""

    record: Record
    snapshot: dict[str, Any]
    left: str | None


@dataclass(frozen=True, slots=True)
class Forked:
    """Each child, or why there is none."""

    parent: Record
    children: list[Record | ElsewhereError]
    stopped: int | None


def snapshot(wanted: str, name: str | None = None, box: Live | None = None) -> Taken:
    """`box` is the caller's own, if it lives only as long as they do."""
    refuse_inside()
    state = State.open()
    sandbox_id = record.find(state, wanted)
    with quiet(state, sandbox_id, box, check=lambda found: kept.new_name(found, name)) as held:
        found, chosen = held.found, kept.new_name(held.found, name)
        layers = Layers(state)
        if held.frozen or not rungs.named(found.mechanism).stacks:
            with layers.referring(), kept.told():
                layer = kept.copied(state, found, held.place, held.memory)
                made = kept.add(found, chosen, layer.id, copied=True)
                record.save(found, state.sandbox(sandbox_id))
            Engine.shared(state).nudge("tidy", layer.id)
            taken = Taken(found, made, layer.bytes, held.stopped if held.frozen else None)
        else:
            frozen = kept.frozen(state, found, held.place, lambda tip: kept.add(found, chosen, tip), measured=True)
            taken = Taken(found, found.snapshots[-1], frozen.bytes if frozen else 0, None)
    return taken


def snapshots(wanted: str) -> tuple[State, Record, dict[str, int | None]]:
    """The sandbox, and what each snapshot's own layer takes on the disk."""
    state = State.open()
    found = record.load(state, record.find(state, wanted))
    layers = Layers(state)
    sizes: dict[str, int | None] = {}
    for one in found.snapshots:
        if one["layer"] is None:
            sizes[one["name"]] = 0
            continue
        with contextlib.suppress(ElsewhereError, OSError):
            layer = layers.load(one["layer"])
            if found.disk != "image":
                layer = layers.measured(layer, state.room(LAYERS), 5.0)
            sizes[one["name"]] = layer.bytes
    return state, found, sizes


def rollback(wanted: str, name: str, *, force: bool = False, box: Live | None = None) -> Returned:
    """With `force`, what runs in it is ended."""
    refuse_inside()
    state = State.open()
    sandbox_id = record.find(state, wanted)
    with quiet(state, sandbox_id, box, check=lambda found: kept.find(found, name), end=force, returning=True) as held:
        target = kept.find(held.found, name)
        if held.frozen:
            raise InUse(
                "sandbox_in_use",
                busy(held),
                hint=f"elsewhere ps {sandbox_id}; elsewhere rollback --force {sandbox_id} {name} ends what runs",
            )
        left = kept.return_to(state, held.found, held.place, target)
    return Returned(held.found, target, left)


def busy(held: Held) -> str:
    """Why a sandbox could not be brought to rest."""
    if held.stopped:
        return f"{units.count(held.stopped, 'process', 'processes')} at work in the sandbox {held.found.id!r}"
    return f"another program has the sandbox {held.found.id!r} open, and could be writing to it"


def remove(wanted: str, name: str, box: Live | None = None) -> tuple[State, Record, dict[str, Any]]:
    """Its name, and what nothing else needs of its content."""
    state = State.open()
    with record.exclusive(state, record.find(state, wanted)) as found:
        if box is None:
            refuse_owned(found)
        gone = kept.remove(found, name)
        record.save(found, state.sandbox(found.id))
    ending.sweep(state, layers=True)
    return state, found, gone


# -- fork -----------------------------------------------------------------------------------------------------------------------


def fork(wanted: str, count: int = 1, *, name: str | None = None, source: str | None = None, box: Live | None = None) -> Forked:
    """`source`: the snapshot to start from; None: as the sandbox is now. They are only directories until something runs in
    them."""
    refuse_inside()
    if not 1 <= count <= _MOST_FORKS:
        raise UsageError("bad_count", f"{count} forks cannot be made", hint=f"between 1 and {_MOST_FORKS}")
    creating.check_name(name)
    state = State.open()
    sandbox_id = record.find(state, wanted)
    names = [name if count == 1 or name is None else f"{name}-{number}" for number in range(1, count + 1)]
    with Layers(state).referring(), _parent(state, sandbox_id, source, box) as (held, layer):
        at = wall() if source is None else kept.find(held.found, source).get("created_at", held.found.created_at)
        origin = {"sandbox": sandbox_id, "snapshot": source, "at": at, "before": held.found.origin}
        children = [_try_child(state, held, layer, origin, one) for one in names]
    return Forked(held.found, children, held.stopped if held.frozen else None)


@contextlib.contextmanager
def _parent(state: State, sandbox_id: str, source: str | None, box: Live | None) -> Iterator[tuple[Held, str | None]]:
    """The sandbox, and the layer that its children start from. From a snapshot, whatever runs goes on."""
    chosen = None if source is None else kept.find(found := record.load(state, sandbox_id), source)
    if chosen is not None and found.disk != "image":
        with record.exclusive(state, sandbox_id) as found, kept.place_of(state, found) as place:
            if rungs.named(found.mechanism).stacks and found.state != "running":
                kept.mend(state, found, place)  # whoever was saving it may not have finished
                rebasing.finish(state, found, place)
            yield Held(found, place), kept.find(found, chosen["name"])["layer"]
        return
    with quiet(state, sandbox_id, box) as held:
        found = held.found
        if found.disk == "image":
            if held.memory >= 0:
                syscalls.syncfs(held.memory)
            else:
                kept.mend(state, found, held.place)
            yield held, chosen["layer"] if chosen else found.tip
        elif held.frozen or not rungs.named(found.mechanism).stacks:
            yield held, kept.copied(state, found, held.place, held.memory).id
        else:
            kept.frozen(state, found, held.place, lambda _: None)
            yield held, found.tip


def _try_child(state: State, held: Held, layer: str | None, origin: dict[str, Any], name: str | None) -> Record | ElsewhereError:
    try:
        return _child(state, held, layer, origin, name)
    except ElsewhereError as error:
        return error
    except OSError as error:
        return StateError("not_forked", f"the fork could not be made: {error.strerror}", hint="free some space, and try again")


def _child(state: State, held: Held, layer: str | None, origin: dict[str, Any], name: str | None) -> Record:
    parent = held.found
    was = parent.identity
    who = identity.derive(was["workflow"], was["story"], secrets.token_hex(8), was["base_sha"])
    now = wall()
    lifetime = parent.limits.get("ttl", _LIFETIME_S if held.owned else None)
    chosen = {} if origin["snapshot"] is None else kept.find(parent, origin["snapshot"])
    made = replace(
        parent,
        id=who.sandbox_id,
        state="stopped",
        base=chosen.get("base", parent.base),
        created_at=now,
        identity=asdict(who),
        name=name,
        expires_at=None if lifetime is None else now + lifetime,
        network={**parent.network, "publish": []},  # a port of the host can be had once
        group=None,
        kept=False,
        tip=layer if rungs.named(parent.mechanism).stacks else None,
        snapshots=[],
        at=None,
        rebasing=None,
        origin=origin,
        asked={},
        keeper=None,
        command=None,
        ended_at=None,
        lost=False,
        version=__version__,
    )
    directory = os.path.join(state.room("spare"), f"{os.getpid()}-fork-{secrets.token_hex(4)}")
    os.mkdir(directory, 0o755 if os.geteuid() == 0 else 0o700)
    try:
        with truth.name_reserved(state, name, made.id):
            _furnish(state, held, made, layer, directory)
            write_new(os.path.join(directory, ".sandbox.env"), identity.env_file(who.variables()))
            record.save_new(made, directory)
            os.rename(directory, state.sandbox(made.id))
    except BaseException as error:
        trash.discard(directory, state.room("trash"))
        if not (isinstance(error, ElsewhereError) and os.path.isdir(state.sandbox(made.id))):
            raise  # otherwise it is there, and only the registry could not be told, which is healed
    if name is None:
        with contextlib.suppress(ElsewhereError):  # whoever lists finds its directory
            Engine.shared(state).later("register", made.id)
    return made


def _furnish(state: State, held: Held, made: Record, layer: str | None, directory: str) -> None:
    """What a child has of its own. Layers are shared, unless they lie in an image, in memory, or are a copy."""
    rung = rungs.named(made.mechanism)
    parent = state.sandbox(held.found.id)
    for name in ("manifest", "dirty", "basis", *filter(None, [made.base.get("remembered")])):
        source = os.path.join(parent, name)
        if os.path.isdir(source):
            copying.copy_tree(source, os.path.join(directory, name))
        elif os.path.exists(source):
            os.link(source, os.path.join(directory, name))
    if made.disk == "image":
        image = os.path.join(directory, IMAGE)
        copying.copy_file(os.path.join(parent, IMAGE), image)
        if made.origin and made.origin["snapshot"] is not None:
            with kept.image_at(image) as place:
                kept.reset(state, made, place)
    if rung.stacks or layer is None:
        return
    source = os.path.join(held.place.data, layer, "upper")
    if rung.memory:
        os.mkdir(os.path.join(directory, "upper"), 0o700)
        saving.copy_saved(source, os.path.join(directory, "upper"))
    for name in os.listdir(source) if rung.copy else ():
        copying.copy_tree(os.path.join(source, name), os.path.join(directory, name))


# -- nobody else, and nothing that goes on --------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet(
    state: State,
    sandbox_id: str,
    box: Live | None,
    *,
    check: Callable[[Record], object] | None = None,
    end: bool = False,
    returning: bool = False,
) -> Iterator[Held]:
    """A sandbox in which nothing runs is ended for it and runs again afterwards; in another one everything is stopped for a
    moment, or, with `end`, ended. `check` may refuse before anything is disturbed. `returning`: it must not run, even where its
    layers could be copied as they are."""
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(record.locked(state, sandbox_id))
        found = record.load(state, sandbox_id)
        if box is None:
            refuse_owned(found)
        if check is not None:
            check(found)
        held, group = Held(found, Place("", ""), owned=box is not None and box.owned), found.group
        if found.state == "running":
            _quieten(state, held, box, stack, end=end, returning=returning)
        rested = found.state == "running" and not held.frozen
        if rested:
            found.state, found.keeper, found.group, found.ended_at = "stopped", None, None, wall()
        try:
            with kept.place_of(state, found, held.memory) as held.place:
                rebasing.finish(state, found, held.place)
                yield held
        finally:
            if rested:
                # What was asked for is done, or failed for a reason of its own; whoever needs it to run is told why it cannot.
                with contextlib.suppress(*(() if box is not None else (ElsewhereError, OSError))):
                    _run_again(state, held, box, group, lock)
            elif found.tip is not None:
                Engine.shared(state).nudge("tidy", found.tip)


def _quieten(state: State, held: Held, box: Live | None, stack: contextlib.ExitStack, *, end: bool, returning: bool) -> None:
    found = held.found
    own = 1 if box is None or box.owned else 2
    reached = line.connect(state.sandbox(found.id))
    if reached is None or end:
        if reached is not None:
            reached.close()
        ending.end_keeper(state, found, 2.0 if end else 0.0)
        truth.end_earlier_life(state, found.id)
        rests = True
    elif rungs.named(found.mechanism).stacks:
        held.watch = stack.enter_context(reached.will_rest(own))
        rests = held.watch >= 0
        if rests and found.layers_apart:
            line.wait(held.watch)  # what its image is mounted in
    else:
        # Its files have to be copied anyway, so it need not rest, unless it is to have others.
        reached.close()
        rests = returning and ending.end_keeper(state, found, 0.0, if_idle=True, own=own)
        reached = None if rests else line.connect(state.sandbox(found.id))
    if rests or reached is None:
        if reached is not None:
            reached.close()
        if box is not None:
            box.let_go()
        return
    stack.enter_context(reached)
    held.stopped = stack.enter_context(reached.frozen())
    held.frozen = True
    layers = reached.layers() if found.layers_apart else None
    if layers is not None:
        held.memory = layers
        stack.callback(os.close, layers)


def _run_again(state: State, held: Held, box: Live | None, group: list[Any] | None, lock: int) -> None:
    """Nobody waits for it: the lock goes along, and whoever wants to use it waits for that. It has not given up its place on the
    machine, so it does not have to wait for one."""
    found = held.found
    if found.rebasing is not None:
        return  # whoever needs it to run finishes that first
    engine = Engine.shared(state)
    if found.tip is not None:
        engine.later("tidy", found.tip)
    reserve = admission.disk_reserve(state, resolve(state, found.project))
    fds = [lock] if held.watch < 0 else [lock, held.watch]
    if box is not None:
        box.run_again(reserve, group, fds)
    else:
        engine.later("start", found.id, reserve, "", group, fds=fds)
