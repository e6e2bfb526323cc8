"""Untrusted code: a script from somewhere is run in a sandbox in which it finds no file of yours but the project, no variable and
no network. The same script outside, for comparison, finds all three.

    python examples/untrusted_script.py

It makes its own project, secret and server, and leaves nothing.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from elsewhere import Sandbox
from scratch import scratch_project

DOWNLOADED = """\
    import json, os, sys, urllib.request

    def attempt(action):
        try:
            return action()
        except OSError as error:
            return f"{type(error).__name__}"

    def send(words):
        with urllib.request.urlopen(sys.argv[2], data=words.encode(), timeout=5) as answer:
            return answer.read().decode()

    found = {
        "the secret beside the project": attempt(lambda: open(sys.argv[1]).read()),
        "the token in a variable": os.environ.get("EXAMPLE_TOKEN", "nothing"),
        "the server on this machine": attempt(lambda: send("loot")),
        "the project": attempt(lambda: open("notes.txt").read()),
    }
    print(json.dumps(found))
    """


class Server(BaseHTTPRequestHandler):
    """Of somebody who collects what others lose."""

    received: list[bytes] = []  # noqa: RUF012

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"thank you")

    def log_message(self, *_: object) -> None:
        pass


def main() -> int:
    with (
        scratch_project("notes", {"notes.txt": "all is well", "downloaded.py": DOWNLOADED}) as project,
        ThreadingHTTPServer(("127.0.0.1", 0), Server) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            compare(project, f"http://127.0.0.1:{server.server_port}/")
        finally:
            server.shutdown()
    return 0


def compare(project: Path, address: str) -> None:
    secret = project.with_name("secret.txt")
    secret.write_text("hunter2")
    os.environ["EXAMPLE_TOKEN"] = "t0ken"
    command = ["python3", "-B", "downloaded.py", str(secret), address]
    # A proxy of whoever runs this has nothing to do with a server on this machine.
    plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    outside = subprocess.run(command, cwd=project, env=plain, check=True, stdout=subprocess.PIPE, text=True).stdout
    with Sandbox.create(project, untrusted=True) as box:
        inside = box.run(command, timeout="1m").check().stdout
    real, found = json.loads(outside), json.loads(inside)
    for what, value in found.items():
        print(f"{what:32} outside: {real[what]:12} inside: {value}")
    assert list(real.values()) == ["hunter2", "t0ken", "thank you", "all is well"]
    assert list(found.values()) == ["FileNotFoundError", "nothing", "URLError", "all is well"]
    assert Server.received == [b"loot"], "only the one outside got through"
    assert Sandbox.list() == []


if __name__ == "__main__":
    sys.exit(main())
