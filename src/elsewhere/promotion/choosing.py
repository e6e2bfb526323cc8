"""What somebody chose about conflicts: which paths a choice is about, and whether it is about a conflict at all.

A choice is a path or a glob, relative to the root that it is asked about, or absolute. Two about the same conflict, and one about
none, are mistakes.

Not here: what a choice does (`planning.py`, `branches.py`), and what else helps (`settling.py`).
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from elsewhere import units
from elsewhere.changes.globs import matcher
from elsewhere.errors import UsageError

__all__ = ["Choices", "Chosen", "Disputed", "fitting", "listed", "named", "refuse_idle"]

_MOST_NAMED = 3

Choice = Literal["ours", "theirs"]


class Choices(NamedTuple):
    """Paths or globs that settle conflicts: take the sandbox's (`ours`), leave reality's (`theirs`)."""

    ours: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()


class Disputed(Protocol):
    """A plan: the conflicts that there were before anything was chosen, and what was chosen about one of them."""

    disputed: list[str]
    fitting: Choices


class Chosen:
    """What somebody chose about the paths below one root."""

    def __init__(self, root: str, choices: Choices) -> None:
        self._root = root
        self._ours = {value: _pattern(value, root) for value in choices.ours}
        self._theirs = {value: _pattern(value, root) for value in choices.theirs}

    def __call__(self, path: str) -> Choice | None:
        if any(fits(path) for fits in self._ours.values()):
            return "ours"
        return "theirs" if any(fits(path) for fits in self._theirs.values()) else None

    def values(self, path: str) -> tuple[list[str], list[str]]:
        """What names it, of either kind."""
        return [one for one, fits in self._ours.items() if fits(path)], [one for one, fits in self._theirs.items() if fits(path)]

    def exactly(self, path: str) -> bool:
        """Whether `ours` names the path itself, and not only something that it fits or lies in."""
        return any(_place(value, self._root) == os.path.join(self._root, path) for value in self._ours)


def fitting(choices: Choices, disputed: Sequence[tuple[str, str]]) -> Choices:
    """Those that are about one of these (root, path). Two about the same are a mistake."""
    choosers = {root: Chosen(root, choices) for root, _ in disputed}
    used: tuple[set[str], set[str]] = set(), set()
    for root, path in disputed:
        ours, theirs = choosers[root].values(path)
        used[0].update(ours)
        used[1].update(theirs)
        if ours and theirs:
            name = named(root, path)
            raise UsageError(
                "ours_and_theirs",
                f"{name!r} is named by --ours {ours[0]} and by --theirs {theirs[0]}",
                hint="name it with one of them, or by narrower patterns",
                detail={"path": name, "ours": ours, "theirs": theirs},
            )
    return Choices(*(tuple(one for one in chosen if one in fits) for chosen, fits in zip(choices, used, strict=True)))


def refuse_idle(choices: Choices, plans: Iterable[Disputed]) -> None:
    """A choice that none of the plans has a conflict for is a mistake."""
    plans = list(plans)
    names = list(dict.fromkeys(name for one in plans for name in one.disputed))
    for number, option in enumerate(("--ours", "--theirs")):
        for value in choices[number]:
            if not any(value in one.fitting[number] for one in plans):
                raise UsageError(
                    "no_such_conflict",
                    f"{option} {value!r} names no conflict; " + (f"there are: {listed(names)}" if names else "there is none"),
                    hint=f"name one of these paths, or leave out {option}" if names else f"leave out {option}",
                    detail={"value": value, "paths": names},
                )


def _pattern(value: str, root: str) -> Callable[[str], bool]:
    """The very path, or a glob. Outside of every project, only an absolute one can be meant."""
    if root == "/" and not value.startswith("/"):
        return lambda _: False
    exact, glob = _place(value, root), matcher([value], root)

    def fits(path: str) -> bool:
        place = os.path.join(root, path)
        return place == exact or glob(place)

    return fits


def _place(value: str, root: str) -> str:
    return os.path.normpath(os.path.join(root, value))


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {units.count(more, 'other')}" if more > 0 else "")


def named(root: str, path: str) -> str:
    """As people are told: outside of every project, absolute."""
    return f"/{path}" if root == "/" else path
