"""What all attempts of a race share, and what each of them does with sandboxes and Python functions. Not here: in which order."""

import contextlib
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

from elsewhere.errors import ElsewhereError, NotFound
from elsewhere.experiments.guarding import Guard
from elsewhere.experiments.model import Approach, Race
from elsewhere.experiments.records import Attempt, Experiment
from elsewhere.operations import snapshots
from elsewhere.operations.confining import confine
from elsewhere.operations.entering import enter
from elsewhere.operations.racing.guard import guard_of
from elsewhere.operations.settings import stages
from elsewhere.operations.usage import usage_of
from elsewhere.sandbox import ending
from elsewhere.sandbox.keeping.line import Usage
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.records import record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = [
    "END",
    "HEADS",
    "Called",
    "Course",
    "Scorer",
    "Unwanted",
    "Work",
    "call",
    "fitted",
    "forked",
    "inside",
    "is_there",
    "thrown_away",
    "watcher",
]

END = "end"  # the snapshot of what an attempt's command left
HEADS = re.compile(r"/\.git/(?:refs/heads/|HEAD$|packed-refs$)")  # where commits are, among git's own files

_EVERY_S = 0.5
_LEAVING_S = 2.0  # as long as a function has that was told to end, since its sandbox is gone

Work = Callable[[str], object]  # a Python function, given the sandbox's id
Scorer = Callable[[str], float]


class Unwanted(Exception):
    """Nobody wants it any more."""


@dataclass(slots=True)
class Course:
    """What all attempts of an experiment share. `over`: they are to end, since somebody ended the race; `won`: since one has
    verified, and only the first counts. `news` has what is told while they run, by the attempt's key."""

    state: State
    experiment: Experiment
    race: Race
    timeout: float
    works: Mapping[str, Work] = field(default_factory=dict)
    scorer: Scorer | None = None
    over: threading.Event = field(default_factory=threading.Event)
    won: threading.Event = field(default_factory=threading.Event)
    winner: str = ""
    news: dict[str, dict[str, Any]] = field(default_factory=dict)
    forking: threading.Lock = field(default_factory=threading.Lock)
    preparing: threading.Lock = field(default_factory=threading.Lock)
    counters: dict[str, threading.Lock] = field(default_factory=dict)
    guarding: Guard | None = None

    @property
    def template(self) -> str:
        assert self.experiment.template is not None, "it is made before anything is forked"
        return self.experiment.template

    def pause(self, seconds: float) -> None:
        """How an attempt waits for room on the machine."""
        if self.over.wait(min(seconds, _EVERY_S)) or self.won.is_set():
            raise Unwanted

    def wanted(self) -> bool:
        return not self.over.is_set() and not self.won.is_set()

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        """While the template or an attempt is read. Layers in an image can be read by one at a time."""
        return self.forking if record.load(self.state, self.template).disk == "image" else contextlib.nullcontext()

    def guard(self) -> Guard | None:
        """What is as in the base when anything is verified; made once, by whoever needs it first. None: nothing is."""
        race = self.race
        # On its way to reality, the winner is judged by the checks of stages, too.
        staged = [line for one in stages(self.state, self.experiment.project) for line in one.checks] if race.promote else []
        if race.verify_from_approach or not (race.checks or race.score or self.scorer or staged):
            return None
        with self.preparing:
            if self.guarding is None:
                start = f"cd {shlex.quote(race.directory)} && " if race.directory else ""
                lines = [f"{start}{line}" for line in (*(one.command for one in race.checks), race.score) if line] + staged
                results = [os.path.join(race.directory, one.junit) for one in race.checks if one.junit]  # not the approach's
                path = (race.env.get("PATH") or os.environ.get("PATH") or os.defpath).split(":")
                with self.reading():
                    self.guarding = guard_of(self.template, lines, [*(race.verify_files or ()), *results], path)
            return self.guarding


# -- sandboxes ------------------------------------------------------------------------------------------------------------------


def fitted(course: Course, sandbox_id: str, approach: Approach | None, labels: dict[str, str]) -> None:
    """A fork has what its parent had; this gives it the approach's own limits and network, before it first runs."""
    with record.exclusive(course.state, sandbox_id) as found:
        found.labels = {**found.labels, **labels}
        if approach is not None and approach.settings:
            given = {**course.race.settings, **approach.settings}
            confined = confine(course.state, found.project, given, lives=True)
            found.limits, found.binding = confined.limits, confined.binding
            found.confinement = confined.confinement.packed()
            found.network = {**found.network, **confined.reach, "publish": []}
        record.save(found, course.state.sandbox(sandbox_id))


def forked(course: Course, parent: str, source: str | None = None) -> str:
    with course.forking:
        made = snapshots.fork(parent, 1, source=source).children[0]
    if isinstance(made, ElsewhereError):
        raise made
    return made.id


@contextlib.contextmanager
def inside(course: Course, sandbox_id: str) -> Iterator[Live]:
    """As soon as there is room for it."""
    if not course.wanted():
        raise Unwanted
    box = enter(course.state, sandbox_id, pause=course.pause)  # that it waits is told by its state
    try:
        yield box
    finally:
        box.close()


def is_there(state: State, sandbox_id: str) -> bool:
    with contextlib.suppress(ElsewhereError):
        record.load(state, sandbox_id)
        return True
    return False


def thrown_away(state: State, sandbox_id: str) -> None:
    """What nobody needs afterwards. Its layers go when somebody tidies up, which the end of the race does."""
    with contextlib.suppress(NotFound), record.exclusive(state, sandbox_id) as found:
        if found.state == "running":
            ending.end_keeper(state, found, 0.0)
        ending.archive_or_discard(state, sandbox_id, found, archive=False)


# -- while something runs -------------------------------------------------------------------------------------------------------


def watcher(course: Course, one: Attempt) -> Callable[[float, Usage | None, str], bool]:
    began = time.monotonic()

    def watch(_: float, usage: Usage | None, last_line: str) -> bool:
        memory = None if usage is None else usage.memory_bytes
        if usage is not None and one.state == "running":
            one.sample(time.monotonic() - began, memory, usage.cpu_s)
        course.news[one.key] = {
            "elapsed_ms": round((time.monotonic() - began) * 1000),
            "memory_bytes": memory,
            "last_line": last_line[:500],
        }
        return course.wanted()

    return watch


@dataclass(slots=True)
class Called:
    reason: str = "exited"
    seconds: float = 0.0
    result: object = None
    failure: BaseException | None = None


def call(course: Course, one: Attempt, sandbox_id: str, work: Work, timeout: float) -> Called:
    """A Python function cannot be ended; its sandbox can, and what it asks of that fails then."""
    found = Called()

    def run() -> None:
        try:
            found.result = work(sandbox_id)
        except BaseException as error:
            found.failure = error

    began, watch = time.monotonic(), watcher(course, one)
    thread = threading.Thread(target=run, name=f"elsewhere-{one.key}", daemon=True)
    thread.start()
    while thread.is_alive() and found.reason == "exited":
        thread.join(_EVERY_S)
        found.seconds = time.monotonic() - began
        usage = None
        with contextlib.suppress(ElsewhereError):
            usage = usage_of(course.state, record.load(course.state, sandbox_id), measure=False)
        if not thread.is_alive():
            break
        if not watch(found.seconds, usage, ""):
            found.reason = "cancelled"
        elif found.seconds > timeout:
            found.reason = "timeout"
    if found.reason != "exited":
        ending.stop(course.state, sandbox_id, 0.0)
        thread.join(_LEAVING_S)
    return found
