"""The report of a race: one file, true, and whatever came out of a sandbox is text in it and nothing else."""

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elsewhere.experiments.report import diff, facts, render, words
from elsewhere.experiments.report.markup import element
from reports import PATCH, attempt, race, search

HOSTILE = "</pre></title></style><script>alert(1)</script><img src=x onerror='alert(2)'>\"'&amp;\x1b]0;title\x07\x1b[31mred\x1b[0m\u202e\x00"
VOID = {"meta", "input", "br", "col"}


class Reader(HTMLParser):
    """Every element with its attributes, the text, and whether all that was opened is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, names)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)

    @property
    def words(self) -> str:
        return "".join(self.text)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def hostile_race() -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Everything that a sandbox, or whoever named an approach, can say."""
    check = {
        "name": HOSTILE, "command": HOSTILE, "required": True, "passed": False, "exit_code": 1, "reason": HOSTILE,
        "note": HOSTILE, "duration_ms": 1, "tests": {"passed": 1, "failed": 2, "skipped": 0}, "output": HOSTILE,
    }  # fmt: skip
    one = attempt(
        HOSTILE,
        command=HOSTILE,
        sandbox=HOSTILE,
        why=HOSTILE,
        reason=HOSTILE,
        checks=[check],
        denials=[{"kind": HOSTILE, "what": HOSTILE, "rule": HOSTILE, "count": 2}],
        put_back=[HOSTILE],
        output=HOSTILE,
    )
    other = attempt(
        f"{HOSTILE}2",
        verified=False,
        changes={"files": 1, "added": 1, "removed": 1, "paths": [{"path": HOSTILE, "kind": HOSTILE}]},
    )
    document = race(
        one, other, winner=HOSTILE, reason=HOSTILE, project=HOSTILE, id=HOSTILE, base={"head": HOSTILE},
        setup={"command": HOSTILE}, score=HOSTILE, verify=[{"name": HOSTILE, "command": HOSTILE, "required": True}],
    )  # fmt: skip
    patch = (
        PATCH.replace("src/shop/cart.py", HOSTILE.replace("\n", ""))
        .replace("import math", HOSTILE)
        .replace("def receipt", HOSTILE)
    )
    return document, {facts.key(one): patch}, {facts.key(one): f"{HOSTILE}\n" * 3}


# -- hostile --------------------------------------------------------------------------------------------------------------------


def test_nothing_that_a_sandbox_says_becomes_markup() -> None:
    page = render(*hostile_race())
    found = Reader(page)
    assert {tag for tag, _ in found.elements} & {"script", "img", "iframe", "object", "base", "form", "link"} == set()
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on") or name == "style"]
    assert found.words.count("<script>alert(1)</script>") > 15  # it is all there, as text
    assert len(found.named("style")) == len(found.named("title")) - len(found.named("circle")) == 1


def test_no_terminal_code_and_no_letter_that_turns_text_around_is_left() -> None:
    page = render(*hostile_race())
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page)
    assert "[31m" not in Reader(page).words.replace(
        "\u20391B\u203a[31m", ""
    )  # in a name a code is shown, from an output it is gone
    assert "red" in page


def test_links_lead_only_into_the_page() -> None:
    found = Reader(render(*hostile_race()))
    places = [attributes.get("id") for _, attributes in found.elements if attributes.get("id")]
    assert len(set(places)) == len(places)
    for _, attributes in found.elements:
        for name in ("href", "src", "action", "xlink:href", "srcset", "poster", "data"):
            if name in attributes:
                assert name == "href"
                assert str(attributes["href"])[1:] in places, attributes
                assert str(attributes["href"]).startswith("#")
    assert "url(" not in render(*hostile_race())
    assert "@import" not in render(*hostile_race())


