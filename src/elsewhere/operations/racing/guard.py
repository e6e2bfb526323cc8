"""Moving changes into the sandbox in which an attempt is verified, and knowing which of them stay behind. Which paths these are
is decided in `experiments/guarding.py`."""

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from elsewhere.changes.model import Change, Changes, Side
from elsewhere.changes.sides import Sides, sides_of
from elsewhere.errors import ElsewhereError, Refused
from elsewhere.experiments.guarding import Guard
from elsewhere.operations.checking import put
from elsewhere.operations.diffing import Difference, difference
from elsewhere.operations.files import files_of
from elsewhere.paths import relative
from elsewhere.promotion.applying import Operation
from elsewhere.sandbox.access.files import Files
from elsewhere.sandbox.live import Live

__all__ = ["brought", "guard_of", "guarded", "opposite", "refuse_unclean", "rewritten"]

_LARGEST = 1 << 20
_OF_PACKAGES = re.compile(r"/(?:site|dist)-packages/([A-Za-z_]\w*)")
_INSTALLED = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "lib/python3/dist-packages")


# -- what the guard knows -------------------------------------------------------------------------------------------------------


def guard_of(template: str, commands: Iterable[str], patterns: Iterable[str], path: Iterable[str]) -> Guard:
    """`path` is where programs are looked for."""
    with difference(template) as found:
        project = found.record.project
        base = _Base(found.changes, project, list(found.record.base.get("layers", ())))
        added = {match[1] for one in found.changes.entries if (match := _OF_PACKAGES.search(one.path))}
        return Guard(commands, patterns, project, base, {*added, *_installed(project, path)})


class _Base:
    """The template's project: its base, with what the set-up changed."""

    def __init__(self, changes: Changes, project: str, layers: Sequence[str]) -> None:
        self._changed = {relative(one.path, project): one.after for one in changes.entries}
        self._made = {relative(one.path, project).rstrip("/") for one in changes.directories if one.after is not None}
        self._roots = [*layers, project]
        self._below: list[Sides] = [sides_of(layers)] if layers else []
        self._below.append(sides_of([project]))

    def _side(self, path: str) -> Side | None:
        if path in self._changed:
            return self._changed[path]
        with contextlib.suppress(OSError):
            return next((side for below in self._below if (side := below(path or ".")) is not None), None)
        return None

    def read(self, path: str) -> bytes | None:
        side = self._side(path)
        return None if side is None or side.type == "directory" else content_of(side) or b""

    def leads_to(self, path: str) -> str | None:
        side = self._side(path)
        return None if side is None else side.target

    def is_directory(self, path: str) -> bool:
        side = self._side(path)
        return path in self._made or (side is not None and side.type == "directory")

    def names(self, path: str) -> set[str]:
        """What is in a directory."""
        found = {os.path.basename(one) for one in self._changed if os.path.dirname(one) == path}
        for place in self._roots:
            with contextlib.suppress(OSError):
                found.update(os.listdir(os.path.join(place, path)))
        return {name for name in found if self._side(os.path.join(path, name)) is not None}


def _installed(project: str, path: Iterable[str]) -> Iterator[str]:
    """Modules that an interpreter of the machine, or of the project, has beside its own."""
    prefixes = {os.path.dirname(place) for place in path} | {"/usr", "/usr/local"}
    prefixes |= {os.path.dirname(os.path.dirname(os.path.realpath(f"{place}/python3"))) for place in path}
    prefixes |= {f"{project}/.venv", f"{project}/venv", os.path.expanduser("~/.local")}
    versions = glob.glob(os.path.expanduser("~/.pyenv/versions/*"))
    for place in {found for prefix in (*prefixes, *versions) for part in _INSTALLED for found in glob.glob(f"{prefix}/{part}")}:
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                if (stem := name.partition(".")[0]).isidentifier() and not name.endswith((".pth", "-info", ".txt")):
                    yield stem


def content_of(side: Side | None) -> bytes | None:
    """None: there is none, or none that is worth reading."""
    if side is None or side.type != "file":
        return None
    with contextlib.suppress(OSError), side.open() as stream:
        return stream.read(_LARGEST)
    return None


