"""Changes outside a project by the package that they belong to, where a package manager made them.

    dpkg    /var/lib/dpkg/status says which, /var/lib/dpkg/info/NAME.list which files
    pip     NAME-VERSION.dist-info/RECORD says which files
    npm     node_modules/NAME/ and all that lies in it; package.json says the version
    cargo   .cargo/registry: what was fetched; .cargo/.crates.toml: what was installed

What managers write down is read from the changes themselves, and may come from somebody hostile: it is read up to a size, it
never leads anywhere, and it only groups paths that are changes anyway. A file that was there before belongs to a package only if
that was written down before: nobody can have it counted as part of something new. Not here: what changed (`compare.py`).
"""

import io
import json
import re
import tomllib
from collections.abc import Iterator

from elsewhere.changes.model import Change, Changes, Side
from elsewhere.values import dataclass

__all__ = ["PackageChange", "Summary", "configuration", "summarise"]

_LARGEST = 32 << 20  # of a file that a manager wrote
_STATUS = "/var/lib/dpkg/status"
_LIST = re.compile(r"/var/lib/dpkg/info/([a-z0-9][a-z0-9+.-]*)(?::[a-z0-9-]+)?\.list")
_DPKG_FILES = re.compile(r"/var/lib/dpkg/info/([a-z0-9][a-z0-9+.-]*)(?::[a-z0-9-]+)?\.[a-z0-9-]+")
_RECORD = re.compile(r"(.*)/([A-Za-z0-9._]+)-([^/-]+)\.dist-info/RECORD")
_NPM = re.compile(r"(.*?/node_modules/((?:@[^/]+/)?[^/@.][^/]*))/.*")
_CRATE = re.compile(r".*/\.cargo/registry/(?:src|cache)/[^/]+/([A-Za-z0-9_-]+?)-(\d[^/]*?)(?:\.crate|/.*)")
_CRATES = re.compile(r"(.*/\.cargo)/\.crates\.toml")
_INSTALLED_CRATE = re.compile(r"(\S+) (\S+) \(.*\)")
# What managers keep for themselves: bookkeeping, what they fetched, logs.
_OWN = (
    ("dpkg", re.compile(r"/var/(?:lib/(?:dpkg|apt)|cache/(?:apt|debconf)|log/(?:apt|dpkg\.log.*|alternatives\.log.*))(?:/.*)?")),
    ("pip", re.compile(r".*/\.cache/pip/.*")),
    ("npm", re.compile(r".*/(?:\.npm|node_modules/\.(?:bin|cache))/.*|.*/node_modules/\.package-lock\.json")),
    ("cargo", re.compile(r".*/\.cargo/(?:registry/.*|\.crates2?\.(?:toml|json)|\.package-cache.*|\.global-cache.*)")),
)
# On a system whose /bin is /usr/bin, a manager may still say /bin.
_MERGED = re.compile(r"/(?:bin|sbin|lib|lib32|lib64|libx32)/")


_Owners = dict[tuple[bool, str], tuple[str, str]]  # by whether it was said now or before, and the path


@dataclass(slots=True)
class PackageChange:
    """`before` and `after` are versions; None: it was not there, or is not any more. `files` counts what changed with it."""

    manager: str
    name: str
    before: str | None = None
    after: str | None = None
    files: int = 0

    @property
    def what(self) -> str:
        if self.before is None:
            return "installed" if self.after is not None else "changed"
        if self.after is None:
            return "removed"
        return "changed" if self.before == self.after else "replaced"


@dataclass(slots=True)
class Summary:
    """`managed` counts what managers wrote for themselves, by manager; `rest` is what no manager accounts for."""

    packages: list[PackageChange]
    managed: dict[str, int]
    rest: Changes


def summarise(found: Changes) -> Summary:
    packages: dict[tuple[str, str], PackageChange] = {}
    owners: _Owners = {}
    for finder in (_dpkg, _pip, _cargo):
        finder(found, packages, owners)
    _npm(found, packages)
    managed: dict[str, int] = {}
    rest = set()
    for one in found.entries:
        owner = owners.get((one.before is None or one.source is not None, _merged(one.path))) or _owner_by_place(one.path)
        manager = next((name for name, places in _OWN if places.fullmatch(one.path)), None)
        if owner is not None and owner in packages:
            packages[owner].files += 1
        elif manager is not None and any(key[0] == manager for key in packages):
            managed[manager] = managed.get(manager, 0) + 1
        else:
            rest.add(one.path)
    kept = found.where(lambda path: path in rest) if len(rest) < len(found.entries) else found
    return Summary([packages[key] for key in sorted(packages)], managed, kept)


def configuration(found: Changes) -> list[str]:
    """The files of /etc that changed, whoever changed them."""
    return sorted(one.path for one in found.entries if one.path.startswith("/etc/"))


def _package(packages: dict[tuple[str, str], PackageChange], manager: str, name: str) -> PackageChange:
    return packages.setdefault((manager, name), PackageChange(manager, name))


