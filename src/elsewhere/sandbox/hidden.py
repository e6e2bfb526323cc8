"""Places that no sandbox sees: credentials, other people's homes, elsewhere's own state.

A place is named by where it usually lies; one that is a link is hidden where it leads, and one that a second mount of its file
system shows is hidden there, too. A place that contains the project is not hidden as a whole (its own credential places still
are). What somebody asks to be hidden may also lie in the project. A share, or a private copy, wins over hiding, for exactly the
place that it names: what is hidden below it stays so, and of a hidden directory around it nothing but the way to it shows
(`view.py`).

Some files are settings first, and programs need them (`TELLING`): they are hidden only if they hold something secret.
"""

import contextlib
import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator

from elsewhere.linux import mountinfo
from elsewhere.linux.mountinfo import Mount
from elsewhere.paths import is_within

__all__ = ["CREDENTIALS", "SYSTEM", "TELLING", "hidden_places", "homes", "watched"]

CREDENTIALS = (
    ".ssh", ".aws", ".azure", ".gnupg", ".kube", ".netrc", ".git-credentials", ".config/git/credentials", ".config/gcloud",
    ".config/gh", ".config/glab-cli", ".config/hub", ".config/op", ".config/rclone", ".config/doctl", ".docker/config.json",
    ".pypirc", ".gem/credentials", ".cargo/credentials", ".cargo/credentials.toml", ".terraform.d/credentials.tfrc.json",
    ".vault-token", ".password-store", ".pgpass", ".my.cnf", ".s3cfg", ".boto", ".local/share/keyrings", ".mozilla",
    ".config/google-chrome", ".config/chromium", ".config/BraveSoftware", ".claude", ".claude.json", ".codex", ".gemini",
    ".config/anthropic", ".config/openai", ".config/github-copilot", ".config/goose", ".config/elsewhere",
    ".config/composer/auth.json", ".composer/auth.json", ".config/containers/auth.json", ".config/sops", ".databrickscfg", ".fly",
    ".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".local/share/elsewhere", ".local/share/opencode/auth.json",
    ".aider/oauth-keys.env", ".config/mini-swe-agent/.env",
)  # fmt: skip
TELLING = (
    ".npmrc", ".yarnrc.yml", ".config/pip/pip.conf", ".pip/pip.conf", ".m2/settings.xml", ".gradle/gradle.properties",
    ".aider.conf.yml", ".config/opencode/opencode.json",
)  # fmt: skip
SYSTEM = (
    "/etc/ssh/ssh_host_*_key", "/etc/ssl/private", "/etc/sudoers.d", "/etc/sudoers", "/etc/krb5.keytab", "/etc/wireguard",
    "/etc/NetworkManager/system-connections", "/etc/kubernetes", "/etc/letsencrypt", "/etc/rancher", "/var/lib/elsewhere",
    "/var/lib/docker", "/var/lib/containerd", "/var/lib/containers",
)  # fmt: skip
_SECRET = re.compile(rb"auth|pass|token|secret|credential|api.?key|://[^/\s@]+@", re.IGNORECASE)
_READ_AT_MOST = 1 << 16


def watched(home: str, shown: str, hide: tuple[str, ...] = ()) -> list[str]:
    """Where a place to hide can come and go: while these stay as they are, so does the list."""
    near = {home, *(other for other in homes() if is_within(shown, other))}
    telling = {os.path.join(place, name) for place in near for name in TELLING}
    parents = {os.path.dirname(os.path.join(place, name)) for place in near for name in CREDENTIALS}
    parents |= {os.path.dirname(path) for path in telling}
    parents |= {os.path.dirname(pattern) for pattern in SYSTEM} | {"/home", "/"}
    parents |= {os.path.dirname(path) for path in hide}
    return sorted(parents | telling)


def hidden_places(
    home: str,
    shown: tuple[str, ...],
    state: str,
    also: tuple[str, ...] = (),
    *,
    hide: tuple[str, ...] = (),
    shares: tuple[str, ...] = (),
    mounts: Iterable[Mount] = (),
) -> list[str]:
    """Existing places to cover, shortest first. `shown` are the project and what belongs to it; `hide` are the places that
    somebody asked to be hidden, `shares` those that somebody asked to see, as they are or as a private copy, `mounts` those of
    the host."""
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
    found += [path for place in near for name in TELLING if _tells(path := os.path.join(place, name))]
    for pattern in SYSTEM:
        found += glob.glob(pattern) if "*" in pattern else [pattern]
    there = [os.path.realpath(path) for path in (*found, *hide) if _there(path)]
    again = [path for path in _shown_again(there, list(mounts)) if not is_within(home, path)]
    return _worth_covering([*there, *again], shown, shares)


def homes() -> list[str]:
    """Everybody's, as far as they lie where homes usually do; free of links."""
    found = ["/root"]
    with contextlib.suppress(OSError), os.scandir("/home") as entries:
        for entry in entries:
            path = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
            # What a link leads to may be anything: the top of something larger is nobody's home.
            if entry.is_dir(follow_symlinks=False) or (path.count("/") > 1 and _is_directory(path)):
                found.append(path)
    return list(dict.fromkeys(found))


def _there(path: str) -> bool:
    """Whether or not it can be read now: a mode can be changed, and covering takes no more than finding it."""
    return os.path.lexists(os.path.realpath(path))


def _is_directory(path: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def _tells(path: str) -> bool:
    """Whether a file of settings holds something secret, as far as its words say; one that cannot be read is not shown either."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    with open(fd, "rb") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return True
        text = stream.read(_READ_AT_MOST + 1)
    return len(text) > _READ_AT_MOST or _SECRET.search(text) is not None


def _shown_again(paths: list[str], mounts: list[Mount]) -> Iterator[str]:
    """The same places where another mount of their file system shows them, or a part of them."""
    for path in paths if mounts else ():
        mount = mountinfo.containing(path, mounts)
        inner = _joined(mount.root, path[len(mount.target.rstrip("/")) :])
        for other in mounts:
            if other.device != mount.device or other == mount:
                continue
            if is_within(other.root, inner):
                yield other.target
            elif is_within(inner, other.root):
                place = _joined(other.target, inner[len(other.root.rstrip("/")) :])
                if mountinfo.containing(place, mounts) == other:
                    yield place


def _joined(place: str, rest: str) -> str:
    return f"{place.rstrip('/')}{rest}" or "/"


def _worth_covering(paths: list[str], shown: tuple[str, ...], shares: tuple[str, ...]) -> list[str]:
    """Shortest first, nothing that contains what is to be shown, and nothing that is covered with what lies around it."""
    kept: dict[str, None] = {}
    for path in sorted(dict.fromkeys(paths), key=len):
        if path == "/" or path in shares or any(is_within(place, path) for place in shown):
            continue
        # The nearest share above shows what a hidden place around that share does not.
        share = max((place for place in shares if is_within(path, place)), key=len, default="/")
        if not any(place in kept and is_within(place, share) for place in _around(path)):
            kept[path] = None
    return list(kept)


def _around(path: str) -> Iterator[str]:
    """The path itself, and every directory above it."""
    while path != "/":
        yield path
        path = os.path.dirname(path)
