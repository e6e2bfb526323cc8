"""Places that no sandbox sees: credentials, other people's homes, elsewhere's own state.

A place is named by where it usually lies; one that is a link is hidden where it leads. A place that contains the project is not
hidden as a whole (its own credential places still are).
"""

import contextlib
import glob
import os

from elsewhere.paths import is_within, outermost

__all__ = ["CREDENTIALS", "SYSTEM", "hidden_places", "watched"]

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


def watched(home: str, shown: str) -> list[str]:
    """The directories in which a place to hide can come and go: while they stay as they are, so does the list."""
    homes = {home, *(other for other in _homes() if is_within(shown, other))}
    parents = {os.path.dirname(os.path.join(place, name)) for place in homes for name in CREDENTIALS}
    parents |= {os.path.dirname(pattern) for pattern in SYSTEM} | {"/home", "/"}
    return sorted(parents)


def hidden_places(home: str, shown: tuple[str, ...], state: str, also: tuple[str, ...] = ()) -> list[str]:
    """Existing places to cover, shortest first. `shown` are the project and what belongs to it."""
    homes = [home]
    found = [state, *also]
    for other in _homes():
        if other == home:
            continue
        if any(is_within(path, other) for path in (*shown, home)):
            homes.append(other)
        else:
            found.append(other)
    found += [os.path.join(place, name) for place in homes for name in CREDENTIALS]
    for pattern in SYSTEM:
        found += glob.glob(pattern) if "*" in pattern else [pattern]
    return _worth_covering([os.path.realpath(path) for path in found if _there(path)], shown)


def _homes() -> list[str]:
    homes = ["/root"]
    with contextlib.suppress(OSError), os.scandir("/home") as entries:
        homes += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return homes


def _there(path: str) -> bool:
    """Whether or not it can be read now: a mode can be changed, and covering takes no more than finding it."""
    return os.path.lexists(os.path.realpath(path))


def _worth_covering(paths: list[str], shown: tuple[str, ...]) -> list[str]:
    """Shortest first, and nothing that contains what is to be shown."""
    wanted = [path for path in sorted(paths, key=len) if path != "/" and not any(is_within(place, path) for place in shown)]
    return outermost(wanted)
