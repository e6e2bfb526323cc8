"""The stock: what is made ahead of time, so that creating a sandbox costs little more than handing one out.

    blanks   a builder and a keeper each, waiting for any project
    raised   sandboxes that stand already, for the project that was asked for last; their directories are in spare/

A live sandbox looks through at reality, so one that was raised a minute ago shows the same as one raised now, as long as what its
mounts depend on stayed the same: the host's mounts (`forget` is called when they change) and the view's fingerprint (compared
at every use).
"""

import itertools
import os
import time

from elsewhere.sandbox import standing
from elsewhere.sandbox.fingerprint import fingerprint
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.launching import mechanisms
from elsewhere.sandbox.launching.blanks import Blank, BuildFailed, Kind
from elsewhere.sandbox.launching.mechanisms import Raised, Raising
from elsewhere.sandbox.launching.nursery import Nursery
from elsewhere.sandbox.rungs import Mechanism
from elsewhere.sandbox.view import Subject, View
from elsewhere.storage import trash
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Stock"]

_BLANKS = 2
_QUIET_S = 0.03


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the next sandbox will probably be."""

    mechanism: Mechanism
    subject: Subject
    fingerprint: tuple[object, ...]


class Stock:
    def __init__(self, state: State, nursery: Nursery, ready: int) -> None:
        """`ready`: so many stand already; with 0, nothing is made ahead of time."""
        self._state = state
        self._nursery = nursery
        self._ready = ready
        self._names = itertools.count()
        self._blanks: list[Blank] = []
        self._raised: list[tuple[_Wish, Raising | Raised]] = []
        self._kind: Kind | None = None
        self._standing: object = None
        self._wish: _Wish | None = None
        self._drawn: tuple[_Wish, View] | None = None
        self._not_before = 0.0

    def raise_sandbox(self, mechanism: Mechanism, subject: Subject) -> Raised:
        """A sandbox in a directory of its own in spare/: from stock if one fits, else made now."""
        if not mechanism.pooled or mechanism.memory or subject.disk:
            return self._make(mechanism, subject)
        wish = _Wish(mechanism, subject, fingerprint(subject, whole_machine=mechanism.whole_machine))
        self._wish = wish
        self._rest()
        while self._raised:
            made_for, made = self._raised.pop(0)
            if made_for == wish:
                try:
                    return self._refresh(made.finish() if isinstance(made, Raising) else made)
                except (BuildFailed, OSError):
                    self._throw_away(made)
            else:
                self._throw_away(made)
        return self._make(mechanism, subject)

    def raise_again(self, mechanism: Mechanism, subject: Subject, directory: str) -> Raised:
        """A sandbox in the directory that it has already, which stays whatever happens."""
        try:
            return mechanisms.raise_sandbox(mechanism, subject, self._state, directory, self._take)
        except BuildFailed as failure:
            if not failure.again:
                raise
        self._drop_blanks()  # one of those that waited was dead
        return mechanisms.raise_sandbox(mechanism, subject, self._state, directory, self._take)

    def _make(self, mechanism: Mechanism, subject: Subject) -> Raised:
        try:
            return self._make_once(mechanism, subject)
        except BuildFailed as failure:
            if not failure.again:
                raise
        self._drop_blanks()  # one of those that waited was dead
        return self._make_once(mechanism, subject)

    def _make_once(self, mechanism: Mechanism, subject: Subject) -> Raised:
        directory = self._directory()
        try:
            return mechanisms.raise_sandbox(mechanism, subject, self._state, directory, self._take)
        except BaseException:
            trash.discard(directory, self._state.room("trash"))
            raise

    def _refresh(self, raised: Raised) -> Raised:
        """What an upper's root took from reality may have grown older in the meantime."""
        for layer in raised.view.layers:
            mechanisms.take_after(layer, f"{raised.directory}/upper/{layer.number}", raised.mechanism)
        return raised

    def _directory(self) -> str:
        directory = os.path.join(self._state.room("spare"), f"{os.getpid()}-{next(self._names)}")
        os.mkdir(directory, 0o755 if os.geteuid() == 0 else 0o700)
        return directory

    def _take(self, kind: Kind) -> Blank:
        stamp = standing.stamp()
        if kind != self._kind or stamp != self._standing:
            self._drop_blanks()
            self._kind, self._standing = kind, stamp
        blank = self._blanks.pop(0) if self._blanks else self._make_blank(kind)
        try:
            blank.ready()
        except BuildFailed:
            blank.discard()
            self._kind = None
            raise
        return blank

    def _make_blank(self, kind: Kind) -> Blank:
        return self._nursery.blank(kind, mechanisms.group_name(self._state, next(self._names)))

    # -- ahead of time ----------------------------------------------------------------------------------------------------------

    def waiting_time(self) -> float | None:
        """Seconds until there is something to make; None: nothing is wanted."""
        if not self._wants_blank() and not self._wants_raised() and not self._unfinished():
            return None
        return max(0.0, self._not_before - time.monotonic())

    def work(self) -> None:
        """One step, when the time has come: cheap for us, since builders work on their own."""
        if self.waiting_time() != 0.0:
            return
        try:
            if self._unfinished() and self._finish_one():
                return
            if self._wants_raised() and self._blanks and self._blanks[0].is_ready():
                self._raise_ahead()
            elif self._wants_blank():
                assert self._kind is not None
                self._blanks.append(self._make_blank(self._kind))
            else:
                self._not_before = time.monotonic() + 0.002  # what is needed for it is about to be ready
        except OSError:
            self._not_before = time.monotonic() + 1.0  # a full disk, too many processes: whoever asks next gets to see why

    def _raise_ahead(self) -> None:
        wish = self._wish
        assert wish is not None
        directory = self._directory()
        try:
            raising = mechanisms.begin(wish.mechanism, self._draw(wish), wish.subject, self._state, directory, self._take)
        except Exception:
            # Whoever asks next gets to see why.
            trash.discard(directory, self._state.room("trash"))
            self._wish = None
            return
        self._raised.append((wish, raising))

    def _unfinished(self) -> bool:
        return any(isinstance(made, Raising) for _, made in self._raised)

    def _finish_one(self) -> bool:
        """One whose builder is done. It rehearses, so that whoever gets it finds the way to the shell trodden."""
        for place, (wish, made) in enumerate(self._raised):
            if isinstance(made, Raising) and made.blank.is_built():
                try:
                    raised = made.finish()
                    wire.send(raised.control, ("rehearse",))
                    self._raised[place] = (wish, raised)
                except (BuildFailed, OSError):
                    del self._raised[place]
                    self._throw_away(made)
                    self._wish = None
                return True
        return False

    def _draw(self, wish: _Wish) -> View:
        """Once for each wish: as long as the fingerprint stays, so does the view."""
        if self._drawn is None or self._drawn[0] != wish:
            self._drawn = (wish, mechanisms.draw(wish.mechanism, wish.subject))
        return self._drawn[1]

    def _wants_blank(self) -> bool:
        return self._kind is not None and len(self._blanks) < min(_BLANKS, self._ready)

    def _wants_raised(self) -> bool:
        return self._wish is not None and len(self._raised) < self._ready

    def _rest(self) -> None:
        """Whoever was just served is about to run something: leave them the processor, unless the stock is empty."""
        self._not_before = time.monotonic() + (_QUIET_S if self._raised else 0.0)

    def nobody_waits(self) -> None:
        """A sandbox ended: this is a good moment."""
        self._not_before = 0.0

    def died(self, pid: int) -> None:
        """A keeper ended that was nobody's yet: nobody must get it."""
        for entry in [entry for entry in self._raised if _keeper_of(entry[1]) == pid]:
            self._raised.remove(entry)
            self._throw_away(entry[1])

    # -- away with it -----------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The host's mounts changed, and all in stock has the old ones. Busy hosts mount often: wait for a quiet moment."""
        self.empty()
        self._drawn = None
        self._not_before = time.monotonic() + 0.2

    def empty(self) -> None:
        self._drop_blanks()
        for _, made in self._raised:
            self._throw_away(made)
        self._raised.clear()

    def _drop_blanks(self) -> None:
        for blank in self._blanks:
            blank.discard()
        self._blanks.clear()

    def _throw_away(self, made: Raising | Raised) -> None:
        made.discard()
        trash.discard(made.directory, self._state.room("trash"))


def _keeper_of(made: Raising | Raised) -> int:
    return made.blank.keeper_pid if isinstance(made, Raising) else made.keeper_pid
