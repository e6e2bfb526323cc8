"""Files that a sandbox gets its own version of from the start, in its layers.

Root's sandboxes have accounts without their secrets: `/etc/shadow` cannot simply be hidden, because `su` and package scripts need
an entry for each account, and tools replace the file by renaming, which a mount on top would forbid. So the layer starts with a
copy in which every password is locked. A sandbox of a commit has its own HEAD and index.
"""

import contextlib
import os
import stat

from elsewhere.paths import is_within

__all__ = ["ACCOUNTS", "pristine", "sow_accounts", "sow_files"]

ACCOUNTS = ("/etc/shadow", "/etc/gshadow", "/etc/shadow-", "/etc/gshadow-")


def pristine(files: tuple[tuple[str, str], ...] = ()) -> dict[str, bytes]:
    """What the seeded files contain, by their paths; `files` are those of `sow_files`."""
    found = {}
    for path in ACCOUNTS:
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            found[path] = b"".join(_locked(line) for line in stream)
    for path, source in files:
        with contextlib.suppress(OSError), open(source, "rb") as stream:
            found[path] = stream.read()
    return found


def _locked(line: bytes) -> bytes:
    words = line.split(b":")
    if len(words) > 2 and words[1] not in (b"", b"*", b"!", b"!!", b"!*"):
        words[1] = b"!*"
    return b":".join(words)


def sow_accounts(upper: str, at: str, shift: int) -> None:
    """Into the fresh layer that is mounted at `at`, with the owners that they have."""
    for path, content in pristine().items():
        _sow(upper, at, path, content, os.stat(path), shift)


def sow_files(files: tuple[tuple[str, str], ...], uppers: dict[str, str], shift: int) -> None:
    """Each into the layer in which it belongs: `uppers` are the fresh layers by the places where they are mounted."""
    for path, source in files:
        at = max((place for place in uppers if is_within(path, place)), key=len)
        with open(source, "rb") as stream:
            content = stream.read()
        like = os.stat(path if os.path.exists(path) else os.path.dirname(path))
        _sow(uppers[at], at, path, content, like, shift)


def _sow(upper: str, at: str, path: str, content: bytes, like: os.stat_result, shift: int) -> None:
    parts = os.path.relpath(path, at).split("/")
    here, real = upper, at
    for part in parts[:-1]:
        here, real = os.path.join(here, part), os.path.join(real, part)
        with contextlib.suppress(FileExistsError):
            os.mkdir(here)
            _take_after(here, os.stat(real), shift)
    fd = os.open(f"{here}/{parts[-1]}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as stream:
        stream.write(content)
        stream.flush()
        _take_after(f"/proc/self/fd/{fd}", like, shift)


def _take_after(path: str, like: os.stat_result, shift: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, shift + like.st_uid, shift + like.st_gid)
    mode = stat.S_IMODE(like.st_mode)
    os.chmod(path, mode if stat.S_ISDIR(like.st_mode) == os.path.isdir(path) else 0o644)
