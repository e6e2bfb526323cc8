"""Whoever a command is run for interrupts it like any program, except where it would leave something half done."""

import os
import pty
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from elsewhere.sandbox.keeping.callers import Interrupted, Signals, finish, undisturbed


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, Signals]]:
    client, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with client, ours:
        yield client, Signals(ours)


def interrupted(signals: Signals, work: Callable[[], None]) -> int | None:
    """What it was interrupted by."""
    try:
        with signals.interrupting():
            work()
    except Interrupted as error:
        return error.number
    return None


def for_ever() -> None:
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_interrupts_once(line: tuple[socket.socket, Signals], number: int) -> None:
    client, signals = line
    put_back = []

    def work() -> None:
        try:
            client.send(bytes([number]))
            for_ever()
        finally:
            client.send(bytes([signal.SIGINT]))
            put_back.append("all")

    assert (interrupted(signals, work), put_back) == (number, ["all"])


def test_what_came_before_counts(line: tuple[socket.socket, Signals]) -> None:
    client, signals = line
    client.send(bytes([signal.SIGINT]))
    assert interrupted(signals, for_ever) == signal.SIGINT


def test_that_the_caller_is_gone_counts_as_a_signal(line: tuple[socket.socket, Signals]) -> None:
    client, signals = line
    client.close()
    assert interrupted(signals, for_ever) == signal.SIGHUP


def test_to_be_stopped_interrupts_only_who_waits_for_something_typed(line: tuple[socket.socket, Signals]) -> None:
    client, signals = line
    keyboard, terminal = pty.openpty()
    try:
        os.write(keyboard, b"y\n")

        def work() -> None:
            client.send(bytes([signal.SIGTSTP]))
            signals.wait_for(terminal)

        assert interrupted(signals, work) is None
        client.send(bytes([signal.SIGTSTP]))
        with pytest.raises(Interrupted):
            signals.wait_for(terminal)
        assert os.read(terminal, 10) == b"y\n"
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_what_is_not_to_be_disturbed_is_interrupted_afterwards(line: tuple[socket.socket, Signals]) -> None:
    client, signals = line
    done = []

    def work() -> None:
        with undisturbed():
            client.send(bytes([signal.SIGINT]))
            done.append("whole")
        done.append("more")

    assert (interrupted(signals, work), done) == (signal.SIGINT, ["whole"])


def test_what_is_to_be_finished_is_interrupted_at_its_end(line: tuple[socket.socket, Signals]) -> None:
    client, signals = line
    done = []

    def work() -> None:
        finish()
        client.send(bytes([signal.SIGINT]))
        done.append("whole")

    assert (interrupted(signals, work), done) == (signal.SIGINT, ["whole"])


def test_whoever_is_not_interrupted_reads_signals_as_before(line: tuple[socket.socket, Signals]) -> None:
    client, signals = line
    assert interrupted(signals, finish) is None
    client.send(bytes([signal.SIGINT]))
    with undisturbed():
        assert signals.read() == bytes([signal.SIGINT])
