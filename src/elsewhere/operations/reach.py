"""What a sandbox may reach, as it is asked for: checked, and in the form in which its record has it.

    {"allow": ["example.org:8443"], "deny": [], "presets": ["packages"], "forward": ["5432"], "publish": ["8080:80"]}

Not here: what the rules mean (`network/rules.py`), and who holds a sandbox to them (`sandbox/networking/`).
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from elsewhere.errors import Refused, UsageError
from elsewhere.meeting import default_state
from elsewhere.operations.settings import Resolved
from elsewhere.sandbox.networking.hostsockets import ENGINE_SOCKETS, why_refused

if TYPE_CHECKING:
    from elsewhere.network.ports import Forward

__all__ = ["ENGINE_SOCKETS", "checked", "of_settings", "presets", "spelled"]

_DEFAULT = ("packages",)  # nobody has to ask for it
_NONE = "none"  # forgets the presets before it


def of_settings(resolved: Resolved, needed: Iterable[str] = (), writable: Iterable[str] = ()) -> dict[str, list[str]]:
    """`needed` are rules that nobody wrote down as such: where no rules count, they do not either; `writable` as in
    `checked`."""
    asked = {name: list(resolved[f"network.{name}"]) for name in ("allow", "deny", "forward", "publish")}
    if resolved["sandbox.network"] == "allow":
        asked["allow"] += needed
    if resolved["sandbox.network"] == "none" and "command line" in resolved.values["network.deny"].source:
        raise _useless("deny", asked["deny"][-1], "none")  # that a file denies something as well is in nobody's way
    return checked({**asked, "presets": presets(resolved["network.preset"])}, resolved["sandbox.network"], writable)


def presets(words: Iterable[str]) -> list[str]:
    found: list[str] = []
    for word in words:
        found = [] if word == _NONE else [*found, word]
    return found


def checked(asked: dict[str, list[str]], mode: str, writable: Iterable[str] = ()) -> dict[str, list[str]]:
    """In their one spelling. Raises what is wrong with them, or with the mode that they are to go with. `writable` are the places
    of reality in which the sandbox may write."""
    plain = {"allow": [], "deny": [], "presets": [*_DEFAULT], "forward": [], "publish": []}
    if asked == plain:
        return asked  # nothing has to be loaded for that
    from elsewhere.network import ports, rules

    found = {
        "allow": _once(rules.parse(text) for text in asked["allow"]),
        "deny": _once(rules.parse(text, deny=True) for text in asked["deny"]),
        "presets": list(rules.Rules(presets=tuple(dict.fromkeys(asked["presets"]))).presets),
        "forward": _once(_forward(text, tuple(writable)) for text in asked["forward"]),
        "publish": _once(ports.Publish.parse(text) for text in asked["publish"]),
    }
    _check_mode(found, mode)
    return found


def spelled(kind: str, text: str) -> str | None:
    """A rule, preset, forward or published port as a record has it; None if it can be none."""
    from elsewhere.network import ports, rules

    try:
        if kind in ("allow", "deny"):
            return str(rules.parse(text, deny=kind == "deny"))
        if kind == "forward":
            return str(_resolved(ports.Forward.parse(text)))
        return str(ports.Publish.parse(text)) if kind == "publish" else text
    except UsageError:
        return None


def _forward(text: str, writable: tuple[str, ...]) -> "Forward":
    """A path is resolved now and never again: nobody who can put a link there chooses where it leads."""
    from elsewhere.network import ports

    found = ports.Forward.parse(text)
    if not found.path:
        return found
    resolved = _resolved(found)
    for path in (found.path, resolved.path):
        why, hint = why_refused(path, os.path.realpath(default_state()), writable)
        if why:
            raise Refused("forward_refused", f"--forward {found}: {why}", hint=hint)
    return resolved


def _resolved(found: "Forward") -> "Forward":
    place = os.path.realpath(found.path) if found.path else ""
    return found if place == found.path else type(found).parse(f"unix:{place}")


def _once(found: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(map(str, found)))


def _check_mode(found: dict[str, list[str]], mode: str) -> None:
    asked = {**found, "preset": [name for name in found["presets"] if name not in _DEFAULT]}
    useless: tuple[str, ...] = ()
    if mode == "host":
        useless = ("allow", "deny", "preset", "forward", "publish")
    elif mode == "none":
        useless = ("allow", "preset")
    for name in useless:
        if asked[name]:
            raise _useless(name, asked[name][0], mode)


def _useless(name: str, text: str, mode: str) -> UsageError:
    what = "the host's network" if mode == "host" else "no network"
    return UsageError(
        "bad_network",
        f"--{name} {text} does nothing with {what}: --network {mode}",
        hint=f"leave --{name} out, or choose --network allow",
    )
