"""`explore`: a search for the best state of a project, in which every node is a snapshot, forked from its parent's.

    start ─► expand ─► a fork for each step ─► the step in it ─► score ─┬─ None, or something failed: a dead end, removed at once
               ▲                                                        ├─ among the best of its level: gone on from
               └────────────────────────────────────────────────────────┴─ otherwise: passed over, removed

What `expand` and `score` do inside is done in a fork that is thrown away: a node's state is its parent's and one step, and
nothing else. The same steps and scores always give the same tree. Not here: where steps come from; that is the caller's own.
"""

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from types import TracebackType
from typing import Any

from elsewhere import units
from elsewhere.clock import monotonic, stamp, wall
from elsewhere.errors import ElsewhereError, NotFound, UsageError
from elsewhere.experiments.report import render
from elsewhere.sdk.promotion import Promotion
from elsewhere.sdk.sandbox import Sandbox
from elsewhere.values import dataclass

__all__ = ["Budget", "Node", "Tree", "explore"]

_SNAPSHOT = "node"
_LONGEST_STEP = 200
_LONGEST_WHY = 500
_MOST_STEPS = 10_000  # from one state: whoever gives more gives them without end
_SHORTEST_S = 0.001

Step = str | Sequence[str] | Callable[[Sandbox], object]
Expand = Callable[[Sandbox], Iterable[Step | tuple[str, Step]] | Mapping[str, Step]]
Score = Callable[[Sandbox], float | None]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may cost: so many nodes besides the start, so much time, or whichever is used up first."""

    nodes: int | None = None
    time: str | float | None = None


@dataclass(slots=True, eq=False)
class Node:
    """A state that the search came to. `state` is start, expanded (gone on from), kept (good enough for that, when the search
    ended), passed over (others were better) or dead end; `why` says more. Only the best one still has a `sandbox` at the end."""

    id: int
    parent: "Node | None" = field(repr=False)
    depth: int
    step: str
    state: str = "kept"
    score: float | None = None
    why: str = ""
    duration: float = 0.0
    sandbox: Sandbox | None = field(default=None, repr=False)

    @property
    def path(self) -> "list[Node]":
        """From the start to this one."""
        return [self] if self.parent is None else [*self.parent.path, self]


@dataclass(slots=True)
class Tree:
    """What a search found. `best` is the node with the highest score, the first of them if there are several; None: nothing had
    a score. `patch` is what it changed in the project. Leaving a `with` block throws its sandbox away."""

    nodes: tuple[Node, ...]
    best: Node | None
    reason: str
    project: str
    created_at: float
    ended_at: float
    patch: bytes = field(default=b"", repr=False)
    promotion: Promotion | None = None

    def promote(self, **options: Any) -> Promotion:
        """Move the best to reality; as `Sandbox.promote`."""
        if self.best is None or self.best.sandbox is None:
            raise NotFound(
                "nothing_found", "the search has no best node that could be promoted", hint="look at tree.reason and tree.nodes"
            )
        self.promotion = self.best.sandbox.promote(**options)
        return self.promotion

    def document(self) -> dict[str, Any]:
        """For programs, and for the report."""
        return {
            "experiment": {
                "id": None,
                "project": self.project.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
                "state": "finished",
                "created_at": stamp(self.created_at),
                "ended_at": stamp(self.ended_at),
                "winner": None,
                "reason": self.reason,
                "promotion": None if self.promotion is None else self.promotion.id,
                "approaches": [],
                "tree": {
                    "best": None if self.best is None else self.best.id,
                    "nodes": [_document(node) for node in self.nodes],
                },
            }
        }

    def report(self) -> str:
        """The tree, and what the best changed, as one HTML file that needs nothing else."""
        return render(self.document(), {"best": self.patch.decode("utf-8", "replace")}, {})

    def close(self) -> None:
        """Throw the best one's sandbox away; a second time does nothing."""
        if self.best is not None and self.best.sandbox is not None:
            self.best.sandbox.remove()
            self.best.sandbox = None

    def __enter__(self) -> "Tree":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _document(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "parent": None if node.parent is None else node.parent.id,
        "depth": node.depth,
        "step": node.step,
        "state": node.state,
        "score": node.score,
        "why": node.why,
        "duration_ms": round(node.duration * 1000, 3),
    }


