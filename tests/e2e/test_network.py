"""The network of sandboxes, from the front doors: what rules let through, what they refuse and how that is told, forwards and
published ports, what becomes of all of it while a sandbox lives, and after the network service was killed.

Servers are the test's own, on loopback. They listen at 127.0.0.2: clients ask their proxy for that address, and not for 127.0.0.1.
What gets out although it must not is tried in `tests/escape/test_network_escapes.py`.
"""

import base64
import contextlib
import hashlib
import http.server
import io
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tarfile
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conftest import Person, dismiss, eventually, make_person
from resolved import resolved

together = pytest.mark.one_launcher
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")

HOST = "127.0.0.2"
LOOPBACK = "the sandbox has a loopback of its own, for which 127.0.0.1 is to be used, and nothing allows the host's"
CURL = ("curl", "-sS", "--max-time", "30")


# -- servers --------------------------------------------------------------------------------------------------------------------


@dataclass
class Web:
    """`pages` by their path; `/endless` never ends. `asked` is what came: the path, and the headers."""

    port: int
    pages: dict[str, bytes]
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def rule(self) -> str:
        return f"{HOST}:{self.port}"

    def url(self, path: str = "/") -> str:
        return f"http://{HOST}:{self.port}{path}"


@contextlib.contextmanager
def web(text: str = "hello\n", pages: dict[str, bytes] | None = None, address: str = HOST) -> Iterator[Web]:
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append((self.path, dict(self.headers)))
            content = found.pages.get(self.path)
            self.send_response(200 if content is not None or self.path == "/endless" else 404)
            self.send_header("Content-Type", "text/html")
            if content is not None:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content or b"")
                while self.path == "/endless" and not over.wait(0.01):
                    self.wfile.write(b"more\n" * 2000)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        server.daemon_threads = False
        found = Web(server.server_port, {"/": text.encode(), **(pages or {})})
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            over.set()
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def greeter(said: bytes, where: tuple[str, int] | str = ("127.0.0.1", 0)) -> Iterator[int]:
    """Says this to everybody who comes, to an address or to a Unix socket."""
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
    with socket.socket(family) as server:
        server.bind(where)
        server.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller = server.accept()[0]
                    with caller:
                        caller.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield 0 if isinstance(where, str) else server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def page(port: int) -> str:
    """What a port of the host's loopback says to a browser; no answer is empty."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20) as answer:
        return str(answer.read().decode())
    return ""


# -- inside ---------------------------------------------------------------------------------------------------------------------


def run(person: Person, *options: str, words: tuple[str, ...]) -> dict[str, Any]:
    command: dict[str, Any] = person.json("run", "--discard", *options, "--", *words)["command"]
    return command


def inside(person: Person, box: str, *words: str) -> dict[str, Any]:
    command: dict[str, Any] = person.json("exec", box, "--", *words)["command"]
    return command


def fetched(person: Person, box: str, url: str) -> str:
    return str(inside(person, box, *CURL, url)["stdout"])


def refused(said: str) -> bool:
    return said.startswith("elsewhere refused ")


def made(person: Person, name: str, *options: str) -> str:
    document = person.json("create", "--name", name, *options)
    assert "sandbox" in document, document
    return str(document["sandbox"]["id"])


def published(person: Person, box: str) -> dict[int, int]:
    return {one["inside"]: one["port"] for one in person.json("network", box)["published"]}


SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[2].encode())
    log_message = lambda *_: None
http.server.HTTPServer.server_bind = http.server.socketserver.TCPServer.server_bind
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def serves(person: Person, box: str, port: int, said: str) -> None:
    """A web server inside, in the background."""
    person.elsewhere("exec", "-d", box, "--", person.python, "-I", "-c", SERVE, str(port), said, check=True)
    look = f"for i in $(seq 500); do curl -s --noproxy '*' http://127.0.0.1:{port}/ && break; sleep 0.02; done"
    assert inside(person, box, "sh", "-c", look)["stdout"] == said


def services(person: Person) -> list[int]:
    return [pid for pid, words in person.processes() if "elsewhere.sandbox.networking.service" in words]


# -- rules ----------------------------------------------------------------------------------------------------------------------


@together
def test_what_is_allowed_is_reached_and_all_else_is_refused_and_explained(person: Person) -> None:
    with web() as one, web() as other:
        line = f"curl -sS {one.url()}; curl -sS {other.url()}; curl -sS {other.url()}; curl -sSf {other.url()}"
        done = person.json("run", "--discard", "--allow", one.rule, "-c", line)
        command = done["command"]
        assert command["exit_code"] == 22, "curl -f fails with the status of a refusal"
        lines = command["stdout"].splitlines()
        assert lines[:3] == ["hello", f"elsewhere refused {other.rule}", f"because: {LOOPBACK}"]
        assert lines[3] == f"to allow it: --forward {other.rule}"
        assert command["denials"] == [
            {
                "kind": "network",
                "what": other.rule,
                "rule": LOOPBACK,
                "how_to_allow": f"--forward {other.rule}",
                "count": 3,
                "told_by": "proxy",
            }
        ]
        assert [path for path, _ in one.asked] == ["/"]
        assert not other.asked


@together
def test_a_refusal_is_one_line_on_the_terminal(person: Person) -> None:
    with web() as other:
        done = person.elsewhere("run", "--discard", "--", *CURL, "-o", "/dev/null", other.url())
        assert done.stderr == f"elsewhere: denied {other.rule}: {LOOPBACK} → --forward {other.rule}\n"
        done = person.elsewhere("run", "--discard", "--allow", other.rule, "--", *CURL, other.url())
        assert (done.stdout, done.stderr) == ("hello\n", "")


@together
def test_an_encrypted_connection_is_refused_with_what_to_type(person: Person) -> None:
    """Its client sees no more than the first line of the answer."""
    command = run(person, words=("curl", "-sSv", "--max-time", "30", "https://unlisted.example/"))
    assert command["exit_code"] == 56
    assert "elsewhere refused unlisted.example:443; to allow it: --allow unlisted.example" in command["stderr"]
    (denial,) = command["denials"]
    assert (denial["what"], denial["how_to_allow"]) == ("unlisted.example:443", "--allow unlisted.example")


@together
def test_a_refusal_is_told_by_logs_inspect_and_top(person: Person) -> None:
    with web() as other:
        box = made(person, "box")
        person.elsewhere("exec", "-d", box, "--", *CURL, other.url(), check=True)
        assert eventually(lambda: refused(person.elsewhere("logs", box).stdout))
        wanted = ("network", other.rule, LOOPBACK, f"elsewhere network {box} --forward {other.rule}")
        for document in (person.json("logs", box), person.json("inspect", box)["sandbox"]):
            told = [(one["kind"], one["what"], one["rule"], one["how_to_allow"]) for one in document["denials"]]
            assert told == [wanted]
        assert other.rule in person.elsewhere("inspect", box).stdout
        header, row = person.elsewhere("top").stdout.splitlines()[:2]
        assert row[header.index("denied") :].split()[0] == "1"
        # What it tells to type is what helps.
        person.elsewhere(*wanted[3].split()[1:], check=True)
        assert fetched(person, box, f"http://127.0.0.1:{other.port}/") == "hello\n"


@together
def test_a_denial_wins(person: Person) -> None:
    with web() as one:
        command = run(person, "--allow", one.rule, "--deny", one.rule, words=(*CURL, one.url()))
        assert refused(command["stdout"])
        assert [denial["rule"] for denial in command["denials"]] == [f"--deny {one.rule}"]
        command = run(person, "--allow", one.rule, "--deny", HOST, words=(*CURL, one.url()))
        assert refused(command["stdout"]), "without a port it is about all of them"


@together
def test_a_project_closes_by_itself_and_opens_when_it_is_trusted(person: Person) -> None:
    with web() as one, web() as other:
        (person.project / "elsewhere.toml").write_text(f'[network]\nallow = ["{one.rule}"]\ndeny = ["{other.rule}"]\n')
        person.own(person.project)
        done = person.elsewhere("run", "--discard", "--", *CURL, one.url())
        assert refused(done.stdout)
        assert "network.allow" in done.stderr
        assert "not trusted" in done.stderr
        assert refused(run(person, "--allow", other.rule, words=(*CURL, other.url()))["stdout"]), "to close needs no trust"
        person.elsewhere("trust", check=True)
        assert run(person, words=(*CURL, one.url()))["stdout"] == "hello\n"
        assert refused(run(person, "--allow", other.rule, words=(*CURL, other.url()))["stdout"])


@together
def test_an_untrusted_project_opens_nothing_at_all(person: Person) -> None:
    with greeter(b"hello") as port:
        text = f'[sandbox]\nnetwork = "host"\n[network]\nforward = ["{port}"]\npublish = ["0:80"]\npreset = ["models"]\n'
        (person.project / "elsewhere.toml").write_text(text)
        person.own(person.project)
        document = person.json("create")
        assert document["sandbox"]["network"] == "allow"
        assert document["sandbox"]["reach"] == {"allow": [], "deny": [], "presets": ["packages"], "forward": [], "publish": []}
        ignored = {"sandbox.network", "network.forward", "network.publish", "network.preset"}
        assert set(document["sandbox"]["settings_ignored"]) == ignored


@together
def test_variables_say_the_same(person: Person) -> None:
    with web() as one, web() as other:
        person.extra["ELSEWHERE_NETWORK_ALLOW"] = f"{one.rule}, {other.rule}"
        person.extra["ELSEWHERE_NETWORK_DENY"] = other.rule
        box = made(person, "box")
        assert fetched(person, box, one.url()) == "hello\n"
        assert refused(fetched(person, box, other.url()))
        person.extra = {
            "ELSEWHERE_NETWORK_PRESET": "none,models",
            "ELSEWHERE_NETWORK_PUBLISH": "0:80",
        }
        sandbox = person.json("create")["sandbox"]
        assert (sandbox["reach"]["presets"], sandbox["reach"]["publish"]) == (["models"], ["0:80"])
        person.extra = {"ELSEWHERE_NETWORK": "none"}
        assert person.json("create")["sandbox"]["network"] == "none"


BAD = {
    "--allow com": ("bad_rule", "'com'", "top-level domain", "example.com"),
    "--allow *.com": ("bad_rule", "'*.com'", "top-level domain", "*.example.org"),
    "--allow *.co.uk": ("bad_rule", "'*.co.uk'", "names are sold", "example.org"),
    "--allow *": ("bad_rule", "'*'", "every host", "--network host"),
    "--allow *:443": ("bad_rule", "'*:443'", "every host", "--network host"),
    "--allow 10.0.0.5": ("bad_rule", "'10.0.0.5'", "without a port", "--allow 10.0.0.5:443"),
    "--allow [::1]": ("bad_rule", "'[::1]'", "without a port", "--allow [::1]:443"),
    "--allow ex*mple.org": ("bad_rule", "'ex*mple.org'", "wildcard", "*.example.org"),
    "--allow https://example.org/x": ("bad_rule", "'https://example.org/x'", "no scheme", "example.org"),
    "--allow example.org:0": ("bad_rule", "'example.org:0'", "1 to 65535", "example.org:8443"),
    "--allow example.org:99999": ("bad_rule", "'example.org:99999'", "1 to 65535", "example.org:8443"),
    "--allow 2130706433:80": ("bad_rule", "'2130706433:80'", "differently", "10.0.0.5:5432"),
    "--allow 224.0.0.1:80": ("bad_rule", "'224.0.0.1:80'", "multicast", "address"),
    "--allow localhost:8080": ("bad_rule", "'localhost:8080'", "localhost is the sandbox itself", "--forward 8080"),
    "--allow a.Localhost": ("bad_rule", "'a.Localhost'", "a.localhost is the sandbox itself", "--forward PORT"),
    "--allow no_such!host": ("bad_rule", "'no_such!host'", "neither a host name nor an address", "example.org"),
    "--deny *": ("bad_rule", "--deny '*'", "every host", "--network none"),
    "--preset everything": ("bad_preset", "'everything'", "no preset", "packages"),
    "--forward nonsense": ("bad_forward", "'nonsense'", "port", "5432"),
    "--forward 61080": ("bad_forward", "'61080'", "own way out", "5432"),
    "--forward unix:relative": ("bad_forward", "'unix:relative'", "begin with /", "unix:/run"),
    "--publish 0.0.0.0:80:80": ("bad_publish", "'0.0.0.0:80:80'", "127.0.0.1 alone", "0:80"),
    "--publish 0": ("bad_publish", "'0'", "no port of the sandbox", "0:80"),
    "--publish 99999": ("bad_publish", "'99999'", "65535", "8080"),
    "--network everything": ("bad_option", "'everything'", "none, allow, host", "--network none"),
}
SOME = (
    "--allow com", "--allow *", "--allow 10.0.0.5", "--allow localhost:8080", "--preset everything", "--forward nonsense",
    "--publish 0",
)  # fmt: skip


@together
@pytest.mark.parametrize("verb", ["run", "network"])
def test_what_opens_too_much_or_makes_no_sense_is_an_error_that_names_it(person: Person, verb: str) -> None:
    box = made(person, "box") if verb == "network" else ""
    before = person.json("network", box)["reach"] if box else None
    wrong = {}
    for words, (code, *parts) in BAD.items():
        option, _, value = words.partition(" ")
        if box and words not in SOME:
            continue
        argv = ("network", box, option, value) if box else ("run", option, value, "--", "true")
        error = person.json(*argv).get("error", {})
        told = f"{error.get('message')} {error.get('hint')}"
        if error.get("code") != code or not error.get("hint") or not all(part in told for part in parts):
            wrong[words] = error
    assert not wrong
    assert not box or person.json("network", box)["reach"] == before


@together
def test_the_machine_itself_has_to_be_named_with_a_port_and_then_is_reached(person: Person) -> None:
    with web(address="127.0.0.1") as one:
        words = ("curl", "-sS", "--noproxy", "", "--max-time", "30", f"http://127.0.0.1:{one.port}/")
        assert refused(run(person, words=words)["stdout"])
        assert run(person, "--allow", f"127.0.0.1:{one.port}", words=words)["stdout"] == "hello\n"
        words = (*words[:-1], f"http://localhost:{one.port}/")
        assert refused(run(person, "--allow", f"127.0.0.1:{one.port}", words=words)["stdout"])


@together
def test_a_rule_for_loopback_is_remarked_unless_the_service_is_forwarded(person: Person) -> None:
    """Programs do not ask the proxy for it; a name that leads there is another thing."""
    said = "inside, 127.0.0.1 is the sandbox itself, and {} brings the host's service in"
    options = ("--discard", "--allow", "127.0.0.1:8080", "--", "true")
    assert said.format("--forward 8080") in person.elsewhere("run", *options).stderr
    assert person.elsewhere("run", "--forward", "8080", *options).stderr == ""
    box = made(person, "box")
    changed = person.elsewhere("network", box, "--allow", "127.0.0.1:8080", check=True)
    assert said.format(f"elsewhere network {box} --forward 8080") in changed.stderr
    person.extra["ELSEWHERE_NETWORK_ALLOW"] = "localhost:8080"
    assert person.json("create")["error"]["code"] == "bad_rule"


# -- changed while it runs ------------------------------------------------------------------------------------------------------


@together
def test_rules_of_a_running_sandbox_are_shown_and_changed_at_once(person: Person) -> None:
    with web() as one:
        box = made(person, "box")
        assert refused(fetched(person, box, one.url()))
        document = person.json("network", box, "--allow", one.rule)
        assert document["sandbox"] == box
        assert document["reach"] == {"allow": [one.rule], "deny": [], "presets": ["packages"], "forward": [], "publish": []}
        assert fetched(person, box, one.url()) == "hello\n"
        shown = [line.split(maxsplit=1) for line in person.elsewhere("network", box).stdout.splitlines()]
        assert shown[:3] == [["network", "allow"], ["presets", "packages"], ["allow", one.rule]]
        assert all(kind == "machine" for kind, _ in shown[3:])
        person.json("network", box, "--deny", one.rule)
        assert refused(fetched(person, box, one.url()))
        error = person.json("network", box, "--forget", one.rule)["error"]
        assert error["code"] == "rule_ambiguous"
        assert error["hint"] == f"--forget allow:{one.rule} or --forget deny:{one.rule}"
        person.json("network", box, "--forget", f"deny:{one.rule}")
        assert fetched(person, box, one.url()) == "hello\n"
        person.json("network", box, "--forget", f" {one.rule}")
        document = person.json("network", box)
        assert (document["reach"]["allow"], document["reach"]["deny"]) == ([], [])
        assert refused(fetched(person, box, one.url()))
        assert person.json("network", box, "--preset", "none", "--preset", "models")["reach"]["presets"] == ["models"]
        error = person.json("network", box, "--forget", "example.org")["error"]
        assert (error["code"], error["hint"]) == ("no_such_rule", "one of: models")
        assert person.json("network", "no-such")["error"]["code"] == "sandbox_not_found"


@together
def test_a_download_ends_when_it_is_not_allowed_any_more_and_no_other_does(person: Person) -> None:
    with web() as one, web() as other:
        box = made(person, "box", "--allow", one.rule, "--allow", other.rule)
        for name, server in (("one", one), ("other", other)):
            line = f"curl -sS -o {name} {server.url('/endless')}; echo $? > {name}.ended"
            person.elsewhere("exec", "-d", box, "--", "sh", "-c", line, check=True)

        def size(name: str) -> int:
            return int(inside(person, box, "sh", "-c", f"stat -c %s {name} 2>/dev/null || echo 0")["stdout"])

        assert eventually(lambda: size("one") and size("other"))
        assert person.json("network", box)["connections"] == 2
        assert person.json("network", box, "--forget", one.rule)["ended"] == 1
        wait = "for i in $(seq 500); do test -s one.ended && break; sleep 0.02; done; cat one.ended; ls other.ended"
        ended = inside(person, box, "sh", "-c", wait)
        assert int(ended["stdout"].split()[0]) != 0, "curl knows that it is not all"
        assert "other.ended" not in ended["stdout"]
        before = size("other")
        assert eventually(lambda: size("other") > before)
        done = person.elsewhere("network", box, "--deny", HOST)
        assert "ended, since not allowed any more: 1 connection" in done.stderr


# -- several of them ------------------------------------------------------------------------------------------------------------


@together
def test_two_sandboxes_have_different_rules_and_the_same_ports(person: Person) -> None:
    with web("one\n") as one, web("two\n") as two:
        boxes = {"first": (one, two), "second": (two, one)}
        for name, (own, _) in boxes.items():
            made(person, name, "--allow", own.rule, "--publish", "0:8000")
            serves(person, name, 8000, name)
        for name, (own, others) in boxes.items():
            assert fetched(person, name, own.url()) == own.pages["/"].decode()
            assert refused(fetched(person, name, others.url()))
            assert page(published(person, name)[8000]) == name
        person.json("network", "first", "--allow", two.rule)
        assert fetched(person, "first", two.url()) == "two\n"
        assert refused(fetched(person, "second", one.url())), "the other one's rules are its own"
        person.elsewhere("rm", "first", "--force", check=True)
        assert page(published(person, "second")[8000]) == "second"


# -- published ports ------------------------------------------------------------------------------------------------------------


@together
def test_a_published_port_is_reached_on_the_hosts_loopback_alone(person: Person) -> None:
    port = free_port()
    done = person.elsewhere("create", "--name", "box", "--publish", f"{port}:80", "--publish", "0:80", check=True)
    picked = next(one["port"] for one in person.json("network", "box")["published"] if one["port"] != port)
    for one in (port, picked):
        assert f"elsewhere: published 127.0.0.1:{one} → 80\n" in done.stderr
    assert page(port) == "", "nobody listens inside yet"
    serves(person, "box", 80, "inside")
    assert page(port) == page(picked) == "inside"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), 5)
    person.elsewhere("network", "box", "--forget", f"{port}:80", check=True)
    assert not listens(port)
    assert page(picked) == "inside"
    person.elsewhere("stop", "box", check=True)
    assert eventually(lambda: not listens(picked))


@together
def test_a_published_port_of_a_run_is_said_and_gone_with_it(person: Person) -> None:
    line = f"{shlex.join([person.python, '-I', '-c', SERVE, '8000', 'inside'])} & read line; kill $!"
    words = person.command("run", "--discard", "--publish", "0:8000", "-c", line)
    process = subprocess.Popen(
        words, cwd=person.project, env=person.environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **person.identity(),
    )  # fmt: skip
    assert process.stderr
    said = process.stderr.readline()
    port = int(said.partition(":")[2].partition(":")[2].partition(" ")[0])
    assert said == f"elsewhere: published 127.0.0.1:{port} → 8000\n"
    assert eventually(lambda: page(port) == "inside")
    process.communicate("go\n", timeout=60)
    assert eventually(lambda: not listens(port))


@together
def test_a_port_that_is_in_use_is_an_error_and_nothing_is_changed(person: Person) -> None:
    with greeter(b"somebody else") as taken:
        for words in (("create", "--publish", f"{taken}:80"), ("run", "--publish", f"{taken}:80", "--", "true")):
            error = person.json(*words)["error"]
            assert error["code"] == "port_in_use"
            assert str(taken) in error["message"]
            assert error["hint"] == "--publish 0:80 picks a free one"
        assert person.json("list")["sandboxes"] == [], "no sandbox is left of it"
        box = made(person, "box", "--publish", "0:80")
        before = person.json("network", box)
        error = person.json("network", box, "--allow", "example.org", "--publish", f"{taken}:80")["error"]
        assert error["code"] == "port_in_use"
        assert person.json("network", box) == before, "neither the port nor the rule"
        person.elsewhere("network", box, "--publish", "0:81", check=True)
        assert published(person, box).keys() == {80, 81}


@together
def test_a_port_that_was_taken_meanwhile_is_in_nobodys_way(person: Person) -> None:
    """Neither in that of what runs in the sandbox, nor in that of its rules."""
    with web() as one:
        port = free_port()
        box = made(person, "box", "--allow", one.rule, "--publish", f"{port}:8000")
        assert fetched(person, box, one.url()) == "hello\n"
        person.elsewhere("stop", box, check=True)
        with socket.create_server(("127.0.0.1", port)):
            error = person.json("start", box)["error"]
            assert error["code"] == "port_in_use"
            assert error["hint"] == f"elsewhere network {box} --forget {port}:8000 --publish 0:8000"
            done = person.elsewhere("exec", box, "--", "echo", "runs")
            assert (done.returncode, done.stdout) == (0, "runs\n")
            assert f"port {port} of the host is in use" in done.stderr
            document = person.json("network", box, "--deny", one.rule)
            assert document["reach"]["deny"] == [one.rule]
            assert [trouble["what"] for trouble in document["trouble"]] == [f"--publish {port}:8000"]
            assert refused(fetched(person, box, one.url()))
            shown = person.elsewhere("network", box).stdout
            assert f"trouble    --publish {port}:8000: port {port} of the host is in use" in shown
            document = person.json("network", *error["hint"].split()[2:])
            assert document["trouble"] == []
            assert [one["inside"] for one in document["published"]] == [8000]


# -- forwards -------------------------------------------------------------------------------------------------------------------


@together
def test_services_of_the_host_are_reached_by_forwards_in_two_sandboxes_at_once(person: Person) -> None:
    """By a port, by another host, at another port, by a path; the same inner ports lead to different services."""
    beside = person.home / "beside"
    beside.mkdir()
    person.own(person.home)
    with (
        greeter(b"database of one") as one,
        greeter(b"database of two", ("127.0.0.3", 0)) as two,
        greeter(b"by a path", str(beside / "db.sock")),
    ):
        os.chmod(beside / "db.sock", 0o777)
        ask = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1])), 20).recv(100).decode())"
        by_path = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(100).decode())"
        made(person, "first", "--forward", str(one), "--forward", f"5432=127.0.0.1:{one}", "--forward", f"unix:{beside}/db.sock")
        made(person, "second", "--forward", f"127.0.0.3:{two}", "--forward", f"5432=127.0.0.3:{two}")

        def said(box: str, code: str, where: object) -> str:
            command = inside(person, box, person.python, "-I", "-c", code, str(where))
            return str(command["stdout"] or command["stderr"].splitlines()[-1]).strip()

        assert said("first", ask, one) == said("first", ask, 5432) == "database of one"
        assert said("second", ask, two) == said("second", ask, 5432) == "database of two"
        assert said("first", by_path, beside / "db.sock") == "by a path"
        assert "refused" in said("second", ask, one), "what is not forwarded is not there"
        assert said("second", by_path, beside / "db.sock") != "by a path"
        person.elsewhere("network", "second", "--forward", f"unix:{beside}/db.sock", "--forget", f"127.0.0.3:{two}", check=True)
        assert said("second", by_path, beside / "db.sock") == "by a path"
        assert "refused" in said("second", ask, two)
        assert said("second", ask, 5432) == "database of two"
        error = person.json("network", "second", "--forward", "5432=127.0.0.1:1")["error"]
        assert error["code"] == "port_in_use_inside"
        assert said("second", ask, 5432) == "database of two"
        if not person.is_root:
            error = person.json("network", "second", "--forward", "unix:/usr/share/elsewhere-tried.sock")["error"]
            assert error["code"] == "forward_refused"
            assert "/usr/share/elsewhere-tried.sock" in error["message"]
            assert "/run" in error["hint"]


@together
def test_a_socket_that_the_sandbox_could_replace_in_reality_is_not_forwarded(person: Person) -> None:
    shared, other = person.home / "shared", person.home / "other"
    for place in (shared / "deep", other):
        place.mkdir(parents=True)
    (person.home / "link").symlink_to("shared/deep")
    (shared / "out.sock").symlink_to(other / "db.sock")
    person.own(person.home)
    share = ("--share", f"{shared}:rw")
    box = made(person, "box", *share)
    for path in (shared / "deep" / "db.sock", person.home / "link" / "db.sock", shared / "out.sock"):
        for words in (("create", *share), ("network", box)):
            error = person.json(*words, "--forward", f"unix:{path}")["error"]
            assert error["code"] == "forward_refused", (words, path)
            assert str(path) in error["message"]
            assert str(shared) in error["message"]
            assert ":rw" in error["hint"]
    assert person.json("network", box)["reach"]["forward"] == []
    for path in ("/proc/self/fd/3", "/sys/x.sock", "/dev/log"):
        error = person.json("create", "--forward", f"unix:{path}")["error"]
        assert error["code"] == "forward_refused"
        assert path[: path.index("/", 1)] + " is the kernel's" in error["message"]
    (other / "link.sock").symlink_to("db.sock")
    assert person.json("network", box, "--forward", f"unix:{other}/link.sock")["reach"]["forward"] == [f"unix:{other}/db.sock"]
    assert person.json("network", box, "--forget", f"unix:{other}/link.sock")["reach"]["forward"] == []
    assert made(person, "reads", "--share", str(shared), "--forward", f"unix:{other}/db.sock")


@together
def test_the_socket_of_a_forward_is_no_change(person: Person) -> None:
    person.own(person.project)
    for path in (person.project / "db.sock", person.home / "db.sock"):
        document = person.json("run", "--forward", f"unix:{path}", "--", "test", "-S", str(path))
        assert document["command"]["exit_code"] == 0
        assert document["sandbox"]["state"] == "removed", "nothing is in it that would be worth keeping"
    path = person.project / "db.sock"
    box = made(person, "box", "--forward", f"unix:{path}")
    assert inside(person, box, "sh", "-c", f"test -S {path} && echo > new")["exit_code"] == 0
    for _ in range(2):
        shown = person.elsewhere("diff", "--name-only", box)
        assert "new" in shown.stdout, shown.stderr
        assert "db.sock" not in shown.stdout
        person.elsewhere("network", box, "--forget", f"unix:{path}")
    assert inside(person, box, "sh", "-c", f"rm {path} && mkdir {path} && echo work > {path}/w")["exit_code"] == 0
    assert "db.sock/w" in person.elsewhere("diff", "--name-only", box).stdout, "what is no socket is somebody's work"


@pytest.mark.parametrize("person", ["root", "user"])
def test_a_postgresql_of_the_host_is_reached_in_two_sandboxes_at_once(person: str, library: Path) -> None:
    """At the same inner port; what one writes the other reads. And web servers at the same inner port are reached in both."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("needs Debian's postgresql")
    someone = make_person(person, library, uid=65534)
    owner: dict[str, Any] = someone.identity()
    if someone.is_root:
        account = next((entry for entry in pwd.getpwall() if entry.pw_name == "postgres"), None)
        owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
    try:
        if not owner and os.geteuid() == 0:
            pytest.skip("root's PostgreSQL needs the account postgres")
        assert someone.project
        with database(someone, found[-1].parent, owner) as port:
            ask = ("psql", "-h", "127.0.0.1", "-p", "5432", "-U", "tester", "-d", "postgres", "-Atc")
            for box in ("first", "second"):
                made(someone, box, "--forward", f"5432=127.0.0.1:{port}", "--publish", "0:8000")
            assert inside(someone, "first", *ask, "create table t as select 6 * 7 as n")["exit_code"] == 0
            assert inside(someone, "second", *ask, "select n from t")["stdout"] == "42\n"
            for box in ("first", "second"):
                serves(someone, box, 8000, box)
                assert page(published(someone, box)[8000]) == box
            made(someone, "third")
            assert "refused" in inside(someone, "third", *ask, "select 1")["stderr"]
    finally:
        dismiss(someone)


