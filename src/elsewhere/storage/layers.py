"""Frozen layers: what sandboxes wrote up to some point, never changed again, shared by all who go on from there.

    layers/lock                 shared by whoever is about to refer to a layer, alone by whoever takes away what nobody refers to
    layers/<layer-id>/
        layer.json              {"parent", "depth", "created_at", "holds", "encoding", "bytes", "below"}
        moving                  there until its content has come; then the sandbox that it is the top of still has it
        upper/<name>/           what it says: a directory for each overlay (by its number) and each private place (tmp, home, …)
        merged/<name>/          the same as this layer and those below it, as far as merged.json says
        merged.json             {"down_to": <layer-id> or null, "holds"}

A layer lies on its `parent`; the tree that they form is that of the snapshots. What is mounted is a *chain*: from one layer down,
with a merged one in place of every run of layers that has been merged, so that no chain is long (`mergeable` says which).

Who refers to a layer is not counted but looked up, in the records of the sandboxes: a count can be wrong. The layers of a sandbox
whose files lie in an image of their own lie in that image, at the same names; what is said about them is here all the same.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, fields, replace
from typing import Any

from elsewhere.clock import monotonic, wall
from elsewhere.errors import Broken
from elsewhere.linux import measuring, syscalls
from elsewhere.storage import encodings, merging, trash
from elsewhere.storage.state import State, write_aside
from elsewhere.values import dataclass

__all__ = ["LAYERS", "Layer", "Layers", "Step", "size_of"]

LAYERS = "layers"
_FILE, _MERGED = "layer.json", "merged.json"
_MERGED_KINDS = ("trusted", "user")
_RUN = 10  # so many layers become one, and so many of those one again


@dataclass(frozen=True, slots=True)
class Layer:
    """`holds` are the names below its `upper`, `encoding` how it says what is deleted. `bytes`: what it takes on the disk, None
    until somebody measured it; `below`: what those below it took when it was made, as far as that was known. `apart`: its content
    is not in the room of the layers, but in an image."""

    id: str
    parent: str | None
    depth: int
    created_at: float
    holds: tuple[str, ...]
    encoding: str
    bytes: int | None = None
    below: int = 0
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One directory of a chain, relative to where layers lie, and what it holds."""

    place: str
    holds: tuple[str, ...]


def size_of(upper: str, seconds: float) -> int | None:
    """What lies there takes so much on the disk, if that can be told in so many seconds."""
    fd = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = measuring.used(fd, deadline=monotonic() + seconds)
    finally:
        os.close(fd)
    return found.bytes if found.complete else None


