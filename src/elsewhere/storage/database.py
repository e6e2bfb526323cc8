"""A SQLite file that can be lost: whatever cannot be trusted is moved aside, and an empty one takes its place.

    <name>                     the database: WAL, synchronous=NORMAL, `user_version` is the version of its schema
    <name>-wal, <name>-shm     SQLite's own; they stay when nobody has the database open (see `guard.py`)
    <name>.new                 one under construction; renamed when it is whole
    <name>.broken-<time>       what was found here and was not ours or not whole, with its -wal, -shm and -journal
    <name>.v<N>.backup         as it was before its schema was brought from version N to the present one

Who opens holds a shared lock (flock) on the directory, who creates, moves aside or migrates an exclusive one: so nobody ever
meets a new database beside the -wal of an old one, which SQLite would replay. Not here: any table, and what to do about what
was lost; so only what can be found out again, or may be forgotten, belongs into such a file.
"""

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from datetime import UTC, datetime
from typing import TypeVar

from elsewhere.clock import Clock, monotonic, wall
from elsewhere.errors import StateError
from elsewhere.storage.guard import Guard, Identity
from elsewhere.values import dataclass

__all__ = ["Database", "Schema"]

T = TypeVar("T")

_PATIENCE_S = 10.0
_LONG_WAL = 512 << 10  # the first to open reads all of it
_MAGIC = b"SQLite format 3\0" + (4096).to_bytes(2, "big") + b"\2\2"  # with the page size, and twice the version that means WAL
_BESIDE = ("", "-wal", "-shm", "-journal")
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_FSYNC)
_UNUSABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOMEM)


@dataclass(frozen=True, slots=True)
class Schema:
    """`migrations[N]` brings a database from version N to N + 1, and in the end to exactly these statements."""

    version: int
    statements: tuple[str, ...]
    migrations: Mapping[int, Callable[[sqlite3.Connection], None]] = field(default_factory=dict)


class _Broken(Exception):
    """What is there is no database of ours."""


class _Older(Exception):
    """What is there has to be migrated first."""


