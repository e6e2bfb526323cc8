"""The one way in which git is run: with nothing of the caller's environment, and nothing of anybody's configuration that acts.

Neither the machine's nor the caller's configuration is read. That of the repository which git is run on is, since git cannot be
told otherwise; so whatever could start another program by it, ask, fetch, or tidy up is overruled:

    hooks, the file system monitor            not run
    credential helpers, prompts, transports   none: git talks to nobody, not even to another directory
    gc, maintenance                           not started
    filters of files (`filter.NAME.*`)        the caller's: only those who have git read or write a working tree need care
    missing objects of a partial clone        missing

Git is never run in a tree that a sandbox wrote: there, configuration is a stranger's code.

Not here: where a project's repository lies (`repositories.py`), and what is asked of it.
"""

import os
import subprocess
from collections.abc import Iterable, Mapping
from typing import IO

from elsewhere.errors import Broken, Unavailable
from elsewhere.meeting import home_directory

__all__ = ["Owner", "quoted", "run", "start", "user_configurations", "user_directory"]

Owner = tuple[int, int]

_SAFE = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.warnAmbiguousRefs=true",
    "protocol.allow=never",
    "safe.directory=*",
    "gc.auto=0",
    "maintenance.auto=false",
    "credential.helper=",
)


def run(
    words: Iterable[str],
    *,
    purpose: str,
    cwd: str = "/",
    settings: Iterable[str] = (),
    patience: float | None = None,
    source: bytes | IO[bytes] | None = None,
    owner: Owner | None = None,
    umask: int = 0o022,
    more: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[bytes]":
    """Wait for what git says. `source` is what it reads; `more` are further variables, as GIT_DIR; `purpose` is what needs git,
    for whoever has none; as `owner` only root can run it; a `umask` of -1 is the caller's."""
    line = _line(words, settings)
    options: dict[str, object] = {"input": source} if isinstance(source, bytes) else {"stdin": source or subprocess.DEVNULL}
    if owner is not None:
        options |= {"user": owner[0], "group": owner[1], "extra_groups": []}
    try:
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            line,
            env=_surroundings(more),
            cwd=cwd,
            capture_output=True,
            timeout=patience,
            check=False,
            umask=umask,
            **options,
        )
    except FileNotFoundError:
        raise _missing(purpose) from None
    except subprocess.TimeoutExpired:
        raise Broken("git_silent", f"git did not answer within {patience:.0f} s: {' '.join(line)}") from None


def start(
    words: Iterable[str],
    *,
    purpose: str,
    cwd: str = "/",
    settings: Iterable[str] = (),
    more: Mapping[str, str] | None = None,
    **descriptors: object,
) -> "subprocess.Popen[bytes]":
    """The same for those who talk to git while it runs."""
    standard = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **descriptors}
    try:
        return subprocess.Popen(_line(words, settings), env=_surroundings(more), cwd=cwd, umask=0o022, **standard)  # type: ignore[call-overload,no-any-return]
    except FileNotFoundError:
        raise _missing(purpose) from None


def user_configurations(*, unused: bool = False) -> list[str]:
    """The caller's own, as git finds them, what counts most first; for those who ask them about something by GIT_CONFIG_GLOBAL.
    That variable of the caller's stands for all others, which are `unused` then: another shell may go by them."""
    usual = [os.path.join(home_directory(), ".gitconfig"), os.path.join(user_directory(), "config")]
    chosen = os.environ.get("GIT_CONFIG_GLOBAL")
    if chosen is None:
        return usual
    return [os.path.abspath(chosen) if chosen else os.devnull, *(usual if unused else ())]


def user_directory() -> str:
    """Where git looks for what is the caller's own."""
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.join(home_directory(), ".config"), "git")


def quoted(path: str) -> bytes:
    """As C does, which git reads in lists and streams: a path may hold anything."""
    signs = (bytes((byte,)) if 32 <= byte < 127 and byte not in b'"\\' else b"\\%03o" % byte for byte in os.fsencode(path))
    return b'"%b"' % b"".join(signs)


def _line(words: Iterable[str], settings: Iterable[str]) -> list[str]:
    return ["git", "--no-pager", *(word for setting in (*_SAFE, *settings) for word in ("-c", setting)), *words]


def _surroundings(more: Mapping[str, str] | None) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_ALLOW_PROTOCOL": "none",  # also where the repository's configuration allows one by its name
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "/bin/false",
        **(more or {}),
    }


def _missing(purpose: str) -> Unavailable:
    return Unavailable("git_missing", f"git is not installed, and {purpose} needs it", hint="install git")
