"""`elsewhere run` from the front door: what it does, what it says, and that reality stays as it is."""

from conftest import Person, tree


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
