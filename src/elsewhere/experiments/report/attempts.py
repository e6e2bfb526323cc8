"""One attempt: what it was, what it changed, what was checked, what it said."""

from typing import Any

from elsewhere import units
from elsewhere.experiments.report import diff, facts
from elsewhere.experiments.report.markup import Markup, element, joined
from elsewhere.experiments.report.table import anchor, badge
from elsewhere.experiments.report.words import Cut, cut, line

__all__ = ["attempt", "output"]

_HEAD, _TAIL = 40, 160  # lines of an output
_MOST_PATHS = 50
_MOST_DENIALS = 20


def attempt(
    one: dict[str, Any], name: str, number: int, *, patch: str | None, said: str | None, most_rows: int, shown: bool
) -> Markup:
    """Folded, unless it is `shown`: its head says enough to go on."""
    head = element(
        "summary",
        element("h3", line(name, 120)),
        badge(one),
        element("span", " · ".join(filter(None, _short(one))), class_="quiet"),
    )
    body = joined(
        element("p", line(str(one["why"]), 600)) if one.get("why") else None,
        _command(one),
        _changes(one, patch, most_rows),
        _checks(one),
        _denials(one),
        _part("Output", output(one.get("output") or "" if said is None else said)),
    )
    return element("details", head, element("div", body, class_="body"), id=anchor(number), class_="attempt", open=shown)


def output(text: str) -> Markup:
    """With its end, which says most, and what was left out between it and the beginning."""
    if not text.strip():
        return element("p", "It said nothing.", class_="quiet")
    found: Cut = cut(text, _HEAD, _TAIL)
    shown = element("pre", found.head, tabindex="0") if found.head else None
    if not found.left_out:
        return joined(shown)
    note = element("p", f"{units.count(found.left_out, 'line')} left out here.", class_="cut")
    return joined(shown, note, element("pre", found.tail, tabindex="0") if found.tail else None)


def _short(one: dict[str, Any]) -> list[str]:
    points = facts.score(one)
    return [f"score {points}" if points else "", facts.took(one.get("duration_ms")), facts.changed(one)]


def _command(one: dict[str, Any]) -> Markup:
    ended = ""
    if one.get("exit_code") is not None:
        reason = one.get("reason")
        ended = f"ended with {one['exit_code']}" + (f" ({reason})" if reason and reason != "exited" else "")
    facts_of_it = [("sandbox", one.get("sandbox")), ("command", ended)]
    rows = [joined(element("dt", head), element("dd", line(str(value), 300))) for head, value in facts_of_it if value]
    return joined(
        element("pre", line(str(one.get("command") or "a Python function"), 4000), class_="command", tabindex="0"),
        element("dl", *rows),
    )


def _changes(one: dict[str, Any], patch: str | None, most_rows: int) -> Markup | None:
    sandbox = one.get("sandbox")
    whole = f"elsewhere diff {sandbox} --patch" if sandbox else ""
    if patch:
        return _part("Changes", diff.draw(patch, most_rows, whole))
    paths = (one.get("changes") or {}).get("paths") or []
    if not paths:
        return _part("Changes", element("p", "It changed nothing.", class_="quiet")) if one.get("changes") else None
    shown = [
        element("li", element("code", line(str(path["path"]), 300)), f" {path.get('kind', '')}") for path in paths[:_MOST_PATHS]
    ]
    rest = len(paths) - _MOST_PATHS
    note = element("p", f"{units.count(rest, 'more path')} left out here.", class_="cut") if rest > 0 else None
    return _part("Changes", joined(element("ul", *shown), note))


def _checks(one: dict[str, Any]) -> Markup | None:
    found = one.get("checks") or []
    return _part("Checks", joined(_put_back(one), *(_check(check) for check in found))) if found else None


def _put_back(one: dict[str, Any]) -> Markup | None:
    """What it had made of the tests did not count."""
    paths = [line(str(path), 200) for path in one.get("put_back") or ()]
    if not paths:
        return None
    more = f" and {len(paths) - 5:,} more" if len(paths) > 5 else ""
    return element("p", f"As in the base again, before anything was checked: {', '.join(paths[:5])}{more}.", class_="cut")


def _check(check: dict[str, Any]) -> Markup:
    passed = check.get("passed")
    kind, words = ("good", "✓ passed") if passed else ("going", "not run") if passed is None else ("bad", "✗ failed")
    told = check.get("tests")
    counted = [f"{told[word]:,} {word}" for word in ("passed", "failed", "skipped") if told.get(word)] if told else []
    code = check.get("exit_code")
    about = [
        *counted,
        facts.took(check.get("duration_ms")),
        f"ended with {code}" if code else "",
        "" if check.get("required", True) else "not required",
    ]
    head = element(
        "summary",
        element("code", line(str(check.get("name") or check.get("command") or ""), 200)),
        element("span", words, class_=f"badge {kind}"),
        element("span", " · ".join(filter(None, about)), class_="quiet"),
    )
    command = element("pre", line(str(check.get("command") or ""), 4000), class_="command", tabindex="0")
    note = element("p", line(str(check["note"]), 400), class_="cut") if check.get("note") else None
    return element("details", head, note, command, output(str(check.get("output") or "")), class_="check")


def _denials(one: dict[str, Any]) -> Markup | None:
    found = one.get("denials") or []
    if not found:
        return None
    shown = [_denial(denial) for denial in found[:_MOST_DENIALS]]
    rest = len(found) - _MOST_DENIALS
    note = element("p", f"{units.count(rest, 'more denial')} left out here.", class_="cut") if rest > 0 else None
    return _part("Denials", joined(element("ul", *shown, class_="denials"), note))


def _denial(denial: dict[str, Any]) -> Markup:
    times = int(denial.get("count") or 1)
    return element(
        "li",
        element("code", line(str(denial.get("what") or denial.get("kind") or ""), 300)),
        f", {times:,} times" if times > 1 else None,
        element("span", line(f" {denial['rule']}", 300), class_="quiet") if denial.get("rule") else None,
    )


def _part(title: str, body: Markup) -> Markup:
    return element("section", element("h4", title), body)