@contextlib.contextmanager
def database(person: Person, programs: Path, owner: dict[str, Any]) -> Iterator[int]:
    port, place = free_port(), person.place / "db"
    place.mkdir()
    if owner:
        os.chown(place, owner["user"], owner["group"])
    environment = {**person.environment(), "HOME": str(place)}
    more: dict[str, Any] = {"check": True, "capture_output": True, "cwd": place, "env": environment, "timeout": 100, **owner}
    subprocess.run([programs / "initdb", "-D", place / "data", "-U", "tester", "-A", "trust", "--no-sync"], **more)
    options = f"-p {port} -k {place} -c listen_addresses=127.0.0.1 -c fsync=off"
    control = [programs / "pg_ctl", "-D", place / "data", "-w"]
    # Whoever waits for the end of its output would wait for the server.
    subprocess.run(
        [*control, "-l", place / "log", "-o", options, "start"], **more | {"capture_output": False, "stdout": subprocess.DEVNULL}
    )
    try:
        yield port
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], **more)


# -- other networks -------------------------------------------------------------------------------------------------------------


@together
def test_without_a_network_there_is_its_own_loopback_forwards_and_published_ports(person: Person) -> None:
    with web() as one, greeter(b"hello") as port:
        box = made(person, "box", "--network", "none", "--forward", str(port), "--publish", "0:8000")
        command = inside(person, box, "sh", "-c", f"env | grep -i proxy; curl -sS {one.url()}; curl -sS http://pypi.org/")
        assert command["stdout"] == ""
        assert command["stderr"].count("curl: ") == 2
        serves(person, box, 8000, "inside")
        assert page(published(person, box)[8000]) == "inside"
        code = f"import socket; print(socket.create_connection(('127.0.0.1', {port}), 20).recv(100).decode())"
        assert inside(person, box, person.python, "-I", "-c", code)["stdout"] == "hello\n"
        error = person.json("network", box, "--allow", one.rule)["error"]
        assert error["code"] == "bad_network"
        assert "--network allow" in error["hint"]
        assert person.json("run", "--network", "none", "--allow", one.rule, "--", "true")["error"]["code"] == "bad_network"
        error = person.json("network", box, "--preset", "models")["error"]
        assert (error["code"], "--preset models does nothing" in error["message"]) == ("bad_network", True)
        errors = [
            person.json(*words)["error"]
            for words in (("network", box, "--deny", "a.test"), ("run", "--network", "none", "--deny", "a.test", "--", "true"))
        ]
        assert errors[0] == errors[1]
        assert errors[0]["message"] == "--deny a.test does nothing with no network: --network none"
        assert person.json("network", box)["reach"]["deny"] == []