def explore(
    start: Sandbox | str | os.PathLike[str],
    expand: Expand,
    score: Score,
    *,
    beam: int = 3,
    depth: int = 5,
    budget: int | str | Budget | None = None,
    goal: float | None = None,
    workers: int = 1,
) -> Tree:
    """Search for the state with the highest score. `start` is a sandbox, which is left as it is, or a project. `expand(box)`
    gives the steps that can be taken from a state, as commands or as functions that get a sandbox, by their names or in a list,
    where a pair is a name and a step; `score(box)` a number, or None for a dead end. What any of them raises makes a dead end,
    too. On each of `depth` levels the `beam` best are gone on from. `budget` is a number of nodes, a time (`"2m"`) or a `Budget`;
    a command is ended when the time is used up, a function is not. The search ends at once when a score reaches `goal`. `workers`
    steps are taken at a time, and then the functions are called by several threads; the tree is the same."""
    _check(beam=beam, depth=depth, workers=workers)
    if goal is not None and (not isinstance(goal, (int, float)) or math.isnan(goal)):
        raise UsageError("bad_search", f"goal={units.brief(goal)} is not a score", hint="goal=12, for one")
    allowed = _budget(budget)
    with contextlib.ExitStack() as stack:
        box = start if isinstance(start, Sandbox) else stack.enter_context(Sandbox.create(start))
        search = stack.enter_context(_Search(expand, score, beam, allowed, goal, workers))
        return search.run(box, depth)


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(
                "bad_search", f"{name}={units.brief(value)} is not a number of one or more", hint=f"{name}=3, for one"
            )


def _budget(said: int | str | Budget | None) -> Budget:
    if said is None or isinstance(said, Budget):
        found = said or Budget()
    elif isinstance(said, str):
        found = Budget(time=said)
    elif isinstance(said, int) and not isinstance(said, bool):
        found = Budget(nodes=said)
    else:
        raise UsageError(
            "bad_budget",
            f"{units.brief(said)} is not a budget",
            hint="a number of nodes, a time such as '2m', or Budget(nodes=100, time='2m')",
        )
    if found.nodes is not None:
        _check(budget=found.nodes)
    return Budget(found.nodes, None if found.time is None else units.duration(found.time))


