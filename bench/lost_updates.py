"""What becomes of a user's edit that is made while a sandbox works on the same file, found out by doing it (N).

One attempt, the same for everybody:

    1   a small project, and a copy of it, in whatever way, in which one line of a file is changed
    2   the user does something to the same file in the project itself, or to another one
    3   the copy's change is brought back, in the way that the contender has for that
    4   a look at the project: is what the user did still there, did the change arrive, did anybody say a word

Nothing is timed, and no race is tried: the user is long done when the change is brought back.
"""

import contextlib
import importlib
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import progress
from contenders import Sandlock, version_of
from effort import Effort
from elsewhere import Conflict, Sandbox, __version__
from elsewhere.storage import trash
from measure import Finding, Section
from workspace import Workspace

__all__ = ["lost_updates"]

_FILE, _OTHER, _BESIDE = "notes.txt", "other.txt", "../beside.txt"
_LINES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
_INSIDE = ("first", "second, by the sandbox", *_LINES[2:])
_SAME_LINE = ("first", "second, by the user", *_LINES[2:])
_OTHER_LINE = (*_LINES[:6], "seventh, by the user")
_PATIENCE_S = 30.0

Meanwhile = Callable[[], None]


class _Edit(NamedTuple):
    """What a user does, by a name for the table; both are given the project's directory."""

    name: str
    make: Callable[[str], None]
    is_there: Callable[[str], bool]


class _Contender(NamedTuple):
    """`attempt` is given a project and what happens meanwhile, and brings the change back; it returns what was said."""

    name: str
    attempt: Callable[[str, Meanwhile], str]
    absent: str = ""


def lost_updates(place: Workspace, effort: Effort, sandlock: Sandlock) -> Section:
    section = Section(
        "N",
        "An edit that the user makes while a sandbox works on the same file",
        "The sandbox changes one line of a file. Meanwhile the user does what the row says, in the project itself. Then the "
        "sandbox's change is brought back: by `promote`, from a pinned and from a live base; by sandlock's commit, at the end of "
        "the command, or deferred and then asked for; by `rsync -a` or `cp -a` from a changed copy of the project. *Kept*: what "
        "the user did is there afterwards; *with the change*: what the sandbox did is, too. *Reported*: an error, a failure, or "
        "anything printed. *Overwritten*: what the user did is gone. The project is a plain directory, without git. Nothing is "
        f"timed; tries of each: {effort.probes}.",
        "",
    )
    contenders = [*_ours(), *_sandlocks(place, sandlock), _rsync(place), _copy(place)]
    for edit in _EDITS:
        progress.say(f"N: {edit.name}")
        section.findings += [_found(place, contender, edit, effort.probes) for contender in contenders]
    return section


def _found(place: Workspace, contender: _Contender, edit: _Edit, times: int) -> Finding:
    if contender.absent:
        return Finding(edit.name, contender.name, f"not measured: {contender.absent}")
    seen, said = Counter[str](), ""
    for _ in range(times):
        outcome, words = _once(place, contender, edit)
        seen[outcome] += 1
        said = said or words.replace(place.root, "…")
    outcomes = [outcome if len(seen) == 1 else f"{count} x {outcome}" for outcome, count in seen.most_common()]
    return Finding(edit.name, contender.name, "; ".join(outcomes), said)


def _once(place: Workspace, contender: _Contender, edit: _Edit) -> tuple[str, str]:
    directory = place.fresh("probe")
    project = os.path.join(directory, "project")
    os.makedirs(project)
    try:
        for name in (_FILE, _OTHER, _BESIDE):
            _write(project, name, _LINES)
        with _listening() as heard:
            said = contender.attempt(project, lambda: edit.make(project))
        said = " ".join([said, *heard]).strip()
        kept, arrived = edit.is_there(project), _has(project, _FILE, _INSIDE[1])
        return _outcome(kept, arrived, bool(said)), said
    finally:
        trash.remove_tree(directory)


def _outcome(kept: bool, arrived: bool, reported: bool) -> str:
    if kept and arrived:
        return "kept, with the change" + (", reported" if reported else "")
    if kept:
        return "kept, reported" if reported else "kept; the change did not arrive, without a word"
    return "overwritten, reported" if reported else "overwritten without a word"


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Whatever is printed meanwhile, by whomever in this process: a library may warn without Python's knowing."""
    heard: list[str] = []
    with tempfile.TemporaryFile() as file, contextlib.ExitStack() as stack:
        for number in (1, 2):
            before = os.dup(number)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, number)
            os.dup2(file.fileno(), number)
        try:
            yield heard
        finally:
            stack.close()
            file.seek(0)
            heard += file.read().decode(errors="replace").split()


# -- what the user does ---------------------------------------------------------------------------------------------------------


