"""A patch as git writes it, read line by line and drawn in two columns: what was on the left, what is on the right.

What stands in a hunk is counted, as its head says, and never guessed from how a line begins: a deleted line may look like the
head of another file. What cannot be read as a patch is passed over, and said.
"""

import re
from collections.abc import Iterator
from dataclasses import field
from itertools import zip_longest

from elsewhere import units
from elsewhere.experiments.report.markup import Markup, element, joined
from elsewhere.experiments.report.words import line
from elsewhere.values import dataclass

__all__ = ["File", "Hunk", "Row", "draw", "files"]

_FOLDED_FROM = 60  # rows of a file
_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@ ?(.*)")
_ESCAPED = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_WORD = re.compile(r"\w")
_LONGEST_LINE = 600
_LONGEST_PATCH = 4_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """A line on the left, on the right, or on both; `same` if nothing happened to it."""

    left: tuple[int, str] | None
    right: tuple[int, str] | None
    same: bool = False


@dataclass(slots=True)
class Hunk:
    where: str
    rows: list[Row] = field(default_factory=list)


@dataclass(slots=True)
class File:
    name: str
    notes: list[str] = field(default_factory=list)
    hunks: list[Hunk] = field(default_factory=list)
    added: int = 0
    removed: int = 0

    @property
    def rows(self) -> int:
        return sum(len(hunk.rows) for hunk in self.hunks)


# -- reading --------------------------------------------------------------------------------------------------------------------


def files(patch: str) -> Iterator[File]:
    """One after the other, so that whoever has seen enough can stop."""
    reader = _Reader(patch.split("\n"))
    while (found := reader.file()) is not None:
        yield found


class _Reader:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._at = 0

    def file(self) -> File | None:
        """The next one, whole."""
        while self._at < len(self._lines) and not self._lines[self._at].startswith(("diff --git ", "--- ")):
            self._at += 1
        if self._at >= len(self._lines):
            return None
        found = File(_name_of_both(self._lines[self._at]))
        self._head(found)
        while self._at < len(self._lines) and (head := _HUNK.fullmatch(self._lines[self._at])):
            self._at += 1
            self._hunk(found, head)
        return found

    def _head(self, found: File) -> None:
        began = self._at
        while self._at < len(self._lines):
            text = self._lines[self._at]
            if text.startswith("@@ ") or (text.startswith("diff --git ") and self._at > began):
                return
            self._at += 1
            if text.startswith(("--- ", "+++ ")) and (name := _name(text[4:])) is not None:
                found.name = name
            elif text.startswith(("new file", "deleted file", "rename ", "copy ", "old mode", "new mode")):
                found.notes.append(text)
            elif text.startswith(("GIT binary patch", "Binary files ")):
                found.notes.append("not text, not shown")

    def _hunk(self, found: File, head: re.Match[str]) -> None:
        left, right = int(head[1]), int(head[3])
        left_end, right_end = left + int(head[2] or 1), right + int(head[4] or 1)
        hunk = Hunk(f"line {right or left}" + (f" · {head[5]}" if head[5] else ""))
        gone: list[tuple[int, str]] = []
        new: list[tuple[int, str]] = []

        def settle() -> None:
            hunk.rows.extend(Row(one, other) for one, other in zip_longest(gone, new))
            gone.clear()
            new.clear()

        while self._at < len(self._lines) and (left < left_end or right < right_end or self._lines[self._at].startswith("\\")):
            sign, text = self._lines[self._at][:1], self._lines[self._at][1:]
            if sign == "-" and left < left_end:
                if new:
                    settle()
                gone.append((left, text))
                left, found.removed = left + 1, found.removed + 1
            elif sign == "+" and right < right_end:
                new.append((right, text))
                right, found.added = right + 1, found.added + 1
            elif sign in (" ", "") and left < left_end and right < right_end:
                settle()
                hunk.rows.append(Row((left, text), (right, text), same=True))
                left, right = left + 1, right + 1
            elif sign != "\\":  # says that there is no newline at the end
                break
            self._at += 1
        settle()
        found.hunks.append(hunk)


def _name(text: str) -> str | None:
    """Of `a/src/x`, `"b/caf\\303\\251"`, or `/dev/null`, which is none."""
    text = text.partition("\t")[0]
    if text == "/dev/null":
        return None
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = _ESCAPED.sub(_unescaped, text[1:-1].encode("utf-8", "replace")).decode("utf-8", "replace")
    return text[2:] if text.startswith(("a/", "b/")) else text


def _unescaped(found: re.Match[bytes]) -> bytes:
    if len(found[1]) == 3:
        return bytes([int(found[1], 8) & 0xFF])
    return _LETTERS.get(found[1], found[1])


