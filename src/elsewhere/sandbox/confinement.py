"""Confinement: what a sandbox may see and do, as data that goes into its plan, its record and the stock's wishes.

    view        machine   everything but what is hidden
                project   system directories, toolchains, the project; a private, empty home; nothing else of the machine
    network     none      only its own loopback
                allow     its own, with ways out for what the rules of its record name (`networking/`)
                host      the host's
    nested      programs inside may make user namespaces of their own
    hide        places to hide besides the built-in ones
    shares      places of reality that are shown as they are, read-only unless `writable`: then what is written there is written
                in reality
    copies      places of reality that are shown, hidden or not, and may be written: the sandbox has a copy of its own, which
                is no part of what it changed
    links       where such a place is looked for, if that is a link, and where the link leads
    variables   names of variables that every command gets from its caller
    profiles    the profiles that some of all this comes from
    devices     nodes of the host's /dev
    toolchains  directories that the project view shows read-only besides the system's: what the caller's PATH names

All paths are absolute and resolved. Not here: where they come from and who may ask for them (`operations/confining.py`), and what
becomes of them (`view.py`, `launching/`).
"""

from typing import Any

from elsewhere.values import dataclass

__all__ = ["Confinement", "Share"]


@dataclass(frozen=True, slots=True)
class Share:
    path: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Confinement:
    view: str = "machine"
    network: str = "allow"
    nested: bool = False
    hide: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()
    copies: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    variables: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    toolchains: tuple[str, ...] = ()

    @property
    def writable(self) -> tuple[str, ...]:
        """The places of reality in which it may write."""
        return tuple(share.path for share in self.shares if share.writable)

    def packed(self) -> dict[str, Any]:
        """Plain values, fit for the wire and for a record."""
        return {
            "view": self.view,
            "network": self.network,
            "nested": self.nested,
            "hide": list(self.hide),
            "shares": [[share.path, share.writable] for share in self.shares],
            "copies": list(self.copies),
            "links": [list(link) for link in self.links],
            "variables": list(self.variables),
            "profiles": list(self.profiles),
            "devices": list(self.devices),
            "toolchains": list(self.toolchains),
        }

    @staticmethod
    def unpacked(values: dict[str, Any]) -> "Confinement":
        return Confinement(
            view=values.get("view", "machine"),
            network=values.get("network", "host"),
            nested=values.get("nested", False),
            hide=tuple(values.get("hide", ())),
            shares=tuple(Share(path, writable) for path, writable in values.get("shares", ())),
            copies=tuple(values.get("copies", ())),
            links=tuple((link, to) for link, to in values.get("links", ())),
            variables=tuple(values.get("variables", ())),
            profiles=tuple(values.get("profiles", ())),
            devices=tuple(values.get("devices", ())),
            toolchains=tuple(values.get("toolchains", ())),
        )