def _write(project: str, name: str, lines: tuple[str, ...]) -> None:
    with open(os.path.join(project, name), "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def _has(project: str, name: str, line: str) -> bool:
    try:
        with open(os.path.join(project, name), encoding="utf-8") as file:
            return f"{line}\n" in file.readlines()
    except FileNotFoundError:
        return False


def _replace(project: str) -> None:
    _write(project, "notes.new", _SAME_LINE)
    os.rename(os.path.join(project, "notes.new"), os.path.join(project, _FILE))


def _make_link(project: str) -> None:
    os.unlink(os.path.join(project, _FILE))
    os.symlink(_BESIDE, os.path.join(project, _FILE))


def _link_is_there(project: str) -> bool:
    """And what it leads to is as it was."""
    return os.path.islink(os.path.join(project, _FILE)) and _has(project, _BESIDE, _LINES[1])


_EDITS = (
    _Edit("nothing: does the change arrive?", lambda _: None, lambda _: True),
    _Edit(
        "another line edited",
        lambda project: _write(project, _FILE, _OTHER_LINE),
        lambda project: _has(project, _FILE, _OTHER_LINE[6]),
    ),
    _Edit(
        "the same line edited",
        lambda project: _write(project, _FILE, _SAME_LINE),
        lambda project: _has(project, _FILE, _SAME_LINE[1]),
    ),
    _Edit("replaced by a rename, the same line edited", _replace, lambda project: _has(project, _FILE, _SAME_LINE[1])),
    _Edit(
        "deleted",
        lambda project: os.unlink(os.path.join(project, _FILE)),
        lambda project: not os.path.lexists(os.path.join(project, _FILE)),
    ),
    _Edit(
        "truncated",
        lambda project: os.truncate(os.path.join(project, _FILE), 0),
        lambda project: not os.path.getsize(os.path.join(project, _FILE)),
    ),
    _Edit("made a link to a file outside", _make_link, _link_is_there),
    _Edit(
        "an unrelated file edited",
        lambda project: _write(project, _OTHER, _SAME_LINE),
        lambda project: _has(project, _OTHER, _SAME_LINE[1]),
    ),
)


# -- who brings it back ---------------------------------------------------------------------------------------------------------


def _script(*, waits: bool = False) -> list[str]:
    """The sandbox's work; one that waits says that it is done, and goes on when it is told to."""
    words = " ".join(f"'{line}'" for line in _INSIDE)
    written = f"printf '%s\\n' {words} > {_FILE}"
    return ["sh", "-c", f"{written} && echo written && read -r _" if waits else written]


def _ours() -> list[_Contender]:
    def attempt(base: str, project: str, meanwhile: Meanwhile) -> str:
        time.sleep(0.05)  # what was written in the very moment in which a sandbox is made counts as written since
        with Sandbox.create(project=project, base=base) as box:
            box.run(_script()).check()
            meanwhile()
            try:
                box.promote()
            except Conflict as conflict:
                found: Any = conflict.detail["conflicts"]
                sentences = [f"{one['path']}: {one['sentence']} ({one['reason']})" for one in found]
                return "; ".join([str(conflict), *sentences])
        return ""

    def contender(base: str) -> _Contender:
        return _Contender(f"elsewhere {__version__}, {base}", lambda *given: attempt(base, *given))

    return [contender(base) for base in ("pinned", "live")]


def _sandlocks(place: Workspace, sandlock: Sandlock) -> list[_Contender]:
    name = f"sandlock {version_of('sandlock') or ''}".strip()

    def sandbox(module: Any, project: str, on_exit: str) -> Any:
        return module.Sandbox(
            fs_readable=["/"], fs_writable=[project], workdir=project, cwd=project, fs_storage=place.branches, on_exit=on_exit
        )

    def at_exit(project: str, meanwhile: Meanwhile) -> str:
        module: Any = importlib.import_module("sandlock")
        piped = module.StdioMode.PIPED
        with sandbox(module, project, "commit").popen(_script(waits=True), stdin=piped, stdout=piped, stderr=piped) as process:
            if process.stdout.readline() != b"written\n":
                raise RuntimeError(f"sandlock's command did not write: {process.stderr.read()!r}")
            meanwhile()
            process.stdin.write(b"\n")
            result = process.wait(timeout=_PATIENCE_S)
            return _said(result, process.stderr.read())

    def deferred(project: str, meanwhile: Meanwhile) -> str:
        module: Any = importlib.import_module("sandlock")
        with sandbox(module, project, "defer") as box:
            result = box.run(_script(), timeout=_PATIENCE_S)
            if not result.success:
                raise RuntimeError(f"sandlock's command did not write: {_said(result, result.stderr)}")
            meanwhile()
            try:
                box.commit()
            except module.SandlockError as error:
                return f"{type(error).__name__}: {error}"
        return _said(result, result.stderr)

    return [
        _Contender(f"{name}, at exit", at_exit, sandlock.absent),
        _Contender(f"{name}, deferred", deferred, sandlock.absent),
    ]


def _said(result: Any, stderr: bytes) -> str:
    words = [] if result.success else [f"exit code {result.exit_code}", str(result.error or result.reason)]
    return " ".join([*words, stderr.decode(errors="replace")]).strip()


def _rsync(place: Workspace) -> _Contender:
    version = version_of("rsync")
    return _Contender(
        f"rsync -a {version or ''}".strip(),
        lambda project, meanwhile: _copied_back(place, project, meanwhile, "rsync", "-a", "{}/"),
        "" if version else "rsync is not installed",
    )


def _copy(place: Workspace) -> _Contender:
    version = version_of("cp")
    return _Contender(
        f"cp -a {version or ''}".strip(),
        lambda project, meanwhile: _copied_back(place, project, meanwhile, "cp", "-a", "{}/."),
        "" if version else "cp is not installed",
    )


def _copied_back(place: Workspace, project: str, meanwhile: Meanwhile, program: str, option: str, source: str) -> str:
    copy = place.fresh("copy")
    try:
        subprocess.run(["cp", "-a", project, copy], check=True)
        subprocess.run(_script(), cwd=copy, check=True)
        meanwhile()
        done = subprocess.run([program, option, source.format(copy), f"{project}/"], capture_output=True, text=True)
        words = [f"exit code {done.returncode}"] if done.returncode else []
        return " ".join([*words, done.stdout, done.stderr]).strip()
    finally:
        trash.remove_tree(copy)
