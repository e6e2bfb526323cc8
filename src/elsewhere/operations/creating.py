"""Making a sandbox: whose it is, what it starts from, whether it is there already."""

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from elsewhere.errors import InUse, NotFound, StateError, Unavailable, UsageError
from elsewhere.meeting import home_directory
from elsewhere.operations import admission, bases, interrupted, networking, profiling, reach, sandboxes
from elsewhere.operations.admission import Pause
from elsewhere.operations.bases import Chosen, Teller
from elsewhere.operations.confining import Confined, confine
from elsewhere.operations.projects import find_project, refuse_inside
from elsewhere.sandbox import identity, live
from elsewhere.sandbox.keeping.callers import finish
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.networking import proxies
from elsewhere.sandbox.project import Project
from elsewhere.sandbox.records import record, truth
from elsewhere.sandbox.records.record import Record
from elsewhere.storage import copying
from elsewhere.storage.state import State, write_aside
from elsewhere.values import dataclass

__all__ = ["Wish", "check_name", "create", "parse_label", "raise_sandbox", "remember"]

_LONGEST_NAME = 63
_REMEMBERED = 256 << 20  # bytes of files that git calls dirty


@dataclass(frozen=True, slots=True)
class Wish:
    """A sandbox as somebody wants it. What is not given is made up; `request` given twice means the same sandbox. `settings` are
    what the command line or the program says about confinement and limits, by the names of the settings. `publishes`: ports that
    are published are its own."""

    project: str | None = None
    base: str = "auto"
    base_ref: str | None = None
    name: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    workflow: str | None = None
    story: str | None = None
    request: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    publishes: bool = True


def create(
    wish: Wish, teller: Teller | None = None, remark: Callable[[str], None] | None = None, pause: Pause = time.sleep
) -> tuple[Record, bool]:
    """A sandbox that lives on its own, and whether it is new: the same request again is answered with the same sandbox."""
    refuse_inside()
    check_name(wish.name)
    found = find_project(wish.project, os.getcwd())
    state = State.open()
    interrupted.look(state)
    asked = {
        "project": found.path,
        "base": wish.base,
        "base_ref": wish.base_ref,
        "name": wish.name,
        "labels": wish.labels,
        **{key: value for key, value in wish.settings.items() if value is not None},
    }
    request = wish.request or secrets.token_hex(8)
    who = identity.derive(wish.workflow or os.path.basename(found.path), wish.story or "sandbox", request)
    for _ in range(2):
        there = _existing(state, who.sandbox_id, asked) if wish.request else None
        if there is not None:
            return there, False
        try:
            confined = confine(state, found.path, wish.settings, lives=True)
            if remark is not None and confined.settings.ignored:
                remark(confined.settings.remark())
            with truth.name_reserved(state, wish.name, who.sandbox_id):
                made = raise_sandbox(state, found, wish, confined, request, asked, teller, remark=remark, pause=pause, lives=True)
            made.close()
            return made.record, True
        except InUse as error:
            if error.code != "identity_in_use" or not wish.request:
                raise
            # Somebody else asked for the same at the same time, and was faster.
    raise InUse("identity_in_use", f"there is a sandbox {who.sandbox_id!r} already", hint="choose another --request")


def raise_sandbox(
    state: State,
    project: Project,
    wish: Wish,
    confined: Confined,
    request: str | None = None,
    asked: dict[str, Any] | None = None,
    teller: Teller | None = None,
    *,
    remark: Callable[[str], None] | None = None,
    pause: Pause = time.sleep,
    lives: bool,
    abandoned: str = "discard",
) -> Live:
    order: dict[str, Any] = {
        "project": project.path,
        "git": project.git,
        "home": home_directory(),
        "workflow": wish.workflow or os.path.basename(project.path),
        "story": wish.story or "sandbox",
        "request": request or wish.request,
        "name": wish.name,
        "labels": wish.labels,
        "limits": confined.limits,
        "binding": confined.binding,
        "own_disk": "disk" in confined.settings.asked_limits(),  # only what was asked for is worth one, binding or not
        "confinement": confined.confinement.packed(),
        "network": confined.reach if wish.publishes else {**confined.reach, "publish": []},
        "ignored": [one.key for one in confined.settings.ignored],
        "reserve": admission.disk_reserve(state, confined.settings),
        "asked": asked or {},
        "lives": lives,
        "abandoned": abandoned,
    }
    if remark is not None:
        unreached = profiling.unreached(confined.confinement)
        for text in filter(None, (project.remark, confined.remark(), unreached, reach.remark(confined.reach))):
            remark(text)
    with admission.admitted(state, confined, remark, pause) as belongs_to:
        made = _raise(state, project, wish, order, teller, remark)
        belongs_to(made.id)
        _connect(made, remark, pause)
        loose = _not_held(made.record, confined)
        if loose and remark is not None:
            remark(f"best effort: {loose}")
        return made


