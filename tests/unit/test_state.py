"""The state directory: ours alone, made on demand, refused when it cannot be trusted; and files that are whole or not there."""

import os
import stat
import threading
from pathlib import Path

import pytest

from elsewhere import meeting
from elsewhere.errors import StateError
from elsewhere.storage.state import SCHEMA, State, write_aside

ROOMS = ["archive", "bases", "claims", "experiments", "journal", "layers", "mnt", "run", "sandboxes", "spare", "trash", "trust"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def refused(path: Path) -> StateError:
    with pytest.raises(StateError) as caught:
        State.open(str(path))
    assert str(path) in caught.value.message
    assert "ELSEWHERE_HOME" in caught.value.hint
    return caught.value


def test_the_directory_is_made_with_its_rooms_and_closed_to_everybody_else(place: Path) -> None:
    before = os.umask(0)
    try:
        opened = State.open(str(place / "a/b/state"))
    finally:
        os.umask(before)
    assert opened.path == str(place / "a/b/state")
    made = place / "a/b/state"
    assert sorted(entry.name for entry in made.iterdir()) == sorted([*ROOMS, "schema"])
    assert mode(made) == 0o700
    assert {mode(made / room) for room in ROOMS} == {0o700}
    assert (made / "schema").read_text() == f"{SCHEMA}\n"
    assert mode(made / "schema") == 0o600


def test_what_is_there_stays_when_it_is_opened_again(place: Path) -> None:
    State.open(str(place / "state"))
    (place / "state/sandboxes/ew-x").mkdir()
    again = State.open(str(place / "state"))
    assert again == State(str(place / "state"))
    assert again.sandbox_ids() == ["ew-x"]


def test_a_room_that_went_missing_is_made_again(place: Path) -> None:
    State.open(str(place / "state"))
    (place / "state/trash").rmdir()
    State.open(str(place / "state"))
    assert (place / "state/trash").is_dir()


def test_a_directory_that_was_open_to_others_is_closed(place: Path) -> None:
    (place / "state").mkdir()
    (place / "state").chmod(0o755)
    State.open(str(place / "state"))
    assert mode(place / "state") == 0o700


def test_a_link_is_opened_where_it_leads(place: Path) -> None:
    (place / "real").mkdir()
    (place / "link").symlink_to("real")
    assert State.open(str(place / "link")).path == str(place / "real")


def test_somebody_elses_directory_is_refused(place: Path) -> None:
    if os.geteuid() == 0:
        (place / "state").mkdir(mode=0o777)
        os.chown(place / "state", 4242, 4242)
        error = refused(place / "state")
        assert "4242" in error.message
        assert list((place / "state").iterdir()) == []
    else:
        error = refused(Path("/"))
    assert error.code == "state_not_ours"


@pytest.mark.parametrize("found", [str(SCHEMA + 1), "999", "9" * 5000])
def test_a_newer_layout_is_refused(place: Path, found: str) -> None:
    State.open(str(place / "state"))
    (place / "state/schema").write_text(found + "\n")
    error = refused(place / "state")
    assert error.code == "state_too_new"
    assert "upgrade" in error.hint


@pytest.mark.parametrize("found", [b"", b"nonsense\n", b"\xff\xfe\n", "²\n".encode(), b"-1\n", b"1.0\n"], ids=ascii)
def test_a_layout_that_makes_no_sense_is_refused(place: Path, found: bytes) -> None:
    State.open(str(place / "state"))
    (place / "state/schema").write_bytes(found)
    refused(place / "state")


def test_a_parent_that_cannot_be_written_is_an_error_with_a_hint(place: Path) -> None:
    if os.geteuid() == 0:
        target = Path("/proc/elsewhere")  # where not even root can make a directory
    else:
        place.chmod(0o500)
        target = place / "state"
    assert refused(target).code == "state_unusable"


def test_a_file_in_place_of_the_directory_is_an_error_with_a_hint(place: Path) -> None:
    (place / "file").touch()
    assert refused(place / "file").code == "state_unusable"
    assert refused(place / "file/state").code == "state_unusable"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/", "/etc", "../x", "a/..", "a\0b"], ids=ascii)
def test_an_id_that_could_name_anything_else_is_refused(place: Path, name: str) -> None:
    with pytest.raises(StateError) as caught:
        State(str(place)).sandbox(name)
    assert caught.value.code == "bad_sandbox_id"


@pytest.mark.parametrize("name", ["ew-x-12345678", "a", "a..b", "a.b"])
def test_an_id_names_a_directory_of_its_own(place: Path, name: str) -> None:
    assert State(str(place)).sandbox(name) == f"{place}/sandboxes/{name}"


def test_the_sandboxes_are_the_directories_sorted(place: Path) -> None:
    opened = State.open(str(place / "state"))
    for name in ("ew-b", "ew-a", "ew-c"):
        os.mkdir(opened.sandbox(name))
    (place / "state/sandboxes/file").touch()
    (place / "state/sandboxes/link").symlink_to("ew-a")
    assert opened.sandbox_ids() == ["ew-a", "ew-b", "ew-c"]


def test_the_default_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("ELSEWHERE_HOME", raising=False)
    assert meeting.default_state() == ("/var/lib/elsewhere" if os.getuid() == 0 else "/home/me/.local/share/elsewhere")
    monkeypatch.setenv("ELSEWHERE_HOME", str(place / "chosen"))
    assert meeting.default_state() == str(place / "chosen")
    monkeypatch.chdir(place)
    monkeypatch.setenv("ELSEWHERE_HOME", "relative/../chosen")
    assert meeting.default_state() == str(place / "chosen")


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_home_that_is_no_absolute_path_is_looked_up(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert meeting.home_directory() == "/root"
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    assert meeting.home_directory() == "/nonexistent"


# -- written aside --------------------------------------------------------------------------------------------------------------


def test_content_and_mode_are_those_that_were_asked_for_and_nothing_is_left_over(place: Path) -> None:
    write_aside(str(place / "one"), b"content")
    write_aside(str(place / "two"), b"", mode=0o400)
    assert (place / "one").read_bytes() == b"content"
    assert (mode(place / "one"), mode(place / "two")) == (0o600, 0o400)
    assert sorted(entry.name for entry in place.iterdir()) == ["one", "two"]


def test_a_reader_of_the_old_file_keeps_the_old_content(place: Path) -> None:
    write_aside(str(place / "file"), b"old")
    with open(place / "file", "rb") as reader:
        write_aside(str(place / "file"), b"the new content")
        assert reader.read() == b"old"
    assert (place / "file").read_bytes() == b"the new content"


def test_a_link_is_replaced_and_not_written_through(place: Path) -> None:
    (place / "victim").write_bytes(b"untouched")
    (place / "file").symlink_to("victim")
    write_aside(str(place / "file"), b"new")
    assert (place / "victim").read_bytes() == b"untouched"
    assert not (place / "file").is_symlink()


def test_a_reader_sees_the_old_content_or_the_new_and_never_a_part(place: Path) -> None:
    versions = {bytes([65 + number]) * 200_000 for number in range(4)}
    write_aside(str(place / "file"), min(versions))
    seen: set[bytes] = set()
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.add((place / "file").read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(25):
        for content in versions:
            write_aside(str(place / "file"), content)
    over.set()
    reader.join()
    assert seen
    assert seen <= versions


def test_a_failure_leaves_the_old_content_and_nothing_aside(place: Path) -> None:
    (place / "file/inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_aside(str(place / "file"), b"new")
    assert [entry.name for entry in place.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_old_content_and_nothing_aside(place: Path) -> None:
    """A limit on the size of files fails in the middle of a write, as a full disk does."""
    import resource
    import signal

    write_aside(str(place / "file"), b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_aside(str(place / "file"), b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (place / "file").read_bytes() == b"old"
    assert [entry.name for entry in place.iterdir()] == ["file"]


def test_two_entries_of_one_second_have_names_of_their_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chances = iter([b"\0\1", b"\0\1", b"\0\2"])
    monkeypatch.setattr(os, "urandom", lambda _: next(chances))
    state = State.open(str(place / "state"))
    os.mkdir(state.room("shelf"))
    found = [state.entry("shelf", "p", 255.5) for _ in range(2)]
    assert found == [(name, f"{place}/state/shelf/{name}") for name in ("pff0001", "pff0002")]
    assert sorted(os.listdir(state.room("shelf"))) == ["pff0001", "pff0002"]
