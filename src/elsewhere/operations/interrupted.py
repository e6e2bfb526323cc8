"""One look at whether somebody who was moving something to reality was interrupted; what has to be done then is in
`recovering.py`, which nobody else has to load."""

import os

from elsewhere.storage.state import State

__all__ = ["look"]

_PLACE = "journal/unfinished"


def look(state: State) -> list[str]:
    """For whoever is about to make, show or move something: why what was interrupted could not be seen to."""
    try:
        waiting = os.listdir(state.room(_PLACE))
    except OSError:  # there is none, or it is somebody else's, which is told when it is used
        return []
    if not waiting:
        return []
    from elsewhere.operations import recovering
    from elsewhere.promotion.records import ENDS

    return [f"{one.id}: {one.note}" for one in recovering.recover(state) if one.status not in ENDS]
