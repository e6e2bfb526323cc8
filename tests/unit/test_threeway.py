"""The three-way decision about one path: what is taken, what is merged, what is a conflict, and that git's own merge agrees."""

import io
import itertools
import os
import random
import stat
import subprocess
from pathlib import Path

import pytest

from elsewhere.changes.model import Place, Side
from elsewhere.changes.sides import sides_of
from elsewhere.changes.threeway import LARGEST, Decision, decide, decide_without_base, equal, merge_text
from elsewhere.errors import Unavailable


def about(kind: int, mode: int, size: int = 0) -> os.stat_result:
    return os.stat_result((kind | mode, 0, 0, 1, 0, 0, size, 0, 0, 0))


def file(content: bytes = b"", mode: int = 0o644) -> Side:
    return Side(about(stat.S_IFREG, mode, len(content)), content=content)


def link(target: str) -> Side:
    return Side(about(stat.S_IFLNK, 0o777), target=target)


def directory(mode: int = 0o755) -> Side:
    return Side(about(stat.S_IFDIR, mode))


def fifo() -> Side:
    return Side(about(stat.S_IFIFO, 0o600))


LINES = b"".join(b"line %d\n" % number for number in range(20))
TOP, BOTTOM = LINES.replace(b"line 1\n", b"top\n"), LINES.replace(b"line 18\n", b"bottom\n")
EVERY = {
    "nothing": None,
    "file": file(LINES),
    "other": file(b"other\n"),
    "executable": file(LINES, 0o755),
    "binary": file(b"a\0b"),
    "link": link("a"),
    "link elsewhere": link("b"),
    "directory": directory(),
    "closed directory": directory(0o700),
    "fifo": fifo(),
}


@pytest.mark.parametrize("base", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("side", EVERY.values(), ids=EVERY)
def test_what_only_one_side_changed_is_taken_and_equal_sides_are_the_same(base: Side | None, side: Side | None) -> None:
    assert decide(base, side, side).result == "same"
    changed = not equal(base, side)
    assert decide(base, side, base).result == ("ours" if changed else "same")
    assert decide(base, base, side).result == ("theirs" if changed else "same")


def mirrored(decision: Decision) -> Decision:
    swap = {"ours": "theirs", "theirs": "ours", "deleted_here": "deleted_there", "deleted_there": "deleted_here"}
    return Decision(swap.get(decision.result, decision.result), None, decision.mode, swap.get(decision.reason, decision.reason))


@pytest.mark.parametrize("base", EVERY.values(), ids=EVERY)
def test_the_decision_is_the_same_the_other_way_round(base: Side | None) -> None:
    for one, other in itertools.combinations(EVERY.values(), 2):
        forth, back = decide(base, one, other), decide(base, other, one)
        other_way = mirrored(back)
        assert (forth.result, forth.mode, forth.reason) == (other_way.result, other_way.mode, other_way.reason)
        assert bool(forth.reason) == bool(forth.sentence) == (forth.result == "conflict")


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "reason"),
    [
        (file(LINES), None, file(TOP), "deleted_here"),
        (file(LINES), file(TOP), None, "deleted_there"),
        (file(LINES), None, file(LINES, 0o755), "deleted_here"),
        (None, file(b"a\n"), file(b"b\n"), "both_added"),
        (None, link("a"), link("b"), "both_added"),
        (None, file(b"a\n"), link("a"), "type_changed"),
        (file(LINES), file(TOP), directory(), "type_changed"),
        (file(LINES), link("a"), file(TOP), "type_changed"),
        (directory(), file(TOP), file(BOTTOM), "type_changed"),
        (link("a"), link("b"), link("c"), "links_differ"),
        (file(LINES), file(LINES, 0o755), file(LINES, 0o600), "modes_differ"),
        (directory(), directory(0o700), directory(0o777), "modes_differ"),
        (file(b"a\0"), file(b"b\0"), file(b"c\0"), "binary"),
        (file(b"text\n"), file(b"TEXT\n"), file(b"c\0"), "binary"),
        (file(LINES), file(TOP), file(LINES.replace(b"line 1\n", b"first\n")), "text_conflict"),
        (fifo(), Side(about(stat.S_IFIFO, 0o640)), Side(about(stat.S_IFIFO, 0o666)), "not_a_file"),
    ],
)
def test_what_cannot_be_merged_is_a_conflict(base: Side | None, ours: Side | None, theirs: Side | None, reason: str) -> None:
    found = decide(base, ours, theirs)
    assert (found.result, found.reason, found.mode) == ("conflict", reason, None)


