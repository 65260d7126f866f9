"""Stored responses: one SQLite file, bounded in bytes and age, each response with its owner.

A write is one transaction in a write-ahead log: a process that is killed loses at most the response
that it was writing.
"""

import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BUSY_S = 10.0  # that another process may hold the file
MAX_CHAIN = 1000  # responses, each the previous one of the next
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, input BLOB NOT NULL,
    response BLOB NOT NULL, num_bytes INTEGER NOT NULL, used_s REAL NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS oldest ON responses (used_s);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response and the items of its own request, both as JSON."""

    id: str
    previous: str | None
    input: bytes
    response: bytes


class ResponseStore:
    """Responses by id. Safe to use from several threads; several processes may share the file.

    Args:
        path: of the file; its folder is made. None: in memory.
        max_bytes: of requests and responses together; the least recently used go first.
        max_age_s: seconds since a response was last used, by itself or through a later one.
        clock: seconds since 1970.

    Raises:
        OSError, sqlite3.Error: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        max_bytes: int = 1 << 30,
        max_age_s: float = 30 * 86_400.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._max_bytes, self._max_age_s, self._clock = max_bytes, max_age_s, clock
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            path or ":memory:", timeout=BUSY_S, check_same_thread=False, isolation_level=None
        )
        if path is not None:
            path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._db.executescript(_SCHEMA)

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep a response, and drop what is too old or too much."""
        now_s, size = self._clock(), len(stored.input) + len(stored.response)
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (stored.id, owner, stored.previous, stored.input, stored.response, size, now_s),
            )
            self._db.execute("DELETE FROM responses WHERE used_s < ?", (now_s - self._max_age_s,))
            self._drop_excess()

    def _drop_excess(self) -> None:
        (total,) = self._db.execute("SELECT coalesce(sum(num_bytes), 0) FROM responses").fetchone()
        if total <= self._max_bytes:
            return
        oldest = self._db.execute("SELECT id, num_bytes FROM responses ORDER BY used_s, rowid")
        for found, size in oldest.fetchall():
            if total <= self._max_bytes:
                break
            self._db.execute("DELETE FROM responses WHERE id = ?", (found,))
            total -= size

    def chain(self, owner: str, id: str) -> list[StoredResponse] | None:
        """A response and all before it, the first one first; None if one is not there.

        All of them count as used now.
        """
        found: list[StoredResponse] = []
        wanted: str | None = id
        with self._lock, self._db:
            while wanted is not None and len(found) < MAX_CHAIN:
                row = self._db.execute(
                    "SELECT id, previous, input, response FROM responses WHERE id = ? AND owner = ?"
                    " AND used_s >= ?",
                    (wanted, owner, self._clock() - self._max_age_s),
                ).fetchone()
                if row is None:
                    return None
                stored = StoredResponse(id=row[0], previous=row[1], input=row[2], response=row[3])
                found.append(stored)
                wanted = stored.previous
            used = [(self._clock(), stored.id) for stored in found]
            self._db.executemany("UPDATE responses SET used_s = ? WHERE id = ?", used)
        return found[::-1]

    def delete(self, owner: str, id: str) -> bool:
        """Forget a response; False if it is not there."""
        with self._lock, self._db:
            gone = self._db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner))
            return gone.rowcount > 0

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()
