"""Saved sessions: names for prompts whose entries stay on the disk until the session is removed.

`root/sessions/<digest of owner and name>/` has a second name (a hard link) for each entry file of
the prompt, and `session.kv`, an entry without ids whose payload is `SavedSession` as JSON. An entry
file with two names is pinned: the disk tier does not remove it, and counts it once. An exported
session is these files one after another, `session.kv` first.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from ...errors import InvalidRequestError, OverloadedError, StorageFullError
from ..prefix.index import PageNames, group_key, page_key
from .entry import Entry, decode, encode, read_entry
from .tier import DiskTier

MAX_HEAD_BYTES = 16 << 20  # of a session without its entries: two million tokens
COPY_BYTES = 1 << 20
RETRY_S = 10.0
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # files may hold anything
Seconds = Annotated[int, Meta(ge=0, lt=1 << 36)]


class DamagedSessionError(InvalidRequestError, code="damaged_session"):
    """A saved session, or a file that should hold one, is not whole and sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPrompt:
    """The whole pages of a prompt, and where their entries are."""

    # what their bytes depend on: the weights, the versions, the format of the pages
    identity: tuple[str, ...]
    root: bytes  # the key from which the keys of their entries follow
    token_ids: tuple[Count, ...]  # as prompts are compared
    page_size: Count  # tokens
    places: tuple[tuple[Count, Count], ...]  # (page number, layer group) of each entry
    adapter: str | None = None  # identity of the adapter's files; None: the model's weights alone
    rope_variant: int = 0  # of the model's frequencies

    @property
    def is_sound(self) -> bool:
        size, ids = self.page_size, self.token_ids
        numbers = [number for number, _ in self.places]
        is_whole = bool(numbers) and 0 < size * (max(numbers) + 1) == len(ids)
        return is_whole and len(set(self.places)) == len(numbers)

    def keys(self, root: bytes) -> list[tuple[bytes, bytes]]:
        """(parent, own key) of each entry where keys follow from `root`."""
        names = PageNames(root, self.token_ids, self.page_size)
        places = self.places
        return [(names.name(n - 1), group_key(names.name(n), group)) for n, group in places]

    def page(self, number: int) -> tuple[int, ...]:
        return self.token_ids[number * self.page_size : (number + 1) * self.page_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """A prompt under a name."""

    name: str  # letters, digits, '.', '_' and '-'
    owner: str | None  # of the API key that saved it; None: the server had none
    model: str  # by its name on the server
    created_s: Seconds  # seconds since 1970
    num_bytes: int  # of the entries
    prompt: SavedPrompt

    def head(self) -> Entry:
        root = self.prompt.root
        return Entry(page_key(root, ()), root, (), memoryview(msgspec.json.encode(self)))

    @classmethod
    def of(cls, head: Entry | None) -> "SavedSession":
        """The session of an entry; raises DamagedSessionError if it holds none."""
        with contextlib.suppress(msgspec.DecodeError):
            session = None if head is None else msgspec.json.decode(bytes(head.payload), type=cls)
            if session is not None and session.prompt.is_sound:
                return session
        raise DamagedSessionError(
            "This is no saved session: its beginning is damaged, or it is a file of another kind "
            "or of another version of mlxinfer."
        )


class SavedSessions:
    """The saved sessions of a disk cache. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "sessions"
        self._lock = threading.Lock()  # while one session takes the place of another
        for place in sorted(self.folder.glob("*.*"), key=_written_s, reverse=True):
            with contextlib.suppress(OSError):
                _end_save(place)

    def all_of(self, owner: str | None) -> list[SavedSession]:
        """The sessions of an owner, by name; those that cannot be read are left out."""
        sessions: list[SavedSession] = []
        for place in self.folder.glob("[!.]" * 32):
            with contextlib.suppress(DamagedSessionError, OSError):
                sessions.append(_session_in(place))
        return sorted([s for s in sessions if s.owner == owner], key=lambda session: session.name)

    def find(self, name: str, owner: str | None) -> SavedSession | None:
        """The session of this name; None: the owner has none. Raises DamagedSessionError."""
        try:
            return _session_in(self._place(name, owner))
        except FileNotFoundError:
            return None

    def save(self, session: SavedSession, tier: DiskTier, keys: Iterable[bytes]) -> None:
        """Pin the entries of a session, which replaces one of the same name.

        Args:
            keys: of all entries; each is pinned before the next is asked for.

        Raises:
            OverloadedError: an entry is not there any more.
            StorageFullError: the disk is full.
            InvalidRequestError: the file system has no hard links.
        """
        place = self._place(session.name, session.owner)
        new, old = (place.with_name(f"{place.name}.{secrets.token_hex(8)}") for _ in range(2))
        new.mkdir(parents=True, mode=0o700)
        saving: int | None = None
        try:
            saving = os.open(new, os.O_RDONLY)  # gone if the name was removed just now
            fcntl.flock(saving, fcntl.LOCK_EX)
            for key in keys:
                os.link(tier.path(key), new / _name(key))
            with open(new / "session.kv", "wb") as file:
                file.writelines(encode(session.head()))
                file.flush()
                os.fsync(file.fileno())
            with self._lock:
                with contextlib.suppress(FileNotFoundError):
                    place.rename(old)
                new.rename(place)
        except FileNotFoundError:
            raise OverloadedError(
                "Other pages took the room of the session while it was saved; save it again.",
                retry_after_s=RETRY_S,
            ) from None
        except OSError as error:
            if (full := StorageFullError.cause(error)) is not None:
                raise full from None
            raise InvalidRequestError(
                f"The session cannot be saved: {error.strerror}. Sessions need a file system with "
                "hard links."
            ) from None
        finally:
            if saving is not None:
                os.close(saving)
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def restore(self, session: SavedSession, tier: DiskTier) -> None:
        """Check every entry, and give the tier those it has lost; raises DamagedSessionError."""
        place = self._place(session.name, session.owner)
        for _, key in session.prompt.keys(session.prompt.root):
            pinned = place / _name(key)
            with contextlib.suppress(FileNotFoundError):
                if decode(pinned.read_bytes(), key) is not None:
                    link = pinned.with_suffix(f".{secrets.token_hex(8)}")  # others may load it, too
                    os.link(pinned, link)
                    os.replace(link, tier.path(key))  # of two names of one file it does nothing
                    link.unlink(missing_ok=True)
                    continue
            raise _damaged(session.name)

    def remove(self, name: str, owner: str | None) -> bool:
        """Forget a session, even a damaged one; False: the owner has none of this name.

        Its entries stay in the disk cache until others need the room.
        """
        place = self._place(name, owner)
        existed = place.is_dir()
        for left in self.folder.glob(f"{place.name}.*"):  # else it would get the name later
            with contextlib.suppress(OSError):
                _end_save(left, restores=False)
        shutil.rmtree(place, ignore_errors=True)
        return existed

    def exported(self, session: SavedSession) -> tuple[int, Iterator[bytes]]:
        """The bytes of an exported session: how many, and themselves in pieces.

        Raises:
            DamagedSessionError: an entry is damaged or gone; also from the iterator.
        """
        place, damaged = self._place(session.name, session.owner), _damaged(session.name)
        keys = [key for _, key in session.prompt.keys(session.prompt.root)]
        head = b"".join(encode(session.head()))

        def pieces() -> Iterator[bytes]:
            yield head
            for key in keys:
                try:
                    data = (place / _name(key)).read_bytes()
                except FileNotFoundError:
                    raise damaged from None
                if decode(data, key) is None:
                    raise damaged
                yield data

        try:
            sizes = [(place / _name(key)).stat().st_size for key in keys]
        except FileNotFoundError:
            raise damaged from None
        return len(head) + sum(sizes), pieces()

    def _place(self, name: str, owner: str | None) -> Path:
        digest = blake2b(json.dumps([owner, name]).encode(), digest_size=16, person=b"session")
        return self.folder / digest.hexdigest()


def read_session(file: BinaryIO) -> SavedSession:
    """The session that an exported file begins with; raises DamagedSessionError."""
    return SavedSession.of(read_entry(file, MAX_HEAD_BYTES))


def read_entries(file: BinaryIO, prompt: SavedPrompt, page_bytes: int) -> Iterator[Entry]:
    """The entries that follow in an exported file, each checked.

    Args:
        page_bytes: the largest payload that an entry may have.

    Raises:
        DamagedSessionError: the file is damaged or not whole.
    """
    keys = prompt.keys(prompt.root)
    for number, (_, key) in enumerate(keys, start=1):
        entry = read_entry(file, page_bytes + COPY_BYTES)
        if entry is None or entry.key != key:
            raise DamagedSessionError(
                f"The file is damaged or not whole: entry {number} of {len(keys)} is not what was "
                "saved. Export the session again."
            )
        yield entry


def _end_save(place: Path, *, restores: bool = True) -> None:
    """Remove the rest of a save whose process was killed, unless a process still saves.

    With `restores` a whole session without its name gets it: the kill came between two renames.
    """
    named, folder = place.with_suffix(""), os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(DamagedSessionError, OSError):
            if restores and not named.exists():
                _session_in(place)  # written last
                place.rename(named)
                return
        shutil.rmtree(place)
    finally:
        os.close(folder)


def _written_s(place: Path) -> float:
    """When a folder got its last entry; 0: it is gone."""
    try:
        return place.stat().st_mtime
    except OSError:
        return 0.0


def _damaged(name: str) -> DamagedSessionError:
    return DamagedSessionError(
        f"A page of the session {name} is damaged on the disk, or gone. Remove the session, and "
        "save it again."
    )


def _session_in(place: Path) -> SavedSession:
    return SavedSession.of(decode((place / "session.kv").read_bytes()))


def _name(key: bytes) -> str:
    return f"{key.hex()}.kv"
