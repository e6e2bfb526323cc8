"""What the machine's own settings name: hosts and ports of registries, never a token, never a proxy."""

import os
from pathlib import Path

import pytest

from elsewhere.errors import UsageError
from elsewhere.network import upstream
from elsewhere.network.machine import named_by_machine
from elsewhere.network.upstream import Server, Upstream

FILES = {
    "etc/pip.conf": "[global]\nindex-url = https://user:hunter2@pypi.corp.test/simple\nextra-index-url =\n    http://one.corp.test:8080/\n"
    "    http://two.corp.test/\nproxy = http://proxy.corp.test:3128\ntrusted-host = never.corp.test\n",
    "home/.config/uv/uv.toml": '[[index]]\nurl = "https://uv.corp.test/simple"\n',
    "home/.npmrc": "registry=https://npm.corp.test/\n@team:registry=https://team.corp.test:4873/\n"
    "//npm.corp.test/:_authToken=hunter2\n//never.corp.test/:_authToken=hunter2\nproxy=http://proxy.corp.test:3128/\n# registry=https://comment.test\n",
    "home/.yarnrc.yml": 'npmRegistryServer: "https://yarn.corp.test"\n',
    "etc/apt/sources.list": "deb [signed-by=/usr/share/x.gpg] http://mirror.corp.test/debian bookworm main\n# deb http://comment.test/ x\n"
    "deb cdrom:[Debian]/ bookworm main\ndeb mirror+http://list.corp.test/x bookworm main\ndeb file:///srv/packages ./\n",
    "etc/apt/sources.list.d/a.sources": "Types: deb\nURIs: https://deb822.corp.test/debian\n http://second.corp.test:3142/debian\nSuites: stable\n",
    "etc/apt/apt.conf.d/proxy": 'Acquire::http::Proxy "http://proxy.corp.test:3128";\n',
    "home/.cargo/config.toml": '[source.mirror]\nregistry = "sparse+https://cargo.corp.test/index/"\n[registries.own]\nindex = "ssh://git@git.corp.test:2222/index"\n',
    "home/.config/go/env": "GOPROXY=https://go.corp.test|direct\nGOFLAGS=-x\n",
    "home/.gitconfig": '[user]\n\tname = x\n[url "https://token:hunter2@gitmirror.corp.test/"]\n\tinsteadOf = https://github.com/\n'
    '[url "git@ssh.corp.test:team/"]\n\tinsteadOf = corp:\n[http]\n\tproxy = http://proxy.corp.test:3128\n',
}
NAMED = {
    "pypi.corp.test:443", "one.corp.test:8080", "two.corp.test:80", "uv.corp.test:443", "npm.corp.test:443", "team.corp.test:4873",
    "yarn.corp.test:443", "mirror.corp.test:80", "list.corp.test:80", "deb822.corp.test:443", "second.corp.test:3142",
    "cargo.corp.test:443", "git.corp.test:2222", "go.corp.test:443", "gitmirror.corp.test:443", "ssh.corp.test:22",
}  # fmt: skip


def lay_out(place: Path, files: dict[str, str | bytes]) -> tuple[str, str]:
    for name, content in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(place / "home"), str(place)


def test_every_registry_is_found_and_nothing_else(place: Path) -> None:
    home, root = lay_out(place, dict(FILES))
    found = named_by_machine(home, {}, root)
    assert {str(rule) for rule in found} == NAMED
    assert {rule.named for rule in found} == {"private"}
    assert "hunter2" not in repr(found)
    assert {str(rule): rule.why for rule in found}["npm.corp.test:443"] == "~/.npmrc"
    assert {str(rule): rule.why for rule in named_by_machine(home, {}, f"{root}/")}[
        "mirror.corp.test:80"
    ] == f"{root}/etc/apt/sources.list"


def test_variables_count_too(place: Path) -> None:
    environ = {
        "PIP_INDEX_URL": "https://a.test/simple",
        "PIP_EXTRA_INDEX_URL": "http://b.test:8080 https://c.test",
        "npm_config_registry": "http://127.0.0.1:4873/",
        "GOPROXY": "https://d.test,https://e.test|direct",
        "CARGO_REGISTRIES_OWN_INDEX": "sparse+https://f.test/",
        "HTTP_PROXY": "http://never.test:3128",
        "HOME": "https://never.test/",
    }
    home, root = lay_out(place, {})
    found = {str(rule) for rule in named_by_machine(home, environ, root)}
    public = named_by_machine(home, {"PIP_INDEX_URL": "https://pypi.example.org/", "UV_INDEX": "http://127.0.0.1:1/"}, root)
    assert [(str(rule), rule.named) for rule in public] == [("pypi.example.org:443", "machine"), ("127.0.0.1:1", "address")]
    assert found == {"a.test:443", "b.test:8080", "c.test:443", "127.0.0.1:4873", "d.test:443", "e.test:443", "f.test:443"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe" * 1000,
        b"registry=https://\nindex-url = https://[::1\nGOPROXY=https://:99999/\n",
        b"registry=http://*/\nregistry=http://com/\n@a:registry=http://x:0/\nregistry=http://a:b:c/\n",
        b"[" * 100_000,
        b"a = [" * 5000,
        b"registry=" + b"https://a.test/" * 30_000,
    ],
    ids=["empty", "bytes", "urls", "wide", "brackets", "deep", "long"],
)
def test_nonsense_is_passed_over(place: Path, content: bytes) -> None:
    home, root = lay_out(place, {**dict.fromkeys(FILES, content), "etc/npmrc": b"registry=https://good.test/\n"})
    assert {str(rule) for rule in named_by_machine(home, {"GOPROXY": "\ud800https://[/"}, root)} <= {
        "good.test:443",
        "a.test:443",
    }


