"""What runs, as /proc tells it: who belongs to whom. For the keeper, so nothing here imports anything at run time."""

import os
import signal
import time
from collections.abc import Callable

__all__ = [
    "MARK",
    "WINDOW",
    "Process",
    "descendants",
    "everything",
    "goes_on",
    "is_running",
    "kill_quietly",
    "mark_of",
    "others",
    "reap_all",
    "since",
    "stop_all",
    "told",
    "tree_of",
    "wait_for",
]

# Every command carries this variable, so that what it left behind can be found even in a session of its own.
MARK = "ELSEWHERE_COMMAND"
WINDOW = "window"  # the mark of a process that only waits, so that others can look in
_LONGEST_COMMAND_LINE = 1024
_STOPPING_S = 10.0
_LOOKING_S, _LOOKING_LONGEST_S = 0.0005, 0.05
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class Process:
    """One line of /proc/PID/stat, as far as we need it."""

    __slots__ = ("parent", "pid", "rss_kib", "session", "started", "state", "threads", "ticks")

    def __init__(self, pid: int, words: list[bytes]) -> None:
        self.pid = pid
        self.state = words[0].decode("ascii", "replace")
        self.parent = int(words[1])
        self.session = int(words[3])
        self.ticks = int(words[11]) + int(words[12])
        self.threads = int(words[17])
        self.started = int(words[19])
        self.rss_kib = int(words[21]) * _PAGE_KIB


def everything(names: list[str] | None = None) -> dict[int, Process]:
    """All that can be seen, or those of these numbers. Nobody, where nobody can be asked for: a keeper without a free descriptor
    goes on."""
    found: dict[int, Process] = {}
    try:
        names = os.listdir("/proc") if names is None else names
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    words = stream.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if len(words) > 21:
                found[int(name)] = Process(int(name), words)
    return found


def others(*, alone: bool) -> dict[int, Process]:
    """Everything in the sandbox but us, who are its keeper."""
    found = everything()
    mine = found if alone else descendants(os.getpid())
    return {pid: found[pid] for pid in mine if pid != os.getpid() and pid in found}


def tree_of(leader: int, processes: dict[int, Process]) -> set[int]:
    """A process, its descendants, and everybody in a session that it leads."""
    wanted = {leader}
    grown = True
    while grown:
        grown = False
        for pid, process in processes.items():
            if pid not in wanted and (process.parent in wanted or process.session == leader):
                wanted.add(pid)
                grown = True
    return wanted


def since(before: frozenset[tuple[int, int]], processes: dict[int, Process], keeper: int) -> set[int]:
    """Who is not among those that were there before (numbers and when they started), and was not born to one of them: a child has
    its parent for as long as that one lives, and can leave it to the keeper only."""

    def is_new(pid: int) -> bool:
        while pid != keeper and pid in processes:
            if (pid, processes[pid].started) in before:
                return False
            pid = processes[pid].parent
        return True

    return {pid for pid in processes if pid != keeper and is_new(pid)}


def descendants(ancestor: int) -> list[int]:
    processes = everything()
    found = {ancestor}
    grown = True
    while grown:
        more = {pid for pid, process in processes.items() if process.parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found - {ancestor})


def mark_of(pid: int) -> str:
    """Which command a process came from; empty if it does not say."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            environment = b"\0" + stream.read()
    except OSError:
        return ""
    _, found, rest = environment.partition(f"\0{MARK}=".encode())
    return rest.partition(b"\0")[0].decode("ascii", "replace") if found else ""


def told(found: dict[int, Process]) -> list[str]:
    """A line for each: PID PARENT STATE TICKS STARTED RSS_KIB REQUEST COMMAND_LINE, the last one in hexadecimal digits."""
    lines = []
    for pid in sorted(found):
        one = found[pid]
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as stream:
                command = stream.read(_LONGEST_COMMAND_LINE)
        except OSError:
            continue
        words = (pid, one.parent, one.state, one.ticks, one.started, one.rss_kib)
        lines.append(f"{' '.join(map(str, words))} {_word_only(mark_of(pid)) or '-'} {command.hex() or '-'}")
    return lines


def _word_only(text: str) -> str:
    """A mark is a variable that the command may have changed: it must not look like more than one word."""
    return "".join(letter for letter in text[:64] if letter.isascii() and (letter.isalnum() or letter in "-_"))


def wait_for(pids: set[int], seconds: float) -> None:
    """Until they are gone, or only wait to be reaped: one that was killed takes a moment to notice."""
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.001)


def is_running(pid: int | str) -> bool:
    """Whether there is such a process, and it does not only wait to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def kill_quietly(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass  # gone already, which is what was wanted


def stop_all(look: Callable[[], dict[int, Process]]) -> tuple[list[int], bool]:
    """Stop everybody that `look` finds, those too that were being born meanwhile; who was stopped, parents first, and whether
    nobody goes on. Whoever was stopped already is left as they are."""
    stopped: dict[int, None] = {}
    pause, deadline = _LOOKING_S, time.monotonic() + _STOPPING_S
    while time.monotonic() < deadline:
        found = look()
        going = [pid for pid in _parents_first(found) if goes_on(found[pid], "TtZX")]
        if not going:
            return list(stopped), True
        for pid in going:
            kill_quietly(pid, signal.SIGSTOP)
            stopped[pid] = None
        # One that lent its memory to a child (vfork) stops when that one has started its program: so it may, for a moment.
        waiting = {pid for pid in going if found[pid].state == "D"}
        for pid in stopped:
            if pid in found and found[pid].parent in waiting and found[pid].state in "Tt":
                kill_quietly(pid, signal.SIGCONT)
        time.sleep(pause)  # one in the middle of a system call stops at its end
        pause = min(2 * pause, _LOOKING_LONGEST_S)
    return list(stopped), False


def goes_on(process: Process, still: str = "ZX") -> bool:
    """Whether a thread of it is in another state than these. What stands for the whole process is the state of its first thread,
    and the others may go on when that one has stopped, or ended."""
    if process.threads <= 1:
        return process.state not in still
    try:
        tasks = os.listdir(f"/proc/{process.pid}/task")
    except OSError:
        return False
    for task in tasks:
        try:
            with open(f"/proc/{process.pid}/task/{task}/stat", "rb") as stream:
                if stream.read().rpartition(b")")[2].split()[0].decode("ascii", "replace") not in still:
                    return True
        except OSError:
            continue
    return False


def _parents_first(found: dict[int, Process]) -> list[int]:
    def depth(pid: int) -> int:
        steps = 0
        while pid in found and steps < len(found):
            pid, steps = found[pid].parent, steps + 1
        return steps

    return sorted(found, key=depth)


def reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
