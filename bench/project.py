"""The generated project: a git repository of many small files, the same in every run.

Its history comes as one pack, as after a clone; 20,000 loose objects would make `git worktree add` look slower than it is.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator

__all__ = ["generate", "git", "path_of"]

_IN_A_DIRECTORY = 100
_DIRECTORIES_IN_A_PACKAGE = 20


def git(directory: str, *words: str, content: bytes | None = None) -> None:
    """Without anybody's configuration: a hook or a filter of the user would be timed as git."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", "-C", directory, *words], input=content, capture_output=True, env=environment, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"git {words[0]} ended with {done.returncode}: {said}")


def generate(directory: str, files: int, *, filled_every: int = 1) -> None:
    """Fill `directory`. Without git on this machine it is a plain directory. With `filled_every`, all files but those are empty:
    a disk that is told of every block which gets free needs a millisecond to delete a file that has one."""
    stream = [b"commit refs/heads/main\ncommitter bench <bench@localhost> 1700000000 +0000\ndata 0\n"]
    made: set[str] = set()
    for path, content in _contents(files, filled_every):
        parent = os.path.dirname(path)
        if parent not in made:
            os.makedirs(os.path.join(directory, parent))
            made.add(parent)
        with open(os.path.join(directory, path), "wb") as file:
            file.write(content)
        stream.append(b"M 100644 inline %s\ndata %d\n%s\n" % (path.encode(), len(content), content))
    if shutil.which("git") is None:
        return
    git(directory, "init", "--quiet", "--initial-branch=main")
    git(directory, "fast-import", "--quiet", content=b"".join(stream))
    git(directory, "reset", "--quiet", "--mixed")


def path_of(number: int) -> str:
    directory, index = divmod(number, _IN_A_DIRECTORY)
    package, module = divmod(directory, _DIRECTORIES_IN_A_PACKAGE)
    return f"package{package:02}/module{module:02}/file{index:02}.py"


def _contents(files: int, filled_every: int) -> Iterator[tuple[str, bytes]]:
    """Paths and contents of a few hundred to a few thousand bytes, as source code has."""
    chance = random.Random(1)
    texts = [chance.randbytes(1500).hex() for _ in range(64)]
    for number in range(files):
        length = 200 + (number * 37) % 2800
        content = f"# {number}\n{texts[number % len(texts)][:length]}\n".encode()
        yield path_of(number), b"" if number % filled_every else content
