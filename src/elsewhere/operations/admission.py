"""Admission: whether there is room for one more running sandbox, and waiting in order until there is.

    claims/<time>-<pid>-<word>   one for each sandbox that asked for memory or processors: what it asked for, and which it is.
                                 Held by a lock while its maker waits or is at it; afterwards it counts for as long as the
                                 sandbox runs
    claims/lock                  held while claims are counted

What all of a user's programs share is the machine: its memory less a reserve, its processors, and (`admission.most`) how many
sandboxes may run. Whoever came first is first; one who gives up or dies loses the place. The disk is different: below its reserve
nobody waits, because nothing will free it by itself.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from elsewhere import units
from elsewhere.clock import monotonic
from elsewhere.errors import Refused, StateError
from elsewhere.operations.confining import Confined
from elsewhere.operations.settings import Resolved, resolve
from elsewhere.sandbox.records import record
from elsewhere.sandbox.records.record import Record
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Claim", "Pause", "Tell", "admitted", "disk_reserve", "readmitted", "waiting"]

_LOOK_S = 0.05
_TELL_S = 10.0
_DISK_PART, _DISK_MOST = 20, 1 << 30  # one part in so many of the file system, at most so much

Tell = Callable[[str], None]
Pause = Callable[[float], None]  # raises when nobody waits any more


@dataclass(slots=True)
class Claim:
    """What one sandbox takes of the machine. `sandbox` is empty as long as there is none; `returning` is one that is there and
    waits to run again."""

    name: str
    memory: int = 0
    cpus: float = 0.0
    admitted: bool = False
    sandbox: str = ""
    returning: str = ""
    held: bool = False

    @property
    def since(self) -> float:
        return int(self.name.partition("-")[0]) / 1e9

    def content(self) -> bytes:
        return json.dumps([self.memory, self.cpus, self.admitted, self.sandbox, self.returning]).encode()


class _Ticket:
    """A claim of ours, locked for as long as we are at it."""

    def __init__(self, room: str, claim: Claim) -> None:
        self.claim = claim
        self.path = os.path.join(room, claim.name)
        with self._usable():
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with self._usable():
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            self.write()
        except BaseException:
            self.close()
            raise

    def write(self) -> None:
        content = self.claim.content()
        with self._usable():
            os.pwrite(self._fd, content, 0)
            os.ftruncate(self._fd, len(content))

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            said = f"the claim {self.path!r} cannot be written: {error.strerror}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StateError("no_room", said, hint="free some space; elsewhere rm throws sandboxes away") from error
            raise StateError("state_unusable", said, hint="look at the owner and mode of its directory") from error

    def belongs_to(self, sandbox_id: str) -> None:
        self.claim.sandbox = sandbox_id
        self.write()

    def close(self) -> None:
        if not self.claim.sandbox:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.close(self._fd)


@contextlib.contextmanager
def admitted(
    state: State, confined: Confined, tell: Tell | None = None, pause: Pause = time.sleep
) -> Iterator[Callable[[str], None]]:
    """While there is room for this one; inside, whoever makes it says which sandbox it became."""
    with _admitted(state, confined.settings, confined.settings.asked_limits(), tell, pause) as belongs_to:
        yield belongs_to


@contextlib.contextmanager
def _admitted(
    state: State, settings: Resolved, asked: Mapping[str, float], tell: Tell | None, pause: Pause, own: str = ""
) -> Iterator[Callable[[str], None]]:
    """`own`: the sandbox that is to run again, whose earlier life does not count."""
    _check_disk(state, settings)
    reserve = int(settings["admission.memory_reserve"] or 0)
    wanted = Claim(f"{time.time_ns():020d}-{os.getpid()}-{os.urandom(4).hex()}", *_needs(asked, reserve), returning=own)
    most = settings["admission.most"]
    if not wanted.memory and not wanted.cpus and most is None and _is_available(reserve):
        yield lambda _: None
        return
    with _counting(state):  # or whoever counts could find it before it is locked, and clear it away
        ticket = _Ticket(state.room("claims"), wanted)
    try:
        _wait(state, ticket, reserve, most, tell, pause if settings["admission.wait"] else None, own)
        yield ticket.belongs_to
    finally:
        ticket.close()


@contextlib.contextmanager
def readmitted(state: State, found: Record, tell: Tell | None = None, pause: Pause = time.sleep) -> Iterator[int]:
    """The same for a sandbox that is there and is about to run again; the disk's reserve."""
    settings = resolve(state, found.project)
    asked = {name: found.limits[name] for name in found.binding if name in found.limits}
    with _admitted(state, settings, asked, tell, pause, found.id) as belongs_to:
        yield disk_reserve(state, settings)
        belongs_to(found.id)


def _needs(asked: Mapping[str, float], reserve: int) -> tuple[int, float]:
    """Only what was asked for is set aside; more than the machine has is all that it has."""
    memory = min(int(asked.get("memory", 0)), _total() - reserve)
    return max(0, memory), min(float(asked.get("cpus", 0.0)), float(os.cpu_count() or 1))