def test_the_policy_allows_one_style_by_its_hash_and_nothing_else() -> None:
    page = render(*hostile_race())
    (policy,) = [one["content"] for one in Reader(page).named("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    style = page[page.index("<style>") + 7 : page.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert page.index("Content-Security-Policy") < page.index("<title>") < page.index("<style>")


def test_a_hostile_tree_is_text_as_well() -> None:
    document = search()
    for node in document["experiment"]["tree"]["nodes"]:
        node["step"] = node["why"] = HOSTILE
    found = Reader(render(document, {"best": PATCH}, {}))
    assert "script" not in {tag for tag, _ in found.elements}
    assert "<script>alert(1)</script>" in found.words


def test_elements_escape_children_and_attributes() -> None:
    assert (
        element("p", "<b>", element("i", "&"), title='"<', hidden=True, lang=None)
        == '<p title="&quot;&lt;" hidden>&lt;b&gt;<i>&amp;</i></p>'
    )


# -- well formed and accessible -------------------------------------------------------------------------------------------------


DOCUMENTS = {
    "won": race(attempt("fsum"), attempt("round", verified=False, rank=2), winner="fsum"),
    "none": race(attempt("a", verified=False), attempt("b", verified=False, rank=2)),
    "running": race(attempt("a", state="running", verified=False, rank=None, ended_at=None, duration_ms=None, checks=[]), state="running"),
    "nothing began": race(
        {"name": "a", "attempt": 1, "command": None, "sandbox": None, "state": "waiting", "verified": False, "rank": None, "score": None,
         "exit_code": None, "reason": None, "duration_ms": None, "started_at": None, "ended_at": None, "peak_memory_bytes": None,
         "cpu_ms": None, "changes": None, "denials": [], "why": "", "checks": [], "output": "", "samples": []},
        state="interrupted", reason="", setup=None, verify=[], score=None, base={},
    ),
    "no attempt": race(),
    "search": search(),
    "search that found nothing": search(0, 0),
}  # fmt: skip
DOCUMENTS["search that found nothing"]["experiment"]["tree"]["best"] = None


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_page_is_well_formed_and_its_headings_are_in_order(document: dict[str, Any]) -> None:
    page = render(document, {"fsum-1": PATCH, "best": PATCH}, {})
    found = Reader(page)
    assert page.startswith('<!doctype html>\n<html lang="en">')
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= sooner + 1 for sooner, later in pairwise(levels)), levels
    assert all(one.get("scope") for one in found.named("th"))
    assert all(one.get("aria-label") for one in found.named("svg"))
    assert "None" not in found.words.replace("None of", "")


def test_the_outcome_comes_first_with_the_reason_and_what_to_type() -> None:
    said = Reader(render(DOCUMENTS["won"], {}, {})).words
    order = [
        "fsum won",
        "Its score 96.2 is higher",
        "elsewhere experiments promote exp-7c1d20",
        "Comparison",
        "Approaches",
        "Timeline",
        "Memory",
    ]
    places = [said.index(text, said.index("/home/ann")) for text in order]
    assert places == sorted(places)


def test_a_promoted_winner_can_be_taken_back_and_an_interrupted_race_gone_on_with() -> None:
    promoted = race(attempt("fsum"), winner="fsum", promotion="p1234")
    assert "elsewhere undo p1234" in Reader(render(promoted, {}, {})).words
    assert "experiments promote" not in Reader(render(promoted, {}, {})).words
    assert "elsewhere experiments resume exp-7c1d20" in Reader(render(DOCUMENTS["nothing began"], {}, {})).words


def test_the_attempt_that_won_is_marked_and_no_other_of_its_name() -> None:
    attempts = [attempt("fsum", 1, rank=2), attempt("fsum", 2, rank=1), attempt("other", rank=3)]
    page = render(race(*attempts, winner="fsum", winner_attempt=2), {}, {})
    assert "fsum #2 won" in page
    (row,) = re.findall(r'<tr role="row" class="won">.*?</tr>', page)
    assert "fsum #2" in row
    assert page.index("fsum #2", page.index("Approaches")) < page.index("fsum #1", page.index("Approaches"))


def test_the_table_says_what_the_document_says() -> None:
    one = attempt(
        "a",
        verified=False,
        score=0.1 + 0.2,
        duration_ms=61_000,
        peak_memory_bytes=5 << 20,
        denials=[{"what": "x", "count": 3}, {"what": "y"}],
    )
    page = render(race(one), {}, {})
    row = page[page.index("<tbody") : page.index("</tbody>")]
    for text in (
        "not verified",
        "0.3",
        "12 passed",
        "2 failed",
        "1 min 1 s",
        "5.0 MiB",
        "1 file, +4 \N{MINUS SIGN}3",
        ">4<",
        "2 of 14 tests failed",
    ):
        assert text in row, text
    one["checks"][0]["note"] = "fewer tests ran than in the base"
    assert "fewer tests ran than in the base" in render(race(one), {}, {})


# -- what is cut is said --------------------------------------------------------------------------------------------------------


def test_a_huge_output_is_cut_and_says_so() -> None:
    said = "".join(f"line {number}\n" for number in range(100_000))
    page = render(race(attempt("a")), {}, {"a-1": said})
    assert len(page) < 60_000
    assert "99,800 lines left out here." in page
    for number in (0, 39, 99_840, 99_999):
        assert re.search(rf"\bline {number}\b", page), number
    for number in (40, 99_839):
        assert not re.search(rf"\bline {number}\b", page), number


def test_a_line_without_end_is_cut_and_says_so() -> None:
    page = render(race(attempt("a")), {"a-1": PATCH.replace("import math", "y" * 50_000)}, {"a-1": "x" * 1_000_000})
    assert "and 999,000 more letters" in page
    assert "and 49,400 more letters" in page
    assert len(page) < 60_000


def test_a_huge_diff_is_cut_and_says_how_to_see_all_of_it() -> None:
    body = "".join(f"+line {number}\n" for number in range(30_000))
    patch = f"diff --git a/big b/big\nnew file mode 100644\n--- /dev/null\n+++ b/big\n@@ -0,0 +1,30000 @@\n{body}" + PATCH
    page = render(race(attempt("a", sandbox="box-1")), {"a-1": patch}, {})
    assert "28,000 more lines left out here." in page
    assert "1 more file left out here." in page
    assert "elsewhere diff box-1 --patch" in page
    assert page.count("<tr") < 2_100


def test_a_patch_of_many_megabytes_is_read_only_to_a_point() -> None:
    patch = "".join(PATCH.replace("cart", f"cart{number}") for number in range(9_000))
    page = render(race(attempt("a")), {"a-1": patch}, {})
    assert "more letters of the patch left out here." in page
    assert len(page) < 1_500_000


def test_fifty_approaches_share_what_there_is() -> None:
    attempts = [attempt(f"a{number}", rank=number) for number in range(50)]
    long = "diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -0,0 +1,5000 @@\n" + "+x\n" * 5000
    page = render(race(*attempts), {facts.key(one): long for one in attempts}, {})
    assert page.count("4,520 more lines left out here.") == 50


def test_what_is_short_is_not_cut() -> None:
    assert "left out here" not in render(race(attempt("a")), {"a-1": PATCH}, {"a-1": "one\ntwo\n" * 90})


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("10%\r50%\r100%\ndone\r\n", "100%\ndone\n"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;never ends\nnext", "\nnext"),
        ("a\x1b[", "a"),
        ("\x9b31mred", "red"),
        ("tab\tnul\x00bell\x07", "tab\tnul\u203900\u203abell\u203907\u203a"),
        ("abc\u202egnp.exe", "abc\u2039202E\u203agnp.exe"),
        ("half \ud83d letter", "half \u2039D83D\u203a letter"),
    ],
)
def test_output_is_what_a_terminal_would_show_in_the_end(said: str, shown: str) -> None:
    assert words.plain(said) == shown


