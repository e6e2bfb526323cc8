"""Denials that only a command's own words show: what its record makes of a path, without a look at the host."""

import os
from typing import Any

import pytest

from elsewhere.sandbox.denials import from_output, of_command
from elsewhere.sandbox.records.record import Record
from elsewhere.sandbox.records.request import Denied, parse_denied

GONE, READ_ONLY, CLOSED = "No such file or directory", "Read-only file system", "Permission denied"
ORDINARY = [
    ["/", "read-only: /"],
    ["/proc", "fresh proc"],
    ["/sys", "read-only: /sys"],
    ["/run", "fresh tmpfs"],
    ["/srv/project", "copy on write over /srv/project"],
    ["/tmp", "private, empty at first"],
    ["/data", "shared, read-only"],
    ["/etc/sudoers", "hidden"],
]
NARROW = [
    ["/", "copy on write over /"],
    ["/boot", "hidden"],
    ["/home", "fresh tmpfs"],
    ["/home/you", "private, empty at first"],
    ["/home/you/.cargo", "directory to mount on"],
    ["/home/you/.cargo/bin", "directory to mount on"],
    ["/home/you/.cargo/bin", "read-only: /home/you/.cargo/bin"],
    ["/home/you/project", "directory to mount on"],
    ["/home/you/project", "copy on write over /home/you/project"],
    ["/tmp", "private, empty at first"],
    ["/var", "private, empty at first"],
    ["/var/run", "link to /run"],
    ["/var/lib/dpkg", "copy on write over /var/lib/dpkg"],
]


@pytest.fixture(autouse=True)
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(path: object, *_: object, **__: object) -> Any:
        raise AssertionError(f"{path} was looked up on the host")

    for name in ("stat", "lstat", "open", "readlink", "access", "scandir", "listdir"):
        monkeypatch.setattr(os, name, looked)
    for name in ("exists", "lexists", "isdir", "isfile", "islink", "realpath"):
        monkeypatch.setattr(os.path, name, looked)


def record(plan: list[list[str]], view: str = "machine", mechanism: str = "overlay-userns", **more: Any) -> Record:
    hidden = [at for at, words in plan if words == "hidden"] if view == "machine" else []
    enforced = {"hidden": hidden, **more}
    return Record(
        id="ew-a", state="running", project="/srv/project", base={}, created_at=0.0, mechanism=mechanism, identity={},
        enforced=enforced, layers=[], plan=plan, confinement={"view": view},
    )  # fmt: skip


def told(one: Record, path: str, error: str) -> tuple[str, str] | None:
    found = from_output(one, ["cat"], f"cat: '{path}': {error}\n")
    assert [(item["kind"], item["what"], item["told_by"]) for item in found] in ([], [("path", path, "output")])
    return (found[0]["rule"], found[0]["how_to_allow"]) if found else None


@pytest.mark.parametrize("path", ["/usr/x", "/no/such/place/x", "/usr/../opt/x"])
def test_what_the_kernel_calls_read_only_is_and_what_is_missing_is_missing(path: str) -> None:
    one = record(ORDINARY)
    rule = told(one, path, READ_ONLY)
    assert rule is not None
    assert (rule[0], path in rule[1]) == ("this place is read-only in an ordinary user's sandbox", True)
    assert told(one, path, GONE) is None
    assert told(one, path, CLOSED) is None, "its owner or mode may be the reason"


@pytest.mark.parametrize("path", ["/srv/project/x", "/tmp/x", "/proc/sys/kernel/x", "/sys/x", "/run/x"])
@pytest.mark.parametrize("error", [GONE, READ_ONLY, CLOSED])
def test_a_place_of_its_own_or_of_the_kernels_is_no_denial(path: str, error: str) -> None:
    assert told(record(ORDINARY), path, error) is None


def test_a_share_that_cannot_be_written_is_named() -> None:
    assert told(record(ORDINARY), "/data/set/x", READ_ONLY) == (
        "/data is shared read-only",
        "--share /data:rw, if reality is meant",
    )
    assert told(record(ORDINARY), "/data/set/x", GONE) is None


@pytest.mark.parametrize("error", [GONE, CLOSED])
@pytest.mark.parametrize("path", ["/etc/sudoers", "/usr/../etc/sudoers"])
def test_what_is_hidden_is_told_however_it_is_spelt(path: str, error: str) -> None:
    assert told(record(ORDINARY), path, error) == ("/etc/sudoers is hidden", f"--share {path}")


@pytest.mark.parametrize("path", ["/boot/x", "/home/other/x", "/home/you/.bashrc", "/home/you/.cargo/credentials", "/var/log/x"])
@pytest.mark.parametrize("error", [GONE, CLOSED])
def test_what_the_project_view_leaves_out_is_told_whether_or_not_it_is_there(path: str, error: str) -> None:
    rule = told(record(NARROW, "project", "overlay-idmap"), path, error)
    assert rule is not None
    assert rule[0] == "the project view shows the system, toolchains and the project only"
    assert rule[1] == f"if it is there in reality: --share {path}, or --view machine"


@pytest.mark.parametrize(
    "path",
    ["/usr/x", "/home/you/project/x", "/home/you/.cargo/bin/x", "/var/lib/dpkg/x", "/var/run/x", "/tmp/x"],
)
def test_what_the_project_view_shows_is_simply_missing(path: str) -> None:
    assert told(record(NARROW, "project", "overlay-idmap"), path, GONE) is None


def test_the_last_rung_has_no_plan_and_works_in_what_is_hidden() -> None:
    one = record([], mechanism="copy-landlock", hidden=["/srv/state"])
    assert told(one, "/srv/state/sandboxes/ew-a/copy/x", GONE) is None
    assert told(one, "/srv/state/sandboxes/ew-b/copy/x", CLOSED) == (
        "/srv/state is hidden",
        "--share /srv/state/sandboxes/ew-b/copy/x",
    )
    assert told(one, "/usr/x", CLOSED) is None


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("example.test/0", "--allow example.test (for the web; else --allow example.test:PORT)"),
        ("intranet/0", "--allow intranet:PORT"),
        ("example.test/22", "--allow example.test:22"),
        ("example.test/443", "--allow example.test"),
    ],
)
def test_a_name_that_was_refused_before_its_port_was_known_may_have_any(what: str, how: str) -> None:
    (denial,) = of_command(record([]), [Denied("network", what, 1)])
    assert (denial["rule"], denial["how_to_allow"]) == ("nothing allows it", how)


@pytest.mark.parametrize(
    ("which", "rule", "how"),
    [
        ("https_proxy/socks5://[::1]:1080", "https_proxy has socks5://[::1]:1080, which is spoken to by socks5", "https_proxy="),
        ("http_proxy/proxy.test:*", "http_proxy has proxy.test:*, which is no proxy that can be understood", "http_proxy="),
        ("", "which proxy of the host it is to use cannot be read", "start it again"),
    ],
)
def test_a_proxy_of_the_host_that_cannot_be_used_is_told_and_not_to_try_again(which: str, rule: str, how: str) -> None:
    (found,) = parse_denied([f"network:pypi.org/443/unusable/{which}:2"])
    (denial,) = of_command(record([]), [found])
    assert (denial["what"], denial["count"]) == ("pypi.org:443", 2)
    assert rule in denial["rule"]
    assert how in denial["how_to_allow"]