class _Search:
    """Whatever it made and did not hand out is removed when the block is left."""

    def __init__(self, expand: Expand, score: Score, beam: int, budget: Budget, goal: float | None, workers: int) -> None:
        self._expand, self._score, self._beam = expand, score, beam
        self._most = budget.nodes
        self._deadline = None if budget.time is None else monotonic() + float(budget.time)
        self._goal = math.inf if goal is None else goal
        self._workers = workers
        self._nodes: list[Node] = []
        self._best: Node | None = None
        self._boxes: set[Sandbox] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> "_Search":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove_all()

    # -- the search ---------------------------------------------------------------------------------------------------------

    def run(self, start: Sandbox, depth: int) -> Tree:
        created_at = wall()
        root = Node(0, None, 0, "", "start")
        self._nodes.append(root)
        self._take(root, start, None)
        level, ended = [root], f"{units.count(depth, 'level')} deep"
        if self._reached(root):
            self._chosen(level, [])
            depth, ended = 0, "the goal is reached"
        for _ in range(depth):
            grown, ended_early = self._level(level)
            level = self._chosen(level, grown)
            if ended_early or not level:
                ended = ended_early or "there was nothing left to go on from"
                break
        self._settle([])
        best = self._best
        patch = b""
        if best is not None and best.sandbox is not None:
            with contextlib.suppress(ElsewhereError):  # without git there is none
                patch = best.sandbox.changes().patch()
            with self._lock:
                self._boxes.discard(best.sandbox)  # from now on the tree's
        return Tree(tuple(self._nodes), best, self._reason(ended), start.project, created_at, wall(), patch)

    def _reason(self, ended: str) -> str:
        tried = units.count(len(self._nodes), "node")
        if self._best is None:
            why = next((f" ({node.why})" for node in self._nodes if node.why), "")
            return f"nothing had a score among {tried}{why}; the search ended: {ended}"
        steps = units.count(self._best.depth, "step")
        return f"the highest score among {tried} is {self._best.score:.10g}, after {steps}; the search ended: {ended}"

    def _level(self, level: list[Node]) -> tuple[list[Node], str]:
        """Every step from every node of a level; and why the search ends here, if it does."""
        asked: list[tuple[Node, Step]] = []
        ended = ""
        for parent in level:
            with contextlib.closing(self._steps(parent)) as steps:
                for name, step in steps:
                    if self._most is not None and len(self._nodes) - 1 + len(asked) >= self._most:
                        ended = f"the budget of {units.count(self._most, 'node')} is used up"
                        break
                    asked.append((Node(len(self._nodes) + len(asked), parent, parent.depth + 1, name), step))
                    if self._late():
                        break
            if ended or self._late():
                break
        begun = self._each(asked)
        grown = [node for (node, _), was in zip(asked, begun, strict=True) if was]
        reached = next((at for at, node in enumerate(grown) if self._reached(node)), None)
        if reached is not None:
            # Several workers may have gone further; the tree is as if there had been one.
            for node in grown[reached + 1 :]:
                self._release(node)
            grown, ended = grown[: reached + 1], "the goal is reached"
        elif len(grown) < len(asked) or self._late():
            ended = "the time is used up"
        for node in grown:
            if node.parent is not None and node.parent.parent is not None:
                node.parent.state = "expanded"
        self._nodes.extend(grown)
        return grown, ended

    def _each(self, asked: list[tuple[Node, Step]]) -> list[bool]:
        """Whether each was begun; always the first ones, up to some."""
        if self._workers == 1:
            return [self._grow(node, step) for node, step in asked]
        with ThreadPoolExecutor(self._workers) as pool:
            try:
                return list(pool.map(self._grow, *zip(*asked, strict=True))) if asked else []
            except BaseException:
                self._over.set()
                pool.shutdown(wait=False, cancel_futures=True)
                self._remove_all()  # what still runs ends with its sandbox
                raise

    def _grow(self, node: Node, step: Step) -> bool:
        if self._over.is_set() or self._late():
            return False
        assert node.parent is not None
        assert node.parent.sandbox is not None
        self._take(node, node.parent.sandbox, step)
        if self._reached(node):
            self._over.set()
        return True

    def _reached(self, node: Node) -> bool:
        return node.score is not None and node.score >= self._goal

    def _chosen(self, level: list[Node], grown: list[Node]) -> list[Node]:
        """The best of a level; ties go to those that came first."""
        alive = sorted((node for node in grown if node.score is not None), key=lambda node: (-(node.score or 0.0), node.id))
        for node in alive[self._beam :]:
            node.state = "passed over"
        chosen = alive[: self._beam]
        for node in (*level, *chosen):
            if node.score is not None and (self._best is None or node.score > (self._best.score or 0.0)):
                self._best = node
        self._settle(chosen)
        return chosen

    def _settle(self, needed: list[Node]) -> None:
        for node in self._nodes:
            if node not in needed and node is not self._best:
                self._release(node)

    def _late(self) -> bool:
        return self._deadline is not None and monotonic() >= self._deadline

    # -- one node -----------------------------------------------------------------------------------------------------------

    def _take(self, node: Node, source: Sandbox, step: Step | None) -> None:
        """A fork of what it comes from, the step in it, and what that is worth. The start may have no score."""
        began = monotonic()
        node.sandbox = self._forked(source, None if step is None else _SNAPSHOT)
        failed = self._failed(node.sandbox, step)
        if failed is None:
            node.sandbox.snapshot(_SNAPSHOT)
            node.score, failed = self._scored(node)
        node.duration = monotonic() - began
        if failed is not None:
            node.why = failed
            if step is not None:
                node.state = "dead end"
                self._release(node)

    def _failed(self, box: Sandbox, step: Step | None) -> str | None:
        if step is None:
            return None
        with _Told() as failure:
            if callable(step):
                step(box)
                return None
            left = None if self._deadline is None else max(_SHORTEST_S, self._deadline - monotonic())
            done = box.run(step, timeout=left)
            if done.reason == "timeout" and self._late():
                return "the time was used up while the step ran"
            return None if done.exit_code == 0 else f"the step ended with {done.exit_code} ({done.reason})"
        return failure.words

    def _scored(self, node: Node) -> tuple[float | None, str | None]:
        """A number, or why there is none."""
        said = None
        with self._trial(node) as box, _Told() as failure:
            said = self._score(box)
        if failure.words:
            return None, f"it has no score: {failure.words}"
        if said is None:
            return None, "it has no score"
        with contextlib.suppress(OverflowError):
            if isinstance(said, (int, float)) and not math.isnan(said):
                return float(said), None
        raise UsageError("bad_score", f"{units.brief(said)} is not a score", hint="return a number, or None for a dead end")

    def _steps(self, node: Node) -> Generator[tuple[str, Step]]:
        """One after the other, since they may be more than anybody asks for. If they cannot be told, they end."""
        with self._trial(node) as box:
            with _Told() as failure:
                found = self._expand(box)
                if isinstance(found, str | bytes) or not isinstance(found, Iterable):
                    raise UsageError(
                        "bad_search",
                        f"expand gave {units.brief(found)}, which are no steps",
                        hint="a list of steps, or a mapping of their names to them",
                    )
                for number, given in enumerate(_pairs(found) if isinstance(found, Mapping) else found):
                    if number == _MOST_STEPS:
                        raise UsageError(
                            "bad_search",
                            f"expand gave more than {_MOST_STEPS} steps from one state",
                            hint="give fewer, or say how many nodes there may be: budget=100",
                        )
                    name, step = _named(given)
                    yield name[:_LONGEST_STEP], step
            if failure.words:
                node.why = f"it has no steps: {failure.words}"

    @contextlib.contextmanager
    def _trial(self, node: Node) -> Iterator[Sandbox]:
        """The state of a node to do whatever one likes with."""
        assert node.sandbox is not None
        box = self._forked(node.sandbox, _SNAPSHOT)
        try:
            yield box
        finally:
            self._remove(box)

    # -- sandboxes ----------------------------------------------------------------------------------------------------------

    def _forked(self, source: Sandbox, snapshot: str | None) -> Sandbox:
        with self._lock:
            (box,) = source.fork(source=snapshot)
            self._boxes.add(box)
        return box

    def _release(self, node: Node) -> None:
        if node.sandbox is not None:
            box, node.sandbox = node.sandbox, None
            self._remove(box)

    def _remove_all(self) -> None:
        with self._lock:
            left, self._boxes = self._boxes, set()
        for box in left:
            with contextlib.suppress(ElsewhereError):  # what brought us here matters more, and the janitor finds the rest
                box.remove()

    def _remove(self, box: Sandbox) -> None:
        with self._lock:
            ours = box in self._boxes
            self._boxes.discard(box)
        if ours:
            box.remove()


