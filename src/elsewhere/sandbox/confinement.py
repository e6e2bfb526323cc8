"""Confinement: what a sandbox may see and do, as data that goes into its plan, its record and the stock's wishes.

    view        machine   everything but what is hidden
                project   system directories, toolchains, the project; a private, empty home; nothing else of the machine
    network     host      the host's
                none      only its own loopback
    nested      programs inside may make user namespaces of their own
    hide        places to hide besides the built-in ones
    shares      places of reality that are shown as they are, read-only unless `writable`: then what is written there is written
                in reality
    devices     nodes of the host's /dev
    toolchains  directories that the project view shows read-only besides the system's: what the caller's PATH names

All paths are absolute and resolved. Not here: where they come from and who may ask for them (`operations/confining.py`), and what
becomes of them (`view.py`, `launching/`).
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["Confinement", "Share"]


@dataclass(frozen=True, slots=True)
class Share:
    path: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Confinement:
    view: str = "machine"
    network: str = "host"
    nested: bool = False
    hide: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()
    devices: tuple[str, ...] = ()
    toolchains: tuple[str, ...] = ()

    def packed(self) -> dict[str, Any]:
        """Plain values, fit for the wire and for a record."""
        return {
            "view": self.view,
            "network": self.network,
            "nested": self.nested,
            "hide": list(self.hide),
            "shares": [[share.path, share.writable] for share in self.shares],
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
            devices=tuple(values.get("devices", ())),
            toolchains=tuple(values.get("toolchains", ())),
        )
