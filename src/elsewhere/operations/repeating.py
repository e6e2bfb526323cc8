"""What `--replay` runs again in reality: the commands that succeeded in a sandbox, and the paths that it touched, which are kept
before the first of them. How they are run, and put back, is in `promotion/replaying.py`."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from elsewhere.changes.drift import is_repository_path
from elsewhere.errors import Refused
from elsewhere.operations import processes
from elsewhere.paths import is_within
from elsewhere.sandbox.records.record import Record

__all__ = ["commands", "marks", "succeeded", "touched"]

Command = dict[str, Any]


def commands(found: Record) -> list[Command]:
    """Refused if there are none."""
    done = succeeded(found)
    if not done:
        raise Refused(
            "nothing_to_replay",
            f"no command succeeded in the sandbox {found.id!r} that could be run again",
            hint="elsewhere requests lists them; without --replay the files themselves are moved",
        )
    return done


def succeeded(found: Record) -> list[Command]:
    """Oldest first; not what went on by itself."""
    asked = [one for one in processes.requests(found.id) if one.kind in ("exec", "run") and not one.detached]
    done = [one for one in asked if one.state == "completed" and one.exit_code == 0]
    done.sort(key=lambda one: one.started_at or 0.0)
    return [{"argv": list(one.argv), "cwd": one.cwd or found.project} for one in done]


def marks(done: Sequence[Command]) -> list[tuple[str, str]]:
    """As what runs by itself is marked: somebody has to agree to it."""
    return [(shlex.join(one["argv"]), "it is run again, in reality") for one in done]


def touched(changed: Iterable[str], project: str, own: str) -> list[tuple[str, str]]:
    """By root and path, what a sandbox changed; not what has the name of something of our own."""
    within = f"{project.rstrip('/')}/"
    paths = [path for path in sorted(changed) if path not in ("", project) and not is_within(path, own)]
    paths = [path for path in paths if not is_repository_path(path)]
    return [(project, path.removeprefix(within)) if path.startswith(within) else ("/", path[1:]) for path in paths]