class _Told:
    """What the caller's functions raise becomes words: one of many ways that failed. What ends a program still does, and who used
    elsewhere in a wrong way hears that."""

    words = ""

    def __enter__(self) -> "_Told":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or isinstance(error, UsageError):
            return False
        words = error.message if isinstance(error, ElsewhereError) else f"{type(error).__name__}: {error}"
        self.words = words[:_LONGEST_WHY]
        return True


def _pairs(steps: Mapping[str, Step]) -> Iterator[tuple[str, Step]]:
    for name, step in steps.items():
        yield name, list(step) if isinstance(step, tuple) else step


def _named(given: Step | tuple[str, Step]) -> tuple[str, Step]:
    """A tuple is a pair of name and step, as for `race`; a command of several words is a list."""
    name, step = given if isinstance(given, tuple) and len(given) == 2 else (None, given)
    if isinstance(step, tuple) or not (isinstance(step, Sequence) or callable(step)) or not isinstance(name, str | None):
        raise UsageError(
            "bad_search",
            f"{units.brief(given)} is not a step",
            hint="a shell line, a list of words, a function, or a pair of a name and one of these",
        )
    return _name(step) if name is None else name, step


def _name(step: Step) -> str:
    if isinstance(step, str):
        return step
    if not callable(step):
        return " ".join(map(str, step))
    if isinstance(step, functools.partial):
        return f"{_name(step.func)}({', '.join(map(repr, step.args))})"
    return getattr(step, "__name__", None) or type(step).__name__
