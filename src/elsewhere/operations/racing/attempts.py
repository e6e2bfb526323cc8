"""One attempt of a race: its sandbox, its command, its changes, its verification. Each runs in a thread of its own, and whatever
becomes of it is its own: nothing that goes wrong here leaves it.

    fork of the template ─► the command ─► everything in it is ended ─► a snapshot: what it changed is read from that
"""

import contextlib
import traceback

from elsewhere import units
from elsewhere.changes.patch import patch
from elsewhere.clock import wall
from elsewhere.errors import ElsewhereError
from elsewhere.experiments import ranking
from elsewhere.experiments.model import Approach
from elsewhere.experiments.records import Attempt
from elsewhere.operations import snapshots
from elsewhere.operations.diffing import difference
from elsewhere.operations.racing.commands import Ended, run_line
from elsewhere.operations.racing.course import END, HEADS, Course, Unwanted, call, fitted, forked, inside, watcher
from elsewhere.operations.racing.guard import guarded
from elsewhere.operations.racing.verifying import STAYS, verify
from elsewhere.paths import relative
from elsewhere.promotion import selecting
from elsewhere.sandbox import ending
from elsewhere.sandbox.records import record
from elsewhere.storage.state import write_aside

__all__ = ["attempted"]

_LARGEST_PATCH = 64 << 20
_GRACE_S = 1.0
_LONGEST_RAISED = 500


def attempted(course: Course, one: Attempt) -> None:
    """From wherever it is to its end. It is `done` afterwards, unless somebody ended the race."""
    try:
        if one.exit_code is None and _run(course, one):
            _look(course, one)
        if one.exit_code == 0 or course.race.allow_failing:
            verify(course, one)
        if one.verified and course.race.first and not course.won.is_set():
            course.winner = ranking.described(one, course.experiment.attempts)
            course.won.set()
    except Unwanted:
        if course.over.is_set():
            one.why = f"was {one.state} when the race was ended"
            one.state = "waiting"
            return
        one.reason, one.why, one.verified = "cancelled", f"was ended, since {course.winner} verified first", False
    except ElsewhereError as error:
        one.reason, one.verified = one.reason or "refused", False
        one.why = f"{one.state}: {error.message}" + (f" ({error.hint})" if error.hint else "")
    except Exception as error:  # one that fails for whatever reason must not take the others along
        one.reason, one.why, one.verified = one.reason or "lost", f"{one.state}: {type(error).__name__}: {error}", False
    finally:
        course.news.pop(one.key, None)
        _settle(course, one)
    one.state, one.ended_at = "done", one.ended_at or wall()
    course.experiment.save()


def _settle(course: Course, one: Attempt) -> None:
    """Nothing of it runs any more, and it goes by itself after a while."""
    if one.sandbox is None:
        return
    with contextlib.suppress(ElsewhereError, OSError):
        ending.stop(course.state, one.sandbox, 0.0)


# -- its command ----------------------------------------------------------------------------------------------------------------


def _run(course: Course, one: Attempt) -> bool:
    """Whether what it left was kept."""
    approach = course.race.approach(one.name)
    if one.sandbox is None:
        one.sandbox = forked(course, course.template)
        course.experiment.save()
    fitted(course, one.sandbox, approach, {"experiment": course.experiment.id, "approach": one.key})
    with inside(course, one.sandbox) as box:
        one.state, one.started_at, one.why = "running", wall(), ""
        course.experiment.save()
        timeout = course.timeout if approach.timeout is None else approach.timeout
        if approach.command is None:
            ended, died = _worked(course, one, timeout)
        else:
            output = course.experiment.file_of(one, "command.out")
            variables, watch = _environment(course, approach), watcher(course, one)
            ended = run_line(box, approach.command, variables, timeout, output, watch, course.race.directory)
            died = _died_of(ended.reason, ended.exit_code, box.timeout(timeout) or timeout)
    if not course.wanted() and not ended.good:
        raise Unwanted
    # Everything that it left in the background goes before anybody looks at what it did.
    ending.stop(course.state, one.sandbox, _GRACE_S)
    lost = _keep(course, one.sandbox)
    one.reason, one.seconds, one.ended_at = ended.reason, ended.seconds, wall()
    one.denials, one.cpu_s = ended.denials, ended.cpu_s
    one.peak_memory = max(one.peak_memory or 0, ended.peak_memory or 0) or None
    one.why = one.died_of = died or lost
    one.exit_code = 0 if ended.good and not lost else ended.exit_code or 1
    return not lost


