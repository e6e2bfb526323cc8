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

import pytest

from conftest import Person, eventually

pytestmark = pytest.mark.one_launcher


class Terminal:
    """The command of a person on a real pseudo-terminal, as a shell would start it; or the shell itself, with a `line` in which the
    command is "$@"."""

    def __init__(self, person: Person, *arguments: str, line: str = "", blocking: bool = True) -> None:
        words = ["/bin/sh", "-c", line, "sh"] if line else []
        words += person.command(*arguments)
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(person.project)
                if person.identity():
                    os.setgroups([])
                    os.setresgid(person.uid, person.uid, person.uid)
                    os.setresuid(person.uid, person.uid, person.uid)
                os.set_blocking(1, blocking)
                os.execve(words[0], words, {**person.environment(), "TERM": "xterm"})
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
    assert eventually(lambda: any("sleep 60" in words for _, words in person.commands()))
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


def test_who_is_asked_about_the_winner_of_a_race_has_seen_it(person: Person) -> None:
    terminal = Terminal(person, "race", "-a", "one=echo x > .envrc", "--promote")
    before = terminal.expect("go on? [y/N] ")
    assert before.index("race e") < before.rindex("\x1b[J") < before.index("one won") < before.index(".envrc")
    terminal.type("y\r")
    code, rest = terminal.end()
    assert (code, "one won" in rest, "1 written" in rest) == (0, False, True), rest


@pytest.mark.parametrize(("way", "code"), [("\x03", 130), ("\x1c", 131), ("\x1a", 147), ("kill", 137)])
def test_who_leaves_a_question_has_not_agreed(person: Person, way: str, code: int) -> None:
    """And what they type next is for their shell."""
    person.json("create", "--name", "box")
    person.elsewhere("exec", "box", "-c", "echo x > .envrc", check=True)
    terminal = Terminal(
        person, "promote", "box", line='set -m; "$@"; echo over with $?; read line; echo the shell got $line; fg; exit 0'
    )
    terminal.expect("go on? [y/N] ")
    if way == "kill":
        (client,) = [pid for pid, words in person.processes() if "promote box" in words and "/bin/sh" not in words]
        os.kill(client, signal.SIGKILL)
    else:
        terminal.type(way)
    terminal.expect(f"over with {code}")
    terminal.type("y\r")
    terminal.expect("the shell got y")
    assert terminal.end()[0] == 0
    assert not (person.project / ".envrc").exists()


def test_a_question_in_the_background_takes_no_answer(person: Person) -> None:
    person.json("create", "--name", "box")
    person.elsewhere("exec", "box", "-c", "echo x > .envrc", check=True)
    busy = "until test -e ../typed; do sleep 0.05; done"
    line = f'set -m; "$@" > /dev/null & {busy}; read line; echo the shell got $line; fg'
    terminal = Terminal(person, "promote", "box", line=line)
    terminal.expect("go on? [y/N] ")
    terminal.type("y\r")
    (person.place / "typed").touch()
    terminal.expect("the shell got y")
    terminal.type("y\r")
    assert terminal.end()[0] == 0
    assert (person.project / ".envrc").exists()


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


# -- a terminal of the host's never goes in ---

ASK = "for n in 0 1 2; do test -t $n && echo $n is one >> told; done; echo asked >> told; stty -echo <&0; stty -echo <&1; stty -echo <&2"
REDIRECTED = {
    "stdin": '"$@" < /dev/null',
    "stdout": '"$@" > said',
    "a pipe": '"$@" 2>&1 | cat',
    "only stderr is left": '"$@" < /dev/null > said',
    "only stdout is left": '"$@" < /dev/null 2> said',
}


@pytest.mark.parametrize("case", REDIRECTED)
def test_what_is_not_redirected_is_no_terminal_of_the_hosts(person: Person, case: str) -> None:
    """Outside the same line finds one."""
    line = f"{REDIRECTED[case]}; echo over; read line"

    def echoes(terminal: Terminal) -> bool:
        terminal.expect("over")
        found = bool(termios.tcgetattr(terminal.master)[3] & termios.ECHO)
        terminal.type("\r")
        terminal.end()
        return found

    assert not echoes(Terminal(person, line=f"set -- sh -c '{ASK}'; {line}"))
    assert "is one" in (person.project / "told").read_text()
    (person.project / "told").unlink()
    person.json("create", "--name", "box")
    assert echoes(Terminal(person, "exec", "box", "--", "sh", "-c", ASK, line=line))
    assert person.elsewhere("exec", "box", "--", "cat", "told").stdout == "asked\n"
    (person.project / "said").unlink(missing_ok=True)


def test_keys_reach_a_command_whose_output_goes_elsewhere(person: Person) -> None:
    terminal = Terminal(
        person, "run", "--", "sh", "-c", "echo ready >&2; read a; echo more >&2; read b; echo got $a $b; cat", line='"$@" > said'
    )
    terminal.expect("ready")
    terminal.type("one\r")
    terminal.expect("more")
    terminal.type("two\rthree\r\x04")
    assert terminal.end()[0] == 0
    assert (person.project / "said").read_text() == "got one two\nthree\n"
    (person.project / "said").unlink()


def test_control_c_reaches_a_command_whose_output_goes_elsewhere(person: Person) -> None:
    terminal = Terminal(person, "run", "--", "sh", "-c", "echo ready >&2; sleep 60", line='exec "$@" > said')
    terminal.expect("ready")
    terminal.type("\x03")
    assert terminal.end()[0] == 130
    assert not [words for _, words in person.processes() if "sleep 60" in words]
    (person.project / "said").unlink()


def test_what_is_typed_after_the_end_is_not_for_who_was_left_behind(person: Person) -> None:
    person.json("create", "--name", "box")
    leave = "exec 3<&0; { cat <&3 > heard; echo end >> heard; } & exit 0"
    terminal = Terminal(
        person, "exec", "box", "--", "sh", "-c", leave, line='"$@" > /dev/null; echo over; read line; echo the shell got $line'
    )
    terminal.expect("over")
    terminal.type("a secret\r")
    terminal.expect("the shell got a secret")
    assert terminal.end()[0] == 0
    assert eventually(lambda: person.elsewhere("exec", "box", "--", "cat", "heard").stdout == "end\n")


def test_a_command_in_the_background_takes_no_keys(person: Person) -> None:
    """It goes on all the same; in front again, it has them."""
    terminal = Terminal(
        person,
        *("run", "--", "sh", "-c", "echo begun >&2; read line; echo the command got $line >&2"),
        line='set -m; "$@" > /dev/null & read line; echo the shell got $line; fg',
    )
    terminal.expect("begun")
    terminal.type("one\r")
    terminal.expect("the shell got one")
    terminal.type("two\r")
    terminal.expect("the command got two")
    assert terminal.end()[0] == 0


def test_a_terminal_that_nobody_waits_for_gets_everything(person: Person) -> None:
    terminal = Terminal(
        person,
        "run",
        "--",
        "sh",
        "-c",
        "head -c 300000 /dev/zero | tr '\\0' x; echo done",
        line='"$@" < /dev/null',
        blocking=False,
    )
    code, said = terminal.end()
    assert (code, said.count("x") >= 300000, "done" in said) == (0, True, True)