def test_text_that_both_changed_in_different_places_is_merged() -> None:
    found = decide(file(LINES), file(TOP), file(BOTTOM))
    expected = TOP.replace(b"line 18\n", b"bottom\n")
    assert found == Decision("merged", expected, 0o644)


def test_a_conflict_of_text_has_both_versions_marked_in_it() -> None:
    found = decide(file(b"a\n"), file(b"b\n"), file(b"c\n"))
    assert found.content == b"<<<<<<< sandbox\nb\n=======\nc\n>>>>>>> reality\n"


def test_modes_are_merged_by_themselves() -> None:
    assert decide(file(LINES), file(LINES, 0o755), file(TOP)) == Decision("merged", TOP, 0o755)
    assert decide(file(LINES), file(TOP), file(LINES, 0o755)) == Decision("merged", TOP, 0o755)
    assert decide(file(LINES), file(TOP, 0o755), file(TOP)) == Decision("ours")
    assert decide(file(LINES), file(TOP, 0o755), file(LINES, 0o755)) == Decision("ours")
    both = decide(file(LINES), file(TOP, 0o755), file(BOTTOM))
    assert (both.result, both.mode) == ("merged", 0o755)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_ends_of_lines_stay_as_they_are(end: bytes) -> None:
    base, top, bottom = (text.replace(b"\n", end) for text in (LINES, TOP, BOTTOM))
    found = decide(file(base), file(top), file(bottom))
    assert found.content == top.replace(b"line 18" + end, b"bottom" + end)


def test_a_last_line_without_an_end_stays_so() -> None:
    base = LINES + b"last"
    found = decide(file(base), file(base.replace(b"line 1\n", b"top\n")), file(base))
    assert found == Decision("ours")
    merged = decide(file(base), file(base.replace(b"line 1\n", b"top\n")), file(base.replace(b"line 10\n", b"ten\n")))
    assert merged.content == base.replace(b"line 1\n", b"top\n").replace(b"line 10\n", b"ten\n")
    added = decide(file(base), file(base + b"\n"), file(base.replace(b"line 1\n", b"top\n")))
    assert added.content == base.replace(b"line 1\n", b"top\n") + b"\n"


def test_converting_every_line_here_and_changing_one_there_is_a_conflict() -> None:
    assert decide(file(LINES), file(LINES.replace(b"\n", b"\r\n")), file(TOP)).reason == "text_conflict"


def test_what_is_too_large_is_not_merged_but_can_be_taken() -> None:
    assert decide(file(LINES), file(TOP), file(BOTTOM), largest=len(LINES) - 5).reason == "too_large"
    assert decide(file(LINES), file(TOP), file(LINES), largest=1).result == "ours"
    assert LARGEST >= 1 << 20


def test_a_file_that_grows_while_it_is_read_is_too_large() -> None:
    class Growing(Side):
        __slots__ = ()

        def open(self) -> io.BytesIO:  # type: ignore[override]
            return io.BytesIO(b"x\n" * 500)

    growing = Growing(about(stat.S_IFREG, 0o644, 10))
    assert decide(file(LINES[:30]), growing, file(b"other\n"), largest=100).reason == "too_large"


def test_without_a_base_only_what_the_other_side_left_alone_is_taken() -> None:
    assert decide_without_base(file(TOP), file(LINES), theirs_changed=False).result == "ours"
    assert decide_without_base(file(TOP), file(BOTTOM), theirs_changed=True).reason == "no_base"
    assert decide_without_base(file(TOP), file(TOP), theirs_changed=True).result == "same"
    assert decide_without_base(None, None, theirs_changed=True).result == "same"


def edited(text: list[bytes], dice: random.Random) -> list[bytes]:
    result = list(text)
    for _ in range(dice.randint(0, 3)):
        place = dice.randrange(len(result) + 1)
        what = dice.randrange(3)
        if what == 0:
            result[place:place] = [b"new %d\n" % dice.randrange(4)]
        elif what == 1 and place < len(result):
            del result[place]
        elif place < len(result):
            result[place] = b"other %d\n" % dice.randrange(4)
    if result and dice.random() < 0.2:
        result[-1] = result[-1].rstrip(b"\n")
    return result