class Database:
    """Usable from several threads, one at a time, and again after a fork. `moved_aside`: what this one found to be broken."""

    def __init__(self, path: str, schema: Schema, *, clock: Clock = wall) -> None:
        self.path = path
        self.moved_aside: list[str] = []
        self._schema = schema
        self._clock = clock
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._guard: Guard | None = None
        self._identity: tuple[Identity | None, ...] = ()

    def close(self) -> None:
        if self._pid == os.getpid():
            with self._lock:
                self._drop()

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return self._use(work, write=False)

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """All of it or nothing; `work` may be called again, on an empty database, if this one turns out to be broken."""
        return self._use(work, write=True)

    def _use(self, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
        if self._pid != os.getpid():
            # What a fork copied belongs to the parent: used or closed here, it would give up the parent's locks.
            _ABANDONED.append((self._connection, self._guard))
            self._connection = self._guard = None
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            reason: Exception | None = None
            for _ in range(5):
                try:
                    connection = self._current()
                    try:
                        if not write:
                            return work(connection)
                        connection.execute("BEGIN IMMEDIATE")
                        result = work(connection)
                        connection.execute("COMMIT")
                    except BaseException:
                        with contextlib.suppress(sqlite3.Error):
                            connection.rollback()
                        raise
                    if self._identity == self._look():
                        return result
                except (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.IntegrityError):
                    raise  # ours to mend, and no fault of the file
                except (sqlite3.Error, _Broken) as error:
                    reason = error
                    self._judge(error)
            raise self._unusable(f"it was replaced again and again ({reason})")

    def _current(self) -> sqlite3.Connection:
        if self._connection is not None and self._identity == self._look():
            return self._connection
        self._drop()
        for _ in range(5):
            older = False
            with self._locked(fcntl.LOCK_SH):
                self._identity = self._look()
                if self._identity[0] is not None:
                    try:
                        return self._connect(self._identity[0])
                    except _Older:
                        older = True
            with self._locked(fcntl.LOCK_EX):
                if older:
                    self._migrate()
                elif self._look()[0] is None:
                    self._create()
        raise self._unusable("it vanishes again and again")

    def _connect(self, identity: Identity) -> sqlite3.Connection:
        for beside in _BESIDE:
            mode = _mode(self.path + beside)
            if mode is not None and (not stat.S_ISREG(mode) or beside == "-journal"):
                raise _Broken(f"{self.path + beside!r} does not belong there")
        guard = self._hold(identity)
        try:
            if guard.header()[:20] != _MAGIC:
                raise _Broken("it is no database in WAL mode")
            connection = sqlite3.connect(self.path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
        except BaseException:
            guard.release()
            raise
        self._connection, self._guard = connection, guard
        connection.execute("PRAGMA synchronous=NORMAL")
        self._check(connection)
        self._identity = (identity, self._look()[1])
        if os.stat(self.path + "-wal").st_size > _LONG_WAL:
            connection.execute("PRAGMA busy_timeout=0")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute(f"PRAGMA busy_timeout={_PATIENCE_S * 1000:.0f}")
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > self._schema.version:
            raise self._too_new(version)
        if version < self._schema.version:
            if all(step in self._schema.migrations for step in range(version, self._schema.version)):
                raise _Older
            raise _Broken(f"it has no schema that is known (version {version})")
        found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        if sorted(_plain(sql) for (sql,) in found) != sorted(map(_plain, self._schema.statements)):
            raise _Broken("its schema is not ours")

    def _drop(self) -> None:
        connection, guard = self._connection, self._guard
        self._connection = self._guard = None
        if connection is not None:
            connection.close()
        if guard is not None:
            guard.release()

    def _look(self) -> tuple[Identity | None, ...]:
        """The database and its -wal, told from any others of that name: either may be replaced under an open connection."""
        found: list[Identity | None] = []
        for path in (self.path, self.path + "-wal"):
            try:
                about = os.lstat(path)
                found.append((about.st_dev, about.st_ino))
            except FileNotFoundError:
                found.append(None)
            except OSError as error:
                raise self._unusable(str(error.strerror)) from error
        return tuple(found)

    def _judge(self, error: Exception) -> None:
        """An error that is the file's own fault moves it aside; every other one is told to the caller."""
        code = getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_CORRUPT
        if isinstance(error, sqlite3.Error) and code != sqlite3.SQLITE_READONLY_DBMOVED:
            if code & 0xFF in _BUSY:
                raise StateError(
                    "state_busy", f"{self.path!r} is in use by others for too long: {error}", hint="try again"
                ) from error
            if code in _NO_ROOM:
                raise self._no_room(str(error)) from error
            if code & 0xFF in _UNUSABLE and self._identity[0] == self._look()[0]:
                raise self._unusable(str(error)) from error
        self._drop()
        with self._locked(fcntl.LOCK_EX):
            # Compared, because others saw the same error and may have mended it by now.
            seen = self._identity[0]
            if seen is not None and seen == self._look()[0] and code != sqlite3.SQLITE_READONLY_DBMOVED:
                version = self._version(seen)
                if version > self._schema.version:
                    raise self._too_new(version)  # migrated by a newer program while we had it open
                self._move_aside()

    def _version(self, identity: Identity) -> int:
        """`user_version` as it stands in the file, without SQLite; 0 if it is no database at all."""
        mode = _mode(self.path)
        if mode is None or not stat.S_ISREG(mode):
            return 0
        guard = self._hold(identity)
        try:
            header = guard.header()
        finally:
            guard.release()
        return int.from_bytes(header[60:64], "big", signed=True) if header[:20] == _MAGIC and len(header) == 100 else 0

    def _hold(self, identity: Identity) -> Guard:
        try:
            return Guard.hold(self.path, identity)
        except FileNotFoundError:
            raise _Broken("it is gone") from None
        except OSError as error:
            raise self._unusable(str(error.strerror)) from error

    def _move_aside(self) -> None:
        when = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y%m%dT%H%M%SZ")
        target = f"{self.path}.broken-{when}"
        number = 1
        while os.path.lexists(target):
            number += 1
            target = f"{self.path}.broken-{when}-{number}"
        try:
            for beside in _BESIDE:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path + beside, target + beside)
        except OSError as error:
            raise self._unusable(str(error.strerror)) from error
        self.moved_aside.append(target)

    def _create(self) -> None:
        aside = f"{self.path}.new"
        if any(_mode(self.path + beside) is not None for beside in _BESIDE):
            self._move_aside()  # of a database that is gone: SQLite would replay it into the new one
        try:
            for beside in _BESIDE:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside + beside)
            os.close(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(aside, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous=OFF")
                connection.execute("PRAGMA page_size=4096")
                connection.execute("PRAGMA journal_mode=WAL")
                script = ";".join(self._schema.statements)
                connection.executescript(f"BEGIN;{script};PRAGMA user_version={self._schema.version};COMMIT")
            finally:
                connection.close()
            os.rename(aside, self.path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._no_room(str(error.strerror)) from error
            raise self._unusable(str(error.strerror)) from error

    def _migrate(self) -> None:
        connection = sqlite3.connect(self.path, timeout=_PATIENCE_S, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version >= self._schema.version:
                return  # somebody was faster
            aside = f"{self.path}.new"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside)
            with contextlib.closing(sqlite3.connect(self.path)) as source, contextlib.closing(sqlite3.connect(aside)) as backup:
                source.backup(backup)
            os.rename(aside, f"{self.path}.v{version}.backup")
            for step in range(version, self._schema.version):
                self._schema.migrations[step](connection)
            connection.execute(f"PRAGMA user_version={self._schema.version}")
            self._check(connection)
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # an older program reads the version from the file itself
        finally:
            connection.close()

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        try:
            fd = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unusable(str(error.strerror)) from error
        try:
            deadline = monotonic() + _PATIENCE_S
            while True:
                try:
                    fcntl.flock(fd, how | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if monotonic() > deadline:
                        raise StateError(
                            "state_busy", f"{self.path!r} is held by others for too long", hint="try again"
                        ) from None
                    time.sleep(0.002)
            yield
        finally:
            os.close(fd)

    def _unusable(self, why: str) -> StateError:
        return StateError(
            "state_unusable", f"{self.path!r} cannot be used: {why}", hint="look at its owner, mode and file system"
        )

    def _no_room(self, why: str) -> StateError:
        return StateError(
            "no_room", f"there is no room for {self.path!r}: {why}", hint="free some space; elsewhere rm throws sandboxes away"
        )

    def _too_new(self, version: int) -> StateError:
        return StateError(
            "state_too_new",
            f"{self.path!r} has schema {version}, and this version of elsewhere knows up to {self._schema.version}",
            hint="upgrade elsewhere, or set ELSEWHERE_HOME to another directory",
        )


_ABANDONED: list[object] = []


def _mode(path: str) -> int | None:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return None


def _plain(sql: str) -> str:
    """Without what ALTER and a hand that retypes it may change."""
    return "".join(sql.replace('"', "").split()).lower()