@together
def test_a_profile_without_a_network_is_remarked_once(person: Person) -> None:
    done = person.elsewhere("run", "--discard", "--network", "none", "--profile", "codex", "--", "true")
    assert done.returncode == 0
    assert done.stderr.count("cannot be reached") == 1
    assert "api.openai.com" in done.stderr
    assert "cannot be reached" not in person.elsewhere("run", "--discard", "--profile", "codex", "--", "true").stderr


@together
def test_the_hosts_network_is_all_of_it_and_has_no_rules(person: Person) -> None:
    with web(address="127.0.0.1") as one:
        words = (*CURL, "--noproxy", "*", f"http://127.0.0.1:{one.port}/")
        assert run(person, "--network", "host", words=words)["stdout"] == "hello\n"
        assert run(person, words=words)["exit_code"] == 7, "and without it there is none of that"
        for option in (("--allow", "example.org"), ("--publish", "80"), ("--forward", "5432"), ("--preset", "models")):
            error = person.json("run", "--network", "host", *option, "--", "true")["error"]
            assert error["code"] == "bad_network"
            assert option[0] in error["message"]
        box = made(person, "box", "--network", "host")
        assert person.json("network", box)["network"] == "host"
        assert person.json("network", box, "--allow", "example.org")["error"]["code"] == "bad_network"


