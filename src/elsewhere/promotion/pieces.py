"""What is to be moved: for each path of a target, what it was where the change began and what it became.

The same form serves both ways: of a promotion, `before` is the sandbox's base and `after` the sandbox; of an undo, `before` is
what the promotion put there and `after` what it found there.
"""

from typing import NamedTuple

from elsewhere.changes.model import Side

__all__ = ["Piece"]


class Piece(NamedTuple):
    """`root` is the directory that is changed (a project, or / for what lies outside of every project), absolute and free of
    links; `path` is relative to it, without a slash at its end. A side of None is nothing there. Without `known`, nobody can tell
    what was there before; then `moved` tells whether the target changed it since. `owner` is whom something new belongs to in
    reality; None: whoever writes it."""

    root: str
    path: str
    before: Side | None
    after: Side | None
    known: bool = True
    moved: bool = False
    owner: tuple[int, int] | None = None