@dataclass(frozen=True, slots=True)
class Layers:
    state: State
    _known: dict[str, Layer] = field(default_factory=dict)

    def place(self, layer_id: str) -> str:
        return os.path.join(self.state.room(LAYERS), layer_id)

    # -- making -----------------------------------------------------------------------------------------------------------------

    def new(
        self, parent: str | None, holds: Iterable[str], encoding: str, *, apart: bool = False, size: int | None = None
    ) -> Layer:
        """A layer without content, which the caller moves in; `size`: what that takes, if it is known. Until a record refers to
        it, it is nobody's."""
        below = None if parent is None else self.load(parent)
        made = Layer(
            f"{int(wall() * 1e6):x}-{os.urandom(4).hex()}",
            parent,
            1 if below is None else below.depth + 1,
            wall(),
            tuple(sorted(holds)),
            encoding,
            size,
            below=self.total(parent),
            apart=apart,
        )
        os.mkdir(self.place(made.id), 0o700)
        try:
            os.close(os.open(self._moving(made.id), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self.save(made)
        except BaseException:
            trash.discard(self.place(made.id), self.state.room("trash"))
            raise
        return made

    def measured(self, layer: Layer, data: str, seconds: float) -> Layer:
        """With the bytes that its content takes, if that can be told in so many seconds."""
        if layer.bytes is None and not (layer.apart and data == self.state.room(LAYERS)):
            found = size_of(os.path.join(data, layer.id, "upper"), seconds)
            if found is not None:
                layer = replace(layer, bytes=found)
                with contextlib.suppress(OSError):  # on a full disk it is measured again
                    self.save(layer)
        return layer

    def total(self, tip: str | None) -> int:
        """What a layer and all below it take, as far as it is known."""
        if tip is None:
            return 0
        layer = self.load(tip)
        return layer.below + (layer.bytes or 0)

    def _moving(self, layer_id: str) -> str:
        return os.path.join(self.place(layer_id), "moving")

    def is_moving(self, layer_id: str) -> bool:
        return os.path.exists(self._moving(layer_id))

    def moved(self, layer_id: str) -> None:
        """Its content is where it belongs."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._moving(layer_id))

    def save(self, layer: Layer) -> None:
        said = {one.name: getattr(layer, one.name) for one in fields(layer) if one.name != "id"}
        self._known[layer.id] = layer
        write_aside(os.path.join(self.place(layer.id), _FILE), json.dumps(said).encode())

    def load(self, layer_id: str) -> Layer:
        known = self._known.get(layer_id)
        if known is None:
            said = self._read(layer_id, _FILE)
            if said is None:
                raise Broken("layer_missing", f"the layer {layer_id!r} is not there", hint="elsewhere doctor looks around")
            try:
                known = Layer(layer_id, **{**said, "holds": tuple(said["holds"])})
            except (TypeError, KeyError) as error:
                raise Broken("layer_broken", f"what is said about the layer {layer_id!r} cannot be read: {error}") from error
            self._known[layer_id] = known
        return known

    def _read(self, layer_id: str, name: str) -> dict[str, Any] | None:
        path = os.path.join(self.place(layer_id), name)
        try:
            with open(path, "rb") as stream:
                said = json.load(stream)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise Broken("layer_broken", f"{path!r} cannot be read: {error}") from error
        return said if isinstance(said, dict) else None

    # -- reading ----------------------------------------------------------------------------------------------------------------

    def chain(self, tip: str | None) -> list[Step]:
        """What has to be mounted, newest first."""
        return [step for _, step in self._walk(tip)]

    def top(self, tip: str) -> Step:
        """The newest of them."""
        return next(step for _, step in self._walk(tip))

    def _walk(self, tip: str | None) -> Iterator[tuple[str, Step]]:
        seen: set[str] = set()
        while tip is not None and tip not in seen:
            seen.add(tip)
            merged = self._read(tip, _MERGED)
            if merged is not None:
                yield tip, Step(f"{tip}/merged", tuple(merged["holds"]))
                tip = merged["down_to"]
            else:
                layer = self.load(tip)
                yield tip, Step(f"{tip}/upper", layer.holds)
                tip = layer.parent

    def ancestors(self, tip: str | None) -> list[Layer]:
        """The layer and everything that it lies on, one by one, newest first; without what only a merged one still shows."""
        found: dict[str, Layer] = {}
        while tip is not None and tip not in found and os.path.exists(os.path.join(self.place(tip), _FILE)):
            found[tip] = self.load(tip)
            tip = found[tip].parent
        return list(found.values())

    def needed(self, tips: Iterable[str]) -> set[str]:
        """Every layer that one of these is made of."""
        found: set[str] = set()
        for tip in tips:
            for layer_id, _ in self._walk(tip):
                if layer_id in found:
                    break
                found.add(layer_id)
        return found

    def all(self) -> list[str]:
        names = os.listdir(self.state.room(LAYERS))
        return sorted(name for name in names if os.path.exists(os.path.join(self.place(name), _FILE)))

    def sync(self) -> None:
        """What was written must still be whole after a power cut."""
        fd = os.open(self.state.room(LAYERS), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            syscalls.syncfs(fd)
        finally:
            os.close(fd)

    # -- references -------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def referring(self) -> Iterator[None]:
        """While somebody reads which layers there are and writes down that they are needed."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        place = os.path.join(self.state.room(LAYERS), "lock")
        fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)

    def prune(self, tips: Callable[[], Iterable[str]], *, dry_run: bool = False) -> list[str]:
        """Take away what nobody refers to; `tips` is asked while nobody can begin to. Somebody who is about to: another time."""
        try:
            with self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
                # Whoever makes one is about to refer to it: one without a word about it was left by somebody who was stopped.
                there = {name for name in os.listdir(self.state.room(LAYERS)) if os.path.isdir(self.place(name))}
                gone = sorted(there - self.needed(tips()))
                for layer_id in [] if dry_run else gone:
                    trash.discard(self.place(layer_id), self.state.room("trash"))
                return gone
        except BlockingIOError:
            return []

    # -- merging ----------------------------------------------------------------------------------------------------------------

    def is_due(self, layer_id: str) -> bool:
        """Whether a run of layers ends here that is to be merged and is not yet."""
        layer = self.load(layer_id)
        return layer.depth % _RUN == 0 and layer.encoding in _MERGED_KINDS and self._read(layer_id, _MERGED) is None

    def merge_due(self, tip: str | None) -> list[str]:
        """The layers below (and with) this one that are to have a merged one and have none, oldest first: each larger one is made
        of smaller ones."""
        return [layer.id for layer in reversed(self.ancestors(tip)) if not layer.apart and self.is_due(layer.id)]

    def merge(self, layer_id: str, data: str | None = None) -> bool:
        """Make the merged one of a run that ends here. `data` is where layers lie, if not in their room. False: somebody is at
        it already."""
        where = data or self.state.room(LAYERS)
        try:
            with self.referring(), self._merging():
                self._merge(layer_id, where)
        except BlockingIOError:
            return False
        return True

    def _merge(self, layer_id: str, where: str) -> None:
        layer = self.load(layer_id)
        if self._read(layer_id, _MERGED) is not None:
            return
        span = _RUN
        while layer.depth % (span * _RUN) == 0:
            span *= _RUN
        down_to: str | None = layer_id
        steps: list[Step] = []
        for at, step in self._walk(layer_id):
            if self.load(at).depth <= layer.depth - span:
                down_to = at
                break
            steps.append(step)
        else:
            down_to = None
        aside, target = os.path.join(where, layer_id, "merged.new"), os.path.join(where, layer_id, "merged")
        for left in (aside, target):
            if os.path.lexists(left):
                trash.remove_tree(left)
        os.mkdir(aside, 0o700)
        holds = sorted({name for step in steps for name in step.holds})
        for name in holds:
            parts = [os.path.join(where, step.place, name) for step in steps if name in step.holds]
            merging.merge(parts, encodings.NAMED[layer.encoding], os.path.join(aside, name))
        os.rename(aside, target)
        said = {"down_to": down_to, "holds": holds}
        write_aside(os.path.join(self.place(layer_id), _MERGED), json.dumps(said).encode())

    @contextlib.contextmanager
    def _merging(self) -> Iterator[None]:
        place = os.path.join(self.state.room(LAYERS), "merging")
        fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)
