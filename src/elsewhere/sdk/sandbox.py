"""`Sandbox`: a copy of the environment you work in, as a context manager. Typed, synchronous, safe in a threaded program."""

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

from elsewhere import units
from elsewhere.changes.drift import Drift
from elsewhere.changes.model import Changes
from elsewhere.changes.renames import with_renames
from elsewhere.errors import ElsewhereError, UsageError
from elsewhere.limits import Limits
from elsewhere.operations import creating, diffing, drifting, executing, processes, promoting, sandboxes, snapshots
from elsewhere.operations.confining import confine
from elsewhere.operations.creating import Wish
from elsewhere.operations.entering import enter
from elsewhere.operations.executing import journaled
from elsewhere.operations.projects import find_project, refuse_inside
from elsewhere.operations.promoting import Asked
from elsewhere.operations.settings import resolve
from elsewhere.sandbox import contents, ending
from elsewhere.sandbox.keeping import commands
from elsewhere.sandbox.keeping.line import Usage
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.records import record
from elsewhere.sdk.background import Background
from elsewhere.sdk.files import SandboxFiles
from elsewhere.sdk.promotion import Promotion, patterns
from elsewhere.sdk.results import CommandResult
from elsewhere.sdk.snapshots import Snapshot
from elsewhere.storage.state import State

__all__ = ["Sandbox"]

_ON_EXIT = ("discard", "keep", "promote")
Words = list[str]  # in the class below, `list` is the verb


