"""Places that no sandbox sees: credentials, other people's homes, elsewhere's own state.

A place is named by where it usually lies; one that is a link is hidden where it leads. A place that contains the project is not
hidden as a whole (its own credential places still are). What somebody asks to be hidden may also lie in the project. A share wins
over hiding, for exactly the place that it names: what is hidden below it stays so, and of a hidden directory around it nothing
but the way to it shows (`view.py`).
"""

import contextlib
import glob
import os

from elsewhere.paths import is_within

__all__ = ["CREDENTIALS", "SYSTEM", "hidden_places", "homes", "watched"]

CREDENTIALS = (
    ".ssh", ".aws", ".azure", ".gnupg", ".kube", ".netrc", ".git-credentials", ".config/git/credentials", ".config/gcloud",
    ".config/gh", ".config/glab-cli", ".config/hub", ".config/op", ".config/rclone", ".config/doctl", ".docker/config.json",
    ".pypirc", ".gem/credentials", ".cargo/credentials", ".cargo/credentials.toml", ".terraform.d/credentials.tfrc.json",
    ".vault-token", ".password-store", ".pgpass", ".my.cnf", ".s3cfg", ".boto", ".local/share/keyrings", ".mozilla",
    ".config/google-chrome", ".config/chromium", ".config/BraveSoftware", ".claude", ".claude.json", ".codex", ".gemini",
    ".config/anthropic", ".config/openai", ".config/github-copilot", ".config/goose", ".config/elsewhere",
)  # fmt: skip
SYSTEM = (
    "/etc/ssh/ssh_host_*_key", "/etc/ssl/private", "/etc/sudoers.d", "/etc/sudoers", "/etc/krb5.keytab", "/etc/wireguard",
    "/etc/NetworkManager/system-connections", "/var/lib/elsewhere", "/var/lib/docker", "/var/lib/containerd",
)  # fmt: skip


def watched(home: str, shown: str, hide: tuple[str, ...] = ()) -> list[str]:
    """The directories in which a place to hide can come and go: while they stay as they are, so does the list."""
    near = {home, *(other for other in homes() if is_within(shown, other))}
    parents = {os.path.dirname(os.path.join(place, name)) for place in near for name in CREDENTIALS}
    parents |= {os.path.dirname(pattern) for pattern in SYSTEM} | {"/home", "/"}
    parents |= {os.path.dirname(path) for path in hide}
    return sorted(parents)


def hidden_places(
    home: str,
    shown: tuple[str, ...],
    state: str,
    also: tuple[str, ...] = (),
    *,
    hide: tuple[str, ...] = (),
    shares: tuple[str, ...] = (),
) -> list[str]:
    """Existing places to cover, shortest first. `shown` are the project and what belongs to it; `hide` are the places that
    somebody asked to be hidden, `shares` those that somebody asked to see."""
    near = [home]
    found = [state, *also]
    for other in homes():
        if other == home:
            continue
        if other in shares or any(is_within(path, other) for path in (*shown, home)):
            near.append(other)
        else:
            found.append(other)
    found += [os.path.join(place, name) for place in near for name in CREDENTIALS]
    for pattern in SYSTEM:
        found += glob.glob(pattern) if "*" in pattern else [pattern]
    return _worth_covering([os.path.realpath(path) for path in (*found, *hide) if _there(path)], shown, shares)


def homes() -> list[str]:
    """Everybody's, as far as they lie where homes usually do."""
    found = ["/root"]
    with contextlib.suppress(OSError), os.scandir("/home") as entries:
        found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


def _there(path: str) -> bool:
    """Whether or not it can be read now: a mode can be changed, and covering takes no more than finding it."""
    return os.path.lexists(os.path.realpath(path))


def _worth_covering(paths: list[str], shown: tuple[str, ...], shares: tuple[str, ...]) -> list[str]:
    """Shortest first, nothing that contains what is to be shown, and nothing that is covered with what lies around it."""
    kept: list[str] = []
    for path in sorted(dict.fromkeys(paths), key=len):
        if path == "/" or path in shares or any(is_within(place, path) for place in shown):
            continue
        # The nearest share above shows what a hidden place around that share does not.
        share = max((place for place in shares if is_within(path, place)), key=len, default="/")
        if not any(is_within(path, other) and is_within(other, share) for other in kept):
            kept.append(path)
    return kept
