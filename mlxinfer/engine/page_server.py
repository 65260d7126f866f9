"""Gives the pages of an engine to other servers. No MLX."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any

from ..cache.disk import DiskTier, Entry, encode
from .peers import pages_at_once

if TYPE_CHECKING:
    from .loop import Loop


class PageServer:
    """The pages of an engine, for peers. For any thread.

    Args:
        call: `Engine.call`.
    """

    def __init__(self, call: Callable[[Callable[[Any], Any]], Any]) -> None:
        self._call = call
        self._root: bytes | None = None  # once it is known

    def namespace(self) -> bytes | None:
        """The namespace of their entries; None: it is not known yet, or no pages are given."""
        self._root = self._root or self._call(_root_of)
        return self._root

    def held(self, keys: Seq[bytes]) -> bytes:
        """For each key "1" where memory or disk has its entry, else "0"."""
        disk, in_memory = self._call(partial(_held, keys=keys))
        has = (key in in_memory or (disk is not None and disk.has(key)) for key in keys)
        return b"".join([b"1" if is_held else b"0" for is_held in has])

    def entries(self, keys: Seq[bytes]) -> bytes:
        """The entries of keys, as they lie on the disk, up to the first that is not there.

        A request may ask for `pages_at_once`, and gets no more.
        """
        disk, most = self._call(lambda loop: (loop.store.disk, pages_at_once(loop.store)))
        keys = keys[:most]
        read = self._call(partial(_entries_in_memory, keys=keys))
        in_memory: dict[bytes, Entry] = {entry.key: entry for entry in read}
        parts: list[bytes | memoryview] = []
        for key in keys:
            entry = in_memory.get(key) or (None if disk is None else disk.get(key))
            if entry is None:
                break
            parts += encode(entry)
        return b"".join(parts)


def _root_of(loop: "Loop") -> bytes | None:
    loop.open_tiers()
    return None if loop.store is None else loop.store.root


def _held(loop: "Loop", keys: Seq[bytes]) -> tuple[DiskTier | None, set[bytes]]:
    assert loop.store is not None, "a key is of a namespace"
    pages = loop.store.in_memory(loop.scheduler.kv_manager.prefix, keys)
    return loop.store.disk, {page.entry.key for page in pages}


def _entries_in_memory(loop: "Loop", keys: Seq[bytes]) -> list[Entry]:
    """The entries of the pages with these keys that are in memory and can be read now."""
    assert loop.store is not None, "a key is of a namespace"
    if loop.scheduler.queues.admitted:  # their states are put in place before their first step
        return []
    loop.carry_out_work(loop.store)
    prefix = loop.scheduler.kv_manager.prefix
    return loop.cache.read_out(loop.store.in_memory(prefix, set(keys)))
