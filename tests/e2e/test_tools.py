"""Real tools inside: package managers, compilers, test runners, a database. As a user all but the system's own package manager."""

import pwd
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import Person, dismiss, make_person, tree

pytestmark = pytest.mark.one_launcher


def inside(person: Person, line: str, **more: object) -> str:
    document = person.json("run", "--discard", "-c", line, timeout=110, **more)
    assert document["command"]["exit_code"] == 0, document["command"]
    return str(document["command"]["stdout"])


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")


def needs_registry(line: str) -> None:
    """A registry that this host itself can reach: what does not work outside need not work inside."""
    if subprocess.run(["sh", "-c", line], capture_output=True, timeout=100, check=False).returncode:
        pytest.skip(f"not possible on this host either: {line}")


def test_gcc(person: Person) -> None:
    needs("gcc")
    assert inside(person, "printf 'int main(){return 42;}' > a.c && gcc -o a a.c; ./a; echo $?") == "42\n"


def test_git_commit(person: Person) -> None:
    before = tree(person.project)
    out = inside(
        person,
        "git checkout -q -b topic && echo x >> README.md && git commit -qam change && git stash list; git log --oneline | wc -l",
    )
    assert out.strip() == "2"
    assert tree(person.project) == before


def test_pytest_or_the_projects_own_tests(person: Person) -> None:
    """The interpreter, its packages and the project, as they are outside."""
    out = inside(person, f"cd src && {person.python} -c 'import test_app; test_app.test_add(); print(\"passed\")'")
    assert out == "passed\n"


@pytest.mark.slow
def test_pip_install(person: Person) -> None:
    needs_registry(
        "python3 -m pip download -q --no-deps -d /tmp/elsewhere-pip-probe six; s=$?; rm -rf /tmp/elsewhere-pip-probe; exit $s"
    )
    person.shell("/usr/bin/python3", "-m", "venv", "venv", cwd=person.project)
    before = tree(person.project)
    out = inside(
        person,
        "venv/bin/pip install -q --disable-pip-version-check six pytest && venv/bin/python -m pytest -q src && venv/bin/python -c 'import six; print(six.__name__)'",
    )
    assert "1 passed" in out
    assert out.endswith("six\n")
    assert tree(person.project) == before


def test_npm_install(person: Person) -> None:
    needs("npm", "node")
    needs_registry("npm view is-number version")
    settings = Path.home() / ".npmrc"
    if settings.exists():
        shutil.copy(settings, person.home / ".npmrc")
        person.own(person.home)
    before = tree(person.project)
    out = inside(
        person,
        "npm init -y >/dev/null && npm install --no-audit --no-fund is-number >/dev/null && node -e 'console.log(require(\"is-number\")(5))'",
    )
    assert out == "true\n"
    assert tree(person.project) == before


def test_apt_get_install(root: Person) -> None:
    needs("apt-get")
    needs_registry("apt-get update -qq && apt-get install -qq --download-only -y hello")
    if shutil.which("hello"):
        pytest.skip("hello is installed here already")
    document = root.json("run", "-c", "apt-get install -y -qq hello >/dev/null 2>&1; hello", timeout=110)
    assert document["command"]["stdout"] == "Hello, world!\n", document["command"]
    assert "/usr/bin/hello" in document["changes"]["added"]
    assert shutil.which("hello") is None


@pytest.mark.parametrize("kind", ["root", "user"])
def test_postgresql(kind: str, library: Path) -> None:
    """Initialised, started, asked, stopped; as root by its own account, as a user by one that the user database knows."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("needs Debian's postgresql")
    line = (
        f"export PATH={found[-1].parent}:$PATH; d=$(mktemp -d); cd $d; initdb -D $d/data >/dev/null && "
        "pg_ctl -D $d/data -o \"-k $d -c listen_addresses=''\" -w start >/dev/null && "
        "psql -h $d -d postgres -Atc 'select 6*7'; pg_ctl -D $d/data -m fast stop >/dev/null"
    )
    if kind == "root":
        line = f"su postgres -c {shlex.quote(line)}"
    person = make_person(kind, library, uid=65534)
    try:
        pwd.getpwuid(person.uid)
    except KeyError:
        dismiss(person)
        pytest.skip(f"initdb does not run as uid {person.uid}, which the user database does not know")
    assert person.project
    try:
        assert inside(person, line) == "42\n"
    finally:
        dismiss(person)


def test_node_with_workers(person: Person) -> None:
    needs("node")
    code = "const {Worker} = require('worker_threads'); new Worker('console.log(1+1)', {eval: true}).on('exit', c => process.exit(c))"
    assert inside(person, f'node -e "{code}"') == "2\n"


def test_gdb_on_an_own_process(person: Person) -> None:
    needs("gdb", "gcc")
    out = inside(
        person, "printf 'int main(){return 0;}' > a.c && gcc -g -o a a.c && gdb -batch -ex run -ex 'info inferiors' ./a 2>&1"
    )
    assert "exited normally" in out


def test_tmux(person: Person) -> None:
    needs("tmux")
    assert "in tmux" in inside(
        person, "tmux new-session -d 'echo in tmux; sleep 30' && sleep 0.5 && tmux capture-pane -p && tmux kill-server"
    )


def test_python_processes_and_threads(person: Person) -> None:
    code = (
        "import concurrent.futures as f, multiprocessing as m\n"
        "if __name__ == '__main__':\n"
        "    with f.ProcessPoolExecutor(2, mp_context=m.get_context('spawn')) as p, f.ThreadPoolExecutor(4) as t:\n"
        "        print(sum(p.map(abs, range(10))), sum(t.map(abs, range(10))))\n"
    )
    (person.project / "pool.py").write_text(code)
    assert inside(person, f"{person.python} pool.py") == "45 45\n"


@pytest.mark.parametrize("untrusted", [False, True])
def test_go(person: Person, untrusted: bool) -> None:
    needs("go")
    (person.project / "main.go").write_text(
        'package main\nimport "fmt"\nfunc main() { c := make(chan int); go func() { c <- 42 }(); fmt.Println(<-c) }\n'
    )
    words = ["run", "--discard", *(["--untrusted"] if untrusted else []), "-c", "go run main.go"]
    command = person.json(*words, timeout=110)["command"]
    assert (command["exit_code"], command["stdout"]) == (0, "42\n"), command["stderr"]


@pytest.mark.parametrize("untrusted", [False, True])
def test_a_headless_browser(person: Person, untrusted: bool) -> None:
    """Its own sandbox is off: a program inside cannot make namespaces."""
    browser = next(filter(shutil.which, ("chromium-headless-shell", "chromium")), None)
    if browser is None:
        pytest.skip("needs chromium-headless-shell")
    (person.project / "page.html").write_text("<title>x</title><script>document.write(6 * 7)</script>")
    line = f"{browser} --headless --no-sandbox --disable-gpu --dump-dom file://$PWD/page.html"
    words = ["run", "--discard", *(["--untrusted"] if untrusted else []), "-c", line]
    command = person.json(*words, timeout=110)["command"]
    assert command["exit_code"] == 0, command["stderr"]
    assert "42" in command["stdout"]


def test_sudo_gains_nothing_and_says_why(user: Person) -> None:
    """Root's sandbox is root inside, and needs none."""
    needs("sudo")
    command = user.json("run", "--discard", "--", "sudo", "-n", "true")["command"]
    assert command["exit_code"] != 0
    assert [(one["kind"], one["what"]) for one in command["denials"]] == [("policy", "sudo")]
