"""Agent programs work in a sandbox with their profile, and not without it: a program of that name, which does with its files what
the real one does. The real ones need accounts."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_ladder import Elsewhere, needs_fuse, needs_landlock, needs_root

from conftest import Person, tree

pytestmark = pytest.mark.one_launcher

# Reads its login and its settings; writes a transcript, what it knows of projects, and tries to renew its login.
CLAUDE = """#!/bin/sh
place=${CLAUDE_CONFIG_DIR:-$HOME/.claude}
echo "token: $(cat "$place/.credentials.json") key: $ANTHROPIC_API_KEY settings: $(cat "$place/settings.json") known: $(cat "$HOME/.claude.json")" || exit 1
mkdir -p "$place/projects" && echo "more $1" >> "$place/projects/session.jsonl" || exit 2
echo "$1" >> "$HOME/.claude.json" || exit 3
echo renewed > "$place/.credentials.json"
cp "$place/.credentials.json" "$place/aside" && mv "$place/aside" "$place/.credentials.json"
cat "$place/projects/session.jsonl"
"""
VIEWS = ("machine", "project")


@pytest.fixture(autouse=True)
def nobody_is_called(person: Person) -> None:
    """What can be reached has tests of its own."""
    person.extra["ELSEWHERE_NETWORK"] = "none"


def plant(path: Path, text: str, mode: int = 0o600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def settled(person: Person) -> dict[str, tuple[object, ...]]:
    """Somebody who uses two agents, and has other things to hide; what their home is like."""
    plant(person.home / ".local/bin/claude", CLAUDE, 0o755)
    plant(person.home / ".claude/.credentials.json", "claude-login")
    plant(person.home / ".claude/settings.json", "claude-settings")
    plant(person.home / ".claude/projects/session.jsonl", "before\n")
    plant(person.home / ".claude.json", "claude-knows\n")
    plant(person.home / ".codex/auth.json", "codex-login")
    plant(person.home / ".aws/credentials", "aws-keys")
    plant(person.home / ".ssh/id_ed25519", "ssh-keys")
    plant(person.home / "notes", "of nobody's business")
    person.own(person.home)
    person.extra["PATH"] = f"{person.home}/.local/bin:{os.environ['PATH']}"
    return tree(person.home)


def run(person: Person, line: str, *options: str) -> dict[str, Any]:
    document: dict[str, Any] = person.json("run", *options, "-c", line)
    return {**document, **document["command"]}


def said(person: Person, *words: str) -> str:
    """Of a command in a sandbox that lives."""
    return str(person.json("exec", *words)["command"]["stdout"])


def seen(person: Person, *options: str) -> str:
    """What a command finds out about everything that is planted, by name and by content."""
    line = (
        "cd ~ && cat .codex/auth.json .aws/credentials .ssh/id_ed25519 .claude/.credentials.json .claude.json 2>/dev/null; true"
    )
    return str(run(person, line, "--discard", *options)["stdout"])


@pytest.mark.parametrize("view", VIEWS)
def test_an_agent_works_with_its_profile_and_reality_is_as_it_was(person: Person, view: str) -> None:
    before = settled(person)
    person.extra["ANTHROPIC_API_KEY"] = "a-key"
    document = run(person, "claude one; echo $?", "--view", view, "--profile", "claude")
    said = "token: claude-login key: a-key settings: claude-settings known: claude-knows\nbefore\nmore one\n0\n"
    assert document["stdout"] == said, document["stderr"]
    assert "Read-only file system" in document["stderr"], "a login is not renewed inside"
    assert tree(person.home) == before
    assert document["changes"] == {**document["changes"], "added": [], "modified": [], "deleted": []}
    assert not document["sandbox"]["kept"], "what it knows now is nobody's change"


@pytest.mark.parametrize("view", VIEWS)
def test_without_its_profile_it_does_not(person: Person, view: str) -> None:
    before = settled(person)
    person.extra["ANTHROPIC_API_KEY"] = "a-key"
    document = run(person, "claude one; echo $?", "--view", view)
    assert "login" not in document["stdout"]
    assert "claude-" not in document["stdout"]
    assert "a-key" not in document["stdout"]
    assert tree(person.home) == before


@pytest.mark.parametrize("view", VIEWS)
def test_everything_else_that_is_hidden_stays_hidden(person: Person, view: str) -> None:
    settled(person)
    assert seen(person, "--view", view) == ""
    assert seen(person, "--view", view, "--profile", "claude") == "claude-loginclaude-knows\n"
    assert seen(person, "--view", view, "--profile", "codex") == "codex-login"
    assert seen(person, "--view", view, "--profile", "codex", "--profile", "claude") == "codex-loginclaude-loginclaude-knows\n"
    if view == "project":
        assert (
            run(person, "cat ~/notes; ls -A ~", "--view", view, "--profile", "codex", "--discard")["stdout"] == ".codex\n.local\n"
        )


@pytest.mark.parametrize("view", VIEWS)
def test_what_it_learned_lives_as_long_as_its_sandbox(person: Person, view: str) -> None:
    before = settled(person)
    person.json("create", "--view", view, "--profile", "claude", "--name", "agent")
    assert said(person, "agent", "--", "claude", "one").endswith("before\nmore one\n")
    person.elsewhere("snapshot", "agent", "first", check=True)
    person.elsewhere("stop", "agent", check=True)
    assert said(person, "agent", "--", "claude", "two").endswith("known: claude-knows\none\nbefore\nmore one\nmore two\n")
    person.elsewhere("fork", "agent", "--from", "first", "--name", "other", check=True)
    assert said(person, "other", "--", "claude", "three").endswith("before\nmore one\nmore three\n")
    person.elsewhere("rollback", "agent", "first", check=True)
    assert said(person, "agent", "--", "claude", "four").endswith("before\nmore one\nmore four\n")
    person.elsewhere("rollback", "agent", "base", check=True)
    assert said(person, "agent", "--", "claude", "five").endswith("known: claude-knows\nbefore\nmore five\n")
    assert person.json("diff", "agent")["changes"]["added"] == []
    assert tree(person.home) == before


@pytest.mark.parametrize("view", VIEWS)
def test_every_command_of_a_sandbox_gets_the_variables_of_its_own_caller(person: Person, view: str) -> None:
    settled(person)
    person.json("create", "--view", view, "--profile", "codex", "--name", "agent")
    show = ("agent", "--", "sh", "-c", "echo $OPENAI_API_KEY-$ANTHROPIC_API_KEY")
    assert said(person, *show) == "-\n"
    person.extra |= {"OPENAI_API_KEY": "k1", "ANTHROPIC_API_KEY": "k2"}
    assert said(person, *show) == "k1-\n"


@pytest.mark.parametrize("view", VIEWS)
def test_no_secret_is_written_down(person: Person, view: str) -> None:
    settled(person)
    person.extra["ANTHROPIC_API_KEY"] = "the-key-itself"
    document = person.json("create", "--view", view, "--profile", "claude", "--name", "agent")
    person.json("exec", "agent", "--", "true")
    inspected = person.json("inspect", "agent")
    confinement = inspected["sandbox"]["confinement"]
    assert confinement["profiles"] == ["claude"]
    assert confinement["copies"] == [f"{person.home}/.claude", f"{person.home}/.claude.json"]
    assert "ANTHROPIC_API_KEY" in confinement["variables"]
    place = person.state / "sandboxes" / document["sandbox"]["id"]
    told = json.dumps(inspected) + person.elsewhere("logs", "agent").stdout
    told += "".join(path.read_text(errors="replace") for path in place.iterdir() if path.is_file())
    for secret in ("the-key-itself", "claude-login", "claude-knows"):
        assert secret not in told


def test_a_place_that_was_moved_is_found(person: Person) -> None:
    before = settled(person)
    (person.home / ".claude").rename(person.place / "moved")
    person.extra["CLAUDE_CONFIG_DIR"] = f"{person.place}/moved"
    kept = tree(person.place / "moved")
    for view in VIEWS:
        document = run(person, "claude one", "--view", view, "--profile", "claude")
        assert "claude-login" in document["stdout"]
        assert document["stdout"].endswith("before\nmore one\n"), document["stderr"]
    assert tree(person.place / "moved") == kept
    assert before


def test_a_directory_that_is_a_link_is_found(person: Person) -> None:
    settled(person)
    (person.home / "dotfiles").mkdir()
    (person.home / ".claude").rename(person.home / "dotfiles/claude")
    (person.home / ".claude").symlink_to("dotfiles/claude")
    person.own(person.home)
    before = tree(person.home)
    for view in VIEWS:
        document = run(person, "claude one", "--view", view, "--profile", "claude")
        assert document["stdout"].endswith("before\nmore one\n"), document["stderr"]
    assert tree(person.home) == before


def test_a_change_of_reality_is_seen_by_the_next_sandbox(person: Person) -> None:
    """Also by one that was made in advance."""
    settled(person)
    for text in ("first", "second", "third"):
        plant(person.home / ".claude.json", text)
        person.own(person.home)
        assert run(person, "cat ~/.claude.json", "--view", "project", "--profile", "claude", "--discard")["stdout"] == text


def test_a_place_in_a_hidden_directory_shows_alone(person: Person) -> None:
    settled(person)
    plant(person.home / ".ssh/agent/settings", "mine")
    plant(person.home / ".config/elsewhere/profiles/mine.toml", 'state = ["~/.ssh/agent", "~/.aws/credentials"]')
    person.own(person.home)
    before = tree(person.home)
    line = "cat ~/.ssh/agent/settings; echo x >> ~/.ssh/agent/settings; ls -A ~/.ssh; cat ~/.ssh/id_ed25519"
    document = run(person, line, "--profile", "mine", "--discard")
    assert document["stdout"] == "mineagent\n"
    assert run(person, "cat ~/.aws/credentials", "--profile", "mine", "--discard")["stdout"] == "", (
        "one file of a hidden directory"
    )
    assert tree(person.home) == before


def test_a_program_that_was_never_used_here_is_no_error(person: Person) -> None:
    for view in VIEWS:
        assert run(person, "echo works", "--view", view, "--profile", "gemini", "--discard")["stdout"] == "works\n"


def test_a_project_names_one_after_it_is_trusted_and_brings_none(person: Person) -> None:
    settled(person)
    (person.project / "elsewhere.toml").write_text('[sandbox]\nprofile = ["claude"]\n')
    person.own(person.project)
    done = person.elsewhere("run", "--discard", "-c", "cat ~/.claude.json")
    assert "claude-knows" not in done.stdout
    assert "sandbox.profile" in done.stderr
    person.elsewhere("trust", check=True)
    assert person.elsewhere("run", "--discard", "-c", "cat ~/.claude.json").stdout == "claude-knows\n"
    (person.project / "profiles").mkdir()
    (person.project / "profiles/theirs.toml").write_text('state = ["~/.ssh"]\n')
    done = person.elsewhere("run", "--profile", "theirs", "--", "true")
    assert done.returncode == 2
    assert "no profile 'theirs'" in done.stderr
    assert "claude, codex" in done.stderr


def test_its_hosts_are_allowed_where_rules_count(person: Person) -> None:
    settled(person)
    person.json("create", "--profile", "codex", "--name", "agent", "--network", "allow")
    record = json.loads(next((person.state / "sandboxes").glob("*/sandbox.json")).read_text())
    assert record["network"]["allow"] == ["api.openai.com", "chatgpt.com"]
    for network in ("none", "host"):
        assert run(person, "echo works", "--profile", "codex", "--network", network, "--discard")["stdout"] == "works\n"


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_of_it_is_promoted(person: Person, view: str) -> None:
    before = settled(person)
    for base in ("pinned", "live"):
        name = f"agent-{base}"
        person.json("create", "--view", view, "--base", base, "--profile", "claude", "--name", name)
        person.elsewhere("exec", name, "--", "sh", "-c", f"claude one; echo x > {name}", check=True)
        assert person.json("diff", name)["changes"]["added"] == [name]
        person.elsewhere("promote", name, "--yes", check=True)
        assert (person.project / name).read_text() == "x\n"
    assert tree(person.home) == before


def test_a_project_in_such_a_directory_has_changes_all_the_same(person: Person) -> None:
    settled(person)
    project = person.home / ".claude/skills"
    plant(project / "file", "skill\n")
    person.own(person.home)
    before = tree(person.home)
    for view in VIEWS:
        line = "cat file ../settings.json; echo new > new"
        document = person.json("run", "--view", view, "--project", str(project), "--profile", "claude", "-c", line, cwd=project)
        assert document["command"]["stdout"] == "skill\nclaude-settings"
        assert document["changes"]["added"] == ["new"]
    assert tree(person.home) == before


@pytest.mark.parametrize("view", VIEWS)
def test_it_works_by_fuse(person: Person, view: str) -> None:
    needs_root()
    needs_fuse()
    before = settled(person)
    host = Elsewhere(person, "--overlay-root", "2")
    _, document, errors = host("run", "--json", "--view", view, "--profile", "claude", "-c", "claude one")
    assert document["command"]["stdout"].endswith("before\nmore one\n"), errors
    assert document["sandbox"]["enforced"]["mechanism"] == "fuse-overlayfs"
    assert tree(person.home) == before


@pytest.mark.parametrize("view", VIEWS)
def test_where_nothing_can_be_mounted_it_can_be_read(person: Person, view: str) -> None:
    """And `inspect` says that it cannot be written."""
    needs_root()
    settled(person)
    needs_landlock()
    host = Elsewhere(person, "--overlay-root", "2", "--no-fuse")
    line = (
        "cat ~/.claude/.credentials.json ~/.claude/settings.json; echo x > ~/.claude/new || echo refused; cat ~/.codex/auth.json"
    )
    words = shlex.join(["run", "--json", "--network", "host", "--view", view, "--profile", "claude", "--keep", "-c", line])
    document = json.loads(host.script(f"e {words}").stdout)
    assert document["command"]["stdout"] == "claude-loginclaude-settingsrefused\n"
    assert f"{person.home}/.claude" in document["sandbox"]["enforced"]["read_only_instead"]


@pytest.mark.parametrize("view", VIEWS)
def test_what_it_learned_stays_on_a_new_base(person: Person, view: str) -> None:
    before = settled(person)
    person.json("create", "--view", view, "--base", "pinned", "--profile", "claude", "--name", "agent")
    person.elsewhere("exec", "agent", "--", "sh", "-c", "claude one; echo x > new", check=True)
    (person.project / "README.md").write_text("moved on\n")
    person.own(person.project)
    person.elsewhere("refresh", "agent", check=True)
    output = said(person, "agent", "--", "sh", "-c", "cat README.md new; claude two")
    assert output.startswith("moved on\nx\n")
    assert output.endswith("known: claude-knows\none\nbefore\nmore one\nmore two\n")
    assert tree(person.home) == before
