"""The page: what it came to, then everything that says why."""

import base64
import hashlib
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any

from elsewhere import units
from elsewhere.experiments.report import facts, plots
from elsewhere.experiments.report.attempts import attempt
from elsewhere.experiments.report.diff import draw
from elsewhere.experiments.report.markup import Markup, element, joined
from elsewhere.experiments.report.table import comparison
from elsewhere.experiments.report.tree import path, tree, way
from elsewhere.experiments.report.words import line

__all__ = ["render"]

_MOST_ROWS = 2_000  # of one patch
_MOST_ROWS_IN_ALL = 24_000
_BEST = "best"


def render(document: dict[str, Any], patches: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """`document` as `race --json` prints it; patches and outputs by `NAME-ATTEMPT`, as far as there are any. For a search,
    `experiment.tree` has the nodes, and the patch is called `best`."""
    experiment = document["experiment"]
    won = facts.winner(experiment)
    attempts = sorted(experiment.get("approaches") or [], key=lambda one: _order(one, won))
    title, good = _title(experiment, attempts, won)
    parts = [
        _outcome(experiment, attempts, won, title, good),
        _section("Comparison", comparison(attempts, won)) if attempts else None,
        _search(experiment["tree"], patches.get(_BEST, "")) if experiment.get("tree") else None,
        _approaches(attempts, won, patches, outputs) if attempts else None,
        _checked(experiment),
        _section("Timeline", plots.timeline(experiment, attempts)),
        _section("Memory and processors", plots.resources(attempts)),
    ]
    return _page(title, joined(*parts), experiment)


def _order(one: dict[str, Any], won: dict[str, Any] | None) -> tuple[bool, bool, float]:
    rank = one.get("rank")
    return one is not won, rank is None, 0 if rank is None else rank


# -- around it ------------------------------------------------------------------------------------------------------------------


def _page(title: str, body: Markup, experiment: dict[str, Any]) -> str:
    """The style is allowed by its hash, and nothing else is by anything: there is no script, and no address is ever asked."""
    style = importlib.resources.files(__package__).joinpath("style.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{title} · elsewhere"),
        Markup(f"<style>{style}</style>"),
    )
    foot = " · ".join(filter(None, ("elsewhere", line(str(experiment.get("id") or ""), 100))))
    page = element("html", head, element("body", element("main", body), element("footer", foot)), lang="en")
    return f"<!doctype html>\n{page}\n"


def _section(title: str, body: Markup | None, kind: str | None = None) -> Markup | None:
    return None if body is None else element("section", element("h2", title), body, class_=kind)


# -- what it came to ------------------------------------------------------------------------------------------------------------


def _title(experiment: dict[str, Any], attempts: Sequence[dict[str, Any]], won: dict[str, Any] | None) -> tuple[str, bool | None]:
    """And whether that is good; None: not known yet."""
    if experiment.get("tree"):
        steps = way(experiment["tree"])
        if not steps:
            return "The search found nothing", False
        return f"Best: score {facts.score(steps[-1])} after {units.count(len(steps) - 1, 'step')}", True
    if won is not None:
        return f"{line(facts.names(attempts)[list(attempts).index(won)], 80)} won", True
    state = experiment.get("state")
    if state == "running":
        return "The race is still going on", None
    if state in ("interrupted", "cancelled"):
        return f"The race was {state}", None
    return "No approach was verified", False


def _outcome(
    experiment: dict[str, Any], attempts: Sequence[dict[str, Any]], won: dict[str, Any] | None, title: str, good: bool | None
) -> Markup:
    kind = "going" if good is None else "good" if good else "bad"
    project = str(experiment.get("project") or "")
    return element(
        "header",
        element("p", line(project, 300), class_="project") if project else None,
        element("h1", title),
        element("p", line(_reason(experiment), 1000), class_="reason") if experiment.get("reason") else None,
        element("ul", *(element("li", one) for one in _numbers(experiment, attempts)), class_="numbers"),
        _next(experiment, attempts, won),
        class_=f"outcome {kind}",
    )


def _reason(experiment: dict[str, Any]) -> str:
    """A sentence of its own below the title, which has said already who won."""
    said = str(experiment["reason"])
    name = experiment.get("winner")
    _, won, why = said.partition(" won: ")
    said = why if name and won and said.startswith(name) else said
    return said[:1].upper() + said[1:] + ("" if said.endswith(".") else ".")


