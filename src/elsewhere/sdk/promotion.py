"""What was moved to reality, and the way back."""

from collections.abc import Sequence
from datetime import UTC, datetime

from elsewhere.operations import undoing
from elsewhere.promotion import records
from elsewhere.values import dataclass

__all__ = ["Promotion", "patterns", "promotions", "undo"]


def patterns(given: Sequence[str]) -> tuple[str, ...]:
    """A lone text is one pattern, and not as many as it has letters: "." among them would be everything."""
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True, slots=True)
class Promotion:
    """Paths are relative to the project, absolute outside of it; `applied` were written, `merged` are those of them that reality
    had changed, too. `status` is applied, refused, failed, waiting, reversed or undone. `branch` is where commits made
    inside went."""

    id: str
    kind: str
    status: str
    sandbox: str
    project: str
    stage: str | None
    applied: tuple[str, ...]
    merged: tuple[str, ...]
    deleted: tuple[str, ...]
    branch: str | None
    created_at: datetime

    @classmethod
    def of(cls, found: records.Promotion) -> "Promotion":
        return cls(
            found.id,
            found.kind,
            found.status,
            found.sandbox,
            found.project,
            found.stage,
            tuple(found.applied),
            tuple(found.merged),
            tuple(found.deleted),
            None if found.commits is None else found.commits["branch"],
            datetime.fromtimestamp(found.created_at, UTC),
        )

    def undo(self) -> "Promotion":
        """Take it back, three-way; the undo is a promotion of its own."""
        return undo(self.id)


def promotions() -> Sequence[Promotion]:
    """All of them, oldest first."""
    return [Promotion.of(one) for one in undoing.promotions()]


def undo(promotion: str | Promotion | None = None, *, ours: Sequence[str] = (), theirs: Sequence[str] = ()) -> Promotion:
    """Take a promotion back: the one that is named, or the last of the project that we stand in. What reality changed since is
    kept, or in conflict: then nothing is done. `ours` takes a path back even so, `theirs` leaves it."""
    wanted = promotion.id if isinstance(promotion, Promotion) else promotion
    done = undoing.undo(wanted, ours=patterns(ours), theirs=patterns(theirs))
    assert done.promotion is not None, "it was no dry run"
    return Promotion.of(done.promotion)