class Sandbox:
    """Made by `Sandbox.create`, found again by `Sandbox.get`. Leaving the `with` block discards it, unless `on_exit="keep"` was
    asked for; with `on_exit="promote"` what it changed is moved to reality first, if the block ended without an error; if it did
    not, or if reality disagrees, the sandbox is kept. One that is kept lives on its own and outlives this program; if nothing
    runs in it when the block is left, it is stopped, and starts again by itself when it is needed."""

    def __init__(self, box: Live | record.Record, on_exit: str, *, made: bool) -> None:
        """One that is only a record is entered, and with that started, when it is first used."""
        self._entered = box if isinstance(box, Live) else None
        self._id = box.id
        self._on_exit = on_exit
        self._made = made
        self._ended = False

    @classmethod
    def create(
        cls,
        project: str | os.PathLike[str] = ".",
        *,
        base: Literal["live", "pinned", "auto"] = "auto",
        base_ref: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        workflow: str | None = None,
        story: str | None = None,
        request: str | None = None,
        ttl: str | float | None = None,
        limits: Limits | None = None,
        view: Literal["machine", "project"] | None = None,
        network: Literal["none", "allow", "host"] | None = None,
        allow: Sequence[str] | None = None,
        deny: Sequence[str] | None = None,
        preset: Sequence[str] | None = None,
        forward: Sequence[str] | None = None,
        publish: Sequence[str] | None = None,
        untrusted: bool | None = None,
        share: Sequence[str] | None = None,
        profile: Sequence[str] | None = None,
        hide: Sequence[str] | None = None,
        device: Sequence[str] | None = None,
        gpu: bool | None = None,
        nested: bool | None = None,
        best_effort: bool | None = None,
        wait: bool | None = None,
        on_exit: Literal["discard", "keep", "promote"] = "discard",
    ) -> "Sandbox":
        """A sandbox of `project` and the machine around it, ready for commands. With a `request` that was made before, the same
        sandbox again, which is then kept when the block is left. What is not said about confinement and limits is as the settings
        say."""
        if on_exit not in _ON_EXIT:
            raise UsageError("bad_on_exit", f"on_exit={on_exit!r} is not known", hint="use 'discard', 'keep' or 'promote'")
        wish = Wish(
            project=os.fspath(project),
            base=base,
            base_ref=base_ref,
            name=name,
            labels=dict(labels or {}),
            workflow=workflow,
            story=story or "sdk",
            request=request,
            settings={
                **{f"limits.{key}": value for key, value in (limits or Limits()).given().items()},
                **({} if ttl is None else {"limits.ttl": ttl}),
                "sandbox.view": view,
                "sandbox.network": network,
                "network.allow": allow,
                "network.deny": deny,
                "network.preset": preset,
                "network.forward": forward,
                "network.publish": publish,
                "sandbox.untrusted": untrusted,
                "sandbox.share": share,
                "sandbox.profile": profile,
                "sandbox.hide": hide,
                "sandbox.device": device,
                "sandbox.gpu": gpu,
                "sandbox.nested": nested,
                "sandbox.best_effort": best_effort,
                "admission.wait": wait,
            },
        )
        lives = limits is not None and (limits.ttl is not None or limits.idle is not None)
        if on_exit != "discard" or name is not None or request is not None or ttl is not None or lives:
            made, new = creating.create(wish)
            return cls(_entered(State.open(), made.id), on_exit if new else "keep", made=new)
        refuse_inside()
        found, state = find_project(wish.project, os.getcwd()), State.open()
        confined = confine(state, found.path, wish.settings, lives=False)
        return cls(creating.raise_sandbox(state, found, wish, confined, lives=False), on_exit, made=True)

    @classmethod
    def get(cls, wanted: str, *, on_exit: Literal["discard", "keep", "promote"] = "keep") -> "Sandbox":
        """One that is there, by its id, its name, the beginning or end of its id, or `@last`; started if it is stopped."""
        refuse_inside()
        if on_exit not in _ON_EXIT:
            raise UsageError("bad_on_exit", f"on_exit={on_exit!r} is not known", hint="use 'discard', 'keep' or 'promote'")
        state = State.open()
        return cls(_entered(state, wanted), on_exit, made=False)

    @staticmethod
    def list(*, labels: Mapping[str, str] | None = None, state: str | None = None) -> "Sequence[SandboxInfo]":
        """What is there, newest first, after it was looked at."""
        wanted = sandboxes.Filter(states=(state,) if state else (), labels=dict(labels or {}))
        return [SandboxInfo(found) for found in sandboxes.list_sandboxes(wanted).records]

    @property
    def _box(self) -> Live:
        if self._entered is None:
            self._entered = _entered(State.open(), self._id)
        return self._entered

    @property
    def id(self) -> str:
        return self._id

    @property
    def name(self) -> str | None:
        return self._box.record.name

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._box.record.labels)

    @property
    def project(self) -> str:
        """Where the project is inside; the same path as outside on every rung but the last."""
        return self._box.project_path

    @property
    def base(self) -> dict[str, object]:
        """What it started from: its `kind` (live, pinned or commit) and its `head`."""
        return dict(self._box.record.base)

    @property
    def mechanism(self) -> str:
        return self._box.record.mechanism

    @property
    def enforced(self) -> dict[str, object]:
        """Which mechanism enforces what, and what is not enforced."""
        return self._box.record.enforced

    @property
    def limits(self) -> Limits:
        """What it may use up."""
        return Limits(**self._box.record.limits)  # type: ignore[arg-type]  # each is of its own kind

    def usage(self) -> Usage:
        """What it uses now, all of its commands together."""
        self._check_open()
        with self._box.line() as keeper:
            return keeper.usage()

    @property
    def files(self) -> SandboxFiles:
        self._check_open()
        return SandboxFiles(self._box)

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: str | float | None = None,
        input: str | bytes | None = None,  # noqa: A002  (as in subprocess)
    ) -> CommandResult:
        """Run a command and wait for its end. A string goes to `/bin/sh -c`; a sequence is executed as it is. What the command
        leaves in the background lives until the sandbox ends."""
        argv, directory, limit = self._asked(command, cwd, timeout)
        with journaled(self._box, "exec", argv, directory, limit) as request:
            spec = self._box.spec(
                argv,
                directory,
                (env or {}).items(),
                resolve(self._box.state, self._box.record.project)["env.pass"],
                timeout=self._box.timeout(limit),
                request=request.id,
            )
            stdin = _source(input)
            try:
                outcome = commands.captured(self._box.control, spec, stdin)
            finally:
                os.close(stdin)
        return CommandResult.of(self._box.record, tuple(argv), outcome)

    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: str | float | None = None,
        detached: bool = False,
    ) -> Background:
        """Start a command and go on; `detached`, it goes on when this program ends."""
        argv, directory, limit = self._asked(command, cwd, timeout)
        outputs = executing.log_files(self._box)
        with journaled(self._box, "exec", argv, directory, limit, outputs, detached=detached) as request:
            spec = self._box.spec(
                argv,
                directory,
                (env or {}).items(),
                resolve(self._box.state, self._box.record.project)["env.pass"],
                timeout=self._box.timeout(limit),
                detached=detached,
                request=request.id,
            )
            started = executing.start_background(self._box, spec, request, outputs)
            return Background(started, self._box.record, tuple(argv), detached=detached)

    def _asked(
        self, command: str | Sequence[str], cwd: str | os.PathLike[str] | None, timeout: str | float | None
    ) -> tuple[Words, str, float | None]:
        self._check_open()
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [os.fspath(word) for word in command]
        if not argv or not argv[0]:
            raise UsageError("no_command", "the command is empty", hint="give at least the name of a program")
        project = self._box.record.project
        directory = project if cwd is None else os.path.normpath(os.path.join(project, os.fspath(cwd)))
        return argv, directory, None if timeout is None else units.duration(timeout)

    def logs(self, request: str | None = None, *, follow: bool = False) -> Iterator[bytes]:
        """What a command that was started in the background said; the newest one's, unless a request is named."""
        self._check_open()
        for piece in processes.logs(self.id, request=request, follow=follow):
            yield piece.data

    def changes(self, *, since: str = contents.BASE, until: str = contents.NOW) -> Changes:
        """What the sandbox did so far, compared with its base: the project as it was pinned, reality as it is now. Or what is
        different between any two states: `base`, `now`, the name of a snapshot, `ID` or `ID:STATE` of another sandbox."""
        self._check_open()
        if (since, until) == (contents.BASE, contents.NOW):
            return with_renames(self._box.changes())
        with diffing.difference(self.id, since, until) as found:
            return with_renames(found.changes)

    def drift(self) -> Drift:
        """What happened in reality since the base, and which of it touches what the sandbox did."""
        self._check_open()
        return drifting.drift_of(self._box.state, self._box.record, self._box.changes())

    def snapshot(self, name: str | None = None) -> Snapshot:
        """Save its files as they are now, under a name that is made up if none is given. What runs in it goes on; if nothing
        does, that takes the same time whatever was changed."""
        self._check_open()
        taken = snapshots.snapshot(self.id, name, self._box)
        self._box.record = taken.record
        return Snapshot.of(taken.snapshot, taken.bytes)

    def snapshots(self) -> "Sequence[Snapshot]":
        """Those that there are, oldest first."""
        self._check_open()
        _, found, sizes = snapshots.snapshots(self.id)
        return [Snapshot.of(one, sizes.get(one["name"])) for one in found.snapshots]

    def rollback(self, snapshot: str | Snapshot, *, force: bool = False) -> str | None:
        """Return to a saved state, older or newer; `"base"` is what it started from. What it had is saved first: under the name
        that is returned, or it was in a snapshot already. With `force`, what runs in it is ended; without, that is an error."""
        self._check_open()
        name = snapshot.name if isinstance(snapshot, Snapshot) else snapshot
        returned = snapshots.rollback(self.id, name, force=force, box=self._box)
        self._box.record = returned.record
        return returned.left

    def remove_snapshot(self, snapshot: str | Snapshot) -> None:
        """Forget a saved state."""
        self._check_open()
        name = snapshot.name if isinstance(snapshot, Snapshot) else snapshot
        _, self._box.record, _ = snapshots.remove(self.id, name, self._box)

    def fork(
        self,
        count: int = 1,
        *,
        source: str | Snapshot | None = None,
        name: str | None = None,
        on_exit: Literal["discard", "keep"] = "discard",
    ) -> "Sequence[Sandbox]":
        """So many sandboxes that start from its state, or from a snapshot of it, and know nothing of each other. Each starts when
        it is first used. If one cannot be made, the error names those that were."""
        self._check_open()
        chosen = source.name if isinstance(source, Snapshot) else source
        forked = snapshots.fork(self.id, count, name=name, source=chosen, box=self._box)
        self._box.record = forked.parent
        made = [Sandbox(child, on_exit, made=True) for child in forked.children if isinstance(child, record.Record)]
        for child in forked.children:
            if isinstance(child, ElsewhereError):
                child.detail["made"] = [one.id for one in made]
                raise child
        return made

    def promote(
        self,
        *,
        paths: Sequence[str] = (),
        ours: Sequence[str] = (),
        theirs: Sequence[str] = (),
        ignored: bool = False,
        outside: Sequence[str] = (),
        commits: bool = True,
        branch: str | None = None,
        checkout: bool = False,
        replay: bool = False,
        to: str | None = None,
        yes: bool = False,
    ) -> Promotion:
        """Move what it changed to reality, three-way: what reality changed as well is merged, or a `Conflict` is raised and
        nothing at all was done. `paths` takes a part, by globs; `ours` and `theirs` settle conflicts; `ignored` and `outside`
        take what is left out otherwise; commits made inside go to `branch`, with `checkout` HEAD does, too; `replay` runs the
        sandbox's commands again instead; `to` is a stage of the project; `yes` agrees to what runs by itself."""
        self._check_open()
        asked = Asked(
            patterns(paths),
            patterns(ours),
            patterns(theirs),
            ignored,
            patterns(outside),
            commits,
            branch,
            checkout,
            replay,
            to,
            agree=(lambda _: True) if yes else None,
        )
        done = promoting.promote(self.id, asked, self._box)
        assert done.promotion is not None, "it was no dry run"
        return Promotion.of(done.promotion)

    def stop(self) -> None:
        """End everything in it and keep its files; `Sandbox.get` starts it again."""
        self._check_open()
        self._ended = True
        if self._entered is not None and self._entered.owned:
            self._entered.settle()
        else:
            self._let_go()
            sandboxes.stop(self.id)

    def remove(self) -> None:
        """End everything in it and throw it away, changes included. A second time does nothing."""
        if self._ended:
            return
        self._ended = True
        if self._entered is not None and self._entered.owned:
            self._entered.remove()
            if self._entered.record.tip is not None or self._entered.record.snapshots:
                ending.sweep(self._entered.state, layers=True)
        else:
            self._let_go()
            sandboxes.discard(self.id)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._ended:
            return
        if self._on_exit == "promote" and error is None:
            try:
                self.promote()
            except ElsewhereError:
                self._leave()  # it stays as it is
                raise
            self.remove()
            return
        if self._on_exit == "discard":
            self.remove()
            return
        self._leave()

    def _leave(self) -> None:
        self._ended = True
        self._let_go()
        if self._made:
            sandboxes.stop_if_idle(self.id)

    def _let_go(self) -> None:
        if self._entered is not None:
            self._entered.close()

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"

    def _check_open(self) -> None:
        if self._ended:
            raise UsageError("sandbox_ended", f"the sandbox {self.id} has ended", hint="make a new one with Sandbox.create")


class SandboxInfo:
    """A sandbox as `Sandbox.list` found it."""

    def __init__(self, found: record.Record) -> None:
        self.id = found.id
        self.name = found.name
        self.state = found.state
        self.project = found.project
        self.labels = dict(found.labels)
        self.created_at = datetime.fromtimestamp(found.created_at, UTC)

    def __repr__(self) -> str:
        return f"<SandboxInfo {self.id} {self.state}>"


def _entered(state: State, sandbox_id: str) -> Live:
    box = enter(state, sandbox_id)
    try:
        executing.check_protocol(box)
    except BaseException:
        box.close()
        raise
    return box


def _source(content: str | bytes | None) -> int:
    """A descriptor to read standard input from; an anonymous file, so that nobody has to feed a pipe."""
    if content is None:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("elsewhere-input")
    with open(fd, "wb", closefd=False) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
