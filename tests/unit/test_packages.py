"""Changes outside a project, by the package that they belong to; and patterns that choose among paths."""

from pathlib import Path

import pytest

from elsewhere.changes.compare import compare_trees
from elsewhere.changes.globs import matcher
from elsewhere.changes.model import Changes
from elsewhere.changes.packages import PackageChange, Summary, configuration, summarise
from elsewhere.errors import UsageError


def grow(top: Path, tree: dict[str, str]) -> str:
    top.mkdir(exist_ok=True)
    for name, text in tree.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return str(top)


def compared(place: Path, before: dict[str, str], after: dict[str, str]) -> Changes:
    return compare_trees(grow(place / "after", after), grow(place / "before", before), "/")


def summary(place: Path, before: dict[str, str], after: dict[str, str]) -> Summary:
    return summarise(compared(place, before, after))


def status(**versions: str) -> str:
    return "\n".join(
        f"Package: {name}\nStatus: install ok installed\nVersion: {version}\nDescription: text\n more: text\n"
        for name, version in versions.items()
    )


def test_packages_of_dpkg(place: Path) -> None:
    before = {
        "var/lib/dpkg/status": status(same="1", old="1", gone="3"),
        "var/lib/dpkg/info/old.list": "/.\n/usr/bin/old\n",
        "var/lib/dpkg/info/gone.list": "/usr/share/gone\n",
        "usr/bin/old": "1",
        "usr/share/gone": "1",
    }
    after = {
        "var/lib/dpkg/status": status(same="1", old="2", new="7"),
        "var/lib/dpkg/info/old.list": "/.\n/usr/bin/old\n/etc/old.conf\n",
        "var/lib/dpkg/info/new:amd64.list": "/bin/new\n/usr/share/doc/new\n",
        "var/lib/dpkg/info/new:amd64.md5sums": "x",
        "var/log/dpkg.log": "x",
        "var/cache/apt/pkgcache.bin": "x",
        "usr/bin/old": "2",
        "usr/bin/new": "1",
        "usr/share/doc/new": "1",
        "etc/old.conf": "1",
        "etc/mine.conf": "1",
        "opt/mine": "1",
    }
    found = summary(place, before, after)
    assert found.packages == [
        PackageChange("dpkg", "gone", "3", None, 2),
        PackageChange("dpkg", "new", None, "7", 4),
        PackageChange("dpkg", "old", "1", "2", 3),
    ]
    assert [one.what for one in found.packages] == ["removed", "installed", "replaced"]
    assert found.managed == {"dpkg": 3}
    assert found.rest.added == ["/etc/mine.conf", "/opt/mine"]
    assert not found.rest.modified
    assert configuration(compared(place, before, after)) == ["/etc/mine.conf", "/etc/old.conf"]


def test_packages_of_pip(place: Path) -> None:
    lib = "usr/lib/python3/site-packages"
    before = {f"{lib}/foo-1.0.dist-info/RECORD": "foo/a.py,,\nfoo-1.0.dist-info/RECORD,,\n", f"{lib}/foo/a.py": "1"}
    record = 'foo/a.py,,\n"foo/odd, name.py",,\nfoo-2.0.dist-info/RECORD,,\n../../../bin/foo,,\n'
    after = {f"{lib}/foo-2.0.dist-info/RECORD": record, f"{lib}/foo/a.py": "2", f"{lib}/foo/odd, name.py": "", "usr/bin/foo": "1"}
    found = summary(place, before, after | {f"{lib}/foo/by-hand.py": "1"})
    assert found.packages == [PackageChange("pip", "foo", "1.0", "2.0", 5)]
    assert found.rest.added == [f"/{lib}/foo/by-hand.py"]


def test_packages_of_npm(place: Path) -> None:
    modules = "usr/lib/node_modules"
    after = {
        f"{modules}/left/package.json": '{"version": "3.0.0"}',
        f"{modules}/left/node_modules/inner/package.json": '{"version": "1.0.0"}',
        f"{modules}/@scope/tool/package.json": '{"version": "2.0.0"}',
        f"{modules}/@scope/tool/x.js": "",
        f"{modules}/.package-lock.json": "{}",
    }
    found = summary(place, {}, after)
    assert found.packages == [
        PackageChange("npm", "@scope/tool", None, "2.0.0", 2),
        PackageChange("npm", "left", None, "3.0.0", 2),
    ]
    assert found.managed == {"npm": 1}
    assert not found.rest