@pytest.mark.parametrize("seed", range(8))
def test_random_texts_are_merged_as_git_merges_them(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    merged = conflicts = 0
    for _ in range(12):
        base = [b"line %d\n" % number for number in range(dice.randint(0, 30))]
        ours, theirs = edited(base, dice), edited(base, dice)
        texts = [b"".join(lines) for lines in (ours, base, theirs)]
        for name, text in zip(("ours", "base", "theirs"), texts, strict=True):
            (tmp_path / name).write_bytes(text)
        line = ["git", "merge-file", "-p", "-L", "sandbox", "-L", "base", "-L", "reality", "ours", "base", "theirs"]
        real = subprocess.run(line, cwd=tmp_path, capture_output=True)
        found = decide(file(texts[1]), file(texts[0]), file(texts[2]))
        if found.result in ("same", "ours", "theirs"):
            content = texts[2] if found.result == "theirs" else texts[0]
        else:
            assert found.content is not None
            content = found.content
        assert content == real.stdout
        assert (found.result == "conflict") == (real.returncode != 0)
        if found.result == "merged":
            merged += 1
            for line_ in set(ours) - set(base):  # nothing that anybody wrote is lost
                assert line_.rstrip(b"\n") in content
            for line_ in set(theirs) - set(base):
                assert line_.rstrip(b"\n") in content
        conflicts += found.result == "conflict"
    assert merged or conflicts, "this seed proves nothing"


def test_nobodys_configuration_decides_how_texts_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository around the directory in which texts are merged, with a driver, attributes and another style of conflicts."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    touched = tmp_path / "touched"
    (tmp_path / ".gitattributes").write_text("* merge=evil\n")
    config = (
        f'[merge]\n\tconflictStyle = diff3\n[merge "evil"]\n\tdriver = touch {touched}\n[core]\n\tfsmonitor = touch {touched}\n'
    )
    with (tmp_path / ".git" / "config").open("a") as stream:
        stream.write(config)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".gitconfig").write_text(config)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "merge.conflictStyle")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "diff3")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    merged, clean = merge_text(b"a\n", b"b\n", b"c\n")
    assert (clean, b"|||||||" in merged) == (False, False)
    assert not touched.exists()
    assert [entry for entry in tmp_path.iterdir() if entry.name.startswith("elsewhere-merge-")] == []


def test_without_git_nothing_is_merged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="git is not installed"):
        decide(file(LINES), file(TOP), file(BOTTOM))


# -- sides ----------------------------------------------------------------------------------------------------------------------


def read(side: Side) -> bytes:
    with side.open() as stream:
        return stream.read()


def test_the_sides_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"content")
    (tmp_path / "tree" / "link").symlink_to("file")
    (tmp_path / "tree" / "outside").symlink_to(tmp_path)
    side = sides_of([str(tmp_path / "tree")])
    found, linked = side("file"), side("link")
    assert found is not None
    assert linked is not None
    assert (found.type, found.mode, found.size) == ("file", 0o644, 7)
    assert read(found) == b"content"
    assert (linked.type, linked.target) == ("link", "file")
    assert side("no-such") is None
    assert side("file/below") is None
    assert side("outside/tree/file") is None, "no link is followed"


@pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts are made by root")
def test_the_sides_of_layers(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for layer in (old, new):
        layer.mkdir()
        (layer / "directory").mkdir()
    (old / "kept").write_text("old")
    (old / "changed").write_text("old")
    (new / "changed").write_text("new")
    (old / "directory" / "gone").write_text("old")
    os.mknod(new / "directory" / "gone", stat.S_IFCHR, 0)
    (old / "was").mkdir()
    (old / "was" / "inside").write_text("old")
    (new / "was").write_text("a file now")
    (old / "all").mkdir()
    (old / "all" / "gone").write_text("old")
    os.mknod(new / "all", stat.S_IFCHR, 0)
    side = sides_of([str(new), str(old)])

    def content(path: str) -> bytes | None:
        found = side(path)
        return None if found is None else read(found)

    assert (content("kept"), content("changed")) == (b"old", b"new")
    assert [content(path) for path in ("directory/gone", "was/inside", "all/gone", "all")] == [None] * 4
    assert content("was") == b"a file now"


def test_two_sides_of_real_files_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    for name, text in (("a", b"x" * 300_000), ("b", b"x" * 300_000), ("c", b"x" * 299_999 + b"y")):
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(0o644)

    def side(name: str) -> Side:
        return Side((tmp_path / name).stat(), Place(str(tmp_path), name))

    assert equal(side("a"), side("b"))
    assert not equal(side("a"), side("c"))
