"""Commands of a stage on the host: what they are given, how they end, and what is kept of what they say."""

import contextlib
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import eventually
from elsewhere.changes.sides import sides_of
from elsewhere.errors import Broken
from elsewhere.promotion import deploying
from elsewhere.promotion.pieces import Piece
from elsewhere.sandbox.launching import engine
from elsewhere.sandbox.networking import calling
from elsewhere.storage.state import State


def run(place: Path, command: str, timeout: float = 60.0, **more: str) -> deploying.Ended:
    surroundings = {**deploying.variables(place.name, "production", str(place / "change")), **more}
    return deploying.run(command, str(place), str(place / "said"), surroundings, timeout)


def said(ended: deploying.Ended) -> tuple[bytes, bytes]:
    return Path(ended.stdout).read_bytes(), Path(ended.stderr).read_bytes()


def test_a_command_knows_what_it_deploys(place: Path) -> None:
    ended = run(place, 'pwd; echo "$ELSEWHERE_PROMOTION $ELSEWHERE_STAGE $ELSEWHERE_CHANGE"; echo no >&2; cat; exit 3')
    assert said(ended) == (f"{place}\n{place.name} production {place}/change\n".encode(), b"no\n")
    assert (ended.exit_code, ended.reason, ended.good, ended.truncated) == (3, "exited", False, False)
    assert stat.S_IMODE(os.stat(ended.stdout).st_mode) == 0o600
    assert run(place, "true").good


def test_it_has_the_callers_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    assert said(run(place, "echo $TOKEN_OF_MINE"))[0] == b"secret\n"


def test_a_signal_ends_it_and_is_told(place: Path) -> None:
    ended = run(place, "kill -SEGV $$")
    assert (ended.exit_code, ended.reason, ended.good) == (128 + signal.SIGSEGV, "signaled", False)


def test_what_is_said_is_kept_up_to_a_cap_and_never_stalls(place: Path) -> None:
    ended = run(place, "head -c 5000000 /dev/zero; echo done >&2")
    assert ended.good
    assert ended.truncated
    assert [len(data) for data in said(ended)] == [deploying.CAP, 5]


@pytest.mark.slow
def test_a_time_out_takes_the_whole_group(place: Path) -> None:
    ended = run(place, f"echo started; (sleep 61; touch late) & echo $! > {place}/pid; trap '' TERM; sleep 62", timeout=0.5)
    assert (ended.reason, ended.good) == ("timeout", False)
    assert said(ended)[0] == b"started\n"
    pid = int((place / "pid").read_text())
    assert eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    assert not (place / "late").exists()


@pytest.fixture
def left(place: Path) -> Iterator[Path]:
    yield place
    for file in place.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), 9)


def test_what_it_leaves_running_lives_on_and_is_not_waited_for(left: Path) -> None:
    ended = run(left, f"sleep 63 & echo $! > {left}/a.pid; echo here")
    assert ended.good
    assert ended.seconds < 60
    assert said(ended)[0] == b"here\n"
    os.kill(int((left / "a.pid").read_text()), 0)


def test_what_an_interrupted_one_left_is_ended_and_nothing_else(left: Path) -> None:
    run(left, f"setsid sleep 64 & echo $! > {left}/a.pid")
    run(left, f"sleep 65 & echo $! > {left}/b.pid", ELSEWHERE_STAGE="staging")
    with subprocess.Popen(["sleep", "66"]) as mine:
        assert deploying.end_left_over(left.name, "production") >= 1
        ended = (left / "a.pid").read_text().strip()
        assert eventually(lambda: not os.path.exists(f"/proc/{ended}")), "dead, and only to be buried"
        os.kill(int((left / "b.pid").read_text()), 0)
        assert mine.poll() is None
        mine.kill()
    assert deploying.end_left_over(left.name, "production") == 0