@together
def test_untrusted_work_has_no_network(person: Person) -> None:
    with web() as one:
        command = run(person, "--untrusted", words=(*CURL, one.url()))
        assert command["exit_code"] == 7
        assert command["stdout"] == ""


# -- its life -------------------------------------------------------------------------------------------------------------------


@together
def test_rules_forwards_and_ports_live_as_long_as_the_sandbox_does(person: Person) -> None:
    with web() as one, greeter(b"hello") as port:
        ask = f"import socket; print(socket.create_connection(('127.0.0.1', {port}), 20).recv(100).decode())"

        def works(box: str) -> None:
            assert fetched(person, box, one.url()) == "hello\n"
            assert inside(person, box, person.python, "-I", "-c", ask)["stdout"] == "hello\n"
            assert refused(fetched(person, box, "http://unlisted.example/"))

        made(person, "box", "--allow", one.rule, "--forward", str(port), "--publish", "0:8000")
        picked = published(person, "box")
        works("box")
        person.elsewhere("snapshot", "box", "before", check=True)
        works("box")
        assert published(person, "box") == picked
        person.elsewhere("fork", "box", "--name", "child", check=True)
        works("child")
        assert published(person, "child") == {}, "a port of the host can be had once"
        person.elsewhere("stop", "box", check=True)
        person.elsewhere("network", "box", "--allow", "example.org", check=True)
        person.elsewhere("start", "box", check=True)
        works("box")
        assert published(person, "box") == picked, "the one that was picked is picked again"
        assert person.json("network", "box")["reach"]["allow"] == [one.rule, "example.org"]
        person.elsewhere("rollback", "box", "before", check=True)
        works("box")
        assert published(person, "box") == picked
        serves(person, "box", 8000, "inside")
        assert page(picked[8000]) == "inside"


