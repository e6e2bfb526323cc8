"""What the pages say is so: their commands and programs are run, their output is the output, and nothing is left unsaid.

The conventions for pages are in CONTRIBUTING.md. A page's commands are run in one shell, on a terminal, from a fresh home.
"""

import argparse
import ast
import fcntl
import functools
import inspect
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

import elsewhere
from conftest import Person
from elsewhere import settings
from elsewhere.cli.main import parser
from elsewhere.experiments.parsing import from_table
from elsewhere.operations.documents.about import CAPABILITIES
from elsewhere.operations.documents.sandboxes import _BASE
from elsewhere.promotion import stages
from elsewhere.sandbox import environment
from elsewhere.sdk import (
    Background,
    CommandResult,
    CommandUsage,
    Denial,
    Drift,
    Entry,
    Limits,
    Package,
    Promotion,
    Sandbox,
    SandboxFiles,
    Transferred,
    Usage,
    undo,
)

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, *(page for page in sorted(ROOT.glob("*.md")) if page not in PAGES)]
COMMAND_LINE = (ROOT / "docs" / "command-line.md").read_text()
ERRORS = (ROOT / "docs" / "errors.md").read_text()
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
MARK = "\x1e"


# -- reading pages --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    tag: str
    lines: list[str]


@dataclass
class Command:
    text: str
    output: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        found = re.search(r"# exit code (\d+)$", self.text)
        return int(found[1]) if found else 0


def blocks(page: Path) -> Iterator[Block]:
    inside: Block | None = None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if inside is not None:
                yield inside
            inside = Block(line[3:].strip(), []) if inside is None else None
        elif inside is not None:
            inside.lines.append(line)
    assert inside is None, f"{page.name}: a block is not closed"


def commands(block: Block) -> Iterator[Command]:
    """`console`: what follows a prompt, with its output; `sh`: every line."""
    if block.tag == "sh":
        yield from (Command(line) for line in block.lines if line.strip() and not line.startswith("#"))
        return
    command: Command | None = None
    for line in block.lines:
        if line.startswith("$ "):
            if command is not None:
                yield command
            command = Command(line[2:])
        elif command is None:
            raise AssertionError(f"output before any command: {line!r}")
        elif line.startswith("> ") and not command.output:
            command.text += "\n" + line[2:]
        else:
            command.output.append(line)
    if command is not None:
        yield command


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def first_cells(text: str, head: str) -> set[str]:
    """What stands in backquotes in the first column of the tables whose first column is called `head`."""
    found: set[str] = set()
    inside = False
    for line in text.splitlines():
        cell = line.split("|")[1].strip() if line.startswith("|") else None
        if cell is None or cell == head:
            inside = cell == head
        elif inside:
            found |= set(re.findall(r"`([^`]+)`", cell))
    return found


# -- running them ---------------------------------------------------------------------------------------------------------------


def prepare(person: Person) -> None:
    """The command as an installation puts it into PATH."""
    place = person.place / "bin"
    place.mkdir(exist_ok=True)
    script = place / "elsewhere"
    script.write_text((ROOT / "scripts" / "elsewhere").read_text().replace("#!python", f"#!{person.python}"))
    script.chmod(0o755)
    rest = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    person.extra |= {"PATH": f"{place}:{os.path.dirname(person.python)}:{rest}", "NO_COLOR": "1"}