def _wait(
    state: State, ticket: _Ticket, reserve: int, most: int | None, tell: Tell | None, pause: Pause | None, own: str
) -> None:
    """`pause`: how one waits; None: not at all."""
    next_word, said = 0.0, ""
    while True:
        with _counting(state):
            why, ahead = _lacking(state, ticket.claim, reserve, most, own)
            if not why:
                ticket.claim.admitted = True
                ticket.write()
                return
        if pause is None:
            raise Refused(
                "no_room_now",
                f"there is no room for another sandbox now: {why}",
                hint="elsewhere top shows what runs; without --no-wait it waits its turn",
            )
        word = f"waiting for room: {why}" + (f"; {units.count(ahead, 'other')} before this one" if ahead else "")
        if tell is not None and (word != said or monotonic() >= next_word):
            tell(word)
            said, next_word = word, monotonic() + _TELL_S
        pause(_LOOK_S)


@contextlib.contextmanager
def _counting(state: State) -> Iterator[None]:
    fd = os.open(os.path.join(state.room("claims"), "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _lacking(state: State, mine: Claim, reserve: int, most: int | None, own: str) -> tuple[str, int]:
    """What there is too little of, in words (empty: it fits), and how many others were here before."""
    others = [claim for claim in _claims(state) if claim.name != mine.name and not (own and claim.sandbox == own)]
    ahead = sum(not claim.admitted and claim.name < mine.name for claim in others)
    taken = [claim for claim in others if claim.admitted]
    memory, cpus = sum(claim.memory for claim in taken), sum(claim.cpus for claim in taken)
    room, processors = _total() - reserve, float(os.cpu_count() or 1)
    if mine.memory and memory + mine.memory > room:
        return f"{units.format_size(memory)} of {units.format_size(room)} of memory are promised to others", ahead
    if mine.cpus and cpus + mine.cpus > processors:
        return f"{cpus:g} of {processors:g} processors are promised to others", ahead
    if most is not None:
        waiting = _returning(others)
        running = sum(_is_up(state, sandbox_id, waiting) for sandbox_id in state.sandbox_ids() if sandbox_id != own)
        running += sum(not claim.sandbox for claim in taken)
        if running >= most:
            return f"{running} of at most {units.count(most, 'sandbox', 'sandboxes')} running already", ahead
    if not _is_available(reserve):
        return f"less than {units.format_size(reserve)} of memory are free", ahead
    return ("others were here before", ahead) if ahead else ("", 0)


def _claims(state: State) -> list[Claim]:
    """Those that still count; what is left of others is cleared away."""
    room = state.room("claims")
    found = []
    for name in sorted(os.listdir(room)):
        if name == "lock":
            continue
        path = os.path.join(room, name)
        with contextlib.suppress(FileNotFoundError):
            claim = _read(path, name) if name.partition("-")[0].isdecimal() else None
            if claim is None:
                os.unlink(path)
            else:
                found.append(claim)
    waiting = _returning(found)
    return [one for one in found if one.held or _runs(state, one, waiting)]


def _returning(claims: Iterable[Claim]) -> set[str]:
    """Those that wait for room to run again: whoever does that holds them, and they take no place meanwhile. If they counted, two
    of them would wait for each other."""
    return {one.returning for one in claims if one.held and not one.admitted and one.returning}


def _runs(state: State, claim: Claim, waiting: Container[str]) -> bool:
    if _is_up(state, claim.sandbox, waiting):
        return True
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(state.room("claims"), claim.name))
    return False


def _is_up(state: State, sandbox_id: str, waiting: Container[str]) -> bool:
    """Whether it takes its place: it runs, or somebody is at it, who may have ended it only to start it again."""
    return record.is_alive(state, sandbox_id) or (sandbox_id not in waiting and record.is_locked(state, sandbox_id))


def _read(path: str, name: str) -> Claim | None:
    """None: its maker died before there was a sandbox, or nobody of ours wrote it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
        try:
            memory, cpus, was_admitted, sandbox, *more = json.loads(os.read(fd, 4096) or b'[0, 0, false, ""]')
            claim = Claim(name, int(memory), float(cpus), bool(was_admitted), str(sandbox), str(*more[:1]), held)
        except (ValueError, TypeError):
            return None
        return claim if held or claim.sandbox else None
    finally:
        os.close(fd)


def waiting(state: State) -> list[Claim]:
    """Those that wait for room, first come first."""
    with _counting(state):
        return [claim for claim in _claims(state) if not claim.admitted]


# -- the machine ----------------------------------------------------------------------------------------------------------------


def disk_reserve(state: State, settings: Resolved) -> int:
    asked = settings["admission.disk_reserve"]
    if asked is not None:
        return int(asked)
    room = os.statvfs(state.path)
    return min(room.f_blocks * room.f_frsize // _DISK_PART, _DISK_MOST)


def _check_disk(state: State, settings: Resolved) -> None:
    reserve, room = disk_reserve(state, settings), os.statvfs(state.path)
    free = room.f_bavail * room.f_frsize
    if free < reserve:
        raise StateError(
            "disk_reserve",
            f"{units.format_size(free)} are free on the disk of {state.path!r}, and {units.format_size(reserve)} are kept",
            hint="free some space; elsewhere rm throws sandboxes away; [admission] disk_reserve says how much is kept",
        )


def _total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _is_available(reserve: int) -> bool:
    """What can be freed besides is asked for only where what is free is not enough: that takes longer."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >= reserve or _available() >= reserve


def _available() -> int:
    with open("/proc/meminfo", "rb") as stream:
        for line in stream:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return _total()
