"""Real programs through the proxy: what they fetch is whole, and what they say of a refusal tells what to type."""

import base64
import contextlib
import hashlib
import http.server
import importlib.util
import os
import shutil
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxied import LOOPBACK, proxied

CLEAN = {"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"}
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")


class Files(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_PUT(self) -> None:
        rest, digest = int(self.headers["Content-Length"]), hashlib.sha256()
        while rest:
            data = self.rfile.read(min(rest, 65536))
            digest.update(data)
            rest -= len(data)
        said = digest.hexdigest().encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


@contextlib.contextmanager
def served(place: Path, context: ssl.SSLContext | None = None) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer((LOOPBACK, 0), lambda *args: Files(*args, directory=str(place)))  # type: ignore[arg-type]
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(*argv: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, argv)), env={**CLEAN, **more}, capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL
    )


@needs_curl
def test_curl(place: Path) -> None:
    content = os.urandom(1 << 20)
    (place / "file").write_bytes(content)
    with served(place) as port, proxied(f"server.test:{port}") as proxy:
        url = f"http://server.test:{port}/file"
        for more in ([], ["-p"], ["--http1.0"]):
            done = run("curl", "-sS", "-x", proxy.url, *more, "-o", place / "got", url, "-o", place / "again", url)
            assert done.returncode == 0, done.stderr
            assert (place / "got").read_bytes() == (place / "again").read_bytes() == content
        sent = run("curl", "-sS", "-x", proxy.url, "-T", place / "file", f"http://server.test:{port}/new")  # Expect: 100-continue
        assert sent.stdout == hashlib.sha256(content).hexdigest()
        refused = run("curl", "-sS", "http://evil.test/", http_proxy=proxy.url)
        assert "elsewhere network calm-otter --allow evil.test\n" in refused.stdout
        tunnel = run("curl", "-sSv", "https://evil.test/", https_proxy=proxy.url)
        assert tunnel.returncode == 56
        assert "403 elsewhere refused evil.test:443; to allow it: elsewhere network calm-otter --allow evil.test" in tunnel.stderr
        assert len(proxy.denied) == 2


@needs_curl
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_tls_through_a_tunnel(place: Path) -> None:
    key, certificate = place / "key.pem", place / "certificate.pem"
    run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
        "/CN=server.test", "-addext", "subjectAltName=DNS:server.test", "-keyout", key, "-out", certificate)  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    (place / "file").write_bytes(content := os.urandom(3 << 20))
    with served(place, context) as port, proxied(f"server.test:{port}") as proxy:
        done = run(
            "curl", "-sS", "--cacert", certificate, "-x", proxy.url, "-o", place / "got", f"https://server.test:{port}/file"
        )
        assert done.returncode == 0, done.stderr
        assert (place / "got").read_bytes() == content


def wheel(place: Path) -> None:
    """The smallest package there is."""
    files = {
        "small.py": "VALUE = 42\n",
        "small-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n",
        "small-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}\n"
        for name, text in files.items()
    )
    with zipfile.ZipFile(place / "small-1.0-py3-none-any.whl", "w") as archive:
        for name, text in {**files, "small-1.0.dist-info/RECORD": f"{record}small-1.0.dist-info/RECORD,,\n"}.items():
            archive.writestr(name, text)


@needs_pip
def test_pip(place: Path) -> None:
    index = place / "www" / "simple" / "small"
    index.mkdir(parents=True)
    wheel(index)
    (index / "index.html").write_text('<a href="small-1.0-py3-none-any.whl">small-1.0-py3-none-any.whl</a>')
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    with served(place / "www") as port, proxied(f"index.test:{port}") as proxy:
        more = {"PIP_CONFIG_FILE": os.devnull, "http_proxy": proxy.url, "https_proxy": proxy.url, "HOME": str(place)}
        done = run(
            *pip,
            "install",
            "--index-url",
            f"http://index.test:{port}/simple",
            "--trusted-host",
            "index.test",
            "--target",
            place / "got",
            "small",
            **more,
        )
        assert done.returncode == 0, done.stderr
        assert (place / "got" / "small.py").read_text() == "VALUE = 42\n"
        refused = run(
            *pip,
            "--retries",
            "1",
            "install",
            "--index-url",
            "https://evil.test/simple",
            "--target",
            place / "not",
            "small",
            **more,
        )
        assert refused.returncode != 0
        assert "elsewhere network calm-otter --allow evil.test" in refused.stdout + refused.stderr
        assert {(one.host, one.port) for one in proxy.denied} == {("evil.test", 443)}


@needs_git
def test_git(place: Path) -> None:
    """By plain files: what a server without git does for a clone."""
    identity = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": str(place)}
    made = place / "www" / "made"
    run("git", "init", "-q", made, **identity)
    (made / "file").write_text("content\n")
    run("git", "-C", made, "add", ".", **identity)
    run("git", "-C", made, "-c", "user.name=a", "-c", "user.email=a@b.test", "commit", "-qm", "one", **identity)
    run("git", "-C", made, "update-server-info", **identity)
    with served(place / "www") as port, proxied(f"git.test:{port}") as proxy:
        done = run("git", "clone", "-q", f"http://git.test:{port}/made/.git", place / "cloned", http_proxy=proxy.url, **identity)
        assert done.returncode == 0, done.stderr
        assert (place / "cloned" / "file").read_text() == "content\n"
        refused = run("git", "clone", "-q", "https://evil.test/x.git", place / "not", https_proxy=proxy.url, **identity)
        assert refused.returncode != 0
        assert [(one.host, one.port) for one in proxy.denied] == [("evil.test", 443)]
