"""Shared by unit tests: a place of their own on a real file system, gone afterwards whatever they put there."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """Not pytest's own directory: that one is kept, and fails to clean up trees that are closed or a thousand levels deep."""
    made = Path(tempfile.mkdtemp(prefix="ew-unit-")).resolve()
    yield made
    try:
        shutil.rmtree(made)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", made], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", made], check=True)
    assert not made.exists()