def _numbers(experiment: dict[str, Any], attempts: Sequence[dict[str, Any]]) -> list[str]:
    began, ended = facts.moment(experiment.get("created_at")), facts.moment(experiment.get("ended_at"))
    said = []
    if attempts:
        verified = sum(bool(one.get("verified")) for one in attempts)
        said += [units.count(len(attempts), "attempt"), f"{verified:,} verified"]
    if experiment.get("tree"):
        nodes = experiment["tree"]["nodes"]
        dead = sum(one["state"] == "dead end" for one in nodes)
        said += [units.count(len(nodes), "node"), units.count(dead, "dead end")]
    if began is not None and ended is not None:
        said.append(f"took {facts.took((ended - began) * 1000)}")
    if isinstance(experiment.get("created_at"), str):
        said.append(experiment["created_at"][:16].replace("T", " ") + " UTC")
    base = experiment.get("base") or {}
    if base.get("head"):
        said.append(f"base {line(str(base['head']), 80)[:10]}")
    return said


def _next(experiment: dict[str, Any], attempts: Sequence[dict[str, Any]], won: dict[str, Any] | None) -> Markup | None:
    """What to type now."""
    name, promotion = str(experiment.get("id") or ""), experiment.get("promotion")
    lines: list[tuple[str, str]] = []
    if promotion:
        lines.append((f"elsewhere undo {promotion}", "it is in reality; this takes it back"))
    elif won is not None and name:
        lines.append((f"elsewhere experiments promote {name}", "moves it to reality; elsewhere undo takes it back"))
    elif experiment.get("state") in ("interrupted", "cancelled") and name:
        lines.append((f"elsewhere experiments resume {name}", "goes on with what is missing"))
    near = won or (attempts[0] if attempts and experiment.get("state") == "finished" else None)
    if near is not None and near.get("sandbox") and not promotion:
        words = "looks around in it" if won else "looks around in the one that came closest"
        lines.append((f"elsewhere shell {near['sandbox']}", words))
    if not lines:
        return None
    rows = [joined(element("dt", element("code", line(command, 300))), element("dd", words)) for command, words in lines]
    return element("dl", *rows, class_="next", aria_label="what to type next")


# -- the parts ------------------------------------------------------------------------------------------------------------------


def _approaches(
    attempts: Sequence[dict[str, Any]], won: dict[str, Any] | None, patches: Mapping[str, str], outputs: Mapping[str, str]
) -> Markup:
    most_rows = max(100, min(_MOST_ROWS, _MOST_ROWS_IN_ALL // len(attempts)))
    drawn = [
        attempt(
            one,
            name,
            number,
            patch=patches.get(facts.key(one)),
            said=outputs.get(facts.key(one)),
            most_rows=most_rows,
            shown=one is (won or attempts[0]),
        )
        for number, (one, name) in enumerate(zip(attempts, facts.names(attempts), strict=True))
    ]
    body = joined(element("h2", "Approaches"), _columns(), *drawn)
    return element("section", body)


def _columns() -> Markup:
    """A box to tick; the style does the rest."""
    return element(
        "p",
        element("input", type="checkbox", id="one-column"),
        element("label", "diffs in one column", for_="one-column"),
        class_="columns",
    )


def _search(found: dict[str, Any], patch: str) -> Markup:
    changed = joined(element("h2", "What the best changed"), _columns(), draw(patch, _MOST_ROWS, "")) if patch else None
    return element(
        "section", element("h2", "The way to the best"), path(found), changed, element("h2", "The whole tree"), tree(found)
    )


def _checked(experiment: dict[str, Any]) -> Markup | None:
    """What everybody had to go through."""
    rows = []
    if experiment.get("setup"):
        rows.append(("set-up, once for all", experiment["setup"].get("command")))
    rows += [
        ("check" if one.get("required", True) else "check, not required", one.get("command"))
        for one in experiment.get("verify") or ()
    ]
    if experiment.get("score"):
        rows.append(("score", experiment["score"]))
    if not rows:
        return None
    shown = [joined(element("dt", head), element("dd", element("code", line(str(command), 1000)))) for head, command in rows]
    return _section("Rules", element("dl", *shown, class_="rules"))
