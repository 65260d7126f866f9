"""Conversations on this disk: one SQLite file, shared by the server's page and the terminal.

A conversation is a tree of messages: an edited question or a second answer is another child of the
same parent, and the conversation's `head` names the leaf that is shown. Every conversation belongs
to an owner, a text that follows from an API key (`owner_of`), and no owner sees another's.

Each message is one transaction (`database.py`); several processes may use the file at once.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .database import Database, reported
from .errors import (
    ConversationNotFoundError,
    HistoryError,
    InvalidRequestError,
    StorageFullError,
    wrong_value,
)
from .files import data_folder

PLACE = "MLXINFER_HISTORY"  # environment variable: the file, or `off`
ROLES = ("system", "user", "assistant", "tool")
MAX_TITLE_CHARS = 200
MAX_PICTURE_BYTES = 256 << 20  # of all pictures of an owner, as text of data URLs
MAX_TEXT_BYTES = 512 << 20  # of all messages of an owner, without pictures
MAX_SETTINGS_BYTES = 1 << 20  # of a conversation
EXCERPT_CHARS = 60  # before the word that was found; twice as many follow
TRIGRAM = 3  # characters: the index finds no shorter words
_ID = re.compile(r"[A-Za-z0-9_-]{8,64}", re.ASCII)
_SPECIAL, _ESCAPED = re.compile(r"([%_\\])"), r"\\\1"  # of a LIKE pattern
_QUOTES = re.compile(r'["\n]')
_VERSION = 1
_reported = partial(reported, HistoryError, "The history")
log = logging.getLogger("mlxinfer")
_SCHEMA = (
    """CREATE TABLE conversations (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, title TEXT NOT NULL, model TEXT NOT NULL,
        settings TEXT NOT NULL, head TEXT, created_s REAL NOT NULL, changed_s REAL NOT NULL
    ) STRICT""",
    "CREATE INDEX newest ON conversations (owner, changed_s)",
    """CREATE TABLE messages (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        parent TEXT, role TEXT NOT NULL, content TEXT NOT NULL, reasoning TEXT NOT NULL,
        details TEXT NOT NULL, created_s REAL NOT NULL
    ) STRICT""",
    "CREATE INDEX members ON messages (conversation)",
    """CREATE VIRTUAL TABLE found USING fts5 (
        content, content='messages', content_rowid='number', tokenize='trigram'
    )""",
    """CREATE TRIGGER added AFTER INSERT ON messages BEGIN
        INSERT INTO found (rowid, content) VALUES (new.number, new.content);
    END;""",
    """CREATE TRIGGER removed AFTER DELETE ON messages BEGIN
        INSERT INTO found (found, rowid, content) VALUES ('delete', old.number, old.content);
    END;""",
    """CREATE TRIGGER changed AFTER UPDATE OF content ON messages BEGIN
        INSERT INTO found (found, rowid, content) VALUES ('delete', old.number, old.content);
        INSERT INTO found (rowid, content) VALUES (new.number, new.content);
    END;""",
)


# Pictures lie beside their messages, so that the oldest can go without a change of these. Owners of
# keys with names lie beside what follows from the keys themselves, which is all that the terminal
# knows. A file of an older version gets these tables when it is opened; an older version leaves
# them alone.
_PICTURES = """CREATE TABLE IF NOT EXISTS pictures (
    number INTEGER PRIMARY KEY, message INTEGER NOT NULL
    REFERENCES messages (number) ON DELETE CASCADE, place INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, url TEXT NOT NULL
) STRICT"""
_NAMES = """CREATE TABLE IF NOT EXISTS named (
    of_key TEXT PRIMARY KEY, owner TEXT NOT NULL
) STRICT"""
_PINS = """CREATE TABLE IF NOT EXISTS pins (
    conversation TEXT PRIMARY KEY REFERENCES conversations (id) ON DELETE CASCADE
) STRICT"""
_PINNED = "id IN (SELECT conversation FROM pins)"
_PICTURES_OF = "CREATE INDEX IF NOT EXISTS pictures_of ON pictures (message)"
# How much text an owner has is not read off the messages: that would read all of them.
_SIZE_OF = "length(CAST(new.content || new.reasoning || new.details AS BLOB))"
_SIZES = (
    """CREATE TABLE sizes (
        message INTEGER PRIMARY KEY REFERENCES messages (number) ON DELETE CASCADE,
        conversation TEXT NOT NULL, num_bytes INTEGER NOT NULL
    ) STRICT""",
    "CREATE INDEX sizes_of ON sizes (conversation)",
    f"INSERT INTO sizes SELECT number, conversation, {_SIZE_OF} FROM messages AS new",
    f"""CREATE TRIGGER sized AFTER INSERT ON messages BEGIN
        INSERT INTO sizes VALUES (new.number, new.conversation, {_SIZE_OF});
    END;""",
    f"""CREATE TRIGGER resized AFTER UPDATE ON messages BEGIN
        UPDATE sizes SET num_bytes = {_SIZE_OF} WHERE message = new.number;
    END;""",
)
_TEXT_BYTES = """SELECT coalesce(sum(s.num_bytes), 0) FROM conversations c
    JOIN sizes s ON s.conversation = c.id WHERE c.owner = ?"""
_FORGET = """WITH sums AS (
    SELECT p.number, sum(p.num_bytes) OVER (ORDER BY p.number DESC) AS so_far FROM pictures p
    JOIN messages m ON m.number = p.message JOIN conversations c ON c.id = m.conversation
    WHERE c.owner = ?
) DELETE FROM pictures WHERE number IN (SELECT number FROM sums WHERE so_far > ?)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """One message of a conversation."""

    id: str
    parent: str | None  # the message before it; None: it is the first
    role: str
    content: str
    reasoning: str = ""
    # JSON data beside the text: attachments, tool calls, token counts, times. Each of its
    # `pictures` has a name and a data URL, or null where it is no longer kept.
    details: dict[str, Any] = field(default_factory=dict)
    created_s: float = 0.0  # since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation without its messages."""

    id: str
    title: str
    model: str
    # JSON data of the program that made it: system message, sampling, schema
    settings: dict[str, Any]
    head: str | None  # the message at the end of the branch that is shown; None: there is none
    created_s: float
    changed_s: float
    pinned: bool  # the page lists it above the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A message that a search found, and a piece of it around the words."""

    conversation: Conversation
    message: str
    role: str
    excerpt: str
    created_s: float


