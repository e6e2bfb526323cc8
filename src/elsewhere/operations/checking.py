"""Checks of a stage: commands in a sandbox of the target, which is thrown away if all of them succeed, and kept if one does not.

Before a change is applied, it is put into the sandbox: by descriptors, below its root, in the order in which it would be applied.
Checks never run on the host. What they say goes to files, up to a cap.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elsewhere.changes.model import Side
from elsewhere.clock import wall
from elsewhere.errors import ElsewhereError
from elsewhere.operations.confining import Confined, confine
from elsewhere.operations.creating import Wish, raise_sandbox
from elsewhere.operations.executing import journaled
from elsewhere.operations.files import files_of
from elsewhere.operations.projects import find_project
from elsewhere.promotion.applying import Operation
from elsewhere.promotion.deploying import CAP
from elsewhere.sandbox import denials
from elsewhere.sandbox.access.descriptors import aside, inherit_owner, naming
from elsewhere.sandbox.access.files import Files
from elsewhere.sandbox.keeping import commands
from elsewhere.sandbox.keeping.commands import Outcome
from elsewhere.sandbox.live import Live
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Bench", "checked", "failed", "put"]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where checks are run: in a sandbox of this directory, with this base, and with these operations done in it."""

    project: str
    base: str = "auto"
    base_ref: str | None = None
    operations: Sequence[Operation] = ()


def checked(
    state: State, bench: Bench, lines: Sequence[str], outputs: str, labels: dict[str, str], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """What became of each, in order; after the first that failed, none is run. `sandbox` is the one that was kept for it."""
    if not lines:
        return []
    project = find_project(bench.project, "/")
    confined = confine(state, project.path, {}, lives=False)
    wish = Wish(base=bench.base, base_ref=bench.base_ref, story="check", labels=labels, publishes=False)
    box = raise_sandbox(state, project, wish, confined, lives=False)
    try:
        if bench.operations:
            with files_of(box) as files:
                for one in bench.operations:
                    put(files, box, one, like_git=bench.base_ref is not None)
        found = []
        for number, line in enumerate(lines, 1):
            tell(f"$ {line}")
            found.append(_run(box, line, f"{outputs}-{number}", confined))
            if not found[-1]["good"]:
                box.settle()
                found[-1]["sandbox"] = box.id
                return found
        box.remove()
        return found
    except BaseException:
        with contextlib.suppress(Exception):
            box.remove()
        raise


def _run(box: Live, line: str, outputs: str, confined: Confined) -> dict[str, Any]:
    argv, directory, at = ["/bin/sh", "-c", line], box.record.project, wall()
    with journaled(box, "exec", argv, directory) as request, open(os.devnull, "rb") as nothing:
        spec = box.spec(argv, directory, (), confined.settings["env.pass"], timeout=box.timeout(None), request=request.id)
        outcome = commands.captured(box.control, spec, nothing.fileno(), cap=CAP)
    return _told(line, outcome, outputs, at) | {"denials": denials.of_command(box.record, outcome.denied, argv, outcome.stderr)}


def _told(line: str, outcome: Outcome, outputs: str, at: float) -> dict[str, Any]:
    said = {"stdout": f"{outputs}.out", "stderr": f"{outputs}.err"}
    for path, data in zip(said.values(), (outcome.stdout, outcome.stderr), strict=True):
        with open(path, "wb") as stream:
            stream.write(data)
    return {
        "command": line,
        "good": outcome.exit_code == 0 and outcome.reason == "exited",
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "seconds": outcome.duration,
        **said,
        "truncated": outcome.stdout_truncated or outcome.stderr_truncated,
        "sandbox": None,
        "at": at,
    }


# -- the change, in the sandbox -------------------------------------------------------------------------------------------------


def put(files: Files, box: Live, one: Operation, *, like_git: bool) -> None:
    """`like_git`: a directory is there as long as something is in it, and is nobody's operation."""
    place = box.project_path if one.root == box.record.project else one.root
    path, wanted = os.path.join(place, one.path), one.wanted
    stays = one.expected is not None and wanted is not None and one.expected.type == wanted.type != "link"
    if one.expected is not None and not stays:
        files.remove(path)
    if wanted is None:
        if like_git:
            _remove_empty(files, os.path.dirname(path))
    elif wanted.type == "file":
        _put_file(files, path, wanted, parents=like_git)
    elif wanted.type == "link":
        with naming(path), files.acting(), files.destination(path, parents=like_git) as (parent, name):
            os.symlink(wanted.target or "", name, dir_fd=parent)
    else:
        if not stays:
            files.mkdir(path, parents=False, exist_ok=False)
        with naming(path), files.acting(), files.held(path, os.O_DIRECTORY | os.O_NOFOLLOW) as handle:
            os.chmod(f"/proc/self/fd/{handle}", wanted.mode)


def _put_file(files: Files, path: str, wanted: Side, *, parents: bool) -> None:
    with naming(path), files.acting(), files.destination(path, parents=parents) as (parent, name):
        old = files.replaced(parent, name, path)
        with aside(parent, name) as fd:
            with wanted.open() as source, open(fd, "wb", closefd=False) as stream:
                shutil.copyfileobj(source, stream, 1 << 20)
            if old is not None:
                inherit_owner(fd, old, files.shift)
            os.fchmod(fd, wanted.mode)


def _remove_empty(files: Files, directory: str) -> None:
    """As far up as nothing is left; the project itself is protected."""
    with contextlib.suppress(ElsewhereError):
        while True:
            files.remove(directory)
            directory = os.path.dirname(directory)


def failed(found: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The one that failed."""
    return next((one for one in found if not one["good"]), None)
