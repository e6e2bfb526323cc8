"""`SandboxFiles`: the files of a sandbox, from outside. Paths that are not absolute are relative to the project."""

import contextlib
import os
from collections.abc import Iterator

from elsewhere.operations.files import files_of
from elsewhere.sandbox.access import transfer
from elsewhere.sandbox.access.files import Entry, Files
from elsewhere.sandbox.access.transfer import Transferred
from elsewhere.sandbox.live import Live

__all__ = ["Entry", "SandboxFiles", "Transferred"]

Path = str | os.PathLike[str]
Entries = list[Entry]  # in the class below, `list` is the verb


class SandboxFiles:
    """Made by `Sandbox.files`. The sandbox may be hostile: no link that it planted leads to a file of the host, and nothing that
    it made keeps the host waiting."""

    def __init__(self, box: Live) -> None:
        self._box = box

    def read(self, path: Path) -> bytes:
        with self._files() as files:
            return files.read(path)

    def read_text(self, path: Path) -> str:
        with self._files() as files:
            return files.read_text(path)

    def write(self, path: Path, data: bytes | str, *, mode: int | None = None) -> None:
        """Whole or not at all; directories on the way are made."""
        with self._files() as files:
            files.write(path, data, mode=mode)

    def list(self, path: Path = ".") -> Entries:
        with self._files() as files:
            return files.list(path)

    def stat(self, path: Path) -> Entry:
        with self._files() as files:
            return files.stat(path)

    def exists(self, path: Path) -> bool:
        with self._files() as files:
            return files.exists(path)

    def remove(self, path: Path, *, recursive: bool = False) -> None:
        with self._files() as files:
            files.remove(path, recursive=recursive)

    def mkdir(self, path: Path, *, parents: bool = True, exist_ok: bool = True) -> None:
        with self._files() as files:
            files.mkdir(path, parents=parents, exist_ok=exist_ok)

    def rename(self, source: Path, target: Path, *, overwrite: bool = True) -> None:
        with self._files() as files:
            files.rename(source, target, overwrite=overwrite)

    def upload(self, host_path: Path, path: Path, *, overwrite: bool = True) -> Transferred:
        """A file or a whole tree of the host, into the sandbox."""
        with self._files() as files:
            return transfer.upload(files, host_path, path, overwrite=overwrite)

    def download(self, path: Path, host_path: Path, *, overwrite: bool = False) -> Transferred:
        """A file or a whole tree of the sandbox, onto the host."""
        with self._files() as files:
            return transfer.download(files, path, host_path, overwrite=overwrite)

    @contextlib.contextmanager
    def _files(self) -> Iterator[Files]:
        with files_of(self._box) as files:
            yield files