def test_packages_of_cargo(place: Path) -> None:
    after = {
        "root/.cargo/registry/src/index/serde-1.0.1/src/lib.rs": "",
        "root/.cargo/registry/cache/index/serde-1.0.1.crate": "",
        "root/.cargo/registry/index/x": "",
        "root/.cargo/.crates.toml": '[v1]\n"ripgrep 13.0.0 (registry+https://example.org)" = ["rg"]\n',
        "root/.cargo/bin/rg": "",
        "root/.cargo/bin/other": "",
    }
    found = summary(place, {}, after)
    assert found.packages == [
        PackageChange("cargo", "ripgrep", None, "13.0.0", 1),
        PackageChange("cargo", "serde", None, "1.0.1", 2),
    ]
    assert found.managed == {"cargo": 2}
    assert found.rest.added == ["/root/.cargo/bin/other"]


@pytest.mark.parametrize(
    "text", ["", "\0\xff", "[" * 100_000, '{"version": 5}', '"' * 1001, "Package: x\n" * 5, "../" * 5000 + "etc/passwd"]
)
def test_nonsense_is_no_package_and_hides_nothing_but_itself(place: Path, text: str) -> None:
    names = [
        "var/lib/dpkg/status", "var/lib/dpkg/info/x.list", "usr/lib/x-1.dist-info/RECORD", "usr/node_modules/x/package.json",
        "root/.cargo/.crates.toml",
    ]  # fmt: skip
    after = {**dict.fromkeys(names, text), "usr/bin/x": "1", "etc/passwd": "1"}
    found = summary(place, {}, after)
    assert {"/usr/bin/x"} <= set(found.rest.added)
    assert sum(one.files for one in found.packages) + sum(found.managed.values()) + len(found.rest.added) == len(after)


def test_nobody_can_have_a_file_that_was_there_counted_as_part_of_something_new(place: Path) -> None:
    before = {"usr/bin/ls": "1", "usr/bin/rm": "1", "usr/lib/foo-1.dist-info/RECORD": "foo-1.dist-info/RECORD,,\n"}
    record = "../bin/ls,,\n../bin/rm,,\n../bin/new,,\nfoo-2.dist-info/RECORD,,\n"
    found = summary(place, before, {"usr/bin/ls": "2", "usr/bin/new": "1", "usr/lib/foo-2.dist-info/RECORD": record})
    assert found.packages == [PackageChange("pip", "foo", "1", "2", 3)]
    assert (found.rest.modified, found.rest.deleted, found.rest.added) == (["/usr/bin/ls"], ["/usr/bin/rm"], [])


def test_a_list_that_is_a_link_is_not_read(place: Path) -> None:
    after = place / "after"
    grow(after, {"usr/bin/x": "1", "list": "/usr/bin/x\n", "var/lib/dpkg/status": status(x="1"), "var/lib/dpkg/info/y": ""})
    (after / "var/lib/dpkg/info/x.list").symlink_to(after / "list")
    found = summarise(compare_trees(str(after), grow(place / "before", {}), "/"))
    assert "/usr/bin/x" in found.rest.added


# -- patterns -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "fits", "others"),
    [
        ("*.py", ["/p/a.py", "/p/d/a.py", "/p/x.py/below"], ["/p/a.pyc", "/a.py"]),
        ("src", ["/p/src", "/p/src/", "/p/src/a", "/p/d/src/a"], ["/p/srcs", "/p/a"]),
        ("src/", ["/p/src/a"], ["/p/srcs"]),
        ("src/*.py", ["/p/src/a.py"], ["/p/src/d/a.py", "/p/d/src/a.py"]),
        ("src/**/*.py", ["/p/src/a.py", "/p/src/d/e/a.py"], ["/p/a.py"]),
        ("**", ["/p/a", "/p/d/b"], ["/etc/a"]),
        (".", ["/p/a", "/p/d/b"], ["/etc/a"]),
        ("/etc/*.conf", ["/etc/a.conf"], ["/etc/d/a.conf", "/p/etc/a.conf"]),
        ("/etc", ["/etc/a", "/etc/d/b"], ["/etcetera"]),
        ("[ab]?", ["/p/ax", "/p/b1"], ["/p/cx", "/p/a"]),
        ("[!ab]x", ["/p/cx"], ["/p/ax"]),
        ("a+b(c", ["/p/a+b(c"], ["/p/aab"]),
        ("new\nline", ["/p/new\nline"], ["/p/new"]),
        ("[", ["/p/["], ["/p/x"]),
    ],
)
def test_patterns(pattern: str, fits: list[str], others: list[str]) -> None:
    found = matcher([pattern], "/p")
    assert [path for path in [*fits, *others] if found(path)] == fits


def test_without_patterns_everything_fits_and_with_several_any_of_them() -> None:
    assert matcher([], "/p")("/anything")
    several = matcher(["a", "/b"], "/p")
    assert [path for path in ("/p/a", "/b", "/p/c") if several(path)] == ["/p/a", "/b"]


def test_a_pattern_that_makes_no_sense_is_an_error_that_names_it() -> None:
    with pytest.raises(UsageError, match="z-a"):
        matcher(["[z-a]"], "/p")