def owner_of(key_digest: bytes) -> str:
    """The owner of what a key without a name stores, from the key's SHA-256: 32 hex digits."""
    return hashlib.sha256(b"mlxinfer history\0" + key_digest).hexdigest()[:32]


def owner_named(name: str) -> str:
    """The owner of what a key with a name stores: the key may change, the owner stays."""
    return f"name {name}"


def owner_of_key(key: str | None) -> str:
    """The owner from a key without a name itself; no key: ""."""
    return owner_of(hashlib.sha256(key.encode()).digest()) if key else ""


def default_place() -> Path | None:
    """The history file of this user; None where MLXINFER_HISTORY is `off`."""
    given = os.environ.get(PLACE)
    if given:
        return None if given == "off" else Path(given).expanduser()
    return data_folder() / "history.db"


def pictures_kept(message: StoredMessage) -> list[str]:
    return [
        picture["url"] for picture in _pictures_of(message.details) if picture["url"] is not None
    ]


def text_sent(message: StoredMessage, *, sees: bool = False) -> str:
    """The text of a message as a model is sent it: files that were attached come first.

    Pictures are named in it. If the model `sees`, only those are that are no longer kept.
    """
    files = [
        '<file name="{}">\n{}\n</file>\n\n'.format(_QUOTES.sub("'", file["name"]), file["text"])
        for file in message.details.get("attachments", ())
    ]
    files += [
        f"[picture: {picture['name']}]\n\n"
        for picture in _pictures_of(message.details)
        if not sees or picture["url"] is None
    ]
    return "".join(files) + message.content


def new_id() -> str:
    return secrets.token_hex(16)


def title_of(text: str) -> str:
    """The first words of a first message."""
    words = " ".join(text[:1000].split())
    return words if len(words) <= 60 else f"{words[:59].rstrip()}…"


