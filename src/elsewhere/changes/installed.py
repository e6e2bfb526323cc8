"""Packages of the system that were installed, upgraded or removed since a moment: what the managers themselves wrote down.

dpkg keeps a log; where it does not (or it was turned over), each package's list of files carries the time of its installation.
pip leaves a directory for each distribution. Nothing is executed, and a manager that is not there has no packages.

Not here: packages that a project keeps in its own directory, which are files of the project.
"""

import contextlib
import glob
import os
import time
from collections.abc import Iterable, Iterator

from elsewhere.values import dataclass

__all__ = ["Package", "changed_since"]

_TAIL = 4 << 20  # of a log: enough for some ten thousand lines
_ACTIONS = {"install": "installed", "upgrade": "upgraded", "remove": "removed", "purge": "removed"}
_PLACES = (
    "usr/lib/python3*/dist-packages",
    "usr/lib/python3*/site-packages",
    "usr/lib64/python3*/site-packages",
    "usr/local/lib/python3*/dist-packages",
    "usr/local/lib/python3*/site-packages",
)
_OWN_PLACES = (".local/lib/python3*/site-packages",)


@dataclass(frozen=True, slots=True)
class Package:
    """`what` is installed, upgraded, removed, or changed where only that much is known; `version` is the one that is there."""

    manager: str
    name: str
    what: str
    version: str | None = None


def changed_since(seconds: float, root: str = "/", home: str | None = None) -> list[Package]:
    """By name, each once: the last that happened to it."""
    found = {(one.manager, one.name): one for one in (*_dpkg(seconds, root), *_pip(seconds, root, home))}
    return [found[key] for key in sorted(found)]


def _dpkg(since: float, root: str) -> Iterator[Package]:
    place = os.path.join(root, "var/lib/dpkg")
    if _time(os.path.join(place, "status")) < since:
        return
    logged = list(_logged(os.path.join(root, "var/log/dpkg.log"), since))
    if logged:
        yield from logged
        return
    with contextlib.suppress(OSError), os.scandir(os.path.join(place, "info")) as entries:
        for entry in entries:
            if entry.name.endswith(".list") and entry.stat(follow_symlinks=False).st_ctime >= since:
                yield Package("dpkg", entry.name.removesuffix(".list").partition(":")[0], "changed")


def _logged(path: str, since: float) -> Iterator[Package]:
    """Lines like `2026-01-31 12:00:00 upgrade curl:amd64 7.88 7.89`, in local time."""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL))
        for line in stream:
            words = line.decode("utf-8", "replace").split()
            if len(words) == 6 and words[2] in _ACTIONS and _moment(words[0], words[1]) >= int(since):
                what = _ACTIONS[words[2]]
                yield Package("dpkg", words[3].partition(":")[0], what, None if what == "removed" else words[5])


def _moment(day: str, hour: str) -> float:
    try:
        return time.mktime(time.strptime(f"{day} {hour}", "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0


def _pip(since: float, root: str, home: str | None) -> Iterator[Package]:
    patterns = [os.path.join(glob.escape(root), place) for place in _PLACES]
    patterns += [os.path.join(glob.escape(home), place) for place in _OWN_PLACES] if home else []
    for place in _places(patterns):
        if _time(place) < since:
            continue  # no distribution came or went
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                name, _, version = entry.name.removesuffix(".dist-info").partition("-")
                if entry.name.endswith(".dist-info") and version and entry.stat(follow_symlinks=False).st_ctime >= since:
                    yield Package("pip", name, "installed", version)


def _places(patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        yield from glob.iglob(pattern)


def _time(path: str) -> float:
    """When it last changed; long ago, if it is not there."""
    try:
        return os.stat(path).st_ctime
    except OSError:
        return 0.0
