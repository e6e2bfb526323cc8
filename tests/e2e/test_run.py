"""`elsewhere run` from the front door: what it does, what it says, and that reality stays as it is."""

import pytest

from conftest import Person, tree

pytestmark = pytest.mark.one_launcher


def test_the_promise_of_the_first_page(person: Person) -> None:
    """Files are added and deleted, in /etc too for root; the document says exactly that; reality is byte for byte the same."""
    before = tree(person.project)
    etc = "mkdir -p /etc/x && echo y > /etc/x/y; " if person.is_root else ""
    done = person.elsewhere("run", "--json", "--", "sh", "-c", f"echo hi > new.txt; rm README.md; {etc}exit 7")
    document = __import__("json").loads(done.stdout)
    assert done.returncode == 7
    assert document["command"]["exit_code"] == 7
    assert document["command"]["reason"] == "exited"
    assert document["changes"] == {
        "added": (["/etc/x/y"] if person.is_root else []) + ["new.txt"],
        "modified": [],
        "deleted": ["README.md"],
    }
    assert tree(person.project) == before


def test_output_is_the_commands_own(person: Person) -> None:
    done = person.elsewhere("run", "--", "sh", "-c", "echo out; echo err >&2")
    assert done.stdout == "out\n"
    assert "err" in done.stderr
    assert done.returncode == 0


def test_a_child_left_behind_does_not_keep_anybody_waiting(person: Person) -> None:
    done = person.elsewhere("run", "--", "sh", "-c", "sleep 60 & echo done", timeout=30)
    assert done.stdout == "done\n"
    assert not [words for _, words in person.processes() if "sleep 60" in words]


def test_a_file_as_output_can_be_opened_again_inside(user: Person) -> None:
    """Both names of one file stay in order; when nobody writes any more, nobody waits for more."""
    path = user.place / "said"
    with path.open("w") as stream:
        line = "echo one; echo two > /dev/stderr; echo three; exec > /dev/null 2>&1; sleep 0.2"
        done = user.elsewhere("run", "--discard", "-c", line, stdout=stream, stderr=stream)
    assert done.returncode == 0
    assert path.read_text() == "one\ntwo\nthree\n"


def test_a_file_as_input_is_read_no_further_than_the_command_reads(person: Person) -> None:
    path = person.place / "typed"
    path.write_text("0123456789")
    with path.open("rb", buffering=0) as stream:
        done = person.elsewhere("run", "--discard", "--", "dd", "bs=1", "count=3", stdin=stream)
        assert (done.returncode, done.stdout) == (0, "012")
        assert stream.tell() == 3
        assert person.elsewhere("run", "--discard", "--", "cat", stdin=stream).stdout == "3456789"