class History:
    """The conversations of one file. Methods may be called from any thread.

    Args:
        path: of the file; it and its folder are made, readable by this user alone.
        keeps_on: a file that cannot be opened is tried again at each use, and a damaged one is set
            aside, for a server that goes on without it.

    Raises:
        HistoryError: the file cannot be opened, is no history, or was written by a newer version.
        StorageFullError: the disk has no room for a new file.
    """

    def __init__(self, path: Path, *, keeps_on: bool = False) -> None:
        self.path = path
        self._file = Database(path, _prepare, sets_aside=keeps_on)
        try:
            with _reported(), self._file.use():
                pass
        except (HistoryError, StorageFullError) as error:
            if not keeps_on:
                self._file.close()
                raise
            log.warning("%s", error)

    def close(self) -> None:
        self._file.close()

    def name_owner(self, of_key: str, owner: str) -> None:
        """Note that a key's conversations belong to `owner`; those that it has go there.

        Args:
            of_key: the owner that follows from the key itself.
            owner: that the key has at a server, by its name there; or `of_key`: it has no name.
        """
        with _reported(), self._file.transaction() as db:
            db.execute("UPDATE conversations SET owner = ? WHERE owner = ?", (owner, of_key))
            db.execute("INSERT OR REPLACE INTO named VALUES (?, ?)", (of_key, owner))

    def owner_of_key(self, key: str | None) -> str:
        """The owner of a key's conversations, whether or not a server has a name for it."""
        of_key = owner_of_key(key)
        rows = self._read("SELECT owner FROM named WHERE of_key = ?", (of_key,))
        return rows[0]["owner"] if rows else of_key

    def conversations(
        self,
        owner: str,
        *,
        limit: int = -1,
        before_s: float | None = None,
        pinned: bool | None = None,
    ) -> list[Conversation]:
        """The conversations of an owner, the last changed first.

        Args:
            limit: how many, at most; negative: all.
            before_s: only those that were changed before it.
            pinned: only those that are pinned, or those that are not; None: both.
        """
        only = "" if pinned is None else f"AND {'' if pinned else 'NOT '}{_PINNED} "
        rows = self._read(
            f"SELECT *, {_PINNED} AS pinned FROM conversations WHERE owner = ? AND changed_s < ? "
            f"{only}ORDER BY changed_s DESC LIMIT ?",
            (owner, sys.float_info.max if before_s is None else before_s, limit),
        )
        return [_conversation(row) for row in rows]

    def conversation(self, owner: str, id: str) -> Conversation:
        """One conversation. Raises ConversationNotFoundError: the owner has none of this id."""
        rows = self._read(
            f"SELECT *, {_PINNED} AS pinned FROM conversations WHERE id = ? AND owner = ?",
            (id, owner),
        )
        if not rows:
            raise ConversationNotFoundError(f"There is no conversation {id[:64]!r}.")
        return _conversation(rows[0])

    def messages(self, owner: str, id: str) -> list[StoredMessage]:
        """All messages of a conversation, of all branches, in the order in which they were made."""
        self.conversation(owner, id)
        rows = self._read("SELECT * FROM messages WHERE conversation = ? ORDER BY number", (id,))
        shown = self._read(
            "SELECT p.message, p.place, p.url FROM pictures p "
            "JOIN messages m ON m.number = p.message WHERE m.conversation = ?",
            (id,),
        )
        urls = {(message, place): url for message, place, url in shown}
        return [_message(row, urls) for row in rows]

    def branch(self, owner: str, id: str) -> list[StoredMessage]:
        by_id = {message.id: message for message in self.messages(owner, id)}
        at, messages = self.conversation(owner, id).head, []
        while at is not None and at in by_id:
            messages.append(by_id[at])
            at = by_id[at].parent
        return messages[::-1]

    def save_conversation(
        self,
        owner: str,
        id: str,
        *,
        title: str | None = None,
        model: str | None = None,
        settings: dict[str, Any] | None = None,
        head: str | None = None,
        pinned: bool | None = None,
    ) -> Conversation:
        """Make a conversation, or change what is given of it.

        Raises:
            InvalidRequestError: the id is malformed or taken, `head` is no message of it, or the
                settings are too large.
            StorageFullError: the disk is full.
        """
        now_s = time.time()
        values = {
            "title": None if title is None else title[:MAX_TITLE_CHARS],
            "model": model,
            "settings": None if settings is None else json.dumps(settings),
            "head": head,
        }
        given = {name: value for name, value in values.items() if value is not None}
        if len(given.get("settings", "")) > MAX_SETTINGS_BYTES:
            raise InvalidRequestError.of("settings", f"has more than {MAX_SETTINGS_BYTES:,} bytes.")
        with self._transaction() as db:
            self._claim(db, owner, id, now_s)
            if head is not None:
                _check_member(db, id, head, "head")
            for name, value in given.items():  # names are ours, never a client's
                db.execute(f"UPDATE conversations SET {name} = ? WHERE id = ?", (value, id))
            if pinned:
                db.execute("INSERT OR IGNORE INTO pins VALUES (?)", (id,))
            elif pinned is not None:
                db.execute("DELETE FROM pins WHERE conversation = ?", (id,))
        return self.conversation(owner, id)

    def save_message(self, owner: str, id: str, message: StoredMessage) -> None:
        """Add a message to a conversation and make it the head; one with a known id is replaced.

        The conversation is made if it is not there, and its first question gives it a title. A
        message keeps its parent. An owner's oldest pictures beyond MAX_PICTURE_BYTES are forgotten.

        Raises:
            InvalidRequestError: an id is malformed or taken, the parent is not in the
                conversation, there is no such role, or a picture has no name or no URL.
            StorageFullError: the disk is full, or the owner has more text than MAX_TEXT_BYTES.
        """
        if message.role not in ROLES:
            raise wrong_value("role", message.role, f"one of {', '.join(ROLES)}")
        _check_id(message.id)
        now_s = time.time()
        details, urls = _apart(message.details)
        with self._transaction() as db:
            self._claim(db, owner, id, now_s)
            if message.parent is not None:
                _check_member(db, id, message.parent, "parent")
            db.execute(
                "INSERT INTO messages (id, conversation, parent, role, content, reasoning, "
                "details, created_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET content = excluded.content, "
                "reasoning = excluded.reasoning, details = excluded.details "
                "WHERE conversation = excluded.conversation",
                (
                    *(message.id, id, message.parent, message.role, message.content),
                    *(message.reasoning, json.dumps(details), message.created_s or now_s),
                ),
            )
            _check_member(db, id, message.id, "id")
            _check_size(db, owner)
            if urls:
                _keep_pictures(db, owner, message.id, urls)
            names = ", ".join(picture["name"] for picture in _pictures_of(details))
            title = title_of(message.content or names) if message.role == "user" else ""
            db.execute(
                "UPDATE conversations SET head = ?, changed_s = ?, "
                "title = CASE title WHEN '' THEN ? ELSE title END WHERE id = ?",
                (message.id, now_s, title, id),
            )

    def delete(self, owner: str, id: str) -> None:
        """Delete a conversation; its text is overwritten in the file.

        Raises:
            ConversationNotFoundError: the owner has none of this id.
        """
        self.conversation(owner, id)

        def gone() -> None:
            with self._file.transaction() as db:
                db.execute("DELETE FROM conversations WHERE id = ? AND owner = ?", (id, owner))

        with _reported():
            self._file.freeing(gone)
        self._read("PRAGMA wal_checkpoint(TRUNCATE)", ())

    def search(self, owner: str, words: str, *, limit: int = 50) -> list[Match]:
        """Messages that hold every one of the words, as parts of words too, the newest first."""
        given = words.split()
        long = [word for word in given if len(word) >= TRIGRAM]
        wheres, values = ["c.owner = ?"], [owner]
        if long:
            wheres.append("m.number IN (SELECT rowid FROM found WHERE found MATCH ?)")
            values.append(" AND ".join('"{}"'.format(word.replace('"', '""')) for word in long))
        for word in given:
            if word not in long:
                wheres.append("m.content LIKE ? ESCAPE '\\'")
                values.append(f"%{_SPECIAL.sub(_ESCAPED, word)}%")
        if not given:
            return []
        rows = self._read(
            "SELECT m.id AS found, m.role, m.content, m.created_s AS said_s, c.*, "
            f"c.{_PINNED} AS pinned FROM messages m "
            f"JOIN conversations c ON c.id = m.conversation WHERE {' AND '.join(wheres)} "
            "ORDER BY m.number DESC LIMIT ?",
            (*values, limit),
        )
        return [
            Match(
                conversation=_conversation(row),
                message=row["found"],
                role=row["role"],
                excerpt=excerpt(row["content"], given),
                created_s=row["said_s"],
            )
            for row in rows
        ]

    def _read(self, statement: str, values: Sequence[Any]) -> list[sqlite3.Row]:
        with _reported(), self._file.use() as db:
            return db.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _reported(), self._file.transaction() as db:
            yield db

    def _claim(self, db: sqlite3.Connection, owner: str, id: str, now_s: float) -> None:
        """Make the conversation, unless the owner has it."""
        _check_id(id)
        db.execute(
            "INSERT INTO conversations VALUES (?, ?, '', '', '{}', NULL, ?, ?) "
            "ON CONFLICT (id) DO NOTHING",
            (id, owner, now_s, now_s),
        )
        (holder,) = db.execute("SELECT owner FROM conversations WHERE id = ?", (id,)).fetchone()
        if holder != owner:
            raise InvalidRequestError(f"The id {id} is taken; choose another.", param="id")


