"""Named sessions: the prompts of a model's slots, saved, loaded, and taken in from files."""

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, cast

from ..cache.disk import Entry
from ..cache.disk.saved import (
    DamagedSessionError,
    SavedSession,
    SavedSessions,
    read_entries,
    read_session,
)
from ..engine import saved as on_engine
from ..engine.kv_manager import Place
from ..errors import InvalidRequestError, OverloadedError, shown
from .session import ADAPTER_NAME, Session

__all__ = ["NamedSessions", "SavedSession"]

NO_ROOM_S = 30.0


class NamedSessions(SavedSessions):
    """The saved sessions in the folder of a disk cache. Every method takes a while.

    Args:
        root: the folder of the disk cache.
        max_bytes: that it may hold.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        super().__init__(root)
        self.max_bytes = max_bytes
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def save_slot(
        self, name: str, model: str, session: Session, place: Place, salt: str | None
    ) -> SavedSession:
        """Save the prompt of a slot.

        Args:
            name: of the session; another one of this owner and name is replaced.
            model: its name.
            session: that has the prompt.
            place: owner and slot.
            salt: of the owner's requests.

        Raises:
            InvalidRequestError: the name cannot be one, there is no prompt, or no disk cache.
            OverloadedError: there is no room.
            OSError: the disk refuses.
        """
        check_session_name(name)
        saving = on_engine.Saving(place, salt)
        session.engine.change(saving.pieces)
        store, tier = session.engine.call(on_engine.open_store)
        saved = SavedSession(
            name=name,
            owner=place[0],
            model=model,
            created_s=int(time.time()),
            num_bytes=sum(store.page_bytes[group] for _, group in saving.prompt.places),
            prompt=saving.prompt,
        )
        self.save(saved, tier)
        return saved

    def load_slot(
        self, saved: SavedSession, session: Session, place: Place, salt: str | None
    ) -> None:
        """Bring a session into memory, as the prompt of a slot.

        Raises:
            InvalidRequestError: it is damaged, or one of other weights, versions or keys.
        """
        prompt = saved.prompt
        if session.engine.call(lambda loop: on_engine.root_of(loop, prompt, salt)) != prompt.root:
            raise InvalidRequestError(
                f"The session {saved.name} was saved when the server had other API keys, which "
                "share no cached prefix with this one. Export it, and import the file."
            )
        _, tier = session.engine.call(on_engine.open_store)
        self.restore(saved, tier)
        session.engine.call(lambda loop: on_engine.load(loop, place, prompt, salt))

    def erase_slot(self, session: Session, place: Place) -> int:
        """Forget the prompt of a slot, but what other prompts share or sessions keep; its tokens.

        Raises:
            InvalidRequestError: it has none.
        """
        count: int = session.engine.call(lambda loop: on_engine.erase(loop, place))
        return count

    def new_file(self) -> BinaryIO:
        """A file for the bytes that `take_in` reads; it is deleted when it is closed."""
        return cast(BinaryIO, TemporaryFile(dir=self.folder))  # the caller closes it

    def take_in(
        self,
        file: BinaryIO,
        name: str | None,
        model: str,
        session: Session,
        owner: str | None,
        salt: str | None,
    ) -> SavedSession:
        """Save the session of an exported file; each of its pages is checked first.

        Args:
            file: as `exported` gave it.
            name: None: the name in the file.
            model, owner, salt: that the session has from now on.
            session: the model for which the pages must have been computed.

        Raises:
            InvalidRequestError: the file is damaged, or one of other weights or versions.
            OverloadedError: there is no room.
            OSError: the disk refuses.
        """
        given = read_session(file)
        check_session_name(name or given.name)
        root = session.engine.call(lambda loop: on_engine.root_of(loop, given.prompt, salt))
        store, tier = session.engine.call(on_engine.open_store)
        sizes = dict(enumerate(store.page_bytes))
        prompt = replace(given.prompt, root=root)
        entries = read_entries(file, given.prompt, max(store.page_bytes))
        for (parent, key), (_, group), entry in zip(
            prompt.keys(root), prompt.places, entries, strict=True
        ):
            if entry.payload.nbytes != sizes.get(group):
                raise DamagedSessionError("The file has pages of another size than the model's.")
            own = Entry(key, parent, entry.token_ids, entry.payload)
            if tier.get(key) is None and not tier.write_entry(own):
                raise OverloadedError(
                    "The disk cache has no room for the session: remove sessions, or raise "
                    "--disk-cache.",
                    retry_after_s=NO_ROOM_S,
                )
        tier.sync()
        saved = replace(given, name=name or given.name, owner=owner, model=model, prompt=prompt)
        self.save(saved, tier)
        return saved


def check_session_name(name: str) -> None:
    """Raise InvalidRequestError unless this can be the name of a session."""
    if not ADAPTER_NAME.fullmatch(name):
        raise InvalidRequestError.of(
            "name",
            f"is {shown(name)}; expected letters, digits, '.', '_' and '-', 100 at most.",
        )
