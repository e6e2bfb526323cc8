"""A real browser for tests, driven over a pipe by its own protocol: no port, nothing but the standard library.

Messages are JSON with a zero byte behind, read by the browser from descriptor 3 and written to 4.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Browser", "Page", "browser"]

PATIENCE = float(os.environ.get("ELSEWHERE_TEST_PATIENCE", "1"))
NAMES = ("chromium-headless-shell", "chromium")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --remote-debugging-pipe"
).split()


@contextlib.contextmanager
def browser(place: Path) -> Iterator["Browser"]:
    """With an empty profile in `place`. Everything that it started has ended when the block is left."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs {NAMES[0]}: scripts/system-packages installs it")
    # Away from 3 and 4, onto which they are moved.
    first = [*os.pipe(), *os.pipe()]
    to_read, order, answer, to_write = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in first)
    for fd in first:
        os.close(fd)
    quiet = os.open(place / "stderr", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    pid = os.posix_spawn(
        program,
        [program, *OPTIONS, f"--user-data-dir={place / 'profile'}"],
        {"PATH": os.environ["PATH"], "HOME": str(place), "TMPDIR": str(place)},
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in ((to_read, 3), (to_write, 4), (quiet, 1), (quiet, 2))],
        setsid=True,
    )
    for fd in (to_read, to_write, quiet):
        os.close(fd)
    try:
        yield Browser(order, answer)
    finally:
        for fd in (order, answer):  # the browser ends when nobody is left to tell it anything
            os.close(fd)
        _end(pid)


def _end(pid: int) -> None:
    deadline = time.monotonic() + 5 * PATIENCE
    while time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):  # the session is its own, and nobody else's
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


class Browser:
    def __init__(self, order: int, answer: int) -> None:
        self._order, self._answer = order, answer
        self._number = 0
        self._unread = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._order, json.dumps(asked).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, (method, said)
                return dict(said["result"])
            self.events.append(said)

    def wait_for(self, method: str, session: str) -> None:
        while not any(one.get("method") == method and one.get("sessionId") == session for one in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answer], [], [], 30 * PATIENCE)
            piece = os.read(self._answer, 1 << 20) if ready else b""
            assert piece, "the browser says nothing any more"
            self._unread += piece
        said, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(said))

    def open(self, path: Path, *, width: int, dark: bool = False) -> "Page":
        """A page of its own, as wide as that, loaded to the end."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=path.as_uri())
        self.wait_for("Page.loadEventFired", session)
        return page


@dataclass
class Page:
    browser: Browser
    session: str

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """What a line of script gives; the page's own policy forbids its scripts, and not this."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def events(self, method: str) -> list[dict[str, Any]]:
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
        found = [one for one in self.browser.events if one.get("sessionId") == self.session and one.get("method") == method]
        return [dict(one["params"]) for one in found]

    def complaints(self) -> list[dict[str, Any]]:
        """Everything that would stand on the console."""
        return [
            one for name in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") for one in self.events(name)
        ]

    def requests(self) -> list[str]:
        return [str(one["request"]["url"]) for one in self.events("Network.requestWillBeSent")]

    def screenshot(self, path: Path) -> None:
        """All of it, not only what fits the window."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12_000), "scale": 1}
        said = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(said["data"]))
