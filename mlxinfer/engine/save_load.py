"""Saves and loads the prompts of slots on the engine's thread, between steps.

A slot is a number that a client gives its requests, as llama.cpp's server has them. The last
request of an owner and a slot that ended is the one that is saved.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING

from ..cache.disk import DiskTier
from ..cache.disk.saved import SavedPrompt
from ..errors import InvalidRequestError, OverloadedError, RequestFailedError, shown
from .batch import namespace_of
from .kv_manager import ClientSlot
from .pagestore import PageStore

if TYPE_CHECKING:
    from .loop import Loop

WRITE_S = 0.01  # between two looks whether a chunk is written
IDENTITY = ("weights", "versions", "the page format")  # the order of `disk_identity`
IDENTIFY_S = 30.0  # until weights that are being hashed may be known


def open_store(loop: "Loop") -> tuple[PageStore, DiskTier]:
    """The disk cache of a model; raises InvalidRequestError if it has none."""
    store = loop.store
    if store is None or store.others.form or not loop.config.disk:
        raise InvalidRequestError(
            "Sessions lie in the disk cache, and this model has none; serve it with --disk-cache "
            "SIZE."
            if store is None or not store.others.form
            else "Sessions of a model that is spread over ranks cannot be saved."
        )
    if store.disk is None:
        raise OverloadedError(
            "The model's weights are still being identified for the disk cache; try again later.",
            retry_after_s=IDENTIFY_S,
        )
    return store, store.disk


class Saving:
    """Writes the prompt of a slot to the disk, in pieces for `Engine.change`."""

    def __init__(self, place: ClientSlot, salt: str | None) -> None:
        self._place, self._salt = place, salt
        self.prompt: SavedPrompt

    def pieces(self, loop: "Loop") -> Generator[float]:
        """Write the part of the prompt that the disk lacks. Other steps run between two pieces.

        Raises:
            InvalidRequestError: there is no such prompt, or no room for it.
            OverloadedError: try again later.
            RequestFailedError: a step failed meanwhile, and the cache is lost.
        """
        (store, disk), kv = open_store(loop), loop.scheduler.kv_manager
        loop.carry_out_work(store)
        namespace, ids = kv.prompt_of(self._place)
        adapter, variant, *_ = namespace or (None, 0)
        if namespace != namespace_of(adapter, variant, self._salt):
            raise InvalidRequestError("A prompt with a cache_salt of its own cannot be saved.")
        names = kv.prefix.names(namespace, ids)
        users = kv.prefix.hold_path(kv.prefix.probe(names, limit=len(ids)))
        pages = list(dict.fromkeys(page for of_group in users.values() for page in of_group))
        try:
            for spills in store.chunks(store.lacking(pages)):
                if not all(page.is_named for page in pages):
                    raise RequestFailedError("A step failed; send the request again, then save.")
                store.put(loop.cache.read_out(spills))
                while not disk.flush(0.0):
                    yield WRITE_S
            lacking = store.lacking(pages)
        finally:
            kv.prefix.let_go(users)
        if lacking:
            raise OverloadedError(
                f"The disk cache has no room for {len(lacking)} more entries of the session: "
                "remove sessions, raise --disk-cache, or make room on its disk.",
                retry_after_s=IDENTIFY_S,
            )
        num_pages, places = store.places(names, disk)
        if not num_pages:
            raise InvalidRequestError("The prompt has no whole page that could be saved.")
        self.prompt = SavedPrompt(
            identity=store.identity,
            root=names.root,
            token_ids=tuple(ids[: num_pages * store.page_size]),
            page_size=store.page_size,
            places=tuple(places),
            adapter=adapter,
            rope_variant=variant,
        )


def root_of(loop: "Loop", prompt: SavedPrompt, salt: str | None) -> bytes:
    """The key from which keys of a saved prompt follow here, for requests with this salt.

    Raises:
        InvalidRequestError: the prompt is one of other weights, another version or format.
    """
    store, _ = open_store(loop)
    prefix = loop.scheduler.kv_manager.prefix
    for saved, expected, what in zip(prompt.identity, store.identity, IDENTITY, strict=False):
        if saved != expected:
            raise InvalidRequestError(
                f"The session was saved with {what} {shown(saved)}; here it is {shown(expected)}."
            )
    return prefix.root_of(namespace_of(prompt.adapter, prompt.rope_variant, salt))


def load(loop: "Loop", place: ClientSlot, prompt: SavedPrompt, salt: str | None) -> None:
    """Bring a saved prompt from the disk into memory, until memory is full."""
    namespace = namespace_of(prompt.adapter, prompt.rope_variant, salt)
    loop.scheduler.kv_manager.load(place, (namespace, list(prompt.token_ids)))
