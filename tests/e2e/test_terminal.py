"""On a terminal: the command has one of its own, keys reach it, its size follows, and a summary comes at the end."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time

from conftest import Person


class Terminal:
    """The command of a person on a real pseudo-terminal, as a shell would start it."""

    def __init__(self, person: Person, *arguments: str) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(person.project)
                if person.identity():
                    os.setgroups([])
                    os.setresgid(person.uid, person.uid, person.uid)
                    os.setresuid(person.uid, person.uid, person.uid)
                os.execve(person.python, person.command(*arguments), {**person.environment(), "TERM": "xterm"})
            finally:
                os._exit(99)
        self.seen = b""
        self.resize(40, 100)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def expect(self, text: str, seconds: float = 20.0) -> str:
        """Read until `text` was seen; what came up to there."""
        deadline = time.monotonic() + seconds
        while text.encode() not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} never came: {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.master, 4096)
                except OSError:
                    assert text.encode() in self.seen, f"{text!r} never came: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text.encode())
        return before.decode(errors="replace") + text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self) -> tuple[int, str]:
        rest = self.seen
        while True:
            try:
                data = os.read(self.master, 4096)
            except OSError:
                break
            if not data:
                break
            rest += data
        _, status = os.waitpid(self.pid, 0)
        os.close(self.master)
        return os.waitstatus_to_exitcode(status), rest.decode(errors="replace")


def test_the_command_has_a_terminal_of_its_own(person: Person) -> None:
    terminal = Terminal(
        person, "run", "--", "sh", "-c", "tty; test -t 0 && test -t 1 && test -t 2 && echo all three; stty size; exit 4"
    )
    terminal.expect("/dev/pts/0")
    terminal.expect("all three")
    terminal.expect("40 100")
    code, rest = terminal.end()
    assert code == 4
    assert "exit 4" in rest


def test_keys_reach_the_command(person: Person) -> None:
    terminal = Terminal(person, "run", "--", "sh", "-c", "echo ready; read line; echo got $line")
    terminal.expect("ready")
    terminal.type("hello\r")
    terminal.expect("got hello")
    assert terminal.end()[0] == 0


def test_control_c_ends_the_command_and_not_the_cleaning_up(person: Person) -> None:
    terminal = Terminal(person, "run", "--", "sh", "-c", ": > made; echo ready; sleep 60")
    terminal.expect("ready")
    terminal.type("\x03")
    code, rest = terminal.end()
    assert code == 130
    assert "1 added" in rest
    assert "+ made" in rest
    assert person.json("list")["total"] == 1
    assert not [words for _, words in person.processes() if "sleep 60" in words]


def test_a_new_size_reaches_the_command(person: Person) -> None:
    terminal = Terminal(
        person, "run", "--", "sh", "-c", "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done"
    )
    terminal.expect("ready")
    terminal.resize(33, 77)
    os.kill(terminal.pid, signal.SIGWINCH)
    terminal.expect("33 77")
    assert terminal.end()[0] == 0


def test_the_summary_names_changes_and_what_to_type_next(person: Person) -> None:
    code, rest = Terminal(person, "run", "--", "sh", "-c", "rm README.md; echo x > one; echo y >> src/app.py").end()
    assert code == 0
    for text in (
        "exit 0",
        "1 added, 1 modified, 1 deleted",
        "+ one",
        "~ src/app.py",
        "- README.md",
        "elsewhere diff ",
        "elsewhere rm ",
    ):
        assert text in rest
    assert "\x1b[" in rest


def test_names_cannot_write_on_the_terminal(person: Person) -> None:
    """A file name with escape sequences in it is shown, not obeyed."""
    _, rest = Terminal(person, "run", "--", "sh", "-c", "touch $(printf 'evil\\033]0;title\\007')").end()
    assert "\x1b]0;title" not in rest
    assert "\\x1b]0;title\\x07" in rest


def test_the_terminal_is_as_before_when_the_launcher_is_killed(person: Person) -> None:
    terminal = Terminal(person, "run", "--", "sh", "-c", "echo ready; sleep 60")
    before = termios.tcgetattr(terminal.master)[3] & termios.ICANON
    terminal.expect("ready")
    fronts = [pid for pid, words in person.processes() if "elsewhere.cli.launch" in words]
    for pid in fronts:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code, rest = terminal.end()
    assert code == 125
    assert "launcher" in rest
    assert before


def test_what_is_typed_and_not_read_holds_nobody_up(person: Person) -> None:
    terminal = Terminal(
        person, "run", "--", "sh", "-c", "stty raw -echo; echo ready; sleep 0.5; head -c 300000 /dev/zero | tr '\\0' x; echo done"
    )
    terminal.expect("ready")
    os.set_blocking(terminal.master, False)
    for _ in range(8):
        try:
            os.write(terminal.master, b"y" * 4000)
        except BlockingIOError:
            break
    os.set_blocking(terminal.master, True)
    terminal.expect("done")
    assert terminal.end()[0] == 0


def test_a_command_that_lets_go_of_its_terminal_is_waited_for(person: Person) -> None:
    terminal = Terminal(person, "run", "--", "sh", "-c", "echo ready; exec </dev/null >/dev/null 2>&1; sleep 0.5; exit 5")
    terminal.expect("ready")
    assert terminal.end()[0] == 5
