"""Files of clients and the batches over them: a folder and a SQLite file, bounded in bytes and age.

Each belongs to the key that it came with. A file is complete before it is listed, and a change of a
batch is one transaction, so a process that is killed leaves nothing half done; batches that it ran
are found by the next one.
"""

import fcntl
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import BodyTooLargeError

BUSY_S = 10.0  # that another process may hold the database
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, input TEXT NOT NULL, ended INTEGER NOT NULL,
    batch BLOB NOT NULL, changed_s INTEGER NOT NULL
) STRICT;
"""
_COLUMNS = "id, owner, name, purpose, num_bytes, created_s, expires_s"


class FilesInUseError(Exception):
    """Another process has the folder of files."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One complete file; times are seconds since 1970."""

    id: str
    owner: str
    name: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int


class FileStore:
    """Files by id, and batches as the JSON of their objects. Safe to use from several threads.

    Args:
        folder: of all; it is made.
        max_bytes: of all files together; more are refused.
        max_age_s: seconds that a file is kept, and an ended batch.
        clock: seconds since 1970.

    Raises:
        FilesInUseError: another server has the folder, and runs its batches.
        OSError, sqlite3.Error: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = 4 << 30,
        max_age_s: float = 30 * 86_400.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._max_bytes, self._max_age_s = folder, max_bytes, max_age_s
        self.clock = clock
        self._lock = threading.Lock()
        self._owned = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._owned, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
        except BlockingIOError:
            os.close(self._owned)
            raise FilesInUseError(f"{folder} is in use.") from None
        self._db = sqlite3.connect(
            folder / "files.db", timeout=BUSY_S, check_same_thread=False, isolation_level=None
        )
        (folder / "files.db").chmod(0o600)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(_SCHEMA)
        self._drop_unlisted()
        self.drop_old()

    @staticmethod
    def new_id() -> str:
        """The id of a file to come."""
        return f"file-{secrets.token_hex(12)}"

    def path(self, id: str) -> Path:
        """Where the content of a file is, or is to be written."""
        assert id.isascii()
        assert id.replace("-", "").isalnum()
        return self._folder / id

    # -- files ----------------------------------------------------------------------------------

    def room(self) -> int:
        """Bytes that further files may have."""
        with self._lock:
            (taken,) = self._db.execute("SELECT coalesce(sum(num_bytes), 0) FROM files").fetchone()
        return max(self._max_bytes - int(taken), 0)

    def check_room(self, num_bytes: int) -> None:
        """Raise BodyTooLargeError where a file of so many bytes is too much."""
        if num_bytes > (room := self.room()):
            raise BodyTooLargeError(
                f"The file has {num_bytes} bytes or more, and the server has room for {room} "
                f"beside the files that it keeps, {self._max_bytes} bytes of all; delete some."
            )

    def put(
        self, id: str, owner: str, name: str, purpose: str, max_age_s: float | None = None
    ) -> StoredFile:
        """List the file with its content at `path(id)`; the same again changes nothing."""
        now_s = int(self.clock())
        age_s = self._max_age_s if max_age_s is None else min(max_age_s, self._max_age_s)
        num_bytes = self.path(id).stat().st_size
        file = StoredFile(id, owner, name, purpose, num_bytes, now_s, now_s + int(age_s))
        with self._lock, self._db:
            self._db.execute(
                f"INSERT OR IGNORE INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (id, owner, name, purpose, num_bytes, now_s, file.expires_s),
            )
        return file

    def find(self, owner: str, id: str) -> StoredFile | None:
        """A file of an owner; None: there is none, or no longer."""
        with self._lock:
            row = self._db.execute(
                f"SELECT {_COLUMNS} FROM files WHERE id = ? AND owner = ? AND expires_s > ?",
                (id, owner, self.clock()),
            ).fetchone()
        return None if row is None else StoredFile(*row)

    def files(self, owner: str) -> list[StoredFile]:
        """All files of an owner, the newest first."""
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM files WHERE owner = ? AND expires_s > ?"
                " ORDER BY created_s DESC, rowid DESC",
                (owner, self.clock()),
            ).fetchall()
        return [StoredFile(*row) for row in rows]

    def delete(self, owner: str, id: str) -> bool:
        """Forget a file; False if it is not there. One that a batch reads stays until its end."""
        now_s = self.clock()
        with self._lock, self._db:
            gone = self._db.execute(
                "UPDATE files SET expires_s = 0 WHERE id = ? AND owner = ? AND expires_s > ?",
                (id, owner, now_s),
            )
        self.drop_old()
        return gone.rowcount > 0

    def drop_old(self) -> None:
        """Forget files and ended batches that are too old; what a batch still reads stays."""
        now_s = self.clock()
        with self._lock, self._db:
            old = self._db.execute(
                "SELECT id FROM files WHERE expires_s <= ? AND id NOT IN"
                " (SELECT input FROM batches WHERE NOT ended)",
                (now_s,),
            ).fetchall()
            self._db.executemany("DELETE FROM files WHERE id = ?", old)
            self._db.execute(
                "DELETE FROM batches WHERE ended AND changed_s < ?", (now_s - self._max_age_s,)
            )
        for (id,) in old:
            self._unlink(id)

    def _drop_unlisted(self) -> None:
        """Remove what processes that were killed left: contents that no list has.

        The answers of a batch that goes on are listed when it ends; its number is in their names.
        """
        known = {id for (id,) in self._db.execute("SELECT id FROM files")}
        running = self._db.execute("SELECT id FROM batches WHERE NOT ended").fetchall()
        kept = tuple(f"file-{id.removeprefix('batch_')}-" for (id,) in running)
        for path in self._folder.glob("file-*"):
            if path.name not in known and not path.name.startswith(kept):
                path.unlink()

    def _unlink(self, id: str) -> None:
        with suppress(FileNotFoundError):
            self.path(id).unlink()

    # -- batches --------------------------------------------------------------------------------

    def put_batch(self, owner: str, id: str, input_id: str, batch: bytes, *, ended: bool) -> None:
        """Keep the JSON of a batch, new or changed."""
        with self._lock, self._db:
            self._db.execute(
                "INSERT INTO batches (id, owner, input, ended, batch, changed_s)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                " ended = excluded.ended, batch = excluded.batch, changed_s = excluded.changed_s",
                (id, owner, input_id, ended, batch, int(self.clock())),
            )

    def batch(self, owner: str, id: str) -> bytes | None:
        """The JSON of a batch of an owner."""
        with self._lock:
            row = self._db.execute(
                "SELECT batch FROM batches WHERE id = ? AND owner = ?", (id, owner)
            ).fetchone()
        return None if row is None else row[0]

    def batches(self, owner: str) -> list[bytes]:
        """The JSON of all batches of an owner, the newest first."""
        with self._lock:
            rows = self._db.execute(
                "SELECT batch FROM batches WHERE owner = ? ORDER BY rowid DESC", (owner,)
            ).fetchall()
        return [batch for (batch,) in rows]

    def next_batches(self) -> list[tuple[str, bytes]]:
        """Each owner with the JSON of its oldest batch that has not ended."""
        with self._lock:
            rows = self._db.execute(  # SQLite takes the other columns from the row of the minimum
                "SELECT owner, batch, min(rowid) FROM batches WHERE NOT ended GROUP BY owner"
            ).fetchall()
        return [(owner, batch) for owner, batch, _ in rows]

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()
            os.close(self._owned)
