"""What a view depends on: one that was drawn earlier, and a sandbox that was raised by it, is not used any more when that
changed. Mounts are watched separately."""

import os

from elsewhere.paths import is_within
from elsewhere.sandbox import additions, hidden, outline, seeds, standing, toolchains
from elsewhere.sandbox.confinement import Confinement
from elsewhere.sandbox.sockets import REPLACED, host_sockets
from elsewhere.sandbox.view import Subject

__all__ = ["fingerprint"]

_PLAIN = Confinement()


def fingerprint(subject: Subject, *, whole_machine: bool) -> tuple[object, ...]:
    """Changes whenever a view drawn earlier would not be drawn like that any more; mounts are watched separately."""
    host, project = subject.host, subject.project
    seen: list[object] = [standing.stamp_of(path) for path in hidden.watched(host.home, project.path, subject.confinement.hide)]
    seen += [*(standing.stamp_of(path) for path in seeds.ACCOUNTS), *standing.stamp()]
    for path in (project.path, project.git, host.home, "/"):
        found = None if path is None else _stat(path)
        seen.append(found and (found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid))
    if not whole_machine:
        places = (project.path, host.home)
        below = any(mount.target.startswith(f"{place}/") for mount in host.mounts for place in places)
        seen += host_sockets((*REPLACED, "/var/tmp", *(() if below else places)))
    if subject.confinement != _PLAIN:
        seen += _asked_for(subject)
    return tuple(seen)


def _asked_for(subject: Subject) -> list[object]:
    """What a view depends on beyond what every view does."""
    confinement = subject.confinement
    directories, files = additions.copies(confinement)
    places = [*(share.path for share in additions.shares(confinement)), *directories]
    if confinement.view == "project":
        places += toolchains.places(confinement, subject.host.home, subject.host.state, subject.project)
    seen: list[object] = [path for path in host_sockets(REPLACED) if any(is_within(path, place) for place in places)]
    if confinement.view == "project":
        places += outline.PACKAGES
        seen.append(standing.stamp_of("/var"))
    for path in (*places, *additions.nodes(confinement)):
        found = _stat(path)
        seen.append((path, found and (found.st_dev, found.st_ino, found.st_mode, found.st_rdev)))
    for path in files:
        found = _stat(path)  # with what is in it, since that is copied
        seen.append((path, found and (found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_ctime_ns)))
    return seen


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
