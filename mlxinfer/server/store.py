"""Responses of the responses API: those that are stored, and those that run in the background.

Stored responses are in one SQLite file, bounded in bytes and age, each response with its owner.

When the file is full, the owner with the most bytes for its weight loses the least recently used
response: no key can push another's responses out of its share.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..database import Database, reported
from ..errors import StorageFullError
from .errors import StoreError
from .http import KEEP_ALIVE

MAX_CHAIN = 1000  # responses, each the previous one of the next
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, input BLOB NOT NULL,
    response BLOB NOT NULL, num_bytes INTEGER NOT NULL, used_s REAL NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS oldest ON responses (used_s);
CREATE TABLE IF NOT EXISTS events (id TEXT PRIMARY KEY, frames BLOB NOT NULL) STRICT;
CREATE TRIGGER IF NOT EXISTS forget_events AFTER DELETE ON responses
BEGIN DELETE FROM events WHERE id = old.id; END;
"""
_FRAME_END = b"\n\n"
_reported = partial(reported, StoreError, "Stored responses")
log = logging.getLogger("mlxinfer.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response and the items of its own request, both as JSON.

    `events` has the frames of its stream, if it ran in the background.
    """

    id: str
    previous: str | None
    input: bytes
    response: bytes
    events: bytes = b""


class RunningResponse:
    """A response that is generated in the background, whether or not a client listens.

    Lives on one event loop.

    Args:
        response: as it is now; its writer changes it.

    Attributes:
        events: the frame of each event so far, at the index of its sequence number.
        task: generates the response; ends after the response was stored.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self.events: list[bytes] = []
        self.task: asyncio.Task[None] | None = None
        self._ended = False
        self._news = asyncio.Event()

    def add(self, frames: bytes) -> None:
        """Take in frames of events, and wake the clients; comments are left out."""
        self.events += split_frames(frames)
        self._news.set()
        self._news = asyncio.Event()

    def end(self) -> None:
        self._ended = True
        self.add(b"")

    async def follow(self, place: int) -> AsyncIterator[bytes]:
        """Yield the events from `place` on until the last one, and comments in a silence."""
        while True:
            news, fresh = self._news, self.events[place:]
            place += len(fresh)
            if fresh:
                yield b"".join(fresh)
            elif self._ended:
                return
            else:
                await news.wait()
                if not self.events[place:]:
                    yield KEEP_ALIVE

    async def cancel(self) -> None:
        assert self.task is not None
        if self.response["status"] in ("queued", "in_progress"):
            self.response["status"] = "cancelled"
            self.task.cancel()
        await asyncio.wait({self.task})


def split_frames(frames: bytes) -> list[bytes]:
    return [f + _FRAME_END for f in frames.split(_FRAME_END) if f.startswith(b"event:")]


class ResponseStore:
    """Responses by id. Safe to use from several threads; several processes may share the file.

    A damaged file is set aside. A file that cannot be opened is tried again at each use.

    `running` has the responses that run in the background, by owner and id.

    Args:
        path: of the file; its folder is made. None: in memory.
        max_age_s: seconds since a response was last used, by itself or through a later one.
        clock: seconds since 1970.

    Raises (all methods):
        StoreError: the file cannot be used.
        StorageFullError: the disk is full.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        max_bytes: int = 1 << 30,
        max_age_s: float = 30 * 86_400.0,
        weight_of: Callable[[str], float] = lambda owner: 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._weight_of = weight_of
        self.running: dict[tuple[str, str], RunningResponse] = {}
        self._max_bytes, self._max_age_s, self._clock = max_bytes, max_age_s, clock
        self._file = Database(path, _prepare, sets_aside=path is not None)
        try:
            with _reported(), self._file.use():
                pass
        except (StoreError, StorageFullError) as error:
            log.warning("no responses are stored until %s can be used: %s", path, error)

    def put(self, owner: str, stored: StoredResponse) -> None:
        now_s = self._clock()
        size = len(stored.input) + len(stored.response) + len(stored.events)
        with _reported(), self._file.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (stored.id, owner, stored.previous, stored.input, stored.response, size, now_s),
            )
            if stored.events:
                db.execute("INSERT INTO events VALUES (?, ?)", (stored.id, stored.events))
            db.execute("DELETE FROM responses WHERE used_s < ?", (now_s - self._max_age_s,))
            self._drop_excess(db)

    def _drop_excess(self, db: sqlite3.Connection) -> None:
        held = dict(
            db.execute("SELECT owner, sum(num_bytes) FROM responses GROUP BY owner").fetchall()
        )
        while sum(held.values()) > self._max_bytes:
            owner = max(held, key=lambda holder: held[holder] / self._weight_of(holder))
            oldest, size = db.execute(
                "SELECT id, num_bytes FROM responses WHERE owner = ?"
                " ORDER BY used_s, rowid LIMIT 1",
                (owner,),
            ).fetchone()
            db.execute("DELETE FROM responses WHERE id = ?", (oldest,))
            held[owner] -= size

    def chain(self, owner: str, id: str) -> list[StoredResponse] | None:
        """A response and all before it, oldest first; None if one is missing.

        All of them count as used now.
        """
        chain: list[StoredResponse] = []
        wanted: str | None = id
        with _reported(), self._file.transaction() as db:
            while wanted is not None and len(chain) < MAX_CHAIN:
                row = db.execute(
                    "SELECT id, previous, input, response FROM responses WHERE id = ? AND owner = ?"
                    " AND used_s >= ?",
                    (wanted, owner, self._clock() - self._max_age_s),
                ).fetchone()
                if row is None:
                    return None
                stored = StoredResponse(id=row[0], previous=row[1], input=row[2], response=row[3])
                chain.append(stored)
                wanted = stored.previous
            used = [(self._clock(), stored.id) for stored in chain]
            db.executemany("UPDATE responses SET used_s = ? WHERE id = ?", used)
        return chain[::-1]

    def events(self, id: str) -> list[bytes]:
        with _reported(), self._file.use() as db:
            row = db.execute("SELECT frames FROM events WHERE id = ?", (id,)).fetchone()
        return [] if row is None else split_frames(row[0])

    def delete(self, owner: str, id: str) -> bool:
        def gone() -> bool:
            with self._file.transaction() as db:
                statement = "DELETE FROM responses WHERE id = ? AND owner = ?"
                return db.execute(statement, (id, owner)).rowcount > 0

        with _reported():
            return self._file.freeing(gone)

    def close(self) -> None:
        self._file.close()


def _prepare(db: sqlite3.Connection) -> None:
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "auto_vacuum = INCREMENTAL"):
        db.execute(f"PRAGMA {pragma}")
    db.executescript(_SCHEMA)