def _keep(course: Course, sandbox_id: str) -> str:
    """What is looked at, verified and promoted: the state that its command left. If it cannot be kept, why."""
    try:
        if not any(one["name"] == END for one in record.load(course.state, sandbox_id).snapshots):
            snapshots.snapshot(sandbox_id, END)
    except (ElsewhereError, OSError) as error:
        return f"what it left could not be kept: {error}"
    return ""


def _died_of(reason: str, exit_code: int, timeout: float) -> str:
    """Nothing, if it ended well."""
    if (reason, exit_code) == ("exited", 0):
        return ""
    words = {
        "exited": f"its command ended with {exit_code}",
        "signaled": "its command was killed by a signal",
        "timeout": f"it took longer than {units.format_duration(timeout)}",
        "memory": "it took more memory than it may",
        "disk": "it wrote more than it may",
        "pids": "it started more processes than it may",
    }
    return words.get(reason, f"its command ended: {reason}")


def _environment(course: Course, approach: Approach) -> list[tuple[str, str | None]]:
    return list({**course.race.env, **approach.env}.items())


def _worked(course: Course, one: Attempt, timeout: float) -> tuple[Ended, str]:
    """A Python function, as if it were a command, and what it died of."""
    assert one.sandbox is not None, "it was forked before"

    def work(sandbox_id: str) -> None:
        check = getattr(course.works[one.name](sandbox_id), "check", None)
        if callable(check):
            check()  # the result of a command that failed

    called = call(course, one, one.sandbox, work, timeout)
    said = "" if called.failure is None else "".join(traceback.format_exception(called.failure))
    with contextlib.suppress(OSError):
        write_aside(course.experiment.file_of(one, "command.out"), said.encode("utf-8", "replace"))
    code = 124 if called.reason == "timeout" else 1 if called.failure is not None or called.reason != "exited" else 0
    died = _died_of(called.reason, code, timeout)
    if called.failure is not None and called.reason == "exited":
        words = " ".join(f"{type(called.failure).__name__}: {called.failure}".split())
        died = f"its function raised {words[:_LONGEST_RAISED]}"
    return Ended(code, called.reason, called.seconds, said, "", []), died


# -- what it changed ------------------------------------------------------------------------------------------------------------


def _look(course: Course, one: Attempt) -> None:
    """What would be promoted: without what git ignores, and without what could fake its verification."""
    assert one.sandbox is not None, "it has run"
    guard = course.guard()
    with course.reading(), difference(one.sandbox, f"{course.template}:now", END) as found:
        project = found.record.project
        kept = [] if guard is None else [change.path for change in guarded(found, guard)]
        stays = selecting.select(found.changes, project).left_out
        one.stays = {sort: len(stays[sort]) for sort in STAYS}
        there = {change.path for change in found.changes.entries if change.after is not None}
        one.commits = any(HEADS.search(path) for path in stays["git"] if path in there)  # not a repository that was removed
    with course.reading(), difference(one.sandbox, after=END) as found:
        selection = selecting.select(found.inside, project, leave=kept).inside
        chosen = {end for change in selection for end in (change.path, change.source)}
        inside = found.inside.where(lambda path: path in chosen)
        stats = inside.stat()
        one.changes = {
            "files": len(stats),
            "added": sum(stat.lines_added or 0 for stat in stats),
            "removed": sum(stat.lines_deleted or 0 for stat in stats),
            "others": sum(not (stat.lines_added or stat.lines_deleted) for stat in stats),
            "paths": [[relative(stat.path, project), stat.kind] for stat in stats],
        }
        left_out = {path for paths in selecting.select(found.inside, project).left_out.values() for path in paths}
        one.put_back = sorted(relative(path, project) for path in kept if path not in left_out and not path.endswith("/"))
        if sum(stat.bytes_after or 0 for stat in stats) <= _LARGEST_PATCH:
            write_aside(course.experiment.file_of(one, "changes.patch"), patch(inside).text)
    course.experiment.save()