def _name_of_both(text: str) -> str:
    """Of a file that has neither `---` nor `+++`, both names are the same, so they are halves of what is said."""
    said = text.removeprefix("diff --git ").removeprefix("--- ")
    half = said[: len(said) // 2]
    return _name(half if said.startswith(("a/", '"a/')) else said) or said


# -- drawing --------------------------------------------------------------------------------------------------------------------


def draw(patch: str, most_rows: int, whole: str) -> Markup:
    """All files of it, up to so many rows. `whole`: what shows the rest."""
    drawn, left, unseen = [], most_rows, 0
    for found in files(patch[:_LONGEST_PATCH]):
        if left <= 0:
            unseen += 1
            continue
        drawn.append(_file(found, left, whole))
        left -= max(1, found.rows)
    if unseen:
        drawn.append(_missing(units.count(unseen, "more file"), whole))
    if len(patch) > _LONGEST_PATCH:
        drawn.append(_missing(f"{len(patch) - _LONGEST_PATCH:,} more letters of the patch", whole))
    if not drawn:
        drawn.append(element("p", "The patch could not be read." if patch.strip() else "No text changed.", class_="quiet"))
    return element("div", *drawn, class_="diff")


def _file(found: File, most_rows: int, whole: str) -> Markup:
    head = element(
        "summary",
        element("span", line(found.name, 300), class_="path"),
        element("span", f"+{found.added:,}", class_="plus") if found.added else None,
        element("span", f"\N{MINUS SIGN}{found.removed:,}", class_="minus") if found.removed else None,
        element("span", "; ".join(line(note, 200) for note in found.notes), class_="quiet") if found.notes else None,
    )
    if not found.rows:
        return element("details", head, element("p", "No lines to show.", class_="quiet"))
    body, left = [], most_rows
    for hunk in found.hunks:
        if left <= 0:
            break
        body.append(element("tr", element("th", line(hunk.where, 200), colspan="4", scope="rowgroup"), class_="hunk"))
        body.extend(_row(row) for row in hunk.rows[:left])
        left -= len(hunk.rows)
    table = element(
        "table",
        element("caption", f"Changes in {line(found.name, 300)}", class_="unseen"),
        element("colgroup", *(element("col", class_=kind) for kind in ("number", "text", "number", "text"))),
        element("thead", element("tr", *_heads()), class_="unseen"),
        element("tbody", *body),
    )
    note = _missing(units.count(found.rows - most_rows, "more line"), whole) if found.rows > most_rows else None
    return element("details", head, table, note, open=found.rows <= _FOLDED_FROM)


def _heads() -> Iterator[Markup]:
    for words in ("line before", "before", "line after", "after"):
        yield element("th", words, scope="col")


def _row(row: Row) -> Markup:
    if row.same:
        return element("tr", *_side(row.left, "", ""), *_side(row.right, "", ""), class_="same")
    if row.left and row.right:
        old, new = _marked(row.left[1], row.right[1])
        return element("tr", *_side(row.left, "gone", old), *_side(row.right, "new", new))
    return element("tr", *_side(row.left, "gone", ""), *_side(row.right, "new", ""))


def _side(side: tuple[int, str] | None, kind: str, shown: str) -> tuple[Markup, Markup]:
    if side is None:
        return element("td", class_="number none"), element("td", class_="none")
    number, text = side
    return element("td", number, class_=f"number {kind}".rstrip()), element(
        "td", shown or line(text, _LONGEST_LINE), class_=kind or None
    )


def _marked(old: str, new: str) -> tuple[Markup, Markup]:
    """What is different within a line, where the rest of it is the same."""
    old, new = line(old, _LONGEST_LINE), line(new, _LONGEST_LINE)
    front = _whole_words(_same(old, new), old, new)
    back = _whole_words(_same(old[front:][::-1], new[front:][::-1]), old[::-1], new[::-1])
    if (front + back) * 2 < max(len(old), len(new)):
        return joined(old), joined(new)
    return _mark(old, front, back), _mark(new, front, back)


def _same(old: str, new: str) -> int:
    """How many letters both begin with."""
    return next((at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), min(len(old), len(new)))


def _whole_words(same: int, old: str, new: str) -> int:
    """How far both are the same, without the beginning of a word that goes on differently."""
    while same and _WORD.match(old, same - 1) and any(_WORD.match(text, same) for text in (old, new)):
        same -= 1
    return same


def _mark(text: str, front: int, back: int) -> Markup:
    end = len(text) - back
    return joined(text[:front], element("mark", text[front:end]) if end > front else None, text[end:])


def _missing(what: str, whole: str) -> Markup:
    return element("p", f"{what} left out here. ", joined("All of it: ", element("code", whole)) if whole else None, class_="cut")
