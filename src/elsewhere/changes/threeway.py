"""The three-way decision about one path: what became of it here, what became of it there, and what both began with.

A side is what stands at the path: a file, a directory, a link, something else, or nothing (None). `ours` is a sandbox's, `theirs`
is reality's; the decision is the same the other way round. What only one side changed is taken from it. What both changed is
merged if all three are text: by `git merge-file`, in a directory of its own, with nobody's configuration. Permission bits are
merged by themselves. Whatever is left is a conflict, with a word that stays the same and a sentence for people.

    deleted_here, deleted_there     one side deleted it, the other one changed it
    both_added                      there was nothing, and now there are two different things
    type_changed                    file, directory or link: the sides do not agree which
    links_differ, modes_differ      two targets, two modes
    binary, too_large               both changed the content, and it is no text, or too much of it
    text_conflict                   both changed the same lines
    not_a_file                      a device, a socket or a fifo, which nobody can merge or move
    no_base                         both changed it, and nobody knows what it was
    parent_gone, parent_replaced    the directory that it is in was deleted there, or is none any more
    hidden_here                     it is new or changed there, in a directory that was deleted, replaced or moved here
    not_empty                       a directory that was deleted or replaced here holds something there that was not known here
    not_permitted                   it cannot be read or written there
    link_outside                    a link that leads out of what is being changed
    case_collision                  a name that differs from another one by upper and lower case only, where that does not count

Not here: where sides come from, and what is done about a decision. Nothing of what is merged is ever executed.
"""

import os
import subprocess
import tempfile
from typing import BinaryIO, Literal

from elsewhere.changes.model import Side
from elsewhere.errors import Broken
from elsewhere.storage import git
from elsewhere.values import dataclass

__all__ = ["LARGEST", "Decision", "conflict", "decide", "decide_without_base", "equal", "merge_text", "sentence_of_undo"]

LARGEST = 16 << 20  # of a text that is merged
_CHUNK = 1 << 18
_PATIENCE = 60.0

Result = Literal["ours", "theirs", "same", "merged", "conflict"]

_SENTENCES = {
    "deleted_here": "deleted in the sandbox, changed in reality",
    "deleted_there": "changed in the sandbox, deleted in reality",
    "both_added": "made in the sandbox and in reality, with different contents",
    "type_changed": "the sandbox and reality do not agree whether it is a file, a directory or a link",
    "links_differ": "a link to one place in the sandbox, to another one in reality",
    "modes_differ": "the sandbox and reality gave it different permissions",
    "binary": "changed in the sandbox and in reality, and it is no text that could be merged",
    "too_large": "changed in the sandbox and in reality, and too large to be merged",
    "text_conflict": "the sandbox and reality changed the same lines",
    "not_a_file": "neither a file, a directory nor a link, so it can be neither merged nor moved",
    "no_base": "changed in the sandbox and in reality, and what it was before is not known",
    "parent_gone": "the directory that it is in was deleted in reality",
    "parent_replaced": "the directory that it is in is not a directory in reality any more",
    "hidden_here": "changed in reality, in a directory that the sandbox deleted, replaced or moved",
    "not_empty": "deleted or replaced in the sandbox, and in reality it holds something that the sandbox did not delete",
    "not_permitted": "it cannot be read or written in reality with the permissions that we have",
    "link_outside": "a link of the sandbox that leads out of the directory that is being changed",
    "case_collision": "reality takes the name for that of something else: there, upper and lower case are the same",
}