@together
def test_the_sdk_says_the_same(person: Person) -> None:
    with web() as one, web() as other, greeter(b"hello") as port:
        code = f"""
import json, urllib.request
from elsewhere import ElsewhereError, Sandbox
with Sandbox.create(network='allow', allow=['{one.rule}', '{other.rule}'], deny=['{other.rule}'], preset=['none', 'models'],
                    forward=['{port}'], publish=['0:8000'], name='box') as box:
    assert box.run(['curl', '-sS', '{one.url()}']).stdout == 'hello\\n'
    result = box.run(['curl', '-sS', '{other.url()}'])
    assert [(one.kind, one.what) for one in result.denials] == [('network', '{other.rule}')], result.denials
    ask = "import socket; print(socket.create_connection(('127.0.0.1', {port}), 20).recv(100).decode())"
    assert box.run(['{person.python}', '-I', '-c', ask]).stdout == 'hello\\n'
    print(json.dumps(box.id))
for wrong, code in (({{'allow': ['*']}}, 'bad_rule'), ({{'preset': ['x']}}, 'bad_preset'), ({{'publish': ['x']}}, 'bad_publish'),
                    ({{'network': 'none', 'allow': ['example.org']}}, 'bad_network')):
    try:
        Sandbox.create(**wrong)
    except ElsewhereError as error:
        assert error.code == code, error
    else:
        raise AssertionError(wrong)
"""
        done = person.sdk(code, check=False)
        assert done.returncode == 0, done.stderr