def test_a_long_line_of_carriage_returns_takes_no_time() -> None:
    assert words.plain("x" * 2_000_000 + "\r" * 2_000_000 + "end") == "end"


# -- diffs ----------------------------------------------------------------------------------------------------------------------


def test_lines_have_the_numbers_that_they_have_in_the_files() -> None:
    (found,) = diff.files(PATCH)
    assert (found.name, found.added, found.removed) == ("src/shop/cart.py", 4, 3)
    rows = [row for hunk in found.hunks for row in hunk.rows]
    assert rows[0] == diff.Row(None, (1, "import math"))
    assert rows[2] == diff.Row((1, "from shop.prices import Price"), (3, "from shop.prices import Price"), same=True)
    assert diff.Row((5, "    return sum(prices)"), (7, "    return math.fsum(prices)")) in rows
    assert rows[-4:-2] == [
        diff.Row((41, '    lines.append("-" * 20)'), (43, '    lines.append(f"total {total(prices):.2f}")')),
        diff.Row((42, '    lines.append(f"total {total(prices)}")'), None),
    ]


def test_lines_that_look_like_heads_are_lines() -> None:
    patch = (
        "diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,3 +1,2 @@\n--- a/etc/passwd\n-diff --git a/x b/x\n--\n+++ b/etc/shadow\n+@@ -1 +1 @@\n"
        "diff --git a/g b/g\nold mode 100644\nnew mode 100755\n"
    )
    first, second = diff.files(patch)
    assert (first.name, first.added, first.removed) == ("f", 2, 3)
    assert [row.left and row.left[1] for row in first.hunks[0].rows] == ["-- a/etc/passwd", "diff --git a/x b/x", "-"]
    assert (second.name, second.notes) == ("g", ["old mode 100644", "new mode 100755"])