def on_a_terminal(person: Person, *argv: str, seconds: float = 100) -> str:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    standard = {"stdin": slave, "stdout": slave, "stderr": slave, "cwd": person.home, "env": person.environment()}
    process = subprocess.Popen(argv, start_new_session=True, **standard, **person.identity())
    os.close(slave)
    seen, deadline = b"", time.monotonic() + seconds
    try:
        while select.select([master], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                seen += os.read(master, 65536)
            except OSError:  # nobody has the other side open any more
                break
        else:
            raise AssertionError(f"not done within {seconds} s:\n{seen.decode(errors='replace')}")
    finally:
        os.close(master)
        if process.poll() is None and time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return seen.decode(errors="replace").replace("\r\n", "\n")


def run_all(person: Person, wanted: list[Command]) -> list[tuple[int, str]]:
    """Exit code and output of each, in one shell."""
    script = person.place / "page.sh"
    script.write_text("\n".join(f"{command.text}\nprintf '{MARK}%d{MARK}' $?" for command in wanted) + "\n")
    parts = re.split(f"{MARK}(\\d+){MARK}", on_a_terminal(person, "bash", str(script)))
    return [(int(code), output) for output, code in zip(parts[::2], parts[1::2], strict=False)]


def normal(line: str, person: Person) -> str:
    """Without what is different every time, and on every machine, and as it looks when a bar has been written over."""
    line = line.rpartition("\r\x1b[K")[2]
    line = line.replace(str(person.home), "/home/you")
    line = re.sub(r"\b\d+(\.\d+)? (ms|s|min|h|d)\b( \d+ (s|min|h)\b)?", "TIME", line)
    line = re.sub(r"\b([0-9a-f]{8}|r-[0-9a-f]{16}|[pe][0-9a-f]{12})\b", "HEX", line)
    line = re.sub(r"\boverlay-(idmap|userns)\b", "overlay", line)
    return " ".join(line.split())


def settled(output: str) -> str:
    """Without the tables that were drawn while something went on, and taken away again."""
    return re.sub(r"\x1b\[\?7l.*?\x1b\[\?7h(\x1b\[\d+A)?\r|\r\x1b\[J", "", output, flags=re.DOTALL)


def _words(shown: str) -> str:
    """A pattern: between two words, dots are as many words as one likes, or none."""
    return re.escape(shown).replace(r"\ …\ ", r"\ (?:.*\ )?").replace("…", ".*")


def is_shown(output: str, shown: list[str], person: Person) -> bool:
    pattern = ""
    for line in shown:
        plain = normal(line, person)
        pattern += r"(?:.*\n)*" if plain == "…" else _words(plain) + r"\n"
    real = "".join(normal(line, person) + "\n" for line in settled(output).rstrip("\n").split("\n"))
    return re.fullmatch(pattern, real) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_does_what_the_page_says(person: Person, page: Path) -> None:
    prepare(person)
    tags = {"console", "sh"}
    if any(block.tag.startswith("console ") for block in blocks(page)):
        mechanism = person.json("run", "--", "true")["sandbox"]["enforced"]["mechanism"]
        tags.add("console root" if mechanism.startswith("overlay-idmap") else "console user")
    wanted = [command for block in blocks(page) if block.tag in tags for command in commands(block)]
    if not wanted:
        pytest.skip("no commands on this page")
    results = run_all(person, wanted)
    for command, (code, output) in zip(wanted, results, strict=False):
        assert code == command.exit_code, f"$ {command.text}\nended with {code}\n{output}"
        if command.output:
            shown = "\n".join(command.output)
            assert is_shown(output, command.output, person), f"$ {command.text}\n--- shown\n{shown}\n--- real\n{output}"
    assert len(results) == len(wanted), f"the shell ended after {results[-1:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_programs_of_a_page_run(person: Person, page: Path) -> None:
    program = "\n".join("\n".join(block.lines) for block in blocks(page) if block.tag == "python")
    if not program:
        pytest.skip("no programs on this page")
    person.sdk(program)


def test_other_blocks_are_what_they_are_called() -> None:
    for page in ALL_PAGES:
        for block in blocks(page):
            text = "\n".join(block.lines)
            if block.tag == "json":
                json.loads(text)
            elif block.tag == "toml":
                tables = settings.stages(str(page), text.encode())
                races = [from_table(one, str(page)) for one in settings.races(str(page), text.encode())]
                steps = stages.parse(tables, str(page), "/home/you/shop")
                assert any((settings.parse(str(page), text.encode(), "/", project=True), steps, races))


def test_targets_of_make_that_pages_name_exist() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {name for page in ALL_PAGES for name in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)}
    assert named <= known


# -- links ----------------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


# -- nothing is left unsaid -----------------------------------------------------------------------------------------------------


def test_every_promise_says_where_it_is_tried() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = set(re.findall(r"`([\w/]+/test_\w+\.py)`", text))
    missing = {name for name in named if not (ROOT / "tests" / name.removeprefix("tests/")).is_file()}
    assert not missing
    tried = {f"escape/{file.name}" for file in (ROOT / "tests" / "escape").glob("test_*.py")}
    assert tried <= named, "an attempt to get out that no promise names"
    rows = [line for line in text.partition("## What it does not promise")[0].splitlines() if line.startswith("| ")]
    promises = [row for row in rows if row.count("|") == 4 and "tried in" not in row]
    assert len(promises) > 30
    for row in promises:
        assert re.search(r"test_\w+\.py`", row.split("|")[3]), row


def verbs() -> dict[str, argparse.ArgumentParser]:
    return parser()[1].parsers