def _merged(path: str) -> str:
    return f"/usr{path}" if _MERGED.match(path) else path


def _text(side: Side | None) -> str:
    """What a manager wrote; nothing, if it is not there, is no file, or too large to have been written by one."""
    if side is None or side.type != "file" or side.size > _LARGEST:
        return ""
    try:
        with side.open() as stream:
            return stream.read(_LARGEST).decode("utf-8", "surrogateescape")
    except OSError:
        return ""


def _sides(one: Change) -> Iterator[tuple[bool, Side]]:
    """Whether it is what is there now, and what it is."""
    if one.before is not None:
        yield False, one.before
    if one.after is not None:
        yield True, one.after


# -- dpkg -----------------------------------------------------------------------------------------------------------------------


def _dpkg(found: Changes, packages: dict[tuple[str, str], PackageChange], owners: _Owners) -> None:
    status = next((one for one in found.entries if one.path == _STATUS), None)
    if status is None:
        return
    before, after = _installed(_text(status.before)), _installed(_text(status.after))
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            package = _package(packages, "dpkg", name)
            package.before, package.after = before.get(name), after.get(name)
    for one in found.entries:
        match = _LIST.fullmatch(one.path)
        if match is not None and ("dpkg", match[1]) in packages:
            for now, side in _sides(one):
                owners.update(((now, _merged(path)), ("dpkg", match[1])) for path in _text(side).splitlines())
        own = _DPKG_FILES.fullmatch(one.path)
        if own is not None and ("dpkg", own[1]) in packages:
            owners.update(((now, one.path), ("dpkg", own[1])) for now, _ in _sides(one))


def _installed(status: str) -> dict[str, str]:
    found = {}
    for paragraph in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and not line.startswith(" "))
        if fields.get("Status", "").endswith(" installed") and "Package" in fields:
            found[fields["Package"]] = fields.get("Version", "")
    return found


# -- pip ------------------------------------------------------------------------------------------------------------------------


def _pip(found: Changes, packages: dict[tuple[str, str], PackageChange], owners: _Owners) -> None:
    for one in found.entries:
        match = _RECORD.fullmatch(one.path)
        if match is None:
            continue
        package = _package(packages, "pip", match[2])
        for now, side in _sides(one):
            if now:
                package.after = match[3]
            else:
                package.before = match[3]
            owners.update(((now, path), ("pip", match[2])) for path in _recorded(match[1], _text(side)))


def _recorded(place: str, record: str) -> Iterator[str]:
    import csv  # every launcher would pay for it

    try:
        rows = [row[0] for row in csv.reader(io.StringIO(record)) if row and row[0]]
    except csv.Error:
        return
    for name in rows:
        parts = place.split("/")
        for part in name.split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part != ".":
                parts = [*parts, part]
        yield "/".join(parts)


# -- npm, cargo -----------------------------------------------------------------------------------------------------------------


def _owner_by_place(path: str) -> tuple[str, str] | None:
    """What lies in a directory of its own belongs to the package that the directory is named after."""
    match = _NPM.fullmatch(path)
    if match is not None:
        return "npm", match[2]
    match = _CRATE.fullmatch(path)
    return None if match is None else ("cargo", match[1])


def _npm(found: Changes, packages: dict[tuple[str, str], PackageChange]) -> None:
    for one in found.entries:
        match = _NPM.fullmatch(one.path)
        if match is None or one.path != f"{match[1]}/package.json":
            continue
        package = _package(packages, "npm", match[2])
        for now, side in _sides(one):
            version = _version(_text(side))
            if now:
                package.after = version
            else:
                package.before = version


def _version(text: str) -> str:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    version = said.get("version") if isinstance(said, dict) else None
    return version if isinstance(version, str) else ""


def _cargo(found: Changes, packages: dict[tuple[str, str], PackageChange], owners: _Owners) -> None:
    for one in found.entries:
        fetched = _CRATE.fullmatch(one.path)
        if fetched is not None:
            package = _package(packages, "cargo", fetched[1])
            for now, _ in _sides(one):
                if now:
                    package.after = fetched[2]
                else:
                    package.before = fetched[2]
        listed = _CRATES.fullmatch(one.path)
        if listed is not None:
            for now, side in _sides(one):
                for name, version, programs in _crates(_text(side)):
                    package = _package(packages, "cargo", name)
                    if now:
                        package.after = version
                    else:
                        package.before = version
                    owners.update(((now, f"{listed[1]}/bin/{program}"), ("cargo", name)) for program in programs)


def _crates(text: str) -> Iterator[tuple[str, str, list[str]]]:
    try:
        said = tomllib.loads(text).get("v1")
    except (ValueError, RecursionError):
        return
    for key, programs in said.items() if isinstance(said, dict) else ():
        match = _INSTALLED_CRATE.fullmatch(key)
        if match is not None and isinstance(programs, list):
            yield match[1], match[2], [program for program in programs if isinstance(program, str)]