def test_what_is_no_small_regular_file_is_not_read(place: Path) -> None:
    home, root = lay_out(place, {"home/.config/x": b""})
    os.mkfifo(place / "home" / ".npmrc")
    (place / "home" / ".gitconfig").symlink_to("/dev/zero")
    (place / "etc").mkdir()
    (place / "etc" / "pip.conf").mkdir()
    assert named_by_machine(home, {"PIP_CONFIG_FILE": "relative", "CARGO_HOME": "/dev/null"}, root) == ()


def test_only_so_many_are_taken(place: Path) -> None:
    lines = "".join(f"@s{number}:registry=https://r{number}.test/\n" for number in range(1000))
    home, root = lay_out(place, {"home/.npmrc": lines})
    assert len(named_by_machine(home, {}, root)) == 200


# -- the host's own proxy -------------------------------------------------------------------------------------------------------


def test_the_hosts_proxy_is_read_from_its_environment() -> None:
    found = upstream.from_environment(
        {
            "http_proxy": "http://us%40er:p%3Ass@proxy.corp.test:3128/",
            "HTTPS_PROXY": "other.corp.test:8080",
            "no_proxy": "a.test, .b.test",
        }
    )
    assert found is not None
    assert found.plain == Server("proxy.corp.test", 3128, "Basic dXNAZXI6cDpzcw==")
    assert found.tunnel == Server("other.corp.test", 8080)
    assert "dXNA" not in repr(found)
    assert upstream.from_environment({}) is None
    assert upstream.from_environment({"no_proxy": "*"}) is None
    both = upstream.from_environment({"ALL_PROXY": "http://[::1]:3128"})
    assert both == Upstream(Server("::1", 3128), Server("::1", 3128))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("socks5://user:hunter2@proxy.test:1080", "socks5://proxy.test:1080"),
        ("socks5://user:hunter2@[::1]:1080", "socks5://[::1]:1080"),
        ("https://user:hunter2@proxy.test/", "https://proxy.test"),
        ("http://user:hunter2@:x", "http://:*"),
        ("http://us[er:hun/ter2@hunter2@proxy.test:80", "http://proxy.test:80"),
        ("http://user:hunter2", "http://user:*"),
        ("proxy.test:80:user:hunter2", "proxy.test:*"),
        ("user:hunter2://proxy.test", "*://proxy.test"),
        ("http://a b", "http://a*b"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_an_error_without_its_password(value: str, shown: str) -> None:
    with pytest.raises(UsageError) as caught:
        upstream.from_environment({"https_proxy": value})
    assert caught.value.code == "bad_proxy"
    assert f"https_proxy has {shown}, which is " in caught.value.message
    assert "hunter2" not in str(caught.value.document())


@pytest.mark.parametrize(
    ("entry", "host", "port", "direct"),
    [
        ("*", "a.test", 80, True),
        ("a.test", "a.test", 80, True),
        ("a.test", "www.a.test", 80, True),
        (".a.test", "www.a.test", 80, True),
        ("*.a.test", "www.a.test", 80, True),
        ("a.test", "ba.test", 80, False),
        ("a.test:8080", "a.test", 8080, True),
        ("a.test:8080", "a.test", 80, False),
        ("10.0.0.0/8", "10.1.2.3", 80, True),
        ("10.0.0.0/8", "11.1.2.3", 80, False),
        ("10.0.0.0/8", "a.test", 80, False),
        ("::1", "::1", 80, True),
        ("[::1]:80", "::1", 80, True),
        ("nonsense/99", "10.0.0.1", 80, False),
        ("a b", "a", 80, False),
    ],
)
def test_what_is_reached_without_it(entry: str, host: str, port: int, direct: bool) -> None:
    server = Server("proxy.test", 3128)
    assert (Upstream(server, server, (entry,)).server(host, port, tunnel=True) is None) is direct