@pytest.mark.parametrize("verb", verbs())
def test_every_option_of_a_verb_is_documented(verb: str) -> None:
    section = sections(COMMAND_LINE)[f"elsewhere {verb}"]
    for action in verbs()[verb]._actions:
        for option in action.option_strings:
            if option not in ("-h", "--help"):  # said once, for all
                assert re.search(rf"`{option}\b", section), f"{option} of {verb}"


def test_no_option_is_documented_that_does_not_exist() -> None:
    for verb, its in verbs().items():
        named = {name.split()[0].split("[")[0] for name in first_cells(sections(COMMAND_LINE)[f"elsewhere {verb}"], "option")}
        assert named - {"--"} <= set(its._option_string_actions), verb


def test_every_verb_is_in_the_list_and_no_other() -> None:
    assert first_cells(COMMAND_LINE, "verb") == set(verbs())


def test_every_capability_is_documented() -> None:
    line = next(line for line in sections(COMMAND_LINE)["elsewhere version"].splitlines() if line.startswith("| `capabilities`"))
    assert re.findall(r"`([a-z-]+)`", line)[1:] == CAPABILITIES


def test_the_options_of_the_command_itself_are_documented() -> None:
    for option in parser()[0]._option_string_actions:
        assert f"{option}`" in COMMAND_LINE


def every_field(value: dict[str, Any], closed: set[str], prefix: str = "") -> Iterator[str]:
    """Names of a document, dotted. What is in `closed` is not looked into: it is documented elsewhere, or its keys are data."""
    for key, item in value.items():
        name = prefix + key
        if isinstance(item, dict) and item and name not in closed:
            yield from every_field(item, closed, f"{name}.")
        elif isinstance(item, list) and item and isinstance(item[0], dict) and name not in closed:
            yield from every_field(item[0], closed, f"{name}[].")
        else:
            yield name


def whole(names: set[str]) -> set[str]:
    """Without those that are null in one document and have parts in another."""
    return {name for name in names if not any(other.startswith((f"{name}.", f"{name}[]")) for other in names)}