# Where a promotion is taken back: it is what both began with, and the sandbox has no part in it.
_SENTENCES_OF_UNDO = {
    "deleted_here": "made by the promotion, changed since",
    "deleted_there": "changed by the promotion, deleted since",
    "both_added": "deleted by the promotion, made again since, with different contents",
    "type_changed": "what the promotion replaced and what is there now are not both a file, a directory or a link",
    "links_differ": "a link that the promotion changed, and that was changed again since",
    "modes_differ": "the promotion gave it other permissions, and it was given others since",
    "binary": "changed by the promotion and again since, and it is no text that could be merged",
    "too_large": "changed by the promotion and again since, and too large to be merged",
    "text_conflict": "lines that the promotion changed were changed again since",
    "no_base": "changed since the promotion, and what the promotion left there is not known",
    "parent_gone": "the directory that it was in was deleted since the promotion",
    "parent_replaced": "the directory that it was in is not a directory any more",
    "not_empty": "made or changed by the promotion, and it holds something that the promotion did not put there",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """`merged`: the `content` and `mode` to write; content is None for what has none of its own (a directory whose mode was
    merged). `conflict`: `reason` and `sentence`, and, for text, the `content` with both versions marked in it."""

    result: Result
    content: bytes | None = None
    mode: int | None = None
    reason: str = ""
    sentence: str = ""


_OURS, _THEIRS, _SAME = Decision("ours"), Decision("theirs"), Decision("same")


def decide(base: Side | None, ours: Side | None, theirs: Side | None, *, largest: int = LARGEST) -> Decision:
    if equal(ours, theirs):
        return _SAME
    if equal(base, theirs):
        return _OURS
    if equal(base, ours):
        return _THEIRS
    if ours is None or theirs is None:
        return conflict("deleted_here" if ours is None else "deleted_there")
    if base is None and ours.type == theirs.type:
        return conflict("modes_differ") if ours.type == "directory" else conflict("both_added", _both(ours, theirs, largest))
    if base is None:
        return conflict("type_changed")
    if not base.type == ours.type == theirs.type:
        return conflict("type_changed")
    if ours.type == "link":
        return conflict("links_differ")
    if ours.type not in ("file", "directory"):
        return conflict("not_a_file")
    mode = _mode(base.mode, ours.mode, theirs.mode)
    if mode is None:
        return conflict("modes_differ")
    if ours.type == "directory":
        return Decision("merged", None, mode)
    return _files(base, ours, theirs, mode, largest)


def decide_without_base(ours: Side | None, theirs: Side | None, *, theirs_changed: bool) -> Decision:
    """For when only this much is known: whether the other side changed it since."""
    if equal(ours, theirs):
        return _SAME
    return conflict("no_base") if theirs_changed else _OURS


def equal(one: Side | None, other: Side | None) -> bool:
    """Whether they are the same to whoever uses the path: type, permissions, content or target."""
    if one is None or other is None:
        return one is other
    if one.type != other.type:
        return False
    if one.type == "link":  # its own mode means nothing
        return one.target == other.target
    return one.mode == other.mode and (one.type != "file" or _same_content(one, other))


def _files(base: Side, ours: Side, theirs: Side, mode: int, largest: int) -> Decision:
    """Both changed it. Whose content is left alone may still have another mode."""
    if _same_content(ours, theirs):
        return _OURS if ours.mode == mode else _THEIRS
    if _same_content(base, theirs):
        return _taken(ours, mode, largest, _OURS)
    if _same_content(base, ours):
        return _taken(theirs, mode, largest, _THEIRS)
    if max(base.size, ours.size, theirs.size) > largest:
        return conflict("too_large")
    contents = [_content(side, largest) for side in (base, ours, theirs)]
    if any(content is None for content in contents):
        return conflict("too_large")
    before, here, there = (content or b"" for content in contents)
    if b"\0" in before or b"\0" in here or b"\0" in there:
        return conflict("binary")
    merged, clean = merge_text(before, here, there)
    return Decision("merged", merged, mode) if clean else conflict("text_conflict", merged)


def _both(ours: Side, theirs: Side, largest: int) -> bytes | None:
    """Two texts where there was nothing, marked as if that had been an empty one. None: they are no text, or too large, or there
    would be no mark, since one is empty or only the modes differ."""
    if ours.type != "file" or max(ours.size, theirs.size) > largest:
        return None
    here, there = _content(ours, largest), _content(theirs, largest)
    if here is None or there is None or b"\0" in here or b"\0" in there:
        return None
    marked, clean = merge_text(b"", here, there)
    return None if clean else marked


def _taken(side: Side, mode: int, largest: int, whole: Decision) -> Decision:
    """One side's content with the merged mode."""
    if side.mode == mode:
        return whole
    content = _content(side, largest)
    return conflict("too_large") if content is None else Decision("merged", content, mode)


def _mode(base: int, ours: int, theirs: int) -> int | None:
    if ours == theirs or base == theirs:
        return ours
    return theirs if base == ours else None


def conflict(reason: str, content: bytes | None = None) -> Decision:
    """One of the reasons above; from `parent_gone` on, only those can see them who look at more than one path."""
    return Decision("conflict", content, None, reason, _SENTENCES[reason])


def sentence_of_undo(decision: Decision) -> str:
    """The same conflict, between a promotion that is taken back and what is there now; what was said behind it is kept."""
    usual = _SENTENCES[decision.reason]
    return _SENTENCES_OF_UNDO.get(decision.reason, usual) + decision.sentence.removeprefix(usual)


def _same_content(one: Side, other: Side) -> bool:
    if one.size != other.size:
        return False
    with one.open() as first, other.open() as second:
        while True:
            mine, its = _filled(first), _filled(second)
            if mine != its:
                return False
            if not mine:
                return True


def _filled(stream: BinaryIO) -> bytes:
    """A whole piece, even of a stream that hands out less than it is asked for."""
    data = stream.read(_CHUNK)
    while 0 < len(data) < _CHUNK and (more := stream.read(_CHUNK - len(data))):
        data += more
    return data


def _content(side: Side, largest: int) -> bytes | None:
    """None: it is larger than that, whatever its size said before."""
    with side.open() as stream:
        content = stream.read(largest + 1)
    return None if len(content) > largest else content


def merge_text(base: bytes, ours: bytes, theirs: bytes) -> tuple[bytes, bool]:
    """What `git merge-file` makes of three texts, and whether it has no conflicts; otherwise both versions are marked in it."""
    with tempfile.TemporaryDirectory(prefix="elsewhere-merge-") as place:
        for name, content in (("sandbox", ours), ("base", base), ("reality", theirs)):
            with open(os.path.join(place, name), "wb") as stream:
                stream.write(content)
        done = _git(place, "merge-file", "-p", "-q", "sandbox", "base", "reality")
    if not 0 <= done.returncode < 128:
        words = done.stderr.decode("utf-8", "replace").strip()
        raise Broken("merge_failed", f"git merge-file ended with {done.returncode}: {words}", hint="git merge-file --help")
    return done.stdout, done.returncode == 0


def _git(place: str, *words: str) -> "subprocess.CompletedProcess[bytes]":
    """In a directory that is nobody's repository: it finds no configuration, no attributes and no hooks, not even in a parent."""
    above = os.path.dirname(os.path.realpath(place))
    try:
        return git.run(words, purpose="merging", cwd=place, patience=_PATIENCE, more={"GIT_CEILING_DIRECTORIES": above})
    except Broken as error:
        raise Broken("merge_failed", error.message) from error
