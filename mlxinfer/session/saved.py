"""Named sessions: the prompts of a model's slots, saved, loaded, and taken in from files."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from ..cache.disk import DiskTier, Entry
from ..cache.disk.saved import (
    DamagedSessionError,
    SavedPrompt,
    SavedSession,
    SavedSessions,
    read_entries,
    read_session,
)
from ..engine import save_load
from ..errors import InvalidRequestError, OverloadedError, shown
from ..memory import human_bytes
from .session import ADAPTER_NAME, Session

NO_ROOM_S = 30.0


@dataclass(frozen=True, slots=True)
class Client:
    """Who saves and loads."""

    owner: str | None  # of the API key; None: the server has none
    salt: str | None  # of the owner's requests in the prefix cache
    share: float  # part of the disk cache that the owner's sessions may take


class NamedSessions(SavedSessions):
    """The saved sessions in the folder of a disk cache. Every method takes a while.

    Args:
        max_bytes: that it may hold.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        super().__init__(root)
        self.max_bytes = max_bytes
        self._uploading: set[str | None] = set()  # owners
        self._saving: dict[str | None, dict[str, int]] = {}  # owner -> name -> bytes
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def save_slot(
        self, name: str, model: str, session: Session, client: Client, slot: int
    ) -> SavedSession:
        """Save the prompt of a slot."""
        check_session_name(name)
        saving = save_load.Saving((client.owner, slot), client.salt)
        session.engine.change(saving.pieces)
        store, tier = session.engine.call(save_load.open_store)
        saved = SavedSession(
            name=name,
            owner=client.owner,
            model=model,
            created_s=int(time.time()),
            num_bytes=sum(store.page_bytes[group] for _, group in saving.prompt.places),
            prompt=saving.prompt,
        )
        with self._share(saved, client):
            self.save(saved, tier, [key for _, key in saved.prompt.keys(saved.prompt.root)])
        return saved

    @contextmanager
    def _share(self, saved: SavedSession, client: Client) -> Iterator[None]:
        """Keep room for a session while it is saved."""
        with self._lock:
            saving = self._saving.setdefault(client.owner, {})
            held = {
                session.name: session.num_bytes for session in self.all_of(client.owner)
            } | saving
            num_bytes = sum((held | {saved.name: saved.num_bytes}).values())
            if client.share < 1 and num_bytes > self.max_bytes * client.share:
                raise OverloadedError(
                    "Sessions of this key would take more than its share of the disk cache, "
                    f"{client.share:.0%} of {human_bytes(self.max_bytes)}; remove some.",
                    retry_after_s=NO_ROOM_S,
                )
            saving[saved.name] = saved.num_bytes
        try:
            yield
        finally:
            with self._lock:
                saving.pop(saved.name, None)

    def load_slot(self, saved: SavedSession, session: Session, client: Client, slot: int) -> None:
        """Bring a session into memory, as the prompt of a slot."""
        prompt, salt, place = saved.prompt, client.salt, (client.owner, slot)
        if session.engine.call(lambda loop: save_load.root_of(loop, prompt, salt)) != prompt.root:
            raise InvalidRequestError(
                f"The session {saved.name} was saved when the server had other API keys, which "
                "share no cached prefix with this one. Export it, and import the file."
            )
        _, tier = session.engine.call(save_load.open_store)
        self.restore(saved, tier)
        session.engine.call(lambda loop: save_load.load(loop, place, prompt, salt))

    @contextmanager
    def upload(self, owner: str | None) -> Iterator[BinaryIO]:
        """A file for the bytes that `take_in` reads; it is deleted at the end of the block.

        Each owner has one at a time, for it may be as large as the disk cache.
        """
        with self._lock:
            if owner in self._uploading:
                raise OverloadedError(
                    "Another session of this key is being imported; try again when that is done.",
                    retry_after_s=NO_ROOM_S,
                )
            self._uploading.add(owner)
        try:
            with TemporaryFile(dir=self.folder) as file:
                yield file
        finally:
            with self._lock:
                self._uploading.discard(owner)

    def take_in(
        self, file: BinaryIO, name: str | None, model: str, session: Session, client: Client
    ) -> SavedSession:
        """Save the session of an exported file; each of its pages is checked first.

        Args:
            name: None: the name in the file.
            client: to which the session belongs from now on.
        """
        given = read_session(file)
        check_session_name(name or given.name)
        salt = client.salt
        root = session.engine.call(lambda loop: save_load.root_of(loop, given.prompt, salt))
        store, tier = session.engine.call(save_load.open_store)
        sizes, prompt = dict(enumerate(store.page_bytes)), replace(given.prompt, root=root)
        num_bytes = sum(sizes.get(group, 0) for _, group in prompt.places)
        if prompt.page_size != store.page_size:
            raise DamagedSessionError("The file has pages of another length than the model.")
        if num_bytes > self.max_bytes:
            raise _no_room()
        saved = SavedSession(
            name=name or given.name,
            owner=client.owner,
            model=model,
            created_s=given.created_s,
            num_bytes=num_bytes,
            prompt=prompt,
        )

        entries = read_entries(file, given.prompt, max(store.page_bytes))
        with self._share(saved, client):
            self.save(saved, tier, _written(entries, prompt, sizes, tier))
        return saved


def _written(
    entries: Iterator[Entry], prompt: SavedPrompt, sizes: dict[int, int], tier: DiskTier
) -> Iterator[bytes]:
    """Write the entries of a prompt; yields the key of each entry once it is on the disk."""
    places = zip(prompt.keys(prompt.root), prompt.places, entries, strict=True)
    for (parent, key), (_, group), entry in places:
        if entry.payload.nbytes != sizes.get(group):
            raise DamagedSessionError("The file has pages of another size than the model.")
        page = Entry(key, parent, entry.token_ids, entry.payload)
        if tier.read(key) is None and not tier.write_entry(page):
            raise _no_room()
        yield key
    tier.sync()


def _no_room() -> OverloadedError:
    return OverloadedError(
        "The disk cache has no room for the session: remove sessions, raise --disk-cache, or "
        "make room on its disk.",
        retry_after_s=NO_ROOM_S,
    )


def check_session_name(name: str) -> None:
    if not ADAPTER_NAME.fullmatch(name):
        raise InvalidRequestError.of(
            "name", f"is {shown(name)}; expected letters, digits, '.', '_' and '-', 100 at most."
        )