def test_the_fields_of_every_document_are_documented_and_no_others(user: Person) -> None:
    said = {head: first_cells(text, "field") for head, text in sections(COMMAND_LINE).items()}
    ran = user.json("run", "--", "touch", "new")
    keyed = {"base", "limits", "enforced.limits", "enforced.read_only_instead", "enforced.stronger_rungs"}
    shared = set(every_field(ran["sandbox"], keyed)) - {"base"}
    assert shared | {f"base.{key}" for key in (*_BASE, "at")} == said["The sandbox"]
    assert set(every_field(ran, {"sandbox"})) == said["elsewhere run"]
    made = user.json("create", "--name", "fix")
    assert set(made["sandbox"]["base"]) <= {*_BASE, "at"}
    assert set(every_field(made, {"sandbox"})) == said["elsewhere create"]
    own: set[str] = set()
    for wanted in ("fix", ran["sandbox"]["id"]):
        document = user.json("inspect", wanted)["sandbox"]
        own |= set(every_field({key: document[key] for key in document if key not in ran["sandbox"]}, set(), "sandbox."))
    assert whole(own) | {"sandbox"} == said["elsewhere inspect"]
    done = user.json("exec", "fix", "--", "true")
    behind = user.json("exec", "-d", "fix", "--", "sleep", "100")
    executed = set(every_field(done, {"sandbox"})) | set(every_field(behind, {"sandbox"}))
    assert whole(executed) == said["elsewhere exec"]
    assert set(every_field(user.json("ps", "fix"), set())) == said["elsewhere ps"]
    assert set(every_field(user.json("logs", "fix"), set())) | {"stream", "data", "denial"} == said["elsewhere logs"]
    reached = set(every_field(user.json("network", "fix", "--publish", "0:8000"), {"machine"})) - {"machine", "trouble"}
    empty = {"machine[].rule", "machine[].why", "trouble[].what", "trouble[].why"}
    assert reached | empty == said["elsewhere network"]
    used = every_field(user.json("top", "--count", "1", "fix"), {"sandboxes[].limits"})
    assert set(used) == said["elsewhere top"]
    pid = str(behind["command"]["pid"])
    assert set(every_field(user.json("kill", "fix", pid, "-s", "CONT"), set())) == said["elsewhere kill"]
    asked = {name for one in user.json("requests")["requests"] for name in every_field({"requests": [one]}, set())}
    assert whole(asked) == said["elsewhere requests"]
    assert set(every_field(user.json("cancel", "fix"), {"requests"})) == said["elsewhere cancel"]
    assert set(every_field(user.json("open", "fix"), set())) == said["elsewhere open"]
    (user.project / "tree").mkdir()
    os.mkfifo(user.project / "tree" / "fifo")
    assert set(every_field(user.json("cp", "tree", "fix:"), set())) == said["elsewhere cp"]
    for verb in ("extend fix 1h", "keep fix", "keep --off fix", "stop fix", "start fix"):
        document = user.json(*verb.split())
        assert set(document) == {"sandbox"} == said[f"elsewhere {verb.split()[0]}"]
        assert set(document["sandbox"]) == set(made["sandbox"])
    assert set(every_field(user.json("list"), {"sandboxes"})) == said["elsewhere list"]
    shapes = [(), ("--stat",), ("--patch",), ("--name-only",)]
    told = {name for shape in shapes for name in every_field(user.json("diff", ran["sandbox"]["id"], *shape), {"base"})}
    assert told == said["elsewhere diff"]
    assert set(every_field(user.json("snapshot", "fix", "one"), set())) == said["elsewhere snapshot"]
    assert set(every_field(user.json("snapshots", "fix"), {"snapshots"})) == said["elsewhere snapshots"]
    assert set(every_field(user.json("rollback", "--force", "fix", "one"), {"snapshot"})) == said["elsewhere rollback"]
    forked = user.json("fork", "fix", "--name", "child")
    assert set(every_field(forked, {"sandboxes"})) == said["elsewhere fork"]
    assert set(forked["sandboxes"][0]) == {*ran["sandbox"], "origin"}
    assert set(every_field(user.json("rm-snapshot", "fix", "one"), set())) == said["elsewhere rm-snapshot"]
    assert set(every_field(user.json("df"), set())) == said["elsewhere df"]
    assert set(every_field(user.json("janitor"), set())) == said["elsewhere janitor"]
    assert set(every_field(user.json("drift", "fix"), set())) == said["elsewhere drift"]
    assert (
        set(every_field(user.json("refresh", "--dry-run", "fix"), {"sandbox", "refresh.conflicts"})) == said["elsewhere refresh"]
    )
    assert set(every_field(user.json("rm", "--force", "fix", ran["sandbox"]["id"], "no-such"), set())) == said["elsewhere rm"]
    (user.home / "new").mkdir()
    user.own(user.home)
    assert set(every_field(user.json("init", cwd=user.home / "new"), set())) == said["elsewhere init"]
    (user.project / "elsewhere.toml").write_text("[sandbox]\ngpu = true\n")
    assert set(every_field(user.json("config"), set())) == said["elsewhere config"]
    assert set(every_field(user.json("trust"), set())) == said["elsewhere trust"]
    assert set(every_field(user.json("doctor"), set())) == said["elsewhere doctor"]
    assert set(every_field(user.json("version"), set())) == said["elsewhere version"]


STAGES = """
[[stages]]
name = "dev"
target = "."
checks = ["true"]

[[stages]]
name = "ready"
target = { branch = "ready" }
approve = "person"
"""


def test_the_fields_of_every_document_of_a_promotion_are_documented_and_no_others(user: Person) -> None:
    said = {head: first_cells(text, "field") for head, text in sections(COMMAND_LINE).items()}
    user.json("create", "--name", "fix")
    user.elsewhere("exec", "fix", "-c", "echo more >> README.md; echo x > .envrc; git commit -qam more", check=True)
    (user.project / "README.md").write_text("other\n")
    user.own(user.project)

    def promoted(*words: str, code: int = 0) -> dict[str, Any]:
        done = user.elsewhere(*words, "--json")
        assert done.returncode == code, done.stdout + done.stderr
        document = json.loads(done.stdout)
        assert set(document) == {"promotion"}
        return dict(document["promotion"])

    refused = promoted("promote", "fix", "--dry-run", code=3)
    own = set(every_field({key: refused.pop(key) for key in ("same", "kept", "left_out")}, set(), "promotion."))
    assert own | {"promotion", "sandbox", "conflicts"} == said["elsewhere promote"]
    told = [refused]
    for words in (("--yes", "--theirs", "README.md"), ("--yes", "--replay", "--theirs", "README.md")):
        done = promoted("promote", "fix", *words)
        told += [{key: done[key] for key in done if key not in ("same", "kept", "left_out")}, promoted("undo")]
    assert set(user.json("promote", "fix", "--resolve")) == {"sandbox", "conflicts"}
    (user.project / "elsewhere.toml").write_text(STAGES)
    user.own(user.project)
    user.shell("git", "branch", "ready", cwd=user.project)
    assert promoted("promote", "fix", "--yes", "--ours", "README.md", "--to", "ready")["status"] == "waiting"
    told.append(promoted("approve", "@last"))
    assert told[-1]["stages"][1]["status"] == "passed"
    assert said["elsewhere approve"] == said["elsewhere undo"] == {"promotion"}
    told.append(promoted("promotions", "show"))
    listed = user.json("promotions")
    assert set(listed) | {"promotion"} == said["elsewhere promotions"]
    told += listed["promotions"]
    closed = {"stages[].checks", "stages[].application", "commits.others", "commits.submodules"}
    assert whole({name for one in told for name in every_field(one, closed)}) == said["The promotion"]