def guarded(found: Difference, guard: Guard) -> list[Change]:
    """Those that an approach must not bring with it where it is verified. What was moved to such a place stays where it was, too:
    it would be nowhere else."""
    known = {one.path: one for one in (*found.changes.entries, *found.changes.directories)}
    kept = {one.path for one in known.values() if _is_guarded(one, guard)}
    kept |= {one.source for one in found.inside.entries if one.source is not None and one.path in kept}
    return [one for path, one in known.items() if path in kept]


def _is_guarded(one: Change, guard: Guard) -> bool:
    if guard.takes(one.path, added=one.before is None):
        return True
    if not guard.reads(one.path):
        return False
    sides = [side for side in (one.before, one.after) if side is not None]
    if any(side.type != "file" or side.size > _LARGEST for side in sides):
        return True  # nobody reads it, and so nobody knows
    return guard.takes_content(one.path, content_of(one.before), content_of(one.after))


# -- moving ---------------------------------------------------------------------------------------------------------------------


def opposite(changes: Iterable[Change]) -> list[Change]:
    """What takes them back."""
    return [one._replace(before=one.after, after=one.before) for one in changes]


def _bring(box: Live, changes: Sequence[Change]) -> None:
    """Into a sandbox in which nothing has run yet: first away with what is in the way, the deepest first; then directories from
    the top, files and links; then the modes of directories, the deepest first, since some may be shut."""
    project = box.record.project
    down = sorted(changes, key=lambda one: one.path)
    with files_of(box) as files:
        for one in reversed(down):
            if one.before is not None and (one.after is None or one.after.type != one.before.type):
                files.remove(_inside(box, one.path))
        for one in down:
            if one.after is not None and one.after.type == "directory":
                files.mkdir(_inside(box, one.path), mode=0o700 | one.after.mode, parents=False)
        for one in down:
            if one.after is not None and one.after.type in ("file", "link"):
                before = one.before if one.before is not None and one.before.type == one.after.type else None
                _put(files, box, project, one.path, before, one.after)
        for one in reversed(down):
            if one.after is not None and one.after.type == "directory":
                _put(files, box, project, one.path.rstrip("/"), one.after, one.after)


def _put(files: Files, box: Live, project: str, path: str, before: Side | None, after: Side) -> None:
    put(files, box, Operation(project, os.path.relpath(path, project), before, after), like_git=False)


def _inside(box: Live, path: str) -> str:
    return os.path.join(box.project_path, relative(path, box.record.project)).rstrip("/")


def refuse_unclean(box: Live, before: str, expected: Iterable[Change]) -> None:
    """Whatever is other in the project than it was `before`, and is not what was brought, lets nothing be verified: a link may
    have led a change to where it does not belong."""
    wanted = {one.path.rstrip("/") for one in expected}
    project = f"{box.record.project}/"
    with difference(box.id, before, "now") as found:
        changed = [one.path.rstrip("/") for one in found.changes.entries if one.path.startswith(project)]
        wrong = [path for path in changed if path not in wanted]
    if wrong:
        raise Refused(
            "not_brought",
            f"what is to be verified cannot be told from what verifies it: {relative(wrong[0], box.record.project)!r}",
            hint="leave links and directories on the way to tests as they are",
        )


def rewritten(box: Live, before: str, guard: Guard, *, outside: bool) -> list[str]:
    """What of that which verifies is other than `before`, after a command has run: the code under test may have done it.
    `outside`: programs of the machine as well."""
    project = box.record.project
    with difference(box.id, before, "now") as found:
        minded = [one for one in found.changes.entries if guard.minds(one.path, added=one.before is None)]
        inside = [relative(one.path, project) for one in minded if _is_guarded(one, guard)]
        return inside + [one.path for one in minded if outside and not one.path.startswith(f"{project.rstrip('/')}/")]


def brought(box: Live, changes: Sequence[Change]) -> None:
    """Moved into a sandbox in which nothing has run yet; refused if they do not fit to what is there."""
    try:
        _bring(box, changes)
    except ElsewhereError as error:
        raise Refused(
            "not_brought",
            f"what it changed does not fit to what is as in the base: {error.message}",
            hint="leave links and directories on the way to tests as they are",
        ) from error
