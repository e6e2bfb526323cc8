"""Where a caller and its launcher meet: the state directory, and the name of the launcher's socket in it; and what a service is
started with.

Both sides must agree, and one of them is the hot path: nothing is imported here but `os`.
"""

import os

import elsewhere

__all__ = ["default_state", "handed_on", "home_directory", "socket_name"]

# By these a command of a stage is known, and ended if it was interrupted: what serves everybody is none.
_OF_A_STAGE = ("ELSEWHERE_PROMOTION", "ELSEWHERE_STAGE", "ELSEWHERE_CHANGE")


def default_state() -> str:
    """$ELSEWHERE_HOME, else /var/lib/elsewhere for root and ~/.local/share/elsewhere for everybody else."""
    chosen = os.environ.get("ELSEWHERE_HOME", "")
    if chosen:
        return os.path.abspath(chosen)
    if os.getuid() == 0:
        return "/var/lib/elsewhere"
    return f"{home_directory()}/.local/share/elsewhere"


def home_directory() -> str:
    """From the environment, else from the user database."""
    home = os.environ.get("HOME", "")
    if home.startswith("/"):
        return home
    import pwd  # only for the few who have no HOME

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/nonexistent"


def handed_on() -> dict[str, str]:
    """Of our environment, what a service that outlives us is started with."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON") and key not in _OF_A_STAGE}


def socket_name() -> str:
    """Eight hex digits of what a launcher must share with whoever uses it: namespaces, root directory, version and code."""
    parts = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("mnt", "net", "user", "pid")]
    root = os.stat("/")
    text = ".".join([*parts, str(root.st_dev), str(root.st_ino), elsewhere.__version__, elsewhere.__file__, _code()])
    number = 0x811C9DC5
    for byte in os.fsencode(text):
        number = ((number ^ byte) * 0x01000193) & 0xFFFFFFFF
    return f"{number:08x}"


def _code() -> str:
    """When the newest of our files was written, if we run from a checkout: an installation changes its version instead."""
    top = os.path.dirname(elsewhere.__file__)
    if "-packages" in top:
        return ""
    newest = 0
    waiting = [top]
    while waiting:
        for entry in os.scandir(waiting.pop()):
            if entry.name.endswith(".py"):
                newest = max(newest, entry.stat().st_mtime_ns)
            elif "." not in entry.name and not entry.name.startswith("__"):
                waiting.append(entry.path)
    return str(newest)