def test_git_itself_is_read(tmp_path: Path) -> None:
    """New, deleted, binary, oddly named, without a newline at the end: as git writes it."""

    def git(*line: str) -> str:
        own = {"PATH": "/usr/bin:/bin", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": str(tmp_path)}
        return subprocess.run(["git", *line], cwd=tmp_path, env=own, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "gone").write_text("1\n2\n")
    (tmp_path / "end").write_text("no newline")
    (tmp_path / "picture").write_bytes(b"\0\1\2")
    git("add", "-A")
    before = git("write-tree").strip()
    (tmp_path / "gone").unlink()
    (tmp_path / "end").write_text("no newline\nmore")
    (tmp_path / "picture").write_bytes(b"\0\1\3")
    (tmp_path / 'café "<b>"\n').write_text("x\n")
    (tmp_path / "empty file").write_text("")
    git("add", "-A")
    found = {one.name: one for one in diff.files(git("diff", "--binary", "--cached", before))}
    assert set(found) == {"gone", "end", "picture", 'café "<b>"\n', "empty file"}
    assert (found["gone"].removed, found["gone"].notes) == (2, ["deleted file mode 100644"])
    assert (found["end"].added, found["end"].removed) == (2, 1)
    assert found["picture"].notes == ["not text, not shown"]
    assert found['café "<b>"\n'].added == 1
    assert found["empty file"].rows == 0


@pytest.mark.parametrize(
    "patch",
    [
        "",
        "nonsense\n",
        "@@ -1 +1 @@\n",
        "diff --git\n",
        "--- \n+++ \n@@ -1,9 +1,9 @@\n x",
        "diff --git a/f b/f\n@@ -999999999,999999999 +1 @@\n-x\n",
    ],
)
def test_what_is_no_patch_is_passed_over(patch: str) -> None:
    Reader(f"<main>{diff.draw(patch, 100, 'all')}</main>")


def test_within_a_line_whole_words_are_marked() -> None:
    drawn = diff.draw("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-    return sum(prices)\n+    return fsum(prices)\n", 9, "")
    assert "return <mark>sum</mark>(prices)" in drawn
    assert "return <mark>fsum</mark>(prices)" in drawn


# -- pictures -------------------------------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_attempts_took() -> None:
    one = attempt("a", started_at=100.0, ended_at=110.0, duration_ms=5_000)
    other = attempt("b", started_at=110.0, ended_at=120.0, duration_ms=10_000)
    page = render(race(one, other, created_at=100.0), {}, {})
    bars = re.findall(r'<rect x="([\d.]+)" y="\d" width="([\d.]+)" height="\d+" class="(\w+)', page)
    assert bars == [("0.0", "250.0", "command"), ("250.0", "250.0", "checks"), ("500.0", "500.0", "command")]


def test_plots_have_one_scale_and_hide_no_peak() -> None:
    samples = [[step * 0.01, 100 if step == 1501 else 10, step * 10] for step in range(3000)]
    page = render(race(attempt("a", samples=samples), attempt("b", samples=[[0, 0, 0], [10, 50, 10_000]])), {}, {})
    first, second = re.findall(r'aria-label="memory[^"]*"><path d="[^"]*"[^>]*/><path d="M([^"]*)"', page)
    assert len(first.split("L")) <= 400
    assert min(float(place.split()[1]) for place in first.split("L")) == 4.0
    assert second.split("L")[-1] == "333.4 52.0"


def test_samples_that_make_no_sense_are_left_out() -> None:
    odd = [[0, 1, 1], [1, float("nan"), 1], [2, None, None], [2, 5, 5], [1, 5, 5], [3, float("inf"), 1], [4, -1, 0], [5, 9, 9]]
    assert "nan" not in (page := render(race(attempt("a", samples=odd)), {}, {}))
    assert "inf" not in Reader(page).words
    Reader(render(race(attempt("a", samples=[[0, 0, 0]])), {}, {}))


def test_the_tree_has_a_place_for_every_node_and_marks_the_way_to_the_best() -> None:
    page = render(search(4, 3), {"best": PATCH}, {})
    places = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page)
    assert len(places) == len(set(places)) == 13
    assert page.count('class="link best"') == 3
    assert "Best: score 4 after 3 steps" in page
    assert "What the best changed" in page


# -- the file itself ------------------------------------------------------------------------------------------------------------


def test_the_style_is_in_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "elsewhere/experiments/report/style.css" in archive.namelist()
