"""Settings: `elsewhere.toml` in the project and the user's own file. An unknown key is an error that names the nearest right one.

[env]
pass = ["NAME", …]     variables of the caller that go into the sandbox, besides the built-in list

[base]
live = ["DIR", …]      directories of the project that a pinned base does not copy: they show reality as it is
"""

import difflib
import os
import stat
import tomllib
from collections.abc import Collection
from dataclasses import dataclass

from elsewhere.errors import UsageError

__all__ = ["Settings", "load"]

_KEYS = {"env": ("pass",), "base": ("live",)}


@dataclass(frozen=True, slots=True)
class Settings:
    env_pass: tuple[str, ...] = ()
    base_live: tuple[str, ...] = ()


def user_file(home: str) -> str:
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "elsewhere", "elsewhere.toml")


def load(path: str) -> Settings:
    """Nothing there: the defaults."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as stream:
            # A stranger may have written it: a fifo must not keep us waiting.
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise UsageError("bad_settings", f"{path}: not a regular file", hint="mend the file, or move it away")
            document = tomllib.load(stream)
    except FileNotFoundError:
        return Settings()
    except UsageError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError("bad_settings", f"{path}: {reason}", hint="mend the file, or move it away") from error
    for section, keys in document.items():
        _known(path, "", section, _KEYS)
        if not isinstance(keys, dict):
            raise UsageError(
                "bad_settings", f"{path}: {section!r} is not a table", hint=f"write [{section}] on a line of its own"
            )
        for key, value in keys.items():
            _known(path, f"{section}.", key, _KEYS[section])
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise UsageError(
                    "bad_settings",
                    f"{path}: {section}.{key} = {value!r} is not a list of names",
                    hint=f'write {key} = ["NAME"]',
                )
    return Settings(
        env_pass=tuple(document.get("env", {}).get("pass", ())),
        base_live=tuple(document.get("base", {}).get("live", ())),
    )


def _known(path: str, prefix: str, key: str, table: Collection[str]) -> None:
    if key not in table:
        near = difflib.get_close_matches(key, table, n=1)
        known = ", ".join(prefix + name for name in sorted(table))
        raise UsageError(
            "unknown_setting",
            f"{path}: unknown key {prefix + key!r}",
            hint=f"did you mean {prefix + near[0]!r}?" if near else f"known here: {known}",
        )
