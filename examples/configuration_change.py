"""A configuration change: each one is tried with a service of its own in a sandbox, on the same port as the real one, which
answers all the while. The change that works is promoted, and the real service restarted; the other one is dropped.

    python examples/configuration_change.py

It makes its own service, and leaves nothing.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from elsewhere import Sandbox
from scratch import scratch_project

FILES = {
    "service.py": """\
        import configparser
        from http.server import BaseHTTPRequestHandler, HTTPServer

        settings = configparser.ConfigParser()
        settings.read("service.ini")
        greeting, port = settings["service"]["greeting"], settings["service"].getint("port")


        class Service(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(greeting.encode())

            def log_message(self, *_):
                pass


        HTTPServer(("127.0.0.1", port), Service).serve_forever()
        """,
    "ask.py": """\
        import sys, urllib.request

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            print(opener.open(f"http://127.0.0.1:{sys.argv[1]}/", timeout=5).read().decode())
        except OSError as error:
            sys.exit(f"nobody answers: {error}")
        """,
}
SERVICE = ["python3", "-B", "service.py"]
ASK = ["python3", "-B", "ask.py"]


def configuration(port: object, greeting: str) -> str:
    return f"[service]\ngreeting = {greeting}\nport = {port}\n"


@contextlib.contextmanager
def serving(project: Path) -> Iterator[None]:
    with subprocess.Popen(SERVICE, cwd=project) as service:
        try:
            yield
        finally:
            service.terminate()


def ask(project: Path, port: int) -> str:
    """The real one, as soon as it answers."""
    for _ in range(100):
        said = subprocess.run([*ASK, str(port)], cwd=project, check=False, capture_output=True, text=True)
        if said.returncode == 0:
            return said.stdout.strip()
        time.sleep(0.05)
    raise AssertionError(said.stderr)


def attempt(project: Path, port: int, changed: str) -> tuple[str, bool]:
    """What the service says with a changed configuration, and whether that was promoted."""
    with Sandbox.create(project) as box:
        box.files.write("service.ini", changed)
        with box.start(SERVICE) as service:
            while service.running:
                said = box.run([*ASK, str(port)], timeout="1m")
                if said.exit_code == 0:
                    box.promote()
                    return said.stdout.strip(), True
            return service.wait().stderr.strip().splitlines()[-1], False


def main() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with scratch_project("service", {**FILES, "service.ini": configuration(port, "good morning")}) as project:
        with serving(project):
            print(f"the real service says: {ask(project, port)}")
            bad, promoted = attempt(project, port, configuration("none", "good evening"))
            print(f"with the first change: {bad}")
            assert not promoted
            good, promoted = attempt(project, port, configuration(port, "good evening"))
            print(f"with the second change: {good}")
            assert (good, promoted) == ("good evening", True)
            assert ask(project, port) == "good morning", "the real one knew nothing of all that"
        with serving(project):
            print(f"promoted and restarted, the real service says: {ask(project, port)}")
            assert ask(project, port) == "good evening"
        assert Sandbox.list() == []
    return 0


if __name__ == "__main__":
    sys.exit(main())
