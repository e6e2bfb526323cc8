"""The host's own proxy, as whoever made or started a sandbox has it: their variables, beside its record for as long as it runs.

    sandboxes/<sandbox-id>/network.proxy      {"https_proxy": "http://…"}, for its owner's eyes alone

There may be a password in them, so they are nowhere else: in no record, document or log. Not here: what they mean
(`network/upstream.py`). Without the file there is no proxy: most hosts have none, and nobody writes that down at every start.
"""

import contextlib
import json
import os
from collections.abc import Mapping

from elsewhere.storage.state import write_aside

__all__ = ["forget", "keep", "kept"]

_FILE = "network.proxy"
_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_LARGEST = 1 << 20


def keep(directory: str, environ: Mapping[str, str]) -> None:
    """Before anything runs in it. Whatever others have, this is what holds for this sandbox."""
    found = {name: environ[name] for lower in _NAMES for name in (lower, lower.upper()) if environ.get(name)}
    if found:
        write_aside(os.path.join(directory, _FILE), json.dumps(found).encode())
    else:
        forget(directory)


def kept(directory: str) -> dict[str, str]:
    """Raises ValueError or OSError if what was said cannot be read."""
    try:
        with open(os.path.join(directory, _FILE), "rb") as stream:
            found = json.loads(stream.read(_LARGEST))
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("it is no list of variables")
    return found


def forget(directory: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, _FILE))