# -- the network service --------------------------------------------------------------------------------------------------------


def test_a_service_that_is_killed_is_followed_by_another_and_nothing_gets_out_meanwhile(person: Person) -> None:
    with web() as one, web() as other, greeter(b"hello") as port:
        box = made(person, "box", "--allow", one.rule, "--forward", str(port), "--publish", "0:8000")
        serves(person, box, 8000, "inside")
        picked = published(person, box)
        ask = f"import socket; print(socket.create_connection(('127.0.0.1', {port}), 20).recv(100).decode())"

        def works() -> None:
            assert fetched(person, box, one.url()) == "hello\n"
            assert refused(fetched(person, box, other.url()))
            assert inside(person, box, person.python, "-I", "-c", ask)["stdout"] == "hello\n"
            assert page(picked[8000]) == "inside"

        works()
        (first,) = services(person)
        os.kill(first, signal.SIGKILL)
        works()
        assert eventually(lambda: services(person) not in ([], [first]))
        # Nobody is there who would start another one: everything is closed, and stays so.
        line = (
            f"while :; do curl -s --max-time 1 {one.url()} {other.url()}; curl -s --noproxy '*' {other.url()}; sleep 0.02; done"
        )
        person.elsewhere("exec", "-d", box, "--", "sh", "-c", line, check=True)
        assert eventually(lambda: len(one.asked) > 10)
        person.stop_launcher()
        for pid in services(person):
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not services(person))
        seen = len(one.asked)
        assert page(picked[8000]) == ""
        assert not eventually(lambda: len(one.asked) > seen, 1.5)
        assert published(person, box) == picked, "what is shown is there"
        assert eventually(lambda: len(one.asked) > seen), "it asked all the time"
        works()
        assert not other.asked


def test_whoever_waits_for_a_service_that_does_not_answer_may_leave(person: Person) -> None:
    box = made(person, "box", "--publish", "0:8000")
    (service,) = services(person)
    os.kill(service, signal.SIGSTOP)
    try:
        for words in (("network", box), ("network", box, "--publish", "0:8001"), ("exec", box, "--", "true")):
            argv, more = person.command(*words), {"env": person.environment(), **person.identity()}
            with subprocess.Popen(argv, cwd=person.project, stderr=subprocess.PIPE, text=True, **more) as process:
                assert eventually(lambda pid=process.pid: passes_signals_on(pid))
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=30)
                assert (process.returncode, "did not answer" in said) == (130, False), (words, said)
    finally:
        os.kill(service, signal.SIGCONT)
    assert person.json("network", box)["reach"]["publish"] == ["0:8000"]


