"""The tree of a search: where it branched, what became of each node, and the way to the best one."""

from typing import Any

from elsewhere import units
from elsewhere.experiments.report import facts
from elsewhere.experiments.report.markup import Markup, element, joined
from elsewhere.experiments.report.words import line

__all__ = ["path", "tree", "way"]

_ACROSS, _DOWN = 212, 26
_MARGIN = 14
_LONGEST_STEP = 20
_MOST_DRAWN = 400
_WORDS = {
    "best": "way to the best",
    "start": "start",
    "expanded": "gone on from",
    "kept": "kept",
    "passed over": "passed over",
    "dead end": "dead end",
}

Node = dict[str, Any]


def way(found: dict[str, Any]) -> list[Node]:
    """From the start to the best."""
    nodes = {one["id"]: one for one in found["nodes"]}
    steps: list[Node] = []
    at = found.get("best")
    while at is not None and at in nodes and len(steps) <= len(nodes):
        steps.append(nodes[at])
        at = nodes[at]["parent"]
    return steps[::-1]


def path(found: dict[str, Any]) -> Markup:
    """The way to the best, step by step."""
    steps = way(found)
    if not steps:
        return element("p", "Nothing had a score.", class_="quiet")
    return element("ol", *(_step(one) for one in steps), start=0, class_="way")


def tree(found: dict[str, Any]) -> Markup:
    nodes, best = found["nodes"], {one["id"] for one in way(found)}
    drawn = nodes[:_MOST_DRAWN]
    missing = len(nodes) - len(drawn)
    note = element("p", f"{units.count(missing, 'more node')} not drawn.", class_="cut") if missing else None
    every = element("details", element("summary", f"All {units.count(len(nodes), 'node')}"), _list(nodes), class_="nodes")
    key = [element("span", element("i", class_=f"node {kind.replace(' ', '-')}"), words) for kind, words in _WORDS.items()]
    return joined(element("p", *key, class_="legend"), _scrolls(_picture(drawn, best), "tree"), note, every)


def _scrolls(body: Markup, words: str) -> Markup:
    """Whatever is wider than the page scrolls by itself, with the keyboard, too."""
    return element("div", body, class_="scrolls", tabindex="0", role="region", aria_label=words)


def _step(node: Node) -> Markup:
    return element(
        "li",
        element("code", _named(node, 200)),
        element("span", " · ".join(filter(None, (_scored(node), facts.took(node.get("duration_ms"))))), class_="quiet"),
    )


def _list(nodes: list[Node]) -> Markup:
    heads = ("node", "from", "step", "score", "became", "why")
    rows = []
    for one in nodes:
        origin = "" if one["parent"] is None else one["parent"]
        cells = (origin, _named(one, 120), facts.score(one) or "\N{EN DASH}", one["state"], line(str(one.get("why") or ""), 300))
        rows.append(element("tr", element("th", one["id"], scope="row"), *(element("td", cell) for cell in cells)))
    head = element("thead", element("tr", *(element("th", word, scope="col") for word in heads)))
    return _scrolls(element("table", head, element("tbody", *rows)), "nodes")


# -- the picture ----------------------------------------------------------------------------------------------------------------


def _picture(nodes: list[Node], best: set[int]) -> Markup:
    places = _places(nodes)
    wide = max(x for x, _ in places.values()) + _ACROSS
    high = max(y for _, y in places.values()) + _DOWN
    linked = sorted((one for one in nodes if one["parent"] in places), key=lambda one: one["id"] in best)  # the best on top
    links = [_link(places[one["parent"]], places[one["id"]], one["id"] in best) for one in linked]
    dots = [_dot(one, places[one["id"]], one["id"] in best) for one in nodes]
    words = f"a tree of {units.count(len(nodes), 'node')}"
    return element(
        "svg", *links, *dots, width=wide, height=high, viewBox=f"0 0 {wide} {high}", role="img", aria_label=words, class_="tree"
    )


def _places(nodes: list[Node]) -> dict[int, tuple[float, float]]:
    """A leaf has a line of its own; whatever branches stands in the middle of its branches."""
    children: dict[int | None, list[Node]] = {}
    for one in nodes:
        children.setdefault(one["parent"], []).append(one)
    rows: dict[int, float] = {}
    leaves = 0
    # Children have larger numbers than their parents; leaves get their lines from the top, in the order of the tree.
    waiting = list(reversed(children.get(None, [])))
    while waiting:
        one = waiting.pop()
        below = children.get(one["id"], [])
        if not below:
            rows[one["id"]], leaves = leaves, leaves + 1
        waiting.extend(reversed(below))
    for one in reversed(nodes):
        below = children.get(one["id"], [])
        if below:
            rows[one["id"]] = (rows[below[0]["id"]] + rows[below[-1]["id"]]) / 2
    return {one["id"]: (_MARGIN + one["depth"] * _ACROSS, _MARGIN + rows[one["id"]] * _DOWN) for one in nodes}


def _link(start: tuple[float, float], end: tuple[float, float], best: bool) -> Markup:
    middle = end[0] - 24
    d = f"M{start[0]} {start[1]}H{middle - 12:.0f}C{middle:.0f} {start[1]} {middle:.0f} {end[1]} {end[0]:.0f} {end[1]}"
    return element("path", d=d, class_="link best" if best else "link")


def _dot(node: Node, place: tuple[float, float], best: bool) -> Markup:
    x, y = place
    kind = str(node["state"]).replace(" ", "-")
    points = facts.score(node)
    label = _named(node, _LONGEST_STEP) + (f" · {points}" if points else "")
    return element(
        "g",
        element("title", " · ".join(filter(None, (_named(node, 200), _scored(node), line(str(node.get("why") or ""), 200))))),
        element("circle", cx=x, cy=y, r=5),
        element("text", label, x=x + 10, y=y - 5),
        class_=f"node {kind}" + (" best" if best else ""),
    )


def _named(node: Node, longest: int) -> str:
    shown = line(str(node.get("step") or "start"), 1000)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def _scored(node: Node) -> str:
    points = facts.score(node)
    return f"score {points}" if points else ""