def test_what_serves_everybody_does_not_count_as_what_a_command_left(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a command starts the launcher or the network's service, either lives on."""
    monkeypatch.setenv("ELSEWHERE_HOME", str(place / "state"))
    for name, value in {**deploying.variables("p", "production", "/c"), "MINE": "x"}.items():
        monkeypatch.setenv(name, value)
    state, seen = State.open(), list[dict[str, str]]()
    monkeypatch.setattr(subprocess, "run", lambda *_, env, **__: seen.append(env))
    monkeypatch.setattr(os, "posix_spawn", lambda path, words, env, **_: seen.append(env))
    engine._start(state, "x", str(place / "log"), [])
    calling._spawn(state, 0, 0, direct=True)
    assert [one["MINE"] for one in seen] == ["x", "x"]
    assert not [one for one in seen if set(deploying.variables("", "", "")) & set(one)]


def test_a_directory_that_is_gone_is_told(place: Path) -> None:
    with pytest.raises(Broken, match="cannot be started"):
        deploying.run("true", str(place / "gone"), str(place / "said"), {}, 5)


# -- the change -----------------------------------------------------------------------------------------------------------------


def pieces(place: Path) -> list[Piece]:
    """Of two directories, everything in them."""
    before, after = place / "before", place / "after"
    names = {str(path.relative_to(top)) for top in (before, after) for path in top.rglob("*")}
    old, new = sides_of([str(before)]), sides_of([str(after)])
    return [Piece("/project", name, old(name), new(name)) for name in sorted(names)]


@pytest.fixture
def changed(place: Path) -> list[Piece]:
    for top in ("before", "after"):
        (place / top / "sub").mkdir(parents=True)
    (place / "before" / "gone\nname").write_text("gone")
    (place / "before" / "text").write_text("one\ntwo\n")
    (place / "after" / "text").write_text("one\n2\n")
    (place / "after" / "sub" / "tool").write_bytes(b"\0\1\xff")
    (place / "after" / "sub" / "tool").chmod(0o755)
    (place / "after" / "link").symlink_to("sub/tool")
    (place / "after" / "empty").mkdir(mode=0o700)
    return pieces(place)


def test_the_change_is_laid_out_as_it_is_to_be(place: Path, changed: list[Piece]) -> None:
    deploying.lay_out(str(place / "out"), [(one.path, one.after) for one in changed], b"patch")
    out = place / "out"
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == [
        "change.patch", "deleted", "tree", "tree/empty", "tree/link", "tree/sub", "tree/sub/tool", "tree/text",
    ]  # fmt: skip
    assert (out / "deleted").read_bytes() == b"gone\nname\0"
    assert (out / "change.patch").read_bytes() == b"patch"
    assert (out / "tree" / "sub" / "tool").read_bytes() == b"\0\1\xff"
    assert stat.S_IMODE((out / "tree" / "sub" / "tool").stat().st_mode) == 0o755
    assert os.readlink(out / "tree" / "link") == "sub/tool"
    assert stat.S_IMODE((out / "tree" / "empty").stat().st_mode) == 0o700


def test_the_patch_makes_of_the_one_the_other(place: Path, changed: list[Piece]) -> None:
    (place / "change.patch").write_bytes(deploying.patch_of(changed, "/project"))
    subprocess.run(["git", "apply", "--binary", "../change.patch"], cwd=place / "before", check=True)
    assert (place / "before" / "text").read_text() == "one\n2\n"
    assert (place / "before" / "sub" / "tool").read_bytes() == b"\0\1\xff"
    assert os.readlink(place / "before" / "link") == "sub/tool"
    assert not (place / "before" / "gone\nname").exists()


def test_a_file_that_became_a_directory_is_deleted_in_the_patch(place: Path) -> None:
    (place / "before").mkdir()
    (place / "before" / "a").write_text("a\n")
    (place / "after" / "a").mkdir(parents=True)
    (place / "after" / "a" / "b").write_text("b\n")
    (place / "change.patch").write_bytes(deploying.patch_of(pieces(place), "/project"))
    subprocess.run(["git", "apply", "../change.patch"], cwd=place / "before", check=True)
    assert (place / "before" / "a" / "b").read_text() == "b\n"
