"""The `elsewhere` command as it starts: hand arguments, directory, environment and descriptors to the launcher, pass signals on,
end with its code.

It imports next to nothing, because Python's own start is most of what a hot verb costs: `socket`, `json` or `argparse` would
each add half of it again. What cannot be handed over (no launcher, `doctor`) is done here, by the same code, loaded then.
"""

import os
import sys

from elsewhere import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket

# Verbs that look at the caller's own situation, which is not the launcher's.
_HERE = ("doctor",)
# Verbs that need a launcher anyway.
_STARTING = ("run", "create", "exec", "shell", "start", "open", "cp", "race")
_STOP, _TSTP = 19, 20
_FORWARDED = (1, 2, 3, 10, 12, 15, 18, _TSTP, 28)  # HUP INT QUIT USR1 USR2 TERM CONT TSTP WINCH


def main() -> int:
    if not sys.platform.startswith("linux"):
        sys.stderr.write(f"elsewhere: this needs a Linux kernel, and this is {sys.platform}; on Windows, use it inside WSL2\n")
        return 1
    argv = sys.argv[1:]
    _open_standard_descriptors()
    if argv == ["--version"] and _written(f"elsewhere {__version__}\n"):
        return 0
    try:
        os.getcwd()
    except OSError:
        from elsewhere.cli.main import nowhere

        return nowhere(argv)
    if argv and argv[0] not in _HERE and not argv[0].startswith("-"):
        for find in (_connect, lambda: None):
            sock = find() or _start(argv)
            code = None if sock is None else _hand_over(sock, argv)
            if code is not None:
                return code
    from elsewhere import outputs
    from elsewhere.cli.main import main as here

    outputs.use()
    return here(argv, None)


def _written(text: str) -> bool:
    """Whether anybody got it; if not, why is told by the same code as always."""
    data = text.encode()
    try:
        return os.write(1, data) == len(data)
    except OSError:
        return False


def _connect() -> "_socket.socket | None":
    import _socket

    from elsewhere.meeting import default_state, socket_name

    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        # By way of the directory's descriptor: a socket's path has 107 bytes at most.
        directory = os.open(default_state() + "/run", os.O_PATH | os.O_DIRECTORY)
        sock.connect(f"/proc/self/fd/{directory}/{socket_name()}")
        os.close(directory)
    except OSError:
        return None
    return sock


def _start(argv: list[str]) -> "_socket.socket | None":
    """Only for what needs a launcher anyway; a listing does not start one. A failure is told by whoever does the work here."""
    inside = os.environ.get("ELSEWHERE_SANDBOX_EXECUTION") == "true" and os.environ.get("ELSEWHERE_ALLOW_NESTED") != "1"
    if argv[0] not in _STARTING or inside:
        return None
    from elsewhere.errors import ElsewhereError
    from elsewhere.meeting import socket_name
    from elsewhere.sandbox.launching import engine
    from elsewhere.storage.state import State

    try:
        engine.start(State.open(), socket_name())
    except (ElsewhereError, OSError):
        return None
    return _connect()


def _hand_over(sock: "_socket.socket", argv: list[str]) -> "int | None":
    """The exit code; None: the launcher was just going, and nothing was done."""
    import _signal  # type: ignore[import-not-found]  # `signal` itself would load `enum`
    import marshal

    umask = os.umask(0o077)
    os.umask(umask)
    data = marshal.dumps(("cli", argv, os.getcwd(), dict(os.environ), umask))
    terminal = _remember_terminal()
    descriptors = [0, 1, 2]
    try:
        if len(data) <= 65536:
            _send(sock, [b"i", data], descriptors)
        else:
            holder = os.memfd_create("elsewhere-message")
            with open(holder, "wb", closefd=False) as stream:
                stream.write(data)
            _send(sock, [b"f"], [*descriptors, holder])
    except OSError:
        return None

    forwarded = []

    def forward(number: int, _frame: object) -> None:
        forwarded.append(number)
        try:
            sock.send(bytes([number]))
        except OSError:
            return  # it is over: the answer is on its way
        if number == _TSTP:
            os.kill(os.getpid(), _STOP)  # the command was told to stop; now we do, for the shell to see

    taken = _FORWARDED[1:] if _signal.getsignal(1) == _signal.SIG_IGN else _FORWARDED  # nohup
    for number in taken:
        _signal.signal(number, forward)
    try:
        answer = sock.recv(64)
    except ConnectionResetError:
        if not forwarded:  # the kernel says that nobody has read what we sent: nothing was done
            for number in taken:
                _signal.signal(number, _signal.SIG_DFL)
            _signal.signal(2, _signal.default_int_handler)
            return None
        answer = b""
    except OSError:
        answer = b""
    if answer.startswith(b"exit "):
        return int(answer[5:])
    _restore_terminal(terminal)
    again = "try again, it is started on demand"
    if argv[0] == "race" or argv[:2] == ["experiments", "resume"]:
        again = "elsewhere experiments list names the race, and elsewhere experiments resume goes on with what is missing of it"
    sys.stderr.write(f"elsewhere: the launcher ended unexpectedly, and the command with it; {again}\n")
    return 125


def _send(sock: "_socket.socket", parts: list[bytes], descriptors: list[int]) -> None:
    packed = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    sock.sendmsg(parts, [(1, 1, packed)])  # SOL_SOCKET, SCM_RIGHTS


def _open_standard_descriptors() -> None:
    """First of all: the number of one that the caller closed would go to our own socket, and with it into the sandbox."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open("/dev/null", os.O_RDWR)  # the lowest free number is this one


def _remember_terminal() -> "list[object] | None":
    if not (os.isatty(0) and os.isatty(1)):
        return None  # nobody will take it
    import termios

    saved = termios.tcgetattr(0)
    # Whoever does the work is not in our session, so the kernel would let it take the terminal from the foreground; setting it to
    # what it is stops us first if we are in the background.
    termios.tcsetattr(0, termios.TCSADRAIN, saved)
    return saved


def _restore_terminal(saved: "list[object] | None") -> None:
    if saved is not None:
        import termios

        termios.tcsetattr(0, termios.TCSADRAIN, saved)  # type: ignore[arg-type]


if __name__ == "__main__":
    raise SystemExit(main())
