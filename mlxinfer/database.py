"""One SQLite file, used by threads and processes at once; a damaged file is set aside.

Every write is one transaction in a write-ahead log: a process that is killed at any moment loses at
most the transaction that it was writing.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from .errors import MlxinferError, StorageFullError

RESERVE_BYTES = 512 << 10  # that let a full disk delete
T = TypeVar("T")
BUSY_S = 10.0  # that another process may hold the file
DAMAGED = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))
log = logging.getLogger("mlxinfer")


@contextmanager
def reported(kind: type[MlxinferError], what: str) -> Iterator[None]:
    """Errors of a file of `what` as those of the package."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeEncodeError, OverflowError) as error:  # of values too
        if (full := StorageFullError.cause(error)) is not None:
            raise full from error
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise kind(f"{what} cannot be used: {said}.") from error


class Database:
    """A connection to one file, opened at its first use.

    Where the file cannot be opened, each use tries again: a disk may come back.

    Args:
        path: of the file; it and its folder are made, readable by this user alone. None: in memory.
        sets_aside: a damaged file is renamed, and a new one begun; otherwise it is an error.
    """

    def __init__(
        self,
        path: Path | None,
        prepare: Callable[[sqlite3.Connection], None],
        *,
        sets_aside: bool = False,
    ) -> None:
        self.path = path
        self._prepare = prepare
        self._sets_aside = sets_aside
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._closed = False

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone.

        Raises:
            OSError, sqlite3.Error: the file cannot be opened or used.
        """
        with self._lock:
            if self._closed:
                raise sqlite3.ProgrammingError("The database was closed.")
            if self._db is None:
                self._db = self._open()
            try:
                with _decoding():
                    yield self._db
            except sqlite3.DatabaseError as error:
                if self._sets_aside and is_damaged(error):
                    self._db.close()
                    self._db = None
                    self._set_aside(error)
                raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection within a transaction, all of it or nothing; raises as `use`."""
        with self.use() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:  # interrupted as well as failed
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

    def freeing(self, delete: Callable[[], T]) -> T:
        """Call what deletes, on a full disk once more with the reserve: deleting writes, too.

        Raises:
            OSError, sqlite3.Error: as `delete`.
        """
        try:
            return delete()
        except sqlite3.OperationalError as error:
            if self._reserve is None or error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            with suppress(sqlite3.Error), self.use() as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._reserve.unlink(missing_ok=True)
            try:
                return delete()
            finally:
                with suppress(sqlite3.Error), self.use() as db:
                    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._keep_reserve()

    @property
    def _reserve(self) -> Path | None:
        return None if self.path is None else self.path.with_name(f"{self.path.name}-reserve")

    def _keep_reserve(self) -> None:
        if self._reserve is None:
            return
        try:
            if not self._reserve.exists():
                with open(self._reserve, "xb", opener=_private) as file:
                    file.write(bytes(RESERVE_BYTES))
        except OSError:  # a full disk: as much as there is would not be enough
            with suppress(OSError):
                self._reserve.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; later uses raise sqlite3.ProgrammingError."""
        with self._lock:
            self._closed = True
            if self._db is not None:
                self._db.close()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not (self._sets_aside and is_damaged(error)):
                raise
            self._set_aside(error)
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        db = sqlite3.connect(
            self.path or ":memory:", timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            with _decoding():
                self._prepare(db)
        except BaseException:  # interrupted as well as failed
            db.close()
            raise
        self._keep_reserve()
        return db

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        """Rename a damaged file and its log, which are kept."""
        assert self.path is not None
        mark = time.strftime("%Y%m%d-%H%M%S")
        aside = self.path.with_name(f"{self.path.name}.damaged-{mark}")
        for end in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self.path.with_name(self.path.name + end).rename(aside.with_name(aside.name + end))
        log.error(
            "%s is damaged (%s); it is kept as %s, and a new one begins", self.path, error, aside
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def _decoding() -> Iterator[None]:
    """Raise DatabaseError where a message of SQLite quotes a damaged file and is no UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        damaged = sqlite3.DatabaseError("the file holds names that are no UTF-8")
        damaged.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise damaged from error


def is_damaged(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF) in DAMAGED
