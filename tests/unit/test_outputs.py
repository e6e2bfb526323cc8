"""Outputs that wait: a pipe that does not block, and nobody who reads it yet."""

import contextlib
import os
import threading
import time

import pytest

from elsewhere import outputs

MUCH = 300_000  # more than a pipe holds


@pytest.fixture
def pipe() -> "tuple[int, int]":
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    return reader, writer


def test_what_has_no_room_waits_for_it(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    got = bytearray()

    def read() -> None:
        time.sleep(0.05)
        while chunk := os.read(reader, 65536):
            got.extend(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    stream = outputs.opened(writer, by_line=False)
    print("x" * MUCH, "end", file=stream, flush=True)
    stream.close()
    os.close(writer)
    thread.join(30)
    os.close(reader)
    assert got == b"x" * MUCH + b" end\n"


def test_the_same_without_waiting_gives_up(pipe: tuple[int, int]) -> None:
    """What it is for: so it is with what Python opens."""
    reader, writer = pipe
    with pytest.raises(BlockingIOError), open(writer, "w", closefd=False) as stream:
        print("x" * MUCH, file=stream, flush=True)
    os.close(writer)
    os.close(reader)


def test_nobody_who_could_read_is_an_error(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = outputs.opened(writer, by_line=True)
    threading.Timer(0.05, os.close, [reader]).start()
    with pytest.raises(BrokenPipeError):
        print("x" * MUCH, file=stream)
    with contextlib.suppress(BrokenPipeError):
        stream.close()
    os.close(writer)


def test_lines_come_at_once_where_that_is_wanted(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = outputs.opened(writer, by_line=True)
    print("one", file=stream)
    assert os.read(reader, 10) == b"one\n"
    stream.write("\udcff\n")  # a name that is no UTF-8 comes out as it was
    assert os.read(reader, 10) == b"\xff\n"
    stream.close()
    os.close(writer)
    os.close(reader)