def test_every_variable_of_a_sandbox_is_documented(user: Person) -> None:
    section = sections(COMMAND_LINE)["Variables that go into a sandbox"]
    said = set(re.findall(r"`([A-Za-z_*]+)`", section))
    inside = user.json("run", "--", "env", "-0")["command"]["stdout"]
    names = {entry.split("=")[0] for entry in inside.split("\0") if entry}
    assert {name for name in names if not name.startswith("LC_")} <= said
    assert set(environment._PASSED) | {f"{prefix}*" for prefix in environment._PASSED_PREFIXES} <= said


def test_every_variable_that_is_read_is_documented() -> None:
    reading = re.compile(r'environ(?:\.get\(|\[)"([A-Z_]+)"|"([A-Z_]+)" (?:not )?in os\.environ')
    section = sections(COMMAND_LINE)["Variables that elsewhere reads"]
    for file in (ROOT / "src").rglob("*.py"):
        for names in reading.findall(file.read_text()):
            assert f"`{names[0] or names[1]}`" in section, f"{names} in {file.name}"


def test_every_setting_is_documented() -> None:
    rows = {row.split("|")[1].strip(): row for row in SETTINGS.splitlines() if row.startswith("| `")}
    assert set(rows) == {f"`{name}`" for name in settings.KEYS}
    for name, key in settings.KEYS.items():
        variable, default = (cell.strip().replace("`", "") for cell in rows[f"`{name}`"].split("|")[2:4])
        assert variable == key.variable
        assert default == (key.without or settings.human(key, key.default)), name


