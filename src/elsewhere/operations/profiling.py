"""What profiles add to a confinement: their places as they are found now, their rules, the names of their variables.

What a profile names and nobody has here is left out: the program was not used yet, or keeps its login in another way. Not here:
what a profile says (`profiles/`), and what becomes of a share or a copy (`sandbox/view.py`).
"""

import os
import stat
from collections.abc import Iterable, Mapping

from elsewhere.errors import Refused
from elsewhere.meeting import home_directory
from elsewhere.paths import is_within
from elsewhere.sandbox.confinement import Confinement, Share
from elsewhere.storage.state import State
from elsewhere.values import dataclass

__all__ = ["Needs", "needs", "unreached"]

_NOBODYS = ("/proc", "/sys", "/dev")
_TOPS = ("/", "/home", "/root")


@dataclass(frozen=True, slots=True)
class Needs:
    """As a confinement has them; `allow` are rules, `programs` directories that the project view has to show."""

    allow: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()
    copies: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    variables: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    def shares_besides(self, asked: Iterable[Share]) -> tuple[Share, ...]:
        """What somebody asked for by itself holds, also about the same place."""
        asked = tuple(asked)
        known = {share.path for share in asked}
        return (*asked, *(share for share in self.shares if share.path not in known))


def needs(names: Iterable[str], state: State, environment: Mapping[str, str]) -> Needs:
    """Of all these profiles together."""
    names = tuple(names)
    if not names:
        return Needs()  # nothing has to be loaded for that
    from elsewhere import profiles

    found = [profiles.load(name, environment) for name in dict.fromkeys(names)]
    states = [(path, place) for one in found for path in one.state if (place := _place(one.name, path, state))]
    tokens = [place for one in found for path in one.token if (place := _place(one.name, path, state))]
    return Needs(
        allow=_once(rule for one in found for rule in one.allow),
        shares=tuple(Share(place) for place in _once(tokens)),
        copies=_once(place for _, place in states if place not in tokens),
        links=tuple((path, place) for path, place in states if path != place and os.path.islink(path)),
        variables=_once(name for one in found for name in one.variables),
        programs=_once(os.path.realpath(path) for one in found for path in one.program if os.path.isdir(path)),
    )


def unreached(confinement: Confinement) -> str:
    """Empty, or what its profiles name and it cannot reach."""
    if confinement.network != "none" or not confinement.profiles:
        return ""
    from elsewhere import profiles

    hosts = _once(rule for name in confinement.profiles for rule in profiles.load(name, os.environ).allow)
    return f"--network none: what --profile names cannot be reached ({', '.join(hosts)})" if hosts else ""


def _place(name: str, path: str, state: State) -> str | None:
    """Where it really lies; None if there is nothing that could be shown. What would show far more than a program's own things
    is refused."""
    place = os.path.realpath(path)
    try:
        kind = stat.S_IFMT(os.stat(place).st_mode)
    except OSError:
        return None
    home = os.path.realpath(home_directory())
    if is_within(home, place) or place in _TOPS or os.path.dirname(place) == "/home":
        raise _refused(name, path, "a whole home directory, or what contains one, is never shown by a profile")
    if is_within(place, state.path) or is_within(state.path, place):
        raise _refused(name, path, "elsewhere's own state lies there")
    if any(is_within(place, top) for top in _NOBODYS):
        raise _refused(name, path, "the kernel's own files lie there, and the sandbox has its own")
    return place if kind in (stat.S_IFREG, stat.S_IFDIR) else None


def _refused(name: str, path: str, reason: str) -> Refused:
    return Refused("profile_refused", f"the profile {name!r} names {path!r}: {reason}", hint="name what the program needs of it")


def _once(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found))
