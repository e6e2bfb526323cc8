"""What is going on, for whoever waits: on standard error, apart from the results."""

import sys

__all__ = ["say"]


def say(text: str) -> None:
    print(f"{text} …", file=sys.stderr, flush=True)