@functools.cache
def error_codes() -> dict[str, set[str]]:
    """Code and classes of every error that the sources raise; a code that is not written out cannot be found, and is refused."""
    nodes = [node for file in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    classes = {"ElsewhereError"}
    for _ in range(5):  # as deep as the tree of classes may become
        for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
            if any(isinstance(base, ast.Name) and base.id in classes for base in node.bases):
                classes.add(node.name)
    found: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
            code = node.args[0]
            assert isinstance(code, ast.Constant), f"write the code of this error out: {ast.unparse(node)}"
            found.setdefault(code.value, set()).add(node.func.id)
        elif isinstance(node, ast.Tuple) and len(node.elts) > 2:
            head, *rest = (
                item.value if isinstance(item, ast.Constant) else item.id if isinstance(item, ast.Name) else None
                for item in node.elts[:3]
            )
            # As an error travels from the launcher: ("error", class, code, …). In a table of errors: (class, code, …).
            if head == "error" and isinstance(node.elts[2], ast.Constant):
                found.setdefault(rest[1], set()).add(rest[0])
            elif head in classes and isinstance(node.elts[1], ast.Constant):
                found.setdefault(rest[0], set()).add(head)
    return found


def test_every_error_code_is_documented_and_no_other() -> None:
    found = error_codes()
    assert len(found) > 30, "the codes were not found in the sources"
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .+ \|$", ERRORS, flags=re.MULTILINE)
    said = {code: classes for code, classes in rows if code.islower()}
    assert set(said) == set(found)
    for code, classes in found.items():
        assert classes == {said[code]}, code


def test_every_class_of_errors_is_documented() -> None:
    assert {name for names in error_codes().values() for name in names} <= first_cells(ERRORS, "class")


def test_every_public_name_of_the_package_is_documented() -> None:
    text = (ROOT / "docs" / "sdk.md").read_text()
    names = {*elsewhere.__all__, "check", "path", "why"}
    for kind in (CommandResult, CommandUsage, Denial, Drift, Entry, Limits, Package, Promotion, Transferred, Usage):
        names |= {item.name for item in fields(kind)}
    for kind in (Sandbox, Background, SandboxFiles):
        names |= {name for name in vars(kind) if not name.startswith("_")}
    for name in (*names, "created_at"):
        assert re.search(rf"\b{name}\b", text), name
    for method in (Sandbox.create, Sandbox.get, Sandbox.list, Sandbox.run, Sandbox.start, Sandbox.logs, Sandbox.promote, undo):
        for name in inspect.signature(method).parameters:
            assert name in ("self", "cls") or re.search(rf"\b{name}\b", text), f"{name} of {method.__name__}"


# -- examples -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def examples(person: Person) -> Path:
    """Where everybody can read them: the checkout may lie in root's home."""
    shutil.copytree(EXAMPLES, person.place / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return person.place / "examples"


def test_the_demo_proves_what_it_says_and_leaves_nothing(person: Person, examples: Path) -> None:
    (person.home / ".cache").mkdir()
    person.own(person.home)
    done = person.shell(person.python, examples / "demo.py")
    assert "Every proof held" in done.stdout
    assert done.stdout.count("✓ reality is byte for byte the same") == 5
    assert "✗ NOT TRUE" not in done.stdout
    assert "patch won: of 3 attempts" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr, "colour is for terminals"
    assert list((person.home / ".cache").iterdir()) == []
    assert list(person.state.iterdir()) == [], "it uses a state directory of its own"


@pytest.mark.slow
def test_the_demo_fails_if_reality_changes(person: Person, examples: Path) -> None:
    program = """
        import shutil, sys
        sys.path.insert(0, sys.argv[1])
        import demo
        def really(stage):
            shutil.rmtree(stage.project / "src")
            stage.prove_that_reality_is_the_same()
        def left(stage):
            stage.elsewhere("create", "--name", "left")
            sys.exit(1)
        demo.delete_the_sources, demo.back_to_reality = really, left
        demo.install_a_package = demo.edit_etc = demo.run_away = demo.three_fixes = demo.three_ways_out = demo.take_times = lambda *_: None
        sys.exit(demo.main())
    """
    done = person.shell(person.python, "-c", re.sub(r"^ {8}", "", program, flags=re.MULTILINE), examples, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT TRUE: reality" in done.stdout
    assert "Traceback" not in done.stderr, done.stderr  # of whoever finds that not everything is gone


def test_try_before_shows_what_would_have_happened(person: Person, examples: Path) -> None:
    done = person.shell(person.python, examples / "try_before.py", "rm", "-r", "src", cwd=person.project)
    assert f"it would have deleted {person.project}/src/app.py\n" in done.stdout
    assert "exit code 0 (exited), 2 deleted\n" in done.stdout
    assert (person.project / "src" / "app.py").exists()
    failed = person.shell(person.python, examples / "try_before.py", "no-such-program", cwd=person.project, check=False)
    assert failed.returncode == 1
    assert "command_not_found" in failed.stderr


def test_several_approaches_are_told_apart(person: Person, examples: Path) -> None:
    lines = ["echo hello >> README.md", "echo hullo >> README.md", "exit 3"]
    program = [person.python, examples / "several_approaches.py", "grep -q hello README.md"]
    done = person.shell(*program, *lines, cwd=person.project)
    assert [line.split("  ")[0] for line in done.stdout.splitlines()] == ["passed", "check ended with 1", "failed with 3"]
    assert person.shell(*program, lines[2], cwd=person.project, check=False).returncode == 1
    assert (person.project / "README.md").read_text() == "# a project\n"


def test_a_long_lived_sandbox_is_found_again_and_thrown_away(person: Person, examples: Path) -> None:
    first = person.shell(person.python, examples / "long_lived.py", cwd=person.project).stdout
    assert "made garden" in first
    assert "started 1 times" in first
    assert person.json("list")["sandboxes"][0]["state"] == "stopped"
    second = person.shell(person.python, examples / "long_lived.py", cwd=person.project).stdout
    assert "found garden again" in second
    assert "started 2 times" in second
    assert "removed" in person.shell(person.python, examples / "long_lived.py", "--remove", cwd=person.project).stdout
    assert person.json("list")["sandboxes"] == []
    assert not (person.project / "garden.log").exists()


def test_sandboxes_work_with_asyncio_by_way_of_threads(person: Person, examples: Path) -> None:
    done = person.shell(person.python, examples / "threads.py", "echo hello", "sleep 60", "exit 3", cwd=person.project)
    lines = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert lines == ["exited 0", "timeout 124", "exited 3"]
    assert person.json("list")["sandboxes"] == []
