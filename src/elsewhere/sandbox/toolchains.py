"""Toolchains: which directories have to be shown for the programs that the caller's PATH names, and no more than these.

    well known         the root of the installation, wherever in it the named directory lies (`~/.nvm/versions/node/v20/bin`)
    a directory bin    what lies around it, unless that is a home, a repository, or the top of something larger; of a Cargo home
                       and a Go workspace only what programs and builds need
    anything else      the directory itself
    a virtual environment   brings the interpreter that it was made from

Never `/`, a whole home, something around the project, or a hidden place. Not here: what the caller's PATH is.
"""

import contextlib
import os

from elsewhere.paths import is_within, outermost
from elsewhere.sandbox import hidden, outline
from elsewhere.sandbox.confinement import Confinement
from elsewhere.sandbox.project import Project

__all__ = ["places"]

# An installation below a home, and what of the same home has to be shown for it.
_WELL_KNOWN: dict[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in (
            ".nvm", ".pyenv", ".rbenv", ".rustup", ".bun", ".deno", ".volta", ".asdf", ".sdkman", "miniconda3", "anaconda3",
            ".local/lib", ".local/share/uv", ".local/share/pnpm",
        )
    },
    ".local/bin": (".local/bin", ".local/lib", ".local/share/uv", ".local/share/pipx"),
    ".cargo": (".cargo/bin", ".rustup"),  # beside them lie credentials
    "go": ("go/bin", "go/pkg"),  # go/src may hold anybody's sources
}  # fmt: skip
_LARGEST_CONFIGURATION = 1 << 16


def places(confinement: Confinement, home: str, state: str, project: Project) -> list[str]:
    """Existing directories to show, for those that the confinement names; what shows anyway is left out."""
    homes = tuple(dict.fromkeys((home, *hidden.homes())))
    closed = hidden.hidden_places(home, (project.path,), state, hide=confinement.hide)
    shown = [path for path in (project.path, project.git, *(share.path for share in confinement.shares)) if path]
    found: list[str] = []
    waiting = [(path, False) for path in confinement.toolchains]
    while waiting:
        path, only_well_known = waiting.pop(0)
        for place in _around(os.path.realpath(path), homes, only_well_known=only_well_known):
            if place in found or not _is_narrow(place, (*homes, *shown)) or not os.path.isdir(place):
                continue
            waiting += [(interpreter, is_within(place, project.path)) for interpreter in _made_from(place)]
            if not outline.is_anyway(place) and not any(is_within(place, other) for other in (*closed, *shown)):
                found.append(place)
    return outermost(found)


def _around(path: str, homes: tuple[str, ...], *, only_well_known: bool) -> list[str]:
    """What has to be shown for one directory."""
    for home in homes:
        for root, needed in _WELL_KNOWN.items():
            if is_within(path, os.path.join(home, root)):
                return [os.path.join(home, name) for name in needed]
    if only_well_known:
        return []  # a project says what it likes about its interpreter
    parent = os.path.dirname(path)
    whole = os.path.basename(path) == "bin" and _is_narrow(parent, homes) and not os.path.lexists(os.path.join(parent, ".git"))
    place = parent if whole else path
    return (_parts(place) if _is_narrow(place, homes) else []) or [place]


def _parts(place: str) -> list[str]:
    """What is needed of an installation that holds something else besides; empty if it is none of these."""

    def has(*names: str) -> bool:
        return any(os.path.lexists(os.path.join(place, name)) for name in names)

    is_cargo = has(".crates.toml", "credentials.toml", "credentials", "registry", "bin/cargo", "bin/rustup")
    if is_cargo and has("bin") and not has("lib"):  # with a lib it is Rust itself
        return [os.path.join(place, name) for name in ("bin", "registry", "git")]
    if (has("pkg/mod", "pkg/sumdb") or (has("pkg") and has("src"))) and not has("VERSION"):  # with a version it is Go itself
        return [os.path.join(place, name) for name in ("bin", "pkg")]
    return []


def _is_narrow(place: str, kept: tuple[str, ...]) -> bool:
    """Neither the top of something larger nor around what is not to be shown as a whole."""
    return place.count("/") > 1 and not any(is_within(other, place) for other in kept)


def _made_from(place: str) -> list[str]:
    """Where the interpreter of a virtual environment lies."""
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(os.path.join(place, "pyvenv.cfg"), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, encoding="utf-8", errors="surrogateescape") as stream:
            for line in stream.read(_LARGEST_CONFIGURATION).split("\n"):
                name, _, value = line.partition("=")
                if name.strip() == "home" and value.strip().startswith("/") and "\0" not in value:
                    return [value.strip()]
    return []
