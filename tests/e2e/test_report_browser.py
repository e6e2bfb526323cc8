"""The report in a real browser: drawn, in light and in dark, on a desk and on a phone, without a complaint and without asking
anybody for anything."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import Browser, Page, browser
from elsewhere.experiments.report import render
from reports import PATCH, attempt, race, search

LONG = "a_name_without_any_place_to_break_it_" * 6
SCRIPT = "<script>document.title='broken into'</script><img src=http://127.0.0.1:9/x onerror=\"document.title='broken into'\">"


def pages() -> dict[str, str]:
    """Few, many, hostile and wide ones, and a search."""
    three = [attempt("fsum"), attempt("decimal", rank=2), attempt("round", verified=False, rank=3)]
    twenty = [attempt(f"approach-{number // 2}", 1 + number % 2, rank=number + 1, verified=number < 9) for number in range(20)]
    wide = attempt(
        LONG, command=LONG * 9, sandbox=LONG, why=LONG, output=f"{LONG * 20}\n{SCRIPT}\n", denials=[{"what": LONG, "rule": LONG}]
    )
    patch = PATCH.replace("src/shop/cart.py", f"src/{LONG}.py").replace("import math", f"{LONG * 3}{SCRIPT}")
    return {
        "three": render(race(*three, winner="fsum"), {"fsum-1": PATCH, "decimal-1": PATCH}, {"round-1": "line\n" * 5000}),
        "twenty": render(race(*twenty, winner="approach-0"), {f"approach-{one}-1": PATCH for one in range(10)}, {}),
        "hostile": render(race(wide, winner=LONG, reason=LONG, project=LONG, score=LONG), {f"{LONG}-1": patch}, {}),
        "search": render(search(6, 6), {"best": patch}, {}),
    }


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reports")
    for name, text in pages().items():
        (place / f"{name}.html").write_text(text)
    return place


@pytest.fixture(
    params=[(1280, False), (1280, True), (360, False), (360, True)], ids=["desk-light", "desk-dark", "phone-light", "phone-dark"]
)
def looked_at(request: pytest.FixtureRequest) -> dict[str, Any]:
    width, dark = request.param
    return {"width": width, "dark": dark}


@pytest.mark.parametrize("name", ["three", "twenty", "hostile", "search"])
def test_it_is_drawn_quietly_and_fits(name: str, chromium: Browser, reports: Path, looked_at: dict[str, Any]) -> None:
    page = chromium.open(reports / f"{name}.html", **looked_at)
    assert page.complaints() == []
    assert page.requests() == [(reports / f"{name}.html").as_uri()]
    assert page.evaluate("document.title").endswith("· elsewhere")
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= looked_at["width"]
    assert page.evaluate(
        "[...document.querySelectorAll('h1, h2, svg, table.comparison tbody tr')].every(one => one.getBoundingClientRect().height > 5)"
    )
    ground = [int(part) for part in page.evaluate("getComputedStyle(document.body).backgroundColor")[4:-1].split(",")]
    assert (sum(ground) < 150) == looked_at["dark"]


def test_the_style_is_applied_although_the_policy_forbids_everything_else(chromium: Browser, reports: Path) -> None:
    page = chromium.open(reports / "three.html", width=1280)
    assert page.evaluate("getComputedStyle(document.querySelector('.badge.good')).borderRadius") == "99px"
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 1'}))")
    page.evaluate("document.body.append(Object.assign(document.createElement('img'), {src: 'http://127.0.0.1:9/'}))")
    assert page.evaluate("document.title") != "1"
    refused = [one["entry"]["text"] for one in page.events("Log.entryAdded")]
    assert len([text for text in refused if "Content Security Policy" in text]) == 2, refused


def contrasts(page: Page) -> list[tuple[float, str]]:
    """Of every piece of text with what is behind it, lowest first."""
    found = page.evaluate(
        """(() => {
        const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
        const parts = colour => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
        const light = colour => { const [r, g, b] = colour.slice(0, 3).map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const behind = one => { for (let at = one; at; at = at.parentElement) { const c = parts(getComputedStyle(at).backgroundColor); if (c[3] === 255) return c; } return [255, 255, 255]; };
        const seen = [];
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            const one = walker.currentNode.parentElement;
            if (!walker.currentNode.data.trim() || one.closest('svg') || !one.getClientRects().length) continue;
            const [a, b] = [light(parts(getComputedStyle(one).color)), light(behind(one))].sort((x, y) => y - x);
            seen.push([(a + 0.05) / (b + 0.05), one.tagName + '.' + one.className + ' ' + walker.currentNode.data.slice(0, 30)]);
        }
        return seen.sort((x, y) => x[0] - y[0]); })()"""
    )
    return [(float(ratio), str(where)) for ratio, where in found]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_that_is_written_can_be_read(dark: bool, chromium: Browser, reports: Path) -> None:
    page = chromium.open(reports / "three.html", width=1280, dark=dark)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    found = contrasts(page)
    assert len(found) > 100
    assert [one for one in found if one[0] < 4.5] == []


def test_the_keyboard_opens_an_approach_and_puts_diffs_in_one_column(chromium: Browser, reports: Path) -> None:
    page = chromium.open(reports / "three.html", width=1280)

    def press(key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            page.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text={"Enter": "\r", " ": " "}.get(key, ""),
            )

    def tab_to(test: str) -> None:
        for _ in range(60):
            press("Tab", 9)
            if page.evaluate(f"Boolean(document.activeElement.matches({test!r}))"):
                return
        raise AssertionError(f"{test} cannot be reached")

    beside = "document.querySelector('.diff tr.same td:nth-child(1)').getBoundingClientRect().height > 0"
    assert page.evaluate(beside)
    tab_to("#one-column")
    press(" ", 32)
    assert page.evaluate("document.querySelector('#one-column').checked")
    assert not page.evaluate(beside)
    closed = "#attempt-2 > summary"
    assert not page.evaluate("document.querySelector('#attempt-2').open")
    tab_to(closed)
    press("Enter", 13)
    assert page.evaluate("document.querySelector('#attempt-2').open")


def test_on_paper_everything_is_there(chromium: Browser, reports: Path) -> None:
    page = chromium.open(reports / "three.html", width=1280, dark=True)
    page.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    hidden = "[...document.querySelectorAll('.attempt h4')].filter(one => !one.getBoundingClientRect().height).length"
    assert page.evaluate(hidden) == 0
