"""What somebody can do about conflicts, in words: the choice that settles one, and what helps where none does.

`theirs` settles every conflict of a plan, `ours` not: it takes nothing away that the sandbox did not know of, and has no more
rights than anybody. Marks that were left in a file are in the file, and no choice takes them out.

Not here: what a choice does (`planning.py`, `branches.py`).
"""

from collections.abc import Iterable

__all__ = ["NOT_BY_OURS", "next_steps"]

NOT_BY_OURS = {
    "not_permitted": "change the permissions in reality, or act as the owner",
    "not_a_file": "delete the device, socket or fifo on the side that has it",
    "case_collision": "rename one of the two",
    "parent_replaced": "move away what is in reality where the directory was",
    "not_empty": "move or delete what the directory holds in reality",
    "markers_left": "edit it in the sandbox until no marks are left",
}
_BY_OURS_ONLY = {
    "link_outside": "--ours has to name the very path",
    "type_changed": "--ours takes no directory away that holds something else",
}


def next_steps(reasons: Iterable[str], ours: str, theirs: str, *more: str, fork: str = "") -> str:
    """`ours` and `theirs` say what the choices do, `more` what helps whatever the reason, `fork` where they can be settled one
    by one; only those are named that help. What a reason asks for beside them comes behind."""
    found = set(reasons)
    words = [ours] if found - NOT_BY_OURS.keys() else []
    words += [theirs] if found - {"markers_left"} else []
    words += more
    words += [fork] if fork and found - NOT_BY_OURS.keys() else []
    notes = [f"{reason}: {note}" for reason, note in {**_BY_OURS_ONLY, **NOT_BY_OURS}.items() if reason in found]
    return "; ".join([", ".join(words), *notes])