def passes_signals_on(pid: int) -> bool:
    (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_whoever_needs_a_service_that_does_not_start_is_told_so(person: Person) -> None:
    place = person.place / "broken"
    (place / "h11").mkdir(parents=True)
    (place / "h11" / "__init__.py").write_text("raise ImportError('this h11 is broken')\n")
    (place / "elsewhere").symlink_to(os.path.realpath(person.place / "lib") + "/elsewhere")
    person.own(place)
    person.extra["PYTHONPATH"] = str(place)
    box = made(person, "box", "--allow", "example.org")
    for _ in range(2):
        command = inside(person, box, *CURL, "http://example.org/")
        assert command["stdout"].startswith("elsewhere: the network service does not start, see "), command
    log = Path(command["stdout"].split()[-1])
    assert "this h11 is broken" in log.read_text()
    assert "503" in inside(person, box, *CURL, "https://example.org/")["stderr"]
    assert inside(person, box, "curl", "-sS", "--max-time", "30", "--noproxy", "*", "http://example.org/")["exit_code"] in (6, 7)
    assert person.json("network", box)["trouble"][0]["what"] == "the network service"
    error = person.json("network", box, "--deny", "example.org")["error"]
    assert error["code"] == "network_service_gone"
    assert str(log) in error["hint"]
    assert person.json("network", box)["reach"]["deny"] == ["example.org"], "it holds as soon as there is one"


def test_the_service_is_gone_with_the_last_sandbox(person: Person) -> None:
    person.extra["ELSEWHERE_NETWORK_IDLE_S"] = "0.2"
    with web() as one:
        for name in ("first", "second"):
            made(person, name, "--allow", one.rule)
            assert fetched(person, name, one.url()) == "hello\n"
        assert len(services(person)) == 1, "one for all"
        person.elsewhere("rm", "first", "--force", check=True)
        assert fetched(person, "second", one.url()) == "hello\n"
        person.elsewhere("stop", "second", check=True)
        assert eventually(lambda: not services(person), 30)
        assert person.json("network", "second")["reach"]["allow"] == [one.rule], "to look at the rules needs nobody"
        assert fetched(person, "second", one.url()) == "hello\n", "and with the next one it is there again"


# -- the host's own proxy -------------------------------------------------------------------------------------------------------

PASSWORD = "s3cret-of-the-hosts-proxy"


@dataclass
class Chained:
    """A proxy that wants a password, and answers in the place of everybody. `asked` is the first line of what it was asked."""

    port: int
    asked: list[str] = field(default_factory=list)
    turned_away: list[str] = field(default_factory=list)


@contextlib.contextmanager
def hosts_proxy() -> Iterator[Chained]:
    wanted = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Proxy-Authorization") == wanted
            (found.asked if known else found.turned_away).append(f"{self.command} {self.path}")
            if not known:
                self.send_response(407, f"who are you, {PASSWORD}?")
                self.send_header("Proxy-Authenticate", "Basic")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            if self.command == "CONNECT":
                self.rfile.read(1)  # whatever it is that is spoken
            self.wfile.write(b"by the host's proxy\n")

        do_CONNECT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Chained(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def test_the_hosts_own_proxy_is_used_and_its_password_stays_outside(person: Person) -> None:
    """Everything that is allowed goes through it, names unresolved; the presets are seen by that, too."""
    with hosts_proxy() as chained:
        address = f"http://me:{PASSWORD}@127.0.0.1:{chained.port}"
        for name in ("http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
            person.extra[name] = address
        box = made(person, "box", "--allow", "allowed.example")
        assert fetched(person, box, "http://allowed.example/x") == "by the host's proxy\n"
        assert refused(fetched(person, box, "http://unlisted.example/x"))
        for host in ("pypi.org", "api.anthropic.com"):
            inside(person, box, "curl", "-sS", "--max-time", "10", f"https://{host}/")
        person.json("network", box, "--preset", "models")
        inside(person, box, "curl", "-sS", "--max-time", "10", "https://api.anthropic.com/")
        person.json("network", box, "--preset", "none")
        inside(person, box, "curl", "-sS", "--max-time", "10", "https://pypi.org/")
        assert chained.asked == ["GET http://allowed.example/x", "CONNECT pypi.org:443", "CONNECT api.anthropic.com:443"]
        assert not chained.turned_away
        look = (
            "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'; "
            "curl -sSv --max-time 10 -H 'Proxy-Authorization: Basic bm9uc2Vuc2U=' http://allowed.example/y 2>&1; "
            "curl -sSv --max-time 10 --noproxy '*' --proxy '' http://allowed.example/z 2>&1"
        )
        seen = [json.dumps(inside(person, box, "sh", "-c", look))]
        assert "GET http://allowed.example/y" in chained.asked
        assert "by the host's proxy" in seen[0], "the control: it looked, and it was used"
        person.elsewhere("exec", "-d", box, "--", "sh", "-c", look, check=True)
        seen += [
            person.elsewhere(*words).stdout
            for words in (("inspect", "--json", box), ("network", "--json", box), ("inspect", box))
        ]
        assert eventually(lambda: "by the host's proxy" in person.elsewhere("logs", box).stdout)
        seen += [person.elsewhere("logs", box).stdout]
        (kept,) = person.state.glob("sandboxes/*/network.proxy")
        assert kept.stat().st_mode & 0o777 == 0o600
        assert inside(person, box, "cat", str(kept))["exit_code"] != 0
        assert person.json("network", box)["proxy"] == [f"127.0.0.1:{chained.port}"]
        for directory, _, files in os.walk(person.state):
            for name in files:
                with contextlib.suppress(OSError):
                    if Path(directory) / name != kept:
                        seen.append((Path(directory) / name).read_bytes().decode(errors="replace"))
        person.elsewhere("stop", box, check=True)
        assert not kept.exists(), "for as long as it runs"
        encoded = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        for secret in (PASSWORD, encoded):
            assert not [text for text in seen if secret in text]


def test_each_sandbox_goes_through_the_proxy_of_whoever_started_it(person: Person) -> None:
    """Whoever used elsewhere first has the launcher, and no say in it."""
    with hosts_proxy() as one, hosts_proxy() as other, web() as direct:
        proxies = [f"http://me:{PASSWORD}@127.0.0.1:{chained.port}" for chained in (one, other)]
        person.extra["http_proxy"] = proxies[0]
        first = made(person, "first", "--allow", "allowed.example")
        assert fetched(person, first, "http://allowed.example/1") == "by the host's proxy\n"
        person.extra["http_proxy"] = proxies[1]
        second = made(person, "second", "--allow", "allowed.example")
        del person.extra["http_proxy"]
        third = made(person, "third", "--allow", direct.rule)
        assert fetched(person, second, "http://allowed.example/2") == "by the host's proxy\n"
        assert fetched(person, first, "http://allowed.example/3") == "by the host's proxy\n"
        assert fetched(person, third, direct.url()) == "hello\n"
        assert one.asked == ["GET http://allowed.example/1", "GET http://allowed.example/3"]
        assert other.asked == ["GET http://allowed.example/2"]
        person.elsewhere("stop", first, check=True)
        person.extra["http_proxy"] = proxies[1]
        assert fetched(person, first, "http://allowed.example/4") == "by the host's proxy\n"
        assert other.asked[1:] == ["GET http://allowed.example/4"]


def test_a_proxy_that_refuses_is_told_without_its_words(person: Person) -> None:
    with hosts_proxy() as chained:
        person.extra["http_proxy"] = person.extra["https_proxy"] = f"http://me:wrong@127.0.0.1:{chained.port}"
        command = run(
            person, "--allow", "allowed.example", words=("curl", "-sSv", "--max-time", "20", "https://allowed.example/")
        )
        assert "502" in command["stderr"]
        assert chained.turned_away
        assert not chained.asked
        assert PASSWORD not in json.dumps(command)
        assert command["denials"] == [], "it is not ours to refuse"


def test_a_proxy_that_cannot_be_used_is_a_denial_that_says_what_to_set(person: Person) -> None:
    person.extra["http_proxy"] = f"socks5://me:{PASSWORD}@proxy.example:1080"
    command = run(person, "--allow", "allowed.example", words=(*CURL, "http://allowed.example/"))
    (denial,) = command["denials"]
    assert "http_proxy has socks5://proxy.example:1080, which is spoken to by socks5" in denial["rule"]
    assert "http_proxy=http://proxy.example.org:3128" in denial["how_to_allow"]
    assert denial["rule"] in command["stdout"]
    assert PASSWORD not in json.dumps(command)


# -- programs that know no proxy ------------------------------------------------------------------------------------------------


def test_programs_that_know_no_proxy_are_redirected_by_name(person: Person) -> None:
    with greeter(b"hello", (HOST, 0)) as port, resolved(person, {"db.test": [[HOST]]}) as names:
        code = f"""
import socket
for name in ("db.test", "other.test"):
    try:
        print(socket.create_connection((name, {port}), 20).recv(100).decode())
    except OSError as error:
        print(type(error).__name__)
"""
        (person.project / "ask.py").write_text(code)
        words = ("run", "--json", "--discard", "--allow", f"db.test:{port}", "--", person.python, "-I", "ask.py")
        _, document, errors = names.host()(*words)
        if "redirection" not in document["sandbox"]["enforced"]["network"]:
            pytest.skip("connections cannot be redirected here")
        assert document["command"]["stdout"] == "hello\ngaierror\n", errors
        assert [one["what"].partition(":")[0] for one in document["command"]["denials"]] == ["other.test"]
        assert names.times("db.test") == 1
        assert not names.times("other.test")


# -- real clients ---------------------------------------------------------------------------------------------------------------


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")


@together
def test_git_clones_over_http(person: Person) -> None:
    needs("git")
    bare = person.place / "bare.git"
    person.shell("git", "clone", "-q", "--bare", person.project, bare)
    person.shell("git", "-C", bare, "update-server-info")
    pages = {f"/bare.git/{path.relative_to(bare)}": path.read_bytes() for path in bare.rglob("*") if path.is_file()}
    pages["/bare.git/info/refs?service=git-upload-pack"] = pages["/bare.git/info/refs"]
    with web(pages=pages) as one:
        words = ("sh", "-c", f"git clone -q {one.url('/bare.git')} clone && cat clone/README.md")
        assert run(person, "--allow", one.rule, words=words)["stdout"] == "# a project\n"
        command = run(person, words=words)
        assert command["exit_code"] != 0
        assert "403" in command["stderr"], "git shows the status of the refusal"
        assert [denial["what"] for denial in command["denials"]] == [one.rule]


@together
def test_pip_installs_from_an_allowed_index(person: Person) -> None:
    if subprocess.run(["/usr/bin/python3", "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("needs pip")
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("ew_tried.py", "answer = 42\n")
        about = "ew_tried-1.0.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: ew-tried\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    name = "ew_tried-1.0-py3-none-any.whl"
    pages = {f"/{name}": wheel.getvalue(), "/simple/ew-tried/": f'<a href="/{name}">{name}</a>'.encode()}
    with web(pages=pages) as one:
        pip = (
            "/usr/bin/python3 -m pip install -q --isolated --disable-pip-version-check --no-cache-dir --retries 0 --target there"
        )
        line = f"{pip} --index-url {one.url('/simple')} --trusted-host {HOST} ew-tried && PYTHONPATH=there /usr/bin/python3 -c 'import ew_tried; print(ew_tried.answer)'"
        command = run(person, "--allow", one.rule, words=("sh", "-c", line))
        assert command["stdout"] == "42\n", command["stderr"]
        asked = len(one.asked)
        command = run(person, words=("sh", "-c", line))
        assert command["exit_code"] != 0
        assert len(one.asked) == asked


@together
def test_npm_installs_from_an_allowed_registry(person: Person) -> None:
    needs("npm", "node")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in (("package.json", '{"name": "ew-tried", "version": "1.0.0"}'), ("index.js", "module.exports = 42")):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    with web(pages={"/ew-tried.tgz": packed.getvalue()}) as one:
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(packed.getvalue()).digest()).decode()
        version = {"name": "ew-tried", "version": "1.0.0", "dist": {"tarball": one.url("/ew-tried.tgz"), "integrity": integrity}}
        document = {"name": "ew-tried", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        one.pages["/ew-tried"] = json.dumps(document).encode()
        line = f"npm install --no-audit --no-fund --registry {one.url()} ew-tried >&2 && node -e 'console.log(require(\"ew-tried\"))'"
        command = run(person, "--allow", one.rule, words=("sh", "-c", line))
        assert command["stdout"] == "42\n", command["stderr"]


@together
def test_apt_installs_from_an_allowed_archive(root: Person) -> None:
    needs("apt-get", "dpkg-deb")
    place = root.place / "deb"
    (place / "DEBIAN").mkdir(parents=True)
    (place / "usr/share/ew-tried").mkdir(parents=True)
    (place / "usr/share/ew-tried/answer").write_text("42\n")
    control = "Package: ew-tried\nVersion: 1.0\nArchitecture: all\nMaintainer: T <t@example.org>\nDescription: tried\n"
    (place / "DEBIAN/control").write_text(control)
    root.shell("dpkg-deb", "--root-owner-group", "-b", place, root.place / "ew-tried.deb")
    package = (root.place / "ew-tried.deb").read_bytes()
    index = f"{control}Filename: ./ew-tried.deb\nSize: {len(package)}\nSHA256: {hashlib.sha256(package).hexdigest()}\n\n"
    with web(
        pages={"/./Packages": index.encode(), "/Packages": index.encode(), "/./ew-tried.deb": package, "/ew-tried.deb": package}
    ) as one:
        options = "-qq -o Dir::Etc::sourcelist=$PWD/own.list -o Dir::Etc::sourceparts=/dev/null -o APT::Get::List-Cleanup=0"
        line = (
            f"echo 'deb [trusted=yes] {one.url()} ./' > own.list; apt-get {options} update >&2; "
            f"apt-get {options} install -y ew-tried >&2; cat /usr/share/ew-tried/answer"
        )
        command = run(root, "--allow", one.rule, words=("sh", "-c", line))
        assert command["stdout"] == "42\n", command["stderr"]
        assert not Path("/usr/share/ew-tried").exists()