def _pictures_of(details: dict[str, Any]) -> list[dict[str, Any]]:
    return details.get("pictures") or []


def _apart(details: dict[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
    given = _pictures_of(details)
    if not given:
        return details, {}
    if not isinstance(given, list) or not all(_is_picture(picture) for picture in given):
        raise InvalidRequestError(
            "details.pictures is a list of pictures, each with a name and a data: URL or null.",
            param="details",
        )
    urls = {
        place: picture["url"] for place, picture in enumerate(given) if picture["url"] is not None
    }
    return {**details, "pictures": [{**picture, "url": None} for picture in given]}, urls


def _is_picture(given: Any) -> bool:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return False
    url = given.get("url", ...)
    return url is None or (isinstance(url, str) and url.startswith("data:image/"))


def _keep_pictures(db: sqlite3.Connection, owner: str, message: str, urls: dict[int, str]) -> None:
    """Store the pictures of a message; the owner's oldest go where there are too many."""
    (number,) = db.execute("SELECT number FROM messages WHERE id = ?", (message,)).fetchone()
    db.execute("DELETE FROM pictures WHERE message = ?", (number,))
    db.executemany(
        "INSERT INTO pictures (message, place, num_bytes, url) VALUES (?, ?, ?, ?)",
        [(number, place, len(url), url) for place, url in urls.items()],
    )
    db.execute(_FORGET, (owner, MAX_PICTURE_BYTES))


def _check_size(db: sqlite3.Connection, owner: str) -> None:
    (num_bytes,) = db.execute(_TEXT_BYTES, (owner,)).fetchone()
    if num_bytes > MAX_TEXT_BYTES:
        raise StorageFullError(
            f"The conversations of this key would have more than {MAX_TEXT_BYTES:,} bytes; delete "
            "some."
        )


def _check_member(db: sqlite3.Connection, id: str, message: str, param: str) -> None:
    row = db.execute(
        "SELECT 1 FROM messages WHERE id = ? AND conversation = ?", (message, id)
    ).fetchone()
    if row is None:
        raise InvalidRequestError(
            f"{param} is {message[:64]!r}, which is no message of this conversation.", param=param
        )


def _prepare(db: sqlite3.Connection) -> None:
    db.row_factory = sqlite3.Row
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
        db.execute(f"PRAGMA {pragma}")
    db.execute("PRAGMA secure_delete = ON")
    db.execute("BEGIN IMMEDIATE")  # of two processes one makes the tables
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {_VERSION}")
    if version <= _VERSION:
        for statement in (_PICTURES, _NAMES, _PINS, _PICTURES_OF):
            db.execute(statement)
        if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sizes'").fetchone():
            for statement in _SIZES:
                db.execute(statement)
    db.execute("COMMIT")
    if version > _VERSION:
        raise HistoryError("The history was written by a newer mlxinfer; update this one.")


def excerpt(text: str, words: Sequence[str]) -> str:
    """A piece of a text with the first of the words that stands in it."""
    lowered = text.lower()
    places = [place for word in words if (place := lowered.find(word.lower())) >= 0]
    at = min(places, default=0)
    start, end = max(at - EXCERPT_CHARS, 0), at + 2 * EXCERPT_CHARS
    piece = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{piece}{'…' if end < len(text) else ''}"


def _check_id(id: str) -> None:
    if not _ID.fullmatch(id):
        raise InvalidRequestError(
            "An id is 8 to 64 letters, digits, dashes and underscores.", param="id"
        )


def _conversation(row: sqlite3.Row) -> Conversation:
    fields = {name: row[name] for name in Conversation.__dataclass_fields__}
    changed = {"settings": json.loads(row["settings"]), "pinned": bool(row["pinned"])}
    return Conversation(**{**fields, **changed})


def _message(row: sqlite3.Row, urls: dict[tuple[int, int], str]) -> StoredMessage:
    fields = {name: row[name] for name in StoredMessage.__dataclass_fields__}
    details = json.loads(row["details"])
    for place, picture in enumerate(_pictures_of(details)):
        picture["url"] = urls.get((row["number"], place))
    return StoredMessage(**{**fields, "details": details})