def _connect(made: Live, remark: Callable[[str], None] | None, pause: Pause) -> None:
    """What was asked for is there, or there is no sandbox."""
    try:
        if made.record.confinement.get("network") == "allow":
            proxies.keep(made.directory, os.environ)
        networking.open_ports(made.state, made.record, remark, pause)
    except BaseException:
        if made.owned:
            made.remove()
        else:
            made.close()
            sandboxes.remove([made.id], force=True)
        raise


def _not_held(made: Record, confined: Confined) -> str:
    """What was asked for and runs without, in words; without best effort there would be no sandbox."""
    holds = made.enforced.get("limits", {})
    asked = [name for name in confined.settings.asked_limits() if str(holds.get(name, "")).startswith("not enforced")]
    return "; ".join(f"{name}: {holds[name]}" for name in asked)


def _raise(
    state: State,
    project: Project,
    wish: Wish,
    order: dict[str, Any],
    teller: Teller | None,
    remark: Callable[[str], None] | None,
) -> Live:
    shift, kind = None if wish.base == "live" and wish.base_ref is None else live.shift_for(state, project.path), wish.base
    for attempt in range(3):
        with bases.choose(state, project, kind, wish.base_ref, shift or 0, teller) as chosen:
            if order["lives"]:
                finish()  # it would be there, and nobody would know
            try:
                made = live.create(state, {**order, "base": chosen.base, "shift": chosen.shift})
            except StateError as error:
                if error.code != "base_owners" or attempt == 2:
                    raise
                shift = int(str(error.detail["shift"]))
                continue
            except Unavailable:
                if kind != "auto" or chosen.base["kind"] == "live":
                    raise
                kind = "live"  # where no overlay can be had, a copy is made of what is there now
                continue
            remember(made.directory, project.path, chosen)
            if chosen.remark and remark is not None:
                remark(chosen.remark)
            return made
    raise AssertionError("one of the attempts returns or raises")


def remember(directory: str, project: str, chosen: Chosen) -> None:
    """What reality was like, and a copy of what is nowhere else: so that somebody who merges later knows where both began."""
    manifest, copies = os.path.join(directory, "manifest"), os.path.join(directory, "dirty")
    if chosen.manifest is not None:
        write_aside(manifest, chosen.manifest)
    elif chosen.scan is not None:
        with contextlib.suppress(OSError):  # without it, drift goes by times
            os.link(chosen.scan, manifest)
    left = _REMEMBERED
    for path in chosen.dirty:
        source, target = os.path.join(project, path), os.path.join(copies, path)
        with contextlib.suppress(OSError):  # gone again, or closed: then there is no common beginning to be had
            about = os.lstat(source)
            if stat.S_ISREG(about.st_mode) and about.st_size <= left:
                os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
                copying.copy_file(source, target)
                left -= about.st_size


def _existing(state: State, sandbox_id: str, asked: dict[str, Any]) -> Record | None:
    try:
        found = record.load(state, sandbox_id)
    except NotFound:
        return None
    if found.asked == asked:
        return found
    differing = sorted(key for key in {*asked, *found.asked} if found.asked.get(key) != asked.get(key))
    raise InUse(
        "identity_in_use",
        f"the sandbox {sandbox_id!r} of this request was made with another {' and '.join(differing) or 'origin'}",
        hint="choose another --request, or remove it first",
        detail={"sandbox": sandbox_id, "differs": differing},
    )


def check_name(name: str | None) -> None:
    if name is None:
        return
    plain = name.replace("-", "a").replace("_", "a").replace(".", "a")
    if not name or len(name) > _LONGEST_NAME or not plain.isalnum() or not name.isascii() or not name[0].isalnum():
        raise UsageError(
            "bad_name",
            f"{name!r} cannot be the name of a sandbox",
            hint=f"up to {_LONGEST_NAME} letters, digits, '-', '_' and '.', beginning with a letter or digit",
        )


def parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals or len(text) > 1000:
        raise UsageError("bad_label", f"{text!r} is not a label", hint="write KEY=VALUE")
    return key, value
