"""The state directory: one for each user, closed to everybody else.

    $ELSEWHERE_HOME              root: /var/lib/elsewhere; a user: ~/.local/share/elsewhere
      schema                     version of this layout; an older program refuses a newer one
      run/<8 hex>                sockets of launchers, with their locks and logs
      run/network                the network service's (see `sandbox/networking/calling.py`)
      mnt/                       empty; a sandbox under construction mounts its scratch space here, in its own namespace
      registry.db                an index of the sandboxes, and the history of requests (see `sandbox/records/registry.py`)
      bases/<project>/           what pinned sandboxes start from (see `bases.py`)
      sandboxes/<sandbox-id>/
          sandbox.json           the sandbox's own truth
          .sandbox.env           identity for tools
          lock                   held by the keeper for as long as it lives
          keeper                 the keeper's socket
          journal                requests: each beginning and end
          logs/                  what detached commands said
          network.ports          which ports of the host were picked for published ones
          network.proxy          the host's own proxy (see `sandbox/networking/proxies.py`)
          manifest dirty/        what its base looked like, and for a live one copies of what git had none of
          layers.img             a file system for the layers, where they may only grow to a size
          upper/<n>/ work/<n>/   one pair for each overlay; sandbox.json says which place each belongs to
          upper/tmp/ …           private /tmp, /var/tmp and, in the project view, home
          copy/                  the project, where it had to be copied
      layers/<layer-id>/         what sandboxes wrote up to a snapshot (see `layers.py`)
      journal/<promotion-id>/    what was moved to reality, and how it is taken back (see `promotion/records.py`)
      experiments/<id>/          races, with what came of each attempt (see `experiments/records.py`)
      archive/<sandbox-id>/      removed sandboxes with changes that were nowhere else
      spare/                     directories made ahead of time, renamed into sandboxes/
      trash/                     renamed here, deleted later
      claims/                    what running sandboxes were promised of the machine (see `operations/admission.py`)
      trust/                     which settings of projects the user trusts (see `operations/settings.py`)

Everything is written aside and renamed. Not here: what the files mean (see `sandbox/records/record.py`).
"""

import contextlib
import errno
import fcntl
import os
import stat
from _thread import get_ident  # `threading` itself costs every process that forks
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from elsewhere.errors import ElsewhereError, StateError
from elsewhere.meeting import default_state
from elsewhere.values import dataclass

__all__ = ["SCHEMA", "State", "locked", "meant", "write_aside", "write_new"]

SCHEMA = 1
_ROOMS = ("run", "mnt", "bases", "sandboxes", "spare", "archive", "trash", "trust", "claims", "layers", "journal", "experiments")
_opened: dict[str, tuple[int, ...]] = {}


@dataclass(frozen=True, slots=True)
class State:
    path: str

    @classmethod
    def open(cls, path: str | None = None) -> "State":
        """The state directory, made if it is not there, refused if it is somebody else's or cannot be written."""
        place = os.path.realpath(path or default_state())
        state = cls(place)
        try:
            if _opened.get(place) == _look(place):
                return state  # as we left it
        except OSError:
            pass  # made, or complained about, below
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            found = os.lstat(place)
            if found.st_uid != os.geteuid():
                raise StateError(
                    "state_not_ours",
                    f"the state directory {place!r} belongs to uid {found.st_uid}, and this is uid {os.geteuid()}",
                    hint="set ELSEWHERE_HOME to a directory of your own",
                )
            strangers = [name for name in os.listdir(place) if name not in _ROOMS and not name.startswith("schema")]
            if strangers and not os.path.lexists(os.path.join(place, "schema")):
                raise StateError(
                    "state_not_empty",
                    f"{place!r} holds other things and cannot become a state directory",
                    hint="set ELSEWHERE_HOME to a new or empty directory",
                )
            if stat.S_IMODE(found.st_mode) & 0o077:
                os.chmod(place, 0o700)
            for room in _ROOMS:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.join(place, room), 0o700)
            state._check_schema()
            _opened[place] = _look(place)
        except OSError as error:
            raise _unusable(place, error) from error
        return state

    def _check_schema(self) -> None:
        file = os.path.join(self.path, "schema")
        try:
            with open(file, encoding="ascii", errors="replace") as stream:
                found = stream.read(100).strip()
        except FileNotFoundError:
            write_aside(file, f"{SCHEMA}\n".encode())
            return
        if not (found.isascii() and found.isdigit()) or int(found) > SCHEMA:
            raise StateError(
                "state_too_new",
                f"the state directory {self.path!r} has layout {found!r}, and this version of elsewhere knows up to {SCHEMA}",
                hint="upgrade elsewhere, or set ELSEWHERE_HOME to another directory",
            )

    def room(self, name: str) -> str:
        return os.path.join(self.path, name)

    def entry(self, name: str, letter: str, now: float) -> tuple[str, str]:
        """A new one in a room, with a short name that says when: that, and its directory. Two of one second may be meant to have
        the same: then another is made up."""
        while True:
            entry = f"{letter}{int(now):x}{os.urandom(2).hex()}"
            directory = os.path.join(self.path, name, entry)
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
                return entry, directory

    def sandbox(self, sandbox_id: str) -> str:
        """The directory of one sandbox; an id that could name anything else is refused."""
        if not sandbox_id or sandbox_id.startswith(".") or "/" in sandbox_id or "\0" in sandbox_id:
            raise StateError("bad_sandbox_id", f"{sandbox_id!r} cannot be the id of a sandbox")
        return os.path.join(self.path, "sandboxes", sandbox_id)

    def sandbox_ids(self) -> list[str]:
        with os.scandir(self.room("sandboxes")) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != ".")


def _look(place: str) -> tuple[int, ...]:
    """What has to stay the same for a state directory to be still the one that was checked."""
    about, schema = os.stat(place), os.stat(os.path.join(place, "schema"))
    return (
        about.st_dev,
        about.st_ino,
        about.st_uid,
        about.st_mode,
        about.st_mtime_ns,
        schema.st_ino,
        schema.st_mtime_ns,
        schema.st_size,
    )


def _unusable(place: str, error: OSError) -> StateError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space there, or set ELSEWHERE_HOME to a directory on another file system"
    else:
        hint = "set ELSEWHERE_HOME to a directory that you can write"
    return StateError("state_unusable", f"the state directory {place!r} cannot be used: {error.strerror}", hint=hint)


@contextlib.contextmanager
def locked(path: str, busy: ElsewhereError, *, wait: bool = False) -> Iterator[None]:
    """Nobody else has the lock meanwhile; who may not `wait` raises `busy`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise busy from None
        yield
    finally:
        os.close(fd)


def write_aside(path: str, content: bytes, mode: int = 0o600) -> None:
    """Whole or not at all: readers see the old content or the new one."""
    aside = f"{path}.{os.getpid()}-{get_ident()}.new"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        try:
            _write_all(fd, content)
        finally:
            os.close(fd)
        os.rename(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def write_new(path: str, content: bytes, mode: int = 0o600) -> None:
    """A file that is not there yet, in a place that nobody looks at yet."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        _write_all(fd, content)
    finally:
        os.close(fd)


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


class _Named(Protocol):
    @property
    def id(self) -> str: ...


_Entry = TypeVar("_Entry", bound=_Named)


def meant(every: Sequence[_Entry], wanted: str) -> list[_Entry]:
    """Of what is kept here, oldest first, those that somebody means by an id, the beginning of one, or `@last`."""
    if wanted == "@last":
        return list(every[-1:])
    exact = [one for one in every if one.id == wanted]
    return exact or [one for one in every if wanted and one.id.startswith(wanted)]
